"""`flopwatch maintenance`: hold back the alerts of this host while it is being worked on."""

import argparse
import json
import time
from pathlib import Path

from flopwatch.commands import Commands, command, flag
from flopwatch.settings import ExporterSettings, SettingsError


def start(options: argparse.Namespace) -> None:
    """Start the host's maintenance, or change its end."""
    _write(options, time.time() + options.time)


def stop(options: argparse.Namespace) -> None:
    """End the host's maintenance now."""
    _write(options, time.time())


def show(options: argparse.Namespace) -> None:
    """Print when the host's maintenance ends. Raises SettingsError if the maintenance file cannot be read."""
    from flopwatch.node.maintenance import FILE, until

    ends, problem = until(options.state)
    if problem:
        raise SettingsError(f"{options.state / FILE} {problem}")
    _print(options, ends)


def _write(options: argparse.Namespace, ends: float) -> None:
    from flopwatch.node.collectors import replace_file
    from flopwatch.node.maintenance import FILE

    path = options.state / FILE
    try:
        replace_file(path, f"{ends:.3f}\n", 0o644)  # the exporter runs as another user, whatever the umask here
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; is --state the exporter's?") from None
    _print(options, ends)


def _print(options: argparse.Namespace, ends: float | None) -> None:
    lasts = ends is not None and ends > time.time()
    until = f"in maintenance until {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(ends))}"
    answer = {"in_maintenance": lasts, "until_timestamp_seconds": ends}
    print(json.dumps(answer) if options.json else until if lasts else "not in maintenance")


def _duration(text: str) -> float:
    from flopwatch.node.maintenance import duration

    seconds = duration(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 90m, 2h or 3d")
    return seconds


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    text = "hold back the alerts of this host while it is being worked on (docs/alerts.md)"
    parser = commands.add_parser("maintenance", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    state = ExporterSettings().state
    for name, run, what in (
        ("start", start, "start it, or change its end"),
        ("stop", stop, "end it now"),
        ("list", show, "print when it ends"),
    ):
        action = command(actions, name, run, what)
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "start":
            flag(action, "--for", "TIME", "how long: 90m, 2h, 3d", _duration, dest="time", required=True)
        flag(action, "--state", "DIR", "the exporter's state folder (default %(default)s)", Path, default=state)
