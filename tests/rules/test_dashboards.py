"""Dashboards: every name comes from the catalogue, every panel is of a kind that Grafana 11 and later draws."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from jsonschema import Draft7Validator

import dashboards
from alerts import AlertSettings, alerts
from alerts.routing import GROUP_BY
from dashboards import Json, run
from dashboards.__main__ import BOARDS, text
from demo.servers import find
from simulator.promtool import rule_test
from tests.support import ROOT, TESTS
from tests.support.cases import for_each
from tests.support.promql_labels import labels_of

GRAFANA = json.loads((TESTS / "grafana" / "schema.json").read_text())
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
EVERY_PANEL = for_each(PANELS, lambda case: f"{case[0]}: {case[1]['title']}")


def kept_labels(panel: Json, target: Json) -> set[str]:
    _, query = next(dashboards.queries({"panels": [panel | {"targets": [target]}]}, VARIABLES))
    return labels_of(promql.parse(query))


VARIABLES = {
    "run": "r",
    "tenant": ".*",
    "host": "h",
    "uuid": "u",
    "rack": "k",
    "model": "m",
    "source": "nvml",
    "price": "2.5",
    "__rate_interval": "1m",
    "__range": "1h",
}


def links_of(panel: Json) -> Iterator[Json]:
    """Yield the links of a panel's series, or of its table's cells."""
    yield from panel["fieldConfig"]["defaults"].get("links", ())
    for override in panel["fieldConfig"]["overrides"]:
        for change in override["properties"]:
            if change["id"] == "links":
                yield from change["value"]


def links_to(panel: Json) -> Iterator[tuple[str, str]]:
    """Yield each variable in a panel's links as ("label", name) or ("table", heading)."""
    for link in links_of(panel):
        yield from (("label", name) for name in re.findall(r"\$\{__field\.labels\.(\w+)\}", link["url"]))
        yield from (("table", name) for name in re.findall(r'\$\{__data\.fields\["([^"]+)"\]\}', link["url"]))


@EVERY_PANEL
def test_a_panel_asks_only_for_series_and_labels_that_exist_and_its_legend_shows_labels_the_query_keeps(
    case: tuple[str, Json],
) -> None:
    _, panel = case
    shown: set[str] = set()
    for target in panel["targets"]:
        kept = kept_labels(panel, target)
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept
        shown |= kept
    for field, label in links_to(panel):
        assert field == "table" or label in shown
    for change in panel["transformations"]:
        if change["id"] == "filterFieldsByName":
            names = {name for name in change["options"]["include"]["names"] if name.partition(" #")[0] != "Value"}
            assert names <= shown


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("gpu_powr_watts", "gpu_powr_watts is neither"),
        ('gpu_power_watts{rank="1"}', "gpu_power_watts has labels"),
        ("sum by (host) (gpu_power_watts)", "groups by"),
        ("gpu_power_watts * on (host) gpu_info", "joins on"),
    ],
)
def test_the_check_of_names_finds_a_wrong_name_and_a_wrong_label(query: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        labels_of(promql.parse(query))


@EVERY_PANEL
def test_a_panel_is_of_a_kind_grafana_still_draws_and_describes_what_is_expected(case: tuple[str, Json]) -> None:
    _, panel = case
    # 'graph', 'singlestat' and 'table-old' were Angular and left with Grafana 11.
    assert panel["type"] in {
        "timeseries",
        "stat",
        "gauge",
        "bargauge",
        "table",
        "heatmap",
        "state-timeline",
        "status-history",
    }
    assert re.search(r"\bExpected: ", panel["description"])
    assert panel["maxDataPoints"] >= (100 if panel["type"] == "status-history" else 300)
    field = panel["fieldConfig"]["defaults"]
    assert field["unit"]
    values = [step["value"] for step in field["thresholds"]["steps"]]
    assert values[0] is None
    assert values[1:] == sorted(values[1:])
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJ"[: len(panel["targets"])])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["instant"] is not target["range"]
        assert (target["format"] == "table") is (panel["type"] == "table")
    if panel["type"] in ("stat", "gauge", "bargauge", "table"):
        assert "legend" not in panel["options"]
    if panel["type"] in ("stat", "gauge", "bargauge"):
        assert panel["options"]["reduceOptions"] == {"calcs": ["lastNotNull"], "fields": "", "values": False}


@EVERY_PANEL
def test_the_texts_of_a_panel_have_short_sentences_and_no_word_with_two_readings(case: tuple[str, Json]) -> None:
    _, panel = case
    texts = (panel["title"], panel["description"], panel["fieldConfig"]["defaults"].get("noValue", ""))
    for sentence in (found for shown in texts for found in re.split(r"(?<=[.?])\s+", shown)):
        assert len(sentence.split()) <= 25, sentence
        assert ";" not in sentence
        # The rank that is latest, or the most recent one? A step of training, or of a curve?
        assert not re.search(r"\blatest\b|\bsteps? (?:up|down)\b", sentence)


def complaints(kind: str, value: Json) -> list[str]:
    """Return the violations of Grafana's published schema in a part of a dashboard."""
    return [
        f"{kind}: {'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in Draft7Validator(GRAFANA["properties"][kind]).iter_errors(value)
    ]


def against_grafanas_types(board: Json) -> list[str]:
    # Of the Prometheus data source's own: https://grafana.com/docs/grafana/latest/datasources/prometheus/annotations/
    marks = [
        {key: value for key, value in mark.items() if key not in ("titleFormat", "textFormat")} | {"target": {}}
        for mark in board["annotations"]["list"]
    ]
    found = complaints("dashboard", {**board, "annotations": {"list": marks}, "panels": []})
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        found += complaints("panel", panel) + complaints(f"{panel['type']} options", panel["options"])
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        if f"{panel['type']} custom" in GRAFANA["properties"]:
            found += complaints(f"{panel['type']} custom", custom)
        elif custom:
            found.append(f"{panel['type']}: {custom}")
    return found


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_has_the_shape_of_grafanas_published_types(board: Json) -> None:
    assert against_grafanas_types(board) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda panel: panel["options"].update(fieldOptions={"defaults": {"unit": "s"}}),
        lambda panel: panel["fieldConfig"]["defaults"].update(unit=5),
        lambda panel: panel["fieldConfig"]["defaults"].update(custom={"calcs": ["last"]}),
        lambda panel: panel["options"].update(orientation="sideways"),
        lambda panel: panel.update(seriesOverrides=[]),
        lambda panel: panel.update(gridPos={"h": "8", "w": 8, "x": 0, "y": 0}),
    ],
)
def test_the_check_of_shapes_finds_what_grafana_does_not_know(wrong: Callable[[Json], None]) -> None:
    board = copy.deepcopy(BOARDS["fleet"])
    wrong(next(panel for panel in board["panels"] if panel["type"] == "gauge"))
    assert len(against_grafanas_types(board)) == 1


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_links_lead_to_dashboards_that_exist_with_variables_they_have_and_keep_the_time(board: Json) -> None:
    variables = {one["uid"]: {entry["name"] for entry in one["templating"]["list"]} for one in BOARDS.values()}
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        headings = {
            name
            for change in panel["transformations"]
            if change["id"] == "organize"
            for name in change["options"]["renameByName"].values()
        }
        assert {name for kind, name in links_to(panel) if kind == "table"} <= headings, panel["title"]
        for link in links_of(panel):
            found = re.fullmatch(r"/d/([\w-]+)\?(.*)", link["url"])
            assert found, link
            first, time, *given = found[2].split("&")
            assert (first, time) == ("${datasource:queryparam}", "${__url_time_range}")
            assert {one.partition("=")[0].removeprefix("var-") for one in given} <= variables[found[1]], link
            used = set(re.findall(r"\$(\w+)", re.sub(r"\$\{[^}]*\}", "", link["url"])))
            assert used <= variables[board["uid"]], link


def test_every_dashboard_can_be_reached_from_the_fleet_and_from_every_other_one() -> None:
    reached, ahead = set(), [BOARDS["fleet"]["uid"]]
    by_uid = {board["uid"]: board for board in BOARDS.values()}
    while ahead:
        reached.add(uid := ahead.pop())
        links = {
            link["url"].partition("?")[0].removeprefix("/d/")
            for panel in by_uid[uid]["panels"]
            if panel["type"] != "row"
            for link in links_of(panel)
        }
        ahead += links - reached
    # No panel of another board links to these two. The list at the top of each board does.
    assert by_uid.keys() - reached == {"flopwatch-gpus", "flopwatch-monitor"}
    for board in BOARDS.values():
        assert board["tags"] == ["flopwatch"]
        (menu,) = board["links"]
        assert (menu["type"], menu["tags"], menu["keepTime"]) == ("dashboards", ["flopwatch"], True)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_marks_and_variables_ask_only_for_what_exists(board: Json) -> None:
    for mark in board["annotations"]["list"]:
        kept = labels_of(promql.parse(dashboards.filled(mark["target"]["expr"], VARIABLES)))
        assert set(re.findall(r"{{(\w+)}}", mark["titleFormat"] + mark["textFormat"])) <= kept
    names = [entry["name"] for entry in board["templating"]["list"]]
    assert names[0] == "datasource"
    assert set(names) - {"datasource"} <= VARIABLES.keys()
    used = set(re.findall(r"\$(\w+)", json.dumps(board)))
    assert set(names) - {"datasource"} <= used
    for entry in board["templating"]["list"]:
        if entry["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", entry["query"]["query"])
            assert found
            for name, value in VARIABLES.items():
                found_series = found[1].replace(f"${name}", value)
            if not found_series.startswith("{"):
                assert found[2] in labels_of(promql.parse(found_series))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_have_their_own_ids_and_cells_and_the_schema_version_needs_no_angular_migration(board: Json) -> None:
    assert board["schemaVersion"] >= 39
    assert not {"rows", "style", "hideControls", "__inputs"} & board.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        width, height, left, top = (panel["gridPos"][side] for side in "whxy")
        cells = {(x, y) for x in range(left, left + width) for y in range(top, top + height)}
        assert left + width <= 24
        assert not cells & taken
        taken |= cells
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)


def test_an_alerts_link_leads_to_a_dashboard_that_exists_with_a_variable_it_has() -> None:
    settings = AlertSettings()
    variables = {board["uid"]: {entry["name"] for entry in board["templating"]["list"]} for board in BOARDS.values()}
    led = set()
    for alert in alerts(settings):
        found = re.fullmatch(
            r"/d/([\w-]+)\?(?:var-(\w+)=\{\{ \$labels\.(\w+) \| urlquery \}\}&)?from=now-6h&to=now",
            alert.annotations(settings)["dashboard_url"],
        )
        assert found, alert.name
        uid, variable, label = found.groups()
        assert variable is None or variable in variables[uid]
        assert label is None or label in alert.identity
        led.add(uid.removeprefix("flopwatch-"))
        # Alertmanager has a link only if all alerts of a message have the same.
        assert label is None or label in GROUP_BY
    assert led == {"run", "node", "fabric", "monitor"}


def test_queries_come_out_ready_for_prometheus() -> None:
    queries = list(run.queries("llama/8b", rate_interval="5s", time_range="2m"))
    assert ("MFU and effective MFU", 'run:training_mfu:ratio_rate5m{run="llama/8b"}') in queries
    productive = 'run_seconds_total{tenant=~".*", run="llama/8b", bucket="productive"}'
    assert (
        "Recent time by bucket",
        f"sum by (bucket) (max by (tenant, run, bucket) (rate({productive}[5s]))) and on (bucket) "
        f"(sum by (bucket) (max by (tenant, run, bucket) (increase({productive}[2m] @ end()))) > 0)",
    ) in queries
    assert len(queries) == sum(len(panel["targets"]) for name, panel in PANELS if name == "run")
    assert not [query for _, query in queries if re.search(r"\$(?!\d)", query)]


def test_no_query_is_longer_than_victoria_metrics_takes() -> None:
    lengths = {(name, panel["title"]): len(target["expr"]) for name, panel in PANELS for target in panel["targets"]}
    # Of 16 KiB, with room for the values of variables.
    assert {place: length for place, length in lengths.items() if length > 15_000} == {}
    assert max(lengths.values()) > 5_000


def test_a_query_with_an_unset_variable_is_an_error() -> None:
    board = {"panels": [{"title": "Lost", "targets": [{"expr": 'up{run="$run"}'}]}]}
    with pytest.raises(KeyError, match="run"):
        list(dashboards.queries(board, {}))


# Ranks 0 and 1 share card A, rank 1 was on card B before, both cards are served by the old and the new exporter pod,
# and card C and port q belong to another run.
MOVING = """
  training_rank_info{run="lm",rank="0",host="n1",uuid="A",attempt="2"}            1x4
  training_rank_info{run="lm",rank="1",host="n1",uuid="A",attempt="2"}            1x4
  training_rank_info{run="lm",rank="1",host="n2",uuid="B",attempt="1"}            1x4
  rank:training_collective_wait:ratio{run="lm",rank="0"}                          0.3x4
  rank:training_collective_wait:ratio{run="lm",rank="1"}                          0x4
  rank:training_straggler:confirmed{run="lm",rank="1",host="n1"}                  0.3x4
  gpu_info{gpu="0",uuid="A",host="n1",instance="old"}                             1x4
  gpu_info{gpu="0",uuid="A",host="n1",instance="new"}                             1x4
  gpu_info{gpu="5",uuid="B",host="n2",instance="n2"}                              1x4
  gpu_temperature_celsius{gpu="0",uuid="A",instance="old"}                        60x4
  gpu_temperature_celsius{gpu="0",uuid="A",instance="new"}                        61x4
  gpu_temperature_celsius{gpu="5",uuid="B",instance="n2"}                         70x4
  gpu_temperature_celsius{gpu="6",uuid="C",instance="n2"}                         90x4
  infiniband_info{device="mlx5_0",port="1",host="n1",instance="new",board_id="x"} 1x4
  infiniband_info{device="mlx5_0",port="1",host="n1",instance="new",board_id="y"} 1x4
  infiniband_info{device="mlx5_0",port="1",host="n3",instance="n3",board_id="x"}  1x4
  infiniband_port_state_id{device="mlx5_0",port="1",instance="new"}               4x4
  infiniband_port_state_id{device="mlx5_0",port="1",instance="n3"}                4x4
"""
SHOWN: dict[tuple[str, str], dict[str, float]] = {
    ("Straggler", "A"): {'rank:training_straggler:confirmed{run="lm", rank="1", host="n1"}': 0.3},
    ("Ranks and their GPUs", "A"): {
        '{rank="0", host="n1", uuid="A"}': 1,
        '{rank="1", host="n1", uuid="A"}': 1,
        '{rank="1", host="n2", uuid="B"}': 1,
    },
    ("Ranks and their GPUs", "B"): {'{rank="0", gpu="0"}': 1, '{rank="1", gpu="0"}': 1, '{rank="1", gpu="5"}': 1},
    ("Ranks and their GPUs", "H"): {'{rank="0"}': 61, '{rank="1"}': 70},
    ("Active ports per host", "A"): {'{host="n1"}': 1},
}


def test_a_rank_that_moves_a_shared_card_and_a_replaced_exporter_break_no_panel(tmp_path: Path) -> None:
    expressions = {
        (panel["title"], target["refId"]): next(
            dashboards.queries({"panels": [panel | {"targets": [target]}]}, VARIABLES | {"run": "lm"})
        )[1]
        for name, panel in PANELS
        if name == "run"
        for target in panel["targets"]
    }
    tests = tmp_path / "moving.yaml"
    tests.write_text(
        yaml.safe_dump(
            {
                "tests": [
                    {
                        "interval": "15s",
                        "input_series": [
                            dict(zip(("series", "values"), line.rsplit(maxsplit=1), strict=True))
                            for line in MOVING.strip().splitlines()
                        ],
                        "promql_expr_test": [
                            {
                                "expr": expressions[panel],
                                "eval_time": "1m",
                                "exp_samples": [
                                    {"labels": labels, "value": value} for labels, value in expected.items()
                                ],
                            }
                            for panel, expected in SHOWN.items()
                        ],
                    }
                ]
            }
        )
    )
    done = rule_test(find().promtool, tests, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


# Hosts n1 and n2 run the job, and n3 another one. The node_exporter of n1 reports its name with a domain, and n2 has a
# new kernel. Rank 1's GPU has two ports near it and one for storage.
OTHERS = """
  training_rank_info{run="lm",rank="0",host="n1",uuid="A"}                                                 1x30
  training_rank_info{run="lm",rank="1",host="n2",uuid="B"}                                                 1x30
  training_rank_info{run="other",rank="0",host="n3",uuid="C"}                                              1x30
  rank:training_collective_wait:ratio{run="lm",rank="0"}                                                   0.3x30
  rank:training_collective_wait:ratio{run="lm",rank="1"}                                                   0.1x30
  node_uname_info{instance="e1",nodename="n1.example.org",release="5"}                                     1x30
  node_uname_info{instance="e2",nodename="n2",release="5"}                                                 1x30
  node_uname_info{instance="e2",nodename="n2",release="6"}                                                 1x30
  node_uname_info{instance="e3",nodename="n3",release="5"}                                                 1x30
  node_pressure_cpu_waiting_seconds_total{instance="e1"}                                                   0+3x30
  node_pressure_cpu_waiting_seconds_total{instance="e2"}                                                   0+6x30
  node_pressure_cpu_waiting_seconds_total{instance="e3"}                                                   0+9x30
  node_load1{instance="e2"}                                                                                7x30
  node_cpu_seconds_total{instance="e2",cpu="0",mode="steal"}                                               0+0.3x30
  node_cpu_seconds_total{instance="e2",cpu="7",mode="steal"}                                               0+0.9x30
  node_cpu_seconds_total{instance="e2",cpu="8",mode="steal"}                                               0+9x30
  node_cpu_seconds_total{instance="e2",cpu="0",mode="user"}                                                0+9x30
  node_cpu_scaling_frequency_hertz{instance="e1",cpu="0"}                                                  2e9x30
  node_cpu_package_throttles_total{instance="e1",package="0"}                                              5x30
  node_mountstats_nfs_operations_request_time_seconds_total{instance="e1",export="nas:/a",operation="READ"} 0+3x30
  node_mountstats_nfs_operations_requests_total{instance="e1",export="nas:/a",operation="READ"}            0+30x30
  node_mountstats_nfs_operations_request_time_seconds_total{instance="e1",export="nas:/b",operation="READ"} 3x30
  node_mountstats_nfs_operations_requests_total{instance="e1",export="nas:/b",operation="READ"}            30x30
  node_mountstats_nfs_operations_request_time_seconds_total{instance="e3",export="nas:/a",operation="READ"} 0+9x30
  node_mountstats_nfs_operations_requests_total{instance="e3",export="nas:/a",operation="READ"}            0+30x30
  node_mountstats_nfs_total_read_bytes_total{instance="e1",export="nas:/a"}                                0+150x30
  node_mountstats_nfs_total_read_bytes_total{instance="e2",export="nas:/a"}                                0+300x30
  node_mountstats_nfs_total_read_bytes_total{instance="e3",export="nas:/a"}                                0+900x30
  weka_stats{host_name="n1",node_id="1",category="ops",stat="READ_LATENCY"}                                2000x30
  weka_stats{host_name="n1",node_id="2",category="ops",stat="READ_LATENCY"}                                4000x30
  weka_stats{host_name="n3",node_id="1",category="ops",stat="READ_LATENCY"}                                9000x30
  weka_stats{host_name="n1",node_id="1",category="ops",stat="READ_BYTES"}                                  50x30
  weka_stats{host_name="n2",node_id="1",category="ops",stat="READ_BYTES"}                                  70x30
  fs_ops_latency_sum{host="n2",fs_op="ReadFile"}                                                           0+6000000x30
  fs_ops_latency_count{host="n2",fs_op="ReadFile"}                                                         0+30x30
  fs_ops_latency_sum{host="n3",fs_op="ReadFile"}                                                           0+9000000x30
  fs_ops_latency_count{host="n3",fs_op="ReadFile"}                                                         0+30x30
  gcs_read_bytes_count{host="n2"}                                                                          0+450x30
  gcs_read_bytes_count{host="n3"}                                                                          0+900x30
  lustre_read_bytes_total{host="n1",component="client",target="fs"}                                        0+60x30
  lustre_read_bytes_total{host="n1",component="ost",target="fs"}                                           0+600x30
  lustre_client_stats{host="n1",operation="open",target="fs"}                                              0+30x30
  lustre_client_stats{host="n1",operation="statfs",target="fs"}                                            0+30x30
  lustre_client_stats{host="n3",operation="open",target="fs"}                                              0+90x30
  lustre_stats_total{host="n2",component="client",operation="getattr",target="fs"}                         0+15x30
  instance:training_data_stall:ratio_rate5m{run="lm",instance="a1"}                                        0.2x30
  instance:training_data_stall:ratio_rate5m{run="other",instance="a3"}                                     0.9x30
  instance:host:info{host="n1",instance="a1"}                                                              1x30
  instance:host:info{host="n3",instance="a3"}                                                              1x30
  infiniband_gpu_affinity_info{device="mlx5_0",port="1",gpu="0",uuid="A",affinity="SYS",instance="a1"}     1x30
  infiniband_gpu_affinity_info{device="mlx5_0",port="1",gpu="4",uuid="B",affinity="PIX",instance="a2"}     1x30
  infiniband_gpu_affinity_info{device="mlx5_1",port="1",gpu="4",uuid="B",affinity="PIX",instance="a2"}     1x30
  infiniband_gpu_affinity_info{device="mlx5_2",port="1",gpu="4",uuid="B",affinity="PIX",instance="a2"}     1x30
  infiniband_info{device="mlx5_0",port="1",host="n1",role="compute",instance="a1"}                         1x30
  infiniband_info{device="mlx5_0",port="1",host="n2",role="compute",instance="a2"}                         1x30
  infiniband_info{device="mlx5_1",port="1",host="n2",role="compute",instance="a2"}                         1x30
  infiniband_info{device="mlx5_2",port="1",host="n2",role="storage",instance="a2"}                         1x30
  infiniband_port_state_id{device="mlx5_0",port="1",instance="a1"}                                         4x30
  infiniband_port_state_id{device="mlx5_0",port="1",instance="a2"}                                         4x30
  infiniband_port_state_id{device="mlx5_1",port="1",instance="a2"}                                         1x30
  infiniband_port_state_id{device="mlx5_2",port="1",instance="a2"}                                         4x30
"""
PORT = '{key="1 mlx5_%s 1"%s}'
PLACE = ', rank="1", host="n2", gpu="4", device="mlx5_%s", port="1", affinity="PIX"'
FROM_OTHERS: dict[tuple[str, str], dict[str, float]] = {
    ("Ports nearest to these GPUs", "A"): {PORT % (device, PLACE % device): 1 for device in "01"},
    ("Ports nearest to these GPUs", "B"): {PORT % (device, ""): 0.1 for device in "01"},
    ("Ports nearest to these GPUs", "C"): {PORT % ("0", ""): 4, PORT % ("1", ""): 1},
    ("CPUs of the hosts of these ranks", "A"): {'{host="n1"}': 0.2, '{host="n2"}': 0.4},
    ("CPUs of the hosts of these ranks", "B"): {'{host="n2"}': 7},
    ("CPUs of the hosts of these ranks", "C"): {'{host="n2"}': 0.04},
    ("CPUs of the hosts of these ranks", "D"): {'{host="n1"}': 2e9},
    ("CPUs of the hosts of these ranks", "E"): {'{host="n1"}': 0},
    ("Waiting for data, by host", "A"): {'{run="lm", instance="a1", host="n1"}': 0.2},
    ("Time of a storage read", "A"): {
        '{host="n1", name="n1", instance="e1", nodename="n1.example.org", export="nas:/a"}': 0.1
    },
    ("Time of a storage read", "B"): {'{host="n1", host_name="n1"}': 0.003},
    ("Time of a storage read", "C"): {'{host="n2"}': 0.2},
    ("Bytes read from storage", "A"): {'{export="nas:/a"}': 30},
    ("Bytes read from storage", "B"): {"{}": 4},
    ("Bytes read from storage", "C"): {"{}": 120},
    ("Bytes read from storage", "D"): {"{}": 30},
    ("Lustre calls", "A"): {'{operation="open"}': 2},
    ("Lustre calls", "B"): {'{operation="getattr"}': 1},
}


def test_ports_cpus_and_storage_clients_are_those_of_the_run_s_own_hosts(tmp_path: Path) -> None:
    asked = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "6m",
            "exp_samples": [
                {"labels": labels, "value": value} for labels, value in FROM_OTHERS[panel["title"], ref].items()
            ],
        }
        for name, panel in PANELS
        if name in ("run", "stragglers")
        for ref, (_, query) in zip(
            "ABCDEF", dashboards.queries({"panels": [panel]}, VARIABLES | {"run": "lm"}), strict=False
        )
        if (panel["title"], ref) in FROM_OTHERS
    ]
    assert len(asked) == len(FROM_OTHERS)
    group = {
        "interval": "15s",
        "input_series": [
            dict(zip(("series", "values"), map(str.strip, line.rsplit(maxsplit=1)), strict=True))
            for line in OTHERS.strip().splitlines()
        ],
        "promql_expr_test": asked,
    }
    (tmp_path / "others.yaml").write_text(yaml.safe_dump({"tests": [group]}))
    done = rule_test(find().promtool, tmp_path / "others.yaml", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


# A day of two runs on 256 and 8 GPUs, in GPU-seconds. The first waits 24 % of each step for a straggler, and the waits
# of the second are not measured.
DAY = """
  run:run_gpu_seconds:difference_1d{tenant="t",run="lm",bucket="productive"}  20000000
  run:run_gpu_seconds:difference_1d{tenant="t",run="lm",bucket="down"}        2000000
  run:run_gpu_seconds:difference_1d{tenant="t",run="lm",bucket="queue"}       1000000
  run:run_gpu_seconds:difference_1d{run="small",bucket="productive"}          600000
  run:run_gpu_seconds:difference_1d{run="small",bucket="lost"}                36000
  run:training_straggler_lost:ratio_1d{run="lm"}                              0.24
"""


def test_the_fleet_s_cost_of_lost_time_includes_the_waits_for_stragglers(tmp_path: Path) -> None:
    series = [line.rsplit(maxsplit=1) for line in DAY.strip().splitlines()]
    lost = (2_000_000 + 0.24 * 20_000_000) * 2.5 / 3600, 36_000 * 2.5 / 3600
    shown = {
        ("Lost, one day", "A"): {"{}": sum(lost)},
        ("Runs", "I"): {'{run="lm"}': lost[0], '{run="small"}': lost[1]},
    }
    asked = [
        {
            "expr": f"round({query}, 0.01)",
            "eval_time": "1m",
            "exp_samples": [
                {"labels": labels, "value": round(value, 2)} for labels, value in shown[panel["title"], ref].items()
            ],
        }
        for name, panel in PANELS
        if name == "fleet"
        for ref, (_, query) in zip("ABCDEFGHI", dashboards.queries({"panels": [panel]}, VARIABLES), strict=False)
        if (panel["title"], ref) in shown
    ]
    assert len(asked) == len(shown)
    group = {
        "interval": "15s",
        "input_series": [{"series": name.strip(), "values": f"{value}x8"} for name, value in series],
        "promql_expr_test": asked,
    }
    (tmp_path / "day.yaml").write_text(yaml.safe_dump({"tests": [group]}))
    done = rule_test(find().promtool, tmp_path / "day.yaml", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", BOARDS)
def test_the_charts_dashboard_is_what_the_code_writes(name: str) -> None:
    committed = ROOT / "helm" / "files" / "dashboards" / f"{name}.json"
    assert committed.read_text(encoding="utf-8") == text(BOARDS[name]), "stale: run `make generate`"


def test_python_m_dashboards_writes_each_dashboard(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dashboards", str(tmp_path / "out")],
        cwd=ROOT,
        check=True,
        env=os.environ | {"PYTHONPATH": "exporter"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "out" / f"{name}.json") for name in BOARDS]
    assert (tmp_path / "out" / "run.json").read_text(encoding="utf-8") == text(run.BOARD)


def test_only_the_modules_of_panels_and_boards_import_grafanalib() -> None:
    importers = set()
    for path in (*ROOT.glob("dashboards/*.py"), *ROOT.glob("alerts/*.py"), *ROOT.glob("exporter/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            )
            if any(name.split(".")[0] == "grafanalib" for name in names):
                importers.add(str(path.relative_to(ROOT)))
    assert importers == {"dashboards/__init__.py", "dashboards/panels.py"}
