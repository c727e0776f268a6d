"""`flopwatch ledger replay`: a recorded history, a JSON object a line, to the figures the live ledger would show.

Lines are taken in the order they stand in, as a ledger would have received them. A run that did not finish is
accounted for up to its last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flopwatch.ledger.accounting import BUCKETS, Ledger
from flopwatch.ledger.record import RecordError
from flopwatch.settings import SettingsError


def replay(lines: Iterable[str], silent_after: float = 60.0) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of every run in a history, and a message for each line that cannot be read."""
    ledger, unreadable = Ledger(silent_after), []
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            try:
                ledger.apply(json.loads(text))
            except (json.JSONDecodeError, RecordError) as error:
                unreadable.append(f"line {number}: {error}")
    return ledger.summary(), unreadable


def main(path: Path, json_output: bool = False) -> int:
    """Print the figures of a history; lines that cannot be read are named on stderr and left out, and make it 1."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            summary, unreadable = replay(lines)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    for message in unreadable:
        print(f"flopwatch: {path}: {message}", file=sys.stderr)
    print(json.dumps(summary, indent=2) if json_output else _table(summary["runs"]))
    return 1 if unreadable or not summary["runs"] else 0


def _table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a block per run, for people: its ratios, and buckets with their share of the wall clock."""
    return "\n\n".join(block(name, run) for name, run in runs.items()) if runs else "no run in this history"


def block(name: str, run: Mapping[str, Any]) -> str:
    """Return the figures of one run for people."""
    wall = run["wall_seconds"]
    ratios = "  ".join(
        f"{title} {'unknown' if run[key] is None else format(run[key], '.3f')}"
        for title, key in (("goodput", "goodput"), ("ETTR", "ettr"), ("effective MFU", "effective_mfu"))
    )
    rows = [(bucket, run["buckets"][bucket]) for bucket in BUCKETS if run["buckets"][bucket] > 0]
    if run["open_seconds"] > 0:
        rows.append(("open", run["open_seconds"]))
    lines = [f"{name}: {run['state']}, {run['attempts']} attempts, wall {wall:.1f} s", f"  {ratios}"]
    for bucket, seconds in rows:
        share = f"{seconds / wall:8.1%}" if bucket != "queue" and wall > 0 else ""
        lines.append(f"  {bucket:<20}{seconds:14.1f} s{share}")
    return "\n".join(lines)
