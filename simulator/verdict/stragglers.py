"""Stragglers: the ranks that make others wait, as soon as the waits of successive intervals are certain of them.

In one step the rank that waits least is often another than the slow one. So the mean over some intervals counts, with
its standard error. A straggler is late in all intervals alike. Ranks that are late in turn, as with shared storage, are
an imbalance, which names no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import fmean
from typing import NamedTuple, TypeVar

from simulator.verdict.waits import POINT_TO_POINT, Communicator, Interval

MIN_SHARE = 0.04  # of a step that a straggler computes longer at least
CERTAIN = 8.0  # standard errors by which that share is above half of the minimum
MIN_INTERVALS, MIN_STEPS = 4, 20
MIN_KEPT = 0.1  # times that share, for which its peers wait at least: a pipeline hides much of it
UNEVEN_WORK = 1.05  # times the mean of tokens, above which a rank is late for its work
GROUPED = ("tp", "cp")  # kinds whose ranks work on the same data
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
    """Return the verdict on successive intervals of one run. `usual` is its usual_wait(), None if that is unknown."""
    steps = fsum(one.steps for one in intervals)
    if len(intervals) < MIN_INTERVALS or steps < MIN_STEPS:
        return StragglerVerdict("none", why=f"{steps:g} measured steps in {len(intervals)} intervals are too few")
    for find in (_ranks, _stage, _link, _imbalance, lambda them: _communication(them, usual)):
        verdict = find(intervals)
        if verdict is not None:
            return verdict
    return StragglerVerdict("none", why="no rank makes others wait")


def certain(
    intervals: Sequence[Interval], shares: Callable[[Interval], Mapping[Key, float]], alike: Callable[[Key], object]
) -> dict[Key, float]:
    """Return the mean shares over intervals that are at least MIN_SHARE and certain.

    The noise of a share is its standard deviation, or that of all shares that `alike` gives the same key if it is
    higher, because few numbers may agree by chance.
    """
    every = [shares(one) for one in intervals]
    means = {key: fmean(one[key] for one in every) for key in every[-1]}
    variances = {key: fmean((one[key] - mean) ** 2 for one in every) for key, mean in means.items()}
    pooled: dict[object, list[float]] = {}
    for key, variance in variances.items():
        pooled.setdefault(alike(key), []).append(variance)
    noise = {kind: fmean(values) for kind, values in pooled.items()}
    found = {}
    for key, mean in means.items():
        if mean >= MIN_SHARE and min(one[key] for one in every) >= MIN_SHARE / 2:
            error = sqrt(max(variances[key], noise[alike(key)]) / (len(every) - 1))
            if mean - CERTAIN * error >= MIN_SHARE / 2:
                found[key] = mean
    return found


def _ranks(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that ranks compute longer than their peers, which wait for them."""
    late: dict[int, Suspect] = {}
    last = intervals[-1]
    longer = certain(
        intervals,
        lambda one: {place: lateness.longer for place, lateness in one.lateness.items()},
        lambda place: place[0].kind,
    )
    for (group, rank), share in longer.items():
        if all(one.lateness[group, rank].kept > MIN_KEPT * share for one in intervals):
            late.setdefault(rank, Suspect(rank, share, group))
    tokens = {rank: fmean(one.tokens.get(rank, 0.0) for one in intervals) for rank in last.waits}
    most = UNEVEN_WORK * fmean(tokens.values())
    named = sorted((one for one in late.values() if not tokens[one.rank] > most > 0), key=lambda one: -one.share)
    if not named:
        return None
    whole = len(named) > 1 and {one.rank for one in named} == together(named[0].rank, last.communicators)
    return StragglerVerdict("group" if whole else "rank", named[0].share, tuple(named[:MAX_SUSPECTS]))


def together(rank: int, communicators: Iterable[Communicator]) -> set[int]:
    """Return the ranks that work on the same data as `rank`, in its tensor and context parallel groups and theirs."""
    groups = [set(group.ranks) for group in communicators if group.kind in GROUPED]
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
    deviations = []
    for rank in intervals[-1].waits:
        waiting = [one.waiting[rank] for one in intervals]
        mean = fmean(waiting)
        deviations.append(sqrt(fmean((share - mean) ** 2 for share in waiting)))
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
