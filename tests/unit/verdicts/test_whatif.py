"""What a step would take without a rank's lateness, compared with the same simulated steps without it."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from flopwatch.verdicts.waits import Communicator, Interval
from flopwatch.verdicts.whatif import pipeline_seconds, step_seconds
from simulator.parallel_cases import case
from simulator.parallel_judge import intervals
from simulator.parallel_step import MICROBATCHES, step

STEPS = 24
KINDS = (*(f"late in {kind}" for kind in ("tp", "pp", "ep", "cp", "dp")), "two late", "slow stage", "uneven pipeline")
ALL = Communicator("dp", (0, 1, 2, 3))


@pytest.mark.long
@pytest.mark.parametrize("mend", ["all", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_the_late_ranks_takes_what_was_predicted(kind: str, mend: str) -> None:
    for seed in range(20):
        job = case(kind, seed)
        mended = job.ranks if mend == "all" else frozenset({min(job.ranks)})
        predicted = step_seconds(list(intervals(job.steps(str(seed), STEPS))), mended, MICROBATCHES)
        rng = random.Random(str(seed))
        without = []
        for _ in range(STEPS):
            disturbance = job.disturbance(rng)
            slow = {rank: factor for rank, factor in disturbance.slow.items() if rank not in mended}
            without.append(step(job.layout, replace(disturbance, slow=slow)).seconds)
        assert predicted == pytest.approx(fmean(without), rel=0.03), f"seed {seed}"


def test_mending_the_second_latest_rank_alone_gains_nothing() -> None:
    waits = {rank: {ALL: share} for rank, share in enumerate([0.0, 0.1, 0.3, 0.3])}
    run = [Interval.of(6, 2.0, waits, {})]
    assert step_seconds(run, {1}) == pytest.approx(2.0)
    assert step_seconds(run, {0}) == pytest.approx(2.0 * 0.9)
    assert step_seconds(run, {0, 1}) == pytest.approx(2.0 * 0.7)
    assert step_seconds(run, {2, 3}) == pytest.approx(2.0)


def test_a_pipeline_takes_its_slowest_stage_for_each_microbatch() -> None:
    assert pipeline_seconds([3.0], 4) == 3.0
    assert pipeline_seconds([4.0, 4.0], 4) == pytest.approx(5.0)
    assert pipeline_seconds([4.0] * 4, 8) == pytest.approx(4.0 * 11 / 8)
    assert pipeline_seconds([4.0, 8.0], 4) == pytest.approx(9.0)
