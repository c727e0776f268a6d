"""Run accounting: the ledger."""

from flopwatch.catalogue.row import RUN, Metric

RUN_SECONDS = Metric(
    "run_seconds_total",
    "counter",
    "Wall clock of the run by bucket: productive, lost, startup, compile, data_stall, checkpoint_save, "
    "checkpoint_restore, evaluation, generation, down, queue, other. Exclusive; nothing is ever reclassified.",
    (*RUN, "bucket"),
    "flopwatch.ledger.accounting",
    key=True,
)
RUN_GPU_SECONDS = Metric(
    "run_gpu_seconds_total",
    "counter",
    "The same, times the GPUs held.",
    (*RUN, "bucket"),
    "flopwatch.ledger.accounting",
)
RUN_OPEN_SECONDS = Metric(
    "run_open_seconds",
    "gauge",
    "Wall clock not yet booked, because no evidence brackets it. Buckets (queue apart) + open = wall clock.",
    RUN,
    "flopwatch.ledger.accounting",
    key=True,
)
RUN_PROVISIONAL_SECONDS = Metric(
    "run_provisional_seconds",
    "gauge",
    "Productive time not yet covered by a durable checkpoint.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_GPUS = Metric(
    "run_gpus",
    "gauge",
    "GPUs the run holds (its last attempt's, while it is down).",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_STATE = Metric(
    "run_state",
    "gauge",
    "1 for the state the run is in: queued (also after a preemption), running, down, completed, stopped.",
    (*RUN, "state"),
    "flopwatch.ledger.accounting",
    key=True,
)
RUN_ATTEMPTS = Metric(
    "run_attempts_total",
    "counter",
    "Attempts started: first start, restarts, moves, resizes.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_ENDS = Metric(
    "run_attempt_ends_total",
    "counter",
    "Attempts that ended, by how: completed, stopped, preempted, resized, failed, silent. "
    "failed and silent are unplanned.",
    (*RUN, "status"),
    "flopwatch.ledger.accounting",
)
RUN_RECOVERIES = Metric(
    "run_recoveries_total",
    "counter",
    "Recoveries from unplanned ends: a step above the high-water mark was made again. What ends before that belongs to "
    "the same recovery.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_RECOVERY_SECONDS = Metric(
    "run_recovery_seconds_total",
    "counter",
    "Wall clock of those recoveries: last word of the attempt that ended to the new step, with down time, startup, "
    "restore and steps executed again. Mean time to recovery = this / run_recoveries_total.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_INCIDENTS = Metric(
    "run_incidents_total",
    "counter",
    "Losses by cause, each counted once, when its evidence is complete. Kinds: end (of an attempt that did not end the "
    "run), slow (a stretch of slow steps), stall (a time without a step that came to an end).",
    (*RUN, "kind", "cause"),
    "flopwatch.ledger.attribution",
)
RUN_BADPUT_GPU_SECONDS = Metric(
    "run_badput_gpu_seconds_total",
    "counter",
    "GPU time those losses cost. end: cut short, down, startup, restore, executed again until the next new step. slow, "
    "stall: beyond the usual, a part of productive, data_stall and checkpoint_save. No second is in two losses.",
    (*RUN, "kind", "cause"),
    "flopwatch.ledger.attribution",
)
RUN_STRAGGLER_GPU_SECONDS = Metric(
    "run_straggler_gpu_seconds_total",
    "counter",
    "GPU time that the run waited for one late rank or host, a part of productive. Counted once it was the latest in "
    "three windows of two minutes in a row; absent where waits are not measured.",
    RUN,
    "flopwatch.ledger.stragglers",
)
RUN_CONFLICT = Metric(
    "run_conflict",
    "gauge",
    "1 while two attempts report under the name of this run; the one that started later is accounted for.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_POSITION_STEPS = Metric(
    "run_high_water_steps", "gauge", "The furthest step the run ever completed.", RUN, "flopwatch.ledger.accounting"
)
RUN_COMMITTED_STEPS = Metric(
    "run_committed_steps", "gauge", "Step of the run's last durable checkpoint.", RUN, "flopwatch.ledger.accounting"
)
RUN_COMMITTED_TIMESTAMP = Metric(
    "run_committed_timestamp_seconds",
    "gauge",
    "When the run's last durable checkpoint was first heard of, as Unix time.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_MODEL_FLOPS = Metric(
    "run_retained_flops_total",
    "counter",
    "Model FLOPs above the high-water mark: work done once. Re-executed steps add nothing.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_CAPACITY_FLOPS = Metric(
    "run_capacity_flops_total",
    "counter",
    "Peak FLOP/s of the allocated GPUs x seconds held.",
    RUN,
    "flopwatch.ledger.accounting",
)
RUN_START = Metric(
    "run_start_timestamp_seconds",
    "gauge",
    "First process start of the run, as Unix time.",
    RUN,
    "flopwatch.ledger.accounting",
)
