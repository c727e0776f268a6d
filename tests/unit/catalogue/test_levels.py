"""Every series that a rule, board, report or check reads is in core, and no family left out of core is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest

from alerts import AlertSettings, alerts, rules
from alerts.tiers import OF_LEDGER
from dashboards import queries
from dashboards.__main__ import BOARDS
from docs.levels import core, selectors
from flopwatch import catalogue as m
from flopwatch.node.health.rules import RISES, RULES
from flopwatch.node.scrape.levels import CORE
from tests.support import ROOT
from tests.support.promql_labels import EXTERNAL, RECORDS
from tests.support.promql_parts import parts

SERVED: dict[str, dict[str, str]] = json.loads(CORE.read_text())
LEFT_OUT = [row.name for row in m.all_metrics() if row.name not in SERVED]
VARIABLES = {
    name: "1h" if name in ("__rate_interval", "__range", "__interval") else "1"
    for board in BOARDS.values()
    for name in re.findall(r"\$\{?([A-Za-z_]\w*)", json.dumps(board))
}


def read(expr: str) -> Iterator[tuple[m.Metric, dict[str, str | None]]]:
    """Yield the row of each selector and, by label, the value that it asks for with `=`, None for other matchers."""
    for part in parts(promql.parse(expr)):
        if isinstance(part, promql.VectorSelector):
            name = part.name or ""
            row = m.BY_NAME.get(name) or m.BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", name))
            if row is not None:
                matchers = part.matchers.matchers
                yield row, {one.name: one.value if one.op == promql.MatchOp.Equal else None for one in matchers}
            elif name not in RECORDS.keys() | EXTERNAL.keys():
                assert name in ("", "up", "ALERTS", "ALERTS_FOR_STATE", "prometheus_rule_evaluation_failures_total")


def expressions() -> Iterator[str]:
    groups: Any = rules(AlertSettings())["groups"]
    yield from (rule["expr"] for group in groups for rule in group["rules"])
    for board in BOARDS.values():
        yield from (expr for _, expr in queries(board, VARIABLES))
    for alert in alerts(AlertSettings()):
        for query in re.findall(r"`([^`]*)`", alert.description):
            yield re.sub(r"%(?:\[\d\])?q", '"x"', query).replace("%f", "1")


def test_every_selector_of_rules_boards_and_texts_is_in_core() -> None:
    found = [one for expr in expressions() for one in read(expr)]
    assert len(found) > 500
    for row, asked in found:
        assert row.name in SERVED, row
        for label, pattern in SERVED[row.name].items():
            assert label in asked, (row, label)
            assert asked[label] is None or re.fullmatch(pattern, asked[label] or ""), (row, asked)


def test_every_family_in_core_is_read() -> None:
    in_queries = {row.name for expr in expressions() for row, _ in read(expr)}
    checked = {row.name for rule in RULES for row in rule.rows} | {rise.row.name for rise in RISES}
    report = "".join(path.read_text() for path in (ROOT / "exporter" / "flopwatch" / "report").glob("*.py"))
    reported = {row.name for name, row in vars(m).items() if isinstance(row, m.Metric) and f"m.{name}" in report}
    key = {row.name for row in m.all_metrics() if row.key}
    assert SERVED.keys() - in_queries - checked - reported - key - OF_LEDGER == set()


def test_every_row_of_the_health_rules_is_in_core_with_all_its_labels() -> None:
    for row in {row for rule in RULES for row in rule.rows} | {rise.row for rise in RISES}:
        assert SERVED[row.name] == {}
        assert not row.sparse  # `flopwatch check` would not see that it rises


def test_every_row_of_the_report_is_in_core() -> None:
    for path in (ROOT / "exporter" / "flopwatch" / "report").glob("*.py"):
        for constant in re.findall(r"\bm\.([A-Z][A-Z_0-9]+)", path.read_text()):
            row = getattr(m, constant)
            assert not isinstance(row, m.Metric) or row.name in SERVED


@pytest.mark.parametrize("folder", ["helm/files/rules", "helm/files/dashboards", "viewer/src"])
def test_no_family_that_is_left_out_is_named_in_what_is_shipped(folder: str) -> None:
    text = "".join(path.read_text() for path in (ROOT / folder).rglob("*") if path.is_file())
    assert set(re.findall(r"[a-z_0-9:]+", text)) & {*LEFT_OUT} == set()


def test_a_runbook_marks_each_line_with_a_family_that_is_left_out() -> None:
    marked = 0
    for path in (ROOT / "alerts" / "runbooks").glob("*.md"):
        for line in path.read_text().splitlines():
            if {*re.findall(r"\b[a-z_0-9]+\b", line)} & {*LEFT_OUT}:
                marked += 1
                assert "with --series full" in line.replace("`", ""), (path.name, line)
    assert marked > 10


def test_every_key_series_of_the_readme_is_in_core() -> None:
    assert all(row.name in SERVED for row in m.all_metrics() if row.key)


def test_the_ledger_has_no_levels() -> None:
    assert SERVED.keys() >= OF_LEDGER


def test_core_leaves_out_more_than_a_quarter_of_the_families() -> None:
    assert len(LEFT_OUT) > len(m.BY_NAME) / 4
    assert "gpu_pipe_active_seconds_total" in LEFT_OUT


def test_a_label_is_restricted_only_where_every_selector_asks_for_some_values() -> None:
    assert core()["gpu_temperature_limit_margin_celsius"] == {"limit": "slowdown"}
    assert core()["gpu_ecc_errors_total"] == {}
    assert core()["gpu_pcie_errors_total"] == {"error": "fatal|non_fatal"}


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ('gpu_pcie_errors_total{error="fatal"}', {"error": "fatal"}),
        ('gpu_pcie_errors_total{error=~"fatal|non_fatal",uuid="$uuid"}[5m]', {"error": "fatal|non_fatal"}),
        ('gpu_pcie_errors_total{error!="fatal"}', {}),
        ('gpu_pcie_errors_total{uuid=%q,error=~"$error"}', {}),
        ("rate(gpu_pcie_errors_total[5m])", {}),
        ("gpu_pcie_errors_total", {}),
    ],
)
def test_the_values_that_a_selector_asks_for_are_read(text: str, asked: dict[str, str]) -> None:
    assert list(selectors(text)) == [(m.GPU_PCIE_ERRORS_TOTAL, asked)]


def test_the_name_of_a_record_is_no_family() -> None:
    assert list(selectors("run:training_step_duration_seconds:mean5m")) == []
