"""Collection of a report's figures from Prometheus and, for each single loss, from the ledger.

Single losses are in no series, since each would need one of its own. A figure whose series are absent is None and is
never estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch import catalogue as m
from flopwatch.ledger.client import LedgerClient
from flopwatch.report.model import GOOD, CheckpointSummary, Firing, Outlier, ReportedLoss, RunReport
from flopwatch.report.prometheus import PrometheusClient
from flopwatch.report.queries import MAX_OUTLIERS, RUN_MFU, RunQueries
from flopwatch.report.statistics import checkpoint_interval, mean_time_between


def collect(
    prometheus: PrometheusClient,
    run: str,
    *,
    tenant: str | None,
    at: float,
    lookback: float,
    price: float | None = None,
    ledger: LedgerClient | None = None,
) -> RunReport:
    """Return the report of a run at a time, looking back `lookback` seconds. Raises SettingsError."""
    queries = RunQueries(prometheus, run, tenant, at, lookback)
    began, tenant = queries.start()
    losses = None if ledger is None else _losses(ledger.record(run, tenant))
    buckets, gpu_seconds = queries.by("bucket", m.RUN_SECONDS), queries.by("bucket", m.RUN_GPU_SECONDS)
    states = queries.by("state", m.RUN_STATE)
    state = next((name for name, on in states.items() if on == 1), "unknown")
    queue = buckets.pop("queue", None)
    booked = sum(buckets.values())
    over = state in ("completed", "stopped")
    open_seconds = 0.0 if over else queries.one(m.RUN_OPEN_SECONDS) or 0.0
    ended = began + booked + open_seconds
    wall = ended - began
    queries.set_span(began, ended)
    done = sum(buckets.get(bucket, 0.0) for bucket in GOOD) if any(bucket in buckets for bucket in GOOD) else None
    ends = {name: round(count) for name, count in queries.by("status", m.RUN_ENDS).items() if count}
    running = booked - buckets.get("down", 0.0)
    mttf = mean_time_between(running, ends.get("failed", 0) + ends.get("silent", 0))
    recoveries, recovery = queries.one(m.RUN_RECOVERIES), queries.one(m.RUN_RECOVERY_SECONDS)
    mttr = recovery / recoveries if recoveries and recovery is not None else None
    flops, capacity = queries.one(m.RUN_MODEL_FLOPS), queries.one(m.RUN_CAPACITY_FLOPS)
    commits = round(queries.changes(m.RUN_COMMITTED_STEPS))
    blocking = buckets.get("checkpoint_save", 0.0) / commits if commits else 0.0
    alerts = queries.alerts(tenant)
    causes = queries.causes()
    return RunReport(
        run=run,
        tenant=tenant,
        made_at=at,
        state=state,
        began=began,
        ended=ended,
        gpus=queries.one(m.RUN_GPUS),
        host_count=len(queries.hosts()) or None,
        wall_seconds=wall,
        queue_seconds=queue,
        buckets=buckets,
        gpu_seconds=gpu_seconds,
        open_seconds=open_seconds,
        provisional_seconds=queries.one(m.RUN_PROVISIONAL_SECONDS),
        mfu=queries.mean(RUN_MFU),
        effective_mfu=flops / capacity if flops is not None and capacity else None,
        goodput=done / wall if done is not None and wall > 0 else None,
        ettr=done / (wall + queue) if done is not None and queue is not None and wall > 0 else None,
        attempts=round(queries.one(m.RUN_ATTEMPTS) or 0),
        ends=ends,
        high_water_step=queries.one(m.RUN_POSITION_STEPS),
        mttf=mttf,
        mttr_seconds=mttr,
        recoveries=round(recoveries or 0),
        checkpoints=CheckpointSummary(
            commits,
            queries.one(m.RUN_COMMITTED_STEPS),
            blocking,
            checkpoint_interval(running / commits, blocking, mttf.seconds, mttr or 0.0)
            if commits and mttf.seconds is not None
            else None,
        ),
        declared=queries.declared(),
        timeline=queries.timeline(began, open_seconds),
        mfu_over_time=[
            point for series in queries.over(f"max by (run) ({RUN_MFU}{queries.training})") for point in series.points
        ],
        causes=causes,
        losses=losses,
        alerts=alerts,
        ranks=queries.ranks(),
        hosts=_hosts(alerts, losses or ()),
        links=queries.links(),
        missed=queries.missed(causes),
        price=price,
    )


def _losses(record: Mapping[str, Any]) -> list[ReportedLoss]:
    """Return the losses in a ledger's record, in order of time."""
    return sorted(
        (
            ReportedLoss(
                one["began"],
                one["back"],
                one["status"] if one.get("kind", "end") == "end" else one["kind"],
                one["cause"],
                one["confidence"],
                one["host"],
                " ".join(one[name] for name in ("gpu", "port") if one[name]),
                one["why"],
                one["gpu_seconds"],
                one["settled"],
            )
            for one in record["incidents"]
        ),
        key=lambda loss: loss.began,
    )


def _hosts(alerts: Iterable[Firing], losses: Iterable[ReportedLoss]) -> list[Outlier]:
    """Return the hosts that cost most, then those with the most alerts."""
    fired: dict[str, Counter[str]] = {}
    cost: dict[str, float] = {}
    for firing in alerts:
        for part in firing.place.split(", "):
            if part.startswith("host "):
                fired.setdefault(part.removeprefix("host "), Counter())[firing.name] += 1
    for loss in losses:
        if loss.host:
            cost[loss.host] = cost.get(loss.host, 0.0) + loss.gpu_seconds
    worst = sorted(
        fired.keys() | cost.keys(), key=lambda host: (-cost.get(host, 0.0), -fired.get(host, Counter()).total(), host)
    )[:MAX_OUTLIERS]
    return [
        Outlier(
            host,
            "",
            ", ".join(
                [
                    *([f"{cost[host] / 3600:,.1f} GPU-hours lost to it"] if host in cost else []),
                    *(f"{count} x {name}" for name, count in sorted(fired.get(host, Counter()).items())),
                ]
            ),
        )
        for host in worst
    ]
