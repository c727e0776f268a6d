"""`flopwatch kmsg`: stream the kernel log to an exporter that may not read it."""

import argparse
from pathlib import Path

from flopwatch.commands import Commands, command, flag, given
from flopwatch.settings import KmsgSettings


def run(options: argparse.Namespace) -> None:
    """Serve the kernel log on a unix socket until stopped."""
    settings = KmsgSettings(**given(options, KmsgSettings))
    from flopwatch.node.kmsg import run as serve

    serve(settings)


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    defaults = KmsgSettings()
    parser = command(commands, "kmsg", run, "stream the kernel log to an exporter that may not read it")
    text = f"unix socket; the exporter reads it with --kmsg unix:SOCKET (default {defaults.listen})"
    # The prefix is allowed, as in the exporter's --kmsg.
    flag(parser, "--listen", "SOCKET", text, lambda path: Path(path.removeprefix("unix:")))
    flag(parser, "--kmsg", "FILE", f"the kernel log (default {defaults.kmsg})", Path)
    flag(parser, "--group", "NAME", "group that may connect, in addition to this user")
