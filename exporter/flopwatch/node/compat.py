"""The compatibility face: the names, labels and units of dcgm-exporter, made from our own samples by one table.

dcgm-exporter's metrics are DCGM's fields by name, and the names have two generations. Until 4.8.4:
etc/default-counters.csv and internal/pkg/rendermetrics of https://github.com/NVIDIA/dcgm-exporter (d5e5f51). From 4.9:
its release notes (https://newreleases.io/project/github/NVIDIA/dcgm-exporter/release/4.9.0) say that 23 default fields
take their DCGM 4.7 names, that eleven of these change their unit (clocks, energy, utilisation, memory, NVLink), that
the driver's label becomes DCGM_FI_SYSTEM_DRIVER_VERSION and that DCGM_FI_DEV_FB_CAPACITY_BYTES is new. The DCGM names
are those of dcgm_fields.h 4.6.0 (https://github.com/NVIDIA/DCGM, 72fa3fe) and of its 4.6.1 preview in
https://github.com/NVIDIA/go-dcgm (b7fa315: ids 1603, 1604, 1611). Not seen there, only in quotations of NVIDIA's field
reference for 4.7: ids 1613-1628 and 1648. Not seen at all: the CSV of 4.9, so that types and whatever is not on the
list of 23 are taken to be as before.

`Hostname` became `hostname` in 4.8.3, with the old names still in use: old names carry both. Names that both
generations share carry the labels of both. Labels that the scrape owns elsewhere (namespace, pod, container) are used
here as dcgm-exporter does.

Left out because nothing here knows them: DCGM_FI_DEV_VGPU_LICENSE_STATUS, the CRC errors of NVLink by flit and data
(409, 419), the DCGM_EXP_ families, the names of 1.x. Several owners of a GPU are a series each.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample

# A mean is one over at least so many seconds, from whoever's scrape that was, and over at most so many.
SHORTEST_WINDOW, LONGEST_WINDOW = 10.0, 120.0

GENERATIONS = {"dcgm-4.8": ("4.8",), "dcgm-4.9": ("4.9",), "dcgm": ("4.8", "4.9")}

_HOST = {"4.8": ("Hostname", "hostname"), "4.9": ("hostname",)}
_DRIVER = {"4.8": "DCGM_FI_DRIVER_VERSION", "4.9": "DCGM_FI_SYSTEM_DRIVER_VERSION"}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of DCGM, and how a number in our base unit is written in it; DCGM writes most of the old ones whole."""

    name: str
    of: Callable[[float], float] = float


COUNT, CELSIUS, WATTS, RATIO = Unit("count", round), Unit("C"), Unit("W"), Unit("ratio")
HERTZ, MEGAHERTZ = Unit("Hz", round), Unit("MHz", lambda hertz: round(hertz / 1e6))
JOULES, MILLIJOULES = Unit("J"), Unit("mJ", lambda joules: round(joules * 1e3))
PERCENT = Unit("%", lambda ratio: round(ratio * 100))
BYTES, MEBIBYTES = Unit("bytes", round), Unit("MiB", lambda count: int(count) >> 20)
SECONDS, NANOSECONDS = Unit("s"), Unit("ns", lambda seconds: round(seconds * 1e9))
# DCGM divides KiB per second by 1000 and calls it MB/s (DcgmCacheManager.cpp, ReadAndCacheNvLinkBandwidth).
BYTES_PER_SECOND, MEGABYTES_PER_SECOND = Unit("bytes per second"), Unit("MB/s", lambda rate: round(rate / 1_024_000))


@dataclass(frozen=True, slots=True)
class Alias:
    """One DCGM field: its old and its new name with their units, and the row it is made from.

    `labels` follow those of the GPU. `how`: the value itself; rate of a counter over the window; share of the profiled
    time; free, what memory is left; xid, the last one. `mig` is the row of a MIG instance where it is another one.
    `also` is a second row, added.
    """

    id: int
    row: Metric
    old: str
    unit: Unit
    new: str
    new_unit: Unit
    type: str = "gauge"
    labels: tuple[str, ...] = ()
    how: str = "value"
    mig: Metric | None = None
    also: Metric | None = None


def _same(
    id: int, row: Metric, name: str, unit: Unit, type: str = "gauge", labels: tuple[str, ...] = (), how: str = "value"
) -> Alias:
    return Alias(id, row, name, unit, name, unit, type, labels, how)


def _counted(id: int, row: Metric, old: str, new: str, *labels: str) -> Alias:
    return Alias(id, row, old, COUNT, new, COUNT, "counter", labels)


def _throttled(id: int, old: str, new: str, reason: str) -> Alias:
    return Alias(id, m.GPU_CLOCK_EVENT_SECONDS, old, NANOSECONDS, new, SECONDS, "counter", (reason,))


def _active(id: int, row: Metric, old: str, new: str, *labels: str, mig: Metric | None = None) -> Alias:
    return Alias(id, row, old, RATIO, new, RATIO, "gauge", labels, "share", mig)


ALIASES = (
    Alias(100, m.GPU_SM_CLOCK, "DCGM_FI_DEV_SM_CLOCK", MEGAHERTZ, "DCGM_FI_DEV_SM_CLOCK_HERTZ", HERTZ),
    Alias(101, m.GPU_MEMORY_CLOCK, "DCGM_FI_DEV_MEM_CLOCK", MEGAHERTZ, "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", HERTZ),
    Alias(
        140, m.GPU_MEMORY_TEMPERATURE, "DCGM_FI_DEV_MEMORY_TEMP", CELSIUS, "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", CELSIUS
    ),
    Alias(150, m.GPU_TEMPERATURE, "DCGM_FI_DEV_GPU_TEMP", CELSIUS, "DCGM_FI_DEV_GPU_TEMP_CELSIUS", CELSIUS),
    Alias(155, m.GPU_POWER, "DCGM_FI_DEV_POWER_USAGE", WATTS, "DCGM_FI_DEV_BOARD_POWER_WATTS", WATTS),
    Alias(
        156,
        m.GPU_ENERGY,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        MILLIJOULES,
        "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",
        JOULES,
        "counter",
    ),
    Alias(
        164,
        m.GPU_POWER_LIMIT,
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
        WATTS,
        "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS",
        WATTS,
    ),
    _counted(202, m.GPU_PCIE_REPLAYS, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL"),
    Alias(203, m.GPU_UTILIZATION, "DCGM_FI_DEV_GPU_UTIL", PERCENT, "DCGM_FI_DEV_GPU_UTIL_RATIO", RATIO),
    Alias(204, m.GPU_COPY_UTILIZATION, "DCGM_FI_DEV_MEM_COPY_UTIL", PERCENT, "DCGM_FI_DEV_MEMORY_UTIL_RATIO", RATIO),
    Alias(206, m.GPU_ENCODER_UTILIZATION, "DCGM_FI_DEV_ENC_UTIL", PERCENT, "DCGM_FI_DEV_ENC_UTIL_RATIO", RATIO),
    Alias(207, m.GPU_DECODER_UTILIZATION, "DCGM_FI_DEV_DEC_UTIL", PERCENT, "DCGM_FI_DEV_DEC_UTIL_RATIO", RATIO),
    Alias(230, m.GPU_XID_LAST, "DCGM_FI_DEV_XID_ERRORS", COUNT, "DCGM_FI_DEV_XID_ERROR", COUNT, how="xid"),
    _throttled(240, "DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL", "sw_power_cap"),
    _throttled(241, "DCGM_FI_DEV_THERMAL_VIOLATION", "DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL", "thermal"),
    _throttled(
        242, "DCGM_FI_DEV_SYNC_BOOST_VIOLATION", "DCGM_FI_DEV_GPU_SYNC_BOOST_THROTTLE_SECONDS_TOTAL", "sync_boost"
    ),
    _throttled(243, "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION", "DCGM_FI_DEV_GPU_LIMIT_THROTTLE_SECONDS_TOTAL", "board_limit"),
    _throttled(
        244, "DCGM_FI_DEV_LOW_UTIL_VIOLATION", "DCGM_FI_DEV_GPU_LOW_UTIL_THROTTLE_SECONDS_TOTAL", "low_utilization"
    ),
    _throttled(
        245, "DCGM_FI_DEV_RELIABILITY_VIOLATION", "DCGM_FI_DEV_GPU_RELIABILITY_THROTTLE_SECONDS_TOTAL", "reliability"
    ),
    Alias(
        250,
        m.GPU_MEMORY_TOTAL,
        "DCGM_FI_DEV_FB_TOTAL",
        MEBIBYTES,
        "DCGM_FI_DEV_FB_CAPACITY_BYTES",
        BYTES,
        mig=m.GPU_MIG_MEMORY_TOTAL,
    ),
    Alias(
        251,
        m.GPU_MEMORY_TOTAL,
        "DCGM_FI_DEV_FB_FREE",
        MEBIBYTES,
        "DCGM_FI_DEV_FB_FREE_BYTES",
        BYTES,
        how="free",
        mig=m.GPU_MIG_MEMORY_TOTAL,
    ),
    Alias(
        252,
        m.GPU_MEMORY_USED,
        "DCGM_FI_DEV_FB_USED",
        MEBIBYTES,
        "DCGM_FI_DEV_FB_USED_BYTES",
        BYTES,
        mig=m.GPU_MIG_MEMORY_USED,
    ),
    Alias(253, m.GPU_MEMORY_RESERVED, "DCGM_FI_DEV_FB_RESERVED", MEBIBYTES, "DCGM_FI_DEV_FB_RESERVED_BYTES", BYTES),
    _same(310, m.GPU_ECC_ERRORS, "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", COUNT, "counter", labels=("corrected",)),
    _same(311, m.GPU_ECC_ERRORS, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", COUNT, "counter", labels=("uncorrected",)),
    _same(312, m.GPU_ECC_LIFETIME_ERRORS, "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", COUNT, "counter", labels=("corrected",)),
    _same(313, m.GPU_ECC_LIFETIME_ERRORS, "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", COUNT, "counter", labels=("uncorrected",)),
    _counted(390, m.GPU_RETIRED_PAGES, "DCGM_FI_DEV_RETIRED_SBE", "DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL", "corrected"),
    _counted(391, m.GPU_RETIRED_PAGES, "DCGM_FI_DEV_RETIRED_DBE", "DCGM_FI_DEV_PAGE_RETIRED_DBE_TOTAL", "uncorrected"),
    _counted(392, m.GPU_RETIRED_PAGES_PENDING, "DCGM_FI_DEV_RETIRED_PENDING", "DCGM_FI_DEV_PAGE_RETIRED_PENDING"),
    _counted(
        393,
        m.GPU_REMAPPED_ROWS,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL",
        "uncorrected",
    ),
    _counted(
        394,
        m.GPU_REMAPPED_ROWS,
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL",
        "corrected",
    ),
    Alias(395, m.GPU_ROW_REMAP_FAILURE, "DCGM_FI_DEV_ROW_REMAP_FAILURE", COUNT, "DCGM_FI_DEV_ROW_REMAP_FAILED", COUNT),
    _same(396, m.GPU_ROW_REMAP_PENDING, "DCGM_FI_DEV_ROW_REMAP_PENDING", COUNT),
    _counted(
        429,
        m.NVLINK_ERRORS,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL",
        "replay",
    ),
    _counted(
        439,
        m.NVLINK_ERRORS,
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_TOTAL",
        "recovery",
    ),
    Alias(
        449,
        m.NVLINK_TRANSMIT,
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        MEGABYTES_PER_SECOND,
        "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND",
        BYTES_PER_SECOND,
        how="rate",
        also=m.NVLINK_RECEIVE,
    ),
    _active(1001, m.GPU_GRAPHICS_ACTIVE, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
    _active(1002, m.GPU_SM_ACTIVE, "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", mig=m.GPU_MIG_SM_ACTIVE),
    _active(1003, m.GPU_SM_OCCUPANCY, "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"),
    _active(
        1004,
        m.GPU_TENSOR_ACTIVE,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
        mig=m.GPU_MIG_TENSOR_ACTIVE,
    ),
    _active(
        1005, m.GPU_DRAM_ACTIVE, "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO", mig=m.GPU_MIG_DRAM_ACTIVE
    ),
    _active(1006, m.GPU_PIPE_ACTIVE, "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_FP64_UTIL_RATIO", "fp64"),
    _active(1007, m.GPU_PIPE_ACTIVE, "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_FP32_UTIL_RATIO", "fp32"),
    _active(1008, m.GPU_PIPE_ACTIVE, "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "DCGM_FI_PROF_FP16_UTIL_RATIO", "fp16"),
    _same(1009, m.GPU_PCIE_TRANSMIT, "DCGM_FI_PROF_PCIE_TX_BYTES", BYTES_PER_SECOND, how="rate"),
    _same(1010, m.GPU_PCIE_RECEIVE, "DCGM_FI_PROF_PCIE_RX_BYTES", BYTES_PER_SECOND, how="rate"),
    _same(1011, m.NVLINK_TRANSMIT_RAW, "DCGM_FI_PROF_NVLINK_TX_BYTES", BYTES_PER_SECOND, how="rate"),
    _same(1012, m.NVLINK_RECEIVE_RAW, "DCGM_FI_PROF_NVLINK_RX_BYTES", BYTES_PER_SECOND, how="rate"),
)

Key = tuple[str, tuple[str, ...]]  # name of the row, label values


def _rows(*hows: str) -> Iterator[Metric]:
    for alias in ALIASES:
        if alias.how in hows:
            yield from (row for row in (alias.row, alias.mig, alias.also) if row is not None)


_COUNTED = {m.GPU_PROFILED_SECONDS.name, m.GPU_MIG_PROFILED_SECONDS.name, *map(str, _rows("share", "rate"))}
_READ = _COUNTED | set(map(str, _rows("value", "free", "xid"))) | {m.GPU_MIG_MEMORY_USED.name}


class Window:
    """Counters as they were at the last scrapes, whoever's: the means of all scrapers are the same."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, dict[Key, float]]] = deque()

    def advance(self, now: float, counters: dict[Key, float]) -> None:
        """Take the counters as they are now."""
        self._readings.append((now, counters))
        while len(self._readings) > 1 and self._readings[1][0] <= now - SHORTEST_WINDOW:
            self._readings.popleft()
        if now - self._readings[0][0] > LONGEST_WINDOW:
            self._readings.popleft()

    def rise(self, key: Key) -> float | None:
        """Return by how much a counter rose; None if it was not there then, or started again."""
        first, last = self._readings[0][1].get(key), self._readings[-1][1].get(key)
        return None if first is None or last is None or last < first else last - first

    def rate(self, key: Key) -> float | None:
        """Return the mean rise per second."""
        seconds, rise = self._readings[-1][0] - self._readings[0][0], self.rise(key)
        return None if rise is None or seconds < 1 else rise / seconds

    def share(self, key: Key, whole: Key) -> float | None:
        """Return the mean of an activity over the profiled time."""
        rise, seconds = self.rise(key), self.rise(whole)
        return None if rise is None or not seconds else rise / seconds


@dataclass
class Part:
    """A GPU or an instance of it: how its rows are labelled, its own labels here, and its owners' labels."""

    gpu: tuple[str, str]
    instance: tuple[str, ...]
    labels: dict[str, str]
    driver: str
    host: str
    owners: list[dict[str, str]] = field(default_factory=list)
    written: dict[tuple[str, ...], str] = field(default_factory=dict)

    def pairs(self, generations: tuple[str, ...]) -> str:
        """Return the labels that all its series have in these generations, as they are written."""
        if generations not in self.written:
            labels = dict(self.labels)
            for generation in generations:
                labels |= dict.fromkeys(_HOST[generation], self.host)
            for generation in generations:
                labels[_DRIVER[generation]] = self.driver
            self.written[generations] = _pairs(labels)
        return self.written[generations]


class Compatibility:
    """Writes samples as dcgm-exporter of the chosen generation would: dcgm-4.8, dcgm-4.9, or dcgm for both."""

    def __init__(self, generation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._generations = GENERATIONS[generation]
        self._clock = clock
        self._window = Window()
        self._values: dict[Key, float] = {}

    def render(self, samples: Sequence[Sample], *, openmetrics: bool = False) -> str:
        """Return the families as lines of either format, without `# EOF`."""
        self._values = {(row.name, labels): number * row.scale for row, labels, number in samples if row.name in _READ}
        self._window.advance(self._clock(), {key: value for key, value in self._values.items() if key[0] in _COUNTED})
        parts = list(_parts(samples))
        xids = _last_xids(samples)
        lines: list[str] = []
        for alias in ALIASES:
            numbers = [(part, number) for part in parts if (number := self._number(alias, part, xids)) is not None]
            for name, unit, generations in self._names(alias):
                if numbers:
                    # In OpenMetrics the samples of a counter end in _total, and these do not.
                    type = "unknown" if openmetrics and alias.type == "counter" else alias.type
                    lines += [f"# HELP {name} From {alias.row}, in {unit.name}.", f"# TYPE {name} {type}"]
                for part, number in numbers:
                    lines += _lines(name, generations, part, unit.of(number), _about(alias, part, xids))
        return "\n".join([*lines, ""])

    def _names(self, alias: Alias) -> Iterator[tuple[str, Unit, tuple[str, ...]]]:
        """Yield the names of a field, its unit and the generations that have it by this name."""
        if alias.old == alias.new:
            yield alias.old, alias.unit, self._generations
            return
        if "4.8" in self._generations:
            yield alias.old, alias.unit, ("4.8",)
        if "4.9" in self._generations:
            yield alias.new, alias.new_unit, ("4.9",)

    def _number(self, alias: Alias, part: Part, xids: dict[str, tuple[str, str]]) -> float | None:
        """Return what a part has of a field, in our base unit."""
        labels: tuple[str, ...] = (*part.gpu, *alias.labels)
        key: Key = alias.row.name, labels
        whole: Key = m.GPU_PROFILED_SECONDS.name, part.gpu
        if part.instance and alias.how in ("share", "free") and alias.mig is None:
            return None
        if part.instance and alias.mig is not None:
            labels = (*part.gpu, *part.instance)
            key, whole = (alias.mig.name, labels), (m.GPU_MIG_PROFILED_SECONDS.name, labels)
        if alias.how == "share":
            return self._window.share(key, whole)
        if alias.how == "rate":
            rates = [self._window.rate((row.name, labels)) for row in (alias.row, alias.also) if row is not None]
            return None if None in rates else sum(rate for rate in rates if rate is not None)
        if alias.how == "xid":
            last = xids.get(part.gpu[1])
            return None if last is None else float(last[0])
        value = self._values.get(key)
        return value if alias.how != "free" or value is None else self._free(part, value)

    def _free(self, part: Part, total: float) -> float | None:
        if part.instance:
            used = self._values.get((m.GPU_MIG_MEMORY_USED.name, (*part.gpu, *part.instance)))
            return None if used is None else total - used
        used = self._values.get((m.GPU_MEMORY_USED.name, part.gpu))
        reserved = self._values.get((m.GPU_MEMORY_RESERVED.name, part.gpu), 0.0)
        return None if used is None else total - used - reserved


def _parts(samples: Sequence[Sample]) -> Iterator[Part]:
    """Yield every GPU, in its place its MIG instances if it has any, as dcgm-exporter does."""
    gpus = {labels[1]: dict(zip(row.labels, labels, strict=True)) for row, labels, _ in samples if row is m.GPU_INFO}
    instances: defaultdict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    owners: defaultdict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row, labels, _ in samples:
        if row is m.GPU_MIG_INFO:
            instance = dict(zip(row.labels, labels, strict=True))
            instances[labels[1]].setdefault(instance["gpu_instance"], instance)
        elif row is m.GPU_OWNER_INFO:
            owner = dict(zip(row.labels, labels, strict=True))
            names = {
                "container": owner["owner_container"],
                "hpc_job": owner["owner_job"],
                "namespace": owner["owner_namespace"],
                "pod": owner["owner_pod"],
            }
            if any(names.values()) and names not in owners[labels[1], owner["mig_uuid"]]:
                owners[labels[1], owner["mig_uuid"]].append(names)
    for uuid, gpu in gpus.items():
        labels_of_gpu = {
            "gpu": gpu["gpu"],
            "UUID": uuid,
            "pci_bus_id": gpu["pci_bus_id"],
            "device": f"nvidia{gpu['gpu']}",
            "modelName": gpu["model"],
        }
        key = gpu["gpu"], uuid
        if uuid not in instances:
            yield Part(key, (), labels_of_gpu, gpu["driver_version"], gpu["host"], owners[uuid, ""])
        for id, instance in instances[uuid].items() if uuid in instances else ():
            named = labels_of_gpu | {"GPU_I_PROFILE": instance["profile"], "GPU_I_ID": id}
            yield Part(key, (id,), named, gpu["driver_version"], gpu["host"], owners[uuid, instance["mig_uuid"]])


def _last_xids(samples: Sequence[Sample]) -> dict[str, tuple[str, str]]:
    """Return code and meaning of each GPU's last Xid by uuid; 0 for a GPU that had none and whose Xids are counted."""
    last: dict[str, tuple[float, str]] = {}
    names: dict[str, str] = {"0": "No Error"}
    for row, labels, number in samples:
        if row is m.GPU_XID:
            last.setdefault(labels[1], (0.0, "0"))
        elif row is m.GPU_XID_LAST:
            last[labels[1]] = max(last.get(labels[1], (0.0, "0")), (number, labels[2]))
        elif row is m.GPU_XID_INFO:
            names[labels[0]] = labels[1]
    return {uuid: (xid, names.get(xid, "Unknown Error")) for uuid, (_, xid) in last.items()}


def _about(alias: Alias, part: Part, xids: dict[str, tuple[str, str]]) -> dict[str, str]:
    if alias.how != "xid":
        return {}
    code, meaning = xids[part.gpu[1]]
    return {"err_code": code, "err_msg": meaning}


def _lines(name: str, generations: tuple[str, ...], part: Part, number: float, about: dict[str, str]) -> Iterator[str]:
    """Yield the sample lines of a part: one, or one for each of several owners."""
    pairs, value = part.pairs(generations), repr(number) if isfinite(number) else "NaN"
    for owner in part.owners or [{}]:
        attributes = about | {label: text for label, text in owner.items() if text}
        more = f",{_pairs(dict(sorted(attributes.items())))}" if attributes else ""
        yield f"{name}{{{pairs}{more}}} {value}"


def _pairs(labels: dict[str, str]) -> str:
    return ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
