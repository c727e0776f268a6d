"""Stacks that the hook sends by itself: bounded, the main thread first, the innermost frames kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from flopwatch.catalogue.stacks import MAX_STACKS, SEND_STACKS
from flopwatch.training import Run
from flopwatch.training.process import flight_recorder, stacks
from flopwatch.training.process.stuck_frames import AFTER, AFTER_STEPS
from tests.support import ROOT
from tests.support.hook import Clock, silent
from tests.support.hook_server import HookServer
from tests.support.machine import until


def deep(depth: int) -> str:
    return stacks.text() if depth == 0 else deep(depth - 1)


def test_the_main_thread_is_first_with_its_innermost_frame_last() -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, name="loader")
    other.start()
    try:
        text = deep(2)
    finally:
        ended.set()
        other.join()
    threads = [part.partition(" (")[0] for part in text.split("thread ")[1:]]
    assert threads[0] == "MainThread"
    assert "loader" in threads
    frames = text.split("\n\n")[0].splitlines()
    assert [frame.rpartition(" ")[2] for frame in frames[-5:]] == ["deep", "deep", "deep", "text", "_stacks"]


def test_a_deep_stack_loses_its_outer_frames() -> None:
    text = deep(800)
    assert MAX_STACKS - 200 < len(text) <= MAX_STACKS
    first, cut, *frames = text.splitlines()
    assert first.startswith("thread MainThread (")
    assert cut == "  ..."
    assert len(frames) > 40
    assert all(
        frame.startswith('  File "') and frame.endswith(("in deep", "in text", "in _stacks")) for frame in frames
    )
    assert frames[-1].endswith("in _stacks")


def test_text_is_printable() -> None:
    frame: dict[str, object] = {"text": stacks.text}
    exec(compile("found = text()", "\x1b[31m\udcff\n.py", "exec"), frame)
    assert 'File "?[31m??.py"' in str(frame["found"]).replace("\n", "?")
    assert "\x1b" not in str(frame["found"])


JOB = """
import sys, threading, time
from flopwatch.training.process import stacks
def load():
    time.sleep(0.03)
def step():
    time.sleep(0.01)
found = []
def sample(thread):
    found.append(stacks.samples(thread, 0.1, lambda: False))
def train(thread):
    sampler = threading.Thread(target=sample, args=(thread,))
    sampler.start()
    while sampler.is_alive():
        load()
        step()
if sys.argv[1:] == ["main"]:
    train(None)
else:
    loop = threading.Thread(target=lambda: train(threading.get_ident()))
    loop.start()
    loop.join()
print(stacks.text("below", found[0]))
"""


@pytest.mark.parametrize("thread", ["main", "training"])
def test_a_running_thread_is_shown_by_its_share_of_samples(tmp_path: Path, thread: str) -> None:
    (tmp_path / "train.py").write_text(JOB)
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}
    done = subprocess.run([sys.executable, tmp_path / "train.py", thread], env=environ, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    title = re.fullmatch(rf"{thread} thread in (\d+) samples", lines[0])
    assert title, done.stderr
    assert lines[-1] == "below"
    assert 20 <= int(title[1]) <= stacks.SAMPLES  # a busy machine takes fewer until the deadline
    shares = {line: int(share.rstrip("%")) for share, line in (line.split(maxsplit=1) for line in lines[1:3])}
    assert shares.keys() == {"train.py:5 in load", "train.py:7 in step"}
    assert 60 <= shares["train.py:5 in load"] <= 90
    assert "\n\nthread MainThread (" in done.stdout


def test_samples_end_once_the_run_ends() -> None:
    polls = iter([False, False, True])
    assert stacks.samples(None, 4.0, lambda: next(polls)).startswith("main thread in 2 samples\n")


@pytest.mark.parametrize(("mean", "seconds"), [(0.1, stacks.MIN_SECONDS), (3.0, 6.0), (30.0, stacks.MAX_SECONDS)])
def test_samples_cover_two_steps(mean: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    stacks.samples(None, mean, lambda: False)
    assert now == pytest.approx(seconds, rel=0.02)


def test_samples_have_few_lines_and_leave_room_for_a_deep_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(range(100))
    monkeypatch.setattr(stacks, "own_line", lambda _: f"train.py:{next(lines)}" + "x" * 100)
    monkeypatch.setattr(stacks, "MIN_SECONDS", 0.1)
    above = stacks.samples(None, 0.0, lambda: False)
    assert len(above.splitlines()) <= 1 + stacks.LINES

    def deeper(depth: int) -> str:
        return stacks.text("operations", above) if depth == 0 else deeper(depth - 1)

    text = deeper(800)
    assert MAX_STACKS - 300 < len(text) <= MAX_STACKS
    assert text.startswith(above + "\n\nthread MainThread (")
    assert text.endswith("\n\noperations")


@pytest.mark.parametrize("mean", [1.0, 10.0])
def test_the_loops_thread_is_sampled_unless_a_step_is_overdue(mean: float) -> None:
    clock = Clock()
    run = silent(clock)

    def train() -> None:
        for _ in range(9):
            clock.passes(mean)
            run.step(tokens=1)

    assert run.snapshot().running is None
    loop = threading.Thread(target=train)
    loop.start()
    loop.join()
    assert run.snapshot().running == (loop.ident, mean)
    longest = max(AFTER, AFTER_STEPS * mean)
    clock.passes(longest)
    assert run.snapshot().running == (loop.ident, mean)
    clock.passes(1)
    assert run.snapshot().running is None


@contextmanager
def asked(
    samples: Callable[..., str], monkeypatch: pytest.MonkeyPatch, *, still: bool
) -> Iterator[tuple[Run, HookServer]]:
    """Run a hook that has made a step, whose receiver always requests stacks."""
    asks = ExportMetricsServiceResponse()
    asks.partial_success.error_message = SEND_STACKS
    monkeypatch.setattr(stacks, "samples", samples)
    monkeypatch.setattr(flight_recorder, "text", lambda: "operations")
    now = time.monotonic()
    with HookServer(answer=asks.SerializeToString()) as server:
        run = Run("llama", endpoint=server.url, push_interval=0.1, environ={}, clock=lambda: now)
        run.step(tokens=1)
        now += 2 * AFTER if still else AFTER / 2
        yield run, server


@pytest.mark.parametrize("still", [True, False])
def test_a_rank_that_stands_still_sends_operations_and_any_other_samples(
    still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[int | None] = []

    def samples(thread: int | None, step_seconds: float, stopped: Callable[[], bool]) -> str:
        sampled.append(thread)
        return "training thread in 1 samples"

    with asked(samples, monkeypatch, still=still) as (run, server):
        first = len(server.pushes) + 2  # the step is in the pushes after it
        until(lambda: sum("flopwatch.stacks" in push.resource for push in server.pushes[first:]) > 1)
        run.finish()
    texts = [text for push in server.pushes[first:] if (text := push.resource.get("flopwatch.stacks"))]
    assert {text.startswith("training thread in 1") for text in texts} == {not still}
    assert {text.endswith("operations") for text in texts} == {still}
    assert still or threading.get_ident() in sampled


def test_the_last_push_arrives_although_the_run_ends_while_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = threading.Event()

    def samples(thread: int | None, step_seconds: float, stopped: Callable[[], bool]) -> str:
        sampling.set()
        until(stopped)
        return ""

    with asked(samples, monkeypatch, still=False) as (run, server):
        assert sampling.wait(10)
        run.step(tokens=1)
        run.finish()
    assert server.pushes[-1].samples["training_steps_total"] == 2
    assert server.pushes[-1].resource["flopwatch.status"] == "completed"
