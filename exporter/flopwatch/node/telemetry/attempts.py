"""Attempts of runs on this host: the ranks of each, and what their records still wait for."""

from dataclasses import dataclass, field
from typing import Any

from flopwatch import catalogue as m
from flopwatch.node.telemetry import otlp
from flopwatch.node.telemetry.admission import AttemptKey, Rank
from flopwatch.node.telemetry.evidence import Entry, RankEnd
from flopwatch.node.telemetry.open_step import RankOfHost
from flopwatch.node.telemetry.process_exit import BLOCKED

Record = dict[str, Any]


@dataclass
class HostAttempt:
    """Attempt with a live rank, or whose last record the ledger has not accepted."""

    ranks: dict[int, Rank] = field(default_factory=dict)
    changes: int = 0
    delivered: int = 0
    gone_at: float | None = None
    entries: list[Entry] = field(default_factory=list)  # evidence in the last record
    user: int | None = None  # of its newest push
    rivals: set[AttemptKey] = field(default_factory=set)  # attempts that it was in conflict with
    stacks: dict[int, list[Any]] = field(default_factory=dict)  # rank, Unix time and text
    late: bool = False  # whether the last record had a late step
    signs: dict[int, list[str]] = field(default_factory=dict)  # of ranks whose processes are in trouble
    looked: float = 0.0  # on the monotonic clock, when a record was last due without a push

    @property
    def live(self) -> list[Rank]:
        """Ranks that have not ended."""
        return [rank for rank in self.ranks.values() if rank.end is None]

    @property
    def status(self) -> str | None:
        """How the attempt ended as reported by its ranks, None until all of them have reported."""
        statuses = [rank.push.status for rank in self.ranks.values() if rank.push.status is not None]
        if len(statuses) == len(self.ranks):
            return max(statuses, key=otlp.STATUSES.index)
        # One completed rank is enough if the last push of another was lost.
        return "completed" if not self.live and "completed" in statuses else None

    @property
    def open_ranks(self) -> dict[int, RankOfHost]:
        """Ranks by number, as `open_step` reads them."""
        ranks = {}
        for number, rank in self.ranks.items():
            blocked = rank.watch.since if rank.watch is not None and rank.watch.state in BLOCKED else None
            ranks[number] = RankOfHost(rank.push, rank.received, rank.step, blocked, rank.end)
        return ranks

    @property
    def run_p99(self) -> float | None:
        """99th percentile of the run's step durations in seconds, which one rank reports. None on other hosts."""
        rows = (row for rank in self.live for row in rank.push.of(m.TRAINING_STEP_PERCENTILE_SECONDS))
        return next((seconds for labels, seconds in rows if labels[-1] == "99"), None)


@dataclass
class EvidenceScope:
    """Begin and GPUs of the evidence that may concern an attempt, with the last state of its ranks."""

    since: float  # Unix time
    gpus: list[str] | None  # None: all
    ranks: list[RankEnd]


@dataclass
class EndedAttempt:
    """Ended attempt whose last record was delivered, while further evidence may appear."""

    scene: EvidenceScope
    records: list[Record]  # the last ones
    until: float  # Unix time
    reported: list[Entry]  # evidence in the last record
    changes: int = 0
    delivered: int = 0
