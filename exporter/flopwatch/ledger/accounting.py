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
- Down time counts as GPUs held, unless the attempt ended preempted or stopped, or the run was submitted again.

A record is cumulative and is used at most once: one that shows less than is known is late or a duplicate and changes
nothing. Records of ended attempts are ignored. A start after `completed` begins a new generation with new books (its
counters restart at 0); the old ones are kept as `RUN#GENERATION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import fsum, inf
from typing import Any, Literal

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.record import STATUSES, Key, Record

BUCKETS = (
    "productive", "lost", "startup", "compile", "data_stall", "checkpoint_save", "checkpoint_restore", "evaluation",
    "generation", "down", "queue", "other",
)
STATES = ("queued", "running", "down", "completed", "stopped")
ENDS = (*STATUSES, "silent")
_END_OF_RUN = ("completed", "stopped")
_WAITS = ("preempted", "resized")  # planned: the run waits for GPUs, and nobody is to be paged for it

_PAST = 100  # ended attempts a run remembers by name; older ones are known by their start


@dataclass(slots=True)
class Source:
    """What one source (a node) of the current attempt said last."""

    start: float  # of its process, by its own clock
    t: float
    rank: float | None = None
    age: float = 0.0
    activity: dict[str, float] = field(default_factory=dict)
    base: dict[str, float] = field(default_factory=dict)  # activity when the frontier last moved
    epoch: int = 0  # the move of the frontier that base belongs to
    open_step: float = 0.0
    step: float | None = None
    restored: float | None = None
    gpus: float | None = None
    peak: float | None = None
    flops: float = 0.0  # up to flops_step
    flops_step: float = 0.0
    fell: float | None = None  # since when it tells fewer FLOPs than before
    mark: float = 0.0  # steps up to here add no retained FLOPs
    end: str | None = None

    @property
    def position(self) -> float:
        """Return how far on the wall clock its activities reach."""
        return self.start + self.age

    def live(self, now: float, silent_after: float) -> bool:
        """Return whether it has not ended and was heard of lately."""
        return self.end is None and now - self.t <= silent_after


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


def _zeros() -> dict[str, float]:
    return dict.fromkeys(BUCKETS, 0.0)


@dataclass(slots=True)
class Run:
    """The books of one run: bounded state, whatever the length of its history."""

    tenant: str
    name: str
    silent_after: float
    generation: int = 1
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
    attempt: Attempt | None = None
    past: dict[str, float] = field(default_factory=dict)  # ended attempts and when they ended
    sources: dict[str, Source] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)  # sources changed since the state was last saved

    def apply(self, record: Record) -> None:
        """Take a record of this run."""
        self.last = max(self.last, record.t)
        self._submission(record.submitted)
        if record.event == "submitted":
            return
        place = self.place(record)
        if place == "late":
            return
        if place == "next":
            self._open(record)
        self._observe(record)
        if record.end is not None:
            self._finish(record, record.end)

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
                and not any(x.live(record.t, self.silent_after) for x in self.sources.values() if x is not known)
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
            self._pass(at, "down")
        self.touched |= self.sources.keys()
        self.sources = {}
        self.attempts += 1
        self.ended = None
        # Without a word on where it resumed, it is the last durable checkpoint.
        resumed = next((s for s in (record.restored_step, self.committed) if s is not None), 0.0)
        reported = self.high_water if self.high_water is not None else 0.0
        self.attempt = Attempt(record.attempt, at, resumed, reported, cursor=resumed)

    def _observe(self, record: Record) -> None:
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

        if not record.gone:  # else the stamp is of somebody who found it gone
            source.t = record.t
        source.age, source.activity = record.age, activity
        source.open_step = record.open_step_seconds if record.open_step_seconds is not None else 0.0
        source.rank = record.rank if record.rank is not None else source.rank
        source.gpus = record.gpus if record.gpus is not None else source.gpus
        source.peak = record.peak_flops if record.peak_flops is not None else source.peak
        if record.restored_step not in (None, source.restored):
            # It went to another step without executing what lies between.
            source.restored = source.flops_step = record.restored_step
            if attempt.leader == name:
                attempt.cursor = record.restored_step
        if record.step is not None:
            self._count_flops(source, record.step, record.model_flops)
            source.step = record.step
            self.high_water = max(record.step, self.high_water if self.high_water is not None else 0.0)

        leader = self.sources.get(attempt.leader)
        if (
            leader is None or leader is source or not leader.live(record.t, self.silent_after)
            or _order(source) < _order(leader)
        ):
            if attempt.leader != name and source.step is not None:
                attempt.cursor = min(attempt.cursor, source.step)
            attempt.leader = name
            self._follow(source)
        if record.committed_step is not None:
            self._commit(record.committed_step)

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
        attempt.cursor = step
        self.mark = max(self.mark, step)

    def _commit(self, step: float) -> None:
        if self.committed is None or step > self.committed:
            self.committed = step
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
        heard = attempt.start
        if self.sources:
            furthest = max(self.sources.values(), key=lambda x: x.position)
            heard = furthest.t
            self._follow(furthest)
        # After the last step of a run that ended in order nothing was cut short.
        self._book("other" if end in _END_OF_RUN else "lost", self.pending)
        self.pending = 0.0
        if end == "silent":
            said = [x.end for x in self.sources.values()]
            end = next((status for status in ("failed", "preempted", "resized", "gone") if status in said), end)
        attempt.end = "failed" if end == "gone" else end
        self.ends[attempt.end] += 1
        self._pass(min(at, heard), "other")
        self._pass(at, rest)
        if attempt.end in _END_OF_RUN:
            self.ended = attempt.end
        self.past.pop(attempt.id, None)
        self.past[attempt.id] = max(self.frontier, *(x.t for x in self.sources.values()), attempt.start)
        while len(self.past) > _PAST:
            del self.past[next(iter(self.past))]

    def _pass(self, until: float, bucket: str) -> None:
        """Move the frontier, all into one bucket."""
        if until > self.frontier:
            self._book(bucket, until - self.frontier)
            self.frontier = until

    def _book(self, bucket: str, seconds: float) -> None:
        self.seconds[bucket] += seconds
        attempt = self._attempt()
        if bucket == "down" and (attempt.end in ("preempted", "stopped") or self.resubmitted > attempt.start):
            return  # between two allocations
        self.gpu_seconds[bucket] += seconds * self._sum("gpus")
        self.unpriced_seconds += seconds
        self._price()

    def _price(self) -> None:
        """Count FLOPs and capacity, both or none: a share of the GPUs without a peak would flatter the ratio."""
        if self.sources and all(x.peak is not None for x in self.sources.values()):
            self.retained += self.unpriced_flops
            self.capacity += self.unpriced_seconds * self._sum("peak")
            self.unpriced_flops = self.unpriced_seconds = 0.0

    def _sum(self, name: str) -> float:
        return fsum(value for x in self.sources.values() if (value := getattr(x, name)) is not None)

    def _attempt(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _alive(self, now: float) -> bool:
        """Return whether the attempt is open and any source of it was heard of lately."""
        return self.attempt is not None and self.attempt.end is None and any(
            x.live(now, self.silent_after) for x in self.sources.values())

    def state(self, now: float) -> str:
        """Return queued, running, down, completed or stopped."""
        if self.attempt is None or self.attempt.end in _WAITS:
            return "queued"
        return self.ended if self.ended is not None else "running" if self._alive(now) else "down"

    def wall(self, now: float) -> float:
        """Return the seconds since the first process start, up to the end of the run or now."""
        if self.start is None:
            return 0.0
        return (self.frontier if self.ended is not None else max(now, self.frontier)) - self.start

    def open(self, now: float) -> float:
        """Return the seconds that no evidence brackets yet."""
        return self.pending + (max(0.0, now - self.frontier) if self.start is not None and self.ended is None else 0.0)

    def families(self, now: float) -> list[Sample]:
        """Return every sample of the run."""
        run = (self.tenant, self.name)
        samples: list[Sample] = []

        def add(row: Metric, value: float | None, *label: str) -> None:
            if value is not None:
                samples.append((row, (*run, *label), value))

        for bucket in BUCKETS:
            unknown = (bucket == "queue" and self.submitted is None) or (
                bucket in ("productive", "lost", "generation") and not self.positioned and self.high_water is None)
            if unknown and self.seconds[bucket] == 0:
                continue
            add(m.RUN_SECONDS, self.seconds[bucket], bucket)
            add(m.RUN_GPU_SECONDS, self.gpu_seconds[bucket], bucket)
        add(m.RUN_OPEN_SECONDS, self.open(now))
        add(m.RUN_PROVISIONAL_SECONDS, self.provisional if self.positioned else None)
        if any(x.gpus is not None for x in self.sources.values()):
            add(m.RUN_GPUS, self._sum("gpus"))
        state = self.state(now)
        for other in STATES:
            add(m.RUN_STATE, float(other == state), other)
        add(m.RUN_ATTEMPTS, self.attempts)
        for end, count in self.ends.items():
            add(m.RUN_ENDS, count, end)
        add(m.RUN_POSITION_STEPS, self.high_water)
        add(m.RUN_COMMITTED_STEPS, self.committed)
        if self.flops and self.capacity > 0:
            add(m.RUN_MODEL_FLOPS, self.retained)
            add(m.RUN_CAPACITY_FLOPS, self.capacity)
        add(m.RUN_START, self.start)
        return samples

    def summary(self, now: float) -> dict[str, Any]:
        """Return the figures of the run; a ratio that cannot be told is None."""
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
            "state": self.state(now),
            "ends": dict(self.ends),
            "high_water_step": self.high_water,
            "committed_step": self.committed,
            "retained_flops": self.retained,
            "capacity_flops": self.capacity,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the state without its sources, which are kept apart: there is one for every node."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sources", "touched", "attempt")}
        state |= {name: None for name in ("since", "last", "resubmitted") if state[name] == -inf}
        return state | {"attempt": None if self.attempt is None else asdict(self.attempt)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], sources: Mapping[str, Mapping[str, Any]]) -> Run:
        """Return the run saved by `to_json`."""
        values = dict(state)
        values |= {name: -inf for name in ("since", "last", "resubmitted") if values[name] is None}
        if values["attempt"] is not None:
            values["attempt"] = Attempt(**values["attempt"])
        return cls(**values, sources={name: Source(**source) for name, source in sources.items()})


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

    def apply(self, line: Mapping[str, Any] | Record) -> set[Key]:
        """Take a record and return the runs it may have changed. Raises RecordError and changes nothing."""
        record = line if isinstance(line, Record) else Record.parse(line)
        key, changed = record.key, {record.key}
        run = self.runs.get(key)
        if run is None:
            run = Run(*key, self._silent_after)
        elif run.ended == "completed" and record.event != "submitted" and run.place(record) == "next":
            old, run = run, Run(*key, self._silent_after, generation=run.generation + 1, since=run.frontier)
            old.name = f"{old.name}#{old.generation}"
            old.touched |= old.sources.keys()
            run.touched |= old.sources.keys()
            run.past = dict(old.past)
            self.runs[old.tenant, old.name] = old
            changed.add((old.tenant, old.name))
            if old.resubmitted > old.frontier:
                run.submitted = run.resubmitted = old.resubmitted
        run.apply(record)
        if run.attempt is not None or run.submitted is not None:  # not for the echo of a run forgotten long ago
            self.runs[key] = run
        return changed

    def families(self, now: float) -> list[Sample]:
        """Return the samples of all runs, those of a family together."""
        samples = [sample for run in self.runs.values() for sample in run.families(now)]
        return sorted(samples, key=lambda sample: sample[0].name)

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the figures of every run, up to now or else to its last record."""
        return {"runs": {
            f"{tenant}/{name}" if tenant else name: run.summary(run.last if now is None else now)
            for (tenant, name), run in self.runs.items()
        }}
