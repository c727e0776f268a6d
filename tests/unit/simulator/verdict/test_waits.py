"""Waits of an interval: their shares of a step, what is incomplete, and how late each rank is."""

from __future__ import annotations

from statistics import median_high

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.verdict.waits import Communicator, Interval, RankTotals, Unmeasured, below_others

TP, DP = Communicator("tp", (0, 1)), Communicator("dp", (0, 1, 2, 3))


def totals(steps: float, wait: float, *groups: Communicator) -> RankTotals:
    return RankTotals(steps, 2.0 * steps, dict.fromkeys(groups, wait), 100.0 * steps)


def test_waits_are_shares_of_the_steps_between_two_reports() -> None:
    then = {0: totals(10, 1.0, TP), 1: totals(10, 2.0, TP)}
    found = Interval.between(then, {0: totals(20, 2.0, TP), 1: totals(15, 4.0, TP)})
    assert (found.steps, found.step_seconds) == (5, 2.0)
    assert found.waits == {0: {TP: pytest.approx(0.05)}, 1: {TP: pytest.approx(0.2)}}
    assert found.tokens == {0: 100.0, 1: 100.0}


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
    assert below_others(dict(enumerate(numbers))) == {
        index: median_high(numbers[:index] + numbers[index + 1 :]) - own for index, own in enumerate(numbers)
    }


def test_a_rank_that_waits_for_a_late_one_is_not_late_itself() -> None:
    # Rank 1 is late: rank 0 waits for it in their tensor parallel group, and ranks 2 and 3 for both of them later.
    other = Communicator("tp", (2, 3))
    shares = {0: {TP: 0.2, DP: 0.0}, 1: {TP: 0.0, DP: 0.0}, 2: {other: 0.0, DP: 0.2}, 3: {other: 0.0, DP: 0.2}}
    found = Interval(10, 1.0, shares, {})
    assert {place: share for place, share in found.longer.items() if place[1] < 2} == {
        (TP, 0): -0.2,
        (TP, 1): 0.2,
        (DP, 0): 0.0,
        (DP, 1): 0.2,
    }
    assert found.kept[DP, 0] == 0.2


def test_stages_follow_the_pairs_of_a_pipeline() -> None:
    pairs = [Communicator("pp", pair) for pair in ((0, 2), (2, 4), (1, 3), (3, 5))]
    waits = {rank: {pair: 0.1 * (rank < 4) for pair in pairs if rank in pair.ranks} for rank in range(6)}
    found = Interval(10, 1.0, waits, {})
    assert found.stages == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert found.stage_lateness == {0: pytest.approx(-0.1), 1: pytest.approx(-0.2), 2: pytest.approx(0.1)}
    assert set(found.receives.values()) == {0.0}
    assert Interval(10, 1.0, {0: {TP: 0.1}, 1: {TP: 0.2}}, {}).stage_lateness == {}
