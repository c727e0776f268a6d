"""Boards never contradict an alert: promtool evaluates their panels at moments at which alerts fire in rule tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import dashboards
from alerts import AlertSettings, alerts
from dashboards import Json
from dashboards.__main__ import BOARDS
from demo.servers import find
from simulator.promtool import rule_test
from tests.support import ROOT
from tests.support.cases import for_each
from tests.support.rule_files import rules_of

NAMES = sorted({alert.name for alert in alerts(AlertSettings())} - {"FlopwatchWatchdog"})
VARIABLES = dict.fromkeys(("tenant", "host", "run", "rack", "source", "model"), ".*")
VARIABLES |= {"uuid": "", "price": "2.5", "__rate_interval": "1m", "__range": "1h"}

# By the labels that name an object: its board, the panel with a value above 0 while it is not well, and the panel that
# lists its alerts.
OBJECTS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("uuid",): ("gpu", "Health", "Findings"),
    ("host", "device", "port"): ("fabric", "Unhealthy ports", "Findings"),
    ("host",): ("node", "Health", "Findings"),
    ("run",): ("run", "Health", "Firing alerts on the run"),
}
# What claims that whole objects are well while its panel is empty, or 0.
CLAIM = re.compile(r"\b(all|each|every|everything|healthy|well|fine|good|ok|needs?|problems?|alert on [a-z ]+ fires)\b")
DEFINITION = "ALERTS{"
# Alerts on a part that all GPUs of a host share. Each of these GPUs is shown as not well.
SHARED = ("GpuDriverNotLoaded", "NvswitchSxid")
# Panels whose text for no result denies an alert. One of them has a result while the alert fires.
DENIED: dict[str, list[tuple[str, str]]] = {
    "TrainingStraggler": [("stragglers", "Straggler"), ("stragglers", "Why ranks wait")],
    "GpuThermalThrottling": [("gpus", "Most throttled GPUs")],
    "GpuPowerThrottling": [("gpus", "Most throttled GPUs")],
    "GpuIdleAllocated": [("gpus", "Allocated but unused GPUs")],
    "GpuPcieErrors": [("gpus", "PCIe replays, one hour")],
    "InfinibandErrorRate": [("fabric", "Symbol errors"), ("node", "Port errors")],
    "InfinibandLinkFlapping": [("fabric", "Flaps")],
    "InfinibandPacketLoss": [("fabric", "Broken or dropped packets")],
    "NvlinkFabricUnhealthy": [("rack", "Fabric problems")],
    "FlopwatchCollectorFailing": [("monitor", "Collectors that fail now")],
    "FlopwatchSeriesDropped": [("monitor", "Dropped samples")],
    "TrainingMfuUnavailable": [("monitor", "Runs without MFU, by reason")],
}


def panels(board: str) -> dict[str, Json]:
    return {panel["title"]: panel for panel in BOARDS[board]["panels"] if panel["type"] != "row"}


def claims(panel: Json) -> bool:
    """Return whether a panel claims that whole objects are well while it is empty or 0."""
    field = panel["fieldConfig"]["defaults"]
    good = {one["text"] for mapping in field.get("mappings", ()) for one in mapping["options"].values()}
    text = f"{field.get('noValue', '')} {' '.join(good)} {panel['title'] if 'nhealthy' in panel['title'] else ''}"
    return CLAIM.search(text.replace("Unhealthy", "healthy").lower()) is not None


CLAIMS = [(board, title) for board in BOARDS for title, panel in panels(board).items() if claims(panel)]


@for_each(CLAIMS, str)
def test_a_panel_that_claims_that_objects_are_well_is_built_from_the_findings_on_them(claim: tuple[str, str]) -> None:
    board, title = claim
    assert DEFINITION in panels(board)[title]["targets"][0]["expr"]


def test_each_board_of_an_object_has_such_a_panel_and_the_fleet_s_has_one() -> None:
    assert {board for board, _, _ in OBJECTS.values()} | {"fleet", "gpus", "rack", "monitor"} == {
        board for board, _ in CLAIMS
    }


def query(board: str, title: str, variables: dict[str, str], target: int = 0) -> str:
    """Return a query of a panel with the variables of the board filled in."""
    return dashboards.filled(panels(board)[title]["targets"][target]["expr"], VARIABLES | variables)


def uuid_on(host: str, group: Json) -> str:
    """Return the uuid of a GPU of a host in a group of a rule test."""
    series = next(
        one["series"] for one in group["input_series"] if re.match(rf'gpu_info{{.*host="{host}"', one["series"])
    )
    uuid: str = re.findall(r'uuid="([^"]+)"', series)[0]
    return uuid


def expected(labels: dict[str, str], group: Json) -> Iterator[str]:
    """Yield expressions that must be 1 while the alert with these labels fires in a group of its rule test."""
    names = ("uuid", "host", "device", "port", "run")
    alert = ", ".join(f'{name}="{labels[name]}"' for name in ("alertname", "severity", *names) if name in labels)
    firing = f'ALERTS{{alertstate="firing", {alert}}}'
    # An alert that fires as critical and as warning is one incident, with one row.
    critical = re.sub('severity="[^"]*"', 'severity="critical"', firing)
    named = ", ".join(("alertname", "severity", *(name for name in names if name in labels)))
    chosen = {name: labels[name] for name in names if labels.get(name)}

    def lists(board: str, title: str) -> str:
        return f"count(({query(board, title, chosen)}) and on ({named}) ({critical} or on () {firing})) > bool 0"

    for names_of, (board, health, listed) in OBJECTS.items():
        if all(labels.get(name) for name in names_of):
            yield f"max({query(board, health, chosen)}) > bool 0"
            yield lists(board, listed)
            if board == "run":
                yield f"max({query('run', 'Verdict', chosen)}) > bool 0"
    if labels.get("uuid"):
        # The fleet of GPUs shows only the GPU, in the row for its uuid.
        health = query("gpus", "GPUs that need attention", chosen, 1)
        yield f"count(({health}) and on (uuid) {firing}) > bool 0"
    if labels["alertname"] in SHARED:
        of_gpu = chosen | {"uuid": uuid_on(labels["host"], group)}
        yield f"max({query('gpu', 'Health', of_gpu)}) > bool 0"
        yield f"count(({query('gpu', 'Findings', of_gpu)}) and on (alertname, host) {firing}) > bool 0"
        attention = query("gpus", "GPUs that need attention", {}, 1)
        yield f'count(({attention}) and on (uuid) gpu_info{{uuid="{of_gpu["uuid"]}"}}) > bool 0'
    if denied := DENIED.get(labels["alertname"]):
        yield f"count({' or '.join(f'({query(board, title, chosen)})' for board, title in denied)}) > bool 0"
    if labels.get("host"):
        yield f"({query('fleet', 'Unhealthy hosts', chosen)}) > bool 0"
    if labels.get("leaf"):
        yield lists("fabric", "Firing alerts on leaves")
    if labels["alertname"].startswith("Flopwatch"):
        yield lists("monitor", "Firing alerts on the monitoring")
    yield lists("fleet", "Findings")


def moments(name: str) -> Iterator[tuple[Json, list[Json]]]:
    """Yield the groups of an alert's rule test, with tests of the boards at each moment at which alerts fire."""
    for group in yaml.safe_load((ROOT / "tests" / "rules" / f"{name}.yaml").read_text())["tests"]:
        asked = []
        for case in group.get("alert_rule_test", ()):
            for found in case["exp_alerts"]:
                asked += [
                    {"expr": expr, "eval_time": case["eval_time"], "exp_samples": [{"labels": "{}", "value": 1}]}
                    for expr in expected({"alertname": case["alertname"], **found["exp_labels"]}, group)
                ]
        if asked:
            # The board of a rack has the hosts whose rack is known.
            placed = [{"series": 'host_topology_info{rack="r1",host="node-a"}', "values": "1x9999"}]
            on_rack = any(board == "rack" for board, _ in DENIED.get(name, ()))
            yield group | {"input_series": [*group["input_series"], *(placed if on_rack else ())]}, asked


def judged(promtool: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run promtool on the tests of the boards for one alert."""
    test = yaml.safe_load((ROOT / "tests" / "rules" / f"{name}.yaml").read_text())
    files = []
    for number, (group, asked) in enumerate(moments(name)):
        one = {key: value for key, value in group.items() if key != "alert_rule_test"} | {"promql_expr_test": asked}
        shown = {**test, "rule_files": [f"rules-{number}.yaml"], "tests": [one]}
        (folder / f"rules-{number}.yaml").write_text(rules_of(name, shown, one))
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(json.dumps(shown))
    return rule_test(promtool, *files, timeout=240)


@pytest.fixture(scope="module")
def judgements(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    promtool = find().promtool
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(judged, promtool, tmp_path_factory.mktemp(name), name) for name in NAMES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_while_an_alert_fires_the_boards_of_its_object_name_it_and_show_the_object_as_not_well(
    name: str, judgements: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = judgements[name].result()
    assert done.returncode == 0, done.stdout + done.stderr


# The verdict on host h finds fault with GPU 3 and with a port, and that on host d with the driver. No alert fires.
VERDICT = """
  instance:host:info{host="h",instance="i"}                                                            1
  instance:host:info{host="other",instance="o"}                                                        1
  instance:host:info{host="d",instance="d"}                                                            1
  host_verdict_id{instance="i"}                                                                        2
  host_verdict_id{instance="o"}                                                                        0
  host_verdict_reason{reason="ecc_uncorrected",part="gpu 3",verdict="degraded",action="x",instance="i"} 1
  host_verdict_reason{reason="port_flapping",part="port mlx5_0/1",verdict="bad",action="y",instance="i"} 1
  host_verdict_reason{reason="driver_not_loaded",part="driver",verdict="degraded",action="z",instance="d"} 1
  gpu_info{gpu="0",uuid="GPU-6",host="d",instance="d"}                                                 1
  gpu_info{gpu="1",uuid="GPU-7",host="d",instance="d"}                                                 1
  gpu_info{gpu="3",uuid="GPU-3",host="h",instance="i"}                                                 1
  gpu_info{gpu="4",uuid="GPU-4",host="h",instance="i"}                                                 1
  gpu_info{gpu="3",uuid="GPU-5",host="other",instance="o"}                                             1
"""
HOST, OTHER = {"host": "h"}, {"host": "other"}
SHOWN: list[tuple[str, dict[str, float]]] = [
    (query("gpu", "Health", HOST | {"uuid": "GPU-3"}), {"{}": 1}),
    (query("gpu", "Health", HOST | {"uuid": "GPU-4"}), {"{}": 0}),
    (query("gpu", "Health", OTHER | {"uuid": "GPU-5"}), {"{}": 0}),
    (query("node", "Health", HOST), {"{}": 2}),
    (query("node", "Health", OTHER), {"{}": 0}),
    (query("node", "Health", {"host": "unknown"}), {}),
    (query("fabric", "Unhealthy ports", HOST), {"{}": 1}),
    (query("fabric", "Unhealthy ports", OTHER), {"{}": 0}),
    (
        f"max by (device, port, reason) ({query('fabric', 'Findings', HOST)})",
        {'{device="mlx5_0",port="1",reason="port_flapping"}': 2},
    ),
    (query("gpu", "Health", {"host": "d", "uuid": "GPU-6"}), {"{}": 1}),
    (
        f"max by (uuid, reason) ({query('gpu', 'Findings', {'host': 'd', 'uuid': 'GPU-7'})})",
        {'{uuid="GPU-7",reason="driver_not_loaded"}': 1},
    ),
    (query("fleet", "Unhealthy hosts", {}), {"{}": 2}),
    (query("gpus", "GPUs that need attention", {}, 1), {'{uuid="GPU-3"}': 1, '{uuid="GPU-6"}': 1, '{uuid="GPU-7"}': 1}),
]


def test_a_reason_of_a_verdict_is_shown_on_the_boards_of_the_gpu_port_and_host_it_concerns(tmp_path: Path) -> None:
    series = [
        dict(zip(("series", "values"), line.rsplit(maxsplit=1), strict=True)) for line in VERDICT.splitlines()[1:]
    ]
    asked = [
        {
            "expr": expr,
            "eval_time": "1m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expr, samples in SHOWN
    ]
    group = {
        "interval": "15s",
        "input_series": [one | {"values": f"{one['values']}x8"} for one in series],
        "promql_expr_test": asked,
    }
    (tmp_path / "verdict.yaml").write_text(json.dumps({"tests": [group]}))
    done = rule_test(find().promtool, tmp_path / "verdict.yaml", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
