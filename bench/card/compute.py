"""Sections `flops`, `peak`, `stall` and `memory`: FLOPs, MFU, data stall and allocator statistics.

Each is compared with PyTorch's own number, with a computation by hand, or with NVML.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.card.activity import NAMES, advance, meter
from bench.card.jobs import Model, cuda, device_of, pushing, require_cuda, silent, value
from bench.card.machine import Gpu, Machine, real
from bench.card.report import Report, Unavailable
from flopwatch.flops import Transformer
from flopwatch.flops.peaks import peak as peak_of
from flopwatch.training.flop_counter.count import count
from flopwatch.training.torch.peak import Unmeasurable, sweep

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 64, 2, 256, 32, 4
LARGER = (16, 2048, 16, 32000, 2048, 4)  # layers, width, heads, vocabulary, length, batch: about 1B
LARGE_MEMORY = 30 << 30  # bytes of GPU memory that the larger model needs
STEPS = 4
SHARE, MFU_SHARE = 0.01, 0.02
CPU_PEAK = 1e12  # FLOP/s for a device without a peak in the table
LOADER_SECONDS = 0.2
STALL_SHARE = 0.05
SM = next(metric for metric, name in NAMES.items() if name == "sm")
SM_MARGIN, MATRIX = 0.1, 8192
EXACT_SHARE = 1.02  # of the rate with fast accumulation, which is not the slower one on any card
Stalled = tuple[float, list[float], float]
Sample = Callable[[], object]
PEAK_SHARE = (0.6, 1.0)  # of the data sheet's dense peak that matrix products reach at the power limit


def flops(device: str, seconds: float, report: Report, larger: bool = True) -> None:
    """Compare counted FLOPs with the formula and with PyTorch's FlopCounterMode, and MFU with that by hand."""
    on = device_of(device)
    large = larger and on.type == "cuda" and torch.cuda.mem_get_info()[1] >= LARGE_MEMORY
    sizes = LARGER if large else (LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH)
    layers, width, heads, vocabulary, length, batch = sizes
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    model = Model(layers, width, heads, vocabulary).to(on, dtype)
    tokens = torch.randint(vocabulary, (batch, length + 1), device=on)
    with FlopCounterMode(display=False) as counter:
        model(tokens).backward()
    torch_flops = float(counter.get_total_flops())
    formula = Transformer(layers=layers, width=width, heads=heads, mlp_width=4 * width, vocabulary=vocabulary)
    causal, full = (batch * formula.flops_per_sequence(length, convention) for convention in ("causal", "full"))
    matmuls = (
        3 * batch * length * 2 * sum(one.weight.numel() for one in model.modules() if type(one) is torch.nn.Linear)
    )
    flops_lines("counted", float(count(model, (tokens,)).flops), causal, report)
    run = pushing(model=model, peak_flops=1e15)
    run.step()  # the first step is startup, without FLOPs
    for _ in range(STEPS):
        model(tokens).backward()
        run.step(tokens=batch * length)
    settle(on)  # a step counts once the device has reached its end
    flops_lines("hook", value(run, "training_model_flops_total") / STEPS, causal, report)
    run.finish()
    # PyTorch counts no attention, all scores, or also recomputed scores, depending on the kernel.
    report.within("torch", torch_flops, matmuls * (1 - SHARE), (2 * full - matmuls) * (1 + SHARE))
    # 6 N per token, and causal attention: its scores and their product with the values are each half of 2 T width.
    by_hand = matmuls / (batch * length) + 6 * layers * width * length
    mfu(model, tokens, by_hand, None if on.type == "cuda" else CPU_PEAK, seconds, report)


def settle(device: torch.device) -> None:
    """Wait until a CUDA device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def flops_lines(name: str, counted: float, formula: float, report: Report) -> None:
    """Report the FLOPs of a step next to the formula's."""
    report.near(name, counted, formula, SHARE)


def mfu(
    model: Any, tokens: torch.Tensor, by_hand: float, peak_flops: float | None, seconds: float, report: Report
) -> None:
    """Compare the hook's MFU with tokens per second, times FLOPs per token `by_hand`, divided by the peak.

    Without `peak_flops`, the hook and the other side each look up the peak of the GPU.
    """
    names = ("training_model_flops_total", "training_capacity_flops_total")
    given = {} if peak_flops is None else {"peak_flops": peak_flops}
    run = pushing(model=model, **given)
    for _ in range(3):  # the first step is startup, in which FLOPs are counted and kernels are chosen
        model(tokens).backward()
        run.step(tokens=1)
    settle(tokens.device)
    before = [value(run, name) for name in names]
    began, counted = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model(tokens).backward()
        run.step(tokens=len(tokens) * (tokens.shape[1] - 1))
        counted += len(tokens) * (tokens.shape[1] - 1)
    settle(tokens.device)
    rate = counted * by_hand / (time.perf_counter() - began)
    flops, capacity = (value(run, name) - earlier for name, earlier in zip(names, before, strict=True))
    run.finish()
    name = torch.cuda.get_device_name() if tokens.is_cuda else "the CPU"
    report.info("rate", f"{rate / 1e12:.3g} TFLOP/s on {name}")
    try:
        table = peak_flops or peak_of(name, "bf16").flops_per_second
    except Exception as error:
        report.info("mfu", f"no peak: {error}")
        return
    mfu_line(flops / capacity if capacity > 0 else None, rate / table, report)


def mfu_line(hook: float | None, by_hand: float, report: Report) -> None:
    """Report the hook's MFU next to the one by hand. It must have one where the table has a peak."""
    report.facts["mfu"] = [hook, by_hand]
    if hook is None:
        report.check("mfu", False, "none", f"{by_hand:.6g}")
    else:
        report.near("mfu", hook, by_hand, MFU_SHARE)


def peak(device: str, seconds: float, report: Report) -> None:
    """Measure matrix products, as `flopwatch peak --measure` does, and compare them with the table of peaks."""
    require_cuda(device)
    name = torch.cuda.get_device_name()
    for dtype in ("bf16", "fp8"):
        try:
            measured = sweep(dtype, seconds / 3)
        except Unmeasurable as why:
            report.info(dtype, why)
            continue
        if dtype == "fp8":
            with exact_accumulation():
                exact = sweep(dtype, seconds / 3).flops_per_second
            accumulation_line(measured.flops_per_second, exact, report)
        try:
            table: float | None = peak_of(name, dtype).flops_per_second
        except Exception as error:
            report.info(dtype, f"{measured.flops_per_second / 1e12:.1f} TFLOP/s, no peak: {error}")
            continue
        peak_line(dtype, measured.flops_per_second, table, report)


@contextlib.contextmanager
def exact_accumulation() -> Iterator[None]:
    """Multiply FP8 matrices without fast accumulation during a `with` block."""
    original: Callable[..., Any] = torch._scaled_mm

    def exact(*arguments: Any, **named: Any) -> Any:
        return original(*arguments, **named | {"use_fast_accum": False})

    with mock.patch.object(torch, "_scaled_mm", exact):
        yield


def accumulation_line(fast: float, exact: float, report: Report) -> None:
    """Report the rate of exact FP8 accumulation as a share of that of fast accumulation."""
    report.facts["fp8_exact"] = exact
    unit = f" of the rate with fast accumulation, {exact / 1e12:.1f} TFLOP/s"
    report.within("fp8_exact", exact / fast, 0, EXACT_SHARE, unit)


def peak_line(dtype: str, measured: float, table: float | None, report: Report) -> None:
    """Report a measured rate as a share of the peak in the table."""
    report.facts[dtype] = [measured, table]
    share = None if not table else measured / table
    report.within(dtype, share, *PEAK_SHARE, f" of the peak, {measured / 1e12:.1f} TFLOP/s")


def stall(device: str, seconds: float, report: Report) -> None:
    """Train from a loader that sleeps, and compare the data stall with its sleep and with the activity of the SMs."""
    on = device_of(device)
    measured, slept, _ = stalled(on, seconds / 2, bool)
    stall_lines(measured, slept, report)
    if on.type == "cuda":
        machine = real()
        chosen = [gpu for gpu in machine.gpus() if gpu.uuid == os.environ.get("CUDA_VISIBLE_DEVICES")]
        if not chosen:
            raise Unavailable("CUDA_VISIBLE_DEVICES is not the uuid of one GPU")
        work = full_load(LOADER_SECONDS)
        active, (measured, _, whole) = sm_active(machine, chosen[0], partial(stalled, on, seconds / 2, work))
        activity_line(active, measured / whole, report)


def full_load(seconds: float) -> Callable[[], object]:
    """Return a function that multiplies matrices for about so many seconds of the GPU, and waits for it."""
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def work(repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()

    work(10)
    began = time.perf_counter()
    work(10)
    repeats = max(1, int(seconds * 10 / (time.perf_counter() - began)))
    return lambda: work(repeats)


def sm_active(machine: Machine, gpu: Gpu, train: Callable[[Sample], Stalled]) -> tuple[float | None, Stalled]:
    """Train, and return the mean share of active SMs meanwhile, None without a number. Raises Unavailable.

    `train` takes samples at the begin and at the end of the time that it measures.
    """
    counter = meter(machine, gpu)
    try:
        result = train(partial(advance, machine, counter))
    finally:
        counter.close()
    activity = counter.activity
    return activity.seconds[SM] / activity.profiled if SM in activity.seconds else None, result


def activity_line(active: float | None, idle: float, report: Report) -> None:
    """Report the share of active SMs next to the share of the time in which no data was there."""
    report.facts.update(sm_active=active, idle=idle)
    report.within("sm_active", active, 1 - idle - SM_MARGIN, 1 - idle + SM_MARGIN)


def stalled(on: torch.device, seconds: float, work: Callable[[], object], sample: Sample = bool) -> Stalled:
    """Train from a loader that sleeps, with `work` in each step.

    Return the seconds of data stall, of each sleep of the loader, and of the whole from the end of the first step
    (startup) to that of the last. `sample` is called at both.
    """
    model = Model().to(on)
    run = silent(model=model)
    slept: list[float] = []

    def loader() -> Iterator[torch.Tensor]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            time.sleep(LOADER_SECONDS)
            slept.append(time.monotonic() - began)
            yield torch.randint(256, (BATCH, LENGTH + 1), device=on)

    began = None
    for tokens in run.batches(loader()):
        model(tokens).backward()
        work()
        run.step(tokens=1)
        if began is None:
            settle(on)
            sample()
            began = time.monotonic()
    settle(on)
    sample()
    whole = time.monotonic() - (began or 0.0)
    measured = value(run, "training_activity_seconds_total", activity="data_stall")
    run.finish()
    return measured, slept, whole


def stall_lines(measured: float, slept: list[float], report: Report) -> None:
    """Report the data stall next to the sleep of the loader. The first batch is part of the startup."""
    report.facts.update(measured=measured, slept=slept)
    report.near("data_stall", measured, sum(slept[1:]), STALL_SHARE, " s")


def memory(device: str, seconds: float, report: Report) -> None:
    """Provoke an out-of-memory error, and compare the hook's allocator statistics with PyTorch's."""
    require_cuda(device)
    cuda.init()
    run = pushing(model=torch.nn.Linear(8, 8, device=device))
    total = torch.cuda.mem_get_info()[1]
    caught = False
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        caught = True
    allocator_line("out_of_memory", float(caught), 1, report)
    statistics = torch.cuda.memory_stats()
    unused = statistics["reserved_bytes.all.current"] - statistics["allocated_bytes.all.current"]
    names = {
        "training_out_of_memory_total": statistics["num_ooms"],
        "training_allocator_retries_total": statistics["num_alloc_retries"],
        "training_allocator_unused_bytes": unused,
    }
    for name, expected in names.items():
        allocator_line(name, value(run, name), expected, report)
    run.finish()


def allocator_line(name: str, measured: float, expected: float, report: Report) -> None:
    """Report one statistic of the allocator."""
    report.check(name, measured == expected, f"{measured:.0f}", f"{expected:.0f}")
