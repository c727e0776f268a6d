"""The run ledger's arithmetic: worked histories with exact figures, and generated ones with what must hold on all."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import ACTIVITIES, LedgerRecord, RecordError
from tests.support import TESTS
from tests.support.histories import (
    A1,
    Generated,
    Line,
    account,
    buckets,
    check_attempts,
    figures,
    finish,
    histories,
    mangled,
    read_back,
    samples,
    snapshot,
    snapshot_of,
    start,
    submitted,
)

HISTORIES = TESTS / "captures" / "histories"


def worked_history() -> list[Line]:
    return [json.loads(line) for line in (HISTORIES / "crash_and_move.jsonl").read_text().splitlines()]


def test_the_worked_history_of_a_crash_and_a_move_has_the_known_figures() -> None:
    run = figures(worked_history())
    assert buckets(worked_history()) == {
        "productive": 6000,
        "lost": 195,
        "startup": 600,
        "checkpoint_save": 200,
        "down": 900,
        "queue": 600,
    }
    assert (round(run["goodput"], 3), round(run["ettr"], 3)) == (0.760, 0.706)
    assert run["wall_seconds"] == 7895
    # 600 steps of 3.2e16 FLOPs, over 8 GPUs of 989.4 TFLOP/s held for the whole wall clock.
    assert run["effective_mfu"] == pytest.approx(600 * 3.2e16 / (8 * 989.4e12 * 7895), rel=1e-12)
    assert run["gpu_seconds"] == {name: 0 if name == "queue" else 8 * s for name, s in run["buckets"].items()}
    assert (run["attempts"], run["state"], run["ends"]["silent"], run["ends"]["completed"]) == (2, "completed", 1, 1)


def test_step_time_is_open_until_the_step_ends() -> None:
    assert buckets(A1) == {"startup": 10, "productive": 34}
    assert buckets([*A1, snapshot(147, "a1", 3, startup=10, step=37)]) == {"startup": 10, "productive": 34, "open": 3}
    # With the age of the open step reported, the 4 s of step 4 are not taken for step 3.
    with_age = [*A1[:3], snapshot(144, "a1", 3, startup=10, step=34, more={"open_step_seconds": 4})]
    assert buckets(with_age) == {"startup": 10, "productive": 30, "open": 4}
    assert buckets([*with_age, snapshot(150, "a1", 4, startup=10, step=40)]) == {"startup": 10, "productive": 40}


def test_a_first_step_that_outlasts_a_push_stays_open_and_costs_no_goodput() -> None:
    def open_step(t: float, seconds: float) -> Line:
        more = {"started": 100.0, "open_step_seconds": seconds}
        return snapshot(t, "a1", None, more=more, startup=10, step=seconds)

    first = [open_step(115, 5), open_step(120, 10)]
    assert buckets(first) == {"startup": 10, "open": 10}
    later = [*first, snapshot(180, "a1", 3, more={"open_step_seconds": 0.0}, startup=10, step=70)]
    assert buckets(later) == {"startup": 10, "productive": 70}
    assert figures(later)["provisional_seconds"] == 70


def test_a_restarted_exporter_that_not_all_its_ranks_have_reached_counts_no_flops_twice() -> None:
    def with_flops(t: float, step: float, flops: float) -> Line:
        return snapshot(t, "a1", step, more={"model_flops": flops, "peak_flops": 100.0}, startup=10, step=t - 110)

    before = [start(100, "a1"), with_flops(110, 0, 0), with_flops(150, 4, 400)]
    # One of four ranks, then two of them, then all.
    after = [*before, with_flops(160, 5, 125), with_flops(170, 6, 300), with_flops(180, 7, 700)]
    assert account(after).runs["", "r"].buckets.retained == 700
    # A rank that was replaced begins at 0 for good.
    replaced = [*before, *(with_flops(160 + 10 * n, 5 + n, 100 + 50 * n) for n in range(12))]
    assert account(replaced).runs["", "r"].buckets.retained == 400 + 5 * 50


def test_a_crash_loses_the_open_step_and_what_is_executed_again() -> None:
    again = [
        *A1,
        snapshot(147, "a1", 3, startup=10, step=37),
        start(200, "a2", step=1),
        snapshot(210, "a2", 1, startup=10, step=0),
        snapshot(250, "a2", 5, startup=10, step=40),
    ]
    # a1: 34 s for steps 1-3 and 3 s open, lost; a2: steps 2 and 3 again, then 4 and 5.
    assert buckets(again) == {"startup": 20, "productive": 54, "lost": 23, "down": 53}


def test_a_clean_resume_after_the_last_step_does_not_hide_the_down_time() -> None:
    resumed = [*A1[:3], start(200, "a2", step=2), snapshot(230, "a2", 4, startup=10, step=20)]
    assert buckets(resumed) == {"startup": 20, "productive": 40, "down": 70}


def test_a_crash_loop_is_charged_for_every_repetition() -> None:
    lines = list(A1[:3])
    for loop in range(2, 5):
        lines += [start(100 * loop, f"a{loop}"), snapshot(100 * loop + 30, f"a{loop}", 2, startup=10, step=20)]
    assert buckets(lines) == {"startup": 40, "productive": 20, "lost": 60, "down": 70 * 3}


def test_a_rollback_inside_an_attempt_is_lost_until_the_mark_is_passed() -> None:
    lines = [*A1[:3], snapshot(160, "a1", 5, startup=10, step=50), snapshot(180, "a1", 3, startup=10, step=70)]
    assert buckets(lines) == {"startup": 10, "productive": 50, "lost": 20}
    lines.append(snapshot(220, "a1", 7, startup=10, step=110))
    assert buckets(lines) == {"startup": 10, "productive": 70, "lost": 40}


def test_a_restore_inside_an_attempt_is_no_step_and_what_follows_it_counts_from_there() -> None:
    def restored(step: int) -> Line:
        return {"restored_step": step}

    # Steps 4 to 6 between two snapshots. Steps 4 and 5 are repeated.
    lines = [*A1[:2], snapshot(160, "a1", 5, startup=10, step=50, more=restored(0))]
    lines.append(snapshot(190, "a1", 6, startup=10, step=80, more=restored(3)))
    assert buckets(lines) == {"startup": 10, "productive": 60, "lost": 20}
    # The position is 0 until the checkpoint is loaded; then steps 5 and 6. Step 6 is new.
    lines = [*A1[:2], snapshot(160, "a1", 5, startup=10, step=50), start(200, "a2"), snapshot(205, "a2", 0, startup=5)]
    lines.append(snapshot(230, "a2", 6, startup=10, step=20, more=restored(4)))
    assert buckets(lines) == {"startup": 20, "productive": 60, "lost": 10, "down": 40}


def test_until_the_process_is_seen_gone_it_is_lost_and_after_that_down() -> None:
    gone = {**A1[-1], "t": 150, "gone": True}
    assert buckets([*A1, gone]) == {"startup": 10, "productive": 34, "lost": 6}
    run = figures([*A1, gone], now=190)
    assert (run["state"], run["open_seconds"], run["ends"]["failed"]) == ("down", 40, 1)
    later = [*A1, gone, start(200, "a2", step=3), snapshot(210, "a2", 3, startup=10, step=0)]
    assert buckets(later) == {"startup": 20, "productive": 34, "lost": 6, "down": 50}


@pytest.mark.parametrize(
    ("status", "rest"),
    [("failed", "lost"), ("preempted", "lost"), ("resized", "lost"), ("completed", "other"), ("stopped", "other")],
)
def test_a_finish_brackets_the_time_since_the_last_snapshot(status: str, rest: str) -> None:
    lines = [*A1, finish(149, "a1", status)]
    assert buckets(lines) == {"startup": 10, "productive": 34, rest: 5}
    run = figures(lines, now=249)
    ended = status in ("completed", "stopped")
    assert run["state"] == (status if ended else "down" if status == "failed" else "queued")
    assert run["wall_seconds"] == (49 if ended else 149)
    assert run["ends"][status] == 1


def test_down_time_is_held_inside_an_allocation_and_not_between_two() -> None:
    restart = [start(200, "a2", step=3), snapshot(210, "a2", 3, startup=10, step=0)]
    held = {"failed": 8 * 56, "resized": 8 * 56, "preempted": 0, "stopped": 0}
    for status, gpu_seconds in held.items():
        run = figures([*A1, finish(144, "a1", status), *restart])
        assert (run["buckets"]["down"], run["gpu_seconds"]["down"]) == (56, gpu_seconds)
    run = figures([submitted(90), *A1, submitted(160), *restart])
    assert (run["buckets"]["down"], run["gpu_seconds"]["down"], run["buckets"]["queue"]) == (56, 0, 10)
    assert figures([submitted(90), *A1, submitted(90), *restart])["gpu_seconds"]["down"] == 8 * 56


def test_a_resize_counts_each_attempts_own_gpus() -> None:
    lines = [
        *A1[:3],
        finish(130, "a1", "resized"),
        start(135, "a2", step=2, gpus=16),
        snapshot(155, "a2", 3, startup=10, step=10, more={"gpus": 16}),
    ]
    assert buckets(lines) == {"startup": 20, "productive": 30, "down": 5}
    gpu_seconds = figures(lines)["gpu_seconds"]
    assert (gpu_seconds["startup"], gpu_seconds["productive"], gpu_seconds["down"]) == (
        8 * 10 + 16 * 10,
        8 * 20 + 16 * 10,
        8 * 5,
    )


def test_when_attempts_overlap_the_later_start_owns_the_clock() -> None:
    lines = [
        *A1,
        start(150, "a2", step=3),
        snapshot(160, "a1", 5, startup=10, step=50),
        snapshot(165, "a2", 3, startup=15),
        snapshot(170, "a1", 6, startup=10, step=60),
        snapshot(185, "a2", 5, startup=15, step=20),
        finish(186, "a1"),
    ]
    assert buckets(lines) == {"startup": 25, "productive": 54, "down": 6, "open": 1}
    assert figures(lines)["state"] == "running"


def test_a_start_before_the_last_attributed_second_takes_over_and_counts_nothing_twice() -> None:
    # a2's host is 20 s behind: it starts before the last thing known of a1.
    lines = [
        *A1,
        start(124, "a2", step=3),
        snapshot(134, "a2", 3, startup=10),
        snapshot(164, "a2", 5, startup=20, step=20),
    ]
    run = figures(lines)
    assert run["wall_seconds"] == 64
    assert sum(run["buckets"].values()) == pytest.approx(64)


def test_several_nodes_add_up_and_time_follows_the_lowest_rank() -> None:
    def node(source: str, rank: int, t: float, step: int, /, **activity: float) -> Line:
        more = {"rank": rank, "model_flops": step * 100.0, "peak_flops": 50.0}
        return snapshot(t, "a1", step, source, more=more, **activity)

    lines = [
        start(100, "a1", source="h2", rank=8, peak_flops=50.0),
        start(100, "a1", rank=0, peak_flops=50.0),
        node("h2", 8, 120, 1, startup=10, step=10),
        node("h1", 0, 120, 1, startup=10, step=10),
        # Only rank 0 writes the checkpoint; the others wait for it in their next step.
        node("h2", 8, 140, 2, startup=10, step=30),
        node("h1", 0, 140, 2, startup=10, step=20, checkpoint_save=10),
    ]
    assert buckets(lines) == {"startup": 10, "productive": 20, "checkpoint_save": 10}
    run = figures(lines)
    assert run["gpu_seconds"]["productive"] == 16 * 20
    assert (run["retained_flops"], run["capacity_flops"]) == (400, 100 * 40)

    # Rank 0's node falls silent: h2 is followed from where the books are, and nothing is closed.
    lines += [node("h2", 8, 140 + 10 * k, 2 + k, startup=10, step=30 + 10 * k) for k in range(1, 8)]
    assert buckets(lines) == {"startup": 10, "productive": 90, "checkpoint_save": 10}
    assert figures(lines)["attempts"] == 1

    # A node in its place (its rank 0, a later process) closes nothing either, and adds no GPUs.
    lines += [node("h3", 0, 220, 9, startup=5), node("h3", 0, 230, 10, startup=5, step=10)]
    assert buckets(lines) == {"startup": 20, "productive": 100, "checkpoint_save": 10}
    run = figures(lines)
    assert (run["attempts"], run["ends"]["silent"], run["high_water_step"]) == (1, 0, 10)
    assert [v for row, _, v in samples(account(lines), 230) if row is m.RUN_GPUS] == [16]


def test_an_attempt_ends_with_its_last_live_node() -> None:
    def both(t: float, step: int, seconds: float) -> list[Line]:
        return [snapshot(t, "a1", step, h, startup=10, step=seconds) for h in ("h1", "h2")]

    lines = [start(100, "a1"), start(100, "a1", source="h2"), *both(130, 2, 20)]
    one = [*lines, {**lines[-2], "t": 133, "gone": True}]
    assert figures(one)["state"] == "running"
    assert buckets([*one, {**lines[-1], "t": 136, "gone": True}]) == {"startup": 10, "productive": 20, "lost": 6}
    # What one node explains outweighs that the other just vanished.
    assert figures([*one, finish(136, "a1", "preempted", "h2")])["ends"]["preempted"] == 1
    # Completed is completed, whatever became of the other's last word.
    assert figures([*one, finish(136, "a1", "completed", "h2")])["state"] == "completed"


def test_a_process_that_starts_again_under_the_same_attempt_is_another_attempt_if_no_rank_carried_on() -> None:
    lines = [*A1, snapshot(215, "a1", 3, startup=15), snapshot(235, "a1", 5, startup=15, step=20)]
    assert buckets(lines) == {"startup": 25, "productive": 54, "down": 56}
    assert figures(lines)["attempts"] == 2


def test_a_snapshot_without_a_start_shows_when_its_process_started() -> None:
    assert buckets(A1[1:]) == buckets(A1)
    assert figures(A1[1:], now=144)["wall_seconds"] == 44
    assert buckets([{**A1[3], "started": 100.0}]) == {"startup": 10, "productive": 34}
    # Without a word on where it resumed: from the last durable checkpoint.
    committed = [*A1[:2], snapshot(130, "a1", 2, startup=10, step=20, more={"committed_step": 1})]
    assert buckets([*committed, snapshot(250, "a2", 4, startup=10, step=30)]) == {
        "startup": 20,
        "productive": 40,
        "lost": 10,
        "down": 80,
    }


def test_a_source_that_does_not_know_its_position_has_time_but_no_goodput() -> None:
    lines = [
        snapshot(130, "a1", None, startup=10, step=20),
        snapshot(140, "a1", None, startup=10, step=25, evaluation=5),
    ]
    assert buckets(lines) == {"startup": 10, "other": 25, "evaluation": 5}
    assert (figures(lines)["goodput"], figures(lines)["ettr"]) == (None, None)
    served = {labels[2] for row, labels, _ in samples(account(lines), 140) if row is m.RUN_SECONDS_TOTAL}
    assert served == set(BUCKETS) - {"productive", "lost", "generation", "queue"}


def test_generation_is_a_bucket_of_its_own_that_is_good_and_no_part_of_a_loss() -> None:
    lines = [start(100, "a1"), snapshot(200, "a1", 3, startup=10, step=30, generation=60)]
    assert buckets(lines) == {"startup": 10, "productive": 30, "generation": 60}
    assert (figures(lines)["goodput"], figures([submitted(50), *lines])["ettr"]) == (90 / 100, 90 / 150)
    assert figures(lines)["gpu_seconds"]["generation"] == 8 * 60
    # After a crash, generation before the first step that is new is no cost of the crash.
    resumed = [*lines, start(250, "a2", step=3)]
    resumed += [
        snapshot(300, "a2", 3, startup=20, generation=30),
        snapshot(320, "a2", 5, startup=20, step=20, generation=30),
    ]
    assert buckets(resumed) == {"startup": 30, "productive": 50, "generation": 90, "down": 50}
    assert figures(resumed)["goodput"] == 140 / 220
    (crash,) = views.figures(account(resumed).runs["", "r"], 320)["incidents"]
    assert (crash["seconds"], crash["gpu_seconds"]) == (50 + 20, 8 * (50 + 20))


def test_time_that_no_activity_explains_is_other_once_the_attempt_ends() -> None:
    lines = [start(100, "a1"), snapshot(160, "a1", 2, step=20, mystery=5)]
    assert buckets(lines) == {"productive": 20, "other": 5, "open": 35}
    assert buckets([*lines, start(200, "a2", step=2)]) == {"productive": 20, "other": 40, "down": 40}


def test_the_queue_is_from_the_first_submission_to_the_first_start_whenever_it_becomes_known() -> None:
    assert buckets([submitted(40), submitted(20), *A1]) == {"queue": 80, "startup": 10, "productive": 34}
    assert buckets([*A1, submitted(40), submitted(20)]) == {"queue": 80, "startup": 10, "productive": 34}
    assert buckets([{**A1[0], "submitted": 40.0}, *A1[1:]])["queue"] == 60
    assert figures([submitted(40)])["state"] == "queued"
    assert figures([submitted(40), *A1])["ettr"] == pytest.approx(34 / 104)
    assert figures(A1)["ettr"] is None


def test_a_start_after_completed_is_a_new_generation_and_after_stopped_the_same_run() -> None:
    again = [start(500, "b1"), snapshot(520, "b1", 1, startup=10, step=10)]
    completed = account([submitted(50), *A1, finish(144, "a1"), submitted(480), *again])
    runs = completed.summary()["runs"]
    new, old = runs["r"], runs["r#1"]
    assert (new["buckets"]["productive"], new["wall_seconds"], new["buckets"]["queue"]) == (10, 20, 20)
    assert (old["buckets"]["productive"], old["wall_seconds"], old["buckets"]["queue"]) == (34, 44, 50)
    # The old generation's lines, arriving once more, belong to no attempt.
    for line in [submitted(50), *A1, finish(144, "a1")]:
        completed.apply(line)
    assert completed.summary()["runs"] == runs

    stopped = figures([*A1, finish(144, "a1", "stopped"), *again])
    assert (stopped["buckets"]["lost"], stopped["buckets"]["down"], stopped["attempts"]) == (10, 356, 2)


def test_provisional_is_the_productive_time_above_the_last_durable_checkpoint() -> None:
    lines = list(A1[:3])
    assert figures(lines)["provisional_seconds"] == 20
    lines.append(snapshot(150, "a1", 4, startup=10, step=40, more={"committed_step": 3}))
    assert figures(lines)["provisional_seconds"] == pytest.approx(10)
    lines.append(snapshot(170, "a1", 6, startup=10, step=60, more={"committed_step": 6}))
    assert figures(lines)["provisional_seconds"] == 0


def test_flops_and_capacity_wait_for_every_peak() -> None:
    def known(flops: float, peak: float | None) -> Line:
        return {"model_flops": flops, "peak_flops": peak}

    lines = [start(100, "a1"), snapshot(120, "a1", 1, startup=10, step=10, more=known(300, None))]
    assert figures(lines)["effective_mfu"] is None
    assert not [
        row
        for row, _, _ in samples(account(lines), 120)
        if row in (m.RUN_RETAINED_FLOPS_TOTAL, m.RUN_CAPACITY_FLOPS_TOTAL)
    ]
    lines.append(snapshot(130, "a1", 2, startup=10, step=20, more=known(600, 50)))
    assert figures(lines)["effective_mfu"] == 600 / (50 * 30)
    # Steps 2 and 3. Step 3 is new.
    lines += [start(140, "a2", step=1), snapshot(170, "a2", 3, startup=10, step=20, more=known(600, 50))]
    run = figures(lines)
    assert (run["retained_flops"], run["capacity_flops"]) == (900, 50 * 70)


def test_a_silent_run_is_down_and_runs_again_when_it_reports() -> None:
    ledger = account(A1)
    assert [ledger.summary(now)["runs"]["r"]["state"] for now in (144, 204, 205)] == ["running", "running", "down"]
    ledger.apply(snapshot(744, "a1", 63, startup=10, step=634))
    run = ledger.summary(750)["runs"]["r"]
    assert (run["state"], run["buckets"]["productive"], run["buckets"]["down"]) == ("running", 634, 0)


def test_a_run_can_be_closed_by_hand_and_its_silence_was_down_time() -> None:
    closed = {"t": 1000, "run": "r", "event": "finish", "status": "stopped"}
    assert buckets([*A1, closed]) == {"startup": 10, "productive": 34, "down": 856}
    assert figures([*A1, closed], now=5000)["state"] == "stopped"
    assert Ledger().apply(closed) == {("", "r")}
    assert account([closed]).runs == {}


def test_every_bucket_and_end_is_served_from_zero() -> None:
    found = samples(account([submitted(90), A1[0]]), 100)
    seconds = {labels[2]: value for row, labels, value in found if row is m.RUN_SECONDS_TOTAL}
    assert seconds == dict.fromkeys(BUCKETS, 0.0) | {"queue": 10.0}
    assert {labels[2]: value for row, labels, value in found if row is m.RUN_ATTEMPT_ENDS_TOTAL} == dict.fromkeys(
        ("completed", "stopped", "preempted", "resized", "failed", "silent"), 0
    )
    assert {labels[2]: value for row, labels, value in found if row is m.RUN_STATE} == {
        "queued": 0,
        "running": 1,
        "down": 0,
        "completed": 0,
        "stopped": 0,
    }
    assert all(len(labels) == len(row.labels) for row, labels, _ in found)
    names = [row.name for row, _, _ in found]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": None}, "t: Expected float, got null"),
        ({"t": float("nan")}, "t: Expected float >= -1e+30"),
        ({"t": "12"}, "t: Expected float, got str"),
        ({"t": True}, "t: Expected float, got bool"),
        ({"run": "a b"}, r"run: Expected str matching regex '^[A-Za-z0-9._:/@+-]{1,128}\Z'"),
        ({"run": None}, "run: Expected str, got null"),
        ({"event": None}, "event: Expected str, got null, send one of submitted, start, snapshot, finish"),
        ({"run": ["r"]}, "run: Expected str, got array"),
        ({"event": "crash"}, "event: Invalid enum value 'crash', send one of submitted, start, snapshot, finish"),
        ({"attempt": None}, "attempt: missing"),
        ({"attempt": "a" * 513}, "attempt: Expected str of length <= 512"),
        ({"step": -1}, "step: Expected float >= 0.0"),
        ({"model_flops": 10**400}, "model_flops: Number out of range"),
        ({"activity_seconds": [1]}, "activity_seconds: Expected object | null, got array"),
        ({"activity_seconds": {"step": "1"}}, "activity_seconds[...]: Expected float, got str"),
        ({"activity_seconds": {"step": -0.5}}, "activity_seconds[...]: Expected float >= 0.0"),
        ({"gone": 1}, "gone: Expected bool, got int"),
        (
            {"event": "finish", "status": "cancelled"},
            "status: Invalid enum value 'cancelled', send one of completed, stopped, preempted, resized, failed",
        ),
    ],
)
def test_a_bad_record_is_refused_with_the_field_and_the_reason(change: Line, message: str) -> None:
    ledger = Ledger()
    with pytest.raises(RecordError) as error:
        ledger.apply({**A1[1], **change})
    assert str(error.value) == message
    assert ledger.runs == {}


def test_a_record_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(RecordError, match=r"^Expected object, got array$"):
        LedgerRecord.parse(["t", 1])


def test_json_text_is_read_as_the_object_that_it_has() -> None:
    for line in (A1[1] | {"attempt": 7, "tenant": None, "evidence": None, "activity_seconds": {"x": 1, "y": 2}}, *A1):
        record = LedgerRecord.parse(line)
        assert LedgerRecord.parse(json.dumps(line).encode()) == record
        assert record.activity is None or record.activity.keys() <= set(ACTIVITIES)


# Generated histories: what a cluster did, what its exporters sent, and what the network made of that.


@pytest.mark.slow
@given(histories(clean=True))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_nothing_lost_on_the_way_gives_the_true_seconds(generated: Generated) -> None:
    run = figures(generated.lines)
    assert run["buckets"] == {name: pytest.approx(seconds, abs=1e-5) for name, seconds in generated.truth.items()}
    assert run["retained_flops"] == pytest.approx(generated.steps * 1e15)
    assert run["gpu_seconds"] == {name: pytest.approx(seconds, abs=1e-3) for name, seconds in generated.held.items()}


@pytest.mark.slow
@given(histories(clean=False), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_on_every_history_the_books_balance_and_never_go_back(generated: Generated, seed: int) -> None:
    chance = random.Random(seed)
    ledger, saved = Ledger(), None
    used: list[Line] = []
    latest: dict[tuple[str, str], float] = {}  # FLOPs of each process
    before: dict[tuple[str, ...], float] = {}
    generation = 1
    for line in mangled(generated.lines, seed):
        ledger.apply(line)
        if "model_flops" in line:
            process = line["attempt"], line["source"]
            latest[process] = max(line["model_flops"], latest.get(process, 0.0))
        if not ledger.runs:
            continue
        run = ledger.runs["", "r"]
        found = samples(ledger, run.reporters.last)
        counters = {(row.name, *labels): value for row, labels, value in found if row.type == "counter"}
        if run.generation == generation:  # two nodes' clocks can differ by more than a short run lasts
            assert {series: counters[series] for series, value in before.items() if counters[series] < value} == {}
        before, generation = counters, run.generation

        if run.start is not None:
            attributed = sum(seconds for bucket, seconds in run.buckets.seconds.items() if bucket != "queue")
            assert attributed + run.open(run.reporters.last) == pytest.approx(run.wall(run.reporters.last), abs=1e-4)
            if run.ended is None:
                # Clocks that disagree can put the books ahead of the newest stamp, by no more than they disagree.
                ahead = run.wall(run.reporters.last) - (run.reporters.last - run.start)
                assert -1e-4 <= ahead <= 2 * generated.skew + 1e-4
            assert (
                0
                <= views.summary(run, run.reporters.last)["buckets"]["productive"]
                <= run.wall(run.reporters.last) + 1e-4
            )
            if generated.skew == 0:
                assert run.buckets.retained <= sum(latest.values()) + 1
            check_attempts(run)

        # What was used once changes nothing when it is sent again, at once or later; nor does being written down
        # and read back.
        unused, saved = saved, snapshot_of(run)
        used += [line] if saved != unused else []
        ledger.apply(line)
        ledger.apply(chance.choice(used or [line]))
        assert snapshot_of(run) == saved
        ledger.runs[run.tenant, run.name] = read_back(run)


def test_gpus_that_are_reported_late_were_held_from_the_start() -> None:
    # Four nodes of eight GPUs start up for 120 s and push a second apart; the first step ends after 130 s.
    ledger = Ledger()
    for age in (120.0, 130.0, 140.0):
        for node in range(4):
            activity = {"startup": min(age, 120.0), "step": max(0.0, age - 120)}
            ledger.apply(
                {
                    "t": age + node,
                    "run": "r",
                    "attempt": "a",
                    "source": f"n{node}",
                    "event": "snapshot",
                    "started": float(node),
                    "rank": 8 * node,
                    "gpus": 8,
                    "peak_flops": 8e15,
                    "step": age / 10 - 12,
                    "model_flops": (age - 120) * 1e15,
                    "activity_seconds": activity,
                }
            )
    run = ledger.runs["", "r"]
    assert run.buckets.gpu_seconds["startup"] == pytest.approx(4 * 8 * 120)
    assert run.buckets.gpu_seconds["productive"] == pytest.approx(4 * 8 * 20)
    assert run.buckets.capacity == pytest.approx(4 * 8e15 * 140)


def test_gpus_of_a_node_that_joins_later_are_held_from_then_on() -> None:
    ledger = Ledger()
    for node, born, t in ((0, 0.0, 100.0), (0, 0.0, 200.0), (1, 150.0, 201.0), (0, 0.0, 300.0)):
        ledger.apply(
            {
                "t": t,
                "run": "r",
                "attempt": "a",
                "source": f"n{node}",
                "event": "snapshot",
                "started": born,
                "rank": node,
                "gpus": 1,
                "activity_seconds": {"startup": t - born},
            }
        )
    assert ledger.runs["", "r"].buckets.gpu_seconds["startup"] == pytest.approx(300 + 150)


def test_what_held_up_a_hang_is_looked_for_before_it_and_not_only_before_its_end() -> None:
    # Steps of 10 s until 100; a port goes down at 103, and a watchdog ends the job 12 minutes later.
    ledger = Ledger()
    identity = {"run": "r", "attempt": "a", "source": "n0", "rank": 0, "gpus": 8, "started": 0.0, "step": 10}
    ledger.apply({**identity, "t": 100.0, "event": "snapshot", "activity_seconds": {"step": 100.0}})
    down = [{"kind": "link_down", "t": 103.0, "count": 1, "port": "mlx5_3:1"}]
    ledger.apply(
        {
            **identity,
            "t": 820.0,
            "event": "snapshot",
            "activity_seconds": {"step": 820.0},
            "open_step_seconds": 720.0,
            "evidence": down,
        }
    )
    ledger.apply(
        {
            **identity,
            "t": 821.0,
            "event": "finish",
            "status": "failed",
            "activity_seconds": {"step": 821.0},
            "open_step_seconds": 721.0,
            "evidence": down,
        }
    )
    (incident,) = views.figures(ledger.runs["", "r"], 1000.0)["incidents"]
    assert (incident["cause"], incident["port"]) == ("network", "mlx5_3:1")
