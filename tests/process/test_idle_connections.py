"""Connections that are held open without a request, and what they cost a scrape."""

from __future__ import annotations

import http.client
import selectors
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.exporter_process import exporter
from tests.support.machine import PATIENCE

HELD, SCRAPES = 600, 50


@contextmanager
def held(port: int, source: str, request: bytes) -> Iterator[list[int]]:
    """Hold HELD connections from this address, and reopen each as it is closed. Yields the number of reopened ones."""
    reopened, stop = [0], threading.Event()
    ready = selectors.DefaultSelector()

    def connect() -> None:
        connection = socket.create_connection(("127.0.0.1", port), PATIENCE, (source, 0))
        connection.sendall(request)
        ready.register(connection, selectors.EVENT_READ)

    def hold() -> None:
        while not stop.is_set():
            for key, _ in ready.select(0.1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                with suppress(OSError):
                    if connection.recv(4096):
                        continue
                ready.unregister(connection)
                connection.close()
                with suppress(OSError):
                    connect()
                    reopened[0] += 1

    for _ in range(HELD):
        connect()
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield reopened
    finally:
        stop.set()
        thread.join()
        for key in list(ready.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        ready.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "request_sent"), [("127.0.0.1", b""), ("127.0.0.2", b"GET /metrics HTTP/1.1\r\nHost: ")]
)
def test_connections_that_are_held_and_reopened_keep_no_scrape_out(
    tmp_path: Path, source: str, request_sent: bytes
) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "kmsg").touch()
    with exporter(tmp_path / "state", "--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg") as node:
        host, _, port = node.metrics.rpartition(":")
        kept = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        with held(int(port), source, request_sent) as reopened:
            for _ in range(SCRAPES):
                with urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=PATIENCE) as response:
                    assert b"flopwatch_build_info" in response.read()
            if source != "127.0.0.1":  # of an address with few connections, not even an idle one is dropped
                for _ in range(2):
                    kept.request("GET", "/healthz")
                    assert kept.getresponse().read()
        assert reopened[0] > 0
        kept.close()
