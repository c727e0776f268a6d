"""Run accounting: cumulative snapshots in, exclusive seconds per bucket out. Pure: no clock, no files.

A run's books are closed up to its *frontier*, a time on the wall clock. Whatever moves the frontier books the seconds
it passes, once, so that at every moment and on every history

    sum of the buckets (queue apart) + pending = frontier - first process start

where *pending* is step time whose step has not ended. `run_open_seconds` is pending + (now - frontier).

- Inside an attempt the frontier follows one source: process start + the sum of its activity seconds, a monotonic
  clock. Wall-clock stamps only say where an attempt begins and ends. If the two disagree (skewed clocks, a snapshot
  under way, activities that do not add up) the growth of the activities is scaled to the room there is: nothing is
  booked twice, and what no activity explains is `other` when the attempt ends.
- Pending becomes productive (steps above the run's high-water mark) or lost (at or below it) when a step ends, linear
  in steps, and when its attempt ends: lost, or other if the run ended with it.
- The source followed is the live one with the lowest rank. The position shown is the maximum over sources; GPUs, peaks
  and FLOPs are sums. When an attempt ends, the source that got furthest is followed to its last snapshot.
- An attempt ends when its last live source finishes or vanishes, when any source says completed or stopped, or when a
  later attempt starts. From its last snapshot to an attested end it is lost, or other if the run ended with it; if it
  just stopped reporting, it is down.
- Down time counts as GPUs held, unless the attempt ended preempted, stopped or completed, or the run was submitted
  again.
- A run has recovered from an unplanned end (failed, silent) with the first step above its high-water mark. What ends
  before that belongs to the same recovery, so that no second is in two of them.
- Two attempts that report at the same time are a conflict: shown, and never merged. The later start is accounted for.
- Clocks: an attempt's seconds are its processes' own. A host whose stamps fall back while its process grows older was
  set back, and its stamps are taken as if it had not been. Where stamps of one attempt disagree by more than
  `silent_after`, a source is silent only when the others have also grown older by that since it was heard.

A record is cumulative and is used at most once: one that shows less than is known is late or a duplicate and changes
nothing. Records of ended attempts are ignored, but for the evidence in them. A start after `completed` begins a new
generation with new books (its counters restart at 0); the old ones are kept as `RUN#GENERATION`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import fsum, inf
from types import MappingProxyType
from typing import Any, Literal

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.causes import CAUSES
from flopwatch.ledger.incidents import EvidenceBook, Incident, horizon
from flopwatch.ledger.record import STATUSES, Key, Record

BUCKETS = (
    "productive", "lost", "startup", "compile", "data_stall", "checkpoint_save", "checkpoint_restore", "evaluation",
    "generation", "down", "queue", "other",
)
STATES = ("queued", "running", "down", "completed", "stopped")
ENDS = (*STATUSES, "silent")
_END_OF_RUN = ("completed", "stopped")
_UNPLANNED = ("failed", "silent")
_RETAINED = ("productive", "generation")
_WAITS = ("preempted", "resized")  # planned: the run waits for GPUs, and nobody is to be paged for it

# Of a run, what is no part of its one state.
_APART = (
    "sources", "touched", "attempt", "history", "rewritten", "incidents", "changed", "evidence",
)
_TIMES = ("since", "last", "resubmitted", "clock", "horizon")  # those that may be -inf, which JSON has no word for

_PAST = 100  # ended attempts a run remembers by name; older ones are known by their start
HISTORY = 1000  # ended attempts, and incidents, whose figures are kept
_UNSETTLED = 100  # incidents that may wait for evidence
_SET_BACK = 256  # hosts whose clocks were set back
_RIVALS = 8  # attempts beside the one accounted for
# Seconds by which clocks may differ and words be late before an old attempt's word counts as a second run.
_OVERLAP = 10.0
# A ledger's clock and its senders' may differ by so much; what is stamped later than that moves no deadline.
_AHEAD = 60.0


@dataclass(slots=True)
class Source:
    """What one source (a node) of the current attempt said last."""

    start: float  # of its process, by its own clock
    t: float
    rank: float | None = None
    age: float = 0.0
    heard: float = -inf  # when, by the ledger's clock
    met: float = -inf  # and for the first time
    seen: float = 0.0  # the attempt's `elapsed` when it was
    activity: dict[str, float] = field(default_factory=dict)
    base: dict[str, float] = field(default_factory=dict)  # activity when the frontier last moved
    epoch: int = 0  # the move of the frontier that base belongs to
    open_step: float = 0.0
    step: float | None = None
    restored: float | None = None
    gpus: float | None = None
    peak: float | None = None
    credited_gpus: float = 0.0  # that are counted in what was booked of the attempt before they were heard of
    credited_peak: float = 0.0
    flops: float = 0.0  # up to flops_step
    flops_step: float = 0.0
    fell: float | None = None  # since when it tells fewer FLOPs than before
    mark: float = 0.0  # steps up to here add no retained FLOPs
    end: str | None = None

    @property
    def position(self) -> float:
        """Return how far on the wall clock its activities reach."""
        return self.start + self.age


@dataclass(slots=True)
class Attempt:
    """The current or last attempt."""

    id: str
    start: float
    resumed: float  # the step it began from
    mark: float  # the furthest step reported when it began
    cursor: float  # the followed source's step up to which time is booked
    leader: str = ""  # the source that is followed
    epoch: int = 0
    end: str | None = None
    number: int = 0
    begin: float = 0.0  # its part of the run's wall clock: from where the books were, if those were ahead
    over: float | None = None
    step: float | None = None  # the furthest
    committed: float | None = None
    gpus: float = 0.0  # the most it held
    nodes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    priced: float = 0.0  # seconds of it that are in the run's capacity
    down_seconds: float = 0.0  # from its end to the next start
    down_gpu_seconds: float = 0.0
    recovery_seconds: float | None = None  # from its unplanned end to the first new step
    elapsed: float = 0.0  # what its processes have lived together, by their own clocks
    newest: float = 0.0  # stamp of theirs
    skewed: bool = False  # whether their stamps disagree

    def figures(self) -> dict[str, Any]:
        """Return what is to be told of it."""
        told = ("number", "begin", "gpus", "nodes", "down_seconds", "down_gpu_seconds", "recovery_seconds")
        return {name: getattr(self, name) for name in told} | {
            "attempt": self.id, "end": self.over, "status": self.end, "first_step": self.resumed,
            "last_step": self.step, "committed_step": self.committed,
            "seconds": dict(self.seconds), "gpu_seconds": dict(self.gpu_seconds),
        }


def _zeros() -> dict[str, float]:
    return dict.fromkeys(BUCKETS, 0.0)


@dataclass(slots=True)
class Run:
    """The books of one run: bounded state, whatever the length of its history."""

    tenant: str
    name: str
    silent_after: float
    generation: int = 1
    first: float | None = None  # when it was first heard of, by the ledger's clock
    since: float = -inf  # nothing before this, the end of the previous generation, belongs to this one
    last: float = -inf  # newest stamp
    submitted: float | None = None
    resubmitted: float = -inf
    start: float | None = None
    frontier: float = 0.0
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
    attempts: int = 0
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    ended: str | None = None
    recoveries: int = 0
    recovery_seconds: float = 0.0
    recovering: tuple[int, float] | None = None  # from which attempt's end, and since when
    losses: int = 0  # incidents so far
    losing: int | None = None  # the incident that what is booked now belongs to
    losing_seconds: float = 0.0  # booked for it so far
    losing_gpu_seconds: float = 0.0
    settled: dict[str, int] = field(default_factory=dict)  # incidents by cause
    badput: dict[str, float] = field(default_factory=dict)  # GPU-seconds of those
    clock: float = -inf  # newest stamp that can be true
    horizon: float = -inf  # evidence before this is forgotten
    set_back: dict[str, float] = field(default_factory=dict)  # by how much hosts' clocks were
    # Attempts beside this one: stamp of the first word and when it was heard, stamp, age and hearing of the last.
    rivals: dict[str, list[float]] = field(default_factory=dict)
    left_out: int = 0  # attempts whose figures are no longer kept
    attempt: Attempt | None = None
    past: dict[str, float] = field(default_factory=dict)  # ended attempts and when they ended
    sources: dict[str, Source] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)  # sources changed since the state was last saved
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # figures of the attempts before the last
    rewritten: set[int] = field(default_factory=set)  # of those changed since
    incidents: dict[int, Incident] = field(default_factory=dict)
    unsettled: list[int] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # incidents changed since
    evidence: EvidenceBook = field(default_factory=EvidenceBook)

    def apply(self, record: Record, heard: float | None = None) -> None:
        """Take a record of this run, heard at that time by the ledger's clock; in a replay when it was stamped."""
        heard = record.t if heard is None else heard
        self.first = heard if self.first is None else self.first
        record = self._aligned(record)
        self.last = max(self.last, record.t)
        self.clock = max(self.clock, min(record.t, heard + _AHEAD))
        self._submission(record.submitted)
        if record.event != "submitted":
            oldest = self._horizon() if record.evidence else 0.0
            for item in record.evidence:
                self.evidence.add(item, oldest)
            self._hear(record, heard)
            for number in self.unsettled:
                if self.incidents[number].disproved(record.source, record.attempt, record.t):
                    self.evidence.heard_of(record.source, number)
        self._settle_losses()

    def _hear(self, record: Record, heard: float) -> None:
        place = self.place(record)
        if place == "late":
            self._note_rival(record, heard)
            self._close_by_hand(record)
            return
        if place == "next":
            self._open(record)
        self._observe(record, heard)
        if record.end is not None:
            self._finish(record, record.end)

    def _aligned(self, record: Record) -> Record:
        """Return the record as it would be stamped had nobody set its host's clock back."""
        shift, known = self.set_back.get(record.source, 0.0), self.sources.get(record.source)
        if (
            known is not None and self.attempt is not None and record.attempt == self.attempt.id
            and record.age > known.age and not record.gone
        ):
            expected = known.t + record.age - known.age
            if shift and abs(record.t - expected) < abs(record.t + shift - expected):
                shift = 0.0  # set right again
                del self.set_back[record.source]
            if record.t + shift < known.t - _OVERLAP:  # an older process told of earlier: nothing else explains that
                shift = expected - record.t
                self.set_back[record.source] = shift
                while len(self.set_back) > _SET_BACK:
                    del self.set_back[next(iter(self.set_back))]
        if not shift:
            return record
        started = record.started
        # A start that is yet to come by this clock was told by the old one.
        return replace(record, t=record.t + shift, started=started + shift if (
            started is not None and started <= record.t) else started)

    def _horizon(self) -> float:
        """Return the time before which evidence is of no use; what was forgotten once is not taken again."""
        self.horizon = max(
            self.horizon, horizon(self.clock, (self.incidents[number] for number in self.unsettled)))
        return self.horizon

    def _note_rival(self, record: Record, heard: float) -> None:
        """Note that another attempt reports too, and goes on to."""
        attempt, name = self.attempt, record.attempt
        if attempt is None or not name or record.activity is None or record.end is not None:
            return
        known = self.rivals.get(name)
        if record.t <= self._beside(name) or (known is not None and (record.t <= known[2] or record.age <= known[3])):
            return
        self.rivals[name] = [*((record.t, heard) if known is None else known[:2]), record.t, record.age, heard]
        if len(self.rivals) > _RIVALS:
            del self.rivals[min(self.rivals, key=lambda other: self.rivals[other][4])]

    def _rival(self, now: float) -> bool:
        """Return whether another attempt reports as well, or one that has ended goes on to."""
        return any(
            last > first and last - self._beside(name) > _OVERLAP and self._fresh(now, last, met, heard)
            for name, (first, met, last, _, heard) in self.rivals.items())

    def _fresh(self, now: float, t: float, met: float, heard: float) -> bool:
        """Return whether the last word of somebody is of now, by the ledger's clock.

        A stamp of now is. Another is that of old records that arrive late, or of a clock that is wrong; its owner goes
        on to be heard.
        """
        if now - self.silent_after <= t <= now + _AHEAD:
            return True
        return now - heard <= self.silent_after and heard - met > _OVERLAP

    def _beside(self, name: str) -> float:
        """Return since when a new word of this attempt is not to be expected."""
        attempt = self._attempt()
        if name == attempt.id and attempt.end is None:
            return inf
        return max(attempt.start, self.past.get(name, -inf))

    def _close_by_hand(self, record: Record) -> None:
        """End a run whose attempt has already ended, if that is what somebody says."""
        if record.event != "finish" or record.attempt or record.end not in _END_OF_RUN or self.ended is not None:
            return
        if self.attempt is not None and self.attempt.end is not None:
            self._end_run(record.end)
            self._pass(record.t, "down")
        elif self.attempt is None and self.submitted is not None:
            self._end_run(record.end)

    def _submission(self, at: float | None) -> None:
        if at is None or at < self.since:
            return
        self.resubmitted = max(self.resubmitted, at)
        if self.start is None:
            self.submitted = at if self.submitted is None else min(at, self.submitted)
        elif at <= self.start and (self.submitted is None or at < self.submitted):
            self.submitted = at
            self.seconds["queue"] = self.start - at

    def place(self, record: Record) -> Literal["here", "next", "late"]:
        """Return whether the record is of the open attempt, begins another, or is a late word of an old one."""
        attempt, born = self.attempt, record.born
        if attempt is None:
            return "late" if born is None else "next"
        name = record.attempt or attempt.id
        here = name == attempt.id and attempt.end is None
        known = self.sources.get(record.source) if here else None
        if known is None and (born if born is not None else record.t) <= self.past.get(name, -inf):
            return "late"
        if here:
            # Another process under the same attempt: a replaced rank if others carry on, else a restart.
            restarted = (
                known is not None and born is not None and born > known.t
                and (record.age < known.age or record.event == "start")
                and not any(self._lives(x, record.t) for x in self.sources.values() if x is not known)
            ) or (
                # In its place, but nobody was left to carry on.
                known is None and born is not None and record.activity is not None and not self._alive(born)
                and any(x.rank is not None and x.rank == record.rank and born > x.t for x in self.sources.values())
            )
            return "next" if restarted else "here"
        if name in self.past:
            return "late" if born is None else "next"
        # Of an attempt that only its end is known of, nobody knows whether it is a later one.
        later, news = born is not None and born > attempt.start, record.t > self.frontier
        # When attempts overlap the later start owns the clock, as long as it lives.
        opens = later and news if self.ended is not None else later or (news and not self._alive(record.t))
        return "next" if opens else "late"

    def _open(self, record: Record) -> None:
        at = record.born if record.born is not None else record.t
        if self.attempt is None:
            self.start = self.frontier = at
            if self.submitted is not None:
                self.seconds["queue"] = max(0.0, at - self.submitted)
        elif self.attempt.end is None:
            self._close(at, "silent", "down")
        else:
            if self.ended is not None and self.ended == self.attempt.end:  # which was not for good
                self._lose(self.ended, self.frontier, self.frontier)
            self._pass(at, "down")
        if self.attempt is not None:
            self._archive(self.attempt)
        self.touched |= self.sources.keys()
        self.sources = {}
        self.attempts += 1
        self.ended = None
        # Without a word on where it resumed, it is the last durable checkpoint.
        resumed = next((s for s in (record.restored_step, self.committed) if s is not None), 0.0)
        reported = self.high_water if self.high_water is not None else 0.0
        self.attempt = Attempt(
            record.attempt, at, resumed, reported, cursor=resumed, number=self.attempts, begin=self.frontier,
            newest=at)
        self.rivals.pop(record.attempt, None)

    def _archive(self, attempt: Attempt) -> None:
        """Keep the figures of an attempt that another follows."""
        self.history[attempt.number] = attempt.figures()
        self.rewritten.add(attempt.number)
        while len(self.history) >= HISTORY:
            oldest = next(iter(self.history))
            del self.history[oldest]
            self.rewritten.add(oldest)
            self.left_out += 1

    def _observe(self, record: Record, heard: float) -> None:
        """Take a snapshot into its source and, if that is the one followed, move the frontier."""
        attempt, activity = self._attempt(), record.activity
        if activity is None or record.born is None:
            return
        name, source = record.source, self.sources.get(record.source)
        if source is None:
            replaced = [
                other for other, x in self.sources.items()
                if x.rank is not None and x.rank == record.rank and record.born > x.t
            ]
            for other in replaced:
                del self.sources[other]
                self.touched.add(other)
            source = Source(
                record.born, record.t, epoch=attempt.epoch, restored=record.restored_step,
                flops_step=attempt.resumed, mark=attempt.mark)
            self.sources[name] = source
            attempt.nodes = max(attempt.nodes, len(self.sources))
        elif record.age < source.age:
            if record.gone or record.t - record.age <= source.t:
                return
            source.start, source.activity, source.base, source.epoch = record.t - record.age, {}, {}, attempt.epoch
            source.flops, source.fell, source.end = 0.0, None, None
        elif record.age == source.age or source.end is not None:
            return
        elif source.epoch != attempt.epoch:
            source.base, source.epoch = source.activity, attempt.epoch
        self.touched.add(name)
        attempt.elapsed = max(attempt.elapsed, source.seen + record.age - source.age)
        source.seen, source.heard = attempt.elapsed, heard
        source.met = heard if source.met == -inf else source.met
        attempt.skewed = attempt.skewed or record.t < attempt.newest - self.silent_after
        attempt.newest = max(attempt.newest, record.t)

        if not record.gone:  # else the stamp is of somebody who found it gone
            source.t = record.t
        source.age, source.activity = record.age, activity
        source.open_step = record.open_step_seconds if record.open_step_seconds is not None else 0.0
        source.rank = record.rank if record.rank is not None else source.rank
        source.gpus = record.gpus if record.gpus is not None else source.gpus
        source.peak = record.peak_flops if record.peak_flops is not None else source.peak
        self._credit(source)
        if record.restored_step not in (None, source.restored):
            # It went to another step without executing what lies between.
            source.restored = source.flops_step = record.restored_step
            if attempt.leader == name:
                attempt.cursor = record.restored_step
        if record.step is not None:
            self._count_flops(source, record.step, record.model_flops)
            source.step = record.step
            attempt.step = record.step if attempt.step is None else max(record.step, attempt.step)
            self.high_water = max(record.step, self.high_water if self.high_water is not None else 0.0)

        leader = self.sources.get(attempt.leader)
        if (
            leader is None or leader is source or not self._lives(leader, record.t)
            or _order(source) < _order(leader)
        ):
            if attempt.leader != name and source.step is not None:
                attempt.cursor = min(attempt.cursor, source.step)
            attempt.leader = name
            self._follow(source)
        if record.committed_step is not None:
            self._commit(record.committed_step, record.t)

    def _credit(self, source: Source) -> None:
        """Count a source's GPUs in what was booked before they were heard of: nodes push out of step.

        They are held since the attempt began, unless their process came later than a start-up explains.
        """
        attempt = self._attempt()
        gpus, peak = (max(0.0, (value or 0.0) - credited) for value, credited in (
            (source.gpus, source.credited_gpus), (source.peak, source.credited_peak)))
        source.credited_gpus += gpus
        source.credited_peak += peak
        passed, share = self.frontier - attempt.begin, 1.0
        if passed <= 0 or gpus == peak == 0:
            return
        attempt.gpus = max(attempt.gpus, self._sum("gpus"))
        if source.start > attempt.start + self.silent_after:
            share = min(1.0, max(0.0, self.frontier - source.start) / passed)
        for bucket, seconds in attempt.seconds.items():
            held = gpus * share * seconds
            self.gpu_seconds[bucket] += held
            attempt.gpu_seconds[bucket] = attempt.gpu_seconds.get(bucket, 0.0) + held
            if self.losing is not None and bucket not in _RETAINED:
                self.losing_gpu_seconds += held
        self.capacity += peak * share * attempt.priced

    def _count_flops(self, source: Source, step: float, flops: float | None) -> None:
        if flops is None:
            return
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
        if total > 0:
            if room > 0:
                for name, seconds in grown.items():
                    if name == "step":
                        self.pending += seconds * room / total
                    else:
                        self._book(name, seconds * room / total)
                self.frontier = source.position
            attempt.epoch += 1
            source.base, source.epoch = source.activity, attempt.epoch
        step = source.step
        if step is None:
            step = max((x.step for x in self.sources.values() if x.step is not None), default=None)
        ended = max(0.0, self.pending - source.open_step)
        if step is not None:
            self.positioned = True
            self._settle(step, ended)
        elif ended > 0:
            # Nobody knows the position: no lost work and no goodput can be told.
            self.positioned = False
            self._book("other", ended)
            self.pending -= ended
            self._back(self.frontier)
            self.recovering = None
        self._price()

    def _settle(self, step: float, ended: float) -> None:
        """Book the pending seconds that have ended, once the position changes: forward, or back to execute again."""
        attempt = self._attempt()
        begin = attempt.cursor
        if step == begin:
            return
        productive = ended * _above(begin, step, self.mark) if step > begin else 0.0
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

    def _commit(self, step: float, at: float) -> None:
        attempt = self._attempt()
        attempt.committed = step if attempt.committed is None else max(step, attempt.committed)
        if self.committed is None or step > self.committed:
            self.committed, self.committed_at = step, at
            if step > self.provisional_from:
                self.provisional *= _above(self.provisional_from, self.mark, step)
                self.provisional_from = step

    def _finish(self, record: Record, end: str) -> None:
        """Take the end of a source, and of the attempt if that was its last."""
        source = self.sources.get(record.source)
        if source is not None and record.attempt:
            if record.t < source.t:
                return
            source.end = end
            self.touched.add(record.source)
        alive = self._alive(record.t)
        said_of_all = source is None and end != "gone"  # by a scheduler, or by hand
        if alive and end not in _END_OF_RUN and not said_of_all:
            return
        if said_of_all and not alive:
            self._close(record.t, end, "down")
        else:
            self._close(record.t, end, "other" if end in _END_OF_RUN else "lost")

    def _close(self, at: float, end: str, rest: str) -> None:
        """End the attempt at a time and book what is left of it."""
        attempt = self._attempt()
        heard, hung = attempt.start, 0.0
        if self.sources:
            furthest = max(self.sources.values(), key=lambda x: x.position)
            heard, hung = furthest.t, furthest.open_step
            self._follow(furthest)
        if end == "silent":
            said = [x.end for x in self.sources.values()]
            end = next((status for status in ("failed", "preempted", "resized", "gone") if status in said), end)
        end = "failed" if end == "gone" else end
        if end not in _END_OF_RUN:
            self._lose(end, heard, at, hung)
        # After the last step of a run that ended in order nothing was cut short.
        self._book("other" if end in _END_OF_RUN else "lost", self.pending)
        self.pending = 0.0
        attempt.end = end
        self.ends[end] += 1
        self._pass(min(at, heard), "other")
        if rest != "down":
            self._pass(at, rest)
        attempt.over = self.frontier
        self._pass(at, rest)
        if end in _END_OF_RUN:
            self._end_run(end)
        self.past.pop(attempt.id, None)
        self.past[attempt.id] = max(self.frontier, *(x.t for x in self.sources.values()), attempt.start)
        while len(self.past) > _PAST:
            del self.past[next(iter(self.past))]

    def _lose(self, end: str, heard: float, at: float, hung: float = 0.0) -> None:
        """Begin an incident: an attempt has ended so, was last heard of then, and its end was noticed at that time.

        It may have hung before, so many seconds: what held it up came before those.
        """
        self._back(heard)
        self.losses += 1
        number, attempt = self.losses, self._attempt()
        silent = {name: x.t for name, x in self.sources.items() if x.end is None} if end in _UNPLANNED else {}
        noticed = max(heard, min(at, heard + self.silent_after) if end == "silent" else at)
        self.incidents[number] = Incident(
            number, attempt.number, attempt.id, end, heard - hung, noticed, sorted(self.sources), len(self.sources),
            silent)
        self.losing = number
        self.unsettled.append(number)
        self.changed.add(number)
        if end in _UNPLANNED and self.recovering is None:
            self.recovering = attempt.number, heard
        if len(self.unsettled) > _UNSETTLED:
            self._settle_loss(self.incidents[self.unsettled[0]])
        while len(self.incidents) > HISTORY:
            oldest = next(iter(self.incidents))
            del self.incidents[oldest]
            self.changed.add(oldest)

    def _back(self, at: float) -> None:
        """End the incident that is under way: nothing booked from here on belongs to it."""
        if self.losing is not None:
            incident = self.incidents[self.losing]
            incident.back = max(at, incident.ended)
            incident.seconds, incident.gpu_seconds = self.losing_seconds, self.losing_gpu_seconds
            self.changed.add(self.losing)
            self.losing, self.losing_seconds, self.losing_gpu_seconds = None, 0.0, 0.0

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
        incident.settle(self.evidence)
        self.evidence.settled(incident.number)
        self.unsettled.remove(incident.number)
        self.changed.add(incident.number)
        self.settled[incident.cause] = self.settled.get(incident.cause, 0) + 1
        self.badput[incident.cause] = self.badput.get(incident.cause, 0.0) + incident.gpu_seconds
        self.evidence.forget(self._horizon())

    def _end_run(self, end: str) -> None:
        self.ended = end
        self._back(self.frontier)
        self.recovering = None

    def give_up(self) -> None:
        """Close a run that nobody brought back: it stopped when it was last heard of, and was not down since then."""
        if self.attempt is not None and self.attempt.end is None:
            self._close(max((x.t for x in self.sources.values()), default=self.frontier), "silent", "down")
        self._end_run("stopped")
        self._settle_losses()

    def _pass(self, until: float, bucket: str) -> None:
        """Move the frontier, all into one bucket."""
        if until > self.frontier:
            self._book(bucket, until - self.frontier)
            self.frontier = until

    def _book(self, bucket: str, seconds: float) -> None:
        self.seconds[bucket] += seconds
        attempt = self._attempt()
        losing = self.losing is not None and bucket not in _RETAINED
        if losing:
            self.losing_seconds += seconds
        if bucket == "down":
            attempt.down_seconds += seconds
        else:
            attempt.seconds[bucket] = attempt.seconds.get(bucket, 0.0) + seconds
        if bucket == "down" and (
            attempt.end in ("preempted", *_END_OF_RUN) or self.ended is not None or self.resubmitted > attempt.start
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

    def _attempt(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _lives(self, source: Source, t: float) -> bool:
        """Return whether a source has not ended and was heard of lately, as of a stamp of another."""
        if source.end is not None:
            return False
        attempt = self._attempt()
        return t - source.t <= self.silent_after or (
            attempt.skewed and attempt.elapsed - source.seen <= self.silent_after)

    def _alive(self, t: float) -> bool:
        """Return whether the attempt is open and any source of it was heard of lately, as of a stamp."""
        return self.attempt is not None and self.attempt.end is None and any(
            self._lives(x, t) for x in self.sources.values())

    def _reports(self, now: float) -> bool:
        """Return whether anything new of the attempt was heard lately, by the ledger's clock."""
        return self.attempt is not None and self.attempt.end is None and any(
            x.end is None and self._fresh(now, x.t, x.met, x.heard) for x in self.sources.values())

    def state(self, now: float | None = None) -> str:
        """Return queued, running, down, completed or stopped; without a time as of the last record."""
        if self.ended is not None:
            return self.ended
        if self.attempt is None:
            return "queued"
        if self._alive(self.last) if now is None else self._reports(now) or self._rival(now):
            return "running"
        return "queued" if self.attempt.end in _WAITS else "down"

    def conflict(self, now: float) -> bool:
        """Return whether two attempts report at once."""
        return self.ended is None and self._reports(now) and self._rival(now)

    def wall(self, now: float) -> float:
        """Return the seconds since the first process start, up to the end of the run or now."""
        if self.start is None:
            return 0.0
        return (self.frontier if self.ended is not None else max(now, self.frontier)) - self.start

    def open(self, now: float) -> float:
        """Return the seconds that no evidence brackets yet."""
        return self.pending + (max(0.0, now - self.frontier) if self.start is not None and self.ended is None else 0.0)

    def families(self, now: float, *, new: bool = False) -> list[Sample]:
        """Return every sample of the run; one that is new has its counters at 0 and all its wall clock open."""
        run = (self.tenant, self.name)
        samples: list[Sample] = []

        def add(row: Metric, value: float | None, *label: str) -> None:
            if value is not None:
                samples.append((row, (*run, *label), 0.0 if new and row.type == "counter" else value))

        for bucket in BUCKETS:
            unknown = (bucket == "queue" and self.submitted is None) or (
                bucket in ("productive", "lost", "generation") and not self.positioned and self.high_water is None)
            if unknown and self.seconds[bucket] == 0:
                continue
            add(m.RUN_SECONDS, self.seconds[bucket], bucket)
            add(m.RUN_GPU_SECONDS, self.gpu_seconds[bucket], bucket)
        add(m.RUN_OPEN_SECONDS, self.wall(now) if new else self.open(now))
        add(m.RUN_PROVISIONAL_SECONDS, self.provisional if self.positioned else None)
        if any(x.gpus is not None for x in self.sources.values()):
            add(m.RUN_GPUS, self._sum("gpus"))
        state = self.state(now)
        for other in STATES:
            add(m.RUN_STATE, float(other == state), other)
        add(m.RUN_ATTEMPTS, self.attempts)
        for end, count in self.ends.items():
            add(m.RUN_ENDS, count, end)
        if self.positioned or self.high_water is not None:
            add(m.RUN_RECOVERIES, self.recoveries)
            add(m.RUN_RECOVERY_SECONDS, self.recovery_seconds)
        for cause in CAUSES:
            add(m.RUN_INCIDENTS, self.settled.get(cause, 0), cause)
            add(m.RUN_BADPUT_GPU_SECONDS, self.badput.get(cause, 0.0), cause)
        add(m.RUN_CONFLICT, float(self.conflict(now)))
        add(m.RUN_POSITION_STEPS, self.high_water)
        add(m.RUN_COMMITTED_STEPS, self.committed)
        add(m.RUN_COMMITTED_TIMESTAMP, self.committed_at)
        if self.flops and self.capacity > 0:
            add(m.RUN_MODEL_FLOPS, self.retained)
            add(m.RUN_CAPACITY_FLOPS, self.capacity)
        add(m.RUN_START, self.start)
        return samples

    def summary(self, at: float | None = None) -> dict[str, Any]:
        """Return the figures of the run at a time, else as of its last record; a ratio that cannot be told is None."""
        now = self.last if at is None else at
        wall = self.wall(now)
        done = self.seconds["productive"] + self.seconds["generation"] if self.high_water is not None else None
        waited = wall + self.seconds["queue"] if self.submitted is not None else 0.0
        return {
            "goodput": done / wall if done is not None and wall > 0 else None,
            "ettr": done / waited if done is not None and waited > 0 else None,
            "effective_mfu": self.retained / self.capacity if self.flops and self.capacity > 0 else None,
            "attempts": self.attempts,
            "buckets": dict(self.seconds),
            "gpu_seconds": dict(self.gpu_seconds),
            "open_seconds": self.open(now),
            "provisional_seconds": self.provisional,
            "wall_seconds": wall,
            "state": self.state(at),
            "conflict": self.conflict(now),
            "ends": dict(self.ends),
            "recoveries": self.recoveries,
            "recovery_seconds": self.recovery_seconds,
            "incidents": dict(self.settled),
            "badput_gpu_seconds": dict(self.badput),
            "high_water_step": self.high_water,
            "committed_step": self.committed,
            "committed_timestamp": self.committed_at,
            "retained_flops": self.retained,
            "capacity_flops": self.capacity,
        }

    def figures(self, now: float) -> dict[str, Any]:
        """Return the whole record of the run: its summary, its attempts and its incidents, the oldest first."""
        summary = self.summary(now)
        incidents = {number: incident.figures(self.evidence) for number, incident in self.incidents.items()}
        if self.losing is not None:
            incidents[self.losing] |= {"seconds": self.losing_seconds, "gpu_seconds": self.losing_gpu_seconds}
        attempts = [*map(dict, self.history.values()), *([] if self.attempt is None else [self.attempt.figures()])]
        return {
            "tenant": self.tenant, "run": self.name, "generation": self.generation, "at": now,
            "submitted": self.submitted, "start": self.start, "frontier": self.frontier,
            "buckets": summary.pop("buckets"), "gpu_seconds": summary.pop("gpu_seconds"), "summary": summary,
            "attempts": attempts, "attempts_left_out": self.left_out,
            "incidents": list(incidents.values()),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the state without what is kept apart: there is a source for every node, and ever more history."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        state |= {name: None for name in _TIMES if state[name] == -inf}
        return state | {"attempt": None if self.attempt is None else asdict(self.attempt)}

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], sources: Mapping[str, Mapping[str, Any]],
        history: Mapping[int, dict[str, Any]] = MappingProxyType({}),
        incidents: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
        evidence: Mapping[str, list[Any]] = MappingProxyType({}),
    ) -> Run:
        """Return the run saved by `to_json`, also by that of format 1, with what is kept apart."""
        values = {"first": 0.0} | dict(state)
        values |= {name: -inf for name in _TIMES if values.get(name) is None}
        if values["attempt"] is not None:
            values["attempt"] = Attempt(
                **{"number": values["attempts"], "begin": values["attempt"]["start"]} | values["attempt"])
        if values.get("recovering") is not None:
            values["recovering"] = tuple(values["recovering"])
        run = cls(
            **values,
            sources={name: Source(**{"heard": one["t"], "met": one["t"], "credited_gpus": one["gpus"] or 0.0,
                                     "credited_peak": one["peak"] or 0.0, **one}) for name, one in sources.items()},
            history=dict(history), incidents={number: Incident(**one) for number, one in incidents.items()})
        run.evidence.restore(evidence)
        return run


def _order(source: Source) -> float:
    return source.rank if source.rank is not None else inf


def _above(begin: float, end: float, mark: float) -> float:
    """Return the share of the steps (begin, end] that lies above the mark."""
    return (end - min(max(begin, mark), end)) / (end - begin) if end > begin else 0.0


class Ledger:
    """All runs."""

    def __init__(self, silent_after: float = 60.0) -> None:
        self._silent_after = silent_after
        self.runs: dict[Key, Run] = {}

    def apply(self, line: Mapping[str, Any] | Record, heard: float | None = None) -> set[Key]:
        """Take a record, heard at that time, else when stamped; return the runs it may have changed.

        Raises RecordError and changes nothing.
        """
        record = line if isinstance(line, Record) else Record.parse(line)
        key, changed = record.key, {record.key}
        run = self.runs.get(key)
        if run is None:
            run = Run(*key, self._silent_after)
        elif run.ended == "completed" and record.event != "submitted" and run.place(record) == "next":
            old, run = run, Run(*key, self._silent_after, generation=run.generation + 1, since=run.frontier)
            old.name = f"{old.name}#{old.generation}"
            for one in (old, run):
                one.touched |= old.sources.keys()
                one.rewritten |= old.history.keys()
                one.changed |= old.incidents.keys()
                one.evidence.touched |= set(old.evidence.hosts())
            run.past = dict(old.past)
            self.runs[old.tenant, old.name] = old
            changed.add((old.tenant, old.name))
            if old.resubmitted > old.frontier:
                run.submitted = run.resubmitted = old.resubmitted
        run.apply(record, heard)
        if run.attempt is not None or run.submitted is not None:  # not for the echo of a run forgotten long ago
            self.runs[key] = run
        return changed

    def families(self, now: float, new: Container[Key] = ()) -> list[Sample]:
        """Return the samples of all runs, those of a family together; some runs may be new."""
        samples = [sample for key, run in self.runs.items() for sample in run.families(now, new=key in new)]
        return sorted(samples, key=lambda sample: sample[0].name)

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the figures of every run, up to now or else to its last record."""
        return {"runs": {
            f"{tenant}/{name}" if tenant else name: run.summary(now) for (tenant, name), run in self.runs.items()
        }}
