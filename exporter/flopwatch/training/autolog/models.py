"""Models of a training script, found as the training loop calls them."""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from flopwatch.training.autolog.loop import LoopState
from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.graphed import making


class ModelFinder:
    """Finder of models: modules that the loop, and no other module, calls with gradients in the first steps.

    It replaces nn.Module.__call__, and restores the original during such a call, because Dynamo must not meet the
    replacement in a model that it compiles. A global forward hook would make Dynamo warn.
    """

    def __init__(self, loop: LoopState, settle: Callable[[Recorder], None]) -> None:
        self._settle = settle
        self._loop = loop
        self._original: Any = None
        self._ours: Any = None
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def look(self) -> None:
        """Look for models from now on, by replacing nn.Module.__call__."""
        self._original = original = torch.nn.Module.__call__

        @functools.wraps(original)
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._ours is None:
                return original(module, *args, **kwargs)
            self._put(original)
            try:
                self._loop.call(self._called, module)
                return original(module, *args, **kwargs)
            finally:
                if self._ours is not None:
                    self._put(__call__)

        self._ours = __call__
        self._put(__call__)

    def _put(self, function: Any) -> None:
        # Not if other code has replaced nn.Module.__call__ since.
        if torch.nn.Module.__call__ in (self._ours, self._original):
            torch.nn.Module.__call__ = function  # type: ignore[method-assign]

    def look_no_more(self) -> None:
        """Stop looking for models, and restore nn.Module.__call__."""
        if self._ours is not None:
            self._put(self._original)
            self._ours = None

    def _called(self, module: torch.nn.Module) -> None:
        loop = self._loop
        if making() or module in self._known or not module.training:
            return
        if not torch.is_grad_enabled() or not loop.on_this_thread():
            return
        run = loop.active_run()
        if run is None or not any(parameter.requires_grad for parameter in module.parameters()):
            return
        self._settle(run.recorder)  # the newest batch is for training
        parts = set(itertools.chain.from_iterable(model.modules() for model in self._known))
        self._known.add(module)
        if module not in parts:
            run.watch(module)
