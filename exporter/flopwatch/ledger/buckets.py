"""Seconds of a run per bucket, each second attributed once, with the GPU-seconds held and the FLOPs executed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum

from flopwatch.ledger.attempt import ReportingNode
from flopwatch.ledger.incidents import Incidents
from flopwatch.ledger.record import ACTIVITIES, LedgerRecord
from flopwatch.ledger.reporters import Reporters

# Step time is productive or lost; any other activity has the bucket of its name.
BUCKETS = ("productive", "lost", *ACTIVITIES[1:-1], "down", "queue", "other")
RETAINED = ("productive", "generation")


def _zeros() -> dict[str, float]:
    return dict.fromkeys(BUCKETS, 0.0)


@dataclass(slots=True)
class Buckets:
    """Seconds, GPU-seconds and FLOPs of a run up to its frontier, the time up to which everything is attributed."""

    reporters: Reporters
    incidents: Incidents
    frontier: float = 0.0
    pending: float = 0.0  # step time up to the frontier whose step has not ended
    seconds: dict[str, float] = field(default_factory=_zeros)
    gpu_seconds: dict[str, float] = field(default_factory=_zeros)
    mark: float = 0.0  # high-water mark: steps up to here are not productive again
    high_water: float | None = None  # the furthest step reported
    committed: float | None = None  # step of the last durable checkpoint
    committed_at: float | None = None
    provisional: float = 0.0  # productive seconds not yet in a durable checkpoint
    provisional_from: float = 0.0  # the step at which the provisional seconds begin
    positioned: bool = True  # False once step time was attributed without a step number
    flops: bool = False  # whether FLOPs are reported
    retained: float = 0.0
    capacity: float = 0.0
    unpriced_flops: float = 0.0  # counted once every node has reported its peak
    unpriced_seconds: float = 0.0
    work: dict[str, float] = field(default_factory=dict)  # totals of all processes, which never fall

    def advance_to(self, until: float, bucket: str, *, held: bool = True) -> None:
        """Move the frontier to `until` (Unix time) and add the seconds to one bucket, with GPU-seconds if `held`."""
        if until > self.frontier:
            self.book(bucket, until - self.frontier, held=held)
            self.frontier = until

    def book(self, bucket: str, seconds: float, *, held: bool = True) -> None:
        """Add seconds to a bucket of the run and its attempt. `held` is False if the run held no GPUs in them."""
        attempt, gpus = self.reporters.current, self.reporters.total("gpus") if held else 0.0
        self.seconds[bucket] += seconds
        self.gpu_seconds[bucket] += seconds * gpus
        if bucket not in RETAINED:
            self.incidents.charge(seconds, seconds * gpus)
        if bucket == "down":
            attempt.down_seconds += seconds
            attempt.down_gpu_seconds += seconds * gpus
        else:
            attempt.seconds[bucket] = attempt.seconds.get(bucket, 0.0) + seconds
            attempt.gpu_seconds[bucket] = attempt.gpu_seconds.get(bucket, 0.0) + seconds * gpus
        if held:
            attempt.gpus = max(attempt.gpus, gpus)
            self.unpriced_seconds += seconds
            self.price()

    def price(self) -> None:
        """Add FLOPs and peak capacity not yet counted to the totals, but only once every node reports its peak."""
        if 0 < self.reporters.reporting("peak") == len(self.reporters.nodes):
            self.retained += self.unpriced_flops
            self.capacity += self.unpriced_seconds * self.reporters.total("peak")
            if self.reporters.attempt is not None:
                self.reporters.attempt.priced += self.unpriced_seconds
            self.unpriced_flops = self.unpriced_seconds = 0.0

    def take_gpus(self, node: ReportingNode, record: LedgerRecord, received: float) -> None:
        """Store a node's GPUs and their peak FLOP/s. Count new GPUs also in the seconds before this report."""
        silent_after = self.reporters.silent_after
        grows = node.gpus is not None and (node.whole or received - node.met > silent_after)
        before = node.gpus, node.peak
        if not self._is_partial(node, record):
            node.gpus = record.gpus if record.gpus is not None else node.gpus
            node.peak = record.peak_flops if record.peak_flops is not None else node.peak
        if (node.gpus, node.peak) != before:
            self.reporters.sums.clear()
        node.whole = node.whole or (record.event == "start" and record.gpus is not None)
        self._credit(node, grows)

    def _is_partial(self, node: ReportingNode, record: LedgerRecord) -> bool:
        """Return whether a record counts only some of a node's GPUs because its exporter restarted."""
        if node.whole or node.gpus is None or record.gpus is None or record.gpus >= node.gpus:
            node.fewer = None
            return False
        node.fewer = record.t if node.fewer is None else node.fewer
        return record.t - node.fewer < self.reporters.silent_after

    def _credit(self, node: ReportingNode, grows: bool) -> None:
        """Add a node's new GPUs to the GPU-seconds before its report, since nodes report at different times.

        They count from the attempt's begin, or the node's process start if that is much later, or from now (`grows`).
        """
        attempt = self.reporters.current
        gpus = max(0.0, (node.gpus or 0.0) - node.credited_gpus)
        peak = max(0.0, (node.peak or 0.0) - node.credited_peak)
        node.credited_gpus += gpus
        node.credited_peak += peak
        passed, share = self.frontier - attempt.begin, 1.0
        if passed <= 0 or gpus == peak == 0 or grows:
            return
        attempt.gpus = max(attempt.gpus, self.reporters.total("gpus"))
        if node.start > attempt.start + self.reporters.silent_after:
            share = min(1.0, max(0.0, self.frontier - node.start) / passed)
        for bucket, seconds in attempt.seconds.items():
            held = gpus * share * seconds
            self.gpu_seconds[bucket] += held
            attempt.gpu_seconds[bucket] = attempt.gpu_seconds.get(bucket, 0.0) + held
            if bucket not in RETAINED:
                self.incidents.charge(0.0, held)
        self.capacity += peak * share * attempt.priced

    def take_flops(self, node: ReportingNode, step: float, flops: float) -> None:
        """Count the FLOPs of the node's steps above the high-water mark. `flops` is the node's total up to `step`."""
        self.flops = True
        if flops < node.flops and step >= node.flops_step:
            # After its restart an exporter lacks the records of some ranks, and will count the same FLOPs again. If the
            # total stays lower for long, a rank was replaced and began at 0.
            node.fell = node.t if node.fell is None else node.fell
            if node.t - node.fell < self.reporters.silent_after:
                return
        node.fell = None
        if step != node.flops_step:
            if step > node.flops_step:
                grown = max(0.0, flops - node.flops)
                self.unpriced_flops += grown * _share_above(node.flops_step, step, node.mark)
                node.mark = max(node.mark, step)
            node.flops, node.flops_step = flops, step

    def take_work(self, node: ReportingNode, work: Mapping[str, float]) -> None:
        """Count what a node's processes did. Its totals are lower for a while after its exporter restarted.

        If they stay lower, a rank was replaced. Then they count from there on. So do those of a node that made steps
        before it reported any: its exporter or this ledger was an older release.
        """
        uncounted = tuple([name for name in node.work if name not in work])
        if uncounted != node.uncounted or not work.keys() <= node.work.keys():
            self.reporters.counted.clear()
        node.uncounted = uncounted
        if not node.work and node.step:
            node.work = dict(work)
        elif all(total >= node.work.get(name, 0.0) for name, total in work.items()):
            for name, total in work.items():
                self.work[name] = self.work.get(name, 0.0) + total - node.work.get(name, 0.0)
        else:
            node.work_fell = node.t if node.work_fell is None else node.work_fell
            if node.t - node.work_fell < self.reporters.silent_after:
                return
        node.work_fell = None
        node.work |= work

    def follow(self, node: ReportingNode) -> Mapping[str, float]:
        """Move the frontier to the node's last report. Return the seconds per activity, scaled to the time passed."""
        attempt = self.reporters.current
        grown = {name: now - node.base.get(name, 0.0) for name, now in node.activity.items()}
        grown = {name: seconds for name, seconds in grown.items() if seconds > 0}
        total, room = fsum(grown.values()), node.position - self.frontier
        passed: dict[str, float] = {}
        if total <= 0:
            return passed
        if room > 0:
            passed = {name: seconds * room / total for name, seconds in grown.items()}
            self.pending += passed.get("step", 0.0)
            for name, seconds in passed.items():
                if name != "step":
                    self.book(name, seconds)
            self.frontier = node.position
        attempt.epoch += 1
        node.base, node.epoch = node.activity, attempt.epoch
        return passed

    def settle_steps(self, begin: float, step: float, ended: float) -> float | None:
        """Attribute `ended` pending seconds to the steps (begin, step]. Return when the first productive one ended.

        Seconds are shared evenly. Steps above the high-water mark are productive, others lost. None if all are lost.
        """
        productive = ended * _share_above(begin, step, self.mark) if step > begin else 0.0
        self.book("productive", productive)
        self.book("lost", ended - productive)
        self.pending -= ended
        progress = None
        if productive > 0:
            first = max(begin, self.mark)
            durable = self.committed if self.committed is not None else 0.0
            if self.provisional == 0:
                self.provisional_from = max(first, durable)
            self.provisional += productive * _share_above(first, step, durable)
            progress = self.frontier - self.pending - max(0.0, step - first - 1) * ended / (step - begin)
        self.mark = max(self.mark, step)
        return progress

    def book_pending(self, bucket: str, seconds: float) -> None:
        """Move seconds of pending step time into one bucket."""
        self.book(bucket, seconds)
        self.pending -= seconds

    def commit(self, step: float, at: float) -> None:
        """Record that a durable checkpoint of `step` was first reported at `at`, in Unix time."""
        attempt = self.reporters.current
        attempt.committed = step if attempt.committed is None else max(step, attempt.committed)
        if self.committed is None or step > self.committed:
            self.committed, self.committed_at = step, at
            if step > self.provisional_from:
                self.provisional *= _share_above(self.provisional_from, self.mark, step)
                self.provisional_from = step


def _share_above(begin: float, end: float, mark: float) -> float:
    """Return the share of the steps (begin, end] that is above the step `mark`, from 0 to 1."""
    return (end - min(max(begin, mark), end)) / (end - begin) if end > begin else 0.0
