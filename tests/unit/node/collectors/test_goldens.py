"""What the collectors make of captured machines, every series of them, byte for byte.

Update the goldens with `FLOPWATCH_UPDATE_GOLDEN=1 pytest tests/unit/node/collectors/test_goldens.py` and review them
like code, against the captures. `captures/convert.py` makes those of GPUs from published nvidia-smi output.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from flopwatch.catalogue import Sample
from flopwatch.http.exposition import Exposition
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.nvml import Nvml
from simulator import nvml_replay as replay
from tests.captures.convert import SOURCES, convert
from tests.support import TESTS

HERE = TESTS
CAPTURES, GOLDEN = HERE / "captures", HERE / "golden"
# What `flopwatch capture` and the converter made, one folder a node.
NODES = sorted(path.name for path in (CAPTURES / "nodes").iterdir())
LEGACY = ("i40iw0", "mlx4_0")


def is_golden(name: str, samples: list[Sample]) -> None:
    """Compare the samples with a golden file, or write it where that is asked for."""
    text = Exposition().render(samples)
    file = GOLDEN / f"{name}.metrics"
    if os.environ.get("FLOPWATCH_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def gpus(capture: Path, folder: Path) -> list[list[Sample]]:
    """Return the samples of the NVML collector for a captured node, for each time of the capture."""
    times = json.loads((capture / "nvml.json").read_text())["reads"]
    now = 1000.0
    collector = Nvml(
        replay.load(capture),
        "node1",
        folder / "gpus.json",
        clock=lambda: now,
        sysfs=capture / "sys",
        proc=folder / "proc",
    )
    reads = []
    for time in times:
        now = 1000.0 + time
        reads.append(collector.read())
    return reads


def ports(sysfs: Path, folder: Path) -> list[Sample]:
    """Return the samples of the InfiniBand collector for the ports below a sysfs root."""
    collector = Infiniband(
        sysfs, "node1", folder / "ports.json", routes=folder / "route", clock=lambda: 0.0, wall=lambda: 1_700_000_000.0
    )
    samples = collector.read()
    collector.close()
    return samples


@pytest.mark.parametrize("name", SOURCES)
def test_a_capture_is_what_the_converter_makes_of_the_published_text(name: str) -> None:
    assert (CAPTURES / "nodes" / name / "nvml.json").read_text() == convert(name)


@pytest.mark.parametrize("name", NODES)
def test_every_series_of_a_captured_node_is_as_reviewed(name: str, tmp_path: Path) -> None:
    capture = CAPTURES / "nodes" / name
    if (capture / "nvml.json").exists():
        reads = gpus(capture, tmp_path)
        is_golden(name, reads[-1])
        if len(reads) > 1:
            is_golden(f"{name}_first_read", reads[0])
    if (capture / "sys" / "class" / "infiniband").exists():
        is_golden(f"{name}_ports", ports(capture / "sys", tmp_path))


@pytest.mark.parametrize("device", LEGACY)
def test_every_series_of_a_legacy_infiniband_tree_is_as_reviewed(device: str, tmp_path: Path) -> None:
    shutil.copytree(CAPTURES / "infiniband" / "legacy" / device, tmp_path / "sys/class/infiniband" / device)
    is_golden(f"infiniband_{device}", ports(tmp_path / "sys", tmp_path))


def test_every_series_of_the_h100_nodes_ports_is_as_reviewed(tmp_path: Path) -> None:
    shutil.copytree(CAPTURES / "infiniband" / "h100_node", tmp_path / "sys/class/infiniband")
    is_golden("infiniband_h100_node", ports(tmp_path / "sys", tmp_path))
