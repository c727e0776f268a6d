"""Admission of pushes: which process may be a rank on this host, and how many ranks and runs there may be.

A rank whose pid is alive is replaced only by a newer start of the same job and user. Another process with a live pid
and the same name is a conflict: both go on. A push without a live pid can neither replace a live one nor use up its
budget. A pid in another namespace is known to be alive only where this process sees that namespace in /proc.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flopwatch.node.telemetry.evidence import EventCount
from flopwatch.node.telemetry.otlp import Push, Refused
from flopwatch.node.telemetry.process_exit import Process, ProcessWatch, owner, pids, process_alive

MAX_RANKS = 64  # live ranks of one user. All pushes without a live pid share the budget of one user
MAX_RUNS = 16
MAX_USERS = 4  # budgets that a host has
MAX_NAMES = 64  # of runs without a live pid in an hour, since the ledger keeps each run for a day
SEARCH_INTERVAL = 1.0  # seconds between two searches of /proc during a push

RankKey = tuple[str, str, int]  # tenant, run, rank
AttemptKey = tuple[str, str, str]  # tenant, run, attempt

_SLURM_STEP = re.compile(r"slurm-\d+\.\d+")


@dataclass
class Rank:
    """Newest push of a rank, its process if that is visible, and how it ended."""

    push: Push
    received: float  # on the monotonic clock
    wall: float  # Unix time of `received`, as the clock was at the first push
    began: float  # Unix time of the process's start, as the clock was at the first push
    end: str | None = None  # finished, gone, replaced or silent
    ended_at: float = 0.0  # Unix time
    refused: EventCount | None = None  # allocations that CUDA refused
    user: int | None = None  # uid, None unless the pid was found alive
    pid: int | None = None  # in the namespace of the exporter; 0 if unknown, None before the search
    watch: ProcessWatch | None = None
    exited: tuple[str, str] = ("", "")


LiveRank = tuple[AttemptKey, Rank]


class Admitted(NamedTuple):
    """User of an admitted push, the ranks that it replaces, and the attempts that it is in conflict with."""

    user: int | None
    replaced: list[LiveRank]
    rivals: list[AttemptKey]


def own_pid_namespace() -> int:
    """Return the inode of the pid namespace of this process, 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def same_job(one: str, other: str) -> bool:
    """Return whether two attempts are of one Slurm step or one launch. Their names differ only in restart counts."""
    return _job(one) == _job(other)


def _job(attempt: str) -> str:
    step = _SLURM_STEP.match(attempt)
    return step[0] if step is not None else attempt.rpartition("-")[0] or attempt


class Admission:
    """Rules for new processes, with the newest process of each rank and the names of recent runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.pid_namespace = own_pid_namespace()
        self._clock = clock
        self._searched = -math.inf
        self._newest: dict[RankKey, tuple[float, tuple[int, int, int], str]] = {}  # start, process, attempt
        self._names: dict[tuple[str, str], float] = {}  # last push of each tenant and run, the oldest first

    def admit(self, push: Push, live: Sequence[LiveRank]) -> Admitted:
        """Decide about a push, given the live ranks of this host. Raises Refused."""
        own: AttemptKey = push.tenant, push.run, push.attempt
        same_rank = [(key, rank) for key, rank in live if (key[1], rank.push.rank) == (push.run, push.rank)]
        known = next((rank for key, rank in same_rank if key == own and rank.push.process == push.process), None)
        if known is not None:
            admitted = Admitted(known.user, [], [])
        else:
            admitted = self._decide(push, self._user(push, search=bool(same_rank)), same_rank)
            replaced = [id(rank) for _, rank in admitted.replaced]
            others = [one for one in live if id(one[1]) not in replaced]
            if admitted.user is None and self._exceeded(own, None, others):
                admitted = admitted._replace(user=self._user(push, search=True))
            if limit := self._exceeded(own, admitted.user, others):
                raise Refused("limit", f"this node takes at most {limit}")
        if admitted.user is None:
            self._names.pop(own[:2], None)
            self._names[own[:2]] = self._clock()
        key: RankKey = push.tenant, push.run, push.rank
        newest = self._newest.get(key)
        if newest is None or push.process == newest[1] or not push.is_older(*newest[:2]):
            self._newest.pop(key, None)
            self._newest[key] = push.started, push.process, push.attempt
            while len(self._newest) > 4 * MAX_RANKS:
                del self._newest[next(iter(self._newest))]
        return admitted

    def _decide(self, push: Push, user: int | None, same_rank: Sequence[LiveRank]) -> Admitted:
        """Return which ranks a process replaces and which it is in conflict with. Raises Refused."""
        which = f"rank {push.rank} of run {push.run!r}"
        newest = self._newest.get((push.tenant, push.run, push.rank))
        if newest is not None and push.process != newest[1] and push.is_older(*newest[:2]):
            hidden = push.pid > 0 and push.pid_namespace not in (0, self.pid_namespace)
            if (user is None and not hidden) or same_job(push.attempt, newest[2]):
                raise Refused("stale_process", f"a newer process is {which}")
        replaced: list[LiveRank] = []
        rivals: list[AttemptKey] = []
        for key, rank in same_rank:
            theirs = self._user(rank.push, rank.pid or 0)
            related = theirs == user and same_job(push.attempt, rank.push.attempt)
            newer = not push.is_older(rank.push.started, rank.push.process)
            if push.process == rank.push.process and key[0] == push.tenant:
                replaced.append((key, rank))  # a second run of one process
            elif self.gone(rank) or (theirs is None and user is not None):
                replaced.append((key, rank))
            elif theirs is not None and user is None:
                raise Refused("conflict", f"a live process is {which}, and this push has no live pid")
            elif key[0] != push.tenant:
                raise Refused("conflict", f"{which} is another tenant's on this node")
            elif related and not newer:
                raise Refused("stale_process", f"a newer process is {which}")
            elif related or (user is None and newer):  # without live pids the newest counts until the other pushes
                replaced.append((key, rank))
            elif key[2] == push.attempt:
                raise Refused("conflict", f"{which} is another user's in this attempt")
            else:
                rivals.append(key)
        return Admitted(user, replaced, rivals)

    def _exceeded(self, own: AttemptKey, user: int | None, others: Sequence[LiveRank]) -> str:
        """Return the limit that one more rank of a user would exceed, or an empty text."""
        for whose, factor in (([one for one in others if one[1].user == user], 1), (others, MAX_USERS)):
            runs = {key[:2] for key, _ in whose}
            if len(whose) >= factor * MAX_RANKS or (own[:2] not in runs and len(runs) >= factor * MAX_RUNS):
                return f"{factor * MAX_RANKS} ranks of {factor * MAX_RUNS} runs" + " of one user" * (factor == 1)
        while self._names and self._clock() - next(iter(self._names.values())) > 3600:
            del self._names[next(iter(self._names))]
        if user is None and own[:2] not in self._names and len(self._names) >= MAX_NAMES:
            return f"{MAX_NAMES} different runs without a live pid in an hour"
        return ""

    def _user(self, push: Push, pid: int = 0, *, search: bool = False) -> int | None:
        """Return the uid of a push's process, None unless that is alive. `pid` is its pid in this namespace, if known.

        With `search`, look in /proc for the process of another namespace.
        """
        if push.pid <= 0 or push.pid_namespace == 0 or push.pid_start_ticks <= 0:
            return None
        if push.pid_namespace == self.pid_namespace:
            pid = push.pid
        elif pid == 0 and search and self._clock() - self._searched >= SEARCH_INTERVAL:
            self._searched = self._clock()
            process = push.pid, push.pid_start_ticks
            pid = pids([process]).get(process, 0)
        return owner(pid, push.pid_start_ticks) if pid > 0 else None

    def locate(self, ranks: Sequence[Rank]) -> None:
        """Find the pids of ranks in this namespace, and observe their processes."""
        inside: dict[Process, list[Rank]] = {}
        for rank in ranks:
            push = rank.push
            own = push.pid > 0 and push.pid_namespace not in (0, self.pid_namespace)
            if own and push.pid_start_ticks > 0:
                inside.setdefault((push.pid, push.pid_start_ticks), []).append(rank)
        outer = pids(inside.keys()) if inside else {}
        for rank in ranks:
            push = rank.push
            rank.pid = self._pid_here(push) or outer.get((push.pid, push.pid_start_ticks), 0)
            if rank.pid:
                rank.watch = ProcessWatch(rank.pid, push.pid_start_ticks)
                rank.user = self._user(push, rank.pid)

    def gone(self, rank: Rank) -> bool:
        """Return whether the process of a rank has ended. False if it cannot be seen."""
        pid = rank.pid or self._pid_here(rank.push)
        return pid > 0 and not process_alive(pid, rank.push.pid_start_ticks)

    def _pid_here(self, push: Push) -> int:
        """Return the pid of a push if it is in the namespace of this process, else 0."""
        return push.pid if push.pid > 0 and push.pid_namespace == self.pid_namespace != 0 else 0
