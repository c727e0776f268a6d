"""Training job without PyTorch: real processes, barriers and hook, in which only the computation is a sleep.

    python -m simulator.job --ranks 4 --out DIR

Each rank declares an H100 and the FLOPs of Llama 3 8B at a sequence length of 8192, and computes at a speed that gives
an MFU of 0.42. Log, control file, checkpoints and restarts behave as those of `examples/train_lm.py` under torchrun.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from flopwatch.flops import Transformer
from flopwatch.flops.peaks import peak
from flopwatch.training import Run
from flopwatch.training.process.launcher import this_process

LLAMA_3_8B = Transformer(
    layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, mlp_matrices=3, vocabulary=128256
)
FLOPS_PER_TOKEN = LLAMA_3_8B.flops_per_token(8192)
CARD, DTYPE = "NVIDIA H100 80GB HBM3", "bf16"
TOKENS_PER_SECOND = 8100  # of computing, on one such card
CHECKPOINT_SECONDS = 0.2
MAX_WAIT = 60.0  # seconds after which a rank stops waiting for the others


@dataclass(frozen=True)
class JobSettings:
    """Settings of a simulated job. Times are in seconds."""

    name: str
    ranks: int
    out: Path
    steps: int = 10**9
    seconds: float | None = None  # after the first step of an attempt
    step_seconds: float = 0.25  # of computing
    checkpoint_every: int = 40  # steps
    log_file: Path | None = None
    control: Path | None = None
    gpu_uuids: tuple[str, ...] = ()
    slow_rank: int | None = None
    slow_by: float = 0.3
    die_rank: int = 0
    die_at_step: int | None = None
    max_restarts: int = 3

    @property
    def tokens_per_rank(self) -> int:
        """Return the number of tokens that one rank processes in one step."""
        return round(TOKENS_PER_SECOND * self.step_seconds)

    @property
    def checkpoint(self) -> Path:
        """Return the file of the last checkpoint, which only contains the step."""
        return self.out / "checkpoint.json"

    def faults(self) -> dict[str, Any]:
        """Return the current faults. Keys of the control file replace those of the flags."""
        wanted: dict[str, Any] = {
            "slow": {str(self.slow_rank): self.slow_by},
            "die": {} if self.die_at_step is None else {str(self.die_rank): self.die_at_step},
            "stop": False,
        }
        if self.control is not None:
            with suppress(FileNotFoundError, json.JSONDecodeError):  # half-written: the next step reads it again
                wanted |= json.loads(self.control.read_text())
        return wanted


class Rank:
    """One rank of one attempt, in a process of its own."""

    def __init__(
        self, job: JobSettings, launched: int, attempt: int, rank: int, barrier: Barrier, last: Synchronized[int]
    ) -> None:
        self.job, self.attempt, self.rank, self.barrier, self.last = job, attempt, rank, barrier, last
        self.random = random.Random(rank)
        self.log_file = job.log_file.open("a", buffering=1) if job.log_file is not None and rank == 0 else None
        card = peak(CARD, DTYPE)
        self.run = Run(
            job.name,
            attempt=f"{launched}-{attempt}",
            rank=rank,
            local_rank=rank,
            world_size=job.ranks,
            replica_ranks=1,
            flops_per_token=FLOPS_PER_TOKEN,
            dtype=DTYPE,
            peak_flops=card.flops_per_second,
            peak_source=card.source,
            gpu_uuid=job.gpu_uuids[rank] if job.gpu_uuids else None,
        )
        self.log(
            "start",
            run=job.name,
            pid=os.getpid(),
            process_started=time.time() - this_process().age,
            world_size=job.ranks,
            tokens_per_step=job.ranks * job.tokens_per_rank,
            flops_per_token=FLOPS_PER_TOKEN,
            peak_flops_per_second=card.flops_per_second,
        )

    def log(self, event: str, **fields: Any) -> None:
        """Append a line to the JSON log of the job, which only rank 0 writes."""
        if self.log_file is not None:
            line = {"event": event, "time": time.time(), "attempt": self.attempt, **fields}
            self.log_file.write(json.dumps(line) + "\n")

    def train(self) -> None:
        """Resume from the last checkpoint and run until the last step."""
        job, run, launcher = self.job, self.run, os.getppid()
        restored = 0
        if job.checkpoint.exists():
            with run.activity("checkpoint_restore"):
                restored = int(json.loads(job.checkpoint.read_text())["step"])
            run.restored(step=restored, tokens=restored * job.tokens_per_rank)
            self.log("restored", step=restored)
        step = committed = restored
        began = step_start = time.time()
        for step in run.batches(self.steps_after(restored)):
            if os.getppid() != launcher:
                sys.exit("the launcher is gone")
            wanted = job.faults()
            compute = job.step_seconds * self.random.uniform(0.98, 1.02)
            time.sleep(compute * (1 + wanted["slow"].get(str(self.rank), 0.0)))
            if self.attempt == 0 and restored < wanted["die"].get(str(self.rank), 0) <= step:
                os.kill(os.getpid(), signal.SIGKILL)
            late = job.seconds is not None and time.time() - began >= job.seconds
            if self.rank == 0 and (late or wanted["stop"]):
                self.last.value = step  # before the barrier, so that no rank enters the next one alone
            with run.collective_wait():
                self.barrier.wait(MAX_WAIT)
            loss = 1.9 + 8 / (step + 1) ** 0.5
            run.step(tokens=job.tokens_per_rank, loss=loss)
            self.log(
                "step", step=step, start=step_start, end=time.time(), tokens=job.ranks * job.tokens_per_rank, loss=loss
            )
            if step % job.checkpoint_every == 0:
                committed = self.save(step)
            step_start = time.time()
        if committed < step:
            self.save(step)
        status = "completed" if job.faults()["stop"] is False else "stopped"
        self.log("finish", step=step, status=status)
        run.finish(status)

    def steps_after(self, step: int) -> Iterator[int]:
        """Yield the number of each step after `step` up to the last one, in place of a loader's batches."""
        while step < self.last.value:
            step += 1
            yield step

    def save(self, step: int) -> int:
        """Write a checkpoint that replaces the last one atomically, and return its step."""
        self.log("checkpoint_begin", step=step)
        with self.run.checkpoint(step):
            if self.rank == 0:
                time.sleep(CHECKPOINT_SECONDS)
                draft = self.job.checkpoint.with_suffix(".part")
                draft.write_text(json.dumps({"step": step}))
                draft.replace(self.job.checkpoint)
            self.barrier.wait(MAX_WAIT)
        self.log("checkpoint_end", step=step)
        return step


def train(job: JobSettings, launched: int, attempt: int, rank: int, barrier: Barrier, last: Synchronized[int]) -> None:
    """Run one rank up to the step `last`, as the main function of a process of the job.

    `launched` is the job's start as Unix time. Rank 0 lowers `last` to end the job early.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher ends its ranks
    (job.out / "pids" / str(rank)).write_text(str(os.getpid()))
    Rank(job, launched, attempt, rank, barrier, last).train()


def launch(job: JobSettings) -> int:
    """Run all ranks and return the exit status. When a rank dies, restart all, up to `max_restarts` times."""
    (job.out / "pids").mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    launched = int(time.time())
    for attempt in range(job.max_restarts + 1):
        # New ones for each attempt: a rank killed inside a barrier leaves it locked.
        barrier, last = context.Barrier(job.ranks), context.Value("q", job.steps)
        ranks = [
            context.Process(target=train, args=(job, launched, attempt, rank, barrier, last))
            for rank in range(job.ranks)
        ]
        try:
            for process in ranks:
                process.start()
            if all_completed(ranks):
                return 0
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return 1


def all_completed(ranks: list[SpawnProcess]) -> bool:
    """Wait until all ranks have completed or one has failed, and return whether all have completed."""
    running = ranks
    while running:
        wait([process.sentinel for process in running])
        statuses = [process.exitcode for process in running]
        if any(statuses):
            return False
        running = [process for process, status in zip(running, statuses, strict=True) if status is None]
    return True


def arguments() -> JobSettings:
    """Return the settings of the job from the command line."""
    parser = argparse.ArgumentParser(prog="python -m simulator.job", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=JobSettings.steps, help="steps of the whole run")
    parser.add_argument("--seconds", type=float, help="stop this long after the first step of an attempt")
    parser.add_argument("--step-seconds", type=float, default=JobSettings.step_seconds, help="of computing")
    parser.add_argument("--checkpoint-every", type=int, default=JobSettings.checkpoint_every, metavar="STEPS")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir(), "flopwatch-simulated-job"),
        metavar="DIR",
        help="checkpoint and pids; an existing checkpoint is resumed",
    )
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="append JSON lines of what happened")
    parser.add_argument("--gpu-uuids", type=lambda text: tuple(text.split(",")), default=(), metavar="UUID,...")
    parser.add_argument("--control", type=Path, metavar="FILE", help="JSON that switches faults while it runs")
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=JobSettings.slow_by, help="share of its own compute time")
    parser.add_argument("--die-rank", type=int, default=JobSettings.die_rank)
    parser.add_argument("--die-at-step", type=int, help="the rank kills itself in this step, on the first attempt only")
    parser.add_argument("--max-restarts", type=int, default=JobSettings.max_restarts)
    args = vars(parser.parse_args())
    if args["gpu_uuids"] and len(args["gpu_uuids"]) != args["ranks"]:
        parser.error(f"--gpu-uuids names {len(args['gpu_uuids'])} GPUs for {args['ranks']} ranks")
    return JobSettings(name=os.environ.get("FLOPWATCH_RUN", "simulated"), **args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the ranks end too
    try:
        sys.exit(launch(arguments()))
    except KeyboardInterrupt:
        sys.exit(130)
