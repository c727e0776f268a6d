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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.catalogue.ranks import ranks_text
from flopwatch.ledger.attribution import PLANNED
from flopwatch.node.scrape.reader import Reading
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import evidence, open_step, otlp
from flopwatch.node.telemetry.admission import MAX_RANKS, Admission, AttemptKey, Rank
from flopwatch.node.telemetry.attempts import EndedAttempt, EvidenceScope, HostAttempt, Record
from flopwatch.node.telemetry.evidence import HOST_PIDS, Entry, EventCount, EvidenceLog, RankEnd
from flopwatch.node.telemetry.measured import unmeasured, values, waits, work
from flopwatch.node.telemetry.open_step import HostParts, StepClock
from flopwatch.node.telemetry.otlp import Push, Refused
from flopwatch.node.telemetry.process_exit import BLOCKED
from flopwatch.node.telemetry.ras import Question, Ras, has_settled
from flopwatch.node.telemetry.stacks import StackRequests
from flopwatch.node.telemetry.template import Templates
from flopwatch.settings import ExporterSettings
from flopwatch.verdicts.overdue import LATE, OVERDUE_SECONDS

if TYPE_CHECKING:  # memory that an exporter without NCCL Inspector can save
    from flopwatch.node.telemetry.inspector import Inspector

log = logging.getLogger(__name__)

MAX_UNDELIVERED = 64  # ended attempts that the ledger has not accepted; beyond this the oldest is dropped
MAX_CLOCK_ERROR = 10.0  # seconds between two clocks, above which one was set

OUTCOMES = (
    "accepted partial stale_process invalid limit conflict foreign_gpu malformed too_large unauthorized "
    "unsupported_type"
)

# Only the verdicts need these, and a rank has many series.
_OF_RANKS = (m.TRAINING_MEASURED_TOKENS_TOTAL, m.TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL)
_OF_GROUPS = (m.TRAINING_GROUP_WAIT_SECONDS_TOTAL, m.TRAINING_GROUP_SEQUENCE_NUMBER)
FOR_THE_LEDGER = frozenset(row.name for row in (*_OF_RANKS, *_OF_GROUPS))
STACKS_KEPT = 30.0  # seconds in which records include the stacks of a straggler, about two records
LOOK_EVERY = 5.0  # seconds between two records of a late step whose ranks do not push

_PAGE = m.TRAINING_RUN_INFO.labels.index("page")


class Telemetry:
    """Store of pushes: serves their samples as the source `training`, and returns the records due to the ledger."""

    name = "training"

    def __init__(
        self,
        settings: ExporterSettings,
        registry: Registry,
        gpus: Callable[[], Mapping[str, str] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        evidence_log: EvidenceLog | None = None,
        ras: Ras | None = None,
        inspector: "Inspector | None" = None,
    ) -> None:
        self._settings, self._ras, self._inspector = settings, ras, inspector
        self._evidence_log = evidence_log if evidence_log is not None else EvidenceLog(now)
        self._gpus, self._clock, self._now = gpus, clock, now
        self._lock = threading.Lock()
        self.pushed = threading.Event()  # set by every push
        self._attempts: dict[AttemptKey, HostAttempt] = {}
        self._ended: dict[AttemptKey, EndedAttempt] = {}
        self._admission, self._templates, self.stacks = Admission(clock), Templates(), StackRequests(clock)
        self._pushes = registry.metric(m.FLOPWATCH_OTLP_PUSHES_TOTAL)
        for outcome in OUTCOMES.split():
            self._pushes.add(outcome, by=0)

    def count(self, outcome: str) -> None:
        """Count a push by outcome. The HTTP application calls it for pushes that do not reach `receive`."""
        self._pushes.add(outcome)

    def receive_body(self, body: bytes, media: str) -> tuple[int, str]:
        """Do what `receive` does, with the body of a request."""
        now = self._now()
        if media == otlp.PROTOBUF and (found := self._templates.find(body, self._gpus(), now)) is not None:
            with self._lock:
                postponed = self._postponed(*found, now)
            if postponed:
                self.count("accepted")
                return 0, self.stacks.message(found[0])
        return self.receive(otlp.decode(body, media), body if media == otlp.PROTOBUF else b"")

    def _postponed(self, earlier: Push, decode: Callable[[], Push], now: float) -> bool:
        """Keep a push undecoded until it is needed. Return False if its process is not a live rank."""
        attempt = self._attempts.get((earlier.tenant, earlier.run, earlier.attempt), HostAttempt())
        rank = attempt.ranks.get(earlier.rank)
        if rank is None or rank.end is not None or rank.push.process != earlier.process:
            return False
        rank.undecoded, rank.received = (decode, now), self._clock()
        attempt.changes += 1
        return True

    def _settle(self) -> None:
        """Decode the newest pushes of live ranks."""
        for attempt in [*self._attempts.values()]:
            for rank in attempt.live:
                if rank.undecoded is not None:
                    attempt.changes -= 1  # counted when the push was received
                    self._take(rank.undecoded[0](), rank.undecoded[1], rank.received)

    def receive(self, request: ExportMetricsServiceRequest, body: bytes = b"") -> tuple[int, str]:
        """Store the pushes in a request. Return how many points were refused, and the first reason. Raises Refused.

        The push of a single process in `body` becomes a template.
        """
        if len(request.resource_metrics) > MAX_RANKS:
            raise Refused("too_large", f"a request holds the pushes of at most {MAX_RANKS} processes")
        refused, reason, gpus, now = 0, "", self._gpus(), self._now()
        for resource in request.resource_metrics:
            if self._inspector is not None and (wrong := self._inspector.receive(resource)) is not None:
                refused += wrong
                reason = reason or ("not durations of NCCL's operations, or too many" if wrong else "")
                self.count("partial" if wrong else "accepted")
                continue
            try:
                push = otlp.push(resource, host=self._settings.host, gpus=gpus, now=now)
                with self._lock:
                    self._settle()
                    self._take(push, now, self._clock())
                self.pushed.set()
            except Refused as error:
                refused += otlp.points(resource)
                reason = reason or str(error)
                self.count(error.outcome)
                continue
            refused += push.refused
            reason = reason or push.reason or self.stacks.message(push)
            if len(request.resource_metrics) == 1 and body and not push.stacks:
                self._templates.learn(body, push, gpus, now)
            self.count("partial" if push.refused else "foreign_gpu" if push.foreign_gpu else "accepted")
        return refused, reason

    def ask(self, deadline: float) -> Reading:
        """Return the samples of live ranks, and how long their processes have been blocked."""
        with self._lock:
            self._settle()
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
            if self._settings.ledger != "off":  # without a ledger, only live ranks are ever read
                self._settle()
            for attempt in self._attempts.values():
                for rank in attempt.live:
                    if self._admission.gone(rank) if rank.watch is None else not rank.watch.look(clock):
                        self._end(attempt, rank, "gone")
                    elif clock - rank.received > self._settings.rank_timeout:
                        self._end(attempt, rank, "silent")
                self._look(attempt, clock)
            if self._ras is not None:
                self._ask_ras(self._ras, clock)

    def needs_reading(self) -> bool:
        """Return whether a step is late and a GPU has too few readings since then to give a sign."""
        with self._lock:
            self._settle()
            clock = self._clock()
            for attempt in self._attempts.values():
                ranks = attempt.open_ranks.values()
                seconds = open_step.seconds_open(ranks, clock)
                if seconds >= LATE * OVERDUE_SECONDS and open_step.is_late(ranks, attempt.run_p99, clock):
                    return self._evidence_log.activity.lacks(clock - seconds + open_step.SETTLED)
        return False

    def _ask_ras(self, ras: Ras, clock: float) -> None:
        """Have NCCL asked about overdue steps, unless a process of this host may be making communicators."""
        ras.keep(self._attempts)
        live = [rank for attempt in self._attempts.values() for rank in attempt.live]
        for key, attempt in self._attempts.items():
            ranks = attempt.open_ranks.values()
            # Most often a look at the time of the step is enough.
            long = open_step.seconds_open(ranks, clock) >= OVERDUE_SECONDS
            if not (long and open_step.is_late(ranks, attempt.run_p99, clock, 1.0)):
                ras.forget(key)
            elif 0 in attempt.ranks and all(has_settled(rank) for rank in live):
                sizes = values([attempt.ranks[0].push], m.TRAINING_WORLD_SIZE)
                pids = {rank.push.rank: rank.push.pid for rank in attempt.live}
                if sizes and all(pids.values()):
                    ras.ask(key, Question(int(sizes[0]), pids, [rank.pid for rank in live if rank.pid]))
            attempt.changes += ras.changed(key)

    def _look(self, attempt: HostAttempt, clock: float) -> None:
        """Have a record sent if a process is newly blocked or silent, or if no rank of a late step pushes."""
        ranks = attempt.open_ranks
        signs = {number: [*rank.signs(clock)] for number, rank in ranks.items()}
        changed, attempt.signs = signs != attempt.signs, signs
        newest = max((rank.received for rank in attempt.live), default=clock)
        quiet = clock - max(newest, attempt.looked) >= LOOK_EVERY
        if changed or (quiet and open_step.is_late(ranks.values(), attempt.run_p99, clock)):
            attempt.looked = clock
            attempt.changes += 1

    def due(self) -> dict[AttemptKey, tuple[int, list[Record]]]:
        """Return version and records of each attempt to deliver. The version is negative if only evidence is new."""
        due: dict[AttemptKey, tuple[int, list[Record]]] = {}
        with self._lock:
            self._settle()
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

    def discard(self) -> None:
        """Drop the attempts without a live rank, as if a ledger had all records."""
        with self._lock:
            self._attempts = {key: attempt for key, attempt in self._attempts.items() if attempt.live}

    def state(self) -> dict[str, Any]:
        """Return the JSON state for `restore`, so that attempts which end during a restart still get evidence."""
        with self._lock:
            self._settle()
            ended = dict(self._ended)
            for key, attempt in self._attempts.items():
                with suppress(Exception):  # as in `due`
                    until = self._now() + evidence.AFTER
                    ended[key] = EndedAttempt(self._scene(attempt), self._records(key, attempt, []), until, [])
            attempts = [[key, asdict(one)] for key, one in ended.items()]
            recorders = Counter(rank.push.flight_recorder for rank in self._served())
            return {"witness": self._evidence_log.state(), "attempts": attempts, "flight_recorders": recorders}

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
                ended = EndedAttempt(**{**values, "scene": EvidenceScope(**{**scene, "ranks": ranks})})
                if ended.until > self._now():
                    self._ended[tuple(key)] = ended

    def summary(self) -> list[tuple[str, str, int]]:
        """Return tenant, name and number of live ranks of each run on this host."""
        with self._lock:
            ranks = Counter((tenant, run) for (tenant, run, _), a in self._attempts.items() for _ in a.live)
        return [(*run, count) for run, count in sorted(ranks.items())]

    def _wait_for_evidence(self, key: AttemptKey, attempt: HostAttempt) -> None:
        if attempt.status in PLANNED:
            return
        until = max(rank.ended_at for rank in attempt.ranks.values()) + evidence.AFTER
        self._ended[key] = EndedAttempt(self._scene(attempt), self._records(key, attempt, []), until, attempt.entries)
        while len(self._ended) > MAX_UNDELIVERED:
            del self._ended[next(iter(self._ended))]

    def _take(self, push: Push, now: float, clock: float) -> None:
        """Store a push that arrived at the Unix time `now`, at `clock` on the monotonic clock. Raises Refused."""
        live = [(key, rank) for key, attempt in self._attempts.items() for rank in attempt.live]
        own: AttemptKey = push.tenant, push.run, push.attempt
        attempt = self._attempts.get(own, HostAttempt())
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
        lead = before.lead if before is not None else now - clock
        step = StepClock.of(push, before.step if before is not None else None)
        newcomer = Rank(push.stamped(_steady(lead, now, clock)), clock, lead, step, user=user)
        if before is not None:
            newcomer.groups = before.groups if step.steps == before.step.steps else open_step.groups_of(before.push)
        newcomer.refused = evidence.out_of_memory(newcomer.push, before.refused if before is not None else None)
        if before is not None and before.end is None:  # else it is not watched any more
            newcomer.pid, newcomer.watch = before.pid, before.watch
        attempt.ranks[push.rank], attempt.user = newcomer, user
        attempt.changes += 1
        if stacks := self.stacks.text(push):
            attempt.stacks[push.rank] = [push.rank, self._now(), stacks]
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

    def _end(self, attempt: HostAttempt, rank: Rank, how: str) -> None:
        rank.end, rank.ended_at = how, self._now()
        attempt.changes += 1
        if how == "gone":
            attempt.gone_at = _steady(rank.lead, self._now(), self._clock())
            rank.exited = rank.watch.ended() if rank.watch is not None else ("", "")
        rank.watch = None
        log.info("rank ended run=%s rank=%d reason=%s", rank.push.run, rank.push.rank, how)

    def _scene(self, attempt: HostAttempt) -> EvidenceScope:
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

    def _open_step(self, key: AttemptKey, attempt: HostAttempt, p99: float | None) -> dict[str, object] | None:
        """Return the field `open_step` of a record (`flopwatch.ledger.record`)."""
        ranks = attempt.open_ranks
        opened = self._now() - open_step.seconds_open(ranks.values(), self._clock())
        others = (rank.push for other in self._attempts.values() if other is not attempt for rank in other.live)
        parts = HostParts(
            self._evidence_log.activity,
            self._evidence_log.broken_gpus(opened - evidence.BEFORE),
            {push.declared("uuid") for push in others},
            self._evidence_log.link_down,
        )
        field = open_step.field_of(ranks, p99, self._clock(), self._now(), parts)
        late, attempt.late = attempt.late, field is not None
        since = opened if field is not None else math.inf if late else self._now() - STACKS_KEPT
        attempt.stacks = {rank: row for rank, row in attempt.stacks.items() if row[1] >= since}
        if field is not None and self._ras is not None and (behind := self._ras.behind(key)) is not None:
            field["ras"] = behind
        return field

    def _waits(self, key: AttemptKey, live: list[Push]) -> list[list[object]] | None:
        if self._inspector is None or not unmeasured(live):
            return waits(live)
        return self._inspector.waits(key, live)

    def _records(self, key: AttemptKey, attempt: HostAttempt, entries: list[Entry]) -> list[Record]:
        """Return the merged record of an attempt, and a second one after an end without a status."""
        pushes = [attempt.ranks[rank].push for rank in sorted(attempt.ranks)]
        # Time is that of the lowest live rank, and at the end that of the newest push, so that records never go back.
        live = [push for push in pushes if attempt.ranks[push.rank].end is None]
        leader = live[0] if live else max(pushes, key=lambda push: push.at)
        status, p99 = attempt.status, attempt.run_p99
        steps, committed = values(pushes, m.TRAINING_POSITION_STEPS), values(pushes, m.TRAINING_COMMITTED_STEPS)
        flops, peaks = values(pushes, m.TRAINING_MODEL_FLOPS_TOTAL), values(pushes, m.TRAINING_PEAK_FLOPS_PER_SECOND)
        squares = [round(square, 6) for square in values(live, m.TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL)]
        pages = {labels[_PAGE] for push in pushes for labels, _ in push.of(m.TRAINING_RUN_INFO)}
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
            "activity_seconds": {labels[-1]: age for labels, age in leader.of(m.TRAINING_ACTIVITY_SECONDS_TOTAL)},
            "open_step_seconds": leader.open_step_seconds,
            "model_flops": sum(flops) if flops else None,
            "peak_flops": sum(peaks) if peaks else None,
            "status": status,
            "work": work(pushes) or None,
            "page": "always" in pages or None,
            "waits": self._waits(key, live),
            "computing_squares": squares if 0 < len(squares) == len(live) else None,
            "ranks": ranks_text(sorted(attempt.ranks)),
            "open_step": self._open_step(key, attempt, p99),
            "stacks": [*attempt.stacks.values()] or None,
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


def _steady(lead: float, now: float, clock: float) -> float:
    """Return the Unix time without steps forward of the clock. A step back is left to the ledger."""
    return clock + lead if now - clock - lead > MAX_CLOCK_ERROR else now


def _blocked(rank: Rank, clock: float) -> list[Sample]:
    """Return how long a rank's process has been stopped or uninterruptible, 0 for each if not. Empty if unobserved."""
    if rank.watch is None or not rank.watch.state:
        return []
    names, state = (rank.push.run, str(rank.push.rank)), BLOCKED.get(rank.watch.state)
    seconds = clock - rank.watch.since
    return [
        (m.HOST_PROCESS_BLOCKED_SECONDS, (*names, way), seconds if state == way else 0.0) for way in BLOCKED.values()
    ]
