"""What is told of a run: the samples that are served, its figures, its whole record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.attempt import BUCKETS
from flopwatch.ledger.attribution import CAUSES, LOSSES

if TYPE_CHECKING:
    from flopwatch.ledger.accounting import Run

STATES = ("queued", "running", "down", "completed", "stopped")


def families(run: Run, now: float, *, new: bool = False) -> list[Sample]:
    """Return every sample of the run; one that is new has its counters at 0 and all its wall clock open."""
    names = (run.tenant, run.name)
    samples: list[Sample] = []

    def add(row: Metric, value: float | None, *label: str) -> None:
        if value is not None:
            samples.append((row, (*names, *label), 0.0 if new and row.type == "counter" else value))

    for bucket in BUCKETS:
        unknown = (bucket == "queue" and run.submitted is None) or (
            bucket in ("productive", "lost", "generation") and not run.positioned and run.high_water is None
        )
        if unknown and run.seconds[bucket] == 0:
            continue
        add(m.RUN_SECONDS, run.seconds[bucket], bucket)
        add(m.RUN_GPU_SECONDS, run.gpu_seconds[bucket], bucket)
    add(m.RUN_OPEN_SECONDS, run.wall(now) if new else run.open(now))
    add(m.RUN_PROVISIONAL_SECONDS, run.provisional if run.positioned else None)
    if any(x.gpus is not None for x in run.sources.values()):
        add(m.RUN_GPUS, run._sum("gpus"))
    state = run.state(now)
    for other in STATES:
        add(m.RUN_STATE, float(other == state), other)
    add(m.RUN_ATTEMPTS, run.attempts)
    for end, count in run.ends.items():
        add(m.RUN_ENDS, count, end)
    if run.positioned or run.high_water is not None:
        add(m.RUN_RECOVERIES, run.recoveries)
        add(m.RUN_RECOVERY_SECONDS, run.recovery_seconds)
    for kind in LOSSES:
        for cause in CAUSES:
            add(m.RUN_INCIDENTS, run.settled[kind].get(cause, 0), kind, cause)
            add(m.RUN_BADPUT_GPU_SECONDS, run.badput[kind].get(cause, 0.0), kind, cause)
    add(m.RUN_STRAGGLER_GPU_SECONDS, run.straggler_gpu_seconds)
    add(m.RUN_CONFLICT, float(run.conflict(now)))
    add(m.RUN_POSITION_STEPS, run.high_water)
    add(m.RUN_COMMITTED_STEPS, run.committed)
    add(m.RUN_COMMITTED_TIMESTAMP, run.committed_at)
    if run.flops and run.capacity > 0:
        add(m.RUN_MODEL_FLOPS, run.retained)
        add(m.RUN_CAPACITY_FLOPS, run.capacity)
    add(m.RUN_START, run.start)
    return samples


def summary(run: Run, at: float | None = None) -> dict[str, Any]:
    """Return the figures of the run at a time, else as of its last record; a ratio that cannot be told is None."""
    now = run.last if at is None else at
    wall = run.wall(now)
    done = run.seconds["productive"] + run.seconds["generation"] if run.high_water is not None else None
    waited = wall + run.seconds["queue"] if run.submitted is not None else 0.0
    return {
        "goodput": done / wall if done is not None and wall > 0 else None,
        "ettr": done / waited if done is not None and waited > 0 else None,
        "effective_mfu": run.retained / run.capacity if run.flops and run.capacity > 0 else None,
        "attempts": run.attempts,
        "buckets": dict(run.seconds),
        "gpu_seconds": dict(run.gpu_seconds),
        "open_seconds": run.open(now),
        "provisional_seconds": run.provisional,
        "wall_seconds": wall,
        "state": run.state(at),
        "conflict": run.conflict(now),
        "ends": dict(run.ends),
        "recoveries": run.recoveries,
        "recovery_seconds": run.recovery_seconds,
        "incidents": {kind: dict(counts) for kind, counts in run.settled.items()},
        "badput_gpu_seconds": {kind: dict(seconds) for kind, seconds in run.badput.items()},
        "straggler_gpu_seconds": run.straggler_gpu_seconds,
        "high_water_step": run.high_water,
        "committed_step": run.committed,
        "committed_timestamp": run.committed_at,
        "retained_flops": run.retained,
        "capacity_flops": run.capacity,
    }


def figures(run: Run, now: float) -> dict[str, Any]:
    """Return the whole record of the run: its summary, its attempts and its incidents, the oldest first."""
    told = summary(run, now)
    incidents = {number: incident.figures(run.evidence) for number, incident in run.incidents.items()}
    if run.losing is not None:
        incidents[run.losing] |= {"seconds": run.losing_seconds, "gpu_seconds": run.losing_gpu_seconds}
    attempts = [*map(dict, run.history.values()), *([] if run.attempt is None else [run.attempt.figures()])]
    return {
        "tenant": run.tenant,
        "run": run.name,
        "generation": run.generation,
        "at": now,
        "submitted": run.submitted,
        "start": run.start,
        "frontier": run.frontier,
        "buckets": told.pop("buckets"),
        "gpu_seconds": told.pop("gpu_seconds"),
        "summary": told,
        "attempts": attempts,
        "attempts_left_out": run.left_out,
        "incidents": list(incidents.values()),
    }
