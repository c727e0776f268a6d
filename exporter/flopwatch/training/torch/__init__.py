"""What the hook learns from PyTorch: here the card and the ranks of a replica; the rest is in modules of its own."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training.torch.waits import watch

__all__ = ["Card", "agreed", "card", "replica_ranks", "watch"]

AGREEMENT = 30.0  # seconds to wait for rank 0 to name the attempt
CLOCKS_DIFFER = 10.0  # seconds that two nodes' clocks may differ by; a restart takes longer


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


def agreed(attempt: str, rank: int, started: float) -> str | None:
    """Return rank 0's name of the attempt through the job's store; None if rank 0 does not tell.

    `started` is when this process did, as Unix time. An agent's store outlives torchrun's restarts, and nodes count
    those differently, so a name is known to be of this attempt by when it was told.
    """
    store, key = torch.distributed.distributed_c10d._get_default_store(), "flopwatch/attempt"
    if rank == 0:
        store.set(key, f"{time.time()} {attempt}")
        return attempt
    deadline = time.monotonic() + AGREEMENT
    while time.monotonic() < deadline:
        try:
            if store.check([key]):
                told, _, name = bytes(store.get(key)).decode().partition(" ")
                if float(told) > started - CLOCKS_DIFFER:
                    return name
        except RuntimeError:
            return None
        time.sleep(0.05)
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
