"""A program in place of `nvidia-smi -q -x` on a simulated node: `python nvidia_smi.py NODE_DIR -q -x`.

The names of the elements are those of driver 590. Values are those of the simulated NVML, in nvidia-smi's units.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "exporter"))

import pynvml as real

from flopwatch.simulate.pynvml import Simulation

MEBIBYTE = 1 << 20
SECONDS = {74: "sw_power_cap", 76: "sync_boost", 269: "sw_therm_slowdown", 270: "hw_therm_slowdown",
           271: "hw_power_brake"}  # fmt: skip
LINK = "pci/pci_gpu_link_info"


def values(nvml: Simulation, index: int) -> dict[str, str]:
    """Return the text of each element of a GPU by its path."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    numbers = nvml.field_numbers(gpu)
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, real.nvmlMemory_v2)
    corrected, uncorrected, pending, failure = nvml.nvmlDeviceGetRemappedRows(gpu)
    reasons = "clocks_event_reasons_counters"
    errors: dict[str, Any] = {}
    for kind, (low, high) in {"volatile": (3, 4), "aggregate": (5, 6)}.items():
        errors |= {f"ecc_errors/{kind}/sram_correctable": 0, f"ecc_errors/{kind}/sram_uncorrectable_parity": 0}
        errors |= {f"ecc_errors/{kind}/dram_correctable": numbers[low, 0]}
        errors |= {f"ecc_errors/{kind}/dram_uncorrectable": numbers[high, 0]}
    return {
        "uuid": nvml.nvmlDeviceGetUUID(gpu),
        f"{LINK}/pcie_gen/current_link_gen": str(nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        f"{LINK}/link_widths/current_link_width": f"{nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)}x",
        "pci/replay_counter": str(numbers[94, 0]),
        "fb_memory_usage/total": f"{memory.total // MEBIBYTE} MiB",
        "fb_memory_usage/used": f"{memory.used // MEBIBYTE} MiB",
        **{f"{reasons}/{reasons}_{name}": f"{numbers[field, 0] // 1000} us" for field, name in SECONDS.items()},
        **{path: str(count) for path, count in errors.items()},
        "remapped_rows/remapped_row_corr": str(corrected),
        "remapped_rows/remapped_row_unc": str(uncorrected),
        "remapped_rows/remapped_row_pending": "Yes" if pending else "No",
        "remapped_rows/remapped_row_failure": "Yes" if failure else "No",
        "temperature/gpu_temp": f"{nvml.nvmlDeviceGetTemperature(gpu, 0)} C",
        "temperature/gpu_temp_tlimit": f"{nvml.nvmlDeviceGetMarginTemperature(gpu)} C",
        "temperature/gpu_temp_max_tlimit_threshold": f"{numbers[193, 0]} C",
        "temperature/gpu_temp_slow_tlimit_threshold": f"{numbers[194, 0]} C",
        "temperature/memory_temp": f"{numbers[82, 0]} C",
        "gpu_power_readings/average_power_draw": f"{nvml.nvmlDeviceGetPowerUsage(gpu) / 1000:.2f} W",
        "gpu_power_readings/instant_power_draw": f"{nvml.nvmlDeviceGetPowerUsage(gpu) / 1000:.2f} W",
        "gpu_power_readings/current_power_limit": f"{nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000:.2f} W",
        "clocks/sm_clock": f"{nvml.nvmlDeviceGetClockInfo(gpu, real.NVML_CLOCK_SM)} MHz",
        "clocks/mem_clock": f"{nvml.nvmlDeviceGetClockInfo(gpu, real.NVML_CLOCK_MEM)} MHz",
        "max_clocks/sm_clock": f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, real.NVML_CLOCK_SM)} MHz",
        "voltage/graphics_volt": "N/A",
    }


def nested(values: dict[str, str]) -> str:
    """Return elements with their text as XML."""
    groups: dict[str, dict[str, str]] = {}
    for path, text in values.items():
        head, _, rest = path.partition("/")
        groups.setdefault(head, {})[rest] = text
    return "".join(
        f"<{name}>{escape(inner['']) if '' in inner else nested(inner)}</{name}>" for name, inner in groups.items()
    )


def document(root: Path, changed: dict[str, str] | None = None) -> str:
    """Return the XML about all GPUs of the node in a folder. `changed` replaces texts by path."""
    nvml = Simulation(root)
    nvml.nvmlInit()
    gpus = ""
    for index in range(nvml.nvmlDeviceGetCount()):
        processes = "".join(
            f"<process_info><pid>{one.pid}</pid><type>C</type>"
            f"<used_memory>{one.usedGpuMemory // MEBIBYTE} MiB</used_memory></process_info>"
            for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(nvml.nvmlDeviceGetHandleByIndex(index))
        )
        content = nested(values(nvml, index) | (changed or {}))
        gpus += f'<gpu id="{index}">{content}<processes>{processes}</processes></gpu>'
    return f'<?xml version="1.0" ?><nvidia_smi_log>{gpus}</nvidia_smi_log>'


if __name__ == "__main__":
    print(document(Path(sys.argv[1])))
