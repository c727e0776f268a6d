"""Test waits in FSDP2's parameter groups of several releases of PyTorch, on a simulated CUDA device."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from flopwatch.training.torch import waits
from tests.support.hook import silent, value
from tests.support.simulated_cuda import SimulatedCuda, SimulatedStream

pytestmark = pytest.mark.torch

GATHER, CAST, SCATTER, REDUCE, LAST = 0.01, 0.2, 0.1, 0.05, 0.025  # seconds of the compute stream
COMPUTE = 1.0


class OldGroup:
    """Parameter group of torch 2.4 and 2.5: nothing that can be replaced is called after its wait."""

    device = torch.device("cuda")
    fsdp_params: tuple[Any, ...] = ()
    reshard_after_backward = True

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self._all_gather_result: Any = types.SimpleNamespace(all_gather_event=GATHER, all_gather_work=None)
        self.device_handle = types.SimpleNamespace(current_stream=lambda: self)
        self.comm_ctx = types.SimpleNamespace()
        self.reduces = True

    def wait_event(self, seconds: float) -> None:
        self.stream.work(seconds)

    def wait_for_unshard(self) -> None:
        self.stream.work(CAST)  # copies out of the buffer

    def reshard(self) -> None:
        pass

    def post_backward(self, *_: object) -> None:
        self.stream.work(CAST)  # adds an accumulated gradient in another dtype
        if self.reshard_after_backward:
            self.reshard()
        if self.reduces:
            self.wait_event(SCATTER)
            self._reduce()

    def _reduce(self) -> None:
        pass

    def finalize_backward(self) -> None:
        self.wait_event(LAST)


class Group(OldGroup):
    """Parameter group since torch 2.6."""

    def _wait_for_post_backward(self) -> None:
        self.wait_event(REDUCE)

    def _reduce(self) -> None:
        self._wait_for_post_backward()


class Module(torch.nn.Linear):
    """Sharded module with one group."""

    group: Any

    def __init__(self) -> None:
        super().__init__(1, 1, device="meta")

    def _get_fsdp_state(self) -> Any:
        return types.SimpleNamespace(_fsdp_param_group=self.group)


def place_of(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the class of sharded modules where a release of PyTorch has it."""
    old: Any = types.ModuleType("torch.distributed._composable.fsdp")
    old.FSDPModule = Module
    monkeypatch.setitem(sys.modules, old.__name__, old)
    new: Any = types.ModuleType("torch.distributed.fsdp")
    new.FullyShardedDataParallel = type("FullyShardedDataParallel", (), {})
    if release >= "2.6":
        new.FSDPModule = Module
    monkeypatch.setitem(sys.modules, new.__name__, new)


def watched(group: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    model = Module()
    model.group = group
    run = silent(rank=0, world_size=2, parallel={"dp": (0, 2)})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    waits.watch(run.recorder, model)
    return run


def train(run: Run, group: Any, cuda: SimulatedCuda, steps: int) -> None:
    run.recorder.follow(cuda.moments())
    for _ in range(steps):
        group.wait_for_unshard()
        cuda.current.work(COMPUTE)
        group.post_backward()
        group.finalize_backward()
        run.step(tokens=1)
        cuda.finish()
    run.snapshot()


@pytest.mark.parametrize("release", ["2.5", "2.6"])
@pytest.mark.parametrize(
    ("reshards", "wait"), [(True, GATHER + SCATTER + REDUCE + LAST), (False, GATHER + CAST + SCATTER + REDUCE + LAST)]
)
def test_the_wait_has_no_casts_of_gradients_unless_the_group_stays_unsharded(
    monkeypatch: pytest.MonkeyPatch, release: str, reshards: bool, wait: float
) -> None:
    cuda = SimulatedCuda()
    place_of(release, monkeypatch)
    group = Group(cuda.current)
    group.reshard_after_backward = reshards
    run = watched(group, monkeypatch)
    train(run, group, cuda, 10)
    snapshot = run.snapshot()
    measured = value(snapshot, "training_measured_steps_total")
    assert measured == 8  # the first step was startup, and the second had no mean to be compared with
    assert value(snapshot, "training_collective_wait_seconds_total") == pytest.approx(8 * wait, abs=1e-4)
    assert value(snapshot, "training_hook_errors_total") == 0


def test_a_pass_that_reduces_nothing_has_no_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda()
    place_of("2.6", monkeypatch)
    group = Group(cuda.current)
    group.reduces = False
    run = watched(group, monkeypatch)
    train(run, group, cuda, 10)
    wait = value(run.snapshot(), "training_collective_wait_seconds_total")
    assert wait == pytest.approx(8 * (GATHER + LAST), abs=1e-4)


def test_the_groups_of_torch_before_2_6_are_refused_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place_of("2.5", monkeypatch)
    run = watched(OldGroup(SimulatedCuda().current), monkeypatch)
    points = run.snapshot().points[BY_NAME["training_collective_wait_unavailable"]]
    assert points == [({"reason": "unknown_pytorch"}, 1.0)]
    assert "FSDP2 is not as expected" in caplog.text
    assert "neither DDP nor FSDP2" not in caplog.text


def test_a_wait_asks_cuda_once_for_its_stream_and_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("torch.cuda is asked by the device's marks alone")

    cuda = SimulatedCuda()
    place_of("2.6", monkeypatch)
    group = Group(cuda.current)
    run = watched(group, monkeypatch)
    train(run, group, cuda, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", asked)
    cuda.calls.clear()
    group.wait_for_unshard()
    group.post_backward()
    group.finalize_backward()
    assert cuda.calls == {"capturing": 3, "key": 3}
    assert value(run.snapshot(), "training_hook_errors_total") == 0
