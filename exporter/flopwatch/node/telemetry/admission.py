"""Admission of pushes: which process may be a rank on this host, and how many ranks and runs there may be.

A rank whose pid is alive is replaced only by a newer start of the same job and user. Another process with a live pid
and the same name is a conflict: both go on. A push without a live pid can neither replace a live one nor use up its
budget. A pid in another namespace is known to be alive only where this process sees that namespace in /proc.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flopwatch.node.telemetry.evidence import EventCount
from flopwatch.node.telemetry.open_step import StepClock
from flopwatch.node.telemetry.otlp import Push, Refused
from flopwatch.node.telemetry.process_exit import ProcessWatch, pids, process_alive

MAX_RANKS = 64  # live ranks of one user. All pushes without a live pid share the budget of one user
MAX_RUNS = 16
MAX_USERS = 4  # budgets that a host has
MAX_NAMES = 64  # of runs without a live pid in an hour, since the ledger keeps each run for a day
SEARCH_INTERVAL = 0.2  # seconds between two searches of /proc during a push

RankKey = tuple[str, str, int]  # tenant, run, rank
AttemptKey = tuple[str, str, str]  # tenant, run, attempt


@dataclass
class Rank:
    """Newest push of a rank, its process if that is visible, and how it ended."""

    push: Push
    received: float  # on the monotonic clock
    lead: float  # of the wall clock over the monotonic clock at the process's first push
    step: StepClock
    undecoded: tuple[Callable[[], Push], float] | None = None  # a newer push of the process, and its Unix time
    end: str | None = None  # finished, gone, replaced or silent
    ended_at: float = 0.0  # Unix time
    refused: EventCount | None = None  # allocations that CUDA refused
    user: int | None = None  # uid, None unless the pid was found alive
    pid: int | None = None  # in the namespace of the exporter; 0 if unknown, None before the search
    watch: ProcessWatch | None = None
    exited: tuple[str, str] = ("", "")
    groups: frozenset[tuple[str, ...]] = frozenset()  # process groups with a collective before the last step ended


LiveRank = tuple[AttemptKey, Rank]
Admitted = tuple[int | None, list[LiveRank], list[AttemptKey]]  # user, ranks that end, attempts in conflict


def own_pid_namespace() -> int:
    """Return the inode of the pid namespace of this process, 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def same_job(one: str, other: str) -> bool:
    """Return whether two attempts are of one Slurm step or one launch. Their names differ only in restart counts."""
    steps = [re.match(r"slurm-\d+\.\d+|.+(?=-)|.*", attempt) for attempt in (one, other)]
    return len({step and step[0] for step in steps}) == 1


class Admission:
    """Rules for new processes, with the newest process of each rank and the names of recent runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.pid_namespace = own_pid_namespace()
        self._clock, self._searched = clock, -math.inf
        self._newest: dict[RankKey, tuple[float, tuple[int, int, int], str]] = {}  # start, process, attempt
        self._names: dict[tuple[str, str], float] = {}  # last push of each tenant and run, the oldest first

    def admit(self, push: Push, live: Sequence[LiveRank]) -> Admitted:
        """Return the user of a push, which live ranks it replaces, and which it is in conflict with. Raises Refused."""
        own: AttemptKey = push.tenant, push.run, push.attempt
        same_rank = [(key, rank) for key, rank in live if (key[1], rank.push.rank) == (push.run, push.rank)]
        known = next((rank for key, rank in same_rank if key == own and rank.push.process == push.process), None)
        admitted: Admitted = (known.user if known is not None else None), [], []
        if known is None:
            admitted = self._decide(push, self._user(push, search=bool(same_rank)), same_rank)
            others = [one for one in live if one not in admitted[1]]
            if admitted[0] is None and self._exceeded(own, None, others):
                admitted = self._user(push, search=True), *admitted[1:]
            if limit := self._exceeded(own, admitted[0], others):
                raise Refused("limit", f"this node takes at most {limit}")
        if admitted[0] is None:
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
        which = f"rank {push.rank} of run {push.run!r}"
        stale = Refused("stale_process", f"a newer process is {which}")
        newest = self._newest.get((push.tenant, push.run, push.rank))
        if newest is not None and push.process != newest[1] and push.is_older(*newest[:2]):
            hidden = push.pid > 0 and push.pid_namespace not in (0, self.pid_namespace)
            if (user is None and not hidden) or same_job(push.attempt, newest[2]):
                raise stale
        admitted: Admitted = user, [], []
        for key, rank in same_rank:
            theirs = self._user(rank.push, rank.pid or 0)
            related = theirs == user and same_job(push.attempt, rank.push.attempt)
            older = push.is_older(rank.push.started, rank.push.process)
            same = push.process == rank.push.process and key[0] == push.tenant  # a second run of one process
            if same or self.gone(rank) or (theirs is None and user is not None):
                admitted[1].append((key, rank))
            elif theirs is not None and user is None:
                raise Refused("conflict", f"a live process is {which}, and this push has no live pid")
            elif key[0] != push.tenant:
                raise Refused("conflict", f"{which} is another tenant's on this node")
            elif related and older:
                raise stale
            elif related or (user is None and not older):  # without live pids the newest counts until the other pushes
                admitted[1].append((key, rank))
            elif key[2] == push.attempt:
                raise Refused("conflict", f"{which} is another user's in this attempt")
            else:
                admitted[2].append(key)
        return admitted

    def _exceeded(self, own: AttemptKey, user: int | None, others: Sequence[LiveRank]) -> str:
        """Return the limit that one more rank of a user would exceed, or an empty text."""
        for whose, factor in (([one for one in others if one[1].user == user], 1), (others, MAX_USERS)):
            runs = {key[:2] for key, _ in whose}
            if len(whose) >= factor * MAX_RANKS or (own[:2] not in runs and len(runs) >= factor * MAX_RUNS):
                return f"{factor * MAX_RANKS} ranks of {factor * MAX_RUNS} runs" + " of one user" * (factor == 1)
        while self._names and self._clock() - next(iter(self._names.values())) > 3600:
            del self._names[next(iter(self._names))]
        full = user is None and own[:2] not in self._names and len(self._names) >= MAX_NAMES
        return f"{MAX_NAMES} different runs without a live pid in an hour" if full else ""

    def _user(self, push: Push, pid: int = 0, *, search: bool = False) -> int | None:
        """Return the uid of a push's process, -1 if /proc hides it, and None unless the process is known to live."""
        process = push.process[1:]
        if min(push.process) <= 0:
            return None
        pid = self._pid_here(push) or pid
        if pid == 0 and search and self._clock() - self._searched >= SEARCH_INTERVAL:
            self._searched = self._clock()
            pid = pids([process]).get(process, 0)
        if pid == 0 or not process_alive(pid, push.pid_start_ticks):
            return None
        with suppress(OSError):
            return os.stat(f"/proc/{pid}").st_uid
        return -1

    def locate(self, ranks: Sequence[Rank]) -> None:
        """Find the pids of ranks in this namespace, and observe their processes."""
        hidden = [one.push.process[1:] for one in ranks if min(one.push.process) > 0 and not self._pid_here(one.push)]
        outer = pids(hidden) if hidden else {}
        for rank in ranks:
            push = rank.push
            rank.pid = self._pid_here(push) or outer.get(push.process[1:], 0)
            if rank.pid:
                rank.watch = ProcessWatch(rank.pid, push.pid_start_ticks)
                rank.user = self._user(push, rank.pid)

    def gone(self, rank: Rank) -> bool:
        """Return whether the process of a rank has ended. False if it cannot be seen."""
        return (pid := rank.pid or self._pid_here(rank.push)) > 0 and not process_alive(pid, rank.push.pid_start_ticks)

    def _pid_here(self, push: Push) -> int:
        """Return the pid of a push if it is in the namespace of this process, else 0."""
        return push.pid if push.pid > 0 and push.pid_namespace == self.pid_namespace != 0 else 0
