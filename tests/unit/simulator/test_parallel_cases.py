"""The cases of parallel jobs match their truth."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from simulator.parallel_cases import KINDS, case

SEEDS = range(10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_case_and_steps(kind: str) -> None:
    one, other = case(kind, 3), case(kind, 3)
    assert (one.layout, one.ranks, one.communicator) == (other.layout, other.ranks, other.communicator)
    assert list(one.steps("a", 2)) == list(other.steps("a", 2))


def test_another_seed_gives_other_steps() -> None:
    assert list(case("healthy", 3).steps("b", 2)) != list(case("healthy", 3).steps("a", 2))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("late")])
def test_a_late_rank_waits_least_in_its_group_and_makes_steps_longer(kind: str) -> None:
    for seed in SEEDS:
        late = case(kind, seed)
        [rank] = late.ranks
        [result] = late.steps("x", 1)
        for group in {group for member, group in result.waits if member == rank and group.kind not in ("pp", "dp")}:
            waits = {member: result.waits[member, group] for member in group.ranks}
            assert min(waits, key=waits.__getitem__) == rank


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("missing in")])
def test_a_missing_rank_is_ahead_of_no_peer_and_the_step_does_not_end(kind: str) -> None:
    for seed in SEEDS:
        missing = case(kind, seed)
        [rank] = missing.ranks
        [result] = missing.steps("x", 1)
        assert result.seconds == inf
        assert missing.communicator is not None
        assert rank in missing.communicator.ranks
        for group in {group for member, group in result.sequence if member == rank and group.kind != "pp"}:
            assert all(result.sequence[rank, group] <= result.sequence[peer, group] for peer in group.ranks)


@pytest.mark.parametrize("kind", ["uneven pipeline", "slow stage", "slow link", "whole leaf", "storage jitter"])
def test_a_disturbance_makes_steps_longer(kind: str) -> None:
    for seed in SEEDS:
        disturbed = case(kind, seed)
        well = replace(disturbed, disturbance=case("healthy", 0).disturbance)
        healthy = sum(step.seconds for step in well.steps("x", 4))
        assert sum(step.seconds for step in disturbed.steps("x", 4)) > 1.005 * healthy
