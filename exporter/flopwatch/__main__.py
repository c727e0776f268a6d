"""Entry point of the `flopwatch` command line. Each command imports its dependencies only when it runs."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import flopwatch
from flopwatch.commands import Parser, checkout_command, run
from flopwatch.settings import SettingsError

# Modules of flopwatch.commands and names in CHECKOUT, in the order of --help.
COMMANDS: tuple[str, ...] = ("exporter", "doctor", "ledger", "maintenance", "metrics", "check", "run", "top", "report")
COMMANDS += ("size", "boards", "flops", "peak", "whatif", "stacks", "simulate", "capture", "kmsg")
CHECKOUT = {  # package of the source tree with the code of a command, and its text in --help
    "size": (
        "bench",
        "estimate what a cluster needs: series, samples, memory, disk, network, and whether one Prometheus will do",
    ),
    "simulate": (
        "simulator",
        "simulate a fleet with faults in virtual time and compare the ledger's figures with the truth",
    ),
}
UNKNOWN = 3  # exit status of `check` if it cannot tell: https://nagios-plugins.org/doc/guidelines.html


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, 1 for a SettingsError. A wrong flag exits with status 2 (check: 3)."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = "; flags of the script go after its name" if options.command is run.run else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command is run.run:
        return int(run.run(options))  # the interpreter handles the training script's exceptions
    try:
        status = int(options.command(options) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe, as in `flopwatch metrics | head`. The flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        return _missing(options.command, error)
    except SettingsError as error:
        print(f"flopwatch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _missing(command: Callable[[argparse.Namespace], object], error: ModuleNotFoundError) -> int:
    """Print what to install for a command, and return its exit status. Raises an error about a module of flopwatch."""
    package = (error.name or "flopwatch").partition(".")[0]
    if package == "flopwatch":
        raise error
    name = getattr(command, "func", command).__module__.rpartition(".")[2]
    extra = name if name in ("ledger", "boards", "report", "top") else "exporter"
    wanted = "torch" if package == "torch" else f"flopwatch[{extra}]"
    print(f"flopwatch: this needs {wanted}: pip install '{wanted}' ({error})", file=sys.stderr)
    return UNKNOWN if name == "check" else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="flopwatch", description="Live MFU, goodput and stragglers for large GPU training runs.")
    parser.add_argument("--version", action="version", version=f"flopwatch {flopwatch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        if name in CHECKOUT:
            checkout_command(commands, name, *CHECKOUT[name])
        else:
            importlib.import_module(f"flopwatch.commands.{name}").add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
