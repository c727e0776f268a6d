"""`flopwatch blast`: print what a leaf switch, host, port or GPU takes with it, and the GPUs that are spare."""

import argparse
import json
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from flopwatch.commands import Commands, command, flags
from flopwatch.commands.report import price

if TYPE_CHECKING:
    from flopwatch.report.blast import Blast, RunAtRisk

WIDTH, SHOWN = 80, 8  # characters of a line, and lines of a table


def run(options: argparse.Namespace) -> None:
    """Query Prometheus about an object and print its blast radius. Raises SettingsError."""
    from flopwatch.report.cluster import find
    from flopwatch.report.prometheus import PrometheusClient

    prometheus = PrometheusClient(options.prometheus, options.token_file)
    found = find(prometheus, options.name, options.kind, time.time() if options.at is None else options.at)
    print(json.dumps(as_json(found, options.price), indent=2) if options.json else page(found, options.price))


def as_json(blast: "Blast", price: float | None) -> dict[str, object]:
    """Return a blast radius as a JSON object. `price` is per GPU-hour."""
    unsaved = _total(one.unsaved_gpu_hours for one in blast.runs)
    return {
        **asdict(blast),
        "ports": [port._asdict() for port in blast.ports],
        "runs": [
            {**asdict(one), "unsaved_gpu_hours": one.unsaved_gpu_hours, "ranks": [rank._asdict() for rank in one.ranks]}
            for one in blast.runs
        ],
        "ranks": blast.ranks,
        "stopped_gpus": blast.stopped_gpus,
        "gpu_hours_per_hour": blast.stopped_gpus,
        "money_per_hour": _money(blast.stopped_gpus, price),
        "unsaved_gpu_hours": unsaved,
        "unsaved_money": _money(unsaved, price),
        "spare_gpus": blast.spare_gpus,
    }


def page(blast: "Blast", price: float | None) -> str:
    """Return a blast radius as text of at most 80 columns. `price` is per GPU-hour."""
    hosts, ports, gpus = len(blast.hosts), len(blast.ports), len(blast.gpus)
    parts = [_count(gpus, "GPU"), *([_count(ports, "port")] if ports else []), _count(hosts, "host")]
    lines = textwrap.wrap(f"{blast.kind} {blast.name}: {', '.join(parts)}", WIDTH)
    lines += ["", *_runs(blast, price)] if blast.runs else ["", "No run has a rank on it."]
    lines += ["", f"{_count(blast.spare_gpus, 'GPU')} spare, {_count(blast.ranks, 'GPU')} needed to replace these"]
    if blast.spare:
        lines.append(f"  {'rack':<24}{'leaf':<32}{'hosts':>8}{'GPUs':>12}")
    for place in blast.spare[:SHOWN]:
        rack, leaf = _fit(place.rack or "-", 22), _fit(place.leaf or "-", 30)
        lines.append(f"  {rack:<24}{leaf:<32}{place.hosts:>8,}{place.gpus:>12,}")
    if rest := blast.spare[SHOWN:]:
        more = f"and {len(rest)} more places"
        lines.append(f"  {more:<56}{sum(one.hosts for one in rest):>8,}{sum(one.gpus for one in rest):>12,}")
    for note in blast.notes:
        lines += ["", *textwrap.wrap(note, WIDTH)]
    return "\n".join(lines)


def _runs(blast: "Blast", price: float | None) -> list[str]:
    """Return the table of the runs that stop, with their total, and the ranks of each on the object."""
    from flopwatch.catalogue.ranks import ranks_text

    money = "" if price is None else f"{'cost/h':>12}"
    lines = [f"{'run that stops':<26}{'ranks on it':>12}{'GPU-hours/h':>13}{'GPU-h unsaved':>15}{money}"]
    shown = blast.runs[:SHOWN]
    lines += [_line(_fit(one.run, 25), [one], price) for one in shown]
    if rest := blast.runs[SHOWN:]:
        lines.append(_line(f"and {len(rest)} more runs", rest, price))
    if len(blast.runs) > 1:
        lines.append(_line("total", blast.runs, price))
    lines.append("")
    for one in shown:
        numbers = [int(rank.rank) for rank in one.ranks if rank.rank.isdecimal()]
        ranks = ranks_text(numbers) or f"{', '.join(map(str, numbers[:SHOWN]))}, ..."
        lines.append(_fit(f"ranks of {_fit(one.run, 25)}: {ranks}", WIDTH))
    return lines


def _line(name: str, runs: "list[RunAtRisk]", price: float | None) -> str:
    gpus, unsaved = sum(one.gpus for one in runs), _total(one.unsaved_gpu_hours for one in runs)
    lost = "unknown" if unsaved is None else f"{unsaved:,.0f}"
    money = "" if price is None else f"{gpus * price:>12,.0f}"
    return f"{name:<26}{sum(len(one.ranks) for one in runs):>12,}{gpus:>13,.0f}{lost:>15}{money}"


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum, None if a value is unknown."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _money(gpu_hours: float | None, price: float | None) -> float | None:
    return None if gpu_hours is None or price is None else gpu_hours * price


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    text = (
        "print which runs, ranks and GPUs a leaf switch, host, port or GPU takes with it, and the GPUs that are spare"
    )
    flags(command(commands, "blast", run, text), "blast", types={"price": price})
