"""Check outside NVML whether this process can access a GPU, to distinguish denied access from a failed GPU.

The driver lists its GPUs in /proc/driver/nvidia (https://docs.nvidia.com/datacenter/driver/README.txt, "The /proc
Filesystem Interface"). A container sees its node's list, unless a mount hides it or gVisor runs the container.
access(2) checks file modes and the device cgroup without opening the device.
"""

import os
import re
from pathlib import Path


def kernel_address(pci_bus_id: str) -> str:
    """Return a PCI address as the kernel writes it, 0000:53:00.0, from NVML's form 00000000:53:00.0."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def driver_loaded(proc: Path) -> bool:
    """Return whether /proc/driver/nvidia/version exists, which means that the NVIDIA driver is loaded."""
    return (proc / "driver/nvidia/version").exists()


def denied(pci_bus_id: str, seen: int | None, proc: Path, dev: Path) -> bool:
    """Return whether the driver has a GPU whose device file this process may not open. `seen`: last known minor."""
    gpus = proc / "driver/nvidia/gpus"
    try:
        information = (gpus / kernel_address(pci_bus_id) / "information").read_text(errors="replace")
    except (OSError, ValueError):
        minor = None if gpus.is_dir() else seen
    else:
        found = re.search(r"^Device Minor:\s*([0-9]+)", information, re.MULTILINE)
        minor = seen if found is None else int(found[1])
    return minor is not None and not os.access(dev / f"nvidia{minor}", os.R_OK | os.W_OK)
