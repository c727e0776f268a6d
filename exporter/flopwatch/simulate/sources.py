"""Sources of the reader processes with `--simulate`: the simulated node in place of the hardware.

A reader process imports this module for one factory only, so each function imports what it needs.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.settings import KUBELET_SOCKET, ExporterSettings
from flopwatch.simulate.pynvml import Simulation

if TYPE_CHECKING:
    from flopwatch.node.collectors.nvml import Nvml
    from flopwatch.node.collectors.xid import Xid
    from flopwatch.node.scrape.reader import HostSources


def nvml(root: str, host: str, inventory: str, runtime: str, sysfs: str) -> "Nvml":
    """Return the NVML collector of the simulated node in the folder `root`."""
    from flopwatch.node.collectors.nvml import Nvml

    node, file, own = Path(root), Path(inventory), Path(runtime)
    proc, dev = node / "proc", node / "dev"
    return Nvml(Simulation(node), host, file, "simulated", runtime=own, sysfs=Path(sysfs), proc=proc, dev=dev)


def xid(root: str, kmsg: str, gpus: str, state: str, nvml: str, strangers: str = "") -> "Xid":
    """Return the Xid collector of the simulated node in the folder `root`."""
    from flopwatch.node.collectors.xid import build

    return build(kmsg, gpus, state, nvml, Simulation(Path(root)), strangers)


def host_sources(settings: ExporterSettings) -> "HostSources":
    """Return the sources on the simulated node of `--simulate`, whose folder may not exist yet."""
    from flopwatch.node.scrape.reader import HostSources, Spec, simulated_node
    from flopwatch.simulate.node import SimulatedHost

    root = simulated_node(settings)
    # The kubelet of this machine knows nothing of simulated GPUs, so its default socket is ignored.
    kubelet = "" if settings.kubelet_socket == KUBELET_SOCKET else str(settings.kubelet_socket)
    nvml, xid = (Spec(f"flopwatch.simulate.sources:{name}", {"root": str(root)}) for name in ("nvml", "xid"))
    tick = SimulatedHost(root).tick
    return HostSources(root, root / "sys", str(root / "kmsg"), kubelet, root / "proc", nvml, xid, tick)


def create(settings: ExporterSettings) -> "HostSources":
    """Create the simulated node of `--simulate`, or continue an existing one, and return its sources."""
    from flopwatch.node.scrape.reader import simulated_node
    from flopwatch.simulate.node import SimulatedHost

    SimulatedHost(simulated_node(settings)).create()
    return host_sources(settings)
