"""Section `smi`: the exporter's samples compared with `nvidia-smi -q -x`, and energy compared with power over time.

nvidia-smi reads NVML too, so this finds wrong units, wrong scopes and misread types, and not a driver's own errors.
"""

from __future__ import annotations

import re
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.card.fields import ENERGY, ask
from bench.card.machine import Gpu, Machine
from bench.card.report import Report, Unavailable, text
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample

TRIES = 3  # because power, clocks and counters move between the two reads
STEADY = 10.0  # seconds between reads, so that also seldom fields are read again
ENERGY_SHARE, ENERGY_STEP = 0.05, 0.1
MEBIBYTE = float(1 << 20)
PIDS = "processes/process_info"

WORDS = {"No": "0", "Yes": "1"}

Series = tuple[str, tuple[str, ...]]  # name of a family, labels after (gpu, uuid)


@dataclass(frozen=True, slots=True)
class Compared:
    """Row with its labels, paths in the XML, their unit, and the tolerance: share and absolute.

    The numbers at all paths are added up. With `first`, the first number counts, because releases have different names.
    """

    row: Metric
    paths: tuple[str, ...]
    labels: tuple[str, ...] = ()
    unit: float = 1.0
    share: float = 0.0
    absolute: float = 0.0
    first: bool = False

    @property
    def name(self) -> str:
        """Return the name of the family, with its labels."""
        return ".".join((self.row.name, *self.labels))


def _ecc(kind: str, group: str, row: Metric) -> tuple[Compared, Compared]:
    """Return the corrected and uncorrected errors of a group. Older drivers have one SRAM uncorrectable count."""
    paths = {
        "corrected": ("sram_correctable", "dram_correctable"),
        "uncorrected": (
            "sram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_secded",
            "dram_uncorrectable",
        ),
    }
    first, second = (
        Compared(row, tuple(f"{group}/{kind}/{path}" for path in names), (error,)) for error, names in paths.items()
    )
    return first, second


LINK, EVENTS = "pci/pci_gpu_link_info", "clocks_event_reasons_counters"
SECONDS = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake",
}
# A sum has the paths that exist.
TABLE: tuple[Compared, ...] = (
    Compared(
        m.GPU_POWER_WATTS,
        ("gpu_power_readings/average_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw"),
        share=0.15,
        first=True,
    ),
    Compared(
        m.GPU_POWER_LIMIT_WATTS,
        ("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
        absolute=0.5,
        first=True,
    ),
    Compared(m.GPU_SM_CLOCK_HERTZ, ("clocks/sm_clock",), unit=1e6, share=0.05),
    Compared(m.GPU_MEMORY_CLOCK_HERTZ, ("clocks/mem_clock",), unit=1e6, share=0.05),
    Compared(m.GPU_SM_CLOCK_MAX_HERTZ, ("max_clocks/sm_clock",), unit=1e6),
    Compared(m.GPU_TEMPERATURE_CELSIUS, ("temperature/gpu_temp",), absolute=2),
    Compared(m.GPU_TEMPERATURE_MARGIN_CELSIUS, ("temperature/gpu_temp_tlimit",), absolute=2),
    Compared(m.GPU_MEMORY_TEMPERATURE_CELSIUS, ("temperature/memory_temp",), absolute=2),
    *(
        Compared(m.GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS, (f"temperature/{path}",), (limit,))
        for limit, path in (
            ("shutdown", "gpu_temp_max_tlimit_threshold"),
            ("slowdown", "gpu_temp_slow_tlimit_threshold"),
        )
    ),
    Compared(m.GPU_MEMORY_TOTAL_BYTES, ("fb_memory_usage/total",), unit=MEBIBYTE, absolute=MEBIBYTE),
    Compared(m.GPU_MEMORY_USED_BYTES, ("fb_memory_usage/used",), unit=MEBIBYTE, share=0.01, absolute=2 * MEBIBYTE),
    *_ecc("volatile", "ecc_errors", m.GPU_ECC_ERRORS_TOTAL),
    *_ecc("aggregate", "ecc_errors", m.GPU_ECC_LIFETIME_ERRORS_TOTAL),
    Compared(m.GPU_REMAPPED_ROWS_TOTAL, ("remapped_rows/remapped_row_corr",), ("corrected",)),
    Compared(m.GPU_REMAPPED_ROWS_TOTAL, ("remapped_rows/remapped_row_unc",), ("uncorrected",)),
    Compared(m.GPU_ROW_REMAP_PENDING, ("remapped_rows/remapped_row_pending",)),
    Compared(m.GPU_ROW_REMAP_FAILURE, ("remapped_rows/remapped_row_failure",)),
    Compared(m.GPU_PCIE_GENERATION, (f"{LINK}/pcie_gen/current_link_gen",)),
    Compared(m.GPU_PCIE_WIDTH_LANES, (f"{LINK}/link_widths/current_link_width",)),
    Compared(m.GPU_PCIE_REPLAYS_TOTAL, ("pci/replay_counter",)),
    *(
        Compared(m.GPU_CLOCK_EVENT_SECONDS_TOTAL, (f"{EVENTS}/{EVENTS}_{path}",), (reason,), 1e-6, 0.001, 1e-3)
        for reason, path in SECONDS.items()
    ),
)


def parsed(document: str, uuid: str) -> ElementTree.Element:
    """Return the part of nvidia-smi's XML about the GPU with this uuid. Raises Unavailable."""
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError as error:
        raise Unavailable(f"nvidia-smi's XML: {error}") from error
    gpus = [gpu for gpu in root.iter("gpu") if gpu.findtext("uuid", "").strip() == uuid]
    if not gpus:
        raise Unavailable(f"nvidia-smi does not list {uuid}")
    return gpus[0]


def printed(gpu: ElementTree.Element, compared: Compared) -> float | None:
    """Return the number that nvidia-smi printed, in the unit of the row, None if it printed none."""
    texts = [gpu.findtext(path, "") for path in compared.paths]
    found = [re.match(r"\s*(-?[0-9]+(?:\.[0-9]+)?)", WORDS.get(each, each)) for each in texts]
    numbers = [float(match[1]) * compared.unit for match in found if match is not None]
    return None if not numbers else numbers[0] if compared.first else sum(numbers)


def by_series(samples: list[Sample], gpu: Gpu) -> dict[Series, float]:
    """Return the values of a GPU's samples in base units."""
    return {(row.name, labels[2:]): value * row.scale for row, labels, value in samples if labels[1:2] == (gpu.uuid,)}


def section(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Compare the energy counter with power over time, and samples with nvidia-smi."""
    _energy(machine, gpu, seconds, report)
    with tempfile.TemporaryDirectory() as state, closing(machine.collector(Path(state))) as collector:
        for attempt in range(TRIES):
            before = by_series(collector.read(), gpu)
            document = machine.smi()
            machine.sleep(STEADY)
            after = by_series(collector.read(), gpu)
            element = parsed(document, gpu.uuid)
            results = {row.name: _compared(row, element, before, after) for row in TABLE}
            if all(ok is not False for ok, _, _ in results.values()) or attempt == TRIES - 1:
                break
        for name, (ok, measured, expected) in results.items():
            report.facts[name] = [measured, expected]
            report.check(name, ok, measured, expected)
    _processes(element, before, after, report)


def _compared(
    row: Compared, element: ElementTree.Element, before: Mapping[Series, float], after: Mapping[Series, float]
) -> tuple[bool | None, str, str]:
    """Return whether nvidia-smi's number is between the two samples, with the tolerance. None: one has no number."""
    series: Series = (row.row.name, row.labels)
    smi = printed(element, row)
    numbers = [values[series] for values in (before, after) if series in values]
    measured, expected = " to ".join(dict.fromkeys(map(text, numbers))) or "absent", f"nvidia-smi {text(smi)}"
    if smi is None or not numbers:
        return None, measured, expected
    margin = row.share * abs(smi) + row.absolute + 1e-9
    return min(numbers) - margin <= smi <= max(numbers) + margin, measured, expected


def _processes(
    element: ElementTree.Element, before: Mapping[Series, float], after: Mapping[Series, float], report: Report
) -> None:
    """Compare the number of compute processes."""
    listed = [one for one in element.iterfind(PIDS) if "C" in one.findtext("type", "")]
    counts = [
        sum(value for (name, _), value in values.items() if name == m.GPU_PROCESSES.name) for values in (before, after)
    ]
    ok = min(counts) <= len(listed) <= max(counts)
    report.check("processes", ok, " to ".join(dict.fromkeys(map(text, counts))), f"nvidia-smi {len(listed)}")


def _energy(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Compare the rise of the energy field with the sum of power times time."""
    watts: list[tuple[float, float, float]] = []  # time, watts, joules
    began = machine.clock()
    while machine.clock() - began < seconds:
        try:
            power = machine.recorder.nvmlDeviceGetPowerUsage(gpu.handle)
        except machine.library.NVMLError as error:
            report.info("energy", f"power: {error}")
            return
        answer = ask(machine, gpu, [ENERGY])[ENERGY]
        if answer.number is None:
            report.info("energy", f"field {ENERGY[0]}: {answer}")
            return
        watts.append((machine.clock(), power / 1e3, answer.number / 1e3))
        machine.sleep(ENERGY_STEP)
    integral = sum((later[0] - earlier[0]) * (later[1] + earlier[1]) / 2 for earlier, later in pairwise(watts))
    report.near("energy", watts[-1][2] - watts[0][2], integral, ENERGY_SHARE, " J")
