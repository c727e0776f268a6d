"""Hangs of a run: how long its step is overdue, and the ranks that the others wait for (`flopwatch.verdicts.hangs`).

A step is overdue once it is open on all nodes for over 15 s, and five times the 99th percentile of the run's steps. The
collectives that ranks have called are compared once all nodes have reported them since then, because in a hang they
rise no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from flopwatch.catalogue.ranks import all_ranks_text
from flopwatch.ledger.record import LedgerRecord, RankCall
from flopwatch.ledger.reporters import Reporters

if TYPE_CHECKING:  # numpy takes memory that an exporter without runs need not have
    from flopwatch.verdicts.hangs import HangVerdict
    from flopwatch.verdicts.waits import Communicator

log = logging.getLogger(__name__)

CHECK_EVERY = 2.0  # seconds between two judgements


@dataclass
class Hangs:
    """Overdue step of one run, None while no step is, and the verdict on it. `communicator` makes one from its text."""

    reporters: Reporters
    communicator: Callable[[str, str, int], Communicator]
    overdue: float | None = None  # seconds that the step is open
    verdict: HangVerdict | None = None
    hosts: dict[int, str] = field(default_factory=dict)  # node of each rank
    _p99: float | None = None
    _calls: dict[str, tuple[RankCall, ...]] = field(default_factory=dict)  # by source, since the step is overdue
    _checked: float = -inf

    def take(self, record: LedgerRecord) -> None:
        """Take a record of the current attempt, and judge the run if its step is overdue."""
        self._p99 = record.step_p99 if record.step_p99 is not None else self._p99
        if (record.open_step_seconds or 0.0) < self._limit() or record.end is not None:
            self.overdue, self.verdict = None, None
            self._calls.clear()
            return
        self._calls[record.source] = record.calls
        if record.t < self._checked + CHECK_EVERY and self.overdue is not None:
            return
        self._checked = record.t
        try:
            self._judge()
        except Exception:
            # The accounting of the run must go on.
            log.exception("hang not judged")
            self.verdict = None

    def _limit(self) -> float:
        """Return the seconds after which an open step is overdue, infinite before the run has made steps."""
        if self._p99 is None:
            return inf
        from flopwatch.verdicts.hangs import overdue_after

        return overdue_after(self._p99)

    def _judge(self) -> None:
        from flopwatch.verdicts import hangs

        live = {name: node for name, node in self.reporters.nodes.items() if node.end is None}
        if not live.keys() <= self._calls.keys():
            return  # a node that has not reported yet may have gone on
        self.overdue = min(node.open_step for node in live.values()) if live else None
        rows = {call.rank: call for name in live for call in self._calls[name]}
        self.hosts = {call.rank: name for name in live for call in self._calls[name]}
        whole = all_ranks_text(len(rows))
        ranks = {}
        for rank, row in rows.items():
            called = {self.communicator(kind, text, len(rows)): int(number) for kind, text, number in row.groups}
            if row.default is not None:
                called[self.communicator("world", whole, len(rows))] = int(row.default)
            ranks[rank] = hangs.RankCalls(called, None, row.signs)
        self.verdict = hangs.judge(ranks)
