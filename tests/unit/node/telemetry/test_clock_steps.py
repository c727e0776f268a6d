"""A clock that is set while a run trains costs no second and no push."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.histories import read_back
from tests.support.otlp_by_hand import START
from tests.support.training_host import Host, dead, trainers, training


def attributed(host: Host) -> dict[str, float]:
    seconds = host.run().buckets.seconds
    return {bucket: round(value, 3) for bucket, value in seconds.items() if round(value, 3)}


@pytest.mark.parametrize("step", [3600.0, -3600.0, 20.0, -20.0, 86_000.0])
@pytest.mark.parametrize("end", ["completed", "killed"])
def test_a_clock_that_is_set_inside_an_attempt_moves_no_second(step: float, end: str) -> None:
    """The exporter, the hook and the ledger read the same clock."""
    with trainers(1) as (one,):
        host = Host()
        began = host.time
        started: dict[str, Any] = {"start_unix": began, **one.identity}
        for age in range(5, 100, 5):
            host.time = began + age
            host.step = step if age > 50 else 0.0
            assert host.push(training(age, host.time + host.step, **started)) == (0, "")
            host.passes(0)
        host.time = began + 99
        if end == "completed":
            host.push(training(99, host.time + host.step, status="completed", **started))
        else:
            one.end()
        host.passes(0)
    assert attributed(host) == {"startup": 1, "productive": 98 if end == "completed" else 94} | (
        {} if end == "completed" else {"lost": 4}
    )
    assert host.run().wall(host.run().reporters.last) - host.run().open(host.run().reporters.last) == pytest.approx(99)


def test_a_clock_that_is_set_forward_and_back_again_moves_no_second() -> None:
    host = Host()
    began = host.time
    for age in range(5, 200, 5):
        host.time = began + age
        host.step = 3600.0 if 50 < age < 100 else -1800.0 if 120 < age < 150 else 0.0
        assert host.push(training(age, host.time + host.step, start_unix=began)) == (0, "")
        host.passes(0)
    assert attributed(host) == {"startup": 1, "productive": 194}
    assert host.run().reporters.clock_offsets == {}


def test_after_a_clock_was_set_back_a_restarted_exporter_takes_the_pushes() -> None:
    before, after = Host(), Host()
    began = before.time
    for age in (5, 10, 15):
        before.time = began + age
        before.push(training(age, before.time, start_unix=began))
        before.passes(0)
    after.ledger, after.step = before.ledger, -3600.0
    for age in (20, 25, 30):
        after.time = began + age
        assert after.push(training(age, after.time + after.step, start_unix=began)) == (0, "")
        after.passes(0)
    assert attributed(after) == {"startup": 1, "productive": 29}
    assert after.last["", "lm", "a1"]["started"] == began - 3600


def test_after_a_clock_was_set_back_a_restart_of_the_job_is_newer() -> None:
    with trainers(1) as (new,):
        host = Host()
        host.push(training(10, host.time, attempt="h-1-1-0", **{**dead(), "pid_start_ticks": 1}))
        host.step = -3600.0
        answer = host.push(training(2, host.time + host.step, attempt="h-1-1-1", **new.identity))
        assert answer == (0, "")
        assert host.served() == {"0": ("h-1-1-1", 1)}


@pytest.mark.parametrize("ahead", [61.0, 3600.0, 80_000.0])
def test_a_start_in_the_near_future_is_moved_to_the_present(ahead: float) -> None:
    host = Host()
    assert host.push(training(30, host.time + ahead)) == (0, "")
    host.passes()
    record = host.last["", "lm", "a1"]
    assert (record["t"], record["started"]) == (START + 100, START + 70)
    assert read_back(host.run()).start == START + 70
