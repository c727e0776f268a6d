"""Sections of `make card` on the simulated driver: each passes, and each FAIL is provoked once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from bench.card import activity, capture, collect, fields, smi
from bench.card.__main__ import _wait, read
from bench.card.machine import Gpu, Work
from bench.card.machine import Machine as RealMachine
from bench.card.plan import SECTIONS, TOTAL
from bench.card.report import FAIL, INFO, PASS, Line, Report, Unavailable, run
from bench.card.simulated import SimulatedMachine
from flopwatch.simulate.lies import REFUSAL_PERIOD
from flopwatch.simulate.pynvml import Simulation
from tests.support import TESTS
from tests.support.exporter_process import alive
from tests.support.nvidia_smi import document

NVML_UNKNOWN, NOT_SUPPORTED = 999, 3


class Machine(SimulatedMachine):
    """Simulated machine with an nvidia-smi, some of whose texts a test can change."""

    def __init__(self, folder: Path, library: Any = None) -> None:
        super().__init__(folder, library)
        self.printed: dict[str, str] = {}
        self.work_factor = 1.0
        self.pid: int | None = None

    def smi(self) -> str:
        return document(self.node.root, self.printed)

    @contextlib.contextmanager
    def work(self, kind: str, gpu: Gpu) -> Iterator[Work]:
        with super().work(kind, gpu) as work:
            work.pid = work.pid if self.pid is None else self.pid
            yield work
        work.units *= self.work_factor


class Altered:
    """Simulated driver in which the calls in `calls` are replaced."""

    def __init__(self, root: Path, **calls: Callable[..., Any]) -> None:
        self.simulation = Simulation(root)
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(self.simulation, name)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node")


def lines(machine: SimulatedMachine, section: Callable[..., None], seconds: float = 6.0) -> dict[str, Line]:
    """Return the lines of a section by their names without the section's."""
    gpus = machine.gpus()
    every = section in (collect.section, collect.release, capture.section)
    report = Report("x")
    run(section, report, machine, gpus if every else gpus[0], seconds)
    return {line.name.removeprefix("x."): line for line in report.lines}


def failed(found: dict[str, Line]) -> set[str]:
    return {name for name, line in found.items() if line.status == FAIL}


@pytest.mark.parametrize(
    ("section", "passes"),
    [
        (fields.section, {"types", "energy", "memory_temperature"}),
        (fields.batch, {"often", "often_links", "seldom"}),
        (collect.section, {"p99", "again"}),
        (collect.events, {"wait"}),
        (collect.layout, set()),
        (smi.section, {*(row.name for row in smi.TABLE)} - {"gpu_temperature_limit"} | {"processes", "energy"}),
        (
            activity.section,
            {f"{load}_{name}" for load in ("idle", "matmul") for name in ("sm", "tensor", "dram")} | {"copy_dram"},
        ),
        (activity.pcie, {"received_share", "field_198_delta"}),
        (activity.gaps, {"covered"}),
        (activity.process, {"pid", "owner", "memory", "gpu_memory"}),
        (activity.ncu, set()),
        (capture.section, {"replay"}),
    ],
)
def test_a_section_passes_on_a_healthy_node(machine: Machine, section: Callable[..., None], passes: set[str]) -> None:
    found = lines(machine, section)
    assert failed(found) == set(), found
    assert {name for name, line in found.items() if line.status == PASS} == passes
    assert found.keys() - passes or passes


@pytest.mark.parametrize(
    ("lie", "section", "fails"),
    [
        ("double_types", fields.section, {"types"}),
        ("mixed_fields", fields.batch, {"often", "seldom"}),
        ("slow_values", collect.section, {"p99"}),
        ("gpm_refusals", activity.gaps, {"covered"}),
    ],
)
def test_a_lie_of_the_driver_fails(machine: Machine, lie: str, section: Callable[..., None], fails: set[str]) -> None:
    if lie == "gpm_refusals":  # the next half of a period begins in 20 s
        machine.pass_time(REFUSAL_PERIOD / 2 - 20 - machine.now % (REFUSAL_PERIOD / 2))
        machine.pass_time(REFUSAL_PERIOD / 2 if machine.now % REFUSAL_PERIOD >= REFUSAL_PERIOD / 2 else 0)
    machine.node.lie(lie)
    assert failed(lines(machine, section, 60.0)) == fails


@pytest.mark.parametrize(
    ("lie", "section", "name", "measured"),
    [
        ("unwritten_fields", fields.section, "unwritten", "success without a value: 3 4 5 6 29 30 31"),
        ("no_ecc", fields.section, "unwritten", "success without a value: 3 4 5 6"),
        ("wrapping_bytes", activity.pcie, "field_198", "below 2^32 at all times"),
        ("wrapping_bytes", activity.pcie, "field_198_delta", "bytes in a register that wraps"),
        ("no_persistence", collect.layout, "persistence", "0"),
        ("slow_init", collect.section, "first", "40.000 s with nvmlInit"),
    ],
)
def test_other_lies_are_reported(
    machine: Machine, lie: str, section: Callable[..., None], name: str, measured: str
) -> None:
    machine.node.lie(lie)
    found = lines(machine, section)
    assert failed(found) == set()
    assert found[name].status == INFO
    assert measured in found[name].measured


def test_numbers_that_differ_from_nvidia_smi_fail(machine: Machine) -> None:
    machine.printed = {path: "987654 MHz" for row in smi.TABLE for path in row.paths}
    assert failed(lines(machine, smi.section)) == {row.name for row in smi.TABLE}


def test_a_remapping_that_only_nvidia_smi_reports_fails(machine: Machine) -> None:
    machine.printed = {f"remapped_rows/remapped_row_{state}": "Yes" for state in ("pending", "failure")}
    assert failed(lines(machine, smi.section)) == {"gpu_row_remap_pending", "gpu_row_remap_failure"}
    for gpu in range(8):
        machine.node.remap(gpu, pending=True, failure=True)
    assert failed(lines(machine, smi.section)) == set()


def test_a_number_that_nvidia_smi_does_not_print_is_info(machine: Machine) -> None:
    machine.printed = {"clocks/sm_clock": "N/A", "temperature/gpu_temp": "Requested functionality has been deprecated"}
    found = lines(machine, smi.section)
    assert failed(found) == set()
    assert found["gpu_sm_clock_hertz"].status == found["gpu_temperature_celsius"].status == INFO
    assert found["gpu_sm_clock_hertz"].expected == "nvidia-smi unknown"


def test_other_processes_in_nvidia_smi_fail(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    process = "<processes><process_info><pid>1</pid><type>C</type></process_info></processes>"
    original = machine.smi
    monkeypatch.setattr(machine, "smi", lambda: original().replace("<processes></processes>", process))
    assert failed(lines(machine, smi.section)) == {"processes"}


@pytest.mark.parametrize("answer", ["", "<nvidia_smi_log/>", "NVIDIA-SMI has failed"])
def test_an_nvidia_smi_without_the_gpu_is_info(machine: Machine, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "smi", lambda: answer)
    found = lines(machine, smi.section)
    assert found.pop("energy").status == PASS
    assert {line.status for line in found.values()} == {INFO}


def test_captured_documents_of_older_drivers_are_read() -> None:
    text = (TESTS / "captures" / "nvidia_smi" / "tesla-t4.xml").read_text()
    uuid = text.partition("<uuid>")[2].partition("</uuid>")[0]
    element = smi.parsed(text, uuid)
    numbers = {row.name: smi.printed(element, row) for row in smi.TABLE}
    assert numbers["gpu_power_watts"] == 26.78
    assert numbers["gpu_pcie_width_lanes"] == 8
    assert numbers["gpu_memory_used_bytes"] == 1032 * 2**20
    assert numbers["gpu_memory_temperature_celsius"] is None
    assert numbers["gpu_remapped_rows_total.corrected"] is None
    assert numbers["gpu_ecc_errors_total.uncorrected"] == 0


def test_an_energy_counter_that_runs_fast_fails(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "node")
    began = machine.now
    altered = altered_field(machine, 83, lambda energy: energy + int((machine.now - began) * 1e6))
    assert failed(lines(altered, smi.section)) == {"energy"}


def replace_library(machine: Machine, library: Any) -> Machine:
    """Give a machine another driver."""
    machine.library = library
    machine.__post_init__()
    return machine


def altered_field(machine: Machine, field: int, change: Callable[[int], int]) -> Machine:
    """Let a machine's driver return `change(value)` of one integer field."""
    simulation = Simulation(machine.node.root)
    original = simulation.nvmlDeviceGetFieldValues

    def fields(handle: Any, keys: Any) -> Any:
        values = original(handle, keys)
        for value in values:
            if value.fieldId == field:
                value.value.ullVal = change(value.value.ullVal)
        return values

    altered = Altered(machine.node.root, nvmlDeviceGetFieldValues=fields)
    altered.simulation = simulation
    return replace_library(machine, altered)


def test_an_energy_field_that_differs_from_its_call_fails(machine: Machine) -> None:
    altered = Altered(machine.node.root, nvmlDeviceGetTotalEnergyConsumption=lambda handle: 10**15)
    assert failed(lines(replace_library(machine, altered), fields.section)) == {"energy"}


def test_a_memory_of_0_degrees_fails(machine: Machine) -> None:
    altered = altered_field(machine, 82, lambda _: 0)
    assert failed(lines(altered, fields.section)) == {"memory_temperature"}


def test_a_series_that_is_missing_in_the_next_read_fails(machine: Machine) -> None:
    reads: list[int] = []

    def power(handle: Any) -> int:
        reads.append(1)
        if len(reads) > 8 * collect.READS:
            raise pynvml.NVMLError(NVML_UNKNOWN)
        return 70_000

    found = lines(replace_library(machine, Altered(machine.node.root, nvmlDeviceGetPowerUsage=power)), collect.section)
    assert failed(found) == {"again"}
    assert "gpu_power_watts" in found["again"].measured


def test_work_whose_activity_is_too_low_fails(machine: Machine) -> None:
    machine.activity = {metric: (high * 1.2, 1.5) for metric, (_, high) in machine.activity.items()}
    assert failed(lines(machine, activity.section)) == {"matmul_sm", "matmul_tensor", "matmul_dram"}


def test_an_idle_gpu_with_activity_fails(machine: Machine) -> None:
    machine.node.load(0, 0.5)
    altered = Altered(machine.node.root, nvmlDeviceGetComputeRunningProcesses_v3=lambda handle: [])
    machine = replace_library(machine, altered)
    assert failed(lines(machine, activity.section)) == {"idle_sm", "idle_tensor", "idle_dram"}


def test_activity_of_other_processes_is_info(machine: Machine) -> None:
    machine.node.load(0, 0.5)
    found = lines(machine, activity.section)
    assert failed(found) == set()
    assert found["idle_sm"].status == INFO
    assert found["idle_sm"].measured.endswith("with 1 processes on the GPU")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_bytes_that_differ_from_those_copied_fail(machine: Machine, factor: float) -> None:
    machine.work_factor = factor
    assert failed(lines(machine, activity.pcie)) == {"received_share", "field_198_delta"}


def test_a_field_that_counts_other_bytes_than_those_copied_fails(machine: Machine) -> None:
    assert failed(lines(altered_field(machine, 198, lambda count: 2 * count), activity.pcie)) == {"field_198_delta"}


def test_a_memory_activity_that_differs_from_the_copied_bytes_fails(machine: Machine) -> None:
    machine.work_factor = 1.5
    assert failed(lines(machine, activity.section)) == {"copy_dram"}


def test_a_memory_activity_without_a_known_peak_is_info(machine: Machine) -> None:
    found = lines(replace_library(machine, Altered(machine.node.root)), activity.section)
    assert found["copy_dram"].status == INFO
    assert found["copy_dram"].measured.endswith(", of an unknown peak")


def test_the_line_about_gaps_has_its_time_and_why_it_is_short(machine: Machine) -> None:
    measured = lines(machine, activity.gaps)["covered"].measured
    assert measured == "1.000 of 6 s, not of 3 min, because all sections have 10 min"


@pytest.mark.parametrize("links", [0, 2])
def test_raw_answers_have_the_links_to_a_grace_cpu(machine: Machine, links: int) -> None:
    simulation = machine.library
    original = simulation.field_numbers
    c2c = {(170, 0): links} | {(field, link): 1 for field in (171, 172, 231, 232, 233) for link in range(links)}
    simulation.field_numbers = lambda handle: original(handle) | c2c
    report = Report("fields")
    run(fields.section, report, machine, machine.gpus()[0], 1.0)
    codes = {(field, link): code for field, link, code, *_ in report.facts["c2c"]}
    wanted = {(field, link) for field in (171, 172, 231, 232, 233) for link in range(max(1, links))}
    assert codes == {(170, 0): 0} | dict.fromkeys(wanted, 0 if links else NOT_SUPPORTED)


def test_the_fabric_is_reported_as_it_answers(machine: Machine) -> None:
    assert lines(machine, collect.layout)["fabric"].measured == "state 3, status 0, clique 0, health mask 0x51aa"
    machine.node.fail("nvmlDeviceGetGpuFabricInfoV", NOT_SUPPORTED)
    assert lines(machine, collect.layout)["fabric"].measured == "Not Supported"


def test_a_gpu_without_gpm_is_info(machine: Machine) -> None:
    machine.node.fail("nvmlGpmQueryDeviceSupport", NOT_SUPPORTED)
    for section in (activity.section, activity.pcie, activity.gaps):
        found = lines(machine, section)
        assert {line.status for line in found.values()} == {INFO}


def test_a_process_that_the_driver_does_not_list_fails(machine: Machine) -> None:
    machine.pid = 1
    altered = Altered(machine.node.root, nvmlDeviceGetComputeRunningProcesses_v3=lambda handle: [])
    assert failed(lines(replace_library(machine, altered), activity.process)) == {"pid", "owner"}


def test_a_process_of_another_owner_than_its_job_fails(machine: Machine) -> None:
    for file in machine.proc.glob("*/cgroup"):
        file.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    found = lines(machine, activity.process)
    assert failed(found) == {"owner"}
    assert (found["owner"].measured, found["owner"].expected) == ("slurm:7", "slurm:4242")


def test_the_owner_of_this_process_is_its_job_or_its_user(tmp_path: Path) -> None:
    cgroup = tmp_path / "self" / "cgroup"
    cgroup.parent.mkdir()
    for text, owner in (("0::/\n", f"user:{os.getuid()}"), ("0::/slurm/uid_0/job_9/step_0\n", "slurm:9")):
        cgroup.write_text(text)
        assert RealMachine(pynvml, proc=tmp_path).owner() == owner


def test_a_process_of_another_pid_namespace_is_info(machine: Machine) -> None:
    machine.pid = 1
    found = lines(machine, activity.process)
    assert failed(found) == set()
    assert found["pid"].status == found["owner"].status == INFO
    assert found["memory"].status == PASS


def test_a_memory_that_differs_fails(machine: Machine) -> None:
    process = pynvml.nvmlFriendlyObject({"pid": 4711, "usedGpuMemory": 1 << 30})
    wrong = pynvml.c_nvmlMemory_v2_t(total=80 << 30, used=1, reserved=1)
    altered = Altered(
        machine.node.root,
        nvmlDeviceGetComputeRunningProcesses_v3=lambda handle: [process],
        nvmlDeviceGetMemoryInfo=lambda handle, version: wrong,
    )
    assert failed(lines(replace_library(machine, altered), activity.process)) == {"memory", "gpu_memory"}


def test_an_error_while_waiting_for_events_fails(machine: Machine) -> None:
    machine.node.fail("nvmlEventSetWait_v2", NVML_UNKNOWN)
    assert failed(lines(machine, collect.events)) == {"wait"}


def test_a_driver_without_events_is_info(machine: Machine) -> None:
    machine.node.fail("nvmlDeviceGetSupportedEventTypes", NOT_SUPPORTED)
    assert {line.status for line in lines(machine, collect.events).values()} == {INFO}


def test_a_capture_whose_replay_differs_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = capture.series

    def changed(machine: Any, library: Any) -> set[str]:
        machine.node.remap(0, failure=True)
        machine.node.nvlink_errors(0, 3, "crc", 5)
        return taken(machine, library)

    monkeypatch.setattr(capture, "series", changed)
    assert failed(lines(machine, capture.section)) == {"replay"}


def test_a_section_that_raises_is_one_fail_and_keeps_its_lines(machine: Machine) -> None:
    machine.node.lose(0)
    found = lines(machine, activity.process)
    assert failed(found) == {"error"}
    assert found["error"].measured.startswith("NVMLError")


@pytest.mark.parametrize(
    ("status", "printed", "refused", "profiled", "expected"),
    [
        (0, "done", [], 2.0, [PASS, PASS]),
        (1, "==ERROR== no kernel", [], 2.0, [FAIL, PASS]),
        (1, "==ERROR== ERR_NVGPUCTRPERM", [], 2.0, [INFO, PASS]),
        (0, "done", ["No Permission"], 2.0, [PASS, FAIL]),
        (0, "", [], 0.0, [PASS, FAIL]),
    ],
)
def test_a_profile_and_its_samples_are_judged(
    status: int, printed: str, refused: list[str], profiled: float, expected: list[str]
) -> None:
    report = Report("ncu")
    activity.ncu_lines(status, printed, refused, profiled, report)
    assert [line.status for line in report.lines] == expected


def test_a_call_that_the_gpu_lacks_is_info(machine: Machine) -> None:
    machine.node.fail("nvmlDeviceGetComputeRunningProcesses_v3", NOT_SUPPORTED)
    found = lines(machine, activity.process)
    assert [(line.status, line.measured) for line in found.values()] == [(INFO, "Not Supported")]


def test_raw_answers_of_other_sections_join_the_capture(machine: Machine) -> None:
    report = Report("capture")
    gpus = machine.gpus()
    run(fields.section, Report("fields"), machine, gpus[0], 1.0)
    run(capture.section, report, machine, gpus, 1.0)
    text = report.facts["files"]["nvml.json"]
    assert '"198"' not in text
    joined = capture.merged(text, [machine.recorder.recorded()])
    assert '"198": [{"ullVal": ' in joined
    assert "GPU-51a70000" not in joined


def test_what_a_section_wrote_before_it_ended_is_kept(tmp_path: Path) -> None:
    line = Line(PASS, "x.y", "1", "1", "0")
    file = tmp_path / "result"
    file.write_text(f'{{"line": {str(line.as_dict()).replace(chr(39), chr(34))}}}\n{{"facts": {{"a": 1}}}}\n{{"recor')
    assert read(file) == ([line], {"a": 1}, {})
    assert read(tmp_path / "missing") == ([], {}, {})


def test_unknown_numbers_are_info() -> None:
    report = Report("x")
    report.near("a", None, 1.0, 0.1)
    report.near("b", 1.0, None, 0.1)
    report.within("c", None, 0, 1)
    run(lambda report: (_ for _ in ()).throw(Unavailable("no ncu")), report)
    assert [line.status for line in report.lines] == [INFO] * 4
    assert str(report.lines[2]) == "INFO x.c                          unknown   (expected: 0 to 1)"


def test_the_sections_measure_less_than_the_whole() -> None:
    assert sum(section.seconds for section in SECTIONS) <= TOTAL * 0.7
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


@pytest.mark.parametrize("ends", [True, False])
def test_the_processes_that_a_section_started_end_with_it(ends: bool) -> None:
    command = ["sh", "-c", f"sleep 60 & echo $!; {'exit' if ends else 'sleep 60'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as section:
        assert section.stdout is not None
        child = int(section.stdout.readline())
        assert _wait(section, 30.0 if ends else 0.1) == ends
        end = time.monotonic() + 30.0
        while alive(child):
            assert time.monotonic() < end
            time.sleep(0.01)
