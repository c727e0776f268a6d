"""Tensors in a model's output."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tensor, mapping, list, tuple or dataclass, however they are nested."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
    elif isinstance(output, Mapping):
        yield from tensors(list(output.values()))
    elif hasattr(output, "__dataclass_fields__"):
        yield from tensors([getattr(output, name) for name in output.__dataclass_fields__])
