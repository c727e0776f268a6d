"""`flopwatch exporter`: serve this node's GPUs, ports and training ranks to Prometheus."""

import argparse
import sys
from functools import partial
from pathlib import Path

from flopwatch.commands import Commands, address, command, flag, given, seconds, sources
from flopwatch.settings import ExporterSettings


def run(options: argparse.Namespace) -> int:
    """Serve until stopped, or with --release make the running exporter close its driver handles for some time."""
    settings = ExporterSettings(**given(options, ExporterSettings))
    if options.release is None:
        from flopwatch.node.server import run as serve

        serve(settings, sources(settings))
        return 0
    from flopwatch.node.driver_release import ask

    if problem := ask(settings.state, options.release):
        print(f"flopwatch: {problem}", file=sys.stderr)
        return 1
    print("the driver is released" if options.release > 0 else "the driver is in use again")
    return 0


def _release_time(text: str) -> float:
    from flopwatch.node.driver_release import duration

    if (time := duration(text)) is None:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 90s, 10m or 1h, and 0 to end it")
    return time


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "exporter", run, "serve this node's GPUs, ports and training ranks to Prometheus")
    text = "let the exporter that runs with this --state close every driver handle for so long (10m), so that a GPU "
    text += "can be reset or its driver replaced; 0 ends it"
    flag(parser, "--release", "TIME", text, _release_time)
    flags(parser)


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the exporter's flags, which `flopwatch doctor` accepts too."""
    node = ExporterSettings()
    add = partial(flag, parser)
    add("--listen --web.listen-address", "HOST:PORT", f"where Prometheus scrapes (default {node.listen})", address)
    text = f"where training processes push OTLP/HTTP (default {node.otlp_listen})"
    add("--otlp-listen", "HOST:PORT", text, address)
    add("--sysfs --path.sysfs", "DIR", f"the kernel's sysfs (default {node.sysfs})", Path)
    text = f"the kernel log, for Xid errors, or unix: and the socket of flopwatch kmsg (default {node.kmsg})"
    add("--kmsg", "FILE", text, Path)
    add("--dcgm", "WHERE", "read a running DCGM host engine too: HOST:PORT or a socket's path (docs/dcgm.md)")
    text = f"profiling fields to sample with --dcgm, in one pass of the hardware (default {node.dcgm_fields})"
    add("--dcgm-fields", "IDS", text)
    text = "publish other exporters' names too: dcgm, dcgm-4.8 or dcgm-4.9 (docs/dcgm.md), node (docs/infiniband.md), "
    add("--expose", "NAMES", text + "or both such as dcgm,node")
    text = "core, what the shipped rules, boards and reports read, or full "
    add("--series", "LEVEL", text + f"(default {node.series}; docs/metrics.md)")
    add("--state", "DIR", f"inventory, Xid counts, embedded ledger, spool (default {node.state})", Path)
    text = "NCCL's RAS, which is asked about an overdue step, as in NCCL_RAS_ADDR of the job, or off "
    add("--ras", "HOST:PORT", text + "(default NCCL_RAS_ADDR, else localhost:28028; docs/hangs.md)")
    text = "folder in which NCCL Inspector writes the durations of collectives, or otlp if they are only pushed. "
    add("--inspector", "DIR", text + "Needs --ledger (docs/inspector.md)")
    add("--simulate", "NODE", "simulate a node instead of reading hardware: h100x8")
    add("--ledger", "WHERE", f"run accounting: embedded, a URL, or off (default {node.ledger})")
    add("--otlp-token-file", "FILE", "bearer token that pushes must carry", Path)
    add("--ledger-token-file", "FILE", "bearer token for the ledger at a URL", Path)
    text = "CA that signed the certificate of a ledger at an https URL (default the system's authorities)"
    add("--ledger-ca-file", "FILE", text, Path)
    text = "shape of the node, for its verdict (default STATE/expected.json, written by flopwatch check --record)"
    add("--expect", "FILE", text, Path)
    text = "TLS and users of --listen: the web configuration file of Prometheus' exporters (docs/tls.md)"
    add("--web-config --web.config.file", "FILE", text, Path)
    add("--otlp-web-config", "FILE", "TLS of --otlp-listen, in the same format", Path)
    add("--host", "NAME", "name of this node in gpu_info and training_rank_info (default its host name)")
    add = partial(flag, parser.add_argument_group("owners of GPUs, and the place of the node (docs/identity.md)"))
    add("--kubelet-socket", "FILE", f"the kubelet's PodResources, if it is there (default {node.kubelet_socket})", Path)
    text = "files named by GPU with a job id a line, as a prolog writes them for dcgm-exporter"
    add("--job-mapping", "DIR", text, Path)
    text = "rack, leaf switch and NVLink domain of the node: slurm:FILE (a topology.conf), csv:FILE "
    add("--topology", "WHERE", text + "(host,rack,leaf,domain), kubernetes (topograph's node labels)")
    add = partial(flag, parser.add_argument_group("pace, in seconds"))
    for name, text, value in (
        ("--scrape-deadline", "longest wait for a source", node.scrape_deadline),
        ("--stale-after", "how long the last samples of a failed source are served", node.stale_after),
        ("--rank-timeout", "how long a rank is served without a push", node.rank_timeout),
        ("--silent-after", "when the embedded ledger calls a silent run down", node.silent_after),
        ("--new-for", "how long it serves the counters of a new run as 0", node.new_for),
    ):
        add(name, "SECONDS", f"{text} (default {value:g})", seconds)
