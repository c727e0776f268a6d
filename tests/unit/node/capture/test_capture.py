"""Captures: recorded from the simulated node, masked, written, and replayed to the same series."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flopwatch
from flopwatch.__main__ import main
from flopwatch.http.exposition import Exposition
from flopwatch.node.capture import Capture, capture
from flopwatch.node.capture.masking import PID_MAX, Masker
from flopwatch.node.capture.recorder import Recorder
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.settings import SettingsError
from flopwatch.simulate.pynvml import Simulation
from simulator import nvml_replay as replay
from simulator.host import SimulatedNode
from simulator.nvml_replay import Replay

START = 1_700_000_000.0


class Node(SimulatedNode):
    """A simulated node with a clock that its captures and collectors share."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "simulated", uptime=lambda: 12.5)
        self.now = START
        self.create(self.now)

    def pause(self) -> None:
        self.now += 10
        self.tick(self.now)

    def captured(self, library: Any = None, hosts: tuple[str, ...] = ("node1",), **how: Any) -> Capture:
        return capture(
            library or Simulation(self.root),
            how.pop("sysfs", self.sysfs),
            how.pop("kmsg", self.kmsg),
            hosts,
            pause=self.pause,
            clock=lambda: self.now,
            now=lambda: START,
            **how,
        )

    def collector(self, library: Any, folder: Path) -> Nvml:
        folder.mkdir(exist_ok=True)
        return Nvml(
            library, "node1", folder / "gpus.json", clock=lambda: self.now, sysfs=self.sysfs, proc=self.root / "proc"
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def texts(folder: Path) -> str:
    """Return every name, link and content in a folder."""
    found: list[str] = []
    for path in sorted(folder.rglob("*")):
        found.append(str(path.relative_to(folder)))
        if path.is_symlink():
            found.append(os.readlink(path))
        elif path.is_file():
            found.append(path.read_text())
    return "\n".join(found)


FAULTS: dict[str, Callable[[SimulatedNode], None]] = {
    "nothing": lambda node: None,
    "a lost GPU": lambda node: node.lose(3),
    "MIG": lambda node: node.mig(2, "on"),
    "a profiler": lambda node: node.profiler(1, "on"),
    "an NVLink with errors": lambda node: node.nvlink_errors(4, 7, "crc", 12),
    "a call that fails": lambda node: node.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, 5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_node_is_replayed_to_the_same_series_byte_for_byte(node: Node, tmp_path: Path, fault: str) -> None:
    recorder = Recorder(Simulation(node.root))
    collector = node.collector(recorder, tmp_path / "recorded")
    times, before = [], []
    for read in range(4):
        if read == 1:
            FAULTS[fault](node)
        times.append(node.now)
        before.append(Exposition().render(collector.read()))
        node.pause()
    recorded = json.loads(json.dumps(recorder.recorded()))
    # Recorded once more: this time with the vendor's own pointers for handles, as on a real driver.
    once_more = Recorder(Replay(recorded))
    again = node.collector(once_more, tmp_path / "replayed")
    after = []
    for time in times:
        node.now = time
        after.append(Exposition().render(again.read()))
    assert after == before
    assert len(set(before)) == 4, "the readings move"
    assert once_more.recorded() == recorded


def test_a_capture_holds_calls_and_fields_and_replays_with_its_masks(node: Node, tmp_path: Path) -> None:
    node.captured().write(tmp_path / "capture")
    nvml = json.loads((tmp_path / "capture" / "nvml.json").read_text())
    assert nvml["about"] == {"flopwatch": flopwatch.__version__, "driver": "590.48.01", "date": "2023-11-14"}
    assert nvml["reads"] == [0.0, 10.0]
    assert nvml["nvml"]["system"]["calls"]["nvmlDeviceGetHandleByIndex(7)"] == [{"handle": "gpu7"}]
    calls, fields = nvml["nvml"]["gpu3"]["calls"], nvml["nvml"]["gpu3"]["fields"]
    assert calls["nvmlDeviceGetName()"] == ["NVIDIA H100 80GB HBM3"]
    assert calls["nvmlDeviceGetUUID()"] == ["GPU-00000000-0000-0000-0000-000000000004"]
    assert calls["nvmlDeviceGetSerial()"] == ["0000000000004"]
    assert len(calls["nvmlDeviceGetPowerUsage()"]) == 2
    assert [answer.keys() for answer in fields["83"]] == [{"ullVal"}, {"ullVal"}]
    collector = node.collector(replay.load(tmp_path / "capture"), tmp_path / "replayed")
    info = [labels for row, labels, _ in collector.read() if row.name == "gpu_info"]
    assert [labels[1] for labels in info] == [f"GPU-00000000-0000-0000-0000-{gpu:012d}" for gpu in range(1, 9)]


def test_the_same_original_has_the_same_mask_in_nvml_and_in_the_kernel_log(node: Node, tmp_path: Path) -> None:
    node.xid(3, 94)
    node.captured().write(tmp_path / "capture")
    assert (tmp_path / "capture" / "kmsg").read_text() == (
        "4,0,12500000,-;NVRM: GPU at PCI:0000:86:00: GPU-00000000-0000-0000-0000-000000000004\n"
        "4,1,12500000,-;NVRM: GPU Board Serial Number: 0000000000004\n"
        "4,2,12500000,-;NVRM: Xid (PCI:0000:86:00): 94, pid=4194305, name=masked-1, "
        "Contained: SM (0x1). RST: No, D-RST: No\n"
    )
    gpu_0 = json.loads((tmp_path / "capture" / "nvml.json").read_text())["nvml"]["gpu0"]
    assert re.findall(r'"pid": (\d+)', json.dumps(gpu_0))[:1] == ["4194305"], "the same process"


def test_captured_ports_give_the_same_series_and_a_later_read_holds_only_what_changed(
    node: Node, tmp_path: Path
) -> None:
    def series(sysfs: Path, folder: Path) -> str:
        folder.mkdir()
        node.collector(Simulation(node.root), folder).read()
        collector = Infiniband(
            sysfs, "node1", folder / "ports.json", routes=folder / "route", clock=lambda: 0.0, wall=lambda: START
        )
        samples = collector.read()
        collector.close()
        return Exposition().render(samples)

    before = series(node.sysfs, tmp_path / "before")
    node.captured(reads=2).write(tmp_path / "capture")
    assert series(tmp_path / "capture" / "sys", tmp_path / "after") == before
    assert 'rail="7"' in before, "the place among the GPUs is part of it"
    later = {path.name for path in (tmp_path / "capture" / "sys.2").rglob("*") if path.is_file()}
    assert "port_xmit_data" in later
    assert "fw_ver" not in later


def test_two_captures_of_the_same_node_are_the_same(node: Node, tmp_path: Path) -> None:
    node.captured().write(tmp_path / "one")
    again = Node(tmp_path / "again")
    again.captured().write(tmp_path / "two")
    assert texts(tmp_path / "one") == texts(tmp_path / "two")


serials = st.from_regex(r"[0-9]{10,13}", fullmatch=True).filter(lambda text: len(set(text)) > 4)
hosts = st.from_regex(r"[a-z]{2,8}-?[a-z]{1,4}[0-9]{2,4}(\.[a-z]{5,9}\.internal)?", fullmatch=True)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    host=hosts,
    serial=serials,
    identities=st.lists(st.uuids(version=4), min_size=8, max_size=8, unique=True),
    mac=st.binary(min_size=6, max_size=6).filter(any),
    guid=st.binary(min_size=8, max_size=8).filter(all),
    address=st.ip_addresses(v=4, network="10.0.0.0/8"),
    alive=st.booleans(),
    process=st.from_regex(r"[a-z]{2,6}[:_ -]{1,2}[a-z]{2}[0-9]{3}", fullmatch=True),
    pid=st.integers(20_000, PID_MAX - 1),
    user=st.from_regex(r"[a-z]{3,9}[0-9]{2}", fullmatch=True),
)
def test_nothing_that_names_the_node_is_left_anywhere_in_a_capture(
    tmp_path_factory: pytest.TempPathFactory,
    host: str,
    serial: str,
    identities: list[uuid.UUID],
    mac: bytes,
    guid: bytes,
    address: object,
    alive: bool,
    process: str,
    pid: int,
    user: str,
) -> None:
    folder = tmp_path_factory.mktemp("node")
    node = Node(folder)
    library = Simulation(node.root)
    network_address, node_guid = mac.hex(":"), guid.hex(":", 2)
    device = node.sysfs / "class" / "infiniband" / "mlx5_0"
    (device / "node_guid").write_text(f"{node_guid}\n")
    (device / "fw_ver").write_text(f"28.41.1000 for {host}\n")
    node.kmsg.write_text(
        f"4,0,1,-;NVRM: GPU at PCI:0000:53:00: GPU-{identities[0]}\n"
        f"4,1,1,-;NVRM: GPU Board Serial Number: {serial}\n"
        f"6,2,1,-;mlx5_core 0000:51:00.0 {host}: MAC {network_address}, GUID {node_guid} 0x{guid.hex()}\n"
        f"6,3,1,-;mlx5_core 0000:51:00.0: {address}:18515\n"
        f"6,4,1,-;usb 1-1: {host} has nothing to do with it\n"
        f"4,5,1,-;NVRM: Xid (PCI:0000:53:00): 43, pid={pid}, name={process}, Ch 00000008\n"
        f"4,6,1,-;NVRM: CPU: 3 PID: {pid} Comm: {process} Tainted: P           OE\n"
        f"4,7,1,-;nvidia: cannot open /home/{user}/libcuda.so (user={user})\n"
        f"4,8,1,-;NVRM: the board {serial} has been seen before\n"
        "6,9,1,-;Command line: quiet driver_async_probe=mlx5_core token=t0ken\n"
        "5,10,1,-;Kernel command line: quiet driver_async_probe=mlx5_core token=t0ken\n"
    )
    if not alive:
        node.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "nvmlDeviceGetUUID", lambda handle: f"GPU-{identities[handle.index]}")
        patch.setattr(library, "nvmlDeviceGetSerial", lambda handle: serial)
        node.captured(library, (host,)).write(folder / "capture")
    left = texts(folder / "capture").lower()
    label, _, domain = host.partition(".")
    assert [name for name in (host, label, domain) if name and re.search(rf"\b{re.escape(name)}\b", left)] == []
    names = (serial, network_address, node_guid, guid.hex(), str(address), *map(str, identities))
    assert [name for name in names if name in left] == []
    log = (folder / "capture" / "kmsg").read_text()
    assert [name for name in (process, str(pid), user, "t0ken") if re.search(rf"\b{name}\b", log)] == []
    assert (folder / "capture" / "nvml.json").exists() is alive


def test_masks_keep_the_shape_and_leave_alone_what_identifies_no_one() -> None:
    masker = Masker(["node17.cluster.example"], ["acme"])
    assert masker.word("serial", "1650124010003") == "0000000000001"
    assert [
        masker.text(text)
        for text in (
            "GPU-513536b6-7d19-9063-b049-1e69664bb298 MIG-GPU-513536B6-7d19-9063-b049-1e69664bb298/3/0",
            "node17.cluster.example node17-ib0 cluster.example node170 ACME-7 1650124010003",
            "0c42:a103:0012:3456 0x0c42a10300123456 0000:0000:0000:0000",
            "fe80:0000:0000:0000:0c42:a1ff:fe03:0012 fe80::0c42:1",
            "0c:42:a1:03:12:34 10.1.2.3:18515 enx0c42a1031234",
            "PCI:0000:53:00.0 (PCI:0000:53:00): 79 92.00.36.00.02 590.48.01 28.41.1000 12:30:45 G520.0200.00.05",
        )
    ] == [
        "GPU-00000000-0000-0000-0000-000000000001 MIG-GPU-00000000-0000-0000-0000-000000000001/3/0",
        "masked-host-1 masked-host-2-ib0 masked-host-3 node170 masked-1-7 0000000000001",
        "0000:0000:0000:0001 0x0000000000000001 0000:0000:0000:0000",
        "2001:0db8:0000:0000:0000:0000:0000:0001 2001:0db8:0000:0000:0000:0000:0000:0002",
        "02:00:00:00:00:01 198.18.0.1:18515 enx020000000001",
        "PCI:0000:53:00.0 (PCI:0000:53:00): 79 92.00.36.00.02 590.48.01 28.41.1000 12:30:45 G520.0200.00.05",
    ]


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("NVRM: GPU Board Serial Number: 1650124014249", "NVRM: GPU Board Serial Number: 0000000000001"),
        (
            "NVRM: Xid (PCI:0000:86:00): 43, pid=1234, name=pt main thr, Ch 00000008",
            "NVRM: Xid (PCI:0000:86:00): 43, pid=4194305, name=masked-1, Ch 00000008",
        ),
        ("NVRM: Xid (PCI:0000:86:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",) * 2,
        (
            "CPU: 3 PID: 4711 Comm: ray::train Not tainted 6.8.0 nvidia",
            "CPU: 3 PID: 4194305 Comm: masked-1 Not tainted 6.8.0 nvidia",
        ),
        (
            'apparmor="DENIED" name="/home/alice/.nvidia" pid=12 comm="nvidia-smi"',
            'apparmor="DENIED" name="masked-1" pid=4194305 comm="masked-2"',
        ),
        (
            "Nov  1 10:00:00 gpu-17 kernel: NVRM: gpu-17 read /home/alice/x",
            "Nov  1 10:00:00 masked-host-1 kernel: NVRM: masked-host-1 read /home/masked-1/x",
        ),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32",) * 2,
    ],
)
def test_a_log_shows_itself_what_is_a_name(line: str, masked: str) -> None:
    masker = Masker()
    masker.learn(line)
    assert masker.log(line) == masked


@given(
    st.text(alphabet="0123456789abcdefg:.-x% GPU\n", max_size=80),
    st.sampled_from(["", "pid=", "name=", "Comm: ", "Serial Number: ", "/home/", "user='"]),
)
@example("::1", "pid=")
@example("ab:cd:ef:01:02:03", "pid=")
@example("::1", "Serial Number: ")
@example("::1", "/home/")
@example("::1", "user='")
def test_a_masked_text_is_not_masked_again(text: str, introduction: str) -> None:
    masker = Masker()
    once = masker.log(introduction + text)
    assert masker.log(once) == once


def test_without_a_gpu_the_rest_of_the_node_is_captured_and_the_capture_states_it(node: Node, tmp_path: Path) -> None:
    node.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    taken = node.captured()
    assert taken.missing == ["GPUs: NVML Shared Library Not Found"]
    taken.write(tmp_path / "capture")
    assert not (tmp_path / "capture" / "nvml.json").exists()
    assert (tmp_path / "capture/sys/class/infiniband/mlx5_0/ports/1/rate").read_text() == "400 Gb/sec (4X NDR)\n"
    assert "- GPUs: NVML Shared Library Not Found\n" in (tmp_path / "capture" / "README.md").read_text()


def test_a_driver_that_fails_is_captured_with_its_failure(node: Node, tmp_path: Path) -> None:
    node.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
    taken = node.captured()
    assert [line.partition(":")[0] for line in taken.missing] == ["GPUs, read 1", "GPUs, read 2"]
    assert json.loads(taken.files["nvml.json"])["nvml"]["system"]["calls"]["nvmlDeviceGetCount()"] == [{"error": 999}]


def test_a_node_without_ports_and_with_a_closed_kernel_log_is_captured(node: Node, tmp_path: Path) -> None:
    taken = node.captured(sysfs=tmp_path / "nosys", kmsg=tmp_path / "nokmsg")
    assert taken.missing == [
        f"InfiniBand ports: none in {tmp_path}/nosys/class/infiniband",
        f"kernel log {tmp_path}/nokmsg: No such file or directory; as root it can be read",
    ]
    assert set(taken.files) == {"nvml.json", "README.md"}


def test_a_file_that_cannot_be_read_is_named_and_hides_no_other(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = node.sysfs / "class/infiniband/mlx5_0/ports/1/counters"
    monkeypatch.chdir(counters)  # the path of a socket may not be long
    for name in ("symbol_error", "link_downed", "VL15_dropped"):
        Path(name).unlink()
    with socket.socket(socket.AF_UNIX) as refusing:
        refusing.bind("symbol_error")  # opening it is ENXIO, for root as well
        Path("link_downed").write_bytes(b"\0\1")
        taken = node.captured(reads=1)
    captured = {
        Path(name).name
        for name in taken.files
        if "/counters/" in name and str(counters.resolve()).endswith(str(Path(name).parent)[4:])
    }
    assert len(captured) == 18
    assert captured.isdisjoint({"symbol_error", "link_downed", "VL15_dropped"})
    assert [line for line in taken.missing if line.endswith("/mlx5_0/ports/1/counters/symbol_error: ENXIO")] == (
        taken.missing
    )


def test_a_link_out_of_sysfs_is_not_followed(node: Node, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the node\n")
    board = node.sysfs / "class/infiniband/mlx5_0/board_id"
    board.unlink()
    board.symlink_to(tmp_path / "secret")
    node.captured().write(tmp_path / "capture")
    assert "of the node" not in texts(tmp_path / "capture")


def test_an_empty_machine_is_refused_with_the_reasons(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    node.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(SettingsError, match=r"nothing to capture here: GPUs: .*; InfiniBand ports: none in"):
        capture(Simulation(node.root), tmp_path / "sys", tmp_path / "kmsg", ["node1"], pause=lambda: None)


def test_the_command_captures_a_node_and_refuses_a_folder_that_is_there(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "capture",
        str(tmp_path / "capture"),
        "--simulated",
        str(node.root),
        "--sysfs",
        str(node.sysfs),
        "--kmsg",
        str(tmp_path / "none"),
        "--host",
        "node1",
        "--reads",
        "1",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"captured {len([path for path in (tmp_path / 'capture').rglob('*') if path.is_file()])} files in "
        f"{tmp_path}/capture; look through them before you publish them",
        f"not captured: kernel log {tmp_path}/none: No such file or directory; as root it can be read",
    ]
    again = tmp_path / "again"
    assert main(["capture", str(again), *command[2:], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {again / name for name in facts["files"]} <= set(again.rglob("*"))
    assert len(facts["files"]) > 100
    assert facts["missing"] == [f"kernel log {tmp_path}/none: No such file or directory; as root it can be read"]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"flopwatch: {tmp_path}/capture is there already; give a folder that does not exist yet\n"
    )


def test_a_replayed_node_answers_what_was_not_recorded_as_a_driver_that_lacks_it() -> None:
    library = Replay(
        {
            "system": {"calls": {"nvmlDeviceGetHandleByIndex(0)": [{"handle": "gpu0"}]}},
            "gpu0": {
                "calls": {"nvmlDeviceGetClockInfo(1)": [345, 1980], "nvmlDeviceGetSerial()": [{"error": 15}]},
                "fields": {"82": [{"uiVal": 48}, {"error": 3}]},
            },
        }
    )
    gpu = library.nvmlDeviceGetHandleByIndex(0)
    assert [library.nvmlDeviceGetClockInfo(gpu, 1) for _ in range(3)] == [345, 1980, 1980]
    codes = []
    for call, *arguments in (("nvmlDeviceGetClockInfo", 2), ("nvmlDeviceGetName",), ("nvmlDeviceGetSerial",)):
        with pytest.raises(pynvml.NVMLError) as failure:
            getattr(library, str(call))(gpu, *arguments)
        codes.append(failure.value.value)
    assert codes == [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_GPU_IS_LOST,
    ]
    values = [library.nvmlDeviceGetFieldValues(gpu, [82, (164, 3)]) for _ in range(2)]
    assert [
        (value.fieldId, value.scopeId, value.nvmlReturn, value.value.uiVal) for batch in values for value in batch
    ] == [(82, 0, 0, 48), (164, 3, 3, 0), (82, 0, 3, 0), (164, 3, 3, 0)]
