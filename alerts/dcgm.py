"""Recording rules that make flopwatch's GPU series from those of a dcgm-exporter, before and after 4.9.

They are optional, because a cluster with flopwatch's exporter needs none of them. Fields, names and units are those of
data/dcgm_names.csv, which `--expose dcgm` also reads. dcgm_fields.csv has further fields, which dcgm-exporter serves if
its list of metrics names them: dcgm_fields.h of https://github.com/NVIDIA/go-dcgm, before (b15be07) and after (b7fa315)
DCGM renamed its fields.

`gpu_info{source="dcgm"}` is recorded first, for each GPU that no exporter of flopwatch serves. All other rules are
limited to these GPUs. A recorded series has no label `job`, so `{job=""}` selects what a rule itself recorded before.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

from alerts.fragments import FRAGMENTS
from alerts.settings import AlertSettings
from alerts.template import fill
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.catalogue.xid import xids
from flopwatch.node.collectors.nvml.fields import CLOCK_EVENTS, FABRIC_FAULTS
from flopwatch.node.scrape.compat import ALIASES
from flopwatch.node.scrape.levels import CORE

# From a unit of DCGM to the base unit.
UNITS: Mapping[str, str] = {
    **dict.fromkeys(("C", "W", "J", "s", "ratio", "count", "Hz", "bytes", "bytes per second"), ""),
    "MHz": " * 1e6",
    "mJ": " / 1e3",
    "%": " / 100",
    "MiB": " * 1048576",
    "ns": " / 1e9",
    "MB/s": " * 1024000",
}
GPUS = 'gpu_info{source="dcgm"}'
OURS = 'last_over_time(gpu_info{source!="dcgm"}[<5m>])'
PARTS = {"gpu": "instance, gpu, uuid", "mig": "instance, gpu, uuid, gpu_instance", "link": "instance, gpu, uuid, link"}
WHOLE, INSTANCE = '{GPU_I_ID=""}', '{GPU_I_ID!=""}'
XIDS = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
REASONS = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
FABRIC, FABRIC_MASK = "DCGM_FI_DEV_FABRIC_MANAGER_STATUS", "DCGM_FI_DEV_FABRIC_HEALTH_MASK"
LINK_STATES = ("DCGM_FI_DEV_NVLINK_GET_STATE", "DCGM_FI_DEV_NVLINK_LINK_STATUS")
READ = frozenset(json.loads(CORE.read_text(encoding="utf-8")))  # by shipped rules, boards or reports
EVERY: Mapping[str, float] = {"rest": 4}  # scrape intervals between two evaluations of a group, if not 1
COUNTED_REASONS = (
    "sw_power_cap",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)


@dataclass(frozen=True, slots=True)
class DcgmField:
    """Field of DCGM: name and unit before 4.9 and from 4.9, the row of the catalogue that it makes, and how."""

    row: Metric
    names: tuple[tuple[str, str], ...]
    label: str
    how: str
    mig: Metric | None = None

    def values(self, matchers: str = "") -> str:
        """Return an expression for the field in the base unit, of either generation."""
        return " or ".join(f"{name}{matchers}{UNITS[unit]}" for name, unit in self.names)


@dataclass(frozen=True, slots=True)
class DcgmRecord:
    """One rule: the series, the labels that it adds, and the names of dcgm-exporter that it reads."""

    group: str
    row: Metric
    expr: str
    fields: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    estimate: bool = False  # a counter that the rule makes from a gauge

    def rule(self, settings: AlertSettings) -> dict[str, object]:
        """Return the rule as an entry of a rule file."""
        labels = {"labels": dict(self.labels)} if self.labels else {}
        return {"record": self.row.name, "expr": fill(self.expr, settings, FRAGMENTS), **labels}


def _fields() -> Iterator[DcgmField]:
    """Yield all fields. Where two make the same series, the first has priority."""
    with Path(__file__).with_name("dcgm_fields.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    for _, row, old, unit, new, new_unit, label in rows:
        yield DcgmField(m.BY_NAME[row], _names(old, unit, new, new_unit), label, "value")
    for alias in ALIASES:
        names = _names(alias.old, alias.unit, alias.new, alias.new_unit)
        yield DcgmField(alias.row, names, "".join(alias.labels), alias.how, alias.mig)


def _names(old: str, unit: str, new: str, new_unit: str) -> tuple[tuple[str, str], ...]:
    return ((old, unit),) if old == new else ((old, unit), (new, new_unit))


FIELDS = tuple(_fields())


def _labelled(values: str, **sources: str) -> str:
    """Return `values` with labels of flopwatch, taken from labels of dcgm-exporter. Of several, the last one wins."""
    for target, names in sources.items():
        for name in names.split():
            values = f'label_replace({values}, "{target}", "$1", "{name}", "(.+)")'
    return values


def _per(part: str, values: str, uuid: str = "UUID") -> str:
    """Return `values` with the labels of a part (PARTS) only, for GPUs that no exporter of flopwatch serves."""
    sources = {"uuid": uuid}
    if part == "mig":
        sources["gpu_instance"] = "GPU_I_ID"
    elif part == "link":
        sources = {"uuid": "gpu_uuid", "link": "nvlink"}
    return f"max by ({PARTS[part]}) (\n  {_labelled(values, **sources)}\n)\n  and on (instance, uuid)\n{GPUS}"


def _first(alternatives: Iterable[str], part: str = "gpu") -> str:
    """Return the first of several expressions that has a part."""
    return f"\n  or on ({PARTS[part]})\n".join(alternatives)


def _sum(row: Metric, rate: str, part: str = "gpu", labels: str = "", start: str = "") -> str:
    """Return a counter that adds up `rate` over the time between evaluations. It begins where `start` has a series.

    A mean of dcgm-exporter so counts until the next one, as flopwatch's own exporter counts the means of DCGM.
    """
    on, own = PARTS[part], f'{row}{{job=""{labels}}}'
    counted = f"{own}\n  + on ({on})\n(time() - timestamp({own}))\n  * on ({on})\n(\n{indent(rate, '  ')}\n)"
    return _first([counted, f"0 * (\n{indent(start or rate, '  ')}\n)"], part)


def _identity() -> Iterator[DcgmRecord]:
    temperature, clock, utilization = (
        next(one for one in FIELDS if one.row is row)
        for row in (m.GPU_TEMPERATURE_CELSIUS, m.GPU_SM_CLOCK_HERTZ, m.GPU_UTILIZATION_RATIO)
    )
    fields = tuple(name for one in (temperature, clock, utilization) for name, _ in one.names)
    known = " or on (instance, gpu) ".join(fields)
    named = _labelled(
        f"({known})",
        uuid="UUID",
        host="Hostname hostname",
        model="modelName",
        driver_version="DCGM_FI_DRIVER_VERSION DCGM_FI_SYSTEM_DRIVER_VERSION",
    )
    by = "instance, gpu, uuid, host, model, pci_bus_id, driver_version"
    yield DcgmRecord(
        "gpus", m.GPU_INFO, f"group by ({by}) (\n  {named}\n)\n  unless on (uuid)\n{OURS}", fields, {"source": "dcgm"}
    )
    # 0 as long as other GPUs of the same dcgm-exporter have series.
    lost = f'gpu_present{{job=""}}\n    and on (instance)\n  {GPUS}\n    unless on (uuid)\n  {OURS}'
    yield DcgmRecord(
        "gpus",
        m.GPU_PRESENT,
        f"group by (instance, gpu, uuid) ({GPUS})\n  or on (instance, uuid)\n0 * (\n  {lost}\n)",
        fields,
    )
    # Without `honor_labels`, the pod of the GPU is in `exported_pod`, and `pod` is that of dcgm-exporter.
    owned = " or ".join(f'{name}{{{label}!=""}}' for name in fields for label in ("exported_pod", "hpc_job"))
    owner = _labelled(
        f"({owned})",
        uuid="UUID",
        host="Hostname hostname",
        owner_namespace="exported_namespace",
        owner_pod="exported_pod",
        owner_container="exported_container",
        owner_job="hpc_job",
    )
    by = "instance, gpu, uuid, host, owner_namespace, owner_pod, owner_container, owner_job"
    yield DcgmRecord(
        "gpus",
        m.GPU_OWNER_INFO,
        f"group by ({by}) (\n  {owner}\n)\n  and on (instance, uuid)\n{GPUS}",
        fields,
        {"source": "dcgm"},
    )
    yield DcgmRecord(
        "gpus",
        m.GPU_OWNER_INFO,
        f'group by (instance, gpu, uuid, host) ({GPUS})\n  unless on (instance, uuid)\ngpu_owner_info{{source="dcgm"}}',
        fields,
        {"source": "unknown"},
    )


_GROUPS = {  # by the first part of a name that fits
    "gpu_clock": "throttling",
    "gpu_ecc": "memory",
    "gpu_mig": "mig",
    "gpu_memory_": "memory",
    "gpu_pcie": "links",
    "gpu_c2c": "links",
    "gpu_sram": "memory",
    "gpu_re": "memory",
    "gpu_row": "memory",
    "gpu_bar1": "memory",
    "nvlink": "nvlink",
    "gpu_fabric": "links",
    "gpu_power": "power",
    "gpu_temperature": "power",
    "gpu_energy": "power",
}


def _group(row: Metric) -> str:
    if row.name not in READ:
        return "rest"
    return next((group for prefix, group in _GROUPS.items() if row.name.startswith(prefix)), "clocks")


def _values() -> Iterator[DcgmRecord]:
    """Yield the rules of fields that have a value of flopwatch in another unit."""
    merged: dict[tuple[str, str], list[DcgmField]] = {}
    for one in FIELDS:
        if one.how == "value" and one.row is not m.GPU_MEMORY_TOTAL_BYTES:
            merged.setdefault((one.row.name, one.label), []).append(one)
    for (name, label), fields in merged.items():
        row, (first, *_) = m.BY_NAME[name], fields
        exprs = [_per("gpu", one.values(WHOLE if one.mig else "")) for one in fields]
        read = tuple(source for one in fields for source, _ in one.names)
        if row is m.GPU_CLOCK_EVENT_SECONDS_TOTAL and label in COUNTED_REASONS:
            exprs.append(_throttled(label))
            read = (*read, REASONS)
        yield DcgmRecord(_group(row), row, _first(exprs), read, {row.labels[-1]: label} if label else {})
        if first.mig:
            read = tuple(source for source, _ in first.names)
            yield DcgmRecord("mig", first.mig, _per("mig", first.values(INSTANCE)), read)


def _bit(reason: str) -> str:
    (bit,) = (bit for bit, name in CLOCK_EVENTS.items() if name == reason)
    return _per("gpu", f"floor({REASONS} / {bit}) % 2")


def _throttled(reason: str) -> str:
    """Return the time for which a bit was set. Like flopwatch's counter, it begins when it is first set."""
    bit = _bit(reason)
    return _sum(m.GPU_CLOCK_EVENT_SECONDS_TOTAL, bit, labels=f',reason="{reason}"', start=f"({bit}) == 1")


def _memory() -> Iterator[DcgmRecord]:
    """Yield the rules of the size of memory: a field that is not on by default, or the sum of its parts."""
    total = next(one for one in FIELDS if one.row is m.GPU_MEMORY_TOTAL_BYTES and one.how == "value")
    free = next(one for one in FIELDS if one.how == "free")
    used, reserved = (
        next(one for one in FIELDS if one.row is row) for row in (m.GPU_MEMORY_USED_BYTES, m.GPU_MEMORY_RESERVED_BYTES)
    )
    fields = tuple(name for one in (total, free, used, reserved) for name, _ in one.names)
    parts = [zip(*(one.names for one in (free, used, reserved)), strict=True), (WHOLE, INSTANCE)]
    whole, of_instance = [], []
    for (left, unit), (taken, _), (kept, _) in parts[0]:
        with_reserve = f"({left}{WHOLE} + {taken}{WHOLE} + ({kept}{WHOLE} or 0 * {left}{WHOLE})){UNITS[unit]}"
        whole.append(with_reserve)
        of_instance.append(f"({left}{INSTANCE} + {taken}{INSTANCE}){UNITS[unit]}")
    row, mig = m.GPU_MEMORY_TOTAL_BYTES, m.GPU_MIG_MEMORY_TOTAL_BYTES
    expr = _first([_per("gpu", total.values(WHOLE)), _per("gpu", " or ".join(whole))])
    yield DcgmRecord("memory", row, expr, fields)
    expr = _first([_per("mig", total.values(INSTANCE)), _per("mig", " or ".join(of_instance))], "mig")
    yield DcgmRecord("mig", mig, expr, fields)


def _activity() -> Iterator[DcgmRecord]:
    """Yield counters of the time or the bytes behind the means of dcgm-exporter's profiling fields."""
    shares = [one for one in FIELDS if one.how == "share"]
    fields = tuple(name for one in shares for name, _ in one.names)
    any_share = " or on (instance, gpu) ".join(f"{name}{WHOLE}" for name in fields)
    profiled = f"{_per('gpu', f'({any_share}) * 0 + 1')}"
    yield DcgmRecord(
        "activity", m.GPU_PROFILED_SECONDS_TOTAL, _sum(m.GPU_PROFILED_SECONDS_TOTAL, profiled), fields, estimate=True
    )
    of_instance = [one for one in shares if one.mig]
    fields = tuple(name for one in of_instance for name, _ in one.names)
    any_share = " or on (instance, gpu, GPU_I_ID) ".join(f"{name}{INSTANCE}" for name in fields)
    row = m.GPU_MIG_PROFILED_SECONDS_TOTAL
    yield DcgmRecord("mig", row, _sum(row, _per("mig", f"({any_share}) * 0 + 1"), "mig"), fields, estimate=True)
    for one in FIELDS:
        if one.how not in ("share", "rate") or one.row is m.NVLINK_TRANSMIT_BYTES_TOTAL:
            continue
        read = tuple(name for name, _ in one.names)
        labels = {one.row.labels[-1]: one.label} if one.label else {}
        matcher = "".join(f',{name}="{value}"' for name, value in labels.items())
        expr = _sum(one.row, _per("gpu", one.values(WHOLE)), labels=matcher)
        yield DcgmRecord("activity", one.row, expr, read, labels, estimate=True)
        if one.mig:
            expr = _sum(one.mig, _per("mig", one.values(INSTANCE)), "mig")
            yield DcgmRecord("mig", one.mig, expr, read, estimate=True)


def _states() -> Iterator[DcgmRecord]:
    """Yield the rules of masks and states."""
    for reason in CLOCK_EVENTS.values():
        expr = f"({_bit(reason)}) == 1"
        yield DcgmRecord("throttling", m.GPU_CLOCK_EVENT_ACTIVE, expr, (REASONS,), {"reason": reason})
    # 4 is a registration that completed with the error of gpu_fabric_status_id, 5 and 6 are unknown.
    expr = _per("gpu", f"clamp_max({FABRIC} < 5, 3)")
    yield DcgmRecord("links", m.GPU_FABRIC_STATE_ID, expr, (FABRIC,))
    for shift, (fault, faulty) in FABRIC_FAULTS.items():
        expr = f"0 * ({_per('gpu', f'floor({FABRIC_MASK} / {1 << shift}) % 4 == {faulty}')}) + 1"
        yield DcgmRecord("links", m.GPU_FABRIC_FAULT, expr, (FABRIC_MASK,), {"fault": fault})
    yield from _links()


def _links() -> Iterator[DcgmRecord]:
    """Yield the rules of the states of NVLinks. A GPU has many links, so labels are replaced after a selection."""
    now, before = (" or ".join(f"{name}{when}" for name in LINK_STATES) for when in ("", " offset <1m>"))
    own = f'{m.NVLINK_LINK_STATE_ID}{{job=""}}'
    # A link that was up a minute ago, or that was recorded before.
    down = f"({now}) != 1 != 2 and on (instance, gpu_uuid, nvlink) ({before}) > 0 < 3"
    known = f"({now}) and on (instance, gpu, nvlink) {_labelled(own, nvlink='link')}"
    expr = _first([_per("link", down), _per("link", known)], "link")
    yield DcgmRecord("nvlink", m.NVLINK_LINK_STATE_ID, expr, LINK_STATES)
    for name, state in (("inactive", 0), ("active", 1), ("sleep", 2), ("disabled", 3)):
        by = "instance, gpu, gpu_uuid"
        count = f"count by ({by}) (({now}) == {state})"
        if name in ("active", "inactive"):
            count = f"{count} or on ({by}) 0 * count by ({by}) ({now})"
        yield DcgmRecord("nvlink", m.NVLINK_LINKS, _per("gpu", count, "gpu_uuid"), LINK_STATES, {"state": name})


def _xids() -> Iterator[DcgmRecord]:
    """Yield the rules of the last Xid. dcgm-exporter reports its code, and the rules when the code changed."""
    by, on = "instance, gpu, uuid", "instance, gpu, uuid, xid"

    def codes(of: str) -> str:
        known = " or ".join(of % name for name in XIDS)
        return f'count_values by ({by}) ("xid",\n  {_labelled(f"({known})", uuid="UUID")} > 0\n)'

    own = f'{m.GPU_XID_LAST_TIMESTAMP_SECONDS}{{job=""}}'
    new = (
        f"0 * {codes('%s')} + time()\n  and on (instance, uuid)\n{GPUS} offset <1m>\n"
        f"  unless on ({on})\n{codes('last_over_time(%s[<5m>] offset <1m>)')}"
    )
    # The code is new for a minute. During that time, its first sample is kept.
    kept = f"{own} > time() - <75_seconds>"
    known = f"{own}\n  and on (instance)\n{GPUS}"
    expr = f"\n  or on ({on})\n".join((f"({kept})", f"(\n{indent(new, '  ')}\n)", f"(\n{indent(known, '  ')}\n)"))
    yield DcgmRecord("xids", m.GPU_XID_LAST_TIMESTAMP_SECONDS, expr, XIDS, estimate=True)
    counted = f'{m.GPU_XID_ERRORS_TOTAL}{{job=""}}\n  + on ({on})\n({own} == bool time())'
    expr = f"{counted}\n  or on ({on})\n0 * {own} + 1"
    yield DcgmRecord("xids", m.GPU_XID_ERRORS_TOTAL, expr, XIDS, estimate=True)
    for severity in ("critical", "fatal"):
        chosen = "|".join(str(code) for code, meaning in xids().items() if meaning.severity == severity)
        selector = f'{m.GPU_XID_LAST_TIMESTAMP_SECONDS}{{job="",xid=~"{chosen}"}}'
        expr = f"group by (instance, xid) ({selector})"
        yield DcgmRecord("xids", m.GPU_XID_INFO, expr, XIDS, {"severity": severity})


RECORDS = tuple(record for made in (_identity, _values, _memory, _activity, _states, _xids) for record in made())
GROUPS = tuple(dict.fromkeys(record.group for record in RECORDS))


def dcgm_rules(settings: AlertSettings) -> dict[str, object]:
    """Return the rules in groups, as a rule file or the spec of a PrometheusRule."""
    return {
        "groups": [
            {
                "name": f"flopwatch-dcgm-{group}",
                "interval": settings.at_pace(EVERY.get(group, 1) * settings.scrape_interval),
                "rules": [record.rule(settings) for record in RECORDS if record.group == group],
            }
            for group in GROUPS
        ]
    }
