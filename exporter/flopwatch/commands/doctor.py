"""`flopwatch doctor`: what can be read on this node, and who has what."""

from __future__ import annotations

import argparse
import shutil

from flopwatch.commands import Commands, command, given
from flopwatch.commands.exporter import flags
from flopwatch.settings import ExporterSettings


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 if there is hardware that cannot be read, whatever else it goes without."""
    settings = ExporterSettings(**given(options, ExporterSettings))
    from flopwatch.node.diagnosis.doctor import examine, to_json
    from flopwatch.node.diagnosis.doctor_page import page

    report = examine(settings)
    print(to_json(report) if options.json else page(report, shutil.get_terminal_size().columns), end="")
    return 1 if report.problems else 0


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(
        commands, "doctor", run, "tell what an exporter with these flags reads here, what it cannot read and why"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with everything that the text shortens")
    flags(parser)
