"""Section `graph`: CUDA graphs of a model with the hook, while another thread queries the device."""

from __future__ import annotations

from typing import Any

import torch

from bench.card.jobs import Model, cuda, polled, pushing, require_cuda, value
from bench.card.report import Report

MODES = ("global", "thread_local", "relaxed")  # cudaStreamCaptureMode
REPLAYS = 50
WARM_UP = 3
LENGTH, BATCH = 64, 4


def section(device: str, seconds: float, report: Report) -> None:
    """Capture in each mode, and compare the loss of replays with that of the eager model."""
    require_cuda(device)
    for mode in MODES:
        try:
            eager, replayed, errors = captured(mode)
        except RuntimeError as error:
            report.check(mode, False, str(error).partition("\n")[0], "a capture")
            continue
        compare(mode, eager, replayed, errors, report)
    graphed(report)


def compare(name: str, eager: float, replayed: float, errors: float, report: Report) -> None:
    """Report whether replays have the eager loss to the bit, and whether the hook had errors."""
    report.check(name, eager == replayed, f"loss {replayed!r}", f"{eager!r}")
    report.check(f"{name}_errors", errors == 0, f"{errors:.0f} errors of the hook", "0")


def captured(mode: str) -> tuple[float, float, float]:
    """Capture forward and backward pass. Return the eager loss, the replayed one, and the hook's errors."""
    torch.manual_seed(0)
    model = Model().cuda()
    tokens = torch.randint(256, (BATCH, LENGTH), device="cuda")
    run = pushing(model=model)
    with polled(run):
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                model.zero_grad(set_to_none=True)
                model(tokens).backward()
                run.step(tokens=1)
        torch.cuda.current_stream().wait_stream(stream)
        eager = float(model(tokens).item())
        model.zero_grad(set_to_none=True)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            loss = model(tokens)
            loss.backward()
        for _ in range(REPLAYS):
            graph.replay()
            run.step(tokens=1)
        torch.cuda.synchronize()
        replayed = float(loss.item())
    errors = value(run, "training_hook_errors_total")
    run.finish()
    return eager, replayed, errors


def graphed(report: Report) -> None:
    """Pass a watched module to make_graphed_callables, and compare its outputs with the eager ones."""
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64, device="cuda")
    inputs = torch.randn(BATCH, 64, device="cuda", requires_grad=True)
    eager = float(module(inputs).sum().item())
    run = pushing()
    run.watch(module)
    with polled(run):
        callable_: Any = torch.cuda.make_graphed_callables(module, (inputs,))
        replayed = float(callable_(inputs).sum().item())
    compare("make_graphed_callables", eager, replayed, value(run, "training_hook_errors_total"), report)
    run.finish()
