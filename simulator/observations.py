"""Observations that simulated nodes send as evidence: clues of faults, and noise without a fault."""

from __future__ import annotations

import random
from functools import partial

from simulator.events import EventQueue
from simulator.faults import Clue
from simulator.nodes import DAILY, PUSH, Nodes
from simulator.state import JobState


class Observations:
    """Schedule of observations: which node observes which clue, and when it sends the clue to the ledger."""

    def __init__(self, jobs: list[JobState], events: EventQueue, nodes: Nodes, rng: random.Random) -> None:
        self._jobs, self._events, self._nodes, self._rng = jobs, events, nodes, rng

    def start_noise(self) -> None:
        """Schedule the first observation without a fault, if the cluster has noise. Each one schedules the next."""
        if self._nodes.noise.per_node_day > 0:
            self._events.at(self._until_noise(), self._make_noise)

    def see(self, clue: Clue, node: int, part: int | None, t: float, *, noise: bool = False) -> None:
        """Schedule the report of a clue that a node observes on its GPU, port or rank number `part`.

        The fault is at `t`, and the report follows later. Some clues of faults are left out at random, but `noise` is
        not. Some reports are late.
        """
        rates = self._nodes.noise
        if not noise and self._rng.random() < rates.missing:
            return
        seen = t + self._rng.uniform(*clue.after)
        late = self._rng.uniform(*rates.delay) if self._rng.random() < rates.late else 0.0
        reported = max(t, seen) + self._rng.uniform(0.0, PUSH) + late
        self._events.at(reported, partial(self._report, clue, node, part or 0, seen))

    def _report(self, clue: Clue, node: int, part: int, seen: float, t: float) -> None:
        """Store a clue as evidence of a node, and send it with a record of the run on that node.

        Without a running attempt there, the node sends its last record again.
        """
        state, attempt = next(
            (
                (state, state.attempt)
                for state in self._jobs
                if state.attempt is not None and node in state.attempt.nodes and node not in state.attempt.dark
            ),
            (None, None),
        )
        self._nodes.note(clue, node, part, seen, attempt)
        if state is not None and attempt is not None and attempt.ended is None:
            self._nodes.leader(state.job, attempt, t)
            self._nodes.one(state.job, attempt, node, t)
        else:
            self._nodes.again(node, t)

    def _until_noise(self) -> float:
        return self._rng.expovariate(self._nodes.noise.per_node_day * self._nodes.topology.nodes / 86400)

    def _make_noise(self, t: float) -> None:
        """Let a random node observe a random clue without a fault, and schedule the next such observation."""
        topology = self._nodes.topology
        (clue,) = self._rng.choices([clue for _, clue in DAILY], [weight for weight, _ in DAILY])
        node, part = self._rng.randrange(topology.nodes), self._rng.randrange(topology.gpus_per_node)
        self.see(clue, node, part, t, noise=True)
        self._events.at(t + self._until_noise(), self._make_noise)
