"""A host in maintenance, through the whole chain: the command, exporter, Prometheus, rules, Alertmanager, PagerDuty."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from alerts import AlertSettings
from demo.stack import DemoStack
from tests.support.exporter_process import flopwatch_command
from tests.support.machine import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.paired, pytest.mark.e2e, pytest.mark.timeout(600)]

PACE = 30.0
SETTINGS = AlertSettings()
SICK_GPU = 6


def wait_for(what: str, done: Callable[[], object], stack: DemoStack) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        stack.check()
        assert time.monotonic() < deadline, f"{what} did not come; receiver errors: {stack.receiver.errors}"
        time.sleep(0.2)


def test_a_host_in_maintenance_sends_no_page_until_it_is_over(tmp_path: Path) -> None:
    with DemoStack(tmp_path, pace=PACE, train=None) as stack:
        assert stack.servers.alertmanager, f"no Alertmanager here: {stack.servers.why}"

        def firing(alert: str) -> bool:
            return bool(stack.prometheus.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}'))

        state = stack.state / "exporter"
        assert flopwatch_command("maintenance", "start", "--for", "2h", "--state", state).returncode == 0
        wait_for("Maintenance", lambda: firing("Maintenance"), stack)
        stack.node.xid(SICK_GPU, 79)
        wait_for("GpuXidCritical", lambda: firing("GpuXidCritical"), stack)
        time.sleep((2 * SETTINGS.group_wait + SETTINGS.group_interval) / PACE)
        assert firing("GpuXidCritical")
        assert stack.receiver.of("pagerduty") == stack.receiver.of("slack") == []
        assert flopwatch_command("maintenance", "stop", "--state", state).stdout == "not in maintenance\n"
        wait_for("the page", lambda: stack.receiver.of("pagerduty"), stack)
        assert stack.node.uuid(SICK_GPU) in str(stack.receiver.of("pagerduty")[0].payload)
        assert stack.receiver.errors == []
