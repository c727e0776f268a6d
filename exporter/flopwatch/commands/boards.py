"""`flopwatch boards`: the dashboards in a browser, without Grafana."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.commands import Commands, address, command, given, seconds
from flopwatch.settings import BoardsSettings, SettingsError


def boards(options: argparse.Namespace) -> None:
    """Serve until stopped. Raises SettingsError."""
    settings = BoardsSettings(**given(options, BoardsSettings))
    try:
        from flopwatch.boards.app import run
    except ImportError as error:
        raise SettingsError(f"boards: {error}; install it with pip install 'flopwatch[boards]'") from None
    run(settings)


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(commands, "boards", boards, "show the dashboards in a browser, without Grafana")
    add = parser.add_argument
    add("--prometheus", required=True, metavar="URL", help="which evaluates the recording rules")
    add("--token-file", type=Path, metavar="FILE", help="bearer token for it")
    add("--ca-file", type=Path, metavar="FILE", help="who signed its certificate, if not one of the system's")
    add("--listen", type=address, metavar="HOST:PORT", help="where to serve (default 127.0.0.1:9452)")
    add("--web-config", type=Path, metavar="FILE", help="TLS and users, as Prometheus' exporters take them")
    add("--scrape-interval", type=seconds, metavar="SECONDS", help="of that Prometheus (default 15)")
    add("--dashboards", type=Path, metavar="FOLDER", help="other dashboards than flopwatch's own")
