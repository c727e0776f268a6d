"""The Xid collector: kernel logs of every kind, restarts, the counts over time, and NVML together with the log."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from docs.generate import xid_page
from flopwatch.catalogue import (
    FLOPWATCH_KERNEL_LOG_LOST_TOTAL,
    FLOPWATCH_XID_SOURCE_UP,
    GPU,
    GPU_INFO,
    GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS,
    GPU_XID_ERRORS_TOTAL,
    GPU_XID_INFO,
    GPU_XID_LAST_TIMESTAMP_SECONDS,
    GPU_XID_NVLINK_ERRORS_TOTAL,
    GPU_XID_RECOVERY_ACTION_ID,
    HOST_KERNEL_EVENTS_TOTAL,
    NVLINK_SWITCH_SXID_ERRORS_TOTAL,
    NVLINK_SWITCH_SXID_INFO,
    NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS,
    Metric,
    Sample,
)
from flopwatch.catalogue.xid import SXID_SEVERITIES, paging_xids, sxids, xids
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.xid import PLACE_SECONDS, STRANGER_SECONDS, Xid, from_the_start, nvlink5
from flopwatch.node.collectors.xid.counts import MAX_CODES, MAX_LINK_ERRORS, MAX_STRANGERS, MAX_SWITCH_ERRORS, Counts
from flopwatch.node.collectors.xid.kernel_lines import NODE_EVENTS
from flopwatch.node.collectors.xid.reconcile import MAX_STORED
from tests.support import ROOT, TESTS

CAPTURES = TESTS / "captures" / "kmsg"
BOOTED = 1_700_000_000.0
START = from_the_start("NVIDIA H100 80GB HBM3")
ZERO = {("0", str(code)): 0 for code in START} | {("1", str(code)): 0 for code in START}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """Return an inventory of two GPUs, at 0000:53:00 and 0000:64:00."""
    inventory = tmp_path / "gpus.json"
    inventory.write_text(
        json.dumps(
            {
                f"GPU-{bus}": dict.fromkeys(GPU_INFO.labels, "")
                | {
                    "gpu": gpu,
                    "uuid": f"GPU-{bus}",
                    "pci_bus_id": f"00000000:{bus}:00.0",
                    "driver_version": "570.124.06",
                }
                for gpu, bus in (("0", "53"), ("1", "64"))
            }
        )
    )
    return inventory


def line(text: str, sequence: int = 0, second: int = 0) -> str:
    return f"4,{sequence},{second}000000,-;{text}\n"


def xid(bus: str, code: int, sequence: int = 0, second: int = 0, text: str = "pid=1, name=x, text") -> str:
    return line(f"NVRM: Xid (PCI:0000:{bus}:00): {code}, {text}", sequence, second)


def counts(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(labels[0], labels[2]): value for row, labels, value in samples if row is GPU_XID_ERRORS_TOTAL}


def last(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(labels[0], labels[2]): value for row, labels, value in samples if row is GPU_XID_LAST_TIMESTAMP_SECONDS}


def values(samples: list[Sample], wanted: Metric) -> dict[tuple[str, ...], float]:
    return {labels: value for row, labels, value in samples if row is wanted}


def collector(kmsg: Path, gpus: Path, boot_id: str = "boot1", clock: Callable[[], float] = lambda: BOOTED) -> Xid:
    return Xid(kmsg, gpus, gpus.parent / "xid.json", boot_id, lambda: BOOTED, clock=clock)


# Counting.


def test_critical_codes_are_0_on_every_gpu_before_anything_happened(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text("6,0,0,-;Linux version 6.1\n")
    samples = collector(tmp_path / "kmsg", gpus).read()
    assert counts(samples) == ZERO
    assert last(samples) == {}
    assert values(samples, HOST_KERNEL_EVENTS_TOTAL) == {(event,): 0 for event in NODE_EVENTS}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1}


@pytest.mark.parametrize(
    ("model", "own"),
    [
        ("NVIDIA H100 80GB HBM3", (46, 74, 109, 136, 143)),
        ("NVIDIA L40S", (46, 74, 109, 136, 143)),
        ("Tesla T4", (46, 74, 109, 136, 143)),
        ("NVIDIA RTX PRO 6000 Blackwell", (46, 74, 109, 136, 143)),
        ("", (46, 74, 109, 136, 143)),
        ("NVIDIA B200", (144, 145, 146, 149, 150)),
        ("NVIDIA GB200", (144, 145, 146, 149, 150)),
        ("NVIDIA B300 SXM6 AC", (144, 145, 146, 149, 150)),
    ],
)
def test_the_codes_from_the_start_are_those_of_the_cards_generation(
    tmp_path: Path, gpus: Path, model: str, own: tuple[int, ...]
) -> None:
    gpus.write_text(gpus.read_text().replace('"model": ""', f'"model": "{model}"'))
    (tmp_path / "kmsg").write_text("6,0,0,-;Linux version 6.1\n")
    samples = collector(tmp_path / "kmsg", gpus).read()
    everywhere = (48, 62, 64, 79, 94, 95, 119, 120, 140)
    assert counts(samples) == {(gpu, str(code)): 0 for gpu in "01" for code in (*everywhere, *own)}
    assert values(samples, GPU_XID_INFO) == {}


def test_xids_are_counted_where_and_when_they_happened(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(xid("53", 79, 0, 10) + xid("64", 13, 1, 20) + xid("64", 13, 2, 30))
    samples = collector(tmp_path / "kmsg", gpus).read()
    assert counts(samples) == ZERO | {("0", "79"): 1, ("1", "13"): 2}
    assert last(samples) == {("0", "79"): BOOTED + 10, ("1", "13"): BOOTED + 30}
    assert {labels[:2] for row, labels, _ in samples if row is GPU_XID_ERRORS_TOTAL} == {
        ("0", "GPU-53"),
        ("1", "GPU-64"),
    }


def test_an_info_series_describes_the_codes_seen_on_this_host(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(xid("64", 13) + xid("64", 4242, 1))
    samples = collector(tmp_path / "kmsg", gpus).read()
    info = values(samples, GPU_XID_INFO)
    assert {labels[0] for labels in info} == {"13"}
    assert ("13", "Graphics Engine Exception", "application", "error", "RESTART_APP") in info
    assert counts(samples)["1", "4242"] == 1  # a code that is not in NVIDIA's table is counted and has no info


def test_the_drivers_second_report_of_a_gpu_that_fell_off_the_bus_is_the_same_event(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79, 0, 10) + line("NVRM: GPU 0000:53:00.0: GPU has fallen off the bus.", 1, 11))
    reader = collector(kmsg, gpus)
    assert counts(reader.read())["0", "79"] == 1
    with kmsg.open("a") as file:
        file.write(
            line(
                "NVRM: The NVIDIA GPU 0000:53:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has\\x0a"
                "NVRM: fallen off the bus and is not responding to commands.",
                2,
                200,
            )
        )
    samples = reader.read()
    assert counts(samples)["0", "79"] == 2
    assert last(samples)["0", "79"] == BOOTED + 200


def test_an_xid_seen_before_nvml_named_the_gpu_is_counted_once_it_does(tmp_path: Path, gpus: Path) -> None:
    kmsg, inventory = tmp_path / "kmsg", gpus.read_text()
    kmsg.write_text(xid("53", 79, 0, 10))
    gpus.unlink()
    assert counts(collector(kmsg, gpus).read()) == {}
    gpus.write_text(inventory)
    samples = collector(kmsg, gpus).read()
    assert counts(samples) == ZERO | {("0", "79"): 1}
    assert last(samples) == {("0", "79"): BOOTED + 10}


def test_a_gpu_without_a_name_in_time_is_named_by_its_address_or_by_the_driver(tmp_path: Path, gpus: Path) -> None:
    """The inventory is empty for good where its folder cannot be written, and a GPU lost at boot is never in it."""
    uuid = "GPU-509665ad-b600-ac93-3616-d754b23d636d"
    (tmp_path / "kmsg").write_text(
        line(f"NVRM: GPU at PCI:0000:9b:00: {uuid}") + xid("9b", 79, 1, 10) + xid("9c", 48, 2, 10) + xid("53", 48, 3)
    )
    clock = iter([BOOTED, *[BOOTED + STRANGER_SECONDS] * 99])
    samples = collector(tmp_path / "kmsg", gpus, clock=lambda: next(clock)).read()
    strangers = {
        labels: value for labels, value in values(samples, GPU_XID_ERRORS_TOTAL).items() if ":" in labels[0] and value
    }
    assert strangers == {("0000:9b:00", uuid, "79"): 1, ("0000:9c:00", "0000:9c:00", "48"): 1}
    assert counts(samples)["0", "48"] == 1


# NVLink, NVSwitch, the node.


def test_nvlink_errors_and_the_recovery_action_of_a_captured_gb200(tmp_path: Path, gpus: Path) -> None:
    text = (CAPTURES / "xid_lines.txt").read_text().replace("(PCI:0009:01:00)", "(PCI:0000:53:00)")
    lines = [text.split("] ", 1)[1] for text in text.splitlines() if text.startswith("[17116")]
    (tmp_path / "kmsg").write_text("".join(line(text, place, 10) for place, text in enumerate(lines)))
    samples = collector(tmp_path / "kmsg", gpus).read()
    assert counts(samples) == ZERO | {("0", "149"): 3, ("0", "154"): 1}
    peer = ("149", "NETIR_LINK_EVT")
    todo = ("link fatal", "RESET_GPU", "INVESTIGATE_PEER_DEVICE")
    assert values(samples, GPU_XID_NVLINK_ERRORS_TOTAL) == {
        ("0", "GPU-53", *peer, link, *todo): 1 for link in ("1", "0", "15")
    }
    assert values(samples, GPU_XID_RECOVERY_ACTION_ID) == {("0", "GPU-53"): 4}
    assert samples == collector(tmp_path / "kmsg", gpus).read()  # after a restart


def test_the_errors_of_a_switch_have_their_series_once_there_are_any(tmp_path: Path, gpus: Path) -> None:
    lines = [text.split("] ")[-1] for text in (CAPTURES / "sxid_lines.txt").read_text().splitlines()]
    (tmp_path / "kmsg").write_text("".join(line(text, place, place) for place, text in enumerate(lines)))
    for _restart in range(2):
        samples = collector(tmp_path / "kmsg", gpus).read()
        assert values(samples, NVLINK_SWITCH_SXID_ERRORS_TOTAL) == {
            ("0000:05:00.0", "12028"): 3,
            ("0000:00:00.0", "20034"): 2,
        }
        assert values(samples, NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS) == {
            ("0000:05:00.0", "12028"): BOOTED + 7,
            ("0000:00:00.0", "20034"): BOOTED + 8,
        }
        assert values(samples, NVLINK_SWITCH_SXID_INFO) == {
            ("12028", "egress nonposted PRIV error", "non-fatal", "warning", "none / watch"): 1,
            (
                "20034",
                "LTSSM Fault Up",
                "potentially fatal",
                "critical",
                "restart the guest VM or reset the GPUs and switches of that port",
            ): 1,
        }


def test_other_events_of_the_node_are_counted(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(
        (CAPTURES / "kmsg_peermem.log").read_text()
        + "\n"
        + line("mlx5_core 0000:41:00.1: Port module event: module 1, Cable unplugged")
    )
    for _restart in range(2):
        events = values(collector(tmp_path / "kmsg", gpus).read(), HOST_KERNEL_EVENTS_TOTAL)
        assert {name: value for (name,), value in events.items() if value} == {"peermem_error": 7, "cable_unplugged": 1}


def test_a_failed_initialization_is_kept_by_gpu_and_moves_to_a_gpu_that_gets_a_name(tmp_path: Path, gpus: Path) -> None:
    def failed(second: float) -> dict[tuple[str, ...], float]:
        reader = collector(tmp_path / "kmsg", gpus, clock=iter([BOOTED, *[BOOTED + second] * 9]).__next__)
        return values(reader.read(), GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS)

    inventory = gpus.read_text()
    (tmp_path / "kmsg").write_text(
        "".join(line(f"NVRM: GPU 0000:{bus}:00.0: RmInitAdapter failed! (0x26:1463)", 0, 7) for bus in ("53", "9b"))
    )
    gpus.write_text("{}")
    assert failed(1) == {}  # GPUs may still get a name
    lost = ("0000:9b:00", "0000:9b:00")
    assert failed(STRANGER_SECONDS) == {("0000:53:00", "0000:53:00"): BOOTED + 7, lost: BOOTED + 7}
    gpus.write_text(inventory)
    assert failed(STRANGER_SECONDS) == {("0", "GPU-53"): BOOTED + 7, lost: BOOTED + 7}


def test_no_kernel_log_makes_more_series_than_a_node_has_parts(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    link = "UNIT{}  Fatal   XC0 i0 Link {:02d} (0x00000000 0x00000001)"
    kmsg.write_text(
        "".join(xid("53", 149, text=link.format(unit, unit % 36)) for unit in range(10, 90))
        + "".join(xid(f"{bus:02x}", 79) for bus in range(256))
        + "".join(
            line(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {code}, Fatal, Link 1") for code in range(10000, 11000)
        )
    )
    clock = iter([BOOTED, *[BOOTED + STRANGER_SECONDS] * 999])
    samples = collector(kmsg, gpus, clock=lambda: next(clock)).read()
    errors = values(samples, GPU_XID_NVLINK_ERRORS_TOTAL)
    assert (len(errors), sum(errors.values())) == (MAX_LINK_ERRORS + 1, 80)
    assert errors["0", "GPU-53", "149", "other", "other", "", "", ""] == 80 - MAX_LINK_ERRORS
    assert len({labels[1] for labels in values(samples, GPU_XID_ERRORS_TOTAL)}) == 2 + MAX_STRANGERS
    assert len(values(samples, NVLINK_SWITCH_SXID_ERRORS_TOTAL)) == MAX_SWITCH_ERRORS
    gpu = Counter(labels[:2] for row, labels, _ in samples if row.labels[:2] == GPU)
    assert max(gpu.values()) <= 60  # half of a GPU's budget, for a GPU with every error there is


def test_a_flood_of_different_codes_makes_few_series_and_hides_no_critical_one(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("".join(xid("53", code, code, 5) for code in range(1000, 11_000)) + xid("53", 79, 30_000, 6))
    now = BOOTED
    reader = collector(kmsg, gpus, clock=lambda: now)
    samples = reader.read()
    assert counts(samples) == ZERO | {("0", str(code)): 1 for code in range(1000, 1000 + MAX_CODES)} | {
        ("0", "other"): 10_000 - MAX_CODES,
        ("0", "79"): 1,
    }
    assert last(samples)["0", "other"] == BOOTED + 5
    assert "other" not in {labels[0] for labels in values(samples, GPU_XID_INFO)}
    # What is compared with NVML's events is bounded, and forgotten after a while.
    assert len([*reader._reconciler]) <= MAX_CODES + 1 + MAX_STORED
    now += 1000
    reader.read()
    assert [*reader._reconciler] == []
    with kmsg.open("a") as file:
        file.write(xid("53", 22_000, 31_000, 7) + xid("64", 22_000, 31_001, 7))
    again = counts(reader.read())
    assert (again["0", "other"], again["1", "22000"]) == (10_001 - MAX_CODES, 1)
    assert (tmp_path / "xid.json").stat().st_size < 8000
    assert counts(collector(kmsg, gpus).read()) == again


def test_a_flood_of_addresses_is_not_remembered(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(
        "".join(
            line(f"NVRM: Xid (PCI:{domain:04x}:{bus:02x}:00): 31, text") for domain in range(64) for bus in range(256)
        )
    )
    reader = collector(tmp_path / "kmsg", gpus)
    assert counts(reader.read()) == ZERO | {("0", "31"): 1, ("1", "31"): 1}
    assert len([*reader._reconciler]) == MAX_STRANGERS + 2


def test_the_codes_of_a_stranger_and_of_the_gpu_it_turns_out_to_be_are_together_no_more(
    tmp_path: Path, gpus: Path
) -> None:
    counted = Counts()
    for owner, first in (("0000:53:00", 1000), ("GPU-53", 2000)):
        for code in range(first, first + MAX_CODES):
            counted.xid(owner, code, 1.0)
    counted.adopt("0000:53:00", "GPU-53")
    assert len(counted.xids["GPU-53"]) == MAX_CODES + 1
    assert sum(count.number for count in counted.xids["GPU-53"].values()) == 2 * MAX_CODES


# Logs.


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


@pytest.fixture
def terminal() -> Iterator[tuple[int, Path]]:
    """Return what stands for /dev/kmsg: a terminal, in its line mode, hands out one line per read."""
    master, slave = os.openpty()
    yield master, Path(os.ttyname(slave))
    os.close(slave)
    os.close(master)


def test_a_device_gives_one_record_a_read_and_repeats_them_all_when_opened_again(
    terminal: tuple[int, Path], gpus: Path
) -> None:
    master, device = terminal
    os.write(master, (xid("53", 79, 5) + xid("53", 48, 6)).encode())
    assert counts(collector(device, gpus).read()) == ZERO | {("0", "79"): 1, ("0", "48"): 1}
    os.write(master, (xid("53", 79, 5) + xid("53", 48, 6) + xid("53", 48, 7)).encode())
    restarted = collector(device, gpus)
    assert counts(restarted.read()) == ZERO | {("0", "79"): 1, ("0", "48"): 2}
    assert counts(restarted.read()) == ZERO | {("0", "79"): 1, ("0", "48"): 2}
    os.write(master, xid("53", 79, 0).encode())  # record numbers start again at every boot
    rebooted = collector(device, gpus, "boot2")
    assert counts(rebooted.read()) == ZERO | {("0", "79"): 2, ("0", "48"): 2}


def test_records_that_were_overwritten_are_counted_as_lost(
    terminal: tuple[int, Path], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, device = terminal
    reader = collector(device, gpus)
    os.write(master, (xid("53", 79, 5) + xid("53", 79, 6)).encode())
    assert values(reader.read(), FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 0}
    read, overrun = os.read, iter([True])

    def once_overwritten(file: int, size: int) -> bytes:
        if file != master and next(overrun, False):
            raise BrokenPipeError
        return read(file, size)

    monkeypatch.setattr(os, "read", once_overwritten)
    os.write(master, (xid("53", 79, 106) + xid("53", 79, 107)).encode())
    samples = reader.read()
    assert values(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 99}
    assert counts(samples)["0", "79"] == 4


def test_records_that_were_overwritten_between_reads_are_counted_as_lost(
    terminal: tuple[int, Path], gpus: Path
) -> None:
    master, device = terminal
    reader = collector(device, gpus)
    os.write(master, xid("53", 79, 5).encode())
    reader.read()
    os.write(master, line("noise", 6).encode() + line("noise", 7).encode())
    reader.read()
    reader.close()
    os.write(master, xid("53", 79, 17).encode())
    restarted = collector(device, gpus)
    samples = restarted.read()
    assert values(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 9}  # 8 to 16
    assert counts(samples)["0", "79"] == 2
    restarted.close()
    os.write(master, xid("53", 79, 900).encode())  # earlier records of another boot are unknown
    assert values(collector(device, gpus, "boot2").read(), FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 0}


def test_noise_that_was_read_before_a_kill_is_not_lost(terminal: tuple[int, Path], gpus: Path) -> None:
    master, device = terminal
    now = BOOTED
    reader = collector(device, gpus, clock=lambda: now)
    for sequence in (5, 6, 7):
        os.write(master, line("noise", sequence).encode())
        reader.read()
        now += PLACE_SECONDS
    os.write(master, line("noise", 20).encode())  # 8 to 19 are overwritten, and the process is killed, not closed
    assert values(collector(device, gpus).read(), FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 12}


def test_the_place_is_kept_at_most_once_a_minute(terminal: tuple[int, Path], gpus: Path, tmp_path: Path) -> None:
    master, device = terminal
    now = BOOTED
    reader = collector(device, gpus, clock=lambda: now)
    written = set()
    for sequence in range(40):
        os.write(master, line("noise", sequence).encode())
        reader.read()
        written.add((tmp_path / "xid.json").stat().st_mtime_ns)
        now += PLACE_SECONDS / 4
    assert len(written) == 10


def test_malformed_records_cost_nothing_but_themselves(terminal: tuple[int, Path], gpus: Path) -> None:
    master, device = terminal
    os.write(
        master,
        b"".join(
            [
                b"no record\n",
                b" SUBSYSTEM=pci\n",
                b"4,\n",
                b"4,x,1,-;NVRM: Xid (PCI:0000:53:00): 79, a\n",
                b"4,99999999999999999999,1,-;NVRM: Xid (PCI:0000:53:00): 79, a\n",
                b"\xff\xfe,1,1,-;Xid (\n",
                b"\n",
                b"4,1,1,-;NVRM: Xid (PCI:zz:53:00): 79, a\n",
                b"4,2,1,-;NVRM: Xid (PCI:0000:53:00): , a\n",
                b"4,3,1,-;NVRM: Xid (PCI:0000:53:00): 79, \xff\xfe a\n",
                b"4,4,1,-;NVRM: Xid (PCI:0000:53:0\n",
                xid("64", 48, 5).encode(),
            ]
        ),
    )
    samples = collector(device, gpus).read()
    assert counts(samples) == ZERO | {("0", "79"): 1, ("1", "48"): 1}
    assert values(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == {(): 0}


def test_the_clock_of_the_kernel_log_may_be_off_but_what_is_read_live_was_written_since_the_last_read(
    terminal: tuple[int, Path], gpus: Path
) -> None:
    master, device = terminal
    now = BOOTED + 10_000
    reader = Xid(device, gpus, gpus.parent / "xid.json", "boot1", lambda: BOOTED, clock=lambda: now)
    os.write(master, xid("53", 79, 1, 9_000).encode())
    assert last(reader.read()) == {("0", "79"): BOOTED + 9_000}
    now += 15
    os.write(master, xid("53", 79, 2, 9_500).encode())
    assert last(reader.read()) == {("0", "79"): BOOTED + 10_000}
    os.write(master, xid("53", 79, 3, 11_000).encode())
    assert last(reader.read()) == {("0", "79"): BOOTED + 10_015}


def test_a_flood_in_a_file_is_read_in_pieces_and_every_xid_in_it_counts(tmp_path: Path, gpus: Path) -> None:
    noise = "".join(line(f"audit: type=1400 noise {number} {'x' * 40}", number) for number in range(1000))
    pieces = -(-(20 << 20) // len(noise))
    (tmp_path / "kmsg").write_text((noise + xid("53", 13)) * pieces)
    reader = collector(tmp_path / "kmsg", gpus)
    first = counts(reader.read())["0", "13"]
    assert 0 < first < pieces
    assert [counts(reader.read())["0", "13"] for _ in range(2)][-1] == pieces


def test_a_line_that_does_not_end_is_passed_over(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_bytes(b"x" * (9 << 20) + b"\n" + xid("53", 79).encode())
    reader = collector(tmp_path / "kmsg", gpus)
    assert counts(reader.read())["0", "79"] == 0
    assert counts(reader.read())["0", "79"] == 1


# Nothing to read, nowhere to write.


def test_without_a_kernel_log_the_source_does_not_exist(tmp_path: Path, gpus: Path) -> None:
    reader = collector(tmp_path / "kmsg", gpus)
    for _restart in range(2):
        with pytest.raises(Unsupported, match="No such file"):
            reader.read()
        reader.close()
        reader = collector(tmp_path / "kmsg", gpus)


def test_a_kernel_log_that_went_away_takes_no_count_with_it(tmp_path: Path, gpus: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(xid("53", 79))
    reader = collector(kmsg, gpus)
    reader.read()
    kmsg.rename(tmp_path / "gone")
    for without in (reader, collector(kmsg, gpus)):
        samples = without.read()
        assert counts(samples) == ZERO | {("0", "79"): 1}
        assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0}
    (tmp_path / "gone").rename(kmsg)
    samples = reader.read()
    assert counts(samples) == ZERO | {("0", "79"): 1}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"next": "x", "counts": 3}',
        '{"counts": {"GPU-53": {"a": 1}}}',
        '{"next": -1}',
        '{"log": 3, "next": -1.5, "since": "x", "events": [[1], 2, ["0000:53:00", 79, "x", []]], "links": '
        '{"GPU-53": [[1]]},'
        ' "notices": [], "recovery": {"GPU-53": "x"}, "switches": [[1]], "node": 1, "introduced": null}',
    ],
)
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@example({"recovery": {"GPU-53": float("inf")}})
@given(st.dictionaries(st.sampled_from([*Counts().dump()]), JSON))
def test_counts_of_any_shape_load_and_go_on(stored: Mapping[str, Any]) -> None:
    counts = Counts()
    counts.load(stored)
    counts.xid("GPU-53", 79, 1.0)
    counts.switch("0000:05:00.0", "20034", 1.0)
    again = Counts()
    again.load(json.loads(json.dumps(counts.dump())))
    assert again.dump() == counts.dump()


# Documents.


def test_the_page_about_xids_agrees_with_the_table() -> None:
    assert (ROOT / "docs" / "xid.md").read_text() == xid_page()
    assert xids()[94].severity == "error"
    assert {row.category for row in sxids().values()} == SXID_SEVERITIES.keys()


def test_critical_are_the_codes_for_which_nvidia_wants_a_reset_a_reboot_or_an_investigation() -> None:
    actions = ("RESET_GPU", "RESTART_BM", "WORKFLOW_")
    assert list(paging_xids()) == [
        code
        for code, row in sorted(xids().items())
        if row.severity in ("critical", "fatal") and row.action.startswith(actions)
    ]
    for model in ("NVIDIA H100 80GB HBM3", "NVIDIA B200"):
        assert {*from_the_start(model)} - {*paging_xids()} == {94}
    fatal = {row.xid for row in nvlink5.table() if row.severity in ("fatal", "link fatal")}
    assert fatal == {*from_the_start("NVIDIA B200")} & {*nvlink5.CODES}
