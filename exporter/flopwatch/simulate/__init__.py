"""Simulated GPU node for the demo and the tests: drivers, sysfs and kernel log, but none of flopwatch's own code."""

from flopwatch.simulate.node import SimulatedNode

__all__ = ["SimulatedNode"]
