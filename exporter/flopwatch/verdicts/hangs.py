"""Hangs: the rank that the others wait for, by the operations that each rank has called.

A rank that stops has called fewer operations of a communicator than its peers there, and waits in none itself. In the
coarser communicators all ranks that wait for it are behind too, so the finest communicator with a difference counts.
The numbers of a pipeline's sends and receives differ between its stages and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flopwatch.verdicts.waits import POINT_TO_POINT, Communicator

OVERDUE_SECONDS, OVERDUE_STEPS = 15.0, 5.0  # a step is overdue after so many seconds, and times the 99th percentile


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Operations that a rank has called by communicator, where it waits now, and signs of its process and host.

    Signs are words such as "its process is gone", the strongest first.
    """

    called: Mapping[Communicator, int]
    waits_in: Communicator | None = None
    signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Ranks that the others wait for, and the finest communicator where they are behind. `why`: no rank is named."""

    ranks: tuple[int, ...] = ()
    communicator: Communicator | None = None
    signs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    why: str = ""


def overdue_after(p99: float) -> float:
    """Return the seconds after which an open step is overdue. `p99` is the 99th percentile of its run's steps, in s."""
    return max(OVERDUE_SECONDS, OVERDUE_STEPS * p99)


def judge(ranks: Mapping[int, RankCalls]) -> HangVerdict:
    """Return the verdict on a run with an overdue step."""
    behind: dict[int, Communicator] = {}
    waiting = {rank for rank, calls in ranks.items() if calls.waits_in is not None}
    groups = {group for calls in ranks.values() for group in calls.called if group.kind != POINT_TO_POINT}
    for group in sorted(groups, key=lambda group: group.order):
        called = {rank: ranks[rank].called[group] for rank in group.ranks if group in ranks[rank].called}
        for rank, number in called.items():
            if number < max(called.values()):
                behind.setdefault(rank, group)
            if number > min(called.values()):
                waiting.add(rank)
    signs = {rank: calls.signs for rank, calls in ranks.items() if calls.signs}
    suspects = {rank: group for rank, group in behind.items() if rank not in waiting}
    if not suspects:
        why = "each rank waits for another" if behind else "all ranks have called the same operations"
        return HangVerdict(signs=signs, why=why)
    finest = min(group.fineness for group in suspects.values())
    missing = {rank: group for rank, group in suspects.items() if group.fineness == finest}
    marked = {rank: group for rank, group in missing.items() if rank in signs}
    named = marked if len(missing) > 1 and marked else missing
    return HangVerdict(tuple(sorted(named)), named[min(named)], signs)
