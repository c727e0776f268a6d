"""Views of a run: samples for `/metrics`, a summary, and for the API its summary with attempts and incidents."""

from collections.abc import Callable
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.ranks import ranks_text
from flopwatch.ledger.attribution import CAUSES, LOSSES
from flopwatch.ledger.buckets import BUCKETS, RETAINED
from flopwatch.ledger.hangs import Hangs
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.stragglers import KINDS, Stragglers

MAX_SUSPECTS = 8
STATES = ("queued", "running", "down", "completed", "stopped")


def families(run: RunLedger, now: float, *, new: bool = False) -> list[Sample]:
    """Return all samples of a run as of `now` (Unix time).

    For a `new` run, all counters are 0, and no time is attributed to a bucket yet.
    """
    names, buckets, losses = (run.tenant, run.name), run.buckets, run.incidents
    samples: list[Sample] = []

    def add(row: Metric, value: float | None, *label: str) -> None:
        if value is not None:
            samples.append((row, (*names, *label), 0.0 if new and row.type == "counter" else value))

    for bucket in BUCKETS:
        unknown = (bucket == "queue" and run.submitted is None) or (
            bucket in (*RETAINED, "lost") and not buckets.positioned and buckets.high_water is None
        )
        if unknown and buckets.seconds[bucket] == 0:
            continue
        add(m.RUN_SECONDS_TOTAL, buckets.seconds[bucket], bucket)
        add(m.RUN_GPU_SECONDS_TOTAL, buckets.gpu_seconds[bucket], bucket)
    add(m.RUN_OPEN_SECONDS, run.wall(now) if new else run.open(now))
    add(m.RUN_PROVISIONAL_SECONDS, buckets.provisional if buckets.positioned else None)
    if run.reporters.reporting("gpus"):
        add(m.RUN_GPUS, run.reporters.total("gpus"))
    state = run.state(now)
    for other in STATES:
        add(m.RUN_STATE, float(other == state), other)
    add(m.RUN_ATTEMPTS_TOTAL, run.attempts)
    for end, count in run.ends.items():
        add(m.RUN_ATTEMPT_ENDS_TOTAL, count, end)
    if buckets.positioned or buckets.high_water is not None:
        add(m.RUN_RECOVERIES_TOTAL, losses.recoveries)
        add(m.RUN_RECOVERY_SECONDS_TOTAL, losses.recovery_seconds)
    for kind in LOSSES:
        for cause in CAUSES:
            add(m.RUN_INCIDENTS_TOTAL, losses.settled[kind].get(cause, 0), kind, cause)
            add(m.RUN_BADPUT_GPU_SECONDS_TOTAL, losses.badput[kind].get(cause, 0.0), kind, cause)
    add(m.RUN_STRAGGLER_GPU_SECONDS_TOTAL, run.stragglers.gpu_seconds)
    if state == "running":
        _add_stragglers(run.stragglers, add)
        _add_hang(run.hangs, add)
    add(m.RUN_ATTEMPT_CONFLICT, float(run.conflict(now)))
    add(m.RUN_HIGH_WATER_STEPS, buckets.high_water)
    add(m.RUN_COMMITTED_STEPS, buckets.committed)
    add(m.RUN_COMMITTED_TIMESTAMP_SECONDS, buckets.committed_at)
    if buckets.flops and buckets.capacity > 0:
        add(m.RUN_RETAINED_FLOPS_TOTAL, buckets.retained)
        add(m.RUN_CAPACITY_FLOPS_TOTAL, buckets.capacity)
    for name, total in buckets.work.items():
        if "flops" not in name or run.reporters.all_count(name):
            add(m.BY_NAME[f"run_{name}_total"], total)
    add(m.RUN_PAGE, float(run.page))
    add(m.RUN_START_TIMESTAMP_SECONDS, run.start)
    return samples


def _add_stragglers(stragglers: Stragglers, add: Callable[..., None]) -> None:
    """Add the verdict on the waits of a run, or why there is none."""
    verdict = stragglers.verdict
    if verdict is None or stragglers.reason:
        add(m.RUN_STRAGGLER_UNAVAILABLE, 1.0, stragglers.reason)
        return
    for kind in KINDS:
        add(m.RUN_STRAGGLER_RATIO, verdict.share if kind == verdict.kind else 0.0, kind)
    for one in verdict.suspects[:MAX_SUSPECTS]:
        host, group = stragglers.hosts.get(one.rank, ""), one.communicator
        add(m.RUN_STRAGGLER_INFO, 1.0, str(one.rank), host, group.kind, ranks_text(group.ranks) or "")
    for number, seconds in stragglers.whatif.items():
        add(m.RUN_WHATIF_STEP_SECONDS, seconds, str(number))


def _add_hang(hangs: Hangs, add: Callable[..., None]) -> None:
    """Add for how long a run has been hanging, its signs, and the rank or host that the others wait for."""
    add(m.RUN_HANG_SECONDS, hangs.seconds)
    if hangs.verdict is None:
        return
    for sign, pointed in hangs.verdict.signs.items():
        add(m.RUN_HANG_SIGN_RANKS, float(len(pointed)), sign)
    for one in hangs.verdict.suspects[:MAX_SUSPECTS]:
        group = one.communicator
        kind, ranks = ("", "") if group is None else (group.kind, ranks_text(group.ranks) or "")
        rank = "" if one.rank is None else str(one.rank)
        add(m.RUN_HANG_SUSPECT_RATIO, one.share, rank, one.host, kind, ranks, ",".join(one.signs))


def summary(run: RunLedger, at: float | None = None) -> dict[str, Any]:
    """Return a run's totals and ratios as of `at` (Unix time), or else of its last record. An unknown ratio is None."""
    buckets, losses = run.buckets, run.incidents
    now = run.reporters.last if at is None else at
    wall = run.wall(now)
    done = sum(buckets.seconds[bucket] for bucket in RETAINED) if buckets.high_water is not None else None
    waited = wall + buckets.seconds["queue"] if run.submitted is not None else 0.0
    shown: dict[str, Any] = {
        "goodput": done / wall if done is not None and wall > 0 else None,
        "ettr": done / waited if done is not None and waited > 0 else None,
        "effective_mfu": buckets.retained / buckets.capacity if buckets.flops and buckets.capacity > 0 else None,
        "attempts": run.attempts,
    }
    shown |= {"buckets": dict(buckets.seconds), "gpu_seconds": dict(buckets.gpu_seconds)}
    shown |= {"open_seconds": run.open(now), "provisional_seconds": buckets.provisional, "wall_seconds": wall}
    shown |= {"state": run.state(at), "conflict": run.conflict(now), "ends": dict(run.ends)}
    shown |= {"recoveries": losses.recoveries, "recovery_seconds": losses.recovery_seconds}
    shown["incidents"] = {kind: dict(counts) for kind, counts in losses.settled.items()}
    shown["badput_gpu_seconds"] = {kind: dict(seconds) for kind, seconds in losses.badput.items()}
    shown |= {"straggler_gpu_seconds": run.stragglers.gpu_seconds, "high_water_step": buckets.high_water}
    shown |= {"committed_step": buckets.committed, "committed_timestamp": buckets.committed_at}
    return shown | {"retained_flops": buckets.retained, "capacity_flops": buckets.capacity}


def figures(run: RunLedger, now: float) -> dict[str, Any]:
    """Return a run's summary, buckets, attempts and incidents (oldest first) as the API's JSON object."""
    totals, losses = summary(run, now), run.incidents
    incidents = {number: incident.figures(losses.evidence) for number, incident in losses.by_number.items()}
    if losses.current is not None:
        charged = {"seconds": losses.charged_seconds, "gpu_seconds": losses.charged_gpu_seconds}
        incidents[losses.current] |= charged
    attempts = [*map(dict, run.history.values()), *([] if run.attempt is None else [run.attempt.figures()])]
    record = {"tenant": run.tenant, "run": run.name, "generation": run.generation, "at": now}
    record |= {"submitted": run.submitted, "start": run.start, "frontier": run.buckets.frontier}
    record |= {"buckets": totals.pop("buckets"), "gpu_seconds": totals.pop("gpu_seconds"), "summary": totals}
    record |= {"attempts": attempts, "attempts_left_out": run.left_out, "incidents": list(incidents.values())}
    record["stacks"] = run.stacks.rows
    return record | {"straggler": _straggler(run.stragglers) if run.state(now) == "running" else None}


def _straggler(stragglers: Stragglers) -> dict[str, Any]:
    """Return the verdict on a run's waits as a JSON object. `kind` is None without one, and `why` has the reason."""
    verdict = stragglers.verdict
    if verdict is None or stragglers.reason:
        return {"kind": None, "share": None, "ranks": [], "why": stragglers.why}
    ranks = [
        {
            "rank": one.rank,
            "host": stragglers.hosts.get(one.rank, ""),
            "group": one.communicator.kind,
            "ranks": ranks_text(one.communicator.ranks) or "",
            "share": one.share,
        }
        for one in verdict.suspects
    ]
    return {"kind": verdict.kind, "share": verdict.share, "ranks": ranks, "why": stragglers.why}
