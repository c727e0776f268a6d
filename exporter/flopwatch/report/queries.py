"""Queries to Prometheus about one run: series of the ledger, of the run's ranks, and of recording rules."""

import json
from collections.abc import Iterable

from flopwatch import catalogue as m
from flopwatch.report.model import OPEN, CauseTotal, EnergySummary, Firing, Outlier, Slice
from flopwatch.report.prometheus import PrometheusClient, TimeSeries
from flopwatch.settings import SettingsError

# Recorded by alerts/recording; a test compares the names.
RUN_MFU = "run:training_mfu:ratio_rate5m"
LOST = "run:training_straggler_lost:ratio"
STRAGGLER = "rank:training_straggler:confirmed"
WAIT = "rank:training_collective_wait:ratio"
POWER, STEPS, TOKENS = "run:gpu_energy_joules:rate5m", "run:training_steps:rate5m", "run:training_tokens:rate5m"

MAX_OUTLIERS = 10  # ranks, hosts or links in a report
MAX_SLICES = 600  # of the timeline
MIN_STEP = 1.0  # seconds between two points of a query


class RunQueries:
    """Queries about one run over `lookback` seconds before `at`. `start` and `set_span` narrow tenant and time."""

    def __init__(self, prometheus: PrometheusClient, run: str, tenant: str | None, at: float, lookback: float) -> None:
        self._prometheus, self.run, self.at, self._window = prometheus, run, at, f"{max(1, round(lookback))}s"
        named = {"run": run} if tenant is None else {"run": run, "tenant": tenant}
        self.ledger, self.training = _selector(named), _selector({"run": run})
        self._begin, self._end, self._step = at - lookback, at, MIN_STEP

    def start(self) -> tuple[float, str]:
        """Return the run's start in Unix time and its tenant, and limit later queries to it. Raises SettingsError."""
        starts = self._now(f"max by (tenant) ({self._total(m.RUN_START_TIMESTAMP_SECONDS)})")
        if not starts:
            raise SettingsError(
                f"no run {self.run!r} with series of the ledger ({m.RUN_START_TIMESTAMP_SECONDS}) in the last "
                f"{self._window}; check its name and that this Prometheus scrapes the ledger, "
                "or try a longer --lookback"
            )
        tenants = sorted(series.labels.get("tenant", "") for series in starts)
        if len(starts) > 1:
            raise SettingsError(f"several tenants have a run {self.run!r}; add --tenant {' or '.join(tenants)}")
        self.ledger = _selector({"run": self.run, "tenant": tenants[0]})
        return starts[0].points[0][1], tenants[0]

    def set_span(self, begin: float, end: float) -> None:
        """Limit later queries to the time from `begin` to `end`, in Unix time."""
        self._begin, self._end = max(begin, self._begin), max(begin + 1, min(self.at, end + 60))
        self._step = max(MIN_STEP, (self._end - self._begin) / MAX_SLICES)
        self._window = f"{max(60, round(self.at - self._begin))}s"

    def one(self, row: m.Metric) -> float | None:
        """Return the last value of a family that has one series per run, None if it is absent."""
        return self._value(f"max({self._total(row)})")

    def ratio(self, numerator: m.Metric, denominator: m.Metric) -> float | None:
        """Return the last value of one family divided by that of another, None if one is absent or the divisor is 0."""
        above, below = self.one(numerator), self.one(denominator)
        return above / below if above is not None and below else None

    def by(self, label: str, row: m.Metric) -> dict[str, float]:
        """Return the last value of a family of the run for each value of `label`."""
        return self._values(label, f"max by ({label}) ({self._total(row)})")

    def mean(self, record: str) -> float | None:
        """Return the mean of a recording rule's series of the run over the run's time, None if it is absent."""
        return self._value(f"max(avg_over_time({record}{self.training}[{self._window}]))")

    def changes(self, row: m.Metric) -> float:
        """Return how often a gauge of the run changed in the run's time."""
        ranged = f"({row}{self.ledger}[{self._window}])"
        try:
            # changes() of VictoriaMetrics also counts the first sample; Prometheus has no changes_prometheus().
            return self._value(f"max(changes_prometheus{ranged})") or 0.0
        except SettingsError:
            return self._value(f"max(changes{ranged})") or 0.0

    def over(self, query: str) -> list[TimeSeries]:
        """Return the series of a query over the run's time."""
        return self._prometheus.query_range(query, self._begin, self._end, self._step)

    def over_time(self, record: str) -> list[tuple[float, float]]:
        """Return a recording rule's series of the run over the run's time, as points (Unix time, value)."""
        return [point for series in self.over(f"max by (run) ({record}{self.training})") for point in series.points]

    def energy(self) -> EnergySummary | None:
        """Return the energy of the run's GPUs while it was measured for all of them, None if it never was."""
        power, steps, tokens = (dict(self.over_time(record)) for record in (POWER, STEPS, TOKENS))
        if not power:
            return None
        means = []
        for rate in (steps, tokens):
            both = power.keys() & rate.keys()
            total = sum(rate[time] for time in both)
            means.append(sum(power[time] for time in both) / total if total > 0 else None)
        return EnergySummary(sum(power.values()) * self._step, len(power) * self._step, *means)

    def declared(self) -> dict[str, str]:
        """Return what the run declared, such as its FLOPs convention, dtype, source of the peak and owner, by label."""
        info = self._now(f"topk(1, {self._last(m.TRAINING_RUN_INFO)})")
        shown = ("convention", "dtype", "flops_source", "peak_source", "framework", "owner", "team", "external_id")
        return {name: info[0].labels[name] for name in shown if info[0].labels.get(name)} if info else {}

    def host_count(self) -> int:
        """Return how many hosts ran ranks of the run, 0 if that is unknown."""
        return round(self._count(f"group by (host) ({self._last(m.TRAINING_RANK_INFO)})"))

    def timeline(self, began: float, open_seconds: float) -> list[Slice]:
        """Return the run's seconds per bucket over time, a slice for each sample in which the ledger's totals grew.

        Buckets partition the wall clock, so a slice lies between the sums of two samples. Two hours of down time that
        are added at once at a restart are shown as two hours. `open_seconds` are the last slice.
        """
        query = f"max by (bucket) ({m.RUN_SECONDS_TOTAL}{self.ledger})"
        buckets = {series.labels["bucket"]: dict(series.points) for series in self.over(query)}
        buckets.pop("queue", None)  # it is before the run's start
        before: dict[str, float] = dict.fromkeys(buckets, 0.0)
        slices: list[Slice] = []
        at = began
        for time in sorted({time for points in buckets.values() for time in points}):
            # Never below the last value: a ledger that lost its file started again from 0.
            now = {bucket: max(points.get(time, before[bucket]), before[bucket]) for bucket, points in buckets.items()}
            seconds = {bucket: now[bucket] - before[bucket] for bucket in buckets if now[bucket] > before[bucket]}
            if seconds:
                slices.append(Slice(at, at + sum(seconds.values()), seconds))
                at, before = slices[-1].end, now
        if open_seconds > 0:
            slices.append(Slice(at, at + open_seconds, {OPEN: open_seconds}))
        return slices

    def causes(self) -> list[CauseTotal]:
        """Return the settled incidents by cause, the cause that cost most GPU-seconds first."""
        counts, seconds = self._by_cause(m.RUN_INCIDENTS_TOTAL), self._by_cause(m.RUN_BADPUT_GPU_SECONDS_TOTAL)
        totals = [CauseTotal(cause, round(count), seconds.get(cause, 0.0)) for cause, count in counts.items() if count]
        return sorted(totals, key=lambda cause: -cause.gpu_seconds)

    def _by_cause(self, row: m.Metric) -> dict[str, float]:
        """Return the last values of a family by cause, summed over the kinds of loss: end, slow and stall."""
        return self._values("cause", f"sum by (cause) (max by (kind, cause) ({self._total(row)}))")

    def alerts(self, tenant: str) -> list[Firing]:
        """Return the alerts that fired about the run, or about a host while the run used it, in order of time."""
        # The window finds alerts that fired between two points of the query.
        window = max(self._step, 60)
        on_run = f"last_over_time(ALERTS{_selector({'run': self.run, 'alertstate': 'firing'})}[{window:.0f}s])"
        on_host = (
            f'last_over_time(ALERTS{{alertstate="firing",run="",host!=""}}[{window:.0f}s]) and on (host) '
            f"group by (host) (last_over_time({m.TRAINING_RANK_INFO}{self.training}[10m]))"
        )
        firings: list[Firing] = []
        for series in (*self.over(on_run), *self.over(on_host)):
            labels = series.labels
            if labels.get("tenant", tenant) != tenant:
                continue
            shown = [name for name in ("host", "device", "port", "uuid", "xid", "rank") if labels.get(name)]
            place = ", ".join(f"{name} {labels[name]}" for name in shown)
            name, severity = (labels.get(label, "") for label in ("alertname", "severity"))
            for began, ended in _spells(series.points, 2.5 * window):
                firings.append(Firing(name, severity, place, began, ended, ended > self.at - 2.5 * window))
        return sorted(firings, key=lambda firing: (firing.began, firing.name))

    def ranks(self) -> list[Outlier]:
        """Return the ranks that were the straggler most often, at most MAX_OUTLIERS."""
        span = f"{self.training}[{self._window}]"
        late = self._now(f"topk({MAX_OUTLIERS}, max by (rank) (count_over_time({STRAGGLER}{span})))")
        all_points = self._value(f"max(count_over_time({LOST}{span}))")
        if not all_points:
            return []
        cost = self._values("rank", f"max by (rank) (avg_over_time({STRAGGLER}{span}))")
        places: dict[str, str] = {}
        for series in sorted(self._now(self._last(m.TRAINING_RANK_INFO)), key=lambda one: one.points[0][0]):
            if "rank" in series.labels:
                texts = (series.labels.get("host", ""), series.labels.get("uuid", ""))
                places[series.labels["rank"]] = ", ".join(filter(None, texts))
        outliers = []
        for series in sorted(late, key=lambda one: -one.points[0][1]):
            rank, share = series.labels["rank"], series.points[0][1] / all_points
            text = f"was the straggler in {share:.1%} of the run, at {cost.get(rank, 0.0):.1%} of a step"
            outliers.append(Outlier(f"rank {rank}", places.get(rank, ""), text))
        return outliers

    def links(self) -> list[Outlier]:
        """Return the ports of the run's hosts with the most symbol errors and lost links, at most MAX_OUTLIERS."""
        here, port = self._here(), "sum by (instance, device, port)"
        rows = ((m.INFINIBAND_SYMBOL_ERRORS_TOTAL, "symbol errors"), (m.INFINIBAND_LINK_DOWNED_TOTAL, "times down"))
        counts: dict[tuple[str, str, str], dict[str, float]] = {}
        for row, what in rows:
            query = f"topk({MAX_OUTLIERS}, ({port} (increase({row}[{self._window}])) and on (instance) {here}) >= 0.5)"
            for series in self._now(query):
                counts.setdefault(_port(series), {})[what] = series.points[0][1]
        if not counts:
            return []
        ports = f"group by (instance, device, port, host) (last_over_time({m.INFINIBAND_INFO}[{self._window}]))"
        hosts = {_port(one): one.labels.get("host", "") for one in self._now(f"{ports} and on (instance) {here}")}
        outliers = []
        for key, errors in sorted(counts.items(), key=lambda item: -sum(item[1].values()))[:MAX_OUTLIERS]:
            text = ", ".join(f"{count:,.0f} {what}" for what, count in errors.items())
            outliers.append(Outlier(f"{key[1]} port {key[2]}", hosts.get(key, key[0]), text))
        return outliers

    def missed(self, causes: Iterable[CauseTotal]) -> list[str]:
        """Return a sentence for each thing that monitoring missed of the run, such as ranks without MFU."""
        missed: list[str] = []
        starts = self.over(f"max by (run) ({m.RUN_START_TIMESTAMP_SECONDS}{self.ledger})")
        seen = sum(len(series.points) for series in starts)
        expected = int((self._end - self._begin) / self._step) + 1
        if seen < expected - 2:
            missed.append(
                f"For {(expected - seen) * self._step / 3600:.1f} h of the run this Prometheus has no sample of "
                "the ledger. The totals are complete, but the timeline is coarser there."
            )
        reasons = self._now(f"count by (reason) ({self._last(m.TRAINING_MFU_UNAVAILABLE)} == 1)")
        missed += [f"{one.points[0][1]:.0f} ranks had no MFU: {one.labels.get('reason', '')}." for one in reasons]
        ranks = self._count(f"group by (rank) ({self._last(m.TRAINING_RANK_INFO)})")
        if not ranks:
            missed.append("This Prometheus has no series of any rank, so MFU and stragglers are unknown.")
        waits = self._count(f"group by (rank) ({self._last(WAIT)})")
        if ranks and waits < ranks:
            missed.append(
                f"The wait for other ranks was measured on {waits:.0f} of {ranks:.0f} ranks. A straggler is named only "
                "if all are measured; docs/waits.md lists where that is possible."
            )
        reasons = self._now(f"count by (reason) ({self._last(m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE)} == 1)")
        missed += [
            f"{one.points[0][1]:.0f} ranks had no measured wait: {one.labels.get('reason', '')}." for one in reasons
        ]
        errors = self._value(f"sum(increase({m.TRAINING_HOOK_ERRORS_TOTAL}{self.training}[{self._window}]))")
        if errors is not None and errors >= 0.5:
            missed.append(f"The training hook swallowed {errors:.0f} errors; see the job's log.")
        success = f"avg_over_time({m.FLOPWATCH_COLLECTOR_SUCCESS}[{self._window}])"
        for one in self._now(f"avg by (collector) ({success} and on (instance) {self._here()}) < 0.999"):
            collector, failed = one.labels.get("collector", ""), 1 - one.points[0][1]
            missed.append(f"The collector {collector} failed {failed:.1%} of the time.")
        missed += [f"{one.incidents} losses have no known cause." for one in causes if one.cause == "unknown"]
        return missed

    def _total(self, family: object) -> str:
        """Return the PromQL expression for the run's last samples of a family of the ledger."""
        return f"last_over_time({family}{self.ledger}[{self._window}])"

    def _last(self, family: object) -> str:
        """Return the PromQL expression for the last samples of a family that the run's ranks report."""
        return f"last_over_time({family}{self.training}[{self._window}])"

    def _here(self) -> str:
        """Return the PromQL expression for the run's hosts, by the `instance` label of the exporter on each."""
        return f"group by (instance) ({self._last(m.TRAINING_RANK_INFO)})"

    def _value(self, query: str) -> float | None:
        return self._prometheus.value(query, self.at)

    def _values(self, label: str, query: str) -> dict[str, float]:
        return {series.labels[label]: series.points[0][1] for series in self._now(query)}

    def _count(self, query: str) -> float:
        return self._value(f"count({query})") or 0.0

    def _now(self, query: str) -> list[TimeSeries]:
        return [series for series in self._prometheus.query(query, self.at) if series.points]


def _port(series: TimeSeries) -> tuple[str, str, str]:
    return series.labels.get("instance", ""), series.labels.get("device", ""), series.labels.get("port", "")


def _spells(points: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return begin and end of each stretch of points that are at most `gap` seconds apart."""
    spells: list[tuple[float, float]] = []
    for time, _ in points:
        if spells and time - spells[-1][1] <= gap:
            spells[-1] = spells[-1][0], time
        else:
            spells.append((time, time))
    return spells


def _selector(labels: dict[str, str]) -> str:
    """Return a PromQL selector for `labels`."""
    return "{" + ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items()) + "}"
