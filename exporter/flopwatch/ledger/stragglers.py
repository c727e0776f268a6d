"""Cost of stragglers: productive GPU-seconds of a run that ranks spent waiting for one rank or one host.

The straggler of synchronous training is the rank that waits least. The score of a rank is the share of each step that
it costs, in a window of two minutes. It is the upper median of the wait shares at the rank's place in the pipeline
minus its own share. docs/stragglers.md has the rules.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import fsum
from typing import NamedTuple, TypeVar

WINDOW, IN_A_ROW = 120.0, 3
MIN_SHARE = 0.10  # of a step that a straggler costs at least
_MIN_STEPS = 5  # measured steps that a window needs
_UNEVEN = 1.05  # times the mean of tokens, above which a rank is slow for its work
_MAX_SECOND = 0.75  # of the highest score, above which the second makes it ambiguous

SourceRank = tuple[str, int]
_Name = TypeVar("_Name", SourceRank, str)


class RankWait(NamedTuple):
    """Totals of one rank over its measured steps: steps, their seconds, seconds waited for other ranks, and tokens."""

    rank: int
    place: str  # in the pipeline
    started: float  # start of the process
    steps: float
    seconds: float
    wait: float
    tokens: float


@dataclass(slots=True)
class StragglerTally:
    """Straggler of the last windows, and the GPU-seconds it cost, which count once it is confirmed."""

    who: str = ""  # rank or host, under the name of the saved state; codespell:ignore who
    windows: int = 0  # in a row
    waiting: float = 0.0  # GPU-seconds not yet counted
    since: float | None = None  # start of the window
    productive: float = 0.0  # GPU-seconds of the run at that time
    number: int = 0  # of the window

    def judge(self, straggler: tuple[str, float] | None, productive: float) -> float:
        """Add a window's straggler (name, score) and productive GPU-seconds. Return those that a confirmed one cost."""
        name, score = ("", 0.0) if straggler is None else straggler
        if name != self.who or not name:  # codespell:ignore who
            self.who, self.windows, self.waiting = name, 0, 0.0  # codespell:ignore who
        self.windows += 1
        self.waiting += productive * min(score, 1.0) if score >= MIN_SHARE else 0.0
        if not name or self.windows < IN_A_ROW:
            return 0.0
        lost, self.waiting = self.waiting, 0.0
        return lost


def find_straggler(
    then: Mapping[str, Sequence[RankWait]], now: Mapping[str, Sequence[RankWait]]
) -> tuple[str, float] | None:
    """Return name and score of the rank or host that straggled from `then` to `now`, or None. Waits are by host."""
    shares: dict[SourceRank, tuple[str, float]] = {}
    tokens: dict[SourceRank, float] = {}
    for source, waits in now.items():
        before = {wait.rank: wait for wait in then.get(source, ())}
        for wait in waits:
            first = before.get(wait.rank)
            if first is None or first.started != wait.started:
                return None
            if wait.steps - first.steps < _MIN_STEPS or wait.seconds <= first.seconds:
                return None
            share = (wait.wait - first.wait) / (wait.seconds - first.seconds)
            shares[source, wait.rank] = wait.place, share
            tokens[source, wait.rank] = wait.tokens - first.tokens
    if len(shares) < 2:
        return None
    places: defaultdict[str, list[float]] = defaultdict(list)
    for place, share in shares.values():
        places[place].append(share)
    medians = {place: sorted(of_place)[len(of_place) // 2] for place, of_place in places.items()}  # the upper ones
    scores = {rank: medians[place] - share for rank, (place, share) in shares.items()}
    uneven = _UNEVEN * fsum(tokens.values()) / len(tokens)
    excused = {rank for rank, count in tokens.items() if count > uneven > 0}
    slowest = _clear_highest(scores)
    if slowest is not None:
        return None if slowest in excused else (f"rank {slowest[1]}", scores[slowest])
    if len(now) < 2:
        return None
    by_host: defaultdict[str, list[float]] = defaultdict(list)
    for (source, _), score in scores.items():
        by_host[source].append(score)
    hosts = {source: fsum(of_host) / len(of_host) for source, of_host in by_host.items()}
    host = _clear_highest(hosts)
    return None if host is None or any(source == host for source, _ in excused) else (f"host {host}", hosts[host])


def _clear_highest(scores: Mapping[_Name, float]) -> _Name | None:
    """Return the name with the highest score if the second is at most 75 % of it, else None."""
    first, second = nlargest(2, scores, key=scores.__getitem__)
    return first if scores[first] > 0 and scores[second] <= _MAX_SECOND * scores[first] else None
