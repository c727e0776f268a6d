"""The rules for dcgm-exporter: our series from its own, before and after 4.9, and shipped alerts and panels over them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

import dashboards
from alerts import AlertSettings, as_yaml
from alerts.dcgm import FIELDS, RECORDS, UNITS, dcgm_rules
from dashboards.__main__ import BOARDS
from demo.servers import find
from flopwatch import catalogue as m
from flopwatch.catalogue.xid import xids
from flopwatch.node.scrape.compat import ALIASES, Compatibility
from simulator.promtool import rule_test
from tests.support import ROOT, TESTS
from tests.support.dcgm_series import DCGM, OWN, Scrape, input_series, is_of_a_gpu, own, parsed
from tests.support.promql_labels import labels_of
from tests.support.promql_parts import parts
from tests.support.simulated_host import Node

OPTIONAL = ROOT / "helm" / "files" / "optional" / "dcgm.yaml"
SHIPPED = [ROOT / "helm" / "files" / "rules" / f"{tier}.yaml" for tier in ("host", "run", "fleet")]
GENERATIONS = ("4.8", "4.9")
INTERVAL = 15
HERE = '{instance="10.0.0.1:9400",job=""}'  # what the rules record

Case = Mapping[str, Any]


def judge(
    folder: Path, series: Sequence[Mapping[str, str]], *, alerts: Sequence[Case] = (), exprs: Sequence[Case] = ()
) -> None:
    """Evaluate the rules for dcgm-exporter, and with `alerts` the shipped ones, over series of 15 s."""
    rules = [OPTIONAL, *(SHIPPED if alerts else ())]
    for path in rules:
        (folder / path.name).write_text(path.read_text(encoding="utf-8"))
    test = {"interval": f"{INTERVAL}s", "input_series": list(series)}
    test |= {"alert_rule_test": list(alerts), "promql_expr_test": list(exprs)}
    names = [path.name for path in rules]
    content = {"rule_files": names, "group_eval_order": _groups(rules), "evaluation_interval": "15s", "tests": [test]}
    (folder / "test.json").write_text(json.dumps(content))
    done = rule_test(find().promtool, folder / "test.json", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def _groups(rules: Sequence[Path]) -> list[str]:
    return [group["name"] for path in rules for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]


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


# The simulated node: --expose dcgm and back.


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Scrape]]:
    """Return ten minutes of a node's scrapes: flopwatch's series, and those of dcgm-exporter of each generation."""
    node = Node(tmp_path_factory.mktemp("node"))
    node.load(1, 0.3)
    node.ecc(2, corrected=3)
    node.run(45)
    node.samples()
    made = {generation: Compatibility(f"dcgm-{generation}", lambda: node.now) for generation in GENERATIONS}
    scrapes: dict[str, list[Scrape]] = {name: [] for name in ("own", *GENERATIONS)}
    for number in range(40):
        node.run(INTERVAL)
        if number == 20:
            node.throttle(5, "sw_power_cap")
            node.ecc(2, uncorrected=1)
        samples = node.samples()
        scrapes["own"].append(own(samples))
        for generation, compatibility in made.items():
            scrapes[generation].append(parsed(compatibility.render(samples)))
    return scrapes


# Half of a unit of dcgm-exporter until 4.8, except for MiB, which DCGM rounds down.
ROUNDED = {"MHz": 0.5e6, "%": 0.005, "MiB": 2**20, "mJ": 0.5e-3, "ns": 0.5e-9}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_series_of_expose_dcgm_come_back_as_our_own(
    node: dict[str, list[Scrape]], generation: str, tmp_path: Path
) -> None:
    series = [*input_series(node[generation], DCGM), *input_series(node["own"], OWN, prefix="own_")]
    end = INTERVAL * (len(node["own"]) - 1)
    cases, compared = [], set()
    rows = {(alias.row, alias.labels): alias for alias in ALIASES if alias.how in ("value", "share", "rate")}
    rows |= {(m.GPU_PROFILED_SECONDS_TOTAL, ()): next(alias for alias in ALIASES if alias.how == "share")}
    for (row, label), alias in rows.items():
        if alias.id == 449:  # one value for both directions
            continue
        matchers = f'gpu!="",{row.labels[-1]}="{label[0]}"' if label else 'gpu!=""'
        ours, theirs = f"own_{row}{{{matchers}}}", f'{row}{{{matchers},job=""}}'
        count = sum(
            key[0] == row.name and (not label or (row.labels[-1], label[0]) in key[1]) for key in node["own"][-1]
        )
        if not count:
            continue
        compared.add(row.name)
        tolerance = ROUNDED.get(alias.unit if generation == "4.8" else alias.new_unit, 0) + 1e-6
        on = f"on ({', '.join(row.labels)})"
        if alias.how == "value":
            off = f"abs({theirs} - {on} {ours})"
        else:  # the beginning of a counter is unknown to the rules
            off = f"abs(1 - increase({theirs[:-1]}}}[5m]) / {on} increase({ours[:-1]}}}[5m]))"
            tolerance = 1e-6
        same = f"count({off} <= {tolerance!r})"
        if alias.how != "value":
            same = f"count({off} <= {tolerance!r} or increase({theirs}[5m]) == 0 and {on} increase({ours}[5m]) == 0)"
        cases.append(holds(same, count, end))
        cases.append(holds(f"count({theirs})", count, end))
    assert len(compared) >= 25
    by = "gpu, uuid, host, model, pci_bus_id, driver_version"
    cases.append(holds(f'count(gpu_info{{source="dcgm"}} == on ({by}) own_gpu_info)', 8, end))
    cases.append(holds(f"count(gpu_present{HERE} == on (gpu, uuid) own_gpu_present)", 8, end))
    judge(tmp_path, series, exprs=cases)


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


@pytest.mark.parametrize("source", ["flopwatch", "until 4.8", "from 4.9"])
def test_faults_fire_the_same_alerts_as_with_our_exporter_and_no_others(source: str, tmp_path: Path) -> None:
    made = {"flopwatch": ours, "until 4.8": captured, "from 4.9": lambda: renamed(captured())}[source]()
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
