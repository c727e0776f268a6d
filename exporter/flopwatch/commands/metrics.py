"""`flopwatch metrics`: the catalogue as Markdown."""

from __future__ import annotations

import argparse

from flopwatch.commands import Commands, command


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    from flopwatch.catalogue.markdown import metrics_markdown

    print(metrics_markdown(key_only=options.key), end="")


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(commands, "metrics", run, "print the catalogue of metrics as Markdown (docs/metrics.md)")
    parser.add_argument("--key", action="store_true", help="only the twenty that matter most")
