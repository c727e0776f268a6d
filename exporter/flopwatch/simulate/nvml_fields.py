"""Structures of the simulated NVML: field values by id and scope, PCI identity and event sets.

Field ids: NVML_FI_* in nvml.h, https://docs.nvidia.com/deploy/nvml-api/group__nvmlFieldValueEnums.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pynvml as real

from flopwatch.node.collectors.nvml.fields import ALL_LINKS, Key
from flopwatch.simulate import h100

UNSIGNED_INT, UNSIGNED_LONG_LONG, SIGNED_INT = 1, 3, 5
PCIE_BYTES = (197, 198)
TYPES = {**dict.fromkeys((82, 91, 164, 165, 166, 230), UNSIGNED_INT), **dict.fromkeys((193, 194, 195, 196), SIGNED_INT)}


def numbers(index: int, gpu: Mapping[str, Any], faults: Mapping[str, Any]) -> dict[Key, int]:
    """Return a GPU's NVML fields by (field id, scope), without those of its NVLinks."""
    key = str(index)
    held, busy = gpu["event_nanoseconds"], gpu.get("busy_seconds", 0.0)
    ecc, remap = faults["ecc"].get(key, {}), faults["remap"].get(key, {})
    corrected, uncorrected = ecc.get("corrected", 0), ecc.get("uncorrected", 0)
    # fmt: off
    # Fields in groups: the formatter would print one a line.
    values = {
        82: gpu["memory_celsius"], 83: gpu["millijoules"], 230: faults["recovery"].get(key, 0),
        74: held["sw_power_cap"], 76: held["sync_boost"], 269: held["sw_thermal_slowdown"],
        270: held["hw_thermal_slowdown"], 271: held["hw_power_brake_slowdown"],
        3: corrected, 5: ecc.get("corrected_before", 0) + corrected,
        4: uncorrected, 6: ecc.get("uncorrected_before", 0) + uncorrected,
        193: -8, 194: -2, 94: 9, **dict.fromkeys((195, 196, 95, 169, *range(173, 184)), 0),
        **dict.fromkeys(PCIE_BYTES, int(busy * h100.PCIE_RATE)),
    }
    # fmt: on
    if not faults["mig"].get(key):
        values |= {142: remap.get("corrected", 0), 143: remap.get("uncorrected", 0)}
        values |= {301: 0, 302: remap.get("inactive", 0)}
        values |= {144: int(remap.get("pending", False)), 145: int(remap.get("failure", False))}
    return {(field, 0): value for field, value in values.items()}


def of_links(index: int, busy: float, faults: Mapping[str, Any]) -> dict[Key, int]:
    """Return a GPU's NVLink fields by (field id, link), after so many seconds at full load (`busy`)."""
    key = str(index)
    down, errors = faults["nvlink_down"].get(key, []), faults["nvlink_errors"].get(key, {})
    kibibytes = int(busy * h100.NVLINK_RATE / 1024)
    fields = {(91, 0): h100.NVLINKS, (138, ALL_LINKS): kibibytes, (139, ALL_LINKS): kibibytes}
    fields |= {(field, ALL_LINKS): kibibytes * 17 // 16 for field in (140, 141)}  # a header per 256 bytes
    for link in range(h100.NVLINKS):
        up = link not in down
        fields[165, link], fields[166, link] = int(up), real.NVML_NVLINK_VERSION_4_0
        fields[164, link] = h100.NVLINK_SPEED if up else 0
        counts = errors.get(str(link), {})
        for field, kind in h100.NVLINK_ERRORS.items():
            fields[field, link] = counts.get(kind, 0)
    return fields


@dataclass(slots=True)
class EventSet:
    """Replacement of an nvmlEventSet_t: the registered GPUs, and the position in the kernel log in bytes."""

    place: int
    gpus: set[int]


def pci_info(index: int) -> Any:
    """Return the nvmlPciInfo_t of a GPU."""
    bus = h100.PCI_BUSES[index]
    return real.nvmlPciInfo_t(
        busIdLegacy=f"0000:{bus:02X}:00.0".encode(),
        bus=bus,
        pciDeviceId=0x233010DE,
        pciSubSystemId=0x16C110DE,
        busId=f"00000000:{bus:02X}:00.0".encode(),
    )
