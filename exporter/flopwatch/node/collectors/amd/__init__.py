"""AMD GPUs through the program `amd-smi` of ROCm, with the series of NVIDIA GPUs as far as it prints them.

A thread of the reader process runs it, because it takes seconds and hangs if the driver does. Reads return what it last
printed. GPUs have an inventory of their own: NVML's collector must not report them as missing.
"""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import AccessLost, Inventory
from flopwatch.node.collectors.amd.document import Entry, Throttling, Value, entries, identity, links, parse, values

EVERY, SELDOM = 15.0, 300.0  # seconds between two runs, and between two runs about what hardly changes
DEADLINE = 20.0  # seconds until a run is killed
FIRST = 4.5  # seconds that the first read waits
MAX_AGE = 60.0  # seconds for which the last values are served
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG in linux/prctl.h
OTHER_PYTHON = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME")  # amd-smi is a Python program


class Amd:
    """Collector of the GPUs that `amd_smi` lists. `inventory` is the file of all that it ever listed."""

    name = "amd"

    def __init__(self, amd_smi: str, host: str, inventory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._program, self._host, self._clock = amd_smi, host, clock
        self._inventory = Inventory(inventory, m.GPU_INFO)
        self._thread: threading.Thread | None = None
        self._began, self._read_at, self._static_at, self._problem = 0.0, 0.0, 0.0, ""
        self._samples: list[Sample] | None = None
        self._static: dict[int, Entry] = {}
        self._has_links = True
        self._prctl = ctypes.CDLL(None).prctl
        self._throttling: defaultdict[str, Throttling] = defaultdict(Throttling)

    def read(self) -> list[Sample]:
        """Return the samples of the last run, and start the next one if it is due. Raises AccessLost."""
        now = self._clock()
        first = self._thread is None
        if self._thread is None or (not self._thread.is_alive() and now >= self._began + EVERY):
            self._began, self._thread = now, threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        if first:
            self._thread.join(FIRST)
        if self._samples is not None and now <= self._read_at + MAX_AGE:
            return self._samples
        if self._problem or now > self._began + DEADLINE:
            parts = self._inventory.parts.values()
            unreadable = [(m.GPU_READABLE, (part["gpu"], part["uuid"]), 0) for part in parts]
            raise AccessLost(self._problem or "amd-smi does not end", [*self._inventory.info(), *unreadable])
        return []

    def _look(self) -> None:
        try:
            self._samples, self._read_at, self._problem = self._gpus(self._clock()), self._clock(), ""
        except (OSError, ValueError, LookupError, TypeError, AttributeError, subprocess.SubprocessError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _gpus(self, now: float) -> list[Sample]:
        seldom = not self._static or now >= self._static_at + SELDOM
        if seldom:
            self._static, self._static_at = {entry["gpu"]: entry for entry in entries(self._run("static"))}, now
        metrics = {entry["gpu"]: entry for entry in entries(self._run("metric"))}
        by_gpu = self._links() if seldom or self._has_links else {}
        self._has_links = bool(by_gpu)
        found: dict[str, dict[str, str]] = {}
        samples: list[Sample] = []
        for gpu, static in self._static.items():
            part = identity(static, self._host)
            labels = part["gpu"], part["uuid"]
            # Of a partitioned GPU, the first partition has the values.
            if (metric := metrics.get(gpu)) is None or part["uuid"] in found:
                continue
            found[part["uuid"]] = part
            throttling = self._throttling[part["uuid"]]
            throttling.advance(metric.get("throttle"), now)
            some = [*values(metric, static), *by_gpu.get(gpu, ())]
            some += [(m.GPU_CLOCK_EVENT_SECONDS_TOTAL, (why,), 1e9 * s) for why, s in throttling.seconds.items()]
            samples += [(row, (*labels, *extra), value) for row, extra, value in some]
        if not found:
            raise ValueError("amd-smi lists no GPU")
        self._inventory.update(found)
        parts = self._inventory.parts
        present = [(m.GPU_PRESENT, (part["gpu"], uuid), float(uuid in found)) for uuid, part in parts.items()]
        return [*self._inventory.info(), *present, *samples]

    def _links(self) -> dict[int, list[Value]]:
        try:
            return links(self._run("xgmi"))
        except (ValueError, TypeError, subprocess.SubprocessError):
            return {}  # not in this release, or in a virtual machine

    def _run(self, what: str) -> Any:
        environment = {name: value for name, value in os.environ.items() if name not in OTHER_PYTHON}
        done = subprocess.run(
            [self._program, what, "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE,
            env=environment,
            # It ends with this process, also while it hangs.
            preexec_fn=lambda: self._prctl(_SET_PDEATHSIG, signal.SIGKILL),
            check=False,
        )
        try:
            return parse(done.stdout)
        except ValueError as error:
            raise ValueError(f"amd-smi {what} ended with {done.returncode}, {error} {done.stderr[-200:]}") from None


def build(program: str, host: str, inventory: str) -> Amd:
    """Return the collector of this host's AMD GPUs. `program` is the path of amd-smi."""
    return Amd(program, host, Path(inventory))
