"""Training processes: the hook, over OTLP."""

from flopwatch.catalogue.row import RANK, Metric

TRAINING_RUN_INFO = Metric(
    "training_run_info", "info",
    "What the run declared: FLOP convention, matmul dtype, where the peak comes from, owner, team and page policy. "
    "From one rank.",
    (*RANK, "tenant", "attempt", "convention", "dtype", "peak_source", "framework", "owner", "team", "page"),
    "flopwatch.training.Run arguments",
)
TRAINING_RANK_INFO = Metric(
    "training_rank_info", "info", "Where one rank runs: its host and the GPU it declared.",
    (*RANK, "host", "uuid", "local_rank", "attempt"), "flopwatch.training.Run, launcher environment", key=True,
)
TRAINING_WORLD_SIZE = Metric(
    "training_world_size", "gauge", "Ranks in the run. From one rank.", RANK, "launcher environment",
)
TRAINING_POSITION_STEPS = Metric(
    "training_position_steps", "gauge",
    "Optimizer steps of the run completed, restored ones included. A position: never put it under rate().", RANK,
    "run.restored, run.step", key=True,
)
TRAINING_POSITION_TOKENS = Metric(
    "training_position_tokens", "gauge",
    "Tokens of the run consumed by this rank's replica, restored ones included. A position.", RANK,
    "run.restored, run.step",
)
TRAINING_COMMITTED_STEPS = Metric(
    "training_committed_steps", "gauge", "Step of the last durable checkpoint.", RANK, "run.checkpoint_committed",
)
TRAINING_STEPS = Metric(
    "training_steps_total", "counter", "Optimizer steps since the process started, re-executed ones included.", RANK,
    "run.step",
)
TRAINING_TOKENS = Metric(
    "training_tokens_total", "counter",
    "This rank's share of the tokens since the process started (replica tokens / ranks per replica).", RANK,
    "run.step(tokens=...)", key=True,
)
TRAINING_MODEL_FLOPS = Metric(
    "training_model_flops_total", "counter",
    "FLOPs the model needs for this rank's share of the tokens; recomputation is never counted.", RANK,
    "tokens x flopwatch.training.flops per token", key=True,
)
TRAINING_CAPACITY_FLOPS = Metric(
    "training_capacity_flops_total", "counter",
    "Dense peak of this rank's card for the declared dtype x seconds in steps, data stall included.", RANK,
    "flopwatch.training.peaks x step seconds", key=True,
)
TRAINING_PEAK_FLOPS = Metric(
    "training_peak_flops_per_second", "gauge", "Dense peak FLOP/s of this rank's card for the declared dtype.", RANK,
    "flopwatch.training.peaks, or declared",
)
TRAINING_MFU_UNAVAILABLE = Metric(
    "training_mfu_unavailable", "gauge", "1 with the reason why this rank has no MFU.", (*RANK, "reason"),
    "flopwatch.training.hook",
)
TRAINING_ACTIVITY_SECONDS = Metric(
    "training_activity_seconds_total", "counter",
    "Wall clock of this process by activity: startup, step, compile, data_stall, checkpoint_save, "
    "checkpoint_restore, evaluation, other. Exclusive, and they sum to the process's age.",
    (*RANK, "activity"), "monotonic clock of the training process",
)
TRAINING_COLLECTIVE_WAIT = Metric(
    "training_collective_wait_seconds_total", "counter",
    "Time this rank waited for others in collectives, in measured steps. The late rank waits least.", RANK,
    "flopwatch.training.torch: autograd-engine callbacks around DDP's reducer",
)
TRAINING_MEASURED_STEP_SECONDS = Metric(
    "training_measured_step_seconds_total", "counter",
    "Step time of the steps in which the wait was measured. A step next to a checkpoint or evaluation is not.", RANK,
    "flopwatch.training.hook",
)
TRAINING_MEASURED_STEPS = Metric(
    "training_measured_steps_total", "counter", "Steps in which the wait was measured.", RANK,
    "flopwatch.training.hook",
)
TRAINING_STEP_DURATION = Metric(
    "training_step_duration_seconds", "histogram", "Duration of optimizer steps. From one rank.", RANK,
    "flopwatch.training.hook",
)
TRAINING_LOSS = Metric(
    "training_loss", "gauge", "Loss last reported.", RANK, "run.step(loss=...)",
)
TRAINING_HOOK_ERRORS = Metric(
    "training_hook_errors_total", "counter", "Errors the hook swallowed to keep the training loop running.", RANK,
    "flopwatch.training.hook",
)
