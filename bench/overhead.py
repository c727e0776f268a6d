"""Share of a training step that the hook takes, with the example's model on the GPU if there is one.

    python bench/overhead.py [--pairs N] [--device cpu|cuda]

Blocks of 20 steps with and without the hook take turns inside one process, because two processes would differ by more
than the hook costs. Both train a model of their own, with the same weights, on the same batches. The one with the hook
is watched as in examples/train_lm.py. The median of the ratios of all pairs and its 95 % interval (bootstrap) are
printed.

That interval is wide compared with the goal, a share of 0.1 %. So the share is also computed from its parts. One is the
time that the hook adds to the steps of a tiny model. It is measured with the same pairs, for measured steps and for
those between. The other is the CPU time of the hook's own thread, as if it were taken from the training. On CPU, where
a step has one thread, the first part and the step are CPU time, which other processes do not disturb. On a GPU, both
are wall-clock time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from bench.hook import INTERVAL, pusher_clock, receiver
from flopwatch.training import Run

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lm.py"
BLOCK = 20  # steps
PUSHES = 4
NEVER = 1 << 30  # steps between two measured ones
GOAL = 0.001
# On a GPU, a step of the example's model would be too short.
LARGER = {"LAYERS": 12, "WIDTH": 2048, "HEADS": 16, "CONTEXT": 2048, "BATCH": 4}

Batch = tuple[Tensor, Tensor]


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Remove PyTorch's global optimizer hooks of this process until the block ends."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
        taken.append((hooks, dict(hooks)))
        hooks.clear()
    yield
    for hooks, before in taken:
        hooks.update(before)


@dataclass
class Job:
    """A model in training, with flopwatch's hook if `run` is not None."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: int
    run: Run | None

    def block(self, batches: Sequence[Batch], clock: Callable[[], float]) -> float:
        """Train on these batches, and return the mean seconds of a step as `clock` measures them."""
        run, device = self.run, next(self.model.parameters()).device
        with contextlib.nullcontext() if run is not None else without_global_hooks():
            return self._block(batches, clock, device)

    def _block(self, batches: Sequence[Batch], clock: Callable[[], float], device: torch.device) -> float:
        run = self.run
        began = clock()
        for inputs, targets in batches if run is None else run.batches(batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = self.model(inputs, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if run is not None:
                run.step(tokens=self.tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (clock() - began) / len(batches)


class Tiny(nn.Module):
    """Smallest model that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor, _: Tensor) -> Tensor:
        """Return the sum of the weighted inputs as loss."""
        return (self.weight * inputs).sum()


def example(device: str) -> ModuleType:
    """Return examples/train_lm.py as a module, with a model that suits the device."""
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in LARGER.items() if device == "cuda" else ():
        setattr(module, name, value)
    return module


def jobs(model: nn.Module, tokens: int, name: str, endpoint: str, **arguments: Any) -> tuple[Job, Job]:
    """Return two jobs that train equal models, the first without the hook and the second with it."""
    watched = copy.deepcopy(model)
    run = Run(name, model=watched, dtype="fp32", endpoint=endpoint, push_interval=INTERVAL, **arguments)
    return tuple(  # type: ignore[return-value]
        Job(one, torch.optim.AdamW(one.parameters(), lr=1e-4), tokens, its)
        for one, its in ((model, None), (watched, run))
    )


def paired(
    plain: Job,
    hooked: Job,
    batches: Sequence[Batch],
    pairs: Iterable[int],
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Return the seconds of a step without and with the hook, for each pair. In odd pairs, the plain job runs first."""
    taken = []
    for pair in pairs:
        order = (plain, hooked) if pair % 2 else (hooked, plain)
        seconds = {id(job): job.block(batches, clock) for job in order}
        taken.append((seconds[id(plain)], seconds[id(hooked)]))
    return taken


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


@dataclass(frozen=True, slots=True)
class Shares:
    """Measured cost of the hook: seconds of a step, ratios of pairs, and what the hook adds.

    `added` has the seconds that the hook adds to steps of a tiny model, measured ones (1) and others (NEVER). One step
    in `every` is measured. `cpu` is the share of one core that the thread that pushes takes.
    """

    step: float
    ratios: list[float]
    added: dict[int, list[float]]
    every: int
    cpu: float

    @property
    def loop(self) -> float:
        """Return the seconds that the hook adds to a step of the loop."""
        measured, between = (statistics.median(seconds) for seconds in self.added.values())
        return between + (measured - between) / self.every

    @property
    def share(self) -> float:
        """Return the share of a step that the hook takes, its own thread included."""
        return self.loop / self.step + self.cpu


def added_to_steps(endpoint: str, pairs: int, clock: Callable[[], float]) -> dict[int, list[float]]:
    """Return the seconds that the hook adds to a step of a tiny model, in measured steps and in others."""
    numbers = [(torch.rand(8), torch.rand(8)) for _ in range(BLOCK)]
    plain, hooked = jobs(Tiny(), 1, "tiny", endpoint, flops_per_token=1.0, peak_flops=1e15)
    assert hooked.run is not None
    paired(plain, hooked, numbers, range(10))
    added: dict[int, list[float]] = {1: [], NEVER: []}
    for pair in range(10 * pairs):
        for every, seconds in added.items():
            hooked.run.recorder.sample(every)
            [(before, after)] = paired(plain, hooked, numbers, (pair,), clock)
            seconds.append(after - before)
    hooked.run.finish()
    return added


def measure(device: str, pairs: int) -> Shares:
    """Return the cost of the hook in the training of the example's model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_device(device)
    clock = time.thread_time if device == "cpu" else time.perf_counter
    lm = example(device)
    tokens = lm.BATCH * lm.CONTEXT
    vocabulary = torch.randint(lm.VOCABULARY, (BLOCK, lm.BATCH, lm.CONTEXT + 1))
    text = [(one[:, :-1], one[:, 1:]) for one in vocabulary]
    flops = lm.Transformer(
        layers=lm.LAYERS, width=lm.WIDTH, heads=lm.HEADS, mlp_width=4 * lm.WIDTH, vocabulary=lm.VOCABULARY
    ).flops_per_token(lm.CONTEXT)
    with receiver() as endpoint:
        added = added_to_steps(endpoint, pairs, clock)
        plain, hooked = jobs(lm.LanguageModel(), tokens, "example", endpoint, flops_per_token=flops, peak_flops=1e15)
        assert hooked.run is not None
        paired(plain, hooked, text, range(2))
        taken = paired(plain, hooked, text, range(pairs))
        thread, began, steps = pusher_clock(), time.perf_counter(), []
        cpu = -thread()
        while (wall := time.perf_counter() - began) < PUSHES * INTERVAL:
            steps.append(hooked.block(text, clock))
        cpu += thread()
        every = hooked.run.recorder.measure_every
        hooked.run.finish()
    return Shares(statistics.median(steps), [after / before for before, after in taken], added, every, cpu / wall)


def main() -> None:
    """Measure blocks of steps with and without the hook, and print the difference."""
    parser = argparse.ArgumentParser(description="The hook's share of a training step.")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks of 20 steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    found = measure(options.device, options.pairs)
    step, cpu = found.step, found.cpu
    print(
        f"{torch.cuda.get_device_name() if options.device == 'cuda' else 'CPU, one thread'}: "
        f"{step * 1e3:.2f} ms a step, {len(found.ratios)} pairs of blocks of {BLOCK} steps"
    )
    low, high = interval(found.ratios)
    print(f"with / without the hook    {statistics.median(found.ratios):.4f}   (95 % interval {low:.4f} to {high:.4f})")
    for name, seconds in zip(("in a measured step", "in a step between"), found.added.values(), strict=True):
        low, high = interval(seconds)
        print(
            f"{name:27}{statistics.median(seconds) * 1e6:.1f} us   (95 % interval {low * 1e6:.1f} to {high * 1e6:.1f})"
        )
    print(f"{f'with one in {found.every} measured':27}{found.loop * 1e6:.1f} us: {found.loop / step:.4%} of a step")
    print(f"in the thread that pushes  {cpu * step * 1e6:.1f} us of CPU a step: {cpu:.4%} of one core")
    print(
        f"together                   {found.share:.4%} of a step; "
        f"the goal, {GOAL:.1%}, is {'met' if found.share < GOAL else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
