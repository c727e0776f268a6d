"""Functions for Megatron-LM, called by lines that docs/frameworks.md adds to its training.py and checkpointing.py.

FLOPs (convention `causal`), samples and real tokens are those that Megatron's loop computes anyway. Run finds the
parallel coordinates in Megatron's own state. Written from its code at d98e8a6 and not run, because that needs a GPU.
Absent: loss, which stays on the device, and data stall, since the batch is fetched inside the forward pass.
"""

from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common

run: Run | None = None


def begin(args: Any, **arguments: Any) -> None:
    """Make the Run from Megatron's arguments `args` and from arguments of Run. Call it when training begins."""
    global run
    try:
        # Megatron's fp4 and fp8 runs have matmuls of two dtypes. With the faster one's peak, MFU is never too high.
        low = next((name for name in ("fp4", "fp8") if getattr(args, name, None)), None)
        dtype = low or ("bf16" if args.bf16 else "fp16" if args.fp16 else "tf32")
        run = Run(**{"step_source": "trainer", "convention": "causal", "dtype": dtype, **arguments})
        if args.iteration:
            consumed = args.consumed_train_samples * args.seq_length
            run.restored(args.iteration, consumed / _replicas(args))
    except Exception as error:
        common.failed(run, "begin", error)


def _replicas(args: Any) -> int:
    """Return how many groups of ranks share the batch. Megatron's data_parallel_size excludes weight sharding (gtp)."""
    return int(args.data_parallel_size) * int(getattr(args, "gtp_weight_remat_size", None) or 1)


def step(args: Any, samples: int, flops: float, tokens: float | None = None) -> None:
    """Record an iteration with the samples, FLOPs and, needed only if samples are packed, tokens of all ranks."""
    if run is not None:
        with run.recorder.reporting("step"):
            replicas = _replicas(args)
            tokens = samples * args.seq_length if tokens is None else tokens
            run.step(global_tokens=tokens, flops=flops / replicas, samples=samples / replicas)


def enter(activity: str) -> None:
    """Begin the activity `evaluation` or `checkpoint_save`."""
    if run is not None:
        run.recorder.enter(activity)


def leave(activity: str) -> None:
    """End the activity that `enter` began."""
    if run is not None:
        run.recorder.leave(activity)


def committed(iteration: int) -> None:
    """Record that the checkpoint of this iteration is on disk."""
    if run is not None:
        run.checkpoint_committed(iteration)


def finish(status: str = "completed") -> None:
    """Finish the run. Pass `preempted` where Megatron exits before its last iteration."""
    if run is not None:
        run.finish(status)
