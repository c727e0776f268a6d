"""Sections `flops`, `peak`, `stall` and `memory`: FLOPs, data stall and allocator statistics against PyTorch's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.card.jobs import Model, cuda, device_of, pushing, require_cuda, silent, value
from bench.card.report import Report
from flopwatch.flops import Transformer
from flopwatch.flops.peaks import peak as peak_of
from flopwatch.training.flop_counter.count import count
from flopwatch.training.torch.peak import Unmeasurable, sweep

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 64, 2, 256, 32, 4
LARGER = (16, 2048, 16, 32000, 2048, 4)  # layers, width, heads, vocabulary, length, batch: about 1B
LARGE_MEMORY = 30 << 30  # bytes of GPU memory that the larger model needs
STEPS = 4
SHARE = 0.01
LOADER_SECONDS = 0.2
STALL_SHARE = 0.05
PEAK_SHARE = (0.6, 1.0)  # of the data sheet's dense peak that matrix products reach at the power limit


def flops(device: str, seconds: float, report: Report, larger: bool = True) -> None:
    """Compare counted FLOPs with the formula and with PyTorch's FlopCounterMode, and compute MFU on CUDA."""
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
    flops_lines("hook", value(run, "training_model_flops_total") / STEPS, causal, report)
    run.finish()
    # PyTorch counts no attention, all scores, or also recomputed scores, depending on the kernel.
    report.within("torch", torch_flops, matmuls * (1 - SHARE), (2 * full - matmuls) * (1 + SHARE))
    if on.type == "cuda":
        _mfu(model, tokens, causal, seconds, report)


def flops_lines(name: str, counted: float, formula: float, report: Report) -> None:
    """Report the FLOPs of a step next to the formula's."""
    report.near(name, counted, formula, SHARE)


def _mfu(model: Any, tokens: torch.Tensor, counted: float, seconds: float, report: Report) -> None:
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model(tokens).backward()
        torch.cuda.synchronize()
        steps += 1
    rate = steps * counted / (time.perf_counter() - began)
    name = torch.cuda.get_device_name()
    try:
        mfu = f", MFU {rate / peak_of(name, 'bf16').flops_per_second:.3f}"
    except Exception as error:
        mfu = f", no peak: {error}"
    report.info("rate", f"{rate / 1e12:.1f} TFLOP/s on {name}{mfu}")


def peak(device: str, seconds: float, report: Report) -> None:
    """Measure matrix products, as `flopwatch peak --measure` does, and compare them with the table of peaks."""
    require_cuda(device)
    name = torch.cuda.get_device_name()
    for dtype in ("bf16", "fp8"):
        try:
            measured = sweep(dtype, seconds / 2)
        except Unmeasurable as why:
            report.info(dtype, why)
            continue
        try:
            table: float | None = peak_of(name, dtype).flops_per_second
        except Exception as error:
            report.info(dtype, f"{measured.flops_per_second / 1e12:.1f} TFLOP/s, no peak: {error}")
            continue
        peak_line(dtype, measured.flops_per_second, table, report)


def peak_line(dtype: str, measured: float, table: float | None, report: Report) -> None:
    """Report a measured rate as a share of the peak in the table."""
    report.facts[dtype] = [measured, table]
    share = None if not table else measured / table
    report.within(dtype, share, *PEAK_SHARE, f" of the peak, {measured / 1e12:.1f} TFLOP/s")


def stall(device: str, seconds: float, report: Report) -> None:
    """Train from a loader that sleeps, and compare the data stall with its sleep."""
    on = device_of(device)
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

    for tokens in run.batches(loader()):
        model(tokens).backward()
        run.step(tokens=1)
    if on.type == "cuda":
        torch.cuda.synchronize()
    measured = value(run, "training_activity_seconds_total", activity="data_stall")
    run.finish()
    stall_lines(measured, slept, report)


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
