"""What keeps the records right in an outage, a move or a restart, taken out one by one: a rule test has to notice."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import AlertSettings, recording, records
from alerts.recording.fabric import PORT_RAIL, RAIL, RAIL_RETRANSMISSIONS
from demo.servers import find
from simulator.promtool import rule_test
from tests.support import TESTS
from tests.support.rule_files import under

pytestmark = pytest.mark.long

SETTINGS = AlertSettings()
EVERY = {record.name: record for record in records(SETTINGS)}
RULE_TESTS = sorted((TESTS / "rules").glob("recording*.yaml"))

# A record, what is in its expression, and what would be there instead.
BROKEN = [
    # A node that was renamed, or whose driver was updated, has two infos.
    (recording.HOST, "topk by (instance) (1,", "max by (instance, host) ("),
    (recording.HOST, "or on (instance)\ncount by (instance, host) (last_over_time(training_rank_info[5m]))", ""),
    (PORT_RAIL, "max by (instance, device, port, rail) (", "("),
    (recording.HOST_ENDS, "topk by (instance) (1, last_over_time(", "((last_over_time("),
    # A rank that moved, and an exporter under another address, leave two series.
    (recording.RANK_MFU, "sum by (run, rank) (rate(training_model", "max by (run, rank) (rate(training_model"),
    (recording.HOST_MFU, "sum by (instance, run) (rate(training_model", "max by (instance, run) (rate(training_model"),
    (recording.RUN_POWER, "sum by (uuid)", "max by (uuid)"),
    # A rank that two jobs scrape is not twice as fast.
    (RAIL, "max by (instance, device, port) (", "("),
    # A figure of some ranks is not one of the run.
    (recording.RUN_POWER, 'unless on (run)\ntraining_rank_info{uuid=""}', ""),
    (recording.RUN_HFU, "and on (run)\n(count by", "unless on (run)\n(count by"),
    (recording.COMMUNICATION, "and on (run)", "unless on (run)"),
    # Two runs on a node, and ports that are not for computing.
    (
        PORT_RAIL,
        "(count by (instance) (instance:training_run:info) == 1)",
        "(count by (instance) (instance:training_run:info) > 0)",
    ),
    (PORT_RAIL, '{rail!="",role="compute"}', '{rail!=""}'),
    (RAIL_RETRANSMISSIONS, "+", "or"),
    # A second ledger by mistake.
    (recording.GOODPUT, "min by (tenant, run) (run_open_seconds)", "max by (tenant, run) (run_open_seconds)"),
    (
        recording.GOODPUT,
        "max by (tenant, run, bucket) (run_seconds_total{bucket!=",
        "sum by (tenant, run, bucket) (run_seconds_total{bucket!=",
    ),
    (recording.MTTF, "max by (tenant, run, status)", "sum by (tenant, run, status)"),
    (recording.MTTR, "max by (tenant, run) (run_recoveries_total)", "sum by (tenant, run) (run_recoveries_total)"),
    (
        "run:run_books:bool_1h",
        "min by (tenant, run) (last_over_time(run_start_timestamp_seconds[5m])) ==",
        "max by (tenant, run) (last_over_time(run_start_timestamp_seconds[5m])) ==",
    ),
    # The number of ranks of a run whose size no ledger reports.
    (recording.PAGES, "last_over_time(training_run_info[1d])", "training_run_info"),
    (recording.PAGES, "last_over_time(training_world_size[5m])", "training_world_size"),
    (recording.PAGES, "training_world_size[5m])) >= 64", "training_world_size[5m])) >= 63"),
    (recording.PAGES, "unless on (tenant, run)\nlast_over_time(run_gpus[5m])", ""),
    (recording.PAGES, "unless on (tenant, run)\nlast_over_time(run_gpus[5m])", "unless on (tenant, run)\nrun_gpus"),
    # A run that was just reported and has no seconds in any bucket.
    (recording.GOODPUT, 'and on (tenant, run) run_seconds_total{bucket!="queue"} > 0', ""),
    (recording.ETTR, 'and on (tenant, run) run_seconds_total{bucket!="queue"} > 0', ""),
    # A ledger that was away when the window began, and one that is away now.
    ("run:run_seconds:difference_1h", "[1h] offset 1h", "[5m] offset 1h"),
    ("run:run_seconds:difference_1h", "last_over_time(run_seconds_total[5m])", "(run_seconds_total)"),
    # A run that is younger, one without a past, one with new totals, one whose totals were restored.
    ("run:run_books:bool_1h", "0 * (", "1 + 0 * ("),
    ("run:run_books:bool_1h", "time() - 3900", "time() - 36000"),
    ("run:run_books:bool_1h", "time() - 3900", "time() - 3600"),
    ("run:run_seconds:difference_1h", "run:run_books:bool_1h == 1", "run:run_books:bool_1h"),
    ("run:run_seconds:difference_1h", "clamp_min(", "clamp_max("),
    ("run:run_open_seconds:difference_1h", "clamp_min(", "clamp_max("),
    # What was queued before the window, and GPUs that a queued run has not.
    (recording.ETTR_1H, "or\n    (min", "unless\n    (min"),
    (recording.FLEET_GOODPUT_1H, 'unless on (tenant, run) run_state{state="queued"} == 1', ""),
    # A run that ended, and was forgotten, days ago; one that is older than what was recorded of it.
    (
        recording.FLEET_GOODPUT_7D,
        "last_over_time(run:run_productive_gpu_seconds:sum[7d:1h]) -",
        "run:run_productive_gpu_seconds:sum -",
    ),
    (
        recording.FLEET_GOODPUT_7D,
        "or last_over_time(run:run_productive_gpu_seconds:sum[7d:1h])",
        "or run:run_productive_gpu_seconds:sum",
    ),
    (recording.FLEET_MTTF, "<= time() - 2592000", "> time() - 2592000"),
    # A run without a failure has no time to failure.
    (recording.FLEET_MTTF, "> 0", ">= 0"),
    (recording.MTTF, "> 0", ">= 0"),
    # A scrape that fails, and a rank that is gone for longer.
    (recording.WAIT, "last_over_time(training_measured_steps_total[1m])", "training_measured_steps_total"),
    (
        recording.WAIT,
        "last_over_time(training_measured_steps_total[1m])",
        "last_over_time(training_measured_steps_total[2m])",
    ),
    # What is no straggler, one that costs little, and two ledgers.
    (recording.STRAGGLER_LOST, '{kind=~"rank|host|group|link"}', ""),
    (recording.STRAGGLER_LOST, "|host", ""),
    (recording.CONFIRMED, '{kind=~"rank|host|group|link"}', ""),
    (recording.CONFIRMED, ">= 0.1", ">= 0"),
    (recording.CONFIRMED, "max by (run, rank, host, group, ranks) (run_straggler_info)", "run_straggler_info"),
    # Applications make Xids, too; ends of runs without a sign have no owner; a storm of one error is one.
    (recording.LEMON, '{severity=~"critical|fatal"}', ""),
    (recording.HOST_ENDS, "and on (host)", "unless on (host)"),
    (recording.LEMON, "changes(", "count_over_time("),
]


def squeezed(text: str) -> str:
    """Return PromQL with one space where there are spaces and lines, and none within parentheses."""
    return re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split()))


def named(record: str, text: str, name: str) -> str:
    return re.sub(rf"(?<![\w:]){re.escape(record)}(?![\w:])", name, text)


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> set[int]:
    """Return which of BROKEN fail a test of theirs; as many promtools run at once as there are processors."""
    mutants = {}
    for number, (record, old, new) in enumerate(BROKEN):
        expr, old = squeezed(EVERY[record].expr), squeezed(old)
        assert old in expr, (record, old)
        mutants[number] = (record, balanced(expr.replace(old, squeezed(new), 1)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return set().union(
            *pool.map(lambda path: failing(tmp_path_factory.mktemp(path.stem), path, mutants), RULE_TESTS)
        )


def failing(folder: Path, path: Path, mutants: dict[int, tuple[str, str]]) -> set[int]:
    """Return which of these, each a record and its other expression, fail the rule tests in a file.

    They are evaluated next to the right ones, by other names. promtool stops at a rule that cannot be evaluated: that
    one has failed, and the others are run again.
    """
    failed: set[int] = set()
    while True:
        test = yaml.safe_load(path.read_text())
        asked: set[int] = set()
        for group in test["tests"]:
            cases: list[dict[str, Any]] = []
            for number, (record, _) in mutants.items():
                for case in group["promql_expr_test"]:
                    name = f"mutant_{number}_"
                    expr = named(record, case["expr"], name)
                    if number not in failed and expr != case["expr"]:
                        asked.add(number)
                        cases.append(
                            {
                                **case,
                                "expr": expr,
                                "exp_samples": [
                                    {**one, "labels": named(record, one["labels"], name)} for one in case["exp_samples"]
                                ],
                            }
                        )
            group["promql_expr_test"] = cases
        below = {rule["record"] for rule in under(text for number in asked for text in mutants[number])[0]}
        groups: dict[str, list[dict[str, object]]] = {}
        for rule in EVERY.values():
            if rule.name in below:
                rules = groups.setdefault(f"flopwatch-{rule.group}", [])
                rules.append(rule.rule())
                for number in sorted(asked):
                    if mutants[number][0] == rule.name:  # one that remembers itself remembers the mutant
                        name = f"mutant_{number}_"
                        rules.append({"record": name, "expr": named(rule.name, mutants[number][1], name)})
        (folder / "rules.yaml").write_text(
            json.dumps({"groups": [{"name": name, "rules": made} for name, made in groups.items()]})
        )
        (folder / "test.yaml").write_text(json.dumps({**test, "rule_files": ["rules.yaml"]}))
        done = rule_test(find().promtool, folder / "test.yaml", timeout=120)
        output = done.stdout + done.stderr
        assert "could not parse" not in output, output
        stopped = set(map(int, re.findall(r"rule: mutant_(\d+)_, time: ", output)))
        failed |= stopped or set(map(int, re.findall(r"\bmutant_(\d+)_", output)))
        assert done.returncode == 0 or failed, output
        if not stopped:
            return failed


def balanced(expr: str) -> str:
    """Return an expression from which parentheses were taken, with as many closed as opened, at the end of its part."""
    missing = expr.count("(") - expr.count(")")
    return expr + ")" * missing


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=lambda number: f"{BROKEN[number][0]} {number}")
def test_a_record_without_what_keeps_it_right_fails_a_rule_test(noticed: set[int], number: int) -> None:
    assert number in noticed, BROKEN[number]
