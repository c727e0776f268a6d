"""Sections `fields` and `batch`: NVML's field values, one by one and in one call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from bench.card.machine import Gpu, Machine
from bench.card.report import Report, shortened
from flopwatch.node.collectors.nvml import fields
from flopwatch.node.collectors.nvml.card import GONE, OVER
from flopwatch.node.collectors.nvml.fields import ALL_LINKS, DOUBLE, VALUE_MEMBERS, Key

ENERGY, MEMORY_TEMPERATURE = (83, 0), (82, 0)
PCIE_BYTES: list[Key] = [(197, 0), (198, 0)]
C2C = (fields.C2C_STATE, fields.C2C_SPEED, *fields.C2C_ERRORS)
ENERGY_SHARE = 0.01
MEMORY_CELSIUS = (1, 120)
UNAVAILABLE_CELSIUS = next(entry.highest for entry in fields.FAST if entry.key == MEMORY_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class Answer:
    """NVML's answer to one field: return code, declared type, raw bits, time and latency in microseconds."""

    code: int
    type: int = DOUBLE
    bits: int = 0
    timestamp: int = 0
    latency: int = 0
    number: float | None = None

    @property
    def unwritten(self) -> bool:
        """Return whether the driver reported success and left the entry as it was."""
        return self.code == 0 and self.type == DOUBLE and self.bits == 0 and self.timestamp == 0

    def __str__(self) -> str:
        if self.code != 0:
            return f"error {self.code}"
        name = VALUE_MEMBERS[self.type] if self.type < len(VALUE_MEMBERS) else f"type {self.type}"
        return f"{name} 0x{self.bits:x}"


def tables(machine: Machine, gpu: Gpu) -> dict[str, list[Key]]:
    """Return the fields of each table that the exporter reads, those of NVLink-C2C, and the PCIe byte counters."""
    links = range(_count(machine, gpu, fields.LINK_COUNT))
    c2c_links = range(max(1, _count(machine, gpu, fields.C2C_COUNT)))  # one also for the answer of a GPU without any
    return {
        "often": [entry.key for entry in fields.FAST],
        "often_links": [entry.key for entry in fields.FAST_LINKS],
        "seldom": [entry.key for entry in fields.SLOW],
        "links": [(field, link) for field in fields.PER_LINK for link in links],
        "links_added_up": [(field, ALL_LINKS) for field in fields.ADDED_UP],
        "old_links": [entry.key for entry in (*fields.OLD_LINKS, fields.OLD_LINK_SPEED)],
        "c2c": [fields.C2C_COUNT, *((field, link) for field in C2C for link in c2c_links)],
        "pcie_bytes": PCIE_BYTES,
    }


def _count(machine: Machine, gpu: Gpu, key: Key) -> int:
    """Return how many links of a kind a GPU has."""
    return int(ask(machine, gpu, [key])[key].number or 0)


def ask(machine: Machine, gpu: Gpu, keys: list[Key]) -> dict[Key, Answer]:
    """Request fields in one call. If the call fails, request them one by one. Raises NVMLError if the GPU is lost."""
    nvml = machine.recorder
    try:
        values: list[Any] = list(nvml.nvmlDeviceGetFieldValues(gpu.handle, keys))
    except machine.library.NVMLError as error:
        if error.value in (*GONE, *OVER):
            raise
        if len(keys) == 1:
            return {keys[0]: Answer(error.value)}
        return {key: answer for one in keys for key, answer in ask(machine, gpu, [one]).items()}
    return {key: parsed(value) for key, value in zip(keys, values, strict=True)}


def parsed(value: Any) -> Answer:
    """Return an nvmlFieldValue_t as an Answer."""
    number = fields.number(fields.ENTRY.unpack(value)) if value.nvmlReturn == 0 else None
    return Answer(value.nvmlReturn, value.valueType, value.value.ullVal, value.timestamp, value.latencyUsec, number)


def section(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Report the types, the raw bits and the latency of each field, and compare numbers with other calls."""
    answers: dict[Key, Answer] = {}
    latency: dict[str, int] = {}
    for table, keys in tables(machine, gpu).items():
        found = ask(machine, gpu, keys) if keys else {}
        latency[table] = sum(answer.latency for answer in found.values())
        answers |= found
        report.facts[table] = [
            [*key, answer.code, answer.type, answer.bits, answer.latency, answer.timestamp]
            for key, answer in found.items()
        ]
    good = {key: answer for key, answer in answers.items() if answer.code == 0 and not answer.unwritten}
    kinds = Counter(str(answer).split(" 0x")[0] for answer in good.values())
    doubles = [f"{field}/{scope}={answer}" for (field, scope), answer in good.items() if answer.type == DOUBLE]
    measured = shortened(doubles) if doubles else ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    report.check("types", not doubles if good else None, measured or "no field has a value", "no integer typed DOUBLE")
    if unwritten := sorted({key[0] for key, answer in answers.items() if answer.unwritten}):
        report.info("unwritten", f"success without a value: {shortened(unwritten)}")
    codes = Counter(answer.code for answer in answers.values() if answer.code != 0)
    report.info("refused", ", ".join(f"error {code}: {count}" for code, count in sorted(codes.items())) or "no field")
    report.info("latency", ", ".join(f"{table} {sum_} us" for table, sum_ in latency.items()))
    _energy(machine, gpu, report)
    celsius = answers[MEMORY_TEMPERATURE].number
    if celsius is None or celsius > UNAVAILABLE_CELSIUS:
        report.info("memory_temperature", answers[MEMORY_TEMPERATURE])
    else:
        report.within("memory_temperature", celsius, *MEMORY_CELSIUS, " C")


def _energy(machine: Machine, gpu: Gpu, report: Report) -> None:
    """Compare the energy field with the call of the same meaning."""
    field = ask(machine, gpu, [ENERGY])[ENERGY].number
    try:
        called = float(machine.recorder.nvmlDeviceGetTotalEnergyConsumption(gpu.handle))
    except machine.library.NVMLError as error:
        report.info("energy", f"field {field}, call: {error}")
        return
    report.near("energy", field, called, ENERGY_SHARE, " mJ")


def batch(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Compare the return codes of fields in one call with those of each field alone."""
    for table, keys in tables(machine, gpu).items():
        if table not in ("often", "often_links", "seldom"):
            continue
        alone = {key: ask(machine, gpu, [key])[key].code for key in keys}
        try:
            values = machine.recorder.nvmlDeviceGetFieldValues(gpu.handle, keys)
            together = {key: value.nvmlReturn for key, value in zip(keys, values, strict=True)}
        except machine.library.NVMLError as error:
            together = dict.fromkeys(keys, error.value)
        report.facts[table] = [[*key, together[key], alone[key]] for key in keys]
        differ = [f"{key[0]}: {together[key]} not {alone[key]}" for key in keys if together[key] != alone[key]]
        measured = shortened(differ, 6) if differ else f"{len(keys)} fields"
        report.check(table, not differ, measured, "the same return code in one call and alone")
