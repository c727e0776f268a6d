"""The cluster's ledger: POST /v1/snapshots takes records from the node exporters, /metrics serves the run families."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import prometheus_client
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from prometheus_client import core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.ledger.record import RecordError
from flopwatch.ledger.store import Store
from flopwatch.settings import Address, LedgerSettings, SettingsError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
BODY_TIMEOUT = 10.0  # seconds; a sender that has not delivered its megabyte by then never will


class Families(Collector):
    """What prometheus_client asks at a scrape: the run families as of now, and the ledger's own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.deliveries = dict.fromkeys(("accepted", "refused", "failed"), 0)

    def describe(self) -> Iterable[core.Metric]:
        """Return nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterable[core.Metric]:
        """Return the families."""
        samples = self._store.families(time.time())
        samples += [(m.LEDGER_RECEIVED, (outcome,), count) for outcome, count in self.deliveries.items()]
        samples.append((m.FLOPWATCH_INFO, (flopwatch.__version__,), 1))
        families: dict[Metric, core.Metric] = {}
        for row, values, number in samples:
            if row not in families:
                name = row.name.removesuffix("_total").removesuffix("_info")
                families[row] = core.Metric(name, f"{row.help} Source: {row.source}.", row.type)
            # Not add_metric(), which cuts label lists of different lengths to the shorter one.
            families[row].add_sample(row.name, dict(zip(row.labels, values, strict=True)), number)
        return families.values()


def ledger_app(store: Store, token_file: Path | None = None) -> FastAPI:
    """Return /v1/snapshots, /metrics and /healthz over a store."""
    app = FastAPI(title="flopwatch ledger", docs_url=None, redoc_url=None, openapi_url=None)
    registry = prometheus_client.CollectorRegistry()
    families = Families(store)
    registry.register(families)

    @app.post("/v1/snapshots")
    async def snapshots(request: Request) -> dict[str, int]:
        """Take records, all or none: a JSON list, or a JSON object a line."""
        outcome = "refused"
        try:
            if token_file is not None:
                _authorize(request.headers.get("authorization", ""), token_file)
            records = _records(await _body(request))
            outcome = "failed"
            await run_in_threadpool(store.apply, records)
            outcome = "accepted"
        except RecordError as error:
            outcome = "refused"
            raise HTTPException(400, str(error)) from None
        except sqlite3.Error as error:
            log.error("ledger: %d records not written: %s", len(records), error)
            raise HTTPException(503, f"not written, send again: {error}") from None
        finally:
            families.deliveries[outcome] += 1
        return {"accepted": len(records)}

    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        """Return the run families."""
        encode, media = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": media, "vary": "Accept"})

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        """Say that the process is alive."""
        return PlainTextResponse("ok\n")

    return app


def _authorize(authorization: str, token_file: Path) -> None:
    """Raise 401 unless the header carries the token, read anew each time so that it can be rotated."""
    try:
        token = token_file.read_text().strip()
    except OSError as error:
        raise HTTPException(401, f"the ledger cannot read its token file: {error.strerror}") from None
    if not token or not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "send Authorization: Bearer with the token of --token-file")


async def _body(request: Request) -> bytes:
    """Return the body. Raises 413 when it is too large, 400 when its sender goes away or dawdles."""
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > MAX_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BYTES} bytes")

    try:
        await asyncio.wait_for(read(), BODY_TIMEOUT)
    except (ClientDisconnect, asyncio.TimeoutError):
        raise HTTPException(400, "the body does not arrive") from None
    return bytes(body)


def _records(body: bytes) -> list[object]:
    """Return the decoded JSON objects of a list or of lines. Raises 400."""
    try:
        text = body.decode()
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"not a JSON list, nor a JSON object a line: {error}") from None


def run(settings: LedgerSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises SettingsError where these settings cannot work on this machine."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _check_token(settings.token_file)
    with _listener(settings) as listener, contextlib.closing(
        Store(settings.state / "ledger.sqlite", silent_after=settings.silent_after)
    ) as store:
        asyncio.run(_serve(ledger_app(store, settings.token_file), listener))


def _check_token(file: Path | None) -> None:
    if file is None:
        return
    try:
        empty = not file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"--token-file {file}: {error.strerror}") from None
    if empty:
        raise SettingsError(f"--token-file {file} is empty; put the token on its first line")


def _listener(settings: LedgerSettings) -> socket.socket:
    address = settings.listen
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else error  # create_server() adds to strerror
        raise SettingsError(f"cannot listen on {address}: {reason}; choose another --listen") from None


class _Server(uvicorn.Server):
    """A server that leaves the signals to `_serve`: uvicorn would end the process by the signal, not with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, listener: socket.socket) -> None:
    server = _Server(uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=1,
    ))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    log.info("listening ledger=%s", Address(*listener.getsockname()[:2]))
    await stop.wait()
    log.info("stopping")
    server.should_exit = True
    await serving
