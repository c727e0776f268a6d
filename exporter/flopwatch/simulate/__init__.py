"""A GPU node that does not exist, for the demo and the tests: only the outside is simulated, never our own code."""

from flopwatch.simulate.node import SimulatedNode

__all__ = ["SimulatedNode"]
