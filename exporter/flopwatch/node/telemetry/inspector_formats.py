"""Parsers of what NCCL Inspector and RCCL's inspector write: operations of one rank in one communicator.

JSON lines since 2.28.3, a textfile with a series for each operation in 2.29.7 and with means since 2.30, and metrics
over OTLP (inspector_otel.cc). All durations are in seconds here, and times are Unix time. Unknown keys are ignored.
https://github.com/NVIDIA/nccl/tree/master/plugins/profiler/inspector
"""

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as wire

MAX_LINE = 65536  # bytes: verbose lines have an entry for each channel
MAX_RANKS = 1 << 20  # of a communicator
MAX_SECONDS = 3600.0  # of an operation
MAX_KINDS = 512  # of operations of a process: each has a communicator and perhaps a peer
MAX_SERIES = 2048  # cumulative OTLP series whose last value is kept
SERIES_IDLE = 600.0  # seconds without a point, after which a series may be dropped
COLLECTIVE, SEND, RECEIVE, MEAN, OTHER = "collective", "send", "receive", "mean", "other"
# Only these end on all ranks together, so that the last rank waits least. NCCL's AllGatherV is also a single broadcast.
SYNCHRONIZING = {"allreduce", "allgather", "reducescatter", "alltoall", "all2all"}
_SENDS = {"send": SEND, "recv": RECEIVE}
_LINE = re.compile(r"([a-z0-9_]{1,128})\{(.*)\}\s+(\S{1,64})(?:\s+-?\d{1,20})?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?')
_METRIC = re.compile(r"[nr]ccl_(?:inspector_)?(?:coll|collective|p2p)_exec_time(?:_([a-z]+))?")
_UNITS = {"us": 1e-6, "microseconds": 1e-6, "ms": 1e-3, "milliseconds": 1e-3, "s": 1.0, "seconds": 1.0}
_UNITS |= {"ns": 1e-9, "nanoseconds": 1e-9}


class Member(NamedTuple):
    """Rank in a communicator as the plugin names it: hash and name, empty if unknown, rank (-1) and size (0)."""

    id: str
    name: str
    rank: int
    size: int


class TimedOperation(NamedTuple):
    """Duration of an operation, or with the kind MEAN that of several. `peer` is the place of the other rank."""

    member: Member
    kind: str
    peer: int
    seconds: float
    at: float


@dataclass
class TimedBatch:
    """Operations of a process until `at`: seconds and number of each kind. If `begins`, some before are missing."""

    process: str  # "pid:41000", the GPU's UUID without "GPU-", "GPU3", or else "NAME#RANK" of the communicator
    at: float = 0.0
    begins: bool = False
    sums: defaultdict[tuple[Member, str, int], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0])
    )

    def add(self, operation: TimedOperation) -> bool:
        """Add an operation. Return False if it would be one more than MAX_KINDS."""
        self.at = max(self.at, operation.at)
        if (key := operation[:3]) not in self.sums and len(self.sums) >= MAX_KINDS:
            return False
        total = self.sums[key]
        total[0] += operation.seconds
        total[1] += 1
        return True


def of_line(line: bytes) -> TimedOperation | None:
    """Return the operation in a JSON line, None for another record such as the counts of a dump. Raises ValueError."""
    try:
        found = json.loads(line)
        header, prefix = found["header"], "coll" if "coll_perf" in found else "p2p"
        if f"{prefix}_perf" not in found:
            return None
        perf = found[f"{prefix}_perf"]
        member = _member(header["id"], header.get("comm_name", ""), header["rank"], header["n_ranks"])
        seconds = _seconds(perf[f"{prefix}_exec_time_us"], 1e-6)
        at = _real(found["metadata"]["dump_timestamp_us"]) / 1e6
        if prefix == "coll":
            return TimedOperation(member, _kind(perf["coll"]), -1, seconds, at)
        return TimedOperation(
            member, _SENDS[str(perf["p2p"]).lower()], _rank(perf["p2p_peer"], member.size), seconds, at
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a line of NCCL Inspector: {error!r}"[:200]) from None


def of_textfile(line: str, at: float) -> TimedOperation | None:
    """Return the operation in a line of a textfile, None for another metric. Raises ValueError."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"not a sample: {line[:80]!r}")
    if (unit := _METRIC.fullmatch(match[1])) is None:
        return None
    labels = dict(_LABEL.findall(match[2]))
    return _of_labels(match[1], labels, _seconds(match[3], _UNITS.get(unit[1], 1e-6)), at)


def _of_labels(
    name: str, labels: Mapping[str, str], seconds: float, at: float, *, total: bool = False
) -> TimedOperation:
    size = int(labels.get("nranks", labels.get("n_ranks", "0")))
    rank = labels.get("rank", "")
    identity = next((labels[key] for key in ("comm_id", "comm_hash", "id") if key in labels), "")
    member = _member(identity, labels.get("comm_name", ""), int(rank) if rank else -1, size)
    single = total or "coll_sn" in labels or "p2p_sn" in labels
    if "_p2p_" in name:
        way = _SENDS.get(labels.get("p2p_operation", labels.get("p2p", "")).lower(), OTHER)
        peer = labels.get("p2p_peer", labels.get("peer", ""))
        # Of a mean without a peer neither the pair is known, nor how many operations it is of.
        if way == OTHER or not single or not peer:
            return TimedOperation(member, OTHER, -1, seconds, at)
        place = _rank(int(peer), size)
        if size == 2 and member.rank < 0:
            member = member._replace(rank=1 - place)
        return TimedOperation(member, way, place, seconds, at)
    kind = _kind(labels.get("collective", labels.get("coll", "allreduce")))
    return TimedOperation(member, MEAN if kind == COLLECTIVE and not single else kind, -1, seconds, at)


class Otlp:
    """Translator of OTLP metrics. Cumulative series are kept, so that their increase since the first point counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[int, tuple[float, float]] = {}  # value and time of a series, the least recent first

    def batches(self, resource: wire.ResourceMetrics) -> tuple[list[TimedBatch], int, int]:
        """Return the operations of each process, how many points are malformed, and how many exceed a bound."""
        about, malformed, beyond = _texts(resource.resource.attributes), 0, 0
        found: dict[str, TimedBatch] = {}
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            name = metric.name.replace(".", "_").lower()
            match = _METRIC.fullmatch(name)
            for point, kind in _points(metric) if match is not None else ():
                try:
                    labels = about | _texts(point.attributes)
                    scale = _UNITS.get(metric.unit, _UNITS.get(match[1] if match is not None else "", 1e-6))
                    amount, at = self._amount(name, labels, point, kind), point.time_unix_nano / 1e9
                    if amount is None:
                        beyond += 1
                        continue
                    seconds = _seconds(amount * scale, 1.0, MAX_RANKS)
                    one = _of_labels(name, labels, seconds, at, total=kind != "gauge")
                except (ValueError, LookupError):
                    malformed += 1
                    continue
                process = _process(labels, one.member)
                beyond += not found.setdefault(process, TimedBatch(process)).add(one)
        return [*found.values()], malformed, beyond

    def _amount(self, name: str, labels: Mapping[str, str], point: Any, kind: str) -> float | None:
        """Return the value of a point, or the increase of a cumulative one, None if its series exceeds the bound."""
        value = point.sum if isinstance(point, wire.HistogramDataPoint) else point.as_double or point.as_int
        value = _seconds(value, 1.0, math.inf)
        if kind != "cumulative":
            return value
        key, now = hash((name, frozenset(labels.items()))), self._clock()
        before, _ = self._last.pop(key, (None, 0.0))
        if before is None and len(self._last) >= MAX_SERIES:
            oldest = next(iter(self._last))
            if now - self._last[oldest][1] < SERIES_IDLE:
                return None
            del self._last[oldest]
        self._last[key] = value, now
        return 0.0 if before is None else value - before if value >= before else value


def is_inspector(resource: wire.ResourceMetrics) -> bool:
    """Return whether an OTLP resource is of the plugin, or has durations of NCCL's operations, as no push of a hook."""
    names = (metric.name for scope in resource.scope_metrics for metric in scope.metrics)
    return any(scope.scope.name == "nccl-inspector" for scope in resource.scope_metrics) or any(
        _METRIC.fullmatch(name.replace(".", "_").lower()) is not None for name in names if "ccl" in name[:4]
    )


def _points(metric: wire.Metric) -> Iterator[tuple[wire.NumberDataPoint | wire.HistogramDataPoint, str]]:
    kind = metric.WhichOneof("data")
    if kind in ("gauge", "sum", "histogram"):
        data = getattr(metric, kind)
        delta = kind == "gauge" or data.aggregation_temporality == wire.AGGREGATION_TEMPORALITY_DELTA
        for point in data.data_points:
            yield point, "gauge" if kind == "gauge" else "delta" if delta else "cumulative"


def _texts(attributes: Any) -> dict[str, str]:
    def text(item: KeyValue) -> str:
        kind = item.value.WhichOneof("value")
        return str(getattr(item.value, kind)) if kind in ("string_value", "int_value") else ""

    return {item.key[:128]: value for item in attributes if (value := text(item)) and len(value) <= 256}


def _process(labels: Mapping[str, str], member: Member) -> str:
    pid = labels.get("process.pid", labels.get("pid", ""))
    uuid = labels.get("gpu_uuid", labels.get("gpu.uuid", "")).removeprefix("GPU-")
    gpu = "" if labels.get("rank") else labels.get("gpu", "")
    return f"pid:{pid}" if pid else uuid or gpu or f"{member.name}#{member.rank}"


def _member(identity: object, name: object, rank: object, size: object) -> Member:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_RANKS:
        raise ValueError("not a number of ranks")
    return Member(_text(identity), _text(name), -1 if rank == -1 else _rank(rank, size), size)


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= 256 and value != "unknown" else ""


def _rank(value: object, size: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < (size or MAX_RANKS):
        raise ValueError("not a rank of the communicator")
    return value


def _kind(function: object) -> str:
    return COLLECTIVE if str(function).lower() in SYNCHRONIZING else OTHER


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(number := float(value)):
        raise ValueError("not a number")
    return number


def _seconds(value: object, scale: float, most: float = MAX_SECONDS) -> float:
    seconds = _real(value) * scale
    if not 0 <= seconds <= most:
        raise ValueError("not a duration")
    return seconds
