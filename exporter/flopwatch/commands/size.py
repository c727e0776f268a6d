"""`flopwatch size`: what a cluster of some size needs of Prometheus, the ledger and the network."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict

from flopwatch.commands import Commands, command, given, need_checkout, seconds
from flopwatch.settings import SettingsError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def run(options: argparse.Namespace) -> None:
    """Print the table, or JSON. Raises SettingsError outside a checkout."""
    need_checkout("size", "bench")
    from bench import sizing

    if options.run_nodes is None:
        options.run_nodes = min(sizing.RUN_NODES, options.nodes)
    cluster = sizing.Cluster(**given(options, sizing.Cluster))
    if cluster.run_nodes > cluster.nodes:
        raise SettingsError(f"--run-nodes {cluster.run_nodes}: there are {cluster.nodes} nodes")
    size = sizing.size(cluster)
    figures = {
        "cluster": asdict(cluster),
        "runs": cluster.runs,
        "scraped_series": size.scraped_series,
        "series": size.series,
        "samples_per_second": size.samples_per_second,
        **asdict(size),
        "one_prometheus_up_to_nodes": sizing.one_prometheus(cluster),
    }
    print(json.dumps(figures, indent=2) if options.json else sizing.table(cluster, size))


def _duration(text: str) -> float:
    """Return a time as Prometheus writes one, 15d or 6h or 400d12h, in seconds, for argparse."""
    if not re.fullmatch(r"(\d+[smhdwy])+", text):
        raise argparse.ArgumentTypeError(f"{text} is no time; write 15d, 36h or 1y")
    return float(sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdwy])", text)))


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to a million")
    return number


def _some(text: str) -> int:
    if (number := _whole(text)) == 0:
        raise argparse.ArgumentTypeError("there is at least one")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1000")
    return number


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(
        commands,
        "size",
        run,
        "tell what a cluster needs: series, samples, memory, disk, network, and whether one Prometheus will do",
    )
    add = parser.add_argument
    add("--nodes", type=_some, required=True, metavar="N", help="nodes with an exporter")
    for flag, what in (
        ("--gpus-per-node", "default 8"),
        ("--ports-per-node", "InfiniBand, RoCE or EFA (default 9)"),
        ("--ranks-per-node", "of training jobs with the hook (default 8)"),
    ):
        add(flag, type=_whole, metavar="N", help=what)
    add("--run-nodes", type=_some, metavar="N", help="nodes of a run (default 64, or all of fewer)")
    add("--scrape-interval", type=seconds, metavar="SECONDS", help="default 15; our rules keep their own intervals")
    add("--retention", type=_duration, metavar="TIME", help="how long Prometheus keeps everything (default 15d)")
    add(
        "--records-retention",
        type=_duration,
        metavar="TIME",
        help="how long records are kept where they are sent to (default 400d)",
    )
    add(
        "--restarts",
        type=_number,
        metavar="N",
        help="of each run in three hours, with all its ranks on other nodes, whose old series are still in memory "
        "(default 1)",
    )
    add("--json", action="store_true", help="print JSON, in series, bytes and seconds")
