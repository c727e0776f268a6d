"""`flopwatch stacks`: print the stack of each thread of a hanging rank."""

import argparse
import json
from pathlib import Path

from flopwatch.commands import Commands, command, seconds
from flopwatch.settings import SettingsError

ANSWER = 15.0  # seconds to wait; a rank checks for a request before every push


def run(options: argparse.Namespace) -> None:
    """Request the stacks from the rank's process and print them. Raises SettingsError without an answer in time."""
    from flopwatch.training.process import stacks

    process = Path("/proc") / str(options.pid)
    if not process.exists():
        raise SettingsError(f"there is no process {options.pid} here; give its number in this container")
    try:
        # The environment at the start of the process, with the launcher's variables.
        pairs = (process / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
        environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        user = process.stat().st_uid
        answer = stacks.request(options.pid, options.wait, environ=environ, user=user)
    except OSError as error:
        raise SettingsError(
            f"cannot ask process {options.pid}: {error}; run this where the process runs, as its user or root"
        ) from error
    if answer is None:
        raise SettingsError(
            f"process {options.pid} did not answer within {options.wait:g} s: it has no running hook, or "
            f"compiled code holds its interpreter; try py-spy dump --pid {options.pid}"
        )
    if options.json:
        title, *blocks = answer.strip().split("\n\n")
        threads = [{"thread": name, "frames": frames} for name, *frames in map(str.splitlines, blocks)]
        answer = f"{json.dumps({'pid': options.pid, 'process': title, 'threads': threads}, indent=2)}\n"
    print(answer, end="")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "stacks", run, "print where the threads of a rank on this node are")
    parser.add_argument("pid", type=int, metavar="PID", help="the rank's process, as seen from its own container")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wait = f"how long to wait for the answer (default {ANSWER:g})"
    parser.add_argument("--wait", type=seconds, default=ANSWER, metavar="SECONDS", help=wait)
