"""The NVML collector against the simulated driver, which answers in pynvml's own structures and exceptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from flopwatch.catalogue import (
    GPU_CLOCK_EVENT,
    GPU_CLOCK_EVENT_SECONDS,
    GPU_ECC_ERRORS,
    GPU_ENERGY,
    GPU_INFO,
    GPU_MEMORY_CLOCK,
    GPU_MEMORY_TEMPERATURE,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_PRESENT,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_UTILIZATION,
    Metric,
    Sample,
)
from flopwatch.node.collectors import StartAfresh, Unsupported
from flopwatch.node.collectors.nvml import CLOCK_EVENTS, FIELDS, Nvml, known
from flopwatch.simulate import SimulatedNode
from flopwatch.simulate.pynvml import Handle, Simulation

EVERY_ROW = {
    GPU_INFO, GPU_PRESENT, GPU_UTILIZATION, GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_TEMPERATURE, GPU_MEMORY_TEMPERATURE,
    GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY, GPU_SM_CLOCK, GPU_SM_CLOCK_MAX, GPU_MEMORY_CLOCK, GPU_CLOCK_EVENT,
    GPU_CLOCK_EVENT_SECONDS, GPU_ECC_ERRORS,
}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "simulated")
    node.create(1_700_000_000)
    return node


def failing(root: Path, call: str, code: int, gpus: Sequence[int] = range(8)) -> Simulation:
    """Return a driver in which one function fails for these GPUs (or at all, if it is about none)."""
    library = Simulation(root)
    works = getattr(library, call)

    def fails(*arguments: Any) -> Any:
        target = arguments[0] if arguments else gpus[0]
        if (target.index if isinstance(target, Handle) else target) in gpus:
            raise pynvml.NVMLError(code)
        return works(*arguments)

    setattr(library, call, fails)
    return library


def present(samples: list[Sample]) -> dict[str, float]:
    return {labels[0]: value for row, labels, value in samples if row is GPU_PRESENT}


def rows(samples: list[Sample], gpu: str) -> set[Metric]:
    return {row for row, labels, _ in samples if labels[0] == gpu}


@pytest.mark.parametrize(("call", "lost"), [
    ("nvmlDeviceGetFieldValues", {GPU_MEMORY_TEMPERATURE, GPU_ENERGY, GPU_CLOCK_EVENT_SECONDS, GPU_ECC_ERRORS}),
    ("nvmlDeviceGetMemoryInfo", {GPU_MEMORY_USED, GPU_MEMORY_TOTAL}),
    ("nvmlDeviceGetCurrentClocksEventReasons", {GPU_CLOCK_EVENT}),
    ("nvmlDeviceGetUtilizationRates", {GPU_UTILIZATION}),
    ("nvmlDeviceGetTemperature", {GPU_TEMPERATURE}),
    ("nvmlDeviceGetPowerUsage", {GPU_POWER}),
    ("nvmlDeviceGetEnforcedPowerLimit", {GPU_POWER_LIMIT}),
    ("nvmlDeviceGetClockInfo", {GPU_SM_CLOCK, GPU_MEMORY_CLOCK}),
    ("nvmlDeviceGetMaxClockInfo", {GPU_SM_CLOCK_MAX}),
    ("nvmlDeviceGetSerial", set()),
])
def test_a_call_a_gpu_does_not_support_costs_its_own_values_on_that_gpu_and_nothing_else(
    node: SimulatedNode, tmp_path: Path, call: str, lost: set[Metric]
) -> None:
    library = failing(node.root, call, pynvml.NVML_ERROR_NOT_SUPPORTED, gpus=[2])
    samples = Nvml(library, "node1", tmp_path / "gpus.json").read()
    assert rows(samples, "2") == EVERY_ROW - lost
    assert all(rows(samples, gpu) == EVERY_ROW for gpu in "0134567")


@pytest.mark.parametrize("status", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT])
def test_a_field_without_a_value_is_absent_and_the_other_fields_of_the_batch_are_there(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    library = Simulation(node.root)
    answer = library.nvmlDeviceGetFieldValues

    def without_memory_temperature(handle: Handle, field_ids: Sequence[int]) -> Any:
        values = answer(handle, field_ids)
        next(value for value in values if value.fieldId == 82).nvmlReturn = status
        return values

    monkeypatch.setattr(library, "nvmlDeviceGetFieldValues", without_memory_temperature)
    assert rows(Nvml(library, "node1", tmp_path / "gpus.json").read(), "0") == EVERY_ROW - {GPU_MEMORY_TEMPERATURE}


def test_all_ones_is_nvmls_not_available_and_zero_is_a_number() -> None:
    assert [known(number) for number in (0, 1, 2**32 - 1, 2**64 - 1, 2**32)] == [True, True, False, False, True]


def test_field_and_event_numbers_are_those_of_the_vendors_package() -> None:
    assert list(FIELDS) == [
        pynvml.NVML_FI_DEV_MEMORY_TEMP, pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
        pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
    ]
    assert list(CLOCK_EVENTS) == [
        pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonSyncBoost, pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksEventReasonDisplayClockSetting,
    ]


def test_a_lost_gpu_is_0_with_its_identity_the_others_go_on_and_it_returns_once_nvml_is_initialised_again(
    node: SimulatedNode, tmp_path: Path
) -> None:
    clock = Clock()
    collector = Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json", "nvml", clock)
    assert present(collector.read()) == dict.fromkeys("01234567", 1)
    node.lose(3)
    samples = collector.read()
    assert present(samples) == dict.fromkeys("01234567", 1) | {"3": 0}
    assert [sample for sample in samples if sample[1][0] == "3"] == [
        (GPU_INFO, ("3", node.uuid(3), "node1", "NVIDIA H100 80GB HBM3", "00000000:86:00.0", "1650124010003",
                    "590.48.01", "96.00.A5.00.01", "nvml"), 1),
        (GPU_PRESENT, ("3", node.uuid(3)), 0),
    ]
    assert all(rows(samples, gpu) == EVERY_ROW for gpu in "0124567")
    node.clear()
    clock.now += 14
    assert present(collector.read())["3"] == 0, "the driver remembers a lost GPU"
    clock.now += 1
    assert present(collector.read())["3"] == 1


def test_nvml_is_not_initialised_at_every_scrape_beside_a_gpu_that_stays_lost(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    library = Simulation(node.root)
    initialise = library.nvmlInit
    at: list[float] = []

    def noted() -> None:
        at.append(clock.now)
        initialise()

    monkeypatch.setattr(library, "nvmlInit", noted)
    collector = Nvml(library, "node1", tmp_path / "gpus.json", "nvml", clock)
    node.lose(3)
    for second in range(0, 1000, 5):
        clock.now = second
        collector.read()
    assert at == [0, 15, 45, 105, 225, 465, 705, 945]


def test_a_gpu_lost_before_the_exporter_started_is_missed_because_of_the_inventory(
    node: SimulatedNode, tmp_path: Path
) -> None:
    Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    node.lose(5)
    samples = Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    assert present(samples) == dict.fromkeys("01234567", 1) | {"5": 0}
    assert rows(samples, "5") == {GPU_INFO, GPU_PRESENT}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPowerUsage"])
def test_a_gpu_may_turn_out_to_be_gone_in_any_call(
    node: SimulatedNode, tmp_path: Path, call: str, code: int
) -> None:
    Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    samples = Nvml(failing(node.root, call, code, gpus=[6]), "node1", tmp_path / "gpus.json").read()
    assert present(samples) == dict.fromkeys("01234567", 1) | {"6": 0}
    assert rows(samples, "6") == {GPU_INFO, GPU_PRESENT}


def test_a_gpu_the_exporter_may_not_look_at_is_neither_present_nor_missing(
    node: SimulatedNode, tmp_path: Path
) -> None:
    Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    library = failing(node.root, "nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_UNKNOWN, gpus=[1])
    samples = Nvml(library, "node1", tmp_path / "gpus.json").read()
    assert present(samples) == dict.fromkeys("0234567", 1)
    assert rows(samples, "1") == {GPU_INFO}


def test_an_exporter_that_may_look_at_no_gpu_has_failed_and_calls_none_missing(
    node: SimulatedNode, tmp_path: Path
) -> None:
    Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    library = failing(node.root, "nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_OPERATING_SYSTEM)
    with pytest.raises(pynvml.NVMLError):
        Nvml(library, "node1", tmp_path / "gpus.json").read()


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_library_or_driver_the_source_does_not_exist(node: SimulatedNode, tmp_path: Path, code: int) -> None:
    collector = Nvml(failing(node.root, "nvmlInit", code), "node1", tmp_path / "gpus.json")
    with pytest.raises(Unsupported, match=str(pynvml.NVMLError(code))):
        collector.read()


def test_an_unloaded_driver_makes_every_known_gpu_missing(node: SimulatedNode, tmp_path: Path) -> None:
    Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    library = failing(node.root, "nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    samples = Nvml(library, "node1", tmp_path / "gpus.json").read()
    assert present(samples) == dict.fromkeys("01234567", 0)
    assert len(samples) == 16


def test_a_driver_replaced_under_the_process_asks_for_a_new_process(node: SimulatedNode, tmp_path: Path) -> None:
    library = failing(node.root, "nvmlDeviceGetCount", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(StartAfresh):
        Nvml(library, "node1", tmp_path / "gpus.json").read()


def test_after_a_driver_reload_the_handles_are_resolved_again(node: SimulatedNode, tmp_path: Path) -> None:
    clock = Clock()
    library = Simulation(node.root)
    collector = Nvml(library, "node1", tmp_path / "gpus.json", "nvml", clock)
    collector.read()
    library.initialized = False  # what a reload does to the session
    with pytest.raises(pynvml.NVMLError):
        collector.read()
    clock.now += 15
    assert present(collector.read()) == dict.fromkeys("01234567", 1)


@pytest.mark.parametrize("new", [True, False])
def test_only_a_gpu_new_to_the_node_replaces_the_one_that_was_in_its_slot(
    node: SimulatedNode, tmp_path: Path, new: bool
) -> None:
    inventory = tmp_path / "gpus.json"
    Nvml(Simulation(node.root), "node1", inventory).read()
    parts = json.loads(inventory.read_text())
    parts["GPU-old"] = parts[node.uuid(2)] | {"uuid": "GPU-old"}
    if new:
        del parts[node.uuid(2)]
    inventory.write_text(json.dumps(parts))
    samples = Nvml(Simulation(node.root), "node1", inventory).read()
    answers = {labels[1]: value for row, labels, value in samples if row is GPU_PRESENT and labels[0] == "2"}
    assert answers == {node.uuid(2): 1} | ({} if new else {"GPU-old": 0})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"GPU-1": 1}', '{"GPU-1": {"gpu": "0"}}'])
def test_an_unreadable_inventory_is_forgotten(node: SimulatedNode, tmp_path: Path, content: str) -> None:
    (tmp_path / "gpus.json").write_text(content)
    samples = Nvml(Simulation(node.root), "node1", tmp_path / "gpus.json").read()
    assert present(samples) == dict.fromkeys("01234567", 1)
    assert len(json.loads((tmp_path / "gpus.json").read_text())) == 8


def test_a_disk_that_takes_nothing_costs_no_reading(node: SimulatedNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    collector = Nvml(Simulation(node.root), "node1", tmp_path / "file" / "gpus.json")
    collector.read()
    node.lose(0)
    assert present(collector.read())["0"] == 0
