"""Comparison of `flopwatch size` with a real Prometheus that evaluates the shipped rules.

    python bench/size.py [--targets 64 256 512] [--minutes 12] [--pace 1] [--suite trixie]

The pages are from a real exporter on a simulated node of eight H100 and nine ports, and from a real ledger. Eight ranks
of a simulated job push through the real hook. The pages are served once per node, with its names, 64 nodes to a run,
and with the series that the hook of PyTorch adds on a GPU. Prometheus scrapes each node as its own target.

Memory is the peak resident memory (VmRSS, in Prometheus process_resident_memory_bytes) in the second half of the time.
It is compared with the prediction for a head of this age. At a pace of 15, the scrape interval is one second, and
Prometheus writes a block after eight minutes instead of two hours. The measurement then includes compaction and a
block on disk, as after days in production.

The exit status is 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from alerts import AlertSettings, rules_yaml
from bench.pages import GPUS, NODES_OF_A_RUN, PORTS, PageProtocol
from bench.rules import ANSWER_TIMEOUT, ask, configuration, many_files, processor, start_process
from bench.sizing import TORCH, Cluster, size
from demo.servers import find
from demo.stack import Child, fetch, free_ports
from flopwatch import catalogue as m
from flopwatch.catalogue.training import PHASES
from simulator.host import SimulatedNode

RUN, HOST = "run-of-template", "host-of-template"
RECORDS_AND_ALERTS = ".+:.+|ALERTS.*"  # names
MAX_ERROR = 0.15
PARTS = ("series recorded",)  # rows whose series another row counts, too
START_TIMEOUT = 150.0  # seconds until exporter, ranks and ledger serve all families


# What is scraped.


@dataclass(frozen=True, slots=True)
class PageSource:
    """URLs of the exporter and the ledger whose pages are served for all nodes."""

    exporter: str
    ledger: str


@contextmanager
def source(folder: Path) -> Iterator[PageSource]:
    """Run an exporter on a simulated node, eight ranks and a ledger until the block ends.

    Yields once their pages have all families. Raises StackError if one of the programs fails.
    """
    exporter, otlp, ledger = (f"127.0.0.1:{port}" for port in free_ports(3))
    python = [sys.executable, "-m"]
    uuids = ",".join(SimulatedNode.uuid(gpu) for gpu in range(GPUS))
    children: list[Child] = []
    with ExitStack() as stack:
        for name, command in (
            ("ledger", ["flopwatch", "ledger", f"--listen={ledger}", f"--state={folder}/ledger", "--new-for=0.001"]),
            (
                "exporter",
                [
                    "flopwatch",
                    "exporter",
                    f"--listen={exporter}",
                    f"--otlp-listen={otlp}",
                    f"--state={folder}/exporter",
                    f"--host={HOST}",
                    "--simulate=h100x8",
                    f"--ledger=http://{ledger}",
                ],
            ),
            ("job", ["simulator.job", f"--ranks={GPUS}", f"--out={folder}/job", f"--gpu-uuids={uuids}"]),
        ):
            (folder / name).mkdir()
            child = Child(
                name,
                [*python, *command],
                {**os.environ, "FLOPWATCH_ENDPOINT": f"http://{otlp}", "FLOPWATCH_RUN": RUN},
                folder / f"{name}.log",
            )
            stack.callback(child.stop)
            children.append(child)
        found = PageSource(f"http://{exporter}/metrics", f"http://{ledger}/metrics")
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_complete(found):
            for child in children:
                child.check()
            if time.monotonic() > deadline:
                raise children[1].failure("did not serve all families in time")
            time.sleep(0.2)
        yield found


def _is_complete(pages_of: PageSource) -> bool:
    """Return whether the exporter and the ledger serve the series that are the last to appear after a start."""
    last = ("training_last_step_timestamp_seconds", "gpu_utilization_ratio", "infiniband_info")
    try:
        page = fetch(pages_of.exporter).decode()
        saved = set(
            re.findall(r'^training_activity_seconds_total\{.*rank="(\d+)",activity="checkpoint_save"', page, re.M)
        )
        return (
            len(saved) == GPUS
            and all(f"\n{name}{{" in page for name in last)
            and "\nrun_straggler_ratio{" in fetch(pages_of.ledger).decode()  # after two intervals of 15 s
        )
    except OSError:
        return False


def extended(page: str) -> str:
    """Return a page with the series added that the hook has with PyTorch, but not in the simulated job."""
    ranks = [str(rank) for rank in range(GPUS)]
    lines = []
    for row, series in TORCH.items():
        for rank in ranks:
            for which in range(series):
                phase = f',phase="{PHASES[which]}"' if row is m.TRAINING_PHASE_SECONDS_TOTAL else ""
                lines.append(f'{row}{{run="{RUN}",rank="{rank}"{phase}}} {time.time() - 1.7e9 + which:.3f}\n')
    return page + "".join(lines)


def pages(node: str, ledger: str, nodes: int) -> Callable[[str], bytes]:
    """Return a function that returns the page of a path, /n/17 or /ledger.

    All pages are made from the page of one exporter, `node`, and that of one ledger.
    """
    own = re.compile(
        rf'^(?!#)[^\n{{]*{{run="{RUN}"(?!,rank=)[^\n]*\n', re.MULTILINE
    )  # series of a run, which one rank has
    page = extended(re.sub(r"^#.*\n", "", node, flags=re.MULTILINE))
    first, others = page.encode(), own.sub("", page).encode()
    prefix = SimulatedNode.uuid(0).rpartition("-")[0].encode() + b"-"
    of_run = [
        re.sub(r"^(run_gpus{.*}) .*", rf"\1 {NODES_OF_A_RUN * GPUS}", line)
        for line in ledger.splitlines(keepends=True)
        if f'run="{RUN}"' in line and line[:1] != "#"
    ]
    of_ledger = [line for line in ledger.splitlines(keepends=True) if f'run="{RUN}"' not in line and line[:1] != "#"]
    runs = -(-nodes // NODES_OF_A_RUN)
    ledger_page = "".join([*of_ledger, *("".join(of_run).replace(RUN, f"run-{run}") for run in range(runs))]).encode()

    def body(path: str) -> bytes:
        number = path.rpartition("/")[2]
        if number == "ledger":
            return ledger_page
        run, place = divmod(int(number), NODES_OF_A_RUN)
        size = min(NODES_OF_A_RUN, nodes - run * NODES_OF_A_RUN) * GPUS
        text = (
            (first if place == 0 else others)
            .replace(RUN.encode(), b"run-%d" % run)
            .replace(HOST.encode(), b"node-" + number.encode())
            .replace(prefix, prefix[:-5] + b"%04d-" % int(number))
        )
        for rank in range(GPUS if place else 0):
            text = text.replace(b'rank="%d"' % rank, b'rank="%d"' % (place * GPUS + rank))
        if place == 0:
            text = re.sub(rb"(?m)^(training_world_size{.*}) .*", rb"\1 %d" % size, text)
        return text

    return body


def serve(pages_of: PageSource, nodes: int, every: float, ready: Connection) -> None:
    """Serve the pages of all nodes until the process is killed, renewed every `every` seconds.

    The port is sent to `ready` once the server listens.
    """

    def now() -> Callable[[str], bytes]:
        return pages(fetch(pages_of.exporter).decode(), fetch(pages_of.ledger).decode(), nodes)

    async def main() -> None:
        body = now()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PageProtocol(lambda path: body(path)), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        async with server:
            while True:
                await asyncio.sleep(every)
                body = await loop.run_in_executor(None, now)

    asyncio.run(main())


# The measurement.


@dataclass(frozen=True, slots=True)
class SizeMeasurement:
    """Measured series, samples and load of a Prometheus."""

    scraped: int  # series, including the five that Prometheus adds for each target
    recorded: int
    head: int
    samples_per_second: float  # at pace 1
    memory: int  # peak resident bytes in the second half
    heap: int  # peak bytes in use of the Go heap in the second half
    file: int  # bytes of `memory` that are pages of files
    block_bytes_per_sample: float | None  # of the newest block
    wal: int  # bytes
    body: int  # bytes of a scrape, uncompressed
    by_record: dict[str, int]
    cores: float  # mean in the second half, at pace 1
    missed: float  # share of rule evaluations that were skipped because the previous one took too long
    sent_bytes_per_sample: float | None = None  # of records, by remote write
    record_bytes_per_sample: float | None = None  # of the newest block of the second Prometheus


def status(pid: int, name: str) -> int:
    """Return the field `name` of /proc/PID/status in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def own(url: str, *names: str) -> list[float]:
    """Return the values of metrics that Prometheus serves about itself, 0 for a missing one."""
    text = fetch(f"{url}/metrics", ANSWER_TIMEOUT).decode()
    return [float(found[1]) if (found := re.search(rf"^{name} (\S+)$", text, re.MULTILINE)) else 0.0 for name in names]


def totals(url: str, name: str) -> float:
    """Return the sum over all series of a family that Prometheus serves about itself."""
    text = fetch(f"{url}/metrics", ANSWER_TIMEOUT).decode()
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def per_sample(data: Path) -> float | None:
    """Return the bytes per sample of the newest block in a data folder, with its index, or None without a block."""
    blocks = sorted(data.glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    for meta in blocks[-1:]:
        size = sum(path.stat().st_size for path in meta.parent.rglob("*") if path.is_file())
        return float(size / json.loads(meta.read_text())["stats"]["numSamples"])
    return None


def measure(
    targets: int,
    seconds: float,
    pace: float = 1.0,
    suite: str | None = None,
    store: bool = False,
    log: Callable[[str], None] = print,
    pages_of: PageSource | None = None,
) -> SizeMeasurement:
    """Scrape `targets` nodes for `seconds`, and return the size of Prometheus. Raises StackError if a program fails.

    With `store`, recorded series are also sent to a second Prometheus. `pages_of` is a source that runs already.
    """
    settings = AlertSettings(pace=pace)
    interval = settings.scrape_interval / pace
    with ExitStack() as stack:
        stack.enter_context(many_files())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-size-")))
        pages_of = pages_of or stack.enter_context(source(folder))
        here, there = multiprocessing.Pipe(duplex=False)
        start_process(stack, serve, pages_of, targets, min(5.0, max(1.0, interval / 2)), there)
        there.close()
        port = here.recv()  # EOFError if the process ended
        (folder / "rules.yaml").write_text(rules_yaml(settings))
        written = configuration(settings, targets, port)
        program = [
            *find(log=log, suite=suite).prometheus,
            "--log.level=warn",
            f"--storage.tsdb.min-block-duration={7200 / pace:.0f}s",
            f"--storage.tsdb.max-block-duration={7200 / pace:.0f}s",
        ]
        if store:
            written["remote_write"] = _start_store(stack, folder, program)
        (folder / "prometheus.yml").write_text(json.dumps(written))
        (web,) = free_ports(1)
        data = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        listen = f"--web.listen-address=127.0.0.1:{web}"
        child = Child("prometheus", [*program, *data, listen], os.environ, folder / "log")
        stack.callback(child.stop)
        url = f"http://127.0.0.1:{web}"
        load = _load(child, url, seconds)
        (head,) = own(url, "prometheus_tsdb_head_series")
        skipped, evaluated = (
            totals(url, f"prometheus_rule_group_iterations_{kind}") for kind in ("missed_total", "total")
        )
        records = ask(url, 'count by (__name__) ({__name__=~".+:.+|ALERTS.*"})')
        by_record = {labels["__name__"]: int(count) for labels, count in records}
        [(_, scraped)] = ask(url, "sum(scrape_samples_post_metric_relabeling) + 5 * count(up)")
        [(_, down)] = ask(url, "count(up == 0) or vector(0)")
        if down:
            raise child.failure(f"did not scrape {down:.0f} targets")
        sent, sent_samples = own(
            url, "prometheus_remote_storage_bytes_total{.*}", "prometheus_remote_storage_samples_total{.*}"
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/n/1") as reply:
            length = len(reply.read())
        return SizeMeasurement(
            scraped=int(scraped),
            recorded=sum(by_record.values()),
            head=int(head),
            samples_per_second=load.samples_per_second / pace,
            memory=load.memory,
            heap=load.heap,
            file=load.file,
            block_bytes_per_sample=per_sample(folder / "data"),
            wal=sum(path.stat().st_size for path in (folder / "data" / "wal").rglob("*") if path.is_file()),
            body=length,
            by_record=by_record,
            cores=load.cores / pace,
            missed=skipped / evaluated,
            sent_bytes_per_sample=sent / sent_samples if sent_samples else None,
            record_bytes_per_sample=per_sample(folder / "records"),
        )


def _start_store(stack: ExitStack, folder: Path, program: Sequence[str]) -> list[dict[str, object]]:
    """Start a second Prometheus, and return the remote write configuration that sends recorded series to it."""
    (port,) = free_ports(1)
    (folder / "store.yml").write_text("{}")
    command = [
        *program,
        f"--config.file={folder}/store.yml",
        f"--storage.tsdb.path={folder}/records",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
    ]
    stack.callback(Child("store", command, os.environ, folder / "store.log").stop)
    keep = {"source_labels": ["__name__"], "regex": RECORDS_AND_ALERTS, "action": "keep"}
    return [{"url": f"http://127.0.0.1:{port}/api/v1/write", "write_relabel_configs": [keep]}]


class PrometheusLoad(NamedTuple):
    """Peak memory and mean rates of Prometheus in the second half of a measurement."""

    memory: int  # resident bytes
    file: int  # bytes of `memory` that are pages of files
    heap: int  # bytes in use of the Go heap
    samples_per_second: float
    cores: float


def _load(child: Child, url: str, seconds: float) -> PrometheusLoad:
    """Wait for `seconds` and return the load in the second half. Raises StackError if Prometheus fails."""
    pid = child.process.pid
    began, memory, heap, file = time.monotonic(), 0, 0, 0
    appended: list[tuple[float, float]] = []
    used: list[float] = []
    while (age := time.monotonic() - began) < seconds:
        time.sleep(min(1.0, seconds - age))
        child.check()
        if age < seconds / 2:
            continue
        resident = status(pid, "VmRSS")
        if resident > memory:
            memory, file = resident, status(pid, "RssFile")
        total, inuse = own(
            url, 'prometheus_tsdb_head_samples_appended_total{type="float"}', "go_memstats_heap_inuse_bytes"
        )
        appended.append((time.monotonic(), total))
        heap = max(heap, int(inuse))
        used.append(processor(pid))
    lasted = appended[-1][0] - appended[0][0]
    return PrometheusLoad(
        memory, file, heap, (appended[-1][1] - appended[0][1]) / lasted, (used[-1] - used[0]) / lasted
    )


# The comparison.


def compared(measured: SizeMeasurement, targets: int, seconds: float, pace: float) -> list[tuple[str, float, float]]:
    """Return name, prediction and measurement of each number that `flopwatch size` predicts."""
    cluster = Cluster(targets, GPUS, PORTS, GPUS, min(NODES_OF_A_RUN, targets), restarts=0.0)
    wanted = size(cluster, seconds * pace)
    return [
        ("series scraped", wanted.scraped_series, measured.scraped),
        ("series recorded", wanted.recorded_series, measured.recorded),
        ("series in the head", wanted.series, measured.head),
        ("samples a second", wanted.samples_per_second, measured.samples_per_second),
        ("memory, MiB", wanted.memory_bytes / 2**20, measured.memory / 2**20),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the comparison, and return 1 if a prediction is off by more than MAX_ERROR."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[64, 256, 512], metavar="N")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="duration of each measurement, half of it to warm up (default 12)"
    )
    parser.add_argument("--pace", type=float, default=1.0, help="divide all intervals by this factor (default 1)")
    parser.add_argument("--suite", help="Debian release of Prometheus (default: that of the demo)")
    parser.add_argument(
        "--store", action="store_true", help="also send records to a second Prometheus, and measure the cost"
    )
    given = parser.parse_args(arguments)
    off = False
    for targets in given.targets:
        found = measure(targets, 60 * given.minutes, given.pace, given.suite, given.store)
        print(
            f"\n{targets} targets, {given.minutes:g} min at a pace of {given.pace:g}"
            f"\n{'':20} {'predicted':>12} {'measured':>12} {'ratio':>7}"
        )
        for name, wanted, got in compared(found, targets, 60 * given.minutes, given.pace):
            wrong = name not in PARTS and abs(wanted / got - 1) > MAX_ERROR
            off |= wrong
            print(f"{name:20} {wanted:>12,.0f} {got:>12,.0f} {wanted / got:>7.2f}{' !' if wrong else ''}")
        print(
            f"{found.heap / 2**20:,.0f} MiB of heap in use at most, {found.file / 2**20:,.0f} MiB of files; "
            f"{found.cores:.2f} cores, {found.missed:.0%} of the evaluations skipped because they need more; "
            f"{found.wal / 2**20:,.0f} MiB of log; {found.body:,} bytes a scrape, uncompressed"
        )
        for text, figure in (
            ("of a block", found.block_bytes_per_sample),
            ("sent", found.sent_bytes_per_sample),
            ("of a block of records", found.record_bytes_per_sample),
        ):
            if figure is not None:
                print(f"{figure:.2f} bytes a sample {text}")
        sys.stdout.flush()
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
