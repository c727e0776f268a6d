"""Cost of the verdict on a run's waits by its number of ranks, with tensor, data and pipeline parallelism.

    python -m bench.verdicts --ranks 1024 16384 131072

Prints the seconds to make an interval from two reports of all ranks, to judge the last 20 intervals, and to compute
what mending a rank gains, and the peak memory. The ledger makes and judges an interval in 15 s or more.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import defaultdict

from flopwatch.verdicts import stragglers, whatif
from flopwatch.verdicts.waits import Communicator, Interval, RankTotals
from simulator.parallel_step import Layout

LATE, INTERVALS, STEPS, SECONDS = 77, 20, 6, 15.0
SHARE, LATE_SHARE = 0.1, 0.03  # of a step that a rank waits in each of its groups

Groups = dict[int, list[Communicator]]


def groups_of(ranks: int) -> Groups:
    """Return the communicators of each rank."""
    layout, groups = Layout(tp=8, pp=8, dp=ranks // 64), defaultdict[int, list[Communicator]](list)
    for kind in ("tp", "dp", "pp"):
        for group in layout.communicators(kind):
            for rank in group.ranks:
                groups[rank].append(group)
    return groups


def totals(groups: Groups, number: int, rng: random.Random) -> dict[int, RankTotals]:
    """Return the totals of all ranks after so many intervals, in which one rank is late."""
    steps, seconds = STEPS * number, SECONDS * number
    return {
        rank: RankTotals(
            steps,
            seconds,
            {group: seconds * (LATE_SHARE if rank == LATE else SHARE) + rng.gauss(0, 0.05) for group in own},
        )
        for rank, own in groups.items()
    }


def measure(ranks: int) -> str:
    """Return what intervals, verdicts and what-if take for a run of so many ranks, as a line of text."""
    groups, rng = groups_of(ranks), random.Random(1)
    intervals: list[Interval] = []
    making: list[float] = []
    judging: list[float] = []
    before = totals(groups, 0, rng)
    for number in range(1, INTERVALS + 1):
        now = totals(groups, number, rng)
        began = time.perf_counter()
        intervals.append(Interval.between(before, now, intervals[-1].layout if intervals else None))
        made = time.perf_counter()
        verdict = stragglers.judge(intervals)
        making.append(made - began)
        judging.append(time.perf_counter() - made)
        before = now
    assert [one.rank for one in verdict.suspects] == [LATE]
    began = time.perf_counter()
    whatif.step_seconds(intervals[-verdict.judged :], {LATE}, 8)
    mending = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    interval, judged = (sorted(times)[INTERVALS // 2] for times in (making, judging))
    return f"{ranks} ranks: interval {interval:.3f} s, verdict {judged:.3f} s, what-if {mending:.3f} s, {peak:.0f} MiB"


def main() -> None:
    """Measure each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16_384], help="multiples of 64")
    for ranks in parser.parse_args().ranks:
        print(measure(ranks))


if __name__ == "__main__":
    main()
