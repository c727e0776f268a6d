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
from array import array
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from flopwatch.catalogue.ranks import ranks_of, ranks_text
from flopwatch.ledger.rank_waits import Processes, totals_of
from flopwatch.ledger.record import HostWaits, RankProcess
from flopwatch.verdicts import stragglers, whatif
from flopwatch.verdicts.waits import Communicator, Interval
from simulator.parallel_step import Layout

LATE, INTERVALS, STEPS, SECONDS = 77, 20, 6, 15.0
SHARE, LATE_SHARE = 0.1, 0.03  # of a step that a rank waits in each of its groups


def processes_of(ranks: int) -> tuple[RankProcess, ...]:
    """Return the process of each rank, with its groups."""
    layout, groups = Layout(tp=8, pp=8, dp=ranks // 64), defaultdict[int, list[tuple[str, str]]](list)
    for kind in ("tp", "dp", "pp"):
        for group in layout.communicators(kind):
            text = ranks_text(group.ranks) or ""
            for rank in group.ranks:
                groups[rank].append((kind, text))
    return tuple(RankProcess(rank, "", 0.0, tuple(own)) for rank, own in sorted(groups.items()))


@lru_cache(None)
def communicator(kind: str, text: str, ranks: int) -> Communicator:
    """Return the group of a kind with these ranks."""
    return Communicator(kind, ranks_of(text))


def totals(processes: Sequence[RankProcess], number: int, rng: random.Random) -> HostWaits:
    """Return the totals of all ranks after so many intervals, in which one rank is late."""
    steps, seconds, found = STEPS * number, SECONDS * number, array("d")
    for process in processes:
        share = LATE_SHARE if process.rank == LATE else SHARE
        waits = [seconds * share + rng.gauss(0, 0.05) for _ in process.groups]
        computed = seconds - sum(waits)
        found.extend((steps, seconds, 0.0, sum(waits), computed**2 / max(steps, 1), *waits))
    return HostWaits(tuple(processes), found.tobytes())


def measure(ranks: int) -> str:
    """Return what intervals, verdicts and what-if take for a run of so many ranks, as a line of text."""
    every, rng = processes_of(ranks), random.Random(1)
    processes = Processes([every], communicator)
    intervals: list[Interval] = []
    making: list[float] = []
    judging: list[float] = []
    before = totals_of([totals(every, 0, rng)])
    for number in range(1, INTERVALS + 1):
        host = totals(every, number, rng)
        began = time.perf_counter()
        now = totals_of([host])
        intervals.append(processes.interval(before, now))
        made = time.perf_counter()
        verdict = stragglers.judge(intervals)
        making.append(made - began)
        judging.append(time.perf_counter() - made)
        before = now
    assert [one.rank for one in verdict.suspects] == [LATE]
    began = time.perf_counter()
    whatif.curve(intervals[-verdict.judged :], verdict)
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
