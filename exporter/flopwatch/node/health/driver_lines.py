"""What `flopwatch doctor` reports about the NVIDIA driver: branch, faults, and settings that cost series."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors.nvml.card import BUDGET, NO_PERMISSION, SELDOM_TABLES_SHARE

ECC_ROWS = "gpu_ecc_*_total"
ACTIVITY_ROWS = (
    "gpu_*_active_seconds_total, gpu_sm_occupancy_seconds_total, gpu_*profiled_seconds_total and gpu_pcie_*_bytes_total"
)
DOUBLES, UNWRITTEN, GARBLED = "doubles", "unwritten", "garbled"  # notes of the read, about all GPUs
LATENCY, SELDOM_BUDGET = m.FLOPWATCH_NVML_FIELD_LATENCY_SECONDS_TOTAL, BUDGET * SELDOM_TABLES_SHARE


def together(names: Sequence[str]) -> str:
    """Return names as text, with consecutive numbers as a range: GPU 0-7."""
    ranges: list[tuple[str, int, int]] = []
    words = []
    for name in names:
        prefix, _, number = name.rpartition(" ")
        if not prefix or not number.isdigit():
            words.append(name)
        elif ranges and ranges[-1][0] == prefix and ranges[-1][2] + 1 == int(number):
            ranges[-1] = (prefix, ranges[-1][1], int(number))
        else:
            ranges.append((prefix, int(number), int(number)))
    words += [f"{prefix} {first}" + (f"-{last}" if last > first else "") for prefix, first, last in ranges]
    return ", ".join(words)


def state(samples: Sequence[Sample], notes: Mapping[str, Any]) -> list[str]:
    """Return lines about the driver that cost no series: version and branch, and whether it declares types right."""
    position = m.GPU_INFO.labels.index("driver_version")
    versions = sorted({labels[position] for row, labels, _ in samples if row is m.GPU_INFO and labels[position]})
    lines = [f"version {version}, branch R{version.split('.')[0]}" for version in versions]
    if lines and (fields := notes.get(DOUBLES, [])):
        lines.append(
            f"declares {len(fields)} integer fields as floating-point numbers, a fault of some branches such as R545. "
            "They are read as integers, and no series is missing."
        )
    return lines


def losses(samples: Sequence[Sample], notes: Mapping[str, Any], proc: Path) -> Iterator[str]:
    """Yield what is missing because of the driver's state, with the remedy. `notes` are those of the doctor's read."""

    def having(row: Metric, value: float) -> str:
        return _named(int(labels[0]) for of, labels, number in samples if of is row and number == value)

    def refused(*calls: str) -> str:
        parts = ((re.match(r"gpu([0-9]+)", name), some) for name, some in notes.items())
        return _named(
            int(gpu[1]) for gpu, some in parts if gpu and any(NO_PERMISSION in some.get(c, ()) for c in calls)
        )

    if gpus := refused("nvmlGpmSampleGet", "nvmlGpmMigSampleGet"):
        restricted = " The driver restricts it to administrators (RmProfilingAdminOnly)." if _restricted(proc) else ""
        yield (
            f"{gpus}: the driver refuses activity (GPM) to this process, so {ACTIVITY_ROWS} do not rise or are absent."
            f"{restricted} Give it CAP_SYS_ADMIN, or load the module nvidia with NVreg_RestrictProfilingToAdminUsers=0."
        )
    if gpus := refused("nvmlDeviceGetMigDeviceHandleByIndex"):
        yield (
            f"{gpus}: MIG is on and no instance is visible, so gpu_mig_info and other gpu_mig_* are absent. Give the "
            "container NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN."
        )
    if gpus := refused("nvmlDeviceGetMemoryInfo"):
        yield (
            f"{gpus}: the driver refuses the memory of the GPU or its MIG instances, so gpu_memory_*_bytes or "
            "gpu_mig_memory_*_bytes are absent. Give the container NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN."
        )
    if gpus := having(m.GPU_ECC_MODE, 0):
        yield f"{gpus}: error correction is off, so {ECC_ROWS} are absent. Switch it on (nvidia-smi -e 1) and reset."
    elif notes.get(UNWRITTEN):
        yield (
            f"driver: returns {len(notes[UNWRITTEN])} fields without a value, so {ECC_ROWS} or "
            f"{m.GPU_RETIRED_PAGES_TOTAL} are absent. Upgrade the driver."
        )
    if notes.get(GARBLED):
        yield (
            f"{_named(notes[GARBLED])}: the driver returns garbled processes, which early releases of R535 do, so "
            f"{m.GPU_PROCESSES} and {m.GPU_PROCESS_MEMORY_BYTES} count only the first. Upgrade the driver."
        )
    if gpus := having(m.GPU_PERSISTENCE_MODE, 0):
        yield (
            f"{gpus}: persistence mode is off, so the first scrapes after a start have no GPU and jobs start later. "
            "Run nvidia-persistenced, or nvidia-smi -pm 1."
        )
    latencies = {labels[0]: value * row.scale for row, labels, value in samples if row is LATENCY}
    if (took := latencies.get("seldom", 0.0) + latencies.get("links", 0.0)) > SELDOM_BUDGET:
        yield (
            f"driver: NVML fields that change seldom take {took:.1f} s for all GPUs, so GPUs are read in turns. These "
            f"values are older, and absent for up to {math.ceil(took / SELDOM_BUDGET)} scrapes after a start or a "
            "change of MIG. Upgrade the driver."
        )
    for row, labels, seconds in samples:
        if row is m.FLOPWATCH_NVML_SLOW_GPU_SECONDS:
            yield (
                f"GPU {labels[0]}: its NVML calls take {seconds:.1f} s together, so its values are read less often and "
                "are up to a few minutes old or absent. Look for Xid 119 in the kernel log, and reset the GPU."
            )


def _named(gpus: Iterable[int]) -> str:
    return together([f"GPU {gpu}" for gpu in sorted(set(gpus))])


def _restricted(proc: Path) -> bool:
    try:
        return "RmProfilingAdminOnly: 1" in (proc / "driver/nvidia/params").read_text()
    except OSError:
        return False
