"""Training processes of this host: their pushes, for the scrape and, merged per attempt, for the ledger.

`admission` decides which processes may be ranks. A rank is served until it finishes, is replaced, its process ends, or
`rank_timeout` passes without a push. An attempt is kept until the ledger has its last record. If evidence
appears within five minutes of an unplanned end, that record is sent again with it.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import prometheus_client as prometheus
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.ranks import ranks_text
from flopwatch.ledger.attribution import PLANNED
from flopwatch.node.scrape.reader import Reading
from flopwatch.node.scrape.scrape import self_counter
from flopwatch.node.telemetry import evidence, open_step, otlp
from flopwatch.node.telemetry.admission import MAX_RANKS, Admission, AttemptKey, Rank
from flopwatch.node.telemetry.evidence import HOST_PIDS, Entry, EventCount, EvidenceLog, RankEnd
from flopwatch.node.telemetry.open_step import HostParts, RankOfHost, StepClock
from flopwatch.node.telemetry.otlp import Push, Refused
from flopwatch.node.telemetry.process_exit import BLOCKED
from flopwatch.settings import ExporterSettings

log = logging.getLogger(__name__)

MAX_UNDELIVERED = 64  # ended attempts that the ledger has not accepted; beyond this the oldest is dropped
MAX_CLOCK_ERROR = 10.0  # seconds between two clocks, above which one was set

OUTCOMES = (
    "accepted partial stale_process invalid limit conflict foreign_gpu malformed too_large unauthorized "
    "unsupported_type"
)

# Only the verdicts need these, and a rank has many series.
FOR_THE_LEDGER = frozenset(
    row.name
    for row in (m.TRAINING_GROUP_WAIT_SECONDS_TOTAL, m.TRAINING_MEASURED_TOKENS_TOTAL, m.TRAINING_GROUP_SEQUENCE_NUMBER)
)
LOOK_EVERY = 5.0  # seconds between two records of a late step whose ranks do not push

Record = dict[str, Any]


@dataclass
class _Attempt:
    ranks: dict[int, Rank] = field(default_factory=dict)
    changes: int = 0
    delivered: int = 0
    gone_at: float | None = None
    entries: list[Entry] = field(default_factory=list)  # evidence in the last record
    user: int | None = None  # of its newest push
    rivals: set[AttemptKey] = field(default_factory=set)  # attempts that it was in conflict with
    signs: dict[int, list[str]] = field(default_factory=dict)  # of ranks whose processes are in trouble
    looked: float = 0.0  # on the monotonic clock, when a record was last due without a push

    @property
    def live(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.end is None]

    @property
    def status(self) -> str | None:
        """How the attempt ended as reported by its ranks, None until all of them have reported."""
        statuses = [rank.push.status for rank in self.ranks.values() if rank.push.status is not None]
        if len(statuses) == len(self.ranks):
            return max(statuses, key=otlp.STATUSES.index)
        # One completed rank is enough if the last push of another was lost.
        return "completed" if not self.live and "completed" in statuses else None


@dataclass
class EvidenceScope:
    """Begin and GPUs of the evidence that may concern an attempt, with the last state of its ranks."""

    since: float  # Unix time
    gpus: list[str] | None  # None: all
    ranks: list[RankEnd]


@dataclass
class _Ended:
    """Ended attempt whose last record was delivered, while further evidence may appear."""

    scene: EvidenceScope
    records: list[Record]  # the last ones
    until: float  # Unix time
    reported: list[Entry]  # evidence in the last record
    changes: int = 0
    delivered: int = 0


class Telemetry:
    """Store of pushes: serves their samples as the source `training`, and returns the records due to the ledger."""

    name = "training"

    def __init__(
        self,
        settings: ExporterSettings,
        registry: prometheus.CollectorRegistry,
        gpus: Callable[[], Mapping[str, str] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        evidence_log: EvidenceLog | None = None,
    ) -> None:
        self._settings = settings
        self._evidence_log = evidence_log if evidence_log is not None else EvidenceLog(now)
        self._gpus, self._clock, self._now = gpus, clock, now
        self._lock = threading.Lock()
        self.pushed = threading.Event()  # set by every push
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._ended: dict[AttemptKey, _Ended] = {}
        self._admission = Admission(clock)
        self._pushes = self_counter(m.FLOPWATCH_OTLP_PUSHES_TOTAL, registry)
        for outcome in OUTCOMES.split():
            self._pushes.labels(outcome)

    def count(self, outcome: str) -> None:
        """Count a push by outcome. The HTTP application calls it for pushes that do not reach `receive`."""
        self._pushes.labels(outcome).inc()

    def receive(self, request: ExportMetricsServiceRequest) -> tuple[int, str]:
        """Store the pushes in a request. Return how many points were refused, and the first reason. Raises Refused."""
        if len(request.resource_metrics) > MAX_RANKS:
            raise Refused("too_large", f"a request holds the pushes of at most {MAX_RANKS} processes")
        refused, reason, gpus = 0, "", self._gpus()
        for resource in request.resource_metrics:
            try:
                push = otlp.push(resource, host=self._settings.host, gpus=gpus, now=self._now())
                with self._lock:
                    self._take(push)
                self.pushed.set()
            except Refused as error:
                refused += otlp.points(resource)
                reason = reason or str(error)
                self.count(error.outcome)
                continue
            refused += push.refused
            reason = reason or push.reason
            self.count("partial" if push.refused else "foreign_gpu" if push.foreign_gpu else "accepted")
        return refused, reason

    def ask(self, deadline: float) -> Reading:
        """Return the samples of live ranks, and how long their processes have been blocked."""
        with self._lock:
            clock = self._clock()
            samples = [
                sample
                for rank in self._served()
                for sample in (*rank.push.samples, *_blocked(rank, clock))
                if sample[0].name not in FOR_THE_LEDGER
            ]
        return Reading(samples, at=self._now())

    def check(self) -> None:
        """End ranks whose process has ended or that have not pushed for `rank_timeout`."""
        with self._lock:
            new = [rank for attempt in self._attempts.values() for rank in attempt.live if rank.pid is None]
        self._admission.locate(new)
        with self._lock:
            clock = self._clock()
            for attempt in self._attempts.values():
                for rank in attempt.live:
                    if self._admission.gone(rank) if rank.watch is None else not rank.watch.look(clock):
                        self._end(attempt, rank, "gone")
                    elif clock - rank.received > self._settings.rank_timeout:
                        self._end(attempt, rank, "silent")
                self._look(attempt, clock)

    def _look(self, attempt: _Attempt, clock: float) -> None:
        """Have a record sent if a process is newly blocked or silent, or if no rank of a late step pushes."""
        ranks = _of_host(attempt)
        signs = {number: [*rank.signs(clock)] for number, rank in ranks.items()}
        changed, attempt.signs = signs != attempt.signs, signs
        newest = max((rank.received for rank in attempt.live), default=clock)
        quiet = clock - max(newest, attempt.looked) >= LOOK_EVERY
        if changed or (quiet and open_step.is_late(ranks.values(), _run_p99(attempt), clock)):
            attempt.looked = clock
            attempt.changes += 1

    def due(self) -> dict[AttemptKey, tuple[int, list[Record]]]:
        """Return version and records of each attempt to deliver. The version is negative if only evidence is new."""
        due: dict[AttemptKey, tuple[int, list[Record]]] = {}
        with self._lock:
            for key, attempt in self._attempts.items():
                if attempt.changes > attempt.delivered:
                    try:
                        attempt.entries = self._evidence(self._scene(attempt))
                        due[key] = attempt.changes, self._records(key, attempt, attempt.entries)
                    except Exception:
                        # The records of other attempts must still be sent.
                        log.exception("no record run=%s attempt=%s", key[1], key[2])
                        attempt.delivered = attempt.changes
            for key, ended in list(self._ended.items()):
                try:
                    entries = self._evidence(ended.scene, ended.until)
                    if entries != ended.reported:
                        ended.reported, ended.changes = entries, ended.changes + 1
                    if ended.changes > ended.delivered:
                        *before, last = ended.records
                        due[key] = -ended.changes, [*before, {**last, "evidence": entries}]
                except Exception:
                    log.exception("no evidence run=%s attempt=%s", key[1], key[2])
                    del self._ended[key]
                    continue
                if self._now() > ended.until and ended.changes == ended.delivered:
                    del self._ended[key]
        return due

    def delivered(self, key: AttemptKey, version: int) -> None:
        """Record that the ledger has this version of an attempt. Drops the attempt if it has no live rank."""
        with self._lock:
            if version < 0:
                if key in self._ended:
                    self._ended[key].delivered = -version
                return
            attempt = self._attempts.get(key)
            if attempt is None:
                return
            attempt.delivered = version
            if attempt.changes == version and not attempt.live:
                del self._attempts[key]
                self._wait_for_evidence(key, attempt)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for `restore`, so that attempts which end during a restart still get evidence."""
        with self._lock:
            ended = dict(self._ended)
            for key, attempt in self._attempts.items():
                with suppress(Exception):  # as in `due`
                    until = self._now() + evidence.AFTER
                    ended[key] = _Ended(self._scene(attempt), self._records(key, attempt, []), until, [])
            attempts = [[key, asdict(one)] for key, one in ended.items()]
            return {"witness": self._evidence_log.state(), "attempts": attempts}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the `state` of a previous process."""
        self._evidence_log.restore(state["witness"])
        with self._lock:
            for key, values in state["attempts"]:
                scene = values["scene"]
                ranks = [
                    RankEnd(*word)._replace(refused=word[5] and EventCount(*word[5]), exited=tuple(word[7]))
                    for word in scene["ranks"]
                ]
                ended = _Ended(**{**values, "scene": EvidenceScope(**{**scene, "ranks": ranks})})
                if ended.until > self._now():
                    self._ended[tuple(key)] = ended

    def summary(self) -> list[tuple[str, str, int]]:
        """Return tenant, name and number of live ranks of each run on this host."""
        with self._lock:
            ranks = Counter((tenant, run) for (tenant, run, _), a in self._attempts.items() for _ in a.live)
        return [(*run, count) for run, count in sorted(ranks.items())]

    def _wait_for_evidence(self, key: AttemptKey, attempt: _Attempt) -> None:
        if attempt.status in PLANNED:
            return
        until = max(rank.ended_at for rank in attempt.ranks.values()) + evidence.AFTER
        self._ended[key] = _Ended(self._scene(attempt), self._records(key, attempt, []), until, attempt.entries)
        while len(self._ended) > MAX_UNDELIVERED:
            del self._ended[next(iter(self._ended))]

    def _take(self, push: Push) -> None:
        live = [(key, rank) for key, attempt in self._attempts.items() for rank in attempt.live]
        own: AttemptKey = push.tenant, push.run, push.attempt
        attempt = self._attempts.get(own, _Attempt())
        if push.rank not in attempt.ranks and len(attempt.ranks) >= MAX_RANKS:
            raise Refused("limit", f"this node takes at most {MAX_RANKS} ranks of an attempt, ended ones included")
        user, replaced, rivals = self._admission.admit(push, live)
        if not attempt.live:  # another attempt that is served goes on to be
            self._attempts.pop(own, None)
        self._attempts[own] = attempt
        self._ended.pop(own, None)
        for key, rank in replaced:
            if key != own:
                self._end(self._attempts[key], rank, "gone" if self._admission.gone(rank) else "replaced")
        for key in rivals:
            attempt.rivals.add(key)
            self._attempts[key].rivals.add(own)
            log.warning("two attempts at once run=%s attempts=%s,%s", push.run, key[2], push.attempt)
        before = attempt.ranks.get(push.rank)
        if before is not None and before.push.process != push.process:
            before = None
        lead = before.lead if before is not None else self._now() - self._clock()
        step = StepClock.of(push, before.step if before is not None else None)
        newcomer = Rank(push.stamped(self._steady(lead)), self._clock(), lead, step, user=user)
        newcomer.refused = evidence.out_of_memory(newcomer.push, before.refused if before is not None else None)
        if before is not None and before.end is None:  # else it is not watched any more
            newcomer.pid, newcomer.watch = before.pid, before.watch
        attempt.ranks[push.rank], attempt.user = newcomer, user
        attempt.changes += 1
        if push.status is not None:
            self._end(attempt, newcomer, "finished")
        # A user whose runs end in great number must not displace the records of others.
        ended = [key for key, one in self._attempts.items() if not one.live and one.user == user]
        for key in ended[: max(0, len(ended) - MAX_UNDELIVERED)]:
            del self._attempts[key]

    def _served(self) -> list[Rank]:
        """Return the live ranks to serve. Of attempts in conflict, only the first is served, and none is merged."""
        taken: set[tuple[str, int]] = set()
        served: list[Rank] = []
        for (_, run, _), attempt in self._attempts.items():
            names = {(run, rank.push.rank) for rank in attempt.live}
            served += attempt.live if taken.isdisjoint(names) else []
            taken |= names
        return served

    def _steady(self, lead: float) -> float:
        """Return the Unix time without steps forward of the clock. A step back is left to the ledger."""
        now, steady = self._now(), self._clock() + lead
        return steady if now - steady > MAX_CLOCK_ERROR else now

    def _end(self, attempt: _Attempt, rank: Rank, how: str) -> None:
        rank.end, rank.ended_at = how, self._now()
        attempt.changes += 1
        if how == "gone":
            attempt.gone_at = self._steady(rank.lead)
            rank.exited = rank.watch.ended() if rank.watch is not None else ("", "")
        rank.watch = None
        log.info("rank ended run=%s rank=%d reason=%s", rank.push.run, rank.push.rank, how)

    def _scene(self, attempt: _Attempt) -> EvidenceScope:
        ranks = [rank for _, rank in sorted(attempt.ranks.items())]
        gpus, ends = evidence.gpus_of(rank.push for rank in ranks), []
        for rank in ranks:
            push, gone_at = rank.push, rank.ended_at if rank.end == "gone" else None
            place = push.rank, push.started, push.at, self._host_pid(rank)
            ends.append(RankEnd(*place, push.ended_by, rank.refused, gone_at, rank.exited))
        since = min(rank.push.started for rank in ranks) - evidence.BEFORE
        return EvidenceScope(since, None if gpus is None else sorted(gpus), ends)

    def _host_pid(self, rank: Rank) -> int:
        """Return the pid of a rank in the host's namespace, as in the kernel log, 0 if it is unknown."""
        if rank.push.pid_namespace == HOST_PIDS:
            return rank.push.pid
        return rank.pid or 0 if self._admission.pid_namespace == HOST_PIDS else 0

    def _evidence(self, scene: EvidenceScope, until: float = math.inf) -> list[Entry]:
        node = self._evidence_log.entries(None if scene.gpus is None else frozenset(scene.gpus), scene.since, until)
        return node + evidence.of_ranks(scene.ranks, self._evidence_log.killed)[: evidence.MAX_ENTRIES - len(node)]

    def _open_step(self, attempt: _Attempt, p99: float | None) -> dict[str, object] | None:
        """Return the field `open_step` of a record (`flopwatch.ledger.record`)."""
        ranks = _of_host(attempt)
        opened = self._now() - open_step.seconds_open(ranks.values(), self._clock())
        others = (rank.push for other in self._attempts.values() if other is not attempt for rank in other.live)
        parts = HostParts(
            self._evidence_log.activity,
            self._evidence_log.broken_gpus(opened - evidence.BEFORE),
            {open_step.uuid_of(push) for push in others},
            self._evidence_log.link_down,
        )
        return open_step.field_of(ranks, p99, self._clock(), self._now(), parts)

    def _records(self, key: AttemptKey, attempt: _Attempt, entries: list[Entry]) -> list[Record]:
        """Return the merged record of an attempt, and a second one after an end without a status."""
        pushes = [attempt.ranks[rank].push for rank in sorted(attempt.ranks)]
        # Time is that of the lowest live rank, and at the end that of the newest push, so that records never go back.
        live = [push for push in pushes if attempt.ranks[push.rank].end is None]
        leader = live[0] if live else max(pushes, key=lambda push: push.at)
        status, p99 = attempt.status, _run_p99(attempt)
        steps, committed = _values(pushes, m.TRAINING_POSITION_STEPS), _values(pushes, m.TRAINING_COMMITTED_STEPS)
        flops, peaks = _values(pushes, m.TRAINING_MODEL_FLOPS_TOTAL), _values(pushes, m.TRAINING_PEAK_FLOPS_PER_SECOND)
        record: Record = {
            "t": leader.at,
            "tenant": key[0],
            "run": key[1],
            "attempt": key[2],
            "source": self._settings.host,
            "event": "snapshot" if status is None else "finish",
            "rank": leader.rank,
            "gpus": len(pushes),
            "started": leader.started,
            "submitted": min((push.submitted for push in pushes if push.submitted is not None), default=None),
            "restored_step": leader.restored_step,
            "step": int(max(steps)) if steps else None,
            "committed_step": int(max(committed)) if committed else None,
            "activity_seconds": {
                labels[-1]: seconds
                for row, labels, seconds in leader.samples
                if row is m.TRAINING_ACTIVITY_SECONDS_TOTAL
            },
            "open_step_seconds": leader.open_step_seconds,
            "model_flops": sum(flops) if flops else None,
            "peak_flops": sum(peaks) if peaks else None,
            "status": status,
            "waits": _waits(live),
            "ranks": ranks_text(sorted(attempt.ranks)),
            "open_step": self._open_step(attempt, p99),
            "step_p99": p99,
            "overlaps": any(self._attempts[one].live or live for one in attempt.rivals & self._attempts.keys()) or None,
            "evidence": entries or None,
            "pid": any(rank.pid for rank in attempt.ranks.values()) or None,
        }
        record = {name: value for name, value in record.items() if value is not None}
        if attempt.gone_at is None or attempt.live or status is not None:
            return [record]
        # The first record ends with the last push. From there to the end no activity is known.
        until = {name: value for name, value in record.items() if name != "evidence"}
        return [until, {**record, "t": max(attempt.gone_at, record["t"]), "gone": True}]


def _of_host(attempt: _Attempt) -> dict[int, RankOfHost]:
    ranks = {}
    for number, rank in attempt.ranks.items():
        blocked = rank.watch.since if rank.watch is not None and rank.watch.state in BLOCKED else None
        ranks[number] = RankOfHost(rank.push, rank.received, rank.step, blocked, rank.end)
    return ranks


def _run_p99(attempt: _Attempt) -> float | None:
    return next((seconds for rank in attempt.live if (seconds := _p99(rank.push)) is not None), None)


def _p99(push: Push) -> float | None:
    """Return the 99th percentile of the run's step durations in seconds, which one rank reports."""
    row = m.TRAINING_STEP_PERCENTILE_SECONDS
    return next((value for other, labels, value in push.samples if other is row and labels[-1] == "99"), None)


def _blocked(rank: Rank, clock: float) -> list[Sample]:
    """Return how long a rank's process has been stopped or uninterruptible, 0 for each if not. Empty if unobserved."""
    if rank.watch is None or not rank.watch.state:
        return []
    names, state = (rank.push.run, str(rank.push.rank)), BLOCKED.get(rank.watch.state)
    seconds = clock - rank.watch.since
    return [
        (m.HOST_PROCESS_BLOCKED_SECONDS, (*names, way), seconds if state == way else 0.0) for way in BLOCKED.values()
    ]


def _waits(pushes: list[Push]) -> list[list[object]] | None:
    """Return the field `waits` of a record (`flopwatch.ledger.record`). None unless all ranks measure their waits."""
    rows = (
        m.TRAINING_MEASURED_STEPS_TOTAL,
        m.TRAINING_MEASURED_STEP_SECONDS_TOTAL,
        m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL,
    )
    pipeline = m.TRAINING_RANK_INFO.labels.index("pp")
    waits: list[list[object]] = []
    for push in pushes:
        values = {row.name: value for row, _, value in push.samples}
        if not all(row.name in values for row in rows):
            return None
        place = next((labels[pipeline] for row, labels, _ in push.samples if row is m.TRAINING_RANK_INFO), "")
        tokens = values.get(m.TRAINING_MEASURED_TOKENS_TOTAL.name, values.get(m.TRAINING_TOKENS_TOTAL.name, 0.0))
        waits.append([push.rank, place, push.started, *(round(values[row.name], 3) for row in rows), tokens])
        of_groups = m.TRAINING_GROUP_WAIT_SECONDS_TOTAL
        groups = [[*labels[2:], round(value, 3)] for row, labels, value in push.samples if row is of_groups]
        if groups:
            waits[-1].append(groups)
    return waits or None


def _values(pushes: list[Push], row: Metric) -> list[float]:
    return [value for push in pushes for other, _, value in push.samples if other is row]
