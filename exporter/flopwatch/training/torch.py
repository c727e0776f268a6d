"""What the hook learns from PyTorch: the card, the ranks of a replica, and how long DDP waits for other ranks.

The wait. DDP's reducer starts an all-reduce as soon as a bucket's gradients are there, and queues a callback on the
autograd engine that waits for all of them once the last one is. Two callbacks of ours bracket it: the first is queued
as the backward pass begins, so before the reducer's; when it runs it queues the second, so behind the reducer's. The
time between is what this rank waited after its own gradients were done; the late rank waits least. Never a DDP
communication hook: only one can be registered, and it changes the order of additions and so the loss.

Only where the host does the waiting: on CPU (gloo). With NCCL the device waits, and the wait is absent so far. Also
absent: steps under no_sync(), models compiled around DDP, FSDP, pipeline and tensor parallel.
https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

AGREEMENT = timedelta(seconds=30)  # how long to wait for rank 0 to name the attempt


class Unmeasured(Exception):
    """The wait of this model for other ranks can't be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device: NVML's name and UUID."""

    name: str
    uuid: str


def card() -> Card | None:
    """Return this thread's CUDA device; None if CUDA is not in use. Initialises nothing."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Absent before torch 2.5.
    return Card(properties.name, f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "")


def agreed(attempt: str, rank: int, restarts: str) -> str | None:
    """Return rank 0's name of the attempt through the job's store; None if rank 0 does not tell."""
    store = torch.distributed.distributed_c10d._get_default_store()
    # An agent's store outlives torchrun's restarts.
    key = f"flopwatch/attempt/{restarts}"
    if rank == 0:
        store.set(key, attempt)
        return attempt
    try:
        store.wait([key], AGREEMENT)
        return bytes(store.get(key)).decode()
    except RuntimeError:
        return None


def replica_ranks(model: object) -> int | None:
    """Return how many ranks share one replica of this model: 1 under plain DDP or FSDP, None if that can't be seen."""
    if not torch.distributed.is_initialized():
        return None
    world_size = torch.distributed.get_world_size()
    if isinstance(model, DistributedDataParallel):
        return world_size // torch.distributed.get_world_size(model.process_group)
    # Looked up, not imported: a model that is sharded has done that.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
        return None
    if isinstance(model, fsdp.FullyShardedDataParallel):
        sharded_over = torch.distributed.get_world_size(model.process_group)
    else:
        mesh: Any = next((getattr(parameter, "device_mesh", None) for parameter in model.parameters()), None)
        # A mesh of two dimensions could be tensor parallel as well as hybrid sharding.
        sharded_over = mesh.size() if mesh is not None and mesh.ndim == 1 else 0
    return 1 if sharded_over == world_size else None


def watch(
    model: object, waited: Callable[[float], None], clock: Callable[[], float], failed: Callable[[Exception], None],
) -> None:
    """Call `waited` with the seconds of every gradient all-reduce wait of a DDP model. Raises Unmeasured.

    `failed` is told what goes wrong later, inside the model's forward and backward passes, which must not see it.
    """
    if not isinstance(model, DistributedDataParallel):
        raise Unmeasured(f"a {type(model).__name__} is no DistributedDataParallel; `with run.collective_wait():` "
                         "measures what is put in it")
    if devices := {parameter.device.type for parameter in model.parameters()} - {"cpu"}:
        raise Unmeasured(f"on {', '.join(devices)} it is the device that waits, not the host")
    model.register_forward_hook(_Bracket(waited, clock, failed))


class _Bracket:
    """A forward hook that brackets the reducer's wait in the backward pass that follows, if one does."""

    def __init__(
        self, waited: Callable[[float], None], clock: Callable[[], float], failed: Callable[[Exception], None],
    ) -> None:
        self._waited = waited
        self._clock = clock
        self._failed = failed
        self._queued = False
        self._began = 0.0

    def __call__(self, model: DistributedDataParallel, _: object, output: object) -> None:
        try:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not model.require_backward_grad_sync:
                return
            self._queued = False  # an exception may have ended the last backward pass before its callbacks
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._failed(error)

    def _backward_begins(self, _: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._queue(self._before_reducer)

    def _before_reducer(self) -> None:
        self._began = self._clock()
        self._queue(self._behind_reducer)

    def _behind_reducer(self) -> None:
        self._queued = False
        self._waited(self._clock() - self._began)

    def _queue(self, callback: Callable[[], None]) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        except Exception as error:
            self._failed(error)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _tensors(getattr(output, name))
