"""Section `ranks`: two real ranks with gloo on one device. Rank 1 sleeps in each step.

Rank 0 waits for it. Rank 1 waits least, and so is named as the straggler.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.card.jobs import device_of, silent
from bench.card.machine import ROOT
from bench.card.report import Report, Unavailable
from bench.card.waits import FIRST_STEPS, totals

SLEEP = 0.1  # seconds of rank 1 in each step
STEPS = 20
LEAST, MOST = 0.9, 0.2  # shares of SLEEP that the fast rank waits at least, and the slow rank at most
SECONDS = 70.0


def section(device: str, seconds: float, report: Report) -> None:
    """Start two ranks and compare their waits."""
    device_of(device)
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    environ = {key: text for key, text in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "FLOPWATCH_DISABLE": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.card.ranks", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=SECONDS) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not end within {SECONDS:.0f} s") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        errors = [(text.strip().splitlines() or ["no output"])[-1] for _, text in printed]
        raise Unavailable(f"two ranks with gloo on {device}: {errors}")
    answers = [json.loads(text) for text, _ in printed]
    compare(answers[0], answers[1], report)


def compare(fast: float | None, slow: float | None, report: Report) -> None:
    """Report the seconds of wait per step of the rank that does not sleep and of the one that does."""
    report.facts.update(fast=fast, slow=slow)
    if fast is None or slow is None:
        report.info("waits", f"rank 0 {fast}, rank 1 {slow}: not measured on this device")
        return
    report.within("fast_waits", fast * 1e3, LEAST * SLEEP * 1e3, 2 * SLEEP * 1e3, " ms")
    report.within("slow_waits", slow * 1e3, 0, MOST * SLEEP * 1e3, " ms")
    report.check("straggler", slow < fast, f"rank {int(slow < fast)}", "rank 1, which sleeps")


def rank(device: torch.device) -> float | None:
    """Train as one rank of two, and return the wait per measured step in seconds."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64, device=device))
    run = silent(model=model)
    run.recorder.sample(1)
    inputs = torch.randn(4, 64, device=device)
    for _ in range(FIRST_STEPS + STEPS):
        if dist.get_rank() == 1:
            time.sleep(SLEEP)
        model(inputs).sum().backward()
        run.step(tokens=1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    waited, measured = totals(run)
    run.finish()
    dist.destroy_process_group()
    return waited / measured if measured else None


if __name__ == "__main__":
    print(json.dumps(rank(device_of(sys.argv[1]))))
