"""Verdicts on simulated jobs with parallel groups, compared with the truth of each: the ranks they name, and how soon.

A job runs well at first, which gives its usual wait, and is then disturbed and judged at each interval of steps. A job
in which a rank stops is judged once, by the operations that its ranks have called.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from flopwatch.verdicts import hangs, stragglers
from flopwatch.verdicts.stragglers import StragglerVerdict
from flopwatch.verdicts.waits import POINT_TO_POINT, Communicator, Interval
from simulator.parallel_cases import KINDS, LAYOUTS, ParallelCase, case, healthy
from simulator.parallel_step import Layout, Step

STEPS, SECONDS = 6, 15.0  # of an interval: steps of 2.5 s, and a report of each host in 15 s
WELL, DISTURBED = 4, 8  # intervals
HEALTHY_STEPS = 300
NAMES = ("rank", "group", "stage", "link", "missing")  # verdicts that name ranks


@dataclass(frozen=True)
class Outcome:
    """Verdict on one job, whether it names the right ranks and communicator, and the seconds until it first did.

    `misnamed` is whether it named a wrong rank at any time.
    """

    verdict: str
    right: bool
    misnamed: bool
    communicator_right: bool | None  # None if the truth has no communicator
    after: float | None


@dataclass
class KindOutcomes:
    """Outcomes of the jobs of one kind."""

    kind: str
    names: bool  # ranks are to be named
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def verdicts(self) -> Counter[str]:
        """Return the number of jobs by verdict."""
        return Counter(one.verdict for one in self.outcomes)

    @property
    def right(self) -> int:
        """Return the number of jobs with the right verdict, ranks and communicator."""
        return sum(one.right and one.communicator_right is not False for one in self.outcomes)

    @property
    def misnamed(self) -> int:
        """Return the number of jobs in which a wrong rank was ever named."""
        return sum(one.misnamed for one in self.outcomes)

    def after(self, share: float) -> float | None:
        """Return the seconds after which `share` of the jobs that were judged right had their verdict, or None."""
        seconds = sorted(one.after for one in self.outcomes if one.after is not None)
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else None


def intervals(steps: Iterator[Step]) -> Iterator[Interval]:
    """Yield the waits of successive steps in intervals."""
    every = list(steps)
    for some in (every[first : first + STEPS] for first in range(0, len(every), STEPS)):
        seconds = sum(step.seconds for step in some)
        waits: defaultdict[int, defaultdict[Communicator, float]] = defaultdict(lambda: defaultdict(float))
        for step in some:
            for (rank, group), wait in step.waits.items():
                waits[rank][group] += wait / seconds
        yield Interval.of(len(some), seconds / len(some), waits, {})


def judged(kind: str, seed: int) -> Outcome:
    """Return the outcome for the job of a kind and a seed."""
    job = case(kind, seed)
    return _stopped(job, seed) if job.verdict in ("missing", "no suspect") else _disturbed(job, seed)


def _disturbed(job: ParallelCase, seed: int) -> Outcome:
    well = list(intervals(healthy(job.layout).steps(f"well {seed}", WELL * STEPS)))
    usual = stragglers.usual_wait(well)
    seen: list[Interval] = []
    after, misnamed, verdict = None, False, StragglerVerdict("none")
    for interval in intervals(job.steps(str(seed), DISTURBED * STEPS)):
        seen.append(interval)
        verdict = stragglers.judge(seen, usual)
        named = frozenset(suspect.rank for suspect in verdict.suspects)
        misnamed = misnamed or not named <= job.ranks
        if (verdict.kind, named) != (job.verdict, job.ranks):
            after = None
        elif after is None:
            after = SECONDS * len(seen)
    communicators = {suspect.communicator for suspect in verdict.suspects}
    place_right = None if job.communicator is None else communicators == {job.communicator}
    return Outcome(verdict.kind, after is not None, misnamed, place_right, after)


def _stopped(job: ParallelCase, seed: int) -> Outcome:
    (step,) = job.steps(str(seed), 1)
    called: dict[int, dict[Communicator, int]] = {rank: {} for rank in range(job.layout.size)}
    for group in _groups(job.layout):
        for rank in group.ranks:
            called[rank][group] = step.sequence[rank, group]
    verdict = hangs.judge({rank: hangs.RankState(called=numbers) for rank, numbers in called.items()})
    named = {suspect.rank for suspect in verdict.suspects}
    communicators = {suspect.communicator for suspect in verdict.suspects}
    place_right = None if job.communicator is None else communicators == {job.communicator}
    right = named == job.ranks or (job.verdict == "no suspect" and not named)
    return Outcome("missing" if named else "no suspect", right, not named <= job.ranks, place_right, None)


def _groups(layout: Layout) -> Iterator[Communicator]:
    for kind in ("tp", "cp", "ep", "dp", POINT_TO_POINT):
        yield from layout.communicators(kind)


def misnamed_in(hours: float, seed: int = 1) -> int:
    """Return how many intervals had a named rank in `hours` hours of healthy runs, of all layouts together."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(partial(_misnamed, hours / len(LAYOUTS), seed), LAYOUTS.values()))


def _misnamed(hours: float, seed: int, layout: Layout) -> int:
    """Return how many intervals had a named rank. Steps are drawn from some hundred simulated ones."""
    rng, named = random.Random(seed), 0
    some = list(healthy(layout).steps(str(seed), HEALTHY_STEPS))
    last: deque[Interval] = deque(maxlen=stragglers.WINDOWS[-1][0])
    for _ in range(round(hours * 3600 / SECONDS)):
        last.extend(intervals(iter(rng.choices(some, k=STEPS))))
        named += bool(stragglers.judge(list(last)).suspects)
    return named


def evaluate(seeds: int, first: int = 1, kinds: Sequence[str] = tuple(KINDS)) -> list[KindOutcomes]:
    """Return the outcomes of `seeds` jobs of each kind, computed on all cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {
            kind: pool.map(partial(judged, kind), range(first, first + seeds), chunksize=max(1, seeds // 8))
            for kind in kinds
        }
        named = {kind for kind in kinds if (job := case(kind, first)).ranks and job.verdict != "no suspect"}
        return [KindOutcomes(kind, kind in named, list(outcomes)) for kind, outcomes in found.items()]


def table(rows: Sequence[KindOutcomes]) -> str:
    """Return the outcomes as a table with a row for each kind, and all together in the last line."""
    lines = [f"{'kind':<18}{'jobs':>6}{'right':>7}{'wrong':>7}{'95 % after':>12}  verdicts"]
    for row in rows:
        after = row.after(0.95)
        verdicts = ", ".join(f"{verdict} {count}" for verdict, count in row.verdicts.most_common())
        seconds = "-" if after is None else f"{after:.0f} s"
        lines.append(f"{row.kind:<18}{len(row.outcomes):>6}{row.right:>7}{row.misnamed:>7}{seconds:>12}  {verdicts}")
    outcomes = [outcome for row in rows for outcome in row.outcomes]
    asked = [one.communicator_right for one in outcomes if one.communicator_right is not None]
    lines.append(
        f"{len(outcomes)} jobs, {sum(row.right for row in rows)} judged right. "
        f"Precision {precision(rows):.1%}, "
        f"recall {_share(one.right for row in rows for one in row.outcomes if row.names):.1%}, "
        f"right communicator {_share(asked):.1%}"
    )
    return "\n".join(lines)


def precision(rows: Iterable[KindOutcomes]) -> float:
    """Return the share of the jobs with a named rank that never named a wrong one, 1 without such a job."""
    outcomes = [outcome for row in rows for outcome in row.outcomes]
    return 1 - _share(one.misnamed for one in outcomes if one.misnamed or one.verdict in NAMES)


def _share(flags: Iterable[bool]) -> float:
    """Return the share of flags that are set, 0 without any."""
    return fmean(found) if (found := list(flags)) else 0.0


def to_json(rows: Sequence[KindOutcomes]) -> list[dict[str, object]]:
    """Return the outcomes for `--json`."""
    return [
        {
            "kind": row.kind,
            "jobs": len(row.outcomes),
            "right": row.right,
            "misnamed": row.misnamed,
            "verdicts": dict(row.verdicts),
            "seconds_p95": row.after(0.95),
        }
        for row in rows
    ]
