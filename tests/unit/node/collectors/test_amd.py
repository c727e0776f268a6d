"""What `amd-smi` prints, in the layouts of ROCm 6.2 to 7, as series of NVIDIA GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.node.collectors.amd.document import Entry, Throttling, entries, identity, links, number, parse, values
from tests.support import TESTS

CAPTURES = TESTS / "captures" / "amd"


def captured(name: str) -> list[Entry]:
    return [*entries(parse((CAPTURES / f"{name}.json").read_text()))]


def found(metric: Entry, static: Entry) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels, in the unit of the name."""
    some = [(row, labels, value * row.scale) for row, labels, value in values(metric, static)]
    assert len({(row, labels) for row, labels, _ in some}) == len(some), "each series once"
    return {(row.name, *labels): round(value, 6) for row, labels, value in some}


MI300X = {
    ("gpu_utilization_ratio",): 0.99,
    ("gpu_memory_copy_utilization_ratio",): 0.31,
    ("gpu_power_watts",): 717,
    ("gpu_temperature_celsius",): 71,
    ("gpu_memory_temperature_celsius",): 58,
    ("gpu_memory_used_bytes",): 121344 << 20,
    ("gpu_memory_total_bytes",): 196592 << 20,
    ("gpu_memory_clock_hertz",): 1.3e9,
    ("gpu_ecc_errors_total", "corrected"): 0,
    ("gpu_ecc_errors_total", "uncorrected"): 0,
    ("gpu_pcie_width_lanes",): 16,
    ("gpu_pcie_replays_total",): 0,
    ("gpu_energy_joules_total",): 20909145.914,
    ("gpu_memory_clock_max_hertz",): 1.3e9,
    ("gpu_pcie_errors_total", "l0_to_recovery"): 1,
    ("gpu_power_limit_watts",): 750,
    ("gpu_power_limit_max_watts",): 750,
    ("gpu_temperature_limit_celsius", "slowdown"): 100,
    ("gpu_temperature_limit_celsius", "shutdown"): 110,
    ("gpu_temperature_limit_celsius", "memory_max"): 105,
    ("gpu_graphics_clock_hertz",): 2.104e9,
    ("gpu_sm_clock_hertz",): 2.104e9,
    ("gpu_sm_clock_max_hertz",): 2.1e9,
    ("gpu_pcie_generation",): 5,
    ("gpu_pcie_width_max_lanes",): 16,
    ("gpu_pcie_generation_max",): 5,
}


@pytest.mark.parametrize("release", ["", "6.2_"])
def test_an_mi300x_has_the_series_of_nvidia_gpus_in_each_layout(release: str) -> None:
    metrics, statics = captured(f"mi300x_{release}metric"), captured(f"mi300x_{release}static")
    assert [entry["gpu"] for entry in metrics] == [0, 1]
    assert found(metrics[0], statics[0]) == MI300X
    other = found(metrics[1], statics[1])
    assert (other["gpu_ecc_errors_total", "corrected"], other["gpu_ecc_errors_total", "uncorrected"]) == (3, 1)


def test_a_card_in_a_slot_has_no_highest_link_and_no_energy() -> None:
    series = found(captured("r9700_metric")[0], captured("r9700_static")[0])
    assert not {name for name, *_ in series} & {"gpu_pcie_width_max_lanes", "gpu_pcie_generation_max"}
    assert ("gpu_energy_joules_total",) not in series
    assert series["gpu_temperature_celsius",] == 74, "the hot spot, not the edge"
    assert series["gpu_sm_clock_max_hertz",] == 3.06e9


def test_the_limits_of_an_mi210_are_those_of_the_older_layout() -> None:
    (static,) = captured("mi210_static")
    assert found({"gpu": 0}, static) == {
        ("gpu_power_limit_watts",): 300,
        ("gpu_power_limit_max_watts",): 300,
        ("gpu_temperature_limit_celsius", "slowdown"): 100,
        ("gpu_temperature_limit_celsius", "shutdown"): 105,
        ("gpu_temperature_limit_celsius", "memory_max"): 94,
        ("gpu_pcie_width_max_lanes",): 16,
        ("gpu_pcie_generation_max",): 4,
    }


@pytest.mark.parametrize("absent", ["N/A", None, [], 7, {}, {"value": "N/A", "unit": "W"}, True])
def test_what_is_not_available_costs_only_its_series(absent: Any) -> None:
    whole, static = captured("mi300x_metric")[0], captured("mi300x_static")[0]
    limits = set(found({"gpu": 0}, static))
    for section in ("usage", "power", "clock", "temperature", "pcie", "ecc", "mem_usage", "energy"):
        rest = set(found(whole | {section: absent}, static))
        assert limits < rest < set(MI300X)
    assert set(found(whole, {"gpu": 0, "limit": absent, "bus": absent})) == set(MI300X) - limits
    assert found({"gpu": 0, "power": {"socket_power": absent}}, {"gpu": 0}) in ({}, {("gpu_power_watts",): 7})


@pytest.mark.parametrize(
    ("value", "is_number"),
    [
        (94, 94),
        ({"value": 94.5, "unit": "W"}, 94.5),
        ("94 W", 94),
        ("28.5", 28.5),
        ({"value": 3, "unit": "MB"}, 3 << 20),
        ({"value": 3, "unit": "KB"}, 3 << 10),
        ({"value": 2.5, "unit": "GT/s"}, 1),
        ({"value": 32, "unit": "GT/s"}, 5),
        ({"value": 33, "unit": "GT/s"}, None),
        ({"value": "N/A", "unit": "GB/s"}, None),
        ("N/A", None),
        (-1, None),
        (2**64 - 1, None),
        (float("nan"), None),
        (False, None),
        ({"unit": "W"}, None),
    ],
)
def test_a_value_is_a_number_in_each_of_its_forms(value: object, is_number: float | None) -> None:
    assert number(value) == is_number


def test_warnings_before_the_document_are_skipped() -> None:
    warning = "/opt/amdsmi_interface.py:3569: SyntaxWarning: 'return' in a 'finally' block\n  return [{'x': 1}]\n"
    assert parse(f'{warning}WARNING: User is missing groups [render]\n[\n    {{"gpu": 0}}\n]\n') == [{"gpu": 0}]


@pytest.mark.parametrize("output", ["", "amd-smi: error: invalid choice\n", '{"gpu_data": ['])
def test_an_output_without_a_document_is_refused(output: str) -> None:
    with pytest.raises(ValueError, match=r"no JSON|Expecting value"):
        parse(output)


def test_the_uuid_is_the_one_that_pytorch_has() -> None:
    assert identity(captured("mi300x_static")[0], "h0") == {
        "gpu": "0",
        "uuid": "GPU-39663434-3461-3266-6233-306164656230",  # amd-smi list -e: HIP_UUID: GPU-9f444a2fb30adeb0
        "host": "h0",
        "model": "AMD Instinct MI300X",
        "pci_bus_id": "0000:83:00.0",
        "serial": "0x9F444A2FB30ADEB0",
        "board_part_number": "102-G30211-0C",
        "module_id": "6",
        "numa_node": "0",
        "driver_version": "6.16.6",
        "vbios_version": "022.040.003.043.000001",
        "inforom_version": "",
        "source": "amd-smi",
    }
    card = identity(captured("r9700_static")[0] | {"numa": {"node": -1}}, "h0")
    assert set(card) == set(m.GPU_INFO.labels)
    assert (card["numa_node"], card["module_id"], card["vbios_version"]) == ("", "", "00153000")


@pytest.mark.parametrize("serial", ["N/A", "0x0", "", None, "0xXXXXXXXXXXXXXX", "0x12345678901234567"])
def test_without_a_serial_number_the_pci_address_identifies_a_gpu(serial: str | None) -> None:
    entry = captured("mi300x_static")[0] | {"asic": {"market_name": "AMD Instinct MI300A", "asic_serial": serial}}
    labels = identity(entry, "h0")
    assert (labels["uuid"], labels["serial"]) == ("GPU-0000:83:00.0", "")
    (nameless,) = captured("mi210_static")
    assert identity(nameless, "h0")["uuid"] == "GPU-0"
    assert len(identity(nameless, "h0")["driver_version"]) == 64


def test_links_have_states_and_bytes() -> None:
    document = json.loads((CAPTURES / "mi300x_xgmi.json").read_text())
    assert links(document) == {
        0: [
            (m.NVLINK_LINKS, ("active",), 7),
            (m.NVLINK_LINKS, ("inactive",), 0),
            (m.NVLINK_RECEIVE_BYTES_TOTAL, (), 4096 << 10),
            (m.NVLINK_TRANSMIT_BYTES_TOTAL, (), 2048 << 10),
        ],
        1: [
            (m.NVLINK_LINKS, ("active",), 6),
            (m.NVLINK_LINKS, ("inactive",), 1),
            (m.NVLINK_RECEIVE_BYTES_TOTAL, (), 4097 << 10),
            (m.NVLINK_TRANSMIT_BYTES_TOTAL, (), 2049 << 10),
        ],
    }


@pytest.mark.parametrize("status", ["N/A", None, [], ["N/A", "SELF"]])
def test_a_gpu_without_links_has_no_series_of_them(status: object) -> None:
    nothing = {"link_type": "N/A", "links": [{"gpu": 1, "read": "N/A", "write": "N/A"}]}
    document = {"link_status": [{"gpu": 0, "link_status": status}], "xgmi": [{"gpu": 0, "link_metrics": nothing}]}
    assert not any(links(document).values())
    assert links({"link_status": "N/A"}) == {}


def counts(samples: int, **violations: int) -> dict[str, int]:
    zero = dict.fromkeys(("ppt", "prochot", "socket_thermal", "vr_thermal", "hbm_thermal"), 0)
    return {"accumulation_counter": samples} | {f"{key}_accumulated": n for key, n in (zero | violations).items()}


def test_throttling_is_the_share_of_samples_with_a_violation() -> None:
    throttling = Throttling()
    throttling.advance(counts(1000, ppt=400), 10.0)
    assert throttling.seconds == {"sw_power_cap": 0, "sw_thermal_slowdown": 0, "hw_thermal_slowdown": 0}
    throttling.advance(counts(16_000, ppt=6400, vr_thermal=1500, hbm_thermal=3000), 25.0)
    assert throttling.seconds == pytest.approx({"sw_power_cap": 6, "sw_thermal_slowdown": 0, "hw_thermal_slowdown": 3})
    throttling.advance("N/A", 40.0)
    assert throttling.seconds["sw_power_cap"] == pytest.approx(6)
    throttling.advance(counts(50), 55.0)
    assert throttling.seconds["sw_power_cap"] == pytest.approx(6), "the counts began again"
    throttling.advance(counts(100, ppt=60), 70.0)
    assert throttling.seconds["sw_power_cap"] == pytest.approx(21), "no more than all of the time"


def test_a_gpu_that_counts_no_violations_has_no_throttling() -> None:
    throttling = Throttling()
    for at, section in enumerate((None, "N/A", {"accumulation_counter": "N/A", "ppt_accumulated": "N/A"})):
        throttling.advance(section, at)
    assert throttling.seconds == {}
