"""The doctor's lines about the driver, each provoked by a lie of the simulated driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import StateFile
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.health import driver_lines
from flopwatch.node.health.nvml_answers import RecordedNvml
from flopwatch.simulate.pynvml import Simulation
from simulator.host import SimulatedNode

Doctor = Callable[[], tuple[list[str], list[str]]]


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "simulated")
    node.create(1_700_000_400.0)
    return node


@pytest.fixture
def doctor(node: SimulatedNode, tmp_path: Path) -> Doctor:
    """Return the lines about the driver, and those about what is missing, of one look at the node."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def look() -> tuple[list[str], list[str]]:
        driver = Simulation(node.root)
        driver.sleep = sleep
        proc, dev = node.root / "proc", node.root / "dev"
        nvml = Nvml(driver, "node1", tmp_path / "gpus.json", clock=lambda: now[0], proc=proc, dev=dev)
        notes = StateFile(tmp_path / "notes.json")
        samples: list[Sample] = RecordedNvml(nvml, notes).read()
        return driver_lines.state(samples, notes.load()), list(driver_lines.losses(samples, notes.load(), proc))

    return look


def test_a_healthy_driver_is_named_with_its_branch(doctor: Doctor, node: SimulatedNode) -> None:
    assert doctor() == (["version 590.48.01, branch R590"], [])


def test_wrong_types_are_reported_and_cost_nothing(doctor: Doctor, node: SimulatedNode) -> None:
    node.lie("double_types")
    state, losses = doctor()
    assert state[1].endswith("They are read as integers, and no series is missing.")
    assert int(state[1].split()[1]) > 20
    assert losses == []


@pytest.mark.parametrize(
    ("lie", "line"),
    [
        (
            "gpm_refusals",
            "GPU 0-7: the driver refuses activity (GPM) to this process, so gpu_*_active_seconds_total, "
            "gpu_sm_occupancy_seconds_total, gpu_*profiled_seconds_total and gpu_pcie_*_bytes_total do not rise or are "
            "absent. Give it CAP_SYS_ADMIN, or load the module nvidia with NVreg_RestrictProfilingToAdminUsers=0.",
        ),
        (
            "hidden_mig",
            "GPU 2: MIG is on and no instance is visible, so gpu_mig_info and other gpu_mig_* are absent. Give the "
            "container NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN.",
        ),
        (
            "no_ecc",
            "GPU 0-7: error correction is off, so gpu_ecc_*_total are absent. Switch it on (nvidia-smi -e 1) and "
            "reset.",
        ),
        (
            "unwritten_fields",
            "driver: returns 7 fields without a value, so gpu_ecc_*_total or gpu_retired_pages_total are absent. "
            "Upgrade the driver.",
        ),
        (
            "garbled_processes",
            "GPU 0-7: the driver returns garbled processes, which early releases of R535 do, so gpu_processes and "
            "gpu_process_memory_bytes count only the first. Upgrade the driver.",
        ),
        (
            "no_persistence",
            "GPU 0-7: persistence mode is off, so the first scrapes after a start have no GPU and jobs start later. "
            "Run nvidia-persistenced, or nvidia-smi -pm 1.",
        ),
        (
            "slow_values",
            "driver: NVML fields that change seldom take N s for all GPUs, so GPUs are read in turns. These values "
            "are older, and absent for up to 6 scrapes after a start or a change of MIG. Upgrade the driver.",
        ),
        (
            "slow_gpu",
            "GPU 7: its NVML calls take N s together, so its values are read less often and are up to a few minutes "
            "old or absent. Look for Xid 119 in the kernel log, and reset the GPU.",
        ),
    ],
)
def test_what_a_lie_costs_is_one_line_with_the_remedy(doctor: Doctor, node: SimulatedNode, lie: str, line: str) -> None:
    node.mig(2, "on")
    node.tick(1_700_000_400.0 + 301)  # activity is refused in the second half of ten minutes
    assert doctor()[1] == []
    node.lie(lie)
    (found,) = doctor()[1]
    took = [float(seconds) for seconds in re.findall(r"take (\d+\.\d) s", found)]
    assert re.sub(r"take \d+\.\d s", "take N s", found) == line
    assert all(2.7 < seconds < 5 for seconds in took)


def test_refused_memory_of_a_mig_gpu_is_a_line_of_its_own(doctor: Doctor, node: SimulatedNode) -> None:
    node.mig(2, "on")
    node.fail("nvmlDeviceGetMemoryInfo", 4, gpu=2)
    memory = (
        "GPU 2: the driver refuses the memory of the GPU or its MIG instances, so gpu_memory_*_bytes or "
        "gpu_mig_memory_*_bytes are absent. Give the container NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN."
    )
    assert doctor()[1] == [memory]
    node.lie("hidden_mig")
    assert [line.partition(",")[0] for line in doctor()[1]] == [
        "GPU 2: MIG is on and no instance is visible",
        memory.partition(",")[0],
    ]


def test_a_driver_that_restricts_profiling_is_named_as_the_cause(doctor: Doctor, node: SimulatedNode) -> None:
    node.tick(1_700_000_400.0 + 301)
    node.lie("gpm_refusals")
    (node.root / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
    (node.root / "proc/driver/nvidia/params").write_text("RmMsg: \nRmProfilingAdminOnly: 1\n")
    assert "The driver restricts it to administrators (RmProfilingAdminOnly)." in doctor()[1][0]


def test_no_line_is_about_a_gpu_that_has_no_such_setting() -> None:
    info = dict.fromkeys(m.GPU_INFO.labels, "") | {"gpu": "0", "uuid": "GPU-a"}
    samples: list[Sample] = [(m.GPU_INFO, tuple(info.values()), 1)]
    assert (driver_lines.state(samples, {}), list(driver_lines.losses(samples, {}, Path("/nowhere")))) == ([], [])
