"""`--expose node` against the real node_exporter: both read the same captured trees of InfiniBand ports."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from bench.exporter import free_port, running
from demo.servers import NEWEST, node_exporter
from demo.stack import fetch
from flopwatch.catalogue import BY_NAME, PortCounter, all_metrics
from flopwatch.node.scrape.node_names import NodeNames
from flopwatch.node.scrape.reader import hardware, host_sources
from flopwatch.node.scrape.scrape import Registry, Scrape
from flopwatch.settings import ExporterSettings
from tests.support import CAPTURES

TREES = {
    "infiniband": ("h100_node/mlx5_0", "h100_node/mlx5_1"),
    "roce": ("h100_node/mlx5_bond_0", "procfs/mlx5_0"),
    "omni-path": ("procfs/hfi1_0",),
    "no counters": ("legacy/i40iw0",),
}
# node_exporter rounds the 10 ms of this file to 0 s. flopwatch does not read it.
LIFESPAN = "node_infiniband_lifespan_seconds"
# The driver repeats the state in phys_state, which means "training" there. flopwatch leaves it out.
REPEATED = ("node_infiniband_physical_state_id", frozenset({("device", "mlx5_0"), ("port", "1")}))

# node_exporter has these since 1.10.
HARDWARE_COUNTERS = [
    row for row in all_metrics() if isinstance(row, PortCounter) and row.files[0].startswith("hw_counters/")
]

Page = dict[tuple[str, frozenset[tuple[str, str]]], tuple[str, float]]


def page_of(text: str) -> Page:
    """Return type and value of node_exporter's InfiniBand series, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): (family.type, sample.value)
        for family in text_families(text)
        for sample in family.samples
        if sample.name.startswith("node_infiniband_") and sample.name != LIFESPAN
    }


def tree(folder: Path, devices: tuple[str, ...]) -> Path:
    for device in devices:
        shutil.copytree(CAPTURES / "infiniband" / device, folder / "sys/class/infiniband" / Path(device).name)
    return folder / "sys"


def theirs(sysfs: Path, suite: str | None) -> Page:
    """Return the page of node_exporter with its InfiniBand collector alone."""
    port = free_port()
    flags = ("--collector.disable-defaults", "--collector.infiniband", f"--path.sysfs={sysfs}", "--log.level=error")
    command = [node_exporter(suite=suite), *flags, f"--web.listen-address=127.0.0.1:{port}"]
    with running("node_exporter", command, port):
        return page_of(fetch(f"http://127.0.0.1:{port}/metrics").decode())


def ours(folder: Path, sysfs: Path, *, openmetrics: bool = False, expose: str = "node") -> str:
    """Return a page of flopwatch's exporter, whose InfiniBand ports are read in a child process."""
    settings = ExporterSettings(sysfs=sysfs, state=folder / "state", expose=expose, series="full", host="node1")
    settings.state.mkdir(exist_ok=True)
    readers = [reader for reader in hardware(settings, host_sources(settings)) if reader.name == "infiniband"]
    scrape = Scrape(readers, [], settings, Registry())
    try:
        return asyncio.run(scrape.metrics(openmetrics=openmetrics)).decode()
    finally:
        scrape.close()
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("devices", TREES.values(), ids=TREES)
@pytest.mark.parametrize(
    "suite", [pytest.param(None, id="packaged"), pytest.param(NEWEST, id="newest", marks=pytest.mark.long)]
)
def test_names_labels_types_and_values_are_those_of_node_exporter(
    tmp_path: Path, devices: tuple[str, ...], suite: str | None
) -> None:
    sysfs = tree(tmp_path, devices)
    expected, found = theirs(sysfs, suite), page_of(ours(tmp_path, sysfs))
    if "procfs/mlx5_0" in devices:
        assert expected.pop(REPEATED) == ("gauge", 4)
    assert len(expected) > 3
    assert {key: value for key, value in found.items() if key in expected} == expected
    more = {name for name, _ in found.keys() - expected.keys()}
    if suite == NEWEST:
        assert more == set()
    assert more <= {names.name for row, names in NodeNames().rows.items() if BY_NAME[row] in HARDWARE_COUNTERS}


def test_our_own_series_are_the_same_with_and_without_the_flag(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, (*TREES["infiniband"], "h100_node/mlx5_bond_0"))
    pages = [ours(tmp_path, sysfs, expose=expose) for expose in ("", "node", "dcgm,node")]
    own = [sorted(re.findall(r"^infiniband_.*", page, re.M)) for page in pages]
    assert own[0] == own[1] == own[2]
    assert len(own[0]) > 100
    assert "node_infiniband_" not in pages[0]
    assert page_of(pages[1]) == page_of(pages[2])


def test_the_names_are_openmetrics_too(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, TREES["infiniband"])
    text = ours(tmp_path, sysfs, openmetrics=True)
    families = openmetrics_families(text)  # type: ignore[no-untyped-call]
    assert {
        (sample.name, frozenset(sample.labels.items())): (family.type, sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith("node_infiniband_")
    } == page_of(ours(tmp_path, sysfs))
