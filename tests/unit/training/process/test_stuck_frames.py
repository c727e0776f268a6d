"""The line at which a rank is stuck: the loop's own thread, as the hook reports it to the exporter."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.training import Run
from flopwatch.training.process import stuck_frames
from flopwatch.training.process.launcher import Process
from tests.support.machine import until

# The thread puts an entry into `arrived` at each line where it waits. `go` lets it continue, and False ends it.
PROGRAM = """
def stuck(arrived, go):
    arrived.put(True)
    go.get()

def moves(arrived, go):
    while deeper(arrived, go):
        arrived.put(True)
        go.get()

def deeper(arrived, go):
    arrived.put(True)
    return go.get()
"""


class Clock:
    """Monotonic seconds that pass only when the test moves them."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def loop(folder: Path, what: str, steps: int = 3) -> Iterator[tuple[Callable[[float], str | None], Callable[[], None]]]:
    """Run a job whose thread makes steps of a second and then calls `what`.

    Give a function that returns the frame after so many more seconds, and one that moves the thread to its next line.
    """
    program: dict[str, Any] = {}
    exec(compile(PROGRAM, str(folder / "train.py"), "exec"), program)
    clock, arrived, go = Clock(), Queue[bool](), Queue[bool]()
    run = Run(
        "lm",
        environ={"FLOPWATCH_DISABLE": "1"},
        clock=clock,
        process=Process(pid=os.getpid(), start_ticks=1, age=30.0, pid_namespace=1),
    )

    def train() -> None:
        for _ in range(steps):
            clock.now += 1
            run.step(1)
        program[what](arrived, go)

    def frame(seconds: float) -> str | None:
        clock.now += seconds
        points = run.snapshot().points.get(m.TRAINING_STUCK_FRAME_INFO, [])
        return points[0][0]["at"] if points else None

    def next_line() -> None:
        go.put(True)
        arrived.get(timeout=30)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        arrived.get(timeout=30)
        yield frame, next_line
    finally:
        for _ in range(2):
            go.put(False)
        thread.join()


def watched(frame: Callable[[float], str | None], seconds: float) -> str | None:
    """Return the frame reported after so many seconds with a look every five."""
    return [frame(5) for _ in range(int(seconds / 5))][-1]


def test_a_step_that_does_not_end_is_reported_with_a_line_of_the_job_s_own_code(tmp_path: Path) -> None:
    with loop(tmp_path, "stuck") as (frame, _):
        assert watched(frame, stuck_frames.AFTER + stuck_frames.MIN_COVERED) is None
        assert frame(5) == "train.py:4 in stuck"
        assert watched(frame, 3600) == "train.py:4 in stuck"


def test_a_thread_that_moves_is_where_it_always_is(tmp_path: Path) -> None:
    with loop(tmp_path, "moves") as (frame, next_line):
        for _ in range(20):
            next_line()
            at = frame(5)
        assert at == "train.py in moves"
        assert watched(frame, stuck_frames.MEMORY - stuck_frames.TOGETHER) == "train.py in moves"
        assert watched(frame, 3 * stuck_frames.TOGETHER) in ("train.py:9 in moves", "train.py:13 in deeper")


def test_one_look_reports_nothing(tmp_path: Path) -> None:
    with loop(tmp_path, "stuck") as (frame, _):
        assert frame(1000) is None
        assert frame(stuck_frames.MEMORY + 1) is None  # the one before was too long ago
        assert frame(stuck_frames.MIN_COVERED) == "train.py:4 in stuck"


def test_a_step_is_old_after_three_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck_frames, "AFTER_STEPS", 100.0)  # of a second each
    with loop(tmp_path, "stuck") as (frame, _):
        assert watched(frame, 100 + stuck_frames.MIN_COVERED) is None
        assert watched(frame, 10) is not None


def test_a_start_and_a_checkpoint_may_take_their_time(tmp_path: Path) -> None:
    with loop(tmp_path, "stuck", steps=0) as (frame, _):
        assert watched(frame, 120 + stuck_frames.MIN_COVERED - 30) is None  # the process was 30 s old
        # No step was made, so it is not known which thread makes them: the main one is reported.
        assert watched(frame, 10) is not None


def test_a_wait_that_begins_again_is_observed_again(tmp_path: Path) -> None:
    with loop(tmp_path, "stuck") as (frame, _):
        assert watched(frame, 60) is not None
    at = stuck_frames.StuckFrames()
    assert [at.look(None, "step", 0.0, now, 1.0) for now in (20.0, 51.0)][-1] is not None
    assert at.look(None, "step", 40.0, 56.0, 1.0) is None
    assert at.look(None, "step", 40.0, 85.0, 1.0) is None
    assert at.look(None, "step", 40.0, 87.0, 1.0) is not None


def test_a_deep_stack_and_many_looks_cost_little() -> None:
    at = stuck_frames.StuckFrames()

    def deep(levels: int) -> None:
        if levels:
            return deep(levels - 1)
        for tenth in range(1200):
            at.look(threading.get_ident(), "step", 0.0, 20.0 + tenth / 10, 1.0)
        return None

    with recursion(5000):
        deep(4000)
    assert sum(len(lines) for _, lines in at._looks) <= 8 * stuck_frames.MAX_DEPTH


@contextmanager
def recursion(limit: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def frames(*lines: tuple[str, str, int]) -> str | None:
    return stuck_frames._text(list(lines))


def test_the_line_is_the_innermost_of_the_job_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = f"{Path(threading.__file__)}"
    torch = "/srv/torch/autograd/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__path__=["/srv/torch"]))
    ours = str(Path(stuck_frames.__file__).parents[1] / "run.py")
    assert (
        frames(
            ("/job/train.py", "<module>", 210),
            ("/job/train.py", "main", 88),
            (torch, "backward", 5),
            (library, "wait", 9),
            (ours, "guarded", 3),
        )
        == "train.py:88 in main"
    )
    assert frames(("/job/train.py", "<module>", 210), (library, "wait", 9)) == "train.py:210"
    # A trainer that is a package: its own line, and not torch's.
    packaged = "/venv/lib/python3.11/site-packages/megatron/training.py"
    assert frames((library, "_run_code", 1), (packaged, "train", 7), (torch, "backward", 5)) == "training.py:7 in train"
    assert frames((library, "_run_code", 1)) == f"{Path(library).name}:1 in _run_code"
    # What was made at run time, under names that say nothing.
    made = ("/tmp/torchinductor_u/ab/cabx4q7w.py", "/root/.triton/cache/x/kernel.py", "<eval_with_key>.17", "<string>")
    for file in made:
        assert frames(("/job/train.py", "main", 88), (file, "forward", 412)) == "train.py:88 in main"
    notebook = "<ipython-input-7-ab>"
    assert frames((notebook, "<module>", 3), (library, "wait", 9)) == f"{notebook}:3"
    assert frames() is None
    assert frames(("", "f", 3)) is None
    assert frames(("/job/\n.py", "f" * 300, 1)) == ("?.py:1 in " + "f" * 300)[: stuck_frames.MAX_TEXT]


def test_the_line_of_a_running_thread_is_the_same_one_and_keeps_no_frame() -> None:
    frame = sys._getframe()
    assert stuck_frames.own_line(frame) == stuck_frames._text(stuck_frames._lines(frame))
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: ended.wait())
    waiting.start()
    until(lambda: sys._current_frames()[waiting.ident or 0].f_code.co_name == "wait")
    found = sys._current_frames()[waiting.ident or 0]
    before = sys.getrefcount(found)
    assert stuck_frames.own_line(found).endswith(" in <lambda>")
    assert sys.getrefcount(found) == before
    ended.set()
    waiting.join()
    assert stuck_frames.own_line(None) == ""


def test_what_goes_wrong_costs_the_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loop(tmp_path, "stuck") as (frame, _):
        monkeypatch.setattr(sys, "_current_frames", lambda: 1 / 0)
        assert watched(frame, 60) is None


def test_a_thread_that_is_gone_stands_nowhere(tmp_path: Path) -> None:
    with loop(tmp_path, "stuck") as (frame, _):
        assert watched(frame, 60) is not None
        go_on = frame
    until(lambda: go_on(1) is None)
