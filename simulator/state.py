"""State of a simulated cluster: what is broken, and how far each job is."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.jobs import JobAttempt, TrainingJob
from simulator.topology import PortPlace
from simulator.truth import RunTruth, TrueLoss


@dataclass(frozen=True)
class Damage:
    """Nodes, GPUs and ports that a fault broke, from `since` to `until` in virtual seconds.

    The place of a GPU is the place of its port.
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
    """A training job at one moment of virtual time."""

    job: TrainingJob
    gpus: int
    truth: RunTruth
    nodes: list[int] = field(default_factory=list)
    attempt: JobAttempt | None = None
    number: int = 0  # of the attempt
    phase: int = 0  # an action that was scheduled in an earlier phase is dropped
    booked: float = 0.0  # the truth is complete up to this time
    durable: list[int] = field(default_factory=list)  # steps of the checkpoints that can be restored
    slow: float = 1.0  # factor on the usual step time, from the next stretch of steps on
    slowed: TrueLoss | None = None  # the cause of `slow`
    charged: TrueLoss | None = None  # the slowdown in the present stretch of steps
    usual: float = 0.0  # seconds of a step in the present stretch, without the slowdown
    held: bool = True  # whether the job keeps its GPUs while it is down
    unavailable: set[int] = field(default_factory=set)  # nodes to replace before the next start
    live: bool = False  # its processes run and no fault blocks them
    done: bool = False

    @property
    def current(self) -> JobAttempt:
        """Return the attempt of a job that was started."""
        assert self.attempt is not None
        return self.attempt
