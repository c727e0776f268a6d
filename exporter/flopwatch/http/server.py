"""HTTP server of exporter, ledger and boards: listeners, tokens, bounded bodies, timeouts and a clean shutdown."""

import asyncio
import contextlib
import hmac
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from flopwatch.http.guard import App
from flopwatch.settings import Address, SettingsError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of a request body
# Seconds to receive the headers of a request and its body, and to wait for a client that reads a response slowly.
HEADERS_TIMEOUT, BODY_TIMEOUT, RESPONSE_TIMEOUT = 10.0, 10.0, 15.0
# Media type and body of a response with status 200, or None to leave the request to the application.
Answer = tuple[str, bytes] | None
# From the body of a request to its response, which may take a while.
Responder = Callable[[bytes], "Answer | asyncio.Future[Answer]"]
# From method, path and headers (names in lower case) of a request to its responder, None for the application to answer.
# Further requests of the connection with the same head have the same responder.
Direct = Callable[[str, str, Mapping[str, str]], "Responder | None"]
# Head of a request that needs no HTTP library. It upgrades no connection, and has no TE, Trailer and the like.
_PLAIN_HEAD = re.compile(
    rb"([A-Z]+) (/[!-~]*) HTTP/1\.1\r\n"
    rb"((?:(?!connection:(?! *(?:close|keep-alive)\r)|expect:|t|upgrade:)[a-z-]+:[ -~]*\r\n)+)\r\n",
    re.I,
)
MAX_DIRECT = 1 << 16  # bytes of a request
KEEP_ALIVE = 75  # seconds that an idle connection is kept: more than between two scrapes or pushes
_LENGTH = re.compile("[0-9]{1,5}")
LINGER = 1.0  # seconds a body may arrive after the response, so that the client can read the response


class BodyTooLarge(ValueError):
    """Error raised for a request body larger than MAX_BYTES."""


class BodyTimeout(ValueError):
    """Error raised if a request body does not arrive within BODY_TIMEOUT, or the client disconnects."""


class Unauthorized(ValueError):
    """Error raised for a request without the right bearer token."""


class UnsupportedType(ValueError):
    """Error raised for a request body that is not declared as JSON."""


def log_to_stderr() -> None:
    """Log to stderr from level INFO on, and uvicorn's own messages only from level ERROR on."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def listener(flag: str, address: Address, backlog: int) -> socket.socket:
    """Return a listening TCP socket. Raises SettingsError, which names the flag to change."""
    host, family = address.place()
    try:
        listening = socket.create_server(
            (host, address.port), family=family, backlog=backlog, dualstack_ipv6=host == "::"
        )
        # asyncio sets this only on sockets whose protocol is IPPROTO_TCP. Without it the second part of a response on a
        # kept connection waits 40 ms for the delayed acknowledgement of the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # create_server() adds the address to strerror
        raise SettingsError(
            f"cannot listen on {address}: {reason}; choose another {flag} HOST:PORT, or port 0 for a free one"
        ) from None


def check_token(flag: str, file: Path | None) -> None:
    """Raise SettingsError if a token file is given but is empty or cannot be read."""
    if file is None:
        return
    try:
        empty = not file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"{flag} {file}: {error.strerror}") from None
    if empty:
        raise SettingsError(f"{flag} {file} is empty; put the token on its first line")


@lru_cache(maxsize=8)
def _token(file: Path, *version: int) -> str:
    """Return the token in a file, which is read once per `version`."""
    return file.read_text().strip()


def authorize(headers: Mapping[str, str], flag: str, token_file: Path | None) -> None:
    """Raise Unauthorized if a token file is given and the request lacks its token. A changed file is read again."""
    if token_file is None:
        return
    try:
        status = token_file.stat()
        token = _token(token_file, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise Unauthorized(f"the token file cannot be read here: {error.strerror}") from None
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token or not hmac.compare_digest(sent.strip().encode(), token.encode()):
        raise Unauthorized(f"send Authorization: Bearer with the token of {flag}")


def require_json(headers: Mapping[str, str]) -> None:
    """Raise UnsupportedType unless the body is JSON. A page of another site cannot send that without permission."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in ("application/json", "application/x-ndjson"):
        raise UnsupportedType(f"send Content-Type: application/json, not {media!r}")


async def read_body(request: Request) -> bytes:
    """Return the body of a request, at most MAX_BYTES. Raises BodyTooLarge or BodyTimeout."""
    content = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            content.extend(chunk)
            if len(content) > MAX_BYTES:
                raise BodyTooLarge(f"the body is larger than {MAX_BYTES} bytes")

    try:
        await asyncio.wait_for(read(), BODY_TIMEOUT)
    except (ClientDisconnect, asyncio.TimeoutError):
        raise BodyTimeout("the body does not arrive") from None
    return bytes(content)


class Server(uvicorn.Server):
    """Server that runs until `end`, and leaves signals to its caller. It never wakes up without a request.

    uvicorn would end the process by the signal, not with status 0, and would wake up ten times a second.
    """

    _wake: Callable[[], object] = bool  # does nothing

    async def main_loop(self) -> None:
        """Wait for `end`."""
        ended = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
        if not self.should_exit:
            await ended.wait()

    def end(self) -> None:
        """Stop the server. Thread-safe."""
        self.should_exit = True
        self._wake()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are."""
        yield


def _date() -> str:
    """Return the time for the header Date. email.utils takes five times as long."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())


class _IdleTimeout:
    """Timer that aborts a connection when it expires."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self, protocol: H11Protocol, seconds: float | None = None) -> None:
        """Start the timer unless it is running. `seconds` replaces its default duration."""
        if self._timer is None:
            seconds = self._seconds if seconds is None else seconds
            self._timer = protocol.loop.call_later(seconds, protocol.transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _no_answer(body: bytes) -> Answer:
    return None


class _Protocol(H11Protocol):
    """One HTTP connection with timeouts for slow requests and for slow readers of a response.

    uvicorn bounds only the pause between two requests. A client that sends a request byte by byte would hold one of
    `max_connections`. A client that reads a response byte by byte would hold the response in memory. At
    `max_connections`, a new connection takes the place of an idle one. `direct` may answer the first requests of a
    connection, without uvicorn and in a tenth of its time.
    """

    def __init__(self, *arguments: Any, direct: Direct | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._direct, self._received = direct, b""
        self._head, self._needed, self._last = b"", 0, False  # of the last request: its head, its size, if it is last
        self._answering = False  # whether the last one is yet to be answered
        self._responder: Responder = _no_answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # the transport of every stream, TLS or not
        self._request_timeout, self._response_timeout = _IdleTimeout(HEADERS_TIMEOUT), _IdleTimeout(RESPONSE_TIMEOUT)
        super().connection_made(transport)
        transport.max_size = MAX_DIRECT  # type: ignore[attr-defined]  # malloc maps the 256 KiB of asyncio each time
        # Pause writing as soon as one byte stays in the buffer. With TLS, 0 would never count as exceeded.
        transport.set_write_buffer_limits(high=1)
        self._request_timeout.start(self)
        self._idle_since, self._address = self.loop.time(), self.client[0] if self.client else ""
        self._make_room()

    def _make_room(self) -> None:
        """At the limit, abort the longest idle connection of the address with the most connections."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        others = [one for one in self.connections if isinstance(one, _Protocol) and one is not self]
        counts = Counter(one._address for one in others)
        idle = [one for one in others if not one._answering and (one.cycle is None or one.cycle.response_complete)]
        if idle:
            oldest = min(idle, key=lambda one: (-counts[one._address], one._idle_since))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive bytes. The request's timeout runs until the headers are complete."""
        if self._direct is not None:
            data = self._received + data if self._received else data
            if self._answering:
                self._received = data
                if len(data) > MAX_DIRECT:
                    self.transport.pause_reading()
                return
            if self._answer(self._direct, data):
                return
            self._direct, self._received = None, b""
        self.server_state.default_headers = [(b"date", _date().encode())]
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._request_timeout.start(self)
        elif not self._answered:
            self._request_timeout.stop()

    def _answer(self, direct: Direct, data: bytes) -> bool:
        """Answer the request once its body is complete. Return False to leave the request to uvicorn."""
        if not (self._head and data.startswith(self._head)) and not self._read_head(direct, data):
            return False
        if len(data) < self._needed:
            self._received = data
            self._request_timeout.start(self)
            return True
        self._received = b""
        if len(data) > self._needed:
            return False
        try:
            answer = self._responder(data[len(self._head) :])
        except Exception:
            log.exception("request left to the application head=%r", self._head)
            return False
        if isinstance(answer, asyncio.Future):
            self._received, self._answering = data, True
            self._request_timeout.stop()
            answer.add_done_callback(self._answer_later)
            return True
        return self._respond(answer)

    def _read_head(self, direct: Direct, data: bytes) -> bool:
        """Look up the responder to the head of a request. Return False to leave the request to uvicorn."""
        head = _PLAIN_HEAD.match(data)
        if head is None or len(data) > MAX_DIRECT:
            return False
        lines = [line.partition(":") for line in head[3].decode().splitlines()]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        length = headers.get("content-length", "")
        if "host" not in headers or len(headers) < len(lines) or not _LENGTH.fullmatch(length):
            return False
        responder = direct(head[1].decode(), head[2].decode(), headers)
        self._needed = head.end() + int(length)
        if responder is None or self._needed > MAX_DIRECT:
            return False
        self._head, self._responder, self._last = head[0], responder, headers.get("connection", "").lower() == "close"
        return True

    def _answer_later(self, answer: "asyncio.Future[Answer]") -> None:
        data, self._received, self._answering = self._received, b"", False
        self._head, self._responder = b"", _no_answer  # a connection that waits for long keeps as little as it can
        if self.transport.is_closing():
            return
        if self._respond(answer.result()):
            data = data[self._needed :]  # of the next request
        else:
            self._direct = None
        self.transport.resume_reading()
        if data and not self.transport.is_closing():
            self.data_received(data)

    def _respond(self, answer: Answer) -> bool:
        """Send a response. Return whether there is one."""
        if answer is None:
            return False
        media, body = answer
        fields = f"date: {_date()}\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n"
        close = "connection: close\r\n" if self._last else ""
        self.transport.write(f"HTTP/1.1 200 OK\r\n{fields}{close}\r\n".encode() + body)
        if self._last:
            self.transport.close()
        else:
            self._request_timeout.stop()
            self._idle_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_handler()
        return True

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for long, else look again. A direct answer restarts no timer."""
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        """Stop the request's timeout, or grant LINGER to a body that still arrives."""
        self._request_timeout.stop()
        if self._answered:
            self._request_timeout.start(self, LINGER)
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def _answered(self) -> bool:
        """Return whether the response was sent before the whole request had arrived."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read the response."""
        super().pause_writing()
        self._response_timeout.start(self)

    def resume_writing(self) -> None:
        """Stop the response's timeout, because the client has read everything."""
        super().resume_writing()
        self._response_timeout.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_timeout.stop()
        self._response_timeout.stop()
        self._unset_keepalive_if_required()  # uvicorn does so only without an error
        self._head = self._received = b""
        self.transport._read_ready_cb = None  # type: ignore[attr-defined]  # breaks a cycle in asyncio
        super().connection_lost(exc)


def server(app: App, max_connections: int | None = None, direct: Direct | None = None) -> Server:
    """Return a server for an ASGI application. `serve([socket])` runs the server until `end()`."""
    return Server(
        uvicorn.Config(
            app,
            http=partial(_Protocol, direct=direct),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=max_connections,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
    )


async def until_stopped(server: Server, listening: socket.socket, message: str) -> None:
    """Serve until SIGTERM or Ctrl-C. Log `message` once requests are accepted, with the address for its %s."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    running = asyncio.ensure_future(server.serve([listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    log.info(message, Address(*listening.getsockname()[:2]))
    await stop.wait()
    log.info("stopping")
    server.end()
    await running
