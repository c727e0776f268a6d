"""Stacks of stragglers and of suspects of a hang: which ranks the ledger requests, and the texts that arrived."""

from dataclasses import dataclass, field
from math import inf

from flopwatch.catalogue.ranks import ranks_of
from flopwatch.ledger.hangs import Hangs
from flopwatch.ledger.record import LedgerRecord, RankStack
from flopwatch.ledger.reporters import Reporters
from flopwatch.ledger.stragglers import Stragglers

MAX_RANKS = 8  # of a run whose stacks are kept
KEPT = 3600.0  # seconds after which stacks that belong to no incident are dropped
AGAIN = 300.0  # seconds between requests for the stacks of stragglers, so that names that alternate cost little
SLOW = ("rank", "host", "group")  # kinds of stragglers that run slow code


@dataclass
class VerdictStacks:
    """Stacks of a run's last hang or straggler, and the ranks whose stacks have not arrived."""

    rows: list[RankStack] = field(default_factory=list)
    wanted: frozenset[int] = frozenset()
    of_straggler: bool = False  # whether the rows are of a straggler, not of a hang
    _hangs: bool = False
    _answered: set[int] = field(default_factory=set)  # in the open step, or since the straggler was named
    _chosen: set[int] = field(default_factory=set)  # by the verdict
    _verdict: object = None
    _straggler: int | None = None  # the latest rank
    _again: float = -inf  # Unix time from which on stragglers are requested again

    def take(self, record: LedgerRecord, hangs: Hangs, stragglers: Stragglers, reporters: Reporters) -> None:
        """Store the stacks in a record that the verdicts have taken, and choose the ranks to request."""
        hang = hangs.seconds is not None
        late = [] if hang or (verdict := stragglers.verdict) is None or verdict.kind not in SLOW else verdict.suspects
        if hang != self._hangs:
            self._again = -inf if hang and not self._answered else self._again
            self._hangs, self._answered, self._chosen, self._verdict, self._straggler = hang, set(), set(), None, None
        if hang and hangs.verdict is not self._verdict:  # the run may have thousands of nodes
            self._verdict, self._chosen = hangs.verdict, _ranks(hangs, reporters)
        if late and late[0].rank != self._straggler and record.t >= self._again:
            ranks = [one.rank for one in late]
            peers = sorted({*late[0].communicator.ranks}.difference(ranks))
            self._answered, self._chosen = set(), {*ranks[: MAX_RANKS - 1], *peers[:1]}
            self._straggler, self._again = ranks[0], record.t + AGAIN
        elif not late and not hang:
            self._straggler = None
        if new := {row[0]: row for row in record.stacks if hang or row[0] in self._chosen}:
            before = [row for row in self.rows if self._answered and row[0] not in new]
            self.rows, self.of_straggler = [*before, *new.values()][-MAX_RANKS:], not hang
            self._answered |= new.keys()
        elif not hang and not late and self.rows and record.t - self.rows[0][1] > KEPT:
            self.rows = []
        self.wanted = frozenset(self._chosen - self._answered) if hang or late else frozenset()

    def of_host(self, record: LedgerRecord) -> set[int]:
        """Return the ranks of the record's host whose stacks the ledger requests."""
        return {*self.wanted.intersection(ranks_of(record.ranks))} if self.wanted and record.ranks else set()

    def pop_since(self, began: float) -> list[RankStack]:
        """Remove and return the stacks of a hang taken at `began` or later, in Unix time."""
        found = [row for row in self.rows if row[1] >= began and not self.of_straggler]
        self.rows = [] if found else self.rows
        return found


def _ranks(hangs: Hangs, reporters: Reporters) -> set[int]:
    """Return the suspects, of a host its lowest rank, and a peer: the lowest other rank of the same communicator."""
    suspects = hangs.verdict.suspects[: MAX_RANKS - 1] if hangs.verdict is not None else ()
    lowest = {name: int(node.rank) for name, node in reporters.nodes.items() if node.rank is not None}
    hosts = {one.host for one in suspects if one.rank is None} & lowest.keys()
    ranks = {one.rank for one in suspects if one.rank is not None} | {lowest[name] for name in hosts}
    others = {lowest[name] for name in lowest.keys() - hosts} if hosts else {*range(len(ranks) + 1)}
    group = suspects[0].communicator if suspects else None
    return ranks | set(sorted((others if group is None else {*group.ranks}) - ranks)[: len(suspects)][:1])
