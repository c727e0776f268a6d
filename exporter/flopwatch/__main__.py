"""The command line. Flags become one settings object here; each command imports what it needs when it is run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import flopwatch
from flopwatch.settings import Address, ExporterSettings, LedgerSettings, SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; 2 for a wrong flag, 1 for what keeps a command from running."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.command(options) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Who reads us has seen enough, as in `flopwatch metrics | head`; and what is left must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SettingsError as error:
        print(f"flopwatch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _exporter(options: argparse.Namespace) -> None:
    settings = ExporterSettings(**_given(options, ExporterSettings))
    from flopwatch.node.serve import run

    run(settings)


def _ledger_serve(options: argparse.Namespace) -> None:
    settings = LedgerSettings(**_given(options, LedgerSettings))
    from flopwatch.ledger.app import run

    run(settings)


def _ledger_replay(options: argparse.Namespace) -> int:
    from flopwatch.ledger.replay import main as replay

    return replay(options.file, options.json)


def _metrics(options: argparse.Namespace) -> None:
    from flopwatch.docs import metrics_markdown

    print(metrics_markdown(key_only=options.key), end="")


def _given(options: argparse.Namespace, settings: type[ExporterSettings] | type[LedgerSettings]) -> dict[str, Any]:
    """Return the flags that were given; the defaults of the rest stay in the settings."""
    names = {field.name for field in fields(settings)}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flopwatch", description="Live MFU, goodput and stragglers for large GPU training runs."
    )
    parser.add_argument("--version", action="version", version=f"flopwatch {flopwatch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    node = ExporterSettings()
    exporter = commands.add_parser(
        "exporter", help="serve this node's GPUs, ports and training ranks to Prometheus",
        description="Serve this node's GPUs, ports and training ranks to Prometheus.",
    )
    exporter.set_defaults(command=_exporter)
    add = exporter.add_argument
    add("--listen", type=_address, metavar="HOST:PORT", help=f"where Prometheus scrapes (default {node.listen})")
    add("--otlp-listen", type=_address, metavar="HOST:PORT",
        help=f"where training processes push OTLP/HTTP (default {node.otlp_listen})")
    add("--sysfs", type=Path, metavar="DIR", help=f"the kernel's sysfs (default {node.sysfs})")
    add("--kmsg", type=Path, metavar="FILE", help=f"the kernel log, for Xid errors (default {node.kmsg})")
    add("--state", type=Path, metavar="DIR",
        help=f"inventory, Xid counts, embedded ledger, spool (default {node.state})")
    add("--simulate", metavar="NODE", help="simulate a node instead of reading hardware: h100x8")
    add("--ledger", metavar="WHERE", help=f"run accounting: embedded, a URL, or off (default {node.ledger})")
    add("--otlp-token-file", type=Path, metavar="FILE", help="bearer token that pushes must carry")
    add("--ledger-token-file", type=Path, metavar="FILE", help="bearer token for the ledger at a URL")
    add("--host", metavar="NAME", help="this node's name in gpu_info and training_rank_info (default its host name)")
    pace = exporter.add_argument_group("pace, in seconds")
    for flag, text, default in (
        ("--scrape-deadline", "longest wait for a source", node.scrape_deadline),
        ("--stale-after", "how long a failed source's last samples are served", node.stale_after),
        ("--rank-timeout", "how long a rank is served without a push", node.rank_timeout),
        ("--silent-after", "when the embedded ledger calls a silent run down", node.silent_after),
    ):
        pace.add_argument(flag, type=_seconds, metavar="SECONDS", help=f"{text} (default {default:g})")

    defaults = LedgerSettings()
    ledger = commands.add_parser("ledger", help="run accounting for a whole cluster").add_subparsers(
        required=True, metavar="COMMAND"
    )
    serve = ledger.add_parser("serve", help="take snapshots from the exporters and serve run_* metrics")
    serve.set_defaults(command=_ledger_serve)
    add = serve.add_argument
    add("--listen", type=_address, metavar="HOST:PORT", help=f"default {defaults.listen}")
    add("--state", type=Path, metavar="DIR", help=f"where the accounts are kept (default {defaults.state})")
    add("--token-file", type=Path, metavar="FILE", help="bearer token that exporters must carry")
    add("--silent-after", type=_seconds, metavar="SECONDS",
        help=f"when a silent run is called down (default {defaults.silent_after:g})")
    replay = ledger.add_parser("replay", help="account for a recorded history, a JSON object a line")
    replay.set_defaults(command=_ledger_replay)
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument("--json", action="store_true", help="print JSON instead of a table")

    metrics = commands.add_parser("metrics", help="print the catalogue of metrics as Markdown (docs/metrics.md)")
    metrics.set_defaults(command=_metrics)
    metrics.add_argument("--key", action="store_true", help="only the twenty that matter most")
    return parser


if __name__ == "__main__":
    sys.exit(main())
