"""Collection of a run's report: values from Prometheus, single losses from the ledger. An absent value is None."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch import catalogue as m
from flopwatch.ledger.client import LedgerClient
from flopwatch.ledger.tables import stacks_text
from flopwatch.report.model import GOOD, CheckpointSummary, Firing, Outlier, ReportedLoss, RunReport
from flopwatch.report.queries import MAX_OUTLIERS, RUN_MFU, RunQueries
from flopwatch.report.statistics import checkpoint_interval, mean_time_between

# Fields of ReportedLoss with the same name in the ledger's incident.
_SAME_IN_RECORD = ("began", "back", "cause", "confidence", "host", "why", "gpu_seconds", "settled")


def collect(queries: RunQueries, price: float | None = None, ledger: LedgerClient | None = None) -> RunReport:
    """Query the report of a run. `price` is per GPU-hour. Raises SettingsError for an unknown run or a failed query."""
    run = queries.run
    began, tenant = queries.start()
    record = None if ledger is None else ledger.record(run, tenant)
    losses = None if record is None else _losses(record)
    buckets, gpu_seconds = queries.by("bucket", m.RUN_SECONDS_TOTAL), queries.by("bucket", m.RUN_GPU_SECONDS_TOTAL)
    state = next((name for name, on in queries.by("state", m.RUN_STATE).items() if on == 1), "unknown")
    queue = buckets.pop("queue", None)
    attributed = sum(buckets.values())
    open_seconds = 0.0 if state in ("completed", "stopped") else queries.one(m.RUN_OPEN_SECONDS) or 0.0
    ended = began + attributed + open_seconds
    wall = ended - began
    queries.set_span(began, ended)
    done = sum(buckets.get(bucket, 0.0) for bucket in GOOD) if any(bucket in buckets for bucket in GOOD) else None
    ends = {name: round(count) for name, count in queries.by("status", m.RUN_ATTEMPT_ENDS_TOTAL).items() if count}
    running = attributed - buckets.get("down", 0.0)
    mttf = mean_time_between(running, ends.get("failed", 0) + ends.get("silent", 0))
    mttr = queries.ratio(m.RUN_RECOVERY_SECONDS_TOTAL, m.RUN_RECOVERIES_TOTAL)
    alerts, causes = queries.alerts(tenant), queries.causes()
    return RunReport(
        run=run,
        tenant=tenant,
        made_at=queries.at,
        state=state,
        began=began,
        ended=ended,
        gpus=queries.one(m.RUN_GPUS),
        host_count=queries.host_count() or None,
        wall_seconds=wall,
        queue_seconds=queue,
        buckets=buckets,
        gpu_seconds=gpu_seconds,
        open_seconds=open_seconds,
        provisional_seconds=queries.one(m.RUN_PROVISIONAL_SECONDS),
        mfu=queries.mean(RUN_MFU),
        effective_mfu=queries.ratio(m.RUN_RETAINED_FLOPS_TOTAL, m.RUN_CAPACITY_FLOPS_TOTAL),
        goodput=done / wall if done is not None and wall > 0 else None,
        ettr=done / (wall + queue) if done is not None and queue is not None and wall > 0 else None,
        attempts=round(queries.one(m.RUN_ATTEMPTS_TOTAL) or 0),
        ends=ends,
        high_water_step=queries.one(m.RUN_HIGH_WATER_STEPS),
        mttf=mttf,
        mttr_seconds=mttr,
        recoveries=round(queries.one(m.RUN_RECOVERIES_TOTAL) or 0),
        checkpoints=_checkpoints(queries, running, buckets.get("checkpoint_save", 0.0), mttf.seconds, mttr or 0.0),
        energy=queries.energy(),
        declared=queries.declared(),
        timeline=queries.timeline(began, open_seconds),
        mfu_over_time=queries.over_time(RUN_MFU),
        causes=causes,
        losses=losses,
        alerts=alerts,
        ranks=queries.ranks(),
        hosts=_hosts(alerts, losses or ()),
        links=queries.links(),
        missed=queries.missed(causes),
        stacks="" if record is None else stacks_text(record),
        price=price,
    )


def _checkpoints(
    queries: RunQueries, running: float, saving: float, mttf: float | None, mttr: float
) -> CheckpointSummary:
    """Return number, cost and best interval of checkpoints. All arguments but `queries` are in seconds."""
    commits = round(queries.changes(m.RUN_COMMITTED_STEPS))
    blocking, interval = saving / commits if commits else 0.0, None
    if commits and mttf is not None:
        interval = checkpoint_interval(running / commits, blocking, mttf, mttr)
    return CheckpointSummary(commits, queries.one(m.RUN_COMMITTED_STEPS), blocking, interval)


def _losses(record: Mapping[str, Any]) -> list[ReportedLoss]:
    losses = []
    for one in record["incidents"]:
        what = one["status"] if one.get("kind", "end") == "end" else one["kind"]
        part = " ".join(one[name] for name in ("gpu", "port") if one[name])
        losses.append(ReportedLoss(what=what, part=part, **{name: one[name] for name in _SAME_IN_RECORD}))
    return sorted(losses, key=lambda loss: loss.began)


def _hosts(alerts: Iterable[Firing], losses: Iterable[ReportedLoss]) -> list[Outlier]:
    """Return the hosts with the most lost GPU-seconds, then those with the most alerts."""
    fired: defaultdict[str, Counter[str]] = defaultdict(Counter)
    cost: dict[str, float] = {}
    for firing in alerts:
        for part in firing.place.split(", "):
            if part.startswith("host "):
                fired[part.removeprefix("host ")][firing.name] += 1
    for loss in losses:
        if loss.host:
            cost[loss.host] = cost.get(loss.host, 0.0) + loss.gpu_seconds
    outliers = []
    hosts = sorted(fired.keys() | cost.keys())
    for host in sorted(hosts, key=lambda host: (-cost.get(host, 0.0), -fired[host].total()))[:MAX_OUTLIERS]:
        texts = [f"{cost[host] / 3600:,.1f} GPU-hours lost to it"] if host in cost else []
        texts += [f"{count} x {name}" for name, count in sorted(fired[host].items())]
        outliers.append(Outlier(host, "", ", ".join(texts)))
    return outliers
