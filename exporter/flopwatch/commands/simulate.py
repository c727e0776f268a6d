"""`flopwatch simulate`: run the fleet simulator of a checkout."""

import argparse

from flopwatch.commands import Commands, command, need_checkout
from flopwatch.settings import SettingsError


def run(options: argparse.Namespace) -> int:
    """Run the simulator. Raises SettingsError outside of a checkout."""
    need_checkout("simulate", "simulator")
    from simulator import command_line

    return command_line.run(options)


def add(commands: Commands) -> None:
    """Add the command, with the flags of the simulator where there is one."""
    text = "simulate a fleet with faults in virtual time and compare the ledger's figures with the truth"
    parser = command(commands, "simulate", run, text)
    try:
        need_checkout("simulate", "simulator")
    except SettingsError:
        return
    from simulator.command_line import add_arguments

    add_arguments(parser)
