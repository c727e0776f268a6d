"""Panels of the storage clients of a run's hosts, next to the time that its ranks wait for data.

Their series are from exporters of other projects, which docs/other-exporters.md lists. Each of them may be absent.
"""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from dashboards.parts import RATE
from flopwatch import catalogue as m

RUN = 'run="$run"'
RANK_INFO = f"{m.TRAINING_RANK_INFO}{{{RUN}}}"
ON_HOSTS = f"and on (host) max by (host) ({RANK_INFO})"  # of series with our label `host` (docs/other-exporters.md)
CALLS = 'operation=~"open|close|getattr|readdir|read|write"'


def nfs_reads(row: str) -> str:
    """Return the rate of a counter of NFS reads, by node_exporter and export."""
    return f'sum by (instance, export) (rate({row}{{operation="READ"}}{RATE}))'


def of_weka(stat: str, aggregate: str) -> str:
    """Return a statistic of the run's WekaFS clients, by host."""
    stats = f'{aggregate} by (host_name) (weka_stats{{category="ops",stat="{stat}"}})'
    return f'label_replace({stats}, "host", "$1", "host_name", "(.+)") {ON_HOSTS}'


def of_gcsfuse(part: str) -> str:
    """Return the rate of a part of gcsfuse's histogram of read latencies on the run's hosts, by host."""
    return f'sum by (host) (rate(fs_ops_latency_{part}{{fs_op="ReadFile"}}{RATE}) {ON_HOSTS})'


NO_CLIENT = "No exporter of a storage client is scraped on the run's hosts (docs/other-exporters.md)."
PANELS = [
    d.timeseries(
        "Waiting for data, by host",
        "Share of step time that a rank waits for its next batch, of the rank on each host that waits most. Shows the "
        "three highest hosts. Expected: below 10 %. Otherwise compare it with the storage clients.",
        d.Query(f"topk(3, {p.with_host(f'{r.HOST_DATA_STALL}{{{RUN}}}')})", "{{host}}"),
        unit="percentunit",
        thresholds=[(None, "green"), (0.1, "orange")],
        width=6,
        no_data="No rank waits for data, or its batches are not measured.",
    ),
    d.timeseries(
        "Time of a storage read",
        "Mean time of a read by NFS, WekaFS and Cloud Storage FUSE clients. Shows the three slowest of each. Expected: "
        "steady, and hosts alike. A rise together with waiting for data means that storage is slow.",
        d.Query(
            "topk(3, "
            + p.of_node_exporter(
                f"{nfs_reads('node_mountstats_nfs_operations_request_time_seconds_total')} "
                f"/ ({nfs_reads('node_mountstats_nfs_operations_requests_total')} > 0)",
                RANK_INFO,
            )
            + ")",
            "NFS {{host}} {{export}}",
        ),
        d.Query(f"topk(3, 1e-6 * ({of_weka('READ_LATENCY', 'avg')}))", "WekaFS {{host}}"),
        d.Query(f"topk(3, 1e-6 * {of_gcsfuse('sum')} / ({of_gcsfuse('count')} > 0))", "gcsfuse {{host}}"),
        unit="s",
        width=6,
        no_data=NO_CLIENT,
    ),
    d.timeseries(
        "Bytes read from storage",
        "Bytes per second that all hosts of the run read over NFS, Lustre, WekaFS and Cloud Storage FUSE. Expected: "
        "steady. If it falls while ranks wait for data, storage is slow. At the limit of the storage, add a cache.",
        d.Query(
            "sum by (export) ("
            + p.of_node_exporter(f"rate(node_mountstats_nfs_total_read_bytes_total{RATE})", RANK_INFO)
            + ")",
            "NFS {{export}}",
        ),
        d.Query(f'sum(rate(lustre_read_bytes_total{{component="client"}}{RATE}) {ON_HOSTS})', "Lustre"),
        d.Query(f"sum({of_weka('READ_BYTES', 'sum')})", "WekaFS"),
        d.Query(f"sum(rate(gcs_read_bytes_count{RATE}) {ON_HOSTS})", "gcsfuse"),
        unit="Bps",
        width=6,
        no_data=NO_CLIENT,
    ),
    d.timeseries(
        "Lustre calls",
        "Calls per second to the Lustre clients of the run's hosts, by operation. Expected: more reads than opens. "
        "Many opens, getattrs and readdirs load the metadata servers, so use larger files.",
        d.Query(f"sum by (operation) (rate(lustre_client_stats{{{CALLS}}}{RATE}) {ON_HOSTS})", "{{operation}}"),
        d.Query(
            f'sum by (operation) (rate(lustre_stats_total{{component="client",{CALLS}}}{RATE}) {ON_HOSTS})',
            "{{operation}}",
        ),
        unit=p.PER_SECOND,
        width=6,
        no_data=NO_CLIENT,
    ),
]
