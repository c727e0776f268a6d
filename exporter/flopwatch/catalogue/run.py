"""Rows of runs, published by the ledger."""

from flopwatch.catalogue.row import RUN, counter, gauge, info

# fmt: off
RUN_SECONDS_TOTAL = counter("run_seconds_total", "Wall clock of the run by bucket: productive, lost, startup, compile, "
    "data_stall, checkpoint_save, checkpoint_restore, evaluation, generation, down, queue, other. Buckets are "
    "exclusive and never reclassified.", (*RUN, "bucket"), "flopwatch.ledger.buckets", key=True)
RUN_GPU_SECONDS_TOTAL = counter("run_gpu_seconds_total", "Wall clock of the run by bucket, as in run_seconds_total, "
    "times the number of GPUs held.", (*RUN, "bucket"), "flopwatch.ledger.buckets")
RUN_OPEN_SECONDS = gauge("run_open_seconds",
    "Wall clock of the run not yet attributed to a bucket, because evidence of how it was spent is missing. All "
    "buckets but queue, plus this, are the wall clock.", RUN, "flopwatch.ledger.run", key=True)
RUN_PROVISIONAL_SECONDS = gauge("run_provisional_seconds",
    "Productive time of steps above the last durable checkpoint.", RUN, "flopwatch.ledger.buckets")
RUN_GPUS = gauge("run_gpus", "GPUs the run holds, or while the run is down those of its last attempt.", RUN,
    "flopwatch.ledger.run")
RUN_STATE = gauge("run_state", "1 for the state of the run: queued (also after a preemption), running, down, "
    "completed, stopped.", (*RUN, "state"), "flopwatch.ledger.run", key=True)
RUN_ATTEMPTS_TOTAL = counter("run_attempts_total", "Attempts started: first start, restarts, moves, resizes.", RUN,
    "flopwatch.ledger.run")
RUN_ATTEMPT_ENDS_TOTAL = counter("run_attempt_ends_total", "Attempts that ended, by status: completed, stopped, "
    "preempted, resized, failed, silent. failed and silent are unplanned.", (*RUN, "status"), "flopwatch.ledger.run")
RUN_RECOVERIES_TOTAL = counter("run_recoveries_total",
    "Recoveries from unplanned ends of attempts. A recovery counts once the run completes a step above its high-water "
    "mark. Further ends before that step belong to the same recovery.", RUN, "flopwatch.ledger.run")
RUN_RECOVERY_SECONDS_TOTAL = counter("run_recovery_seconds_total",
    "Wall clock of the recoveries in run_recoveries_total, from the last report of the ended attempt to the new step, "
    "with down time, startup, restore and re-executed steps. Divided by run_recoveries_total it is the mean time to "
    "recovery.", RUN, "flopwatch.ledger.run")
RUN_INCIDENTS_TOTAL = counter("run_incidents_total", "Incidents by kind and cause, counted when their evidence is "
    "complete. Kinds: end (of an attempt, after which the run went on), slow (a stretch of slow steps), stall (a time "
    "without a step, after which steps went on).", (*RUN, "kind", "cause"), "flopwatch.ledger.attribution")
RUN_BADPUT_GPU_SECONDS_TOTAL = counter("run_badput_gpu_seconds_total",
    "GPU time that the incidents in run_incidents_total cost. end: the open step, down, startup, restore and "
    "re-execution until the next new step. slow, stall: time above the usual, a part of productive, data_stall and "
    "checkpoint_save. No second is in two incidents.", (*RUN, "kind", "cause"), "flopwatch.ledger.attribution")
RUN_STRAGGLER_GPU_SECONDS_TOTAL = counter("run_straggler_gpu_seconds_total",
    "GPU time that the run waited for the ranks in run_straggler_info, a part of productive. Counted from the first of "
    "the intervals that show them to be late. Absent where waits are not measured.", RUN, "flopwatch.ledger.stragglers")
RUN_STRAGGLER_RATIO = gauge("run_straggler_ratio", "Share of each step that the run loses, by what the ledger finds to "
    "be the reason: rank (one or several), host, group (the ranks of one pipeline stage in one replica), link (between "
    "two stages), stage (in all replicas), imbalance (ranks are late in turn), communication (all wait longer than "
    "usual). 0 for all others. Absent where waits are not measured.", (*RUN, "kind"), "flopwatch.verdicts.stragglers")
RUN_STRAGGLER_INFO = info("run_straggler_info", "Late ranks, at most eight, with their host, and kind and ranks of the "
    "finest process group whose other ranks wait for them.", (*RUN, "rank", "host", "group", "ranks"),
    "flopwatch.verdicts.stragglers", key=True)
RUN_STRAGGLER_UNAVAILABLE = gauge("run_straggler_unavailable", "1 with the reason why the ledger cannot tell whether a "
    "rank is late: waits (of a rank are not measured), groups (in which ranks wait are not known), ranks (do not "
    "report, or started again), steps (too few are measured so far).", (*RUN, "reason"), "flopwatch.ledger.stragglers")
RUN_WHATIF_STEP_SECONDS = gauge("run_whatif_step_seconds", "Seconds that a step would take if so many of the late "
    "ranks computed as fast as their peers, and for 0 those it takes now. Absent without a late rank, and where the "
    "waits do not show it.", (*RUN, "mended"), "flopwatch.verdicts.whatif")
RUN_HANG_SECONDS = gauge("run_hang_seconds", "Age of the run's open step while the run hangs: the step is over 15 s "
    "old and over five times the 99th percentile of its steps on all hosts, and no rank calls a collective or, where "
    "these are not counted, no GPU works. Else absent.", RUN, "flopwatch.ledger.hangs")
RUN_HANG_SUSPECT_RATIO = gauge("run_hang_suspect_ratio", "Share of the votes of a hang's signs for the rank, or "
    "without a rank for the host, that the others wait for: at most eight. With its signs, and kind and ranks of the "
    "finest process group in which it has called fewer collectives.",
    (*RUN, "rank", "host", "group", "ranks", "signs"), "flopwatch.verdicts.hangs")
RUN_HANG_SIGN_RANKS = gauge("run_hang_sign_ranks", "Number of ranks that a sign points at while the run hangs: gone, "
    "silent, blocked, data, sequence, gpu, idle, computing, link.", (*RUN, "sign"), "flopwatch.verdicts.hangs")
RUN_ATTEMPT_CONFLICT = gauge("run_attempt_conflict", "1 while two attempts report under the name of this run. The "
    "attempt that started later counts.", RUN, "flopwatch.ledger.run")
RUN_HIGH_WATER_STEPS = gauge("run_high_water_steps", "Highest step the run ever completed.", RUN,
    "flopwatch.ledger.buckets")
RUN_COMMITTED_STEPS = gauge("run_committed_steps", "Step of the run's last durable checkpoint.", RUN,
    "flopwatch.ledger.buckets")
RUN_COMMITTED_TIMESTAMP_SECONDS = gauge("run_committed_timestamp_seconds",
    "Time the run's last durable checkpoint was first reported, as Unix time.", RUN, "flopwatch.ledger.buckets")
RUN_RETAINED_FLOPS_TOTAL = counter("run_retained_flops_total", "Model FLOPs of the steps that raised the high-water "
    "mark. Re-executed steps add nothing.", RUN, "flopwatch.ledger.buckets")
RUN_CAPACITY_FLOPS_TOTAL = counter("run_capacity_flops_total", "Peak FLOP/s of the GPUs held, times the seconds held: "
    "the FLOPs that the GPUs could have executed.", RUN, "flopwatch.ledger.buckets")
RUN_MODEL_FLOPS_TOTAL = counter("run_model_flops_total", "FLOPs the model needs for the run's tokens, with re-executed "
    "steps. Absent unless every rank has an MFU.", RUN, "training_model_flops_total")
RUN_HARDWARE_FLOPS_TOTAL = counter("run_hardware_flops_total", "FLOPs executed for the run's tokens, with "
    "recomputation. Absent unless every rank counts them.", RUN, "training_hardware_flops_total")
RUN_STEP_CAPACITY_FLOPS_TOTAL = counter("run_step_capacity_flops_total", "Dense peak of the ranks' GPUs times "
    "seconds in steps. Absent unless every rank has an MFU.", RUN, "training_capacity_flops_total")
RUN_TOKENS_TOTAL = counter("run_tokens_total", "Tokens of the run, with re-executed steps.", RUN,
    "training_tokens_total")
RUN_STEPS_TOTAL = counter("run_steps_total", "Optimizer steps of the run, with re-executed ones.", RUN,
    "training_step_duration_seconds")
RUN_STEP_SECONDS_TOTAL = counter("run_step_seconds_total", "Duration of run_steps_total.", RUN,
    "training_step_duration_seconds")
RUN_PAGE = gauge("run_page", "1 if the script asks for pages, else 0.", RUN, "flopwatch.training.Run(page=...)")
RUN_START_TIMESTAMP_SECONDS = gauge("run_start_timestamp_seconds",
    "Time of the run's first process start, as Unix time.", RUN, "flopwatch.ledger.run")
