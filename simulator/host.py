"""Faults of a simulated host, from any process: `python -m simulator.host NODE_DIR xid --gpu 3 --code 79`."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopwatch.catalogue.xid import xids
from flopwatch.node.collectors.xid.kernel_lines import OFF_THE_BUS
from flopwatch.simulate import SimulatedHost, h100
from flopwatch.simulate.pynvml import Simulation

XID_TEXTS = {
    OFF_THE_BUS: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    94: "pid=4711, name=python, Contained: SM (0x1). RST: No, D-RST: No",
    119: "pid=4711, name=python, Timeout after 6s of waiting for RPC response from GPU GSP! Expected function 76 "
    "(GSP_RM_CONTROL) (0x20801813 0x4c).",
}

# Ways in which drivers mislead their readers (flopwatch.simulate.lies), and where that was seen.
LIES = {
    "double_types": "declare integer fields as DOUBLE",  # NVML bugs 2032468 and 4300930
    "unwritten_fields": "return success for ECC and retirement fields without writing them",  # NVML bug 2009232
    "wrapping_bytes": "wrap the PCIe byte fields 197 and 198 at 32 bits",  # DCGM-exporter issue 721
    "mixed_fields": "fail a call that mixes ECC fields with others",  # DCGM issue 265
    "gpm_refusals": "refuse activity samples in the second half of every ten minutes",  # DCGM issue 214
    "slow_values": "take 1 ms per field value",
    "slow_gpu": "take 100 ms per call about GPU 7",
    "hidden_mig": "let no process see a MIG instance",  # nvidia-container-toolkit issue 842
    "garbled_processes": "return garbage in place of the second and later processes",  # early R535 releases
    "slow_init": "take 40 s for nvmlInit",
    "no_persistence": "switch persistence mode off",
    "no_ecc": "switch error correction off",
}

ECC_ERRORS = ("corrected", "uncorrected")
# Not reset by `clear`: load, configuration and counters.
NOT_CLEARED = ("load", "ecc", "resets", "order", "driver", "mig", "nvlink_errors")


class SimulatedNode(SimulatedHost):
    """Simulated host with faults, from any process. `clear` ends them all, but counters keep their values."""

    def __init__(self, root: Path, uptime: Callable[[], float] = time.monotonic) -> None:
        super().__init__(root)
        self._uptime = uptime

    def xid(self, gpu: int, code: int) -> None:
        """Write an Xid of a GPU into the kernel log. Code 79 also makes the GPU lost."""
        bus = f"0000:{h100.PCI_BUSES[_gpu(gpu)]:02x}:00"
        name = xids()[code].name if code in xids() else "unknown"
        text = XID_TEXTS.get(code) or f"pid=4711, name=python, {name}"
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
            counts = faults["ecc"].setdefault(str(_gpu(gpu)), dict.fromkeys(ECC_ERRORS, 0))
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
            before = {f"{kind}_before": ecc.get(f"{kind}_before", 0) + ecc.get(kind, 0) for kind in ECC_ERRORS}
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
        """Let the driver mislead its readers in one way of LIES (mode `on`), or no longer (`off`)."""
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
            faults.update(h100.no_faults() | {kind: faults[kind] for kind in NOT_CLEARED} | {"remap": rows})
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
    if not (call.startswith("nvml") and hasattr(Simulation, call)):
        raise ValueError(f"{call!r} is not a simulated NVML function")
    return call


Flag = tuple[str, dict[str, Any]]


def flag(name: str, type: Any = int, **more: Any) -> Flag:
    """Return a command-line flag: its name and the arguments of argparse's add_argument()."""
    return name, {"type": type, **more}


def one_of(name: str, choices: Any, **more: Any) -> Flag:
    """Return a command-line flag that accepts only `choices`, converted to the type of the first."""
    return flag(name, type(next(iter(choices))), choices=choices, **more)


GPU = one_of("--gpu", range(h100.GPUS), required=True)
DEVICE = one_of("--device", h100.ADAPTERS, required=True)
LINK = one_of("--link", range(h100.NVLINKS), required=True)
UP = one_of("--state", ("down", "up"), required=True)
ON = one_of("--mode", ("on", "off"), required=True)
CALL = flag("--call", str, metavar="nvmlFunction", required=True)
CODE = flag("--error", metavar="nvmlReturn_t", required=True)
NVLINK_ERROR = one_of("--error", tuple(h100.NVLINK_ERRORS.values()), required=True)
PENDING: Flag = ("--pending", {"action": "store_true", "help": "at the next reset"})
FAILURE: Flag = ("--failure", {"action": "store_true", "help": "there was no spare row"})
WIDTH = one_of("--width", h100.PCIE_WIDTHS, default=h100.PCIE_LANES)
GENERATION = one_of("--generation", range(1, h100.PCIE_GENERATION + 1), default=h100.PCIE_GENERATION)

# A method of SimulatedNode each: its name with hyphens, what it does, and its arguments as flags. A table, so that
# each command stays in one place.
# fmt: off
COMMANDS: dict[str, tuple[str, tuple[Flag, ...]]] = {
    "xid": ("write an Xid into the kernel log; 79 loses the GPU", (GPU, flag("--code", required=True))),
    "lose": ('let every call about the GPU fail with "GPU is lost"', (GPU,)),
    "ecc": ("count memory errors", (GPU, flag("--uncorrected", default=0), flag("--corrected", default=0))),
    "throttle": ("hold the clock back", (GPU, one_of("--reason", h100.HELD_CLOCK))),
    "heat": ("warm the GPU up to this temperature", (GPU, flag("--celsius", float))),
    "load": ("set how busy the GPU is, 0 to 1", (GPU, flag("--utilization", float, required=True))),
    "hang": ("let an NVML function block; without --call, release it", (flag("--call", str, metavar="nvmlFunction"),)),
    "fail": ("let an NVML function fail; --error 0 lets it work again",
             (CALL, CODE, one_of("--gpu", range(h100.GPUS)))),
    "blind": ("hide the GPU from the exporter's process", (GPU, flag("--error", default=999))),
    "refuse": ("let every call about the GPU fail, as after it fell off the bus", (GPU, flag("--error", default=999))),
    "reset": ("reset the GPU; it is back once NVML is initialised again",
              (GPU, one_of("--index", range(h100.GPUS), help="NVML index it is back at"))),
    "driver": ("replace the driver under the processes that use it", (flag("--version", str, required=True),)),
    "mig": ("partition the GPU, or make it whole again", (GPU, ON, flag("--profile", str, default=h100.MIG_PROFILE))),
    "nvlink": ("take an NVLink down or up", (GPU, LINK, UP)),
    "nvlink-errors": ("count errors of an NVLink", (GPU, LINK, NVLINK_ERROR, flag("--count", default=1))),
    "remap": ("replace memory rows",
              (GPU, flag("--corrected", default=0), flag("--uncorrected", default=0), PENDING, FAILURE)),
    "pcie": ("let the PCIe link train to less", (GPU, WIDTH, GENERATION)),
    "recovery": ("let the driver ask for a recovery action", (GPU, one_of("--action", range(8), required=True))),
    "profiler": ("let a profiler hold the hardware counters", (GPU, ON)),
    "lie": ("let the driver mislead its readers, as some drivers do", (one_of("--kind", LIES, required=True), ON)),
    "symbol-errors": ("let symbol errors rise", (DEVICE, flag("--per-second", float, required=True))),
    "link": ("take a link down or up", (DEVICE, UP)),
    "rate": ("let a port train to another rate, in Gb/s",
             (DEVICE, one_of("--gigabits", h100.LINK_RATES, required=True))),
    "remove": ("take an adapter off the bus", (DEVICE,)),
    "clear": ("end every fault", ()),
}
# fmt: on


def parser() -> argparse.ArgumentParser:
    """Return the argument parser, with one command per method of SimulatedNode that injects a fault."""
    result = argparse.ArgumentParser(prog="python -m simulator.host", description=__doc__)
    result.add_argument("node", type=Path, metavar="NODE_DIR", help="folder of the node (STATE/simulated)")
    commands = result.add_subparsers(dest="command", required=True)
    for name, (text, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for option, settings in flags:
            command.add_argument(option, **settings)
    return result


def main() -> None:
    """Inject the fault that the command line names. Exits with status 2 if an argument is wrong."""
    arguments = parser()
    options = vars(arguments.parse_args())
    folder, name = options.pop("node"), options.pop("command")
    if not (folder / "faults.json").exists():
        arguments.error(f"{folder} is no simulated node; it is STATE/simulated of an exporter run with --simulate")
    try:
        getattr(SimulatedNode(folder), name.replace("-", "_"))(**options)
    except ValueError as error:
        arguments.error(str(error))


if __name__ == "__main__":
    main()
