"""Tier of each rule: a host's joins within the host, a run's reads the ledger, and the fleet's reads records."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import promql_parser as promql
import pytest

from alerts import TIERS, AlertSettings, alerts, records, rules
from alerts.recording import Record
from alerts.tiers import stays_on_one_host, tiers
from flopwatch.catalogue import BY_NAME
from tests.support.promql_labels import labels_of
from tests.support.promql_parts import parts

SETTINGS = AlertSettings()
RULES: dict[str, list[dict[str, Any]]] = {
    tier: [rule for group in rules(SETTINGS, tier)["groups"] for rule in group["rules"]]  # type: ignore[attr-defined]
    for tier in TIERS
}
RECORDED = {tier: {rule["record"] for rule in of if "record" in rule} for tier, of in RULES.items()}
ONE_HOST = {"instance", "host"}
LEDGER = {name for name in BY_NAME if name.startswith("run_")} | {"flopwatch_ledger_requests_total", "up"}


def read(rule: dict[str, Any]) -> set[str]:
    """Return the names of the series that a rule reads, without the alerts."""
    selectors = (part for part in parts(promql.parse(rule["expr"])) if isinstance(part, promql.VectorSelector))
    found = {part.name or "" for part in selectors}
    return found - {"ALERTS", "ALERTS_FOR_STATE"}


def test_every_rule_is_in_one_file() -> None:
    names = [*(record.name for record in records(SETTINGS)), *(alert.name for alert in alerts(SETTINGS))]
    assert sorted(names) == sorted(rule.get("record") or rule["alert"] for of in RULES.values() for rule in of)
    assert all(RULES.values())


def test_a_rule_of_a_host_never_joins_two_instances() -> None:
    for rule in RULES["host"]:
        expr = promql.parse(rule["expr"])
        assert labels_of(expr) & ONE_HOST, rule
        for part in parts(expr):
            if isinstance(part, promql.AggregateExpr):
                assert part.modifier is not None, rule
                assert ONE_HOST & set(part.modifier.labels), rule
            elif isinstance(part, promql.BinaryExpr):
                left, right = labels_of(part.lhs), labels_of(part.rhs)
                if left and right:  # not a number
                    matching = part.modifier.matching if part.modifier is not None else None
                    on = set(matching.labels) if matching is not None else left & right
                    assert ONE_HOST & on, (rule, part)


def test_a_rule_of_a_host_reads_only_exporters() -> None:
    own = {name for name in BY_NAME if not name.startswith("run_")} | {
        "up",
        "prometheus_rule_evaluation_failures_total",
    }
    for rule in RULES["host"]:
        assert read(rule) <= own | RECORDED["host"], rule


def test_a_rule_of_a_run_reads_only_the_ledger() -> None:
    for rule in RULES["run"]:
        assert read(rule) <= LEDGER | RECORDED["run"], rule


def test_a_rule_of_the_fleet_reads_only_records() -> None:
    for rule in RULES["fleet"]:
        assert read(rule) <= set().union(*RECORDED.values()), rule


def test_rules_of_a_shard_read_no_alert_of_another_tier() -> None:
    names = {tier: {rule["alert"] for rule in of if "alert" in rule} for tier, of in RULES.items()}
    only = {tier: of - set().union(*(names[other] for other in TIERS if other != tier)) for tier, of in names.items()}
    for tier in ("host", "run"):
        for rule in RULES[tier]:
            for pattern in re.findall(r'ALERTS(?:_FOR_STATE)?\{[^}]*alertname=~?"([^"]*)"', rule["expr"]):
                matched = {name for of in names.values() for name in of if re.fullmatch(pattern, name)}
                assert matched <= only[tier] | {rule.get("alert")}, (rule, matched)


def made(expr: str, *others: Record) -> Any:
    """Return the tier of a record with this expression."""
    rule = Record("training", "run:training_example:sum", expr, "An example.")
    return list(tiers((*others, rule)))[-1]


def test_a_tier_follows_from_what_a_rule_reads() -> None:
    host = Record(
        "training", "instance:training_tokens:sum", "sum by (instance, run) (training_tokens_total)", "Tokens."
    )
    moved = replace(host, expr="max by (run) (run_tokens_total)")
    assert made("max by (instance) (gpu_temperature_celsius)") == "host"
    assert made("max by (run) (run_tokens_total)") == "run"
    assert made("sum by (run) (instance:training_tokens:sum)", host) == "fleet"
    assert made("sum by (instance) (instance:training_tokens:sum)", host) == "host"
    assert made("sum by (run) (instance:training_tokens:sum)", moved) == "run"
    assert made("vector(1)") == "fleet"


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        ("sum by (run) (training_tokens_total)", "fits no tier: it reads exporter. Read the ledger only"),
        ("sum(gpu_energy_joules_total)", "it reads exporter"),
        ("gpu_energy_joules_total * on (uuid) group_left () training_rank_info", "it reads exporter"),
        ("training_tokens_total and on (run) run_gpus", "it reads exporter and ledger"),
    ],
)
def test_a_rule_that_fits_no_tier_is_refused(expr: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^run:training_example:sum .*{reason}"):
        made(expr)


def test_labels_in_texts_and_matchers_are_no_joins() -> None:
    assert stays_on_one_host('up{job="by (run)"} == 0 and on (instance) max by (instance) (gpu_present)')
    assert not stays_on_one_host("up == 0 and ignoring (instance) gpu_present")
    assert not stays_on_one_host("max without (instance) (gpu_present)")
