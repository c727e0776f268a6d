"""Two ledgers that get the records of the same hosts. Each minute one of them is killed, and both keep equal books."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flopwatch.ledger.ledger import Ledger as InMemory
from tests.support.ledger_process import Ledger, serving

Record = dict[str, Any]

HOSTS, STEP, EVERY, MINUTE = 4, 5.0, 15, 4  # hosts, seconds of a step and between records, records in a minute
RETURNS = 720.0  # seconds after which each attempt fails; the next one starts 30 s later, from the last checkpoint


def records(host: int, t: float) -> Record:
    """Return the record of a host at second `t` of the hour."""
    attempt, age = divmod(t, RETURNS)
    attempt, age, failed = int(attempt), age - 30, age == 0
    if failed and t > 0:
        attempt, age = attempt - 1, RETURNS - 30
    restored, stalled = 100.0 * attempt, age / 10
    steps = max(0.0, (age - stalled - 20) // STEP)
    record = {"t": 1e6 + t, "run": "r", "attempt": f"a{attempt}", "source": f"h{host}", "event": "snapshot"}
    record |= {"rank": 8 * host, "gpus": 8, "peak_flops": 8e12, "started": 1e6 + attempt * RETURNS + 30}
    record |= {"restored_step": restored, "step": restored + steps, "committed_step": restored + steps // 50 * 50}
    record |= {"activity_seconds": {"startup": min(age, 20.0), "data_stall": stalled, "step": age - stalled - 20}}
    record |= {"model_flops": steps * 1e13, "work": {"tokens": steps * 4096, "steps": steps}}
    return record | ({"event": "finish", "status": "failed"} if failed else {})


def history(minutes: int) -> Iterator[list[Record]]:
    """Yield the records of all hosts, every 15 s."""
    for turn in range(1, minutes * MINUTE + 1):
        t = float(EVERY * turn)
        if (t - 1e-9) % RETURNS > 60:
            yield [records(host, t) for host in range(HOSTS)]
        else:
            yield []


class Target:
    """Ledger that may be down, and the newest record of each host and attempt that it has not acknowledged."""

    def __init__(self, state: Path) -> None:
        self._state, self._stack, self._pending = state, ExitStack(), dict[tuple[str, str], Record]()
        self.process: Ledger | None = None

    def start(self) -> None:
        self.process = self._stack.enter_context(serving(self._state))

    def kill(self) -> None:
        """Kill the ledger's process, without the chance to write anything."""
        self._stack.close()
        self.process = None

    def send(self, new: list[Record]) -> None:
        self._pending |= {(record["source"], record["attempt"]): record for record in new}
        for key, record in list(self._pending.items()):
            if self.process is not None and self.process.post(json.dumps([record]))[0] == 200:
                del self._pending[key]

    def books(self) -> dict[str, Any]:
        assert self.process is not None
        shown: dict[str, Any] = json.loads(self.process.ask("GET", "/v1/runs/record?run=r")[1])
        served = self.process.ask("GET", "/metrics")[1]
        lines = [line for line in served.splitlines() if line.startswith(("run_tokens_total{", "run_retained_flops"))]
        return {name: shown[name] for name in ("buckets", "gpu_seconds", "frontier")} | {
            "summary": {name: shown["summary"][name] for name in ("ends", "retained_flops", "high_water_step")},
            "attempts": [[one["status"], one["last_step"]] for one in shown["attempts"]],
            "served": [float(line.rpartition(" ")[2]) for line in lines],
        }


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ledgers_of_which_one_is_killed_each_minute_for_an_hour_keep_equal_books(tmp_path: Path) -> None:
    minutes = 60
    targets, memory, kills = [Target(tmp_path / name) for name in "ab"], InMemory(), 0
    try:
        for target in targets:
            target.start()
        for turn, new in enumerate(history(minutes)):
            down = targets[turn // MINUTE % 2]
            if turn % MINUTE == 1:
                down.kill()
                kills += 1
            elif turn % MINUTE == 2:
                down.start()
            for target in targets:
                target.send(new)
            for record in new:
                memory.apply(record)
        assert kills == minutes
        first, second = (target.books() for target in targets)
        assert first == second
        assert len(first["served"]) == 2
        assert min(first["served"]) > 0
        assert first["summary"]["ends"]["failed"] == minutes * 60 // RETURNS
        buckets = memory.runs["", "r"].buckets
        assert first["buckets"] == pytest.approx(buckets.seconds)
        assert sum(first["buckets"].values()) == pytest.approx(first["frontier"] - 1e6 - 30)
    finally:
        for target in targets:
            target.kill()
