"""A report as a self-contained HTML page, as Markdown and as JSON.

The page has no script and fetches nothing. All names are escaped, since a run may have any name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flopwatch.report.model import OPEN, Firing, ReportedLoss, RunReport
from flopwatch.report.references import GOODPUT, MFU, Reference

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
    "lost": ("work done again or thrown away", "#e07b39"),
    "down": ("down", "#b5342c"),
    OPEN: ("not yet accounted for", "#d9dee5"),
}
MAX_ALERTS, MAX_LOSSES = 200, 50
# Texts in place of an empty section.
EMPTY = {
    "no_causes": "No loss is settled yet: each waits for evidence from ten minutes before it to five minutes after.",
    "no_ledger": "The ledger lists each loss with its host, GPU and port: add --ledger URL.",
    "no_losses": "No attempt ended before the run did.",
    "no_alerts": "No alert fired in the time that this Prometheus keeps.",
    "nothing_missed": "Nothing that it knows of.",
}
DEFINITIONS = (
    "MFU: FLOPs the model needs over the dense peak of the run's GPUs, while it makes steps; recomputation is never "
    "counted. Effective MFU: only FLOPs of steps that were kept, over the peak of the GPUs held and all wall clock.",
    "Goodput: time in steps that were kept, over the wall clock since the first process start. ETTR: the same, over "
    "the wall clock since submission. Work after the last durable checkpoint counts until it is lost.",
    "MTTF: time running over the unplanned ends, the time since the last one included, with the exact Poisson "
    "interval (95 %). MTTR: from the last sign of life to the first step that is new. The best checkpoint interval is "
    "Daly's (2006, equation 37), of which Young's is the first term; of an asynchronous save only what blocks counts.",
)


def as_json(report: RunReport) -> str:
    """Return the report as JSON."""
    return json.dumps(asdict(report), indent=2, allow_nan=False)


def as_html(report: RunReport) -> str:
    """Return the report as an HTML page."""
    return _render("page.html.jinja", report)


def as_markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    return _render("page.md.jinja", report)


def _render(name: str, report: RunReport) -> str:
    """Return the report rendered with a template of this package."""
    environment = Environment(
        loader=PackageLoader("flopwatch.report", ""),
        autoescape=name.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not name.endswith(".html.jinja"),
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "moment": _moment,
        "hours": _hours,
        "md": _md,
        "words": _words,
        "lasted": _lasted,
        "cause": _cause,
        "place": lambda loss: " ".join(text for text in (loss.host, loss.part) if text),
        "cost": lambda gpu_seconds: _cost(report, gpu_seconds),
    }
    return environment.get_template(name).render(report=report, **_view(report))


def _view(report: RunReport) -> dict[str, Any]:
    """Return the variables of the templates: texts, rows and coordinates."""
    losses = sorted(report.losses or [], key=lambda loss: -loss.gpu_seconds)
    alerts = report.alerts
    sections = (
        ("Latest ranks", "Rank", report.ranks),
        ("Hosts with alerts", "Host", report.hosts),
        ("Worst links", "Port", report.links),
    )
    return {
        "lead": _lead(report),
        "tiles": _tiles(report),
        "waterfall": _waterfall(report),
        "lost": _lost(report),
        **_timeline(report),
        "losses": sorted(losses[:MAX_LOSSES], key=lambda loss: loss.began),
        "more_losses": f"and {len(losses) - MAX_LOSSES} that cost less" if len(losses) > MAX_LOSSES else "",
        "alerts": alerts[:MAX_ALERTS],
        "more_alerts": f"and {len(alerts) - MAX_ALERTS} more" if len(alerts) > MAX_ALERTS else "",
        "worst": [
            {"title": title, "what": what, "outliers": outliers, "places": any(one.place for one in outliers)}
            for title, what, outliers in sections
            if outliers
        ],
        "checkpoints": _checkpoints(report),
        "definitions": DEFINITIONS,
        **EMPTY,
    }


def _lead(report: RunReport) -> str:
    """Return the summary line under the title."""
    parts = [f"{report.state}, from {_moment(report.began)} to {_moment(report.ended)} UTC", _time(report.wall_seconds)]
    if report.gpus is not None:
        parts.append(f"{report.gpus:,.0f} GPUs" + _on_hosts(report.host_count))
    parts.append(f"{report.attempts} attempt{'s' * (report.attempts != 1)}")
    if report.high_water_step is not None:
        parts.append(f"{report.high_water_step:,.0f} steps")
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in report.declared.items()]
    return ", ".join(parts) + (f"; tenant {report.tenant}" if report.tenant else "")


def _on_hosts(count: int | None) -> str:
    return "" if count is None else f" on {count:,} host{'s' * (count != 1)}"


def _tiles(report: RunReport) -> list[dict[str, Any]]:
    """Return the tiles with the main figures."""
    mttf = report.mttf
    failures = f"{mttf.count} unplanned end{'s' * (mttf.count != 1)}"
    interval = (
        ""
        if mttf.low is None
        else (
            f"95 % between {_time(mttf.low)} and {_time(mttf.high)}"
            if mttf.high is not None
            else f"95 %: at least {_time(mttf.low)}"
        )
    )
    return [
        _ratio("MFU", report.mfu, MFU, "mean of the live series; needs the recording rules"),
        _ratio("Goodput", report.goodput, GOODPUT, "needs steps with a position"),
        _ratio("ETTR", report.ettr, GOODPUT, "needs the time of submission"),
        _ratio("Effective MFU", report.effective_mfu, (), "needs FLOPs and a peak of every rank"),
        {
            "title": "Mean time to failure",
            "ratio": None,
            "marks": [],
            "value": "no failure" if mttf.count == 0 else _time(mttf.seconds),
            "notes": [{"text": text, "link": ""} for text in (failures, interval) if text],
        },
        {
            "title": "Mean time to recovery",
            "ratio": None,
            "marks": [],
            "value": "unknown" if report.mttr_seconds is None else _time(report.mttr_seconds),
            "notes": [{"text": f"{report.recoveries} recover{'ies' if report.recoveries != 1 else 'y'}", "link": ""}],
        },
    ]


def _ratio(title: str, value: float | None, references: Iterable[Reference], needs: str) -> dict[str, Any]:
    """Return the tile of a ratio with its references, or with what it `needs` if it is unknown."""
    known = value is not None
    return {
        "title": title,
        "value": f"{value:.1%}" if known else "unknown",
        "ratio": f"{240 * min(1.0, max(0.0, value)):.1f}" if value is not None else None,
        "marks": [
            {"x": f"{240 * one.low:.1f}", "width": f"{max(2.0, 240 * (one.high - one.low)):.1f}", "text": one.name}
            for one in references
        ],
        "notes": [{"text": f"{_range(one)} {one.name}", "link": one.source} for one in references]
        if known
        else [{"text": needs, "link": ""}],
    }


def _range(reference: Reference) -> str:
    low, high = f"{100 * reference.low:.0f}", f"{100 * reference.high:.0f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _waterfall(report: RunReport) -> list[dict[str, Any]]:
    """Return the bars of the waterfall, each starting where the one before ends."""
    rows, at, wall = [], 0.0, max(report.wall_seconds, 1e-9)
    for bucket, (title, color) in BUCKETS.items():
        seconds = report.open_seconds if bucket == OPEN else report.buckets.get(bucket, 0.0)
        if seconds <= 0:
            continue
        held = None if bucket == OPEN else report.gpu_seconds.get(bucket)
        rows.append(
            {
                "title": title,
                "color": color,
                "x": f"{400 * at / wall:.2f}",
                "width": f"{max(0.5, 400 * seconds / wall):.2f}",
                "time": _time(seconds),
                "share": f"{seconds / wall:.1%}",
                "gpu_hours": "" if held is None else _hours(held),
                "cost": "" if held is None else _cost(report, held),
            }
        )
        at += seconds
    return rows


def _lost(report: RunReport) -> str:
    """Return the sentence about GPU-hours without progress."""
    lost = report.lost_gpu_seconds()
    text = f"{_hours(lost)} GPU-hours made no progress"
    if report.price is not None:
        text += f", {_cost(report, lost)} at {report.price:,.2f} a GPU-hour"
    if report.provisional_seconds:
        text += f"; {_time(report.provisional_seconds)} of the productive time is not yet covered by a checkpoint"
    return text + "."


def _timeline(report: RunReport) -> dict[str, Any]:
    """Return bars, legend, MFU line, ticks and alert marks of the timeline."""
    wall = max(report.wall_seconds, 1e-9)

    def x(time: float) -> float:
        return 1000 * min(1.0, max(0.0, (time - report.began) / wall))

    bars = []
    for part in report.timeline:
        y, total = 0.0, max(sum(part.seconds.values()), 1e-9)
        for bucket, (title, color) in BUCKETS.items():
            if (seconds := part.seconds.get(bucket, 0.0)) > 0:
                height = 105 * seconds / total
                bars.append(
                    {
                        "x": f"{x(part.begin):.2f}",
                        "width": f"{max(0.3, x(part.end) - x(part.begin)):.2f}",
                        "y": f"{y:.2f}",
                        "height": f"{height:.2f}",
                        "color": color,
                        "text": f"{title}: {_time(seconds)} from {_moment(part.begin)}",
                    }
                )
                y += height
    first, last = x(report.began), x(report.ended)
    marks = [
        {
            "x": f"{x(alert.began):.1f}",
            "text": f"{alert.name} {alert.place}, {_moment(alert.began)}",
            "color": "#b5342c" if alert.severity == "critical" else "#e6b94b",
        }
        for alert in report.alerts[:MAX_ALERTS]
    ]
    middle = report.began + wall / 2
    return {
        "timeline": bars,
        "key": [
            {"title": title, "color": color}
            for bucket, (title, color) in BUCKETS.items()
            if any(part.seconds.get(bucket) for part in report.timeline)
        ],
        "mfu_line": " ".join(
            f"{x(time):.1f},{105 * (1 - min(1.0, max(0.0, value))):.1f}" for time, value in report.mfu_over_time
        ),
        "ticks": [
            {"x": f"{first:.0f}", "anchor": "start", "text": _moment(report.began)},
            {"x": "500", "anchor": "middle", "text": _moment(middle)},
            {"x": f"{last:.0f}", "anchor": "end", "text": _moment(report.ended)},
        ],
        "alert_marks": marks,
    }


def _checkpoints(report: RunReport) -> list[str]:
    """Return sentences about the checkpoint interval."""
    saved = report.checkpoints
    if saved.commits == 0:
        return ["No durable checkpoint was seen."]
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
        f"One every {_time(actual)} of running; at this rate of failures one every {_time(best)} would be "
        f"best. Saving, doing work again and restarting then take {saved.interval.least_waste:.1%} of the "
        f"time in place of {saved.interval.waste:.1%}."
    )
    if report.gpus and extra > 0:
        lost = extra * report.gpus * report.wall_seconds
        lines.append(
            f"Over this run the difference is {_hours(lost)} GPU-hours"
            + (f", {_cost(report, lost)}" if report.price is not None else "")
            + "."
        )
    return lines


def _time(seconds: float | None) -> str:
    """Return seconds as text, such as 42 s, 17.0 min, 3.1 h or 5.4 d."""
    if seconds is None:
        return "unknown"
    for size, unit in ((172_800, "d"), (5400, "h"), (90, "min")):
        if seconds >= size:
            return f"{seconds / {'d': 86_400, 'h': 3600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:,.1f}" if hours >= 1 else f"{hours:.3f}"


def _cost(report: RunReport, gpu_seconds: float) -> str:
    return "" if report.price is None else f"{gpu_seconds / 3600 * report.price:,.2f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _lasted(event: Firing | ReportedLoss) -> str:
    """Return how long an alert or a loss lasted."""
    if isinstance(event, Firing):
        return "still firing" if event.ongoing else _time(event.ended - event.began)
    return "not over" if event.back is None else _time(event.back - event.began)


def _cause(loss: ReportedLoss) -> str:
    """Return the cause of a loss with its confidence."""
    confidence = [loss.confidence] if loss.confidence != "none" else []
    return ", ".join([_words(loss.cause), *confidence, *([] if loss.settled else ["so far"])])


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _md(text: str) -> str:
    """Return a text with the special characters of Markdown escaped."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#+!|" else letter for letter in text.replace("\n", " "))
