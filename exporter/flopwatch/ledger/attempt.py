"""One attempt of a run, and what its nodes said last."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from flopwatch.ledger.record import STATUSES
from flopwatch.ledger.slowdowns import Pace
from flopwatch.ledger.stragglers import Late, Wait

BUCKETS = (
    "productive",
    "lost",
    "startup",
    "compile",
    "data_stall",
    "checkpoint_save",
    "checkpoint_restore",
    "evaluation",
    "generation",
    "down",
    "queue",
    "other",
)
ENDS = (*STATUSES, "silent")
END_OF_RUN = ("completed", "stopped")
UNPLANNED = ("failed", "silent")
RETAINED = ("productive", "generation")


@dataclass(slots=True)
class Source:
    """What one source (a node) of the current attempt said last."""

    start: float  # of its process, by its own clock
    t: float
    rank: float | None = None
    age: float = 0.0
    heard: float = -inf  # when, by the ledger's clock
    met: float = -inf  # and for the first time
    seen: float = 0.0  # the attempt's `elapsed` when it was
    activity: dict[str, float] = field(default_factory=dict)
    base: dict[str, float] = field(default_factory=dict)  # activity when the frontier last moved
    epoch: int = 0  # the move of the frontier that base belongs to
    open_step: float = 0.0
    step: float | None = None
    restored: float | None = None
    gpus: float | None = None
    peak: float | None = None
    credited_gpus: float = 0.0  # that are counted in what was booked of the attempt before they were heard of
    credited_peak: float = 0.0
    flops: float = 0.0  # up to flops_step
    flops_step: float = 0.0
    fell: float | None = None  # since when it tells fewer FLOPs than before
    mark: float = 0.0  # steps up to here add no retained FLOPs
    end: str | None = None
    whole: bool = False  # whether it began with a start, which tells of all its GPUs
    fewer: float | None = None  # since when it tells fewer GPUs than before
    waits: tuple[Wait, ...] | None = None
    waited: tuple[Wait, ...] | None = None  # when the window began, of this number
    window: int = 0

    @property
    def position(self) -> float:
        """Return how far on the wall clock its activities reach."""
        return self.start + self.age


@dataclass(slots=True)
class Attempt:
    """The current or last attempt."""

    id: str
    start: float
    resumed: float  # the step it began from
    mark: float  # the furthest step reported when it began
    cursor: float  # the followed source's step up to which time is booked
    leader: str = ""  # the source that is followed
    epoch: int = 0
    end: str | None = None
    carried: bool = False  # it went on beside another that has ended; of what it was before nothing is booked
    number: int = 0
    begin: float = 0.0  # its part of the run's wall clock: from where the books were, if those were ahead
    over: float | None = None
    step: float | None = None  # the furthest
    committed: float | None = None
    gpus: float = 0.0  # the most it held
    nodes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    priced: float = 0.0  # seconds of it that are in the run's capacity
    down_seconds: float = 0.0  # from its end to the next start
    down_gpu_seconds: float = 0.0
    recovery_seconds: float | None = None  # from its unplanned end to the first new step
    elapsed: float = 0.0  # what its processes have lived together, by their own clocks
    newest: float = 0.0  # stamp of theirs
    skewed: bool = False  # whether their stamps disagree
    pace: Pace = field(default_factory=lambda: Pace(0.0))
    late: Late = field(default_factory=Late)

    def figures(self) -> dict[str, Any]:
        """Return what is to be told of it."""
        told = ("number", "begin", "gpus", "nodes", "down_seconds", "down_gpu_seconds", "recovery_seconds")
        return {name: getattr(self, name) for name in told} | {
            "attempt": self.id,
            "end": self.over,
            "status": self.end,
            "first_step": self.resumed,
            "last_step": self.step,
            "committed_step": self.committed,
            "seconds": dict(self.seconds),
            "gpu_seconds": dict(self.gpu_seconds),
        }


def order(source: Source) -> float:
    """Return the place in which a source is followed: the lowest rank first."""
    return source.rank if source.rank is not None else inf
