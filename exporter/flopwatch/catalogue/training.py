"""Rows of training processes, which the hook pushes over OTLP.

Series about the whole run have no label `rank` and a budget of their own. The lowest rank that has them reports them.
"""

from flopwatch.catalogue.row import RANK, counter, gauge, histogram, info, sparse

_RUN = ("run",)
PHASES = ("host_to_device", "forward", "backward", "optimizer", "garbage_collection")

# fmt: off
TRAINING_RUN_INFO = info("training_run_info",
    "Declarations of the run: FLOP convention, matmul dtype, source of the peak, owner, team and page policy. Reported "
    "by one rank.", (*_RUN, "tenant", "attempt", "convention", "dtype", "flops_source", "peak_source", "step_source",
    "framework", "owner", "team", "page", "external_id"), "flopwatch.training.Run arguments")
TRAINING_RANK_INFO = info("training_rank_info",
    "Host of one rank, the GPU it declared, and its coordinates in the data, tensor, pipeline, context and expert "
    "parallel groups.", (*RANK, "host", "uuid", "local_rank", "attempt", "dp", "tp", "pp", "cp", "ep"),
    "flopwatch.training.Run, launcher environment, device mesh", key=True)
TRAINING_WORLD_SIZE = gauge("training_world_size", "Ranks in the run. Reported by one rank.", _RUN,
    "launcher environment")
TRAINING_POSITION_STEPS = gauge("training_position_steps", "Completed optimizer steps of the run, including restored "
    "ones. A position in the training: never use it under rate().", RANK, "run.restored, run.step", key=True)
TRAINING_POSITION_TOKENS = gauge("training_position_tokens", "Tokens of the run consumed by this rank's replica, "
    "including restored ones. A position in the training: never use it under rate().", RANK, "run.restored, run.step")
TRAINING_COMMITTED_STEPS = gauge("training_committed_steps",
    "Step of the last durable checkpoint that this rank reported.", RANK, "run.checkpoint_committed")
TRAINING_STEPS_TOTAL = counter("training_steps_total",
    "Optimizer steps since the process started, including re-executed ones.", RANK, "run.step")
TRAINING_TOKENS_TOTAL = counter("training_tokens_total", "This rank's share of the tokens since the process started "
    "(replica tokens / ranks per replica).", RANK, "run.step(tokens=...)")
TRAINING_SAMPLES_TOTAL = counter("training_samples_total", "This rank's share of the training samples since the "
    "process started (replica samples / ranks per replica).", RANK, "run.step(samples=...)")
TRAINING_MODEL_FLOPS_TOTAL = counter("training_model_flops_total", "FLOPs the model needs for this rank's share of the "
    "tokens. Recomputation is never counted.", RANK, "tokens x flopwatch.flops per token", key=True)
TRAINING_HARDWARE_FLOPS_TOTAL = counter("training_hardware_flops_total",
    "FLOPs executed for this rank's share of the tokens, including recomputation, by the declared recomputation "
    "policy.", RANK, "tokens x Run(hardware_flops_per_token=...)")
TRAINING_CAPACITY_FLOPS_TOTAL = counter("training_capacity_flops_total",
    "Dense peak of this rank's GPU for the declared dtype times seconds in steps, data stall included.", RANK,
    "flopwatch.flops.peaks x step seconds", key=True)
TRAINING_PEAK_FLOPS_PER_SECOND = gauge("training_peak_flops_per_second",
    "Dense peak FLOP/s of this rank's GPU for the declared dtype.", RANK, "flopwatch.flops.peaks, or declared")
TRAINING_MFU_UNAVAILABLE = gauge("training_mfu_unavailable", "1 with the reason why this rank has no MFU. Absent if "
    "the rank has an MFU.", (*RANK, "reason"), "flopwatch.training.run")
TRAINING_ACTIVITY_SECONDS_TOTAL = sparse(counter("training_activity_seconds_total", "Wall clock of this process by "
    "activity: startup, step, compile, data_stall, checkpoint_save, checkpoint_restore, evaluation, "
    "generation, other. Activities are "
    "exclusive and sum to the process's age.", (*RANK, "activity"), "monotonic clock of the training process"))
TRAINING_MISSED_MARKS_TOTAL = counter("training_missed_marks_total", "Points in the GPU's work whose time is unknown, "
    "because no CUDA event was free. Their steps are not measured. Absent while there are none.", RANK,
    "flopwatch.training.torch.device")
TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL = counter("training_checkpoint_background_seconds_total",
    "Time in which checkpoints were written while training went on. Not part of training_activity_seconds_total.", RANK,
    "run.background_save, distributed checkpoint's future")
TRAINING_LAST_STEP_TIMESTAMP_SECONDS = gauge("training_last_step_timestamp_seconds",
    "Time this rank's last optimizer step ended, as Unix time.", RANK, "run.step")
TRAINING_PHASE_SECONDS_TOTAL = counter("training_phase_seconds_total",
    "Time in a phase of the measured steps: host_to_device, forward, backward, optimizer, garbage_collection. Phases "
    "may overlap. Absent for a phase that cannot be measured.", (*RANK, "phase"), "flopwatch.training.torch.phases")
TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL = counter("training_collective_wait_seconds_total",
    "Time of collectives that computation did not hide, in measured steps: wait for other ranks, and transfer. The "
    "straggler has the least.", RANK,
    "flopwatch.training.torch.waits")
TRAINING_GROUP_WAIT_SECONDS_TOTAL = counter("training_group_wait_seconds_total",
    "The part of training_collective_wait_seconds_total that a rank waited in one process group, by the group's kind "
    "(tp, cp, ep, pp, dp, world, group) and ranks. Absent where one group has all ranks of the job. Sent to the "
    "ledger, not served.",
    (*RANK, "group", "ranks"), "flopwatch.training.torch.groups")
TRAINING_COLLECTIVE_WAIT_UNAVAILABLE = gauge("training_collective_wait_unavailable",
    "1 with the reason why this rank's wait for other ranks is not measured. Absent if it is measured.",
    (*RANK, "reason"), "flopwatch.training.torch.waits")
TRAINING_MEASURED_STEP_SECONDS_TOTAL = counter("training_measured_step_seconds_total",
    "Duration of the steps in which training_collective_wait_seconds_total was measured. Steps next to a checkpoint or "
    "evaluation are left out.", RANK, "flopwatch.training.run")
TRAINING_MEASURED_STEPS_TOTAL = counter("training_measured_steps_total",
    "Steps in which training_collective_wait_seconds_total was measured.", RANK, "flopwatch.training.run")
TRAINING_MEASURED_TOKENS_TOTAL = counter("training_measured_tokens_total",
    "This rank's share of the tokens in the steps of training_measured_steps_total. Sent to the ledger, not served.",
    RANK, "flopwatch.training.run")
TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL = counter("training_computing_square_seconds_total",
    "Sum of the squares of the seconds in each step of training_measured_steps_total in which this rank did not "
    "wait. It shows how much steps vary. Sent to the ledger, not served.", RANK, "flopwatch.training.run")
TRAINING_SAMPLED_EVERY_STEPS = gauge("training_sampled_every_steps",
    "Phases and waits are measured in one of this many steps. Reported by one rank.", _RUN, "flopwatch.training.run")
TRAINING_COLLECTIVE_SEQUENCE_NUMBER = gauge("training_collective_sequence_number",
    "Sequence number of the last collective this rank started in the default process group. In a hang, the other ranks "
    "wait for the rank with the lowest number. Absent if the backend of the group has no such numbers.", RANK,
    "torch.distributed's default process group")
TRAINING_GROUP_SEQUENCE_NUMBER = gauge("training_group_sequence_number",
    "Sequence number of the last collective this rank started in a process group other than the default one, by the "
    "group's kind and ranks. For two neighbours of a pipeline, number of messages in one direction (pp_forward, "
    "pp_backward). Sent to the ledger, not served.",
    (*RANK, "group", "ranks"), "torch.distributed's process groups")
TRAINING_STUCK_FRAME_INFO = info("training_stuck_frame_info",
    "Line of the job's own code at which this rank's training loop is stuck. Absent unless its current step is "
    "unusually long.", (*RANK, "at"), "Python's frames, in the thread that pushes")
TRAINING_STEP_DURATION_SECONDS = histogram("training_step_duration_seconds",
    "Duration of optimizer steps. Reported by one rank.", _RUN, "flopwatch.training.run")
TRAINING_STEP_PERCENTILE_SECONDS = gauge("training_step_percentile_seconds",
    "Duration that this percentage of the last five minutes' optimizer steps did not exceed, of 100 steps at least "
    "and of 1,000 at most. Reported by one rank.", (*_RUN, "percentile"), "flopwatch.training.run")
TRAINING_LOSS = gauge("training_loss", "Last loss of a step. Reported by one rank.", _RUN, "run.step(loss=...)")
TRAINING_GRAD_NORM = gauge("training_grad_norm", "Last norm of the gradients. Reported by one rank.", _RUN,
    "run.step(grad_norm=...)")
TRAINING_NONFINITE_TOTAL = counter("training_nonfinite_total", "Steps whose loss or grad_norm was NaN or infinite. "
    "Reported by one rank.", (*_RUN, "value"), "run.step(loss=..., grad_norm=...)")
TRAINING_LOSS_SPIKES_TOTAL = counter("training_loss_spikes_total", "Steps whose loss was far above the mean of the "
    "steps before, relative to their spread. Reported by one rank.", _RUN, "run.step(loss=...)")
TRAINING_DISCARDED_BACKWARD_TOTAL = counter("training_discarded_backward_total",
    "Backward passes whose gradients no optimizer step used. Reported by one rank.", _RUN, "flopwatch run")
TRAINING_RECOMPILATIONS_TOTAL = counter("training_recompilations_total", "Times torch.compile recompiled a frame.",
    RANK, "Dynamo's callbacks")
TRAINING_ALLOCATOR_RETRIES_TOTAL = counter("training_allocator_retries_total",
    "Times PyTorch's CUDA allocator had to free its cache and try again.", RANK, "torch.cuda.memory_stats")
TRAINING_OUT_OF_MEMORY_TOTAL = counter("training_out_of_memory_total",
    "Times PyTorch's CUDA allocator found no memory.", RANK, "torch.cuda.memory_stats")
TRAINING_ALLOCATOR_UNUSED_BYTES = gauge("training_allocator_unused_bytes", "GPU memory that PyTorch's allocator "
    "reserved but does not use.", RANK, "torch.cuda.memory_stats, reserved less allocated")
TRAINING_HOOK_ERRORS_TOTAL = counter("training_hook_errors_total",
    "Errors the hook caught to keep the training loop running.", RANK, "flopwatch.training.run")
