"""Run a small job again and again, each time with another function of the hook raising; print what that changed.

    python -m tests.support.hook_internals plain|torch

A process of its own for test_hook_faults.py, because it breaks what other tests need. It prints JSON: the functions
that were broken, and those of them that the job felt. Left whole is what stops errors: a function that is one `try`,
and OUTERMOST. Of what is decorated with _guarded the inside raises.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from flopwatch.training import Run

PACKAGE = "flopwatch.training"
# What the loop calls, and instruments: it makes an object, appends to a deque or sets a field, and calls no more.
OUTERMOST = {
    "run.Run.activity",
    "run.Run.batches",
    "run.Run.position",
    "run.Run.waiting_for_batch",
    "run.Run.got_batch",
    "run.Run.end_of_batches",
    "recorder.Recorder.position",
    "recorder.Recorder.enter",
    "recorder.Recorder.leave",
    "recorder.Recorder.measures_wait",
    "recorder.Recorder.waited",
    "recorder.Recorder.phase",
    "recorder.Recorder.reporting",  # one `try`, for the `with` statements of others
    "context_managers.Activity.__init__",
    "context_managers.Background.__enter__",
    "context_managers.Background.__exit__",
    "context_managers.Batches.__init__",
    "context_managers.Batches.__iter__",
    "context_managers.Checkpoint.__init__",
    "context_managers.Checkpoint.__exit__",
    "context_managers._Timed.__init__",
    "context_managers.Wait.__enter__",
    "context_managers.Wait.__exit__",
    "torch.phases._Hook.__call__",  # asks torch first whether it compiles, outside of its try
}


class Mute(Exception):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise OSError("no words")

    __repr__ = __str__


ERRORS: tuple[type[Exception], ...] = (RuntimeError, MemoryError, Mute)


def plain_job(hooked: bool) -> list[str]:
    """Train a weight in pure Python; return the losses."""
    run = Run("job", flops_per_token=6.0, peak_flops=1e15, push_interval=0.1) if hooked else None
    numbers, weight = random.Random(7), 0.0
    losses: list[str] = []
    batches = [[numbers.gauss(0.0, 1.0) for _ in range(4)] for _ in range(4)]
    if run is not None:
        run.restored(step=10, tokens=100)
    for batch in batches if run is None else run.batches(batches):
        errors = [weight * x - 2 * x for x in batch]
        losses.append(sum((error * error for error in errors), 0.0).hex())
        weight -= 0.1 * sum(error * x for error, x in zip(errors, batch, strict=True))
        if run is not None:
            run.step(4, samples=4, loss=1.0, grad_norm=float("inf"))
            with run.activity("evaluation"), run.collective_wait(), run.background_save():
                pass
            with run.checkpoint():
                pass
            run.checkpoint_committed(1)
    if run is not None:
        run.finish()
    return losses


def torch_job(hooked: bool) -> list[str]:
    """Train a small model under DistributedDataParallel; return the losses."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, losses = [torch.randn(4, 8) for _ in range(4)], []
    run = Run("job", model=model, flops_per_token=6.0, peak_flops=1e15, push_interval=0.1) if hooked else None
    for batch in batches if run is None else run.batches(batches):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if run is not None:
            run.step(tokens=4, loss=loss.item())
    if run is not None:
        run.finish()
    return losses


def functions() -> dict[str, tuple[FunctionType, list[tuple[Any, str, Any]]]]:
    """Return the package's functions and methods by name, each with all places that hold it: owner, name and value."""
    found: dict[str, tuple[FunctionType, list[tuple[Any, str, Any]]]] = {}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGE)]
    owners: list[ModuleType | type] = [*modules]
    owners += {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__.startswith(PACKAGE)
    }
    for owner in owners:
        for name, value in list(vars(owner).items()):
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and function.__module__.startswith(PACKAGE):
                key = f"{function.__module__.removeprefix(PACKAGE)}.{function.__qualname__}".lstrip(".")
                found.setdefault(key, (function, []))[1].append((owner, name, value))
    return found


def stops_errors(function: FunctionType) -> bool:
    """Return whether all that a function calls is inside `try: ... except Exception:` or `with ....reporting(...):`."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    outside = [statement for statement in definition.body if not _stops(statement)]
    return len(outside) < len(definition.body) and not any(
        isinstance(node, ast.Call) for statement in outside for node in ast.walk(statement)
    )


def _stops(statement: ast.stmt) -> bool:
    match statement:
        case ast.Try(handlers=handlers):
            caught = [handler.type.id for handler in handlers if isinstance(handler.type, ast.Name)]
            return "Exception" in caught or "BaseException" in caught
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="reporting")))]):
            return True
    return False


def called(job: Callable[[bool], list[str]]) -> set[CodeType]:
    """Return the code that the job runs, in any thread."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        job(True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


@contextmanager
def broken(function: FunctionType, places: list[tuple[Any, str, Any]], error: type[Exception]) -> Iterator[None]:
    """Let a function raise wherever it is held; of one that is decorated, what is inside."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    inner = getattr(function, "__wrapped__", None)
    cells = [cell for cell in function.__closure__ or () if cell.cell_contents is inner] if inner is not None else []
    for cell in cells:
        cell.cell_contents = fail
    for owner, name, value in places if not cells else ():
        made = (
            property(fail)
            if isinstance(value, property)
            else (type(value)(fail) if isinstance(value, (staticmethod, classmethod)) else fail)
        )
        setattr(owner, name, made)
    try:
        yield
    finally:
        for cell in cells:
            cell.cell_contents = inner
        for owner, name, value in places if not cells else ():
            setattr(owner, name, value)


def end_leftovers() -> None:
    """End the threads of runs whose finish() was broken. Dozens of them would push ten times a second until the end."""
    for thread in threading.enumerate():
        if thread.name == "flopwatch" and (target := getattr(thread, "_target", None)) is not None:
            target.__self__.stop(None)  # its Pusher
            thread.join()


def main() -> None:
    job = plain_job
    if sys.argv[1] == "torch":
        import torch.distributed

        torch.set_num_threads(1)
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        job = torch_job
    expected = job(False)
    assert job(True) == expected
    seen = called(job)
    # All sources are parsed before anything is broken. Threads then log tracebacks, for which they parse sources, too.
    # Before Python 3.13, SystemError may be raised if two threads parse at a time (gh-106905).
    chosen = {
        name: (function, places)
        for name, (function, places) in sorted(functions().items())
        if name not in OUTERMOST
        and (inner := getattr(function, "__wrapped__", function)).__code__ in seen
        and (inner is not function or inner.__name__ == "__init__" or not stops_errors(inner))
    }
    felt = []
    for name, (function, places) in chosen.items():
        for error in ERRORS:
            with broken(function, places, error):
                try:
                    if job(True) != expected:
                        felt.append(f"{name}: other losses with {error.__name__}")
                except BaseException as escaped:
                    at = traceback.extract_tb(escaped.__traceback__)[1:]
                    felt.append(f"{name}: {type(escaped).__name__} in {' > '.join(frame.name for frame in at)}")
            end_leftovers()
    print(json.dumps({"tried": list(chosen), "felt": felt}))
    if job is torch_job:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
