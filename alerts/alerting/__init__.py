"""The alerts, a file per domain: each is one literal there, a runbook in `runbooks/`, a rule test in `tests/rules/`.

An alert on a run has one series per run, so that a flickering culprit does not restart it; who it is, where it runs and
what is lost is looked up in the description with `query`. An alert on hardware has one series per GPU and Xid, or port.
"""

from __future__ import annotations

from dataclasses import replace

from alerts.alert import Alert
from alerts.alerting import fabric, gpu, monitor, training
from alerts.settings import AlertSettings


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return every alert. Raises ValueError if one that is to be in shadow mode does not exist."""
    every = [alert for domain in (training, fabric, gpu, monitor) for alert in domain.alerts(settings)]
    if unknown := set(settings.shadow) - {alert.name for alert in every}:
        raise ValueError(f"shadow: there is no alert {', '.join(sorted(unknown))}")
    return tuple(replace(alert, shadow=alert.name in settings.shadow) for alert in every)
