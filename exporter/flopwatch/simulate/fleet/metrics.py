"""What a Prometheus would have scraped of a simulated cluster: the ledger's families, and a few of each node's.

OpenMetrics with time stamps, for `promtool tsdb create-blocks-from openmetrics`
(https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format). A node that is down is
`up 0` and tells nothing. Of training there is where each rank runs and how far it is, and of one rank a node its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TextIO

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.ledger.accounting import Ledger
from flopwatch.simulate.fleet.nodes import EPOCH
from flopwatch.simulate.fleet.topology import Port, Topology
from flopwatch.simulate.fleet.world import Running, World

LEDGER = "ledger:9452"
MAX_NODES = 256  # of more, only the ledger is scraped: the text of a day would be gigabytes
ACTIVE, DOWN = 4.0, 1.0  # infiniband_port_state_id

Line = tuple[str, dict[str, str], float]


def scrape(world: World, ledger: Ledger, t: float, out: TextIO) -> None:
    """Write what all targets say at a virtual time."""
    lines = list(_ledger(ledger, t))
    if world.topology.nodes <= MAX_NODES:
        lines += _nodes(world, t)
    for name, labels, value in lines:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        out.write(f"{name}{{{text}}} {value!r} {EPOCH + t:.3f}\n")


def _ledger(ledger: Ledger, t: float) -> Iterator[Line]:
    yield "up", {"job": "flopwatch-ledger", "instance": LEDGER}, 1.0
    for row, values, value in ledger.families(EPOCH + t):
        yield _line(row, values, value, "flopwatch-ledger", LEDGER)


def _nodes(world: World, t: float) -> Iterator[Line]:
    topology = world.topology
    broken = [damage for damage in world.broken if damage.since <= t < damage.until]
    dark = {node for damage in broken if damage.dark for node in damage.nodes}
    lost = {place for damage in broken for place in damage.gpus}
    down = {port for damage in broken for port in damage.ports}
    running = {
        node: (job, place) for job in world.jobs if job.attempt is not None and job.attempt.ended is None
        for place, node in enumerate(job.attempt.nodes)}
    for node in range(topology.nodes):
        instance = f"{topology.host(node)}:9450"
        yield "up", {"job": "flopwatch", "instance": instance}, float(node not in dark)
        if node in dark:
            continue
        for row, values, value in _node(world, topology, node, lost, down):
            yield _line(row, values, value, "flopwatch", instance)
        if node in running:
            for row, values, value in _ranks(topology, node, *running[node], t):
                yield _line(row, values, value, "flopwatch", instance)


def _node(
    world: World, topology: Topology, node: int, lost: set[Port], down: set[Port],
) -> Iterator[m.Sample]:
    host = topology.host(node)
    yield m.FLOPWATCH_INFO, (flopwatch.__version__,), 1.0
    yield m.NODE_TOPOLOGY_INFO, (
        host, topology.rack(node), topology.leaf(Port(node, 0)), topology.domain(node), "simulated"), 1.0
    indices = {}
    for index in range(topology.gpus_per_node):
        uuid, place = topology.gpu(node, index), Port(node, index)
        indices[uuid] = str(index)
        yield _info(m.GPU_INFO, gpu=str(index), uuid=uuid, host=host, model="NVIDIA H100 80GB HBM3", source="simulated")
        yield m.GPU_PRESENT, (str(index), uuid), float(place not in lost)
        device, _, port = topology.port(index).partition(":")
        yield _info(m.INFINIBAND_INFO, device=device, port=port, host=host, link_layer="InfiniBand", role="compute",
                    rail=str(index))
        yield m.INFINIBAND_PRESENT, (device, port), 1.0
        yield m.INFINIBAND_STATE, (device, port), DOWN if place in down else ACTIVE
    for entry in world.nodes.seen(node):
        if entry["kind"] == "xid":
            yield m.GPU_XID, (indices[entry["gpu"]], entry["gpu"], entry["detail"]), float(entry["count"])


def _ranks(topology: Topology, node: int, running: Running, place: int, t: float) -> Iterator[m.Sample]:
    attempt, job = running.attempt, running.job
    assert attempt is not None
    position = attempt.position(t)
    for index in range(topology.gpus_per_node):
        rank = place * topology.gpus_per_node + index
        yield _info(
            m.TRAINING_RANK_INFO, run=job.name, rank=str(rank), host=topology.host(node),
            uuid=topology.gpu(node, index), local_rank=str(index), attempt=attempt.id, **_coordinates(job.mesh, rank))
        if position is not None:
            yield m.TRAINING_POSITION_STEPS, (job.name, str(rank)), float(position)
        if index == 0:
            for activity, seconds in attempt.seconds(t).items():
                yield m.TRAINING_ACTIVITY_SECONDS, (job.name, str(rank), activity), seconds
            if position is not None:
                yield m.TRAINING_LAST_STEP_TIMESTAMP, (job.name, str(rank)), EPOCH + attempt.last_step(t)
        if rank == 0:
            yield _info(m.TRAINING_RUN_INFO, run=job.name, tenant=job.tenant, attempt=attempt.id, convention="causal",
                        dtype="bf16")
            yield m.TRAINING_WORLD_SIZE, (job.name,), float(running.gpus)


def _info(row: Metric, **told: str) -> m.Sample:
    return row, tuple(told.get(label, "") for label in row.labels), 1.0


def _coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, str]:
    """Return a rank's place in the mesh, whose first axis is the one that moves first."""
    found = {}
    for axis, size in mesh.items():
        rank, coordinate = divmod(rank, size)
        found[axis] = str(coordinate)
    return found


def _line(row: Metric, values: tuple[str, ...], value: float, job: str, instance: str) -> Line:
    labels = dict(zip(row.labels, values, strict=True))
    return row.name, {"job": job, "instance": instance, **labels}, value * row.scale


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
