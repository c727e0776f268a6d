"""Waits of an interval: their shares of a step, what is incomplete, and how late each rank is."""

from __future__ import annotations

from statistics import median_high
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.verdicts.waits import Communicator, Interval, Layout, Place, RankTotals, Unmeasured

TP, DP = Communicator("tp", (0, 1)), Communicator("dp", (0, 1, 2, 3))


def totals(steps: float, wait: float, *groups: Communicator) -> RankTotals:
    return RankTotals(steps, 2.0 * steps, dict.fromkeys(groups, wait), 100.0 * steps)


def by_place(interval: Interval, numbers: Any) -> dict[Place, float]:
    return dict(zip(interval.layout.places(), numbers.tolist(), strict=True))


def test_waits_are_shares_of_the_steps_between_two_reports() -> None:
    then = {0: totals(10, 1.0, TP), 1: totals(10, 2.0, TP)}
    found = Interval.between(then, {0: totals(20, 2.0, TP), 1: totals(15, 4.0, TP)})
    assert (found.steps, found.step_seconds) == (5, 2.0)
    assert by_place(found, found.waits) == {(TP, 0): pytest.approx(0.05), (TP, 1): pytest.approx(0.2)}
    assert found.tokens.tolist() == [100.0, 100.0]


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({0: totals(20, 1.0, TP)}, "ranks joined or left"),
        ({0: totals(20, 1.0, TP), 1: totals(10, 1.0, TP)}, "rank 1 has no measured step"),
        ({0: totals(20, 1.0, TP), 1: totals(20, 1.0)}, "the waits of rank 1 in tp are not measured"),
        ({0: totals(20, 1.0, DP), 1: totals(20, 1.0, DP)}, "the waits of rank 2 in dp are not measured"),
    ],
)
def test_an_incomplete_interval_has_a_reason(now: dict[int, RankTotals], reason: str) -> None:
    with pytest.raises(Unmeasured, match=reason):
        Interval.between({0: totals(10, 0.0, TP), 1: totals(10, 0.0, TP)}, now)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_each_number_is_compared_with_the_median_of_the_others(numbers: list[int]) -> None:
    group = Communicator("dp", tuple(range(len(numbers))))
    layout = Layout({rank: [group] for rank in group.ranks})
    assert layout.below_peers(np.array(numbers)).tolist() == [
        median_high(numbers[:index] + numbers[index + 1 :]) - own for index, own in enumerate(numbers)
    ]


def test_a_layout_is_used_again_until_the_ranks_have_other_communicators() -> None:
    then, now = ({rank: totals(steps, 1.0, TP) for rank in (0, 1)} for steps in (10, 20))
    first = Interval.between(then, now)
    assert Interval.between(then, now, first.layout).layout is first.layout
    other = Communicator("cp", (0, 1))
    for groups in ((other,), (TP, other)):
        now = {rank: totals(20, 1.0, *groups) for rank in (0, 1)}
        assert Interval.between(then, now, first.layout).layout.communicators == list(groups)


def test_a_rank_that_waits_for_a_late_one_is_not_late_itself() -> None:
    # Rank 1 is late: rank 0 waits for it in their tensor parallel group, and ranks 2 and 3 for both of them later.
    other = Communicator("tp", (2, 3))
    shares = {0: {TP: 0.2, DP: 0.0}, 1: {TP: 0.0, DP: 0.0}, 2: {other: 0.0, DP: 0.2}, 3: {other: 0.0, DP: 0.2}}
    found = Interval.of(10, 1.0, shares, {})
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
    found = Interval.of(10, 1.0, waits, {})
    assert found.layout.stages.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.stage_lateness.tolist() == pytest.approx([-0.1, -0.2, 0.1])
    assert set(found.receives.tolist()) == {0.0}
    assert Interval.of(10, 1.0, {0: {TP: 0.1}, 1: {TP: 0.2}}, {}).stage_lateness.tolist() == [0.0]


@pytest.mark.parametrize("pairs", [((0, 1), (1, 2), (2, 3), (0, 3)), ((0, 1), (1, 2))])
def test_a_ring_or_a_few_pairs_are_no_pipeline(pairs: tuple[tuple[int, int], ...]) -> None:
    groups = [Communicator("pp", pair) for pair in pairs]
    layout = Layout({rank: [group for group in groups if rank in group.ranks] for rank in range(4)})
    assert layout.stages.tolist() == [0, 0, 0, 0]
