"""`flopwatch metrics`: list the series of the catalogue."""

import argparse

from flopwatch.commands import Commands, command


def run(options: argparse.Namespace) -> None:
    """Print each series with its labels and type, and below it what it means and where it comes from."""
    from flopwatch.catalogue import all_metrics

    for row in all_metrics():
        if row.key or not options.key:
            print(f"{row}{{{','.join(row.labels)}}} {row.type}\n    {row.help} Source: {row.source}.")


def add(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = command(commands, "metrics", run, "list every series with its labels, type, meaning and source")
    parser.add_argument("--key", action="store_true", help="only the twenty that matter most")
