"""Text and CSV tables for `flopwatch ledger list | show | export`. Names are made safe for terminal and spreadsheet."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.record import printable
from flopwatch.ledger.replay import summary_text

_MAX_SHOWN = 10  # of the last attempts and incidents


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a text table with one line per run, from the JSON objects that the ledger's API returns."""
    if not runs:
        return "no runs"
    lines = [["tenant", "run", "state", "attempts", "step", "goodput", "wall clock", "last report"]]
    for run in sorted(runs, key=lambda run: (run["tenant"], run["run"])):
        state = run["state"] + (", two at once" if run["conflict"] else "")
        line = [printable(run["tenant"]), printable(run["run"]), state, str(run["attempts"])]
        line += [_number(run["high_water_step"]), _number(run["goodput"], ".3f"), _duration(run["wall_seconds"])]
        lines.append([*line, f"{_duration(run['silent_seconds'])} ago"])
    if not any(run["tenant"] for run in runs):
        lines = [line[1:] for line in lines]
    return _columns(lines)


def run_table(record: Mapping[str, Any]) -> str:
    """Return a run's summary, buckets, and last ten attempts and incidents as text, from the API's JSON object."""
    name = f"{printable(record['tenant'])}/{record['run']}" if record["tenant"] else record["run"]
    summary = record["summary"]
    text = summary_text(printable(name), {**summary, "buckets": record["buckets"]})
    text += f"\n  started: {_time(record['start'])}\n  step: {_number(summary['high_water_step'])}"
    text += f"\n  last durable checkpoint: step {_number(summary['committed_step'])}"
    text += f", first reported {_time(summary['committed_timestamp'])}"
    if summary["recoveries"]:
        mean = summary["recovery_seconds"] / summary["recoveries"]
        text += f"\n  mean time to recovery: {_duration(mean)}, of {summary['recoveries']}"
    if summary["conflict"]:
        text += "\n  conflict: two attempts report under this name; the one that started later is accounted for"
    if record.get("straggler") is not None:
        text += f"\n  {_straggler(record['straggler'])}"
    parts = [text]
    if record["attempts"]:
        parts.append(_attempts_table(record))
    losses = []
    for one in record["incidents"][-_MAX_SHOWN:]:
        lost = f"{one['gpu_seconds'] / 3600:.2f} GPU-hours lost{'' if one['settled'] else ' so far'}"
        losses.append(f"attempt {one['attempt_number']} {_what(one)}: {_cause(one)}, {lost}; {printable(one['why'])}")
    if losses:
        parts.append("\n".join(losses))
    if stacks := stacks_text(record):
        parts.append(f"stacks of the last hang or straggler\n\n{stacks}".removesuffix("\n"))
    return "\n\n".join(parts)


def stacks_text(record: Mapping[str, Any]) -> str:
    """Return the stacks of a run's last hang or straggler, from the API's JSON object. Empty if no rank sent any."""
    kept = (record, *reversed(record["incidents"]))
    rows = next((one["stacks"] for one in kept if one.get("stacks")), ())
    lines = [line for rank, t, text in rows for line in (f"rank {rank}, {_time(t)}", printable(text, keep="\n"), "")]
    return "\n".join(lines)


def _straggler(verdict: Mapping[str, Any]) -> str:
    """Return in words which ranks are late, or why that is unknown."""
    if verdict["kind"] is None:
        return f"late ranks: unknown, {printable(verdict['why'])}"
    if verdict["kind"] == "none":
        return "late ranks: none"
    share = f"{verdict['share']:.1%} of each step"
    if not verdict["ranks"]:
        return f"late ranks: none; {verdict['kind']} takes {share}"
    shown = [
        f"rank {one['rank']} on {printable(one['host'])} ({one['group']} group, ranks {one['ranks']})"
        for one in verdict["ranks"][:_MAX_SHOWN]
    ]
    why = f"; {printable(verdict['why'])}" if verdict["why"] else ""
    return f"late ranks ({verdict['kind']}, {share}): {', '.join(shown)}{why}"


def _attempts_table(record: Mapping[str, Any]) -> str:
    causes = {one["attempt_number"]: one for one in record["incidents"] if one["kind"] == "end"}
    attempts = record["attempts"]
    lines = [["attempt", "begin", "lasted", "ended", "steps", "GPUs", "nodes", "down after", "cause"]]
    for one in attempts[-_MAX_SHOWN:]:
        over = one["end"] if one["end"] is not None else record["at"]
        steps = f"{_number(one['first_step'])} to {_number(one['last_step'])}"
        name = f"{one['number']} {printable(one['attempt'])[:40]}"
        line = [name, _time(one["begin"]), _duration(over - one["begin"])]
        line += [one["status"] or "-", steps, _number(one["gpus"]), str(one["nodes"]), _duration(one["down_seconds"])]
        lines.append([*line, _cause(causes.get(one["number"]))])
    before = len(attempts) + record["attempts_left_out"] - len(lines) + 1
    return _columns(lines) + (f"\n({before} earlier)" if before else "")


def attempts_csv(record: Mapping[str, Any]) -> str:
    """Return a run's attempts as CSV, one row each with seconds per bucket, GPU-seconds and incident."""
    buckets = [bucket for bucket in BUCKETS if bucket not in ("down", "queue")]
    facts = ["number", "attempt", "begin", "end", "status", "first_step", "last_step", "committed_step"]
    facts += ["gpus", "nodes"]
    after = ("down_seconds", "down_gpu_seconds", "recovery_seconds")
    blame = ("cause", "confidence", "host", "gpu", "port", "gpu_seconds")
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    header = ["tenant", "run", *facts, *(f"{bucket}_seconds" for bucket in buckets), "gpu_seconds", *after]
    header += [*(f"incident_{name}" for name in blame), "slow_gpu_seconds", "stall_gpu_seconds"]
    writer.writerow(header)
    for one in record["attempts"]:
        losses = [loss for loss in record["incidents"] if loss["attempt_number"] == one["number"]]
        incident: Mapping[str, Any] = next((loss for loss in reversed(losses) if loss["kind"] == "end"), {})
        row = [record["tenant"], record["run"], *(one[name] for name in facts)]
        row += [one["seconds"].get(bucket, 0.0) for bucket in buckets]
        row += [sum(one["gpu_seconds"].values()), *(one[name] for name in after)]
        row += [incident.get(name) for name in blame]
        row += [math.fsum(x["gpu_seconds"] for x in losses if x["kind"] == kind) for kind in ("slow", "stall")]
        writer.writerow(map(_cell, row))
    return output.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet runs as a formula: https://owasp.org/www-community/attacks/CSV_Injection."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _what(incident: Mapping[str, Any]) -> str:
    """Return what happened to an attempt, such as "failed" or "was slow for 5 min"."""
    if incident["kind"] == "end":
        return str(incident["status"])
    since = f"{_duration(incident['ended'] - incident['began'])} from {_time(incident['began'])} on"
    return f"was slow for {since}" if incident["kind"] == "slow" else f"stood still for {since}"


def _cause(incident: Mapping[str, Any] | None) -> str:
    if incident is None:
        return ""
    place = " ".join(incident[name] for name in ("host", "gpu", "port") if incident[name])
    sure = "" if incident["confidence"] in ("certain", "none") else f" ({incident['confidence']})"
    return printable(f"{incident['cause']}{sure}{f' on {place}' if place else ''}")


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _number(value: float | None, form: str = ".15g") -> str:
    return "-" if value is None else format(value, form)


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(value, timezone.utc):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{value:.0f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
