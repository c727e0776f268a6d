"""What the exporter's and the ledger's HTTP servers share: listening, tokens, bounded bodies, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect

from flopwatch.settings import Address, SettingsError

MAX_BYTES = 1 << 20
# A sender that has not delivered its megabyte after this long never will.
BODY_TIMEOUT = 10.0


class TooLarge(ValueError):
    """The body is larger than MAX_BYTES."""


class NotArriving(ValueError):
    """The body's sender went away or dawdles."""


class Unauthorized(ValueError):
    """The request does not carry the token."""


def log_to_stderr() -> None:
    """Log a line for each change of state, and of uvicorn only what failed."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def listener(flag: str, address: Address, backlog: int) -> socket.socket:
    """Return a listening socket. Raises SettingsError that says which flag to change."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=backlog)
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


def server(app: FastAPI, max_connections: int | None = None) -> uvicorn.Server:
    """Return a server for an application; `serve([socket])` runs it, `should_exit` ends it."""
    return _Server(uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
        limit_concurrency=max_connections, timeout_graceful_shutdown=1,
    ))
