"""One incident is one page: inhibition, checked against the rules' times, amtool and a real Alertmanager."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import Alert, AlertSettings, alertmanager_yaml, alerts, records, rules_yaml
from alerts.__main__ import main
from alerts.fragments import GPU_CAUSES, HOST_CAUSES, OF_HOST, OF_RUN, PART_CAUSES
from alerts.recording import EVERY as EVERY_GROUP
from alerts.routing import GROUP_BY, INHIBITIONS, LEDGERS, VERDICTS, Inhibition
from demo.receiver import Message, Receiver
from demo.servers import Servers, find
from demo.stack import free_ports

SETTINGS = AlertSettings()
ALERTS = alerts(SETTINGS)
EVERY = (*INHIBITIONS, LEDGERS)
# An alert on an incident is identified by these labels and by no others.
SILENT = {"Maintenance", "RunOnFaultyHost", "HostOnFaultyLeaf"}
# Seconds of evidence that these need before they are pending: an overdue step without collectives for four seconds,
# half an hour without a step, two intervals between records, of 15 s and a tenth less.
SEEN_AFTER = {"TrainingHang": 15 + 4, "TrainingStalled": 1800, "TrainingStraggler": 2 * 13.5}
# A host that is gone sends no record, and the ledger names a straggler only with those of all hosts.
NEVER_BEFORE = {"TrainingStraggler": {"NodeLost", "HostOnFaultyLeaf", "LeafDown"}}


def seconds(text: str) -> float:
    sizes = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * sizes[unit] for number, unit in re.findall(r"([\d.]+)(ms|[smhd])", text))


LOST_AFTER = next(seconds(alert.for_) for alert in ALERTS if alert.name == "NodeLost")
REMEMBERED = 1200.0  # how long RunOnFaultyHost remembers a cause: [20m]


def named(pattern: str) -> list[Alert]:
    return [alert for alert in ALERTS if re.fullmatch(pattern, alert.name)]


def pairs(one: Inhibition) -> Iterator[tuple[Alert, Alert]]:
    """Yield each cause with each of its consequences that it may hold back: a warning holds back no page."""
    for cause in named(one.causes):
        for consequence in named(one.consequences):
            if (
                cause.name != consequence.name
                and consequence.severity in ("critical", "warning")
                and not (cause.severity == "warning" and consequence.severity == "critical")
            ):
                yield cause, consequence


def interval(group: str) -> float:
    """Return how often a group of rules is evaluated, in seconds."""
    return EVERY_GROUP.get(group, 1) * SETTINGS.scrape_interval


def late_records(alert: Alert) -> float:
    """Return how much later than the alert the records that it reads are evaluated, without those of places."""
    read = (record for record in records(SETTINGS) if record.name in alert.expr and not record.name.endswith(":info"))
    return max([0.0, *(interval(record.group) - interval(alert.group) for record in read)])


def evidence(alert: Alert) -> str:
    """Return an alert's expression without the parts that keep it firing."""
    parts = re.split(r"\n *or\b.*\n", alert.expr)
    return "\n".join(part for part in parts if f'alertname="{alert.name}"' not in part)


def remembers(cause: Alert, consequence: Alert) -> bool:
    """Return whether a cause that is there goes on as long as its consequence.

    NodeLost ends two minutes after FlopwatchExporterDown, which is a rule of the same host, unlike NodeLost.
    """
    until = "FlopwatchExporterDown" if consequence.name == "NodeLost" else consequence.name
    own = [part for part in re.split(r"\n *or\b.*\n", cause.expr) if f'alertname="{cause.name}"' in part]
    return any(
        re.fullmatch(names, consequence.name) or re.fullmatch(names, until)
        for part in own
        for names in re.findall(r'ALERTS(?:_FOR_STATE)?\{alertname=~?"([^"]*)"', part)
    )


def waits(alert: Alert) -> float:
    """Return how long an alert waits after its evidence: `for`, or `offset` in the place of one.

    A hang with a suspect and no sign of a fault that another alert reports waits for nothing.
    """
    return max([seconds(alert.for_), *map(seconds, re.findall(r"group by .* offset (\w+)\)", evidence(alert)))])


def group_wait(alert: Alert) -> float:
    return SETTINGS.verdict_wait if re.fullmatch(VERDICTS, alert.name) else SETTINGS.group_wait


def delay(alert: Alert, never: Collection[str] = ()) -> float:
    """Return how long after its evidence is scraped an alert fires, without the alerts `never` among its evidence.

    This is its `for`, and that of the alerts it reads in ALERTS. What stands before it in its own group is read at the
    same evaluation, what is in another group at the next, and may have been evaluated late itself. What stands behind
    it is how it remembers itself.
    """
    read = 0.0
    for names, firing in re.findall(
        r'ALERTS(?:_FOR_STATE)?\{alertname=~?"([^"]*)"(,alertstate="firing")?', evidence(alert)
    ):
        for other in named(names):
            memory = other.group == alert.group and ALERTS.index(other) >= ALERTS.index(alert)
            if not memory and other.name not in {alert.name, *never}:
                waited = delay(other) - (0 if firing else seconds(other.for_))
                late = 0 if other.group == alert.group else interval(other.group) + interval(alert.group)
                read = max(read, waited + late)
    return seconds(alert.for_) + read


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.causes)
def test_a_cause_fires_before_the_alerts_it_inhibits_are_sent(one: Inhibition) -> None:
    """In the worst case its target is scraped, and its group evaluated, an interval later than the consequence's."""
    late = []
    for cause, consequence in pairs(one):
        taken = delay(cause, NEVER_BEFORE.get(consequence.name, ()))
        # What reads other alerts is late by an evaluation of its own group already.
        late_group = cause.group != consequence.group and taken == seconds(cause.for_)
        phases = SETTINGS.scrape_interval + (interval(cause.group) if late_group else 0)
        if taken + phases >= SEEN_AFTER.get(consequence.name, 0) + waits(consequence) + group_wait(consequence):
            late.append((cause.name, consequence.name))
    assert list(pairs(one))
    assert late == []


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.causes)
def test_a_cause_waits_no_longer_than_its_consequences(one: Inhibition) -> None:
    assert [
        (cause.name, consequence.name)
        for cause, consequence in pairs(one)
        if seconds(cause.for_) > seconds(consequence.for_) and seconds(cause.for_) > LOST_AFTER
    ] == []


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.causes)
def test_no_page_outlasts_what_holds_it_back(one: Inhibition) -> None:
    """Or else it would be sent when its cause is over: the second page of one incident.

    A cause lasts as long as its consequence, or is kept as long, and for the evaluations that delay the end of that,
    also of the records that it reads.
    """
    outlasts = []
    for cause, consequence in pairs(one):
        late = 0.0 if cause.group == consequence.group else interval(consequence.group) + SETTINGS.scrape_interval
        late += late_records(consequence)
        if (
            consequence.severity == "critical"
            and not remembers(cause, consequence)
            and (seconds(consequence.keep_firing_for) + late > seconds(cause.keep_firing_for))
        ):
            outlasts.append((cause.name, consequence.name))
    assert outlasts == []


def test_what_is_kept_after_a_cause_and_a_restart_are_over_before_the_cause_is_forgotten() -> None:
    kept = max(seconds(alert.keep_firing_for) for alert in ALERTS if re.fullmatch(f"{OF_HOST}|{OF_RUN}", alert.name))
    assert kept + seconds(named("TrainingDown")[0].for_) <= REMEMBERED


def test_no_alert_is_its_own_cause_through_others() -> None:
    held_back: dict[str, set[str]] = {}
    for one in EVERY:
        for cause, consequence in pairs(one):
            held_back.setdefault(cause.name, set()).add(consequence.name)

    # RunOnFaultyHost and HostOnFaultyLeaf exist because of these, whether they are held back or not.
    def reach(name: str, seen: frozenset[str]) -> set[str]:
        return {name}.union(*(reach(after, seen | {name}) for after in held_back.get(name, set()) - seen))

    for name, after in held_back.items():
        assert all(name not in held_back.get(other, set()) for one in after for other in reach(one, frozenset({name})))


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.causes)
def test_every_name_is_an_alert_with_the_shared_labels(one: Inhibition) -> None:
    """A cause without one of them would hold back every alert without it."""
    for cause in named(one.causes):
        assert set(one.equal) <= set(cause.identity)
    for side in (one.causes, one.consequences):
        for pattern in re.split(r"\|(?![^(]*\))", side):
            assert any(set(one.equal) <= set(alert.identity) for alert in named(pattern)), pattern


def test_what_stands_between_a_host_and_its_runs_knows_every_page_about_a_host_that_comes_at_once() -> None:
    at_once = {
        alert.name
        for alert in ALERTS
        if alert.severity == "critical"
        and "host" in alert.identity
        and delay(alert) + interval(alert.group) <= LOST_AFTER + SETTINGS.scrape_interval
    }
    assert at_once <= {*HOST_CAUSES, *PART_CAUSES, *GPU_CAUSES} <= {alert.name for alert in ALERTS}
    assert all("uuid" in alert.identity for name in GPU_CAUSES for alert in named(name))


def test_an_alert_in_shadow_mode_is_recorded_and_holds_nothing_back() -> None:
    settings = replace(SETTINGS, shadow=("TrainingDown",))
    groups = yaml.safe_load(rules_yaml(settings))["groups"]
    shadowed = {rule["alert"] for group in groups for rule in group["rules"] if rule.get("labels", {}).get("shadow")}
    assert shadowed == {"TrainingDown"}
    assert all(
        'shadow = ""' in rule["source_matchers"]
        for rule in yaml.safe_load(alertmanager_yaml(settings))["inhibit_rules"]
    )


def test_names_that_cannot_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, complaint in (
        (("--shadow", "TraningDown"), "there is no alert TraningDown"),
        (("--teams", "a,../b"), "team '../b'"),
    ):
        with pytest.raises(SystemExit):
            main([str(tmp_path), *flags])
        assert complaint in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def servers() -> Servers:
    return find()


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("severity=critical team=speech", "webhook,email,pagerduty-speech,slack-speech"),
        ("severity=warning team=speech", "webhook,email,slack-speech"),
        ("severity=critical team=vision", "webhook,email,pagerduty,slack"),
        ("severity=warning", "webhook,email,slack"),
        ("severity=critical team=speech shadow=true", "null"),
        ("severity=none team=speech", "null"),
        ("alertname=FlopwatchWatchdog severity=info", "watchdog"),
    ],
)
def test_amtool_routes_by_team_and_to_webhook_and_email(
    servers: Servers, tmp_path: Path, labels: str, receivers: str
) -> None:
    settings = replace(
        SETTINGS,
        teams=("speech", "text"),
        webhook_url_file=Path("/secrets/webhook"),
        email_to="oncall@example.com",
        email_password_file=Path("/secrets/password"),
        watchdog_url="http://127.0.0.1:1/",
    )
    path = tmp_path / "alertmanager.yml"
    # amtool before 0.26 knows no url_file of a webhook.
    path.write_text(alertmanager_yaml(settings).replace("url_file: /secrets/webhook", "url: http://127.0.0.1:1/"))
    assert asked(servers.amtool, "check-config", str(path))
    found = asked(servers.amtool, "config", "routes", "test", f"--config.file={path}", *labels.split()).strip()
    assert found == receivers


def asked(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_team_has_its_own_secrets() -> None:
    config = yaml.safe_load(alertmanager_yaml(replace(SETTINGS, teams=("speech",))))
    folder = "/etc/alertmanager/secrets/flopwatch"
    receivers = {receiver["name"]: receiver for receiver in config["receivers"]}
    assert receivers["slack-speech"]["slack_configs"][0]["api_url_file"] == f"{folder}/slack-url-speech"
    assert receivers["pagerduty-speech"]["pagerduty_configs"][0]["routing_key_file"] == f"{folder}/pagerduty-key-speech"


PACE = 45.0
WAIT = 4.0  # seconds: a machine that stalls still sends a cause in time


class Notifications:
    """A real Alertmanager with the shipped configuration, and what it sends to Slack and PagerDuty."""

    def __init__(self, address: str, receiver: Receiver) -> None:
        self.address, self.receiver = address, receiver

    def post(self, *found: dict[str, str], ended: bool = False) -> None:
        """Send alerts as Prometheus does."""
        now = datetime.now(UTC)
        times = {"startsAt": now.isoformat(), "endsAt": (now + timedelta(seconds=0 if ended else 300)).isoformat()}
        body = [
            {
                "labels": labels,
                "annotations": {
                    "description": " ".join(labels.values()),
                    "summary": "A summary.",
                    "runbook_url": "r",
                    "dashboard_url": "d",
                },
                **times,
            }
            for labels in found
        ]
        request = urllib.request.Request(
            f"http://{self.address}/api/v2/alerts", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def pages(self) -> list[str]:
        """Return the summaries of the incidents at PagerDuty, each dedup_key once."""
        first: dict[str, Message] = {}
        for message in self.receiver.of("pagerduty"):
            if message.payload["event_action"] == "trigger":
                first.setdefault(message.payload["dedup_key"], message)
        return [message.payload["payload"]["summary"] for message in first.values()]


@pytest.fixture(scope="module")
def notifications(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notifications]:
    assert servers.alertmanager, f"no Alertmanager here: {servers.why}"
    folder = tmp_path_factory.mktemp("alertmanager")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Receiver() as receiver:
        (folder / "slack").write_text(f"{receiver.url}/slack")
        (folder / "key").write_text("0123456789abcdef" * 2)
        (folder / "webhook").write_text(f"{receiver.url}/watchdog")
        (folder / "alertmanager.yml").write_text(
            alertmanager_yaml(
                AlertSettings(
                    pace=PACE,
                    group_wait=PACE * WAIT,
                    verdict_wait=PACE * WAIT,
                    slack_url_file=folder / "slack",
                    pagerduty_key_file=folder / "key",
                    pagerduty_url=f"{receiver.url}/v2/enqueue",
                    watchdog_url=f"{receiver.url}/watchdog",
                    webhook_url_file=folder / "webhook",
                )
            )
        )
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                [
                    *servers.alertmanager,
                    f"--config.file={folder / 'alertmanager.yml'}",
                    f"--storage.path={folder}",
                    f"--web.listen-address={address}",
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            ) as process,
        ):
            try:
                for _ in range(300):
                    try:
                        urllib.request.urlopen(f"http://{address}/-/ready", timeout=1).close()
                        break
                    except OSError:
                        assert process.poll() is None, (folder / "log").read_text()
                        time.sleep(0.05)
                yield Notifications(address, receiver)
            finally:
                process.terminate()


def alert(name: str, **labels: str) -> dict[str, str]:
    """Return the labels of an alert, with its most severe severity."""
    severities = [one.severity for one in named(name)]
    return {"alertname": name, "severity": min(severities, key=("critical", "warning", "info", "none").index), **labels}


def hosts_of_a_leaf() -> list[dict[str, str]]:
    return [
        one
        for host in (f"leaf-{n:02}" for n in range(64))
        for one in (
            alert("InfinibandPortDown", host=host, device="mlx5_0", port="1"),
            alert("NodeLost", host=host),
            alert("RailImbalance", host=host, device="mlx5_0", port="1"),
        )
    ]


# By incident: what fires at first, a scrape later, and the one page there is to be.
INCIDENTS: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], str | None]] = {
    "a dead GPU": (
        [
            alert("NvlinkDown", host="gpu-1", uuid="B"),
            alert("TrainingHang", run="gpu"),
            alert("GpuMissing", host="gpu-1", uuid="A"),
        ],
        [
            alert("GpuXidCritical", host="gpu-1", uuid="A", xid="79"),
            alert("RunOnFaultyHost", host="gpu-1", run="gpu"),
            alert("GpuRecoveryNeeded", host="gpu-1", uuid="A"),
            alert("TrainingDown", tenant="t", run="gpu"),
            alert("TrainingRestartStorm", tenant="t", run="gpu"),
        ],
        "GpuXidCritical: GpuXidCritical critical gpu-1 A 79",
    ),
    "a dead host": (
        [alert("TrainingHang", run="host"), alert("FlopwatchExporterDown", host="node-1", instance="i", job="j")],
        [
            alert("NodeLost", host="node-1"),
            alert("RunOnFaultyHost", host="node-1", run="host"),
            alert("TrainingDown", tenant="t", run="host"),
        ],
        "NodeLost: NodeLost critical node-1",
    ),
    "a dead leaf": (
        [*hosts_of_a_leaf(), alert("TrainingHang", run="leaf")],
        [
            alert("LeafDown", leaf="l7"),
            *(alert("HostOnFaultyLeaf", leaf="l7", host=f"leaf-{n:02}") for n in range(64)),
            alert("RunOnFaultyHost", host="leaf-00", run="leaf"),
            alert("TrainingDown", tenant="", run="leaf"),
        ],
        "LeafDown: LeafDown critical l7",
    ),
    "a hang that ends as a run that is down": (
        [alert("TrainingHang", run="hangs")],
        [
            alert("TrainingDown", tenant="t", run="hangs"),
            alert("TrainingRestartStorm", tenant="t", run="hangs"),
            alert("TrainingMfuDrop", run="hangs"),
        ],
        "TrainingHang: TrainingHang critical hangs",
    ),
    "a node in maintenance": (
        [
            alert("GpuMissing", host="maintained", uuid="A"),
            alert("NodeLost", host="maintained"),
            alert("InfinibandPortDown", host="maintained", device="d", port="1"),
            alert("TrainingDown", run="moved"),
        ],
        [alert("Maintenance", host="maintained"), alert("RunOnFaultyHost", host="maintained", run="moved")],
        None,
    ),
    "a small run next to it": ([], [{**alert("TrainingDown", run="small"), "severity": "warning"}], None),
    "another large run": ([alert("TrainingDown", run="other")], [], "TrainingDown: TrainingDown critical other"),
}


def test_each_incident_is_one_page_and_its_consequences_are_held_back(notifications: Notifications) -> None:
    for first, _, _ in INCIDENTS.values():
        if first:
            notifications.post(*first)
    time.sleep(SETTINGS.scrape_interval / PACE)
    for _, second, _ in INCIDENTS.values():
        if second:
            notifications.post(*second)
    expected = sorted(page for _, _, page in INCIDENTS.values() if page is not None)
    until(lambda: len(notifications.pages()) >= len(expected))
    time.sleep(WAIT + 2 * SETTINGS.group_interval / PACE)  # whatever else would come
    assert sorted(notifications.pages()) == expected
    assert notifications.receiver.errors == []
    slack = "".join(str(message.payload) for message in notifications.receiver.of("slack"))
    assert "small" in slack
    webhook = "".join(str(message.payload) for message in notifications.receiver.of("watchdog"))
    assert all(page.partition(":")[0] in webhook for page in (*expected, "TrainingDown: small"))
    for silent in (*SILENT, "FlopwatchExporterDown", "TrainingMfuDrop", "RailImbalance", "maintained", "moved"):
        assert silent not in slack + webhook


def until(done: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def test_a_page_is_resolved_when_its_alert_ends(notifications: Notifications) -> None:
    notifications.post(alert("TrainingDown", run="over"))
    until(lambda: any("over" in page for page in notifications.pages()))
    notifications.post(alert("TrainingDown", run="over"), ended=True)
    (key,) = {
        message.payload["dedup_key"]
        for message in notifications.receiver.of("pagerduty")
        if message.payload["event_action"] == "trigger" and "over" in str(message.payload["payload"])
    }
    until(
        lambda: [
            message
            for message in notifications.receiver.of("pagerduty")
            if message.payload["event_action"] == "resolve" and message.payload["dedup_key"] == key
        ]
    )


def test_alerts_that_differ_by_run_host_or_leaf_are_never_in_one_message() -> None:
    config = yaml.safe_load(alertmanager_yaml(SETTINGS))
    assert config["route"]["group_by"] == GROUP_BY
    assert config["inhibit_rules"][0]["equal"] == [*GROUP_BY, "device", "port", "uuid"]
    for one in ALERTS:
        assert {"tenant", "run", "host", "leaf"} & set(one.identity) <= set(GROUP_BY)


def test_an_alert_of_a_run_has_its_team_as_a_label_where_teams_have_channels(servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules_yaml(replace(SETTINGS, teams=("speech",))))
    spikes = [{"series": f'training_loss_spikes_total{{run="{run}"}}', "values": "0 1 2 3x10"} for run in ("lm", "own")]
    info = {"series": 'training_run_info{run="lm",rank="0",team="speech"}', "values": "1x20"}
    expected = [
        f'{{alertname="TrainingLossSpikes",alertstate="firing",run="{run}",severity="warning",team="{team}"}}'
        for run, team in (("lm", "speech"), ("own", "none"))
    ]
    case = {
        "expr": 'ALERTS{alertname="TrainingLossSpikes"}',
        "eval_time": "5m",
        "exp_samples": [{"labels": f"ALERTS{labels}", "value": 1} for labels in expected],
    }
    (tmp_path / "test.yaml").write_text(
        json.dumps(
            {
                "rule_files": ["rules.yaml"],
                "evaluation_interval": "1m",
                "tests": [{"interval": "1m", "input_series": [*spikes, info], "promql_expr_test": [case]}],
            }
        )
    )
    assert "SUCCESS" in asked(servers.promtool, "test", "rules", str(tmp_path / "test.yaml"))
    assert not any(
        "team" in rule["labels"]
        for group in yaml.safe_load(rules_yaml(SETTINGS))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    )
