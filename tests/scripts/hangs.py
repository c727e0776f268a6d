"""Training jobs of four gloo ranks in which one rank hangs, each job in one of KINDS: `python hangs.py FOLDER KIND...`.

All ranks are forked after torch is imported once, as that takes seconds. A killed rank is not restarted. The other
ranks then wait, as ranks do in a NCCL collective, although gloo reports the loss at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # DistributedDataParallel imports it, for a second, in each rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training import Run
from flopwatch.training.process import stuck_frames

RANKS, SUSPECT = 4, 2
HEALTHY_STEPS, STEP_SECONDS = 60, 0.1
# A third of the real delays, because the rules run at a faster pace, too.
stuck_frames.AFTER, stuck_frames.MEMORY, stuck_frames.MIN_COVERED, stuck_frames.TOGETHER = 5.0, 20.0, 10.0, 3.0
KINDS = ("stopped", "endless_loop", "skipped_collective", "blocked_loader", "gil_held", "killed", "saving", "healthy")


def forever() -> None:
    """Block until another process kills this one."""
    while True:
        time.sleep(60)


def misbehave(kind: str) -> None:
    """Hang in the forward pass."""
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "endless_loop":
        while True:
            pass
    elif kind == "gil_held":
        ctypes.PyDLL(None).sleep(100_000)  # PyDLL: the interpreter's lock is not released during the call
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def batches(kind: str, rank: int) -> Iterator[torch.Tensor]:
    """Yield batches; the suspect's loader blocks."""
    for step in range(100_000):
        if kind == "blocked_loader" and rank == SUSPECT and step == HEALTHY_STEPS:
            forever()
        yield torch.randn(8, 64)


def train(kind: str, rank: int, folder: Path) -> None:
    """Train as one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder / kind}", rank=rank, world_size=RANKS)
    metrics = dist.new_group()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = Run(kind, model=model, flops_per_token=6.0 * 64 * 64, peak_flops=1e9)
    for step, batch in enumerate(run.batches(batches(kind, rank))):
        late = rank == SUSPECT and step == HEALTHY_STEPS
        time.sleep(STEP_SECONDS)
        if kind == "saving" and step == HEALTHY_STEPS and rank == 0:
            with run.activity("checkpoint_save"):
                forever()
        if late:
            misbehave(kind)
        try:
            with model.no_sync() if late and kind == "skipped_collective" else nullcontext():
                model(batch).mean().backward()
            dist.all_reduce(torch.zeros(1), group=metrics)
        except RuntimeError:
            if kind != "killed":
                raise
            forever()
        optimizer.step()
        optimizer.zero_grad()
        run.step(tokens=8)


def main() -> None:
    """Fork the ranks and wait until all have ended."""
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    for kind in kinds:
        for rank in range(RANKS):
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives this process
                train(kind, rank, folder)
                os._exit(0)
    for _ in range(RANKS * len(kinds)):
        os.wait()


if __name__ == "__main__":
    main()
