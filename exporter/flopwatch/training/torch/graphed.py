"""Module hooks of this package taken off while `make_graphed_callables` captures modules into CUDA graphs.

The function, in torch.cuda and in Transformer Engine, refuses modules that have hooks, and allows hooks afterwards. Its
warm-up passes are not training, so no hook may count them either.
https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html
"""

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from flopwatch.training.import_hook import when_imported
from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.waits import Replaced

NAME, TRANSFORMER_ENGINE = "make_graphed_callables", "transformer_engine.pytorch"
DEFINED_IN = ("torch.cuda.graphs", TRANSFORMER_ENGINE)

Hooks = MutableMapping[int, Any]

_making = 0  # calls of the function that are running


def making() -> bool:
    """Return whether modules are being captured, in which case calls of modules are not training."""
    return _making > 0


class Graphed:
    """Replacement of the functions by ones that take hooks off. `remove()` restores the originals."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._removed = False
        self._replaced: list[Replaced] = []

    def replace(self) -> None:
        """Replace the functions in each module that has one under its name, such as the training script."""
        ours: dict[Any, Any] = {}
        for module in () if self._removed else list(sys.modules.values()):
            original: Any = getattr(module, "__dict__", {}).get(NAME)
            if str(getattr(original, "__module__", "")).startswith(DEFINED_IN):
                if original not in ours:
                    ours[original] = _without_hooks(original, self._recorder)
                self._replaced.append(Replaced(module, NAME, ours[original]))

    def remove(self) -> None:
        """Restore the original functions, except where other code has replaced them since."""
        self._removed = True
        while self._replaced:
            self._replaced.pop().remove()


def attach(recorder: Recorder) -> Graphed:
    """Replace torch's function now, and Transformer Engine's once it is imported."""
    graphed = Graphed(recorder)
    with recorder.reporting("graphed"):
        graphed.replace()
        if TRANSFORMER_ENGINE not in sys.modules:
            when_imported(TRANSFORMER_ENGINE, graphed.replace)
    return graphed


def uncaptured(forward: Any) -> Any:
    """Return the forward that a module had before it was captured, or `forward` if it is not a captured one's."""
    code = getattr(forward, "__code__", None)
    if code is None or not forward.__qualname__.startswith((NAME, f"_{NAME}")):
        return forward
    variables = dict(zip(code.co_freevars, forward.__closure__ or (), strict=True))
    return variables["orig_fwd"].cell_contents


def _without_hooks(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
        global _making
        taken: list[tuple[Hooks, dict[int, Any]]] = []
        with recorder.reporting("graphed"):
            taken += _taken(args[0] if args else kwargs.get("callables", kwargs.get("modules")))
        _making += 1
        try:
            return original(*args, **kwargs)
        finally:
            _making -= 1
            for hooks, before in taken:
                # In their old order, and in front of hooks that were added meanwhile.
                after = dict(hooks)
                hooks.clear()
                hooks.update({key: hook for key, hook in before.items() if _is_ours(hook) or key in after})
                hooks.update(after)

    return make_graphed_callables


def _taken(callables: Any) -> Iterator[tuple[Hooks, dict[int, Any]]]:
    """Take our hooks off the modules and their children. Yield each changed dict of hooks, with its items before."""
    modules = {
        part
        for module in (callables if isinstance(callables, (tuple, list)) else (callables,))
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
    }
    hooks: Hooks
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            before = dict(hooks)
            if any(map(_is_ours, before.values())):
                for key in [key for key, hook in before.items() if _is_ours(hook)]:
                    del hooks[key]
                yield hooks, before


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith("flopwatch.")
