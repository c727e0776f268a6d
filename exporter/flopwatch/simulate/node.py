"""The outside of an 8 x H100 node with 8 NDR ports and one for storage: a sysfs tree, a kernel log, its GPUs' answers.

Everything is files in one folder, so that the exporter, its reading children and whoever injects a fault may be
different processes, and so that counters go on where they stopped when the exporter restarts:

    sys/class/infiniband/   the ports, written in place; sys/devices, sys/bus/pci: where they and the GPUs sit
    kmsg                    kernel log records
    proc/                   the control groups of the processes that keep the GPUs busy; proc/driver: the list of GPUs
    dev/                    what stands for the GPUs' device files
    node.json               the state that `tick` advances; `simulate/pynvml.py` answers from it
    faults.json             what is wrong with the node, and how busy its GPUs are

Layout, identities, idle and full-load values are those of captured H100 nodes (tests/captures/SOURCES.md).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flopwatch.catalogue.xid import xids
from flopwatch.node.collectors.nvml.fields import CLOCK_EVENTS
from flopwatch.node.collectors.xid import OFF_THE_BUS
from flopwatch.simulate import pci

GPUS = 8
PCI_BUSES = (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)
# The numbers have gaps, as on real nodes, where storage and management ports sit between the compute ports.
DEVICES = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
STORAGE_DEVICE = "mlx5_bond_0"  # RoCE

MEBIBYTE = 1 << 20
MEMORY_TOTAL, MEMORY_RESERVED = 81559 * MEBIBYTE, 479 * MEBIBYTE
MEMORY_BUSY = 68_000 * MEBIBYTE
POWER_LIMIT = 700.0
IDLE_POWER, BUSY_POWER = 69.85, 629.45
IDLE_CELSIUS, BUSY_CELSIUS = 41.0, 59.0
IDLE_MEMORY_CELSIUS, BUSY_MEMORY_CELSIUS = 48.0, 55.0
IDLE_CLOCK, MAX_CLOCK, MEMORY_CLOCK = 345, 1980, 2619
# 87 = 41 C and the 46 C that the idle capture has left; the slowdown offset of an H100 is 2 C above it.
SW_SLOWDOWN_CELSIUS, HW_SLOWDOWN_CELSIUS = 87.0, 89.0
THERMAL_SECONDS = 5.0  # time constant of the heat sink
HELD_CLOCK = {
    "sw_power_cap": 1410,
    "sync_boost": 1755,
    "sw_thermal_slowdown": 1200,
    "hw_thermal_slowdown": 795,
    "hw_power_brake_slowdown": 795,
    "hw_slowdown": 795,
}
DEFAULT_LOAD = 0.95
IDLE_VIDEO_CLOCK, MAX_VIDEO_CLOCK = 765, 1545
DRIVER_VERSION = "590.48.01"
FIRST_PID, SLURM_JOB = 4711, 4242
MIG_PROFILE, MIG_INSTANCES = "1g.10gb", 7
PCIE_GENERATION, PCIE_LANES, PCIE_WIDTHS = 5, 16, (1, 2, 4, 8, 16)

# NVLink 4: links, MB/s of one in one direction, and the errors of a link by NVML field.
NVLINKS, NVLINK_SPEED = 18, 26562
NVLINK_ERRORS = {161: "replay", 162: "recovery", 163: "crc"}

# Share of the line a training job with this load would fill, and the size of its packets.
LINE_SHARE, PACKET_BYTES = 0.35, 4096
FULL_RATE, STORAGE_RATE, STORAGE_LOAD = 400, 200, 0.05
LINK_RATES = {400: "4X NDR", 200: "2X NDR", 100: "1X NDR", 50: "1X HDR", 25: "1X EDR", 10: "4X SDR"}
# Bytes a fully busy GPU sends per second, through PCIe to its rail and through its NVLinks to its peers.
PCIE_RATE, NVLINK_RATE = LINE_SHARE * 50e9, 0.3 * NVLINKS * NVLINK_SPEED * 1e6
STICKS_AT = {"counters/symbol_error": 65535, "counters/link_downed": 255, "counters/port_xmit_wait": 2**32 - 1}
COUNTERS = {
    "counters": (
        "VL15_dropped",
        "excessive_buffer_overrun_errors",
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "multicast_rcv_packets",
        "multicast_xmit_packets",
        "port_rcv_constraint_errors",
        "port_rcv_data",
        "port_rcv_errors",
        "port_rcv_packets",
        "port_rcv_remote_physical_errors",
        "port_rcv_switch_relay_errors",
        "port_xmit_constraint_errors",
        "port_xmit_data",
        "port_xmit_discards",
        "port_xmit_packets",
        "port_xmit_wait",
        "symbol_error",
        "unicast_rcv_packets",
        "unicast_xmit_packets",
    ),
    "hw_counters": (
        "duplicate_request",
        "implied_nak_seq_err",
        "lifespan",
        "local_ack_timeout_err",
        "out_of_buffer",
        "out_of_sequence",
        "packet_seq_err",
        "req_cqe_error",
        "req_cqe_flush_error",
        "req_remote_access_errors",
        "req_remote_invalid_request",
        "resp_cqe_error",
        "resp_cqe_flush_error",
        "resp_local_length_error",
        "resp_remote_access_errors",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "roce_slow_restart",
        "roce_slow_restart_cnps",
        "roce_slow_restart_trans",
        "rx_atomic_requests",
        "rx_dct_connect",
        "rx_icrc_encapsulated",
        "rx_read_requests",
        "rx_write_requests",
    ),
}

ADAPTERS = {
    **{device: pci.adapter_path(bus) for device, bus in zip(DEVICES, PCI_BUSES, strict=True)},
    STORAGE_DEVICE: pci.STORAGE_PATH,
}

XID_TEXTS = {
    OFF_THE_BUS: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    94: "pid=4711, name=python, Contained: SM (0x1). RST: No, D-RST: No",
    119: "pid=4711, name=python, Timeout after 6s of waiting for RPC response from GPU GSP! Expected function 76 "
    "(GSP_RM_CONTROL) (0x20801813 0x4c).",
}


ECC_ERRORS = ("corrected", "uncorrected")
# What `clear` leaves as it is: how the node is used and set up, and what was counted.
NOT_CLEARED = ("load", "ecc", "resets", "order", "driver", "mig", "nvlink_errors")


class SimulatedNode:
    """One simulated node, kept in the folder `root`; any number of objects and processes may share it."""

    def __init__(self, root: Path, uptime: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.kmsg = root / "kmsg"
        self._uptime = uptime
        self._ports = {device: self.sysfs / "class" / "infiniband" / device / "ports" / "1" for device in ADAPTERS}

    @staticmethod
    def uuid(gpu: int) -> str:
        """Return the uuid of a GPU."""
        return f"GPU-51a70000-0000-4000-8000-{gpu:012d}"

    def create(self, now: float | None = None) -> None:
        """Make the node, with its GPUs warm; one that is there already goes on with its counters and faults."""
        now = time.time() if now is None else now
        self.root.mkdir(parents=True, exist_ok=True)
        self.kmsg.touch()
        self._write_processes()
        self._write_driver()
        with self._faults() as faults:
            self._write_devices(faults)
        with self._locked():
            if not (self.root / "node.json").exists():
                self._save(
                    "node.json",
                    {
                        "time": now - 100 * THERMAL_SECONDS,
                        "gpus": [_new_gpu(gpu) for gpu in range(GPUS)],
                        "ports": {device: _new_port(index) for index, device in enumerate((*DEVICES, STORAGE_DEVICE))},
                    },
                )
            for device, port in self._load("node.json")["ports"].items():
                self._write_tree(device, port)
            pci.write(self.sysfs, PCI_BUSES, ADAPTERS)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Advance everything to the Unix time `now`; a time already reached changes nothing."""
        with self._locked():
            node, faults = self._load("node.json"), self._load("faults.json")
            seconds = now - node["time"]
            if seconds <= 0:
                return
            node["time"] = now
            for index, gpu in enumerate(node["gpus"]):
                _advance_gpu(gpu, index, faults, now, seconds)
            changed: dict[str, str] = {}  # texts: what pathlib interns fills the interpreter's table in half an hour
            for index, (device, port) in enumerate(node["ports"].items()):
                before = port["files"].copy()
                _advance_port(port, index, device, faults, now, seconds)
                if self._plugged(device, port, device not in faults.get("removed", {})):
                    changed |= {
                        f"{self._ports[device]}/{file}": content
                        for file, content in port["files"].items()
                        if content != before[file]
                    }
            # First what the next tick starts from, so that being killed here lets no counter fall.
            self._save("node.json", node)
            for path, content in changed.items():
                _write_in_place(path, content)

    # Faults, from any process. `clear` ends them all; what was counted stays counted.

    def xid(self, gpu: int, code: int) -> None:
        """Write an Xid into the kernel log; with 79 the GPU is lost as well."""
        bus = f"0000:{PCI_BUSES[_gpu(gpu)]:02x}:00"
        name = xids()[code].name if code in xids() else "unknown"
        text = XID_TEXTS.get(code) or f"pid=4711, name=python, {name}"
        lines = [f"NVRM: Xid (PCI:{bus}): {code}, {text}"]
        if code == OFF_THE_BUS:
            lines += [f"NVRM: GPU {bus}.0: GPU has fallen off the bus."]
        with self._locked():
            log = self.kmsg.read_text()
            if self.uuid(gpu) not in log:  # the driver introduces a GPU before its first Xid
                lines.insert(0, f"NVRM: GPU at PCI:{bus}: {self.uuid(gpu)}")
                lines.insert(1, f"NVRM: GPU Board Serial Number: {serial(gpu)}")
            microseconds = int(self._uptime() * 1e6)
            with self.kmsg.open("a") as file:
                file.write(
                    "".join(
                        f"4,{sequence},{microseconds},-;{line}\n"
                        for sequence, line in enumerate(lines, log.count("\n"))
                    )
                )
        if code == OFF_THE_BUS:
            self.lose(gpu)

    def lose(self, gpu: int) -> None:
        """Let every call about this GPU fail with "GPU is lost"."""
        self._set("lost", _gpu(gpu), True)

    def ecc(self, gpu: int, uncorrected: int = 0, corrected: int = 0) -> None:
        """Count memory errors."""
        with self._faults() as faults:
            counts = faults["ecc"].setdefault(str(_gpu(gpu)), dict.fromkeys(ECC_ERRORS, 0))
            counts["corrected"] += corrected
            counts["uncorrected"] += uncorrected

    def throttle(self, gpu: int, reason: str | None) -> None:
        """Hold the clock back for one of the reasons in HELD_CLOCK; None lets go."""
        if reason is not None and reason not in HELD_CLOCK:
            raise ValueError(f"{reason!r} is not one of {', '.join(HELD_CLOCK)}")
        self._set("throttle", _gpu(gpu), reason)

    def heat(self, gpu: int, celsius: float | None) -> None:
        """Let the GPU warm up to this temperature; from 87 C on it slows down. None lets it cool."""
        self._set("heat", _gpu(gpu), celsius)

    def load(self, gpu: int, utilization: float) -> None:
        """Set how busy the GPU is, from 0 to 1."""
        if not 0 <= utilization <= 1:
            raise ValueError(f"utilization {utilization} is not between 0 and 1")
        self._set("load", _gpu(gpu), utilization)

    def hang(self, call: str | None) -> None:
        """Let every call of this NVML function block until the hang is cleared with None."""
        from flopwatch.simulate.pynvml import Simulation  # which imports this module

        if call is not None and not (call.startswith("nvml") and hasattr(Simulation, call)):
            raise ValueError(f"{call!r} is not a simulated NVML function")
        with self._faults() as faults:
            faults["hang"] = call

    def fail(self, call: str, error: int, gpu: int | None = None) -> None:
        """Let an NVML function fail with this nvmlReturn_t, for one GPU or for all; 0 lets it work again."""
        from flopwatch.simulate.pynvml import Simulation  # which imports this module

        if not (call.startswith("nvml") and hasattr(Simulation, call)):
            raise ValueError(f"{call!r} is not a simulated NVML function")
        with self._faults() as faults:
            errors = faults["fail"].setdefault(call, {})
            errors["*" if gpu is None else str(_gpu(gpu))] = error
            faults["fail"][call] = {whom: error for whom, error in errors.items() if error != 0}

    def blind(self, gpu: int, error: int = 999) -> None:
        """Take the GPU's device file from the exporter's process; every call about the GPU fails, as it then does."""
        with self._faults() as faults:
            faults["blind"][str(_gpu(gpu))] = faults["withheld"][str(gpu)] = error
            self._write_devices(faults)

    def refuse(self, gpu: int, error: int = 999) -> None:
        """Let every call about this GPU fail, with its device file there: what a GPU that is dead may do."""
        self._set("blind", _gpu(gpu), error)

    def reset(self, gpu: int, index: int | None = None) -> None:
        """Reset a GPU: it is gone until NVML is initialised again, with its counters at 0, perhaps at another index."""
        key = str(_gpu(gpu))
        if index is not None and index not in range(GPUS):
            raise ValueError(f"there is no index {index}; they are 0 to {GPUS - 1}")
        with self._faults() as faults:
            faults["resets"][key] = faults["resets"].get(key, 0) + 1
            for kind in ("lost", "recovery", "nvlink_errors", "nvlink_down"):
                faults[kind].pop(key, None)
            ecc = faults["ecc"].get(key, {})
            faults["ecc"][key] = {
                "corrected": 0,
                "uncorrected": 0,
                **{f"{kind}_before": ecc.get(f"{kind}_before", 0) + ecc.get(kind, 0) for kind in ECC_ERRORS},
            }
            if key in faults["remap"]:
                faults["remap"][key]["pending"] = False
            if index is not None:
                faults["order"].remove(gpu)
                faults["order"].insert(index, gpu)

    def driver(self, version: str) -> None:
        """Replace the driver: processes that have the old one's library open are refused from now on."""
        with self._faults() as faults:
            faults["driver"] = version

    def mig(self, gpu: int, mode: str, profile: str = MIG_PROFILE) -> None:
        """Partition a GPU into as many instances as there can be of the smallest profile, or make it whole again."""
        if mode not in ("on", "off"):
            raise ValueError(f"{mode!r} is neither on nor off")
        self._set("mig", _gpu(gpu), [profile] * MIG_INSTANCES if mode == "on" else [])

    def nvlink(self, gpu: int, link: int, state: str) -> None:
        """Take an NVLink down, or up again."""
        if state not in ("down", "up"):
            raise ValueError(f"{state!r} is neither down nor up")
        with self._faults() as faults:
            down = set(faults["nvlink_down"].get(str(_gpu(gpu)), ()))
            down = down | {_nvlink(link)} if state == "down" else down - {_nvlink(link)}
            faults["nvlink_down"][str(gpu)] = sorted(down)

    def nvlink_errors(self, gpu: int, link: int, error: str, count: int) -> None:
        """Count errors of an NVLink."""
        if error not in NVLINK_ERRORS.values():
            raise ValueError(f"{error!r} is not one of {', '.join(NVLINK_ERRORS.values())}")
        with self._faults() as faults:
            counts = faults["nvlink_errors"].setdefault(str(_gpu(gpu)), {}).setdefault(str(_nvlink(link)), {})
            counts[error] = counts.get(error, 0) + count

    def remap(
        self, gpu: int, corrected: int = 0, uncorrected: int = 0, pending: bool = False, failure: bool = False
    ) -> None:
        """Replace memory rows; pending until the GPU is reset, or a failure, which no reset mends."""
        with self._faults() as faults:
            rows = faults["remap"].setdefault(str(_gpu(gpu)), {"corrected": 0, "uncorrected": 0})
            rows["corrected"] += corrected
            rows["uncorrected"] += uncorrected
            rows |= {"pending": pending, "failure": failure}

    def pcie(self, gpu: int, width: int = PCIE_LANES, generation: int = PCIE_GENERATION) -> None:
        """Let the PCIe link train to fewer lanes or a lower generation."""
        if width not in PCIE_WIDTHS or generation not in range(1, PCIE_GENERATION + 1):
            raise ValueError(f"there is no generation {generation} link of {width} lanes")
        self._set("pcie", _gpu(gpu), {"width": width, "generation": generation})

    def recovery(self, gpu: int, action: int) -> None:
        """Let the driver ask for a recovery action, 0 to 7 as in gpu_recovery_action_id."""
        if action not in range(8):
            raise ValueError(f"{action} is not between 0 and 7")
        self._set("recovery", _gpu(gpu), action)

    def profiler(self, gpu: int, mode: str) -> None:
        """Let a profiler take the hardware counters of a GPU, or give them back."""
        if mode not in ("on", "off"):
            raise ValueError(f"{mode!r} is neither on nor off")
        self._set("profiler", _gpu(gpu), mode == "on")

    def symbol_errors(self, device: str, per_second: float) -> None:
        """Let symbol errors rise on a port."""
        self._set("symbol_errors", _device(device), per_second)

    def link(self, device: str, state: str) -> None:
        """Take a port's link down, or up again."""
        if state not in ("down", "up"):
            raise ValueError(f"{state!r} is neither down nor up")
        self._set("link", _device(device), state)

    def rate(self, device: str, gigabits: int) -> None:
        """Let a port train to another rate; 400 is the full one."""
        if gigabits not in LINK_RATES:
            raise ValueError(f"{gigabits} Gb/s is not one of {', '.join(map(str, LINK_RATES))}")
        self._set("rate", _device(device), gigabits)

    def remove(self, device: str) -> None:
        """Take an adapter off the bus; `clear` brings it back."""
        self._set("removed", _device(device), True)

    def clear(self) -> None:
        """End every fault; the load stays."""
        with self._faults() as faults:
            rows = {gpu: rows | {"pending": False, "failure": False} for gpu, rows in faults["remap"].items()}
            faults.update(no_faults() | {kind: faults[kind] for kind in NOT_CLEARED} | {"remap": rows})
            self._write_devices(faults)

    def _set(self, fault: str, target: int | str, value: object) -> None:
        with self._faults() as faults:
            faults[fault][str(target)] = value

    @contextmanager
    def _faults(self) -> Iterator[dict[str, Any]]:
        """Give the faults for changing, and store what they are changed to."""
        with self._locked():
            faults = no_faults() | self._load("faults.json")
            yield faults
            self._save("faults.json", faults)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(f"{self.root}/lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _load(self, name: str) -> dict[str, Any]:
        try:
            with open(f"{self.root}/{name}", "rb") as file:
                value: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return {}
        return value

    def _save(self, name: str, value: Mapping[str, Any]) -> None:
        with open(f"{self.root}/{name}.new", "wb") as file:
            file.write(json.dumps(value).encode())
        os.replace(f"{self.root}/{name}.new", f"{self.root}/{name}")

    def _plugged(self, device: str, port: Mapping[str, Any], plugged: bool) -> bool:
        """Have a device in the tree, or not; return whether it is."""
        folder = self._ports[device]
        if plugged and not folder.is_dir():
            self._write_tree(device, port)
            pci.link_adapter(self.sysfs, device, ADAPTERS[device])
        elif not plugged and folder.is_dir():
            shutil.rmtree(folder.parents[1])
        return plugged

    def _write_driver(self) -> None:
        for gpu, bus in enumerate(PCI_BUSES):
            folder = self.root / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{bus:02x}:00.0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t {gpu}\n")

    def _write_devices(self, faults: Mapping[str, Any]) -> None:
        (self.root / "dev").mkdir(exist_ok=True)
        for gpu in range(GPUS):
            file = self.root / "dev" / f"nvidia{gpu}"
            if str(gpu) in faults["withheld"]:
                file.unlink(missing_ok=True)
            else:
                file.touch()

    def _write_processes(self) -> None:
        for gpu in range(GPUS):
            folder = self.root / "proc" / str(pid(gpu))
            folder.mkdir(parents=True, exist_ok=True)
            cgroup = f"/system.slice/slurmstepd.scope/job_{SLURM_JOB}/step_0/user/task_{gpu}"
            (folder / "cgroup").write_text(f"0::{cgroup}\n")
            (folder / "status").write_text("Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
            (folder / "stat").write_text(f"{pid(gpu)} (python) R {'0 ' * 18}4242 0\n")

    def _write_tree(self, device: str, port: Mapping[str, Any]) -> None:
        folder = self._ports[device]
        for name in COUNTERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        storage = device == STORAGE_DEVICE
        identity = {"board_id": "MT_0000000838", "fw_ver": "28.41.1000", "hca_type": "MT4129"}
        if storage:
            identity = {"board_id": "MT_0000000884", "fw_ver": "32.38.3056", "hca_type": "MT41692"}
        for file, content in identity.items():
            _write_in_place(folder.parents[1] / file, content)
        for file, content in {"link_layer": "Ethernet" if storage else "InfiniBand", **port["files"]}.items():
            _write_in_place(folder / file, content)


def serial(gpu: int) -> str:
    """Return the board serial number of a GPU."""
    return f"165012401{gpu:04d}"


def _gpu(gpu: int) -> int:
    if gpu not in range(GPUS):
        raise ValueError(f"there is no GPU {gpu}; they are 0 to {GPUS - 1}")
    return gpu


def _device(device: str) -> str:
    if device not in ADAPTERS:
        raise ValueError(f"there is no {device}; there are {', '.join(ADAPTERS)}")
    return device


def _nvlink(link: int) -> int:
    if link not in range(NVLINKS):
        raise ValueError(f"there is no link {link}; they are 0 to {NVLINKS - 1}")
    return link


def pid(gpu: int) -> int:
    """Return the process that keeps a GPU busy."""
    return FIRST_PID + gpu


def no_faults() -> dict[str, Any]:
    """Return the content of faults.json on a healthy node."""
    return {
        "load": {},
        "lost": {},
        "ecc": {},
        "throttle": {},
        "heat": {},
        "hang": None,
        "fail": {},
        "blind": {},
        "withheld": {},
        "resets": {},
        "order": list(range(GPUS)),
        "driver": DRIVER_VERSION,
        "mig": {},
        "nvlink_down": {},
        "nvlink_errors": {},
        "remap": {},
        "pcie": {},
        "recovery": {},
        "profiler": {},
        "symbol_errors": {},
        "link": {},
        "rate": {},
        "removed": {},
    }


def _wave(now: float, period: float, phase: float) -> float:
    """Return a number between -1 and 1 that depends on nothing but its arguments."""
    return math.sin(2 * math.pi * now / period + phase)


def _new_gpu(index: int) -> dict[str, Any]:
    return {
        "celsius": IDLE_CELSIUS,
        "millijoules": 500_000_000_000 + 1_000_000_000 * index,
        "event_nanoseconds": dict.fromkeys(HELD_CLOCK, 0),
    }


def _advance_gpu(gpu: dict[str, Any], index: int, faults: Mapping[str, Any], now: float, seconds: float) -> None:
    key = str(index)
    load = faults["load"].get(key, DEFAULT_LOAD)
    busy = load * (1 + 0.03 * _wave(now, 13, index))
    forced = faults["throttle"].get(key)
    heat = faults["heat"].get(key)

    # The events come from the temperature reached so far, the clock from the events, the power from the clock.
    events = {forced} if forced is not None else set()
    if gpu["celsius"] >= SW_SLOWDOWN_CELSIUS:
        events.add("sw_thermal_slowdown")
    if gpu["celsius"] >= HW_SLOWDOWN_CELSIUS:
        events.add("hw_thermal_slowdown")
    if events & {"hw_thermal_slowdown", "hw_power_brake_slowdown"}:
        events.add("hw_slowdown")
    clock = min([MAX_CLOCK, *(HELD_CLOCK[event] for event in events)]) if load > 0 else IDLE_CLOCK
    power = IDLE_POWER + (BUSY_POWER - IDLE_POWER) * busy * (clock / MAX_CLOCK if load > 0 else 1)
    power = min(POWER_LIMIT, power * (1 + 0.01 * _wave(now, 7, 2 * index)))
    warm = min(1.0, (power - IDLE_POWER) / (BUSY_POWER - IDLE_POWER))
    target = heat if heat is not None else IDLE_CELSIUS + (BUSY_CELSIUS - IDLE_CELSIUS) * warm
    gpu["celsius"] = target + (gpu["celsius"] - target) * math.exp(-seconds / THERMAL_SECONDS)
    for event in events:
        gpu["event_nanoseconds"][event] += int(seconds * 1e9)
    gpu["millijoules"] += int(power * 1000 * seconds)
    # A node of an older release has no such counters yet.
    gpu["busy_seconds"] = gpu.get("busy_seconds", 0.0) + min(1.0, busy) * seconds
    gpu["tensor_seconds"] = gpu.get("tensor_seconds", 0.0) + min(1.0, busy) * clock / MAX_CLOCK * seconds
    active = events if load > 0 else events | {"gpu_idle"}
    gpu.update(
        utilization=min(100, max(0, round(100 * busy))),
        milliwatts=int(power * 1000),
        clock=clock,
        memory_celsius=round(
            IDLE_MEMORY_CELSIUS
            + (BUSY_MEMORY_CELSIUS - IDLE_MEMORY_CELSIUS)
            * (gpu["celsius"] - IDLE_CELSIUS)
            / (BUSY_CELSIUS - IDLE_CELSIUS)
        ),
        memory_used=MEMORY_BUSY if load > 0 else 0,
        events=sum(bit for bit, name in CLOCK_EVENTS.items() if name in active),
    )


def _new_port(index: int) -> dict[str, Any]:
    files = {f"{folder}/{name}": "0" for folder, names in COUNTERS.items() for name in names}
    return {
        "up": True,
        "counts": {"bytes": 900_000_000_000_000 + 1_000_000_000 * index, "symbol_errors": 0.0, "link_downed": 0},
        "files": {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            **files,
            "hw_counters/lifespan": "12",
        },
    }


def _advance_port(
    port: dict[str, Any], index: int, device: str, faults: Mapping[str, Any], now: float, seconds: float
) -> None:
    counts, files = port["counts"], port["files"]
    storage = device == STORAGE_DEVICE
    gigabits = faults["rate"].get(device, STORAGE_RATE if storage else FULL_RATE)
    up = faults["link"].get(device, "up") == "up"
    counts["link_downed"] += int(port["up"] and not up)
    port["up"] = up
    if up:
        # The rail of GPU `index`: as busy as the GPU, unless that is lost.
        load = 0 if str(index) in faults["lost"] else faults["load"].get(str(index), DEFAULT_LOAD)
        load = STORAGE_LOAD if storage else load
        share = LINE_SHARE * load * (1 + 0.05 * _wave(now, 11, index))
        counts["bytes"] += int(gigabits * 1e9 / 8 * share * seconds)
        counts["symbol_errors"] += faults["symbol_errors"].get(device, 0) * seconds
    packets = counts["bytes"] // PACKET_BYTES
    numbers = {
        # Data counters count 4-byte words. As much comes in as goes out, less what is in flight.
        "counters/port_xmit_data": counts["bytes"] // 4,
        "counters/port_rcv_data": counts["bytes"] // 4 - 1_000_000,
        "counters/port_xmit_packets": packets,
        "counters/unicast_xmit_packets": packets,
        "counters/port_rcv_packets": packets - 1_000,
        "counters/unicast_rcv_packets": packets - 1_000,
        "counters/port_xmit_wait": packets // 1000,
        "hw_counters/rx_write_requests": packets // 64 % 2**32,
        "counters/symbol_error": int(counts["symbol_errors"]),
        "counters/link_downed": counts["link_downed"],
    }
    files.update({file: str(min(number, STICKS_AT.get(file, number))) for file, number in numbers.items()})
    files["state"] = "4: ACTIVE" if up else "1: DOWN"
    files["phys_state"] = "5: LinkUp" if up else "2: Polling"
    files["rate"] = f"{gigabits} Gb/sec ({LINK_RATES[gigabits]})" if up else "10 Gb/sec (4X SDR)"


def _write_in_place(path: str | Path, content: str) -> None:
    """Write a file as sysfs shows it: the same inode, so that an open descriptor sees it, and a whole line at once."""
    line = f"{content}\n".encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, line, 0)
        os.ftruncate(file, len(line))
    finally:
        os.close(file)
