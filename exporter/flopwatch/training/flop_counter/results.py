"""Results of counting FLOPs, and the attributes that mark counted tensors."""

from dataclasses import dataclass, field

import torch


class Uncountable(Exception):
    """Error raised when the FLOPs of a model cannot be counted. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Counted:
    """FLOPs of a forward pass and its backward pass, on all ranks that share the model."""

    forward: int
    backward: int
    tokens: int | None  # elements of `input_ids`; None where the batch has none
    by_op: dict[str, int] = field(default_factory=dict)  # forward

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward and backward."""
        return self.forward + self.backward


@dataclass(slots=True)
class OperatorFlops:
    """FLOPs of one call of an operator, and how many of its operands get a gradient."""

    op: str
    forward: int
    gradients: int


@dataclass(slots=True)
class Scores:
    """Scores of an attention that is written as two matmuls, from the first matmul until the second."""

    entry: OperatorFlops
    queries: int
    keys: int
    masks: list[torch.Tensor | None] = field(default_factory=list)  # True or above HIDDEN: counts; None: values unknown
    softmaxed: bool = False


def parts_of(tensor: torch.Tensor) -> int:
    """Return into how many shards tensor parallelism cuts the tensor, 1 if it does not."""
    return getattr(tensor, "_parts", 1)


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a weight of the model."""
    return getattr(tensor, "_weight", False)


def needs_grad(tensor: torch.Tensor) -> bool:
    """Return whether the backward pass computes a gradient of the tensor."""
    return tensor.requires_grad or getattr(tensor, "_needs_gradient", False)
