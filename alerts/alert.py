"""What an alert is, and what their expressions and texts are made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alerts.settings import AlertSettings
from flopwatch import catalogue as m

RUN_LINK = "?var-run={{ $labels.run | urlquery }}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `identity` are the labels its expression gives; with the name and severity they are the alert.

    `summary` is a static sentence; `description` names run, rank, host, GPU or port and the value. Texts are Prometheus
    templates. `link` is the dashboard's query string.
    """

    group: str
    name: str
    severity: Literal["critical", "warning", "info"]
    identity: tuple[str, ...]
    expr: str
    for_: str
    summary: str
    description: str
    keep_firing_for: str = ""
    link: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels the rule adds."""
        return {"severity": self.severity}

    def annotations(self, settings: AlertSettings) -> dict[str, str]:
        """Return summary, description and the two links."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{settings.runbook_base_url}/{self.name}.md",
            "dashboard_url": f"{settings.dashboard_base_url}/d/flopwatch-run{self.link}",
        }

    def rule(self, settings: AlertSettings) -> dict[str, object]:
        """Return the rule as Prometheus reads it."""
        keep = {"keep_firing_for": self.keep_firing_for} if self.keep_firing_for else {}
        return {"alert": self.name, "expr": self.expr, "for": self.for_, **keep, "labels": self.labels,
                "annotations": self.annotations(settings)}


def each(query: str, arguments: str, text: str) -> str:
    """Return a template that prints `text` for each series `query` gives; its %q are filled with `arguments`."""
    return f"\n{{{{- range printf `{query}` {arguments} | query }}}}{text}{{{{ end }}}}"


def on_host(expr: str, key: str, info: m.Metric, window: str) -> str:
    """Return `expr` with the host its GPU or port had within `window`: a hung driver or a restarted exporter, which
    often follow the fault, must not make another alert of it. One exporter serves both sides, hence `instance`.
    """
    host = f"max by (instance, {key}, host) (last_over_time({info}[{window}]))"
    # topk, because a node that was renamed has two; two of them would break the join for the whole cluster.
    return f"({expr})\n* on (instance, {key}) group_left (host)\ntopk by (instance, {key}) (1, {host})"


def owner(settings: AlertSettings) -> str:
    """Return a template that names the owner and the team of the run `$labels.run`, where they are known."""
    memory = settings.at_pace(settings.memory)
    info = f'max by (owner, team) (last_over_time({m.TRAINING_RUN_INFO}{{run=%q,owner!=""}}[{memory}]))'
    return each(info, "$labels.run", " Owner: {{ .Labels.owner }}{{ with .Labels.team }} ({{ . }}){{ end }}.")
