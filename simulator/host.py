"""Inject faults into a running simulated node: `python -m simulator.host NODE_DIR xid --gpu 3 --code 79`."""

import argparse
from pathlib import Path
from typing import Any

from flopwatch.simulate import h100
from flopwatch.simulate.lies import LIES
from flopwatch.simulate.node import SimulatedNode

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
