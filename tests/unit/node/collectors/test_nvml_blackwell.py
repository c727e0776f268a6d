"""Fields of Grace and Blackwell: NVLink-C2C, the bank remapper, retransmission, and memory beyond repair."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.collectors.nvml.fields import Key
from flopwatch.simulate.pynvml import Handle, Simulation
from simulator.host import SimulatedNode

C2C_LINKS = 10
GPU = "0,GPU-51a70000-0000-4000-8000-000000000000"


class GraceBlackwell(Simulation):
    """A driver of GB300, where C2C link 3 is down and has errors, and one memory bank waits for its replacement."""

    broken: frozenset[Key] = frozenset()

    def field_numbers(self, handle: Handle) -> dict[Key, int]:
        numbers = super().field_numbers(handle) | {(170, 0): C2C_LINKS}
        for link in range(C2C_LINKS):
            up = link != 3
            numbers |= {(171, link): int(up), (172, link): 44712 if up else 0, (234, link): 0}
            numbers |= {(231, link): 0, (232, link): 7 if up else 12, (233, link): 0}
        numbers |= {(301, 0): 0, (302, 0): 2, (303, 0): 1, (304, 0): 0, (305, 0): 127, (306, 0): 1, (307, 0): 1}
        for link in range(18):
            numbers |= {(221, link): 0, (294, link): 1_000_000, (295, link): 100 + link}
        return {key: number for key, number in numbers.items() if key not in self.broken}

    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle: Handle) -> int:
        return int(handle.index == 0)


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "simulated")
    node.create(1_700_000_400.0)
    return node


def read(node: SimulatedNode, driver: Simulation) -> dict[str, float]:
    """Return the series of GPU 0 in base units after two reads."""
    proc, dev = node.root / "proc", node.root / "dev"
    now = [0.0]
    nvml = Nvml(driver, "node1", node.root / "gpus.json", clock=lambda: now[0], proc=proc, dev=dev)
    nvml.read()
    now[0] = 15.0
    samples = nvml.read()
    texts = {f"{row}{{{','.join(labels)}}}": number * row.scale for row, labels, number in samples}
    return {text: number for text, number in texts.items() if GPU in text}


NEW = ("c2c", "bank_remap", "inactive", "unrepairable", "blocks")


def test_what_only_grace_and_blackwell_have_is_read(node: SimulatedNode) -> None:
    seen = read(node, GraceBlackwell(node.root))
    assert {text: number for text, number in seen.items() if any(word in text for word in NEW)} == {
        f"gpu_c2c_links{{{GPU},active}}": 9,
        f"gpu_c2c_links{{{GPU},inactive}}": 1,
        f"gpu_c2c_speed_bytes_per_second{{{GPU}}}": 44_712_000_000,
        f"gpu_c2c_errors_total{{{GPU},crc}}": 0,
        f"gpu_c2c_errors_total{{{GPU},replay}}": 12,
        f"gpu_c2c_errors_total{{{GPU},replay_b2b}}": 0,
        f"gpu_bank_remappings{{{GPU},active}}": 1,
        f"gpu_bank_remappings{{{GPU},inactive}}": 0,
        f"gpu_bank_remappings{{{GPU},pending}}": 1,
        f"gpu_bank_remap_groups{{{GPU},max}}": 127,
        f"gpu_bank_remap_groups{{{GPU},none}}": 1,
        f"gpu_remapped_rows_inactive{{{GPU},uncorrected}}": 2,
        f"gpu_memory_unrepairable{{{GPU}}}": 1,
        f"nvlink_transmit_blocks_total{{{GPU}}}": 18_000_000,
        f"nvlink_transmit_retried_blocks_total{{{GPU}}}": sum(range(100, 118)),
        f"nvlink_links{{{GPU},inactive}}": 0,
    }


def test_no_series_of_them_is_on_hopper(node: SimulatedNode) -> None:
    seen = read(node, Simulation(node.root))
    assert [text for text in seen if any(word in text for word in NEW)] == [f"nvlink_links{{{GPU},inactive}}"]


def test_a_c2c_link_that_is_not_readable_makes_no_counter_fall(node: SimulatedNode) -> None:
    driver = GraceBlackwell(node.root)
    driver.broken = frozenset({(232, 3), (171, 3)})
    seen = read(node, driver)
    assert f"gpu_c2c_errors_total{{{GPU},replay}}" not in seen
    assert seen[f"gpu_c2c_errors_total{{{GPU},crc}}"] == 0
    assert seen[f"gpu_c2c_links{{{GPU},inactive}}"] == 0


def test_the_field_ids_are_those_of_nvidia() -> None:
    assert [
        pynvml.NVML_FI_DEV_C2C_LINK_COUNT,
        pynvml.NVML_FI_DEV_C2C_LINK_GET_STATUS,
        pynvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW,
        pynvml.NVML_FI_DEV_C2C_LINK_ERROR_INTR,
        pynvml.NVML_FI_DEV_REMAPPED_ROWS_COR_INACTIVE,
        pynvml.NVML_FI_DEV_ACTIVE_BANK_REMAPPINGS,
        pynvml.NVML_FI_DEV_PENDING_BANK_REMAPPING,
        pynvml.NVML_FI_DEV_NVLINK_PLR_XMIT_BLOCKS,
    ] == [170, 171, 172, 231, 301, 303, 307, 294]
