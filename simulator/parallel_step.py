"""One training step of a job with tensor, context, expert, data and pipeline parallelism: which rank waits where.

The pipeline runs one forward pass, then one backward pass in turn (1F1B). Each pass ends its parts with all-reduces of
the tensor parallel group, and has a collective of the context parallel group and two of the expert parallel group. A
rank sends to the next stage without waiting, and waits to receive. The data parallel group adds up gradients at the end
of the step. Communication does not overlap with computation.

The wait of a rank in an operation is what NCCL's kernel takes there: until the last rank arrives, plus the transfer. A
rank that stops makes others wait for ever. A rank that ends its step early waits in the next one, for the first
microbatch or in its context parallel group. That counts as a wait of this step. Sequence numbers count the collectives
that a rank has called by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from flopwatch.verdicts.waits import Communicator
from flopwatch.verdicts.whatif import order_of_passes

MICROBATCHES, PARTS = 4, 4  # of a step, and of a pass
FORWARD, BACKWARD = 0.010, 0.020  # seconds of computation in a pass of one microbatch
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

    def communicators(self, kind: str) -> Iterator[Communicator]:
        """Yield the communicators of a kind with several ranks. A pipeline has one for each two neighbours."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(self.size):
            place, rest = {}, rank
            for name, size in sizes.items():
                place[name], rest = rest % size, rest // size
            key = [value for name, value in place.items() if name != ("dp" if kind == "ep" else kind)]
            members[(*key, place["dp"] // self.ep if kind == "ep" else 0)].append(rank)
        for ranks in members.values():
            pairs = pairwise(ranks) if kind == "pp" else [tuple(ranks)] if len(ranks) > 1 else []
            yield from (Communicator(kind, pair) for pair in pairs)


@dataclass(frozen=True)
class Disturbance:
    """What disturbs a step: factors on computation by rank, factors on the transfer between two ranks, and stops.

    `stops` has the number of passes after which a rank stops. The last of them ends without its collectives.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[frozenset[int], float] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    noise: Callable[[], float] = lambda: 1.0  # factor on each part of a pass


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
    return _Simulation(layout, disturbance or Disturbance()).run()


class _Simulation:
    def __init__(self, layout: Layout, disturbance: Disturbance) -> None:
        self._layout, self._disturbance = layout, disturbance
        self._now = [0.0] * layout.size
        self._passes = [0] * layout.size
        self._sent: dict[_Pass, list[float]] = {}
        self._result = Step(0.0, defaultdict(float), defaultdict(int), defaultdict(float))
        self._groups = {kind: list(layout.communicators(kind)) for kind in TRANSFER}

    def run(self) -> Step:
        stages = self._layout.pp
        queues = [
            [("forward" if forward else "backward", number) for forward, number in order_of_passes(later, MICROBATCHES)]
            for later in reversed(range(stages))
        ]
        while any(queues):
            for stage, queue in enumerate(queues):
                while queue and self._ready(stage, *queue[0], stages):
                    self._pass(_Pass(stage, *queue.pop(0)))
        self._meet(self._groups["dp"], range(self._layout.size))
        end = self._result.seconds = max(self._now)
        next_waits = {group.ranks[1]: group for group in self._groups["pp"]}
        next_waits = {rank: group for group in self._groups["cp"] for rank in group.ranks} | next_waits
        for rank, group in next_waits.items() if isfinite(end) else ():
            self._result.waits[rank, group] += end - self._now[rank]
        return self._result

    def _ready(self, stage: int, direction: str, microbatch: int, stages: int) -> bool:
        source = self._source(_Pass(stage, direction, microbatch))
        return not 0 <= source.stage < stages or source in self._sent

    def _source(self, one: _Pass) -> _Pass:
        return one._replace(stage=one.stage + (-1 if one.direction == "forward" else 1))

    def _pass(self, one: _Pass) -> None:
        ranks, disturbance = self._layout.stage(one.stage), self._disturbance
        source = self._source(one)
        if source in self._sent:
            self._receive(one, source)
        seconds = FORWARD if one.direction == "forward" else BACKWARD
        for part in range(PARTS):
            for rank in ranks:
                stop = disturbance.stops.get(rank, inf)
                if self._passes[rank] == stop - 1 and part == PARTS - 1:
                    self._now[rank] = inf
                self._now[rank] += seconds / PARTS * disturbance.slow.get(rank, 1.0) * disturbance.noise()
            self._meet(self._groups["tp"], ranks)
            if part == 0:
                self._meet(self._groups["cp"], ranks)
            if part in (1, 2):
                self._meet(self._groups["ep"], ranks)
        for rank in ranks:
            self._passes[rank] += 1
        self._sent[one] = [self._now[rank] for rank in ranks]

    def _receive(self, one: _Pass, source: _Pass) -> None:
        ranks, others = self._layout.stage(one.stage), self._layout.stage(source.stage)
        for rank, other, sent in zip(ranks, others, self._sent[source], strict=True):
            transfer = TRANSFER["pp"] * self._disturbance.links.get(frozenset((rank, other)), 1.0)
            end = max(self._now[rank], sent) + transfer
            self._wait(rank, Communicator("pp", (min(rank, other), max(rank, other))), end)
            if isfinite(end):
                self._result.received[rank, one.direction] += end - self._now[rank]
            self._now[rank] = end

    def _meet(self, groups: Sequence[Communicator], ranks: Sequence[int]) -> None:
        """Let each group with these ranks run one collective: it ends for all of its ranks at once."""
        for group in groups:
            if group.ranks[0] not in ranks:
                continue
            slowest = max(
                (factor for pair, factor in self._disturbance.links.items() if pair <= set(group.ranks)), default=1.0
            )
            end = max(self._now[rank] for rank in group.ranks) + TRANSFER[group.kind] * slowest
            for rank in group.ranks:
                self._wait(rank, group, end)
                self._now[rank] = end

    def _wait(self, rank: int, group: Communicator, end: float) -> None:
        if isfinite(self._now[rank]):
            self._result.sequence[rank, group] += 1
        if isfinite(end):
            self._result.waits[rank, group] += end - self._now[rank]
