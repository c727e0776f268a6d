"""What the loop recorded, added up: devices that are behind, spikes, checkpoints, and a thread that is held up."""

from __future__ import annotations

import ast
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.flops import Transformer
from flopwatch.training import Run
from flopwatch.training.totals import SPIKE_AFTER, Spikes
from tests.support.hook import Clock, seconds, silent, value
from tests.support.hook_server import HookServer


@dataclass
class Reached:
    """A moment of a simulated device."""

    recorded: float
    when: float | None = None

    def at(self) -> float | None:
        return self.when


class Device:
    """What a run marks in place of the host's clock. It advances only when the test moves it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.moments: list[Reached] = []

    def mark(self) -> Reached:
        self.moments.append(Reached(self.clock.now))
        return self.moments[-1]

    step_mark = mark

    def mark_after(self, _: object) -> Reached:
        return self.mark()


def on_a_device() -> tuple[Run, Clock, Device]:
    clock = Clock()
    run = silent(clock, flops_per_token=10, peak_flops=100)
    device = Device(clock)
    run.recorder.follow(device)
    return run, clock, device


def total(run: Run, row: Metric) -> float | None:
    return value(run.snapshot(), row.name)


def percentiles(run: Run) -> dict[str, float]:
    points = run.snapshot().points.get(m.TRAINING_STEP_PERCENTILE_SECONDS, ())
    return {labels["percentile"]: value for labels, value in points}


def test_the_percentiles_of_step_times_are_those_of_the_last_five_minutes() -> None:
    clock, chance = Clock(), random.Random(1)
    run = silent(clock)
    run.step(tokens=8)
    assert percentiles(run) == {}
    for _ in range(400):  # an hour ago, and slow
        clock.passes(9.0)
        run.step(tokens=8)
    durations = [chance.uniform(0.2, 0.25) if chance.random() < 0.97 else chance.uniform(2, 5) for _ in range(1100)]
    for duration in durations:
        clock.passes(duration)
        run.step(tokens=8)
    assert sum(durations) > 310
    last = durations
    while sum(last[1:]) > 300:
        last = last[1:]
    truth = statistics.quantiles(last, n=100, method="inclusive")
    assert percentiles(run) == {
        "50": pytest.approx(truth[49], rel=0.05),
        "90": pytest.approx(truth[89], rel=0.05),
        "99": pytest.approx(truth[98], rel=0.05),
    }


def test_the_percentiles_of_long_steps_cover_the_last_100_and_rank_0_alone_sends_them() -> None:
    clock = Clock()
    runs = [silent(clock, rank=rank, world_size=2) for rank in (0, 1)]
    for duration in (0.0, *[60.0] * 40, *[30.0] * 98, 90.0, 120.0):
        clock.passes(duration)
        for run in runs:
            run.step(tokens=8)
    assert percentiles(runs[0]) == {"50": 30.0, "90": 30.0, "99": 90.0}
    assert percentiles(runs[1]) == {}


# Where the host runs ahead of the device.


def test_a_step_counts_once_the_device_has_done_it() -> None:
    run, clock, device = on_a_device()
    run.step(tokens=8)
    clock.passes(0.1)
    run.step(tokens=8)
    assert total(run, m.TRAINING_STEPS_TOTAL) == 0
    device.moments[0].when = 1002.0
    assert total(run, m.TRAINING_STEPS_TOTAL) == 1
    clock.passes(4)
    device.moments[1].when = 1003.5
    assert total(run, m.TRAINING_STEPS_TOTAL) == 2
    assert seconds(run) == {"startup": 32.0, "step": pytest.approx(2.1)}
    durations = run.snapshot().step_durations
    assert durations is not None
    assert durations[2] == 1.5  # not the 0.1 s in which the host asked for it


def test_a_loop_that_waits_for_a_batch_while_the_device_works_does_not_stall_it() -> None:
    run, clock, device = on_a_device()
    run.got_batch()
    run.step(tokens=8)
    run.waiting_for_batch()
    clock.passes(1)
    run.got_batch()
    run.step(tokens=8)
    got_batch, step, waiting, got_next, next_step = device.moments
    got_batch.when, step.when, waiting.when = 1000.0, 1000.75, 1000.75
    got_next.when, next_step.when = 1001.0, 1003.0  # it was idle for the last quarter of the second
    clock.passes(2)
    assert seconds(run) == {"startup": 30.0, "step": 2.75, "data_stall": 0.25}


def test_what_is_behind_a_moment_not_known_yet_waits_for_it() -> None:
    run, clock, device = on_a_device()
    run.step(tokens=8)
    run.checkpoint_committed(1)
    run.recorder.add(m.TRAINING_RECOMPILATIONS_TOTAL)
    assert total(run, m.TRAINING_COMMITTED_STEPS) is None
    device.moments[0].when = clock.now
    assert total(run, m.TRAINING_COMMITTED_STEPS) == 1
    assert total(run, m.TRAINING_RECOMPILATIONS_TOTAL) == 1


def test_the_open_activity_goes_on_while_a_device_hangs() -> None:
    run, clock, device = on_a_device()
    run.step(tokens=8)
    device.moments[0].when = 1000.0
    run.step(tokens=8)
    clock.passes(3)
    assert seconds(run) == {"startup": 30.0}  # the device is behind, as it may be
    clock.passes(597)
    assert seconds(run) == {"startup": 30.0, "step": 590.0}
    device.moments[1].when = 1599.0
    assert seconds(run) == {"startup": 30.0, "step": 600.0}


def test_the_last_push_does_not_wait_for_the_device() -> None:
    run, clock, _ = on_a_device()
    run.step(tokens=8)
    clock.passes(2)
    run.step(tokens=8)
    snapshot = run.snapshot(last=True)
    assert value(snapshot, "training_steps_total") == 2
    assert snapshot.step_durations is not None
    assert snapshot.step_durations[2] == 2.0


def test_a_moment_that_fails_costs_itself() -> None:
    run, clock, device = on_a_device()

    class Broken(Reached):
        def at(self) -> float | None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run.step(tokens=8)
    device.moments[0].when = clock.now
    run.recorder.phase("forward", 1.0, Broken(clock.now))
    run.recorder.mark = run.recorder.step_mark = clock
    run.step(tokens=8)
    assert total(run, m.TRAINING_STEPS_TOTAL) == 2
    assert total(run, m.TRAINING_HOOK_ERRORS_TOTAL) == 1


# Losses.


def test_losses_that_are_not_finite_are_counted_and_shown() -> None:
    run = silent()
    for loss, norm in ((2.0, 1.0), (math.nan, math.inf), (math.inf, 1.0)):
        run.step(loss=loss, grad_norm=norm)
    snapshot = run.snapshot()
    assert snapshot.points[m.TRAINING_NONFINITE_TOTAL] == [({"value": "loss"}, 2.0), ({"value": "grad_norm"}, 1.0)]
    assert value(snapshot, "training_loss") == math.inf
    assert value(snapshot, "training_grad_norm") == 1.0
    assert value(snapshot, "training_loss_spikes_total") == 0


def test_a_falling_noisy_loss_has_no_spikes_and_one_that_jumps_has() -> None:
    spikes, noise = Spikes(), random.Random(1)
    for step in range(5000):
        spikes.see(2 + 8 * math.exp(-step / 500) + noise.gauss(0, 0.1))
    assert spikes.count == 0
    for loss in (2.9, 4.0, 9.0):
        spikes.see(loss)
    assert spikes.count == 3
    for _ in range(500):  # a new level for good is soon the ordinary one
        spikes.see(6 + noise.gauss(0, 0.1))
    before = spikes.count
    for _ in range(500):
        spikes.see(6 + noise.gauss(0, 0.1))
    assert spikes.count == before < 100


def test_the_first_losses_are_no_spikes_whatever_they_are() -> None:
    spikes = Spikes()
    for step in range(SPIKE_AFTER):
        spikes.see(10.0 ** (step % 7))
    assert spikes.count == 0


@pytest.mark.parametrize(
    ("parallel", "reports"),
    [
        (None, True),
        ({"dp": (0, 2), "pp": (0, 2)}, False),  # of a pipeline the last stage has the loss
        ({"dp": (0, 2), "pp": (1, 2)}, True),
        ({"dp": (1, 2), "pp": (1, 2)}, False),
        ({"dp": (0, 4)}, True),
    ],
)
def test_one_rank_speaks_for_the_runs_loss(parallel: Any, reports: bool) -> None:
    run = silent(world_size=4, parallel=parallel)
    run.step(loss=2.0)
    assert (total(run, m.TRAINING_LOSS) == 2.0) == reports


# What else there is to count.


def test_samples_and_hardware_flops_are_the_ranks_share() -> None:
    run = silent(
        world_size=8, parallel={"dp": (0, 2), "tp": (1, 4)}, flops_per_token=10, hardware_flops_per_token=12, rank=1
    )
    for _ in range(2):
        run.step(tokens=80, samples=4)
    snapshot = run.snapshot()
    assert value(snapshot, "training_samples_total") == 2
    assert value(snapshot, "training_tokens_total") == 40
    assert value(snapshot, "training_model_flops_total") == 200  # of the second step; the first was startup
    assert value(snapshot, "training_hardware_flops_total") == 240
    ((labels, _),) = snapshot.points[m.TRAINING_RANK_INFO]
    assert {name: labels[name] for name in ("dp", "tp", "pp", "cp", "ep")} == {
        "dp": "0",
        "tp": "1",
        "pp": "",
        "cp": "",
        "ep": "",
    }


def test_coordinates_that_do_not_fit_are_refused_and_the_run_goes_on() -> None:
    run = silent(world_size=8, parallel={"dp": (0, 3)})
    run.step(tokens=8)
    assert total(run, m.TRAINING_HOOK_ERRORS_TOTAL) == 1
    assert total(run, m.TRAINING_STEPS_TOTAL) == 1


def test_flops_that_were_counted_stand_in_for_declared_ones() -> None:
    run = silent(peak_flops=1e12)
    for _ in range(2):
        run.recorder.counted(30.0)
        run.recorder.counted(12.0)
        run.step()
    snapshot = run.snapshot()
    assert value(snapshot, "training_model_flops_total") == 42
    ((info, _),) = snapshot.points[m.TRAINING_RUN_INFO]
    assert (info["flops_source"], info["convention"]) == ("counted", "causal")
    run.recorder.uncountable("a custom kernel")
    run.step(tokens=1)
    assert [labels["reason"] for labels, _ in run.snapshot().points[m.TRAINING_MFU_UNAVAILABLE]] == ["uncountable"]


def test_packed_samples_under_a_window_have_no_flops_and_one_complaint() -> None:
    windowed = Transformer(layers=1, width=4, heads=2, vocabulary=8, mlp_width=8, window=2)
    run = silent(flops_per_token=windowed, peak_flops=1e12)
    for _ in range(3):
        run.step(tokens=8, sum_len_squared=32)
    snapshot = run.snapshot()
    assert value(snapshot, "training_model_flops_total") is None
    assert [labels["reason"] for labels, _ in snapshot.points[m.TRAINING_MFU_UNAVAILABLE]] == ["packed_under_a_window"]
    assert value(snapshot, "training_hook_errors_total") == 1


def test_a_phase_counts_in_measured_steps_and_none_is_made_up() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    for _ in range(3):
        run.recorder.phase("forward", clock.now, clock.now + 1)
        run.recorder.phase("forward", clock.now + 1, clock.now + 1.5)  # a second micro-batch
        clock.passes(4)
        run.step()
    run.recorder.phase("daydreaming", 1, 2)
    snapshot = run.snapshot()
    assert snapshot.points[m.TRAINING_PHASE_SECONDS_TOTAL] == [({"phase": "forward"}, 3.0)]
    assert value(snapshot, "training_measured_step_seconds_total") == 8
    assert value(snapshot, "training_hook_errors_total") == 1


def test_every_kth_step_is_to_be_measured_if_that_is_wanted() -> None:
    run = silent()
    run.recorder.sample(3)
    asked = []
    for _ in range(9):
        run.step()
        asked.append(run.recorder.measuring)
    assert asked == [False, False, True] * 3


@pytest.mark.parametrize(("seconds", "every"), [(30.0, 1), (0.5, 1), (0.25, 2), (0.3, 1), (0.04, 8), (0.001, 256)])
def test_about_two_steps_a_second_are_measured(seconds: float, every: int) -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    for _ in range(40):
        clock.passes(seconds)
        run.step()
    run.snapshot()
    assert run.recorder.measure_every == every
    run.recorder.sample(5)
    run.snapshot()
    assert run.recorder.measure_every == 5


@pytest.mark.parametrize(("seconds", "every"), [(2.5, 1), (1.5, 1), (0.6, 2), (0.1, 16)])
def test_on_a_device_a_step_is_measured_every_two_seconds(seconds: float, every: int) -> None:
    run, clock, device = on_a_device()
    for _ in range(40):
        clock.passes(seconds)
        run.step()
        device.moments[-1].when = clock.now
    run.snapshot()
    assert run.recorder.measure_every == every


# Checkpoints.


def test_a_checkpoint_is_committed_when_it_is_left_without_an_error() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    with run.checkpoint():
        clock.passes(2)
    assert total(run, m.TRAINING_COMMITTED_STEPS) == 1
    with run.checkpoint(step=7):
        pass
    assert total(run, m.TRAINING_COMMITTED_STEPS) == 7
    with pytest.raises(OSError, match="full"), run.checkpoint(step=9):
        raise OSError("the disk is full")
    assert total(run, m.TRAINING_COMMITTED_STEPS) == 7
    assert seconds(run) == {"startup": 30.0, "checkpoint_save": 2.0}


def test_a_save_in_the_background_is_counted_separately_and_is_not_an_activity() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    assert total(run, m.TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL) is None
    with run.background_save():
        clock.passes(5)
    assert total(run, m.TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL) == 5
    assert seconds(run) == {"startup": 30.0, "step": 5.0}


def test_a_save_that_goes_on_is_durable_if_its_future_has_no_error() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    whole, failed, of_no_step = futures = [Future[None](), Future[None](), Future[None]()]
    for future, step in zip(futures, (3, 5, None), strict=True):
        run.checkpoint_goes_on(future, step)
    clock.passes(2)
    failed.set_exception(OSError("the disk is full"))
    of_no_step.set_result(None)
    assert total(run, m.TRAINING_COMMITTED_STEPS) is None
    whole.set_result(None)
    assert total(run, m.TRAINING_COMMITTED_STEPS) == 3
    assert total(run, m.TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL) == 6
    run.checkpoint_goes_on("no future", 7)  # type: ignore[arg-type]
    assert total(run, m.TRAINING_HOOK_ERRORS_TOTAL) == 1


def test_the_position_is_known_to_the_loop_at_once() -> None:
    run = silent()
    assert run.position is None
    run.step()
    assert run.position == 1
    run.restored(step=40)
    run.step()
    run.step()
    assert run.position == 42 == total(run, m.TRAINING_POSITION_STEPS)


# The loop's side.


def test_a_loop_whose_thread_is_held_up_adds_up_itself_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.training.recorder.MAX_BACKLOG", 4096)
    steps, most = 50_000, 0
    with HookServer() as server:
        run = Run("llama", endpoint=server.url, push_interval=1e6, environ={})
        server.wait_for(lambda push: True)
        for _ in run.batches(range(steps)):
            run.step(tokens=1)
            most = max(most, len(run.recorder.totals.events))
        run.finish()
        last = server.last_word()
    # What comes until it looks again: 1,024 steps or batches of three entries each.
    assert most <= 4096 + 3 * 1024
    assert last.samples["training_steps_total"] == steps


def test_a_run_that_pushes_nothing_keeps_no_more_than_others_and_adds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flopwatch.training.recorder.MAX_BACKLOG", 4096)
    run = silent()
    for _ in range(50_000):
        run.step(tokens=1)
        assert len(run.recorder.totals.events) < 4096 + 2048
    assert run.recorder.totals.steps == 0


def test_a_forked_child_records_nothing() -> None:
    run = Run("llama", endpoint="http://127.0.0.1:1", environ={})
    child = multiprocessing.get_context("fork").Process(target=_steps_in_a_child, args=(run,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert run.alive
    run.finish()
    assert not run.alive


def _steps_in_a_child(run: Run) -> None:
    before = len(run.recorder.totals.events)  # of the parent's, such as a collection of garbage
    for _ in run.batches(range(3)):
        run.step(tokens=1)
    sys.exit(len(run.recorder.totals.events) - before + run.alive)


def test_an_error_that_cannot_even_be_printed_is_counted() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise SystemError

    run = silent()
    run.recorder.failed("step", Unspeakable())
    assert total(run, m.TRAINING_HOOK_ERRORS_TOTAL) == 1


def test_an_error_is_logged_with_its_stack_and_no_source_is_parsed_for_it(caplog: pytest.LogCaptureFixture) -> None:
    run = silent()
    polls: dict[str, Callable[[], None]] = {}
    run.recorder.poll(lambda: polls["a"]())
    # Another thread may be parsing, and before Python 3.13 that is not safe for two.
    with patch("ast.parse", wraps=ast.parse) as parse:
        run.snapshot()
    assert parse.call_count == 0
    assert f"{__file__}:" in caplog.text
    assert ', in <lambda>: run.recorder.poll(lambda: polls["a"]())\nKeyError\n' in caplog.text


def test_a_failing_poll_does_not_keep_the_rest_from_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = silent()
    polled: list[int] = []

    def fails() -> None:
        raise OSError("no such device")

    run.recorder.poll(fails)
    run.recorder.poll(lambda: polled.append(1))
    run.recorder.poll(lambda: run.recorder.set(m.TRAINING_OUT_OF_MEMORY_TOTAL, 3))
    snapshot = run.snapshot()
    assert polled == [1]
    assert value(snapshot, "training_out_of_memory_total") == 3
    assert value(snapshot, "training_hook_errors_total") == 1
