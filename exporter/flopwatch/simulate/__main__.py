"""Break the simulated node while it runs: `python -m flopwatch.simulate NODE_DIR xid --gpu 3 --code 79`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.simulate import h100
from flopwatch.simulate.node import SimulatedNode


def parser() -> argparse.ArgumentParser:
    """Return the command line: one command per method of SimulatedNode, its flags the method's arguments."""
    result = argparse.ArgumentParser(prog="python -m flopwatch.simulate", description=__doc__)
    result.add_argument("node", type=Path, metavar="NODE_DIR", help="folder of the node (STATE/simulated)")
    commands = result.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, gpu: bool = False, device: bool = False) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        if gpu:
            added.add_argument("--gpu", type=int, choices=range(h100.GPUS), required=True)
        if device:
            added.add_argument("--device", choices=h100.ADAPTERS, required=True)
        return added

    xid = command("xid", "write an Xid into the kernel log; 79 loses the GPU", gpu=True)
    xid.add_argument("--code", type=int, required=True)
    command("lose", "let the GPU fall silent", gpu=True)
    ecc = command("ecc", "count memory errors", gpu=True)
    ecc.add_argument("--uncorrected", type=int, default=0)
    ecc.add_argument("--corrected", type=int, default=0)
    throttle = command("throttle", "hold the clock back", gpu=True)
    throttle.add_argument("--reason", choices=h100.HELD_CLOCK)
    heat = command("heat", "warm the GPU up to this temperature", gpu=True)
    heat.add_argument("--celsius", type=float)
    load = command("load", "set how busy the GPU is, 0 to 1", gpu=True)
    load.add_argument("--utilization", type=float, required=True)
    hang = command("hang", "let an NVML function block; without --call, let it go on")
    hang.add_argument("--call", metavar="nvmlFunction")
    fail = command("fail", "let an NVML function fail; --error 0 lets it work again")
    fail.add_argument("--call", metavar="nvmlFunction", required=True)
    fail.add_argument("--error", type=int, metavar="nvmlReturn_t", required=True)
    fail.add_argument("--gpu", type=int, choices=range(h100.GPUS))
    blind = command("blind", "hide the GPU from the exporter's process", gpu=True)
    blind.add_argument("--error", type=int, default=999)
    refuse = command("refuse", "let every call about the GPU fail, as one that fell off the bus may", gpu=True)
    refuse.add_argument("--error", type=int, default=999)
    reset = command("reset", "reset the GPU; it comes back once NVML is initialised again", gpu=True)
    reset.add_argument("--index", type=int, choices=range(h100.GPUS), help="NVML index it comes back at")
    driver = command("driver", "replace the driver under the processes that use it")
    driver.add_argument("--version", required=True)
    mig = command("mig", "partition the GPU, or make it whole again", gpu=True)
    mig.add_argument("--mode", choices=("on", "off"), required=True)
    mig.add_argument("--profile", default=h100.MIG_PROFILE)
    nvlink = command("nvlink", "take an NVLink down or up", gpu=True)
    nvlink.add_argument("--link", type=int, choices=range(h100.NVLINKS), required=True)
    nvlink.add_argument("--state", choices=("down", "up"), required=True)
    nvlink_errors = command("nvlink-errors", "count errors of an NVLink", gpu=True)
    nvlink_errors.add_argument("--link", type=int, choices=range(h100.NVLINKS), required=True)
    nvlink_errors.add_argument("--error", choices=tuple(h100.NVLINK_ERRORS.values()), required=True)
    nvlink_errors.add_argument("--count", type=int, default=1)
    remap = command("remap", "replace memory rows", gpu=True)
    remap.add_argument("--corrected", type=int, default=0)
    remap.add_argument("--uncorrected", type=int, default=0)
    remap.add_argument("--pending", action="store_true", help="at the next reset")
    remap.add_argument("--failure", action="store_true", help="there was no spare row")
    pcie = command("pcie", "let the PCIe link train to less", gpu=True)
    pcie.add_argument("--width", type=int, choices=h100.PCIE_WIDTHS, default=h100.PCIE_LANES)
    pcie.add_argument(
        "--generation", type=int, choices=range(1, h100.PCIE_GENERATION + 1), default=h100.PCIE_GENERATION
    )
    recovery = command("recovery", "let the driver ask for a recovery action", gpu=True)
    recovery.add_argument("--action", type=int, choices=range(8), required=True)
    profiler = command("profiler", "let a profiler hold the hardware counters", gpu=True)
    profiler.add_argument("--mode", choices=("on", "off"), required=True)
    symbols = command("symbol-errors", "let symbol errors rise", device=True)
    symbols.add_argument("--per-second", type=float, required=True)
    link = command("link", "take a link down or up", device=True)
    link.add_argument("--state", choices=("down", "up"), required=True)
    rate = command("rate", "let a port train to another rate, in Gb/s", device=True)
    rate.add_argument("--gigabits", type=int, choices=h100.LINK_RATES, required=True)
    command("remove", "take an adapter off the bus", device=True)
    command("clear", "end every fault")
    return result


def main() -> None:
    """Run one command."""
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
