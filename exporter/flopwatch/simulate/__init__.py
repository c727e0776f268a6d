"""Simulated GPU node for demos and tests. It replaces drivers, sysfs and kernel log, but no code of the exporter."""

from flopwatch.simulate.node import SimulatedHost

__all__ = ["SimulatedHost"]
