"""Series of the ledger about one simulated job: its verdicts, from the records of the job's two hosts.

The records are made and applied by the code that is shipped. A host sends one in about 15 s, at a random time, and at
once if a step becomes overdue or a sign appears.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.ledger import Ledger
from flopwatch.node.telemetry import open_step
from flopwatch.node.telemetry.evidence import BEFORE, EvidenceLog
from flopwatch.node.telemetry.ledger_client import SPREAD, URGENT, URL_INTERVAL, urgent_state
from flopwatch.node.telemetry.open_step import GpuActivity, HostParts, RankOfHost, StepClock
from flopwatch.node.telemetry.otlp import Push
from simulator.ranks import HOSTS, PER_HOST, Labels, RankTotals, Series, SynchronousJob, Values

VERDICTS = (
    m.RUN_STRAGGLER_RATIO,
    m.RUN_STRAGGLER_INFO,
    m.RUN_STRAGGLER_UNAVAILABLE,
    m.RUN_WHATIF_STEP_SECONDS,
    m.RUN_HANG_SECONDS,
    m.RUN_HANG_SUSPECT_RATIO,
    m.RUN_HANG_SIGN_RANKS,
    m.RUN_STATE,
)
DELAY = 0.5  # seconds from a record's push to the ledger
BEGINNING = 120.0  # seconds of a hang in which a host looks every second for what to send at once
P99_OF = 200  # steps

Record = dict[str, Any]


def ledger_series(job: SynchronousJob) -> Iterator[tuple[Series, Values]]:
    """Yield the series of VERDICTS about a job, with their values at all scrapes."""
    ledger = Ledger()
    hosts = (SimulatedExporter(job, host) for host in range(HOSTS))
    records = sorted((sent for host in hosts for sent in host.records()), key=lambda sent: sent[0])
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Values] = {}
    target = {"job": "flopwatch-ledger", "instance": f"{job.name}-ledger:9451"}
    for number, t in enumerate(job.scrapes):
        while records and records[0][0] <= t:
            received, record = records.pop(0)
            ledger.apply(record, received)
        for row, values, value in ledger.families(t):
            if row in VERDICTS:
                labels = tuple((key, text) for key, text in zip(row.labels, values, strict=True) if text)
                found.setdefault((row.name, labels), [None] * len(job.scrapes))[number] = value
    for (name, own), series in found.items():
        stale = [
            "stale" if value is None and before is not None else value
            for before, value in zip([None, *series], series, strict=False)
        ]
        yield (name, {**target, **dict(own)}), stale


class SimulatedExporter:
    """Exporter of one of a job's hosts: the pushes of its ranks, what it reads of its GPUs, and its records."""

    def __init__(self, job: SynchronousJob, host: int) -> None:
        self._job, self._host = job, host
        self._rng = random.Random(f"{job.name} records {host}")
        self._t = 0.0
        self._totals = {rank: RankTotals() for rank in range(host * PER_HOST, (host + 1) * PER_HOST)}
        self._reached = dict.fromkeys(self._totals, 0)
        self._pushed = dict.fromkeys(self._totals, -inf)
        self._ranks: dict[int, RankOfHost] = {}
        self._durations: list[float] = []
        self._evidence = EvidenceLog(lambda: self._t, GpuActivity(lambda: self._t))
        self._scrapes = list(self._readings())

    def records(self) -> Iterator[tuple[float, Record]]:
        """Yield the records in order of time, each with the time at which the ledger receives it."""
        trouble, due, state = self._job.trouble, self._rng.uniform(0, URL_INTERVAL), None
        for t, regular in self._looks():
            if self._host in trouble.dark and t >= trouble.at:
                return
            self._look(t)
            if not any(rank.end is None for rank in self._ranks.values()) or (regular and t < due):
                continue
            record = self._record(t)
            changed, state = urgent_state(record) != state, urgent_state(record)
            if t >= due or changed:
                due = t + self._rng.uniform(*SPREAD) * URL_INTERVAL
                yield t + (self._rng.uniform(0, URGENT) if changed else 0.0) + DELAY, record

    def _looks(self) -> Iterator[tuple[float, bool]]:
        """Yield the times at which the exporter looks, and whether it does only for its regular records."""
        begin = self._job.trouble.at - URL_INTERVAL
        t = 0.0
        while t < self._job.seconds:
            closely = begin <= t < begin + BEGINNING and self._job.trouble.hangs
            yield t, not closely
            t += 1.0

    def _look(self, t: float) -> None:
        """Take the pushes and the readings up to `t`."""
        while self._scrapes and self._scrapes[0][0] <= t:
            self._t, samples = self._scrapes.pop(0)
            self._evidence.observe(samples)
        self._t = t
        for rank, totals in self._totals.items():
            if rank in self._job.trouble.gone and t >= self._job.trouble.at and rank in self._ranks:
                self._ranks[rank] = self._ranks[rank]._replace(end="gone")
            now = self._job.pushed(rank, t)
            if now is not None and now > self._pushed[rank]:
                self._pushed[rank] = now
                self._take(rank, totals, now)

    def _take(self, rank: int, totals: RankTotals, now: float) -> None:
        job = self._job
        while job.segments[self._reached[rank]].end <= now:
            segment = job.segments[self._reached[rank]]
            totals.add(segment, rank, job.trouble, 0.0)
            self._reached[rank] += 1
            if rank % PER_HOST == 0 and segment.activity == "step":
                self._durations.append(segment.end - segment.begin)
        segment = job.segments[self._reached[rank]]
        samples = tuple(
            (row, _label_values(row, labels), value)
            for row, suffix, labels, value in job.rank_samples(rank, now, now, totals, segment)
            if not suffix
        )
        opened = now - segment.begin if segment.activity == "step" else 0.0
        push = Push("", job.name, "1", rank, 0.0, now, open_step_seconds=opened, samples=samples)
        before = self._ranks.get(rank)
        step = StepClock.of(push, before.step if before is not None else None)
        blocked = job.trouble.at if job.trouble.blocked and rank in job.trouble.behind else None
        self._ranks[rank] = RankOfHost(push, now, step, blocked, None)

    def _readings(self) -> Iterator[tuple[float, list[Sample]]]:
        """Yield the samples of each scrape of the host's GPUs and ports that succeeds."""
        rows = {row.name: row for row in vars(m).values() if isinstance(row, Metric)}
        series = [
            (rows[name], labels, values)
            for rank in self._totals
            for (name, labels), values in self._job.card(rank).items()
        ]
        for number, (t, failed) in enumerate(zip(self._job.scrapes, self._job.silence(self._host), strict=True)):
            samples = [
                (row, _label_values(row, labels), value / row.scale)
                for row, labels, values in series
                if isinstance(value := values[number], float)
            ]
            if not failed:
                yield t, samples

    def _record(self, t: float) -> Record:
        """Return the record that the exporter sends at `t`."""
        live = {rank: one for rank, one in self._ranks.items() if one.end is None}
        first = min(live)
        totals, push = self._totals[first], live[first].push
        last = sorted(self._durations[-P99_OF:])
        p99 = last[int(0.99 * len(last))] if last and self._host == 0 else None
        opened = t - open_step.seconds_open(self._ranks.values(), t)
        record: Record = {"t": push.at, "run": self._job.name, "attempt": "1", "source": self._job.host(self._host)}
        record |= {"event": "snapshot", "started": 0.0, "rank": first, "gpus": len(self._ranks), "pid": True}
        record |= {"step": totals.steps, "activity_seconds": {"step": push.at}, "step_p99": p99}
        record |= {"ranks": f"{min(self._totals)}-{max(self._totals)}", "open_step_seconds": push.open_step_seconds}
        parts = HostParts(
            self._evidence.activity, self._evidence.broken_gpus(opened - BEFORE), link_down=self._evidence.link_down
        )
        record["open_step"] = open_step.field_of(self._ranks, p99, t, t, parts)
        if not self._job.trouble.unmeasured & live.keys():
            record["waits"] = [[rank, self._job.stage(rank), 0.0, *_waits(self._totals[rank])] for rank in live]
        return record


def _label_values(row: Metric, labels: Labels) -> tuple[str, ...]:
    """Return the values of a row's labels, empty for those that are not given."""
    given = dict(labels)
    return tuple(given.get(label, "") for label in row.labels)


def _waits(totals: RankTotals) -> tuple[float, float, float, float]:
    return totals.measured_steps, totals.measured, totals.wait, totals.measured_tokens
