"""Who speaks of a run, and whether it is now: clocks that are wrong, nodes that fell silent, attempts side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from flopwatch.ledger.attempt import Attempt, Source
from flopwatch.ledger.record import Record

# Seconds by which clocks may differ and words be late before an old attempt's word counts as a second run.
OVERLAP = 10.0
# A ledger's clock and its senders' may differ by so much; what is stamped later than that moves no deadline.
AHEAD = 60.0
_SET_BACK = 256  # hosts whose clocks were set back
_RIVALS = 8  # attempts beside the one accounted for
# Seconds for which one of them must make steps after the end of that; others are on the way to their own.
_OUTLIVES = 300.0


@dataclass(slots=True)
class Heard:
    """Of a run, who was heard and when."""

    tenant: str
    name: str
    silent_after: float
    last: float = -inf  # newest stamp
    clock: float = -inf  # newest stamp that can be true
    attempt: Attempt | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)  # sources changed since the state was last saved
    past: dict[str, float] = field(default_factory=dict)  # ended attempts and when they ended
    set_back: dict[str, float] = field(default_factory=dict)  # by how much hosts' clocks were
    # Attempts beside this one: stamp of the first word and when it was heard, stamp, age and hearing of the last, and
    # the first step told.
    rivals: dict[str, list[float]] = field(default_factory=dict)

    def _attempt(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _aligned(self, record: Record) -> Record:
        """Return the record as it would be stamped had nobody set its host's clock back."""
        shift, known = self.set_back.get(record.source, 0.0), self.sources.get(record.source)
        if (
            known is not None
            and self.attempt is not None
            and record.attempt == self.attempt.id
            and record.age > known.age
            and not record.gone
        ):
            expected = known.t + record.age - known.age
            if shift and abs(record.t - expected) < abs(record.t + shift - expected):
                shift = 0.0  # set right again
                del self.set_back[record.source]
            if record.t + shift < known.t - OVERLAP:  # an older process told of earlier: nothing else explains that
                shift = expected - record.t
                self.set_back[record.source] = shift
                while len(self.set_back) > _SET_BACK:
                    del self.set_back[next(iter(self.set_back))]
        if not shift:
            return record
        started = record.started
        # A start that is yet to come by this clock was told by the old one.
        return replace(
            record,
            t=record.t + shift,
            started=started + shift if (started is not None and started <= record.t) else started,
        )

    def _note_rival(self, record: Record, heard: float) -> None:
        """Note that another attempt reports too, and goes on to."""
        attempt, name = self.attempt, record.attempt
        if attempt is None or not name or record.activity is None or record.end is not None:
            return
        known = self.rivals.get(name)
        if record.t <= self._beside(name) or (known is not None and (record.t <= known[2] or record.age <= known[3])):
            return
        first, step = (record.t, heard) if known is None else known[:2], known[5:] if known is not None else []
        step = step or ([] if record.step is None else [record.step])
        self.rivals[name] = [*first, record.t, record.age, heard, *step]
        if len(self.rivals) > _RIVALS:
            del self.rivals[min(self.rivals, key=lambda other: self.rivals[other][4])]

    def _rival(self, now: float) -> bool:
        """Return whether another attempt reports as well, or one that has ended goes on to."""
        return any(
            last > first and last - self._beside(name) > OVERLAP and self._fresh(now, last, met, heard)
            for name, (first, met, last, _, heard, *_) in self.rivals.items()
        )

    def _carries_on(self, record: Record) -> bool:
        """Return whether an attempt beside the one accounted for makes steps after that has said it ended."""
        rival, over = self.rivals.get(record.attempt), self._attempt().over  # silence is no such word
        if over is None or rival is None or record.activity is None or record.end is not None or record.step is None:
            return False
        first, _, last, age, _, *step = rival
        return (
            last > first
            and last - self._beside(record.attempt) > OVERLAP
            and record.t > last
            and record.age > age
            and step != []
            and record.step > step[0]
            and record.t - over > _OUTLIVES
        )

    def _fresh(self, now: float, t: float, met: float, heard: float) -> bool:
        """Return whether the last word of somebody is of now, by the ledger's clock.

        A stamp of now is. Another is that of old records that arrive late, or of a clock that is wrong; its owner goes
        on to be heard.
        """
        if now - self.silent_after <= t <= now + AHEAD:
            return True
        return now - heard <= self.silent_after and heard - met > OVERLAP

    def _beside(self, name: str) -> float:
        """Return since when a new word of this attempt is not to be expected."""
        attempt = self._attempt()
        if name == attempt.id and attempt.end is None:
            return inf
        return max(attempt.start, self.past.get(name, -inf))

    def _lives(self, source: Source, t: float) -> bool:
        """Return whether a source has not ended and was heard of lately, as of a stamp of another."""
        if source.end is not None:
            return False
        attempt = self._attempt()
        return t - source.t <= self.silent_after or (
            attempt.skewed and attempt.elapsed - source.seen <= self.silent_after
        )

    def _alive(self, t: float) -> bool:
        """Return whether the attempt is open and any source of it was heard of lately, as of a stamp."""
        return (
            self.attempt is not None
            and self.attempt.end is None
            and any(self._lives(x, t) for x in self.sources.values())
        )

    def _reports(self, now: float) -> bool:
        """Return whether anything new of the attempt was heard lately, by the ledger's clock."""
        return (
            self.attempt is not None
            and self.attempt.end is None
            and any(x.end is None and self._fresh(now, x.t, x.met, x.heard) for x in self.sources.values())
        )
