"""`flopwatch metrics`: list the metric families that flopwatch publishes."""

import argparse
import json

from flopwatch.commands import Commands, command


def run(options: argparse.Namespace) -> None:
    """Print each row of the catalogue with labels, type, help and source, or only the key rows with --key."""
    from flopwatch.catalogue import all_metrics

    rows = [row for row in all_metrics() if row.key or not options.key]
    if options.json:
        fields = ("name", "type", "labels", "help", "source", "key")
        print(json.dumps([{field: getattr(row, field) for field in fields} for row in rows], indent=2))
        return
    for row in rows:
        print(f"{row}{{{','.join(row.labels)}}} {row.type}\n    {row.help} Source: {row.source}.")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "metrics", run, "list every series with its labels, type, meaning and source")
    parser.add_argument("--key", action="store_true", help="only the twenty that matter most")
    parser.add_argument("--json", action="store_true", help="print JSON")
