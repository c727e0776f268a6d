"""One scrape: asks every source at once, isolates and times each, keeps the series budgets.

A source that fails or misses its deadline costs its own samples only: its last good ones are served for
`stale_after` seconds, then none. Everything here runs on one event loop; only `Source.ask` runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import prometheus_client as prometheus
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.exposition import Exposition, arity, family, help_text
from flopwatch.node.reader import Reading
from flopwatch.settings import ExporterSettings

log = logging.getLogger(__name__)

# A read of a driver begun less than this ago is shared, so that two Prometheus servers cost it one read.
SHARED_SECONDS = 1.0
# What the scraper needs besides our wait: connection, rendering, transfer.
TIMEOUT_MARGIN = 0.5
# How much longer than its deadline an answer is waited for, so that "deadline" itself is an answer.
ANSWER_MARGIN = 0.2

FAILURES = ("deadline", "exited", "error")

# Series allowed per (gpu, uuid), (device, port) and (run, rank). Over budget, rows that are not `key` go first, the
# catalogue's last row first, then `key` rows in the same order; a histogram goes whole.
BUDGETS: dict[tuple[str, ...], tuple[str, int]] = {m.GPU: ("gpu", 120), m.PORT: ("port", 60), m.RANK: ("rank", 40)}
_DROP_ORDER = {row.name: (row.key, -position) for position, row in enumerate(m.all_metrics())}


class Source(Protocol):
    """Something that can be read: a collector's child process, the training telemetry, the embedded ledger."""

    @property
    def name(self) -> str: ...

    def ask(self, deadline: float) -> Reading:
        """Return a reading within this many seconds; called in a thread, never twice at a time."""


def self_counter(row: Metric, registry: prometheus.CollectorRegistry) -> prometheus.Counter:
    """Return a client counter made from a catalogue row."""
    return prometheus.Counter(family(row), help_text(row), row.labels, registry=registry)


def self_gauge(row: Metric, registry: prometheus.CollectorRegistry) -> prometheus.Gauge:
    """Return a client gauge made from a catalogue row."""
    return prometheus.Gauge(row.name, help_text(row), row.labels, registry=registry)


def within_budget(samples: list[Sample]) -> tuple[list[Sample], Counter[str]]:
    """Return the samples that fit the series budgets, and how many of each budget were left out."""
    counts: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    for row, labels, _ in samples:
        owner = row.labels[:2]
        if owner in BUDGETS:
            counts[owner, labels[:2]] += 1
    excess = {key: count - BUDGETS[key[0]][1] for key, count in counts.items() if count > BUDGETS[key[0]][1]}
    dropped: Counter[str] = Counter()
    if not excess:
        return samples, dropped
    left_out: set[int] = set()
    last: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    # Within a row the last sample goes first.
    for index in sorted(range(len(samples)), key=lambda i: (_DROP_ORDER[samples[i][0].name], -i)):
        row, labels, _ = samples[index]
        key = row.labels[:2], labels[:2]
        rest_of_histogram = row.type == "histogram" and last.get(key) == row.name
        if key in excess and (excess[key] > 0 or rest_of_histogram):
            excess[key] -= 1
            last[key] = row.name
            left_out.add(index)
            dropped[BUDGETS[key[0]][0]] += 1
    return [sample for index, sample in enumerate(samples) if index not in left_out], dropped


def well_formed(sample: Sample) -> bool:
    """Return whether a sample has its row's number of labels and a number its type allows."""
    row, labels, raw = sample
    if len(labels) != arity(row) or not isinstance(raw, (int, float)):
        return False
    return row.type != "counter" or (math.isfinite(raw) and raw >= 0)


@dataclass
class _State:
    source: Source
    shared: float  # seconds a read serves further scrapes
    kind: str = ""
    status: str = "not read yet"
    task: asyncio.Task[None] | None = None
    began: float = -math.inf  # the last read, on the scrape's clock
    deadline: float = 0.0
    finished: bool = False  # once at least
    succeeded: float = -math.inf
    samples: list[Sample] = field(default_factory=list)


class Scrape:
    """Asks the sources and renders what they said together with what is to be said about them.

    `drivers` are worth sparing a read; what is `in_memory` is asked at every scrape.
    """

    def __init__(
        self,
        drivers: Sequence[Source],
        in_memory: Sequence[Source],
        settings: ExporterSettings,
        registry: prometheus.CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Creation stamps would double the families of self-metrics; nobody asked for them.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._exposition = Exposition()
        self._pool = ThreadPoolExecutor(len(drivers) + len(in_memory), thread_name_prefix="source")
        self._states = [_State(source, SHARED_SECONDS) for source in drivers]
        self._states += [_State(source, 0.0) for source in in_memory]
        self._supported = self_gauge(m.COLLECTOR_SUPPORTED, registry)
        self._success = self_gauge(m.COLLECTOR_SUCCESS, registry)
        self._last_success = self_gauge(m.COLLECTOR_LAST_SUCCESS, registry)
        self._duration = self_gauge(m.COLLECTOR_DURATION, registry)
        self._failures = self_counter(m.COLLECTOR_FAILURES, registry)
        self._dropped = self_counter(m.SERIES_DROPPED, registry)
        prometheus.Info(family(m.FLOPWATCH_INFO), help_text(m.FLOPWATCH_INFO), registry=registry).info(
            {"version": flopwatch.__version__}
        )
        for state in self._states:
            for reason in FAILURES:
                self._failures.labels(state.source.name, reason)
        for budget, _ in BUDGETS.values():
            self._dropped.labels(budget)

    @property
    def attempted(self) -> bool:
        """Return whether every source has been read once, with whatever result."""
        return all(state.finished for state in self._states)

    def statuses(self) -> dict[str, str]:
        """Return each source's name and state in words."""
        return {state.source.name: state.status for state in self._states}

    def close(self) -> None:
        """Let go of the threads; a read still in flight ends with its source."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def collect(self, timeout: float | None = None) -> list[Sample]:
        """Return what the sources say now, within the shorter of our deadline and the scraper's timeout in seconds."""
        deadline = self._settings.scrape_deadline
        if timeout is not None:
            deadline = min(deadline, max(timeout - TIMEOUT_MARGIN, timeout / 2))
        tasks = [task for state in self._states if (task := self._reading(state, deadline)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline + ANSWER_MARGIN)
        now = self._clock()
        samples: list[Sample] = []
        for state in self._states:
            if state.task is not None and now > state.deadline + ANSWER_MARGIN:
                self._failed(state, "deadline")
            if now - state.succeeded <= self._settings.stale_after:
                samples += state.samples
        samples, dropped = within_budget(samples)
        for budget, count in dropped.items():
            self._dropped.labels(budget).inc(count)
        return samples

    async def metrics(self, timeout: float | None = None, *, openmetrics: bool = False) -> bytes:
        """Return the body of /metrics."""
        body = self._exposition.render(await self.collect(timeout), openmetrics=openmetrics)
        latest = openmetrics_latest if openmetrics else prometheus.generate_latest
        # Readers decode bytes with replacement; a lone surrogate can still come in through JSON.
        return body.encode(errors="replace") + latest(self._registry)

    def _reading(self, state: _State, deadline: float) -> asyncio.Task[None] | None:
        """Return the read in flight, a new one, or None where the last one is young enough to share."""
        now = self._clock()
        if state.task is None and now - state.began >= state.shared:
            state.began, state.deadline = now, now + deadline
            state.task = asyncio.get_running_loop().create_task(self._read(state, deadline))
        return state.task

    async def _read(self, state: _State, deadline: float) -> None:
        try:
            loop = asyncio.get_running_loop()
            reading = await loop.run_in_executor(self._pool, state.source.ask, deadline)
            self._settle(state, reading)
        except Exception as error:
            # The one place that catches everything: whatever a source does, the others are served.
            log.debug("source %s", state.source.name, exc_info=True)
            self._failed(state, f"{type(error).__name__}: {error}")
        finally:
            state.finished = True
            state.task = None

    def _settle(self, state: _State, reading: Reading) -> None:
        name = state.source.name
        self._supported.labels(name).set(reading.supported)
        self._duration.labels(name).set(reading.duration)
        if not reading.supported:
            state.samples, state.succeeded = [], -math.inf
            for gauge in (self._success, self._last_success):
                gauge.remove(name)
            self._change(state, "not supported", reading.reason)
            return
        if not reading.ok:
            self._failed(state, reading.reason)
            return
        state.samples = [sample for sample in reading.samples if well_formed(sample)]
        state.succeeded = self._clock()
        self._last_success.labels(name).set(reading.at)
        for row, labels, raw in reading.samples:
            if not well_formed((row, labels, raw)):
                self._failed(state, f"{row}{labels} = {raw!r} does not fit its catalogue row")
                return
        self._success.labels(name).set(1)
        self._change(state, "ok")

    def _failed(self, state: _State, reason: str) -> None:
        kind = reason if reason in FAILURES else "error"
        self._success.labels(state.source.name).set(0)
        self._failures.labels(state.source.name, kind).inc()
        self._change(state, f"failed, {kind}", reason if kind == "error" else "")

    def _change(self, state: _State, kind: str, detail: str = "") -> None:
        """Note the source's state, and log it if it is another one than before."""
        state.status = f"{kind}: {detail}" if detail else kind
        if kind != state.kind:
            level = logging.WARNING if kind.startswith("failed") else logging.INFO
            log.log(level, "source %s: %s", state.source.name, state.status)
            state.kind = kind


def scrape_timeout(header: str | None) -> float | None:
    """Return the seconds in an X-Prometheus-Scrape-Timeout-Seconds header; None if absent or no positive number."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return seconds if seconds > 0 and math.isfinite(seconds) else None

