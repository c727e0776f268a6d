"""The InfiniBand collector against captured sysfs trees, and against files that cannot be read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import INFINIBAND_INFO, INFINIBAND_PRESENT, Sample
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.infiniband import COUNTERS, Infiniband, counter, physical_state, rate, state

CAPTURES = Path(__file__).parent / "captures" / "infiniband"


def tree(root: Path, *devices: Path) -> Path:
    """Return a sysfs root with copies of these captured devices."""
    for device in devices:
        shutil.copytree(device, root / "sys" / "class" / "infiniband" / device.name)
    return root / "sys"


def in_base_units(samples: list[Sample], device: str, port: str = "1") -> dict[str, float]:
    return {row.name: value * row.scale for row, labels, value in samples if labels[:2] == (device, port)}


def test_an_ndr_port_of_the_h100_capture_in_base_units(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_1")
    samples = Infiniband(sysfs, "node1", tmp_path / "ports.json").read()
    assert samples[0] == (
        INFINIBAND_INFO, ("mlx5_1", "1", "node1", "MT_0000000838", "28.41.1000", "MT4129", "InfiniBand"), 1
    )
    assert in_base_units(samples, "mlx5_1") == {
        "infiniband_info": 1,
        "infiniband_port_present": 1,
        "infiniband_port_state_id": 4,
        "infiniband_port_physical_state_id": 5,
        "infiniband_port_rate_bytes_per_second": 50e9,
        "infiniband_transmit_data_bytes_total": 4 * 230442669431839,
        "infiniband_receive_data_bytes_total": 4 * 205128687774249,
        "infiniband_transmit_packets_total": 315487941081,
        "infiniband_receive_packets_total": 317548853677,
        "infiniband_symbol_errors_total": 0,
        "infiniband_link_error_recovery_total": 0,
        "infiniband_link_downed_total": 255,
        "infiniband_receive_errors_total": 14,
        "infiniband_receive_remote_physical_errors_total": 0,
        "infiniband_transmit_discards_total": 0,
        "infiniband_local_link_integrity_errors_total": 0,
        "infiniband_excessive_buffer_overrun_errors_total": 15,
        "infiniband_vl15_dropped_total": 0,
        "infiniband_transmit_wait_ticks_total": 2489603687,
        "infiniband_out_of_buffer_total": 0,
        "infiniband_out_of_sequence_total": 0,
        "infiniband_packet_sequence_errors_total": 0,
        "infiniband_local_ack_timeouts_total": 0,
        "infiniband_rnr_nak_retries_total": 0,
    }


def test_a_roce_port_says_so(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_bond_0")
    samples = Infiniband(sysfs, "node1", tmp_path / "ports.json").read()
    assert samples[0][1][-1] == "Ethernet"
    assert in_base_units(samples, "mlx5_bond_0")["infiniband_port_rate_bytes_per_second"] == 25e9


def test_counters_that_read_no_pma_are_absent_and_the_state_is_there(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "legacy" / "i40iw0")
    assert in_base_units(Infiniband(sysfs, "node1", tmp_path / "ports.json").read(), "i40iw0") == {
        "infiniband_info": 1,
        "infiniband_port_present": 1,
        "infiniband_port_state_id": 4,
        "infiniband_port_physical_state_id": 5,
        "infiniband_port_rate_bytes_per_second": 1.25e9,
    }


def test_a_port_without_hw_counters_keeps_what_it_has(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "legacy" / "mlx4_0")
    samples = Infiniband(sysfs, "node1", tmp_path / "ports.json").read()
    assert in_base_units(samples, "mlx4_0", "1") == {
        "infiniband_info": 1,
        "infiniband_port_present": 1,
        "infiniband_port_state_id": 4,
        "infiniband_port_physical_state_id": 5,
        "infiniband_port_rate_bytes_per_second": 5e9,
        "infiniband_transmit_data_bytes_total": 4 * 3733440,
        "infiniband_receive_data_bytes_total": 4 * 4631917,
        "infiniband_transmit_packets_total": 6235865,
        "infiniband_receive_packets_total": 6825908347,
        "infiniband_link_error_recovery_total": 0,
        "infiniband_link_downed_total": 0,
        "infiniband_receive_errors_total": 0,
        "infiniband_transmit_discards_total": 5,
        "infiniband_transmit_wait_ticks_total": 4294967295,
    }
    assert in_base_units(samples, "mlx4_0", "2")["infiniband_transmit_data_bytes_total"] == 0


@pytest.mark.parametrize("unreadable", ["/proc/self/mem", "/proc/self/attr/fscreate", "/nowhere"])
def test_a_counter_that_cannot_be_read_hides_no_other(tmp_path: Path, unreadable: str) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_0")
    before = in_base_units(Infiniband(sysfs, "node1", tmp_path / "ports.json").read(), "mlx5_0")
    file = sysfs / "class/infiniband/mlx5_0/ports/1/counters/symbol_error"
    file.unlink()
    file.symlink_to(unreadable)  # reading it is EIO, EINVAL, ENOENT
    after = in_base_units(Infiniband(sysfs, "node1", tmp_path / "ports.json").read(), "mlx5_0")
    assert before.pop("infiniband_symbol_errors_total") == 0
    assert after == before


def test_a_counter_the_firmware_refuses_is_left_alone_for_an_hour(tmp_path: Path) -> None:
    now = [0.0]
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_0")
    file = sysfs / "class/infiniband/mlx5_0/ports/1/counters/symbol_error"
    file.unlink()
    file.symlink_to("/proc/self/attr/fscreate")
    with pytest.raises(OSError, match="Invalid argument"):
        file.read_text()
    collector = Infiniband(sysfs, "node1", tmp_path / "ports.json", clock=lambda: now[0])
    collector.read()
    file.unlink()
    file.write_text("7\n")
    now[0] = 3599
    assert "infiniband_symbol_errors_total" not in in_base_units(collector.read(), "mlx5_0")
    now[0] = 3600
    assert in_base_units(collector.read(), "mlx5_0")["infiniband_symbol_errors_total"] == 7


@pytest.mark.parametrize("restart", [False, True])
def test_a_port_that_is_gone_is_0_with_its_identity(tmp_path: Path, restart: bool) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_0", CAPTURES / "h100_node" / "mlx5_1")
    collector = Infiniband(sysfs, "node1", tmp_path / "ports.json")
    collector.read()
    shutil.rmtree(sysfs / "class/infiniband/mlx5_1")
    if restart:
        collector = Infiniband(sysfs, "node1", tmp_path / "ports.json")
    samples = collector.read()
    assert in_base_units(samples, "mlx5_1") == {"infiniband_info": 1, "infiniband_port_present": 0}
    assert (INFINIBAND_PRESENT, ("mlx5_0", "1"), 1) in samples
    shutil.rmtree(sysfs / "class")
    assert {value for row, _, value in collector.read() if row is INFINIBAND_PRESENT} == {0}


def test_without_any_port_the_source_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no port in"):
        Infiniband(tmp_path, "node1", tmp_path / "ports.json").read()


def test_a_disk_that_takes_nothing_costs_no_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_0")
    assert len(Infiniband(sysfs, "node1", tmp_path / "file" / "ports.json").read()) == 24


def test_every_counter_of_the_catalogue_is_a_file_of_the_capture() -> None:
    port = CAPTURES / "h100_node" / "mlx5_0" / "ports" / "1"
    assert [file for file in COUNTERS.values() if not (port / file).is_file()] == []


def test_texts_the_kernel_writes() -> None:
    assert [state(text) for text in ("4: ACTIVE", "1: DOWN", "2: INIT", "", "ACTIVE")] == [4, 1, 2, None, None]
    assert [physical_state(text) for text in ("5: LinkUp", "2: Polling", "4: ACTIVE", "")] == [5, 2, None, None]
    assert [rate(text) for text in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", "fast")] == [400, 2.5, None, None]
    assert [counter(text) for text in ("0", "18446744073709551615", "N/A (no PMA)", "", "-1", "\u0664")] == [
        0, 18446744073709551615, None, None, None, None,
    ]


@given(st.binary(max_size=200))
def test_no_content_of_a_file_breaks_the_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("port")
    port = root / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    for file in ("state", "phys_state", "rate", "link_layer", "counters/symbol_error"):
        (port / file).write_bytes(content)
    samples = Infiniband(root, "node1", root / "ports.json").read()
    assert in_base_units(samples, "mlx5_0")["infiniband_port_present"] == 1
    assert all(value >= 0 for _, _, value in samples)


def test_each_read_sees_what_the_kernel_counts_now(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_0")
    collector = Infiniband(sysfs, "node1", tmp_path / "ports.json")
    collector.read()
    with (sysfs / "class/infiniband/mlx5_0/ports/1/counters/link_downed").open("r+b") as file:
        os.pwrite(file.fileno(), b"3\n", 0)
    assert in_base_units(collector.read(), "mlx5_0")["infiniband_link_downed_total"] == 3
