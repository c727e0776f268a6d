"""What one rank did, from its totals at one moment or two: MFU, step time, tokens per second, and where time went."""

from collections import deque
from collections.abc import Iterable, Mapping

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.training.recorder import Snapshot

WINDOW = 30.0  # seconds; live figures are their means

Values = Mapping[tuple[Metric, str], float]  # by family and its last label, such as the activity; "" for none


class Progress:
    """Totals of a rank as of `now`, less those of `before`."""

    def __init__(self, now: Values, before: Values | None = None) -> None:
        self._now, self._before = now, before or {}
        whole = {label: value for (row, label), value in now.items() if row is m.TRAINING_ACTIVITY_SECONDS_TOTAL}
        self.in_steps = whole.get("step", 0.0) / sum(whole.values()) if any(whole.values()) else None  # since its start
        self.seconds = {label: self.rise(m.TRAINING_ACTIVITY_SECONDS_TOTAL, label) for label in whole}  # by activity
        self.stepping = self.seconds.get("step", 0.0) + self.seconds.get("data_stall", 0.0)

    def rise(self, row: Metric, label: str = "") -> float:
        """Return by how much a total rose, 0 without it."""
        return self._now.get((row, label), 0.0) - self._before.get((row, label), 0.0)

    def last(self, row: Metric) -> float | None:
        """Return the newest value of a family without further labels, None without one."""
        return self._now.get((row, ""))

    @property
    def steps(self) -> float:
        """Number of optimizer steps."""
        return self.rise(m.TRAINING_STEPS_TOTAL)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over those of the card's dense peak in the same steps, None if either is unknown."""
        flops, capacity = self.rise(m.TRAINING_MODEL_FLOPS_TOTAL), self.rise(m.TRAINING_CAPACITY_FLOPS_TOTAL)
        return flops / capacity if flops > 0 and capacity > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean duration of a step, None without a step."""
        return self.stepping / self.steps if self.steps > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """This rank's share of the tokens per second of steps, None if unknown."""
        tokens = self.rise(m.TRAINING_TOKENS_TOTAL)
        return tokens / self.stepping if tokens > 0 and self.stepping > 0 else None


class Recent:
    """Totals of the last WINDOW seconds, for figures that are not those of the whole run."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Values]] = deque()
        self._progress = Progress({})

    def add(self, now: float, totals: Values) -> Progress:
        """Return the progress since the oldest totals kept, or since the start for the first ones.

        Until the totals change it is the one before, and nothing after WINDOW seconds without a change.
        """
        while len(self._kept) > 1 and self._kept[1][0] <= now - WINDOW:
            self._kept.popleft()
        if not self._kept or totals != self._kept[-1][1]:
            self._progress = Progress(totals, self._kept[0][1] if self._kept else None)
            self._kept.append((now, totals))
        elif now > self._kept[-1][0] + WINDOW:
            self._progress = Progress(totals, totals)
        return self._progress


def values(points: Mapping[Metric, Iterable[tuple[Mapping[str, str], float]]]) -> Values:
    """Return the values in a snapshot's points."""
    return {(row, next(iter(labels.values()), "")): value for row, of in points.items() for labels, value in of}


def figures(progress: Progress, *, unknown: str = "") -> str:
    """Return step time, MFU and tokens per second as words. `unknown` is the reason why there is no MFU."""
    reason = f" ({unknown.replace('_', ' ')})" if unknown else ""
    mfu = f"MFU unknown{reason}" if progress.mfu is None else f"MFU {100 * progress.mfu:.1f} %"
    step, tokens = progress.step_seconds, progress.tokens_per_second
    parts = [mfu, *([] if step is None else [duration(step)])]
    return ", ".join([*parts, *([] if tokens is None else [f"{tokens:,.0f} tokens/s per rank"])])


def duration(step: float) -> str:
    """Return the duration of a step in words."""
    return f"{step:.3g} s a step" if step >= 1 else f"{1000 * step:.3g} ms a step"


def shares(progress: Progress) -> str:
    """Return the activities that took 0.1 % of the time and more, the longest first, as words."""
    longest, whole = sorted(progress.seconds.items(), key=lambda item: -item[1]), sum(progress.seconds.values()) or 1.0
    parts = [f"{100 * took / whole:.1f} % {name.replace('_', ' ')}" for name, took in longest if took >= 0.001 * whole]
    return ", ".join(parts)


def summary(name: str, status: str, last: Snapshot, url: str, delivered: bool) -> str:
    """Return three lines on a run that ended: what it reached, where its time went, and where to look."""
    progress = Progress(values(last.points))
    unknown = last.points.get(m.TRAINING_MFU_UNAVAILABLE)
    figured = figures(progress, unknown=unknown[0][0]["reason"] if unknown else "")
    where = f"metrics went to {url}; `flopwatch report --prometheus URL {name}` shows the whole run"
    if not delivered:
        where = f"nothing took the metrics at {url}; to keep them, start `flopwatch exporter` on this host"
    reached = f"{name} {status} after {progress.steps:,.0f} steps: {figured}"
    times = f"of {sum(progress.seconds.values()):,.0f} s {shares(progress)}"
    return "\n".join(f"flopwatch: {line}" for line in (reached, times, where))
