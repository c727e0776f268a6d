"""Training jobs of the simulator: mesh, steps, checkpoints and restarts, and the state of one attempt."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

Span = tuple[float, float]  # seconds, range of a uniform distribution


@dataclass(frozen=True)
class TrainingJob:
    """Settings of a simulated training job. Times are in seconds."""

    name: str
    nodes: int
    tenant: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)  # axis to size; the product is the GPUs
    step_seconds: float = 8.0
    step_spread: float = 0.01  # relative, drawn again after each checkpoint
    mfu: float = 0.41
    peak_flops: float = 989.4e12  # of a GPU
    checkpoint_every: float = 600.0
    save_blocks: float = 3.0
    save_writes: float = 45.0  # in the background until the checkpoint is durable; 0: saving blocks until then
    queue: float = 0.0
    startup: Span = (60.0, 120.0)
    compile: Span = (0.0, 0.0)
    restore: Span = (20.0, 50.0)
    restart_median: float = 90.0  # from the end of the processes to the next start
    restart_sigma: float = 0.4  # of its logarithm
    replace: Span = (60.0, 240.0)  # added if nodes are replaced
    begins: float = 0.0
    steps: int | None = None  # after which it is completed; None: at the end of the simulation

    def flops_per_step(self, gpus: int) -> float:
        """Return the model FLOPs of one step on `gpus` GPUs."""
        return self.mfu * self.peak_flops * gpus * self.step_seconds

    def restarts_after(self, rng: random.Random, replaced: bool) -> float:
        """Draw the seconds from the end of an attempt to the next start, with more of them if nodes are `replaced`."""
        delay = rng.lognormvariate(math.log(self.restart_median), self.restart_sigma)
        return delay + (rng.uniform(*self.replace) if replaced else 0.0)


@dataclass(slots=True)
class JobAttempt:
    """One attempt of a job. Its methods return what the training hooks would report at virtual time `t`."""

    id: str
    start: float
    nodes: list[int]  # by rank
    resumed: int | None  # the step to restore
    restored: int | None = None
    committed: int | None = None
    step: int = 0  # completed when the current activity began
    activity: str = "startup"
    since: float = 0.0
    each: float = 1.0  # seconds of a step
    stuck: int | None = None  # steps since the current activity began, if a fault blocks further ones
    closed: dict[str, float] = field(default_factory=dict)
    ended: float | None = None
    dark: set[int] = field(default_factory=set)  # nodes that send nothing any more

    def made(self, t: float) -> int:
        """Return the number of steps completed since the current activity began, 0 if the activity is not `step`."""
        if self.activity != "step":
            return 0
        made = math.floor((t - self.since) / self.each + 1e-6)
        return made if self.stuck is None else min(made, self.stuck)

    def last_step(self, t: float) -> float:
        """Return the virtual time at which the last step ended, or the current activity began if that was later."""
        return self.since + self.made(t) * self.each

    def open_step(self, t: float) -> float:
        """Return the age of the current step in seconds, 0 if the activity is not `step`."""
        return max(0.0, t - self.since - self.made(t) * self.each) if self.activity == "step" else 0.0

    def seconds(self, t: float) -> dict[str, float]:
        """Return the attempt's cumulative seconds per activity, up to virtual time `t`."""
        return {**self.closed, self.activity: self.closed.get(self.activity, 0.0) + t - self.since}

    def switch(self, activity: str, t: float) -> None:
        """Begin another activity at virtual time `t`."""
        self.step += self.made(t)
        self.closed = self.seconds(t)
        self.activity, self.since = activity, t

    def position(self, t: float) -> int | None:
        """Return the last completed step, or None before a checkpoint is restored or the first step begins."""
        if self.restored is None and "step" not in self.closed and self.activity != "step":
            return None
        return self.step + self.made(t)

    def leader(self) -> int:
        """Return the index in `nodes` of the first node that still sends records, else the last index."""
        return next((place for place, node in enumerate(self.nodes) if node not in self.dark), len(self.nodes) - 1)
