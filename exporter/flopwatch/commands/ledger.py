"""`flopwatch ledger`: serve the accounting of a cluster's runs, or query a running ledger."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, command, flag, flags, given, seconds
from flopwatch.settings import LedgerSettings

if TYPE_CHECKING:
    from flopwatch.ledger.client import LedgerClient


def serve(options: argparse.Namespace) -> None:
    """Serve the ledger until stopped."""
    settings = LedgerSettings(**given(options, LedgerSettings))
    from flopwatch.ledger.app import run

    run(settings)


def replay(options: argparse.Namespace) -> int:
    """Print each run's seconds by bucket from a file of records, as a ledger would. Return the exit status."""
    from flopwatch.ledger.replay import main

    return main(options.file, options.json)


def runs(options: argparse.Namespace) -> None:
    """Print a table, or JSON, with one row per run."""
    from flopwatch.ledger.tables import runs_table

    rows = [run for run in _client(options).runs() if options.tenant in (None, run["tenant"])]
    print(json.dumps({"runs": rows}, indent=2) if options.json else runs_table(rows))


def show(options: argparse.Namespace) -> None:
    """Print a run's seconds by bucket, its attempts and its incidents."""
    from flopwatch.ledger.tables import run_table

    record = _client(options).record(options.run, options.tenant)
    print(json.dumps(record, indent=2) if options.json else run_table(record))


def close(options: argparse.Namespace) -> None:
    """End a run that cannot report its own end, and print its state before and after."""
    from flopwatch.ledger.record import printable

    before = _client(options).close(options.run, options.tenant, options.status)
    if options.json:
        print(json.dumps({**before, "status": options.status}, indent=2))
        return
    print(f"run {printable(before['run'])} was {before['state']} and is {options.status}")
    if before["state"] == "running":
        print("records that its attempt still sends are ignored")


def export(options: argparse.Namespace) -> None:
    """Print everything the ledger has about a run as JSON, or the run's attempts as CSV."""
    from flopwatch.ledger.tables import attempts_csv

    record = _client(options).record(options.run, options.tenant)
    print(json.dumps(record, indent=2) if options.format == "json" else attempts_csv(record).removesuffix("\n"))


def _client(options: argparse.Namespace) -> "LedgerClient":
    """Return a client of the ledger that the flags name. Raises SettingsError."""
    from flopwatch.ledger.client import LedgerClient

    return LedgerClient(options.url, options.token_file, ca_file=options.ca_file)


def add(commands: Commands) -> None:
    """Register the command, its subcommands and their flags."""
    ledger = command(commands, "ledger", serve, "account for the runs of a cluster; alone, the same as serve")
    _flags(ledger)
    own = ledger.add_subparsers(metavar="COMMAND")
    # SUPPRESS keeps the values of flags that are given before `serve`.
    parser = command(own, "serve", serve, "receive snapshots from the exporters and serve run_* metrics")
    _flags(parser, default=argparse.SUPPRESS)
    parser = command(own, "replay", replay, "print the figures of a recorded history, one JSON object per line")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the records, as `flopwatch simulate --history` writes them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, run, text in (
        ("list", runs, "list the runs of a running ledger"),
        ("show", show, "show where a run's time went, its attempts and incidents"),
        ("close", close, "end a run that will not come back and reports no end itself"),
        ("export", export, "print the whole record of a run"),
    ):
        add = command(own, name, run, text).add_argument
        if name != "list":
            add("run", metavar="RUN", help="name of the run")
        if name == "close":
            text = "how the run ended (default stopped)"
            add("--status", choices=("completed", "stopped"), default="stopped", help=text)
        if name == "export":
            text = "the whole record as JSON, or a row per attempt as CSV (default json)"
            add("--format", choices=("json", "csv"), default="json", help=text)
            add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
        else:
            add("--json", action="store_true", help="print JSON instead of a table")
        text = "the ledger, or an exporter with --ledger embedded (default %(default)s)"
        add("--url", default=f"http://{LedgerSettings().listen}", metavar="URL", help=text)
        text = "the ledger's bearer token"
        add("--token-file", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=text)
        text = "CA that signed the ledger's certificate, for an https URL (default the system's CAs)"
        add("--ca-file", type=Path, metavar="FILE", help=text)
        add("--tenant", metavar="NAME", help="tenant of the run, if several have a run of that name")


def _flags(parser: argparse.ArgumentParser, **more: Any) -> None:
    defaults = LedgerSettings()
    flags(parser, "ledger serve", defaults, **more)
    text = f"silence after which a run without an end is given up (default {defaults.abandoned_after / 86400:g})"
    flag(parser, "--abandoned-after", "DAYS", text, _days, **more)


def _days(text: str) -> float:
    """Parse a positive number of days and return it in seconds, for argparse."""
    return float(seconds(text)) * 86400
