"""The NVML collector against the simulated driver, which answers in pynvml's own structures and exceptions."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwatch.catalogue import (
    GPU,
    GPU_CLOCK_EVENT_ACTIVE,
    GPU_CLOCK_EVENT_SECONDS_TOTAL,
    GPU_DRIVER_LOADED,
    GPU_ECC_ERRORS_TOTAL,
    GPU_ECC_LIFETIME_ERRORS_TOTAL,
    GPU_ECC_LOCATION_ERRORS_TOTAL,
    GPU_ECC_MODE,
    GPU_ENCODER_UTILIZATION_RATIO,
    GPU_ENERGY_JOULES_TOTAL,
    GPU_FABRIC_FAULT,
    GPU_FABRIC_HEALTH_ID,
    GPU_FABRIC_INFO,
    GPU_FABRIC_STATE_ID,
    GPU_FABRIC_STATUS_ID,
    GPU_GRAPHICS_CLOCK_HERTZ,
    GPU_INFO,
    GPU_MEMORY_CLOCK_HERTZ,
    GPU_MEMORY_CLOCK_MAX_HERTZ,
    GPU_MEMORY_RESERVED_BYTES,
    GPU_MEMORY_TEMPERATURE_CELSIUS,
    GPU_MEMORY_TOTAL_BYTES,
    GPU_MEMORY_USED_BYTES,
    GPU_MIG_INFO,
    GPU_MIG_MEMORY_TOTAL_BYTES,
    GPU_MIG_MEMORY_USED_BYTES,
    GPU_MIG_MODE,
    GPU_MIG_PROFILED_SECONDS_TOTAL,
    GPU_PCIE_ERRORS_TOTAL,
    GPU_PCIE_RECEIVE_BYTES_TOTAL,
    GPU_PCIE_REPLAYS_TOTAL,
    GPU_PCIE_TRANSMIT_BYTES_TOTAL,
    GPU_POWER_LIMIT_MAX_WATTS,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_PRESENT,
    GPU_PROCESS_MEMORY_BYTES,
    GPU_PROCESSES,
    GPU_PROFILED_SECONDS_TOTAL,
    GPU_READABLE,
    GPU_RECOVERY_ACTION_ID,
    GPU_REMAPPED_ROWS_TOTAL,
    GPU_REPAIR_PENDING,
    GPU_ROW_REMAP_BANKS,
    GPU_ROW_REMAP_FAILURE,
    GPU_ROW_REMAP_PENDING,
    GPU_SM_ACTIVE_SECONDS_TOTAL,
    GPU_SM_CLOCK_HERTZ,
    GPU_SM_CLOCK_MAX_HERTZ,
    GPU_SRAM_ERROR_THRESHOLD_EXCEEDED,
    GPU_TEMPERATURE_LIMIT_CELSIUS,
    GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS,
    GPU_TEMPERATURE_MARGIN_CELSIUS,
    GPU_UTILIZATION_RATIO,
    GPU_VIDEO_CLOCK_HERTZ,
    GPU_VIDEO_CLOCK_MAX_HERTZ,
    NVLINK_ERRORS_TOTAL,
    NVLINK_INFO,
    NVLINK_LINK_STATE_ID,
    NVLINK_LINKS,
    NVLINK_RECEIVE_BYTES_TOTAL,
    NVLINK_RECEIVE_RAW_BYTES_TOTAL,
    NVLINK_SPEED_BYTES_PER_SECOND,
    NVLINK_TRANSMIT_BYTES_TOTAL,
    NVLINK_TRANSMIT_RAW_BYTES_TOTAL,
    Metric,
    Sample,
)
from flopwatch.catalogue.gpu import GPU_MEMORY_COPY_UTILIZATION_RATIO
from flopwatch.node.collectors import AccessLost, RestartReader, Unsupported
from flopwatch.node.collectors.nvml import Nvml, numa_node
from flopwatch.node.collectors.nvml.card import BLIND, GONE, LACKING
from flopwatch.node.collectors.nvml.fields import ALL_LINKS, FAST, SLOW, Key
from flopwatch.node.collectors.nvml.reads import READS
from flopwatch.simulate import h100
from flopwatch.simulate.pynvml import Handle, Simulation
from flopwatch.simulate.sources import nvml as simulated
from simulator.host import SimulatedNode

# Every error NVML has.
ERRORS = sorted(
    {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)}
)
NVLINK = {
    NVLINK_LINKS,
    NVLINK_INFO,
    NVLINK_SPEED_BYTES_PER_SECOND,
    NVLINK_ERRORS_TOTAL,
    NVLINK_TRANSMIT_BYTES_TOTAL,
    NVLINK_RECEIVE_BYTES_TOTAL,
    NVLINK_TRANSMIT_RAW_BYTES_TOTAL,
    NVLINK_RECEIVE_RAW_BYTES_TOTAL,
}
FABRIC = {GPU_FABRIC_INFO, GPU_FABRIC_STATE_ID, GPU_FABRIC_STATUS_ID, GPU_FABRIC_HEALTH_ID}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Without:
    """A library that lacks some names, as an older release of pynvml does."""

    def __init__(self, library: Simulation, *names: str) -> None:
        self._library, self._names = library, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._library, name)


class Fields(Simulation):
    """A driver that answers these fields instead: a number, or the nvmlReturn_t it refuses them with."""

    def __init__(self, root: Path, numbers: dict[Key, int] | None = None, errors: dict[Key, int] | None = None) -> None:
        super().__init__(root)
        self.other_numbers, self.errors = numbers or {}, errors or {}

    def field_numbers(self, handle: Handle) -> dict[Key, int]:
        return super().field_numbers(handle) | self.other_numbers

    def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
        values = super().nvmlDeviceGetFieldValues(handle, field_ids)
        for value in values:
            value.nvmlReturn = self.errors.get((value.fieldId, value.scopeId), value.nvmlReturn)
        return values


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    node = SimulatedNode(tmp_path_factory.mktemp("template") / "simulated")
    node.create(1_700_000_000)
    return node.root


@pytest.fixture
def node(template: Path, tmp_path: Path) -> SimulatedNode:
    """Return a node of its own for each test, with the hundreds of files of its ports in common."""
    root = tmp_path / "simulated"
    shutil.copytree(template, root, ignore=shutil.ignore_patterns("sys"))
    (root / "sys").symlink_to(template / "sys")
    return SimulatedNode(root)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(node: SimulatedNode, tmp_path: Path, clock: Clock) -> Callable[..., Nvml]:
    """Return a function that makes collectors of the node, by default with its simulated driver."""

    def make(library: Any = None) -> Nvml:
        return Nvml(
            Simulation(node.root) if library is None else library,
            "node1",
            tmp_path / "gpus.json",
            "nvml",
            clock,
            runtime=tmp_path / "gpu_runtime.json",
            sysfs=node.sysfs,
            proc=node.root / "proc",
            dev=node.root / "dev",
        )

    return make


def present(samples: list[Sample]) -> dict[str, float]:
    return {labels[0]: value for row, labels, value in samples if row is GPU_PRESENT}


def readable(samples: list[Sample]) -> dict[str, float]:
    return {labels[0]: value for row, labels, value in samples if row is GPU_READABLE}


def rows(samples: list[Sample], gpu: str) -> set[Metric]:
    return {row for row, labels, _ in samples if labels[:1] == (gpu,)}


def series(samples: list[Sample], gpu: str) -> dict[tuple[Metric, tuple[str, ...]], float]:
    """Return the values of one GPU, without its info series."""
    return {(row, labels[2:]): value for row, labels, value in samples if labels[:1] == (gpu,) and row is not GPU_INFO}


def of(samples: list[Sample], row: Metric, gpu: str = "0") -> dict[tuple[str, ...], float]:
    return {labels[2:]: value for which, labels, value in samples if which is row and labels[0] == gpu}


ALL = dict.fromkeys("01234567", 1)

# What is there, what each call brings, and what stands in for it.


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        (
            "nvmlDeviceGetFieldValues",
            {
                GPU_MEMORY_TEMPERATURE_CELSIUS,
                GPU_CLOCK_EVENT_SECONDS_TOTAL,
                GPU_ECC_ERRORS_TOTAL,
                GPU_ECC_LIFETIME_ERRORS_TOTAL,
                GPU_PCIE_REPLAYS_TOTAL,
                GPU_PCIE_ERRORS_TOTAL,
                GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS,
                GPU_RECOVERY_ACTION_ID,
            }
            | NVLINK,
        ),
        ("nvmlDeviceGetMemoryInfo", {GPU_MEMORY_USED_BYTES, GPU_MEMORY_TOTAL_BYTES, GPU_MEMORY_RESERVED_BYTES}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {GPU_CLOCK_EVENT_ACTIVE}),
        ("nvmlDeviceGetUtilizationRates", {GPU_UTILIZATION_RATIO, GPU_MEMORY_COPY_UTILIZATION_RATIO}),
        ("nvmlDeviceGetEncoderUtilization", {GPU_ENCODER_UTILIZATION_RATIO}),
        ("nvmlDeviceGetTemperatureV", set()),
        ("nvmlDeviceGetTemperature", set()),
        ("nvmlDeviceGetMarginTemperature", {GPU_TEMPERATURE_MARGIN_CELSIUS}),
        ("nvmlDeviceGetPowerUsage", {GPU_POWER_WATTS}),
        ("nvmlDeviceGetEnforcedPowerLimit", {GPU_POWER_LIMIT_WATTS}),
        (
            "nvmlDeviceGetClockInfo",
            {GPU_GRAPHICS_CLOCK_HERTZ, GPU_SM_CLOCK_HERTZ, GPU_MEMORY_CLOCK_HERTZ, GPU_VIDEO_CLOCK_HERTZ},
        ),
        ("nvmlDeviceGetMaxClockInfo", {GPU_SM_CLOCK_MAX_HERTZ, GPU_MEMORY_CLOCK_MAX_HERTZ, GPU_VIDEO_CLOCK_MAX_HERTZ}),
        ("nvmlDeviceGetSramEccErrorStatus", {GPU_SRAM_ERROR_THRESHOLD_EXCEEDED}),
        ("nvmlDeviceGetRowRemapperHistogram", {GPU_ROW_REMAP_BANKS}),
        ("nvmlDeviceGetRepairStatus", {GPU_REPAIR_PENDING}),
        ("nvmlDeviceGetGpuFabricInfoV", FABRIC),
        ("nvmlDeviceGetMigMode", {GPU_MIG_MODE}),
        ("nvmlDeviceGetEccMode", {GPU_ECC_MODE}),
        ("nvmlDeviceGetComputeRunningProcesses_v3", {GPU_PROCESSES, GPU_PROCESS_MEMORY_BYTES}),
        ("nvmlDeviceGetSerial", set()),
    ],
)
def test_a_call_a_gpu_does_not_support_costs_its_own_values_on_that_gpu_and_nothing_else(
    node: SimulatedNode, collector: Callable[..., Nvml], call: str, lost: set[Metric]
) -> None:
    every = rows(collector().read(), "0")
    node.fail(call, pynvml.NVML_ERROR_NOT_SUPPORTED, 2)
    driver = collector()
    for samples in (driver.read(), driver.read()):
        # Without the cumulative fields the first GPM sample has no traffic yet.
        assert rows(samples, "2") == every - lost
        assert all(rows(samples, gpu) == every for gpu in "0134567")


def test_pynvml_has_every_call_that_is_read() -> None:
    # A misspelled call would look like a driver without it: no sample and no error.
    calls = {name for read in READS for name in (read.name, *read.needs)}
    assert {name for name in calls if not hasattr(pynvml, name)} == set()


def test_the_series_of_an_h100_stay_within_what_the_budget_leaves_to_nvml(
    collector: Callable[..., Nvml], clock: Clock, node: SimulatedNode
) -> None:
    driver = collector()
    for _ in range(3):
        samples = driver.read()
        clock.now += 15
        node.tick(1_700_000_000 + clock.now)
    assert set(Counter(labels[:2] for row, labels, _ in samples if row.labels[:2] == GPU).values()) == {90}
    assert len({(row, labels) for row, labels, _ in samples}) == len(samples)


def test_what_a_gpu_does_not_have_is_asked_for_once_and_the_costly_now_and_then(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    library = Simulation(node.root)
    library.nvmlDeviceGetPcieThroughput = lambda *_: pytest.fail("it blocks for 40 ms")  # type: ignore[attr-defined]
    driver = collector(library)

    def calls(seconds: float) -> int:
        clock.now += seconds
        before = library.calls
        driver.read()
        return library.calls - before

    first, second, soon, late, soon_again = calls(0), calls(1), calls(1), calls(8), calls(1)
    assert (soon, late, soon_again) == (1 + 8 * 12, 1 + 8 * 30, 1 + 8 * 12)
    assert (first - late, second - soon) == (1 + 8 * 23, 8), (
        "facts, identity, sums over links, two that it lacks; memory for the second sample"
    )


def test_a_call_that_failed_for_no_lasting_reason_is_made_again_at_once(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    driver = collector()
    node.fail("nvmlDeviceGetEccMode", pynvml.NVML_ERROR_TIMEOUT)
    assert of(driver.read(), GPU_ECC_MODE) == {}
    node.fail("nvmlDeviceGetEccMode", 0)
    assert of(driver.read(), GPU_ECC_MODE) == {(): 1}


def test_a_field_that_failed_for_no_lasting_reason_is_read_again_at_once(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    library = Fields(node.root, errors={(144, 0): pynvml.NVML_ERROR_UNKNOWN, (5, 0): pynvml.NVML_ERROR_NOT_SUPPORTED})
    driver = collector(library)
    lacking = rows(driver.read(), "0")
    library.errors = {}
    names = {str(row) for row in rows(driver.read(), "0") - lacking}
    assert names == {"gpu_row_remap_pending"}, "and field 5 is not asked for again"


def test_an_older_driver_counts_clock_events_by_other_reasons(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    library = Fields(
        node.root,
        {(75, 0): 5, (77, 0): 6, (78, 0): 7, (79, 0): 8},
        dict.fromkeys(((269, 0), (270, 0), (271, 0)), pynvml.NVML_ERROR_INVALID_ARGUMENT),
    )
    driver = collector(library)
    for _ in range(2):
        assert of(driver.read(), GPU_CLOCK_EVENT_SECONDS_TOTAL) == {
            ("sw_power_cap",): 0,
            ("sync_boost",): 0,
            ("thermal",): 5,
            ("board_limit",): 6,
            ("low_utilization",): 7,
            ("reliability",): 8,
        }


def test_before_ada_the_limits_are_temperatures(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    errors = dict.fromkeys(((193, 0), (194, 0), (195, 0), (196, 0)), pynvml.NVML_ERROR_NOT_SUPPORTED)
    library = Fields(node.root, errors=errors)

    def threshold(handle: Handle, kind: int) -> int:
        if kind == pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 85 + kind

    library.nvmlDeviceGetTemperatureThreshold = threshold  # type: ignore[attr-defined]
    samples = collector(library).read()
    assert of(samples, GPU_TEMPERATURE_LIMIT_CELSIUS) == {("shutdown",): 85, ("slowdown",): 86, ("gpu_max",): 88}
    assert of(samples, GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS) == {}


def test_traffic_is_counted_from_activity_samples_where_the_card_has_no_byte_counters(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    keys = [(138, ALL_LINKS), (139, ALL_LINKS), (140, ALL_LINKS), (141, ALL_LINKS)]
    driver = collector(Fields(node.root, errors=dict.fromkeys(keys, pynvml.NVML_ERROR_NOT_SUPPORTED)))
    assert of(driver.read(), GPU_PCIE_TRANSMIT_BYTES_TOTAL) == {}
    clock.now += 10
    node.load(0, 1)
    node.tick(1_700_000_010)
    samples = driver.read()
    assert of(samples, GPU_PCIE_TRANSMIT_BYTES_TOTAL)[()] == pytest.approx(10 * 0.35 * 50e9, rel=0.05)
    assert of(samples, NVLINK_RECEIVE_BYTES_TOTAL)[()] == pytest.approx(10 * 0.3 * 18 * 26.562e9, rel=0.05)
    assert of(samples, NVLINK_RECEIVE_RAW_BYTES_TOTAL) == {}


def test_an_nvlink_5_gpu_sums_its_links_and_has_no_more_series_than_the_budget_leaves(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    class Blackwell(Simulation):
        def link_numbers(self, handle: Handle, busy: float, faults: Any) -> dict[Key, int]:
            numbers = {(91, 0): 18}
            for link in range(18):
                numbers |= {(165, link): 1, (164, link): 53125, (166, link): 7, (202, link): 10, (204, link): 20}
                numbers |= {(field, link): 0 for field in (*range(206, 216), 219, 221)}
                numbers |= {(220, link): 0x0FFF, (222, link): 0x0FFF}
            return numbers | {(221, 4): 3, (220, 4): 0x010C}

    driver = collector(Blackwell(node.root))
    driver.read()
    clock.now += 15
    node.tick(1_700_000_015)
    samples = driver.read()
    links = {
        ":".join((str(row), *extra)): value
        for (row, extra), value in series(samples, "0").items()
        if str(row).startswith("nvlink")
    }
    errors = (
        "malformed_packet",
        "buffer_overrun",
        "receive",
        "remote",
        "general",
        "local_integrity",
        "transmit_discard",
        "recovery",
        "recovery_failed",
        "effective",
    )
    assert links == {
        "nvlink_links:active": 18,
        "nvlink_links:inactive": 0,
        "nvlink_info:5.0": 1,
        "nvlink_speed_bytes_per_second": 53125,
        "nvlink_transmit_bytes_total": 180,
        "nvlink_receive_bytes_total": 360,
        **{f"nvlink_errors_total:{error}": 0 for error in errors},
        "nvlink_errors_total:symbol": 3,
        "nvlink_link_errors_total:4:symbol": 3,
        "nvlink_effective_bit_error_ratio": 1e-12,
        "nvlink_symbol_bit_error_ratio": 0,
    }
    assert len(series(samples, "0")) + 1 <= 100


def test_an_a100_counts_link_errors_per_gpu_and_has_no_activity(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    class Ampere(Simulation):
        def link_numbers(self, handle: Handle, busy: float, faults: Any) -> dict[Key, int]:
            return {(91, 0): 12, (38, 0): 1, (45, 0): 2, (52, 0): 3, (59, 0): 4, (90, 0): 25781}

        def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int:
            return int(link != 3)

        def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> Any:
            return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=0)

    driver = collector(Ampere(node.root))
    driver.read()
    samples = driver.read()
    links = {
        ":".join((str(row), *extra)): value
        for (row, extra), value in series(samples, "0").items()
        if str(row).startswith("nvlink")
    }
    assert links == {
        "nvlink_links:inactive": 1,
        "nvlink_links:active": 11,
        "nvlink_speed_bytes_per_second": 25781,
        "nvlink_errors_total:replay": 3,
        "nvlink_errors_total:recovery": 4,
        "nvlink_errors_total:crc": 1,
        "nvlink_errors_total:crc_data": 2,
    }
    assert not rows(samples, "0") & {GPU_PROFILED_SECONDS_TOTAL, GPU_SM_ACTIVE_SECONDS_TOTAL}


def test_a_release_of_pynvml_without_a_function_or_structure_is_a_driver_without_it(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    every = rows(collector().read(), "0")
    old = Without(
        Simulation(node.root),
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetRepairStatus",
        "c_nvmlGpuFabricInfo_v3_t",
        "c_nvmlGpuFabricInfo_v2_t",
        "nvmlDeviceGetModuleId",
    )
    samples = collector(old).read()
    assert rows(samples, "0") == every - {GPU_REPAIR_PENDING} - FABRIC
    assert next(labels[GPU_INFO.labels.index("module_id")] for row, labels, _ in samples if row is GPU_INFO) == ""


def test_the_fabrics_health_is_left_out_by_a_driver_that_has_only_the_older_structure(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    library = Simulation(node.root)
    works = library.nvmlDeviceGetGpuFabricInfoV

    def version_2(handle: Handle, info: Any) -> Any:
        if info._obj.version != pynvml.nvmlGpuFabricInfo_v2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        return works(handle, info)

    library.nvmlDeviceGetGpuFabricInfoV = version_2  # type: ignore[method-assign]
    samples = collector(library).read()
    assert of(samples, GPU_FABRIC_INFO) == {("00000000-0000-0000-0000-000000000000", "0"): 1}
    assert of(samples, GPU_FABRIC_STATE_ID) == {(): 3}
    assert of(samples, GPU_FABRIC_HEALTH_ID) == {}


@pytest.mark.parametrize(
    ("state", "expected"), [(0, set()), (2, {GPU_FABRIC_STATE_ID}), (0xAB03, {*FABRIC, GPU_FABRIC_FAULT})]
)
def test_the_fabric_reports_more_once_it_is_completed_and_padding_is_no_state(
    node: SimulatedNode, collector: Callable[..., Nvml], state: int, expected: set[Metric]
) -> None:
    library = Simulation(node.root)

    def answer(handle: Handle, info: Any) -> int:
        info._obj.state, info._obj.healthMask, info._obj.healthSummary = state, 0b01, 2
        return 0

    library.nvmlDeviceGetGpuFabricInfoV = answer  # type: ignore[method-assign]
    samples = collector(library).read()
    assert rows(samples, "0") & {*FABRIC, GPU_FABRIC_FAULT} == expected
    if expected == {*FABRIC, GPU_FABRIC_FAULT}:
        assert of(samples, GPU_FABRIC_STATE_ID) == {(): 3}
        assert of(samples, GPU_FABRIC_FAULT) == {("degraded_bandwidth",): 1}


def test_processes_are_counted_by_owner_and_the_ninth_owner_is_other(
    node: SimulatedNode, collector: Callable[..., Nvml], tmp_path: Path
) -> None:
    library = Simulation(node.root)
    processes = [(pid, 1000 * pid) for pid in (*range(1, 12), 21)]
    library.nvmlDeviceGetComputeRunningProcesses_v3 = lambda handle: [  # type: ignore[method-assign]
        pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": memory if handle.index == 0 else None})
        for pid, memory in processes
    ]
    for pid, _ in processes:
        folder = node.root / "proc" / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{pid % 20}/step_0\n")
    samples = collector(library).read()
    assert of(samples, GPU_PROCESSES) == {
        ("slurm:1",): 2,
        **{(f"slurm:{job}",): 1 for job in range(5, 12)},
        ("other",): 3,
    }
    assert of(samples, GPU_PROCESS_MEMORY_BYTES) == {
        ("slurm:1",): 22000,
        **{(f"slurm:{job}",): 1000 * job for job in range(5, 12)},
        ("other",): 9000,
    }
    assert sum(of(samples, GPU_PROCESSES, "1").values()) == 12
    assert of(samples, GPU_PROCESS_MEMORY_BYTES, "1") == {}
    assert json.loads((tmp_path / "gpu_runtime.json").read_text())[node.uuid(0)] == {
        "mig": [],
        "pids": sorted(pid for pid, _ in processes),
        "links": list(range(18)),
    }


def test_the_place_of_memory_errors_is_asked_for_only_once_there_are_any(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Simulation(node.root)
    works = library.nvmlDeviceGetMemoryErrorCounter
    asked: list[tuple[int, int, int]] = []

    def noted(handle: Handle, *question: int) -> int:
        asked.append((handle.index, question[0], question[2]))
        return works(handle, *question)

    monkeypatch.setattr(library, "nvmlDeviceGetMemoryErrorCounter", noted)
    driver = collector(library)
    driver.read()
    assert asked == []
    node.ecc(3, uncorrected=2)
    clock.now += 10
    assert of(driver.read(), GPU_ECC_LOCATION_ERRORS_TOTAL, "3") == {("uncorrected", "dram"): 2}
    assert asked == [(3, 1, location) for location in range(8)]
    clock.now += 10
    driver.read()
    assert asked[8:] == [(3, 1, pynvml.NVML_MEMORY_LOCATION_DRAM), (3, 1, pynvml.NVML_MEMORY_LOCATION_SRAM)]


FIELD_ERRORS = [error for error in ERRORS if error not in (*GONE, 1, 18)]


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    errors=st.dictionaries(
        st.sampled_from([field.key for field in (*FAST, *SLOW)]), st.sampled_from(FIELD_ERRORS), max_size=12
    )
)
def test_no_combination_of_field_errors_removes_another_field(
    node: SimulatedNode, collector: Callable[..., Nvml], errors: dict[Key, int]
) -> None:
    numbers = {field.key: 1 for field in (*FAST, *SLOW) if field.instead_of is None}
    expected = {
        (field.row, field.labels) for field in (*FAST, *SLOW) if field.instead_of is None and field.key not in errors
    }
    others = {field.row for field in (*FAST, *SLOW)}
    driver = collector(Fields(node.root, numbers, errors))
    for _ in range(2):
        seen = {key for key in series(driver.read(), "0") if key[0] in others}
        # Calls and GPM stand in for some fields.
        stood_in = {
            GPU_ENERGY_JOULES_TOTAL,
            GPU_PCIE_TRANSMIT_BYTES_TOTAL,
            GPU_PCIE_RECEIVE_BYTES_TOTAL,
            NVLINK_TRANSMIT_BYTES_TOTAL,
            NVLINK_RECEIVE_BYTES_TOTAL,
        }
        remap = {key for key in seen if str(key[0]).startswith(("gpu_remapped", "gpu_row_remap"))}
        assert expected <= seen
        assert {key for key in seen - expected - remap if key[0] not in stood_in} == set()


# The fault matrix: every error, in a call, about a GPU, at the start.


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_in_one_call_about_one_gpu(node: SimulatedNode, collector: Callable[..., Nvml], code: int) -> None:
    driver = collector()
    whole = driver.read()
    node.fail("nvmlDeviceGetPowerUsage", code, 2)
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        with pytest.raises(RestartReader):
            driver.read()
        return
    if code == pynvml.NVML_ERROR_UNINITIALIZED:
        with pytest.raises(pynvml.NVMLError):
            driver.read()
        return
    samples = driver.read()
    if code in GONE:
        assert series(samples, "2") == {(GPU_PRESENT, ()): 0}
    else:
        assert series(whole, "2").keys() - series(samples, "2").keys() == {(GPU_POWER_WATTS, ())}
    assert all(series(samples, gpu) == series(whole, gpu) for gpu in "0134567")
    node.fail("nvmlDeviceGetPowerUsage", 0, 2)
    back = (GPU_POWER_WATTS, ()) in series(driver.read(), "2")
    assert back == (code not in LACKING), "what a card lacks is not asked for again"


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("known", [True, False])
def test_an_error_in_every_call_about_one_gpu(
    node: SimulatedNode, collector: Callable[..., Nvml], code: int, known: bool
) -> None:
    if known:
        collector().read()
    node.fail("nvmlDeviceGetHandleByIndex", code, 2)
    driver = collector()
    if code in (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_UNINITIALIZED):
        with pytest.raises((RestartReader, pynvml.NVMLError)):
            driver.read()
        return
    samples = driver.read()
    labels = ("2", node.uuid(2) if known else "")
    answers = [sample for sample in samples if sample[1][:1] == ("2",) and sample[0] is not GPU_INFO]
    assert answers == [(GPU_PRESENT, labels, 0)]
    assert len(of(samples, GPU_INFO, "2")) == known
    assert present(samples) == ALL | {"2": 0}
    assert readable(samples) == {gpu: 1 for gpu in ALL if gpu != "2"}


@pytest.mark.parametrize("code", ERRORS)
def test_a_gpu_with_an_error_in_every_call_is_missed_while_others_answer(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, code: int
) -> None:
    driver = collector()
    driver.read()
    node.refuse(2, code)
    if code in (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_UNINITIALIZED):
        with pytest.raises((RestartReader, pynvml.NVMLError)):
            driver.read()
        return
    for _ in range(4):
        samples = driver.read()
        assert series(samples, "2") == {(GPU_PRESENT, ()): 0}
        assert present(samples) == ALL | {"2": 0}
        clock.now += 10
    node.clear()
    clock.now += 60
    assert len(series(driver.read(), "2")) > 80


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("known", [True, False])
def test_an_error_when_nvml_is_initialised(
    node: SimulatedNode, collector: Callable[..., Nvml], code: int, known: bool
) -> None:
    if known:
        collector().read()
    node.fail("nvmlInit", code)
    driver = collector()
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED and known:
        samples = driver.read()
        assert [sample for sample in samples if sample[0] is not GPU_INFO] == [
            *((GPU_READABLE, (gpu, node.uuid(int(gpu))), 0) for gpu in ALL),
            (GPU_DRIVER_LOADED, (), 0),
        ]
        assert len(samples) == 17
        return
    expected: type[Exception] = AccessLost
    if code in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND) and not known:
        expected = Unsupported
    elif code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        expected = RestartReader
    elif code == pynvml.NVML_ERROR_UNINITIALIZED:
        expected = pynvml.NVMLError
    with pytest.raises(expected) as raised:
        driver.read()
    if isinstance(raised.value, AccessLost):
        samples = raised.value.samples
        assert readable(samples) == (dict.fromkeys(ALL, 0) if known else {})
        assert {row for row, _, _ in samples} == ({GPU_INFO, GPU_READABLE} if known else set())
    driver.close()


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND])
@pytest.mark.parametrize("known", [True, False])
def test_a_driver_that_the_kernel_has_and_nvml_misses_is_withheld_from_this_process(
    node: SimulatedNode, collector: Callable[..., Nvml], code: int, known: bool
) -> None:
    if known:
        collector().read()
    (node.root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64  590.48.01\n")
    node.fail("nvmlInit", code)
    with pytest.raises(AccessLost) as raised:
        collector().read()
    assert readable(raised.value.samples) == (dict.fromkeys(ALL, 0) if known else {})
    assert GPU_DRIVER_LOADED not in {row for row, _, _ in raised.value.samples}


@pytest.mark.parametrize("code", sorted({*ERRORS} - {*GONE, 1, 18}))
@pytest.mark.parametrize("before", [True, False])
def test_an_exporter_that_may_look_at_no_gpu_is_blind_and_calls_none_missing(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, code: int, before: bool
) -> None:
    driver = collector()
    if before:
        driver.read()
    for gpu in range(8):
        node.refuse(gpu, code)
    for _ in range(5):
        with pytest.raises(AccessLost) as raised:
            driver.read()
        samples = raised.value.samples
        assert (present(samples), readable(samples)) == ({}, dict.fromkeys(ALL, 0))
        assert len(of(samples, GPU_INFO, "7")) == before
        clock.now += 10
    node.clear()
    clock.now += 240
    samples = driver.read()
    assert (present(samples), readable(samples)) == (ALL, ALL)


def test_unreadable_and_lost_gpus_are_distinguished(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    driver = collector()
    driver.read()
    node.lose(0)
    for gpu in range(1, 8):
        node.refuse(gpu, 17)
    samples = driver.read()
    assert present(samples) == {"0": 0}
    assert readable(samples) == dict.fromkeys("1234567", 0)


@pytest.mark.parametrize("code", BLIND)
@pytest.mark.parametrize("before", [True, False])
def test_a_gpu_whose_device_file_is_kept_from_the_exporter_is_unreadable_and_not_missing(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, code: int, before: bool
) -> None:
    driver = collector()
    driver.read()
    node.blind(2, code)
    driver = driver if before else collector()
    samples = driver.read()
    assert series(samples, "2") == {(GPU_READABLE, ()): 0}
    assert present(samples) == {gpu: 1 for gpu in ALL if gpu != "2"}
    assert len(of(samples, GPU_INFO, "2")) == 1
    node.clear()
    clock.now += 60
    assert len(series(driver.read(), "2")) > 80


@pytest.mark.parametrize(("withheld", "expected"), [(True, {(GPU_READABLE, ()): 0}), (False, {(GPU_PRESENT, ()): 0})])
def test_a_gpu_that_nvml_does_not_even_count_is_unreadable_only_without_its_device_file(
    node: SimulatedNode,
    collector: Callable[..., Nvml],
    clock: Clock,
    withheld: bool,
    expected: dict[tuple[Metric, tuple[str, ...]], float],
) -> None:
    collector().read()
    library = Simulation(node.root)
    library.nvmlDeviceGetCount = lambda: 7  # type: ignore[attr-defined]
    if withheld:
        node.blind(7)
    driver = collector(library)
    samples = driver.read()
    assert series(samples, "7") == expected
    assert present(samples) == dict.fromkeys("0123456", 1) | ({} if withheld else {"7": 0})
    node.clear()
    del library.nvmlDeviceGetCount
    clock.now += 15
    assert present(driver.read()) == ALL, "it is looked for again"


def test_a_node_whose_gpus_have_all_lost_their_device_files_is_blind(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    collector().read()
    library = Simulation(node.root)
    library.nvmlDeviceGetCount = lambda: 0  # type: ignore[attr-defined]
    for gpu in range(8):
        node.blind(gpu)
    with pytest.raises(AccessLost, match="no GPU's device file can be opened") as raised:
        collector(library).read()
    assert readable(raised.value.samples) == dict.fromkeys(ALL, 0)


# One answer that pynvml does not expect.


def undecodable(handle: object = None) -> str:
    return b"692-2G520\xff".decode()


def test_a_text_that_is_not_utf_8_is_an_empty_label_and_is_logged_once(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    library = Simulation(node.root)
    vars(library)["nvmlDeviceGetBoardPartNumber"] = undecodable
    driver = collector(library)
    for _ in range(2):
        samples = driver.read()
        assert present(samples) == ALL
        place = GPU_INFO.labels.index("board_part_number")
        assert {labels[place] for row, labels, _ in samples if row is GPU_INFO} == {""}
        driver.close()
    assert [record.getMessage() for record in caplog.records] == ["board_part_number cannot be read"]


def test_a_call_that_pynvml_stumbles_over_costs_its_own_values(
    node: SimulatedNode, collector: Callable[..., Nvml], caplog: pytest.LogCaptureFixture
) -> None:
    whole = collector().read()
    library = Simulation(node.root)
    vars(library)["nvmlDeviceGetPowerUsage"] = lambda handle: [][handle.index]
    driver = collector(library)
    for _ in range(2):
        samples = driver.read()
        assert all(rows(whole, gpu) - rows(samples, gpu) == {GPU_POWER_WATTS} for gpu in ALL)
    assert [record.getMessage() for record in caplog.records] == ["nvmlDeviceGetPowerUsage cannot be read"]


def test_a_gpu_that_pynvml_cannot_name_costs_no_other_and_is_not_called_missing(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    collector().read()
    library = Simulation(node.root)
    works = library.nvmlDeviceGetUUID
    library.nvmlDeviceGetUUID = (  # type: ignore[method-assign]
        lambda handle: undecodable() if handle.index == 4 else works(handle)
    )
    samples = collector(library).read()
    assert present(samples) == {gpu: 1 for gpu in ALL if gpu != "4"}
    assert readable(samples) == ALL | {"4": 0}


@pytest.mark.parametrize("code", GONE)
@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode"])
def test_a_gpu_may_turn_out_to_be_gone_in_any_call(
    node: SimulatedNode, collector: Callable[..., Nvml], call: str, code: int
) -> None:
    collector().read()
    node.fail(call, code, 6)
    samples = collector().read()
    assert present(samples) == ALL | {"6": 0}
    assert rows(samples, "6") == {GPU_INFO, GPU_PRESENT}


@pytest.mark.parametrize("code", GONE)
def test_a_gpu_may_turn_out_to_be_gone_in_one_field(
    node: SimulatedNode, collector: Callable[..., Nvml], code: int
) -> None:
    library = Fields(node.root)
    driver = collector(library)
    driver.read()
    library.errors = {(143, 0): code, (138, ALL_LINKS): code}
    assert present(driver.read()) == dict.fromkeys("01234567", 0)


# Losing GPUs and getting them back.


def test_a_lost_gpu_is_0_with_its_identity_the_others_go_on_and_it_returns_once_nvml_is_initialised_again(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    driver = collector()
    whole = driver.read()
    assert present(whole) == ALL
    node.lose(3)
    samples = driver.read()
    assert present(samples) == ALL | {"3": 0}
    assert [sample for sample in samples if sample[1][:1] == ("3",)] == [
        (
            GPU_INFO,
            (
                "3",
                node.uuid(3),
                "node1",
                "NVIDIA H100 80GB HBM3",
                "00000000:86:00.0",
                "1650124010003",
                "692-2G520-0200-000",
                "4",
                "0",
                "590.48.01",
                "96.00.A5.00.01",
                "G520.0200.00.05",
                "nvml",
            ),
            1,
        ),
        (GPU_PRESENT, ("3", node.uuid(3)), 0),
    ]
    assert all(series(samples, gpu).keys() == series(whole, gpu).keys() for gpu in "0124567")
    node.clear()
    clock.now += 14
    assert present(driver.read())["3"] == 0, "the driver remembers a lost GPU"
    clock.now += 1
    samples = driver.read()
    assert series(samples, "3").keys() == series(whole, "3").keys()


def test_nvml_is_not_initialised_at_every_scrape_while_a_gpu_stays_lost(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Simulation(node.root)
    initialise = library.nvmlInit
    at: list[float] = []

    def noted() -> None:
        at.append(clock.now)
        initialise()

    monkeypatch.setattr(library, "nvmlInit", noted)
    driver = collector(library)
    node.lose(3)
    for second in range(0, 1000, 5):
        clock.now = second
        node.tick(1_700_000_000 + second)
        samples = driver.read()
    assert at == [0, 15, 45, 105, 225, 465, 705, 945]
    assert of(samples, GPU_PROFILED_SECONDS_TOTAL) == {(): 995}, "and that costs no second of activity"
    assert len(library.gpm_samples) == 14


def test_a_gpu_lost_before_the_exporter_started_is_missed_because_of_the_inventory(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    collector().read()
    node.lose(5)
    samples = collector().read()
    assert present(samples) == ALL | {"5": 0}
    assert rows(samples, "5") == {GPU_INFO, GPU_PRESENT}


def test_a_gpu_that_was_reset_comes_back_under_another_index_with_its_counters(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    driver = collector()
    driver.read()
    node.ecc(2, corrected=5)
    clock.now += 10
    node.tick(1_700_000_010)
    driver.read()
    node.reset(2, index=7)
    samples = driver.read()
    assert present(samples) == ALL | {"2": 0}
    clock.now += 15
    node.tick(1_700_000_025)
    samples = driver.read()
    uuids = {labels[0]: labels[1] for row, labels, _ in samples if row is GPU_PRESENT}
    assert uuids == {str(index): node.uuid(gpu) for index, gpu in enumerate((0, 1, 3, 4, 5, 6, 7, 2))}
    assert present(samples) == ALL
    assert of(samples, GPU_ECC_ERRORS_TOTAL, "7") == {("corrected",): 0, ("uncorrected",): 0}
    assert of(samples, GPU_ECC_LIFETIME_ERRORS_TOTAL, "7") == {("corrected",): 5, ("uncorrected",): 0}
    assert of(samples, GPU_PROFILED_SECONDS_TOTAL, "7") == {(): 10}, "what was counted up goes on"
    assert of(samples, GPU_PROFILED_SECONDS_TOTAL, "0") == {(): 25}
    assert len({(row, labels) for row, labels, _ in samples}) == len(samples)


def test_a_lost_gpu_whose_index_another_one_takes_is_one_gpu_under_the_index_that_stays_silent(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    driver = collector()
    driver.read()
    node.lose(5)
    driver.read()
    node.reset(3, index=7)
    for _ in range(3):
        clock.now += 60
        node.tick(1_700_000_000 + clock.now)
        samples = driver.read()
    expected = {(str(index), node.uuid(gpu)): float(gpu != 5) for index, gpu in enumerate((0, 1, 2, 4, 5, 6, 7, 3))}
    assert {labels: value for row, labels, value in samples if row is GPU_PRESENT} == expected
    assert {labels[:2] for row, labels, _ in samples if row is GPU_INFO} == expected.keys()


def test_a_driver_replaced_under_the_process_asks_for_a_new_process_which_reads_on(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    driver = collector()
    before = driver.read()
    node.driver("595.80")
    with pytest.raises(RestartReader):
        driver.read()
    driver.close()
    after = collector().read()
    versions = {labels[GPU_INFO.labels.index("driver_version")] for row, labels, _ in after if row is GPU_INFO}
    assert versions == {"595.80"}
    assert all(series(after, gpu) == series(before, gpu) for gpu in "01234567")


def test_after_a_driver_reload_the_handles_are_resolved_again(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    library = Simulation(node.root)
    driver = collector(library)
    driver.read()
    library.initialized = False  # what a reload does to the session
    with pytest.raises(pynvml.NVMLError):
        driver.read()
    clock.now += 15
    assert present(driver.read()) == ALL


def test_a_mig_toggle_between_two_reads_swaps_the_whole_gpus_series_for_the_instances_and_back(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, tmp_path: Path
) -> None:
    def read(seconds: int) -> list[Sample]:
        clock.now += seconds
        node.tick(1_700_000_000 + clock.now)
        return driver.read()

    driver = collector()
    driver.read()
    whole = series(read(10), "4")
    node.mig(4, "on", "1g.10gb")
    split = series(read(10), "4")
    gone = {str(row) for row, _ in whole.keys() - split.keys()}
    assert gone == {
        *map(str, FABRIC),
        "nvlink_links",
        "nvlink_info",
        "nvlink_speed_bytes_per_second",
        "nvlink_errors_total",
        "gpu_utilization_ratio",
        "gpu_memory_copy_utilization_ratio",
        "gpu_encoder_utilization_ratio",
        "gpu_decoder_utilization_ratio",
        "gpu_profiled_seconds_total",
        "gpu_graphics_active_seconds_total",
        "gpu_sm_active_seconds_total",
        "gpu_sm_occupancy_seconds_total",
        "gpu_tensor_active_seconds_total",
        "gpu_dram_active_seconds_total",
        "gpu_pipe_active_seconds_total",
        "gpu_pcie_transmit_bytes_total",
        "gpu_pcie_receive_bytes_total",
        "gpu_remapped_rows_total",
        "gpu_row_remap_pending",
        "gpu_row_remap_failure",
        "gpu_row_remap_banks",
    }
    instances = [str(instance) for instance in range(7, 14)]
    assert Counter(row for row, _ in split.keys() - whole.keys()) == {
        GPU_MIG_INFO: 7,
        GPU_MIG_MEMORY_USED_BYTES: 7,
        GPU_MIG_MEMORY_TOTAL_BYTES: 7,
        GPU_MIG_PROFILED_SECONDS_TOTAL: 7,
        **dict.fromkeys((row for row, _ in split if "_mig_" in str(row) and "active" in str(row)), 7),
    }
    assert split[GPU_MIG_INFO, ("7", "0", "MIG-51a70000-0000-4000-8004-000000000000", "1g.10gb")] == 1
    runtime = json.loads((tmp_path / "gpu_runtime.json").read_text())[node.uuid(4)]
    assert [entry["gpu_instance"] for entry in runtime["mig"]] == instances
    assert runtime["mig"][0] == {
        "uuid": "MIG-51a70000-0000-4000-8004-000000000000",
        "gpu_instance": "7",
        "compute_instance": "0",
        "profile": "1g.10gb",
    }
    assert {
        key[1]: value for key, value in series(read(10), "4").items() if key[0] is GPU_MIG_PROFILED_SECONDS_TOTAL
    } == {(instance,): 10 for instance in instances}
    node.mig(4, "off")
    again = series(read(10), "4")
    assert again.keys() == whole.keys()
    assert again[GPU_PROFILED_SECONDS_TOTAL, ()] == whole[GPU_PROFILED_SECONDS_TOTAL, ()]
    assert series(read(10), "4")[GPU_PROFILED_SECONDS_TOTAL, ()] == whole[GPU_PROFILED_SECONDS_TOTAL, ()] + 10
    assert json.loads((tmp_path / "gpu_runtime.json").read_text())[node.uuid(4)]["mig"] == []


def test_the_end_gives_every_buffer_and_the_session_back(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    library = Simulation(node.root)
    driver = collector(library)
    node.mig(1, "on")
    driver.read()
    assert (library.initialized, len(library.gpm_samples)) == (True, 7 + 7)
    driver.close()
    assert (library.initialized, library.gpm_samples) == (False, {})
    assert present(driver.read()) == ALL, "and a later read starts again"


# What is remembered.


@pytest.mark.parametrize("new", [True, False])
def test_only_a_gpu_new_to_the_node_replaces_the_one_that_was_in_its_slot(
    node: SimulatedNode, collector: Callable[..., Nvml], tmp_path: Path, new: bool
) -> None:
    inventory = tmp_path / "gpus.json"
    collector().read()
    parts = json.loads(inventory.read_text())
    parts["GPU-old"] = parts[node.uuid(2)] | {"uuid": "GPU-old"}
    if new:
        del parts[node.uuid(2)]
    inventory.write_text(json.dumps(parts))
    samples = collector().read()
    answers = {labels[1]: value for row, labels, value in samples if row is GPU_PRESENT and labels[0] == "2"}
    assert answers == {node.uuid(2): 1} | ({} if new else {"GPU-old": 0})


def test_a_missing_gpu_of_an_inventory_written_before_labels_were_added_keeps_its_identity(
    node: SimulatedNode, collector: Callable[..., Nvml], tmp_path: Path
) -> None:
    collector().read()
    parts = json.loads((tmp_path / "gpus.json").read_text())
    for part in parts.values():
        for label in ("board_part_number", "module_id", "numa_node", "inforom_version"):
            del part[label]
    (tmp_path / "gpus.json").write_text(json.dumps(parts))
    node.lose(3)
    infos = {labels[0]: labels for row, labels, _ in collector().read() if row is GPU_INFO}
    assert infos["3"] == (
        "3",
        node.uuid(3),
        "node1",
        "NVIDIA H100 80GB HBM3",
        "00000000:86:00.0",
        "1650124010003",
        "",
        "",
        "",
        "590.48.01",
        "96.00.A5.00.01",
        "",
        "nvml",
    )
    assert infos["4"][6:9] == ("692-2G520-0200-000", "5", "1")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"GPU-1": 1}', '{"GPU-1": {"gpu": "0"}}'])
def test_an_unreadable_inventory_is_forgotten(collector: Callable[..., Nvml], tmp_path: Path, content: str) -> None:
    (tmp_path / "gpus.json").write_text(content)
    assert present(collector().read()) == ALL
    assert len(json.loads((tmp_path / "gpus.json").read_text())) == 8


def test_a_label_that_cannot_be_read_for_a_while_is_as_remembered(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    before = {labels for row, labels, _ in collector().read() if row is GPU_INFO}
    node.fail("nvmlDeviceGetSerial", pynvml.NVML_ERROR_UNKNOWN, 3)
    assert {labels for row, labels, _ in collector().read() if row is GPU_INFO} == before


def test_a_disk_that_takes_nothing_costs_no_reading(node: SimulatedNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = tmp_path / "file"
    driver = Nvml(Simulation(node.root), "node1", state / "gpus.json", runtime=state / "gpu_runtime.json")
    driver.read()
    node.lose(0)
    assert present(driver.read())["0"] == 0


@pytest.mark.parametrize(("content", "expected"), [("1\n", "1"), ("-1\n", ""), ("", ""), (None, "")])
def test_the_numa_node_is_that_of_the_pci_device(tmp_path: Path, content: str | None, expected: str) -> None:
    device = tmp_path / "bus/pci/devices/0000:ca:00.0"
    device.mkdir(parents=True)
    if content is not None:
        (device / "numa_node").write_text(content)
    assert numa_node(tmp_path, "00000000:CA:00.0") == expected


def test_the_simulated_nodes_collector_reads_the_nodes_own_files(node: SimulatedNode, tmp_path: Path) -> None:
    collector = simulated(
        root=str(node.root),
        host="node1",
        inventory=str(tmp_path / "gpus.json"),
        runtime=str(tmp_path / "gpu_runtime.json"),
        sysfs=str(node.sysfs),
    )
    samples = collector.read()
    assert of(samples, GPU_PROCESSES) == {("slurm:4242",): 1}
    assert {labels[-1] for row, labels, _ in samples if row is GPU_INFO} == {"simulated"}
    assert json.loads((tmp_path / "gpu_runtime.json").read_text())[node.uuid(7)] == {
        "mig": [],
        "pids": [4718],
        "links": list(range(18)),
    }
    assert readable(samples) == ALL


def test_the_last_processes_of_a_lost_gpu_are_kept_until_the_inventory_forgets_it(
    node: SimulatedNode, collector: Callable[..., Nvml], tmp_path: Path
) -> None:
    def runtime() -> dict[str, Any]:
        content: dict[str, Any] = json.loads((tmp_path / "gpu_runtime.json").read_text())
        return content

    node.mig(3, "on")
    driver = collector()
    driver.read()
    before = runtime()
    assert (before[node.uuid(3)]["pids"], len(before[node.uuid(3)]["mig"])) == ([4714], 7)
    node.lose(3)
    driver.read()
    assert runtime() == before
    collector().read()
    assert runtime() == before, "and across a restart"
    parts = json.loads((tmp_path / "gpus.json").read_text())
    (tmp_path / "gpus.json").write_text(json.dumps({uuid: parts[uuid] for uuid in parts if uuid != node.uuid(3)}))
    collector().read()
    assert runtime() == {uuid: about for uuid, about in before.items() if uuid != node.uuid(3)}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"%s": 1}', '{"%s": {"links": 7, "pids": null}}', '{"%s": {"links": [{}]}}']
)
def test_an_unreadable_memory_of_what_gpus_ran_is_forgotten(
    node: SimulatedNode, collector: Callable[..., Nvml], tmp_path: Path, content: str
) -> None:
    (tmp_path / "gpu_runtime.json").write_text(content.replace("%s", node.uuid(0)))
    assert present(collector().read()) == ALL
    assert json.loads((tmp_path / "gpu_runtime.json").read_text())[node.uuid(0)]["pids"] == [4711]


def test_only_links_that_were_up_once_are_missed_also_by_the_next_exporter(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    node.nvlink(0, 17, "down")  # since before the first exporter: it leads nowhere
    assert of(collector().read(), NVLINK_LINK_STATE_ID) == {}
    node.nvlink(0, 4, "down")
    samples = collector().read()
    assert of(samples, NVLINK_LINK_STATE_ID) == {("4",): 0}
    assert of(samples, NVLINK_LINKS) == {("active",): 16, ("inactive",): 2}


def test_rows_and_repairs_of_a_card_without_the_fields_are_distinguished(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    fields = ((142, 0), (143, 0), (144, 0), (145, 0))
    library = Fields(node.root, errors=dict.fromkeys(fields, pynvml.NVML_ERROR_NOT_SUPPORTED))
    library.nvmlDeviceGetRemappedRows = lambda handle: (3, 5, 1, 0)  # type: ignore[method-assign]
    vars(library)["nvmlDeviceGetRepairStatus"] = lambda handle: [0, 1]

    def sram(handle: Handle, status: Any) -> int:
        status._obj.bThresholdExceeded, status._obj.aggregateUncSecDed = 1, 7
        return 0

    library.nvmlDeviceGetSramEccErrorStatus = sram  # type: ignore[method-assign]
    vars(library)["nvmlDeviceGetPowerManagementLimitConstraints"] = lambda handle: [100, 700]
    samples = collector(library).read()
    assert of(samples, GPU_REMAPPED_ROWS_TOTAL) == {("corrected",): 3, ("uncorrected",): 5}
    assert (of(samples, GPU_ROW_REMAP_PENDING), of(samples, GPU_ROW_REMAP_FAILURE)) == ({(): 1}, {(): 0})
    assert of(samples, GPU_REPAIR_PENDING) == {("channel",): 0, ("tpc",): 1}
    assert of(samples, GPU_SRAM_ERROR_THRESHOLD_EXCEEDED) == {(): 1}
    assert of(samples, GPU_POWER_LIMIT_MAX_WATTS) == {(): 700}
    library.nvmlDeviceGetRemappedRows = lambda handle: (3, 5, 0, 1)  # type: ignore[method-assign]
    samples = collector(library).read()
    assert (of(samples, GPU_ROW_REMAP_PENDING), of(samples, GPU_ROW_REMAP_FAILURE)) == ({(): 0}, {(): 1})


def test_each_clock_is_the_one_in_its_name(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    library = Simulation(node.root)
    names = ("GRAPHICS", "SM", "MEM", "VIDEO")
    numbers = {getattr(pynvml, f"NVML_CLOCK_{name}"): place for place, name in enumerate(names)}
    library.nvmlDeviceGetClockInfo = lambda handle, clock: 100 + numbers[clock]  # type: ignore[method-assign]
    library.nvmlDeviceGetMaxClockInfo = lambda handle, clock: 200 + numbers[clock]  # type: ignore[attr-defined]
    samples = collector(library).read()
    now = (GPU_GRAPHICS_CLOCK_HERTZ, GPU_SM_CLOCK_HERTZ, GPU_MEMORY_CLOCK_HERTZ, GPU_VIDEO_CLOCK_HERTZ)
    assert [of(samples, row)[()] for row in now] == [100, 101, 102, 103]
    most = (GPU_SM_CLOCK_MAX_HERTZ, GPU_MEMORY_CLOCK_MAX_HERTZ, GPU_VIDEO_CLOCK_MAX_HERTZ)
    assert [of(samples, row)[()] for row in most] == [201, 202, 203]


def test_a_driver_that_refuses_a_whole_batch_is_asked_in_smaller_ones(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    sizes: list[int] = []

    class Picky(Simulation):
        most, unknown = 1000, frozenset[int]()

        def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
            sizes.append(len(field_ids))
            if len(field_ids) > self.most or any(key[0] in self.unknown for key in field_ids if isinstance(key, tuple)):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return super().nvmlDeviceGetFieldValues(handle, field_ids)

    whole = series(collector(Picky(node.root)).read(), "0")
    assert max(sizes) > 300
    short = Picky(node.root)
    short.most = 100
    assert series(collector(short).read(), "0").keys() == whole.keys()
    newer = Picky(node.root)
    newer.unknown = frozenset({82, 163, 166, 293})
    driver = collector(newer)
    lost = {
        key
        for key in whole
        if key[0] in (NVLINK_INFO, GPU_MEMORY_TEMPERATURE_CELSIUS) or key == (NVLINK_ERRORS_TOTAL, ("crc",))
    }
    assert whole.keys() - series(driver.read(), "0").keys() == lost
    sizes.clear()
    clock.now += 10
    assert whole.keys() - series(driver.read(), "0").keys() == lost
    assert len(sizes) == 8 * 4, "what it does not know is not asked for again"


def test_a_card_with_both_kinds_of_nvlink_byte_counters_has_each_series_once_and_from_one_of_them(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    links: dict[Key, int] = {(field, link): 1_000_000 for field in (202, 204) for link in range(18)}
    library = Fields(node.root, links | {(138, ALL_LINKS): 7, (139, ALL_LINKS): 8})
    driver = collector(library)
    library.errors = {(138, ALL_LINKS): pynvml.NVML_ERROR_TIMEOUT}
    samples = driver.read()
    assert (of(samples, NVLINK_TRANSMIT_BYTES_TOTAL), of(samples, NVLINK_RECEIVE_BYTES_TOTAL)) == ({}, {(): 8 * 1024})
    library.errors = {}
    for _ in range(2):
        clock.now += 10
        samples = driver.read()
        assert [value for row, labels, value in samples if row is NVLINK_TRANSMIT_BYTES_TOTAL and labels[0] == "0"] == [
            7 * 1024
        ]
        assert [value for row, labels, value in samples if row is NVLINK_RECEIVE_BYTES_TOTAL and labels[0] == "0"] == [
            8 * 1024
        ]


def test_one_mig_instance_that_cannot_be_read_costs_no_other(
    node: SimulatedNode, collector: Callable[..., Nvml], caplog: pytest.LogCaptureFixture
) -> None:
    names = {0: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 1: "NVIDIA H100 80GB HBM3 1c.2g.20gb", 2: "1g.10gb+me", 3: "H100"}
    library = Simulation(node.root)
    works: Callable[[Handle], int] = library.nvmlDeviceGetGpuInstanceId

    def name(handle: Handle) -> str:
        if handle.slot == 4:
            return undecodable()
        return "NVIDIA H100 80GB HBM3" if handle.slot is None else names.get(handle.slot, "")

    def instance(handle: Handle) -> int:
        if handle.slot == 6:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(works(handle))

    library.nvmlDeviceGetName = name  # type: ignore[method-assign]
    vars(library)["nvmlDeviceGetGpuInstanceId"] = instance
    node.mig(5, "on")
    samples = collector(library).read()
    assert of(samples, GPU_MIG_MODE, "5") == {(): 1}
    profiles = {instance: profile for instance, _, _, profile in of(samples, GPU_MIG_INFO, "5")}
    assert profiles == {"7": "1g.10gb", "8": "1c.2g.20gb", "9": "1g.10gb+me", "10": "", "11": "", "12": ""}
    assert len(of(samples, GPU_MIG_MEMORY_USED_BYTES, "5")) == 6
    assert [record.getMessage() for record in caplog.records] == ["nvmlDeviceGetName cannot be read"]


def test_fields_that_fail_together_are_requested_apart_from_then_on(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    requests: list[list[int]] = []

    class Grace(Simulation):
        """A driver on which a call with both ECC fields and clock events fails, and each alone works."""

        code = pynvml.NVML_ERROR_NOT_SUPPORTED

        def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
            ids = [key[0] for key in field_ids if isinstance(key, tuple)]
            requests.append(ids)
            if {3, 4} & {*ids} and {269, 270, 94} & {*ids}:
                raise pynvml.NVMLError(self.code)
            return super().nvmlDeviceGetFieldValues(handle, field_ids)

    whole = series(collector().read(), "0")
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_INVALID_ARGUMENT):
        library = Grace(node.root)
        library.code = code
        driver = collector(library)
        assert series(driver.read(), "0").keys() == whole.keys()
        requests.clear()
        clock.now += 1
        assert series(driver.read(), "0").keys() >= whole.keys()
        assert not [ids for ids in requests if {3, 4} & {*ids} and {269, 270, 94} & {*ids}]
        assert len(requests) <= 8 * 8


def test_a_call_for_fields_that_always_fails_is_not_split_at_every_read(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    library = Simulation(node.root)
    driver = collector(library)
    driver.read()
    node.fail("nvmlDeviceGetFieldValues", pynvml.NVML_ERROR_UNKNOWN)
    before = library.calls
    clock.now += 1
    driver.read()
    assert library.calls - before <= 1 + 8 * (12 + 2 * 3)
    node.fail("nvmlDeviceGetFieldValues", 0)
    clock.now += 10
    assert of(driver.read(), GPU_ECC_ERRORS_TOTAL) == {("corrected",): 0, ("uncorrected",): 0}


def test_fields_of_memory_errors_are_absent_while_error_correction_is_off(
    node: SimulatedNode, collector: Callable[..., Nvml]
) -> None:
    class Off(Simulation):
        def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
            return [0, 0]

    samples = collector(Off(node.root)).read()
    assert of(samples, GPU_ECC_MODE) == {(): 0}
    memory_errors = {GPU_ECC_ERRORS_TOTAL, GPU_ECC_LIFETIME_ERRORS_TOTAL, GPU_SRAM_ERROR_THRESHOLD_EXCEEDED}
    assert not rows(samples, "0") & memory_errors
    assert rows(collector().read(), "0") >= memory_errors


def test_a_memory_temperature_beyond_any_chip_is_absent(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    assert of(collector(Fields(node.root, {(82, 0): 255})).read(), GPU_MEMORY_TEMPERATURE_CELSIUS) == {}


def test_bytes_over_pcie_are_the_truth_at_full_speed_though_the_drivers_registers_wrap(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    node.lie("wrapping_bytes")
    driver = collector()
    driver.read()
    node.load(0, 1)
    sent: list[float] = []
    for second in range(1, 61):
        clock.now += 1
        node.tick(1_700_000_000 + second)
        sent.append(of(driver.read(), GPU_PCIE_TRANSMIT_BYTES_TOTAL)[()])
    assert sent == sorted(sent)
    assert sent[-1] - sent[0] == pytest.approx(59 * h100.PCIE_RATE, rel=0.05)


def test_activity_that_the_driver_refuses_for_a_while_comes_back_and_the_gap_is_not_counted(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    driver = collector()
    node.load(0, 1)
    now = 0

    def read(seconds: int) -> list[Sample]:
        nonlocal now
        now += seconds
        clock.now += seconds
        node.tick(1_700_000_000 + now)
        return driver.read()

    read(1)
    before = of(read(10), GPU_PROFILED_SECONDS_TOTAL)[()]
    assert before == pytest.approx(10)
    node.fail("nvmlGpmSampleGet", pynvml.NVML_ERROR_NO_PERMISSION)
    for _ in range(3):
        samples = read(10)
        assert of(samples, GPU_PROFILED_SECONDS_TOTAL) == {(): before}
        assert of(samples, GPU_PCIE_TRANSMIT_BYTES_TOTAL) == {}
    node.fail("nvmlGpmSampleGet", 0)
    read(40)  # a minute after the refusal
    samples = read(10)
    assert of(samples, GPU_PROFILED_SECONDS_TOTAL)[()] == pytest.approx(before + 10)
    assert of(samples, GPU_PCIE_TRANSMIT_BYTES_TOTAL)[()] > 0


def test_mig_instances_that_may_not_be_seen_are_logged_and_requested_again(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node.mig(4, "on", "1g.10gb")
    node.fail("nvmlDeviceGetMigDeviceHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION)
    driver = collector()
    for _ in range(2):
        samples = driver.read()
        assert of(samples, GPU_MIG_MODE, "4") == {(): 1}
        assert of(samples, GPU_MIG_INFO, "4") == {}
        clock.now += 1
    assert caplog.text.count("MIG is on, and without MIG's capabilities its instances cannot be read") == 1
    node.fail("nvmlDeviceGetMigDeviceHandleByIndex", 0)
    assert len(of(driver.read(), GPU_MIG_INFO, "4")) == 7


@pytest.mark.parametrize("refused", ["instances", "whole GPU", "both"])
def test_memory_that_a_mig_gpu_refuses_costs_only_its_own_series(
    node: SimulatedNode, collector: Callable[..., Nvml], caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    class Refusing(Simulation):
        def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
            if handle.index == 4 and refused in ("both", "whole GPU" if handle.slot is None else "instances"):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
            return super().nvmlDeviceGetMemoryInfo(handle, version)

    node.mig(4, "on", "1g.10gb")
    samples = collector(Refusing(node.root)).read()
    assert present(samples) == {str(index): 1 for index in range(8)}
    assert (len(of(samples, GPU_MIG_INFO, "4")), len(of(samples, GPU_POWER_WATTS, "4"))) == (7, 1)
    assert len(of(samples, GPU_MIG_MEMORY_TOTAL_BYTES, "4")) == (7 if refused == "whole GPU" else 0)
    assert len(of(samples, GPU_MEMORY_TOTAL_BYTES, "4")) == (1 if refused == "instances" else 0)
    logged = "MIG is on, and without MIG's capabilities the memory of its instances cannot be read"
    assert [record.getMessage() for record in caplog.records] == ([] if refused == "whole GPU" else [logged])


def test_processes_that_the_driver_garbles_are_left_out(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    class Garbled(Simulation):
        def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
            fields = [(4711, 1 << 30), (3_735_928_559, 1 << 30), (4712, 2**64 - 8), (0xFFFFFFFF, 17)]
            return [pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used}) for pid, used in fields]

    samples = collector(Garbled(node.root)).read()
    assert sum(of(samples, GPU_PROCESSES).values()) == 1
    assert sum(of(samples, GPU_PROCESS_MEMORY_BYTES).values()) == 1 << 30


@pytest.mark.parametrize(
    ("pid_max", "pid", "used", "kept"),
    [
        (None, 1, h100.MEMORY_TOTAL, True),
        (None, 4711, None, True),
        (None, 4711, h100.MEMORY_TOTAL + 1, False),  # more than the GPU has
        (None, 0, 1 << 30, False),
        (None, (1 << 22) - 1, 1 << 30, True),
        (None, 1 << 22, 1 << 30, False),
        ("32768\n", 32767, 1 << 30, True),
        ("32768\n", 32768, 1 << 30, False),  # a number that this kernel gives to no process
        ("unreadable", 32768, 1 << 30, True),
    ],
)
def test_a_process_has_a_pid_of_this_kernel_and_no_more_memory_than_the_gpu(
    node: SimulatedNode, collector: Callable[..., Nvml], pid_max: str | None, pid: int, used: int | None, kept: bool
) -> None:
    class Busy(Simulation):
        def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
            return [pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used})]

    if pid_max is not None:
        (node.root / "proc/sys/kernel").mkdir(parents=True, exist_ok=True)
        (node.root / "proc/sys/kernel/pid_max").write_text(pid_max)
    assert sum(of(collector(Busy(node.root)).read(), GPU_PROCESSES).values()) == kept


def test_an_exporter_that_may_never_read_activity_has_no_series_of_it(
    node: SimulatedNode, collector: Callable[..., Nvml], clock: Clock
) -> None:
    node.fail("nvmlGpmSampleGet", pynvml.NVML_ERROR_NO_PERMISSION)
    library = Simulation(node.root)
    driver = collector(library)
    for _ in range(3):
        clock.now += 10
        assert not rows(driver.read(), "0") & {GPU_PROFILED_SECONDS_TOTAL, GPU_SM_ACTIVE_SECONDS_TOTAL}


def test_before_r535_clock_events_have_another_name(node: SimulatedNode, collector: Callable[..., Nvml]) -> None:
    library = Simulation(node.root)
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x8 | 0x40  # type: ignore[attr-defined]
    assert of(collector(library).read(), GPU_CLOCK_EVENT_ACTIVE) == {("gpu_idle",): 0}, "the newer one is preferred"
    events = {("gpu_idle",): 0, ("hw_slowdown",): 1, ("hw_thermal_slowdown",): 1}
    older_package = Without(library, "nvmlDeviceGetCurrentClocksEventReasons")
    assert of(collector(older_package).read(), GPU_CLOCK_EVENT_ACTIVE) == events
    node.fail("nvmlDeviceGetCurrentClocksEventReasons", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert of(collector(library).read(), GPU_CLOCK_EVENT_ACTIVE) == events
