"""`flopwatch simulate`: run the fleet simulator of a checkout."""

from flopwatch.commands import Commands, checkout_command


def add(commands: Commands) -> None:
    """Register the command, with the simulator's flags if this is a checkout."""
    text = "simulate a fleet with faults in virtual time and compare the ledger's figures with the truth"
    checkout_command(commands, "simulate", "simulator", text)
