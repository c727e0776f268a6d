"""Shared parts of the framework callbacks: batches and their contents, and FLOPs from the model's config.

Callbacks see a batch only on the device, where counting the tokens under an attention mask would stop the host. So
`__iter__` of `torch.utils.data.DataLoader` is replaced once per process. Batches of the active TrainingSession are then
counted while they are on the CPU. Tokens are absent without an integer `input_ids` (pass `tokens=`).
"""

import functools
import importlib
import logging
import math
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
TokensOf = Callable[[Any], int | None] | None  # returns the tokens of a batch as the loader yields it

LOSSES = ("loss", "train_loss", "train/loss", "train_loss_step", "loss_step", "loss_metrics/global_avg_loss")
GRAD_NORMS = ("grad_norm", "train/grad_norm", "grad_2.0_norm_total", "total_norm")


def framework(*modules: str) -> Any:
    """Return the first of these modules that is already imported, else the first that can be. Raises ImportError."""
    for module in modules:
        if module in sys.modules:
            return sys.modules[module]
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # it is installed, and something it needs is not
    names = [module.partition(".")[0] for module in modules]
    raise ImportError(f"this needs {' or '.join(names)}, which is not installed: pip install {names[0]}")


def guarded(method: _Method) -> _Method:
    """Return the callback's method with every exception caught, and reported to its run if there is one."""

    @functools.wraps(method)
    def guard(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            failed(self.run, method.__name__, error)

    return cast(_Method, guard)


def during_run(method: Callable[..., None]) -> Callable[..., None]:
    """Return the callback's method, guarded, and called with the session in front only while there is one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            method(self, self._session, *args, **kwargs)

    return guarded(call)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, tokens and sample lengths of one batch. None if unknown."""

    samples: int | None = None
    tokens: int | None = None
    lengths: Sequence[int] | None = None  # of the samples, padding left out


def dispatches(loader: Any, world_size: int) -> bool:
    """Return whether an accelerate loader fetches the batches of all ranks."""
    # The type is compared by name, because loaders claim the class they wrap.
    return world_size > 1 and type(loader).__name__ == "DataLoaderDispatcher"


def splits_sequences() -> bool:
    """Return whether DeepSpeed's Ulysses splits each batch among ranks, so that a loader's batches are not a rank's."""
    groups = sys.modules.get("deepspeed.utils.groups")
    try:
        return groups is not None and groups._get_sequence_parallel_world_size() > 1
    except Exception:  # there are no groups
        return False


def count(batch: Any, tokens: TokensOf = None) -> Batch:
    """Return the samples and tokens of a batch on the CPU. `tokens(batch)`, if given, replaces counting `input_ids`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    samples = _samples(batch if ids is None else ids)
    if tokens is not None:
        return Batch(samples, tokens(batch))
    if ids is None or not hasattr(ids, "dtype") or ids.dtype.is_floating_point or ids.dim() != 2:
        return Batch(samples)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        return Batch(samples)  # a mask of four dimensions is about visible keys, not padding
    unpadded = lengths(ids, mask, batch.get("position_ids"))
    return Batch(samples, None if unpadded is None else sum(unpadded), unpadded)


def _samples(batch: Any) -> int | None:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((n for n in map(_samples, batch) if n is not None), None)
    shape: Sequence[int] = getattr(batch, "shape", ())
    return shape[0] if len(shape) else None


def report_logged(run: Run, values: Mapping[str, Any]) -> None:
    """Report loss and grad_norm among a trainer's logged values as the last step's, if they are Python numbers."""
    loss, grad_norm = _plain(values, LOSSES), _plain(values, GRAD_NORMS)
    if loss is not None or grad_norm is not None:
        run.logged(loss=loss, grad_norm=grad_norm)


def log_metrics(run: Run, log: Callable[..., Any], metrics: Any, *args: Any, **kwargs: Any) -> Any:
    """Report loss and grad_norm among a logger's metrics, then return the result of the logger's method `log`."""
    with run.recorder.reporting(getattr(log, "__name__", "log")):
        report_logged(run, metrics)
    return log(metrics, *args, **kwargs)


def _plain(values: Mapping[str, Any], names: Sequence[str]) -> float | None:
    candidates = (values.get(name) for name in names)
    return next((float(value) for value in candidates if isinstance(value, (int, float))), None)


def failed(run: Run | None, what: str, error: Exception) -> None:
    """Report an error of the method `what` to the run, or log it if there is no run yet."""
    if run is not None:
        run.recorder.failed(what, error)
    else:
        log.warning("%s: %s (training goes on)", what, error)


class ReporterMixin:
    """Mixin of the callbacks that reports their errors, and leaves the run out of pickles and copies."""

    run: Run | None = None
    _session: "TrainingSession | None" = None

    def _finish(self, status: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.finish(status)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the run, which cannot be pickled, for trainers that pickle callbacks."""
        return {name: value for name, value in vars(self).items() if name not in ("run", "_session")}


class MethodWrapper:
    """Replacement of a method of `owner` that calls `call(method, *args, **kwargs)`. Copies get the original method.

    It replaces an earlier run's wrapper, so that a trainer used twice has one wrapper per method.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        self.method: Callable[..., Any] = method.method if isinstance(method, MethodWrapper) else method
        self._call = call
        functools.update_wrapper(self, self.method)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapping function with the original method and the caller's arguments."""
        return self._call(self.method, *args, **kwargs)

    def __reduce__(self) -> Any:
        # Pickled like a bound method, because the trainer or logger that holds this may be pickled, and no run can.
        method: Any = self.method
        return getattr, (method.__self__, method.__name__)


_watching: "TrainingSession | None" = None


def _data(loader: Any) -> int:
    """Return a key of a loader's data set, the same for a loader that skips the first batches."""
    return id(getattr(loader, "dataset", loader))


def same_batches(loader: Any, first: Any) -> bool:
    """Return whether a loader yields the batches of `first`, also if skip_first_batches made it from `first`."""
    # Data sets decide only without samplers, because an evaluation may use the training's.
    own, theirs = getattr(loader, "batch_sampler", None), getattr(first, "batch_sampler", None)
    if own is None or theirs is None:
        return getattr(loader, "dataset", loader) is getattr(first, "dataset", first)
    inner = getattr(getattr(loader, "sampler", None), "batch_sampler", None)
    return own is theirs or getattr(own, "batch_sampler", None) is theirs or inner is first.sampler


class _WatchedIterator(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any], session: "TrainingSession", fetched: deque[Batch]) -> None:
        self._iterator, self._session, self._fetched = iterator, session, fetched

    def __next__(self) -> Any:
        session = self._session
        session.asks_for_batch()
        try:
            batch = next(self._iterator)
        except BaseException:
            session.got_batch(self._fetched)
            raise
        session.got_batch(self._fetched, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _begin(loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    session = _watching
    fetched = None if session is None else session.loop_begins(loader)
    iterator = original(loader)
    return iterator if session is None or fetched is None else _WatchedIterator(iterator, session, fetched)


def around_iter(kind: Any, around: Callable[[Any, Callable[[Any], Iterator[Any]]], Iterator[Any]]) -> None:
    """Replace __iter__ of the class `kind` by a call of `around(loader, original)`, once per class."""
    original = kind.__iter__
    if hasattr(original, "flopwatch"):
        return

    @functools.wraps(original)
    def iterate(loader: Any) -> Iterator[Any]:
        return around(loader, original)

    # On the function, so that functools.wraps copies it to later wrappers.
    vars(iterate)["flopwatch"] = True
    kind.__iter__ = iterate


class TrainingSession:
    """State of a run under a trainer: its Run, its DataLoaders with their batches, and the open activity."""

    def __init__(self, run: Run, *, role: Callable[[Any], str], tokens: TokensOf) -> None:
        """Observe loaders on this thread. `role(loader)` returns "training", "evaluation" or another purpose."""
        global _watching
        self.run, self._role, self._tokens = run, role, tokens
        self._thread = threading.get_ident()
        self._fetched: dict[int, deque[Batch]] = {}  # by data set, the batches that no step has taken yet
        self._consumed: list[Batch] = []  # since the last step
        self._flops: Callable[[Sequence[int]], int] | None = None
        self._activity: str | None = None  # the open one
        kinds = [framework("torch.utils.data").DataLoader]
        if "torchdata.stateful_dataloader" in sys.modules:  # which has an __iter__ of its own
            kinds.append(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader)
        for kind in kinds:
            around_iter(kind, _begin)
        _watching = self

    def begin(self, activity: str) -> None:
        """Begin an activity and end the one that this method began before, unless they are the same."""
        if self._activity != activity:
            self.end()
            self._activity = activity
            self.run.recorder.enter(activity)

    def end(self, *activities: str) -> None:
        """End the open activity if it is one of these. Without arguments, end any activity."""
        activity = self._activity
        if activity is not None and (not activities or activity in activities):
            self._activity = None
            self.run.recorder.leave(activity)

    def loop_begins(self, loader: Any) -> deque[Batch] | None:
        """Record that a loop over `loader` begins. Return a queue for its batches, None if not for training."""
        with self.run.recorder.reporting("loaders"):
            if threading.get_ident() != self._thread:
                return None
            role = self._role(loader)
            if role == "evaluation":
                self.begin("evaluation")
            if role != "training":
                return None
            self.end()
            # Batches that the last epoch fetched ahead and did not use are dropped.
            fetched = self._fetched[_data(loader)] = deque()
            self.run.waiting_for_batch()
            return fetched
        return None

    def asks_for_batch(self) -> None:
        """Record that the loop begins to wait for a training batch."""
        with self.run.recorder.reporting("loaders"):
            self.end()
            self.run.waiting_for_batch()

    def got_batch(self, fetched: deque[Batch], *batch: Any) -> None:
        """Record that the wait ended, and add the batch, if one arrived, to the queue `fetched`."""
        try:
            self.run.got_batch()
            for one in batch:
                fetched.append(count(one, self._tokens))
        except Exception as error:
            fetched.append(Batch())
            self.run.recorder.failed("loaders", error)

    def take(self, loader: Any = None) -> list[Batch]:
        """Remove and return the oldest queued batch of this loader, or of each. Return [Batch()] if none is queued."""
        queues = self._fetched.values() if loader is None else [self._fetched.get(_data(loader), deque())]
        return [queue.popleft() for queue in queues if queue] or [Batch()]

    def take_all(self) -> list[Batch]:
        """Remove and return all queued batches."""
        return [queue.popleft() for queue in self._fetched.values() for _ in range(len(queue))]

    def consume(self, *batches: Batch) -> None:
        """Add batches to the open step."""
        self._consumed += batches

    def count_flops(self, model: Any, *, given: Any, convention: str) -> None:
        """From now on compute FLOPs from sample lengths, by the `given` Transformer or, if None, the model's config."""
        from flopwatch import flops

        transformer = given if hasattr(given, "flops_of_samples") else None
        config: Any = getattr(model, "config", None)
        if given is None and hasattr(config, "model_type"):
            try:
                if not all(parameter.requires_grad for parameter in model.parameters()):
                    raise flops.UnknownModel("some parameters are frozen, and the config does not show which")
                transformer = flops.from_config(config)
                self.run.recorder.set_flops(convention=convention, source="config", per_token=transformer)
            except flops.UnknownModel as error:
                text = "no FLOPs from the model's config: %s; they are counted instead, or pass flops_per_token="
                log.warning(text, error)
        if transformer is not None:
            # Most lengths repeat, and computing a length's FLOPs takes longer than the rest of a step's recording.
            compute = functools.partial(transformer.flops_per_sequence, convention=convention)
            cost = functools.lru_cache(maxsize=1 << 16)(compute)
            self._flops = lambda lengths: sum(cost(length) for length in lengths if length)

    def step(self, tokens: float | None = None) -> float | None:
        """Record a step with the consumed batches. Return their tokens, or the argument if those are unknown."""
        consumed, self._consumed = self._consumed, []
        counts, samples = [batch.tokens for batch in consumed], [batch.samples for batch in consumed]
        if consumed and None not in counts:
            tokens = sum(n for n in counts if n is not None)
        flops = None
        if self._flops is not None and consumed and all(batch.lengths is not None for batch in consumed):
            flops = sum(self._flops(batch.lengths) for batch in consumed if batch.lengths is not None)
        total = sum(n for n in samples if n is not None) if consumed and None not in samples else None
        self.run.step(tokens, flops=flops, samples=total)
        return tokens

    def finish(self, status: str) -> None:
        """Finish the run and stop watching the loaders."""
        global _watching
        self.end()
        if _watching is self:
            _watching = None
        self.run.finish(status)


def watch(run: Run, model: Any) -> None:
    """Measure waits and phases of a model, or of the DDP model around it if its first forward pass reveals one."""
    distributed = framework("torch.distributed")
    if not (distributed.is_available() and distributed.is_initialized()):
        run.watch(model)
        return
    compiler = framework("torch.compiler")
    ddp = framework("torch.nn.parallel.distributed").DistributedDataParallel

    def first_forward(*_: Any) -> None:
        if compiler.is_compiling():
            return  # an empty hook costs a compiled model nothing; its waits stay unmeasured
        with run.recorder.reporting("watch"):
            handle.remove()
            # In PyTorch since 1.12, for its compiler, which must find the DDP model from inside.
            around = getattr(ddp, "_get_active_ddp_module", lambda: None)()
            run.watch(model if around is None else around)

    handle = model.register_forward_pre_hook(first_forward)


def accelerate_replica() -> tuple[int | None, Any]:
    """Return how many ranks share a replica under Accelerate (None: unknown), and the device mesh (None: no mesh)."""
    # https://huggingface.co/docs/accelerate/concept_guides/parallelism
    state = framework("accelerate.state").AcceleratorState
    if not state._shared_state:  # making one would initialise it
        return None, None
    state = state()
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    mesh = getattr(state, "device_mesh", None)
    parallelism = getattr(state, "parallelism_config", None)
    if kind == "MEGATRON_LM":
        return None, mesh  # Megatron's own state has them
    sizes = (int(getattr(parallelism, name, 1) or 1) for name in ("tp_size", "cp_size", "sp_size"))
    return math.prod(sizes), mesh


def accelerate_precision() -> str:
    """Return Accelerate's mixed precision: no, bf16, fp16, fp8, or "" if no Accelerator was made."""
    state = framework("accelerate.state").AcceleratorState
    return str(state().mixed_precision) if state._shared_state else ""


def begin(name: str | None, facts: Callable[[], dict[str, Any]], given: Mapping[str, Any]) -> Run:
    """Return a Run with the `given` arguments, completed by the framework's `facts()`, whose errors are logged."""
    arguments = {"name": name, "step_source": "trainer"}
    try:
        arguments |= facts()
    except Exception as error:
        log.warning("the framework's settings are not as expected: %r (training goes on)", error)
    return Run(**{**arguments, **given})


def matmul_dtype(*, precision: str) -> str:
    """Return the dtype, as in peaks.py, for a trainer's precision: bf16-mixed, 16-true, fp16, torch.float32, no, ...

    An unknown word is returned as it is. It has no peak, so the run has no MFU.
    """
    name = precision.removeprefix("torch.").partition("-")[0]
    dtypes = {"bfloat16": "bf16", "bf16": "bf16", "16": "fp16", "float16": "fp16", "fp16": "fp16"}
    dtypes |= {"fp8": "fp8", "transformer": "fp8", "64": "fp64", "float64": "fp64", "nvfp4": "fp4", "mxfp8": "fp8"}
    if name not in ("32", "float32", "fp32", "tf32", "no"):
        return dtypes.get(name, name)
    return "tf32" if framework("torch").get_float32_matmul_precision() != "highest" else "fp32"
