"""What a training step pays for being counted: flopwatch's hook beside opentelemetry's synchronous instruments.

    python bench/hook.py [--steps N]

Both count the same things of the same loop: steps, tokens, model and capacity FLOPs, the seconds waiting for the batch
and in the step, the wait for other ranks and the measured steps, positions, the loss, and the histogram of durations.
They take turns in one process, so the ratio holds on a noisy machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from flopwatch.training import Run

TURNS = 9
PEAK = 989.4e12
FLOPS_PER_TOKEN = 51.5e9
TOKENS = 8192


def hook() -> Callable[[int], None]:
    """Return a loop that counts its steps with flopwatch."""
    run = Run("bench", flops_per_token=FLOPS_PER_TOKEN, peak_flops=PEAK, environ={"FLOPWATCH_DISABLE": "1"})

    def loop(steps: int) -> None:
        for _ in run.batches(range(steps)):
            with run.collective_wait():
                pass
            run.step(tokens=TOKENS, loss=2.5)

    return loop


def instruments() -> Callable[[int], None]:
    """Return a loop that counts the same with one synchronous instrument per family."""
    meter = MeterProvider([InMemoryMetricReader()], Resource({}), shutdown_on_exit=False).get_meter("bench")
    add = {name: meter.create_counter(name).add for name in (
        "steps", "tokens", "model_flops", "capacity_flops", "activity_seconds", "wait", "measured_seconds",
        "measured_steps")}
    position, position_tokens, loss = (meter.create_gauge(name).set for name in ("position", "tokens_position", "loss"))
    duration = meter.create_histogram("duration").record

    def loop(steps: int) -> None:
        clock, batches, steps_done, end = time.monotonic, iter(range(steps)), 0, time.monotonic()
        while True:
            waiting = clock()
            if next(batches, None) is None:
                return
            got = clock()
            wait = -clock()
            wait += clock()
            steps_done, began, end = steps_done + 1, end, clock()
            add["steps"](1)
            add["tokens"](TOKENS)
            add["model_flops"](TOKENS * FLOPS_PER_TOKEN)
            add["capacity_flops"](PEAK * (end - began))
            add["activity_seconds"](end - began - (got - waiting), {"activity": "step"})
            add["activity_seconds"](got - waiting, {"activity": "data_stall"})
            add["wait"](wait)
            add["measured_seconds"](end - began)
            add["measured_steps"](1)
            position(steps_done)
            position_tokens(steps_done * TOKENS)
            loss(2.5)
            duration(end - began)

    return loop


def microseconds(loop: Callable[[int], None], steps: int) -> float:
    """Return the microseconds one step of the loop takes."""
    began = time.perf_counter()
    loop(steps)
    return (time.perf_counter() - began) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of counting one training step.")
    parser.add_argument("--steps", type=int, default=5000, help="steps a turn")
    steps = parser.parse_args().steps
    loops = {"flopwatch hook": hook(), "opentelemetry instruments": instruments()}
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TURNS):
        for name, loop in loops.items():
            taken[name].append(microseconds(loop, steps))
    ours, theirs = taken.values()
    for name, turns in taken.items():
        print(f"{name:28}{statistics.median(turns):8.1f} us a step")
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    print(f"{'ratio':28}{statistics.median(ratios):8.1f} x   ({min(ratios):.1f} to {max(ratios):.1f} in {TURNS} turns)")


if __name__ == "__main__":
    main()
