"""Role and rail of each RDMA port, from the PCI places of ports and GPUs.

Rail r is the r-th compute port, from 0, in the order of the nearest GPUs' module ids. Missing ports are counted too, so
that the others keep their rails. Roles follow NVSentinel's NIC health monitor (https://github.com/NVIDIA/NVSentinel).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flopwatch.node.collectors.infiniband.pci import LEVELS, PciPlace, affinity

NEAR = LEVELS[:2]  # one or several switches: no traffic through the processor


class Gpu(NamedTuple):
    """GPU with its index, uuid and PCI place."""

    gpu: str
    uuid: str
    place: PciPlace


class RailPort(NamedTuple):
    """RDMA port and the PCI place of its adapter. `default_route`: the host's default route uses it."""

    device: str
    port: str
    place: PciPlace | None
    link_layer: str
    hca_type: str
    default_route: bool


class Duty(NamedTuple):
    """Role of a port (compute, storage, management, or empty if unknown), and the rail number of a compute port."""

    role: str
    rail: str


def module_order(gpus: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Sort the info labels of GPUs by module id, and after these GPUs without module id by index."""
    return sorted(gpus, key=lambda gpu: (_number(gpu.get("module_id", "")), _number(gpu["gpu"]), gpu["uuid"]))


def _number(text: str) -> float:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else math.inf


def duties(ports: Sequence[RailPort], gpus: Sequence[Gpu]) -> dict[RailPort, Duty]:
    """Return the role and rail of each port. `gpus` must be sorted as by `module_order`."""
    nearest = {port: _nearest(port, gpus) for port in ports}
    roles = {port: _role(port, nearest[port], gpus) for port in ports}
    for port in _strangers([port for port in ports if roles[port] == "compute"], nearest):
        roles[port] = "storage"
    compute = [(near, port) for port in ports if roles[port] == "compute" and (near := nearest[port]) is not None]
    compute.sort(key=lambda entry: (entry[0][1], entry[1].place, _number(entry[1].port), entry[1].device))
    rails = {port: str(rail) for rail, (_, port) in enumerate(compute)}
    return {port: Duty(roles[port], rails.get(port, "")) for port in ports}


def affinities(ports: Sequence[RailPort], gpus: Sequence[Gpu]) -> list[tuple[str, str, str, str, str]]:
    """Return (device, port, GPU index, uuid, PCI level such as PIX) of the ports nearest to each GPU."""
    found = []
    for gpu in gpus:
        levels = [(affinity(port.place, gpu.place), port) for port in ports if port.place is not None]
        best = min((LEVELS.index(level) for level, _ in levels), default=0)
        found += [(port.device, port.port, gpu.gpu, gpu.uuid, level) for level, port in levels if level == LEVELS[best]]
    return found


def _nearest(port: RailPort, gpus: Sequence[Gpu]) -> tuple[str, int] | None:
    """Return the PCI level and the index in `gpus` of the GPU nearest to a port, or None without GPU or place."""
    if port.place is None or not gpus:
        return None
    level, index = min((LEVELS.index(affinity(port.place, gpu.place)), index) for index, gpu in enumerate(gpus))
    return LEVELS[level], index


def _role(port: RailPort, nearest: tuple[str, int] | None, gpus: Sequence[Gpu]) -> str:
    if port.default_route:
        return "management"
    if port.link_layer == "Unspecified":  # EFA
        return "compute"
    if nearest is None:
        return ""
    assert port.place is not None
    if nearest[0] in NEAR or (port.link_layer == "InfiniBand" and nearest[0] != "SYS"):
        return "compute"
    if nearest[0] == "SYS" and port.place.numa >= 0 and any(gpu.place.numa >= 0 for gpu in gpus):
        return "management"  # on a socket without GPUs
    return "compute" if port.link_layer == "InfiniBand" else "storage"


def _strangers(compute: Sequence[RailPort], nearest: Mapping[RailPort, tuple[str, int] | None]) -> list[RailPort]:
    """Return compute ports of an unusual adapter model, nearest to a GPU that also has a port of the usual model."""
    reached: dict[int, set[str]] = {}
    for port in compute:
        if (near := nearest[port]) is not None:
            reached.setdefault(near[1], set()).add(port.hca_type)
    if not reached:
        return []
    kinds = Counter(kind for found in reached.values() for kind in found)
    usual, most = kinds.most_common(1)[0]
    if list(kinds.values()).count(most) > 1:
        return []
    return [
        port
        for port in compute
        if port.hca_type != usual and (near := nearest[port]) is not None and usual in reached[near[1]]
    ]
