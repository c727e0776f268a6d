"""Hangs of a run: for how long it has been standing still, and the rank or host that the others wait for.

A step is overdue once it is open on all nodes for over 15 s, and five times the 99th percentile of the run's steps. The
run hangs if its ranks also call no further collectives, or, where these are not counted, if its GPUs are idle.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from flopwatch.catalogue.ranks import MESSAGES, all_ranks_text, count_of, ranks_of
from flopwatch.ledger.record import LedgerRecord, OpenStep
from flopwatch.ledger.reporters import Reporters
from flopwatch.verdicts.overdue import overdue_after

if TYPE_CHECKING:  # numpy takes memory that an exporter without runs need not have
    from flopwatch.verdicts.hangs import HangVerdict, RankState
    from flopwatch.verdicts.waits import Communicator

log = logging.getLogger(__name__)

STILL_FOR = 4.0  # seconds in which a node's ranks call no collective, two pushes
GONE_AFTER = 40.0  # seconds without a record of a node while the others stand still: two records were due
# The same once their step is overdue for MISSED seconds: a regular record is late by then, and two of an overdue step.
GONE_SOON, MISSED = 25.0, 10.0
GAP = 35.0  # seconds without a record of any node, two intervals, after which the ledger or its network was away
MANY, CHECK_EVERY = 64, 2.0  # nodes from which on a run is judged once in so many seconds, because records come often
ENDED = ("gone", "failed")  # ends of a node whose ranks the others may wait for

Numbers = dict[tuple[int, str, str], float]  # collectives called, by rank, and kind and ranks of the group


@dataclass
class LateNode:
    """Overdue step of a node as it last reported it, and since when its ranks have called no further collective."""

    step: OpenStep
    received: float
    numbers: Numbers
    still_since: float


@dataclass
class Hangs:
    """Hang of one run: `seconds` without a step (None: it does not hang), and the verdict on it.

    `communicator` makes one from its kind, its ranks and the number of the run's ranks.
    """

    reporters: Reporters
    communicator: "Callable[[str, str, int], Communicator]"
    seconds: float | None = None
    verdict: "HangVerdict | None" = None
    _p99: float | None = None
    _late: dict[str, LateNode] = field(default_factory=dict)  # by source
    _ranks: dict[str, str] = field(default_factory=dict)  # text of the ranks of each source
    _checked: float = -inf
    _last: float = -inf  # Unix time of the last record
    _since: float = -inf  # and of the first one without a gap

    def take(self, record: LedgerRecord, received: float) -> None:
        """Take a record of the current attempt, received at Unix time `received`, and judge the run."""
        self._p99 = record.step_p99 if record.step_p99 is not None else self._p99
        self._since = self._since if abs(received - self._last) <= GAP else received
        self._last = received
        if record.ranks:
            self._ranks[record.source] = record.ranks
        step = record.open_step
        if step is None or record.status is not None:
            self._late.pop(record.source, None)
            self.seconds, self.verdict = None, None
            return
        self._note(record.source, step, received)
        if len(self.reporters.nodes) > MANY and self._checked <= received < self._checked + CHECK_EVERY:
            return
        self._checked = received
        try:
            self._judge(received)
        except Exception:
            # The accounting of the run must go on.
            log.exception("hang not judged")
            self.seconds, self.verdict = None, None

    def _note(self, source: str, step: OpenStep, received: float) -> None:
        numbers: Numbers = {(row.rank, kind, ranks): number for row in step.ranks for kind, ranks, number in row.groups}
        numbers |= {(row.rank, "", ""): row.default for row in step.ranks if row.default is not None}
        before = self._late.get(source)
        if before is not None and step.t < before.step.t:
            return
        since = received
        if before is not None and step.seconds >= before.step.seconds:
            # The numbers of a rank that does not push are left out for a while.
            numbers = before.numbers | numbers
            if all(before.numbers.get(key, now) == now for key, now in numbers.items()):
                since = before.still_since
        self._late[source] = LateNode(step, received, numbers, since)

    def _judge(self, now: float) -> None:
        from flopwatch.verdicts import hangs

        self.seconds, before, self.verdict = None, self.verdict, None
        states: dict[int, RankState] = {}
        opened, still = inf, list[bool]()
        whole = max(
            sum(count_of(self._ranks[name]) for name in self.reporters.nodes if name in self._ranks),
            sum(len(late.step.ranks) for late in self._late.values()),
        )
        nodes = self.reporters.nodes
        heard = {name: late for name, late in self._late.items() if name in nodes and late.received >= now - GONE_AFTER}
        overdue = (late.step.seconds + now - late.received - self._limit(late.step) for late in heard.values())
        silent = now - (GONE_SOON if min(overdue, default=0.0) >= MISSED else GONE_AFTER)
        for name, node in nodes.items():
            late = heard.get(name)
            if late is not None:
                if late.step.seconds < self._limit(late.step):
                    return
                opened = min(opened, late.step.seconds)
                if late.numbers:
                    still.append(late.received - late.still_since >= STILL_FOR)
                states |= self._states(name, late.step, whole)
            elif node.end in ENDED or (node.end is None and max(node.heard, self._since) < silent):
                own = ranks_of(self._ranks[name]) if name in self._ranks else ()
                states |= dict.fromkeys(own, hangs.RankState(name, signs=("gone",)))
            elif node.end is None:
                return  # it has not reported since then, and may have gone on
        ranks = states.values()
        if opened == inf or hangs.does_work(ranks, still=all(still) if still else None):
            return
        self.seconds = opened
        self.verdict = hangs.judge(states, self._launched(whole))
        if before is None or before.suspects != self.verdict.suspects:
            log.info("hang seconds=%.0f suspects=%s", opened, [one[:2] for one in self.verdict.suspects])

    def _launched(self, whole: int) -> "dict[int, dict[Communicator, int]]":
        """Return 0 for the ranks that NCCL found behind in a communicator of the run's `whole` ranks, 1 for others."""
        numbers = [key for late in self._late.values() for key in late.numbers]
        kinds = {ranks: kind for _, kind, ranks in numbers if kind not in MESSAGES}
        kinds[all_ranks_text(whole)] = "world"
        launched: dict[int, dict[Communicator, int]] = {}
        for text, fewest in [pair for late in self._late.values() for pair in late.step.ras]:
            if max(count_of(text), count_of(fewest)) <= whole:
                group, behind = self.communicator(kinds.get(text, "group"), text, whole), {*ranks_of(fewest)}
                for rank in group.ranks:
                    launched.setdefault(rank, {})[group] = int(rank not in behind)
        return launched

    def _limit(self, step: OpenStep) -> float:
        """Return the seconds after which the open step is overdue, by the run's steps or else by the node's."""
        return overdue_after(self._p99) if self._p99 is not None else step.overdue_after

    def _states(self, source: str, step: OpenStep, whole: int) -> "dict[int, RankState]":
        """Return what is known of the ranks of a late node, of `whole` ranks of the run."""
        from flopwatch.verdicts import hangs

        states = {}
        for row in step.ranks:
            called = {self.communicator(kind, text, whole): int(number) for kind, text, number in row.groups}
            if row.default is not None:
                called[self.communicator("world", all_ranks_text(whole), whole)] = int(row.default)
            gpu = hangs.GpuLoad(*row.gpu) if row.gpu is not None else None
            states[row.rank] = hangs.RankState(source, called, row.signs, gpu)
        return states
