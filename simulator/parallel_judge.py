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
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import numpy as np

from flopwatch.catalogue.ranks import MESSAGES
from flopwatch.ledger.stragglers import NAMED
from flopwatch.verdicts import hangs, stragglers, waits, whatif
from flopwatch.verdicts.stragglers import StragglerVerdict
from flopwatch.verdicts.waits import POINT_TO_POINT, Array, Communicator, Interval
from simulator.parallel_cases import KINDS, ParallelCase, case, healthy
from simulator.parallel_step import Layout, Step, steps
from simulator.progress import progress

STEPS, SECONDS = 6, 15.0  # of an interval: steps of 2.5 s, and a report of each host in 15 s
WELL, DISTURBED = 4, 8  # intervals
HEALTHY_STEPS = 300
NAMES = ("rank", "group", "stage", "link", "missing")  # verdicts that name ranks


@dataclass(frozen=True)
class Outcome:
    """Verdict on one job, whether it names the right ranks and communicator, and the seconds until it first did.

    `misnamed` is whether it named a wrong rank at any time. `whatif` is the error of the predicted step without the
    disturbance, as a share.
    """

    verdict: str
    right: bool
    misnamed: bool
    communicator_right: bool | None  # None if the truth has no communicator
    after: float | None
    whatif: float | None = None


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


def intervals(steps: Iterable[Step]) -> Iterator[Interval]:
    """Yield the waits of successive steps in intervals."""
    every = list(steps)
    members: defaultdict[int, list[Communicator]] = defaultdict(list)
    for rank, group in dict.fromkeys(place for one in every for place in one.waits):
        members[rank].append(group)
    layout = waits.Layout(members)
    places = [layout.place(number) for number in range(len(layout.rank_of))]
    seconds = np.array([[step.waits.get((rank, group), 0.0) for group, rank in places] for step in every])
    for some in (slice(first, first + STEPS) for first in range(0, len(every), STEPS)):
        yield _interval(layout, [step.seconds for step in every[some]], seconds[some])


def _interval(layout: waits.Layout, steps: Sequence[float], seconds: Array) -> Interval:
    """Return an interval from the seconds of each of its steps, and those that each place waits in it."""
    each = np.ones(len(layout.ranks))
    return Interval(layout, len(steps) * each, sum(steps) * each, seconds.sum(axis=0), 0 * each, np.nan * each)


def judged(kind: str, seed: int, *, mend: bool = False) -> Outcome:
    """Return the outcome for the job of a kind and a seed. With `mend` it has the error of the predicted step."""
    job = case(kind, seed)
    return _stopped(job, seed) if job.verdict in ("missing", "no suspect") else _disturbed(job, seed, mend)


def _disturbed(job: ParallelCase, seed: int, mend: bool) -> Outcome:
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
    error = None
    if mend and after is not None and verdict.kind in NAMED:
        curve = whatif.curve(seen[-verdict.judged :], verdict)
        error = abs(curve[len(verdict.suspects)] / _mended_seconds(job, seed) - 1)
    return Outcome(verdict.kind, after is not None, misnamed, place_right, after, error)


def _mended_seconds(job: ParallelCase, seed: int) -> float:
    """Return the mean seconds of the same steps without what slows the job."""
    rng = random.Random(str(seed))
    disturbances = [replace(job.disturbance(rng), slow={}, links={}) for _ in range(DISTURBED * STEPS)]
    return fmean(step.seconds for step in steps(job.layout, disturbances))


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
    for kind in ("tp", "cp", "ep", "dp"):
        yield from layout.communicators(kind)
    for pair in layout.communicators(POINT_TO_POINT):
        yield from (Communicator(kind, pair.ranks) for kind in MESSAGES)


def misnamed_in(layout: Layout, hours: float, seed: int = 1) -> int:
    """Return how many intervals had a named rank in some hours of a healthy run, whose steps are drawn from 300."""
    rng, named = random.Random(seed), 0
    some = [next(intervals([step])) for step in healthy(layout).steps(str(seed), HEALTHY_STEPS)]
    seconds = np.array([one.waits * one.step_seconds for one in some])
    last: deque[Interval] = deque(maxlen=stragglers.WINDOWS[-1][0])
    for _ in range(round(hours * 3600 / SECONDS)):
        drawn = rng.choices(range(HEALTHY_STEPS), k=STEPS)
        last.append(_interval(some[0].layout, [some[number].step_seconds for number in drawn], seconds[drawn]))
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
        rows = [KindOutcomes(kind, kind in named) for kind in found]
        with progress(f"Judging {seeds * len(rows):,} jobs", seeds * len(rows)) as advance:
            for row in rows:
                for outcome in found[row.kind]:
                    row.outcomes.append(outcome)
                    advance(1)
        return rows


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
