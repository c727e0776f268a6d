"""Kinds of process groups, by their names, descriptions and sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.training.process.parallel import Parallel
from flopwatch.training.torch.groups import Groups
from tests.support.hook import silent

pytestmark = pytest.mark.torch


def group(description: str, size: int = 2, rank: int = 0) -> Any:
    return SimpleNamespace(group_desc=description, rank=lambda: rank, size=lambda: size)


def kind(one: Any, parallel: Parallel | None = None, named: tuple[tuple[str, Any], ...] = ()) -> str:
    run = silent()
    run.recorder.totals.world_size, run.recorder.parallel, run.recorder.process_groups = 16, parallel, list(named)
    return Groups(run.recorder)._kind(one, one.size())


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_shard_cp", "dp"),
        ("mesh_dp_replicate", "dp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("undefined", "group"),
    ],
)
def test_a_description_of_a_mesh_or_of_megatron_has_the_kind(description: str, expected: str) -> None:
    assert kind(group(description)) == expected


def test_a_group_that_the_job_named_has_that_kind_and_one_of_all_ranks_is_the_job_s() -> None:
    own = group("mesh_tp")
    assert kind(own, named=(("ep", own),)) == "ep"
    assert kind(group("undefined", size=16)) == "world"


def test_the_coordinates_of_a_rank_tell_the_kind_only_if_one_fits() -> None:
    place = Parallel(tp=(1, 2), dp=(1, 4), pp=(0, 2))
    assert kind(group("undefined", 4, 1), place) == "dp"
    assert kind(group("undefined", 2, 1), place) == "tp"
    assert kind(group("undefined", 4, 0), place) == "group"
    assert kind(group("undefined", 2, 1), Parallel(tp=(1, 2), dp=(1, 2))) == "group"
