"""A `flopwatch exporter` in a process of its own, and finished `flopwatch` commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.support import ROOT
from tests.support.machine import PATIENCE
from tests.support.otlp_by_hand import request

PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT / "exporter"), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}


Series = dict[str, float]


def flopwatch_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return a finished `flopwatch` command."""
    return subprocess.run(
        [sys.executable, "-m", "flopwatch", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=PATIENCE,
    )


class Exporter:
    """A running `flopwatch exporter`, which serves all series unless `flags` have another --series."""

    def __init__(self, state: Path, *flags: str | Path, program: Sequence[str] = ("-m", "flopwatch")) -> None:
        self._log = state.with_suffix(".log")
        with self._log.open("a") as log:
            start = log.tell()
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *program,
                    "exporter",
                    "--listen",
                    "127.0.0.1:0",
                    "--otlp-listen",
                    "127.0.0.1:0",
                    "--state",
                    str(state),
                    "--host",
                    "node-7",
                    "--series=full",
                    *map(str, flags),
                ],
                stderr=log,
                env=ENVIRONMENT,
            )
        addresses = None
        while addresses is None:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
            addresses = re.search(r"listening metrics=(\S+) otlp=(\S+)", self.log[start:])
        self.metrics, self.otlp = addresses.groups()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=PATIENCE) as response:
            return str(response.read().decode())

    def series(self) -> Series:
        """Return every sample of a scrape."""
        return {
            f"{s.name}{{{','.join(f'{k}={v}' for k, v in s.labels.items())}}}": s.value
            for f in text_string_to_metric_families(self.get("/metrics"))
            for s in f.samples
        }

    def wait_for(self, series: str, value: float) -> Series:
        """Return the first scrape that has this value."""
        return self.wait_until(lambda found: found.get(series) == value)

    def wait_until(self, condition: Callable[[Series], bool]) -> Series:
        """Return the first scrape that meets the condition."""
        end = time.monotonic() + PATIENCE
        while not condition(found := self.series()):
            assert time.monotonic() < end, f"{found}\n{self.log}"
            time.sleep(0.2)
        return found

    def wait_for_hardware(self) -> Series:
        """Return the first scrape with all that a simulated node has; a slow machine starts a reader after another."""
        return self.wait_until(
            lambda found: all(
                found.get(f"flopwatch_collector_success{{collector={name}}}") == 1
                for name in ("nvml", "infiniband", "xid", "identity")
            )
        )

    def push(self, *processes: ResourceMetrics) -> None:
        """Push as training processes."""
        body = request(*processes).SerializeToString()
        urllib.request.urlopen(
            urllib.request.Request(f"http://{self.otlp}/v1/metrics", body, {"Content-Type": "application/x-protobuf"}),
            timeout=PATIENCE,
        ).close()

    def children(self) -> list[int]:
        """Return the pids of its child processes."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        threads = path.parent.parent.glob("*/children")
        return [int(pid) for thread in threads for pid in thread.read_text().split()]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def exporter(state: Path, *flags: str | Path, program: Sequence[str] = ("-m", "flopwatch")) -> Iterator[Exporter]:
    """Run an exporter on free ports of loopback."""
    running = Exporter(state, *flags, program=program)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
