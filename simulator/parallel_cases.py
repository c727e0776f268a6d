"""Cases of jobs with parallel groups, from a seed, and the truth that a verdict on each must find.

Each case gives the disturbance of every step. Computation has noise of 2 % in all of them. The two late ranks of a case
are in different tensor parallel groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flopwatch.verdicts.waits import Communicator
from simulator.parallel_step import MICROBATCHES, Disturbance, Layout, Step, steps

NOISE = 0.02  # standard deviation of the computation in a part of a pass, as a share
LATE = (1.15, 1.25, 1.5)  # factors on the computation of late ranks
SLOW_LINK, SLOW_LEAF = 12.0, 4.0  # factors on transfers
TOGETHER = 12  # steps that are simulated together, as few are enough for a verdict
STORAGE_SHARE, STORAGE_FACTOR = 0.1, 2.0  # of ranks that wait for storage in a step, and factor on their computation

LAYOUTS = {
    "tp4pp2dp2": Layout(tp=4, pp=2, dp=2),
    "tp2pp4dp2": Layout(tp=2, pp=4, dp=2),
    "pp4dp4": Layout(pp=4, dp=4),
    "dp16": Layout(dp=16),
    "ep4dp8": Layout(dp=8, ep=4),
    "tp2cp2dp2": Layout(tp=2, cp=2, dp=2),
    "cp4dp2": Layout(cp=4, dp=2),
}
PIPELINE_ONLY = "pp4dp4"  # without tensor parallel groups
PIPELINES = ("tp4pp2dp2", "tp2pp4dp2", PIPELINE_ONLY)
GROUPED = {
    "tp": ("tp4pp2dp2", "tp2pp4dp2"),
    "pp": PIPELINES,
    "ep": ("ep4dp8",),
    "cp": ("tp2cp2dp2", "cp4dp2"),
    "dp": ("dp16",),
}


@dataclass(frozen=True)
class ParallelCase:
    """A job's layout, its disturbance by step, and the truth: what is wrong, with which ranks and communicator.

    The verdicts: none, rank, group (all ranks of a stage in one replica), stage (in all replicas), link, communication,
    imbalance, missing, and no suspect: a hang in which no rank need be named. A verdict must name `ranks`, and no other
    rank. The communicator of a late or missing rank is the finest one with collectives that it is in, because its peers
    there wait for it first.
    """

    kind: str
    layout: Layout
    disturbance: Callable[[random.Random], Disturbance]
    verdict: str
    ranks: frozenset[int] = frozenset()
    communicator: Communicator | None = None

    def steps(self, seed: str, count: int) -> Iterator[Step]:
        """Yield `count` steps. The same seed gives the same steps."""
        rng = random.Random(seed)
        for first in range(0, count, TOGETHER):
            yield from steps(self.layout, [self.disturbance(rng) for _ in range(min(TOGETHER, count - first))])


def _noisy(disturbance: Disturbance) -> Callable[[random.Random], Disturbance]:
    """Return a function that returns the disturbance of a step, with noise."""

    def disturbed(rng: random.Random) -> Disturbance:
        return replace(disturbance, noise=partial(np.random.default_rng(rng.getrandbits(64)).normal, 1.0, NOISE))

    return disturbed


def _storage(rng: random.Random, size: int) -> Disturbance:
    waiting = {rank: STORAGE_FACTOR for rank in range(size) if rng.random() < STORAGE_SHARE}
    return _noisy(Disturbance(slow=waiting))(rng)


def _late(rng: random.Random, kind: str) -> ParallelCase:
    layout = LAYOUTS[rng.choice(GROUPED[kind])]
    group = rng.choice(list(layout.communicators(kind)))
    return late_rank(f"late in {kind}", layout, rng.choice(group.ranks), rng.choice(LATE))


def late_rank(kind: str, layout: Layout, rank: int, factor: float) -> ParallelCase:
    """Return the case of a job in which a rank computes longer by a factor."""
    slow = _noisy(Disturbance(slow={rank: factor}))
    return ParallelCase(kind, layout, slow, "rank", frozenset({rank}), layout.finest(rank))


def _missing(rng: random.Random, kind: str) -> ParallelCase:
    named = [name for name in GROUPED[kind] if name != PIPELINE_ONLY]
    return _stopped(rng, f"missing in {kind}", kind, LAYOUTS[rng.choice(named)])


def _missing_in_pipeline_only(rng: random.Random) -> ParallelCase:
    """Draw a rank that stops where only messages show which one the others wait for."""
    return replace(_stopped(rng, "missing, no tp", "pp", LAYOUTS[PIPELINE_ONLY]), communicator=None)


def _stopped(rng: random.Random, name: str, kind: str, layout: Layout) -> ParallelCase:
    group = rng.choice(list(layout.communicators(kind)))
    rank = rng.choice(group.ranks)
    stops = {rank: rng.randrange(1, 2 * MICROBATCHES)}
    stopped = _noisy(Disturbance(stops=stops))
    return ParallelCase(name, layout, stopped, "missing", frozenset({rank}), layout.finest(rank))


def _two_late(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS["tp4pp2dp2"]
    groups = rng.sample(list(layout.communicators("tp")), 2)
    slow = {rng.choice(group.ranks): 1.3 for group in groups}
    return ParallelCase("two late", layout, _noisy(Disturbance(slow=slow)), "rank", frozenset(slow))


def _uneven(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS[rng.choice(PIPELINES)]
    slow = dict.fromkeys(layout.stage(rng.randrange(layout.pp)), rng.choice(LATE))
    return ParallelCase("uneven pipeline", layout, _noisy(Disturbance(slow=slow)), "stage", frozenset(slow))


def _slow_stage(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS[rng.choice(PIPELINES)]
    dp, pp = rng.randrange(layout.dp), rng.randrange(layout.pp)
    slow = {layout.rank(tp, cp, dp, pp): 1.25 for tp in range(layout.tp) for cp in range(layout.cp)}
    verdict = "group" if len(slow) > 1 else "rank"
    return ParallelCase("slow stage", layout, _noisy(Disturbance(slow=slow)), verdict, frozenset(slow))


def _slow_link(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS[rng.choice(PIPELINES)]
    group = rng.choice(list(layout.communicators("pp")))
    pair = frozenset(group.ranks)
    return ParallelCase(
        "slow link", layout, _noisy(Disturbance(links={pair: SLOW_LINK})), "link", pair, communicator=group
    )


def _leaf(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS[rng.choice(list(LAYOUTS))]
    inside = set(range(layout.size // 2)) if rng.random() < 0.5 else set(range(layout.size // 2, layout.size))
    links = {
        frozenset((one, other)): SLOW_LEAF
        for one in inside
        for other in range(layout.size)
        if one < other or other not in inside
        if one != other
    }
    return ParallelCase("whole leaf", layout, _noisy(Disturbance(links=links)), "communication")


def _storage_jitter(rng: random.Random) -> ParallelCase:
    layout = LAYOUTS[rng.choice(list(LAYOUTS))]
    return ParallelCase("storage jitter", layout, partial(_storage, size=layout.size), "imbalance")


def _healthy(rng: random.Random) -> ParallelCase:
    return healthy(LAYOUTS[rng.choice(list(LAYOUTS))])


def healthy(layout: Layout) -> ParallelCase:
    """Return the case of a job in which nothing is wrong."""
    return ParallelCase("healthy", layout, _noisy(Disturbance()), "none")


KINDS: dict[str, Callable[[random.Random], ParallelCase]] = {
    "healthy": _healthy,
    **{f"late in {kind}": partial(_late, kind=kind) for kind in GROUPED},
    "two late": _two_late,
    "uneven pipeline": _uneven,
    "slow stage": _slow_stage,
    **{f"missing in {kind}": partial(_missing, kind=kind) for kind in GROUPED},
    "missing, no tp": _missing_in_pipeline_only,
    "slow link": _slow_link,
    "whole leaf": _leaf,
    "storage jitter": _storage_jitter,
}


def case(kind: str, seed: int) -> ParallelCase:
    """Return a case of a kind, one of KINDS. The same seed gives the same case."""
    return KINDS[kind](random.Random(f"{kind} {seed}"))
