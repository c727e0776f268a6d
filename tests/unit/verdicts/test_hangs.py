"""Verdicts on hangs: the rank that has called fewer operations and waits for no other."""

from __future__ import annotations

from flopwatch.verdicts.hangs import HangSuspect, RankState, judge
from flopwatch.verdicts.overdue import overdue_after
from flopwatch.verdicts.waits import Communicator

TP, OTHER, DP = Communicator("tp", (0, 1)), Communicator("tp", (2, 3)), Communicator("dp", (0, 1, 2, 3))


def called(*numbers: dict[Communicator, int], signs: dict[int, str] | None = None) -> dict[int, RankState]:
    """Return four ranks on two hosts that have called so many operations."""
    given = signs or {}
    return {
        rank: RankState(f"h{rank // 2}", calls, (given[rank],) if rank in given else ())
        for rank, calls in enumerate(numbers)
    }


def test_the_rank_that_has_called_less_in_the_finest_group_is_missing() -> None:
    # The peer of rank 1 waits for it. So do ranks 2 and 3, which are ahead in the coarser group.
    found = judge(called({TP: 7, DP: 3}, {TP: 6, DP: 3}, {OTHER: 8, DP: 4}, {OTHER: 8, DP: 4}))
    assert found.suspects == (HangSuspect(1, "h0", 1 / 1.2, ("sequence",), TP),)


def test_signs_choose_among_several_ranks_that_are_behind() -> None:
    two = {DP: 3}, {DP: 3}, {DP: 4}, {DP: 4}
    assert [(one.rank, one.signs) for one in judge(called(*two, signs={1: "gone"})).suspects] == [
        (1, ("gone", "sequence"))
    ]
    assert [one.rank for one in judge(called(*two)).suspects] == [0, 1]


def test_of_two_that_are_behind_in_a_pipeline_one_may_wait_for_the_other() -> None:
    pair = Communicator("pp", (0, 1))
    found = judge(called({DP: 3, pair: 5}, {DP: 3, pair: 4}, {DP: 4}, {DP: 4}))
    assert [(one.rank, one.host) for one in found.suspects] == [(None, "h0")]


def test_without_a_difference_no_rank_is_named() -> None:
    alike = {DP: 3}, {DP: 3}, {DP: 3}, {DP: 3}
    assert judge(called(*alike)).why == "no sign points at a rank"
    circle = {TP: 5, DP: 3}, {TP: 4, DP: 4}, {OTHER: 5, DP: 4}, {OTHER: 5, DP: 4}
    assert judge(called(*circle)).why == "no sign points at a rank"


def test_a_step_is_overdue_after_five_times_the_slowest_ones_and_at_least_15_s() -> None:
    assert (overdue_after(1.0), overdue_after(10.0)) == (15.0, 50.0)


def test_two_of_three_that_are_behind_are_not_named() -> None:
    three = Communicator("dp", (0, 1, 2))
    states = {rank: RankState("h", {three: number}) for rank, number in enumerate((5, 4, 4))}
    assert judge(states).suspects == ()


def test_a_rank_that_has_not_sent_is_missing_in_the_pipeline() -> None:
    # Stages 0 to 3. Rank 1 stopped before it sent the fourth message, for which rank 2 waits, and so does rank 3.
    forward = [Communicator("pp_forward", (rank, rank + 1)) for rank in range(3)]
    backward = [Communicator("pp_backward", (rank, rank + 1)) for rank in range(3)]
    found = judge(
        called(
            {forward[0]: 4, backward[0]: 1},
            {forward[0]: 4, forward[1]: 3, backward[0]: 0},
            {forward[1]: 4, forward[2]: 3},
            {forward[2]: 4},
        )
    )
    assert found.suspects == (HangSuspect(1, "h0", 1 / 1.2, ("sequence",), Communicator("pp", (0, 1))),)


def test_a_rank_in_a_tensor_group_that_waits_for_a_message_is_not_missing() -> None:
    # Ranks 0 and 1 are one stage, 2 and 3 the next. Rank 1 has not sent what rank 3 waits for, and so rank 2 waits.
    one, two = Communicator("pp_forward", (0, 2)), Communicator("pp_forward", (1, 3))
    back = Communicator("pp_backward", (0, 2))
    found = judge(called({TP: 4, one: 4, back: 1}, {TP: 4, two: 3}, {OTHER: 4, one: 4}, {OTHER: 3, two: 4}))
    assert [(named.rank, named.communicator) for named in found.suspects] == [(1, Communicator("pp", (1, 3)))]


def test_a_missing_rank_that_has_asked_for_its_next_message_early_is_named_by_its_collectives() -> None:
    forward = Communicator("pp_forward", (1, 3))
    backward = [Communicator("pp_backward", (rank, rank + 2)) for rank in range(2)]
    found = judge(
        called(
            {TP: 4, backward[0]: 1},
            {TP: 4, backward[1]: 1, forward: 4},
            {OTHER: 4, backward[0]: 0},
            {OTHER: 3, backward[1]: 0, forward: 5},
        )
    )
    assert [(named.rank, named.communicator) for named in found.suspects] == [(3, OTHER)]
