"""Waits of the ranks of a run by communicator, as shares of a step.

All ranks of a communicator leave a collective together, so the last one waits only for the transfer. A rank computes
while it does not wait. Numbers of a run are in arrays: one per rank in the order of `Layout.ranks`, or one per place, a
rank in a communicator, in the order of `Layout.places`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any

import numpy as np

POINT_TO_POINT = "pp"  # the kind whose ranks send to and receive from each other, and have no collectives
# From the finest kind to the coarsest. A rank that is late in a fine communicator makes it late in the coarse ones.
KINDS = ("tp", "cp", "ep", "pp", "dp")

Array = Any  # a numpy array


class Communicator:
    """Group of ranks that communicate: its kind (tp, cp, ep, pp, dp or another) and its ranks, sorted.

    Of a pipeline, each two neighbours are a group, in which each receives from the other.
    """

    __slots__ = ("_hash", "kind", "ranks")

    def __init__(self, kind: str, ranks: tuple[int, ...]) -> None:
        self.kind, self.ranks = kind, ranks
        self._hash = hash((kind, ranks))  # once, because it may have thousands of ranks

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Communicator) or self._hash != other._hash:
            return False
        return (self.kind, self.ranks) == (other.kind, other.ranks)

    def __repr__(self) -> str:
        return f"Communicator({self.kind!r}, {self.ranks})"

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Return a sort key that puts finer communicators first: by kind, then by size."""
        return *self.fineness, self.ranks

    @property
    def fineness(self) -> tuple[int, int]:
        """Return the place of its kind from the finest to the coarsest, and its size."""
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


class NoSteps(Unmeasured):
    """Exception raised where a rank has no measured step in an interval, which may be too short."""


class Layout:
    """Ranks of a run and their communicators, the finest first. `members` has the communicators of each rank."""

    def __init__(self, members: Mapping[int, Iterable[Communicator]]) -> None:
        self.ranks = tuple(sorted(members))
        index = {rank: number for number, rank in enumerate(self.ranks)}
        self.communicators = sorted(
            {group for groups in members.values() for group in groups}, key=lambda group: group.order
        )
        for group in self.communicators:
            for rank in group.ranks:
                if rank not in index:
                    raise Unmeasured(f"the waits of rank {rank} in {group.kind} are not measured")
        sizes = [len(group.ranks) for group in self.communicators]
        self._group: Array = np.repeat(np.arange(len(sizes)), sizes)
        self._first = np.cumsum([0, *sizes])
        self.rank_of = np.fromiter((index[rank] for group in self.communicators for rank in group.ranks), np.intp)
        kinds = sorted({group.kind for group in self.communicators})
        codes = np.array([kinds.index(group.kind) for group in self.communicators], np.intp)
        self.kind_of = codes[self._group]
        pairs = np.array([group.kind == POINT_TO_POINT for group in self.communicators], bool)
        self.in_pair = pairs[self._group]
        self.has_peers = ~self.in_pair & (np.array(sizes, np.intp)[self._group] > 1)
        # Places of the communicators of each size, one communicator a row.
        self._rows = [
            self._first[:-1][(np.array(sizes) == size) & ~pairs][:, None] + np.arange(size)
            for size in sorted(set(sizes))
            if size > 1
        ]

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self.rank_of)

    def place(self, number: int) -> Place:
        """Return the place with this number."""
        return self.communicators[self._group[number]], self.ranks[self.rank_of[number]]

    def places(self) -> list[Place]:
        """Return all places in their order."""
        return [(group, rank) for group in self.communicators for rank in group.ranks]

    def number(self, place: Place) -> int:
        """Return the number of a place."""
        group, rank = place
        return int(self._first[self.communicators.index(group)]) + group.ranks.index(rank)

    def below_peers(self, numbers: Array) -> Array:
        """Return how far the number of each place is below the upper median of its peers in the communicator."""
        found = np.zeros(self.size)
        for rows in self._rows:
            own, middle = numbers[rows], (rows.shape[1] - 1) // 2
            ordered = np.sort(own, axis=1)
            found[rows] = np.where(own <= ordered[:, [middle]], ordered[:, [middle + 1]], ordered[:, [middle]]) - own
        return found

    @cached_property
    def stages(self) -> Array:
        """Return the pipeline stage of each rank, 0 without a pipeline or if the pairs are not those of one."""
        stages = dict.fromkeys(self.ranks, 0)
        pairs = [group.ranks for group in self.communicators if group.kind == POINT_TO_POINT and len(group.ranks) == 2]
        for before, after in sorted(pairs, key=lambda pair: pair[1]):
            stages[after] = stages[before] + 1
        numbers = np.array([stages[rank] for rank in self.ranks], np.intp)
        sizes = np.bincount(numbers)
        # A ring, for example, has pairs that are no neighbours.
        neighbours = all(stages[after] == stages[before] + 1 for before, after in pairs)
        return numbers if neighbours and sizes.min() == sizes.max() else np.zeros_like(numbers)

    @cached_property
    def ends(self) -> list[Array]:
        """Return the places that receive from the same side of the same pipeline stage, in all replicas."""
        ends: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for number in np.flatnonzero(self.in_pair).tolist():
            group, rank = self.place(number)
            ends[int(self.stages[self.rank_of[number]]), rank == group.ranks[-1]].append(number)
        return [np.array(numbers, np.intp) for numbers in ends.values()]

    def together(self, kinds: Iterable[str]) -> dict[int, int]:
        """Return the lowest rank that each rank is connected with through communicators of these kinds."""
        root = {rank: rank for rank in self.ranks}

        def find(rank: int) -> int:
            while root[rank] != rank:
                root[rank] = rank = root[root[rank]]
            return rank

        wanted = set(kinds)
        for group in self.communicators:
            if group.kind in wanted:
                low, *roots = sorted({find(rank) for rank in group.ranks})
                root |= dict.fromkeys(roots, low)
        return {rank: find(rank) for rank in self.ranks}


class Interval:
    """Some steps of a run: their number, seconds per step, waits of each place as shares of a step, and tokens."""

    def __init__(self, layout: Layout, steps: float, step_seconds: float, waits: Array, tokens: Array) -> None:
        self.layout, self.steps, self.step_seconds = layout, steps, step_seconds
        self.waits, self.tokens = waits, tokens

    @classmethod
    def of(
        cls,
        steps: float,
        step_seconds: float,
        waits: Mapping[int, Mapping[Communicator, float]],
        tokens: Mapping[int, float],
    ) -> Interval:
        """Return an interval from the waits of each rank by communicator, as shares of a step."""
        layout = Layout(waits)
        shares = np.array([waits[rank].get(group, 0.0) for group, rank in layout.places()])
        return cls(layout, steps, step_seconds, shares, np.array([tokens.get(rank, 0.0) for rank in layout.ranks]))

    @classmethod
    def between(
        cls, then: Mapping[int, RankTotals], now: Mapping[int, RankTotals], layout: Layout | None = None
    ) -> Interval:
        """Return the steps between two reports of all ranks. Raises Unmeasured.

        `layout` is that of an earlier interval, which saves time if the ranks still have its communicators.
        """
        if then.keys() != now.keys():
            raise Unmeasured("ranks joined or left")
        if layout is not None and len(layout.ranks) == len(now):
            try:
                return cls._between(then, now, layout)
            except NoSteps:
                raise
            except (KeyError, Unmeasured):
                pass  # the ranks have other communicators by now
        return cls._between(then, now, Layout({rank: totals.waits for rank, totals in now.items()}))

    @classmethod
    def _between(cls, then: Mapping[int, RankTotals], now: Mapping[int, RankTotals], layout: Layout) -> Interval:
        pairs = [(then[rank], now[rank]) for rank in layout.ranks]
        steps = np.array([after.steps - before.steps for before, after in pairs])
        seconds = np.array([after.seconds - before.seconds for before, after in pairs])
        if len(unmeasured := np.flatnonzero((steps <= 0) | (seconds <= 0))):
            raise NoSteps(f"rank {layout.ranks[unmeasured[0]]} has no measured step")
        waits = []
        for group in layout.communicators:
            for rank in group.ranks:
                if (wait := now[rank].waits.get(group)) is None:
                    raise Unmeasured(f"the waits of rank {rank} in {group.kind} are not measured")
                waits.append(wait - then[rank].waits.get(group, 0.0))
        if len(waits) < sum(len(totals.waits) for totals in now.values()):
            raise Unmeasured("a communicator is new")
        tokens = np.array([after.tokens - before.tokens for before, after in pairs]) / steps
        shares = np.array(waits) / seconds[layout.rank_of]
        return cls(layout, float(steps.min()), float(seconds.sum() / steps.sum()), shares, tokens)

    @cached_property
    def waiting(self) -> Array:
        """Return the share of a step that each rank waits in all of its communicators."""
        return np.bincount(self.layout.rank_of, self.waits, len(self.layout.ranks))

    @cached_property
    def longer(self) -> Array:
        """Return how much longer the rank of each place computes than its peers there."""
        return self.layout.below_peers(self.waiting[self.layout.rank_of])

    @cached_property
    def kept(self) -> Array:
        """Return how long the rank of each place keeps its peers there waiting."""
        return self.layout.below_peers(self.waits)

    @cached_property
    def stage_lateness(self) -> Array:
        """Return how much longer each pipeline stage computes than any other, negative for all but one."""
        stages = self.layout.stages
        count = int(stages.max()) + 1
        if count < 2:
            return np.zeros(count)
        medians = np.array([median_low(self.waiting[stages == stage]) for stage in range(count)])
        least, second = np.sort(medians)[:2]
        return np.where(medians == least, second, least) - medians

    @cached_property
    def receives(self) -> Array:
        """Return how much longer a place of a pipeline waits to receive than those of its stage in other replicas."""
        found = np.zeros(self.layout.size)
        for numbers in self.layout.ends:
            found[numbers] = self.waits[numbers] - median_low(self.waits[numbers])
        return found
