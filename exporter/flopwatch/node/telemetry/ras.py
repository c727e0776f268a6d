"""Questions to NCCL's RAS about an overdue step: which ranks have started fewer collectives than their peers.

A question can crash a training process whose communicators are being made. It is therefore asked only about a step that
is overdue, once per run and minute, by the host of rank 0, and only if no process that may answer makes communicators.
All processes of a host share the port, so each listening socket must be held by a rank that this exporter knows.
A child process asks (`ras_query`). No scrape and no push waits for it.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch import catalogue as m
from flopwatch.node.collectors import StateFile
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import open_step
from flopwatch.node.telemetry.admission import AttemptKey, Rank
from flopwatch.node.telemetry.ras_query import listeners, not_held
from flopwatch.settings import Address

log = logging.getLogger(__name__)

OUTCOMES = "answered unreachable shared old initializing foreign malformed deadline"
PAUSE, LONGEST = 60.0, 480.0  # seconds between two questions about a run, the second after several that failed
SETTLED = 10  # steps of a process after which it makes no communicator that every step needs
TIMEOUT = 15.0  # seconds in which the child ends, longer than its own deadline
RAS_STATE = "nccl_ras.json"


class Question(NamedTuple):
    """Question about a run: its number of ranks, this host's pids as pushed, and which processes may answer."""

    size: int
    pids: dict[int, int]
    holders: list[int]  # pids in this namespace of the ranks of all runs


@dataclass
class _Run:
    asked: float
    pause: float = PAUSE
    behind: list[list[str]] | None = None
    changed: bool = False


class Ras:
    """NCCL's RAS at an address: asks about runs in a thread, and stores what it answered."""

    def __init__(
        self,
        address: Address,
        registry: Registry,
        memory: StateFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self._address, self._memory, self._clock, self._proc = address, memory, clock, proc
        self._lock = threading.Lock()
        self._runs: dict[AttemptKey, _Run] = {}
        self._busy = False
        self._last = ""
        self._counter = registry.metric(m.FLOPWATCH_NCCL_RAS_QUERIES_TOTAL)
        for outcome in OUTCOMES.split():
            self._counter.add(outcome, by=0)

    def ask(self, key: AttemptKey, question: Question) -> None:
        """Ask about a run whose step is overdue, unless it was asked in the last minute. Returns at once."""
        now = self._clock()
        with self._lock:
            asked = (run for other, run in self._runs.items() if other[:2] == key[:2])
            if self._busy or any(now < run.asked + run.pause for run in asked):
                return
            run = self._runs.setdefault(key, _Run(now))
            run.asked, self._busy = now, True
        try:
            threading.Thread(target=self._ask, args=(run, question), name="ras", daemon=True).start()
        except RuntimeError as error:  # no further thread is allowed
            self._busy = False
            log.warning("NCCL RAS not asked address=%s error=%r", self._address, str(error))

    def behind(self, key: AttemptKey) -> list[list[str]] | None:
        """Return the field `ras` of an open step (`flopwatch.ledger.record`), None without a difference."""
        run = self._runs.get(key)
        return run.behind or None if run is not None else None

    def changed(self, key: AttemptKey) -> bool:
        """Return whether an answer arrived since the last call."""
        if (run := self._runs.get(key)) is None:
            return False
        changed, run.changed = run.changed, False
        return changed

    def forget(self, key: AttemptKey) -> None:
        """Drop the answer about a step that has ended."""
        if (run := self._runs.get(key)) is not None:
            run.behind = None

    def keep(self, keys: Collection[AttemptKey]) -> None:
        """Drop what is known of all other attempts, but for when their runs were asked about."""
        now = self._clock()
        with self._lock:
            self._runs = {key: run for key, run in self._runs.items() if key in keys or now < run.asked + run.pause}

    def _ask(self, run: _Run, question: Question) -> None:
        try:
            answer = self._answer(question)
        except Exception as error:
            answer = {"outcome": "malformed", "detail": f"{type(error).__name__}: {error}"}
        outcome, detail = answer["outcome"], answer["detail"]
        with self._lock:
            run.pause = PAUSE if outcome == "answered" else min(LONGEST, 2 * run.pause)
            run.behind, run.changed, self._busy = answer.get("behind"), True, False
        self._counter.add(outcome)
        if outcome != self._last:
            log.info("NCCL RAS asked address=%s outcome=%s%s", self._address, outcome, detail and f" detail={detail!r}")
        self._last = outcome
        if self._memory is not None:
            self._memory.save({"t": time.time(), "outcome": outcome, "detail": detail})

    def _answer(self, question: Question) -> dict[str, Any]:
        if not listeners(self._address.port, self._proc):
            return {"outcome": "unreachable", "detail": "no process listens"}
        if foreign := not_held(self._address.port, question.holders, self._proc):
            return {"outcome": "shared", "detail": f"{len(foreign)} sockets listen that no known rank is seen to hold"}
        place = {"host": self._address.host, "port": self._address.port, "proc": str(self._proc)}
        text = json.dumps({**place, **question._asdict()})
        search = os.pathsep.join(path for path in sys.path if path)
        try:
            child = subprocess.run(
                [sys.executable, "-m", "flopwatch.node.telemetry.ras_query"],
                input=text.encode(),
                stdout=subprocess.PIPE,
                timeout=TIMEOUT,
                env=dict(os.environ, PYTHONPATH=search, PYTHONSAFEPATH="1"),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "deadline", "detail": "the child did not end"}
        if child.returncode != 0:
            return {"outcome": "malformed", "detail": f"the child ended with {child.returncode}"}
        answer: dict[str, Any] = json.loads(child.stdout)
        return answer


def has_settled(rank: Rank) -> bool:
    """Return whether a rank on a GPU has done some steps, and in the open one no collective of a new group.

    False before its process was looked for, which decides whether it may hold RAS' socket.
    """
    groups, steps = open_step.groups_of(rank.push), rank.step.steps or 0
    settled = rank.pid is not None and steps >= SETTLED and bool(groups) and groups <= rank.groups
    return settled and bool(rank.push.declared("uuid"))
