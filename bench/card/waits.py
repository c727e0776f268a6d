"""Sections `pool` and `wait`: marks of a large FSDP2 model, and waits that delay kernels of a known length cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.card.device import GROUPS, WIDTH
from bench.card.jobs import (
    Delays,
    comm_hook,
    cuda,
    cycles_of,
    polled,
    require_cuda,
    sharded,
    silent,
    two_ranks_in_name,
    value,
)
from bench.card.report import Report
from flopwatch.training import Run

MICRO_BATCHES = 8
PUSH = 5.0  # seconds between two snapshots, as the hook pushes
MEASURED_SHARE = 0.9
FIRST_STEPS = 2  # never measured: startup, and the step without a mean to be compared with
SMALL_GROUPS, SMALL_WIDTH, BATCH = 8, 64, 4
DELAY = 0.005  # seconds of one delay, much longer than the work of a group
STEPS = 10
WAIT_SHARE = 0.05
SLICE_SECONDS = 0.002
TINY_KERNELS = 200  # before a step, so that the host runs ahead

WAITED, MEASURED = "training_collective_wait_seconds_total", "training_measured_steps_total"


def pool(device: str, seconds: float, report: Report) -> None:
    """Train 82 FSDP2 groups with eight micro-batches, and report marks without an event and measured steps."""
    require_cuda(device)
    with two_ranks_in_name():
        model = sharded(GROUPS, WIDTH, torch.device(device))
        run = silent(model=model)
        inputs = torch.randn(128, WIDTH, device=device)
        end, steps = time.monotonic() + seconds, 0
        slices: list[float] = []
        with polled(run, PUSH, slices):
            while time.monotonic() < end:
                for _ in range(MICRO_BATCHES):
                    model(inputs).sum().backward()
                run.step(tokens=1)
                steps += 1
            torch.cuda.synchronize()
        missed, measured = value(run, "training_missed_marks_total"), value(run, MEASURED)
        pool_lines(steps, run.recorder.measure_every, missed, measured, report)
        slice_line(slices, report)


def pool_lines(steps: int, every: int, missed: float, measured: float, report: Report) -> None:
    """Report missed marks, and the measured steps as a share of those that were due."""
    report.facts.update(steps=steps, every=every, missed=missed, measured=measured)
    report.check("missed_marks", missed == 0, f"{missed:.0f} in {steps} steps", "0")
    due = (steps - FIRST_STEPS) / every
    if due < 1:
        report.info("measured", f"{measured:.0f} of {steps} steps, too few to judge")
    else:
        report.within("measured", measured / due, MEASURED_SHARE, float("inf"), f" of the steps due, one in {every}")


def slice_line(slices: Sequence[float], report: Report) -> None:
    """Report the longest time in which the thread that pushes computes without a pause."""
    report.facts["slices"] = list(slices)
    longest = max(slices) * 1e3 if slices else None
    report.within("longest_slice", longest, 0, SLICE_SECONDS * 1e3, " ms of the thread that pushes")


def section(device: str, seconds: float, report: Report) -> None:
    """Compare waits in FSDP2's gathers and in DDP's reducer with delays on a stream of their own."""
    require_cuda(device)
    cycles = cycles_of(DELAY)
    with two_ranks_in_name():
        model: Any = sharded(SMALL_GROUPS, SMALL_WIDTH, torch.device(device))
        delays = Delays(cycles)
        with delays.in_gathers():
            waited, truth = _train(model, delays)
        compare("fsdp2", waited, truth, report)
        delays = Delays(cycles)
        model = DistributedDataParallel(torch.nn.Linear(SMALL_WIDTH, SMALL_WIDTH, device=device))
        model.register_comm_hook(cuda.Stream(), _delayed_hook(delays))
        waited, truth = _train(model, delays)
        compare("ddp", waited, truth, report)


def _delayed_hook(delays: Delays) -> Any:
    """Return a communication hook of DDP that delays each bucket on a stream and changes no gradient."""

    @comm_hook
    def hook(stream: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            delays.delay()
            future.set_result(buffer)  # records an event, which the reducer waits for
        return future

    return hook


def _train(model: Any, delays: Delays) -> tuple[float | None, float | None]:
    """Train with delays. Return seconds of wait and of delay per step, None if no step was measured."""
    run = silent(model=model)
    run.recorder.sample(1)
    inputs = torch.randn(BATCH, SMALL_WIDTH, device="cuda")
    tiny = torch.zeros(1, device="cuda")

    def steps(count: int) -> tuple[float, float]:
        for _ in range(count):
            for _ in range(TINY_KERNELS):
                tiny.add_(1)
            model(inputs).sum().backward()
            run.step(tokens=1)
        torch.cuda.synchronize()
        return totals(run)

    before = steps(FIRST_STEPS + 2)
    delays.seconds()
    after = steps(STEPS)
    truth = delays.seconds() / STEPS
    run.finish()
    measured = after[1] - before[1]
    return (after[0] - before[0]) / measured if measured > 0 else None, truth


def totals(run: Run) -> tuple[float, float]:
    """Return the seconds of wait and the measured steps of a run so far."""
    return value(run, WAITED), value(run, MEASURED)


def compare(name: str, waited: float | None, truth: float | None, report: Report) -> None:
    """Report the wait of a step next to the delay of a step, both in seconds."""
    if waited is None:
        report.check(name, False, "no measured step", "a wait in each step")
        return
    report.near(name, waited * 1e3, None if truth is None else truth * 1e3, WAIT_SHARE, " ms")
