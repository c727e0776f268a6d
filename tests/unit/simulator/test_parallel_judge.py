"""Verdicts on simulated parallel jobs: each kind of trouble is judged right, and no other rank is named."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from flopwatch.verdicts.stragglers import WINDOWS, judge
from simulator.__main__ import main
from simulator.parallel_cases import KINDS, LAYOUTS
from simulator.parallel_judge import KindOutcomes, Outcome, evaluate, intervals, judged, misnamed_in, table, to_json
from simulator.parallel_step import Disturbance, Layout, steps


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_trouble_is_judged_right(kind: str) -> None:
    found = judged(kind, 1)
    assert (found.right, found.misnamed, found.communicator_right) in ((True, False, True), (True, False, None))
    # No rank is to blame for the last two, which need an interval more.
    after = {"healthy": 15.0, "whole leaf": 45.0, "storage jitter": 45.0}
    assert found.after == (None if kind.startswith("missing") else after.get(kind, 30.0))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_jobs_of_each_kind_are_judged_right_within_a_minute() -> None:
    rows = evaluate(100)
    print(table(rows))
    assert [row.kind for row in rows if row.right < 95] == []
    assert sum(row.misnamed for row in rows) <= 0.01 * sum(len(row.outcomes) for row in rows if row.names)
    assert {row.kind: row.after(0.95) for row in rows if (row.after(0.95) or 0.0) > 60} == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_rank_is_named_in_a_thousand_healthy_hours() -> None:
    assert sum(misnamed_in(layout, 1000 / len(LAYOUTS)) for layout in LAYOUTS.values()) == 0


@pytest.mark.long
def test_a_late_rank_of_1024_is_named_within_a_minute() -> None:
    layout = Layout(tp=8, pp=4, dp=32)
    for seed in range(1, 4):
        rank, noise = 100 * seed, partial(np.random.default_rng(seed).normal, 1.0, 0.02)
        late = Disturbance({rank: 1.2}, noise=noise)
        found = judge(list(intervals(steps(layout, [late] * (6 * WINDOWS[0][0])))))
        assert [(one.rank, one.communicator) for one in found.suspects] == [(rank, layout.finest(rank))]


def test_the_outcomes_are_a_table_and_json() -> None:
    right = Outcome("rank", True, False, True, 60.0)
    rows = [
        KindOutcomes("late in tp", True, [right, right, Outcome("link", False, True, False, None)]),
        KindOutcomes("healthy", False, [Outcome("none", True, False, None, 75.0)]),
    ]
    assert table(rows) == (
        "kind                jobs  right  wrong  95 % after  verdicts\n"
        "late in tp             3      2      1        60 s  rank 2, link 1\n"
        "healthy                1      1      0        75 s  none 1\n"
        "4 jobs, 3 judged right. Precision 66.7%, recall 66.7%, right communicator 66.7%"
    )
    assert to_json(rows)[0] == {
        "kind": "late in tp",
        "jobs": 3,
        "right": 2,
        "misnamed": 1,
        "verdicts": {"rank": 2, "link": 1},
        "seconds_p95": 60.0,
    }


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulator", "--scenario", "parallel", "--seeds", "1", "--json"])
    assert main() == 0
    assert [row["kind"] for row in json.loads(capsys.readouterr().out)] == list(KINDS)
    monkeypatch.setattr("sys.argv", ["simulator", "--scenario", "parallel", "--gpus", "8"])
    assert main() == 1
    assert "--scenario parallel simulates many small jobs: it takes no --gpus" in capsys.readouterr().err
