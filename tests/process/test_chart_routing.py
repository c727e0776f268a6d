"""Test which receivers the chart's values select for an alert, in both forms, with amtool and alerts/routing.py."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from alerts import TIERS, AlertSettings
from alerts.operator import alertmanagerconfig, matcher
from alerts.routing import alertmanager
from demo.servers import Servers, find
from tests.support.chart import NAMESPACE, VARIANTS, Json, files_of, notes, objects_of, only, render

SECRETS = Path("/etc/alertmanager/secrets")
ALL_RECEIVERS: Json = VARIANTS["routing"]["routing"]
SETTINGS = AlertSettings(
    slack_url_file=SECRETS / "flopwatch" / "slack-url",
    pagerduty_key_file=SECRETS / "flopwatch" / "pagerduty-key",
    watchdog_url_file=SECRETS / "dead-mans-switch" / "watchdog-url",
    webhook_url_file=SECRETS / "flopwatch" / "webhook-url",
    teams=("speech", "vision"),
    email_to="oncall@example.com",
    email_from="flopwatch@example.com",
    email_smarthost="mail.example.com:587",
    email_password_file=SECRETS / "mail" / "email-password",
)
LINKS = {"runbookUrl": "https://example.com/runbooks", "dashboardUrl": "https://grafana.example.com"}
LINKED = replace(SETTINGS, runbook_base_url=LINKS["runbookUrl"], dashboard_base_url=LINKS["dashboardUrl"])
OURS = {"name": "namespace", "matchType": "=", "value": NAMESPACE}


def configuration(kind: str, routing: Json, rules: Json | None = None) -> Json:
    """Return the configuration that an install creates: Alertmanager's own, or the spec of an AlertmanagerConfig."""
    objects = objects_of(files_of({"routing": {**routing, "kind": kind}, "rules": rules or {}}))
    if kind == "alertmanagerconfig":
        spec: Json = only(objects, "AlertmanagerConfig")["spec"]
        return spec
    config: Json = yaml.safe_load(only(objects, "Secret", "-alertmanager")["stringData"]["alertmanager.yaml"])
    return config


@pytest.mark.parametrize(("rules", "settings"), [({}, SETTINGS), (LINKS, LINKED)], ids=["paths", "links"])
def test_with_all_receivers_the_secret_is_what_the_alerts_package_makes(rules: Json, settings: AlertSettings) -> None:
    config, expected = configuration("secret", ALL_RECEIVERS, rules), cast(Json, alertmanager(settings))
    # The order of the routes matters. The order of the receivers, and that of the teams, does not.
    for one in (config, expected):
        one["receivers"] = sorted(one["receivers"], key=lambda receiver: str(receiver["name"]))
    assert config == expected


@pytest.mark.parametrize(("rules", "settings"), [({}, SETTINGS), (LINKS, LINKED)], ids=["paths", "links"])
def test_with_all_receivers_the_alertmanagerconfig_is_the_same_for_our_namespace(
    rules: Json, settings: AlertSettings
) -> None:
    spec, expected = configuration("alertmanagerconfig", ALL_RECEIVERS, rules), alertmanagerconfig(settings)
    assert spec["route"].pop("matchers") == [OURS]
    for rule in spec["inhibitRules"]:
        assert (rule["sourceMatch"].pop(), rule["targetMatch"].pop()) == (OURS, OURS)
    for one in (spec, expected):
        one["receivers"] = sorted(one["receivers"], key=lambda receiver: str(receiver["name"]))
    assert spec == expected


def test_every_alert_carries_the_namespace_and_no_other_rule_changes() -> None:
    with_label, without = (
        [group for tier in TIERS for group in only(render(name), "PrometheusRule", f"-{tier}")["spec"]["groups"]]
        for name in ("routing", "defaults")
    )
    alerts = 0
    for group, plain in zip(with_label, without, strict=True):
        for rule, before in zip(group["rules"], plain["rules"], strict=True):
            if "alert" in rule:
                alerts += 1
                assert rule["labels"].pop("namespace") == NAMESPACE
            rule.get("annotations", {}).clear()
            before.get("annotations", {}).clear()
            assert rule == before
    assert alerts > 60
    assert 'namespace="observability", which all of ours carry' in notes("routing")


def test_a_matcher_that_the_operator_cannot_have_is_refused() -> None:
    assert matcher('a =~ "b|c"') == {"name": "a", "matchType": "=~", "value": "b|c"}
    with pytest.raises(ValueError, match="write it as"):
        matcher('a="b"')


def as_the_operator_makes_it(spec: Json, strategy: str) -> Json:
    """Return the Alertmanager configuration that the Prometheus Operator generates from an AlertmanagerConfig.

    Follow pkg/alertmanager/amcfg.go of prometheus-operator 0.93. Receivers get the object's name, and the route gets
    `continue`. Unless the strategy is None, the route and both sides of inhibitions get a matcher of the namespace. The
    cluster's own configuration follows, here one without a receiver.
    """
    enforced = [] if strategy == "None" else [f'namespace="{NAMESPACE}"']

    def matchers(given: list[Json]) -> list[str]:
        return [f'{one["name"]}{one["matchType"]}"{one["value"]}"' for one in given]

    def named(name: str) -> str:
        return f"{NAMESPACE}/flopwatch/{name}"

    def route(given: Json) -> Json:
        times = {
            "groupWait": "group_wait",
            "groupInterval": "group_interval",
            "repeatInterval": "repeat_interval",
            "groupBy": "group_by",
        }
        return {
            "receiver": named(given["receiver"]),
            "continue": given.get("continue", False),
            "matchers": matchers(given.get("matchers", [])),
            **{times[key]: given[key] for key in times.keys() & given.keys()},
            "routes": [route(one) for one in given.get("routes", [])],
        }

    top = route(spec["route"])
    top |= {"continue": True, "matchers": top["matchers"] + enforced}
    configs: dict[str, Any] = {
        "slackConfigs": ("slack_configs", {"api_url": "http://127.0.0.1:1/slack"}),
        "pagerdutyConfigs": ("pagerduty_configs", {"routing_key": "0" * 32}),
        "webhookConfigs": ("webhook_configs", {"url": "http://127.0.0.1:1/"}),
        "emailConfigs": ("email_configs", {"to": "a@example.com", "from": "b@example.com", "smarthost": "c:25"}),
    }
    receivers = [
        {
            "name": named(one["name"]),
            **{configs[key][0]: [configs[key][1] for _ in one[key]] for key in one.keys() & configs.keys()},
        }
        for one in spec["receivers"]
    ]
    inhibit = [
        {
            "source_matchers": matchers(rule["sourceMatch"]) + enforced,
            "target_matchers": matchers(rule["targetMatch"]) + enforced,
            "equal": rule["equal"],
        }
        for rule in spec["inhibitRules"]
    ]
    return {
        "route": {"receiver": "null", "routes": [top]},
        "receivers": [{"name": "null"}, *receivers],
        "inhibit_rules": inhibit,
    }


@pytest.fixture(scope="module")
def servers() -> Servers:
    return find()


def tool_output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def receivers_for(servers: Servers, folder: Path, config: Json, labels: str) -> list[str]:
    """Return the receivers that amtool finds for an alert."""
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    tool_output(servers.amtool, "check-config", str(path))
    return tool_output(servers.amtool, "config", "routes", "test", f"--config.file={path}", *labels.split()).split(",")


LABELS = (
    "severity=critical",
    "severity=warning",
    "severity=info",
    "severity=critical team=speech",
    "severity=warning team=vision",
    "severity=warning team=text",
    "severity=critical team=speech shadow=true",
    "alertname=FlopwatchWatchdog severity=none",
)
SLACK, PAGERDUTY = {"slackSecret": "s"}, {"pagerdutySecret": "p"}
# For each set of receivers: the receivers of each of the alerts above.
ROUTINGS: dict[str, tuple[Json, list[str]]] = {
    "everybody": (
        ALL_RECEIVERS,
        [
            "webhook,email,pagerduty,slack",
            "webhook,email,slack",
            "null",
            "webhook,email,pagerduty-speech,slack-speech",
            "webhook,email,slack-vision",
            "webhook,email,slack",
            "null",
            "watchdog",
        ],
    ),
    "slack": (SLACK, ["slack", "slack", "null", "slack", "slack", "slack", "null", "null"]),
    "pagerduty": (PAGERDUTY, ["pagerduty", "null", "null", "pagerduty", "null", "null", "null", "null"]),
    "teams that have pagerduty alone": (
        PAGERDUTY | {"teams": ["speech", "vision"]},
        ["pagerduty", "null", "null", "pagerduty-speech", "null", "null", "null", "null"],
    ),
    "a webhook": (
        {"webhookSecret": "w", "watchdogSecret": "d"},
        ["webhook", "webhook", "null", "webhook", "webhook", "webhook", "null", "watchdog"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("routing", ROUTINGS)
def test_amtool_finds_the_receivers_of_every_alert_in_both_forms(
    servers: Servers, tmp_path: Path, routing: str
) -> None:
    values, expected = ROUTINGS[routing]
    plain = configuration("secret", values)
    for receiver in plain["receivers"]:  # amtool before 0.26 does not know a webhook's url_file
        for config in receiver.get("webhook_configs", []):
            config.pop("url_file")
            config["url"] = "http://127.0.0.1:1/"
    spec = configuration("alertmanagerconfig", values)
    for strategy in ("OnNamespace", "None"):
        config = as_the_operator_makes_it(spec, strategy)
        for labels, receivers in zip(LABELS, expected, strict=True):
            ours = [f"{NAMESPACE}/flopwatch/{name}" for name in receivers.split(",")]
            selected = receivers_for(servers, tmp_path, config, f"{labels} namespace={NAMESPACE}")
            assert selected == ours, (strategy, labels)
        # An alert from another namespace matches none of our routes, whatever the strategy.
        assert receivers_for(servers, tmp_path, config, "severity=critical namespace=other") == ["null"]
    for labels, receivers in zip(LABELS, expected, strict=True):
        assert receivers_for(servers, tmp_path, plain, labels) == receivers.split(","), labels


def test_without_a_password_e_mail_logs_in_nowhere() -> None:
    routing = {"email": {"to": "oncall@example.com"}}
    (email,) = [one for one in configuration("secret", routing)["receivers"] if one["name"] == "email"]
    assert email["email_configs"][0].keys() == {"to", "from", "smarthost", "send_resolved", "headers"}
    (email,) = [one for one in configuration("alertmanagerconfig", routing)["receivers"] if one["name"] == "email"]
    assert email["emailConfigs"][0].keys() == {"to", "from", "smarthost", "sendResolved", "headers"}
    assert [one["name"] for one in configuration("secret", routing)["receivers"]] == ["email", "null"]


def test_notes_name_the_secrets_that_alertmanager_has_to_mount() -> None:
    assert "in the Alertmanager's configSecret, in this namespace, and in its secrets: flopwatch." in (
        notes("routing-secret")
    )
