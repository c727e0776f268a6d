"""NVML collector of `flopwatch doctor`, which keeps the nvmlReturn_t of each call, and the calls behind each row."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.capture.recorder import Recorder
from flopwatch.node.collectors import StateFile
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.collectors.nvml.fields import DOUBLE
from flopwatch.node.health.driver_lines import DOUBLES, GARBLED, UNWRITTEN

PROFILING = 1000  # DCGM measures fields from this id on itself, and gets the others from NVML


class _Recorder(Recorder):
    """Recorder that also keeps the ids of fields that the driver declares as DOUBLE, and of those without a value."""

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self.doubles: set[int] = set()
        self.unwritten: set[int] = set()

    def _note_fields(self, subject: str, values: Iterable[Any]) -> None:
        for value in values:
            if value.nvmlReturn == 0 and value.valueType == DOUBLE:
                empty = value.value.ullVal == 0 and value.timestamp == 0
                (self.unwritten if empty else self.doubles).add(value.fieldId)
        super()._note_fields(subject, values)


class RecordedNvml:
    """NVML collector that writes the nvmlReturn_t of its calls to the file `notes`."""

    name = "nvml"

    def __init__(self, collector: Nvml, notes: StateFile) -> None:
        self._library = collector._nvml
        self._recorder = collector._nvml = _Recorder(self._library)
        collector._cost.budget = math.inf  # one read has all tables, also of a slow driver
        self._collector, self._notes = collector, notes

    def read(self) -> list[Sample]:
        """Return the collector's samples, and save the return codes of NVML even if the read fails."""
        try:
            return self._collector.read()
        finally:
            names = {name for row in m.all_metrics() for name in asked(row).functions}
            self._notes.save(
                {
                    "lacks": sorted(name for name in names if not hasattr(self._library, name)),
                    DOUBLES: sorted(self._recorder.doubles),
                    UNWRITTEN: sorted(self._recorder.unwritten),
                    GARBLED: [index for index, card in self._collector._cards.items() if card.garbled],
                    **{part: _codes(sections) for part, sections in self._recorder.recorded().items()},
                }
            )


def _codes(sections: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, list[int]]:
    """Return the distinct nvmlReturn_t of each function, `field N` and `metric N` in a recording."""
    codes: dict[str, set[int]] = {}
    for section, prefix in (("calls", ""), ("fields", "field "), ("metrics", "metric ")):
        for question, answers in sections.get(section, {}).items():
            name = prefix + re.split(r"[( ]", question)[0]
            codes.setdefault(name, set()).update(
                int(answer["error"]) if isinstance(answer, dict) and "error" in answer else 0 for answer in answers
            )
    return {name: sorted(some) for name, some in codes.items()}


def build(factory: str, notes: str, **arguments: str) -> RecordedNvml:
    """Return the NVML collector that `factory` (`package.module:function`) creates, with its return codes recorded."""
    return RecordedNvml(resolve_name(factory)(**arguments), StateFile(Path(notes)))


@dataclass
class Asked:
    """NVML functions, fields and metrics that feed a row, whether DCGM feeds it too, and whether by own profiling."""

    functions: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    dcgm: bool = False
    profiling: bool = False


def asked(row: Metric) -> Asked:
    """Parse the NVML functions, fields and GPM metrics in the text of a row's source."""
    found = Asked(functions=re.findall(r"nvml(?:Device|Gpm)\w+", row.source))
    for clause in re.split(r";|, *(?=NVML|NVLink|DCGM|GPM|nvml)", row.source):
        if "DCGM" in clause:
            found.dcgm = True
            numbers = re.findall(r"\b[0-9]+\b", clause)
            found.profiling = found.profiling or any(int(number) >= PROFILING for number in numbers)
            continue
        kind = "metric" if "GPM" in clause else "field"
        if kind not in clause and "older drivers" not in clause:
            continue
        for first, last in re.findall(r"\b([0-9]+)(?:-([0-9]+))?\b", re.sub(r"(NVLink|scope) [0-9]+", "", clause)):
            found.questions += [f"{kind} {number}" for number in range(int(first), int(last or first) + 1)]
    return found
