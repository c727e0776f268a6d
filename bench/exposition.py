"""Time to render /metrics: flopwatch's joined prefixes compared with prometheus_client, in one run.

    python bench/exposition.py

All methods render the same series. Values are integers, as drivers return them, and every second family is in
thousandths. flopwatch and the custom collector get new values at each scrape. The Gauge objects were set before,
because setting them is not timed. The custom collector builds its families at each scrape, as the guide of
prometheus_client recommends for exporters.
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

from flopwatch.catalogue import GPU, Metric, Sample, gauge
from flopwatch.http.exposition import Exposition, help_text

GPUS = 8
REPEATS = 30


def rows(series: int) -> list[Metric]:
    """Return gauge families with one series for each of eight GPUs, `series` series together."""
    return [
        gauge(f"gpu_bench_{index}_watts", "A reading.", GPU, "a driver call", scale=(1, 1e-3)[index % 2])
        for index in range(series // GPUS)
    ]


def samples(families: list[Metric], turn: int) -> list[Sample]:
    """Return one sample of every series. The values are different in each turn."""
    return [
        (row, (str(gpu), f"GPU-51a70000-0000-4000-8000-{gpu:012d}"), (index * 7919 + gpu * 104729 + turn) % 1_000_000)
        for index, row in enumerate(families)
        for gpu in range(GPUS)
    ]


class Families(Collector):
    """Collector of prometheus_client that builds its families at each scrape."""

    def __init__(self) -> None:
        self.readings: list[Sample] = []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a family with its samples for each row of the catalogue in `readings`."""
        families: dict[str, GaugeMetricFamily] = {}
        for row, labels, value in self.readings:
            family = families.get(row.name)
            if family is None:
                family = families[row.name] = GaugeMetricFamily(row.name, help_text(row), labels=row.labels)
            family.add_metric(labels, value * row.scale)
        yield from families.values()


def milliseconds(render: Callable[[int], object]) -> float:
    """Return the median time of REPEATS calls of `render` in milliseconds. Its argument counts the calls."""
    times = []
    for turn in range(REPEATS):
        began = time.perf_counter()
        render(turn)
        times.append(time.perf_counter() - began)
    return median(times) * 1e3


def compare(series: int) -> tuple[float, float, float]:
    """Return the milliseconds to render a page with flopwatch, with Gauge objects and with a custom collector."""
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
    """Measure and print the table of rendering times."""
    print(f"{'series':>7} {'joined prefixes':>16} {'Gauge objects':>22} {'custom collector':>22}")
    for series in (1_504, 5_000):
        joined, objects, collector = compare(series)
        print(
            f"{series:>7} {joined:>13.2f} ms {objects:>11.1f} ms ({objects / joined:4.1f} x)"
            f" {collector:>11.1f} ms ({collector / joined:4.1f} x)"
        )


if __name__ == "__main__":
    main()
