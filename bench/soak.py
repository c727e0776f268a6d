"""Soak test of the exporter: fails if its memory or open files grow under load.

    python bench/soak.py [--seconds 3600]

An exporter with an embedded ledger runs on a simulated node of eight GPUs and nine ports. Eight ranks of a simulated
job push with the real hook. The exporter is scraped once per second, and the memory and open files of all its processes
are summed. The first quarter of the time, in which caches fill, is not used. A line is fitted to the rest of each sum,
and its slope is printed with its standard error. The error is that of the means of twelve blocks, because neighbouring
seconds are correlated. The slope of the anonymous memory of each process is printed, too.

Before that, CROWD scrapers run at once for some seconds, as the highest load. The interpreter keeps the memory of its
busiest moment. Without this load, rare busy moments would raise the memory during the hour without a leak.

The exit status is 1 if a slope is significant (SIGNIFICANT standard errors) and its rise exceeds TOLERATED, if a
process was replaced, or if a scrape failed. PSS also rises when an unrelated process ends that shared a library. So
memory counts as growing only if anonymous memory grows, too, which is never shared.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from bench.exporter import Side, free_port, running
from bench.ranks import RANKS

WARM_UP = 0.25
CROWD, CROWD_SECONDS = 16, 20.0
BLOCKS = 12
SIGNIFICANT = 4.0
PSS, OWN, FILES = "MiB of PSS", "MiB of anonymous memory", "open files"
TOLERATED = {PSS: 1.0, OWN: 1.0, FILES: 4.0}  # rise over the measured time


class Slope(NamedTuple):
    """Slope of a fitted line and its standard error per hour, and the rise over the fitted time."""

    per_hour: float
    error: float
    rise: float

    def significant(self, tolerated: float) -> bool:
        """Return whether the rise exceeds `tolerated` and the slope exceeds SIGNIFICANT standard errors."""
        return self.rise > tolerated and self.per_hour > SIGNIFICANT * self.error


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the slope of the least-squares line through the means of BLOCKS blocks of `values` at `seconds`."""
    size = len(values) / BLOCKS
    cuts = [round(block * size) for block in range(BLOCKS + 1)]
    blocks = [slice(start, stop) for start, stop in pairwise(cuts)]
    x, y = [fmean(seconds[block]) for block in blocks], [fmean(values[block]) for block in blocks]
    middle, mean = fmean(x), fmean(y)
    spread = math.fsum((at - middle) ** 2 for at in x)
    per_second = math.fsum((at - middle) * (value - mean) for at, value in zip(x, y, strict=True)) / spread
    off = math.fsum((value - mean - per_second * (at - middle)) ** 2 for at, value in zip(x, y, strict=True))
    error = math.sqrt(off / (BLOCKS - 2) / spread)
    return Slope(per_second * 3600, error * 3600, per_second * (seconds[-1] - seconds[0]))


def soak(seconds: int, folder: Path) -> int:
    """Run the exporter and the job under load, print the slopes, and return the exit status."""
    port, otlp = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "flopwatch",
        "exporter",
        "--simulate",
        "h100x8",
        "--state",
        str(folder / "state"),
        "--listen",
        f"127.0.0.1:{port}",
        "--otlp-listen",
        f"127.0.0.1:{otlp}",
        "--ledger",
        "embedded",
    ]
    job = [
        sys.executable,
        "-m",
        "simulator.job",
        "--ranks",
        str(RANKS),
        "--out",
        str(folder / "job"),
        "--step-seconds",
        "0.5",
    ]
    with running("flopwatch", command, port) as side, (folder / "job.log").open("wb") as log:
        training = subprocess.Popen(
            job, stdout=log, stderr=log, env=dict(os.environ, FLOPWATCH_ENDPOINT=f"http://127.0.0.1:{otlp}")
        )
        try:
            _wait_for_ranks(side, training)
            _crowd(port)
            side.connection = None  # the server has closed it, because it was idle
            return _measure(side, seconds)
        finally:
            training.terminate()
            training.wait(30)


def _wait_for_ranks(side: Side, training: subprocess.Popen[bytes]) -> None:
    for _ in range(120):
        time.sleep(1)
        if side.scrape(measured=False).count("\ntraining_rank_info{") == RANKS:
            return
        if training.poll() is not None:
            break
    raise RuntimeError(f"the job does not push with {RANKS} ranks")


def _crowd(port: int) -> None:
    """Scrape the exporter from CROWD threads at the same time, for CROWD_SECONDS."""
    end = time.monotonic() + CROWD_SECONDS

    def scrape() -> None:
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply,
            ):
                reply.read()

    crowd = [threading.Thread(target=scrape) for _ in range(CROWD)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()


def _measure(side: Side, seconds: int) -> int:
    times: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in TOLERATED}
    own: dict[int, list[float]] = {}  # by process
    before, used, failed = side.processes(), side.used(), 0
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        try:
            body = side.scrape()
        except Exception as error:
            failed += 1
            side.connection = None
            print(f"  after {now:.0f} s: {type(error).__name__}: {error}", flush=True)
        times.append(now)
        held = {pid: _held(pid) for pid in side.processes()}
        for name, numbers in found.items():
            numbers.append(sum(one[name] for one in held.values()))
        for pid, one in held.items():
            own.setdefault(pid, []).append(one[OWN])
        time.sleep(max(0.0, began + len(times) - time.monotonic()))
    used = side.used() - used
    latency = sorted(side.seconds)
    print(
        f"{len(times)} scrapes of {body.count(chr(10))} lines, {failed} failed; p50 {_cut(latency, 0.5):.1f} ms, "
        f"p99 {_cut(latency, 0.99):.1f} ms; {used / len(times) * 1e3:.1f} ms of CPU per second, "
        "the simulation of the node included"
    )
    status = int(failed > 0)
    if replaced := set(before) ^ set(side.processes()):
        print(f"processes came or went: {sorted(replaced)}")
        status = 1
    warm = int(len(times) * WARM_UP)
    lines = {name: slope(times[warm:], values[warm:]) for name, values in found.items()}
    for name, line in lines.items():
        print(
            f"{len(before)} processes: {fmean(found[name][warm:]):6.1f} {name}, slope {line.per_hour:+.2f} "
            f"± {line.error:.2f} an hour"
        )
    for pid in before if not replaced else ():
        line = slope(times[warm:], own[pid][warm:])
        print(f"  {fmean(own[pid][warm:]):6.1f} {OWN}, slope {line.per_hour:+.2f} ± {line.error:.2f}: {_role(pid)}")
    grows = {name for name, line in lines.items() if line.significant(TOLERATED[name])}
    if {PSS, OWN} <= grows or FILES in grows:
        print(f"it grows: {', '.join(sorted(grows))}")
        status = 1
    return status


def _held(pid: int) -> dict[str, float]:
    """Return the memory in MiB and the number of open files of a process."""
    kilobytes = {"Pss": 0, "Anonymous": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if (key := line.partition(":")[0]) in kilobytes:
            kilobytes[key] += int(line.split()[1])
    return {PSS: kilobytes["Pss"] / 1024, OWN: kilobytes["Anonymous"] / 1024, FILES: len(os.listdir(f"/proc/{pid}/fd"))}


def _role(pid: int) -> str:
    """Return the module of the collector of a reader process, else "exporter"."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word for word in words if word.startswith("flopwatch.node.collectors.")), "exporter")


def _cut(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))] * 1e3


def main() -> int:
    """Parse the flags and run the soak test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600)
    options = parser.parse_args()
    if options.seconds < 2 * BLOCKS:
        parser.error(f"--seconds {options.seconds}: a line needs at least {2 * BLOCKS} s")
    print(f"{options.seconds} s: 8 GPUs, 9 ports, {RANKS} ranks, a scrape a second", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return soak(options.seconds, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
