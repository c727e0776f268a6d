"""The rules for dcgm-exporter: our series from its own, before and after 4.9, and alerts and panels over them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

import dashboards
from alerts import AlertSettings, rules
from alerts.alerting import gpu as gpu_alerts
from alerts.alerting import nvlink, xid
from alerts.dcgm import FIELDS, RECORDS, UNITS, dcgm_rules
from dashboards.__main__ import BOARDS
from demo.servers import find
from docs import dcgm_series
from flopwatch import catalogue as m
from flopwatch.catalogue.xid import xids
from flopwatch.node.scrape.compat import ALIASES, Compatibility
from simulator.promtool import rule_test
from tests.support import ROOT, TESTS
from tests.support.dcgm_series import DCGM, OWN, Scrape, input_series, own, parsed
from tests.support.promql_parts import parts
from tests.support.rule_files import possible
from tests.support.simulated_host import Node

OPTIONAL = ROOT / "helm" / "files" / "optional" / "dcgm.yaml"
SHIPPED = [ROOT / "helm" / "files" / "rules" / f"{tier}.yaml" for tier in ("host", "run", "fleet")]
GENERATIONS = ("4.8", "4.9")
INTERVAL = 15
HERE = '{instance="10.0.0.1:9400",job=""}'  # what the rules record

Case = Mapping[str, Any]


def evaluated(
    folder: Path, rules: str, series: Sequence[Mapping[str, str]], alerts: Sequence[Case], exprs: Sequence[Case]
) -> subprocess.CompletedProcess[str]:
    """Evaluate `rules`, and if there are `alerts` the shipped rules, over series with a sample every 15 s."""
    files = {"dcgm.yaml": rules} | {path.name: path.read_text(encoding="utf-8") for path in SHIPPED if alerts}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    order = [group["name"] for text in files.values() for group in yaml.safe_load(text)["groups"]]
    test = {"interval": f"{INTERVAL}s", "input_series": list(series)}
    test |= {"alert_rule_test": list(alerts), "promql_expr_test": list(exprs)}
    content = {"rule_files": list(files), "group_eval_order": order, "evaluation_interval": "15s", "tests": [test]}
    (folder / "test.json").write_text(json.dumps(content))
    return rule_test(find().promtool, folder / "test.json", timeout=240)


def judge(
    folder: Path, series: Sequence[Mapping[str, str]], *, alerts: Sequence[Case] = (), exprs: Sequence[Case] = ()
) -> None:
    """Assert that the file of the chart, with the shipped rules if there are `alerts`, gives what is expected."""
    done = evaluated(folder, OPTIONAL.read_text(encoding="utf-8"), series, alerts, exprs)
    assert done.returncode == 0, done.stdout + done.stderr


def holds(expr: str, value: float | None = 1, at: float = 0) -> Case:
    """Return the case that an expression has one series without labels, or with None has no series."""
    samples = [] if value is None else [{"labels": "{}", "value": value}]
    return {"expr": expr, "eval_time": f"{at:g}s", "exp_samples": samples}


def test_every_rule_keeps_to_one_exporter_and_records_a_row_with_its_labels() -> None:
    assert {name for one in FIELDS for name in (unit for _, unit in one.names)} <= UNITS.keys()
    for record in RECORDS:
        rule = record.rule(AlertSettings())
        expr = promql_parser.parse(str(rule["expr"]))
        kept = labels_in(expr)
        assert kept <= {*record.row.labels, "instance"}, record
        assert set(record.labels) <= set(record.row.labels), record
        assert "instance" in kept, record
        for part in parts(expr):
            if isinstance(part, promql_parser.VectorSelector) and not (part.name or "").startswith("DCGM_"):
                assert part.name in m.BY_NAME, record


def labels_in(expr: Any) -> set[str]:
    """Return the labels that the outermost aggregations of an expression keep."""
    match expr:
        case promql_parser.AggregateExpr():
            named = {"xid"} if expr.param is not None else set()
            assert expr.modifier is not None
            return {*expr.modifier.labels, *named}
        case promql_parser.BinaryExpr():
            return labels_in(expr.lhs) | (set() if str(expr.op) in ("and", "unless") else labels_in(expr.rhs))
        case promql_parser.ParenExpr():
            return labels_in(expr.expr)
        case promql_parser.VectorSelector():
            return {"instance"}
    return set()


def test_a_group_has_no_more_rules_than_a_ruler_of_mimir_accepts() -> None:
    groups: Any = dcgm_rules(AlertSettings())["groups"]
    assert max(len(group["rules"]) for group in groups) <= 35


def test_the_docs_list_a_source_or_a_reason_for_each_series_of_gpus() -> None:
    with_source = {text.strip("`").partition("{")[0] for text, *_ in dcgm_series.fed()}
    without = {text.strip("`") for text, _ in dcgm_series.absent()}
    assert with_source | without == {row.name for row in dcgm_series.of_gpus()}
    assert without == set(dcgm_series.ABSENT)
    page = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8")
    advised = re.findall(r"`(DCGM_\w+)`", page.partition("**Off by default.**")[2].partition("- **Means.**")[0])
    assert len(advised) >= 6
    assert set(advised) <= {name for record in RECORDS for name in record.fields} - dcgm_series.defaults()


def test_the_docs_list_the_alerts_on_gpus_that_cannot_fire() -> None:
    there, alerting = {record.row.name for record in RECORDS}, set[str]()
    groups: Any = rules(AlertSettings())["groups"]
    shipped = [rule for group in groups for rule in group["rules"]]
    before = -1
    while before < len(there) + len(alerting):
        before = len(there) + len(alerting)
        for rule in shipped:
            if possible(promql_parser.parse(rule["expr"]), there, alerting):
                (there if "record" in rule else alerting).add(rule.get("record") or rule["alert"])
    never = {alert.name for module in (gpu_alerts, nvlink, xid) for alert in module.ALERTS} - alerting
    page = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8")
    listed = page.partition("that cannot fire: ")[2].partition(". Alerts on")[0]
    assert set(re.findall(r"[A-Z]\w+", listed)) == never
    assert {fault.alert for fault in FAULTS} <= alerting


# The simulated node: --expose dcgm and back.


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Scrape]]:
    """Return ten minutes of a node's scrapes: flopwatch's series, and those of dcgm-exporter of each generation."""
    node = Node(tmp_path_factory.mktemp("node"))
    node.load(1, 0.3)
    node.run(45)
    node.samples()
    made = {generation: Compatibility(f"dcgm-{generation}", lambda: node.now) for generation in GENERATIONS}
    scrapes: dict[str, list[Scrape]] = {name: [] for name in ("own", *GENERATIONS)}
    for number in range(40):
        node.run(INTERVAL)
        if number == 20:
            node.throttle(5, "sw_power_cap")
            node.ecc(2, uncorrected=1, corrected=3)
        samples = node.samples()
        scrapes["own"].append(own(samples))
        for generation, compatibility in made.items():
            scrapes[generation].append(parsed(compatibility.render(samples)))
    return scrapes


# Half of a unit of dcgm-exporter until 4.8, except for MiB, which DCGM rounds down.
ROUNDED = {"MHz": 0.5e6, "%": 0.005, "MiB": 2**20, "mJ": 0.5e-3, "ns": 0.5e-9}


def comparison(node: dict[str, list[Scrape]], generation: str) -> tuple[list[dict[str, str]], list[Case]]:
    """Return the series of both exporters, flopwatch's under names with own_, and cases that both are the same."""
    series = [*input_series(node[generation], DCGM), *input_series(node["own"], OWN, prefix="own_")]
    end = INTERVAL * (len(node["own"]) - 1)
    cases, compared = [], set()
    rows = {(alias.row, alias.labels): alias for alias in ALIASES if alias.how in ("value", "share", "rate")}
    rows |= {(m.GPU_PROFILED_SECONDS_TOTAL, ()): next(alias for alias in ALIASES if alias.how == "share")}
    for (row, label), alias in rows.items():
        count = sum(
            key[0] == row.name and (not label or (row.labels[-1], label[0]) in key[1]) for key in node["own"][-1]
        )
        if not count or alias.id == 449:  # one value for both directions
            continue
        compared.add(row.name)
        matchers = f'gpu!="",{row.labels[-1]}="{label[0]}"' if label else 'gpu!=""'
        ours, theirs = f"own_{row}{{{matchers}}}", f'{row}{{{matchers},job=""}}'
        on = f"on ({', '.join(row.labels)})"
        if alias.how == "value":
            tolerance = ROUNDED.get(alias.unit if generation == "4.8" else alias.new_unit, 0) + 1e-6
            same = f"abs({theirs} - {on} {ours}) <= {tolerance!r}"
        else:  # the beginning of a counter is unknown to the rules
            rises = [f"increase({selector}[5m])" for selector in (theirs, ours)]
            same = f"abs({rises[0]} - {on} {rises[1]}) <= {on} 1e-6 * {rises[1]}"
        cases += [holds(f"count({same})", count, end), holds(f"count({theirs})", count, end)]
    assert len(compared) >= 25
    by = "gpu, uuid, host, model, pci_bus_id, driver_version"
    cases.append(holds(f'count(gpu_info{{source="dcgm"}} == on ({by}) own_gpu_info)', 8, end))
    cases.append(holds(f"count(gpu_present{HERE} == on (gpu, uuid) own_gpu_present)", 8, end))
    return series, cases


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_series_of_expose_dcgm_come_back_as_our_own(
    node: dict[str, list[Scrape]], generation: str, tmp_path: Path
) -> None:
    series, cases = comparison(node, generation)
    judge(tmp_path, series, exprs=cases)


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (" * 1e6", " * 1e3"),
        (" / 1e3", ""),
        (" / 100", ""),
        (" * 1048576", " * 1000000"),
        (" / 1e9", " / 1e6"),
        ("time() - timestamp(", "10 + 0 * timestamp("),
        ('"uuid", "$1", "UUID"', '"uuid", "$1", "gpu"'),
        ('"model", "$1", "modelName"', '"model", "$1", "device"'),
        ("error: uncorrected", "error: fatal"),
    ],
)
def test_a_wrong_factor_or_label_is_found(
    node: dict[str, list[Scrape]], right: str, wrong: str, tmp_path: Path
) -> None:
    series, cases = comparison(node, "4.8")
    rules = OPTIONAL.read_text(encoding="utf-8")
    assert right in rules
    done = evaluated(tmp_path, rules.replace(right, wrong), series, (), cases)
    assert (done.returncode, "FAILED" in done.stderr) == (1, True), done.stderr


# The capture of a dcgm-exporter, with a fault on each GPU from 1 on.

CAPTURE = parsed((TESTS / "captures" / "dcgm" / "dcgm_exporter_h100.prom").read_text(encoding="utf-8"))
GPU_LABELS = {
    dict(labels)["gpu"]: {name: value for name, value in labels if name not in ("container", "namespace", "pod")}
    for name, labels in CAPTURE
    if name == "DCGM_FI_DEV_GPU_TEMP"
}
UUIDS = {gpu: labels["UUID"] for gpu, labels in GPU_LABELS.items()}
LINKS = 18
SCRAPES, BEGIN = 80, 20  # twenty minutes, with the faults from the fifth on
FACTORS = {"MHz": 1e6, "mJ": 1e-3, "%": 0.01, "MiB": 2**20, "ns": 1e-9, "MB/s": 1_024_000}
LINK_STATE = "DCGM_FI_DEV_NVLINK_GET_STATE"
RENAMED = {one.names[0][0]: one.names for one in FIELDS} | {
    LINK_STATE: ((LINK_STATE, ""), ("DCGM_FI_DEV_NVLINK_LINK_STATUS", ""))
}


@dataclass(frozen=True)
class Fault:
    """Alert on one GPU: fields of dcgm-exporter and series of flopwatch, each with the value before and after."""

    alert: str
    gpu: str
    severity: str
    summary: str
    description: str
    fields: Mapping[str, tuple[float | None, float | None]]
    own: Mapping[str, tuple[float | None, float | None]]
    labels: Mapping[str, str] = field(default_factory=dict)

    def expected(self, source: str) -> Case:
        # The index of a GPU is unknown five minutes after its last series.
        index = "" if self.alert == "GpuMissing" and source != "flopwatch" else f" {self.gpu}"
        uuid = UUIDS[self.gpu]
        return {
            "exp_labels": {"host": "gpu-node-1", "uuid": uuid, "severity": self.severity, **self.labels},
            "exp_annotations": {
                "summary": self.summary,
                "description": f"GPU{index} ({uuid}) of gpu-node-1 {self.description}",
                "runbook_url": f"alerts/runbooks/{self.alert}.md",
                "dashboard_url": "/d/flopwatch-node?var-host=gpu-node-1&from=now-6h&to=now",
            },
        }


RISING = -1.0  # a counter of seconds, from the begin of the fault on
FAULTS = (
    Fault(
        "GpuHot",
        "1",
        "warning",
        "GPU is close to thermal throttling",
        "is less than 3 degrees Celsius below the temperature at which it slows down. Its temperature is 88 degrees "
        "Celsius.",
        {"DCGM_FI_DEV_SLOWDOWN_TEMP": (90, 90), "DCGM_FI_DEV_GPU_TEMP": (29, 88)},
        {'gpu_temperature_limit_celsius{limit="slowdown"}': (90, 90), "gpu_temperature_celsius": (29, 88)},
    ),
    Fault(
        "GpuThermalThrottling",
        "2",
        "warning",
        "GPU is throttled by heat",
        "was throttled by heat for 100% of the last 5m. Its temperature is 26 degrees Celsius.",
        {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": (0x1, 0x40 | 0x4)},
        {'gpu_clock_event_seconds_total{reason="hw_thermal_slowdown"}': (None, RISING)},
    ),
    Fault(
        "GpuEccUncorrected",
        "3",
        "warning",
        "GPU had uncorrectable memory errors",
        "had uncorrectable memory errors, which end the process that reads the memory. Errors in the last 30m: 1.",
        {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": (0, 1)},
        {'gpu_ecc_errors_total{error="uncorrected"}': (0, 1)},
    ),
    Fault(
        "GpuRepairPending",
        "4",
        "warning",
        "GPU repair waits for a reset",
        "needs a reset for a repair. Until then the faulty part may fail again. The reset replaces faulty memory rows "
        "by spare rows.",
        {"DCGM_FI_DEV_ROW_REMAP_PENDING": (0, 1)},
        {"gpu_row_remap_pending": (0, 1)},
    ),
    Fault(
        "NvlinkDown",
        "5",
        "critical",
        "NVLinks of a GPU are down",
        "has lost NVLinks. NVLinks that went down: 1. NVLinks that are up: 17. Collectives hang or fail.",
        {f"{LINK_STATE}/{link}": (1, 0 if link == 5 else 1) for link in range(LINKS)},
        {'nvlink_link_state_id{link="5"}': (None, 0), 'nvlink_links{state="active"}': (18, 17)},
    ),
    Fault(
        "GpuXidCritical",
        "6",
        "critical",
        "GPU cannot run jobs after an Xid",
        f"reported Xid 48 ({xids()[48].name}). {xids()[48].page}",
        {"DCGM_FI_DEV_XID_ERRORS": (0, 48)},
        {'gpu_xid_last_timestamp_seconds{xid="48"}': (None, INTERVAL * BEGIN)},
        {"xid": "48"},
    ),
    Fault(
        "GpuMissing",
        "7",
        "critical",
        "GPU does not answer",
        "does not answer. It reported no critical Xid in the last 1d. Drain and reboot the host.",
        {"*": (1, None)},
        {"gpu_present": (1, 0)},
    ),
)


def of_gpu(name: str, gpu: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return name and labels as dcgm-exporter writes them for a GPU or, with NAME/LINK, for one of its links."""
    name, _, link = name.partition("/")
    labels = GPU_LABELS[gpu]
    if link:
        labels = {"nvlink": link, "gpu": gpu, "gpu_uuid": labels["UUID"], "hostname": labels["Hostname"]}
    return name, frozenset(labels.items())


def captured() -> list[Scrape]:
    """Return scrapes of the captured dcgm-exporter, with the faults from BEGIN on."""
    scrapes: list[Scrape] = []
    for number in range(SCRAPES):
        scrape = dict(CAPTURE)
        for fault in FAULTS:
            for name, values in fault.fields.items():
                value = values[number >= BEGIN]
                if name != "*":
                    assert value is not None
                    scrape[of_gpu(name, fault.gpu)] = value
                elif value is None:
                    scrape = {key: one for key, one in scrape.items() if ("gpu", fault.gpu) not in key[1]}
        scrapes.append(scrape)
    return scrapes


def renamed(scrapes: Sequence[Scrape]) -> list[Scrape]:
    """Return scrapes of dcgm-exporter until 4.8 under the names, units and labels of 4.9."""
    labels_of_4_9 = {"Hostname": "hostname", "DCGM_FI_DRIVER_VERSION": "DCGM_FI_SYSTEM_DRIVER_VERSION"}
    made: list[Scrape] = []
    for scrape in scrapes:
        new = {}
        for (name, labels), value in scrape.items():
            names = RENAMED.get(name, ((name, ""),))  # masks keep their names
            (_, unit), (target, of_4_9) = names[0], names[-1]
            key = target, frozenset((labels_of_4_9.get(label, label), text) for label, text in labels)
            new[key] = value if unit == of_4_9 else value * FACTORS[unit]
        made.append(new)
    return made


def ours() -> list[Scrape]:
    """Return the scrapes of flopwatch's exporter on the captured host, with the same faults."""

    def key(series: str, gpu: str) -> tuple[str, frozenset[tuple[str, str]]]:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
        return series.partition("{")[0], frozenset((labels | {"gpu": gpu, "uuid": UUIDS[gpu]}).items())

    scrapes: list[Scrape] = []
    for number in range(SCRAPES):
        scrape: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for gpu in UUIDS:
            scrape |= {key('gpu_info{host="gpu-node-1"}', gpu): 1, key("gpu_present", gpu): 1}
            scrape[key("gpu_temperature_celsius", gpu)] = CAPTURE.get(of_gpu("DCGM_FI_DEV_GPU_TEMP", gpu), 30)
        for fault in FAULTS:
            for series, values in fault.own.items():
                value = values[number >= BEGIN]
                if value is not None:
                    scrape[key(series, fault.gpu)] = INTERVAL * (number - BEGIN) if value == RISING else value
        scrapes.append(scrape)
    return scrapes


@pytest.mark.long
@pytest.mark.parametrize("source", ["flopwatch", "until 4.8", "from 4.9"])
def test_faults_fire_the_same_alerts_as_with_our_exporter_and_no_others(source: str, tmp_path: Path) -> None:
    made = ours() if source == "flopwatch" else captured()
    made = renamed(made) if source == "from 4.9" else made
    cases: list[Case] = [{"alertname": fault.alert, "eval_time": "4m45s", "exp_alerts": []} for fault in FAULTS]
    cases += [
        {"alertname": fault.alert, "eval_time": "18m", "exp_alerts": [fault.expected(source)]} for fault in FAULTS
    ]
    only = {
        "expr": 'group by (alertname, uuid) (ALERTS{alertstate="firing",alertname!="FlopwatchWatchdog"})',
        "eval_time": "18m",
        "exp_samples": [
            {"labels": f'{{alertname="{fault.alert}", uuid="{UUIDS[fault.gpu]}"}}', "value": 1} for fault in FAULTS
        ],
    }
    judge(tmp_path, list(input_series(made, OWN if source == "flopwatch" else DCGM)), alerts=cases, exprs=[only])


# Panels over a dcgm-exporter alone.

BOARD_VARIABLES = {
    "host": "node1",
    "uuid": "GPU-51a70000-0000-4000-8000-000000000005",
    "model": ".*",
    "rack": ".*",
    "run": ".*",
    "tenant": ".*",
    "__rate_interval": "1m",
    "__range": "1h",
}
# Values of fields that flopwatch does not expose, of every GPU. Others are 0.
FURTHER = {
    "DCGM_FI_DEV_SLOWDOWN_TEMP": 90.0,
    "DCGM_FI_DEV_MAX_SM_CLOCK": 1980.0,
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": 16.0,
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": 16.0,
    "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF": 700.0,
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": 1.0,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": float(0x4),
}


def further(scrapes: Sequence[Scrape], generation: str) -> list[Scrape]:
    """Return scrapes with the fields that dcgm-exporter has only if its list of metrics names them."""
    made: list[Scrape] = []
    exposed = {alias.old for alias in ALIASES}
    for number, scrape in enumerate(scrapes):
        more: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for name, labels in scrape:
            if not name.startswith("DCGM_FI_DEV_GPU_TEMP"):
                continue
            for one in FIELDS:
                (old, unit), (new, of_4_9) = one.names[0], one.names[-1]
                if old in exposed:
                    continue
                value = FURTHER.get(old, 0.0)
                value = value * FACTORS.get(unit, 1) if generation == "4.9" and unit != of_4_9 else value
                counted = one.row.type == "counter"
                more[new if generation == "4.9" else old, labels] = value + 1e9 * number * counted
            more["DCGM_FI_DEV_CLOCKS_EVENT_REASONS", labels] = FURTHER["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"]
            more["DCGM_FI_DEV_XID_ERROR" if generation == "4.9" else "DCGM_FI_DEV_XID_ERRORS", labels] = (
                13.0 if number > 20 else 0.0
            )
            of_link = {"gpu": dict(labels)["gpu"], "gpu_uuid": dict(labels)["UUID"], "hostname": "node1"}
            for link in range(LINKS):
                state = RENAMED[LINK_STATE][generation == "4.9"][0]
                more[state, frozenset((of_link | {"nvlink": str(link)}).items())] = 1.0
        made.append({**scrape, **more})
    return made


# Ranks are from the hook, ports and place from flopwatch's exporter.
UNFED = {"gpu: Ranks", "node: Location", "node: Port states", "node: Port traffic", "node: Port errors", "node: Ranks"}
# Queries of panels for what no GPU of this node has: a fault, an owner, or a value in that range.
EMPTY = {
    "gpus: GPUs that need attention": {"D", "G", "H", "I"},
    "gpus: GPUs by utilisation": {"A", "C"},
    "gpus: GPUs by tensor activity": {"A", "D"},
    "gpus: GPUs by memory in use": {"A", "B", "D"},
    "gpus: PCIe replays, one hour": {"A"},
    "gpus: Allocated but unused GPUs": {"A"},
}


@pytest.mark.long
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_panel_that_can_be_fed_has_data(node: dict[str, list[Scrape]], generation: str, tmp_path: Path) -> None:
    series = list(input_series(further(node[generation], generation), DCGM))
    end = INTERVAL * (len(node["own"]) - 1)
    cases = []
    for board in ("gpu", "gpus", "node"):
        for panel in BOARDS[board]["panels"]:
            for target in panel.get("targets", ()):
                _, query = next(dashboards.queries({"panels": [panel | {"targets": [target]}]}, BOARD_VARIABLES))
                place = f"{board}: {panel['title']}"
                fed = place not in UNFED and target["refId"] not in EMPTY.get(place, set())
                cases.append(holds(f"group({query})", 1 if fed else None, end))
    firing = [{"alertname": "GpuHot", "eval_time": f"{end}s", "exp_alerts": []}]
    judge(tmp_path, series, alerts=firing, exprs=cases)


def test_the_docs_state_how_many_series_the_rules_record(node: dict[str, list[Scrape]], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8")
    found = re.search(r"record (\d+) series per GPU with dcgm-exporter's default metrics, and (\d+) with all", page)
    assert found
    every = further(node["4.8"][:10], "4.8")
    served = dcgm_series.defaults()
    usual: list[Scrape] = [{key: value for key, value in scrape.items() if key[0] in served} for scrape in every]
    for number, (stated, scrapes) in enumerate(zip(found.groups(), (usual, every), strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        judge(
            folder, list(input_series(scrapes, DCGM)), exprs=[holds('count({job="",uuid!=""})', 8 * int(stated), 135)]
        )


# One rule at a time.

A, B = "GPU-a", "GPU-b"
NAMED = {
    "gpu": "0",
    "UUID": A,
    "Hostname": "n1",
    "modelName": "H100",
    "pci_bus_id": "0",
    "DCGM_FI_DRIVER_VERSION": "580",
}


def one(name: str, values: str, target: Mapping[str, str] = DCGM, **labels: str) -> dict[str, str]:
    """Return a series of dcgm-exporter, or with other labels of any target."""
    written = ",".join(f'{key}="{value}"' for key, value in {**target, **labels}.items() if value)
    return {"series": f"{name}{{{written}}}", "values": values}


def gpu(name: str, values: str, **labels: str) -> dict[str, str]:
    return one(name, values, DCGM, **{**NAMED, **labels})


def test_a_gpu_of_our_exporter_is_left_out_until_that_exporter_is_gone(tmp_path: Path) -> None:
    other = {"gpu": "1", "UUID": B}
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x80"),
        gpu("DCGM_FI_DEV_GPU_TEMP", "60x80", **other),
        gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.5x80"),
        gpu("DCGM_FI_DEV_XID_ERRORS", "0x10 48x70"),
        # Our exporter serves GPU 0 for ten minutes, and has dcgm-exporter's names too.
        one("gpu_info", "1x40 stale", OWN, gpu="0", uuid=A, host="n1", source="nvml"),
        one("gpu_present", "1x40 stale", OWN, gpu="0", uuid=A),
        one("gpu_temperature_celsius", "50x40 stale", OWN, gpu="0", uuid=A),
        one("DCGM_FI_DEV_GPU_TEMP", "50x40 stale", OWN, **NAMED),
    ]
    own_gpu, others = f'{{uuid="{A}",job=""}}', f'{{uuid="{B}",job=""}}'
    recorded = f'count({{uuid="{A}",job="",__name__!~"ALERTS.*"}})'
    exprs = [
        holds(recorded, None, 600),
        holds("count(gpu_temperature_celsius)", 2, 600),
        holds(f"max(gpu_temperature_celsius{others})", 60, 600),
        holds(f"max(gpu_temperature_celsius{own_gpu})", None, 840),
        # Five minutes after its last series.
        holds(f"max(gpu_temperature_celsius{own_gpu})", 50, 960),
        holds("count(gpu_temperature_celsius)", 2, 960),
        # An Xid of before then has no known time.
        holds("count(gpu_xid_last_timestamp_seconds)", None, 1200),
    ]
    judge(tmp_path, series, exprs=exprs)


def test_a_change_of_the_last_xid_is_a_new_xid_at_that_time(tmp_path: Path) -> None:
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x120"),
        # 31 is older than the rules, 48 comes after five minutes and 79 after ten. 48 comes again after 20 minutes.
        gpu("DCGM_FI_DEV_XID_ERRORS", "31x19 48x19 79x39 48x40"),
        # Its exporter does not answer for one minute, and for seven.
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x10 stale _x3 50x20 stale _x28 50x60", gpu="1", UUID=B),
        gpu("DCGM_FI_DEV_XID_ERRORS", "31x10 stale _x3 31x20 stale _x28 31x60", gpu="1", UUID=B),
    ]

    def at(seconds: float, *xids: tuple[str, float, float]) -> list[Case]:
        last = [{"labels": f'{{xid="{xid}"}}', "value": time} for xid, time, _ in xids]
        count = [{"labels": f'{{xid="{xid}"}}', "value": number} for xid, _, number in xids]
        by = "max by (xid)"
        return [
            {"expr": f"{by} (gpu_xid_last_timestamp_seconds)", "eval_time": f"{seconds}s", "exp_samples": last},
            {"expr": f"{by} (gpu_xid_errors_total)", "eval_time": f"{seconds}s", "exp_samples": count},
        ]

    fatal = "sum by (xid, severity) (gpu_xid_info)"
    exprs = [
        *at(285),
        *at(300, ("48", 300, 1)),
        *at(375, ("48", 300, 1)),
        *at(600, ("48", 300, 1), ("79", 600, 1)),
        *at(1500, ("48", 1200, 2), ("79", 600, 1)),
        {
            "expr": fatal,
            "eval_time": "1500s",
            "exp_samples": [
                {"labels": f'{{severity="{xids()[code].severity}", xid="{code}"}}', "value": 1} for code in (48, 79)
            ],
        },
    ]
    judge(tmp_path, series, exprs=exprs)


def test_a_lost_gpu_is_absent_from_its_exporter_and_a_lost_exporter_loses_no_gpu(tmp_path: Path) -> None:
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x20 stale _x19 50x10 stale _x40"),
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x50 stale _x40", gpu="1", UUID=B),
    ]
    of_a, of_b = (f'max(gpu_present{{uuid="{uuid}"}})' for uuid in (A, B))
    exprs = [
        holds(of_a, 1, 300),
        *(holds(of_a, 0, at) for at in (315, 600)),
        holds(of_b, 1, 600),
        holds(of_a, 1, 615),
        holds(of_b, 0, 765),
        *(holds(query, None, at) for query in (of_a, of_b) for at in (780, 1200)),
    ]
    judge(tmp_path, series, exprs=exprs)


def test_a_counter_of_a_mean_is_its_sum_over_time_and_begins_again_after_a_gap(tmp_path: Path) -> None:
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x120"),
        gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.5x20 0.25x20 stale _x20 0.75x50"),
        gpu("DCGM_FI_PROF_PCIE_TX_BYTES", "1e9x120"),
    ]
    tensor, profiled = "max(gpu_tensor_active_seconds_total)", "max(gpu_profiled_seconds_total)"
    exprs = [
        holds(tensor, 0, 0),
        holds(tensor, 150, 300),
        holds(tensor, 150 + 75, 600),
        holds(profiled, 600, 600),
        holds(tensor, None, 630),
        holds(tensor, 0, 945),
        holds(tensor, 0.75 * 15, 960),
        holds(profiled, 15, 960),
        holds("max(gpu_pcie_transmit_bytes_total)", 600e9, 600),
    ]
    judge(tmp_path, series, exprs=exprs)


def test_instances_of_a_partitioned_gpu_have_their_own_series(tmp_path: Path) -> None:
    mig = {"GPU_I_PROFILE": "1g.10gb"}
    series = [
        series
        for instance, used in (("1", 3), ("2", 5))
        for series in (
            gpu("DCGM_FI_DEV_GPU_TEMP", "50x20", GPU_I_ID=instance, **mig),
            gpu("DCGM_FI_DEV_FB_USED", f"{used}x20", GPU_I_ID=instance, **mig),
            gpu("DCGM_FI_DEV_FB_FREE", "10x20", GPU_I_ID=instance, **mig),
            gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", f"0.{used}x20", GPU_I_ID=instance, **mig),
        )
    ]
    exprs = [
        holds("count(gpu_temperature_celsius)", 1, 300),
        holds("count(gpu_memory_used_bytes or gpu_memory_total_bytes or gpu_tensor_active_seconds_total)", None, 300),
        holds('sum(gpu_mig_memory_used_bytes{gpu_instance="2"})', 5 << 20, 300),
        holds('sum(gpu_mig_memory_total_bytes{gpu_instance="2"})', 15 << 20, 300),
        holds('sum(gpu_mig_tensor_active_seconds_total{gpu_instance="1"})', 90, 300),
        holds('sum(gpu_mig_profiled_seconds_total{gpu_instance="1"})', 300, 300),
    ]
    judge(tmp_path, series, exprs=exprs)


def test_the_owner_of_a_gpu_is_the_pod_that_has_it_and_not_the_exporter_s(tmp_path: Path) -> None:
    owned = {"exported_pod": "train-0", "exported_namespace": "ml", "exported_container": "main"}
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x20", **owned),
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x20", gpu="1", UUID=B),
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x20", gpu="2", UUID="GPU-c", hpc_job="4242"),
    ]
    by = "uuid, host, owner_namespace, owner_pod, owner_container, owner_job, source"
    expected = [
        'uuid="GPU-a", owner_namespace="ml", owner_pod="train-0", owner_container="main", source="dcgm"',
        'uuid="GPU-b", source="unknown"',
        'uuid="GPU-c", owner_job="4242", source="dcgm"',
    ]
    samples = [{"labels": f'{{host="n1", {labels}}}', "value": 1} for labels in expected]
    judge(
        tmp_path,
        series,
        exprs=[{"expr": f"count by ({by}) (gpu_owner_info)", "eval_time": "5m", "exp_samples": samples}],
    )


def test_memory_without_its_total_is_the_sum_of_its_parts_and_time_at_a_bit_gives_way_to_a_counter(
    tmp_path: Path,
) -> None:
    series = [
        gpu("DCGM_FI_DEV_GPU_TEMP", "50x20"),
        gpu("DCGM_FI_DEV_FB_FREE", "10x20"),
        gpu("DCGM_FI_DEV_FB_USED", "5x20"),
        gpu("DCGM_FI_DEV_FB_RESERVED", "1x20"),
        gpu("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", f"{0x20 | 0x4}x20"),
        gpu("DCGM_FI_DEV_POWER_VIOLATION", "7000000000x20"),
        gpu("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", "4x20"),
        gpu("DCGM_FI_DEV_FABRIC_HEALTH_MASK", f"{0b01_10}x20"),
    ]
    seconds = "sum by (reason) (gpu_clock_event_seconds_total)"
    held = [("sw_power_cap", 7), ("sw_thermal_slowdown", 300)]
    exprs: list[Case] = [
        holds("sum(gpu_memory_total_bytes)", 16 << 20, 300),
        holds("sum(gpu_fabric_state_id)", 3, 300),
        {
            "expr": seconds,
            "eval_time": "300s",
            "exp_samples": [{"labels": f'{{reason="{reason}"}}', "value": value} for reason, value in held],
        },
        {
            "expr": "sum by (fault) (gpu_fabric_fault)",
            "eval_time": "300s",
            "exp_samples": [{"labels": '{fault="route_recovery"}', "value": 1}],
        },
        {
            "expr": "sum by (reason) (gpu_clock_event_active)",
            "eval_time": "300s",
            "exp_samples": [
                {"labels": f'{{reason="{reason}"}}', "value": 1} for reason in ("sw_power_cap", "sw_thermal_slowdown")
            ],
        },
    ]
    judge(tmp_path, series, exprs=exprs)
