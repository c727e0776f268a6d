"""Level of each family, which follows from its readers: `core` or `full` (docs/metrics.md).

Readers are the rules with the queries in their texts, the boards, `flopwatch report` and `flopwatch check`. A family
that one of them reads is in core, and so are the key series of README and every family of the ledger, which has no
levels. If all readers match a label with `=` or `=~`, only the values that they match are in core.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from alerts import AlertSettings, alerts, records
from alerts.tiers import OF_LEDGER
from dashboards.__main__ import BOARDS
from flopwatch import catalogue as m
from flopwatch import report
from flopwatch.catalogue import Metric
from flopwatch.node.health.verdict import KNOWN_ROWS

IDENTITY = {*m.GPU, *m.PORT, *m.RANK, *m.RUN, "host"}  # labels whose values differ from host to host
_SELECTOR = re.compile(r"\b([a-z_0-9:]+)\b(?:\{([^{}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def strings(value: object) -> Iterator[str]:
    """Yield every text in the content of a JSON file, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def texts() -> Iterator[str]:
    """Yield the texts of rules and boards that contain queries."""
    settings = AlertSettings()
    for record in records(settings):
        yield record.expr
    for alert in alerts(settings):
        yield from (alert.expr, alert.description)
    for board in BOARDS.values():
        yield from strings(board)


def selectors(text: str) -> Iterator[tuple[Metric, dict[str, str]]]:
    """Yield the row of each selector in a text with queries, and by label the pattern of values that it asks for."""
    for name, matchers in _SELECTOR.findall(text):
        row = m.BY_NAME.get(name) or m.BY_NAME.get(re.sub(r"_(?:bucket|sum|count)$", "", name))
        if row is not None:
            yield (
                row,
                {
                    label: re.escape(value) if operator == "=" else value
                    for label, operator, value in _MATCHER.findall(matchers)
                    # A value with $ or % is filled in when the query is sent.
                    if label in row.labels and label not in IDENTITY and operator in ("=", "=~")
                    if not re.search("[$%]", value)
                },
            )


def report_rows() -> set[Metric]:
    """Return the rows that the modules of `flopwatch report` use."""
    code = "".join(path.read_text(encoding="utf-8") for path in Path(*report.__path__).glob("*.py"))
    return {row for name, row in vars(m).items() if isinstance(row, Metric) and re.search(rf"\bm\.{name}\b", code)}


@functools.cache
def core() -> dict[str, dict[str, str]]:
    """Return the families of core in the catalogue's order, with patterns by label if only some values are read."""
    read: dict[str, list[dict[str, str]]] = {}
    for text in texts():
        for row, asked in selectors(text):
            read.setdefault(row.name, []).append(asked)
    key = {row.name for row in m.all_metrics() if row.key}
    for name in {*KNOWN_ROWS, *OF_LEDGER, *map(str, report_rows()), *key}:
        read.setdefault(name, []).append({})
    return {
        row.name: {
            label: "|".join(sorted({asked[label] for asked in read[row.name]}))
            for label in row.labels
            if all(label in asked for asked in read[row.name])
        }
        for row in m.all_metrics()
        if row.name in read
    }


def core_json() -> str:
    """Return the content of data/core_series.json."""
    return json.dumps(core(), indent=1) + "\n"
