"""`flopwatch size` beside a real Prometheus with our rules: series, samples a second, memory, disk.

    python bench/size.py [--targets 64 256 512] [--minutes 12] [--pace 1] [--suite trixie]

The pages are those of a real exporter on a simulated node of eight H100 and nine ports, with eight ranks of a simulated
job that push through the real hook, and of a real ledger. They are served again for each node, under its name and its
GPUs', 64 nodes to a run, with the series that PyTorch's hook has on a GPU beside what the simulated job tells; a real
Prometheus scrapes each node as a target of its own, and evaluates the shipped rules.

Memory is the most that was resident (VmRSS, which Prometheus calls process_resident_memory_bytes) in the second half
of the time, compared with what is predicted for a head of this age. At a pace of 15 the scrape interval is a second,
and the two hours after which Prometheus writes a block are eight minutes: then the figure is that of days of
production, with compaction in it, and what is on disk is a block as there.

Ends with status 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from alerts import AlertSettings, rules_yaml
from bench.rules import GPUS, NODES_OF_A_RUN, PATIENCE, PORTS, Server, ask, configuration, processor
from bench.sizing import TORCH, Cluster, size
from demo.servers import find
from demo.stack import Child, fetch, free_ports
from flopwatch import catalogue as m
from flopwatch.catalogue.training import PHASES
from flopwatch.simulate.node import SimulatedNode

RUN, HOST = "run-of-template", "host-of-template"
RECORDS_AND_ALERTS = ".+:.+|ALERTS.*"  # names
MOST_OFF = 0.15
PARTS = ("series recorded",)  # of another figure
FIRST_WORDS = 60.0  # seconds within which exporter, ranks and ledger have to tell everything


# What is scraped.


@dataclass(frozen=True, slots=True)
class Source:
    """Where the pages that are served again come from."""

    exporter: str
    ledger: str


@contextmanager
def source(folder: Path) -> Iterator[Source]:
    """Run an exporter on a simulated node, eight ranks and a ledger until the block ends; they have told all there is.

    Raises StackError if one of them fails.
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
        found = Source(f"http://{exporter}/metrics", f"http://{ledger}/metrics")
        wanted = (
            "training_committed_steps",
            "gpu_utilization_ratio",
            "infiniband_info",
            "host_process_blocked_seconds",
        )
        deadline = time.monotonic() + FIRST_WORDS
        while True:
            for child in children:
                child.check()
            try:
                page = fetch(found.exporter).decode()
                if all(f"\n{name}{{" in page for name in wanted) and (
                    "\nrun_committed_steps{" in fetch(found.ledger).decode()
                ):
                    break
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise children[1].failure("did not tell all in time")
            time.sleep(0.2)
        yield found


def extended(page: str) -> str:
    """Return a page with the series that PyTorch's hook has beside those of the simulated job."""
    ranks = [str(rank) for rank in range(GPUS)]
    lines = []
    for row, series in TORCH.items():
        for rank in ranks:
            for which in range(series):
                phase = f',phase="{PHASES[which]}"' if row is m.TRAINING_PHASE_SECONDS_TOTAL else ""
                lines.append(f'{row}{{run="{RUN}",rank="{rank}"{phase}}} {time.time() - 1.7e9 + which:.3f}\n')
    return page + "".join(lines)


def pages(node: str, ledger: str, nodes: int) -> Callable[[str], bytes]:
    """Return a function from a path to the body served there, /n/17 or /ledger, from an exporter's and a ledger's."""
    own = re.compile(rf'^(?!#)[^\n{{]*{{run="{RUN}"(?!,rank=)[^\n]*\n', re.MULTILINE)  # a run's, that one rank tells
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
    accounts = "".join([*of_ledger, *("".join(of_run).replace(RUN, f"run-{run}") for run in range(runs))]).encode()

    def body(path: str) -> bytes:
        number = path.rpartition("/")[2]
        if number == "ledger":
            return accounts
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


def serve(one: Source, nodes: int, every: float, told: Connection) -> None:
    """Serve all nodes until the process is ended, as the exporter and the ledger are now, read anew every so often.

    The port is told once it can be asked.
    """

    def now() -> Callable[[str], bytes]:
        return pages(fetch(one.exporter).decode(), fetch(one.ledger).decode(), nodes)

    async def main() -> None:
        body = now()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Server(lambda path: body(path)), "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        async with server:
            while True:
                await asyncio.sleep(every)
                body = await loop.run_in_executor(None, now)

    asyncio.run(main())


# What it comes to.


@dataclass(frozen=True, slots=True)
class Measured:
    """What Prometheus had."""

    scraped: int  # series, with the five that it adds of each target
    recorded: int
    head: int
    samples_per_second: float  # at pace 1
    memory: int  # bytes resident, at most in the second half
    heap: int  # bytes of Go's heap in use, at most in the second half
    file: int  # bytes of `memory` that are pages of files
    block_bytes_per_sample: float | None  # of the newest block
    wal: int  # bytes
    body: int  # bytes of a scrape, uncompressed
    by_record: dict[str, int]
    cores: float  # seconds of processor a second, in the second half, at pace 1
    missed: float  # share of the rules' evaluations that were skipped, as the one before took too long
    sent_bytes_per_sample: float | None = None  # of records, by remote write
    record_bytes_per_sample: float | None = None  # of the newest block of a server that has records only


def status(pid: int, name: str) -> int:
    """Return a figure of /proc/PID/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def own(url: str, *names: str) -> list[float]:
    """Return figures that Prometheus tells of itself."""
    text = fetch(f"{url}/metrics", PATIENCE).decode()
    return [float(found[1]) if (found := re.search(rf"^{name} (\S+)$", text, re.MULTILINE)) else 0.0 for name in names]


def totals(url: str, name: str) -> float:
    """Return the sum of a family that Prometheus tells of itself."""
    text = fetch(f"{url}/metrics", PATIENCE).decode()
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def per_sample(data: Path) -> float | None:
    """Return the bytes that the newest block of a data folder has of each sample, its index and all."""
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
    say: Callable[[str], None] = print,
    one: Source | None = None,
) -> Measured:
    """Scrape so many nodes for this long, and return what it came to. Raises StackError.

    With `store` the records are also sent to a second Prometheus. `one` is a source that runs already.
    """
    settings = AlertSettings(pace=pace)
    interval = settings.scrape_interval / pace
    (web,) = free_ports(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-size-")))
        one = one or stack.enter_context(source(folder))
        here, there = multiprocessing.Pipe(duplex=False)
        server = multiprocessing.get_context("spawn").Process(
            daemon=True, target=serve, args=(one, targets, min(5.0, max(1.0, interval / 2)), there)
        )
        server.start()
        stack.callback(server.join)
        stack.callback(server.terminate)
        there.close()
        port = here.recv()  # EOFError if it ended
        (folder / "rules.yaml").write_text(rules_yaml(settings))
        written = configuration(settings, targets, port)
        program = [
            *find(say=say, suite=suite).prometheus,
            "--log.level=warn",
            f"--storage.tsdb.min-block-duration={7200 / pace:.0f}s",
            f"--storage.tsdb.max-block-duration={7200 / pace:.0f}s",
        ]
        if store:
            (second,) = free_ports(1)
            (folder / "store.yml").write_text("{}")
            receiver = Child(
                "store",
                [
                    *program,
                    f"--config.file={folder}/store.yml",
                    f"--storage.tsdb.path={folder}/records",
                    f"--web.listen-address=127.0.0.1:{second}",
                    "--web.enable-remote-write-receiver",
                ],
                os.environ,
                folder / "store.log",
            )
            stack.callback(receiver.stop)
            written["remote_write"] = [
                {
                    "url": f"http://127.0.0.1:{second}/api/v1/write",
                    "write_relabel_configs": [
                        {"source_labels": ["__name__"], "regex": RECORDS_AND_ALERTS, "action": "keep"}
                    ],
                }
            ]
        (folder / "prometheus.yml").write_text(json.dumps(written))
        child = Child(
            "prometheus",
            [
                *program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{web}",
            ],
            os.environ,
            folder / "log",
        )
        stack.callback(child.stop)
        pid, url = child.process.pid, f"http://127.0.0.1:{web}"
        began, memory, heap, file = time.monotonic(), 0, 0, 0
        appended: list[tuple[float, float]] = []
        used: list[float] = []
        while (age := time.monotonic() - began) < seconds:
            time.sleep(min(1.0, seconds - age))
            child.check()
            if age < seconds / 2:
                continue
            resident, inuse = status(pid, "VmRSS"), 0.0
            if resident > memory:
                memory, file = resident, status(pid, "RssFile")
            total, inuse = own(
                url, 'prometheus_tsdb_head_samples_appended_total{type="float"}', "go_memstats_heap_inuse_bytes"
            )
            appended.append((time.monotonic(), total))
            heap = max(heap, int(inuse))
            used.append(processor(pid))
        (head,) = own(url, "prometheus_tsdb_head_series")
        skipped, evaluated = (
            totals(url, f"prometheus_rule_group_iterations_{kind}") for kind in ("missed_total", "total")
        )
        by_record = {
            labels["__name__"]: int(count)
            for labels, count in ask(url, 'count by (__name__) ({__name__=~".+:.+|ALERTS.*"})')
        }
        [(_, scraped)] = ask(url, "sum(scrape_samples_post_metric_relabeling) + 5 * count(up)")
        [(_, down)] = ask(url, "count(up == 0) or vector(0)")
        if down:
            raise child.failure(f"did not scrape {down:.0f} targets")
        sent, sent_samples = own(
            url, "prometheus_remote_storage_bytes_total{.*}", "prometheus_remote_storage_samples_total{.*}"
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/n/1") as reply:
            length = len(reply.read())
        lasted = appended[-1][0] - appended[0][0]
        return Measured(
            scraped=int(scraped),
            recorded=sum(by_record.values()),
            head=int(head),
            samples_per_second=(appended[-1][1] - appended[0][1]) / lasted / pace,
            memory=memory,
            heap=heap,
            file=file,
            block_bytes_per_sample=per_sample(folder / "data"),
            wal=sum(path.stat().st_size for path in (folder / "data" / "wal").rglob("*") if path.is_file()),
            body=length,
            by_record=by_record,
            cores=(used[-1] - used[0]) / lasted / pace,
            missed=skipped / evaluated,
            sent_bytes_per_sample=sent / sent_samples if sent_samples else None,
            record_bytes_per_sample=per_sample(folder / "records"),
        )


# Beside what is predicted.


def compared(measured: Measured, targets: int, seconds: float, pace: float) -> list[tuple[str, float, float]]:
    """Return name, prediction and measurement of what `flopwatch size` tells."""
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
    """Measure, print, and say by the status whether the predictions hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[64, 256, 512], metavar="N")
    parser.add_argument("--minutes", type=float, default=12.0, help="of each, half of it to warm up (default 12)")
    parser.add_argument("--pace", type=float, default=1.0, help="times faster than in production (default 1)")
    parser.add_argument("--suite", help="the Debian release whose Prometheus is taken (default: as the demo's)")
    parser.add_argument("--store", action="store_true", help="send records to a second Prometheus, and what that costs")
    given = parser.parse_args(arguments)
    off = False
    for targets in given.targets:
        found = measure(targets, 60 * given.minutes, given.pace, given.suite, given.store)
        print(
            f"\n{targets} targets, {given.minutes:g} min at a pace of {given.pace:g}"
            f"\n{'':20} {'predicted':>12} {'measured':>12} {'ratio':>7}"
        )
        for name, wanted, got in compared(found, targets, 60 * given.minutes, given.pace):
            wrong = name not in PARTS and abs(wanted / got - 1) > MOST_OFF
            off |= wrong
            print(f"{name:20} {wanted:>12,.0f} {got:>12,.0f} {wanted / got:>7.2f}{' !' if wrong else ''}")
        print(
            f"{found.heap / 2**20:,.0f} MiB of heap in use at most, {found.file / 2**20:,.0f} MiB of files; "
            f"{found.cores:.2f} cores, {found.missed:.0%} of the evaluations skipped for want of more; "
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
