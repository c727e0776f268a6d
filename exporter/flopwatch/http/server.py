"""HTTP server of exporter, ledger and boards: listeners, tokens, bounded bodies, timeouts and a clean shutdown."""

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path

import h11
import uvicorn
from fastapi import Request
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from flopwatch.settings import Address, SettingsError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of a request body
# Seconds to receive the headers of a request and its body, and to wait for a client that reads a response slowly.
HEADERS_TIMEOUT, BODY_TIMEOUT, RESPONSE_TIMEOUT = 10.0, 10.0, 15.0
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


def authorize(request: Request, flag: str, token_file: Path | None) -> None:
    """Raise Unauthorized if a token file is given and the request lacks its token. The file is read each time."""
    if token_file is None:
        return
    try:
        token = token_file.read_text().strip()
    except OSError as error:
        raise Unauthorized(f"the token file cannot be read here: {error.strerror}") from None
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token or not hmac.compare_digest(sent.strip().encode(), token.encode()):
        raise Unauthorized(f"send Authorization: Bearer with the token of {flag}")


def require_json(request: Request) -> None:
    """Raise UnsupportedType unless the body is JSON. A page of another site cannot send that without permission."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
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


class _Protocol(H11Protocol):
    """One HTTP connection with timeouts for slow requests and for slow readers of a response.

    uvicorn bounds only the pause between two requests. A client that sends a request byte by byte would hold one of
    `max_connections`. A client that reads a response byte by byte would hold the response in memory. At
    `max_connections`, a new connection takes the place of an idle one.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # the transport of every stream, TLS or not
        self._request_timeout, self._response_timeout = _IdleTimeout(HEADERS_TIMEOUT), _IdleTimeout(RESPONSE_TIMEOUT)
        super().connection_made(transport)
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
        idle = [one for one in others if one.cycle is None or one.cycle.response_complete]
        if idle:
            oldest = min(idle, key=lambda one: (-counts[one._address], one._idle_since))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive bytes. The request's timeout runs until the headers are complete."""
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._request_timeout.start(self)
        elif not self._answered:
            self._request_timeout.stop()

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
        super().connection_lost(exc)


def server(app: Callable[..., Awaitable[None]], max_connections: int | None = None) -> Server:
    """Return a server for an ASGI application. `serve([socket])` runs the server until `end()`."""
    return Server(
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
