"""API of a ledger, standalone or in an exporter: GET /v1/runs and its record and stacks, POST /v1/runs/close."""

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool

from flopwatch.http import server as http_server
from flopwatch.http.guard import LOOPBACK_NAMES, hostname
from flopwatch.ledger.attempt import END_OF_RUN, EndOfRun
from flopwatch.ledger.record import RecordError, refusal
from flopwatch.ledger.store import AlreadyEnded, NoSuchRun, Store
from flopwatch.ledger.tables import stacks_text

# Raises Unauthorized for a request without permission.
Authorize = Callable[[Request], None]

# 408 for a body that does not arrive makes the exporter send it again; 400 would not.
STATUS_CODES: dict[type[Exception], int] = {RecordError: 400, NoSuchRun: 404, AlreadyEnded: 409}
STATUS_CODES |= {http_server.Unauthorized: 401, http_server.BodyTimeout: 408, http_server.BodyTooLarge: 413}
STATUS_CODES |= {http_server.UnsupportedType: 415}


class _End(msgspec.Struct):
    run: str
    tenant: str | None = None
    status: EndOfRun = "stopped"


def runs_router(store: Store, may_read: Authorize, may_close: Authorize) -> APIRouter:
    """Return the API's routes over `store`. `may_read` and `may_close` raise Unauthorized to refuse a request."""
    router = APIRouter()

    def read(request: Request, result: Callable[[], Any], media: str = "application/json") -> Response:
        try:
            may_read(request)
            found = result()
            text = found if isinstance(found, str) else json.dumps(found)
            return Response(text, media_type=media, headers={"X-Content-Type-Options": "nosniff"})
        except tuple(STATUS_CODES) as error:
            raise _refusal(error) from None

    @router.get("/v1/runs")
    def runs(request: Request) -> Response:
        return read(request, lambda: {"runs": store.listing()})

    @router.get("/v1/runs/record")
    def record(request: Request, run: str, tenant: str | None = None) -> Response:
        return read(request, lambda: store.figures(run, tenant))

    @router.get("/v1/runs/stacks")
    def stacks(request: Request, run: str, tenant: str | None = None) -> Response:
        return read(request, lambda: stacks_text(store.figures(run, tenant)), "text/plain")

    @router.post("/v1/runs/close")
    async def close(request: Request) -> dict[str, Any]:
        """End the run that the JSON body {"run", "tenant", "status"} names, and return its previous state."""
        try:
            may_close(request)
            http_server.require_json(request.headers)
            end = msgspec.json.decode(await http_server.read_body(request), type=_End)
            return await run_in_threadpool(store.close_run, end.run, end.tenant, end.status)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = refusal(error, status=END_OF_RUN)
            raise HTTPException(400, f'not {{"run": ..., "tenant": ..., "status": ...}}: {reason}') from None
        except tuple(STATUS_CODES) as error:
            raise _refusal(error) from None
        except sqlite3.Error as error:
            raise HTTPException(503, f"not written, try again: {error}") from None

    return router


def _refusal(error: Exception) -> HTTPException:
    several = isinstance(error, NoSuchRun) and error.several
    return HTTPException(409 if several else STATUS_CODES[type(error)], str(error))


def of_this_machine(request: Request) -> None:
    """Raise Unauthorized unless the client is at 127.0.0.1 or ::1, and requests this server by a loopback name."""
    local = request.client is not None and request.client.host in LOOPBACK_NAMES
    if not local or hostname(request.headers.get("host", "")) not in LOOPBACK_NAMES:
        raise http_server.Unauthorized("only processes on this machine may do that")
