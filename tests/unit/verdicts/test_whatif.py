"""What a step would take without a rank's lateness, compared with the same simulated steps without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from flopwatch.verdicts.stragglers import StragglerVerdict, Suspect
from flopwatch.verdicts.waits import Array, Communicator, Interval, Layout, Unmeasured
from flopwatch.verdicts.whatif import WhatIf, curve, highest_falls, pipeline_seconds
from simulator.parallel_cases import ParallelCase, case
from simulator.parallel_judge import intervals
from simulator.parallel_step import step
from tests.support.waits import interval_of

STEPS = 24
LATE = (*(f"late in {kind}" for kind in ("tp", "pp", "ep", "cp", "dp")), "two late", "slow stage", "uneven pipeline")
ALL = Communicator("dp", (0, 1, 2, 3))


def seconds_of(job: ParallelCase, seed: int, mended: frozenset[int] = frozenset(), **change: Any) -> float:
    """Return the mean seconds of the job's steps in which these ranks are not slow."""
    rng, found = random.Random(str(seed)), []
    for _ in range(STEPS):
        disturbance = job.disturbance(rng)
        slow = {rank: factor for rank, factor in disturbance.slow.items() if rank not in mended}
        found.append(step(job.layout, replace(disturbance, slow=slow, **change)).seconds)
    return fmean(found)


@pytest.mark.long
@pytest.mark.parametrize("mend", ["all", "one"])
@pytest.mark.parametrize("kind", LATE)
def test_a_step_without_the_late_ranks_takes_what_was_predicted(kind: str, mend: str) -> None:
    for seed in range(20):
        job = case(kind, seed)
        mended = job.ranks if mend == "all" else frozenset({min(job.ranks)})
        predicted = WhatIf(list(intervals(job.steps(str(seed), STEPS)))).without(mended)
        assert predicted == pytest.approx(seconds_of(job, seed, mended), rel=0.03), f"seed {seed}"


@pytest.mark.parametrize("microbatches", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["late in pp", "two late"])
def test_the_microbatches_of_a_pipeline_follow_from_its_waits(
    kind: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.parallel_step.MICROBATCHES", microbatches)
    for seed in range(3):
        job = case(kind, seed)
        run = WhatIf(list(intervals(job.steps(str(seed), STEPS))))
        assert microbatches / 2 < run.microbatches <= microbatches  # transfers look like fewer
        assert run.without(job.ranks) == pytest.approx(seconds_of(job, seed, job.ranks), rel=0.03)


def test_a_step_without_a_slow_link_takes_what_was_predicted() -> None:
    for seed in range(3):
        job = case("slow link", seed)
        assert job.communicator is not None
        run = WhatIf(list(intervals(job.steps(str(seed), STEPS))))
        assert run.without_link(job.communicator) == pytest.approx(seconds_of(job, seed, links={}), rel=0.03)
        assert run.step_seconds > 1.05 * seconds_of(job, seed, links={})


def test_a_verdict_mends_its_latest_ranks_first() -> None:
    waits = {rank: {ALL: share} for rank, share in enumerate([0.0, 0.1, 0.3, 0.3])}
    verdict = StragglerVerdict("rank", 0.3, (Suspect(0, 0.3, ALL), Suspect(1, 0.2, ALL)))
    assert curve([interval_of(6, 2.0, waits, {})], verdict) == pytest.approx({0: 2.0, 1: 1.8, 2: 1.4})


def test_mending_the_second_latest_rank_alone_gains_nothing() -> None:
    waits = {rank: {ALL: share} for rank, share in enumerate([0.0, 0.1, 0.3, 0.3])}
    run = WhatIf([interval_of(6, 2.0, waits, {})])
    assert run.without({1}) == pytest.approx(2.0)
    assert run.without({0}) == pytest.approx(2.0 * 0.9)
    assert run.without({0, 1}) == pytest.approx(2.0 * 0.7)
    assert run.without({2, 3}) == pytest.approx(2.0)


def measured(computing: Array, lengths: Sequence[int] = (8,)) -> list[Interval]:
    """Return intervals of so many steps in turn from the seconds that each rank computes in a step.

    A step ends with its last rank.
    """
    layout, found = Layout({rank: [Communicator("dp", tuple(range(8)))] for rank in range(8)}), []
    each, turn = np.ones(8), cycle(lengths)
    while len(computing):
        some, computing = np.split(computing, [next(turn)])
        seconds = some.max(axis=1).sum()
        waits = seconds - some.sum(axis=0)
        found.append(Interval(layout, len(some) * each, seconds * each, waits, 0 * each, (some**2).sum(axis=0)))
    return found


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_step_ends_with_another_rank_once_the_straggler_is_mended(every: int) -> None:
    for seed in range(10):
        numbers = np.random.default_rng(seed)
        well = 1 + 0.04 * numbers.standard_normal((160, 8))
        late = well.copy()
        late[::every, 3] += 0.5
        mended = well.max(axis=1).mean()
        assert WhatIf(measured(late)).without({3}) == pytest.approx(mended, rel=0.015)
        unknown = measured(late)
        for one in unknown:
            one.squares = np.nan * one.squares
        assert (WhatIf(unknown).without({3}) > 1.015 * mended) == (every > 1)


@pytest.mark.parametrize("lengths", [(10, 10), (4, 16), (16, 4)])
def test_each_step_of_an_intermittent_straggler_counts_alike(lengths: tuple[int, int]) -> None:
    for seed in range(10):
        well = 1 + 0.01 * np.random.default_rng(seed).standard_normal((160, 8))
        late = well.copy()
        late[np.arange(160) % 20 < lengths[0], 3] += 0.5
        run = WhatIf(measured(late, lengths))
        assert run.step_seconds == pytest.approx(late.max(axis=1).mean())
        assert run.without({3}) == pytest.approx(well.max(axis=1).mean(), rel=0.005)


@pytest.mark.parametrize("lengths", [(10, 10), (2, 18)])
def test_replicas_vary_by_as_much_in_intervals_of_other_lengths(lengths: tuple[int, int]) -> None:
    well = 1 + 0.04 * np.random.default_rng(1).standard_normal((2000, 8))
    late = well.copy()
    late[:, 3] += 0.5
    predicted = [WhatIf(measured(some, lengths)).without({3}) for some in np.split(late, 100)]
    assert fmean(predicted) == pytest.approx(well.max(axis=1).mean(), rel=0.01)


def test_the_highest_of_numbers_that_vary_is_above_their_means() -> None:
    late, well, often = np.array([1.0, 1.0, 1.2, 1.3]), np.array([1.0, 1.0, 1.0, 1.1]), np.array([1.0, 1.0, 0.5, 1.0])
    numbers = np.random.default_rng(1)
    noise, is_late = 0.05 * numbers.standard_normal((100_000, 4)), numbers.random((100_000, 4)) < often
    before, after = well + noise + is_late * (late - well) / often, well + noise
    expected = before.max(axis=1).mean() - after.max(axis=1).mean()
    assert highest_falls(late, well, often, 0.05) == pytest.approx(expected, abs=1e-3)
    assert highest_falls(late, well, often, 0.0) == pytest.approx(0.2)
    assert highest_falls(well, well, np.ones(4), 0.05) == 0.0


def pipeline(*groups: tuple[int, ...], wait: float = 0.1) -> list[Interval]:
    """Return an interval of ranks that wait in the pipelines of these groups."""
    ranks = {rank for group in groups for rank in group}
    waits = {rank: {Communicator("pp", group): wait for group in groups if rank in group} for rank in ranks}
    return [interval_of(6, 2.0, waits, {})]


def test_what_the_waits_do_not_show_has_no_number() -> None:
    stages = {rank: {Communicator("dp", (rank // 2 * 2, rank // 2 * 2 + 1)): 0.1} for rank in range(4)}
    with pytest.raises(Unmeasured, match="that connect the stages of the pipeline are not known"):
        WhatIf([interval_of(6, 2.0, stages, {})])
    with pytest.raises(Unmeasured, match="the order of the pipeline's stages is not known"):
        WhatIf(pipeline((0, 1, 2, 3)))
    with pytest.raises(Unmeasured, match="wait longer than for each other"):
        WhatIf(pipeline((0, 1), wait=0.6)).without({0})
    with pytest.raises(Unmeasured, match="no replica to compare with"):
        WhatIf(pipeline((0, 1))).without_link(Communicator("pp", (0, 1)))


def test_a_pipeline_takes_its_slowest_stage_for_each_microbatch() -> None:
    assert pipeline_seconds([3.0], 4) == 3.0
    assert pipeline_seconds([4.0, 4.0], 4) == pytest.approx(5.0)
    assert pipeline_seconds([4.0] * 4, 8) == pytest.approx(4.0 * 11 / 8)
    assert pipeline_seconds([4.0, 8.0], 4) == pytest.approx(9.0)
