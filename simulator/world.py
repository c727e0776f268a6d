"""A cluster in virtual time: jobs that train, faults that strike, and the records that node exporters would send.

Sparse by default, because 2,048 nodes that speak every 15 seconds for 54 days are 637 million records: every node tells
the first and the last of an attempt, and what it saw when it saw it; the one that the ledger follows also tells every
checkpoint. That is enough for exact books, since all that lies between is linear. With `every`, all nodes tell all.

The truth is booked apart (`truth.py`) and knows nothing of records.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from flopwatch.settings import SettingsError
from simulator.faults import KINDS, Clue, Fault, Kind
from simulator.jobs import Attempt, Job
from simulator.nodes import DAILY, EPOCH, PUSH, Nodes, Noise, Record
from simulator.topology import Port, Topology
from simulator.truth import Loss, Truth


@dataclass(frozen=True)
class Damage:
    """What is broken, and for how long; times are virtual, a GPU's place is its port's."""

    since: float
    until: float
    nodes: frozenset[int]
    dark: bool
    gpus: frozenset[Port]
    ports: frozenset[Port]
    announced: bool = False  # somebody works there, and has said so


@dataclass(slots=True)
class Running:
    """A job and where it stands."""

    job: Job
    gpus: int
    truth: Truth
    nodes: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    number: int = 0
    phase: int = 0  # what was planned for an earlier one does not happen
    booked: float = 0.0  # the truth is told up to here
    durable: list[int] = field(default_factory=list)  # steps of checkpoints that can be restored
    slow: float = 1.0  # times the usual step, from the next stretch of steps on
    slowed: Loss | None = None  # by this
    charged: Loss | None = None  # the present stretch, whose usual step is this
    usual: float = 0.0
    held: bool = True  # whether the GPUs are, while it is down
    unavailable: set[int] = field(default_factory=set)  # nodes to be exchanged before it starts again
    live: bool = False  # it has processes, and nothing holds them up
    done: bool = False


class World:
    """A cluster with its jobs and faults; `run` lives through it once and hands every record to `tell`."""

    def __init__(
        self,
        topology: Topology,
        jobs: Iterable[Job],
        faults: Iterable[Fault],
        seconds: float,
        seed: int,
        tell: Callable[[Record], object],
        noise: Noise | None = None,
        every: float | None = None,
        look: Callable[[World, float], object] | None = None,
        look_every: float = 60.0,
    ) -> None:
        self.topology, self.seconds = topology, seconds
        self._every = every
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self.nodes = Nodes(topology, noise if noise is not None else Noise(), self._rng, tell)
        self._spares = list(range(topology.nodes))
        self.broken: list[Damage] = []
        self._waiting: list[Running] = []
        self.jobs: list[Running] = []
        for job in jobs:
            gpus = job.nodes * topology.gpus_per_node
            if job.mesh and math.prod(job.mesh.values()) != gpus:
                raise ValueError(f"{job.name}: a mesh of {dict(job.mesh)} is not {gpus} GPUs")
            truth = Truth(
                job.name, job.tenant, EPOCH + job.begins - job.queue, job.flops_per_step(gpus), job.peak_flops
            )
            self.jobs.append(Running(job, gpus, truth))
        if sum(running.job.nodes for running in self.jobs) > topology.nodes:
            raise ValueError(f"{topology.nodes} nodes are too few for these jobs")
        for running in self.jobs:
            self._at(running.job.begins - running.job.queue, partial(self._submit, running))
            self._at(running.job.begins, partial(self._launch, running))
        for fault in faults:
            self._check(fault)
            self._at(fault.t, partial(self._strike, fault))
        if self.nodes.noise.per_node_day > 0:
            self._at(self._until_noise(), self._make_noise)
        if look is not None:
            self._at(0.0, partial(self._look, look, look_every))

    def _check(self, fault: Fault) -> None:
        """Raise SettingsError if there is no such place."""
        nodes, runs = self.topology.nodes, [running.job.name for running in self.jobs]
        for wrong, what in (
            (fault.run and fault.run not in runs, f"run {fault.run!r}; there are {', '.join(runs)}"),
            (fault.leaf and not self.topology.below(fault.leaf), f"leaf {fault.leaf!r}"),
            (any(node >= nodes for node in (fault.node or 0, *fault.nodes)), f"node; the last is {nodes - 1}"),
            ((fault.part or 0) >= self.topology.gpus_per_node, f"part {fault.part} of a node"),
        ):
            if wrong:
                raise SettingsError(f"fault {fault.kind} at {fault.t:g} s: there is no {what}")

    def run(self) -> list[Truth]:
        """Live through it and return the truth of each job."""
        while self._heap and not all(running.done for running in self.jobs):
            t, _, happens = heapq.heappop(self._heap)
            happens(t)
        return [running.truth for running in self.jobs]

    def _look(self, look: Callable[[World, float], object], every: float, t: float) -> None:
        look(self, t)
        self._at(t + every, partial(self._look, look, every))

    def _at(self, t: float, happens: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (t, self._count, happens))

    def _next(self, running: Running, t: float, happens: Callable[[Running, float], None]) -> None:
        """Let something happen, unless something else happens to the job before."""
        phase = running.phase

        def unless_overtaken(now: float) -> None:
            if running.phase == phase:
                running.phase += 1
                happens(running, now)

        self._at(t, unless_overtaken)

    # A job's life.

    def _submit(self, running: Running, t: float) -> None:
        job = running.job
        if job.queue > 0:
            running.truth.seconds["queue"] = job.queue
            self.nodes.submitted(job, t)

    def _launch(self, running: Running, t: float) -> None:
        """Start the processes, as soon as there are nodes for all of them."""
        kept = [node for node in running.nodes if node not in running.unavailable]
        wanted = running.job.nodes - len(kept)
        if wanted > len(self._spares):
            if running not in self._waiting:
                self._waiting.append(running)
            return
        new = [self._spares.pop(0) for _ in range(wanted)]
        # A new node takes the ranks of the one it stands for.
        running.nodes = (
            kept + new
            if not running.nodes
            else [new.pop(0) if node in running.unavailable else node for node in running.nodes]
        )
        running.unavailable = set()
        truth = running.truth
        if truth.start is None:
            truth.start = EPOCH + t
        else:
            truth.book("down", t - running.booked, running.gpus, running.held)
        truth.attempts += 1
        running.number += 1
        running.booked, running.held, running.live = t, True, True
        attempt = Attempt(
            f"{running.job.name}.{running.number}",
            t,
            list(running.nodes),
            running.durable[-1] if running.durable else None,
            committed=running.durable[-1] if running.durable else None,
            since=t,
        )
        attempt.step = attempt.resumed if attempt.resumed is not None else 0
        running.attempt = attempt
        self._next(running, t + self._rng.uniform(*running.job.startup), self._started)
        self._at(t + 1, partial(self.nodes.first, running.job, attempt))
        if self._every is not None:
            self._at(t + self._every, partial(self._tick, running, attempt))

    def _started(self, running: Running, t: float) -> None:
        job = running.job
        if job.compile[1] > 0:
            self._switch(running, "compile", t)
            self._next(running, t + self._rng.uniform(*job.compile), self._restore)
        else:
            self._restore(running, t)

    def _restore(self, running: Running, t: float) -> None:
        attempt = _attempt(running)
        if attempt.resumed is None:
            self._train(running, t)
            return
        self._switch(running, "checkpoint_restore", t)
        self._next(running, t + self._rng.uniform(*running.job.restore), self._restored)

    def _restored(self, running: Running, t: float) -> None:
        attempt = _attempt(running)
        attempt.restored = attempt.resumed
        self._train(running, t)
        self._tell_leader(running, t)

    def _train(self, running: Running, t: float) -> None:
        """Train up to the next checkpoint."""
        job, attempt = running.job, _attempt(running)
        self._switch(running, "step", t)
        running.usual = job.step_seconds * (1 + self._rng.uniform(-1, 1) * job.step_spread)
        running.charged = running.slowed
        attempt.each = running.usual * running.slow
        count = max(1, round(job.checkpoint_every / job.step_seconds))
        if job.steps is not None:
            count = min(count, max(1, job.steps - attempt.step))
        elif t + count * attempt.each > self.seconds:
            count = max(1, round((self.seconds - t) / attempt.each))
        self._next(running, t + count * attempt.each, self._save)
        if running.truth.open is not None and attempt.step + count > running.truth.steps >= attempt.step:
            new = t + (running.truth.steps + 1 - attempt.step) * attempt.each
            phase = running.phase
            self._at(new, lambda now: self._tell_leader(running, now) if running.phase == phase else None)

    def _save(self, running: Running, t: float) -> None:
        job, attempt = running.job, _attempt(running)
        self._switch(running, "checkpoint_save", t)
        last = t >= self.seconds - 1e-3 if job.steps is None else attempt.step >= job.steps
        if last:
            self._next(running, t + job.save_blocks + job.save_writes, self._complete)
        else:
            self._next(running, t + job.save_blocks, self._saved)

    def _saved(self, running: Running, t: float) -> None:
        attempt = _attempt(running)
        self._train(running, t)
        self._at(t + running.job.save_writes, partial(self._written, running, attempt, attempt.step))
        self._tell_leader(running, t)

    def _written(self, running: Running, attempt: Attempt, step: int, t: float) -> None:
        """Take a checkpoint for durable, if the processes that wrote it lived that long."""
        if running.attempt is attempt and running.live:
            running.durable.append(step)
            del running.durable[:-8]
            attempt.committed = step
            self._tell_leader(running, t)

    def _complete(self, running: Running, t: float) -> None:
        attempt = _attempt(running)
        attempt.committed = attempt.step
        self._account(running, t)
        running.live, running.done = False, True
        running.truth.end = EPOCH + t
        self.nodes.last(running.job, attempt, t, "completed")

    def _switch(self, running: Running, activity: str, t: float) -> None:
        self._account(running, t)
        _attempt(running).switch(activity, t)

    def _account(self, running: Running, t: float) -> None:
        """Book the truth up to now; of a step, once it is made."""
        attempt, truth = _attempt(running), running.truth
        if attempt.activity != "step":
            truth.book(attempt.activity, t - running.booked, running.gpus)
            running.booked = t
            return
        before = round((running.booked - attempt.since) / attempt.each)
        made = attempt.made(t) - before
        truth.made(
            attempt.step + before,
            made,
            attempt.each,
            EPOCH + running.booked,
            running.gpus,
            running.charged,
            running.usual,
        )
        running.booked = attempt.since + (before + made) * attempt.each

    # Faults.

    def _strike(self, fault: Fault, t: float) -> None:
        """Let a fault happen to a job or, where none is hit, to the place alone."""
        kind = KINDS[fault.kind]
        target = next((r for r in self.jobs if r.job.name == fault.run), None)
        if target is not None and not target.done and not target.live and fault.node is None and not fault.leaf:
            # Only what runs can be interrupted: one drawn for a time when it does not comes soon after.
            self._at(t + self._rng.uniform(30.0, 900.0), partial(self._strike, fault))
            return
        asked = fault
        fault, ports, nodes = self._place(asked, kind, target)
        hit = [r for r in self.jobs if r.live and (r is target or not nodes.isdisjoint(_attempt(r).nodes))]
        if target is not None and kind.scope == "job":
            hit = [target] if target.live else []
        lasts = fault.lasts if fault.lasts is not None else self._rng.uniform(*kind.repair)
        if kind.replaced and not (kind.effect == "planned" and not fault.nodes):
            self._withdraw(nodes, t + lasts)
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
                announced=kind.effect == "planned" and bool(fault.nodes),
            )
        )
        for running in hit:
            if kind.effect == "end":
                self._interrupt(running, fault, kind, nodes, t)
            else:
                wait = lasts if kind.effect != "planned" or not fault.nodes else 0.0
                self._next_step(running, t, asked, partial(self._affect, running, asked, fault, kind, nodes, wait))
        if kind.dark:
            return
        for node in sorted(nodes):
            for clue in clues:
                places = [port.rail for port in ports if port.node == node] if clue.place == "port" else [fault.part]
                for part in places:
                    self._see(clue, node, part, t)

    def _place(self, fault: Fault, kind: Kind, target: Running | None) -> tuple[Fault, list[Port], set[int]]:
        """Return the fault with its place drawn where it was left open, its ports and its nodes."""
        inside = (
            _attempt(target).nodes if target is not None and target.attempt is not None else range(self.topology.nodes)
        )
        node = fault.node if fault.node is not None else self._rng.choice(inside)
        part = fault.part if fault.part is not None else self._rng.randrange(self.topology.gpus_per_node)
        if kind.scope == "leaf":
            leaf = fault.leaf or self.topology.leaf(Port(node, part))
            ports = self.topology.below(leaf)
            return replace(fault, leaf=leaf), ports, {port.node for port in ports}
        nodes = set(fault.nodes) if fault.nodes else {node}
        if kind.effect == "planned" and not fault.nodes:
            nodes = set(inside)
        return replace(fault, node=node, part=part), [Port(node, part)], nodes

    def _interrupt(self, running: Running, fault: Fault, kind: Kind, nodes: set[int], t: float) -> None:
        """Hold a job's processes up until somebody notices and they end."""
        attempt = _attempt(running)
        self._account(running, t)
        attempt.stuck = attempt.made(t)
        running.truth.strike(self._loss(running, fault, kind, nodes, t))
        running.live = False
        running.phase += 1
        if kind.dark:
            heard = max(attempt.since, t - self._rng.uniform(0.0, PUSH))
            self._tell_leader(running, heard)
            for node in attempt.nodes:
                if node in nodes:
                    self.nodes.one(running.job, attempt, node, heard)
            attempt.dark |= nodes
        # Where no node is left, nobody hangs.
        noticed = self._rng.uniform(*kind.noticed) if set(attempt.nodes) - attempt.dark else 0.0
        self._next(running, t + noticed, partial(self._end, fault=fault, kind=kind, nodes=nodes))

    def _loss(self, running: Running, fault: Fault, kind: Kind, nodes: set[int], t: float) -> Loss:
        attempt = _attempt(running)
        mine = sorted(nodes & set(attempt.nodes)) if kind.effect != "planned" else []
        node = fault.node if fault.node is not None else 0
        return Loss(
            kind.name,
            kind.cause,
            kind.effect,
            attempt.id,
            EPOCH + t,
            tuple(self.nodes.hosts[n] for n in mine),
            self.topology.gpu(node, fault.part or 0) if kind.scope == "gpu" else "",
            self.topology.port(fault.part or 0) if kind.scope == "port" else "",
        )

    def _end(self, running: Running, t: float, fault: Fault, kind: Kind, nodes: set[int]) -> None:
        """End the processes and see to it that they start again."""
        job, attempt, truth = running.job, _attempt(running), running.truth
        if attempt.activity == "step":
            truth.book("lost", t - running.booked, running.gpus)
            running.booked = t
        else:
            self._account(running, t)
        self._closed(running, t)
        if kind.rollback:
            del running.durable[max(1, len(running.durable) - kind.rollback) :]
        self.nodes.echo(attempt, nodes, t)
        self.nodes.last(job, attempt, t)
        exchanged = bool(running.unavailable)
        self._next(running, t + fault.by_hand + job.restarts_after(self._rng, exchanged), self._launch)

    def _closed(self, running: Running, t: float) -> None:
        _attempt(running).ended = t
        running.live = False
        running.slow, running.slowed = 1.0, None  # the next attempt is another arrangement
        running.truth.over(EPOCH + t)

    def _next_step(self, running: Running, t: float, fault: Fault, happens: Callable[[float], None]) -> None:
        """Let something happen to a job in order: when the step under way is made. What is overtaken comes again."""
        attempt = running.attempt
        if attempt is None or attempt.ended is not None or not running.live:
            self._at(t + 60.0, partial(self._strike, replace(fault, run=running.job.name)))
        elif attempt.activity != "step":
            self._at(t + 10.0, lambda now: self._next_step(running, now, fault, happens))
        else:
            self._unless(running, attempt.since + (attempt.made(t) + 1) * attempt.each, fault, happens)

    def _unless(self, running: Running, t: float, fault: Fault, happens: Callable[[float], None]) -> None:
        """Let something happen to a job; if a failure overtakes it, let the fault it is of strike again."""
        running.phase += 1
        phase = running.phase

        def then(now: float) -> None:
            if running.phase == phase:
                running.phase += 1
                happens(now)
            elif not running.done:
                self._at(now + 60.0, partial(self._strike, replace(fault, run=running.job.name)))

        self._at(t, then)

    def _affect(
        self, running: Running, asked: Fault, fault: Fault, kind: Kind, nodes: set[int], lasts: float, t: float
    ) -> None:
        """Let something happen that ends nothing, or ends an attempt in order."""
        job = running.job
        if kind.effect == "slow":
            running.slow, running.slowed = fault.factor, self._loss(running, fault, kind, nodes, t)
            running.truth.losses.append(running.slowed)
            self._at(t + lasts, partial(self._fast_again, running, running.slowed))
            self._train(running, t)
            self._tell_leader(running, t)
            return
        loss = self._loss(running, fault, kind, nodes, t)
        if kind.effect == "stall":
            self._switch(running, kind.waits, t)
            if running.truth.open is None:
                running.truth.strike(loss)
            else:
                loss.alone = False
                running.truth.losses.append(loss)
            self._tell_leader(running, t)
            self._next(running, t + lasts, self._go_on)
        else:
            self._switch(running, "checkpoint_save", t)
            self._unless(
                running, t + job.save_blocks + job.save_writes, asked, partial(self._give_up, running, loss, lasts)
            )

    def _go_on(self, running: Running, t: float) -> None:
        self._train(running, t)
        self._tell_leader(running, t)

    def _fast_again(self, running: Running, loss: Loss, t: float) -> None:
        if running.slowed is loss:
            running.slow, running.slowed = 1.0, None  # from the next checkpoint on

    def _give_up(self, running: Running, loss: Loss, lasts: float, t: float) -> None:
        """End an attempt in order and give the nodes back."""
        attempt = _attempt(running)
        attempt.committed = attempt.step
        running.durable.append(attempt.step)
        self._account(running, t)
        loss.at = EPOCH + t
        running.truth.strike(loss)
        self._closed(running, t)
        running.held = False
        self.nodes.last(running.job, attempt, t, "preempted")
        self._next(running, t + lasts + running.job.restarts_after(self._rng, bool(running.unavailable)), self._launch)

    def _withdraw(self, nodes: set[int], until: float) -> None:
        """Take nodes out until they are repaired."""
        self._spares = [node for node in self._spares if node not in nodes]
        for running in self.jobs:
            running.unavailable |= nodes & set(running.nodes)
        self._at(until, partial(self._give_back, nodes))

    def _give_back(self, nodes: set[int], t: float) -> None:
        for node in sorted(nodes):
            mine = next((r for r in self.jobs if node in r.nodes and not r.done), None)
            if mine is not None:
                mine.unavailable.discard(node)
            elif node not in self._spares:
                self._spares.append(node)
        waiting, self._waiting = self._waiting, []
        for running in waiting:
            self._launch(running, t)

    # What nodes see and tell.

    def _draw(self, kind: Kind) -> tuple[Clue, ...]:
        (clues,) = self._rng.choices([clues for _, clues in kind.sees], [weight for weight, _ in kind.sees])
        return clues

    def _see(self, clue: Clue, node: int, part: int | None, t: float, *, noise: bool = False) -> None:
        """Let a node see something at its time, or never, and tell it at once, or late."""
        known = self.nodes.noise
        if not noise and self._rng.random() < known.missing:
            return
        seen = t + self._rng.uniform(*clue.after)
        late = self._rng.uniform(*known.delay) if self._rng.random() < known.late else 0.0
        told = max(t, seen) + self._rng.uniform(0.0, PUSH) + late
        self._at(told, partial(self._report, clue, node, part or 0, seen))

    def _report(self, clue: Clue, node: int, part: int, seen: float, t: float) -> None:
        here = next(
            (
                r
                for r in self.jobs
                if r.attempt is not None and node in r.attempt.nodes and (node not in r.attempt.dark)
            ),
            None,
        )
        attempt = here.attempt if here is not None else None
        self.nodes.note(clue, node, part, seen, attempt)
        if here is not None and attempt is not None and attempt.ended is None:
            self.nodes.leader(here.job, attempt, t)
            self.nodes.one(here.job, attempt, node, t)
        else:
            self.nodes.again(node, t)

    def _until_noise(self) -> float:
        return self._rng.expovariate(self.nodes.noise.per_node_day * self.topology.nodes / 86400)

    def _make_noise(self, t: float) -> None:
        (clue,) = self._rng.choices([clue for _, clue in DAILY], [weight for weight, _ in DAILY])
        node, part = self._rng.randrange(self.topology.nodes), self._rng.randrange(self.topology.gpus_per_node)
        self._see(clue, node, part, t, noise=True)
        self._at(t + self._until_noise(), self._make_noise)

    def _tell_leader(self, running: Running, t: float) -> None:
        self.nodes.leader(running.job, _attempt(running), t)

    def _tick(self, running: Running, attempt: Attempt, t: float) -> None:
        """Let all nodes tell where they are, and again and again until the attempt ends."""
        if attempt.ended is None and self._every is not None and not running.done:
            self.nodes.all(running.job, attempt, t)
            self._at(t + self._every, partial(self._tick, running, attempt))


def _attempt(running: Running) -> Attempt:
    assert running.attempt is not None
    return running.attempt
