"""`flopwatch ledger replay`: a recorded history, a JSON object a line, to the figures the live ledger would show.

Lines are taken in the order they stand in, as a ledger would have received them, unless some came late: then by their
stamps. A run that did not finish is accounted for up to its last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from flopwatch.ledger.accounting import BUCKETS, Ledger
from flopwatch.ledger.record import EVENTS, Record
from flopwatch.settings import SettingsError

_SKEW = 300.0  # seconds by which clocks of hosts may differ
_LATE = 5.0  # less is no matter, and stamps of several hosts do not tell


def replay(lines: Iterable[str], silent_after: float = 60.0) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of every run in a history, and a message for each line that cannot be read.

    A history with late lines is read twice, and the second time kept in memory.
    """
    lines = list(lines) if isinstance(lines, Iterator) else lines
    ledger, order, unreadable = Ledger(silent_after), _Order(), list[str]()
    for record in _records(lines, unreadable):
        order.take(record)
        if not order.late:
            ledger.apply(record)
    if order.late:
        ledger = Ledger(silent_after)
        for record in sorted(_records(lines, []), key=order.key):
            ledger.apply(record)
    return ledger.summary(), unreadable


def _records(lines: Iterable[str], unreadable: list[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            try:
                record = Record.parse(json.loads(text))
            except (ValueError, RecursionError) as error:  # the latter for JSON that is too deep
                unreadable.append(f"line {number}: {error}")
            else:
                yield record


class _Order:
    """Whether lines came late; arrival is better than stamps where the clocks of several hosts differ."""

    def __init__(self) -> None:
        self.late = False
        self._newest: dict[tuple[str, ...], float] = {}  # stamp of each run
        self._behind: dict[tuple[str, ...], float] = {}  # of a process: how far behind that its first stamp was
        self._told: dict[tuple[str, ...], tuple[float, float]] = {}  # of a process: the newest stamp, and its age then
        self._began: dict[tuple[str, ...], float] = {}  # the oldest stamp of each attempt

    def take(self, record: Record) -> None:
        """Look at the next line."""
        attempt = (*record.key, record.attempt)
        process, age = (*attempt, record.source), inf if record.event == "finish" else record.age
        t, older = self._told.get(process, (-inf, -inf))
        newest = max(record.t, self._newest.get(record.key, record.t))
        # A clock that is wrong stays as far behind; what comes late does not. An older process that tells of earlier
        # had its clock set back.
        drift = newest - record.t - self._behind.setdefault(process, newest - record.t)
        self.late = self.late or (record.t < t - _LATE and age <= older) or (record.t >= t and abs(drift) > _SKEW)
        self._told[process] = max((t, older), (record.t, age))
        self._newest[record.key] = newest
        self._began[attempt] = min(record.t, self._began.get(attempt, inf))

    def key(self, record: Record) -> tuple[float, float, int]:
        """Return what to sort late lines by."""
        # A file that is being written has had more lines the second time.
        began = self._began.get((*record.key, record.attempt), record.t)
        return record.t, began, EVENTS.index(record.event)


class _File:
    """The lines of a file, or of standard input, as often as they are asked for."""

    def __init__(self, path: Path) -> None:
        self._source: Path | int = sys.stdin.fileno() if path == Path("-") else path

    def __iter__(self) -> Iterator[str]:
        own = isinstance(self._source, Path)
        with open(self._source, encoding="utf-8-sig", errors="replace", closefd=own) as lines:
            yield from lines


def main(path: Path, json_output: bool = False) -> int:
    """Print the figures of a history; lines that cannot be read are named on stderr and left out, and make it 1."""
    try:
        lines = _File(path)
        summary, unreadable = replay(lines if path.is_file() else list(lines))  # of a pipe there is no second time
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
