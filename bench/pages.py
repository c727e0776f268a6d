"""Synthetic pages of all exporters of a cluster and of its ledger, served over HTTP for the benches of the rules.

Each node has eight GPUs, nine ports and eight ranks. A page has those families of the catalogue that the shipped rules
read, with the series of a healthy node. Counters increase, and one rank of each run is a straggler.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from flopwatch import catalogue as m
from flopwatch.catalogue.infiniband import PortCounter
from flopwatch.training.totals import DURATION_BOUNDS

GPUS, PORTS, NODES_OF_A_RUN = 8, 9, 64  # per node, per node, per run
LATE, COST = 5, 0.12  # the rank of each run that the others wait for, and the share of each step that it costs

# Placeholders in a page: the seconds since BEFORE the start, the Unix time, and the number of the node.
SECONDS, NOW, NODE = "\x01", "\x02", "\x03"
BEFORE = 1000.0  # seconds that the run is old at the start, at pace 1

# Families without a series on a healthy node with InfiniBand and NVLink.
ABSENT = {
    m.GPU_FABRIC_FAULT,
    m.GPU_RETIRED_PAGES_PENDING,
    m.GPU_TEMPERATURE_LIMIT_CELSIUS,
    m.GPU_XID_LAST_TIMESTAMP_SECONDS,
    m.GPU_XID_INFO,
    m.GPU_XID_NVLINK_ERRORS_TOTAL,
    m.INFINIBAND_COUNTER_SATURATED,
    m.NVLINK_LINK_STATE_ID,
    m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS,
    m.NVLINK_SWITCH_SXID_INFO,
    m.TRAINING_MFU_UNAVAILABLE,
    m.TRAINING_STUCK_FRAME_INFO,
    m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS,
    m.HOST_VERDICT_REASON,
    m.RUN_HANG_SECONDS,
    m.RUN_HANG_SUSPECT_RATIO,
    m.RUN_HANG_SIGN_RANKS,
}
# Values of the labels that do not identify the GPU, port, rank or run.
VALUES: Mapping[str, Sequence[str]] = {
    "activity": (
        "startup",
        "step",
        "compile",
        "data_stall",
        "checkpoint_save",
        "checkpoint_restore",
        "evaluation",
        "other",
    ),
    "bucket": (
        "productive",
        "lost",
        "startup",
        "compile",
        "data_stall",
        "checkpoint_save",
        "checkpoint_restore",
        "evaluation",
        "generation",
        "down",
        "queue",
        "other",
    ),
    "cause": ("gpu", "network", "unknown"),
    "collector": ("nvml", "infiniband", "xid", "identity", "dcgm"),
    "error": ("corrected", "uncorrected"),
    "kind": ("gpus", "ports", "nvlinks"),
    "limit": ("shutdown", "slowdown", "memory_max", "gpu_max"),
    "outcome": ("accepted", "partial", "refused"),
    "part": ("channel", "tpc"),
    "reason": ("power_cap", "thermal", "sync_boost", "hardware_thermal", "hardware_power_brake"),
    "sensor": ("asic", "Module0"),
    "source": ("kubelet",),
    "state": ("active", "inactive"),
    "status": ("completed", "stopped", "preempted", "resized", "failed", "silent"),
    "value": ("loss", "grad_norm"),
}
# Values of labels of one family.
OF_FAMILY: Mapping[tuple[m.Metric, str], Sequence[str]] = {
    (m.RUN_STATE, "state"): ("queued", "running", "down", "completed", "stopped"),
    (m.RUN_STRAGGLER_RATIO, "kind"): ("rank", "host", "group", "link", "stage", "imbalance", "communication"),
    (m.RUN_WHATIF_STEP_SECONDS, "mended"): ("0", "1"),
}
# Counters that increase, with the exponent of their value; all others are 0. Gauges that are not in GAUGES are 1.
MOVING: Mapping[m.Metric, str] = {
    m.GPU_ENERGY_JOULES_TOTAL: "e2",
    m.GPU_PROFILED_SECONDS_TOTAL: "",
    m.GPU_SM_ACTIVE_SECONDS_TOTAL: "",
    m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL: "e-1",
    m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL: "e9",
    m.INFINIBAND_RECEIVE_PACKETS_TOTAL: "e6",
    m.INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL: "e3",
    m.TRAINING_TOKENS_TOTAL: "e3",
    m.TRAINING_MODEL_FLOPS_TOTAL: "e14",
    m.TRAINING_HARDWARE_FLOPS_TOTAL: "e14",
    m.TRAINING_CAPACITY_FLOPS_TOTAL: "e15",
    m.TRAINING_STEPS_TOTAL: "",
    m.TRAINING_MEASURED_STEPS_TOTAL: "",
    m.TRAINING_MEASURED_STEP_SECONDS_TOTAL: "",
    m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER: "",
    m.TRAINING_POSITION_STEPS: "",
    m.RUN_RETAINED_FLOPS_TOTAL: "e14",
    m.RUN_CAPACITY_FLOPS_TOTAL: "e15",
    m.RUN_MODEL_FLOPS_TOTAL: "e14",
    m.RUN_HARDWARE_FLOPS_TOTAL: "e14",
    m.RUN_STEP_CAPACITY_FLOPS_TOTAL: "e15",
    m.RUN_TOKENS_TOTAL: "e3",
    m.RUN_STEPS_TOTAL: "",
    m.RUN_STEP_SECONDS_TOTAL: "",
    m.RUN_HIGH_WATER_STEPS: "",
}
GAUGES: Mapping[m.Metric, str] = {
    m.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS: NOW,
    m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS: NOW,
    m.RUN_COMMITTED_TIMESTAMP_SECONDS: NOW,
    m.GPU_FABRIC_STATE_ID: "3",
    m.GPU_FABRIC_STATUS_ID: "0",
    m.GPU_RECOVERY_ACTION_ID: "0",
    m.GPU_REPAIR_PENDING: "0",
    m.GPU_ROW_REMAP_FAILURE: "0",
    m.GPU_ROW_REMAP_PENDING: "0",
    m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED: "0",
    m.GPU_TEMPERATURE_CELSIUS: "60",
    m.GPU_TEMPERATURE_MARGIN_CELSIUS: "30",
    m.GPU_POWER_WATTS: "600",
    m.GPU_POWER_LIMIT_WATTS: "700",
    m.GPU_POWER_LIMIT_DEFAULT_WATTS: "700",
    m.INFINIBAND_PORT_STATE_ID: "4",
    m.INFINIBAND_LINK_FLAPPING: "0",
    m.INFINIBAND_TEMPERATURE_CELSIUS: "50",
    m.HOST_EXPECTED_PARTS: str(GPUS),
    m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO: "0",
    m.TRAINING_PEAK_FLOPS_PER_SECOND: "1e15",
    m.RUN_COMMITTED_STEPS: "1000",
    m.RUN_ATTEMPT_CONFLICT: "0",
    m.RUN_PAGE: "0",
    m.RUN_OPEN_SECONDS: "1",
    m.RUN_PROVISIONAL_SECONDS: "1",
}


def families(rules: str) -> list[m.Metric]:
    """Return the families of the catalogue that a rule file reads, in the catalogue's order."""
    words = set(re.findall(r"[a-z_:0-9]+", rules))
    return [
        row
        for row in m.all_metrics()
        if words & {row.name, *(f"{row.name}_{part}" for part in ("bucket", "sum", "count"))}
    ]


def value(row: m.Metric, labels: Mapping[str, str]) -> str:
    """Return the text of a series' value in a page, with placeholders for seconds and time."""
    if row is m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL:
        return SECONDS + ("e-1" if labels["rank"] == str(LATE) else "")
    if row in (
        m.RUN_SECONDS_TOTAL,
        m.RUN_GPU_SECONDS_TOTAL,
        m.TRAINING_ACTIVITY_SECONDS_TOTAL,
        m.FLOPWATCH_OTLP_PUSHES_TOTAL,
        m.FLOPWATCH_LEDGER_REQUESTS_TOTAL,
    ):
        return SECONDS if {"productive", "step", "accepted"} & set(labels.values()) else "0"
    if row is m.RUN_STATE:
        return str(int(labels["state"] == "running"))
    if row is m.RUN_STRAGGLER_RATIO:
        return str(COST * (labels["kind"] == "rank"))
    if row is m.RUN_WHATIF_STEP_SECONDS:
        return str(1 - COST * int(labels["mended"]))
    if row in MOVING:
        return SECONDS + MOVING[row]
    if row.type == "counter":
        return "0"
    return GAUGES.get(row, "1")


def expanded(row: m.Metric, labels: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield `labels` completed with every combination of values of the family's other labels."""
    names = [name for name in row.labels if name not in labels]
    every: list[dict[str, str]] = [dict(labels)]
    for name in names:
        texts = OF_FAMILY.get((row, name), VALUES.get(name, ("x",)))
        every = [{**one, name: text} for one in every for text in texts]
    yield from every


def lines(row: m.Metric, labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the samples of a family in the text format, for `labels` and all values of the family's other labels."""
    for each in expanded(row, {name: text for name, text in labels.items() if name in row.labels}):
        inside = ",".join(f'{name}="{text}"' for name, text in each.items())
        if row.type == "histogram":
            for bound in (*DURATION_BOUNDS, float("inf")):
                bucket = f'{inside},le="{"+Inf" if bound == float("inf") else bound}"'
                yield f"{row}_bucket{{{bucket}}} {SECONDS if bound >= 1 else 0}"
            yield f"{row}_sum{{{inside}}} {SECONDS}"
            yield f"{row}_count{{{inside}}} {SECONDS}"
        else:
            yield f"{row}{{{inside}}} {value(row, each)}"


def node(rows: Sequence[m.Metric], index: int, nodes: int) -> Iterator[str]:
    """Yield the lines of a node's page, with NODE as placeholder for its number."""
    run, place = divmod(index, NODES_OF_A_RUN)
    size = min(NODES_OF_A_RUN, nodes - run * NODES_OF_A_RUN) * GPUS
    host = {"host": f"node-{NODE}", "tenant": "", "run": f"run-{run}"}
    for row in rows:
        labels = set(row.labels)
        if (
            row.domain == "run"
            or row is m.FLOPWATCH_LEDGER_REQUESTS_TOTAL
            or row in ABSENT
            or (isinstance(row, PortCounter) and (row.quiet or row.files[0].startswith("device/")))
        ):
            continue
        if "rank" in labels:
            for local in range(GPUS):
                rank = str(place * GPUS + local)
                yield from lines(
                    row, {**host, "rank": rank, "uuid": f"GPU-{NODE}-{local}", "local_rank": str(local), "attempt": "1"}
                )
        elif "run" in labels:
            if place == 0:
                yield from (
                    line.removesuffix(" 1") + f" {size}" if row is m.TRAINING_WORLD_SIZE else line
                    for line in lines(row, {**host, "attempt": "1", "page": "default"})
                )
        elif "device" in labels:
            for port in range(PORTS):
                rail = {"role": "compute", "rail": str(port)} if port < GPUS else {"role": "storage", "rail": ""}
                yield from lines(row, {**host, **rail, "device": f"mlx5_{port}", "port": "1"})
        elif "uuid" in labels:
            for gpu in range(GPUS):
                yield from lines(row, {**host, "gpu": str(gpu), "uuid": f"GPU-{NODE}-{gpu}", "mig_uuid": ""})
        else:
            yield from lines(row, host)


def ledger(rows: Sequence[m.Metric], nodes: int, began: float) -> Iterator[str]:
    """Yield the lines of the ledger's page. Every run started at Unix time `began`."""
    for run in range(-(-nodes // NODES_OF_A_RUN)):
        labels = {"tenant": "", "run": f"run-{run}", "rank": str(LATE), "host": f"node-{run * NODES_OF_A_RUN}"}
        for row in rows:
            if row is m.RUN_START_TIMESTAMP_SECONDS:
                yield f'{row}{{tenant="",run="run-{run}"}} {began:.0f}'
            elif row is m.RUN_GPUS:
                yield f'{row}{{tenant="",run="run-{run}"}} {NODES_OF_A_RUN * GPUS}'
            elif row.domain == "run" and row not in ABSENT:
                yield from lines(row, labels)
    for row in rows:
        if row is m.FLOPWATCH_LEDGER_REQUESTS_TOTAL:
            yield from lines(row, {})


def bodies(rows: Sequence[m.Metric], nodes: int, began: float) -> Callable[[str], bytes]:
    """Return a function that returns the current page of a path, such as /n/17 for node 17 or /ledger."""
    templates: dict[str, bytes] = {"ledger": "\n".join([*ledger(rows, nodes, began), ""]).encode()}

    def body(path: str) -> bytes:
        now = time.time()
        number = path.rpartition("/")[2]
        # Pages differ in the number of the node and its place in the run. The first node has the series of the run.
        template = templates.get(number)
        if template is None:
            template = templates[number] = (
                "\n".join([*node(rows, int(number), nodes), ""]).replace(NODE, number).encode()
            )
        return template.replace(SECONDS.encode(), str(int(now - began)).encode()).replace(
            NOW.encode(), str(int(now)).encode()
        )

    return body


class PageProtocol(asyncio.Protocol):
    """HTTP server protocol that answers GET requests and keeps the connection open."""

    def __init__(self, body: Callable[[str], bytes]) -> None:
        self._body, self._data = body, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of a new connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that has arrived completely."""
        self._data += data
        while b"\r\n\r\n" in self._data:
            request, _, self._data = self._data.partition(b"\r\n\r\n")
            body = self._body(request.split(b" ", 2)[1].decode())
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            assert isinstance(self._transport, asyncio.WriteTransport)
            self._transport.write(head + body)


def serve(names: Sequence[str], nodes: int, began: float, port: int) -> None:
    """Serve the pages of all nodes and of the ledger, with the families `names`, until the process is killed."""
    body = bodies([m.BY_NAME[name] for name in names], nodes, began)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: PageProtocol(body), "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())
