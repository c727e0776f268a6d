"""`flopwatch exporter`: the node exporter."""

from __future__ import annotations

import argparse
from pathlib import Path

from flopwatch.commands import Commands, address, command, given, seconds
from flopwatch.settings import ExporterSettings


def run(options: argparse.Namespace) -> None:
    """Serve until stopped."""
    settings = ExporterSettings(**given(options, ExporterSettings))
    from flopwatch.node.serve import run as serve

    serve(settings)


def add(commands: Commands) -> None:
    """Describe the command."""
    node = ExporterSettings()
    parser = command(commands, "exporter", run, "serve this node's GPUs, ports and training ranks to Prometheus")
    add = parser.add_argument
    add("--listen", type=address, metavar="HOST:PORT", help=f"where Prometheus scrapes (default {node.listen})")
    add("--otlp-listen", type=address, metavar="HOST:PORT",
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
    pace = parser.add_argument_group("pace, in seconds")
    for flag, text, default in (
        ("--scrape-deadline", "longest wait for a source", node.scrape_deadline),
        ("--stale-after", "how long a failed source's last samples are served", node.stale_after),
        ("--rank-timeout", "how long a rank is served without a push", node.rank_timeout),
        ("--silent-after", "when the embedded ledger calls a silent run down", node.silent_after),
    ):
        pace.add_argument(flag, type=seconds, metavar="SECONDS", help=f"{text} (default {default:g})")
