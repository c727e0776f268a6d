"""`flopwatch doctor`: report what can be read on this node, and the owners of its GPUs."""

import argparse
import json
import os
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from flopwatch.commands import Commands, command, flags, given, sources
from flopwatch.settings import ExporterSettings, SettingsError


def run(options: argparse.Namespace) -> int:
    """Print what can be read on this node. Return 1 if hardware is present but cannot be read, else 0."""
    chosen = given(options, ExporterSettings)
    if options.running:
        parser = argparse.ArgumentParser("flopwatch doctor --running", add_help=False)
        flags(parser, "exporter", ExporterSettings())
        chosen = given(parser.parse_args(running()), ExporterSettings) | chosen
    settings = ExporterSettings(**chosen)
    import pynvml  # noqa: F401  # of the extra, and what reads the GPUs is another process

    from flopwatch.node.health.doctor import examine
    from flopwatch.node.health.doctor_text import page

    report = examine(settings, sources(settings))
    width = shutil.get_terminal_size().columns
    print(json.dumps(asdict(report), indent=1) if options.json else page(report, width), end="")
    return 1 if report.problems else 0


def running(proc: Path = Path("/proc")) -> list[str]:
    """Return the flags of the one exporter in this mount namespace, else in any. Raises SettingsError without one."""
    here, elsewhere = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for process in proc.glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        for at, (program, verb) in enumerate(pairwise(words)):
            if Path(program).name == "flopwatch" and verb == "exporter":
                (here if _mounts(process) == _mounts(proc / "self") else elsewhere).add(tuple(words[at + 2 :]))
    found = here or elsewhere
    if len(found) != 1:
        several = f"{len(found)} exporters run here with different flags" if found else "no exporter runs here"
        raise SettingsError(f"--running: {several}; give the flags instead")
    return list(*found)


def _mounts(process: Path) -> int:
    try:
        return os.stat(process / "ns" / "mnt").st_ino
    except OSError:  # another user's process
        return 0


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    text = "show what an exporter with these flags can read here, and why it cannot read the rest"
    parser = command(commands, "doctor", run, text)
    parser.add_argument("--json", action="store_true", help="print JSON, which the text abbreviates")
    text = "use the flags of the exporter that runs here; given flags override them"
    parser.add_argument("--running", action="store_true", help=text)
    flags(parser, "exporter", ExporterSettings())
