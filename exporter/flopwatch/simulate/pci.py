"""PCI topology of the simulated node, as sysfs links like those of the kernel.

As on a Dell XE9680 (tests/captures/pci), each root port has a switch with one GPU and one adapter, and each socket four
switches. The storage adapter has a root port of its own on the first socket.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

STORAGE_PATH = ("pci0000:00", "0000:00:0e.0", "0000:02:00.0")


def adapter_path(bus: int) -> tuple[str, ...]:
    """Return the PCI path to the adapter on the same switch as the GPU with this bus number."""
    return (*_switch(bus), f"0000:{bus - 2:02x}:02.0", f"0000:{bus + 1:02x}:00.0")


def _switch(bus: int) -> tuple[str, ...]:
    return f"pci0000:{bus - 4:02x}", f"0000:{bus - 4:02x}:01.0", f"0000:{bus - 3:02x}:00.0"


def write(sysfs: Path, buses: Sequence[int], adapters: Mapping[str, tuple[str, ...]]) -> None:
    """Write PCI and net devices to a sysfs tree, for GPUs by bus number and adapters by name and PCI path."""
    for index, bus in enumerate(buses):
        path = (*_switch(bus), f"0000:{bus - 2:02x}:01.0", f"0000:{bus:02x}:00.0")
        _device(sysfs, path, int(index >= len(buses) // 2))
    for index, (name, path) in enumerate(adapters.items()):
        own = path != STORAGE_PATH
        folder = _device(sysfs, path, int(own and index >= len(buses) // 2))
        net = folder / "net" / (f"ib{index}" if own else "ens1f0np0")
        net.mkdir(parents=True, exist_ok=True)
        for file, content in {"operstate": "up", "carrier_changes": "2", "dev_port": "0"}.items():
            (net / file).write_text(f"{content}\n")
        _link(sysfs / "class" / "net" / net.name, net)
        link_adapter(sysfs, name, path)


def link_adapter(sysfs: Path, name: str, path: tuple[str, ...]) -> None:
    """Create the sysfs link from an RDMA device to its PCI device."""
    _link(sysfs / "class" / "infiniband" / name / "device", sysfs.joinpath("devices", *path))


def _device(sysfs: Path, path: tuple[str, ...], numa: int) -> Path:
    folder = sysfs.joinpath("devices", *path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    _link(sysfs / "bus" / "pci" / "devices" / path[-1], folder)
    return folder


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(target, link.parent))
