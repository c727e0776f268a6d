"""What an alert is, and what their expressions and texts are made with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from alerts.settings import AlertSettings
from flopwatch import catalogue as m

RANGE = "from=now-6h&to=now"
# The dashboard for what an alert is of, and the variable it has for it. One message may tell of several cards or ports,
# and has one link.
BOARDS = {"run": ("run", "run"), "device": ("fabric", "host"), "leaf": ("fabric", "host"), "host": ("node", "host")}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `identity` are the labels its expression gives; with the name and severity they are the alert.

    `summary` is a static sentence; `description` names run, rank, host, GPU or port and the value. Texts are Prometheus
    templates.
    """

    group: str
    name: str
    severity: Literal["critical", "warning", "info", "none"]
    identity: tuple[str, ...]
    expr: str
    for_: str
    summary: str
    description: str
    keep_firing_for: str = ""
    shadow: bool = False  # recorded, and told to nobody

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels the rule adds."""
        return {"severity": self.severity, **({"shadow": "true"} if self.shadow else {})}

    def annotations(self, settings: AlertSettings) -> dict[str, str]:
        """Return summary, description and the two links."""
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
        """Return the rule as Prometheus reads it."""
        keep = {"keep_firing_for": self.keep_firing_for} if self.keep_firing_for else {}
        # Alertmanager routes by it, where there are teams to route to.
        told = "run" in self.identity and self.severity in ("critical", "warning")
        team = {"team": _team(settings)} if settings.teams and told else {}
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.for_,
            **keep,
            "labels": {**self.labels, **team},
            "annotations": self.annotations(settings),
        }


def each(query: str, arguments: str, text: str, by: str = "") -> str:
    """Return a template that prints `text` for each series `query` gives; its %q are filled with `arguments`.

    An aggregation has no order: its series are printed by the first label that it keeps, others by the label `by`.
    """
    aggregation = re.match(r"(?:max|min|sum|count|group) by \((\w+)", query)
    order = by or (aggregation.group(1) if aggregation else "")
    in_order = f' | sortByLabel "{order}"' if order else ""
    return f"\n{{{{- range printf `{query}` {arguments} | query{in_order} }}}}{text}{{{{ end }}}}"


def lasts_with(name: str, identity: tuple[str, ...], consequences: str, on: str, state: str = "") -> str:
    """Return what makes a cause go on as long as a page that it holds back would: else that is sent when it ends.

    `state` are further matchers of the cause, where there are a warning and a page of that name.
    """
    return f"""group by ({", ".join(identity)}) (
  ALERTS{{alertname="{name}"{state}}}
    and on ({on})
  ALERTS{{alertname=~"{consequences}",severity="critical",shadow=""}}
)"""


PAGED = ',alertstate="firing",severity="critical"'


def _team(settings: AlertSettings) -> str:
    memory = settings.at_pace(settings.memory)
    info = f'max by (team) (last_over_time({m.TRAINING_RUN_INFO}{{run=%q,team!=""}}[{memory}]))'
    # Never empty: ALERTS would then have the template itself as a label.
    return (
        f"{{{{ with printf `{info}` $labels.run | query }}}}{{{{ . | first | label `team` }}}}"
        "{{ else }}none{{ end }}"
    )


def owner(settings: AlertSettings) -> str:
    """Return a template that names the owner and the team of the run `$labels.run`, where they are known."""
    memory = settings.at_pace(settings.memory)
    info = f'max by (owner, team) (last_over_time({m.TRAINING_RUN_INFO}{{run=%q,owner!=""}}[{memory}]))'
    return each(info, "$labels.run", " Owner: {{ .Labels.owner }}{{ with .Labels.team }} ({{ . }}){{ end }}.")
