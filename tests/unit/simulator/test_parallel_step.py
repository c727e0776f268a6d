"""Waits of one simulated step, compared with a worked example of TP4, DP2 and PP2."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from flopwatch.verdicts.waits import Communicator
from simulator.parallel_step import Disturbance, Layout, step
from tests.support import ROOT

WORKED = json.loads((ROOT / "tests" / "captures" / "nccl" / "worked_tp4pp2dp2.json").read_text())["scenarios"]
SIXTEEN = Layout(tp=4, dp=2, pp=2)
SLOW_STAGE = dict.fromkeys(SIXTEEN.stage(1), 1.2)
DISTURBANCES = {
    "none": {},
    "one": {5: 1.2},
    "two": {5: 1.2, 14: 1.2},
    "two_same": {5: 1.2, 6: 1.2},
    "uneven": SLOW_STAGE,
    "uneven_one": {**SLOW_STAGE, 5: 1.2},
}


@pytest.mark.parametrize("name", WORKED)
def test_the_waits_of_a_step_are_those_of_the_worked_example(name: str) -> None:
    result = step(SIXTEEN, Disturbance(slow=DISTURBANCES[name]))
    by_kind: defaultdict[tuple[int, str], float] = defaultdict(float)
    for (rank, group), seconds in result.waits.items():
        by_kind[rank, group.kind] += seconds
    for row in WORKED[name]:
        rank = row["rank"]
        found = {
            "tp_ms": by_kind[rank, "tp"],
            "pp_fwd_ms": result.received[rank, "forward"],
            "pp_bwd_ms": result.received[rank, "backward"],
            "dp_ms": by_kind[rank, "dp"],
        }
        assert {key: round(1e3 * seconds, 6) for key, seconds in found.items()} == {key: row[key] for key in found}


@pytest.mark.parametrize(("name", "milliseconds"), [("none", 183), ("one", 201), ("two", 213), ("uneven", 207)])
def test_a_step_ends_with_its_last_rank(name: str, milliseconds: float) -> None:
    assert step(SIXTEEN, Disturbance(slow=DISTURBANCES[name])).seconds == pytest.approx(milliseconds / 1e3)


def test_each_kind_of_group_has_its_communicators() -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=2)
    groups = {kind: list(layout.communicators(kind)) for kind in ("tp", "cp", "ep", "dp", "pp")}
    assert {kind: (len(found), len(found[0].ranks)) for kind, found in groups.items()} == {
        "tp": (16, 2),
        "cp": (16, 2),
        "ep": (16, 2),
        "dp": (8, 4),
        "pp": (16, 2),
    }
    assert groups["ep"][0] == Communicator("ep", (0, 4))
    assert all(len({rank for group in found for rank in group.ranks}) == layout.size for found in groups.values())
    with pytest.raises(ValueError, match="3 expert parallel ranks do not divide 4"):
        Layout(dp=4, ep=3)


@pytest.mark.parametrize("kind", ["tp", "cp", "ep", "dp"])
def test_a_rank_that_stops_is_the_only_one_that_has_called_less_in_a_group_of_each_kind(kind: str) -> None:
    sizes = {"tp": 2, "dp": 2, "pp": 2} | {"cp": {"cp": 2}, "ep": {"ep": 2}}.get(kind, {})
    layout = Layout(**sizes)
    result = step(layout, Disturbance(stops={1: 3}))
    assert result.seconds == float("inf")
    group = next(group for group in layout.communicators("tp") if 1 in group.ranks)
    called = {rank: result.sequence[rank, group] for rank in group.ranks}
    assert called[1] == min(called.values()) < max(called.values())
    ahead = [
        other
        for other in range(layout.size)
        for group in {group for rank, group in result.sequence if rank == other}
        if 1 in group.ranks and result.sequence[1, group] > result.sequence[other, group]
    ]
    assert ahead == [], "the rank that stopped is ahead of no peer"


def test_a_slow_link_lengthens_the_waits_of_its_two_ranks_stages() -> None:
    healthy, slow = step(SIXTEEN), step(SIXTEEN, Disturbance(links={frozenset((2, 10)): 5.0}))
    assert slow.seconds > healthy.seconds
    assert slow.received[10, "forward"] > healthy.received[10, "forward"]
