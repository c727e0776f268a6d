"""Models, runs and ranks of the sections that train."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from bench.card.report import Unavailable
from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run

cuda: Any = torch.cuda  # PyTorch has no annotations for a part of it

SILENT = {"FLOPWATCH_DISABLE": "1"}
POLL = 0.05  # seconds between two snapshots of a polled run
NO_SERVER, PUSH = "http://127.0.0.1:9", 0.1  # URL, and seconds between two pushes
DELAYED = ("all_gather_single", "all_gather_into_tensor")  # names of one function, by release of torch


class Block(nn.Module):
    """Transformer block: causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the block."""
        batch, length, width = inputs.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.first(inputs)).view(heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        outputs: torch.Tensor = inputs + self.mlp(self.second(inputs))
        return outputs


class Model(nn.Module):
    """Small language model, which returns its loss."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 2, vocabulary: int = 256) -> None:
        super().__init__()
        self.vocabulary, self.checkpointing = vocabulary, False
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens."""
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            if self.checkpointing:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        logits = self.head(hidden).view(-1, self.vocabulary)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


def require_cuda(device: str) -> None:
    """Raise Unavailable unless a section may and can run on CUDA."""
    if device != "cuda":
        raise Unavailable(f"needs CUDA, and --device is {device}")
    if not torch.cuda.is_available():
        raise Unavailable(f"torch {torch.__version__} finds no CUDA device")


def device_of(device: str) -> torch.device:
    """Return the device of a section that also runs on the CPU. Raises Unavailable if CUDA is chosen and missing."""
    if device == "cuda":
        require_cuda(device)
    else:
        torch.set_num_threads(1)  # the model is small, and threads would wait for each other
    return torch.device(device)


def silent(**arguments: Any) -> Run:
    """Return a run that pushes nothing."""
    return Run("card", environ=SILENT, **arguments)


def pushing(**arguments: Any) -> Run:
    """Return a run whose thread pushes often, to a port where no server listens. Only such a run counts FLOPs."""
    return Run("card", environ={}, endpoint=NO_SERVER, push_interval=PUSH, **arguments)


class _Messages(logging.Handler):
    """Handler that keeps the texts of warnings."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.found.append(record.getMessage())


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Yield the texts of the warnings that a logger logs during a `with` block."""
    found: list[str] = []
    handler, logger = _Messages(found), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def value(run: Run, name: str, **labels: str) -> float:
    """Return the sum of the samples of a family with these labels, 0 without a sample."""
    points = run.snapshot().points.get(BY_NAME[name], [])
    return sum(number for own, number in points if labels.items() <= own.items())


@contextlib.contextmanager
def sliced(found: list[float]) -> Iterator[None]:
    """Append the CPU seconds of each part of a `with` block between two pauses of this thread.

    CPU seconds, because the wall's include waits for the interpreter's lock, which the loop's thread then has.
    """
    sleep, thread, began = time.sleep, threading.get_ident(), time.thread_time()

    def pause(seconds: float) -> None:
        nonlocal began
        if threading.get_ident() != thread:
            sleep(seconds)
            return
        found.append(time.thread_time() - began)
        sleep(seconds)
        began = time.thread_time()

    with mock.patch.object(time, "sleep", pause):
        yield
    found.append(time.thread_time() - began)


@contextlib.contextmanager
def polled(run: Run, every: float = POLL, slices: list[float] | None = None) -> Iterator[list[float]]:
    """Take snapshots in another thread, as the thread that pushes does. Yield the seconds of each.

    `slices` gets the CPU seconds of each part of a snapshot without a pause.
    """
    taken: list[float] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(every):
            began = time.perf_counter()
            with contextlib.nullcontext() if slices is None else sliced(slices):
                run.snapshot()
            taken.append(time.perf_counter() - began)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def two_ranks_in_name(backend: str = "fake") -> Iterator[None]:
    """Make this process rank 0 of two, whose collectives do nothing. One GPU is enough for all waits of a rank."""
    try:
        import torch.testing._internal.distributed.fake_pg  # registers the backend
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no process group without peers: {error}") from error
    untyped: Any = dist  # PyTorch's annotations lack HashStore
    store = untyped.HashStore()
    dist.init_process_group(backend, rank=0, world_size=2, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Delays:
    """Delay kernels of `cycles` in front of each all-gather, with the events that measure them."""

    def __init__(self, cycles: int, event: Callable[[], Any] | None = None) -> None:
        self.cycles = cycles
        self.events: list[tuple[Any, Any]] = []
        self._event = event or (lambda: cuda.Event(enable_timing=True))

    def delay(self) -> None:
        """Queue one delay on the current stream."""
        began, ended = self._event(), self._event()
        began.record()
        if self.cycles:
            cuda._sleep(self.cycles)
        ended.record()
        self.events.append((began, ended))

    def seconds(self) -> float:
        """Return the sum of all delays so far, which the device must have reached, and forget them."""
        total: float = sum(began.elapsed_time(ended) for began, ended in self.events) / 1e3
        self.events.clear()
        return total

    @contextlib.contextmanager
    def in_gathers(self) -> Iterator[None]:
        """Delay each all-gather of FSDP2 during a `with` block."""
        originals = {name: getattr(dist, name) for name in DELAYED if hasattr(dist, name)}

        def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
            def gather(*args: Any, **kwargs: Any) -> Any:
                self.delay()
                return original(*args, **kwargs)

            return gather

        for name, original in originals.items():
            setattr(dist, name, delayed(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)


Hook = TypeVar("Hook", bound=Callable[..., Any])


def comm_hook(hook: Hook) -> Hook:
    """Remove the annotations of a communication hook. DDP refuses them as texts, which they are in these modules."""
    hook.__annotations__ = {}
    return hook


def sharded(groups: int, width: int, device: torch.device) -> nn.Module:
    """Return a model of so many FSDP2 groups of one linear layer each. Raises Unavailable."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no FSDP2: {error}") from error
    model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(groups)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def cycles_of(seconds: float) -> int:
    """Return the cycles of a delay kernel of about this length, measured on the current GPU."""
    delays = Delays(10_000_000)
    for _ in range(3):
        delays.delay()
    torch.cuda.synchronize()
    return int(seconds / (delays.seconds() / 3) * 10_000_000)
