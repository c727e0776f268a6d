"""What-if: the seconds that a step would take if some ranks computed as fast as their peers.

A step ends with its slowest replica, so gains do not add up. A pipeline hides a part of what a slow stage costs. So the
microbatches of each replica are replayed in the order 1F1B (https://arxiv.org/abs/2104.04473), with the time that the
ranks of each stage compute. All else of a step takes as long as before.

The slowest replica is another one in each step, so a step is longer than the mean of any. How much replicas vary
follows from their means in successive intervals, and in which part of all steps a rank is late from squares.

No record has the number of microbatches. It follows from the waits: with fewer ones, stages wait longer for each other.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from statistics import NormalDist, median_high

import numpy as np

from flopwatch.verdicts.stragglers import StragglerVerdict
from flopwatch.verdicts.waits import KINDS, POINT_TO_POINT, Array, Communicator, Interval, Unmeasured

REPLICATED = "dp"  # the kind of the groups between replicas
FORWARD_SHARE = 1 / 3  # of the computation of a microbatch, without recomputation
MIN_NOISE = 0.001  # of a step
DEVIATIONS = np.linspace(-6, 6, 601)
NORMAL = np.array([NormalDist().cdf(number) for number in DEVIATIONS])  # probability of less
MICROBATCHES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128)  # of a step, that are compared with its waits


def curve(intervals: Sequence[Interval], verdict: StragglerVerdict) -> dict[int, float]:
    """Return the seconds of a step without the 1, 2, 4 ... and all of the verdict's ranks, and 0 for those it takes.

    Of a slow link, both ranks are mended at once. Raises Unmeasured.
    """
    ranks, run = [one.rank for one in verdict.suspects], WhatIf(intervals)
    if verdict.kind == "link":
        return {0: run.step_seconds, len(ranks): run.without_link(verdict.suspects[0].communicator)}
    numbers = (number for number in sorted({1, 2, 4, len(ranks)}) if number <= len(ranks))
    return {0: run.step_seconds} | {number: run.without({*ranks[:number]}) for number in numbers}


class WhatIf:
    """Replicas of a run. Ranks of one exchange data during the microbatches of a step. Methods raise Unmeasured."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._layout = layout = intervals[-1].layout
        self._steps, size = np.array([one.steps for one in intervals]), len(layout.ranks)
        self._mean = mean = partial(np.average, axis=0, weights=self._steps)
        self.step_seconds = float(mean([one.step_seconds for one in intervals]))
        # The same computation is a smaller share of a slower step.
        seconds = mean([one.seconds for one in intervals])
        waits = mean([one.waits * one.seconds[layout.rank_of] for one in intervals]) / seconds[layout.rank_of]
        self._busy = 1 - np.bincount(layout.rank_of, waits, size)
        self._variances = mean([one.squares for one in intervals]) - (seconds * self._busy) ** 2
        kinds = {group.kind for group in layout.communicators}
        if len(set(layout.together(kinds).values())) > 1:
            raise Unmeasured("the process groups that connect the stages of the pipeline are not known")
        if POINT_TO_POINT in kinds and not layout.stages.any():
            raise Unmeasured("the order of the pipeline's stages is not known")
        between = REPLICATED if REPLICATED in kinds else layout.communicators[-1].kind
        inner = kinds & {*KINDS} - {between} | kinds & {POINT_TO_POINT}
        lowest = layout.together(inner)
        _, self._of = np.unique([lowest[rank] for rank in layout.ranks], return_inverse=True)
        self._stages = int(layout.stages.max()) + 1
        outside = np.array([group.kind not in inner for group in layout.communicators], bool)[layout.group_of]
        self._computing = 1 - np.bincount(layout.rank_of, waits * (outside | layout.in_pair), size)
        # Share of a step after which each replica waits for the others, in each interval. Its first stage ends last.
        self._ends = np.zeros((len(intervals), int(self._of.max()) + 1))
        for one, ends in zip(intervals, self._ends, strict=True):
            end = one.seconds * (1 - np.bincount(layout.rank_of, one.waits * outside, size)) / self.step_seconds
            np.maximum.at(ends, self._of, end * (layout.stages == 0))
        self._shares = mean(self._ends)

    def without(self, mended: AbstractSet[int]) -> float:
        """Return the seconds of a step in which the ranks `mended` compute as long as the median of their peers."""
        busy, after = self._busy, self._busy.copy()
        mend = np.isin(self._layout.ranks, list(mended))
        for stage in range(self._stages):
            here = self._layout.stages == stage
            # The usual time is that of the rank's peers, or of all ranks if its stage is to be mended.
            others: Array = next((some for some in (here & ~mend, ~mend) if some.any()), np.ones(len(mend), bool))
            after[here & mend] = np.minimum(busy[here & mend], median_high(busy[others]))
        late, well, noise = self._replicas(busy), self._replicas(after), self._noise(mend)
        often = self._often(busy - after, mend) if noise else np.ones_like(late)
        return float(self.step_seconds * (1 - highest_falls(late, well, often, noise)))

    def _noise(self, mend: Array) -> float:
        """Return the standard deviation of a replica's share in one step, from those without mended ranks, or 0."""
        others = np.delete(self._ends, np.unique(self._of[mend]), axis=1)
        count, replicas = others.shape
        if count < 2 or replicas < 2:
            return 0.0
        # What all replicas have in common, such as larger batches, does not change which of them is the slowest.
        others -= others.mean(axis=1, keepdims=True)
        return float(np.sqrt((self._steps @ (others - self._mean(others)) ** 2).sum() / (count - 1) / (replicas - 1)))

    def _often(self, delays: Array, mend: Array) -> Array:
        """Return in which part of all steps each replica is late, if the delays of its ranks are so long on average."""
        variances = self._variances / self.step_seconds**2
        more = np.fmax(variances - np.median(variances[~mend]), 0.0)  # 0 where it is unknown
        late, often = delays > 0, np.ones(self._ends.shape[1])
        # No measured step takes more than twice the mean, so no delay does.
        parts = np.maximum(delays[late] ** 2 / (delays[late] ** 2 + more[late]), delays[late] / 2)
        np.minimum.at(often, self._of[late], parts)
        return often

    def without_link(self, link: Communicator) -> float:
        """Return the seconds of a step if the replica with this slow link were like the next slowest one."""
        if len(self._shares) < 2:
            raise Unmeasured("the pipeline has no replica to compare with")
        slow = self._of[self._layout.ranks.index(link.ranks[0])]
        return float(self.step_seconds * (1 - max(0.0, self._shares[slow] - np.delete(self._shares, slow).max())))

    @cached_property
    def microbatches(self) -> int:
        """Least number of microbatches with which the fastest replica takes no longer. Its transfers take time, too."""
        fastest = int(self._shares.argmin())
        computes = self._computing[self._of == fastest]
        places = self._layout.stages[self._of == fastest]
        stages = [float(computes[places == stage].mean()) for stage in range(self._stages)]
        if self._shares[fastest] > sum(stages) and self._stages > 1:
            raise Unmeasured("the stages of the pipeline wait longer than for each other")
        fit = (count for count in MICROBATCHES if float(pipeline_seconds(stages, count)) <= self._shares[fastest])
        return int(next(fit, MICROBATCHES[-1]))

    def _replicas(self, busy: Array) -> Array:
        """Return the share of a step that each replica takes for its microbatches."""
        longest = np.zeros((self._stages, self._ends.shape[1]))
        np.maximum.at(longest, (self._layout.stages, self._of), busy)
        return pipeline_seconds(list(longest), self.microbatches) if self._stages > 1 else longest[0]


def highest_falls(late: Array, well: Array, often: Array, noise: float) -> float:
    """Return how much less the highest of some numbers is expected to be if they are `well` and no longer `late`.

    Each is a mean to which normal noise is added. A late number is higher in the part `often` of all cases only.
    """
    if noise < MIN_NOISE:
        return float(late.max() - well.max())
    peak, delayed = well + (late - well) / often, late > well
    at, step = np.linspace(well.max() - 6 * noise, peak.max() + 6 * noise, 1000, retstep=True)

    def below(numbers: Array) -> Array:
        """Return how probable it is that each of the numbers is below each point."""
        return np.interp((at[:, None] - numbers) / noise, DEVIATIONS, NORMAL)

    others, times = np.unique(well[~delayed].round(3), return_counts=True)
    mended, same = below(well[delayed]), np.prod(below(others) ** times, axis=1)
    before = often[delayed] * below(peak[delayed]) + (1 - often[delayed]) * mended
    return float(step * np.sum(same * (mended.prod(axis=1) - before.prod(axis=1))))


def pipeline_seconds(stages: Sequence[Array], microbatches: int) -> Array:
    """Return the seconds of all microbatches, given a number or array of those that each stage computes."""
    queues = [order_of_passes(len(stages) - 1 - stage, microbatches) for stage in range(len(stages))]
    ended: dict[tuple[int, bool, int], Array] = {}
    now: list[Array] = [0.0] * len(stages)
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                forward, number = queue[0]
                before = (stage - 1 if forward else stage + 1, forward, number)
                if 0 <= before[0] < len(stages) and before not in ended:
                    break
                share = FORWARD_SHARE if forward else 1 - FORWARD_SHARE
                now[stage] = np.maximum(now[stage], ended.get(before, 0.0)) + stages[stage] * share / microbatches
                ended[stage, forward, number] = now[stage]
                del queue[0]
    return np.max(now, axis=0)


def order_of_passes(later: int, microbatches: int) -> list[tuple[bool, int]]:
    """Return the 1F1B passes of a stage with `later` stages after it: whether it is a forward one, and microbatch."""
    warm = min(later, microbatches)
    order = [(True, number) for number in range(warm)]
    for number in range(microbatches - warm):
        order += [(True, warm + number), (False, number)]
    return order + [(False, number) for number in range(microbatches - warm, microbatches)]
