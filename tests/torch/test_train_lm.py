"""Test the example trainer under torchrun: it resumes exactly, and the hook reports the same as its own log."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.hook_server import HookServer, Push
from tests.support.machine import PATIENCE

pytestmark = [pytest.mark.torch, pytest.mark.timeout(700)]


def train(out: Path, endpoint: str, *arguments: str, ranks: int | None = None) -> None:
    """Run the trainer to its end, under torchrun if `ranks` is given."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "exporter"),
        "OMP_NUM_THREADS": "1",
        "FLOPWATCH_ENDPOINT": endpoint,
        "FLOPWATCH_PUSH_INTERVAL": "0.5",
    }
    torchrun = (
        []
        if ranks is None
        else [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--max-restarts",
            "1",
            "--nproc-per-node",
            str(ranks),
        ]
    )
    job = subprocess.Popen(
        [
            sys.executable,
            *torchrun,
            ROOT / "examples/train_lm.py",
            "--out",
            out,
            "--log-file",
            out / "log.jsonl",
            *arguments,
        ],
        env=environ,
    )
    try:
        assert job.wait(500) == 0
    finally:
        job.terminate()  # torchrun passes it on to its ranks
        job.wait(PATIENCE)


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@dataclass
class History:
    """Results of a training run: its folder, its log, and the last push of each rank."""

    out: Path
    log: list[dict[str, Any]]
    last: dict[int, Push]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Train with 2 ranks. The slower one dies in step 15, after a checkpoint in step 10, and the job resumes."""
    out = tmp_path_factory.mktemp("lm")
    control = out / "control.json"
    control.write_text('{"slow": {"1": 0.5}, "die": {"1": 15}}')
    with HookServer() as server:
        train(
            out,
            server.url,
            "--steps",
            "30",
            "--checkpoint-every",
            "10",
            "--step-floor",
            "0.2",
            "--control",
            str(control),
            "--gpu-uuids",
            "GPU-0,GPU-1",
            ranks=2,
        )
        last = {push.resource["flopwatch.rank"]: push for push in server.pushes}
    return History(out, read_log(out), last)


@pytest.mark.long
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(history: History) -> None:
    losses: dict[int, dict[int, float]] = {0: {}, 1: {}}
    for line in history.log:
        if line["event"] == "step":
            losses[line["attempt"]][line["step"]] = line["loss"]
    assert list(losses[0]) == list(range(1, 15))
    assert list(losses[1]) == list(range(11, 31))
    assert [losses[0][step] for step in range(11, 15)] == [losses[1][step] for step in range(11, 15)]
    assert losses[1][30] < losses[0][1] - 1


@pytest.mark.long
def test_the_log_has_starts_checkpoints_and_the_end(history: History) -> None:
    events = [(line["event"], line["attempt"], line.get("step")) for line in history.log if line["event"] != "step"]
    assert events == [
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
    times = [line["time"] for line in history.log]
    assert times == sorted(times)
    starts = [line for line in history.log if line["event"] == "start"]
    assert all(line["process_started"] < line["time"] for line in starts)


@pytest.mark.long
def test_the_hook_reports_what_the_log_reports(history: History) -> None:
    tokens = sum(line["tokens"] for line in history.log if line["event"] == "step" and line["attempt"] == 1)
    assert tokens == 20 * 2 * 8 * 128
    peak = next(line["peak_flops_per_second"] for line in history.log if line["attempt"] == 1)
    assert sorted(history.last) == [0, 1]
    for rank, push in history.last.items():
        assert push.resource["flopwatch.status"] == "completed"
        assert push.resource["flopwatch.gpu_uuid"] == f"GPU-{rank}"
        assert push.resource["flopwatch.restored_step"] == 10
        assert push.resource["flopwatch.pid"] == int((history.out / "pids" / str(rank)).read_text())
        assert push.samples["training_position_steps"] == push.samples["training_committed_steps"] == 30
        assert push.samples["training_tokens_total"] == tokens / 2
        assert push.samples["training_model_flops_total"] == tokens / 2 * 2_752_512
        assert push.samples["training_peak_flops_per_second"] == peak
        assert push.samples["training_hook_errors_total"] == 0


@pytest.mark.long
def test_the_slow_rank_waits_least(history: History) -> None:
    waited = {rank: push.samples["training_collective_wait_seconds_total"] for rank, push in history.last.items()}
    steps = {rank: push.samples["training_measured_step_seconds_total"] for rank, push in history.last.items()}
    # It takes half of 0.2 s longer than the other rank: a third of a step.
    assert waited[0] / steps[0] - waited[1] / steps[1] == pytest.approx(1 / 3, abs=0.15)


@pytest.mark.long
def test_one_process_trains_without_torchrun_and_without_an_exporter(tmp_path: Path) -> None:
    no_exporter = "http://127.0.0.1:9"
    train(tmp_path, no_exporter, "--steps", "4")
    control = tmp_path / "control.json"
    control.write_text('{"stop": true}')
    train(tmp_path, no_exporter, "--steps", "1000", "--control", str(control))
    log = read_log(tmp_path)
    assert [line["step"] for line in log if line["event"] == "step"] == list(range(1, 11))
    assert [(line["step"], line["status"]) for line in log if line["event"] == "finish"] == [
        (4, "completed"),
        (10, "stopped"),
    ]
    seconds = sum(line["end"] - line["start"] for line in log if line["event"] == "step")
    mfu = 10 * 8 * 128 * log[0]["flops_per_token"] / (seconds * log[0]["peak_flops_per_second"])
    assert 0.01 < mfu < 1


def test_flops_of_the_model_are_those_pytorch_counts() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from examples import train_lm

    with torch.device("meta"):
        model = train_lm.LanguageModel()
        tokens = torch.zeros(8, 128, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            torch.autograd.backward(model(tokens, tokens))
    weights = 2 * (4 * 128 * 128 + 2 * 128 * 512) + 128 * 256
    scores = 12 * 2 * 128 * 128  # all of them: PyTorch's counter ignores the causal mask
    assert counter.get_total_flops() == 8 * 128 * (6 * weights + scores)
    assert train_lm.FLOPS_PER_TOKEN == 6 * weights + scores / 2 == 2_752_512


def test_batches_depend_on_nothing_but_step_and_rank() -> None:
    import torch

    from examples import train_lm

    text = train_lm.standard_library()
    assert text.dtype == torch.uint8
    assert len(text) > 5_000_000
    from_start = list(train_lm.batches(text, range(1, 5), rank=1))
    resumed = list(train_lm.batches(text, range(3, 5), rank=1))
    assert all(torch.equal(a, b) for a, b in zip(from_start[2], resumed[0], strict=True))
    assert not torch.equal(from_start[2][0], from_start[3][0])
    ((inputs, targets),) = train_lm.batches(text, range(3, 4), rank=0)
    assert not torch.equal(inputs, resumed[0][0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
