"""State of the training loop that the hooks of `flopwatch run` share."""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from flopwatch.training.recorder import Recorder
from flopwatch.training.run import Run
from flopwatch.training.torch.checkpoints import Checkpoints
from flopwatch.training.totals import PackedFlops

_P = ParamSpec("_P")
_R = TypeVar("_R")

log = logging.getLogger("flopwatch")


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags of `flopwatch run`."""

    name: str | None = None
    tokens_from: str | None = None  # a key, an attribute or an index in the batch
    tokens_per_step: float | None = None
    step_from: str | None = None  # a key of a loaded checkpoint, with dots for mappings in mappings
    flops_per_token: float | PackedFlops | None = None
    convention: str = "causal"
    dtype: str = "bf16"
    peak_flops: float | None = None
    peak_source: str | None = None
    top: bool = False  # show the figures in the terminal


class LoopState:
    """State that all hooks share: run, settings and loop thread. `detach` removes the hooks when the run has ended."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints, detach: Callable[[], None]) -> None:
        self.settings = settings
        self.checkpoints = checkpoints
        self.run: Run | None = None
        self.over = False
        self.pid = os.getpid()
        self.thread: int | None = None  # of the loop; None while unknown
        self.seen_backward = False
        self._detach = detach

    def on_this_thread(self) -> bool:
        """Return whether this thread runs the loop, or the loop's thread is unknown."""
        return self.thread in (None, threading.get_ident())

    def active_run(self) -> Run | None:
        """Return the run while it records. None before it is made, after its end and in forked children."""
        run = self.run
        if run is None or self.over:
            return None
        if run.alive:
            return run
        if os.getpid() == self.pid:
            self._detach()
        return None

    def active_recorder(self) -> Recorder | None:
        """Return the recorder of `active_run()`, or None if no run records now."""
        run = self.active_run()
        return None if run is None else run.recorder

    def call(self, hook: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        """Call a hook and return its result. An exception is reported, and None returned instead."""
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            if self.run is not None:
                self.run.recorder.failed("attach", error)
            else:
                self.over = True
                log.warning("flopwatch cannot record this process: %s (training goes on)", error, exc_info=error)
            return None
