"""Elastic training script: DDP under gloo that resumes from its checkpoint with as many ranks as torchrun finds.

It takes a folder and trains until the folder has a file `stop`. Each process logs its events to a file of its own in
FOLDER/log before it passes them to the hook. These logs are the ground truth about the job. SIGTERM ends a process at
once. If ELASTIC_TELLS is set, the process calls `finish("resized")` first.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training import Run

WIDTH, SAVE_EVERY, FLOPS_PER_TOKEN = 8, 4, 6 * 8 * 8


def tokens_of(step: int, rank: int) -> int:
    """Return the number of tokens that a rank trains on in a step. It differs between ranks and steps."""
    return 8 + rank + step % 3


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    log = (folder / "log" / str(os.getpid())).open("w", buffering=1)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")

    def note(**event: Any) -> None:
        log.write(json.dumps(event) + "\n")

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    run = Run(
        "elastic",
        model=model,
        flops_per_token=FLOPS_PER_TOKEN,
        dtype="fp32",
        peak_flops=1e12,
        peak_source="made up",
        gpu_uuid=f"GPU-{os.environ['FLOPWATCH_HOST']}-{os.environ['LOCAL_RANK']}",
    )

    def resized(number: int, frame: FrameType | None) -> None:
        run.finish("resized")
        sys.exit(143)

    if os.environ.get("ELASTIC_TELLS"):
        signal.signal(signal.SIGTERM, resized)

    checkpoint, step = folder / "checkpoint", 0
    if checkpoint.exists():
        with run.activity("checkpoint_restore"):
            state = torch.load(checkpoint)
            model.module.load_state_dict(state["model"])
            step = state["step"]
        run.restored(step)
    note(rank=rank, world_size=world, host=os.environ["FLOPWATCH_HOST"], started=started, restored=step)

    def batches() -> Any:
        # Rank 0 checks for the file, and broadcasts the result.
        number = step
        while True:
            going = torch.tensor([float(not (folder / "stop").exists())])
            dist.broadcast(going, 0)
            if not going.item():
                return
            number += 1
            yield torch.full((tokens_of(number, rank), WIDTH), 0.1)

    for batch in run.batches(batches()):
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        time.sleep(0.02)
        step += 1
        note(step=step, tokens=len(batch))
        run.step(tokens=len(batch), loss=1 / step)
        if step % SAVE_EVERY == 0 and rank == 0:
            with run.checkpoint():
                torch.save({"step": step, "model": model.module.state_dict()}, folder / "draft")
                note(draft=step)
                (folder / "draft").replace(checkpoint)
            note(saved=step)
    run.finish()
    note(ended=time.time())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
