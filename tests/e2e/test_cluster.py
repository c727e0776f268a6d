"""The simulated cluster to look at: its hooks tell what real ones do, of the rank that was made late as well."""

from __future__ import annotations

import threading

import pytest

from demo.cluster import FAULTS, HOST, STRAGGLER, PageServer, ServedCluster, jobs, text
from demo.stack import fetch
from flopwatch import catalogue as m
from flopwatch.ledger.ledger import Ledger
from simulator.hooks import Hooks, slowest_rank
from simulator.host import SimulatedNode
from simulator.metrics import Line, ledger_lines
from simulator.nodes import EPOCH, Noise
from simulator.topology import Topology
from simulator.world import SimulatedCluster

NODES, SEEN = 64, 100.0
LATE = 8 * STRAGGLER[0] + STRAGGLER[1]
# A hook sends these only if they have a value, or with a source that the simulation does not have.
NOT_SENT = {
    m.TRAINING_MFU_UNAVAILABLE,
    m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE,
    m.TRAINING_GROUP_WAIT_SECONDS_TOTAL,
    m.TRAINING_GROUP_SEQUENCE_NUMBER,
    m.TRAINING_MEASURED_TOKENS_TOTAL,
    m.TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL,
    m.TRAINING_MISSED_MARKS_TOTAL,
    m.TRAINING_STUCK_FRAME_INFO,
    m.TRAINING_POSITION_TOKENS,
    m.TRAINING_SAMPLES_TOTAL,
    m.TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL,
    m.TRAINING_DISCARDED_BACKWARD_TOTAL,
}


@pytest.fixture(scope="module")
def scraped() -> dict[str, list[tuple[int, Line]]]:
    """Return the lines of one scrape after all faults, by name and with the node of each."""
    hooks, found = Hooks(1), dict[str, list[tuple[int, Line]]]()

    def look(world: SimulatedCluster, t: float) -> None:
        lines = list(hooks(world, t))
        if t == SEEN:
            for node, line in lines:
                found.setdefault(line[0], []).append((node, line))
            assert slowest_rank(world.topology, world.jobs[0]) == LATE

    SimulatedCluster(
        Topology(NODES),
        jobs(NODES),
        FAULTS,
        SEEN + 10,
        1,
        Ledger().apply,
        Noise(per_node_day=0.0, missing=0.0, late=0.0),
        3.0,
        look,
        2.0,
    ).run()
    return found


def of(scraped: dict[str, list[tuple[int, Line]]], row: m.Metric, run: str) -> dict[int, float]:
    return {int(labels["rank"]): value for _, (_, labels, value) in scraped[row.name] if labels["run"] == run}


def test_every_rank_sends_the_families_of_a_hook(scraped: dict[str, list[tuple[int, Line]]]) -> None:
    expected = {row.name for row in m.all_metrics() if row.domain == "training" and row not in NOT_SENT}
    names = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in scraped}
    assert names == expected
    assert len(of(scraped, m.TRAINING_RANK_INFO, "llama-70b")) == 8 * NODES // 2


def test_the_straggler_waits_least_and_costs_every_rank_the_same_time(
    scraped: dict[str, list[tuple[int, Line]]],
) -> None:
    waits = of(scraped, m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, "llama-70b")
    assert min(waits, key=waits.__getitem__) == LATE
    steps = of(scraped, m.TRAINING_MEASURED_STEP_SECONDS_TOTAL, "llama-70b")
    assert len(set(steps.values())) == 1
    others = sorted(waits.values())[len(waits) // 2]
    # From the fault on, each step is 1.3 times as long, and the others wait for what is beyond the usual.
    assert (others - waits[LATE]) / steps[LATE] == pytest.approx(0.3 / 1.3, rel=0.6)


def test_a_run_s_mfu_is_the_one_that_was_asked_for(scraped: dict[str, list[tuple[int, Line]]]) -> None:
    model, capacity = (
        sum(of(scraped, row, "ablation-4").values())
        for row in (m.TRAINING_MODEL_FLOPS_TOTAL, m.TRAINING_CAPACITY_FLOPS_TOTAL)
    )
    assert model / capacity == pytest.approx(0.31, rel=0.05)


def test_the_ledger_of_the_cluster_counts_what_the_straggler_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers: list[Ledger] = []

    def look(cluster: ServedCluster, world: SimulatedCluster, ledger: Ledger, t: float, began: float) -> None:
        ledgers.append(ledger)
        for _ in cluster._hooks(world, t):
            pass

    monkeypatch.setattr(ServedCluster, "_publish", look)
    monkeypatch.setattr(threading.Event, "wait", lambda event, seconds=None: False)  # of real time
    with PageServer() as bodies:
        ServedCluster(NODES, 1, bodies, {}).run(600.0, 3.0)
    cost = {
        labels["run"]: value
        for name, labels, value in ledger_lines(ledgers[-1], 600.0)
        if name == m.RUN_STRAGGLER_GPU_SECONDS_TOTAL.name
    }
    assert cost.pop("llama-70b") > 1000
    assert set(cost.values()) <= {0.0}


def test_a_page_of_a_template_gets_the_names_of_its_node() -> None:
    with PageServer() as bodies:
        cluster = ServedCluster(NODES, 1, bodies, {})
        page = f'gpu_info{{host="{HOST}",uuid="{SimulatedNode.uuid(3)}"}} 1\n'
        named = cluster._named(page, STRAGGLER[0])
        assert named == f'gpu_info{{host="node-0005",uuid="{Topology.gpu(*STRAGGLER)}"}} 1\n'
        bodies.serve({"/node-0005": named.encode()})
        assert fetch(f"http://{bodies.address}/node-0005") == named.encode()


def test_times_are_moved_to_the_present() -> None:
    line = ("training_last_step_timestamp_seconds", {"run": "x", "job": "j", "instance": "i"}, EPOCH + 5)
    assert text(line, 1000.0) == 'training_last_step_timestamp_seconds{run="x"} 1005.0\n'
    assert text(("up", {}, 1.0), 0.0) == ""
