"""From a snapshot of the hook to the node's exporter: opentelemetry's instruments, OTLP protobuf, one POST over HTTP.

Deaf to its surroundings: the provider is never global and is given everything that opentelemetry would look up in
OTEL_* variables; http.client knows neither proxies nor variables; address and timeouts are set here. Format:
https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/metrics/v1/metrics.proto
"""

from __future__ import annotations

import gzip
import http.client
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData, ResourceMetrics
from opentelemetry.sdk.resources import Resource

from flopwatch import __version__
from flopwatch.catalogue import TRAINING_STEP_DURATION, Metric, all_metrics

if TYPE_CHECKING:
    from flopwatch.training.hook import Snapshot

SCOPE = "flopwatch.training"
TIMEOUT = 2.0  # seconds, for the connection and for each wait of a request


class Undelivered(Exception):
    """A push did not arrive, or was refused; the message says which."""


class _Provider(MeterProvider):
    """A provider that no variable can configure and that does nothing in a forked process."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        super().__init__([reader], Resource({}), AlwaysOffExemplarFilter(), shutdown_on_exit=False)
        self._disabled = False  # whatever OTEL_SDK_DISABLED says

    def _handle_fork(self) -> None:
        """Do nothing: the SDK would run resource detectors in every DataLoader worker."""


class Wire:
    """Encodes snapshots of one process and posts them to `endpoint`; used by one thread at a time."""

    def __init__(self, endpoint: str, start_unix: float, token_file: Path | None) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"endpoint {endpoint!r}: write http://HOST:PORT of this node's exporter")
        self._host, self._port = parts.hostname, parts.port or 4318
        self._path = parts.path.rstrip("/") + "/v1/metrics"
        self.url = f"http://{self._host}:{self._port}{self._path}"
        self._token_file = token_file
        self._start = int(start_unix * 1e9)
        self._points: dict[Metric, list[tuple[dict[str, str], float]]] = {}
        self._reader = InMemoryMetricReader()
        self._provider = _Provider(self._reader)
        meter = self._provider.get_meter(SCOPE, __version__)
        for metric in all_metrics():
            if metric.domain == "training" and metric.type == "counter":
                meter.create_observable_counter(metric.name, [self._observe(metric)])
            elif metric.domain == "training" and metric.type != "histogram":
                meter.create_observable_gauge(metric.name, [self._observe(metric)])

    def _observe(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(value, labels) for labels, value in self._points.get(metric, ())]

    def encode(self, snapshot: Snapshot) -> bytes:
        """Return the snapshot as an OTLP ExportMetricsServiceRequest."""
        self._points = snapshot.points
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in (data.resource_metrics if data is not None else ())
                  for scope in resource.scope_metrics if scope.scope.name == SCOPE]
        request: ExportMetricsServiceRequest = encode_metrics(
            MetricsData([ResourceMetrics(Resource(snapshot.resource), scopes, schema_url="")]))
        metrics = request.resource_metrics[0].scope_metrics[0].metrics
        if snapshot.step_durations is not None:
            bounds, counts, total = snapshot.step_durations
            metrics.add(name=TRAINING_STEP_DURATION.name, histogram=metrics_pb2.Histogram(
                aggregation_temporality=metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE,
                data_points=[metrics_pb2.HistogramDataPoint(
                    count=sum(counts), sum=total, bucket_counts=counts, explicit_bounds=bounds)]))
        now = time.time_ns()
        for metric in metrics:
            for point in getattr(metric, metric.WhichOneof("data") or "gauge").data_points:
                # Everything counts from the process's start; the SDK would say: from the first push.
                point.start_time_unix_nano, point.time_unix_nano = self._start, now
        return bytes(request.SerializeToString())

    def send(self, body: bytes) -> None:
        """Post one encoded snapshot. Raises Undelivered."""
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except OSError as error:
                raise Undelivered(f"no token: {error}") from error
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("POST", self._path, gzip.compress(body, 1), headers)
            response = connection.getresponse()
            answer = response.read(65536)
        except (OSError, http.client.HTTPException) as error:
            raise Undelivered(f"no answer: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Undelivered(f"the answer is {response.status}: {answer[:200].decode(errors='replace')}")
        partial = ExportMetricsServiceResponse.FromString(answer).partial_success
        if partial.rejected_data_points:
            raise Undelivered(f"{partial.rejected_data_points} points were refused: {partial.error_message}")
