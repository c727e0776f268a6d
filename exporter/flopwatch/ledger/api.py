"""What people ask a ledger, one of its own or an exporter's: GET /v1/runs, GET /v1/runs/record, POST /v1/runs/close.

A run is named in the query, since its name may hold any of `/:@+` and a tenant any character at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool

from flopwatch.http import server as http_server
from flopwatch.ledger.store import Ended, NoSuchRun, Store

# Raises what _ANSWERS has for a request that may not.
Authorize = Callable[[Request], None]

_ANSWERS: dict[type[Exception], int] = {
    http_server.Unauthorized: 401,
    http_server.BodyTimeout: 408,
    http_server.BodyTooLarge: 413,
    NoSuchRun: 404,
    Ended: 409,
}
_STATUSES = ("completed", "stopped")


def runs_router(store: Store, may_read: Authorize, may_close: Authorize) -> APIRouter:
    """Return the paths over a store."""
    router = APIRouter()

    def ask(request: Request, what: Callable[[], Any]) -> Response:
        try:
            may_read(request)
            return Response(json.dumps(what()), media_type="application/json")
        except tuple(_ANSWERS) as error:
            raise _refusal(error) from None

    @router.get("/v1/runs")
    def runs(request: Request) -> Response:
        """Return a few figures of every run that is served."""
        return ask(request, lambda: {"runs": store.listing()})

    @router.get("/v1/runs/record")
    def record(request: Request, run: str, tenant: str | None = None) -> Response:
        """Return the whole record of a run."""
        return ask(request, lambda: store.figures(run, tenant))

    @router.post("/v1/runs/close")
    async def close(request: Request) -> dict[str, Any]:
        """End a run, {"run", "tenant", "status"}, and return what it was before."""
        try:
            may_close(request)
            asked = _asked(await http_server.read_body(request))
            return await run_in_threadpool(store.close_run, *asked)
        except tuple(_ANSWERS) as error:
            raise _refusal(error) from None
        except sqlite3.Error as error:
            raise HTTPException(503, f"not written, try again: {error}") from None

    return router


def _refusal(error: Exception) -> HTTPException:
    several = isinstance(error, NoSuchRun) and error.several
    return HTTPException(409 if several else _ANSWERS[type(error)], str(error))


def _asked(body: bytes) -> tuple[str, str | None, str]:
    """Return run, tenant and status of a request to close. Raises 400."""
    try:
        asked = json.loads(body)
        run, tenant, status = asked["run"], asked.get("tenant"), asked.get("status", "stopped")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise HTTPException(400, 'not {"run": ..., "tenant": ..., "status": ...}') from None
    if not isinstance(run, str) or not isinstance(tenant, str | None) or status not in _STATUSES:
        raise HTTPException(400, f"run and tenant are text, and status is one of {', '.join(_STATUSES)}")
    return run, tenant, status


def of_this_machine(request: Request) -> None:
    """Raise Unauthorized unless the request comes from this machine itself."""
    if request.client is None or request.client.host not in ("127.0.0.1", "::1"):
        raise http_server.Unauthorized("only processes of this machine may do that")
