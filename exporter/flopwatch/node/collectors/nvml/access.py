"""What this process can see of the driver beside NVML, to tell a GPU that is dead from one that is kept from us.

The driver lists its GPUs in /proc/driver/nvidia, which every container shares with its node unless it is covered
(https://docs.nvidia.com/datacenter/driver/README.txt, "The /proc Filesystem Interface"). access(2) asks file modes and
the device cgroup alike, and opens nothing. Missing: the list under gVisor, and where a container runtime covers it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def kernel_address(pci_bus_id: str) -> str:
    """Return 0000:53:00.0 for the PCI address that NVML writes as 00000000:53:00.0."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def driver_loaded(proc: Path) -> bool:
    """Return whether the kernel has the driver, whatever NVML says."""
    return (proc / "driver/nvidia/version").exists()


def denied(pci_bus_id: str, seen: int | None, proc: Path, dev: Path) -> bool:
    """Return whether there is such a GPU, and its device file is absent or not to be opened by this process.

    That there is one is the driver's word or, where that is covered, NVML's before: the number `seen` of its device
    file. A GPU that the driver does not list among others is gone, whatever became of its file.
    """
    gpus = proc / "driver/nvidia/gpus"
    try:
        information = (gpus / kernel_address(pci_bus_id) / "information").read_text(errors="replace")
    except (OSError, ValueError):
        minor = None if gpus.is_dir() else seen
    else:
        told = re.search(r"^Device Minor:\s*([0-9]+)", information, re.MULTILINE)
        minor = seen if told is None else int(told[1])
    return minor is not None and not os.access(dev / f"nvidia{minor}", os.R_OK | os.W_OK)
