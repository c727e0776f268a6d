"""Steps that do not end: how long a step of this host's ranks is open, what each has called, and signs of its trouble.

`flopwatch.ledger.record` has the format, and `flopwatch.verdicts.hangs` judges it. A rank that stopped sends no push,
so its last one counts, and the time since.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.telemetry.otlp import Push
from flopwatch.verdicts.overdue import IDLE, LATE, overdue_after

STEPPING = 0.5  # share of the time between two pushes in steps, below which a rank is in another activity
SILENT_AFTER = 50.0  # seconds without a push of a process that lives, which are ten pushes
SILENT_IDLE = 20.0  # the same if the rank's GPU is idle, too
BLOCKED_AFTER = 10.0  # seconds
RECENT = 12.0  # seconds after a push in which its calls are compared with those of other ranks: a push may be lost
SETTLED = 5.0  # seconds of a step after which a GPU that waits has stopped computing
READINGS = 2  # of a GPU since then, without which it gives no sign
USUAL = 3600.0  # seconds in which the highest power of a GPU is its usual one

Call = list[object]


class StepClock(NamedTuple):
    """How long a rank's step is open, by its pushes. The other numbers are those of the last push, in steps and s."""

    seconds: float  # since the last step, in steps and waits for data
    stepping: bool  # not in another activity, such as a checkpoint
    for_data: bool  # waits for the next batch
    steps: float | None = None
    in_step: float = 0.0
    data_stall: float = 0.0
    age: float = 0.0
    ended: float = 0.0  # seconds of the steps that have ended

    @property
    def mean(self) -> float | None:
        """Return the mean seconds of the steps that have ended, None if they are not known."""
        return self.ended / self.steps if self.steps and self.ended > 0 else None

    @classmethod
    def of(cls, push: Push, before: "StepClock | None") -> "StepClock":
        """Return the clock after a push. `before` is that of the push before it of the same process."""
        steps = _value(push, m.TRAINING_STEPS_TOTAL)
        activity = {labels[-1]: value for labels, value in push.of(m.TRAINING_ACTIVITY_SECONDS_TOTAL)}
        now = steps, activity.get("step", 0.0), activity.get("data_stall", 0.0), sum(activity.values())
        if before is None or steps is None or steps != before.steps:
            opened = push.open_step_seconds or 0.0
            return cls(opened, True, False, *now, ended=now[1] - opened)
        passed, in_step, data = now[3] - before.age, now[1] - before.in_step, now[2] - before.data_stall
        if passed <= 0:
            return before
        stepping = in_step + data > STEPPING * passed
        return cls(before.seconds + in_step + data, stepping, data > STEPPING * passed, *now, ended=before.ended)


class _GpuReading(NamedTuple):
    at: float  # on the monotonic clock
    utilization: float | None
    power: float | None  # of the limit
    watts: float | None
    tensor_seconds: float | None
    profiled_seconds: float | None


def _tensor_share(first: _GpuReading, last: _GpuReading) -> float | None:
    """Return the share of the profiled time with active tensor cores, None if nothing was profiled."""
    tensor = _rise(first.tensor_seconds, last.tensor_seconds)
    profiled = _rise(first.profiled_seconds, last.profiled_seconds)
    return tensor / profiled if tensor is not None and profiled else None


def _rise(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else max(0.0, last - first)


@dataclass
class _Gpu:
    readings: deque[_GpuReading] = field(default_factory=lambda: deque(maxlen=5))
    powers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=int(USUAL / SETTLED)))


class GpuActivity:
    """Store of the last readings of each GPU, and of GPUs and ports that are down, from the samples of scrapes."""

    _TENSOR = (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, m.GPU_PROFILED_SECONDS_TOTAL)
    _ROWS = (m.GPU_UTILIZATION_RATIO, m.GPU_POWER_WATTS, m.GPU_POWER_LIMIT_WATTS, *_TENSOR, m.GPU_PRESENT)
    _READ = frozenset(row.name for row in _ROWS)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: dict[str, _Gpu] = {}
        self.lost: frozenset[str] = frozenset()  # UUIDs of the GPUs that no longer answer

    def observe(self, samples: Iterable[Sample]) -> None:
        """Store the readings of a scrape."""
        found: dict[str, dict[str, float]] = {}
        for row, labels, value in samples:
            if row.name in self._READ:
                found.setdefault(labels[1], {})[row.name] = value * row.scale
        at = self._clock()
        with self._lock:
            self.lost = frozenset(gpu for gpu, values in found.items() if values.get(m.GPU_PRESENT.name) == 0)
            self._gpus = {gpu: self._gpus.get(gpu, _Gpu()) for gpu in found}
            for gpu, values in found.items():
                watts, limit = values.get(m.GPU_POWER_WATTS.name), values.get(m.GPU_POWER_LIMIT_WATTS.name)
                power = watts / limit if watts is not None and limit else None
                tensor, profiled = (values.get(row.name) for row in self._TENSOR)
                one = self._gpus[gpu]
                busy = values.get(m.GPU_UTILIZATION_RATIO.name)
                one.readings.append(_GpuReading(at, busy, power, watts, tensor, profiled))
                if watts is not None:
                    one.powers.append((at, watts))

    def lacks(self, began: float) -> bool:
        """Return whether a GPU has fewer than READINGS since `began`, on the monotonic clock."""
        with self._lock:
            return any(sum(one.at >= began for one in gpu.readings) < READINGS for gpu in self._gpus.values())

    def since(self, gpu: str, began: float) -> list[float | None] | None:
        """Return what a GPU did since `began`, on the monotonic clock, or None with fewer than READINGS since then.

        These are its highest utilization, its lowest power as a share of the limit, its highest power as a share of the
        last hour's, and the share of the time with active tensor cores. A number that is not read is None.
        """
        with self._lock:
            one = self._gpus.get(gpu)
            readings = [] if one is None else [reading for reading in one.readings if reading.at >= began]
            if one is None or len(readings) < READINGS:
                return None
            usual = max([watts for at, watts in one.powers if at >= began - USUAL], default=0.0)
        busy, power, watts = (
            [value for reading in readings if (value := getattr(reading, name)) is not None]
            for name in ("utilization", "power", "watts")
        )
        tensor = _tensor_share(readings[0], readings[-1])
        shares = max(busy, default=None), min(power, default=None), max(watts) / usual if watts and usual else None
        return [None if value is None else round(value, 3) for value in (*shares, tensor)]


class RankOfHost(NamedTuple):
    """What is known of a rank: its last push, when it was received, its step, and its process.

    Times are on the monotonic clock. `blocked_since` is None unless the process is blocked, and `end` while it lives.
    """

    push: Push
    received: float
    step: StepClock
    blocked_since: float | None
    end: str | None

    def open_seconds(self, clock: float) -> float:
        """Return for how long the rank's step is open at `clock`, 0 in another activity."""
        return self.step.seconds + clock - self.received if self.step.stepping else 0.0

    def signs(self, clock: float) -> Iterator[str]:
        """Yield the signs of the rank's process that the other ranks wait for it."""
        if self.end is not None:
            yield "silent" if self.end == "silent" else "gone"
            return
        if self.blocked_since is not None and clock - self.blocked_since >= BLOCKED_AFTER:
            yield "blocked"
        elif clock - self.received > SILENT_AFTER:
            yield "silent"
        elif self.step.for_data:
            yield "data"


def seconds_open(ranks: Iterable[RankOfHost], clock: float) -> float:
    """Return for how long the step of the host's live ranks is open, as the last of them to begin it has it.

    Of a rank that has been silent for long it is not known whether its last push was before the step.
    """
    live = [rank for rank in ranks if rank.end is None]
    heard = [rank for rank in live if clock - rank.received <= SILENT_AFTER]
    return min((rank.open_seconds(clock) for rank in heard or live), default=0.0)


def limit_of(ranks: Iterable[RankOfHost], p99: float | None) -> float | None:
    """Return the seconds after which a step is overdue, by `p99` or else the mean step, None before the first."""
    means = [mean for rank in ranks if (mean := rank.step.mean) is not None]
    usual = p99 if p99 is not None else max(means, default=None)
    return None if usual is None else overdue_after(usual)


def is_late(ranks: Collection[RankOfHost], p99: float | None, clock: float, share: float = LATE) -> bool:
    """Return whether the host's ranks are in a step for a share of its limit. With 1.0, the step is overdue."""
    limit = limit_of(ranks, p99)
    return limit is not None and seconds_open(ranks, clock) >= share * limit


class HostParts(NamedTuple):
    """Parts of a host: what its GPUs do, those with a critical Xid and of several runs, and whether a port is down."""

    activity: GpuActivity
    broken: Collection[str] = ()
    shared: Collection[str] = ()
    link_down: bool = False


def field_of(
    ranks: Mapping[int, RankOfHost], p99: float | None, clock: float, now: float, parts: HostParts
) -> dict[str, object] | None:
    """Return the field `open_step` of a record at Unix time `now`, None unless the step is late."""
    seconds, limit = seconds_open(ranks.values(), clock), limit_of(ranks.values(), p99)
    if limit is None or not is_late(ranks.values(), p99, clock):
        return None
    broken = {*parts.broken, *parts.activity.lost}
    rows: list[Call] = []
    for number, rank in sorted(ranks.items()):
        uuid, signs = rank.push.declared("uuid"), list(rank.signs(clock))
        signs += ["gpu"] * (uuid in broken) + ["link"] * parts.link_down
        alone = rank.end is None and uuid not in broken and uuid not in parts.shared
        gpu = parts.activity.since(uuid, clock - seconds + SETTLED) if alone else None
        if "silent" not in signs and clock - rank.received > SILENT_IDLE and gpu and gpu[0] is not None:
            signs += ["silent"] * (gpu[0] < IDLE)
        known = rank.end is not None or not RECENT < clock - rank.received <= SILENT_AFTER
        called = (_value(rank.push, m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER), _groups(rank.push)) if known else (None, [])
        rows.append([number, *called, signs, gpu])
    return {"t": now, "seconds": round(seconds, 3), "overdue_after": round(limit, 3), "ranks": rows}


def groups_of(push: Push) -> frozenset[tuple[str, ...]]:
    """Return the process groups in which a rank has called collectives, without a name for the default one."""
    rows = (m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, m.TRAINING_GROUP_SEQUENCE_NUMBER)
    return frozenset(labels[2:] for row in rows for labels, value in push.of(row) if value > 0)


def _value(push: Push, wanted: Metric) -> float | None:
    return next((value for _, value in push.of(wanted)), None)


def _groups(push: Push) -> list[list[object]]:
    return [[*labels[2:], value] for labels, value in push.of(m.TRAINING_GROUP_SEQUENCE_NUMBER)]
