"""The blast radius of an object, computed from where hosts, ports, GPUs and ranks are."""

from __future__ import annotations

from flopwatch.report.blast import HostPlace, HostPort, Parts, RankPlace, RunAtRisk, Spare, blast, on_ports

LEFT, RIGHT = HostPort("a", "mlx5_0", "1"), HostPort("a", "mlx5_1", "1")
OTHER = HostPort("b", "mlx5_0", "1")
STORAGE = HostPort("a", "mlx5_bond_0", "1")
NEAR = {LEFT: {"A0", "A1"}, RIGHT: {"A1", "A2"}, OTHER: {"B0"}}
RANKS = [
    RankPlace("lm", "10", "a", "A1"),
    RankPlace("lm", "9", "a", "A0"),
    RankPlace("lm", "11", "b", "B0"),
    RankPlace("small", "0", "a", "A2"),
    RankPlace("undeclared", "0", "a", ""),
]
GPUS = {"A0": "a", "A1": "a", "A2": "a", "B0": "b"}


def test_a_gpu_with_several_nearest_ports_is_on_each_of_them() -> None:
    assert on_ports("port", "a:mlx5_0/1", [LEFT], NEAR).gpus == {"A0", "A1"}
    assert on_ports("port", "a:mlx5_1/1", [RIGHT], NEAR).gpus == {"A1", "A2"}
    parts = on_ports("leaf", "l1", [LEFT, OTHER], NEAR, {"c"})
    assert parts == Parts("leaf", "l1", frozenset(["c"]), frozenset(["A0", "A1", "B0"]), frozenset([LEFT, OTHER]))


def test_a_port_without_a_nearest_gpu_carries_no_rank_and_a_host_without_any_counts_as_a_whole() -> None:
    parts = on_ports("port", "a:mlx5_bond_0/1", [STORAGE], NEAR)
    assert (parts.gpus, parts.hosts) == (frozenset(), frozenset())
    assert parts.notes == ("a:mlx5_bond_0 is nearest to no GPU, so it carries no rank's own traffic.",)
    parts = on_ports("leaf", "l1", [STORAGE, HostPort("c", "mlx5_0", "1")], NEAR)
    assert parts.hosts == {"c"}


def test_ranks_on_the_object_are_in_order_and_all_gpus_of_their_runs_stop() -> None:
    parts = on_ports("port", "a:mlx5_0/1", [LEFT], NEAR)
    found = blast(parts, GPUS, RANKS, {"lm": 64.0}, {"lm": 900.0}, {"C0": "c", "A1": "a"}, {"c": HostPlace("r1", "l1")})
    assert found.runs == [RunAtRisk("lm", [RANKS[1], RANKS[0]], 64.0, 900.0)]
    assert (found.hosts, found.ports, found.gpus) == (["a"], [LEFT], ["A0", "A1"])
    assert (found.ranks, found.stopped_gpus, found.runs[0].unsaved_gpu_hours) == (2, 64, 16)
    assert found.spare == [Spare("r1", "l1", 1, 1)]  # the GPU on the object is not spare


def test_a_rank_without_a_declared_gpu_is_on_its_host_alone() -> None:
    whole = Parts("host", "a", frozenset(["a"]), frozenset())
    found = blast(whole, GPUS, RANKS, {}, {}, {}, {})
    # Without a size of the run, the ranks there are the least that stops.
    assert [(run.run, run.gpus) for run in found.runs] == [("lm", 2), ("small", 1), ("undeclared", 1)]
    assert found.runs[0].unsaved_gpu_hours is None
    assert found.gpus == ["A0", "A1", "A2"]
    none = blast(Parts("gpu", "", frozenset(), frozenset([""])), GPUS, RANKS, {}, {}, {}, {})
    assert none.runs == []
