"""Training loops in a process of their own: importing torch takes seconds, and what is replaced there others need.

A test module that runs itself as a script prints what it saw as JSON; `seen_by` returns it, the rest is for the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import ROOT

if TYPE_CHECKING:
    from flopwatch.training import Run
    from flopwatch.training.autolog.attach import Attachment
SECONDS = "training_activity_seconds_total"

Seen = dict[str, Any]


def seen_by(script: str, folder: Path) -> dict[str, Seen]:
    """Run a script in a folder and return what it printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FLOPWATCH_")}
    process = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        # Nothing listens there: the runs are read in their process.
        env={
            **environ,
            "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "FLOPWATCH_ENDPOINT": "http://127.0.0.1:9",
            "FLOPWATCH_PUSH_INTERVAL": "60",
        },
    )
    assert process.returncode == 0, process.stderr
    reported: dict[str, Seen] = json.loads(process.stdout)
    return reported


def fresh(before: Attachment | None, **settings: Any) -> Attachment:
    """Attach to this process as `flopwatch run` does, with these settings, after what was attached before left."""
    from flopwatch.training import Run
    from flopwatch.training.autolog import attach
    from flopwatch.training.autolog.loop import Settings

    if before is not None:
        before.step_back()
        if before.run is not None and before.run.alive:
            before.run.finish()
    Run._newest = None
    return attach.to_process(Settings(name="loop", **settings))


def flat(run: Run | None) -> dict[str, float]:
    """Return all samples of a run, as `name{label=value}` where there are labels."""
    assert run is not None
    found = {}
    for metric, points in run.snapshot(last=True).points.items():
        for labels, value in points:
            text = ",".join(f"{key}={label}" for key, label in labels.items())
            found[f"{metric}{{{text}}}" if text else str(metric)] = value
    return found


class Slow:
    """Takes 50 ms to be saved, and as long to be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(0.05)
        return slow, ()


def slow() -> Slow:
    """Return one, slowly."""
    time.sleep(0.05)
    return Slow()
