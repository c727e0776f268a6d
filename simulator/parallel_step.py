"""One training step of a job with tensor, context, expert, data and pipeline parallelism: which rank waits where.

The pipeline runs one forward pass, then one backward pass in turn (1F1B). Each pass ends its parts with all-reduces of
the tensor parallel group, and has a collective of the context parallel group and two of the expert parallel group. A
rank sends to the next stage without waiting, and waits to receive. The data parallel group adds up gradients at the end
of the step. Communication does not overlap with computation.

The wait of a rank in an operation is what NCCL's kernel takes there: until the last rank arrives, plus the transfer. A
rank that stops makes others wait for ever. A rank that ends its step early waits in the next one, for the first
microbatch or in its context parallel group. That counts as a wait of this step. Sequence numbers count the collectives
that a rank has called by then, and the messages that two neighbours have sent and have asked for in one direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from flopwatch.catalogue.ranks import MESSAGES
from flopwatch.verdicts.waits import Array, Communicator
from flopwatch.verdicts.whatif import order_of_passes

MICROBATCHES, PARTS = 4, 4  # of a step, and of a pass
FORWARD, BACKWARD = 0.010, 0.020  # seconds of computation in a pass of one microbatch
DIRECTIONS = ("forward", "backward")
TRANSFER = {"tp": 0.0005, "cp": 0.001, "ep": 0.001, "pp": 0.001, "dp": 0.008}  # seconds


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups. Rank = tp + TP * (cp + CP * (dp + DP * pp)). Experts divide the `dp` ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.dp % self.ep:
            raise ValueError(f"{self.ep} expert parallel ranks do not divide {self.dp} data parallel ranks")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def rank(self, tp: int, cp: int, dp: int, pp: int) -> int:
        """Return the rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def stage(self, pp: int) -> range:
        """Return the ranks of a pipeline stage."""
        return range(self.rank(0, 0, 0, pp), self.rank(0, 0, 0, pp + 1))

    def finest(self, rank: int) -> Communicator:
        """Return the finest communicator with collectives that a rank is in."""
        return next(
            group for kind in ("tp", "cp", "ep", "dp") for group in self.communicators(kind) if rank in group.ranks
        )

    @lru_cache(64)  # noqa: B019 - there are few layouts, and they live as long as the process
    def communicators(self, kind: str) -> tuple[Communicator, ...]:
        """Return the communicators of a kind with several ranks. A pipeline has one for each two neighbours."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(self.size):
            place, rest = {}, rank
            for name, size in sizes.items():
                place[name], rest = rest % size, rest // size
            key = [value for name, value in place.items() if name != ("dp" if kind == "ep" else kind)]
            members[(*key, place["dp"] // self.ep if kind == "ep" else 0)].append(rank)
        return tuple(
            Communicator(kind, pair)
            for ranks in members.values()
            for pair in (pairwise(ranks) if kind == "pp" else [tuple(ranks)] if len(ranks) > 1 else [])
        )


@dataclass(frozen=True)
class Disturbance:
    """What disturbs a step: factors on computation by rank, factors on the transfer between two ranks, and stops.

    `stops` has the number of passes after which a rank stops. The last of them ends without its collectives.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[frozenset[int], float] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    noise: Callable[[int], Array] = np.ones  # factors on this many parts of passes


@dataclass
class Step:
    """Result of a step: seconds, waits in seconds by rank and communicator, and sequence numbers by the same."""

    seconds: float
    waits: defaultdict[tuple[int, Communicator], float]
    sequence: defaultdict[tuple[int, Communicator], int]
    received: defaultdict[tuple[int, str], float]  # seconds of receives by rank and direction, forward or backward


class _Pass(NamedTuple):
    stage: int
    direction: str
    microbatch: int


def step(layout: Layout, disturbance: Disturbance | None = None) -> Step:
    """Simulate one step. With a rank that stops, `seconds` is infinite and infinite waits are left out."""
    return steps(layout, [disturbance or Disturbance()])[0]


def steps(layout: Layout, disturbances: Sequence[Disturbance]) -> list[Step]:
    """Simulate a step for each disturbance, all together, because that takes little more time than one."""
    return _Simulation(layout, disturbances).run()


class _Simulation:
    """State of some steps.

    The first axis of each array is the step. Of each kind of group, the second is the group, and the third is the rank
    in the group.
    """

    def __init__(self, layout: Layout, disturbances: Sequence[Disturbance]) -> None:
        count, every = len(disturbances), range(layout.size)
        self._layout = layout
        self._now = np.zeros((count, layout.size))
        self._passes = [0] * layout.pp  # by stage
        self._sent: dict[_Pass, Array] = {}
        self._received = {direction: np.zeros((count, layout.size)) for direction in DIRECTIONS}
        factors = np.array([[one.slow.get(rank, 1.0) for rank in every] for one in disturbances])
        # A factor on each part of a pass, in the order of the ranks.
        noise = np.array([one.noise(2 * MICROBATCHES * PARTS * layout.size) for one in disturbances])
        self._noise = noise.reshape((count, 2 * MICROBATCHES, PARTS, layout.size)) * factors[:, None, None, :]
        self._stops = [(number, *stop) for number, one in enumerate(disturbances) for stop in one.stops.items()]
        shapes = {kind: (count, *_members(layout, kind).shape) for kind in (*TRANSFER, *MESSAGES)}
        self._waits = {kind: np.zeros(shapes[kind]) for kind in TRANSFER}
        self._called = {kind: np.zeros(shape, int) for kind, shape in shapes.items()}
        transfers = [_transfers(layout, frozenset(one.links.items())) for one in disturbances]
        self._transfers = {kind: np.stack([one[kind] for one in transfers]) for kind in TRANSFER}

    def run(self) -> list[Step]:
        stages = self._layout.pp
        queues = [
            [(DIRECTIONS[not forward], number) for forward, number in order_of_passes(later, MICROBATCHES)]
            for later in reversed(range(stages))
        ]
        with np.errstate(invalid="ignore"):  # ranks that have stopped wait for each other: infinite less infinite
            while any(queues):
                for stage, queue in enumerate(queues):
                    while queue and self._ready(stage, *queue[0], stages):
                        self._pass(_Pass(stage, *queue.pop(0)))
            for stage in range(stages):
                self._meet("dp", stage)
        return [self._step(number) for number in range(len(self._now))]

    def _step(self, number: int) -> Step:
        """Return one of the steps."""
        layout, end = self._layout, float(self._now[number].max())
        waits = defaultdict(float, zip(_places(layout, *self._waits), _flat(self._waits, number), strict=True))
        sequence = defaultdict(int, zip(_places(layout, *self._called), _flat(self._called, number), strict=True))
        next_waits = {group.ranks[1]: group for group in layout.communicators("pp")}
        next_waits = {rank: group for group in layout.communicators("cp") for rank in group.ranks} | next_waits
        for rank, group in next_waits.items() if isfinite(end) else ():
            waits[rank, group] += end - float(self._now[number, rank])
        received = defaultdict[tuple[int, str], float](float)
        for direction, seconds in self._received.items():
            received |= {(rank, direction): one for rank, one in enumerate(seconds[number].tolist())}
        return Step(end, waits, sequence, received)

    def _ready(self, stage: int, direction: str, microbatch: int, stages: int) -> bool:
        source = self._source(_Pass(stage, direction, microbatch))
        return not 0 <= source.stage < stages or source in self._sent

    def _source(self, one: _Pass) -> _Pass:
        return one._replace(stage=one.stage + (-1 if one.direction == "forward" else 1))

    def _pass(self, one: _Pass) -> None:
        source, every = self._source(one), self._ranks(one.stage)
        if source in self._sent:
            self._receive(one, source)
        part_seconds = (FORWARD if one.direction == "forward" else BACKWARD) / PARTS
        each = part_seconds * self._noise[:, self._passes[one.stage], :, every]
        self._passes[one.stage] += 1
        for part in range(PARTS):
            for number, rank, stop in self._stops if part == PARTS - 1 else ():
                if rank in self._layout.stage(one.stage) and self._passes[one.stage] == stop:
                    self._now[number, rank] = inf
            self._now[:, every] += each[:, part]
            self._meet("tp", one.stage)
            if part == 0:
                self._meet("cp", one.stage)
            if part in (1, 2):
                self._meet("ep", one.stage)
        self._message(one.stage, 2 * one.stage - source.stage)
        self._sent[one] = self._now[:, every].copy()

    def _ranks(self, stage: int) -> slice:
        ranks = self._layout.stage(stage)
        return slice(ranks.start, ranks.stop)

    def _receive(self, one: _Pass, source: _Pass) -> None:
        every, pairs = self._ranks(one.stage), _rows(self._layout, "pp", min(one.stage, source.stage))
        self._message(source.stage, one.stage, asked=True)
        now = self._now[:, every].copy()
        end = np.maximum(now, self._sent[source]) + self._transfers["pp"][:, pairs, 0]
        waited = np.where(end < inf, end - now, 0.0)
        self._waits["pp"][:, pairs, int(one.stage > source.stage)] += waited
        self._called["pp"][:, pairs, int(one.stage > source.stage)] += now < inf
        self._received[one.direction][:, every] += waited
        self._now[:, every] = end

    def _message(self, sender: int, receiver: int, *, asked: bool = False) -> None:
        """Count messages from stage to stage as sent, or as asked for, except by ranks that have stopped before."""
        stage, other = (receiver, sender) if asked else (sender, receiver)
        if 0 <= other < self._layout.pp:
            pairs = _rows(self._layout, "pp", min(stage, other))
            running = self._now[:, self._ranks(stage)] < inf
            self._called[MESSAGES[sender < receiver]][:, pairs, int(stage > other)] += running

    def _meet(self, kind: str, stage: int) -> None:
        """Let each group of a stage run one collective: it ends for all of its ranks at once."""
        groups = _rows(self._layout, kind, stage)
        if groups.stop > groups.start:
            ranks = _members(self._layout, kind)[groups]
            times = self._now[:, ranks]
            end = times.max(axis=2, keepdims=True) + self._transfers[kind][:, groups]
            self._waits[kind][:, groups] += np.where(end < inf, end - times, 0.0)
            self._called[kind][:, groups] += times < inf
            self._now[:, ranks] = end


@lru_cache(256)
def _groups(layout: Layout, kind: str) -> tuple[Communicator, ...]:
    """Return the communicators of a kind, those of a stage of the pipeline together."""
    found = layout.communicators("pp" if kind in MESSAGES else kind)
    return tuple(sorted((Communicator(kind, group.ranks) for group in found), key=lambda group: group.ranks))


@lru_cache(256)
def _members(layout: Layout, kind: str) -> Array:
    """Return the ranks of each communicator of a kind, in an array with a row for each."""
    return np.array([group.ranks for group in _groups(layout, kind)] or np.empty((0, 1)), int)


@lru_cache(256)
def _rows(layout: Layout, kind: str, stage: int) -> slice:
    """Return the rows of the communicators of a kind whose first rank is in a stage."""
    ranks, first = layout.stage(stage), _members(layout, kind)[:, 0]
    return slice(int(np.searchsorted(first, ranks.start)), int(np.searchsorted(first, ranks.stop)))


@lru_cache(64)
def _transfers(layout: Layout, links: frozenset[tuple[frozenset[int], float]]) -> dict[str, Array]:
    """Return the seconds of a transfer in each communicator, in a column for each kind."""
    return {
        kind: np.array(
            [
                seconds * max((factor for pair, factor in links if pair <= set(group.ranks)), default=1.0)
                for group in _groups(layout, kind)
            ]
        ).reshape(-1, 1)
        for kind, seconds in TRANSFER.items()
    }


@lru_cache(64)
def _places(layout: Layout, *kinds: str) -> tuple[tuple[int, Communicator], ...]:
    """Return each rank and communicator of some kinds, as their arrays have them."""
    return tuple((rank, group) for kind in kinds for group in _groups(layout, kind) for rank in group.ranks)


def _flat(arrays: Mapping[str, Array], number: int) -> list[Any]:
    return [value for array in arrays.values() for value in array[number].ravel().tolist()]
