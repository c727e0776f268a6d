"""The exporter compared with Prometheus' node_exporter, in one run: CPU per scrape, latency, memory.

    python bench/exporter.py [--scrapes 500] [--minutes 10] [--intervals-only]

InfiniBand alone: both read the same tree, nine ports copied from a captured H100 node (tests/captures/infiniband). The
busy counters of this tree increase before every scrape. Both are scraped in turn, as Prometheus does, over a kept
connection with gzip. node_exporter is Debian's package (demo/servers.py), with all its other collectors off. The files
that each side reads in one scrape are counted with inotify.

A whole node: GPUs of the simulated driver, nine ports, and eight ranks that push what the hook sends every five
seconds. The simulation of the node runs in this process, not in the exporter (bench/under_test.py).

A host in production is scraped every 15 seconds, with cold caches, and pays for what an exporter does between scrapes,
too. So the sides then run together for some minutes with one scrape per interval, while eight ranks push with the
hook's own threads, at the same moments as in production. The CPU time of an interval includes everything. Before that,
without scrapes and pushes, the voluntary context switches of a side's threads are counted: its wake-ups. The last two
columns are ratios to node_exporter, which reads nothing but InfiniBand and receives no pushes. The simulated driver is
Python in a reader process, where a host has a library in C. So one more process makes the driver's calls of each
scrape. Subtract its CPU from that of a node.

CPU is the time of all processes of a side, in nanoseconds from their clocks. Memory is the sum of their PSS
(smaps_rollup).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from bench.ranks import PUSH_SECONDS, RANKS, Rank, pushes, pushing
from bench.under_test import more_gpus
from demo.servers import ServersError, node_exporter

ROOT = Path(__file__).resolve().parent.parent
CAPTURE = ROOT / "tests" / "captures" / "infiniband" / "h100_node"
PORTS = ("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_bond_0")
BUSY = (
    "counters/port_xmit_data",
    "counters/port_rcv_data",
    "counters/port_xmit_packets",
    "counters/port_rcv_packets",
    "counters/unicast_xmit_packets",
    "counters/unicast_rcv_packets",
    "counters/port_xmit_wait",
    "hw_counters/rx_write_requests",
    "hw_counters/rx_read_requests",
    "hw_counters/out_of_sequence",
)
INTERVAL, QUIET_SECONDS = 15.0, 30.0  # between two scrapes in production, and in which wake-ups are counted
TICK = os.sysconf("SC_CLK_TCK")
ACCEPT = {  # what Prometheus sends
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}


# What is measured.


@dataclass
class Side:
    """One exporter or ledger under test: its process, its port, and the measurements of its scrapes."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    seconds: list[float] = field(default_factory=list)
    series: int = 0
    cpu: float = 0.0
    memory: int = 0
    connection: http.client.HTTPConnection | None = None

    def scrape(self, *, measured: bool = True) -> str:
        """Scrape once and return the page. Raises RuntimeError if the status is not 200."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        began = time.perf_counter()
        self.connection.request("GET", "/metrics", headers=ACCEPT)
        reply = self.connection.getresponse()
        body = reply.read()
        if measured:
            self.seconds.append(time.perf_counter() - began)
        if reply.status != 200:
            raise RuntimeError(f"{self.name} answers {reply.status}")
        return (gzip.decompress(body) if reply.headers["Content-Encoding"] == "gzip" else body).decode()

    def processes(self) -> list[int]:
        """Return the ids of the exporter's process and of its descendants."""
        found, unseen = [], [self.process.pid]
        while unseen:
            found.append(unseen.pop())
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{found[-1]}/task").iterdir():
                    unseen += map(int, (task / "children").read_text().split())
        return found

    def used(self) -> float:
        """Return the CPU seconds of all processes of the exporter, including ended ones."""
        total = 0.0
        for pid in self.processes():
            total += time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) returns: ticks would be 10 ms
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[13:15])) / TICK
        return total

    def wakeups(self) -> int:
        """Return how often the threads of the exporter's processes have waited so far."""
        total = 0
        for pid in self.processes():
            for status in Path(f"/proc/{pid}/task").glob("*/status"):
                line = next(line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt"))
                total += int(line.split()[1])
        return total

    def resident(self) -> int:
        """Return the memory of the exporter's processes in bytes. Shared pages are divided among their users (PSS)."""
        total = 0
        for pid in self.processes():
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return total * 1024

    def row(self, other: Side | None = None) -> str:
        """Return the row of the table. With `other`, the row ends with the ratio of the CPU times."""
        cuts = quantiles(self.seconds, n=100)
        numbers = (self.cpu / len(self.seconds) * 1e3, cuts[49] * 1e3, cuts[98] * 1e3, self.memory / 2**20)
        text = f"{self.name:<34} {self.series:>7} " + " ".join(
            f"{number:>9.2f} {unit}" for number, unit in zip(numbers, ("ms", "ms", "ms", "MiB"), strict=True)
        )
        if other is not None:
            text += f"   CPU {other.cpu / self.cpu:.2f} x less than {other.name}"
        return text


class Driver(Side):
    """The simulated driver alone, in a process that repeats the calls of one scrape."""

    def scrape(self, *, measured: bool = True) -> str:
        """Make the calls of one scrape."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return ""


def measure(sides: Sequence[Side], scrapes: int, before: Callable[[], None]) -> None:
    """Scrape the sides in turn, `scrapes` times each after 20 scrapes to warm up. `before` runs before each turn."""
    for turn in range(-20, scrapes):
        before()
        if turn == 0:
            for side in sides:
                side.seconds.clear()
                side.cpu = -side.used()
        for side in sides:
            side.scrape()
    for side in sides:
        side.cpu += side.used()
        side.series = sum(line[:1] not in ("#", "") for line in side.scrape(measured=False).splitlines())
        side.memory = side.resident()


class Reads:
    """Counter of the files of a tree that are read, with inotify (IN_ACCESS)."""

    def __init__(self, tree: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK)
        self._names: dict[int, Path] = {}
        for path in tree.rglob("*"):
            if path.is_file():
                self._names[self._libc.inotify_add_watch(self._file, os.fsencode(path), 0x1)] = path

    def seen(self) -> set[Path]:
        """Return the files read since the last call."""
        found = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._file, 1 << 16):
                for offset in range(0, len(data), 16):  # no names: each file has a watch of its own
                    found.add(self._names[int.from_bytes(data[offset : offset + 4], sys.byteorder)])
        return found

    def close(self) -> None:
        """Stop counting, because inotify slows the reading processes down."""
        os.close(self._file)


# InfiniBand alone.


def ports(tree: Path) -> Callable[[], None]:
    """Create a sysfs tree of nine InfiniBand ports, and return a function that increases their counters."""
    for name in PORTS:
        source = "mlx5_bond_0" if name == "mlx5_bond_0" else "mlx5_0"
        shutil.copytree(CAPTURE / source, tree / "class" / "infiniband" / name)
    files = [
        os.open(tree / "class" / "infiniband" / name / "ports" / "1" / file, os.O_WRONLY)
        for name in PORTS
        for file in BUSY
    ]
    count = 3_000_000_000

    def move() -> None:
        nonlocal count
        count += 1_234
        for file in files:
            os.pwrite(file, b"%d\n" % count, 0)
            os.ftruncate(file, 11)

    return move


@contextlib.contextmanager
def both(tree: Path, folder: Path) -> Iterator[tuple[Side, Side]]:
    """Run flopwatch's exporter and node_exporter, which read the same tree of InfiniBand ports."""
    port = free_port()
    # Go's own and the process's metrics off as well: nothing but InfiniBand.
    theirs = [
        node_exporter(),
        "--collector.disable-defaults",
        "--web.disable-exporter-metrics",
        "--collector.infiniband",
        f"--path.sysfs={tree}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (
        serving("flopwatch, InfiniBand alone", {"sources": ["infiniband"], "sysfs": str(tree)}, folder) as ours,
        running("node_exporter", theirs, port) as peer,
    ):
        yield ours, peer


def infiniband(scrapes: int, folder: Path) -> None:
    """Compare flopwatch with node_exporter on InfiniBand alone, and print their rows."""
    move = ports(tree := folder / "sys")
    with both(tree, folder) as (ours, peer):
        reads = Reads(tree)
        counted = {}
        for side in (ours, peer):
            side.scrape(measured=False)
            reads.seen()
            move()
            side.scrape(measured=False)
            counted[side.name] = reads.seen()
        reads.close()
        measure((ours, peer), scrapes, move)
        print(ours.row(peer))
        print(peer.row())
        common = len(counted[ours.name] & counted[peer.name])
        only = sorted({path.name for path in counted[peer.name] - counted[ours.name]})
        print(
            f"  files read in one scrape: {common} by both; {len(counted[ours.name]) - common} only by flopwatch; "
            f"{len(counted[peer.name]) - common} only by node_exporter ({', '.join(only)})"
        )


# A whole node.


def whole_node(gpus: int, scrapes: int, folder: Path) -> None:
    """Measure flopwatch on a simulated node with eight ranks, and print the row."""
    from simulator.host import SimulatedNode

    more_gpus(gpus)
    node = SimulatedNode(folder / "state" / "simulated")
    node.create()
    options = {"gpus": gpus, "otlp": free_port()}
    ranks = [Rank(options["otlp"], body) for body in pushes([node.uuid(gpu) for gpu in range(RANKS)])]
    with serving(f"flopwatch, {gpus} GPUs, 9 ports, {RANKS} ranks", options, folder) as side:
        pushed = ticked = 0.0

        def before() -> None:
            nonlocal pushed, ticked
            now = time.monotonic()
            if now - ticked >= 1:
                ticked = now
                node.tick(time.time())
            if now - pushed >= PUSH_SECONDS:
                pushed = now
                for rank in ranks:
                    rank.send(rank.body)

        measure([side], scrapes, before)
        print(side.row())
        text = side.scrape(measured=False)
        for name in ("gpu_present", "infiniband_port_present", "training_rank_info"):
            found = sum(line.startswith(f"{name}{{") for line in text.splitlines())
            if found != {"gpu_present": gpus, "infiniband_port_present": 9, "training_rank_info": RANKS}[name]:
                print(f"  {name}: {found} series")


# As in production.


def intervals(minutes: float, folder: Path) -> None:
    """Measure the CPU time that exporters take in 15 s with one scrape, and print it with their idle wake-ups."""
    from simulator.host import SimulatedNode

    tree = folder / "sys"
    move = ports(tree)
    more_gpus(8)
    with contextlib.ExitStack() as stack:
        sides = [*stack.enter_context(both(tree, folder))]
        nodes, hosts = list[SimulatedNode](), dict[str, list[Rank]]()
        ledger = f"127.0.0.1:{(port := free_port())}"
        command = ["-m", "flopwatch", "ledger", "serve", "--state", str(folder / "ledger"), "--listen", ledger]
        stack.enter_context(running("ledger", [sys.executable, *command], port))
        for name, more in (
            (f"flopwatch, 8 GPUs, 9 ports, {RANKS} ranks", {}),
            ("the same with a ledger", {"ledger": f"http://{ledger}"}),
        ):
            place = folder / name
            nodes.append(SimulatedNode(place / "state" / "simulated"))
            nodes[-1].create()
            otlp = free_port()
            hosts[name] = [Rank(otlp, body) for body in pushes([nodes[-1].uuid(gpu) for gpu in range(RANKS)])]
            sides.append(stack.enter_context(serving(name, {"gpus": 8, "otlp": otlp, **more}, place)))
        for side in sides * 3:
            side.scrape(measured=False)
        sides.append(stack.enter_context(driver(nodes[0].root)))
        awake = [side.wakeups() for side in sides]
        time.sleep(QUIET_SECONDS)
        awake = [side.wakeups() - before for side, before in zip(sides, awake, strict=True)]
        for name, ranks in hosts.items():
            stack.enter_context(pushing(ranks, name))
        time.sleep(PUSH_SECONDS)
        began, used = time.monotonic(), [side.used() for side in sides]
        count = round(minutes * 60 / INTERVAL)
        for turn in range(count * len(sides)):  # each side is scraped in turn, at its own time of the interval
            time.sleep(max(0.0, began + turn * INTERVAL / len(sides) - time.monotonic()))
            move()
            for node in nodes:
                node.tick(time.time())
            sides[turn % len(sides)].scrape(measured=False)
        time.sleep(max(0.0, began + count * INTERVAL - time.monotonic()))
        cpu = [(side.used() - before) / count * 1e3 for side, before in zip(sides, used, strict=True)]
        memory = [side.resident() / 2**20 for side in sides]
        print(
            f"{f'one scrape in {INTERVAL:.0f} s, all processes':<34} {'CPU':>12} {'idle wake-ups':>14} {'PSS':>13}",
            end="",
        )
        print(f" {'CPU ratio':>10} {'PSS ratio':>10}")
        for side, spent, wakeups, used_bytes in zip(sides, cpu, awake, memory, strict=True):
            print(
                f"{side.name:<34} {spent:>9.2f} ms {wakeups / QUIET_SECONDS:>8.2f} per s {used_bytes:>9.2f} MiB", end=""
            )
            print(f" {spent / cpu[1]:>10.2f} {used_bytes / memory[1]:>10.2f}")


# Processes.


def free_port() -> int:
    """Return a port that is free now on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(name: str, command: Sequence[str], port: int) -> Iterator[Side]:
    """Run an exporter until the block ends. Yields once it answers on `port`. Raises RuntimeError if it does not."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(name, process, port)
            yield Side(name, process, port)
        except Exception as error:
            log.seek(0)
            error.args = (*error.args, log.read().decode(errors="replace")[-2000:])
            raise
        finally:
            process.terminate()
            process.wait(20)


def _wait_for(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"{name} does not answer on port {port}")


@contextlib.contextmanager
def serving(name: str, options: Mapping[str, object], folder: Path) -> Iterator[Side]:
    """Run flopwatch's exporter until the block ends, with these options of bench/under_test.py."""
    port = free_port()
    chosen = {"state": str(folder / "state"), "port": port, "otlp": free_port(), **options}
    command = [sys.executable, str(ROOT / "bench" / "under_test.py"), json.dumps(chosen)]
    with running(name, command, port) as side:
        yield side


@contextlib.contextmanager
def driver(root: Path) -> Iterator[Driver]:
    """Run the driver of the simulated node in the folder `root` alone, until the block ends."""
    command = [sys.executable, str(ROOT / "bench" / "under_test.py"), json.dumps({"driver": str(root)})]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield Driver("simulated driver alone", process, 0)
        process.terminate()


def main() -> int:
    """Measure and print the table. Return 1 if node_exporter cannot be found or fetched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=500, help="of each side (default 500)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of one scrape in 15 s (default 10)")
    parser.add_argument("--intervals-only", action="store_true", help="measure only the intervals of 15 s")
    options = parser.parse_args()
    runs: tuple[Callable[[Path], None], ...] = (
        lambda folder: infiniband(options.scrapes, folder),
        lambda folder: whole_node(8, options.scrapes, folder),
        lambda folder: whole_node(16, options.scrapes, folder),
        lambda folder: intervals(options.minutes, folder),
    )
    try:
        if not options.intervals_only:
            print(f"{'':<34} {'series':>7} {'CPU/scrape':>12} {'p50':>12} {'p99':>12} {'PSS':>13}")
        for run in runs[-1:] if options.intervals_only else runs:
            with tempfile.TemporaryDirectory() as name:
                run(Path(name))
    except ServersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
