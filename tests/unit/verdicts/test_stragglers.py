"""Verdicts on waits: a late rank is named with its communicator, and doubt names no rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flopwatch.verdicts.stragglers import NO_RANK, StragglerVerdict, judge
from flopwatch.verdicts.waits import Communicator, Interval
from simulator.parallel_judge import intervals
from simulator.parallel_step import Disturbance, Layout, step
from tests.support.waits import interval_of

SIXTEEN = Layout(tp=4, dp=2, pp=2)
SLOW_STAGE = dict.fromkeys(SIXTEEN.stage(1), 1.2)
ALL = Communicator("dp", (0, 1, 2, 3))


def verdict(slow: Mapping[int, float]) -> StragglerVerdict:
    steps = [step(SIXTEEN, Disturbance(slow=slow))] * (6 * NO_RANK)
    return judge(list(intervals(iter(steps))))


def waiting(*shares: list[float], tokens: Mapping[int, float] | None = None, steps: float = 6) -> list[Interval]:
    """Return intervals with these waits of ranks 0 to 3 in one group."""
    return [
        interval_of(steps, 2.5, {rank: {ALL: share} for rank, share in enumerate(each)}, tokens or {})
        for each in shares
    ]


def named(found: StragglerVerdict) -> tuple[str, list[int]]:
    return found.kind, sorted(suspect.rank for suspect in found.suspects)


def test_the_worked_examples_are_judged_as_their_authors_do() -> None:
    assert verdict({}) == StragglerVerdict("none", why="no rank makes others wait", judged=3)
    assert named(verdict({5: 1.2})) == ("rank", [5])
    assert verdict({5: 1.2}).suspects[0].communicator == Communicator("tp", (4, 5, 6, 7))
    assert verdict({5: 1.2}).share == pytest.approx(0.024 / 0.201)
    assert named(verdict({5: 1.2, 14: 1.2})) == ("rank", [5, 14])
    assert named(verdict({5: 1.2, 6: 1.2})) == ("rank", [5, 6])
    assert named(verdict(SLOW_STAGE)) == ("stage", list(range(8, 16)))
    assert named(verdict({**SLOW_STAGE, 5: 1.2})) == ("rank", [5])
    assert named(verdict(dict.fromkeys(range(4, 8), 1.2))) == ("group", [4, 5, 6, 7])


def test_too_few_steps_are_no_verdict() -> None:
    late = [0.0, 0.3, 0.3, 0.3]
    assert judge(waiting(late)).why == "1 measured intervals are too few"
    assert judge(waiting(late, late, late, steps=1)).why == "3 measured steps are too few"
    assert named(judge(waiting(late, late))) == ("rank", [0])


def test_two_intervals_that_agree_by_chance_name_no_rank() -> None:
    late, well, other = [0.0, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3], [0.3, 0.1, 0.3, 0.2]
    assert named(judge(waiting(well, well, late, late))) == ("rank", [0])
    assert named(judge(waiting(well, other, well, other, late, late))) == ("imbalance", [])


def test_a_case_that_is_less_clear_needs_more_intervals() -> None:
    less, more = [0.25, 0.3, 0.3, 0.3], [0.15, 0.3, 0.3, 0.3]
    assert judge(waiting(*[less, more] * 4)).kind == "none"
    assert named(judge(waiting(*[less, more] * 10))) == ("rank", [0])


def test_only_the_last_intervals_count() -> None:
    late, well = [0.0, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3]
    assert named(judge(waiting(*[late] * 20, *[well] * 4))) == ("none", [])
    assert named(judge(waiting(*[well] * 20, *[late] * 4))) == ("rank", [0])


def test_a_host_with_most_of_its_ranks_late_is_named_as_a_whole() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    late = [0.0, 0.02, 0.3, 0.3]
    assert named(judge(waiting(late, late, late), hosts=hosts)) == ("host", [0, 1])
    assert named(judge(waiting(late, late, late))) == ("rank", [0, 1])
    assert named(judge(waiting(late, late, late), hosts=dict.fromkeys(hosts, "a"))) == ("rank", [0, 1])


def test_a_rank_that_is_late_again_and_again_is_named() -> None:
    late, well = [0.0, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3]
    assert named(judge(waiting(*[late, late, late, well] * 5))) == ("rank", [0])


def test_ranks_that_are_late_in_turn_are_an_imbalance() -> None:
    turns = [[0.0 if rank == turn else 0.3 for rank in range(4)] for turn in range(4)]
    assert named(judge(waiting(*turns))) == ("imbalance", [])


def test_a_rank_with_more_tokens_is_not_late() -> None:
    late = [0.0, 0.3, 0.3, 0.3]
    work = {0: 130.0, 1: 100.0, 2: 100.0, 3: 100.0}
    assert named(judge(waiting(late, late, late, late, tokens=work))) == ("none", [])


def test_waits_that_all_rose_are_communication() -> None:
    now = [0.3, 0.3, 0.3, 0.3]
    found = judge(waiting(now, now, now, now), usual=0.5)
    assert found.kind == "communication"
    assert found.share == pytest.approx(0.1)
    assert judge(waiting(now, now, now, now)).kind == "none"
