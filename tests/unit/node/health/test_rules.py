"""The node verdict: a healthy node, each way in which it can be unfit, and what is expected of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.generate import health_rules
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.xid import read_table
from flopwatch.node.health.expectations import Expectations, Ports, learnt_file, load, parse
from flopwatch.node.health.rules import ACTIONS, BAD, DEGRADED, OK, RISES, RULES, UNKNOWN
from flopwatch.node.health.searches import critical_xids
from flopwatch.node.health.verdict import Reason, Verdict, learn
from flopwatch.settings import SettingsError
from tests.support import ROOT
from tests.support.readings import Series, gpu, h100, info, port, samples

NOW, BOOTED = 1_700_000_000.0, 1_699_900_000.0
GPU_ROWS = [row for row in m.all_metrics() if row.domain in ("gpu", "nvlink")]
H100 = Expectations(8, "NVIDIA H100 80GB HBM3", 18, 16, 5, {"compute": Ports(8, 400)})


def reasons(series: Series, expected: Expectations = H100) -> list[tuple[str, str, str, str]]:
    """Return reason, part, verdict and action of what is wrong."""
    return [reason[:4] for reason in judge(series, expected)]


def judge(series: Series, expected: Expectations = H100) -> tuple[Reason, ...]:
    return Verdict(expected, lambda: NOW, lambda: BOOTED).judge(samples(series)).reasons


def without(series: Series, *rows: Metric) -> Series:
    return {key: value for key, value in series.items() if key[0] not in rows}


def test_a_healthy_node_is_ok_whatever_is_expected_of_it() -> None:
    for expected in (H100, Expectations()):
        judgement = Verdict(expected, lambda: NOW, lambda: BOOTED).judge(samples(h100()))
        assert (judgement.verdict, judgement.reasons, judgement.gpus, judgement.ports) == (OK, (), 8, 9)


def test_a_node_without_anything_is_ok_where_nothing_is_expected() -> None:
    assert judge({}, Expectations()) == ()


GPU3, PORT3 = "gpu 3", "port mlx5_3/1"
SHAPES = sorted((ROOT / "contrib" / "shapes").glob("*.json"))


@pytest.mark.parametrize(
    ("row", "extra", "value", "reason", "verdict", "action"),
    [
        (m.GPU_PRESENT, (), 0, "gpu_missing", BAD, "reboot_then_reseat"),
        (m.GPU_READABLE, (), 0, "gpu_unreadable", UNKNOWN, "check_exporter"),
        (m.GPU_RECOVERY_ACTION_ID, (), 1, "recovery_action", BAD, "reset_gpu"),
        (m.GPU_RECOVERY_ACTION_ID, (), 2, "recovery_action", BAD, "reboot_node"),
        (m.GPU_RECOVERY_ACTION_ID, (), 3, "recovery_action", BAD, "drain_peers"),
        (m.GPU_RECOVERY_ACTION_ID, (), 4, "recovery_action", BAD, "drain_and_reset"),
        (m.GPU_RECOVERY_ACTION_ID, (), 5, "recovery_action", BAD, "recover_imex"),
        (m.GPU_RECOVERY_ACTION_ID, (), 6, "recovery_action", BAD, "reset_bus"),
        (m.GPU_RECOVERY_ACTION_ID, (), 7, "recovery_action", BAD, "reboot_system"),
        (m.GPU_ROW_REMAP_FAILURE, (), 1, "row_remap_failure", BAD, "replace_gpu"),
        (m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED, (), 1, "sram_errors", BAD, "replace_gpu"),
        (m.GPU_ECC_ERRORS_TOTAL, ("uncorrected",), 2, "ecc_uncorrected", DEGRADED, "drain_and_reset"),
        (m.GPU_ROW_REMAP_PENDING, (), 1, "row_remap_pending", DEGRADED, "drain_and_reset"),
        (m.GPU_RETIRED_PAGES_PENDING, (), 1, "retired_pages_pending", DEGRADED, "drain_and_reset"),
        (m.GPU_REPAIR_PENDING, ("channel",), 1, "repair_pending", DEGRADED, "drain_and_reset"),
        (m.GPU_CLOCK_EVENT_ACTIVE, ("hw_thermal_slowdown",), 1, "thermal_slowdown", DEGRADED, "check_cooling"),
        (m.GPU_CLOCK_EVENT_ACTIVE, ("hw_power_brake_slowdown",), 1, "power_brake", DEGRADED, "check_power"),
        (m.GPU_PCIE_WIDTH_LANES, (), 8, "pcie_width", DEGRADED, "reseat_gpu"),
        (m.GPU_PCIE_GENERATION_MAX, (), 4, "pcie_generation", DEGRADED, "check_node"),
        (m.NVLINK_LINKS, ("active",), 17, "nvlink_down", BAD, "check_nvlink"),
        (m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO, (), 2e-12, "nvlink_bit_errors", BAD, "check_nvlink"),
        (m.GPU_FABRIC_STATE_ID, (), 2, "fabric_not_ready", BAD, "restart_fabric_manager"),
        (m.GPU_FABRIC_STATUS_ID, (), 999, "fabric_failed", BAD, "restart_fabric_manager"),
        (m.GPU_FABRIC_HEALTH_ID, (), 2, "fabric_unhealthy", BAD, "check_nvlink"),
        (m.GPU_FABRIC_HEALTH_ID, (), 3, "fabric_limited", DEGRADED, "check_nvlink"),
        (m.GPU_FABRIC_FAULT, ("degraded_bandwidth",), 1, "fabric_degraded_bandwidth", DEGRADED, "check_nvlink"),
        (m.GPU_FABRIC_FAULT, ("route_recovery",), 1, "fabric_route_recovery", DEGRADED, "check_nvlink"),
        (m.GPU_FABRIC_FAULT, ("route_unhealthy",), 1, "fabric_route_unhealthy", BAD, "check_nvlink"),
        (m.GPU_FABRIC_FAULT, ("access_timeout",), 1, "fabric_access_timeout", BAD, "check_nvlink"),
        (m.GPU_FABRIC_FAULT, ("incorrect_configuration",), 1, "fabric_configuration", BAD, "restart_fabric_manager"),
        (m.GPU_FABRIC_FAULT, ("no_partition",), 1, "fabric_no_partition", DEGRADED, "restart_fabric_manager"),
        (
            m.GPU_FABRIC_FAULT,
            ("manager_disconnected",),
            1,
            "fabric_manager_disconnected",
            DEGRADED,
            "restart_fabric_manager",
        ),
    ],
)
def test_each_fault_of_a_gpu_is_one_reason(
    row: Metric, extra: tuple[str, ...], value: float, reason: str, verdict: str, action: str
) -> None:
    assert reasons(h100() | {(row, (*gpu(3), *extra)): value}) == [(reason, GPU3, verdict, action)]


@pytest.mark.parametrize(
    ("row", "extra", "value", "harmless"),
    [
        (m.GPU_ECC_ERRORS_TOTAL, ("corrected",), 9999, "corrected errors cost nothing"),
        (m.GPU_CLOCK_EVENT_ACTIVE, ("sw_power_cap",), 1, "at full load a GPU is at its power limit"),
        (m.GPU_CLOCK_EVENT_ACTIVE, ("gpu_idle",), 1, "idle"),
        (m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO, (), 1e-15, "below the limit"),
        (m.GPU_FABRIC_STATE_ID, (), 0, "a card without a fabric"),
        (m.GPU_PCIE_GENERATION, (), 1, "the generation falls while the GPU idles"),
        (m.GPU_FABRIC_FAULT, ("route_recovery",), 0, "no fault"),
    ],
)
def test_what_looks_like_a_fault_and_is_none(row: Metric, extra: tuple[str, ...], value: float, harmless: str) -> None:
    assert reasons(h100() | {(row, (*gpu(3), *extra)): value}) == [], harmless


@pytest.mark.parametrize(
    ("row", "extra", "value", "reason", "action"),
    [
        (m.INFINIBAND_PORT_PRESENT, (), 0, "port_missing", "reboot_then_reseat"),
        (m.INFINIBAND_PORT_STATE_ID, (), 1, "port_down", "check_cable"),
        (m.INFINIBAND_PORT_STATE_ID, (), 2, "port_down", "check_cable"),
        (m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, (), 25e9 / 2, "port_slow", "check_cable"),
    ],
)
def test_a_fault_of_a_compute_port_is_bad_and_of_a_storage_port_degraded(
    row: Metric, extra: tuple[str, ...], value: float, reason: str, action: str
) -> None:
    for index, verdict in ((3, BAD), (8, DEGRADED)):
        found = reasons(h100() | {(row, (*port(index), *extra)): value})
        assert found == [(reason, f"port mlx5_{index}/1", verdict, action)]


def test_a_flapping_port_and_a_hot_transceiver() -> None:
    assert reasons(h100() | {(m.INFINIBAND_LINK_FLAPPING, port(3)): 1}) == [
        ("port_flapping", PORT3, BAD, "check_cable")
    ]
    assert reasons(h100() | {(m.INFINIBAND_TEMPERATURE_CELSIUS, (*port(3), "Module0")): 71.5}) == [
        ("transceiver_hot", PORT3, DEGRADED, "check_cooling")
    ]


def test_a_port_that_was_never_active_is_not_missed_unless_it_is_expected() -> None:
    idle = without(h100(), m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND) | {
        (m.INFINIBAND_PORT_STATE_ID, port(3)): 1
    }
    assert reasons(idle, Expectations()) == []
    assert reasons(idle) == [("ports_too_few", "compute ports", BAD, "check_cable")]
    assert reasons(idle, Expectations(ports={"any": Ports(9)})) == [("ports_too_few", "ports", BAD, "check_cable")]


def test_a_port_more_than_expected_may_be_down_or_gone() -> None:
    seven = Expectations(ports={"compute": Ports(7, 400)})
    for fault in (m.INFINIBAND_PORT_PRESENT, m.INFINIBAND_PORT_STATE_ID):
        series = h100() | {(fault, port(3)): 0}
        assert [part for _, part, *_ in reasons(series, Expectations())] == [PORT3]
        assert reasons(series, seven) == []


def test_a_port_rate_is_compared_with_the_expected_rate_if_there_is_one() -> None:
    assert reasons(h100(), Expectations(ports={"compute": Ports(8, 800)})) == [
        ("port_slow", f"port mlx5_{index}/1", BAD, "check_cable") for index in range(8)
    ]
    assert reasons(h100() | {(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, port(3)): 49.9e9}) == []


def test_gpus_are_missed_by_the_inventory_and_by_what_is_expected() -> None:
    gone = without(h100(), m.GPU_INFO) | {(m.GPU_PRESENT, gpu(7)): 0}
    assert reasons(gone, Expectations()) == [("gpu_missing", "gpu 7", BAD, "reboot_then_reseat")]
    assert reasons(gone, Expectations(gpus=8)) == [("gpu_missing", "gpu 7", BAD, "reboot_then_reseat")]
    assert reasons(gone, Expectations(gpus=7)) == [], "it was taken out on purpose"
    assert reasons(h100(), Expectations(gpus=10)) == [("gpus_too_few", "gpus", BAD, "reboot_then_reseat")]
    assert judge(h100(), Expectations(gpus=10))[0].detail == "8 GPUs where 10 are expected"


def test_a_gpu_that_only_the_exporter_cannot_see_is_not_missed() -> None:
    blind = h100() | {(m.GPU_READABLE, gpu(3)): 0, (m.GPU_PRESENT, gpu(3)): 0}
    assert reasons(blind) == [("gpu_unreadable", GPU3, UNKNOWN, "check_exporter")]


def test_a_driver_that_is_not_loaded_is_one_reason_and_no_gpu_is_called_bad() -> None:
    rest = without(h100(), *{*GPU_ROWS} - {m.GPU_INFO})
    series = rest | {(m.GPU_DRIVER_LOADED, ()): 0} | {(m.GPU_READABLE, gpu(index)): 0 for index in range(8)}
    assert reasons(series) == [("driver_not_loaded", "driver", DEGRADED, "load_driver")]
    assert reasons(h100() | {(m.GPU_DRIVER_LOADED, ()): 1}) == []


def test_gpus_that_only_the_exporter_cannot_see_are_named_and_unknown() -> None:
    rest = without(h100(), *{*GPU_ROWS} - {m.GPU_INFO})
    blind = (
        rest
        | {(m.GPU_READABLE, gpu(index)): 0.0 for index in range(8)}
        | {(m.FLOPWATCH_COLLECTOR_SUCCESS, ("nvml",)): 0.0}
    )
    assert reasons(blind) == [
        *(("gpu_unreadable", f"gpu {index}", UNKNOWN, "check_exporter") for index in range(8)),
        ("source_failed", "source nvml", UNKNOWN, "check_exporter"),
    ]


def test_a_blind_exporter_never_makes_a_node_bad() -> None:
    rest = without(h100(), *GPU_ROWS)
    blind = rest | {(m.FLOPWATCH_COLLECTOR_SUCCESS, ("nvml",)): 0}
    assert reasons(blind) == [
        ("gpus_unseen", "gpus", UNKNOWN, "check_exporter"),
        ("source_failed", "source nvml", UNKNOWN, "check_exporter"),
    ]
    assert Verdict(H100).judge(samples(blind)).verdict == UNKNOWN
    assert reasons(blind | {(m.FLOPWATCH_DRIVER_RELEASED, ()): 1}) == [("driver_released", "driver", UNKNOWN, "wait")]
    nothing: Series = {(m.FLOPWATCH_COLLECTOR_SUCCESS, ("identity",)): 0.0}
    assert {verdict for _, _, verdict, _ in reasons(nothing)} == {UNKNOWN}
    assert reasons(nothing, Expectations()) == [], "the owner of a GPU does not make it unfit"


def test_another_model_than_expected_is_a_reason_with_both_names() -> None:
    other = info(m.GPU_INFO, gpu="3", uuid="GPU-3", model="NVIDIA H100 PCIe", serial="99")
    series = {key: value for key, value in h100().items() if key[0] is not m.GPU_INFO or key[1][0] != "3"}
    assert judge(series | {other: 1}) == (
        Reason(
            "gpu_other_model",
            GPU3,
            DEGRADED,
            "check_node",
            "GPU 3 (serial 99) is 'NVIDIA H100 PCIe', not 'NVIDIA H100 80GB HBM3'",
        ),
    )


def test_nvlinks_are_missed_where_others_are_up_or_some_are_expected() -> None:
    states = ("active", "inactive", "sleep", "disabled")

    def links(expected: int, *counts: int, fallen: Sequence[int] = ()) -> list[str]:
        series: Series = {(m.NVLINK_LINKS, (*gpu(0), state)): n for state, n in zip(states, counts, strict=True)}
        series |= {(m.NVLINK_LINK_STATE_ID, (*gpu(0), str(link))): state for link, state in enumerate(fallen)}
        return [reason.detail for reason in judge(series, Expectations(nvlinks_per_gpu=expected))]

    assert links(0, 18, 0, 0, 0) == links(0, 0, 12, 0, 0) == links(18, 10, 0, 8, 0) == []
    assert links(0, 4, 8, 0, 0) == [], "a bridge of four of twelve links"
    assert links(0, 4, 8, 0, 0, fallen=[1, 2]) == [], "links that are up again"
    assert links(0, 3, 9, 0, 0, fallen=[0, 1]) == ["GPU 0 has 3 of 4 NVLinks"]
    assert links(0, 0, 12, 0, 0, fallen=[0, 3, 0, 0]) == ["GPU 0 has 0 of 4 NVLinks"], "the bridge came off"
    assert links(4, 4, 8, 0, 0, fallen=[0, 0]) == [], "more than expected may be missing"
    assert links(18, 17, 1, 0, 0) == ["GPU 0 has 17 of 18 NVLinks"]
    assert links(4, 0, 12, 0, 0) == ["GPU 0 has 0 of 4 NVLinks"], "the bridge is gone"


def xid(code: int, age: float, action: float | None = None, index: int = 3) -> Series:
    series = without(h100(), m.GPU_RECOVERY_ACTION_ID) | {
        (m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*gpu(index), str(code))): NOW - age
    }
    return series if action is None else series | {(m.GPU_RECOVERY_ACTION_ID, gpu(index)): action}


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (48, "reset_gpu"),
        (119, "reset_gpu"),
        (79, "reboot_node"),
        (74, "check_nvlink"),
        (149, "check_nvlink"),
        (54, "reseat_gpu"),
        (142, "replace_gpu"),
    ],
)
def test_a_critical_xid_is_bad_for_an_hour_where_the_driver_cannot_say_more(code: int, action: str) -> None:
    assert reasons(xid(code, 60)) == [("xid", GPU3, BAD, action)]
    assert reasons(xid(code, 3601)) == []


def test_gpus_without_an_index_are_one_reason_each_with_the_pci_address() -> None:
    lost = [(f"0000:{bus:02x}:00", f"GPU-{bus}") for bus in range(0x10, 0x1E)]
    series = {(m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*one, "79")): NOW - 60 for one in lost}
    assert reasons(h100() | series) == [("xid", f"gpu {pci}", BAD, "reboot_node") for pci, _ in lost]


@pytest.mark.parametrize(
    ("one", "age", "found"),
    [
        (("0000:66:00", "0000:66:00"), 60, "gpu 0000:66:00"),
        (("0000:66:00", "0000:66:00"), 3601, ""),
        (gpu(3), 60, ""),  # it answers by now
    ],
)
def test_a_gpu_that_the_driver_cannot_initialize_is_bad_until_it_answers(
    one: tuple[str, str], age: float, found: str
) -> None:
    series = h100() | {(m.GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS, one): NOW - age}
    expected = [("gpu_initialization_failed", found, BAD, "reboot_then_reseat")]
    assert reasons(series) == (expected if found else [])


def test_an_xid_of_the_application_or_before_the_boot_is_no_reason() -> None:
    assert reasons(xid(31, 60)) == reasons(xid(94, 60)) == []
    series = xid(79, 60)
    assert Verdict(H100, lambda: NOW, lambda: NOW - 30).judge(samples(series)).reasons == ()


def test_the_drivers_own_recovery_action_is_believed() -> None:
    assert reasons(xid(119, 60, action=0)) == [("xid_recovered", GPU3, DEGRADED, "reset_gpu")]
    assert reasons(xid(119, 9999, action=1)) == [("recovery_action", GPU3, BAD, "reset_gpu")]


def test_several_xids_of_one_gpu_are_one_reason_with_the_gravest_action() -> None:
    series = xid(119, 60) | {(m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*gpu(3), "79")): NOW - 50}
    assert judge(series) == (
        Reason(
            "xid", GPU3, BAD, "reboot_node", "GPU 3 (0000:33:00.0, serial 1653) had Xid 79, 119 within the last hour"
        ),
    )


def test_every_critical_xid_has_exactly_one_rule() -> None:
    for code in critical_xids():
        assert [reason for reason, *_ in reasons(xid(int(code), 60))] == ["xid"], code


def test_a_fatal_sxid_is_bad() -> None:
    series = h100() | {
        info(m.NVLINK_SWITCH_SXID_INFO, sxid="12028", severity="warning"): 1.0,
        info(m.NVLINK_SWITCH_SXID_INFO, sxid="20034", severity="fatal"): 1.0,
        (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, ("0000:05:00", "12028")): NOW - 5,
        (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, ("0000:06:00", "20034")): NOW - 5,
        (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, ("0000:07:00", "20034")): NOW - 5000,
    }
    assert reasons(series) == [("sxid", "switch 0000:06:00", BAD, "check_nvlink")]


def test_the_worst_reason_comes_first_and_gives_the_verdict() -> None:
    series = h100() | {(m.GPU_READABLE, gpu(0)): 0, (m.GPU_PCIE_WIDTH_LANES, gpu(1)): 8, (m.GPU_PRESENT, gpu(2)): 0}
    judgement = Verdict(H100, lambda: NOW, lambda: BOOTED).judge(samples(series))
    assert [reason.verdict for reason in judgement.reasons] == [BAD, DEGRADED, UNKNOWN]
    assert (judgement.verdict, judgement.gpus) == (BAD, 7)


def test_the_series_of_a_verdict() -> None:
    def derived(series: Series, expected: Expectations) -> list[Sample]:
        return Verdict(expected, lambda: NOW, lambda: BOOTED).derive(samples(series))

    assert derived(h100(), Expectations()) == [(m.HOST_VERDICT_ID, (), 0)]
    assert derived(h100() | {(m.GPU_PRESENT, gpu(3)): 0}, H100) == [
        (m.HOST_VERDICT_ID, (), 2),
        (m.HOST_VERDICT_REASON, ("gpu_missing", GPU3, "bad", "reboot_then_reseat"), 1),
        (m.HOST_EXPECTED_PARTS, ("gpus",), 8),
        (m.HOST_EXPECTED_PARTS, ("ports",), 8),
        (m.HOST_EXPECTED_PARTS, ("nvlinks",), 144),
        (m.HOST_EXPECTED_PARTS, ("pcie_lanes_per_gpu",), 16),
    ]
    assert derived(h100() | {(m.GPU_READABLE, gpu(3)): 0}, Expectations()) == [
        (m.HOST_VERDICT_ID, (), 1),
        (m.HOST_VERDICT_REASON, ("gpu_unreadable", GPU3, "unknown", "check_exporter"), 1),
    ]


def test_two_repairs_of_one_gpu_are_one_series() -> None:
    series = h100() | {(m.GPU_REPAIR_PENDING, (*gpu(3), part)): 1 for part in ("channel", "tpc")}
    assert reasons(series) == [("repair_pending", GPU3, DEGRADED, "drain_and_reset")]


def twice(before: Series, after: Series) -> list[tuple[str, str, str]]:
    judgement = Verdict(H100, lambda: NOW, lambda: BOOTED).judge_twice(samples(before), samples(after), 10)
    return [(reason.reason, reason.part, reason.detail) for reason in judgement.reasons]


def test_two_looks_leave_out_what_lasted_a_moment() -> None:
    down = h100() | {(m.INFINIBAND_PORT_STATE_ID, port(3)): 1}
    assert twice(down, h100()) == twice(h100(), down) == []
    assert twice(down, down) == [("port_down", PORT3, "port mlx5_3/1 is down")]


@pytest.mark.parametrize(
    ("row", "labels", "more", "found"),
    [
        (
            m.INFINIBAND_SYMBOL_ERRORS_TOTAL,
            port(3),
            1,
            [("symbol_errors", PORT3, "port mlx5_3/1 counts symbol errors (1 in 10 s)")],
        ),
        (m.GPU_PCIE_REPLAYS_TOTAL, gpu(3), 5, []),
        (
            m.GPU_PCIE_REPLAYS_TOTAL,
            gpu(3),
            6,
            [("pcie_replays", GPU3, "GPU 3 (0000:33:00.0, serial 1653) replays PCIe packets (6 in 10 s)")],
        ),
        (m.NVLINK_ERRORS_TOTAL, (*gpu(3), "crc"), 50, []),
        (
            m.NVLINK_ERRORS_TOTAL,
            (*gpu(3), "recovery"),
            1,
            [("nvlink_errors_rising", GPU3, "GPU 3 (0000:33:00.0, serial 1653) counts NVLink errors (1 in 10 s)")],
        ),
        (m.GPU_ECC_ERRORS_TOTAL, (*gpu(3), "corrected"), 1000, []),
    ],
)
def test_two_looks_find_counters_that_rise(
    row: Metric, labels: tuple[str, ...], more: float, found: list[tuple[str, str, str]]
) -> None:
    assert twice(h100(), h100() | {(row, labels): h100()[row, labels] + more}) == found
    assert twice(h100() | {(row, labels): 1e6}, h100()) == [], "a counter that fell was reset"


def test_a_node_teaches_its_shape_and_fits_it() -> None:
    shape = learn(samples(h100()))
    assert shape == Expectations(
        8, "NVIDIA H100 80GB HBM3", 18, 16, 5, {"compute": Ports(8, 400), "storage": Ports(1, 200)}
    )
    assert parse(json.dumps(shape.content())) == shape
    assert reasons(h100(), shape) == []


def test_lanes_that_a_cloud_does_not_connect_are_well_once_recorded_or_declared() -> None:
    series = h100() | {(m.GPU_PCIE_WIDTH_LANES, gpu(index)): 8 for index in range(8)}
    assert {reason for reason, *_ in reasons(series, Expectations())} == {"pcie_width"}
    shape = learn(samples(series))
    assert shape.pcie_width == 8
    assert reasons(series, shape) == []
    assert reasons(series, Expectations(pcie_width=8)) == []
    narrower = series | {(m.GPU_PCIE_WIDTH_LANES, gpu(3)): 4}
    assert [reason for reason, *_ in reasons(narrower, shape)] == ["pcie_width"]


@pytest.mark.parametrize("file", SHAPES, ids=[file.stem for file in SHAPES])
def test_the_shape_of_a_cloud_instance_is_an_expectation(file: Path) -> None:
    shape = parse(file.read_text(), file.name)
    assert shape.gpu_model
    assert shape.pcie_width
    lanes = Expectations(pcie_width=shape.pcie_width)
    series = h100() | {(m.GPU_PCIE_WIDTH_LANES, gpu(index)): shape.pcie_width for index in range(8)}
    assert reasons(series, lanes) == []
    narrower = series | {(m.GPU_PCIE_WIDTH_LANES, gpu(3)): shape.pcie_width // 2}
    assert [reason for reason, *_ in reasons(narrower, lanes)] == ["pcie_width"]


def test_ports_without_a_role_are_learnt_as_any_and_different_gpus_not_at_all() -> None:
    series = without(h100(), m.INFINIBAND_INFO) | {
        info(m.GPU_INFO, gpu="9", uuid="GPU-9", model="other"): 1.0,
        (m.GPU_PRESENT, gpu(9)): 1,
        (m.GPU_PCIE_WIDTH_LANES, gpu(9)): 8,
    }
    shape = learn(samples(series))
    assert (shape.gpus, shape.gpu_model, shape.pcie_width) == (9, "", 0)
    assert shape.ports == {"any": Ports(9, 200)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--expect: Input data was truncated; write JSON, for example {"),
        ('{"gpus": 8,\n}', "--expect: JSON is malformed: trailing comma in object (byte 12); write JSON"),
        ("[]", "--expect: Expected `object`, got `array`; write JSON"),
        ("[" * 100_000, "--expect: Expected `object`, got `array`; write JSON"),
        ('{"ports": ' * 100_000, "--expect: "),
        ('{"gpu": 8}', "--expect: Object contains unknown field `gpu`; write JSON"),
        ('{"gpus": "8"}', "--expect: Expected `int`, got `str` - at `$.gpus`; write JSON"),
        ('{"gpus": -1}', "--expect: Expected `int` >= 0 - at `$.gpus`; write JSON"),
        ('{"gpus": true}', "--expect: Expected `int`, got `bool` - at `$.gpus`; write JSON"),
        ('{"gpus": 8.5}', "--expect: Expected `int`, got `float` - at `$.gpus`; write JSON"),
        ('{"gpu_model": 1}', "--expect: Expected `str`, got `int` - at `$.gpu_model`; write JSON"),
        ('{"ports": 8}', "--expect: Expected `object`, got `int` - at `$.ports`; write JSON"),
        ('{"ports": {"rdma": {}}}', "'^(compute|storage|management|any)$' - at `key` in `$.ports`; write JSON"),
        ('{"ports": {"any": {"speed": 1}}}', "unknown field `speed` - at `$.ports[...]`; write JSON"),
        ('{"ports": {"any": {"rate_gbps": NaN}}}', "--expect: JSON is malformed: invalid character (byte 32)"),
    ],
)
def test_a_wrong_expectation_is_an_error_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        parse(text)


@given(
    st.text(max_size=50)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["gpus", "ports", "compute", "count", "gpu_model"]), inner, max_size=3)
        ),
    ).map(json.dumps)
)
def test_any_text_is_an_expectation_or_a_settings_error(text: str) -> None:
    with suppress(SettingsError):
        assert isinstance(parse(text), Expectations)


def test_expectations_come_from_the_file_given_else_from_what_was_learnt_else_there_are_none(tmp_path: Path) -> None:
    assert load(None, tmp_path) == Expectations()
    learnt_file(tmp_path).write_text('{"gpus": 8}')
    (tmp_path / "shape.json").write_text('{"gpus": 4}')
    assert load(None, tmp_path).gpus == 8
    assert load(tmp_path / "shape.json", tmp_path).gpus == 4
    with pytest.raises(SettingsError, match="file not found; create it with flopwatch check --record"):
        load(tmp_path / "none.json", tmp_path)
    with pytest.raises(SettingsError, match="Is a directory"):
        load(tmp_path, tmp_path)


def test_the_rules_are_in_the_documentation_as_they_are() -> None:
    assert health_rules() in (ROOT / "docs" / "check.md").read_text()


def test_rules_name_actions_that_exist_and_every_action_is_used() -> None:
    assert {rule.action for rule in RULES} == ACTIONS.keys()
    assert {rise.action for rise in RISES} <= ACTIONS.keys()


def test_each_rule_of_the_table_has_a_search_or_numbers_and_a_verdict() -> None:
    rules = read_table("health_rules.csv")
    assert all(bool(rule["search"]) != bool(rule["equals"] or rule["above"]) for rule in rules)
    assert {rule["verdict"] for rule in rules} == {BAD, DEGRADED, UNKNOWN}
    assert {rise.verdict for rise in RISES} <= {BAD, DEGRADED}


def test_the_log_has_each_reason_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flopwatch")
    verdict = Verdict(Expectations())
    for series in (h100(), h100() | {(m.GPU_PRESENT, gpu(3)): 0}, h100() | {(m.GPU_PRESENT, gpu(3)): 0}, h100()):
        verdict.derive(samples(series))
    assert [(record.levelname, record.message.partition(":")[0]) for record in caplog.records] == [
        ("WARNING", "the node is bad"),
        ("INFO", "resolved"),
    ]
