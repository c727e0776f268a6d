"""Accounting of one run: turns cumulative snapshots into seconds per bucket. Reads no clock and no files.

Every second up to the *frontier*, a wall-clock time, is attributed once. *Pending* is the time of steps that have not
ended. For every run and at every moment

    sum of the buckets (without queue) + pending = frontier - first process start

A record that shows less than an earlier one of its source changes nothing: it is late or a duplicate.
docs/adr/0006-seconds-are-attributed-once.md has the rules.
"""

from concurrent.futures import Executor
from math import inf
from typing import Any, Literal

from flopwatch.ledger.attempt import END_OF_RUN, ENDS, Attempt, ReportingNode
from flopwatch.ledger.buckets import Buckets
from flopwatch.ledger.hangs import Hangs
from flopwatch.ledger.incidents import MAX_HISTORY, Incidents
from flopwatch.ledger.record import LedgerRecord
from flopwatch.ledger.reporters import Reporters
from flopwatch.ledger.slowdowns import Pace
from flopwatch.ledger.stacks import VerdictStacks
from flopwatch.ledger.stragglers import Stragglers

_QUEUES_AGAIN = ("preempted", "resized")  # planned ends after which a run waits for GPUs and is not down
_MAX_PAST = 100  # ended attempts that a run remembers by name; older ones are recognised by their start


class RunLedger:
    """Ledger of one run, fed with its records in order of arrival. Its memory is bounded however long the run lasts."""

    def __init__(
        self, tenant: str, name: str, silent_after: float, *, generation: int = 1, since: float = -inf
    ) -> None:
        self.tenant = tenant
        self.name = name
        self.generation = generation
        self.since = since  # end of the previous generation: nothing before it belongs to this one
        self.first: float | None = None  # ledger time of the first record
        self.submitted: float | None = None
        self.resubmitted = -inf
        self.start: float | None = None
        self.ended: str | None = None
        self.attempts = 0
        self.ends = dict.fromkeys(ENDS, 0)
        self.history: dict[int, dict[str, Any]] = {}  # figures of the attempts before the current one
        self.changed_history: set[int] = set()  # attempts in `history` that changed since the state was saved
        self.page = False  # whether its alerts may page at any size
        self.left_out = 0  # attempts whose figures are no longer kept
        self.executor: Executor | None = None  # judges a large run
        self.reporters = Reporters(silent_after)
        self.stacks = VerdictStacks()
        self.incidents = Incidents(self.reporters, self.stacks)
        self.buckets = Buckets(self.reporters, self.incidents)
        self.stragglers = Stragglers(self.reporters)
        self.hangs = Hangs(self.reporters, self.stragglers.communicator)

    @property
    def attempt(self) -> Attempt | None:
        """Return the current attempt, else the last one. None before the first attempt."""
        return self.reporters.attempt

    def apply(self, record: LedgerRecord, received: float | None = None) -> None:
        """Apply a record of this run. `received` is its arrival in Unix time, by default the record's own stamp."""
        received = record.t if received is None else received
        self.first = received if self.first is None else self.first
        record = self.reporters.realign(record, received)
        self.reporters.note_stamp(record.t, received)
        self._submit(record.submitted)
        if record.event != "submitted":
            self.incidents.take_evidence(record)
            self._take(record, received)
            self.incidents.take_sign_of_life(record)
        self.incidents.settle_ready(over=self.ended is not None)

    def _submit(self, at: float | None) -> None:
        if at is None or at < self.since:
            return
        self.resubmitted = max(self.resubmitted, at)
        if self.start is None:
            self.submitted = at if self.submitted is None else min(at, self.submitted)
        elif at <= self.start and (self.submitted is None or at < self.submitted):
            self.submitted = at
            self.buckets.seconds["queue"] = self.start - at

    def _take(self, record: LedgerRecord, received: float) -> None:
        place = self.place(record)
        if place == "late":
            self.reporters.note_other(record, received)
            self._end_by_hand(record)
            last = self.attempt.end if self.attempt is not None else None
            if self.ended is None and last in END_OF_RUN and not self.reporters.is_outlived(record.t):
                self._end_run(last)
            return
        if place == "next":
            self._open(record)
        self._observe(record, received)
        self.stacks.take(record, self.hangs, self.stragglers, self.reporters)
        if record.end is not None:
            self._finish(record, record.end)

    def place(self, record: LedgerRecord) -> Literal["here", "next", "late"]:
        """Return where a record belongs: to the current attempt (`here`), to the `next`, or to any other (`late`)."""
        attempt, born, past = self.attempt, record.born, self.reporters.past
        if attempt is None:
            return "late" if born is None else "next"
        name = record.attempt or attempt.id
        if self.ended is None and self.reporters.takes_over(record) and record.t > self.buckets.frontier:
            return "next"
        here = name == attempt.id and attempt.end is None
        node = self.reporters.nodes.get(record.source) if here else None
        if node is None and (born if born is not None else record.t) <= past.get(name, -inf):
            return "late"
        if here:
            return "next" if self._is_restart(record, born, node) else "here"
        if name in past:
            return "late" if born is None else "next"
        # An attempt without a start may be an older one.
        later, news = born is not None and born > attempt.start, record.t > self.buckets.frontier
        if self.ended is not None:
            # An attempt that began earlier but reports only now is live. Its first report may take long.
            return "next" if news and (later or (born is not None and record.end is None)) else "late"
        # When attempts overlap, the later start owns the clock for as long as it is live.
        return "next" if later or (news and not self.reporters.any_live(record.t)) else "late"

    def _is_restart(self, record: LedgerRecord, born: float | None, node: ReportingNode | None) -> bool:
        """Return whether a record with the current attempt's name is from a restart of all ranks, not of one."""
        if born is None:
            return False
        if node is None:
            replaces = record.activity is not None and self.reporters.replaced(record, born)
            return bool(replaces) and not self.reporters.any_live(born)
        newer = born > node.t and (record.age < node.age or record.event == "start")
        return newer and not self.reporters.any_live(record.t, but=node)

    def _open(self, record: LedgerRecord) -> None:
        """Start the next attempt with its first record, and close and archive the attempt before it."""
        at = record.born if record.born is not None else record.t
        last, buckets, self.page = self.attempt, self.buckets, False
        carried = last is not None and self.reporters.takes_over(record)
        if last is None:
            self.start = buckets.frontier = at
            if self.submitted is not None:
                buckets.seconds["queue"] = max(0.0, at - self.submitted)
        elif last.end is None:
            if record.overlaps:
                self.reporters.keep_current()
            self._close(at, "silent", "down")
        else:
            if self.ended is not None and self.ended == last.end:  # the run did not end after all
                self.incidents.open_end(self.ended, buckets.frontier, buckets.frontier)
            self._advance(at, "down")
        if last is not None:
            self._archive(last)
        self.incidents.next_attempt(at)
        self.stragglers = Stragglers(self.reporters, self.stragglers.gpu_seconds)
        self.hangs = Hangs(self.reporters, self.stragglers.communicator)
        self.reporters.changed |= self.reporters.nodes.keys()
        self.reporters.replace({})
        self.attempts += 1
        self.ended = None
        # An attempt that does not report where it resumed did so from the last durable checkpoint.
        steps = (record.step if carried else None, record.restored_step, buckets.committed)
        resumed = next((step for step in steps if step is not None), 0.0)
        reported = buckets.high_water if buckets.high_water is not None else 0.0
        buckets.mark = max(buckets.mark, resumed)  # a restored step was made, even if no report of it arrived
        attempt = Attempt(record.attempt, at, resumed, reported, cursor=resumed, carried=carried, number=self.attempts)
        attempt.begin, attempt.newest = buckets.frontier, at
        attempt.pace = Pace(at) if last is None else last.pace.following(at)
        self.reporters.attempt = attempt
        self.reporters.others.pop(record.attempt, None)

    def _archive(self, attempt: Attempt) -> None:
        self.history[attempt.number] = attempt.figures()
        self.changed_history.add(attempt.number)
        while len(self.history) >= MAX_HISTORY:
            oldest = next(iter(self.history))
            del self.history[oldest]
            self.changed_history.add(oldest)
            self.left_out += 1

    def _observe(self, record: LedgerRecord, received: float) -> None:
        """Store a record as its node's last report, and move the frontier if it is the node whose time is followed."""
        node = self.reporters.observe(record, received)
        self.hangs.take(record, received)
        if node is None:
            return
        attempt, name = self.reporters.current, record.source
        self.buckets.take_gpus(node, record, received)
        self.buckets.take_work(node, record.work)
        self.page = self.page or record.page
        self.stragglers.take(record)
        self._take_position(node, record)
        if self.reporters.should_lead(node, name, record.t):
            if attempt.leader != name and node.step is not None:
                attempt.cursor = min(attempt.cursor, node.step)
            attempt.leader = name
            self._follow(node)
        self.stragglers.judge(record.t, self.buckets.gpu_seconds["productive"], self.executor)
        if record.committed_step is not None:
            self.buckets.commit(record.committed_step, record.t)

    def _take_position(self, node: ReportingNode, record: LedgerRecord) -> None:
        attempt, buckets, step = self.reporters.current, self.buckets, record.step
        if record.restored_step is not None and record.restored_step != node.restored:
            # It moved to another step without executing those in between.
            node.restored = node.flops_step = record.restored_step
            if attempt.leader == record.source:
                attempt.cursor = record.restored_step
        if step is not None:
            if record.event != "start":  # a start has a step, but its node need not report steps later
                node.step = step
            attempt.step = step if attempt.step is None else max(step, attempt.step)
            buckets.high_water = max(step, buckets.high_water if buckets.high_water is not None else 0.0)
        if record.model_flops is not None and attempt.step is not None:
            position = self.reporters.step_of(node)
            if position is not None:
                buckets.take_flops(node, position, record.model_flops)

    def _follow(self, node: ReportingNode) -> None:
        """Attribute the node's time up to its last report. Time of ended steps becomes productive or lost."""
        attempt, buckets = self.reporters.current, self.buckets
        passed = buckets.follow(node)
        step = self.reporters.step_of(node)
        ended = max(0.0, buckets.pending - node.open_step)
        if step is not None:
            buckets.positioned = True
            attempt.pace.passed(passed, self.reporters.total("gpus"), still=step == attempt.cursor)
            if step != attempt.cursor:
                self._settle_steps(attempt, step, ended)
        elif ended > 0:  # without a position there is no lost work and no goodput
            buckets.positioned = False
            buckets.book_pending("other", ended)
            self.incidents.close_current(buckets.frontier)
            self.incidents.recovering = None
        buckets.price()

    def _settle_steps(self, attempt: Attempt, step: float, ended: float) -> None:
        """Attribute the time of the steps up to `step`, which may be below the last one, and look for slowdowns."""
        begin, buckets = attempt.cursor, self.buckets
        new = begin >= buckets.mark and self.incidents.current is None
        progress = buckets.settle_steps(begin, step, ended)
        if progress is not None:  # a step above the high-water mark ended
            self.incidents.close_current(progress)
            recovered = self.incidents.recover(progress)
            if recovered is not None and recovered[0] in self.history:
                self.history[recovered[0]]["recovery_seconds"] = recovered[1]
                self.changed_history.add(recovered[0])
        attempt.cursor = step
        for slowdown in attempt.pace.made(step - begin if new else 0.0, ended, buckets.frontier - buckets.pending):
            self.incidents.take_slowdown(slowdown)

    def _finish(self, record: LedgerRecord, end: str) -> None:
        """Store how a node ended. Close the attempt if none of its nodes is live or the whole run ended."""
        node = self.reporters.nodes.get(record.source)
        if node is not None and record.attempt:
            if record.t < node.t:
                return
            node.end = end
            self.reporters.changed.add(record.source)
        live = self.reporters.any_live(record.t)
        for_all = node is None and end != "gone"  # sent by a scheduler, or by hand
        if live and end not in END_OF_RUN and not for_all:
            return
        if for_all and not record.attempt:
            self.reporters.others.clear()
        if for_all and not live:
            self._close(record.t, end, "down", goes_on=record.overlaps)
        else:
            self._close(record.t, end, "other" if end in END_OF_RUN else "lost", goes_on=record.overlaps)

    def _close(self, at: float, end: str, rest: str, *, goes_on: bool = False) -> None:
        """End the attempt at `at`, and the run unless it `goes_on`. The time after the last report goes to `rest`."""
        attempt, buckets, nodes = self.reporters.current, self.buckets, self.reporters.nodes
        last_report, hung = attempt.start, 0.0
        if nodes:
            furthest = max(nodes.values(), key=lambda x: x.position)
            last_report, hung = furthest.t, furthest.open_step
            self._follow(furthest)
        stall = None
        for slowdown in attempt.pace.close():
            if slowdown.kind == "end":
                stall = slowdown
            else:
                self.incidents.take_slowdown(slowdown)
        if end == "silent":
            reported = {x.end for x in nodes.values()}
            end = next((status for status in ("failed", "preempted", "resized", "gone") if status in reported), end)
        end = "failed" if end == "gone" else end
        if end not in END_OF_RUN:
            self.incidents.open_end(end, last_report, at, hung, stall)
        # A run that completed had no step left to cut short.
        buckets.book_pending("other" if end == "completed" else "lost", buckets.pending)
        attempt.end = end
        self.ends[end] += 1
        self._advance(min(at, last_report), "other")
        if rest != "down":
            self._advance(at, rest)
        attempt.over = buckets.frontier
        self._advance(at, rest)
        if end in END_OF_RUN and not goes_on and not self.reporters.is_outlived(at):
            self._end_run(end)
        past = self.reporters.past
        past.pop(attempt.id, None)
        past[attempt.id] = max(buckets.frontier, *(x.t for x in nodes.values()), attempt.start)
        while len(past) > _MAX_PAST:
            del past[next(iter(past))]

    def _advance(self, until: float, bucket: str) -> None:
        """Move the frontier to `until` and attribute the time to `bucket`, without GPUs between two allocations."""
        attempt = self.reporters.current
        ended = attempt.end in ("preempted", *END_OF_RUN) or self.ended is not None
        released = bucket == "down" and (ended or self.resubmitted > attempt.start)
        self.buckets.advance_to(until, bucket, held=not released)

    def _end_by_hand(self, record: LedgerRecord) -> None:
        """End the run if the record is a finish without attempt and no attempt is open."""
        if record.event != "finish" or record.attempt or record.end not in END_OF_RUN or self.ended is not None:
            return
        if self.attempt is not None and self.attempt.end is not None:
            self._end_run(record.end)
            self._advance(record.t, "down")
        elif self.attempt is None and self.submitted is not None:
            self._end_run(record.end)

    def _end_run(self, end: str) -> None:
        self.ended = end
        self.incidents.close_current(self.buckets.frontier)
        self.incidents.recovering = None

    def give_up(self) -> None:
        """End an abandoned run as stopped at its last report, without down time since then."""
        if self.attempt is not None and self.attempt.end is None:
            last = max((x.t for x in self.reporters.nodes.values()), default=self.buckets.frontier)
            self._close(last, "silent", "down")
        self._end_run("stopped")
        self.incidents.settle_ready(over=True)

    def state(self, now: float | None = None) -> str:
        """Return queued, running, down, completed or stopped, as of `now` (Unix time) or else of the last record."""
        if self.ended is not None:
            return self.ended
        if self.attempt is None:
            return "queued"
        one = self.reporters
        if one.any_live(one.last) if now is None else one.is_reporting(now) or one.has_other(now):
            return "running"
        if self.attempt.end in END_OF_RUN:  # and the other attempt has been silent since
            return str(self.attempt.end)
        return "queued" if self.attempt.end in _QUEUES_AGAIN else "down"

    def conflict(self, now: float) -> bool:
        """Return whether two attempts of the run report at the same time, as of `now` in Unix time."""
        return self.ended is None and self.reporters.is_reporting(now) and self.reporters.has_other(now)

    def wall(self, now: float) -> float:
        """Return the run's wall-clock seconds, from its first process start to its end, or to `now` while it lasts."""
        if self.start is None:
            return 0.0
        frontier = self.buckets.frontier
        return (frontier if self.ended is not None else max(now, frontier)) - self.start

    def open(self, now: float) -> float:
        """Return the seconds up to `now` that are in no bucket yet, because no report shows how they were spent."""
        running = self.start is not None and self.ended is None
        return self.buckets.pending + (max(0.0, now - self.buckets.frontier) if running else 0.0)
