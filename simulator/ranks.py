"""The ranks of one synchronous job, step by step, and what hook and exporter would tell of them at each scrape.

A step ends for all ranks at once, when the last of them has come to the collectives: a rank waits for as long as the
step takes and it is not busy itself. Simulated are two hosts of eight GPUs, with what makes such measurements noisy:
jitter, collections of garbage, a network that hiccups, checkpoints, evaluations, pushes out of phase, clocks that are
apart, failed scrapes. Not simulated is communication that overlaps with computation.
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
PUSH = 5.0  # and between two pushes of a rank
RANK_TIMEOUT = 300.0  # the exporter forgets a rank that has not pushed for so long
HOSTS, PER_HOST = 2, 8
RANKS = HOSTS * PER_HOST
TOKENS = 4096.0  # of a rank's step
COLLECTIVES = 4  # of a step, in the default process group
WATTS, WAITING_WATTS, IDLE_WATTS = 640.0, 210.0, 75.0
CLOCK = 1980e6
STALE = "stale"

Values = list[float | str | None]  # a scrape each; None: no sample
Series = tuple[str, dict[str, str]]
Labels = tuple[tuple[str, str], ...]
Found = dict[tuple[str, Labels], Values]


@dataclass(frozen=True)
class Card:
    """What its GPU shows of what is wrong with a rank."""

    throttled: Mapping[str, float] = field(default_factory=dict)  # by reason, the share of the time
    clock: float = 1.0  # of the highest
    power_limit: float = 1.0  # of the default
    lanes: int = 16
    xid: str = ""
    lost: bool = False


def nothing(rank: int, step: int, t: float) -> float:
    """Slow nobody down."""
    return 0.0


WELL = Card()


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a job from `at` on, by rank."""

    at: float = inf
    slow: Callable[[int, int, float], float] = nothing  # by rank, step and time: how much longer, in steps
    loading: bool = False  # what is slow is the loader
    collecting: bool = False  # or garbage is collected
    network: float = 1.0  # times as long
    tokens: Mapping[int, float] = field(default_factory=dict)  # times as many
    stages: tuple[float, ...] = (1.0,)  # the work of each stage of the pipeline
    unmeasured: frozenset[int] = frozenset()
    cards: Mapping[int, Card] = field(default_factory=dict)
    # A hang, or what looks like one.
    hangs: bool = False
    declared: str = ""  # the activity that all ranks are in, from then on for `lasts` seconds
    lasts: float = 0.0
    behind: frozenset[int] = frozenset()  # have not started the collective that the others are in
    silent: frozenset[int] = frozenset()  # their processes do not push
    without_data: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()  # their processes ended
    idle: frozenset[int] = frozenset()  # nothing runs on their cards
    computing: frozenset[int] = frozenset()  # their cards go on
    elsewhere: frozenset[int] = frozenset()  # at another line than the others
    blocked: str = ""  # the state of the processes of those that are behind
    uncounted: bool = False  # nobody counts collectives
    dark: frozenset[int] = frozenset()  # hosts whose exporter does not answer
    links: frozenset[tuple[int, int]] = frozenset()  # hosts and ports that are down


class Segment(NamedTuple):
    """A part of the run's time, the same for all ranks; of a step how much longer ranks took, and waited."""

    begin: float
    end: float
    activity: str
    late: Mapping[int, float] = {}
    waits: tuple[float, ...] | None = None


class Job:
    """A job that has been through its steps."""

    def __init__(self, name: str, seed: str, trouble: Trouble, seconds: float) -> None:
        self.name, self.trouble, self.seconds = name, trouble, seconds
        self._rng = rng = random.Random(seed)
        self.step_seconds = rng.uniform(0.8, 4.0)
        self.has_cards = bool(trouble.cards or trouble.links or trouble.uncounted) or rng.random() < 0.8
        self._phases = [rng.uniform(0, PUSH) for _ in range(RANKS)]
        self._skews = [rng.gauss(0, 0.2) for _ in range(HOSTS)]
        self._in_flight = rng.randrange(COLLECTIVES)
        self.scrapes = [INTERVAL * number for number in range(int(seconds / INTERVAL) + 1)]
        # Of ranks that have nothing to do with it: pushes that get lost, an Xid of a program, a port that flaps.
        self._unheard = rng.randrange(RANKS), (since := rng.uniform(0, seconds)), since + rng.uniform(10, 40)
        self._noisy = {what: rng.randrange(RANKS) if rng.random() < 0.3 else None for what in ("xid", "flap")}
        self._failed = [[rng.random() < 0.005 for _ in self.scrapes] for _ in range(HOSTS)]
        self.segments = list(self._live())

    def _live(self) -> Iterator[Segment]:
        rng, trouble = self._rng, self.trouble
        jitter, network = rng.uniform(0.01, 0.04), rng.uniform(0.05, 0.2)
        every = 1
        while every * self.step_seconds < 0.5:
            every *= 2
        per_stage = RANKS // len(trouble.stages)
        t, step, mean, disturbed = rng.uniform(5, 25), 0, 0.0, True
        yield Segment(0.0, t, "startup")
        checkpoint, evaluation = t + rng.uniform(40, 180), t + rng.uniform(100, 600)
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
                took, saves = rng.uniform(3, 20), checkpoint <= evaluation
                yield Segment(t, t + took, "checkpoint_save" if saves else "evaluation")
                t, disturbed = t + took, True
                if saves:
                    checkpoint = t + rng.uniform(120, 300)
                else:
                    evaluation = t + rng.uniform(200, 900)
            busy = [
                self.step_seconds
                * trouble.stages[rank // per_stage]
                * trouble.tokens.get(rank, 1.0)
                * rng.lognormvariate(0, jitter)
                for rank in range(RANKS)
            ]
            if rng.random() < 0.05:  # somebody collects garbage
                busy[rng.randrange(RANKS)] += rng.uniform(0.05, 0.3)
            late = {}
            if t >= trouble.at:
                late = {
                    rank: self.step_seconds * share
                    for rank in range(RANKS)
                    if (share := trouble.slow(rank, step, t)) > 0
                }
                for rank, seconds in late.items():
                    busy[rank] += seconds
            took = network * self.step_seconds * rng.lognormvariate(0, 0.15)
            took *= trouble.network if t >= trouble.at else 1.0
            if rng.random() < 0.01:
                took *= rng.uniform(2, 6)
            duration = max(busy) + took
            # As the hook has it: no step beside a checkpoint, and none that took more than twice the mean.
            measured = step % every == 0 and not disturbed and step > 2 and duration <= 2 * mean
            mean += (duration - mean) / min(step + 1, 100)
            yield Segment(
                t,
                t + duration,
                "step",
                late,
                tuple((duration - seconds) * rng.uniform(0.97, 1.0) for seconds in busy) if measured else None,
            )
            t, step, disturbed = t + duration, step + 1, False

    def told(self) -> Iterator[tuple[Series, Values]]:
        """Yield every series that a Prometheus would have, at every scrape."""
        for rank in range(RANKS):
            place = {"job": "flopwatch", "instance": self._instance(rank // PER_HOST)}
            found = self._rank(rank)
            if self.has_cards:
                found |= self._card(rank)
            for (name, labels), values in found.items():
                yield (name, {**place, **dict(labels)}), self._scraped(rank // PER_HOST, values)
        for host in range(HOSTS):
            down = self._silence(host)
            yield ("up", {"job": "flopwatch", "instance": self._instance(host)}), [float(not failed) for failed in down]

    def _silence(self, host: int) -> list[bool]:
        dark = host in self.trouble.dark
        return [
            failed or (dark and t >= self.trouble.at)
            for failed, t in zip(self._failed[host], self.scrapes, strict=True)
        ]

    def _scraped(self, host: int, values: Values) -> Values:
        """Return what comes of a series: a scrape that fails, or that lacks it, makes it stale."""
        scraped: Values = []
        there = False
        for value, failed in zip(values, self._silence(host), strict=True):
            if value is None or failed:
                scraped.append(STALE if there else None)
                there = False
            else:
                scraped.append(value)
                there = True
        return scraped

    def _pushed(self, rank: int, t: float) -> float | None:
        """Return of when the newest push of a rank is; None if the exporter does not serve it any more."""
        trouble = self.trouble
        if rank in trouble.gone and t >= trouble.at:
            return None
        newest = self._push(rank, t)
        unheard, since, until = self._unheard
        if rank == unheard and since <= newest < until:
            newest = self._push(rank, since)
        if rank in trouble.silent and newest >= trouble.at:
            newest = self._push(rank, trouble.at)
            if t - newest > RANK_TIMEOUT:
                return None
        return newest if newest >= 0 else None

    def _push(self, rank: int, t: float) -> float:
        return t - (t - self._phases[rank]) % PUSH

    def _rank(self, rank: int) -> Found:
        trouble, host, local = self.trouble, *divmod(rank, PER_HOST)
        found: Found = {}
        per_stage = RANKS // len(trouble.stages)
        told = {
            "run": self.name,
            "rank": str(rank),
            "host": self.host(host),
            "uuid": self.uuid(rank) if self.has_cards else "",
            "local_rank": str(local),
            "attempt": "1",
            "dp": str(rank % per_stage),
            "pp": str(rank // per_stage) if len(trouble.stages) > 1 else "",
        }
        info = tuple((label, told[label]) for label in m.TRAINING_RANK_INFO.labels if told.get(label))
        own = (("run", self.name), ("rank", str(rank)))
        seconds = dict.fromkeys(("startup", "step", "data_stall", "checkpoint_save", "evaluation", "compile"), 0.0)
        wait = measured = collected = 0.0
        steps = measured_steps = at = 0
        counts = [0] * (len(DURATION_BOUNDS) + 1)
        total, last = 0.0, None

        for number, t in enumerate(self.scrapes):
            now = self._pushed(rank, t)
            if now is None:
                continue

            def put(row: Metric, value: float, labels: Labels = own, suffix: str = "", number: int = number) -> None:
                found.setdefault((row.name + suffix, labels), [None] * len(self.scrapes))[number] = value

            while self.segments[at].end <= now:
                begin, end, activity, late, waits = self.segments[at]
                at += 1
                stalled = late.get(rank, 0.0) if trouble.loading else 0.0
                seconds[activity] += end - begin - stalled
                seconds["data_stall"] += stalled
                if activity == "step":
                    steps, last = steps + 1, end + self._skews[host]
                    total += end - begin
                    counts[bisect_left(DURATION_BOUNDS, end - begin)] += 1
                    if waits is not None:
                        wait, measured = wait + waits[rank], measured + end - begin
                        measured_steps += 1
                        collected += late.get(rank, 0.0) if trouble.collecting else 0.0
            begin, end, activity, late, _ = self.segments[at]
            age = now - begin
            opened = {activity: age}
            if activity == "step":
                stalled = min(age, late.get(rank, 0.0)) if trouble.loading else 0.0
                stalled = age if end == inf and rank in trouble.without_data else stalled
                opened = {"step": age - stalled, "data_stall": stalled}
            started = steps * COLLECTIVES
            if activity == "step":
                started += (
                    self._in_flight + (rank not in trouble.behind)
                    if end == inf
                    else int(COLLECTIVES * age / (end - begin))
                )
            put(m.TRAINING_RANK_INFO, 1.0, info)
            for name, so_far in seconds.items():
                put(m.TRAINING_ACTIVITY_SECONDS_TOTAL, so_far + opened.get(name, 0.0), (*own, ("activity", name)))
            put(m.TRAINING_STEPS_TOTAL, float(steps))
            put(m.TRAINING_TOKENS_TOTAL, steps * TOKENS * trouble.tokens.get(rank, 1.0))
            if not trouble.uncounted:
                put(m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, float(started))
            if end == inf and age > max(AFTER, AFTER_STEPS * self.step_seconds) + MIN_COVERED:
                line = 88 if rank in trouble.elsewhere else 120 + rank // per_stage
                put(m.TRAINING_STUCK_FRAME_INFO, 1.0, (*own, ("at", f"train.py:{line} in train")))
            for state in BLOCKED.values():
                since = trouble.at if rank in trouble.behind and state == trouble.blocked else inf
                put(m.HOST_PROCESS_BLOCKED_SECONDS, max(0.0, t - since), (*own, ("state", state)))
            if last is not None:
                put(m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS, last)
            if rank not in trouble.unmeasured:
                put(m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, wait)
                put(m.TRAINING_MEASURED_STEP_SECONDS_TOTAL, measured)
                put(m.TRAINING_MEASURED_STEPS_TOTAL, float(measured_steps))
                put(m.TRAINING_PHASE_SECONDS_TOTAL, collected, (*own, ("phase", "garbage_collection")))
            if rank == 0:
                run = own[:1]
                put(m.TRAINING_WORLD_SIZE, float(RANKS), run)
                put(m.TRAINING_STEP_DURATION_SECONDS, total, run, "_sum")
                put(m.TRAINING_STEP_DURATION_SECONDS, float(sum(counts)), run, "_count")
                below = 0
                for bound, count in zip((*DURATION_BOUNDS, inf), counts, strict=True):
                    below += count
                    le = "+Inf" if bound == inf else f"{bound:g}"
                    put(m.TRAINING_STEP_DURATION_SECONDS, float(below), (*run, ("le", le)), "_bucket")
        return found

    def _card(self, rank: int) -> Found:
        trouble, host, local = self.trouble, *divmod(rank, PER_HOST)
        shown = trouble.cards.get(rank, WELL)
        gpu = (("gpu", str(local)), ("uuid", self.uuid(rank)))
        port = (("device", f"mlx5_{local}"), ("port", "1"))
        rng = random.Random(f"{self.name} card {rank}")
        hung_at = self.segments[-1].begin if self.segments[-1].end == inf else inf
        found: Found = {}
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
            busy = 0.0 if idle or rng.random() < 0.005 else rng.uniform(0.9, 1.0)
            put(m.GPU_UTILIZATION_RATIO, None if lost else busy)
            watts = IDLE_WATTS if idle else WAITING_WATTS if waits else WATTS * (shown.power_limit if sick else 1.0)
            put(m.GPU_POWER_WATTS, None if lost else round(watts * rng.uniform(0.95, 1.0), 1))
            put(m.GPU_SM_CLOCK_HERTZ, None if lost else CLOCK * (shown.clock if sick else 1.0))
            put(m.GPU_POWER_LIMIT_WATTS, None if lost else 700.0 * (shown.power_limit if sick else 1.0))
            put(m.GPU_POWER_LIMIT_DEFAULT_WATTS, None if lost else 700.0)
            put(m.GPU_PCIE_WIDTH_LANES, None if lost else float(shown.lanes if sick else 16))
            put(m.GPU_PCIE_WIDTH_MAX_LANES, None if lost else 16.0)
            put(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, None if lost else tensor)
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
        """Return the GPU of a rank."""
        return f"GPU-{self.name}-{rank}"

    def host(self, host: int) -> str:
        """Return the name of a host, which no other job has."""
        return f"{self.name}-node-{host}"

    def _instance(self, host: int) -> str:
        return f"{self.host(host)}:9450"
