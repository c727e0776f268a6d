"""Cost of recording one training step: the hook compared with Lightning, Google's ml-goodput and opentelemetry.

    python bench/hook.py [--steps N] [--turns N]

flopwatch step          run.step(tokens=n): steps, tokens, FLOPs, capacity, positions, durations and their histogram
flopwatch full          the same in `for batch in run.batches(...)`, with one `with run.activity(...)` in every step
ml-goodput step         https://github.com/AI-Hypercomputer/ml-goodput-measurement: record_step_start_time, with a
                        cloud logger that does nothing, where the real one would queue the entry for its thread
Lightning update        lightning.fabric.utilities.throughput.Throughput.update with its required arguments only,
                        which are neither tokens nor FLOPs
opentelemetry           synchronous instruments that count what `flopwatch full` counts

All loops take turns in one process, so the ratios hold on a noisy machine. Turns are short, and medians exclude turns
that other programs disturbed. The garbage collector is on, and earlier objects are frozen, so each loop pays for its
own garbage only. The hook adds up its events in another thread, whose cost is measured too. It is the CPU time per step
to add them up, and that of a push by the real thread to a real server in another process.
"""

from __future__ import annotations

import argparse
import gc
import http.server
import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from flopwatch.training import Run

PEAK = 989.4e12
FLOPS_PER_TOKEN = 51.5e9
TOKENS = 8192
INTERVAL = 5.0  # seconds between pushes, the hook's default

Loop = Callable[[int], object]


class Hook:
    """Loops that record steps with a `Run` that does not push."""

    def __init__(self) -> None:
        self.run = Run("bench", flops_per_token=FLOPS_PER_TOKEN, peak_flops=PEAK, environ={"FLOPWATCH_DISABLE": "1"})

    def step(self, steps: int) -> None:
        """Record `steps` steps and nothing else."""
        run = self.run
        for _ in range(steps):
            run.step(tokens=TOKENS)

    def full(self, steps: int) -> None:
        """Record `steps` steps, the waits for their batches, and an activity in each step."""
        run = self.run
        for _ in run.batches(range(steps)):
            with run.activity("other"):
                pass
            run.step(tokens=TOKENS)

    def digest(self) -> float:
        """Add up the recorded events as the push thread does, and return the CPU seconds."""
        began = time.thread_time()
        self.run.snapshot()
        return time.thread_time() - began


def goodput() -> Loop:
    """Return a loop that records its steps with ml-goodput-measurement."""
    from ml_goodput_measurement import goodput

    class CloudLogger:
        def write_cloud_logging_entry(self, entry: object) -> None:
            pass

    recorder = goodput.GoodputRecorder("bench", "bench", logging_enabled=True, cloud_logger=CloudLogger())
    taken = itertools.count()

    def loop(steps: int) -> None:
        for step, _ in zip(taken, range(steps), strict=False):
            recorder.record_step_start_time(step)

    return loop


def lightning() -> Loop:
    """Return a loop that counts its steps with Lightning."""
    from lightning.fabric.utilities.throughput import Throughput

    throughput = Throughput(available_flops=PEAK)
    clock = time.perf_counter
    begin = clock()
    taken = itertools.count(1)

    def loop(steps: int) -> None:
        for step, _ in zip(taken, range(steps), strict=False):
            throughput.update(time=clock() - begin, batches=step, samples=8 * step)

    return loop


def instruments() -> Loop:
    """Return a loop that counts what `Hook.full` counts with one synchronous instrument per family."""
    meter = MeterProvider([InMemoryMetricReader()], Resource({}), shutdown_on_exit=False).get_meter("bench")
    add = {
        name: meter.create_counter(name).add
        for name in ("steps", "tokens", "model_flops", "capacity_flops", "activity_seconds")
    }
    set_ = {name: meter.create_gauge(name).set for name in ("position", "tokens_position", "last_step")}
    duration = meter.create_histogram("duration").record
    clock = time.monotonic

    def loop(steps: int) -> None:
        end = clock()
        for step in range(1, steps + 1):
            got = clock()
            other = -clock()
            other += clock()
            began, end = end, clock()
            add["steps"](1)
            add["tokens"](TOKENS)
            add["model_flops"](TOKENS * FLOPS_PER_TOKEN)
            add["capacity_flops"](PEAK * (end - began - other))
            add["activity_seconds"](end - got - other, {"activity": "step"})
            add["activity_seconds"](got - began, {"activity": "data_stall"})
            add["activity_seconds"](other, {"activity": "other"})
            set_["position"](step)
            set_["tokens_position"](step * TOKENS)
            set_["last_step"](time.time())
            duration(end - began - other)

    return loop


def nothing(steps: int) -> None:
    """Run an empty loop of `steps` steps."""
    for _ in range(steps):
        pass


def turns(
    loops: dict[str, Loop], hook: Hook, steps: int, count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run every loop once per turn, and return for each loop and turn the nanoseconds of a step.

    The second dictionary has the nanoseconds to add up the events of a step, for the loops of flopwatch.
    """
    for loop in loops.values():
        loop(steps)  # warm, and beyond Lightning's window
        hook.digest()
    gc.collect()
    gc.freeze()
    taken: dict[str, list[float]] = {name: [] for name in loops}
    digested: dict[str, list[float]] = {name: [] for name in loops if name.startswith("flopwatch")}
    order = list(loops.items())
    for turn in range(count):
        for name, loop in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.perf_counter_ns()
            loop(steps)
            taken[name].append((time.perf_counter_ns() - began) / steps)
            if name in digested:
                # Without the cost of a snapshot that has nothing to add up, because it belongs to the push.
                digested[name].append((hook.digest() - hook.digest()) / steps * 1e9)
    gc.unfreeze()
    return taken, digested


def take_pushes(ready: Connection) -> None:
    """Serve pushes as the exporter does, as the main function of a process. Send the port to `ready`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        ready.send(server.server_port)
        server.serve_forever()


@contextmanager
def receiver() -> Iterator[str]:
    """Run a server for pushes until the block ends, and yield its URL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=take_pushes, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def pusher_clock() -> Callable[[], float]:
    """Return a function that returns the CPU seconds that the hook's thread has used."""
    [thread] = [thread for thread in threading.enumerate() if thread.name == "flopwatch"]
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock)


def push_seconds(endpoint: str, pushes: int) -> float:
    """Return the mean CPU seconds of a push to `endpoint`, for a run with one recorded step."""
    run = Run("bench", flops_per_token=FLOPS_PER_TOKEN, peak_flops=PEAK, endpoint=endpoint, push_interval=0.1)
    run.step(tokens=TOKENS, loss=1.0)
    cpu = pusher_clock()
    time.sleep(0.5)  # imports, and the first push
    before = cpu()
    time.sleep(0.1 * pushes)
    seconds = cpu() - before
    run.finish()
    return seconds / pushes


def main() -> None:
    """Measure each loop in turn and print the cost of one step."""
    parser = argparse.ArgumentParser(description="Cost of counting one training step.")
    parser.add_argument("--steps", type=int, default=200, help="steps a turn; what is recorded between two pushes")
    parser.add_argument("--turns", type=int, default=301)
    options = parser.parse_args()
    hook = Hook()
    loops: dict[str, Loop] = {"flopwatch step": hook.step, "flopwatch full": hook.full}
    for name, make in {"ml-goodput step": goodput, "Lightning update": lightning, "opentelemetry": instruments}.items():
        try:
            loops[name] = make()
        except ImportError as error:
            print(f"{name:20} is left out: {error}")
    loops["an empty loop"] = nothing
    with receiver() as endpoint:
        a_push = push_seconds(endpoint, 20)
    taken, digested = turns(loops, hook, options.steps, options.turns)
    ours = taken["flopwatch step"]
    for name, each in taken.items():
        ratio = statistics.median(peer / our for peer, our in zip(each, ours, strict=True))
        low, _, high = statistics.quantiles(each, n=4)
        print(
            f"{name:20}{statistics.median(each):8.0f} ns a step   ({low:.0f} to {high:.0f})   "
            f"{ratio:6.2f} x flopwatch step"
        )
    for name, each in digested.items():
        print(f"{name:20}{statistics.median(each):8.0f} ns a step to add up, in the other thread")
    print(
        f"{'flopwatch push':20}{a_push * 1e6:8.0f} us in the other thread every {INTERVAL:g} s: "
        f"{a_push / INTERVAL:.4%} of one core"
    )


if __name__ == "__main__":
    main()
