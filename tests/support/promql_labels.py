"""Labels that the result of a PromQL expression has."""

from __future__ import annotations

from typing import Any

import promql_parser as promql

from alerts import AlertSettings, alerts, records
from flopwatch.catalogue import BY_NAME

RECORDS = {record.name: record.expr for record in records(AlertSettings())}


ALERT_LABELS = {"alertname", "alertstate", "severity", "shadow"}.union(
    *(alert.identity for alert in alerts(AlertSettings()))
)


# Series of other exporters, with those of their labels that are used.
EXTERNAL: dict[str, set[str]] = {
    # https://github.com/prometheus/node_exporter
    "node_uname_info": {"nodename"},
    "node_cpu_seconds_total": {"cpu", "mode"},
    "node_load1": set(),
    "node_pressure_cpu_waiting_seconds_total": set(),
    "node_cpu_core_throttles_total": {"package", "core"},
    "node_cpu_package_throttles_total": {"package"},
    "node_cpu_scaling_frequency_hertz": {"cpu"},
    "node_pressure_io_stalled_seconds_total": set(),
    "node_mountstats_nfs_operations_request_time_seconds_total": {"export", "operation"},
    "node_mountstats_nfs_operations_requests_total": {"export", "operation"},
    "node_mountstats_nfs_operations_major_timeouts_total": {"export", "operation"},
    "node_mountstats_nfs_total_read_bytes_total": {"export"},
    # https://github.com/whamcloud/lustrefs-exporter; `host` is set by relabeling (docs/other-exporters.md)
    "lustre_client_stats": {"host", "target", "operation"},
    # https://github.com/HewlettPackard/lustre_exporter
    "lustre_stats_total": {"host", "component", "target", "operation"},
    "lustre_read_bytes_total": {"host", "component", "target"},
    # https://github.com/weka/export
    "weka_stats": {"cluster", "host_name", "host_role", "node_id", "node_role", "category", "stat", "unit"},
    # https://github.com/GoogleCloudPlatform/gcsfuse
    "fs_ops_latency_sum": {"host", "fs_op"},
    "fs_ops_latency_count": {"host", "fs_op"},
    "gcs_read_bytes_count": {"host"},
}

RECORDED: dict[str, set[str]] = {}  # of records, known or under way


def labels_of(expr: Any) -> set[str]:
    """Return the labels that `expr` can give; fail on a series or label that nothing of ours has."""
    match expr:
        case promql.VectorSelector():
            name = expr.name or ""
            family, _, suffix = name.rpartition("_")
            if name in RECORDS:
                known = labels_of_record(name)
            elif name == "up":  # https://prometheus.io/docs/concepts/jobs_instances/
                known = {"job", "instance"}
            elif name == "prometheus_rule_evaluation_failures_total":  # Prometheus' own
                known = {"rule_group", "instance"}
            elif name in (
                "ALERTS",
                "ALERTS_FOR_STATE",
            ):  # https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/
                known = ALERT_LABELS
            elif name in EXTERNAL:
                known = {*EXTERNAL[name], "instance", "job"}
            elif suffix in ("bucket", "sum", "count") and family in BY_NAME:
                assert BY_NAME[family].type == "histogram"
                known = {*BY_NAME[family].labels, "instance", *(["le"] if suffix == "bucket" else [])}
            else:
                assert name in BY_NAME, f"{name} is neither a catalogue row nor a recording rule"
                known = {*BY_NAME[name].labels, "instance", "job"}
            assert {matcher.name for matcher in expr.matchers.matchers} <= known, f"{name} has labels {sorted(known)}"
            return known
        case promql.MatrixSelector():
            return labels_of(expr.vector_selector)
        case promql.AggregateExpr():
            known = labels_of(expr.expr)
            if str(expr.op) in ("topk", "bottomk"):
                return known
            made: set[str] = {expr.param.val} if expr.param and str(expr.op) == "count_values" else set()
            if expr.modifier is None:
                return made
            assert expr.modifier.type == promql.AggModifierType.By, expr
            assert set(expr.modifier.labels) <= known, f"{expr} groups by what is not in {sorted(known)}"
            return set(expr.modifier.labels) | made
        case promql.BinaryExpr():
            left, right, modifier = labels_of(expr.lhs), labels_of(expr.rhs), expr.modifier
            if modifier is None or modifier.matching is None:
                return left | right
            on = set(modifier.matching.labels)
            assert on <= left & right, f"{expr} joins on {sorted(on)}, not all of them on both sides"
            if str(expr.op) in ("and", "unless"):
                return left
            if modifier.card == promql.VectorMatchCardinality.ManyToOne:
                assert set(modifier.group_labels or ()) <= right
                return left | set(modifier.group_labels or ())
            if modifier.card == promql.VectorMatchCardinality.OneToMany:
                return right | set(modifier.group_labels or ())
            return left | right if str(expr.op) == "or" else on
        case promql.Call():
            known = set().union(*(labels_of(argument) for argument in expr.args))
            if expr.func.name in ("label_replace", "label_join"):
                return known | {expr.args[1].val}
            return known - {"le"} if expr.func.name == "histogram_quantile" else known
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return labels_of(expr.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"{type(expr).__name__} is new to this test")


def labels_of_record(name: str) -> set[str]:
    """Return the labels of a recording rule; where it refers to itself, a latch, those it groups by."""
    if name in RECORDED:
        return RECORDED[name]
    expr: Any = promql.parse(RECORDS[name])
    RECORDED[name] = set(expr.modifier.labels) if isinstance(expr, promql.AggregateExpr) and expr.modifier else set()
    RECORDED[name] = labels_of(expr)
    return RECORDED[name]
