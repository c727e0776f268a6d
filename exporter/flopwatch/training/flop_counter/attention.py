"""Counting of scaled_dot_product_attention as one operator, because the kernel behind it may show no matmul."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flopwatch.training.flop_counter.frames import autograd_function
from flopwatch.training.flop_counter.operators import Counter


class Attention(TorchFunctionMode):
    """Mode of PyTorch that reports each call of scaled_dot_product_attention to the counter, and hides its kernels."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        counter = self._counter
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        tensors = {name: counter.fake(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
        operands = (tensors["query"], tensors["key"], tensors["value"], tensors.get("attn_mask"))
        function = autograd_function() if not torch.is_grad_enabled() else None
        counter.attention(*operands, bool(given.get("is_causal")), function)
        counter.paused += 1
        try:
            return func(*args, **kwargs)
        finally:
            counter.paused -= 1
