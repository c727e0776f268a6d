"""Injection of faults into a simulated cluster."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from flopwatch.settings import SettingsError
from simulator.events import Action, EventQueue
from simulator.faults import KINDS, Clue, Fault, FaultKind
from simulator.lifecycle import JobLifecycle
from simulator.nodes import EPOCH, PUSH, Nodes
from simulator.observations import Observations
from simulator.state import Damage, JobState
from simulator.topology import PortPlace
from simulator.truth import TrueLoss


class FaultInjector:
    """Injector of faults into the jobs and nodes of a cluster. `broken` has the damage of all faults so far."""

    def __init__(
        self,
        jobs: list[JobState],
        events: EventQueue,
        nodes: Nodes,
        rng: random.Random,
        lifecycle: JobLifecycle,
        observations: Observations,
    ) -> None:
        self._jobs, self._events, self._nodes, self._rng = jobs, events, nodes, rng
        self._topology, self._lifecycle, self._observations = nodes.topology, lifecycle, observations
        self.broken: list[Damage] = []

    def schedule(self, fault: Fault) -> None:
        """Schedule a fault. Raises SettingsError if the cluster lacks a run, leaf, node or GPU that the fault names."""
        nodes, runs = self._topology.nodes, [state.job.name for state in self._jobs]
        for wrong, what in (
            (fault.run and fault.run not in runs, f"run {fault.run!r}; there are {', '.join(runs)}"),
            (fault.leaf and not self._topology.below(fault.leaf), f"leaf {fault.leaf!r}"),
            (any(node >= nodes for node in (fault.node or 0, *fault.nodes)), f"node; the last is {nodes - 1}"),
            ((fault.part or 0) >= self._topology.gpus_per_node, f"part {fault.part} of a node"),
        ):
            if wrong:
                raise SettingsError(f"fault {fault.kind} at {fault.t:g} s: there is no {what}")
        self._events.at(fault.t, partial(self._strike, fault))

    def _strike(self, fault: Fault, t: float) -> None:
        """Apply a fault to the nodes, GPUs or ports that it damages, and to the jobs that run there.

        A fault that names a run strikes later if this run is down.
        """
        kind = KINDS[fault.kind]
        target = next((state for state in self._jobs if state.job.name == fault.run), None)
        if target is not None and not target.done and not target.live and fault.node is None and not fault.leaf:
            # Only a running job can be interrupted, so a fault drawn for a time when the job is down strikes later.
            self._events.at(t + self._rng.uniform(30.0, 900.0), partial(self._strike, fault))
            return
        asked = fault
        fault, ports, nodes = self._place(asked, kind, target)
        hit = [s for s in self._jobs if s.live and (s is target or not nodes.isdisjoint(s.current.nodes))]
        if target is not None and kind.scope == "job":
            hit = [target] if target.live else []
        lasts = fault.lasts if fault.lasts is not None else self._rng.uniform(*kind.repair)
        announced = kind.effect == "planned" and bool(fault.nodes)
        if kind.replaced and (kind.effect != "planned" or announced):
            self._lifecycle.withdraw(nodes, t + lasts)
        clues = self._draw(kind)
        kinds = {clue.kind for clue in clues}
        self.broken.append(
            Damage(
                t,
                t + lasts,
                frozenset(nodes),
                kind.dark,
                frozenset(ports if "gpu_missing" in kinds else ()),
                frozenset(ports if "link_down" in kinds else ()),
                announced,
            )
        )
        for state in hit:
            if kind.effect == "end":
                self._interrupt(state, fault, kind, nodes, t)
            else:
                wait = 0.0 if announced else lasts
                self._at_step_end(state, t, asked, partial(self._affect, state, asked, fault, kind, nodes, wait))
        if kind.dark:
            return
        for node in sorted(nodes):
            for clue in clues:
                parts = [port.rail for port in ports if port.node == node] if clue.place == "port" else [fault.part]
                for part in parts:
                    self._observations.see(clue, node, part, t)

    def _draw(self, kind: FaultKind) -> tuple[Clue, ...]:
        (clues,) = self._rng.choices([clues for _, clues in kind.sees], [weight for weight, _ in kind.sees])
        return clues

    def _place(self, fault: Fault, kind: FaultKind, target: JobState | None) -> tuple[Fault, list[PortPlace], set[int]]:
        """Draw the leaf, node and GPU that a fault does not name. Return the completed fault, its ports and nodes."""
        inside = target.attempt.nodes if target is not None and target.attempt else range(self._topology.nodes)
        node = fault.node if fault.node is not None else self._rng.choice(inside)
        part = fault.part if fault.part is not None else self._rng.randrange(self._topology.gpus_per_node)
        if kind.scope == "leaf":
            leaf = fault.leaf or self._topology.leaf(PortPlace(node, part))
            ports = self._topology.below(leaf)
            return replace(fault, leaf=leaf), ports, {port.node for port in ports}
        nodes = set(fault.nodes) if fault.nodes else {node}
        if kind.effect == "planned" and not fault.nodes:
            nodes = set(inside)
        return replace(fault, node=node, part=part), [PortPlace(node, part)], nodes

    def _interrupt(self, state: JobState, fault: Fault, kind: FaultKind, nodes: set[int], t: float) -> None:
        """Block the processes of a job that a fault strikes, and schedule their end by a timeout."""
        attempt = state.current
        self._lifecycle.account(state, t)
        attempt.stuck = attempt.made(t)
        state.truth.strike(self._loss(state, fault, kind, nodes, t))
        state.live = False
        state.phase += 1
        if kind.dark:
            last_push = max(attempt.since, t - self._rng.uniform(0.0, PUSH))
            self._lifecycle.report(state, last_push)
            for node in attempt.nodes:
                if node in nodes:
                    self._nodes.one(state.job, attempt, node, last_push)
            attempt.dark |= nodes
        # Without a node left, there is no process that could hang.
        noticed = self._rng.uniform(*kind.noticed) if set(attempt.nodes) - attempt.dark else 0.0
        self._lifecycle.after(state, t + noticed, partial(self._fail, fault=fault, kind=kind, nodes=nodes))

    def _loss(self, state: JobState, fault: Fault, kind: FaultKind, nodes: set[int], t: float) -> TrueLoss:
        mine = sorted(nodes & set(state.current.nodes)) if kind.effect != "planned" else []
        node, part = fault.node or 0, fault.part or 0
        return TrueLoss(
            kind.name,
            kind.cause,
            kind.effect,
            state.current.id,
            EPOCH + t,
            tuple(self._nodes.hosts[n] for n in mine),
            self._topology.gpu(node, part) if kind.scope == "gpu" else "",
            self._topology.port(part) if kind.scope == "port" else "",
        )

    def _fail(self, state: JobState, t: float, fault: Fault, kind: FaultKind, nodes: set[int]) -> None:
        """End the processes of a failed attempt and schedule the restart."""
        job, attempt, truth = state.job, state.current, state.truth
        if attempt.activity == "step":
            truth.book("lost", t - state.booked, state.gpus)
            state.booked = t
        else:
            self._lifecycle.account(state, t)
        self._lifecycle.end(state, t)
        if kind.rollback:
            del state.durable[max(1, len(state.durable) - kind.rollback) :]
        self._nodes.echo(attempt, nodes, t)
        self._nodes.last(job, attempt, t)
        delay = job.restarts_after(self._rng, bool(state.unavailable))
        self._lifecycle.after(state, t + fault.by_hand + delay, self._lifecycle.launch)

    def _strike_again(self, state: JobState, fault: Fault, t: float) -> None:
        self._events.at(t + 60.0, partial(self._strike, replace(fault, run=state.job.name)))

    def _at_step_end(self, state: JobState, t: float, fault: Fault, action: Action) -> None:
        """Schedule a fault's action for the end of the job's current step. A job that is down gets the fault later."""
        attempt = state.attempt
        if attempt is None or attempt.ended is not None or not state.live:
            self._strike_again(state, fault, t)
        elif attempt.activity != "step":
            self._events.at(t + 10.0, lambda now: self._at_step_end(state, now, fault, action))
        else:
            self._unless_overtaken(state, attempt.since + (attempt.made(t) + 1) * attempt.each, fault, action)

    def _unless_overtaken(self, state: JobState, t: float, fault: Fault, action: Action) -> None:
        """Schedule a fault's action for time `t`. If the job fails before, schedule the fault again."""
        state.phase += 1
        phase = state.phase

        def then(now: float) -> None:
            if state.phase == phase:
                state.phase += 1
                action(now)
            elif not state.done:
                self._strike_again(state, fault, now)

        self._events.at(t, then)

    def _affect(
        self, state: JobState, asked: Fault, fault: Fault, kind: FaultKind, nodes: set[int], lasts: float, t: float
    ) -> None:
        """Slow a job down, stall it, or end its attempt in an orderly way, depending on the kind of fault."""
        loss = self._loss(state, fault, kind, nodes, t)
        if kind.effect == "slow":
            state.slow, state.slowed = fault.factor, loss
            state.truth.losses.append(loss)
            self._events.at(t + lasts, partial(self._end_slowdown, state, loss))
            self._lifecycle.resume(state, t)
        elif kind.effect == "stall":
            self._lifecycle.switch(state, kind.waits, t)
            if state.truth.open is None:
                state.truth.strike(loss)
            else:
                loss.alone = False
                state.truth.losses.append(loss)
            self._lifecycle.report(state, t)
            self._lifecycle.after(state, t + lasts, self._lifecycle.resume)
        else:
            self._lifecycle.switch(state, "checkpoint_save", t)
            saved = t + state.job.save_blocks + state.job.save_writes
            self._unless_overtaken(state, saved, asked, partial(self._preempt, state, loss, lasts))

    def _end_slowdown(self, state: JobState, loss: TrueLoss, t: float) -> None:
        """Restore the usual step time from the next checkpoint on, unless another slowdown has replaced this one."""
        if state.slowed is loss:
            state.slow, state.slowed = 1.0, None

    def _preempt(self, state: JobState, loss: TrueLoss, lasts: float, t: float) -> None:
        """End an attempt as preempted, release its nodes, and schedule the restart `lasts` seconds later."""
        attempt = state.current
        attempt.committed = attempt.step
        state.durable.append(attempt.step)
        self._lifecycle.account(state, t)
        loss.at = EPOCH + t
        state.truth.strike(loss)
        self._lifecycle.end(state, t)
        state.held = False
        self._nodes.last(state.job, attempt, t, "preempted")
        delay = state.job.restarts_after(self._rng, bool(state.unavailable))
        self._lifecycle.after(state, t + lasts + delay, self._lifecycle.launch)
