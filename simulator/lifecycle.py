"""Life of the simulated jobs (queue, start, restore, train, save, complete) and the pool of spare nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from simulator.events import EventQueue
from simulator.jobs import JobAttempt
from simulator.nodes import EPOCH, Nodes
from simulator.state import JobState

MAX_CHECKPOINTS = 8  # durable checkpoints that a job keeps


class JobLifecycle:
    """Life of all jobs of a cluster. Scheduled events move each job through its attempts."""

    def __init__(
        self,
        jobs: list[JobState],
        events: EventQueue,
        nodes: Nodes,
        rng: random.Random,
        seconds: float,
        every: float | None,
    ) -> None:
        self._jobs, self._events, self._nodes, self._rng = jobs, events, nodes, rng
        self._seconds, self._every = seconds, every
        self._spares = list(range(nodes.topology.nodes))
        self._waiting: list[JobState] = []
        for state in jobs:
            events.at(state.job.begins - state.job.queue, partial(self._submit, state))
            events.at(state.job.begins, partial(self.launch, state))

    def after(self, state: JobState, t: float, action: Callable[[JobState, float], None]) -> None:
        """Schedule an action for `t` that begins the job's next phase, or drop it if another phase begins earlier."""
        phase = state.phase

        def unless_overtaken(now: float) -> None:
            if state.phase == phase:
                state.phase += 1
                action(state, now)

        self._events.at(t, unless_overtaken)

    def _submit(self, state: JobState, t: float) -> None:
        if state.job.queue > 0:
            state.truth.seconds["queue"] = state.job.queue
            self._nodes.submitted(state.job, t)

    def launch(self, state: JobState, t: float) -> None:
        """Start an attempt, or put the job on the waiting list while there are too few nodes."""
        kept = [node for node in state.nodes if node not in state.unavailable]
        missing = state.job.nodes - len(kept)
        if missing > len(self._spares):
            if state not in self._waiting:
                self._waiting.append(state)
            return
        new = [self._spares.pop(0) for _ in range(missing)]
        # A new node takes over the ranks of the node that it replaces.
        state.nodes = (
            [new.pop(0) if node in state.unavailable else node for node in state.nodes] if state.nodes else kept + new
        )
        state.unavailable = set()
        truth = state.truth
        if truth.start is None:
            truth.start = EPOCH + t
        else:
            truth.book("down", t - state.booked, state.gpus, state.held)
        truth.attempts += 1
        state.number += 1
        state.booked, state.held, state.live = t, True, True
        durable = state.durable[-1] if state.durable else None
        attempt = JobAttempt(
            f"{state.job.name}.{state.number}",
            t,
            list(state.nodes),
            durable,
            committed=durable,
            step=durable or 0,
            since=t,
        )
        state.attempt = attempt
        self.after(state, t + self._rng.uniform(*state.job.startup), self._compile)
        self._events.at(t + 1, partial(self._nodes.first, state.job, attempt))
        if self._every is not None:
            self._events.at(t + self._every, partial(self._tick, state, attempt))

    def _compile(self, state: JobState, t: float) -> None:
        job = state.job
        if job.compile[1] > 0:
            self.switch(state, "compile", t)
            self.after(state, t + self._rng.uniform(*job.compile), self._restore)
        else:
            self._restore(state, t)

    def _restore(self, state: JobState, t: float) -> None:
        if state.current.resumed is None:
            self.train(state, t)
            return
        self.switch(state, "checkpoint_restore", t)
        self.after(state, t + self._rng.uniform(*state.job.restore), self._restored)

    def _restored(self, state: JobState, t: float) -> None:
        state.current.restored = state.current.resumed
        self.resume(state, t)

    def resume(self, state: JobState, t: float) -> None:
        """Begin the steps up to the next checkpoint, after a restore or a stall or at the start of a slowdown.

        Report this to the ledger at once, from the first node that still sends records.
        """
        self.train(state, t)
        self.report(state, t)

    def train(self, state: JobState, t: float) -> None:
        """Begin the steps up to the next checkpoint at virtual time `t`."""
        job, attempt = state.job, state.current
        self.switch(state, "step", t)
        state.usual = job.step_seconds * (1 + self._rng.uniform(-1, 1) * job.step_spread)
        state.charged = state.slowed
        attempt.each = state.usual * state.slow
        count = max(1, round(job.checkpoint_every / job.step_seconds))
        if job.steps is not None:
            count = min(count, max(1, job.steps - attempt.step))
        elif t + count * attempt.each > self._seconds:
            count = max(1, round((self._seconds - t) / attempt.each))
        self.after(state, t + count * attempt.each, self._save)
        if state.truth.open is not None and attempt.step + count > state.truth.steps >= attempt.step:
            new = t + (state.truth.steps + 1 - attempt.step) * attempt.each
            phase = state.phase
            self._events.at(new, lambda now: self.report(state, now) if state.phase == phase else None)

    def _save(self, state: JobState, t: float) -> None:
        job = state.job
        self.switch(state, "checkpoint_save", t)
        last = t >= self._seconds - 1e-3 if job.steps is None else state.current.step >= job.steps
        if last:
            self.after(state, t + job.save_blocks + job.save_writes, self._complete)
        else:
            self.after(state, t + job.save_blocks, self._saved)

    def _saved(self, state: JobState, t: float) -> None:
        attempt = state.current
        self.train(state, t)
        self._events.at(t + state.job.save_writes, partial(self._written, state, attempt, attempt.step))
        self.report(state, t)

    def _written(self, state: JobState, attempt: JobAttempt, step: int, t: float) -> None:
        """Add the checkpoint of `step` to the durable ones if the processes that wrote it are still alive."""
        if state.attempt is attempt and state.live:
            state.durable.append(step)
            del state.durable[:-MAX_CHECKPOINTS]
            attempt.committed = step
            self.report(state, t)

    def _complete(self, state: JobState, t: float) -> None:
        attempt = state.current
        attempt.committed = attempt.step
        self.account(state, t)
        state.live, state.done = False, True
        state.truth.end = EPOCH + t
        self._nodes.last(state.job, attempt, t, "completed")

    def switch(self, state: JobState, activity: str, t: float) -> None:
        """Add the job's seconds up to virtual time `t` to its truth, and begin another activity."""
        self.account(state, t)
        state.current.switch(activity, t)

    def account(self, state: JobState, t: float) -> None:
        """Add the job's seconds up to `t` to its truth. During steps, add those up to the last completed step."""
        attempt, truth = state.current, state.truth
        if attempt.activity != "step":
            truth.book(attempt.activity, t - state.booked, state.gpus)
            state.booked = t
            return
        before = round((state.booked - attempt.since) / attempt.each)
        made = attempt.made(t) - before
        truth.made(
            attempt.step + before, made, attempt.each, EPOCH + state.booked, state.gpus, state.charged, state.usual
        )
        state.booked = attempt.since + (before + made) * attempt.each

    def end(self, state: JobState, t: float) -> None:
        """End the processes of the attempt. A slowdown ends with them and does not affect the next attempt."""
        state.current.ended = t
        state.live = False
        state.slow, state.slowed = 1.0, None
        state.truth.over(EPOCH + t)

    def report(self, state: JobState, t: float) -> None:
        """Send a record of the job from the node that the ledger follows."""
        self._nodes.leader(state.job, state.current, t)

    def _tick(self, state: JobState, attempt: JobAttempt, t: float) -> None:
        """Send a record from every node that a fault did not silence, and repeat this until the attempt ends."""
        if attempt.ended is None and self._every is not None and not state.done:
            self._nodes.all(state.job, attempt, t)
            self._events.at(t + self._every, partial(self._tick, state, attempt))

    def withdraw(self, nodes: set[int], until: float) -> None:
        """Remove nodes from service until they are repaired at virtual time `until`."""
        self._spares = [node for node in self._spares if node not in nodes]
        for state in self._jobs:
            state.unavailable |= nodes & set(state.nodes)
        self._events.at(until, partial(self._give_back, nodes))

    def _give_back(self, nodes: set[int], t: float) -> None:
        """Return repaired nodes to their job or to the spares, and start the jobs that wait for nodes."""
        for node in sorted(nodes):
            owner = next((state for state in self._jobs if node in state.nodes and not state.done), None)
            if owner is not None:
                owner.unavailable.discard(node)
            elif node not in self._spares:
                self._spares.append(node)
        waiting, self._waiting = self._waiting, []
        for state in waiting:
            self.launch(state, t)
