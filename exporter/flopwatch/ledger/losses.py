"""What a run lost and why: its incidents, the recoveries from them, and the evidence that is kept for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from flopwatch.ledger.attempt import UNPLANNED
from flopwatch.ledger.attribution import LOSSES
from flopwatch.ledger.clocks import Heard
from flopwatch.ledger.incidents import EvidenceBook, Incident, horizon
from flopwatch.ledger.slowdowns import Found

HISTORY = 1000  # ended attempts, and incidents, whose figures are kept
_UNSETTLED = 100  # incidents that may wait for evidence


@dataclass(slots=True)
class Losing(Heard):
    """Of a run, what it lost."""

    frontier: float = 0.0
    ended: str | None = None
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # figures of the attempts before the last
    rewritten: set[int] = field(default_factory=set)  # of those changed since
    recoveries: int = 0
    recovery_seconds: float = 0.0
    recovering: tuple[int, float] | None = None  # from which attempt's end, and since when
    losses: int = 0  # incidents so far
    losing: int | None = None  # the incident that what is booked now belongs to
    losing_seconds: float = 0.0  # booked for it so far
    losing_gpu_seconds: float = 0.0
    slowing: int | None = None  # the incident of the slow stretch that goes on
    settled: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in LOSSES})  # by cause
    badput: dict[str, dict[str, float]] = field(default_factory=lambda: {kind: {} for kind in LOSSES})  # GPU-seconds
    horizon: float = -inf  # evidence before this is forgotten
    incidents: dict[int, Incident] = field(default_factory=dict)
    unsettled: list[int] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # incidents changed since
    evidence: EvidenceBook = field(default_factory=EvidenceBook)

    def _horizon(self) -> float:
        """Return the time before which evidence is of no use; what was forgotten once is not taken again."""
        attempt = self.attempt
        going_on = attempt is not None and attempt.end is None and attempt.step is not None
        self.horizon = max(
            self.horizon,
            horizon(
                self.clock,
                (self.incidents[number] for number in self.unsettled),
                attempt.pace.since if attempt is not None and going_on else None,
            ),
        )
        return self.horizon

    def _lose(self, end: str, heard: float, at: float, hung: float = 0.0, stalled: Found | None = None) -> None:
        """Begin an incident: an attempt has ended so, was last heard of then, and its end was noticed at that time.

        It may have hung before, so many seconds, or stalled: what held it up came before that, and it is a part of the
        price.
        """
        self._back(heard)
        attempt = self._attempt()
        silent = {name: x.t for name, x in self.sources.items() if x.end is None} if end in UNPLANNED else {}
        noticed = max(heard, min(at, heard + self.silent_after) if end == "silent" else at)
        incident = Incident(
            0,
            attempt.number,
            attempt.id,
            end,
            heard - hung,
            noticed,
            sorted(self.sources),
            len(self.sources),
            silent,
            follows=attempt.leader,
        )
        self.losing = self._incident(incident)
        if stalled is not None:
            incident.waited, incident.began = stalled.waited, min(incident.began, stalled.began)
            self.losing_seconds, self.losing_gpu_seconds = stalled.seconds, stalled.gpu_seconds
        if end in UNPLANNED and self.recovering is None:
            self.recovering = attempt.number, heard

    def _find(self, found: Found) -> None:
        """Take notice of a stall or a slow stretch, which may have been noticed before."""
        number, attempt = self.slowing if found.kind == "slow" else None, self._attempt()
        if number is None:
            number = self._incident(
                Incident(
                    0,
                    attempt.number,
                    attempt.id,
                    "",
                    found.began,
                    found.ended,
                    sorted(self.sources),
                    len(self.sources),
                    kind=found.kind,
                    follows=attempt.leader,
                )
            )
        incident = self.incidents[number]
        incident.waited, incident.ended = found.waited, found.ended
        incident.seconds, incident.gpu_seconds = found.seconds, found.gpu_seconds
        incident.back = found.ended if found.over else None
        self.changed.add(number)
        if found.kind == "slow":
            self.slowing = None if found.over else number

    def _incident(self, incident: Incident) -> int:
        """Give an incident its number and keep it until it is settled, and longer."""
        self.losses += 1
        number = incident.number = self.losses
        self.incidents[number] = incident
        self.unsettled.append(number)
        self.changed.add(number)
        if len(self.unsettled) > _UNSETTLED:
            self._settle_loss(self.incidents[self.unsettled[0]])
        while len(self.incidents) > HISTORY:
            oldest = next(number for number, one in self.incidents.items() if one.settled)
            del self.incidents[oldest]
            self.changed.add(oldest)
        return number

    def _back(self, at: float) -> None:
        """End the incident that is under way: nothing booked from here on belongs to it."""
        if self.losing is not None:
            incident = self.incidents[self.losing]
            incident.back = max(at, incident.ended)
            incident.seconds, incident.gpu_seconds = self.losing_seconds, self.losing_gpu_seconds
            self.changed.add(self.losing)
            self.losing, self.losing_seconds, self.losing_gpu_seconds = None, 0.0, 0.0
            self._attempt().pace.charged = True

    def _progress(self, at: float) -> None:
        """Take notice of a step above the high-water mark, made at that time."""
        self._back(at)
        if self.recovering is not None:
            number, since = self.recovering
            seconds = max(0.0, at - since)
            self.recoveries += 1
            self.recovery_seconds += seconds
            self.recovering = None
            if number in self.history:
                self.history[number]["recovery_seconds"] = seconds
                self.rewritten.add(number)

    def _settle_losses(self) -> None:
        """Settle the incidents of which no more will be known."""
        for number in list(self.unsettled):
            if self.ended is not None or self.incidents[number].ready(self.clock):
                self._settle_loss(self.incidents[number])

    def _settle_loss(self, incident: Incident) -> None:
        if self.losing == incident.number:
            self._back(self.frontier)
        if self.slowing == incident.number:
            self.slowing = self._attempt().pace.stretch = None
        incident.settle(self.evidence)
        self.evidence.settled(incident.number)
        self.unsettled.remove(incident.number)
        self.changed.add(incident.number)
        settled, badput, cause = self.settled[incident.kind], self.badput[incident.kind], incident.cause
        settled[cause], badput[cause] = settled.get(cause, 0) + 1, badput.get(cause, 0.0) + incident.gpu_seconds
        self.evidence.forget(self._horizon())
