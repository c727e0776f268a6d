"""Shadow mode: an alert that is evaluated and recorded like any other, and sent to no receiver."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import AlertSettings, alertmanager_yaml, alerts, rules
from alerts.__main__ import main
from demo.servers import Servers, find
from simulator.promtool import rule_test
from tests.support.rule_files import under

SETTINGS = AlertSettings()
SHADOWED = replace(SETTINGS, shadow=("GpuHot", "NvlinkFabricUnhealthy"))


@pytest.fixture(scope="module")
def servers() -> Servers:
    return find()


def by_name(settings: AlertSettings) -> dict[str, list[dict[str, Any]]]:
    """Return the alerting rules by their alert's name."""
    groups: Any = rules(settings)["groups"]
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        for rule in group["rules"]:
            if "alert" in rule:
                found.setdefault(rule["alert"], []).append(rule)
    return found


def test_a_shadowed_alert_differs_only_by_its_label_and_no_other_alert_changes() -> None:
    usual, shadowed = by_name(SETTINGS), by_name(SHADOWED)
    assert usual.keys() == shadowed.keys()
    for name, variants in usual.items():
        expected = [{**rule, "labels": {**rule["labels"], "shadow": "true"}} for rule in variants]
        assert shadowed[name] == (expected if name in SHADOWED.shadow else variants)


def test_its_severities_stay_apart() -> None:
    found = sorted(by_name(SHADOWED)["NvlinkFabricUnhealthy"], key=lambda rule: rule["labels"]["severity"])
    assert [rule["labels"] for rule in found] == [
        {"severity": "critical", "shadow": "true"},
        {"severity": "warning", "shadow": "true"},
    ]


def test_prometheus_records_a_shadowed_alert(servers: Servers, tmp_path: Path) -> None:
    rule = by_name(SHADOWED)["GpuHot"]
    below, _ = under(one["expr"] for one in rule)
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "one", "rules": [*below, *rule]}]}))
    series = {
        'gpu_temperature_margin_celsius{gpu="1",uuid="GPU-1",instance="a"}': "0x20",
        'gpu_temperature_limit_margin_celsius{gpu="1",uuid="GPU-1",limit="slowdown",instance="a"}': "-2x20",
        'gpu_info{gpu="1",uuid="GPU-1",host="node-a",instance="a"}': "1x20",
    }
    (tmp_path / "test.yaml").write_text(
        json.dumps(
            {
                "rule_files": ["rules.yaml"],
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": [{"series": name, "values": values} for name, values in series.items()],
                        "promql_expr_test": [
                            {
                                "expr": 'ALERTS{alertname="GpuHot",alertstate="firing",shadow="true"}',
                                "eval_time": "10m",
                                "exp_samples": [
                                    {
                                        "labels": 'ALERTS{alertname="GpuHot",alertstate="firing",host="node-a",'
                                        'severity="warning",shadow="true",uuid="GPU-1"}',
                                        "value": 1,
                                    }
                                ],
                            }
                        ],
                    }
                ],
            }
        )
    )
    done = rule_test(servers.promtool, tmp_path / "test.yaml", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("severity", ["critical", "warning"])
@pytest.mark.parametrize("team", [{}, {"team": "speech"}])
def test_a_shadowed_alert_is_sent_to_no_receiver(
    servers: Servers, tmp_path: Path, severity: str, team: dict[str, str]
) -> None:
    config = tmp_path / "alertmanager.yml"
    config.write_text(alertmanager_yaml(replace(SHADOWED, watchdog_url="http://127.0.0.1:1/")))
    labels = {"alertname": "GpuHot", "severity": severity, "host": "a", "shadow": "true", **team}

    def receivers(labels: dict[str, str]) -> str:
        return subprocess.run(
            [
                servers.amtool,
                "config",
                "routes",
                "test",
                f"--config.file={config}",
                *(f"{name}={value}" for name, value in labels.items()),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()

    assert receivers(labels) == "null"
    assert "null" not in receivers({name: value for name, value in labels.items() if name != "shadow"})


def test_a_shadowed_alert_holds_back_no_other() -> None:
    config = yaml.safe_load(alertmanager_yaml(SHADOWED))
    assert config["inhibit_rules"]
    operators: dict[str, Callable[[str, str], bool]] = {
        "=": lambda value, wanted: value == wanted,
        "!=": lambda value, wanted: value != wanted,
        "=~": lambda value, wanted: bool(re.fullmatch(wanted, value)),
        "!~": lambda value, wanted: not re.fullmatch(wanted, value),
    }
    for rule in config["inhibit_rules"]:
        for alert in alerts(replace(SETTINGS, shadow=tuple({alert.name for alert in alerts(SETTINGS)}))):
            labels = {"alertname": alert.name, **alert.labels}
            parsed = [re.fullmatch(r'(\w+)\s*(=~|!~|!=|=)\s*"(.*)"', matcher) for matcher in rule["source_matchers"]]
            assert not all(one and operators[one[2]](labels.get(one[1], ""), one[3]) for one in parsed), (rule, alert)


def test_a_name_that_no_alert_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="there is no alert GpuCold"):
        alerts(replace(SETTINGS, shadow=("GpuHot", "GpuCold")))
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--shadow", "GpuCold"])
    assert "there is no alert GpuCold" in capsys.readouterr().err


def test_the_command_takes_names(tmp_path: Path) -> None:
    main([str(tmp_path), "--shadow", "GpuHot,RailImbalance"])
    written = [group for path in tmp_path.glob("rules/*.yaml") for group in yaml.safe_load(path.read_text())["groups"]]
    shadowed = {rule["alert"] for group in written for rule in group["rules"] if "shadow" in rule.get("labels", {})}
    assert shadowed == {"GpuHot", "RailImbalance"}
