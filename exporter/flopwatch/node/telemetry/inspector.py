"""Waits of ranks from NCCL Inspector, where the hook cannot measure them: the time that operations took.

NCCL's kernel starts when its rank arrives and ends when all have, so the last rank has the shortest. Processes are
joined to ranks by their pid or GPU, and communicators to the process groups that the ranks report by their members. The
result is the field `waits` of a record (`flopwatch.ledger.record`), as the hook's waits are.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch import catalogue as m
from flopwatch.catalogue.ranks import MESSAGES
from flopwatch.node.collectors import StateFile
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.inspector_files import Files
from flopwatch.node.telemetry.inspector_formats import (
    COLLECTIVE,
    MAX_KINDS,
    MEAN,
    OTHER,
    RECEIVE,
    Member,
    Otlp,
    TimedBatch,
    is_inspector,
)
from flopwatch.node.telemetry.inspector_groups import PIPELINE, WHOLE_JOB, Group, group_of, owner, waits_of_receives
from flopwatch.node.telemetry.otlp import Push

log = logging.getLogger(__name__)

OUTCOMES = "joined unjoined ignored limit malformed"
INSPECTOR_STATE = "nccl_inspector.json"
EVERY, IDLE = 5.0, 60.0  # seconds between two looks at the files, and without ranks until the thread ends
PUSHES = 32  # of a rank, in which the steps at an operation's time are looked up
MAX_BATCHES, MAX_PROCESSES = 64, 256  # that wait for a rank: of one process, and all
MAX_WAITING = 32768  # kinds of operations in all batches that wait
MAX_GROUPS = 16  # of a rank in a record
FINER_THAN_PIPELINE = ("tp", "cp", "ep")
_SECONDS = ("step", "data_stall")  # activities within a step
_TOTALS = ("steps", "seconds", "tokens")
_ROWS = {"steps": m.TRAINING_STEPS_TOTAL, "tokens": m.TRAINING_TOKENS_TOTAL}
_ROWS |= {"world": m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER}

NO_GROUP = ("", "")  # of an unknown communicator
Key = tuple[Member, str, int]
Values = dict[object, float]


@dataclass
class _Rank:
    began: float
    pushes: deque[tuple[float, Values]] = field(default_factory=lambda: deque(maxlen=PUSHES))
    at: float = 0.0
    anchor: Values | None = None  # its totals at the end of the operations that are counted
    pending: dict[Key, list[float]] = field(default_factory=dict)
    totals: Values = field(default_factory=lambda: dict.fromkeys(_TOTALS, 0.0))
    waits: dict[Group, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Kind and ranks of the process groups that it reports."""
        return [key for key in self.pushes[-1][1] if isinstance(key, tuple)]

    def values(self, at: float) -> Values:
        """Return the totals of its pushes as of `at`, by a straight line between or after two of them."""
        pushes = self.pushes
        later = next((number for number, (time, _) in enumerate(pushes) if time >= at and number), len(pushes) - 1)
        (end, after), (begin, before) = pushes[later], pushes[max(0, later - 1)]
        if end <= begin:
            return after
        share = min(max(0.0, (at - begin) / (end - begin)), 2.0)
        return {key: before.get(key, 0.0) + share * (value - before.get(key, 0.0)) for key, value in after.items()}


class Inspector:
    """Files of NCCL Inspector in a folder, if any, and its OTLP metrics."""

    def __init__(
        self,
        folder: Path | None,
        host: str,
        registry: Registry,
        memory: StateFile | None = None,
        every: float = EVERY,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._memory, self._every, self._now = folder, memory, every, now
        self._lock = threading.Lock()
        self._operations = registry.metric(m.FLOPWATCH_NCCL_INSPECTOR_OPERATIONS_TOTAL)
        self._skipped = registry.metric(m.FLOPWATCH_NCCL_INSPECTOR_SKIPPED_BYTES_TOTAL)
        self._skipped.add(by=0)
        for outcome in OUTCOMES.split():
            self._operations.add(outcome, by=0)
        self._files = Files(folder, host, self._count) if folder is not None else None
        self._otlp = Otlp()
        self._batches: dict[str, list[TimedBatch]] = {}
        self._wanted: dict[tuple[str, ...], tuple[float, list[str]]] = {}  # time and processes of each attempt
        self._ranks: dict[tuple[object, ...], _Rank] = {}
        self._members: dict[str, dict[int, int]] = {}  # ranks of a run by place in a communicator, -1: several
        self._thread: threading.Thread | None = None
        self._saved = 0.0

    def receive(self, resource: ResourceMetrics) -> int | None:
        """Take OTLP metrics. Return the number of refused points, None if they are not from NCCL Inspector."""
        if not is_inspector(resource):
            return None
        with self._lock:
            batches, malformed, beyond = self._otlp.batches(resource)
        self._count("malformed", malformed)
        self._count("limit", beyond)
        self._keep(batches)
        return malformed + beyond

    def look(self) -> None:
        """Read what is new in the files of the ranks that `waits` was asked about."""
        if self._files is not None:
            with self._lock:
                wanted = {process for _, processes in self._wanted.values() for process in processes}
            self._keep(self._files.read(wanted))
        if self._memory is not None and (now := self._now()) >= self._saved + 3 * EVERY:
            self._saved = now
            counts = {labels[0]: value for labels, value in [*self._operations.values.items()]}
            skipped = sum(self._skipped.values.values())
            problem = self._files.problem if self._files is not None else ""
            self._memory.save({"t": now, "operations": counts, "skipped": skipped, "problem": problem})

    def waits(self, key: tuple[str, ...], pushes: Sequence[Push]) -> list[list[object]] | None:
        """Return the field `waits` of a record, None unless all live ranks of the attempt on this host have some."""
        now = self._now()
        with self._lock:
            self._wanted = {one: kept for one, kept in self._wanted.items() if now - kept[0] < IDLE and one != key}
            others = {process for _, processes in self._wanted.values() for process in processes}
            self._wanted[key] = now, [name for push in pushes for name in _names(push)]
            processes = Counter([*self._wanted[key][1], *others])
            live = {(*key, push.rank, push.started) for push in pushes}
            self._ranks = {
                one: rank for one, rank in self._ranks.items() if one in live or one[:3] in self._wanted.keys() - {key}
            }
            ranks = {push.rank: self._rank((*key, push.rank, push.started), push) for push in pushes}
            for push in pushes:
                names = [name for name in _names(push) if processes[name] == 1]
                for batch in [one for name in names for one in self._batches.pop(name, ())]:
                    self._take(ranks[push.rank], push.rank, batch)
            groups = {number: rank.groups for number, rank in ranks.items()}
            for name in [name for name in self._batches if "#" in name]:
                title, _, number_there = name.rpartition("#")
                known = number_there.isdecimal()
                if known and (number := owner(title, int(number_there), groups)) is not None:
                    for batch in self._batches.pop(name):
                        self._take(ranks[number], number, batch)
            local = set(ranks)
            for push in pushes:
                self._commit(ranks[push.rank], push.rank, local)
        self._start()
        rows = [_row(push, ranks[push.rank]) for push in pushes]
        return [row for row in rows if row is not None] if rows and all(rows) else None

    def _start(self) -> None:
        if self._every and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._loop, name="inspector", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while any(self._now() - asked < IDLE for asked, _ in [*self._wanted.values()]):
            try:
                self.look()
            except Exception:
                log.exception("files of NCCL Inspector not read folder=%s", self._folder)
            time.sleep(self._every)

    def _count(self, outcome: str, by: int) -> None:
        if outcome == "skipped":
            self._skipped.add(by=by)
        elif by:
            self._operations.add(outcome, by=by)

    def _keep(self, batches: Iterable[TimedBatch]) -> None:
        with self._lock:
            for batch in batches:
                waiting = self._batches.setdefault(batch.process, [])
                waiting.append(batch)
                if len(waiting) > MAX_BATCHES:
                    self._drop(waiting)
            while len(self._batches) > MAX_PROCESSES:
                self._count("unjoined", sum(map(_operations, self._batches.pop(next(iter(self._batches))))))
            sizes = {name: sum(len(one.sums) for one in waiting) for name, waiting in self._batches.items()}
            while sum(sizes.values()) > MAX_WAITING:
                largest = max(sizes, key=sizes.__getitem__)
                sizes[largest] = 0
                self._drop(self._batches[largest])

    def _drop(self, waiting: list[TimedBatch]) -> None:
        """Drop the operations of a process that wait. Later ones count from the time of the last batch."""
        self._count("limit", sum(map(_operations, waiting)))
        del waiting[:-1]
        waiting[0].begins = True
        waiting[0].sums.clear()

    def _rank(self, key: tuple[object, ...], push: Push) -> _Rank:
        rank = self._ranks.setdefault(key, _Rank(self._now()))
        if not rank.pushes or push.at > rank.pushes[-1][0]:
            values: Values = dict.fromkeys(_TOTALS, 0.0)
            for name, row in _ROWS.items():
                values.update((name, value) for _, value in push.of(row))
            activities = push.of(m.TRAINING_ACTIVITY_SECONDS_TOTAL)
            values["seconds"] = sum(value for labels, value in activities if labels[-1] in _SECONDS)
            groups = push.of(m.TRAINING_GROUP_SEQUENCE_NUMBER)
            values |= {(labels[2], labels[3]): value for labels, value in groups if labels[2] not in MESSAGES}
            rank.pushes.append((push.at, values))
        return rank

    def _take(self, rank: _Rank, number: int, batch: TimedBatch) -> None:
        """Store the operations of a rank until they are counted."""
        at = min(batch.at, self._now())
        for (member, kind, peer), (seconds, count) in batch.sums.items():
            if member.id and member.rank >= 0:
                members = self._members.setdefault(member.id, {})
                if len(members) < MAX_PROCESSES and members.setdefault(member.rank, number) != number:
                    members[member.rank] = -1
            if batch.begins or rank.anchor is None:
                continue
            if len(rank.pending) >= MAX_KINDS and (member, kind, peer) not in rank.pending:
                self._count("limit", int(count))
                continue
            total = rank.pending.setdefault((member, kind, peer), [0.0, 0])
            total[0] += seconds
            total[1] += count
        while len(self._members) > MAX_PROCESSES * MAX_GROUPS:
            del self._members[next(iter(self._members))]
        if batch.begins or rank.anchor is None:
            rank.anchor, rank.pending = rank.values(at), {}
        rank.at = max(rank.at, at)

    def _commit(self, rank: _Rank, number: int, local: set[int]) -> None:
        """Count the operations of a rank since the last time, if it has done a step in between."""
        if rank.anchor is None or not rank.pending:
            return
        values = rank.values(rank.at)
        done = {key: value - rank.anchor.get(key, value) for key, value in values.items()}
        if done["steps"] < 1 or done["seconds"] <= 0:
            return
        waits: defaultdict[Group, float] = defaultdict(float)
        received: defaultdict[tuple[Member, Group], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        means: defaultdict[tuple[Member, Group], list[float]] = defaultdict(list)
        for (member, kind, peer), (seconds, count) in rank.pending.items():
            if kind == OTHER or member.size == 1:
                self._count("ignored", int(count))
                continue
            members = self._members.get(member.id, {})
            group = None if -1 in members.values() else group_of(number, member, kind, rank.groups, members, local)
            self._count("unjoined" if group is None else "joined", int(count))
            if group is None:
                waits[NO_GROUP] += seconds
            elif kind == COLLECTIVE:
                waits[group] += seconds
            elif kind == MEAN:
                means[member, group].append(seconds / count)
            else:
                received[member, group][peer] += seconds if kind == RECEIVE else 0.0
        for (_, group), each in means.items():
            called = done.get("world" if group[0] == WHOLE_JOB else group)
            waits[NO_GROUP if called is None else group] += (
                done["seconds"] if called is None else sum(each) / len(each) * called
            )
        for (_, group), by_peer in received.items():
            for one, seconds in waits_of_receives(number, group, by_peer):
                waits[one] += seconds
        for group, seconds in waits.items():
            known = group if group in rank.waits or len(rank.waits) < MAX_GROUPS else NO_GROUP
            rank.waits[known] = rank.waits.get(known, 0.0) + min(seconds, done["seconds"])
        rank.totals = {name: rank.totals[name] + done[name] for name in _TOTALS}
        rank.anchor, rank.pending = values, {}


def _operations(batch: TimedBatch) -> int:
    return sum(int(count) for _, count in batch.sums.values())


def _names(push: Push) -> list[str]:
    """Return the names that a batch of a rank may have. The plugin's GPU3 is local rank 3."""
    names = [f"pid:{push.pid}"] if push.pid > 0 else []
    for labels, _ in push.of(m.TRAINING_RANK_INFO):
        about = dict(zip(m.TRAINING_RANK_INFO.labels, labels, strict=True))
        names += [about["uuid"].removeprefix("GPU-"), f"GPU{about['local_rank']}"]
    return list(filter(None, names))


def _row(push: Push, rank: _Rank) -> list[object] | None:
    """Return the row of a rank in the field `waits`, None without a wait in a known group."""
    kinds = {kind for kind, _ in rank.waits}
    # Without the receives of a pipeline, waits in coarser groups may be caused by a rank outside of them.
    fine = PIPELINE not in kinds and any(kind == PIPELINE for kind, _ in rank.groups)
    known = {
        group: seconds
        for group, seconds in rank.waits.items()
        if group != NO_GROUP and (not fine or group[0] in FINER_THAN_PIPELINE)
    }
    if not known:
        return None
    wait = round(sum(known.values()) + rank.waits.get(NO_GROUP, 0.0), 3)
    steps, seconds, tokens = (round(rank.totals[name], 3) for name in _TOTALS)
    groups = [[*group, round(seconds, 3)] for group, seconds in known.items()]
    return [push.rank, push.declared("pp"), rank.began, steps, seconds, wait, tokens, groups]
