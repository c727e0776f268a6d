"""HTTP server of the cluster's ledger. POST /v1/snapshots takes records of exporters, GET /metrics serves samples."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import sqlite3
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse

import flopwatch
from flopwatch import catalogue as m
from flopwatch.http import server as http_server
from flopwatch.http.exposition import OPENMETRICS, Exposition, content_type
from flopwatch.http.guard import guarded, own_names, refuses
from flopwatch.http.web_config import Web
from flopwatch.ledger.api import STATUS_CODES, runs_router
from flopwatch.ledger.record import RankKey
from flopwatch.ledger.store import Delivery, Store
from flopwatch.settings import LedgerSettings

log = logging.getLogger(__name__)

_REFUSALS: tuple[type[Exception], ...] = (*STATUS_CODES, HTTPException)
PAUSE = 0.005  # seconds between two transactions, so that more deliveries share one
BACKGROUND = 10  # niceness of the threads that compute for long, which the event loop should not wait for
SWITCH = 20e-6  # seconds until a computing thread yields to the event loop, which waits for it several times per record
MAX_FILES, OTHER_FILES = 1 << 16, 64  # open at a time: each exporter keeps a connection
MAX_ANSWER = 500  # bytes that an exporter reads of the answer
_VALUE, _LIST = msgspec.json.Decoder(msgspec.Raw), msgspec.json.Decoder(list[msgspec.Raw])  # values yet to be decoded


class RunFamilies:
    """Page of the families of all runs and of the ledger itself."""

    def __init__(self, store: Store) -> None:
        self._store, self._exposition = store, Exposition()
        self.executor = ThreadPoolExecutor(1, "scrapes", os.nice, (BACKGROUND,))
        # Holds the store's lock for the thread of `executor`, which may wait long for a processor.
        self.reader = ThreadPoolExecutor(1, "samples")
        self.reader.submit(int)  # starts its thread, which would have the low priority of the other one later
        self.deliveries = dict.fromkeys(("accepted", "refused", "failed"), 0)

    def page(self, openmetrics: bool) -> str:
        """Return the page as of now. Only the thread of `executor` may call it."""
        parts = self._store.families(time.time())
        while (part := self.reader.submit(next, parts, None).result()) is not None:
            samples = part
        samples += [(m.FLOPWATCH_LEDGER_REQUESTS_TOTAL, (name,), count) for name, count in self.deliveries.items()]
        samples.append((m.FLOPWATCH_BUILD_INFO, (flopwatch.__version__,), 1))
        return self._exposition.render(samples, openmetrics=openmetrics) + "# EOF\n" * openmetrics


class SmallDeliveries:
    """Answers small deliveries as the guarded `ledger_app` does, and no other request.

    Those that arrive within PAUSE share a transaction, unless the last one was longer ago.
    """

    def __init__(self, store: Store, families: RunFamilies, token_file: Path | None, names: Collection[str]) -> None:
        self._store, self._families, self._token_file, self._names = store, families, token_file, names
        self._waiting: list[tuple[Delivery, asyncio.Future[http_server.Answer]]] = []
        self._writing: asyncio.Task[None] | None = None

    def responder(self, method: str, path: str, headers: Mapping[str, str]) -> http_server.Responder | None:
        """Return the responder to a request with this head, None if the application must answer."""
        if (method, path) != ("POST", "/v1/snapshots") or refuses(method, headers, self._names):
            return None
        return partial(self._answer, headers)

    def _answer(self, headers: Mapping[str, str], body: bytes) -> "asyncio.Future[http_server.Answer] | None":
        """Return the response once the records are on disk. It is None if the application must answer."""
        try:
            http_server.authorize(headers, "--token-file", self._token_file)
            http_server.require_json(headers)
            delivery = self._store.delivery(_records(body))
        except _REFUSALS:
            return None  # the application refuses and counts it
        answer: asyncio.Future[http_server.Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, answer))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return answer

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._store.write, [delivery for delivery, _ in waiting])
            except Exception:
                log.exception("ledger: %d deliveries left to the application", len(waiting))
            finally:
                for delivery, answer in waiting:
                    written = delivery.done and delivery.error is None
                    self._families.deliveries["accepted"] += written
                    # If it is not written, the application tries again.
                    reply = "application/json", _answer(len(delivery.records), delivery.wanted)
                    answer.set_result(reply if written else None)
            await asyncio.sleep(PAUSE)


def ledger_app(store: Store, token_file: Path | None, families: RunFamilies) -> FastAPI:
    """Return an app that serves /v1/snapshots, /v1/runs, /metrics and /healthz. `token_file` has the token of /v1/."""
    app = FastAPI(title="flopwatch ledger", docs_url=None, redoc_url=None, openapi_url=None)

    def authorize(request: Request) -> None:
        http_server.authorize(request.headers, "--token-file", token_file)

    @app.post("/v1/snapshots")
    async def snapshots(request: Request) -> Response:
        """Apply all records in the body, or none: a JSON list, or one JSON object per line."""
        outcome = "refused"
        try:
            authorize(request)
            http_server.require_json(request.headers)
            records = _records(await http_server.read_body(request))
            outcome = "failed"
            wanted = await run_in_threadpool(store.apply, records)
            outcome = "accepted"
        except tuple(STATUS_CODES) as error:
            outcome = "refused"
            raise HTTPException(STATUS_CODES[type(error)], str(error)) from None
        except sqlite3.Error as error:
            log.error("ledger: %d records not written: %s", len(records), error)
            raise HTTPException(503, f"not written, send again: {error}") from None
        finally:
            families.deliveries[outcome] += 1
        return Response(_answer(len(records), wanted), media_type="application/json")

    app.include_router(runs_router(store, authorize, authorize))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        media = content_type(request.headers.get("accept", ""))
        page = await asyncio.get_running_loop().run_in_executor(families.executor, families.page, media == OPENMETRICS)
        return Response(page, headers={"content-type": media, "vary": "Accept"})

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    return app


def _answer(count: int, wanted: list[RankKey]) -> bytes:
    """Return the answer to `count` records, with the ranks whose stacks are requested as far as they fit."""
    while len(body := msgspec.json.encode({"accepted": count} | ({"stacks": wanted} if wanted else {}))) > MAX_ANSWER:
        wanted.pop()
    return body


def _records(body: bytes) -> list[msgspec.Raw]:
    """Return the JSON values in a body: a JSON list, or one value per line. Raises HTTPException 400 if malformed."""
    try:
        return _LIST.decode(body) if body.lstrip().startswith(b"[") else _VALUE.decode_lines(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"not a JSON list, nor one JSON object per line: {error}") from None


def run(settings: LedgerSettings) -> None:
    """Serve the ledger until SIGTERM or Ctrl-C. Raises SettingsError if the settings do not work on this machine."""
    http_server.log_to_stderr()
    http_server.check_token("--token-file", settings.token_file)
    web = None if settings.web_config is None else Web(settings.web_config)
    # By default, a collection of all objects takes a third of a second with 16,384 hosts, and one is made every 15 s.
    # Those of the youngest objects are small, since each holds up the event loop.
    gc.set_threshold(5_000, 8, 100)
    sys.setswitchinterval(SWITCH)
    with contextlib.ExitStack() as opened:
        executor = opened.enter_context(ThreadPoolExecutor(1, "verdicts", os.nice, (BACKGROUND,)))
        executor.submit(import_module, "flopwatch.ledger.rank_waits")  # numpy takes long, and no record should wait
        listener = opened.enter_context(http_server.listener("--listen", settings.listen, backlog=1024))
        seconds = {name: getattr(settings, name) for name in ("silent_after", "new_for", "abandoned_after")}
        store = Store(settings.state / "ledger.sqlite", executor=executor, **seconds)
        opened.enter_context(contextlib.closing(store))
        # Paths that need the token need no user. Without a token, the users of the web configuration guard all paths.
        own = "/v1/" if settings.token_file is not None else None
        families = RunFamilies(store)
        opened.callback(families.reader.shutdown)
        opened.callback(families.executor.shutdown, cancel_futures=True)
        app = ledger_app(store, settings.token_file, families)
        _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(allowed, MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, allowed))
        names = own_names(settings.listen, authenticated=web is not None or settings.token_file is not None)
        small = SmallDeliveries(store, families, settings.token_file, names) if web is None else None
        served = guarded(app if web is None else web.protect(app, own), names)
        server = http_server.server(served, files - OTHER_FILES, None if small is None else small.responder)
        if web is not None:
            web.secure(server.config)
        asyncio.run(http_server.until_stopped(server, listener, "listening ledger=%s"))
