"""`flopwatch size`: estimate what a cluster needs of Prometheus, the ledger and the network."""

from flopwatch.commands import Commands, checkout_command


def add(commands: Commands) -> None:
    """Register the command, with its flags if this is a checkout."""
    text = "estimate what a cluster needs: series, samples, memory, disk, network, and whether one Prometheus will do"
    checkout_command(commands, "size", "bench", text)
