"""Checkpoints that PyTorch's own functions save and load: torch.save, torch.distributed.checkpoint and safetensors.

A checkpoint belongs to the step at which saving began. A distributed one is committed when `save` returns or its future
is done. Files are committed when training goes on, because they may be several and renamed at the end. Loading before
the first step is checkpoint_restore. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from flopwatch.training.context_managers import Activity, Background, commit_when_done
from flopwatch.training.import_hook import when_imported
from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.waits import Replaced

# Keys of a loaded checkpoint that may hold the number of completed steps.
STEP_KEYS = ("step", "global_step", "iteration")

_R = TypeVar("_R")
_End = Callable[[bool, Any], None]

_SAVERS = "torch.distributed.checkpoint.state_dict_saver"
_LOADERS = "torch.distributed.checkpoint.state_dict_loader"


class Checkpoints:
    """Detector of checkpoints that this process saves and loads. It records them once it has a recorder."""

    def __init__(self, clock: Callable[[], float], step_from: str | None = None) -> None:
        self.clock = clock
        self._step_from = step_from
        self.recorder: Recorder | None = None
        self._inside = threading.local()
        self._replaced: list[Replaced] = []
        self.installed = False
        self._pending: int | None = None  # step of saved files that may not be complete
        self._committing = threading.Lock()  # of _pending
        # Restores before the run was made: activity, begin and end on the clock.
        self.before: list[tuple[str, float, float]] = []
        self.loaded_step: int | None = None
        self.fetching = False  # a batch is being fetched, so files loaded now are data

    def install(self) -> None:
        """Replace PyTorch's functions that save and load, also in modules that are imported later."""
        self.installed = True
        self._replace("save", self._save_begins, "torch", "torch.serialization")
        self._replace("load", self._load_begins, "torch", "torch.serialization")
        for module, name, begins in (
            (_SAVERS, "save", functools.partial(self._save_all_begins, False)),
            (_SAVERS, "save_state_dict", functools.partial(self._save_all_begins, False)),
            (_SAVERS, "async_save", functools.partial(self._save_all_begins, True)),
            (_LOADERS, "load", self._load_all_begins),
            (_LOADERS, "load_state_dict", self._load_all_begins),
            ("safetensors.torch", "save_file", self._save_begins),
            ("safetensors.torch", "load_file", self._load_begins),
        ):
            replace = functools.partial(self._replace, name, begins, module, "torch.distributed.checkpoint")
            when_imported(module, replace)

    def uninstall(self) -> None:
        """Restore the replaced functions, except those that other code has replaced since."""
        while self._replaced:
            self._replaced.pop().remove()
        self.installed, self.recorder = False, None

    def report_to(self, recorder: Recorder) -> None:
        """Record checkpoints with this recorder from now on."""
        self.recorder, self._pending = recorder, None
        if self._look not in recorder.polls:
            recorder.poll(self._look)

    def training_goes_on(self) -> None:
        """Record the files saved last as durable, because none of their checkpoint follows once training goes on."""
        if self._pending is not None:
            self._commit()

    def _look(self) -> None:
        # In the push thread, for loops that do not call training_goes_on: a step was taken since.
        recorder = self.recorder
        if recorder is not None and self._pending is not None and (position := recorder.position) is not None:
            self._commit(unless=position)

    def _commit(self, unless: int | None = None) -> None:
        with self._committing:
            step = self._pending
            if step is None or step == unless:
                return
            self._pending = None
        if self.recorder is not None:
            self.recorder.committed(step)

    def _replace(self, name: str, begins: Callable[..., _End | None], *modules: str) -> None:
        owners = [sys.modules[module] for module in modules if module in sys.modules]
        original = getattr(owners[0], name, None)
        if original is None or not self.installed:
            return  # this release lacks it, or it was imported too late

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return self._around(begins, original, *args, **kwargs)

        for owner in owners:
            if getattr(owner, name, None) is original:
                self._replaced.append(Replaced(owner, name, ours))

    def _around(
        self, begins: Callable[..., _End | None], call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `begins`, then a save or load, then the function that `begins` returned. Errors of both are reported.

        That function receives whether the save or load succeeded, and its result.
        """
        end = self._reported(begins, *args, **kwargs)
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        succeeded, result = False, None
        try:
            result = call(*args, **kwargs)
            succeeded = True
            return result
        finally:
            self._inside.depth -= 1
            if end is not None:
                self._reported(end, succeeded, result)

    def _reported(self, function: Callable[..., _R], *arguments: Any, **named: Any) -> _R | None:
        try:
            return function(*arguments, **named)
        except Exception as error:
            if self.recorder is not None:
                self.recorder.failed("checkpoint", error)
            return None

    def _save_begins(self, obj: object, f: object, *_: object, **__: object) -> _End | None:
        is_checkpoint = isinstance(obj, (Mapping, torch.nn.Module)) and _is_file(f)
        if not is_checkpoint or (recorder := self._active_recorder()) is None:
            return None
        context: Activity | Background
        if later := self._is_loop():
            # The file may be complete only after this call, for example after a rename, so it is committed later.
            step, context = recorder.position, Activity(recorder, "checkpoint_save")
        else:
            # The loop went on since the state was copied, so only the state itself has the step.
            step, context = self.step_of(obj), Background(recorder)
        context.__enter__()

        def end(succeeded: bool, _: object) -> None:
            context.__exit__(None, None, None)
            if succeeded and step is not None:
                if later:
                    with self._committing:
                        self._pending = step
                else:
                    recorder.committed(step)

        return end

    def _save_all_begins(self, later: bool, *_: object, **__: object) -> _End | None:
        # On another thread this is the rest of an async_save, whose end the future reports.
        if not self._is_loop() or (recorder := self._active_recorder()) is None:
            return None
        step, activity = recorder.position, Activity(recorder, "checkpoint_save")
        activity.__enter__()

        def end(succeeded: bool, response: Any) -> None:
            activity.__exit__()
            if succeeded and later:
                commit_when_done(recorder, getattr(response, "upload_completion", response), step)
            elif succeeded and step is not None:
                recorder.committed(step)

        return end

    def _load_begins(self, f: object, *_: object, **__: object) -> _End | None:
        return self._restore_begins() if _is_file(f) else None

    def _load_all_begins(self, state_dict: object, *_: object, **__: object) -> _End | None:
        return self._restore_begins(filled=state_dict)

    def _restore_begins(self, filled: object = None) -> _End | None:
        recorder, began = self.recorder, self.clock()
        if self.fetching or self.inside_another() or not self._is_loop():
            return None
        if recorder is not None and (recorder.steps_taken or not recorder.alive):
            return None
        activity = None if recorder is None else Activity(recorder, "checkpoint_restore")
        if activity is not None:
            activity.__enter__()

        def end(succeeded: bool, loaded: object) -> None:
            if activity is not None:
                activity.__exit__()
            else:
                self.before.append(("checkpoint_restore", began, self.clock()))
            if succeeded and (step := self.step_of(loaded if filled is None else filled)) is not None:
                self.loaded_step = step

        return end

    def _active_recorder(self) -> Recorder | None:
        """Return the recorder for a save that begins on this thread. None inside another save or load."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.alive and not self.inside_another() else None

    def inside_another(self) -> bool:
        """Return whether this thread is already inside a save or load."""
        return bool(getattr(self._inside, "depth", None))

    def _is_loop(self) -> bool:
        loop = None if self.recorder is None else self.recorder.totals.loop_thread
        return loop in (None, threading.get_ident())

    def step_of(self, state: object) -> int | None:
        """Return the step stored in a checkpoint, None without one."""
        if not isinstance(state, Mapping):
            return None
        if self._step_from is not None:
            value: Any = state
            for key in self._step_from.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            return whole(value)
        return next((step for key in STEP_KEYS if (step := whole(state.get(key))) is not None), None)


_checkpoints: Checkpoints | None = None


def install(step_from: str | None = None) -> Checkpoints:
    """Replace PyTorch's functions that save and load. Return the detector of checkpoints."""
    global _checkpoints
    _checkpoints = Checkpoints(time.monotonic, step_from)
    _checkpoints.install()
    return _checkpoints


def attach(recorder: Recorder) -> None:
    """Record the checkpoints that PyTorch saves and loads, for a Run that the script itself makes."""
    if recorder.alive:
        checkpoints = _checkpoints if _checkpoints is not None and _checkpoints.installed else install()
        checkpoints.report_to(recorder)


def commit_pending(recorder: Recorder, status: str) -> None:
    """Record the files saved last as durable before the run finishes, unless `status` is "failed"."""
    if _checkpoints is not None and _checkpoints.recorder is recorder and status != "failed":
        _checkpoints.training_goes_on()


def _is_file(place: object) -> bool:
    """Return whether `place` is a path or an open file, and not a buffer in memory."""
    if isinstance(place, (str, os.PathLike)):
        return True
    return isinstance(getattr(place, "name", None), (str, bytes, int))


def whole(value: object) -> int | None:
    """Return `value` as a whole number of at least 0, also from a tensor on the CPU, None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu" or value.is_complex():
            return None  # reading it would stop the device
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
