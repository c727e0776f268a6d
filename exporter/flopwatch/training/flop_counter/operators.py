"""FLOPs of operators that run on tensors without data, in the convention `causal` (docs/counted.md).

Matrix multiplications and convolutions have 2 FLOP per multiply-add, and as many for each gradient. Attention counts
half of the scores under a causal mask, else those that the mask leaves visible. A mask's values are computed if they
follow from constants and real buffers. If not, attributes of the attention module decide. The router of a mixture of
experts, a product that topk reads, does not count. PyTorch's FlopCounterMode ignores masks:
https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py
"""

import functools
import gc
import inspect
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from flopwatch.training.flop_counter.results import (
    Counted,
    OperatorFlops,
    Scores,
    Uncountable,
    is_weight,
    needs_grad,
    parts_of,
)

DEADLINE = 10.0  # seconds; a model of 128 layers takes two or three
MAX_COMPUTED = 1 << 24  # elements: larger values, for example of masks, are not computed
NO_PADDING = {"attention_mask": True, "key_padding_mask": False}  # arguments, and their value for "no padding"
HIDDEN = -1e4  # added to a score that must not count: some write -1e4, most -inf or the minimum of the dtype

# Operators that multiply matrices, with the index of the first matrix among the arguments.
MATMULS = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), 0)
MATMULS |= dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), 0)
MATMULS |= dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"), 1)
# Known kernels outside PyTorch: flash-attn's with fixed lengths, and transformers' fallback for a grouped matmul.
KERNELS = ("flash_attn::_flash_attn_forward", "transformers::grouped_mm_fallback")
# Words in the names of PyTorch operators that multiply matrices in a way that Counter does not count.
OPAQUE = {"matmul", "attention", "conv", "convolution", "rnn", "lstm", "gru", "trilinear"}

aten = torch.ops.aten
cpu = torch.device("cpu")


class Counter(TorchDispatchMode):
    """Dispatch mode that counts FLOPs on fake CPU tensors. It computes masks and other values known on the host."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode, parts: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: Uncountable | None = None
        self.paused = 0
        self.packs = False  # the model's own attention would find packed samples by their positions
        self.mode = mode
        self._parts = parts
        self._entries: list[OperatorFlops] = []
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}  # with the real ones, so that no id is reused
        self._may_be_packed = False
        self._stale: set[int] = set()  # storages whose values were overwritten with unknown ones
        # Masks seen so far, with the tensors that own the addresses.
        self._visible: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pairs: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._until = time.monotonic() + DEADLINE

    def counted(self, tokens: int | None) -> Counted:
        """Return the FLOPs of all operators so far. `tokens` is the batch's number of tokens, for the result."""
        by_op: dict[str, int] = {}
        for entry in self._entries:
            by_op[entry.op] = by_op.get(entry.op, 0) + entry.forward
        forward = sum(entry.forward for entry in self._entries)
        backward = sum(entry.forward * entry.gradients for entry in self._entries)
        return Counted(forward, backward, tokens, {op: flops for op, flops in by_op.items() if flops})

    def clear(self) -> None:
        """Release all tensors, and remove those that the forward left in the program's lists, dicts and sets."""
        self._fakes.clear()
        self._visible.clear()
        self._pairs.clear()
        if not any(made() is not None for made in self._made):
            return
        gc.collect()
        for made in self._made:
            if (fake := made()) is None:
                continue
            for holder in gc.get_referrers(fake):
                if isinstance(holder, (list, deque)):
                    while any(item is fake for item in holder):
                        del holder[next(i for i, item in enumerate(holder) if item is fake)]
                elif isinstance(holder, dict):
                    for key in [key for key, item in holder.items() if item is fake]:
                        del holder[key]
                elif isinstance(holder, set):
                    holder.discard(fake)

    def refuse(self, reason: str) -> Uncountable:
        """Return the first reason as an Uncountable to raise, and keep it in case the model catches it."""
        if self.refused is None:
            self.refused = Uncountable(reason)
        return self.refused

    def fake(self, real: torch.Tensor, *, weight: bool = False) -> torch.Tensor:
        """Return a CPU tensor without data in the shape of `real`, which for a DTensor is the global shape."""
        if isinstance(real, FakeTensor) and real.fake_mode is self.mode:
            return real
        if id(real) in self._fakes:
            return self._fakes[id(real)][1]
        shape, (cut, parts) = list(real.shape), self._parts.get(id(real), (0, 1))
        if parts > 1:
            shape[cut] //= parts
        with self.mode:
            fake: Any = torch.empty(shape, dtype=real.dtype, device=cpu)
            if isinstance(real, torch.nn.Parameter) or weight:
                fake = torch.nn.Parameter(fake, requires_grad=real.requires_grad)
            else:
                fake.requires_grad_(real.requires_grad)
        fake._weight = weight or isinstance(real, torch.nn.Parameter)
        if parts > 1:
            fake._parts = parts
        if not fake._weight and type(real) is torch.Tensor and real.device == cpu and real.numel() <= MAX_COMPUTED:
            fake._source = real
        self._fakes[id(real)] = (real, fake)
        return fake  # type: ignore[no-any-return]

    def inputs(self, arguments: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the forward's arguments as fake tensors of unknown values, with padding masks that mask nothing."""

        def one(real: torch.Tensor) -> torch.Tensor:
            fake: Any = self.fake(real)
            square = real.ndim >= 2 and real.shape[-1] == real.shape[-2]
            if not square or not (real.dtype == torch.bool or (real.ndim == 2 and real.dtype.is_floating_point)):
                fake._source = None  # not a mask: another batch of this shape has other values
            return fake  # type: ignore[no-any-return]

        given = {**arguments.arguments, **arguments.arguments.get("kwargs", {})}
        self._may_be_packed = given.get("position_ids") is not None and given.get("attention_mask") is None
        for name, value in arguments.arguments.items():
            arguments.arguments[name] = fakes = tree_map_only(torch.Tensor, one, value)
            named: dict[str, Any] = {name: fakes, **(fakes if isinstance(fakes, dict) else {})}
            for key, fake in named.items():
                mask = isinstance(fake, torch.Tensor) and fake.ndim == 2 and not fake.dtype.is_floating_point
                if mask and (role := key.removeprefix("src_")) in NO_PADDING:
                    with _disable_current_modes():
                        fake._source = torch.full(fake.shape, NO_PADDING[role], dtype=fake.dtype)
        return arguments.args, arguments.kwargs

    def known(self, fake: Any) -> torch.Tensor | None:
        """Return the values of a fake tensor, None if unknown."""
        value: torch.Tensor | None = getattr(fake, "_known", None)
        if value is None and (source := getattr(fake, "_source", None)) is not None:
            fake._source = None
            with _disable_current_modes(), torch.no_grad():
                value = fake._known = source.detach().clone()
        if value is None or value.untyped_storage()._cdata in self._stale:
            return None
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return cpu
        if time.monotonic() > self._until:
            raise self.refuse(f"counting took more than {DEADLINE:.0f} s")
        if not issubclass(type(func), torch._ops.OpOverload):
            raise self.refuse(f"the counter does not see the operators inside {func}")
        if "c10d" in func.namespace:
            raise self.refuse(f"the forward communicates by itself: {func.name()}")
        if func.namespace not in ("aten", "prim", "prims", "profiler") and func.name() not in KERNELS:
            raise self.refuse(f"the counter does not know the kernel {func.name()}")
        args, kwargs = tree_map_only(torch.Tensor, self.fake, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs["device"] = cpu
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            if (value := self.known(tensors[0])) is None:
                raise self.refuse("the forward depends on the value of a tensor")
            with _disable_current_modes():
                return value.item()
        function = _autograd_function() if tensors and not torch.is_grad_enabled() else None
        out = self._run(func, args, kwargs, tensors)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        self._made.extend(map(weakref.ref, made))
        if self._parts and (self.paused or func._opname not in MATMULS):
            # A part of an embedding table yields whole embeddings, so the operands other than weights decide.
            parts = max(map(parts_of, [tensor for tensor in tensors if not is_weight(tensor)] or tensors), default=1)
            for fake in made:
                fake._parts = parts  # type: ignore[attr-defined]
        if not self.paused:
            self._count(func, args, kwargs, made, function)
            self._follow(func, args, tensors, made)
        if function is not None and any(map(needs_grad, tensors)):
            for fake in made:
                fake._needs_gradient = True  # type: ignore[attr-defined]
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        name, tags = func.name(), func.tags
        if func is aten._grouped_mm.default and args[0].ndim == 2 and args[1].ndim == 3:
            return torch.empty(args[0].shape[0], args[1].shape[2], dtype=args[0].dtype, device=cpu)  # of any dtype
        values = [self.known(tensor) for tensor in tensors]
        random = torch.Tag.nondeterministic_seeded in tags or name.startswith(("aten::empty", "aten::new_empty"))
        computable = not self.paused and not random and all(value is not None for value in values)
        if torch.Tag.dynamic_output_shape in tags and computable:
            return tree_map_only(torch.Tensor, self._like, self._computed(func, args, kwargs))
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise self.refuse(f"the forward depends on data: values decide the shape that {name} returns") from None
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        if computable and made and all(fake.numel() <= MAX_COMPUTED for fake in made):
            real = [leaf for leaf in tree_leaves(self._computed(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for fake, value in zip(made, real, strict=True):
                fake._known = value  # type: ignore[attr-defined]
        elif func._schema.is_mutable:
            self._stale.update(value.untyped_storage()._cdata for value in values if value is not None)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.known, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def _like(self, value: torch.Tensor) -> Any:
        fake: Any = torch.empty(value.shape, dtype=value.dtype, device=cpu)
        fake._known = value
        return fake

    def _follow(self, func: Any, args: Any, tensors: list[torch.Tensor], made: list[FakeTensor]) -> None:
        """Mark results that depend on weights alone, and the scores of attention that is written as two matmuls."""
        fake: Any
        if any(is_weight(tensor) for tensor in tensors) and all(
            is_weight(tensor) or (not tensor.dtype.is_floating_point and self.known(tensor) is not None)
            for tensor in tensors
        ):
            for fake in made:
                fake._weight = True
        product = next((tensor for tensor in tensors if hasattr(tensor, "_product")), None)
        if product is not None and made and made[0].numel() == product.numel():
            fake = made[0]
            fake._product = product._product
        elif product is not None and func is aten.topk.default and len(list(_modules_at_work())) > 1:
            product._product.forward = 0
        before = next((tensor for tensor in tensors if hasattr(tensor, "_scores")), None)
        if before is None or not made or hasattr(made[0], "_scores"):
            return
        scores: Scores = before._scores
        fake = made[0]
        # Attention sinks are appended to the scores before the softmax and removed after it.
        if fake.numel() != before.numel() and func._opname not in ("cat", "slice"):
            return
        fake._scores = scores
        if func in (aten._softmax.default, aten._safe_softmax.default):
            scores.softmaxed = True
        elif not scores.softmaxed:
            scores.masks.extend(self._masks(func._opname, args, scores))

    def _masks(self, op: str, args: Any, scores: Scores) -> Iterator[torch.Tensor | None]:
        """Yield the visible scores under each mask that an operator applies, None if the mask's values are unknown."""
        for mask in args:
            if not isinstance(mask, torch.Tensor) or hasattr(mask, "_scores") or is_weight(mask):
                continue
            if mask.shape[-2:] != (scores.queries, scores.keys):
                continue
            if op in ("where", "masked_fill", "masked_fill_"):
                if mask.dtype == torch.bool:
                    hides = op != "where" or not hasattr(args[1], "_scores")
                    yield self.visible(mask, hides=hides)
            else:
                yield self.visible(mask) if op in ("add", "add_", "sub") else None

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[FakeTensor], function: type | None) -> None:
        op = func._opname
        if op in MATMULS:
            a, b = args[MATMULS[op] : MATMULS[op] + 2]
            self._matmul(op, a, b, args[0] if op == "baddbmm" else None, made[0], function)
        elif op in ("convolution", "_convolution"):
            image, kernel, transposed = args[0], args[1], args[6]
            # Each element of the kernel meets each position of the smaller tensor, the input if transposed.
            places = (image if transposed else made[0]).shape
            self._add(op, 2 * kernel.numel() * prod(places) // places[1], (image, kernel), function)
        elif op == "mkldnn_rnn_layer":  # of an LSTM
            steps, of_input, of_state = args[:3]
            weights = of_input.numel() + of_state.numel()
            self._add(op, 2 * weights * prod(steps.shape[:2]), (steps, of_input), function)
        elif op.startswith("_scaled_dot_product") or op == "_flash_attn_forward":
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            if "backward" in op:
                raise self.refuse(f"the forward calls {func.name()}")
            if op == "_flash_attn_forward":
                if (given["window_size_left"], given["window_size_right"]) not in ((-1, -1), (-1, 0)):
                    raise self.refuse("the counter does not know flash_attn with a window")
                q, k, v = given["q"], given["k"], given["v"]
                batch, queries, heads, dim = q.shape
                sizes = batch * heads, queries, k.shape[1], dim + v.shape[3]
                self._attention((q, k), sizes, None, bool(given["causal"]), function)
            else:
                query, key, value = given["query"], given["key"], given["value"]
                mask = given.get("attn_mask", given.get("attn_bias"))
                self.attention(query, key, value, mask, bool(given.get("is_causal")), function)
        elif not op.startswith("_thnn_fused") and any(word in OPAQUE or word.endswith("mm") for word in op.split("_")):
            raise self.refuse(f"the counter does not know the operator {func.name()}")

    def _add(self, op: str, flops: int, operands: tuple[torch.Tensor, ...], function: type | None) -> OperatorFlops:
        flops *= max(map(parts_of, operands))  # one part on each of these ranks
        gradients = 0
        if (torch.is_grad_enabled() or function is not None) and any(map(needs_grad, operands)):
            if function is not None and not function.__module__.startswith(("torch.", "flash_attn.")):
                raise self.refuse(f"{function.__qualname__} is an autograd.Function: its backward can be anything")
            # By convention the batch, the input of the first layer, has a gradient; frozen weights have none.
            frozen = sum(is_weight(operand) and not needs_grad(operand) for operand in operands)
            gradients = 2 - frozen
        self._entries.append(entry := OperatorFlops(op, flops, gradients))
        return entry

    def _matmul(
        self, op: str, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, out: Any, function: type | None
    ) -> None:
        flops = 2 * a.numel() * (b.shape[0] if op == "linear" else b.shape[-1] if b.ndim > 1 else 1)
        if a.ndim == 3 and b.ndim == 2 and op != "linear":
            flops //= a.shape[0]  # grouped by the columns of b: each meets one matrix of a
        if a.shape[-1] == 1 and not is_weight(a) and not is_weight(b):
            return  # an outer product, for example of positions and frequencies: no sum
        entry = self._add(op, flops, (a, b), function)
        if is_weight(a) != is_weight(b):
            out._product = entry
        parts = parts_of(a), parts_of(b)
        # Both are cut along the summed dimension: hooks that the fake copy lacks add up the parts.
        if max(parts) > 1 and (min(parts) == 1 or not (is_weight(a) or is_weight(b))):
            out._parts = max(parts)
        scores: Scores | None = getattr(a, "_scores", None)
        if scores is not None and scores.softmaxed and a.shape[-2:] == (scores.queries, scores.keys):
            pairs = prod(a.shape[:-2]) * scores.queries * scores.keys
            twice = 2 * pairs
            if scores.masks:
                masks = [mask for mask in scores.masks if mask is not None]
                with _disable_current_modes():
                    mask = functools.reduce(torch.logical_and, masks) if len(masks) == len(scores.masks) else None
                twice = self._twice_pairs(prod(a.shape[:-2]), scores.queries, scores.keys, mask)
            for part in (scores.entry, entry):
                part.op, part.forward = "attention", part.forward * twice // (2 * pairs)
        elif op in ("bmm", "baddbmm") and not is_weight(a) and not is_weight(b):
            out._scores = scores = Scores(entry, out.shape[-2], out.shape[-1])
            if added is not None and added.shape[-2:] == out.shape[-2:]:
                scores.masks.append(self.visible(added))

    def attention(
        self, query: Any, key: Any, value: Any, mask: torch.Tensor | None, causal: bool, function: type | None = None
    ) -> None:
        """Count the attention of query [..., heads, queries, e] to key and value [..., heads or fewer, keys, e].

        With `causal`, scores it hides do not count and `mask` is ignored. Else those that `mask` hides do not count.
        `function` is the autograd.Function around the call. Its backward counts if PyTorch or flash_attn defines it.
        Raises Uncountable if another one needs a gradient, or if the visible scores are unknown.
        """
        sizes = prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1] + value.shape[-1]
        self._attention((query, key), sizes, mask, causal, function)

    def _attention(
        self, operands: tuple[Any, ...], sizes: tuple[int, ...], mask: Any, causal: bool, function: type | None
    ) -> None:
        """Count an attention. `sizes` are heads of all samples, queries, keys, dimensions of key plus value."""
        among, queries, keys, dims = sizes
        if self.packs:
            self._refuse_packed()
        if causal:
            # As scaled_dot_product_attention aligns it: query i sees keys 0 ... i.
            twice = among * (queries * keys if queries == keys else 2 * sum(min(i + 1, keys) for i in range(queries)))
        elif mask is None or is_weight(mask):
            twice = 2 * among * queries * keys
        else:
            twice = self._twice_pairs(among, queries, keys, self.visible(mask))
        self._add("attention", dims * twice, operands, function)

    def _twice_pairs(self, among: int, queries: int, keys: int, visible: torch.Tensor | None) -> int:
        """Return twice the number of scores that are `visible` under a mask, for `among` heads of all samples."""
        if visible is None:
            return among * self._twice_pairs_of_module(queries, keys)
        if id(visible) not in self._pairs:
            with _disable_current_modes():
                every = visible.expand(*visible.shape[:-2], queries, keys)
                if queries == keys and bool((every == every.new_ones(queries, keys).tril()).all()):
                    twice = every.numel()  # half of the square, diagonal or not
                else:
                    twice = 2 * int(every.sum())
            self._pairs[id(visible)] = (visible, twice, prod(every.shape[:-2]))
        _, twice, heads = self._pairs[id(visible)]
        return twice * among // heads

    def _twice_pairs_of_module(self, queries: int, keys: int) -> int:
        """Return twice the number of visible scores of one head, from the attention module's attributes."""
        self._refuse_packed()  # transformers finds samples by their positions and builds a mask from them
        for module in _modules_at_work():
            causal = getattr(module, "is_causal", None)
            if isinstance(causal, bool) and queries == keys:
                window = _attention_window(module)
                if not causal and window is None:
                    return 2 * queries * keys
                if causal:
                    return queries * keys if window is None or window >= keys else window * (2 * keys - window + 1)
        raise self.refuse("attention takes a mask whose values are not known on the host")

    def _refuse_packed(self) -> None:
        if self._may_be_packed:
            raise self.refuse("position_ids without attention_mask: whether samples are packed depends on data")

    def visible(self, mask: torch.Tensor, *, hides: bool = False) -> torch.Tensor | None:
        """Return booleans, True for each visible score, None if unknown. `hides`: True in the mask hides the score."""
        if (value := self.known(mask)) is None:
            return None
        which = (value.data_ptr(), value._version, value.shape, value.stride(), hides)  # each layer cuts its own view
        if which not in self._visible:
            with _disable_current_modes():
                visible = value > HIDDEN if value.dtype != torch.bool else ~value if hides else value
            self._visible[which] = (value, visible)
        return self._visible[which][1]


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
        function = _autograd_function() if not torch.is_grad_enabled() else None
        counter.attention(*operands, bool(given.get("is_causal")), function)
        counter.paused += 1
        try:
            return func(*args, **kwargs)
        finally:
            counter.paused -= 1


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != f"{__package__}.count":
        yield frame
        frame = frame.f_back


def _autograd_function() -> type | None:
    """Return the autograd.Function whose forward is running, else None."""
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return next((frame.f_locals["cls"] for frame in _frames() if frame.f_code is apply), None)


def _attention_window(module: Any) -> int | None:
    """Return how many keys a query of a transformers attention module sees, its own included. None without a window."""
    config = getattr(module, "config", None)
    window: int | None = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if not hasattr(module, "sliding_window") and getattr(config, "layer_types", None):
        return window if config.layer_types[module.layer_idx] == "sliding_attention" else None  # type: ignore[union-attr]
    return window


def _modules_at_work() -> Iterator[torch.nn.Module]:
    """Return an iterator of the modules whose forward is running, the innermost first."""
    call = torch.nn.Module._call_impl.__code__
    return (frame.f_locals["self"] for frame in _frames() if frame.f_code is call)
