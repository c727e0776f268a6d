"""HTTP server of the cluster's ledger. POST /v1/snapshots takes records of exporters, GET /metrics serves samples."""

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from prometheus_client import core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.http import server as http_server
from flopwatch.http.guard import guarded, own_names
from flopwatch.http.web_config import Web
from flopwatch.ledger.api import STATUS_CODES, runs_router
from flopwatch.ledger.store import Store
from flopwatch.settings import LedgerSettings

log = logging.getLogger(__name__)


class RunFamilies(Collector):
    """Prometheus collector of the families of all runs and of the ledger itself."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.deliveries = dict.fromkeys(("accepted", "refused", "failed"), 0)

    def collect(self) -> Iterable[core.Metric]:
        """Return the families of all runs and of the ledger, as of now."""
        samples = self._store.families(time.time())
        samples += [(m.FLOPWATCH_LEDGER_REQUESTS_TOTAL, (name,), count) for name, count in self.deliveries.items()]
        samples.append((m.FLOPWATCH_BUILD_INFO, (flopwatch.__version__,), 1))
        families: dict[Metric, core.Metric] = {}
        for row, values, number in samples:
            if row not in families:
                name = row.name.removesuffix("_total").removesuffix("_info")
                families[row] = core.Metric(name, f"{row.help} Source: {row.source}.", row.type)
            # add_metric() would cut label lists of different lengths to the shorter one.
            families[row].add_sample(row.name, dict(zip(row.labels, values, strict=True)), number)
        return families.values()


def ledger_app(store: Store, token_file: Path | None = None) -> FastAPI:
    """Return an app that serves /v1/snapshots, /v1/runs, /metrics and /healthz. `token_file` has the token of /v1/."""
    app = FastAPI(title="flopwatch ledger", docs_url=None, redoc_url=None, openapi_url=None)
    families = RunFamilies(store)

    def authorize(request: Request) -> None:
        http_server.authorize(request, "--token-file", token_file)

    @app.post("/v1/snapshots")
    async def snapshots(request: Request) -> dict[str, int]:
        """Apply all records in the body, or none: a JSON list, or one JSON object per line."""
        outcome = "refused"
        try:
            authorize(request)
            http_server.require_json(request)
            records = _records(await http_server.read_body(request))
            outcome = "failed"
            await run_in_threadpool(store.apply, records)
            outcome = "accepted"
        except tuple(STATUS_CODES) as error:
            outcome = "refused"
            raise HTTPException(STATUS_CODES[type(error)], str(error)) from None
        except sqlite3.Error as error:
            log.error("ledger: %d records not written: %s", len(records), error)
            raise HTTPException(503, f"not written, send again: {error}") from None
        finally:
            families.deliveries[outcome] += 1
        return {"accepted": len(records)}

    app.include_router(runs_router(store, authorize, authorize))

    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        encode, media = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(families), headers={"content-type": media, "vary": "Accept"})

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    return app


def _records(body: bytes) -> list[object]:
    """Return the JSON values in a body: a JSON list, or one value per line. Raises HTTPException 400 if malformed."""
    try:
        text = body.decode()
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"not a JSON list, nor one JSON object per line: {error}") from None


def run(settings: LedgerSettings) -> None:
    """Serve the ledger until SIGTERM or Ctrl-C. Raises SettingsError if the settings do not work on this machine."""
    http_server.log_to_stderr()
    http_server.check_token("--token-file", settings.token_file)
    web = None if settings.web_config is None else Web(settings.web_config)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(http_server.listener("--listen", settings.listen, backlog=1024))
        seconds = {name: getattr(settings, name) for name in ("silent_after", "new_for", "abandoned_after")}
        store = opened.enter_context(contextlib.closing(Store(settings.state / "ledger.sqlite", **seconds)))
        # Paths that need the token need no user. Without a token, the users of the web configuration guard all paths.
        own = "/v1/" if settings.token_file is not None else None
        app = ledger_app(store, settings.token_file)
        names = own_names(settings.listen, authenticated=web is not None or settings.token_file is not None)
        server = http_server.server(guarded(app if web is None else web.protect(app, own), names))
        if web is not None:
            web.secure(server.config)
        asyncio.run(http_server.until_stopped(server, listener, "listening ledger=%s"))
