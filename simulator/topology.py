"""Topology of a simulated cluster: nodes with 8 GPUs and 8 network ports, leaf switches, racks and NVLink domains.

The network is rail-optimised as in NVIDIA's reference design for H100
(https://docs.nvidia.com/dgx-superpod/reference-architecture-scalable-infrastructure-h100/latest/network-fabrics.html):
32 nodes form a scalable unit, and port N of each node is connected to leaf N of the unit. Without rails, all ports of
eight nodes are connected to one leaf. `domain_gpus=72` is an NVL72 rack: one NVLink domain across nodes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_NAMES = uuid.UUID("6b4f4a1e-4d3d-5a52-9d0b-3a5b6d1f7c20")  # namespace of uuid5, so that a GPU always has the same UUID


class PortPlace(NamedTuple):
    """A network port, given by its node and its rail. The rail is also the index of the GPU next to the port."""

    node: int
    rail: int


@dataclass(frozen=True)
class Topology:
    """Layout of a cluster. Nodes, GPUs and rails are counted from 0.

    Raises ValueError without nodes, or if an NVLink domain does not consist of whole nodes.
    """

    nodes: int
    gpus_per_node: int = 8
    nodes_per_rack: int = 4
    nodes_per_unit: int = 32
    nodes_per_leaf: int = 8  # without rails
    rails: bool = True
    domain_gpus: int = 8

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.domain_gpus % self.gpus_per_node:
            raise ValueError(f"{self.nodes} nodes, NVLink domains of {self.domain_gpus} GPUs: not a cluster")

    @staticmethod
    def host(node: int) -> str:
        """Return the host name of a node."""
        return f"node-{node:04d}"

    @staticmethod
    @cache
    def gpu(node: int, index: int) -> str:
        """Return the UUID of a GPU, always the same for a node and an index."""
        return f"GPU-{uuid.uuid5(_NAMES, f'{node}/{index}')}"

    @staticmethod
    def port(rail: int) -> str:
        """Return the name of a rail's port on its node, such as `mlx5_0:1`."""
        return f"mlx5_{rail}:1"

    def leaf(self, port: PortPlace) -> str:
        """Return the name of the leaf switch that a port is connected to."""
        if self.rails:
            return f"leaf-{port.node // self.nodes_per_unit}-{port.rail}"
        return f"leaf-{port.node // self.nodes_per_leaf}"

    def below(self, leaf: str) -> list[PortPlace]:
        """Return the ports that are connected to a leaf switch, or an empty list if there is no such switch."""
        ports = (PortPlace(node, rail) for node in range(self.nodes) for rail in range(self.gpus_per_node))
        return [port for port in ports if self.leaf(port) == leaf]

    def rack(self, node: int) -> str:
        """Return the name of a node's rack."""
        return f"rack-{node // self.nodes_per_rack}"

    def domain(self, node: int) -> str:
        """Return the name of a node's NVLink domain."""
        return f"nvl-{node * self.gpus_per_node // self.domain_gpus}"

    def csv(self) -> str:
        """Return the content of a file for `flopwatch exporter --topology`. A node has the leaf of its first port."""
        rows = [
            f"{self.host(node)},{self.rack(node)},{self.leaf(PortPlace(node, 0))},{self.domain(node)}"
            for node in range(self.nodes)
        ]
        return "\n".join(["host,rack,leaf,domain", *rows]) + "\n"
