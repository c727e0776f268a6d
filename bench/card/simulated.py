"""Simulated node in place of the hardware, whose seconds pass only in sleep()."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.card.machine import COPY, DEVICE_COPY, Gpu, Machine, Work
from flopwatch.node.scrape.reader import Spec
from flopwatch.simulate import h100
from flopwatch.simulate.folder import NodeFolder
from flopwatch.simulate.pynvml import ACTIVITIES, TENSOR_ACTIVITIES, Simulation
from simulator.host import SimulatedNode

SHARES = ACTIVITIES | TENSOR_ACTIVITIES
BUS_BITS = 5120
DRAM_RATE = 2e6 * h100.MEMORY_CLOCK * BUS_BITS / 8  # bytes a second, two transfers a cycle
RATES = {COPY: h100.PCIE_RATE, DEVICE_COPY: SHARES[10] * DRAM_RATE}  # units a second of full load


class Driver(Simulation):
    """Simulated driver with the calls that only this program makes."""

    def nvmlDeviceGetMemoryBusWidth(self, handle: object) -> int:
        """Return the bits of the memory bus."""
        return BUS_BITS


class SimulatedMachine(Machine):
    """GPUs of the simulated node in a folder. They are idle outside `work`."""

    def __init__(self, folder: Path, library: Any = None) -> None:
        self.node = SimulatedNode(folder)
        self.node.create()
        for gpu in range(h100.GPUS):
            self.node.load(gpu, 0.0)
        self._folder = NodeFolder(folder)
        self.now = float(self._folder.load("node.json")["time"])
        self.pass_time(1.0)
        simulation = Driver(folder)
        simulation.sleep = self.pass_time
        super().__init__(
            simulation if library is None else library,
            lambda: self.now,
            self.pass_time,
            folder / "proc",
            folder / "dev",
            folder / "sys",
            folder / "kmsg",
            folder,
            activity={metric: (0.95 * SHARES[metric], 1.05 * SHARES[metric]) for metric in (2, 5, 10)},
        )

    def pass_time(self, seconds: float) -> None:
        """Advance the node and its clock."""
        self.now += seconds
        self.node.tick(self.now)

    def owner(self) -> str:
        """Return the owner of the processes on the GPUs."""
        return f"slurm:{h100.SLURM_JOB}"

    def reader_spec(self, state: Path) -> Spec:
        """Return the factory of the simulated node's collector in a reader process."""
        spec = super().reader_spec(state)
        return replace(
            spec, factory="flopwatch.simulate.sources:nvml", arguments={**spec.arguments, "root": str(self.simulated)}
        )

    @contextlib.contextmanager
    def work(self, kind: str, gpu: Gpu) -> Iterator[Work]:
        """Keep a simulated GPU busy during a `with` block."""
        self.node.load(gpu.index, 1.0)
        self.pass_time(0.1)
        began, before = self.now, self._busy(gpu)
        work = Work(h100.pid(gpu.index), h100.MEMORY_BUSY)
        try:
            yield work
        finally:
            self.node.load(gpu.index, 0.0)
        work.seconds = self.now - began
        work.units = (self._busy(gpu) - before) * RATES.get(kind, 1e12)

    def _busy(self, gpu: Gpu) -> float:
        state: Mapping[str, float] = self._folder.load("node.json")["gpus"][gpu.index]
        return state["busy_seconds"]
