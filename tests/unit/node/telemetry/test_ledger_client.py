"""Which changes a remote ledger receives at once, and which with the next regular request."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.ledger_client import (
    AGAIN,
    BUSY,
    EARLY_EVERY,
    LONG,
    MAX_EARLY,
    SPREAD,
    URGENT,
    Outcomes,
    Remote,
    urgent_state,
)
from tests.support.ledger_server import ledger_server
from tests.support.machine import PATIENCE

INTERVAL, LIMIT, PUSH = 20.0, 15.0, 5.0
XID = {"kind": "xid", "t": 1.0, "count": 1, "gpu": "GPU-a", "detail": "79"}
DOWN = {"kind": "link_down", "t": 1.0, "count": 1, "port": "mlx5_0:1"}


def opened(seconds: float, *signs: str, called: float = 7.0) -> Record:
    """Return the change of a record whose step is open for so long."""
    ranks = [[0, called, [], [], None], [1, called, [], list(signs), None]]
    return {"open_step": {"t": 0.0, "seconds": seconds, "overdue_after": LIMIT, "ranks": ranks}}


class Client(Remote):
    """Client of a remote ledger that accepts all records, with a clock that the test moves."""

    def __init__(self, spool: Path) -> None:
        self.time, self.sent, self.early, self.answers_after = 1000.0, list[int](), list[float](), 0.0
        self.total = [0.0, 0.0]  # measured steps and their seconds
        outcomes = Outcomes(Registry())
        super().__init__("http://ledger", None, spool, outcomes, interval=INTERVAL, clock=lambda: self.time)

    def _post(self, body: bytes, timeout: float) -> tuple[int, str]:
        self.sent += [record["step"] for record in json.loads(body)]
        self.early += [self.time for record in json.loads(body) if record.get("early")]
        self.time += self.answers_after
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

    def runs(self, seconds: float, step: float) -> list[float]:
        """Let two ranks push every 5 s while a step takes so long. Return when records were sent early since then."""
        began = self.time
        while self.time < began + seconds:
            self.time += PUSH
            self.total = [self.total[0] + PUSH / step, self.total[1] + PUSH]
            steps = int(self.total[0])
            self.push(steps, waits=[[rank, "", 0.0, steps, steps / self.total[0] * self.total[1]] for rank in (0, 1)])
            self.flush()
        return [round(at - began) for at in self.early if at > began]


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
        (opened(LIMIT + 1), {**opened(LIMIT + 1), "stacks": [[0, 1.0, "text"]]}),
    ],
    ids=["overdue", "sign", "no sign", "step ended", "Xid", "other Xid", "other GPU", "port", "gone", "stacks"],
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


def test_an_overdue_step_is_urgent_four_times_and_when_it_has_lasted_as_long_again() -> None:
    states = [urgent_state(opened(seconds)) for seconds in range(9, 200)]
    urgent = [10 + n for n, (one, following) in enumerate(pairwise(states)) if one != following]
    assert urgent == [LIMIT, LIMIT + AGAIN, LIMIT + 2 * AGAIN, 2 * LIMIT, 3 * LIMIT]


def test_a_change_is_sent_soon_after_the_ledger_could_not_be_reached(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(client, "_post", lambda body, timeout: (503, ""))
        client.push(1)
        client.passes(INTERVAL)
        client.push(2)
        client.passes(5 * INTERVAL)  # the next try is 20 s after or later
    client.push(3, evidence=[XID])
    assert client.passes(AGAIN) == [3]


def test_records_are_sent_with_each_push_once_steps_take_longer(client: Client) -> None:
    assert client.runs(300, step=0.5) == []
    assert client.runs(40, step=0.6) == [5, 10, 15, 20, 25, 30, 35, 40]


@pytest.mark.parametrize("step", [0.4, 0.5, 0.52], ids=["shorter", "as long", "hardly longer"])
def test_records_are_not_sent_early_unless_steps_take_longer(client: Client, step: float) -> None:
    client.runs(300, step=0.5)
    assert client.runs(120, step) == []


def test_a_sample_has_two_steps_or_more(client: Client) -> None:
    client.runs(300, step=2.6)
    early = client.runs(40, step=3.3)
    assert early
    assert min(later - one for one, later in pairwise(early)) >= 2 * PUSH


def test_steps_that_are_long_have_no_records_sent_early(client: Client) -> None:
    client.runs(300, step=LONG)
    assert client.runs(300, step=1.5 * LONG) == []


def test_steps_that_vary_for_hours_have_few_records_sent_early(client: Client) -> None:
    client.runs(300, step=0.5)
    early = [at for _ in range(60) for at in (client.runs(30, step=1.0), client.runs(30, step=0.5))]
    assert MAX_EARLY < sum(map(len, early)) <= MAX_EARLY + 60 * 60 / EARLY_EVERY


def test_ranks_that_restart_have_no_records_sent_early(client: Client) -> None:
    client.runs(300, step=0.5)
    client.total = [0.0, 0.0]
    client.push(0)
    assert client.runs(300, step=0.5) == []


def test_a_busy_ledger_receives_no_early_records(client: Client) -> None:
    client.runs(300, step=0.5)
    client.answers_after = 2 * BUSY
    assert len(client.runs(40, step=0.6)) == 1


def test_a_user_in_the_url_is_sent_as_the_authorization(tmp_path: Path) -> None:
    with ledger_server() as (url, received):
        remote = Remote(url.replace("//", "//node:k%40y@"), None, tmp_path, Outcomes(Registry()))
        assert remote._post(b"[]", PATIENCE) == (200, '{"accepted": 0}')
    assert received == [(f"Basic {b64encode(b'node:k@y').decode()}", [])]


@pytest.mark.parametrize("url", ["http://[::1", "http://ledger:port", "http://127.0.0.1:1", "http://a..b"])
def test_a_ledger_that_cannot_be_reached_is_an_error_of_the_request_alone(tmp_path: Path, url: str) -> None:
    with pytest.raises((OSError, ValueError), match=r"."):
        Remote(url, None, tmp_path, Outcomes(Registry()))._post(b"[]", PATIENCE)
