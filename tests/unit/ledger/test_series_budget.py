"""Which runs of a ledger have series, and which are only in the API."""

from __future__ import annotations

from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.ledger import ledger as module
from flopwatch.ledger.ledger import Ledger
from tests.support.histories import samples


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(module, "MAX_RUNS_WITH_SERIES", 2)
    return Ledger()


def report(ledger: Ledger, run: str, now: float, **more: Any) -> None:
    record = {"t": now, "run": run, "event": "snapshot", "attempt": "a", "source": "n1", "step": 1, "gpus": 8}
    ledger.apply({**record, "activity_seconds": {"step": 1}, **more}, now)


def served(ledger: Ledger, now: float) -> set[str]:
    """Return the names of the runs with series."""
    found = samples(ledger, now)
    names = {labels[1] for row, labels, _ in found if row is m.RUN_ATTEMPTS_TOTAL}
    counts = {labels[0]: number for row, labels, number in found if row is m.FLOPWATCH_LEDGER_RUNS}
    hidden = len(ledger.runs) - len(ledger.retired) - len(names)
    assert counts == {"exported": len(names), "without_series": hidden}
    return names


def test_ended_runs_are_dropped_first_then_unknown_processes_then_the_longest_silent(ledger: Ledger) -> None:
    report(ledger, "ended", 1000, event="finish", status="completed", pid=True)
    report(ledger, "known", 500, pid=True)
    report(ledger, "silent", 600)
    assert served(ledger, 1000) == {"known", "silent"}
    report(ledger, "reports", 1000)
    assert served(ledger, 1000) == {"known", "reports"}
    report(ledger, "known-too", 1000, pid=True)
    assert served(ledger, 1000) == {"known", "known-too"}


def test_among_reporting_runs_those_with_series_keep_them(ledger: Ledger) -> None:
    for run in "ab":
        report(ledger, run, 1000)
    assert served(ledger, 1000) == {"a", "b"}
    for second in range(0, 50, 10):
        for run in "xyab"[second // 10 % 4 :]:
            report(ledger, run, 1001 + second)
        assert served(ledger, 1001 + second) == {"a", "b"}
    for run in "xy":
        report(ledger, run, 1200)
    assert served(ledger, 1200) == {"x", "y"}  # the others are silent


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_a_start_long_after_the_end_is_the_next_generation(status: str) -> None:
    """Its counters begin at 0, and the time between belongs to neither. The earlier run keeps its figures."""
    ledger = Ledger()
    report(ledger, "r", 1000, event="finish", status=status)
    ledger.retired.add(("", "r"))
    report(ledger, "r", 900_000, attempt="b", activity_seconds={"step": 5})
    runs = ledger.summary()["runs"]
    assert {name: (run["state"], run["wall_seconds"]) for name, run in runs.items()} == {
        "r#1": (status, 1),
        "r": ("running", 5),
    }
