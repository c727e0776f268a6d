"""Counters of what a run's processes did: they rise over restarts and moves, and never fall."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from flopwatch import catalogue as m
from flopwatch.ledger import state, views
from flopwatch.ledger.record import LedgerRecord, RecordError
from flopwatch.ledger.run import RunLedger

WORK = {"tokens": 100, "steps": 10, "step_seconds": 20, "model_flops": 4e15, "step_capacity_flops": 1e16}


def report(run: RunLedger, t: float, started: float, work: dict[str, float], source: str = "n1", **more: Any) -> None:
    """Apply a snapshot of a process that started at `started`, with its totals."""
    line = {"t": t, "run": "lm", "event": "snapshot", "attempt": "a1", "source": source, "step": 1, "started": started}
    line |= {"rank": int(source[1:]), "activity_seconds": {"step": t - started}, "work": work, **more}
    run.apply(LedgerRecord.parse(line))


def counted(run: RunLedger) -> dict[str, float]:
    """Return the totals that the run serves, by their names in a record."""
    samples = {row.name: value for row, _, value in views.families(run, 2000.0)}
    return {name: samples[f"run_{name}_total"] for name in WORK if f"run_{name}_total" in samples}


@pytest.fixture
def run() -> RunLedger:
    return RunLedger("", "lm", 60.0)


def times(factor: float) -> dict[str, float]:
    return {name: total * factor for name, total in WORK.items()}


def test_totals_of_all_hosts_and_of_processes_before_a_restart_are_added(run: RunLedger) -> None:
    report(run, 1015, 1000, times(1))
    report(run, 1016, 1000, times(2), "n2")
    assert counted(run) == times(3)
    report(run, 1030, 1000, times(2))
    assert counted(run) == times(4)
    report(run, 1230, 1200, times(0.5), attempt="a2")
    assert counted(run) == times(4.5)


def test_a_restarted_exporter_that_lacks_some_ranks_adds_nothing_twice(run: RunLedger) -> None:
    report(run, 1015, 1000, times(4))
    report(run, 1030, 1000, times(1))
    assert counted(run) == times(4)
    report(run, 1045, 1000, times(5))
    assert counted(run) == times(5)


@pytest.mark.parametrize("started", [1000, 1020], ids=["another rank", "the lowest rank"])
def test_work_counts_on_after_a_rank_was_replaced(run: RunLedger, started: float) -> None:
    report(run, 1015, 1000, times(80))
    for minute in range(1, 6):  # the other ranks had done 70
        report(run, 1015 + 60 * minute, started, times(70 + minute))
    assert counted(run)["tokens"] == pytest.approx(100 * (80 + 3))


def test_flops_are_absent_unless_every_host_reports_them(run: RunLedger) -> None:
    report(run, 1015, 1000, times(1))
    report(run, 1016, 1000, {"tokens": 50}, "n2")
    assert counted(run) == {"tokens": 150, "steps": 10, "step_seconds": 20}


def test_flops_stop_as_soon_as_a_rank_of_a_host_has_no_peak(run: RunLedger) -> None:
    report(run, 1015, 1000, times(1))
    report(run, 1030, 1000, {"tokens": 200, "steps": 20, "step_seconds": 40})
    assert counted(run) == {"tokens": 200, "steps": 20, "step_seconds": 40}
    report(run, 1045, 1000, times(3))
    assert counted(run) == times(3)


def test_work_of_before_an_upgrade_is_not_counted_at_once(run: RunLedger) -> None:
    for at in (1015, 1030):
        report(run, at, 1000, {})
    report(run, 1045, 1000, times(100))
    assert counted(run) == {}
    report(run, 1060, 1000, times(101))
    assert counted(run) == times(1)


def test_flops_of_the_other_ranks_are_not_counted_again_after_the_lowest_was_replaced(run: RunLedger) -> None:
    for t, started, flops in ((1100, 1000, 8000), (1145, 1130, 7700), (1200, 1130, 15700)):
        report(run, t, started, {}, step=(t - 1000) / 10, gpus=8, peak_flops=8e3, model_flops=flops)
        report(run, t + 1, 1000, {}, "n8", step=(t - 1000) / 10, gpus=8, peak_flops=8e3, model_flops=0)
    assert views.summary(run)["retained_flops"] == 16000


def test_totals_and_the_request_for_pages_outlast_a_restart_of_the_ledger(run: RunLedger) -> None:
    report(run, 1015, 1000, times(1), page=True)
    nodes = {key: one for table, key, one in state.changed_rows(run) if table == "sources"}
    saved = json.loads(msgspec.json.encode([state.to_json(run), nodes]))
    again = state.from_json(*saved)
    report(again, 1030, 1000, times(3))
    assert counted(again) == times(3)
    assert [value for row, _, value in views.families(again, 2000.0) if row is m.RUN_PAGE] == [1.0]


@pytest.mark.parametrize(
    ("work", "message"), [([], "work: Expected object"), ({"tokens": -1}, r"work\[...\]: Expected float >= 0.0")]
)
def test_a_malformed_total_is_refused(run: RunLedger, work: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        report(run, 1015, 1000, work)
