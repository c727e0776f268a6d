"""Test that a real Prometheus sends exactly the records in docs/scale.md to a real VictoriaMetrics."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import AlertSettings, rules_yaml
from bench.pages import families, serve
from bench.rules import configuration
from demo.servers import SUITE
from demo.stack import fetch, free_ports
from tests.support.databases import prometheus, raw, victoria
from tests.support.machine import until
from tests.support.scale_page import snippet

pytestmark = [pytest.mark.long, pytest.mark.paired]

SETTINGS = AlertSettings(pace=15)
NODES = 2
ENOUGH = 1_500  # samples, so that each series has a few
RECORDS = '{__name__=~".+:.+"}'
# The last record appears once the windows of others are full.
WANTED = (
    "run:training_mfu:ratio_rate5m",
    "rank:training_mfu:ratio_rate5m",
    "run:run_goodput:ratio",
    "rail:infiniband_transmit_bytes:rate5m",
    "fleet:gpu_present:count",
)


def names(url: str) -> set[str]:
    """Return the names of all series of a server."""
    return set(json.loads(fetch(f"{url}/api/v1/label/__name__/values"))["data"])


def test_victoria_metrics_has_the_records_with_the_values_that_prometheus_has_and_no_raw_series(tmp_path: Path) -> None:
    rules = rules_yaml(SETTINGS)
    (tmp_path / "rules.yaml").write_text(rules)
    (port,) = free_ports(1)
    nodes = multiprocessing.get_context("spawn").Process(
        daemon=True, target=serve, args=([row.name for row in families(rules)], NODES, time.time() - 1000, port)
    )
    nodes.start()
    store, store_runs = victoria(SUITE, tmp_path)
    written: dict[str, Any] = configuration(SETTINGS, NODES, port)
    written["remote_write"] = yaml.safe_load(snippet("records"))["remote_write"]
    (remote,) = written["remote_write"]
    assert remote["url"].endswith(":8428/api/v1/write")
    remote |= {"url": f"{store}/api/v1/write", "queue_config": {"batch_send_deadline": "1s"}}
    (tmp_path / "prometheus.yml").write_text(json.dumps(written))
    url, runs = prometheus(SUITE, tmp_path, f"--storage.tsdb.path={tmp_path}/data")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(store_runs)
            stack.enter_context(runs)

            def arrived() -> bool:
                fetch(f"{store}/internal/force_flush")
                return set(WANTED) <= names(store) and sum(map(len, raw(store, RECORDS, 900.0).values())) > ENOUGH

            until(arrived)
            there, here = raw(store, RECORDS, 900.0), raw(url, RECORDS, 900.0)
            assert [name for name in names(store) if ":" not in name and not name.startswith("ALERTS")] == []
            assert "gpu_energy_joules_total" in names(url)
    finally:
        nodes.terminate()
        nodes.join()
    assert there
    compared = 0
    for labels, samples in there.items():
        own_values = dict(here[labels])
        for at, value in samples:
            if at in own_values:  # a sample younger than the other server's answer is not
                # VictoriaMetrics stores decimals with a precision of 1e-12 (its lib/decimal, conversionPrecision). The
                # hundredth more is for the rounding of the two floats.
                assert value == pytest.approx(own_values[at], rel=1.01e-12, abs=1e-12), labels
                compared += 1
    ranks = [labels for labels in there if "rank:training_mfu:ratio_rate5m" in labels]
    assert len(ranks) == NODES * 8
    assert compared >= 0.9 * sum(map(len, there.values())) > 500
