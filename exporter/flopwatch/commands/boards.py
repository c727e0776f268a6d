"""`flopwatch boards`: show the dashboards in a browser, without Grafana."""

import argparse
from functools import partial
from pathlib import Path

from flopwatch.commands import Commands, address, command, flag, given, seconds
from flopwatch.settings import BoardsSettings


def boards(options: argparse.Namespace) -> None:
    """Serve the dashboards until stopped. Raises SettingsError."""
    settings = BoardsSettings(**given(options, BoardsSettings))
    from flopwatch.boards.app import run

    run(settings)


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "boards", boards, "show the dashboards in a browser, without Grafana")
    add = partial(flag, parser)
    add("--prometheus", "URL", "Prometheus that evaluates the recording rules", required=True)
    add("--token-file", "FILE", "bearer token for it", Path)
    add("--ca-file", "FILE", "CA that signed its certificate (default the system's authorities)", Path)
    add("--listen", "HOST:PORT", "where to serve (default 127.0.0.1:9452)", address)
    add("--web-config", "FILE", "TLS and users, in the format of Prometheus' exporters", Path)
    add("--scrape-interval", "SECONDS", "scrape interval of that Prometheus (default 15)", seconds)
    add("--dashboards", "FOLDER", "other dashboards than flopwatch's own", Path)
