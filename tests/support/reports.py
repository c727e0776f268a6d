"""A Prometheus filled with the series of a run, and `flopwatch report` over it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from demo.servers import find
from flopwatch import catalogue as m
from flopwatch.ledger.ledger import Ledger
from flopwatch.report import queries
from tests.support import ROOT
from tests.support.histories import samples

HISTORY = ROOT / "tests" / "captures" / "histories" / "crash_and_move.jsonl"


class World:
    """Samples of series, to be filled into a Prometheus."""

    def __init__(self) -> None:
        self._samples: list[tuple[str, float, float]] = []

    def add(self, name: str, labels: dict[str, str], value: float, at: float) -> None:
        text = ",".join(f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in labels.items())
        self._samples.append((f"{name}{{{text}}}", at, value))

    def text(self) -> str:
        lines = (f"{series} {value!r} {at:.3f}" for series, at, value in sorted(self._samples))
        return "\n".join([*lines, "# EOF\n"])


def ledger_world(world: World, base: float, *, tenant: str = "") -> None:
    """Add what a ledger serves every 15 s of the recorded history, begun at `base`."""
    records = [json.loads(line) for line in HISTORY.read_text().splitlines()]
    ledger, last = Ledger(), max(record["t"] for record in records)
    pending = sorted(records, key=lambda record: record["t"])
    at = 0.0
    while at <= last + 60:
        while pending and pending[0]["t"] <= at:
            record = pending.pop(0)
            ledger.apply({**record, "t": record["t"] + base, "tenant": tenant})
        for row, values, number in samples(ledger, base + at):
            world.add(row.name, {**dict(zip(row.labels, values, strict=True)), "instance": "ledger"}, number, base + at)
        at += 15


@contextlib.contextmanager
def prometheus(world: World, folder: Path, suite: str | None = None) -> Iterator[str]:
    """Run a real Prometheus that has these samples, and give its URL."""
    servers = find(suite=suite)
    (folder / "samples.txt").write_text(world.text())
    subprocess.run(
        [servers.promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", "samples.txt", "data"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "prometheus.yml").write_text("global: {}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *servers.prometheus,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--storage.tsdb.retention.time=3650d",
                f"--web.listen-address={address}",
            ],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def whole_world(base: float) -> World:
    """Return all that there is of run r: the ledger's series, records, ports and alerts."""
    world = World()
    ledger_world(world, base)
    for tenant in ("one", "two"):
        world.add(m.RUN_START_TIMESTAMP_SECONDS.name, {"run": "shared", "tenant": tenant}, base, base + 60)
    for step in range(600 // 15, 8490 // 15):
        at = base + 15 * step
        for rank in range(8):
            info = {
                "run": "r",
                "rank": str(rank),
                "host": f"node-{rank // 4}",
                "uuid": f"GPU-{rank}",
                "instance": f"10.0.0.{rank // 4}:9450",
            }
            world.add(m.TRAINING_RANK_INFO.name, info, 1, at)
            if rank != 7:
                world.add(queries.WAIT, {"run": "r", "rank": str(rank)}, 0.1, at)
            else:
                reason = {"run": "r", "rank": "7", "reason": "cuda_graph"}
                world.add(m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE.name, reason, 1, at)
        world.add(queries.RUN_MFU, {"run": "r"}, 0.4, at)
        world.add(queries.LOST, {"run": "r"}, 0.2, at)
        # 4 kW for 3,000 s, 0.5 steps and 800 tokens per second for 1,500 s of these.
        if 3000 <= 15 * step < 6000:
            world.add(queries.POWER, {"run": "r"}, 4000, at)
        if step >= 300:
            world.add(queries.STEPS, {"run": "r"}, 0.5, at)
            world.add(queries.TOKENS, {"run": "r"}, 800, at)
        if step % 4 == 0:
            world.add(queries.STRAGGLER, {"run": "r", "rank": "5"}, 0.2, at)
        for node in range(3):
            port = {"device": "mlx5_0", "port": "1", "instance": f"10.0.0.{node}:9450"}
            world.add(m.INFINIBAND_SYMBOL_ERRORS_TOTAL.name, port, node * step, at)
            world.add(m.INFINIBAND_INFO.name, {**port, "host": f"node-{node}"}, 1, at)
        if 2700 <= 15 * step < 3300:
            world.add(
                "ALERTS",
                {
                    "alertname": "GpuXidCritical",
                    "alertstate": "firing",
                    "severity": "critical",
                    "host": "node-1",
                    "uuid": "GPU-5",
                    "xid": "79",
                },
                1,
                at,
            )
            world.add(
                "ALERTS",
                {
                    "alertname": "GpuXidCritical",
                    "alertstate": "firing",
                    "severity": "critical",
                    "host": "node-2",
                    "uuid": "GPU-9",
                    "xid": "79",
                },
                1,
                at,
            )
            world.add(
                "ALERTS",
                {"alertname": "TrainingDown", "alertstate": "firing", "severity": "warning", "run": "r"},
                1,
                at,
            )
    return world


def flopwatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopwatch", "report", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "exporter")},
    )
