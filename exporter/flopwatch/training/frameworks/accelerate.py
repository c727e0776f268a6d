"""Callback for Accelerate: call `watch(accelerator)` after `accelerator.prepare(...)`.

A step ends with the first prepared optimizer's own step. With gradient accumulation that is once per update, and a step
that a loss scaler skips does not count. Methods of this accelerator are replaced, because Accelerate has no hooks after
them. Absent: everything under Megatron-LM, and under `dispatch_batches` on several ranks the tokens of batches with an
attention mask on a device. Tried with Accelerate 1.15.
https://huggingface.co/docs/accelerate/package_reference/accelerator
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common

_accelerate = common.framework("accelerate")

POSITION = "flopwatch.json"


def watch(
    accelerator: Any, name: str | None = None, *, tokens: common.TokensOf = None, convention: str = "causal", **run: Any
) -> Run:
    """Return a Run that records this accelerator's training loop from now on.

    name           of the run, as for `Run`. Other keywords are Run's arguments, and override Accelerate's settings
    tokens         function that returns the tokens of a batch as the loader yields it, if that has no `input_ids`
    convention     for counting FLOPs from a Hugging Face model's config, unless flops_per_token is given
    """
    watched = common.begin(name, lambda: {**_facts(accelerator), "convention": convention}, run)
    with watched.recorder.reporting("watch"):
        _Loop(accelerator, watched, tokens, convention, run.get("flops_per_token"))
    return watched


def _facts(accelerator: Any) -> dict[str, Any]:
    replica, mesh = common.accelerate_replica()
    precision = str(accelerator.mixed_precision)
    if precision == "no":
        precision = next((str(p.dtype) for model in accelerator._models for p in model.parameters()), "32")
    return {"replica_ranks": replica, "parallel": mesh, "dtype": common.matmul_dtype(precision=precision)}


class _Loop:
    def __init__(self, accelerator: Any, run: Run, tokens: common.TokensOf, convention: str, flops: Any) -> None:
        global _watching
        self.run, self._accelerator, self._tokens = run, accelerator, tokens
        if not accelerator._optimizers:
            raise RuntimeError("no optimizer was prepared yet; call watch() after accelerator.prepare()")
        self._session = common.TrainingSession(run, role=self._role, tokens=tokens)
        self._hook: Any = None
        model = accelerator.unwrap_model(accelerator._models[0]) if accelerator._models else None
        self._session.count_flops(model, given=flops, convention=convention)
        if _watching is not None:
            _watching.detach()
        _watching = self
        module = common.framework("accelerate.data_loader")
        for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
            common.around_iter(kind, _begin)
        engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        if engine is None:
            self._hook = accelerator._optimizers[0].optimizer.register_step_post_hook(self._step)
        else:  # it steps by itself, inside accelerator.backward
            from flopwatch.training.frameworks import deepspeed

            deepspeed.steps(self._session, engine)
        for method in ("save_state", "load_state", "log", "end_training"):
            common.MethodWrapper(accelerator, method, getattr(self, f"_{method}"))
        for model in accelerator._models[:1]:
            common.watch(run, model)

    def _role(self, loader: Any) -> str:
        prepared, models = self._accelerator._dataloaders, self._accelerator._models
        first = bool(prepared) and common.same_batches(loader, prepared[0])
        return "training" if first or any(model.training for model in models) else "evaluation"

    def _step(self, *_: Any) -> None:
        with self.run.recorder.reporting("_step"):
            self._session.end()
            self._session.step()

    def batches(self, loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of `iterator`. If `loader` is for training, count them."""
        training = False
        with self.run.recorder.reporting("batches"):
            training = self._role(loader) == "training"
        own = not common.dispatches(loader, self.run.world_size)
        try:
            for batch in iterator:
                if training:
                    self._take(loader if own else None, batch)
                yield batch
        finally:
            with self.run.recorder.reporting("_ends"):
                if training:
                    self.run.end_of_batches()
                else:
                    self._session.end("evaluation")

    def _take(self, loader: Any, batch: Any) -> None:
        session = self._session
        with self.run.recorder.reporting("_take"):
            batches = [common.count(batch, self._tokens)] if loader is None else session.take(loader)
            session.consume(*([common.Batch()] if common.splits_sequences() else batches))

    def _save_state(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        position = self.run.position if self._accelerator.is_main_process else None
        with self.run.activity("checkpoint_save"):
            where = save(*args, **kwargs)
            if position is not None and where is not None:
                with self.run.recorder.reporting("_write"):
                    (Path(where) / POSITION).write_text(json.dumps({"step": position}))
        if position is not None:
            self.run.checkpoint_committed(position)
        return where

    def _load_state(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.run.activity("checkpoint_restore"):
            answer = load(*args, **kwargs)
            with self.run.recorder.reporting("_restored"):
                self._restored(args[0] if args else kwargs.get("input_dir"))
        return answer

    def _restored(self, where: Any) -> None:
        file = None if where is None else Path(where) / POSITION
        if file is not None and file.exists():
            position = int(json.loads(file.read_text())["step"])
        else:
            states = self._accelerator._optimizers[0].state.values()
            # This waits for the device, once and outside the loop.
            position = max((int(state["step"]) for state in states if "step" in state), default=0)
        self.run.restored(position or None)
        if not position:
            raise RuntimeError("the checkpoint has no step; call run.restored(step=...)")

    def _log(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.run.recorder.reporting("_logged"):
            common.report_logged(self.run, (args[0] if args else kwargs.get("values")) or {})
        return log(*args, **kwargs)

    def _end_training(self, end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _watching
        answer = end(*args, **kwargs)
        with self.run.recorder.reporting("_finish"):
            _watching = None
            self.detach()
            self._session.finish("completed")
        return answer

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()


_watching: _Loop | None = None


def _begin(loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    loop = _watching
    return original(loader) if loop is None else loop.batches(loader, original(loader))
