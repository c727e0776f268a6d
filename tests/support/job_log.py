"""The truth about a run, worked out from the training job's own log, which owes nothing to flopwatch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class JobLog:
    """The parsed lines of one run's log, oldest first."""

    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> JobLog:
        """Return the complete lines of a log that may still be written to."""
        if not path.exists():
            return cls([])
        complete, _, _ = path.read_text().rpartition("\n")
        return cls([json.loads(line) for line in complete.splitlines()])

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one event."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def step(self) -> int:
        """Return the last step logged, 0 before the first."""
        return max((line["step"] for line in self.of("step")), default=0)

    def tokens_per_second(self, begin: float, end: float) -> float:
        """Return the rate over the steps that lie wholly between two Unix times."""
        steps = [line for line in self.of("step") if begin <= line["start"] and line["end"] <= end]
        return float(sum(line["tokens"] for line in steps[1:]) / (steps[-1]["end"] - steps[0]["end"]))

    def pauses(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Return what else than stepping was logged between two Unix times."""
        return [line for line in self.lines if begin <= line["time"] <= end and line["event"] != "step"]

    def attributed(self) -> dict[str, float]:
        """Return wall clock, productive and lost seconds of a run that has finished.

        A step done for the first time is productive and one done again is lost.
        """
        mark, productive, lost = 0, 0.0, 0.0
        for line in self.of("step"):
            seconds = line["end"] - line["start"]
            if line["step"] > mark:
                mark, productive = line["step"], productive + seconds
            else:
                lost += seconds
        wall = self.of("finish")[-1]["time"] - self.of("start")[0]["process_started"]
        return {"wall": wall, "productive": productive, "lost": lost}
