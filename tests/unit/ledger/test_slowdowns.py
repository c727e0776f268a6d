"""Slow stretches and stalls: what the ledger makes of a run that is slower than it was, and of one that is not."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.attribution import LOSSES
from flopwatch.ledger.incidents import MAX_HISTORY
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.tables import attempts_csv, run_table
from tests.support.histories import Line, check_attempts, mangled, read_back, samples, snapshot_of

STEP, GPUS = 8.0, 8
Phases = list[tuple[str, float]]


def steps(count: int, each: float = STEP, save: float = 3.0, spread: float = 0.0, seed: int = 1) -> Phases:
    """Return so many steps, and a checkpoint after every 75 of them."""
    chance, phases = random.Random(seed), Phases()
    for number in range(1, count + 1):
        phases.append(("step", each * max(0.1, 1 + chance.gauss(0.0, spread))))
        phases += [("checkpoint_save", save)] if number % 75 == 0 else []
    return phases


def snapshots(phases: Phases, every: float = 15.0, evidence: Iterable[tuple[float, Line]] = ()) -> list[Line]:
    """Return the records of an attempt that does this from 0 on, with what its node had seen by then."""
    identity = {
        "run": "r",
        "attempt": "a",
        "source": "n0",
        "rank": 0,
        "gpus": GPUS,
        "event": "snapshot",
        "started": 0.0,
    }
    lines: list[Line] = []
    seconds, began, step, committed = {"step": 0.0}, 0.0, 0, 0
    for name, lasts in (("startup", 60.0), *phases):
        while (age := (len(lines) + 1) * every) < began + lasts:
            spent = {**seconds, name: seconds.get(name, 0.0) + age - began}
            known = [item for t, item in evidence if t <= age]
            lines.append(
                {
                    **identity,
                    "t": age,
                    "step": step,
                    "committed_step": committed,
                    "activity_seconds": spent,
                    "open_step_seconds": age - began if name == "step" else 0.0,
                    **({"evidence": known} if known else {}),
                }
            )
        began, seconds = began + lasts, {**seconds, name: seconds.get(name, 0.0) + lasts}
        step += name == "step"
        committed = step if name == "checkpoint_save" else committed
    return lines


def run_of(lines: Iterable[Line]) -> RunLedger:
    ledger = Ledger()
    for line in lines:
        ledger.apply(line)
    return ledger.runs["", "r"]


def losses(lines: Iterable[Line]) -> list[tuple[str, str, str]]:
    """Return kind, largest part and cause of each loss."""
    record = views.figures(run_of(lines), 1e6)
    return [(one["kind"], one["status"] or one["waited"], one["cause"]) for one in record["incidents"]]


def at(t: float, kind: str, **more: Any) -> tuple[float, Line]:
    return t, {"kind": kind, "t": t, "count": 1, **more}


def test_a_loss_that_goes_on_is_kept_however_many_come_after_it() -> None:
    ledger, spent, step = Ledger(), {"step": 0.0, "data_stall": 0.0}, 0

    def go(steps: int, activity: str, seconds: float) -> None:
        nonlocal step
        step, spent[activity] = step + steps, spent[activity] + seconds
        ledger.apply(
            {
                "run": "r",
                "attempt": "a",
                "source": "n0",
                "rank": 0,
                "gpus": GPUS,
                "event": "snapshot",
                "started": 0.0,
                "t": sum(spent.values()),
                "step": step,
                "activity_seconds": dict(spent),
            }
        )

    for each in (1.0,) * 100 + (1.5,) * 60:
        go(10, "step", 10 * each)
    for _ in range(MAX_HISTORY + 20):
        go(1, "step", 1.5)
        go(1, "step", 1.5)
        go(0, "data_stall", 70.0)
        go(1, "step", 1.5)
    kinds = [one["kind"] for one in views.figures(ledger.runs["", "r"], 1e6)["incidents"]]
    assert (kinds.count("slow"), len(kinds)) == (1, MAX_HISTORY)


# An hour of steps takes 60 + 450 * 8 + 6 * 3 = 3678 s.
HOUR = steps(450)


@pytest.mark.parametrize(
    ("activity", "seconds", "cause", "status"),
    [
        ("data_stall", 300.0, "data", "data_stall"),
        ("checkpoint_save", 300.0, "storage", "checkpoint_save"),
        ("step", 300.0, "unknown", "step"),
    ],
)
def test_a_stall_is_a_loss_that_costs_what_it_took_beyond_the_usual(
    activity: str, seconds: float, cause: str, status: str
) -> None:
    lines = snapshots([*HOUR, (activity, seconds), *steps(75)])
    run = run_of(lines)
    [stall] = views.figures(run, 1e6)["incidents"]
    assert (stall["kind"], stall["waited"], stall["cause"], stall["settled"]) == ("stall", status, cause, True)
    # A step of 300 s took 292 s longer than usual; a checkpoint of 300 s comes right after one of 3 s, which is usual.
    extra = {"step": 292.0, "checkpoint_save": 300.0, "data_stall": 300.0}[activity]
    assert (stall["seconds"], stall["gpu_seconds"]) == pytest.approx((extra, GPUS * extra), abs=0.1)
    assert (stall["began"], stall["ended"]) == pytest.approx((3678, 3678 + seconds), abs=17)
    assert stall["back"] == stall["ended"]
    # It is in its bucket, as it was without being called a loss.
    bucket = "productive" if activity == "step" else activity
    assert run.buckets.gpu_seconds[bucket] >= stall["gpu_seconds"]
    assert run.incidents.badput["stall"] == {cause: stall["gpu_seconds"]}
    assert run.incidents.settled == {"end": {}, "slow": {}, "stall": {cause: 1}}


def test_a_slow_stretch_is_a_loss_that_costs_what_its_steps_took_beyond_the_usual() -> None:
    throttled = at(3700, "throttle", gpu="GPU-5", detail="hw_thermal_slowdown")
    lines = snapshots([*HOUR, *steps(100, 1.5 * STEP), *steps(75)], evidence=[throttled])
    run = run_of(lines)
    [slow] = views.figures(run, 1e6)["incidents"]
    assert {name: slow[name] for name in ("kind", "cause", "confidence", "host", "gpu", "settled")} == {
        "kind": "slow",
        "cause": "thermal",
        "confidence": "likely",
        "host": "n0",
        "gpu": "GPU-5",
        "settled": True,
    }
    # 100 steps of 4 s more; up to a minute of it on either side cannot be separated from what is usual.
    assert slow["gpu_seconds"] == pytest.approx(GPUS * 400, rel=0.06)
    assert (slow["began"], slow["ended"]) == pytest.approx((3678, 3678 + 1203), abs=60)
    assert run.incidents.badput["slow"] == {"thermal": slow["gpu_seconds"]}


def test_steps_that_wait_for_data_are_a_slow_stretch_of_data() -> None:
    waiting = [phase for step in steps(100, save=0) for phase in (step, ("data_stall", 4.0))]
    assert losses(snapshots([*HOUR, *waiting, *steps(75)])) == [("slow", "data_stall", "data")]


def test_a_slow_stretch_is_shown_while_it_lasts_and_ends_with_its_attempt() -> None:
    lines = snapshots([*HOUR, *steps(60, 1.5 * STEP)])
    [slow] = views.figures(run_of(lines), 1e6)["incidents"]
    assert (slow["kind"], slow["back"], slow["settled"]) == ("slow", None, False)
    assert GPUS * 180 <= slow["gpu_seconds"] <= GPUS * 240
    end = {**lines[-1], "t": lines[-1]["t"] + 1, "event": "finish", "status": "failed"}
    slow, failed = views.figures(run_of([*lines, end]), 1e6)["incidents"]
    assert (slow["kind"], slow["back"]) == ("slow", slow["ended"])
    assert slow["gpu_seconds"] == pytest.approx(GPUS * 240, rel=0.03)
    assert (failed["kind"], failed["status"]) == ("end", "failed")
    # A run that completes settles it.
    run = run_of([*lines, {**end, "status": "completed"}])
    assert run.incidents.settled["slow"] == {"unknown": 1}


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([*HOUR, *steps(20, 1.5 * STEP), *HOUR], id="slow for four minutes"),
        pytest.param([*HOUR, *steps(450, 1.15 * STEP), *HOUR], id="a little slower"),
        pytest.param([*HOUR, ("data_stall", 50.0), *HOUR], id="a wait of 50 s"),
        pytest.param(steps(450, save=200.0), id="checkpoints that always take so long"),
        pytest.param(
            [*steps(450, save=200.0), ("checkpoint_save", 255.0), *HOUR], id="and one that takes a little more"
        ),
        pytest.param([*HOUR, ("evaluation", 900.0), *HOUR], id="an evaluation"),
        pytest.param([*HOUR, ("compile", 300.0), *HOUR], id="a compilation"),
        pytest.param([("data_stall", 600.0), *HOUR], id="a stall before anything is usual"),
        pytest.param([*steps(50, 2 * STEP), *HOUR], id="slow at the beginning"),
        pytest.param(steps(2000, 300.0)[:60], id="steps of five minutes"),
    ],
)
@pytest.mark.parametrize("every", [5.0, 15.0, 60.0])
def test_what_is_usual_or_short_is_no_loss(phases: Phases, every: float) -> None:
    assert losses(snapshots(phases, every)) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("each", "spread", "every"), [(8.0, 0.15, 15.0), (2.0, 0.25, 15.0), (30.0, 0.1, 60.0)])
def test_a_steady_noisy_run_of_six_hours_has_no_losses(each: float, spread: float, every: float, seed: int) -> None:
    assert losses(snapshots(steps(int(6 * 3600 / each), each, spread=spread, seed=seed), every)) == []


@pytest.mark.parametrize("every", [5.0, 15.0, 60.0])
def test_losses_do_not_depend_on_how_often_a_node_speaks(every: float) -> None:
    phases = [*HOUR, ("data_stall", 400.0), *HOUR, *steps(225, 1.4 * STEP), *HOUR]
    stall, slow = views.figures(run_of(snapshots(phases, every)), 1e6)["incidents"]
    assert (stall["kind"], stall["seconds"]) == ("stall", pytest.approx(400, rel=0.01))
    assert (slow["kind"], slow["seconds"]) == ("slow", pytest.approx(225 * 0.4 * STEP, rel=0.12))


def test_a_node_that_speaks_every_ten_minutes_shows_slow_stretches_and_whole_stalls() -> None:
    phases = [*HOUR, *HOUR, *steps(300, 1.5 * STEP), *HOUR, ("data_stall", 3000.0), *HOUR]
    slow, stall = views.figures(run_of(snapshots(phases, every=600.0)), 1e6)["incidents"]
    assert (slow["kind"], slow["seconds"]) == ("slow", pytest.approx(300 * 0.5 * STEP, rel=0.3))
    assert (stall["kind"], stall["seconds"]) == ("stall", pytest.approx(3000, rel=0.01))


def test_after_four_slow_hours_that_is_how_the_run_is() -> None:
    lines = snapshots([*HOUR, *steps(2700, 1.5 * STEP)], every=60.0)  # nine hours
    [slow] = views.figures(run_of(lines), 1e6)["incidents"]
    assert slow["back"] - slow["began"] == pytest.approx(4 * 3600, rel=0.02)


def test_a_stall_that_ends_the_attempt_is_the_end_and_nothing_else() -> None:
    lines = snapshots([*HOUR, ("step", 900.0)])
    end = {**lines[-1], "t": lines[-1]["t"] + 1, "event": "finish", "status": "failed"}
    assert losses([*lines, end]) == [("end", "failed", "unknown")]


@pytest.mark.parametrize(("activity", "cause"), [("checkpoint_save", "storage"), ("data_stall", "data")])
def test_a_wait_that_the_attempt_does_not_survive_is_a_part_of_its_end(activity: str, cause: str) -> None:
    lines = snapshots([*HOUR, (activity, 900.0)])
    end = {**lines[-1], "t": lines[-1]["t"] + 1, "event": "finish", "status": "failed"}
    run = run_of([*lines, end])
    [loss] = views.figures(run, run.reporters.last)["incidents"]
    assert (loss["kind"], loss["waited"], loss["cause"], loss["confidence"]) == ("end", activity, cause, "possible")
    assert loss["gpu_seconds"] == pytest.approx(GPUS * 900, rel=0.03)
    assert (loss["began"], loss["ended"]) == pytest.approx((3678, 4578), abs=16)
    assert run.buckets.gpu_seconds[activity] >= loss["gpu_seconds"] - GPUS * 1


def test_what_is_charged_to_an_end_is_charged_to_nothing_else() -> None:
    first = snapshots([*HOUR, ("step", 4.0)])
    end = {**first[-1], "t": 3690.0, "event": "finish", "status": "failed"}
    # Back to step 375: 75 steps again, with a stall and slow ones among them, then new ones.
    again = [
        {
            **line,
            "t": line["t"] + 4000,
            "started": 4000.0,
            "attempt": "b",
            "step": line["step"] + 375,
            "restored_step": 375,
            "committed_step": 375 + line["committed_step"],
        }
        for line in snapshots([*steps(70), ("data_stall", 600.0), *steps(5), *HOUR])
    ]
    run = run_of([*first, end, *again])
    [loss] = views.figures(run, 1e6)["incidents"]
    assert (loss["kind"], run.buckets.gpu_seconds["data_stall"]) == ("end", GPUS * 600)
    lost = sum(run.buckets.gpu_seconds[name] for name in ("lost", "down", "startup", "data_stall"))
    assert loss["gpu_seconds"] == pytest.approx(lost - GPUS * 60)  # all but the first attempt's startup


def test_a_link_that_went_down_at_the_beginning_of_a_long_stall_is_still_known_at_its_end() -> None:
    down = at(3680, "link_down", port="mlx5_3:1")
    lines = snapshots([*HOUR, ("step", 3 * 3600.0), *steps(75)], every=60.0, evidence=[down])
    [stall] = views.figures(run_of(lines), 1e6)["incidents"]
    assert (stall["kind"], stall["cause"], stall["port"]) == ("stall", "network", "mlx5_3:1")


phases = st.lists(
    st.one_of(
        st.integers(1, 120).map(lambda count: steps(count, spread=0.1)),
        st.integers(20, 120).map(lambda count: steps(count, 1.6 * STEP)),
        st.tuples(st.sampled_from(["data_stall", "checkpoint_save", "step", "evaluation"]), st.integers(1, 600)).map(
            lambda one: [(one[0], float(one[1]))]
        ),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.long
@given(phases, st.sampled_from([15.0, 60.0]), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_on_every_history_losses_only_grow_and_are_a_part_of_their_buckets(
    parts: list[Phases], every: float, seed: int
) -> None:
    ledger, live = Ledger(), Ledger()
    before: dict[tuple[str, ...], float] = {}
    lines = snapshots([*steps(90), *(phase for part in parts for phase in part), *steps(20)], every)
    lines = list(mangled([{**line, "gpus": GPUS * (1 + number // 200 % 2)} for number, line in enumerate(lines)], seed))
    for line in lines:
        ledger.apply(line)
        live.apply(line)
        run = ledger.runs["", "r"]
        counters = {
            (row.name, *labels): value
            for row, labels, value in samples(ledger, run.reporters.last)
            if row.type == "counter"
        }
        assert {name: value for name, value in before.items() if counters[name] < value} == {}
        before = counters
        ledger.runs["", "r"] = read_back(run)
    run = ledger.runs["", "r"]
    assert snapshot_of(run) == snapshot_of(live.runs["", "r"])
    check_attempts(run)
    check_losses(run)
    ended = {**lines[-1], "t": run.reporters.last + 1, "event": "finish", "status": "completed"}
    ledger.apply(ended)
    check_losses(ledger.runs["", "r"], settled=True)


def check_losses(run: RunLedger, *, settled: bool = False) -> None:
    """Assert that each loss is counted once, and that losses are no more than the buckets that they are a part of."""
    incidents = list(run.incidents.by_number.values())
    for kind in LOSSES:
        total = sum(one.gpu_seconds for one in incidents if one.kind == kind and one.settled)
        assert sum(run.incidents.badput[kind].values()) == pytest.approx(total)
    inside = [one for one in incidents if one.kind != "end"]
    held = sum(run.buckets.gpu_seconds[bucket] for bucket in ("productive", "data_stall", "checkpoint_save"))
    assert sum(one.gpu_seconds for one in inside) <= held + 1e-6
    assert sum(one.gpu_seconds for one in incidents) <= sum(run.buckets.gpu_seconds.values()) + 1e-6
    for waited in ("data_stall", "checkpoint_save"):
        assert sum(one.seconds for one in inside if one.kind == "stall" and one.waited == waited) <= (
            run.buckets.seconds[waited] + run.buckets.seconds["productive"] + 1e-6
        )
    # No two at the same time, but that a stall may happen in a slow stretch.
    assert overlapping(one for one in inside if one.kind == "slow") == []
    assert overlapping(one for one in inside if one.kind == "stall") == []
    assert all(one.settled for one in incidents) or not settled


def overlapping(incidents: Iterable[Any]) -> list[tuple[float, float]]:
    spans = sorted((one.began, one.ended) for one in incidents)
    return [(ended, began) for (_, ended), (began, _) in pairwise(spans) if began < ended - 1e-6]


def test_every_kind_of_loss_is_served_by_kind_and_cause() -> None:
    run = run_of(snapshots([*HOUR, ("data_stall", 300.0), *steps(75)]))
    samples = [sample for sample in views.families(run, 1e5) if sample[2]]
    served = {labels[2:]: value for row, labels, value in samples if row is m.RUN_INCIDENTS_TOTAL}
    assert served == {("stall", "data"): 1}
    cost = {
        labels[2:]: value
        for row, labels, value in views.families(run, 1e5)
        if row is m.RUN_BADPUT_GPU_SECONDS_TOTAL and value
    }
    assert cost == {("stall", "data"): pytest.approx(GPUS * 300, rel=0.001)}


def test_people_are_shown_when_a_run_was_slow_or_stood_still_and_a_spreadsheet_what_that_cost() -> None:
    throttled = at(7700, "throttle", gpu="GPU-5", detail="hw_thermal_slowdown")
    lines = snapshots([*HOUR, ("data_stall", 300.0), *HOUR, *steps(100, 1.5 * STEP), *HOUR], evidence=[throttled])
    record = views.figures(run_of(lines), 1e6)
    shown = run_table(record).split("\n\n")[-1].splitlines()
    assert shown == [
        "attempt 1 stood still for 5.2 min from 1970-01-01 01:01:15Z on: data (likely), 0.67 GPU-hours lost; waiting "
        "for data on n0, 0 s after it began",
        "attempt 1 was slow for 21.3 min from 1970-01-01 02:06:09Z on: thermal (likely) on n0 GPU-5, 0.89 GPU-hours "
        "lost; clocks throttled (hw_thermal_slowdown) on GPU-5 of n0, 131 s after it began",
    ]
    [row] = csv.DictReader(io.StringIO(attempts_csv(record)))
    stall, slow = record["incidents"]
    assert (float(row["stall_gpu_seconds"]), float(row["slow_gpu_seconds"])) == (
        stall["gpu_seconds"],
        slow["gpu_seconds"],
    )
    assert row["incident_cause"] == ""
