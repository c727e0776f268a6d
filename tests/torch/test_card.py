"""Sections of `make card` that train: on the CPU where they can, and their judgement of what a GPU would answer."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from bench.card import compute, device, graphs, identity, jobs, nccl, ranks, trainers, waits
from bench.card.device import Sample
from bench.card.machine import COPY, DEVICE_COPY, HOLD, MATMUL, Gpu, Machine
from bench.card.plan import SECTIONS
from bench.card.report import FAIL, INFO, PASS, Line, Report, Unavailable, run
from bench.card.simulated import SimulatedMachine
from flopwatch.training.torch import peak
from flopwatch.training.torch import waits as hook_waits
from tests.support import ROOT
from tests.support.loops import seen_by

pytestmark = [pytest.mark.long, pytest.mark.torch]


def judged(compare: Callable[..., None], *arguments: Any) -> dict[str, str]:
    """Return the status of each line that a function adds to a report."""
    report = Report("x")
    compare(*arguments, report)
    return {line.name.removeprefix("x."): line.status for line in report.lines}


def lines(section: Callable[..., None], seconds: float = 0.0) -> list[Line]:
    report = Report("x")
    run(section, report, "cpu", seconds)
    return report.lines


@pytest.mark.parametrize(
    "section",
    [
        device.clock,
        device.overhead,
        waits.pool,
        waits.section,
        graphs.section,
        compute.peak,
        compute.memory,
        nccl.section,
    ],
)
def test_what_needs_cuda_is_info_without_it(section: Callable[..., None]) -> None:
    assert [(line.status, line.measured) for line in lines(section)] == [(INFO, "needs CUDA, and --device is cpu")]
    report = Report("x")
    run(section, report, "cuda", 0.0)
    assert [line.status for line in report.lines] == [INFO]
    assert "finds no CUDA device" in report.lines[0].measured


def test_every_section_that_trains_exists() -> None:
    from pkgutil import resolve_name

    assert all(callable(resolve_name(section.function)) for section in SECTIONS)


def marks(error: float = 0.0, gap: float = 0.0, drift: float = 0.0) -> list[Sample]:
    """Return marks each 10 ms. Every tenth was followed by a synchronization."""
    samples = []
    for index in range(200):
        seconds = index * 0.01
        at = 1000 + seconds * (1 + drift) + (gap if index % 2 else 0)
        synced = 1000 + seconds * (1 + drift) + 1e-5 + error if index % 10 == 0 else None
        samples.append(Sample(at, seconds * 1e3 - 0.005, seconds * 1e3 + 0.005, synced))
    return samples


def test_marks_without_errors_pass() -> None:
    assert judged(device.compare, marks()) == {
        "error_max": PASS,
        "not_later": PASS,
        "gap_error_p99": PASS,
        "gap_error_max": INFO,
        "drift": INFO,
    }


@pytest.mark.parametrize(
    ("samples", "fails"),
    [(marks(error=0.003), {"error_max"}), (marks(error=-0.001), {"not_later"}), (marks(gap=30e-6), {"gap_error_p99"})],
)
def test_marks_with_errors_fail(samples: list[Sample], fails: set[str]) -> None:
    assert {name for name, status in judged(device.compare, samples).items() if status == FAIL} == fails


def test_marks_without_a_time_fail() -> None:
    assert judged(device.marks_line, 9, 9, []) == {"marks": PASS}
    assert judged(device.marks_line, 8, 9, []) == judged(device.marks_line, 9, 9, ["mark: lost"]) == {"marks": FAIL}


def test_the_cost_of_a_call_is_info() -> None:
    report = Report("x")
    device.cost_line("query_cost", [device.took(lambda: time.sleep(0.001))] * 9, report)
    device.cost_line("none", [], report)
    assert [(line.name, line.status) for line in report.lines] == [("x.query_cost", INFO)]
    assert float(report.lines[0].measured.split()[1]) >= 1000  # microseconds


def test_few_marks_are_info() -> None:
    assert judged(device.compare, marks()[1:5]) == {"error": INFO}


def test_the_hooks_share_of_a_sharded_step_is_judged() -> None:
    assert judged(device.sharded_lines, [0.11], [0.1], 20.0)["sharded_share"] == PASS
    assert judged(device.sharded_lines, [0.13], [0.1], 20.0)["sharded_share"] == FAIL
    assert judged(device.sharded_lines, [0.09], [0.1], 1.0)["sharded_share"] == PASS


def test_missed_marks_and_steps_that_are_not_measured_fail() -> None:
    assert judged(waits.pool_lines, 42, 4, 0.0, 10.0) == {"missed_marks": PASS, "measured": PASS}
    assert judged(waits.pool_lines, 42, 4, 1.0, 8.0) == {"missed_marks": FAIL, "measured": FAIL}
    assert judged(waits.pool_lines, 3, 4, 0.0, 0.0) == {"missed_marks": PASS, "measured": INFO}


def test_a_long_slice_of_the_thread_that_pushes_fails() -> None:
    assert judged(waits.slice_line, [0.0019, 0.0001]) == {"longest_slice": PASS}
    assert judged(waits.slice_line, [0.0001, 0.0021]) == {"longest_slice": FAIL}
    assert judged(waits.slice_line, []) == {"longest_slice": INFO}


def compute_for(seconds: float) -> None:
    """Compute for so many CPU seconds."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_slices_are_the_computing_between_two_pauses_of_a_snapshot() -> None:
    slices: list[float] = []

    def poll() -> None:
        compute_for(0.02)
        time.sleep(0.1)
        compute_for(0.05)

    silent = jobs.silent()
    silent.recorder.poll(poll)
    with jobs.polled(silent, 0.01, slices) as taken:
        while not taken:
            time.sleep(0.01)  # pauses of another thread divide nothing
    silent.finish()
    assert len(slices) == 2 * len(taken)
    assert 0.02 <= slices[0] < 0.05 <= slices[1] < 0.1 <= taken[0]


def test_a_wait_that_differs_from_the_delay_fails() -> None:
    assert judged(waits.compare, "ddp", 0.104, 0.1) == {"ddp": PASS}
    assert judged(waits.compare, "ddp", 0.106, 0.1) == {"ddp": FAIL}
    assert judged(waits.compare, "ddp", None, 0.1) == {"ddp": FAIL}


@pytest.mark.parametrize(
    ("fast", "slow", "fails"),
    [
        (0.1, 0.001, set()),
        (0.05, 0.001, {"fast_waits"}),
        (0.1, 0.03, {"slow_waits"}),
        (0.001, 0.1, {"fast_waits", "slow_waits", "straggler"}),
        (None, 0.1, set()),
    ],
)
def test_ranks_are_judged_by_their_waits(fast: float | None, slow: float, fails: set[str]) -> None:
    assert {name for name, status in judged(ranks.compare, fast, slow).items() if status == FAIL} == fails


def test_the_rank_that_sleeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SECONDS", 250.0)  # a busy machine takes a minute to import torch
    found = {line.name: line for line in lines(ranks.section)}
    assert found["x.straggler"].status == PASS, found  # the lengths of the waits depend on the machine's load


def test_replays_with_another_loss_and_errors_of_the_hook_fail() -> None:
    assert judged(graphs.compare, "global", 1.5, 1.5, 0.0) == {"global": PASS, "global_errors": PASS}
    assert judged(graphs.compare, "global", 1.5, 1.6, 2.0) == {"global": FAIL, "global_errors": FAIL}


def test_a_capture_that_is_refused_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with TORCH_USE")

    monkeypatch.setattr(graphs, "require_cuda", lambda device: None)
    monkeypatch.setattr(graphs, "captured", lambda mode: refused() if mode == "global" else (1.5, 1.5, 0.0))
    for name in ("graphed", "compiled", "waits_end"):
        monkeypatch.setattr(graphs, name, refused)
    found = {line.name.removeprefix("x."): line for line in lines(graphs.section)}
    refusals = {"global", "make_graphed_callables", "reduce_overhead", "waits_end"}
    assert {name for name, line in found.items() if line.status == FAIL} == refusals
    assert {found[name].measured for name in refusals} == {
        "CUDA error: operation not permitted when stream is capturing"
    }
    assert found["relaxed"].status == found["thread_local"].status == PASS


def test_waits_that_end_without_their_reason_or_its_warning_fail() -> None:
    warning = "the wait for other ranks is not measured: the model was captured into a CUDA graph"
    assert judged(graphs.waits_line, 1.0, [warning, "other"]) == {"waits_end": PASS}
    assert judged(graphs.waits_line, 1.0, ["other"]) == judged(graphs.waits_line, 0.0, [warning]) == {"waits_end": FAIL}


def test_ddp_accepts_the_hook_that_delays_its_gradients() -> None:
    with jobs.two_ranks_in_name():
        model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook(None, waits._delayed_hook(jobs.Delays(0, HostEvent)))


def test_a_replicated_model_trains_without_peers() -> None:
    with jobs.two_ranks_in_name():
        model = graphs.replicated(jobs.device_of("cpu"))
        for _ in range(2):
            model(torch.randint(256, (4, 8))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


class Capture:
    """Replacement of a CUDA graph and of a stream on the CPU, in whose replays nothing runs."""

    capturing = False

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        Capture.capturing = True

    def __exit__(self, *_: object) -> None:
        Capture.capturing = False

    def replay(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


@pytest.mark.parametrize(("reason", "status"), [("cuda_graph", PASS), ("another", FAIL)])
def test_the_waits_of_a_captured_model_end_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, reason: str, status: str
) -> None:
    def watch_host(recorder: Any, model: torch.nn.Module) -> None:
        watched = hook_waits.Watch(recorder)
        model.register_forward_hook(lambda *_: watched.ends(watched.begins()))
        recorder.poll(watched.check)

    for name in ("CUDAGraph", "graph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Capture)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(hook_waits, "_captures", lambda: reason == "cuda_graph" and Capture.capturing)
    model = jobs.Model().to(jobs.device_of("cpu"))
    run = jobs.silent()
    run.recorder.sample(1)
    watch_host(run.recorder, model)
    with jobs.warnings_of("flopwatch") as logged:
        graphs.replays(model, torch.randint(256, (4, 8)), run, "global", graphs.DDP_WARM_UP)
        found = judged(graphs.waits_line, jobs.value(run, graphs.UNAVAILABLE, reason="cuda_graph"), logged)
    assert found == {"waits_end": status}
    run.finish()


def test_losses_of_compiled_models_are_those_of_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def compiled(model: torch.nn.Module, mode: str) -> torch.nn.Module:
        modes.append(mode)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    report = Report("x")
    identity.section("cpu", 0.0, report, 2, ("compile", "reduce_overhead"))
    assert [(line.name, line.status) for line in report.lines] == [("x.compile", PASS), ("x.reduce_overhead", PASS)]
    assert modes == ["default"] * 3 + ["reduce-overhead"] * 3


def test_losses_are_the_same_with_the_hook() -> None:
    report = Report("x")
    identity.section("cpu", 0.0, report, 3, ("eager", "checkpointing", "accumulation", "amp"))
    assert [(line.name, line.status) for line in report.lines] == [
        (f"x.{kind}", PASS) for kind in ("eager", "checkpointing", "accumulation", "amp")
    ]


def test_losses_that_differ_fail_unless_two_plain_trainings_do() -> None:
    assert judged(identity.compare, "eager", [1.0, 2.0], [1.0, 2.0], [1.0, 2.5]) == {"eager": FAIL}
    assert judged(identity.compare, "eager", [1.0, 2.0], [1.0, 2.1], [1.0, 2.5]) == {"eager": INFO}


def test_counted_flops_are_those_of_the_formula() -> None:
    found = {line.name: line.status for line in lines(compute.flops, 1.0)}
    assert found == {"x.counted": PASS, "x.hook": PASS, "x.torch": PASS, "x.rate": INFO, "x.mfu": PASS}


def test_another_mfu_than_by_hand_and_none_fail() -> None:
    assert judged(compute.mfu_line, 0.407, 0.4) == {"mfu": PASS}
    assert judged(compute.mfu_line, 0.409, 0.4) == judged(compute.mfu_line, None, 0.4) == {"mfu": FAIL}


def test_a_sweep_without_fast_accumulation_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fast: list[bool] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, use_fast_accum, **__: fast.append(use_fast_accum))
    multiply = peak._multiplication("fp8", (16, 16, 16), torch.device("cpu"))
    multiply()
    with compute.exact_accumulation():
        multiply()
    multiply()
    assert fast == [True, False, True]


def test_an_exact_accumulation_that_is_faster_than_the_fast_one_fails() -> None:
    assert judged(compute.accumulation_line, 1.4e15, 1.0e15) == {"fp8_exact": PASS}
    assert judged(compute.accumulation_line, 1.4e15, 1.5e15) == {"fp8_exact": FAIL}


def test_other_flops_and_other_peaks_fail() -> None:
    assert judged(compute.flops_lines, "hook", 1.02e12, 1e12) == {"hook": FAIL}
    assert judged(compute.peak_line, "bf16", 800e12, 989e12) == {"bf16": PASS}
    assert judged(compute.peak_line, "bf16", 500e12, 989e12) == {"bf16": FAIL}
    assert judged(compute.peak_line, "bf16", 1000e12, 989e12) == {"bf16": FAIL}
    assert judged(compute.peak_line, "bf16", 500e12, None) == {"bf16": INFO}


def test_a_loader_that_sleeps_is_data_stall() -> None:
    assert [line.status for line in lines(compute.stall, 4.0)] == [PASS]


def test_active_sms_agree_with_the_data_stall_of_a_loop(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path / "node")

    def train(sample: compute.Sample) -> compute.Stalled:
        for load in (1.0, 0.0, 1.0):  # before the first sample, the model is made
            if load == 0.0:
                sample()
            machine.node.load(0, load)
            machine.sleep(2.0)
        sample()
        machine.node.load(0, 0.0)
        machine.sleep(2.0)
        return 1.5, [0.5], 4.0

    active, stalled = compute.sm_active(machine, machine.gpus()[0], train)
    assert stalled == (1.5, [0.5], 4.0)
    assert judged(compute.activity_line, active, 0.5) == {"sm_active": PASS}
    assert judged(compute.activity_line, active, 0.3) == judged(compute.activity_line, active, 0.7)
    assert judged(compute.activity_line, active, 0.7) == {"sm_active": FAIL}
    assert judged(compute.activity_line, None, 0.5) == {"sm_active": INFO}


def test_another_data_stall_and_other_statistics_fail() -> None:
    assert judged(compute.stall_lines, 0.9, [0.2] * 6) == {"data_stall": FAIL}
    assert judged(compute.allocator_line, "ooms", 0.0, 1) == {"ooms": FAIL}
    assert judged(compute.allocator_line, "ooms", 1.0, 1) == {"ooms": PASS}


def test_trainers_count_the_tokens_of_padded_and_packed_samples(tmp_path: Path) -> None:
    found = seen_by(__file__, tmp_path)
    assert {name: line["status"] for name, line in found.items()} == dict.fromkeys(
        (f"trainers.{name}{kind}" for name in ("transformers", "lightning", "accelerate") for kind in ("", "_packed")),
        PASS,
    ), found


def test_packed_samples_have_no_padding_and_positions_of_their_own() -> None:
    batch = trainers.packed(trainers.samples()[:2])
    assert {name: list(rows.shape) for name, rows in batch.items()} == {name: [1, 14] for name in batch}
    assert batch["position_ids"].tolist() == [[*range(5), *range(9)]]
    assert batch["input_ids"][0, 5:].tolist() == trainers.samples()[1]["input_ids"][:9].tolist()


def test_other_tokens_fail() -> None:
    assert judged(trainers.compare, "lightning", trainers.TOKENS, trainers.STEPS, 0.0) == {"lightning": PASS}
    for tokens, steps, errors in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        counted = trainers.TOKENS + tokens, trainers.STEPS + steps, float(errors)
        assert judged(trainers.compare, "lightning", *counted) == {"lightning": FAIL}


GPU = Gpu(0, None, "GPU-0", "")


def test_work_in_a_process_is_counted() -> None:
    machine = Machine(pynvml, work_flags=("--cpu",))
    for kind in (COPY, DEVICE_COPY, HOLD, MATMUL):
        with machine.work(kind, GPU) as work:
            time.sleep(0.2)
        assert work.units > 0
        assert work.seconds > 0.1
        with pytest.raises(ProcessLookupError):
            os.kill(work.pid, 0)


def test_work_without_a_gpu_or_of_a_wrong_kind_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="finds no CUDA device"), Machine(pynvml).work(COPY, GPU):
        pass
    with pytest.raises(Unavailable, match="KeyError: 'x'"), Machine(pynvml, work_flags=("--cpu",)).work("x", GPU):
        pass


class HostEvent:
    """CUDA event that does nothing."""

    def record(self) -> None:
        pass

    def elapsed_time(self, other: HostEvent) -> float:
        return 5.0


def test_each_gather_of_fsdp2_is_delayed_once_and_afterwards_none() -> None:
    with jobs.two_ranks_in_name():
        model = jobs.sharded(3, 8, torch.device("cpu"))
        delays = jobs.Delays(0, HostEvent)
        before = {name: getattr(torch.distributed, name, None) for name in jobs.DELAYED}
        with delays.in_gathers():
            model(torch.randn(2, 8)).sum().backward()
        assert len(delays.events) == 6  # forward and backward
        assert delays.seconds() == pytest.approx(0.03)
        model(torch.randn(2, 8)).sum().backward()
        assert delays.events == []
        assert before == {name: getattr(torch.distributed, name, None) for name in jobs.DELAYED}


def test_a_polled_run_takes_snapshots_in_a_thread_that_ends() -> None:
    silent = jobs.silent()
    before = threading.active_count()
    with jobs.polled(silent, 0.01) as taken:
        while len(taken) < 3:
            silent.step(tokens=1)
            time.sleep(0.001)
    assert threading.active_count() == before
    assert min(taken) > 0
    silent.finish()


if __name__ == "__main__":
    import json

    report = Report("trainers")
    sys.path.insert(0, str(ROOT))
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints
        run(trainers.section, report, "cpu", 0.0)
    print(json.dumps({line.name: line.as_dict() for line in report.lines}))
