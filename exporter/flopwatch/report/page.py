"""Report of a run as HTML, Markdown or JSON. The HTML page is self-contained, has no script, and escapes all names."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from flopwatch.report.model import GOOD, OPEN, Firing, ReportedLoss, RunReport


class Reference(NamedTuple):
    """Published range of MFU or goodput, from 0 to 1, with a name and the URL of its source."""

    low: float
    high: float
    name: str
    source: str


# Published MFU and goodput of large training runs, for comparison.
_COREWEAVE_MFU = (
    "https://coreweave.com/blog/coreweave-leads-the-charge-in-ai-infrastructure-efficiency-with-up-to-20-"
    "higher-gpu-cluster-performance-than-alternative-solutions"
)
_COREWEAVE_GOODPUT = "https://coreweave.com/blog/achieve-ai-infrastructure-goodput-of-up-to-96-with-3-key-strategies"

MFU = (
    Reference(0.35, 0.45, "typical of public runs", _COREWEAVE_MFU),
    Reference(0.51, 0.52, "best: CoreWeave, a 30B model on 1,024 Hopper GPUs", _COREWEAVE_MFU),
)
GOODPUT = (
    Reference(0.90, 0.90, "typical: Llama 3 405B reports more than 90 %", "https://arxiv.org/abs/2407.21783"),
    Reference(0.96, 0.98, "best: CoreWeave, goodput 96 %, ETTR 97-98 %", _COREWEAVE_GOODPUT),
)

# In the order of the waterfall, in colours that are safe for red-green colour blindness.
BUCKETS = {
    "productive": ("productive", "#1a8f6f"),
    "generation": ("generation", "#63c2a5"),
    "data_stall": ("waiting for data", "#e6b94b"),
    "compile": ("compiling", "#9d7bd0"),
    "startup": ("starting up", "#5aa9e6"),
    "checkpoint_restore": ("restoring checkpoints", "#2f6db5"),
    "checkpoint_save": ("saving checkpoints", "#1f4e8c"),
    "evaluation": ("evaluating", "#7f8fa6"),
    "other": ("other", "#b3bac5"),
    "lost": ("work repeated or discarded", "#e07b39"),
    "down": ("down", "#b5342c"),
    OPEN: ("not yet booked", "#d9dee5"),
}
MAX_ALERTS, MAX_LOSSES = 200, 50


def render(report: RunReport, form: str) -> str:
    """Return the report as an HTML page, as Markdown or as JSON: `form` is html, markdown or json."""
    if form == "json":
        return json.dumps(asdict(report), indent=2, allow_nan=False)
    html = form == "html"
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=html)
    environment.loader, environment.keep_trailing_newline = PackageLoader("flopwatch.report", ""), not html
    environment.filters |= {"moment": _moment, "hours": _hours, "md": _md, "lasted": _lasted, "cause": _cause}
    environment.filters["cost"] = lambda gpu_seconds: _cost(report, gpu_seconds)
    return environment.get_template(f"page.{form}.jinja").render(report=report, **_view(report))


def _view(report: RunReport) -> dict[str, Any]:
    losses = sorted(report.losses or [], key=lambda loss: -loss.gpu_seconds)
    places = (("Stragglers", "Rank", report.ranks), ("Hosts with alerts", "Host", report.hosts))
    view: dict[str, Any] = {"lead": _lead(report), "tiles": _tiles(report), "waterfall": _waterfall(report)}
    view |= {"losses": sorted(losses[:MAX_LOSSES], key=lambda loss: loss.began), "alerts": report.alerts[:MAX_ALERTS]}
    view |= {"more_losses": len(losses) - MAX_LOSSES, "more_alerts": len(report.alerts) - MAX_ALERTS}
    view |= {"lost": _lost(report), "checkpoints": _checkpoints(report)}
    view["worst"] = (*places, ("Worst links", "Port", report.links))
    return {**view, **_timeline(report)}


def _lead(report: RunReport) -> str:
    parts = [f"{report.state}, from {_moment(report.began)} to {_moment(report.ended)} UTC", _time(report.wall_seconds)]
    if report.gpus is not None:
        hosts = report.host_count
        where = "" if hosts is None else f" on {hosts:,} host{'s' * (hosts != 1)}"
        parts.append(f"{report.gpus:,.0f} GPUs{where}")
    parts.append(f"{report.attempts} attempt{'s' * (report.attempts != 1)}")
    if report.high_water_step is not None:
        parts.append(f"{report.high_water_step:,.0f} steps")
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in report.declared.items()]
    return ", ".join(parts) + (f"; tenant {report.tenant}" if report.tenant else "")


def _tiles(report: RunReport) -> list[dict[str, Any]]:
    mttf, mttr = report.mttf, report.mttr_seconds
    notes = [f"{mttf.count} unplanned end{'s' * (mttf.count != 1)}"]
    if mttf.low is not None:
        bounds = f": at least {_time(mttf.low)}"
        if mttf.high is not None:
            bounds = f" between {_time(mttf.low)} and {_time(mttf.high)}"
        notes.append(f"95 %{bounds}")
    recoveries = f"{report.recoveries} recover{'ies' if report.recoveries != 1 else 'y'}"
    return [
        _ratio("MFU", report.mfu, MFU, "mean of the live series; needs the recording rules"),
        _ratio("Goodput", report.goodput, GOODPUT, "needs steps with a position"),
        _ratio("ETTR", report.ettr, GOODPUT, "needs the time of submission"),
        _ratio("Effective MFU", report.effective_mfu, (), "needs FLOPs and a peak of every rank"),
        _tile("Mean time to failure", "no failure" if mttf.count == 0 else _time(mttf.seconds), notes),
        _tile("Mean time to recovery", _time(mttr), [recoveries]),
        _energy(report),
    ]


def _energy(report: RunReport) -> dict[str, Any]:
    """Return the tile of the energy of the run's GPUs."""
    energy = report.energy
    if energy is None:
        return _tile("Energy of the GPUs", "unknown", ["needs the energy of every rank's GPU and the recording rules"])
    means = (("step", energy.joules_per_step), ("token", energy.joules_per_token))
    notes = [f"{_number(joules)} J per {what}" for what, joules in means if joules is not None]
    share = min(1.0, energy.seconds / max(report.wall_seconds, 1e-9))
    notes.append(f"measured for {share:.0%} of the wall clock")
    return _tile("Energy of the GPUs", f"{_number(energy.joules / 3.6e6)} kWh", notes)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tile(title: str, value: str, notes: Iterable[str]) -> dict[str, Any]:
    rows = [{"text": text, "link": ""} for text in notes]
    return {"title": title, "value": value, "ratio": None, "marks": [], "notes": rows}


def _ratio(title: str, value: float | None, references: Iterable[Reference], needs: str) -> dict[str, Any]:
    """Return the tile of a ratio such as MFU with published values, or with the text `needs` if it is unknown."""
    marks = [
        {"x": f"{240 * one.low:.1f}", "width": f"{max(2.0, 240 * (one.high - one.low)):.1f}", "text": one.name}
        for one in references
    ]
    if value is None:
        return _tile(title, "unknown", [needs]) | {"marks": marks}
    notes = [{"text": f"{_range(one)} {one.name}", "link": one.source} for one in references]
    scale = f"{240 * min(1.0, max(0.0, value)):.1f}"
    return {"title": title, "value": f"{value:.1%}", "ratio": scale, "marks": marks, "notes": notes}


def _range(reference: Reference) -> str:
    low, high = f"{100 * reference.low:.0f}", f"{100 * reference.high:.0f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _waterfall(report: RunReport) -> list[dict[str, Any]]:
    rows, at, wall = [], 0.0, max(report.wall_seconds, 1e-9)
    for bucket, (title, color) in BUCKETS.items():
        seconds = report.open_seconds if bucket == OPEN else report.buckets.get(bucket, 0.0)
        if seconds <= 0:
            continue
        held = None if bucket == OPEN else report.gpu_seconds.get(bucket)
        hours, cost = ("", "") if held is None else (_hours(held), _cost(report, held))
        row = {"title": title, "color": color, "time": _time(seconds), "share": f"{seconds / wall:.1%}"}
        row |= {"x": f"{400 * at / wall:.2f}", "width": f"{max(0.5, 400 * seconds / wall):.2f}"}
        rows.append(row | {"gpu_hours": hours, "cost": cost})
        at += seconds
    return rows


def _lost(report: RunReport) -> str:
    lost = sum(seconds for bucket, seconds in report.gpu_seconds.items() if bucket not in GOOD)
    text = f"{_hours(lost)} GPU-hours made no progress"
    if report.price is not None:
        text += f", {_cost(report, lost)} at {report.price:,.2f} a GPU-hour"
    if report.provisional_seconds:
        text += f"; {_time(report.provisional_seconds)} of the productive time is not yet covered by a checkpoint"
    return text + "."


def _timeline(report: RunReport) -> dict[str, Any]:
    wall = max(report.wall_seconds, 1e-9)

    def x(time: float) -> float:
        return 1000 * min(1.0, max(0.0, (time - report.began) / wall))

    bars = []
    for part in report.timeline:
        y, total = 0.0, max(sum(part.seconds.values()), 1e-9)
        for bucket, (title, color) in BUCKETS.items():
            if (seconds := part.seconds.get(bucket, 0.0)) > 0:
                height, left = 105 * seconds / total, x(part.begin)
                text = f"{title}: {_time(seconds)} from {_moment(part.begin)}"
                area = {"x": f"{left:.2f}", "width": f"{max(0.3, x(part.end) - left):.2f}"}
                bars.append({**area, "y": f"{y:.2f}", "height": f"{height:.2f}", "color": color, "text": text})
                y += height
    marks = []
    for alert in report.alerts[:MAX_ALERTS]:
        text = f"{alert.name} {alert.place}, {_moment(alert.began)}"
        color = "#b5342c" if alert.severity == "critical" else "#e6b94b"
        marks.append({"x": f"{x(alert.began):.1f}", "text": text, "color": color})
    used = {bucket for part in report.timeline for bucket, seconds in part.seconds.items() if seconds}
    points = ((x(time), 105 * (1 - min(1.0, max(0.0, value)))) for time, value in report.mfu_over_time)
    key = [{"title": title, "color": color} for bucket, (title, color) in BUCKETS.items() if bucket in used]
    mfu_line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    times = ((x(report.began), report.began), (500, report.began + wall / 2), (x(report.ended), report.ended))
    ticks = [
        {"x": f"{across:.0f}", "anchor": anchor, "text": _moment(time)}
        for anchor, (across, time) in zip(("start", "middle", "end"), times, strict=True)
    ]
    return {"timeline": bars, "key": key, "mfu_line": mfu_line, "ticks": ticks, "alert_marks": marks}


def _checkpoints(report: RunReport) -> list[str]:
    saved = report.checkpoints
    if saved.commits == 0:
        return ["No durable checkpoint was reported."]
    lines = [
        f"{saved.commits} durable checkpoint{'s' * (saved.commits != 1)}"
        + (f", the last of step {saved.committed_step:,.0f}" if saved.committed_step is not None else "")
        + f"; each stopped training for {_time(saved.blocking_seconds)}."
    ]
    if saved.interval is None:
        lines.append("The best interval is unknown: there was no failure, or saving costs nothing.")
        return lines
    actual, best = saved.interval.actual, saved.interval.optimum
    extra = max(0.0, saved.interval.waste - saved.interval.least_waste)
    lines.append(
        f"One every {_time(actual)} of running time. At this rate of failures, one every {_time(best)} would be best: "
        f"saving, repeating work and restarting would take {saved.interval.least_waste:.1%} of the time instead of "
        f"{saved.interval.waste:.1%}."
    )
    if report.gpus and extra > 0:
        lost = extra * report.gpus * report.wall_seconds
        cost = f", {_cost(report, lost)}" if report.price is not None else ""
        lines.append(f"Over this run the difference is {_hours(lost)} GPU-hours{cost}.")
    return lines


def _time(seconds: float | None) -> str:
    """Return seconds as text, such as 42 s, 17.0 min, 3.1 h or 5.4 d."""
    if seconds is None:
        return "unknown"
    for least, size, unit in ((172_800, 86_400, "d"), (5400, 3600, "h"), (90, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:,.1f}" if hours >= 1 else f"{hours:.3f}"


def _cost(report: RunReport, gpu_seconds: float) -> str:
    """Return the price of GPU-seconds as text, empty if the report has no price."""
    return "" if report.price is None else f"{gpu_seconds / 3600 * report.price:,.2f}"


def _lasted(event: Firing | ReportedLoss) -> str:
    if isinstance(event, Firing):
        return "still firing" if event.ongoing else _time(event.ended - event.began)
    return "not over" if event.back is None else _time(event.back - event.began)


def _cause(loss: ReportedLoss) -> str:
    confidence = [loss.confidence] if loss.confidence != "none" else []
    return ", ".join([loss.cause.replace("_", " "), *confidence, *([] if loss.settled else ["so far"])])


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _md(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#+!|" else letter for letter in text.replace("\n", " "))
