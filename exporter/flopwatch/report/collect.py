"""What a report says of one run, asked of a Prometheus that has the ledger's series and, for more, the recorded ones.

Each loss with its place is in no series, since there would be one for each: that is asked of the ledger itself.
Absent series leave absent figures: each says what it would have needed. Nothing is estimated in its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flopwatch import catalogue as m
from flopwatch.ledger.client import Client
from flopwatch.report.prometheus import Prometheus, Series
from flopwatch.report.statistics import Interval, Mean, checkpoint_interval, mean_time_between
from flopwatch.settings import SettingsError

# Made by alerts/recording; a test compares.
RUN_MFU = "run:training_mfu:ratio_rate5m"
RUN_SCORE = "run:training_straggler:score"
LEADER = "rank:training_straggler:leader"
WAIT = "rank:training_collective_wait:ratio"

WORST = 10  # of ranks, hosts and links
SLICES = 600  # of the timeline
FINEST = 1.0  # seconds between the points asked for, at least
OPEN, GOOD = "open", ("productive", "generation")


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the run's wall clock, in Unix time, and what its seconds went to, by bucket."""

    begin: float
    end: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Firing:
    """An alert on the run or on one of its hosts, from one moment to another."""

    name: str
    severity: str
    place: str
    began: float
    ended: float
    ongoing: bool


@dataclass(frozen=True, slots=True)
class Cause:
    """Losses by what caused them, as the ledger settled them."""

    cause: str
    incidents: int
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the ledger tells of it, by itself; until it is settled what it cost and its cause may change."""

    began: float
    back: float | None  # when the run made a new step again
    what: str  # how the attempt ended, or that it was slow or stood still
    cause: str
    confidence: str
    host: str
    part: str  # GPU and port
    why: str
    gpu_seconds: float
    settled: bool


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank, a host or a port, where it is, and what speaks against it."""

    name: str
    place: str
    finding: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How often the run saved."""

    commits: int
    committed_step: float | None
    blocking_seconds: float  # of one save
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Times are Unix time or seconds, ratios 0 to 1; None is what nobody knows."""

    run: str
    tenant: str
    made_at: float
    state: str
    began: float
    ended: float
    gpus: float | None
    host_count: int | None
    wall_seconds: float
    queue_seconds: float | None
    buckets: dict[str, float]
    gpu_seconds: dict[str, float]
    open_seconds: float
    provisional_seconds: float | None
    mfu: float | None
    effective_mfu: float | None
    goodput: float | None
    ettr: float | None
    attempts: int
    ends: dict[str, int]
    high_water_step: float | None
    mttf: Mean
    mttr_seconds: float | None
    recoveries: int
    checkpoints: Checkpoints
    declared: dict[str, str]
    timeline: list[Slice]
    mfu_over_time: list[tuple[float, float]]
    causes: list[Cause]
    losses: list[Loss] | None  # None where no ledger was asked
    alerts: list[Firing]
    ranks: list[Culprit]
    hosts: list[Culprit]
    links: list[Culprit]
    missed: list[str]
    price: float | None = None  # of a GPU-hour

    def lost_gpu_seconds(self) -> float:
        """Return the GPU-seconds held that made no progress, those nobody has accounted for yet left out."""
        return sum(seconds for bucket, seconds in self.gpu_seconds.items() if bucket not in GOOD)


def gather(
    prometheus: Prometheus,
    run: str,
    *,
    tenant: str | None,
    at: float,
    lookback: float,
    price: float | None = None,
    ledger: Client | None = None,
) -> Report:
    """Return the report of a run as of a moment, looking back so many seconds. Raises SettingsError."""
    asked = _Asked(prometheus, run, tenant, at, lookback)
    began, tenant = asked.start()
    losses = None if ledger is None else _losses(ledger.record(run, tenant))
    buckets, gpu_seconds = asked.by("bucket", m.RUN_SECONDS), asked.by("bucket", m.RUN_GPU_SECONDS)
    states = asked.by("state", m.RUN_STATE)
    state = next((name for name, on in states.items() if on == 1), "unknown")
    queue = buckets.pop("queue", None)
    booked = sum(buckets.values())
    over = state in ("completed", "stopped")
    open_seconds = 0.0 if over else asked.one(m.RUN_OPEN_SECONDS) or 0.0
    ended = began + booked + open_seconds
    wall = ended - began
    asked.span(began, ended)
    done = sum(buckets.get(bucket, 0.0) for bucket in GOOD) if any(bucket in buckets for bucket in GOOD) else None
    ends = {name: round(count) for name, count in asked.by("status", m.RUN_ENDS).items() if count}
    running = booked - buckets.get("down", 0.0)
    mttf = mean_time_between(running, ends.get("failed", 0) + ends.get("silent", 0))
    recoveries, recovery = asked.one(m.RUN_RECOVERIES), asked.one(m.RUN_RECOVERY_SECONDS)
    mttr = recovery / recoveries if recoveries and recovery is not None else None
    flops, capacity = asked.one(m.RUN_MODEL_FLOPS), asked.one(m.RUN_CAPACITY_FLOPS)
    commits = round(asked.changes(m.RUN_COMMITTED_STEPS))
    blocking = buckets.get("checkpoint_save", 0.0) / commits if commits else 0.0
    alerts = asked.alerts(tenant)
    causes = asked.causes()
    return Report(
        run=run,
        tenant=tenant,
        made_at=at,
        state=state,
        began=began,
        ended=ended,
        gpus=asked.one(m.RUN_GPUS),
        host_count=len(asked.hosts()) or None,
        wall_seconds=wall,
        queue_seconds=queue,
        buckets=buckets,
        gpu_seconds=gpu_seconds,
        open_seconds=open_seconds,
        provisional_seconds=asked.one(m.RUN_PROVISIONAL_SECONDS),
        mfu=asked.mean(RUN_MFU),
        effective_mfu=flops / capacity if flops is not None and capacity else None,
        goodput=done / wall if done is not None and wall > 0 else None,
        ettr=done / (wall + queue) if done is not None and queue is not None and wall > 0 else None,
        attempts=round(asked.one(m.RUN_ATTEMPTS) or 0),
        ends=ends,
        high_water_step=asked.one(m.RUN_POSITION_STEPS),
        mttf=mttf,
        mttr_seconds=mttr,
        recoveries=round(recoveries or 0),
        checkpoints=Checkpoints(
            commits,
            asked.one(m.RUN_COMMITTED_STEPS),
            blocking,
            checkpoint_interval(running / commits, blocking, mttf.seconds, mttr or 0.0)
            if commits and mttf.seconds is not None
            else None,
        ),
        declared=asked.declared(),
        timeline=asked.timeline(began, open_seconds),
        mfu_over_time=[
            point for series in asked.over(f"max by (run) ({RUN_MFU}{asked.training})") for point in series.points
        ],
        causes=causes,
        losses=losses,
        alerts=alerts,
        ranks=asked.ranks(),
        hosts=_hosts(alerts, losses or ()),
        links=asked.links(),
        missed=asked.missed(causes),
        price=price,
    )


class _Asked:
    """What is asked of a Prometheus for one run, in the order in which the answers are needed."""

    def __init__(self, prometheus: Prometheus, run: str, tenant: str | None, at: float, lookback: float) -> None:
        self._prometheus, self._run, self._at, self._window = prometheus, run, at, f"{max(1, round(lookback))}s"
        named = {"run": run} if tenant is None else {"run": run, "tenant": tenant}
        self.ledger, self.training = _selector(named), _selector({"run": run})
        self._begin, self._end, self._step = at - lookback, at, FINEST
        self._hosts: list[str] | None = None

    def start(self) -> tuple[float, str]:
        """Return when the run began, and its tenant. Raises SettingsError."""
        found = self._now(f"max by (tenant) (last_over_time({m.RUN_START}{self.ledger}[{self._window}]))")
        if not found:
            raise SettingsError(
                f"there is no run {self._run!r} with series of the ledger ({m.RUN_START}) in the last {self._window}; "
                "is its name right, and does this Prometheus scrape the ledger? A longer --lookback may find it"
            )
        tenants = sorted(series.labels.get("tenant", "") for series in found)
        if len(found) > 1:
            raise SettingsError(f"run {self._run!r} is a run of several tenants; write --tenant {' or '.join(tenants)}")
        self.ledger = _selector({"run": self._run, "tenant": tenants[0]})
        return found[0].points[0][1], tenants[0]

    def span(self, begin: float, end: float) -> None:
        """Ask for this time from here on."""
        self._begin, self._end = max(begin, self._begin), max(begin + 1, min(self._at, end + 60))
        self._step = max(FINEST, (self._end - self._begin) / SLICES)
        self._window = f"{max(60, round(self._at - self._begin))}s"

    def one(self, row: m.Metric) -> float | None:
        """Return the only value of a family of the run, the last there was."""
        return self._prometheus.value(f"max(last_over_time({row}{self.ledger}[{self._window}]))", self._at)

    def by(self, label: str, row: m.Metric) -> dict[str, float]:
        """Return the last values of a family of the run by one label."""
        found = self._now(f"max by ({label}) (last_over_time({row}{self.ledger}[{self._window}]))")
        return {series.labels[label]: series.points[0][1] for series in found}

    def mean(self, record: str) -> float | None:
        """Return the mean of a record of the run over its time."""
        return self._prometheus.value(f"max(avg_over_time({record}{self.training}[{self._window}]))", self._at)

    def changes(self, row: m.Metric) -> float:
        """Return how often a gauge of the run rose from one value to another."""
        ranged = f"({row}{self.ledger}[{self._window}])"
        try:
            # VictoriaMetrics' changes() counts a series' first sample, too; Prometheus has none of this name.
            return self._prometheus.value(f"max(changes_prometheus{ranged})", self._at) or 0.0
        except SettingsError:
            return self._prometheus.value(f"max(changes{ranged})", self._at) or 0.0

    def over(self, query: str) -> list[Series]:
        """Return what a query gives over the run's time."""
        return self._prometheus.over(query, self._begin, self._end, self._step)

    def declared(self) -> dict[str, str]:
        """Return what the run declared of itself: convention, dtype, where the peak is from, owner."""
        found = self._now(f"topk(1, {self._last(m.TRAINING_RUN_INFO)})")
        shown = ("convention", "dtype", "flops_source", "peak_source", "framework", "owner", "team", "external_id")
        return {name: found[0].labels[name] for name in shown if found[0].labels.get(name)} if found else {}

    def hosts(self) -> list[str]:
        """Return the hosts that ran ranks of the run."""
        if self._hosts is None:
            found = self._now(f"group by (host) ({self._last(m.TRAINING_RANK_INFO)})")
            self._hosts = sorted(series.labels.get("host", "") for series in found)
        return self._hosts

    def timeline(self, began: float, open_seconds: float) -> list[Slice]:
        """Return what the wall clock went to, a slice for each time the ledger booked something.

        Buckets partition the wall clock up to what is booked, so what was booked between two samples lies between the
        two sums: two hours of down time that are booked at once, at the restart, are shown as the two hours they were.
        """
        found = {
            series.labels["bucket"]: dict(series.points)
            for series in self.over(f"max by (bucket) ({m.RUN_SECONDS}{_selector({}, self.ledger, exclude='queue')})")
        }
        times = sorted({time for points in found.values() for time in points})
        before: dict[str, float] = dict.fromkeys(found, 0.0)
        slices: list[Slice] = []
        at = began
        for time in times:
            # Not below what was there: a ledger that lost its file began anew.
            now = {bucket: max(points.get(time, before[bucket]), before[bucket]) for bucket, points in found.items()}
            seconds = {bucket: now[bucket] - before[bucket] for bucket in found if now[bucket] > before[bucket]}
            if seconds:
                slices.append(Slice(at, at + sum(seconds.values()), seconds))
                at, before = slices[-1].end, now
        if open_seconds > 0:
            slices.append(Slice(at, at + open_seconds, {OPEN: open_seconds}))
        return slices

    def causes(self) -> list[Cause]:
        """Return the losses by cause, the costliest first."""
        counts, seconds = self._by_cause(m.RUN_INCIDENTS), self._by_cause(m.RUN_BADPUT_GPU_SECONDS)
        found = [Cause(cause, round(count), seconds.get(cause, 0.0)) for cause, count in counts.items() if count]
        return sorted(found, key=lambda cause: -cause.gpu_seconds)

    def _by_cause(self, row: m.Metric) -> dict[str, float]:
        """Return the last values of losses of every kind by cause."""
        each = f"max by (kind, cause) (last_over_time({row}{self.ledger}[{self._window}]))"
        return {series.labels["cause"]: series.points[0][1] for series in self._now(f"sum by (cause) ({each})")}

    def alerts(self, tenant: str) -> list[Firing]:
        """Return the alerts that fired on the run, or on a host while it ran there, in order of time."""
        # Over a window, so that none is missed that was over before the next point that is asked for.
        window = max(self._step, 60)
        on_run = f"last_over_time(ALERTS{_selector({'run': self._run, 'alertstate': 'firing'})}[{window:.0f}s])"
        on_host = (
            f'last_over_time(ALERTS{{alertstate="firing",run="",host!=""}}[{window:.0f}s]) and on (host) '
            f"group by (host) (last_over_time({m.TRAINING_RANK_INFO}{self.training}[10m]))"
        )
        found: list[Firing] = []
        for series in (*self.over(on_run), *self.over(on_host)):
            if series.labels.get("tenant", tenant) != tenant:
                continue
            place = ", ".join(
                f"{name} {series.labels[name]}"
                for name in ("host", "device", "port", "uuid", "xid", "rank")
                if series.labels.get(name)
            )
            for began, ended in _spells(series.points, 2.5 * window):
                found.append(
                    Firing(
                        series.labels.get("alertname", ""),
                        series.labels.get("severity", ""),
                        place,
                        began,
                        ended,
                        ended > self._at - 2.5 * window,
                    )
                )
        return sorted(found, key=lambda firing: (firing.began, firing.name))

    def ranks(self) -> list[Culprit]:
        """Return the ranks that were late most often."""
        late = self._now(f"topk({WORST}, max by (rank) (count_over_time({LEADER}{self.training}[{self._window}])))")
        asked = self._prometheus.value(f"max(count_over_time({RUN_SCORE}{self.training}[{self._window}]))", self._at)
        cost = {
            series.labels["rank"]: series.points[0][1]
            for series in self._now(f"max by (rank) (avg_over_time({LEADER}{self.training}[{self._window}]))")
        }
        places = self._places()
        return [
            Culprit(
                f"rank {(rank := series.labels['rank'])}",
                places.get(rank, ""),
                f"was the latest in {series.points[0][1] / asked:.1%} of the run, at {cost.get(rank, 0.0):.1%} "
                f"of a step",
            )
            for series in sorted(late, key=lambda one: -one.points[0][1])
            if asked
        ]

    def _places(self) -> dict[str, str]:
        found = self._now(self._last(m.TRAINING_RANK_INFO))
        return {
            series.labels["rank"]: ", ".join(
                text for text in (series.labels.get("host", ""), series.labels.get("uuid", "")) if text
            )
            for series in sorted(found, key=lambda one: one.points[0][0])
            if "rank" in series.labels
        }

    def links(self) -> list[Culprit]:
        """Return the ports of the run's nodes with the most errors."""
        here, port = self._here(), "sum by (instance, device, port)"
        rows = ((m.INFINIBAND_SYMBOL_ERRORS, "symbol errors"), (m.INFINIBAND_LINK_DOWNED, "times down"))
        counts: dict[tuple[str, str, str], dict[str, float]] = {}
        for row, what in rows:
            query = f"topk({WORST}, ({port} (increase({row}[{self._window}])) and on (instance) {here}) >= 0.5)"
            for series in self._now(query):
                counts.setdefault(_port(series), {})[what] = series.points[0][1]
        if not counts:
            return []
        hosts = {
            _port(series): series.labels.get("host", "")
            for series in self._now(
                f"group by (instance, device, port, host) (last_over_time({m.INFINIBAND_INFO}[{self._window}])) "
                f"and on (instance) {here}"
            )
        }
        worst = sorted(counts.items(), key=lambda item: -sum(item[1].values()))[:WORST]
        return [
            Culprit(
                f"{key[1]} port {key[2]}",
                hosts.get(key, key[0]),
                ", ".join(f"{count:,.0f} {what}" for what, count in found.items()),
            )
            for key, found in worst
        ]

    def missed(self, causes: Iterable[Cause]) -> list[str]:
        """Return what the monitoring did not see of this run, a sentence each."""
        found: list[str] = []
        seen = sum(len(series.points) for series in self.over(f"max by (run) ({m.RUN_START}{self.ledger})"))
        asked = int((self._end - self._begin) / self._step) + 1
        if seen < asked - 2:
            found.append(
                f"For {(asked - seen) * self._step / 3600:.1f} h of the run this Prometheus has no sample of "
                "the ledger. Nothing is lost from the accounts, but the timeline is coarser there."
            )
        reasons = self._now(f"count by (reason) ({self._last(m.TRAINING_MFU_UNAVAILABLE)} == 1)")
        found += [
            f"{series.points[0][1]:.0f} ranks had no MFU: {series.labels.get('reason', '')}." for series in reasons
        ]
        ranks = self._count(f"group by (rank) ({self._last(m.TRAINING_RANK_INFO)})")
        if not ranks:
            found.append("No rank reported to this Prometheus: no MFU, no straggler could be seen.")
        waits = self._count(f"group by (rank) ({self._last(WAIT)})")
        if ranks and waits < ranks:
            found.append(
                f"The wait for other ranks was measured on {waits:.0f} of {ranks:.0f} ranks; without all of "
                "them no straggler is named (docs/stragglers.md says where it can be measured)."
            )
        errors = self._prometheus.value(
            f"sum(increase({m.TRAINING_HOOK_ERRORS}{self.training}[{self._window}]))", self._at
        )
        if errors is not None and errors >= 0.5:
            found.append(f"The training hook swallowed {errors:.0f} errors; the job's log says which.")
        failing = self._now(
            f"avg by (collector) (avg_over_time({m.COLLECTOR_SUCCESS}[{self._window}]) "
            f"and on (instance) {self._here()}) < 0.999"
        )
        found += [
            f"The collector {series.labels.get('collector', '')} failed {1 - series.points[0][1]:.1%} of the time."
            for series in failing
        ]
        unknown = next((cause for cause in causes if cause.cause == "unknown"), None)
        if unknown is not None:
            found.append(f"{unknown.incidents} losses have no known cause.")
        return found

    def _last(self, family: object) -> str:
        """Return a selector of the last samples of a family of the run's ranks."""
        return f"last_over_time({family}{self.training}[{self._window}])"

    def _here(self) -> str:
        """Return an expression of the run's nodes by `instance`: a node's exporter serves its ranks and its ports."""
        return f"group by (instance) ({self._last(m.TRAINING_RANK_INFO)})"

    def _count(self, query: str) -> float:
        return self._prometheus.value(f"count({query})", self._at) or 0.0

    def _now(self, query: str) -> list[Series]:
        return [series for series in self._prometheus.now(query, self._at) if series.points]


def _losses(record: Mapping[str, Any]) -> list[Loss]:
    """Return the losses of a ledger's record, in order of time."""
    return sorted(
        (
            Loss(
                one["began"],
                one["back"],
                one["status"] if one.get("kind", "end") == "end" else one["kind"],
                one["cause"],
                one["confidence"],
                one["host"],
                " ".join(one[name] for name in ("gpu", "port") if one[name]),
                one["why"],
                one["gpu_seconds"],
                one["settled"],
            )
            for one in record["incidents"]
        ),
        key=lambda loss: loss.began,
    )


def _hosts(alerts: Iterable[Firing], losses: Iterable[Loss]) -> list[Culprit]:
    """Return the hosts that cost most, and then those with the most alerts."""
    fired: dict[str, Counter[str]] = {}
    cost: dict[str, float] = {}
    for firing in alerts:
        for part in firing.place.split(", "):
            if part.startswith("host "):
                fired.setdefault(part.removeprefix("host "), Counter())[firing.name] += 1
    for loss in losses:
        if loss.host:
            cost[loss.host] = cost.get(loss.host, 0.0) + loss.gpu_seconds
    worst = sorted(
        fired.keys() | cost.keys(), key=lambda host: (-cost.get(host, 0.0), -fired.get(host, Counter()).total(), host)
    )[:WORST]
    return [
        Culprit(
            host,
            "",
            ", ".join(
                [
                    *([f"{cost[host] / 3600:,.1f} GPU-hours lost to it"] if host in cost else []),
                    *(f"{count} x {name}" for name, count in sorted(fired.get(host, Counter()).items())),
                ]
            ),
        )
        for host in worst
    ]


def _port(series: Series) -> tuple[str, str, str]:
    return series.labels.get("instance", ""), series.labels.get("device", ""), series.labels.get("port", "")


def _spells(points: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return from when to when there were points, where less than a gap lies between them."""
    spells: list[tuple[float, float]] = []
    for time, _ in points:
        if spells and time - spells[-1][1] <= gap:
            spells[-1] = spells[-1][0], time
        else:
            spells.append((time, time))
    return spells


def _selector(labels: dict[str, str], inside: str = "", exclude: str = "") -> str:
    """Return `{name="value",...}`, with what another selector has, and without one bucket."""
    parts = [inside[1:-1]] if inside else []
    parts += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items()]
    if exclude:
        parts.append(f'bucket!="{exclude}"')
    return "{" + ",".join(parts) + "}"
