"""`flopwatch ledger replay`: what a live ledger would show for a file of records, one JSON object per line.

Lines are applied in file order, as a ledger would have received them. If a run has late lines, its lines are sorted by
their stamps. A run without an end is accounted for up to its last line.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import EVENTS, LedgerRecord, RecordError, RunKey
from flopwatch.settings import SettingsError

_MAX_SKEW = 300.0  # seconds, the largest accepted difference between the clocks of two hosts
_MAX_MESSAGES = 20  # unreadable lines that are named
_MAX_REPEAT_DELAY = 5.0  # seconds that the stamp of a repeated record may be lower


def replay(lines: Iterable[str], silent_after: float = 60.0) -> tuple[dict[str, Any], list[str]]:
    """Return the summary of every run in the lines, and a message for each line that is not a record."""
    lines = list(lines) if isinstance(lines, Iterator) else lines
    ledger, order, unreadable = Ledger(silent_after), _LateLines(), list[str]()
    for record in _records(lines, unreadable):
        order.take(record)
        ledger.apply(record)
    late, records = order.late(), list[LedgerRecord]()
    if late:
        ledger = Ledger(silent_after)
        for record in _records(lines, []):
            if record.key in late:
                records.append(record)
            else:
                ledger.apply(record)
        for record in sorted(records, key=order.key):
            ledger.apply(record)
    return ledger.summary(), unreadable


def _records(lines: Iterable[str], unreadable: list[str]) -> Iterator[LedgerRecord]:
    """Yield the record in each line, and add a message to `unreadable` for each line without a valid record."""
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            try:
                yield LedgerRecord.parse(text)
            except RecordError as error:
                unreadable.append(f"line {number}: {error}")


@dataclass(slots=True)
class _Process:
    """Lines of a file of records that are from one source in one attempt."""

    first: int  # number of the first line
    last: int  # number of the last line
    behind: float  # seconds from its first stamp to the newest one of the run at that time
    oldest: float  # oldest stamp
    t: float  # newest stamp
    age: float  # at the newest stamp; infinite once it has finished
    grown: float = 0.0  # its highest age
    seen: set[tuple[float, str]] = field(default_factory=set)  # stamp and event of each line


class _LateLines:
    """Detector of runs with late lines. Other runs keep the order of the file, since host clocks may differ."""

    def __init__(self) -> None:
        self._lines = 0
        self._late: set[RunKey] = set()
        self._newest: dict[RunKey, float] = {}  # newest stamp of each run
        self._clocks: dict[tuple[str, ...], float] = {}  # the newest stamp of a source in a run
        self._attempts: dict[tuple[str, ...], dict[str, _Process]] = {}

    def take(self, record: LedgerRecord) -> None:
        self._lines += 1
        key, clock = record.key, (*record.key, record.source)
        age = inf if record.event == "finish" else record.age
        newest = self._newest[key] = max(record.t, self._newest.get(key, record.t))
        processes = self._attempts.setdefault((*key, record.attempt), {})
        process = processes.setdefault(
            record.source, _Process(self._lines, self._lines, newest - record.t, record.t, -inf, -inf)
        )
        if (record.t, record.event) in process.seen:
            return
        # A process that grew older with a lower stamp had its clock set back. All its later stamps are as far behind.
        set_back = record.t < process.t and age > process.age
        news = age > process.grown if process.age < inf else inf > age > process.grown
        if (
            (record.t < self._clocks.get(clock, -inf) - (0 if news else _MAX_REPEAT_DELAY) and not set_back)
            or (record.t == process.t and process.age == inf and news)  # after the end of the process
            or (record.t >= process.t and abs(newest - record.t - process.behind) > _MAX_SKEW)
        ):
            self._late.add(key)
        self._clocks[clock] = record.t if set_back else max(record.t, self._clocks.get(clock, record.t))
        process.seen.add((record.t, record.event))
        process.last, process.oldest = self._lines, min(process.oldest, record.t)
        process.grown = max(process.grown, record.age)
        process.t, process.age = max((process.t, process.age), (record.t, age))

    def late(self) -> set[RunKey]:
        """Return the runs to sort: with late lines, or with simultaneous sources one after another in the file."""
        for (*key, _), processes in self._attempts.items():
            in_order = sorted(processes.values(), key=lambda process: process.first)
            if any(
                one.last < other.first and other.oldest < (one.oldest + one.t) / 2 for one, other in pairwise(in_order)
            ):
                self._late.add((key[0], key[1]))
        return self._late

    def key(self, record: LedgerRecord) -> tuple[float, float, int]:
        """Return the sort key of a record in a run with late lines."""
        # A file that is still being written may have more lines the second time.
        attempt = self._attempts.get((*record.key, record.attempt), {})
        began = min((process.oldest for process in attempt.values()), default=record.t)
        return record.t, began, EVENTS.index(record.event)


class _Lines:
    """Lines of a file, which can be iterated repeatedly, or of standard input if the path is `-`."""

    def __init__(self, path: Path) -> None:
        self._source: Path | int = sys.stdin.fileno() if path == Path("-") else path

    def __iter__(self) -> Iterator[str]:
        own = isinstance(self._source, Path)
        with open(self._source, encoding="utf-8-sig", errors="replace", closefd=own) as lines:
            yield from lines


def main(path: Path, json_output: bool = False) -> int:
    """Print the runs' summaries from a file of records. Return 1 if a line was unreadable. Raises SettingsError."""
    try:
        lines = _Lines(path)
        summary, unreadable = replay(lines if path.is_file() else list(lines))  # a pipe can be read only once
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    if len(unreadable) > _MAX_MESSAGES:
        unreadable[_MAX_MESSAGES:] = [f"{len(unreadable) - _MAX_MESSAGES} more lines that cannot be read"]
    if not summary["runs"]:
        unreadable.append("no run in this history: a run begins with an event submitted, start or snapshot")
    for message in unreadable:
        print(f"flopwatch: {path}: {message}", file=sys.stderr)
    if json_output:
        print(json.dumps(summary, indent=2))
    elif summary["runs"]:
        print("\n\n".join(summary_text(name, run) for name, run in summary["runs"].items()))
    return 1 if unreadable else 0


def summary_text(name: str, run: Mapping[str, Any]) -> str:
    """Return a run as text: its ratios, and the seconds and share of the wall clock of each bucket."""
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
