"""Series of the ledger about one simulated job: the verdict on its ranks' waits, from the records of its two hosts.

The records are applied by the ledger that is shipped. A host sends one in about 15 s, at a random time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from flopwatch import catalogue as m
from flopwatch.ledger.ledger import Ledger
from flopwatch.node.telemetry.ledger_client import SPREAD, URL_INTERVAL
from simulator.ranks import HOSTS, PER_HOST, RankTotals, Series, SynchronousJob, Values

STRAGGLERS = (m.RUN_STRAGGLER_RATIO, m.RUN_STRAGGLER_INFO, m.RUN_STRAGGLER_UNAVAILABLE, m.RUN_WHATIF_STEP_SECONDS)
DELAY = 0.5  # seconds from a record's push to the ledger


def ledger_series(job: SynchronousJob) -> Iterator[tuple[Series, Values]]:
    """Yield the series of STRAGGLERS about a job, with their values at all scrapes."""
    ledger, records = Ledger(), list(_records(job))
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Values] = {}
    target = {"job": "flopwatch-ledger", "instance": f"{job.name}-ledger:9451"}
    for number, t in enumerate(job.scrapes):
        while records and records[0]["t"] + DELAY <= t:
            ledger.apply(records.pop(0))
        for row, values, value in ledger.families(t):
            if row in STRAGGLERS:
                labels = tuple((key, text) for key, text in zip(row.labels, values, strict=True) if text)
                found.setdefault((row.name, labels), [None] * len(job.scrapes))[number] = value
    for (name, own), series in found.items():
        stale = [
            "stale" if value is None and before is not None else value
            for before, value in zip([None, *series], series, strict=False)
        ]
        yield (name, {**target, **dict(own)}), stale


def _records(job: SynchronousJob) -> Iterator[dict[str, Any]]:
    """Yield the records of all hosts in order of time."""
    rng = random.Random(f"{job.name} records")
    due = []
    for host in range(HOSTS):
        t = rng.uniform(0, URL_INTERVAL)
        while t <= job.seconds:
            due.append((t, host))
            t += rng.uniform(*SPREAD) * URL_INTERVAL
    totals = [RankTotals() for _ in range(HOSTS * PER_HOST)]
    reached = [0] * len(totals)
    for t, host in sorted(due):
        ranks = range(host * PER_HOST, (host + 1) * PER_HOST)
        pushes = {rank: now for rank in ranks if (now := job.pushed(rank, t)) is not None}
        if (host in job.trouble.dark and t >= job.trouble.at) or not pushes:
            continue
        for rank, now in pushes.items():
            while job.segments[reached[rank]].end <= now:
                totals[rank].add(job.segments[reached[rank]], rank, job.trouble, 0.0)
                reached[rank] += 1
        first = min(pushes)
        record: dict[str, Any] = {"t": pushes[first], "run": job.name, "attempt": "1", "source": job.host(host)}
        record |= {"event": "snapshot", "started": 0.0, "rank": first, "gpus": len(pushes), "pid": True}
        record |= {"step": totals[first].steps, "activity_seconds": {"step": pushes[first]}}
        if not job.trouble.unmeasured & pushes.keys():
            record["waits"] = [[rank, job.stage(rank), 0.0, *_waits(totals[rank])] for rank in pushes]
        yield record


def _waits(totals: RankTotals) -> tuple[float, float, float, float]:
    return totals.measured_steps, totals.measured, totals.wait, totals.measured_tokens
