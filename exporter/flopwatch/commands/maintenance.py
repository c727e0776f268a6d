"""`flopwatch maintenance`: hold back the alerts of hosts that somebody works on."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from flopwatch.commands import Commands, command
from flopwatch.settings import ExporterSettings, SettingsError

# A host that does not answer is told of after this long, in seconds; the others are not kept waiting by it.
PATIENCE = 30.0
AT_ONCE = 32


def expand(text: str) -> list[str]:
    """Return the hosts in `node[01-03,07]`, as Slurm writes them. Raises ValueError for what is no host."""
    match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\](.*)", text)
    if match is None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*", text):
            raise ValueError(f"{text!r} is no host's name")
        return [text]
    names = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?", part) or int(last or first) < int(first):
            raise ValueError(f"{text!r}: {part!r} is no range of numbers")
        names += [f"{match[1]}{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [host for name in names for host in expand(name + match[3])]


def start(options: argparse.Namespace) -> int:
    """Begin the maintenance, or give it another end."""
    return _write(options, time.time() + options.time)


def stop(options: argparse.Namespace) -> int:
    """End it now."""
    return _write(options, time.time())


def show(options: argparse.Namespace) -> int:
    """Print until when each host is in maintenance."""
    from flopwatch.node.maintenance import FILE, end, until

    path = shlex.quote(str(options.state / FILE))

    def here() -> float | None:
        ends, wrong = until(options.state)
        if wrong:
            raise SettingsError(f"{options.state / FILE} {wrong}")
        return ends

    def there(host: str) -> float | None:
        # The time it was written is the node's own, as the exporter sees it.
        text = _ask(options.via, host, f"if test -f {path}; then stat -c %Y {path}; cat {path}; fi")
        lines = text.split()
        ends = end(lines[1], float(lines[0])) if len(lines) == 2 else None
        if lines and ends is None:
            raise SettingsError(f"{path} is no time; write 2h, or the Unix time of the end")
        return ends

    return _each(options.hosts, lambda host: _said(here() if host is None else there(host)))


def _write(options: argparse.Namespace, ends: float) -> int:
    from flopwatch.node.maintenance import FILE

    path = options.state / FILE
    text = f"{ends:.3f}"

    def write(host: str | None) -> str:
        if host is None:
            draft = path.with_name(f"{FILE}.{os.getpid()}")
            try:
                draft.write_text(f"{text}\n")
                draft.chmod(0o644)  # the exporter is another user, whatever the umask of who is on duty
                draft.replace(path)
            except OSError as error:
                with suppress(OSError):
                    draft.unlink()
                raise SettingsError(f"cannot write {path}: {error.strerror}; is --state the exporter's?") from None
        else:
            draft, final = shlex.quote(f"{path}.new"), shlex.quote(str(path))
            _ask(options.via, host, f"echo {text} > {draft} && mv {draft} {final}")
        return _said(ends)

    return _each(options.hosts, write)


def _each(hosts: Sequence[str], work: Callable[[str | None], str]) -> int:
    """Do it for each host, or for this node, and print what came of it; return 1 if it failed for one of them."""
    if not hosts:
        print(work(None))
        return 0
    failed = False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for host, done in [(host, pool.submit(work, host)) for host in hosts]:
            try:
                print(f"{host}: {done.result()}")
            except SettingsError as error:
                failed = True
                print(f"{host}: {error}", file=sys.stderr)
    return int(failed)


def _ask(via: str, host: str, shell: str) -> str:
    """Return what a shell on the host prints. Raises SettingsError with its complaint."""
    words = [word.replace("{host}", host) for word in shlex.split(via)]
    try:
        done = subprocess.run(
            [*words, shell], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(f"no answer in {PATIENCE:g} s") from None
    except OSError as error:
        raise SettingsError(f"{words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise SettingsError(done.stderr.strip() or f"{words[0]} ended with status {done.returncode}")
    return done.stdout


def _said(ends: float | None) -> str:
    if ends is None or ends <= time.time():
        return "not in maintenance"
    return f"in maintenance until {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(ends))}"


def _time(text: str) -> float:
    from flopwatch.node.maintenance import duration

    seconds = duration(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 90m, 2h or 3d")
    return seconds


def _hosts(text: str) -> list[str]:
    try:
        return expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _via(text: str) -> str:
    if "{host}" not in text:
        raise argparse.ArgumentTypeError("say where the host's name goes: ssh {host}")
    return text


class _Joined(argparse.Action):
    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        setattr(namespace, self.dest, [host for hosts in values or () for host in hosts])  # type: ignore[attr-defined]


def add(commands: Commands) -> None:
    """Describe the command."""
    text = "hold back the alerts of hosts that somebody works on (docs/alerts.md)"
    parser = commands.add_parser("maintenance", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, what in (
        ("start", start, "begin it, or give it another end"),
        ("stop", stop, "end it now"),
        ("list", show, "print until when each host is in maintenance"),
    ):
        action = command(actions, name, run, what)
        action.add_argument(
            "hosts",
            nargs="*",
            type=_hosts,
            action=_Joined,
            default=[],
            metavar="HOSTS",
            help="names, also as node[01-64]; none is this node",
        )
        if name == "start":
            action.add_argument(
                "--for", dest="time", type=_time, required=True, metavar="TIME", help="how long: 90m, 2h, 3d"
            )
        action.add_argument(
            "--state",
            type=Path,
            metavar="DIR",
            default=ExporterSettings().state,
            help="the exporters' state folder (default %(default)s)",
        )
        action.add_argument(
            "--via",
            type=_via,
            metavar="COMMAND",
            default="ssh -o BatchMode=yes {host}",
            help="how to run a shell command on a host (default %(default)s)",
        )
