"""Server of `flopwatch boards`: the viewer's page, the dashboards as Grafana's JSON, and a proxy to Prometheus.

The browser sends its queries to this server, so that Prometheus' address and token stay on this host. The proxy
forwards only requests that read: https://prometheus.io/docs/prometheus/latest/querying/api/.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware

from flopwatch.http import server as http_server
from flopwatch.http.client import client, read, reason, url_tls
from flopwatch.http.guard import guarded, own_names
from flopwatch.http.web_config import Web
from flopwatch.settings import BoardsSettings, SettingsError

log = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
PAGES = HERE / "page", CHECKOUT / "viewer" / "dist"  # in the wheel, then in a checkout
DASHBOARDS = HERE / "dashboards", CHECKOUT / "helm" / "files" / "dashboards"

READS = re.compile(r"query|query_range|query_exemplars|series|labels|label/[A-Za-z_][A-Za-z0-9_]*/values|metadata")
UPSTREAM_TIMEOUT = 60.0  # seconds
MAX_BYTES = 32 << 20  # of a response of Prometheus; those for a dashboard are far smaller
MAX_QUERIES = 12  # at a time; Prometheus runs 20 queries of all its clients at a time
MAX_CONNECTIONS = 256
# Nothing is loaded from elsewhere, so that label values cannot reach another host even if they get into the markup.
POLICY = (
    "default-src 'self'; img-src 'self' data:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Upstream:
    """Client of the HTTP API of a Prometheus server."""

    def __init__(self, url: str, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        self._url, self._token_file = url.rstrip("/"), token_file
        self._tls = url_tls(url, ca_file)

    def ask(self, path: str, query: str, form: bytes | None) -> tuple[int, bytes]:
        """Return status and JSON of a response, or 502 and an error in JSON without one. A `form` is sent by POST."""
        url = f"{self._url}/api/v1/{path}" + (f"?{query}" if query else "")
        method = "GET" if form is None else "POST"
        headers = {} if form is None else {"Content-Type": "application/x-www-form-urlencoded"}
        try:
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            with (
                client(self._tls, timeout=UPSTREAM_TIMEOUT, headers=headers) as http,
                http.stream(method, url, content=form) as response,
            ):
                body, status = read(response, MAX_BYTES + 1), response.status_code
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            cause = reason(error)
            log.warning("Prometheus does not answer, url=%s error=%r", self._url, str(cause))
            return 502, _error(f"Prometheus does not answer: {cause}; is --prometheus right?")
        if not response.is_success:
            body = body[:100_000]
            try:
                json.loads(body)
            except (ValueError, RecursionError):  # from a proxy, not from Prometheus
                body = _error(f"Prometheus answers {status}: {body[:500].decode(errors='replace')}")
            return status, body
        if len(body) > MAX_BYTES:
            return 502, _error(f"the answer has more than {MAX_BYTES >> 20} MiB; ask for less")
        return status, body


def _error(text: str) -> bytes:
    return json.dumps({"status": "error", "errorType": "viewer", "error": text}).encode()


def dashboards(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the dashboards in the JSON files of a folder, by uid. Raises SettingsError."""
    boards: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            board = json.loads(file.read_text(encoding="utf-8"))
            uid, title = board["uid"], board["title"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise SettingsError(
                f"{file} is no dashboard: {type(error).__name__}: {error}; give --dashboards a folder "
                "of dashboards as Grafana exports them"
            ) from None
        if not isinstance(uid, str) or not isinstance(title, str) or uid in boards:
            raise SettingsError(f"{file}: the uid {uid!r} is another file's too or no text; give it one of its own")
        boards[uid] = board
    if not boards:
        raise SettingsError(f"--dashboards {folder}: no *.json there")
    return boards


def page() -> Path:
    """Return the folder of the built page. Raises SettingsError if the page is not built."""
    for folder in PAGES:
        if (folder / "index.html").is_file():
            return folder
    raise SettingsError(
        "the page is not built; run make viewer (it needs Node 20 or newer), or install the wheel, which has it"
    )


def boards_app(
    boards: Mapping[str, dict[str, Any]], built: Path, upstream: Upstream, *, scrape_interval: float
) -> FastAPI:
    """Return the application: page, /api/boards and /api/prometheus."""
    app = FastAPI(title="flopwatch boards", docs_url=None, redoc_url=None, openapi_url=None)
    limiter = anyio.CapacityLimiter(MAX_QUERIES)
    app.add_middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1)

    @app.middleware("http")
    async def secured(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/api/settings")
    async def settings() -> dict[str, float]:
        """Return the scrape interval in seconds, which the page cannot find out."""
        return {"scrape_interval": scrape_interval}

    @app.get("/api/boards")
    async def listed() -> list[dict[str, Any]]:
        return [
            {"uid": uid, **{name: board.get(name, "") for name in ("title", "description", "tags", "annotations")}}
            for uid, board in boards.items()
        ]

    @app.get("/api/boards/{uid}")
    async def board(uid: str) -> dict[str, Any]:
        if uid not in boards:
            raise HTTPException(404, f"no dashboard {uid}")
        return boards[uid]

    @app.api_route("/api/prometheus/{path:path}", methods=["GET", "POST"])
    async def prometheus(path: str, request: Request) -> Response:
        """Forward a query to Prometheus and return the response."""
        if READS.fullmatch(path) is None:
            raise HTTPException(404, f"{path} is not among what the viewer asks")
        try:
            form = await http_server.read_body(request) if request.method == "POST" else None
        except (http_server.BodyTooLarge, http_server.BodyTimeout) as error:
            raise HTTPException(400, str(error)) from None
        status, body = await anyio.to_thread.run_sync(upstream.ask, path, request.url.query, form, limiter=limiter)
        return Response(body, status, media_type="application/json")

    for folder in ("assets", "public"):
        app.mount(f"/{folder}", StaticFiles(directory=built / folder))

    @app.get("/")
    @app.get("/d/{uid}")
    @app.get("/d/{uid}/{slug}")
    async def index() -> FileResponse:
        """Return the page, whose script finds the dashboard's uid in the browser's address."""
        return FileResponse(built / "index.html", headers={"cache-control": "no-cache"})

    return app


def run(settings: BoardsSettings) -> None:
    """Serve the dashboards until SIGTERM or Ctrl-C. Raises SettingsError if the settings cannot work on this host."""
    http_server.log_to_stderr()
    http_server.check_token("--token-file", settings.token_file)
    web = None if settings.web_config is None else Web(settings.web_config)
    if web is not None and not settings.listen.loopback and not web.config.requires_auth():
        raise SettingsError(
            f"--web-config {settings.web_config} requires no authentication, but {settings.listen} can be reached from "
            "other hosts; add basic_auth_users, or client_auth_type RequireAndVerifyClientCert"
        )
    folder = settings.dashboards or next((path for path in DASHBOARDS if path.is_dir()), DASHBOARDS[0])
    app = boards_app(
        dashboards(folder),
        page(),
        Upstream(settings.prometheus, settings.token_file, settings.ca_file),
        scrape_interval=settings.scrape_interval,
    )
    names = own_names(settings.listen, authenticated=web is not None)
    server = http_server.server(guarded(app if web is None else web.protect(app), names), MAX_CONNECTIONS)
    if web is not None:
        web.secure(server.config)
    scheme = "https" if server.config.is_ssl else "http"
    with http_server.listener("--listen", settings.listen, backlog=128) as listener:
        asyncio.run(http_server.until_stopped(server, listener, f"boards at {scheme}://%s/"))
