"""Rule files with what one rule test needs, and no more: promtool evaluates every rule it is given at every step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from alerts import Alert, AlertSettings, alerts, records

SETTINGS = AlertSettings()
ALERTS = alerts(SETTINGS)
RECORDS = {record.name: record for record in records(SETTINGS)}


def under(expressions: Iterable[str]) -> tuple[list[dict[str, object]], list[Alert]]:
    """Return the records and the alerts that expressions build on, and those these build on, in their order."""
    recorded: set[str] = set()
    alerted: set[str] = set()
    pending = list(expressions)
    while pending:
        expr = pending.pop()
        for name in RECORDS.keys() - recorded:
            if re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", expr):
                recorded.add(name)
                pending.append(RECORDS[name].expr)
        for remembered in re.findall(r'\bALERTS\{[^}]*alertname=~?"([^"]*)"', expr):
            for alert in ALERTS:
                if alert.name not in alerted and re.fullmatch(remembered, alert.name):
                    alerted.add(alert.name)
                    pending += [one.expr for one in ALERTS if one.name == alert.name]
    return ([record.rule() for name, record in RECORDS.items() if name in recorded],
            [alert for alert in ALERTS if alert.name in alerted])


def rules_of(name: str, test: dict[str, Any]) -> str:
    """Return the shipped rules that a rule test called `name` is about: its alert, what it asks for, what is below."""
    asked = [case["expr"] for group in test["tests"] for case in group.get("promql_expr_test", ())]
    records_below, below = under([*asked, *(
        text for alert in ALERTS if alert.name == name for text in (alert.expr, alert.description))])
    kept = {name} | {alert.name for alert in below}
    rules = records_below + [alert.rule(SETTINGS) for alert in ALERTS if alert.name in kept]
    return json.dumps({"groups": [{"name": "one", "rules": rules}]})
