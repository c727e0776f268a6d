"""Logging handler that records torchtitan's events. TITAN_STRUCT_LOGGER_HANDLERS enables it (docs/frameworks.md).

Events do not contain the trainer, so it is looked up among the callers of the event `training_start`. If it is not
found, FLOPs, parallel degrees, loss and checkpoints are absent. It needs torchtitan 0.3.0, whose code was not run here:
https://github.com/pytorch/torchtitan/blob/main/torchtitan/observability/structured_logger/README.md
"""

import functools
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common

_ACTIVITIES = {"eval": "evaluation", "checkpoint_load": "checkpoint_restore"}


def register(*, structured_logger: logging.Logger, run: Mapping[str, Any] | None = None, **_: Any) -> None:
    """Attach the handler to torchtitan's logger. torchtitan calls this. Your own function may, with Run's arguments."""
    structured_logger.addHandler(Handler(run or {}))


class Handler(common.ReporterMixin, logging.Handler):
    """Logging handler that records torchtitan's events in a Run and never raises."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        super().__init__()
        self._arguments = run
        self._thread = threading.get_ident()
        self._trainer: Any = None
        self._tokens: int | None = None
        self._seen = 0  # tokens up to the step
        self._failed_update = False
        self._located = False  # whether the first step was seen

    @common.guarded
    def emit(self, record: logging.LogRecord) -> None:
        """Record one event of torchtitan. Events of other threads than the training loop's are ignored."""
        event = getattr(record, "log_type_name", None)
        if record.thread != self._thread or event is None:
            return
        if event == "training_start":
            self._begin()
        elif self.run is not None:
            self._take(self.run, event, record)

    def _take(self, run: Run, event: str, record: Any) -> None:
        if event == "step_start":
            if not self._located and record.step > 1:
                run.restored(record.step - 1)
            self._located, self._tokens, self._seen = True, None, self._seen_tokens()
        elif event == "fetching_batch_start":
            run.waiting_for_batch()
        elif event == "fetching_batch_end":
            run.got_batch()
        elif event == "metric_value" and record.event_name == "local_valid_tokens":
            self._tokens = record.value
        elif event in ("optim_start", "optim_error"):
            self._failed_update = event == "optim_error"
        elif event == "optim_end" and not self._failed_update:
            # The event leaves masked tokens out, such as prompts in fine-tuning, but they are computed too.
            run.step((self._seen_tokens() - self._seen) or self._tokens)
        elif event in ("eval_start", "checkpoint_load_start"):
            run.recorder.enter(_ACTIVITIES[event.removesuffix("_start")])
        elif event in ("eval_end", "checkpoint_load_end"):
            run.recorder.leave(_ACTIVITIES[event.removesuffix("_end")])
        elif event == "torch_distributed_teardown_start":
            trainer = self._trainer
            whole = trainer is None or trainer.step >= trainer.config.training.steps
            run.finish("completed" if whole else "stopped")

    def _seen_tokens(self) -> int:
        """Return the tokens of this rank's replica. torchtitan counts those of a rank's part of the sequences."""
        trainer = self._trainer
        return 0 if trainer is None else getattr(trainer, "ntokens_seen", 0) * getattr(trainer.parallel_dims, "cp", 1)

    def _begin(self) -> None:
        trainer = self._trainer = _trainer()
        self.run = run = common.begin(None, lambda: {} if trainer is None else _facts(trainer), self._arguments)
        if trainer is None:
            return
        common.MethodWrapper(trainer.metrics_processor.logger, "log", functools.partial(common.log_metrics, run))
        if getattr(trainer.checkpointer, "enable", False):
            common.MethodWrapper(trainer.checkpointer, "save", functools.partial(_save, run, trainer.checkpointer))
        for model in trainer.model_parts[:1]:
            run.watch(model)


def _trainer() -> Any:
    """Return the trainer among the callers' `self`, None if there is none."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((one for one in owners if hasattr(one, "metrics_processor") and hasattr(one, "parallel_dims")), None)


def _facts(trainer: Any) -> dict[str, Any]:
    """Return arguments of Run from a trainer. FLOPs are left out if matmuls are quantized, as their dtypes differ."""
    dims, metrics, training = trainer.parallel_dims, trainer.metrics_processor, trainer.config.training
    groups = {}
    for name, axis in (("dp", "batch"), ("tp", "tp"), ("pp", "pp"), ("cp", "cp"), ("ep", "ep")):
        if (mesh := dims.get_optional_mesh(axis)) is not None:
            groups[name] = (mesh.get_local_rank(), mesh.size())
    # torchtitan installs the mixed precision even if nothing is sharded (apply_fsdp in its parallelize functions).
    precision = training.dtype if training.dtype == "bfloat16" else training.mixed_precision_param
    dtype = common.matmul_dtype(precision=precision)
    facts = {"replica_ranks": dims.non_data_parallel_size, "parallel": groups, "dtype": dtype}
    if not metrics.has_quantization and metrics.num_flops_per_token > 0:
        facts |= {"flops_per_token": metrics.num_flops_per_token, "convention": "full"}
    return facts


def _save(
    run: Run, checkpointer: Any, save: Callable[..., bool], step: int, last_step: bool = False, **kwargs: Any
) -> bool:
    """Call torchtitan's `save`, and record the checkpoint once it is written, unless it has only weights."""
    before = getattr(checkpointer, "save_future", None)
    saves = False
    with run.recorder.reporting("checkpoint"):
        saves = bool(checkpointer._should_save(step, last_step))
    if not saves:
        return save(step, last_step, **kwargs)
    with run.activity("checkpoint_save"):
        saved = save(step, last_step, **kwargs)
    with run.recorder.reporting("checkpoint"):
        if saved and not (last_step and checkpointer.last_save_model_only):  # a run cannot resume from weights alone
            future = checkpointer.save_future
            if future is None or future is before:
                run.checkpoint_committed(step)
            else:
                run.checkpoint_goes_on(future, step)
    return saved
