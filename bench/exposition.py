"""Compare two ways to render /metrics in one run: our joined prefixes and prometheus_client.

    python bench/exposition.py

Every way renders the same series with new values each time: integers as drivers give them, every other family in
thousandths. Gauge objects were set before (setting is not timed); the custom collector builds its families at each
scrape, as prometheus_client's guide asks of exporters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

sys.path.insert(0, str(Path(__file__).parent.parent / "exporter"))

from flopwatch.catalogue import GPU, Metric, Sample
from flopwatch.node.scrape.exposition import Exposition, help_text

GPUS = 8
REPEATS = 30


def rows(series: int) -> list[Metric]:
    """Return enough families of eight GPUs for this many series."""
    return [
        Metric(f"gpu_bench_{index}_watts", "gauge", "A reading.", GPU, "a driver call", scale=(1, 1e-3)[index % 2])
        for index in range(series // GPUS)
    ]


def samples(families: list[Metric], turn: int) -> list[Sample]:
    """Return one reading of every series, different at each turn."""
    return [
        (row, (str(gpu), f"GPU-51a70000-0000-4000-8000-{gpu:012d}"), (index * 7919 + gpu * 104729 + turn) % 1_000_000)
        for index, row in enumerate(families)
        for gpu in range(GPUS)
    ]


class Families(Collector):
    """A collector that builds its families at each scrape."""

    def __init__(self) -> None:
        self.readings: list[Sample] = []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a family per row."""
        families: dict[str, GaugeMetricFamily] = {}
        for row, labels, value in self.readings:
            family = families.get(row.name)
            if family is None:
                family = families[row.name] = GaugeMetricFamily(row.name, help_text(row), labels=row.labels)
            family.add_metric(labels, value * row.scale)
        yield from families.values()


def milliseconds(render: Callable[[int], object]) -> float:
    """Return the median time of a call."""
    times = []
    for turn in range(REPEATS):
        began = time.perf_counter()
        render(turn)
        times.append(time.perf_counter() - began)
    return median(times) * 1e3


def compare(series: int) -> tuple[float, float, float]:
    """Return milliseconds of ours, of Gauge objects and of a custom collector."""
    families = rows(series)
    readings = [samples(families, turn) for turn in range(REPEATS)]

    ours = Exposition()
    ours.render(readings[0])
    joined = milliseconds(lambda turn: ours.render(readings[turn]).encode())

    registry = CollectorRegistry()
    gauges = {row.name: Gauge(row.name, help_text(row), row.labels, registry=registry) for row in families}
    for row, labels, value in readings[0]:
        gauges[row.name].labels(*labels).set(value * row.scale)
    objects = milliseconds(lambda turn: generate_latest(registry))

    collector, registry = Families(), CollectorRegistry()
    registry.register(collector)

    def collect(turn: int) -> bytes:
        collector.readings = readings[turn]
        return generate_latest(registry)

    return joined, objects, milliseconds(collect)


def main() -> None:
    """Print the table."""
    print(f"{'series':>7} {'joined prefixes':>16} {'Gauge objects':>22} {'custom collector':>22}")
    for series in (1_504, 5_000):
        joined, objects, collector = compare(series)
        print(
            f"{series:>7} {joined:>13.2f} ms {objects:>11.1f} ms ({objects / joined:4.1f} x)"
            f" {collector:>11.1f} ms ({collector / joined:4.1f} x)"
        )


if __name__ == "__main__":
    main()
