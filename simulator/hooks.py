"""Training series of all ranks of a simulated cluster, for dashboards: the families that metrics.py leaves out.

A step ends for all ranks at once. In a usual step, each rank waits in collectives for a share of the step, which
differs by rank and changes slowly. In a slow step, all other ranks wait longer, for the rank on the slow GPU or port.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.training.totals import DURATION_BOUNDS, PERCENTILES
from simulator.jobs import JobAttempt
from simulator.metrics import Line, info, line, mesh_place, rank_info
from simulator.nodes import COLLECTIVES, EPOCH, Record
from simulator.state import JobState
from simulator.topology import Topology
from simulator.world import SimulatedCluster

WAITS = 0.05, 0.09  # range of the share of a usual step in which a rank waits
PHASES = {"host_to_device": 0.01, "forward": 0.27, "backward": 0.54, "optimizer": 0.04, "garbage_collection": 0.002}
TOKENS = 8192.0  # per rank and step
UNUSED = 3e9  # bytes


@dataclass
class HookTotals:
    """Totals that the hooks of one attempt have added up so far."""

    mesh: Mapping[str, int]
    steps: int = 0
    waits: dict[int, float] = field(default_factory=dict)  # seconds by rank
    durations: Counter[int] = field(default_factory=Counter)  # steps by bucket of the histogram
    each: float = 0.0  # seconds of the last steps, which all take the same
    seconds: float = 0.0  # in steps
    work: dict[str, float] = field(default_factory=dict)  # of one rank, by its name in a record


class Hooks:
    """Training hooks of all ranks of a cluster, to be called once per scrape in order of virtual time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed} hooks")
        self._totals: dict[str, HookTotals] = {}
        self._shares: dict[tuple[str, int], float] = {}

    def __call__(self, world: SimulatedCluster, t: float) -> Iterator[tuple[int, Line]]:
        """Yield each sample at virtual time `t`, with the number of the node that serves it."""
        for state in world.jobs:
            if state.attempt is not None and state.attempt.ended is None:
                yield from self._run(world, state, state.attempt, t)

    def waits(self, record: Record, ranks: int) -> list[list[Any]] | None:
        """Return the field `waits` for a record of a host with so many ranks, as of the last call, if it is known."""
        totals = self._totals.get(record["attempt"])
        if totals is None:
            return None
        steps, seconds, first = totals.steps, totals.seconds, record["rank"]
        return [
            [rank, mesh_place(totals.mesh, rank).get("pp", ""), record["started"], steps, seconds, wait, TOKENS * steps]
            for rank in range(first, first + ranks)
            if (wait := totals.waits.get(rank)) is not None
        ]

    def work(self, record: Record, ranks: int) -> dict[str, float]:
        """Return the field `work` for a record of a host with so many ranks, as of the last call, if it is known."""
        totals = self._totals.get(record["attempt"])
        if totals is None:
            return {}
        # One rank reports the durations of steps.
        steps = {"steps": totals.steps, "step_seconds": totals.seconds} if record["rank"] == 0 else {}
        return {name: ranks * done for name, done in totals.work.items()} | steps

    def _run(
        self, world: SimulatedCluster, state: JobState, attempt: JobAttempt, t: float
    ) -> Iterator[tuple[int, Line]]:
        job, topology = state.job, world.topology
        totals = self._totals.setdefault(attempt.id, HookTotals(job.mesh))
        position = attempt.position(t)
        made = 0 if position is None else position - (attempt.restored or 0)
        new = made - totals.steps
        slowest = slowest_rank(topology, state)
        lost = max(0.0, 1 - job.step_seconds / attempt.each) if slowest is not None else 0.0
        totals.durations[bisect_left(DURATION_BOUNDS, attempt.each)] += new
        totals.each = attempt.each
        totals.seconds += new * attempt.each
        totals.steps = made
        common = self._common_samples(state, attempt, totals, t)
        for place, node in enumerate(attempt.nodes):
            for index in range(topology.gpus_per_node):
                rank = place * topology.gpus_per_node + index
                key = (job.name, rank)
                usual = self._shares.setdefault(key, self._rng.uniform(*WAITS))
                self._shares[key] = min(max(usual + self._rng.gauss(0, 0.002), WAITS[0]), WAITS[1])
                share = usual + (0.0 if rank == slowest else lost)
                totals.waits[rank] = totals.waits.get(rank, 0.0) + share * new * attempt.each
                own = (job.name, str(rank))
                identity = rank_info(topology, job, attempt, rank, node, index)
                samples = [identity, (m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, own, totals.waits[rank])]
                samples += [(row, (*own, *extra), value) for row, extra, value in common]
                for row, values, value in samples:
                    yield node, line(row, values, float(value), "flopwatch", "")
        for sample in self._run_lines(state, attempt, totals, position):
            yield attempt.nodes[0], sample

    @staticmethod
    def _common_samples(
        state: JobState, attempt: JobAttempt, totals: HookTotals, t: float
    ) -> list[tuple[Metric, tuple[str, ...], float]]:
        """Return the samples that are equal on all ranks, each with its labels after `run` and `rank`."""
        job, seconds, made = state.job, attempt.seconds(t), totals.steps
        model = job.flops_per_step(state.gpus) / state.gpus * made
        capacity = job.peak_flops * seconds.get("step", 0.0)
        totals.work = {
            "tokens": TOKENS * made,
            "model_flops": model,
            "hardware_flops": 4 / 3 * model,
            "step_capacity_flops": capacity,
        }
        samples: list[tuple[Metric, tuple[str, ...], float]] = [
            (m.TRAINING_STEPS_TOTAL, (), made),
            (m.TRAINING_TOKENS_TOTAL, (), TOKENS * made),
            (m.TRAINING_MODEL_FLOPS_TOTAL, (), model),
            (m.TRAINING_HARDWARE_FLOPS_TOTAL, (), 4 / 3 * model),
            (m.TRAINING_CAPACITY_FLOPS_TOTAL, (), capacity),
            (m.TRAINING_PEAK_FLOPS_PER_SECOND, (), job.peak_flops),
            (m.TRAINING_MEASURED_STEP_SECONDS_TOTAL, (), totals.seconds),
            (m.TRAINING_MEASURED_STEPS_TOTAL, (), made),
            (m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, (), COLLECTIVES * made),
            (m.TRAINING_RECOMPILATIONS_TOTAL, (), 0.0),
            (m.TRAINING_ALLOCATOR_RETRIES_TOTAL, (), 0.0),
            (m.TRAINING_OUT_OF_MEMORY_TOTAL, (), 0.0),
            (m.TRAINING_ALLOCATOR_UNUSED_BYTES, (), UNUSED),
            (m.TRAINING_HOOK_ERRORS_TOTAL, (), 0.0),
            *((m.TRAINING_ACTIVITY_SECONDS_TOTAL, (activity,), spent) for activity, spent in seconds.items()),
            *((m.TRAINING_PHASE_SECONDS_TOTAL, (phase,), part * totals.seconds) for phase, part in PHASES.items()),
        ]
        if (position := attempt.position(t)) is not None:
            samples += [
                (m.TRAINING_POSITION_STEPS, (), position),
                (m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS, (), EPOCH + attempt.last_step(t)),
            ]
        if attempt.committed is not None:
            samples.append((m.TRAINING_COMMITTED_STEPS, (), attempt.committed))
        return samples

    def _run_lines(
        self, state: JobState, attempt: JobAttempt, totals: HookTotals, position: int | None
    ) -> Iterator[Line]:
        """Yield the samples that describe the whole run, which only one rank pushes.

        `position` is the last completed step. Without one there is no loss and no gradient norm.
        """
        job = state.job
        run = (job.name,)
        samples: list[m.Sample] = [
            info(
                m.TRAINING_RUN_INFO,
                run=job.name,
                tenant=job.tenant,
                attempt=attempt.id,
                convention="causal",
                dtype="bf16",
                flops_source="declared",
                peak_source="catalogue",
                step_source="hook",
            ),
            (m.TRAINING_WORLD_SIZE, run, state.gpus),
            (m.TRAINING_SAMPLED_EVERY_STEPS, run, 1.0),
            (m.TRAINING_NONFINITE_TOTAL, (*run, "loss"), 0.0),
            (m.TRAINING_NONFINITE_TOTAL, (*run, "grad_norm"), 0.0),
            (m.TRAINING_LOSS_SPIKES_TOTAL, run, 0.0),
        ]
        if totals.steps:
            samples += [(m.TRAINING_STEP_PERCENTILE_SECONDS, (*run, str(p)), totals.each) for p in PERCENTILES]
        if position is not None:
            loss = 1.8 + 9 * math.exp(-position / 60) + self._rng.gauss(0, 0.02)
            samples += [(m.TRAINING_LOSS, run, loss), (m.TRAINING_GRAD_NORM, run, 0.4 + self._rng.uniform(0, 0.1))]
        for row, values, value in samples:
            yield line(row, values, float(value), "flopwatch", "")
        below = 0
        for number, bound in enumerate((*DURATION_BOUNDS, math.inf)):
            below += totals.durations[number]
            yield (
                f"{m.TRAINING_STEP_DURATION_SECONDS}_bucket",
                {"run": job.name, "le": "+Inf" if bound == math.inf else str(bound)},
                float(below),
            )
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_sum", {"run": job.name}, totals.seconds
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_count", {"run": job.name}, float(below)


def slowest_rank(topology: Topology, state: JobState) -> int | None:
    """Return the rank that slows the job's current steps, or None without a slowdown or without a known GPU or port."""
    loss, attempt = state.charged, state.attempt
    if loss is None or attempt is None:
        return None
    place = loss.gpu or loss.port
    for first, node in enumerate(attempt.nodes):
        for index in range(topology.gpus_per_node if topology.host(node) in loss.hosts else 0):
            if place in (topology.gpu(node, index), topology.port(index)):
                return first * topology.gpus_per_node + index
    return None
