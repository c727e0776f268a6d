"""The buckets of a run: its frontier and what is booked as that moves, GPUs and FLOPs with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum, inf

from flopwatch.ledger.attempt import BUCKETS, END_OF_RUN, RETAINED, Source
from flopwatch.ledger.losses import Losing
from flopwatch.ledger.record import Record
from flopwatch.ledger.stragglers import WINDOW, Late, latest


def _zeros() -> dict[str, float]:
    return dict.fromkeys(BUCKETS, 0.0)


@dataclass(slots=True)
class Booked(Losing):
    """Of a run, what its time went to."""

    resubmitted: float = -inf
    pending: float = 0.0
    seconds: dict[str, float] = field(default_factory=_zeros)
    gpu_seconds: dict[str, float] = field(default_factory=_zeros)
    mark: float = 0.0  # productive up to this step
    high_water: float | None = None  # the furthest step reported
    committed: float | None = None
    committed_at: float | None = None
    provisional: float = 0.0
    provisional_from: float = 0.0
    positioned: bool = True  # False once step time had to be booked without a position
    flops: bool = False  # whether FLOPs are reported
    retained: float = 0.0
    capacity: float = 0.0
    unpriced_flops: float = 0.0  # counted once every source has told its peak
    unpriced_seconds: float = 0.0
    straggler_gpu_seconds: float | None = None  # None: waits are not measured

    def _pass(self, until: float, bucket: str) -> None:
        """Move the frontier, all into one bucket."""
        if until > self.frontier:
            self._book(bucket, until - self.frontier)
            self.frontier = until

    def _book(self, bucket: str, seconds: float) -> None:
        self.seconds[bucket] += seconds
        attempt = self._attempt()
        losing = self.losing is not None and bucket not in RETAINED
        if losing:
            self.losing_seconds += seconds
        if bucket == "down":
            attempt.down_seconds += seconds
        else:
            attempt.seconds[bucket] = attempt.seconds.get(bucket, 0.0) + seconds
        if bucket == "down" and (
            attempt.end in ("preempted", *END_OF_RUN) or self.ended is not None or self.resubmitted > attempt.start
        ):
            return  # between two allocations
        gpus = self._sum("gpus")
        attempt.gpus = max(attempt.gpus, gpus)
        self.gpu_seconds[bucket] += seconds * gpus
        if losing:
            self.losing_gpu_seconds += seconds * gpus
        if bucket == "down":
            attempt.down_gpu_seconds += seconds * gpus
        else:
            attempt.gpu_seconds[bucket] = attempt.gpu_seconds.get(bucket, 0.0) + seconds * gpus
        self.unpriced_seconds += seconds
        self._price()

    def _price(self) -> None:
        """Count FLOPs and capacity, both or none: a share of the GPUs without a peak would flatter the ratio."""
        if self.sources and all(x.peak is not None for x in self.sources.values()):
            self.retained += self.unpriced_flops
            self.capacity += self.unpriced_seconds * self._sum("peak")
            if self.attempt is not None:
                self.attempt.priced += self.unpriced_seconds
            self.unpriced_flops = self.unpriced_seconds = 0.0

    def _sum(self, name: str) -> float:
        return fsum(value for x in self.sources.values() if (value := getattr(x, name)) is not None)

    def _partial(self, source: Source, record: Record) -> bool:
        """Return whether a record seems to tell of some GPUs only: its exporter restarted and hears of them anew."""
        if source.whole or source.gpus is None or record.gpus is None or record.gpus >= source.gpus:
            source.fewer = None
            return False
        source.fewer = record.t if source.fewer is None else source.fewer
        return record.t - source.fewer < self.silent_after

    def _credit(self, source: Source, grows: bool) -> None:
        """Count a source's GPUs in what was booked before they were heard of: nodes push out of step.

        They are held since the attempt began, unless their process came later than a start-up explains, or the source
        has told of all it had and grows.
        """
        attempt = self._attempt()
        gpus, peak = (
            max(0.0, (value or 0.0) - credited)
            for value, credited in ((source.gpus, source.credited_gpus), (source.peak, source.credited_peak))
        )
        source.credited_gpus += gpus
        source.credited_peak += peak
        passed, share = self.frontier - attempt.begin, 1.0
        if passed <= 0 or gpus == peak == 0 or grows:
            return
        attempt.gpus = max(attempt.gpus, self._sum("gpus"))
        if source.start > attempt.start + self.silent_after:
            share = min(1.0, max(0.0, self.frontier - source.start) / passed)
        for bucket, seconds in attempt.seconds.items():
            held = gpus * share * seconds
            self.gpu_seconds[bucket] += held
            attempt.gpu_seconds[bucket] = attempt.gpu_seconds.get(bucket, 0.0) + held
            if self.losing is not None and bucket not in RETAINED:
                self.losing_gpu_seconds += held
        self.capacity += peak * share * attempt.priced

    def _count_flops(self, source: Source, step: float, flops: float) -> None:
        self.flops = True
        if flops < source.flops and step >= source.flops_step:
            # An exporter that was restarted has not yet heard from all its ranks. What it counted before it will count
            # again, and booking the rise would book it twice. If it stays so, a rank was replaced and began at 0.
            source.fell = source.t if source.fell is None else source.fell
            if source.t - source.fell < self.silent_after:
                return
        source.fell = None
        if step != source.flops_step:
            if step > source.flops_step:
                grown = max(0.0, flops - source.flops)
                self.unpriced_flops += grown * _above(source.flops_step, step, source.mark)
                source.mark = max(source.mark, step)
            source.flops, source.flops_step = flops, step

    def _follow(self, source: Source) -> None:
        """Move the frontier to where the source's activities reach."""
        attempt = self._attempt()
        grown = {name: now - source.base.get(name, 0.0) for name, now in source.activity.items()}
        grown = {name: seconds for name, seconds in grown.items() if seconds > 0}
        total, room = fsum(grown.values()), source.position - self.frontier
        passed: dict[str, float] = {}
        if total > 0:
            if room > 0:
                passed = {name: seconds * room / total for name, seconds in grown.items()}
                for name, seconds in passed.items():
                    if name == "step":
                        self.pending += seconds
                    else:
                        self._book(name, seconds)
                self.frontier = source.position
            attempt.epoch += 1
            source.base, source.epoch = source.activity, attempt.epoch
        step = self._position(source)
        ended = max(0.0, self.pending - source.open_step)
        if step is not None:
            self.positioned = True
            attempt.pace.passed(passed, self._sum("gpus"), still=step == attempt.cursor)
            self._settle(step, ended)
        elif ended > 0:
            # Nobody knows the position: no lost work and no goodput can be told.
            self.positioned = False
            self._book("other", ended)
            self.pending -= ended
            self._back(self.frontier)
            self.recovering = None
        self._price()
        if self.straggler_gpu_seconds is not None:
            self._close_window(attempt.late)

    def _position(self, source: Source) -> float | None:
        """Return the step a source is at; of one that cannot tell, the furthest of the others."""
        if source.step is not None:
            return source.step
        told = (x.step if x.step is not None else x.restored for x in self.sources.values() if x is not source)
        return max((step for step in told if step is not None), default=None)

    def _settle(self, step: float, ended: float) -> None:
        """Book the pending seconds that have ended, once the position changes: forward, or back to execute again."""
        attempt = self._attempt()
        begin = attempt.cursor
        if step == begin:
            return
        productive = ended * _above(begin, step, self.mark) if step > begin else 0.0
        new = begin >= self.mark and self.losing is None
        self._book("productive", productive)
        self._book("lost", ended - productive)
        self.pending -= ended
        if productive > 0:
            first = max(begin, self.mark)
            durable = self.committed if self.committed is not None else 0.0
            if self.provisional == 0:
                self.provisional_from = max(first, durable)
            self.provisional += productive * _above(first, step, durable)
            self._progress(self.frontier - self.pending - max(0.0, step - first - 1) * ended / (step - begin))
        attempt.cursor = step
        self.mark = max(self.mark, step)
        for found in attempt.pace.made(step - begin if new else 0.0, ended, self.frontier - self.pending):
            self._find(found)

    def _commit(self, step: float, at: float) -> None:
        attempt = self._attempt()
        attempt.committed = step if attempt.committed is None else max(step, attempt.committed)
        if self.committed is None or step > self.committed:
            self.committed, self.committed_at = step, at
            if step > self.provisional_from:
                self.provisional *= _above(self.provisional_from, self.mark, step)
                self.provisional_from = step

    def _close_window(self, late: Late) -> None:
        """Look for a straggler, if two minutes have passed since that was done last."""
        productive = self.gpu_seconds["productive"]
        if late.since is not None:
            if self.frontier - late.since < WINDOW:
                return
            live = {name: x for name, x in self.sources.items() if x.end is None}
            measured = all(x.waits and x.window == late.number for x in live.values())
            found = None
            if measured and sum(len(x.waits or ()) for x in live.values()) == self._sum("gpus"):
                found = latest(
                    {name: x.waited or () for name, x in live.items()},
                    {name: x.waits or () for name, x in live.items()},
                )
            lost = late.judge(found, productive - late.productive)
            self.straggler_gpu_seconds = (self.straggler_gpu_seconds or 0.0) + lost
        late.since, late.productive, late.number = self.frontier, productive, late.number + 1


def _above(begin: float, end: float, mark: float) -> float:
    """Return the share of the steps (begin, end] that lies above the mark."""
    return (end - min(max(begin, mark), end)) / (end - begin) if end > begin else 0.0
