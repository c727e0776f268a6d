"""A hook with a clock of its own that pushes nothing."""

from __future__ import annotations

import os
from typing import Any

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from flopwatch.training.process.launcher import Process
from flopwatch.training.recorder import Snapshot


class Clock:
    """Monotonic seconds that pass only when the test moves them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def silent(clock: Clock | None = None, age: float = 30.0, **arguments: Any) -> Run:
    """Return a run of a process `age` seconds old that pushes nothing."""
    return Run(
        "llama",
        environ={"FLOPWATCH_DISABLE": "1"},
        clock=clock or Clock(),
        process=Process(pid=_PID, start_ticks=4711, age=age, pid_namespace=1),
        **arguments,
    )


_PID = os.getpid()


def seconds(run: Run) -> dict[str, float]:
    """Return the activities' seconds, without those that are 0."""
    points = run.snapshot().points[BY_NAME["training_activity_seconds_total"]]
    return {labels["activity"]: value for labels, value in points if value}


def value(snapshot: Snapshot, name: str) -> float | None:
    """Return the only sample of a family, None if there is none."""
    points = snapshot.points.get(BY_NAME[name], [])
    assert len(points) <= 1
    return points[0][1] if points else None
