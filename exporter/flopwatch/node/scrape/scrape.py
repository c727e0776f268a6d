"""One scrape: reads all sources at once, isolates and times each, and enforces the series budgets.

A failed source affects no other, and its last good samples are served for `stale_after` seconds. Only
`SampleSource.ask` runs in a thread, not in the event loop. Checks are cached until the set of series changes.
"""

import asyncio
import gzip
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Protocol, TypeVar

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.http.exposition import Exposition, arity
from flopwatch.node.scrape.levels import Key, Levels
from flopwatch.node.scrape.reader import RESTARTS, Reading
from flopwatch.settings import ExporterSettings

if TYPE_CHECKING:
    from flopwatch.node.scrape.compat import Compatibility
    from flopwatch.node.scrape.node_names import NodeNames

log = logging.getLogger(__name__)

SHARED_SECONDS = 1.0  # seconds for which scrapes share a read of a driver, for example two Prometheus servers
PAGE_SECONDS = 0.25  # seconds for which scrapes share a page: less, so that new pushes appear at once
TIMEOUT_MARGIN = 0.5  # seconds of the scraper's timeout left for connection, rendering and transfer
ANSWER_MARGIN = 0.2  # seconds after its deadline that an answer is awaited: "deadline" is an answer too

FAILURES = ("deadline", "exited", "error", "blind")

# Maximum number of series by the labels of their owner. Over budget, rows that are not `key` are dropped first, from
# the end of the catalogue, then `key` rows in the same order. A histogram is dropped as a whole.
MIG = (*m.GPU, "gpu_instance")
BUDGETS: dict[tuple[str, ...], tuple[str, int]] = {
    MIG: ("mig", 20),
    m.GPU: ("gpu", 120),
    m.PORT: ("port", 60),
    m.RANK: ("rank", 40),
    m.RANK[:1]: ("run", 30),
}
_DROP_ORDER = {row.name: (row.key, -position) for position, row in enumerate(m.all_metrics())}

Part = tuple[str, bool, list[Key]]  # name of a source, whether it is secondary, and its series
Result = TypeVar("Result")


class SampleSource(Protocol):
    """Source of samples: a reader process, the training telemetry or the embedded ledger."""

    @property
    def name(self) -> str:
        """Return the source's name, as in the label `collector`."""

    def ask(self, deadline: float) -> Reading:
        """Return a reading within `deadline` seconds. Called in a thread, one call at a time."""


class OwnMetric:
    """Values of a row about the exporter itself, by label values."""

    def __init__(self, row: Metric) -> None:
        self.row, self.values = row, dict[tuple[str, ...], float]()
        self._lock = threading.Lock()

    def add(self, *labels: str, by: float = 1) -> None:
        """Add to a counter, which begins at 0. Thread-safe."""
        with self._lock:
            self.values[labels] = self.values.get(labels, 0.0) + by

    def set(self, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.values[labels] = value


class Registry(list[OwnMetric]):
    """Metrics about the exporter itself. prometheus_client would take 5 MiB, and a tenth of a scrape."""

    def metric(self, row: Metric) -> OwnMetric:
        """Return a new metric of this row."""
        self.append(OwnMetric(row))
        return self[-1]

    def samples(self) -> list[Sample]:
        """Return the samples of all metrics."""
        return [(one.row, labels, value) for one in self for labels, value in [*one.values.items()]]


def _owner(row: Metric, labels: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names and values of the labels whose budget a series counts against, empty without a budget."""
    names = next((names for names in BUDGETS if row.labels[: len(names)] == names), ())  # the longest comes first
    return names, labels[: len(names)]


def over_budget(keys: Sequence[Key]) -> tuple[set[int], Counter[str]]:
    """Return the positions in `keys` of the series over budget, and how many each budget drops."""
    owners = (_owner(row, labels) for row, labels in keys)
    counts = Counter(owner for owner in owners if owner[0] in BUDGETS)
    excess = {key: count - BUDGETS[key[0]][1] for key, count in counts.items() if count > BUDGETS[key[0]][1]}
    dropped: Counter[str] = Counter()
    left_out: set[int] = set()
    if not excess:
        return left_out, dropped
    last: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
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


def overlap(parts: Sequence[Part]) -> tuple[set[int], Counter[str]]:
    """Return the positions over all parts (one per source) of series to drop, and the duplicates by source.

    A duplicate has the row and labels of an earlier series. A secondary source's row for a GPU or port is dropped
    where an earlier source has that row for it. This is no duplicate.
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
    """Return the samples except those at the given positions."""
    return [sample for index, sample in enumerate(samples) if index not in left_out] if left_out else samples


def well_formed(sample: Sample) -> bool:
    """Return whether a sample has the labels of its row, all of them text, and a number that its type allows."""
    row, labels, raw = sample
    if len(labels) != arity(row) or not all(isinstance(label, str) for label in labels):
        return False
    try:
        finite = math.isfinite(raw)
        return row.type != "counter" or (finite and raw >= 0)
    except (TypeError, OverflowError):
        return False


def plain_numbers(raws: Sequence[float], counters: Sequence[bool]) -> bool:
    """Return True if all numbers are finite and no counter is negative. False means that each must be checked."""
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
    source: SampleSource
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
        """Keep the well-formed samples, and return the first malformed one or None."""
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
    began: float  # on the scrape's clock
    patience: float  # seconds for which it waits for the sources
    task: asyncio.Task[bytes]
    zipped: bytes | None = None


class Scrape:
    """Scrape of all sources, rendered together with the metrics about the exporter itself.

    A read of `drivers` is shared by scrapes within SHARED_SECONDS. Sources `in_memory` are read for every page. `also`
    returns additional samples, and `derive` computes samples from all of these.
    """

    def __init__(
        self,
        drivers: Sequence[SampleSource],
        in_memory: Sequence[SampleSource],
        settings: ExporterSettings,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        *,
        also: Callable[[], list[Sample]] = list,
        derive: Callable[[Sequence[Sample]], list[Sample]] | None = None,
    ) -> None:
        self._settings, self._registry, self._clock = settings, registry, clock
        self._also, self._derive = also, derive
        self._failing: set[str] = set()
        self._exposition, self._own = Exposition(), Exposition()
        self._level, self._own_level = (Levels(settings.series, settings.new_for, clock) for _ in range(2))
        self._foreign: list[Compatibility | NodeNames] = []
        for names in filter(None, settings.expose.split(",")):
            from flopwatch.node.scrape import compat, node_names  # memory that an exporter without --expose can save

            self._foreign.append(node_names.NodeNames() if names == "node" else compat.Compatibility(names, clock))
        self._pages: dict[bool, _Page] = {}
        self._pool = ThreadPoolExecutor(len(drivers) + len(in_memory), thread_name_prefix="source")
        self._states = [_State(source, SHARED_SECONDS, getattr(source, "secondary", False)) for source in drivers] + [
            _State(source, 0.0) for source in in_memory
        ]
        self._parts: list[list[Key]] = []
        self._overlap: tuple[set[int], Counter[str]] = set(), Counter()
        self._keys: list[Key] = []
        self._over_budget: tuple[set[int], Counter[str]] = set(), Counter()
        self._supported = registry.metric(m.FLOPWATCH_COLLECTOR_SUPPORTED)
        self._success = registry.metric(m.FLOPWATCH_COLLECTOR_SUCCESS)
        self._last_success = registry.metric(m.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS)
        self._duration = registry.metric(m.FLOPWATCH_COLLECTOR_DURATION_SECONDS)
        self._failures = registry.metric(m.FLOPWATCH_COLLECTOR_FAILURES_TOTAL)
        self._restarts = registry.metric(m.FLOPWATCH_COLLECTOR_RESTARTS_TOTAL)
        self._duplicate = registry.metric(m.FLOPWATCH_SERIES_DUPLICATE_TOTAL)
        self._dropped = registry.metric(m.FLOPWATCH_SERIES_DROPPED_TOTAL)
        registry.metric(m.FLOPWATCH_BUILD_INFO).set(1, flopwatch.__version__)
        for state in self._states:
            for reason in FAILURES:
                self._failures.add(state.source.name, reason, by=0)
            self._duplicate.add(state.source.name, by=0)
        for source in drivers:
            for reason in RESTARTS:
                self._restarts.add(source.name, reason, by=0)
        for budget, _ in BUDGETS.values():
            self._dropped.add(budget, by=0)

    @property
    def attempted(self) -> bool:
        """Whether every source has been read at least once, successfully or not."""
        return all(state.finished for state in self._states)

    def statuses(self) -> dict[str, str]:
        """Return the state of each source by name, as text."""
        return {state.source.name: state.status for state in self._states}

    def close(self) -> None:
        """Stop the thread pool without waiting for reads in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _patience(self, timeout: float | None) -> float:
        """Return the seconds to wait for reads: their deadline, or less if the scraper's timeout requires it."""
        deadline = self._settings.scrape_deadline
        return deadline if timeout is None else min(deadline, max(timeout - TIMEOUT_MARGIN, timeout / 2))

    async def collect(self, timeout: float | None = None) -> list[Sample]:
        """Read all sources and return the samples to serve. `timeout` is the scraper's, in seconds."""
        return self._within_budget(await self._read_all(timeout))

    async def _read_all(self, timeout: float | None) -> list[Sample]:
        """Read all sources and return the samples of every level.

        `timeout` limits how long this scrape waits, and no read: those are shared with other scrapers.
        """
        tasks = [task for state in self._states if (task := self._reading(state)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience(timeout) + ANSWER_MARGIN)
        now = self._clock()
        parts: list[Part] = []
        samples: list[Sample] = []
        for state in self._states:
            if state.task is not None and now > state.deadline + ANSWER_MARGIN:
                self._failed(state, "deadline", "deadline")
            if now - state.succeeded <= self._settings.stale_after:
                parts.append((state.source.name, state.secondary, state.keys))
                samples += state.samples
        return self._merged(parts, samples)

    def _merged(self, parts: list[Part], samples: list[Sample]) -> list[Sample]:
        keys = [keys for _, _, keys in parts]
        if len(keys) != len(self._parts) or any(a is not b for a, b in zip(keys, self._parts, strict=True)):
            self._parts, self._overlap = keys, overlap(parts)
        left_out, twice = self._overlap
        for name, count in twice.items():
            self._duplicate.add(name, by=count)
        samples = without(samples, left_out) + self._also()
        if (derive := self._derive) is None:
            return samples
        success: list[Sample] = [
            (m.FLOPWATCH_COLLECTOR_SUCCESS, (state.source.name,), state.success)
            for state in self._states
            if state.success is not None
        ]
        samples += self._guarded("verdict", lambda: derive(samples + success), [])
        return samples

    def _guarded(self, name: str, make: Callable[[], Result], fallback: Result) -> Result:
        """Return the result of `make`. If it raises, count a failure of the source `name` and return `fallback`."""
        try:
            result = make()
        except Exception:
            if name not in self._failing:
                log.exception("failed source=%s", name)
            self._failing.add(name)
            self._success.set(0, name)
            self._failures.add(name, "error")
            return fallback
        self._failing.discard(name)
        self._success.set(1, name)
        return result

    def _within_budget(self, samples: list[Sample]) -> list[Sample]:
        for foreign in self._foreign:
            samples = foreign.own(samples)
        samples = self._level(samples)
        keys = [(row, labels) for row, labels, _ in samples]
        if keys != self._keys:
            self._keys, self._over_budget = keys, over_budget(keys)
        left_out, dropped = self._over_budget
        for budget, count in dropped.items():
            self._dropped.add(budget, by=count)
        return without(samples, left_out)

    async def metrics(self, timeout: float | None = None, *, openmetrics: bool = False, gzipped: bool = False) -> bytes:
        """Return the body of /metrics, shared by simultaneous scrapes. `timeout` is the scraper's, in seconds."""
        now, patience = self._clock(), self._patience(timeout)
        page = self._pages.get(openmetrics)
        if page is None or not self._shareable(page, now, patience):
            task = asyncio.get_running_loop().create_task(self._body(timeout, openmetrics))
            page = self._pages[openmetrics] = _Page(now, patience, task)
        try:
            # The page must continue for other scrapers if one disconnects.
            body = await asyncio.shield(page.task)
        except Exception:
            if self._pages.get(openmetrics) is page:
                del self._pages[openmetrics]
            raise
        if not gzipped:
            return body
        if page.zipped is None:
            page.zipped = gzip.compress(body, 1, mtime=0)  # a tenth of the size, in a millisecond
        return page.zipped

    def _shareable(self, page: _Page, now: float, patience: float) -> bool:
        """Return whether a page is new, waits as long for the sources as `patience`, and is ready by then."""
        if now - page.began >= PAGE_SECONDS or page.patience < patience:
            return False
        return page.task.done() or page.began + page.patience <= now + patience

    async def _body(self, timeout: float | None, openmetrics: bool) -> bytes:
        samples = await self._read_all(timeout)
        body = self._exposition.render(self._within_budget(samples), openmetrics=openmetrics)
        for foreign in self._foreign:
            body += self._guarded(foreign.source, partial(foreign.render, samples, openmetrics=openmetrics), "")
        body += self._own.render(self._own_level(self._registry.samples()), openmetrics=openmetrics)
        if openmetrics:
            body += "# EOF\n"
        # JSON may contain a lone surrogate, although readers decode bytes with replacement.
        return body.encode(errors="replace")

    def _reading(self, state: _State) -> asyncio.Task[None] | None:
        """Return the task of the read in progress or of a new one, or None if the last read is still shared."""
        now, deadline = self._clock(), self._settings.scrape_deadline
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
            # The only place that catches everything: no source may affect the others.
            log.debug("source %s", state.source.name, exc_info=True)
            self._failed(state, "error", f"{type(error).__name__}: {error}")
        finally:
            state.finished = True
            state.task = None

    def _settle(self, state: _State, reading: Reading) -> None:
        name = state.source.name
        for reason in reading.restarts:
            self._restarts.add(name, reason)
        if reading.kind == "released":
            # Neither success nor failure. Samples from before a reset may be wrong now.
            self._forget(state)
            self._change(state, "released")
            return
        self._supported.set(reading.supported, name)
        self._duration.set(reading.duration, name)
        if not reading.supported:
            self._forget(state)
            self._last_success.values.pop((name,), None)
            self._change(state, "not supported", reading.reason)
            return
        if not reading.ok:
            if reading.samples:  # the inventory, and that its parts cannot be read
                state.take(reading.samples)
                state.succeeded = self._clock() - reading.age
            self._failed(state, reading.kind if reading.kind in FAILURES else "error", reading.reason)
            return
        unfit = state.take(reading.samples)
        state.succeeded = self._clock() - reading.age
        self._last_success.set(reading.at, name)
        if unfit is not None:
            row, labels, raw = unfit
            self._failed(state, "error", f"{row}{labels} = {raw!r} does not fit its catalogue row")
            return
        state.success = True
        self._success.set(1, name)
        self._change(state, "ok")

    def _forget(self, state: _State) -> None:
        state.samples, state.succeeded, state.success = [], -math.inf, None
        self._success.values.pop((state.source.name,), None)

    def _failed(self, state: _State, kind: str, reason: str) -> None:
        state.success = False
        self._success.set(0, state.source.name)
        self._failures.add(state.source.name, kind)
        self._change(state, f"failed, {kind}", "" if reason == kind else reason)

    def _change(self, state: _State, kind: str, detail: str = "") -> None:
        state.status = f"{kind}: {detail}" if detail else kind
        if kind != state.kind:
            level = logging.WARNING if kind.startswith("failed") else logging.INFO
            log.log(level, "source=%s state=%r", state.source.name, state.status)
            state.kind = kind


def scrape_timeout(header: str | None) -> float | None:
    """Return the seconds in an X-Prometheus-Scrape-Timeout-Seconds header, or None unless it is a positive number."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return seconds if seconds > 0 and math.isfinite(seconds) else None
