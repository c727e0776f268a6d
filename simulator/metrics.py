"""Series that Prometheus would scrape from a simulated cluster: those of the ledger, and a few of each node.

They are written as OpenMetrics with timestamps, for `promtool tsdb create-blocks-from openmetrics`
(https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format). A node that is down
has `up 0` and no other series. The training series are the mesh coordinates and the position of each rank, and the
activities of one rank per node. In announced maintenance, a node unloads the driver after a quarter of the time and
reboots after half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TextIO

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.ledger.ledger import Ledger
from flopwatch.training.totals import DURATION_BOUNDS
from simulator.jobs import JobAttempt, TrainingJob
from simulator.nodes import COLLECTIVES, EPOCH, Record
from simulator.state import Damage, JobState
from simulator.topology import PortPlace, Topology
from simulator.world import SimulatedCluster

LEDGER = "ledger:9452"
MAX_NODES = 256  # with more, only the ledger is scraped, because a day would take gigabytes
ACTIVE, DOWN = 4.0, 1.0  # infiniband_port_state_id
BLIP = 10.0  # seconds of a link flap
ERRORS = 3  # symbol errors or NVLink replays per observation
CAPPED = 20.0  # seconds of throttling per observation

Line = tuple[str, dict[str, str], float]


def scrape(world: SimulatedCluster, ledger: Ledger, t: float) -> Iterator[Line]:
    """Yield the samples of the ledger and, with up to MAX_NODES nodes, those of each node at virtual time `t`."""
    yield from ledger_lines(ledger, t)
    if world.topology.nodes <= MAX_NODES:
        yield from _nodes(world, t)


def write(lines: Iterable[Line], t: float, out: TextIO) -> None:
    """Write samples of virtual time `t` in OpenMetrics format."""
    for name, labels, value in lines:
        out.write(f"{series(name, labels)} {value!r} {EPOCH + t:.3f}\n")


def series(name: str, labels: Mapping[str, str]) -> str:
    """Return a series with its labels as the text format has it."""
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{name}{{{text}}}"


def ledger_lines(ledger: Ledger, t: float) -> Iterator[Line]:
    """Yield the samples of the ledger at virtual time `t`."""
    yield "up", {"job": "flopwatch-ledger", "instance": LEDGER}, 1.0
    for row, values, value in chain.from_iterable(ledger.families(EPOCH + t)):
        yield line(row, values, value, "flopwatch-ledger", LEDGER)


def _nodes(world: SimulatedCluster, t: float) -> Iterator[Line]:
    topology = world.topology
    broken = [damage for damage in world.broken if damage.since <= t < damage.until]
    work = {node: damage for damage in broken if damage.announced for node in damage.nodes}
    dark = {node for damage in broken if damage.dark for node in damage.nodes}
    dark |= {node for node, damage in work.items() if 0.5 <= _share(damage, t) < 0.75}
    unloaded = {node for node, damage in work.items() if 0.25 <= _share(damage, t) < 0.5}
    lost = {place for damage in broken for place in damage.gpus}
    down = {port for damage in broken for port in damage.ports}
    running = {
        node: (job, place)
        for job in world.jobs
        if job.attempt is not None and job.attempt.ended is None
        for place, node in enumerate(job.attempt.nodes)
    }
    for node in range(topology.nodes):
        instance = f"{topology.host(node)}:9450"
        yield "up", {"job": "flopwatch", "instance": instance}, float(node not in dark)
        if node in dark:
            continue
        if node in work:
            yield line(
                m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS,
                (topology.host(node),),
                EPOCH + work[node].until,
                "flopwatch",
                instance,
            )
        for row, values, value in _node(world, node, lost, down, node not in unloaded, t):
            yield line(row, values, value, "flopwatch", instance)
        if node in running:
            yield from _ranks(topology, node, *running[node], t)


def _share(damage: Damage, t: float) -> float:
    return (t - damage.since) / (damage.until - damage.since)


def _node(
    world: SimulatedCluster, node: int, lost: set[PortPlace], down: set[PortPlace], driver: bool, t: float
) -> Iterator[m.Sample]:
    topology = world.topology
    host = topology.host(node)
    yield m.FLOPWATCH_BUILD_INFO, (flopwatch.__version__,), 1.0
    for collector in ("infiniband", "nvml"):
        yield m.FLOPWATCH_COLLECTOR_SUCCESS, (collector,), 1.0
        yield m.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS, (collector,), EPOCH + t
    yield (
        m.HOST_TOPOLOGY_INFO,
        (host, topology.rack(node), topology.leaf(PortPlace(node, 0)), topology.domain(node), "simulated"),
        1.0,
    )
    yield m.GPU_DRIVER_LOADED, (), float(driver)
    seen = _EvidenceIndex(world.nodes.seen(node))
    for index in range(topology.gpus_per_node):
        uuid, place = topology.gpu(node, index), PortPlace(node, index)
        gpu = (str(index), uuid)
        yield info(m.GPU_INFO, gpu=str(index), uuid=uuid, host=host, model="NVIDIA H100 80GB HBM3", source="simulated")
        yield m.GPU_PRESENT, gpu, float(driver and place not in lost)
        yield m.GPU_ECC_ERRORS_TOTAL, (*gpu, "uncorrected"), float(seen.count("ecc", gpu=uuid))
        yield m.NVLINK_ERRORS_TOTAL, (*gpu, "replay"), float(ERRORS * seen.count("nvlink", gpu=uuid))
        for entry in seen.of("throttle", gpu=uuid):
            yield m.GPU_CLOCK_EVENT_SECONDS_TOTAL, (*gpu, entry["detail"]), 1e9 * CAPPED * entry["count"]
        for entry in seen.of("xid", gpu=uuid):
            yield m.GPU_XID_ERRORS_TOTAL, (*gpu, entry["detail"]), float(entry["count"])
            yield m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*gpu, entry["detail"]), entry["t"]
        name = topology.port(index)
        device, _, number = name.partition(":")
        port = (device, number)
        blip = any(EPOCH + t - entry["t"] < BLIP for entry in seen.of("link_down", port=name))
        yield info(
            m.INFINIBAND_INFO,
            device=device,
            port=number,
            host=host,
            link_layer="InfiniBand",
            role="compute",
            rail=str(index),
        )
        yield m.INFINIBAND_PORT_PRESENT, port, 1.0
        yield m.INFINIBAND_PORT_STATE_ID, port, DOWN if place in down or blip else ACTIVE
        yield m.INFINIBAND_SYMBOL_ERRORS_TOTAL, port, float(ERRORS * seen.count("link_errors", port=name))
        yield m.INFINIBAND_LINK_DOWNED_TOTAL, port, float(seen.count("link_down", port=name))


class _EvidenceIndex:
    """Evidence of one node, indexed by kind and by GPU or port."""

    def __init__(self, entries: Iterable[Record]) -> None:
        self._entries: dict[tuple[str, str], list[Record]] = {}
        for entry in entries:
            self._entries.setdefault((entry["kind"], entry.get("gpu") or entry.get("port", "")), []).append(entry)

    def of(self, kind: str, gpu: str = "", port: str = "") -> list[Record]:
        return self._entries.get((kind, gpu + port), [])

    def count(self, kind: str, gpu: str = "", port: str = "") -> int:
        return sum(entry["count"] for entry in self.of(kind, gpu, port))


def _ranks(topology: Topology, node: int, running: JobState, place: int, t: float) -> Iterator[Line]:
    attempt, job = running.attempt, running.job
    assert attempt is not None
    position = attempt.position(t)
    first, instance = place * topology.gpus_per_node, f"{topology.host(node)}:9450"
    own = (job.name, str(first))
    samples: list[m.Sample] = []
    for index in range(topology.gpus_per_node):
        rank = first + index
        samples.append(rank_info(topology, job, attempt, rank, node, index))
        if position is not None:
            samples.append((m.TRAINING_POSITION_STEPS, (job.name, str(rank)), float(position)))
    samples += [
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, (*own, activity), seconds)
        for activity, seconds in attempt.seconds(t).items()
    ]
    if position is not None:
        made = float(position - (attempt.restored or 0))
        samples += [
            (m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS, own, EPOCH + attempt.last_step(t)),
            (m.TRAINING_STEPS_TOTAL, own, made),
            (m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, own, COLLECTIVES * made),
        ]
    if first == 0:
        samples += [
            info(
                m.TRAINING_RUN_INFO,
                run=job.name,
                tenant=job.tenant,
                attempt=attempt.id,
                convention="causal",
                dtype="bf16",
            ),
            (m.TRAINING_WORLD_SIZE, (job.name,), float(running.gpus)),
        ]
    for row, values, value in samples:
        yield line(row, values, value, "flopwatch", instance)
    if first == 0 and position is not None:
        labels = {"job": "flopwatch", "instance": instance, "run": job.name}
        for bound in (*DURATION_BOUNDS, float("inf")):
            within = made if bound >= job.step_seconds * (1 + job.step_spread) else 0.0
            yield (
                f"{m.TRAINING_STEP_DURATION_SECONDS}_bucket",
                {**labels, "le": "+Inf" if bound == float("inf") else str(bound)},
                within,
            )
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_sum", labels, made * job.step_seconds
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_count", labels, made


def info(row: Metric, **values: str) -> m.Sample:
    """Return the sample of an info metric. Labels that are not given are empty."""
    return row, tuple(values.get(label, "") for label in row.labels), 1.0


def rank_info(topology: Topology, job: TrainingJob, attempt: JobAttempt, rank: int, node: int, gpu: int) -> m.Sample:
    """Return the info series of a rank of an attempt, which runs on this GPU of the node."""
    return info(
        m.TRAINING_RANK_INFO,
        run=job.name,
        rank=str(rank),
        host=topology.host(node),
        uuid=topology.gpu(node, gpu),
        local_rank=str(gpu),
        attempt=attempt.id,
        **mesh_place(job.mesh, rank),
    )


def mesh_place(mesh: Mapping[str, int], rank: int) -> dict[str, str]:
    """Return the coordinates of a rank in the mesh, by axis. The first axis varies fastest."""
    place = {}
    for axis, size in mesh.items():
        rank, coordinate = divmod(rank, size)
        place[axis] = str(coordinate)
    return place


def line(row: Metric, values: tuple[str, ...], value: float, job: str, instance: str) -> Line:
    """Return a sample with the labels of its series and the value in the series' unit."""
    labels = dict(zip(row.labels, values, strict=True))
    return row.name, {"job": job, "instance": instance, **labels}, value * row.scale


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
