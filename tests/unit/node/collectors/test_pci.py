"""PCI places, roles and rails, on a captured XE9680 and on trees made for the case."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.infiniband.pci import LEVELS, PciPlace, address, affinity, place
from flopwatch.node.collectors.infiniband.rails import Duty, Gpu, RailPort, affinities, duties, module_order
from tests.support import TESTS

CAPTURE = TESTS / "captures" / "pci" / "lspci_vvv_h100.txt"


def sysfs_of(root: Path, lspci: str) -> Path:
    """Return a sysfs root with the PCI devices of an `lspci -vvv`."""
    bridges = dict[str, str]()
    numa = dict[str, str]()
    own = ""
    for line in lspci.splitlines():
        if not line.startswith("\t"):
            own = line.split()[0]
            numa[own] = "-1"
        elif found := re.search(r"secondary=([0-9a-f]{2})", line):
            bridges[found[1]] = own
        elif found := re.search(r"NUMA node: ([0-9]+)", line):
            numa[own] = found[1]

    def path(device: str) -> Path:
        bus = device.partition(":")[0]
        above = path(bridges[bus]) if bus in bridges else root / "sys" / "devices" / f"pci0000:{bus}"
        return above / f"0000:{device}"

    links = root / "sys" / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for device, node in numa.items():
        folder = path(device)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (links / f"0000:{device}").symlink_to(os.path.relpath(folder, links))
    return root / "sys"


def found(sysfs: Path, device: str) -> PciPlace:
    result = place(sysfs / "bus" / "pci" / "devices" / f"0000:{device}")
    assert result is not None
    return result


@pytest.fixture
def xe9680(tmp_path: Path) -> Path:
    return sysfs_of(tmp_path, CAPTURE.read_text())


XE9680_GPUS = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")
XE9680_CONNECTX7 = ("1a", "3c", "4d", "5e", "9c", "bc", "cc", "dc")
XE9680_CONNECTX6 = ("1b:00.0", "1b:00.1", "9d:00.0", "9d:00.1")


def test_a_place_is_every_bridge_on_the_way(xe9680: Path) -> None:
    assert found(xe9680, "19:00.0") == PciPlace(
        ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:19:00.0"), 0
    )
    assert found(xe9680, "9b:00.0").numa == 1
    assert place(xe9680 / "bus" / "pci" / "devices" / "0000:ff:00.0") is None
    assert place(xe9680 / "bus") is None


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        ("19:00.0", "1a:00.0", "PIX"),
        ("19:00.0", "1b:00.1", "PIX"),
        ("19:00.0", "19:00.0", "PIX"),
        ("19:00.0", "3c:00.0", "NODE"),
        ("19:00.0", "9c:00.0", "SYS"),
        ("dc:00.0", "9b:00.0", "NODE"),
    ],
)
def test_affinity_on_an_xe9680(xe9680: Path, one: str, other: str, level: str) -> None:
    assert affinity(found(xe9680, one), found(xe9680, other)) == level
    assert affinity(found(xe9680, other), found(xe9680, one)) == level


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        ("pci0000:00 root switch down gpu", "pci0000:00 root switch down2 up down3 nic", "PXB"),
        ("pci0000:00 root gpu", "pci0000:00 root2 nic", "PHB"),
        ("pci0001:00 gpu", "pci0101:00 nic", "NODE"),
    ],
)
def test_levels_that_the_xe9680_does_not_have(one: str, other: str, level: str) -> None:
    assert affinity(PciPlace(tuple(one.split()), 0), PciPlace(tuple(other.split()), 0)) == level


def test_nothing_is_near_where_neither_bridge_nor_socket_is_known() -> None:
    assert affinity(PciPlace(("pci0001:00", "gpu"), -1), PciPlace(("pci0101:00", "nic"), -1)) == "SYS"


@given(st.lists(st.sampled_from("abc"), min_size=1), st.lists(st.sampled_from("abc"), min_size=1), st.integers(-1, 1))
def test_affinity_is_the_same_from_both_ends(one: list[str], other: list[str], numa: int) -> None:
    here, there = PciPlace(tuple(one), 0), PciPlace(tuple(other), numa)
    assert affinity(here, there) == affinity(there, here)
    assert affinity(here, there) in LEVELS


@pytest.mark.parametrize(
    ("text", "sysfs"),
    [
        ("00000000:53:00.0", "0000:53:00.0"),
        ("00000000:CA:00.0", "0000:ca:00.0"),
        ("0001:00:00.0", "0001:00:00.0"),
        ("53:00", "0000:53:00.0"),
        ("000C:00:00.0\n", "000c:00:00.0"),
        ("", ""),
        ("N/A", ""),
        ("0000:53:00.9", ""),
    ],
)
def test_an_address_is_written_as_sysfs_does(text: str, sysfs: str) -> None:
    assert address(text) == sysfs


@given(st.text())
def test_no_text_breaks_an_address(text: str) -> None:
    assert re.fullmatch(r"|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address(text))


def gpus(sysfs: Path, buses: tuple[str, ...] = XE9680_GPUS) -> list[Gpu]:
    return [Gpu(str(index), f"GPU-{index}", found(sysfs, f"{bus}:00.0")) for index, bus in enumerate(buses)]


def port(
    device: str, where: PciPlace | None, layer: str = "InfiniBand", kind: str = "MT4129", default: bool = False
) -> RailPort:
    return RailPort(device, "1", where, layer, kind, default)


def test_an_xe9680_has_eight_rails_and_its_other_ports_are_for_storage(xe9680: Path) -> None:
    # Names in an order that is not the GPUs'.
    compute = [port(f"mlx5_{9 - index}", found(xe9680, f"{bus}:00.0")) for index, bus in enumerate(XE9680_CONNECTX7)]
    others = [
        port(f"mlx5_{20 + index}", found(xe9680, address_), "Ethernet", "MT4125")
        for index, address_ in enumerate(XE9680_CONNECTX6)
    ]
    assigned = duties([*others, *compute], gpus(xe9680))
    assert [assigned[one] for one in compute] == [Duty("compute", str(rail)) for rail in range(8)]
    assert [assigned[one] for one in others] == [Duty("storage", "")] * 4


def test_rails_follow_the_module_ids_and_not_the_indices(xe9680: Path) -> None:
    inventory = [{"gpu": str(index), "uuid": f"GPU-{index}", "module_id": str(8 - index)} for index in range(8)]
    order = [int(gpu["gpu"]) for gpu in module_order(inventory)]
    assert order == [7, 6, 5, 4, 3, 2, 1, 0]
    compute = [port(f"mlx5_{index}", found(xe9680, f"{bus}:00.0")) for index, bus in enumerate(XE9680_CONNECTX7)]
    assigned = duties(compute, [gpus(xe9680)[index] for index in order])
    assert [assigned[one].rail for one in compute] == ["7", "6", "5", "4", "3", "2", "1", "0"]


def test_gpus_without_a_module_id_are_in_the_order_of_their_index() -> None:
    inventory = [{"gpu": gpu, "uuid": gpu, "module_id": module} for gpu, module in (("10", ""), ("9", "x"), ("2", "1"))]
    assert [gpu["gpu"] for gpu in module_order(inventory)] == ["2", "9", "10"]


def test_roles(xe9680: Path) -> None:
    here = gpus(xe9680, ("19",))
    near, socket, across = (found(xe9680, f"{bus}:00.0") for bus in ("1a", "3c", "9c"))
    unknown = PciPlace(("pci0101:00", "0101:00:00.0"), -1)
    cases = {
        port("default", near, default=True): "management",
        port("near", near, "Ethernet"): "compute",
        port("ib on the socket", socket): "compute",
        port("roce on the socket", socket, "Ethernet"): "storage",
        port("ib across", across): "management",
        port("roce across", across, "Ethernet"): "management",
        port("ib anywhere", unknown): "compute",
        port("roce anywhere", unknown, "Ethernet"): "storage",
        port("efa", None, "Unspecified"): "compute",
        port("not on pci", None): "",
    }
    assert {one: duties([one], here)[one].role for one in cases} == cases
    assert duties([port("no gpu", near)], []) == {port("no gpu", near): Duty("", "")}


def test_each_gpu_has_the_ports_nearest_to_it(xe9680: Path) -> None:
    ports = [port("mlx5_0", found(xe9680, "1a:00.0")), port("mlx5_1", found(xe9680, "3c:00.0")), port("lost", None)]
    assert affinities(ports, gpus(xe9680, ("19", "4c", "9b"))) == [
        ("mlx5_0", "1", "0", "GPU-0", "PIX"),
        ("mlx5_0", "1", "1", "GPU-1", "NODE"),
        ("mlx5_1", "1", "1", "GPU-1", "NODE"),
        ("mlx5_0", "1", "2", "GPU-2", "SYS"),
        ("mlx5_1", "1", "2", "GPU-2", "SYS"),
    ]
    assert affinities([], gpus(xe9680)) == []
