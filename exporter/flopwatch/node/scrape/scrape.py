"""One scrape: asks every source at once, isolates and times each, keeps the series budgets.

A source that fails or misses its deadline costs its own samples only: its last good ones are served for
`stale_after` seconds, then none. Everything here runs on one event loop; only `Source.ask` runs in a thread.

Sources mostly answer with the series they had before, so whatever depends only on which series there are (do they fit
their rows, which are twice, which are over budget, in which order they are written) is decided when that changes.
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
from itertools import compress
from typing import Protocol, TypeVar

import prometheus_client as prometheus

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.compat import Compatibility
from flopwatch.node.scrape.exposition import Exposition, arity, family, gzip, help_text
from flopwatch.node.scrape.reader import RESTARTS, Reading
from flopwatch.settings import ExporterSettings

log = logging.getLogger(__name__)

# A page begun less than this ago is shared, and so is a read of a driver: two Prometheus servers cost it one read.
SHARED_SECONDS = 1.0
# A page is shared for less: what training processes sent is fresh on every page, and only a crowd asks this often.
PAGE_SECONDS = 0.25
# What the scraper needs besides our wait: connection, rendering, transfer.
TIMEOUT_MARGIN = 0.5
# How much longer than its deadline an answer is waited for, so that "deadline" itself is an answer.
ANSWER_MARGIN = 0.2

FAILURES = ("deadline", "exited", "error", "blind")

# Series allowed per MIG instance, (gpu, uuid), (device, port), (run, rank), and per run for what one rank says for all.
# Over budget, rows that are not `key` go first, the catalogue's last row first, then `key` rows in the same order; a
# histogram goes whole.
MIG = (*m.GPU, "gpu_instance")
BUDGETS: dict[tuple[str, ...], tuple[str, int]] = {
    MIG: ("mig", 20),
    m.GPU: ("gpu", 120),
    m.PORT: ("port", 60),
    m.RANK: ("rank", 40),
    m.RANK[:1]: ("run", 30),
}
_ROWS = {row.name: row for row in m.all_metrics()}
_DROP_ORDER = {row.name: (row.key, -position) for position, row in enumerate(m.all_metrics())}


Key = tuple[Metric, tuple[str, ...]]  # what makes a series
Made = TypeVar("Made")


class Source(Protocol):
    """Something that can be read: a collector's child process, the training telemetry, the embedded ledger.

    One with an attribute `secondary` that is true fills gaps: of a part that a source before it has a row of, its own
    samples of that row are left out.
    """

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


def own_samples(registry: prometheus.CollectorRegistry) -> list[Sample]:
    """Return what a registry of `self_counter` and `self_gauge` holds; the client's own text costs three times this."""
    return [
        (_ROWS[sample.name], tuple(sample.labels.values()), sample.value)
        for metric in registry.collect()
        for sample in metric.samples
    ]


def _owner(row: Metric, labels: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels and their values of whatever a series counts against the budget of."""
    names = next((names for names in BUDGETS if row.labels[: len(names)] == names), ())  # the longest comes first
    return names, labels[: len(names)]


def over_budget(keys: Sequence[Key]) -> tuple[set[int], Counter[str]]:
    """Return the positions of the series that do not fit the series budgets, and how many each budget left out."""
    owners = (_owner(row, labels) for row, labels in keys)
    counts = Counter(owner for owner in owners if owner[0] in BUDGETS)
    excess = {key: count - BUDGETS[key[0]][1] for key, count in counts.items() if count > BUDGETS[key[0]][1]}
    dropped: Counter[str] = Counter()
    left_out: set[int] = set()
    if not excess:
        return left_out, dropped
    last: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    # Within a row the last sample goes first.
    for index in sorted(range(len(keys)), key=lambda i: (_DROP_ORDER[keys[i][0].name], -i)):
        row, labels = keys[index]
        key = _owner(row, labels)
        rest_of_histogram = row.type == "histogram" and last.get(key) == row.name
        if key in excess and (excess[key] > 0 or rest_of_histogram):
            excess[key] -= 1
            last[key] = row.name
            left_out.add(index)
            dropped[BUDGETS[key[0]][0]] += 1
    return left_out, dropped


def within_budget(samples: list[Sample]) -> tuple[list[Sample], Counter[str]]:
    """Return the samples that fit the series budgets, and how many of each budget were left out."""
    left_out, dropped = over_budget([(row, labels) for row, labels, _ in samples])
    return without(samples, left_out), dropped


def overlap(parts: Sequence[tuple[str, bool, list[Key]]]) -> tuple[set[int], Counter[str]]:
    """Return the positions, over all parts, of series to leave out, and how many of each part are there twice.

    A part is a source's name, whether it is secondary, and its series.
    """
    left_out: set[int] = set()
    twice: Counter[str] = Counter()
    seen: set[tuple[str, tuple[str, ...]]] = set()
    had: set[tuple[str, tuple[str, ...]]] = set()
    position = 0
    for name, secondary, keys in parts:
        own: set[tuple[str, tuple[str, ...]]] = set()
        for offset, (row, labels) in enumerate(keys):
            if secondary and (row.name, labels[:2]) in had:
                left_out.add(position + offset)
            elif (row.name, labels) in seen:
                left_out.add(position + offset)
                twice[name] += 1
            else:
                seen.add((row.name, labels))
                own.add((row.name, labels[:2]))
        position += len(keys)
        had |= own
    return left_out, twice


def without(samples: list[Sample], left_out: set[int]) -> list[Sample]:
    """Return the samples but for those at some positions."""
    return [sample for index, sample in enumerate(samples) if index not in left_out] if left_out else samples


def well_formed(sample: Sample) -> bool:
    """Return whether a sample has its row's number of labels, all text, and a number its type allows."""
    row, labels, raw = sample
    if len(labels) != arity(row) or not all(isinstance(label, str) for label in labels):
        return False
    try:
        if not math.isfinite(raw):
            return row.type != "counter"
        return row.type != "counter" or raw >= 0
    except (TypeError, OverflowError):
        return False


def plain_numbers(raws: Sequence[float], counters: Sequence[bool]) -> bool:
    """Return whether every number is finite and no counter negative; False decides nothing."""
    try:
        return (
            {int, float}.issuperset(map(type, raws))
            and math.isfinite(sum(raws))
            and min(compress(raws, counters), default=0) >= 0
        )
    except OverflowError:
        return False


@dataclass
class _State:
    source: Source
    shared: float  # seconds a read serves further scrapes
    secondary: bool = False
    kind: str = ""
    status: str = "not read yet"
    task: asyncio.Task[None] | None = None
    began: float = -math.inf  # the last read, on the scrape's clock
    deadline: float = 0.0
    finished: bool = False  # once at least
    success: bool | None = None
    succeeded: float = -math.inf
    samples: list[Sample] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of the samples; another object only when they change
    fitting: bool = True
    counters: list[bool] = field(default_factory=list)

    def take(self, samples: list[Sample]) -> Sample | None:
        """Keep the well-formed samples; return one that is not."""
        keys = [(row, labels) for row, labels, _ in samples]
        if keys != self.keys:
            self.keys = keys
            self.fitting = all(well_formed((row, labels, 0)) for row, labels in keys)
            self.counters = [row.type == "counter" for row, _ in keys]
        if self.fitting and plain_numbers([raw for _, _, raw in samples], self.counters):
            self.samples = samples
            return None
        self.samples = [sample for sample in samples if well_formed(sample)]
        if len(self.samples) == len(samples):
            return None
        self.keys = [(row, labels) for row, labels, _ in self.samples]
        self.fitting = False
        return next(sample for sample in samples if not well_formed(sample))


@dataclass
class _Page:
    """A body of /metrics, being made or made."""

    began: float  # on the scrape's clock
    until: float  # when the sources' deadline ends
    task: asyncio.Task[bytes]
    zipped: bytes | None = None


class Scrape:
    """Asks the sources and renders what they said together with what is to be said about them.

    `drivers` are worth sparing a read; what is `in_memory` is asked for every page. `also` gives samples of our own,
    and `derive` what follows from all samples together.
    """

    def __init__(
        self,
        drivers: Sequence[Source],
        in_memory: Sequence[Source],
        settings: ExporterSettings,
        registry: prometheus.CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        *,
        also: Callable[[], list[Sample]] = list,
        derive: Callable[[Sequence[Sample]], list[Sample]] | None = None,
    ) -> None:
        # Creation stamps would double the families of self-metrics; nobody asked for them.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._also = also
        self._derive = derive
        self._failing: set[str] = set()
        self._exposition, self._own = Exposition(), Exposition()
        self._compatibility = Compatibility(settings.expose, clock) if settings.expose else None
        self._pages: dict[bool, _Page] = {}
        self._pool = ThreadPoolExecutor(len(drivers) + len(in_memory), thread_name_prefix="source")
        self._states = [_State(source, SHARED_SECONDS, getattr(source, "secondary", False)) for source in drivers] + [
            _State(source, 0.0) for source in in_memory
        ]
        self._parts: list[list[Key]] = []
        self._overlap: tuple[set[int], Counter[str]] = set(), Counter()
        self._keys: list[Key] = []
        self._over_budget: tuple[set[int], Counter[str]] = set(), Counter()
        self._supported = self_gauge(m.COLLECTOR_SUPPORTED, registry)
        self._success = self_gauge(m.COLLECTOR_SUCCESS, registry)
        self._last_success = self_gauge(m.COLLECTOR_LAST_SUCCESS, registry)
        self._duration = self_gauge(m.COLLECTOR_DURATION, registry)
        self._failures = self_counter(m.COLLECTOR_FAILURES, registry)
        self._restarts = self_counter(m.COLLECTOR_RESTARTS, registry)
        self._duplicate = self_counter(m.SERIES_DUPLICATE, registry)
        self._dropped = self_counter(m.SERIES_DROPPED, registry)
        prometheus.Info(family(m.FLOPWATCH_INFO), help_text(m.FLOPWATCH_INFO), registry=registry).info(
            {"version": flopwatch.__version__}
        )
        for state in self._states:
            for reason in FAILURES:
                self._failures.labels(state.source.name, reason)
            self._duplicate.labels(state.source.name)
        for source in drivers:
            for reason in RESTARTS:
                self._restarts.labels(source.name, reason)
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

    def _deadline(self, timeout: float | None) -> float:
        """Return the shorter of our deadline and the scraper's timeout less what it needs itself, in seconds."""
        deadline = self._settings.scrape_deadline
        return deadline if timeout is None else min(deadline, max(timeout - TIMEOUT_MARGIN, timeout / 2))

    async def collect(self, timeout: float | None = None) -> list[Sample]:
        """Return what the sources say now, within the shorter of our deadline and the scraper's timeout in seconds."""
        deadline = self._deadline(timeout)
        tasks = [task for state in self._states if (task := self._reading(state, deadline)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline + ANSWER_MARGIN)
        now = self._clock()
        parts: list[tuple[str, bool, list[Key]]] = []
        samples: list[Sample] = []
        for state in self._states:
            if state.task is not None and now > state.deadline + ANSWER_MARGIN:
                self._failed(state, "deadline", "deadline")
            if now - state.succeeded <= self._settings.stale_after:
                parts.append((state.source.name, state.secondary, state.keys))
                samples += state.samples
        return self._within_budget(self._merged(parts, samples))

    def _merged(self, parts: list[tuple[str, bool, list[Key]]], samples: list[Sample]) -> list[Sample]:
        """Return the samples of all parts, each series once, with our own and what is derived from them."""
        keys = [keys for _, _, keys in parts]
        if len(keys) != len(self._parts) or any(a is not b for a, b in zip(keys, self._parts, strict=True)):
            self._parts, self._overlap = keys, overlap(parts)
        left_out, twice = self._overlap
        for name, count in twice.items():
            self._duplicate.labels(name).inc(count)
        samples = without(samples, left_out) + self._also()
        return samples + self._derived(samples)

    def _derived(self, samples: list[Sample]) -> list[Sample]:
        """Return what follows from the samples and from the sources' success."""
        derive = self._derive
        if derive is None:
            return []
        told: list[Sample] = [
            (m.COLLECTOR_SUCCESS, (state.source.name,), state.success)
            for state in self._states
            if state.success is not None
        ]
        return self._guarded("verdict", lambda: derive(samples + told), [])

    def _guarded(self, name: str, make: Callable[[], Made], instead: Made) -> Made:
        """Return what is made of the samples; a mistake in there costs no more than that."""
        try:
            made = make()
        except Exception:
            if name not in self._failing:
                log.exception("no %s can be made of the samples", name)
            self._failing.add(name)
            self._success.labels(name).set(0)
            self._failures.labels(name, "error").inc()
            return instead
        self._failing.discard(name)
        self._success.labels(name).set(1)
        return made

    def _within_budget(self, samples: list[Sample]) -> list[Sample]:
        keys = [(row, labels) for row, labels, _ in samples]
        if keys != self._keys:
            self._keys, self._over_budget = keys, over_budget(keys)
        left_out, dropped = self._over_budget
        for budget, count in dropped.items():
            self._dropped.labels(budget).inc(count)
        return without(samples, left_out)

    async def metrics(self, timeout: float | None = None, *, openmetrics: bool = False, gzipped: bool = False) -> bytes:
        """Return the body of /metrics, which scrapes that come together share."""
        now, deadline = self._clock(), self._deadline(timeout)
        page = self._pages.get(openmetrics)
        if page is None or now - page.began >= PAGE_SECONDS or (not page.task.done() and page.until > now + deadline):
            task = asyncio.get_running_loop().create_task(self._body(timeout, openmetrics))
            page = self._pages[openmetrics] = _Page(now, now + deadline, task)
        try:
            # One scraper that goes away must not end the page for the others.
            body = await asyncio.shield(page.task)
        except Exception:
            if self._pages.get(openmetrics) is page:
                del self._pages[openmetrics]
            raise
        if not gzipped:
            return body
        if page.zipped is None:
            page.zipped = gzip(body)
        return page.zipped

    async def _body(self, timeout: float | None, openmetrics: bool) -> bytes:
        samples = await self.collect(timeout)
        body = self._exposition.render(samples, openmetrics=openmetrics)
        if (foreign := self._compatibility) is not None:
            body += self._guarded("compatibility", lambda: foreign.render(samples, openmetrics=openmetrics), "")
        body += self._own.render(own_samples(self._registry), openmetrics=openmetrics)
        if openmetrics:
            body += "# EOF\n"
        # Readers decode bytes with replacement; a lone surrogate can still come in through JSON.
        return body.encode(errors="replace")

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
            self._failed(state, "error", f"{type(error).__name__}: {error}")
        finally:
            state.finished = True
            state.task = None

    def _settle(self, state: _State, reading: Reading) -> None:
        name = state.source.name
        for reason in reading.restarts:
            self._restarts.labels(name, reason).inc()
        if reading.kind == "released":
            # Neither a success nor a failure. What was true before a reset need not be true now.
            self._forget(state)
            self._change(state, "released")
            return
        self._supported.labels(name).set(reading.supported)
        self._duration.labels(name).set(reading.duration)
        if not reading.supported:
            self._forget(state)
            self._last_success.remove(name)
            self._change(state, "not supported", reading.reason)
            return
        if not reading.ok:
            if reading.samples:  # which parts there are, and that they cannot be read
                state.take(reading.samples)
                state.succeeded = self._clock() - reading.age
            self._failed(state, reading.kind if reading.kind in FAILURES else "error", reading.reason)
            return
        unfit = state.take(reading.samples)
        state.succeeded = self._clock() - reading.age
        self._last_success.labels(name).set(reading.at)
        if unfit is not None:
            row, labels, raw = unfit
            self._failed(state, "error", f"{row}{labels} = {raw!r} does not fit its catalogue row")
            return
        state.success = True
        self._success.labels(name).set(1)
        self._change(state, "ok")

    def _forget(self, state: _State) -> None:
        """Serve nothing more of a source, and no word about its success."""
        state.samples, state.succeeded, state.success = [], -math.inf, None
        self._success.remove(state.source.name)

    def _failed(self, state: _State, kind: str, reason: str) -> None:
        state.success = False
        self._success.labels(state.source.name).set(0)
        self._failures.labels(state.source.name, kind).inc()
        self._change(state, f"failed, {kind}", "" if reason == kind else reason)

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
