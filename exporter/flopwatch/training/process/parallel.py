"""Coordinates of a rank in the data, tensor, pipeline, context and expert parallel groups of its job.

They are from a mapping to (rank, size) or process groups, a torch DeviceMesh
(https://docs.pytorch.org/docs/stable/distributed.html#devicemesh), or an object with the methods of Megatron's
parallel_state. The ranks that share one model replica are tensor x pipeline x
context parallel. Inconsistent sizes are refused, since a wrong size makes a wrong MFU.
"""

import math
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

Coordinate = tuple[int, int]  # rank in the group, ranks of the group

# Names of mesh dimensions: torch's own, torchtitan's, Accelerate's, Lightning's.
_DATA = ("dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard", "data_parallel", "batch")
DIMENSIONS = dict.fromkeys(_DATA, "dp") | {"tp": "tp", "tensor_parallel": "tp", "pp": "pp"}
DIMENSIONS |= {"cp": "cp", "sp": "cp", "ep": "ep"}
_MEGATRON = {  # the middle of get_..._rank and get_..._world_size; the second is Megatron's before it had pipelines
    "dp": ("data_parallel",),
    "tp": ("tensor_model_parallel", "model_parallel"),
    "pp": ("pipeline_model_parallel",),
    "cp": ("context_parallel",),
    "ep": ("expert_model_parallel",),
}
_MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Coordinates of one rank: (rank, size) in each kind of parallel group, None if unknown."""

    dp: Coordinate | None = None
    tp: Coordinate | None = None
    pp: Coordinate | None = None
    cp: Coordinate | None = None
    ep: Coordinate | None = None

    @property
    def replica_ranks(self) -> int:
        """Return how many ranks share one model replica: tensor x pipeline x context parallel."""
        return math.prod(group[1] for group in (self.tp, self.pp, self.cp) if group is not None)

    def labels(self) -> dict[str, str]:
        """Return the labels dp, tp, pp, cp and ep with this rank's number in each group, "" if unknown."""
        return {name: "" if group is None else str(group[0]) for name, group in asdict(self).items()}


def parallel(given: object, world_size: int) -> Parallel:
    """Return the coordinates from a mapping, a DeviceMesh or Megatron's state. Raises ValueError if they do not fit."""
    if isinstance(given, Parallel):
        groups: Mapping[str, Any] = asdict(given)
    elif isinstance(given, Mapping):
        groups = given
    elif hasattr(given, "mesh_dim_names"):
        groups = _mesh(given, world_size)
    elif hasattr(given, "get_data_parallel_rank"):
        groups = {
            kind: (int(getattr(given, f"get_{name}_rank")()), ranks) for kind, name, ranks in _megatron_groups(given)
        }
    else:
        raise ValueError(
            f"parallel= takes a mapping such as {{'tp': (rank, size)}} or {{'tp': group}}, a torch DeviceMesh or "
            f"Megatron's parallel_state, not a {type(given).__name__}"
        )
    return _checked(groups, world_size)


def process_groups(given: object) -> list[tuple[str, Any]]:
    """Return the kind (dp, tp, pp, cp or ep) and process group of each group in what `parallel` takes, if it has them.

    Of several dimensions of one kind each has a group.
    """
    if isinstance(given, Mapping):
        return [(kind, group) for kind, group in given.items() if _is_group(group)]
    if (names := getattr(given, "mesh_dim_names", None)) is not None:
        mesh: Any = given
        return [(DIMENSIONS[name], mesh.get_group(name)) for name in names if name in DIMENSIONS]
    groups = ((kind, getattr(given, f"get_{name}_group", None)) for kind, name, _ in _megatron_groups(given))
    return [(kind, get()) for kind, get in groups if get is not None]


def _is_group(given: object) -> bool:
    return all(callable(getattr(given, name, None)) for name in ("rank", "size"))


def megatron(modules: Mapping[str, Any] = sys.modules) -> object | None:
    """Return Megatron's parallel state once this process has set it up, else None."""
    for name in _MODULES:
        state = modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            return state  # type: ignore[no-any-return]
    return None


def _checked(groups: Mapping[str, Any], world_size: int) -> Parallel:
    names = [field.name for field in fields(Parallel)]
    if unknown := [str(name) for name in groups if name not in names]:
        raise ValueError(f"parallel has {', '.join(unknown)}; its groups are {', '.join(names)}")
    place = Parallel(**{name: _coordinate(name, group) for name, group in groups.items() if group is not None})
    sizes = {name: group[1] for name in ("dp", "tp", "pp", "cp") if (group := getattr(place, name)) is not None}
    product = math.prod(sizes.values())
    text = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if "dp" in sizes and product != world_size:
        raise ValueError(f"{text} = {product} ranks, and the job has {world_size}")
    if world_size % product:
        raise ValueError(f"{text} = {product} ranks of a replica do not divide the job's {world_size}")
    stage = world_size // sizes.get("pp", 1)
    if place.ep is not None and stage % place.ep[1]:
        raise ValueError(f"ep {place.ep[1]} does not divide the {stage} ranks of a pipeline stage")
    return place


def _coordinate(name: str, group: Any) -> Coordinate:
    try:
        pair = (group.rank(), group.size()) if _is_group(group) else group
        rank, size = (operator.index(number) for number in pair)
    except (TypeError, ValueError):
        # Not the value itself: a tensor's repr would wait for the device.
        raise ValueError(f"parallel[{name!r}] takes a process group or (rank, size), two whole numbers") from None
    if not 0 <= rank < size:
        raise ValueError(f"parallel[{name!r}] is ({rank}, {size}); a rank is at least 0 and below its group's size")
    return rank, size


def _mesh(mesh: Any, world_size: int) -> dict[str, Coordinate]:
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    if names is None:
        raise ValueError("the mesh has no mesh_dim_names, so the purpose of its dimensions is unknown")
    if mesh.size() != world_size:
        text = f"the mesh {tuple(names)} has {mesh.size()} of the job's {world_size} ranks"
        raise ValueError(f"{text}; pass the whole mesh")
    if coordinates is None:
        raise ValueError("this rank is not in the mesh")
    groups: dict[str, Coordinate] = {}
    for name, rank, size in zip(names, coordinates, mesh.shape, strict=True):
        kind = DIMENSIONS.get(name)
        if kind is None and size == 1:
            continue
        if kind is None:
            raise ValueError(
                f"the mesh has a dimension {name!r}, not one of {', '.join(DIMENSIONS)}; pass "
                "parallel={'dp': (rank, size), ...} instead"
            )
        # Dimensions of one kind are one group, in the mesh's order. Expert parallel ranks have batches of their own.
        for into in ("dp", "ep") if kind == "ep" else (kind,):
            outer, among = groups.get(into, (0, 1))
            groups[into] = outer * size + rank, among * size
    return groups


def _megatron_groups(state: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the middle of the methods' names, and the number of ranks of each of Megatron's groups."""
    for kind, names in _MEGATRON.items():
        name = next((name for name in names if hasattr(state, f"get_{name}_world_size")), None)
        # Megatron returns 0 ranks for a group that was not made.
        if name is not None and (ranks := int(getattr(state, f"get_{name}_world_size")())) > 0:
            yield kind, name, ranks
