"""Table of docs/dcgm.md: the field of dcgm-exporter behind each GPU series of flopwatch, or why it cannot be had."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from alerts.dcgm import FIELDS, LINK_STATES, RECORDS, XIDS, DcgmRecord
from flopwatch.catalogue import Metric, all_metrics

DEFAULTS = Path(__file__).resolve().parents[1] / "tests" / "captures" / "dcgm" / "default-counters.csv"
MAX_FIELDS = 4  # in a cell

_NO_FIELD = "DCGM has no such field."
_NOT_LISTED = "DCGM has fields of it, but no rule maps them."
_SWITCH = "dcgm-exporter does not report the PCI address of a switch, which names it in flopwatch."
_PROCESSES = "Needs the processes of the host."
_KERNEL = "Needs the kernel log."
ABSENT: Mapping[str, str] = {
    "gpu_readable": "Needs the driver's answers to calls about each GPU.",
    "gpu_driver_loaded": "dcgm-exporter has no series without a driver.",
    "gpu_chassis_info": "dcgm-exporter serves text as labels of other series only.",
    "gpu_processes": _PROCESSES,
    "gpu_process_memory_bytes": _PROCESSES,
    "gpu_temperature_limit_margin_celsius": _NO_FIELD,
    "gpu_module_power_watts": _NOT_LISTED,
    "gpu_graphics_clock_hertz": _NO_FIELD,
    "gpu_ecc_location_errors_total": _NOT_LISTED,
    "gpu_remapped_rows_inactive": _NO_FIELD,
    "gpu_bank_remappings": _NO_FIELD,
    "gpu_bank_remap_groups": _NO_FIELD,
    "gpu_c2c_links": _NOT_LISTED,
    "gpu_c2c_speed_bytes_per_second": _NOT_LISTED,
    "gpu_repair_pending": _NO_FIELD,
    "gpu_mig_info": "dcgm-exporter has no UUID of an instance.",
    "gpu_fabric_info": "dcgm-exporter serves text as labels of other series only.",
    "gpu_xid_nvlink_errors_total": _KERNEL,
    "gpu_xid_recovery_action_id": _KERNEL,
    "gpu_initialization_failed_timestamp_seconds": _KERNEL,
    "gpu_driver_events_total": "Needs events of NVML.",
    "gpu_owner_updated_timestamp_seconds": "dcgm-exporter does not report it.",
    "nvlink_info": _NO_FIELD,
    "nvlink_speed_bytes_per_second": _NO_FIELD,
    "nvlink_link_errors_total": _NOT_LISTED,
    "nvlink_transmit_blocks_total": _NOT_LISTED,
    "nvlink_transmit_retried_blocks_total": _NOT_LISTED,
    "nvlink_raw_bit_error_ratio": _NOT_LISTED,
    "nvlink_switch_sxid_errors_total": _KERNEL,
    "nvlink_switch_sxid_last_timestamp_seconds": _KERNEL,
    "nvlink_switch_sxid_info": _KERNEL,
    "nvlink_switch_last_sxid_id": _SWITCH,
    "nvlink_switch_reset_required": _SWITCH,
    "nvlink_switch_temperature_celsius": _SWITCH,
    "nvlink_switch_temperature_limit_celsius": _SWITCH,
    "nvlink_switch_transmit_bytes_total": _SWITCH,
    "nvlink_switch_receive_bytes_total": _SWITCH,
    "nvlink_switch_links": _SWITCH,
    "nvlink_switch_errors_total": _SWITCH,
    "nvlink_switch_link_errors_total": _SWITCH,
}

_PAIRS = {one.names[0][0]: one.names[-1][0] for one in FIELDS} | dict((XIDS, LINK_STATES))


def defaults() -> set[str]:
    """Return the names that dcgm-exporter serves with its own list of metrics."""
    with DEFAULTS.open(newline="", encoding="utf-8") as file:
        return {row[0].strip() for row in csv.reader(file) if row and row[0].startswith("DCGM_")}


def of_gpus() -> list[Metric]:
    """Return the rows of GPUs and NVLink."""
    return [row for row in all_metrics() if row.domain in ("gpu", "nvlink")]


def fed() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield series, fields until 4.8 and from 4.9, whether these are on by default, and how the series is made."""
    served = defaults()
    for row in of_gpus():
        for record in RECORDS:
            if record.row is row:
                new = set(_PAIRS.values())
                old = [name for name in record.fields if name in _PAIRS or name not in new]
                renamed = [_PAIRS.get(name, name) for name in old]
                same = old == renamed
                on = "yes" if served & set(old) else "no"
                yield _series(record), _cell(old), "the same" if same else _cell(renamed), on, _how(record)


def _series(record: DcgmRecord) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in record.labels.items())
    return f"`{record.row}{f'{{{labels}}}' if labels else ''}`"


def _cell(names: Iterable[str]) -> str:
    first, *others = [f"`{name}`" for name in names]
    return f"{first} or {len(others)} others" if len(others) >= MAX_FIELDS else " or ".join((first, *others))


def _how(record: DcgmRecord) -> str:
    if record.group == "xids":
        return "change of the last code"
    return "sum of means" if record.estimate else "value"


def absent() -> Iterator[tuple[str, str]]:
    """Yield the series that dcgm-exporter cannot feed, and why."""
    made = {record.row.name for record in RECORDS}
    for row in of_gpus():
        if row.name not in made:
            yield f"`{row}`", ABSENT[row.name]
