"""Nodes of a simulated cluster: their clocks, what they have observed, and the records that they send."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flopwatch.catalogue.ranks import ranks_text
from flopwatch.verdicts.overdue import LATE, overdue_after
from simulator.faults import Clue
from simulator.jobs import JobAttempt, TrainingJob
from simulator.topology import Topology

EPOCH = 1_760_000_000.0  # virtual time 0
PUSH = 5.0  # seconds within which a node reports a change of a run
RESEND = 600.0  # seconds for which an exporter repeats the last record of an ended attempt with new evidence
BEFORE = 600.0  # seconds before the start of an attempt from which on evidence counts for it
MAX_EVIDENCE = 64
COLLECTIVES = 100.0  # per step

Record = dict[str, Any]


@dataclass(frozen=True)
class Noise:
    """Rates of random disturbances: observations without a fault, missing or late clues, and clocks that differ."""

    per_node_day: float = 0.02  # observations without a fault
    missing: float = 0.03  # share of the clues of faults that are not reported
    late: float = 0.05  # share of clues that are reported late
    delay: tuple[float, float] = (60.0, 240.0)  # range of the delay in seconds
    skew: float = 0.02  # seconds, standard deviation of the clocks
    echoes: int = 16  # nodes on which a rank reports that it lost its peers


# What nodes observe without a fault: weight, clue.
DAILY: tuple[tuple[float, Clue], ...] = (
    (0.35, Clue("link_errors", place="port")),
    (0.20, Clue("throttle", "sw_power_cap", place="gpu")),
    (0.15, Clue("xid", "63", place="gpu")),
    (0.10, Clue("xid", "92", place="gpu")),
    (0.10, Clue("link_down", place="port")),  # a flap, shorter than any timeout
    (0.05, Clue("host_oom")),  # some other process
    (0.05, Clue("nvlink", place="gpu")),
)
_ECHO = (Clue("exception", "DistBackendError", place="rank"), Clue("signal", "SIGABRT", place="rank"))


class Nodes:
    """All nodes of a cluster, each with its clock, its evidence and its last record. Passes all records to `send`."""

    def __init__(self, topology: Topology, noise: Noise, rng: random.Random, send: Callable[[Record], object]) -> None:
        self.topology, self.noise = topology, noise
        self._rng, self._send = rng, send
        self._evidence: dict[int, dict[tuple[str, str], Record]] = {}
        self._last_records: dict[int, tuple[float, Record]] = {}
        self._skews = [rng.gauss(0.0, noise.skew) for _ in range(topology.nodes)]
        self.hosts = [topology.host(node) for node in range(topology.nodes)]

    def submitted(self, job: TrainingJob, t: float) -> None:
        """Send the scheduler's record that a job is in the queue."""
        self._send({"t": EPOCH + t, "tenant": job.tenant, "run": job.name, "event": "submitted", "source": "scheduler"})

    def note(self, clue: Clue, node: int, part: int, seen: float, attempt: JobAttempt | None) -> None:
        """Store as evidence that a node observed a clue at virtual time `seen`, on its GPU, port or rank `part`."""
        place: Record = {}
        if clue.place == "gpu":
            place["gpu"] = self.topology.gpu(node, part)
        elif clue.place == "port":
            place["port"] = self.topology.port(part)
        elif clue.place == "rank":
            first = attempt.nodes.index(node) * self.topology.gpus_per_node if attempt is not None else 0
            place["rank"] = first + part
        if clue.detail:
            place["detail"] = clue.detail
        evidence = self._evidence.setdefault(node, {})
        entry = evidence.setdefault((clue.kind, repr(place)), {"kind": clue.kind, "t": 0.0, "count": 0, **place})
        entry["t"] = round(max(entry["t"], EPOCH + seen + self._skews[node]), 3)
        entry["count"] += 1
        while len(evidence) > MAX_EVIDENCE:
            del evidence[min(evidence, key=lambda key: evidence[key]["t"])]

    def echo(self, attempt: JobAttempt, nodes: set[int], t: float) -> None:
        """Store evidence that a rank lost its peers, on at most `noise.echoes` nodes of the attempt outside `nodes`."""
        others = [node for node in attempt.nodes if node not in nodes]
        for node in self._rng.sample(others, min(self.noise.echoes, len(others))):
            for clue in _ECHO:
                self.note(clue, node, 0, t - self._rng.uniform(0.0, 1.0), attempt)

    def seen(self, node: int) -> Iterable[Record]:
        """Return the entries of a node's evidence so far, at most the MAX_EVIDENCE newest."""
        return self._evidence.get(node, {}).values()

    def _of(self, node: int, start: float) -> list[Record]:
        """Return the evidence that a node sends with records of an attempt that started at `start`."""
        since = EPOCH + start - BEFORE
        return [dict(entry) for entry in self.seen(node) if entry["t"] >= since]

    def first(self, job: TrainingJob, attempt: JobAttempt, t: float) -> None:
        """Send an attempt's first record from every node, spread over one push interval from a random node on."""
        if attempt.ended is not None:
            return
        count = len(attempt.nodes)
        first = self._rng.randrange(count)
        for number in range(count):
            place = (first + number) % count
            if attempt.nodes[place] not in attempt.dark:
                now = t + PUSH * number / count
                self._send(self._record(job, attempt, place, now, self._shared(job, attempt, now)))

    def leader(self, job: TrainingJob, attempt: JobAttempt, t: float) -> None:
        """Send a record of an attempt from its first node that still sends records. The ledger follows this node."""
        if attempt.ended is None:
            self.one(job, attempt, attempt.nodes[attempt.leader()], t)

    def one(self, job: TrainingJob, attempt: JobAttempt, node: int, t: float) -> None:
        """Send a record of an attempt from one node, unless a fault silenced the node."""
        if node not in attempt.dark:
            self._send(self._record(job, attempt, attempt.nodes.index(node), t, self._shared(job, attempt, t)))

    def all(self, job: TrainingJob, attempt: JobAttempt, t: float) -> None:
        """Send a record of an attempt from every node that a fault did not silence."""
        shared = self._shared(job, attempt, t)
        for place, node in enumerate(attempt.nodes):
            if node not in attempt.dark:
                self._send(self._record(job, attempt, place, t, shared))

    def last(self, job: TrainingJob, attempt: JobAttempt, t: float, status: str | None = None) -> None:
        """Send an attempt's last record from every node, with `status` for an orderly end, or else with `gone`."""
        # A process that dies sends nothing, so its last state is that of its last push.
        pushed = t if status is not None else max(attempt.since, t - self._rng.uniform(0.0, PUSH))
        end: Record = {"gone": True} if status is None else {"event": "finish", "status": status}
        self.all(job, attempt, pushed)
        shared = self._shared(job, attempt, pushed)
        places = [place for place, node in enumerate(attempt.nodes) if node not in attempt.dark]
        self._rng.shuffle(places)
        for place in places:
            node = attempt.nodes[place]
            record = {**self._record(job, attempt, place, pushed, shared), **end, "t": EPOCH + t + self._skews[node]}
            self._send(record)
            self._last_records[node] = t, record

    def again(self, node: int, t: float) -> None:
        """Send a node's last record of an ended attempt again, with the evidence that the node has now.

        Nothing is sent if the attempt ended more than RESEND seconds ago.
        """
        ended, last = self._last_records.get(node, (0.0, {}))
        if last and t - ended < RESEND:
            self._send({**last, "evidence": self._of(node, last["started"] - EPOCH)})

    def _record(self, job: TrainingJob, attempt: JobAttempt, place: int, t: float, shared: Record) -> Record:
        """Return the record of the attempt's node at index `place` at time `t`: the `shared` fields and its own."""
        node = attempt.nodes[place]
        skew = self._skews[node]
        record = {
            **shared,
            "t": EPOCH + t + skew,
            "source": self.hosts[node],
            "rank": place * self.topology.gpus_per_node,
            "started": EPOCH + attempt.start + skew,
        }
        ranks = range(place * self.topology.gpus_per_node, (place + 1) * self.topology.gpus_per_node)
        record["ranks"] = ranks_text(ranks)
        opened, limit = attempt.open_step(t), overdue_after(job.step_seconds * (1 + job.step_spread))
        if opened >= LATE * limit:
            called = COLLECTIVES * ((attempt.position(t) or 0) - (attempt.restored or 0))
            rows: list[list[Any]] = [[rank, called, [], [], None] for rank in ranks]
            record["open_step"] = {"t": record["t"], "seconds": opened, "overdue_after": limit, "ranks": rows}
        if seen := self._of(node, attempt.start):
            record["evidence"] = seen
        return record

    def _shared(self, job: TrainingJob, attempt: JobAttempt, t: float) -> Record:
        """Return the fields that the records of all nodes of an attempt have in common at time `t`."""
        per_node = self.topology.gpus_per_node
        position = attempt.position(t)
        record: Record = {
            "tenant": job.tenant,
            "run": job.name,
            "attempt": attempt.id,
            "event": "snapshot",
            "gpus": per_node,
            "activity_seconds": attempt.seconds(t),
            "peak_flops": job.peak_flops * per_node,
            "model_flops": 0.0,
            "open_step_seconds": attempt.open_step(t),
        }
        if job.queue > 0:
            record["submitted"] = EPOCH + job.begins - job.queue
        if position is not None:
            begun = attempt.restored if attempt.restored is not None else 0
            record["step"] = position
            record["model_flops"] = (position - begun) * job.flops_per_step(per_node)
        if attempt.restored is not None:
            record["restored_step"] = attempt.restored
        if attempt.committed is not None and position is not None:
            record["committed_step"] = attempt.committed
        return record
