"""Telemetry and ledger of one host with a clock that the test moves, and real processes as ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch import catalogue as m
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.run import RunLedger
from flopwatch.node.collectors.cgroup import stat
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.admission import AttemptKey, own_pid_namespace
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.otlp_by_hand import START, counter, gauge, process, request


def outcomes(registry: Registry) -> dict[str, float]:
    """Return the number of pushes that telemetry received, by outcome."""
    samples = registry.samples()
    return {labels[0]: value for row, labels, value in samples if row.name == "flopwatch_otlp_pushes_total" and value}


class Host:
    """Telemetry of one host, whose records reach a ledger when the test lets a second pass."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.time = START + 100  # monotonic
        self.step = 0.0  # of the wall clock
        self.ledger = Ledger()
        self.last: dict[AttemptKey, Record] = {}
        self.telemetry = Telemetry(
            ExporterSettings(host="node-7", rank_timeout=300),
            self.registry,
            clock=lambda: self.time,
            now=lambda: self.time + self.step,
        )

    def push(self, *processes: ResourceMetrics) -> tuple[int, str]:
        return self.telemetry.receive(request(*processes))

    def passes(self, seconds: float = 1.0) -> None:
        """Let time pass, look after the processes and deliver the records."""
        self.time += seconds
        self.telemetry.check()
        for key, (version, records) in self.telemetry.due().items():
            for record in records:
                self.ledger.apply(record, self.time + self.step)
            self.last[key] = records[-1]
            self.telemetry.delivered(key, version)

    def served(self) -> dict[str, tuple[str, float]]:
        """Return attempt and position of each rank in a scrape, which has no series twice."""
        samples = self.telemetry.ask(1).samples
        assert len({(row.name, labels) for row, labels, _ in samples}) == len(samples)
        place = m.TRAINING_RANK_INFO.labels.index("attempt")
        attempts = {labels[1]: labels[place] for row, labels, _ in samples if row is m.TRAINING_RANK_INFO}
        steps = {labels[1]: value for row, labels, value in samples if row is m.TRAINING_POSITION_STEPS}
        return {rank: (attempt, steps[rank]) for rank, attempt in attempts.items()}

    def run(self, name: str = "lm") -> RunLedger:
        return self.ledger.runs["", name]

    def counted(self) -> dict[str, float]:
        return outcomes(self.registry)


def training(age: float, at: float, *, rank: int = 0, **reported: Any) -> ResourceMetrics:
    """Return the push of a rank that has started up for a second, and since then made a step in each second."""
    return process(
        counter("training_activity_seconds_total", min(age, 1.0), at, activity="startup"),
        counter("training_activity_seconds_total", max(0.0, age - 1), at, activity="step"),
        gauge("training_position_steps", max(0, int(age) - 1), at),
        gauge("training_rank_info", 1, at, uuid="", local_rank="0"),
        rank=rank,
        **{"start_unix": at - age, **reported},
    )


class Trainer:
    """A real process that stands for a rank."""

    def __init__(self, user: int | None = None) -> None:
        self.process = subprocess.Popen(["sleep", "600"], user=user)

    @property
    def identity(self) -> dict[str, int]:
        """Return what a hook in this process reports about it."""
        pid = self.process.pid
        return {"pid": pid, "pid_namespace": own_pid_namespace(), "pid_start_ticks": int(stat(pid)[19])}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def trainers(count: int, user: int | None = None) -> Iterator[list[Trainer]]:
    """Run some processes."""
    running = [Trainer(user) for _ in range(count)]
    try:
        yield running
    finally:
        for one in running:
            one.end()


def dead() -> dict[str, int]:
    """Return the identity of a process that has ended."""
    one = Trainer()
    identity = one.identity
    one.end()
    assert not Path(f"/proc/{identity['pid']}").exists()
    return identity
