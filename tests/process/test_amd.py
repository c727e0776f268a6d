"""The collector of AMD GPUs with a fake `amd-smi` on PATH that prints captured documents, fails or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import AccessLost, amd
from flopwatch.node.health.doctor import examine
from flopwatch.node.health.doctor_text import page
from flopwatch.node.scrape.reader import HostSources, Reader, Spec, amd_smi, hardware
from flopwatch.settings import Address, ExporterSettings
from tests.support import TESTS, exporter_process
from tests.support.exporter_process import alive, exporter
from tests.support.machine import until

CAPTURES = TESTS / "captures" / "amd"
UUIDS = ("GPU-39663434-3461-3266-6233-306164656230", "GPU-62376431-3831-3637-3161-313932653435")
SCRIPT = """#!/bin/sh
echo "$*" >> "$0.calls"
[ -z "$PYTHONPATH" ] || exit 3
[ ! -e "$0.hang" ] || exec sleep 61.7
[ -e "$0.$1" ] || { echo "amd-smi: error: invalid choice: '$1'" >&2; exit 2; }
cat "$0.$1"
"""


class Host:
    """Files of a host with AMD GPUs: its sysfs, and a folder with the fake program."""

    def __init__(self, folder: Path, capture: str = "mi300x") -> None:
        self.sysfs, self.inventory = folder / "sys", folder / "amd_gpus.json"
        for node, number in ((0, 0), (1, 43855), (2, 27976)):
            (self.node(node)).parent.mkdir(parents=True)
            self.node(node).write_text(f"{number}\n")
        self.program = folder / "bin" / "amd-smi"
        self.program.parent.mkdir()
        self.program.write_text(SCRIPT)
        self.program.chmod(0o755)
        for what in ("static", "metric", "xgmi"):
            if (file := CAPTURES / f"{capture}_{what}.json").exists():
                self.print(what, file.read_text())
        self.now = 1000.0
        self.collector = amd.Amd(str(self.program), "node-7", self.inventory, lambda: self.now)

    def node(self, number: int) -> Path:
        return self.sysfs / f"class/kfd/kfd/topology/nodes/{number}/gpu_id"

    def file(self, what: str) -> Path:
        return self.program.with_name(f"amd-smi.{what}")

    def print(self, what: str, text: str) -> None:
        self.file(what).write_text(text)

    def change(self, what: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
        document = json.loads(self.file(what).read_text())
        change(document["gpu_data"])
        self.print(what, json.dumps(document))

    @property
    def calls(self) -> list[str]:
        return self.file("calls").read_text().splitlines()

    def read(self, after: float = 0.0) -> list[Sample]:
        """Return what is served some seconds later, once the run that this read begins has ended."""
        self.now += after
        with suppress(AccessLost):
            self.collector.read()
        thread = self.collector._thread
        assert thread is not None
        thread.join(30)
        return self.collector.read()


def value(samples: list[Sample], row: m.Metric, *labels: str) -> float:
    (found,) = (number * row.scale for one, of, number in samples if one is row and of == labels)
    return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_program_runs_every_15_s_and_rarely_for_what_hardly_changes(host: Host) -> None:
    samples = host.read()
    assert host.calls == ["static --json", "metric --json", "xgmi --json"]
    for index, uuid in enumerate(UUIDS):
        assert value(samples, m.GPU_POWER_WATTS, str(index), uuid) == 717 + index
        assert value(samples, m.GPU_PRESENT, str(index), uuid) == 1
        assert value(samples, m.NVLINK_LINKS, str(index), uuid, "inactive") == index
        assert value(samples, m.GPU_CLOCK_EVENT_SECONDS_TOTAL, str(index), uuid, "sw_power_cap") == 0
    assert [labels[:2] for row, labels, _ in samples if row is m.GPU_INFO] == [("0", UUIDS[0]), ("1", UUIDS[1])]
    host.read(14.9)
    assert len(host.calls) == 3
    host.change("metric", lambda gpus: gpus[0].update(power={"socket_power": {"value": 140, "unit": "W"}}))
    assert value(host.read(0.1), m.GPU_POWER_WATTS, "0", UUIDS[0]) == 140
    assert host.calls[3:] == ["metric --json", "xgmi --json"]
    host.read(300)
    assert host.calls[5:] == ["static --json", "metric --json", "xgmi --json"]


def test_time_throttled_is_added_up_between_runs(host: Host) -> None:
    host.read()
    more = {"accumulation_counter": 8213780 + 15_000, "ppt_accumulated": 2 + 5000}
    host.change("metric", lambda gpus: [gpu["throttle"].update(more) for gpu in gpus])
    samples = host.read(15)
    assert value(samples, m.GPU_CLOCK_EVENT_SECONDS_TOTAL, "1", UUIDS[1], "sw_power_cap") == pytest.approx(5)
    assert value(samples, m.GPU_CLOCK_EVENT_SECONDS_TOTAL, "1", UUIDS[1], "hw_thermal_slowdown") == 0


@pytest.mark.parametrize("lost", ["metric", "static"])
def test_a_gpu_that_is_no_longer_listed_does_not_answer(host: Host, lost: str) -> None:
    host.read()
    host.change(lost, lambda gpus: gpus.pop(0))
    samples = host.read(300)
    assert [value(samples, m.GPU_PRESENT, str(gpu), uuid) for gpu, uuid in enumerate(UUIDS)] == [0, 1]
    assert not any(row is m.GPU_POWER_WATTS and labels[0] == "0" for row, labels, _ in samples)
    again = amd.build(str(host.program), "node-7", str(host.inventory))
    assert value(again.read(), m.GPU_PRESENT, "0", UUIDS[0]) == 0, "also after a restart"


def test_the_partitions_of_a_gpu_are_one_gpu(host: Host) -> None:
    first = json.loads((CAPTURES / "mi300x_static.json").read_text())["gpu_data"][0]["asic"]
    host.change("static", lambda gpus: gpus[1].update(asic=first))
    samples = host.read()
    assert [labels for row, labels, _ in samples if row is m.GPU_PRESENT] == [("0", UUIDS[0])]
    assert value(samples, m.GPU_POWER_WATTS, "0", UUIDS[0]) == 717


def test_a_release_without_the_command_xgmi_is_asked_for_it_rarely(tmp_path: Path) -> None:
    host = Host(tmp_path, "mi300x_6.2")
    samples = host.read()
    assert value(samples, m.GPU_UTILIZATION_RATIO, "1", UUIDS[1]) == 0.98
    assert not any(row is m.NVLINK_LINKS for row, _, _ in samples)
    host.read(15)
    host.read(300)
    assert [call.split()[0] for call in host.calls] == [
        "static",
        "metric",
        "xgmi",
        "metric",
        "static",
        "metric",
        "xgmi",
    ]


@pytest.mark.parametrize(
    "output", ["", "ERROR: the driver is not loaded\n", '{"gpu_data": [', "[]", '{"gpu_data": "N/A"}']
)
def test_a_failing_program_loses_the_gpus_after_a_minute(host: Host, output: str) -> None:
    before = host.read()
    host.print("metric", output)
    assert host.read(15) == before
    host.now += 46
    with pytest.raises(AccessLost, match=r"amd-smi|no JSON|Expecting") as lost:
        host.collector.read()
    assert host.collector._thread is not None
    host.collector._thread.join(30)
    unreadable = [(row, labels, number) for row, labels, number in lost.value.samples if row is not m.GPU_INFO]
    assert unreadable == [(m.GPU_READABLE, (str(gpu), uuid), 0) for gpu, uuid in enumerate(UUIDS)]
    host.print("metric", (CAPTURES / "mi300x_metric.json").read_text())
    assert [row for row, _, _ in host.read(15)] == [row for row, _, _ in before]


def test_a_program_that_never_worked_fails_at_once_with_its_reason(host: Host) -> None:
    host.file("static").unlink()
    with pytest.raises(AccessLost, match=r"amd-smi static ended with 2.*invalid choice"):
        host.collector.read()


def test_a_hanging_program_is_killed_and_no_read_waits_for_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "DEADLINE", 1.0)
    host.read()
    host.file("hang").touch()
    host.now += 15
    began = time.monotonic()
    assert host.collector.read()
    assert host.collector.read()
    assert time.monotonic() - began < 0.5
    thread = host.collector._thread
    assert thread is not None
    thread.join(30)
    host.now += 61
    with pytest.raises(AccessLost, match=r"timed out after 1\.0 seconds"):
        host.collector.read()


def test_a_first_run_that_hangs_is_reported(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "FIRST", 0.1)
    monkeypatch.setattr(amd, "DEADLINE", 2.0)
    host.file("hang").touch()
    assert host.collector.read() == []
    host.now += 2.1
    with pytest.raises(AccessLost, match="amd-smi does not end"):
        host.collector.read()
    thread = host.collector._thread
    assert thread is not None
    thread.join(30)


def test_a_killed_reader_process_leaves_no_program_behind(host: Host) -> None:
    host.file("hang").touch()
    arguments = {"program": str(host.program), "host": "node-7", "inventory": str(host.inventory)}
    reader = Reader("amd", Spec("flopwatch.node.collectors.amd:build", arguments), driver=True)
    try:
        reader.ask(0.1)
        assert reader._child is not None
        process = reader._child.process
        assert isinstance(process, subprocess.Popen)
        threads = Path(f"/proc/{process.pid}/task")
        until(lambda: host.file("calls").exists())
        (pid,) = (int(one) for file in threads.glob("*/children") for one in file.read_text().split())
        process.kill()
        until(lambda: not alive(pid), 20)  # by itself it ends after a minute
    finally:
        reader.close()


def test_a_reader_process_serves_the_gpus(host: Host) -> None:
    arguments = {"program": str(host.program), "host": "node-7", "inventory": str(host.inventory)}
    reader = Reader("amd", Spec("flopwatch.node.collectors.amd:build", arguments), driver=True)
    try:
        reading = reader.ask(30.0)
    finally:
        reader.close()
    assert reading.ok, reading.reason
    assert value(reading.samples, m.GPU_TEMPERATURE_CELSIUS, "1", UUIDS[1]) == 72


def host_settings(folder: Path) -> ExporterSettings:
    state = folder / "state"
    state.mkdir(exist_ok=True)
    return ExporterSettings(
        listen=Address("127.0.0.1", 0), otlp_listen=Address("127.0.0.1", 0), state=state, sysfs=folder / "sys"
    )


def names(settings: ExporterSettings, host: Host) -> list[str]:
    sources = HostSources(settings.state, host.sysfs, "", "")
    return [reader.name for reader in hardware(settings, sources)]


def test_only_a_host_with_amd_gpus_and_the_program_has_a_reader(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = host_settings(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert amd_smi(host.sysfs) == ""
    assert "amd" not in names(settings, host)
    monkeypatch.setenv("PATH", str(host.program.parent))
    assert amd_smi(host.sysfs) == str(host.program)
    assert names(settings, host)[-1] == "amd"
    for number in (1, 2):
        host.node(number).write_text("0\n")
    assert amd_smi(host.sysfs) is None, "only CPUs"
    host.node(1).write_text("?")
    assert amd_smi(host.sysfs) is None
    assert amd_smi(Path("/sys")) is None, "the tests' machine has no AMD GPU"


def test_the_doctor_names_the_missing_program_or_reads_the_gpus(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = host_settings(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    report = examine(settings)
    why = "AMD GPUs need amd-smi in PATH or /opt/rocm/bin (docs/amd.md)"
    assert [(source.state, source.reason) for source in report.sources if source.name == "amd"] == [("absent", why)]
    assert (report.problems, report.gpus) == ([], [])
    monkeypatch.setenv("PATH", f"{host.program.parent}:{os.defpath}")
    report = examine(settings)
    assert report.problems == []
    assert [(gpu.name, gpu.about) for gpu in report.gpus] == [
        (f"GPU {gpu}", f"AMD Instinct MI300X, {pci}, {UUIDS[gpu]}")
        for gpu, pci in ((0, "0000:83:00.0"), (1, "0000:8b:00.0"))
    ]
    assert any("read: amd" in line for line in page(report, 100).splitlines())


def test_an_exporter_serves_amd_gpus_next_to_its_other_sources(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{host.program.parent}:{os.environ['PATH']}"
    monkeypatch.setitem(exporter_process.ENVIRONMENT, "PATH", path)
    power = "gpu_power_watts{gpu=1,uuid=" + UUIDS[1] + "}"
    with exporter(tmp_path / "state", "--sysfs", host.sysfs) as running:
        found = running.wait_for(power, 718)
        assert found["flopwatch_collector_success{collector=amd}"] == 1
        assert found["flopwatch_collector_supported{collector=nvml}"] == 0
        assert found[f"gpu_present{{gpu=1,uuid={UUIDS[1]}}}"] == 1
        (host.program.with_name("amd-smi.hang")).touch()
        began = time.monotonic()
        assert running.series()[power] == 718
        assert time.monotonic() - began < 2
        assert running.end() == 0
