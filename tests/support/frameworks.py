"""What can go wrong under a trainer, the same for all of them."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest


class Clock:
    """Seconds that pass where a test lets them; a run's own, so that what it books is exactly what was planted."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


BROKEN = ("no exporter", "tokens that raise", "no method that works")


def wrong(*_: Any, **__: Any) -> Any:
    """Stand for whatever raises."""
    raise RuntimeError("injected")


def break_callback(broken: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Break a trainer's callback in one of the ways of BROKEN; return the arguments to make it with."""
    from flopwatch.training.frameworks import common

    if broken == "no method that works":
        patch.setattr(common, "report_logged", wrong)
        for name in ("begin", "end", "consume", "step", "finish"):
            patch.setattr(common.TrainingSession, name, wrong)
    return {"tokens": wrong if broken == "tokens that raise" else None}


def forget_accelerators() -> None:
    """Let the next Accelerator be the first; accelerate keeps one state for all of them."""
    module: Any = importlib.import_module("accelerate.state")
    for state in (module.AcceleratorState, module.GradientState, module.PartialState):
        state._reset_state()


def accelerator(patch: pytest.MonkeyPatch, precision: str) -> Any:
    """Return an Accelerator with this mixed precision. For fp8 a library counts as installed until it is needed."""
    module: Any = importlib.import_module("accelerate")
    patch.setattr("accelerate.state.is_fp8_available", lambda: True)
    patch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    recipes = [module.utils.TERecipeKwargs()] if precision == "fp8" else []
    return module.Accelerator(mixed_precision=precision, kwargs_handlers=recipes)


def ulysses(patch: pytest.MonkeyPatch, ranks: int = 2) -> None:
    """Let DeepSpeed's groups answer as if Ulysses split sequences among ranks."""
    groups = SimpleNamespace(_get_sequence_parallel_world_size=lambda: ranks)
    patch.setitem(sys.modules, "deepspeed.utils.groups", groups)


class CheckpointEngine:
    """Writes after save_checkpoint returned, if decoupled."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled

    def is_decoupled(self) -> bool:
        return self._decoupled

    def commit(self, info: object) -> bool:
        return True


def engine(accumulate: int = 2, decoupled: bool = False, steps: int = 0) -> Any:
    """Return what deepspeed.initialize returns, with a linear layer in it."""
    import torch

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)
            self.mpu = None
            self.dp_world_size = 1
            self.global_steps, self.micro_steps, self.saved = steps, 0, steps
            self.checkpoint_engine = CheckpointEngine(decoupled)
            self._on_disk: int | None = None

        def bfloat16_enabled(self) -> bool:
            return True

        def fp16_enabled(self) -> bool:
            return False

        def is_gradient_accumulation_boundary(self) -> bool:
            return (self.micro_steps + 1) % accumulate == 0

        def get_global_grad_norm(self) -> float:
            return 0.5

        def step(self) -> None:
            if self.is_gradient_accumulation_boundary():
                if decoupled:
                    self.checkpoint_engine.commit(object())
                self.global_steps += 1
            self.micro_steps += 1

        def save_checkpoint(self, save_dir: str, tag: str | None = None) -> bool:
            self._on_disk = self.global_steps
            return True

        def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
            self.global_steps = 40
            return load_dir, {}

    return Engine()
