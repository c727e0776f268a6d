"""Values of AMD GPUs in the JSON that `amd-smi` prints: https://rocm.docs.amd.com/projects/amdsmi.

The layout differs between releases. The document is a list of GPUs, or an object with that list. A value is a number,
an object with value and unit, a text such as "94 W", or "N/A". Warnings may precede the document.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric

Value = tuple[Metric, tuple[str, ...], float]  # row, labels after (gpu, uuid), number in the row's raw unit
Entry = dict[str, Any]

MAX_NUMBER = 1 << 53  # the firmware sets all bits of a value that it lacks
BYTES = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
GENERATIONS = {2.5: 1, 5: 2, 8: 3, 16: 4, 32: 5, 64: 6}  # PCIe generation by GT/s
REASONS = {"ppt": "sw_power_cap", "socket_thermal": "sw_thermal_slowdown"}  # of throttling, by violation
REASONS |= dict.fromkeys(("prochot", "vr_thermal", "hbm_thermal"), "hw_thermal_slowdown")

Table = tuple[tuple[Metric, tuple[str, ...], float, tuple[str, ...]], ...]  # row, labels, factor, paths
METRICS: Table = (
    (m.GPU_UTILIZATION_RATIO, (), 1, ("usage.gfx_activity",)),
    (m.GPU_MEMORY_COPY_UTILIZATION_RATIO, (), 1, ("usage.umc_activity",)),
    (m.GPU_POWER_WATTS, (), 1e3, ("power.socket_power", "power.current_socket_power", "power.average_socket_power")),
    (m.GPU_TEMPERATURE_CELSIUS, (), 1, ("temperature.hotspot", "temperature.edge")),
    (m.GPU_MEMORY_TEMPERATURE_CELSIUS, (), 1, ("temperature.mem",)),
    (m.GPU_MEMORY_USED_BYTES, (), 1, ("mem_usage.used_vram",)),
    (m.GPU_MEMORY_TOTAL_BYTES, (), 1, ("mem_usage.total_vram",)),
    (m.GPU_MEMORY_CLOCK_HERTZ, (), 1, ("clock.mem_0.clk",)),
    (m.GPU_ECC_ERRORS_TOTAL, ("corrected",), 1, ("ecc.total_correctable_count",)),
    (m.GPU_ECC_ERRORS_TOTAL, ("uncorrected",), 1, ("ecc.total_uncorrectable_count",)),
    (m.GPU_PCIE_WIDTH_LANES, (), 1, ("pcie.width",)),
    (m.GPU_PCIE_GENERATION, (), 1, ("pcie.speed",)),
    (m.GPU_PCIE_REPLAYS_TOTAL, (), 1, ("pcie.replay_count",)),
)
SPARSE: Table = (  # without a number that is 0
    (m.GPU_ENERGY_JOULES_TOTAL, (), 1e3, ("energy.total_energy_consumption",)),
    (m.GPU_MEMORY_CLOCK_MAX_HERTZ, (), 1, ("clock.mem_0.max_clk",)),
    (m.GPU_PCIE_ERRORS_TOTAL, ("l0_to_recovery",), 1, ("pcie.l0_to_recovery_count",)),
    (m.GPU_PCIE_ERRORS_TOTAL, ("replay_rollover",), 1, ("pcie.replay_roll_over_count",)),
    (m.GPU_PCIE_ERRORS_TOTAL, ("nak_sent",), 1, ("pcie.nak_sent_count",)),
    (m.GPU_PCIE_ERRORS_TOTAL, ("nak_received",), 1, ("pcie.nak_received_count",)),
)
LIMITS: Table = (  # of `amd-smi static`, without a number that is 0
    (m.GPU_POWER_LIMIT_WATTS, (), 1e3, ("limit.ppt0.socket_power_limit", "limit.socket_power")),
    (m.GPU_POWER_LIMIT_MAX_WATTS, (), 1e3, ("limit.ppt0.max_power_limit", "limit.max_power")),
    (m.GPU_TEMPERATURE_LIMIT_CELSIUS, ("slowdown",), 1, ("limit.slowdown_hotspot_temperature",)),
    (m.GPU_TEMPERATURE_LIMIT_CELSIUS, ("shutdown",), 1, ("limit.shutdown_hotspot_temperature",)),
    (m.GPU_TEMPERATURE_LIMIT_CELSIUS, ("memory_max",), 1, ("limit.slowdown_vram_temperature",)),
)
MODULE: Table = (  # the same, of a module without a slot: what a card supports may be more than its slot does
    (m.GPU_PCIE_WIDTH_MAX_LANES, (), 1, ("bus.max_pcie_width",)),
    (m.GPU_PCIE_GENERATION_MAX, (), 1, ("bus.max_pcie_speed",)),
)


def parse(output: str) -> Any:
    """Return the document after the warnings in an output. Raises ValueError without one."""
    if (start := re.search(r"^[\[{]", output, re.MULTILINE)) is None:
        raise ValueError(f"no JSON: {output.strip()[:200]!r}")
    return json.JSONDecoder().raw_decode(output, start.start())[0]


def entries(document: Any, key: str = "gpu") -> Iterator[Entry]:
    """Yield the objects about one GPU that have a key, at any depth of the document."""
    if isinstance(document, dict) and isinstance(document.get("gpu"), int) and key in document:
        yield document
    elif isinstance(document, (dict, list)):
        for inner in document.values() if isinstance(document, dict) else document:
            yield from entries(inner, key)


def look(entry: Any, path: str) -> Any:
    """Return what is at a path of keys in nested objects, None if a key is absent."""
    for key in path.split("."):
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry


def number(value: Any) -> float | None:
    """Return a value's number, of a size in bytes, of a link's speed its PCIe generation, None if not available."""
    unit, value = (look(value, "unit"), look(value, "value")) if isinstance(value, dict) else ("", value)
    if isinstance(value, str) and (match := re.match(r"\d+(?:\.\d+)?", value)):
        value = float(match[0])
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not known or not 0 <= value < MAX_NUMBER:
        return None
    return GENERATIONS.get(value) if unit == "GT/s" else value * BYTES.get(unit, 1)


def text(entry: Entry, *paths: str) -> str:
    """Return the first text or number at one of the paths that is available, else an empty text."""
    found = (str(value) for path in paths if isinstance(value := look(entry, path), (str, int)))
    return next((value for value in found if value not in ("", "N/A", "-1")), "")


def identity(entry: Entry, host: str) -> dict[str, str]:
    """Return the labels of gpu_info from an entry of `amd-smi static`.

    ROCm's UUID is the serial number in ASCII. PyTorch prints its bytes in hexadecimal, so that form is the label.
    """
    pci, serial = text(entry, "bus.bdf"), text(entry, "asic.asic_serial")
    known = re.fullmatch(r"0x(?!0+$)([0-9a-fA-F]{1,16})", serial)
    uuid = str(UUID(bytes=known[1].lower().zfill(16).encode())) if known is not None else pci or str(entry["gpu"])
    found = {"gpu": str(entry["gpu"]), "uuid": f"GPU-{uuid}", "host": host, "pci_bus_id": pci, "source": "amd-smi"}
    found |= {"model": text(entry, "asic.market_name"), "serial": serial if known is not None else ""}
    found |= {"board_part_number": text(entry, "board.model_number"), "module_id": text(entry, "asic.oam_id")}
    found |= {"numa_node": text(entry, "numa.node"), "driver_version": text(entry, "driver.version")[:64]}
    vbios = text(entry, *(f"{name}.{key}" for key in ("version", "part_number") for name in ("ifwi", "vbios")))
    return found | {"vbios_version": vbios, "inforom_version": ""}


def values(metric: Entry, static: Entry) -> Iterator[Value]:
    """Yield the values of one GPU in its entries of `amd-smi metric` and `amd-smi static`."""
    module = MODULE if look(static, "bus.slot_type") == "OAM" else ()
    for table, entry in ((METRICS, metric), (SPARSE, metric), (LIMITS, static), (module, static)):
        for row, labels, factor, paths in table:
            found = next((value for path in paths if (value := number(look(entry, path))) is not None), None)
            if found is not None and (found or table is METRICS):
                yield row, labels, found * factor
    clocks = look(metric, "clock") if isinstance(look(metric, "clock"), dict) else {}
    dies = [clock for name, clock in clocks.items() if name.lower().startswith("gfx_")]
    # Of several dies, the slowest is the one that the others wait for.
    if current := [clock for die in dies if (clock := number(look(die, "clk"))) is not None]:
        yield from ((row, (), min(current)) for row in (m.GPU_GRAPHICS_CLOCK_HERTZ, m.GPU_SM_CLOCK_HERTZ))
    if highest := max((number(look(die, "max_clk")) or 0 for die in dies), default=0):
        yield m.GPU_SM_CLOCK_MAX_HERTZ, (), highest


def links(document: Any) -> dict[int, list[Value]]:
    """Return the values of each GPU's xGMI links, by its number, from the document of `amd-smi xgmi`."""
    found, states = defaultdict[int, list[Value]](list), defaultdict[int, str](str)
    for entry in entries(document, "link_status"):  # by link, and again by the other GPU
        now = "".join(re.findall(r"\b[UD]\b", " ".join(map(str, entry["link_status"] or ()))))
        states[entry["gpu"]] = max(states[entry["gpu"]], now, key=len)
    for gpu, now in states.items():
        counts = {"active": now.count("U"), "inactive": now.count("D")} if now else {}
        found[gpu] += [(m.NVLINK_LINKS, (state,), count) for state, count in counts.items()]
    for entry in entries(document, "link_metrics"):
        for row, way in ((m.NVLINK_RECEIVE_BYTES_TOTAL, "read"), (m.NVLINK_TRANSMIT_BYTES_TOTAL, "write")):
            sizes = [number(look(link, way)) for link in look(entry, "link_metrics.links") or ()]
            if known := [size for size in sizes if size is not None]:
                found[entry["gpu"]].append((row, (), sum(known)))
    return found


class Throttling:
    """Seconds of throttling by reason. The firmware counts its samples, and those with each violation."""

    def __init__(self) -> None:
        self._last: tuple[float, dict[str, float]] | None = None
        self.seconds: dict[str, float] = {}

    def advance(self, throttle: Any, now: float) -> None:
        """Add the time since the last call from the counts in `amd-smi metric`. `now` is in seconds."""
        keys = {name: f"{name}_accumulated" for name in REASONS} | {"samples": "accumulation_counter"}
        counts = {name: count for name, key in keys.items() if (count := number(look(throttle, key))) is not None}
        if "samples" in counts:
            (before, last), self._last = self._last or (now, counts), (now, counts)
            samples, names = counts["samples"] - last["samples"], REASONS.keys() & counts.keys()
            shares = dict.fromkeys((REASONS[name] for name in names), 0.0)
            for name in names if samples > 0 else ():
                share = min(1.0, max(0.0, (counts[name] - last.get(name, counts[name])) / samples))
                shares[REASONS[name]] = max(shares[REASONS[name]], share)
            self.seconds = {why: self.seconds.get(why, 0.0) + share * (now - before) for why, share in shares.items()}
