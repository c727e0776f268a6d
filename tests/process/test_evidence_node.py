"""Test the evidence in a node's records about the end of a run, and the cause that the ledger attributes from it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.ledger import attribution
from flopwatch.ledger.attribution import IncidentCause, LostTime
from flopwatch.ledger.record import Evidence
from flopwatch.ledger.store import Store
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.collectors.xid import Xid
from flopwatch.node.collectors.xid.kernel_lines import oom_kills
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import evidence, otlp
from flopwatch.node.telemetry.admission import AttemptKey, own_pid_namespace
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.evidence import HOST_PIDS, MAX_ENTRIES, MAX_HOST_ENTRIES, MAX_PLACES, EvidenceLog
from flopwatch.node.telemetry.ledger_client import Embedded, Outcomes, Remote
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from flopwatch.simulate.pynvml import Simulation
from simulator.host import SimulatedNode
from tests.support.evidence import NODE_KINDS
from tests.support.exporter_process import exporter
from tests.support.ledger_server import eventually, ledger_server
from tests.support.otlp_by_hand import START, counter, gauge, process, request, training

GPU, OTHER_GPU = SimulatedNode.uuid(3), SimulatedNode.uuid(4)
PORT = ("mlx5_0", "1")


class Node(SimulatedNode):
    """Simulated node with its collectors, the evidence from their samples, and its training processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "simulated", uptime=lambda: self.now - START)
        self.now = START
        self.create(self.now)
        self.collectors = (
            Nvml(
                Simulation(self.root),
                "node-7",
                folder / "gpus.json",
                "simulated",
                lambda: self.now,
                sysfs=self.sysfs,
                proc=self.root / "proc",
                dev=self.root / "dev",
            ),
            Infiniband(self.sysfs, "node-7", folder / "ports.json", clock=lambda: self.now),
            Xid(self.kmsg, folder / "gpus.json", folder / "xid.json", booted=lambda: START, clock=lambda: self.now),
        )
        self.evidence_log = EvidenceLog(lambda: self.now)
        self.telemetry = Telemetry(
            ExporterSettings(host="node-7"),
            Registry(),
            clock=lambda: self.now,
            now=lambda: self.now,
            evidence_log=self.evidence_log,
        )
        self.scrape(1)
        self.scrape(120)

    def scrape(self, seconds: float = 15) -> None:
        """Advance the clock and read all collectors, as a scrape by Prometheus does."""
        self.now += seconds
        self.tick(self.now)
        self.evidence_log.observe([sample for collector in self.collectors for sample in collector.read()])

    def push(self, rank: int = 0, gpu: str = GPU, step: int = 40, **attributes: Any) -> None:
        """Push as a rank that has existed since the node was created."""
        pushed = training(step, 5.0, self.now, rank=rank, start_unix=START + 1, **attributes)
        pushed.scope_metrics[0].metrics.append(gauge("training_rank_info", 1, self.now, uuid=gpu, rank=str(rank)))
        assert self.telemetry.receive(request(pushed)) == (0, "")

    def records(self) -> list[Record]:
        """Return the records that are due for the ledger, and mark them as delivered."""
        self.telemetry.check()
        due = self.telemetry.due()
        for key, (version, _) in due.items():
            self.telemetry.delivered(key, version)
        return [json.loads(json.dumps(record)) for _, records in due.values() for record in records]

    def last(self) -> list[dict[str, Any]]:
        """Return the evidence of the newest record, without its times."""
        evidence = self.records()[-1].get("evidence", [])
        return [{name: value for name, value in entry.items() if name != "t"} for entry in evidence]


def of_kind(records: list[Record], kind: str) -> list[dict[str, Any]]:
    return [entry for record in records for entry in record.get("evidence", []) if entry["kind"] == kind]


def attributed_cause(record: Record, status: str = "failed", **others: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return cause, confidence, host, GPU and port of the end in a record, given the evidence of other hosts."""
    evidence = [
        Evidence(host=host, **entry)
        for host, entries in {"node-7": record["evidence"], **others}.items()
        for entry in entries
    ]
    verdict = attribution.attribute(
        LostTime("end", record["t"], record["t"] + 20, status, frozenset({"node-7", *others})), evidence
    )
    return cause_parts(verdict)


def cause_parts(verdict: IncidentCause) -> tuple[str, ...]:
    return tuple(text for text in (verdict.cause, verdict.confidence, verdict.host, verdict.gpu, verdict.port) if text)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    simulated = Node(tmp_path)
    yield simulated
    for collector in simulated.collectors:
        collector.close()


@contextmanager
def dead_process() -> Iterator[dict[str, Any]]:
    """Yield the resource attributes of a process that is dead afterwards."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield {"pid": process.pid, "pid_namespace": own_pid_namespace()}
        process.kill()


# From a fault to the cause.


def test_a_healthy_node_sends_no_evidence(node: Node) -> None:
    for _ in range(20):
        node.scrape()
    node.push()
    [record] = node.records()
    assert "evidence" not in record


def test_a_gpu_that_falls_off_the_bus_is_blamed_for_the_rank_that_is_killed(node: Node) -> None:
    with dead_process() as pid:
        node.push(**pid)
        node.records()
        node.xid(3, 79)
        node.scrape()
    until, record = node.records()
    assert "evidence" not in until
    assert record["gone"]
    seen = [
        (entry["kind"], entry["count"], entry.get("gpu"), entry.get("detail"))
        for entry in record["evidence"]
        if entry["kind"] != "signal"
    ]  # only newer kernels log this
    assert seen == [("gpu_missing", 1, GPU, None), ("xid", 1, GPU, "79"), ("pid_gone", 1, None, None)]
    assert attributed_cause(record) == ("gpu", "certain", "node-7", GPU)


def test_an_xid_that_is_logged_after_the_last_word_follows_it(node: Node) -> None:
    with dead_process() as pid:
        node.push(**pid)
    [_, record] = node.records()
    assert attributed_cause(record) == ("unknown", "none")
    assert node.records() == []
    node.now += 40
    node.xid(3, 48)
    node.scrape()
    [again, late] = node.records()
    assert {**late, "evidence": record["evidence"]} == record  # the same final push
    assert attributed_cause(late) == ("gpu", "certain", "node-7", GPU)
    assert "evidence" not in again
    assert node.records() == []


def test_evidence_five_minutes_after_the_end_or_after_a_planned_end_is_not_sent(node: Node) -> None:
    node.push(rank=0, attempt="a1", status="completed")
    with dead_process() as pid:
        node.push(rank=1, attempt="a2", **pid)
    assert len(node.records()) == 3
    node.now += 290
    node.xid(3, 63)
    node.scrape(1)
    assert {record["attempt"] for record in node.records()} == {"a2"}
    node.now += 60
    node.xid(3, 48)
    node.scrape()
    assert node.records() == []


def test_late_evidence_is_offered_until_it_is_taken_and_no_longer(node: Node) -> None:
    with dead_process() as pid:
        node.push(**pid)
    node.records()
    node.xid(3, 48)
    node.scrape()
    [(key, (version, _))] = node.telemetry.due().items()
    node.xid(3, 63)
    node.scrape()
    node.telemetry.delivered(key, version)
    assert [entry["detail"] for entry in node.records()[-1]["evidence"] if entry["kind"] == "xid"] == ["63", "48"]
    assert node.records() == []


def test_a_process_that_comes_back_under_the_same_attempt_is_sent_at_once(node: Node) -> None:
    with dead_process() as pid:
        node.push(**pid)
    node.records()
    node.xid(3, 48)
    node.scrape()
    [(key, (version, _))] = node.telemetry.due().items()
    node.push(step=41, pid=1)
    node.telemetry.delivered(key, version)  # of the process before
    assert [record["step"] for record in node.records()] == [41]


def test_an_exception_of_the_users_is_software(node: Node) -> None:
    node.push(rank=0, status="failed", ended_by="DistBackendError")
    node.now += 1
    node.push(rank=1, status="failed", ended_by="KeyError")
    [record] = node.records()
    assert record["evidence"] == [
        {"kind": "exception", "t": node.now - 1, "count": 1, "rank": 0, "detail": "DistBackendError"},
        {"kind": "exception", "t": node.now, "count": 1, "rank": 1, "detail": "KeyError"},
    ]
    assert attributed_cause(record) == ("software", "likely")


def test_a_flap_between_two_scrapes_is_the_network(node: Node) -> None:
    node.push(status="failed", ended_by="DistBackendError")
    node.link("mlx5_3", "down")
    node.now += 1
    node.tick(node.now)
    node.link("mlx5_3", "up")
    node.scrape(5)
    [record] = node.records()
    assert [(entry["kind"], entry["count"], entry["port"]) for entry in record["evidence"][:1]] == [
        ("link_down", 1, "mlx5_3:1")
    ]
    assert attributed_cause(record) == ("network", "certain", "node-7", "mlx5_3:1")
    down = [{"kind": "link_down", "t": node.now - 3, "count": 1, "port": "mlx5_3:1"}]
    assert attributed_cause(record, n2=down, n3=down) == ("network", "certain")


@pytest.mark.parametrize(
    ("fault", "entry", "expected"),
    [
        ("ecc", {"kind": "ecc", "count": 1, "gpu": GPU}, ("gpu", "certain", "node-7", GPU)),
        ("remap", {"kind": "row_remap", "count": 1, "gpu": GPU}, ("gpu", "certain", "node-7", GPU)),
        ("lose", {"kind": "gpu_missing", "count": 1, "gpu": GPU}, ("gpu", "certain", "node-7", GPU)),
        ("nvlink", {"kind": "nvlink", "count": 1, "gpu": GPU}, ("nvlink", "possible", "node-7", GPU)),
        ("recovery", {"kind": "nvlink", "count": 3, "gpu": GPU}, ("nvlink", "possible", "node-7", GPU)),
        ("link", {"kind": "link_down", "count": 1, "port": "mlx5_5:1"}, ("network", "likely", "node-7", "mlx5_5:1")),
        ("remove", {"kind": "link_down", "count": 1, "port": "mlx5_5:1"}, ("network", "likely", "node-7", "mlx5_5:1")),
    ],
)
def test_each_fault_of_the_simulated_node_is_an_entry(
    node: Node, fault: str, entry: dict[str, Any], expected: tuple[str, ...]
) -> None:
    node.push()
    {
        "ecc": lambda: node.ecc(3, uncorrected=1),
        "remap": lambda: node.remap(3, failure=True),
        "lose": lambda: node.lose(3),
        "nvlink": lambda: node.nvlink(3, 5, "down"),
        "recovery": lambda: node.nvlink_errors(3, 2, "recovery", 3),
        "link": lambda: node.link("mlx5_5", "down"),
        "remove": lambda: node.remove("mlx5_5"),
    }[fault]()
    for _ in range(6):  # some counters are only read now and then
        node.scrape()
    [record] = node.records()
    entries = [{name: value for name, value in one.items() if name != "t"} for one in record["evidence"]]
    assert entries == [entry]
    assert attributed_cause({**record, "t": node.now}) == expected


@pytest.mark.parametrize("fault", ["corrected", "crc", "symbol_errors", "power_cap", "rate"])
def test_what_healthy_parts_do_too_is_no_evidence(node: Node, fault: str) -> None:
    {
        "corrected": lambda: node.ecc(3, corrected=5),
        "crc": lambda: node.nvlink_errors(3, 2, "crc", 3),
        "symbol_errors": lambda: node.symbol_errors("mlx5_0", 1.0),
        "power_cap": lambda: node.throttle(3, "sw_power_cap"),
        "rate": lambda: node.rate("mlx5_0", 200),
    }[fault]()
    for _ in range(8):
        node.scrape()
    node.push()
    assert node.last() == []


def test_a_hot_gpu_explains_a_slow_stretch(node: Node) -> None:
    node.push()
    node.throttle(3, "hw_thermal_slowdown")
    began = node.now
    for _ in range(4):
        node.scrape()
    [record] = node.records()
    [entry] = record["evidence"]
    assert entry == {"kind": "throttle", "t": node.now, "count": 60, "gpu": GPU, "detail": "hw_thermal_slowdown"}
    verdict = attribution.attribute(
        LostTime("slow", began, node.now, "", frozenset({"node-7"})), [Evidence(host="node-7", **entry)]
    )
    assert cause_parts(verdict) == ("thermal", "likely", "node-7", GPU)


def test_only_the_gpus_of_the_attempts_ranks_are_sent_once_all_are_known(node: Node) -> None:
    node.xid(3, 48)
    node.xid(4, 94)
    node.scrape()
    node.push(rank=0, attempt="a1", gpu=GPU)
    node.push(rank=1, attempt="a2", gpu="")
    first, second = node.records()
    assert [entry["gpu"] for entry in first["evidence"]] == [GPU]
    assert {entry["gpu"] for entry in second["evidence"]} == {GPU, OTHER_GPU}


def test_a_refused_cuda_allocation_is_sent_with_its_last_time(node: Node) -> None:
    def push(count: float) -> Record:
        pushed = training(40, 5.0, node.now, start_unix=START + 1)
        pushed.scope_metrics[0].metrics.append(counter("training_out_of_memory_total", count, node.now, rank="0"))
        node.telemetry.receive(request(pushed))
        return node.records()[-1]

    assert "evidence" not in push(0)
    first = node.now = node.now + 5
    assert push(1)["evidence"] == [{"kind": "oom", "t": first, "count": 1, "rank": 0}]
    node.now += 100
    assert push(1)["evidence"] == [{"kind": "oom", "t": first, "count": 1, "rank": 0}]
    record = push(2)
    assert record["evidence"] == [{"kind": "oom", "t": first + 100, "count": 2, "rank": 0}]
    assert attributed_cause(record) == ("out_of_memory", "likely")


OOM_KILL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-containerd-3fc2.scope,mems_allowed=0-1,"
    "oom_memcg=/kubepods.slice,task_memcg=/kubepods.slice/x.scope,task={task},pid={pid},uid=0"
)


def write_kernel_log(node: Node, text: str) -> None:
    number = node.kmsg.read_text().count("\n")
    with node.kmsg.open("a") as file:
        file.write(f"4,{number},{int((node.now - START) * 1e6)},-;{text}\n")


def test_a_rank_that_the_kernel_killed_for_memory_is_named(node: Node) -> None:
    node.push(rank=5, pid=4711, pid_namespace=HOST_PIDS)
    node.now += 10
    write_kernel_log(node, OOM_KILL.format(task="python", pid=4711))
    node.scrape()
    record = node.records()[-1]
    assert of_kind([record], "host_oom") == [
        {"kind": "host_oom", "t": node.now, "count": 1},
        {"kind": "host_oom", "t": node.now - 15, "count": 1, "rank": 5},
    ]
    assert attributed_cause(record) == ("out_of_memory", "certain", "node-7")


@pytest.mark.parametrize(
    ("attributes", "killed"),
    [
        pytest.param({"pid": 4711, "pid_namespace": 4026532000}, 4711, id="a pid of a container"),
        pytest.param({"pid": 4712, "pid_namespace": HOST_PIDS}, 4711, id="another process"),
    ],
)
def test_the_kernels_kill_of_another_process_is_no_cause(node: Node, attributes: dict[str, Any], killed: int) -> None:
    node.push(status="failed", ended_by="DistBackendError", **attributes)
    write_kernel_log(node, OOM_KILL.format(task="python", pid=killed))
    node.scrape()
    [record] = node.records()
    assert ["rank" in entry for entry in of_kind([record], "host_oom")] == [False]
    assert attributed_cause(record) == ("unknown", "none")


def test_a_process_with_a_pid_that_was_killed_before_it_started_is_another(node: Node) -> None:
    write_kernel_log(node, OOM_KILL.format(task="python", pid=4711))
    node.scrape()
    pushed = training(1, 1.0, node.now, start_unix=node.now - 5, pid=4711, pid_namespace=HOST_PIDS)
    node.telemetry.receive(request(pushed))
    assert ["rank" in entry for entry in of_kind(node.records()[-1:], "host_oom")] == [False]


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        (OOM_KILL.format(task="python", pid=4711), [4711]),
        (OOM_KILL.format(task="a,pid=1,uid=0", pid=4711), [4711]),
        (OOM_KILL.format(task="python", pid=1) + "\\x0a" + OOM_KILL.format(task="python", pid=2), [1, 2]),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),", []),
        ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", []),
        ("python invoked oom-killer: gfp_mask=0xcc0,pid=4711,uid=0", []),
        (OOM_KILL.format(task="python", pid=99999999999), []),
    ],
)
def test_the_pid_is_the_kernels_not_one_in_a_commands_name(text: str, pids: list[int]) -> None:
    assert list(oom_kills(text)) == pids


def test_the_last_eight_victims_are_remembered_across_a_restart(tmp_path: Path) -> None:
    kmsg, state = tmp_path / "kmsg", tmp_path / "xid.json"

    def victims() -> dict[str, float]:
        collector = Xid(kmsg, tmp_path / "gpus.json", state, booted=lambda: START, clock=lambda: START + 100)
        killed = {
            labels[0]: value for row, labels, value in collector.read() if row is m.HOST_OOM_KILLED_TIMESTAMP_SECONDS
        }
        collector.close()
        return killed

    kmsg.write_text(
        "".join(f"4,{n},{n * 1_000_000},-;{OOM_KILL.format(task='python', pid=100 + n)}\n" for n in range(10))
    )
    expected = {str(100 + n): START + n for n in range(2, 10)}
    assert victims() == expected
    assert victims() == expected


# Evidence that is remembered from samples.


def entries_after(
    *of: list[Sample], every: float = 15.0, evidence_log: EvidenceLog | None = None
) -> list[dict[str, Any]]:
    """Return the entries of an evidence log after these scrapes. The last one is at START."""
    times = iter([START - every * n for n in reversed(range(len(of)))])
    evidence_log = EvidenceLog(lambda: next(times)) if evidence_log is None else evidence_log
    for samples in of:
        evidence_log.observe(samples)
    return evidence_log.entries(None, 0, START * 2)


def port(row: m.Metric, value: float) -> Sample:
    return row, PORT, value


ACTIVE = port(m.INFINIBAND_PORT_STATE_ID, 4)


def test_what_was_so_at_the_first_look_is_no_news() -> None:
    first = [
        port(m.INFINIBAND_LINK_DOWNED_TOTAL, 7),
        port(m.INFINIBAND_PORT_STATE_ID, 1),
        (m.GPU_ECC_ERRORS_TOTAL, ("0", "GPU-a", "uncorrected"), 3),
        (m.GPU_PRESENT, ("0", "GPU-a"), 0),
        (m.GPU_ROW_REMAP_FAILURE, ("0", "GPU-a"), 1),
        (m.NVLINK_LINK_STATE_ID, ("0", "GPU-a", "3"), 0),
    ]
    assert entries_after([], first, first) == []


def test_a_counter_that_was_reset_has_risen_by_its_value() -> None:
    assert entries_after([port(m.INFINIBAND_LINK_DOWNED_TOTAL, 7)], [port(m.INFINIBAND_LINK_DOWNED_TOTAL, 2)]) == [
        {"kind": "link_down", "t": START, "count": 2, "port": "mlx5_0:1"}
    ]


def test_a_link_down_that_three_series_show_is_one() -> None:
    assert entries_after(
        [ACTIVE, port(m.INFINIBAND_LINK_DOWNED_TOTAL, 0), port(m.INFINIBAND_CARRIER_CHANGES_TOTAL, 3)],
        [
            port(m.INFINIBAND_PORT_STATE_ID, 1),
            port(m.INFINIBAND_LINK_DOWNED_TOTAL, 1),
            port(m.INFINIBAND_CARRIER_CHANGES_TOTAL, 4),
        ],
    ) == [{"kind": "link_down", "t": START, "count": 1, "port": "mlx5_0:1"}]


def test_a_carrier_that_only_comes_back_was_not_lost_now() -> None:
    down, up = port(m.INFINIBAND_CARRIER_CHANGES_TOTAL, 3), port(m.INFINIBAND_CARRIER_CHANGES_TOTAL, 4)
    assert entries_after([down], [up]) == []
    assert entries_after([down], [port(m.INFINIBAND_CARRIER_CHANGES_TOTAL, 5)])[0]["kind"] == "link_down"


def test_a_counter_that_is_there_from_its_first_event_on_counts_from_0_on_a_known_port() -> None:
    corrupt = port(m.INFINIBAND_INVARIANT_CRC_ERRORS_TOTAL, 2)
    assert entries_after([ACTIVE], [ACTIVE, corrupt]) == [
        {"kind": "link_errors", "t": START, "count": 2, "port": "mlx5_0:1"}
    ]
    assert entries_after([], [ACTIVE, corrupt]) == []  # the port itself is new


def test_a_management_port_trains_nothing() -> None:
    labels = tuple(
        {"device": "mlx5_0", "port": "1", "role": "management"}.get(name, "") for name in m.INFINIBAND_INFO.labels
    )
    info = (m.INFINIBAND_INFO, labels, 1.0)
    assert entries_after([info, ACTIVE], [info, port(m.INFINIBAND_PORT_STATE_ID, 1)]) == []


def test_a_gpu_whose_index_moves_is_the_same() -> None:
    def errors(index: str, count: float) -> list[Sample]:
        return [(m.GPU_ECC_ERRORS_TOTAL, (index, "GPU-a", "uncorrected"), count)]

    assert entries_after(errors("0", 3), errors("1", 3)) == []
    assert entries_after(errors("0", 3), errors("1", 4)) == [{"kind": "ecc", "t": START, "count": 1, "gpu": "GPU-a"}]


def test_a_clock_held_back_for_a_moment_slows_nothing() -> None:
    def held(seconds: float) -> list[Sample]:
        row = m.GPU_CLOCK_EVENT_SECONDS_TOTAL
        return [(row, ("0", "GPU-a", "sw_thermal_slowdown"), seconds / row.scale)]

    assert entries_after(held(0), held(1.4)) == []
    assert entries_after(held(0), held(1.6))[0]["count"] == 1.6


def test_the_kernel_logs_past_is_no_news_when_it_is_read_late() -> None:
    def events(count: float) -> list[Sample]:
        return [(m.HOST_KERNEL_EVENTS_TOTAL, ("nic_health_compromised",), count)]

    assert entries_after(events(0), events(4), every=30) == []
    assert entries_after(events(0), events(4), events(4), events(5), every=30) == [
        {"kind": "nic", "t": START, "count": 1, "detail": "nic_health_compromised"}
    ]


def test_sxids_of_several_switches_are_one_entry_with_the_latest_time() -> None:
    samples: list[Sample] = []
    for switch, number, last in (("0000:05:00.0", 1, START - 9), ("0000:06:00.0", 4, START - 5)):
        labels = switch, "12020"
        samples += [
            (m.NVLINK_SWITCH_SXID_ERRORS_TOTAL, labels, number),
            (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, labels, last),
        ]
    assert entries_after(samples) == [{"kind": "sxid", "t": START - 5, "count": 4, "detail": "12020"}]


@pytest.mark.parametrize(
    ("xid", "broken"), [("79", True), ("48", True), ("94", False), ("31", False), ("9999", False), ("x", False)]
)
def test_a_gpu_is_broken_by_a_critical_or_fatal_xid(xid: str, broken: bool) -> None:
    evidence_log = EvidenceLog(lambda: START)
    evidence_log.observe([(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", xid), START - 5)])
    assert evidence_log.broken_gpus(START - 5) == ({"GPU-a"} if broken else set())
    assert evidence_log.broken_gpus(START - 4) == set()


def test_a_link_is_down_from_an_event_until_its_port_is_up_again() -> None:
    def state(device: str, value: float) -> Sample:
        return m.INFINIBAND_PORT_STATE_ID, (device, "1"), value

    evidence_log = EvidenceLog(lambda: START)
    down = []
    for first, second in ((1, 4), (1, 4), (4, 4), (1, 4), (1, 1), (4, 1), (4, 5)):
        evidence_log.observe([state("mlx5_0", first), state("mlx5_1", second)])
        down.append(evidence_log.link_down)
    assert down == [False, False, False, True, True, True, False]  # the first port was not up at first


def test_a_link_that_is_down_is_so_after_a_restart() -> None:
    before, after = EvidenceLog(lambda: START), EvidenceLog(lambda: START + 60)
    for value in (4, 1):
        before.observe([port(m.INFINIBAND_PORT_STATE_ID, value)])
    after.restore(json.loads(json.dumps(before.state())))
    assert after.link_down
    after.observe([ACTIVE])
    assert not after.link_down


def test_a_gpu_of_the_simulated_node_that_is_lost_is_missing_in_the_activity(node: Node) -> None:
    assert node.evidence_log.activity.lost == set()
    node.lose(3)
    node.scrape()
    assert node.evidence_log.activity.lost == {GPU}
    assert node.evidence_log.activity.since(OTHER_GPU, 0) is not None


def test_samples_of_any_kind_cost_neither_the_scrape_nor_what_is_known() -> None:
    evidence_log = EvidenceLog(lambda: START)
    evidence_log.observe([(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", "79"), START)])
    evidence_log.observe([(m.GPU_XID_LAST_TIMESTAMP_SECONDS, (), START)])
    evidence_log.observe([(m.HOST_OOM_KILLED_TIMESTAMP_SECONDS, ("not a pid",), START)])
    evidence_log.observe([(m.GPU_PRESENT, ("0", "GPU-a"), None)])  # type: ignore[list-item]
    evidence_log.observe([(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", "48"), math.nan)])
    evidence_log.observe(
        [
            (m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", "94"), START),
            (m.GPU_XID_ERRORS_TOTAL, ("0", "GPU-a", "94"), math.inf),
        ]
    )
    assert evidence_log.entries(None, 0, START) == [
        {"kind": "xid", "t": START, "count": 1, "gpu": "GPU-a", "detail": "79"}
    ]


def test_what_is_remembered_and_what_is_sent_are_bounded_and_the_newest_stays() -> None:
    evidence_log = EvidenceLog(lambda: START)
    evidence_log.observe(
        [(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", str(code)), START + code) for code in range(2 * MAX_PLACES)]
    )
    assert len(evidence_log._events) == MAX_PLACES
    entries = evidence_log.entries(None, 0, START * 2)
    assert [entry["detail"] for entry in entries] == [str(2 * MAX_PLACES - 1 - n) for n in range(MAX_HOST_ENTRIES)]


def test_a_record_has_room_for_the_ranks_whatever_the_node_has_seen(node: Node) -> None:
    node.evidence_log.observe(
        [(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("3", GPU, str(code)), node.now - code) for code in range(100)]
    )
    for rank in range(40):
        node.push(rank=rank, status="failed", ended_by="KeyError")
    [record] = node.records()
    kinds = [entry["kind"] for entry in record["evidence"]]
    counts = len(kinds), kinds.count("xid"), kinds.count("exception")
    assert counts == (MAX_ENTRIES, MAX_HOST_ENTRIES, MAX_ENTRIES - MAX_HOST_ENTRIES)


def test_the_gpus_of_an_attempt_are_known_once_every_rank_has_sent_its_own() -> None:
    def pushed(uuid: str) -> otlp.Push:
        return otlp.push(process(gauge("training_rank_info", 1, uuid=uuid)), host="node-7", gpus=None, now=START + 100)

    assert evidence.gpus_of([pushed("GPU-a"), pushed("GPU-b")]) == frozenset({"GPU-a", "GPU-b"})
    assert evidence.gpus_of([pushed("GPU-a"), pushed("")]) is None
    assert evidence.gpus_of([pushed("MIG-a")]) is None  # the GPU of this MIG instance is unknown


# Encoded as OTLP.


@pytest.mark.parametrize(
    ("reported", "taken"),
    [
        ("KeyError", "KeyError"),
        ("OSError ENOSPC", "OSError ENOSPC"),
        ("SystemExit -3", "SystemExit -3"),
        ("", ""),
        ("Key Error of mine", ""),
        ("<script>", ""),
        ("E" * 65, ""),
        ("KeyError\n", ""),
        ("Fehlerö", ""),
    ],
)
def test_only_a_type_and_a_word_are_taken_of_what_a_process_ended_by(reported: str, taken: str) -> None:
    def pushed(**status: Any) -> otlp.Push:
        return otlp.push(
            process(gauge("training_position_steps", 4), ended_by=reported, **status),
            host="node-7",
            gpus=None,
            now=START + 100,
        )

    assert pushed(status="failed").ended_by == taken
    assert pushed().ended_by == ""  # it has not ended


# The ledger receives the records of a run every second, in place of every 15 s.
HASTY = """
import sys
from flopwatch.__main__ import main
from flopwatch.node.telemetry.ledger_client import Remote
Remote.__init__.__kwdefaults__["interval"] = 1.0
sys.exit(main())
"""


@pytest.mark.long
def test_a_real_exporter_sends_an_xid_that_came_after_the_crash(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with (
        ledger_server() as (url, received),
        exporter(state, "--simulate", "h100x8", "--ledger", url, program=("-c", HASTY)) as node,
        dead_process() as pid,
    ):
        node.wait_for(f"gpu_xid_errors_total{{gpu=3,uuid={GPU},xid=79}}", 0)
        now = time.time()
        pushed: ResourceMetrics = training(40, 5.0, now, start_unix=now - 60, **pid)
        pushed.scope_metrics[0].metrics.append(gauge("training_rank_info", 1, now, uuid=GPU, rank="0"))
        node.push(pushed)
        os.kill(pid["pid"], 9)

        def records() -> list[Record]:
            return [record for _, body in received for record in body]

        assert eventually(lambda: bool(of_kind(records(), "pid_gone")), 60), node.log
        assert of_kind(records(), "xid") == []
        SimulatedNode(state / "simulated").xid(3, 79)
        node.wait_for(f"gpu_xid_errors_total{{gpu=3,uuid={GPU},xid=79}}", 1)
        assert eventually(lambda: bool(of_kind(records(), "xid")), 60), node.log
        last = records()[-1]
        assert attributed_cause(last) == ("gpu", "certain", "node-7", GPU)
        assert re.search("forwarding failed|cannot be kept", node.log) is None


def deliver(node: Node, ledger: Remote | Embedded) -> None:
    node.telemetry.check()
    for key, (version, records) in node.telemetry.due().items():
        assert ledger.take(key, records)
        node.telemetry.delivered(key, version)


def test_while_the_ledger_is_away_late_evidence_is_kept_on_disk_in_the_place_of_the_last_word(
    node: Node, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    with ledger_server() as (url, _):
        pass  # a port without a listener
    remote = Remote(url, None, spool, Outcomes(Registry()))
    with dead_process() as pid:
        node.push(**pid)
    deliver(node, remote)
    node.xid(3, 48)
    node.scrape()
    deliver(node, remote)
    [kept] = [json.loads(file.read_text()) for file in spool.glob("*.json")]
    with ledger_server(port=int(url.rpartition(":")[2])) as (_, received):
        Remote(url, None, spool, Outcomes(Registry())).flush(last=True)
    [(_, sent)] = received
    assert sent == kept
    assert [(entry["kind"], entry.get("detail")) for entry in sent[-1]["evidence"]] == [
        ("xid", "48"),
        ("pid_gone", None),
    ]


def test_the_ledger_settles_on_the_gpu_that_an_xid_after_the_crash_names(node: Node, tmp_path: Path) -> None:
    ledger = Embedded(Store(tmp_path / "ledger.sqlite"), Outcomes(Registry()), now=lambda: node.now)
    with dead_process() as pid:
        node.push(step=10, **pid)
        deliver(node, ledger)
    node.now += 5
    deliver(node, ledger)
    node.now += 30
    node.xid(3, 79)
    node.scrape()
    deliver(node, ledger)
    started = node.now + 15
    for step in range(1, 60):
        node.now += 15
        pushed = training(10 + step, 15.0 * step, node.now, start_unix=started, attempt="a2")
        node.telemetry.receive(request(pushed))
        deliver(node, ledger)
    incidents = {
        labels[-1]: value for row, labels, value in ledger.ask(1).samples if row is m.RUN_INCIDENTS_TOTAL and value
    }
    assert incidents == {"gpu": 1}
    ledger.close()


def test_every_kind_of_evidence_of_a_node_is_documented() -> None:
    kinds = {kind for kind, _ in (*evidence._RISES.values(), *evidence._STATES.values())}
    assert kinds | {"xid", "sxid", "host_oom", "exception", "oom", "pid_gone"} <= set(NODE_KINDS)


def test_a_ledger_that_stops_taking_costs_no_more_than_so_many_ended_attempts(node: Node) -> None:
    keys: set[AttemptKey] = set()
    for number in range(100):
        node.push(rank=0, attempt=f"a{number}", status="failed", ended_by="KeyError")
        due = node.telemetry.due()
        for key, (version, _) in due.items():
            node.telemetry.delivered(key, version)
        keys |= due.keys()
    assert len(keys) == 100
    assert len(node.telemetry._ended) == 64
