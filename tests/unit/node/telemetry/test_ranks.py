"""What a push becomes: samples for the scrape, a record for the ledger, or a refusal with its reason."""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.http.exposition import Exposition
from flopwatch.ledger.record import LedgerRecord
from flopwatch.ledger.store import Store
from flopwatch.node.collectors import StateFile
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import ledger_client as forwarding
from flopwatch.node.telemetry import otlp, process_exit
from flopwatch.node.telemetry.admission import MAX_NAMES, MAX_RANKS, MAX_RUNS, own_pid_namespace
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.evidence import EvidenceLog
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes, Remote
from flopwatch.node.telemetry.open_step import GpuActivity
from flopwatch.node.telemetry.otlp import JSON, MAX_BYTES, PROTOBUF, Push, Refused
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.ledger_server import eventually, ledger_server
from tests.support.machine import PATIENCE, reserved_port, until
from tests.support.otlp_by_hand import START, counter, gauge, histogram, process, request, training
from tests.support.training_host import outcomes


class Node:
    """An exporter's telemetry with clocks the test moves."""

    def __init__(self, gpus: dict[str, str] | None = None) -> None:
        self.registry = Registry()
        self.time = START + 100
        self.evidence_log = EvidenceLog(lambda: self.time, GpuActivity(lambda: self.time))
        self.telemetry = Telemetry(
            ExporterSettings(host="node-7", rank_timeout=300),
            self.registry,
            lambda: gpus,
            clock=lambda: self.time,
            now=lambda: self.time,
            evidence_log=self.evidence_log,
        )

    def push(self, *processes: ResourceMetrics) -> tuple[int, str]:
        return self.telemetry.receive(request(*processes))

    def samples(self) -> list[Sample]:
        return self.telemetry.ask(1).samples

    def steps(self) -> dict[str, float]:
        """Return the position of each rank that is served."""
        return {labels[1]: value for row, labels, value in self.samples() if row is m.TRAINING_POSITION_STEPS}

    def records(self) -> list[Record]:
        """Take and return the records that wait for the ledger."""
        due = self.telemetry.due()
        for key, (version, _) in due.items():
            self.telemetry.delivered(key, version)
        return [record for _, records in due.values() for record in records]

    def counted(self) -> dict[str, float]:
        return outcomes(self.registry)


def pushed(*metrics: Any, gpus: dict[str, str] | None = None, **reported: Any) -> Push:
    return otlp.push(process(*metrics, **reported), host="node-7", gpus=gpus, now=START + 100)


def test_every_kind_of_family_arrives_as_its_catalogue_row() -> None:
    push = pushed(
        counter("training_tokens_total", 8192.0),
        counter("training_activity_seconds_total", 12.5, activity="step"),
        gauge("training_position_steps", 40),
        gauge("training_rank_info", 1, host="container", uuid="GPU-a", local_rank="3", attempt="made up"),
        histogram("training_step_duration_seconds", [0.1, 1], [3, 2, 1], 4.5),
        rank=3,
    )
    assert push.samples == (
        (m.TRAINING_TOKENS_TOTAL, ("lm", "3"), 8192.0),
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, ("lm", "3", "step"), 12.5),
        (m.TRAINING_POSITION_STEPS, ("lm", "3"), 40.0),
        # The node's name and the attempt are not the container's to choose.
        (m.TRAINING_RANK_INFO, ("lm", "3", "node-7", "GPU-a", "3", "a1", "", "", "", "", ""), 1.0),
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", "0.1"), 3.0),
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", "1.0"), 5.0),
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", "+Inf"), 6.0),
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", "count"), 6.0),
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", "sum"), 4.5),
    )
    assert (push.refused, push.reason) == (0, "")


def test_a_histogram_is_exposed_as_prometheus_expects_it() -> None:
    push = pushed(histogram("training_step_duration_seconds", [0.1, 1], [3, 2, 1], 4.5))
    assert Exposition().render(push.samples).splitlines()[1:] == [
        "# TYPE training_step_duration_seconds histogram",
        'training_step_duration_seconds_bucket{run="lm",le="0.1"} 3.0',
        'training_step_duration_seconds_bucket{run="lm",le="1.0"} 5.0',
        'training_step_duration_seconds_bucket{run="lm",le="+Inf"} 6.0',
        'training_step_duration_seconds_count{run="lm"} 6.0',
        'training_step_duration_seconds_sum{run="lm"} 4.5',
    ]


GOOD = gauge("training_position_steps", 40)


def changed(metric: Any, **values: Any) -> Any:
    """Return a copy of a metric whose data have other fields."""
    copy = type(metric)()
    copy.CopyFrom(metric)
    for name, value in values.items():
        setattr(getattr(copy, copy.WhichOneof("data")), name, value)
    return copy


@pytest.mark.parametrize(
    "bad",
    [
        counter("training_made_up_total", 1),
        counter("gpu_energy_joules_total", 1, gpu="0", uuid="GPU-a"),
        gauge("run_state", 1, state="running"),
        gauge("training_tokens_total", 1),
        counter("training_position_steps", 1),
        changed(counter("training_tokens_total", 1), is_monotonic=False),
        changed(counter("training_tokens_total", 1), aggregation_temporality=1),
        counter("training_tokens_total", -1),
        counter("training_tokens_total", float("nan")),
        counter("training_tokens_total", float("inf")),
        gauge("training_committed_steps", float("nan")),
        gauge("training_world_size", float("inf")),
        gauge("training_rank_info", 2, uuid="GPU-a", local_rank="0"),
        counter("training_tokens_total", 1, unknown="label"),
        counter("training_tokens_total", 1, run="another"),
        counter("training_activity_seconds_total", 1),
        counter("training_activity_seconds_total", 1, activity="x" * 257),
        counter("training_activity_seconds_total", 1, activity="line\nend"),
        histogram("training_step_duration_seconds", [1, 0.1], [3, 2, 1], 4.5),
        histogram("training_step_duration_seconds", [-1, 1], [3, 2, 1], 4.5),
        histogram("training_step_duration_seconds", [0.1, 1], [3, 2], 4.5),
        histogram("training_step_duration_seconds", [0.1, float("nan")], [3, 2, 1], 4.5),
        histogram("training_step_duration_seconds", range(40), [1] * 41, 4.5),
    ],
)
def test_a_point_that_is_not_in_the_catalogue_is_refused_alone(bad: Any) -> None:
    node = Node()
    refused, reason = node.push(process(GOOD, bad))
    assert refused == 1
    assert repr(bad.name) in reason
    assert node.samples() == [(m.TRAINING_POSITION_STEPS, ("lm", "0"), 40.0)]
    assert node.counted() == {"partial": 1}


def test_a_loss_that_is_not_a_number_is_a_fact_worth_serving() -> None:
    [(_, _, value)] = pushed(gauge("training_loss", float("nan"))).samples
    assert value != value


def test_an_older_hook_may_lack_a_label_that_an_info_row_has_gained() -> None:
    assert pushed(gauge("training_rank_info", 1, uuid="GPU-a")).samples == (
        (m.TRAINING_RANK_INFO, ("lm", "0", "node-7", "GPU-a", "", "a1", "", "", "", "", ""), 1.0),
    )


@pytest.mark.parametrize(
    "reported",
    [
        {"schema": 2},
        {"schema": "1"},
        {"run": ""},
        {"run": "no spaces"},
        {"run": "x" * 129},
        {"run": '<b>"'},
        {"tenant": "a b"},
        {"attempt": ""},
        {"attempt": "a\nb"},
        {"attempt": "x" * 257},
        {"rank": -1},
        {"rank": "0"},
        {"rank": 1 << 24},
        {"start_unix": 0},
        {"start_unix": START + 100_000},
        {"start_unix": float("nan")},
        {"status": "fine"},
    ],
)
def test_a_process_without_an_identity_is_refused(reported: dict[str, Any]) -> None:
    node = Node()
    refused, reason = node.push(process(GOOD, GOOD, **reported))
    assert refused == 2
    assert reason
    assert node.samples() == []
    assert node.counted() == {"invalid": 1}


def test_a_rank_may_claim_only_a_gpu_of_this_node() -> None:
    def info(uuid: str) -> ResourceMetrics:
        return process(gauge("training_rank_info", 1, uuid=uuid, local_rank="0"))

    node = Node(gpus={"GPU-a": "GPU-a", "GPU-b": "GPU-b", "MIG-1": "GPU-a"})
    assert node.push(info("GPU-b")) == (0, "")
    assert node.samples()[0][1][:6] == ("lm", "0", "node-7", "GPU-b", "0", "a1")
    assert node.push(info("MIG-1")) == (0, "")
    assert node.samples()[0][1][:6] == ("lm", "0", "node-7", "GPU-a", "0", "a1"), "the GPU of the MIG slice"
    assert node.push(info("GPU-of-another-node")) == (0, "")
    assert node.samples()[0][1][:6] == ("lm", "0", "node-7", "", "0", "a1")
    assert node.counted() == {"accepted": 2, "foreign_gpu": 1}
    without_nvml = Node()
    without_nvml.push(info("GPU-of-another-node"))
    assert without_nvml.samples()[0][1][:6] == ("lm", "0", "node-7", "GPU-of-another-node", "0", "a1")


def test_the_newest_process_start_of_a_rank_wins() -> None:
    node = Node()
    node.push(training(10, 5, START + 6, attempt="a1", pid=100))
    assert node.push(training(4, 2, START + 60, attempt="a2", pid=200, start_unix=START + 50)) == (0, "")
    assert node.push(training(11, 6, START + 61, attempt="a1", pid=100)) == (5, "a newer process is rank 0 of run 'lm'")
    assert node.steps() == {"0": 4}
    assert node.counted() == {"accepted": 2, "stale_process": 1}


def test_a_second_run_of_one_process_is_not_an_older_process() -> None:
    """The start of a process is computed again from its age, so it differs by milliseconds."""
    node = Node()
    node.push(training(10, 5, START + 6, attempt="a1", pid=100, start_unix=START + 0.004, status="completed"))
    assert node.push(training(1, 1, START + 20, attempt="a2", pid=100, start_unix=START)) == (0, "")
    assert node.steps() == {"0": 1}


def test_a_rank_is_served_until_it_finishes() -> None:
    node = Node()
    node.push(training(10, 5, START + 6, rank=0), training(10, 5, START + 6, rank=1))
    node.push(training(11, 6, START + 7, rank=0, status="completed"))
    assert node.steps() == {"1": 10}


def test_a_rank_is_served_until_it_has_not_pushed_for_the_timeout() -> None:
    node = Node()
    node.push(training(10, 5, START + 6))
    node.time += 300
    node.telemetry.check()
    assert node.steps() == {"0": 10}
    node.time += 1
    node.telemetry.check()
    assert node.steps() == {}


def test_the_doctor_learns_how_many_ranks_keep_their_last_operations() -> None:
    node = Node()
    for rank, status in enumerate(("on", "on", "off", "a lie that takes room")):
        node.push(training(10, 5, START + 6, rank=rank, flight_recorder=status))
    assert node.telemetry.state()["flight_recorders"] == {"on": 2, "off": 1, "a lie th": 1}


def test_a_rank_is_served_until_its_process_is_gone_and_the_ledger_hears_of_it() -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    try:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        ticks = int(Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[19])
        node = Node()
        node.push(training(10, 5, START + 6, pid=trainer.pid, pid_start_ticks=ticks, pid_namespace=own_pid_namespace()))
        node.telemetry.check()
        assert node.steps() == {"0": 10}
        trainer.kill()
        # It stays a zombie, since no process has waited for it yet.
        until(lambda: not process_exit.process_alive(trainer.pid, ticks))
        node.telemetry.check()
        assert node.steps() == {}
        snapshot, gone = node.records()
        assert (snapshot["t"], snapshot["step"], "gone" in snapshot) == (START + 6, 10, False)
        assert (gone["t"], gone["step"], gone["gone"]) == (START + 100, 10, True)
        assert node.records() == []
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_stopped_process_is_reported_with_how_long_it_has_been_stopped() -> None:
    trainer = subprocess.Popen(["sleep", "600"])
    try:
        node = Node()
        identity = {"pid": trainer.pid, "pid_namespace": own_pid_namespace()}

        def blocked() -> dict[str, float]:
            node.telemetry.check()
            return {
                labels[2]: value
                for row, labels, value in node.samples()
                if row is m.HOST_PROCESS_BLOCKED_SECONDS and labels[:2] == ("lm", "0")
            }

        node.push(training(10, 5, START + 6, **identity))
        assert blocked() == {"stopped": 0, "uninterruptible": 0}
        trainer.send_signal(signal.SIGSTOP)
        until(lambda: process_exit.process_state(trainer.pid, 0) == "T")
        node.time += 5
        assert blocked() == {"stopped": 0, "uninterruptible": 0}  # since when is not known
        node.time += 40
        node.push(training(10, 5, START + 51, **identity))  # a push that was on its way
        assert blocked() == {"stopped": 40, "uninterruptible": 0}
        trainer.send_signal(signal.SIGCONT)
        until(lambda: process_exit.process_state(trainer.pid, 0) != "T")
        assert blocked() == {"stopped": 0, "uninterruptible": 0}
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_process_that_cannot_be_seen_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.push(training(10, 5, START + 6, pid=os.getpid(), pid_namespace=own_pid_namespace()))
    monkeypatch.setattr(process_exit, "process_state", lambda pid, ticks: "")  # /proc is mounted with hidepid
    node.telemetry.check()
    assert [row for row, _, _ in node.samples() if row is m.HOST_PROCESS_BLOCKED_SECONDS] == []
    assert node.steps() == {"0": 10}


def test_a_process_in_another_pid_namespace_is_not_judged() -> None:
    node = Node()
    node.push(training(10, 5, START + 6, pid=2**22 - 1, pid_namespace=own_pid_namespace() + 1))
    node.telemetry.check()
    assert node.steps() == {"0": 10}


def test_a_pid_that_was_given_to_another_process_is_not_the_process() -> None:
    assert process_exit.process_alive(os.getpid(), 0)
    assert not process_exit.process_alive(os.getpid(), 1)


def test_a_node_takes_64_ranks_and_16_runs() -> None:
    node = Node()
    ranks = [process(GOOD, rank=rank, run=f"run-{rank % MAX_RUNS}") for rank in range(MAX_RANKS)]
    assert node.push(*ranks) == (0, "")
    assert node.push(process(GOOD, rank=MAX_RANKS, run="run-0"))[0] == 1
    assert node.push(process(GOOD, run="run-new"))[0] == 1
    assert node.push(*ranks) == (0, "")
    node.push(process(GOOD, rank=0, run="run-0", status="completed"))
    assert node.push(process(GOOD, rank=MAX_RANKS, run="run-1")) == (0, "")
    assert node.counted()["limit"] == 2


def test_runs_that_end_at_once_do_not_get_round_the_limit() -> None:
    node = Node()
    for number in range(MAX_NAMES):
        assert node.push(process(GOOD, run=f"run-{number}", status="completed")) == (0, "")
    assert node.push(process(GOOD, run="one-too-many"))[0] == 1
    assert node.push(process(GOOD, run="run-5", attempt="a2", start_unix=START + 1)) == (0, "")
    node.time += 3601
    assert node.push(process(GOOD, run="one-too-many")) == (0, "")


def test_a_small_request_with_many_processes_is_refused_before_any_is_read() -> None:
    asked: list[None] = []

    def gpus() -> None:
        asked.append(None)

    telemetry = Telemetry(ExporterSettings(host="node-7"), Registry(), gpus)
    with pytest.raises(Refused, match="at most 64 processes"):
        telemetry.receive(request(*(ResourceMetrics() for _ in range(MAX_RANKS + 1))))
    assert asked == []
    telemetry.receive(request(*(process(GOOD, rank=rank) for rank in range(MAX_RANKS))))
    assert asked == [None]


def test_a_run_that_completed_is_complete_though_one_rank_left_without_a_word() -> None:
    node = Node()
    node.push(training(9, 5, START + 6, rank=0), training(9, 5, START + 6, rank=1))
    node.push(training(10, 6, START + 7, rank=0, status="completed"))
    node.time += 301
    node.telemetry.check()
    [record] = node.records()
    assert (record["status"], record["event"]) == ("completed", "finish")


def test_a_rank_of_another_tenants_run_of_the_same_name_is_refused_while_that_is_live() -> None:
    """The series carry run and rank only; two tenants would be one."""
    node = Node()
    node.push(process(GOOD, tenant="blue"))
    assert node.push(process(GOOD, tenant="red")) == (1, "rank 0 of run 'lm' is another tenant's on this node")
    node.push(process(GOOD, tenant="blue", status="stopped"))
    assert node.push(process(GOOD, tenant="red")) == (0, "")
    assert node.counted() == {"accepted": 3, "conflict": 1}


def test_the_ranks_of_an_attempt_are_one_record() -> None:
    node = Node()
    node.push(
        training(11, 6.5, START + 8, rank=5, start_unix=START + 0.5, open_step_seconds=0.1),
        training(10, 6, START + 7, rank=4, open_step_seconds=0.25, restored_step=3, submitted_unix=START - 60),
        process(gauge("training_committed_steps", 8), rank=6),
    )
    assert node.records() == [
        {
            "t": START + 7,
            "tenant": "",
            "run": "lm",
            "attempt": "a1",
            "source": "node-7",
            "event": "snapshot",
            "rank": 4,
            "gpus": 3,
            "started": START,
            "submitted": START - 60,
            "restored_step": 3,
            "step": 11,
            "committed_step": 8,
            "activity_seconds": {"startup": 1.0, "step": 6.0},
            "ranks": "4-6",
            "open_step_seconds": 0.25,
            "model_flops": 21e12,
            "peak_flops": 2e15,
        }
    ]


def counted(rank: int, *more: Any) -> ResourceMetrics:
    flops = [counter(f"training_{name}_flops_total", 1e15) for name in ("model", "capacity")]
    return process(counter("training_tokens_total", 500), *flops, *more, rank=rank)


def test_a_record_has_the_work_of_all_ranks() -> None:
    node = Node()
    page = gauge("training_run_info", 1, page="always")
    node.push(counted(0, histogram("training_step_duration_seconds", [1.0], [3, 1], 2.5), page), counted(1))
    [record] = node.records()
    flops = {"model_flops": 2e15, "step_capacity_flops": 2e15}
    assert record["work"] == {"tokens": 1000, "steps": 4, "step_seconds": 2.5, **flops}
    assert record["page"] is True


@pytest.mark.parametrize(
    "without", [process(rank=1), counted(1, gauge("training_mfu_unavailable", 1, reason="unknown_peak"))]
)
def test_a_record_has_no_flops_unless_every_rank_counts_them(without: ResourceMetrics) -> None:
    node = Node()
    node.push(counted(0), without)
    [record] = node.records()
    assert record["work"].keys() == {"tokens"}
    assert "page" not in record


def test_a_record_is_owed_only_after_a_push_and_until_it_is_delivered() -> None:
    node = Node()
    node.push(training(1, 1, START + 2))
    [(key, (version, _))] = node.telemetry.due().items()
    node.push(training(2, 2, START + 3))
    node.telemetry.delivered(key, version)
    assert [record["step"] for record in node.records()] == [2]
    assert node.records() == []


def test_an_attempt_has_a_status_when_every_rank_of_it_has_and_the_worst_counts() -> None:
    node = Node()
    node.push(training(9, 5, START + 6, rank=0), training(9, 5, START + 6, rank=1))
    node.push(training(10, 6, START + 7, rank=0, status="completed"))
    [record] = node.records()
    assert ("status" in record, record["event"], record["rank"]) == (False, "snapshot", 1)
    node.push(training(10, 6.5, START + 8, rank=1, status="failed"))
    [record] = node.records()
    assert (record["status"], record["event"], record["t"], record["step"]) == ("failed", "finish", START + 8, 10)
    assert node.telemetry.summary() == []


def test_a_restart_leaves_the_last_word_on_the_old_attempt_to_the_ledger() -> None:
    node = Node()
    node.push(training(10, 5, START + 6, attempt="a1"))
    node.push(training(8, 1, START + 20, attempt="a2", start_unix=START + 18))
    assert [(record["attempt"], record["step"]) for record in node.records()] == [("a1", 10), ("a2", 8)]
    assert node.telemetry.summary() == [("", "lm", 1)]


def test_a_stamp_from_the_future_is_now() -> None:
    node = Node()
    node.push(training(1, 1, START + 1e6))
    assert node.records()[0]["t"] == START + 100


@pytest.mark.parametrize("far", [1e30, 1e300])
def test_a_push_with_times_of_the_far_future_is_refused_or_goes_without_them(far: float) -> None:
    node = Node()
    node.push(training(1, 1, START + 6, start_unix=far))
    assert node.records() == []
    node.push(training(1, 1, START + 6, submitted_unix=far))
    assert [record.get("submitted") for record in node.records()] == [None]


# Steps that do not end.


def stepping(seconds: float, *, saving: float = 0.0, uuid: str = "GPU-a", **reported: Any) -> ResourceMetrics:
    """Return the push of a rank with 10 steps of a second, and so many seconds since then in a step or a checkpoint."""
    return process(
        counter("training_activity_seconds_total", 10.0 + seconds, activity="step"),
        counter("training_activity_seconds_total", saving, activity="checkpoint_save"),
        counter("training_steps_total", 10),
        gauge("training_rank_info", 1, uuid=uuid),
        gauge("training_collective_sequence_number", 7),
        **reported,
    )


def test_a_record_has_the_open_step_once_it_is_late_in_the_format_of_the_ledger() -> None:
    node = Node()
    node.push(stepping(0), stepping(0, rank=1), stepping(0, rank=2, run="other", uuid="GPU-a"))
    assert [record.get("open_step") for record in node.records()] == [None, None]
    for seconds in (5.0, 8.9, 9.0):
        node.time = START + 100 + seconds
        node.evidence_log.observe([(m.GPU_UTILIZATION_RATIO, ("0", uuid), 40.0) for uuid in ("GPU-a", "GPU-b")])
        node.push(stepping(seconds), stepping(seconds, rank=1, uuid="GPU-b"))
        [record] = node.records()
        assert ("open_step" in record) == (seconds >= 9)
    assert record["open_step"] == {
        "t": START + 109,
        "seconds": 9,
        "overdue_after": 15,
        "ranks": [
            [0, 7, [], [], None],  # its GPU is another run's too
            [1, 7, [], [], [0.4, None, None, None]],
        ],
    }
    parsed = LedgerRecord.parse(record)
    assert parsed.open_step is not None
    assert (parsed.ranks, [rank.gpu for rank in parsed.open_step.ranks]) == ("0,1", [None, (0.4, None, None, None)])


def test_the_open_step_of_a_rank_ends_with_its_process() -> None:
    node = Node()
    node.push(stepping(0, pid=1))
    node.time += 10
    node.push(stepping(10, pid=1))
    assert "open_step" in node.records()[0]
    node.push(stepping(0, pid=2, start_unix=START + 1))
    assert "open_step" not in node.records()[0]


def test_a_gpu_with_a_critical_xid_and_a_port_that_is_down_are_signs_of_a_late_step() -> None:
    node = Node()
    port = m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1")
    node.evidence_log.observe([(*port, 4), (m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", "79"), START + 99)])
    node.evidence_log.observe([(*port, 1)])
    node.push(stepping(0), stepping(0, rank=1, uuid="GPU-b"))
    node.time += 10
    node.push(stepping(10), stepping(10, rank=1, uuid="GPU-b"))
    assert [row[3] for row in node.records()[0]["open_step"]["ranks"]] == [["gpu", "link"], ["link"]]


def looked(node: Node, seconds: float) -> list[Record]:
    """Let time pass and look after the processes, and return the records that are due then."""
    node.time += seconds
    node.telemetry.check()
    return node.records()


def test_a_late_step_is_reported_every_5_s_although_no_rank_pushes() -> None:
    node = Node()
    node.push(stepping(0))
    looked(node, 0)
    due = [len(looked(node, 1)) for _ in range(12)]
    assert due == [0] * 8 + [1] + [0] * 3  # late after 9 s
    [record] = looked(node, 3)
    assert (record["open_step"]["seconds"], record["open_step"]["t"]) == (15, node.time)


def test_a_rank_that_falls_silent_in_a_checkpoint_is_reported_once() -> None:
    node = Node()
    node.push(stepping(0))
    node.time += 5
    node.push(stepping(0, saving=5))
    looked(node, 0)
    assert looked(node, 50) == []
    [record] = looked(node, 1)
    assert "open_step" not in record
    assert looked(node, 20) == []


def test_a_process_that_is_blocked_for_10_s_is_reported_although_no_rank_pushes() -> None:
    trainer = subprocess.Popen(["sleep", "600"])
    try:
        node = Node()
        node.push(stepping(0, pid=trainer.pid, pid_namespace=own_pid_namespace()))
        looked(node, 0)
        trainer.send_signal(signal.SIGSTOP)
        until(lambda: process_exit.process_state(trainer.pid, 0) == "T")
        looked(node, 6)  # from now on it is known to be blocked
        signs = [[row[3] for row in record["open_step"]["ranks"]] for n in range(11) for record in looked(node, 1)]
        assert signs == [[[]], [[]], [["blocked"]]]  # late after 9 s, 5 s later, and the sign
    finally:
        trainer.kill()
        trainer.communicate()


# The wire.


@pytest.mark.parametrize("media", [PROTOBUF, JSON])
def test_protobuf_and_json_give_the_same(media: str) -> None:
    sent = request(training(10, 5, START + 6), process(histogram("training_step_duration_seconds", [1], [2, 0], 1.5)))
    body = sent.SerializeToString() if media == PROTOBUF else MessageToJson(sent).encode()
    assert otlp.decode(body, media) == sent


def test_json_as_other_senders_write_it_is_understood() -> None:
    body = json.dumps(
        {
            "resourceMetrics": [
                {
                    "resource": {
                        "attributes": [
                            {"key": "flopwatch.schema", "value": {"intValue": "1"}},
                            {"key": "flopwatch.run", "value": {"stringValue": "lm"}},
                            {"key": "flopwatch.attempt", "value": {"stringValue": "a1"}},
                            {"key": "flopwatch.rank", "value": {"intValue": 0}},
                            {"key": "flopwatch.start_unix", "value": {"doubleValue": START}},
                        ]
                    },
                    "scopeMetrics": [
                        {
                            "scope": {"name": "x"},
                            "metrics": [
                                {
                                    "name": "training_tokens_total",
                                    "sum": {
                                        "aggregationTemporality": 2,
                                        "isMonotonic": True,
                                        "dataPoints": [
                                            {
                                                "asInt": "12",
                                                "timeUnixNano": "1700000010000000000",
                                                "exemplars": [
                                                    {
                                                        "asInt": "1",
                                                        "traceId": "5B8EFFF798038103D269B633813FC60C",
                                                        "spanId": "EEE19B7EC3C1B174",
                                                    }
                                                ],
                                            }
                                        ],
                                    },
                                }
                            ],
                        }
                    ],
                    "unknownField": 1,
                }
            ]
        }
    ).encode()
    [resource] = otlp.decode(body, JSON).resource_metrics
    push = otlp.push(resource, host="node-7", gpus=None, now=START + 100)
    assert (push.samples, push.at) == (((m.TRAINING_TOKENS_TOTAL, ("lm", "0"), 12.0),), START + 10)


@pytest.mark.parametrize(
    ("body", "media"),
    [
        (b"\x0a\xff\xff", PROTOBUF),
        (b"{}", PROTOBUF),
        (b"", JSON),
        (b"not json", JSON),
        (b'{"resourceMetrics": 1}', JSON),
        (b"\xff\xfe", JSON),
        (b"[" * 100_000, JSON),
        (b'{"a":' * 50_000, JSON),
        (b"null", JSON),
        (b'{"resourceMetrics": [{"schemaUrl": "\\ud800"}]}', JSON),
    ],
)
def test_a_body_that_is_no_request_is_malformed(body: bytes, media: str) -> None:
    with pytest.raises(Refused) as refused:
        otlp.decode(body, media)
    assert refused.value.outcome == "malformed"


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(body: bytes) -> None:
    for media in (PROTOBUF, JSON):
        try:
            sent = otlp.decode(body, media)
        except Refused:
            continue
        Node().telemetry.receive(sent)


def test_a_gzip_body_inflates_to_a_mebibyte_and_no_further() -> None:
    assert otlp.inflate(gzip.compress(bytes(MAX_BYTES))) == bytes(MAX_BYTES)
    for body, outcome in (
        (gzip.compress(bytes(MAX_BYTES + 1)), "too_large"),
        (gzip.compress(bytes(20 * MAX_BYTES)), "too_large"),
        (gzip.compress(b"x")[:-1], "malformed"),
        (gzip.compress(b"x") + b"y", "malformed"),
        (b"plain", "malformed"),
        (b"", "malformed"),
    ):
        with pytest.raises(Refused) as refused:
            otlp.inflate(body)
        assert refused.value.outcome == outcome


# The way to the ledger.


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an exporter that stops wait for the ledger's answer, however long a slow machine takes to give it."""
    monkeypatch.setattr(forwarding, "STOP_TIMEOUT", PATIENCE)


def sent(registry: Registry) -> dict[str, float]:
    return {
        labels[0]: value for row, labels, value in registry.samples() if row is m.FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL
    }


def run_states(source: Embedded) -> list[str]:
    """Return the states of runs that the ledger serves."""
    return [labels[-1] for row, labels, value in source.ask(1).samples if row is m.RUN_STATE and value == 1]


def test_an_embedded_ledger_on_a_full_disk_fails_no_push_and_is_offered_the_record_again(tmp_path: Path) -> None:
    node = Node()
    store = Store(tmp_path / "ledger.sqlite")
    embedded = Embedded(store, Outcomes(node.registry))
    forward = Forward(node.telemetry, embedded, tick=0.01)
    [[pages]] = store._db.execute("PRAGMA page_count")
    store._db.execute(f"PRAGMA max_page_count={pages}")
    forward.start()
    try:
        for rank in range(20):
            assert node.push(training(1, 1, START + 2, run=f"run-{rank % 16}", attempt="a" * 250)) == (0, "")
        assert eventually(lambda: sent(node.registry)["failed"] >= 3)
        store._db.execute("PRAGMA max_page_count=1000000")
        assert eventually(lambda: len(run_states(embedded)) == 16)
    finally:
        forward.stop()
        store.close()


def test_the_last_push_before_a_stop_still_reaches_the_ledger(tmp_path: Path) -> None:
    node = Node()
    embedded = Embedded(Store(tmp_path / "ledger.sqlite"), Outcomes(node.registry))
    forward = Forward(node.telemetry, embedded, tick=60)
    forward.start()
    node.push(training(1, 1, START + 2, status="completed"))
    forward.stop()
    assert run_states(embedded) == ["completed"]
    embedded.close()


def deliver(node: Node, remote: Remote) -> None:
    for key, (version, records) in node.telemetry.due().items():
        assert remote.take(key, records)
        node.telemetry.delivered(key, version)


def test_a_ledger_at_a_url_gets_one_request_per_run_with_the_newest_records_and_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    node = Node()
    with ledger_server() as (url, received):
        remote = Remote(
            url, tmp_path / "token", tmp_path / "spool", Outcomes(node.registry), interval=5, clock=lambda: node.time
        )
        for step in (1, 2, 3):
            node.push(training(step, step, START + step))
            deliver(node, remote)
        node.push(training(1, 1, START + 9, attempt="a2", start_unix=START + 8))
        deliver(node, remote)
        node.time += 5
        remote.flush()
        remote.flush()
    [(authorization, records)] = received
    assert authorization == "Bearer s3cret"
    assert [(record["attempt"], record["step"]) for record in records] == [("a1", 3), ("a2", 1)]
    assert not any((tmp_path / "spool").glob("*"))


@pytest.mark.usefixtures("patient")
def test_while_the_ledger_is_away_only_the_newest_record_of_an_attempt_is_kept_across_restarts(tmp_path: Path) -> None:
    node = Node()
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        remote = Remote(url, None, tmp_path, Outcomes(node.registry), interval=0.001, clock=lambda: node.time)
        for step in (1, 2, 3):
            node.push(training(step, step, START + step))
            deliver(node, remote)
            node.time += 1000
            remote.flush()
        assert sent(node.registry) == {"sent": 0, "failed": 3, "refused": 0}
        [file] = tmp_path.glob("*.json")
        assert [record["step"] for record in json.loads(file.read_text())] == [3]

        (tmp_path / "torn.json").write_text('[{"run"')
        with ledger_server(port=port) as (_, received):
            restarted = Remote(url, None, tmp_path, Outcomes(Registry()))
            restarted.flush(last=True)
    assert [record["step"] for _, records in received for record in records] == [3]
    assert [path.name for path in tmp_path.glob("*.json")] == ["torn.json"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("answer", "outcome", "kept"), [(200, "sent", 0), (400, "refused", 0), (401, "failed", 1), (503, "failed", 1)]
)
def test_only_a_record_that_the_ledger_calls_wrong_is_given_up(
    answer: int, outcome: str, kept: int, tmp_path: Path
) -> None:
    node = Node()
    with ledger_server(answer) as (url, _):
        remote = Remote(url, None, tmp_path, Outcomes(node.registry))
        node.push(training(1, 1, START + 2))
        deliver(node, remote)
        remote.flush(last=True)
    assert sent(node.registry)[outcome] == 1
    assert len(list(tmp_path.glob("*.json"))) == kept


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "page",
    [b"<html>log in to the network</html>", b"", b"{}", b"[]", b'{"accepted": "all"}', b"[" * 100_000],
    ids=["captive portal", "empty", "object", "list", "text", "nested"],
)
def test_records_are_kept_if_another_server_answers_200(
    page: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    with ledger_server(page=page) as (url, _):
        remote = Remote(url, None, tmp_path, Outcomes(node.registry))
        node.push(training(1, 1, START + 2))
        deliver(node, remote)
        remote.flush(last=True)
    assert sent(node.registry) == {"sent": 0, "failed": 1, "refused": 0}
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert "no ledger answers so, check --ledger" in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_delivery_that_is_too_large_is_made_in_halves_and_costs_no_record_that_fits(tmp_path: Path) -> None:
    node = Node()
    with ledger_server(most=2) as (url, received):
        remote = Remote(url, None, tmp_path, Outcomes(node.registry))
        for attempt in "abcde":
            node.push(training(1, 1, START + 2, attempt=attempt, pid=ord(attempt), rank=ord(attempt)))
        deliver(node, remote)
        remote.flush(last=True)
    taken = [[record["attempt"] for record in records] for _, records in received if len(records) <= 2]
    assert taken == [["a", "b"], ["c"], ["d", "e"]]
    assert sent(node.registry) == {"sent": 5, "failed": 0, "refused": 0}


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_behind_in_the_spool(tmp_path: Path) -> None:
    node = Node()
    remote = Remote("http://127.0.0.1:1", None, tmp_path, Outcomes(node.registry))
    node.push(training(1, 1, START + 2, status="completed"))
    with full_disk():
        deliver(node, remote)
    assert list(tmp_path.iterdir()) == []
    remote.flush(last=True)  # which fails, and keeps it
    [kept] = tmp_path.iterdir()
    assert json.loads(kept.read_text())[0]["status"] == "completed"


def test_a_full_disk_leaves_the_last_whole_state_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    assert file.save({"count": 1})
    with full_disk():
        assert not file.save({"count": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.load() == {"count": 1}
    assert file.save({"count": 2})
    assert file.load() == {"count": 2}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"a":' * 100_000, b""])
def test_a_damaged_state_file_is_set_aside_with_a_log_line(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "evidence.json").write_bytes(content)
    file = StateFile(tmp_path / "evidence.json")
    assert file.load() == {}
    assert (tmp_path / "evidence.json.damaged").read_bytes() == content
    assert "evidence.json is damaged" in caplog.text
    assert file.save({"count": 1})
    assert file.load() == {"count": 1}


def test_an_attempt_that_no_record_can_be_made_of_hides_no_other() -> None:
    node = Node()
    node.push(training(10, 5, START + 6, run="good"))
    broken = Push("", "bad", "a1", 0, START, START + 5, samples=((m.TRAINING_POSITION_STEPS, ("bad", "0"), math.inf),))
    node.telemetry._take(broken, START, 0.0)
    assert [record["run"] for record in node.records()] == ["good"]
    node.push(training(11, 6, START + 7, run="good"))
    assert [record["step"] for record in node.records()] == [11]
