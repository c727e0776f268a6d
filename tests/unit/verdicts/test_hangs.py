"""Verdicts on hangs: the rank that has called fewer operations and waits for no other."""

from __future__ import annotations

from flopwatch.verdicts.hangs import HangVerdict, RankCalls, judge, overdue_after
from flopwatch.verdicts.waits import Communicator

TP, OTHER, DP = Communicator("tp", (0, 1)), Communicator("tp", (2, 3)), Communicator("dp", (0, 1, 2, 3))


def test_the_rank_that_has_called_less_in_the_finest_group_is_missing() -> None:
    # The peer of rank 1 waits for it. So do ranks 2 and 3, which are ahead in the coarser group.
    found = judge(
        {
            0: RankCalls({TP: 7, DP: 3}),
            1: RankCalls({TP: 6, DP: 3}),
            2: RankCalls({OTHER: 8, DP: 4}),
            3: RankCalls({OTHER: 8, DP: 4}),
        }
    )
    assert found == HangVerdict((1,), TP)


def test_a_rank_that_waits_elsewhere_is_not_missing() -> None:
    pair = Communicator("pp", (0, 1))
    calls = {rank: RankCalls({DP: 3 if rank < 2 else 4}, waits_in=pair if rank == 1 else None) for rank in range(4)}
    assert judge(calls) == HangVerdict((0,), DP)


def test_signs_choose_among_several_ranks_that_are_behind() -> None:
    gone = ("its process is gone",)
    calls = {0: RankCalls({DP: 3}), 1: RankCalls({DP: 3}, signs=gone), 2: RankCalls({DP: 4}), 3: RankCalls({DP: 4})}
    assert judge(calls) == HangVerdict((1,), DP, {1: gone})
    assert judge(calls | {1: RankCalls({DP: 3})}).ranks == (0, 1)


def test_without_a_difference_no_rank_is_named() -> None:
    alike = {rank: RankCalls({DP: 3}) for rank in range(4)}
    assert judge(alike).why == "all ranks have called the same operations"
    circle = {
        0: RankCalls({TP: 5, DP: 3}),
        1: RankCalls({TP: 4, DP: 4}),
        2: RankCalls({OTHER: 5, DP: 4}),
        3: RankCalls({OTHER: 5, DP: 4}),
    }
    assert judge(circle).why == "each rank waits for another"


def test_a_step_is_overdue_after_five_times_the_slowest_ones_and_at_least_15_s() -> None:
    assert (overdue_after(1.0), overdue_after(10.0)) == (15.0, 50.0)
