"""Stacks of a hang in the ledger: the ranks that it requests them of, and that they stay with the hang and incident."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopwatch.catalogue.stacks import MAX_STACKS
from flopwatch.ledger import views
from flopwatch.ledger.app import _answer
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.record import LedgerRecord, RecordError
from flopwatch.ledger.run import RunLedger
from flopwatch.ledger.tables import run_table, stacks_text
from tests.support.hanging import lines, numbers
from tests.support.histories import Line, read_back

HANG = lines(numbers(5, "tp"), 120)
TEXT = 'thread MainThread (1)\n  File "train.py", line 7, in load'


def wants(records: list[Line], *, more: dict[int, list[Any]] | None = None) -> list[list[int]]:
    """Return the ranks whose stacks the ledger wants after each record. `more` has the stacks in some records."""
    ledger, found = Ledger(), []
    for number, line in enumerate(records):
        record = LedgerRecord.parse({**line, **({"stacks": more[number]} if more and number in more else {})})
        ledger.apply(record)
        found.append([rank for _, _, rank in ledger.wanted_stacks([record])])
    return found


def test_the_suspect_and_its_lowest_peer_are_asked_for_on_their_own_host() -> None:
    found = wants(HANG)
    # Once all hosts stand still, the record of the second host has both: ranks 4 and 5 are a group of their own.
    named = next(number for number, ranks in enumerate(found) if ranks)
    assert HANG[named]["source"] == "h1"
    assert {tuple(ranks) for ranks in found[named::2]} == {(4, 5)}
    assert not any(found[named + 1 :: 2])


@pytest.mark.parametrize(
    ("called", "signs", "wanted"),
    [
        (numbers(5, "dp"), {}, {"h0": [1], "h1": [5]}),  # of ranks 1, 3, 5 and 7
        (numbers(5, "default"), {}, {"h0": [0], "h1": [5]}),
        (numbers(), {6: ["blocked"]}, {"h0": [0], "h1": [6]}),
        (numbers(), {0: ["blocked"]}, {"h0": [0, 1], "h1": []}),
        (numbers(), {4: ["data"], 5: ["data"]}, {"h0": [0], "h1": [4]}),  # a host, not one of its ranks
        (numbers(), {0: ["data"], 1: ["data"]}, {"h0": [0], "h1": [4]}),
        (numbers(), {}, {"h0": [], "h1": []}),
    ],
)
def test_the_peer_is_of_the_communicator_or_else_of_the_run(
    called: dict[int, dict[str, float]], signs: dict[int, list[str]], wanted: dict[str, list[int]]
) -> None:
    records = lines(called, 120, signs=signs)
    found = zip(records, wants(records), strict=True)
    assert {line["source"]: ranks for line, ranks in list(found)[-2:]} == wanted


def test_stacks_are_asked_for_once_in_an_open_step_and_again_in_the_next() -> None:
    named = next(number for number, ranks in enumerate(wants(HANG)) if ranks)
    found = wants(HANG, more={named + 2: [[5, 91.0, TEXT]], named + 4: [[5, 91.0, TEXT], [4, 99.0, TEXT]]})
    assert [found[number] for number in (named, named + 2, named + 4)] == [[4, 5], [4], []]
    again = [{**line, "t": line["t"] + 300, "step": line["step"] + 1} for line in HANG]
    for line, later in zip(HANG, again, strict=True):
        later["activity_seconds"] = {"step": line["t"] + 300}
        if "open_step" in line:
            later["open_step"] = {**line["open_step"], "t": later["t"]}
    answered = wants([*HANG, *again], more={named + 2: [[5, 91.0, TEXT], [4, 99.0, TEXT]]})
    assert answered[len(HANG) + named] == [4, 5]


FULL, HUNG = 60 + 8 * 600.0, 600.0  # when the 600 steps of 8 s have ended, and how long the next one hangs


def test_the_answer_to_records_is_no_longer_than_an_exporter_reads() -> None:
    assert _answer(3, []) == b'{"accepted":3}'
    body = _answer(1000, [("t" * 100, "r" * 100, rank) for rank in range(64)])
    assert len(body) <= 500
    assert json.loads(body) == {"accepted": 1000, "stacks": [["t" * 100, "r" * 100, rank] for rank in (0, 1)]}
    assert json.loads(_answer(1, [("t" * 512, "r", 0)])) == {"accepted": 1}


def hung(*, ends: bool = False, back: float = 0.0) -> RunLedger:
    """Return a run of two ranks whose step hangs, with stacks. It then ends, or goes on for `back` seconds."""
    ledger, line = Ledger(), Line()
    for t in range(75, int(FULL + HUNG + back), 15):
        opened = t - FULL
        done = 8 * min(600, (t - 60) // 8) if opened < HUNG else 4800 + HUNG + 8 * (opened - HUNG) // 8
        step = min(600, (t - 60) // 8) if opened < HUNG else 601 + int(opened - HUNG) // 8
        line = {"t": t, "run": "r", "attempt": "a", "source": "n0", "event": "snapshot", "started": 0.0, "rank": 0}
        line |= {"gpus": 2, "ranks": "0-1", "step": step, "activity_seconds": {"startup": 60.0, "step": t - 60.0}}
        line["open_step_seconds"] = t - 60 - done
        if 15 < opened < HUNG:
            rows = [[0, 2.0, [], [], None], [1, 1.0, [], [], None]]
            line["open_step"] = {"t": t, "seconds": opened, "overdue_after": 40.0, "ranks": rows}
            line["stacks"] = [[rank, FULL + 70, f"{TEXT} of {rank}"] for rank in (0, 1)] if opened > 70 else None
        ledger.apply(line)
    if ends:
        last = {name: value for name, value in line.items() if name not in ("open_step", "stacks")}
        ledger.apply({**last, "t": line["t"] + 5, "event": "finish", "status": "failed"})
    return ledger.runs["", "r"]


@pytest.mark.parametrize(("ends", "kind"), [(True, "end"), (False, "stall")])
def test_the_stacks_stay_with_the_incident_that_the_hang_becomes(ends: bool, kind: str) -> None:
    run = hung(ends=ends, back=0.0 if ends else 800.0)
    assert run.stacks.rows == []
    for one in (run, read_back(run)):
        record = json.loads(json.dumps(views.figures(one, one.reporters.last)))
        [loss] = record["incidents"]
        assert (loss["kind"], [row[0] for row in loss["stacks"]]) == (kind, [0, 1])
        assert f"{TEXT} of 0" in stacks_text(record)
        assert "\nrank 1, 1970-01-01 01:22" in stacks_text(record)


def test_the_stacks_of_a_hang_that_goes_on_survive_a_restart_of_the_ledger() -> None:
    run = hung()
    for one in (run, read_back(run)):
        record = views.figures(one, one.reporters.last)
        assert [row[0] for row in record["stacks"]] == [0, 1]
        assert record["incidents"] == []
        assert "stacks of the last hang or straggler\n\nrank 0, 1970" in run_table(record)


def test_a_slow_stretch_and_a_later_loss_do_not_take_the_stacks_of_a_hang() -> None:
    run = hung()
    assert run.incidents._new("", 0.0, 1e9, "slow").stacks == []
    assert run.incidents._new("failed", run.stacks.rows[0][1] + 1, 1e9).stacks == []
    assert len(run.stacks.rows) == 2


def test_stacks_of_a_hang_that_became_no_incident_are_dropped_after_an_hour() -> None:
    ledger, kept = Ledger(), []
    for line in HANG:
        ledger.apply({**line, "stacks": [[5, 90.0, TEXT]]} if line["t"] == 105 else line)
    for t in (3600, 3900):
        ledger.apply({**HANG[0], "t": t, "step": t - 100, "activity_seconds": {"step": t}})
        kept.append(len(ledger.runs["", "r"].stacks.rows))
    assert kept == [1, 0]


def test_few_ranks_and_few_incidents_keep_stacks() -> None:
    run = hung()
    record = LedgerRecord.parse({**HANG[0], "stacks": [[rank, 1.0, TEXT] for rank in range(2, 64)]})
    run.stacks.take(record, run.hangs, run.stragglers, run.reporters)
    assert [row[0] for row in run.stacks.rows] == [*range(56, 64)]
    for _ in range(30):
        run.stacks.rows = [(1, 9e9, TEXT)]
        run.incidents._add(run.incidents._new("failed", 0.0, 0.0))
    assert [number for number, one in run.incidents.by_number.items() if one.stacks] == [*range(11, 31)]
    assert run.incidents.changed >= {*range(1, 31)}


@pytest.mark.parametrize(
    "stacks",
    [
        "text",
        {"0": "text"},
        [[0, 1.0]],
        [[0, 1.0, 7]],
        [["0", 1.0, "text"]],
        [[-1, 1.0, "text"]],
        [[0, float("nan"), "text"]],
        [[0, float("inf"), "text"]],
        [[0, 1.0, "text"]] * 65,
    ],
)
def test_malformed_stacks_are_refused(stacks: object) -> None:
    with pytest.raises(RecordError, match="stacks"):
        LedgerRecord.parse({**HANG[0], "stacks": stacks})


def test_hostile_stacks_are_cut_and_printable() -> None:
    hostile = "\x1b[31mred\x07\n\u202e<script>" + "x" * (1 << 20)
    [(rank, t, text)] = LedgerRecord.parse({**HANG[0], "stacks": [[3, 9e9, hostile]]}).stacks
    assert (rank, t, len(text)) == (3, HANG[0]["t"] + 300, MAX_STACKS)
    assert text.startswith("?[31mred?\n?<script>xxx")
    shown = stacks_text({"incidents": [], "stacks": [[3, 9.0, hostile]]})  # as another ledger may send them
    assert shown.startswith("rank 3, 1970-01-01 00:00:09Z\n?[31mred?\n?<script>")
