"""The doctor on a simulated node, healthy and not, and its page for everything that a node can be."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch import commands
from flopwatch.__main__ import main
from flopwatch.commands.doctor import running
from flopwatch.node.health import doctor, wait_sources
from flopwatch.node.health.doctor import (
    CARD,
    DCGM,
    DRIVER_HANGS,
    FILE,
    KERNEL_LOG,
    MIG,
    OLD,
    PERMISSION,
    QUIET,
    Access,
    HardwarePart,
    Report,
    SourceReport,
    _access,
    _listener,
    _why,
    examine,
)
from flopwatch.node.health.doctor_text import page, shortened
from flopwatch.node.health.driver_lines import together
from flopwatch.node.health.nvml_answers import asked
from flopwatch.settings import Address, ExporterSettings, SettingsError
from flopwatch.simulate.sources import create
from simulator.host import SimulatedNode
from tests.support import ROOT
from tests.support.kubelet import encoded, kubelet, pod
from tests.support.machine import until


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """Return the simulated node of the state folder tmp_path/state."""
    node = SimulatedNode(tmp_path / "state" / "simulated")
    node.root.parent.mkdir()
    node.create()
    return node


def settings(node: SimulatedNode, **others: Any) -> ExporterSettings:
    return ExporterSettings(
        listen=Address("127.0.0.1", 0),
        otlp_listen=Address("127.0.0.1", 0),
        state=node.root.parent,
        simulate="h100x8",
        host="node-7",
        **others,
    )


def test_on_a_healthy_node_everything_is_read_and_owned(node: SimulatedNode) -> None:
    before = {path: path.stat().st_mtime_ns for path in node.root.parent.rglob("*")}
    report = examine(settings(node), create)
    assert (report.problems, report.losses) == ([], [])
    assert [(source.name, source.state, source.reason) for source in report.sources] == [
        ("nvml", "ok", ""),
        ("infiniband", "ok", ""),
        ("xid", "ok", ""),
        ("identity", "ok", ""),
        ("dcgm", "off", "--dcgm reads a DCGM host engine"),
        ("hook waits", "off", "--ledger is off"),
        ("inspector", "off", "--ledger is off"),
        ("flight recorder", "off", "--ledger is off"),
        ("ras", "off", "--ledger is off"),
    ]
    assert [gpu.name for gpu in report.gpus] == [f"GPU {index}" for index in range(8)]
    gpu = report.gpus[3]
    assert gpu.about == f"NVIDIA H100 80GB HBM3, 00000000:86:00.0, {SimulatedNode.uuid(3)}"
    assert set(gpu.families) == {"nvml", "xid", "identity"}
    assert [owner["source"] for owner in gpu.owners] == ["slurm"]
    assert gpu.missing[MIG][0] == m.GPU_MIG_INFO.name
    assert m.GPU_MODULE_POWER_WATTS.name in gpu.missing[CARD]
    assert not {PERMISSION, OLD, KERNEL_LOG} & gpu.missing.keys()
    rows = {row.name for row in m.all_metrics() if row.labels[:2] == m.GPU}
    assert {name for names in gpu.missing.values() for name in names} < rows
    port = report.ports[1]
    assert (port.name, port.about) == ("mlx5_3/1", "InfiniBand, active, 400 Gb/s, compute, rail 1")
    assert "infiniband_efa_sent_bytes_total" in port.missing[FILE]
    # What the exporter keeps is looked at and left alone.
    assert {path: path.stat().st_mtime_ns for path in node.root.parent.rglob("*")} == before


@pytest.mark.parametrize(
    ("state", "ras", "shown"),
    [
        ("", "localhost:28028", ("ok", "localhost:28028 is asked only about an overdue step")),
        (
            '{"outcome": "old", "detail": "NCCL 2.27.3"}',
            "[::1]:28029",
            (
                "absent",
                "[::1]:28029 is asked only about an overdue step, last without a usable answer: old (NCCL 2.27.3)",
            ),
        ),
        ("", "off", ("off", "--ras is off")),
    ],
)
def test_the_last_answer_of_nccls_ras_is_shown_and_ras_is_not_asked(
    node: SimulatedNode, state: str, ras: str, shown: tuple[str, str]
) -> None:
    (node.root.parent / "nccl_ras.json").write_text(state or "{}")
    report = examine(settings(node, ras=ras, ledger="embedded"), create)
    assert (report.sources[-1].state, report.sources[-1].reason) == shown
    assert (report.problems, report.losses) == ([], [])
    word = {"ok": "ok, ", "absent": "not here: ", "off": "off: "}[shown[0]]
    assert f"  ras          {word}{shown[1][:40]}" in page(report, 110)


@pytest.mark.parametrize(
    ("state", "version", "shown"),
    [
        ({}, "2.30.7", ("ok", "no rank has needed it so far")),
        (
            {"operations": {"joined": 12, "malformed": 0, "unjoined": 3}, "skipped": 900},
            "2.30.7",
            ("ok", "12 operations joined, 3 operations unjoined; 900 bytes skipped"),
        ),
        ({"problem": "x.log: Permission denied"}, "2.30.7", ("failed", "x.log: Permission denied")),
        ({}, "2.28.9", ("failed", "NCCL 2.28.9 can crash the training process with NCCL Inspector")),
    ],
)
def test_nccl_inspector_is_shown_with_its_gaps_and_bad_versions(
    node: SimulatedNode, tmp_path: Path, state: dict[str, object], version: str, shown: tuple[str, str]
) -> None:
    if state:
        (node.root.parent / "nccl_inspector.json").write_text(json.dumps({"t": time.time(), **state}))
    process = tmp_path / "proc" / "77"
    (process / "root" / "lib").mkdir(parents=True)
    (process / "root" / "lib" / "libnccl.so.2").write_bytes(b"x" * 5000 + f"NCCL version {version}+cuda13.0".encode())
    rows = ("/opt/libnccl-profiler-inspector.so", "/lib/libnccl.so.2")
    (process / "maps").write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 77 {path}\n" for path in rows))
    found = wait_sources.lines(settings(node, inspector=str(tmp_path), ledger="embedded"), tmp_path / "proc")
    assert found[0][:2] == ("hook waits", "ok")
    assert found[1][:2] == ("inspector", shown[0])
    assert found[1][2].startswith(shown[1])


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({}, ("ok", "(TORCH_FR_BUFFER_SIZE); no rank has reported it yet")),
        ({"unknown": 8}, ("ok", "; unknown in 8 ranks")),
        ({"on": 6, "off": 2, "": 1}, ("ok", "; on in 6 ranks; off in 2 ranks")),
        ({"off": 8}, ("off", "; off in 8 ranks")),
    ],
)
def test_the_flight_recorders_of_the_ranks_are_counted(
    node: SimulatedNode, tmp_path: Path, counts: dict[str, int], shown: tuple[str, str]
) -> None:
    (node.root.parent / "evidence.json").write_text(json.dumps({"flight_recorders": counts}))
    name, state, reason = wait_sources.lines(settings(node, ledger="embedded"), tmp_path)[2]
    assert (name, state) == ("flight recorder", shown[0])
    assert reason.endswith(shown[1])


def test_a_released_driver_is_not_opened(node: SimulatedNode) -> None:
    (node.root.parent / "release").write_text("10m\n")
    report = examine(settings(node), create)
    why = "the driver is released (docs/release.md); flopwatch exporter --release 0 ends that"
    assert [(source.name, source.state, source.reason) for source in report.sources] == [
        ("nvml", "off", why),
        ("infiniband", "ok", ""),
        ("xid", "off", why),
        ("identity", "absent", "the inventory has no GPU, and --topology is not set"),
        ("dcgm", "off", "--dcgm reads a DCGM host engine"),
        ("hook waits", "off", "--ledger is off"),
        ("inspector", "off", "--ledger is off"),
        ("flight recorder", "off", "--ledger is off"),
        ("ras", "off", "--ledger is off"),
    ]
    assert report.problems == []
    assert (node.root.parent / "release").read_text() == "10m\n"


def test_a_lost_gpu_is_a_problem_whether_or_not_it_was_known_before(node: SimulatedNode) -> None:
    node.lose(3)
    assert examine(settings(node), create).problems == ["GPU 3: does not answer"]
    parts = {
        SimulatedNode.uuid(gpu): dict.fromkeys(m.GPU_INFO.labels, "")
        | {"gpu": str(gpu), "uuid": SimulatedNode.uuid(gpu), "model": "H100"}
        for gpu in range(8)
    }
    (node.root / "gpus.json").write_text(json.dumps(parts))
    report = examine(settings(node), create)
    assert report.problems == ["GPU 3: does not answer"]
    assert (report.gpus[3].about, report.gpus[3].present) == (f"H100, {SimulatedNode.uuid(3)}", False)


def test_a_hung_driver_costs_its_own_lines(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DRIVER_DEADLINE", 1.0)
    node.hang("nvmlDeviceGetPowerUsage")
    report = examine(settings(node), create)
    assert report.problems == [f"nvml: {DRIVER_HANGS}"]
    assert report.gpus == []
    assert len(report.ports) == 9
    assert "\nGPUs: not known\n" in page(report, 80)


def test_a_driver_that_lies_is_explained_with_what_to_do(node: SimulatedNode) -> None:
    for lie in ("double_types", "no_persistence", "no_ecc", "garbled_processes"):
        node.lie(lie)
    report = examine(settings(node), create)
    assert report.problems == []
    starts = [" ".join(loss.split()[2:6]) for loss in report.losses]
    assert starts == ["error correction is off,", "the driver returns garbled", "persistence mode is off,"]
    text = page(report, 100)
    assert "  driver       version 590.48.01, branch R590\n" in text
    assert "               declares " in text


@pytest.mark.long
def test_owners_are_shown_with_their_source_and_a_garbage_answer_of_the_kubelet_is_a_problem(
    node: SimulatedNode, tmp_path: Path
) -> None:
    given = settings(node, kubelet_socket=tmp_path / "k.sock")
    with kubelet(tmp_path / "k.sock", encoded([pod("ml", "train-0", "worker", SimulatedNode.uuid(0))])):
        report = examine(given, create)
    assert report.problems == []
    assert {"owner_namespace": "ml", "owner_pod": "train-0", "owner_container": "worker", "source": "kubelet"} in (
        report.gpus[0].owners
    )
    with kubelet(tmp_path / "k.sock", b"<html>"):
        report = examine(given, create)
    assert (report.problems, report.losses) == ([], ["identity: kubelet: not a list of pods: a field of type 4"])


def test_the_command_reports_in_json_in_text_and_by_its_status(node: SimulatedNode) -> None:
    command = [
        sys.executable,
        "-m",
        "flopwatch",
        "doctor",
        "--simulate",
        "h100x8",
        "--state",
        str(node.root.parent),
        "--listen",
        "127.0.0.1:0",
        "--otlp-listen",
        "127.0.0.1:0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "exporter"), "COLUMNS": "80"}
    waiting = "waiting for the driver ...\n"  # on a busy machine
    healthy = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, timeout=240)
    assert (healthy.returncode, healthy.stderr.removeprefix(waiting)) == (0, "")
    assert len(json.loads(healthy.stdout)["gpus"]) == 8
    node.link("mlx5_3", "down")
    node.lose(0)
    broken = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (broken.returncode, broken.stderr.removeprefix(waiting)) == (1, "")
    assert "One thing on this node cannot be read:\n  - GPU 0: does not answer\n" in broken.stdout
    assert max(map(len, broken.stdout.splitlines())) <= 80


def test_it_takes_the_flags_of_the_exporter_that_runs_here(tmp_path: Path) -> None:
    def process(pid: int, *words: str, mounts: str = "self") -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text("".join(f"{word}\0" for word in words))
        if mounts:
            (tmp_path / str(pid) / "ns").mkdir()
            os.link(namespaces / mounts, tmp_path / str(pid) / "ns" / "mnt")

    namespaces = tmp_path / "namespaces"
    namespaces.mkdir()
    for name in ("self", "pod"):
        (namespaces / name).touch()
    process(1, "/sbin/init")
    process(2, mounts="")  # a thread of the kernel
    process(3, "sh", "-c", "flopwatch exporter")
    (tmp_path / "self").symlink_to("1")
    with pytest.raises(SettingsError, match="no exporter runs here; give the flags"):
        running(tmp_path)
    process(4, "python", "-m", "flopwatch", "exporter", "--sysfs=/host/sys", mounts="pod")
    assert running(tmp_path) == ["--sysfs=/host/sys"], "the only one there is"
    process(5, "python", "-m", "flopwatch", "exporter", mounts="")
    with pytest.raises(SettingsError, match="2 exporters run here with different flags"):
        running(tmp_path)
    for pid in (6, 7):  # it and a child of its own
        process(pid, "/opt/bin/python", "/opt/bin/flopwatch", "exporter", "--host", "node-7", "--ledger=off")
    assert running(tmp_path) == ["--host", "node-7", "--ledger=off"], "the one of our container"


def test_with_running_it_reads_the_sources_of_the_real_exporter(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--simulate",
        "h100x8",
        "--state",
        str(node.root.parent),
        "--listen",
        "127.0.0.1:0",
        "--otlp-listen=127.0.0.1:0",
        "--host",
        "node-7",
    ]
    exporter = subprocess.Popen(
        [sys.executable, "-m", "flopwatch", "exporter", *flags],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "exporter")},
    )
    try:
        proc = tmp_path / "proc"  # without other exporters of this machine
        proc.mkdir()
        for name in ("self", str(exporter.pid)):
            (proc / name).symlink_to(f"/proc/{name}")
        until(lambda: b"exporter" in (proc / str(exporter.pid) / "cmdline").read_bytes())
        assert running(proc) == flags
        monkeypatch.setattr(commands.doctor, "running", lambda: running(proc))
        assert main(["doctor", "--running", "--json", "--host", "node-8"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (len(report["gpus"]), report["host"]) == (8, "node-8"), "a flag that is given wins"
    finally:
        exporter.terminate()
        exporter.wait(30)


def test_what_a_tier_lacks_is_reported_and_is_not_a_failure(node: SimulatedNode, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as closed:  # a kubelet's socket without a server
        closed.bind(str(tmp_path / "k.sock"))
        node.kmsg.unlink()
        node.kmsg.mkdir()  # a kernel log that cannot be read, for root as well
        node.fail("nvmlDeviceGetSramEccErrorStatus", 4)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "flopwatch",
                "doctor",
                "--simulate",
                "h100x8",
                "--state",
                str(node.root.parent),
                "--listen",
                "127.0.0.1:0",
                "--otlp-listen",
                "127.0.0.1:0",
                "--kubelet-socket",
                str(tmp_path / "k.sock"),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "exporter"), "COLUMNS": "80"},
            timeout=240,
        )
    assert (done.returncode, done.stderr) == (0, "")
    _, verdict, without, *_ = done.stdout.split("\n\n")
    assert verdict == "All hardware of this node can be read."
    # Where a line is broken depends on the length of the path; and a busy machine has not asked the kubelet yet.
    missing = re.sub(r"read /.*?/kmsg", "read KMSG", " ".join(without.split()))
    assert missing.replace("kubelet does not answer", "kubelet: Connection refused").split(" - ") == [
        "Missing:",
        "gpu_sram_error_threshold_exceeded: not permitted to this user",
        "identity: kubelet: Connection refused",
        "xid: Xids from kernel_log: cannot read KMSG: Is a directory",
    ]


def test_cards_without_a_driver_are_a_problem(node: SimulatedNode) -> None:
    node.fail("nvmlInit", 12)
    assert examine(settings(node), create).problems == []
    for address, kind in (("0000:53:00.0", "0x030200"), ("0000:64:00.0", "0x030000"), ("0000:75:00.0", "0x068000")):
        device = node.sysfs / "bus" / "pci" / "devices" / address
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")
    assert examine(settings(node), create).problems == [
        "nvml: NVML Shared Library Not Found, and 2 GPUs are on the PCI bus"
    ]


@pytest.mark.long
def test_gpus_that_were_there_before_the_driver_went_are_one_problem(node: SimulatedNode) -> None:
    parts = {SimulatedNode.uuid(0): dict.fromkeys(m.GPU_INFO.labels, "") | {"gpu": "0", "uuid": SimulatedNode.uuid(0)}}
    (node.root / "gpus.json").write_text(json.dumps(parts))
    node.fail("nvmlInit", 9)
    assert examine(settings(node), create).problems == ["nvml: no driver is loaded"]


def test_a_machine_that_cannot_start_processes_is_an_error_with_the_reason(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    report = examine(settings(node), create)
    assert len(report.problems) == 2
    assert report.problems[0].startswith("nvml: ")
    assert "Permission denied" in report.problems[0]
    assert [source.state for source in report.sources] == ["failed"] * 4 + ["off"] * 5


REPORT = Report(
    version="1.2.3",
    host="node-7",
    user="user 1000, without CAP_SYSLOG",
    simulated=False,
    driver=["version 580.82.07, branch R580"],
    problems=["GPU 1: does not answer", "infiniband: no answer in time"],
    losses=["xid: Xids from kernel_log: Operation not permitted"],
    sources=[
        SourceReport("nvml", "ok", seconds=0.0123, series=61),
        SourceReport("infiniband", "absent", "no port in /sys/class/infiniband"),
        SourceReport("xid", "ok", seconds=0.002, series=9, messages=["Xids from kernel_log: Operation not permitted"]),
        SourceReport("identity", "failed", "no answer in time; the driver or the hardware behind it hangs"),
    ],
    gpus=[
        HardwarePart(
            "GPU 0",
            "NVIDIA L40S, 00000000:53:00.0, GPU-0a",
            families={"nvml": 30, "xid": 1},
            missing={
                CARD: ["nvlink_links", "nvlink_info", "nvlink_errors_total"],
                PERMISSION: ["gpu_sram_error_threshold_exceeded"],
            },
            owners=[
                {"owner_namespace": "ml", "owner_pod": "t-0", "owner_container": "worker", "source": "kubelet"},
                {"mig_uuid": "MIG-x", "owner_job": "4711", "owner_user": "1000", "source": "slurm"},
            ],
            owner_age=2.4,
        ),
        HardwarePart("GPU 1", "NVIDIA L40S, 00000000:64:00.0, GPU-1b", present=False, owners=[{"source": "unknown"}]),
        HardwarePart(
            "GPU 2", "its name was never read", readable=False, owners=[{"owner_user": "0", "source": "process"}]
        ),
    ],
    place={"host": "node-7", "rack": "A07", "leaf": "", "domain": "nvl1", "source": "csv"},
    privileges=[
        Access("base", "in force"),
        Access("kernel", "not in force: /dev/kmsg is not readable to this user", "the text of Xids"),
    ],
    listeners={"--listen": "0.0.0.0:9450 is free"},
)
PAGE = """\
flopwatch 1.2.3 on node-7, as user 1000, without CAP_SYSLOG

2 things on this node cannot be read:
  - GPU 1: does not answer
  - infiniband: no answer in time

Missing:
  - xid: Xids from kernel_log: Operation not permitted

Sources
  nvml         ok, 61 series in 12 ms
  infiniband   not here: no port in /sys/class/infiniband
  xid          ok, 9 series in 2 ms
               Xids from kernel_log: Operation not permitted
  identity     FAILED: no answer in time; the driver or the
               hardware behind it hangs
  driver       version 580.82.07, branch R580

GPUs
  GPU 0        NVIDIA L40S, 00000000:53:00.0, GPU-0a
               read: nvml 30 families, xid 1
               owner: pod ml/t-0, worker (by kubelet); job 4711
               of user 1000 on MIG-x (by slurm), 2 s ago
  GPU 1        NVIDIA L40S, 00000000:64:00.0, GPU-1b
               DOES NOT ANSWER
               owner: unknown
  GPU 2        its name was never read
               CANNOT BE READ
               owner: user 0, outside of any job (by process)
  No series of GPU 0:
  - not permitted to this user:
    gpu_sram_error_threshold_exceeded
  - this kind of card lacks it: nvlink_* (3)

Ports: none

Place, privileges (docs/privileges.md) and listeners
  place        rack A07, domain nvl1 (from csv)
  base         in force
  kernel       not in force: /dev/kmsg is not readable to this
               user
               Missing without it: the text of Xids.
  listen       0.0.0.0:9450 is free
"""


def test_the_page_of_a_node_with_everything_that_can_be_wrong() -> None:
    assert page(REPORT, 64) == PAGE


def test_a_machine_with_nothing_to_read_gets_a_hint_how_to_see_something() -> None:
    text = page(Report("1.2.3", "laptop", "root, with CAP_SYSLOG", False), 200)
    assert text.splitlines()[2:4] == [
        "There is no GPU and no InfiniBand, RoCE or EFA port here. `flopwatch exporter --simulate h100x8` simulates",
        "them.",
    ]


def test_many_names_are_shortened() -> None:
    assert together([f"GPU {index}" for index in (0, 1, 2, 5, 7)]) == "GPU 0-2, GPU 5, GPU 7"
    assert together(["mlx5_0/1", "mlx5_1/1"]) == "mlx5_0/1, mlx5_1/1"
    assert shortened(["gpu_mig_info", "gpu_mig_memory_used_bytes", "gpu_energy_joules_total", "gpu_mig_sm"]) == [
        "gpu_mig_* (3)",
        "gpu_energy_joules_total",
    ]
    assert shortened(["nvlink_links", "nvlink_info"]) == ["nvlink_links", "nvlink_info"]


@pytest.mark.parametrize(
    ("row", "answers", "reason"),
    [
        (m.GPU_MEMORY_TEMPERATURE_CELSIUS, {"field 82": [3]}, CARD),
        (m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED, {"nvmlDeviceGetSramEccErrorStatus": [4]}, PERMISSION),
        (m.GPU_TEMPERATURE_MARGIN_CELSIUS, {"nvmlDeviceGetMarginTemperature": [13]}, OLD),
        (m.GPU_TEMPERATURE_MARGIN_CELSIUS, {}, OLD),  # the library lacks it
        (m.GPU_TEMPERATURE_MARGIN_CELSIUS, {"nvmlDeviceGetMarginTemperature": [3]}, CARD),  # DCGM asks NVML, too
        (m.GPU_CHASSIS_INFO, {}, DCGM),
        (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, {}, DCGM),
        (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, {"metric 5": [3]}, DCGM),
        (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, {"metric 5": [13]}, OLD),
        (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, {"metric 5": [0]}, QUIET),
        (m.GPU_PROCESSES, {"nvmlDeviceGetComputeRunningProcesses_v3": [0]}, QUIET),
        (m.GPU_ECC_LOCATION_ERRORS_TOTAL, {}, QUIET),
        (m.NVLINK_TRANSMIT_RAW_BYTES_TOTAL, {"field 91": [0], "field 140": [3]}, DCGM),
        (m.NVLINK_TRANSMIT_RAW_BYTES_TOTAL, {"field 91": [3]}, CARD),
        (m.NVLINK_LINK_ERRORS_TOTAL, {"field 91": [3]}, CARD),
        (m.NVLINK_LINK_ERRORS_TOTAL, {"field 91": [0]}, QUIET),
        (m.GPU_MIG_INFO, {}, MIG),
        (m.GPU_XID_LAST_TIMESTAMP_SECONDS, {}, KERNEL_LOG),
    ],
)
def test_why_a_gpu_has_no_series_is_what_its_driver_answered(
    row: m.Metric, answers: dict[str, list[int]], reason: str
) -> None:
    lacks = [] if answers else ["nvmlDeviceGetMarginTemperature"]
    assert _why(row, answers, lacks, kernel_log=False, dcgm=False) == reason


def test_the_sources_of_the_catalogue_name_what_nvml_is_asked() -> None:
    assert asked(m.GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS).questions == [
        f"field {field}" for field in (193, 194, 195, 196)
    ]
    assert asked(m.GPU_MODULE_POWER_WATTS).questions == ["field 186"]
    assert asked(m.GPU_PIPE_ACTIVE_SECONDS_TOTAL).questions == [
        f"metric {metric}" for metric in (4, 7, 8, 9, 11, 12, 13)
    ]
    assert asked(m.GPU_PIPE_ACTIVE_SECONDS_TOTAL).dcgm
    assert asked(m.GPU_REMAPPED_ROWS_TOTAL).functions == ["nvmlDeviceGetRemappedRows"]


def test_a_privilege_is_in_force_or_the_obstacle_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "kubelet.sock")
    assert _access(path, up=True) == f"in force: {path} is read"
    assert _access(path, up=False) == f"not in force: {path}: No such file or directory"
    (tmp_path / "kubelet.sock").write_text("")
    assert _access(path, up=False) == f"not in force: {path} is not read"


@contextmanager
def exporter_answering() -> Iterator[int]:
    """Serve what the doctor asks an exporter for, and give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_port_is_free_has_an_exporter_or_something_else_on_it() -> None:
    assert _listener(Address("127.0.0.1", 0)) == "127.0.0.1:0 is free"
    with exporter_answering() as port:
        # Within a second, which a stall of this machine may cost.
        until(lambda: _listener(Address("127.0.0.1", port)) == f"127.0.0.1:{port}: an exporter answers")
        until(lambda: _listener(Address("0.0.0.0", port)) == f"0.0.0.0:{port}: an exporter answers")
        until(lambda: _listener(Address("::", port)) == f"[::]:{port}: an exporter answers")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert _listener(Address("127.0.0.1", port)) == f"127.0.0.1:{port}: Address already in use"
