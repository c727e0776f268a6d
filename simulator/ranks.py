"""Ranks of one simulated job, step by step, and the series that hook and exporter serve for them.

A step ends for all ranks at once, when the last of them reaches the collectives. A rank waits for the part of the step
in which it is not busy. The job has two hosts of eight GPUs. Its measurements are noisy through jitter, garbage
collection, network delays, checkpoints, evaluations, pushes out of phase, clock skew and failed scrapes. Communication
that overlaps with computation is not simulated.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.node.telemetry.process_exit import BLOCKED
from flopwatch.training.process.stuck_frames import AFTER, AFTER_STEPS, MIN_COVERED
from flopwatch.training.totals import DURATION_BOUNDS

INTERVAL = 15.0  # seconds between two scrapes
PUSH = 5.0  # seconds between two pushes of a rank
RANK_TIMEOUT = 300.0  # seconds without a push after which the exporter drops a rank
HOSTS, PER_HOST = 2, 8
RANKS = HOSTS * PER_HOST
TOKENS = 4096.0  # per rank and step
COLLECTIVES = 4  # per step, in the default process group
WATTS, WAITING_WATTS, IDLE_WATTS = 640.0, 210.0, 75.0
CLOCK = 1980e6
STALE = "stale"

Values = list[float | str | None]  # one per scrape; None: no sample
Series = tuple[str, dict[str, str]]
Labels = tuple[tuple[str, str], ...]
SeriesValues = dict[tuple[str, Labels], Values]
RankSample = tuple[Metric, str, Labels, float]  # family, suffix of the name, labels, value


@dataclass(frozen=True)
class CardSymptoms:
    """Symptoms of a job's trouble that the metrics of one rank's GPU show."""

    throttled: Mapping[str, float] = field(default_factory=dict)  # reason to share of time
    clock: float = 1.0  # of the highest
    power_limit: float = 1.0  # of the default
    lanes: int = 16
    xid: str = ""
    lost: bool = False


def no_delay(rank: int, step: int, t: float) -> float:
    """Return a delay of 0 for every rank and step."""
    return 0.0


WELL = CardSymptoms()


@dataclass(frozen=True)
class Trouble:
    """Trouble of a job from `at` seconds on: slow ranks, a hang, or failing hardware.

    Sets contain ranks, except `dark` (hosts) and `links` (pairs of host and port).
    """

    at: float = inf
    slow: Callable[[int, int, float], float] = no_delay  # rank, step and time to the delay, as a share of a step
    loading: bool = False  # the delay is in the data loader
    collecting: bool = False  # the delay is garbage collection
    network: float = 1.0  # factor on the time of collectives
    tokens: Mapping[int, float] = field(default_factory=dict)  # rank to factor on its tokens
    stages: tuple[float, ...] = (1.0,)  # relative work of each pipeline stage
    unmeasured: frozenset[int] = frozenset()
    cards: Mapping[int, CardSymptoms] = field(default_factory=dict)
    # A hang, or what looks like a hang:
    hangs: bool = False
    declared: str = ""  # the activity that all ranks enter then, for `lasts` seconds
    lasts: float = 0.0
    behind: frozenset[int] = frozenset()  # have not started the collective that the other ranks are in
    silent: frozenset[int] = frozenset()  # their processes do not push
    without_data: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()  # their processes ended
    idle: frozenset[int] = frozenset()  # nothing runs on their GPUs
    computing: frozenset[int] = frozenset()  # a kernel on their GPUs does not end
    elsewhere: frozenset[int] = frozenset()  # at another line of code than the other ranks
    blocked: str = ""  # process state of the ranks in `behind`
    uncounted: bool = False  # collectives are not counted
    dark: frozenset[int] = frozenset()  # hosts whose exporter does not answer
    links: frozenset[tuple[int, int]] = frozenset()  # host and port of each link that is down


def utilization(rng: random.Random) -> float:
    """Return the utilization of a GPU on which a kernel runs. A reading may fall between two kernels."""
    return 0.0 if rng.random() < 0.005 else rng.uniform(0.9, 1.0)


class Segment(NamedTuple):
    """A period in which all ranks have the same activity.

    A step also has the delays of slow ranks in seconds and, if it is measured, the wait of each rank.
    """

    begin: float
    end: float
    activity: str
    late: Mapping[int, float] = {}
    waits: tuple[float, ...] | None = None


class RankTotals:
    """Totals that the hook of one rank has added up over completed segments."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("startup", "step", "data_stall", "checkpoint_save", "evaluation", "compile"), 0.0)
        self.wait = self.measured = self.collected = self.in_steps = 0.0
        self.steps = self.measured_steps = 0
        self.measured_tokens = self.squares = 0.0
        self.counts = [0] * (len(DURATION_BOUNDS) + 1)
        self.last: float | None = None  # end of the last step, by the clock of the host

    def add(self, segment: Segment, rank: int, trouble: Trouble, skew: float) -> None:
        """Add a completed segment to the totals of `rank`, whose host's clock is `skew` seconds fast."""
        begin, end, activity, late, waits = segment
        stalled = late.get(rank, 0.0) if trouble.loading else 0.0
        self.seconds[activity] += end - begin - stalled
        self.seconds["data_stall"] += stalled
        if activity == "step":
            self.steps, self.last = self.steps + 1, end + skew
            self.in_steps += end - begin
            self.counts[bisect_left(DURATION_BOUNDS, end - begin)] += 1
            if waits is not None:
                self.wait, self.measured = self.wait + waits[rank], self.measured + end - begin
                self.measured_steps += 1
                self.squares += (end - begin - waits[rank]) ** 2
                self.measured_tokens += TOKENS * trouble.tokens.get(rank, 1.0)
                self.collected += late.get(rank, 0.0) if trouble.collecting else 0.0


class SynchronousJob:
    """A job of 16 ranks that runs for `seconds` with a trouble. The same seed gives the same job."""

    def __init__(self, name: str, seed: str, trouble: Trouble, seconds: float) -> None:
        self.name, self.trouble, self.seconds = name, trouble, seconds
        self._rng = rng = random.Random(seed)
        # Of its own, so that each step has the same noise in a job without the trouble.
        self._schedule = random.Random(f"{seed} schedule")
        self.step_seconds = rng.uniform(0.8, 4.0)
        self.has_cards = bool(trouble.cards or trouble.links or trouble.uncounted) or rng.random() < 0.8
        self._phases = [rng.uniform(0, PUSH) for _ in range(RANKS)]
        self._skews = [rng.gauss(0, 0.2) for _ in range(HOSTS)]
        self._in_flight = rng.randrange(COLLECTIVES)
        self.scrapes = [INTERVAL * number for number in range(int(seconds / INTERVAL) + 1)]
        # Noise on ranks without trouble: lost pushes, an Xid that a program caused, a port that flaps.
        self._lost_pushes = rng.randrange(RANKS), (since := rng.uniform(0, seconds)), since + rng.uniform(10, 40)
        self._noisy = {what: rng.randrange(RANKS) if rng.random() < 0.3 else None for what in ("xid", "flap")}
        self._failed = [[rng.random() < 0.005 for _ in self.scrapes] for _ in range(HOSTS)]
        self._cards: dict[int, SeriesValues] = {}
        self._infos = [self._info(rank) for rank in range(RANKS)]
        self.segments = list(self._run())

    def _run(self) -> Iterator[Segment]:
        """Yield the segments of the run in order. A hang is a last step with an infinite end."""
        rng, trouble, schedule = self._rng, self.trouble, self._schedule
        jitter, network = rng.uniform(0.01, 0.04), rng.uniform(0.05, 0.2)
        every = 1
        while every * self.step_seconds < 0.5:
            every *= 2
        t, step, mean, disturbed = rng.uniform(5, 25), 0, 0.0, True
        yield Segment(0.0, t, "startup")
        checkpoint, evaluation = t + schedule.uniform(40, 180), t + schedule.uniform(100, 600)
        declared = False
        while t < self.seconds:
            if t >= trouble.at and trouble.declared and not declared:
                declared = disturbed = True
                yield Segment(t, t + trouble.lasts, trouble.declared)
                t += trouble.lasts
            if t >= trouble.at and trouble.hangs:
                yield Segment(t, inf, "step")
                return
            if t >= min(checkpoint, evaluation):
                took, saves = schedule.uniform(3, 20), checkpoint <= evaluation
                yield Segment(t, t + took, "checkpoint_save" if saves else "evaluation")
                t, disturbed = t + took, True
                if saves:
                    checkpoint = t + schedule.uniform(120, 300)
                else:
                    evaluation = t + schedule.uniform(200, 900)
            busy, late = self._busy(step, t, jitter)
            took = network * self.step_seconds * rng.lognormvariate(0, 0.15)
            took *= trouble.network if t >= trouble.at else 1.0
            if rng.random() < 0.01:
                took *= rng.uniform(2, 6)
            duration = max(busy) + took
            # The hook does not measure a step next to a checkpoint, nor one that took more than twice the mean.
            measured = step % every == 0 and not disturbed and step > 2 and duration <= 2 * mean
            mean += (duration - mean) / min(step + 1, 100)
            waits = tuple((duration - seconds) * rng.uniform(0.97, 1.0) for seconds in busy)
            yield Segment(t, t + duration, "step", late, waits if measured else None)
            t, step, disturbed = t + duration, step + 1, False

    def _busy(self, step: int, t: float, jitter: float) -> tuple[list[float], dict[int, float]]:
        """Return the busy seconds of each rank in a step, and the delay that they include for each slow rank."""
        rng, trouble = self._rng, self.trouble
        per_stage = RANKS // len(trouble.stages)
        busy = [
            self.step_seconds
            * trouble.stages[rank // per_stage]
            * trouble.tokens.get(rank, 1.0)
            * rng.lognormvariate(0, jitter)
            for rank in range(RANKS)
        ]
        if rng.random() < 0.05:  # garbage collection on one rank
            busy[rng.randrange(RANKS)] += rng.uniform(0.05, 0.3)
        late = {}
        if t >= trouble.at:
            shares = ((rank, trouble.slow(rank, step, t)) for rank in range(RANKS))
            late = {rank: self.step_seconds * share for rank, share in shares if share > 0}
            for rank, seconds in late.items():
                busy[rank] += seconds
        return busy, late

    def series(self) -> Iterator[tuple[Series, Values]]:
        """Yield every series that Prometheus would have, with its values at all scrapes."""
        for rank in range(RANKS):
            target = {"job": "flopwatch", "instance": self._instance(rank // PER_HOST)}
            found = self._rank(rank)
            found |= self.card(rank)
            for (name, labels), values in found.items():
                yield (name, {**target, **dict(labels)}), self._scraped(rank // PER_HOST, values)
        for host in range(HOSTS):
            down = self.silence(host)
            yield ("up", {"job": "flopwatch", "instance": self._instance(host)}), [float(not failed) for failed in down]

    def silence(self, host: int) -> list[bool]:
        """Return whether the scrape of a host fails, for each scrape in order of time."""
        dark = host in self.trouble.dark
        return [
            failed or (dark and t >= self.trouble.at)
            for failed, t in zip(self._failed[host], self.scrapes, strict=True)
        ]

    def _scraped(self, host: int, values: Values) -> Values:
        """Return the values that Prometheus stores of a host's series.

        The series becomes stale when a scrape fails, or when the series is not in the scrape.
        """
        scraped: Values = []
        there = False
        for value, failed in zip(values, self.silence(host), strict=True):
            if value is None or failed:
                scraped.append(STALE if there else None)
                there = False
            else:
                scraped.append(value)
                there = True
        return scraped

    def pushed(self, rank: int, t: float) -> float | None:
        """Return the time of a rank's newest push at scrape time `t`, or None if the exporter does not serve it."""
        trouble = self.trouble
        if rank in trouble.gone and t >= trouble.at:
            return None
        newest = self._push(rank, t)
        lost, since, until = self._lost_pushes
        if rank == lost and since <= newest < until:
            newest = self._push(rank, since)
        if rank in trouble.silent and newest >= trouble.at:
            newest = self._push(rank, trouble.at)
            if t - newest > RANK_TIMEOUT:
                return None
        return newest if newest >= 0 else None

    def _push(self, rank: int, t: float) -> float:
        return t - (t - self._phases[rank]) % PUSH

    def _rank(self, rank: int) -> SeriesValues:
        """Return the series of a rank's hook as the exporter serves them."""
        found: SeriesValues = {}
        totals, at = RankTotals(), 0
        for number, t in enumerate(self.scrapes):
            now = self.pushed(rank, t)
            if now is None:
                continue
            while self.segments[at].end <= now:
                totals.add(self.segments[at], rank, self.trouble, self._skews[rank // PER_HOST])
                at += 1
            samples = [*self.rank_samples(rank, t, now, totals, self.segments[at])]
            if rank == 0:
                samples += self._run_samples(totals)
            for row, suffix, labels, value in samples:
                found.setdefault((row.name + suffix, labels), [None] * len(self.scrapes))[number] = value
        return found

    def stage(self, rank: int) -> str:
        """Return the pipeline stage of a rank, empty without a pipeline."""
        stages = len(self.trouble.stages)
        return str(rank // (RANKS // stages)) if stages > 1 else ""

    def _info(self, rank: int) -> Labels:
        host, local = divmod(rank, PER_HOST)
        stages = len(self.trouble.stages)
        values = {
            "run": self.name,
            "rank": str(rank),
            "host": self.host(host),
            "uuid": self.uuid(rank) if self.has_cards else "",
            "local_rank": str(local),
            "attempt": "1",
            "dp": str(rank % (RANKS // stages)),
            "pp": self.stage(rank),
        }
        return tuple((label, values[label]) for label in m.TRAINING_RANK_INFO.labels if values.get(label))

    def rank_samples(
        self, rank: int, t: float, now: float, totals: RankTotals, segment: Segment
    ) -> Iterator[RankSample]:
        """Yield the samples of a rank at scrape time `t`. Its newest push, at `now`, is in this segment."""
        yield from self.state_samples(rank, now, totals, segment)
        trouble = self.trouble
        own = (("run", self.name), ("rank", str(rank)))
        age = now - segment.begin
        yield m.TRAINING_TOKENS_TOTAL, "", own, totals.steps * TOKENS * trouble.tokens.get(rank, 1.0)
        if segment.end == inf and age > max(AFTER, AFTER_STEPS * self.step_seconds) + MIN_COVERED:
            line = 88 if rank in trouble.elsewhere else 120 + rank // (RANKS // len(trouble.stages))
            yield m.TRAINING_STUCK_FRAME_INFO, "", (*own, ("at", f"train.py:{line} in train")), 1.0
        for state in BLOCKED.values():
            since = trouble.at if rank in trouble.behind and state == trouble.blocked else inf
            yield m.HOST_PROCESS_BLOCKED_SECONDS, "", (*own, ("state", state)), max(0.0, t - since)
        if totals.last is not None:
            yield m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS, "", own, totals.last
        if rank not in trouble.unmeasured:
            yield m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, "", own, totals.wait
            yield m.TRAINING_MEASURED_STEP_SECONDS_TOTAL, "", own, totals.measured
            yield m.TRAINING_MEASURED_STEPS_TOTAL, "", own, float(totals.measured_steps)
            yield m.TRAINING_PHASE_SECONDS_TOTAL, "", (*own, ("phase", "garbage_collection")), totals.collected

    def state_samples(self, rank: int, now: float, totals: RankTotals, segment: Segment) -> Iterator[RankSample]:
        """Yield the samples of a rank that show what it does, as of its push at `now` in this segment."""
        trouble = self.trouble
        own = (("run", self.name), ("rank", str(rank)))
        begin, end, activity, late, _ = segment
        age = now - begin
        opened = {activity: age}
        started = totals.steps * COLLECTIVES
        if activity == "step":
            stalled = min(age, late.get(rank, 0.0)) if trouble.loading else 0.0
            stalled = age if end == inf and rank in trouble.without_data else stalled
            opened = {"step": age - stalled, "data_stall": stalled}
            started += (
                self._in_flight + (rank not in trouble.behind) if end == inf else int(COLLECTIVES * age / (end - begin))
            )
        yield m.TRAINING_RANK_INFO, "", self._infos[rank], 1.0
        for name, so_far in totals.seconds.items():
            yield m.TRAINING_ACTIVITY_SECONDS_TOTAL, "", (*own, ("activity", name)), so_far + opened.get(name, 0.0)
        yield m.TRAINING_STEPS_TOTAL, "", own, float(totals.steps)
        if not trouble.uncounted:
            yield m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, "", own, float(started)

    def _run_samples(self, totals: RankTotals) -> Iterator[RankSample]:
        """Yield the samples that describe the whole run, which only rank 0 has."""
        run = (("run", self.name),)
        yield m.TRAINING_WORLD_SIZE, "", run, float(RANKS)
        yield m.TRAINING_STEP_DURATION_SECONDS, "_sum", run, totals.in_steps
        yield m.TRAINING_STEP_DURATION_SECONDS, "_count", run, float(sum(totals.counts))
        below = 0
        for bound, count in zip((*DURATION_BOUNDS, inf), totals.counts, strict=True):
            below += count
            le = "+Inf" if bound == inf else f"{bound:g}"
            yield m.TRAINING_STEP_DURATION_SECONDS, "_bucket", (*run, ("le", le)), float(below)

    def card(self, rank: int) -> SeriesValues:
        """Return the series of a rank's GPU and its network port, none if the job has no cards."""
        if not self.has_cards:
            return {}
        if rank not in self._cards:
            self._cards[rank] = self._card(rank)
        return self._cards[rank]

    def _card(self, rank: int) -> SeriesValues:
        trouble, host, local = self.trouble, *divmod(rank, PER_HOST)
        shown = trouble.cards.get(rank, WELL)
        gpu = (("gpu", str(local)), ("uuid", self.uuid(rank)))
        port = (("device", f"mlx5_{local}"), ("port", "1"))
        rng = random.Random(f"{self.name} card {rank}")
        hung_at = self.segments[-1].begin if self.segments[-1].end == inf else inf
        found: SeriesValues = {}
        tensor = sent = 0.0
        held = dict.fromkeys(("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown"), 0.0)

        def put(row: Metric, value: float | None, labels: Labels = gpu) -> None:
            found.setdefault((row.name, labels), []).append(value)

        for t in self.scrapes:
            sick, hung = t >= trouble.at, t >= hung_at
            lost = sick and shown.lost
            idle = hung and rank in trouble.idle
            waits = hung and rank not in trouble.computing
            tensor += 0.0 if waits else INTERVAL * rng.uniform(0.35, 0.45)
            sent += 0.0 if hung else INTERVAL * rng.uniform(9e9, 11e9)
            for reason in held:
                share = shown.throttled.get(reason, 0.0) if sick else 0.0
                held[reason] += INTERVAL * min(1.0, share * rng.uniform(0.8, 1.2))
            put(
                m.GPU_INFO,
                1.0,
                (*gpu, ("host", self.host(host)), ("model", "NVIDIA H100 80GB HBM3"), ("source", "simulated")),
            )
            put(m.GPU_PRESENT, 0.0 if lost else 1.0)
            busy = 0.0 if idle else utilization(rng)
            put(m.GPU_UTILIZATION_RATIO, None if lost else busy)
            watts = IDLE_WATTS if idle else WAITING_WATTS if waits else WATTS * (shown.power_limit if sick else 1.0)
            put(m.GPU_POWER_WATTS, None if lost else round(watts * rng.uniform(0.95, 1.0), 1))
            put(m.GPU_SM_CLOCK_HERTZ, None if lost else CLOCK * (shown.clock if sick else 1.0))
            put(m.GPU_POWER_LIMIT_WATTS, None if lost else 700.0 * (shown.power_limit if sick else 1.0))
            put(m.GPU_POWER_LIMIT_DEFAULT_WATTS, None if lost else 700.0)
            put(m.GPU_PCIE_WIDTH_LANES, None if lost else float(shown.lanes if sick else 16))
            put(m.GPU_PCIE_WIDTH_MAX_LANES, None if lost else 16.0)
            put(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, None if lost else tensor)
            put(m.GPU_PROFILED_SECONDS_TOTAL, None if lost else t)
            for reason, seconds in held.items():
                put(m.GPU_CLOCK_EVENT_SECONDS_TOTAL, None if lost else seconds, (*gpu, ("reason", reason)))
            if self._noisy["xid"] == rank:
                put(m.GPU_XID_LAST_TIMESTAMP_SECONDS, 150.0 if t > 150 else None, (*gpu, ("xid", "31")))
                put(m.GPU_XID_INFO, 1.0 if t > 150 else None, (("xid", "31"), ("severity", "error")))
            if shown.xid:
                put(m.GPU_XID_LAST_TIMESTAMP_SECONDS, trouble.at if sick else None, (*gpu, ("xid", shown.xid)))
                put(m.GPU_XID_INFO, 1.0 if sick else None, (("xid", shown.xid), ("severity", "critical")))
            put(m.INFINIBAND_INFO, 1.0, (*port, ("host", self.host(host)), ("role", "compute"), ("rail", str(local))))
            down = (sick and (host, local) in trouble.links) or (self._noisy["flap"] == rank and 100 < t < 150)
            put(m.INFINIBAND_PORT_STATE_ID, 1.0 if down else 4.0, port)
            put(m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL, sent, port)
        return found

    def uuid(self, rank: int) -> str:
        """Return the UUID of a rank's GPU."""
        return f"GPU-{self.name}-{rank}"

    def host(self, host: int) -> str:
        """Return the name of a host, unique among jobs."""
        return f"{self.name}-node-{host}"

    def _instance(self, host: int) -> str:
        return f"{self.host(host)}:9450"
