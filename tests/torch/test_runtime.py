"""Test compilations by Dynamo with its real callbacks, and a CUDA allocator's numbers in PyTorch's format."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from flopwatch.training.torch import runtime
from tests.support.hook import value

pytestmark = pytest.mark.torch

COMPILING = 0.2  # seconds that the slow backend takes


@pytest.fixture
def run() -> Iterator[Run]:
    torch._dynamo.reset()
    made = Run("tiny", environ={"FLOPWATCH_DISABLE": "1"})
    made.step()  # makes this thread the loop's
    yield made
    torch._dynamo.reset()


def slow_backend(graph: Any, _: object) -> Any:
    time.sleep(COMPILING)
    return graph.forward


def totals(run: Run) -> dict[str, float]:
    points = run.snapshot().points
    activities = {labels["activity"]: seconds for labels, seconds in points[BY_NAME["training_activity_seconds_total"]]}
    others = {
        name: points[BY_NAME[family]][0][1]
        for name, family in (
            ("recompilations", "training_recompilations_total"),
            ("retries", "training_allocator_retries_total"),
            ("ooms", "training_out_of_memory_total"),
            ("unused", "training_allocator_unused_bytes"),
            ("errors", "training_hook_errors_total"),
        )
        if BY_NAME[family] in points
    }
    return {"compile": activities["compile"], "step": activities["step"], **others}


def test_compilations_are_timed_and_recompilations_counted(run: Run) -> None:
    attached = runtime.attach(run.recorder)
    assert "recompilations" not in totals(run)
    compiled = torch.compile(lambda x: x * 2, backend=slow_backend, dynamic=False)
    began = time.monotonic()
    compiled(torch.ones(3))
    took = time.monotonic() - began
    compiled(torch.ones(3))
    first = totals(run)
    assert first["recompilations"] == 0
    assert COMPILING <= first["compile"] <= took
    for size in (4, 5):
        began = time.monotonic()
        compiled(torch.ones(size))
        took += time.monotonic() - began
    second = totals(run)
    assert second["recompilations"] == 2
    assert 3 * COMPILING <= second["compile"] <= took
    assert second["errors"] == 0
    attached.remove()
    compiled(torch.ones(6))
    after = totals(run)
    assert {**after, "step": 0} == {**second, "step": 0}
    assert after["step"] >= second["step"] + COMPILING


def test_the_backward_pass_of_a_recompiled_model_is_no_second_recompilation(run: Run) -> None:
    attached = runtime.attach(run.recorder)
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager", dynamic=False)
    for size in (1, 2, 3):
        compiled(torch.ones(size, 2)).sum().backward()
    assert totals(run)["recompilations"] == 2
    attached.remove()


def test_after_a_reset_of_dynamo_the_next_push_listens_again(run: Run) -> None:
    attached = runtime.attach(run.recorder)
    torch._dynamo.reset()
    assert callback_handler.start_callbacks == []
    totals(run)
    assert len(callback_handler.start_callbacks) == len(callback_handler.end_callbacks) == 1
    torch.compile(lambda x: x + 1, backend=slow_backend)(torch.ones(3))
    assert totals(run)["compile"] >= COMPILING
    attached.remove()
    totals(run)
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


def test_a_compilation_on_another_thread_is_not_the_loops_time(run: Run) -> None:
    attached = runtime.attach(run.recorder)

    def compiles() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/1"):
            time.sleep(0.05)

    thread = threading.Thread(target=compiles)
    thread.start()
    thread.join()
    after = totals(run)
    assert after["step"] >= 0.05
    assert {**after, "step": 0.0} == {"compile": 0.0, "recompilations": 1.0, "errors": 0.0, "step": 0.0}
    attached.remove()


def test_a_backward_pass_compiled_on_the_engines_thread_is_the_loops_time(run: Run) -> None:
    """On CUDA the autograd engine has a thread for each device, and the loop waits for it."""
    attached = runtime.attach(run.recorder)

    class Compiles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/1"):
                time.sleep(0.05)
            return gradient

    def backward() -> None:
        output: torch.Tensor = Compiles.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
        output.sum().backward()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert totals(run)["compile"] >= 0.05
    assert (totals(run)["recompilations"], totals(run)["errors"]) == (0, 0)
    attached.remove()


def test_nested_compilations_and_those_that_overlap_on_threads_are_one_span(run: Run) -> None:
    attached = runtime.attach(run.recorder)
    go_on, ended = threading.Event(), threading.Event()

    def overlaps() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/0"):
            go_on.wait(60)
        ended.set()

    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
        thread = threading.Thread(target=overlaps)
        thread.start()
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            time.sleep(0.05)
    go_on.set()  # the last to end is on the other thread
    assert ended.wait(60)
    thread.join()
    first = totals(run)
    assert first["compile"] >= 0.05
    time.sleep(0.05)
    assert totals(run)["compile"] == first["compile"]
    assert first["errors"] == 0
    attached.remove()


@pytest.mark.parametrize(
    ("arguments", "recompiles"),
    [
        (CallbackArgs(CallbackTrigger.DYNAMO, "3/0"), False),
        (CallbackArgs(CallbackTrigger.DYNAMO, "3/12"), True),
        (CallbackArgs(CallbackTrigger.DYNAMO, "!0/3/1"), True),
        (CallbackArgs(CallbackTrigger.DYNAMO, "!0"), False),
        (CallbackArgs(CallbackTrigger.LAZY_BACKWARD, "3/1"), False),
        (None, False),
        (SimpleNamespace(callback_trigger=CallbackTrigger.DYNAMO, compile_id=None), False),
    ],
)
def test_a_frame_compiled_before_is_a_recompilation(arguments: Any, recompiles: bool) -> None:
    assert runtime._recompiles(arguments) is recompiles


def test_a_run_that_fails_breaks_no_compilation(run: Run) -> None:
    def fails(*_: object) -> None:
        raise OSError("broken")

    attached = runtime.attach(run.recorder)
    run.recorder.enter = run.recorder.leave = run.recorder.add = fails  # type: ignore[method-assign, assignment]
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert totals(run)["errors"] == 1
    attached.remove()


def device(retries: int, ooms: int, reserved: int, allocated: int) -> Mapping[str, Any]:
    """Return the fields of torch.cuda.memory_stats_as_nested_dict that the hook reads."""
    return {
        "num_alloc_retries": retries,
        "num_ooms": ooms,
        "num_sync_all_streams": 7,
        "reserved_bytes": {"all": {"current": reserved, "peak": 9 << 40}, "small_pool": {"current": 1}},
        "allocated_bytes": {"all": {"current": allocated, "peak": 9 << 40}, "small_pool": {"current": 1}},
    }


def test_the_allocators_numbers_are_the_sum_over_this_processs_devices(run: Run) -> None:
    devices: list[Mapping[str, Any]] = []
    attached = runtime.attach(run.recorder, lambda: devices)
    assert "retries" not in totals(run)  # CUDA is not in use yet
    devices += [device(2, 1, 50 << 30, 42 << 30), device(0, 0, 0, 0), device(1, 0, 5, 1)]
    after = totals(run)
    assert (after["retries"], after["ooms"], after["unused"]) == (3, 1, (8 << 30) + 4)
    devices[:] = [device(5, 1, 42 << 30, 42 << 30)]
    after = totals(run)
    assert (after["retries"], after["ooms"], after["unused"]) == (5, 1, 0)
    attached.remove()


@pytest.mark.parametrize("odd", [{}, {"num_ooms": None, "reserved_bytes": 5}, {"reserved_bytes": {"all": {}}}])
def test_an_allocator_without_numbers_is_absent(run: Run, odd: Mapping[str, Any]) -> None:
    attached = runtime.attach(run.recorder, lambda: [odd])
    assert set(totals(run)) == {"compile", "step", "errors"}
    assert totals(run)["errors"] == 0
    attached.remove()


def test_without_cuda_the_allocator_is_absent_and_nothing_is_initialised(run: Run) -> None:
    attached = runtime.attach(run.recorder)
    assert "unused" not in totals(run)
    assert runtime.cuda_memory() == []
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    attached.remove()


def test_the_allocators_of_devices_that_another_rank_uses_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def statistics(index: int) -> dict[str, Any]:
        asked.append(index)
        return {"num_ooms": 1}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in (3, 4), raising=False)
    assert runtime.cuda_memory() == [{"num_ooms": 1}] * 2
    assert asked == [3, 4]


def test_a_group_without_sequence_numbers_is_no_error_and_is_asked_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    number = "training_collective_sequence_number"
    distributed: Any = torch.distributed
    kind = distributed.ProcessGroup
    ask, asked = kind._get_sequence_number_for_group, []

    def recorded(group: Any) -> int:
        asked.append(torch.distributed.get_backend(group))
        return int(ask(group))

    monkeypatch.setattr(kind, "_get_sequence_number_for_group", recorded)
    runtime.watch_collectives(run.recorder)
    for backend, store in (("fake", FakeStore()), ("gloo", distributed.HashStore())):
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            torch.distributed.all_reduce(torch.ones(1))
            snapshots = [run.snapshot() for _ in range(3)]
        finally:
            torch.distributed.destroy_process_group()
        assert [value(snapshot, "training_hook_errors_total") for snapshot in snapshots] == [0, 0, 0]
        assert [value(snapshot, number) for snapshot in snapshots] == [None if backend == "fake" else 1] * 3
    assert asked == ["fake", "gloo", "gloo", "gloo"]
