"""The alerts, a file per domain: each is one literal there, a runbook in `runbooks/`, a rule test in `tests/rules/`.

An alert on a run has one series per run, so that a flickering culprit does not restart it; who it is, where it runs and
what is lost is looked up in the description with `query`. An alert on hardware has one series per GPU and Xid, or port.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.alerting import fabric, gpu, monitor, training
from alerts.settings import AlertSettings


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return every alert."""
    return tuple(alert for domain in (training, fabric, gpu, monitor) for alert in domain.alerts(settings))
