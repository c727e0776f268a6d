"""Command line of `flopwatch size`: its flags, and the estimate as a table or JSON."""

import argparse
import json
import re
from dataclasses import asdict
from functools import partial

from flopwatch.commands import flag, given, number, seconds
from flopwatch.settings import SettingsError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def run(options: argparse.Namespace) -> None:
    """Print the estimate as a table or JSON. Raises SettingsError."""
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
    """Parse a duration in Prometheus' format, such as 15d or 400d12h, into seconds. For argparse."""
    if not re.fullmatch(r"(\d+[smhdwy])+", text):
        raise argparse.ArgumentTypeError(f"{text} is no time; write 15d, 36h or 1y")
    return float(sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdwy])", text)))


_whole = number(int, lambda value: 0 <= value <= 1_000_000, "a whole number from 0 to a million")
_number = number(float, lambda value: 0 <= value <= 1000, "a number from 0 to 1000")


def _some(text: str) -> int:
    if not (value := _whole(text)):
        raise argparse.ArgumentTypeError("there is at least one")
    return int(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the estimate to a parser."""
    add = partial(flag, parser)
    add("--nodes", "N", "nodes with an exporter", _some, required=True)
    add("--gpus-per-node", "N", "default 8", _whole)
    add("--ports-per-node", "N", "InfiniBand, RoCE or EFA (default 9)", _whole)
    add("--ranks-per-node", "N", "of training jobs with the hook (default 8)", _whole)
    add("--run-nodes", "N", "nodes of a run (default 64, or all of fewer)", _some)
    add("--scrape-interval", "SECONDS", "default 15; our rules keep their own intervals", seconds)
    add("--retention", "TIME", "how long Prometheus keeps everything (default 15d)", _duration)
    text = "how long records are kept where they are sent to (default 400d)"
    add("--records-retention", "TIME", text, _duration)
    text = "of each run in three hours, with all its ranks on other nodes, whose old series are still in memory "
    add("--restarts", "N", text + "(default 1)", _number)
    parser.add_argument("--json", action="store_true", help="print JSON, in series, bytes and seconds")
