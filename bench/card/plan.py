"""Sections in the order of their worth, with their share of the time."""

from __future__ import annotations

from dataclasses import dataclass

ALL, EACH, ONE, TORCH = "all", "each", "one", "torch"  # GPUs of a section: all at once, each alone, the chosen one


@dataclass(frozen=True, slots=True)
class Section:
    """Section: its name, `module:function`, its GPUs, the seconds it measures and the seconds until it is ended."""

    name: str
    function: str
    gpus: str
    seconds: float
    limit: float

    @property
    def needs_torch(self) -> bool:
        """Return whether the section trains on the chosen GPU."""
        return self.gpus == TORCH


# Seconds of `make card` as a whole: a section measures its share of --seconds.
TOTAL = 600.0
SECTIONS: tuple[Section, ...] = (
    Section("layout", "bench.card.collect:layout", EACH, 0, 20),
    Section("fields", "bench.card.fields:section", EACH, 0, 30),
    Section("batch", "bench.card.fields:batch", EACH, 0, 30),
    Section("collect", "bench.card.collect:section", ALL, 10, 60),
    Section("smi", "bench.card.smi:section", EACH, 10, 90),
    Section("gpm", "bench.card.activity:section", ONE, 24, 90),
    Section("pcie", "bench.card.activity:pcie", ONE, 6, 60),
    Section("events", "bench.card.collect:events", EACH, 0, 20),
    Section("process", "bench.card.activity:process", ONE, 0, 60),
    Section("release", "bench.card.collect:release", ALL, 45, 150),
    Section("capture", "bench.card.capture:section", ALL, 30, 90),
    Section("clock", "bench.card.device:clock", TORCH, 20, 80),
    Section("pool", "bench.card.waits:pool", TORCH, 25, 90),
    Section("wait", "bench.card.waits:section", TORCH, 15, 80),
    Section("ranks", "bench.card.ranks:section", TORCH, 10, 80),
    Section("graph", "bench.card.graphs:section", TORCH, 20, 120),
    Section("identity", "bench.card.identity:section", TORCH, 20, 90),
    Section("flops", "bench.card.compute:flops", TORCH, 10, 60),
    Section("peak", "bench.card.compute:peak", TORCH, 15, 60),
    Section("stall", "bench.card.compute:stall", TORCH, 10, 60),
    Section("memory", "bench.card.compute:memory", TORCH, 5, 60),
    Section("trainers", "bench.card.trainers:section", TORCH, 20, 120),
    Section("overhead", "bench.card.device:overhead", TORCH, 60, 150),
    Section("ncu", "bench.card.activity:ncu", ONE, 0, 80),
    Section("gaps", "bench.card.activity:gaps", ONE, 60, 90),
    Section("nccl", "bench.card.nccl:section", TORCH, 0, 480),
)
BY_NAME = {section.name: section for section in SECTIONS}
