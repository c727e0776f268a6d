"""Simulated host with eight H100 GPUs, as files in one folder. Any process may advance it."""

import time
from pathlib import Path

from flopwatch.simulate import h100, pci, physics
from flopwatch.simulate.folder import NodeFolder, write_in_place


class SimulatedHost:
    """Simulated host in the folder `root`, which any number of objects and processes can share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.kmsg = root / "kmsg"
        self._folder = NodeFolder(root)

    uuid = staticmethod(h100.uuid)

    def create(self, now: float | None = None) -> None:
        """Create the node with warm GPUs, or continue an existing one with its counters and faults."""
        now = time.time() if now is None else now
        self.root.mkdir(parents=True, exist_ok=True)
        self.kmsg.touch()
        self._folder.write_processes()
        self._folder.write_driver()
        with self._folder.faults() as faults:
            self._folder.write_devices(faults)
        with self._folder.locked():
            if not (self.root / "node.json").exists():
                devices = enumerate((*h100.DEVICES, h100.STORAGE_DEVICE))
                ports = {device: physics.new_port(index) for index, device in devices}
                gpus = [physics.new_gpu(gpu) for gpu in range(h100.GPUS)]
                node = {"time": now - 100 * h100.THERMAL_SECONDS, "gpus": gpus, "ports": ports}
                self._folder.save("node.json", node)
            for device, port in self._folder.load("node.json")["ports"].items():
                self._folder.write_port(device, port)
            pci.write(self.sysfs, h100.PCI_BUSES, h100.ADAPTERS)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Advance the node to the Unix time `now`. A time in the past changes nothing."""
        with self._folder.locked():
            node, faults = self._folder.load("node.json"), self._folder.load("faults.json")
            seconds = now - node["time"]
            if seconds <= 0:
                return
            node["time"] = now
            for index, gpu in enumerate(node["gpus"]):
                physics.advance_gpu(gpu, index, faults, now, seconds)
            # Strings as keys: pathlib interns the parts of paths, and the table of the interpreter would grow.
            changed: dict[str, str] = {}
            for index, (device, port) in enumerate(node["ports"].items()):
                before = port["files"].copy()
                physics.advance_port(port, index, device, faults, now, seconds)
                if self._folder.plug(device, port, device not in faults.get("removed", {})):
                    changed |= {
                        f"{self._folder.ports[device]}/{file}": content
                        for file, content in port["files"].items()
                        if content != before[file]
                    }
            # The state is saved first, so that no counter falls if the process is killed here.
            self._folder.save("node.json", node)
            for path, content in changed.items():
                write_in_place(path, content)
