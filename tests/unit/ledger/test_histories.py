"""Small histories whose figures are worked out by hand from the definitions in docs/goodput.md."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.replay import main, replay
from tests.support import TESTS

REFERENCE = TESTS / "captures" / "histories" / "crash_and_move.jsonl"
Line = dict[str, Any]


def line(t: float, event: str, attempt: str = "a", source: str = "h", gpus: int = 8, **more: Any) -> Line:
    return {
        "t": t,
        "run": "r",
        "attempt": attempt,
        "source": source,
        "event": event,
        "gpus": gpus,
        "peak_flops": gpus * 1e15,
        **more,
    }


def steps(first: int, last: int, began: float, attempt: str = "a", **more: Any) -> list[Line]:
    """Snapshots after every step of 10 s, up to the last, of an attempt that executes them from that time on."""
    return [
        line(
            began + 10 * (step - first),
            "snapshot",
            attempt,
            step=step,
            model_flops=(step - first) * 1e15,
            activity_seconds={"step": 10.0 * (step - first)},
            **more,
        )
        for step in range(first + 1, last + 1)
    ]


def run_of(lines: list[Line]) -> dict[str, Any]:
    summary, unreadable = replay([json.dumps(one) for one in lines])
    assert unreadable == []
    run: dict[str, Any] = summary["runs"]["r"]
    return run


def buckets(run: dict[str, Any]) -> dict[str, float]:
    return {name: seconds for name, seconds in run["buckets"].items() if seconds}


def test_steps_up_to_the_one_that_was_restored_are_executed_again() -> None:
    # It came back at 50, died at once, and came back at 35: 36 to 50 had been made before this history begins.
    run = run_of(
        [
            line(0, "start", step=50),
            line(10, "start", "b", step=35),
            *steps(35, 52, 10, "b"),
            line(180, "finish", "b", status="completed", step=52),
        ]
    )
    assert buckets(run) == {"down": 10, "lost": 150, "productive": 20}
    assert run["retained_flops"] == 2e15
    assert run["goodput"] == pytest.approx(20 / 180)


def test_what_no_activity_explains_is_other_up_to_the_last_snapshot_and_down_after_it() -> None:
    idle = [line(t, "snapshot", step=2, activity_seconds={"step": 20.0}) for t in range(30, 130, 10)]
    run = run_of(
        [
            line(0, "start", step=0),
            *steps(0, 2, 0),
            *idle,
            line(200, "start", "b", step=2),
            *steps(2, 3, 200, "b"),
            line(210, "finish", "b", status="completed", step=3),
        ]
    )
    assert buckets(run) == {"productive": 30, "other": 100, "down": 80}


@pytest.mark.parametrize(("status", "bucket"), [("completed", "other"), ("stopped", "lost"), ("failed", "lost")])
def test_a_step_that_an_end_cuts_short_is_lost_and_after_the_last_one_nothing_is_cut_short(
    status: str, bucket: str
) -> None:
    run = run_of(
        [
            line(0, "start", step=0),
            *steps(0, 2, 0),
            line(24, "finish", status=status, step=2, activity_seconds={"step": 24.0}),
        ]
    )
    assert buckets(run) == {"productive": 20, bucket: 4}


@pytest.mark.parametrize("reporting", ["x", "y"])
def test_the_position_that_one_source_reports_is_that_of_all(reporting: str) -> None:
    lines: list[Line] = [line(0, "start", source=source, gpus=4, step=0) for source in "xy"]
    for step in range(1, 11):
        for source in "xy":
            position: Line = {"step": step} if source == reporting else {}
            lines.append(
                line(
                    10 * step,
                    "snapshot",
                    source=source,
                    gpus=4,
                    model_flops=step * 1e15,
                    activity_seconds={"step": 10.0 * step},
                    **position,
                )
            )
    lines += [line(100, "finish", source=source, gpus=4, status="completed") for source in "xy"]
    run = run_of(lines)
    assert buckets(run) == {"productive": 100}
    assert run["effective_mfu"] == pytest.approx(20e15 / (8e15 * 100))


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
def test_gpus_that_an_attempt_gains_or_gives_up_count_from_then_on(before: int, after: int) -> None:
    made = steps(0, 40, 0)
    for one in made:
        one["gpus"] = before if one["step"] <= 20 else after
        one["peak_flops"] = one["gpus"] * 1e15
    run = run_of([line(0, "start", step=0, gpus=before), *made, line(400, "finish", status="completed", step=40)])
    assert run["gpu_seconds"]["productive"] == 200 * 4 + 200 * 8
    assert run["effective_mfu"] == pytest.approx(40e15 / (2400 * 1e15))


def test_a_later_start_keeps_the_clock_while_it_starts_up_without_a_word() -> None:
    later = [
        line(700 + 10 * k, "snapshot", "b", "g", step=30 + k, activity_seconds={"startup": 300.0, "step": 10.0 * k})
        for k in range(31)
    ]
    run = run_of(
        sorted(
            [
                line(0, "start", step=0),
                *steps(0, 60, 0),
                line(400, "start", "b", "g", step=30),
                *later,
                line(1000, "finish", "b", "g", status="completed", step=60),
            ],
            key=lambda one: one["t"],
        )
    )
    assert buckets(run) == {"productive": 600, "lost": 100, "startup": 300}
    assert run["attempts"] == 2


def test_a_host_whose_clock_is_wrong_all_the_time_is_not_late() -> None:
    lines = [
        line(
            1000 + 10 * k - behind,
            "snapshot",
            source=source,
            step=k,
            started=1000.0 - behind,
            activity_seconds={"step": 10.0 * k},
        )
        for k in range(1, 101)
        for source, behind in (("x", 0), ("y", 400))
    ]
    run, live = run_of(lines), Ledger()
    for one in lines:
        live.apply(one)
    assert buckets(run) == {"productive": 1000}
    assert live.summary()["runs"]["r"] == run


def test_an_attempt_that_is_reported_afterwards_is_put_where_it_was() -> None:
    first = [line(0, "start", step=0), *steps(0, 60, 0), line(600, "finish", status="failed", step=60)]
    second = [
        line(700, "start", "b", step=60),
        *steps(60, 120, 700, "b"),
        line(1300, "finish", "b", status="completed"),
    ]
    assert run_of(second + first) == run_of(first + second)
    assert buckets(run_of(first + second)) == {"productive": 1200, "down": 100}


def test_an_exporter_that_restarts_and_hears_of_its_ranks_one_by_one_has_not_lost_gpus() -> None:
    made = [one | {"started": 0.0} for one in steps(0, 100, 0)]
    partial = made[49] | {"gpus": 1, "peak_flops": 1e15, "model_flops": 1e15}
    run = run_of([*made[:20], partial, *made[50:], line(1000, "finish", status="completed", step=100)])
    assert sum(run["gpu_seconds"].values()) == 8 * 1000
    assert run["effective_mfu"] == pytest.approx(100e15 / (8e15 * 1000))


def test_a_node_that_takes_the_place_of_another_does_not_add_to_its_gpus() -> None:
    def snapshot_of(step: int, source: str, rank: int, started: float) -> Line:
        return line(
            10 * step,
            "snapshot",
            source=source,
            rank=rank,
            started=started,
            step=step,
            activity_seconds={"step": 10 * step - started},
        )

    lines = []
    for step in range(1, 101):
        lines.append(snapshot_of(step, "x", 0, 0.0))
        if step <= 50:
            lines.append(snapshot_of(step, "y", 8, 0.0))
        if step >= 56:
            lines.append(snapshot_of(step, "spare", 8, 505.0))
    assert sum(run_of(lines)["gpu_seconds"].values()) == 16 * 1000


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_lines_does_not_matter(seed: int) -> None:
    lines = REFERENCE.read_text().splitlines()
    expected, _ = replay(lines)
    random.Random(seed).shuffle(lines)
    assert replay(lines)[0] == expected


def test_lines_that_no_parser_takes_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    good = [line(0, "start", step=0), *steps(0, 1, 0), line(10, "finish", status="completed", step=1)]
    path.write_text("\ufeff" + "\n".join([*map(json.dumps, good), "[" * 100_000, '{"t": ' + "9" * 5_000 + "}"]))
    assert main(path, json_output=True) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["runs"]["r"]["goodput"] == 1
    assert [text.split(": ")[2] for text in printed.err.splitlines()] == ["line 4", "line 5"]


def test_an_attempt_may_be_named_by_a_number() -> None:
    run = run_of(
        [
            line(0, "start", step=0) | {"attempt": 1},
            *[one | {"attempt": 1} for one in steps(0, 3, 0)],
            line(30, "finish", status="completed", step=3) | {"attempt": 1},
        ]
    )
    assert (run["attempts"], buckets(run)) == (1, {"productive": 30})
