"""Class of recording rules, and the evaluation interval of each group of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alerts.fragments import FRAGMENTS
from alerts.settings import AlertSettings
from alerts.template import fill

# Scrape intervals between two evaluations of a group. Groups that are not listed are evaluated at each scrape. A rule
# with a window of a week needs no four evaluations a minute. No interval may exceed Prometheus' lookback of 5 min.
EVERY: Mapping[str, float] = {
    "verdicts": 1 / 5,  # as often as the ledger is scraped
    "causes": 1 / 3,  # of the verdicts
    "place": 4,
    "windows": 4,
    "detail": 4,
    "quality": 4,
    "gpu": 4,
    "nvlink": 4,
    "fabric": 4,
    "fleet": 8,
    "rails": 8,
    "waits": 8,
    "energy": 8,
    "exporters": 8,
    "means": 8,
    # Warnings of parts, which no alert that pages waits for.
    "ports": 8,
    "slow": 8,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One recording rule, with placeholders (alerts/template.py) until `at` fills them in.

    `str()` returns the name of the series that the rule records.
    """

    group: str
    name: str
    expr: str
    help: str

    def __str__(self) -> str:
        return self.name

    def at(self, settings: AlertSettings) -> Record:
        """Return the rule as Prometheus reads it, with all placeholders filled in."""
        return replace(self, expr=fill(self.expr, settings, FRAGMENTS))

    def rule(self) -> dict[str, object]:
        """Return the rule as an entry of a rule file."""
        return {"record": self.name, "expr": self.expr}
