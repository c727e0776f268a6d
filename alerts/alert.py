"""Class of alerts, with the rule, the labels and the annotations of an alert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from alerts.fragments import FRAGMENTS
from alerts.settings import AlertSettings
from alerts.template import fill

RANGE = "from=now-6h&to=now"
# By label: the dashboard that shows it, and its variable. A message about several GPUs or ports has one link.
BOARDS = {"run": ("run", "run"), "device": ("fabric", "host"), "leaf": ("fabric", "host"), "host": ("node", "host")}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `at` replaces its placeholders by durations, settings and fragments (alerts/template.py).

    `identity` has the labels of the expression's series. Together with name and severity, they identify an alert.
    `summary` is a static sentence. `description` names run, rank, host, GPU or port and the value. `expr` is PromQL,
    and the texts are Prometheus templates.
    """

    name: str
    group: str
    severity: Literal["critical", "warning", "info", "none"]
    identity: tuple[str, ...]
    expr: str
    for_: str
    summary: str
    description: str
    keep_firing_for: str = ""
    shadow: bool = False  # evaluated and recorded, but sent to no receiver

    def at(self, settings: AlertSettings) -> Alert:
        """Return the alert as Prometheus reads it, with all placeholders filled in."""
        return replace(
            self,
            expr=fill(self.expr, settings, FRAGMENTS),
            for_=fill(f"<{self.for_}>", settings, FRAGMENTS),
            description=fill(self.description, settings, FRAGMENTS),
            keep_firing_for=fill(f"<{self.keep_firing_for}>", settings, FRAGMENTS) if self.keep_firing_for else "",
            shadow=self.name in settings.shadow,
        )

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that the rule adds to those of the expression."""
        return {"severity": self.severity, **({"shadow": "true"} if self.shadow else {})}

    def annotations(self, settings: AlertSettings) -> dict[str, str]:
        """Return the annotations: summary, description and the links to runbook and dashboard."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{settings.runbook_base_url}/{self.name}.md",
            "dashboard_url": f"{settings.dashboard_base_url}{self._dashboard()}",
        }

    def _dashboard(self) -> str:
        board, label = next((BOARDS[label] for label in BOARDS if label in self.identity), ("fleet", ""))
        if self.name.startswith("Flopwatch"):
            board, label = "monitor", ""
        chosen = f"var-{label}={{{{ $labels.{label} | urlquery }}}}&" if label in self.identity else ""
        return f"/d/flopwatch-{board}?{chosen}{RANGE}"

    def rule(self, settings: AlertSettings) -> dict[str, object]:
        """Return the rule as an entry of a rule file."""
        keep = {"keep_firing_for": self.keep_firing_for} if self.keep_firing_for else {}
        # Alertmanager routes by the label `team` if the settings have teams.
        routed = "run" in self.identity and self.severity in ("critical", "warning")
        team = {"team": _team(settings)} if settings.teams and routed else {}
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.for_,
            **keep,
            "labels": {**self.labels, **team},
            "annotations": self.annotations(settings),
        }


def _team(settings: AlertSettings) -> str:
    # Never empty: ALERTS would then have the template itself as a label.
    query = 'max by (team) (last_over_time(training_run_info{run=%q,team!=""}[<1d>]))'
    team = "{{ with printf `" + query + "` $labels.run | query }}{{ . | first | label `team` }}{{ else }}none{{ end }}"
    return fill(team, settings, FRAGMENTS)
