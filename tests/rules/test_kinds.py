"""Simulated kinds of straggler and hang, judged by the shipped rules; all seeds are `make simulate`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.servers import find
from flopwatch import catalogue
from simulator.kinds import HANGS, SCENARIOS, STRAGGLERS, TroubleKind
from simulator.ranks import PER_HOST, RANKS, SynchronousJob, Trouble
from simulator.verdicts import evaluate
from tests.support import ROOT

pytestmark = pytest.mark.long

RULES = [ROOT / "helm" / "files" / "rules" / file for file in ("host.yaml", "run.yaml")]
SEEDS = 1
KINDS = pytest.mark.parametrize("kind", [*STRAGGLERS, *HANGS], ids=lambda kind: kind.name)


def job(kind: TroubleKind, seed: int = 1, seconds: float = 600.0) -> SynchronousJob:
    return SynchronousJob(kind.name, f"{seed}", kind.make(random.Random(seed))[0], seconds)


def of(name: str) -> TroubleKind:
    return next(kind for kind in (*STRAGGLERS, *HANGS) if kind.name == name)


def changed(tmp_path: Path, old: str, new: str) -> list[Path]:
    """Return the shipped rules with one replacement in those of runs."""
    host, run = RULES
    text = run.read_text()
    assert old in text
    (tmp_path / "rules.yaml").write_text(text.replace(old, new))
    return [host, tmp_path / "rules.yaml"]


@pytest.fixture(scope="module")
def judging() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Give the command that judges each scenario. The commands run in parallel."""
    with ExitStack() as stack:
        yield {
            scenario: stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "flopwatch",
                        "simulate",
                        "--scenario",
                        scenario,
                        "--seeds",
                        str(SEEDS),
                        "--json",
                        "--rules",
                        *map(str, RULES),
                        "--promtool",
                        find().promtool,
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for scenario in SCENARIOS
        }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_straggler_of_every_kind_is_named_and_none_without_evidence(
    scenario: str, judging: dict[str, subprocess.Popen[str]]
) -> None:
    printed, _ = judging[scenario].communicate()
    status, found = judging[scenario].returncode, json.loads(printed)
    assert found["kinds"] == {
        kind.name: {
            "jobs": SEEDS,
            "right": SEEDS,
            "explained": SEEDS,
            "abstained": 0,
            "silent": 0,
            "alarms": 0,
            "wrong": {},
            "named_after_seconds": found["kinds"][kind.name]["named_after_seconds"],
        }
        for kind in SCENARIOS[scenario]
    }
    assert (status, found["precision"], found["recall"]) == (0, 1, 1)


def test_ten_kinds_of_each_have_a_rank_or_host_to_be_named() -> None:
    for kinds in SCENARIOS.values():
        truths = [kind.make(random.Random(1))[1] for kind in kinds]
        assert sum(truth.rank is not None or truth.host is not None for truth in truths) >= 10
        assert sum(truth.rank is None and truth.host is None for truth in truths) >= 5


@pytest.mark.parametrize(
    ("scenario", "kind", "old", "new"),
    [
        ("stragglers", "slow_links", '|host|group|link"}', '|host|group|link|communication"}'),
        (
            "hangs",
            "long_save",
            "max by (run) (run_hang_seconds)\n        and on",
            'max by (run) (run_state{state="running"})\n        or on',
        ),
    ],
    ids=lambda text: text if text.isidentifier() else "",
)
def test_rules_that_blame_the_wrong_are_found_out(scenario: str, kind: str, old: str, new: str, tmp_path: Path) -> None:
    (row,) = evaluate(scenario, 3, 1, changed(tmp_path, old, new), find().promtool, [kind]).rows
    assert row.right < row.jobs
    assert row.wrong or row.alarms


def test_a_ledger_that_names_no_rank_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.verdicts.hangs.CERTAIN", 1.0)
    found = evaluate("hangs", 2, 1, RULES, find().promtool, ["stopped"])
    assert [(row.right, row.abstained) for row in found.rows] == [(0, 2)]
    assert (found.recall, found.poor) == (0, list(found.rows))


def test_rules_that_give_no_reason_or_do_not_fire_are_detected(tmp_path: Path) -> None:
    rules = changed(tmp_path, " is stopped, ", " is late, ")
    found = evaluate("hangs", 2, 1, rules, find().promtool, ["stopped"])
    assert [(row.right, row.explained, row in found.poor) for row in found.rows] == [(2, 0, True)]
    rules = changed(tmp_path, "alert: TrainingHang\n", "alert: Other\n")
    assert [row.silent for row in evaluate("hangs", 2, 1, rules, find().promtool, ["stopped"]).rows] == [2]


@KINDS
def test_a_simulated_job_serves_only_series_of_the_hook_and_the_exporter(kind: TroubleKind) -> None:
    rows = {row.name: row for row in vars(catalogue).values() if isinstance(row, catalogue.Metric)}
    served = list(job(kind).series())
    assert len({(name, tuple(labels.items())) for (name, labels), _ in served}) == len(served)
    for (name, labels), values in served:
        assert len(values) == 41
        if name == "up":
            continue
        family = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        keys = labels.keys() - {"job", "instance", "le"}
        row = rows[name if name in rows else family]
        # An empty label counts as no label.
        assert keys == set(row.labels) if row.type != "info" else keys <= set(row.labels), name
        if row.type == "counter":
            numbers = [value for value in values if isinstance(value, float)]
            assert numbers == sorted(numbers)


@KINDS
def test_a_seed_gives_the_same_job_again_and_another_seed_another(kind: TroubleKind) -> None:
    assert list(job(kind).series()) == list(job(kind).series())
    assert list(job(kind).series()) != list(job(kind, 2).series())


def test_the_late_rank_waits_least_and_a_step_is_what_all_are_busy_and_wait() -> None:
    def slow(rank: int, step: int, t: float) -> float:
        return 0.3 if rank == 5 else 0.0

    measured = [
        part for part in SynchronousJob("late", "1", Trouble(0.0, slow), 900.0).segments if part.waits is not None
    ]
    assert len(measured) > 100
    shares = [
        sum(part.waits[rank] for part in measured if part.waits is not None)
        / sum(part.end - part.begin for part in measured)
        for rank in range(RANKS)
    ]
    assert min(range(RANKS), key=shares.__getitem__) == 5
    others = sorted(shares)[1:]
    assert 0.15 < others[len(others) // 2] - shares[5] < 0.3
    assert all(0 <= wait <= part.end - part.begin for part in measured for wait in part.waits or ())


def test_in_a_hang_the_one_that_is_missing_has_started_fewer_collectives_and_no_step_ends() -> None:
    trouble = Trouble(300.0, hangs=True, behind=frozenset({3}), silent=frozenset({3}), idle=frozenset({3}))
    series = {
        (name, labels.get("rank"), labels.get("activity")): values
        for (name, labels), values in SynchronousJob("hangs", "1", trouble, 540.0).series()
    }
    numbers = {rank: series["training_collective_sequence_number", str(rank), None][-1] for rank in range(RANKS)}
    assert {number for rank, number in numbers.items() if rank != 3} == {numbers[0]}
    assert float(numbers[3] or 0) < float(numbers[0] or 0)
    steps = series["training_steps_total", "0", None]
    assert steps[-1] == steps[-15]
    stood = [series["training_activity_seconds_total", rank, "step"][at] for rank in ("3", "4") for at in (-1, -5)]
    assert stood[0] == stood[1]
    assert float(stood[2] or 0) - float(stood[3] or 0) == pytest.approx(60, abs=6)


def test_a_host_that_is_dark_serves_nothing_after_a_last_mark() -> None:
    trouble = Trouble(300.0, hangs=True, dark=frozenset({1}))
    for (name, labels), values in SynchronousJob("dark", "1", trouble, 600.0).series():
        if name == "training_rank_info" and labels["instance"].startswith("dark-node-1"):
            assert int(labels["rank"]) >= PER_HOST
            assert values[21:] == [None] * 20
            assert [value for value in values if value is not None][-1] == "stale"
