"""What the HTTP servers of exporter, ledger and boards share: listening, tokens, bounded bodies, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import h11
import uvicorn
from fastapi import Request
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from flopwatch.settings import Address, SettingsError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
# A sender that has not delivered its megabyte after this long never will.
BODY_TIMEOUT = 10.0
# Nor one that has not sent its headers, and nobody waits longer than a scrape for what is read a byte at a time.
HEADERS_TIMEOUT = 10.0
TAKING_TIMEOUT = 15.0
# How long a body may go on to arrive after it was answered, so that its sender gets to read the answer.
LINGER = 1.0


class TooLarge(ValueError):
    """The body is larger than MAX_BYTES."""


class NotArriving(ValueError):
    """The body's sender went away or dawdles."""


class Unauthorized(ValueError):
    """The request does not carry the token."""


def log_to_stderr() -> None:
    """Log a line for each change of state, and of uvicorn only what failed."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def listener(flag: str, address: Address, backlog: int) -> socket.socket:
    """Return a listening socket. Raises SettingsError that says which flag to change."""
    host, family = address.place()
    try:
        listening = socket.create_server(
            (host, address.port), family=family, backlog=backlog, dualstack_ipv6=host == "::"
        )
        # asyncio sets this only on sockets made for TCP by name; without it an answer on a kept connection waits 40 ms
        # for the delayed acknowledgement of its first part.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # create_server() adds the address to strerror
        raise SettingsError(
            f"cannot listen on {address}: {reason}; choose another {flag} HOST:PORT, or port 0 for a free one"
        ) from None


def check_token(flag: str, file: Path | None) -> None:
    """Raise SettingsError unless the token file, if there is one, can be read and holds a token."""
    if file is None:
        return
    try:
        empty = not file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"{flag} {file}: {error.strerror}") from None
    if empty:
        raise SettingsError(f"{flag} {file} is empty; put the token on its first line")


def authorize(request: Request, flag: str, token_file: Path | None) -> None:
    """Raise Unauthorized unless the request carries the token, read anew each time so that it can be rotated."""
    if token_file is None:
        return
    try:
        token = token_file.read_text().strip()
    except OSError as error:
        raise Unauthorized(f"the token file cannot be read here: {error.strerror}") from None
    given = request.headers.get("authorization", "")
    if not token or not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Unauthorized(f"send Authorization: Bearer with the token of {flag}")


async def body(request: Request) -> bytes:
    """Return the request's body. Raises TooLarge and NotArriving."""
    content = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            content.extend(chunk)
            if len(content) > MAX_BYTES:
                raise TooLarge(f"the body is larger than {MAX_BYTES} bytes")

    try:
        await asyncio.wait_for(read(), BODY_TIMEOUT)
    except (ClientDisconnect, asyncio.TimeoutError):
        raise NotArriving("the body does not arrive") from None
    return bytes(content)


class _Server(uvicorn.Server):
    """A server that leaves the signals to its caller: uvicorn would end the process by them, not with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Patience:
    """A timer at whose end a connection is cut."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self, protocol: H11Protocol, seconds: float | None = None) -> None:
        """Let the time run, if it does not already."""
        if self._timer is None:
            seconds = self._seconds if seconds is None else seconds
            self._timer = protocol.loop.call_later(seconds, protocol.transport.abort)

    def stop(self) -> None:
        """Be patient again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Protocol(H11Protocol):
    """HTTP on one connection, which ends when its other side neither asks nor takes what it asked for.

    uvicorn bounds only the pause between two requests. A request that arrives a byte at a time would hold one of
    `max_connections` for as long as somebody likes, and an answer that is taken so, its memory.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for a request."""
        assert isinstance(transport, asyncio.Transport)  # as of every stream, TLS or not
        self._arriving, self._leaving = _Patience(HEADERS_TIMEOUT), _Patience(TAKING_TIMEOUT)
        super().connection_made(transport)
        # Every byte that the kernel does not take at once counts as waiting. Not 0: with TLS, nothing would be more.
        transport.set_write_buffer_limits(high=1)
        self._arriving.start(self)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arriving.start(self)
        elif not self._answered:
            self._arriving.stop()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._arriving.stop()
        if self._answered:
            self._arriving.start(self, LINGER)
        super().on_response_complete()

    @property
    def _answered(self) -> bool:
        """Return whether the answer was sent before all of the request had come."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)

    def pause_writing(self) -> None:
        """Start waiting for what was written to be taken."""
        super().pause_writing()
        self._leaving.start(self)

    def resume_writing(self) -> None:
        """Note that everything was taken."""
        super().resume_writing()
        self._leaving.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._arriving.stop()
        self._leaving.stop()
        super().connection_lost(exc)


def server(app: Callable[..., Awaitable[None]], max_connections: int | None = None) -> uvicorn.Server:
    """Return a server for an application; `serve([socket])` runs it, `should_exit` ends it."""
    return _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=1,
        )
    )


async def until_stopped(server: uvicorn.Server, listening: socket.socket, said: str) -> None:
    """Serve until SIGTERM or Ctrl-C; `said` is logged with the address in its %s, once somebody can ask."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    running = asyncio.ensure_future(server.serve([listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    log.info(said, Address(*listening.getsockname()[:2]))
    await stop.wait()
    log.info("stopping")
    server.should_exit = True
    await running
