"""`flopwatch simulate`: run the fleet simulator of a checkout."""

import argparse

from flopwatch.commands import Commands, command, need_checkout
from flopwatch.settings import SettingsError


def run(options: argparse.Namespace) -> int:
    """Run the fleet simulator and return its exit status. Raises SettingsError outside a checkout."""
    need_checkout("simulate", "simulator")
    from simulator import command_line

    return command_line.run(options)


def add(commands: Commands) -> None:
    """Register the command, with the simulator's flags if this is a checkout."""
    text = "simulate a fleet with faults in virtual time and compare the ledger's figures with the truth"
    parser = command(commands, "simulate", run, text)
    try:
        need_checkout("simulate", "simulator")
    except SettingsError:
        return
    from simulator.command_line import add_arguments

    add_arguments(parser)
