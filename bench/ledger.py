"""Load test of the ledger with the records of 16,384 nodes: latency, CPU, and time to catch up after an outage.

    python bench/ledger.py [--nodes 16384] [--seconds 45]

Every node of a simulated cluster sends a record of 8 ranks every 15 s at a random phase, as an exporter does: with a
token, on a connection of its own, which it keeps. The record has the waits of each rank in its tensor, pipeline and
data parallel groups. The ledger answers with 200 once the record is on disk. Meanwhile the ledger is scraped every 3 s.
The ledger is `flopwatch ledger` as shipped, on one core. The nodes run on the other cores. They first belong to 64
runs, then to one run, which has the most to write at a time.

Then the ledger is killed and started again. The times of the records are ten minutes later than before. During an
outage, a node keeps the newest record of a run, so each node has one to deliver. They are sent 64 at a time, as fast as
they are answered. This is faster than exporters, which wait up to 90 s. Then the ledger is scraped, and its totals must
match the records.

CPU is user and system time of the ledger's process, from /proc. p99 is the time from a request to its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from bench.exporter import Side, free_port, running
from bench.rules import many_files
from flopwatch.catalogue.ranks import ranks_text

INTERVAL = 15.0  # seconds between two records of a node
SCRAPED = 3.0  # seconds between two scrapes: AlertSettings.ledger_interval
OUTAGE = 600.0
AT_ONCE = 64
AGE = 3600.0  # of the processes when it begins
STEP = 10.0
TOKEN = "s3cret"


@cache
def groups(rank: int, ranks: int) -> list[tuple[str, str]]:
    """Return kind and ranks of a rank's groups, of 8 stages with 8 tensor-parallel ranks each."""
    first, stage = rank // 8 * 8, rank // 8 % 8
    pairs = [(rank - 8, rank)] * (stage > 0) + [(rank, rank + 8)] * (stage < 7 and rank + 8 < ranks)
    return [("tp", f"{first}-{first + 7}"), *(("pp", f"{a},{b}") for a, b in pairs), ("dp", replicas(rank % 64, ranks))]


@cache
def replicas(first: int, ranks: int) -> str:
    """Return the ranks that have the place of rank `first` in all replicas of 64 ranks."""
    return ranks_text(range(first, ranks, 64)) or ""


def record(nodes: int, node: int, runs: int, started: float, t: float) -> bytes:
    """Return the HTTP request with the record of a node and its 8 ranks at Unix time `t`."""
    age, first, steps = t - started, 8 * (node // runs), int((t - started - 30) // STEP)
    ranks = 8 * ((nodes - node % runs - 1) // runs + 1)
    waits = []
    for rank in range(first, first + 8):
        own = groups(rank, ranks)
        of_groups = [[*group, round(age * 0.06 / len(own), 3)] for group in own]
        numbers = [steps, age - 40, round(age * 0.06, 3), steps * 2048]
        waits.append([rank, str(rank // 8 % 8), started, *numbers, of_groups])
    body = json.dumps(
        [
            {
                "t": t,
                "tenant": "bench",
                "run": f"run-{node % runs}",
                "attempt": "slurm-1234.0-0-host-4711-123456-0",
                "source": f"node-{node}",
                "event": "snapshot",
                "rank": first,
                "gpus": 8,
                "started": started,
                "step": steps,
                "committed_step": steps // 50 * 50,
                "activity_seconds": {"startup": 30.0, "step": age - 40, "data_stall": 10.0},
                "open_step_seconds": (age - 30) % STEP,
                "model_flops": age * 3e15,
                "peak_flops": 8 * 989.4e12,
                "work": {"tokens": age * 1e5, "steps": 8 * steps, "step_seconds": 8 * (age - 30), "model_flops": age},
                "waits": waits,
                "ranks": f"{first}-{first + 7}",
                "step_p99": STEP,
                "pid": True,
                "evidence": [
                    {"kind": "throttle", "t": started + 60, "count": 3, "gpu": "GPU-0", "detail": "sw_thermal"}
                ],
            }
        ]
    ).encode()
    return (
        f"POST /v1/snapshots HTTP/1.1\r\nHost: ledger\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Connections:
    """Kept connections of nodes to the ledger at `port`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._kept: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def deliver(self, node: int, request: bytes) -> float:
        """Send a node's request, and return the seconds until the answer. The first one opens a connection.

        Raises RuntimeError if the status is not 200.
        """
        began = time.perf_counter()
        if node not in self._kept:
            self._kept[node] = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._kept[node]
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
        if b" 200 " not in head[:20] or length is None:
            raise RuntimeError(f"the ledger answers {head!r}")
        await reader.readexactly(int(length[1]))
        return time.perf_counter() - began

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._kept.values():
            writer.close()


async def scrapes(side: Side) -> None:
    """Scrape a ledger every SCRAPED seconds."""
    while True:
        await asyncio.gather(asyncio.to_thread(side.scrape), asyncio.sleep(SCRAPED))


async def steady(
    side: Side, connections: Connections, nodes: int, runs: int, started: float, shift: float, seconds: float
) -> list[float]:
    """Send a record of each node every INTERVAL seconds, for `seconds`. Return the latency of each request.

    `shift` is added to the time of the records. The ledger is scraped, too. Raises RuntimeError if it leaves a record
    unanswered.
    """
    scraping = asyncio.create_task(scrapes(side))
    taken: list[float] = []
    waiting: set[asyncio.Task[None]] = set()  # only those, since a collection of all would hold up this process

    async def send(node: int, request: bytes) -> None:
        taken.append(await connections.deliver(node, request))

    begin = time.monotonic()
    phases = sorted((random.random() * INTERVAL, node) for node in range(nodes))
    turns = int(seconds // INTERVAL)
    for turn in range(turns):
        for phase, node in phases:
            await asyncio.sleep(max(0.0, begin + turn * INTERVAL + phase - time.monotonic()))
            task = asyncio.create_task(send(node, record(nodes, node, runs, started, time.time() + shift)))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
    await asyncio.gather(*waiting)
    scraping.cancel()
    if len(taken) < turns * nodes:
        raise RuntimeError(f"the ledger answered {len(taken)} of {turns * nodes} records")
    return taken


async def at_once(
    connections: Connections, nodes: int, runs: int, started: float, t: float
) -> tuple[float, list[float]]:
    """Send a record of each node, AT_ONCE at a time, as fast as they are answered.

    Return the total seconds and the latency of each request.
    """
    waiting = [(node, record(nodes, node, runs, started, t + random.random())) for node in range(nodes)]
    random.shuffle(waiting)
    taken: list[float] = []

    async def work() -> None:
        while waiting:
            taken.append(await connections.deliver(*waiting.pop()))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return time.perf_counter() - began, taken


@contextlib.contextmanager
def ledger(folder: Path) -> Iterator[Side]:
    """Run a ledger on one core until the block ends. This process uses the other cores."""
    port = free_port()
    (folder / "token").write_text(TOKEN)
    command = [
        sys.executable,
        "-m",
        "flopwatch",
        "ledger",
        "--listen",
        f"127.0.0.1:{port}",
        "--state",
        str(folder / "state"),
        "--token-file",
        str(folder / "token"),
        "--new-for",
        "0.001",
    ]
    with running("flopwatch ledger", command, port) as side:
        cores = os.sched_getaffinity(0)
        for task in Path(f"/proc/{side.process.pid}/task").iterdir():  # threads started later inherit it
            os.sched_setaffinity(int(task.name), {max(cores)})
        os.sched_setaffinity(0, cores - {max(cores)} or cores)
        try:
            yield side
        finally:
            os.sched_setaffinity(0, cores)


async def measure(nodes: int, runs: int, seconds: float, folder: Path) -> None:
    """Measure a ledger with the records of `nodes` nodes in `runs` runs, and print the rows of the table.

    Raises RuntimeError if the totals of the ledger do not match the records.
    """
    now = time.time()
    started, shift = now - AGE, -OUTAGE - seconds - 120
    with ledger(folder) as side, contextlib.closing(Connections(side.port)) as connections:
        await at_once(connections, nodes, runs, started, now + shift - 60)  # the first record of each node
        # A collection of the objects of all nodes would hold up this process, and count as latency of the ledger.
        gc.collect()
        gc.freeze()
        used = side.used()
        taken = await steady(side, connections, nodes, runs, started, shift, seconds)
        used = side.used() - used
        row(f"{nodes} nodes in {runs} run{'s' if runs > 1 else ''}, every {INTERVAL:g} s", taken, used, seconds, side)
        side.process.kill()
        side.process.wait()
    with ledger(folder) as side, contextlib.closing(Connections(side.port)) as connections:
        used = side.used()
        total, taken = await at_once(connections, nodes, runs, started, now)
        row("  catching up after ten minutes", taken, side.used() - used, total, side)
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{side.port}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        booked = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("run_seconds_total{")]
        served = sum(line.startswith("run_state{") and line.endswith(" 1.0") for line in text.splitlines())
        wall = sum(booked) / runs
        print(
            f"  a scrape of {len(text.splitlines())} lines {1e3 * (time.perf_counter() - began):.0f} ms; "
            f"{served} runs, {wall:.0f} s booked of {AGE:.0f}"
        )
        if served != runs or abs(wall - AGE) > 2 * STEP:
            raise RuntimeError("the ledger serves other totals than it was sent")


def row(name: str, taken: Sequence[float], used: float, seconds: float, side: Side) -> None:
    """Print a row of the table, from the latencies `taken` and the CPU seconds `used` within `seconds`."""
    cuts = quantiles(taken, n=100)
    print(
        f"{name:<36} {len(taken):>7} {len(taken) / seconds:>8.0f}/s "
        f"{cuts[49] * 1e3:>9.2f} ms {cuts[98] * 1e3:>9.2f} ms "
        f"{used / len(taken) * 1e3:>9.2f} ms {used / seconds:>7.0%} {seconds:>7.1f} s "
        f"{side.resident() / 2**20:>6.0f} MiB"
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16384, help="number of nodes that report (default 16384)")
    parser.add_argument("--seconds", type=float, default=45, help="seconds of reports to measure (default 45)")
    options = parser.parse_args()
    print(
        f"{'':<36} {'reports':>7} {'rate':>10} {'p50':>12} {'p99':>12} {'CPU/report':>12} {'core':>7} {'time':>9} "
        f"{'PSS':>10}"
    )
    for runs in (64, 1):
        with tempfile.TemporaryDirectory() as name, many_files():
            asyncio.run(measure(options.nodes, runs, max(INTERVAL, options.seconds), Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
