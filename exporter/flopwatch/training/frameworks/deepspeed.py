"""Callback for DeepSpeed: call `watch(engine)` after `deepspeed.initialize(...)`.

A step is a rise of `engine.global_steps`, once per gradient accumulation. Updates that an overflow skipped count too,
because checkpoints count them. Written from the code of 0.19.6, and tested with an engine that behaves as documented.
Under pipeline parallelism only the first and last stage load batches: pass tokens_per_step.
https://deepspeed.readthedocs.io/en/latest/training.html
"""

from collections.abc import Callable
from typing import Any

from flopwatch.training import Run
from flopwatch.training.frameworks import common


def watch(
    engine: Any,
    name: str | None = None,
    *,
    tokens: common.TokensOf = None,
    tokens_per_step: int | None = None,
    convention: str = "causal",
    **run: Any,
) -> Run:
    """Return a Run that records this engine's training loop from now on.

    name             of the run, as for `Run`. Other keywords are Run's arguments, and override the engine's settings
    tokens           function that returns the tokens of a batch as the loader yields it, if that has no `input_ids`
    tokens_per_step  tokens of all ranks in one update, in place of `tokens`
    convention       for counting FLOPs from a Hugging Face model's config, unless flops_per_token is given
    """
    watched = common.begin(name, lambda: {**_facts(engine), "convention": convention}, run)
    with watched.recorder.reporting("watch"):
        # An engine is a module, whose mode shows the purpose of the loaded batches.
        roles = {True: "training", False: "evaluation"}
        session = common.TrainingSession(watched, tokens=tokens, role=lambda _: roles[engine.module.training])
        session.count_flops(engine.module, given=run.get("flops_per_token"), convention=convention)
        steps(session, engine, tokens_per_step)
        checkpoints(watched, engine)
        watched.watch(engine.module)
    return watched


def _facts(engine: Any) -> dict[str, Any]:
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "32"
    if getattr(engine, "torch_autocast_enabled", bool)():
        precision = str(engine.torch_autocast_dtype())
    parallel = engine.mpu if hasattr(engine.mpu, "get_data_parallel_rank") else None
    replica = common.framework("torch.distributed").get_world_size() // engine.dp_world_size
    return {"dtype": common.matmul_dtype(precision=precision), "parallel": parallel, "replica_ranks": replica}


def steps(session: common.TrainingSession, engine: Any, tokens_per_step: int | None = None) -> None:
    """Record the engine's updates as steps. `tokens_per_step`, of all ranks, replaces counting the batches' tokens."""
    run, updates = session.run, engine.global_steps

    def step(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal updates
        answer = method(*args, **kwargs)
        with run.recorder.reporting("look"):
            before, updates = updates, engine.global_steps
            if updates <= before:
                return answer
            fetched = session.take_all()
            if tokens_per_step is None:
                session.end()
                session.consume(*fetched)
                session.step()
            else:
                run.step(global_tokens=tokens_per_step)
            norm = engine.get_global_grad_norm()
            if isinstance(norm, (int, float)):
                run.logged(grad_norm=norm)
        return answer

    def evaluate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with run.activity("evaluation"):
            return method(*args, **kwargs)

    for name, around in (("step", step), ("train_batch", step), ("eval_batch", evaluate)):
        if hasattr(type(engine), name):  # the last two are the pipeline engine's
            common.MethodWrapper(engine, name, around)


def checkpoints(run: Run, engine: Any) -> None:
    """Record checkpoints that the engine saves and restores."""

    def save(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = engine.global_steps
        with run.activity("checkpoint_save"):
            answer = method(*args, **kwargs)
        if not decoupled:
            run.checkpoint_committed(step)
        else:
            saved.append(step)
        return answer

    def commit(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if answer is not False and saved:
            run.checkpoint_committed(saved.pop())
            saved.clear()
        return answer

    def load(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with run.activity("checkpoint_restore"):
            answer = method(*args, **kwargs)
        path = answer[0] if isinstance(answer, tuple) else None
        if path is not None and not kwargs.get("load_module_only", False):
            run.restored(engine.global_steps)
        return answer

    saved: list[int] = []
    writer = getattr(engine, "checkpoint_engine", None)
    decoupled = bool(getattr(writer, "is_decoupled", bool)())
    common.MethodWrapper(engine, "save_checkpoint", save)
    common.MethodWrapper(engine, "load_checkpoint", load)
    if decoupled:
        common.MethodWrapper(writer, "commit", commit)
