"""Waits of ranks and of their process groups in the record of a node."""

from __future__ import annotations

from array import array

from flopwatch import catalogue as m
from flopwatch.ledger.record import LedgerRecord
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.otlp_by_hand import START, counter, gauge, request, training


def test_a_node_reports_the_waits_of_its_ranks_once_all_are_measured() -> None:
    telemetry = Telemetry(ExporterSettings(host="node-7"), Registry(), now=lambda: START + 60)

    def push(rank: int, wait: float | None) -> None:
        pushed = training(40, 5.0, START + 60, rank=rank, start_unix=START + 1)
        metrics = pushed.scope_metrics[0].metrics
        metrics.append(gauge("training_rank_info", 1, START + 60, rank=str(rank), pp=str(rank)))
        if wait is not None:
            for name, value in (
                ("training_measured_steps_total", 10.0),
                ("training_measured_step_seconds_total", 20.0),
                ("training_collective_wait_seconds_total", wait),
            ):
                metrics.append(counter(name, value, START + 60, rank=str(rank)))
        assert telemetry.receive(request(pushed)) == (0, "")

    push(0, 7.5)
    push(1, None)
    [(_, [record])] = telemetry.due().values()
    assert "waits" not in record
    push(1, 2.5)
    [(_, [record])] = telemetry.due().values()
    assert "computing_squares" not in record  # an older hook does not count them
    assert [wait[:2] + wait[3:6] for wait in record["waits"]] == [[0, "0", 10.0, 20.0, 7.5], [1, "1", 10.0, 20.0, 2.5]]
    parsed = LedgerRecord.parse(record).waits
    assert parsed is not None
    assert [(wait.rank, wait.started) for wait in parsed.processes] == [(0, START + 1), (1, START + 1)]


def test_the_waits_of_process_groups_are_sent_to_the_ledger_and_not_served() -> None:
    telemetry = Telemetry(ExporterSettings(host="node-7"), Registry(), now=lambda: START + 60)
    pushed = training(40, 5.0, START + 60, rank=3, start_unix=START + 1)
    metrics = pushed.scope_metrics[0].metrics
    for name in ("measured_steps", "measured_step_seconds", "collective_wait_seconds"):
        metrics.append(counter(f"training_{name}_total", 10.0, START + 60, rank="3"))
    metrics.append(counter("training_computing_square_seconds_total", 7.5, START + 60, rank="3"))
    for kind, ranks, wait in (("tp", "2,3", 1.25), ("dp", "1-7:2", 0.5)):
        labels = {"rank": "3", "group": kind, "ranks": ranks}
        metrics.append(counter("training_group_wait_seconds_total", wait, START + 60, **labels))
    assert telemetry.receive(request(pushed)) == (0, "")
    [(_, [record])] = telemetry.due().values()
    parsed = LedgerRecord.parse(record).waits
    assert parsed is not None
    assert parsed.processes[0].groups == (("tp", "2,3"), ("dp", "1-7:2"))
    assert [*array("d", parsed.totals)] == [10.0, 10.0, 0.0, 10.0, 7.5, 1.25, 0.5]
    served = {row for row, _, _ in telemetry.ask(1.0).samples}
    assert m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL in served
    assert not {m.TRAINING_GROUP_WAIT_SECONDS_TOTAL, m.TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL} & served
