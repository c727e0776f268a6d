"""Time lost to stragglers: what the ledger counts when one rank or host is late, and when no rank is to blame."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.rank_waits import Processes
from flopwatch.ledger.record import LedgerRecord, RecordError
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.slowdowns import Slowdown
from flopwatch.ledger.stacks import AGAIN, KEPT
from flopwatch.ledger.state import from_json, to_json
from flopwatch.ledger.tables import run_table
from tests.support.histories import Line, read_back, snapshot_of

HOSTS, PER_HOST, EVERY = ("h0", "h1"), 4, 15.0
GPUS = len(HOSTS) * PER_HOST
# What share of a step a rank waits for others, by its number and the time.
Shares = Callable[[int, float], float]


def late(late_rank: int, by: float) -> Shares:
    return lambda rank, t: 0.4 - by if rank == late_rank else 0.4


def lines(shares: Shares, seconds: float = 1200.0, **change: Any) -> list[Line]:
    """Return the records of two nodes that make a step a second; `change` has what is different for some ranks."""
    place, tokens = change.get("place", lambda rank: ""), change.get("tokens", lambda rank: 100.0)
    started, steps = change.get("started", lambda rank, t: 0.0), change.get("steps", lambda rank, t: t)
    groups, named = change.get("groups"), change.get("named", lambda rank: rank)
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
                        [
                            *(named(rank), place(rank), started(rank, t), steps(rank, t), t, waited[rank]),
                            t * tokens(rank),
                            *([groups(rank, waited[rank], t)] if groups is not None else []),
                        ]
                        for rank in ranks
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


def verdict_of(records: list[Line]) -> dict[m.Metric, dict[tuple[str, ...], float]]:
    """Return the families of the verdict on a run by the values of their own labels."""
    run = run_of(records)
    found: dict[m.Metric, dict[tuple[str, ...], float]] = {}
    for row, labels, value in views.families(run, run.reporters.last):
        if row.name.startswith(("run_straggler_", "run_whatif_")):
            found.setdefault(row, {})[labels[2:]] = value
    return found


def test_a_late_rank_is_named_within_a_minute_with_its_host_and_what_mending_gains() -> None:
    # Both nodes are known at 30 s, so intervals are complete at 45 and 60 s.
    assert m.RUN_STRAGGLER_INFO not in verdict_of([line for line in lines(late(5, 0.3)) if line["t"] <= 45])
    found = verdict_of([line for line in lines(late(5, 0.3)) if line["t"] <= 60])
    assert found[m.RUN_STRAGGLER_INFO] == {("5", "h1", "world", "0-7"): 1.0}
    shares = found[m.RUN_STRAGGLER_RATIO]
    assert len(shares) == 7
    assert sum(shares.values()) == shares["rank",] == pytest.approx(0.3)
    assert found[m.RUN_WHATIF_STEP_SECONDS] == {("0",): pytest.approx(1.0), ("1",): pytest.approx(0.7)}


def named_from(records: list[Line]) -> float:
    """Return when the ledger first names a rank, in Unix time."""
    ledger = Ledger()
    for line in records:
        ledger.apply(line)
        verdict = ledger.runs["", "r"].stragglers.verdict
        if verdict is not None and verdict.suspects:
            return float(line["t"])
    return inf


@pytest.mark.parametrize(
    ("early", "seconds", "named_at"), [(True, inf, 231.0), (False, inf, 236.0), (True, 15.0, inf)], ids=str
)
def test_early_records_end_the_interval_in_which_a_rank_becomes_late(
    monkeypatch: pytest.MonkeyPatch, early: bool, seconds: float, named_at: float
) -> None:
    # Each node sends every 15 s, and every 5 s from 201 to 245 s. An interval of 5 s then ends at 211 s, two of 10 s
    # follow, and three are judged together. A rank that is late for 15 s only is not named.
    monkeypatch.setitem(globals(), "EVERY", 5.0)
    every = lines(lambda rank, t: 0.1 if rank == 5 and 200 < t <= 200 + seconds else 0.4, seconds=300.0)
    records = []
    for line in every:
        sent_early = early and 200 < line["t"] < 245
        if sent_early or line["t"] % 15 == (0 if line["source"] == "h0" else 10):
            records.append({**line, "t": line["t"] + 1.0, "early": sent_early})
    assert named_from(records) == named_at


class Later(Executor):
    """Executor that runs its work when the test has it run."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.runs.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future


@pytest.mark.parametrize("delay", [0, 1])  # records until the executor is done
def test_a_large_run_is_judged_in_the_background_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    monkeypatch.setattr("flopwatch.ledger.stragglers.MANY", len(HOSTS))
    # The processes of all ranks are others from 600 s on, and one of them makes no step for a while.
    records = lines(
        late(5, 0.3),
        started=lambda rank, t: 600.0 * (t > 600),
        steps=lambda rank, t: min(t, 300.0) if rank == 1 and t < 360 else t,
    )
    executor = Later()
    ledger, judged = Ledger(executor=executor), 0
    for number, line in enumerate(records):
        ledger.apply(line)
        if number % (delay + 1) == 0 and executor.runs:
            judged += 1
            executor.runs.pop()()
        assert len(executor.runs) <= 1
    run, same = ledger.runs["", "r"], run_of(records)
    run.stragglers.collect()
    assert judged > 60 / (delay + 1)
    assert run.stragglers.verdict == same.stragglers.verdict
    assert run.stragglers.hosts == same.stragglers.hosts
    assert run.stragglers.gpu_seconds == pytest.approx(same.stragglers.gpu_seconds, rel=0.05)


def test_what_a_late_rank_costs_is_counted_from_the_first_interval_that_shows_it() -> None:
    records = lines(late(5, 0.3))
    assert lost([line for line in records if line["t"] <= 45]) == 0
    assert lost([line for line in records if line["t"] <= 60]) == pytest.approx(GPUS * 0.3 * 30, rel=0.03)
    assert lost(records) == pytest.approx(GPUS * 0.3 * 1170, rel=0.03)


def test_what_a_late_host_costs_is_counted_too() -> None:
    records = lines(lambda rank, t: 0.1 if rank < PER_HOST else 0.4)
    assert lost(records) == pytest.approx(GPUS * 0.3 * 1170, rel=0.03)
    assert {rank for rank, *_ in verdict_of(records)[m.RUN_STRAGGLER_INFO]} == {"0", "1", "2", "3"}


def test_a_late_rank_is_named_in_the_finest_process_group_whose_others_wait_for_it() -> None:
    # Rank 5 makes rank 4 wait in their tensor parallel group, and both of them all others.
    def groups(rank: int, waited: float, t: float) -> list[list[Any]]:
        pair = f"{rank // 2 * 2},{rank // 2 * 2 + 1}"
        in_pair = {4: 0.3, 5: 0.0}.get(rank, 0.0) * t
        return [["tp", pair, in_pair], ["dp", f"{rank % 2}-{6 + rank % 2}:2", waited - in_pair]]

    found = verdict_of(lines(late(5, 0.3), groups=groups))
    assert found[m.RUN_STRAGGLER_INFO] == {("5", "h1", "tp", "4,5"): 1.0}
    assert m.RUN_STRAGGLER_UNAVAILABLE not in found


def test_what_mending_gains_in_a_pipeline_follows_from_the_waits_of_its_stages() -> None:
    # Rank 5 of the second stage makes rank 1 wait, and their replica all others. A step has four microbatches.
    def groups(rank: int, waited: float, t: float) -> list[list[Any]]:
        in_pair = {5: 0.1, 1: 0.4}.get(rank, 0.19) * t
        stage = "0-3" if rank < PER_HOST else "4-7"
        return [["pp", f"{rank % PER_HOST},{rank % PER_HOST + PER_HOST}", in_pair], ["dp", stage, waited - in_pair]]

    found = verdict_of(lines(late(5, 0.3), groups=groups))
    assert found[m.RUN_STRAGGLER_INFO] == {("5", "h1", "dp", "4-7"): 1.0}
    assert found[m.RUN_WHATIF_STEP_SECONDS] == {("0",): pytest.approx(1.0), ("1",): pytest.approx(0.7)}
    stages = verdict_of(lines(late(5, 0.3), place=lambda rank: str(rank // PER_HOST)))
    assert stages[m.RUN_STRAGGLER_INFO] == found[m.RUN_STRAGGLER_INFO]
    assert m.RUN_WHATIF_STEP_SECONDS not in stages


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("groups", {"groups": lambda rank, waited, t: [["tp", "0-3" if rank < 4 else "4-7", waited / 2]]}),
        ("groups", {"groups": lambda rank, waited, t: [["dp", "0-8", waited]]}),
        ("groups", {"groups": lambda rank, waited, t: [["dp", "0-7", waited]] if rank else []}),
        ("ranks", {"started": lambda rank, t: t if rank == 5 else 0.0}),
        ("ranks", {"named": lambda rank: 3 if rank == 4 else rank}),
        ("steps", {"steps": lambda rank, t: 0.0 if rank == 5 else t}),
        ("steps", {"steps": lambda rank, t: t / 100}),
    ],
)
def test_there_is_no_verdict_for_a_reason(reason: str, change: dict[str, Any]) -> None:
    found = verdict_of(lines(late(5, 0.3), **change))
    assert found.get(m.RUN_STRAGGLER_UNAVAILABLE) == {(reason,): 1.0}
    assert m.RUN_STRAGGLER_RATIO not in found


@pytest.mark.parametrize(
    ("why", "kind", "records"),
    [
        ("no rank is late", "", lines(lambda rank, t: 0.4)),
        ("a rank is hardly late", "", lines(late(5, 0.03))),
        ("another one each interval", "imbalance", lines(lambda rank, t: 0.1 if rank == int(t / 15) % GPUS else 0.4)),
        ("it has more tokens", "", lines(late(5, 0.3), tokens=lambda rank: 130.0 if rank == 5 else 100.0)),
        ("it is at another place in the pipeline", "", lines(late(5, 0.3), place=lambda rank: str(rank == 5))),
        ("all wait longer than usual", "communication", lines(lambda rank, t: 0.4 if t < 900 else 0.6)),
    ],
)
def test_nothing_is_lost_to_a_straggler_where(why: str, kind: str, records: list[Line]) -> None:
    assert lost(records) == 0, why
    shares = verdict_of(records)[m.RUN_STRAGGLER_RATIO]
    assert {name for (name,), share in shares.items() if share > 0} == ({kind} if kind else set())


def test_a_verdict_that_fails_costs_the_run_no_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    records = lines(late(5, 0.3), 300.0)
    seconds = run_of(records).buckets.seconds

    def broken(*_: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(Processes, "interval", broken)
    run = run_of(records)
    assert run.buckets.seconds == seconds
    assert (run.stragglers.verdict, run.stragglers.reason) == (None, "groups")


@pytest.mark.parametrize(
    ("shares", "change", "line"),
    [
        (late(5, 0.3), {}, "late ranks (rank, 30.0% of each step): rank 5 on h1 (world group, ranks 0-7)"),
        (
            late(5, 0.3),
            {"place": lambda rank: str(rank // PER_HOST)},
            "late ranks (rank, 30.0% of each step): rank 5 on h1 (dp group, ranks 4-7); what mending gains is unknown: "
            "the process groups that connect the stages of the pipeline are not known",
        ),
        (lambda rank, t: 0.4, {}, "late ranks: none"),
        (
            lambda rank, t: 0.1 if rank == int(t / 15) % GPUS else 0.4,
            {},
            r"late ranks: none; imbalance takes \d+\.\d% of each step",
        ),
        (
            late(5, 0.3),
            {"groups": lambda rank, waited, t: [["dp", "0-8", waited]]},
            "late ranks: unknown, the dp group of ranks 0-8 has more ranks than the run",
        ),
    ],
)
def test_the_page_of_a_run_has_the_verdict_in_words(shares: Shares, change: dict[str, Any], line: str) -> None:
    run = run_of(lines(shares, **change))
    table = run_table(views.figures(run, run.reporters.last)).splitlines()
    assert re.fullmatch(
        line.replace("(", r"\(").replace(")", r"\)"), next(one for one in table if "late ranks" in one)[2:]
    )


def test_a_node_that_ended_or_a_new_attempt_is_not_waited_for() -> None:
    records = lines(late(5, 0.3), 600.0)
    again = [line | {"t": line["t"] + 700, "attempt": "b", "started": 700.0} for line in records]
    found = verdict_of([*records, *again])
    assert found[m.RUN_STRAGGLER_INFO] == {("5", "h1", "world", "0-7"): 1.0}
    ends = {"t": 600.0, "run": "r", "attempt": "a", "event": "finish", "status": "completed"}
    assert m.RUN_STRAGGLER_RATIO not in verdict_of([*records, ends])


def test_no_rank_is_blamed_while_one_is_not_measured_and_nothing_is_served_where_none_is() -> None:
    records = lines(late(5, 0.3))
    assert lost([line | {"waits": line["waits"][1:]} if line["source"] == "h0" else line for line in records]) == 0
    found = verdict_of([line | {"waits": None} if line["source"] == "h0" else line for line in records])
    assert found[m.RUN_STRAGGLER_UNAVAILABLE] == {("waits",): 1.0}
    assert lost([{name: value for name, value in line.items() if name != "waits"} for line in records]) is None


def test_the_counter_is_a_part_of_productive_never_falls_and_survives_being_written_down() -> None:
    ledger, before = Ledger(), 0.0
    for line in lines(lambda rank, t: 0.0 if rank == 2 else 5.0):  # more than there was
        ledger.apply(line)
        run = ledger.runs["", "r"]
        assert snapshot_of(run) == snapshot_of(read_back(run))
        if line["t"] in (300.0, 600.0):
            ledger.runs["", "r"] = run = read_back(run)
        lost = run.stragglers.gpu_seconds or 0.0
        assert before <= lost <= run.buckets.gpu_seconds["productive"]
        before = lost
    assert before > 0.9 * run.buckets.gpu_seconds["productive"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "waits: Expected array | null, got object"),
        ([[0, "", 0, 1, 2, 3]], "waits[0]: Expected array of at least length 7, got 6"),
        ([[0, "", 0, 1, 2, -3, 4]], "waits[0][5]: Expected float >= 0.0"),
        ([[0, "", 0, 1, 2, None, 4]], "waits[0][5]: Expected float, got null"),
        ([[0, "", 0, 1, 2, 3, 4]] * 2, "waits: a rank is listed twice"),
        ([[0, "", 0, 1, 2, 3, 4, {}]], "waits[0][7]: Expected array, got object"),
        ([[0, "", 0, 1, 2, 3, 4, [["tp", "0-3"]]]], "waits[0][7][0]: Expected array of length 3, got 2"),
        (
            [[0, "", 0, 1, 2, 3, 4, [["tp", "0-", 1.0]]]],
            "waits: rank 0: '0-' is not a rank, nor a range such as 0-3 or 1-29:4",
        ),
        ([[0, "", 0, 1, 2, 3, 4, [["t p", "0-3", 1.0]]]], "waits: rank 0: 't p' is not the kind of a process group"),
        ([[0, "", 0, 1, 2, 3, 4, [["tp", "0-3", -1.0]]]], "waits[0][7][0][2]: Expected float >= 0.0"),
        ([[0, "", 0, 1, 2, 3, 4, [["tp", "0-3", None]]]], "waits[0][7][0][2]: Expected float, got null"),
        ({}, "computing_squares: Expected array | null, got object"),
        ([1.0], "computing_squares: not a list with a number for each rank in waits"),
        ([1.0, 2.0, 3.0, None], "computing_squares[3]: Expected float, got null"),
        ([1.0, 2.0, 3.0, -4.0], "computing_squares[3]: Expected float >= 0.0"),
    ],
)
def test_waits_and_squares_that_cannot_be_are_refused(value: object, message: str) -> None:
    name = "computing_squares" if message.startswith("computing_squares") else "waits"
    with pytest.raises(RecordError) as error:
        LedgerRecord.parse(lines(late(5, 0.3), 15.0)[0] | {name: value})
    assert str(error.value) == message


# Stacks.


def wanted(ledger: Ledger, line: Line, *stacks: list[Any]) -> set[int]:
    """Apply a record with stacks and return the ranks whose stacks the answer to it requests."""
    ranks = "0-3" if line["source"] == "h0" else "4-7"
    record = LedgerRecord.parse({**line, "ranks": ranks, "stacks": [*stacks] or None})
    ledger.apply(record)
    return {rank for _, _, rank in ledger.wanted_stacks([record])}


def test_the_stacks_of_a_straggler_and_of_a_peer_are_requested_once() -> None:
    ledger, found = Ledger(), dict[float, set[int]]()
    for line in lines(late(5, 0.3)):
        answered = [[0 if line["source"] == "h0" else 5, line["t"], "40 % train.py:7"]] if line["t"] == 90 else []
        found.setdefault(line["t"], set()).update(wanted(ledger, line, *answered))
    assert found[45] == set()
    assert found[60] == {0, 5}  # in the answer to the record that completed the interval
    assert found[75] == {0, 5}
    assert not any(found[t] for t in found if t >= 90)
    run = ledger.runs["", "r"]
    assert [row[:2] for row in run.stacks.rows] == [(0, 90.0), (5, 90.0)]
    assert "late ranks (rank, 30.0% of each step): rank 5 on h1" in run_table(views.figures(run, 1200))
    assert "stacks of the last hang or straggler\n\nrank 0, 1970" in run_table(views.figures(run, 1200))


def test_another_straggler_is_requested_after_some_minutes_only_and_in_its_own_group() -> None:
    ledger, found = Ledger(), dict[float, set[int]]()
    records = lines(
        lambda rank, t: 0.1 if rank == (5 if t <= 120 else 2) else 0.4,
        groups=lambda rank, waited, t: [["dp", f"{rank % 2}-{6 + rank % 2}:2", waited]],
    )
    for line in records:
        found.setdefault(line["t"], set()).update(wanted(ledger, line))
    first = min(t for t in found if found[t])
    assert found[first + 15] == {1, 5}  # of ranks 1, 3, 5 and 7
    again = min(t for t in found if 2 in found[t])
    assert first + AGAIN <= again <= first + AGAIN + 30
    assert all(found[t] == {0, 2} for t in found if t >= again + 15)


@pytest.mark.parametrize("kind", ["link", "stage", "imbalance"])
def test_no_stacks_are_requested_where_no_rank_is_slow(kind: str) -> None:
    ledger = Ledger()
    records = lines(late(5, 0.3))
    for line in records[:-2]:
        wanted(ledger, line)
    run = ledger.runs["", "r"]
    assert run.stacks.wanted == {0, 5}
    verdict = run.stragglers.verdict
    assert verdict is not None
    run.stragglers.verdict = replace(verdict, kind=kind)
    run.stacks.take(LedgerRecord.parse(records[-2]), run.hangs, run.stragglers, run.reporters)
    assert run.stacks.wanted == set()


def test_a_slow_stretch_keeps_the_stacks_of_its_straggler() -> None:
    ledger = Ledger()
    for line in lines(late(5, 0.3), 300):
        wanted(ledger, line, *([[5, 200.0, "40 % train.py:7"]] if line["t"] == 210 and line["source"] == "h1" else []))
    run = ledger.runs["", "r"]
    for began, kept in ((150.0, True), (250.0, False)):
        run.incidents.take_slowdown(Slowdown("slow", "", began, 300.0, 1.0, 8.0))
        assert bool([*run.incidents.by_number.values()][-1].stacks) == kept
    assert read_back(run).incidents.by_number[1].stacks == run.incidents.by_number[1].stacks != []


def test_another_kind_of_incident_leaves_the_stacks_of_a_straggler_also_after_a_restart() -> None:
    ledger = Ledger()
    for line in lines(late(5, 0.3), 300):
        wanted(ledger, line, *([[5, 200.0, "text"]] if line["t"] == 210 and line["source"] == "h1" else []))
    run = ledger.runs["", "r"]
    old = to_json(run)
    assert old.pop("of_straggler") is True
    assert len(from_json(old, {}).stacks.rows) == 1
    for one in (run, read_back(run)):
        for kind in ("end", "stall"):
            assert one.incidents._new("", 150.0, 300.0, kind).stacks == []
        one.incidents.take_slowdown(Slowdown("slow", "", 150.0, 300.0, 1.0, 8.0))
        assert len([*one.incidents.by_number.values()][-1].stacks) == 1


@pytest.mark.parametrize("answered", [True, False])
def test_the_stacks_of_a_straggler_are_requested_again_after_a_hang(answered: bool) -> None:
    ledger = Ledger()
    records = lines(late(5, 0.3), 150)
    for line in records:
        wanted(ledger, line, *([[5, 90.0, "text"]] if answered and line["t"] == 90 and line["source"] == "h1" else []))
    run, last = ledger.runs["", "r"], records[-1]["t"]

    def take(t: float, hang: float | None) -> frozenset[int]:
        run.hangs.seconds = hang
        record = LedgerRecord.parse({**records[-1], "t": t})
        run.stacks.take(record, run.hangs, run.stragglers, run.reporters)
        return run.stacks.wanted

    assert take(last, 60.0) == frozenset()  # of a hang without a verdict
    assert (take(last, None) == {0, 5}) == (not answered)
    assert take(last + AGAIN, None) == {0, 5}


@pytest.mark.parametrize(("late_until", "kept"), [(1200.0, False), (9000.0, True)])
def test_the_stacks_of_a_straggler_are_dropped_an_hour_after_they_were_taken_unless_it_is_still_late(
    late_until: float, kept: bool
) -> None:
    ledger = Ledger()
    for line in lines(lambda rank, t: late(5, 0.3)(rank, t) if t < late_until else 0.4, KEPT + 600):
        wanted(ledger, line, *([[5, 90.0, "text"]] if line["t"] == 90 and line["source"] == "h1" else []))
    assert bool(ledger.runs["", "r"].stacks.rows) == kept
