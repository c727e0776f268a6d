"""Fake of NCCL's RAS, and a job of 16 ranks on two hosts (TP4 x PP2 x DP2) whose exporters ask it.

The process of the tests is rank 0 and has its RAS. The other ranks have pids that no process can have.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.node.collectors.cgroup import stat
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.admission import own_pid_namespace
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.node.telemetry.ras import Ras
from flopwatch.settings import Address, ExporterSettings
from tests.support.otlp_by_hand import START, counter, gauge, process, request

CAPTURES = Path(__file__).parents[1] / "captures" / "nccl"
WORLD, PER_HOST, FIRST_PID = 16, 8, 41000
PIDS = [os.getpid(), *range((1 << 22) + 1, (1 << 22) + WORLD)]  # of the ranks; PID_MAX_LIMIT is 2^22
START_TICKS = int(stat(os.getpid())[19])
HIDDEN = {"pid_namespace": 7, "pid_start_ticks": 10**9}  # a process in a container, which the exporter cannot see
UNKNOWN = "ERROR: Unknown command {}"

Report = dict[str, Any]
Group = tuple[str, str]


def report(name: str) -> Report:
    """Return a captured report of NCCL 2.30.7, with the pids of the ranks in place of those from FIRST_PID on."""
    found: Report = json.loads((CAPTURES / f"ras_json_2.30_{name}.json").read_text())
    for one in found["communicators"]:
        for member in one["ranks"] + one["missing_ranks"]:
            member["pid"] = PIDS[member["pid"] - FIRST_PID]
    return found


class FakeRas:
    """RAS of one process: answers as NCCL of a version, with a report or what `send` writes, and keeps all commands."""

    def __init__(
        self,
        answer: Report | bytes | Callable[[socket.socket], None],
        version: tuple[int, int, int] = (2, 30, 7),
        port: int = 0,
    ) -> None:
        self._answer, self._version = answer, version
        self._socket = socket.create_server(("127.0.0.1", port), reuse_port=True)
        self.port: int = self._socket.getsockname()[1]
        self.connections: list[list[str]] = []
        self._ended = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeRas]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            with contextlib.suppress(OSError):  # wakes accept()
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            thread.join()
            self._socket.close()

    def hang(self, connection: socket.socket) -> None:
        """Send nothing until the fake ends."""
        self._ended.wait(60)

    def trickle(self, connection: socket.socket) -> None:
        """Send one byte in a second until the fake ends."""
        while not self._ended.wait(1):
            connection.sendall(b"{")

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                if self._ended.is_set():
                    return
                self.connections.append([])
                self._talk(connection, self.connections[-1])

    def _talk(self, connection: socket.socket, commands: list[str]) -> None:
        for line in connection.makefile():
            command = line.rstrip("\r\n")
            commands.append(command)
            if command.upper() in ("STATUS", "VERBOSE STATUS"):
                answer = self._answer
                if callable(answer):
                    answer(connection)
                else:
                    text = answer if isinstance(answer, bytes) else json.dumps(answer, indent=2).encode()
                    connection.sendall(text)
                return
            connection.sendall(f"{self.reply(command)}\n".encode())

    def reply(self, command: str) -> str:
        """Return the answer to a command other than STATUS."""
        name, _, value = command.partition(" ")
        match name.upper():
            case "CLIENT":
                return "SERVER PROTOCOL 2"
            case "TIMEOUT":
                return "OK" if value.isdecimal() else f"ERROR: Invalid timeout value {value}"
            case "SET" if self._version >= (2, 28, 7):
                form = value.partition(" ")[2]
                return "OK" if form.lower() in ("text", "json") else f"ERROR: Invalid format {form}"
            case "MONITOR" if self._version >= (2, 29, 2):
                known = value.lower() in ("", "lifecycle", "trace", "all")
                return "OK" if known else f"ERROR: Invalid event group '{value}'"
        return UNKNOWN.format(command)


def groups_of(rank: int, inner: str = "tp") -> list[Group]:
    """Return kind and ranks of the groups of a rank: `inner` of 4, DP of 2 and its neighbour in the pipeline."""
    tp, dp, pp = rank % 4, rank // 4 % 2, rank // 8
    first = 4 * dp + 8 * pp
    pair = f"{tp + 4 * dp},{tp + 4 * dp + 8}"
    return [(inner, f"{first}-{first + 3}"), ("dp", f"{tp + 8 * pp},{tp + 8 * pp + 4}"), ("pp", pair)]


class Job:
    """Job on two hosts, whose exporters send records to a ledger. The exporter of rank 0 and the other may ask RAS."""

    def __init__(self, port: int, inner: str = "tp") -> None:
        self.now, self.inner, self.gpus = START + 100, inner, [f"GPU-{rank}" for rank in range(WORLD)]
        self.steps, self.pace = 0.0, 5  # steps in 5 s
        self.seconds = {"startup": 1.0, "step": 0.0}
        self.more_groups: list[Group] = []
        self.seen = {"pid_namespace": own_pid_namespace(), "pid_start_ticks": START_TICKS}  # rank 0
        self.ledger = Ledger()
        self.registry = Registry()
        self.hosts = []
        for number in range(2):
            registry = self.registry if number == 0 else Registry()
            ras = Ras(Address("127.0.0.1", port), registry, clock=self.clock)
            settings = ExporterSettings(host=f"h{number}")
            self.hosts.append(Telemetry(settings, registry, clock=self.clock, now=self.clock, ras=ras))

    def clock(self) -> float:
        return self.now

    def run(self, seconds: float, activity: str = "step", steps: bool = True) -> None:
        """Let the job do something for some seconds, with pushes and records every 5 s."""
        for _ in range(int(seconds / 5)):
            self.now += 5
            self.seconds[activity] = self.seconds.get(activity, 0.0) + 5
            self.steps += self.pace if steps else 0
            self.push()
            self.look()

    def push(self) -> None:
        """Have all ranks push."""
        for number, host in enumerate(self.hosts):
            host.receive(request(*self.processes(number)))

    def processes(self, host: int) -> list[ResourceMetrics]:
        """Return the pushes of a host's ranks."""
        return [self._of_rank(rank) for rank in range(host * PER_HOST, (host + 1) * PER_HOST)]

    def push_of(self, host: int, run: str, steps: float) -> None:
        """Have a rank of another run push to a host."""
        self.hosts[host].receive(request(self._of_rank(0, run=run, steps=steps)))

    def _of_rank(self, rank: int, run: str = "lm", steps: float | None = None) -> ResourceMetrics:
        metrics = [counter("training_activity_seconds_total", s, self.now, activity=a) for a, s in self.seconds.items()]
        metrics += [
            counter("training_steps_total", self.steps if steps is None else steps, self.now),
            gauge("training_position_steps", self.steps, self.now),
            gauge("training_collective_sequence_number", self.steps + 1, self.now),
            gauge("training_rank_info", 1, self.now, host="h", uuid=self.gpus[rank], local_rank="0"),
        ]
        metrics += [gauge("training_world_size", WORLD, self.now)] if rank == 0 else []
        for kind, ranks in groups_of(rank, self.inner) + self.more_groups:
            metrics.append(gauge("training_group_sequence_number", self.steps + 1, self.now, group=kind, ranks=ranks))
        return process(*metrics, rank=rank, run=run, pid=PIDS[rank], **(self.seen if rank == 0 else HIDDEN))

    def look(self) -> None:
        """Do what the exporters' threads do each second, and wait for the answer of RAS."""
        for host in self.hosts:
            host.check()
            for thread in threading.enumerate():
                if thread.name == "ras":
                    thread.join()
            host.check()
            for key, (version, records) in host.due().items():
                host.delivered(key, version)
                for record in records:
                    self.ledger.apply(record)

    def verdict(self) -> tuple[float, set[tuple[str, ...]]]:
        """Return for how long the run hangs, and the suspects as rank, host, group, its ranks, and signs."""
        run = self.ledger.runs["", "lm"]
        samples = list(views.families(run, run.reporters.last))
        seconds = [value for row, _, value in samples if row is m.RUN_HANG_SECONDS]
        return max(seconds, default=0.0), {label[2:] for row, label, _ in samples if row is m.RUN_HANG_SUSPECT_RATIO}

    def outcomes(self) -> dict[str, float]:
        """Return the questions to RAS by outcome, without those that never were."""
        counted = self.registry.samples()
        return {
            labels[0]: value for row, labels, value in counted if row is m.FLOPWATCH_NCCL_RAS_QUERIES_TOTAL and value
        }


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Return whether a condition became true in time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())
