"""What the hook learns from PyTorch: here the card and the ranks of a replica; the rest is in modules of its own."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training.process.parallel import DIMENSIONS
from flopwatch.training.torch.waits import Unmeasured, _fsdp_groups, watch

__all__ = ["Card", "agreed", "card", "replica_ranks", "watch"]

AGREEMENT = 30.0  # seconds to wait for rank 0 to name the attempt
CLOCKS_DIFFER = 10.0  # seconds that two nodes' clocks may differ by
RANK_0_COMES = 5.0  # seconds in which it names the attempt anew, if a name may be of an attempt that crashed at once


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
    those differently, so a name is known to be of this attempt by when it was told: after this process started, since
    rank 0 cannot have met the others before. One that seems a little older is of a rank 0 whose clock is behind, or of
    an attempt that has just crashed; then it is about to be replaced.
    """
    store, key = torch.distributed.distributed_c10d._get_default_store(), "flopwatch/attempt"
    if rank == 0:
        store.set(key, f"{time.time()} {attempt}")
        return attempt
    began = time.monotonic()
    while (waited := time.monotonic() - began) < AGREEMENT:
        try:
            if store.check([key]):
                told, _, name = bytes(store.get(key)).decode().partition(" ")
                if float(told) > started - (CLOCKS_DIFFER if waited > RANK_0_COMES else 0.0):
                    return name
        except RuntimeError:
            return None
        time.sleep(0.05)
    return None


def replica_ranks(model: object) -> int | None:
    """Return how many ranks share one replica of this model: 1 under plain DDP or FSDP, None if that can't be seen.

    Ranks that DDP or FSDP runs over have batches of their own, and all others share one with some of those. Where
    there is neither, and weights are cut over all ranks, that is tensor parallelism, unless their mesh names another.
    """
    if not torch.distributed.is_initialized():
        return None
    world_size = torch.distributed.get_world_size()
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(model, torch.nn.Module):
        return None
    # Looked up, not imported: a model that is sharded has done that.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return world_size // torch.distributed.get_world_size(module.process_group)
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            return 1 if torch.distributed.get_world_size(module.process_group) == world_size else None
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    over_all = [mesh for mesh in meshes if mesh is not None and mesh.size() == world_size]
    try:
        group = next(_fsdp_groups(model), None)
    except Unmeasured:
        return None
    if group is not None:
        sharded_over: int = group.mesh_info.mesh.size()  # and replicated
        # With tensor parallelism beside it, the weights that both cut are on a mesh of both.
        return world_size // sharded_over if sharded_over == world_size or over_all else None
    if not over_all or over_all[0].ndim != 1:
        return None
    (name,) = over_all[0].mesh_dim_names or ("tp",)
    return world_size if DIMENSIONS.get(name, "tp") == "tp" else None
