"""What a straggler cost: productive time of a run that went into waiting for one rank, or for one host.

In synchronous training the late rank is the one that waits least. Its score in a window is the upper median of the wait
shares of the ranks at its place in the pipeline less its own: the share of each step that it costs. As in the recording
rules (docs/stragglers.md) somebody is named who was the latest in three windows in a row, nobody where another is
nearly as late, where work is uneven, or where a rank is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import fsum
from typing import NamedTuple, TypeVar

WINDOW, IN_A_ROW = 120.0, 3
SHARE = 0.10  # of a step; less is nobody's fault
_STEPS = 5  # measured ones a window needs
_UNEVEN = 1.05  # times the mean of tokens
_RIVAL = 0.75  # of the latest's score

Rank = tuple[str, int]  # source, rank
_Who = TypeVar("_Who", Rank, str)


class Wait(NamedTuple):
    """What a rank has waited for others so far, in the steps in which that was measured."""

    rank: int
    place: str  # in the pipeline
    started: float  # the process
    steps: float
    seconds: float
    wait: float
    tokens: float


@dataclass(slots=True)
class Late:
    """Who was the latest in the last windows, and what is to be counted once that is confirmed."""

    who: str = ""
    windows: int = 0
    waiting: float = 0.0  # GPU-seconds
    since: float | None = None  # the window began
    productive: float = 0.0  # GPU-seconds, as it did
    number: int = 0  # of the window

    def judge(self, found: tuple[str, float] | None, productive: float) -> float:
        """Take the latest of a window with so many productive GPU-seconds; return what is lost to one for sure."""
        who, score = ("", 0.0) if found is None else found
        if who != self.who or not who:
            self.who, self.windows, self.waiting = who, 0, 0.0
        self.windows += 1
        self.waiting += productive * min(score, 1.0) if score >= SHARE else 0.0
        if not who or self.windows < IN_A_ROW:
            return 0.0
        lost, self.waiting = self.waiting, 0.0
        return lost


def latest(then: Mapping[str, Sequence[Wait]], now: Mapping[str, Sequence[Wait]]) -> tuple[str, float] | None:
    """Return the latest rank, or host, by what all ranks had waited at two times, and its score; None if nobody is."""
    shares: dict[Rank, tuple[str, float]] = {}
    tokens: dict[Rank, float] = {}
    for source, waits in now.items():
        before = {wait.rank: wait for wait in then.get(source, ())}
        for wait in waits:
            first = before.get(wait.rank)
            if (
                first is None
                or first.started != wait.started
                or wait.steps - first.steps < _STEPS
                or (wait.seconds <= first.seconds)
            ):
                return None
            share = (wait.wait - first.wait) / (wait.seconds - first.seconds)
            shares[source, wait.rank] = wait.place, share
            tokens[source, wait.rank] = wait.tokens - first.tokens
    if len(shares) < 2:
        return None
    places: dict[str, list[float]] = {}
    for place, share in shares.values():
        places.setdefault(place, []).append(share)
    middle = {place: sorted(found)[len(found) // 2] for place, found in places.items()}  # the upper median
    scores = {rank: middle[place] - share for rank, (place, share) in shares.items()}
    uneven = _UNEVEN * fsum(tokens.values()) / len(tokens)
    excused = {rank for rank, count in tokens.items() if count > uneven > 0}
    found = _alone(scores)
    if found is not None:
        return None if found in excused else (f"rank {found[1]}", scores[found])
    if len(now) < 2:
        return None
    hosts = dict(_means(scores))
    host = _alone(hosts)
    return None if host is None or any(source == host for source, _ in excused) else (f"host {host}", hosts[host])


def _alone(scores: Mapping[_Who, float]) -> _Who | None:
    """Return whose score is the highest by far; None if another's comes near."""
    first, second = nlargest(2, scores, key=scores.__getitem__)
    return first if scores[first] > 0 and scores[second] <= _RIVAL * scores[first] else None


def _means(scores: Mapping[Rank, float]) -> Iterator[tuple[str, float]]:
    by_source: dict[str, list[float]] = {}
    for (source, _), score in scores.items():
        by_source.setdefault(source, []).append(score)
    for source, found in by_source.items():
        yield source, fsum(found) / len(found)
