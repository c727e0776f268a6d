"""Stragglers: the ranks that make others wait, as soon as the waits of successive intervals are certain of them.

In one step the rank that waits least is often another than the slow one. So the mean over some intervals counts, with
its standard error. A clear case is named after few intervals, another after more. A straggler is late in all intervals
alike. Ranks that are late in turn, as with shared storage, are an imbalance, which names no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import fmean
from typing import NamedTuple, TypeVar

from simulator.verdict.waits import POINT_TO_POINT, Communicator, Interval

MIN_SHARE = 0.04  # of a step that a straggler computes longer at least
CERTAIN = 8.0  # standard errors between that share and half of the minimum
WINDOWS = (4, 8, 20)  # last intervals that are judged: 1, 2 and 5 minutes with a report every 15 s
MIN_STEPS = 20
MIN_KEPT = 0.1  # times that share, for which its peers wait at least: a pipeline hides much of it
UNEVEN_WORK = 1.05  # times the mean of tokens, above which a rank is late for its work
SAME_DATA = ("tp", "cp")  # kinds whose ranks work on the same data
MAX_SUSPECTS = 8

Key = TypeVar("Key")


class Suspect(NamedTuple):
    """Late rank, the share of each step that it computes longer, and the finest communicator where others wait."""

    rank: int
    share: float
    communicator: Communicator


@dataclass(frozen=True, slots=True)
class StragglerVerdict:
    """Cause of waits, the share of each step that it takes, and the ranks it names, the latest first.

    Kinds: none; rank (one or several); group (all ranks of a pipeline stage in one replica); stage (in all replicas);
    link (between two ranks of a pipeline); imbalance; communication. `why` has the reason for none.
    """

    kind: str
    share: float = 0.0
    suspects: tuple[Suspect, ...] = ()
    why: str = ""


def judge(intervals: Sequence[Interval], usual: float | None = None) -> StragglerVerdict:
    """Return the verdict on the last intervals of one run. `usual` is its usual_wait(), None if that is unknown.

    The shortest of WINDOWS that is certain of ranks counts. What is no rank's fault is a matter of the shortest one.
    """
    if len(intervals) < WINDOWS[0]:
        return StragglerVerdict("none", why=f"{len(intervals)} measured intervals are too few")
    for window in (intervals[-size:] for size in WINDOWS if size <= len(intervals)):
        if fsum(one.steps for one in window) >= MIN_STEPS:
            for find in (_ranks, _stage, _link):
                if (verdict := find(window)) is not None:
                    return verdict
    last = intervals[-WINDOWS[0] :]
    if (steps := fsum(one.steps for one in last)) < MIN_STEPS:
        return StragglerVerdict("none", why=f"{steps:g} measured steps are too few")
    none = StragglerVerdict("none", why="no rank makes others wait")
    return _imbalance(last) or _communication(last, usual) or none


def certain(
    intervals: Sequence[Interval], shares: Callable[[Interval], Mapping[Key, float]], alike: Callable[[Key], object]
) -> dict[Key, float]:
    """Return the mean shares over intervals that are at least MIN_SHARE and certain.

    The noise of a share is its standard deviation, or that of all shares that `alike` gives the same key if it is
    higher, because few numbers may agree by chance.
    """
    every = [shares(one) for one in intervals]
    steady = [key for key in every[-1] if all(one[key] >= MIN_SHARE / 2 for one in reversed(every))]
    means = {key: fmean(one[key] for one in every) for key in steady}
    found: dict[Key, float] = {}
    noise: dict[object, float] = {}
    for key, mean in means.items():
        if mean < MIN_SHARE:
            continue
        if (kind := alike(key)) not in noise:
            noise[kind] = fmean(_variance([one[other] for one in every]) for other in every[-1] if alike(other) == kind)
        error = sqrt(max(_variance([one[key] for one in every]), noise[kind]) / (len(every) - 1))
        if mean - CERTAIN * error >= MIN_SHARE / 2:
            found[key] = mean
    return found


def _variance(numbers: Sequence[float]) -> float:
    mean = fmean(numbers)
    return fmean((number - mean) ** 2 for number in numbers)


def _ranks(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that ranks compute longer than their peers, which wait for them."""
    late: dict[int, Suspect] = {}
    last = intervals[-1]
    for (group, rank), share in certain(intervals, lambda one: one.longer, lambda place: place[0].kind).items():
        if all(one.kept[group, rank] > MIN_KEPT * share for one in intervals):
            late.setdefault(rank, Suspect(rank, share, group))
    if not late:
        return None
    tokens = {rank: fmean(one.tokens.get(rank, 0.0) for one in intervals) for rank in last.waits}
    most = UNEVEN_WORK * fmean(tokens.values())
    named = sorted((one for one in late.values() if not tokens[one.rank] > most > 0), key=lambda one: -one.share)
    if not named:
        return None
    same = together(named[0].rank, [group for group in last.communicators if group.kind in SAME_DATA])
    whole = len(named) > 1 and {one.rank for one in named} == same
    return StragglerVerdict("group" if whole else "rank", named[0].share, tuple(named[:MAX_SUSPECTS]))


def together(rank: int, communicators: Iterable[Communicator]) -> set[int]:
    """Return the ranks that are connected with `rank` through these communicators."""
    groups = [set(group.ranks) for group in communicators]
    found, before = {rank}, 0
    while len(found) > before:
        before = len(found)
        found.update(*(group for group in groups if group & found))
    return found


def _stage(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that one pipeline stage computes longer than the others in all replicas."""
    found = certain(intervals, lambda one: one.stage_lateness, lambda stage: stage)
    if not found:
        return None
    last, longest = intervals[-1], max(found, key=found.__getitem__)
    pairs = [group for group in last.communicators if group.kind == POINT_TO_POINT]
    groups = {rank: group for group in pairs for rank in group.ranks}
    ranks = [rank for rank, stage in last.stages.items() if stage == longest]
    return StragglerVerdict(
        "stage", found[longest], tuple(Suspect(rank, found[longest], groups[rank]) for rank in ranks)
    )


def _link(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that two neighbours of a pipeline wait longer for each other than those of other replicas.

    A slow rank makes its neighbours wait, and does not wait itself.
    """
    longer = certain(intervals, lambda one: one.receives, lambda place: place[0].kind)
    both = {group: min(longer.get((group, rank), 0.0) for rank in group.ranks) for group, _ in longer}
    slowest = max(both, key=both.__getitem__, default=None)
    if slowest is None or both[slowest] == 0:
        return None
    share = both[slowest]
    return StragglerVerdict("link", share, tuple(Suspect(rank, share, slowest) for rank in slowest.ranks))


def _imbalance(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that ranks are late in turn: what they compute varies from step to step."""
    deviations = (sqrt(_variance([one.waiting[rank] for one in intervals])) for rank in intervals[-1].waits)
    share = fmean(deviations) * sqrt(fmean(one.steps for one in intervals))
    return StragglerVerdict("imbalance", share) if share >= MIN_SHARE else None


def usual_wait(intervals: Sequence[Interval]) -> float:
    """Return the seconds of a step that ranks wait, as a mean over ranks and intervals."""
    return fmean(fmean(one.waiting.values()) * one.step_seconds for one in intervals)


def _communication(intervals: Sequence[Interval], usual: float | None) -> StragglerVerdict | None:
    """Return the verdict that all ranks wait longer than they usually do, though none is late."""
    step = fmean(one.step_seconds for one in intervals)
    more = 0.0 if usual is None else (usual_wait(intervals) - usual) / step
    return StragglerVerdict("communication", more) if more >= MIN_SHARE else None
