"""The exporter's HTTP applications, served in this process."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.http.server import server
from flopwatch.node.app import metrics_app, otlp_app, small_pushes
from flopwatch.node.scrape.reader import Reading, failure
from flopwatch.node.scrape.scrape import Registry, Scrape
from flopwatch.node.telemetry.otlp import PROTOBUF
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.machine import PATIENCE


class Gpus:
    """A source with one reading, whose driver the test can hang."""

    name = "nvml"

    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.hanging = False
        self.released = threading.Event()
        self.samples: list[Sample] = [(m.GPU_POWER_WATTS, ("0", "GPU-a"), 310_500)]

    def ask(self, deadline: float) -> Reading:
        self.deadlines.append(deadline)
        if self.hanging:
            self.released.wait(deadline)
            return failure("deadline")
        return Reading(self.samples)


@dataclass
class Node:
    """An exporter whose two listeners run in a thread."""

    metrics: int
    otlp: int
    gpus: Gpus
    telemetry: Telemetry
    connections: set[Any]  # those to the listener of the metrics

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return ask(self.metrics, "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, body: bytes, media: str = PROTOBUF, **headers: str) -> tuple[int, dict[str, str], bytes]:
        sent = {"Content-Type": media, **{k.replace("_", "-"): v for k, v in headers.items()}}
        return ask(self.otlp, "POST", "/v1/metrics", body, sent)


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


@contextmanager
def running(
    token_file: Path | None = None,
    host: str = "node-7",
    send_buffer: int = 0,
    deadline: float = PATIENCE,
    max_connections: int | None = None,
) -> Iterator[Node]:
    """Run both applications as the exporter does; `send_buffer` is what the kernel keeps of an answer, in bytes."""
    settings = ExporterSettings(host=host, scrape_deadline=deadline)
    registry = Registry()
    gpus, telemetry = Gpus(), Telemetry(settings, registry)
    scrape = Scrape([gpus], [telemetry], settings, registry)
    servers = [
        server(metrics_app(scrape, telemetry, settings, lambda: True)),
        server(otlp_app(telemetry, token_file), max_connections, small_pushes(telemetry, token_file, ())),
    ]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in servers]
    if send_buffer:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

    async def serve() -> None:
        await asyncio.gather(*(one.serve([sock]) for one, sock in zip(servers, sockets, strict=True)))

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield Node(
            sockets[0].getsockname()[1],
            sockets[1].getsockname()[1],
            gpus,
            telemetry,
            servers[0].server_state.connections,
        )
    finally:
        gpus.released.set()
        for one in servers:
            one.end()
        thread.join()
        scrape.close()
