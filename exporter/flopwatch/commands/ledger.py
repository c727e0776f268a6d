"""`flopwatch ledger`: run accounting for a whole cluster, and questions to a ledger that runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, address, command, given, seconds
from flopwatch.settings import LedgerSettings

if TYPE_CHECKING:
    from flopwatch.ledger.client import Client


def serve(options: argparse.Namespace) -> None:
    """Serve until stopped."""
    settings = LedgerSettings(**given(options, LedgerSettings))
    from flopwatch.ledger.app import run

    run(settings)


def replay(options: argparse.Namespace) -> int:
    """Account for a recorded history."""
    from flopwatch.ledger.replay import main

    return main(options.file, options.json)


def runs(options: argparse.Namespace) -> None:
    """Print a line per run."""
    from flopwatch.ledger.client import runs_table

    found = [run for run in _client(options).runs() if options.tenant in (None, run["tenant"])]
    print(json.dumps({"runs": found}, indent=2) if options.json else runs_table(found))


def show(options: argparse.Namespace) -> None:
    """Print a run."""
    from flopwatch.ledger.client import run_table

    record = _client(options).record(options.run, options.tenant)
    print(json.dumps(record, indent=2) if options.json else run_table(record))


def close(options: argparse.Namespace) -> None:
    """End a run."""
    from flopwatch.ledger.client import plain

    before = _client(options).close(options.run, options.tenant, options.status)
    if options.json:
        print(json.dumps({**before, "status": options.status}, indent=2))
        return
    print(f"run {plain(before['run'])} was {before['state']} and is {options.status}")
    if before["state"] == "running":
        print("what its attempt goes on to report is not accounted for")


def export(options: argparse.Namespace) -> None:
    """Print the whole record of a run."""
    from flopwatch.ledger.client import attempts_csv

    record = _client(options).record(options.run, options.tenant)
    print(json.dumps(record, indent=2) if options.format == "json" else attempts_csv(record).removesuffix("\n"))


def _client(options: argparse.Namespace) -> Client:
    from flopwatch.ledger.client import Client

    return Client(options.url, options.token_file, ca_file=options.ca_file)


def add(commands: Commands) -> None:
    """Describe the command and its own commands."""
    ledger = command(commands, "ledger", serve, "run accounting for a whole cluster; alone, the same as serve")
    _flags(ledger)
    own = ledger.add_subparsers(metavar="COMMAND")
    # Without defaults: what was given before the word `serve` counts too.
    _flags(
        command(own, "serve", serve, "take snapshots from the exporters and serve run_* metrics"),
        default=argparse.SUPPRESS,
    )
    parser = command(own, "replay", replay, "account for a recorded history, a JSON object a line")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, run, text in (
        ("list", runs, "list the runs of a ledger that runs"),
        ("show", show, "show where a run's time went, its attempts and incidents"),
        ("close", close, "end a run that will not come back and cannot say so itself"),
        ("export", export, "print the whole record of a run"),
    ):
        parser = command(own, name, run, text)
        if name != "list":
            parser.add_argument("run", metavar="RUN")
        if name == "close":
            parser.add_argument(
                "--status",
                choices=("completed", "stopped"),
                default="stopped",
                help="what became of it (default stopped)",
            )
        if name == "export":
            parser.add_argument(
                "--format",
                choices=("json", "csv"),
                default="json",
                help="the whole record, or a row per attempt (default json)",
            )
        else:
            parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument(
            "--url",
            default=f"http://{LedgerSettings().listen}",
            metavar="URL",
            help="the ledger, or an exporter with --ledger embedded (default %(default)s)",
        )
        parser.add_argument(
            "--token-file", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="the ledger's bearer token"
        )
        parser.add_argument(
            "--ca-file",
            type=Path,
            metavar="FILE",
            help="who signed its certificate, for an https URL (default the system's authorities)",
        )
        parser.add_argument("--tenant", metavar="NAME", help="whose run, where several tenants have one of that name")


def _flags(parser: argparse.ArgumentParser, **more: Any) -> None:
    defaults = LedgerSettings()
    for flag, kind, metavar, text in (
        ("--listen", address, "HOST:PORT", f"default {defaults.listen}"),
        ("--state", Path, "DIR", f"where the accounts are kept (default {defaults.state})"),
        ("--token-file", Path, "FILE", "bearer token that exporters must carry"),
        (
            "--web-config",
            Path,
            "FILE",
            "TLS, and users of /metrics: the web configuration file of Prometheus' exporters (docs/tls.md)",
        ),
        ("--silent-after", seconds, "SECONDS", f"when a silent run is called down (default {defaults.silent_after:g})"),
        (
            "--new-for",
            seconds,
            "SECONDS",
            f"how long a new run's counters are served as 0, so that Prometheus sees them begin (default "
            f"{defaults.new_for:g})",
        ),
        (
            "--abandoned-after",
            _days,
            "DAYS",
            f"when a run that nobody ended is given up (default {defaults.abandoned_after / 86400:g})",
        ),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text, **more)


def _days(text: str) -> float:
    """Return a positive number of days in seconds, for argparse."""
    return seconds(text) * 86400
