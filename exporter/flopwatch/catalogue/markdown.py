"""Documentation printed from the catalogue; `docs/metrics.md` is this text, and a test compares them."""

from __future__ import annotations

from itertools import groupby

from flopwatch.catalogue import Metric, all_metrics

TITLES = {
    "gpu": "GPU",
    "nvlink": "NVLink and NVSwitch",
    "infiniband": "InfiniBand, RoCE and EFA",
    "node": "The node",
    "training": "Training processes",
    "run": "Run accounting",
    "flopwatch": "The exporter itself",
}

_INTRODUCTION = """\
<!-- Printed from exporter/flopwatch/catalogue/ by `flopwatch metrics > docs/metrics.md`; do not edit. -->

# Metrics

What each series says, what tells its members apart, and where the number is born. Counters are raw from their source:
take `rate()` or `increase()` in Prometheus. A series that is absent is not zero: the source does not have it, and
`flopwatch_collector_supported` or `flopwatch_collector_success` says why.
"""


def metrics_markdown(*, key_only: bool = False) -> str:
    """Return all rows as Markdown, a table per domain; or one short table of the `key` rows."""
    if key_only:
        short = (f"| `{row}` | {_labels(row)} | {_cell(row.help)} |\n" for row in all_metrics() if row.key)
        return "| series | labels | meaning |\n|---|---|---|\n" + "".join(short)
    parts = [_INTRODUCTION]
    for domain, rows in groupby(all_metrics(), key=lambda row: row.domain):
        parts.append(f"\n## {TITLES[domain]}\n\n{_table(list(rows))}")
    return "".join(parts)


def _table(rows: list[Metric]) -> str:
    lines = ["| series | type | labels | meaning | source |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row}`", row.type, _labels(row), _cell(row.help), _cell(row.source))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _labels(row: Metric) -> str:
    return ", ".join(f"`{label}`" for label in row.labels)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
