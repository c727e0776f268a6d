"""`flopwatch exporter`: the node exporter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flopwatch.commands import Commands, address, command, given, seconds, sources
from flopwatch.settings import ExporterSettings


def run(options: argparse.Namespace) -> int:
    """Serve until stopped; with --release, ask the exporter that runs."""
    settings = ExporterSettings(**given(options, ExporterSettings))
    if options.release is not None:
        return _release(settings.state, options.release)
    from flopwatch.node.server import run as serve

    serve(settings, sources(settings))
    return 0


def _release(state: Path, time: float) -> int:
    from flopwatch.node.driver_release import ask

    if problem := ask(state, time):
        print(f"flopwatch: {problem}", file=sys.stderr)
        return 1
    print("the driver is released" if time > 0 else "the driver is in use again")
    return 0


def _release_time(text: str) -> float:
    from flopwatch.node.driver_release import duration

    if (time := duration(text)) is None:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 90s, 10m or 1h, and 0 to end it")
    return time


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(commands, "exporter", run, "serve this node's GPUs, ports and training ranks to Prometheus")
    parser.add_argument(
        "--release",
        type=_release_time,
        metavar="TIME",
        help="let the exporter that runs with this --state close every driver handle for so long (10m), so that a GPU "
        "can be reset or its driver replaced; 0 ends it",
    )
    flags(parser)


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the exporter's settings, which `flopwatch doctor` takes too."""
    node = ExporterSettings()
    add = parser.add_argument
    add("--listen", type=address, metavar="HOST:PORT", help=f"where Prometheus scrapes (default {node.listen})")
    add(
        "--otlp-listen",
        type=address,
        metavar="HOST:PORT",
        help=f"where training processes push OTLP/HTTP (default {node.otlp_listen})",
    )
    add("--sysfs", type=Path, metavar="DIR", help=f"the kernel's sysfs (default {node.sysfs})")
    add(
        "--kmsg",
        type=Path,
        metavar="FILE",
        help=f"the kernel log, for Xid errors, or unix: and the socket of flopwatch kmsg (default {node.kmsg})",
    )
    add(
        "--dcgm",
        metavar="WHERE",
        help="read a running DCGM host engine too: HOST:PORT or a socket's path (docs/dcgm.md)",
    )
    add(
        "--expose", metavar="NAMES", help="publish dcgm-exporter's names too: dcgm, dcgm-4.8 or dcgm-4.9 (docs/dcgm.md)"
    )
    add(
        "--state",
        type=Path,
        metavar="DIR",
        help=f"inventory, Xid counts, embedded ledger, spool (default {node.state})",
    )
    add("--simulate", metavar="NODE", help="simulate a node instead of reading hardware: h100x8")
    add("--ledger", metavar="WHERE", help=f"run accounting: embedded, a URL, or off (default {node.ledger})")
    add("--otlp-token-file", type=Path, metavar="FILE", help="bearer token that pushes must carry")
    add("--ledger-token-file", type=Path, metavar="FILE", help="bearer token for the ledger at a URL")
    add(
        "--ledger-ca-file",
        type=Path,
        metavar="FILE",
        help="who signed the certificate of a ledger at an https URL (default the system's authorities)",
    )
    add(
        "--expect",
        type=Path,
        metavar="FILE",
        help="shape of the node, for its verdict (default what flopwatch check --record wrote to STATE/expected.json)",
    )
    add(
        "--web-config",
        type=Path,
        metavar="FILE",
        help="TLS and users of --listen: the web configuration file of Prometheus' exporters (docs/tls.md)",
    )
    add("--otlp-web-config", type=Path, metavar="FILE", help="TLS of --otlp-listen, by the same kind of file")
    add("--host", metavar="NAME", help="this node's name in gpu_info and training_rank_info (default its host name)")
    who = parser.add_argument_group("who has a GPU, and where the node stands (docs/identity.md)")
    who.add_argument(
        "--kubelet-socket",
        type=Path,
        metavar="FILE",
        help=f"the kubelet's PodResources, if it is there (default {node.kubelet_socket})",
    )
    who.add_argument(
        "--job-mapping",
        type=Path,
        metavar="DIR",
        help="files named by GPU with a job id a line, as a prolog writes them for dcgm-exporter",
    )
    who.add_argument(
        "--topology",
        metavar="WHERE",
        help="the node's rack, leaf switch and NVLink domain: slurm:FILE (a topology.conf), csv:FILE "
        "(host,rack,leaf,domain), kubernetes (topograph's node labels)",
    )
    pace = parser.add_argument_group("pace, in seconds")
    for flag, text, default in (
        ("--scrape-deadline", "longest wait for a source", node.scrape_deadline),
        ("--stale-after", "how long a failed source's last samples are served", node.stale_after),
        ("--rank-timeout", "how long a rank is served without a push", node.rank_timeout),
        ("--silent-after", "when the embedded ledger calls a silent run down", node.silent_after),
        ("--new-for", "how long it serves a new run's counters as 0", node.new_for),
    ):
        pace.add_argument(flag, type=seconds, metavar="SECONDS", help=f"{text} (default {default:g})")
