"""Test what `flopwatch run --top` writes where standard error is no terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.training.recorder import Snapshot
from flopwatch.training.terminal import Terminal


def snapshot(steps: float, seconds: float, **more: float) -> Snapshot:
    points: dict[Metric, list[tuple[dict[str, str], float]]] = {
        m.TRAINING_STEPS_TOTAL: [({}, steps)],
        m.TRAINING_ACTIVITY_SECONDS_TOTAL: [({"activity": "step"}, seconds)],
    }
    if "position" in more:
        points[m.TRAINING_POSITION_STEPS] = [({}, more["position"])]
    return Snapshot({}, points, None)


def test_the_first_line_comes_with_the_first_step_and_the_next_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Terminal("lm", written)
    shown.show(snapshot(0, 0.0))
    assert written.getvalue() == ""
    for now[0], steps in ((1.0, 2), (2.0, 4), (10.0, 20), (12.0, 24)):
        shown.show(snapshot(steps, float(steps), position=1000 + steps))
    assert written.getvalue().splitlines() == [
        "flopwatch: lm: step 1,002, MFU unknown, 1 s a step, 100.0 % step",
        "flopwatch: lm: step 1,024, MFU unknown, 1 s a step, 100.0 % step",
    ]
    now[0] = 60.0
    shown.show(snapshot(24, 60.0, position=1024))
    shown.show(snapshot(24, 60.0, position=1024), last=True)
    now[0] = 92.0
    shown.show(snapshot(24, 90.0, position=1024))
    assert written.getvalue().splitlines()[2:] == ["flopwatch: lm: no step for 30 s", "flopwatch: lm: no step for 30 s"]


def test_without_a_position_the_steps_of_this_process_are_shown(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file:
        Terminal("lm", file).show(snapshot(7, 3.5))
        assert (tmp_path / "file").read_text() == "flopwatch: lm: step 7, MFU unknown, 500 ms a step, 100.0 % step\n"
