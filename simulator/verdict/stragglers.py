"""Stragglers: the ranks that make others wait, as soon as the waits of successive intervals are certain of them.

In one step the rank that waits least is often another than the slow one. So the mean over some intervals counts, with
its standard error. A clear case is named after few intervals, another after more. A straggler is late in most intervals
alike. Ranks that are late in turn, as with shared storage, are an imbalance, which names no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, sqrt
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from simulator.verdict.waits import POINT_TO_POINT, Communicator, Interval

MIN_SHARE = 0.04  # of a step that a straggler computes longer at least
# Last intervals that are judged (45 s to 5 minutes with a report every 15 s), the standard errors between that share
# and half of the minimum, and the part of the intervals in which the share is at least that half.
WINDOWS = ((3, 8.0, 1.0), (4, 8.0, 1.0), (8, 7.0, 0.7), (20, 5.0, 0.6))
MIN_STEPS = 6
MIN_KEPT = 0.1  # times that share, for which its peers wait at least: a pipeline hides much of it
UNEVEN_WORK = 1.05  # times the mean of tokens, above which a rank is late for its work
SAME_DATA = ("tp", "cp")  # kinds whose ranks work on the same data
WHOLE_HOST = 0.75  # of a host's ranks that are late, above which the host is
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

    Kinds: none; rank (one or several); host (all of its ranks); group (all ranks of a pipeline stage in one replica);
    stage (in all replicas); link (between two ranks of a pipeline); imbalance; communication. `why` has the reason for
    none.
    """

    kind: str
    share: float = 0.0
    suspects: tuple[Suspect, ...] = ()
    why: str = ""


def judge(
    intervals: Sequence[Interval], usual: float | None = None, hosts: Mapping[int, str] = MappingProxyType({})
) -> StragglerVerdict:
    """Return the verdict on the last intervals of one run.

    `usual` is its usual_wait(), None if that is unknown. `hosts` has the host of each rank. The shortest of WINDOWS
    that is certain of ranks counts. What is no rank's fault is a matter of the shortest one.
    """
    shortest = WINDOWS[0][0]
    if len(intervals) < shortest:
        return StragglerVerdict("none", why=f"{len(intervals)} measured intervals are too few")
    for size, errors, steady in WINDOWS:
        window = Window(intervals[-size:], errors, steady)
        if len(intervals) >= size and fsum(one.steps for one in window.intervals) >= MIN_STEPS:
            for verdict in (_ranks(window, hosts), _stage(window), _link(window)):
                if verdict is not None:
                    return verdict
    last = intervals[-shortest:]
    if (steps := fsum(one.steps for one in last)) < MIN_STEPS:
        return StragglerVerdict("none", why=f"{steps:g} measured steps are too few")
    none = StragglerVerdict("none", why="no rank makes others wait")
    return _imbalance(last) or _communication(last, usual) or none


class Window(NamedTuple):
    """Intervals that are judged together, with the standard errors and the part of them that a share must exceed."""

    intervals: Sequence[Interval]
    errors: float
    steady: float

    def certain(
        self, shares: Callable[[Interval], Mapping[Key, float]], alike: Callable[[Key], object], least: float = 0.0
    ) -> dict[Key, float]:
        """Return the mean shares over the intervals that are at least MIN_SHARE and certain, and not over by now.

        The noise of a share is its standard deviation, or that of all shares that `alike` gives the same key if it is
        higher, because few numbers may agree by chance. The variance is at `least` this.
        """
        every = [shares(one) for one in self.intervals]
        needed = ceil(self.steady * len(every))
        found: dict[Key, float] = {}
        noise: dict[object, float] = {}
        for key in every[-1]:
            numbers = [one[key] for one in every if key in one]
            lately = max(numbers[-WINDOWS[0][0] :]) >= MIN_SHARE / 2
            often = sum(number >= MIN_SHARE / 2 for number in numbers) >= needed
            if not lately or not often or fmean(numbers) < MIN_SHARE:
                continue
            if (kind := alike(key)) not in noise:
                noise[kind] = fmean(
                    _variance([one[other] for one in every]) for other in every[-1] if alike(other) == kind
                )
            error = sqrt(max(_variance(numbers), noise[kind], least) / (len(numbers) - 1))
            if fmean(numbers) - self.errors * error >= MIN_SHARE / 2:
                found[key] = fmean(numbers)
        return found


def _variance(numbers: Sequence[float]) -> float:
    mean = fmean(numbers)
    return fmean((number - mean) ** 2 for number in numbers)


def _variances(intervals: Sequence[Interval]) -> list[float]:
    """Return the variance of each rank's share of a step that it waits."""
    return [_variance([one.waiting[rank] for one in intervals]) for rank in intervals[-1].waits]


def _ranks(window: Window, hosts: Mapping[int, str]) -> StragglerVerdict | None:
    """Return the verdict that ranks compute longer than their peers, which wait for them."""
    late: dict[int, Suspect] = {}
    intervals, last = window.intervals, window.intervals[-1]
    for (group, rank), share in window.certain(lambda one: one.longer, lambda place: place[0].kind).items():
        if fmean(one.kept[group, rank] for one in intervals) > MIN_KEPT * share:
            late.setdefault(rank, Suspect(rank, share, group))
    if not late:
        return None
    tokens = {rank: fmean(one.tokens.get(rank, 0.0) for one in intervals) for rank in last.waits}
    most = UNEVEN_WORK * fmean(tokens.values())
    named = sorted((one for one in late.values() if not tokens[one.rank] > most > 0), key=lambda one: -one.share)
    if not named:
        return None
    worst, ranks = named[0], {one.rank for one in named}
    same = together(worst.rank, [group for group in last.communicators if group.kind in SAME_DATA])
    if len(ranks) > 1 and ranks == same:
        return StragglerVerdict("group", worst.share, tuple(named[:MAX_SUSPECTS]))
    host = {rank for rank, one in hosts.items() if one == hosts.get(worst.rank)}
    if len(host) < len(last.waits) and 1 < WHOLE_HOST * len(host) <= len(ranks & host) and ranks <= host:
        return StragglerVerdict("host", worst.share, tuple(Suspect(rank, *worst[1:]) for rank in sorted(host)))
    return StragglerVerdict("rank", worst.share, tuple(named[:MAX_SUSPECTS]))


def together(rank: int, communicators: Iterable[Communicator]) -> set[int]:
    """Return the ranks that are connected with `rank` through these communicators."""
    groups = [set(group.ranks) for group in communicators]
    found, before = {rank}, 0
    while len(found) > before:
        before = len(found)
        found.update(*(group for group in groups if group & found))
    return found


def _stage(window: Window) -> StragglerVerdict | None:
    """Return the verdict that one pipeline stage computes longer than the others in all replicas."""
    # A run has few stages, so their noise is that of its ranks.
    found = window.certain(lambda one: one.stage_lateness, lambda stage: stage, fmean(_variances(window.intervals)))
    if not found:
        return None
    last, longest = window.intervals[-1], max(found, key=found.__getitem__)
    pairs = [group for group in last.communicators if group.kind == POINT_TO_POINT]
    groups = {rank: group for group in pairs for rank in group.ranks}
    ranks = [rank for rank, stage in last.stages.items() if stage == longest]
    return StragglerVerdict(
        "stage", found[longest], tuple(Suspect(rank, found[longest], groups[rank]) for rank in ranks)
    )


def _link(window: Window) -> StragglerVerdict | None:
    """Return the verdict that two neighbours of a pipeline wait longer for each other than those of other replicas.

    A slow rank makes its neighbours wait, and does not wait itself.
    """
    longer = window.certain(lambda one: one.receives, lambda place: place[0].kind)
    both = {group: min(longer.get((group, rank), 0.0) for rank in group.ranks) for group, _ in longer}
    slowest = max(both, key=both.__getitem__, default=None)
    if slowest is None or both[slowest] == 0:
        return None
    share = both[slowest]
    return StragglerVerdict("link", share, tuple(Suspect(rank, share, slowest) for rank in slowest.ranks))


def _imbalance(intervals: Sequence[Interval]) -> StragglerVerdict | None:
    """Return the verdict that ranks are late in turn: what they compute varies from step to step."""
    share = fmean(map(sqrt, _variances(intervals))) * sqrt(fmean(one.steps for one in intervals))
    return StragglerVerdict("imbalance", share) if share >= MIN_SHARE else None


def usual_wait(intervals: Sequence[Interval]) -> float:
    """Return the seconds of a step that ranks wait, as a mean over ranks and intervals."""
    return fmean(fmean(one.waiting.values()) * one.step_seconds for one in intervals)


def _communication(intervals: Sequence[Interval], usual: float | None) -> StragglerVerdict | None:
    """Return the verdict that all ranks wait longer than they usually do, though none is late."""
    step = fmean(one.step_seconds for one in intervals)
    more = 0.0 if usual is None else (usual_wait(intervals) - usual) / step
    return StragglerVerdict("communication", more) if more >= MIN_SHARE else None
