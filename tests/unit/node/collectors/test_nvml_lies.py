"""The simulated driver that lies as real ones do, and the NVML collector on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.collectors.nvml.fields import ADDED_UP, ALL_LINKS, Key
from flopwatch.settings import ExporterSettings
from flopwatch.simulate import h100
from flopwatch.simulate.pynvml import Handle, Simulation
from simulator.host import SimulatedNode

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


# The collector on it.

DEADLINE = ExporterSettings(host="node1").scrape_deadline
INTERVAL = 15  # seconds between two scrapes
Series = tuple[Metric, tuple[str, ...]]


class Blackwell(Simulation):
    """A driver with the fields of NVLink 5, which adds errors and bytes up over all links."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.errors: dict[Key, int] = {}
        self.asked: list[Key] = []

    def link_numbers(self, handle: Handle, busy: float, faults: Any) -> dict[Key, int]:
        numbers = {(91, 0): 18}
        for link in range(18):
            numbers |= {(165, link): 1, (164, link): 53125, (166, link): 7, (220, link): 0xFFF, (222, link): 0xFFF}
            numbers |= {(field, link): self.errors.get((field, link), 0) for field in ADDED_UP}
            numbers |= {(field, link): 1000 for field in (202, 204)}
        sums = {(field, ALL_LINKS): sum(numbers[field, link] for link in range(18)) for field in ADDED_UP}
        return numbers | sums

    def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
        self.asked += [key for key in field_ids if isinstance(key, tuple) and handle.index == 0]
        return super().nvmlDeviceGetFieldValues(handle, field_ids)


@pytest.fixture
def collector(node: SimulatedNode, tmp_path: Path, clock: Clock) -> Callable[[Simulation], Nvml]:
    def make(library: Simulation) -> Nvml:
        library.sleep = clock.sleep
        state = tmp_path / type(library).__name__
        state.mkdir()
        return Nvml(
            library,
            "node1",
            state / "gpus.json",
            "nvml",
            clock,
            sysfs=node.sysfs,
            proc=node.root / "proc",
            dev=node.root / "dev",
        )

    return make


def values(samples: list[Sample]) -> dict[Series, float]:
    return {(row, labels): value for row, labels, value in samples}


@pytest.mark.parametrize("library", [Simulation, Blackwell])
def test_no_read_of_a_slow_driver_exceeds_the_deadline_and_every_link_is_read_within_a_minute(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock, library: type[Simulation]
) -> None:
    node.lie("slow_values")
    nvml = collector(library(node.root))
    start = clock.now

    def scrape() -> dict[Series, float]:
        began = clock.now
        seen = values(nvml.read())
        assert clock.now - began < DEADLINE
        clock.now = began + INTERVAL
        return seen

    while clock.now < start + 60:
        seen = scrape()
    states = [labels[0] for row, labels in seen if row is m.NVLINK_LINKS and labels[2] == "active"]
    assert sorted(states) == [str(gpu) for gpu in range(8)]
    for gpu in range(8):
        node.nvlink(gpu, 3, "down")
        node.nvlink_errors(gpu, 5, "crc", 7)
    if library is Simulation:
        changed = clock.now
        while clock.now < changed + 60:
            seen = scrape()
        for gpu in range(8):
            labels = (str(gpu), node.uuid(gpu))
            assert seen[m.NVLINK_LINKS, (*labels, "active")] == 17
            assert seen[m.NVLINK_LINK_ERRORS_TOTAL, (*labels, "5", "crc")] == 7


def test_a_slow_gpu_is_read_less_often_and_costs_no_other_gpu_a_value(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    truth = values(collector(Simulation(node.root)).read())
    node.lie("slow_gpu")
    driver = Simulation(node.root)
    driver.sleep = clock.sleep
    nvml = Nvml(driver, "node1", node.root / "gpus.json", "nvml", clock, sysfs=node.sysfs, proc=node.root / "proc")
    row, slow = m.FLOPWATCH_NVML_SLOW_GPU_SECONDS, ("7", node.uuid(7))
    spent: list[float] = []
    for scrape in range(24):
        before = clock.now
        seen = values(nvml.read())
        spent.append(clock.now - before)
        clock.now = before + INTERVAL
        missing = {(of, labels) for of, labels in truth if (of, labels) not in seen and of.labels[:2] == m.GPU}
        if scrape >= 0:
            assert {labels[:2] for _, labels in missing} <= {slow}
        if scrape > 6:
            assert missing == set()
            assert 2 < seen[row, slow] < 4
    assert max(spent[1:]) <= 1.6, "of the deadline of 2.5 s; the first read also asks for the identity"
    assert sum(spent[1:]) / len(spent) / INTERVAL < 0.08
    node.lie("slow_gpu", "off")
    for _ in range(5):
        clock.now += INTERVAL
        seen = values(nvml.read())
    assert row not in {of for of, _ in seen}


def test_without_persistence_mode_nvml_is_not_initialized_all_the_time(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    node.lie("slow_init")
    nvml = collector(Simulation(node.root))
    nvml.read()
    node.lose(3)
    slow = 0
    for _ in range(100):
        before = clock.now
        nvml.read()
        slow += clock.now - before > DEADLINE
        clock.now = max(clock.now, before + INTERVAL)
    assert slow == 3


def test_a_fast_driver_answers_every_table_at_once(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml]
) -> None:
    seen = values(collector(Simulation(node.root)).read())
    assert len([labels for row, labels in seen if row is m.NVLINK_INFO]) == 8
    assert m.FLOPWATCH_NVML_FIELD_LATENCY_SECONDS_TOTAL not in {row for row, _ in seen}, "the driver reports none"


def test_the_latency_that_the_driver_reports_is_added_up_by_table(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    node.lie("slow_values")
    nvml, row = collector(Simulation(node.root)), m.FLOPWATCH_NVML_FIELD_LATENCY_SECONDS_TOTAL
    first = values(nvml.read())
    clock.now += 1
    second = values(nvml.read())
    assert {labels for which, labels in first if which is row} == {
        ("often",),
        ("often_links",),
        ("seldom",),
        ("links",),
    }
    assert (second[row, ("often_links",)] - first[row, ("often_links",)]) * row.scale == pytest.approx(0.001 * 4 * 8)


def test_links_are_read_one_by_one_only_after_their_sum_rose(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    driver = Blackwell(node.root)
    nvml = collector(driver)
    link = ("0", node.uuid(0), "4", "symbol")

    def scrape() -> tuple[set[int], dict[Series, float]]:
        driver.asked.clear()
        clock.now += INTERVAL
        node.tick(START + clock.now)
        seen = values(nvml.read())
        return {field for field, scope in driver.asked if field in ADDED_UP and scope != ALL_LINKS}, seen

    asked, seen = scrape()
    assert asked == set()
    assert seen[m.NVLINK_TRANSMIT_BYTES_TOTAL, link[:2]] == 18_000
    assert seen[m.NVLINK_ERRORS_TOTAL, (*link[:2], "symbol")] == 0
    driver.errors = {(221, 4): 3}
    asked, seen = scrape()
    assert asked == {221}
    assert seen[m.NVLINK_ERRORS_TOTAL, (*link[:2], "symbol")] == seen[m.NVLINK_LINK_ERRORS_TOTAL, link] == 3
    asked, seen = scrape()
    assert asked == set()
    assert seen[m.NVLINK_LINK_ERRORS_TOTAL, link] == 3
    driver.errors = {(221, 4): 1}  # the GPU was reset
    asked, seen = scrape()
    assert (asked, seen[m.NVLINK_LINK_ERRORS_TOTAL, link]) == ({221}, 1)


def test_a_link_that_fails_while_a_sum_rises_is_read_again_at_once(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    class Moody(Blackwell):
        failing = False

        def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
            entries = super().nvmlDeviceGetFieldValues(handle, field_ids)
            for value in entries:
                if self.failing and value.fieldId == 221 and value.scopeId != ALL_LINKS:
                    value.nvmlReturn = pynvml.NVML_ERROR_TIMEOUT
            return entries

    driver = Moody(node.root)
    nvml = collector(driver)
    nvml.read()
    driver.errors, driver.failing = {(221, 4): 3}, True
    clock.now += INTERVAL
    node.tick(START + clock.now)
    nvml.read()
    driver.failing = False
    clock.now += 1
    assert values(nvml.read())[m.NVLINK_LINK_ERRORS_TOTAL, ("0", node.uuid(0), "4", "symbol")] == 3


def test_a_driver_that_only_adds_up_still_has_sums(
    node: SimulatedNode, collector: Callable[[Simulation], Nvml], clock: Clock
) -> None:
    class Summing(Blackwell):
        def link_numbers(self, handle: Handle, busy: float, faults: Any) -> dict[Key, int]:
            self.errors = {(221, 4): 3}
            numbers = super().link_numbers(handle, busy, faults)
            return {key: count for key, count in numbers.items() if key[0] not in ADDED_UP or key[1] == ALL_LINKS}

    nvml = collector(Summing(node.root))
    for _ in range(2):
        errors = {row: value for (row, labels), value in values(nvml.read()).items() if labels[2:] == ("symbol",)}
        assert errors == {m.NVLINK_ERRORS_TOTAL: 3}
        clock.now += INTERVAL
