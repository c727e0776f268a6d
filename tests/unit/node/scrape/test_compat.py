"""dcgm-exporter's names made from our samples: against a capture of dcgm-exporter, its metric list and its queries."""

from __future__ import annotations

import asyncio
import csv
import re
from collections.abc import Sequence
from pathlib import Path

import promql_parser
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.scrape.compat import ALIASES, GENERATIONS, Compatibility
from flopwatch.node.scrape.reader import Reading
from flopwatch.node.scrape.scrape import Registry, Scrape
from flopwatch.settings import ExporterSettings, SettingsError
from tests.support import TESTS
from tests.support.simulated_host import Node

CAPTURES = TESTS / "captures" / "dcgm"
GPU = ("0", "GPU-a")
NOT_KNOWN_HERE = {"DCGM_FI_DEV_VGPU_LICENSE_STATUS"}

Series = tuple[str, frozenset[tuple[str, str]]]


def series(text: str) -> dict[Series, float]:
    """Return the samples of a text by name and labels."""
    return {
        # The parser writes _total behind the name of a counter that does not have it.
        (sample.name.removesuffix("_total"), frozenset(sample.labels.items())): sample.value
        for family in text_families(text)
        for sample in family.samples
    }


def counters(active: bool) -> dict[str, str]:
    """Return name and type of the rows of dcgm-exporter's list: those in use, or those commented out."""
    lines = (CAPTURES / "default-counters.csv").read_text().splitlines()
    wanted = (line.lstrip("# ") for line in lines if line.startswith("#") != active and "," in line)
    rows = ([cell.strip() for cell in row] for row in csv.reader(wanted))
    return {row[0]: row[1] for row in rows if row[0].startswith("DCGM_") and row[1] in ("gauge", "counter")}


def info(gpu: str = "0", uuid: str = "GPU-a", host: str = "node1", **labels: str) -> Sample:
    values = {"gpu": gpu, "uuid": uuid, "host": host, "model": "NVIDIA H100 80GB HBM3", "driver_version": "580.1"}
    values |= {"pci_bus_id": "00000000:53:00.0"} | labels
    return m.GPU_INFO, tuple(values.get(label, "") for label in m.GPU_INFO.labels), 1


def owner(uuid: str = "GPU-a", **labels: str) -> Sample:
    values = {"gpu": "0", "uuid": uuid, "host": "node1"} | labels
    return m.GPU_OWNER_INFO, tuple(values.get(label, "") for label in m.GPU_OWNER_INFO.labels), 1


def rendered(samples: Sequence[Sample], generation: str = "dcgm-4.8") -> list[str]:
    """Return the sample lines without the labels that every GPU has, but for the last ones."""
    text = Compatibility(generation, lambda: 0.0).render(samples)
    return [re.sub(r'gpu="0",UUID.*?modelName="[^"]*",?', "", line) for line in text.splitlines() if line[0] != "#"]


def node(folder: Path) -> Node:
    """Return a node that was read once, so that the next read has bytes over PCIe, which are means between reads."""
    node = Node(folder)
    node.run(45)
    node.samples()
    node.run(15)
    return node


def twice(node: Node, generation: str) -> str:
    """Return the second scrape, 15 s after the first: rates and ratios are means of what was between."""
    compatibility = Compatibility(generation, lambda: node.now)
    compatibility.render(node.samples())
    node.run(15)
    return compatibility.render(node.samples())


def test_the_series_of_a_captured_node_come_out_as_dcgm_exporter_writes_them() -> None:
    captured = series((CAPTURES / "dcgm_exporter_h100.prom").read_text())
    rows = {
        "DCGM_FI_DEV_GPU_TEMP": (m.GPU_TEMPERATURE_CELSIUS, 1.0),
        "DCGM_FI_DEV_POWER_USAGE": (m.GPU_POWER_WATTS, 1e3),
        "DCGM_FI_DEV_GPU_UTIL": (m.GPU_UTILIZATION_RATIO, 1.0),
        "DCGM_FI_DEV_MEM_COPY_UTIL": (m.GPU_MEMORY_COPY_UTILIZATION_RATIO, 1.0),
    }
    samples: list[Sample] = []
    expected: dict[Series, float] = {}
    for (name, pairs), value in captured.items():
        labels = dict(pairs)
        row, per_unit = rows[name]
        samples.append((row, (labels["gpu"], labels["UUID"]), value * per_unit))
        if name == "DCGM_FI_DEV_GPU_TEMP":
            samples.append(
                info(
                    labels["gpu"],
                    labels["UUID"],
                    labels["Hostname"],
                    pci_bus_id=labels["pci_bus_id"],
                    model=labels["modelName"],
                    driver_version=labels["DCGM_FI_DRIVER_VERSION"],
                )
            )
            if "pod" in labels:
                samples.append(
                    owner(
                        labels["UUID"],
                        owner_pod=labels["pod"],
                        owner_namespace=labels["namespace"],
                        owner_container=labels["container"],
                        source="kubelet",
                    )
                )
        labels.pop("pod_uid", None)  # empty, which is the same as absent
        expected[name, frozenset({**labels, "hostname": labels["Hostname"]}.items())] = value
    assert len(expected) == 30
    ours = series(Compatibility("dcgm-4.8").render(samples))
    assert {key: pytest.approx(value) for key, value in expected.items()} == ours


def test_every_default_metric_of_dcgm_exporter_is_there_for_every_gpu(tmp_path: Path) -> None:
    text = twice(node(tmp_path), "dcgm-4.8")
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    default = {name: kind for name, kind in counters(active=True).items() if name not in NOT_KNOWN_HERE}
    assert len(default) == 24
    # dcgm-exporter declares this one a counter, but DCGM's number is a rate.
    assert {name: types.get(name) for name in default} == default | {"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "gauge"}
    found = series(text)
    for name in default:
        labels = [dict(pairs) for (one, pairs) in found if one == name]
        assert sorted(each["gpu"] for each in labels) == list("01234567")
        assert {frozenset(each) - {"err_code", "err_msg"} for each in labels} == {
            frozenset(
                ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname", "DCGM_FI_DRIVER_VERSION")
            )
        }


def test_of_the_metrics_that_dcgm_exporter_has_commented_out_some_are_not_known_here(tmp_path: Path) -> None:
    known = {alias.old for alias in ALIASES}
    assert set(counters(active=False)) - known == {
        "DCGM_EXP_CLOCK_EVENTS_COUNT",
        "DCGM_EXP_GPU_HEALTH_STATUS",
        "DCGM_EXP_P2P_STATUS",
        "DCGM_EXP_XID_ERRORS_COUNT",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_L0",
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    }
    for alias in ALIASES:
        kind = (counters(active=True) | counters(active=False)).get(alias.old)
        assert kind in (None, alias.type) or alias.how == "rate"


def test_4_9_renames_as_many_fields_and_changes_as_many_units_as_its_release_notes_say() -> None:
    default = [alias for alias in ALIASES if alias.old in counters(active=True)]
    renamed = [alias for alias in default if alias.old != alias.new]
    driver = 1  # DCGM_FI_DRIVER_VERSION, which is a label
    assert len(renamed) + driver == 23
    assert sum(alias.unit != alias.new_unit for alias in renamed) == 11


def test_names_and_units_of_both_generations() -> None:
    samples: list[Sample] = [
        info(),
        (m.GPU_SM_CLOCK_HERTZ, GPU, 1980),
        (m.GPU_MEMORY_CLOCK_HERTZ, GPU, 2619),
        (m.GPU_MEMORY_TEMPERATURE_CELSIUS, GPU, 55),
        (m.GPU_TEMPERATURE_CELSIUS, GPU, 58),
        (m.GPU_POWER_WATTS, GPU, 614701),
        (m.GPU_ENERGY_JOULES_TOTAL, GPU, 500326672078),
        (m.GPU_PCIE_REPLAYS_TOTAL, GPU, 9),
        (m.GPU_UTILIZATION_RATIO, GPU, 29),
        (m.GPU_MEMORY_USED_BYTES, GPU, 68000 << 20),
        (m.GPU_MEMORY_TOTAL_BYTES, GPU, 81559 << 20),
        (m.GPU_MEMORY_RESERVED_BYTES, GPU, 479 << 20),
        (m.GPU_REMAPPED_ROWS_TOTAL, (*GPU, "uncorrected"), 2),
        (m.GPU_ROW_REMAP_FAILURE, GPU, 0),
        (m.GPU_CLOCK_EVENT_SECONDS_TOTAL, (*GPU, "sw_power_cap"), 1_000_000_000),
    ]
    old = 'Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1"'
    assert rendered(samples, "dcgm-4.8") == [
        f"{name}{{{old}}} {value}"
        for name, value in (
            ("DCGM_FI_DEV_SM_CLOCK", 1980),
            ("DCGM_FI_DEV_MEM_CLOCK", 2619),
            ("DCGM_FI_DEV_MEMORY_TEMP", 55.0),
            ("DCGM_FI_DEV_GPU_TEMP", 58.0),
            ("DCGM_FI_DEV_POWER_USAGE", 614.701),
            ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 500326672078),
            ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 9),
            ("DCGM_FI_DEV_GPU_UTIL", 29),
            ("DCGM_FI_DEV_POWER_VIOLATION", 1_000_000_000),
            ("DCGM_FI_DEV_FB_TOTAL", 81559),
            ("DCGM_FI_DEV_FB_FREE", 13080),
            ("DCGM_FI_DEV_FB_USED", 68000),
            ("DCGM_FI_DEV_FB_RESERVED", 479),
            ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 2),
            ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 0),
        )
    ]
    new = 'hostname="node1",DCGM_FI_SYSTEM_DRIVER_VERSION="580.1"'
    assert rendered(samples, "dcgm-4.9") == [
        f"{name}{{{new}}} {value}"
        for name, value in (
            ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1980000000),
            ("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 2619000000),
            ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 55.0),
            ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 58.0),
            ("DCGM_FI_DEV_BOARD_POWER_WATTS", 614.701),
            ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 500326672.078),
            ("DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 9),
            ("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.29),
            ("DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL", 1.0),
            ("DCGM_FI_DEV_FB_CAPACITY_BYTES", 81559 << 20),
            ("DCGM_FI_DEV_FB_FREE_BYTES", 13080 << 20),
            ("DCGM_FI_DEV_FB_USED_BYTES", 68000 << 20),
            ("DCGM_FI_DEV_FB_RESERVED_BYTES", 479 << 20),
            ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 2),
            ("DCGM_FI_DEV_ROW_REMAP_FAILED", 0),
        )
    ]


def test_both_generations_together_are_each_as_alone_and_shared_names_carry_the_labels_of_both(tmp_path: Path) -> None:
    samples = [info(), (m.GPU_TEMPERATURE_CELSIUS, GPU, 58), (m.GPU_ECC_ERRORS_TOTAL, (*GPU, "corrected"), 3)]
    both = rendered(samples, "dcgm")
    shared = [line for line in both if line.startswith("DCGM_FI_DEV_ECC")]
    assert shared == [
        'DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1",'
        'DCGM_FI_SYSTEM_DRIVER_VERSION="580.1"} 3'
    ]
    alone = rendered(samples, "dcgm-4.8") + rendered(samples, "dcgm-4.9")
    assert set(both) - set(shared) == {line for line in alone if not line.startswith("DCGM_FI_DEV_ECC")}


def test_what_is_absent_stays_absent() -> None:
    assert rendered([info(), (m.GPU_MEMORY_TOTAL_BYTES, GPU, 1 << 30)], "dcgm-4.8") == [
        'DCGM_FI_DEV_FB_TOTAL{Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1"} 1024'
    ]


def profiled(seconds: float, tensor: float, sent: float) -> list[Sample]:
    return [
        info(),
        (m.GPU_PROFILED_SECONDS_TOTAL, GPU, seconds),
        (m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, GPU, tensor),
        (m.GPU_PCIE_TRANSMIT_BYTES_TOTAL, GPU, sent),
    ]


def means(compatibility: Compatibility, samples: list[Sample]) -> list[float]:
    found = series(compatibility.render(samples))
    return [value for (name, _), value in found.items() if name.startswith("DCGM_FI_PROF")]


def test_ratios_and_rates_are_means_since_the_last_scrape_that_is_ten_seconds_old() -> None:
    now = 0.0
    compatibility = Compatibility("dcgm-4.8", lambda: now)
    reported = []
    for at, seconds, tensor, sent in (
        (0, 100, 50, 0),
        (15, 115, 59, 30e6),
        (20, 120, 64, 40e6),  # another scraper, five seconds later: since 0
        (30, 130, 64, 40e6),  # since 20
        (45, 145, 64, 40e6),  # idle is 0
        (60, 145, 64, 70e6),  # profiling is paused: no ratio
        (75, 5, 5, 1e6),  # the source started again: neither
        (90, 20, 5, 16e6),
        (290, 220, 5, 16e6),  # no scrape for long
        (305, 235, 20, 31e6),
    ):
        now = at
        reported.append(means(compatibility, profiled(seconds, tensor, sent)))
    assert reported == [[], [0.6, 2e6], [0.7, 2e6], [0, 0], [0, 0], [2e6], [], [0, 1e6], [], [1, 1e6]]


def test_nvlink_throughput_is_both_directions_in_dcgms_megabytes() -> None:
    now = 0.0
    compatibility = Compatibility("dcgm", lambda: now)
    compatibility.render([info(), (m.NVLINK_TRANSMIT_BYTES_TOTAL, GPU, 0), (m.NVLINK_RECEIVE_BYTES_TOTAL, GPU, 0)])
    now = 10.0
    found = series(
        compatibility.render(
            [
                info(),
                (m.NVLINK_TRANSMIT_BYTES_TOTAL, GPU, 10_240_000_000),
                (m.NVLINK_RECEIVE_BYTES_TOTAL, GPU, 20_480_000_000),
            ]
        )
    )
    assert {name: value for (name, _), value in found.items()} == {
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 3000,
        "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND": 3_072_000_000,
    }


def test_the_last_xid_is_a_gauge_with_its_meaning() -> None:
    counted: list[Sample] = [
        info(),
        (m.GPU_XID_ERRORS_TOTAL, (*GPU, "79"), 0),
        (m.GPU_XID_ERRORS_TOTAL, (*GPU, "48"), 0),
    ]
    rest = 'Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1"'
    assert rendered(counted) == [f'DCGM_FI_DEV_XID_ERRORS{{{rest},err_code="0",err_msg="No Error"}} 0']
    seen: list[Sample] = [
        (m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*GPU, "48"), 1000),
        (m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*GPU, "79"), 2000),
        (m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*GPU, "13"), 500),
        (m.GPU_XID_INFO, ("79", "GPU has fallen off the bus", "bus", "fatal", "x"), 1),
    ]
    assert rendered(counted + seen) == [
        f'DCGM_FI_DEV_XID_ERRORS{{{rest},err_code="79",err_msg="GPU has fallen off the bus"}} 79'
    ]
    assert rendered([info()]) == []


def test_owners_are_labels_as_dcgm_exporter_has_them() -> None:
    reading: list[Sample] = [info(), (m.GPU_TEMPERATURE_CELSIUS, GPU, 58)]
    rest = 'DCGM_FI_DEV_GPU_TEMP{Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1"'
    pod = owner(owner_pod="train-0", owner_namespace="ml", owner_container="main", source="kubelet")
    other = owner(owner_pod='b"\n\\', owner_namespace="ml", owner_container="main", source="kubelet")
    job = owner(owner_job="4242", owner_user="1000", source="slurm")
    unowned = owner(owner_user="1000", source="process")
    assert rendered([*reading, pod, other]) == [
        f'{rest},container="main",namespace="ml",pod="train-0"}} 58.0',
        f'{rest},container="main",namespace="ml",pod="b\\"\\n\\\\"}} 58.0',
    ]
    assert rendered([*reading, job]) == [f'{rest},hpc_job="4242"}} 58.0']
    assert rendered([*reading, unowned]) == [f"{rest}}} 58.0"]


def test_mig_instances_stand_for_their_gpu() -> None:
    def instance(id: str, uuid: str) -> Sample:
        return m.GPU_MIG_INFO, (*GPU, id, "0", uuid, "1g.10gb"), 1

    samples: list[Sample] = [
        info(),
        instance("1", "MIG-1"),
        instance("2", "MIG-2"),
        (m.GPU_TEMPERATURE_CELSIUS, GPU, 58),
        (m.GPU_MIG_MEMORY_USED_BYTES, (*GPU, "1"), 1 << 30),
        (m.GPU_MIG_MEMORY_TOTAL_BYTES, (*GPU, "1"), 10 << 30),
        (m.GPU_MEMORY_USED_BYTES, GPU, 5 << 30),
        owner(mig_uuid="MIG-2", owner_pod="p", source="kubelet"),
    ]
    one, two = (
        f'GPU_I_PROFILE="1g.10gb",GPU_I_ID="{id}",Hostname="node1",hostname="node1",DCGM_FI_DRIVER_VERSION="580.1"'
        for id in "12"
    )
    assert rendered(samples) == [
        f"DCGM_FI_DEV_GPU_TEMP{{{one}}} 58.0",
        f'DCGM_FI_DEV_GPU_TEMP{{{two},pod="p"}} 58.0',
        f"DCGM_FI_DEV_FB_TOTAL{{{one}}} 10240",
        f"DCGM_FI_DEV_FB_FREE{{{one}}} 9216",
        f"DCGM_FI_DEV_FB_USED{{{one}}} 1024",
    ]
    now = 0.0
    compatibility = Compatibility("dcgm-4.8", lambda: now)
    active: list[Sample] = [info(), instance("1", "MIG-1")]
    for at, profiled_seconds, busy in ((0.0, 0, 0), (20.0, 20, 5)):
        now = at
        found = means(
            compatibility,
            [
                *active,
                (m.GPU_MIG_PROFILED_SECONDS_TOTAL, (*GPU, "1"), profiled_seconds),
                (m.GPU_MIG_SM_ACTIVE_SECONDS_TOTAL, (*GPU, "1"), busy),
                (m.GPU_PROFILED_SECONDS_TOTAL, GPU, profiled_seconds),
                (m.GPU_SM_ACTIVE_SECONDS_TOTAL, GPU, profiled_seconds),
            ],
        )
    assert found == [0.25]


# The queries of grafana/dcgm-exporter-dashboard.json and of boards for pods and hosts, as they are after substitution.
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('DCGM_FI_DEV_GPU_TEMP{instance=~"node1:9450", gpu=~"0|3"}', 2),
        ('DCGM_FI_DEV_POWER_USAGE{instance=~"node1:9450", gpu=~".*"}', 8),
        ('DCGM_FI_DEV_SM_CLOCK{instance=~"node1:9450", gpu=~"(0|1|2)"}', 3),
        ('DCGM_FI_DEV_GPU_UTIL{instance=~"node1:9450", gpu=~"7"}', 1),
        ('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~"node1:9450", gpu=~"7"}', 1),
        ('DCGM_FI_DEV_FB_USED{Hostname=~"node1", gpu!="0"}', 7),
        ('DCGM_FI_DEV_FB_USED_BYTES{hostname="node1", gpu="0"}', 1),
        ('DCGM_FI_DEV_GPU_UTIL{modelName="NVIDIA H100 80GB HBM3", device="nvidia0"}', 1),
        ('DCGM_FI_DEV_GPU_UTIL_RATIO{UUID=~"GPU-.*", DCGM_FI_SYSTEM_DRIVER_VERSION!=""}', 8),
        ('DCGM_FI_DEV_XID_ERRORS{err_code="0"}', 8),
        ('DCGM_FI_DEV_GPU_UTIL{pod="", namespace=""}', 8),
    ],
)
def test_queries_of_dashboards_find_their_series(page: dict[Series, float], query: str, expected: int) -> None:
    selector = promql_parser.parse(query)
    assert isinstance(selector, promql_parser.VectorSelector)
    checks = [(matcher.name, str(matcher.op), matcher.value) for matcher in selector.matchers.matchers]
    found = [
        pairs
        for name, pairs in page
        if name == selector.name
        and all(
            matches({**dict(pairs), "instance": "node1:9450"}.get(label, ""), op, value) for label, op, value in checks
        )
    ]
    assert len(found) == expected


def matches(text: str, op: str, value: str) -> bool:
    return {
        "MatchOp.Equal": text == value,
        "MatchOp.NotEqual": text != value,
        "MatchOp.Re": re.fullmatch(value, text) is not None,
        "MatchOp.NotRe": re.fullmatch(value, text) is None,
    }[op]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[Series, float]:
    return series(twice(node(tmp_path_factory.mktemp("node")), "dcgm"))


class FixedSource:
    """A source that returns the samples it was given."""

    name = "nvml"

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def ask(self, deadline: float) -> Reading:
        return Reading(self.samples, at=1.0)


@pytest.mark.parametrize("generation", sorted(GENERATIONS))
def test_a_page_with_foreign_names_parses_in_both_formats(tmp_path: Path, generation: str) -> None:
    node = Node(tmp_path)
    node.samples()
    node.run(60)
    source = FixedSource(node.samples())

    async def pages() -> list[str]:
        scrape = Scrape([source], [], ExporterSettings(expose=generation), Registry(), lambda: node.now)
        bodies = []
        for _ in range(2):
            bodies += [(await scrape.metrics(openmetrics=openmetrics)).decode() for openmetrics in (False, True)]
            node.run(15)
            source.samples = node.samples()
        scrape.close()
        return bodies

    *_, text, openmetrics = asyncio.run(pages())
    names = {family.name for family in text_families(text) if family.name.startswith("DCGM")}
    families = openmetrics_families(openmetrics)  # type: ignore[no-untyped-call]
    assert names == {family.name for family in families if family.name.startswith("DCGM")}
    assert len(names) == {"dcgm-4.8": 41, "dcgm-4.9": 41, "dcgm": 73}[generation]
    assert openmetrics.endswith("# EOF\n")


def test_without_the_flag_there_are_no_foreign_names() -> None:
    async def page() -> bytes:
        scrape = Scrape(
            [FixedSource([info(), (m.GPU_TEMPERATURE_CELSIUS, GPU, 58)])], [], ExporterSettings(), Registry()
        )
        body = await scrape.metrics()
        scrape.close()
        return body

    assert b"DCGM" not in asyncio.run(page())


def test_settings_that_cannot_work_are_refused_with_what_to_write() -> None:
    for settings, message in (
        ({"expose": "dcgm-3"}, "write dcgm .*, dcgm-4.8 or dcgm-4.9"),
        ({"expose": "dcgm-4.8,dcgm-4.9"}, "or both such as dcgm,node"),
        ({"expose": "node,"}, "or both such as dcgm,node"),
        ({"dcgm": "localhost"}, "write HOST:PORT of a running nv-hostengine, for example localhost:5555"),
        ({"dcgm": ":5555"}, "write HOST:PORT"),
        ({"dcgm": "localhost:99999"}, "write HOST:PORT"),
        ({"dcgm": "localhost:5555", "simulate": "h100x8"}, "leave one out"),
    ):
        with pytest.raises(SettingsError, match=message):
            ExporterSettings(**settings)  # type: ignore[arg-type]
    for names in ("node", "dcgm,node", "dcgm-4.8,node", "dcgm-4.9,node"):
        assert ExporterSettings(expose=names).expose == names
    for address in ("localhost:5555", "[::1]:5555", "/tmp/nv-hostengine", "unix:/tmp/nv-hostengine"):
        assert ExporterSettings(dcgm=address).dcgm == address


def test_every_name_is_there_once() -> None:
    for names in ([alias.old for alias in ALIASES], [alias.new for alias in ALIASES], [alias.id for alias in ALIASES]):
        assert len(names) == len(set(names))
    rows: list[Metric] = [alias.row for alias in ALIASES]
    assert all(m.BY_NAME[row.name] is row for row in rows)
