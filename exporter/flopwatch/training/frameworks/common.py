"""What the framework callbacks share: the batches a trainer takes, what is in them, and FLOPs from the model's config.

The batches. Trainers iterate `torch.utils.data.DataLoader`s, some one batch ahead of the one they train on, some a new
one that skips what a checkpoint consumed, and tell callbacks of a batch only once it is on the device, where counting
what an attention mask leaves would stop the host. So the loader's `__iter__` is wrapped, once per process, and hands
its iterator to the run that watches: the wait for a batch is then the loader's and nothing else's, and what is in the
batch is counted while it is on the CPU. An epoch of a loader nobody watches costs one comparison.
https://docs.pytorch.org/docs/stable/data.html

Absent: the tokens of a batch without an integer `input_ids` (pass `tokens=`), or whose attention mask is on a device;
waits for batches that come from something else than a DataLoader.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from flopwatch.training import Run
from flopwatch.training.sequence_lengths import lengths

log = logging.getLogger("flopwatch")

_Method = TypeVar("_Method", bound=Callable[..., None])

LOSSES = ("loss", "train_loss", "train/loss", "train_loss_step", "loss_step", "loss_metrics/global_avg_loss")
GRAD_NORMS = ("grad_norm", "train/grad_norm", "grad_2.0_norm_total", "total_norm")


def framework(*modules: str) -> Any:
    """Return the first of these modules that is imported, or else can be. Raises ImportError."""
    for module in modules:
        if module in sys.modules:
            return sys.modules[module]
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # it is there, and something it needs is not
    names = [module.partition(".")[0] for module in modules]
    raise ImportError(f"this needs {' or '.join(names)}, which is not installed: pip install {names[0]}")


def guarded(method: _Method) -> _Method:
    """Let no error of a callback's method reach the trainer; `self.failed(what, error)` is told."""

    @functools.wraps(method)
    def quiet(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed(method.__name__, error)

    return cast(_Method, quiet)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch holds; None is unknown."""

    samples: int | None = None
    tokens: int | None = None
    lengths: Sequence[int] | None = None  # of the samples, padding left out


def count(batch: Any, tokens: Callable[[Any], int | None] | None = None) -> Batch:
    """Return what is in a batch, as far as the CPU knows; `tokens` counts them where the batch does not say."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    samples = _samples(batch if ids is None else ids)
    if tokens is not None:
        return Batch(samples, tokens(batch))
    if ids is None or not hasattr(ids, "dtype") or ids.dtype.is_floating_point or ids.dim() != 2:
        return Batch(samples)
    known = _lengths(ids, batch)
    return Batch(samples, None if known is None else sum(known), known)


def _lengths(ids: Any, batch: Mapping[str, Any]) -> Sequence[int] | None:
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        return None  # one of four dimensions says who sees whom, not what is padding
    return lengths(ids, mask, batch.get("position_ids"))


def _samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((n for n in map(_samples, batch) if n is not None), None)
    shape: Sequence[int] = getattr(batch, "shape", ())
    return shape[0] if len(shape) else None


def report_logged(run: Run, values: Mapping[str, Any]) -> None:
    """Tell the loss and grad_norm of the last step, where what the trainer logs of it has them as plain numbers."""
    loss, grad_norm = _plain(values, LOSSES), _plain(values, GRAD_NORMS)
    if loss is not None or grad_norm is not None:
        run.logged(loss=loss, grad_norm=grad_norm)


def _plain(values: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """Return the first of these values that is a plain number."""
    found = (values.get(name) for name in names)
    return next((float(value) for value in found if isinstance(value, (int, float))), None)


class ReporterMixin:
    """What the callbacks share: whom errors of theirs are told, and that a copy of one begins anew."""

    run: Run | None = None
    _session: TrainingSession | None = None

    def failed(self, what: str, error: Exception) -> None:
        """Count an error of ours; log it if there is no run to count it."""
        if self.run is not None:
            self.run.recorder.failed(what, error)
        else:
            log.warning("%s: %s (training goes on)", what, error)

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be sent to another process, as trainers do that start their ranks; a run cannot."""
        return {name: value for name, value in vars(self).items() if name not in ("run", "_session")}


class MethodWrapper:
    """`call(method, *args, **kwargs)` in place of a method of one object; a copy of the object has the method itself.

    What an older run put there is replaced, so that a trainer used twice has one around each method.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        self.method: Callable[..., Any] = method.method if isinstance(method, MethodWrapper) else method
        self._call = call
        functools.update_wrapper(self, self.method)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.method, *args, **kwargs)

    def __reduce__(self) -> Any:
        # A run has a thread and cannot be pickled, and what is pickled or copied may hold this: a trainer, a logger.
        # As a method is pickled; the object has nothing of its own under that name while it is put together.
        method: Any = self.method
        return getattr, (method.__self__, method.__name__)


class LoaderWatch:
    """The DataLoaders a trainer iterates: their waits, and what the training ones hold."""

    def __init__(
        self,
        run: Run,
        role: Callable[[Any], str],
        evaluating: Callable[[], None],
        training: Callable[[], None],
        tokens: Callable[[Any], int | None] | None = None,
    ) -> None:
        """Watch the loaders this thread iterates from now on.

        role        what a loader's batches are for: "training", "evaluation" or anything else
        evaluating  called as an evaluation loader's iteration begins
        training    called before a batch of a training loader is asked for
        """
        self.run = run
        self._fetched: dict[int, deque[Batch]] = {}  # of each data set, the batches that no step has taken yet
        self._role, self._evaluating, self._training = role, evaluating, training
        self._tokens = tokens
        self._thread = threading.get_ident()

    def __enter__(self) -> LoaderWatch:
        global _watching
        _wrap_loaders()
        _watching = self
        return self

    def __exit__(self, *_: object) -> None:
        global _watching
        if _watching is self:
            _watching = None

    def begins(self, loader: Any) -> deque[Batch] | None:
        """Note that a loader's iteration begins; return where its batches go, None if they are not trained on."""
        try:
            if threading.get_ident() != self._thread:
                return None
            role = self._role(loader)
            if role == "evaluation":
                self._evaluating()
            if role != "training":
                return None
            self._training()
            # What an epoch before fetched ahead and did not use is gone.
            fetched = self._fetched[_data(loader)] = deque()
            self.run.waiting_for_batch()
            return fetched
        except Exception as error:
            self.run.recorder.failed("loaders", error)
            return None

    def asks(self) -> None:
        """Note that a training batch is asked for."""
        try:
            self._training()
            self.run.waiting_for_batch()
        except Exception as error:
            self.run.recorder.failed("loaders", error)

    def got(self, fetched: deque[Batch], *batch: Any) -> None:
        """Note that the batch, or the end of the loader, is there."""
        try:
            self.run.got_batch()
            for one in batch:
                fetched.append(count(one, self._tokens))
        except Exception as error:
            fetched.append(Batch())
            self.run.recorder.failed("loaders", error)

    def take(self, loader: Any = None) -> list[Batch]:
        """Return the oldest batch not taken yet, of this loader or of each; one that is not there is unknown."""
        queues = self._fetched.values() if loader is None else [self._fetched.get(_data(loader), deque())]
        return [queue.popleft() for queue in queues if queue] or [Batch()]

    def take_all(self) -> list[Batch]:
        """Return all batches not taken yet."""
        return [queue.popleft() for queue in self._fetched.values() for _ in range(len(queue))]


_watching: LoaderWatch | None = None


def _data(loader: Any) -> int:
    """Return what tells a loader from one of other data, and not from one that skips the data's first batches."""
    return id(getattr(loader, "dataset", loader))


def same_batches(loader: Any, first: Any) -> bool:
    """Return whether a loader yields what `first` does, perhaps without the first batches.

    Accelerate's skip_first_batches makes a loader whose batch sampler has the other's inside; an iterable data set has
    no sampler. The data set alone does not tell: an evaluation may be on that of the training.
    """
    own, theirs = getattr(loader, "batch_sampler", None), getattr(first, "batch_sampler", None)
    if own is None or theirs is None:
        return getattr(loader, "dataset", loader) is getattr(first, "dataset", first)
    return (
        own is theirs
        or getattr(own, "batch_sampler", None) is theirs
        or getattr(getattr(loader, "sampler", None), "batch_sampler", None) is first.sampler
    )


class _WatchedIterator(Iterator[Any]):
    """A loader's iterator, with the waits for its batches told."""

    def __init__(self, iterator: Iterator[Any], loaders: LoaderWatch, fetched: deque[Batch]) -> None:
        self._iterator, self._loaders, self._fetched = iterator, loaders, fetched

    def __next__(self) -> Any:
        loaders = self._loaders
        loaders.asks()
        try:
            batch = next(self._iterator)
        except BaseException:
            loaders.got(self._fetched)
            raise
        loaders.got(self._fetched, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _wrap_loaders() -> None:
    """Let the iterators of all DataLoaders go by whoever watches."""
    kinds = [framework("torch.utils.data").DataLoader]
    if "torchdata.stateful_dataloader" in sys.modules:  # which has an __iter__ of its own
        kinds.append(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader)
    for kind in kinds:
        around_iter(kind, _begin)


def _begin(loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    loaders = _watching
    fetched = None if loaders is None else loaders.begins(loader)
    iterator = original(loader)
    return iterator if loaders is None or fetched is None else _WatchedIterator(iterator, loaders, fetched)


def around_iter(kind: Any, around: Callable[[Any, Callable[[Any], Iterator[Any]]], Iterator[Any]]) -> None:
    """Have `around(loader, original)` stand in for a class's __iter__, unless it does already."""
    original = kind.__iter__
    if hasattr(original, "flopwatch"):
        return

    @functools.wraps(original)
    def iterate(loader: Any) -> Iterator[Any]:
        return around(loader, original)

    # On the function, where whoever wraps it with functools.wraps keeps it.
    vars(iterate)["flopwatch"] = True
    kind.__iter__ = iterate


class TrainingSession:
    """One training run under a trainer: its Run, what the batches since the last step held, and its open activity."""

    def __init__(self, run: Run, *, role: Callable[[Any], str], tokens: Callable[[Any], int | None] | None) -> None:
        self.run = run
        self.loaders = LoaderWatch(run, role, functools.partial(self.begin, "evaluation"), self.end, tokens)
        self.loaders.__enter__()
        self._flops: Callable[[Sequence[int]], int] | None = None
        self._consumed: list[Batch] = []
        self._activity: str | None = None  # that is open

    def begin(self, activity: str) -> None:
        """Begin an activity, unless that one is open; it ends with `end`, or as another begins."""
        if self._activity != activity:
            self.end()
            self._activity = activity
            self.run.recorder.enter(activity)

    def end(self, *activities: str) -> None:
        """End the open activity, if it is one of these; whatever it is, if none is named."""
        activity = self._activity
        if activity is not None and (not activities or activity in activities):
            self._activity = None
            self.run.recorder.leave(activity)

    def consume(self, *batches: Batch) -> None:
        """Count batches towards the open step."""
        self._consumed += batches

    def count_flops(self, model: Any, *, given: Any, convention: str) -> None:
        """Count FLOPs by the length of each sample: from the `Transformer` given, else from the model's config."""
        from flopwatch import flops

        transformer = given if hasattr(given, "flops_of_samples") else None
        config: Any = getattr(model, "config", None)
        if given is None and hasattr(config, "model_type"):
            try:
                if not all(parameter.requires_grad for parameter in model.parameters()):
                    raise flops.UnknownModel("part of the model is frozen, which its config does not say")
                transformer = flops.from_config(config)
                self.run.recorder.set_flops(convention=convention, source="config", per_token=transformer)
            except flops.UnknownModel as error:
                log.warning(
                    "no FLOPs from the model's config: %s; they are counted instead, or pass flops_per_token=", error
                )
        if transformer is not None:
            # Most lengths come again; what one costs takes longer to find than the rest of a step's record.
            cost = functools.lru_cache(maxsize=1 << 16)(
                functools.partial(transformer.flops_per_sequence, convention=convention)
            )
            self._flops = lambda lengths: sum(cost(length) for length in lengths if length)

    def step(self, tokens: float | None = None) -> float | None:
        """Count the step that consumed what was told since the last, and return its tokens, given or told."""
        consumed, self._consumed = self._consumed, []
        counts = [batch.tokens for batch in consumed]
        samples = [batch.samples for batch in consumed]
        if consumed and None not in counts:
            tokens = sum(n for n in counts if n is not None)
        flops = None
        if self._flops is not None and consumed and all(batch.lengths is not None for batch in consumed):
            flops = sum(self._flops(batch.lengths) for batch in consumed if batch.lengths is not None)
        self.run.step(
            tokens,
            flops=flops,
            samples=sum(n for n in samples if n is not None) if consumed and None not in samples else None,
        )
        return tokens

    def finish(self, status: str) -> None:
        """End the run and stop watching."""
        self.end()
        self.loaders.__exit__()
        self.run.finish(status)


def watch(run: Run, model: Any) -> None:
    """Have the run measure a model's waits: those of the DDP model around it, which the first forward pass shows."""
    distributed = framework("torch.distributed")
    if not (distributed.is_available() and distributed.is_initialized()):
        run.watch(model)
        return
    compiler = framework("torch.compiler")
    ddp = framework("torch.nn.parallel.distributed").DistributedDataParallel

    def first_forward(*_: Any) -> None:
        if compiler.is_compiling():
            return  # a hook that does nothing costs a compiled model nothing; its waits stay unmeasured
        try:
            handle.remove()
            # Of PyTorch since 1.12, for its compiler, which has to find the same from inside.
            around = getattr(ddp, "_get_active_ddp_module", lambda: None)()
            run.watch(model if around is None else around)
        except Exception as error:
            run.recorder.failed("watch", error)

    handle = model.register_forward_pre_hook(first_forward)


def accelerate_replica() -> tuple[int | None, Any]:
    """Return how many ranks share a model replica under Accelerate, None if unknown, and its device mesh if it has one.

    https://huggingface.co/docs/accelerate/concept_guides/parallelism
    """
    state = framework("accelerate.state").AcceleratorState
    if not state._shared_state:  # making one would initialise it
        return None, None
    state = state()
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    mesh = getattr(state, "device_mesh", None)
    parallelism = getattr(state, "parallelism_config", None)
    if kind == "MEGATRON_LM":
        return None, mesh  # Megatron's own state knows
    ranks = 1
    for size in ("tp_size", "cp_size", "sp_size"):
        ranks *= int(getattr(parallelism, size, 1) or 1)
    return ranks, mesh


def begin(name: str | None, facts: Callable[[], dict[str, Any]], given: Mapping[str, Any]) -> Run:
    """Return a Run with what is given, else with what the framework knows, else without."""
    try:
        known = facts()
    except Exception as error:
        log.warning("what the framework knows of the run is not as expected: %r (training goes on)", error)
        known = {}
    return Run(**{"name": name, "step_source": "trainer", **known, **given})


def matmul_dtype(*, precision: str) -> str:
    """Return peaks' name of a precision as trainers name it: bf16-mixed, 16-true, fp16, torch.float32, no ..."""
    name = precision.removeprefix("torch.").partition("-")[0]
    known = {
        "bfloat16": "bf16",
        "bf16": "bf16",
        "16": "fp16",
        "float16": "fp16",
        "fp16": "fp16",
        "fp8": "fp8",
        "transformer": "fp8",
        "64": "fp64",
        "float64": "fp64",
    }
    if name in known:
        return known[name]
    return "tf32" if framework("torch").get_float32_matmul_precision() != "highest" else "fp32"
