"""The training hook: what a loop reports is what the exporter receives, to the digit, and nothing comes back."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch import catalogue as m
from flopwatch.catalogue import BY_NAME
from flopwatch.flops import Transformer
from flopwatch.node.telemetry.process_exit import BLOCKED
from flopwatch.node.telemetry.ranks import FOR_THE_LEDGER
from flopwatch.training import Run
from flopwatch.training.process import stuck_frames
from flopwatch.training.process.launcher import Process
from flopwatch.training.push import pusher
from flopwatch.training.push.otlp import Wire
from flopwatch.training.push.snapshot import SLICE
from flopwatch.training.recorder import Snapshot
from flopwatch.training.timeline import ACTIVITIES, DECLARED
from flopwatch.training.totals import DURATION_BOUNDS
from tests.support import TESTS
from tests.support.hook import _PID, Clock, seconds, silent, value
from tests.support.hook_server import HookServer, Push
from tests.support.machine import PATIENCE, reserved_port, shortest, until

CAPTURE = TESTS / "captures" / "otlp" / "hook_0.2.0.bin"


def reasons(run: Run) -> list[str]:
    return [labels["reason"] for labels, _ in run.snapshot().points[BY_NAME["training_mfu_unavailable"]]]


# What is pushed.


def train(run: Run, clock: Clock) -> None:
    """Two steps of 4 s after 1 s of waiting each, an evaluation of 8 s, roll-outs of 7 s and a checkpoint of 2 s."""
    clock.passes(10)
    with run.activity("checkpoint_restore"):
        clock.passes(5)
    run.restored(step=100, tokens=6400)

    def loader() -> Iterator[int]:
        for batch in range(2):
            clock.passes(1)
            yield batch

    for batch in run.batches(loader()):
        clock.passes(3)
        with run.collective_wait():
            clock.passes(1)
        run.step(tokens=64, loss=2.5)
        if batch == 0:
            with run.activity("evaluation"):
                clock.passes(8)
    with run.activity("generation"):
        clock.passes(7)
    with run.activity("checkpoint_save"):
        clock.passes(2)
    run.checkpoint_committed(102)


EXPECTED_SAMPLES = {
    "training_steps_total": 2.0,
    "training_tokens_total": 128.0,
    "training_model_flops_total": 1280.0,
    "training_capacity_flops_total": 900.0,  # 100 FLOP/s x (8 s step + 1 s data stall)
    "training_peak_flops_per_second": 100.0,
    "training_position_steps": 102.0,
    "training_position_tokens": 6528.0,
    "training_committed_steps": 102.0,
    "training_loss": 2.5,
    "training_world_size": 1.0,
    "training_collective_wait_seconds_total": 0.0,  # the first step has no mean yet, the second held an evaluation
    "training_measured_step_seconds_total": 0.0,
    "training_measured_steps_total": 0.0,
    "training_measured_tokens_total": 0.0,
    "training_computing_square_seconds_total": 0.0,
    "training_sampled_every_steps": 1.0,
    "training_nonfinite_total{value=loss}": 0.0,
    "training_loss_spikes_total": 0.0,
    "training_step_percentile_seconds{percentile=50}": 4.0,
    "training_step_percentile_seconds{percentile=90}": 5.0,
    "training_step_percentile_seconds{percentile=99}": 5.0,
    "training_hook_errors_total": 0.0,
    "training_activity_seconds_total{activity=startup}": 41.0,  # 30 before Run(), 10, and the first batch
    "training_activity_seconds_total{activity=step}": 8.0,
    "training_activity_seconds_total{activity=compile}": 0.0,
    "training_activity_seconds_total{activity=data_stall}": 1.0,
    "training_activity_seconds_total{activity=checkpoint_save}": 2.0,
    "training_activity_seconds_total{activity=checkpoint_restore}": 5.0,
    "training_activity_seconds_total{activity=evaluation}": 8.0,
    "training_activity_seconds_total{activity=generation}": 7.0,
    "training_activity_seconds_total{activity=other}": 0.0,
    "training_rank_info{host=node-7,uuid=GPU-1,local_rank=0,attempt=first,dp=,tp=,pp=,cp=,ep=}": 1.0,
    "training_run_info{tenant=research,attempt=first,convention=causal,dtype=fp8,flops_source=declared,"
    "peak_source=override: measured,step_source=manual,framework=,owner=pretraining,team=llm,page=always,"
    "external_id=}": 1.0,
}


def trained(url: str, **arguments: Any) -> Run:
    """Return a run that trained as `train` does and has not finished."""
    clock = Clock()
    run = Run(
        "llama",
        tenant="research",
        attempt="first",
        flops_per_token=10,
        dtype="fp8",
        peak_flops=100,
        peak_source="measured",
        gpu_uuid="GPU-1",
        owner="pretraining",
        team="llm",
        page="always",
        submitted_at=1.5e9,
        endpoint=url,
        environ={"FLOPWATCH_HOST": "node-7"},
        clock=clock,
        process=Process(pid=_PID, start_ticks=4711, age=30.0, pid_namespace=4026531836),
        **arguments,
    )
    train(run, clock)
    return run


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param((threading.Thread, "start"), id="no thread can start"),
        pytest.param((Run, "snapshot"), id="an exporter that was never there, nor anything to push"),
    ],
)
def test_finish_waits_for_no_push_that_is_impossible_or_has_no_receiver(
    broken: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError

    def takes() -> float:
        with monkeypatch.context() as patched:
            patched.setattr(*broken, fail)
            run = Run("llama", environ={}, endpoint="http://127.0.0.1:9", push_interval=0.01)
            time.sleep(0.1)
        began = time.monotonic()
        run.finish()
        return time.monotonic() - began

    assert shortest(takes, 0.5 * pusher.LAST_PUSH) < 0.5 * pusher.LAST_PUSH


def test_the_last_push_reports_exactly_what_the_loop_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with HookServer() as server:
        before = time.time()
        trained(server.url).finish()
        push = server.last_word()
        after = time.time()
    assert push.path == "/v1/metrics"
    assert push.headers["Content-Type"] == "application/x-protobuf"
    assert "Content-Encoding" not in push.headers
    # After 30 s before Run(), 10 s, a restore of 5 s, two batches of 1 s and two steps of 4 s with 8 s between them.
    start = push.resource["flopwatch.start_unix"]
    assert push.samples.pop("training_last_step_timestamp_seconds") == pytest.approx(start + 63, abs=1e-3)
    assert push.samples == EXPECTED_SAMPLES
    # Bounds 0.025 ... 2.5, 5, 10: the steps took 4 s (the first batch's wait is startup) and 5 s.
    assert push.histograms == {"training_step_duration_seconds": ([0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0], 9.0)}
    start_unix = push.resource.pop("flopwatch.start_unix")
    assert before - 30 <= start_unix <= after - 30
    assert push.resource == {
        "flopwatch.schema": 1,
        "flopwatch.run": "llama",
        "flopwatch.tenant": "research",
        "flopwatch.attempt": "first",
        "flopwatch.rank": 0,
        "flopwatch.host": "node-7",
        "flopwatch.pid": _PID,
        "flopwatch.pid_namespace": 4026531836,
        "flopwatch.pid_start_ticks": 4711,
        "flopwatch.submitted_unix": 1.5e9,
        "flopwatch.restored_step": 100,
        "flopwatch.open_step_seconds": 0.0,
        "flopwatch.gpu_uuid": "GPU-1",
        "flopwatch.status": "completed",
    }


def test_every_point_counts_from_the_process_start_and_carries_the_catalogues_labels() -> None:
    before = time.time()
    with HookServer() as server:
        trained(server.url).finish()
        push = server.last_word()
    after = time.time()
    (scope,) = push.request.resource_metrics[0].scope_metrics
    kinds = {"counter": "sum", "gauge": "gauge", "info": "gauge", "histogram": "histogram"}
    for metric in scope.metrics:
        row = BY_NAME[metric.name]
        assert metric.WhichOneof("data") == kinds[row.type]
        for point in getattr(metric, kinds[row.type]).data_points:
            assert point.start_time_unix_nano == int(push.resource["flopwatch.start_unix"] * 1e9)
            assert before <= point.time_unix_nano / 1e9 <= after
            assert tuple(a.key for a in point.attributes) == row.labels
        if row.type in ("counter", "histogram"):
            assert getattr(metric, kinds[row.type]).aggregation_temporality == 2  # cumulative
        if row.type == "counter":
            assert metric.sum.is_monotonic


def test_facts_of_the_whole_run_come_from_rank_0_only() -> None:
    with HookServer() as server:
        trained(server.url, rank=3, world_size=4, local_rank=3, replica_ranks=1).finish()
        push = server.last_word()
    shared = ("training_run_info", "training_world_size", "training_step_")
    assert not [name for name in (*push.samples, *push.histograms) if name.startswith(shared)]
    assert push.resource["flopwatch.rank"] == 3
    assert "training_rank_info{host=node-7,uuid=GPU-1,local_rank=3,attempt=first,dp=,tp=,pp=,cp=,ep=}" in push.samples


def test_a_rank_has_at_most_40_series_and_a_run_30() -> None:
    """A rank that measures everything there is, on a GPU, and has all reasons to complain."""
    clock = Clock()
    run = silent(clock, flops_per_token=10, hardware_flops_per_token=12, peak_flops=100, parallel={"dp": (0, 1)})
    run.recorder.measures_wait()
    with run.background_save():
        pass
    for row in (
        m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER,
        m.TRAINING_GROUP_SEQUENCE_NUMBER,
        m.TRAINING_RECOMPILATIONS_TOTAL,
        m.TRAINING_ALLOCATOR_RETRIES_TOTAL,
        m.TRAINING_OUT_OF_MEMORY_TOTAL,
        m.TRAINING_ALLOCATOR_UNUSED_BYTES,
        m.TRAINING_DISCARDED_BACKWARD_TOTAL,
    ):
        run.recorder.set(row, 1.0)
    for _ in range(3):
        for phase in m.PHASES:
            run.recorder.phase(phase, clock.now, clock.now + 1)
        clock.passes(5)
        for group in (("tp", "0,1"), ("ep", "0-3"), ("pp", "0,8"), ("dp", "0-6:2")):
            run.recorder.waited(clock.now, clock.now, group)
        run.step(tokens=8, samples=1, loss=2.5, grad_norm=1.0)
        run.checkpoint_committed(1)
    for _ in range(2):
        clock.passes(stuck_frames.AFTER + stuck_frames.MIN_COVERED)
        snapshot = run.snapshot()
    series = [(row, labels) for row, points in snapshot.points.items() for labels, _ in points]
    reported = {row for row, _ in series}
    every = {row for row in m.all_metrics() if row.domain == "training"}
    # A rank that measures everything has none of these.
    without = {m.TRAINING_MFU_UNAVAILABLE, m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE, m.TRAINING_MISSED_MARKS_TOTAL}
    assert every - reported == {m.TRAINING_STEP_DURATION_SECONDS, *without}
    served = [row for row, _ in series if "rank" in row.labels and row.name not in FOR_THE_LEDGER]
    assert len(served) + 1 + len(BLOCKED) <= 40
    assert len([row for row, _ in series if "rank" not in row.labels]) + len(DURATION_BOUNDS) + 3 <= 30


def test_pushes_go_on_every_interval_and_report_no_end() -> None:
    with HookServer() as server:
        run = Run("llama", endpoint=server.url, push_interval=0.1, environ={})
        push = server.wait_for(lambda _: len(server.pushes) >= 3)
        run.finish("preempted")
        assert "flopwatch.status" not in push.resource
        assert "training_position_steps" not in push.samples  # before the first step the position is unknown
        assert server.last_word().resource["flopwatch.status"] == "preempted"
        pushes = len(server.pushes)
        time.sleep(0.3)
        assert len(server.pushes) == pushes


def test_a_token_file_becomes_a_bearer_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with HookServer() as server:
        Run("llama", endpoint=server.url, environ={"FLOPWATCH_TOKEN_FILE": str(tmp_path / "token")}).finish()
        assert server.last_word().headers["Authorization"] == "Bearer s3cret"


def test_the_last_word_reaches_an_exporter_that_restarts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pusher.LAST_PUSH >= 1  # it is away for half a second, or a stall of this machine longer
    monkeypatch.setattr(pusher, "LAST_PUSH", PATIENCE)
    with reserved_port() as port:
        with HookServer(port) as first:
            run = Run("llama", endpoint=first.url, environ={}, push_interval=0.1)
            first.wait_for(lambda push: True)
        ended = threading.Thread(target=run.finish)
        ended.start()
        time.sleep(0.5)
        with HookServer(port) as second:
            assert second.wait_for(lambda push: True).resource["flopwatch.status"] == "completed"
            ended.join()


def pause(monkeypatch: pytest.MonkeyPatch, host: str, now: float, interval: float = 5.0) -> float:
    """Return the seconds until a rank of a host pushes again after a push at `now` on the wall clock."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        wire = Wire("http://127.0.0.1:9", 0.0, None)
        return pusher.Pusher(wire, interval, lambda: Snapshot({}, {}, None), print, print, host)._pause()


def test_the_ranks_of_a_host_push_at_the_same_moments_and_other_hosts_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = [1e9 + rank * 0.7 for rank in range(8)]
    moments = {host: {round((at + pause(monkeypatch, host, at)) % 5, 3) for at in starts} for host in ("a", "b", "c")}
    assert [len(found) for found in moments.values()] == [1, 1, 1]
    assert len(set.union(*moments.values())) == 3
    first = 1e9 + pause(monkeypatch, "a", 1e9)
    for late in (-0.003, 0.0, 0.02, 2.0):  # the wall clock is adjusted meanwhile, or a push takes long
        assert late + pause(monkeypatch, "a", first + late) == pytest.approx(5.0, abs=1e-5)


def test_a_step_of_the_wall_clock_neither_stalls_the_pushes_nor_speeds_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (0.0, -1e9, 1e9 - 3600, 1e9 + 3600.123, 2.0**60, *(1e9 + part / 7 for part in range(70))):
        for interval in (0.1, 5.0, 3600.0):
            assert 0.099 < pause(monkeypatch, "a", now, interval) / interval < 1.101
    assert pause(monkeypatch, "a", 1e9, math.inf) == threading.TIMEOUT_MAX


def test_a_rank_waits_until_the_moment_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = list[float]()

    def pause(of: pusher.Pusher) -> float:
        phases.append(of._phase)
        return 0.05

    monkeypatch.setattr(pusher.Pusher, "_pause", pause)
    with HookServer() as server:
        run = Run("lm", endpoint=server.url, push_interval=3600, environ={"FLOPWATCH_HOST": "n1"})
        until(lambda: len(server.pushes) >= 3)
        run.finish()
    assert {*phases} == {zlib.crc32(b"n1") / 2**32}


def test_settings_come_from_the_environment_where_arguments_are_silent() -> None:
    with HookServer() as server:
        Run(
            environ={
                "FLOPWATCH_RUN": "mixtral",
                "FLOPWATCH_TENANT": "t1",
                "FLOPWATCH_GPU_UUID": "GPU-9",
                "FLOPWATCH_ENDPOINT": server.url,
                "FLOPWATCH_PUSH_INTERVAL": "60",
                "FLOPWATCH_SUBMITTED_AT": "1.5e9",
                "FLOPWATCH_OWNER": "pretraining",
                "FLOPWATCH_TEAM": "moe",
                "FLOPWATCH_PAGE": "always",
                "FLOPWATCH_HOST": "n1",
            }
        ).finish()
        last = server.last_word()
        resource, samples = last.resource, last.samples
    assert (resource["flopwatch.run"], resource["flopwatch.tenant"], resource["flopwatch.host"]) == (
        "mixtral",
        "t1",
        "n1",
    )
    assert resource["flopwatch.gpu_uuid"] == "GPU-9"
    assert resource["flopwatch.submitted_unix"] == 1.5e9
    (info,) = [name for name in samples if name.startswith("training_run_info")]
    assert info.endswith("owner=pretraining,team=moe,page=always,external_id=}")


# Where the time goes.


def test_without_batches_all_until_the_first_step_returns_is_startup() -> None:
    clock = Clock()
    run = silent(clock)
    clock.passes(6)
    run.step()
    assert seconds(run) == {"startup": 36.0}
    clock.passes(4)
    assert seconds(run) == {"startup": 36.0, "step": 4.0}
    assert run.snapshot().resource["flopwatch.open_step_seconds"] == 4.0
    run.step()
    assert run.snapshot().resource["flopwatch.open_step_seconds"] == 0.0
    assert run.snapshot().step_durations is not None
    assert sum(run.snapshot().step_durations[1]) == 1  # type: ignore[index]  # the first has no duration


def test_the_innermost_activity_counts() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    clock.passes(1)
    with run.activity("evaluation"):
        clock.passes(2)
        with run.activity("compile"):
            clock.passes(4)
        clock.passes(8)
    clock.passes(16)
    assert seconds(run) == {"startup": 30.0, "step": 17.0, "evaluation": 10.0, "compile": 4.0}


def test_an_evaluations_own_loop_over_batches_is_evaluation() -> None:
    clock = Clock()
    run = silent(clock)

    def loader() -> Iterator[None]:
        for _ in range(2):
            clock.passes(1)
            yield

    for _ in run.batches(loader()):
        with run.activity("evaluation"):
            for _ in run.batches(loader()):
                clock.passes(2)
        clock.passes(8)
        run.step()
    assert seconds(run) == {"startup": 31.0, "data_stall": 1.0, "evaluation": 12.0, "step": 16.0}


def test_between_two_loops_over_batches_is_other() -> None:
    clock = Clock()
    run = silent(clock)
    loader = run.batches([0, 1])
    assert len(loader) == 2
    for _ in range(2):
        for _ in loader:
            clock.passes(1)
            run.step()
        clock.passes(5)
    for _ in loader:
        break
    clock.passes(2)
    assert seconds(run) == {"startup": 30.0, "step": 4.0, "other": 12.0}


def test_an_activity_on_another_thread_is_not_the_loops_time() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()

    def save() -> None:
        with run.activity("checkpoint_save"):
            clock.passes(3)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert seconds(run) == {"startup": 30.0, "step": 3.0}
    assert value(run.snapshot(), "training_hook_errors_total") == 2  # its begin and its end


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ("step", "enter", "leave", "leave_any", "restored", "wait", "batch", "break", "committed", "odd")
        ),
        st.sampled_from(DECLARED),
        st.floats(0, 1e5),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_activities_sum_to_the_process_age_and_never_fall_whatever_is_called(
    calls: list[tuple[str, Any, float]],
) -> None:
    clock = Clock()
    run = silent(clock)
    entered: list[Any] = []
    loops: list[Iterator[int]] = []
    before = dict.fromkeys(ACTIVITIES, 0.0)
    for call, name, passes in calls:
        clock.passes(passes)
        if call == "step":
            run.step(tokens=passes, loss=float("nan"))
        elif call == "enter":
            entered.append(run.activity(name))
            entered[-1].__enter__()
        elif call == "leave" and entered:
            entered.pop().__exit__(None, None, None)
        elif call == "leave_any" and entered:
            entered[len(entered) // 2].__exit__(None, None, None)  # in a wrong order, and possibly twice
        elif call == "restored":
            run.restored(int(passes))
        elif call == "wait":
            with run.collective_wait():
                clock.passes(passes)
        elif call == "batch":
            loops.append(iter(run.batches(range(2))))
            next(loops[-1])
        elif call == "break" and loops:
            next(loops.pop(), None)
        elif call == "committed":
            run.checkpoint_committed(int(passes))
        elif call == "odd":
            run.activity(passes).__exit__()  # type: ignore[arg-type, call-arg]
        now = {
            labels["activity"]: value
            for labels, value in run.snapshot().points[BY_NAME["training_activity_seconds_total"]]
        }
        assert set(now) == set(ACTIVITIES)
        assert all(now[activity] >= before[activity] for activity in ACTIVITIES)
        assert sum(now.values()) == pytest.approx(30.0 + clock.now - 1000.0, abs=1e-6)
        before = now


def test_a_snapshot_from_another_thread_is_of_one_instant() -> None:
    run = Run("llama", environ={"FLOPWATCH_DISABLE": "1"}, flops_per_token=10.0, peak_flops=1.0)
    stop = threading.Event()
    settled = start = run.recorder.start

    def loop() -> None:
        nonlocal settled
        while not stop.is_set():
            for _ in run.batches((0, 1, 2)):
                run.step(tokens=7)
                settled = time.monotonic()  # what is not recorded yet is later
                with run.activity("evaluation"):
                    time.sleep(1e-5)  # what is recorded faster than it can be added up would be reported late

    thread = threading.Thread(target=loop)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the threads interrupt each other anywhere
    thread.start()
    try:
        for _ in range(300):
            asked = settled
            snapshot = run.snapshot()
            steps = value(snapshot, "training_steps_total")
            assert steps is not None
            assert value(snapshot, "training_tokens_total") == 7 * steps
            assert value(snapshot, "training_model_flops_total") == 70 * steps
            assert snapshot.step_durations is not None
            assert sum(snapshot.step_durations[1]) == steps
            age = sum(s for _, s in snapshot.points[BY_NAME["training_activity_seconds_total"]])
            assert asked - start - 1e-6 <= age <= time.monotonic() - start + 1e-6
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert value(run.snapshot(), "training_hook_errors_total") == 0


# Tokens, FLOPs, MFU.

TINY = Transformer(layers=1, width=4, heads=2, vocabulary=8, mlp_width=8)


@pytest.mark.parametrize(
    ("arguments", "step", "expected"),
    [
        # world 8 in replicas of 2 ranks
        ({"flops_per_token": 10, "replica_ranks": 2}, {"tokens": 64}, (32.0, 320.0, 64.0)),
        ({"flops_per_token": 10, "replica_ranks": 2}, {"global_tokens": 256}, (32.0, 320.0, 64.0)),
        ({"flops_per_token": 10, "replica_ranks": 2}, {"tokens": 64, "flops": 1000}, (32.0, 500.0, 64.0)),
        ({"replica_ranks": 2}, {"flops": 1000}, (None, 500.0, None)),
        # a replica of unknown size still has its share of the global batch
        ({"flops_per_token": 10}, {"global_tokens": 256}, (32.0, 320.0, None)),
        ({"flops_per_token": 10}, {"tokens": 64}, (None, None, None)),
        # one sequence of 8 or two of 4: the same tokens, fewer scores
        (
            {"flops_per_token": TINY, "replica_ranks": 2},
            {"tokens": 8, "sum_len_squared": 64},
            (4.0, TINY.flops_per_sequence(8) / 2, 8.0),
        ),
        (
            {"flops_per_token": TINY, "replica_ranks": 2},
            {"tokens": 8, "sum_len_squared": 32},
            (4.0, TINY.flops_per_sequence(4), 8.0),
        ),
    ],
)
def test_a_rank_counts_its_share_of_the_replicas_tokens_and_flops(
    arguments: dict[str, Any], step: dict[str, Any], expected: tuple[float | None, ...]
) -> None:
    run = silent(rank=1, world_size=8, **arguments)
    for _ in run.batches([0]):
        run.step(**step)
    snapshot = run.snapshot()
    assert (
        value(snapshot, "training_tokens_total"),
        value(snapshot, "training_model_flops_total"),
        value(snapshot, "training_position_tokens"),
    ) == expected


def test_a_step_whose_time_was_startup_adds_no_flops_because_it_adds_no_capacity() -> None:
    clock = Clock()
    run = silent(clock, flops_per_token=10, peak_flops=100.0)
    for _ in range(3):
        clock.passes(4)
        run.step(tokens=20)
    snapshot = run.snapshot()
    assert value(snapshot, "training_tokens_total") == 60
    assert value(snapshot, "training_model_flops_total") == 2 * 20 * 10
    assert value(snapshot, "training_capacity_flops_total") == 2 * 4 * 100


@pytest.mark.parametrize(
    ("arguments", "step", "expected"),
    [
        ({"flops_per_token": 10, "peak_flops": 1e12}, {"tokens": 1}, []),
        ({"flops_per_token": 10}, {"tokens": 1}, ["unknown_peak"]),
        ({"peak_flops": 1e12}, {"tokens": 1}, ["no_flops_per_token"]),
        ({"flops_per_token": 10, "peak_flops": 1e12}, {}, ["no_tokens"]),
        ({"flops_per_token": 10, "peak_flops": 1e12, "world_size": 8}, {"tokens": 1}, ["unknown_replica"]),
        ({"flops_per_token": TINY, "peak_flops": 1e12}, {"tokens": 1}, ["no_sum_len_squared"]),
        ({"flops_per_token": -1, "peak_flops": float("nan")}, {"tokens": 1}, ["unknown_peak", "no_flops_per_token"]),
    ],
)
def test_where_there_is_no_mfu_a_series_gives_the_reason(
    arguments: dict[str, Any], step: dict[str, Any], expected: list[str]
) -> None:
    run = silent(**arguments)
    assert reasons(run) == []
    run.step(**step)
    assert reasons(run) == expected
    snapshot = run.snapshot()
    assert (value(snapshot, "training_capacity_flops_total") is None) == ("unknown_peak" in expected)
    assert (value(snapshot, "training_model_flops_total") is None) == (expected not in ([], ["unknown_peak"]))


def test_an_mfu_beyond_any_card_is_no_mfu_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    run = silent(clock, flops_per_token=10, peak_flops=100, dtype="bf16")

    def steps(count: int, tokens: int) -> list[str]:
        for _ in range(count):
            clock.now += 4
            run.step(tokens=tokens)
        return reasons(run)

    assert steps(40, 38) == []  # 95 %
    assert steps(19, 80) == []  # too few steps to tell
    assert steps(1, 80) == ["implausible"]
    assert value(run.snapshot(), "training_capacity_flops_total") is None
    assert "no MFU: 200 % is more than any GPU reaches. Check dtype (bf16)" in caplog.text
    assert steps(40, 1) == ["implausible"]


def test_a_step_longer_than_the_check_of_the_mfu_is_not_counted_twice() -> None:
    clock = Clock()
    run = silent(clock, flops_per_token=10, peak_flops=100)
    for _ in range(50):
        for _ in range(10):
            clock.now += 10
            assert reasons(run) == []
        run.step(tokens=800)  # 80 %
    assert reasons(run) == []


def test_positions_go_on_from_what_was_restored_and_counters_do_not() -> None:
    run = silent()
    assert value(run.snapshot(), "training_position_steps") is None
    run.restored(step=40)
    run.step(tokens=8)
    snapshot = run.snapshot()
    assert value(snapshot, "training_position_steps") == 41
    assert value(snapshot, "training_position_tokens") is None  # the number of tokens of 40 steps was not given
    assert value(snapshot, "training_steps_total") == 1
    assert value(snapshot, "training_tokens_total") == 8
    run.restored(step=10, tokens=80)  # a rollback
    run.step(tokens=8)
    snapshot = run.snapshot()
    assert value(snapshot, "training_position_steps") == 11
    assert value(snapshot, "training_position_tokens") == 88
    assert value(snapshot, "training_steps_total") == 2
    assert snapshot.resource["flopwatch.restored_step"] == 10


# Which steps the wait counts in.


def steps_with_waits(run: Run, clock: Clock, steps: Sequence[tuple[float, float | None, str | None]]) -> None:
    for duration, wait, activity in steps:
        if activity is not None:
            with run.activity(activity):
                clock.passes(100)
        if wait is not None:
            with run.collective_wait():
                clock.passes(wait)
        clock.passes(duration - (wait or 0.0))
        run.step()


@pytest.mark.parametrize(
    ("steps", "wait", "measured_seconds", "measured_steps"),
    [
        ([(1.0, 0.25, None)] * 3, 0.5, 2.0, 2),  # the first of the three has no mean to be compared with
        ([(1.0, 0.25, None), (1.0, None, None), (1.0, 0.0, None)], 0.0, 1.0, 1),  # measured 0 is not unmeasured
        ([(1.0, 0.25, None), (1.0, 0.25, "checkpoint_save"), (1.0, 0.25, None)], 0.25, 1.0, 1),
        ([(1.0, 0.25, None), (1.0, 0.25, "evaluation"), (1.0, 0.25, "compile")], 0.0, 0.0, 0),
        ([(1.0, 0.25, None), (1.0, 0.25, "data_stall")], 0.0, 0.0, 0),  # 101 s: an outlier
        ([(1.0, 0.25, None), (12.0, 11.25, None), (1.0, 0.25, None)], 0.25, 1.0, 1),  # while another rank saved
    ],
)
def test_a_wait_counts_only_in_an_ordinary_step(
    steps: list[tuple[float, float | None, str | None]], wait: float, measured_seconds: float, measured_steps: int
) -> None:
    clock = Clock()
    run = silent(clock)
    run.step()  # startup
    steps_with_waits(run, clock, steps)
    snapshot = run.snapshot()
    assert value(snapshot, "training_collective_wait_seconds_total") == wait
    assert value(snapshot, "training_measured_step_seconds_total") == measured_seconds
    assert value(snapshot, "training_measured_steps_total") == measured_steps


def test_the_squares_of_measured_steps_leave_out_their_waits() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()  # startup
    steps_with_waits(run, clock, [(1.0, 0.25, None), (1.5, 0.5, None), (2.0, None, None), (1.0, 0.25, None)])
    assert value(run.snapshot(), "training_computing_square_seconds_total") == 1.0**2 + 0.75**2


def test_steps_that_become_longer_for_good_are_measured_again() -> None:
    clock = Clock()
    run = silent(clock)
    run.step()
    steps_with_waits(run, clock, [(1.0, 0.25, None)] * 10 + [(3.0, 0.25, None)] * 20)
    assert value(run.snapshot(), "training_measured_steps_total") == 9 + 16


def test_without_a_measurement_there_is_no_wait_series() -> None:
    run = silent()
    run.step()
    assert value(run.snapshot(), "training_collective_wait_seconds_total") is None


# Nothing comes back into the loop.


def test_wrong_calls_are_counted_and_never_raise() -> None:
    wrong: Any = silent(flops_per_token=10)
    calls: tuple[Callable[[], None], ...] = (
        lambda: wrong.step(tokns=3),
        lambda: wrong.step(tokens="64"),
        lambda: wrong.step(tokens=-1),
        lambda: wrong.step(tokens=float("nan")),
        lambda: wrong.step(tokens=object()),
        lambda: wrong.step(loss=[]),
        lambda: wrong.step(tokens=1, sum_len_squared=1),
        lambda: wrong.restored(),
        lambda: wrong.restored(-3),
        lambda: wrong.checkpoint_committed(None),
        lambda: wrong.finish("done"),
    )
    for call in calls:
        call()
    for context in (wrong.activity(), wrong.activity("nap"), wrong.activity("compile", 2), wrong.collective_wait(1)):
        with context:
            pass
    snapshot = wrong.snapshot()
    assert value(snapshot, "training_hook_errors_total") == 15
    assert value(snapshot, "training_steps_total") == 7


@pytest.mark.parametrize(
    ("arguments", "label", "expected"),
    [
        ({"convention": "casual", "flops_per_token": 10}, "convention", "unknown"),
        ({"convention": "casual", "flops_per_token": TINY}, "convention", "unknown"),
        ({"page": "Always"}, "page", ""),
        ({"peak_source": "a datasheet"}, "peak_source", ""),
    ],
)
def test_an_argument_that_means_nothing_is_complained_of_and_claims_nothing(
    arguments: dict[str, Any], label: str, expected: str
) -> None:
    run = silent(**arguments)
    run.step(tokens=1)
    ((labels, _),) = run.snapshot().points[BY_NAME["training_run_info"]]
    assert labels[label] == expected
    assert value(run.snapshot(), "training_hook_errors_total") == 1
    assert ("no_flops_per_token" in reasons(run)) == (arguments.get("flops_per_token") != 10)


def test_replicas_that_do_not_divide_the_ranks_are_no_replicas() -> None:
    run = silent(world_size=8, replica_ranks=3, flops_per_token=10, peak_flops=1e12)
    run.step(tokens=1)
    assert reasons(run) == ["unknown_replica"]
    assert value(run.snapshot(), "training_hook_errors_total") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"nme": "llama"},
        {"rank": "first"},
        {"endpoint": "ftp://127.0.0.1:1"},
        {"endpoint": 7},
        {"push_interval": "soon"},
        {"process": "me"},
        {"environ": None},
        {"clock": None},
    ],
)
def test_a_run_that_cannot_be_made_leaves_the_loop_alone(arguments: dict[str, Any]) -> None:
    run: Any = Run(**{"environ": {}, "endpoint": "http://127.0.0.1:1", **arguments})
    seen = []
    for batch in run.batches([1, 2]):
        with run.activity("evaluation"), run.collective_wait():
            seen.append(batch)
        run.step(tokens=1)
    run.restored(step=1)
    run.checkpoint_committed(1)
    run.finish()
    assert seen == [1, 2]
    assert run.recorder.errors >= 1


def test_the_loops_own_errors_pass_through() -> None:
    clock = Clock()
    run = silent(clock)

    def loader() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(run.batches(loader()))
    with pytest.raises(TypeError):
        list(run.batches(7))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        len(run.batches(loader()))
    with pytest.raises(ZeroDivisionError), run.activity("evaluation"), run.collective_wait():
        raise ZeroDivisionError
    clock.passes(5)
    assert seconds(run) == {"startup": 30.0, "other": 5.0}
    assert value(run.snapshot(), "training_hook_errors_total") == 0


def test_a_push_adds_up_many_events_in_slices_of_two_milliseconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    run = silent()
    at_pause: list[tuple[int, float]] = []  # steps added up, and the thread's seconds
    sleep, own = time.sleep, threading.get_ident()

    def pause(seconds: float) -> None:
        if threading.get_ident() != own:  # a thread of another test
            sleep(seconds)
            return
        at_pause.append((run.recorder.totals.steps, time.thread_time()))
        assert run.recorder.lock.acquire(blocking=False)  # finish() may take its snapshot in a pause
        run.recorder.lock.release()

    for _ in range(10_000):
        run.step(tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", pause)
        assert value(run.snapshot(), "training_steps_total") == 10_000
    slices = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(at_pause)]
    assert len(slices) == 10_000 // SLICE - 1
    assert {steps for steps, _ in slices} == {SLICE}
    assert min(seconds for _, seconds in slices) < 0.002  # a stall of the machine makes some longer
    for _ in range(10_000):
        run.step(tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", pause)
        assert value(run.snapshot(last=True), "training_steps_total") == 20_000
    assert len(at_pause) == len(slices) + 1  # the last push does not wait


def test_an_exporter_that_is_late_dies_and_comes_back_gets_everything() -> None:
    with reserved_port() as port:
        run = Run("llama", endpoint=f"http://127.0.0.1:{port}", push_interval=0.1, environ={})
        run.step(tokens=1)
        time.sleep(0.25)
        with HookServer(port) as server:
            server.wait_for(lambda push: push.samples["training_steps_total"] == 1)
        run.step(tokens=1)
        time.sleep(0.25)
        with HookServer(port, status=503) as server:
            server.wait_for(lambda push: push.samples["training_steps_total"] == 2)
        run.step(tokens=1)
        with HookServer(port) as server:
            server.wait_for(lambda push: push.samples["training_steps_total"] == 3)
            run.finish()
            last = server.last_word().samples
        assert last["training_tokens_total"] == 3
        assert last["training_hook_errors_total"] == 0  # an absent exporter is no error


def test_no_counter_falls_if_the_run_finishes_while_a_push_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    with HookServer() as server:
        run = Run("llama", endpoint=server.url, push_interval=0.1, environ={})
        server.wait_for(lambda push: push.resource["flopwatch.run"] == "llama")
        take, preparing = run._snapshots.take, threading.Event()
        pushing = run._pusher
        assert pushing is not None

        def overtaken(*, last: bool = False) -> Any:
            if not last:
                preparing.set()
                until(lambda: pushing._stopping)
                time.sleep(0.1)
            return take(last=last)

        monkeypatch.setattr(run._snapshots, "take", overtaken)
        assert preparing.wait(PATIENCE)
        run.finish()
        server.last_word()
        name = "training_activity_seconds_total"
        totals = [sum(n for sample, n in push.samples.items() if sample.startswith(name)) for push in server.pushes]
    assert len(totals) >= 2
    assert totals == sorted(totals)


def test_a_newer_run_in_the_same_process_takes_over() -> None:
    with HookServer() as server:
        older = Run("llama", endpoint=server.url, push_interval=0.1, environ={})
        server.wait_for(lambda push: push.resource["flopwatch.run"] == "llama")
        newer = Run("mixtral", endpoint=server.url, push_interval=0.1, environ={})
        server.wait_for(lambda push: push.resource["flopwatch.run"] == "mixtral")
        assert older._pusher is not None
        older._pusher._thread.join(PATIENCE)  # it may be amid a push
        assert not older._pusher._thread.is_alive()
        older_pushes = sum(push.resource["flopwatch.run"] == "llama" for push in server.pushes)
        time.sleep(0.3)
        older.finish()
        newer.finish()
        server.last_word()
        assert sum(push.resource["flopwatch.run"] == "llama" for push in server.pushes) == older_pushes
        assert [push.resource["flopwatch.run"] for push in server.pushes if "flopwatch.status" in push.resource] == [
            "mixtral"
        ]


# The exporter of this release and of the next one must understand what a release sends.


def test_the_recorded_push_of_this_release_matches_its_description() -> None:
    push = Push("/v1/metrics", {}, CAPTURE.read_bytes())
    assert json.loads(CAPTURE.with_suffix(".json").read_text()) == described(push)


def described(push: Push) -> dict[str, Any]:
    return {
        "resource": push.resource,
        "samples": push.samples,
        "histograms": {
            name: {"bucket_counts": counts, "sum": total} for name, (counts, total) in push.histograms.items()
        },
    }


def record() -> None:
    """Write the capture again, with `python -m tests.unit.training.test_hook`."""
    with HookServer() as server:
        trained(server.url).finish()
    CAPTURE.parent.mkdir(parents=True, exist_ok=True)
    CAPTURE.write_bytes(server.pushes[-1].body)
    CAPTURE.with_suffix(".json").write_text(json.dumps(described(server.pushes[-1]), indent=2) + "\n")


if __name__ == "__main__":
    record()
