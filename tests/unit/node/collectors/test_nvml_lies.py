"""The simulated driver that lies as real ones do, and the NVML collector on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from flopwatch.simulate import SimulatedNode, h100
from flopwatch.simulate.pynvml import Handle, Simulation

START = 1_700_000_400.0  # a multiple of ten minutes


class Clock:
    """A clock that only the test and a slow driver move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "simulated")
    node.create(START)
    return node


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def driver(node: SimulatedNode, clock: Clock) -> Iterator[Simulation]:
    driver = Simulation(node.root)
    driver.sleep = clock.sleep
    driver.nvmlInit()
    yield driver
    driver.nvmlShutdown()


FIRST = Handle(0)


def entries(driver: Simulation, *fields: int) -> list[Any]:
    return list(driver.nvmlDeviceGetFieldValues(FIRST, fields))


def refusal(call: Any, *arguments: Any) -> int | None:
    """Return the nvmlReturn_t of the error that a call raises, or None without an error."""
    try:
        call(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return None


def test_a_lie_lasts_from_when_it_is_switched_on_until_it_is_switched_off_or_cleared(
    node: SimulatedNode, driver: Simulation
) -> None:
    assert driver.nvmlDeviceGetPersistenceMode(FIRST) == 1
    node.lie("no_persistence")
    node.lie("no_ecc")
    assert (driver.nvmlDeviceGetPersistenceMode(FIRST), driver.nvmlDeviceGetEccMode(FIRST)) == (0, [0, 0])
    node.lie("no_persistence", "off")
    assert (driver.nvmlDeviceGetPersistenceMode(FIRST), driver.nvmlDeviceGetEccMode(FIRST)) == (1, [0, 0])
    node.clear()
    assert driver.nvmlDeviceGetEccMode(FIRST) == [1, 1]
    for wrong in (("white_lie", "on"), ("no_ecc", "perhaps")):
        with pytest.raises(ValueError, match="is not one of double_types"):
            node.lie(*wrong)


def test_every_integer_is_declared_a_double_with_the_same_bits(node: SimulatedNode, driver: Simulation) -> None:
    node.ecc(0, uncorrected=3)
    honest = [value.value.ullVal for value in entries(driver, 3, 4, 82, 83, 193)]
    node.lie("double_types")
    lying = entries(driver, 3, 4, 82, 83, 193)
    assert {value.valueType for value in lying} == {pynvml.NVML_VALUE_TYPE_DOUBLE}
    assert [value.value.ullVal for value in lying] == honest
    assert honest[1] == 3


@pytest.mark.parametrize(("kind", "left"), [("unwritten_fields", {3, 4, 5, 6, 29, 30, 31}), ("no_ecc", {3, 4, 5, 6})])
def test_an_entry_that_is_not_written_succeeds_with_nothing_in_it(
    node: SimulatedNode, driver: Simulation, kind: str, left: set[int]
) -> None:
    node.ecc(0, uncorrected=3)
    node.lie(kind)
    for value in entries(driver, 3, 4, 5, 6, 29, 30, 31, 82, 94):
        content = (value.timestamp, value.latencyUsec, value.valueType, value.nvmlReturn, value.value.ullVal)
        assert (content == (0, 0, 0, 0, 0)) == (value.fieldId in left)


def test_pcie_bytes_wrap_at_32_bits(node: SimulatedNode, driver: Simulation) -> None:
    node.load(0, 1)
    node.tick(START + 60)
    truth = entries(driver, 197)[0].value.ullVal
    assert truth > 2**36
    node.lie("wrapping_bytes")
    assert entries(driver, 197)[0].value.ullVal == truth % 2**32


def test_a_call_with_ecc_fields_and_others_fails_and_each_alone_works(node: SimulatedNode, driver: Simulation) -> None:
    node.lie("mixed_fields")
    assert refusal(entries, driver, 3, 138) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert refusal(entries, driver, 3, 4, 5, 6) is None
    assert refusal(entries, driver, 138, 94) is None


def test_activity_is_refused_for_five_minutes_of_every_ten(node: SimulatedNode, driver: Simulation) -> None:
    node.lie("gpm_refusals")
    sample = driver.nvmlGpmSampleAlloc()
    refused = []
    for minute in range(1, 21):
        node.tick(START + 60 * minute)
        refused.append(refusal(driver.nvmlGpmSampleGet, FIRST, sample))
    no = pynvml.NVML_ERROR_NO_PERMISSION
    assert refused == 2 * [*4 * [None], *5 * [no], None]
    driver.nvmlGpmSampleFree(sample)


def test_each_value_takes_a_millisecond_which_is_in_its_entry(
    node: SimulatedNode, driver: Simulation, clock: Clock
) -> None:
    node.lie("slow_values")
    before = clock.now
    values = entries(driver, *range(1, 101))
    assert clock.now - before == pytest.approx(0.1)
    assert {value.latencyUsec for value in values if value.nvmlReturn == 0} == {1000}


def test_an_initialization_takes_forty_seconds(node: SimulatedNode, driver: Simulation, clock: Clock) -> None:
    node.lie("slow_init")
    before = clock.now
    driver.nvmlInit()
    assert clock.now - before == 40


def test_mig_instances_that_exist_may_not_be_seen(node: SimulatedNode, driver: Simulation) -> None:
    node.mig(0, "on")
    node.lie("hidden_mig")
    assert driver.nvmlDeviceGetMigMode(FIRST)[0] == 1
    assert refusal(driver.nvmlDeviceGetMigDeviceHandleByIndex, FIRST, 0) == pynvml.NVML_ERROR_NO_PERMISSION


def test_only_the_first_process_is_not_garbled(node: SimulatedNode, driver: Simulation) -> None:
    node.lie("garbled_processes")
    pids = [process.pid for process in driver.nvmlDeviceGetComputeRunningProcesses_v3(FIRST)]
    assert pids[0] == h100.pid(0)
    assert min(pids[1:]) > 1 << 22
