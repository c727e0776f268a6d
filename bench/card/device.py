"""Sections `clock` and `overhead`: times of CUDA events on the host's clock, and the hook's cost."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from bench.card.jobs import cuda, polled, require_cuda, sharded, silent, two_ranks_in_name
from bench.card.report import Report, Unavailable
from flopwatch.training.torch import device as hook

MARKS = 2000
IN_A_ROW = 500  # calls, fewer than the commands that the device's queue takes before the host must wait
SYNCED_EVERY = 10  # marks, so that the host runs ahead of the device in between
ABSOLUTE_SECONDS, GAP_SECONDS = 0.002, 20e-6
GROUPS, WIDTH = 81, 1024  # of an FSDP2 model as large as 70B has, with one more for the root
BLOCK, PAIRS = 10, 6  # steps of a block, and blocks with and without measurement
SHARDED_SHARE = 0.01
OVERHEAD_PAIRS = 8
NEVER = 1 << 30  # steps between two measured ones


@dataclass(frozen=True, slots=True)
class Sample:
    """Mark in seconds on the host's clock, between two events, and the host's time after it or None.

    `before` and `after` are the device's milliseconds at the events, since the first event of all.
    """

    at: float
    before: float
    after: float
    synced: float | None


def timed() -> Any:
    """Return a CUDA event on the current stream, recorded now."""
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def clock(device: str, seconds: float, report: Report) -> None:
    """Compare marks with the host's clock after a synchronization, and their gaps with CUDA's own events."""
    require_cuda(device)
    errors: list[str] = []
    cuda.init()
    moments = hook.moments(time.monotonic, lambda what, error: errors.append(f"{what}: {error}"))
    if moments is None:
        raise Unavailable(f"no marks on this device: {' '.join(errors) or 'not CUDA'}")
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    draw = random.Random(0)
    cost: list[float] = []
    pending: list[tuple[Any, Any, Any, float | None]] = []
    began = time.monotonic()
    while len(pending) < MARKS and time.monotonic() - began < seconds:
        for _ in range(draw.randrange(4)):
            matrix @ matrix
        before, asked = timed(), time.perf_counter()
        mark: Any = moments.mark()
        cost.append(time.perf_counter() - asked)
        after, synced = timed(), None
        if len(pending) % SYNCED_EVERY == SYNCED_EVERY - 1:
            torch.cuda.synchronize()
            synced = time.monotonic()
            getattr(mark, "at", float)()
        pending.append((mark, before, after, synced))
        time.sleep(draw.random() * 0.01)
    torch.cuda.synchronize()
    queries = [took(after.query) for _, _, after, _ in pending]
    origin = pending[0][1]
    samples = [
        Sample(at, origin.elapsed_time(before), origin.elapsed_time(after), synced)
        for mark, before, after, synced in pending
        if isinstance(mark, hook.Moment) and (at := mark.at()) is not None
    ]
    marks_line(len(samples), len(pending), errors, report)
    compare(samples, report)
    cost_line("mark_cost", cost, report)
    cost_line("query_cost", queries, report)
    _costs_in_a_row(moments, report)


def _costs_in_a_row(moments: hook.Moments, report: Report) -> None:
    """Report the cost of marks in a row, and next to it that of an event alone and of a small kernel."""
    event, small = timed(), torch.zeros(1, device="cuda")
    calls = {"mark": moments.mark, "event": event.record, "kernel": lambda: small.add_(1)}
    for name, call in calls.items():
        torch.cuda.synchronize()
        cost_line(f"{name}_in_a_row", [took(call) for _ in range(IN_A_ROW)], report)
    torch.cuda.synchronize()


def took(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cost_line(name: str, seconds: Sequence[float], report: Report) -> None:
    """Report the cost of one kind of call."""
    if seconds:
        report.info(name, f"p50 {quantile(seconds, 0.5) * 1e6:.1f} us, p99 {quantile(seconds, 0.99) * 1e6:.1f} us")


def marks_line(found: int, wanted: int, errors: Sequence[str], report: Report) -> None:
    """Report how many marks have a time, and the errors of CUDA."""
    report.check("marks", found == wanted and not errors, f"{found} {' '.join(errors)}".strip(), f"{wanted}")


def compare(samples: Sequence[Sample], report: Report) -> None:
    """Report the errors of marks, of their gaps, and the drift between the two clocks."""
    late = [sample.at - sample.synced for sample in samples if sample.synced is not None]
    if len(samples) < 2 or not late:
        report.info("error", f"{len(samples)} marks are too few")
        return
    # A synchronized host is later than the device, by microseconds of the call.
    report.within("error_max", max(map(abs, late)) * 1e3, 0, ABSOLUTE_SECONDS * 1e3, " ms")
    report.check("not_later", max(late) <= GAP_SECONDS, f"{max(late) * 1e6:.1f} us", "no mark after the host saw it")
    gaps = [gap_error(one, other) for one, other in pairwise(samples)]
    report.within("gap_error_p99", quantile(gaps, 0.99) * 1e6, 0, GAP_SECONDS * 1e6, " us")
    report.info("gap_error_max", f"{max(gaps) * 1e6:.1f} us")
    synced = [sample for sample in samples if sample.synced is not None]
    host = (synced[-1].synced or 0.0) - (synced[0].synced or 0.0)
    if host > 0:
        device = (synced[-1].after - synced[0].after) / 1e3
        report.info("drift", f"{(device / host - 1) * 1e6:.1f} ppm over {host:.1f} s")


def gap_error(one: Sample, other: Sample) -> float:
    """Return how many seconds the time between two marks is shorter or longer than the events around them allow."""
    gap = other.at - one.at
    least, most = (other.before - one.after) / 1e3, (other.after - one.before) / 1e3
    return max(least - gap, gap - most, 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values is."""
    ascending = sorted(values)
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))]


def overhead(device: str, seconds: float, report: Report) -> None:
    """Measure the hook's share of a step of the example, and of a step of 82 FSDP2 groups."""
    require_cuda(device)
    _sharded_overhead(seconds / 3, report)
    from bench import overhead as example

    shares = example.measure(device, OVERHEAD_PAIRS)
    report.facts["example"] = str(shares)
    report.info("example_step", f"{shares.step * 1e3:.2f} ms")
    report.within("example_share", shares.share * 100, 0, example.GOAL * 100, " % of a step")


def _sharded_overhead(seconds: float, report: Report) -> None:
    """Compare measured steps of an FSDP2 model with steps in between."""
    with two_ranks_in_name():
        model = sharded(GROUPS, WIDTH, torch.device("cuda"))
        run = silent(model=model)
        inputs = torch.randn(512, WIDTH, device="cuda")

        def block(every: int) -> float:
            run.recorder.sample(every)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(BLOCK):
                model(inputs).sum().backward()
                run.step(tokens=1)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / BLOCK

        block(1)
        taken: dict[int, list[float]] = {1: [], NEVER: []}
        end = time.monotonic() + seconds
        with polled(run, 5.0) as snapshots:
            while time.monotonic() < end or len(taken[1]) < PAIRS:
                for every, found in taken.items():
                    found.append(block(every))
        steps_between = max(1.0, run.recorder.measured_every / statistics.median(taken[NEVER]))
    report.facts["sharded"] = {"measured": taken[1], "between": taken[NEVER], "snapshots": snapshots}
    sharded_lines(taken[1], taken[NEVER], steps_between, report)
    if snapshots:
        report.info("longest_snapshot", f"{max(snapshots) * 1e3:.1f} ms in the thread that pushes")


def sharded_lines(measured: Sequence[float], between: Sequence[float], every: float, report: Report) -> None:
    """Report what the hook adds to an FSDP2 step, if one step in `every` is measured."""
    step = statistics.median(between)
    added = statistics.median(measured) - step
    report.info("sharded_step", f"{step * 1e3:.2f} ms, measured steps take {added * 1e6:+.0f} us")
    report.within("sharded_share", max(0.0, added) / every / step * 100, 0, SHARDED_SHARE * 100, " % of a step")
