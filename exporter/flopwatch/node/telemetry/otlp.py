"""Decoder of OTLP metrics from the training hook into pushes: the identity of a process and its samples.

Wire: https://opentelemetry.io/docs/specs/otlp/#otlphttp, ExportMetricsServiceRequest as protobuf or JSON, gzip allowed.
The sender is not trusted: only training families and their label keys pass, counters must be finite, texts short and
printable, and a body must not inflate beyond MAX_BYTES.
"""

import functools
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as wire

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.stacks import MAX_STACKS
from flopwatch.http import server as http_server
from flopwatch.http.exposition import number

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

SCHEMA = 1
OPEN_STEP, SUBMITTED = "flopwatch.open_step_seconds", "flopwatch.submitted_unix"
MAX_BYTES = http_server.MAX_BYTES  # sent, and inflated
MAX_POINTS = 256  # of one process in one push; the series budgets are 40 of a rank and 30 of a run
MAX_BUCKETS = 32
MAX_TEXT = 256
STATUSES = ("completed", "stopped", "preempted", "resized", "failed")  # best to worst
NAME = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
# The type of an exception, for some with a detail: `KeyError`, `OSError ENOSPC`, `SystemExit 3`.
ENDED_BY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}( -?[A-Z0-9]{1,15})?")

_CLOCK_MARGIN = 24 * 3600.0  # seconds that a process may start in the future, as after a clock was set back
_ROWS = {row.name: row for row in m.all_metrics() if row.domain == "training"}
_DATA = {"counter": "sum", "gauge": "gauge", "info": "gauge", "histogram": "histogram"}


class Refused(Exception):
    """Raised if a push, or a point in it, is refused. The push is counted with `outcome` as its label."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class Push:
    """Push of one training process: its identity, state and samples, and how many points were refused and why."""

    tenant: str
    run: str
    attempt: str
    rank: int
    started: float  # of the process, Unix time
    at: float  # of the snapshot, Unix time
    pid: int = 0
    pid_namespace: int = 0
    pid_start_ticks: int = 0
    submitted: float | None = None
    restored_step: int | None = None
    open_step_seconds: float | None = None
    status: str | None = None
    ended_by: str = ""
    stacks: str = field(default="", repr=False)
    flight_recorder: str = ""  # on, off or unknown
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    refused: int = 0
    reason: str = ""
    foreign_gpu: bool = False

    def stamped(self, now: float) -> "Push":
        """Return the push with its stamps as of `now`, the Unix time at which it was received."""
        at = min(self.at, now)
        if self.started <= at:
            return replace(self, at=at)
        # A start in the future is of a clock that was set back since then. The sum of the activities is the age.
        age = math.fsum(value for _, value in self.of(m.TRAINING_ACTIVITY_SECONDS_TOTAL))
        return replace(self, at=at, started=at - age)

    @functools.cached_property
    def _of(self) -> Mapping[str, list[tuple[tuple[str, ...], float]]]:
        rows = defaultdict(list)
        for row, labels, value in self.samples:
            rows[row.name].append((labels, value))
        return rows

    def of(self, row: Metric) -> Sequence[tuple[tuple[str, ...], float]]:
        """Return labels and value of each sample of a row."""
        return self._of.get(row.name, ())

    def declared(self, label: str) -> str:
        """Return what the rank declared of itself, such as the UUID of its GPU, empty if it is unknown."""
        at = m.TRAINING_RANK_INFO.labels.index(label)
        return next((labels[at] for labels, _ in self.of(m.TRAINING_RANK_INFO)), "")

    def is_older(self, started: float, process: tuple[int, int, int]) -> bool:
        """Return whether this process started before another one, by the kernel's clock where that can tell."""
        ticks, other = self.pid_start_ticks, process[2]
        return ticks < other if 0 < ticks != other > 0 else self.started < started

    @property
    def process(self) -> tuple[int, int, int]:
        """Identity of the process: pid namespace, pid, and start in clock ticks since boot."""
        return self.pid_namespace, self.pid, self.pid_start_ticks


def inflate(body: bytes) -> bytes:
    """Return the content of a gzip body. Raises Refused if it is not gzip, or inflates beyond MAX_BYTES."""
    inflater = zlib.decompressobj(31)
    try:
        content = inflater.decompress(body, MAX_BYTES + 1)
    except zlib.error as error:
        raise Refused("malformed", f"the body is not gzip: {error}") from None
    if len(content) > MAX_BYTES:
        raise Refused("too_large", f"the body inflates to more than {MAX_BYTES} bytes")
    if not inflater.eof or inflater.unused_data:
        raise Refused("malformed", "the gzip body ends too early or too late")
    return content


def decode(body: bytes, media: str) -> service.ExportMetricsServiceRequest:
    """Return the OTLP request in a body of this media type. Raises Refused."""
    try:
        if media == PROTOBUF:
            return service.ExportMetricsServiceRequest.FromString(body)
        if body.lstrip()[:1] != b"{":  # json_format would look for fields in it
            raise DecodeError("no JSON object")
        from google.protobuf import json_format  # 3 MiB, and the hook sends none

        # Ids of exemplars are hexadecimal in OTLP/JSON, and json_format reads base64. They are not used here.
        try:
            return json_format.Parse(body, service.ExportMetricsServiceRequest(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise DecodeError(str(error)) from None
    except (DecodeError, UnicodeError, RecursionError) as error:
        raise Refused("malformed", f"the body is not an OTLP metrics request in {media}: {error}"[:500]) from None


def response(media: str, refused: int, message: str) -> bytes:
    """Return the response body to an accepted request, with a partial success if points were refused."""
    if media == PROTOBUF and not message:
        return b""  # the serialized message
    answer = service.ExportMetricsServiceResponse()
    if message:
        answer.partial_success.rejected_data_points = refused
        answer.partial_success.error_message = message
    if media == PROTOBUF:
        return answer.SerializeToString()
    from google.protobuf import json_format

    return json_format.MessageToJson(answer).encode()


def status(media: str, message: str) -> bytes:
    """Return a google.rpc.Status with this message, the body of an OTLP error."""
    if media == PROTOBUF:
        # The same two fields with the same numbers and types (1 integer, 2 text) as google.rpc.Status.
        return service.ExportMetricsPartialSuccess(error_message=message).SerializeToString()
    return json.dumps({"message": message}).encode()


def push(resource: wire.ResourceMetrics, *, host: str, gpus: Mapping[str, str] | None, now: float) -> Push:
    """Return the push of one process. Raises Refused.

    `gpus` has the whole GPU's UUID by its own and those of its MIG slices (None: unknown). Others are left out.
    """
    metrics = [metric for scope in resource.scope_metrics for metric in scope.metrics]
    # A hook of an older release sends the identity as attributes of the resource.
    identity = _Attributes([*resource.resource.attributes, *(item for metric in metrics for item in metric.metadata)])
    tenant, run, attempt, rank, started, status = _identity(identity, now)
    ended_by, submitted = identity.text("flopwatch.ended_by"), identity.real(SUBMITTED)
    stamped = {"run": run, "rank": str(rank), "tenant": tenant, "attempt": attempt, "host": host}
    samples: dict[tuple[str, tuple[str, ...]], Sample] = {}
    refused, reason, foreign, newest = 0, "", False, 0
    for metric in metrics:
        for row, point, problem in _points(metric):
            newest = max(newest, point.time_unix_nano)
            try:
                if row is None or problem:
                    raise Refused("partial", problem)
                if len(samples) >= MAX_POINTS:
                    raise Refused("partial", f"more than {MAX_POINTS} samples of one process")
                labels = _labels(row, point.attributes, stamped)
                if gpus is not None and labels.get("uuid"):
                    labels["uuid"] = gpus.get(labels["uuid"], "")
                    foreign = foreign or not labels["uuid"]
                values = tuple(labels.values())
                for extra, value in _numbers(row, point):
                    samples[row.name, (*values, *extra)] = row, (*values, *extra), value
            except Refused as error:
                refused += 1
                reason = reason or f"{metric.name[:MAX_TEXT]!r}: {error}"
    return Push(
        tenant,
        run,
        attempt,
        rank,
        started,
        at=taken_at(started, newest, now),
        pid=identity.integer("flopwatch.pid") or 0,
        pid_namespace=identity.integer("flopwatch.pid_namespace") or 0,
        pid_start_ticks=identity.integer("flopwatch.pid_start_ticks") or 0,
        submitted=submitted if submitted is not None and submitted <= now + _CLOCK_MARGIN else None,
        restored_step=identity.integer("flopwatch.restored_step"),
        open_step_seconds=identity.real(OPEN_STEP),
        status=status,
        ended_by=ended_by if status is not None and ENDED_BY.fullmatch(ended_by) is not None else "",
        stacks=identity.text("flopwatch.stacks")[:MAX_STACKS],
        flight_recorder=identity.text("flopwatch.flight_recorder")[:8],
        samples=tuple(samples.values()),
        refused=refused,
        reason=reason,
        foreign_gpu=foreign,
    )


def taken_at(started: float, newest: int, now: float) -> float:
    """Return the Unix time of a snapshot by the newest time of its points, in nanoseconds, 0 if they have none."""
    return max(min(started, now), min(now, newest / 1e9)) if newest > 0 else now


def _identity(sent: "_Attributes", now: float) -> tuple[str, str, str, int, float, str | None]:
    """Return tenant, run, attempt, rank, start and status of a process. Raises Refused."""
    if sent.integer("flopwatch.schema") != SCHEMA:
        raise Refused("invalid", f"flopwatch.schema is not {SCHEMA}: not a push of flopwatch's hook")
    tenant, run, attempt = sent.text("flopwatch.tenant"), sent.text("flopwatch.run"), sent.text("flopwatch.attempt")
    if NAME.fullmatch(run) is None or (tenant and NAME.fullmatch(tenant) is None):
        raise Refused("invalid", f"flopwatch.run and flopwatch.tenant must match {NAME.pattern}")
    if not attempt or not _printable(attempt):
        raise Refused("invalid", "flopwatch.attempt is not a short printable text")
    rank, started = sent.integer("flopwatch.rank"), sent.real("flopwatch.start_unix")
    if rank is None or not 0 <= rank < 1 << 24:
        raise Refused("invalid", "flopwatch.rank is not the rank of a process")
    if started is None or not 0 < started <= now + _CLOCK_MARGIN:
        raise Refused("invalid", "flopwatch.start_unix is not a time until tomorrow")
    status = sent.text("flopwatch.status") or None
    if status is not None and status not in STATUSES:
        raise Refused("invalid", f"flopwatch.status must be one of {', '.join(STATUSES)}")
    return tenant, run, attempt, rank, started, status


def points(resource: wire.ResourceMetrics) -> int:
    """Return the number of data points that one process sent."""
    return sum(len(list(_points(metric))) for scope in resource.scope_metrics for metric in scope.metrics)


class _Attributes:
    """Typed access to OTLP attributes. If one is absent or has another type, it is None or an empty text."""

    def __init__(self, attributes: Iterable[KeyValue]) -> None:
        self._values = {item.key: item.value for item in attributes}

    def _get(self, key: str, *kinds: str) -> object:
        value = self._values.get(key)
        kind = value.WhichOneof("value") if value is not None else None
        return getattr(value, kind) if kind in kinds else None

    def text(self, key: str) -> str:
        value = self._get(key, "string_value")
        return value if isinstance(value, str) else ""

    def integer(self, key: str) -> int | None:
        value = self._get(key, "int_value")
        return value if isinstance(value, int) else None

    def real(self, key: str) -> float | None:
        value = self._get(key, "double_value", "int_value")
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else None


def _printable(text: str) -> bool:
    return len(text) <= MAX_TEXT and text.isprintable()


def _points(metric: wire.Metric) -> Iterator[tuple[Metric | None, wire.NumberDataPoint | wire.HistogramDataPoint, str]]:
    """Yield the points of a metric with its catalogue row, and why to refuse them or an empty text."""
    kind = metric.WhichOneof("data")
    if kind is None:
        return
    row, problem = _ROWS.get(metric.name), ""
    data = getattr(metric, kind)
    if row is None:
        problem = "not a training family of this release's catalogue"
    elif kind != _DATA[row.type]:
        problem = f"a {row.type} arrives as {_DATA[row.type]}, not as {kind}"
    elif kind != "gauge" and data.aggregation_temporality != wire.AGGREGATION_TEMPORALITY_CUMULATIVE:
        problem = "only cumulative values are taken"
    elif kind == "sum" and not data.is_monotonic:
        problem = "a counter is monotonic"
    for point in data.data_points:
        yield row, point, problem


def _labels(row: Metric, attributes: Iterable[KeyValue], stamped: dict[str, str]) -> dict[str, str]:
    """Return the labels of a point in its row's order, with `stamped` in place of the sender's. Raises Refused."""
    sent: dict[str, str] = {}
    for item in attributes:
        if item.key not in row.labels:
            raise Refused("partial", f"{item.key[:MAX_TEXT]!r} is not a label of this family")
        if item.value.WhichOneof("value") != "string_value" or not _printable(item.value.string_value):
            raise Refused("partial", f"the label {item.key!r} is not a short printable text")
        if item.key in ("run", "rank") and item.value.string_value != stamped[item.key]:
            raise Refused("partial", f"the label {item.key!r} is another process's")
        sent[item.key] = item.value.string_value
    sent |= {label: text for label, text in stamped.items() if label in row.labels}
    # A hook of an older release may lack a new label of an info row. On other rows, series would be merged.
    if row.type != "info" and len(sent) != len(row.labels):
        raise Refused("partial", f"the labels are not {', '.join(row.labels)}")
    return {label: sent.get(label, "") for label in row.labels}


def _numbers(row: Metric, point: wire.NumberDataPoint | wire.HistogramDataPoint) -> list[tuple[tuple[str, ...], float]]:
    """Return the values of a point, each with additional label values: `le`, `count` or `sum` of a histogram."""
    if isinstance(point, wire.NumberDataPoint):
        kind = point.WhichOneof("value")
        if kind is None:
            raise Refused("partial", "a point without a value")
        return [((), allowed(row, getattr(point, kind)))]
    return histogram(list(point.explicit_bounds), list(point.bucket_counts), point.sum)


def allowed(row: Metric, sent: float) -> float:
    """Return the value of a point that is no histogram. Raises Refused if the row cannot have it."""
    value = float(sent)
    # A NaN loss is information. A position cannot be NaN.
    if not math.isfinite(value) and row not in (m.TRAINING_LOSS, m.TRAINING_GRAD_NORM):
        raise Refused("partial", "only training_loss and training_grad_norm may be NaN or infinite")
    if row.type == "counter" and not 0 <= value < math.inf:
        raise Refused("partial", "a counter is neither negative nor infinite")
    if row.type == "info" and value != 1:
        raise Refused("partial", "an info series is 1")
    return value


def histogram(bounds: list[float], counts: list[int], observed: float) -> list[tuple[tuple[str, ...], float]]:
    """Return the values of a histogram by its last label. `observed` is the sum of all values. Raises Refused."""
    ascending = all(low < high for low, high in pairwise(bounds))
    if (
        len(counts) != len(bounds) + 1
        or len(counts) > MAX_BUCKETS
        or not ascending
        or not all(map(math.isfinite, [*bounds, observed]))
        or min([observed, *bounds]) < 0
    ):
        raise Refused("partial", "not a histogram with ascending explicit bounds from 0 on")
    numbers: list[tuple[tuple[str, ...], float]] = []
    total = 0
    for bound, count in zip([*bounds, math.inf], counts, strict=True):
        total += count
        numbers.append(((number(bound),), float(total)))
    return [*numbers, (("count",), float(total)), (("sum",), observed)]
