"""Clusters worth simulating, as data."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TextIO

from flopwatch.ledger.ledger import Ledger
from flopwatch.settings import SettingsError
from simulator.faults import LLAMA_3_GPUS, Fault, drawn
from simulator.jobs import Job
from simulator.judge import Judgement, judge
from simulator.metrics import Line, scrape, write
from simulator.nodes import EPOCH, Noise, Record
from simulator.topology import Topology
from simulator.truth import Truth
from simulator.world import World

HOUR = 3600.0
SPEAK = 30.0  # a ledger calls a run down that is silent for 60 s


@dataclass(frozen=True)
class Scenario:
    """A cluster, its jobs, and what befalls it."""

    name: str
    text: str
    days: float
    jobs: tuple[Job, ...]
    spares: int = 0
    rails: bool = True
    faults: tuple[Fault, ...] = ()
    interruptions: bool = False  # draw the published ones for the first job
    reference_gpus: int = LLAMA_3_GPUS  # that many GPUs have the published number of them
    by_hand: int = 3  # of the published ones, those that needed somebody
    noise: Noise = field(default_factory=Noise)

    def topology(self) -> Topology:
        """Return its cluster."""
        return Topology(sum(job.nodes for job in self.jobs) + self.spares, rails=self.rails)

    def strikes(self, seed: int) -> list[Fault]:
        """Return its faults."""
        chance = random.Random(f"{seed} faults")
        job = self.jobs[0]
        published = drawn(chance, self.days, job.nodes * 8, self.reference_gpus, self.by_hand, job.name)
        return sorted([*self.faults, *(published if self.interruptions else [])], key=lambda fault: fault.t)

    def sized(self, days: float | None, gpus: int | None) -> Scenario:
        """Return it with another length or size; raises SettingsError where its faults need the size it has."""
        changed = self if days is None else replace(self, days=days)
        if gpus is None or gpus == sum(job.nodes for job in self.jobs) * 8:
            return changed
        if len(self.jobs) > 1 or gpus < 8 or gpus % 8:
            raise SettingsError(
                f"--gpus {gpus}: {self.name} "
                + ("has jobs of fixed sizes" if len(self.jobs) > 1 else "needs whole nodes of 8 GPUs")
            )
        job = self.jobs[0]
        # More GPUs or fewer are more replicas or fewer; where none fits, nobody cares how the job is laid out.
        replica = math.prod(size for axis, size in job.mesh.items() if axis != "dp")
        mesh = {} if gpus % replica else {**job.mesh, "dp": gpus // replica}
        spares = max(4, self.spares * gpus // (job.nodes * 8)) if self.spares else 0
        return replace(changed, jobs=(replace(job, nodes=gpus // 8, mesh=mesh),), spares=spares)


def _crash_loop() -> Scenario:
    job = Job(
        "looping", 8, mesh={"tp": 8, "dp": 8}, queue=120, step_seconds=4.0, restart_median=15.0, startup=(20.0, 30.0)
    )
    faults = [Fault(HOUR + 240 * number, "software", "looping", node=3) for number in range(12)]
    return Scenario("crash_loop", "a bug that ends a job twelve times in a row", 0.25, (job,), faults=tuple(faults))


def _rolling_maintenance() -> Scenario:
    jobs = tuple(Job(f"train-{number}", 16, mesh={"tp": 8, "dp": 16}, step_seconds=5.0) for number in range(4))
    faults = tuple(
        Fault(HOUR + 1800 * batch, "maintenance", nodes=tuple(range(8 * batch, 8 * batch + 8)), lasts=2400.0)
        for batch in range(8)
    )
    return Scenario(
        "rolling_maintenance", "a driver upgrade, eight of 64 nodes at a time", 0.5, jobs, spares=16, faults=faults
    )


def _slowdowns() -> Scenario:
    job = Job("tired", 32, mesh={"tp": 8, "dp": 32}, step_seconds=5.0)
    kinds = ("slow", "data_stall", "slow_link", "storage_stall", "slow_unseen")
    faults = tuple(Fault(2 * HOUR * number, kinds[number % len(kinds)], "tired") for number in range(1, 48))
    return Scenario(
        "slowdowns",
        "a job that is slow or stands still 47 times in 4 days, and fails now and then",
        4.0,
        (job,),
        spares=8,
        faults=faults,
        interruptions=True,
        reference_gpus=1024,
        by_hand=0,
    )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "llama3",
            "54 days of Llama 3 405B on 16,384 GPUs with its published interruptions",
            54.0,
            (Job("llama3", 2048, mesh={"tp": 8, "pp": 16, "dp": 128}, queue=1800),),
            spares=128,
            interruptions=True,
        ),
        _crash_loop(),
        Scenario(
            "leaf_failure",
            "a leaf switch dies under 64 nodes",
            0.25,
            (
                Job("big", 32, mesh={"tp": 8, "dp": 32}, step_seconds=5.0),
                Job("next", 24, mesh={"tp": 8, "dp": 24}, step_seconds=5.0),
                Job("small", 8, mesh={"tp": 8, "dp": 8}, step_seconds=2.0),
            ),
            faults=(Fault(2 * HOUR, "leaf", leaf="leaf-0-3", lasts=2400.0),),
        ),
        _rolling_maintenance(),
        _slowdowns(),
        Scenario(
            "healthy",
            "8 nodes for 125 hours, and nothing happens",
            125 / 24,
            (Job("quiet", 8, mesh={"tp": 8, "dp": 8}, queue=60),),
        ),
    )
}


@dataclass(frozen=True)
class Result:
    """A simulation that is over."""

    truths: list[Truth]
    ledger: Ledger
    judgement: Judgement
    records: int


def _write_to(out: TextIO, t: float, lines: Iterable[Line]) -> None:
    write(lines, t, out)


def simulate(
    scenario: Scenario,
    seed: int,
    faults: list[Fault] | None = None,
    every: float | None = None,
    history: TextIO | None = None,
    metrics: TextIO | None = None,
    step: float = 60.0,
    scraped: Callable[[float, Iterable[Line]], object] | None = None,
) -> Result:
    """Live through a scenario, with other faults if any are given, and let a ledger listen.

    Records go to `history`; to `metrics`, or with its virtual time to `scraped`, goes what a Prometheus would have
    scraped every `step` seconds: for that nodes speak all the time, or the ledger would call every run down.
    """
    ledger, records = Ledger(), 0
    scraped = scraped if metrics is None else partial(_write_to, metrics)
    if scraped is not None and every is None:
        every = SPEAK

    def tell(record: Record) -> None:
        nonlocal records
        records += 1
        if history is not None:
            history.write(json.dumps(record) + "\n")
        ledger.apply(record)

    def look(world: World, t: float) -> None:
        if scraped is not None:
            scraped(t, scrape(world, ledger, t))

    world = World(
        scenario.topology(),
        scenario.jobs,
        faults if faults is not None else scenario.strikes(seed),
        scenario.days * 86400,
        seed,
        tell,
        scenario.noise,
        every,
        look if scraped is not None else None,
        step,
    )
    truths = world.run()
    if scraped is not None:
        look(world, max(truth.end or 0.0 for truth in truths) - EPOCH + step)
    if metrics is not None:
        metrics.write("# EOF\n")
    return Result(truths, ledger, judge(truths, ledger), records)
