"""Series of the ledger about one simulated job: its verdicts, from the records of the job's two hosts.

The records are made and applied by the code that is shipped. A host sends one in about 15 s, at a random time, and at
once if a step becomes overdue or a sign appears. Where no step hangs, it also sends early while steps take longer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from math import ceil, floor, inf
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.ledger import Ledger
from flopwatch.node.telemetry import open_step
from flopwatch.node.telemetry.evidence import BEFORE, EvidenceLog
from flopwatch.node.telemetry.ledger_client import (
    READ_EVERY,
    SAMPLE,
    SPREAD,
    URGENT,
    URL_INTERVAL,
    StepTrend,
    urgent_state,
)
from flopwatch.node.telemetry.open_step import GpuActivity, HostParts, RankOfHost, StepClock
from flopwatch.node.telemetry.otlp import Push
from simulator.ranks import HOSTS, INTERVAL, PER_HOST, Labels, RankTotals, Series, SynchronousJob, Values, utilization

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
DISTURBED_EVERY = 300.0  # mean seconds between two disturbances of a job's network or ledger
DISTURBED = (5.0, 90.0)  # range of the seconds of a disturbance
DELAYED = (1.0, 20.0)  # range of the delay of a busy host's records, in seconds

Record = dict[str, Any]


def ledger_series(job: SynchronousJob) -> Iterator[tuple[Series, Values]]:
    """Yield the series of VERDICTS about a job, with their values at all scrapes."""
    ledger, sent = Ledger(), records(job)
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Values] = {}
    target = {"job": "flopwatch-ledger", "instance": f"{job.name}-ledger:9451"}
    for number, t in enumerate(job.scrapes):
        while sent and sent[0][0] <= t:
            received, record = sent.pop(0)
            ledger.apply(record, received)
        for row, values, value in chain.from_iterable(ledger.families(t)):
            if row in VERDICTS:
                labels = tuple((key, text) for key, text in zip(row.labels, values, strict=True) if text)
                found.setdefault((row.name, labels), [None] * len(job.scrapes))[number] = value
    for (name, own), series in found.items():
        stale = [
            "stale" if value is None and before is not None else value
            for before, value in zip([None, *series], series, strict=False)
        ]
        yield (name, {**target, **dict(own)}), stale


def records(job: SynchronousJob) -> list[tuple[float, Record]]:
    """Return the records of a job's hosts in order of time, each with the time at which the ledger receives it."""
    hosts = (SimulatedExporter(job, host) for host in range(HOSTS))
    return sorted((sent for host in hosts for sent in host.records()), key=lambda sent: sent[0])


def disturbed(job: SynchronousJob) -> list[tuple[float, Record]]:
    """Return the records of a job that arrive while its hosts are cut off or busy, and the ledger restarts."""
    rng, t, spans = random.Random(f"{job.name} network"), 0.0, []
    while (t := t + rng.expovariate(1 / DISTURBED_EVERY)) < job.seconds:
        source = rng.choice([job.host(host) for host in range(HOSTS)] + [""])  # empty: the ledger
        spans.append((t, t + rng.uniform(*DISTURBED), source, rng.random() < 0.5))
    arrived = []
    for received, record in records(job):
        late = 0.0
        for begin, end, source, lost in spans:
            if begin <= received < end and source in ("", record["source"]):
                late = inf if lost or not source else max(late, rng.uniform(*DELAYED))
        if late < inf:
            arrived.append((received + late, record))
    return sorted(arrived, key=lambda sent: sent[0])


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
        self._read_at = -inf
        self._idle = {(("gpu", str(rank % PER_HOST)), ("uuid", job.uuid(rank))) for rank in job.trouble.idle}
        rows = {row.name: row for row in vars(m).values() if isinstance(row, Metric)}
        self._series = [
            (rows[name], labels, values) for rank in self._totals for (name, labels), values in job.card(rank).items()
        ]
        self._scrapes = list(self._readings())

    def records(self) -> Iterator[tuple[float, Record]]:
        """Yield the records in order of time, each with the time at which the ledger receives it."""
        trouble, due, state = self._job.trouble, self._rng.uniform(0, URL_INTERVAL), None
        # Before the trouble, and where no step is overdue, the pushes between two records change nothing.
        every_push_from = trouble.at - URL_INTERVAL if trouble.hangs or trouble.declared else inf
        pace, sample_at = StepTrend(), 0.0 if every_push_from == inf else inf
        for t, regular in self._looks():
            if self._host in trouble.dark and t >= trouble.at:
                return
            waits_for_due = regular and t < min(due, sample_at)
            if waits_for_due and t < every_push_from:
                continue
            self._look(t)
            self._read(t)
            if waits_for_due or not any(rank.end is None for rank in self._ranks.values()):
                continue
            record = self._record(t)
            before, state = state, urgent_state(record)
            changed = state != before
            if t >= sample_at:
                sample_at, record["early"] = t + SAMPLE, pace.is_early(record, t)
            if t >= due or changed or record.get("early"):
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
            (row, _label_values(row.labels, labels), value)
            for row, _, labels, value in job.state_samples(rank, now, totals, segment)
        )
        opened = now - segment.begin if segment.activity == "step" else 0.0
        push = Push("", job.name, "1", rank, 0.0, now, open_step_seconds=opened, samples=samples)
        before = self._ranks.get(rank)
        step = StepClock.of(push, before.step if before is not None else None)
        blocked = job.trouble.at if job.trouble.blocked and rank in job.trouble.behind else None
        self._ranks[rank] = RankOfHost(push, now, step, blocked, None)

    def _read(self, t: float) -> None:
        """Read the GPUs at `t` if the open step is late and they have too few readings since it began."""
        opened = t - open_step.seconds_open(self._ranks.values(), t)
        late = open_step.is_late(self._ranks.values(), self._p99, t)
        if late and t - self._read_at >= READ_EVERY and self._evidence.activity.lacks(opened + open_step.SETTLED):
            self._read_at = t
            self._evidence.observe(self._samples(t / INTERVAL))

    def _samples(self, number: float) -> list[Sample]:
        """Return what GPUs and ports show at a scrape, or between two, where counters rise steadily."""
        before, after, samples = floor(number), ceil(number), list[Sample]()
        for row, labels, values in self._series:
            value, last = values[min(after, len(values) - 1)], values[before]
            if isinstance(value, float):
                if row.type == "counter" and isinstance(last, float):
                    value = last + (number - before) * (value - last)
                if number > before and row is m.GPU_UTILIZATION_RATIO and labels not in self._idle:
                    value = utilization(self._rng)
                samples.append((row, _label_values(row.labels, labels), value / row.scale))
        return samples

    def _readings(self) -> Iterator[tuple[float, list[Sample]]]:
        """Yield the samples of each scrape of the host's GPUs and ports that succeeds."""
        for number, (t, failed) in enumerate(zip(self._job.scrapes, self._job.silence(self._host), strict=True)):
            if not failed:
                yield t, self._samples(number)

    @property
    def _p99(self) -> float | None:
        """Return the 99th percentile of the run's steps, which one rank reports."""
        last = sorted(self._durations[-P99_OF:])
        return last[int(0.99 * len(last))] if last and self._host == 0 else None

    def _record(self, t: float) -> Record:
        """Return the record that the exporter sends at `t`."""
        live = {rank: one for rank, one in self._ranks.items() if one.end is None}
        first = min(live)
        totals, push = self._totals[first], live[first].push
        p99 = self._p99
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
            record["computing_squares"] = [self._totals[rank].squares for rank in live]
        return record


@lru_cache(4096)
def _label_values(names: tuple[str, ...], labels: Labels) -> tuple[str, ...]:
    """Return the values of the labels with these names, empty for those that are not given."""
    given = dict(labels)
    return tuple(given.get(name, "") for name in names)


def _waits(totals: RankTotals) -> tuple[float, float, float, float]:
    return totals.measured_steps, totals.measured, totals.wait, totals.measured_tokens
