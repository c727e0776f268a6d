"""A simulated host with collectors that read it in this process."""

from __future__ import annotations

from pathlib import Path

from flopwatch.catalogue import Sample
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.collectors.xid import Xid
from flopwatch.simulate.pynvml import Simulation
from simulator.host import SimulatedNode

START = 1_700_000_000.0


class Node(SimulatedNode):
    """A simulated node with the collectors of an exporter and a clock."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "simulated", uptime=lambda: 12.5)
        self.now = START
        self.create(self.now)
        self.collectors = (
            Nvml(
                Simulation(self.root),
                "node1",
                folder / "gpus.json",
                "simulated",
                lambda: self.now,
                sysfs=self.sysfs,
                proc=self.root / "proc",
                dev=self.root / "dev",
            ),
            Infiniband(self.sysfs, "node1", folder / "ports.json"),
            Xid(self.kmsg, folder / "gpus.json", folder / "xid.json", booted=lambda: START),
        )

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.tick(self.now)

    def samples(self) -> list[Sample]:
        return [sample for collector in self.collectors for sample in collector.read()]

    def values(self, *labels: str) -> dict[str, float]:
        """Return the values of one GPU or port, in base units; a third label is behind a colon."""
        return {
            ":".join((row.name, *values[2:])): value * row.scale
            for row, values, value in self.samples()
            if values[: len(labels)] == labels and row.type != "info"
        }
