"""Measured peak FLOP/s of a device: a short sweep of matrix multiplications, to compare with the data sheet's peak.

Each shape runs back to back for its share of the time, so that a card meets its power limit as in training. The result
is the mean rate of the best shape. Matrices are random, because zeros draw less power and let the clock rise. One
device is measured: the current CUDA device, else the CPU. The CUDA part has only run with simulated events.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, int, int]  # m, n, k

_SQUARES: list[Shape] = [(n, n, n) for n in (2048, 4096, 8192, 12288, 16384)]
# The MLPs of 8B, 70B and 405B models.
_MLPS: list[Shape] = [(8192, 14336, 4096), (8192, 28672, 8192), (8192, 8192, 28672), (8192, 53248, 16384)]
# The largest first, so that the card is at its power limit before a small matrix could profit from a higher clock.
CUDA_SHAPES: tuple[Shape, ...] = tuple(sorted((*_SQUARES, *_MLPS), key=math.prod, reverse=True))
CPU_SHAPES: tuple[Shape, ...] = ((128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
MEASURED = ("fp16", "bf16", "tf32", "fp8", "int8")
_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


class Unmeasurable(Exception):
    """Error raised when the device or this torch cannot multiply matrices in a dtype. The message gives the reason."""


Timer = Callable[[Callable[[], object]], float]  # calls a function and returns the device's seconds for its work


@dataclass(frozen=True, slots=True)
class Achieved:
    """Best result of a sweep: mean FLOP/s of a device at one shape."""

    device: str
    dtype: str
    flops_per_second: float
    shape: Shape


def host_timer(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes by the host's clock, for devices that compute synchronously."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def event_timer(work: Callable[[], object], event: Callable[[], Any]) -> float:
    """Return the device's seconds between CUDA events around a function. `event()` makes one with timing enabled."""
    began, ended = event(), event()
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def sweep(
    dtype: str,
    seconds: float = 10.0,
    shapes: Sequence[Shape] | None = None,
    device: torch.device | None = None,
    timer: Timer | None = None,
) -> Achieved:
    """Return the best mean FLOP/s over the shapes, measured in about `seconds`. Raises Unmeasurable."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    by_events = partial(event_timer, event=partial(torch.cuda.Event, enable_timing=True))
    timer = timer or (by_events if on_cuda else host_timer)
    if dtype not in MEASURED:
        raise Unmeasurable(f"{dtype!r} is not measured, only {', '.join(MEASURED)}")
    if dtype == "tf32" and not (on_cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise Unmeasurable("tf32 needs an NVIDIA card of the Ampere generation or newer")
    shapes = shapes or (CUDA_SHAPES if on_cuda else CPU_SHAPES)
    precision = torch.get_float32_matmul_precision()
    best: tuple[float, Shape] | None = None
    spent = 0.0
    try:
        torch.set_float32_matmul_precision("high")  # tf32, where the matrices are float32
        with torch.inference_mode():
            for shape in shapes:
                if best is not None and spent >= seconds:
                    break
                try:
                    operations, took = _run(_multiplication(dtype, shape, device), seconds / len(shapes), timer)
                except torch.OutOfMemoryError:
                    continue  # a smaller card, which reaches its peak with smaller shapes
                spent += took
                rate = operations * 2.0 * shape[0] * shape[1] * shape[2] / took
                best = max(best or (0.0, shape), (rate, shape))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        text = f"torch {torch.__version__} cannot multiply {dtype} on {device.type}"
        raise Unmeasurable(f"{text}: {str(error).partition(chr(10))[0]}") from error
    finally:
        torch.set_float32_matmul_precision(precision)
    if best is None:
        raise Unmeasurable(f"the matrices do not fit into the memory of {_name(device)}")
    return Achieved(_name(device), dtype, *best)


def _run(multiply: Callable[[], object], seconds: float, timer: Timer) -> tuple[int, float]:
    """Multiply back to back for about `seconds`. Return the number of multiplications and the seconds they took."""
    multiply()  # chooses a kernel
    once = max(timer(multiply), 1e-9)
    repeats = max(1, min(round(seconds / once), 1_000_000))

    def repeat() -> None:
        for _ in range(repeats):
            multiply()

    return repeats, max(timer(repeat), 1e-9)


def _multiplication(dtype: str, shape: Shape, device: torch.device) -> Callable[[], object]:
    m, n, k = shape
    if dtype == "int8":
        left = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
        right = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(left, right)
    if dtype == "fp8":
        # Tensor cores want the right matrix by columns. https://docs.nvidia.com/cuda/cublas/#cublasltmatmul
        left, right = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        one = torch.ones((), device=device)
        # As training does in the forward pass. Exact accumulation takes a third longer on Hopper.
        return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    left, right = (torch.randn(size, device=device, dtype=_FLOATS[dtype]) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device, dtype=_FLOATS[dtype])
    return lambda: torch.mm(left, right, out=out)


def _name(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
