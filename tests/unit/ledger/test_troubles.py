"""Histories in which something is wrong: clocks, two runs of one name, runs without an end; and what losses cost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch import catalogue as m
from flopwatch.ledger import evidence as evidence_module
from flopwatch.ledger import incidents, views
from flopwatch.ledger import run as run_module
from flopwatch.ledger.attribution import CAUSES, LOSSES
from flopwatch.ledger.evidence import RunEvidence
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import MAX_EVIDENCE, LedgerRecord, RecordError
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.tables import attempts_csv, run_table
from tests.support.histories import (
    A1,
    Line,
    account,
    buckets,
    figures,
    finish,
    read_back,
    samples,
    snapshot,
    start,
    submitted,
)


def run_of(lines: Iterable[Line]) -> RunLedger:
    return account(lines).runs["", "r"]


def served(run: RunLedger, now: float, row: m.Metric) -> dict[tuple[str, ...], float]:
    return {labels[2:]: value for other, labels, value in views.families(run, now) if other is row}


# Recoveries.

A2 = [start(200, "a2", step=1), snapshot(210, "a2", 1, startup=10, step=0), snapshot(250, "a2", 5, startup=10, step=40)]


def test_a_recovery_lasts_from_the_last_word_to_the_first_new_step() -> None:
    # a1 sends its last record at 144 with step 3; a2 makes steps 2 and 3 again and ends step 4 at 240.
    run = run_of([*A1, *A2])
    assert (run.incidents.recoveries, run.incidents.recovery_seconds) == (1, 240 - 144)
    assert (served(run, 250, m.RUN_RECOVERIES_TOTAL), served(run, 250, m.RUN_RECOVERY_SECONDS_TOTAL)) == (
        {(): 1},
        {(): 96},
    )
    assert (run_of([*A1, *A2[:2]]).incidents.recoveries, run_of([*A1, *A2[:2]]).incidents.recovery_seconds) == (0, 0)


@pytest.mark.parametrize(("status", "recoveries"), [("failed", 1), ("preempted", 0), ("resized", 0)])
def test_only_an_unplanned_end_is_recovered_from(status: str, recoveries: int) -> None:
    run = run_of([*A1, finish(149, "a1", status), *A2])
    assert (run.incidents.recoveries, run.incidents.recovery_seconds) == (recoveries, 96 * recoveries)


def test_a_crash_loop_is_one_recovery() -> None:
    loop = [
        line
        for k in range(3)
        for line in (start(200 + 50 * k, f"b{k}", step=1), snapshot(215 + 50 * k, f"b{k}", 1, startup=10, step=5))
    ]
    run = run_of([*A1, *loop, start(400, "a2", step=1), snapshot(450, "a2", 5, startup=10, step=40)])
    assert (run.incidents.recoveries, run.incidents.recovery_seconds) == (1, 440 - 144)
    assert run.ends["silent"] == 4


def test_a_checkpoint_is_known_by_when_it_was_first_reported() -> None:
    lines = [*A1[:2], snapshot(130, "a1", 2, startup=10, step=20, more={"committed_step": 1})]
    assert served(run_of(lines), 130, m.RUN_COMMITTED_TIMESTAMP_SECONDS) == {(): 130}
    lines.append(snapshot(160, "a1", 5, startup=10, step=50, more={"committed_step": 1}))
    assert served(run_of(lines), 160, m.RUN_COMMITTED_TIMESTAMP_SECONDS) == {(): 130}
    lines.append(snapshot(170, "a1", 6, startup=10, step=60, more={"committed_step": 5}))
    assert served(run_of(lines), 170, m.RUN_COMMITTED_TIMESTAMP_SECONDS) == {(): 170}
    assert served(run_of(A1), 144, m.RUN_COMMITTED_TIMESTAMP_SECONDS) == {}


# Two attempts at once.


def both(until: int, begin: int = 150) -> list[Line]:
    """Return a1, and b1 of another allocation next to it from some time on, both reporting every ten seconds."""
    lines = [*A1, start(begin, "b1", step=3, source="other")]
    for t in range(begin + 10, until + 1, 10):
        lines += [
            snapshot(t, "a1", 3 + (t - 144) // 10, startup=10, step=t - 110.0),
            snapshot(t, "b1", 3 + (t - begin) // 20, "other", startup=10, step=t - begin - 10.0),
        ]
    return lines


def test_two_live_attempts_are_a_conflict_and_the_later_start_is_accounted_for() -> None:
    run = run_of(both(210))
    assert (served(run, 210, m.RUN_ATTEMPT_CONFLICT), views.summary(run, 210)["conflict"]) == ({(): 1}, True)
    alone = [line for line in both(210) if line["attempt"] == "b1" or line["t"] <= 150]
    expected = run_of(alone)
    assert (run.buckets.seconds, run.buckets.gpu_seconds, run.buckets.high_water) == (
        expected.buckets.seconds,
        expected.buckets.gpu_seconds,
        6,
    )
    assert [one["attempt"] for one in views.figures(run, 210)["attempts"]] == ["a1", "b1"]
    assert read_back(run).conflict(210)


@pytest.mark.parametrize(
    "lines",
    [
        [*A1, *A2],
        both(160),  # one word after the other's start may be late
        [*both(210), *(snapshot(t, "b1", 9, "other", startup=10, step=t - 160.0) for t in (230, 250, 272))],
        [*both(210), finish(212, "b1", "completed", "other")],
    ],
    ids=["a restart", "one word", "one fell silent", "one has ended"],
)
def test_one_attempt_that_reports_is_no_conflict(lines: list[Line]) -> None:
    run = run_of(lines)
    assert served(run, run.reporters.last, m.RUN_ATTEMPT_CONFLICT) == {(): 0}


def test_late_and_repeated_words_of_an_old_attempt_are_no_conflict() -> None:
    lines = [*A1, *A2, *A1, snapshot(143, "a1", 3, startup=10, step=33), *A1]
    assert served(run_of(lines), 250, m.RUN_ATTEMPT_CONFLICT) == {(): 0}


def test_a_run_whose_other_attempt_goes_on_is_not_called_down() -> None:
    run = run_of(
        [
            *both(210),
            finish(212, "b1", "failed", "other"),
            *(snapshot(t, "a1", 3 + (t - 144) // 10, startup=10, step=t - 110.0) for t in range(220, 400, 10)),
        ]
    )
    assert (run.state(390), run.conflict(390), run.state(500)) == ("running", False, "down")


# Clocks.


def hours(t: float, number: float) -> float:
    return t + 3600 * number


def test_a_clock_that_is_set_back_by_hours_costs_nothing() -> None:
    def report(t: float, shift: float) -> list[Line]:
        return [snapshot(t - shift, "a1", (t - 110) // 10, startup=10, step=t - 110)]

    lines = [*A1, *report(160, 0), *report(170, 7200), *report(180, 7200)]
    run = run_of(lines)
    assert run.buckets.seconds["productive"] == pytest.approx(70)
    assert views.summary(read_back(run)) == views.summary(run)
    # The next attempt starts by the new clock, and down time is what it was.
    lines += [start(230 - 7200, "a2", step=7), snapshot(260 - 7200, "a2", 9, startup=10, step=20)]
    assert buckets(lines) == {"startup": 20, "productive": 90, "down": 50}
    # And so it is when the clock is set right again.
    lines += [snapshot(280, "a2", 11, startup=10, step=40), snapshot(300, "a2", 13, startup=10, step=60)]
    assert buckets(lines) == {"startup": 20, "productive": 130, "down": 50}
    assert run_of(lines).reporters.clock_offsets == {}


def test_a_run_whose_clock_is_hours_off_is_running_by_the_ledgers_clock() -> None:
    run = RunLedger("", "r", 60.0)
    for line in A1:
        run.apply(LedgerRecord.parse(line), received=hours(line["t"], 3))
    assert run.state(hours(150, 3)) == "running"
    assert run.state(hours(205, 3)) == "down"
    # One that is ahead does not live on for as long as it is ahead.
    run = RunLedger("", "r", 60.0)
    for line in A1:
        run.apply(LedgerRecord.parse({**line, "t": hours(line["t"], 3)}), received=line["t"])
    assert (run.state(150), run.state(205)) == ("running", "down")
    # What was spooled for hours and comes all at once is no sign of life.
    run = RunLedger("", "r", 60.0)
    for line in A1:
        run.apply(LedgerRecord.parse(line), received=hours(144, 3))
    assert run.state(hours(145, 3)) == "down"


def skewed(until: int, ahead: float) -> list[Line]:
    """Return an attempt on two nodes. The clock of the second is ahead."""
    lines = [start(100, "a1"), start(100 + ahead, "a1", source="h2")]
    for t in range(120, until + 1, 10):
        for source, rank, shift in (("h1", 0, 0.0), ("h2", 8, ahead)):
            lines.append(
                snapshot(t + shift, "a1", (t - 110) // 10, source, more={"rank": rank}, startup=10, step=t - 110.0)
            )
    return lines


@pytest.mark.parametrize("ahead", [300.0, -300.0])
def test_nodes_whose_clocks_differ_by_minutes_do_not_end_each_others_attempt(ahead: float) -> None:
    lines = skewed(200, ahead)
    # The node with the wrong clock loses its process, and the other carries on.
    lines.append({**lines[-1], "t": 203 + ahead, "gone": True})
    assert figures(lines)["state"] == "running"
    lines += [
        snapshot(t, "a1", (t - 110) // 10, more={"rank": 0}, startup=10, step=t - 110.0) for t in range(210, 810, 10)
    ]
    run = run_of(lines)
    assert (run.attempts, run.ends["failed"], run.buckets.high_water) == (1, 0, 69)
    assert run.state() == "running"
    # By whichever of the two clocks, all of it was startup and steps.
    attributed = run.buckets.seconds["startup"] + run.buckets.seconds["productive"] + run.buckets.pending
    assert attributed == pytest.approx(run.wall(run.reporters.last))
    assert run.wall(run.reporters.last) == pytest.approx(700, abs=300)
    assert run.buckets.seconds["lost"] == run.buckets.seconds["down"] == 0


# Positions.


def test_two_rollbacks_to_the_same_step_lose_what_was_executed_again() -> None:
    def at(t: float, step: float, seconds: float) -> Line:
        return snapshot(t, "a1", step, startup=10, step=seconds, more={"restored_step": 2} if t > 160 else None)

    # To step 5, back to 2, to 5 again, back to 2 again, and on to 8.
    lines = [*A1[:2], at(160, 5, 50), at(170, 2, 60), at(200, 5, 90), at(210, 2, 100), at(270, 8, 160)]
    assert buckets(lines) == {"startup": 10, "productive": 50 + 30, "lost": 10 + 30 + 10 + 30}
    # Of a rollback that no snapshot shows the position is the same, and the next step that ends settles the time.
    unseen = [*A1[:2], at(160, 5, 50), at(170, 2, 60), at(230, 2, 120), at(290, 8, 180)]
    run = figures(unseen)
    assert run["buckets"]["productive"] + run["buckets"]["lost"] == pytest.approx(180)
    assert 50 <= run["buckets"]["productive"] <= 50 + 130 / 2


def overlapping(until: int, steps: bool = True) -> list[Line]:
    """Return an attempt from 100 on, and another that runs on another host from 205 to 260 and fails."""

    def one(t: int) -> Line:
        done = (t if steps else min(t, 190)) - 110
        return snapshot(
            t,
            "a1",
            done // 10,
            startup=10,
            step=t - 110.0,
            more={"model_flops": done * 10.0, "peak_flops": 100.0, "open_step_seconds": t - 110.0 - done // 10 * 10},
        )

    def other(t: int) -> Line:
        return snapshot(
            t,
            "b1",
            (t - 215) // 10,
            "h9",
            startup=10,
            step=t - 215.0,
            more={"model_flops": (t - 215) * 10.0, "peak_flops": 100.0},
        )

    lines = [
        start(100, "a1"),
        *(one(t) for t in range(120, until + 1, 10)),
        start(205, "b1", source="h9"),
        *(other(t) for t in range(225, 256, 10)),
        finish(260, "b1", "failed", "h9"),
    ]
    return sorted(lines, key=lambda line: line["t"])


def test_after_a_conflict_the_attempt_that_goes_on_is_accounted_for_again() -> None:
    lines = [*overlapping(700), finish(701, "a1", source="h1")]
    run = run_of(lines)
    # a1 makes steps until 200 and, as is sure after five minutes, from b1's end on; b1 starts up, makes 4 of them again
    # and fails.
    assert buckets(lines) == {"startup": 20, "productive": 90 + 440, "down": 5, "lost": 45, "other": 1}
    assert (run.attempts, run.ends["failed"], run.ends["silent"], run.state()) == (3, 1, 1, "completed")
    assert [(one["attempt"], one["begin"], one["end"]) for one in views.figures(run, 701)["attempts"]] == [
        ("a1", 100, 200),
        ("b1", 205, 260),
        ("a1", 260, 701),
    ]
    assert run.buckets.retained <= (59 + 4) * 100
    # Read back at any moment it is the same.
    for number in range(1, len(lines)):
        again = read_back(run_of(lines[:number]))
        for line in lines[number:]:
            again.apply(LedgerRecord.parse(line))
        assert views.summary(again) == views.summary(run)


def test_the_later_attempt_keeps_the_books_however_long_it_starts_up_in_silence() -> None:
    a = [start(0, "a"), *(snapshot(t, "a", t // 10, step=float(t)) for t in range(10, 601, 10))]
    b = [
        start(400, "b", step=30, source="h9"),
        *(snapshot(t, "b", 30 + (t - 700) // 10, "h9", startup=300, step=t - 700.0) for t in range(700, 1001, 10)),
    ]
    lines = [*sorted([*a, *b], key=lambda line: line["t"]), finish(1000, "b", source="h9")]
    assert buckets(lines) == {"productive": 400 + 200, "lost": 100, "startup": 300}
    assert run_of(lines).attempts == 2


def test_an_attempt_that_lingers_without_a_step_or_for_less_than_five_minutes_is_not_accounted_for_again() -> None:
    for lines in (overlapping(700, steps=False), overlapping(550)):
        run = run_of(lines)
        assert (run.attempts, run.ends["failed"], run.open(700)) == (2, 1, 440)


@pytest.mark.parametrize("source", ["h1", "h2"])
def test_a_relaunch_under_the_same_attempts_name_is_another_attempt_wherever_it_runs(source: str) -> None:
    lines = [*A1, start(215, "a1", step=3, source=source), snapshot(245, "a1", 5, source, startup=10, step=20)]
    lines = [{**line, "rank": 0} for line in lines]
    assert buckets(lines) == {"startup": 20, "productive": 54, "down": 71}
    run = run_of(lines)
    assert (run.attempts, run.ends["silent"]) == (2, 1)
    assert [(one["attempt"], one["begin"], one["end"]) for one in views.figures(run, 245)["attempts"]] == [
        ("a1", 100, 144),
        ("a1", 215, None),
    ]


def test_a_second_ledger_that_received_less_adds_nothing_to_the_first() -> None:
    lines = [
        *A1,
        *A2,
        finish(255, "a2", "failed"),
        start(300, "a3", step=4),
        snapshot(340, "a3", 7, startup=10, step=30),
        finish(341, "a3"),
    ]
    whole = run_of(lines)
    for lost in range(1, len(lines) - 1):
        # The rules take the maximum over the ledgers that tell of a run.
        other = run_of([line for number, line in enumerate(lines) if number != lost])
        attributed = {
            bucket: max(seconds, other.buckets.seconds[bucket]) for bucket, seconds in whole.buckets.seconds.items()
        }
        assert other.wall(341) <= whole.wall(341)
        assert attributed["productive"] <= whole.wall(341)
        assert all(seconds <= whole.wall(341) for seconds in attributed.values())
        assert attributed["productive"] / (sum(attributed.values())) <= 1
        for ledger in (whole, other):
            assert sum(ledger.buckets.seconds.values()) + ledger.open(341) == pytest.approx(ledger.wall(341))


# Runs without an end.


def test_a_run_that_is_given_up_stopped_at_its_last_record() -> None:
    run = run_of([*A1, snapshot(147, "a1", 3, startup=10, step=37)])
    run.give_up()
    assert run.state(1e7) == "stopped"
    assert (run.wall(1e7), run.open(1e7), run.buckets.seconds["lost"], run.buckets.seconds["down"]) == (47, 0, 3, 0)
    assert (run.ends["silent"], run.ends["stopped"], run.incidents.settled["end"]) == (1, 0, {"host": 1})
    # It may still come back.
    for line in ({**one, "t": one["t"] + 1e6} for one in A2):
        run.apply(LedgerRecord.parse(line))
    assert (run.state(), run.attempts) == ("running", 2)
    assert (run.buckets.seconds["down"], run.buckets.gpu_seconds["down"]) == (1e6 + 200 - 147, 0)
    assert sum(run.buckets.seconds.values()) == pytest.approx(run.wall(run.reporters.last))
    assert run.incidents.settled["end"] == {"host": 1}


def test_a_run_that_failed_and_is_given_up_keeps_its_end() -> None:
    run = run_of([*A1, finish(149, "a1", "failed")])
    run.give_up()
    assert (run.state(1e7), run.wall(1e7), run.ends["failed"], run.ends["silent"]) == ("stopped", 49, 1, 0)


def test_a_long_history_keeps_its_last_thousand_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (incidents, run_module):
        monkeypatch.setattr(module, "MAX_HISTORY", 20)
    lines = []
    for k in range(50):
        lines += [start(1000.0 * k, f"a{k}", step=k), snapshot(1000.0 * k + 20, f"a{k}", k + 1, startup=10, step=10)]
    run = run_of(lines)
    record = views.figures(run, run.reporters.last)
    assert [one["attempt"] for one in record["attempts"]] == [f"a{k}" for k in range(30, 50)]
    assert (record["attempts_left_out"], len(record["incidents"]), run.attempts) == (30, 20, 50)
    assert sum(run.incidents.settled["end"].values()) == 49


# Losses and their causes.


def evidence(kind: str, t: float, **more: Any) -> Line:
    return {"kind": kind, "t": t, "count": 1, **more}


def later(lines: list[Line], until: float) -> list[Line]:
    """Return the lines and then a record of the last attempt at that time."""
    last = lines[-1]
    spent = {**last["activity_seconds"], "step": last["activity_seconds"]["step"] + until - last["t"]}
    return [*lines, {**last, "t": until, "step": last["step"] + 1, "activity_seconds": spent}]


def seen(lines: list[Line], number: int, *items: Line) -> list[Line]:
    return [{**line, "evidence": list(items)} if k == number else line for k, line in enumerate(lines)]


def test_a_loss_is_attributed_once_to_its_cause_when_all_evidence_is_in() -> None:
    lines = seen([*A1, *A2], 3, evidence("xid", 143, gpu="GPU-7", detail="79"))
    waiting = run_of(lines)
    assert set(served(waiting, 250, m.RUN_INCIDENTS_TOTAL).values()) == {0.0}
    [incident] = views.figures(waiting, 250)["incidents"]
    assert (incident["settled"], incident["cause"], incident["gpu"]) == (False, "gpu", "GPU-7")
    settled = run_of(later(lines, 205 + 300))
    [incident] = views.figures(settled, 505)["incidents"]
    assert {
        name: incident[name] for name in ("settled", "cause", "host", "gpu", "began", "ended", "back", "status")
    } == {
        "settled": True,
        "cause": "gpu",
        "host": "h1",
        "gpu": "GPU-7",
        "began": 144,
        "ended": 200,
        "back": 240,
        "status": "silent",
    }
    # 56 s down, 10 s of startup, steps 2 and 3 again.
    assert (incident["seconds"], incident["gpu_seconds"]) == (86, 8 * 86)
    everything = dict.fromkeys(product(LOSSES, CAUSES), 0.0)
    assert served(settled, 505, m.RUN_INCIDENTS_TOTAL) == everything | {("end", "gpu"): 1.0}
    assert served(settled, 505, m.RUN_BADPUT_GPU_SECONDS_TOTAL) == everything | {("end", "gpu"): 688.0}
    # What comes later changes nothing any more.
    again = seen([*later(lines, 505), *A1], 11, evidence("host_oom", 144, rank=0))
    assert served(run_of(again), 505, m.RUN_INCIDENTS_TOTAL) == served(settled, 505, m.RUN_INCIDENTS_TOTAL)


@pytest.mark.parametrize(("t", "cause"), [(199, "gpu"), (208, "gpu"), (261, "unknown"), (400, "unknown")])
def test_what_is_seen_after_the_next_attempt_has_started_is_of_that_one(t: float, cause: str) -> None:
    # a1 is silent from 144 on, which counts as noticed at 200, when a2 starts; a counter may be read a minute later.
    lines = later(seen([*A1, *A2], 5, evidence("ecc", t, gpu="GPU-7")), 505)
    assert run_of(lines).incidents.settled["end"] == {cause: 1}


def test_a_loss_is_not_settled_before_the_run_is_back() -> None:
    down = [*A1, finish(149, "a1", "failed"), start(1000, "a2", step=1)]
    assert run_of(down).incidents.settled["end"] == {}
    # Executed again, but nothing new: still a part of the loss.
    down.append(snapshot(1030, "a2", 3, startup=10, step=20))
    assert run_of(down).incidents.settled["end"] == {}
    down.append(snapshot(1060, "a2", 6, startup=10, step=50))
    run = run_of(down)
    assert run.incidents.settled["end"] == {"unknown": 1}
    assert run.incidents.badput["end"] == {"unknown": 8 * (5 + 851 + 10 + 20)}


def test_the_end_of_a_run_settles_what_it_lost_before() -> None:
    lines = [*A1, *A2, finish(251, "a2")]
    assert run_of(lines).incidents.settled["end"] == {"unknown": 1}
    # The run's own end is no loss; coming back after it makes it one.
    stopped = [*A1, finish(149, "a1", "stopped")]
    assert run_of(stopped).incidents.settled["end"] == {}
    assert run_of([*stopped, *later(A2, 600)]).incidents.settled["end"] == {"planned": 1}


@pytest.mark.parametrize(("status", "cause"), [("preempted", "planned"), ("resized", "planned"), ("failed", "unknown")])
def test_a_planned_end_costs_too_and_is_called_so(status: str, cause: str) -> None:
    run = run_of(later([*A1, finish(149, "a1", status), *A2], 600))
    assert run.incidents.settled["end"] == {cause: 1}
    held = 0 if status == "preempted" else 51
    assert run.incidents.badput["end"] == {cause: 8 * (5 + held + 10 + 20)}


def test_evidence_counts_whenever_it_arrives_and_however_often() -> None:
    item = evidence("xid", 143, gpu="GPU-7", detail="79")
    base = later([*A1, *A2], 505)
    expected = run_of(seen(base, 3, item)).incidents.settled["end"]
    assert expected == {"gpu": 1}
    for number in range(3, len(base) - 1):
        assert run_of(seen(base, number, item)).incidents.settled["end"] == expected
        repeated = [{**line, "evidence": [item]} if k >= number else line for k, line in enumerate(base)]
        assert run_of([*repeated, *repeated]).incidents.settled["end"] == expected
        assert run_of([*base[:6], {**A1[3], "evidence": [item]}, *base[6:]]).incidents.settled["end"] == expected


def test_a_count_that_goes_on_after_the_loss_still_explains_it() -> None:
    lines = seen([*A1, *A2], 3, evidence("xid", 143, gpu="GPU-7", detail="79"))
    lines = seen(lines, 6, evidence("xid", 250, gpu="GPU-7", detail="79", count=2))
    assert run_of(later(lines, 505)).incidents.settled["end"] == {"gpu": 1}


def test_evidence_of_another_time_explains_nothing() -> None:
    for t in (144 - 601, 200 + 301, 1e12):
        run = run_of(later(seen(later([*A1, *A2], 510), 7, evidence("xid", t, detail="79")), 900))
        assert run.incidents.settled["end"] == {"unknown": 1}, t


def two_nodes(last: float) -> list[Line]:
    """Return an attempt on two nodes, the second one's last record at that time, and the next attempt without it."""
    lines = [start(100, "a1"), start(100, "a1", source="h2")]
    for t in range(120, 201, 10):
        lines.append(snapshot(t, "a1", (t - 110) // 10, more={"rank": 0}, startup=10, step=t - 110.0))
        if t <= last:
            lines.append(snapshot(t, "a1", (t - 110) // 10, "h2", more={"rank": 8}, startup=10, step=t - 110.0))
    lines.append({**snapshot(205, "a1", 9, startup=10, step=90), "gone": True})
    lines += [start(260, "a2", step=9, source=source) for source in ("h1", "h3")]
    return [*lines, snapshot(600, "a2", 42, startup=10, step=330)]


def test_a_node_that_falls_silent_without_a_word_is_evidence() -> None:
    run = run_of(two_nodes(160))
    [incident] = views.figures(run, 600)["incidents"]
    assert (run.incidents.settled["end"], incident["host"]) == ({"host": 1}, "h2")
    # Its last word may be late, or the next attempt's first.
    word = {**snapshot(204, "a1", 9, "h2", startup=10, step=94), "gone": True}
    back = start(260, "a2", step=9, source="h2")
    for line in (word, back):
        lines = two_nodes(160)
        assert run_of([*lines[:-1], line, lines[-1]]).incidents.settled["end"] == {"unknown": 1}
    # After a reboot it is back too.
    lines = two_nodes(160)
    rebooted = snapshot(590, "a2", 41, "h2", startup=10, step=320)
    assert run_of([*lines[:-1], rebooted, lines[-1]]).incidents.settled["end"] == {"host": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xid", "evidence: Expected array | null, got str"),
        ([evidence("xid", 1)] * (MAX_EVIDENCE + 1), f"evidence: Expected array of length <= {MAX_EVIDENCE}"),
        ([7], "evidence[0]: Expected object, got int"),
        ([evidence("xid", 1), {"kind": "xid"}], "evidence[1]: Object missing required field t"),
        ([{"t": 1}], "evidence[0]: Object missing required field kind"),
        ([evidence("xid", float("nan"))], "evidence[0].t: Expected float >= -1e+30"),
        ([evidence("xid", 1, gpu=["GPU"])], "evidence[0].gpu: Expected str, got array"),
        ([evidence("xid", 1, rank=-1)], "evidence[0].rank: Expected int >= 0"),
        ([evidence("xid", 1, count="2")], "evidence[0].count: Expected float, got str"),
    ],
)
def test_evidence_that_is_none_is_refused_with_the_reason(given: Any, message: str) -> None:
    with pytest.raises(RecordError) as error:
        LedgerRecord.parse({**A1[1], "evidence": given})
    assert str(error.value) == message


def test_unknown_kinds_are_kept_as_text_and_explain_nothing() -> None:
    items = [evidence("cosmic_ray", 143, detail="x" * 500, port="a\x1b[2J\nb", rank=3), {"kind": "k" * 100, "t": 143}]
    run = run_of(later(seen([*A1, *A2], 3, *items), 505))
    assert run.incidents.settled["end"] == {"unknown": 1}
    kept = {item.kind: item for item in run.incidents.evidence.of(frozenset({"h1"}))}
    assert set(kept) == {"cosmic_ray", "k" * 64}
    assert (kept["cosmic_ray"].detail, kept["cosmic_ray"].port, kept["cosmic_ray"].rank) == ("x" * 200, "a?[2J?b", 3)


@pytest.mark.parametrize("name", ["tenant", "attempt", "source"])
def test_half_a_character_is_refused(name: str) -> None:
    with pytest.raises(RecordError, match=rf"^{name}: half a character"):
        LedgerRecord.parse({**A1[1], name: json.loads(r'"\ud83d"')})


PLAIN = st.one_of(st.integers(0, 500), st.sampled_from([0.5, 1e-300, 1e30]))
ODD = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=8), st.lists(st.integers()))
TEXTS = st.one_of(st.sampled_from(["xid", "79", "oom", "link_down"]), st.text(min_size=1, max_size=8))


def records(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Line]:
    """Return records whose fields have these values, and defaults elsewhere."""
    items = st.fixed_dictionaries(
        {"kind": TEXTS, "t": value},
        optional={"gpu": TEXTS, "port": TEXTS, "detail": TEXTS, "count": value, "rank": value},
    )
    numbers = (
        "step",
        "committed_step",
        "restored_step",
        "rank",
        "gpus",
        "started",
        "submitted",
        "model_flops",
        "peak_flops",
        "open_step_seconds",
    )
    return st.fixed_dictionaries(
        {
            "t": PLAIN,
            "run": st.just("r"),
            "attempt": st.sampled_from(["a", "b", "c"]),
            "source": st.sampled_from(["h1", "h2"]),
            "event": st.sampled_from(["start", "snapshot", "finish", "submitted"]),
        },
        optional={
            "evidence": st.lists(items, max_size=3),
            "gone": st.booleans(),
            "activity_seconds": st.dictionaries(st.sampled_from(["startup", "step", "x"]), value, max_size=3),
            "status": st.sampled_from(["failed", "stopped", "completed", "preempted"]),
            **dict.fromkeys(numbers, value),
        },
    )


@pytest.mark.slow
@given(st.lists(st.one_of(records(PLAIN), records(PLAIN), records(st.one_of(PLAIN, ODD))), max_size=15))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whatever_a_record_holds_is_refused_or_accounted_for(lines: list[Line]) -> None:
    ledger = Ledger()
    for line in lines:
        try:
            ledger.apply(line)
        except RecordError:
            continue
        samples(ledger, 250.0)
        for key, run in list(ledger.runs.items()):
            record = views.figures(run, 250.0)
            assert all(line.isprintable() for line in run_table(record).split("\n"))
            assert attempts_csv(record).count("\n") == 1 + len(record["attempts"])
            ledger.runs[key] = read_back(run)


def places_of(run: RunLedger, host: str) -> list[list[Any]]:
    places: list[list[Any]] = (run.incidents.evidence.to_json(host) or [[]])[0]
    return places


def test_the_evidence_that_hosts_report_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "MAX_HOSTS", 8)
    run = run_of(A1)
    for host in range(20):
        for turn in range(20):
            items = [evidence("xid", 144 + turn, detail=f"{turn}-{k}") for k in range(MAX_EVIDENCE)]
            run.apply(LedgerRecord.parse({**snapshot(200 + turn, "a1", 3, f"h{host}", startup=1.0), "evidence": items}))
    hosts = list(run.incidents.evidence.hosts())
    assert len(hosts) <= 8
    assert max(len(places_of(run, host)) for host in hosts) == evidence_module.MAX_PLACES
    for turn in range(100):
        item = evidence("xid", 300.0 + turn, count=turn)
        run.apply(LedgerRecord.parse({**snapshot(400 + turn, "a1", 3, "h0", startup=1.0), "evidence": [item]}))
    assert [len(times) for *place, times in places_of(run, "h0") if place[4] == ""] == [evidence_module.MAX_TIMES]
    # And what is a day old is forgotten, though the attempt may have stood still all the time.
    run.apply(LedgerRecord.parse({**snapshot(90000, "a1", 3, "h0", startup=1.0), "evidence": [evidence("oom", 90000)]}))
    assert [place[0] for place in places_of(run, "h0")] == ["oom"]


def test_evidence_survives_being_written_down() -> None:
    book = RunEvidence()
    for item in LedgerRecord.parse(
        {
            **A1[1],
            "evidence": [
                evidence("xid", 100, gpu="GPU-1", detail="79"),
                evidence("exception", 105, rank=4, detail="ValueError"),
            ],
        }
    ).evidence:
        book.add(item, 0)
    copy = RunEvidence()
    copy.restore(json.loads(json.dumps({host: book.to_json(host) for host in book.hosts()})))
    assert set(copy.of(frozenset({"h1"}))) == set(book.of(frozenset({"h1"})))


def test_a_new_generation_has_incidents_of_its_own() -> None:
    again = [{**line, "t": line["t"] + 1000, "attempt": f"b-{line['attempt']}"} for line in [*A1, *A2]]
    ledger = account([submitted(90), *A1, *A2, finish(251, "a2"), *again])
    old, new = ledger.runs["", "r#1"], ledger.runs["", "r"]
    assert (old.incidents.settled["end"], new.incidents.settled["end"], len(new.incidents.by_number)) == (
        {"unknown": 1},
        {},
        1,
    )
    assert isinstance(ledger, Ledger)


def test_a_clock_that_is_set_forward_by_an_hour_inside_an_attempt_costs_nothing() -> None:
    """As a ledger on another host receives it, whose own clock is right."""

    def fed(reports: list[tuple[float, float]], *more: tuple[Line, float]) -> RunLedger:
        run = RunLedger("", "r", 60.0)
        for line in A1:
            run.apply(LedgerRecord.parse(line), received=line["t"])
        lines = [(snapshot(t + ahead, "a1", (t - 110) // 10, startup=10, step=t - 110), t) for t, ahead in reports]
        for line, received in (*lines, *more):
            run = read_back(run)
            run.apply(LedgerRecord.parse(line), received=received)
        return run

    run = fed([(150, 0), (160, 3600), (170, 3600), (180, 3600)], (finish(185 + 3600, "a1"), 185))
    seconds = {bucket: value for bucket, value in run.buckets.seconds.items() if value}
    assert seconds == pytest.approx({"startup": 10, "productive": 70, "other": 5})
    assert run.state() == "completed"
    assert run.wall(185) == pytest.approx(85)
    # The next attempt starts by the new clock, and when that is set right again nothing is lost either.
    back = (snapshot(260, "a2", 10, startup=10, step=20), 260.0)
    run = fed(
        [(150, 0), (160, 3600)],
        (start(200 + 3600, "a2", step=5), 200),
        (snapshot(250 + 3600, "a2", 9, startup=10, step=30), 250),
        back,
    )
    assert run.buckets.seconds["down"] == pytest.approx(40)
    # Time that the ledger's clock has seen pass is no step of a clock: the host was suspended.
    run = RunLedger("", "r", 60.0)
    for line in (*A1, snapshot(160 + 3600, "a1", 5, startup=10, step=50), finish(165 + 3600, "a1")):
        run.apply(LedgerRecord.parse(line), received=line["t"])
    assert run.wall(run.reporters.last) == pytest.approx(65 + 3600)
