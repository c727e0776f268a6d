"""Attempt of a run, and the last report of each node. A renamed field is a new format of the ledger's file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

import msgspec

from flopwatch.ledger.record import STATUSES
from flopwatch.ledger.slowdowns import Pace

ENDS = (*STATUSES, "silent")
EndOfRun = Literal["completed", "stopped"]
END_OF_RUN: tuple[str, ...] = get_args(EndOfRun)
UNPLANNED = ("failed", "silent")


@dataclass(slots=True)
class ReportingNode:
    """Last report of one node (a record's `source`) in the current attempt."""

    start: float  # process start, by the node's own clock
    t: float  # stamp of the last record
    rank: float | None = None
    age: float = 0.0  # seconds the process has lived
    heard: float = -inf  # ledger time of the last record
    met: float = -inf  # ledger time of the first record
    seen: float = 0.0  # the attempt's `elapsed` at the last record
    activity: dict[str, float] = field(default_factory=dict)
    base: dict[str, float] = field(default_factory=dict)  # activity when the frontier last moved
    epoch: int = 0  # the move of the frontier that `base` belongs to
    open_step: float = 0.0
    step: float | None = None
    restored: float | None = None
    gpus: float | None = None
    peak: float | None = None
    credited_gpus: float = 0.0  # GPUs counted in the attempt before this node reported them
    credited_peak: float = 0.0
    flops: float = 0.0  # model FLOPs up to `flops_step`
    flops_step: float = 0.0
    fell: float | None = None  # since when it reports fewer FLOPs than before
    mark: float = 0.0  # steps up to here add no retained FLOPs
    work: dict[str, float] = field(default_factory=dict)  # totals of its processes
    uncounted: tuple[str, ...] = ()  # names in `work` that its last record lacks
    work_fell: float | None = None  # since when it reports less work than before
    end: str | None = None
    whole: bool = False  # whether it began with a start, which reports all its GPUs
    fewer: float | None = None  # since when it reports fewer GPUs than before

    @property
    def position(self) -> float:
        """Return the Unix time up to which the node's activities are known: process start plus age."""
        return self.start + self.age

    @property
    def order(self) -> float:
        """Return the sort key for choosing the node whose time the ledger follows. The lowest rank is first."""
        return self.rank if self.rank is not None else inf

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "ReportingNode":
        """Restore a node from its saved state."""
        credited = {"credited_gpus": state["gpus"] or 0.0, "credited_peak": state["peak"] or 0.0}
        return msgspec.convert({"heard": state["t"], "met": state["t"], **credited, **state}, cls)


@dataclass(slots=True)
class Attempt:
    """State of a run's current attempt, or of its last one while none is running."""

    id: str
    start: float
    resumed: float  # the step it began from
    mark: float  # the furthest step reported before it began
    cursor: float  # step of the followed node up to which time is attributed
    leader: str = ""  # the node that is followed
    epoch: int = 0  # how often its frontier moved
    end: str | None = None
    carried: bool = False  # it outlived an overlapping attempt; its time before that does not count
    number: int = 0
    begin: float = 0.0  # where its part of the run's wall clock begins: the frontier, if that was ahead of `start`
    over: float | None = None  # where that part ends
    step: float | None = None  # the furthest
    committed: float | None = None
    gpus: float = 0.0  # the most it held
    nodes: int = 0  # the most that reported
    seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    priced: float = 0.0  # its seconds that are in the run's capacity
    down_seconds: float = 0.0  # from its end to the next start
    down_gpu_seconds: float = 0.0
    recovery_seconds: float | None = None  # from its unplanned end to the first new step
    elapsed: float = 0.0  # seconds its processes have lived in common, by their own clocks
    newest: float = 0.0  # newest stamp of its nodes
    skewed: bool = False  # whether their stamps disagree
    pace: Pace = field(default_factory=lambda: Pace(0.0))

    def figures(self) -> dict[str, Any]:
        """Return the attempt as a JSON object for the API and the CSV export."""
        shown = ("number", "begin", "gpus", "nodes", "down_seconds", "down_gpu_seconds", "recovery_seconds")
        figures = {name: getattr(self, name) for name in shown}
        figures |= {"attempt": self.id, "end": self.over, "status": self.end}
        figures |= {"first_step": self.resumed, "last_step": self.step, "committed_step": self.committed}
        return figures | {"seconds": dict(self.seconds), "gpu_seconds": dict(self.gpu_seconds)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], number: int) -> "Attempt":
        """Restore an attempt from its saved state. `number` is used if none was saved."""
        values = {"number": number, "begin": state["start"], "pace": {"since": state["start"]}}
        return msgspec.convert(values | dict(state), cls)
