"""Simulated node with eight H100 GPUs, as files in one folder. Any process may advance it or inject faults."""

import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.catalogue.xid import xids
from flopwatch.node.collectors.xid.kernel_lines import OFF_THE_BUS
from flopwatch.simulate import h100, pci, physics
from flopwatch.simulate.folder import NodeFolder, write_in_place


class SimulatedNode:
    """Simulated node in the folder `root`, which any number of objects and processes can share."""

    def __init__(self, root: Path, uptime: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.kmsg = root / "kmsg"
        self._uptime = uptime
        self._folder = NodeFolder(root)

    uuid = staticmethod(h100.uuid)

    def create(self, now: float | None = None) -> None:
        """Create the node with warm GPUs, or continue an existing one with its counters and faults."""
        now = time.time() if now is None else now
        self.root.mkdir(parents=True, exist_ok=True)
        self.kmsg.touch()
        self._folder.write_processes()
        self._folder.write_driver()
        with self._folder.faults() as faults:
            self._folder.write_devices(faults)
        with self._folder.locked():
            if not (self.root / "node.json").exists():
                devices = enumerate((*h100.DEVICES, h100.STORAGE_DEVICE))
                ports = {device: physics.new_port(index) for index, device in devices}
                gpus = [physics.new_gpu(gpu) for gpu in range(h100.GPUS)]
                node = {"time": now - 100 * h100.THERMAL_SECONDS, "gpus": gpus, "ports": ports}
                self._folder.save("node.json", node)
            for device, port in self._folder.load("node.json")["ports"].items():
                self._folder.write_port(device, port)
            pci.write(self.sysfs, h100.PCI_BUSES, h100.ADAPTERS)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Advance the node to the Unix time `now`. A time in the past changes nothing."""
        with self._folder.locked():
            node, faults = self._folder.load("node.json"), self._folder.load("faults.json")
            seconds = now - node["time"]
            if seconds <= 0:
                return
            node["time"] = now
            for index, gpu in enumerate(node["gpus"]):
                physics.advance_gpu(gpu, index, faults, now, seconds)
            # Strings as keys: pathlib interns the parts of paths, and the table of the interpreter would grow.
            changed: dict[str, str] = {}
            for index, (device, port) in enumerate(node["ports"].items()):
                before = port["files"].copy()
                physics.advance_port(port, index, device, faults, now, seconds)
                if self._folder.plug(device, port, device not in faults.get("removed", {})):
                    changed |= {
                        f"{self._folder.ports[device]}/{file}": content
                        for file, content in port["files"].items()
                        if content != before[file]
                    }
            # The state is saved first, so that no counter falls if the process is killed here.
            self._folder.save("node.json", node)
            for path, content in changed.items():
                write_in_place(path, content)

    # Faults, from any process. `clear` ends them all, but counters keep their values.

    def xid(self, gpu: int, code: int) -> None:
        """Write an Xid of a GPU into the kernel log. Code 79 also makes the GPU lost."""
        bus = f"0000:{h100.PCI_BUSES[_gpu(gpu)]:02x}:00"
        name = xids()[code].name if code in xids() else "unknown"
        text = h100.XID_TEXTS.get(code) or f"pid=4711, name=python, {name}"
        lines = [f"NVRM: Xid (PCI:{bus}): {code}, {text}"]
        if code == OFF_THE_BUS:
            lines += [f"NVRM: GPU {bus}.0: GPU has fallen off the bus."]
        with self._folder.locked():
            log = self.kmsg.read_text()
            if self.uuid(gpu) not in log:  # the driver introduces a GPU before its first Xid
                lines.insert(0, f"NVRM: GPU at PCI:{bus}: {self.uuid(gpu)}")
                lines.insert(1, f"NVRM: GPU Board Serial Number: {h100.serial(gpu)}")
            microseconds = int(self._uptime() * 1e6)
            records = (f"4,{number},{microseconds},-;{line}\n" for number, line in enumerate(lines, log.count("\n")))
            with self.kmsg.open("a") as file:
                file.write("".join(records))
        if code == OFF_THE_BUS:
            self.lose(gpu)

    def lose(self, gpu: int) -> None:
        """Make every NVML call about a GPU fail with "GPU is lost"."""
        self._set("lost", _gpu(gpu), True)

    def ecc(self, gpu: int, uncorrected: int = 0, corrected: int = 0) -> None:
        """Add to the counts of a GPU's uncorrected and corrected memory errors."""
        with self._folder.faults() as faults:
            counts = faults["ecc"].setdefault(str(_gpu(gpu)), dict.fromkeys(h100.ECC_ERRORS, 0))
            counts["corrected"] += corrected
            counts["uncorrected"] += uncorrected

    def throttle(self, gpu: int, reason: str | None) -> None:
        """Lower a GPU's clock for a reason in h100.HELD_CLOCK, or stop with None. Raises ValueError for others."""
        if reason is not None and reason not in h100.HELD_CLOCK:
            raise ValueError(f"{reason!r} is not one of {', '.join(h100.HELD_CLOCK)}")
        self._set("throttle", _gpu(gpu), reason)

    def heat(self, gpu: int, celsius: float | None) -> None:
        """Warm a GPU up to a temperature, or let it cool with None. From 87 C on its clock is lower."""
        self._set("heat", _gpu(gpu), celsius)

    def load(self, gpu: int, utilization: float) -> None:
        """Set how busy a GPU is, from 0 to 1. Raises ValueError outside that range."""
        if not 0 <= utilization <= 1:
            raise ValueError(f"utilization {utilization} is not between 0 and 1")
        self._set("load", _gpu(gpu), utilization)

    def hang(self, call: str | None) -> None:
        """Block every call of an NVML function until `hang(None)`. Raises ValueError if it is not simulated."""
        with self._folder.faults() as faults:
            faults["hang"] = None if call is None else _function(call)

    def fail(self, call: str, error: int, gpu: int | None = None) -> None:
        """Make an NVML function fail with the nvmlReturn_t `error`, for one GPU or for all. Error 0 ends this."""
        with self._folder.faults() as faults:
            errors = faults["fail"].setdefault(_function(call), {})
            errors["*" if gpu is None else str(_gpu(gpu))] = error
            faults["fail"][call] = {target: code for target, code in errors.items() if code != 0}

    def blind(self, gpu: int, error: int = 999) -> None:
        """Hide a GPU's device file from the exporter, so that every NVML call about the GPU fails with `error`."""
        with self._folder.faults() as faults:
            faults["blind"][str(_gpu(gpu))] = faults["withheld"][str(gpu)] = error
            self._folder.write_devices(faults)

    def refuse(self, gpu: int, error: int = 999) -> None:
        """Make every NVML call about a GPU fail with `error` although its device file exists, as for a dead GPU."""
        self._set("blind", _gpu(gpu), error)

    def reset(self, gpu: int, index: int | None = None) -> None:
        """Reset a GPU. It is lost until the next nvmlInit, then has counters at 0 and, if given, another NVML index."""
        key = str(_gpu(gpu))
        if index is not None and index not in range(h100.GPUS):
            raise ValueError(f"there is no index {index}; they are 0 to {h100.GPUS - 1}")
        with self._folder.faults() as faults:
            faults["resets"][key] = faults["resets"].get(key, 0) + 1
            for kind in ("lost", "recovery", "nvlink_errors", "nvlink_down"):
                faults[kind].pop(key, None)
            ecc = faults["ecc"].get(key, {})
            before = {f"{kind}_before": ecc.get(f"{kind}_before", 0) + ecc.get(kind, 0) for kind in h100.ECC_ERRORS}
            faults["ecc"][key] = {"corrected": 0, "uncorrected": 0, **before}
            if key in faults["remap"]:
                faults["remap"][key]["pending"] = False
            if index is not None:
                faults["order"].remove(gpu)
                faults["order"].insert(index, gpu)

    def driver(self, version: str) -> None:
        """Replace the driver, which from now on rejects processes that loaded the old version's library."""
        with self._folder.faults() as faults:
            faults["driver"] = version

    def mig(self, gpu: int, mode: str, profile: str = h100.MIG_PROFILE) -> None:
        """Partition a GPU into seven MIG instances of a profile (mode `on`), or make it whole again (`off`)."""
        if mode not in ("on", "off"):
            raise ValueError(f"{mode!r} is neither on nor off")
        self._set("mig", _gpu(gpu), [profile] * h100.MIG_INSTANCES if mode == "on" else [])

    def nvlink(self, gpu: int, link: int, state: str) -> None:
        """Take an NVLink of a GPU down or up. Raises ValueError for other states."""
        if state not in ("down", "up"):
            raise ValueError(f"{state!r} is neither down nor up")
        with self._folder.faults() as faults:
            down = set(faults["nvlink_down"].get(str(_gpu(gpu)), ()))
            down = down | {_nvlink(link)} if state == "down" else down - {_nvlink(link)}
            faults["nvlink_down"][str(gpu)] = sorted(down)

    def nvlink_errors(self, gpu: int, link: int, error: str, count: int) -> None:
        """Add to the count of one kind of error (replay, recovery or crc) of an NVLink of a GPU."""
        if error not in h100.NVLINK_ERRORS.values():
            raise ValueError(f"{error!r} is not one of {', '.join(h100.NVLINK_ERRORS.values())}")
        with self._folder.faults() as faults:
            counts = faults["nvlink_errors"].setdefault(str(_gpu(gpu)), {}).setdefault(str(_nvlink(link)), {})
            counts[error] = counts.get(error, 0) + count

    def remap(
        self, gpu: int, corrected: int = 0, uncorrected: int = 0, pending: bool = False, failure: bool = False
    ) -> None:
        """Add remapped memory rows to a GPU. `pending` lasts until its reset or `clear`, `failure` until `clear`."""
        with self._folder.faults() as faults:
            rows = faults["remap"].setdefault(str(_gpu(gpu)), {"corrected": 0, "uncorrected": 0})
            rows["corrected"] += corrected
            rows["uncorrected"] += uncorrected
            rows |= {"pending": pending, "failure": failure}

    def pcie(self, gpu: int, width: int = h100.PCIE_LANES, generation: int = h100.PCIE_GENERATION) -> None:
        """Set a GPU's PCIe link to a number of lanes and a generation. Raises ValueError for an impossible link."""
        if width not in h100.PCIE_WIDTHS or generation not in range(1, h100.PCIE_GENERATION + 1):
            raise ValueError(f"there is no generation {generation} link of {width} lanes")
        self._set("pcie", _gpu(gpu), {"width": width, "generation": generation})

    def recovery(self, gpu: int, action: int) -> None:
        """Let the driver ask for a recovery action for a GPU, 0 to 7 as in gpu_recovery_action_id."""
        if action not in range(8):
            raise ValueError(f"{action} is not between 0 and 7")
        self._set("recovery", _gpu(gpu), action)

    def profiler(self, gpu: int, mode: str) -> None:
        """Give a GPU's hardware counters to a profiler (mode `on`) or take them back (`off`)."""
        if mode not in ("on", "off"):
            raise ValueError(f"{mode!r} is neither on nor off")
        self._set("profiler", _gpu(gpu), mode == "on")

    def lie(self, kind: str, mode: str = "on") -> None:
        """Let the driver mislead its readers in one way of lies.LIES (mode `on`), or no longer (`off`)."""
        from flopwatch.simulate.lies import LIES  # loads the NVML bindings

        if kind not in LIES or mode not in ("on", "off"):
            raise ValueError(f"{kind!r} {mode!r} is not one of {', '.join(LIES)}, with on or off")
        with self._folder.faults() as faults:
            faults["lies"] = {name: True for name in {*faults["lies"], kind} if name != kind or mode == "on"}

    def symbol_errors(self, device: str, per_second: float) -> None:
        """Set the rate of symbol errors of an adapter's port, in errors per second."""
        self._set("symbol_errors", _device(device), per_second)

    def link(self, device: str, state: str) -> None:
        """Take the link of an adapter's port down or up. Raises ValueError for other states."""
        if state not in ("down", "up"):
            raise ValueError(f"{state!r} is neither down nor up")
        self._set("link", _device(device), state)

    def rate(self, device: str, gigabits: int) -> None:
        """Set the rate of an adapter's port in Gb/s. 400 is the full rate, except for the storage port's 200."""
        if gigabits not in h100.LINK_RATES:
            raise ValueError(f"{gigabits} Gb/s is not one of {', '.join(map(str, h100.LINK_RATES))}")
        self._set("rate", _device(device), gigabits)

    def remove(self, device: str) -> None:
        """Remove an adapter from the PCI bus until `clear`."""
        self._set("removed", _device(device), True)

    def clear(self) -> None:
        """End every fault. Load, error counts, MIG instances, driver version and order of GPUs stay."""
        with self._folder.faults() as faults:
            rows = {gpu: rows | {"pending": False, "failure": False} for gpu, rows in faults["remap"].items()}
            faults.update(h100.no_faults() | {kind: faults[kind] for kind in h100.NOT_CLEARED} | {"remap": rows})
            self._folder.write_devices(faults)

    def _set(self, fault: str, target: int | str, value: object) -> None:
        with self._folder.faults() as faults:
            faults[fault][str(target)] = value


def _gpu(gpu: int) -> int:
    if gpu not in range(h100.GPUS):
        raise ValueError(f"there is no GPU {gpu}; they are 0 to {h100.GPUS - 1}")
    return gpu


def _device(device: str) -> str:
    if device not in h100.ADAPTERS:
        raise ValueError(f"there is no {device}; there are {', '.join(h100.ADAPTERS)}")
    return device


def _nvlink(link: int) -> int:
    if link not in range(h100.NVLINKS):
        raise ValueError(f"there is no link {link}; they are 0 to {h100.NVLINKS - 1}")
    return link


def _function(call: str) -> str:
    from flopwatch.simulate.pynvml import Simulation  # loads the NVML bindings

    if not (call.startswith("nvml") and hasattr(Simulation, call)):
        raise ValueError(f"{call!r} is not a simulated NVML function")
    return call
