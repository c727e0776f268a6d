"""Test a rank's position in a parallel layout, from a mapping, real meshes of torch and Megatron's functions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.training.process.parallel import Parallel, megatron, parallel
from tests.support import ROOT


def test_a_mapping_is_taken_at_its_word() -> None:
    layout = parallel({"dp": (3, 4), "tp": [1, 2], "pp": (0, 8), "cp": None, "ep": (5, 8)}, 64)
    assert layout == Parallel(dp=(3, 4), tp=(1, 2), pp=(0, 8), ep=(5, 8))
    assert layout.replica_ranks == 16
    assert layout.labels() == {"dp": "3", "tp": "1", "pp": "0", "cp": "", "ep": "5"}
    assert parallel(layout, 64) == layout


def test_a_replica_is_tensor_by_pipeline_by_context_parallel_and_never_expert_parallel() -> None:
    assert parallel({"tp": (0, 8), "pp": (3, 4), "cp": (1, 2), "ep": (0, 16)}, 128).replica_ranks == 64
    assert parallel({"dp": (0, 8), "ep": (0, 8)}, 8).replica_ranks == 1
    assert parallel({}, 8) == Parallel()
    assert parallel({}, 8).replica_ranks == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dp": (0, 4), "tp": (0, 4)}, "dp 4 x tp 4 = 16 ranks, and the job has 64"),
        ({"tp": (0, 8), "cp": (0, 3)}, "tp 8 x cp 3 = 24 ranks of a replica do not divide the job's 64"),
        ({"pp": (0, 4), "ep": (0, 5)}, "ep 5 does not divide the 16 ranks of a pipeline stage"),
        ({"tp": (8, 8)}, "parallel['tp'] is (8, 8); a rank is at least 0 and below its group's size"),
        ({"tp": (-1, 8)}, "parallel['tp'] is (-1, 8); a rank is at least 0 and below its group's size"),
        ({"tp": (0, 0)}, "parallel['tp'] is (0, 0); a rank is at least 0 and below its group's size"),
        ({"tp": 8}, "parallel['tp'] takes a process group or (rank, size), two whole numbers"),
        ({"tp": (0, 8, 1)}, "parallel['tp'] takes a process group or (rank, size), two whole numbers"),
        ({"tp": (0.0, 8.0)}, "parallel['tp'] takes a process group or (rank, size), two whole numbers"),
        ({"tensor": (0, 8)}, "parallel has tensor; its groups are dp, tp, pp, cp, ep"),
        (
            8,
            "parallel= takes a mapping such as {'tp': (rank, size)} or {'tp': group}, a torch DeviceMesh or Megatron's "
            "parallel_state, not a int",
        ),
        (
            SimpleNamespace(mesh_dim_names=None, get_coordinate=lambda: [0]),
            "the mesh has no mesh_dim_names, so the purpose of its dimensions is unknown",
        ),
    ],
)
def test_nonsense_is_refused_with_the_reason(given: object, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        parallel(given, 64)


# Megatron's functions, as in https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py.


def state(groups: Mapping[str, tuple[int, int]], initialized: bool = True) -> Any:
    """Return a stand-in for Megatron's parallel_state with the rank and size functions of these groups."""
    functions: dict[str, Callable[[], object]] = {"model_parallel_is_initialized": lambda: initialized}
    for name, (rank, size) in groups.items():
        functions[f"get_{name}_rank"] = partial(int, rank)
        functions[f"get_{name}_world_size"] = partial(int, size)
    return SimpleNamespace(**functions)


def test_megatrons_state_is_read_once_it_is_set_up() -> None:
    groups = {
        "tensor_model_parallel": (3, 8),
        "pipeline_model_parallel": (1, 4),
        "context_parallel": (0, 2),
        "data_parallel": (1, 2),
        "expert_model_parallel": (5, 8),
    }
    modules = {"megatron.core.parallel_state": state(groups)}
    assert parallel(megatron(modules), 128) == Parallel(dp=(1, 2), tp=(3, 8), pp=(1, 4), cp=(0, 2), ep=(5, 8))
    assert megatron({}) is None
    assert megatron({"megatron.core.parallel_state": state(groups, initialized=False)}) is None


@pytest.mark.parametrize(
    ("module", "groups", "expected"),
    [
        (
            "megatron.core.mpu",
            {"tensor_model_parallel": (1, 2), "pipeline_model_parallel": (0, 1), "data_parallel": (3, 4)},
            Parallel(dp=(3, 4), tp=(1, 2), pp=(0, 1)),
        ),
        ("megatron.mpu", {"model_parallel": (1, 2), "data_parallel": (3, 4)}, Parallel(dp=(3, 4), tp=(1, 2))),
        ("megatron.core.parallel_state", {"data_parallel": (3, 8), "context_parallel": (0, 0)}, Parallel(dp=(3, 8))),
    ],
)
def test_older_megatrons_have_fewer_groups(module: str, groups: dict[str, tuple[int, int]], expected: Parallel) -> None:
    assert parallel(megatron({module: state(groups)}), 8) == expected


def test_sizes_of_megatron_that_do_not_make_the_job_are_refused() -> None:
    given = state({"tensor_model_parallel": (0, 2), "data_parallel": (0, 2)})
    with pytest.raises(ValueError, match=r"^dp 2 x tp 2 = 4 ranks, and the job has 8$"):
        parallel(given, 8)


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from flopwatch.training.process.parallel import megatron; assert megatron() is None; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "exporter")}, check=True)


# Real meshes, of ranks that do not exist.


@contextmanager
def job(rank: int, world_size: int) -> Iterator[Any]:
    """Join a fake process group as one rank of a job, and yield torch's init_device_mesh."""
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("names", "shape", "rank", "expected"),
    [
        # 41 = 0b101001
        (
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
            (2, 2, 4, 2, 2),
            41,
            Parallel(pp=(1, 2), dp=(2, 8), cp=(0, 2), tp=(1, 2)),
        ),
        (("dp", "tp"), (8, 8), 41, Parallel(dp=(5, 8), tp=(1, 8))),
        (("data_parallel", "tensor_parallel"), (8, 8), 41, Parallel(dp=(5, 8), tp=(1, 8))),  # Lightning
        (("replicate", "shard"), (4, 16), 41, Parallel(dp=(41, 64))),
        (("fsdp",), (64,), 41, Parallel(dp=(41, 64))),
        (("dp_shard", "sp", "tp"), (8, 4, 2), 41, Parallel(dp=(5, 8), cp=(0, 4), tp=(1, 2))),  # Accelerate
        (("dp", "ep", "tp"), (4, 8, 2), 41, Parallel(dp=(20, 32), ep=(4, 8), tp=(1, 2))),
        (("dp", "spare"), (64, 1), 41, Parallel(dp=(41, 64))),
    ],
)
def test_a_device_mesh_is_read_by_the_names_of_its_dimensions(
    names: tuple[str, ...], shape: tuple[int, ...], rank: int, expected: Parallel
) -> None:
    with job(rank, 64) as init_device_mesh:
        assert parallel(init_device_mesh("cpu", shape, mesh_dim_names=names), 64) == expected


@pytest.mark.torch
def test_an_incomplete_mesh_is_refused() -> None:
    with job(3, 8) as init_device_mesh:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match=r"^the mesh \('tp',\) has 4 of the job's 8 ranks; pass the whole mesh"):
            parallel(mesh["tp"], 8)
        with pytest.raises(ValueError, match=r"^the mesh has a dimension 'dp_cp', not one of dp, ddp, "):
            parallel(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_cp", "tp")), 8)
        with pytest.raises(ValueError, match=r"^the mesh has no mesh_dim_names"):
            parallel(init_device_mesh("cpu", (8,)), 8)
