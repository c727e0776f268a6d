"""Modules and autograd functions that are running, read from the interpreter's frames."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != f"{__package__}.count":
        yield frame
        frame = frame.f_back


def autograd_function() -> type | None:
    """Return the autograd.Function whose forward is running, else None."""
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return next((frame.f_locals["cls"] for frame in _frames() if frame.f_code is apply), None)


def attention_window(module: Any) -> int | None:
    """Return how many keys a query of a transformers attention module sees, its own included. None without a window."""
    config = getattr(module, "config", None)
    window: int | None = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if not hasattr(module, "sliding_window") and getattr(config, "layer_types", None):
        return window if config.layer_types[module.layer_idx] == "sliding_attention" else None  # type: ignore[union-attr]
    return window


def modules_at_work() -> Iterator[torch.nn.Module]:
    """Return an iterator of the modules whose forward is running, the innermost first."""
    call = torch.nn.Module._call_impl.__code__
    return (frame.f_locals["self"] for frame in _frames() if frame.f_code is call)
