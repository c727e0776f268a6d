"""Names, labels and units of dcgm-exporter for flopwatch's samples (`--expose dcgm`), from data/dcgm_names.csv.

Until 4.8.4: default-counters.csv and internal/pkg/rendermetrics of https://github.com/NVIDIA/dcgm-exporter (d5e5f51).
From 4.9: its release notes (https://newreleases.io/project/github/NVIDIA/dcgm-exporter/release/4.9.0), dcgm_fields.h
4.6.0 of https://github.com/NVIDIA/DCGM (72fa3fe), its 4.6.1 preview in https://github.com/NVIDIA/go-dcgm (b7fa315), and
the field reference for 4.7 (1613-1628, 1648). Everything else is as in 4.8. `Hostname` became `hostname` in 4.8.3.
"""

import csv
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.http.exposition import label_pairs

MIN_WINDOW, MAX_WINDOW = 10.0, 120.0  # seconds over which rates and ratios are means, the same for all scrapers

GENERATIONS = {"dcgm-4.8": ("4.8",), "dcgm-4.9": ("4.9",), "dcgm": ("4.8", "4.9")}

_HOST = {"4.8": ("Hostname", "hostname"), "4.9": ("hostname",)}
_DRIVER = {"4.8": "DCGM_FI_DRIVER_VERSION", "4.9": "DCGM_FI_SYSTEM_DRIVER_VERSION"}

UNITS: dict[str, Callable[[float], float]] = {  # unit of DCGM: from the base unit, rounded as in DCGM
    **dict.fromkeys(("C", "W", "J", "s", "ratio", "bytes per second"), float),
    **dict.fromkeys(("count", "Hz", "bytes"), round),
    "MHz": lambda hertz: round(hertz / 1e6),
    "mJ": lambda joules: round(joules * 1e3),
    "%": lambda ratio: round(ratio * 100),
    "MiB": lambda count: int(count) >> 20,
    "ns": lambda seconds: round(seconds * 1e9),
    "MB/s": lambda rate: round(rate / 1_024_000),  # DCGM divides KiB/s by 1000 (DcgmCacheManager.cpp)
}


@dataclass(frozen=True, slots=True)
class Alias:
    """DCGM field: its name and unit before 4.9 (`old`, `unit`) and from 4.9 (`new`, `new_unit`), and the row behind it.

    `labels` follow the GPU's labels in `row`. `how` is value (the sample itself), rate, share (of the profiled time),
    free (memory) or xid (the last Xid). `mig` is the row of MIG instances, `also` a row whose value is added.
    """

    id: int
    row: Metric
    old: str
    unit: str
    new: str
    new_unit: str
    type: str
    labels: tuple[str, ...]
    how: str
    mig: Metric | None
    also: Metric | None


def _aliases() -> Iterator[Alias]:
    with Path(flopwatch.__file__).with_name("data").joinpath("dcgm_names.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    for id, row, old, unit, new, new_unit, type, label, how, mig, also in rows:
        labels, more = (label,) if label else (), (m.BY_NAME.get(name) for name in (mig, also))
        yield Alias(int(id), m.BY_NAME[row], old, unit, new, new_unit, type, labels, how, *more)


ALIASES = tuple(_aliases())

Key = tuple[str, tuple[str, ...]]  # name of the row, label values


def _names(*hows: str) -> set[str]:
    rows = (row for alias in ALIASES if alias.how in hows for row in (alias.row, alias.mig, alias.also))
    return {row.name for row in rows if row is not None}


_COUNTED = {m.GPU_PROFILED_SECONDS_TOTAL.name, m.GPU_MIG_PROFILED_SECONDS_TOTAL.name, *_names("share", "rate")}
_READ = _COUNTED | _names("value", "free", "xid") | {m.GPU_MIG_MEMORY_USED_BYTES.name}


class Window:
    """Counters at the last scrapes of any scraper, so that all scrapers get the same means."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, dict[Key, float]]] = deque()

    def advance(self, now: float, counters: dict[Key, float]) -> None:
        """Add the present counters, and drop readings outside the window."""
        self._readings.append((now, counters))
        while len(self._readings) > 1 and self._readings[1][0] <= now - MIN_WINDOW:
            self._readings.popleft()
        if now - self._readings[0][0] > MAX_WINDOW:
            self._readings.popleft()

    def rise(self, key: Key) -> float | None:
        """Return the increase of a counter over the window, None if it is new or was reset."""
        first, last = self._readings[0][1].get(key), self._readings[-1][1].get(key)
        return None if first is None or last is None or last < first else last - first

    def rate(self, key: Key) -> float | None:
        """Return the mean increase of a counter per second, None if it is unknown."""
        seconds, rise = self._readings[-1][0] - self._readings[0][0], self.rise(key)
        return None if rise is None or seconds < 1 else rise / seconds

    def share(self, key: Key, whole: Key) -> float | None:
        """Return the share of the profiled time (`whole`) in which an activity was on, None if it is unknown."""
        rise, seconds = self.rise(key), self.rise(whole)
        return None if rise is None or not seconds else rise / seconds


@dataclass
class GpuPart:
    """GPU or MIG instance: its label values in flopwatch's rows, its labels in dcgm-exporter's format, its owners."""

    gpu: tuple[str, str]
    instance: tuple[str, ...]
    labels: dict[str, str]
    driver: str
    host: str
    owners: list[dict[str, str]] = field(default_factory=list)
    written: dict[tuple[str, ...], str] = field(default_factory=dict)

    def pairs(self, generations: tuple[str, ...]) -> str:
        """Return as text the labels that all series of this GPU or instance have in these versions of dcgm-exporter."""
        if generations not in self.written:
            labels = dict(self.labels)
            for generation in generations:
                labels |= dict.fromkeys(_HOST[generation], self.host)
            for generation in generations:
                labels[_DRIVER[generation]] = self.driver
            self.written[generations] = label_pairs(labels.items())
        return self.written[generations]


class Compatibility:
    """Renderer of samples under the names of dcgm-exporter (`generation`): dcgm-4.8, dcgm-4.9, or dcgm for both."""

    source = "compatibility"  # its label in the exporter's own metrics

    def __init__(self, generation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._generations = GENERATIONS[generation]
        self._clock = clock
        self._window = Window()
        self._values: dict[Key, float] = {}

    def own(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples that flopwatch's own families have: all."""
        return samples

    def render(self, samples: Sequence[Sample], *, openmetrics: bool = False) -> str:
        """Return the samples under dcgm-exporter's names, as Prometheus text or OpenMetrics, without `# EOF`."""
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
                    lines += [f"# HELP {name} From {alias.row}, in {unit}.", f"# TYPE {name} {type}"]
                for part, number in numbers:
                    about = zip(("err_code", "err_msg"), xids[part.gpu[1]], strict=True) if alias.how == "xid" else ()
                    lines += _lines(name, generations, part, UNITS[unit](number), dict(about))
        return "\n".join([*lines, ""])

    def _names(self, alias: Alias) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        if alias.old == alias.new:
            yield alias.old, alias.unit, self._generations
            return
        if "4.8" in self._generations:
            yield alias.old, alias.unit, ("4.8",)
        if "4.9" in self._generations:
            yield alias.new, alias.new_unit, ("4.9",)

    def _number(self, alias: Alias, part: GpuPart, xids: dict[str, tuple[str, str]]) -> float | None:
        labels: tuple[str, ...] = (*part.gpu, *alias.labels)
        key: Key = alias.row.name, labels
        whole: Key = m.GPU_PROFILED_SECONDS_TOTAL.name, part.gpu
        if part.instance and alias.how in ("share", "free") and alias.mig is None:
            return None
        if part.instance and alias.mig is not None:
            labels = (*part.gpu, *part.instance)
            key, whole = (alias.mig.name, labels), (m.GPU_MIG_PROFILED_SECONDS_TOTAL.name, labels)
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

    def _free(self, part: GpuPart, total: float) -> float | None:
        if part.instance:
            used = self._values.get((m.GPU_MIG_MEMORY_USED_BYTES.name, (*part.gpu, *part.instance)))
            return None if used is None else total - used
        used = self._values.get((m.GPU_MEMORY_USED_BYTES.name, part.gpu))
        reserved = self._values.get((m.GPU_MEMORY_RESERVED_BYTES.name, part.gpu), 0.0)
        return None if used is None else total - used - reserved


def _parts(samples: Sequence[Sample]) -> Iterator[GpuPart]:
    """Yield every GPU, or its MIG instances if it has any, as dcgm-exporter does."""
    gpus = {labels[1]: dict(zip(row.labels, labels, strict=True)) for row, labels, _ in samples if row is m.GPU_INFO}
    instances: defaultdict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    owners: defaultdict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row, labels, _ in samples:
        if row is m.GPU_MIG_INFO:
            instance = dict(zip(row.labels, labels, strict=True))
            instances[labels[1]].setdefault(instance["gpu_instance"], instance)
        elif row is m.GPU_OWNER_INFO:
            owner = dict(zip(row.labels, labels, strict=True))
            labels_of_owner = {"container": "container", "hpc_job": "job", "namespace": "namespace", "pod": "pod"}
            names = {label: owner[f"owner_{kind}"] for label, kind in labels_of_owner.items()}
            if any(names.values()) and names not in owners[labels[1], owner["mig_uuid"]]:
                owners[labels[1], owner["mig_uuid"]].append(names)
    for uuid, gpu in gpus.items():
        index = gpu["gpu"]
        key = index, uuid
        labels_of_gpu = {"gpu": index, "UUID": uuid, "pci_bus_id": gpu["pci_bus_id"]}
        labels_of_gpu |= {"device": f"nvidia{index}", "modelName": gpu["model"]}
        if uuid not in instances:
            yield GpuPart(key, (), labels_of_gpu, gpu["driver_version"], gpu["host"], owners[uuid, ""])
        for id, instance in instances[uuid].items() if uuid in instances else ():
            named = labels_of_gpu | {"GPU_I_PROFILE": instance["profile"], "GPU_I_ID": id}
            yield GpuPart(key, (id,), named, gpu["driver_version"], gpu["host"], owners[uuid, instance["mig_uuid"]])


def _last_xids(samples: Sequence[Sample]) -> dict[str, tuple[str, str]]:
    """Return code and meaning of each GPU's last Xid by UUID, code 0 for a watched GPU without Xids."""
    last: dict[str, tuple[float, str]] = {}
    names: dict[str, str] = {"0": "No Error"}
    for row, labels, number in samples:
        if row is m.GPU_XID_ERRORS_TOTAL:
            last.setdefault(labels[1], (0.0, "0"))
        elif row is m.GPU_XID_LAST_TIMESTAMP_SECONDS:
            last[labels[1]] = max(last.get(labels[1], (0.0, "0")), (number, labels[2]))
        elif row is m.GPU_XID_INFO:
            names[labels[0]] = labels[1]
    return {uuid: (xid, names.get(xid, "Unknown Error")) for uuid, (_, xid) in last.items()}


def _lines(
    name: str, generations: tuple[str, ...], part: GpuPart, number: float, about: dict[str, str]
) -> Iterator[str]:
    pairs, value = part.pairs(generations), repr(number) if isfinite(number) else "NaN"
    for owner in part.owners or [{}]:
        attributes = about | {label: text for label, text in owner.items() if text}
        more = f",{label_pairs(sorted(attributes.items()))}" if attributes else ""
        yield f"{name}{{{pairs}{more}}} {value}"
