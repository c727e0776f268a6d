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
- Slow stretches and stalls (`flopwatch.ledger.slowdowns`) are losses too; what they cost is a part of the buckets their
  seconds are in. What is charged to the end of an attempt is not looked at again.
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
from dataclasses import asdict, dataclass, field, fields
from math import fsum, inf
from types import MappingProxyType
from typing import Any, Literal

from flopwatch.catalogue import Sample
from flopwatch.ledger import losses, views
from flopwatch.ledger.attempt import BUCKETS, END_OF_RUN, ENDS, Attempt, Source, order
from flopwatch.ledger.attribution import LOSSES
from flopwatch.ledger.booking import Booked
from flopwatch.ledger.clocks import AHEAD
from flopwatch.ledger.incidents import Incident
from flopwatch.ledger.record import Key, Record
from flopwatch.ledger.slowdowns import Found, Pace
from flopwatch.ledger.stragglers import Late, Wait

__all__ = ["BUCKETS", "Ledger", "Run", "Source"]

_WAITS = ("preempted", "resized")  # planned: the run waits for GPUs, and nobody is to be paged for it

# Of a run, what is no part of its one state.
_APART = ("sources", "touched", "attempt", "history", "rewritten", "incidents", "changed", "evidence")
_TIMES = ("since", "last", "resubmitted", "clock", "horizon")  # those that may be -inf, which JSON has no word for

_PAST = 100  # ended attempts a run remembers by name; older ones are known by their start


@dataclass(slots=True)
class Run(Booked):
    """The books of one run: bounded state, whatever the length of its history."""

    generation: int = 1
    first: float | None = None  # when it was first heard of, by the ledger's clock
    since: float = -inf  # nothing before this, the end of the previous generation, belongs to this one
    submitted: float | None = None
    start: float | None = None
    attempts: int = 0
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    left_out: int = 0  # attempts whose figures are no longer kept

    def apply(self, record: Record, heard: float | None = None) -> None:
        """Take a record of this run, heard at that time by the ledger's clock; in a replay when it was stamped."""
        heard = record.t if heard is None else heard
        self.first = heard if self.first is None else self.first
        record = self._aligned(record)
        self.last = max(self.last, record.t)
        self.clock = max(self.clock, min(record.t, heard + AHEAD))
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

    def _close_by_hand(self, record: Record) -> None:
        """End a run whose attempt has already ended, if that is what somebody says."""
        if record.event != "finish" or record.attempt or record.end not in END_OF_RUN or self.ended is not None:
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
        if self.ended is None and self._carries_on(record) and record.t > self.frontier:
            return "next"
        here = name == attempt.id and attempt.end is None
        known = self.sources.get(record.source) if here else None
        if known is None and (born if born is not None else record.t) <= self.past.get(name, -inf):
            return "late"
        if here:
            # Another process under the same attempt: a replaced rank if others carry on, else a restart.
            restarted = (
                known is not None
                and born is not None
                and born > known.t
                and (record.age < known.age or record.event == "start")
                and not any(self._lives(x, record.t) for x in self.sources.values() if x is not known)
            ) or (
                # In its place, but nobody was left to carry on.
                known is None
                and born is not None
                and record.activity is not None
                and not self._alive(born)
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
        carried = self.attempt is not None and self._carries_on(record)
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
        for number in self.unsettled:
            if self.incidents[number].until is None:
                self.incidents[number].until = at
                self.changed.add(number)
        self.touched |= self.sources.keys()
        self.sources = {}
        self.attempts += 1
        self.ended = None
        # Without a word on where it resumed, it is the last durable checkpoint.
        resumed = next(
            (s for s in (record.step if carried else None, record.restored_step, self.committed) if s is not None), 0.0
        )
        reported = self.high_water if self.high_water is not None else 0.0
        self.mark = max(self.mark, resumed)  # who has restored a step need not have been heard making it
        self.attempt = Attempt(
            record.attempt,
            at,
            resumed,
            reported,
            cursor=resumed,
            carried=carried,
            number=self.attempts,
            begin=self.frontier,
            newest=at,
            pace=Pace(at) if self.attempt is None else self.attempt.pace.following(at),
        )
        self.rivals.pop(record.attempt, None)

    def _archive(self, attempt: Attempt) -> None:
        """Keep the figures of an attempt that another follows."""
        self.history[attempt.number] = attempt.figures()
        self.rewritten.add(attempt.number)
        while len(self.history) >= losses.HISTORY:
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
                other
                for other, x in self.sources.items()
                if x.rank is not None and x.rank == record.rank and record.born > x.t
            ]
            gone = [self.sources.pop(other) for other in replaced]
            self.touched.update(replaced)
            source = Source(
                record.born,
                record.t,
                epoch=attempt.epoch,
                restored=record.restored_step,
                flops_step=attempt.resumed,
                mark=attempt.mark,
                # The GPUs it replaces were counted until now.
                credited_gpus=fsum(x.credited_gpus for x in gone),
                credited_peak=fsum(x.credited_peak for x in gone),
            )
            if attempt.carried and record.born <= attempt.begin:
                source.base, source.flops = activity, record.model_flops or 0.0
                source.flops_step = record.step if record.step is not None else attempt.resumed
            self.sources[name] = source
            attempt.nodes = max(attempt.nodes, len(self.sources))
        elif record.age < source.age:
            if record.gone or record.t - record.age <= source.t:
                return
            source.start, source.activity, source.base, source.epoch = record.t - record.age, {}, {}, attempt.epoch
            source.flops, source.fell, source.end = 0.0, None, None
        elif record.age == source.age or source.end is not None:
            if source.end is None and record.end is None:  # it lives, and says nothing of what it does
                source.t = max(source.t, record.t)
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
        grows = source.gpus is not None and (source.whole or heard - source.met > self.silent_after)
        if not self._partial(source, record):
            source.gpus = record.gpus if record.gpus is not None else source.gpus
            source.peak = record.peak_flops if record.peak_flops is not None else source.peak
        if source.window != attempt.late.number:
            source.waited, source.window = source.waits, attempt.late.number
        source.waits = record.waits
        if record.waits and self.straggler_gpu_seconds is None:
            self.straggler_gpu_seconds = 0.0
        source.whole = source.whole or (record.event == "start" and record.gpus is not None)
        self._credit(source, grows)
        if record.restored_step not in (None, source.restored):
            # It went to another step without executing what lies between.
            source.restored = source.flops_step = record.restored_step
            if attempt.leader == name:
                attempt.cursor = record.restored_step
        if record.step is not None:
            if record.event != "start":  # which says where it begins, and not yet that it goes on to tell
                source.step = record.step
            attempt.step = record.step if attempt.step is None else max(record.step, attempt.step)
            self.high_water = max(record.step, self.high_water if self.high_water is not None else 0.0)
        if record.model_flops is not None and attempt.step is not None:
            position = self._position(source)
            if position is not None:
                self._count_flops(source, position, record.model_flops)

        leader = self.sources.get(attempt.leader)
        if leader is None or leader is source or not self._lives(leader, record.t) or order(source) < order(leader):
            if attempt.leader != name and source.step is not None:
                attempt.cursor = min(attempt.cursor, source.step)
            attempt.leader = name
            self._follow(source)
        if record.committed_step is not None:
            self._commit(record.committed_step, record.t)

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
        if alive and end not in END_OF_RUN and not said_of_all:
            return
        if said_of_all and not alive:
            self._close(record.t, end, "down")
        else:
            self._close(record.t, end, "other" if end in END_OF_RUN else "lost")

    def _close(self, at: float, end: str, rest: str) -> None:
        """End the attempt at a time and book what is left of it."""
        attempt = self._attempt()
        heard, hung = attempt.start, 0.0
        if self.sources:
            furthest = max(self.sources.values(), key=lambda x: x.position)
            heard, hung = furthest.t, furthest.open_step
            self._follow(furthest)
        stalled: Found | None = None
        for found in attempt.pace.close():
            if found.kind == "end":
                stalled = found
            else:
                self._find(found)
        if end == "silent":
            said = [x.end for x in self.sources.values()]
            end = next((status for status in ("failed", "preempted", "resized", "gone") if status in said), end)
        end = "failed" if end == "gone" else end
        if end not in END_OF_RUN:
            self._lose(end, heard, at, hung, stalled)
        # After the last step of a run that was done nothing was cut short.
        self._book("other" if end == "completed" else "lost", self.pending)
        self.pending = 0.0
        attempt.end = end
        self.ends[end] += 1
        self._pass(min(at, heard), "other")
        if rest != "down":
            self._pass(at, rest)
        attempt.over = self.frontier
        self._pass(at, rest)
        if end in END_OF_RUN:
            self._end_run(end)
        self.past.pop(attempt.id, None)
        self.past[attempt.id] = max(self.frontier, *(x.t for x in self.sources.values()), attempt.start)
        while len(self.past) > _PAST:
            del self.past[next(iter(self.past))]

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
        return views.families(self, now, new=new)

    def summary(self, at: float | None = None) -> dict[str, Any]:
        """Return the figures of the run at a time, else as of its last record; a ratio that cannot be told is None."""
        return views.summary(self, at)

    def figures(self, now: float) -> dict[str, Any]:
        """Return the whole record of the run: its summary, its attempts and its incidents, the oldest first."""
        return views.figures(self, now)

    def to_json(self) -> dict[str, Any]:
        """Return the state without what is kept apart: there is a source for every node, and ever more history."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        state |= {name: None for name in _TIMES if state[name] == -inf}
        return state | {"attempt": None if self.attempt is None else asdict(self.attempt)}

    @classmethod
    def from_json(
        cls,
        state: Mapping[str, Any],
        sources: Mapping[str, Mapping[str, Any]],
        history: Mapping[int, dict[str, Any]] = MappingProxyType({}),
        incidents: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
        evidence: Mapping[str, list[Any]] = MappingProxyType({}),
    ) -> Run:
        """Return the run saved by `to_json`, also by those of formats 1 and 2, with what is kept apart."""
        values = {"first": 0.0} | dict(state)
        values |= {name: -inf for name in _TIMES if values.get(name) is None}
        for name in ("settled", "badput"):
            booked = values.get(name, {})
            values[name] = {kind: {} for kind in LOSSES} | (booked if booked.keys() <= set(LOSSES) else {"end": booked})
        if values["attempt"] is not None:
            attempt = {"number": values["attempts"], "begin": values["attempt"]["start"]} | values["attempt"]
            pace = attempt.pop("pace", None)
            values["attempt"] = Attempt(
                **attempt | {"late": Late(**attempt.get("late", {}))},
                pace=Pace(attempt["start"]) if pace is None else Pace.from_json(pace),
            )
        if values.get("recovering") is not None:
            values["recovering"] = tuple(values["recovering"])
        run = cls(
            **values,
            sources={name: _source(one) for name, one in sources.items()},
            history=dict(history),
            incidents={number: Incident(**one) for number, one in incidents.items()},
        )
        run.evidence.restore(evidence)
        return run


def _source(state: Mapping[str, Any]) -> Source:
    """Return a source that was saved, also by format 1."""
    values = {
        "heard": state["t"],
        "met": state["t"],
        "credited_gpus": state["gpus"] or 0.0,
        "credited_peak": state["peak"] or 0.0,
        **state,
    }
    for name in ("waits", "waited"):
        if values.get(name) is not None:
            values[name] = tuple(Wait(*one) for one in values[name])
    return Source(**values)


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
        return {
            "runs": {
                f"{tenant}/{name}" if tenant else name: run.summary(now) for (tenant, name), run in self.runs.items()
            }
        }
