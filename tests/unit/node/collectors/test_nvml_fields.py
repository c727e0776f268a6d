"""The table of NVML fields against the vendor's package, and the sums over links."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import (
    NVLINK_EFFECTIVE_BIT_ERROR_RATIO,
    NVLINK_ERRORS_TOTAL,
    NVLINK_INFO,
    NVLINK_LINK_ERRORS_TOTAL,
    NVLINK_LINK_STATE_ID,
    NVLINK_LINKS,
    NVLINK_RAW_BIT_ERROR_RATIO,
    NVLINK_RECEIVE_BYTES_TOTAL,
    NVLINK_SPEED_BYTES_PER_SECOND,
    NVLINK_SYMBOL_BIT_ERROR_RATIO,
    NVLINK_TRANSMIT_BYTES_TOTAL,
)
from flopwatch.node.collectors.nvml.fields import (
    CLOCK_EVENTS,
    ENTRY,
    FABRIC_CONFIGURATION_SHIFT,
    FABRIC_FAULTS,
    FAST,
    FAST_LINKS,
    LINK_COUNT,
    LINK_ERRORS,
    LINK_SPEED,
    LINK_STATE,
    LINK_STATES,
    LINK_VERSIONS,
    MODULE,
    OLD_LINK_SPEED,
    OLD_LINKS,
    PER_LINK,
    SLOW,
    VALUE_MEMBERS,
    Entry,
    Links,
    NvmlField,
    bit_error_ratio,
    fabric_faults,
    known,
    number,
)

# Every field by its name in nvml.h, without NVML_FI_DEV_.
NAMES = {
    301: "REMAPPED_ROWS_COR_INACTIVE",
    302: "REMAPPED_ROWS_UNC_INACTIVE",
    303: "ACTIVE_BANK_REMAPPINGS",
    304: "INACTIVE_BANK_REMAPPINGS",
    305: "BANK_REMAPPER_HISTOGRAM_MAX",
    306: "BANK_REMAPPER_HISTOGRAM_NONE",
    307: "PENDING_BANK_REMAPPING",
    294: "NVLINK_PLR_XMIT_BLOCKS",
    295: "NVLINK_PLR_XMIT_RETRY_BLOCKS",
    82: "MEMORY_TEMP",
    83: "TOTAL_ENERGY_CONSUMPTION",
    74: "CLOCKS_EVENT_REASON_SW_POWER_CAP",
    76: "CLOCKS_EVENT_REASON_SYNC_BOOST",
    269: "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    270: "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    271: "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    75: "PERF_POLICY_THERMAL",
    77: "PERF_POLICY_BOARD_LIMIT",
    78: "PERF_POLICY_LOW_UTILIZATION",
    79: "PERF_POLICY_RELIABILITY",
    3: "ECC_SBE_VOL_TOTAL",
    4: "ECC_DBE_VOL_TOTAL",
    230: "GET_GPU_RECOVERY_ACTION",
    94: "PCIE_REPLAY_COUNTER",
    138: "NVLINK_THROUGHPUT_DATA_TX",
    139: "NVLINK_THROUGHPUT_DATA_RX",
    140: "NVLINK_THROUGHPUT_RAW_TX",
    141: "NVLINK_THROUGHPUT_RAW_RX",
    5: "ECC_SBE_AGG_TOTAL",
    6: "ECC_DBE_AGG_TOTAL",
    142: "REMAPPED_COR",
    143: "REMAPPED_UNC",
    144: "REMAPPED_PENDING",
    145: "REMAPPED_FAILURE",
    29: "RETIRED_SBE",
    30: "RETIRED_DBE",
    31: "RETIRED_PENDING",
    186: "POWER_INSTANT",
    193: "TEMPERATURE_SHUTDOWN_TLIMIT",
    194: "TEMPERATURE_SLOWDOWN_TLIMIT",
    195: "TEMPERATURE_MEM_MAX_TLIMIT",
    196: "TEMPERATURE_GPU_MAX_TLIMIT",
    173: "PCIE_COUNT_CORRECTABLE_ERRORS",
    179: "PCIE_COUNT_NON_FATAL_ERROR",
    180: "PCIE_COUNT_FATAL_ERROR",
    95: "PCIE_REPLAY_ROLLOVER_COUNTER",
    169: "PCIE_L0_TO_RECOVERY_COUNTER",
    174: "PCIE_COUNT_NAKS_RECEIVED",
    175: "PCIE_COUNT_RECEIVER_ERROR",
    176: "PCIE_COUNT_BAD_TLP",
    177: "PCIE_COUNT_NAKS_SENT",
    178: "PCIE_COUNT_BAD_DLLP",
    181: "PCIE_COUNT_UNSUPPORTED_REQ",
    182: "PCIE_COUNT_LCRC_ERROR",
    183: "PCIE_COUNT_LANE_ERROR",
    52: "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    59: "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    38: "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    45: "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    164: "NVLINK_GET_SPEED",
    165: "NVLINK_GET_STATE",
    166: "NVLINK_GET_VERSION",
    161: "NVLINK_ERROR_DL_REPLAY",
    162: "NVLINK_ERROR_DL_RECOVERY",
    163: "NVLINK_ERROR_DL_CRC",
    206: "NVLINK_COUNT_MALFORMED_PACKET_ERRORS",
    207: "NVLINK_COUNT_BUFFER_OVERRUN_ERRORS",
    208: "NVLINK_COUNT_RCV_ERRORS",
    209: "NVLINK_COUNT_RCV_REMOTE_ERRORS",
    210: "NVLINK_COUNT_RCV_GENERAL_ERRORS",
    211: "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    212: "NVLINK_COUNT_XMIT_DISCARDS",
    214: "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    215: "NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    219: "NVLINK_COUNT_EFFECTIVE_ERRORS",
    221: "NVLINK_COUNT_SYMBOL_ERRORS",
    202: "NVLINK_COUNT_XMIT_BYTES",
    204: "NVLINK_COUNT_RCV_BYTES",
    220: "NVLINK_COUNT_EFFECTIVE_BER",
    222: "NVLINK_COUNT_SYMBOL_BER",
    293: "NVLINK_COUNT_RAW_BER_V2",
}
# What each of them becomes: the row, and its label after (gpu, uuid).
SERIES = {
    "REMAPPED_ROWS_COR_INACTIVE": "gpu_remapped_rows_inactive corrected",
    "REMAPPED_ROWS_UNC_INACTIVE": "gpu_remapped_rows_inactive uncorrected",
    "ACTIVE_BANK_REMAPPINGS": "gpu_bank_remappings active",
    "INACTIVE_BANK_REMAPPINGS": "gpu_bank_remappings inactive",
    "PENDING_BANK_REMAPPING": "gpu_bank_remappings pending",
    "BANK_REMAPPER_HISTOGRAM_MAX": "gpu_bank_remap_groups max",
    "BANK_REMAPPER_HISTOGRAM_NONE": "gpu_bank_remap_groups none",
    "NVLINK_PLR_XMIT_BLOCKS": "nvlink_transmit_blocks_total",
    "NVLINK_PLR_XMIT_RETRY_BLOCKS": "nvlink_transmit_retried_blocks_total",
    "MEMORY_TEMP": "gpu_memory_temperature_celsius",
    "TOTAL_ENERGY_CONSUMPTION": "gpu_energy_joules_total",
    "CLOCKS_EVENT_REASON_SW_POWER_CAP": "gpu_clock_event_seconds_total sw_power_cap",
    "CLOCKS_EVENT_REASON_SYNC_BOOST": "gpu_clock_event_seconds_total sync_boost",
    "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": "gpu_clock_event_seconds_total sw_thermal_slowdown",
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": "gpu_clock_event_seconds_total hw_thermal_slowdown",
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": "gpu_clock_event_seconds_total hw_power_brake_slowdown",
    "PERF_POLICY_THERMAL": "gpu_clock_event_seconds_total thermal",
    "PERF_POLICY_BOARD_LIMIT": "gpu_clock_event_seconds_total board_limit",
    "PERF_POLICY_LOW_UTILIZATION": "gpu_clock_event_seconds_total low_utilization",
    "PERF_POLICY_RELIABILITY": "gpu_clock_event_seconds_total reliability",
    "ECC_SBE_VOL_TOTAL": "gpu_ecc_errors_total corrected",
    "ECC_DBE_VOL_TOTAL": "gpu_ecc_errors_total uncorrected",
    "ECC_SBE_AGG_TOTAL": "gpu_ecc_lifetime_errors_total corrected",
    "ECC_DBE_AGG_TOTAL": "gpu_ecc_lifetime_errors_total uncorrected",
    "GET_GPU_RECOVERY_ACTION": "gpu_recovery_action_id",
    "PCIE_REPLAY_COUNTER": "gpu_pcie_replays_total",
    "NVLINK_THROUGHPUT_DATA_TX": "nvlink_transmit_bytes_total",
    "NVLINK_THROUGHPUT_DATA_RX": "nvlink_receive_bytes_total",
    "NVLINK_THROUGHPUT_RAW_TX": "nvlink_transmit_raw_bytes_total",
    "NVLINK_THROUGHPUT_RAW_RX": "nvlink_receive_raw_bytes_total",
    "REMAPPED_COR": "gpu_remapped_rows_total corrected",
    "REMAPPED_UNC": "gpu_remapped_rows_total uncorrected",
    "REMAPPED_PENDING": "gpu_row_remap_pending",
    "REMAPPED_FAILURE": "gpu_row_remap_failure",
    "RETIRED_SBE": "gpu_retired_pages_total corrected",
    "RETIRED_DBE": "gpu_retired_pages_total uncorrected",
    "RETIRED_PENDING": "gpu_retired_pages_pending",
    "POWER_INSTANT": "gpu_module_power_watts",
    "TEMPERATURE_SHUTDOWN_TLIMIT": "gpu_temperature_limit_margin_celsius shutdown",
    "TEMPERATURE_SLOWDOWN_TLIMIT": "gpu_temperature_limit_margin_celsius slowdown",
    "TEMPERATURE_MEM_MAX_TLIMIT": "gpu_temperature_limit_margin_celsius memory_max",
    "TEMPERATURE_GPU_MAX_TLIMIT": "gpu_temperature_limit_margin_celsius gpu_max",
    "PCIE_COUNT_CORRECTABLE_ERRORS": "gpu_pcie_errors_total correctable",
    "PCIE_COUNT_NON_FATAL_ERROR": "gpu_pcie_errors_total non_fatal",
    "PCIE_COUNT_FATAL_ERROR": "gpu_pcie_errors_total fatal",
    "PCIE_REPLAY_ROLLOVER_COUNTER": "gpu_pcie_errors_total replay_rollover",
    "PCIE_L0_TO_RECOVERY_COUNTER": "gpu_pcie_errors_total l0_to_recovery",
    "PCIE_COUNT_NAKS_RECEIVED": "gpu_pcie_errors_total nak_received",
    "PCIE_COUNT_RECEIVER_ERROR": "gpu_pcie_errors_total receiver",
    "PCIE_COUNT_BAD_TLP": "gpu_pcie_errors_total bad_tlp",
    "PCIE_COUNT_NAKS_SENT": "gpu_pcie_errors_total nak_sent",
    "PCIE_COUNT_BAD_DLLP": "gpu_pcie_errors_total bad_dllp",
    "PCIE_COUNT_UNSUPPORTED_REQ": "gpu_pcie_errors_total unsupported_request",
    "PCIE_COUNT_LCRC_ERROR": "gpu_pcie_errors_total lcrc",
    "PCIE_COUNT_LANE_ERROR": "gpu_pcie_errors_total lane",
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": "nvlink_errors_total replay",
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "nvlink_errors_total recovery",
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "nvlink_errors_total crc",
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "nvlink_errors_total crc_data",
    "NVLINK_ERROR_DL_REPLAY": "nvlink_errors_total replay",
    "NVLINK_ERROR_DL_CRC": "nvlink_errors_total crc",
    "NVLINK_ERROR_DL_RECOVERY": "nvlink_errors_total recovery",
    "NVLINK_COUNT_MALFORMED_PACKET_ERRORS": "nvlink_errors_total malformed_packet",
    "NVLINK_COUNT_BUFFER_OVERRUN_ERRORS": "nvlink_errors_total buffer_overrun",
    "NVLINK_COUNT_RCV_ERRORS": "nvlink_errors_total receive",
    "NVLINK_COUNT_RCV_REMOTE_ERRORS": "nvlink_errors_total remote",
    "NVLINK_COUNT_RCV_GENERAL_ERRORS": "nvlink_errors_total general",
    "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS": "nvlink_errors_total local_integrity",
    "NVLINK_COUNT_XMIT_DISCARDS": "nvlink_errors_total transmit_discard",
    "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": "nvlink_errors_total recovery_failed",
    "NVLINK_COUNT_LINK_RECOVERY_EVENTS": "nvlink_errors_total recovery",
    "NVLINK_COUNT_EFFECTIVE_ERRORS": "nvlink_errors_total effective",
    "NVLINK_COUNT_SYMBOL_ERRORS": "nvlink_errors_total symbol",
    "NVLINK_COUNT_XMIT_BYTES": "nvlink_transmit_bytes_total",
    "NVLINK_COUNT_RCV_BYTES": "nvlink_receive_bytes_total",
    "NVLINK_COUNT_RAW_BER_V2": "nvlink_raw_bit_error_ratio",
    "NVLINK_COUNT_EFFECTIVE_BER": "nvlink_effective_bit_error_ratio",
    "NVLINK_COUNT_SYMBOL_BER": "nvlink_symbol_bit_error_ratio",
    "NVLINK_GET_SPEED": "nvlink_speed_bytes_per_second",
    "NVLINK_GET_STATE": "nvlink_links",
    "NVLINK_GET_VERSION": "nvlink_info",
}


def value(kind: int, content: float) -> Entry:
    """Return the entry of an nvmlFieldValue_t of this type."""
    result = pynvml.c_nvmlFieldValue_t(valueType=kind)
    setattr(result.value, VALUE_MEMBERS[kind], content)
    return entry(result)


def entry(result: Any) -> Entry:
    """Return the entry of an nvmlFieldValue_t."""
    [only] = ENTRY.iter_unpack(result)
    return only


def links(link_numbers: dict[int, list[float | None]]) -> dict[tuple[int, int], float]:
    """Return readings from one list per field, in the order of the links; None could not be read."""
    return {
        (field_id, link): number
        for field_id, numbers in link_numbers.items()
        for link, number in enumerate(numbers)
        if number is not None
    }


def test_field_numbers_are_those_of_the_vendors_package() -> None:
    assert {*NAMES} == {*PER_LINK, *(field.id for table in (FAST, FAST_LINKS, SLOW, OLD_LINKS) for field in table)}
    assert {number: getattr(pynvml, f"NVML_FI_DEV_{name}") for number, name in NAMES.items()} == {n: n for n in NAMES}


def test_every_field_becomes_the_series_of_its_name() -> None:
    series_of = {
        NAMES[field.id]: " ".join((str(field.row), *field.labels))
        for table in (FAST, FAST_LINKS, SLOW, OLD_LINKS)
        for field in table
    }
    per_link: dict[int, dict[tuple[int, int], float]] = {
        field_id: {(field_id, 0): 1} for field_id in PER_LINK if field_id != LINK_SPEED
    }
    per_link[LINK_SPEED] = {(LINK_STATE, 0): 1, (LINK_SPEED, 0): 5}
    for field_id, reading in per_link.items():
        found = {" ".join((str(row), *labels)) for row, labels, _ in Links().take(reading)}
        named = SERIES[NAMES[field_id]]
        series_of[NAMES[field_id]] = named if any(f"{one} ".startswith(f"{named} ") for one in found) else str(found)
    assert series_of == SERIES
    assert NvmlField(pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, NVLINK_SPEED_BYTES_PER_SECOND) == OLD_LINK_SPEED
    assert (pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0) == LINK_COUNT
    assert pynvml.NVML_POWER_SCOPE_MODULE == MODULE


def test_event_state_and_mask_numbers_are_those_of_the_vendors_package() -> None:
    assert list(CLOCK_EVENTS) == [
        pynvml.nvmlClocksEventReasonGpuIdle,
        pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        pynvml.nvmlClocksEventReasonSwPowerCap,
        pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonSyncBoost,
        pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksEventReasonDisplayClockSetting,
    ]
    assert list(LINK_STATES) == [
        pynvml.NVML_NVLINK_STATE_INACTIVE,
        pynvml.NVML_NVLINK_STATE_ACTIVE,
        pynvml.NVML_NVLINK_STATE_SLEEP,
        pynvml.NVML_NVLINK_STATE_ACTIVE_TRAFFIC_DISABLED,
    ]
    assert LINK_VERSIONS[pynvml.NVML_NVLINK_VERSION_4_0] == "4.0"
    assert LINK_VERSIONS[pynvml.NVML_NVLINK_VERSION_5_0] == "5.0"
    assert list(FABRIC_FAULTS) == [
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_PARTITION_ASSIGNED,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_GFM_STATE,
    ]
    assert [fault for _, fault in FABRIC_FAULTS.values()] == [
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_TRUE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_TRUE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_PARTITION_ASSIGNED_FALSE,
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_GFM_STATE_DISCONNECTED,
    ]
    assert pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION == FABRIC_CONFIGURATION_SHIFT


def test_all_ones_and_not_a_number_are_not_available_and_zero_is_a_number() -> None:
    numbers = (0, 1, 2**32 - 1, 2**64 - 1, 2**32, float("nan"))
    assert [known(number) for number in numbers] == [True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("kind", "content", "signed", "expected"),
    [
        (pynvml.NVML_VALUE_TYPE_DOUBLE, 1.5, False, 1.5),
        (pynvml.NVML_VALUE_TYPE_DOUBLE, float("nan"), False, None),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 41, False, 41),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 1, False, None),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 8, True, -8),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 8, False, 2**32 - 8),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**64 - 1, False, None),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 1, True, -1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 95, True, 95),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**32 - 1, True, -1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**64 - 1, True, -1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**63, False, 2**63),
        (pynvml.NVML_VALUE_TYPE_DOUBLE, float("nan"), True, None),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, -2, False, -2),
        (pynvml.NVML_VALUE_TYPE_SIGNED_INT, -1, True, -1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT, 7, False, 7),
    ],
)
def test_a_number_is_read_from_the_member_its_type_names(
    kind: int, content: float, signed: bool, expected: float | None
) -> None:
    assert number(value(kind, content), signed) == expected


@pytest.mark.parametrize(
    ("content", "timestamp", "signed", "expected"),
    [
        (3, 1_700_000_000_000_000, False, 3),  # one uncorrectable error was 1.5e-323
        (55, 0, False, 55),  # field 82 of R545
        (5 * 10**15, 1, False, 5 * 10**15),
        (0, 1, False, 0),
        (0, 0, False, None),  # an entry that NVML never wrote
        (2**32 - 1, 1, False, None),
        (2**64 - 1, 1, False, None),
        (2**32 - 8, 1, True, -8),
        (2**64 - 8, 1, True, -8),
        (2**64 - 8, 1, False, None),
    ],
)
def test_an_integer_that_the_driver_declares_as_a_double_is_read_as_an_integer(
    content: int, timestamp: int, signed: bool, expected: float | None
) -> None:
    result = pynvml.c_nvmlFieldValue_t(valueType=pynvml.NVML_VALUE_TYPE_DOUBLE, timestamp=timestamp)
    result.value.ullVal = content
    assert number(entry(result), signed) == expected


def test_infinity_is_no_number() -> None:
    assert number(value(pynvml.NVML_VALUE_TYPE_DOUBLE, float("inf"))) is None


def test_a_type_this_release_does_not_know_is_no_number() -> None:
    assert number(entry(pynvml.c_nvmlFieldValue_t(valueType=7))) is None


@pytest.mark.parametrize(
    ("raw", "ratio"), [(0x0F_FF, 0.0), (0x01_0C, 1e-12), (0x0F_08, 15e-8), (0x00_05, 0.0), (0xFFFFF1_07, 1e-7)]
)
def test_a_bit_error_ratio_is_four_bits_of_mantissa_over_eight_of_exponent(raw: int, ratio: float) -> None:
    assert bit_error_ratio(raw) == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(
    ("mask", "faults"),
    [
        (0, {}),
        (0b10, {"degraded_bandwidth": False}),
        (0b01_00_10_01, {"degraded_bandwidth": True, "route_recovery": False, "access_timeout": True}),
        (0x1_00, {"incorrect_configuration": False}),
        (0x5_10, {"route_unhealthy": True, "incorrect_configuration": True}),
        (
            0x51AA,
            dict.fromkeys(
                (
                    "degraded_bandwidth",
                    "route_recovery",
                    "route_unhealthy",
                    "access_timeout",
                    "incorrect_configuration",
                    "no_partition",
                    "manager_disconnected",
                ),
                False,
            ),
        ),
        (0xA000, {"no_partition": True, "manager_disconnected": True}),
    ],
)
def test_only_known_faults_of_the_fabric_are_reported(mask: int, faults: dict[str, bool]) -> None:
    assert fabric_faults(mask) == faults


def test_healthy_links_of_nvlink_4_are_counted_and_summed() -> None:
    seen = Links().take(
        links(
            {165: [1, 1, 1], 164: [26562, 26562, 26562], 166: [6, 6, 6], 161: [0, 0, 0], 162: [0, 0, 0], 163: [0, 0, 0]}
        )
    )
    assert seen == [
        (NVLINK_LINKS, ("inactive",), 0),
        (NVLINK_LINKS, ("active",), 3),
        (NVLINK_SPEED_BYTES_PER_SECOND, (), 26562),
        (NVLINK_INFO, ("4.0",), 1),
        (NVLINK_ERRORS_TOTAL, ("replay",), 0),
        (NVLINK_ERRORS_TOTAL, ("recovery",), 0),
        (NVLINK_ERRORS_TOTAL, ("crc",), 0),
    ]


def test_a_link_that_fell_or_had_errors_is_a_series_of_its_own_and_stays_one() -> None:
    memory = Links()
    memory.take(links({165: [1, 1, 2]}))
    first = memory.take(links({165: [1, 0, 3], 164: [26562, 0, 20000], 163: [0, 5, 0]}))
    assert first == [
        (NVLINK_LINKS, ("inactive",), 1),
        (NVLINK_LINKS, ("active",), 1),
        (NVLINK_LINKS, ("disabled",), 1),
        (NVLINK_LINK_STATE_ID, ("1",), 0),
        (NVLINK_LINK_STATE_ID, ("2",), 3),
        (NVLINK_SPEED_BYTES_PER_SECOND, (), 26562),
        (NVLINK_ERRORS_TOTAL, ("crc",), 5),
        (NVLINK_LINK_ERRORS_TOTAL, ("1", "crc"), 5),
    ]
    then = memory.take(links({165: [1, 1, 1], 163: [0, 0, 0]}))
    assert then == [
        (NVLINK_LINKS, ("inactive",), 0),
        (NVLINK_LINKS, ("active",), 3),
        (NVLINK_LINK_STATE_ID, ("1",), 1),
        (NVLINK_LINK_STATE_ID, ("2",), 1),
        (NVLINK_ERRORS_TOTAL, ("crc",), 0),
        (NVLINK_LINK_ERRORS_TOTAL, ("1", "crc"), 0),
    ]


def test_links_of_a_smaller_bridge_and_sleeping_ones_are_not_called_fallen() -> None:
    memory = Links(once_up={3})
    states = memory.take(links({165: [1, 1, 0, 0], 163: [0, 0, 0, 0]}))
    assert [value for value in states if value[0] is NVLINK_LINK_STATE_ID] == [(NVLINK_LINK_STATE_ID, ("3",), 0)]
    states = memory.take(links({165: [1, 2, 0, 2]}))
    assert [value for value in states if value[0] is NVLINK_LINK_STATE_ID] == [(NVLINK_LINK_STATE_ID, ("3",), 2)]


def test_links_of_a_gpu_that_uses_none_are_not_called_fallen() -> None:
    memory = Links()
    none = [(NVLINK_LINKS, ("inactive",), 2), (NVLINK_LINKS, ("active",), 0)]
    assert memory.take(links({165: [0, 0]})) == none
    memory.take(links({165: [1, 1]}))
    assert memory.take(links({165: [0, 0]})) == [
        *none,
        (NVLINK_LINK_STATE_ID, ("0",), 0),
        (NVLINK_LINK_STATE_ID, ("1",), 0),
    ]


def test_nvlink_5_adds_bytes_the_worst_ratio_and_its_own_errors() -> None:
    seen = Links().take(
        links(
            {
                166: [7, 7],
                202: [1000, 2000],
                204: [30, 40],
                215: [1, 1],
                214: [0, 0],
                221: [3, 0],
                220: [0x0F_FF, 0x01_0C],
                222: [0x0F_FF, 0x0F_FF],
                293: [0x02_06, 0x0F_08],
            }
        )
    )
    assert seen == [
        (NVLINK_INFO, ("5.0",), 1),
        (NVLINK_ERRORS_TOTAL, ("recovery",), 2),
        (NVLINK_LINK_ERRORS_TOTAL, ("0", "recovery"), 1),
        (NVLINK_LINK_ERRORS_TOTAL, ("1", "recovery"), 1),
        (NVLINK_ERRORS_TOTAL, ("recovery_failed",), 0),
        (NVLINK_ERRORS_TOTAL, ("symbol",), 3),
        (NVLINK_LINK_ERRORS_TOTAL, ("0", "symbol"), 3),
        (NVLINK_TRANSMIT_BYTES_TOTAL, (), 3000),
        (NVLINK_RECEIVE_BYTES_TOTAL, (), 70),
        (NVLINK_RAW_BIT_ERROR_RATIO, (), pytest.approx(2e-6)),
        (NVLINK_EFFECTIVE_BIT_ERROR_RATIO, (), 1e-12),
        (NVLINK_SYMBOL_BIT_ERROR_RATIO, (), 0.0),
    ]


def test_a_link_that_cannot_be_read_takes_nothing_out_of_the_sum_until_the_gpu_is_reset() -> None:
    memory = Links()

    def crc(*counts: float | None) -> list[float]:
        return [n for row, labels, n in memory.take(links({163: list(counts)})) if row is NVLINK_ERRORS_TOTAL]

    sums = [crc(4, 5), crc(4, None), crc(6, None), crc(7, 9), crc(0, None), crc(1, 2)]
    assert sums == [[9], [9], [11], [16], [0], [3]]


@given(st.lists(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=6, max_size=6), max_size=20))
def test_no_pattern_of_unreadable_links_lets_a_sum_of_rising_counters_fall(reads: list[list[tuple[int, bool]]]) -> None:
    memory, counters, before = Links(), [0] * 6, dict.fromkeys(LINK_ERRORS.values(), 0.0)
    for read in reads:
        counters = [counter + more for counter, (more, _) in zip(counters, read, strict=True)]
        readable = [counter if seen else None for counter, (_, seen) in zip(counters, read, strict=True)]
        for row, (error, *_), total in memory.take(links({161: list(readable), 163: list(readable)})):
            if row is NVLINK_ERRORS_TOTAL:
                assert before[error] <= total <= sum(counters)
                before[error] = total
