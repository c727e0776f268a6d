"""The sentence at the top of a run's board, and the rows below it, as promtool evaluates their queries."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dashboards import filled, verdict
from demo.servers import find
from simulator.promtool import rule_test

RUN, LEDGER = 'run="$run"', 'tenant=~"$tenant", run="$run"'
VARIABLES = {"run": "lm", "tenant": ".*", "price": "2.5"}
# Run lm has rank 43 on GPU 3 of host h. Another run has a straggler of its own.
ALWAYS = """
  run_state{tenant="t",run="lm",state="running"}                                          1
  run_gpus{tenant="t",run="lm"}                                                           256
  run_gpus{tenant="t",run="other"}                                                        8
  training_rank_info{run="lm",rank="43",host="h",uuid="A"}                                1
  training_rank_info{run="lm",rank="44",host="h",uuid="B"}                                1
  gpu_info{gpu="3",uuid="A",host="h",instance="i"}                                        1
  gpu_info{gpu="4",uuid="B",host="h",instance="i"}                                        1
  rank:training_straggler:confirmed{run="other",rank="1",host="x",group="world",ranks=""} 0.5
"""
LATE = """
  run_straggler_ratio{run="lm",kind="KIND"}                                               0.24
  run_straggler_ratio{run="lm",kind="imbalance"}                                          0
  rank:training_straggler:confirmed{run="lm",rank="43",host="h",group="world",ranks=""}   0.24
"""
TWO = """
  rank:training_collective_wait:ratio{run="lm",rank="43",pp="0"}                          0.01
  rank:training_collective_wait:ratio{run="lm",rank="44",pp="0"}                          0.02
  rank:training_straggler:confirmed{run="lm",rank="44",host="h",group="world",ranks=""}   0.24
"""
HOT = 'gpu_clock_event_seconds_total{gpu="3",uuid="A",reason="hw_thermal_slowdown",instance="i"} 0+15x40\n'
HANG = """
  run_hang_seconds{run="lm"}                                                              95
  run_hang_suspect_ratio{run="lm",rank="43",host="h",group="world",ranks="",signs="gpu"}  0.7
"""
FIRES = 'ALERTS{alertname="TrainingStraggler",alertstate="firing",run="lm",severity="SEVERITY"} 1\n'
CRITICAL, WARNING = (FIRES.replace("SEVERITY", severity) for severity in ("critical", "warning"))
ON_HOST = 'ALERTS{alertname="GpuHot",alertstate="firing",host="h",uuid="A",severity="warning"} 1\n'
ELSEWHERE = 'ALERTS{alertname="GpuHot",alertstate="firing",host="x",uuid="C",severity="warning"} 1\n'
OF_RANK = "Rank 43 on h costs 24 % of each step: GPU 3 throttles by heat. $154 an hour."


def evaluated(folder: Path, series: str, asked: dict[str, dict[str, float]]) -> str:
    """Return the differences that promtool finds to the expected samples of the queries, empty without any."""
    lines = [line.rsplit(maxsplit=1) for line in series.strip().splitlines() if line.strip()]
    group = {
        "interval": "15s",
        "input_series": [
            {"series": name.strip(), "values": value if "x" in value else f"{value}x40"} for name, value in lines
        ],
        "promql_expr_test": [
            {
                "expr": filled(query, VARIABLES),
                "eval_time": "8m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
            }
            for query, samples in asked.items()
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump({"tests": [group]}))
    done = rule_test(find().promtool, folder / "test.yaml", timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def labels_of(sentence: str) -> str:
    """Return the labels from which the panel's legend makes the sentence."""
    head, _, cost = sentence.partition(". ")
    known, colon, why = head.removesuffix(".").partition(": ")
    subject, verb, loss = next(
        (known.partition(verb) for verb in (" costs ", " holds up ") if verb in known), (known, "", "")
    )
    parts = {"run": "lm", "subject": subject, "loss": verb + loss, "cause": colon + why, "cost": cost}
    return "{" + ", ".join(f'{name}="{value}"' for name, value in parts.items() if value) + "}"


@pytest.mark.parametrize(
    ("series", "sentence", "severity"),
    [
        (LATE.replace("KIND", "rank") + HOT, OF_RANK, 2),
        (LATE.replace("KIND", "rank"), OF_RANK.replace("throttles by heat", "has no known fault"), 2),
        (LATE.replace("KIND", "rank") + TWO + HOT, OF_RANK.replace("on h", "on h and 1 more"), 2),
        (LATE.replace("KIND", "host") + TWO, "Host h and 1 more costs 24 % of each step. $154 an hour.", 2),
        (
            LATE.replace("KIND", "rank").replace("0.24", "0.12") + HOT,
            OF_RANK.replace("24 %", "12 %").replace("154", "77"),
            1,
        ),
        (HANG, "Rank 43 on h holds up the run: no step for 95 s. $640 an hour.", 2),
        (HANG.splitlines()[1], "The run hangs, and no rank is suspected: no step for 95 s. $640 an hour.", 2),
        (
            'run_straggler_ratio{run="lm",kind="imbalance"} 0.15',
            "Unevenly divided work costs 15 % of each step. $96 an hour.",
            1,
        ),
        (CRITICAL + WARNING, "TrainingStraggler fires.", 2),
        (ON_HOST + ELSEWHERE, "GpuHot fires on h.", 1),
        (ELSEWHERE, "No alert fires on this run. It costs $640 an hour.", 0),
    ],
)
def test_a_run_s_board_begins_with_one_sentence_on_what_costs_most(
    tmp_path: Path, series: str, sentence: str, severity: int
) -> None:
    assert not evaluated(tmp_path, ALWAYS + series, {verdict.sentence(RUN, LEDGER): {labels_of(sentence): severity}})


@pytest.mark.parametrize(("state", "severity"), [("down", 2), ("queued", -1), ("completed", -1), ("stopped", -1)])
def test_a_run_that_does_not_run_shows_its_state(tmp_path: Path, state: str, severity: int) -> None:
    series = ALWAYS.replace('state="running"', f'state="{state}"')
    expected = f'{{run="lm", subject="The run is {state}"}}'
    assert not evaluated(tmp_path, series, {verdict.sentence(RUN, LEDGER): {expected: severity}})


def test_a_run_of_which_nothing_is_known_has_no_sentence(tmp_path: Path) -> None:
    series = ALWAYS.replace('run="lm"', 'run="another"')
    assert not evaluated(tmp_path, series, {verdict.sentence(RUN, LEDGER): {}})


def test_the_straggler_s_alert_is_one_row_with_rank_host_gpu_and_cost(tmp_path: Path) -> None:
    series = ALWAYS + LATE.replace("KIND", "rank") + HOT + CRITICAL + WARNING + ON_HOST + ELSEWHERE
    place = 'rank="43", host="h", uuid="A", gpu="3"'
    firing = 'alertstate="firing", run="lm"'
    rows = {
        f'{{alertname="TrainingStraggler", severity="critical", {firing}, {place}, dollars="154"}}': 2.0,
        f'{{alertname="GpuHot", severity="warning", {firing}, {place}}}': 1.0,
    }
    suspect = f'{{run="lm", {place}, cause="throttles by heat", dollars="154"}}'
    assert not evaluated(
        tmp_path, series, {verdict.incidents(RUN, LEDGER): rows, verdict.priced(RUN, LEDGER): {suspect: 0.24}}
    )
