"""Fake of NCCL Inspector in each of its formats, and a job of 16 ranks on two hosts (TP4 x PP2 x DP2) that uses it."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch.catalogue.ranks import ranks_text
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.stragglers import Stragglers
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.inspector import Inspector
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from flopwatch.verdicts.waits import Communicator
from simulator.parallel_step import Disturbance, Layout, step
from tests.support.otlp_by_hand import START, attributes, counter, gauge, process, request

CAPTURES = Path(__file__).parents[1] / "captures" / "nccl"
FORMATS = ("2.28.3 json", "2.29.7 textfile", "2.30 json", "2.30 json verbose", "2.30 textfile", "otlp")
PER_HOST, FIRST_PID = 8, 41000
SLOWER = 10  # times the steps of the simulated job, so that fewer are simulated
COLLECTIVES = {"tp": "AllReduce", "dp": "AllReduce", "cp": "AllGather", "ep": "AlltoAll"}
NAMES = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP"}
NAMES |= {"cp": "CONTEXT_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP"}


class Operation(NamedTuple):
    """Operation of a rank in a communicator: its number there, and its seconds. A pipeline receives."""

    rank: int
    group: Communicator
    number: int
    seconds: float


def identity(group: Communicator) -> str:
    """Return the hash of a communicator."""
    return f"0x{0x7F8C_0000_0000 + hash((group.kind, group.ranks)) % (1 << 31):x}"


def uuid(rank: int) -> str:
    """Return the UUID of a rank's GPU as the plugin writes it, without the prefix `GPU-` that NVML and PyTorch have."""
    return f"5b0e81a6-3d6f-4a0c-9b5e-{rank:012x}"


def json_lines(one: Operation, at: float, version: str = "2.30", name: str = "unknown") -> Iterator[str]:
    """Yield the lines about an operation as 2.28.3 or 2.30 writes them. Before 2.30 there is none of sends."""
    group, us = one.group, round(1e6 * one.seconds)
    header: dict[str, Any] = {"id": identity(group)}
    header |= {"comm_name": name} if version != "2.28.3" else {}
    header |= {"rank": group.ranks.index(one.rank), "n_ranks": len(group.ranks), "nnodes": 1}
    about = {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": round(1e6 * at),
        "hostname": f"h{one.rank // PER_HOST}",
        "pid": FIRST_PID + one.rank,
    }
    speed = {"algobw_gbs": 33.554432, "busbw_gbs": 50.331648}
    if group.kind != "pp":
        trace = {"event_trace_ts": {"kernel_events": [{"channel_id": 0, "kernel_start_ts": 1}] * 16}}
        perf: dict[str, Any] = {"coll": COLLECTIVES[group.kind], "coll_sn": one.number, "coll_msg_size_bytes": 33554432}
        perf |= {"coll_exec_time_us": us, "coll_timing_source": "kernel_gpu"}
        perf |= {f"coll_{key}": value for key, value in speed.items()}
        perf |= trace if version == "verbose" else {}
        yield json.dumps({"header": header, "metadata": about, "coll_perf": perf}, separators=(",", ":"))
    elif version != "2.28.3":
        peer = 1 - group.ranks.index(one.rank)
        for way, took in (("Send", 1000), ("Recv", us)):
            perf = {"p2p": way, "p2p_sn": one.number, "p2p_peer": peer, "p2p_msg_size_bytes": 536870912}
            perf |= {"p2p_exec_time_us": took, "p2p_timing_source": "kernel_gpu"}
            perf |= {f"p2p_{key}": value for key, value in speed.items()}
            yield json.dumps({"header": header, "metadata": about, "p2p_perf": perf}, separators=(",", ":"))


def series(one: Operation) -> str:
    """Return the line of an operation's duration in the textfile of 2.29.7."""
    labels: dict[str, object] = {"comm_id": identity(one.group), "hostname": f"h{one.rank // PER_HOST}"}
    labels |= {"rank": one.group.ranks.index(one.rank), "slurm_job": "unknown", "slurm_job_id": "unknown"}
    labels |= {"nranks": len(one.group.ranks), "n_nodes": 1, "gpu_device_id": f"GPU{one.rank % PER_HOST}"}
    labels |= {"collective": COLLECTIVES[one.group.kind], "coll_sn": one.number, "message_size": "32MB"}
    return _sample("nccl_collective_exec_time_microseconds", labels, round(1e6 * one.seconds))


def means(operations: list[Operation], name: str = "unknown") -> Iterator[str]:
    """Yield the lines of the textfile of 2.30 about the operations of a rank since the last one."""
    by_group: defaultdict[Communicator, list[float]] = defaultdict(list)
    for one in operations:
        by_group[one.group].append(one.seconds)
    for group, seconds in by_group.items():
        labels = {"version": "v5.1", "slurm_job_id": "unknown", "node": "h", "gpu": "GPU0", "comm_name": name}
        labels |= {"n_nodes": "1", "nranks": str(len(group.ranks)), "message_size": "32-33MB"}
        mean = 1e6 * sum(seconds) / len(seconds)
        if group.kind == "pp":
            labels |= {"p2p_operation": "Recv"}
            yield _sample("nccl_p2p_bus_bandwidth_gbs", labels, 464.9)
            yield _sample("nccl_p2p_exec_time_microseconds", labels, mean)
        else:
            labels |= {"collective": COLLECTIVES[group.kind], "algo_proto": "Ring_simple"}
            yield _sample("nccl_bus_bandwidth_gbs", labels, 50.3316)
            yield _sample("nccl_collective_exec_time_microseconds", labels, mean)


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    text = ",".join(f'{key}="{label}"' for key, label in labels.items())
    return f"{name}{{{text}}} {value:.9g}"


def otlp(operations: list[Operation], at: float, rank: int, **about: str) -> ResourceMetrics:
    """Return the plugin's verbose gauges of a rank as inspector_otel.cc has them: a point for each operation.

    `about` are attributes of the resource. The plugin copies those in OTEL_RESOURCE_ATTRIBUTES.
    """
    resource = ResourceMetrics()
    about = {"service.name": "nccl-inspector"} | {key.replace("_", "."): value for key, value in about.items()}
    resource.resource.attributes.extend(attributes(about))
    scope = resource.scope_metrics.add()
    scope.scope.name = "nccl-inspector"
    gauges = {
        kind: scope.metrics.add(name=f"nccl_{kind}_exec_time_microseconds", unit="us").gauge
        for kind in ("collective", "p2p")
    }
    for one in operations:
        group, number = one.group, str(one.number)
        labels = {"version": "v5.2", "node": "h", "gpu": f"GPU{rank % PER_HOST}", "comm_id": identity(group)}
        labels |= {"comm_name": f"{NAMES[group.kind]}:7", "n_nodes": "1", "nranks": str(len(group.ranks))}
        if group.kind == "pp":
            labels |= {"p2p_operation": "Recv", "p2p_sn": number, "p2p_peer": str(1 - group.ranks.index(one.rank))}
        else:
            labels |= {"collective": COLLECTIVES[group.kind], "coll_sn": number, "algo_proto": "RING_SIMPLE"}
        gauges["p2p" if group.kind == "pp" else "collective"].data_points.add(
            as_double=round(1e6 * one.seconds), time_unix_nano=int(at * 1e9), attributes=attributes(labels)
        )
    return resource


class Job:
    """Job whose ranks write their operations in a format into a folder of each host. The exporters have a ledger."""

    def __init__(
        self,
        folder: Path,
        form: str = "2.30 json",
        slow: Mapping[int, float] | None = None,
        layout: Layout | None = None,
        seed: int = 0,
    ) -> None:
        self.form, self.slow, self.folder = form, dict(slow or {}), folder
        self.layout = layout or Layout(tp=4, dp=2, pp=2)
        self._random = random.Random(seed)
        self.now, self.steps, self.seconds, self.number = START + 100, 0, 0.0, 0
        self.groups: defaultdict[int, list[Communicator]] = defaultdict(list)
        for kind in COLLECTIVES | {"pp": ""}:
            for group in self.layout.communicators(kind):
                for rank in group.ranks:
                    self.groups[rank].append(group)
        self.ledger, self.registry, self.hosts = Ledger(), Registry(), []
        self.inspectors = []
        for number in range((self.layout.size + PER_HOST - 1) // PER_HOST):
            own = folder / f"h{number}"
            own.mkdir(exist_ok=True)
            registry = self.registry if number == 0 else Registry()
            source = None if form == "otlp" else own
            self.inspectors.append(Inspector(source, f"h{number}", registry, every=0, now=self.clock))
            settings = ExporterSettings(host=f"h{number}")
            self.hosts.append(
                Telemetry(settings, registry, clock=self.clock, now=self.clock, inspector=self.inspectors[-1])
            )

    def clock(self) -> float:
        return self.now

    def _noise(self, count: int) -> list[float]:
        return [self._random.gauss(1.0, 0.01) for _ in range(count)]

    def run(self, looks: int, steps: int = 6) -> Stragglers:
        """Do some steps before each of so many looks at the files, and return the run's stragglers in the ledger."""
        for _ in range(looks):
            operations = []
            for _ in range(steps):
                noise = Disturbance(self.slow, noise=self._noise)
                done = step(self.layout, noise)
                self.number += 1
                self.now += SLOWER * done.seconds
                self.seconds += SLOWER * done.seconds
                self.steps += 1
                operations += [
                    Operation(rank, group, self.number, SLOWER * wait) for (rank, group), wait in done.waits.items()
                ]
            self.write(operations)
            self.look()
        return self.ledger.runs["", "lm"].stragglers

    def write(self, operations: list[Operation]) -> None:
        """Write the operations of all ranks as the format has them."""
        of_rank: defaultdict[int, list[Operation]] = defaultdict(list)
        for one in operations:
            of_rank[one.rank].append(one)
        for rank, own in of_rank.items():
            host, folder = rank // PER_HOST, self.folder / f"h{rank // PER_HOST}"
            if self.form == "otlp":
                self.hosts[host].receive(request(otlp(own, self.now, rank)))
            elif "json" in self.form:
                version = "2.28.3" if "2.28" in self.form else "verbose" if "verbose" in self.form else "2.30"
                lines = [line for one in own for line in json_lines(one, self.now, version)]
                with (folder / f"h{host}-pid{FIRST_PID + rank}.log").open("a") as log:
                    log.write("".join(line + "\n" for line in lines))
            else:
                known = [one for one in own if one.group.kind != "pp"]
                lines = list(means(own)) if "2.30" in self.form else [*map(series, known)]
                file = folder / f"nccl_inspector_metrics_{uuid(rank)}.prom"
                file.write_text("".join(line + "\n" for line in lines))
                os.utime(file, (self.now, self.now))

    def look(self) -> None:
        """Have all ranks push, the exporters read the files, and the ledger take the records."""
        for number, host in enumerate(self.hosts):
            ranks = range(number * PER_HOST, min((number + 1) * PER_HOST, self.layout.size))
            for _ in range(2):  # the first asks for the files, the second has what was read
                host.receive(request(*map(self._push, ranks)))
                host.check()
                due = host.due()
                self.inspectors[number].look()
                self.now += 0.001
            for key, (version, records) in due.items():
                host.delivered(key, version)
                for record in records:
                    self.ledger.apply(record)

    def _push(self, rank: int) -> ResourceMetrics:
        metrics = [
            counter("training_activity_seconds_total", self.seconds, self.now, activity="step"),
            counter("training_steps_total", self.steps, self.now),
            gauge("training_position_steps", self.steps, self.now),
            gauge("training_collective_wait_unavailable", 1, self.now, reason="other_groups"),
        ]
        about = {"host": "h", "uuid": f"GPU-{uuid(rank)}", "local_rank": str(rank % PER_HOST)}
        metrics.append(gauge("training_rank_info", 1, self.now, **about))
        for group in self.groups[rank]:
            ranks = ranks_text(group.ranks) or ""
            number = 0 if group.kind == "pp" else self.steps
            metrics.append(gauge("training_group_sequence_number", number, self.now, group=group.kind, ranks=ranks))
        place: dict[str, Any] = {"pid": FIRST_PID + rank, "pid_namespace": 7, "pid_start_ticks": 10**9}
        return process(*metrics, rank=rank, **place)
