"""Stragglers: the ranks that make others wait, as soon as the waits of successive intervals are certain of them.

In one step the rank that waits least is often another than the slow one. So the mean over some intervals counts, with
its standard error. A clear case is named after few intervals, another after more. A straggler is late in most intervals
alike. Ranks that are late in turn, as with shared storage, are an imbalance, which names no rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum, sqrt
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from flopwatch.verdicts.waits import POINT_TO_POINT, Array, Communicator, Interval

MIN_SHARE = 0.04  # of a step that a straggler computes longer at least
# Last intervals that are judged (30 s to 5 minutes with a report every 15 s), the standard errors between that share
# and half of the minimum, and the part of the intervals in which the share is at least that half.
WINDOWS = ((2, 12.0, 1.0), (3, 8.0, 1.0), (4, 8.0, 1.0), (8, 7.0, 0.7), (20, 5.0, 0.6))
NO_RANK = 3  # last intervals that are judged where no rank is late
MIN_STEPS = 6
MIN_KEPT = 0.1  # times that share, for which its peers wait at least: a pipeline hides much of it
UNEVEN_WORK = 1.05  # times the mean of tokens, above which a rank is late for its work
SAME_DATA = ("tp", "cp")  # kinds whose ranks work on the same data
WHOLE_HOST = 0.75  # of a host's ranks that are late, above which the host is
MAX_SUSPECTS = 8


class Suspect(NamedTuple):
    """Late rank, the share of each step that it computes longer, and the finest communicator where others wait."""

    rank: int
    share: float
    communicator: Communicator


@dataclass(frozen=True, slots=True)
class StragglerVerdict:
    """Cause of waits, the share of each step that it takes, and the ranks it names, the latest first.

    Kinds: none (`why` has the reason); rank (one or several); host (all of its ranks); group (all ranks of a pipeline
    stage in one replica); stage (in all replicas); link (between two ranks of a pipeline); imbalance; communication.
    """

    kind: str
    share: float = 0.0
    suspects: tuple[Suspect, ...] = ()
    why: str = ""
    judged: int = 0  # intervals that it is about, 0 if they are too few


def judge(
    intervals: Sequence[Interval],
    usual: float | None = None,
    hosts: Mapping[int, str] = MappingProxyType({}),
    fewest: int = WINDOWS[0][0],
) -> StragglerVerdict:
    """Return the verdict on the last intervals of one run.

    `usual` is its usual_wait(), None if that is unknown. `hosts` has the host of each rank. The shortest of WINDOWS
    that is certain of ranks counts, of those with the `fewest` intervals or more. What is no rank's fault is a matter
    of the last NO_RANK intervals.
    """
    if len(intervals) < WINDOWS[0][0]:
        return StragglerVerdict("none", why=f"{len(intervals)} measured intervals are too few")
    last = intervals[-NO_RANK:]
    # In most runs nothing is late, so no window is looked at.
    shares = (share for one in last for share in (one.longer, one.stage_lateness, one.receives))
    for size, errors, steady in WINDOWS if max(map(np.max, shares)) >= MIN_SHARE / 2 else ():
        window = Window(intervals[-size:], errors, steady, intervals if size < NO_RANK else ())
        if len(intervals) >= size >= fewest and fsum(one.steps for one in window.intervals) >= MIN_STEPS:
            for verdict in (_ranks(window, hosts), _stage(window), _link(window)):
                if verdict is not None:
                    return replace(verdict, judged=size)
    if len(last) < NO_RANK:
        return StragglerVerdict("none", why=f"{len(last)} measured intervals are too few")
    if (steps := fsum(one.steps for one in last)) < MIN_STEPS:
        return StragglerVerdict("none", why=f"{steps:g} measured steps are too few")
    none = StragglerVerdict("none", why="no rank makes others wait")
    return replace(_imbalance(last) or _communication(last, usual) or none, judged=NO_RANK)


class Window(NamedTuple):
    """Intervals that are judged together, with the standard errors and the part of them that a share must exceed.

    `history` has more intervals, whose noise counts too, because two alone may agree by chance.
    """

    intervals: Sequence[Interval]
    errors: float
    steady: float
    history: Sequence[Interval] = ()

    def certain(
        self, shares: Callable[[Interval], Array], alike: Array, among: Array | None = None, least: float = 0.0
    ) -> dict[int, float]:
        """Return the mean shares over the intervals that are at least MIN_SHARE and certain, and not over by now.

        Shares are an array, and so is `among`, which is true for those that count. The noise of a share is its standard
        deviation, or that of all shares with the same number in `alike` if it is higher, because few numbers may agree
        by chance. The variance is at `least` this.
        """
        every = [shares(one) for one in self.intervals]
        lately = np.max(every[-NO_RANK:], axis=0) >= MIN_SHARE / 2
        if among is not None:
            lately &= among
        if not lately.any():
            return {}
        numbers = np.stack(every)
        means = numbers.mean(axis=0)
        often = (numbers >= MIN_SHARE / 2).sum(axis=0) >= ceil(self.steady * len(every))
        if not (late := lately & often & (means >= MIN_SHARE)).any():
            return {}
        variances = numbers.var(axis=0)
        counted = np.ones(len(means), bool) if among is None else among
        noise = np.bincount(alike[counted], variances[counted]) / np.maximum(np.bincount(alike[counted]), 1)
        found = np.flatnonzero(late)
        if self.history:
            usual = np.var([shares(one) for one in self.history], axis=0)
            for one in np.unique(alike[found]):  # the median, because a rank that became late varies, too
                noise[one] = max(noise[one], np.median(usual[counted & (alike == one)]))
        errors = np.sqrt(np.maximum(np.maximum(variances[found], noise[alike[found]]), least) / (len(every) - 1))
        certain = found[means[found] - self.errors * errors >= MIN_SHARE / 2]
        return {int(one): float(means[one]) for one in certain}


def _variances(intervals: Sequence[Interval]) -> Array:
    """Return the variance of each rank's share of a step that it waits."""
    return np.var([one.waiting for one in intervals], axis=0)


def _ranks(window: Window, hosts: Mapping[int, str]) -> StragglerVerdict | None:
    """Return the verdict that ranks compute longer than their peers, which wait for them."""
    late: dict[int, Suspect] = {}
    intervals, layout = window.intervals, window.intervals[-1].layout
    for number, share in window.certain(lambda one: one.longer, layout.kind_of, layout.has_peers).items():
        if fmean(float(one.kept[number]) for one in intervals) > MIN_KEPT * share:
            group, rank = layout.place(number)
            late.setdefault(rank, Suspect(rank, share, group))
    if not late:
        return None
    tokens = np.mean([one.tokens for one in intervals], axis=0)
    busy = set(np.array(layout.ranks)[tokens > UNEVEN_WORK * max(float(tokens.mean()), 0.0)].tolist())
    named = sorted((one for one in late.values() if one.rank not in busy), key=lambda one: -one.share)
    if not named:
        return None
    worst, ranks = named[0], {one.rank for one in named}
    lowest = layout.together(SAME_DATA)
    if len(ranks) > 1 and ranks == {rank for rank, low in lowest.items() if low == lowest[worst.rank]}:
        return StragglerVerdict("group", worst.share, tuple(named[:MAX_SUSPECTS]))
    host = {rank for rank, one in hosts.items() if one == hosts.get(worst.rank)}
    if 1 < len(host) < len(layout.ranks) and ranks <= host:
        # Other ranks of the host may be late, too, though that is not yet certain.
        longer = np.mean([one.longer for one in intervals], axis=0)
        late_ranks = set(np.array(layout.ranks)[layout.rank_of[longer >= MIN_SHARE]].tolist())
        if len(late_ranks & host) >= WHOLE_HOST * len(host) > 1:
            return StragglerVerdict("host", worst.share, tuple(Suspect(rank, *worst[1:]) for rank in sorted(host)))
    return StragglerVerdict("rank", worst.share, tuple(named[:MAX_SUSPECTS]))


def _stage(window: Window) -> StragglerVerdict | None:
    """Return the verdict that one pipeline stage computes longer than the others in all replicas."""
    last = window.intervals[-1]
    each = np.arange(len(last.stage_lateness))
    # A run has few stages, so their noise is that of its ranks.
    found = window.certain(lambda one: one.stage_lateness, each, least=float(_variances(window.intervals).mean()))
    if not found:
        return None
    longest = max(found, key=found.__getitem__)
    pairs = [group for group in last.layout.communicators if group.kind == POINT_TO_POINT]
    groups = {rank: group for group in pairs for rank in group.ranks}
    ranks = np.array(last.layout.ranks)[last.layout.stages == longest].tolist()
    return StragglerVerdict(
        "stage", found[longest], tuple(Suspect(rank, found[longest], groups[rank]) for rank in ranks)
    )


def _link(window: Window) -> StragglerVerdict | None:
    """Return the verdict that two neighbours of a pipeline wait longer for each other than those of other replicas.

    A slow rank makes its neighbours wait, and does not wait itself.
    """
    layout = window.intervals[-1].layout
    longer = window.certain(lambda one: one.receives, layout.kind_of, layout.in_pair)
    shares: dict[Communicator, list[float]] = {}
    for number, share in longer.items():
        shares.setdefault(layout.place(number)[0], []).append(share)
    both = {group: min(found) for group, found in shares.items() if len(found) == len(group.ranks)}
    if not both:
        return None
    slowest = max(both, key=both.__getitem__)
    return StragglerVerdict(
        "link", both[slowest], tuple(Suspect(rank, both[slowest], slowest) for rank in slowest.ranks)
    )


def _imbalance(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that ranks are late in turn: what they compute varies from step to step."""
    share = float(np.sqrt(_variances(intervals)).mean()) * sqrt(fmean(one.steps for one in intervals))
    return StragglerVerdict("imbalance", share) if share >= MIN_SHARE else None


def usual_wait(intervals: Sequence[Interval]) -> float:
    """Return the seconds of a step that ranks wait, as a mean over ranks and intervals."""
    return fmean(float(one.waiting.mean()) * one.step_seconds for one in intervals)


def _communication(intervals: Sequence[Interval], usual: float | None) -> StragglerVerdict | None:
    """Return the verdict that all ranks wait longer than they usually do, though none is late."""
    step = fmean(one.step_seconds for one in intervals)
    more = 0.0 if usual is None else (usual_wait(intervals) - usual) / step
    return StragglerVerdict("communication", more) if more >= MIN_SHARE else None
