"""Work for one GPU, in its own process: `python -m bench.card.work matmul|copy|device_copy|hold`.

It prints {"memory": bytes in use on the GPU} once the first kernels are done, begins when a line arrives on stdin, ends
when stdin is closed, and prints {"units", "seconds"}: FLOPs of matrix products, bytes copied to the GPU, or bytes read
and written by copies in its memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import torch

SIZE = 8192
CHUNK = 1 << 30  # bytes of a copy


def matmul(device: torch.device) -> Callable[[], float]:
    """Return a function that multiplies matrices and returns its FLOPs."""
    size = SIZE if device.type == "cuda" else 128
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def once() -> float:
        for _ in range(4):
            torch.mm(left, right, out=out)
        return 8.0 * size**3

    return once


def copy(device: torch.device) -> Callable[[], float]:
    """Return a function that copies pinned host memory to the GPU and returns its bytes."""
    on_cuda = device.type == "cuda"
    source = torch.zeros(CHUNK if on_cuda else 1 << 20, dtype=torch.uint8, pin_memory=on_cuda)
    target = torch.empty_like(source, device=device)

    def once() -> float:
        target.copy_(source, non_blocking=True)
        return float(source.numel())

    return once


def device_copy(device: torch.device) -> Callable[[], float]:
    """Return a function that copies within the GPU's memory and returns the bytes that it reads and writes."""
    source = torch.zeros(CHUNK if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        for _ in range(8):
            target.copy_(source)
        return 16.0 * source.numel()

    return once


def hold(device: torch.device) -> Callable[[], float]:
    """Return a function that only holds memory."""
    held = torch.zeros(1 << 28, dtype=torch.uint8, device=device)

    def once() -> float:
        time.sleep(0.05)
        return float(held.numel())

    return once


KINDS = {"matmul": matmul, "copy": copy, "device_copy": device_copy, "hold": hold}


def main() -> None:
    """Do the work that the command line names until stdin is closed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and "--cpu" not in sys.argv:
        print(json.dumps({"error": f"torch {torch.__version__} finds no CUDA device"}), flush=True)
        return

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    once = KINDS[sys.argv[1]](device)
    once()
    settle()
    memory = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = total - free
    print(json.dumps({"memory": memory}), flush=True)
    sys.stdin.readline()
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    units, began = 0.0, time.perf_counter()
    while reader.is_alive():
        units += once()
        settle()
    print(json.dumps({"units": units, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
