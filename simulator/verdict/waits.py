"""Waits of the ranks of a run by communicator, as shares of a step.

All ranks of a communicator leave a collective together, so the last one waits only for the transfer. A rank computes
while it does not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from statistics import median_low
from typing import NamedTuple

POINT_TO_POINT = "pp"  # the kind whose ranks send to and receive from each other, and have no collectives
# From the finest kind to the coarsest. A rank that is late in a fine communicator makes it late in the coarse ones.
KINDS = ("tp", "cp", "ep", "pp", "dp")


class Communicator(NamedTuple):
    """Group of ranks that communicate: its kind (tp, cp, ep, pp, dp or another) and its ranks, sorted.

    Of a pipeline, each two neighbours are a group, in which each receives from the other.
    """

    kind: str
    ranks: tuple[int, ...]

    @property
    def fineness(self) -> tuple[int, int]:
        """Return a sort key that puts finer communicators first: by kind, then by size."""
        return KINDS.index(self.kind) if self.kind in KINDS else len(KINDS), len(self.ranks)


Place = tuple[Communicator, int]  # a rank in a communicator


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Totals of one rank over its measured steps: steps, their seconds, seconds waited by communicator, and tokens."""

    steps: float
    seconds: float
    waits: Mapping[Communicator, float]
    tokens: float = 0.0


class Unmeasured(Exception):
    """Exception raised where the waits of an interval are incomplete. The message gives the reason."""


@dataclass(frozen=True)
class Interval:
    """Some steps of a run: their number, seconds per step, and by rank the waits as shares of a step, and tokens."""

    steps: float
    step_seconds: float
    waits: Mapping[int, Mapping[Communicator, float]]
    tokens: Mapping[int, float]

    @classmethod
    def between(cls, then: Mapping[int, RankTotals], now: Mapping[int, RankTotals]) -> Interval:
        """Return the steps between two reports of all ranks. Raises Unmeasured."""
        if then.keys() != now.keys():
            raise Unmeasured("ranks joined or left")
        steps = {rank: totals.steps - then[rank].steps for rank, totals in now.items()}
        seconds = {rank: totals.seconds - then[rank].seconds for rank, totals in now.items()}
        for rank in now:
            if steps[rank] <= 0 or seconds[rank] <= 0:
                raise Unmeasured(f"rank {rank} has no measured step")
        for group in sorted({group for totals in now.values() for group in totals.waits}):
            for rank in group.ranks:
                if rank not in now or group not in now[rank].waits:
                    raise Unmeasured(f"the waits of rank {rank} in {group.kind} are not measured")
        waits = {
            rank: {
                group: (wait - then[rank].waits.get(group, 0.0)) / seconds[rank] for group, wait in totals.waits.items()
            }
            for rank, totals in now.items()
        }
        tokens = {rank: (totals.tokens - then[rank].tokens) / steps[rank] for rank, totals in now.items()}
        return cls(min(steps.values()), fsum(seconds.values()) / fsum(steps.values()), waits, tokens)

    @cached_property
    def waiting(self) -> dict[int, float]:
        """Return the share of a step that each rank waits in all of its communicators."""
        return {rank: fsum(waits.values()) for rank, waits in self.waits.items()}

    @cached_property
    def communicators(self) -> tuple[Communicator, ...]:
        """Return all communicators, the finest first."""
        found = {group for waits in self.waits.values() for group in waits}
        return tuple(sorted(found, key=lambda group: (group.fineness, group)))

    @cached_property
    def stages(self) -> dict[int, int]:
        """Return the pipeline stage of each rank, 0 without a pipeline."""
        stages = dict.fromkeys(self.waits, 0)
        pairs = [group.ranks for group in self.communicators if group.kind == POINT_TO_POINT]
        for before, after in sorted(pairs, key=lambda pair: pair[1]):
            stages[after] = stages[before] + 1
        return stages

    @cached_property
    def longer(self) -> dict[Place, float]:
        """Return how much longer each rank computes than its peers in each communicator, the finest first."""
        return self._below_peers(lambda group, rank: self.waiting[rank])

    @cached_property
    def kept(self) -> dict[Place, float]:
        """Return how long each rank keeps its peers waiting in each communicator."""
        return self._below_peers(lambda group, rank: self.waits[rank][group])

    def _below_peers(self, wait: Callable[[Communicator, int], float]) -> dict[Place, float]:
        """Return how far a wait of each rank is below that of its peers, by communicator with collectives."""
        found: dict[Place, float] = {}
        for group in self.communicators:
            if group.kind != POINT_TO_POINT and len(group.ranks) > 1:
                below = below_others({rank: wait(group, rank) for rank in group.ranks})
                found |= {(group, rank): share for rank, share in below.items()}
        return found

    @cached_property
    def stage_lateness(self) -> dict[int, float]:
        """Return how much longer each pipeline stage computes than any other, negative for all but one."""
        waiting: defaultdict[int, list[float]] = defaultdict(list)
        for rank, stage in self.stages.items():
            waiting[stage].append(self.waiting[rank])
        medians = {stage: median_low(values) for stage, values in waiting.items()}
        if len(medians) < 2:
            return {}
        least, second = sorted(medians.values())[:2]
        return {stage: (second if median == least else least) - median for stage, median in medians.items()}

    @cached_property
    def receives(self) -> dict[Place, float]:
        """Return how much longer a rank of a pipeline waits to receive than those of its stage in other replicas."""
        ends: defaultdict[tuple[int, bool], list[tuple[Place, float]]] = defaultdict(list)
        for group in self.communicators:
            for rank in group.ranks if group.kind == POINT_TO_POINT else ():
                ends[self.stages[rank], rank == group.ranks[1]].append(((group, rank), self.waits[rank][group]))
        usual = {end: median_low([wait for _, wait in members]) for end, members in ends.items()}
        return {place: wait - usual[end] for end, members in ends.items() for place, wait in members}


def below_others(numbers: Mapping[int, float]) -> dict[int, float]:
    """Return how far each of several numbers is below the upper median of the others."""
    ordered, middle = sorted(numbers.values()), (len(numbers) - 1) // 2
    return {key: ordered[middle + (own <= ordered[middle])] - own for key, own in numbers.items()}
