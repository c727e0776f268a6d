"""`flopwatch boards`: show the dashboards in a browser, without Grafana."""

import argparse

from flopwatch.commands import Commands, command, flags, given
from flopwatch.settings import BoardsSettings


def boards(options: argparse.Namespace) -> None:
    """Serve the dashboards until stopped. Raises SettingsError."""
    settings = BoardsSettings(**given(options, BoardsSettings))
    from flopwatch.boards.app import run

    run(settings)


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "boards", boards, "show the dashboards in a browser, without Grafana")
    flags(parser, "boards")
