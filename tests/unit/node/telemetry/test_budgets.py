"""Limits of ranks, runs and names: what has no live process never shuts out what has one."""

from __future__ import annotations

import os

import pytest

from flopwatch.node.telemetry.admission import MAX_NAMES, MAX_RANKS, MAX_RUNS, MAX_USERS
from flopwatch.node.telemetry.ranks import MAX_UNDELIVERED
from tests.support.otlp_by_hand import gauge, process
from tests.support.training_host import Host, Trainer, trainers, training

OTHER_USER = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


def test_ended_runs_without_a_pid_do_not_shut_out_a_real_one() -> None:
    host = Host()
    for number in range(MAX_NAMES + 5):
        host.push(process(gauge("training_loss", 1), run=f"n{number}", status="completed"))
    assert host.counted() == {"accepted": MAX_NAMES, "limit": 5}
    with trainers(1) as (real,):
        assert host.push(training(5, host.time, run="real", **real.identity)) == (0, "")
        assert host.served() == {"0": ("a1", 4)}


def test_live_runs_without_a_pid_do_not_shut_out_a_real_one() -> None:
    host = Host()
    for rank in range(MAX_RANKS):
        assert host.push(training(5, host.time, run=f"fake-{rank % MAX_RUNS}", rank=rank)) == (0, "")
    assert host.push(training(5, host.time, run="fake-more"))[0] > 0
    with trainers(2) as (first, second):
        for rank, one in enumerate((first, second)):
            assert host.push(training(5, host.time, run="real", rank=rank, **one.identity)) == (0, "")
    assert host.counted() == {"accepted": MAX_RANKS + 2, "limit": 1}


def test_a_sweep_of_short_runs_is_recorded_whole() -> None:
    host, number = Host(), 4 * MAX_NAMES
    with trainers(1) as (sweep,):
        for one in range(number):
            assert host.push(training(2, host.time, run=f"trial-{one}", status="completed", **sweep.identity)) == (
                0,
                "",
            )
            host.passes()
    assert sum(run.state() == "completed" for run in host.ledger.runs.values()) == number


def test_runs_that_end_in_great_number_displace_no_record_of_another_user() -> None:
    host = Host()
    with trainers(1) as (real,):
        assert host.push(training(5, host.time, run="real", status="completed", **real.identity)) == (0, "")
        for number in range(MAX_UNDELIVERED + 5):
            host.push(process(gauge("training_loss", 1), run="fake", attempt=f"a{number}", status="completed"))
        host.passes()
    assert host.run("real").state() == "completed"


@AS_ROOT
def test_each_user_has_a_budget_of_its_own() -> None:
    host = Host()
    with trainers(1, user=OTHER_USER) as (greedy,), trainers(1) as (real,):
        for number in range(MAX_RUNS):
            assert host.push(training(5, host.time, run=f"greedy-{number}", **greedy.identity)) == (0, "")
        answer = host.push(training(5, host.time, run="greedy-more", **greedy.identity))
        assert answer == (4, f"this node takes at most {MAX_RANKS} ranks of {MAX_RUNS} runs of one user")
        assert host.push(training(5, host.time, run="real", **real.identity)) == (0, "")
    assert host.counted() == {"accepted": MAX_RUNS + 1, "limit": 1}


@AS_ROOT
def test_all_users_together_have_a_budget_too() -> None:
    host = Host()
    users = [Trainer(user=OTHER_USER - number) for number in range(MAX_USERS + 1)]
    try:
        answers = [
            host.push(training(5, host.time, run=f"run-{one}-{number}", **user.identity))[0]
            for one, user in enumerate(users)
            for number in range(MAX_RUNS)
        ]
    finally:
        for user in users:
            user.end()
    assert [answer == 0 for answer in answers] == [True] * MAX_USERS * MAX_RUNS + [False] * MAX_RUNS


@AS_ROOT
def test_a_process_of_another_user_is_not_the_restart_of_a_job() -> None:
    host = Host()
    with trainers(1) as (own,), trainers(1, user=OTHER_USER) as (other,):
        host.push(training(10, host.time, attempt="node-a-77-1234-0", **own.identity))
        assert host.push(training(2, host.time, attempt="node-a-77-1234-1", **other.identity)) == (0, "")
        assert host.served() == {"0": ("node-a-77-1234-0", 9)}
        refused = host.push(training(3, host.time, attempt="node-a-77-1234-0", **other.identity))
        assert refused == (4, "rank 0 of run 'lm' is another user's in this attempt")
        assert host.push(training(11, host.time, attempt="node-a-77-1234-0", **own.identity)) == (0, "")
