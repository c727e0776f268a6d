"""What the hooks of all ranks tell of a simulated cluster: the families that `metrics` leaves out, for boards to show.

A step ends for all ranks at once. In a usual one every rank waits for a share of it that is its own and moves a
little; in a slow one the others wait for the rank on the culprit's card, which is the one that does not.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from flopwatch import catalogue as m
from flopwatch.training.totals import DURATION_BOUNDS
from simulator.jobs import Attempt
from simulator.metrics import COLLECTIVES, Line, info, line, mesh_place
from simulator.nodes import EPOCH
from simulator.topology import Topology
from simulator.world import Running, World

WAITS = 0.05, 0.09  # of a usual step
PHASES = {"host_to_device": 0.01, "forward": 0.27, "backward": 0.54, "optimizer": 0.04, "garbage_collection": 0.002}
TOKENS = 8192.0  # of a rank's step
UNUSED = 3e9  # bytes


@dataclass
class _Told:
    """What an attempt's hooks have counted so far."""

    at: float
    steps: int = 0
    busy: float = 0.0  # seconds in steps
    waits: dict[int, float] = field(default_factory=dict)
    durations: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0


class Hooks:
    """The hooks of a world; call it once a scrape, in order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed} hooks")
        self._told: dict[str, _Told] = {}
        self._shares: dict[tuple[str, int], float] = {}

    def __call__(self, world: World, t: float) -> Iterator[tuple[int, Line]]:
        """Yield node and line of all that the hooks tell at a virtual time."""
        for running in world.jobs:
            if running.attempt is not None and running.attempt.ended is None:
                yield from self._run(world, running, running.attempt, t)

    def _run(self, world: World, running: Running, attempt: Attempt, t: float) -> Iterator[tuple[int, Line]]:
        job, topology = running.job, world.topology
        told = self._told.setdefault(attempt.id, _Told(t))
        position, seconds = attempt.position(t), attempt.seconds(t)
        made = 0 if position is None else position - (attempt.restored or 0)
        new, busy = made - told.steps, seconds.get("step", 0.0)
        slowest = culprit(topology, running)
        lost = max(0.0, 1 - job.step_seconds / attempt.each) if slowest is not None else 0.0
        told.durations[bisect_left(DURATION_BOUNDS, attempt.each)] += new
        told.seconds += new * attempt.each
        told.steps, told.busy = made, busy
        model = job.flops_per_step(running.gpus) / running.gpus * made
        for place, node in enumerate(attempt.nodes):
            for index in range(topology.gpus_per_node):
                rank = place * topology.gpus_per_node + index
                own = (job.name, str(rank))
                usual = self._shares.setdefault(own_key := (job.name, rank), self._rng.uniform(*WAITS))
                self._shares[own_key] = min(max(usual + self._rng.gauss(0, 0.002), WAITS[0]), WAITS[1])
                share = usual + (0.0 if rank == slowest else lost)
                told.waits[rank] = told.waits.get(rank, 0.0) + share * new * attempt.each
                samples = [
                    info(
                        m.TRAINING_RANK_INFO,
                        run=job.name,
                        rank=str(rank),
                        host=topology.host(node),
                        uuid=topology.gpu(node, index),
                        local_rank=str(index),
                        attempt=attempt.id,
                        **mesh_place(job.mesh, rank),
                    ),
                    (m.TRAINING_STEPS_TOTAL, own, made),
                    (m.TRAINING_TOKENS_TOTAL, own, TOKENS * made),
                    (m.TRAINING_MODEL_FLOPS_TOTAL, own, model),
                    (m.TRAINING_HARDWARE_FLOPS_TOTAL, own, 4 / 3 * model),
                    (m.TRAINING_CAPACITY_FLOPS_TOTAL, own, job.peak_flops * busy),
                    (m.TRAINING_PEAK_FLOPS_PER_SECOND, own, job.peak_flops),
                    (m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL, own, told.waits[rank]),
                    (m.TRAINING_MEASURED_STEP_SECONDS_TOTAL, own, told.seconds),
                    (m.TRAINING_MEASURED_STEPS_TOTAL, own, made),
                    (m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, own, COLLECTIVES * made),
                    (m.TRAINING_RECOMPILATIONS_TOTAL, own, 0.0),
                    (m.TRAINING_ALLOCATOR_RETRIES_TOTAL, own, 0.0),
                    (m.TRAINING_OUT_OF_MEMORY_TOTAL, own, 0.0),
                    (m.TRAINING_ALLOCATOR_UNUSED_BYTES, own, UNUSED),
                    (m.TRAINING_HOOK_ERRORS_TOTAL, own, 0.0),
                    *(
                        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, (*own, activity), spent)
                        for activity, spent in seconds.items()
                    ),
                    *(
                        (m.TRAINING_PHASE_SECONDS_TOTAL, (*own, phase), part * told.seconds)
                        for phase, part in PHASES.items()
                    ),
                ]
                if position is not None:
                    samples += [
                        (m.TRAINING_POSITION_STEPS, own, position),
                        (m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS, own, EPOCH + attempt.last_step(t)),
                    ]
                if attempt.committed is not None:
                    samples.append((m.TRAINING_COMMITTED_STEPS, own, attempt.committed))
                for row, values, value in samples:
                    yield node, line(row, values, float(value), "flopwatch", "")
        for told_line in self._for_all(running, attempt, told, position):
            yield attempt.nodes[0], told_line

    def _for_all(self, running: Running, attempt: Attempt, told: _Told, position: int | None) -> Iterator[Line]:
        """Yield what one rank tells for all."""
        job = running.job
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
            (m.TRAINING_WORLD_SIZE, run, running.gpus),
            (m.TRAINING_SAMPLED_EVERY_STEPS, run, 1.0),
            (m.TRAINING_NONFINITE_TOTAL, (*run, "loss"), 0.0),
            (m.TRAINING_NONFINITE_TOTAL, (*run, "grad_norm"), 0.0),
            (m.TRAINING_LOSS_SPIKES_TOTAL, run, 0.0),
        ]
        if position is not None:
            loss = 1.8 + 9 * math.exp(-position / 60) + self._rng.gauss(0, 0.02)
            samples += [(m.TRAINING_LOSS, run, loss), (m.TRAINING_GRAD_NORM, run, 0.4 + self._rng.uniform(0, 0.1))]
        for row, values, value in samples:
            yield line(row, values, float(value), "flopwatch", "")
        below = 0
        for number, bound in enumerate((*DURATION_BOUNDS, math.inf)):
            below += told.durations[number]
            yield (
                f"{m.TRAINING_STEP_DURATION_SECONDS}_bucket",
                {"run": job.name, "le": "+Inf" if bound == math.inf else str(bound)},
                float(below),
            )
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_sum", {"run": job.name}, told.seconds
        yield f"{m.TRAINING_STEP_DURATION_SECONDS}_count", {"run": job.name}, float(below)


def culprit(topology: Topology, running: Running) -> int | None:
    """Return the rank that the others wait for in the present stretch of steps."""
    loss, attempt = running.charged, running.attempt
    if loss is None or attempt is None:
        return None
    place = loss.gpu or loss.port
    for first, node in enumerate(attempt.nodes):
        for index in range(topology.gpus_per_node if topology.host(node) in loss.hosts else 0):
            if place in (topology.gpu(node, index), topology.port(index)):
                return first * topology.gpus_per_node + index
    return None
