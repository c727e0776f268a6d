"""Alertmanager's configuration: receivers of each severity, and which alerts are consequences of others.

Critical alerts are sent to PagerDuty and Slack, warnings to Slack, info and none to no receiver. A team in the settings
has its own Slack channel and PagerDuty service, for alerts with its label. Whether an alert of a run is critical
depends on the run's size (run:training_page:bool). A webhook and an e-mail address receive all alerts if they are set.

One incident is one page, because consequences are inhibited (INHIBITIONS). A cause is sent no later than its
consequence: `group_wait` is longer than the evaluations between the two, and so is `verdict_wait` with the time that a
verdict takes. A cause ends no earlier than a page that
it inhibits. A host and a run share no label, and neither do a leaf and its hosts. The alerts RunOnFaultyHost and
HostOnFaultyLeaf connect them, and are sent to no receiver.

Secrets are read from files. `api_url_file` and `routing_key_file` need Alertmanager 0.25, a webhook's `url_file` 0.26.
https://prometheus.io/docs/alerting/latest/configuration/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alerts.alerting import alerts
from alerts.fragments import OF_HOST, OF_RUN
from alerts.settings import AlertSettings

# Slack reads <, > and & as markup: <!channel> in a label would notify the whole channel.
ESCAPE = ' | reReplaceAll "&" "&amp;" | reReplaceAll "<" "&lt;" | reReplaceAll ">" "&gt;"'
TITLE = f"[{{{{ .Status | toUpper }}}}] {{{{ .CommonLabels.alertname }}}}: {{{{ .CommonAnnotations.summary{ESCAPE} }}}}"
SINCE = '{{ .StartsAt.UTC.Format "2 Jan 15:04 UTC" }}'
MAX_LISTED = 10  # alerts in one message: Slack cuts a text at 8000 characters, and the runbook is last
FACTS = (
    f"{{{{ range $i, $one := .Alerts.Firing }}}}{{{{ if lt $i {MAX_LISTED} }}}}"
    f"{{{{ $one.Annotations.description{ESCAPE} }}}} Alert since {SINCE}.\n{{{{ end }}}}{{{{ end }}}}"
    f"{{{{ range $i, $one := .Alerts.Resolved }}}}{{{{ if lt $i {MAX_LISTED} }}}}"
    f"Over: {{{{ $one.Annotations.description{ESCAPE} }}}} Alert from {SINCE} to "
    '{{ .EndsAt.UTC.Format "2 Jan 15:04 UTC" }}.\n{{ end }}{{ end }}'
    f"{{{{ if gt (len .Alerts) {MAX_LISTED} }}}}There are {{{{ len .Alerts }}}} such alerts.\n{{{{ end }}}}"
)
EACH = "{{ range .Alerts.%s }}{{ .Annotations.description }}\n{{ end }}"
COLOR = (
    '{{ if eq .Status "resolved" }}good'
    '{{ else if eq .CommonLabels.severity "critical" }}danger'
    "{{ else }}warning{{ end }}"
)
FIRST = (
    "{{ with .Alerts.Firing }}{{ (index . 0).Annotations.description }}"
    "{{ else }}{{ (index .Alerts 0).Annotations.description }}{{ end }}"
)
MORE = "{{ if gt (len .Alerts) 1 }} There are {{ len .Alerts }} such alerts.{{ end }}"
# Labels that group alerts into one message: tenant and run of runs, host of hardware, leaf of a leaf. A missing label
# counts as empty.
GROUP_BY = ["alertname", "tenant", "run", "host", "leaf"]


@dataclass(frozen=True, slots=True)
class Inhibition:
    """Inhibition: while an alert of `causes` fires, alerts of `consequences` with the same `equal` labels are not sent.

    Both are anchored regular expressions of alert names. `where` has further matchers of the consequence.
    """

    causes: str
    consequences: str
    equal: tuple[str, ...]
    where: tuple[str, ...] = ()


EXPORTER = "FlopwatchExporter.+|FlopwatchCollectorFailing"
GPU_GONE = "GpuMissing|GpuTooFew|GpuRecoveryNeeded|GpuDriverNotLoaded|NvlinkFabricUnhealthy"
GPU_ERRORS = "GpuRepairPending|GpuEccUncorrected|GpuXidWarning|GpuPcie.+|NvlinkDown|NvlinkErrors"
FABRIC = "Infiniband.+|RailImbalance|EfaErrors|Roce.+"
SLOW = "TrainingMfuDrop|TrainingDataStall|GpuIdleAllocated"
VERDICTS = "TrainingHang|TrainingStraggler"  # of the ledger, evaluated and sent sooner than other alerts
ACCOUNTING = "TrainingGoodputLow|TrainingCheckpoint.+|TrainingWorkAtRisk"

# From the cause that explains most to the one that explains least. Inhibitions must be acyclic, or all alerts of a
# cycle would be inhibited.
INHIBITIONS = (
    Inhibition("Maintenance", "Gpu.+|Nv.+|NodeLost|Flopwatch.+|" + FABRIC, ("host",)),
    Inhibition("HostOnFaultyLeaf", OF_HOST, ("host",)),
    Inhibition("RunOnFaultyHost", f"{OF_RUN}|{SLOW}|{ACCOUNTING}", ("run",)),
    # An NVLink's Xid follows from what its switch reports.
    Inhibition("NvswitchSxid", "GpuXidCritical", ("host",), ('xid =~ "74|14[4-9]|150"',)),
    # A node that is lost after one of these alerts is lost because of it, since a lost node cannot report an Xid.
    Inhibition("NvswitchSxid|GpuXidCritical", f"NodeLost|{EXPORTER}|{GPU_GONE}|{GPU_ERRORS}|RailImbalance", ("host",)),
    Inhibition("GpuMemoryFailed", "GpuRecoveryNeeded|GpuRepairPending|GpuEccUncorrected", ("host", "uuid")),
    Inhibition("GpuXidCritical", "GpuMemoryFailed", ("host", "uuid")),
    Inhibition("NodeLost", f"{EXPORTER}|{GPU_GONE}|InfinibandPortDown|InfinibandRateLow|RailImbalance", ("host",)),
    Inhibition("NvlinkDown", "NvlinkFabricUnhealthy", ("host",)),
    Inhibition("GpuMissing", "GpuRecoveryNeeded|RailImbalance", ("host",)),
    Inhibition("GpuThermalThrottling", "GpuHot", ("host", "uuid")),
    Inhibition(
        "InfinibandPortDown", "InfinibandRateLow|InfinibandPacketLoss|RailImbalance", ("host", "device", "port")
    ),
    Inhibition("InfinibandLinkErrors", "InfinibandErrorRate|RailImbalance", ("host", "device", "port")),
    Inhibition("FlopwatchExporterDown", "Flopwatch(Collector|ExporterBlind|Clock).*", ("host", "instance")),
    Inhibition("FlopwatchExporterDown", "FlopwatchLedgerDown", ("instance",)),
    # A job that hangs is ended by its watchdog, and then it is down.
    Inhibition("TrainingHang", f"TrainingDown|TrainingStalled|{SLOW}|{ACCOUNTING}", ("run",)),
    Inhibition("TrainingDown", f"TrainingRestartStorm|TrainingStalled|{SLOW}|{ACCOUNTING}", ("run",)),
    Inhibition("TrainingRestartStorm", f"TrainingStalled|{SLOW}|{ACCOUNTING}", ("run",)),
    Inhibition("TrainingStraggler", "TrainingMfuDrop", ("run",)),
    Inhibition("TrainingDataStall", "TrainingMfuDrop", ("run",)),
    Inhibition("TrainingCheckpointStale", "TrainingWorkAtRisk", ("tenant", "run")),
)
LEDGERS = Inhibition("FlopwatchLedgerDown", "FlopwatchLedgerUnreachable", ())


def alertmanager(settings: AlertSettings) -> dict[str, object]:
    """Return the configuration of Alertmanager as a dictionary."""
    often = settings.at_pace(settings.watchdog_interval)
    deliveries = _deliveries(settings)
    return {
        "route": {
            "receiver": "slack",
            "group_by": GROUP_BY,
            "group_wait": settings.at_pace(settings.group_wait),
            "group_interval": settings.at_pace(settings.group_interval),
            "repeat_interval": settings.at_pace(settings.repeat_interval),
            "routes": [
                {
                    "receiver": "watchdog",
                    "matchers": ['alertname = "FlopwatchWatchdog"'],
                    "group_wait": "0s",
                    "group_interval": often,
                    "repeat_interval": often,
                },
                {"receiver": "null", "matchers": ['severity =~ "info|none"']},
                {"receiver": "null", "matchers": ['shadow = "true"']},
                {
                    "receiver": "slack",
                    "matchers": [f'alertname =~ "{VERDICTS}"'],
                    "group_wait": settings.at_pace(settings.verdict_wait),
                    "routes": deliveries,
                },
                *deliveries,
            ],
        },
        "inhibit_rules": inhibit_rules(settings),
        "receivers": [
            {"name": "slack", "slack_configs": [_slack(settings, settings.slack_url_file)]},
            {"name": "pagerduty", "pagerduty_configs": [_pagerduty(settings, settings.pagerduty_key_file)]},
            *(
                {"name": f"slack-{team}", "slack_configs": [_slack(settings, _of_team(settings.slack_url_file, team))]}
                for team in settings.teams
            ),
            *(
                {
                    "name": f"pagerduty-{team}",
                    "pagerduty_configs": [_pagerduty(settings, _of_team(settings.pagerduty_key_file, team))],
                }
                for team in settings.teams
            ),
            *({"name": name, **configs} for name, configs in _everything(settings).items()),
            {"name": "watchdog", "webhook_configs": [_watchdog(settings)]},
            {"name": "null"},
        ],
    }


def inhibit_rules(settings: AlertSettings) -> list[dict[str, object]]:
    """Return the inhibit rules. A warning never inhibits a page, and an alert in shadow mode inhibits nothing."""
    every = alerts(settings)
    made: list[dict[str, object]] = [
        {
            "source_matchers": ['severity = "critical"', 'shadow = ""'],
            "target_matchers": ['severity = "warning"'],
            "equal": [*GROUP_BY, "device", "port", "uuid"],  # also the same port or GPU of a host
        }
    ]
    for one in (*INHIBITIONS, LEDGERS):
        of = {alert.severity for alert in every if re.fullmatch(one.causes, alert.name)}
        for severities, targets in (("critical|none", "critical|warning"), ("warning", "warning")):
            if not of & set(severities.split("|")):
                continue
            made.append(
                {
                    "source_matchers": [f'alertname =~ "{one.causes}"', f'severity =~ "{severities}"', 'shadow = ""'],
                    "target_matchers": [f'alertname =~ "{one.consequences}"', f'severity =~ "{targets}"', *one.where],
                    "equal": list(one.equal),
                }
            )
    return made


def _deliveries(settings: AlertSettings) -> list[dict[str, Any]]:
    """Return the routes from an alert's severity and team to the receivers."""
    return [
        *({"receiver": name, "continue": True} for name in _everything(settings)),
        *(
            {
                "receiver": f"slack-{team}",
                "matchers": [f'team = "{team}"'],
                "routes": [
                    {"receiver": f"pagerduty-{team}", "matchers": ['severity = "critical"'], "continue": True},
                    {"receiver": f"slack-{team}"},
                ],
            }
            for team in settings.teams
        ),
        {"receiver": "pagerduty", "matchers": ['severity = "critical"'], "continue": True},
        {"receiver": "slack"},
    ]


def _of_team(path: Path, team: str) -> Path:
    return path.with_name(f"{path.name}-{team}")


def _everything(settings: AlertSettings) -> dict[str, dict[str, object]]:
    """Return the receivers that receive every alert, by name."""
    found: dict[str, dict[str, object]] = {}
    if settings.webhook_url_file is not None:
        found["webhook"] = {"webhook_configs": [{"send_resolved": True, "url_file": str(settings.webhook_url_file)}]}
    if settings.email_to is not None:
        email: dict[str, object] = {
            "to": settings.email_to,
            "from": settings.email_from,
            "smarthost": settings.email_smarthost,
            "send_resolved": True,
            "headers": {
                "Subject": "[{{ .Status | toUpper }}] {{ .CommonLabels.alertname }}: {{ .CommonAnnotations.summary }}"
            },
        }
        if settings.email_password_file is not None:
            email |= {"auth_username": settings.email_from, "auth_password_file": str(settings.email_password_file)}
        found["email"] = {"email_configs": [email]}
    return found


def _slack(settings: AlertSettings, url_file: Path) -> dict[str, object]:
    runbook, dashboard = "{{ .CommonAnnotations.runbook_url }}", "{{ .CommonAnnotations.dashboard_url }}"
    if settings.runbook_base_url.startswith("http"):
        runbook = f"<{runbook}|{{{{ .CommonLabels.alertname }}}}>"
    slack: dict[str, object] = {
        "api_url_file": str(url_file),
        "send_resolved": True,
        "color": COLOR,
        "title": TITLE,
        "fallback": TITLE,
        "text": f"{FACTS}Runbook: {runbook}",
    }
    if settings.dashboard_base_url.startswith("http"):
        slack["title_link"] = dashboard
    return slack


def _pagerduty(settings: AlertSettings, key_file: Path) -> dict[str, object]:
    pagerduty: dict[str, Any] = {
        "routing_key_file": str(key_file),
        "send_resolved": True,
        "severity": "{{ .CommonLabels.severity }}",
        "description": f"{{{{ .CommonLabels.alertname }}}}: {FIRST}{MORE}",
        "details": {
            "firing": EACH % "Firing",
            "resolved": EACH % "Resolved",
            "runbook": "{{ .CommonAnnotations.runbook_url }}",
            "dashboard": "{{ .CommonAnnotations.dashboard_url }}",
        },
    }
    if settings.pagerduty_url is not None:
        pagerduty["url"] = settings.pagerduty_url
    return pagerduty


def _watchdog(settings: AlertSettings) -> dict[str, object]:
    if settings.watchdog_url is not None:
        return {"send_resolved": False, "url": settings.watchdog_url}
    return {"send_resolved": False, "url_file": str(settings.watchdog_url_file)}
