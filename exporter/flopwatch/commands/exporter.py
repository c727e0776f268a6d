"""`flopwatch exporter`: serve this node's GPUs, ports and training ranks to Prometheus."""

import argparse
import sys

from flopwatch.commands import Commands, command, flag, flags, given, sources
from flopwatch.settings import ExporterSettings


def run(options: argparse.Namespace) -> int:
    """Serve until stopped, or with --release make the running exporter close its driver handles for some time."""
    settings = ExporterSettings(**given(options, ExporterSettings))
    if options.release is None:
        from flopwatch.node.server import run as serve

        serve(settings, sources(settings))
        return 0
    from flopwatch.node.driver_release import ask

    if problem := ask(settings.state, options.release):
        print(f"flopwatch: {problem}", file=sys.stderr)
        return 1
    print("the driver is released" if options.release > 0 else "the driver is in use again")
    return 0


def _release_time(text: str) -> float:
    from flopwatch.node.driver_release import duration

    if (time := duration(text)) is None:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 90s, 10m or 1h, and 0 to end it")
    return time


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "exporter", run, "serve this node's GPUs, ports and training ranks to Prometheus")
    text = "let the exporter that runs with this --state close every driver handle for so long (10m), so that a GPU "
    text += "can be reset or its driver replaced; 0 ends it"
    flag(parser, "--release", "TIME", text, _release_time)
    flags(parser, "exporter", ExporterSettings())
