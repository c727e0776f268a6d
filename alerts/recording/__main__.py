"""`python -m alerts.recording`: print docs/records.md."""

from __future__ import annotations

from alerts.recording import EVERY, records
from alerts.settings import AlertSettings

TITLES = {
    "place": "Where things are, and what is in use",
    "training": "Training",
    "verdict": "Who keeps a run waiting",
    "detail": "Training in detail, and energy",
    "ledger": "The ledger: whole runs",
    "windows": "The last hour, day and seven days",
    "rails": "Rails",
    "fleet": "The fleet, and hosts that fail again",
}
HEAD = """\
# Recorded series

<!-- Printed by `python -m alerts.recording` from alerts/recording/*.py. Do not edit. -->

What the recording rules of [rules.yaml](../helm/files/rules.yaml) make of the series in [metrics.md](metrics.md), for
dashboards, alerts and your own queries. The first word of a name says what a series is of: `rank`, `run`, `host`,
`rail`, `port`, `instance` (an exporter); of `fleet` there is one. The last says over how long. No series means that it
cannot be told; 0 is a 0. The expressions are in `alerts/recording/`, their tests with worked numbers in
`tests/rules/recording*.yaml`.
"""


def text(settings: AlertSettings) -> str:
    """Return the page: a table per group, in the order of TITLES."""
    every = records(settings)
    parts = [HEAD]
    for group, title in TITLES.items():
        interval = settings.at_pace(EVERY.get(group, 1) * settings.scrape_interval)
        rows = [f"| `{record.name}` | {record.help} |" for record in every if record.group == group]
        head = f"\n## {title}\n\nEvery {interval}.\n"
        parts.append("\n".join((head, "| series | meaning |", "|---|---|", *rows, "")))
    return "".join(parts)


if __name__ == "__main__":
    print(text(AlertSettings()), end="")
