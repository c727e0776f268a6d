"""Alerts on the monitoring itself."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.settings import AlertSettings


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on the monitoring."""
    return (_watchdog(),)


def _watchdog() -> Alert:
    return Alert(
        "watchdog", "FlopwatchWatchdog", "info", (), "vector(1)", "0s",
        "Always firing: when it stops arriving, Prometheus or Alertmanager is broken.",
        "Prometheus evaluates rules and Alertmanager delivers. Nobody is paged by this alert, but by its absence.",
    )
