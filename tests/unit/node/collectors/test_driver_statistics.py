"""PFC pauses and bit errors from the driver of a RoCE port's interface.

The fake is the kernel's side of the calls: struct ifreq and the structs of include/uapi/linux/ethtool.h. Its names are
those of mlx5 and of bnxt_en, from the sources that driver.py names. The values are made up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.infiniband.driver import PERIOD, DriverStatistics
from tests.support import CAPTURES

LABELS = ("mlx5_0", "1")
PRIORITIES = range(8)
# A port with PFC on priority 3. mlx5 has the pause counters of a priority only where PFC is on.
MLX5 = {
    "rx_packets": 845320277,
    "rx_bits_phy": 4_000_000_000_000,
    "rx_pcs_symbol_err_phy": 2,
    "rx_corrected_bits_phy": 198,
    "rx_err_lane_0_phy": 6,
    **{f"rx_prio{priority}_bytes": 7 for priority in PRIORITIES},
    "rx_prio3_pause": 1523,
    "rx_prio3_pause_duration": 48736,
    "tx_prio3_pause": 0,
    "tx_prio3_pause_duration": 0,
    "rx_prio3_pause_transition": 761,
    "rx_global_pause": 9,
}
BNXT = {
    **{f"rx_pfc_ena_frames_pri{priority}": 0 for priority in PRIORITIES},
    **{f"tx_pfc_ena_frames_pri{priority}": 4 * (priority == 5) for priority in PRIORITIES},
    **{f"pfc_pri{priority}_{side}_duration_us": 0 for priority in PRIORITIES for side in ("rx", "tx")},
    "pfc_pri5_tx_duration_us": 250_000,
    "rx_bits": 4621497487696704,
    "rx_pcs_symbol_err": 0,
    "rx_corrected_bits": 0,
}


@dataclass
class Kernel:
    """The kernel's side: the statistics of each interface of this network namespace by name, and its ifindex."""

    interfaces: dict[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    grows: int = 0  # statistics of queues that are added between the question for their number and the next call

    def ioctl(self, control: int, request: int, argument: bytes) -> bytes:
        assert os.fstat(control)
        assert len(argument) == 40
        name = argument[:16].rstrip(b"\0").decode()
        if name not in self.interfaces:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        index, statistics = self.interfaces[name]
        if request == 0x8933:  # SIOCGIFINDEX
            return argument[:16] + struct.pack("i20x", index)
        assert request == 0x8946  # SIOCETHTOOL
        (address,) = struct.unpack_from("P", argument, 16)
        command, second = struct.unpack("II", ctypes.string_at(address, 8))
        more = {f"tx{queue}_nop": 1 for queue in range(self.grows)}
        names, values = [*statistics, *more], [*statistics.values(), *more.values()]
        if command == 0x37:  # ETHTOOL_GSSET_INFO
            self.calls["count"] += 1
            assert struct.unpack("Q", ctypes.string_at(address + 8, 8)) == (2,)
            ctypes.memmove(address + 16, struct.pack("I", len(statistics)), 4)
        elif command == 0x1B:  # ETHTOOL_GSTRINGS
            self.calls["names"] += 1
            assert second == 1
            text = b"".join(name.encode().ljust(32, b"\0") for name in names)
            ctypes.memmove(address + 8, struct.pack("I", len(names)) + text, 4 + len(text))
        else:
            self.calls["values"] += 1
            assert command == 0x1D  # ETHTOOL_GSTATS
            ctypes.memmove(address + 4, struct.pack(f"=I{len(values)}Q", len(values), *values), 4 + 8 * len(values))
        return argument


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr("fcntl.ioctl", kernel.ioctl)
    return kernel


def statistics(folder: Path, index: int = 7) -> DriverStatistics:
    (folder / "net" / "eth0").mkdir(parents=True)
    (folder / "net" / "eth0" / "ifindex").write_text(f"{index}\n")
    return DriverStatistics(f"{folder}/net/eth0", LABELS)


def values(samples: list[Sample]) -> dict[str, float]:
    """Return values in base units by name, priority and direction."""
    return {
        " ".join((row.name.removeprefix("infiniband_"), *labels[2:])): value * row.scale
        for row, labels, value in samples
        if labels[:2] == LABELS
    }


def test_pauses_and_bit_errors_of_mlx5(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces["eth0"] = (7, MLX5)
    assert values(statistics(tmp_path).read(1)) == {
        "pause_frames_total 3 received": 1523,
        "pause_seconds_total 3 received": pytest.approx(0.048736),
        "receive_capacity_bytes_total": 5e11,
        "corrected_bit_errors_total": 198,
        "pcs_symbol_errors_total": 2,
    }


def test_pauses_and_bit_errors_of_bnxt_en(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces["eth0"] = (7, BNXT)
    assert values(statistics(tmp_path).read(1)) == {
        "pause_frames_total 5 sent": 4,
        "pause_seconds_total 5 sent": pytest.approx(0.25),
        "receive_capacity_bytes_total": 577687185962088,
        "corrected_bit_errors_total": 0,
        "pcs_symbol_errors_total": 0,
    }


def test_names_are_read_again_only_when_their_number_changed(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces["eth0"] = (7, MLX5)
    reader = statistics(tmp_path)
    reader.read(1)
    kernel.interfaces["eth0"] = (7, {**MLX5, "rx_prio3_pause": 1600})
    assert values(reader.read(PERIOD))["pause_frames_total 3 received"] == 1523
    assert values(reader.read(1 + PERIOD))["pause_frames_total 3 received"] == 1600
    assert kernel.calls == {"count": 2, "names": 1, "values": 2}
    kernel.interfaces["eth0"] = (7, {"rx_packets": 0, "tx_packets": 0, **MLX5})
    assert values(reader.read(1 + 2 * PERIOD))["pause_frames_total 3 received"] == 1523
    assert kernel.calls["names"] == 2


def test_queues_that_are_added_meanwhile_have_room(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces["eth0"] = (7, MLX5)
    kernel.grows = 4000
    assert values(statistics(tmp_path).read(1))["pause_frames_total 3 received"] == 1523


@pytest.mark.parametrize(
    "interfaces",
    [{}, {"eth0": (8, MLX5)}, {"eth0": (7, {})}, {"eth0": (7, {"rx_packets": 1})}],
    ids=["not in this namespace", "another one of this name", "no statistics", "none that are known"],
)
def test_an_interface_without_known_statistics_has_no_series(
    tmp_path: Path, kernel: Kernel, interfaces: dict[str, tuple[int, Mapping[str, int]]]
) -> None:
    kernel.interfaces.update(interfaces)
    assert statistics(tmp_path).read(1) == []
    assert kernel.calls["values"] == 0


def port(root: Path, layer: str) -> Infiniband:
    """Return the collector of a captured adapter with this link layer, whose interfaces are a bond and eth0."""
    device = root / "sys" / "class" / "infiniband" / "mlx5_0"
    for source in (CAPTURES / "infiniband" / "h100_node" / "mlx5_0").rglob("*"):
        if source.is_file():
            copy = device / source.relative_to(CAPTURES / "infiniband" / "h100_node" / "mlx5_0")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    files = {f"{device}/ports/1/link_layer": layer, f"{device}/ports/1/gid_attrs/ndevs/0": "bond0"}
    files[f"{device}/device/net/eth0/dev_port"] = "0"
    for name, index in (("bond0", 3), ("eth0", 7)):
        files[f"{root}/sys/class/net/{name}/ifindex"] = str(index)
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{text}\n")
    return Infiniband(root / "sys", "node1", root / "state" / "ports.json", clock=lambda: 1.0)


def test_a_roce_port_has_the_statistics_of_the_interface_below_its_bond(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces |= {"bond0": (3, {}), "eth0": (7, MLX5)}
    found = values(port(tmp_path, "Ethernet").read())
    assert found["pause_frames_total 3 received"] == 1523
    assert found["corrected_bit_errors_total"] == 198


def test_the_interface_of_an_infiniband_port_is_not_asked(tmp_path: Path, kernel: Kernel) -> None:
    kernel.interfaces |= {"bond0": (3, {}), "eth0": (7, MLX5)}
    found = values(port(tmp_path, "InfiniBand").read())
    assert "port_state_id" in found
    assert not kernel.calls
    assert "corrected_bit_errors_total" not in found


class Everything(dict[str, tuple[m.Metric, tuple[str, ...]]]):
    """All statistics that a driver has, under their names."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> tuple[m.Metric, tuple[str, ...]]:
        return m.INFINIBAND_PAUSE_FRAMES_TOTAL, (name, "received")


def test_the_kernel_of_this_machine_answers_without_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.node.collectors.infiniband.driver.STATISTICS_OF", Everything())
    readers = {name: DriverStatistics(f"/sys/class/net/{name}", LABELS) for name in os.listdir("/sys/class/net")}
    user = os.geteuid()
    os.seteuid(user or 65534)  # without the capabilities of root
    try:
        found = {name: reader.read(1) for name, reader in readers.items()}
    finally:
        os.seteuid(user)
    if not any(reader._count for reader in readers.values()):
        pytest.skip("no interface here has statistics of its driver")
    for name, samples in found.items():
        assert len(samples) <= readers[name]._count
        assert all(re.fullmatch(r"[!-~][ -~]*", labels[2]) for _, labels, _ in samples), samples
    assert any(len({labels for _, labels, _ in samples}) > 1 for samples in found.values())
