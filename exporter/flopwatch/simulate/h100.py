"""Constants of the simulated node: eight H100 GPUs, eight NDR InfiniBand ports and one storage port.

Layout, identities, idle and full-load values are those of captured H100 nodes (tests/captures/SOURCES.md).
"""

from typing import Any

from flopwatch.catalogue.xid import read_table
from flopwatch.simulate import pci

GPUS = 8
PCI_BUSES = (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)
# The numbers have gaps as on real nodes, where storage and management ports are between the compute ports.
DEVICES = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
STORAGE_DEVICE = "mlx5_bond_0"  # RoCE

MEBIBYTE = 1 << 20
MEMORY_TOTAL, MEMORY_RESERVED = 81559 * MEBIBYTE, 479 * MEBIBYTE
MEMORY_BUSY = 68_000 * MEBIBYTE
POWER_LIMIT = 700.0
IDLE_POWER, BUSY_POWER = 69.85, 629.45
IDLE_CELSIUS, BUSY_CELSIUS = 41.0, 59.0
IDLE_MEMORY_CELSIUS, BUSY_MEMORY_CELSIUS = 48.0, 55.0
IDLE_CLOCK, MAX_CLOCK, MEMORY_CLOCK = 345, 1980, 2619
# 87 C is the 41 C of the idle capture plus its margin of 46 C. The hardware slows down at 2 C more.
SW_SLOWDOWN_CELSIUS, HW_SLOWDOWN_CELSIUS = 87.0, 89.0
THERMAL_SECONDS = 5.0  # time constant of the heat sink
HELD_CLOCK = {"sw_power_cap": 1410, "sync_boost": 1755, "sw_thermal_slowdown": 1200} | dict.fromkeys(
    ("hw_thermal_slowdown", "hw_power_brake_slowdown", "hw_slowdown"), 795
)
DEFAULT_LOAD = 0.95
IDLE_VIDEO_CLOCK, MAX_VIDEO_CLOCK = 765, 1545
DRIVER_VERSION = "590.48.01"
FIRST_PID, SLURM_JOB = 4711, 4242
MIG_PROFILE, MIG_INSTANCES = "1g.10gb", 7
PCIE_GENERATION, PCIE_LANES, PCIE_WIDTHS = 5, 16, (1, 2, 4, 8, 16)

# NVLink 4: links, MB/s of one in one direction, and the errors of a link by NVML field.
NVLINKS, NVLINK_SPEED = 18, 26562
NVLINK_ERRORS = {161: "replay", 162: "recovery", 163: "crc"}

# Share of the line rate that a training job uses at full load, and the size of its packets.
LINE_SHARE, PACKET_BYTES = 0.35, 4096
FULL_RATE, STORAGE_RATE, STORAGE_LOAD = 400, 200, 0.05
LINK_RATES = {400: "4X NDR", 200: "2X NDR", 100: "1X NDR", 50: "1X HDR", 25: "1X EDR", 10: "4X SDR"}
# Bytes a fully busy GPU sends per second, through PCIe to its rail and through its NVLinks to its peers.
PCIE_RATE, NVLINK_RATE = LINE_SHARE * 50e9, 0.3 * NVLINKS * NVLINK_SPEED * 1e6
STICKS_AT = {"counters/symbol_error": 65535, "counters/link_downed": 255, "counters/port_xmit_wait": 2**32 - 1}
_FILES = [(row["folder"], row["file"]) for row in read_table("simulated_counters.csv")]
COUNTERS = {folder: [file for of, file in _FILES if of == folder] for folder in ("counters", "hw_counters")}

ADAPTERS = {
    **{device: pci.adapter_path(bus) for device, bus in zip(DEVICES, PCI_BUSES, strict=True)},
    STORAGE_DEVICE: pci.STORAGE_PATH,
}


def uuid(gpu: int) -> str:
    """Return the UUID of the GPU with this number, 0 to 7."""
    return f"GPU-51a70000-0000-4000-8000-{gpu:012d}"


def serial(gpu: int) -> str:
    """Return the board serial number of the GPU with this number, 0 to 7."""
    return f"165012401{gpu:04d}"


def pid(gpu: int) -> int:
    """Return the pid of the process that keeps the GPU with this number busy."""
    return FIRST_PID + gpu


def no_faults() -> dict[str, Any]:
    """Return the content of faults.json on a healthy node."""
    kinds = (
        "load lost ecc throttle heat hang fail blind withheld resets order driver mig nvlink_down nvlink_errors remap "
        "pcie recovery profiler lies symbol_errors link rate removed"
    )
    faults: dict[str, Any] = {kind: {} for kind in kinds.split()}
    return faults | {"hang": None, "order": list(range(GPUS)), "driver": DRIVER_VERSION}
