"""Waits of the ranks of a run by communicator, as shares of a step.

All ranks of a communicator leave a collective together, so the last one waits only for the transfer. A rank computes
while it does not wait. Numbers of a run are in arrays: one per rank in the order of `Layout.ranks`, or one per place, a
rank in a communicator, in the order of `Layout.places`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import attrgetter
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
        kind = self.kind.partition("_")[0]  # also of the messages in one direction of a pipeline
        return KINDS.index(kind) if kind in KINDS else len(KINDS), len(self.ranks)


Place = tuple[Communicator, int]  # a rank in a communicator


class Unmeasured(Exception):
    """Exception raised where the waits of an interval are incomplete. The message gives the reason."""


class NoSteps(Unmeasured):
    """Exception raised where a rank has no measured step in an interval, which may be too short."""


class Layout:
    """Ranks of a run and their communicators, the finest first. `members` has the communicators of each rank."""

    def __init__(self, members: Mapping[int, Iterable[Communicator]]) -> None:
        self.ranks = tuple(sorted(members))
        # By identity first, because equal ones are mostly the same object.
        same = {id(group): group for groups in members.values() for group in groups}
        alike: defaultdict[tuple[int, int], list[Communicator]] = defaultdict(list)
        for group in dict.fromkeys(same.values()):
            alike[group.fineness].append(group)
        self.communicators = [
            group for fineness in sorted(alike) for group in sorted(alike[fineness], key=attrgetter("ranks"))
        ]
        sizes = [len(group.ranks) for group in self.communicators]
        self.group_of: Array = np.repeat(np.arange(len(sizes)), sizes)
        self._first: Array = np.cumsum([0, *sizes])
        every = np.fromiter(chain.from_iterable(group.ranks for group in self.communicators), np.intp)
        ranks = np.array(self.ranks, np.intp)
        if len(unknown := np.flatnonzero(~np.isin(every, ranks))):
            group = self.communicators[self.group_of[unknown[0]]]
            raise Unmeasured(f"the waits of rank {every[unknown[0]]} in {group.kind} are not measured")
        self.rank_of: Array = np.searchsorted(ranks, every)
        kinds = sorted({group.kind for group in self.communicators})
        codes = np.array([kinds.index(group.kind) for group in self.communicators], np.intp)
        self.kind_of = codes[self.group_of]
        pairs = np.array([group.kind == POINT_TO_POINT for group in self.communicators], bool)
        self.in_pair = pairs[self.group_of]
        self.has_peers = ~self.in_pair & (np.array(sizes, np.intp)[self.group_of] > 1)
        # Places of the communicators of each size, one communicator a row.
        self._rows = [
            self._first[:-1][(np.array(sizes) == size) & ~pairs][:, None] + np.arange(size)
            for size in sorted(set(sizes))
            if size > 1
        ]

    def place(self, number: int) -> Place:
        """Return the place with this number."""
        return self.communicators[self.group_of[number]], self.ranks[self.rank_of[number]]

    def below_peers(self, numbers: Array) -> Array:
        """Return how far the number of each place is below the upper median of its peers in the communicator."""
        found = np.zeros(len(self.rank_of))
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
        numbers = np.flatnonzero(self.in_pair)
        side = 2 * self.stages[self.rank_of[numbers]] + np.isin(numbers, self._first[1:] - 1)
        return [numbers[side == one] for one in np.unique(side)]

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
    """Some steps of a run, from what grew since the last report: numbers of each rank, and seconds waited per place.

    Waits are shares of a step. Squares are of the seconds that a rank computed in each step, NaN if unknown.
    """

    def __init__(self, layout: Layout, steps: Array, seconds: Array, waits: Array, tokens: Array, squares: Array):
        if len(unmeasured := np.flatnonzero((steps <= 0) | (seconds <= 0))):
            raise NoSteps(f"rank {layout.ranks[unmeasured[0]]} has no measured step")
        self.layout, self.steps, self.step_seconds = layout, float(steps.min()), float(seconds.sum() / steps.sum())
        self.waits, self.tokens = waits / seconds[layout.rank_of], tokens / steps
        self.seconds, self.squares = seconds / steps, squares / steps  # ranks may report different steps

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
        found = np.zeros(len(self.waits))
        for numbers in self.layout.ends:
            found[numbers] = self.waits[numbers] - median_low(self.waits[numbers])
        return found
