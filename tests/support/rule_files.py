"""Rule files with only the rules that one rule test needs: promtool evaluates every rule at every step."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from alerts import Alert, AlertSettings, alerts, records
from simulator.promtool import rule_test

SETTINGS = AlertSettings()
ALERTS = alerts(SETTINGS)
RECORDS = {record.name: record for record in records(SETTINGS)}
parsed = cache(promql.parse)


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
    return (
        [record.rule() for name, record in RECORDS.items() if name in recorded],
        [alert for alert in ALERTS if alert.name in alerted],
    )


def matches(matcher: promql.Matcher, value: str) -> bool:
    """Return whether a matcher takes a label of this value."""
    equal = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
    found = matcher.value == value if equal else re.fullmatch(matcher.value, value) is not None
    return found == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def possible(expr: Any, there: set[str], alerting: set[str]) -> bool:
    """Return whether an expression can have a result where there are no series and alerts but those of these names."""
    match expr:
        case promql.VectorSelector(name="ALERTS" | "ALERTS_FOR_STATE"):
            return any(
                all(matches(matcher, name) for matcher in expr.matchers.matchers if matcher.name == "alertname")
                for name in alerting
            )
        case promql.VectorSelector():
            return expr.name in there
        case promql.MatrixSelector():
            return possible(expr.vector_selector, there, alerting)
        case promql.BinaryExpr():
            left, right = possible(expr.lhs, there, alerting), possible(expr.rhs, there, alerting)
            return left or right if str(expr.op) == "or" else left and (right or str(expr.op) == "unless")
        case promql.Call():
            return expr.func.name in ("absent", "absent_over_time", "scalar", "vector") or all(
                possible(argument, there, alerting) for argument in expr.args
            )
        case promql.NumberLiteral() | promql.StringLiteral():
            return True
    return possible(expr.expr, there, alerting)


def alive(rules: list[dict[str, Any]], group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules that can have a result in one group of a rule test, over the series that it makes up."""
    series = [one["series"] for one in group["input_series"]]
    there = {one.partition("{")[0] for one in series}
    alerting = {name for one in series for name in re.findall(r'^ALERTS.*alertname="([^"]*)"', one)}
    found: list[dict[str, Any]] = []
    before = -1
    while before < len(found):
        before = len(found)
        found = [rule for rule in rules if possible(parsed(rule["expr"]), there, alerting)]
        there |= {rule["record"] for rule in found if "record" in rule}
        alerting |= {rule["alert"] for rule in found if "alert" in rule}
    return found


def rules_of(name: str, test: dict[str, Any], group: dict[str, Any] | None = None) -> str:
    """Return the shipped rules that a rule test called `name` is about: its alert, what it asks for, what is below.

    Of one of its groups, if it is given, only those that can have a result there.
    """
    asked = [case["expr"] for group in test["tests"] for case in group.get("promql_expr_test", ())]
    records_below, below = under(
        [*asked, *(text for alert in ALERTS if alert.name == name for text in (alert.expr, alert.description))]
    )
    kept = {name} | {alert.name for alert in below}
    rules = records_below + [alert.rule(SETTINGS) for alert in ALERTS if alert.name in kept]
    return json.dumps({"groups": [{"name": "one", "rules": rules if group is None else alive(rules, group)}]})


def seconds(text: str) -> float:
    sizes = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}
    return sum(float(number) * sizes[unit] for number, unit in re.findall(r"([\d.]+)(ms|[smhd]|)", text))


def judged(promtool: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool on a rule test, in a folder for its files; each group of it sees the rules that it needs."""
    test = yaml.safe_load(path.read_text())
    assert test["rule_files"] == ["../../helm/files/rules/*.yaml"]  # promtool can be asked by hand, too
    files = []
    for number, group in enumerate(test["tests"]):
        (folder / f"rules-{number}.yaml").write_text(rules_of(path.stem, test, group))
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(json.dumps({**test, "rule_files": [f"rules-{number}.yaml"], "tests": [group]}))
    return rule_test(promtool, *files, timeout=240)
