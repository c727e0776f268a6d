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

from alerts import AlertSettings, alerts, recording, records
from alerts.recording.fabric import (
    HOST_RAIL_RETRANSMISSION_RATIO,
    HOST_RAIL_RETRANSMISSIONS,
    PORT_RAIL,
    PORT_TRANSMIT,
    PORT_WAIT,
    RAIL_RETRANSMISSION_RATIO,
)
from alerts.tiers import tiers
from demo.servers import find
from simulator.promtool import rule_test
from tests.support import TESTS
from tests.support.rule_files import under

pytestmark = pytest.mark.long

SETTINGS = AlertSettings()
EVERY = {record.name: record for record in records(SETTINGS)}
TIER = dict(zip(EVERY, tiers((*records(SETTINGS), *alerts(SETTINGS))), strict=False))
RULE_TESTS = sorted((TESTS / "rules").glob("recording*.yaml"))

# A record, what is in its expression, and what would be there instead.
BROKEN = [
    # A node that was renamed, or whose driver was updated, has two infos.
    (recording.HOST, "topk by (instance) (1,", "max by (instance, host) ("),
    (recording.HOST, "or on (instance)\ncount by (instance, host) (last_over_time(training_rank_info[5m]))", ""),
    (PORT_RAIL, "max by (instance, device, port, rail) (", "("),
    (recording.HOST_ENDS, "topk by (instance) (1, last_over_time(", "((last_over_time("),
    # An exporter under another address leaves two series.
    (recording.HOST_POWER, "sum by (host, uuid)", "max by (host, uuid)"),
    # A rank that two jobs scrape is not twice as fast.
    (PORT_TRANSMIT, "max by (instance, device, port) (", "("),
    (PORT_WAIT, 'and on (instance, device, port) last_over_time(infiniband_info{role="compute"}[5m])', ""),
    (recording.HOST_TENSOR_ACTIVE, "max by (instance, run, uuid) (training_rank_info)", "(training_rank_info)"),
    # A figure of some ranks is not one of the run.
    (recording.HOST_POWER, "(training_rank_info) * Inf", '(training_rank_info{uuid!=""}) * Inf'),
    (
        recording.RUN_POWER,
        "unless on (run)\n(host:training_run:info unless on (host, run) host:gpu_energy_joules:rate5m)",
        "",
    ),
    (recording.RANK_MFU, "unless on (instance, run, rank)\ntraining_mfu_unavailable == 1", ""),
    (recording.HOST_TENSOR_ACTIVE, "== on (instance, run)", "<= on (instance, run)"),
    (recording.HOST_TENSOR_ACTIVE, "and on (instance, run)", "unless on (instance, run)"),
    (recording.COMMUNICATION, "and on (run)", "unless on (run)"),
    # Two runs on a node, and ports that are not for computing.
    (
        PORT_RAIL,
        "(count by (instance) (instance:training_run:info) == 1)",
        "(count by (instance) (instance:training_run:info) > 0)",
    ),
    (PORT_RAIL, '{rail!="",role="compute"}', '{rail!=""}'),
    (HOST_RAIL_RETRANSMISSIONS, "+", "or"),
    (HOST_RAIL_RETRANSMISSIONS, "or\n    rate(infiniband_retransmitted_packets_total[5m])", ""),
    (HOST_RAIL_RETRANSMISSION_RATIO, "max by (instance, device, port) (rate(", "((rate("),
    (HOST_RAIL_RETRANSMISSION_RATIO, " > 0", ""),
    (RAIL_RETRANSMISSION_RATIO, "retransmissions:rate5m)", "retransmissions:ratio)"),
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
    (recording.RUN_MFU, "max by (tenant, run) (rate(run_model", "sum by (tenant, run) (rate(run_model"),
    (recording.RUN_MFU, "max by (tenant, run) (rate(run_step", "sum by (tenant, run) (rate(run_step"),
    (recording.RUN_HFU, "max by (tenant, run) (rate(run_hardware", "sum by (tenant, run) (rate(run_hardware"),
    (recording.TOKENS, "max by", "sum by"),
    (recording.STEPS, "max by", "sum by"),
    (recording.STEP_DURATION, "max by (tenant, run) (rate(run_steps", "sum by (tenant, run) (rate(run_steps"),
    (recording.RUN_STATE, "max by", "min by"),
    (recording.PAGES, "max by (tenant, run) (last_over_time(run_page", "min by (tenant, run) (last_over_time(run_page"),
    # A ledger that cannot be scraped for a while, and a run that is small.
    (recording.PAGES, "last_over_time(run_page[5m])", "run_page"),
    (recording.PAGES, "== 1 or", ">= 0 or"),
    (recording.PAGES, ">= 64", ">= 63"),
    (recording.RUN_STATE, "last_over_time(run_state[5m])", "run_state"),
    (recording.STANDS_STILL, 'last_over_time(run_state{state="down"}[5m])', 'run_state{state="down"}'),
    (recording.STANDS_STILL, 'unless on (run)\nrun_state{state=~"completed|stopped"} == 1', ""),
    # A run that makes no steps has no MFU and no duration of them.
    (recording.RUN_MFU, "> 0", ">= 0"),
    (recording.RUN_HFU, "> 0", ">= 0"),
    (recording.STEP_DURATION, "> 0", ">= 0"),
    (recording.STEP_ENERGY, "> 0", ">= 0"),
    # What one rank of a host does, and what another one.
    (recording.HOST_LAST_STEP, "max by (instance, run) (training", "min by (instance, run) (training"),
    (recording.HOST_LAST_STEP, "or on (instance, run)", "unless on (instance, run)"),
    (recording.HOST_STEPS, "max by", "sum by"),
    (recording.HOST_TOKENS, "sum by", "max by"),
    (recording.HOST_NOT_FINITE, "sum by (instance, run, value)", "sum by (instance, run)"),
    (recording.HOST_NOT_FINITE, "max by (instance, run)", "sum by (instance, run)"),
    (recording.HOST_DATA_STALL, "max by (instance, run) (", "avg by (instance, run) ("),
    (recording.HOST_DATA_STALL, '{activity=~"step|data_stall"}', ""),
    (recording.HOST_NO_MFU, "== 1", ">= 0"),
    (recording.HOST_PEAK_OVERRIDE, '{peak_source=~"override.*"}', ""),
    (recording.HOST_DECLARED_MFU, "sum by (instance, run) (max", "avg by (instance, run) (max"),
    (recording.HOST_START, "max by (instance, run) (sum", "min by (instance, run) (sum"),
    (recording.HOST_CLOCK, "quantile by (instance, run) (0.5,", "max by (instance, run) ("),
    (recording.HOST_WORLD_SIZE, "last_over_time(training_world_size[2m])", "training_world_size"),
    (recording.GPU_IDLE_ALLOCATED, '{uuid!=""}', ""),
    (recording.GPU_IDLE_ALLOCATED, "or on (instance, uuid)", "and on (instance, uuid)"),
    # Cards that two exporters of a host serve, that do not answer, or whose owner is unknown.
    (recording.HOST_GPUS, "group by (host, uuid) (", "sum by (host, uuid, instance) ("),
    (recording.HOST_GPUS, "== 1", ">= 0"),
    (recording.HOST_ALLOCATED, "|unknown", ""),
    (recording.HOST_ALLOCATED, "== 1", ">= 0"),
    (recording.HOST_IDLE, 'source!="none"', 'source!~"none|unknown"'),
    (recording.HOST_IDLE, "unless on (host, uuid)", "and on (host, uuid)"),
    # Ports that never were up, or that no run communicates over, and a leaf that is forgotten too early.
    (recording.PORT_LONG_INACTIVE, "< 4", "< 1"),
    (recording.PORT_LONG_INACTIVE, "[10m]", "[1h]"),
    (recording.PORT_LONG_INACTIVE, "[10m]", "[5m]"),
    (recording.PORT_LOST, "unless on (instance, device, port) port:infiniband_inactive:bool_10m", ""),
    (recording.GPU_MISSING, "== 0", ">= 0"),
    (recording.GPU_MISSING, "last_over_time(gpu_present[5m])", "gpu_present"),
    (recording.GPU_RECOVERY, "> 0", ">= 0"),
    (recording.GPU_RECOVERY, "last_over_time(gpu_recovery_action_id[5m])", "gpu_recovery_action_id"),
    (recording.PORT_INACTIVE, "and on (instance, device, port)\nport:infiniband_was_active:bool", ""),
    (recording.PORT_MISSING, "== 0", ">= 0"),
    (
        recording.PORT_DOWN,
        'unless on (instance, device, port)\nlast_over_time(infiniband_info{role=~"management|storage"}[5m])',
        "",
    ),
    (recording.PORT_DOWN, "or port:infiniband_missing:bool", ""),
    (recording.LEAF, "last_over_time(host_topology_info[10m])", "host_topology_info"),
    (recording.LEAF, "group by (host, leaf)", "group by (host, leaf, rack)"),
    # Alerts on a GPU that are no page, that are not sent, or that began long ago.
    (recording.GPU_FAULT, ',severity="critical"', ""),
    (recording.GPU_FAULT, ',shadow=""', ""),
    (recording.GPU_FAULT, ',uuid!=""', ""),
    (recording.GPU_FAULT, "last_over_time(training_rank_info[10m])", "training_rank_info"),
    (recording.GPU_FAULT, "time() - 1800", "time() - 3600"),
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
    (recording.HOST_FAULTS, '{severity=~"critical|fatal"}', ""),
    (recording.HOST_FAULTS, "> 0", ">= 0"),
    (recording.HOST_FAULTS, "group by (host, uuid, xid)", "group by (host, uuid)"),
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
                rules = groups.setdefault(f"flopwatch-{TIER[rule.name]}-{rule.group}", [])
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
