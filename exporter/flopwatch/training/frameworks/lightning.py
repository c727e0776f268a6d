"""Callback for `lightning` and `pytorch_lightning`: `Trainer(..., callbacks=[FlopwatchCallback("llama-8b")])`.

It uses https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html and the batches as the DataLoader yields them
(common.py). A step is a batch in which `trainer.global_step` rose, so accumulation and manual optimization with several
optimizers count once. The checkpoint stores the position as the callback's state. Tried with Lightning 2.6.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common

_lightning = common.framework("lightning.pytorch", "pytorch_lightning")


class FlopwatchCallback(common.ReporterMixin, _lightning.Callback):  # type: ignore[misc,name-defined]  # known at run time
    """Callback that records a trainer's steps in a Run and never raises.

    name           of the run, as for `Run`. Other keywords are Run's arguments, and override the trainer's settings
    tokens         function that returns the tokens of a batch as the loader yields it, if that has no `input_ids`
    convention     for counting FLOPs from the config of a Hugging Face model inside, unless flops_per_token is given
    """

    def __init__(
        self, name: str | None = None, *, tokens: common.TokensOf = None, convention: str = "causal", **run: Any
    ) -> None:
        self._name, self._tokens, self._convention, self._arguments = name, tokens, convention, run
        self._global_step = 0
        self._tokens_position: float | None = 0
        self._restored: dict[str, Any] | None = None

    @common.guarded
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the run at the stage "fit", when the strategy's process group exists."""
        if stage != "fit" or self._session is not None:
            return
        facts = functools.partial(_facts, trainer, self._convention)
        self.run = run = common.begin(self._name, facts, self._arguments)

        def role(_: Any) -> str:
            return "training" if trainer.training and not trainer.sanity_checking else "evaluation"

        self._session = session = common.TrainingSession(run, tokens=self._tokens, role=role)
        models = (pl_module, *pl_module.children())
        model = next((one for one in models if hasattr(getattr(one, "config", None), "model_type")), None)
        session.count_flops(model, given=self._arguments.get("flops_per_token"), convention=self._convention)
        saved = deque[int]()
        common.MethodWrapper(trainer, "save_checkpoint", functools.partial(_save, run, trainer, saved))
        common.MethodWrapper(trainer.strategy, "load_checkpoint", functools.partial(_load, run))
        for logger in trainer.loggers[:1]:
            common.MethodWrapper(logger, "log_metrics", functools.partial(common.log_metrics, run))

    @common.during_run
    def on_train_start(self, session: common.TrainingSession, trainer: Any, pl_module: Any) -> None:
        """Report the position that a checkpoint restored, and watch the model."""
        self._global_step = trainer.global_step
        session.end()
        restored, self._restored = self._restored, None
        if restored is not None:
            session.run.restored(restored["step"], restored["tokens"])
            self._tokens_position = restored["tokens"]
        elif trainer.global_step:
            session.run.restored(trainer.global_step)
            self._tokens_position = None
        session.run.watch(trainer.strategy.model)

    @common.during_run
    def on_train_batch_end(self, session: common.TrainingSession, trainer: Any, *_: Any) -> None:
        """Add the batch to the open step, and record the step if trainer.global_step rose."""
        session.consume(*session.take())
        if trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            tokens = session.step()
            before = self._tokens_position
            self._tokens_position = None if tokens is None or before is None else before + tokens

    @common.during_run
    def on_validation_start(self, session: common.TrainingSession, *_: Any) -> None:
        """Begin an evaluation, unless the first batch of its loader has begun it."""
        session.begin("evaluation")

    @common.during_run
    def on_validation_end(self, session: common.TrainingSession, *_: Any) -> None:
        """End an evaluation."""
        session.end("evaluation")

    @common.during_run
    def on_train_epoch_end(self, session: common.TrainingSession, *_: Any) -> None:
        """End the epoch's loop over batches."""
        session.run.end_of_batches()

    @common.guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the run: stopped by Ctrl-C, preempted by a SIGTERM that Lightning caught, else failed."""
        kind = type(exception).__name__
        self._finish({"KeyboardInterrupt": "stopped", "SIGTERMException": "preempted"}.get(kind, "failed"))

    @common.guarded
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the run: completed if all steps were taken, stopped if a stop was requested before."""
        self._finish("stopped" if trainer.should_stop else "completed")

    def state_dict(self) -> dict[str, Any]:
        """Return the run's completed steps and tokens, to be stored in the checkpoint."""
        position = None if self.run is None else self.run.position
        return {} if position is None else {"step": position, "tokens": self._tokens_position}

    @common.guarded
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the steps and tokens of a loaded checkpoint until training starts."""
        self._restored = {"step": int(state_dict["step"]), "tokens": state_dict["tokens"]}


def _save(
    run: Run,
    trainer: Any,
    saved: deque[int],
    save: Callable[..., Any],
    filepath: Any,
    weights_only: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Save a checkpoint by calling `save`, record its time, and report its step as durable once it is on disk."""
    step, later = run.position, False
    with run.recorder.reporting("save_checkpoint"):
        later = _writes_in_background(run, trainer, saved)
    with run.activity("checkpoint_save"):
        if later and trainer.is_global_zero and step is not None:
            saved.append(-1 if weights_only else step)
        answer = save(filepath, weights_only, *args, **kwargs)
    if not later and not weights_only and step is not None:  # a run cannot resume from weights alone
        run.checkpoint_committed(step)
    return answer


def _writes_in_background(run: Run, trainer: Any, saved: deque[int]) -> bool:
    """Return whether AsyncCheckpointIO's thread writes, and make each write commit the next of `saved` (-1: none)."""
    # https://lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html
    io: Any = getattr(trainer.strategy, "checkpoint_io", None)
    if type(io).__name__ != "AsyncCheckpointIO" or getattr(io, "checkpoint_io", None) is None:
        return False
    if trainer.is_global_zero:  # the only one that writes

        def write(save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            step = saved.popleft() if saved else -1
            with run.background_save():
                save(*args, **kwargs)
            if step >= 0:
                run.checkpoint_committed(step)

        common.MethodWrapper(io.checkpoint_io, "save_checkpoint", write)
    return True


def _load(run: Run, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with run.activity("checkpoint_restore"):
        return load(*args, **kwargs)


def _facts(trainer: Any, convention: str) -> dict[str, Any]:
    # https://lightning.ai/docs/pytorch/stable/extensions/strategy.html
    kind, replica = type(trainer.strategy).__name__, None
    mesh: Any = getattr(trainer.strategy, "device_mesh", None)
    if kind in ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy"):
        replica = 1
    elif kind == "ModelParallelStrategy":  # a mesh of data_parallel and tensor_parallel
        replica = int(mesh["tensor_parallel"].size())
    dtype = common.matmul_dtype(precision=str(trainer.precision))
    parallel = mesh if getattr(mesh, "mesh_dim_names", None) else None
    return {"replica_ranks": replica, "dtype": dtype, "parallel": parallel, "convention": convention}
