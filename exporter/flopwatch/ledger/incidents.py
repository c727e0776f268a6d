"""What a run lost and why: its incidents, the recoveries from them, and the evidence of their causes.

An incident is one of three: an attempt's end after which the run went on, a slow stretch, or a stall
(`flopwatch.ledger.slowdowns`). An attempt's end costs the time until the run makes a new step or fails again. That is
the step cut short, down time, startup and repeated steps. A slow stretch or a stall costs its time beyond the usual.
The cause is settled once, when no more evidence can arrive, and never changes afterwards.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from flopwatch.ledger.attempt import UNPLANNED
from flopwatch.ledger.attribution import AFTER, AT_ONCE, BEFORE, LOSSES, IncidentCause, LostTime, attribute
from flopwatch.ledger.evidence import RunEvidence
from flopwatch.ledger.record import Evidence, LedgerRecord, RankStack
from flopwatch.ledger.reporters import Reporters
from flopwatch.ledger.slowdowns import Slowdown
from flopwatch.ledger.stacks import VerdictStacks

MAX_HISTORY = 1000  # ended attempts, and incidents, whose figures are kept
_MAX_UNSETTLED = 100
_MAX_WITH_STACKS = 20
_EVIDENCE_AGE = 3600.0  # seconds for which evidence is kept, since a late record may report a loss
_MAX_STANDSTILL = 86400.0  # seconds without a step for which an attempt's evidence is kept
# A wait of the attempt itself is evidence that the ledger adds.
_WAIT_KINDS = {"data_stall": "data_stall", "checkpoint_save": "checkpoint_wait"}


@dataclass(slots=True)
class Incident:
    """Loss of a run. Until `settled`, its cost and cause may change. It is saved under the names of its fields."""

    number: int
    attempt_number: int  # of the attempt that it ended, or happened in
    attempt: str
    status: str  # how the attempt ended; empty for a slow stretch or a stall
    began: float  # last sign of progress
    ended: float  # when the end was noticed; of a slow stretch or a stall, its end
    hosts: list[str]  # until it is settled
    nodes: int  # number of hosts
    silent: dict[str, float] = field(default_factory=dict)  # hosts that reported no end, with their last stamp
    kind: str = "end"
    stacks: list[RankStack] = field(default_factory=list)
    waited: str = ""  # the activity that most of a stall or a slow stretch was, if known
    follows: str = ""  # the node whose seconds show `waited`
    until: float | None = None  # start of the next attempt, to which later evidence belongs
    back: float | None = None  # when the run made a new step again, or failed again
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    settled: bool = False
    cause: str = "unknown"
    confidence: str = "none"
    host: str = ""
    gpu: str = ""
    port: str = ""
    why: str = ""

    def find_cause(self, evidence: RunEvidence) -> IncidentCause:
        """Return the cause of the loss by the evidence so far."""
        alive = evidence.alive(self.number)
        own = [Evidence("node_gone", t, 1, host) for host, t in self.silent.items() if host not in alive]
        if self.waited in _WAIT_KINDS:
            own.append(Evidence(_WAIT_KINDS[self.waited], self.began, 1, self.follows))
        loss = LostTime(self.kind, self.began, self.ended, self.status, frozenset(self.hosts))
        # A counter that rose is noticed up to a minute later.
        latest = inf if self.until is None else max(self.until, self.ended + AT_ONCE)
        seen = (item for item in evidence.of(loss.hosts) if item.t <= latest)
        return attribute(loss, [*seen, *own])

    def settle(self, evidence: RunEvidence) -> None:
        """Store the cause of the loss by the evidence so far. It does not change afterwards."""
        for name, value in msgspec.to_builtins(self.find_cause(evidence)).items():
            setattr(self, name, value)
        self.settled, self.hosts, self.silent = True, [], {}

    def figures(self, evidence: RunEvidence) -> dict[str, Any]:
        """Return the incident as a JSON object for the API and exports, with the cause so far if it is not settled."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        if not self.settled:
            shown |= msgspec.to_builtins(self.find_cause(evidence))
        for name in ("hosts", "silent", "follows", "until"):
            del shown[name]
        return shown


@dataclass(slots=True)
class Incidents:
    """Incidents of a run, their totals by cause, and the recoveries from unplanned ends of attempts."""

    reporters: Reporters
    stacks: VerdictStacks = field(default_factory=VerdictStacks)
    by_number: dict[int, Incident] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)  # incidents that changed since the state was saved
    evidence: RunEvidence = field(default_factory=RunEvidence)
    recoveries: int = 0
    recovery_seconds: float = 0.0
    recovering: tuple[int, float] | None = None  # number of the attempt that ended unplanned, and its last report
    count: int = 0
    current: int | None = None  # the incident that seconds are charged to now
    charged_seconds: float = 0.0  # so far
    charged_gpu_seconds: float = 0.0
    slow: int | None = None  # the incident of the slow stretch under way
    settled: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in LOSSES})  # by cause
    badput: dict[str, dict[str, float]] = field(default_factory=lambda: {kind: {} for kind in LOSSES})  # GPU-seconds
    horizon: float = -inf  # evidence before this is forgotten
    unsettled: list[int] = field(default_factory=list)

    def advance_horizon(self) -> float:
        """Move the horizon forward and return it, in Unix time. Evidence from before it explains no loss."""
        attempt, now = self.reporters.attempt, self.reporters.clock
        began = [self.by_number[number].began - BEFORE for number in self.unsettled]
        if attempt is not None and attempt.end is None and attempt.step is not None:
            began.append(max(attempt.pace.since - BEFORE, now - _MAX_STANDSTILL))
        self.horizon = max(self.horizon, min([now - _EVIDENCE_AGE, *began]))
        return self.horizon

    def take_evidence(self, record: LedgerRecord) -> None:
        """Store the evidence that a record carries."""
        if record.evidence:
            horizon = self.advance_horizon()
            for item in record.evidence:
                self.evidence.add(item, horizon)

    def take_sign_of_life(self, record: LedgerRecord) -> None:
        """Mark the record's host as alive after each unsettled incident that the record proves it survived.

        The record is of the same attempt, or too soon for a reboot.
        """
        for number in self.unsettled:
            incident = self.by_number[number]
            since = incident.silent.get(record.source, inf)
            if record.t > since and (record.attempt == incident.attempt or record.t <= since + AFTER):
                self.evidence.mark_alive(record.source, number)

    def open_end(
        self, status: str, last_report: float, at: float, hung: float = 0.0, stall: Slowdown | None = None
    ) -> None:
        """Open an incident for the current attempt, which last reported at `last_report` and was found ended at `at`.

        Both are in Unix time. Its last step had been open for `hung` seconds. A `stall` at its end is charged, too.
        """
        self.close_current(last_report)
        reporters, attempt = self.reporters, self.reporters.current
        if status == "silent":
            at = min(at, last_report + reporters.silent_after)
        incident = self._new(status, last_report - hung, max(last_report, at))
        if status in UNPLANNED:
            incident.silent = {name: x.t for name, x in reporters.nodes.items() if x.end is None}
            if self.recovering is None:
                self.recovering = attempt.number, last_report
        if stall is not None:
            incident.waited, incident.began = stall.waited, min(incident.began, stall.began)
            self.charged_seconds, self.charged_gpu_seconds = stall.seconds, stall.gpu_seconds
        self.current = self._add(incident)

    def take_slowdown(self, slowdown: Slowdown) -> None:
        """Open an incident for a stall or a slow stretch, or update the incident of a slow stretch that goes on."""
        number = self.slow if slowdown.kind == "slow" else None
        if number is None:
            number = self._add(self._new("", slowdown.began, slowdown.ended, slowdown.kind))
        incident = self.by_number[number]
        incident.waited, incident.ended = slowdown.waited, slowdown.ended
        incident.seconds, incident.gpu_seconds = slowdown.seconds, slowdown.gpu_seconds
        incident.back = slowdown.ended if slowdown.over else None
        self.changed.add(number)
        if slowdown.kind == "slow":
            self.slow = None if slowdown.over else number
            rows = self.stacks.rows if self.stacks.of_straggler else ()
            incident.stacks = [row for row in rows if row[1] >= slowdown.began] or incident.stacks

    def _new(self, status: str, began: float, ended: float, kind: str = "end") -> Incident:
        hosts, one = sorted(self.reporters.nodes), self.reporters.current
        incident = Incident(0, one.number, one.id, status, began, ended, hosts, len(hosts), kind=kind)
        incident.follows, incident.stacks = one.leader, [] if kind == "slow" else self.stacks.pop_since(began)
        return incident

    def _add(self, incident: Incident) -> int:
        """Store an incident and return its number. Drop the oldest settled incident if there are too many."""
        self.count += 1
        number = incident.number = self.count
        self.by_number[number] = incident
        self.unsettled.append(number)
        self.changed.add(number)
        if len(self.unsettled) > _MAX_UNSETTLED:
            self._settle(self.by_number[self.unsettled[0]])
        for older in [number for number, one in self.by_number.items() if one.stacks][:-_MAX_WITH_STACKS]:
            self.by_number[older].stacks = []
            self.changed.add(older)
        while len(self.by_number) > MAX_HISTORY:
            oldest = next(number for number, one in self.by_number.items() if one.settled)
            del self.by_number[oldest]
            self.changed.add(oldest)
        return number

    def charge(self, seconds: float, gpu_seconds: float = 0.0) -> None:
        """Add attributed time to the cost of the current incident, if there is one."""
        if self.current is not None:
            self.charged_seconds += seconds
            self.charged_gpu_seconds += gpu_seconds

    def close_current(self, at: float) -> None:
        """End the current incident, if any, at `at` (Unix time). Later time is not charged to it."""
        if self.current is None:
            return
        incident = self.by_number[self.current]
        incident.back = max(at, incident.ended)
        incident.seconds, incident.gpu_seconds = self.charged_seconds, self.charged_gpu_seconds
        self.changed.add(self.current)
        self.current, self.charged_seconds, self.charged_gpu_seconds = None, 0.0, 0.0
        self.reporters.current.pace.charged = True

    def recover(self, at: float) -> tuple[int, float] | None:
        """Complete the recovery under way at `at`. Return the ended attempt's number and the seconds since, or None."""
        if self.recovering is None:
            return None
        number, since = self.recovering
        seconds = max(0.0, at - since)
        self.recoveries += 1
        self.recovery_seconds += seconds
        self.recovering = None
        return number, seconds

    def next_attempt(self, at: float) -> None:
        """Note that the next attempt starts at `at` (Unix time). Later evidence explains no incident before it."""
        for number in self.unsettled:
            if self.by_number[number].until is None:
                self.by_number[number].until = at
                self.changed.add(number)

    def settle_ready(self, *, over: bool) -> None:
        """Settle each incident that is over and too old for more evidence, or every incident if the run is `over`."""
        for incident in [self.by_number[number] for number in self.unsettled]:
            if over or (incident.back is not None and self.reporters.clock >= incident.ended + AFTER):
                self._settle(incident)

    def _settle(self, incident: Incident) -> None:
        if self.slow == incident.number:
            self.slow = self.reporters.current.pace.stretch = None
        incident.settle(self.evidence)
        self.evidence.drop_alive(incident.number)
        self.unsettled.remove(incident.number)
        self.changed.add(incident.number)
        settled, badput, cause = self.settled[incident.kind], self.badput[incident.kind], incident.cause
        settled[cause], badput[cause] = settled.get(cause, 0) + 1, badput.get(cause, 0.0) + incident.gpu_seconds
        self.evidence.forget(self.advance_horizon())
