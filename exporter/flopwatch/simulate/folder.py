"""Folder of a simulated node: the files that its processes share.

`sys` has the ports and the PCI tree, `kmsg` the kernel log, and `dev` stand-ins for device files. `proc` has the
processes on the GPUs and the driver's list of GPUs. `node.json` has the state of GPUs and ports, which
`SimulatedHost.tick` advances. `faults.json` has the injected faults and the load of each GPU.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flopwatch.simulate import h100, pci


class NodeFolder:
    """Files of one simulated node, shared by any number of processes under one lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.ports = {device: self.sysfs / "class" / "infiniband" / device / "ports" / "1" for device in h100.ADAPTERS}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which excludes all other holders, during a `with` block."""
        with open(f"{self.root}/lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def faults(self) -> Iterator[dict[str, Any]]:
        """Yield the content of faults.json to change, and save it at the end of the `with` block, under the lock."""
        with self.locked():
            faults = h100.no_faults() | self.load("faults.json")
            yield faults
            self.save("faults.json", faults)

    def load(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, or an empty one if the file does not exist."""
        try:
            with open(f"{self.root}/{name}", "rb") as file:
                value: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return {}
        return value

    def save(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a file of the folder atomically by a JSON object."""
        with open(f"{self.root}/{name}.new", "wb") as file:
            file.write(json.dumps(value).encode())
        os.replace(f"{self.root}/{name}.new", f"{self.root}/{name}")

    def plug(self, device: str, port: Mapping[str, Any], plugged: bool) -> bool:
        """Add the adapter `device` to the sysfs tree if `plugged`, else remove it. Return `plugged`."""
        folder = self.ports[device]
        if plugged and not folder.is_dir():
            self.write_port(device, port)
            pci.link_adapter(self.sysfs, device, h100.ADAPTERS[device])
        elif not plugged and folder.is_dir():
            shutil.rmtree(folder.parents[1])
        return plugged

    def write_driver(self) -> None:
        """Write the driver's list of GPUs, as in /proc/driver/nvidia/gpus."""
        for gpu, bus in enumerate(h100.PCI_BUSES):
            folder = self.root / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{bus:02x}:00.0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t {gpu}\n")

    def write_devices(self, faults: Mapping[str, Any]) -> None:
        """Create stand-ins for the GPUs' device files /dev/nvidiaN, and remove those that a fault withholds."""
        (self.root / "dev").mkdir(exist_ok=True)
        for gpu in range(h100.GPUS):
            file = self.root / "dev" / f"nvidia{gpu}"
            if str(gpu) in faults["withheld"]:
                file.unlink(missing_ok=True)
            else:
                file.touch()

    def write_processes(self) -> None:
        """Write the files in /proc of the processes that keep the GPUs busy."""
        for gpu in range(h100.GPUS):
            folder = self.root / "proc" / str(h100.pid(gpu))
            folder.mkdir(parents=True, exist_ok=True)
            cgroup = f"/system.slice/slurmstepd.scope/job_{h100.SLURM_JOB}/step_0/user/task_{gpu}"
            (folder / "cgroup").write_text(f"0::{cgroup}\n")
            (folder / "status").write_text("Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
            (folder / "stat").write_text(f"{h100.pid(gpu)} (python) R {'0 ' * 18}4242 0\n")

    def write_port(self, device: str, port: Mapping[str, Any]) -> None:
        """Write the sysfs files of an RDMA adapter and its port."""
        folder = self.ports[device]
        for name in h100.COUNTERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        storage = device == h100.STORAGE_DEVICE
        identity = {"board_id": "MT_0000000838", "fw_ver": "28.41.1000", "hca_type": "MT4129"}
        if storage:
            identity = {"board_id": "MT_0000000884", "fw_ver": "32.38.3056", "hca_type": "MT41692"}
        for file, content in identity.items():
            write_in_place(folder.parents[1] / file, content)
        for file, content in {"link_layer": "Ethernet" if storage else "InfiniBand", **port["files"]}.items():
            write_in_place(folder / file, content)


class JsonFile:
    """Reader of a JSON file that another process replaces. `defaults` completes it, `version` changes with the file."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._path = str(path)
        self._defaults = defaults
        self.version: tuple[int, int] | None = None
        self.last: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the current content of the file. Parses it only if it changed."""
        status = os.stat(self._path)
        version = (status.st_ino, status.st_mtime_ns)
        if version != self.version:
            self.last, self.version = {**self._defaults, **json.loads(Path(self._path).read_bytes())}, version
        return self.last


def write_in_place(path: str | Path, content: str) -> None:
    """Write a line into a file as sysfs does: the inode stays, so an open descriptor sees the whole new line."""
    line = f"{content}\n".encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, line, 0)
        os.ftruncate(file, len(line))
    finally:
        os.close(file)
