"""`python -m bench.card` as a process: on a simulated driver, with faults in it, and without a driver."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.card import collect
from bench.card.plan import SECTIONS
from bench.card.report import FAIL, INFO, Report, run
from bench.card.simulated import SimulatedMachine
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.scrape.reader import Reader
from simulator import nvml_replay as replay
from simulator.host import SimulatedNode
from tests.support import ROOT, TESTS

pytestmark = pytest.mark.long


def card(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments, and with the programs in `path` in front of others."""
    return subprocess.run(
        [sys.executable, "-m", "bench.card", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={"PATH": f"{path}:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"},
    )


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "node")
    node.create()
    return node


@pytest.fixture
def programs(tmp_path: Path, node: SimulatedNode) -> Path:
    """Return a folder with an nvidia-smi of the simulated node."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS}/support/nvidia_smi.py {node.root} "$@"\n')
    program.chmod(0o755)
    return folder


def test_a_healthy_node_passes_and_leaves_a_capture_to_replay(
    node: SimulatedNode, programs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    only = "layout,fields,smi,gpm,capture"
    done = card("--simulated", node.root, "--out", out, "--only", only, "--seconds", 200, path=programs)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"PASS", "INFO"}
    assert sum(line.startswith("PASS smi.energy") for line in lines) == 8
    assert any(line.startswith("PASS gpm.matmul_tensor gpu0") for line in lines)
    assert any(line.startswith("PASS capture.replay") for line in lines)
    assert lines[-1].endswith(f" PASS, 0 FAIL; report and capture in {out}")
    report = json.loads((out / "report.json").read_text())
    assert len(report["facts"]["fields0"]["often"][0]) == 7
    library: Any = replay.load(out / "capture")
    collector = Nvml(library, "node1", tmp_path / "gpus.json")
    assert len({labels[0] for row, labels, _ in collector.read() if row.name == "gpu_power_watts"}) == 8
    collector.close()
    assert "GPU-51a70000" not in (out / "capture" / "nvml.json").read_text()


def test_a_fail_has_status_1_and_the_other_sections_go_on(node: SimulatedNode, tmp_path: Path) -> None:
    node.lie("double_types")
    out = tmp_path / "report"
    done = card("--simulated", node.root, "--out", out, "--only", "fields,process,events", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = {line["name"] for line in report["lines"] if line["status"] == "FAIL"}
    assert failed == {"fields.types"}
    assert {line["name"].split(".")[0] for line in report["lines"]} == {"fields", "process", "events"}
    assert json.loads((out / "report.json").read_text())["lines"] == report["lines"]


def test_a_call_that_hangs_costs_its_own_section(node: SimulatedNode, tmp_path: Path) -> None:
    node.hang("nvmlDeviceGetEccMode")
    arguments = ("--simulated", node.root, "--out", tmp_path / "report", "--seconds", 30)
    done = card(*arguments, "--only", "events,layout", "--json")
    lines = {(line["name"], line["gpu"]): line for line in json.loads(done.stdout)["lines"]}
    assert done.returncode == 1
    assert lines["layout.driver", "0"]["status"] == "INFO"
    assert lines["layout.deadline", "0"]["status"] == "FAIL"
    assert {line["status"] for (name, _), line in lines.items() if name == "events.time"} == {"INFO"}


@pytest.mark.parametrize(
    ("name", "limit", "fails"),
    [
        ("MEMORY_READS", 20, set()),
        ("DEADLINE", 0.0, {"reads"}),
        ("RESTART_SECONDS", -60.0, {"restart"}),
        ("RESIDENT_LIMIT", 1, {"memory"}),
    ],
)
def test_a_reader_is_released_restarted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: float, fails: set[str]
) -> None:
    monkeypatch.setattr(collect, "RESTART_SECONDS", 60.0)  # other tests run at the same time
    monkeypatch.setattr(collect, name, limit)
    machine = SimulatedMachine(tmp_path / "node")
    report = Report("x")
    run(collect.release, report, machine, machine.gpus(), 1.0)
    assert {line.name.removeprefix("x.") for line in report.lines if line.status == FAIL} == fails, report.lines
    assert len(report.lines) == (1 if name == "DEADLINE" else 7)
    if name == "RESIDENT_LIMIT":
        assert next(line for line in report.lines if line.name == "x.memory_reads").status == INFO


def test_a_reader_that_does_not_end_or_whose_device_files_stay_open_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "RESTART_SECONDS", 60.0)  # other tests run at the same time
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    held: list[int] = []
    release = Reader.release

    def released(reader: Reader) -> bool:
        if held:  # at its end, the section releases again
            return release(reader)
        with device.open("w") as file:  # a number above that of the folder of files, which closes meanwhile
            held.append(fcntl.fcntl(file, fcntl.F_DUPFD, 200))
        return not release(reader)

    monkeypatch.setattr(Reader, "release", released)
    machine = SimulatedMachine(tmp_path / "node")
    report = Report("x")
    run(collect.release, report, machine, machine.gpus(), 0.1)
    os.close(held[0])
    failed = {line.name: line.measured for line in report.lines if line.status == FAIL}
    assert failed == {"x.release": "0 device files, process still runs", "x.device_files": f"open in {os.getpid()}"}


def test_without_a_driver_one_line_and_status_2() -> None:
    done = card()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench.card: no NVIDIA driver answers (")
    assert done.stderr.endswith("Run this on a machine with an NVIDIA GPU.\n")
    assert done.stderr.count("\n") == 1


def test_a_gpu_that_does_not_exist_is_refused(node: SimulatedNode) -> None:
    done = card("--simulated", node.root, "--gpu", 9)
    assert done.returncode == 2
    assert "--gpu 9: the GPUs are 0, 1, 2, 3, 4, 5, 6, 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "fields,nothing"), "--only nothing: no such section"),
        (("--seconds", "601"), "--seconds: 5 to 600"),
        (("--seconds", "x"), "invalid float value: 'x'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = card(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_help_names_every_section() -> None:
    text = " ".join(card("--help").stdout.split())
    assert [section.name for section in SECTIONS if section.name not in text] == []
