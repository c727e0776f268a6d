"""Page of every command with its flags and exit statuses, from the parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from flopwatch.__main__ import COMMANDS, _parser

# Exit status, when it is returned, and the commands that return it.
STATUSES = (
    ("0", "success", "all. `check`: the host is ok"),
    ("1", "the command could not do it; the reason is on standard error", "all. `check`: degraded"),
    ("1", "the result is not as it should be", "`simulate`"),
    ("2", "a wrong flag or argument", "all but `check`. `check`: bad"),
    ("3", "unknown, also with a wrong flag", "`check`, as [monitoring plugins]({plugins}) do"),
    ("0", "ended by Ctrl-C or SIGTERM", "`exporter`, `ledger serve` and `boards`"),
    ("130", "interrupted by Ctrl-C", "all others but `run`. `top`: also 0, ended by the key `q`"),
    ("141", "the reader of the output ended, as in `flopwatch metrics \\| head`", "all"),
    ("of the script", "the training script's own status", "`run`"),
)
PLUGINS = "https://nagios-plugins.org/doc/guidelines.html"
HEAD = """\
# Commands

This page lists every command with its flags, and the exit statuses. `flopwatch COMMAND --help` prints the same.

Every command that prints facts has `--json`. A progress bar is on standard error, and only on a terminal. Colours obey
`NO_COLOR` and `FORCE_COLOR`.

| exit status | when | commands |
|---|---|---|
{statuses}

`flopwatch exporter` and `flopwatch ledger serve` accept the flags `--web.listen-address` and `--web.config.file` of
Prometheus' exporters as other names, and `exporter` accepts `--path.sysfs`.

The package installs completion for three shells and a man page of each command below its prefix, for example
`/opt/flopwatch/share`. A checkout has them in [completion](../contrib/completion) and [man](../contrib/man).

| for | file below the prefix | how to load it |
|---|---|---|
| bash | `share/bash-completion/completions/flopwatch` | `source` it in `~/.bashrc` |
| zsh | `share/zsh/site-functions/_flopwatch` | add its folder to `fpath` before `compinit` |
| fish | `share/fish/vendor_completions.d/flopwatch.fish` | `source` it in `~/.config/fish/config.fish` |
| man | `share/man/man1` | `man flopwatch-check`, with `bin` of the prefix on `PATH` |

With the prefix `/usr` or `/usr/local` all of them are found without a setting.
"""


def page() -> str:
    """Return the content of docs/commands.md, without the notice."""
    statuses = "\n".join(f"| {' | '.join(row)} |" for row in STATUSES).replace("{plugins}", PLUGINS)
    parts = [HEAD.format(statuses=statuses)]
    commands = choices(_parser())
    shared = {name: _rows(commands[name]) for name in ("exporter", "ledger")}
    shared["exporter"] = [row for row in shared["exporter"] if "--release" not in row]  # not a setting
    for name in COMMANDS:
        parts += [f"\n## {name}\n\n", *_describe(commands[name], shared)]
    return "".join(parts)


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _describe(parser: argparse.ArgumentParser, shared: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a command's purpose and its arguments, and those of its subcommands. Flags in `shared` are not repeated."""
    yield f"{parser.description}\n"
    rows, own = _rows(parser), parser.prog.removeprefix("flopwatch ")
    others = [name for name, flags in shared.items() if name != own and set(flags) <= set(rows)]
    rows = [row for row in rows if not any(row in shared[name] for name in others)]
    if rows:
        yield "\n| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    for name in others:
        yield f"\nIt also takes the flags of `{name}`.\n"
    for inner in choices(parser).values():
        yield f"\n### {inner.prog.removeprefix('flopwatch ')}\n\n"
        yield from _describe(inner, shared)


def _rows(parser: argparse.ArgumentParser) -> list[str]:
    """Return the table's rows of a parser's arguments."""
    return [_row(action) for action in parser._actions if shown(action)]


def shown(action: argparse.Action) -> bool:
    """Return whether an argument is documented: not --help, not hidden, and not the choice of a command."""
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help != argparse.SUPPRESS


def help_text(action: argparse.Action) -> str:
    """Return the help of an argument with its placeholders filled in."""
    return (action.help or "") % {**vars(action), "prog": "flopwatch"}


def name_and_value(action: argparse.Action, name: str = "") -> str:
    """Return one name of an argument, and the word for its value."""
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar or action.dest.upper()
    return " ".join(filter(None, (name, "" if action.nargs == 0 else str(value))))


def _row(action: argparse.Action) -> str:
    """Return the table's row of an argument."""
    name = ", ".join(
        action.option_strings if isinstance(action, argparse.BooleanOptionalAction) else action.option_strings[:1]
    )
    name, text = name_and_value(action, name).replace("|", "\\|"), help_text(action)
    return f"| `{name}` | {text.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
