"""The InfiniBand collector against captured sysfs trees, and against everything that can be wrong with a file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import (
    INFINIBAND_COUNTER_SATURATED,
    INFINIBAND_GPU_AFFINITY_INFO,
    INFINIBAND_INFO,
    INFINIBAND_PORT_PRESENT,
    Metric,
    PortCounter,
    Sample,
    all_metrics,
)
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.infiniband import MAX_PORTS, Infiniband, build, default_routes
from flopwatch.node.collectors.infiniband.files import (
    counter,
    local_identifier,
    operational_state,
    physical_state,
    rate,
    risen,
    state,
    temperature,
)
from flopwatch.node.collectors.infiniband.port import COUNTERS
from flopwatch.simulate.h100 import DEVICES, PCI_BUSES
from simulator.host import SimulatedNode
from tests.support import TESTS

CAPTURES = TESTS / "captures" / "infiniband"
NDR = CAPTURES / "h100_node" / "mlx5_0"
PORT = "class/infiniband/mlx5_0/ports/1"
# mlx5 files that newer drivers and RoCE ports have, in addition to those of the capture.
NEWER = ("req_transport_retries_exceeded", "req_rnr_retries_exceeded")
ROCE = ("rp_cnp_handled", "rp_cnp_ignored", "np_ecn_marked_roce_packets", "np_cnp_sent")


def tree(root: Path, *devices: Path) -> Path:
    """Return a sysfs root with copies of these captured devices."""
    for device in devices:
        shutil.copytree(device, root / "sys" / "class" / "infiniband" / device.name)
    return root / "sys"


def write(sysfs: Path, files: Mapping[str, object]) -> None:
    """Write files below a sysfs root, those that are there in place, as the kernel shows new values."""
    for name, content in files.items():
        path = sysfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+" if path.exists() else "w") as file:
            file.write(f"{content}\n")
            file.truncate()


class Ports(Infiniband):
    """The collector of a folder's tree, with clocks that stand still, and no network of this machine's."""

    def __init__(self, folder: Path, pread: Mapping[str, int] | None = None, boot_id: str = "boot1") -> None:
        self.now, self.unix = 0.0, 1_700_000_000.0
        self.refused: dict[str, int] = dict(pread or {})
        self.asked = Counter[str]()
        super().__init__(
            folder / "sys",
            "node1",
            folder / "state" / "ports.json",
            routes=folder / "route",
            boot_id=boot_id,
            clock=lambda: self.now,
            wall=lambda: self.unix,
            pread=self.pread,
        )

    def pread(self, file: int, length: int, offset: int) -> bytes:
        """Fail as the kernel does for the files in `refused`."""
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        self.asked[name] += 1
        if name in self.refused:
            raise OSError(self.refused[name], os.strerror(self.refused[name]))
        return os.pread(file, length, offset)

    def after(self, seconds: float) -> list[Sample]:
        """Return what is read so many seconds later."""
        self.now += seconds
        self.unix += seconds
        return self.read()


def values(samples: list[Sample], device: str = "mlx5_0", port: str = "1") -> dict[str, float]:
    """Return one port's series in base units; a third label is behind a colon."""
    return {
        ":".join((row.name.removeprefix("infiniband_"), *labels[2:])): value * row.scale
        for row, labels, value in samples
        if labels[:2] == (device, port) and row.type != "info"
    }


def identity(samples: list[Sample], device: str = "mlx5_0") -> dict[str, str]:
    """Return a device's info labels."""
    return next(
        dict(zip(row.labels, labels, strict=True))
        for row, labels, _ in samples
        if row is INFINIBAND_INFO and labels[0] == device
    )


LINK_UP = {
    "port_present": 1,
    "port_state_id": 4,
    "port_physical_state_id": 5,
    "port_rate_bytes_per_second": 50e9,
    "port_expected_rate_bytes_per_second": 50e9,
    "link_flaps_total": 0,
    "link_outages_total": 0,
    "link_flapping": 0,
    "port_unread_files": 0,
}
NDR_VALUES = {
    **LINK_UP,
    "transmit_data_bytes_total": 4 * 230442669431839,
    "receive_data_bytes_total": 4 * 230539874932483,
    "transmit_packets_total": 315487941081,
    "receive_packets_total": 317548853677,
    "symbol_errors_total": 0,
    "link_error_recovery_total": 0,
    "link_downed_total": 0,
    "receive_errors_total": 14,
    "receive_remote_physical_errors_total": 0,
    "local_link_integrity_errors_total": 0,
    "excessive_buffer_overrun_errors_total": 15,
    "counter_saturated:excessive_buffer_overrun_errors": 1,
    "local_ack_timeouts_total": 0,
    "transmit_wait_ticks_total": 2489603687,
    "transmit_discards_total": 0,
    "out_of_buffer_total": 0,
    "out_of_sequence_total": 0,
    "packet_sequence_errors_total": 0,
    "rnr_nak_retries_total": 0,
    "implied_sequence_errors_total": 0,
    "duplicate_requests_total": 0,
    "vl15_dropped_total": 0,
    "requester_errors_total": 0,
    "responder_errors_total": 0,
    "requester_flushes_total": 0,
    "responder_flushes_total": 0,
    "received_write_requests_total": 3809045607,
    "received_read_requests_total": 9187392,
    "received_dynamic_connects_total": 422237,
    "transmit_unicast_packets_total": 315487941081,
    "receive_unicast_packets_total": 317548853677,
    "transmit_multicast_packets_total": 0,
    "receive_multicast_packets_total": 0,
    "receive_switch_relay_errors_total": 1,
    "adaptive_retransmissions_total": 3,
}

# Counters of events that Ethernet does not have, which mlx5 returns as a constant 0 on a RoCE port.
INFINIBAND_ONLY = (
    "symbol_errors_total",
    "link_error_recovery_total",
    "link_downed_total",
    "receive_remote_physical_errors_total",
    "local_link_integrity_errors_total",
    "excessive_buffer_overrun_errors_total",
    "counter_saturated:excessive_buffer_overrun_errors",
    "vl15_dropped_total",
)

# What is there, in which units.


def test_an_ndr_port_of_the_h100_capture_in_base_units(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    samples = Ports(tmp_path).read()
    assert identity(samples) == {
        "device": "mlx5_0",
        "port": "1",
        "host": "node1",
        "board_id": "MT_0000000838",
        "firmware_version": "28.41.1000",
        "hca_type": "MT4129",
        "link_layer": "InfiniBand",
        "net_device": "",
        "role": "",
        "rail": "",
    }
    assert values(samples) == NDR_VALUES


def test_a_roce_port_has_the_congestion_counters_and_its_net_device(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / "mlx5_bond_0")
    port = "class/infiniband/mlx5_bond_0/ports/1"
    write(sysfs, {f"{port}/hw_counters/{name}": number for number, name in enumerate(ROCE)})
    write(sysfs, {f"{port}/gid_attrs/ndevs/0": "bond0", "class/net/bond0/carrier_changes": 6})
    samples = Ports(tmp_path).read()
    seen = values(samples, "mlx5_bond_0")
    assert (identity(samples, "mlx5_bond_0")["link_layer"], identity(samples, "mlx5_bond_0")["net_device"]) == (
        "Ethernet",
        "bond0",
    )
    assert seen.pop("congestion_notifications_handled_total") == 0
    assert seen.pop("congestion_notifications_ignored_total") == 1
    assert seen.pop("congestion_marked_packets_total") == 2
    assert seen.pop("congestion_notifications_sent_total") == 3
    assert seen.pop("carrier_changes_total") == 6
    rates = {"port_rate_bytes_per_second": 25e9, "port_expected_rate_bytes_per_second": 25e9}
    assert seen == {name: value for name, value in NDR_VALUES.items() if name not in INFINIBAND_ONLY} | rates


def test_a_roce_port_has_no_counter_of_events_that_ethernet_lacks(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    assert values(ports.read()).keys() >= {*INFINIBAND_ONLY}
    write(sysfs, {f"{PORT}/link_layer": "Ethernet"})  # an adapter that an administrator switched to Ethernet
    seen = values(Ports(tmp_path).read())
    assert seen.keys().isdisjoint(INFINIBAND_ONLY)
    assert (seen["receive_errors_total"], seen["transmit_discards_total"], seen["port_unread_files"]) == (14, 0, 0)


def test_counters_that_read_no_pma_are_absent_and_the_state_is_there(tmp_path: Path) -> None:
    tree(tmp_path, CAPTURES / "legacy" / "i40iw0")
    assert values(Ports(tmp_path).read(), "i40iw0") == LINK_UP | {
        "port_rate_bytes_per_second": 1.25e9,
        "port_expected_rate_bytes_per_second": 1.25e9,
    }


def test_an_mlx4_device_has_two_ports_and_the_wider_of_two_files_for_a_number(tmp_path: Path) -> None:
    tree(tmp_path, CAPTURES / "legacy" / "mlx4_0")
    samples = Ports(tmp_path).read()
    up = LINK_UP | {"port_rate_bytes_per_second": 5e9, "port_expected_rate_bytes_per_second": 5e9}
    assert values(samples, "mlx4_0", "1") == up | {
        "transmit_data_bytes_total": 4 * 3733440,
        "receive_data_bytes_total": 4 * 4631917,
        "transmit_packets_total": 6235865,  # port_xmit_packets_64 reads 0
        "receive_packets_total": 6825908347,
        "link_error_recovery_total": 0,
        "link_downed_total": 0,
        "receive_errors_total": 0,
        "transmit_discards_total": 5,
        "receive_discards_total": 0,
        "transmit_wait_ticks_total": 4294967295,
        "counter_saturated:port_xmit_wait": 1,
        "transmit_unicast_packets_total": 61239,
        "receive_unicast_packets_total": 61148,
        "transmit_multicast_packets_total": 16,
        "receive_multicast_packets_total": 93,
    }
    assert values(samples, "mlx4_0", "2") == up | {
        "transmit_data_bytes_total": 4 * 3733440,  # of counters_ext; counters/ reads 0
        "receive_data_bytes_total": 4 * 4631917,
        "transmit_packets_total": 0,
        "receive_packets_total": 0,
        "link_error_recovery_total": 0,
        "link_downed_total": 0,
        "transmit_unicast_packets_total": 61239,
        "receive_unicast_packets_total": 61148,
        "transmit_multicast_packets_total": 16,
        "receive_multicast_packets_total": 93,
    }


def test_a_register_of_32_bits_that_stuck_gives_way_to_the_wider_file(tmp_path: Path) -> None:
    sysfs = tmp_path / "sys"
    write(sysfs, {f"{PORT}/counters/port_xmit_data": 2**32 - 1, f"{PORT}/counters_ext/port_xmit_data_64": 2**40})
    assert values(Ports(tmp_path).read())["transmit_data_bytes_total"] == 4 * 2**40


def test_an_efa_port_counts_bytes_and_is_as_active_as_its_net_device(tmp_path: Path) -> None:
    sysfs = tmp_path / "sys"
    device = "class/infiniband/rdmap79s0"
    port = f"{device}/ports/1"
    write(
        sysfs,
        {
            f"{port}/state": "4: ACTIVE",
            f"{port}/phys_state": "5: LinkUp",
            f"{port}/rate": "100 Gb/sec (4X EDR)",
            f"{port}/link_layer": "Unspecified",
            f"{port}/hw_counters/tx_bytes": 1000,
            f"{port}/hw_counters/rx_bytes": 2000,
            f"{port}/hw_counters/tx_pkts": 10,
            f"{port}/hw_counters/rx_pkts": 20,
            f"{port}/hw_counters/rx_drops": 1,
            f"{port}/hw_counters/send_bytes": 3,
            f"{port}/hw_counters/rdma_read_resp_bytes": 4,
            f"{port}/hw_counters/rdma_write_wrs": 5,
            f"{port}/hw_counters/retrans_timeout_events": 6,
            f"{port}/hw_counters/lifespan": 12,
            f"{device}/hw_counters/no_completion_cmds": 7,
            f"{device}/hw_counters/create_qp_err": 8,
            f"{device}/hw_counters/mmap_err": 0,
            f"{device}/device/net/eth1/dev_port": 0,
            "class/net/eth1/operstate": "up",
            "class/net/eth1/carrier_changes": 1,
        },
    )
    ports = Ports(tmp_path)
    samples = ports.read()
    assert (identity(samples, "rdmap79s0")["role"], identity(samples, "rdmap79s0")["net_device"]) == ("compute", "eth1")
    assert values(samples, "rdmap79s0") == LINK_UP | {
        "port_rate_bytes_per_second": 12.5e9,
        "port_expected_rate_bytes_per_second": 12.5e9,
        "transmit_data_bytes_total": 1000,
        "receive_data_bytes_total": 2000,
        "transmit_packets_total": 10,
        "receive_packets_total": 20,
        "receive_discards_total": 1,
        "efa_sent_bytes_total": 3,
        "efa_read_response_bytes_total": 4,
        "efa_write_requests_total": 5,
        "retransmit_timeouts_total": 6,
        "commands_lost_total": 7,
        "operation_errors_total:create_qp": 8,
        "operation_errors_total:mmap": 0,
        "carrier_changes_total": 1,
    }
    write(sysfs, {"class/net/eth1/operstate": "down"})
    assert values(ports.read(), "rdmap79s0")["port_state_id"] == 1


def test_what_an_infiniband_port_alone_has(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    hwmon = "class/infiniband/mlx5_0/device/hwmon/hwmon3"
    write(
        sysfs,
        {
            f"{PORT}/lid": "0x11b",
            f"{PORT}/sm_lid": "0x1",
            f"{hwmon}/temp1_input": 61000,
            f"{hwmon}/temp1_label": "asic",
            f"{hwmon}/temp2_input": 48500,
            f"{hwmon}/temp2_label": "Module0",
            f"{hwmon}/temp2_crit": 75000,
        },
    )
    assert values(Ports(tmp_path).read()) == NDR_VALUES | {
        "port_lid": 283,
        "port_subnet_manager_lid": 1,
        "temperature_celsius:asic": 61.0,
        "temperature_celsius:Module0": 48.5,
    }


def test_where_one_address_cannot_be_read_the_other_is_not_asked_for(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    write(sysfs, {f"{PORT}/sm_lid": "0x1"})
    (sysfs / PORT / "lid").symlink_to("/proc/self/mem")  # EIO
    assert values(Ports(tmp_path).read()) == NDR_VALUES


def test_every_file_of_the_capture_is_a_counter_of_the_catalogue() -> None:
    files = {str(file.relative_to(NDR / "ports" / "1")) for file in NDR.glob("ports/1/*counters/*")}
    assert files - COUNTERS.keys() == {"hw_counters/lifespan"}
    assert {f"hw_counters/{name}" for name in NEWER + ROCE} <= COUNTERS.keys()


def test_every_counter_of_the_catalogue_is_read_from_each_of_its_files(tmp_path: Path) -> None:
    rows = [row for row in all_metrics() if isinstance(row, PortCounter)]
    for turn in range(max(len(row.files) for row in rows)):
        sysfs = tmp_path / str(turn) / "sys"
        files = {row.files[turn]: row for row in rows if turn < len(row.files)}
        write(
            sysfs,
            {
                f"{PORT}/link_layer": "InfiniBand",
                **{f"{PORT}/{file}".replace(f"{PORT}/device/", "class/infiniband/mlx5_0/"): 7 for file in files},
            },
        )
        assert {row for row, _, _ in Ports(tmp_path / str(turn)).read()} >= set(files.values())


@pytest.mark.parametrize(("device", "more"), [("mlx5_0", NEWER), ("mlx5_bond_0", NEWER + ROCE)])
def test_a_port_with_everything_a_healthy_one_has_is_within_60_series(
    tmp_path: Path, device: str, more: tuple[str, ...]
) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / device)
    folder = f"class/infiniband/{device}"
    write(sysfs, {f"{folder}/ports/1/hw_counters/{name}": 1 for name in more})
    write(sysfs, {f"{folder}/device/hwmon/hwmon0/temp{number}_input": 50000 for number in (1, 2)})
    write(
        sysfs,
        {
            f"{folder}/ports/1/lid": "0x1",
            f"{folder}/ports/1/sm_lid": "0x1",
            f"{folder}/device/net/eth0/dev_port": 0,
            "class/net/eth0/carrier_changes": 1,
        },
    )
    gpus = {f"GPU-{index}": {"gpu": str(index), "uuid": f"GPU-{index}", "pci_bus_id": ""} for index in range(8)}
    write(tmp_path, {"state/gpus.json": json.dumps(gpus)})
    samples = Ports(tmp_path).read()
    assert Counter(labels[:2] for _, labels, _ in samples) == {(device, "1"): {"mlx5_0": 51, "mlx5_bond_0": 46}[device]}


# A file that cannot be read hides no other.


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENODEV, errno.EAGAIN, errno.ENODATA, errno.EISDIR])
def test_a_file_that_fails_costs_its_own_series_only(tmp_path: Path, error: int) -> None:
    tree(tmp_path, NDR)
    ports = Ports(tmp_path, {"symbol_error": error, "phys_state": error})
    without = {
        key: value for key, value in NDR_VALUES.items() if key not in ("symbol_errors_total", "port_physical_state_id")
    }
    assert values(ports.read()) == without
    ports.refused.clear()
    assert values(ports.after(300)) == NDR_VALUES


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENXIO])
def test_a_counter_the_firmware_refuses_is_asked_more_and_more_rarely(tmp_path: Path, error: int) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path, {"symbol_error": error})
    expected = {key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"} | {
        "port_unread_files": 1
    }
    asked = []
    for minute in range(300):
        before = ports.asked["symbol_error"]
        assert values(ports.after(60 if minute else 0)) == expected
        if ports.asked["symbol_error"] > before:
            asked.append(minute)
        if minute == 10:
            write(sysfs, {f"{PORT}/hw_counters/req_rnr_retries_exceeded": 0})  # all are opened again
            expected["rnr_retries_exceeded_total"] = 0
    assert asked == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    ports.refused.clear()
    assert values(ports.after(3600)) == NDR_VALUES | {"rnr_retries_exceeded_total": 0}


def test_a_state_that_is_refused_once_is_back_after_a_minute(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    assert values(ports.read()) == NDR_VALUES
    for _ in range(2):  # the wait does not grow where the file answered in between
        ports.refused["state"] = errno.EINVAL
        assert values(ports.after(1)) == {key: value for key, value in NDR_VALUES.items() if key != "port_state_id"} | {
            "port_unread_files": 1
        }
        ports.refused.clear()
        assert "port_state_id" not in values(ports.after(59))
        assert values(ports.after(1)) == NDR_VALUES


class Owned(Ports):
    """Ports whose mlx5_0 belongs to the fabric manager until `free`, or only its files that begin with `below`."""

    free = False
    below = ""

    def pread(self, file: int, length: int, offset: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{file}")
        if f"/mlx5_0/ports/1/{self.below}" in path and not self.free:
            self.asked["refused"] += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.pread(file, length, offset)


def test_a_port_that_the_fabric_manager_owns_is_left_alone_and_the_next_one_is_read(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    shutil.copytree(NDR, sysfs / "class/infiniband/mlx5_1")
    owned = {path.name for path in NDR.rglob("*") if path.is_file()} - {"lifespan"}
    ports = Owned(tmp_path)
    tries = {}
    for second in range(0, 601, 15):
        before = ports.asked["refused"]
        samples = ports.after(15 if second else 0)
        if ports.asked["refused"] > before:
            tries[second] = ports.asked["refused"] - before
        assert values(samples) == {
            "port_present": 1,
            "link_flaps_total": 0,
            "link_outages_total": 0,
            "link_flapping": 0,
            "port_unread_files": len(owned) - len({"board_id", "fw_ver", "hca_type", "link_layer"}),
        }
        assert values(samples, "mlx5_1") == NDR_VALUES
    assert tries == {0: 3, 60: 1, 180: 1, 420: 1}, "three files speak for 49, later one does"
    ports.free = True
    assert values(ports.after(3600)) == NDR_VALUES


def test_of_a_port_whose_counters_alone_are_refused_three_are_asked(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    ports = Owned(tmp_path)
    ports.below = "counters/"
    ports.refused = dict.fromkeys((path.name for path in NDR.glob("ports/1/hw_counters/*")), errno.EINVAL)
    assert values(ports.read()) == LINK_UP | {"port_unread_files": 46}
    assert ports.asked["refused"] == 3
    ports.after(60)
    assert ports.asked["refused"] == 4


def test_a_few_counters_that_the_firmware_does_not_have_hide_no_other(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    lacking = ("symbol_error", "link_downed", "port_rcv_errors", "out_of_buffer")
    series = ("symbol_errors_total", "link_downed_total", "receive_errors_total", "out_of_buffer_total")
    ports = Ports(tmp_path, dict.fromkeys(lacking, errno.EINVAL))
    expected = {key: value for key, value in NDR_VALUES.items() if key not in series} | {"port_unread_files": 4}
    assert values(ports.read()) == expected
    assert values(ports.after(60)) == expected


def test_a_device_that_was_removed_and_is_back_is_asked_again(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path, {"symbol_error": errno.EINVAL})
    assert "symbol_errors_total" not in values(ports.read())
    shutil.rmtree(sysfs / "class/infiniband/mlx5_0")
    ports.read()
    tree(tmp_path, NDR)
    ports.refused.clear()
    assert values(ports.read()) == NDR_VALUES


@pytest.mark.parametrize("unreadable", ["/proc/self/mem", "/nowhere", ".", "symbol_error"])
def test_real_files_that_cannot_be_read(tmp_path: Path, unreadable: str) -> None:
    sysfs = tree(tmp_path, NDR)
    file = sysfs / PORT / "counters/symbol_error"
    file.unlink()
    file.symlink_to(unreadable)  # EIO, ENOENT, EISDIR, ELOOP
    assert values(Ports(tmp_path).read()) == {
        key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"
    }


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Go on as an unprivileged user, since root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_file_this_user_may_not_open_hides_no_other() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        sysfs = tree(folder, NDR)
        (sysfs / PORT / "counters/symbol_error").chmod(0)
        with ordinary_user():
            with pytest.raises(PermissionError):
                (sysfs / PORT / "counters/symbol_error").read_text()
            assert values(Ports(folder).read()) == {
                key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"
            }


def test_a_class_folder_this_user_may_not_list_is_no_missing_port() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        sysfs = tree(folder, NDR)
        (sysfs / "class/infiniband").chmod(0o711)
        with ordinary_user(), pytest.raises(PermissionError):
            Ports(folder).read()


def test_a_file_that_vanishes_ends_its_series_and_comes_back(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    assert values(ports.read()) == NDR_VALUES
    (sysfs / PORT / "counters/symbol_error").unlink()
    assert values(ports.read()) == {key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"}
    write(sysfs, {f"{PORT}/counters/symbol_error": 3})
    assert values(ports.read()) == NDR_VALUES | {"symbol_errors_total": 3}
    shutil.rmtree(sysfs / PORT / "hw_counters")
    assert values(ports.read()) == {
        key: value
        for key, value in (NDR_VALUES | {"symbol_errors_total": 3}).items()
        if f"infiniband_{key}" not in {row.name for file, row in COUNTERS.items() if file.startswith("hw_counters/")}
        or key
        in ("transmit_data_bytes_total", "receive_data_bytes_total", "transmit_packets_total", "receive_packets_total")
    }


@pytest.mark.parametrize("garbage", [b"N/A (no PMA)\n", b"\xff\xfe\x00", b"-1\n", b"", b"\n", b"1e3", b"\xd9\xa4"])
def test_a_counter_that_is_no_number_is_absent(tmp_path: Path, garbage: bytes) -> None:
    sysfs = tree(tmp_path, NDR)
    (sysfs / PORT / "counters/symbol_error").write_bytes(garbage)
    ports = Ports(tmp_path)
    assert values(ports.read()) == {key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"}
    write(sysfs, {f"{PORT}/counters/symbol_error": 2})
    assert values(ports.read()) == NDR_VALUES | {"symbol_errors_total": 2}


def test_a_physical_state_that_repeats_the_logical_one_is_absent(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    write(sysfs, {f"{PORT}/phys_state": "4: ACTIVE"})
    assert values(Ports(tmp_path).read()) == {
        key: value for key, value in NDR_VALUES.items() if key != "port_physical_state_id"
    }


@given(st.binary(max_size=200))
def test_no_content_of_a_file_breaks_the_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("port")
    port = root / "sys" / PORT
    (port / "counters").mkdir(parents=True)
    for file in ("state", "phys_state", "rate", "link_layer", "lid", "counters/symbol_error", "counters/VL15_dropped"):
        (port / file).write_bytes(content)
    (root / "route").write_bytes(content)
    samples = Ports(root).read()
    assert values(samples)["port_present"] == 1
    assert all(value >= 0 for _, _, value in samples)


@pytest.mark.slow
@given(st.text())
def test_parsers_return_a_number_or_nothing(text: str) -> None:
    for parse, highest in (
        (counter, 2**64 - 1),
        (state, 99),
        (physical_state, 99),
        (rate, 1e6),
        (local_identifier, 2**32 - 1),
        (operational_state, 4),
        (temperature, 10**7),
    ):
        number = parse(text)
        assert number is None or abs(number) <= highest
    assert all(isinstance(name, str) for name in default_routes(text))


def test_texts_the_kernel_writes() -> None:
    assert [state(text) for text in ("4: ACTIVE", "1: DOWN", "2: INIT", "", "ACTIVE", "9" * 5000)] == [
        4,
        1,
        2,
        None,
        None,
        None,
    ]
    assert [physical_state(text) for text in ("5: LinkUp", "2: Polling", "4: ACTIVE", "")] == [5, 2, None, None]
    assert [rate(text) for text in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", "fast")] == [400, 2.5, None, None]
    assert [
        counter(text)
        for text in (
            "0",
            "18446744073709551615",
            "18446744073709551616",
            "9" * 5000,
            "N/A (no PMA)",
            "",
            "-1",
            "1_000",
            "\u0664",
        )
    ] == [0, 18446744073709551615, *[None] * 7]
    assert [local_identifier(text) for text in ("0x11b", "0xffff", "17", "")] == [283, 65535, None, None]
    assert [operational_state(text) for text in ("up", "down", "dormant", "unknown")] == [4, 1, None, None]
    assert [temperature(text) for text in ("61000", "-5000", "N/A")] == [61000, -5000, None]
    assert default_routes(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "bond0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "ib0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    ) == {"bond0"}


# Registers that wrap, stick or are cleared.


@pytest.mark.parametrize(
    ("wrap", "last", "number", "rise"),
    [
        (2**32, 2**32 - 1, 0, 1),
        (2**32, 2**32 - 10, 5, 15),
        (2**32, 100, 100, 0),
        (2**32, 100, 250, 150),
        (2**32, 1000, 3, 3),  # cleared
        (0, 65535, 0, 0),
        (0, 65535, 7, 7),
        (0, 3, 65535, 65532),
        (0, 2**64 - 1, 5, 5),
        (0, 10**15, 10**15 + 1, 1),
    ],
)
def test_how_far_a_register_rose(wrap: int, last: int, number: int, rise: int) -> None:
    assert risen(last, number, wrap) == rise


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1)))
def test_a_register_that_wraps_counts_what_it_saw(start: int, rises: list[int]) -> None:
    total = register = start
    for rise in rises:
        following = (register + rise) % 2**32
        total += risen(register, following, 2**32)
        register = following
    assert total == start + sum(rises)


@given(st.sampled_from([0, 2**32]), st.lists(st.integers(0, 2**32 - 1), min_size=2))
def test_no_sequence_of_readings_makes_a_counter_fall(wrap: int, readings: list[int]) -> None:
    assert all(risen(last, number, wrap) >= 0 for last, number in itertools.pairwise(readings))


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    write(sysfs, {f"{PORT}/hw_counters/out_of_sequence": 2**32 - 2})
    ports = Ports(tmp_path)
    seen = [values(ports.read())["out_of_sequence_total"]]
    for number in (3, 3, 2**31, 2**32 - 1, 0):
        write(sysfs, {f"{PORT}/hw_counters/out_of_sequence": number})
        seen.append(values(ports.read())["out_of_sequence_total"])
    assert seen == [2**32 - 2, 2**32 + 3, 2**32 + 3, 2**32 + 2**31, 2**33 - 1, 2**33]


@pytest.mark.parametrize(
    ("file", "highest", "series"),
    [
        ("symbol_error", 65535, "symbol_errors_total"),
        ("link_downed", 255, "link_downed_total"),
        ("local_link_integrity_errors", 15, "local_link_integrity_errors_total"),
        ("port_xmit_wait", 2**32 - 1, "transmit_wait_ticks_total"),
        # Without extended counters these have 32 bits.
        ("port_xmit_packets", 2**32 - 1, "transmit_packets_total"),
        ("port_rcv_packets", 2**32 - 1, "receive_packets_total"),
    ],
)
def test_a_saturated_counter_is_marked_until_it_is_cleared(
    tmp_path: Path, file: str, highest: int, series: str
) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    path = f"{PORT}/counters/{file}"
    others = {key: value for key, value in NDR_VALUES.items() if key != series}
    write(sysfs, {path: highest - 1})
    assert values(ports.read()) == others | {series: highest - 1}
    write(sysfs, {path: highest})
    assert values(ports.read()) == others | {series: highest, f"counter_saturated:{file}": 1}
    write(sysfs, {path: 2})
    assert values(ports.read()) == others | {series: highest + 2}


@pytest.mark.parametrize(
    ("file", "series"), [("port_xmit_data", "transmit_data_bytes_total"), ("port_rcv_data", "receive_data_bytes_total")]
)
def test_traffic_stuck_in_32_bits_is_saturated_and_a_wider_register_is_not(
    tmp_path: Path, file: str, series: str
) -> None:
    sysfs = tmp_path / "sys"
    seen = []
    for number in (2**32 - 1, 2**32):
        write(sysfs, {f"{PORT}/counters/{file}": number})
        read = values(Ports(tmp_path).read())
        seen.append({key: value for key, value in read.items() if key.endswith((series, file))})
    assert seen == [{series: 4 * (2**32 - 1), f"counter_saturated:{file}": 1}, {series: 4 * 2**32}]


# Counts across a restart of the exporter.


@pytest.mark.parametrize(("ended", "boot"), [(True, "boot1"), (False, "boot1"), (True, "boot2")])
def test_no_count_falls_over_a_restart_after_a_wrap_and_a_clear(tmp_path: Path, ended: bool, boot: str) -> None:
    sysfs = tree(tmp_path, NDR)
    wrapping, cleared = f"{PORT}/hw_counters/out_of_sequence", f"{PORT}/counters/port_rcv_errors"
    ports = Ports(tmp_path)
    for number, errors in ((2**32 - 5, 14), (100, 2)):
        write(sysfs, {wrapping: number, cleared: errors})
        ports.after(301)
    counted = {"out_of_sequence_total": 2**32 + 100, "receive_errors_total": 16}
    assert values(ports.read()) == NDR_VALUES | counted
    if ended:
        ports.close()
    write(sysfs, {wrapping: 107})
    for _ in range(2):
        ports = Ports(tmp_path, boot_id=boot)
        assert values(ports.read()) == NDR_VALUES | counted | {"out_of_sequence_total": 2**32 + 107}
        ports.close()


@pytest.mark.parametrize(
    ("boot", "number", "counted"),
    [
        ("boot1", 3, 2**32 + 3),  # wrapped between two reads
        ("boot2", 3, 2**32 - 7 + 3),  # restarted from 0
        ("boot1", 2**32 - 6, 2**32 - 6),
    ],
)
def test_a_register_that_is_soon_to_wrap_is_kept(tmp_path: Path, boot: str, number: int, counted: int) -> None:
    sysfs = tree(tmp_path, NDR)
    register = f"{PORT}/hw_counters/out_of_sequence"
    write(sysfs, {register: 2**32 - 7})
    ports = Ports(tmp_path)
    ports.read()
    ports.close()
    write(sysfs, {register: number})
    assert values(Ports(tmp_path, boot_id=boot).read())["out_of_sequence_total"] == counted


def test_a_device_recreated_between_reads_begins_at_zero(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    register = f"{PORT}/hw_counters/out_of_sequence"
    write(sysfs, {register: 2**32 - 7})
    ports = Ports(tmp_path)
    ports.read()
    ports.close()
    (sysfs / "class/infiniband/mlx5_0").rename(tmp_path / "old")  # so that the inode is not taken again
    tree(tmp_path, NDR)
    write(sysfs, {register: 3})
    assert values(Ports(tmp_path).read())["out_of_sequence_total"] == 2**32 - 7 + 3


def test_the_file_that_was_cleared_goes_on_where_another_has_the_same_number(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, CAPTURES / "legacy" / "mlx4_0")
    port = "class/infiniband/mlx4_0/ports/1"
    ports = Ports(tmp_path)
    ports.read()
    write(sysfs, {f"{port}/counters/port_xmit_packets": 5})
    before = values(ports.read(), "mlx4_0")["transmit_packets_total"]
    ports.close()
    write(sysfs, {f"{port}/counters_ext/port_xmit_packets_64": 9})
    assert values(Ports(tmp_path).read(), "mlx4_0")["transmit_packets_total"] == before == 6235865 + 5


def test_the_counts_of_a_port_that_is_missing_at_the_restart_are_kept(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    for number in (9, 4):
        write(sysfs, {f"{PORT}/counters/symbol_error": number, f"{PORT}/hw_counters/out_of_sequence": 2**32 - 7})
        ports.read()
    ports.close()
    (sysfs / "class/infiniband/mlx5_0").rename(tmp_path / "out")
    missing = Ports(tmp_path, boot_id="boot2")
    missing.read()
    missing.close()
    (tmp_path / "out").rename(sysfs / "class/infiniband/mlx5_0")
    write(sysfs, {f"{PORT}/hw_counters/out_of_sequence": 3})  # restarted from 0, with the same inode
    back = values(Ports(tmp_path, boot_id="boot2").read())
    assert (back["symbol_errors_total"], back["out_of_sequence_total"]) == (13, 2**32 - 7 + 3)


@pytest.mark.parametrize(
    "kept",
    [
        None,
        [],
        {"counters/symbol_error": 3},
        {"counters/symbol_error": [3]},
        {"counters/symbol_error": [3, 4]},
        {"counters/symbol_error": [3, -1]},
        {"counters/symbol_error": [True, True]},
        {"counters/symbol_error": [9e9, 1]},
        {"counters/symbol_error": [2**90, 1]},
        {"counters/../../x": [3, 1]},
    ],
)
def test_counts_of_another_shape_are_forgotten(tmp_path: Path, kept: object) -> None:
    tree(tmp_path, NDR)
    Ports(tmp_path).read()
    history = tmp_path / "state/port_history.json"
    stored = json.loads(history.read_text())
    stored["ports"]["mlx5_0/1"]["counters"] = kept
    history.write_text(json.dumps(stored))
    assert values(Ports(tmp_path).read()) == NDR_VALUES


def test_the_history_is_written_when_it_changed_and_counts_at_most_every_five_minutes(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    history = tmp_path / "state/port_history.json"

    def writes(file: str) -> int:
        """Return how often it was written in 100 scrapes, 15 s apart, in which this counter moves."""
        written = set()
        for scrape in range(100):
            write(sysfs, {f"{PORT}/{file}": 1000 + scrape})
            ports.after(15)
            written.add(history.stat().st_mtime_ns)
        return len(written) - 1

    ports.after(300)
    assert writes("counters/symbol_error") == 5
    assert writes("hw_counters/out_of_buffer") == 5
    written = history.stat().st_mtime_ns
    ports.after(301)  # the last scrapes of `writes`
    for _ in range(100):
        ports.after(15)
    assert history.stat().st_mtime_ns == written, "nothing changed"
    assert history.stat().st_size < 2000


@pytest.mark.parametrize("boot", ["boot1", "boot2"])
def test_a_count_survives_a_register_that_is_cleared_while_no_exporter_runs(tmp_path: Path, boot: str) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    assert values(ports.read())["receive_errors_total"] == 14
    ports.close()
    for register, total in ((0, 14), (3, 17)):
        write(sysfs, {f"{PORT}/counters/port_rcv_errors": register})
        ports = Ports(tmp_path, boot_id=boot)
        assert values(ports.read())["receive_errors_total"] == total
        ports.close()


FILES = ("hw_counters/out_of_sequence", "counters/symbol_error")  # one wraps, one sticks
EVENTS = st.sampled_from(["clear", "reboot", "stop", "crash", "start", "replace"])


@given(st.lists(st.one_of(st.integers(0, 2**31 - 1), EVENTS), max_size=16))
def test_no_count_falls_whatever_happens(tmp_path_factory: pytest.TempPathFactory, events: list[int | str]) -> None:
    """Registers rise, wrap, stick and are cleared, and the machine boots, while an exporter runs or none does."""
    root = tmp_path_factory.mktemp("port")
    registers = dict.fromkeys(FILES, 0)
    counted: dict[str, float] = {}
    boot = 1
    ports: Ports | None = None
    for event in [*events, "start"]:
        if isinstance(event, int):
            registers["hw_counters/out_of_sequence"] = (registers["hw_counters/out_of_sequence"] + event) % 2**32
            registers["counters/symbol_error"] = min(registers["counters/symbol_error"] + event % 9999, 2**16 - 1)
        elif event == "start":
            ports = ports or Ports(root, boot_id=f"boot{boot}")
        elif event in ("stop", "crash", "reboot") and ports is not None:
            ports.after(301)  # a crash loses the counts of up to five minutes
            if event != "crash":
                ports.close()
            ports = None
        if event in ("clear", "reboot", "replace"):
            registers = dict.fromkeys(FILES, 0)
        if event == "replace" and (root / "sys").exists():
            (root / "sys/class/infiniband/mlx5_0").rename(tempfile.mkdtemp(dir=root) + "/old")  # keeps its inode
        boot += event == "reboot"
        write(root / "sys", {f"{PORT}/{file}": number for file, number in registers.items()})
        if ports is not None:
            now = values(ports.read())
            assert all(now[name] >= before for name, before in counted.items())
            counted = {name: now[name] for name in ("out_of_sequence_total", "symbol_errors_total")}
    assert ports is not None
    ports.close()


def test_no_series_before_the_first_event_of_a_quiet_counter(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    assert "slow_restarts_total" not in values(ports.read())
    write(sysfs, {f"{PORT}/hw_counters/roce_slow_restart": 1})
    assert values(ports.read()) == NDR_VALUES | {"slow_restarts_total": 1}


# Ports that come and go.


@pytest.mark.parametrize("restart", [False, True])
def test_a_port_that_is_gone_is_0_with_its_identity(tmp_path: Path, restart: bool) -> None:
    sysfs = tree(tmp_path, NDR, CAPTURES / "h100_node" / "mlx5_1")
    ports = Ports(tmp_path)
    before = identity(ports.read(), "mlx5_1")
    shutil.rmtree(sysfs / "class/infiniband/mlx5_1")
    if restart:
        ports = Ports(tmp_path)
    samples = ports.read()
    assert values(samples, "mlx5_1") == {"port_present": 0}
    assert identity(samples, "mlx5_1") == before
    assert values(samples) == NDR_VALUES
    shutil.rmtree(sysfs / "class")
    assert {value for row, _, value in ports.read() if row is INFINIBAND_PORT_PRESENT} == {0}


def test_a_port_that_is_back_has_the_same_series_and_no_counter_fell(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    before = ports.read()
    shutil.rmtree(sysfs / "class/infiniband/mlx5_0")
    ports.read()
    tree(tmp_path, NDR)
    write(sysfs, {f"{PORT}/counters/port_xmit_data": 5, f"{PORT}/hw_counters/rx_write_requests": 7})
    after = ports.read()
    assert [sample[:2] for sample in after] == [sample[:2] for sample in before]
    assert values(after) == NDR_VALUES | {
        "transmit_data_bytes_total": NDR_VALUES["transmit_data_bytes_total"] + 4 * 5,
        "received_write_requests_total": NDR_VALUES["received_write_requests_total"] + 7,
    }


def function(sysfs: Path, device: str, address: str) -> Path:
    """Put a device's adapter on the bus, and return its folder."""
    folder = sysfs / "devices/pci0000:10" / address
    write(folder, {"numa_node": 0})
    (folder / "infiniband" / device).mkdir(parents=True)
    (sysfs / "class/infiniband" / device / "device").symlink_to(folder)
    (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sysfs / "bus/pci/devices" / address).symlink_to(folder)
    (folder / "driver").symlink_to(sysfs / "bus/pci/drivers/mlx5_core")
    return folder


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("what", "present"),
    [
        ("moved to a container's network namespace", None),
        ("given to a virtual machine", None),
        ("left without a driver", 0),
        ("given up by its driver", 0),
        ("gone from the bus", 0),
    ],
)
def test_a_port_that_serves_others_is_not_missing(
    tmp_path: Path, what: str, present: float | None, restart: bool
) -> None:
    sysfs = tree(tmp_path, NDR, CAPTURES / "h100_node" / "mlx5_1")
    adapter = function(sysfs, "mlx5_1", "0000:1a:00.0")
    ports = Ports(tmp_path)
    before = ports.read()
    (sysfs / "class/infiniband/mlx5_1/device").unlink()
    shutil.rmtree(sysfs / "class/infiniband/mlx5_1")
    (adapter / "infiniband/mlx5_1").rmdir()
    if what != "moved to a container's network namespace":
        (adapter / "infiniband").rmdir()
    if what in ("given to a virtual machine", "left without a driver"):
        (adapter / "driver").unlink()
    if what == "given to a virtual machine":
        (adapter / "driver").symlink_to(sysfs / "bus/pci/drivers/vfio-pci")
    if what == "gone from the bus":
        (sysfs / "bus/pci/devices/0000:1a:00.0").unlink()
    samples = Ports(tmp_path).read() if restart else ports.read()
    assert values(samples, "mlx5_1") == ({} if present is None else {"port_present": present})
    assert identity(samples, "mlx5_1") == identity(before, "mlx5_1")
    assert values(samples) == NDR_VALUES


def test_a_port_that_its_adapter_lost_is_missing(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    function(sysfs, "mlx5_0", "0000:1a:00.0")
    ports = Ports(tmp_path)
    ports.read()
    shutil.rmtree(sysfs / PORT)
    assert values(ports.read()) == {"port_present": 0}


@pytest.mark.parametrize("mark", ["physfn", "sfnum"])
def test_virtual_functions_come_and_go_without_a_trace(tmp_path: Path, mark: str) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    for number in range(300):
        device = f"class/infiniband/mlx5_{100 + number}"
        write(sysfs, {f"{device}/ports/1/state": "4: ACTIVE", f"{device}/device/{mark}": ""})
        if number % 100 == 99:
            assert {labels[0] for _, labels, _ in ports.read()} == {"mlx5_0"}
            for folder in (sysfs / "class/infiniband").glob("mlx5_[1-9]*"):
                shutil.rmtree(folder)
    ports.close()
    for file in ("ports.json", "port_history.json"):
        assert "mlx5_1" not in (tmp_path / "state" / file).read_text()


def test_names_that_change_fill_neither_the_inventory_nor_the_disk_and_push_out_no_known_port(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    ports.read()
    shutil.rmtree(sysfs / "class/infiniband/mlx5_0")
    for number in range(0, 300, 50):
        devices = [sysfs / f"class/infiniband/rxe{number + offset}" for offset in range(50)]
        for device in devices:
            write(device, {"ports/1/state": "4: ACTIVE"})
        seen = {labels for row, labels, _ in ports.read() if row is INFINIBAND_PORT_PRESENT}
        assert ("mlx5_0", "1") in seen
        assert len(seen) <= MAX_PORTS
        assert {(device.name, "1") for device in devices} <= seen
        for device in devices:
            shutil.rmtree(device)
    ports.read()
    ports.close()
    assert len(json.loads((tmp_path / "state/ports.json").read_text())) == MAX_PORTS
    history = json.loads((tmp_path / "state/port_history.json").read_text())
    assert len(history["ports"]) == MAX_PORTS
    assert len(ports._gone) == MAX_PORTS


def test_of_more_ports_than_a_node_can_have_the_first_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(70):
        write(tmp_path / "sys", {f"class/infiniband/rxe{number}/ports/1/state": "4: ACTIVE"})
    ports = Ports(tmp_path)
    for _ in range(2):
        assert sum(row is INFINIBAND_PORT_PRESENT for row, _, _ in ports.after(300)) == MAX_PORTS
    assert [record.message for record in caplog.records] == [
        f"70 ports in {tmp_path}/sys/class/infiniband, only 64 are read"
    ]


def test_a_port_whose_folder_alone_vanishes_is_gone(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    ports.read()
    shutil.rmtree(sysfs / PORT)
    assert values(ports.read()) == {"port_present": 0}


def test_without_any_port_the_source_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no port in"):
        Ports(tmp_path).read()


def test_a_disk_that_takes_nothing_costs_no_reading(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    (tmp_path / "state").write_text("a file where the folder should be")
    assert values(Ports(tmp_path).read()) == NDR_VALUES


# The link over time.


def down(sysfs: Path) -> None:
    write(sysfs, {f"{PORT}/state": "1: DOWN", f"{PORT}/phys_state": "2: Polling", f"{PORT}/rate": "10 Gb/sec (4X SDR)"})


def up(sysfs: Path, gigabits: int = 400) -> None:
    write(
        sysfs,
        {
            f"{PORT}/state": "4: ACTIVE",
            f"{PORT}/phys_state": "5: LinkUp",
            f"{PORT}/rate": f"{gigabits} Gb/sec (4X NDR)",
        },
    )


def test_a_slower_link_is_seen_against_the_highest_rate_across_a_restart(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    Ports(tmp_path).read()
    up(sysfs, 200)
    ports = Ports(tmp_path)
    slower = {"port_rate_bytes_per_second": 25e9, "port_expected_rate_bytes_per_second": 50e9}
    assert values(ports.read()) == NDR_VALUES | slower
    down(sysfs)
    assert values(ports.read())["port_expected_rate_bytes_per_second"] == 50e9
    up(sysfs, 200)
    history = tmp_path / "state" / "port_history.json"
    kept = json.loads(history.read_text())
    del kept["ports"]["mlx5_0/1"]
    history.write_text(json.dumps(kept))
    assert values(ports.read()) == NDR_VALUES | slower | {"port_expected_rate_bytes_per_second": 25e9}


def test_a_port_that_was_never_active_has_no_expected_rate(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    down(sysfs)
    assert "port_expected_rate_bytes_per_second" not in values(Ports(tmp_path).read())


@pytest.mark.parametrize("clear", ["", "mlx5_0\n", "mlx5_7 mlx5_0/1"])
def test_flaps_are_counted_across_restarts_until_they_are_cleared(tmp_path: Path, clear: str) -> None:
    sysfs = tree(tmp_path, NDR)
    for flaps in range(1, 4):
        ports = Ports(tmp_path)
        ports.now, ports.unix = 50.0 * flaps, 1_700_000_000.0 + 1000 * flaps
        up(sysfs)
        ports.read()
        down(sysfs)
        ports.after(1)
        up(sysfs)
        ports.after(30)
        assert values(ports.read()) == NDR_VALUES | {"link_flaps_total": flaps, "link_flapping": flaps == 3}
    write(tmp_path, {"state/clear-flaps": "mlx5_7"})
    assert values(ports.read())["link_flapping"] == 1
    write(tmp_path, {"state/clear-flaps": clear})
    assert values(ports.read()) == NDR_VALUES | {"link_flaps_total": 3}
    assert not (tmp_path / "state" / "clear-flaps").exists()
    assert values(Ports(tmp_path).read()) == NDR_VALUES | {"link_flaps_total": 3}


def test_a_link_down_for_four_minutes_is_a_drop(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    ports.read()
    down(sysfs)
    assert values(ports.read())["link_outages_total"] == 0
    assert values(ports.after(240))["link_outages_total"] == 1


# The place among the GPUs.

RAILS = {"GPU-a": "0000:19:00.0", "GPU-b": "0000:3b:00.0"}


def pci(sysfs: Path, adapters: Mapping[str, str], gpus: Mapping[str, str]) -> None:
    """Put each adapter and each GPU below the switch with their address's first digit."""
    for name, address in (*adapters.items(), *gpus.items()):
        bus = address[5]
        folder = sysfs / "devices" / f"pci0000:{bus}0" / f"0000:{bus}0:01.0" / f"0000:{bus}1:00.0" / name / address
        write(folder, {"numa_node": 0})
        if name in adapters:
            (sysfs / "class/infiniband" / name / "device").symlink_to(folder)
        else:
            (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
            (sysfs / "bus/pci/devices" / address).symlink_to(folder)


def inventory(folder: Path, gpus: Mapping[str, str]) -> None:
    write(
        folder,
        {
            "state/gpus.json": json.dumps(
                {
                    uuid: {
                        "gpu": str(index),
                        "uuid": uuid,
                        "pci_bus_id": f"0000{address.upper()}",
                        "module_id": str(9 - index),
                    }
                    for index, (uuid, address) in enumerate(gpus.items())
                }
            )
        },
    )


def rails(samples: list[Sample]) -> dict[str, tuple[str, str]]:
    return {labels[0]: (labels[-2], labels[-1]) for row, labels, _ in samples if row is INFINIBAND_INFO}


@pytest.fixture
def two_rails(tmp_path: Path) -> Path:
    sysfs = tree(tmp_path, NDR, CAPTURES / "h100_node" / "mlx5_1")
    pci(sysfs, {"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:3c:00.0"}, RAILS)
    return tmp_path


def test_rails_come_with_the_gpus_and_follow_their_module_ids(two_rails: Path) -> None:
    ports = Ports(two_rails)
    assert rails(ports.read()) == {"mlx5_0": ("", ""), "mlx5_1": ("", "")}
    inventory(two_rails, RAILS)
    samples = ports.read()
    assert rails(samples) == {"mlx5_0": ("compute", "1"), "mlx5_1": ("compute", "0")}
    assert [labels for row, labels, _ in samples if row is INFINIBAND_GPU_AFFINITY_INFO] == [
        ("mlx5_1", "1", "1", "GPU-b", "PIX"),
        ("mlx5_0", "1", "0", "GPU-a", "PIX"),
    ]


@pytest.mark.parametrize("restart", [False, True])
def test_a_missing_port_or_gpu_keeps_its_place_and_the_others_their_rails(two_rails: Path, restart: bool) -> None:
    inventory(two_rails, RAILS)
    ports = Ports(two_rails)
    before = rails(ports.read())
    shutil.rmtree(two_rails / "sys/class/infiniband/mlx5_1")
    (two_rails / "sys/bus/pci/devices" / RAILS["GPU-b"]).unlink()
    if restart:
        ports = Ports(two_rails)
    assert rails(ports.after(1000)) == before


def test_an_adapter_in_the_place_of_a_missing_one_replaces_it(two_rails: Path) -> None:
    inventory(two_rails, RAILS)
    ports = Ports(two_rails)
    ports.read()
    root = two_rails / "sys/class/infiniband"
    (root / "mlx5_1").rename(root / "rocep60s0")
    samples = ports.read()
    assert rails(samples) == {"mlx5_0": ("compute", "1"), "rocep60s0": ("compute", "0")}
    assert values(samples, "mlx5_1") == {}


def test_the_port_below_the_default_route_is_for_management(two_rails: Path) -> None:
    inventory(two_rails, RAILS)
    write(
        two_rails,
        {
            "route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
            "bond0.7 00000000 0100A8C0 0003 0 0 0 00000000 0 0 0",
            "sys/class/net/bond0.7/lower_bond0": "",
            "sys/class/net/bond0/lower_eth5": "",
            "sys/class/infiniband/mlx5_1/device/net/eth5/dev_port": 0,
        },
    )
    assert rails(Ports(two_rails).read()) == {"mlx5_0": ("compute", "0"), "mlx5_1": ("management", "")}


def test_the_simulated_node_has_eight_rails_a_storage_port_and_keeps_a_removed_one(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.create(1_700_000_000)
    inventory(tmp_path, {node.uuid(gpu): f"0000:{bus:02x}:00.0" for gpu, bus in enumerate(PCI_BUSES)})
    ports = Ports(tmp_path)
    samples = ports.read()
    # `inventory` gives the GPUs falling module ids.
    whole = {device: ("compute", str(7 - gpu)) for gpu, device in enumerate(DEVICES)} | {"mlx5_bond_0": ("storage", "")}
    assert rails(samples) == whole
    assert [labels for row, labels, _ in samples if row is INFINIBAND_GPU_AFFINITY_INFO] == [
        (DEVICES[gpu], "1", str(gpu), node.uuid(gpu), "PIX") for gpu in reversed(range(8))
    ]
    node.remove("mlx5_5")
    node.tick(1_700_000_001)
    samples = ports.read()
    assert values(samples, "mlx5_5") == {"port_present": 0}
    assert rails(samples) == whole
    node.clear()
    node.tick(1_700_000_002)
    assert values(ports.read(), "mlx5_5")["port_present"] == 1


# What it costs.


def test_a_read_brings_the_same_objects_for_what_did_not_change(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    before = ports.read()
    write(sysfs, {f"{PORT}/counters/symbol_error": 1})
    changed = [(old, new) for old, new in zip(before, ports.read(), strict=True) if old is not new]
    assert [(old[0].name, old[2], new[2]) for old, new in changed] == [("infiniband_symbol_errors_total", 0, 1)]
    assert all(old[0] is new[0] and old[1] is new[1] for old, new in changed)


def test_each_file_is_asked_once_per_read_and_none_stays_open_twice(tmp_path: Path) -> None:
    def opened() -> int:
        """Return how many files of this tree are open; collectors of other tests may be garbage yet."""
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if link.is_symlink())

    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    ports.read()
    assert opened() == 49
    for turn in range(5):
        ports.asked.clear()
        write(sysfs, {f"{PORT}/hw_counters/new_{turn}": 0})
        ports.after(301)
        assert set(ports.asked.values()) == {1}
        assert len(ports.asked) == 49
    assert opened() == 49
    ports.close()
    assert opened() == 0


def test_the_factory_reads_the_files_next_to_its_inventory(two_rails: Path) -> None:
    inventory(two_rails, RAILS)
    state_folder = two_rails / "state"
    collector = build(
        host="node1",
        inventory=str(state_folder / "ports.json"),
        sysfs=str(two_rails / "sys"),
        gpus=str(state_folder / "gpus.json"),
        state=str(state_folder / "port_history.json"),
    )
    assert rails(collector.read()) == {"mlx5_0": ("compute", "1"), "mlx5_1": ("compute", "0")}
    assert sorted(path.name for path in state_folder.iterdir()) == ["gpus.json", "port_history.json", "ports.json"]


def test_rows_with_a_width_say_what_happens_at_its_end() -> None:
    def end(row: Metric) -> str:
        return row.help.partition("Sticks" if "Sticks" in row.help else "The register")[2]

    assert end(COUNTERS["counters/symbol_error"]) == " at 65535. Absent on RoCE."
    assert end(COUNTERS["hw_counters/rx_write_requests"]) == " wraps at 2^32, the counter does not."
    assert end(COUNTERS["counters/port_xmit_data"]) == ""
    assert {row.bits for row in COUNTERS.values()} == {4, 8, 16, 32, 64}
    assert INFINIBAND_COUNTER_SATURATED.labels == ("device", "port", "counter")
