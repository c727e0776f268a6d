"""Commands of the command line, one module each. The function `add` of a module registers its command."""

import argparse
import csv
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import flopwatch
from flopwatch.settings import Address, ExporterSettings, SettingsError

if TYPE_CHECKING:
    from flopwatch.node.scrape.reader import SourcesFactory

Commands = Any  # the result of add_subparsers(), whose class is private


class Parser(argparse.ArgumentParser):
    """Parser whose errors are two lines, and suggest the nearest word that it knows."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with status 2."""
        from difflib import get_close_matches  # only errors need it

        known: list[str] = []
        if found := re.search(r"invalid choice: '([^']+)' \(choose from (.+)\)", message):
            known = re.findall(r"[\w.-]+", found[2])
        elif found := re.search(r"unrecognized arguments: (--[^ =]+)", message):
            known = list(self._option_string_actions)
        nearest = get_close_matches(found[1], known, 1) if found else []
        suggestion = "".join(f"; did you mean {word}?" for word in nearest)
        self.exit(2, f"See {self.prog} --help\n{self.prog}: error: {message}{suggestion}\n")


def command(commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> Any:
    """Register a command with argparse and return its parser. `run` receives the flags and returns the exit status."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(command=run, parser=parser)
    return parser


def flag(parser: Any, names: str, metavar: str, text: str, type: Callable[[str], Any] = str, **more: Any) -> None:
    """Add a flag to an argparse parser: its name, and aliases after it. It takes one value, and `text` is its help."""
    parser.add_argument(*names.split(), metavar=metavar, help=text, type=type, **more)


def given(options: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """Return, by name, each parsed flag that has a value and is a field of the dataclass `settings`."""
    names = {field.name for field in fields(settings)}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def sources(settings: ExporterSettings) -> "SourcesFactory":
    """Return the factory of sources for reader processes: of the simulated node with --simulate, else of this host."""
    if settings.simulate is not None:
        from flopwatch.simulate.sources import create

        return create
    from flopwatch.node.scrape.reader import host_sources

    return host_sources


def need_checkout(name: str, package: str) -> None:
    """Make a package of the source tree importable. Raises SettingsError if flopwatch was installed from a wheel."""
    root = Path(flopwatch.__file__).resolve().parents[2]
    if not (root / package).is_dir():
        raise SettingsError(
            f"{name} needs {package}/ of the source tree, which the installed package does not contain. "
            f'Run it from a checkout: "python -m flopwatch {name}"'
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))


def checkout_command(commands: Commands, name: str, package: str, text: str) -> None:
    """Register a command whose code and flags are in `package`.command_line of the source tree."""

    def run(options: argparse.Namespace) -> Any:
        need_checkout(name, package)
        return importlib.import_module(f"{package}.command_line").run(options)

    parser = command(commands, name, run, text)
    try:
        need_checkout(name, package)
    except SettingsError:
        parse = parser.parse_known_args
        parser.parse_known_args = lambda *given: (parse(*given)[0], [])  # so that `run` reports what is missing
    else:
        importlib.import_module(f"{package}.command_line").add_arguments(parser)


def address(text: str) -> Address:
    """Parse an address to listen on. Raises ArgumentTypeError, for argparse."""
    try:
        return Address.parse(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number(kind: Callable[[str], float], fits: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """Return an argparse type: `kind` parses the number, `fits` accepts it, and `what` describes it in errors."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return parse


seconds = number(float, lambda value: 0 < value < 1e6, "a positive number of seconds")


TYPES: Mapping[str, Any] = {"": None, "path": Path, "int": int, "float": float, "address": address, "seconds": seconds}
ACTIONS: Mapping[str, Any] = {"true": "store_true", "optional": argparse.BooleanOptionalAction}


@cache
def _flags() -> list[dict[str, str]]:
    with (Path(__file__).parents[1] / "data" / "flags.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def flags(
    parser: Any, table: str, settings: object = None, types: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> None:
    """Add the flags of a table in data/flags.csv to an argparse parser.

    `{.name}` in a help text is the default of that name in `settings`. `types` has types that only one command needs.
    """
    groups = {"": parser}
    for row in (row for row in _flags() if row["table"] == table):
        if (title := row["group"]) not in groups:
            groups[title] = parser.add_argument_group(title)
        options: dict[str, Any] = {"help": row["help"].format(settings)}
        if (kind := row["type"]) in ACTIONS:
            options["action"] = ACTIONS[kind]
        else:
            options |= {"metavar": row["metavar"] or None, "type": {**TYPES, **types}[kind]}
            options |= {"choices": tuple(row["choices"].split()) or None, "default": row["default"] or None}
        if row["required"]:
            options["required"] = True
        groups[title].add_argument(*row["names"].split(), **options | more)
