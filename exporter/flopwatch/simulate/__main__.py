"""Break the simulated node while it runs: `python -m flopwatch.simulate NODE_DIR xid --gpu 3 --code 79`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.simulate.node import DEVICES, GPUS, HELD_CLOCK, LINK_RATES, SimulatedNode


def parser() -> argparse.ArgumentParser:
    """Return the command line: one command per method of SimulatedNode, its flags the method's arguments."""
    result = argparse.ArgumentParser(prog="python -m flopwatch.simulate", description=__doc__)
    result.add_argument("node", type=Path, metavar="NODE_DIR", help="folder of the node (STATE/simulated)")
    commands = result.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, gpu: bool = False, device: bool = False) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        if gpu:
            added.add_argument("--gpu", type=int, choices=range(GPUS), required=True)
        if device:
            added.add_argument("--device", choices=DEVICES, required=True)
        return added

    xid = command("xid", "write an Xid into the kernel log; 79 loses the GPU", gpu=True)
    xid.add_argument("--code", type=int, required=True)
    command("lose", "let the GPU fall silent", gpu=True)
    ecc = command("ecc", "count memory errors", gpu=True)
    ecc.add_argument("--uncorrected", type=int, default=0)
    ecc.add_argument("--corrected", type=int, default=0)
    throttle = command("throttle", "hold the clock back", gpu=True)
    throttle.add_argument("--reason", choices=HELD_CLOCK)
    heat = command("heat", "warm the GPU up to this temperature", gpu=True)
    heat.add_argument("--celsius", type=float)
    load = command("load", "set how busy the GPU is, 0 to 1", gpu=True)
    load.add_argument("--utilization", type=float, required=True)
    hang = command("hang", "let an NVML function block; without --call, let it go on")
    hang.add_argument("--call", metavar="nvmlFunction")
    symbols = command("symbol-errors", "let symbol errors rise", device=True)
    symbols.add_argument("--per-second", type=float, required=True)
    link = command("link", "take a link down or up", device=True)
    link.add_argument("--state", choices=("down", "up"), required=True)
    rate = command("rate", "let a port train to another rate, in Gb/s", device=True)
    rate.add_argument("--gigabits", type=int, choices=LINK_RATES, required=True)
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
