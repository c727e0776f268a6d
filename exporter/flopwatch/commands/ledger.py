"""`flopwatch ledger`: run accounting for a whole cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.commands import Commands, address, command, given, seconds
from flopwatch.settings import LedgerSettings


def serve(options: argparse.Namespace) -> None:
    """Serve until stopped."""
    settings = LedgerSettings(**given(options, LedgerSettings))
    from flopwatch.ledger.app import run

    run(settings)


def replay(options: argparse.Namespace) -> int:
    """Account for a recorded history."""
    from flopwatch.ledger.replay import main

    return main(options.file, options.json)


def add(commands: Commands) -> None:
    """Describe the command and its own commands."""
    defaults = LedgerSettings()
    ledger = commands.add_parser("ledger", help="run accounting for a whole cluster").add_subparsers(
        required=True, metavar="COMMAND"
    )
    parser = command(ledger, "serve", serve, "take snapshots from the exporters and serve run_* metrics")
    add = parser.add_argument
    add("--listen", type=address, metavar="HOST:PORT", help=f"default {defaults.listen}")
    add("--state", type=Path, metavar="DIR", help=f"where the accounts are kept (default {defaults.state})")
    add("--token-file", type=Path, metavar="FILE", help="bearer token that exporters must carry")
    add("--silent-after", type=seconds, metavar="SECONDS",
        help=f"when a silent run is called down (default {defaults.silent_after:g})")
    parser = command(ledger, "replay", replay, "account for a recorded history, a JSON object a line")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
