"""The Xid collector against captured kernel logs, a terminal standing for /dev/kmsg, and restarts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import GPU_INFO, GPU_XID, GPU_XID_LAST, Sample
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.xid import (
    CRITICAL,
    FROM_THE_START,
    Event,
    Record,
    Xid,
    document,
    events,
    meanings,
    pci_address,
    record,
)

CAPTURES = Path(__file__).parent / "captures" / "kmsg"
BOOTED = 1_700_000_000.0
ZERO = {("0", str(code)): 0 for code in FROM_THE_START} | {("1", str(code)): 0 for code in FROM_THE_START}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """Return an inventory of two GPUs, at 0000:53:00 and 0000:64:00."""
    inventory = tmp_path / "gpus.json"
    inventory.write_text(json.dumps({
        f"GPU-{bus}": dict.fromkeys(GPU_INFO.labels, "") | {
            "gpu": gpu, "uuid": f"GPU-{bus}", "pci_bus_id": f"00000000:{bus}:00.0",
        }
        for gpu, bus in (("0", "53"), ("1", "64"))
    }))
    return inventory


def xid(bus: str, code: int, sequence: int = 0, second: int = 0) -> str:
    return f"4,{sequence},{second}000000,-;NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=1, name=x, text\n"


def counts(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(labels[0], labels[2]): value for row, labels, value in samples if row is GPU_XID}


def last(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(labels[0], labels[2]): value for row, labels, value in samples if row is GPU_XID_LAST}


def collector(kmsg: Path, gpus: Path, boot_id: str = "boot1") -> Xid:
    return Xid(kmsg, gpus, gpus.parent / "xid.json", boot_id, lambda: BOOTED)


def test_the_lines_of_the_capture_that_are_xids_and_no_others() -> None:
    # A blank line of the capture ends a case; within a case the driver's three-line message belongs together.
    text = re.sub(r"(?m)^\[[^\]]*\] ", "", (CAPTURES / "xid_lines.txt").read_text())
    lines = text.replace("\nNVRM: (PCI ID", "\\x0aNVRM: (PCI ID").replace("\nNVRM: fallen", "\\x0aNVRM: fallen")
    assert [event for line in lines.splitlines() for event in events(line)] == [
        Event("0000:05:00", 79, True),
        Event("0000:01:00", 79, True),
        Event("0000:03:00", 14, True),
        Event("0000:05:00", 79, True),
        Event("0000:03:00", 14, True),
        Event("0000:05:00", 79, True),
        Event("0000:18:00", 79, False),
        Event("0000:29:00", 79, False),
        Event("0000:18:00", 79, False),
        Event("0009:01:00", 149, True),
        Event("0009:01:00", 154, True),
        Event("0008:01:00", 149, True),
        Event("0019:01:00", 154, True),
        Event("0009:01:00", 149, True),
        Event("0009:01:00", 149, True),
        Event("0008:01:00", 149, True),
        Event("0018:01:00", 154, True),
        Event("0008:01:00", 154, True),
    ]


def test_a_gsp_timeout_with_its_pages_of_history_is_one_xid_119_for_each_timeout() -> None:
    lines = (CAPTURES / "xid119_dmesg.log").read_text().splitlines()
    assert [event for line in lines for event in events(line)] == [Event("0000:9b:00", 119, True)] * 5


@pytest.mark.parametrize(("text", "event"), [
    ("NVRM: Xid (PCI:0000:9B:00): 13, pid=1, name=nvc:[driver], Graphics", Event("0000:9b:00", 13, True)),
    ("NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 13, pid='<unknown>', name=<unknown>, x", Event("0000:9b:00", 13, True)),
    ("NVRM: Xid (PCI:0000:9b:00) GPU-I:05 GPU-CI:00: 31, pid=1, name=a, x", Event("0000:9b:00", 31, True)),
    ("NVRM: Xid (PCI:0000:9b:00): 45, pid=1, name=a, Ch 1 caused by previous Xid 149", Event("0000:9b:00", 45, True)),
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32", None),
    ("NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d", None),
])
def test_forms_of_the_line(text: str, event: Event | None) -> None:
    assert next(events(text), None) == event


def test_records_are_the_kernels_own() -> None:
    assert record("4,17,2500000,-;NVRM: text; more") == Record(17, 2.5, "NVRM: text; more")
    assert record("6,17,2500000,-,caller=T1;text") == Record(17, 2.5, "text")
    assert record("12,18,2500000,-;NVRM: Xid (PCI:0000:53:00): 79, written by a user") is None
    assert record(" SUBSYSTEM=pci") is None
    lines = (CAPTURES / "kmsg_boot.log").read_text().splitlines()
    assert [record(line) is not None for line in lines] == [True] * len(lines)


def test_addresses_of_nvml_and_of_the_kernel_log_become_one() -> None:
    assert [pci_address(text) for text in ("00000000:9B:00.0", "0000:9b:00", "9b:00", "00010000:01:00.0")] == [
        "0000:9b:00", "0000:9b:00", "0000:9b:00", "10000:01:00",
    ]


def test_critical_codes_are_0_on_every_gpu_before_anything_happened(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text("6,0,0,-;Linux version 6.1\n")
    samples = collector(tmp_path / "kmsg", gpus).read()
    assert counts(samples) == ZERO
    assert last(samples) == {}


def test_xids_are_counted_where_and_when_they_happened(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(xid("53", 79, 0, 10) + xid("64", 13, 1, 20) + xid("64", 13, 2, 30))
    samples = collector(tmp_path / "kmsg", gpus).read()
    assert counts(samples) == ZERO | {("0", "79"): 1, ("1", "13"): 2}
    assert last(samples) == {("0", "79"): BOOTED + 10, ("1", "13"): BOOTED + 30}
    assert {labels[:2] for _, labels, _ in samples} == {("0", "GPU-53"), ("1", "GPU-64")}


def test_a_restart_counts_nothing_twice_and_misses_nothing(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79))
    collector(kmsg, gpus).read()
    with kmsg.open("a") as file:
        file.write(xid("53", 79, 1) + "4,2,2000000,-;NVRM: Xid (PCI:0000:53")
    restarted = collector(kmsg, gpus)
    assert counts(restarted.read())["0", "79"] == 2
    with kmsg.open("a") as file:
        file.write(":00): 79, the rest of the line\n")
    assert counts(restarted.read())["0", "79"] == 3
    assert counts(collector(kmsg, gpus).read())["0", "79"] == 3


def test_a_log_that_was_cut_or_replaced_is_read_from_its_beginning(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79) + xid("53", 79, 1))
    reader = collector(kmsg, gpus)
    reader.read()
    kmsg.write_text(xid("53", 48))
    assert counts(reader.read()) == ZERO | {("0", "79"): 2, ("0", "48"): 1}
    (tmp_path / "new").write_text(xid("53", 48) + xid("53", 48, 1))
    (tmp_path / "new").replace(kmsg)
    assert counts(reader.read()) == ZERO | {("0", "79"): 2, ("0", "48"): 3}


def test_a_device_gives_one_record_a_read_and_repeats_them_all_when_opened_again(tmp_path: Path, gpus: Path) -> None:
    master, slave = os.openpty()  # in its line mode a terminal hands out one line per read, as /dev/kmsg does
    device = Path(os.ttyname(slave))
    try:
        os.write(master, (xid("53", 79, 5) + xid("53", 48, 6)).encode())
        assert counts(collector(device, gpus).read()) == ZERO | {("0", "79"): 1, ("0", "48"): 1}
        os.write(master, (xid("53", 79, 5) + xid("53", 48, 6) + xid("53", 48, 7)).encode())
        restarted = collector(device, gpus)
        assert counts(restarted.read()) == ZERO | {("0", "79"): 1, ("0", "48"): 2}
        assert counts(restarted.read()) == ZERO | {("0", "79"): 1, ("0", "48"): 2}
        os.write(master, xid("53", 79, 0).encode())  # record numbers start again at every boot
        rebooted = collector(device, gpus, "boot2")
        assert counts(rebooted.read()) == ZERO | {("0", "79"): 2, ("0", "48"): 2}
    finally:
        os.close(slave)
        os.close(master)


def test_an_xid_seen_before_nvml_named_the_gpu_is_counted_once_it_does(tmp_path: Path, gpus: Path) -> None:
    kmsg, inventory = tmp_path / "kmsg", gpus.read_text()
    kmsg.write_text(xid("53", 79, 0, 10))
    gpus.unlink()
    assert collector(kmsg, gpus).read() == []
    gpus.write_text(inventory)
    samples = collector(kmsg, gpus).read()
    assert counts(samples) == ZERO | {("0", "79"): 1}
    assert last(samples) == {("0", "79"): BOOTED + 10}


def test_the_drivers_second_report_of_a_gpu_that_fell_off_the_bus_is_the_same_event(
    tmp_path: Path, gpus: Path
) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79, 0, 10) + "4,1,11000000,-;NVRM: GPU 0000:53:00.0: GPU has fallen off the bus.\n")
    reader = collector(kmsg, gpus)
    assert counts(reader.read())["0", "79"] == 1
    with kmsg.open("a") as file:
        file.write(
            "4,2,200000000,-;NVRM: The NVIDIA GPU 0000:53:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system"
            " has\\x0aNVRM: fallen off the bus and is not responding to commands.\n"
        )
    samples = reader.read()
    assert counts(samples)["0", "79"] == 2
    assert last(samples)["0", "79"] == BOOTED + 200


def test_without_a_kernel_log_the_source_does_not_exist(tmp_path: Path, gpus: Path) -> None:
    with pytest.raises(Unsupported, match="No such file"):
        collector(tmp_path / "kmsg", gpus).read()


@pytest.mark.parametrize("content", ["", "[]", '{"next": "x", "counts": 3}', '{"counts": {"GPU-53": {"a": 1}}}'])
def test_an_unreadable_state_file_is_forgotten(tmp_path: Path, gpus: Path, content: str) -> None:
    (tmp_path / "xid.json").write_text(content)
    (tmp_path / "kmsg").write_text(xid("53", 79))
    assert counts(collector(tmp_path / "kmsg", gpus).read())["0", "79"] == 1


def test_a_disk_that_takes_nothing_costs_no_count(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "file").write_text("")
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79))
    reader = Xid(kmsg, gpus, tmp_path / "file" / "xid.json")
    assert counts(reader.read())["0", "79"] == 1
    with kmsg.open("a") as file:
        file.write(xid("53", 79, 1))
    assert counts(reader.read())["0", "79"] == 2


@given(st.text(max_size=300))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for line in (text, f"4,1,1,-;NVRM: Xid (PCI:{text}", f"NVRM: GPU {text}: GPU has fallen off the bus."):
        entry = record(line)
        for event in events(line if entry is None else entry.text):
            assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}", event.pci)


def test_the_page_about_xids_is_what_the_table_says() -> None:
    assert (Path(__file__).parents[1] / "docs" / "xid.md").read_text() == document()
    assert {meanings()[code]["severity"] for code in CRITICAL} == {"critical", "fatal"}
    assert meanings()[94]["severity"] == "error"
