"""Hangs in the ledger: when a step is overdue, and which rank is missing in which process group."""

from __future__ import annotations

from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import LedgerRecord, RecordError
from tests.support.histories import Line

HOSTS, PER_HOST, EVERY, P99 = ("h0", "h1"), 4, 15.0, 1.2
STOPPED = 60.0  # when the last step began
Verdict = tuple[float | None, set[tuple[str, ...]]]


def numbers(missing: int | None = None, kind: str = "") -> dict[int, dict[str, float]]:
    """Return the collectives that each of eight ranks has called by group, and in the default one, as TP2 x DP4.

    The missing rank has called one fewer in its group of this kind, and its peers there wait for it.
    """
    called = {}
    for rank in range(len(HOSTS) * PER_HOST):
        tp, dp = f"{rank // 2 * 2},{rank // 2 * 2 + 1}", f"{rank % 2}-{6 + rank % 2}:2"
        called[rank] = {f"tp {tp}": 40.0, f"dp {dp}": 10.0, "default": 3.0}
    if missing is not None:
        group = next((name for name in called[missing] if name.startswith(kind)), "")
        called[missing][group] -= 1
        if kind == "tp":  # neither it nor its peer comes to the end of the step
            for rank in (missing, missing ^ 1):
                called[rank] = {name: value - (name[:2] == "dp") for name, value in called[rank].items()}
    return called


def lines(called: dict[int, dict[str, float]], until: float, **change: Any) -> list[Line]:
    """Return the records of two hosts that stop in a step at STOPPED. `change` has other signs or silent hosts."""
    signs, silent, p99 = change.get("signs", {}), change.get("silent", ()), change.get("p99", P99)
    records: list[Line] = []
    for turn in range(1, int(until / EVERY) + 1):
        for number, host in enumerate(HOSTS):
            t = turn * EVERY + 5 * number
            ranks = range(number * PER_HOST, (number + 1) * PER_HOST)
            open_step = max(0.0, t - STOPPED)
            if host in silent and open_step > 0:
                continue
            line: Line = {"t": t, "run": "r", "attempt": "a", "source": host, "event": "snapshot", "started": 0.0}
            line |= {"rank": ranks[0], "gpus": PER_HOST, "step": int(min(t, STOPPED)), "activity_seconds": {"step": t}}
            line |= {"open_step_seconds": open_step, "step_p99": p99 if number == 0 else None}
            if open_step >= 10:
                line["calls"] = [
                    [
                        rank,
                        called[rank]["default"],
                        [[*name.split(" "), value] for name, value in called[rank].items() if name != "default"],
                        signs.get(rank, []),
                    ]
                    for rank in ranks
                ]
            records.append(line)
    return records


def verdict(records: list[Line]) -> Verdict:
    ledger = Ledger()
    for line in records:
        ledger.apply(line)
    run = ledger.runs["", "r"]
    overdue, named = None, set()
    for row, labels, value in views.families(run, run.reporters.last):
        if row is m.RUN_OVERDUE_SECONDS:
            overdue = value
        elif row is m.RUN_HANG_INFO:
            named.add(labels[2:])
    return overdue, named


@pytest.mark.parametrize(
    ("kind", "group"), [("tp", "4,5"), ("dp", "1-7:2"), ("default", "0-7")], ids=lambda text: text.partition(":")[0]
)
def test_the_missing_rank_is_named_in_its_group_once_all_hosts_are_overdue(kind: str, group: str) -> None:
    called = numbers(5, kind)
    before = lines(called, 75)[:-1]
    assert verdict(before) == (None, set())  # the second host has not reported since the step is overdue
    overdue, named = verdict(lines(called, 75))
    assert overdue == 15
    assert named == {("5", "h1", "world" if kind == "default" else kind, group)}


def test_no_rank_is_named_without_a_difference_or_while_a_host_has_not_reported() -> None:
    assert verdict(lines(numbers(), 120)) == (60, set())
    assert verdict(lines(numbers(5, "tp"), 120, silent=("h0",))) == (None, set())


def test_a_run_that_has_made_no_step_is_not_overdue_and_a_long_step_is_later() -> None:
    called = numbers(5, "tp")
    assert verdict(lines(called, 120, p99=None)) == (None, set())
    assert verdict(lines(called, 120, p99=14.0)) == (None, set())
    assert verdict(lines(called, 150, p99=14.0))[1] != set()


def test_a_step_that_ends_after_all_ends_the_verdict() -> None:
    records = lines(numbers(5, "tp"), 120)
    t = records[-1]["t"] + 5
    ended = {**records[-1], "t": t, "open_step_seconds": 1.0, "activity_seconds": {"step": t}}
    assert verdict(records)[1] != set()
    assert verdict([*records, ended]) == (None, set())


def test_of_two_ranks_that_are_missing_the_one_with_a_sign_is_named() -> None:
    called = numbers(5, "dp")
    called[2][next(name for name in called[2] if name.startswith("dp"))] -= 1
    assert {rank for rank, *_ in verdict(lines(called, 120))[1]} == {"2", "5"}
    assert {rank for rank, *_ in verdict(lines(called, 120, signs={2: ["blocked"]}))[1]} == {"2"}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({}, "calls: not a list of at most 64 ranks"),
        ([[0, 1, []]], "calls 1: not [rank, default, groups, signs]"),
        ([[None, 1, [], []]], "calls 1: rank: missing"),
        ([[0, -1, [], []]], "calls 1: default: -1 is negative"),
        ([[0, 1, [["tp", "0-", 1]], []]], "calls 1: group: '0-' is not a rank, nor a range such as 0-3 or 1-29:4"),
        ([[0, 1, [], ["is gone"]]], "calls 1: a sign is not a word"),
        ([[0, 1, [], ["x"] * 9]], "calls 1: not [rank, default, groups, signs]"),
    ],
)
def test_calls_that_cannot_be_are_refused(calls: object, message: str) -> None:
    with pytest.raises(RecordError) as error:
        LedgerRecord.parse(lines(numbers(), 15.0)[0] | {"calls": calls})
    assert str(error.value) == message
