"""Prometheus and VictoriaMetrics of several versions, started for a test."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from alerts.settings import duration
from demo.servers import NEWEST, OLDEST, SUITE, find, victoria_metrics
from demo.stack import Child, fetch, free_ports
from tests.support.live_series import named
from tests.support.machine import until

PROMETHEUS, VICTORIA = (OLDEST, NEWEST), (SUITE, NEWEST)


Samples = list[tuple[float, float]]


@contextlib.contextmanager
def server(name: str, command: list[str], folder: Path, ready: str) -> Iterator[Child]:
    """Run a program until the block ends, from when it answers at a URL."""
    child = Child(name, command, os.environ, folder / f"{name}.log")

    def answers() -> bool:
        child.check()
        with contextlib.suppress(OSError):
            fetch(ready)
            return True
        return False

    try:
        until(answers)
        yield child
    finally:
        child.stop()


def prometheus(suite: str, folder: Path, *flags: str) -> tuple[str, contextlib.AbstractContextManager[Child]]:
    """Return the URL of a Prometheus of a suite, and what runs it."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    return url, server(
        f"prometheus-{suite}",
        [
            *find(suite=suite).prometheus,
            f"--config.file={folder}/prometheus.yml",
            f"--web.listen-address=127.0.0.1:{port}",
            *flags,
        ],
        folder,
        f"{url}/-/ready",
    )


def victoria(suite: str, folder: Path, *flags: str) -> tuple[str, contextlib.AbstractContextManager[Child]]:
    """Return the URL of a VictoriaMetrics of a suite, and what runs it."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    return url, server(
        f"victoria-{suite}",
        [
            victoria_metrics(suite=suite),
            f"-storageDataPath={folder}/victoria-{suite}",
            "-retentionPeriod=100y",
            f"-httpListenAddr=127.0.0.1:{port}",
            "-search.latencyOffset=0s",
            *flags,
        ],
        folder,
        f"{url}/health",
    )


def raw(url: str, selector: str, window: float) -> dict[str, Samples]:
    """Return the stored samples of series by their labels."""
    query = urllib.parse.urlencode({"query": f"{selector}[{duration(window)}]", "time": time.time(), "nocache": 1})
    found = json.loads(fetch(f"{url}/api/v1/query?{query}"))["data"]["result"]
    every: dict[str, Samples] = {}
    for one in found:
        labels = named({name: value for name, value in one["metric"].items() if name != "alertgroup"})
        every.setdefault(labels, []).extend((float(at), float(value)) for at, value in one["values"] if value != "NaN")
    return {labels: sorted(samples) for labels, samples in every.items() if samples}
