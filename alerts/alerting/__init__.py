"""The alerts, a file per domain: each is one literal there, a runbook in `runbooks/`, a rule test in `tests/rules/`.

An alert on a run has one series per run, so that a flickering culprit does not restart it; who it is, where it runs and
what is lost is looked up in the description with `query`. An alert on hardware has one series per GPU and Xid, or port.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.alerting import fabric, gpu, incidents, ledger, monitor, nvlink, quality, traffic, training, xid
from alerts.settings import AlertSettings

# In the order of evaluation within a group.
DOMAINS = (training, ledger, quality, fabric, traffic, xid, gpu, nvlink, monitor, incidents)


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return every alert. Raises ValueError if one that is to be in shadow mode does not exist."""
    every = tuple(alert.at(settings) for domain in DOMAINS for alert in domain.ALERTS)
    if unknown := set(settings.shadow) - {alert.name for alert in every}:
        raise ValueError(f"shadow: there is no alert {', '.join(sorted(unknown))}")
    return every
