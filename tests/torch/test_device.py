"""Test moments on a simulated CUDA device with streams, launch latency and its own clock.

The host runs ahead of the device. These tests do not run on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch.training.torch import device
from flopwatch.training.torch.device import Moment
from flopwatch.training.totals import CapturedMark, MissedMark, Totals
from tests.support.hook import silent, value
from tests.support.machine import PATIENCE
from tests.support.simulated_cuda import SimulatedCuda, SimulatedStream

pytestmark = pytest.mark.torch

MICROSECOND = 1e-6


def moment(mark: float | Moment) -> Moment:
    assert isinstance(mark, Moment)
    return mark


def at(mark: float | Moment) -> float:
    if isinstance(mark, float):
        return mark
    seconds = mark.at()
    assert seconds is not None
    return seconds


def test_a_moment_is_known_once_the_device_is_there() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    idle = moment(moments.mark())
    cuda.current.work(0.5)
    busy = moment(moments.mark())
    assert (idle.at(), busy.at(), busy.recorded) == (1000.0, None, 1000.0)
    cuda.now += 0.499
    assert busy.at() is None
    cuda.now += 1.0
    assert busy.at() == 1000.5
    assert cuda.errors == []


def test_the_gap_in_which_the_device_waits_for_a_batch_is_the_data_stall() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    stalls = []
    marks: list[tuple[float | Moment, float | Moment]] = []
    moments.mark()
    for loading in (0.001, 0.2, 0.05, 0.0, 0.3):
        cuda.current.work(0.1)
        after_optimizer = moments.mark()
        cuda.now += loading  # the host loads the next batch while the device computes
        marks.append((after_optimizer, moments.mark()))
    cuda.finish()
    for before, after in marks:
        stalls.append(round(at(after) - at(before), 6))
    # The second batch takes 200 ms, and the device is busy for 199 ms of them. The fifth takes 300 ms, 250 ms of them
    # busy.
    assert stalls == [0.0, 0.001, 0.0, 0.0, 0.05]


def test_host_time_has_no_effect_while_the_device_is_busy() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    began = moments.mark()
    marks = []
    for seconds in (0.25, 0.5, 0.125):
        cuda.current.work(seconds)
        marks.append(moments.mark())
    cuda.now += 10
    assert [round(at(mark) - at(began), 6) for mark in marks] == [0.25, 0.75, 0.875]


def test_a_moment_is_set_right_where_the_device_was_idle() -> None:
    cuda = SimulatedCuda(latency=5 * MICROSECOND)
    moments = cuda.moments()
    cuda.current.work(3.0)
    first = moments.mark()  # no earlier moment is known, so the host's time is used
    cuda.now += 4.0
    second = moments.mark()
    cuda.now += 1.0
    assert at(first) == 1000.0
    assert at(second) == pytest.approx(1004.0, abs=10 * MICROSECOND)


def test_a_query_that_finds_a_mark_pending_bounds_its_time() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    cuda.current.work(3.0)
    mark = moment(moments.mark())
    for _ in range(29):
        cuda.now += 0.1
        assert mark.at() is None
    cuda.now += 0.1001
    assert mark.at() == pytest.approx(1003.0, abs=0.11)


@pytest.mark.parametrize("drift", [-1e-4, 1e-4])
def test_a_device_clock_that_drifts_is_held_to_the_hosts_though_the_device_is_never_idle(drift: float) -> None:
    cuda = SimulatedCuda(drift=drift)
    moments = cuda.moments()
    phases = random.Random(0)
    pending = [(moment(moments.mark()), cuda.now)]
    worst, pushes_at = 0.0, 1005.0
    for _ in range(20_000):  # 2000 s of steps, two steps ahead: without correction the clock would be off by 0.2 s
        cuda.current.work(0.1)
        pending.append((moment(moments.mark()), cuda.current.free_at))
        cuda.now = max(cuda.now, cuda.current.free_at - 0.2)
        if cuda.now >= pushes_at:
            cuda.now = pushes_at + phases.uniform(0, 0.1)
            pushes_at += 5.0
            while pending and (seconds := pending[0][0].at()) is not None:
                worst = max(worst, abs(seconds - pending.pop(0)[1]))
    assert worst < 0.1


def test_a_device_that_hangs_blocks_nothing_and_takes_no_more_memory() -> None:
    cuda = SimulatedCuda(hangs=True)
    moments = cuda.moments(max_events=10)
    marks = []
    for _ in range(1000):
        cuda.now += 1.0
        marks.append(moments.mark())
    assert cuda.events == 10
    assert moments.missed == 990
    assert [isinstance(mark, float) for mark in marks] == [False] * 10 + [True] * 990
    assert moment(marks[0]).at() is None
    cuda.hangs = False
    # The query at 2000 found it pending, so it completed later.
    assert [at(mark) for mark in marks] == [2000.0] * 10 + [1011.0 + n for n in range(990)]
    assert isinstance(moments.mark(), Moment)


@dataclass
class Fsdp2:
    """An FSDP2 model of so many groups that waits for a tenth of the device's time, measured in every step."""

    groups: int
    micro_batches: int
    step_seconds: float
    push_interval: float = 5.0
    max_events: int = device.MAX_EVENTS

    def train(self, steps: int) -> tuple[Totals, device.Moments]:
        cuda = SimulatedCuda()
        moments = cuda.moments(max_events=self.max_events)
        totals = Totals(cuda.now, lambda what, error: pytest.fail(f"{what}: {error}"))
        totals.measures_wait = True
        pushed, ended = cuda.now, deque[float]()
        for _ in range(steps):
            for _ in range(4 * self.groups * self.micro_batches):  # two waits for parameters, one in and after backward
                began = self.mark(cuda, moments.mark)
                cuda.current.work(0.1 * self.step_seconds / (4 * self.groups * self.micro_batches))
                totals.events.append((Totals.waited, ending := self.mark(cuda, moments.mark), began, ending))
                cuda.current.work(0.9 * self.step_seconds / (4 * self.groups * self.micro_batches))
            totals.events.append((Totals.step, self.mark(cuda, moments.step_mark), 1))
            ended.append(cuda.current.free_at)
            if len(ended) > 1:  # the host runs one step ahead of the device
                cuda.now = max(cuda.now, ended.popleft())
            if cuda.now - pushed >= self.push_interval:
                pushed = cuda.now
                totals.take()
        cuda.finish()
        totals.take()
        return totals, moments

    def mark(self, cuda: SimulatedCuda, make: Callable[[], float | Moment]) -> float | Moment:
        cuda.now += 6e-6  # what a mark costs the host
        return make()


SIZES = [Fsdp2(33, 1, 0.5), Fsdp2(33, 4, 1.2), Fsdp2(81, 1, 0.6), Fsdp2(81, 4, 2.4)]


@pytest.mark.parametrize("push_interval", [5.0, 15.0])
@pytest.mark.parametrize("model", SIZES, ids=lambda model: f"{model.groups} groups, {model.micro_batches} batches")
def test_every_step_of_a_large_model_is_measured_however_seldom_it_is_pushed(
    model: Fsdp2, push_interval: float
) -> None:
    totals, moments = replace(model, push_interval=push_interval).train(20)
    assert moments.missed == 0
    assert totals.measured_steps == 18  # the first is startup, and the second has no mean to be compared with
    assert totals.wait / totals.measured_seconds == pytest.approx(0.1, abs=0.002)
    assert sum(totals.durations) == 19
    assert totals.duration_sum / 19 == pytest.approx(model.step_seconds, rel=0.01)


@pytest.mark.long
def test_a_rank_that_pushes_a_third_as_often_is_no_straggler() -> None:
    model = Fsdp2(81, 4, 2.4)
    trained = [replace(model, push_interval=15.0 if rank == 2 else 5.0).train(20)[0] for rank in range(4)]
    shares = [totals.wait / totals.measured_seconds for totals in trained]
    assert max(shares) - min(shares) < 0.002  # of a step; a straggler has to compute 0.04 longer


def test_a_step_with_a_missed_mark_has_its_duration_and_no_wait() -> None:
    totals, moments = Fsdp2(81, 4, 2.4, push_interval=20.0, max_events=2048).train(20)
    assert moments.missed > 0
    assert totals.measured_steps < 18
    if totals.measured_steps:
        assert totals.wait / totals.measured_seconds == pytest.approx(0.1, abs=0.002)
    assert sum(totals.durations) == 19, "some events are kept for the ends of steps"
    assert totals.duration_sum / 19 == pytest.approx(2.4, rel=0.01)


def test_a_step_between_missed_ends_has_no_duration() -> None:
    totals = Totals(0.0, lambda what, error: pytest.fail(f"{what}: {error}"))
    marks = [10.0, 20.0, MissedMark(21.0), 40.0, 50.0]
    totals.events.extend((Totals.step, mark, 1) for mark in marks)
    totals.take()
    assert totals.steps == 5
    assert (sum(totals.durations), totals.duration_sum) == (2, 20.0)  # from 10 to 20, and from 40 to 50


@pytest.mark.parametrize(("query_seconds", "in_a_slice"), [(0.0, device.SLICE), (25 * MICROSECOND, 40)])
def test_many_moments_are_settled_in_slices_of_a_millisecond_with_pauses(
    monkeypatch: pytest.MonkeyPatch, query_seconds: float, in_a_slice: int
) -> None:
    cuda = SimulatedCuda(query_seconds=query_seconds)
    moments = cuda.moments()
    marks = [moment(moments.mark()) for _ in range(10_000)]
    cuda.now += 1
    queries: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: queries.append(cuda.queries))
    assert marks[-1].at() == 1000.0
    slices = [after - before for before, after in pairwise([0, *queries])]
    assert slices == pytest.approx([in_a_slice] * (10_000 // in_a_slice), abs=1)


def test_the_marking_thread_settles_what_the_device_has_reached_when_events_run_out() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments(max_events=320)
    for _ in range(5000):
        cuda.current.work(1e-4)
        assert isinstance(moments.mark(), Moment)
        cuda.now += 2e-4
    assert cuda.events <= 320
    assert moments.missed == 0


def test_events_are_used_again_once_they_are_free() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    for _ in range(1000):
        cuda.current.work(0.01)
        mark = moments.mark()
        cuda.now += 0.02
        at(mark)
    assert cuda.events == 2  # the last completed one is the base for measuring the next


def test_while_a_graph_is_captured_now_is_the_hosts_and_no_event_is_recorded() -> None:
    cuda = SimulatedCuda(is_capturing=True)
    mark = cuda.moments().mark()
    assert (mark, type(mark)) == (1000.0, CapturedMark)
    assert cuda.events == 0


def test_a_stream_is_looked_up_by_its_handle_and_made_an_object_once() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    for stream_id in (0, 1, 0, 1):
        cuda.current = SimulatedStream(cuda, stream_id=stream_id)
        moments.mark()
    assert cuda.calls == {"capturing": 4, "key": 4, "stream": 2}


def test_a_mark_after_another_is_on_its_stream_and_asks_nothing() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    first = cuda.current
    began = moment(moments.mark())
    cuda.current = SimulatedStream(cuda, stream_id=1)
    cuda.calls.clear()
    first.work(0.5)
    ended = moments.mark_after(began)
    cuda.now += 1
    assert (at(began), at(ended)) == (1000.0, 1000.5)
    assert cuda.calls == {}
    assert at(moments.mark_after(1000.0)) == 1001.0


def test_asking_breaks_no_capture_of_another_thread() -> None:
    cuda = SimulatedCuda()
    mark = moment(cuda.moments().mark())
    cuda.another_thread_captures = True
    assert mark.at() == 1000.0
    assert cuda.broken_captures == 0
    assert cuda.queries == 1


def test_a_device_that_fails_is_reported_once_and_leaves_the_hosts_clock() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    marks = [moments.mark() for _ in range(3)]
    cuda.now += 1
    cuda.failing = True
    assert [at(mark) for mark in marks] == [1000.0] * 3
    assert [moments.mark() for _ in range(3)] == [1001.0] * 3
    assert cuda.errors == ["mark: CUDA error: device-side assert triggered"]


def test_a_device_that_fails_while_it_is_marked_does_not_raise() -> None:
    cuda = SimulatedCuda(failing=True)
    assert [cuda.moments().mark() for _ in range(2)] == [1000.0] * 2


def test_a_thread_on_a_device_the_process_does_not_use_leaves_it_alone() -> None:
    cuda = SimulatedCuda(untouched=(0,))
    moments = cuda.moments()
    assert (moments.mark(), cuda.events) == (1000.0, 0)
    cuda.current = SimulatedStream(cuda, device_index=3)
    assert isinstance(moments.mark(), Moment)
    assert cuda.errors == []


def test_two_devices_keep_their_events_apart() -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    marks = []
    for step in range(4):
        cuda.current = SimulatedStream(cuda, device_index=step % 2)
        cuda.now += 1.0
        marks.append(moments.mark())
        assert at(marks[-1]) == cuda.now
    assert cuda.events == 4
    assert cuda.errors == []


def test_threads_that_mark_and_ask_at_once_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAX_WAIT", PATIENCE)  # a thread that waits no longer gets None
    cuda = SimulatedCuda()
    moments = cuda.moments()
    moments.mark()
    seen: list[list[float]] = [[], []]

    def mark_and_ask(which: int) -> None:
        for _ in range(500):
            seen[which].append(at(moments.mark()))

    threads = [threading.Thread(target=mark_and_ask, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[1000.0] * 500] * 2
    assert cuda.errors == []
    assert cuda.events <= 6


def test_a_thread_stuck_in_the_driver_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAX_WAIT", 0.01)
    cuda = SimulatedCuda()
    mark = moment(cuda.moments().mark())
    stuck, go_on = threading.Event(), threading.Event()

    class Wedged:
        def __enter__(self) -> None:
            stuck.set()
            go_on.wait(60)

        def __exit__(self, *_: object) -> None:
            pass

    cuda.asking = lambda device_index: Wedged()  # type: ignore[method-assign, assignment, return-value]
    thread = threading.Thread(target=mark.at)
    thread.start()
    assert stuck.wait(60)
    assert mark.at() is None
    go_on.set()
    thread.join()
    assert mark.at() == 1000.0


Action = tuple[str, float, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["host", "work", "mark", "mark", "ask"]), st.floats(0, 2.0), st.integers(0, 2)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.booleans(), st.randoms(use_true_random=False))
def test_moments_are_the_devices_own_to_a_microsecond(
    actions: list[Action], one_stream: bool, chance: random.Random
) -> None:
    cuda = SimulatedCuda()
    moments = cuda.moments()
    streams = [SimulatedStream(cuda, stream_id=number) for number in range(1 if one_stream else 3)]
    for stream in streams:  # while the device is idle, host and device clocks are aligned once
        cuda.current = stream
        moment(moments.mark()).at()
    marks: list[tuple[int, Moment, float]] = []
    for what, seconds, number in actions:
        cuda.current = streams[number % len(streams)]
        if what == "host":
            cuda.now += seconds
        elif what == "work":
            cuda.current.work(seconds)
        elif what == "mark":
            mark = moment(moments.mark())
            assert mark.recorded == cuda.now
            marks.append((cuda.current.stream_id, mark, cuda.current.free_at))
        elif marks:
            _, mark, reached = chance.choice(marks)
            assert (mark.at() is None) == (reached > cuda.now)
    cuda.now = 1e6
    chance.shuffle(shuffled := list(marks))
    for _, mark, reached in shuffled:
        assert at(mark) == pytest.approx(reached, abs=MICROSECOND)
    by_stream: dict[int, float] = {}
    for stream_id, mark, reached in marks:
        assert mark.recorded <= at(mark) <= reached + MICROSECOND
        assert at(mark) >= by_stream.get(stream_id, -math.inf)
        by_stream[stream_id] = at(mark)
    assert cuda.errors == []
    assert cuda.events <= len(marks) + len(streams)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.floats(-1e-3, 1e-3), st.floats(0, 1e-4), st.booleans())
def test_whatever_the_device_does_no_moment_is_before_it_was_recorded_or_after_it_was_seen(
    actions: list[Action], drift: float, latency: float, one_stream: bool
) -> None:
    cuda = SimulatedCuda(drift=drift, latency=latency)
    moments = cuda.moments()
    streams = [SimulatedStream(cuda, stream_id=number) for number in range(1 if one_stream else 3)]
    marks: list[tuple[int, Moment]] = []
    for what, seconds, number in actions:
        cuda.current = streams[number % len(streams)]
        if what == "host":
            cuda.now += seconds
        elif what == "work":
            cuda.current.work(seconds)
        elif what == "mark":
            marks.append((cuda.current.stream_id, moment(moments.mark())))
        else:
            for _, mark in marks:
                known = mark.at()
                assert known is None or mark.recorded <= known <= cuda.now
    cuda.now += 1e4
    last: dict[int, float] = {}
    for stream_id, mark in marks:
        assert last.get(stream_id, mark.recorded) <= at(mark)
        last[stream_id] = max(at(mark), mark.recorded)
        assert at(mark) == mark.at()


def test_a_run_reports_the_marks_that_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda()
    monkeypatch.setattr(device, "moments", lambda clock, failed: cuda.moments(max_events=16))
    run = silent()
    run.step(1)  # with a mark on CUDA, which is in use by then
    cuda.current.work(60.0)
    reported = []
    for marks in (8, 4, 20):
        for _ in range(marks):
            run.recorder.mark()
        reported.append(value(run.snapshot(), "training_missed_marks_total"))
    # Of 16 events one is kept for a step's end, and 13 are in use before the last 20 marks.
    assert reported == [None, None, 18]
    assert value(run.snapshot(), "training_hook_errors_total") == 0


class Driver:
    """Fake libcuda with the one call in use: it swaps a thread's capture mode with the given one."""

    def __init__(self, result: int = 0) -> None:
        self.mode = 0
        self.result = result

    def cuThreadExchangeStreamCaptureMode(self, pointer: Any) -> int:
        cell = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
        self.mode, cell[0] = cell[0], self.mode
        return self.result


def test_without_cuda_there_are_no_moments_and_nothing_is_initialised() -> None:
    import torch

    errors: list[str] = []
    assert device.moments(lambda: 0.0, lambda what, error: errors.append(what)) is None
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert errors == []


def test_the_thread_that_asks_steps_out_of_captures_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    on: list[int] = []

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            on.append(self.index)

        def __exit__(self, *_: object) -> None:
            on.pop()

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    driver = Driver()
    with device.TorchCuda(driver).asking(3):
        assert (driver.mode, on) == (1, [3])
    assert (driver.mode, on) == (0, [])
    with pytest.raises(RuntimeError, match="CUDA error 3"), device.TorchCuda(Driver(result=3)).asking(0):
        pass


def test_a_driver_without_the_call_is_refused_before_anything_is_recorded() -> None:
    with pytest.raises(AttributeError):
        device.TorchCuda(object())
