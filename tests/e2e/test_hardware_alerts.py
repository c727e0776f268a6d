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

from alerts import AlertSettings, recording, rules_yaml
from demo.servers import find
from demo.stack import Child, PrometheusApi, StackError, fetch, free_ports
from simulator.host import SimulatedNode
from tests.support.machine import until

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(900)]

PACE = 20.0  # five minutes of the shipped rules are fifteen seconds here
SETTINGS = AlertSettings(pace=PACE)
HEALTHY = 20.0  # seconds: more than the longest `for` of what looks at states, but for the driver and PCIe
SLOWER = 4  # times that this machine may be
FAULTY, WELL = "node-a", "node-b"
GPUS, PORTS = 8, 9  # of each


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrometheusApi, SimulatedNode]]:
    """Give a Prometheus with the shipped rules, at a pace, and the faulty one of the two nodes that it scrapes."""
    folder = tmp_path_factory.mktemp("hardware")
    asked, *ports = free_ports(5)
    nodes = {host: ports[2 * number : 2 * number + 2] for number, host in enumerate((FAULTY, WELL))}
    (folder / "rules.yaml").write_text(rules_yaml(SETTINGS))
    interval = SETTINGS.at_pace(SETTINGS.scrape_interval)
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {
                        "job_name": "flopwatch",
                        "static_configs": [{"targets": [f"127.0.0.1:{scraped}" for scraped, _ in nodes.values()]}],
                    }
                ],
            }
        )
    )
    server = [
        *find().prometheus,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{asked}",
    ]

    def read_all() -> bool:
        with suppress(OSError):
            pages = [fetch(f"http://127.0.0.1:{scraped}/metrics").decode() for scraped, _ in nodes.values()]
            return all(
                f'flopwatch_collector_success{{collector="{name}"}} 1.0' in page
                for name in ("nvml", "infiniband", "xid", "identity")
                for page in pages
            )
        return False

    with ExitStack() as stack:
        for host, (scraped, pushed) in nodes.items():
            exporter = [
                sys.executable,
                "-m",
                "flopwatch",
                "exporter",
                "--simulate",
                "h100x8",
                "--host",
                host,
                "--listen",
                f"127.0.0.1:{scraped}",
                "--otlp-listen",
                f"127.0.0.1:{pushed}",
                "--state",
                str(folder / host),
            ]
            stack.callback(Child("exporter", exporter, os.environ, folder / f"{host}.log").stop)
        until(read_all)  # on a slow machine a source misses the first scrapes, which is an alert of its own
        stack.callback(Child("prometheus", server, os.environ, folder / "prometheus.log").stop)
        prometheus = PrometheusApi(f"http://127.0.0.1:{asked}")

        def known() -> bool:
            """Return whether Prometheus has all GPUs and knows all ports as active; only then can one be missing."""
            with suppress(StackError, ValueError):  # it is only just starting
                return prometheus.value("count(gpu_present == 1)") == GPUS * len(nodes) and prometheus.value(
                    f"count({recording.PORT_WAS_ACTIVE})"
                ) == PORTS * len(nodes)
            return False

        until(known)
        yield prometheus, SimulatedNode(folder / FAULTY / "simulated")


def alerting(prometheus: PrometheusApi, host: str, state: str = "firing") -> set[tuple[str, str, str]]:
    """Return what is or was alerted of a host: each alert's name, severity, and GPU's uuid or port's device."""
    try:
        found = prometheus.query(f'last_over_time(ALERTS{{alertstate=~"{state}",alertname!="FlopwatchWatchdog"}}[1h])')
    except (StackError, ValueError):
        return set()  # it is only just starting
    assert all(labels["host"] in {FAULTY, WELL} for labels, _ in found)
    return {
        (labels["alertname"], labels["severity"], labels.get("uuid", labels.get("device", "")))
        for labels, _ in found
        if labels["host"] == host
    }


def test_each_fault_is_alerted_as_what_it_is(prometheus: tuple[PrometheusApi, SimulatedNode]) -> None:
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
        ("GpuThermalThrottling", "warning", gpu[0]),
        ("GpuXidApplication", "info", gpu[0]),
        ("GpuPowerThrottling", "warning", gpu[1]),
        ("GpuRepairPending", "warning", gpu[2]),
        ("GpuEccUncorrected", "warning", gpu[2]),
        ("GpuXidWarning", "warning", gpu[2]),
        ("GpuMemoryFailed", "critical", gpu[3]),
        ("GpuMissing", "critical", gpu[4]),
        ("GpuRecoveryNeeded", "warning", gpu[5]),
        ("GpuPcieDegraded", "warning", gpu[6]),
        ("NvlinkDown", "critical", gpu[7]),
        ("InfinibandLinkErrors", "warning", "mlx5_0"),
        ("InfinibandPortDown", "warning", "mlx5_0"),
        ("InfinibandRateLow", "warning", "mlx5_3"),
        ("InfinibandLinkErrors", "warning", "mlx5_4"),
        ("InfinibandPortDown", "warning", "mlx5_4"),
        ("InfinibandErrorRate", "warning", "mlx5_5"),
    }
    # A port that is down sends nothing, nor does that of a GPU that is gone: as the others are busy, they fall behind.
    consequences = {("RailImbalance", "warning", device) for device in ("mlx5_0", "mlx5_4", "mlx5_6")}
    deadline = time.monotonic() + 60 * SLOWER
    while not expected <= alerting(server, FAULTY) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alerting(server, FAULTY) - consequences == expected


def test_the_healthy_node_has_no_alert(prometheus: tuple[PrometheusApi, SimulatedNode]) -> None:
    server, _ = prometheus
    deadline = time.monotonic() + HEALTHY * SLOWER
    seen = f"count_over_time(up[1h]) * {SETTINGS.seconds_at_pace(SETTINGS.scrape_interval)} >= {HEALTHY}"
    while len(server.query(seen)) < 2:
        assert time.monotonic() < deadline, "Prometheus does not scrape both"
        time.sleep(0.2)
    assert alerting(server, WELL, "firing|pending") == set()
