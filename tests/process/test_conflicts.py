"""Two real hooks of one name push to one exporter with an embedded ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from flopwatch.node.server import _Exporter
from tests.support.exporter_process import ENVIRONMENT, Exporter, Series, exporter
from tests.support.machine import PATIENCE
from tests.support.otlp_by_hand import training

JOB = """
import sys, time
from pathlib import Path
from flopwatch.training import Run

stop = Path(sys.argv[1])
run = Run("lm", flops_per_token=10, peak_flops=1e9, replica_ranks=1)
for _ in run.batches(range(100_000)):
    time.sleep(0.02)
    run.step(tokens=4)
    if stop.exists():
        break
run.finish()
"""


class Job:
    """A real training process that ends once its file exists."""

    def __init__(self, node: Exporter, stop: Path) -> None:
        self.stop = stop
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(stop)],
            env={
                **{key: text for key, text in ENVIRONMENT.items() if not key.startswith("FLOPWATCH_")},
                "FLOPWATCH_ENDPOINT": f"http://{node.otlp}",
                "FLOPWATCH_PUSH_INTERVAL": "0.2",
            },
            stdout=subprocess.DEVNULL,
        )

    @property
    def attempt(self) -> str:
        """Return the part of the attempt's name that identifies the process."""
        return f"-{self.process.pid}-"

    def end(self, how: str) -> None:
        if how == "killed":
            self.process.kill()
        else:
            self.stop.touch()
        self.process.wait(PATIENCE)


@contextmanager
def jobs(node: Exporter, folder: Path) -> Iterator[tuple[Job, Job]]:
    """Start a job, and a second one of the same name once the first is served."""
    running = [Job(node, folder / "first")]
    try:
        node.wait_until(lambda found: bool(served(found)))
        running.append(Job(node, folder / "second"))
        yield running[0], running[1]
    finally:
        for job in running:
            job.process.kill()
            job.process.wait()


def served(found: Series) -> str:
    """Return the only series of training_rank_info, empty if there is none."""
    [*series] = [name for name in found if name.startswith("training_rank_info{")]
    assert len(series) <= 1
    return series[0] if series else ""


def state(found: Series) -> str:
    states = [name for name, value in found.items() if name.startswith("run_state{") and value == 1]
    return states[0].rpartition("state=")[2].rstrip("}") if states else ""


def conflict(found: Series) -> float | None:
    return next((value for name, value in found.items() if name.startswith("run_attempt_conflict{")), None)


def refused(found: Series) -> dict[str, float]:
    outcomes = {name: value for name, value in found.items() if name.startswith("flopwatch_otlp_pushes_total{")}
    return {name: value for name, value in outcomes.items() if value and "accepted" not in name}


def record(node: Exporter) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(node.get("/v1/runs/record?run=lm"))
    return shown


@pytest.mark.long
@pytest.mark.parametrize(("order", "how"), [("second", "completed"), ("first", "completed"), ("second", "killed")])
def test_two_hooks_of_one_name_both_go_on_until_the_last_one_ends(tmp_path: Path, order: str, how: str) -> None:
    with exporter(tmp_path / "state", "--ledger", "embedded") as node, jobs(node, tmp_path) as (first, second):
        both = node.wait_until(lambda found: conflict(found) == 1)
        assert first.attempt in served(both), "the one that was there is served"
        time.sleep(1)
        still = node.series()
        assert (conflict(still), first.attempt in served(still), state(still)) == (1, True, "running")
        gone, other = (first, second) if order == "first" else (second, first)
        gone.end(how)
        alone = node.wait_until(lambda found: conflict(found) == 0)
        for _ in range(5):
            assert (conflict(alone), state(alone)) == (0, "running")
            assert other.attempt in served(alone)
            time.sleep(0.2)
            alone = node.series()
        other.end("completed")
        node.wait_until(lambda found: state(found) == "completed")
        shown = record(node)
        assert sum(shown["buckets"].values()) == pytest.approx(shown["summary"]["wall_seconds"], rel=1e-3)
        assert other.attempt in shown["attempts"][-1]["attempt"]
        assert refused(node.series()) == {}


def test_without_a_ledger_a_killed_rank_vanishes(tmp_path: Path) -> None:
    with exporter(tmp_path / "state") as node:
        job = Job(node, tmp_path / "stop")
        try:
            node.wait_until(lambda found: bool(served(found)))
            job.end("killed")
            node.wait_until(lambda found: not served(found))
        finally:
            job.process.kill()
            job.process.wait()


@pytest.mark.parametrize("failing", ["_telemetry", "_release"])
def test_a_failing_check_of_ranks_or_driver_release_does_not_stop_the_other(failing: str) -> None:
    checked = SimpleNamespace(_forward=None, _telemetry=Mock(), _release=Mock())
    getattr(checked, failing).check.side_effect = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        _Exporter.tick(cast("_Exporter", checked), 0.0)
    assert (checked._telemetry.check.call_count, checked._release.check.call_count) == (1, 1)


def test_a_forged_push_changes_nothing_of_a_real_job(tmp_path: Path) -> None:
    with exporter(tmp_path / "state", "--ledger", "embedded") as node:
        job = Job(node, tmp_path / "stop")
        try:
            position = "training_position_steps{run=lm,rank=0}"
            before = node.wait_until(lambda found: position in found and state(found) == "running")
            for forged in ({}, {"status": "completed"}, {"pid": os.getpid()}, {"attempt": "x", "status": "stopped"}):
                node.push(training(999_999, 5, time.time(), start_unix=time.time() - 0.01, **forged))
            for _ in range(5):
                time.sleep(0.2)
                found = node.series()
                assert (served(found), state(found), conflict(found)) == (served(before), "running", 0)
                assert found[position] < 999_999
            assert refused(found) == {"flopwatch_otlp_pushes_total{outcome=conflict}": 4}
            job.end("completed")
            node.wait_until(lambda found: state(found) == "completed")
            assert record(node)["summary"]["high_water_step"] < 999_999
        finally:
            job.process.kill()
            job.process.wait()
