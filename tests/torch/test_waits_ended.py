"""Test what a rank reports when its model's waits for other ranks end, as in the replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flopwatch.catalogue import BY_NAME
from flopwatch.training import Run
from flopwatch.training.torch import waits
from tests.support.hook import Clock, silent, value

pytestmark = pytest.mark.torch

WAIT, UNAVAILABLE = "training_collective_wait_seconds_total", "training_collective_wait_unavailable"


class Loop:
    """Loop of steps of a second with a forward phase, pushed every five steps, and a wait in some of them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.run: Run = silent(self.clock)
        self.watch = waits.Watch(self.run.recorder)
        self.run.recorder.poll(self.watch.check)

    def train(self, steps: int, waits_in: Callable[[int], bool]) -> None:
        recorder = self.run.recorder
        for step in range(steps):
            if recorder.measuring:
                recorder.phase("forward", self.clock.now, self.clock.now + 0.5)
                if waits_in(step):
                    began = self.watch.begins()
                    self.clock.passes(0.25)
                    self.watch.ends(began)
            self.clock.passes(0.75)
            self.run.step(tokens=1)
            if step % 5 == 4:
                self.run.snapshot()

    def reasons(self) -> list[str]:
        return [labels["reason"] for labels, _ in self.run.snapshot().points.get(BY_NAME[UNAVAILABLE], [])]

    def measured_steps(self) -> float:
        return value(self.run.snapshot(), "training_measured_steps_total") or 0


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_waits_that_end_are_reported_and_phases_are_measured_on(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.train(5, lambda step: step < 3)
    # The first step was startup, and the second had no mean to be compared with.
    assert (loop.reasons(), value(loop.run.snapshot(), WAIT)) == ([], 0.25)
    loop.train(30, lambda step: False)
    assert loop.reasons() == ["waits_ended"]
    assert value(loop.run.snapshot(), WAIT) is None
    before = loop.measured_steps()
    loop.train(10, lambda step: False)
    assert loop.measured_steps() == before + 10
    assert caplog.text.count("the wait for other ranks is not measured") == 1


def test_a_capture_is_the_reason_if_the_hooks_ran_in_one(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.train(2, lambda step: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loop.train(1, lambda step: True)
    loop.train(20, lambda step: False)
    assert loop.reasons() == ["cuda_graph"]


def test_waits_that_come_again_are_measured_again(loop: Loop) -> None:
    loop.train(2, lambda step: True)
    loop.train(20, lambda step: False)
    assert loop.reasons() == ["waits_ended"]
    loop.train(5, lambda step: True)
    assert loop.reasons() == []
    assert value(loop.run.snapshot(), WAIT) == 5 * 0.25


def test_steps_between_those_that_are_measured_need_no_wait(loop: Loop) -> None:
    loop.run.recorder.sample(16)
    loop.train(16 * 20, lambda step: True)
    assert loop.reasons() == []
    assert value(loop.run.snapshot(), WAIT) == pytest.approx(0.25 * loop.measured_steps())


def test_a_model_whose_first_steps_have_no_wait_has_a_reason(loop: Loop) -> None:
    loop.train(20, lambda step: False)
    assert loop.reasons() == ["no_wait"]


def test_a_watch_that_is_removed_reports_nothing(loop: Loop) -> None:
    loop.train(2, lambda step: True)
    loop.watch.remove()
    loop.train(30, lambda step: False)
    assert loop.reasons() == []


MODEL = torch.nn.Linear(1, 1, device="meta")


@pytest.mark.parametrize(
    ("cuda", "parallel", "model", "reason"),
    [
        (False, {"pp": (0, 2)}, MODEL, "pipeline"),
        (True, {"dp": (0, 2)}, None, "no_model"),
        (True, {"dp": (0, 2)}, MODEL, "other_model"),
        (True, {"tp": (0, 2)}, MODEL, "other_groups"),
    ],
)
def test_each_refused_model_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, parallel: dict[str, tuple[int, int]], model: object, reason: str
) -> None:
    run = silent(rank=0, world_size=2, parallel=parallel)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    waits.watch(run.recorder, model)
    points = run.snapshot().points[BY_NAME[UNAVAILABLE]]
    assert points == [({"reason": reason}, 1.0)]
