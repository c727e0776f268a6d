"""The lines of the kernel log: captured ones, their forms, and text that has none of these forms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.xid import nvlink5
from flopwatch.node.collectors.xid.kernel_lines import (
    NODE_EVENTS,
    RELEVANT,
    KernelRecord,
    XidEvent,
    events,
    introductions,
    node_events,
    pci_address,
    record,
    recovery_action,
    switch_errors,
)
from flopwatch.node.collectors.xid.nvlink5 import LinkError, LinkErrorRow, decode, find, pattern, table
from tests.support import TESTS

CAPTURES = TESTS / "captures" / "kmsg"
GB200 = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"


def lines(name: str) -> list[str]:
    return (CAPTURES / name).read_text().splitlines()


def test_the_lines_of_the_capture_that_are_xids_and_no_others() -> None:
    # A blank line of the capture ends a case; within a case the driver's three-line message belongs together.
    text = re.sub(r"(?m)^\[[^\]]*\] ", "", (CAPTURES / "xid_lines.txt").read_text())
    whole = text.replace("\nNVRM: (PCI ID", "\\x0aNVRM: (PCI ID").replace("\nNVRM: fallen", "\\x0aNVRM: fallen")
    assert [event[:3] for line in whole.splitlines() for event in events(line)] == [
        ("0000:05:00", 79, True),
        ("0000:01:00", 79, True),
        ("0000:03:00", 14, True),
        ("0000:05:00", 79, True),
        ("0000:03:00", 14, True),
        ("0000:05:00", 79, True),
        ("0000:18:00", 79, False),
        ("0000:29:00", 79, False),
        ("0000:18:00", 79, False),
        ("0009:01:00", 149, True),
        ("0009:01:00", 154, True),
        ("0008:01:00", 149, True),
        ("0019:01:00", 154, True),
        ("0009:01:00", 149, True),
        ("0009:01:00", 149, True),
        ("0008:01:00", 149, True),
        ("0018:01:00", 154, True),
        ("0008:01:00", 154, True),
    ]


def test_a_gsp_timeout_with_its_pages_of_history_is_one_xid_119_for_each_timeout() -> None:
    found = [event[:3] for line in lines("xid119_dmesg.log") for event in events(line)]
    assert found == [("0000:9b:00", 119, True)] * 5


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (
            "NVRM: Xid (PCI:0000:9B:00): 13, pid=1, name=nvc:[driver], Graphics",
            XidEvent("0000:9b:00", 13, True, "pid=1, name=nvc:[driver], Graphics"),
        ),
        (
            "NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 13, pid='<unknown>', name=<unknown>, x",
            XidEvent("0000:9b:00", 13, True, "pid='<unknown>', name=<unknown>, x"),
        ),
        (
            "NVRM: Xid (PCI:0000:9b:00) GPU-I:05 GPU-CI:00: 31, pid=1, name=a, x",
            XidEvent("0000:9b:00", 31, True, "pid=1, name=a, x"),
        ),
        (
            "NVRM: Xid (PCI:0000:9b:00): 45, pid=1, name=a, Ch 1 caused by previous Xid 149",
            XidEvent("0000:9b:00", 45, True, "pid=1, name=a, Ch 1 caused by previous Xid 149"),
        ),
        ("NVRM: Xid (PCI:0000:9b:00): 79", XidEvent("0000:9b:00", 79, True)),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32", None),
        ("NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d", None),
    ],
)
def test_forms_of_the_line(text: str, event: XidEvent | None) -> None:
    assert next(events(text), None) == event


def test_records_are_the_kernels_own() -> None:
    assert record("4,17,2500000,-;NVRM: text; more") == KernelRecord(17, 2.5, "NVRM: text; more")
    assert record("6,17,2500000,-,caller=T1;text") == KernelRecord(17, 2.5, "text")
    assert record("12,18,2500000,-;NVRM: Xid (PCI:0000:53:00): 79, written by a user") is None
    assert record(" SUBSYSTEM=pci") is None
    boot = lines("kmsg_boot.log")
    assert [record(line) is not None for line in boot] == [True] * len(boot)


def test_addresses_of_nvml_and_of_the_kernel_log_become_one() -> None:
    assert [pci_address(text) for text in ("00000000:9B:00.0", "0000:9b:00", "9b:00", "00010000:01:00.0")] == [
        "0000:9b:00",
        "0000:9b:00",
        "0000:9b:00",
        "10000:01:00",
    ]


def test_the_driver_introduces_a_gpu_before_its_first_xid() -> None:
    found = [item for line in lines("xid119_dmesg.log") for item in introductions(line)]
    assert found == [("0000:9b:00", "GPU-509665ad-b600-ac93-3616-d754b23d636d")]


def test_xid_154_names_the_action_the_gpu_needs() -> None:
    assert [
        recovery_action(event.detail) for line in lines("xid_lines.txt") for event in events(line) if event.xid == 154
    ] == [4, 1, 1, 1]
    assert recovery_action("pid=1, something else") is None


def test_the_lines_of_the_capture_that_are_sxids_and_no_others() -> None:
    """Of three lines about one error, only the one with its severity counts."""
    assert [error for line in lines("sxid_lines.txt") for error in switch_errors(line)] == [
        ("0000:05:00.0", "12028"),
        ("0000:00:00.0", "20034"),
        ("0000:05:00.0", "12028"),
        ("0000:05:00.0", "12028"),
        ("0000:00:00.0", "20034"),
    ]
    severity = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00"
    assert list(switch_errors(severity)) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kmsg_peermem.log", {"peermem_error": 7}),
        ("nccl_segfault.log", {"nccl_segfault": 2}),
        ("oom.log", {"oom_kill": 3}),
        ("panic_mlx5.log", {"cable_unplugged": 1}),
        ("xid119_dmesg.log", {}),
        ("kmsg_boot.log", {}),
    ],
)
def test_events_of_the_node_in_captured_logs(name: str, found: dict[str, int]) -> None:
    assert Counter(event for line in lines(name) for event in node_events(line)) == found


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (
            "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe "
            "slot (27W).",
            "pcie_slot_power",
        ),
        (
            "mlx5_core 0000:03:00.0: Port module event[error]: module 0, Cable error, High Temperature",
            "module_high_temperature",
        ),
        ("mlx5_core 0000:03:00.0: High temperature on sensors with bit set 0 1", "module_high_temperature"),
        (
            "mlx5_core 0000:d2:00.0: poll_health:174: device's health compromised - reached miss count.",
            "nic_health_compromised",
        ),
        ("mlx5_core 0000:d2:00.0 eth2: TX timeout detected", "nic_transmit_timeout"),
        (
            "mlx5_core 0000:03:00.0: wait_func:964:(pid 112): ENABLE_HCA(0x104) timeout. Will cause a leak of a "
            "command "
            "resource",
            "nic_command_leak",
        ),
        ("NVRM: GPU 0000:53:00.0: RmInitAdapter failed! (0x26:0x56:1463)", "gpu_initialization_failed"),
    ],
)
def test_other_events_of_the_node(text: str, event: str) -> None:
    assert list(node_events(text)) == [event]


def test_every_line_that_matters_gets_through_the_filter_for_floods() -> None:
    names = (
        "xid_lines.txt",
        "sxid_lines.txt",
        "xid119_dmesg.log",
        "kmsg_peermem.log",
        "nccl_segfault.log",
        "oom.log",
        "panic_mlx5.log",
    )
    parsers: tuple[Callable[[str], Iterator[object]], ...] = (events, switch_errors, node_events, introductions)
    found = [line for name in names for line in lines(name) if any([*parse(line)] for parse in parsers)]
    assert len(found) > 30
    assert [line for line in found if not RELEVANT.search(line.encode())] == []


# NVLink.


@pytest.mark.parametrize(
    ("xid", "text", "driver", "error"),
    [
        # GB200 with a driver before release 575; the event of the link is 33: its peer.
        (
            149,
            GB200,
            "570.124.06",
            LinkError("NETIR_LINK_EVT", "1", "link fatal", "RESET_GPU", "INVESTIGATE_PEER_DEVICE"),
        ),
        # The same line with a driver that has been replaced since.
        (
            149,
            GB200,
            "590.48.01",
            LinkError("NETIR_LINK_EVT", "1", "link fatal", "RESET_GPU", "INVESTIGATE_PEER_DEVICE"),
        ),
        (
            149,
            GB200.replace("0x021425c6", "0x025525c6"),
            "570.124.06",
            LinkError("NETIR_LINK_EVT", "1", "link fatal", "RESET_GPU", "INVESTIGATE_PEER_DEVICE"),
        ),
        (
            149,
            "pid=7, name=a:[b], " + GB200.replace("0x021425c6", "0x00200011"),
            "580.65.06",
            LinkError("NETIR_LINK_EVT", "1", "link fatal", "RESET_GPU", "INVESTIGATE_LINK_SI"),
        ),
        # Two bits of the error status: the worse one decides.
        (
            145,
            "RLW_REMAP Nonfatal XC0 i0 Link -1 (0x00000004 0x00000140 0x00000000)",
            "590.48.01",
            LinkError("RLW_REMAP", "", "fatal", "RESET_GPU", "CONTACT_SUPPORT"),
        ),
        # Not in NVIDIA's table.
        (
            146,
            "TLW_NEW Nonfatal XC0 i0 Link 03 (0x00000000 0x00000001)",
            "590.48.01",
            LinkError("TLW_NEW", "3", "non-fatal", "", ""),
        ),
        (
            74,
            "pid=1, name=python, NVLink: fatal error detected on link 14(0x200000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            "",
            LinkError("SIGNAL_INTEGRITY", "14", "fatal", "WORKFLOW_NVLINK_ERR", "INVESTIGATE_LINK_SI_AND_CABLES"),
        ),
        (
            74,
            "NVLink: fatal error detected on link 6(0x30, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            "",
            LinkError("ECC_OR_PARITY", "6", "fatal", "WORKFLOW_NVLINK_ERR", "CONTACT_SUPPORT"),
        ),
        (
            74,
            "NVLink: fatal error detected on link 6(0x100000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            "",
            LinkError("SECONDARY", "6", "non-fatal", "WORKFLOW_NVLINK_ERR", "IGNORE"),
        ),
        (
            74,
            "NVLink: fatal error detected on link 6(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
            "",
            LinkError("OTHER", "6", "unknown", "WORKFLOW_NVLINK_ERR", ""),
        ),
        (79, GB200, "590.48.01", None),
        (149, "GPU has fallen off the bus", "590.48.01", None),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6)", "590.48.01", None),
    ],
)
def test_nvlink_xids_name_unit_link_and_what_to_do(xid: int, text: str, driver: str, error: LinkError | None) -> None:
    assert decode(xid, text, driver) == error


def test_patterns_are_32_bits_with_the_highest_first() -> None:
    assert pattern("------000001----------0111000110") == (0x03F003FF, 0x001001C6)


@pytest.mark.parametrize(("driver", "layout"), [("570.124.06", 0), ("575.51.03", 1), ("", 1)])
def test_every_row_of_the_table_is_found_by_its_own_words_in_the_layout_of_the_driver(driver: str, layout: int) -> None:
    assert len(table()) == 94
    for row in table():
        word = row.layouts[layout][1]
        for noise in (0, 0xFFFFFFFF & ~row.layouts[layout][0]):
            found = find(table(), row.xid, word | noise, row.status, row.units[0], driver)
            assert found is not None
            assert (found.xid, found.units[0], found.status) == (row.xid, row.units[0], row.status)
            # Where two rows have the same words the more severe one stands for both.
            assert nvlink5.SEVERITIES.index(found.severity) >= nvlink5.SEVERITIES.index(row.severity)


@pytest.mark.parametrize(
    ("driver", "unit"),
    [("570.124.06", "FIRST"), ("574.99", "FIRST"), ("575.51.03", "SECOND"), ("590.48.01", "SECOND"), ("", "SECOND")],
)
def test_a_word_that_fits_a_row_in_either_layout_is_read_in_that_of_the_driver(driver: str, unit: str) -> None:
    """No word does in NVIDIA's table of today, whose layouts exclude one another for each unit."""
    rows = [
        LinkErrorRow(149, (name, "NEW_UNIT"), layouts, 1, "fatal", "RESET_GPU", "CONTACT_SUPPORT")
        for name, layouts in (("FIRST", ((0xF, 0x1), (0xF, 0x2))), ("SECOND", ((0xF0, 0x30), (0xF0, 0x40))))
    ]
    found = find(rows, 149, 0x41, 1, "NEW_UNIT", driver)
    assert found is not None
    assert found.units[0] == unit


# Anything.


@given(st.text(max_size=300))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for line in (text, f"4,1,1,-;NVRM: Xid (PCI:{text}", f"NVRM: GPU {text}: GPU has fallen off the bus."):
        entry = record(line)
        whole = line if entry is None else entry.text
        for event in events(whole):
            assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", event.pci)
        assert {*node_events(whole)} <= NODE_EVENTS.keys()
        assert [*switch_errors(whole), *introductions(whole)] == []


@given(
    st.integers(0, 200),
    st.sampled_from([row.units[0] for row in table()]) | st.text(max_size=40),
    st.integers(-1, 99),
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.sampled_from(["", "570.1", "590.1", "x"]),
)
def test_no_words_break_the_decoder(xid: int, unit: str, link: int, words: list[int], driver: str) -> None:
    text = f"{unit}  Fatal   XC0 i0 Link {link:02d} ({' '.join(f'0x{word:08x}' for word in words)})"
    error = decode(xid, text, driver)
    if xid not in nvlink5.CODES and xid != 74:
        assert error is None
    if error is not None:
        assert error.link == ("" if link < 0 else str(link))
        assert error.severity in nvlink5.SEVERITIES
