"""Stragglers of a run: the verdict on its ranks' waits (`flopwatch.verdicts`), and the GPU time that late ranks cost.

Waits are cumulative. Each time that all live nodes have reported since the last time, their differences are an interval
of the run, at least 12 s long, or 8 s after steps became longer, and the last ones are judged. Nothing is saved: after
a restart of the ledger a verdict takes as long as at the start of a run (docs/stragglers.md).
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flopwatch.catalogue.ranks import count_of, ranks_of
from flopwatch.ledger.record import HostWaits, LedgerRecord
from flopwatch.ledger.reporters import Reporters

if TYPE_CHECKING:  # numpy takes memory that an exporter without runs need not have
    from concurrent.futures import Executor, Future

    from flopwatch.ledger.rank_waits import Processes
    from flopwatch.verdicts.stragglers import StragglerVerdict
    from flopwatch.verdicts.waits import Array, Communicator, Interval

log = logging.getLogger(__name__)

INTERVAL = 12.0  # seconds between two judgements at least: hosts send a record in about 15 s
EARLY, SHORT = 8.0, 4.0  # the same while records are early, and for the interval in which steps became longer
SHORT_EVERY = 60.0  # seconds between two of the latter
MAX_INTERVAL = 300.0  # seconds in which each rank must have a measured step
CHECK_EVERY = 5.0  # seconds between two looks for nodes that have not reported
HISTORY = 20  # intervals that are judged
MANY = 32  # nodes of a run whose judgement takes so long that records would wait for it
USUAL_AFTER, USUAL_OF, UNUSUAL = 8, 240, 3  # intervals before the usual wait is known; it is the median of so many
NAMED = ("rank", "host", "group", "link")  # verdicts that a repair mends, so that their share is lost
KINDS = (*NAMED, "stage", "imbalance", "communication")
# Why there is no verdict: a rank's waits are not measured, its groups are not known, it does not report, too few steps.
REASONS = ("waits", "groups", "ranks", "steps")


class NoVerdict(Exception):
    """Raised where waits cannot be judged. `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Finding(NamedTuple):
    """Verdict on a run with its reason, and the GPU-seconds lost in the last interval."""

    verdict: "StragglerVerdict | None"
    reason: str
    why: str
    whatif: Mapping[int, float] = MappingProxyType({})
    hosts: Mapping[int, str] = MappingProxyType({})
    lost: float = 0.0


@dataclass
class Stragglers:
    """Verdict on one run, None while there is none for `reason`, and GPU-seconds lost (None if nothing is measured)."""

    reporters: Reporters
    gpu_seconds: float | None = None
    verdict: "StragglerVerdict | None" = None
    reason: str = "waits"
    why: str = "no rank measures its waits for other ranks"
    whatif: Mapping[int, float] = field(default_factory=dict)  # seconds of a step by the number of late ranks mended
    hosts: Mapping[int, str] = field(default_factory=dict)  # node of each rank
    _latest: dict[str, HostWaits] = field(default_factory=dict)  # by source
    _fresh: set[str] = field(default_factory=set)  # sources that have reported since the last interval
    _judged: set[str] = field(default_factory=set)  # those that the executor looks at, until an interval is complete
    _work: "Future[Finding] | None" = None  # of the executor, which alone changes the fields below meanwhile
    _wanted: int = 1
    _since: float = -inf
    _early: bool = False  # whether a record since then is early
    _quick: bool = False  # whether the last interval is shorter than INTERVAL
    _short: float = -inf  # end of the last interval shorter than EARLY
    _check_at: float = -inf
    _processes: "Processes | None" = None
    _then: "Array" = None  # totals of all hosts at the end of the last interval
    _intervals: "deque[Interval]" = field(default_factory=lambda: deque(maxlen=HISTORY))
    _productive: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY + 1))  # at the end of each interval
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF))
    _communicators: "dict[tuple[str, str], Communicator]" = field(default_factory=dict)

    def take(self, record: LedgerRecord) -> None:
        """Store how long a node's ranks have waited so far."""
        if record.waits is not None and record.waits.processes:
            self._latest[record.source] = record.waits
            if record.early and not self._early:
                self._fresh.clear()  # all nodes send one soon, and the interval ends for all of them alike
                self._early = True
            self._fresh.add(record.source)
            if self.gpu_seconds is None:
                self.gpu_seconds = 0.0
        elif self._latest.pop(record.source, None) is not None:
            self._fresh.discard(record.source)

    def judge(self, now: float, productive: float, executor: "Executor | None" = None) -> None:
        """Judge the last intervals if another one is complete at `now`, a record's stamp, and count what was lost.

        `productive` has the productive GPU-seconds of the run up to now. The `executor` judges a run of MANY nodes.
        """
        self.collect()
        least = (SHORT if now >= self._short + SHORT_EVERY else EARLY) if self._early else INTERVAL
        if self._work is not None or self.gpu_seconds is None or now < max(self._since + least, self._check_at):
            return
        if len(self._fresh) < self._wanted and now < self._since + 2 * INTERVAL:
            return  # not all nodes are looked at with every record
        live = {name for name, node in self.reporters.nodes.items() if node.end is None}
        self._wanted = len(live)
        if missing := live - self._fresh:
            self._check_at = now + CHECK_EVERY
            if now - self._since > MAX_INTERVAL or not missing <= self._latest.keys():
                self._publish(self._give_up("waits", f"{min(missing)} reports no waits of its ranks", now))
            return
        for gone in self._latest.keys() - live:
            del self._latest[gone]
        self._judged, self._fresh = self._fresh, set()
        facts = dict(self._latest), self.reporters.total("gpus"), now, productive
        if executor is not None and len(live) >= MANY:
            self._work = executor.submit(self._conclude, *facts)
        else:
            self._publish(self._conclude(*facts))

    def collect(self) -> None:
        """Take the verdict of the executor, if there is one by now."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            self._publish(work.result())

    def _publish(self, finding: Finding) -> None:
        self.verdict, self.reason, self.why, self.whatif, self.hosts, lost = finding
        self.gpu_seconds = (self.gpu_seconds or 0.0) + lost
        # Without a new interval, these nodes need not report again.
        self._fresh |= self._judged & self._latest.keys()
        self._judged = set()

    @property
    def _finding(self) -> Finding:
        return Finding(self.verdict, self.reason, self.why, self.whatif, self.hosts)

    def _conclude(self, latest: Mapping[str, HostWaits], gpus: float, now: float, productive: float) -> Finding:
        """Return the finding with the latest waits of all nodes, which have `gpus`. A thread may run it."""
        try:
            return self._add_interval(latest, gpus, now, productive)
        except NoVerdict as why:
            return self._give_up(why.reason, str(why), now)
        except Exception:
            # The accounting of the run must go on.
            log.exception("stragglers not judged")
            return self._give_up("groups", "the waits cannot be judged, see the log", now)

    def _give_up(self, reason: str, why: str, now: float) -> Finding:
        self._processes, self._check_at = None, now + INTERVAL
        self._intervals.clear()
        self._productive.clear()
        return Finding(None, reason, why, hosts=self.hosts)

    def _add_interval(self, latest: Mapping[str, HostWaits], gpus: float, now: float, productive: float) -> Finding:
        """Add the steps since the last report of all nodes, and judge the last intervals. Raises NoVerdict."""
        from flopwatch.ledger.rank_waits import Processes, totals_of
        from flopwatch.verdicts.waits import NoSteps, Unmeasured

        before, of_hosts = self._processes, [host.processes for host in latest.values()]
        totals = totals_of(latest.values())
        try:
            if before is None or of_hosts != before.of_hosts:
                finding = self._finding._replace(hosts=_hosts_of(latest, gpus))
                self._processes = Processes(of_hosts, self.communicator)
                self._begin(totals, now, productive)
                if before is not None:
                    self._intervals.clear()
                    if why := _changed(before.started, self._processes.started):
                        return Finding(None, "ranks", why, hosts=finding.hosts)
                elif self.verdict is None and self.reason == "waits":
                    return Finding(None, "steps", "too few measured steps so far", hosts=finding.hosts)
                return finding
            self._intervals.append(before.interval(self._then, totals))
        except NoSteps as error:
            self._check_at = now + CHECK_EVERY
            if now - self._since > MAX_INTERVAL:
                raise NoVerdict("steps", str(error)) from None
            return self._finding
        except Unmeasured as error:
            raise NoVerdict("groups", str(error)) from None
        self._begin(totals, now, productive)
        return self._decide()

    def _begin(self, totals: "Array", now: float, productive: float) -> None:
        self._short = now if now < self._since + EARLY else self._short
        self._quick = now < self._since + INTERVAL
        self._then, self._since, self._early = totals, now, False
        self._productive.append(productive)
        self._judged = set()

    def communicator(self, kind: str, text: str, ranks: int) -> "Communicator":
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

    def _decide(self) -> Finding:
        """Judge the last intervals, and count the GPU time that the named ranks cost."""
        from flopwatch.verdicts import stragglers, waits, whatif

        intervals, before = list(self._intervals), self.verdict
        self._usual.append(stragglers.usual_wait(intervals[-1:]))
        usual = median([*self._usual][:-UNUSUAL]) if len(self._usual) >= USUAL_AFTER + UNUSUAL else None
        verdict = stragglers.judge(intervals, usual, self.hosts, fewest=3 if self._quick else 2)
        finding = Finding(verdict, "" if verdict.judged else "steps", verdict.why, hosts=self.hosts)
        if verdict.kind not in NAMED:
            return finding
        # What was lost while the verdict was not yet certain counts, too.
        judged = 1 if before is not None and before.kind in NAMED else verdict.judged
        ends = [*self._productive][-judged - 1 :]
        finding = finding._replace(lost=min(verdict.share, 1.0) * (ends[-1] - ends[0]))
        try:
            return finding._replace(whatif=whatif.curve(intervals[-verdict.judged :], verdict))
        except waits.Unmeasured as error:
            return finding._replace(why=f"what mending gains is unknown: {error}")


def _hosts_of(latest: Mapping[str, HostWaits], gpus: float) -> Mapping[int, str]:
    """Return the host of each rank. Raises NoVerdict unless there are as many as `gpus`, each on one host."""
    hosts: dict[int, str] = {}
    for name, of_node in latest.items():
        for rank, *_ in of_node.processes:
            if rank in hosts:
                raise NoVerdict("ranks", f"rank {rank} is on {name} and on {hosts[rank]}")
            hosts[rank] = name
    if len(hosts) != gpus:
        raise NoVerdict("ranks", f"the waits of {len(hosts)} ranks of {gpus:g} are known")
    return hosts


def _changed(before: Mapping[int, float], now: Mapping[int, float]) -> str:
    """Return why the processes differ from those before, given the start of each rank. Empty if they do not."""
    again = now.items() - before.items()
    return f"rank {min(again)[0]} started again" if again else "" if len(now) == len(before) else "ranks left"
