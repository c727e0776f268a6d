"""Stragglers of a run: the verdict on its ranks' waits (`flopwatch.verdicts`), and the GPU time that late ranks cost.

Waits are cumulative. Each time that all live nodes have reported since the last time, their differences are an interval
of the run, at least 12 s long, and the last intervals are judged. Nothing of this is saved: after a restart of the
ledger a verdict takes as long as at the start of the run. docs/stragglers.md has the rules.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, inf
from statistics import median
from typing import TYPE_CHECKING

from flopwatch.catalogue.ranks import count_of, ranks_of
from flopwatch.ledger.record import LedgerRecord, RankWait
from flopwatch.ledger.reporters import Reporters

if TYPE_CHECKING:  # numpy takes memory that an exporter without runs need not have
    from flopwatch.verdicts.stragglers import StragglerVerdict
    from flopwatch.verdicts.waits import Communicator, Interval, RankTotals

log = logging.getLogger(__name__)

INTERVAL = 12.0  # seconds between two judgements at least: hosts send a record in about 15 s
MAX_INTERVAL = 300.0  # seconds in which each rank must have a measured step
CHECK_EVERY = 5.0  # seconds between two looks for nodes that have not reported
HISTORY = 20  # intervals that are judged
USUAL_AFTER, USUAL_OF, UNUSUAL = 8, 240, 3  # intervals before the usual wait is known; it is the median of so many
NAMED = ("rank", "host", "group", "link")  # verdicts that a repair mends, so that their share is lost
KINDS = (*NAMED, "stage", "imbalance", "communication")
UNKNOWN_WAIT = 0.02  # of a step that a rank may wait in groups that are not known
# Why there is no verdict: a rank's waits are not measured, its groups are not known, it does not report, too few steps.
REASONS = ("waits", "groups", "ranks", "steps")

Rows = dict[int, RankWait]


class NoVerdict(Exception):
    """Raised where waits cannot be judged. `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Stragglers:
    """Verdict on one run, None while there is none for `reason`, and GPU-seconds lost (None if nothing is measured)."""

    reporters: Reporters
    gpu_seconds: float | None = None
    verdict: StragglerVerdict | None = None
    reason: str = "waits"
    why: str = "no rank measures its waits for other ranks"
    whatif: dict[int, float] = field(default_factory=dict)  # seconds of a step by the number of late ranks mended
    _latest: dict[str, tuple[RankWait, ...]] = field(default_factory=dict)  # by source
    _fresh: set[str] = field(default_factory=set)  # sources that have reported since the last interval
    _wanted: int = 1
    _since: float = -inf
    _check_at: float = -inf
    hosts: dict[int, str] = field(default_factory=dict)  # node of each rank
    _then: Rows = field(default_factory=dict)
    _intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _productive: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY + 1))  # at the end of each interval
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF))
    _of_places: dict[str, Communicator] = field(default_factory=dict)
    _communicators: dict[tuple[str, str], Communicator] = field(default_factory=dict)

    def take(self, record: LedgerRecord) -> None:
        """Store how long a node's ranks have waited so far."""
        if record.waits:
            self._latest[record.source] = record.waits
            self._fresh.add(record.source)
            if self.gpu_seconds is None:
                self.gpu_seconds = 0.0
        elif self._latest.pop(record.source, None) is not None:
            self._fresh.discard(record.source)

    def judge(self, now: float, productive: float) -> None:
        """Judge the last intervals if another one is complete at `now`, a record's stamp, and count what was lost.

        `productive` has the productive GPU-seconds of the run up to now.
        """
        if self.gpu_seconds is None or now < max(self._since + INTERVAL, self._check_at):
            return
        if len(self._fresh) < self._wanted and now < self._since + 2 * INTERVAL:
            return  # not all nodes are looked at with every record
        live = {name for name, node in self.reporters.nodes.items() if node.end is None}
        self._wanted = len(live)
        try:
            if missing := live - self._fresh:
                self._check_at = now + CHECK_EVERY
                if now - self._since > MAX_INTERVAL or not missing <= self._latest.keys():
                    raise NoVerdict("waits", f"{min(missing)} reports no waits of its ranks")
                return
            for gone in self._latest.keys() - live:
                del self._latest[gone]
            rows = self._rows()
            if self._add_interval(rows, now, productive):
                self._decide()
        except NoVerdict as why:
            self._give_up(why.reason, str(why), now)
        except Exception:
            # The accounting of the run must go on.
            log.exception("stragglers not judged")
            self._give_up("groups", "the waits cannot be judged, see the log", now)

    def _give_up(self, reason: str, why: str, now: float) -> None:
        self._then, self.verdict, self.reason, self.why, self.whatif = {}, None, reason, why, {}
        self._intervals.clear()
        self._productive.clear()
        self._check_at = now + CHECK_EVERY

    def _rows(self) -> Rows:
        rows: Rows = {}
        self.hosts = {}
        for name, of_node in self._latest.items():
            for row in of_node:
                if row.rank in rows:
                    raise NoVerdict("ranks", f"rank {row.rank} is on {name} and on {self.hosts[row.rank]}")
                rows[row.rank], self.hosts[row.rank] = row, name
        if len(rows) != self.reporters.total("gpus"):
            raise NoVerdict("ranks", f"the waits of {len(rows)} ranks of {self.reporters.total('gpus'):g} are known")
        return rows

    def _add_interval(self, rows: Rows, now: float, productive: float) -> bool:
        """Add the steps since the last report of all nodes. Return whether there are any. Raises NoVerdict."""
        from flopwatch.verdicts.waits import Interval, NoSteps, Unmeasured

        then = self._then
        again = {rank for rank, row in rows.items() if rank not in then or then[rank].started != row.started}
        if again or len(rows) != len(then):
            self._begin(rows, now, productive)
            if then:
                why = f"rank {min(again)} started again" if again else "ranks left"
                self.verdict, self.reason, self.why, self.whatif = None, "ranks", why, {}
                self._intervals.clear()
            elif self.verdict is None and self.reason == "waits":
                self.reason, self.why = "steps", "too few measured steps so far"
            return False
        layout = self._intervals[-1].layout if self._intervals else None
        try:
            self._intervals.append(Interval.between(self._totals(then), self._totals(rows), layout))
        except NoSteps as error:
            self._check_at = now + CHECK_EVERY
            if now - self._since > MAX_INTERVAL:
                raise NoVerdict("steps", str(error)) from None
            return False
        except Unmeasured as error:
            raise NoVerdict("groups", str(error)) from None
        if layout is not None and self._intervals[-1].layout is not layout:
            last = self._intervals[-1]
            self._intervals.clear()
            self._intervals.append(last)
        self._begin(rows, now, productive)
        return True

    def _begin(self, rows: Rows, now: float, productive: float) -> None:
        self._then, self._since = rows, now
        self._productive.append(productive)
        self._fresh.clear()

    def _totals(self, rows: Rows) -> Mapping[int, RankTotals]:
        from flopwatch.verdicts.waits import RankTotals

        whole = {} if any(row.groups for row in rows.values()) else self._by_place(rows)
        found = {}
        for rank, row in rows.items():
            if whole:
                waits = {whole[row.place]: row.wait}
            else:
                waits = {self.communicator(kind, text, len(rows)): wait for kind, text, wait in row.groups}
                if row.wait - fsum(waits.values()) > UNKNOWN_WAIT * row.seconds:
                    raise NoVerdict("groups", f"rank {rank} waits in process groups that are not known")
            found[rank] = RankTotals(row.steps, row.seconds, waits, row.tokens)
        return found

    def _by_place(self, rows: Rows) -> dict[str, Communicator]:
        """Return a communicator for the ranks of each pipeline stage, of ranks that do not tell groups apart."""
        from flopwatch.verdicts.waits import Communicator

        places: dict[str, list[int]] = {}
        for rank, row in sorted(rows.items()):
            places.setdefault(row.place, []).append(rank)
        kind = "dp" if len(places) > 1 else "world"
        found = {place: Communicator(kind, tuple(ranks)) for place, ranks in places.items()}
        if found != self._of_places:
            self._of_places = found
        return self._of_places  # the same objects, because comparing two with thousands of ranks takes long

    def communicator(self, kind: str, text: str, ranks: int) -> Communicator:
        """Return a process group by its kind and ranks. Raises NoVerdict if it has more than the run's `ranks`."""
        from flopwatch.verdicts.waits import Communicator

        found = self._communicators.get((kind, text))
        if found is None:
            if count_of(text) > ranks:
                raise NoVerdict("groups", f"the {kind} group of ranks {text} has more ranks than the run")
            if len(self._communicators) > 16 * ranks:  # of groups that are no more
                self._communicators.clear()
            found = self._communicators[kind, text] = Communicator(kind, ranks_of(text))
        return found

    def _decide(self) -> None:
        """Judge the last intervals, and count the GPU time that the named ranks cost."""
        from flopwatch.verdicts import stragglers, waits, whatif

        intervals, before = list(self._intervals), self.verdict
        self._usual.append(stragglers.usual_wait(intervals[-1:]))
        usual = median([*self._usual][:-UNUSUAL]) if len(self._usual) >= USUAL_AFTER + UNUSUAL else None
        self.verdict = verdict = stragglers.judge(intervals, usual, self.hosts)
        self.whatif, self.reason, self.why = {}, "" if verdict.judged else "steps", verdict.why
        if verdict.kind not in NAMED:
            return
        # What was lost while the verdict was not yet certain counts, too.
        judged = 1 if before is not None and before.kind in NAMED else verdict.judged
        ends = [*self._productive][-judged - 1 :]
        assert self.gpu_seconds is not None
        self.gpu_seconds += min(verdict.share, 1.0) * (ends[-1] - ends[0])
        if not any(group.kind == waits.POINT_TO_POINT for group in intervals[-1].layout.communicators):
            ranks = [one.rank for one in verdict.suspects]
            last = intervals[-verdict.judged :]
            numbers = sorted({0, len(ranks), *(number for number in (1, 2, 4) if number < len(ranks))})
            self.whatif = {number: whatif.step_seconds(last, set(ranks[:number])) for number in numbers}
