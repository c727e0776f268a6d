"""What can go wrong under a trainer, the same for all of them."""

from __future__ import annotations

from typing import Any

import pytest


class Clock:
    """Seconds that pass where a test lets them; a run's own, so that what it books is exactly what was planted."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


BROKEN = ("no exporter", "tokens that raise", "no method that works")


def wrong(*_: Any, **__: Any) -> Any:
    """Stand for whatever raises."""
    raise RuntimeError("injected")


def break_callback(broken: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Break a trainer's callback in one of the ways of BROKEN; return the arguments to make it with."""
    from flopwatch.training.frameworks import common

    if broken == "no method that works":
        patch.setattr(common, "report_logged", wrong)
        for name in ("begin", "end", "consume", "step", "finish"):
            patch.setattr(common.TrainingSession, name, wrong)
    return {"tokens": wrong if broken == "tokens that raise" else None}
