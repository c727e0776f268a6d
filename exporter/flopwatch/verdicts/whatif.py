"""What-if: the seconds that a step would take if some ranks computed as fast as their peers.

A step ends with its slowest replica, so gains do not add up. A pipeline hides a part of what a slow stage costs. So the
microbatches of each replica are replayed in the order 1F1B (https://arxiv.org/abs/2104.04473), with the time that the
ranks of each stage compute. All else of a step takes as long as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean, median_high

import numpy as np

from flopwatch.verdicts.waits import KINDS, POINT_TO_POINT, Array, Interval, Layout

REPLICATED = "dp"  # the kind of the groups between replicas
FORWARD_SHARE = 1 / 3  # of the computation of a microbatch, without recomputation


def step_seconds(intervals: Sequence[Interval], mended: AbstractSet[int], microbatches: int = 1) -> float:
    """Return the seconds that a step would take if the ranks `mended` computed as long as the median of their peers.

    `microbatches` are those of a step in a pipeline.
    """
    layout = intervals[-1].layout
    now = fmean(one.step_seconds for one in intervals)
    busy = 1 - np.mean([one.waiting for one in intervals], axis=0)
    after = busy.copy()
    mend = np.isin(layout.ranks, list(mended))
    for stage in range(int(layout.stages.max()) + 1):
        here = layout.stages == stage
        # The usual time is that of the rank's peers, or of all ranks if its stage is to be mended.
        others: Array = next((some for some in (here & ~mend, ~mend) if some.any()), np.ones(len(mend), bool))
        after[here & mend] = np.minimum(busy[here & mend], median_high(busy[others]))
    replicas = _replicas(layout)
    gain = _slowest(layout, replicas, busy, microbatches) - _slowest(layout, replicas, after, microbatches)
    return float(now * (1 - gain))


def _slowest(layout: Layout, replicas: Array, busy: Array, microbatches: int) -> float:
    """Return the share of a step that the slowest replica takes for its microbatches."""
    count = int(layout.stages.max()) + 1
    longest = np.zeros((int(replicas.max()) + 1, count))
    np.maximum.at(longest, (replicas, layout.stages), busy)
    return max(pipeline_seconds(stages, microbatches) for stages in longest.tolist())


def _replicas(layout: Layout) -> Array:
    """Return the replica of each rank: ranks in one exchange data during the microbatches of a step."""
    kinds = {group.kind for group in layout.communicators}
    finer = kinds - {REPLICATED} if REPLICATED in kinds else kinds - {max(kinds, key=_order, default="")}
    finer = (finer & set(KINDS)) | (kinds & {POINT_TO_POINT})
    lowest = layout.together(finer)
    _, replicas = np.unique([lowest[rank] for rank in layout.ranks], return_inverse=True)
    return replicas


def _order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


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
