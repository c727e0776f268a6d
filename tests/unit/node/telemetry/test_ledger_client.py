"""Which changes a remote ledger receives at once, and which with the next regular request."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from flopwatch.node.telemetry.ledger_client import AGAIN, SPREAD, URGENT, Outcomes, Remote, urgent_state
from flopwatch.node.telemetry.ranks import Record

INTERVAL, LIMIT = 20.0, 15.0
XID = {"kind": "xid", "t": 1.0, "count": 1, "gpu": "GPU-a", "detail": "79"}
DOWN = {"kind": "link_down", "t": 1.0, "count": 1, "port": "mlx5_0:1"}


def opened(seconds: float, *signs: str, called: float = 7.0) -> Record:
    """Return the change of a record whose step is open for so long."""
    ranks = [[0, called, [], [], None], [1, called, [], list(signs), None]]
    return {"open_step": {"t": 0.0, "seconds": seconds, "overdue_after": LIMIT, "ranks": ranks}}


class Client(Remote):
    """Client of a remote ledger that accepts all records, with a clock that the test moves."""

    def __init__(self, spool: Path) -> None:
        self.time, self.sent = 1000.0, list[int]()
        outcomes = Outcomes(CollectorRegistry())
        super().__init__("http://ledger", None, spool, outcomes, interval=INTERVAL, clock=lambda: self.time)

    def _post(self, body: bytes, timeout: float) -> tuple[int, str]:
        self.sent += [record["step"] for record in json.loads(body)]
        return 200, '{"accepted": 1}'

    def push(self, step: int, run: str = "lm", **change: Any) -> None:
        record = {"t": 100.0 + step, "tenant": "", "run": run, "attempt": "a1", "step": step, **change}
        self.take(("", run, "a1"), [record])

    def passes(self, seconds: float) -> list[int]:
        """Let time pass, and return the steps in the records that are sent then."""
        self.sent.clear()
        self.time += seconds
        self.flush()
        return [*self.sent]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (opened(LIMIT - 1), opened(LIMIT)),
        (opened(LIMIT + 1), opened(LIMIT + 2, "blocked")),
        (opened(LIMIT + 1, "data"), opened(LIMIT + 2)),
        (opened(LIMIT + 1), {}),
        ({}, {"evidence": [XID]}),
        ({"evidence": [XID]}, {"evidence": [{**XID, "detail": "48"}, XID]}),
        ({"evidence": [XID]}, {"evidence": [{**XID, "gpu": "GPU-b"}, XID]}),
        ({}, {"evidence": [DOWN]}),
        ({}, {"gone": True}),
    ],
    ids=["overdue", "sign", "no sign", "step ended", "Xid", "other Xid", "other GPU", "port", "gone"],
)
def test_a_change_that_an_incident_may_begin_with_is_sent_before_the_interval_is_over(
    client: Client, before: Record, after: Record
) -> None:
    client.push(1, **before)
    assert client.passes(INTERVAL) == [1]
    client.push(2, **after)
    assert client.passes(URGENT) == [2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({}, opened(0.6 * LIMIT)),
        (opened(LIMIT), opened(LIMIT + 4)),
        (opened(LIMIT), opened(LIMIT + 4, called=8.0)),
        ({"evidence": [XID]}, {"evidence": [{**XID, "t": 90.0, "count": 2}]}),
        ({}, {"evidence": [{"kind": "throttle", "t": 1.0, "count": 9, "gpu": "GPU-a", "detail": "thermal"}]}),
        ({}, {"evidence": [{"kind": "link_errors", "t": 1.0, "count": 9, "port": "mlx5_0:1"}]}),
    ],
    ids=["push", "late step", "longer step", "calls", "Xid again", "throttling", "link errors"],
)
def test_another_change_waits_for_the_interval(client: Client, before: Record, after: Record) -> None:
    client.push(1, **before)
    assert client.passes(INTERVAL) == [1]
    client.push(2, **after)
    assert client.passes(SPREAD[0] * INTERVAL - 1) == []
    assert client.passes(2 * INTERVAL) == [2]


def test_the_next_regular_request_follows_an_interval_after_an_urgent_one(client: Client) -> None:
    client.push(1)
    client.passes(INTERVAL)
    client.push(2, evidence=[XID])
    assert client.passes(URGENT) == [2]
    client.push(3, evidence=[XID])
    assert client.passes(SPREAD[0] * INTERVAL - 1) == []
    client.push(4, evidence=[XID])
    assert client.passes(1 + (SPREAD[1] - SPREAD[0]) * INTERVAL) == [4]


def test_a_change_of_one_run_is_urgent_for_that_run_alone(client: Client) -> None:
    client.push(1)
    client.push(11, run="other")
    assert client.passes(INTERVAL) == [1, 11]
    client.push(2, evidence=[XID])
    client.push(12, run="other")
    assert client.passes(URGENT) == [2]


def test_a_change_after_an_idle_interval_is_sent_at_once(client: Client) -> None:
    client.push(1)
    assert client.passes(3 * INTERVAL) == [1]
    client.push(2, gone=True)
    assert client.passes(URGENT) == [2]


def test_an_overdue_step_is_urgent_twice_and_each_time_it_has_lasted_as_long_again() -> None:
    states = [urgent_state(opened(seconds)) for seconds in range(9, 200)]
    urgent = [10 + n for n, (one, following) in enumerate(pairwise(states)) if one != following]
    assert urgent == [LIMIT, LIMIT + AGAIN, 2 * LIMIT, 3 * LIMIT]
