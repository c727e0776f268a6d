"""Callback for the Hugging Face Trainer: `Trainer(..., callbacks=[FlopwatchCallback("llama-8b")])`.

It uses https://huggingface.co/docs/transformers/main_classes/callback and the batches as the DataLoader yields them
(common.py). Tried with transformers 5.23, and written for 4.46 and newer, which fetch all micro-batches of an update
first. No event marks the begin of an evaluation or a save. An evaluation begins with the first batch of its loader, and
a save when the trainer's control announces it.
"""

import functools
from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common

_transformers = common.framework("transformers")


class FlopwatchCallback(common.ReporterMixin, _transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # known at run time
    """Callback that records a trainer's steps in a Run and never raises.

    name           of the run, as for `Run`. Other keywords are Run's arguments, and override the trainer's settings
    tokens         function that returns the tokens of a batch as the loader yields it, if that has no `input_ids`
    convention     for counting FLOPs from the model's config, unless flops_per_token is given
    """

    def __init__(
        self, name: str | None = None, *, tokens: common.TokensOf = None, convention: str = "causal", **run: Any
    ) -> None:
        self._name, self._tokens, self._convention, self._arguments = name, tokens, convention, run
        self._counts = True  # whether this rank's loader yields this rank's batches
        self._tokens_seen = 0

    @common.guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Make the run, or continue it after auto_find_batch_size reduced the batch size."""
        if self.run is None or self._session is None:
            facts = functools.partial(_facts, args, model, self._convention)
            self.run = common.begin(self._name, facts, self._arguments)
        self._begin(self.run, args, model, others.get("train_dataloader"))
        if state.global_step or self.run.position:
            seen = state.num_input_tokens_seen
            self.run.restored(state.global_step, seen / args.world_size if seen else None)
        self._tokens_seen = state.num_input_tokens_seen

    def _begin(self, run: Run, args: Any, model: Any, loader: Any) -> None:
        def role(other: Any) -> str:
            if common.same_batches(other, loader):
                return "training"
            return "other" if model.training else "evaluation"

        self._session = common.TrainingSession(run, role=role, tokens=self._tokens)
        self._counts = not (common.dispatches(loader, args.world_size) or common.splits_sequences())
        # A process that spreads the model over several cards has one card's peak: no MFU rather than a wrong one.
        if args.n_gpu <= 1 and len(set(getattr(model, "hf_device_map", {}).values())) <= 1:
            self._session.count_flops(model, given=self._arguments.get("flops_per_token"), convention=self._convention)
        common.watch(run, model)

    @common.during_run
    def on_step_begin(self, session: common.TrainingSession, *_: Any, **__: Any) -> None:
        """End the open activity, since the step's batches have arrived."""
        session.end()

    @common.during_run
    def on_substep_end(self, session: common.TrainingSession, *_: Any, **__: Any) -> None:
        """Add a micro-batch to the open step."""
        self._consume(session)

    def _consume(self, session: common.TrainingSession) -> None:
        batches = session.take()
        session.consume(*(batches if self._counts else [common.Batch()]))

    @common.during_run
    def on_step_end(self, session: common.TrainingSession, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record a step with its batches, and begin a checkpoint save if one follows."""
        self._consume(session)
        # The trainer adds up the tokens seen on all ranks, and each rank of a replica counts the same tokens.
        seen, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        session.step(seen / args.world_size if seen > 0 else None)
        self._before_saving(session, args, control)

    def _before_saving(self, session: common.TrainingSession, args: Any, control: Any, evaluated: bool = False) -> None:
        by_metric = evaluated and str(getattr(args.save_strategy, "value", args.save_strategy)) == "best"
        saves = (control.should_save or by_metric) and (evaluated or not control.should_evaluate)
        if saves:
            session.begin("checkpoint_save")

    @common.during_run
    def on_log(self, session: common.TrainingSession, *_: Any, logs: Any = None, **__: Any) -> None:
        """Report the logged loss and grad_norm as the last step's."""
        if logs is not None:
            common.report_logged(session.run, {n: logs[n] for n in ("loss", "grad_norm") if n in logs})

    @common.during_run
    def on_prediction_step(self, session: common.TrainingSession, *_: Any, **__: Any) -> None:
        """Begin an evaluation, unless the first batch of its loader has begun it."""
        session.begin("evaluation")

    @common.during_run
    def on_evaluate(self, session: common.TrainingSession, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an evaluation, and begin a checkpoint save if one follows."""
        session.end("evaluation")
        self._before_saving(session, args, control, evaluated=True)

    @common.during_run
    def on_predict(self, session: common.TrainingSession, *_: Any, **__: Any) -> None:
        """End a prediction, which counts as evaluation."""
        session.end("evaluation")

    @common.during_run
    def on_save(self, session: common.TrainingSession, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the checkpoint as durable on the main process, which writes last. Weights alone do not count."""
        session.end("checkpoint_save")
        if state.is_world_process_zero and not getattr(args, "save_only_model", False):
            session.run.checkpoint_committed(state.global_step)

    @common.during_run
    def on_epoch_end(self, session: common.TrainingSession, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the loop over batches. An evaluation or a save of the epoch may follow."""
        session.end()
        session.run.end_of_batches()
        self._before_saving(session, args, control)

    @common.guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finish the run: completed if all steps were taken, else stopped."""
        self._finish("completed" if state.global_step >= state.max_steps else "stopped")


def _facts(args: Any, model: Any, convention: str) -> dict[str, Any]:
    replica, mesh = common.accelerate_replica()
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else str(getattr(model, "dtype", "32"))
    # Accelerate's fp8 replaces what the arguments say (ACCELERATE_MIXED_PRECISION, `accelerate launch`).
    precision = "fp8" if common.accelerate_precision() == "fp8" else precision
    dtype = common.matmul_dtype(precision=precision)
    return {"replica_ranks": replica, "parallel": mesh, "dtype": dtype, "convention": convention}
