"""Rules, routing and runbooks, asked of promtool, amtool and a PromQL parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from alerts import TIERS, Alert, AlertSettings, alertmanager_yaml, alerts, as_yaml, records, rules, rules_yaml
from alerts.__main__ import main
from alerts.dcgm import dcgm_rules
from alerts.recording import EVERY
from alerts.settings import duration
from demo.servers import Servers, find
from docs.generate import GROUPS, recorded
from tests.support import ROOT
from tests.support.cases import for_each
from tests.support.promql_labels import labels_of
from tests.support.rule_files import judged, seconds

RULE_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
SETTINGS = AlertSettings()
ALERTS = alerts(SETTINGS)
# By the level a record's name begins with: the labels it may have.
LEVELS = {
    "fleet": set[str](),
    "host": {"host", "run", "leaf"},
    "instance": {"job", "instance", "host", "run", "value", "reason", "rail", "uuid"},
    "port": {"instance", "host", "device", "port", "rail", "run"},
    "rail": {"run", "rail"},
    "rank": {"instance", "run", "rank", "host", "uuid", "pp", "sign", "group", "ranks"},
    "run": {"tenant", "run", "bucket", "state"},
}
EVERY_ALERT = for_each(ALERTS, lambda alert: f"{alert.name}-{alert.severity}")
DURATION = re.compile(
    r"(?<!from=now-)\b(?:\d+(?:ms|[smhd]))+\b|(?:(?<=time\(\) - )|(?<=blocked_seconds\) > )"
    r'|(?<="}\) - ))[\d.]+'
)


@pytest.fixture(scope="session")
def servers() -> Servers:
    return find()


def run(*command: str) -> str:
    """Return what a program printed. Fail the test with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (0, "0s"),
        (0.0004, "0s"),
        (0.75, "750ms"),
        (15, "15s"),
        (90, "1m30s"),
        (300, "5m"),
        (86_400, "1d"),
        (93_784.005, "1d2h3m4s5ms"),
    ],
)
def test_durations_are_written_as_prometheus_writes_them(length: float, text: str) -> None:
    assert duration(length) == text


@pytest.mark.parametrize("pace", [1, 15, 40])
def test_promtool_accepts_the_rules_at_any_pace(servers: Servers, tmp_path: Path, pace: float) -> None:
    (tmp_path / "rules.yaml").write_text(rules_yaml(AlertSettings(pace=pace)))
    count = len(records(SETTINGS)) + len(ALERTS)
    assert f"{count} rules found" in run(servers.promtool, "check", "rules", str(tmp_path / "rules.yaml"))


@pytest.fixture(scope="module")
def judgements(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """Give the output of promtool for each rule test. As many run at once as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            path: pool.submit(judged, servers.promtool, tmp_path_factory.mktemp(path.stem), path) for path in RULE_TESTS
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_rules_pass_their_unit_tests(
    path: Path, judgements: dict[Path, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = judgements[path].result()
    assert done.returncode == 0, done.stdout + done.stderr


@EVERY_ALERT
def test_every_alert_has_a_rule_test_in_which_it_fires_and_one_in_which_it_does_not(alert: Alert) -> None:
    tests = yaml.safe_load((ROOT / "tests" / "rules" / f"{alert.name}.yaml").read_text())["tests"]
    expected = [case["exp_alerts"] for test in tests for case in test.get("alert_rule_test", ())]
    assert any(found["exp_labels"]["severity"] == alert.severity for case in expected for found in case)
    assert [] in expected or alert.name == "FlopwatchWatchdog"


@EVERY_ALERT
def test_every_alert_has_its_declared_labels_and_uses_series_that_exist(alert: Alert) -> None:
    assert labels_of(promql_parser.parse(alert.expr)) == set(alert.identity)
    for query in re.findall(r"printf `([^`]*)`", alert.description):
        labels_of(promql_parser.parse(re.sub(r"%(\[\d\])?q", '"x"', query.replace("%f", "1"))))


def test_every_record_is_made_of_series_and_labels_that_exist_and_names_its_level() -> None:
    for record in records(SETTINGS):
        level, metric, operations = record.name.split(":")
        assert metric
        assert operations
        labels = labels_of(promql_parser.parse(record.expr))
        assert level in labels or level == "fleet"
        assert labels <= LEVELS[level], record.name
        assert record.help.endswith(".")


def test_every_record_has_a_name_of_its_own_and_a_rule_test_that_asks_for_it() -> None:
    names = [record.name for record in records(SETTINGS)]
    assert len(set(names)) == len(names)
    asked = {
        name
        for path in RULE_TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("promql_expr_test", ())
        if case["exp_samples"]
        for name in re.findall(r"[a-z]+:\w+:\w+", case["expr"])
    }
    assert set(names) - asked == set()


def test_the_list_of_records_in_the_docs_is_the_printed_one_and_leaves_none_out() -> None:
    page = (ROOT / "docs" / "records.md").read_text()
    assert page == recorded()
    assert re.findall(r"^\| `(\S+)` \|", page, flags=re.MULTILINE) == [
        record.name for group in GROUPS for record in records(SETTINGS) if record.group == group
    ]
    assert page.count("| `") == len(records(SETTINGS))


def test_a_group_that_is_evaluated_less_often_is_still_there_when_instant_queries_look_back() -> None:
    lookback = 300  # https://prometheus.io/docs/prometheus/latest/querying/basics/#staleness
    groups: Any = rules(SETTINGS)["groups"]
    every = {group["name"].rpartition("-")[2]: seconds(group["interval"]) for group in groups}
    assert EVERY.keys() <= every.keys()
    for name, interval in every.items():
        assert interval == EVERY.get(name, 1) * SETTINGS.scrape_interval < lookback / 2


@EVERY_ALERT
def test_every_alert_has_a_runbook_with_queries_that_work(alert: Alert) -> None:
    text = (ROOT / "alerts" / "runbooks" / f"{alert.name}.md").read_text()
    assert re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE) == [
        alert.name,
        "Meaning",
        "Impact",
        "Diagnosis",
        "Mitigation",
    ]
    queries = re.findall(r"```promql\n(.*?)```", text, flags=re.DOTALL)
    assert queries
    for query in queries:
        labels_of(promql_parser.parse(query))


@EVERY_ALERT
def test_no_text_reads_every_value_of_a_label_that_each_gpu_has(alert: Alert) -> None:
    assert not re.search(r'\b(?:uuid|rank|host|instance|device|port)!?=""', alert.annotations(SETTINGS)["description"])


def test_there_is_a_runbook_and_a_rule_test_for_no_other_alert() -> None:
    names = {alert.name for alert in ALERTS}
    assert {path.stem for path in (ROOT / "alerts" / "runbooks").iterdir()} == names
    assert {path.stem for path in RULE_TESTS if not path.stem.startswith("recording")} == names


@pytest.mark.parametrize("pace", [0.5, 7, 15, 40])
def test_at_another_pace_nothing_but_the_durations_differs(pace: float) -> None:
    paced = replace(SETTINGS, pace=pace)
    for write in (rules_yaml, alertmanager_yaml):
        usual, other = write(SETTINGS), write(paced)
        assert DURATION.sub("TIME", usual) == DURATION.sub("TIME", other)
        times, faster = DURATION.findall(usual), DURATION.findall(other)
        assert len(times) >= 6
        assert [seconds(time) * pace for time in faster] == pytest.approx([seconds(time) for time in times], abs=0.02)


@pytest.mark.parametrize("pace", [1, 15])
def test_no_window_is_shorter_than_four_scrapes(pace: float) -> None:
    settings = AlertSettings(pace=pace)
    windows = re.findall(r"\[(\w+)\]", re.sub(r"%\[\d\]q", "", rules_yaml(settings)))
    assert len(windows) > 10
    assert min(map(seconds, windows)) >= 4 * settings.scrape_interval / pace


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="scrape_interval 40 s: write 15 or less; the shortest window"):
        AlertSettings(scrape_interval=40)
    with pytest.raises(ValueError, match="pace 0"):
        AlertSettings(pace=0)


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({"alertname": "GpuXidCritical", "severity": "critical", "host": "a"}, "pagerduty,slack"),
        ({"alertname": "TrainingDown", "severity": "critical", "run": "lm"}, "pagerduty,slack"),
        ({"alertname": "TrainingStraggler", "severity": "warning", "run": "lm"}, "slack"),
        ({"alertname": "FlopwatchWatchdog", "severity": "info"}, "watchdog"),
        ({"alertname": "Anything", "severity": "info"}, "null"),
        ({"alertname": "ForeignAlert"}, "slack"),
    ],
)
def test_amtool_routes_by_severity(servers: Servers, tmp_path: Path, labels: dict[str, str], receivers: str) -> None:
    path = tmp_path / "alertmanager.yml"
    # amtool before 0.26 knows no url_file; the shipped file is checked as it is where it is read.
    path.write_text(alertmanager_yaml(replace(SETTINGS, watchdog_url="http://127.0.0.1:1/")))
    run(servers.amtool, "check-config", str(path))
    pairs = [f"{name}={value}" for name, value in labels.items()]
    assert run(servers.amtool, "config", "routes", "test", f"--config.file={path}", *pairs).strip() == receivers


def test_every_label_that_separates_alerts_across_runs_and_nodes_groups_them() -> None:
    config = yaml.safe_load(alertmanager_yaml(SETTINGS))
    assert set(config["route"]["group_by"]) == {"alertname", "tenant", "run", "host", "leaf"}
    for alert in ALERTS:
        assert {"run", "host", "leaf"} & set(alert.identity) or alert.name.startswith("Flopwatch")


def test_secrets_stay_in_files() -> None:
    folder = "/etc/alertmanager/secrets/flopwatch"
    assert receiver("slack")["api_url_file"] == f"{folder}/slack-url"
    assert receiver("pagerduty")["routing_key_file"] == f"{folder}/pagerduty-key"
    assert receiver("watchdog", key="webhook") == {"send_resolved": False, "url_file": f"{folder}/watchdog-url"}


@pytest.fixture
def render(servers: Servers, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that renders a template as Alertmanager does, for a group whose alerts are half resolved."""

    def alert(status: str, description: str) -> dict[str, Any]:
        return {
            "status": status,
            "labels": {},
            "annotations": {"description": description},
            "startsAt": "2026-11-21T14:05:09+01:00",
            "endsAt": "2026-11-21T15:00:00+01:00",
        }

    data = {
        "status": "firing",
        "receiver": "slack",
        "externalURL": "http://127.0.0.1",
        "commonLabels": {"alertname": "TrainingDown", "severity": "critical"},
        "commonAnnotations": {"summary": "1 < 2 & <b>", "runbook_url": "https://runbooks/x.md"},
        "alerts": [alert("resolved", "Run b>a"), alert("firing", "Run <!channel> & more")],
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "none.tmpl").write_text("")
    return lambda template: run(
        servers.amtool,
        "template",
        "render",
        f"--template.glob={tmp_path / 'none.tmpl'}",
        f"--template.data={tmp_path / 'data.json'}",
        f"--template.text={template}",
    )


def receiver(name: str, settings: AlertSettings = SETTINGS, key: str = "") -> dict[str, Any]:
    config = yaml.safe_load(alertmanager_yaml(settings))
    found = next(receiver for receiver in config["receivers"] if receiver["name"] == name)
    return found[f"{key or name}_configs"][0]  # type: ignore[no-any-return]


def test_slack_receives_firing_and_resolved_alerts_in_escaped_text(render: Callable[[str], str]) -> None:
    slack = receiver("slack", replace(SETTINGS, runbook_base_url="https://runbooks"))
    assert render(slack["title"]) == "[FIRING] TrainingDown: 1 &lt; 2 &amp; &lt;b&gt;"
    assert render(slack["color"]) == "danger"
    assert render(slack["text"]) == (
        "Run &lt;!channel&gt; &amp; more Alert since 21 Nov 13:05 UTC.\n"
        "Over: Run b&gt;a Alert from 21 Nov 13:05 UTC to 21 Nov 14:00 UTC.\n"
        "Runbook: <https://runbooks/x.md|TrainingDown>"
    )
    assert receiver("slack")["text"].endswith("Runbook: {{ .CommonAnnotations.runbook_url }}")


def test_slack_titles_lead_to_grafana_where_its_address_is_known() -> None:
    assert "title_link" not in receiver("slack")
    slack = receiver("slack", replace(SETTINGS, dashboard_base_url="https://grafana"))
    assert slack["title_link"] == "{{ .CommonAnnotations.dashboard_url }}"


def test_pagerduty_receives_firing_alerts(render: Callable[[str], str]) -> None:
    pagerduty = receiver("pagerduty", replace(SETTINGS, pagerduty_url="http://127.0.0.1:1/"))
    assert pagerduty["url"] == "http://127.0.0.1:1/"
    assert render(pagerduty["description"]) == "TrainingDown: Run <!channel> & more There are 2 such alerts."
    assert render(pagerduty["details"]["firing"]) == "Run <!channel> & more\n"
    assert render(pagerduty["details"]["resolved"]) == "Run b>a\n"
    assert render(pagerduty["severity"]) == "critical"


def test_the_command_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "out"), "--pace", "15", "--page-min-gpus", "8", "--watchdog-url", "http://127.0.0.1:1/"])
    settings = AlertSettings(pace=15, page_min_gpus=8, watchdog_url="http://127.0.0.1:1/")
    names = *(f"rules/{tier}.yaml" for tier in TIERS), "optional/dcgm.yaml", "alertmanager.yml"
    written = [tmp_path / "out" / name for name in names]
    optional = as_yaml(dcgm_rules(settings))
    contents = [*(rules_yaml(settings, tier) for tier in TIERS), optional, alertmanager_yaml(settings)]
    assert [path.read_text() for path in written] == contents
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
