"""Phases of a step: forward, backward, optimizer and garbage collection, each between two marks (docs/phases.md).

Marks are CUDA events if the device does the work, else the host's clock (device.py). Phases of several micro-batches
and optimizers add up. Only some steps are measured (Recorder.measuring). Under torch.compile the hooks never enter a
graph and break none. https://docs.pytorch.org/docs/stable/notes/modules.html#module-hooks
https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_pre_hook.html
"""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
from torch.optim import optimizer as optim

from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.outputs import tensors
from flopwatch.training.totals import Mark


class Phases:
    """Hooks that measure the phases of one run's steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._models: list[Callable[[], torch.nn.Module | None]] = []
        self._forward: tuple[int, Mark] | None = None  # the module whose forward is open, and since when
        self._backward = -1  # the autograd engine's number of the pass last seen to begin
        self._steps: list[tuple[int, Mark]] = []  # the optimizers whose step() is open, outermost first
        self._position: int | None = None
        self._collection_began: float | None = None

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        if _attached.get(self._recorder) is self:
            del _attached[self._recorder]

    def _attach(self) -> None:
        gc.callbacks.append(self._collected)
        self._handles += [
            optim.register_optimizer_step_pre_hook(_Hook(self._recorder, self._step_begins)),
            optim.register_optimizer_step_post_hook(_Hook(self._recorder, self._step_ends)),
        ]
        # First, or a hook that records the training step at the end of step() would run before it.
        optim._global_optimizer_post_hooks.move_to_end(self._handles[-1].id, last=False)  # type: ignore[attr-defined]

    def _attach_model(self, model: torch.nn.Module) -> None:
        if not any(known() is model for known in self._models):
            self._models.append(weakref.ref(model))
            # First, so that FSDP's hooks are inside and its last wait is after the backward pass.
            self._handles += [
                model.register_forward_pre_hook(_Hook(self._recorder, self._forward_begins), prepend=True),
                model.register_forward_hook(_Hook(self._recorder, self._forward_ends), prepend=True),
            ]

    def _forward_begins(self, module: torch.nn.Module, _: object) -> None:
        # An open step() that calls the model, as LBFGS does, or that an exception left is not an optimizer phase.
        self._steps.clear()
        inside_another = self._forward is not None and self._forward[0] != id(module)
        if not inside_another and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._forward = (id(module), self._recorder.mark())

    def _forward_ends(self, module: torch.nn.Module, _: object, output: object) -> None:
        if self._forward is None or self._forward[0] != id(module):
            return
        self._recorder.phase("forward", self._forward[1], self._recorder.mark())
        self._forward = None
        hook = _Hook(self._recorder, self._gradient)
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, _: torch.Tensor) -> None:
        this = torch._C._current_graph_task_id()
        if this != self._backward:
            self._backward = this
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(functools.partial(self._backward_ends, self._recorder.mark()))

    def _backward_ends(self, backward_began: Mark) -> None:
        with self._recorder.reporting("phases"):
            self._recorder.phase("backward", backward_began, self._recorder.mark())

    def _step_begins(self, optimizer: object, given: tuple[object, ...], named: Mapping[str, object]) -> None:
        # A closure runs the model and its backward pass within step(), as Lightning's does and LBFGS needs.
        if named.get("closure") is not None or any(argument is not None for argument in given[1:]):
            return
        position = self._recorder.position
        if position != self._position:
            # Phases still open since an earlier step were left by an exception.
            self._position, self._forward = position, None
            self._steps.clear()
        self._steps.append((id(optimizer), self._recorder.mark()))

    def _step_ends(self, optimizer: object, *_: object) -> None:
        for number in reversed(range(len(self._steps))):
            which, step_began = self._steps[number]
            if which == id(optimizer):
                del self._steps[number:]
                if number == 0:
                    self._recorder.phase("optimizer", step_began, self._recorder.mark())
                break

    def _collected(self, phase: str, _: Mapping[str, int]) -> None:
        try:
            if phase == "start":
                self._collection_began = self._recorder.clock() if self._recorder.measuring else None
            elif self._collection_began is not None:
                self._recorder.phase("garbage_collection", self._collection_began, self._recorder.clock())
        except Exception as error:
            self._recorder.failed("phases", error)


_attached: dict[Recorder, Phases] = {}


def attach(recorder: Recorder, model: object = None) -> Phases:
    """Measure the steps of all optimizers, and forward and backward of `model`, if given. Each call may add a model."""
    phases = _attached.get(recorder)
    with recorder.reporting("phases"):
        if phases is None:
            phases = _attached[recorder] = Phases(recorder)
            phases._attach()
        if isinstance(model, torch.nn.Module):
            phases._attach_model(model)
    return Phases(recorder) if phases is None else phases


class _Hook:
    """Hook that runs in measured steps only and never raises. In a copy of its module it does nothing."""

    def __init__(self, recorder: Recorder, does: Callable[..., None]) -> None:
        self._recorder = recorder
        self._does = torch._dynamo.disable(does)  # type: ignore[no-untyped-call]

    def __call__(self, *args: object) -> None:
        # First, as Dynamo traces this when it compiles the module's caller; it causes no guard and no graph break.
        if torch.compiler.is_compiling():
            return
        try:
            if self._recorder.measuring:
                self._does(*args)
        except Exception as error:
            self._recorder.failed("phases", error)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # A copy or a pickle of the module gets a hook that does nothing and needs no flopwatch.
        return getattr, (nullcontext(), "__exit__")


# Private to PyTorch. Without it Dynamo would compile hooks of a model that is compiled later: no forward phase then.
if (skip_code := getattr(torch._dynamo.decorators, "skip_code", None)) is not None:
    skip_code(_Hook.__call__.__code__)
