"""The two HTTP applications of the exporter: /metrics for Prometheus, and the OTLP intake for training processes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from html import escape
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

import flopwatch
from flopwatch.http import server as http_server
from flopwatch.http.exposition import OPENMETRICS, content_type, gzip_accepted
from flopwatch.http.guard import refuses
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
) -> Starlette:
    """Return the application of /metrics, /healthz, /readyz and /. `listening` reports whether both servers are up."""

    async def metrics(request: Request) -> Response:
        media = content_type(request.headers.get("accept", ""))
        timeout = scrape_timeout(request.headers.get("x-prometheus-scrape-timeout-seconds"))
        gzipped = gzip_accepted(request.headers.get("accept-encoding", ""))
        body = await scrape.metrics(timeout, openmetrics=media == OPENMETRICS, gzipped=gzipped)
        headers = {"content-type": media, "vary": "Accept, Accept-Encoding"}
        if gzipped:
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers)

    async def healthz(request: Request) -> Response:
        """Return ok as long as the process runs, whatever the state of the hardware."""
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        """Return status 503 until both servers listen and each source has been read once, successfully or not."""
        waiting = [name for name, status in scrape.statuses().items() if status == "not read yet"]
        if not listening():
            waiting.append("listeners")
        if waiting or not scrape.attempted:
            return PlainTextResponse(f"waiting for {', '.join(waiting)}\n", status_code=503)
        return PlainTextResponse("ready\n")

    async def landing(request: Request) -> Response:
        return HTMLResponse(
            _PAGE.format(
                host=escape(settings.host),
                version=escape(flopwatch.__version__),
                sources=_rows(scrape.statuses().items()),
                runs=_rows(telemetry.summary()),
            )
        )

    # Without FastAPI, which takes 15 MiB, and a twentieth of a scrape to call an endpoint.
    answers = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz, "/": landing}
    return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in answers.items()])


def _rows(rows: Iterable[tuple[object, ...]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)


def otlp_app(telemetry: Telemetry, token_file: Path | None) -> Starlette:
    """Return the application of POST /v1/metrics, which receives pushes. Requires the token in `token_file`, if any."""
    threads = anyio.CapacityLimiter(INTAKE_THREADS)

    async def receive(request: Request) -> Response:
        media, coding = _content(request.headers)
        try:
            http_server.authorize(request.headers, "--otlp-token-file", token_file)
            if media not in (otlp.PROTOBUF, otlp.JSON) or coding not in ("identity", "gzip"):
                message = f"send {otlp.PROTOBUF} or {otlp.JSON}, plain or gzip, not {media!r} {coding!r}"
                raise Refused("unsupported_type", message)
            body = await http_server.read_body(request)
            body = otlp.inflate(body) if coding == "gzip" else body
            # Decoding a megabyte takes long: it must block neither the event loop of /metrics nor all threads.
            large, take = len(body) > SMALL, partial(_take, telemetry, body, media)
            reply = await anyio.to_thread.run_sync(take, limiter=threads) if large else take()
            return Response(reply, media_type=media)
        except (Refused, http_server.Unauthorized, http_server.BodyTooLarge, http_server.BodyTimeout) as error:
            outcome = error.outcome if isinstance(error, Refused) else _OUTCOMES[type(error)]
            telemetry.count(outcome)
            answer = otlp.PROTOBUF if media == otlp.PROTOBUF else otlp.JSON
            return Response(otlp.status(answer, str(error)), status_code=_HTTP_STATUS[outcome], media_type=answer)

    return Starlette(routes=[Route("/v1/metrics", receive, methods=["POST"])])


def small_pushes(telemetry: Telemetry, token_file: Path | None, names: Collection[str]) -> http_server.Direct:
    """Return the responder to small pushes, which answers as the guarded `otlp_app` does, and no other request."""

    def responder(method: str, path: str, headers: Mapping[str, str]) -> http_server.Responder | None:
        media, coding = _content(headers)
        if (method, path, media) != ("POST", "/v1/metrics", otlp.PROTOBUF) or coding not in ("identity", "gzip"):
            return None

        def answer(body: bytes) -> tuple[str, bytes] | None:
            try:
                http_server.authorize(headers, "--otlp-token-file", token_file)
                body = otlp.inflate(body) if coding == "gzip" else body
                return None if len(body) > SMALL else (media, _take(telemetry, body, media))
            except (Refused, http_server.Unauthorized):
                return None  # the application refuses and counts it

        return None if refuses(method, headers, names) else answer

    return responder


def _content(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the media type and the coding of a request body, in lower case."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    return media, headers.get("content-encoding", "identity").strip().lower()


def _take(telemetry: Telemetry, body: bytes, media: str) -> bytes:
    return otlp.response(media, *telemetry.receive_body(body, media))
