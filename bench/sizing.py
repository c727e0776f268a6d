"""Estimate of the series of a cluster, and of what they cost one Prometheus, the ledger and the network.

The series of a healthy node are counted in tests/golden/series_of_a_node.json: families in `core` of a simulated node
of eight H100 with eight ranks, and of a ledger with one run. tests/process/test_size.py writes it. Costs are measured
on a real Prometheus 2.53 with the shipped rules (bench/size.py, bench/rules.py) and a real ledger (bench/ledger.py).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.catalogue.training import PHASES

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "series_of_a_node.json"
# Series of core per rank that the hook adds on a GPU with PyTorch. The simulated job does not have them.
TORCH: Mapping[Metric, int] = {m.TRAINING_PHASE_SECONDS_TOTAL: len(PHASES)}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
# up, scrape_duration_seconds, scrape_samples_scraped, scrape_samples_post_metric_relabeling, scrape_series_added
TARGET = 5
# Records of a healthy cluster, by evaluation interval in seconds: series per rank, node, port, GPU with a rail, rail of
# a run, run, and cluster. The two ALERTS are the watchdog's.
RECORDED: Mapping[int, Mapping[str, int]] = {
    3: {"run": 1},
    15: {"node": 2, "run": 22, "whole": 2},
    60: {"rank": 1, "node": 7, "port": 1, "gpu": 1, "run": 108, "whole": 3},
    120: {"rank": 1, "node": 34, "gpu": 2, "rail": 4, "run": 12, "whole": 4},
}

RUN_NODES = 64

# Prometheus keeps samples in memory until a block of two hours is written an hour later.
HEAD = 10_800.0  # seconds
CHUNK = 120  # samples, after which a series' chunk moves from the heap to a mapped file
# Resident bytes: of the program, of a series, of a sample in its last chunk and of one in its older chunks. Go lets the
# heap grow by three quarters before it collects (Prometheus' GOGC=75), so these are about twice what is in use.
# bench/size.py: 64, 256 and 512 targets for twelve minutes; --pace 15 --targets 64 for the samples of three hours.
PROGRAM, SERIES, SAMPLE, OLD_SAMPLE = 54e6, 2850.0, 10.0, 6.0
# Bytes per sample in blocks with the index: of scraped samples, 15 s apart to the millisecond (late scrapes make it
# 3), and of recorded ones, whose values have all their digits. The last one is for the write-ahead log of a head.
RAW_OF_SAMPLE, RECORD_OF_SAMPLE, LOG_OF_SAMPLE = 1.7, 5.3, 5.6
SENT_OF_RAW, SENT_OF_RECORD = 16.6, 12.0  # bytes per sample by remote write, with labels: bench/size.py --store
# `make scale`, 4,096 nodes on two cores: cores of a Prometheus that scrapes a node every 15 s and evaluates the rules,
# and the most seconds per node that the group with the largest share of its interval took, with that interval.
CORES_OF_NODE = 1.48 / 4096
SLOWEST_GROUP, SLOWEST_EVERY = 1.19 / 4096, 3.0
LEDGER_SCRAPED = 3.0  # seconds: AlertSettings.ledger_interval, without what `alerts` imports
LEDGER_EVERY = 15.0  # mean seconds between two records of a node about a run: telemetry.ledger_client
LEDGER_CPU, LEDGER_DISK = 0.7e-3, 1210.0  # CPU seconds per request, bytes per node: bench/ledger.py
ZIPPED = 15.4  # bytes per series on the network: the compressed page of a node with eight GPUs and eight ranks
ROOM = 1.5  # factor on the memory, for the queries of dashboards
BUSY = 0.8  # share of a group's interval above which its evaluation takes too long


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of series: of a GPU with its NVLinks, a port, the rest of a node, a rank, a run, and the ledger."""

    gpu: int
    port: float  # mean of the golden node's InfiniBand and RoCE ports
    node: int
    rank: int
    run: int
    ledger: int  # without runs
    ledger_of_run: int


@functools.cache
def counts() -> Counts:
    """Return the numbers of series of a healthy node and of its ledger, from the golden file."""
    golden = json.loads(GOLDEN.read_text())
    owners: Counter[str] = Counter()
    for name, count in golden["exporter"].items():
        owners[owner(name)] += count
    of_run = sum(count for name, count in golden["ledger"].items() if owner(name) in ("rank", "run"))
    return Counts(
        gpu=owners["gpu"] // golden["gpus"],
        port=owners["port"] / golden["ports"],
        node=owners["node"],
        rank=owners["rank"] // golden["gpus"],
        run=owners["run"],
        ledger=sum(golden["ledger"].values()) - of_run,
        ledger_of_run=of_run,
    )


def owner(name: str) -> str:
    """Return to what a series of this name belongs: gpu, port, rank, run or node."""
    bare = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    row = m.BY_NAME[name if name in m.BY_NAME else bare]
    if "run" in row.labels:
        return "rank" if row.labels[:2] == m.RANK else "run"
    if row.labels[:2] == m.PORT:
        return "port"
    return "gpu" if "uuid" in row.labels else "node"


def families(page: str) -> dict[str, int]:
    """Return the number of series of each family on a page of /metrics."""
    lines: Iterable[str] = (line for line in page.splitlines() if line[:1] not in ("#", ""))
    return dict(sorted(Counter(line.partition("{")[0].partition(" ")[0] for line in lines).items()))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings of an estimate: size of the cluster, and how Prometheus scrapes and stores it. Times are in seconds."""

    nodes: int
    gpus_per_node: int = 8
    ports_per_node: int = 9
    ranks_per_node: int = 8
    run_nodes: int = RUN_NODES
    scrape_interval: float = 15.0
    retention: float = 15 * 86_400.0
    records_retention: float = 400 * 86_400.0
    restarts: float = 1.0  # of every run within the head's three hours, all of its ranks on other nodes
    torch: bool = True  # ranks have what PyTorch's hook has on a GPU

    @property
    def runs(self) -> int:
        """Return the number of runs at a time."""
        return ceil(self.nodes / self.run_nodes)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of all runs together."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Size:
    """Estimate for a cluster, in series, samples per second, bytes, seconds and cores."""

    hardware_series: int
    hook_series: int
    ledger_series: int
    target_series: int
    recorded_series: int
    restarted_series: int  # of ranks that were elsewhere before, until the head's next block is written
    scraped_samples_per_second: float
    recorded_samples_per_second: float
    memory_bytes: float
    disk_raw_bytes: float
    disk_records_bytes: float
    cores: float
    slowest_group_seconds: float
    scrape_bytes: float
    scraped_bytes_per_second: float
    remote_write_raw_bytes_per_second: float
    remote_write_records_bytes_per_second: float
    ledger_requests_per_second: float
    ledger_cores: float
    ledger_disk_bytes: float

    @property
    def scraped_series(self) -> int:
        """Return the number of series of all targets, including those that Prometheus adds for each target."""
        return self.hardware_series + self.hook_series + self.ledger_series + self.target_series

    @property
    def series(self) -> int:
        """Return the number of series that have samples now."""
        return self.scraped_series + self.recorded_series

    @property
    def samples_per_second(self) -> float:
        """Return the number of samples that are written per second."""
        return self.scraped_samples_per_second + self.recorded_samples_per_second


def memory(series: float, seconds: float, scrape_interval: float) -> float:
    """Return the peak resident bytes of a Prometheus 2.53 whose head has `series` series and is `seconds` old.

    A series has its labels, its entry in the index, its chunks and its share of what the rules need to evaluate. Blocks
    have two hours, chunks 120 samples: https://prometheus.io/docs/prometheus/latest/storage/
    """
    samples = min(seconds, HEAD) / scrape_interval
    older = samples - samples % CHUNK if samples > CHUNK else 0.0
    return PROGRAM + series * (SERIES + SAMPLE * min(samples, CHUNK) + OLD_SAMPLE * older)


def size(cluster: Cluster, age: float = HEAD) -> Size:
    """Return the estimate for a cluster, with the memory of a Prometheus that began `age` seconds ago."""
    nodes, ranks, runs = cluster.nodes, cluster.ranks, cluster.runs
    gpus, ports = nodes * cluster.gpus_per_node, nodes * cluster.ports_per_node
    of = counts()
    of_rank = of.rank + (sum(TORCH.values()) if cluster.torch else 0)
    hardware = round(gpus * of.gpu + ports * of.port + nodes * of.node)
    hook = ranks * of_rank + runs * of.run
    ledger, targets = of.ledger + runs * of.ledger_of_run, (nodes + 1) * TARGET
    rails = min(cluster.gpus_per_node, cluster.ports_per_node)
    many = {
        "rank": ranks,
        "node": nodes,
        "port": ports,
        "gpu": nodes * rails,
        "rail": runs * rails,
        "run": runs,
        "whole": 1,
    }
    recorded = {every: sum(count * many[what] for what, count in each.items()) for every, each in RECORDED.items()}
    scraped = hardware + hook + ledger + targets
    restarted = round(cluster.restarts * ranks * of_rank)
    raw = (scraped - ledger) / cluster.scrape_interval + ledger / LEDGER_SCRAPED
    records = sum(count / every for every, count in recorded.items())
    scrape = (hardware + hook) / nodes * ZIPPED
    requests = nodes / LEDGER_EVERY
    return Size(
        hardware_series=hardware,
        hook_series=hook,
        ledger_series=ledger,
        target_series=targets,
        recorded_series=sum(recorded.values()),
        restarted_series=restarted,
        scraped_samples_per_second=raw,
        recorded_samples_per_second=records,
        memory_bytes=memory(scraped + sum(recorded.values()) + restarted, age, cluster.scrape_interval),
        disk_raw_bytes=(raw * RAW_OF_SAMPLE + records * RECORD_OF_SAMPLE) * cluster.retention
        + (raw + records) * LOG_OF_SAMPLE * HEAD,
        disk_records_bytes=records * RECORD_OF_SAMPLE * cluster.records_retention,
        cores=nodes * CORES_OF_NODE * 15 / cluster.scrape_interval,
        slowest_group_seconds=ranks / 8 * SLOWEST_GROUP,
        scrape_bytes=scrape,
        scraped_bytes_per_second=scrape * nodes / cluster.scrape_interval,
        remote_write_raw_bytes_per_second=raw * SENT_OF_RAW,
        remote_write_records_bytes_per_second=records * SENT_OF_RECORD,
        ledger_requests_per_second=requests,
        ledger_cores=requests * LEDGER_CPU,
        ledger_disk_bytes=nodes * LEDGER_DISK,
    )


def one_prometheus(cluster: Cluster) -> int:
    """Return the number of such nodes up to which one Prometheus on two cores evaluates the rules in time."""
    return int(BUSY * SLOWEST_EVERY / (SLOWEST_GROUP * max(cluster.ranks_per_node, 1) / 8))


def table(cluster: Cluster, found: Size) -> str:
    """Return the estimate as text, with name, value and basis of each number."""
    of = counts()
    rank = of.rank + (sum(TORCH.values()) if cluster.torch else 0)
    one = one_prometheus(cluster)
    rows = [
        ("series", "", ""),
        (
            "  of the hardware",
            _count(found.hardware_series),
            f"{of.gpu} a GPU, {of.port:.1f} a port, and {of.node} a node",
        ),
        ("  of the training hook", _count(found.hook_series), f"{rank} a rank, {of.run} a run"),
        ("  of the ledger", _count(found.ledger_series), f"{of.ledger_of_run} a run"),
        ("  of scraping", _count(found.target_series), f"{TARGET} a target"),
        ("  recorded", _count(found.recorded_series), "by our rules, of a healthy cluster"),
        ("  together", _count(found.series), "active"),
        (
            "  of ranks before",
            _count(found.restarted_series),
            f"{cluster.restarts:g} restart of each run in {HEAD / 3600:g} h, on other nodes",
        ),
        (
            "samples",
            f"{_count(round(found.samples_per_second))}/s",
            f"{_count(round(found.recorded_samples_per_second))}/s of them recorded",
        ),
        ("memory", _bytes(found.memory_bytes), "most resident, without queries of boards"),
        ("cores", f"{found.cores:.2f}", f"scraping and rules; {1000 * CORES_OF_NODE:.2g} for a thousand nodes"),
        (
            "slowest group of rules",
            f"{found.slowest_group_seconds:.1f} s of {SLOWEST_EVERY:g}",
            f"flopwatch-host-signs at its worst, on two cores: in time up to {_count(one)} nodes",
        ),
        (
            "disk, all",
            _bytes(found.disk_raw_bytes),
            f"for {_time(cluster.retention)}: {RAW_OF_SAMPLE:g} bytes a sample, and the log",
        ),
        (
            "disk, records",
            _bytes(found.disk_records_bytes),
            f"for {_time(cluster.records_retention)}: {RECORD_OF_SAMPLE:g} bytes a sample",
        ),
        ("a scrape of a node", _bytes(found.scrape_bytes), f"{ZIPPED:g} bytes a series, compressed"),
        ("network, scrapes", f"{_bytes(found.scraped_bytes_per_second)}/s", "all nodes together"),
        (
            "remote write of all",
            f"{_bytes(found.remote_write_raw_bytes_per_second)}/s",
            f"{SENT_OF_RAW:g} bytes a sample",
        ),
        (
            "remote write of records",
            f"{_bytes(found.remote_write_records_bytes_per_second)}/s",
            f"{SENT_OF_RECORD:g} bytes a sample",
        ),
        (
            "ledger",
            f"{_count(round(found.ledger_requests_per_second))} requests/s",
            f"each node every {LEDGER_EVERY:g} s",
        ),
        ("  its cores", f"{found.ledger_cores:.2f}", f"{1000 * LEDGER_CPU:g} ms a request; it uses one at most"),
        ("  its disk", _bytes(found.ledger_disk_bytes), f"{LEDGER_DISK:,.0f} bytes a node"),
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
    """Return a sentence on how many Prometheus servers the cluster needs."""
    one = one_prometheus(cluster)
    if cluster.nodes <= one:
        return f"One Prometheus will do; with {_bytes(ROOM * found.memory_bytes)} of memory it has room for boards."
    return (
        f"More than {one:,} nodes: {-(-cluster.nodes // one)} Prometheus, each with whole partitions of the "
        "cluster, or faster cores (docs/scale.md)."
    )


def _count(number: int) -> str:
    return f"{number:,}"


def _bytes(number: float) -> str:
    """Format a number of bytes in the largest binary unit in which it is at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _time(number: float) -> str:
    """Format seconds as a duration in the largest unit without a remainder, such as `15d`."""
    unit = next((name for name in ("d", "h", "m", "s") if number % UNITS[name] == 0), "s")
    return f"{number / UNITS[unit]:g}{unit}"
