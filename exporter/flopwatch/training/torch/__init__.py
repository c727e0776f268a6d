"""Facts about this rank that PyTorch has: its GPU, the attempt's name and the ranks of a model replica."""

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from flopwatch.training.process.parallel import DIMENSIONS
from flopwatch.training.torch.waits import Unmeasured, fsdp_groups, watch

__all__ = ["CudaCard", "agreed", "card", "replica_ranks", "watch"]

AGREEMENT = 30.0  # seconds to wait for rank 0 to name the attempt
CLOCKS_DIFFER = 10.0  # seconds that two nodes' clocks may differ by
RANK_0_RENAMES = 5.0  # seconds after which rank 0 has replaced the name of an attempt that crashed before


@dataclass(frozen=True, slots=True)
class CudaCard:
    """Name and UUID of a CUDA device, as in NVML. The UUID is "" before torch 2.5."""

    name: str
    uuid: str


def card() -> CudaCard | None:
    """Return this thread's CUDA device, None if CUDA is not in use. Initialises nothing."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Of a MIG slice, CUDA has the UUID of the compute instance. https://docs.nvidia.com/datacenter/tesla/mig-user-guide
    kind = "MIG" if " MIG " in properties.name else "GPU"
    return CudaCard(properties.name, f"{kind}-{properties.uuid}" if hasattr(properties, "uuid") else "")


def agreed(attempt: str, rank: int, started: float) -> str | None:
    """Return rank 0's name of the attempt through the job's store, None if rank 0 does not set it in AGREEMENT seconds.

    `started` is the start of this process, as Unix time. The store outlives torchrun's restarts and may have an earlier
    attempt's name. A name set after `started` is of this attempt, because rank 0 sets it once all ranks have met. After
    RANK_0_RENAMES seconds it may be CLOCKS_DIFFER seconds older, because rank 0's clock may be behind.
    """
    store, key = torch.distributed.distributed_c10d._get_default_store(), "flopwatch/attempt"
    if rank == 0:
        store.set(key, f"{time.time()} {attempt}")
        return attempt
    began = time.monotonic()
    while (waited := time.monotonic() - began) < AGREEMENT:
        try:
            if store.check([key]):
                set_at, _, name = bytes(store.get(key)).decode().partition(" ")
                if float(set_at) > started - (CLOCKS_DIFFER if waited > RANK_0_RENAMES else 0.0):
                    return name
        except RuntimeError:
            return None
        time.sleep(0.05)
    return None


def replica_ranks(model: object) -> int | None:
    """Return how many ranks share one replica of this model: 1 under plain DDP or FSDP, None if unknown.

    Each rank of a DDP or FSDP group has batches of its own, shared only with ranks outside the group. Weights that are
    sharded over all ranks without DDP or FSDP mean tensor parallelism, unless their mesh has another name.
    """
    if not torch.distributed.is_initialized():
        return None
    world_size = torch.distributed.get_world_size()
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(model, torch.nn.Module):
        return None
    # Looked up, not imported: a sharded model has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return world_size // torch.distributed.get_world_size(module.process_group)
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            return 1 if torch.distributed.get_world_size(module.process_group) == world_size else None
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    over_all = [mesh for mesh in meshes if mesh is not None and mesh.size() == world_size]
    try:
        group = next(fsdp_groups(model), None)
    except Unmeasured:
        return None
    if group is not None:
        sharded_over: int = group.mesh_info.mesh.size()  # and replicated
        # With tensor parallelism too, the weights that both cut are on a mesh of both.
        return world_size // sharded_over if sharded_over == world_size or over_all else None
    if not over_all or over_all[0].ndim != 1:
        return None
    (name,) = over_all[0].mesh_dim_names or ("tp",)
    return world_size if DIMENSIONS.get(name, "tp") == "tp" else None
