"""Nodes that report for a run: handles clock skew, silent nodes and overlapping attempts."""

from dataclasses import dataclass, field
from math import fsum, inf
from typing import NamedTuple

from msgspec.structs import replace

from flopwatch.ledger.attempt import Attempt, ReportingNode
from flopwatch.ledger.record import LedgerRecord

# Seconds that clocks may differ, or a record be late, before an old attempt's record shows an overlap.
MAX_OVERLAP = 10.0
# Largest difference in seconds between the clocks of the ledger and a node. A later stamp moves no deadline.
MAX_AHEAD = 60.0
_MAX_CLOCK_OFFSETS = 256
_MAX_OTHER_ATTEMPTS = 8
# Seconds for which an overlapping attempt must make steps after the current one ended, to be accounted for instead.
_TAKEOVER_AFTER = 300.0


class OtherAttempt(NamedTuple):
    """Reports of an attempt that overlaps with the current one: stamps, times of receipt and its first step."""

    first: float  # stamp of the first record
    first_received: float
    last: float  # stamp of the last record
    age: float
    received: float
    first_step: float | None = None
    certain: bool = False  # its host saw both at the same time


@dataclass(slots=True)
class Reporters:
    """Nodes that report for a run, by name, and the run's current attempt."""

    silent_after: float
    last: float = -inf  # newest stamp
    clock: float = -inf  # newest stamp that is possible by the ledger's clock
    attempt: Attempt | None = None
    nodes: dict[str, ReportingNode] = field(default_factory=dict)  # by source
    # Sums of fields over all nodes, and whether all count a total. Emptied when a node changes there.
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    counted: dict[str, bool] = field(default_factory=dict)
    _of_rank: dict[float | None, set[str]] = field(default_factory=dict)  # sources that had a rank in this attempt
    changed: set[str] = field(default_factory=set)  # nodes that changed since the state was saved
    past: dict[str, float] = field(default_factory=dict)  # ended attempts, and when each ended
    clock_offsets: dict[str, float] = field(default_factory=dict)  # seconds that a host's clock was set back, or < 0
    others: dict[str, OtherAttempt] = field(default_factory=dict)

    @property
    def current(self) -> Attempt:
        """Return the current attempt, or the last one. Raises AssertionError before the first."""
        assert self.attempt is not None
        return self.attempt

    def note_stamp(self, t: float, received: float) -> None:
        """Advance the newest stamps by a record with stamp `t` that was received at `received`, both in Unix time."""
        self.last = max(self.last, t)
        self.clock = max(self.clock, min(t, received + MAX_AHEAD))

    def realign(self, record: LedgerRecord, received: float) -> LedgerRecord:
        """Return the record with its stamps corrected if the host's clock was set back or forward."""
        shift, node = self.clock_offsets.get(record.source, 0.0), self.nodes.get(record.source)
        same = self.attempt is not None and record.attempt == self.attempt.id
        if node is not None and same and record.age > node.age and not record.gone:
            expected = node.t + record.age - node.age
            if shift and abs(record.t - expected) < abs(record.t + shift - expected):
                shift = 0.0  # the clock was corrected
                del self.clock_offsets[record.source]
            # Time that neither the process nor the ledger's clock has seen pass is a step of the host's clock.
            unseen = record.t + shift - expected - max(0.0, received - node.heard - (record.age - node.age))
            # Only a clock gives an older process an earlier stamp.
            if record.t + shift < node.t - MAX_OVERLAP or unseen > MAX_OVERLAP:
                shift = expected - record.t
                self.clock_offsets[record.source] = shift
                while len(self.clock_offsets) > _MAX_CLOCK_OFFSETS:
                    del self.clock_offsets[next(iter(self.clock_offsets))]
        if not shift:
            return record
        started = record.started
        if started is not None and started <= record.t:  # a later one was stamped before the clock was set back
            started += shift
        return replace(record, t=record.t + shift, started=started)

    def replace(self, nodes: dict[str, ReportingNode]) -> None:
        """Replace all nodes."""
        self.nodes, self._of_rank = nodes, {}
        self.sums, self.counted = {}, {}
        for source, node in nodes.items():
            self._of_rank.setdefault(node.rank, set()).add(source)

    def observe(self, record: LedgerRecord, received: float) -> ReportingNode | None:
        """Store a record as its node's last report and return the node, or None if the record has nothing new."""
        attempt, node, activity = self.current, self.nodes.get(record.source), record.activity
        if activity is None or record.born is None:
            return None
        if node is None:
            node = self._add(record, record.born, activity)
        elif record.age < node.age:  # another process on the same node
            if record.gone or record.t - record.age <= node.t:
                return None
            node.start, node.activity, node.base, node.epoch = record.t - record.age, {}, {}, attempt.epoch
            # Its other processes go on, and so do `work` and the sum of their FLOPs.
            alone = record.gpus is None or record.gpus <= 1
            node.flops = 0.0 if alone else min(node.flops, record.model_flops or 0.0)
            node.fell = node.end = None
        elif record.age == node.age or node.end is not None:
            if node.end is None and record.end is None:  # alive without progress
                node.t = max(node.t, record.t)
            return None
        elif node.epoch != attempt.epoch:
            node.base, node.epoch = node.activity, attempt.epoch
        self.changed.add(record.source)
        attempt.elapsed = max(attempt.elapsed, node.seen + record.age - node.age)
        attempt.skewed = attempt.skewed or record.t < attempt.newest - self.silent_after
        attempt.newest = max(attempt.newest, record.t)
        node.seen, node.heard = attempt.elapsed, received
        node.met = received if node.met == -inf else node.met
        if not record.gone:  # the stamp of `gone` is that of the exporter that missed the process
            node.t = record.t
        node.age, node.activity = record.age, activity
        node.open_step = record.open_step_seconds if record.open_step_seconds is not None else 0.0
        if record.rank is not None and record.rank != node.rank:
            node.rank = record.rank
            self._of_rank.setdefault(node.rank, set()).add(record.source)
        return node

    def _add(self, record: LedgerRecord, born: float, activity: dict[str, float]) -> ReportingNode:
        """Add the node of a record, in place of nodes whose rank its process, started at `born`, takes over."""
        attempt, nodes = self.current, self.nodes
        replaced = self.replaced(record, born)
        gone = [nodes.pop(name) for name in replaced]
        self.changed.update(replaced)
        node = ReportingNode(born, record.t, epoch=attempt.epoch, restored=record.restored_step, mark=attempt.mark)
        node.flops_step = attempt.resumed
        # The GPUs of the replaced nodes were counted until now.
        node.credited_gpus = fsum(x.credited_gpus for x in gone)
        node.credited_peak = fsum(x.credited_peak for x in gone)
        if attempt.carried and born <= attempt.begin:
            node.base, node.flops, node.work = activity, record.model_flops or 0.0, dict(record.work)
            node.flops_step = record.step if record.step is not None else attempt.resumed
        nodes[record.source] = node
        self.sums, self.counted = {}, {}
        attempt.nodes = max(attempt.nodes, len(nodes))
        return node

    def should_lead(self, node: ReportingNode, name: str, t: float) -> bool:
        """Return whether to measure the run's time by `node`: its rank is lower, or no other live node is used."""
        leader = self.nodes.get(self.current.leader)
        return leader is None or leader is node or not self.is_live(leader, t) or node.order < leader.order

    def step_of(self, node: ReportingNode) -> float | None:
        """Return the step that a node reported, else the highest of the other nodes, or None if no node reports one."""
        if node.step is not None:
            return node.step
        steps = (x.step if x.step is not None else x.restored for x in self.nodes.values() if x is not node)
        return max((step for step in steps if step is not None), default=None)

    def total(self, name: str) -> float:
        """Return the sum of a field, such as `gpus`, over all nodes that report it."""
        return self._sum(name)[0]

    def reporting(self, name: str) -> int:
        """Return how many nodes report a field."""
        return self._sum(name)[1]

    def _sum(self, name: str) -> tuple[float, int]:
        # A run may have thousands of nodes, and a record rarely changes these fields.
        if name not in self.sums:
            values = [value for x in self.nodes.values() if (value := getattr(x, name)) is not None]
            self.sums[name] = fsum(values), len(values)
        return self.sums[name]

    def all_count(self, name: str) -> bool:
        """Return whether the last record of each node has this total of its work."""
        if name not in self.counted:
            nodes = self.nodes.values()
            self.counted[name] = all(name in node.work and name not in node.uncounted for node in nodes)
        return self.counted[name]

    def replaced(self, record: LedgerRecord, born: float) -> list[str]:
        """Return the nodes with the record's rank that last reported before its process started at `born`."""
        known = self.nodes.keys() & (() if record.rank is None else self._of_rank.get(record.rank, ()))
        return [name for name in known if self.nodes[name].rank == record.rank and born > self.nodes[name].t]

    def is_live(self, node: ReportingNode, t: float) -> bool:
        """Return whether a node has not ended and reported within `silent_after` seconds before the stamp `t`."""
        if node.end is not None:
            return False
        attempt = self.current
        return t - node.t <= self.silent_after or (attempt.skewed and attempt.elapsed - node.seen <= self.silent_after)

    def any_live(self, t: float, but: ReportingNode | None = None) -> bool:
        """Return whether the current attempt has not ended and a node other than `but` is live as of the stamp `t`."""
        if self.attempt is None or self.attempt.end is not None:
            return False
        return any(self.is_live(x, t) for x in self.nodes.values() if x is not but)

    def is_reporting(self, now: float) -> bool:
        """Return whether the current attempt has not ended and a node reported recently, as of `now` in Unix time."""
        if self.attempt is None or self.attempt.end is not None:
            return False
        return any(x.end is None and self._is_recent(now, x.t, x.met, x.heard) for x in self.nodes.values())

    def note_other(self, record: LedgerRecord, received: float) -> None:
        """Remember a record of an attempt that overlaps with the current one."""
        attempt, name = self.attempt, record.attempt
        if record.end is not None and name in self.others and self.others[name].certain:
            del self.others[name]
        if attempt is None or not name or record.activity is None or record.end is not None:
            return
        if record.t <= self._expected_until(name):
            return
        last = self.others.get(name, OtherAttempt(record.t, received, -inf, -inf, received))
        if record.t > last.last and record.age > last.age:
            step = record.step if last.first_step is None else last.first_step
            certain = last.certain or record.overlaps
            self.others[name] = OtherAttempt(*last[:2], record.t, record.age, received, step, certain)
        if len(self.others) > _MAX_OTHER_ATTEMPTS:
            del self.others[min(self.others, key=lambda other: self.others[other].received)]

    def has_other(self, now: float) -> bool:
        """Return whether an attempt other than the current one reports as of `now`, even if it ended before."""
        overlapping = [other for name, other in self.others.items() if self._overlaps(name, other)]
        return any(self._is_recent(now, other.last, other.first_received, other.received) for other in overlapping)

    def takes_over(self, record: LedgerRecord) -> bool:
        """Return whether the record's attempt, which overlaps, still makes steps long after the current one's end."""
        other, over = self.others.get(record.attempt), self.current.over  # a silent attempt has not reported its end
        if over is None or other is None or record.activity is None:
            return False
        newer = record.t > other.last and record.age > other.age
        if other.certain or record.end is not None or record.step is None:
            return newer and other.certain
        made_steps = other.first_step is not None and record.step > other.first_step
        return self._overlaps(record.attempt, other) and newer and made_steps and record.t - over > _TAKEOVER_AFTER

    def keep_current(self) -> None:
        """Remember the current attempt, which goes on while the next one is accounted for."""
        attempt = self.current
        if (node := self.nodes.get(attempt.leader)) is not None:
            self.others[attempt.id] = OtherAttempt(node.t, node.met, node.t, node.age, node.heard, attempt.step, True)

    def is_outlived(self, t: float) -> bool:
        """Return whether another attempt is known to go on, as of the stamp `t`."""
        return any(other.certain and t - other.last <= self.silent_after for other in self.others.values())

    def _overlaps(self, name: str, other: OtherAttempt) -> bool:
        """Return whether another attempt reported at least twice, and well after its records should have ended."""
        return other.certain or (other.last > other.first and other.last - self._expected_until(name) > MAX_OVERLAP)

    def _is_recent(self, now: float, t: float, first_received: float, received: float) -> bool:
        """Return whether a source's last stamp `t` is current, or the source keeps reporting with a wrong clock."""
        if now - self.silent_after <= t <= now + MAX_AHEAD:
            return True
        return now - received <= self.silent_after and received - first_received > MAX_OVERLAP

    def _expected_until(self, name: str) -> float:
        """Return the stamp after which no record of an attempt is expected."""
        attempt = self.current
        if name == attempt.id and attempt.end is None:
            return inf
        return max(attempt.start, self.past.get(name, -inf))
