"""Time lost to stragglers: what the ledger counts when one rank or host is late, and when no rank is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import LedgerRecord, RecordError
from flopwatch.ledger.run import RunLedger
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.histories import Line, read_back, snapshot_of
from tests.support.otlp_by_hand import START, counter, gauge, request, training

HOSTS, PER_HOST, EVERY = ("h0", "h1"), 4, 15.0
GPUS = len(HOSTS) * PER_HOST
# What share of a step a rank waits for others, by its number and the time.
Shares = Callable[[int, float], float]


def late(late_rank: int, by: float) -> Shares:
    return lambda rank, t: 0.4 - by if rank == late_rank else 0.4


def lines(shares: Shares, seconds: float = 1200.0, **change: Any) -> list[Line]:
    """Return the records of two nodes that make a step a second; `change` gives ranks places, tokens or starts."""
    place, tokens = change.get("place", lambda rank: ""), change.get("tokens", lambda rank: 100.0)
    started = change.get("started", lambda rank, t: 0.0)
    records: list[Line] = []
    waited = dict.fromkeys(range(GPUS), 0.0)
    for turn in range(1, int(seconds / EVERY) + 1):
        t = turn * EVERY
        for rank in waited:
            waited[rank] += EVERY * shares(rank, t)
        for number, host in enumerate(HOSTS):
            ranks = range(number * PER_HOST, (number + 1) * PER_HOST)
            records.append(
                {
                    "t": t,
                    "run": "r",
                    "attempt": "a",
                    "source": host,
                    "event": "snapshot",
                    "started": 0.0,
                    "rank": ranks[0],
                    "gpus": PER_HOST,
                    "step": int(t),
                    "activity_seconds": {"step": t},
                    "waits": [
                        [rank, place(rank), started(rank, t), t, t, waited[rank], t * tokens(rank)] for rank in ranks
                    ],
                }
            )
    return records


def run_of(records: list[Line]) -> RunLedger:
    ledger = Ledger()
    for line in records:
        ledger.apply(line)
    return ledger.runs["", "r"]


def lost(records: list[Line]) -> float | None:
    run = run_of(records)
    served = {row: value for row, _, value in views.families(run, run.reporters.last)}.get(
        m.RUN_STRAGGLER_GPU_SECONDS_TOTAL
    )
    assert served == views.summary(run)["straggler_gpu_seconds"]
    return served


def test_what_a_late_rank_costs_is_counted_once_it_was_the_latest_in_three_windows() -> None:
    records = lines(late(5, 0.3))
    # The first window, of 15 to 135 s, begins before all ranks have reported their position; then 30 % of each.
    assert lost([line for line in records if line["t"] <= 480]) == 0
    assert lost([line for line in records if line["t"] <= 510]) == pytest.approx(GPUS * 0.3 * 360, rel=0.03)
    assert lost(records) == pytest.approx(GPUS * 0.3 * 960, rel=0.03)


def test_what_a_late_host_costs_is_counted_too() -> None:
    assert lost(lines(lambda rank, t: 0.1 if rank < PER_HOST else 0.4)) == pytest.approx(GPUS * 0.3 * 960, rel=0.03)


@pytest.mark.parametrize(
    ("why", "records"),
    [
        ("no rank is late", lines(lambda rank, t: 0.4)),
        ("a rank is hardly late", lines(late(5, 0.08))),
        ("another one each window", lines(lambda rank, t: 0.1 if rank == int(t / 120) % GPUS else 0.4)),
        ("two are", lines(lambda rank, t: 0.1 if rank in (1, 6) else 0.4)),
        ("it has more tokens", lines(late(5, 0.3), tokens=lambda rank: 130.0 if rank == 5 else 100.0)),
        ("it is at another place in the pipeline", lines(late(5, 0.3), place=lambda rank: str(rank == 5))),
        ("it starts again and again", lines(late(5, 0.3), started=lambda rank, t: t // 200 if rank == 5 else 0.0)),
    ],
)
def test_nothing_is_lost_to_a_straggler_where(why: str, records: list[Line]) -> None:
    assert lost(records) == 0, why


def test_no_rank_is_blamed_while_one_is_not_measured_and_nothing_is_served_where_none_is() -> None:
    records = lines(late(5, 0.3))
    assert lost([line | {"waits": line["waits"][1:]} if line["source"] == "h0" else line for line in records]) == 0
    assert lost([line for line in records if line["source"] == "h1" or line["t"] < 60]) == 0
    assert lost([{name: value for name, value in line.items() if name != "waits"} for line in records]) is None


def test_the_counter_is_a_part_of_productive_never_falls_and_survives_being_written_down() -> None:
    ledger, before = Ledger(), 0.0
    for line in lines(lambda rank, t: 0.0 if rank == 2 else 5.0):  # more than there was
        ledger.apply(line)
        run = ledger.runs["", "r"]
        ledger.runs["", "r"] = read_back(run)
        assert snapshot_of(run) == snapshot_of(ledger.runs["", "r"])
        assert before <= (run.buckets.straggler_gpu_seconds or 0.0) <= run.buckets.gpu_seconds["productive"]
        before = run.buckets.straggler_gpu_seconds or 0.0
    assert before > 0


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ({}, "waits: not a list of at most 64 ranks"),
        ([[0, "", 0, 1, 2, 3]], "waits 1: not [rank, place, started, steps, seconds, wait, tokens]"),
        ([[0, "", 0, 1, 2, -3, 4]], "waits 1: wait: -3 is negative"),
        ([[0, "", 0, 1, 2, None, 4]], "waits 1: a number is missing"),
        ([[0, "", 0, 1, 2, 3, 4]] * 2, "waits: a rank is listed twice"),
    ],
)
def test_waits_that_cannot_be_are_refused(waits: object, message: str) -> None:
    with pytest.raises(RecordError) as error:
        LedgerRecord.parse(lines(late(5, 0.3), 15.0)[0] | {"waits": waits})
    assert str(error.value) == message


def test_a_node_reports_the_waits_of_its_ranks_once_all_are_measured() -> None:
    telemetry = Telemetry(ExporterSettings(host="node-7"), CollectorRegistry(), now=lambda: START + 60)

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
    assert [wait[:2] + wait[3:6] for wait in record["waits"]] == [[0, "0", 10.0, 20.0, 7.5], [1, "1", 10.0, 20.0, 2.5]]
    parsed = LedgerRecord.parse(record).waits
    assert parsed is not None
    assert [(wait.rank, wait.started) for wait in parsed] == [(0, START + 1), (1, START + 1)]
