"""`flopwatch capture`: save what this host's GPU driver, sysfs and kernel log return, as a test case."""

import argparse
import json
import os
import pwd
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flopwatch.commands import Commands, command, flag, number, seconds
from flopwatch.settings import ExporterSettings, SettingsError

FIRST_USER = 1000  # lower uids are system accounts (login.defs(5), UID_MIN)


def run(options: argparse.Namespace) -> None:
    """Save what this host's drivers return in a new folder, and print what is missing. Raises SettingsError."""
    import time

    from flopwatch.node.capture import capture

    if options.folder.exists():
        raise SettingsError(f"{options.folder} is there already; give a folder that does not exist yet")
    if options.simulated is None:
        import pynvml

        library: Any = pynvml
    else:
        from flopwatch.simulate.pynvml import Simulation

        library = Simulation(options.simulated)
    hosts, words, pause = [options.host, ExporterSettings().host], [*options.mask, *_people()], options.pause
    wait = partial(time.sleep, pause)
    taken = capture(library, options.sysfs, options.kmsg, hosts, words, options.reads, pause=wait)
    try:
        taken.write(options.folder)
    except OSError as error:
        raise SettingsError(f"cannot write the capture: {error}") from error
    if options.json:
        facts = {"folder": str(options.folder), "files": sorted(map(str, taken.files)), "missing": list(taken.missing)}
        print(json.dumps(facts, indent=2))
        return
    print(f"captured {len(taken.files)} files in {options.folder}; look through them before you publish them")
    for line in taken.missing:
        print(f"not captured: {line}")


def _people() -> list[str]:
    """Return the names to mask: of this process's user and of the user behind sudo, without system accounts."""
    users = [os.getuid(), *(int(user) for user in [os.environ.get("SUDO_UID", "")] if user.isdigit())]
    names = []
    for user in users:
        with suppress(KeyError, OverflowError):
            names += [pwd.getpwuid(user).pw_name] if user >= FIRST_USER else []
    return names


_reads = number(int, lambda value: 1 <= value <= 100, "a number of reads from 1 to 100")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    node = ExporterSettings()
    parser = command(commands, "capture", run, "record this node's GPUs and ports, identities masked, as a test case")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to put it; must not exist")
    parser.add_argument("--json", action="store_true", help="print JSON: the files, and what is missing")
    add = partial(flag, parser)
    add("--reads", "N", "how often to read everything (default 2)", _reads, default=2)
    add("--pause", "SECONDS", "between the reads, for counters to move (default 3)", seconds, default=3.0)
    text = "another name to mask, a cluster's for example; may be given more than once"
    add("--mask", "WORD", text, action="append", default=[])
    add("--sysfs", "DIR", f"the kernel's sysfs (default {node.sysfs})", Path, default=node.sysfs)
    add("--kmsg", "FILE", f"the kernel log (default {node.kmsg})", Path, default=node.kmsg)
    add("--host", "NAME", "name of this node, to be masked (default its host name)", default=node.host)
    add("--simulated", "NODE_DIR", argparse.SUPPRESS, Path)
