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
    INFINIBAND_GPU_AFFINITY,
    INFINIBAND_INFO,
    INFINIBAND_PRESENT,
    INFINIBAND_SATURATED,
    Metric,
    PortCounter,
    Sample,
    all_metrics,
)
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.infiniband import (
    Infiniband,
    build,
    counter,
    default_routes,
    physical_state,
    rate,
    state,
)
from flopwatch.node.collectors.infiniband.port import COUNTERS, local_identifier, operational_state, risen, temperature
from flopwatch.simulate.node import DEVICES, PCI_BUSES, SimulatedNode

CAPTURES = Path(__file__).parent / "captures" / "infiniband"
NDR = CAPTURES / "h100_node" / "mlx5_0"
PORT = "class/infiniband/mlx5_0/ports/1"
# mlx5 files that newer drivers and RoCE ports have, beside those of the capture.
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

    def __init__(self, folder: Path, pread: Mapping[str, int] | None = None) -> None:
        self.now, self.unix = 0.0, 1_700_000_000.0
        self.refused: dict[str, int] = dict(pread or {})
        self.asked = Counter[str]()
        super().__init__(
            folder / "sys", "node1", folder / "state" / "ports.json", routes=folder / "route",
            clock=lambda: self.now, wall=lambda: self.unix, pread=self.pread,
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
        for row, labels, value in samples if labels[:2] == (device, port) and row.type != "info"
    }


def identity(samples: list[Sample], device: str = "mlx5_0") -> dict[str, str]:
    """Return a device's info labels."""
    return next(
        dict(zip(row.labels, labels, strict=True)) for row, labels, _ in samples
        if row is INFINIBAND_INFO and labels[0] == device
    )


LINK_UP = {
    "port_present": 1, "port_state_id": 4, "port_physical_state_id": 5, "port_rate_bytes_per_second": 50e9,
    "port_expected_rate_bytes_per_second": 50e9, "link_flaps_total": 0, "link_drops_total": 0, "link_flapping": 0,
    "port_refused_files": 0,
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

# What is there, in which units.


def test_an_ndr_port_of_the_h100_capture_in_base_units(tmp_path: Path) -> None:
    tree(tmp_path, NDR)
    samples = Ports(tmp_path).read()
    assert identity(samples) == {
        "device": "mlx5_0", "port": "1", "host": "node1", "board_id": "MT_0000000838", "firmware_version": "28.41.1000",
        "hca_type": "MT4129", "link_layer": "InfiniBand", "net_device": "", "role": "", "rail": "",
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
        "Ethernet", "bond0")
    assert seen.pop("congestion_notifications_handled_total") == 0
    assert seen.pop("congestion_notifications_ignored_total") == 1
    assert seen.pop("congestion_marked_packets_total") == 2
    assert seen.pop("congestion_notifications_sent_total") == 3
    assert seen.pop("carrier_changes_total") == 6
    assert seen == NDR_VALUES | {
        "port_rate_bytes_per_second": 25e9, "port_expected_rate_bytes_per_second": 25e9}


def test_counters_that_read_no_pma_are_absent_and_the_state_is_there(tmp_path: Path) -> None:
    tree(tmp_path, CAPTURES / "legacy" / "i40iw0")
    assert values(Ports(tmp_path).read(), "i40iw0") == LINK_UP | {
        "port_rate_bytes_per_second": 1.25e9, "port_expected_rate_bytes_per_second": 1.25e9}


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
    write(sysfs, {
        f"{port}/state": "4: ACTIVE", f"{port}/phys_state": "5: LinkUp", f"{port}/rate": "100 Gb/sec (4X EDR)",
        f"{port}/link_layer": "Unspecified", f"{port}/hw_counters/tx_bytes": 1000, f"{port}/hw_counters/rx_bytes": 2000,
        f"{port}/hw_counters/tx_pkts": 10, f"{port}/hw_counters/rx_pkts": 20, f"{port}/hw_counters/rx_drops": 1,
        f"{port}/hw_counters/send_bytes": 3, f"{port}/hw_counters/rdma_read_resp_bytes": 4,
        f"{port}/hw_counters/rdma_write_wrs": 5, f"{port}/hw_counters/retrans_timeout_events": 6,
        f"{port}/hw_counters/lifespan": 12,
        f"{device}/hw_counters/no_completion_cmds": 7, f"{device}/hw_counters/create_qp_err": 8,
        f"{device}/hw_counters/mmap_err": 0, f"{device}/device/net/eth1/dev_port": 0,
        "class/net/eth1/operstate": "up", "class/net/eth1/carrier_changes": 1,
    })
    ports = Ports(tmp_path)
    samples = ports.read()
    assert (identity(samples, "rdmap79s0")["role"], identity(samples, "rdmap79s0")["net_device"]) == ("compute", "eth1")
    assert values(samples, "rdmap79s0") == LINK_UP | {
        "port_rate_bytes_per_second": 12.5e9, "port_expected_rate_bytes_per_second": 12.5e9,
        "transmit_data_bytes_total": 1000, "receive_data_bytes_total": 2000,
        "transmit_packets_total": 10, "receive_packets_total": 20, "receive_discards_total": 1,
        "efa_sent_bytes_total": 3, "efa_read_response_bytes_total": 4, "efa_write_requests_total": 5,
        "retransmit_timeouts_total": 6, "commands_lost_total": 7,
        "operation_errors_total:create_qp": 8, "operation_errors_total:mmap": 0, "carrier_changes_total": 1,
    }
    write(sysfs, {"class/net/eth1/operstate": "down"})
    assert values(ports.read(), "rdmap79s0")["port_state_id"] == 1


def test_what_an_infiniband_port_alone_has(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    hwmon = "class/infiniband/mlx5_0/device/hwmon/hwmon3"
    write(sysfs, {
        f"{PORT}/lid": "0x11b", f"{PORT}/sm_lid": "0x1", f"{hwmon}/temp1_input": 61000, f"{hwmon}/temp1_label": "asic",
        f"{hwmon}/temp2_input": 48500, f"{hwmon}/temp2_label": "Module0", f"{hwmon}/temp2_crit": 75000,
    })
    assert values(Ports(tmp_path).read()) == NDR_VALUES | {
        "port_lid": 283, "port_subnet_manager_lid": 1, "temperature_celsius:asic": 61.0,
        "temperature_celsius:Module0": 48.5,
    }


def test_every_file_of_the_capture_is_a_counter_of_the_catalogue() -> None:
    files = {str(file.relative_to(NDR / "ports" / "1")) for file in NDR.glob("ports/1/*counters/*")}
    assert files - COUNTERS.keys() == {"hw_counters/lifespan"}
    assert {f"hw_counters/{name}" for name in NEWER + ROCE} <= COUNTERS.keys()


def test_every_counter_of_the_catalogue_is_read_from_each_of_its_files(tmp_path: Path) -> None:
    rows = [row for row in all_metrics() if isinstance(row, PortCounter)]
    for turn in range(max(len(row.files) for row in rows)):
        sysfs = tmp_path / str(turn) / "sys"
        files = {row.files[turn]: row for row in rows if turn < len(row.files)}
        write(sysfs, {
            f"{PORT}/link_layer": "InfiniBand",
            **{f"{PORT}/{file}".replace(f"{PORT}/device/", "class/infiniband/mlx5_0/"): 7 for file in files},
        })
        assert {row for row, _, _ in Ports(tmp_path / str(turn)).read()} >= set(files.values())


@pytest.mark.parametrize(("device", "more"), [("mlx5_0", NEWER), ("mlx5_bond_0", NEWER + ROCE)])
def test_a_port_with_everything_a_healthy_one_has_is_within_60_series(
    tmp_path: Path, device: str, more: tuple[str, ...]
) -> None:
    sysfs = tree(tmp_path, CAPTURES / "h100_node" / device)
    folder = f"class/infiniband/{device}"
    write(sysfs, {f"{folder}/ports/1/hw_counters/{name}": 1 for name in more})
    write(sysfs, {f"{folder}/device/hwmon/hwmon0/temp{number}_input": 50000 for number in (1, 2)})
    write(sysfs, {
        f"{folder}/ports/1/lid": "0x1", f"{folder}/ports/1/sm_lid": "0x1", f"{folder}/device/net/eth0/dev_port": 0,
        "class/net/eth0/carrier_changes": 1,
    })
    gpus = {f"GPU-{index}": {"gpu": str(index), "uuid": f"GPU-{index}", "pci_bus_id": ""} for index in range(8)}
    write(tmp_path, {"state/gpus.json": json.dumps(gpus)})
    samples = Ports(tmp_path).read()
    assert Counter(labels[:2] for _, labels, _ in samples) == {(device, "1"): {"mlx5_0": 51, "mlx5_bond_0": 54}[device]}


# A file that cannot be read hides no other.


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENODEV, errno.EAGAIN, errno.ENODATA, errno.EISDIR])
def test_a_file_that_fails_costs_its_own_series_only(tmp_path: Path, error: int) -> None:
    tree(tmp_path, NDR)
    ports = Ports(tmp_path, {"symbol_error": error, "phys_state": error})
    without = {key: value for key, value in NDR_VALUES.items() if key not in (
        "symbol_errors_total", "port_physical_state_id")}
    assert values(ports.read()) == without
    ports.refused.clear()
    assert values(ports.after(300)) == NDR_VALUES


def test_a_counter_the_firmware_refuses_is_asked_once_and_counted(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path, {"symbol_error": errno.EINVAL})
    expected = {key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"} | {
        "port_refused_files": 1}
    assert values(ports.read()) == expected
    ports.refused.clear()
    for seconds in (1, 300, 86400):
        assert values(ports.after(seconds)) == expected
    assert ports.asked["symbol_error"] == 1
    write(sysfs, {f"{PORT}/hw_counters/req_rnr_retries_exceeded": 0})  # a new file, so that all are opened again
    assert values(ports.read()) == expected | {"rnr_retries_exceeded_total": 0}
    assert ports.asked["symbol_error"] == 1


def test_a_port_that_the_fabric_manager_owns_is_asked_once_and_the_next_one_is_read(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, NDR)
    shutil.copytree(NDR, sysfs / "class/infiniband/mlx5_1")
    owned = {path.name for path in NDR.rglob("*") if path.is_file()} - {"lifespan"}

    class Owned(Ports):
        def pread(self, file: int, length: int, offset: int) -> bytes:
            if "/mlx5_0/" in os.readlink(f"/proc/self/fd/{file}"):
                self.asked["refused"] += 1
                raise OSError(errno.EINVAL, "Invalid argument")
            return os.pread(file, length, offset)

    ports = Owned(tmp_path)
    for _ in range(3):
        samples = ports.after(1000)
        assert values(samples) == {
            "port_present": 1, "link_flaps_total": 0, "link_drops_total": 0, "link_flapping": 0,
            "port_refused_files": len(owned) - len({"board_id", "fw_ver", "hca_type", "link_layer"}),
        }
        assert values(samples, "mlx5_1") == NDR_VALUES
    assert ports.asked["refused"] == 49


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
        key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"}


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Go on as nobody, since root may read everything."""
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
                key: value for key, value in NDR_VALUES.items() if key != "symbol_errors_total"}


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
        key: value for key, value in (NDR_VALUES | {"symbol_errors_total": 3}).items()
        if f"infiniband_{key}" not in {row.name for file, row in COUNTERS.items() if file.startswith("hw_counters/")}
        or key in ("transmit_data_bytes_total", "receive_data_bytes_total", "transmit_packets_total",
                   "receive_packets_total")
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
        key: value for key, value in NDR_VALUES.items() if key != "port_physical_state_id"}


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


@given(st.text())
def test_parsers_return_a_number_or_nothing(text: str) -> None:
    for parse, highest in (
        (counter, 2**64 - 1), (state, 99), (physical_state, 99), (rate, 1e6), (local_identifier, 2**32 - 1),
        (operational_state, 4), (temperature, 10**7),
    ):
        number = parse(text)
        assert number is None or abs(number) <= highest
    assert all(isinstance(name, str) for name in default_routes(text))


def test_texts_the_kernel_writes() -> None:
    assert [state(text) for text in ("4: ACTIVE", "1: DOWN", "2: INIT", "", "ACTIVE", "9" * 5000)] == [
        4, 1, 2, None, None, None]
    assert [physical_state(text) for text in ("5: LinkUp", "2: Polling", "4: ACTIVE", "")] == [5, 2, None, None]
    assert [rate(text) for text in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", "fast")] == [400, 2.5, None, None]
    assert [counter(text) for text in (
        "0", "18446744073709551615", "18446744073709551616", "9" * 5000, "N/A (no PMA)", "", "-1", "1_000", "\u0664"
    )] == [0, 18446744073709551615, *[None] * 7]
    assert [local_identifier(text) for text in ("0x11b", "0xffff", "17", "")] == [283, 65535, None, None]
    assert [operational_state(text) for text in ("up", "down", "dormant", "unknown")] == [4, 1, None, None]
    assert [temperature(text) for text in ("61000", "-5000", "N/A")] == [61000, -5000, None]
    assert default_routes(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "bond0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "ib0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    ) == {"bond0"}


# Registers that wrap, stick or are cleared.

@pytest.mark.parametrize(("wrap", "last", "number", "rise"), [
    (2**32, 2**32 - 1, 0, 1), (2**32, 2**32 - 10, 5, 15), (2**32, 100, 100, 0), (2**32, 100, 250, 150),
    (2**32, 1000, 3, 3),  # cleared
    (0, 65535, 0, 0), (0, 65535, 7, 7), (0, 3, 65535, 65532), (0, 2**64 - 1, 5, 5), (0, 10**15, 10**15 + 1, 1),
])
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


@pytest.mark.parametrize(("file", "highest", "series"), [
    ("symbol_error", 65535, "symbol_errors_total"), ("link_downed", 255, "link_downed_total"),
    ("local_link_integrity_errors", 15, "local_link_integrity_errors_total"),
    ("port_xmit_wait", 2**32 - 1, "transmit_wait_ticks_total"),
])
def test_a_counter_that_sticks_says_so_until_it_is_cleared(
    tmp_path: Path, file: str, highest: int, series: str
) -> None:
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    path = f"{PORT}/counters/{file}"
    others = {key: value for key, value in NDR_VALUES.items() if key != series}
    write(sysfs, {path: highest - 1})
    assert values(ports.read()) == others | {series: max(highest - 1, NDR_VALUES[series])}
    write(sysfs, {path: highest})
    assert values(ports.read()) == others | {series: highest, f"counter_saturated:{file}": 1}
    write(sysfs, {path: 2})
    assert values(ports.read()) == others | {series: highest + 2}


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
    assert {value for row, _, value in ports.read() if row is INFINIBAND_PRESENT} == {0}


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
    write(sysfs, {
        f"{PORT}/state": "4: ACTIVE", f"{PORT}/phys_state": "5: LinkUp", f"{PORT}/rate": f"{gigabits} Gb/sec (4X NDR)"})


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
def test_flaps_are_counted_across_restarts_until_somebody_clears_them(tmp_path: Path, clear: str) -> None:
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
    assert values(ports.read())["link_drops_total"] == 0
    assert values(ports.after(240))["link_drops_total"] == 1


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
    write(folder, {"state/gpus.json": json.dumps({
        uuid: {"gpu": str(index), "uuid": uuid, "pci_bus_id": f"0000{address.upper()}", "module_id": str(9 - index)}
        for index, (uuid, address) in enumerate(gpus.items())
    })})


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
    assert [labels for row, labels, _ in samples if row is INFINIBAND_GPU_AFFINITY] == [
        ("mlx5_1", "1", "1", "GPU-b", "PIX"), ("mlx5_0", "1", "0", "GPU-a", "PIX")]


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
    write(two_rails, {
        "route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
                 "bond0.7 00000000 0100A8C0 0003 0 0 0 00000000 0 0 0",
        "sys/class/net/bond0.7/lower_bond0": "", "sys/class/net/bond0/lower_eth5": "",
        "sys/class/infiniband/mlx5_1/device/net/eth5/dev_port": 0,
    })
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
    assert [labels for row, labels, _ in samples if row is INFINIBAND_GPU_AFFINITY] == [
        (DEVICES[gpu], "1", str(gpu), node.uuid(gpu), "PIX") for gpu in reversed(range(8))]
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
    sysfs = tree(tmp_path, NDR)
    ports = Ports(tmp_path)
    ports.read()
    opened = len(os.listdir("/proc/self/fd"))
    for turn in range(5):
        ports.asked.clear()
        write(sysfs, {f"{PORT}/hw_counters/new_{turn}": 0})
        ports.after(301)
        assert set(ports.asked.values()) == {1}
        assert len(ports.asked) == 49
    assert len(os.listdir("/proc/self/fd")) == opened
    ports.close()
    assert len(os.listdir("/proc/self/fd")) == opened - 49


def test_the_factory_reads_beside_its_inventory(two_rails: Path) -> None:
    inventory(two_rails, RAILS)
    state_folder = two_rails / "state"
    collector = build(
        host="node1", inventory=str(state_folder / "ports.json"), sysfs=str(two_rails / "sys"),
        gpus=str(state_folder / "gpus.json"), state=str(state_folder / "port_history.json"),
    )
    assert rails(collector.read()) == {"mlx5_0": ("compute", "1"), "mlx5_1": ("compute", "0")}
    assert sorted(path.name for path in state_folder.iterdir()) == ["gpus.json", "port_history.json", "ports.json"]


def test_rows_with_a_width_say_what_happens_at_its_end() -> None:
    def end(row: Metric) -> str:
        return row.help.partition("Sticks" if "Sticks" in row.help else "The register")[2]

    assert end(COUNTERS["counters/symbol_error"]) == " at 65535."
    assert end(COUNTERS["hw_counters/rx_write_requests"]) == " wraps at 2^32; this does not."
    assert end(COUNTERS["counters/port_xmit_data"]) == ""
    assert {row.bits for row in COUNTERS.values()} == {4, 8, 16, 32, 64}
    assert INFINIBAND_SATURATED.labels == ("device", "port", "counter")
