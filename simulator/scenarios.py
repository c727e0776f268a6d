"""Scenarios of the fleet simulator: clusters with their jobs and faults."""

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
from simulator.faults import LLAMA_3_GPUS, Fault, draw
from simulator.jobs import TrainingJob
from simulator.judge import FleetJudgement, judge
from simulator.metrics import Line, scrape, write
from simulator.nodes import EPOCH, Noise, Record
from simulator.progress import progress
from simulator.topology import Topology
from simulator.truth import RunTruth
from simulator.world import SimulatedCluster

HOUR = 3600.0
PARTS = 200  # steps of the progress bar
RECORD_INTERVAL = 30.0  # seconds; the ledger counts a run as down after 60 s without a record


@dataclass(frozen=True)
class Scenario:
    """Jobs, spare nodes and faults of one simulation."""

    name: str
    text: str
    days: float
    jobs: tuple[TrainingJob, ...]
    spares: int = 0
    rails: bool = True
    faults: tuple[Fault, ...] = ()
    interruptions: bool = False  # draw the published faults for the first job
    reference_gpus: int = LLAMA_3_GPUS  # GPUs for the published number of faults
    by_hand: int = 3  # of the published number, faults that need a repair by hand
    noise: Noise = field(default_factory=Noise)

    def topology(self) -> Topology:
        """Return the topology that the jobs and spare nodes need."""
        return Topology(sum(job.nodes for job in self.jobs) + self.spares, rails=self.rails)

    def strikes(self, seed: int) -> list[Fault]:
        """Return the faults of the scenario in order of time. Random ones are drawn with this seed."""
        chance = random.Random(f"{seed} faults")
        job = self.jobs[0]
        published = draw(chance, self.days, job.nodes * 8, self.reference_gpus, self.by_hand, job.name)
        return sorted([*self.faults, *(published if self.interruptions else [])], key=lambda fault: fault.t)

    def sized(self, days: float | None, gpus: int | None) -> Scenario:
        """Return the scenario with another length or size. For None, the scenario's own value stays.

        Raises SettingsError for another size if the scenario has several jobs, or if `gpus` is not a multiple of 8.
        """
        changed = self if days is None else replace(self, days=days)
        if gpus is None or gpus == sum(job.nodes for job in self.jobs) * 8:
            return changed
        if len(self.jobs) > 1 or gpus < 8 or gpus % 8:
            raise SettingsError(
                f"--gpus {gpus}: {self.name} "
                + ("has jobs of fixed sizes" if len(self.jobs) > 1 else "needs whole nodes of 8 GPUs")
            )
        job = self.jobs[0]
        # The number of GPUs changes the number of replicas. If it is not a multiple of a replica, the job has no mesh.
        replica = math.prod(size for axis, size in job.mesh.items() if axis != "dp")
        mesh = {} if gpus % replica else {**job.mesh, "dp": gpus // replica}
        spares = max(4, self.spares * gpus // (job.nodes * 8)) if self.spares else 0
        return replace(changed, jobs=(replace(job, nodes=gpus // 8, mesh=mesh),), spares=spares)


def _crash_loop() -> Scenario:
    job = TrainingJob(
        "looping", 8, mesh={"tp": 8, "dp": 8}, queue=120, step_seconds=4.0, restart_median=15.0, startup=(20.0, 30.0)
    )
    faults = [Fault(HOUR + 240 * number, "software", "looping", node=3) for number in range(12)]
    return Scenario("crash_loop", "a bug that ends a job twelve times in a row", 0.25, (job,), faults=tuple(faults))


def _rolling_maintenance() -> Scenario:
    jobs = tuple(TrainingJob(f"train-{number}", 16, mesh={"tp": 8, "dp": 16}, step_seconds=5.0) for number in range(4))
    faults = tuple(
        Fault(HOUR + 1800 * batch, "maintenance", nodes=tuple(range(8 * batch, 8 * batch + 8)), lasts=2400.0)
        for batch in range(8)
    )
    return Scenario(
        "rolling_maintenance", "a driver upgrade, eight of 64 nodes at a time", 0.5, jobs, spares=16, faults=faults
    )


def _slowdowns() -> Scenario:
    job = TrainingJob("tired", 32, mesh={"tp": 8, "dp": 32}, step_seconds=5.0)
    kinds = ("slow", "data_stall", "slow_link", "storage_stall", "slow_unseen")
    faults = tuple(Fault(2 * HOUR * number, kinds[number % len(kinds)], "tired") for number in range(1, 48))
    return Scenario(
        "slowdowns",
        "a job that is slow or stalled 47 times in 4 days, and fails now and then",
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
            (TrainingJob("llama3", 2048, mesh={"tp": 8, "pp": 16, "dp": 128}, queue=1800),),
            spares=128,
            interruptions=True,
        ),
        _crash_loop(),
        Scenario(
            "leaf_failure",
            "a leaf switch of 64 nodes fails",
            0.25,
            (
                TrainingJob("big", 32, mesh={"tp": 8, "dp": 32}, step_seconds=5.0),
                TrainingJob("next", 24, mesh={"tp": 8, "dp": 24}, step_seconds=5.0),
                TrainingJob("small", 8, mesh={"tp": 8, "dp": 8}, step_seconds=2.0),
            ),
            faults=(Fault(2 * HOUR, "leaf", leaf="leaf-0-3", lasts=2400.0),),
        ),
        _rolling_maintenance(),
        _slowdowns(),
        Scenario(
            "healthy",
            "8 nodes for 125 hours without a fault",
            125 / 24,
            (TrainingJob("quiet", 8, mesh={"tp": 8, "dp": 8}, queue=60),),
        ),
    )
}


@dataclass(frozen=True)
class Result:
    """A completed simulation: the truth of each run, the ledger, and their comparison."""

    truths: list[RunTruth]
    ledger: Ledger
    judgement: FleetJudgement
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
    """Simulate a scenario, with its own or the given faults, and apply the records to a ledger.

    Records are written to `history`. What Prometheus would scrape every `step` seconds is written to `metrics`, or
    passed to `scraped` with its virtual time. With `every`, all nodes send records at that interval in seconds. Scrapes
    without `every` use RECORD_INTERVAL, because the ledger would otherwise count every run as down.
    """
    ledger, records = Ledger(), 0
    scraped = scraped if metrics is None else partial(_write_to, metrics)
    if scraped is not None and every is None:
        every = RECORD_INTERVAL

    def receive(record: Record) -> None:
        nonlocal records
        records += 1
        if history is not None:
            history.write(json.dumps(record) + "\n")
        ledger.apply(record)

    def look(world: SimulatedCluster, t: float) -> None:
        if scraped is not None:
            scraped(t, scrape(world, ledger, t))

    world = SimulatedCluster(
        scenario.topology(),
        scenario.jobs,
        faults if faults is not None else scenario.strikes(seed),
        scenario.days * 86400,
        seed,
        receive,
        scenario.noise,
        every,
        look if scraped is not None else None,
        step,
    )
    with progress(f"Simulating {scenario.days:g} days", PARTS) as advance:
        for part in range(1, PARTS + 1):
            world.at(scenario.days * 86400 * part / PARTS, lambda _: advance(1))
        truths = world.run()
    if scraped is not None:
        look(world, max(truth.end or 0.0 for truth in truths) - EPOCH + step)
    if metrics is not None:
        metrics.write("# EOF\n")
    return Result(truths, ledger, judge(truths, ledger), records)
