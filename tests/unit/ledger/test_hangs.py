"""Hangs in the ledger: when a step is overdue, and which rank is missing in which process group."""

from __future__ import annotations

import pytest

from flopwatch import catalogue as m
from flopwatch.ledger import views
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import LedgerRecord, RecordError
from tests.support.hanging import P99, lines, numbers
from tests.support.histories import Line

Verdict = tuple[float | None, set[tuple[str, ...]]]


def verdict(records: list[Line]) -> Verdict:
    """Return for how long the run hangs, and the suspects as rank, host, group, its ranks, and signs."""
    ledger = Ledger()
    for line in records:
        ledger.apply(line)
    run = ledger.runs["", "r"]
    seconds, named = None, set()
    for row, labels, value in views.families(run, run.reporters.last):
        if row is m.RUN_HANG_SECONDS:
            seconds = value
        elif row is m.RUN_HANG_SUSPECT_RATIO:
            named.add(labels[2:])
    return seconds, named


@pytest.mark.parametrize(
    ("kind", "group"), [("tp", "4,5"), ("dp", "1-7:2"), ("default", "0-7")], ids=lambda text: text.partition(":")[0]
)
def test_the_missing_rank_is_named_in_its_group_once_all_hosts_stand_still(kind: str, group: str) -> None:
    records = lines(numbers(5, kind), 90)
    assert verdict(records[:-1]) == (None, set())  # the second host has called collectives since its last record
    seconds, named = verdict(records)
    assert seconds == 30
    assert named == {("5", "h1", "world" if kind == "default" else kind, group, "sequence")}


@pytest.mark.parametrize(
    ("ras", "named"),
    [
        (
            [["2,3", "2"], ["4,5", "4"]],
            {("2", "h0", "tp", "2,3", "sequence,ras"), ("4", "h1", "tp", "4,5", "sequence,ras")},
        ),
        ([["4,5", "4"]], {("4", "h1", "tp", "4,5", "sequence,ras")}),
        ([["0-7", "2,4"], ["4,5", "4"]], {("4", "h1", "tp", "4,5", "sequence,ras")}),
        ([["6,7", "7"]], {("", "h1", "", "", "")}),  # no rank, but the host of two of the three
        ([["0-8", "4"]], {("2", "h0", "tp", "2,3", "sequence"), ("4", "h1", "tp", "4,5", "sequence")}),
    ],
)
def test_numbers_of_nccl_confirm_those_of_the_hook_or_decide_between_two(
    ras: list[list[str]], named: set[tuple[str, ...]]
) -> None:
    called = numbers()
    called[2]["tp 2,3"] -= 1
    called[4]["tp 4,5"] -= 1
    records = lines(called, 120)
    for line in records:
        if line["source"] == "h0" and "open_step" in line:
            line["open_step"]["ras"] = ras
    assert verdict(records) == (60, named)


def test_no_rank_is_named_without_a_difference_and_no_run_hangs_that_calls_collectives() -> None:
    assert verdict(lines(numbers(), 120)) == (60, set())
    assert verdict(lines(numbers(5, "tp"), 120, goes_on=1.0)) == (None, set())


GONE = {("", "h1", "", "", "gone")}


def test_a_host_without_a_record_may_have_gone_on_until_its_records_of_an_overdue_step_are_missing() -> None:
    records = lines(numbers(), 90, silent=("h1",))
    assert verdict(records[:-1]) == (None, set())  # overdue since now, and the other host has sent none for 25 s
    assert verdict(records) == (30, GONE)
    assert verdict(lines(numbers(), 90, silent=("h1",), p99=4.5)) == (None, set())  # overdue for 7.5 s
    assert verdict(lines(numbers(), 105, silent=("h1",), p99=4.5)) == (45, GONE)


def test_no_host_is_gone_because_the_ledger_was_away() -> None:
    records = lines(numbers(), 120, silent=("h1",))
    away = [line for line in records if not 50 < line["t"] < 90]
    assert verdict([line for line in away if line["t"] < 120]) == (None, set())
    assert verdict(away) == (60, GONE)


def test_records_that_arrive_half_a_minute_apart_or_in_another_order_do_not_begin_a_silence_again() -> None:
    apart = [line for line in lines(numbers(), 120, silent=("h1",)) if line["t"] not in (75, 105)]
    assert verdict(apart) == (60, GONE)
    ledger = Ledger()
    for line in lines(numbers(), 90, silent=("h1",)):
        for received in (line["t"], line["t"] - 1):
            ledger.apply(line, received)
    found = ledger.runs["", "r"].hangs.verdict
    assert found is not None
    assert [one.host for one in found.suspects] == ["h1"]


@pytest.mark.parametrize("p99", [P99, None])
def test_a_run_is_overdue_by_its_steps_or_else_by_those_of_the_host(p99: float | None) -> None:
    assert verdict(lines(numbers(5, "tp"), 120, p99=p99))[0] == 60
    assert verdict(lines(numbers(5, "tp"), 120, p99=14.0)) == (None, set())
    assert verdict(lines(numbers(5, "tp"), 150, p99=14.0))[1] != set()


def test_a_step_that_ends_on_one_host_ends_the_verdict() -> None:
    records = lines(numbers(5, "tp"), 120)
    t = records[-1]["t"] + 5
    ended = {**records[-1], "t": t, "open_step_seconds": 1.0, "activity_seconds": {"step": t}, "open_step": None}
    assert verdict(records)[1] != set()
    assert verdict([*records, ended]) == (None, set())


def test_of_two_ranks_that_are_missing_the_one_with_a_sign_is_named() -> None:
    called = numbers(5, "dp")
    called[2][next(name for name in called[2] if name.startswith("dp"))] -= 1
    assert {rank for rank, *_ in verdict(lines(called, 120))[1]} == {"2", "5"}
    assert {rank for rank, *_ in verdict(lines(called, 120, signs={2: ["blocked"]}))[1]} == {"2"}


LOW = [1.0, 0.3, 0.4, None]  # power, of the usual
WAITS, COMPUTES, IDLE = [1.0, 0.3, 0.4, 0.0], [1.0, 0.9, 1.0, 0.5], [0.0, 0.1, 0.2, 0.0]
BLIND = [1.0, 0.3, 0.7, None]


@pytest.mark.parametrize(
    ("gpus", "hangs"),
    [
        (dict.fromkeys(range(8), WAITS), True),
        (dict.fromkeys(range(8), COMPUTES), False),
        (dict.fromkeys(range(8), LOW), True),
        (dict.fromkeys(range(8), BLIND), False),
        (dict.fromkeys(range(7), WAITS), False),  # one is not known
        ({}, False),
    ],
    ids=["wait", "compute", "power", "usual power", "one unknown", "unknown"],
)
def test_where_collectives_are_not_counted_the_gpus_tell_whether_a_run_hangs(
    gpus: dict[int, list[float | None]], hangs: bool
) -> None:
    nothing: dict[int, dict[str, float]] = {rank: {} for rank in range(8)}
    assert verdict(lines(nothing, 120, gpus=gpus)) == (60 if hangs else None, set())


def test_a_step_in_which_all_gpus_compute_is_long_and_does_not_hang() -> None:
    computing = dict.fromkeys(range(8), COMPUTES)
    assert verdict(lines(numbers(5, "tp"), 120, gpus=computing)) == (None, set())
    assert verdict(lines(numbers(5, "tp"), 120, gpus={**computing, 5: IDLE}))[0] == 60


@pytest.mark.parametrize(("odd", "sign"), [(IDLE, "idle"), (COMPUTES, "computing")], ids=["idle", "computing"])
def test_a_gpu_unlike_the_others_names_its_rank(odd: list[float | None], sign: str) -> None:
    found = verdict(lines(numbers(), 120, gpus={**dict.fromkeys(range(8), WAITS), 6: odd}))
    assert found == (60, {("6", "h1", "", "", sign)})


def test_signs_that_point_at_different_ranks_name_none_and_at_one_host_name_it() -> None:
    assert verdict(lines(numbers(), 120, signs={2: ["data"], 5: ["blocked"]})) == (60, set())
    down = {rank: ["link"] for rank in range(4, 8)}
    assert verdict(lines(numbers(), 120, signs=down)) == (60, {("", "h1", "", "", "link")})
    everywhere = {rank: ["data"] for rank in range(5)}
    assert verdict(lines(numbers(), 120, signs=everywhere)) == (60, set())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "open_step.ranks: Expected array, got object"),
        ([[0, 1, [], []]], "open_step.ranks[0]: Expected array of length 5, got 4"),
        ([[None, 1, [], [], None]], "open_step.ranks[0][0]: Expected int, got null"),
        ([[0, -1, [], [], None]], "open_step.ranks[0][1]: Expected float >= 0.0"),
        (
            [[0, 1, [["tp", "0-", 1]], [], None]],
            "open_step: rank 0: '0-' is not a rank, nor a range such as 0-3 or 1-29:4",
        ),
        ([[0, 1, [], ["is gone"], None]], r"open_step.ranks[0][3][0]: Expected str matching regex '^[^\W\d]\w*\Z'"),
        ([[0, 1, [], ["x"] * 9, None]], "open_step.ranks[0][3]: Expected array of length <= 8"),
        ([[0, 1, [], [], [1.0]]], "open_step.ranks[0][4]: Expected array of length 4, got 1"),
        ([[0, 1, [], [], [1.0, "x", None, None]]], "open_step.ranks[0][4][1]: Expected float | null, got str"),
    ],
)
def test_an_open_step_that_cannot_be_is_refused(rows: object, message: str) -> None:
    opened = {"t": 15.0, "seconds": 10.0, "overdue_after": 15.0, "ranks": rows}
    with pytest.raises(RecordError) as error:
        LedgerRecord.parse(lines(numbers(), 15.0)[0] | {"open_step": opened})
    assert str(error.value) == message


def test_ranks_of_a_host_that_cannot_be_are_refused() -> None:
    with pytest.raises(RecordError, match="ranks: not the text of at most 64 ranks"):
        LedgerRecord.parse(lines(numbers(), 15.0)[0] | {"ranks": "0-64"})
    with pytest.raises(RecordError, match="open_step: Object missing required field overdue_after"):
        LedgerRecord.parse(lines(numbers(), 15.0)[0] | {"open_step": {"t": 1.0, "seconds": 1.0, "ranks": []}})


def test_a_run_still_hangs_when_the_numbers_of_a_rank_are_left_out_and_come_again() -> None:
    records = lines(numbers(5, "tp"), 135)
    for record in (records[-3], records[-1]):  # of the second host
        record["open_step"]["ranks"][3][1:3] = None, []
    assert [verdict(records[: len(records) - left])[0] for left in (3, 2, 1, 0)] == [50, 60, 65, 75]
