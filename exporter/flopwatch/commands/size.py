"""`flopwatch size`: what a cluster of some size needs of Prometheus, the ledger and the network."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from flopwatch.commands import Commands, command, given, seconds
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from flopwatch.size import Cluster, Size

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    from flopwatch import size

    if options.run_nodes is None:
        options.run_nodes = min(size.RUN_NODES, options.nodes)
    cluster = size.Cluster(**given(options, size.Cluster))
    if cluster.run_nodes > cluster.nodes:
        raise SettingsError(f"--run-nodes {cluster.run_nodes}: there are {cluster.nodes} nodes")
    found = size.size(cluster)
    if options.json:
        print(
            json.dumps(
                {
                    "cluster": asdict(cluster),
                    "runs": cluster.runs,
                    "scraped_series": found.scraped_series,
                    "series": found.series,
                    "samples_per_second": found.samples_per_second,
                    **asdict(found),
                    "one_prometheus_up_to_nodes": size.one_prometheus(cluster),
                },
                indent=2,
            )
        )
    else:
        print(table(cluster, found))


def table(cluster: Cluster, found: Size) -> str:
    """Return what a cluster comes to as text: what, how much, and what that is reckoned from."""
    from flopwatch import size as of

    rank = of.RANK + (sum(of.TORCH.values()) if cluster.torch else 0)
    one = of.one_prometheus(cluster)
    rows = [
        ("series", "", ""),
        (
            "  of the hardware",
            _count(found.hardware_series),
            f"{of.GPU} a GPU, {of.PORT} a port, {of.NODE} a node besides",
        ),
        ("  of the training hook", _count(found.hook_series), f"{rank} a rank, {of.RUN} a run"),
        ("  of the ledger", _count(found.ledger_series), f"{of.LEDGER_OF_RUN} a run"),
        ("  of scraping", _count(found.target_series), f"{of.TARGET} a target"),
        ("  recorded", _count(found.recorded_series), "by our rules, of a healthy cluster"),
        ("  together", _count(found.series), "active"),
        (
            "  of ranks before",
            _count(found.restarted_series),
            f"{cluster.restarts:g} restart of each run in {of.HEAD / 3600:g} h, on other nodes",
        ),
        (
            "samples",
            f"{_count(round(found.samples_per_second))}/s",
            f"{_count(round(found.recorded_samples_per_second))}/s of them recorded",
        ),
        ("memory", _bytes(found.memory_bytes), "most resident, without queries of boards"),
        ("cores", f"{found.cores:.2f}", f"scraping and rules; {1000 * of.CORES_OF_NODE:g} for a thousand nodes"),
        (
            "slowest group of rules",
            f"{found.training_group_seconds:.1f} s of {of.TRAINING_EVERY:g}",
            f"flopwatch-training, on two cores: in time up to {_count(one)} nodes",
        ),
        (
            "disk, all",
            _bytes(found.disk_raw_bytes),
            f"for {_time(cluster.retention)}: {of.RAW_OF_SAMPLE:g} bytes a sample, and the log",
        ),
        (
            "disk, records",
            _bytes(found.disk_records_bytes),
            f"for {_time(cluster.records_retention)}: {of.RECORD_OF_SAMPLE:g} bytes a sample",
        ),
        ("a scrape of a node", _bytes(found.scrape_bytes), f"{of.ZIPPED:g} bytes a series, compressed"),
        ("network, scrapes", f"{_bytes(found.scraped_bytes_per_second)}/s", "all nodes together"),
        (
            "remote write of all",
            f"{_bytes(found.remote_write_raw_bytes_per_second)}/s",
            f"{of.SENT_OF_RAW:g} bytes a sample",
        ),
        (
            "remote write of records",
            f"{_bytes(found.remote_write_records_bytes_per_second)}/s",
            f"{of.SENT_OF_RECORD:g} bytes a sample",
        ),
        (
            "ledger",
            f"{_count(round(found.ledger_requests_per_second))} requests/s",
            f"each node every {of.LEDGER_EVERY:g} s",
        ),
        ("  its cores", f"{found.ledger_cores:.2f}", f"{1000 * of.LEDGER_CPU:g} ms a request; it uses one at most"),
        ("  its disk", _bytes(found.ledger_disk_bytes), f"{of.LEDGER_DISK:,.0f} bytes a node"),
    ]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [
        f"{cluster.nodes:,} nodes, {cluster.gpus_per_node} GPUs, {cluster.ports_per_node} ports and "
        f"{cluster.ranks_per_node} ranks each; runs of {cluster.run_nodes}; a scrape every "
        f"{cluster.scrape_interval:g} s",
        "",
    ]
    lines += [f"{name:<{names}}  {value:>{values}}  {basis}".rstrip() for name, value, basis in rows]
    lines += ["", advice(cluster, found)]
    return "\n".join(lines)


def advice(cluster: Cluster, found: Size) -> str:
    """Return how many Prometheus to have."""
    from flopwatch import size as of

    one = of.one_prometheus(cluster)
    if cluster.nodes <= one:
        return f"One Prometheus will do; with {_bytes(of.ROOM * found.memory_bytes)} of memory it has room for boards."
    return (
        f"More than {one:,} nodes: {-(-cluster.nodes // one)} Prometheus, each with whole partitions of the "
        "cluster, or faster cores (docs/scale.md)."
    )


def _count(number: int) -> str:
    return f"{number:,}"


def _bytes(number: float) -> str:
    """Return bytes in the largest binary unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _time(number: float) -> str:
    """Return a time as it is given: 15d."""
    unit = next((name for name in ("d", "h", "m", "s") if number % UNITS[name] == 0), "s")
    return f"{number / UNITS[unit]:g}{unit}"


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
