"""The two HTTP applications of the exporter: /metrics for Prometheus, and the OTLP intake for training processes."""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.applications import Starlette
from starlette.routing import Route

import flopwatch
from flopwatch.http import server as http_server
from flopwatch.node.scrape.exposition import OPENMETRICS, content_type, gzip_accepted
from flopwatch.node.scrape.scrape import Scrape, scrape_timeout
from flopwatch.node.telemetry import otlp
from flopwatch.node.telemetry.otlp import Refused
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings

INTAKE_THREADS, SMALL = 4, 8192  # bytes: a larger body, which few pushes have, is decoded in one of the threads

_HTTP_STATUS = {"malformed": 400, "unauthorized": 401, "too_large": 413, "unsupported_type": 415}
_OUTCOMES: dict[type[Exception], str] = {
    http_server.Unauthorized: "unauthorized",
    http_server.BodyTooLarge: "too_large",
    http_server.BodyTimeout: "malformed",
}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>flopwatch {host}</title>
<style>body{{font-family:sans-serif;margin:2em}}td,th{{text-align:left;padding:.2em 1.5em .2em 0}}</style></head><body>
<h1>flopwatch {version} on {host}</h1>
<p><a href="metrics">metrics</a> · <a href="readyz">readyz</a> · <a href="healthz">healthz</a></p>
<table><tr><th>source</th><th>state</th></tr>{sources}</table>
<table><tr><th>tenant</th><th>run</th><th>ranks here</th></tr>{runs}</table>
</body></html>
"""


def metrics_app(
    scrape: Scrape, telemetry: Telemetry, settings: ExporterSettings, listening: Callable[[], bool]
) -> FastAPI:
    """Return the application of /metrics, /healthz, /readyz and /. `listening` reports whether both servers are up."""
    app = FastAPI(title="flopwatch", docs_url=None, redoc_url=None, openapi_url=None)

    async def metrics(request: Request) -> Response:
        media = content_type(request.headers.get("accept", ""))
        timeout = scrape_timeout(request.headers.get("x-prometheus-scrape-timeout-seconds"))
        gzipped = gzip_accepted(request.headers.get("accept-encoding", ""))
        body = await scrape.metrics(timeout, openmetrics=media == OPENMETRICS, gzipped=gzipped)
        headers = {"content-type": media, "vary": "Accept, Accept-Encoding"}
        if gzipped:
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers)

    # A plain Starlette route: FastAPI's way of calling an endpoint costs a twentieth of a scrape.
    app.add_route("/metrics", metrics)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        """Return ok as long as the process runs, whatever the state of the hardware."""
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        """Return status 503 until both servers listen and each source has been read once, successfully or not."""
        waiting = [name for name, status in scrape.statuses().items() if status == "not read yet"]
        if not listening():
            waiting.append("listeners")
        if waiting or not scrape.attempted:
            return PlainTextResponse(f"waiting for {', '.join(waiting)}\n", status_code=503)
        return PlainTextResponse("ready\n")

    @app.get("/")
    async def landing() -> HTMLResponse:
        return HTMLResponse(
            _PAGE.format(
                host=escape(settings.host),
                version=escape(flopwatch.__version__),
                sources=_rows(scrape.statuses().items()),
                runs=_rows(telemetry.summary()),
            )
        )

    return app


def _rows(rows: Iterable[tuple[object, ...]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)


def otlp_app(telemetry: Telemetry, token_file: Path | None) -> Starlette:
    """Return the application of POST /v1/metrics, which receives pushes. Requires the token in `token_file`, if any."""
    threads = anyio.CapacityLimiter(INTAKE_THREADS)

    def take(body: bytes, media: str) -> bytes:
        return otlp.response(media, *telemetry.receive(otlp.decode(body, media)))

    async def receive(request: Request) -> Response:
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        try:
            http_server.authorize(request, "--otlp-token-file", token_file)
            if media not in (otlp.PROTOBUF, otlp.JSON) or coding not in ("identity", "gzip"):
                message = f"send {otlp.PROTOBUF} or {otlp.JSON}, plain or gzip, not {media!r} {coding!r}"
                raise Refused("unsupported_type", message)
            body = await http_server.read_body(request)
            body = otlp.inflate(body) if coding == "gzip" else body
            # Decoding a megabyte takes long: it must block neither the event loop of /metrics nor all threads.
            large = len(body) > SMALL
            reply = await anyio.to_thread.run_sync(take, body, media, limiter=threads) if large else take(body, media)
            return Response(reply, media_type=media)
        except (Refused, http_server.Unauthorized, http_server.BodyTooLarge, http_server.BodyTimeout) as error:
            outcome = error.outcome if isinstance(error, Refused) else _OUTCOMES[type(error)]
            telemetry.count(outcome)
            answer = otlp.PROTOBUF if media == otlp.PROTOBUF else otlp.JSON
            return Response(otlp.status(answer, str(error)), status_code=_HTTP_STATUS[outcome], media_type=answer)

    # Without FastAPI, whose way of calling an endpoint costs a third of a push.
    return Starlette(routes=[Route("/v1/metrics", receive, methods=["POST"])])
