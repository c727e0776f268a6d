"""Class of recording rules, and the evaluation interval of each group of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alerts.settings import AlertSettings
from alerts.template import fill

# Scrape intervals between two evaluations of a group. Groups that are not listed are evaluated at each scrape. A rule
# with a window of a week needs no four evaluations a minute. No interval may exceed Prometheus' lookback of 5 min.
EVERY: Mapping[str, int] = {
    "place": 4,
    "windows": 4,
    "rails": 4,
    "fleet": 8,
    "quality": 4,
    "gpu": 4,
    "nvlink": 4,
    "fabric": 4,
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
        return replace(self, expr=fill(self.expr, settings, {}))

    def rule(self) -> dict[str, object]:
        """Return the rule as an entry of a rule file."""
        return {"record": self.name, "expr": self.expr}
