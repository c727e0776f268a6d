"""The same alerts as Grafana-managed rules: `python -m dashboards.alerts` prints a provisioning file.

Same expressions, `for` and labels; the records they read stay in Prometheus. Grafana's templates have no `query`, so
its descriptions name the alert's own labels and leave the rest to the dashboard.
https://grafana.com/docs/grafana/latest/alerting/set-up/provision-alerting-resources/file-provisioning/
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from grafanalib.core import (
    ALERTRULE_STATE_DATA_ERROR,
    ALERTRULE_STATE_DATA_OK,
    EXP_REDUCER_FUNC_DROP_NN,
    EXP_REDUCER_FUNC_LAST,
    EXP_TYPE_REDUCE,
    AlertExpression,
    AlertFileBasedProvisioning,
    AlertGroup,
    AlertRulev9,
    Target,
)

from alerts import Alert, AlertSettings, alerts

INTERVAL = 10  # Grafana evaluates in multiples of this many seconds


class Rule(AlertRulev9):  # type: ignore[misc]  # grafanalib has no types
    """A rule in the shape of a provisioning file; grafanalib's own is the ruler API's."""

    keep_firing_for = ""

    def to_json_data(self) -> dict[str, Any]:
        data: dict[str, Any] = super().to_json_data()
        rule = data.pop("grafana_alert")
        return {
            **data,
            "title": rule["title"],
            "condition": rule["condition"],
            "data": rule["data"],
            "noDataState": rule["no_data_state"],
            "execErrState": rule["exec_err_state"],
            "keepFiringFor": self.keep_firing_for,
        }


def _rule(alert: Alert, title: str, settings: AlertSettings, datasource: str) -> Rule:
    labels = ", ".join(f"{label} {{{{ $labels.{label} }}}}" for label in alert.identity)
    rule = Rule(
        title=title,
        uid=title.lower().replace(" ", "-"),
        triggers=[
            Target(refId="A", expr=alert.expr, instant=True, intervalFactor=1, datasource=datasource),
            # The expression gives a series, never 0, exactly where the alert is to fire. Grafana refuses grafanalib's
            # default mode, "strict".
            AlertExpression(
                refId="B",
                expression="A",
                expressionType=EXP_TYPE_REDUCE,
                reduceFunction=EXP_REDUCER_FUNC_LAST,
                reduceMode=EXP_REDUCER_FUNC_DROP_NN,
            ),
        ],
        condition="B",
        evaluateFor=alert.for_,
        labels=alert.labels,
        annotations={**alert.annotations(settings), "description": labels or alert.description},
        noDataAlertState=ALERTRULE_STATE_DATA_OK,
        errorAlertState=ALERTRULE_STATE_DATA_ERROR,
    )
    rule.keep_firing_for = alert.keep_firing_for
    return rule


def grafana_rules(settings: AlertSettings, datasource: str = "prometheus") -> dict[str, Any]:
    """Return the provisioning file; `datasource` is the UID of the Prometheus that keeps the records."""
    every = alerts(settings)
    shared = {name for name, count in Counter(alert.name for alert in every).items() if count > 1}
    rules: dict[str, list[Rule]] = {}
    for alert in every:
        title = f"{alert.name} {alert.severity}" if alert.name in shared else alert.name
        rules.setdefault(alert.group, []).append(_rule(alert, title, settings, datasource))
    interval = math.ceil(settings.scrape_interval / settings.pace / INTERVAL) * INTERVAL
    groups = [
        AlertGroup(name=f"flopwatch-{name}", folder="flopwatch", evaluateInterval=f"{interval}s", rules=made)
        for name, made in rules.items()
    ]
    provisioning: dict[str, Any] = AlertFileBasedProvisioning([group.to_json_data() for group in groups]).to_json_data()
    return provisioning


if __name__ == "__main__":
    print(json.dumps(grafana_rules(AlertSettings()), indent=2))
