"""A real HTTP server that takes the hook's pushes, and a reader of what they say."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.support import ROOT
from tests.support.machine import PATIENCE


class Push:
    """One request: path, headers, body without gzip, attributes of the process, and samples by `name{label=...}`.

    Of every sample but for its run and rank.
    """

    def __init__(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.request = ExportMetricsServiceRequest.FromString(body)
        (resource,) = self.request.resource_metrics
        (scope,) = resource.scope_metrics
        self.resource = {
            a.key: getattr(a.value, a.value.WhichOneof("value") or "")
            for a in (*resource.resource.attributes, *scope.metrics[0].metadata)
            if a.key.startswith("flopwatch.")
        }
        self.samples: dict[str, float] = {}
        self.histograms: dict[str, tuple[list[int], float]] = {}
        for metric in scope.metrics:
            for point in getattr(metric, metric.WhichOneof("data") or "").data_points:
                labels = ",".join(
                    f"{a.key}={a.value.string_value}" for a in point.attributes if a.key not in ("run", "rank")
                )
                if metric.HasField("histogram"):
                    self.histograms[metric.name] = list(point.bucket_counts), point.sum
                else:
                    self.samples[f"{metric.name}{{{labels}}}" if labels else metric.name] = point.as_double


class HookServer:
    """Answers on a free loopback port with `status`, and keeps every push."""

    def __init__(self, port: int = 0, status: int = 200, answer: bytes = b"") -> None:
        self.pushes: list[Push] = []
        pushes = self.pushes

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
                pushes.append(Push(self.path, dict(self.headers), body))
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> HookServer:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(self, condition: Callable[[Push], bool], seconds: float = PATIENCE) -> Push:
        """Return the first push that meets the condition."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for push in list(self.pushes):
                if condition(push):
                    return push
            time.sleep(0.01)
        raise AssertionError(f"no such push among {len(self.pushes)}")

    def last_words(self, count: int) -> list[Push]:
        """Return the pushes that say how so many runs of this process ended.

        finish() waits for it 1.5 s at most; a machine that stalls that long delivers it afterwards.
        """
        self.wait_for(lambda _: sum("flopwatch.status" in push.resource for push in self.pushes) >= count)
        return [push for push in self.pushes if "flopwatch.status" in push.resource]

    def last_word(self) -> Push:
        """Return the push that reports how the only run ended."""
        (push,) = self.last_words(1)
        return push


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees this checkout's package, and nothing of flopwatch's environment."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": str(ROOT / "exporter"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
