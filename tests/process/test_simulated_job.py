"""The job without PyTorch: real processes that die, restart and resume, and tell the hook what they tell their log."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from simulator.job import FLOPS_PER_TOKEN, TOKENS_PER_SECOND
from tests.support import ROOT
from tests.support.hook_server import HookServer, Push
from tests.support.machine import PATIENCE, until


@contextmanager
def started(out: Path, endpoint: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "exporter"),
        "FLOPWATCH_RUN": "simulated-llama",
        "FLOPWATCH_ENDPOINT": endpoint,
        "FLOPWATCH_PUSH_INTERVAL": "0.2",
    }
    job = subprocess.Popen(
        [sys.executable, "-m", "simulator.job", "--out", out, "--log-file", out / "log.jsonl", *arguments],
        env=environ,
        cwd=ROOT,
    )
    try:
        yield job
    finally:
        job.terminate()
        job.wait(PATIENCE)


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@dataclass
class History:
    """What is left of a job: its folder, its log, and the last push of each rank."""

    out: Path
    log: list[dict[str, Any]]
    last: dict[int, Push]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Run a job of 3 ranks with a slow one, in which another dies in step 15 after a checkpoint in step 10."""
    out = tmp_path_factory.mktemp("job")
    with (
        HookServer() as server,
        started(
            out,
            server.url,
            "--ranks",
            "3",
            "--steps",
            "30",
            "--checkpoint-every",
            "10",
            "--step-seconds",
            "0.05",
            "--gpu-uuids",
            "GPU-0,GPU-1,GPU-2",
            "--slow-rank",
            "2",
            "--slow-by",
            "1",
            "--die-rank",
            "1",
            "--die-at-step",
            "15",
        ) as job,
    ):
        assert job.wait(250) == 0
        last = {push.resource["flopwatch.rank"]: push for push in server.pushes}
    return History(out, read_log(out), last)


@pytest.mark.long
def test_a_dead_rank_restarts_all_from_the_last_checkpoint(history: History) -> None:
    steps = [(line["attempt"], line["step"]) for line in history.log if line["event"] == "step"]
    assert steps == [(0, step) for step in range(1, 15)] + [(1, step) for step in range(11, 31)]
    others = [(line["event"], line["attempt"], line.get("step")) for line in history.log if line["event"] != "step"]
    assert others == [
        ("start", 0, None),
        ("checkpoint_begin", 0, 10),
        ("checkpoint_end", 0, 10),
        ("start", 1, None),
        ("restored", 1, 10),
        ("checkpoint_begin", 1, 20),
        ("checkpoint_end", 1, 20),
        ("checkpoint_begin", 1, 30),
        ("checkpoint_end", 1, 30),
        ("finish", 1, 30),
    ]


def test_the_hook_agrees_with_the_log(history: History) -> None:
    tokens = sum(line["tokens"] for line in history.log if line["event"] == "step" and line["attempt"] == 1)
    assert tokens == 20 * 3 * 405
    assert sorted(history.last) == [0, 1, 2]
    for rank, push in history.last.items():
        assert push.resource["flopwatch.run"] == "simulated-llama"
        assert push.resource["flopwatch.status"] == "completed"
        assert push.resource["flopwatch.gpu_uuid"] == f"GPU-{rank}"
        assert push.resource["flopwatch.restored_step"] == 10
        assert push.resource["flopwatch.pid"] == int((history.out / "pids" / str(rank)).read_text())
        assert push.samples["training_position_steps"] == push.samples["training_committed_steps"] == 30
        assert push.samples["training_tokens_total"] == tokens / 3
        assert push.samples["training_model_flops_total"] == pytest.approx(tokens / 3 * FLOPS_PER_TOKEN)
        assert push.samples["training_peak_flops_per_second"] == 989.4e12
        assert push.samples["training_hook_errors_total"] == 0


def test_mfu_is_near_0_42_and_halved_by_a_rank_of_half_the_speed(history: History) -> None:
    healthy = TOKENS_PER_SECOND * FLOPS_PER_TOKEN / 989.4e12
    assert healthy == pytest.approx(0.4214, abs=1e-4)
    seconds = {}
    for rank, push in history.last.items():
        mfu = push.samples["training_model_flops_total"] / push.samples["training_capacity_flops_total"]
        assert mfu < 0.52 * healthy
        seconds[rank] = sum(
            push.samples[f"training_activity_seconds_total{{activity={name}}}"] for name in ("step", "data_stall")
        )
        assert mfu == pytest.approx(20 * 0.05 / seconds[rank] * healthy)
    # How long they took on this machine; the others may have waited in their first for one that came up late.
    steps = [line for line in history.log if line["event"] == "step" and line["attempt"] == 1]
    assert seconds[0] == pytest.approx(sum(line["end"] - line["start"] for line in steps), rel=0.05)


def test_the_slow_rank_waits_least(history: History) -> None:
    shares = {
        rank: push.samples["training_collective_wait_seconds_total"]
        / push.samples["training_measured_step_seconds_total"]
        for rank, push in history.last.items()
    }
    assert min(shares, key=shares.__getitem__) == 2
    assert min(shares[0], shares[1]) - shares[2] > 0.2


def test_the_control_file_stops_the_job(tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    control.write_text('{"stop": true}')
    with started(
        tmp_path, "http://127.0.0.1:9", "--ranks", "2", "--step-seconds", "0.01", "--control", str(control)
    ) as job:
        assert job.wait(PATIENCE) == 0
    assert [(line["event"], line.get("status")) for line in read_log(tmp_path)] == [
        ("start", None),
        ("step", None),
        ("checkpoint_begin", None),
        ("checkpoint_end", None),
        ("finish", "stopped"),
    ]


def test_ending_the_launcher_ends_its_ranks(tmp_path: Path) -> None:
    with started(tmp_path, "http://127.0.0.1:9", "--ranks", "2", "--step-seconds", "0.01") as job:
        until(lambda: (tmp_path / "log.jsonl").exists() and len(read_log(tmp_path)) >= 3)
        job.terminate()
        assert job.wait(PATIENCE) == 143
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pids" / str(rank)).read_text()), 0)
