"""Two jobs of one name on one host: both go on, the conflict is shown, and neither is merged with the other."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import product
from math import fsum
from typing import Any

import pytest

from flopwatch.ledger import views
from flopwatch.node.telemetry.admission import own_pid_namespace, same_job
from tests.support.otlp_by_hand import START
from tests.support.training_host import Host, Trainer, dead, trainers, training

OFFSET = 0.25  # seconds between the jobs


@dataclass
class Job:
    """One job: its seconds of start and end, how it ends, and how often it pushes."""

    name: str
    start: int
    end: int
    how: str  # completed, failed or killed
    interval: int = 1
    trainer: Trainer | None = field(default=None, repr=False)
    identity: dict[str, int] = field(default_factory=dict, repr=False)
    pushed: float | None = None  # age at the last push

    def act(self, host: Host, now: int) -> None:
        """Do what the job does in this second."""
        if now == self.start:
            self.trainer = Trainer()
            self.identity = self.trainer.identity
        if self.trainer is None:
            return
        age = now - self.start
        if now == self.end:
            if self.how != "killed":
                self.push(host, age, status=self.how)
            self.trainer.end()
            self.trainer = None
        elif age > 0 and age % self.interval == 0:
            self.push(host, age)

    def push(self, host: Host, age: float, **reported: Any) -> None:
        assert host.push(training(age, host.time, attempt=self.name, **self.identity, **reported)) == (0, "")
        self.pushed = age

    @property
    def live(self) -> bool:
        """Return whether it trains and has pushed."""
        return self.trainer is not None and self.pushed is not None


def play(jobs: list[Job]) -> Host:
    """Let the jobs run on one host. In each second, check what is served and what the ledger reports."""
    host = Host()
    began, served_before = host.time, ""
    try:
        for now in range(max(job.end for job in jobs) + 2):
            for number, job in enumerate(jobs):  # no two jobs do something at the same instant
                host.time = began + now + number * OFFSET
                job.act(host, now)
            live = [job.name for job in jobs if job.live]
            host.passes(0)
            served = host.served()
            assert bool(served) == bool(live)
            if live:
                [(attempt, step)] = served.values()
                pushed = next(job.pushed for job in jobs if job.name == attempt)
                assert attempt in live
                assert pushed is not None
                assert step == max(0, pushed - 1)
                assert served_before not in live or attempt == served_before, "a live rank was evicted"
                served_before = attempt
                assert host.run().state(host.time) == "running"
            if "lm" in {key[1] for key in host.ledger.runs}:
                run = host.run()
                assert run.conflict(host.time) == (len(live) > 1)
                attributed = fsum(run.buckets.seconds.values()) - run.buckets.seconds["queue"]
                assert attributed + run.open(host.time) == pytest.approx(run.wall(host.time), abs=1e-6)
    finally:
        for job in jobs:
            if job.trainer is not None:
                job.trainer.end()
    # The last record of each attempt has all its seconds, and those of no other.
    for number, job in enumerate(jobs):
        if job.pushed is not None:
            record = host.last["", "lm", job.name]
            assert fsum(record["activity_seconds"].values()) == pytest.approx(job.pushed)
            assert record["started"] == pytest.approx(began + job.start + number * OFFSET)
            assert record.get("status") == (None if job.how == "killed" else job.how)
    return host


ENDS = ("completed", "failed", "killed")


@pytest.mark.parametrize(("first", "second"), [*product(ENDS, ENDS)])
@pytest.mark.parametrize("end", [(20, 11), (12, 18)], ids=["the second ends first", "the first ends first"])
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "the later start pushes first"])
def test_two_hooks_of_one_name_are_shown_as_a_conflict_and_both_go_on(
    end: tuple[int, int], first: str, second: str, turned: bool
) -> None:
    jobs = [Job("host-1-1-0", 0, end[0], first, 6 if turned else 1), Job("host-2-2-0", 5, end[1], second, 1)]
    host = play(jobs)
    last = max(jobs, key=lambda job: job.end)
    run = host.run()
    assert run.state(host.time) == ("completed" if last.how == "completed" else "down")
    if last.how == "completed":
        assert run.wall(host.time) == pytest.approx(last.end + jobs.index(last) * OFFSET)
        assert run.buckets.seconds["down"] == 0
    assert host.counted().keys() == {"accepted"}


def test_the_example_of_a_long_and_a_short_job_is_accounted_for_to_its_end() -> None:
    """A job of 20 s, and 5 s later one of 6 s: the second does not end the run of the first."""
    host = play([Job("host-1-1-0", 0, 20, "completed"), Job("host-2-2-0", 5, 11, "completed")])
    run = host.run()
    attempts = views.figures(run, 0)["attempts"]
    # The first is accounted for up to the first report of the second, and again from the end of that.
    assert [(one["attempt"], one["begin"] - START - 100, one["end"] - START - 100) for one in attempts] == [
        ("host-1-1-0", 0, 6),
        ("host-2-2-0", 6, 11 + OFFSET),
        ("host-1-1-0", 11 + OFFSET, 20),
    ]
    assert run.buckets.high_water == 19
    assert run.state(host.time) == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_no_second_of_two_jobs_is_lost_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    jobs = []
    for number in range(2):
        start = chance.randrange(12)
        how, interval = chance.choice(ENDS), chance.choice((1, 1, 2, 5))
        jobs.append(Job(f"host-{number}-{number}-0", start, start + chance.randrange(1, 20), how, interval))
    if jobs[0].end == jobs[1].end:
        jobs[0].end += 1
    chance.shuffle(jobs)
    play(jobs)


def test_an_attempt_in_conflict_is_served_as_a_whole() -> None:
    with trainers(5) as processes:
        host, own = Host(), [one.identity for one in processes]
        host.push(*(training(10, host.time, rank=rank, attempt="h-1-1-0", **own[rank]) for rank in (0, 1)))
        host.passes()
        late = [training(3, host.time, rank=rank, attempt="h-2-2-0", **own[2 + rank]) for rank in (0, 1, 2)]
        assert host.push(*late) == (0, "")
        host.passes()
        assert host.served() == {"0": ("h-1-1-0", 9), "1": ("h-1-1-0", 9)}
        assert host.run().conflict(host.time)
        processes[0].end()
        processes[1].end()
        host.passes()
        assert host.served() == {"0": ("h-2-2-0", 2), "1": ("h-2-2-0", 2), "2": ("h-2-2-0", 2)}


def test_a_restart_of_the_same_job_replaces_a_rank_whose_process_still_lives() -> None:
    with trainers(2) as (old, new):
        host = Host()
        host.push(training(10, host.time, attempt="node-a-77-1234-0", **old.identity))
        assert host.push(training(2, host.time, attempt="node-a-77-1234-1", **new.identity)) == (0, "")
        host.passes()
        assert host.served() == {"0": ("node-a-77-1234-1", 1)}
        assert not host.run().conflict(host.time)
        answer = host.push(training(11, host.time, attempt="node-a-77-1234-0", **old.identity))
        assert answer == (4, "a newer process is rank 0 of run 'lm'")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("node-a-77-1234-0", "node-a-77-1234-1", True),  # torchrun's restart
        ("slurm-4711.0-0-node-a-77-1234-0", "slurm-4711.0-1-node-b-8-99-0", True),  # Slurm's requeue
        ("slurm-4711.0-0-0", "slurm-4711.1-0-0", False),  # two steps of one allocation
        ("slurm-4711.batch-0-h-1-2-0", "slurm-4711.batch-0-h-3-4-0", False),  # two commands of one script
        ("slurm-4711.0-0-0", "slurm-4712.0-0-0", False),
        ("node-a-77-1234-0", "node-a-78-1240-0", False),
        ("a1", "a2", False),
    ],
)
def test_attempts_are_of_one_job_by_their_step_or_launcher(one: str, other: str, same: bool) -> None:
    assert same_job(one, other) == same


def test_a_container_that_cannot_be_seen_is_back_with_its_next_push() -> None:
    """Without the pid of either process the newest start is served, and the other is not refused."""
    host = Host()
    hidden = [{"pid": pid, "pid_namespace": own_pid_namespace() + pid, "pid_start_ticks": pid} for pid in (1, 2)]
    host.push(training(10, host.time, attempt="h-1-1-0", **hidden[0]))
    host.passes()
    assert host.push(training(3, host.time, attempt="h-2-2-0", **hidden[1])) == (0, "")
    host.passes()
    assert host.served() == {"0": ("h-2-2-0", 2)}
    for _ in range(2):
        assert host.push(training(host.time - START - 90, host.time, attempt="h-1-1-0", **hidden[0])) == (0, "")
        assert host.push(training(host.time - START - 98, host.time, attempt="h-2-2-0", **hidden[1])) == (0, "")
        host.passes()
        assert host.served()["0"][0] == "h-2-2-0"
        assert host.run().conflict(host.time)
    host.push(training(5, host.time, attempt="h-2-2-0", status="completed", **hidden[1]))
    assert host.push(training(15, host.time, attempt="h-1-1-0", **hidden[0])) == (0, "")
    host.passes()
    assert host.served() == {"0": ("h-1-1-0", 14)}
    assert host.run().state(host.time) == "running"


PIDS = ("none", "dead", "reused", "no start", "hidden", "impossible", "own namespace unknown")
STARTS = (-5000.0, 0.0, 99.0, 3600.0)
STATUSES = (None, "completed", "failed", "stopped")
ATTEMPTS = ("h-1-1-0", "h-1-1-1", "forged")


@pytest.mark.parametrize(("pid", "start"), [*product(PIDS, STARTS)])
def test_a_forged_push_changes_nothing_while_the_process_lives(pid: str, start: float) -> None:
    with trainers(1) as (victim,):
        own: dict[str, Any] = {"attempt": "h-1-1-0", **victim.identity}
        identity = {
            "none": {},
            "dead": dead(),
            "reused": {**victim.identity, "pid": os.getpid()},
            "no start": {**victim.identity, "pid_start_ticks": 0},
            "hidden": {**victim.identity, "pid_namespace": own_pid_namespace() + 1, "pid": 2**22 + 1},
            "impossible": {**victim.identity, "pid": 2**40},
            "own namespace unknown": {**victim.identity, "pid_namespace": 0},
        }[pid]
        for status, attempt in product(STATUSES, ATTEMPTS):
            host, alone = Host(), Host()
            for second in range(8):
                for one in (host, alone):
                    assert one.push(training(100 + second, one.time, **own)) == (0, "")
                forged: dict[str, Any] = {"attempt": attempt, "start_unix": START + start, **identity}
                forged |= {"status": status} if status is not None else {}
                refused, _ = host.push(training(999_999, host.time, **forged))
                assert refused > 0
                assert host.served() == alone.served() == {"0": ("h-1-1-0", 99 + second)}
                host.passes()
                alone.passes()
            assert host.last == alone.last
            assert views.summary(host.run(), host.time) == views.summary(alone.run(), alone.time)
            assert not host.run().conflict(host.time)
            assert host.counted()["accepted"] == 8


def test_a_push_with_a_live_pid_displaces_one_without() -> None:
    for tenant in ("", "red"):
        with trainers(1) as (real,):
            host = Host()
            host.push(training(5, host.time, attempt="forged", tenant=tenant, start_unix=START + 99))
            assert host.push(training(50, host.time, attempt="h-1-1-0", **real.identity)) == (0, "")
            assert host.served() == {"0": ("h-1-1-0", 49)}
            assert host.push(training(6, host.time, attempt="forged", tenant=tenant))[0] > 0
            assert host.served() == {"0": ("h-1-1-0", 49)}
