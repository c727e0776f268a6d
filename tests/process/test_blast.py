"""`flopwatch blast` with a real Prometheus: on a simulated cluster of 4,096 GPUs, and on hosts in unusual states."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import simulator.metrics
from flopwatch import catalogue as m
from flopwatch.__main__ import main
from flopwatch.ledger.ledger import Ledger
from simulator.faults import Fault
from simulator.jobs import TrainingJob
from simulator.nodes import EPOCH
from simulator.state import Damage
from simulator.topology import PortPlace, Topology
from simulator.world import SimulatedCluster
from tests.support import ROOT
from tests.support.reports import World, prometheus

SEED = 22
NODES, EACH = 512, 10  # nodes of 8 GPUs, and random objects of a kind
ASKED = 1500.0  # virtual seconds
SECONDS = 1.0  # that an answer may take
# Of these, nodes are replaced ten minutes before the question or earlier, so that ranks have moved.
FAULTS = (
    Fault(300.0, "hbm", "large"),
    Fault(420.0, "faulty_gpu", "another"),
    Fault(500.0, "faulty_gpu", "middle"),
    Fault(540.0, "host_maintenance", "small"),
)
JOBS = tuple(
    TrainingJob(name, nodes, mesh={"tp": 8, "dp": nodes})
    for name, nodes in (("large", 256), ("middle", 64), ("small", 24), ("single", 1), ("few", 8), ("another", 32))
)


@dataclass
class Simulated:
    """What a simulated cluster is at the time of the question, and the address of a Prometheus that scraped it."""

    topology: Topology
    url: str = ""
    ranks: dict[PortPlace, tuple[str, str]] = field(default_factory=dict)  # run and rank on a GPU
    broken: list[Damage] = field(default_factory=list)
    moved: int = 0  # ranks that were on another host at the start

    def find(self, kind: str, rng: random.Random) -> tuple[str, list[PortPlace]]:
        """Return the name of a random object, and the GPUs on it by the ports next to them."""
        port = PortPlace(rng.randrange(self.topology.nodes), rng.randrange(8))
        host = self.topology.host(port.node)
        if kind == "leaf":
            return self.topology.leaf(port), self.topology.below(self.topology.leaf(port))
        if kind == "host":
            return host, [PortPlace(port.node, rail) for rail in range(8)]
        if kind == "port":
            return f"{host}:{self.topology.port(port.rail).replace(':', '/')}", [port]
        return self.topology.gpu(*port), [port]

    def expected(self, parts: list[PortPlace]) -> dict[str, Any]:
        """Return the true blast radius of these GPUs."""
        there = [place for place in parts if place in self.ranks]
        runs = {self.ranks[place][0] for place in there}
        dark = {node for damage in self.broken if damage.dark for node in damage.nodes}
        lost = {place for damage in self.broken for place in damage.gpus}
        busy = {place.node for place in self.ranks}
        spare = Counter(
            (self.topology.rack(node), self.topology.leaf(PortPlace(node, 0)))
            for node in range(self.topology.nodes)
            for rail in range(8)
            if node not in busy | dark and PortPlace(node, rail) not in {*lost, *parts}
        )
        return {
            "hosts": sorted({self.topology.host(place.node) for place in parts}),
            "gpus": sorted(self.topology.gpu(*place) for place in parts),
            "ranks": {
                (*self.ranks[place], self.topology.host(place.node), self.topology.gpu(*place)) for place in there
            },
            "runs": {job.name: 8.0 * job.nodes for job in JOBS if job.name in runs},
            "spare": spare,
        }


def simulated(folder: Path, cables: bool) -> tuple[Simulated, AbstractContextManager[str]]:
    """Simulate a cluster, and write what Prometheus scrapes. Without cables, a leaf has all ports of its hosts."""
    topology = Topology(NODES, rails=cables)
    ledger, answer, first = Ledger(), Simulated(topology), dict[PortPlace, tuple[str, str]]()
    world_of_series = World()

    def look(world: SimulatedCluster, t: float) -> None:
        for name, labels, value in simulator.metrics.scrape(world, ledger, t):
            if name == "infiniband_info" and not cables:
                labels = {key: label for key, label in labels.items() if not key.startswith("switch")}
            world_of_series.add(name, {key: label for key, label in labels.items() if label}, value, EPOCH + t)
        ranks = {
            PortPlace(node, rail): (state.job.name, str(8 * number + rail))
            for state in world.jobs
            if state.attempt is not None and state.attempt.ended is None
            for number, node in enumerate(state.attempt.nodes)
            for rail in range(8)
        }
        if t <= ASKED:
            answer.ranks, answer.broken = ranks, [one for one in world.broken if one.since <= t < one.until]
            first.update(ranks if t == 150 else {})

    SimulatedCluster(
        topology, JOBS, FAULTS, ASKED + 60, SEED, ledger.apply, every=30.0, look=look, look_every=150.0
    ).run()
    assert len(answer.ranks) == sum(8 * job.nodes for job in JOBS), "a run is down"
    now = {rank: place for place, rank in answer.ranks.items()}
    answer.moved = sum(now[rank] != place for place, rank in first.items())
    return answer, prometheus(world_of_series, folder)


@pytest.fixture(scope="module", params=[True, False], ids=["cables", "hosts"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulator.metrics, "MAX_NODES", NODES)
        answer, running = simulated(tmp_path_factory.mktemp("cluster"), request.param)
        with running as url:
            answer.url = url
            yield answer


def asked(url: str, capsys: pytest.CaptureFixture[str], name: str, *more: str, at: float = EPOCH + ASKED) -> Any:
    """Return the answer of the command as JSON."""
    capsys.readouterr()
    assert main(["blast", name, "--prometheus", url, "--at", str(at), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["leaf", "host", "port", "gpu"])
def test_random_objects_of_4096_gpus_have_exactly_the_true_set_within_a_second(
    cluster: Simulated, kind: str, capsys: pytest.CaptureFixture[str], figure: Callable[[str], None]
) -> None:
    rng, taken, ranks = random.Random(f"{SEED} {kind}"), [], 0
    asked(cluster.url, capsys, cluster.topology.host(0))  # imports
    for _ in range(EACH):
        name, parts = cluster.find(kind, rng)
        begun = time.perf_counter()
        found = asked(cluster.url, capsys, name)
        taken.append(time.perf_counter() - begun)
        ranks += found["ranks"]
        got = {
            "hosts": found["hosts"],
            "gpus": found["gpus"],
            "ranks": {
                (one["run"], one["rank"], one["host"], one["uuid"]) for run in found["runs"] for one in run["ranks"]
            },
            "runs": {run["run"]: run["gpus"] for run in found["runs"]},
            "spare": Counter({(one["rack"], one["leaf"]): one["gpus"] for one in found["spare"]}),
        }
        assert got == cluster.expected(parts), name
        assert found["kind"] == kind
        assert found["stopped_gpus"] == sum(got["runs"].values())
    assert max(taken) < SECONDS
    assert cluster.moved >= 8 * len(FAULTS)
    by = "cables" if cluster.topology.rails else "leaf of the host"
    figure(
        f"blast by {by}, seed {SEED}: {EACH} of {EACH} random objects of kind {kind} exact, {ranks} ranks on them, "
        f"median {statistics.median(taken):.3f} s, longest {max(taken):.3f} s"
    )


@pytest.mark.parametrize("cluster", [True], indirect=True, ids=["cables"])
def test_the_page_of_a_leaf_is_that_of_the_documentation(
    cluster: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["leaf-3-0", "--prometheus", cluster.url, "--at", str(EPOCH + ASKED), "--price", "2.5"]
    assert main(["blast", *asked]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in (ROOT / "docs" / "blast.md").read_text(encoding="utf-8")


# Hosts in unusual states.

NOW = 1_760_000_000.0


def series(world: World, at: float, row: m.Metric, **labels: str) -> None:
    world.add(row.name, labels, 1, at)


def host(
    world: World, name: str, at: float, rack: str = "", leaf: str = "", near: str = "01", gpus: str = "01"
) -> None:
    """Add a host with GPUs and one port, which is nearest to some of them."""
    if rack or leaf:
        series(world, at, m.HOST_TOPOLOGY_INFO, host=name, rack=rack, leaf=leaf, instance=name)
    for gpu in gpus:
        series(world, at, m.GPU_INFO, gpu=gpu, uuid=f"GPU-{name}{gpu}", host=name, instance=name)
    series(world, at, m.INFINIBAND_INFO, device="mlx5_0", port="1", host=name, instance=name)
    for gpu in near:
        labels = {"gpu": gpu, "uuid": f"GPU-{name}{gpu}", "affinity": "PXB", "instance": name}
        series(world, at, m.INFINIBAND_GPU_AFFINITY_INFO, device="mlx5_0", port="1", **labels)


def rank(world: World, run: str, number: int, name: str, gpu: str, at: float) -> None:
    uuid = f"GPU-{name}{gpu}" if gpu else ""
    labels = {"run": run, "rank": str(number), "host": name, "instance": name} | ({"uuid": uuid} if uuid else {})
    series(world, at, m.TRAINING_RANK_INFO, **labels)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    world, before = World(), NOW - 400  # seconds ago, longer than Prometheus looks back
    host(world, "dead", before, "r1", "l1")
    rank(world, "lm", 0, "dead", "0", before)  # it was on the host until it died
    rank(world, "vision", 1, "dead", "1", before)  # it has moved since
    host(world, "a", NOW, "r1", "l1")
    rank(world, "lm", 1, "a", "0", NOW)
    rank(world, "lm", 2, "a", "1", NOW)
    host(world, "b", NOW, "r1", "l2")
    rank(world, "vision", 0, "b", "0", NOW)
    rank(world, "vision", 1, "b", "1", NOW)
    host(world, "vm", NOW, "r2", "same", near="01234567", gpus="01234567")  # all GPUs behind one host bridge
    for number in range(8):
        rank(world, "virtual", number, "vm", str(number), NOW)
    host(world, "unknown", NOW, "r2", "same", near="")
    rank(world, "blind", 0, "unknown", "1", NOW)
    host(world, "same", NOW, near="0")
    rank(world, "undeclared", 0, "same", "", NOW)
    for name, rack in (("free", "r3"), ("bad", "r3"), ("works", "r3"), ("owned", "r3"), ("half", "r4"), ("hid", "r5")):
        host(world, name, NOW, rack, "l3")
    world.add(m.HOST_VERDICT_ID.name, {"instance": "bad"}, 2, NOW)
    world.add(m.HOST_VERDICT_ID.name, {"instance": "half"}, 1, NOW)
    world.add(m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS.name, {"host": "works", "instance": "works"}, NOW + 60, NOW)
    for name, sources in (("owned", ("kubelet", "none")), ("hid", ("unknown", "unknown"))):
        for gpu, source in enumerate(sources):
            series(world, NOW, m.GPU_OWNER_INFO, uuid=f"GPU-{name}{gpu}", gpu=str(gpu), host=name, source=source)
    world.add(m.GPU_PRESENT.name, {"uuid": "GPU-half0", "gpu": "0", "instance": "half"}, 0, NOW)
    for run, seconds in (("lm", 1800.0), ("vision", 900.0)):
        world.add(m.RUN_PROVISIONAL_SECONDS.name, {"run": run, "tenant": "", "instance": "ledger"}, seconds, NOW)
    world.add(m.RUN_GPUS.name, {"run": "lm", "tenant": "", "instance": "ledger"}, 64, NOW)
    with prometheus(world, tmp_path_factory.mktemp("odd")) as url:
        yield url


def ranks_of(found: Any) -> dict[str, list[str]]:
    return {run["run"]: [one["rank"] for one in run["ranks"]] for run in found["runs"]}


@pytest.mark.parametrize(
    ("name", "ranks", "gpus"),
    [
        ("dead", {"lm": ["0"]}, ["GPU-dead0", "GPU-dead1"]),  # its other rank runs elsewhere now
        ("GPU-dead1", {}, ["GPU-dead1"]),
        ("l1", {"lm": ["0", "1", "2"]}, ["GPU-a0", "GPU-a1", "GPU-dead0", "GPU-dead1"]),
        ("r1", {"lm": ["0", "1", "2"], "vision": ["0", "1"]}, None),
        ("b", {"vision": ["0", "1"]}, ["GPU-b0", "GPU-b1"]),
        ("b:mlx5_0/1", {"vision": ["0", "1"]}, ["GPU-b0", "GPU-b1"]),
        ("b:mlx5_0", {"vision": ["0", "1"]}, ["GPU-b0", "GPU-b1"]),  # without its only port's number
        ("GPU-b1", {"vision": ["1"]}, ["GPU-b1"]),
    ],
)
def test_ranks_are_those_that_run_there_or_did_when_the_host_died(
    odd: str, capsys: pytest.CaptureFixture[str], name: str, ranks: dict[str, list[str]], gpus: list[str] | None
) -> None:
    found = asked(odd, capsys, name, at=NOW)
    assert ranks_of(found) == ranks
    assert gpus is None or found["gpus"] == gpus


def test_costs_are_those_of_the_whole_run_in_hours_and_money(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(odd, capsys, "r1", "--price", "2.5", at=NOW)
    # 64 GPUs as the ledger has them, and the 2 ranks of vision, which the ledger does not know.
    assert [(run["run"], run["gpus"], run["unsaved_gpu_hours"]) for run in found["runs"]] == [
        ("lm", 64, 64 * 0.5),
        ("vision", 2, 2 * 0.25),
    ]
    assert (found["stopped_gpus"], found["gpu_hours_per_hour"], found["money_per_hour"]) == (66, 66, 165)
    assert (found["unsaved_gpu_hours"], found["unsaved_money"]) == (32.5, 81.25)
    # Nothing is known about the checkpoints of this run.
    assert asked(odd, capsys, "vm", at=NOW)["unsaved_gpu_hours"] is None


def test_spare_gpus_are_on_fit_hosts_without_a_rank_an_owner_or_the_object(
    odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spare = {"r3": 3, "r4": 1, "r2": 1}  # two of `free`, one of `owned`, one of `half`, one of `unknown`
    found = asked(odd, capsys, "b", at=NOW)
    assert {one["rack"]: one["gpus"] for one in found["spare"]} == spare
    assert found["spare_gpus"] == 5
    assert asked(odd, capsys, "GPU-free0", at=NOW)["spare_gpus"] == 4
    assert asked(odd, capsys, "r3", at=NOW)["spare"] == [
        {"rack": "r2", "leaf": "same", "hosts": 1, "gpus": 1},
        {"rack": "r4", "leaf": "l3", "hosts": 1, "gpus": 1},
    ]


def test_all_gpus_count_where_the_pci_path_does_not_show_which_use_a_port(
    odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(odd, capsys, "vm:mlx5_0/1", at=NOW)
    assert found["notes"] == ["On vm one port is nearest to more than 4 GPUs. All of them are counted."]
    assert found["ranks"] == 8
    found = asked(odd, capsys, "unknown:mlx5_0/1", at=NOW)
    assert found["notes"] == ["It is not known which GPUs of unknown use the port. All of them are counted."]
    assert ranks_of(found) == {"blind": ["0"]}
    assert found["gpus"] == ["GPU-unknown0", "GPU-unknown1"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["same"], "same is the name of a leaf and a host; choose one, such as --kind leaf"),
        (["l4"], "this Prometheus knows no leaf, host, port, GPU, rack or NVLink domain 'l4'\n"),
        (["l1", "--kind", "host"], "this Prometheus knows no host 'l1'"),
        (["GPU-frei0"], "NVLink domain 'GPU-frei0'; did you mean GPU-free0 or GPU-free1"),
        (["b:mlx5_1/1"], "NVLink domain 'b:mlx5_1/1'; did you mean b:mlx5_0/1?"),
        (["fre"], "NVLink domain 'fre'; did you mean free?"),
    ],
)
def test_a_name_without_one_object_is_an_error_with_what_to_write(
    odd: str, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert main(["blast", *arguments, "--prometheus", odd, "--at", str(NOW)]) == 1
    assert error in capsys.readouterr().err


def test_a_name_of_several_objects_is_one_of_them_with_its_kind(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks_of(asked(odd, capsys, "same", "--kind", "host", at=NOW)) == {"undeclared": ["0"]}
    found = asked(odd, capsys, "same", "--kind", "leaf", at=NOW)
    assert ranks_of(found) == {"virtual": [str(number) for number in range(8)], "blind": ["0"]}


def test_a_prometheus_without_flopwatch_is_named_as_such(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blast", "b", "--prometheus", odd, "--at", str(NOW - 86_400)]) == 1
    assert "It has no host_topology_info and no gpu_info; is --prometheus right?" in capsys.readouterr().err


def test_the_page_is_a_table_of_80_columns(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blast", "r1", "--prometheus", odd, "--at", str(NOW), "--price", "2.5"]) == 0
    assert (
        capsys.readouterr().out
        == """\
rack r1: 6 GPUs, 3 hosts

run that stops             ranks on it  GPU-hours/h  GPU-h unsaved      cost/h
lm                                   3           64             32         160
vision                               2            2              0           5
total                                5           66             32         165

ranks of lm: 0-2
ranks of vision: 0,1

5 GPUs spare, 5 GPUs needed to replace these
  rack                    leaf                               hosts        GPUs
  r3                      l3                                     2           3
  r2                      same                                   1           1
  r4                      l3                                     1           1
"""
    )


def test_an_object_without_a_rank_has_no_run(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blast", "free", "--prometheus", odd, "--at", str(NOW)]) == 0
    assert "\nNo run has a rank on it.\n" in capsys.readouterr().out
