"""Slurm's topology.yaml (https://slurm.schedmd.com/topology.yaml.html): the leaf switch and the block of a host.

Slurm reads it in place of a topology.conf in the same folder. It has several topologies, and a host may be in a tree
and in blocks. The cluster's default goes before the others.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = {"leaf": ("tree", "switches", "switch"), "domain": ("block", "blocks", "block")}


def in_place_of(file: Path) -> Path:
    """Return the file that Slurm reads: a topology.yaml next to a topology.conf, else the file itself."""
    neighbour = file.with_name("topology.yaml")
    return neighbour if file.name == "topology.conf" and neighbour.exists() else file


def find(text: str, host: str, contains: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the leaf and the domain of a host. `contains` tests a host list for a name.

    Raises ValueError for another format, or if no switch or block has the host.
    """
    import yaml  # 2 MiB of memory that other sources do not need

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
    try:
        topologies = yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(topologies, list) or not all(isinstance(one, dict) for one in topologies):
        raise ValueError("it is not a list of topologies")
    topologies.sort(key=lambda one: one.get("cluster_default") is not True)
    found: dict[str, str] = {}
    names = {host, host.partition(".")[0]}
    for level, (plugin, parts, name) in KINDS.items():
        for part in (part for one in topologies for part in _items(one.get(plugin), parts)):
            nodes = part.get("nodes")
            if level not in found and isinstance(nodes, str) and any(contains(nodes, each) for each in names):
                found[level] = str(part.get(name, ""))
    if not found:
        raise ValueError(f"no switch or block in it has the node {host}")
    return found


def _items(plugin: Any, parts: str) -> Iterator[dict[str, Any]]:
    """Yield the switches or blocks of a topology."""
    items = plugin.get(parts) if isinstance(plugin, dict) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
