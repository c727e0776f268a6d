"""The table of NVML fields against the vendor's package, and the sums over links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import (
    NVLINK_EFFECTIVE_BER,
    NVLINK_ERRORS,
    NVLINK_INFO,
    NVLINK_LINK_ERRORS,
    NVLINK_LINK_STATE,
    NVLINK_LINKS,
    NVLINK_RECEIVE,
    NVLINK_SPEED,
    NVLINK_SYMBOL_BER,
    NVLINK_TRANSMIT,
)
from flopwatch.node.collectors.nvml.fields import (
    CLOCK_EVENTS,
    FABRIC_CONFIGURATION_SHIFT,
    FABRIC_FAULTS,
    FAST,
    LINK_ERRORS,
    LINK_STATES,
    LINK_VERSIONS,
    OLD_LINKS,
    PER_LINK,
    SLOW,
    VALUE_MEMBERS,
    Links,
    bit_error_ratio,
    fabric_faults,
    known,
    number,
)

# Every field by its name in nvml.h, without NVML_FI_DEV_.
NAMES = {
    82: "MEMORY_TEMP", 83: "TOTAL_ENERGY_CONSUMPTION", 74: "CLOCKS_EVENT_REASON_SW_POWER_CAP",
    76: "CLOCKS_EVENT_REASON_SYNC_BOOST", 269: "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    270: "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", 271: "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    75: "PERF_POLICY_THERMAL", 77: "PERF_POLICY_BOARD_LIMIT", 78: "PERF_POLICY_LOW_UTILIZATION",
    79: "PERF_POLICY_RELIABILITY", 3: "ECC_SBE_VOL_TOTAL", 4: "ECC_DBE_VOL_TOTAL", 230: "GET_GPU_RECOVERY_ACTION",
    94: "PCIE_REPLAY_COUNTER", 197: "PCIE_COUNT_TX_BYTES", 198: "PCIE_COUNT_RX_BYTES",
    138: "NVLINK_THROUGHPUT_DATA_TX", 139: "NVLINK_THROUGHPUT_DATA_RX", 140: "NVLINK_THROUGHPUT_RAW_TX",
    141: "NVLINK_THROUGHPUT_RAW_RX", 5: "ECC_SBE_AGG_TOTAL", 6: "ECC_DBE_AGG_TOTAL", 142: "REMAPPED_COR",
    143: "REMAPPED_UNC", 144: "REMAPPED_PENDING", 145: "REMAPPED_FAILURE", 29: "RETIRED_SBE", 30: "RETIRED_DBE",
    31: "RETIRED_PENDING", 186: "POWER_INSTANT", 193: "TEMPERATURE_SHUTDOWN_TLIMIT",
    194: "TEMPERATURE_SLOWDOWN_TLIMIT", 195: "TEMPERATURE_MEM_MAX_TLIMIT", 196: "TEMPERATURE_GPU_MAX_TLIMIT",
    173: "PCIE_COUNT_CORRECTABLE_ERRORS", 179: "PCIE_COUNT_NON_FATAL_ERROR", 180: "PCIE_COUNT_FATAL_ERROR",
    95: "PCIE_REPLAY_ROLLOVER_COUNTER", 169: "PCIE_L0_TO_RECOVERY_COUNTER", 174: "PCIE_COUNT_NAKS_RECEIVED",
    175: "PCIE_COUNT_RECEIVER_ERROR", 176: "PCIE_COUNT_BAD_TLP", 177: "PCIE_COUNT_NAKS_SENT",
    178: "PCIE_COUNT_BAD_DLLP", 181: "PCIE_COUNT_UNSUPPORTED_REQ", 182: "PCIE_COUNT_LCRC_ERROR",
    183: "PCIE_COUNT_LANE_ERROR", 52: "NVLINK_REPLAY_ERROR_COUNT_TOTAL", 59: "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    38: "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 45: "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    164: "NVLINK_GET_SPEED", 165: "NVLINK_GET_STATE", 166: "NVLINK_GET_VERSION", 161: "NVLINK_ERROR_DL_REPLAY",
    162: "NVLINK_ERROR_DL_RECOVERY", 163: "NVLINK_ERROR_DL_CRC", 206: "NVLINK_COUNT_MALFORMED_PACKET_ERRORS",
    207: "NVLINK_COUNT_BUFFER_OVERRUN_ERRORS", 208: "NVLINK_COUNT_RCV_ERRORS", 209: "NVLINK_COUNT_RCV_REMOTE_ERRORS",
    210: "NVLINK_COUNT_RCV_GENERAL_ERRORS", 211: "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    212: "NVLINK_COUNT_XMIT_DISCARDS", 214: "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    215: "NVLINK_COUNT_LINK_RECOVERY_EVENTS", 219: "NVLINK_COUNT_EFFECTIVE_ERRORS",
    221: "NVLINK_COUNT_SYMBOL_ERRORS", 202: "NVLINK_COUNT_XMIT_BYTES", 204: "NVLINK_COUNT_RCV_BYTES",
    220: "NVLINK_COUNT_EFFECTIVE_BER", 222: "NVLINK_COUNT_SYMBOL_BER",
}


def value(kind: int, content: float) -> Any:
    """Return an nvmlFieldValue_t of this type."""
    result = pynvml.c_nvmlFieldValue_t(valueType=kind)
    setattr(result.value, VALUE_MEMBERS[kind], content)
    return result


def links(link_numbers: dict[int, list[float | None]]) -> dict[tuple[int, int], float]:
    """Return readings from one list per field, in the order of the links; None could not be read."""
    return {
        (field_id, link): number
        for field_id, numbers in link_numbers.items() for link, number in enumerate(numbers) if number is not None
    }


def test_field_numbers_are_those_of_the_vendors_package() -> None:
    assert {*NAMES} == {*PER_LINK, *(field.id for table in (FAST, SLOW, OLD_LINKS) for field in table)}
    assert {number: getattr(pynvml, f"NVML_FI_DEV_{name}") for number, name in NAMES.items()} == {n: n for n in NAMES}


def test_event_state_and_mask_numbers_are_those_of_the_vendors_package() -> None:
    assert list(CLOCK_EVENTS) == [
        pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonSyncBoost, pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksEventReasonDisplayClockSetting,
    ]
    assert list(LINK_STATES) == [
        pynvml.NVML_NVLINK_STATE_INACTIVE, pynvml.NVML_NVLINK_STATE_ACTIVE, pynvml.NVML_NVLINK_STATE_SLEEP,
        pynvml.NVML_NVLINK_STATE_ACTIVE_TRAFFIC_DISABLED,
    ]
    assert LINK_VERSIONS[pynvml.NVML_NVLINK_VERSION_4_0] == "4.0"
    assert LINK_VERSIONS[pynvml.NVML_NVLINK_VERSION_5_0] == "5.0"
    assert list(FABRIC_FAULTS) == [
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
    ]
    assert pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION == FABRIC_CONFIGURATION_SHIFT


def test_all_ones_and_not_a_number_are_not_available_and_zero_is_a_number() -> None:
    numbers = (0, 1, 2**32 - 1, 2**64 - 1, 2**32, float("nan"))
    assert [known(number) for number in numbers] == [True, True, False, False, True, False]


@pytest.mark.parametrize(("kind", "content", "signed", "expected"), [
    (pynvml.NVML_VALUE_TYPE_DOUBLE, 1.5, False, 1.5),
    (pynvml.NVML_VALUE_TYPE_DOUBLE, float("nan"), False, None),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 41, False, 41),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 1, False, None),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 8, True, -8),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 8, False, 2**32 - 8),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**64 - 1, False, None),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**63, True, 2**63),
    (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, -2, False, -2),
    (pynvml.NVML_VALUE_TYPE_SIGNED_INT, -1, True, -1),
    (pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT, 7, False, 7),
])
def test_a_number_is_read_from_the_member_its_type_names(
    kind: int, content: float, signed: bool, expected: float | None
) -> None:
    assert number(value(kind, content), signed) == expected


def test_a_type_this_release_does_not_know_is_no_number() -> None:
    assert number(SimpleNamespace(valueType=7, value=None)) is None


@pytest.mark.parametrize(("raw", "ratio"), [
    (0x0F_FF, 0.0), (0x01_0C, 1e-12), (0x0F_08, 15e-8), (0x00_05, 0.0), (0xFFFFF1_07, 1e-7),
])
def test_a_bit_error_ratio_is_four_bits_of_mantissa_over_eight_of_exponent(raw: int, ratio: float) -> None:
    assert bit_error_ratio(raw) == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(("mask", "faults"), [
    (0, {}),
    (0b10, {"degraded_bandwidth": False}),
    (0b01_00_10_01, {"degraded_bandwidth": True, "route_recovery": False, "access_timeout": True}),
    (0x1_00, {"incorrect_configuration": False}),
    (0x5_10, {"route_unhealthy": True, "incorrect_configuration": True}),
])
def test_the_fabric_tells_only_of_faults_it_knows(mask: int, faults: dict[str, bool]) -> None:
    assert fabric_faults(mask) == faults


def test_healthy_links_of_nvlink_4_are_counted_and_summed() -> None:
    seen = Links().take(links({
        165: [1, 1, 1], 164: [26562, 26562, 26562], 166: [6, 6, 6], 161: [0, 0, 0], 162: [0, 0, 0], 163: [0, 0, 0],
    }))
    assert seen == [
        (NVLINK_LINKS, ("inactive",), 0), (NVLINK_LINKS, ("active",), 3), (NVLINK_SPEED, (), 26562),
        (NVLINK_INFO, ("4.0",), 1), (NVLINK_ERRORS, ("replay",), 0), (NVLINK_ERRORS, ("recovery",), 0),
        (NVLINK_ERRORS, ("crc",), 0),
    ]


def test_a_link_that_fell_or_had_errors_is_a_series_of_its_own_and_stays_one() -> None:
    memory = Links()
    first = memory.take(links({165: [1, 0, 3], 164: [26562, 0, 20000], 163: [0, 5, 0]}))
    assert first == [
        (NVLINK_LINKS, ("inactive",), 1), (NVLINK_LINKS, ("active",), 1), (NVLINK_LINKS, ("disabled",), 1),
        (NVLINK_LINK_STATE, ("1",), 0), (NVLINK_LINK_STATE, ("2",), 3), (NVLINK_SPEED, (), 26562),
        (NVLINK_ERRORS, ("crc",), 5), (NVLINK_LINK_ERRORS, ("1", "crc"), 5),
    ]
    then = memory.take(links({165: [1, 1, 1], 163: [0, 0, 0]}))
    assert then == [
        (NVLINK_LINKS, ("inactive",), 0), (NVLINK_LINKS, ("active",), 3),
        (NVLINK_LINK_STATE, ("1",), 1), (NVLINK_LINK_STATE, ("2",), 1),
        (NVLINK_ERRORS, ("crc",), 0), (NVLINK_LINK_ERRORS, ("1", "crc"), 0),
    ]


def test_links_of_a_gpu_that_uses_none_are_not_called_fallen() -> None:
    memory = Links()
    none = [(NVLINK_LINKS, ("inactive",), 2), (NVLINK_LINKS, ("active",), 0)]
    assert memory.take(links({165: [0, 0]})) == none
    memory.take(links({165: [1, 1]}))
    assert memory.take(links({165: [0, 0]})) == [*none, (NVLINK_LINK_STATE, ("0",), 0), (NVLINK_LINK_STATE, ("1",), 0)]


def test_nvlink_5_adds_bytes_the_worst_ratio_and_its_own_errors() -> None:
    seen = Links().take(links({
        166: [7, 7], 202: [1000, 2000], 204: [30, 40], 215: [1, 1], 214: [0, 0], 221: [3, 0],
        220: [0x0F_FF, 0x01_0C], 222: [0x0F_FF, 0x0F_FF],
    }))
    assert seen == [
        (NVLINK_INFO, ("5.0",), 1),
        (NVLINK_ERRORS, ("recovery",), 2), (NVLINK_LINK_ERRORS, ("0", "recovery"), 1),
        (NVLINK_LINK_ERRORS, ("1", "recovery"), 1), (NVLINK_ERRORS, ("recovery_failed",), 0),
        (NVLINK_ERRORS, ("symbol",), 3), (NVLINK_LINK_ERRORS, ("0", "symbol"), 3),
        (NVLINK_TRANSMIT, (), 3000), (NVLINK_RECEIVE, (), 70),
        (NVLINK_EFFECTIVE_BER, (), 1e-12), (NVLINK_SYMBOL_BER, (), 0.0),
    ]


def test_a_link_that_cannot_be_read_takes_nothing_out_of_the_sum_until_the_gpu_is_reset() -> None:
    memory = Links()

    def crc(*counts: float | None) -> list[float]:
        return [n for row, labels, n in memory.take(links({163: list(counts)})) if row is NVLINK_ERRORS]

    sums = [crc(4, 5), crc(4, None), crc(6, None), crc(7, 9), crc(0, None), crc(1, 2)]
    assert sums == [[9], [9], [11], [16], [0], [3]]


@given(st.lists(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=6, max_size=6), max_size=20))
def test_no_pattern_of_unreadable_links_lets_a_sum_of_rising_counters_fall(
    reads: list[list[tuple[int, bool]]],
) -> None:
    memory, counters, before = Links(), [0] * 6, dict.fromkeys(LINK_ERRORS.values(), 0.0)
    for read in reads:
        counters = [counter + more for counter, (more, _) in zip(counters, read, strict=True)]
        readable = [counter if seen else None for counter, (_, seen) in zip(counters, read, strict=True)]
        for row, (error, *_), total in memory.take(links({161: list(readable), 163: list(readable)})):
            if row is NVLINK_ERRORS:
                assert before[error] <= total <= sum(counters)
                before[error] = total
