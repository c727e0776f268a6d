"""State of a simulated cluster: the nodes, GPUs and ports that are broken, and the progress of each job."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.jobs import JobAttempt, TrainingJob
from simulator.topology import PortPlace
from simulator.truth import RunTruth, TrueLoss


@dataclass(frozen=True)
class Damage:
    """Nodes, GPUs and ports that a fault broke, from `since` to `until` in virtual seconds.

    A GPU is given by the `PortPlace` of the network port next to it. A `dark` node sends nothing.
    """

    since: float
    until: float
    nodes: frozenset[int]
    dark: bool
    gpus: frozenset[PortPlace]
    ports: frozenset[PortPlace]
    announced: bool = False  # maintenance that was declared in advance


@dataclass(slots=True)
class JobState:
    """Current state of a training job. The events of the simulation change it in place."""

    job: TrainingJob
    gpus: int
    truth: RunTruth
    nodes: list[int] = field(default_factory=list)
    attempt: JobAttempt | None = None
    number: int = 0  # of the attempt, counted from 1
    phase: int = 0  # number of the current phase; an action that was scheduled in an earlier one is dropped
    booked: float = 0.0  # the truth is complete up to this time
    durable: list[int] = field(default_factory=list)  # steps of the checkpoints that can be restored
    slow: float = 1.0  # factor on the usual step time, from the next checkpoint on
    slowed: TrueLoss | None = None  # the cause of `slow`
    charged: TrueLoss | None = None  # the slowdown of the steps up to the next checkpoint
    usual: float = 0.0  # seconds of a step up to the next checkpoint, without the slowdown
    held: bool = True  # whether the job keeps its GPUs while it is down
    unavailable: set[int] = field(default_factory=set)  # nodes to replace before the next start
    live: bool = False  # its processes run and no fault blocks them
    done: bool = False

    @property
    def current(self) -> JobAttempt:
        """Return the current attempt of the job, which must have been started."""
        assert self.attempt is not None
        return self.attempt
