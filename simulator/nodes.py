"""What the nodes of a simulated cluster see, of what is so and of what means nothing, and the records they send."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from simulator.faults import Clue
from simulator.jobs import Attempt, Job
from simulator.topology import Topology

EPOCH = 1_760_000_000.0  # virtual time 0
PUSH = 5.0  # a node tells a run's news within so many seconds
STILL_KNOWN = 600.0  # for so long an exporter sends the last word of an ended attempt again when it has more to say
BEFORE = 600.0  # an exporter tells what it saw from so long before an attempt's start on
MAX_EVIDENCE = 64

Record = dict[str, Any]


@dataclass(frozen=True)
class Noise:
    """What is seen though it means nothing, and what is not seen though it means something."""

    per_node_day: float = 0.02
    missing: float = 0.03  # of clues
    late: float = 0.05  # of clues, by
    delay: tuple[float, float] = (60.0, 240.0)  # seconds
    skew: float = 0.02  # seconds that clocks are apart, as a standard deviation
    echoes: int = 16  # nodes on which a rank gets to say that it lost its peers


# What nodes see on any day, by weight.
DAILY: tuple[tuple[float, Clue], ...] = (
    (0.35, Clue("link_errors", place="port")),
    (0.20, Clue("throttle", "sw_power_cap", place="gpu")),
    (0.15, Clue("xid", "63", place="gpu")),
    (0.10, Clue("xid", "92", place="gpu")),
    (0.10, Clue("link_down", place="port")),  # it comes back before anything times out
    (0.05, Clue("host_oom")),  # some other process
    (0.05, Clue("nvlink", place="gpu")),
)
_ECHO = (Clue("exception", "DistBackendError", place="rank"), Clue("signal", "SIGABRT", place="rank"))


class Nodes:
    """All nodes: each with a clock of its own, what it has seen, and its last word; `tell` gets their records."""

    def __init__(self, topology: Topology, noise: Noise, rng: random.Random, tell: Callable[[Record], object]) -> None:
        self.topology, self.noise = topology, noise
        self._rng, self._tell = rng, tell
        self._evidence: dict[int, dict[tuple[str, str], Record]] = {}
        self._last_words: dict[int, tuple[float, Record]] = {}
        self._skews = [rng.gauss(0.0, noise.skew) for _ in range(topology.nodes)]
        self.hosts = [topology.host(node) for node in range(topology.nodes)]

    def submitted(self, job: Job, t: float) -> None:
        """Let the scheduler tell that a job is waiting."""
        self._tell({"t": EPOCH + t, "tenant": job.tenant, "run": job.name, "event": "submitted", "source": "scheduler"})

    def note(self, clue: Clue, node: int, part: int, seen: float, attempt: Attempt | None) -> None:
        """Let a node see something of one of its GPUs, ports or, of an attempt that it has a part in, ranks."""
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
        known = self._evidence.setdefault(node, {})
        entry = known.setdefault((clue.kind, repr(place)), {"kind": clue.kind, "t": 0.0, "count": 0, **place})
        entry["t"] = round(max(entry["t"], EPOCH + seen + self._skews[node]), 3)
        entry["count"] += 1
        while len(known) > MAX_EVIDENCE:
            del known[min(known, key=lambda key: known[key]["t"])]

    def echo(self, attempt: Attempt, nodes: set[int], t: float) -> None:
        """Let ranks on some of the other nodes say that they lost their peers."""
        others = [node for node in attempt.nodes if node not in nodes]
        for node in self._rng.sample(others, min(self.noise.echoes, len(others))):
            for clue in _ECHO:
                self.note(clue, node, 0, t - self._rng.uniform(0.0, 1.0), attempt)

    def seen(self, node: int) -> Iterable[Record]:
        """Return all that a node has seen so far."""
        return self._evidence.get(node, {}).values()

    def _of(self, node: int, start: float) -> list[Record]:
        """Return what a node tells with the records of an attempt that started then."""
        since = EPOCH + start - BEFORE
        return [dict(entry) for entry in self.seen(node) if entry["t"] >= since]

    def first(self, job: Job, attempt: Attempt, t: float) -> None:
        """Let all nodes tell that they began, each when its turn comes within a push; rank 0 is not the first."""
        if attempt.ended is not None:
            return
        count = len(attempt.nodes)
        first = self._rng.randrange(count)
        for number in range(count):
            place = (first + number) % count
            if attempt.nodes[place] not in attempt.dark:
                now = t + PUSH * number / count
                self._tell(self._record(job, attempt, place, now, self._shared(job, attempt, now)))

    def leader(self, job: Job, attempt: Attempt, t: float) -> None:
        """Let the node that the ledger follows tell where it is."""
        if attempt.ended is None:
            self.one(job, attempt, attempt.nodes[attempt.leader()], t)

    def one(self, job: Job, attempt: Attempt, node: int, t: float) -> None:
        """Let a node tell where it is."""
        if node not in attempt.dark:
            self._tell(self._record(job, attempt, attempt.nodes.index(node), t, self._shared(job, attempt, t)))

    def all(self, job: Job, attempt: Attempt, t: float) -> None:
        """Let all nodes tell where they are."""
        shared = self._shared(job, attempt, t)
        for place, node in enumerate(attempt.nodes):
            if node not in attempt.dark:
                self._tell(self._record(job, attempt, place, t, shared))

    def last(self, job: Job, attempt: Attempt, t: float, status: str | None = None) -> None:
        """Let all nodes tell the end: the status the run itself told, or else that its processes are gone."""
        # A process says nothing as it dies; what is known of it is its last push.
        heard = t if status is not None else max(attempt.since, t - self._rng.uniform(0.0, PUSH))
        end: Record = {"gone": True} if status is None else {"event": "finish", "status": status}
        self.all(job, attempt, heard)
        shared = self._shared(job, attempt, heard)
        places = [place for place, node in enumerate(attempt.nodes) if node not in attempt.dark]
        self._rng.shuffle(places)
        for place in places:
            node = attempt.nodes[place]
            record = {**self._record(job, attempt, place, heard, shared), **end, "t": EPOCH + t + self._skews[node]}
            self._tell(record)
            self._last_words[node] = t, record

    def again(self, node: int, t: float) -> None:
        """Let a node repeat its last word of an ended attempt, with what it has seen since."""
        ended, last = self._last_words.get(node, (0.0, {}))
        if last and t - ended < STILL_KNOWN:
            self._tell({**last, "evidence": self._of(node, last["started"] - EPOCH)})

    def _record(self, job: Job, attempt: Attempt, place: int, t: float, shared: Record) -> Record:
        """Return the record of one node at a time."""
        node = attempt.nodes[place]
        skew = self._skews[node]
        record = {
            **shared,
            "t": EPOCH + t + skew,
            "source": self.hosts[node],
            "rank": place * self.topology.gpus_per_node,
            "started": EPOCH + attempt.start + skew,
        }
        if seen := self._of(node, attempt.start):
            record["evidence"] = seen
        return record

    def _shared(self, job: Job, attempt: Attempt, t: float) -> Record:
        """Return what the records of all nodes of an attempt have in common at a time."""
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
