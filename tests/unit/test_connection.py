"""Test the HTTP connection that is kept between requests, with a server that closes it, fails or is silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from flopwatch.connection import KeptConnection
from tests.support.machine import PATIENCE

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Answer = Callable[[socket.socket], bool]  # whether to go on with this connection


class Server:
    """Server that answers each request as the next of `answers` does. It counts connections and requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.connections, self.requests = list(answers), 0, list[bytes]()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while self.answers:
            client, _ = self.listening.accept()
            self.connections += 1
            with client:
                client.settimeout(PATIENCE)
                while self.answers and (request := client.recv(65536)):
                    while not request.endswith(b"body"):
                        request += client.recv(65536)
                    self.requests.append(request)
                    if not self.answers.pop(0)(client):
                        break


def well(client: socket.socket) -> bool:
    client.sendall(OK)
    return True


def then_close(client: socket.socket) -> bool:
    client.sendall(OK)
    return False


def close(client: socket.socket) -> bool:
    return False


def nonsense(client: socket.socket) -> bool:
    client.sendall(b"what?\r\n")
    return False


def long_answer(client: socket.socket) -> bool:
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100)
    return True


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Answer) -> Server:
        servers.append(Server(*answers))
        return servers[-1]

    yield start
    for server in servers:
        while server.answers:  # what was not asked for
            server.answers.clear()
            socket.create_connection(("127.0.0.1", server.port)).close()
        server.thread.join(PATIENCE)
        server.listening.close()


def post(kept: KeptConnection, timeout: float = PATIENCE) -> bytes:
    response, answer = kept.post("/path", b"body", {"Name": "value"}, timeout, 10)
    assert response.status == 200
    return answer


def test_a_connection_is_kept_until_the_server_closes_it(serve: Callable[..., Server]) -> None:
    server = serve(well, well, then_close, well)
    with closing(KeptConnection(f"127.0.0.1:{server.port}", False, None)) as kept:
        assert [post(kept) for _ in range(4)] == [b"ok"] * 4
    assert server.connections == 2
    assert len(server.requests) == 4
    assert server.requests[0].startswith(b"POST /path HTTP/1.1\r\n")
    assert b"\r\nName: value\r\n" in server.requests[0]


def test_a_request_that_a_closed_connection_loses_is_sent_once_more(serve: Callable[..., Server]) -> None:
    server = serve(well, close, well, close, close)
    with closing(KeptConnection(f"127.0.0.1:{server.port}", False, None)) as kept:
        assert [post(kept) for _ in range(2)] == [b"ok"] * 2
        with pytest.raises(ConnectionError):
            post(kept)
    assert len(server.requests) == 5
    assert server.connections == 3


def test_a_request_without_an_answer_in_time_is_not_sent_again(serve: Callable[..., Server]) -> None:
    silent = threading.Event()
    server = serve(well, lambda client: silent.wait(PATIENCE))
    with closing(KeptConnection(f"127.0.0.1:{server.port}", False, None)) as kept:
        post(kept)
        with pytest.raises(TimeoutError):
            post(kept, 0.1)
        silent.set()
    assert len(server.requests) == 2


def test_a_connection_with_the_rest_of_an_answer_is_not_used_again(serve: Callable[..., Server]) -> None:
    server = serve(long_answer, well)
    with closing(KeptConnection(f"127.0.0.1:{server.port}", False, None)) as kept:
        assert [post(kept), post(kept)] == [b"x" * 10, b"ok"]
    assert server.connections == 2


def test_an_answer_that_is_not_http_is_an_error_of_the_request(serve: Callable[..., Server]) -> None:
    server = serve(nonsense, well)
    with closing(KeptConnection(f"127.0.0.1:{server.port}", False, None)) as kept:
        with pytest.raises(OSError, match="BadStatusLine"):
            post(kept)
        assert post(kept) == b"ok"


@pytest.mark.parametrize("host", ["127.0.0.1:port", "a..b", "127.0.0.1:1"])
def test_a_host_that_cannot_be_reached_is_an_error_of_the_request(host: str) -> None:
    with pytest.raises((OSError, ValueError), match=r"."):
        post(KeptConnection(host, False, None))
