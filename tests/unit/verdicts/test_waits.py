"""Waits of an interval: their shares of a step, what is incomplete, and how late each rank is."""

from __future__ import annotations

from statistics import median_high
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.verdicts.waits import Communicator, Interval, Layout, NoSteps, Place, Unmeasured
from tests.support.waits import interval_of, places

TP, DP = Communicator("tp", (0, 1)), Communicator("dp", (0, 1, 2, 3))


def by_place(interval: Interval, numbers: Any) -> dict[Place, float]:
    return dict(zip(places(interval.layout), numbers.tolist(), strict=True))


def test_waits_are_shares_of_the_steps_that_each_rank_reports() -> None:
    layout, numbers = Layout({0: [TP], 1: [TP]}), [[10, 5], [20.0, 10.0], [1.0, 2.0], [1000.0, 500.0], [30.0, 20.0]]
    found = Interval(layout, *map(np.array, numbers))
    assert (found.steps, found.step_seconds, found.seconds.tolist()) == (5, 2.0, [2.0, 2.0])
    assert by_place(found, found.waits) == {(TP, 0): pytest.approx(0.05), (TP, 1): pytest.approx(0.2)}
    assert (found.tokens.tolist(), found.squares.tolist()) == ([100.0, 100.0], [3.0, 4.0])


def test_an_interval_without_all_ranks_has_a_reason() -> None:
    each = np.ones(2)
    with pytest.raises(NoSteps, match="rank 1 has no measured step"):
        Interval(Layout({0: [TP], 1: [TP]}), np.array([1.0, 0.0]), each, each, each, each)
    with pytest.raises(Unmeasured, match="the waits of rank 2 in dp are not measured"):
        Layout({0: [DP], 1: [DP]})


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_each_number_is_compared_with_the_median_of_the_others(numbers: list[int]) -> None:
    group = Communicator("dp", tuple(range(len(numbers))))
    layout = Layout({rank: [group] for rank in group.ranks})
    assert layout.below_peers(np.array(numbers)).tolist() == [
        median_high(numbers[:index] + numbers[index + 1 :]) - own for index, own in enumerate(numbers)
    ]


def test_a_rank_that_waits_for_a_late_one_is_not_late_itself() -> None:
    # Rank 1 is late: rank 0 waits for it in their tensor parallel group, and ranks 2 and 3 for both of them later.
    other = Communicator("tp", (2, 3))
    shares = {0: {TP: 0.2, DP: 0.0}, 1: {TP: 0.0, DP: 0.0}, 2: {other: 0.0, DP: 0.2}, 3: {other: 0.0, DP: 0.2}}
    found = interval_of(10, 1.0, shares, {})
    assert {place: share for place, share in by_place(found, found.longer).items() if place[1] < 2} == {
        (TP, 0): -0.2,
        (TP, 1): 0.2,
        (DP, 0): 0.0,
        (DP, 1): 0.2,
    }
    assert by_place(found, found.kept)[DP, 0] == 0.2


def test_stages_follow_the_pairs_of_a_pipeline() -> None:
    pairs = [Communicator("pp", pair) for pair in ((0, 2), (2, 4), (1, 3), (3, 5))]
    waits = {rank: {pair: 0.1 * (rank < 4) for pair in pairs if rank in pair.ranks} for rank in range(6)}
    found = interval_of(10, 1.0, waits, {})
    assert found.layout.stages.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.stage_lateness.tolist() == pytest.approx([-0.1, -0.2, 0.1])
    assert set(found.receives.tolist()) == {0.0}
    assert interval_of(10, 1.0, {0: {TP: 0.1}, 1: {TP: 0.2}}, {}).stage_lateness.tolist() == [0.0]


@pytest.mark.parametrize("pairs", [((0, 1), (1, 2), (2, 3), (0, 3)), ((0, 1), (1, 2))])
def test_a_ring_or_a_few_pairs_are_no_pipeline(pairs: tuple[tuple[int, int], ...]) -> None:
    groups = [Communicator("pp", pair) for pair in pairs]
    layout = Layout({rank: [group for group in groups if rank in group.ranks] for rank in range(4)})
    assert layout.stages.tolist() == [0, 0, 0, 0]
