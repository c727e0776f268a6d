"""What a straggler costs an hour, in its alert: with a price of a GPU-hour, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from alerts import AlertSettings, rules_yaml
from demo.servers import find
from simulator.promtool import rule_test

RUN = 'tenant="t",run="llama"'
SERIES = {
    f'run_gpus{{{RUN},instance="l1"}}': 1024,
    f'run_gpus{{{RUN},instance="l2"}}': 1024,
    f'run_straggler_ratio{{{RUN},kind="rank"}}': 0.15,
    f'run_straggler_info{{{RUN},rank="43",host="node-5",group="world",ranks="0-1023"}}': 1,
    f'run_whatif_step_seconds{{{RUN},mended="0"}}': 2.59,
    f'run_whatif_step_seconds{{{RUN},mended="1"}}': 2.02,
}


@pytest.mark.parametrize(
    ("price", "suspects", "sentence"),
    [
        (0.0, 1, "Without rank 43, a step would take 2.02 s in place of 2.59 s."),
        (2.5, 1, "Without rank 43, a step would take 2.02 s in place of 2.59 s, which costs $563 an hour."),
        (2.5, 2, "Without this delay, a step would take 2.02 s in place of 2.59 s, which costs $563 an hour."),
    ],
)
def test_the_alert_has_the_cost_of_a_straggler_if_a_price_is_set(
    price: float, suspects: int, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(rules_yaml(AlertSettings(gpu_hour_price=price), "run"))
    second = {f'run_straggler_info{{{RUN},rank="44",host="node-5",group="world",ranks="0-1023"}}': 1}
    series = SERIES | (second if suspects > 1 else {})
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": f"{value}x20"} for name, value in series.items()],
                "alert_rule_test": [{"alertname": "TrainingStraggler", "eval_time": "2m", "exp_alerts": []}],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = rule_test(find().promtool, tmp_path / "test.yaml")
    printed = done.stdout + done.stderr
    assert re.findall(r"Without .*?\.(?= The run loses)", printed) == [sentence]
