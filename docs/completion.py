"""Completion of the command line in bash, zsh and fish, from its parser."""

from __future__ import annotations

import argparse

import shtab

from docs.commands import choices
from flopwatch.__main__ import _parser

# File of each shell in contrib/completion. pyproject.toml has the places where a wheel installs them.
FILES = {"bash": "flopwatch.bash", "zsh": "_flopwatch", "fish": "flopwatch.fish"}
# What the shell completes for a value, by the word for it in --help.
VALUES = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "CONFIG": shtab.FILE, "script": shtab.FILE}


def scripts() -> dict[str, str]:
    """Return the completion script of each shell, by its file in contrib/completion."""
    parser = _parser()
    _mark(parser)
    return {file: shtab.complete(parser, shell=shell).rstrip() + "\n" for shell, file in FILES.items()}


def _mark(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments of a parser and its commands whose values are files or folders."""
    for action in parser._actions:
        if (value := VALUES.get(str(action.metavar or action.dest))) is not None:
            vars(action)["complete"] = value  # shtab reads it
    for inner in choices(parser).values():
        _mark(inner)
