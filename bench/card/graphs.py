"""Section `graph`: CUDA graphs of a model with the hook, while another thread queries the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.card import identity
from bench.card.jobs import (
    Model,
    comm_hook,
    cuda,
    polled,
    pushing,
    require_cuda,
    silent,
    two_ranks_in_name,
    value,
    warnings_of,
)
from bench.card.report import Report
from flopwatch.training import Run

MODES = ("global", "thread_local", "relaxed")  # cudaStreamCaptureMode
REPLAYS = 50
WARM_UP = 3
DDP_WARM_UP = 11  # https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
COMPILED_STEPS = 30
UNAVAILABLE, WARNING = "training_collective_wait_unavailable", "the wait for other ranks is not measured"
LENGTH, BATCH = 64, 4


def section(device: str, seconds: float, report: Report) -> None:
    """Capture in each mode and through PyTorch's wrappers, and compare the losses with those of the eager model."""
    require_cuda(device)
    checks: dict[str, Callable[[Report], None]] = {mode: partial(in_mode, mode) for mode in MODES}
    checks |= {"make_graphed_callables": graphed, "reduce_overhead": compiled, "waits_end": waits_end}
    for name, check in checks.items():
        try:
            check(report)
        except RuntimeError as error:
            report.check(name, False, str(error).partition("\n")[0], "a capture")


def in_mode(mode: str, report: Report) -> None:
    """Capture in one mode."""
    eager, replayed, errors = captured(mode)
    compare(mode, eager, replayed, errors, report)


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
        eager = float(model(tokens).item())
        replayed = replays(model, tokens, run, mode, WARM_UP)
    errors = value(run, "training_hook_errors_total")
    run.finish()
    return eager, replayed, errors


def replays(model: Any, tokens: torch.Tensor, run: Run | None, mode: str, warm_up: int) -> float:
    """Train some steps, capture forward and backward pass, and replay them. Return the last loss."""
    step = bool if run is None else partial(run.step, tokens=1)
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            model.zero_grad(set_to_none=True)
            model(tokens).backward()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        loss = model(tokens)
        loss.backward()
    for _ in range(REPLAYS):
        graph.replay()
        step()
    torch.cuda.synchronize()
    return float(loss.item())


def compiled(report: Report) -> None:
    """Train in torch.compile's mode of CUDA graphs, twice without the hook and once with it."""
    losses = partial(identity.losses, "reduce_overhead", torch.device("cuda"), COMPILED_STEPS)
    identity.compare("reduce_overhead", losses(False), losses(False), losses(True), report)


def waits_end(report: Report) -> None:
    """Capture a DDP model, in whose replays no wait is seen, so that the hook must report why waits ended."""
    tokens = torch.randint(256, (BATCH, LENGTH), device="cuda")
    with two_ranks_in_name(), warnings_of("flopwatch") as logged:
        try:
            replays(on_a_stream(), tokens, None, MODES[0], DDP_WARM_UP)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            report.info("waits_end", f"DDP is not captured without the hook either: {why}")
            return
        model = on_a_stream()
        run = silent(model=model)
        run.recorder.sample(1)
        with polled(run):
            replays(model, tokens, run, MODES[0], DDP_WARM_UP)
        waits_line(value(run, UNAVAILABLE, reason="cuda_graph"), logged, report)
        run.finish()


def on_a_stream() -> Any:
    """Return a DDP model made on a stream of its own. DDP keeps that stream, and the default one cannot be captured."""
    stream = cuda.Stream()
    with torch.cuda.stream(stream):
        model = replicated(torch.device("cuda"))
    torch.cuda.current_stream().wait_stream(stream)
    return model


def replicated(device: torch.device) -> Any:
    """Return a DDP model that keeps its own gradients, because a group without peers reduces none."""

    @comm_hook
    def unreduced(_: None, bucket: Any) -> Any:
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(buffer)
        return future

    model: Any = DistributedDataParallel(Model().to(device))
    model.register_comm_hook(None, unreduced)
    return model


def waits_line(reason: float, logged: Sequence[str], report: Report) -> None:
    """Report whether the hook has the reason for which waits ended, and logged one warning about it."""
    warned = [text for text in logged if WARNING in text]
    measured = f"reason {'cuda_graph' if reason == 1 else 'unknown'}, {len(warned)} warnings"
    report.check("waits_end", reason == 1 and len(warned) == 1, measured, "reason cuda_graph, 1 warning")


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
