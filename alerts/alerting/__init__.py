"""Alerts, a tuple of literals per domain, each with a runbook in `runbooks/` and a rule test in `tests/rules/`.

An alert on a run has one series per run, so that it does not start again when another rank becomes the straggler. A
query in its description finds the rank, its host and the cost. An alert on hardware has one series per GPU and Xid, or
per port.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.alerting import fabric, gpu, incidents, ledger, monitor, nvlink, quality, traffic, training, xid
from alerts.settings import AlertSettings

# In the order of evaluation within a group.
DOMAINS = (training, ledger, quality, fabric, traffic, xid, gpu, nvlink, monitor, incidents)


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return every alert. Raises ValueError if `settings.shadow` names an alert that does not exist."""
    every = tuple(alert.at(settings) for domain in DOMAINS for alert in domain.ALERTS)
    if unknown := set(settings.shadow) - {alert.name for alert in every}:
        raise ValueError(f"shadow: there is no alert {', '.join(sorted(unknown))}")
    return every
