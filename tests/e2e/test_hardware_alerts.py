"""Every fault a simulated node can have, through a real exporter and Prometheus: the alerts name it, and no other part.

The rule tests make up their series; here they are what the exporter really serves, with its label values.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from alerts import AlertSettings, rules_yaml
from demo.servers import find
from demo.stack import Child, Prometheus, StackError, fetch, free_ports
from flopwatch.simulate.node import SimulatedNode
from tests.machine import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PACE = 20.0  # ten minutes of the shipped rules are thirty seconds here
SETTINGS = AlertSettings(pace=PACE)
HEALTHY = 20.0  # seconds: more than the longest `for` of what looks at states, but for the driver and PCIe
SLOWER = 4  # times that this machine may be
HOST = "node-a"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, SimulatedNode]]:
    """Give a Prometheus with the shipped rules, at a pace, and the node whose exporter it scrapes."""
    folder = tmp_path_factory.mktemp("hardware")
    scraped, pushed, asked = free_ports(3)
    (folder / "rules.yaml").write_text(rules_yaml(SETTINGS))
    interval = SETTINGS.at_pace(SETTINGS.scrape_interval)
    (folder / "prometheus.yml").write_text(json.dumps({
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "flopwatch", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }))
    exporter = [sys.executable, "-m", "flopwatch", "exporter", "--simulate", "h100x8", "--host", HOST,
                "--listen", f"127.0.0.1:{scraped}", "--otlp-listen", f"127.0.0.1:{pushed}",
                "--state", str(folder / "state")]
    server = [*find().prometheus, f"--config.file={folder / 'prometheus.yml'}",
              f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{asked}"]

    def reads_all() -> bool:
        with suppress(OSError):
            page = fetch(f"http://127.0.0.1:{scraped}/metrics").decode()
            return all(f'flopwatch_collector_success{{collector="{name}"}} 1.0' in page
                       for name in ("nvml", "infiniband", "xid", "identity"))
        return False

    with ExitStack() as stack:
        stack.callback(Child("exporter", exporter, os.environ, folder / "exporter.log").stop)
        until(reads_all)  # on a slow machine a source misses the first scrapes, which is an alert of its own
        stack.callback(Child("prometheus", server, os.environ, folder / "prometheus.log").stop)
        yield Prometheus(f"http://127.0.0.1:{asked}"), SimulatedNode(folder / "state" / "simulated")


def alerting(prometheus: Prometheus, state: str = "firing") -> set[tuple[str, str, str]]:
    """Return what is or was alerted: each alert's name, severity, and GPU's uuid or port's device."""
    try:
        found = prometheus.query(f'last_over_time(ALERTS{{alertstate=~"{state}",alertname!="FlopwatchWatchdog"}}[1h])')
    except (StackError, ValueError):
        return set()  # it is only just starting
    assert all(labels["host"] == HOST for labels, _ in found)
    return {(labels["alertname"], labels["severity"], labels.get("uuid", labels.get("device", "")))
            for labels, _ in found}


def test_a_healthy_node_has_no_alert(prometheus: tuple[Prometheus, SimulatedNode]) -> None:
    server, _ = prometheus
    deadline = time.monotonic() + 60 * SLOWER
    while True:
        try:
            if server.value("count(gpu_present == 1)") == 8:
                break
        except StackError:
            assert time.monotonic() < deadline, "the exporter serves no GPUs"
        time.sleep(0.2)
    time.sleep(HEALTHY)
    assert alerting(server, "firing|pending") == set()


def test_each_fault_is_alerted_as_what_it_is(prometheus: tuple[Prometheus, SimulatedNode]) -> None:
    server, node = prometheus
    node.throttle(0, "hw_thermal_slowdown")
    node.xid(0, 13)
    node.throttle(1, "hw_power_brake_slowdown")
    node.remap(2, uncorrected=1, pending=True)
    node.ecc(2, uncorrected=1)
    node.xid(2, 94)
    node.remap(3, failure=True)
    node.lose(4)
    node.recovery(5, 4)
    node.pcie(6, width=8)
    node.nvlink(7, 3, "down")
    node.link("mlx5_0", "down")
    node.rate("mlx5_3", 200)
    node.remove("mlx5_4")
    node.symbol_errors("mlx5_5", 0.01 * PACE)
    gpu = [SimulatedNode.uuid(index) for index in range(8)]
    expected = {
        ("GpuThermalThrottling", "warning", gpu[0]), ("GpuXidApplication", "info", gpu[0]),
        ("GpuPowerThrottling", "warning", gpu[1]), ("GpuRepairPending", "warning", gpu[2]),
        ("GpuEccUncorrected", "warning", gpu[2]), ("GpuXidWarning", "warning", gpu[2]),
        ("GpuMemoryFailed", "critical", gpu[3]), ("GpuMissing", "critical", gpu[4]),
        ("GpuRecoveryNeeded", "warning", gpu[5]), ("GpuPcieDegraded", "warning", gpu[6]),
        ("NvlinkDown", "critical", gpu[7]), ("InfinibandLinkErrors", "warning", "mlx5_0"),
        ("InfinibandPortDown", "warning", "mlx5_0"), ("InfinibandRateLow", "warning", "mlx5_3"),
        ("InfinibandLinkErrors", "warning", "mlx5_4"), ("InfinibandPortDown", "warning", "mlx5_4"),
        ("InfinibandErrorRate", "warning", "mlx5_5"),
    }
    # A port that is down sends nothing: where the others are busy, as here, its rail falls behind.
    consequences = {("RailImbalance", "warning", "mlx5_0"), ("RailImbalance", "warning", "mlx5_4")}
    deadline = time.monotonic() + 60 * SLOWER
    while not expected <= alerting(server) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alerting(server) - consequences == expected
