"""Alertmanager's configuration: Slack, PagerDuty, and a webhook that only the watchdog reaches.

Critical goes to PagerDuty and Slack, warning to Slack, info to nobody. One message per alert and run, or per alert and
node. Secrets are read from files; `api_url_file` and `routing_key_file` need Alertmanager 0.25, a webhook's `url_file`
0.26. https://prometheus.io/docs/alerting/latest/configuration/
"""

from __future__ import annotations

from alerts.settings import AlertSettings

# Slack reads <, > and & as markup: <!channel> in a label would ring for everybody.
ESCAPE = ' | reReplaceAll "&" "&amp;" | reReplaceAll "<" "&lt;" | reReplaceAll ">" "&gt;"'
TITLE = f"[{{{{ .Status | toUpper }}}}] {{{{ .CommonLabels.alertname }}}}: {{{{ .CommonAnnotations.summary{ESCAPE} }}}}"
FACTS = (
    f"{{{{ range .Alerts.Firing }}}}{{{{ .Annotations.description{ESCAPE} }}}}\n{{{{ end }}}}"
    f"{{{{ range .Alerts.Resolved }}}}Over: {{{{ .Annotations.description{ESCAPE} }}}}\n{{{{ end }}}}"
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


def alertmanager(settings: AlertSettings) -> dict[str, object]:
    """Return the configuration as Alertmanager reads it."""
    runbook = "{{ .CommonAnnotations.runbook_url }}"
    dashboard = "{{ .CommonAnnotations.dashboard_url }}"
    if settings.runbook_base_url.startswith("http"):
        runbook = f"<{runbook}|{{{{ .CommonLabels.alertname }}}}>"
    slack = {
        "api_url_file": str(settings.slack_url_file), "send_resolved": True, "color": COLOR,
        "title": TITLE, "fallback": TITLE, "text": f"{FACTS}Runbook: {runbook}",
    }
    if settings.dashboard_base_url.startswith("http"):
        slack["title_link"] = dashboard
    pagerduty = {
        "routing_key_file": str(settings.pagerduty_key_file), "send_resolved": True,
        "severity": "{{ .CommonLabels.severity }}",
        "description": f"{{{{ .CommonLabels.alertname }}}}: {FIRST}{MORE}",
        "details": {"firing": EACH % "Firing", "resolved": EACH % "Resolved",
                    "runbook": "{{ .CommonAnnotations.runbook_url }}", "dashboard": dashboard},
    }
    if settings.pagerduty_url is not None:
        pagerduty["url"] = settings.pagerduty_url
    watchdog: dict[str, object] = {"send_resolved": False}
    if settings.watchdog_url is not None:
        watchdog["url"] = settings.watchdog_url
    else:
        watchdog["url_file"] = str(settings.watchdog_url_file)
    often = settings.at_pace(settings.watchdog_interval)
    return {
        "route": {
            "receiver": "slack",
            # Alerts on runs carry tenant and run, alerts on hardware the host; a missing label groups as empty.
            "group_by": ["alertname", "tenant", "run", "host"],
            "group_wait": settings.at_pace(settings.group_wait),
            "group_interval": settings.at_pace(settings.group_interval),
            "repeat_interval": settings.at_pace(settings.repeat_interval),
            "routes": [
                {"receiver": "watchdog", "matchers": ['alertname = "FlopwatchWatchdog"'],
                 "group_wait": "0s", "group_interval": often, "repeat_interval": often},
                {"receiver": "nobody", "matchers": ['severity =~ "info|none"']},
                {"receiver": "pagerduty", "matchers": ['severity = "critical"'], "continue": True},
                {"receiver": "slack"},
            ],
        },
        "inhibit_rules": [{
            "source_matchers": ['severity = "critical"'], "target_matchers": ['severity = "warning"'],
            "equal": ["alertname", "tenant", "run", "host"],
        }],
        "receivers": [
            {"name": "slack", "slack_configs": [slack]},
            {"name": "pagerduty", "pagerduty_configs": [pagerduty]},
            {"name": "watchdog", "webhook_configs": [watchdog]},
            {"name": "nobody"},
        ],
    }
