"""`flopwatch kmsg`: the kernel log for an exporter without privileges."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.commands import Commands, command, given
from flopwatch.settings import KmsgSettings


def run(options: argparse.Namespace) -> None:
    """Stream until stopped."""
    settings = KmsgSettings(**given(options, KmsgSettings))
    from flopwatch.node.kmsg import run as serve

    serve(settings)


def _socket(text: str) -> Path:
    """Return the path of a socket, which the exporter's --kmsg writes with `unix:` before it."""
    return Path(text.removeprefix("unix:"))


def add(commands: Commands) -> None:
    """Describe the command."""
    defaults = KmsgSettings()
    parser = command(commands, "kmsg", run, "stream the kernel log to an exporter that may not read it")
    add = parser.add_argument
    add(
        "--listen",
        type=_socket,
        metavar="SOCKET",
        help=f"unix socket; the exporter reads it with --kmsg unix:SOCKET (default {defaults.listen})",
    )
    add("--kmsg", type=Path, metavar="FILE", help=f"the kernel log (default {defaults.kmsg})")
    add("--group", metavar="NAME", help="group that may connect, besides this user")
