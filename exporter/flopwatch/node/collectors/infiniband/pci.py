"""Positions of PCI devices, and the distance between two of them, from sysfs.

`/sys/bus/pci/devices/ADDRESS` and `/sys/class/*/*/device` are links whose target names every bridge on the way from the
host bridge (https://www.kernel.org/doc/html/latest/PCI/sysfs-pci.html). The levels are those of `nvidia-smi topo -m`.
In many virtual machines each device has its own host bridge. Then only the socket distinguishes devices.
"""

import os
import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near: one switch, switches, host bridge, socket, other socket

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?")


class PciPlace(NamedTuple):
    """PCI addresses from the host bridge to a device, and the device's NUMA node (-1: unknown)."""

    path: tuple[str, ...]
    numa: int


def address(text: str) -> str:
    """Return a PCI address in sysfs' form `0000:53:00.0` from NVML's form `00000000:53:00.0`. Empty if invalid."""
    match = _ADDRESS.fullmatch(text.strip().lower())
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or 0}"


def place(link: Path) -> PciPlace | None:
    """Return the PCI path and NUMA node of the device behind a sysfs link, or None if it is absent or not on PCI."""
    path = os.path.realpath(link).split("/")
    bridges = [index for index, name in enumerate(path) if _HOST_BRIDGE.fullmatch(name)]
    if not bridges or not link.exists():
        return None
    try:
        numa = int((link / "numa_node").read_text())
    except (OSError, ValueError):
        numa = -1
    return PciPlace(tuple(path[bridges[0] :]), numa)


def virtual(link: Path) -> bool:
    """Return whether the device behind a sysfs link is a virtual function or a subfunction."""
    return (link / "physfn").exists() or (link / "sfnum").exists()


def given_away(function: Path) -> bool:
    """Return whether a PCI function serves a virtual machine, or a container that has its RDMA device."""
    driver = os.path.basename(os.path.realpath(function / "driver"))
    devices = function / "infiniband"
    return driver.startswith("vfio") or (devices.is_dir() and not any(devices.iterdir()))


def affinity(one: PciPlace, other: PciPlace) -> str:
    """Return how near two PCI devices are: PIX, PXB, PHB, NODE or SYS, as in `nvidia-smi topo -m`."""
    pairs = zip(one.path, other.path, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if shared > 1:
        # Below the shared path, one switch is a downstream port and the device on each side.
        return "PIX" if max(len(one.path), len(other.path)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    return "NODE" if one.numa == other.numa and one.numa >= 0 else "SYS"
