"""Verdicts of the ledger on a real job of eight gloo ranks as TP2 x PP2 x DP2, in which one rank is late."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from flopwatch.ledger.ledger import Ledger
from flopwatch.verdicts.stragglers import StragglerVerdict
from tests.support import ROOT, parallel_job, ranks

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.torch, pytest.mark.timeout(1500)]

# Of each kind and of healthy ones. 20 are judged for docs/stragglers.md, which takes half an hour.
TRIALS = int(os.environ.get("FLOPWATCH_PARALLEL_TRIALS", "1"))
INTERVALS, REPORT = 9, 15.0
LATE_BY = 0.05  # seconds of a step that takes some 0.16 s
KINDS = ("tp", "pp", "dp", "well")


def trial(kind: str, number: int) -> dict[str, Any]:
    """Return a trial with another late rank for each number. Only ranks of the first stage send forward."""
    if kind == "well":
        return {"intervals": INTERVALS}
    return {"intervals": INTERVALS, "late": (3 * number + 1) % parallel_job.SIZE, "where": kind, "by": LATE_BY}


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, int], list[StragglerVerdict]]:
    """Return the verdicts after each interval by kind and trial. One launch runs all trials."""
    trials = {(kind, number): trial(kind, number) for number in range(TRIALS) for kind in KINDS}
    script = str(ROOT / "tests" / "support" / "parallel_job.py")
    processes = ranks.start([script, json.dumps(list(trials.values()))], parallel_job.SIZE)
    try:
        reports = [iter(json.loads(process.communicate(timeout=1400)[0])) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return {key: judged([[next(one) for one in reports] for _ in range(INTERVALS + 1)]) for key in trials}


def judged(reports: list[list[list[list[Any]]]]) -> list[StragglerVerdict]:
    """Return the ledger's verdict after each report of all ranks, which are on two hosts."""
    ledger, found = Ledger(), []
    for number, rows in enumerate(reports, 1):
        t = REPORT * number
        for host in range(2):
            line = {"t": t, "run": "r", "attempt": "a", "source": f"node-{host}", "event": "snapshot", "started": 0.0}
            line |= {"rank": 4 * host, "gpus": 4, "step": number, "activity_seconds": {"step": t}}
            line["waits"] = [row for of_rank in rows[4 * host : 4 * host + 4] for row in of_rank]
            ledger.apply(line)
        verdict = ledger.runs["", "r"].stragglers.verdict
        found.append(verdict if verdict is not None else StragglerVerdict("none"))
    return found


@pytest.mark.parametrize("number", range(TRIALS))
@pytest.mark.parametrize("kind", ["tp", "pp", "dp"])
def test_the_late_rank_of_a_group_is_named_and_no_other(
    verdicts: dict[tuple[str, int], list[StragglerVerdict]], kind: str, number: int
) -> None:
    late = trial(kind, number)["late"]
    found = verdicts[kind, number]
    assert {one.rank for verdict in found for one in verdict.suspects} == {late}
    assert found[-1].kind == "rank"
    [suspect] = found[-1].suspects
    group = suspect.communicator
    # The tensor parallel peer waits, too: after a send in the next microbatch, and after a step in the next one.
    assert group.kind in {"tp", kind} - {"pp"}
    key = parallel_job.MEMBERS[group.kind]
    assert group.ranks == tuple(rank for rank in range(parallel_job.SIZE) if key(rank) == key(late))


@pytest.mark.parametrize("number", range(TRIALS))
def test_no_rank_of_a_healthy_job_is_named(
    verdicts: dict[tuple[str, int], list[StragglerVerdict]], number: int
) -> None:
    found = verdicts["well", number]
    assert len(found) == INTERVALS + 1
    assert {one.rank for verdict in found for one in verdict.suspects} == set()
    assert {verdict.judged for verdict in found[3:]} != {0}
