"""Test the simulated node: what the exporter's collectors read on it, against captured machines and physics.

The golden file has every series of the node at a fixed time. Update it with `FLOPWATCH_UPDATE_GOLDEN=1 pytest
tests/process/test_simulated_node.py` and review the difference like code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from flopwatch.catalogue import GPU, PORT, Metric
from flopwatch.simulate.h100 import DEVICES
from flopwatch.simulate.pynvml import Simulation
from simulator.host import SimulatedNode, parser
from tests.support import TESTS
from tests.support.simulated_host import START, Node

HERE = TESTS
GOLDEN = HERE / "golden" / "simulated_h100x8.metrics"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for collector in node.collectors:
        collector.close()


def line(row: Metric, labels: tuple[str, ...], value: float) -> str:
    pairs = ",".join(f'{name}="{label}"' for name, label in zip(row.labels, labels, strict=True))
    return f"{row.name}{{{pairs}}} {value * row.scale}\n"


def test_every_series_of_the_node_is_as_reviewed(node: Node) -> None:
    node.throttle(1, "sw_power_cap")
    node.load(2, 0)
    node.ecc(4, corrected=2)
    node.link("mlx5_3", "down")
    node.rate("mlx5_4", 200)
    node.symbol_errors("mlx5_5", 0.5)
    node.nvlink_errors(3, 17, "crc", 4)
    node.remap(4, uncorrected=1, pending=True)
    node.pcie(0, width=8)
    node.recovery(4, 1)
    node.profiler(0, "on")
    node.mig(2, "on")
    node.samples()
    node.nvlink(3, 5, "down")
    node.blind(7)
    node.xid(5, 94)
    node.xid(6, 79)
    node.run(60)
    text = "".join(line(*sample) for sample in node.samples())
    if os.environ.get("FLOPWATCH_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_no_series_is_there_twice_and_the_budgets_hold(node: Node) -> None:
    node.samples()
    for code in (13, 31, 45, 48, 63, 74, 94, 95, 119, 154):
        node.xid(0, code)
    node.xid(1, 79)
    node.run(1)
    samples = node.samples()
    assert len({(row, labels) for row, labels, _ in samples}) == len(samples)
    gpus = Counter(labels[:2] for row, labels, _ in samples if row.labels[:2] == GPU)
    ports = Counter(labels[:2] for row, labels, _ in samples if row.labels[:2] == PORT)
    assert (len(gpus), len(ports)) == (8, 9)
    assert max(gpus.values()) <= 120
    assert max(ports.values()) <= 60


def test_a_port_has_the_files_of_the_captured_node(node: Node) -> None:
    def files(device: Path) -> set[str]:
        return {str(file.relative_to(device)) for file in device.rglob("*") if file.is_file()}

    captured = files(HERE / "captures" / "infiniband" / "h100_node" / "mlx5_0")
    assert [files(node.sysfs / "class" / "infiniband" / device) for device in DEVICES] == [captured] * 8


@pytest.mark.parametrize(("section", "load"), [(0, 0.0), (1, 1.0)], ids=["idle", "busy"])
def test_an_idle_and_a_busy_gpu_are_like_the_captured_h100(node: Node, section: int, load: float) -> None:
    capture = (HERE / "captures" / "nvidia_smi" / "h100-80gb-hbm3__590.48.01__q.txt").read_text()
    text = capture.split("NVSMI LOG")[section + 1]

    def captured(pattern: str) -> float:
        match = re.search(pattern, text, re.DOTALL)
        assert match is not None
        return float(match[1])

    node.load(0, load)
    node.run(60)
    seen = node.values("0")
    idle = re.search(r"Idle +: (Active|Not Active)", text)
    assert idle is not None
    assert seen["gpu_clock_event_active:gpu_idle"] == (idle[1] == "Active")
    assert seen["gpu_utilization_ratio"] * 100 == pytest.approx(captured(r"Utilization\s+GPU +: (\d+)"), abs=4)
    assert seen["gpu_power_watts"] == pytest.approx(captured(r"Average Power Draw +: ([\d.]+)"), rel=0.05)
    assert seen["gpu_power_limit_watts"] == captured(r"Current Power Limit +: ([\d.]+)")
    assert seen["gpu_temperature_celsius"] == pytest.approx(captured(r"GPU Current Temp +: (\d+)"), abs=2)
    assert seen["gpu_memory_temperature_celsius"] == pytest.approx(captured(r"Memory Current Temp +: (\d+)"), abs=2)
    assert seen["gpu_sm_clock_hertz"] / 1e6 == captured(r"  Clocks\s+Graphics +: \d+ MHz\s+SM +: (\d+)")
    assert seen["gpu_sm_clock_max_hertz"] / 1e6 == captured(r"Max Clocks\s+Graphics +: \d+ MHz\s+SM +: (\d+)")
    assert seen["gpu_memory_clock_hertz"] / 1e6 == captured(r"  Clocks\s.*?Memory +: (\d+) MHz")
    assert seen["gpu_memory_total_bytes"] / 2**20 == captured(r"FB Memory Usage\s+Total +: (\d+)")
    assert seen["gpu_memory_reserved_bytes"] / 2**20 == captured(r"FB Memory Usage.*?Reserved +: (\d+)")
    assert seen["gpu_bar1_total_bytes"] / 2**20 == captured(r"BAR1 Memory Usage\s+Total +: (\d+)")
    assert seen["gpu_video_clock_hertz"] / 1e6 == captured(r"  Clocks\s.*?Video +: (\d+) MHz")
    assert seen["gpu_temperature_margin_celsius"] == pytest.approx(captured(r"GPU T\.Limit Temp +: (\d+)"), abs=3)
    limits = {"shutdown": "GPU Shutdown", "slowdown": "GPU Slowdown", "gpu_max": "GPU Max Operating"}
    for limit, name in limits.items():
        assert seen[f"gpu_temperature_limit_margin_celsius:{limit}"] == captured(rf"{name} T\.Limit Temp +: (-?\d+)")
    assert seen["gpu_row_remap_banks:max"] == captured(r"Histogram\s+Max +: (\d+)")
    assert seen["gpu_pcie_width_lanes"] == captured(r"Link Width.*?Current +: (\d+)x")
    assert seen["gpu_pcie_generation"] == captured(r"PCIe Generation.*?Current +: (\d+)")
    assert seen["gpu_pcie_replays_total"] == captured(r"Replays Since Reset +: (\d+)")


def test_energy_is_the_integral_of_power(node: Node) -> None:
    before, watts = node.values("0")["gpu_energy_joules_total"], []
    for _ in range(30):
        node.run(1)
        watts.append(node.values("0")["gpu_power_watts"])
    assert len(set(watts)) > 20, "power moves"
    assert node.values("0")["gpu_energy_joules_total"] - before == pytest.approx(sum(watts), rel=1e-4)


def test_counters_go_on_where_they_were_when_the_exporter_restarts(node: Node, tmp_path: Path) -> None:
    node.symbol_errors("mlx5_0", 3)
    node.run(5)
    before = {(row, labels): value for row, labels, value in node.samples() if row.type == "counter"}
    again = Node(tmp_path)
    again.now = node.now
    again.run(1)
    after = {(row, labels): value for row, labels, value in again.samples() if row.type == "counter"}
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if after[key] < value] == []
    assert again.values("mlx5_0")["infiniband_symbol_errors_total"] == 18


def test_two_tickers_advance_the_node_once(node: Node) -> None:
    node.run(1)
    seen = node.samples()
    SimulatedNode(node.root).tick(node.now)
    SimulatedNode(node.root).tick(node.now - 1)
    assert node.samples() == seen


def test_an_open_counter_file_shows_the_new_value(node: Node) -> None:
    port = node.sysfs / "class/infiniband/mlx5_11/ports/1"
    with (port / "counters/port_xmit_data").open() as data, (port / "state").open() as state:
        before = int(data.read())
        assert state.read() == "4: ACTIVE\n"
        node.link("mlx5_11", "down")
        node.run(1)
        data.seek(0)
        state.seek(0)
        assert int(data.read()) == before
        assert state.read() == "1: DOWN\n"
        node.link("mlx5_11", "up")
        node.run(1)
        data.seek(0)
        assert int(data.read()) > before


def test_a_port_moves_data_with_the_load_of_its_gpu(node: Node) -> None:
    def moved() -> float:
        before = node.values("mlx5_0")["infiniband_transmit_data_bytes_total"]
        node.run(11)
        return node.values("mlx5_0")["infiniband_transmit_data_bytes_total"] - before

    node.load(0, 1)
    full = moved()
    assert full == pytest.approx(11 * 0.35 * 50e9, rel=0.01)
    node.load(0, 0.5)
    assert moved() == pytest.approx(full / 2, rel=0.01)
    node.rate("mlx5_0", 200)
    assert moved() == pytest.approx(full / 4, rel=0.01)
    node.load(0, 0)
    assert moved() == 0


def test_a_link_that_goes_down_is_counted_once_and_comes_back(node: Node) -> None:
    node.link("mlx5_9", "down")
    node.run(3)
    seen = node.values("mlx5_9")
    assert seen["infiniband_port_state_id"] == 1
    assert seen["infiniband_port_physical_state_id"] == 2
    assert seen["infiniband_port_rate_bytes_per_second"] == 1.25e9
    assert seen["infiniband_link_downed_total"] == 1
    node.clear()
    node.run(1)
    seen = node.values("mlx5_9")
    assert (seen["infiniband_port_state_id"], seen["infiniband_port_rate_bytes_per_second"]) == (4, 50e9)
    assert seen["infiniband_link_downed_total"] == 1


def test_symbol_errors_rise_at_the_rate_asked_for_and_stick(node: Node) -> None:
    node.symbol_errors("mlx5_6", 5)
    node.run(10)
    assert node.values("mlx5_6")["infiniband_symbol_errors_total"] == 50
    assert node.values("mlx5_5")["infiniband_symbol_errors_total"] == 0
    node.symbol_errors("mlx5_6", 1e6)
    node.run(1)
    assert node.values("mlx5_6")["infiniband_symbol_errors_total"] == 65535


def test_a_lower_rate_is_named_as_the_kernel_names_it(node: Node) -> None:
    node.rate("mlx5_10", 200)
    node.run(1)
    assert (node.sysfs / "class/infiniband/mlx5_10/ports/1/rate").read_text() == "200 Gb/sec (2X NDR)\n"
    assert node.values("mlx5_10")["infiniband_port_rate_bytes_per_second"] == 25e9


def test_a_throttled_gpu_names_the_reason_counts_the_time_and_slows_down(node: Node) -> None:
    node.run(1)
    before = node.values("1")
    node.throttle(1, "sw_power_cap")
    node.run(10)
    seen = node.values("1")
    assert seen["gpu_clock_event_active:sw_power_cap"] == 1
    assert seen["gpu_clock_event_seconds_total:sw_power_cap"] == 10
    assert seen["gpu_sm_clock_hertz"] == 1410e6
    assert seen["gpu_power_watts"] < 0.8 * before["gpu_power_watts"]
    node.throttle(1, None)
    node.run(1)
    assert node.values("1")["gpu_clock_event_active:sw_power_cap"] == 0
    assert node.values("1")["gpu_clock_event_seconds_total:sw_power_cap"] == 10


def test_a_gpu_that_gets_too_hot_slows_down_and_recovers_when_it_cools(node: Node) -> None:
    node.heat(7, 92)
    node.run(60)
    hot = node.values("7")
    assert hot["gpu_temperature_celsius"] == 92
    assert hot["gpu_clock_event_active:sw_thermal_slowdown"] == 1
    assert hot["gpu_clock_event_active:hw_thermal_slowdown"] == 1
    assert hot["gpu_clock_event_seconds_total:sw_thermal_slowdown"] > 30
    assert hot["gpu_sm_clock_hertz"] == 795e6
    node.clear()
    node.run(60)
    cool = node.values("7")
    assert cool["gpu_temperature_celsius"] < 60
    assert cool["gpu_clock_event_active:sw_thermal_slowdown"] == 0
    assert cool["gpu_sm_clock_hertz"] == 1980e6


def test_memory_errors_stay_counted_when_the_faults_end(node: Node) -> None:
    node.ecc(2, uncorrected=1, corrected=3)
    node.ecc(2, corrected=1)
    node.clear()
    seen = node.values("2")
    assert (seen["gpu_ecc_errors_total:corrected"], seen["gpu_ecc_errors_total:uncorrected"]) == (4, 1)
    assert {name: value for name, value in seen.items() if "location" in name} == {
        "gpu_ecc_location_errors_total:corrected:dram": 4,
        "gpu_ecc_location_errors_total:uncorrected:dram": 1,
    }


def test_activity_and_traffic_follow_the_load(node: Node) -> None:
    node.load(0, 1)
    node.load(1, 0)
    node.samples()
    node.run(60)
    busy, idle = node.values("0"), node.values("1")
    assert busy["gpu_profiled_seconds_total"] == idle["gpu_profiled_seconds_total"] == 60
    assert busy["gpu_sm_active_seconds_total"] == pytest.approx(60 * 0.88, rel=0.03)
    assert busy["gpu_tensor_active_seconds_total"] == pytest.approx(60 * 0.55, rel=0.03)
    assert idle["gpu_sm_active_seconds_total"] == idle["gpu_tensor_active_seconds_total"] == 0
    before = busy["nvlink_transmit_bytes_total"], idle["nvlink_transmit_bytes_total"]
    node.run(60)
    busy, idle = node.values("0"), node.values("1")
    assert busy["nvlink_transmit_bytes_total"] - before[0] == pytest.approx(60 * 0.3 * 18 * 26.562e9, rel=0.03)
    assert idle["nvlink_transmit_bytes_total"] == before[1]
    assert busy["gpu_processes:slurm:4242"] == 1
    assert "gpu_processes:slurm:4242" not in idle


def test_a_profiler_takes_the_activity_and_leaves_a_gap(node: Node) -> None:
    node.samples()
    node.run(10)
    node.profiler(6, "on")
    node.samples()
    node.run(10)
    node.samples()
    node.profiler(6, "off")
    node.run(10)
    node.samples()
    node.run(10)
    assert node.values("5")["gpu_profiled_seconds_total"] == 40
    assert node.values("6")["gpu_profiled_seconds_total"] == 10


def test_faults_of_a_gpus_links_memory_and_bus_show_and_end(node: Node) -> None:
    node.samples()
    node.run(10)
    node.nvlink(1, 3, "down")
    node.nvlink_errors(1, 4, "crc", 7)
    node.remap(1, uncorrected=2, pending=True)
    node.pcie(1, width=8, generation=3)
    node.recovery(1, 2)
    sick, well = node.values("1"), node.values("0")
    names = (
        "nvlink_links:active",
        "nvlink_links:inactive",
        "nvlink_link_state_id:3",
        "nvlink_errors_total:crc",
        "nvlink_link_errors_total:4:crc",
        "gpu_remapped_rows_total:uncorrected",
        "gpu_row_remap_pending",
        "gpu_row_remap_failure",
        "gpu_row_remap_banks:max",
        "gpu_row_remap_banks:high",
        "gpu_pcie_width_lanes",
        "gpu_pcie_generation",
        "gpu_recovery_action_id",
    )
    assert [sick[name] for name in names] == [17, 1, 0, 7, 7, 2, 1, 0, 2558, 2, 8, 3, 2]
    assert [well.get(name) for name in names] == [18, 0, None, 0, None, 0, 0, 0, 2560, None, 16, 5, 0]
    node.clear()
    node.run(10)
    assert [node.values("1")[name] for name in names] == [18, 0, 1, 7, 7, 2, 0, 0, 2558, 2, 16, 5, 0]


def test_xid_79_is_in_the_kernel_log_and_the_gpu_is_lost(node: Node) -> None:
    assert node.values("3")["gpu_xid_errors_total:79"] == 0
    node.xid(3, 79)
    assert node.kmsg.read_text() == (
        "4,0,12500000,-;NVRM: GPU at PCI:0000:86:00: GPU-51a70000-0000-4000-8000-000000000003\n"
        "4,1,12500000,-;NVRM: GPU Board Serial Number: 1650124010003\n"
        "4,2,12500000,-;NVRM: Xid (PCI:0000:86:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "4,3,12500000,-;NVRM: GPU 0000:86:00.0: GPU has fallen off the bus.\n"
    )
    assert node.values("3") == {
        "gpu_present": 0,
        "gpu_xid_errors_total:79": 1,
        "gpu_xid_last_timestamp_seconds:79": START + 12.5,
        **{f"gpu_xid_errors_total:{code}": 0 for code in (46, 48, 62, 64, 74, 94, 95, 109, 119, 120, 136, 140, 143)},
    }
    node.xid(4, 48)
    assert node.kmsg.read_text().splitlines()[6] == (
        "4,6,12500000,-;NVRM: Xid (PCI:0000:97:00): 48, pid=4711, name=python, Double-bit (uncorrectable) ECC error"
    )
    assert node.values("4")["gpu_xid_errors_total:48"] == 1
    assert node.values("4")["gpu_present"] == 1


def test_a_function_the_simulation_lacks_is_one_the_driver_lacks(node: Node) -> None:
    library = Simulation(node.root)
    with pytest.raises(pynvml.NVMLError) as failure:
        library.nvmlDeviceGetFanSpeed(0)
    assert failure.value.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    with pytest.raises(pynvml.NVMLError) as failure:
        library.nvmlDeviceGetCount()
    assert failure.value.value == pynvml.NVML_ERROR_UNINITIALIZED


def test_faults_that_make_no_sense_are_refused(node: Node) -> None:
    faults: list[Callable[[], None]] = [
        lambda: node.xid(8, 79),
        lambda: node.load(0, 1.5),
        lambda: node.throttle(0, "laziness"),
        lambda: node.hang("nvmlDeviceGetFortune"),
        lambda: node.hang("check"),
        lambda: node.link("mlx5_1", "down"),
        lambda: node.link("mlx5_0", "sideways"),
        lambda: node.rate("mlx5_0", 123),
        lambda: node.fail("nvmlDeviceGetFortune", 3),
        lambda: node.reset(0, 8),
        lambda: node.mig(0, "maybe"),
        lambda: node.nvlink(0, 18, "down"),
        lambda: node.nvlink(0, 0, "sideways"),
        lambda: node.nvlink_errors(0, 0, "boredom", 1),
        lambda: node.pcie(0, width=3),
        lambda: node.recovery(0, 8),
        lambda: node.profiler(0, "maybe"),
    ]
    for fault in faults:
        with pytest.raises(
            ValueError, match=r"8|1\.5|laziness|Fortune|check|mlx5_1|sideways|123|maybe|boredom|3 lanes"
        ):
            fault()


@pytest.mark.parametrize(
    "line",
    [
        "fail --call nvmlDeviceGetPowerUsage --error 999 --gpu 2",
        "fail --call nvmlInit --error 9",
        "blind --gpu 1",
        "blind --gpu 1 --error 17",
        "refuse --gpu 1",
        "reset --gpu 3",
        "reset --gpu 3 --index 7",
        "driver --version 595.80",
        "mig --gpu 0 --mode on",
        "mig --gpu 0 --mode off --profile 2g.20gb",
        "nvlink --gpu 0 --link 17 --state up",
        "nvlink-errors --gpu 0 --link 1 --error replay --count 3",
        "remap --gpu 0 --uncorrected 1 --pending",
        "remap --gpu 0 --failure",
        "pcie --gpu 0 --width 4",
        "recovery --gpu 0 --action 4",
        "profiler --gpu 0 --mode off",
        "hang",
        "ecc --gpu 0 --corrected 1",
        "clear",
    ],
)
def test_each_command_is_a_method_that_takes_its_flags(node: Node, line: str) -> None:
    options = vars(parser().parse_args([str(node.root), *line.split()]))
    assert options.pop("node") == node.root
    getattr(node, options.pop("command").replace("-", "_"))(**options)


def test_the_command_line_breaks_the_node_from_another_process(node: Node, tmp_path: Path) -> None:
    def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "simulator.host", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
        )

    folder = str(node.root)
    assert simulate(folder, "xid", "--gpu", "3", "--code", "119").returncode == 0
    assert simulate(folder, "symbol-errors", "--device", "mlx5_4", "--per-second", "2").returncode == 0
    assert simulate(folder, "nvlink", "--gpu", "4", "--link", "2", "--state", "down").returncode == 0
    node.run(1)
    assert node.values("3")["gpu_xid_errors_total:119"] == 1
    assert node.values("4")["nvlink_links:active"] == 17
    assert node.values("mlx5_4")["infiniband_symbol_errors_total"] == 2
    nowhere = simulate(str(tmp_path / "nowhere"), "clear")
    assert nowhere.returncode == 2
    assert "is no simulated node" in nowhere.stderr
