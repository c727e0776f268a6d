"""Test the time a rank waits for another, in real groups of two: DDP, FSDP, ZeRO, tensor parallel, bare calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.support import ROOT, ranks
from tests.support.hook_server import HookServer
from tests.support.machine import PATIENCE

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

STEPS = 10
# Delay of rank 1 in every step, in seconds. The next value is tried if a busy machine delays both ranks about as
# long.
LATE = (0.02, 0.1, 0.4)

# Scenarios in which rank 1 is late and the wait of rank 0 must show it.
LATENESS = (
    "ddp",
    "accumulation",
    "power_sgd",
    "fp16_compress",
    "static_graph",
    "compiled_around",
    "compiled_inside",
    "reentrant_checkpoint",
    "fsdp1",
    "fsdp2",
    "by_hand",
    "asynchronous",
    "receiving",
    "zero",
    "tensor_parallel",
)
# Scenarios in which the losses with and without watching are compared, to the last bit.
LOSSES = ("ddp", "power_sgd", "fp16_compress", "compiled_around", "fsdp2", "fsdp2_marked", "failing")

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Return the results of each rank in each scenario. One launch runs all, because importing torch takes seconds."""
    return ranks.answers(__file__, 2, 500)


def waits_differ(in_time: Answer, late: Answer) -> bool:
    """Return whether in each measured step the punctual rank waited for the other at least half of its lateness."""
    # The first steps are not measured, and a busy machine may prevent the measurement of others.
    if in_time["steps"] is None or late["steps"] is None or min(in_time["steps"], late["steps"]) < 3:
        return False
    return bool(in_time["wait"] / in_time["steps"] > late["wait"] / late["steps"] + late["late"] / 2)


@pytest.mark.parametrize("name", LATENESS)
def test_the_punctual_rank_waits_for_the_late_rank(answers: list[Answer], name: str) -> None:
    in_time, late = (answer[name] for answer in answers)
    assert waits_differ(in_time, late)
    assert in_time["errors"] == late["errors"] == 0


@pytest.mark.parametrize("name", LATENESS)
def test_each_wait_counts_for_its_process_group(answers: list[Answer], name: str) -> None:
    for answer in answers:
        assert set(answer[name]["groups"]) == {"world 0,1"} | ({"pp 0,1"} if name == "receiving" else set())
        assert sum(answer[name]["groups"].values()) == pytest.approx(answer[name]["wait"])


@pytest.mark.parametrize("name", LOSSES)
def test_watching_changes_no_bit_of_the_loss(answers: list[Answer], name: str) -> None:
    for answer in answers:
        watched, unwatched = answer[name]["losses"], answer[f"{name} unwatched"]["losses"]
        assert watched == unwatched
        assert len(set(watched)) == STEPS


def test_fsdp2s_waits_are_found_on_the_compute_stream_too(answers: list[Answer]) -> None:
    for answer in answers:
        # Of two groups: gathers of two forward and backward passes, the reductions of the second, and its end.
        assert answer["fsdp2_marked"]["brackets"] >= STEPS * 7
        assert answer["fsdp2_marked"]["errors"] == 0


def test_what_fails_inside_is_counted_and_the_training_goes_on(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer["failing"]["errors"] > 0
        assert answer["failing"]["steps"] is None


def test_a_wait_inside_a_wait_counts_once(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer["nested"]["wait"] <= answer["nested"]["seconds"]


def test_fsdp2_with_tensor_parallelism_is_distinguished(answers: list[Answer]) -> None:
    assert [answer["tensor_parallel_groups"] for answer in answers] == [[False, True]] * 2


@pytest.mark.parametrize("name", ["no_sync", "on_another_thread", "not_this_step", "unwatched_host"])
def test_a_step_without_a_wait_of_its_own_is_not_measured(answers: list[Answer], name: str) -> None:
    assert [answer[name]["steps"] for answer in answers] == [None, None]


def test_what_was_replaced_or_hooked_is_put_back(answers: list[Answer]) -> None:
    assert [(answer["put_back"], answer["fsdp2_put_back"]) for answer in answers] == [(True, True)] * 2


def test_a_watched_model_can_be_saved_whole_and_copied(answers: list[Answer]) -> None:
    assert [answer["saved"] for answer in answers] == [True, True]


def main() -> Iterator[tuple[str, Any]]:
    """Yield each scenario's name and what this rank counted and computed in it."""
    import copy
    import io

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    from flopwatch import catalogue
    from flopwatch.training import Run
    from flopwatch.training.torch import waits

    dist.init_process_group("gloo")
    rank, functional = dist.get_rank(), dist._functional_collectives

    def replaceable() -> tuple[Any, ...]:
        group = dist.ProcessGroup
        return dist.Work.wait, functional.wait_tensor, functional._maybe_wrap_tensor, group.allreduce, group.send

    untouched = replaceable()

    class Plain(torch.nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(*(torch.nn.Linear(16, 16) for _ in range(4)))

    class Checkpointed(Plain):
        def forward(self, x: Any) -> Any:
            return self[3](checkpoint(lambda y: self[2](self[1](y)), self[0](x), use_reentrant=True))

    def ddp(module: Any = None, **options: Any) -> Any:
        return DistributedDataParallel(Plain() if module is None else module, **options)

    def power_sgd() -> Any:
        model = ddp()
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def fp16_compress() -> Any:
        model = ddp()
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model

    def fsdp2() -> Any:
        model = Plain()
        fully_shard(model[1])
        return fully_shard(model)

    def tensor_parallel() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        return parallelize_module(
            Plain(),
            mesh,
            {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(), "3": RowwiseParallel()},
        )

    def nothing() -> None:
        pass

    def train(
        model: Any,
        *,
        watched: Any = "the model",
        run: Run | None = None,
        after: Callable[[], None] = nothing,
        optimizer: Any = None,
        micro_batches: int = 1,
        sync: bool = True,
        late: float = LATE[0],
    ) -> Answer:
        """Train for some steps with rank 1 late. Call `after` after each backward pass."""
        run = Run("waits") if run is None else run
        watch = None if watched is None else waits.watch(run.recorder, model if watched == "the model" else None)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for step in range(STEPS):
            time.sleep(late * rank)
            for micro_batch in range(micro_batches):
                last = sync and micro_batch == micro_batches - 1
                if hasattr(model, "set_requires_gradient_sync"):  # FSDP2's no_sync
                    model.set_requires_gradient_sync(last)
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
                with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                    loss = (model(x) ** 2).mean()
                    loss.backward()
            after()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            run.step()
        if watch is not None:
            watch.remove()
        points = run.snapshot().points

        def total(metric: Any) -> float | None:
            return next((value for _, value in points.get(metric, [])), None)

        return {
            "losses": losses,
            "wait": total(catalogue.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL),
            "steps": total(catalogue.TRAINING_MEASURED_STEPS_TOTAL),
            "errors": total(catalogue.TRAINING_HOOK_ERRORS_TOTAL),
            "seconds": total(catalogue.TRAINING_MEASURED_STEP_SECONDS_TOTAL),
            "late": late,
            "groups": {f"{kind} {text}": seconds for (kind, text), seconds in run.recorder.totals.group_waits.items()},
        }

    def train_late(model: Any, **how: Any) -> Answer:
        """Train with growing lateness until the waits differ clearly. The losses are those of the first attempt."""
        losses = None
        for late in LATE:
            answer = train(model, late=late, **how)
            losses = answer["losses"] = answer["losses"] if losses is None else losses
            both: list[Any] = [None, None]
            dist.all_gather_object(both, answer)
            if waits_differ(*both):
                break
        return answer

    def averaged(model: Any) -> Callable[[], None]:
        def average() -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        return average

    yield "ddp", train_late(ddp())
    yield "ddp unwatched", train(ddp(), watched=None)
    yield "accumulation", train_late(ddp(), micro_batches=3)
    yield "no_sync", train(ddp(), sync=False)
    yield "power_sgd", train_late(power_sgd())
    yield "power_sgd unwatched", train(power_sgd(), watched=None)
    yield "fp16_compress", train_late(fp16_compress())
    yield "fp16_compress unwatched", train(fp16_compress(), watched=None)
    yield "static_graph", train_late(ddp(static_graph=True))
    yield "compiled_around", train_late(torch.compile(ddp(), backend="aot_eager"))
    yield "compiled_around unwatched", train(torch.compile(ddp(), backend="aot_eager"), watched=None)
    yield "compiled_inside", train_late(ddp(torch.compile(Plain(), backend="aot_eager")))
    yield "reentrant_checkpoint", train_late(ddp(Checkpointed()))
    yield "fsdp1", train_late(FullyShardedDataParallel(Plain(), device_id=torch.device("cpu")))
    yield "fsdp2", train_late(fsdp2())
    yield "fsdp2 unwatched", train(fsdp2(), watched=None)
    yield "tensor_parallel", train_late(tensor_parallel())

    by_hand = Plain()
    yield "by_hand", train_late(by_hand, watched="no model", after=averaged(by_hand))

    def gathered() -> None:
        handles = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
        for handle in handles:
            handle.wait()

    yield "asynchronous", train_late(Plain(), after=gathered)

    def handed_on() -> None:
        if rank == 1:
            dist.send(torch.ones(4), 0)
        else:
            dist.recv(torch.ones(4), 1)
        dist.broadcast(torch.ones(4), 0)  # both ranks begin each step together, in time or late

    yield "receiving", train_late(Plain(), after=handed_on)
    zero = ddp()
    yield "zero", train_late(zero, optimizer=ZeroRedundancyOptimizer(zero.parameters(), torch.optim.SGD, lr=0.01))

    run = Run("waits")

    def nested() -> None:
        with run.collective_wait():
            gathered()

    yield "nested", train(Plain(), run=run, after=nested)

    def aside() -> None:
        thread = threading.Thread(target=gathered)
        thread.start()
        thread.join()

    yield "on_another_thread", train(Plain(), after=aside)

    run = Run("waits")
    run.recorder.measuring = False
    run.recorder.sample(1 << 20)
    yield "not_this_step", train(ddp(), run=run, after=gathered)

    run = Run("waits")
    waits.watch(run.recorder).remove()
    yield "unwatched_host", train(Plain(), run=run, watched=None, after=gathered)

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    both = parallelize_module(Plain(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(both, mesh=mesh["dp"])
    yield (
        "tensor_parallel_groups",
        [waits._tensor_parallel(group) for model in (fsdp2(), both) for group in list(waits.fsdp_groups(model))[:1]],
    )

    # Use the host as the device: its clock gives the marks, and the waits of streams do nothing.
    run, model, brackets = Run("waits"), fsdp2(), []
    waited = run.recorder.waited

    def count(began: Any, ended: Any, group: Any = None) -> None:
        brackets.append(ended)
        waited(began, ended, group)

    run.recorder.waited = count  # type: ignore[method-assign]
    watching = waits.Watch(run.recorder)
    for group in waits.fsdp_groups(model):
        waits._watch_group(watching, group)
    yield "fsdp2_marked", train(model, run=run, watched=None, micro_batches=2) | {"brackets": len(brackets)}
    watching.remove()
    yield (
        "fsdp2_put_back",
        not any("timed" in str(value) for group in waits.fsdp_groups(model) for value in vars(group).values()),
    )
    yield "fsdp2_marked unwatched", train(fsdp2(), watched=None, micro_batches=2)

    def broken() -> float:
        raise OSError("no clock")

    run = Run("waits")
    run.recorder.mark = broken
    yield "failing", train(ddp(), run=run, after=gathered)
    yield "failing unwatched", train(ddp(), watched=None, after=gathered)

    model = ddp(torch.nn.Linear(16, 16))
    watch = waits.watch(Run("waits").recorder, model)
    torch.save(model.module, io.BytesIO())
    copied = copy.deepcopy(model.module)
    copied(torch.ones(4, 16)).sum().backward()
    yield "saved", not any(parameter._backward_hooks for parameter in copied.parameters())
    watch.remove()
    yield (
        "put_back",
        (replaceable() == untouched and not any(parameter._backward_hooks for parameter in model.parameters())),
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(dict(main())))


@pytest.mark.long
def test_the_hook_adds_no_collective_and_no_group() -> None:
    script = str(ROOT / "tests" / "scripts" / "counts_collectives.py")
    printed: dict[str, list[Any]] = {}
    with HookServer() as server:
        for hook in ("0", "1"):
            here = {"HOOK": hook, "FLOPWATCH_DISABLE": "", "FLOPWATCH_ENDPOINT": server.url}
            processes = ranks.start([script], 2, **here)
            printed[hook] = [json.loads(process.communicate(timeout=PATIENCE)[0]) for process in processes]
        measured = [push.samples.get("training_collective_wait_seconds_total", 0.0) for push in server.last_words(2)]
    assert printed["1"] == printed["0"]
    assert [len(one["collectives"]) for one in printed["0"]] == [2, 2]
    assert min(one["collectives"][0] for one in printed["0"]) >= 40
    assert max(measured) > 0  # the hook measured waits in these very collectives
