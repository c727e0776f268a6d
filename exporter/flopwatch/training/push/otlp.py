"""OTLP encoding of snapshots, and their delivery to the node's exporter: one HTTP POST each (docs/otlp.md).

Each point has the attributes `run` and `rank`. Metrics have no unit, because translation to Prometheus would append
it to the name. Facts that only the exporter needs are metadata of a metric. As resource attributes they would become
labels, and each change would begin new series. No OTEL_* variable or proxy has an effect. OpenTelemetry's SDK,
whose encoding takes three times as long, reads them.
https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/metrics/v1/metrics.proto
"""

import gzip
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from flopwatch import __version__
from flopwatch.catalogue import TRAINING_STEP_DURATION_SECONDS
from flopwatch.catalogue.stacks import SEND_STACKS
from flopwatch.connection import KeptConnection
from flopwatch.training.recorder import Snapshot

SCOPE = "flopwatch.training"
# Required of every sender of OTLP: https://opentelemetry.io/docs/specs/semconv/resource/service/
RESOURCE = {"service.name": "flopwatch"}
PROTOBUF = "application/x-protobuf"
TIMEOUT = 2.0  # seconds, for the connection and for each read or write
GZIP_FROM = 8192  # bytes of a push, which are few packets: it costs both processes more to compress than to send them


class Undelivered(Exception):
    """Error raised when a push did not arrive or was refused. The message gives the reason."""


class Wire:
    """Sender of snapshots to an OTLP `endpoint`, on one thread at a time. Raises ValueError for a bad URL or header."""

    def __init__(
        self,
        endpoint: str,
        start_unix: float,
        token_file: Path | None,
        headers: str = "",
        headers_file: Path | None = None,
        ca_file: Path | None = None,
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"endpoint {endpoint!r}: write http://HOST:PORT, or https://HOST:PORT")
        secure, host = parts.scheme == "https", parts.hostname
        port = parts.port or (443 if secure else 4318)
        if ca_file is not None and not secure:
            raise ValueError(f"FLOPWATCH_CA_FILE is for https, and the endpoint is {endpoint!r}; nothing is pushed")
        self._path = parts.path.rstrip("/").removesuffix("/v1/metrics") + "/v1/metrics"
        place = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.connection = KeptConnection(place, secure, ca_file)
        self.url = f"{parts.scheme}://{place}{self._path}"
        self._headers = _headers(headers, "FLOPWATCH_HEADERS")
        if any(name.lower() == "authorization" for name in self._headers):
            # A job's environment is in core dumps, in the scheduler's records and in what /proc shows.
            advice = "put Authorization into the file FLOPWATCH_HEADERS_FILE names; nothing is pushed"
            raise ValueError(f"FLOPWATCH_HEADERS: {advice}")
        self._headers_file, self._token_file = headers_file, token_file
        self._start = int(start_unix * 1e9)

    def encode(self, snapshot: Snapshot) -> bytes:
        """Return the snapshot as an OTLP ExportMetricsServiceRequest."""
        # Counters begin at the process's start.
        times = {"start_time_unix_nano": self._start, "time_unix_nano": time.time_ns()}
        identity = {label: snapshot.resource[f"flopwatch.{label}"] for label in ("run", "rank")}
        request = service.ExportMetricsServiceRequest()
        resource = request.resource_metrics.add()
        resource.resource.attributes.extend(_attributes(RESOURCE))
        scope = resource.scope_metrics.add()
        scope.scope.name, scope.scope.version = SCOPE, __version__
        for metric, samples in snapshot.points.items():
            if not samples:
                continue
            sent = scope.metrics.add(name=metric.name)
            if metric.type == "counter":
                sent.sum.aggregation_temporality, sent.sum.is_monotonic = AGGREGATION_TEMPORALITY_CUMULATIVE, True
            data = sent.sum if metric.type == "counter" else sent.gauge
            own = {label: str(value) for label, value in identity.items() if label in metric.labels}
            for labels, value in samples:
                data.data_points.add(attributes=_attributes({**own, **labels}), as_double=value, **times)
        if snapshot.step_durations is not None:
            bounds, counts, total = snapshot.step_durations
            histogram = scope.metrics.add(name=TRAINING_STEP_DURATION_SECONDS.name).histogram
            histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            point = histogram.data_points.add(count=sum(counts), sum=total, **times)
            point.attributes.extend(_attributes({"run": identity["run"]}))
            point.bucket_counts.extend(counts)
            point.explicit_bounds.extend(bounds)
        scope.metrics[0].metadata.extend(_attributes(snapshot.resource))
        return request.SerializeToString()

    def send(self, body: bytes) -> bool:
        """Post one encoded snapshot, and return whether the answer requests stacks. Raises Undelivered."""
        headers = {**self._headers, "Content-Type": PROTOBUF}
        if len(body) >= GZIP_FROM:
            headers["Content-Encoding"], body = "gzip", gzip.compress(body, 1)
        try:
            if self._headers_file is not None:
                headers |= _headers(self._headers_file.read_text().replace("\n", ","), "FLOPWATCH_HEADERS_FILE")
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        except (OSError, ValueError) as error:
            raise Undelivered(f"cannot read the token or the headers: {error}") from error
        try:
            response, answer = self.connection.post(self._path, body, headers, TIMEOUT, 65536)
        except OSError as error:
            raise Undelivered(f"no answer: {error!r}") from error
        if not 200 <= response.status < 300:
            why = answer.decode(errors="replace")
            if response.getheader("Content-Type") == PROTOBUF:
                with suppress(DecodeError):  # a google.rpc.Status, whose message has the same number as this one's
                    why = service.ExportMetricsPartialSuccess.FromString(answer).error_message
            raise Undelivered(f"the answer is {response.status}: {why[:200]}")
        if response.getheader("Content-Type") != PROTOBUF:
            return False  # accepted, with a response that is not protobuf
        try:
            partial = service.ExportMetricsServiceResponse.FromString(answer).partial_success
        except DecodeError as error:
            raise Undelivered(f"the answer is not an OTLP response: {error}") from error
        if partial.rejected_data_points:
            raise Undelivered(f"{partial.rejected_data_points} points were refused: {partial.error_message}")
        return bool(partial.error_message == SEND_STACKS)


def _headers(text: str, variable: str) -> dict[str, str]:
    """Parse headers in the format of OTEL_EXPORTER_OTLP_HEADERS: `name=value,name=value`, values percent-encoded."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError(f"{variable}: write name=value,name=value; nothing is pushed")
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    kinds = {str: "string_value", int: "int_value", float: "double_value"}
    return [KeyValue(key=key, value=AnyValue(**{kinds[type(value)]: value})) for key, value in values.items()]
