"""Access of this process to the driver outside NVML, which separates a dead GPU from a withheld one.

The driver lists its GPUs in /proc/driver/nvidia, which containers share with their node unless it is covered
(https://docs.nvidia.com/datacenter/driver/README.txt, "The /proc Filesystem Interface"), and which gVisor lacks.
access(2) checks file modes and the device cgroup, and opens nothing.
"""

import os
import re
from pathlib import Path


def kernel_address(pci_bus_id: str) -> str:
    """Return 0000:53:00.0 for the PCI address that NVML writes as 00000000:53:00.0."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def driver_loaded(proc: Path) -> bool:
    """Return whether the driver is loaded, according to /proc/driver/nvidia/version."""
    return (proc / "driver/nvidia/version").exists()


def denied(pci_bus_id: str, seen: int | None, proc: Path, dev: Path) -> bool:
    """Return whether the GPU exists and this process cannot open its device file.

    The GPU exists if the driver lists it. Without that list, `seen` decides: the minor number of its device file that
    NVML reported before. A GPU missing from the list is gone, whatever became of its file.
    """
    gpus = proc / "driver/nvidia/gpus"
    try:
        information = (gpus / kernel_address(pci_bus_id) / "information").read_text(errors="replace")
    except (OSError, ValueError):
        minor = None if gpus.is_dir() else seen
    else:
        found = re.search(r"^Device Minor:\s*([0-9]+)", information, re.MULTILINE)
        minor = seen if found is None else int(found[1])
    return minor is not None and not os.access(dev / f"nvidia{minor}", os.R_OK | os.W_OK)
