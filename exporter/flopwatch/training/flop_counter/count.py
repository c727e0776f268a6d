"""FLOPs of a model without a configuration, counted on tensors without data (docs/counted.md).

A copy of the model (fake_model.py) runs its forward on the shapes of a batch under a counter (operators.py). The model
itself is neither called nor changed. DTensor and FSDP parameters have their global shape, so that a count covers all
ranks that share the model. If the forward does not run on those shapes, the copy has this rank's shards instead.
https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

import contextlib
import functools
import inspect
import logging
import random
import sys
import traceback
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from flopwatch.training.context_managers import Activity
from flopwatch.training.flop_counter.fake_model import FakeModels, cut_parameters
from flopwatch.training.flop_counter.operators import Attention, Counter
from flopwatch.training.flop_counter.results import Counted, Uncountable
from flopwatch.training.recorder import Recorder
from flopwatch.training.torch.outputs import tensors
from flopwatch.training.torch.waits import Replaced

__all__ = ["Counted", "Uncountable", "attach", "count"]

SAMPLE = 16  # parameters inspected in each pass, because inspecting all of a large model would take too long
MAX_SHAPES = 32  # batch shapes that are counted one by one


def count(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Counted:
    """Return the FLOPs of `model(*args, **kwargs)` and its backward pass, from tensor shapes. Raises Uncountable."""
    counted = _count(model, args, dict(kwargs or {}), {})
    # The code of a model written for tensor parallelism may contain its rank's number of heads.
    if isinstance(counted, Uncountable) and (parts := cut_parameters(model)):
        counted = _count(model, args, dict(kwargs or {}), parts)
    if isinstance(counted, Uncountable):
        raise counted
    return counted


def _count(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parts: dict[int, tuple[int, int]]
) -> Counted | Uncountable:
    """Return the FLOPs with `parts` of the parameters as on one rank, or why the forward fails. Raises Uncountable."""
    counter = Counter(FakeTensorMode(allow_non_fake_inputs=True), parts)
    twins = FakeModels(counter)
    failed: Uncountable | None = None
    try:
        with _nothing_changed():
            tokens = _run(model, twins, counter, args, kwargs)
    except Uncountable as error:
        counter.refused = counter.refused or error
        error.__traceback__ = None  # its frames hold tensors
    except Exception as error:
        failed = Uncountable(_reason(error))
        error.__traceback__ = None
    twins.clear()
    counter.clear()
    if counter.refused is not None:
        raise counter.refused
    return counter.counted(tokens) if failed is None else failed


def _reason(error: Exception) -> str:
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_globals.get("__name__") == "torch.nn.attention.flex_attention" for frame, _ in frames):
        return "the number of scores under a mask function of flex_attention is unknown"
    lines = str(error).strip().splitlines() or [""]
    return f"the forward does not run on tensors without data: {type(error).__name__}: {lines[0]}"


def _run(
    model: torch.nn.Module, twins: FakeModels, counter: Counter, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """Run the forward of the model's fake copy. Return the number of tokens in the batch, None if unknown."""
    with counter.mode, torch.enable_grad():
        twin = twins.of(model)
        arguments = inspect.signature(twin.forward).bind(*args, **kwargs)
        args, kwargs = counter.inputs(arguments)
        with _autocast(model), counter, Attention(counter):
            twin(*args, **kwargs)
    ids = arguments.arguments.get("input_ids", arguments.arguments.get("kwargs", {}).get("input_ids"))
    return ids.numel() if isinstance(ids, torch.Tensor) and not ids.dtype.is_floating_point else None


def attach(recorder: Recorder, model: torch.nn.Module) -> RemovableHandle | Replaced:
    """Count the FLOPs of a model's training passes. `model` is the module that the loop calls, wrappers included."""
    passes = _Passes(recorder, model)
    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is None:
        return model.register_forward_hook(passes, with_kwargs=True)

    # After model.compile() a forward hook would be compiled too, and never run.
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        passes(model, args, kwargs, output)
        return output

    return Replaced(model, "_compiled_call_impl", call)


class _Passes:
    """Forward hook that counts the FLOPs of each new batch shape once, after the model's forward has filled caches."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module) -> None:
        self._recorder = recorder
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        # Inspected in each pass, because weights may be frozen for some passes.
        self._sample = parameters[:: max(1, len(parameters) // SAMPLE)]
        self._counts: dict[Hashable, Counted] = {}
        self._by_length: dict[tuple[int, int, int], Counted] = {}  # by trainable parameters, batch and length
        self._gave_up = False

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            if self._gave_up or not torch.is_grad_enabled() or not self._recorder.alive:
                return
            if not (outputs := [tensor for tensor in tensors(output) if tensor.requires_grad]):
                return
            if (counted := self._look_up(model, args, kwargs)) is None:
                return
            # Generated code can't run a hook that is another object in each step.
            autograd = sys.modules.get("torch._dynamo.compiled_autograd")
            if getattr(autograd, "compiled_autograd_enabled", False):
                self._recorder.counted(counted.flops)
                return
            self._recorder.counted(counted.forward)
            backward = [counted.backward]

            def begins(_: torch.Tensor) -> None:
                if backward:
                    self._recorder.counted(backward.pop())

            for tensor in outputs:
                tensor.register_hook(begins)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._recorder.failed("count", error)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of the model gets a hook that does nothing and needs no flopwatch.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def _look_up(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counted | None:
        trainable = sum([(parameter := known()) is not None and parameter.requires_grad for known in self._sample])
        key = (trainable, _shapes(args), _shapes(kwargs))
        counted = self._counts.get(key)
        if counted is None:
            lengths = _batch_and_length((args, kwargs))
            alike = [(batch, length, one) for (t, batch, length), one in self._by_length.items() if t == trainable]
            counted = None if lengths is None else _predicted(*lengths, alike)
            if counted is None:
                try:
                    counted = self._count(model, args, kwargs)
                except Uncountable as reason:
                    self._gave_up = True
                    self._recorder.uncountable(str(reason))
                    return None
                self._counts[key] = counted
                if lengths is not None:
                    self._by_length[(trainable, *lengths)] = counted
        return counted

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counted:
        if len(self._counts) >= MAX_SHAPES:
            raise Uncountable(f"batches have more than {MAX_SHAPES} shapes, and no formula fits them")
        with Activity(self._recorder, "other"):
            counted = count(model, args, kwargs)
        if not self._counts:
            self._recorder.set_flops(convention="causal", source="counted")
        return counted


def _predicted(batch: int, length: int, counts: Sequence[tuple[int, int, Counted]]) -> Counted | None:
    """Return the FLOPs of [batch, length] if three `counts` (batch, length, FLOPs) fit a formula, else None.

    The formula is batch x (a x length + b x length^2). One of the counts must be as long.
    """
    if len(counts) < 3 or length > max(known for _, known, _ in counts):
        return None
    (n, s, shortest), (k, t, longest) = min(counts, key=lambda c: c[1]), max(counts, key=lambda c: c[1])
    if s == t:
        return None
    flops = []
    for part in ("forward", "backward"):
        f, g = Fraction(getattr(shortest, part), n * s), Fraction(getattr(longest, part), k * t)
        b = (g - f) / (t - s)
        a = f - b * s
        if any(many * long * (a + b * long) != getattr(counted, part) for many, long, counted in counts):
            return None
        flops.append(int(batch * length * (a + b * length)))
    return Counted(flops[0], flops[1], None)


def _batch_and_length(value: Any) -> tuple[int, int] | None:
    """Return the shape [batch, length] that all tensors but scalars share, None if they share none."""
    shapes = {tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    shape: Any = shapes.pop() if len(shapes) == 1 else ()
    return shape if len(shape) == 2 and prod(shape) else None


def _shapes(value: Any) -> Hashable:
    """Return a key from the properties of arguments that decide the FLOPs: shapes, booleans and strings."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(item) for item in value])
    if isinstance(value, Mapping):
        return tuple([(name, _shapes(item)) for name, item in value.items()])
    return value if isinstance(value, (bool, str)) else None


@contextlib.contextmanager
def _nothing_changed() -> Iterator[None]:
    """Return a context manager that restores random states, compiles nothing and logs nothing."""
    numbers, torch_numbers = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_numbers = None if numpy is None else numpy.random.get_state()
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs a traceback for an operator without a fake kernel
    was_silent, log.disabled = log.disabled, True
    try:
        # Otherwise functions under torch.compile would be compiled for fake tensors.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext():
            yield
    finally:
        log.disabled = was_silent
        random.setstate(numbers)
        torch.set_rng_state(torch_numbers)
        if numpy is not None:
            numpy.random.set_state(numpy_numbers)


def _autocast(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the model's autocast for the CPU, where the fake copy is, without a cache that would keep fake tensors."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    device = "cpu" if device == "meta" else device
    return torch.autocast(
        "cpu", torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False
    )
