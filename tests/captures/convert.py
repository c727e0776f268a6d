"""Turns what `nvidia-smi -q` printed, as others published it, into the captures in `nodes/`.

    PYTHONPATH=exporter:. python -m tests.captures.convert

nvidia-smi asks NVML, so each line it prints is the answer to a call. Here are the lines whose call is known, back in
the call's own unit. "N/A" is NVML_ERROR_NOT_SUPPORTED; what is not printed is not in the capture. Not printed, but part
of an answer that is, and so only as good as said here:

- the sampling period of the encoder and decoder utilisation: 0;
- a GPU's total of ECC errors in the XML files: the sum of the SRAM and DRAM errors printed, which are all zero;
- the supported clock event reasons in the XML files: those printed;
- the most MIG devices a GPU can have: as many as are printed;
- the state of an NVLink: active, for nvidia-smi prints a speed for active links alone;
- the UUIDs of MIG devices: numbered zeros, as the publishers of the others masked them;
- the profile in the names of the A100's MIG devices: that of their 14 multiprocessors and 20 GB, 1g.20gb.

Bytes are exact to the MiB printed. What the files `idle` and `load` hold becomes two reads.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pynvml

from flopwatch.node.capture.recorder import SECTIONS, SYSTEM, Recorded, arranged, dumps, field_key

HERE = Path(__file__).parent
SOURCES = {
    "h100": "h100-80gb-hbm3__590.48.01.txt",
    "l40s": "l40s__595.80.txt",
    "rtx4080": "geforce-rtx-4080-super__595.71.05.txt",
    "a100": "a100-sxm4-v12.xml",
    "t4": "tesla-t4.xml",
}
FAILURES = {
    "N/A": pynvml.NVML_ERROR_NOT_SUPPORTED,
    "Not Supported": pynvml.NVML_ERROR_NOT_SUPPORTED,
    "Requested functionality has been deprecated": pynvml.NVML_ERROR_DEPRECATED,
    "Insufficient Permissions": pynvml.NVML_ERROR_NO_PERMISSION,
    "Unknown Error": pynvml.NVML_ERROR_UNKNOWN,
    "GPU is lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "GPU requires reset": pynvml.NVML_ERROR_RESET_REQUIRED,
}
MEBIBYTE = 1 << 20
MEMORY_CALL = f"nvmlDeviceGetMemoryInfo({pynvml.nvmlMemory_v2})"
MIG_PROFILES = {("14", "19968 MiB"): "1g.20gb"}  # of an A100 with 80 GB

# What was printed: the path of each line, `FB Memory Usage/Total` or `fb_memory_usage/total`, and its text.
Printed = list[tuple[str, str]]
Convert = Callable[[str], Any]


def number(factor: float = 1) -> Convert:
    """Return a conversion of `629.45 W` into a whole number of a unit that is `factor` times smaller."""
    return lambda text: round(float(re.split(r"[ x%]", text)[0]) * factor)


def word(*words: str, start: int = 0) -> Convert:
    """Return a conversion of words into numbers, the first of which is `start`."""
    return lambda text: words.index(text) + start


whole, bytes_of, milliwatts, nanoseconds = number(), number(MEBIBYTE), number(1000), number(1000)
flag, mode = word("No", "Yes"), word("Disabled", "Enabled")


def from_query(text: str) -> Printed:
    """Return what `nvidia-smi -q` printed about its one GPU: four blanks a level, a colon before the text."""
    printed: Printed = []
    path: list[str] = []
    for line in text.splitlines():
        match = re.fullmatch(r"( *)(\S.*?)\s*(?:\s: (.*))?", line)
        if match is None or line.startswith("#"):
            continue
        level = len(match[1]) // 4 - (1 if match[1] else 0)
        path[level:] = [match[2]]
        if match[3] is not None:
            printed.append(("/".join(path if match[1] else path[-1:]), match[3].strip()))
    return printed


def from_xml(text: str) -> Printed:
    """Return what `nvidia-smi -q -x` printed about its first GPU."""

    def walk(element: ElementTree.Element, path: str) -> Iterable[tuple[str, str]]:
        for child in element:
            here = f"{path}{child.tag}"
            yield here, (child.text or "").strip()
            yield from walk(child, f"{here}/")

    root = ElementTree.fromstring(text)
    gpus = root.findall("gpu")
    return [*((child.tag, child.text or "") for child in root if child.tag != "gpu"), *walk(gpus[0], "")]


def from_csv(text: str) -> Printed:
    """Return what `nvidia-smi --query-gpu` printed about its one GPU."""
    header, values = text.strip().splitlines()[:2]
    names = [name.partition(" [")[0] for name in header.split(", ")]
    return [(name, value.strip("[]")) for name, value in zip(names, values.split(", "), strict=True)]


def _failed(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer


def _list(*answers: Any) -> Any:
    return next(filter(_failed, answers), None if None in answers else list(answers))


@dataclass
class Output:
    """What was printed in one run of nvidia-smi, with the answers that can be read off it."""

    printed: Printed

    def texts(self, path: str) -> list[str]:
        """Return the text of each line with this path."""
        return [text for name, text in self.printed if name == path]

    def answer(self, convert: Convert, *paths: str) -> Any:
        """Return the answer the first of these lines that is there stands for; None if none is."""
        text = next((texts[0] for texts in map(self.texts, paths) if texts), None)
        if text is None:
            return None
        return {"error": FAILURES[text]} if text in FAILURES else convert(text)

    def answers(self, *parts: tuple[Convert, tuple[str, ...]]) -> Any:
        """Return the list of some answers, or the error of one; None if any of them is not there."""
        found = [self.answer(convert, *paths) for convert, paths in parts]
        return _list(*found)

    def struct(self, name: str, members: Mapping[str, tuple[Convert, tuple[str, ...]]], **others: Any) -> Any:
        """Return a structure of NVML made of some answers, in the order of its own members."""
        found = self.answers(*members.values())
        if not isinstance(found, list):
            return found
        values = {**others, **dict(zip(members, found, strict=True))}
        return {
            "struct": name,
            **{field[0]: values[field[0]] for field in getattr(pynvml, name)._fields_ if field[0] in values},
        }


def _hexadecimal(text: str) -> int:
    return int(text, 16)


def _architecture(text: str) -> int:
    return int(getattr(pynvml, f"NVML_DEVICE_ARCH_{text.split()[0].upper()}"))


def _with_period(text: str) -> list[int]:
    return [whole(text), 0]


def _power(line: str, *tags: str) -> tuple[str, ...]:
    groups = "gpu_power_readings", "power_readings"
    return f"GPU Power Readings/{line}", *(f"{group}/{tag}" for tag in tags for group in groups)


# Calls with one number or text for an answer, and the lines it may be in.
CALLS: dict[str, tuple[Convert, tuple[str, ...]]] = {
    "nvmlDeviceGetName()": (str, ("Product Name", "product_name")),
    "nvmlDeviceGetUUID()": (str, ("GPU UUID", "uuid")),
    "nvmlDeviceGetSerial()": (str, ("Serial Number", "serial")),
    "nvmlDeviceGetVbiosVersion()": (str, ("VBIOS Version", "vbios_version")),
    "nvmlDeviceGetBoardPartNumber()": (str, ("Board Part Number", "board_part_number")),
    "nvmlDeviceGetModuleId()": (whole, ("Platform Info/Module Id", "gpu_module_id")),
    "nvmlDeviceGetMinorNumber()": (whole, ("Minor Number", "minor_number")),
    "nvmlDeviceGetInforomImageVersion()": (str, ("Inforom Version/Image Version", "inforom_version/img_version")),
    "nvmlDeviceGetInforomVersion(0)": (str, ("Inforom Version/OEM Object", "inforom_version/oem_object")),
    "nvmlDeviceGetInforomVersion(1)": (str, ("Inforom Version/ECC Object", "inforom_version/ecc_object")),
    "nvmlDeviceGetGspFirmwareVersion()": (str, ("GSP Firmware Version", "gsp_firmware_version")),
    "nvmlDeviceGetArchitecture()": (_architecture, ("Product Architecture", "product_architecture")),
    "nvmlDeviceGetPersistenceMode()": (mode, ("Persistence Mode", "persistence_mode")),
    "nvmlDeviceGetCurrPcieLinkGeneration()": (
        whole,
        ("PCI/GPU Link Info/PCIe Generation/Current", "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
    ),
    "nvmlDeviceGetMaxPcieLinkGeneration()": (
        whole,
        ("PCI/GPU Link Info/PCIe Generation/Max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
    ),
    "nvmlDeviceGetGpuMaxPcieLinkGeneration()": (
        whole,
        ("PCI/GPU Link Info/PCIe Generation/Device Max", "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen"),
    ),
    "nvmlDeviceGetCurrPcieLinkWidth()": (
        whole,
        ("PCI/GPU Link Info/Link Width/Current", "pci/pci_gpu_link_info/link_widths/current_link_width"),
    ),
    "nvmlDeviceGetMaxPcieLinkWidth()": (
        whole,
        ("PCI/GPU Link Info/Link Width/Max", "pci/pci_gpu_link_info/link_widths/max_link_width"),
    ),
    "nvmlDeviceGetPcieReplayCounter()": (whole, ("PCI/Replays Since Reset", "pci/replay_counter")),
    "nvmlDeviceGetEncoderUtilization()": (_with_period, ("Utilization/Encoder", "utilization/encoder_util")),
    "nvmlDeviceGetDecoderUtilization()": (_with_period, ("Utilization/Decoder", "utilization/decoder_util")),
    "nvmlDeviceGetTemperature(0)": (whole, ("Temperature/GPU Current Temp", "temperature/gpu_temp")),
    "nvmlDeviceGetTemperatureV(0)": (whole, ("Temperature/GPU Current Temp",)),
    "nvmlDeviceGetMarginTemperature()": (whole, ("Temperature/GPU T.Limit Temp", "temperature/gpu_temp_tlimit")),
    "nvmlDeviceGetTemperatureThreshold(0)": (
        whole,
        ("Temperature/GPU Shutdown Temp", "temperature/gpu_temp_max_threshold"),
    ),
    "nvmlDeviceGetTemperatureThreshold(1)": (
        whole,
        ("Temperature/GPU Slowdown Temp", "temperature/gpu_temp_slow_threshold"),
    ),
    "nvmlDeviceGetTemperatureThreshold(2)": (
        whole,
        ("Temperature/Memory Max Operating Temp", "temperature/gpu_temp_max_mem_threshold"),
    ),
    "nvmlDeviceGetTemperatureThreshold(3)": (
        whole,
        ("Temperature/GPU Max Operating Temp", "temperature/gpu_temp_max_gpu_threshold"),
    ),
    "nvmlDeviceGetPowerUsage()": (milliwatts, _power("Average Power Draw", "power_draw")),
    "nvmlDeviceGetEnforcedPowerLimit()": (
        milliwatts,
        _power("Current Power Limit", "enforced_power_limit", "current_power_limit"),
    ),
    "nvmlDeviceGetPowerManagementLimit()": (
        milliwatts,
        _power("Requested Power Limit", "requested_power_limit", "power_limit"),
    ),
    "nvmlDeviceGetPowerManagementDefaultLimit()": (milliwatts, _power("Default Power Limit", "default_power_limit")),
    **{
        f"nvmlDeviceGet{kind}ClockInfo({number_})": (whole, (f"{kind} Clocks/{line}".strip(), f"{group}/{tag}_clock"))
        for kind, group in (("", "clocks"), ("Max", "max_clocks"))
        for number_, (line, tag) in enumerate(
            (("Graphics", "graphics"), ("SM", "sm"), ("Memory", "mem"), ("Video", "video"))
        )
    },
}
# The same for lists of numbers.
LISTS: dict[str, tuple[tuple[Convert, tuple[str, ...]], ...]] = {
    "nvmlDeviceGetEccMode()": (
        (mode, ("ECC Mode/Current", "ecc_mode/current_ecc")),
        (mode, ("ECC Mode/Pending", "ecc_mode/pending_ecc")),
    ),
    "nvmlDeviceGetMigMode()": (
        (mode, ("MIG Mode/Current", "mig_mode/current_mig")),
        (mode, ("MIG Mode/Pending", "mig_mode/pending_mig")),
    ),
    "nvmlDeviceGetPowerManagementLimitConstraints()": (
        (milliwatts, _power("Min Power Limit", "min_power_limit")),
        (milliwatts, _power("Max Power Limit", "max_power_limit")),
    ),
    "nvmlDeviceGetRemappedRows()": (
        (whole, ("Remapped Rows/Correctable Error", "Remapped Rows", "remapped_rows")),
        (whole, ("Remapped Rows/Uncorrectable Error", "Remapped Rows", "remapped_rows")),
        (flag, ("Remapped Rows/Pending", "Remapped Rows", "remapped_rows")),
        (flag, ("Remapped Rows/Remapping Failure Occurred", "Remapped Rows", "remapped_rows")),
    ),
    "nvmlDeviceGetRepairStatus()": (
        (flag, ("ECC Errors/Channel Repair Pending",)),
        (flag, ("ECC Errors/TPC Repair Pending",)),
    ),
}
Members = dict[str, tuple[Convert, tuple[str, ...]]]
PCI: Members = {
    "busIdLegacy": (lambda text: text[4:], ("PCI/Bus Id", "pci/pci_bus_id")),
    "domain": (_hexadecimal, ("PCI/Domain", "pci/pci_domain")),
    "bus": (_hexadecimal, ("PCI/Bus", "pci/pci_bus")),
    "device": (_hexadecimal, ("PCI/Device", "pci/pci_device")),
    "pciDeviceId": (_hexadecimal, ("PCI/Device Id", "pci/pci_device_id")),
    "pciSubSystemId": (_hexadecimal, ("PCI/Sub System Id", "pci/pci_sub_system_id")),
    "busId": (str, ("PCI/Bus Id", "pci/pci_bus_id")),
}
UTILIZATION: Members = {
    "gpu": (whole, ("Utilization/GPU", "utilization/gpu_util")),
    "memory": (whole, ("Utilization/Memory", "utilization/memory_util")),
}
MEMORY: Members = {
    name: (bytes_of, (f"FB Memory Usage/{name.title()}", f"fb_memory_usage/{name}"))
    for name in ("total", "reserved", "free", "used")
}
BAR1: Members = {
    f"bar1{name}": (bytes_of, (f"BAR1 Memory Usage/{name}", f"bar1_memory_usage/{name.lower()}"))
    for name in ("Total", "Free", "Used")
}
SPARE_ROWS: Members = {
    name: (whole, (f"Remapped Rows/Bank Remap Availability Histogram/{name.title()}", "Remapped Rows", "remapped_rows"))
    for name in ("max", "high", "partial", "low", "none")
}
SRAM: Members = {
    "aggregateUncParity": (whole, ("ECC Errors/Aggregate/SRAM Uncorrectable Parity",)),
    "aggregateUncSecDed": (whole, ("ECC Errors/Aggregate/SRAM Uncorrectable SEC-DED",)),
    "aggregateCor": (whole, ("ECC Errors/Aggregate/SRAM Correctable",)),
    "volatileUncParity": (whole, ("ECC Errors/Volatile/SRAM Uncorrectable Parity",)),
    "volatileUncSecDed": (whole, ("ECC Errors/Volatile/SRAM Uncorrectable SEC-DED",)),
    "volatileCor": (whole, ("ECC Errors/Volatile/SRAM Correctable",)),
    **{
        f"aggregateUncBucket{name}": (whole, (f"ECC Errors/Aggregate Uncorrectable SRAM Sources/SRAM {line}",))
        for name, line in (("L2", "L2"), ("Sm", "SM"), ("Pcie", "PCIE"), ("Mcu", "Microcontroller"), ("Other", "Other"))
    },
    "bThresholdExceeded": (flag, ("ECC Errors/Aggregate/SRAM Threshold Exceeded",)),
}


def calls(output: Output) -> dict[str, Any]:
    """Return the answers to the calls about the GPU as a whole; None where nothing was printed."""
    return {
        **{question: output.answer(convert, *paths) for question, (convert, paths) in CALLS.items()},
        **{question: output.answers(*parts) for question, parts in LISTS.items()},
        "nvmlDeviceGetPciInfo()": output.struct("nvmlPciInfo_t", PCI),
        "nvmlDeviceGetUtilizationRates()": output.struct("c_nvmlUtilization_t", UTILIZATION),
        MEMORY_CALL: output.struct("c_nvmlMemory_v2_t", MEMORY, version=pynvml.nvmlMemory_v2),
        "nvmlDeviceGetBAR1MemoryInfo()": output.struct("c_nvmlBAR1Memory_t", BAR1),
        "nvmlDeviceGetRowRemapperHistogram()": output.struct("c_nvmlRowRemapperHistogramValues", SPARE_ROWS),
        "nvmlDeviceGetSramEccErrorStatus(c_nvmlEccSramErrorStatus_v1_t)": output.struct(
            "c_nvmlEccSramErrorStatus_v1_t", SRAM, version=pynvml.nvmlEccSramErrorStatus_v1
        ),
        "nvmlDeviceGetComputeRunningProcesses_v3()": _processes(output),
        **_clock_events(output),
        **_fabric(output),
        **_located_errors(output),
    }


def fields(output: Output) -> dict[str, Any]:
    """Return the answers of nvmlDeviceGetFieldValues, with the member of the value that holds them."""

    def of(member: str, convert: Convert, *paths: str) -> Any:
        answer = output.answer(convert, *paths)
        return answer if answer is None or _failed(answer) else {member: answer}

    recovery = word("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")
    counters = "Clocks Event Reasons Counters/"
    found = {
        "82": of("uiVal", whole, "Temperature/Memory Current Temp", "temperature/memory_temp"),
        "74": of("ullVal", nanoseconds, f"{counters}SW Power Capping"),
        "76": of("ullVal", nanoseconds, f"{counters}Sync Boost"),
        "269": of("ullVal", nanoseconds, f"{counters}SW Thermal Slowdown"),
        "270": of("ullVal", nanoseconds, f"{counters}HW Thermal Slowdown"),
        "271": of("ullVal", nanoseconds, f"{counters}HW Power Braking"),
        "94": of("uiVal", whole, "PCI/Replays Since Reset", "pci/replay_counter"),
        "95": of("uiVal", whole, "PCI/Replay Number Rollovers", "pci/replay_rollover_counter"),
        "142": of("uiVal", whole, "Remapped Rows/Correctable Error", "Remapped Rows", "remapped_rows"),
        "143": of("uiVal", whole, "Remapped Rows/Uncorrectable Error", "Remapped Rows", "remapped_rows"),
        "144": of("uiVal", flag, "Remapped Rows/Pending", "Remapped Rows", "remapped_rows"),
        "145": of("uiVal", flag, "Remapped Rows/Remapping Failure Occurred", "Remapped Rows", "remapped_rows"),
        "29": of(
            "uiVal", whole, "Retired Pages/Single Bit ECC", "retired_pages/multiple_single_bit_retirement/retired_count"
        ),
        "30": of("uiVal", whole, "Retired Pages/Double Bit ECC", "retired_pages/double_bit_retirement/retired_count"),
        "31": of("uiVal", flag, "Retired Pages/Pending Page Blacklist", "retired_pages/pending_retirement"),
        "193": of("siVal", whole, "Temperature/GPU Shutdown T.Limit Temp"),
        "194": of("siVal", whole, "Temperature/GPU Slowdown T.Limit Temp"),
        "195": of("siVal", whole, "Temperature/Memory Max Operating T.Limit Temp"),
        "196": of("siVal", whole, "Temperature/GPU Max Operating T.Limit Temp"),
        "230": of("uiVal", recovery, "GPU Recovery Action"),
        "185": of("uiVal", milliwatts, "GPU Power Readings/Average Power Draw"),
        "186": of("uiVal", milliwatts, "GPU Power Readings/Instantaneous Power Draw"),
        field_key(185, 1): of("uiVal", milliwatts, "Module Power Readings/Average Power Draw"),
        field_key(186, 1): of(
            "uiVal", milliwatts, "Module Power Readings/Instantaneous Power Draw", "module_power_readings/power_draw"
        ),
    }
    for name, path in {
        "3": "corrected.volatile",
        "4": "uncorrected.volatile",
        "5": "corrected.aggregate",
        "6": "uncorrected.aggregate",
    }.items():
        found[name] = of("ullVal", whole, f"ecc.errors.{path}.total")
        kind, counter = path.removesuffix("ed").replace("ed.", ".").split(".")
        places = [output.answer(whole, f"ecc_errors/{counter}/{place}_{kind}able") for place in ("sram", "dram")]
        if found[name] is None and None not in places:
            found[name] = next(filter(_failed, places), None) or {"ullVal": sum(places)}
    return found


def _clock_events(output: Output) -> dict[str, Any]:
    """Return the reasons as the mask that the driver of that time has under one of two names."""
    reasons = (
        "Idle",
        "Applications Clocks Setting",
        "SW Power Cap",
        "HW Slowdown",
        "Sync Boost",
        "SW Thermal Slowdown",
        "HW Slowdown/HW Thermal Slowdown",
        "HW Slowdown/HW Power Brake Slowdown",
        "Display Clock Setting",
    )
    tags = (
        "gpu_idle",
        "applications_clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "display_clocks_setting",
    )
    old = any(path.startswith("clocks_throttle_reasons") for path, _ in output.printed)
    supported = active = 0
    for bit, (line, tag) in enumerate(zip(reasons, tags, strict=True)):
        state = output.answer(
            word("Not Active", "Active"),
            f"Clocks Event Reasons/{line}",
            f"clocks_event_reasons/clocks_event_reason_{tag}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{tag}",
        )
        if isinstance(state, int):
            supported |= 1 << bit
            active |= state << bit
    printed = output.answer(_hexadecimal, "clocks_event_reasons.supported")
    name = "Throttle" if old else "Event"
    return {
        f"nvmlDeviceGetSupportedClocks{name}Reasons()": supported if printed is None else printed,
        f"nvmlDeviceGetCurrentClocks{name}Reasons()": active,
    }


def _fabric(output: Output) -> dict[str, Any]:
    """Return the fabric as each version of the structure has it; "N/A" in the health is its "not supported", 0."""
    state = output.answer(
        word("Not Supported", "Not Started", "In Progress", "Completed"), "Fabric/State", "fabric/state"
    )
    answer = {}
    for version, name in ((2, "c_nvmlGpuFabricInfo_v2_t"), (3, "c_nvmlGpuFabricInfo_v3_t")):
        value = state
        if isinstance(state, int):
            assert output.texts("Fabric/Health/Summary") == ["N/A"]
            number_ = pynvml.nvmlGpuFabricInfo_v2 if version == 2 else pynvml.nvmlGpuFabricInfo_v3
            value = output.struct(
                name,
                {
                    "status": (word("Success"), ("Fabric/Status",)),
                    "cliqueId": (whole, ("Fabric/CliqueId",)),
                    "clusterUuid": (lambda text: {"hex": text.replace("-", "")}, ("Fabric/ClusterUUID",)),
                },
                version=number_,
                state=state,
                healthMask=0,
                **({"healthSummary": 0} if version == 3 else {}),
            )
        answer[f"nvmlDeviceGetGpuFabricInfoV({name})"] = value
    return answer


def _located_errors(output: Output) -> dict[str, Any]:
    """Return nvmlDeviceGetMemoryErrorCounter by error, counter and place."""
    places = {0: "l1_cache", 1: "l2_cache", 2: "dram", 3: "register_file", 4: "texture_memory", 6: "cbu", 7: "sram"}
    return {
        f"nvmlDeviceGetMemoryErrorCounter({error}, {counter}, {place})": output.answer(
            whole, f"ecc.errors.{kind}ed.{lasting}.{name}", f"ecc_errors/{lasting}/{name}_{kind}able"
        )
        for error, kind in enumerate(("correct", "uncorrect"))
        for counter, lasting in enumerate(("volatile", "aggregate"))
        for place, name in places.items()
    }


def _processes(output: Output) -> list[dict[str, Any]]:
    """Return the processes with a compute context; one with a graphics context as well is "C+G"."""
    columns = (
        ("Processes/Process ID", "processes/process_info/pid"),
        ("Processes/Process ID/Type", "processes/process_info/type"),
        ("Processes/Process ID/Used GPU Memory", "processes/process_info/used_memory"),
    )
    texts = [next((found for found in map(output.texts, paths) if found), []) for paths in columns]
    return [
        {
            "object": {
                "computeInstanceId": 2**32 - 1,
                "gpuInstanceId": 2**32 - 1,
                "pid": int(pid),
                "usedGpuMemory": bytes_of(used),
            }
        }
        for pid, kind, used in zip(*texts, strict=True)
        if "C" in kind
    ]


def mig_devices(output: Output) -> dict[str, dict[str, Any]]:
    """Return the answers about each MIG device printed."""
    path = "mig_devices/mig_device/"
    columns = {
        name: output.texts(f"{path}{name}")
        for name in (
            "index",
            "gpu_instance_id",
            "compute_instance_id",
            *(f"fb_memory_usage/{name}" for name in ("total", "reserved", "free", "used")),
            "device_attributes/shared/multiprocessor_count",
        )
    }
    rows = [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]

    def size(row: Mapping[str, str]) -> tuple[str, str]:
        return row["device_attributes/shared/multiprocessor_count"], row["fb_memory_usage/total"]

    return {
        f"gpu0/mig{row['index']}": {
            "nvmlDeviceGetUUID()": f"MIG-00000000-0000-0000-0000-{int(row['index']):012d}",
            "nvmlDeviceGetName()": f"{output.texts('product_name')[0]} MIG {MIG_PROFILES[size(row)]}",
            "nvmlDeviceGetGpuInstanceId()": whole(row["gpu_instance_id"]),
            "nvmlDeviceGetComputeInstanceId()": whole(row["compute_instance_id"]),
            MEMORY_CALL: {
                "struct": "c_nvmlMemory_v2_t",
                "version": pynvml.nvmlMemory_v2,
                **{name: bytes_of(row[f"fb_memory_usage/{name}"]) for name in ("total", "reserved", "free", "used")},
            },
        }
        for row in rows
    }


def nvlinks(text: str) -> dict[str, Any]:
    """Return the field values behind `nvidia-smi nvlink -s`; a speed is printed for active links."""
    speeds = {int(link): round(float(speed) * 1000) for link, speed in re.findall(r"Link (\d+): ([\d.]+) GB/s", text)}
    found: dict[str, Any] = {"91": {"uiVal": len(speeds)}} if speeds else {}
    for link, speed in speeds.items():
        found[field_key(164, link)] = {"uiVal": speed}
        found[field_key(165, link)] = {"uiVal": 1}
    return found


def sections(text: str) -> dict[str, str]:
    """Return the parts of a published capture by their titles."""
    bar = "#" * 80 + "\n"
    found = re.findall(rf"^{bar}# ([^\n]+)\n(?:# [^\n]*\n)*{bar}(.*?)(?=^{bar}|\Z)", text, re.MULTILINE | re.DOTALL)
    return {title: body for title, body in found if " :: " in title}


def convert(name: str) -> str:
    """Return the capture made of one published file."""
    text = (HERE / "nvidia_smi" / SOURCES[name]).read_text()
    links: dict[str, Any] = {}
    if SOURCES[name].endswith(".xml"):
        outputs = [Output(from_xml(text))]
    else:
        parts = sections(text)
        links = nvlinks(parts["capabilities :: nvlink -s"])
        outputs = [
            Output(
                [
                    *from_query(parts[f"{state} :: query (-q)"]),
                    *from_csv(parts[f"{state} :: query-gpu (csv, what the exporter parses)"]),
                ]
            )
            for state in ("idle", "load")
        ]
    driver = outputs[0].answer(str, "Driver Version", "driver_version")
    times = [
        datetime.strptime(output.answer(str, "Timestamp", "timestamp"), "%a %b %d %H:%M:%S %Y") for output in outputs
    ]
    about = {"source": f"nvidia_smi/{SOURCES[name]}", "driver": driver, "date": times[0].strftime("%Y-%m-%d")}
    reads = [(time - times[0]).total_seconds() for time in times]
    return dumps({"about": about, "reads": reads, "nvml": _recorded(outputs, links, driver)}) + "\n"


def _recorded(outputs: list[Output], links: Mapping[str, Any], driver: str) -> Recorded:
    notes: Recorded = {}

    def note(subject: str, section: str, answers: Mapping[str, Any]) -> None:
        entries = notes.setdefault(subject, {name: {} for name in SECTIONS})[section]
        for question, answer in answers.items():
            if answer is not None:
                entries.setdefault(question, []).append(answer)

    note(
        SYSTEM,
        "calls",
        {
            "nvmlDeviceGetCount()": 1,
            "nvmlDeviceGetHandleByIndex(0)": {"handle": "gpu0"},
            "nvmlSystemGetDriverVersion()": driver,
        },
    )
    notes[SYSTEM]["calls"]["nvmlInit()"] = [None]
    for output in outputs:
        devices = mig_devices(output)
        note("gpu0", "calls", calls(output))
        note("gpu0", "fields", {**fields(output), **links})
        if devices:
            note("gpu0", "calls", {"nvmlDeviceGetMaxMigDeviceCount()": len(devices)})
        for index, (subject, answers) in enumerate(devices.items()):
            note("gpu0", "calls", {f"nvmlDeviceGetMigDeviceHandleByIndex({index})": {"handle": subject}})
            note(subject, "calls", answers)
    return arranged(notes)


def main() -> None:
    """Write every capture again."""
    for name in SOURCES:
        (HERE / "nodes" / name).mkdir(parents=True, exist_ok=True)
        (HERE / "nodes" / name / "nvml.json").write_text(convert(name))


if __name__ == "__main__":
    main()
