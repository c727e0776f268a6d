"""Test that shards, the ledger's Prometheus and the fleet's record and report what a single Prometheus does."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from alerts import AlertSettings, rules_yaml
from alerts.tiers import Tier
from bench.pages import bodies, families
from bench.rules import configuration
from demo.servers import SUITE
from demo.stack import fetch
from tests.support.databases import prometheus
from tests.support.live_series import named
from tests.support.machine import until
from tests.support.scale_page import snippet

pytestmark = [pytest.mark.long, pytest.mark.paired]

SETTINGS = AlertSettings(pace=15)
NODES = 4
RECORDS = '{__name__=~".+:.+"}'
# By page: what is changed. A module of host 0 and GPU 0 of host 1 are hot, GPU 0 of host 2 does not answer, and the run
# hangs. It has a straggler in any case.
FAULTS = {
    "/n/0": (r'(infiniband_temperature_celsius\{.*device="mlx5_0".*sensor="Module0".*\}) .*', r"\1 80"),
    "/n/1": (r'(gpu_temperature_margin_celsius\{.*gpu="0".*\}) .*', r"\1 1"),
    "/n/2": (r'(gpu_present\{.*gpu="0".*\}) .*', r"\1 0"),
    "/ledger": (
        r'run_straggler_info(\{tenant="",run="run-0",rank="\d+",host="node-0").*',
        r'\g<0>\nrun_hang_suspect_ratio\1} 1\nrun_hang_seconds{tenant="",run="run-0"} 60',
    ),
}
LOST = "/n/3"  # this exporter stops to answer
# One alert of each tier and more that read another tier's.
WANTED = {
    "FlopwatchExporterDown",
    "GpuHot",
    "GpuMissing",
    "InfinibandTransceiverHot",
    "NodeLost",
    "RunOnFaultyHost",
    "TrainingHang",
    "TrainingStraggler",
}


@pytest.fixture
def pages() -> Any:
    """Give the port of a server with the pages of all hosts and of the ledger, and an event that loses a host."""
    body, lost = bodies(families(rules_yaml(SETTINGS)), NODES, time.time() - 1000), threading.Event()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = body(self.path).decode()
            if self.path in FAULTS:
                text, count = re.subn(*FAULTS[self.path], text)
                assert count
            self.send_response(500 if self.path == LOST and lost.is_set() else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, lost
        server.shutdown()


def firing(*urls: str) -> set[str]:
    """Return the labels of the alerts that fire in any of some Prometheus."""
    every = [one for url in urls for one in json.loads(fetch(f"{url}/api/v1/alerts"))["data"]["alerts"]]
    return {named(one["labels"]) for one in every if one["state"] == "firing"}


def recorded(url: str) -> dict[str, float]:
    """Return the value of each recorded series."""
    answer = fetch(f"{url}/api/v1/query?query={quote(RECORDS)}")
    return {named(one["metric"]): float(one["value"][1]) for one in json.loads(answer)["data"]["result"]}


def test_shards_record_and_report_what_a_single_prometheus_does(pages: Any, tmp_path: Path) -> None:
    port, lost = pages
    with contextlib.ExitStack() as stack:

        def started(name: str, change: Callable[[Any], None], *tiers: Tier) -> str:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "rules.yaml").write_text(rules_yaml(SETTINGS, *tiers))
            written: Any = configuration(SETTINGS, NODES, port)
            change(written["scrape_configs"])
            (folder / "prometheus.yml").write_text(json.dumps(written))
            url, runs = prometheus(SUITE, folder, f"--storage.tsdb.path={folder}/data")
            stack.enter_context(runs)
            return url

        def shard(number: int) -> Callable[[Any], None]:
            def change(jobs: Any) -> None:
                jobs[0]["static_configs"] = jobs[0]["static_configs"][number::2]
                del jobs[1]

            return change

        def gathered(jobs: Any) -> None:
            jobs[0] = yaml.safe_load(snippet("fleet"))["scrape_configs"][1]
            jobs[0]["static_configs"] = [{"targets": [url.removeprefix("http://") for url in shards]}]

        single = started("single", lambda _: None)
        shards = [started(f"shard-{number}", shard(number), "host") for number in (0, 1)]
        fleet = started("fleet", gathered, "run", "fleet")

        def names() -> set[str]:
            return set(re.findall(r'alertname="(\w+)"', "\n".join(firing(single))))

        until(lambda: names() >= WANTED - {"FlopwatchExporterDown", "NodeLost"})

        def differing() -> set[str]:
            here, there = recorded(single), recorded(fleet)
            alike = {one for one in here if there.get(one) == pytest.approx(here[one], rel=0.2, abs=2, nan_ok=True)}
            return (here.keys() | there.keys()) - alike if alike else {"no record at all"}

        until(lambda: not differing())  # a sum of the fleet may be from before the first record of a host
        lost.set()
        until(lambda: names() >= WANTED)
        until(lambda: firing(single) == firing(fleet, *shards))
        until(lambda: recorded(single).keys() == recorded(fleet).keys())
        assert all(firing(url) for url in (fleet, *shards))
