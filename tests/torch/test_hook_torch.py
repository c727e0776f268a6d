"""Test the hook in PyTorch with three real gloo ranks, each a process with the variables that torchrun would set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.machine import reserved_port

WORLD_SIZE = 3
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"ddp": {"static_graph": True}},
    "unused_parameters": {"ddp": {"find_unused_parameters": True}},
    "bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "dict_output": {"output": "dict"},
    "nested_output": {"output": "nested"},
    "accumulation": {"micro_batches": 3},
}
SLOW = 0.12  # seconds that the slow rank sleeps in each step: far more than a busy machine delays a rank
STEPS = 8  # of a setup
SCENARIOS: dict[str, dict[str, Any]] = {
    "slow": {"slow": 1, "steps": 20},
    "saving": {"steps": 25, "saves_from": 10, "pace": 0.02},
    "watched": {"steps": 10},
    "unwatched": {"steps": 10, "watch": False},
    "no_sync": {"steps": 5, "no_sync": True},
    "no_backward": {"steps": 5, "no_backward": True},
    **{name: {"slow": 1, "steps": STEPS, **setup} for name, setup in SETUPS.items()},
}

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the counts of each rank in each scenario. One launch runs all, because importing torch takes seconds."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    results = []
    with reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                stdout=subprocess.PIPE,
                text=True,
                # The hook sees one rank on each node.
                env={
                    **environ,
                    "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD_SIZE),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "FLOPWATCH_HOST": f"node-{rank}",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "FLOPWATCH_DISABLE": "1",
                },
            )
            for rank in range(WORLD_SIZE)
        ]
        try:
            for process in processes:
                results.append(json.loads(process.communicate(timeout=500)[0]))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return {name: [answer[name] for answer in results] for name in (*SCENARIOS, "sharded")}


def wait_shares(ranks: list[dict[str, Any]]) -> list[float]:
    """Return each rank's wait as a share of its measured step time."""
    return [rank["end"]["wait"] / rank["end"]["measured_seconds"] for rank in ranks]


def test_the_slow_rank_waits_least(answers: Answers) -> None:
    first, slow, third = wait_shares(answers["slow"])
    # It sleeps for nearly all of a step, and the others wait for it.
    assert slow + 0.2 < min(first, third)


def test_every_rank_measures_its_steps(answers: Answers) -> None:
    for rank in answers["slow"]:
        # of 20 steps; the first is not measured, as it has no mean to compare with
        assert 8 <= rank["end"]["measured_steps"] <= 19


def test_a_rank_that_saves_alone_is_not_taken_for_a_slow_one(answers: Answers) -> None:
    saving, second, third = wait_shares(answers["saving"])
    # Each of its three saves is as long as ten steps. If the others' wait for them counted, theirs would be above 0.6.
    assert saving + 0.3 > min(second, third)


def test_watching_changes_no_bit_of_the_loss(answers: Answers) -> None:
    losses = [rank["losses"] for rank in answers["watched"]]
    assert losses == [rank["losses"] for rank in answers["unwatched"]]
    assert all(len(set(loss)) == 10 for loss in losses)
    assert all(rank["end"]["measured_steps"] > 0 for rank in answers["watched"])
    assert all(rank["end"]["measured_steps"] is None for rank in answers["unwatched"])


@pytest.mark.parametrize("setup", SETUPS)
def test_the_wait_is_measured_however_ddp_is_set_up(answers: Answers, setup: str) -> None:
    first, slow, third = wait_shares(answers[setup])
    assert slow + 0.2 < min(first, third)
    assert all(rank["end"]["errors"] == 0 for rank in answers[setup])


@pytest.mark.parametrize("how", ["no_sync", "no_backward"])
def test_a_step_without_an_all_reduce_is_not_measured(answers: Answers, how: str) -> None:
    for rank in answers[how]:
        assert rank["end"]["wait"] is None


def test_a_ddp_model_gives_the_ranks_of_a_replica(answers: Answers) -> None:
    assert [rank["end"]["tokens"] for rank in answers["plain"]] == [STEPS * 8] * WORLD_SIZE


def test_a_fully_sharded_model_gives_them_too(answers: Answers) -> None:
    for rank in answers["sharded"]:
        assert rank == {
            "FSDP": 1,
            "FSDP2": 1,
            "FSDP2 on one of three": None,
            "FSDP2 in blocks": 1,
            "HSDP": 1,
            "FSDP2 and tensor": WORLD_SIZE,
            "tensor": WORLD_SIZE,
            "on a mesh for data": None,
            "compiled DDP": 1,
            "compiled FSDP2": 1,
            "not sharded": None,
        }


def test_ranks_of_many_nodes_agree_on_rank_0s_name_of_the_attempt(answers: Answers) -> None:
    (attempt,) = {rank["attempt"] for rank in answers["plain"]}
    assert attempt.startswith("node-0-")


def test_a_model_whose_wait_cannot_be_measured_is_logged_and_trains_on() -> None:
    import torch

    from flopwatch.catalogue import BY_NAME
    from flopwatch.training import Run

    for model in (torch.nn.Linear(1, 1), "llama"):
        run = Run("tiny", model=model, environ={"FLOPWATCH_DISABLE": "1"})
        run.step()
        points = run.snapshot().points
        assert points[BY_NAME["training_hook_errors_total"]] == [({}, 0.0)]
        assert BY_NAME["training_collective_wait_seconds_total"] not in points


def worker(
    steps: int,
    slow: int | None = None,
    saves_from: int = 1000,
    pace: float = 0.0,
    watch: bool = True,
    output: str = "tensor",
    micro_batches: int = 1,
    no_sync: bool = False,
    no_backward: bool = False,
    ddp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a small model under DDP for some steps and return what the hook counted."""
    import time
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from flopwatch.catalogue import BY_NAME
    from flopwatch.training import Run

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layers(x)
            return {"tensor": y, "dict": {"logits": y}, "nested": (y.detach(), [y])}[output]

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), **(ddp or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run("tiny", model=model if watch else None, flops_per_token=6.0, peak_flops=1e9)
    run.recorder.sample(1)  # not two a second, which would make the number depend on the machine

    def counted() -> dict[str, float | None]:
        names = {
            "wait": "training_collective_wait_seconds_total",
            "errors": "training_hook_errors_total",
            "measured_seconds": "training_measured_step_seconds_total",
            "tokens": "training_tokens_total",
            "measured_steps": "training_measured_steps_total",
        }
        points = run.snapshot().points
        return {key: next((v for _, v in points.get(BY_NAME[name], [])), None) for key, name in names.items()}

    def loss_of(step: int) -> torch.Tensor:
        out = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)))
        return torch.mean(
            {"tensor": lambda: out, "dict": lambda: out["logits"], "nested": lambda: out[1][0]}[output]() ** 2
        )

    losses: list[str] = []
    results: dict[str, Any] = {"losses": losses, "attempt": run.attempt}
    for step in run.batches(range(steps)):
        if step >= saves_from and step % 5 == 0 and rank == 0:
            with run.activity("checkpoint_save"):
                time.sleep(0.25)
        time.sleep(SLOW if rank == slow else pace)
        for _ in range(micro_batches - 1):
            with model.no_sync():
                loss_of(step).backward()  # type: ignore[no-untyped-call]
        with model.no_sync() if no_sync else nullcontext():
            loss = loss_of(step)
            if not no_backward:
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
        run.step(tokens=8)
    results["end"] = counted()
    return results


def sharded() -> dict[str, int | None]:
    """Return the number of ranks in a replica that the hook derives for models that are, or are not, sharded."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from flopwatch.training.torch import replica_ranks

    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("data", "tensor"))
    data = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp_shard",))

    def cut(mesh: Any) -> torch.nn.Module:
        return parallelize_module(torch.nn.Linear(9, 9), mesh, ColwiseParallel())

    def whole(model: Any) -> Any:
        return fully_shard(model)

    return {
        "FSDP2 in blocks": replica_ranks(torch.nn.Sequential(whole(torch.nn.Linear(9, 9)))),
        "HSDP": replica_ranks(fully_shard(torch.nn.Linear(9, 9), mesh=mesh)),
        "FSDP2 and tensor": replica_ranks(fully_shard(cut(mesh["tensor"]), mesh=mesh["data"])),
        "tensor": replica_ranks(cut(mesh["tensor"])),
        "on a mesh for data": replica_ranks(cut(data)),
        "compiled DDP": replica_ranks(torch.compile(DistributedDataParallel(torch.nn.Linear(8, 8)))),
        "compiled FSDP2": replica_ranks(torch.compile(whole(torch.nn.Linear(8, 8)))),
        "FSDP": replica_ranks(FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))),
        "FSDP2": replica_ranks(fully_shard(torch.nn.Linear(8, 8), mesh=mesh["tensor"])),
        "FSDP2 on one of three": replica_ranks(fully_shard(torch.nn.Linear(8, 8), mesh=mesh["data"])),
        "not sharded": replica_ranks(torch.nn.Linear(8, 8)),
    }


def main() -> Iterator[tuple[str, dict[str, Any]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name, scenario in SCENARIOS.items():
        yield name, worker(**scenario)
    yield "sharded", sharded()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(dict(main())))
