"""A cluster in virtual time: its jobs, its faults, and the records that node exporters would send.

Records are sparse by default, because 2,048 nodes that send one every 15 seconds for 54 days make 637 million of them.
Every node sends the first and the last record of an attempt, and one whenever it reports an observation. The node that
the ledger follows also reports every checkpoint. These suffice for exact totals, because everything in between is
linear. With `every`, all nodes send records at that interval in seconds.

The truth is accounted separately (`truth.py`) and does not depend on records.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import partial

from simulator.events import EventQueue
from simulator.faults import Fault
from simulator.injector import FaultInjector
from simulator.jobs import TrainingJob
from simulator.lifecycle import JobLifecycle
from simulator.nodes import EPOCH, Nodes, Noise, Record
from simulator.observations import Observations
from simulator.state import Damage, JobState
from simulator.topology import Topology
from simulator.truth import RunTruth


class SimulatedCluster:
    """A cluster with its jobs and faults. `run` simulates it once and passes every record to `send`.

    `look` is called with the cluster and the virtual time every `look_every` seconds. Raises ValueError if the jobs
    need more nodes than there are, or if a mesh does not match the GPUs of its job.
    """

    def __init__(
        self,
        topology: Topology,
        jobs: Iterable[TrainingJob],
        faults: Iterable[Fault],
        seconds: float,
        seed: int,
        send: Callable[[Record], object],
        noise: Noise | None = None,
        every: float | None = None,
        look: Callable[[SimulatedCluster, float], object] | None = None,
        look_every: float = 60.0,
    ) -> None:
        self.topology = topology
        self._events = EventQueue()
        rng = random.Random(seed)
        self.nodes = Nodes(topology, noise if noise is not None else Noise(), rng, send)
        self.jobs = [self._state(job) for job in jobs]
        if sum(state.job.nodes for state in self.jobs) > topology.nodes:
            raise ValueError(f"{topology.nodes} nodes are too few for these jobs")
        lifecycle = JobLifecycle(self.jobs, self._events, self.nodes, rng, seconds, every)
        observations = Observations(self.jobs, self._events, self.nodes, rng)
        self._injector = FaultInjector(self.jobs, self._events, self.nodes, rng, lifecycle, observations)
        for fault in faults:
            self._injector.schedule(fault)
        observations.start_noise()
        if look is not None:
            self._events.at(0.0, partial(self._look, look, look_every))

    def _state(self, job: TrainingJob) -> JobState:
        gpus = job.nodes * self.topology.gpus_per_node
        if job.mesh and math.prod(job.mesh.values()) != gpus:
            raise ValueError(f"{job.name}: a mesh of {dict(job.mesh)} is not {gpus} GPUs")
        submitted = EPOCH + job.begins - job.queue
        return JobState(job, gpus, RunTruth(job.name, job.tenant, submitted, job.flops_per_step(gpus), job.peak_flops))

    @property
    def broken(self) -> list[Damage]:
        """Return the damage of all faults that have struck so far."""
        return self._injector.broken

    def run(self) -> list[RunTruth]:
        """Simulate until all jobs are done, and return the truth of each job."""
        self._events.run(lambda: all(state.done for state in self.jobs))
        return [state.truth for state in self.jobs]

    def at(self, t: float, action: Callable[[float], object]) -> None:
        """Call `action` with the virtual time at that time in seconds, if a job is not done by then."""
        self._events.at(t, action)

    def _look(self, look: Callable[[SimulatedCluster, float], object], every: float, t: float) -> None:
        look(self, t)
        self._events.at(t + every, partial(self._look, look, every))
