"""What-if: the seconds that a step would take if some ranks computed as fast as their peers.

A step ends with its slowest replica, so gains do not add up. A pipeline hides a part of what a slow stage costs. So the
microbatches of each replica are replayed in the order 1F1B (https://arxiv.org/abs/2104.04473), with the time that the
ranks of each stage compute. All else of a step takes as long as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean, median_high

from simulator.verdict.stragglers import together
from simulator.verdict.waits import POINT_TO_POINT, Interval

FORWARD_SHARE = 1 / 3  # of the computation of a microbatch, without recomputation


def step_seconds(intervals: Sequence[Interval], mended: AbstractSet[int], microbatches: int = 1) -> float:
    """Return the seconds that a step would take if the ranks `mended` computed as long as the median of their peers.

    `microbatches` are those of a step in a pipeline.
    """
    now = fmean(one.step_seconds for one in intervals)
    last = intervals[-1]
    busy = {rank: fmean(1 - one.waiting[rank] for one in intervals) for rank in last.waits}
    after = {
        rank: min(seconds, _usual(last, busy, mended, rank)) if rank in mended else seconds
        for rank, seconds in busy.items()
    }
    replicas = _replicas(last)
    gain = _slowest(last, replicas, busy, microbatches) - _slowest(last, replicas, after, microbatches)
    return now * (1 - gain)


def _usual(interval: Interval, busy: Mapping[int, float], mended: AbstractSet[int], rank: int) -> float:
    """Return the median time that others compute: the rank's peers, or all ranks if its stage is to be mended."""
    stage = {peer for peer, one in interval.stages.items() if one == interval.stages[rank]}
    return median_high(busy[peer] for peer in (stage - mended or busy.keys() - mended or busy.keys()))


def _slowest(
    interval: Interval, replicas: Iterable[AbstractSet[int]], busy: Mapping[int, float], microbatches: int
) -> float:
    """Return the share of a step that the slowest replica takes for its microbatches."""
    found = []
    for ranks in replicas:
        stages: dict[int, float] = {}
        for rank in ranks:
            stage = interval.stages[rank]
            stages[stage] = max(busy[rank], stages.get(stage, 0.0))
        found.append(pipeline_seconds([stages[stage] for stage in sorted(stages)], microbatches))
    return max(found)


def _replicas(interval: Interval) -> list[set[int]]:
    """Return the ranks of each replica: those that exchange data during the microbatches of a step."""
    coarsest = max(group.fineness[0] for group in interval.communicators)
    pending, found = set(interval.waits), []
    finer = [group for group in interval.communicators if group.fineness[0] < coarsest or group.kind == POINT_TO_POINT]
    while pending:
        ranks = together(min(pending), finer)
        pending -= ranks
        found.append(ranks)
    return found


def pipeline_seconds(stages: Sequence[float], microbatches: int) -> float:
    """Return the seconds of all microbatches, given the seconds that each stage computes for all of them."""
    if len(stages) == 1:
        return stages[0]
    queues = [order_of_passes(len(stages) - 1 - stage, microbatches) for stage in range(len(stages))]
    ended: dict[tuple[int, bool, int], float] = {}
    now = [0.0] * len(stages)
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                forward, number = queue[0]
                before = (stage - 1 if forward else stage + 1, forward, number)
                if 0 <= before[0] < len(stages) and before not in ended:
                    break
                share = FORWARD_SHARE if forward else 1 - FORWARD_SHARE
                now[stage] = max(now[stage], ended.get(before, 0.0)) + stages[stage] * share / microbatches
                ended[stage, forward, number] = now[stage]
                del queue[0]
    return max(now)


def order_of_passes(later: int, microbatches: int) -> list[tuple[bool, int]]:
    """Return the 1F1B passes of a stage with `later` stages after it: whether it is a forward one, and microbatch."""
    warm = min(later, microbatches)
    order = [(True, number) for number in range(warm)]
    for number in range(microbatches - warm):
        order += [(True, warm + number), (False, number)]
    return order + [(False, number) for number in range(microbatches - warm, microbatches)]
