"""Verdicts on simulated jobs of every kind: a small confusion matrix that misses no bound."""

from __future__ import annotations

import json

import pytest

from flopwatch.__main__ import main
from simulator.confusion import JobVerdict, MatrixRow, evaluate, markdown, misses, of_ledger, report
from simulator.kinds import SCENARIOS
from simulator.ledger_series import DELAYED, disturbed, records
from simulator.ranks import SynchronousJob, Trouble


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_jobs_of_every_kind_miss_no_bound() -> None:
    found = evaluate(2, hours=14)
    assert {row["kind"] for row in found["rows"] if row["right"] < row["jobs"]} == set()
    assert (found["precision"], found["recall"], found["communicator"]) == (1, 1, 1)
    assert found["healthy_misnamed"] == 0
    assert found["late_20_p95"] <= 60
    assert found["late_10_p95"] <= 300


@pytest.mark.long
def test_the_command_prints_the_matrix_and_ends_with_the_bounds_that_are_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["simulate", "--scenario", "verdicts", "--seeds", "1", "--hours", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["seeds"], found["healthy_hours"], found["healthy_misnamed"]) == (1, 1, 0)
    assert status == bool(misses(found))


def test_hours_are_for_the_verdicts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--hours", "1"]) == 1
    assert "--hours is for --scenario verdicts, not llama3" in capsys.readouterr().err


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_ledger_that_names_no_rank_is_found_out(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"stragglers": "slow_memory", "hangs": "stopped"}[scenario]
    found = of_ledger(scenario, kind, 1, mend=False)
    assert (found.verdict, found.result) == ("rank", "right")
    monkeypatch.setattr("flopwatch.verdicts.hangs.CERTAIN", 1.0)
    monkeypatch.setattr("flopwatch.verdicts.stragglers.MIN_SHARE", 2.0)
    assert of_ledger(scenario, kind, 1, mend=False).result == "none"


def test_records_of_a_job_that_is_disturbed_are_lost_or_late() -> None:
    job = SynchronousJob("well-1", "well-1 job", Trouble(), 720.0)
    sent, arrived = ({(one["source"], one["t"]): t for t, one in some} for some in (records(job), disturbed(job)))
    delays = [t - sent[record] for record, t in arrived.items()]
    assert 0.5 * len(sent) < len(arrived) < len(sent)
    assert 0 == min(delays) < max(delays) <= DELAYED[1]
    assert [*arrived.values()] == sorted(arrived.values())


def test_a_worse_verdict_misses_a_bound() -> None:
    right = JobVerdict("rank", "right", True, 30.0, 0.01)
    rows = [MatrixRow("1,024 ranks", kind, True, [right] * 4) for kind in ("late by 20 %", "late by 10 %")] + [
        MatrixRow("hangs", "stopped", True, [JobVerdict("rank", "right", None, 19.0)])
    ]
    assert misses(report(rows, 4, 1000.0, 0)) == []
    rows[0].jobs[:2] = [JobVerdict("rank", "wrong", False, 75.0), JobVerdict("rank", "right", True, 75.0, 0.04)]
    rows[2].jobs.append(JobVerdict("none", "none"))
    found = report(rows, 4, 1000.0, 1)
    assert misses(found) == [
        "precision 88.89%, below 99 %",
        "recall 80.00%, below 95 %",
        "right communicator 87.50%, below 95 %",
        "1 healthy intervals with a named rank",
        "late by 20 % after 75.0 s (p95), later than 60.0 s",
        "hang since overdue after inf s (p95), later than 20.0 s",
        "late by 20 %: what-if",
        "late by 20 %: right",
        "stopped: right",
    ]
    assert "| late by 20 % (1,024 ranks) | 4 | 3 | 0 | 1 | 0 | rank 4 | 3 of 4 | 30 s | 75 s | 4.0% |" in markdown(
        found
    )
