"""Collector of InfiniBand, RoCE and EFA ports from sysfs: presence, role, rail and counters (`port.py`).

Every port ever seen is kept in a file with its rail, flaps and highest rate. A missing or slower port therefore has
series even after a reboot. Virtual functions are left out. Roles and rails follow from PCI paths (`pci.py`,
`rails.py`). The default route in /proc/net/route marks the management port. Counts survive restarts and register wraps.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import Inventory, StateFile, Unsupported, read_inventory, signature
from flopwatch.node.collectors.infiniband import pci, rails
from flopwatch.node.collectors.infiniband.files import Pread, names
from flopwatch.node.collectors.infiniband.link import Link
from flopwatch.node.collectors.infiniband.port import COUNTERS, Port

log = logging.getLogger(__name__)
REFRESH_SECONDS = 300.0  # between two reads of names and addresses, and between two writes of counts
MAX_PORTS = 64  # read and remembered, so that changing names cannot fill a disk or a database
CLEAR = "clear-flaps"  # file that ends the flapping of the ports it names, or of all, and is then removed


def counts(stored: Any) -> dict[str, tuple[int, int]]:
    """Return (total, last register value) by counter file from a port's stored state, without invalid entries."""
    entries = stored.items() if isinstance(stored, dict) else ()
    return {
        name: (entry[0], entry[1])
        for name, entry in entries
        if name in COUNTERS
        and isinstance(entry, list)
        and [*map(type, entry)] == [int, int]
        and 0 <= entry[1] <= entry[0] < 2**80
    }


def default_routes(text: str) -> set[str]:
    """Return the interfaces with a default route in the text of /proc/net/route."""
    lines = [line.split() for line in text.splitlines()]
    return {line[0] for line in lines if len(line) >= 8 and line[1] == line[7] == "00000000"}


class Infiniband:
    """Collector of the RDMA ports below `sysfs`/class/infiniband.

    `inventory` is the file of every port ever seen, `gpus` the inventory of the NVML collector. `history` is the file
    of each port's highest rate, flaps, counts and PCI place. After a change of `boot_id` all registers were reset.
    """

    name = "infiniband"

    def __init__(
        self,
        sysfs: Path,
        host: str,
        inventory: Path,
        gpus: Path | None = None,
        history: Path | None = None,
        routes: Path = Path("/proc/net/route"),
        boot_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pread: Pread = os.pread,
        complete: bool = False,
    ) -> None:
        self._sysfs, self._pread, self._complete = sysfs, pread, complete
        self._root = str(sysfs / "class" / "infiniband")
        self._host = host
        self._inventory = Inventory(inventory, m.INFINIBAND_INFO)
        self._gpus = gpus or inventory.with_name("gpus.json")
        self._history = history or inventory.with_name("port_history.json")
        self._history_file = StateFile(self._history)
        self._clear = str(self._history.with_name(CLEAR))
        self._routes, self._boot_id = routes, boot_id
        self._clock, self._wall = clock, wall
        self._ports: dict[str, Port] = {}  # present ones, by device/port
        self._gone: dict[str, Port] = {}
        self._places: dict[str, pci.PciPlace] = {}  # of ports, and of GPUs by address, present or not
        self._unkept = False  # whether the history has unsaved changes
        self._too_many = 0  # ports that are not read
        self._stored: dict[str, Any] = {}
        self._stored_as: tuple[int, ...] | None = (-1,)
        self._seen: tuple[object, ...] = ()
        self._refresh_at = 0.0
        self._same: list[Sample] = []  # valid while nothing is added, removed or read again

    def read(self) -> list[Sample]:
        """Return the samples of every port, also of missing ones. Raises Unsupported if no port was ever seen."""
        now = self._clock()
        self._remember(now)
        devices = self._devices()
        seen = (devices, signature(str(self._gpus)))
        left = [key for key, port in self._ports.items() if not port.there()]
        if left or seen != self._seen or now >= self._refresh_at:
            self._unkept = self._unkept or now >= self._refresh_at
            self._refresh(devices, now)
            self._seen = seen
        if not self._inventory.parts:
            raise Unsupported(f"no port in {self._root}")
        samples = self._same.copy()
        news = self._cleared() or self._unkept
        for port in self._ports.values():
            own, port_news = port.read(now)
            samples += own
            news = news or port_news
        if news:
            self._keep(now)
            self._unkept = False
        return samples

    def close(self) -> None:
        """Write the history and close every sysfs file."""
        if self._seen and self._inventory.parts:
            self._keep(self._clock())
        for port in self._ports.values():
            port.close()

    def _devices(self) -> dict[str, int]:
        """Return the inode of each RDMA device by name. A replaced device of the same name has another inode."""
        try:
            with os.scandir(self._root) as entries:
                return {entry.name: entry.inode() for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _refresh(self, devices: Mapping[str, int], now: float) -> None:
        """List the ports again, with their identity, role and rail, and rebuild the samples that seldom change."""
        self._refresh_at = now + REFRESH_SECONDS
        known, self._ports = self._gone | self._ports, {}
        for device, number in self._listed(devices):
            key = f"{device}/{number}"
            port = known.pop(key, None)
            if port is None:
                port = Port(str(self._sysfs), device, number, self._pread, self._complete)
                self._recall(key, port, now)
            port.identify(self._host, devices[device])
            self._ports[key] = port
        for port in known.values():
            port.leave()
        affinities = self._locate()
        self._forget()
        self._inventory.update({key: port.identity for key, port in self._ports.items()})
        self._gone = {key: port for key, port in known.items() if key in self._inventory.parts}
        self._same = self._inventory.info()
        for key, part in self._inventory.parts.items():
            labels, present = (part["device"], part["port"]), key in self._ports
            if present or not self._given_away(key):
                self._same.append((m.INFINIBAND_PORT_PRESENT, labels, float(present)))
        for port in self._ports.values():
            self._same += port.seldom
        self._same += affinities

    def _listed(self, devices: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return (device, port number) of the present ports, at most MAX_PORTS and without virtual functions."""
        listed = [
            (device, number)
            for device in sorted(devices)
            if not pci.virtual(Path(self._root, device, "device"))
            for number in names(f"{self._root}/{device}/ports")
            if number.isdecimal()
        ]
        too_many = max(0, len(listed) - MAX_PORTS)
        if too_many > self._too_many:
            log.warning("%d ports in %s, only %d are read", len(listed), self._root, MAX_PORTS)
        self._too_many = too_many
        return listed[:MAX_PORTS]

    def _forget(self) -> None:
        """Drop missing ports, those last added first, until the inventory has at most MAX_PORTS ports."""
        parts = self._inventory.parts
        excess = len(parts.keys() | self._ports.keys()) - MAX_PORTS
        for key in [key for key in reversed(parts) if key not in self._ports][: max(0, excess)]:
            del parts[key]

    def _given_away(self, key: str) -> bool:
        """Return whether a missing port's adapter is on the PCI bus and serves a virtual machine or container."""
        place = self._places.get(key)
        return place is not None and pci.given_away(self._sysfs / "bus" / "pci" / "devices" / place.path[-1])

    def _locate(self) -> list[Sample]:
        """Set roles and rails from PCI paths. Forget a missing port whose path another port has. Return affinities."""
        parts, before = self._inventory.parts, self._places.copy()
        for key, port in self._ports.items():
            if port.place is not None:
                self._places[key] = port.place
        taken = {(self._places.get(key), port.labels[1]) for key, port in self._ports.items()}
        for key in [key for key in parts if key not in self._ports]:
            place = self._places.get(key)
            if place is not None and (place, parts[key]["port"]) in taken:
                del parts[key], self._places[key]
        gpus, addresses = [], set()
        for gpu in rails.module_order(read_inventory(self._gpus, m.GPU_INFO).values()):
            address = pci.address(gpu["pci_bus_id"])
            place = pci.place(self._sysfs / "bus" / "pci" / "devices" / address) if address else None
            if place is not None:
                self._places[address] = place
            addresses.add(address)
            if address in self._places:
                gpus.append(rails.Gpu(gpu["gpu"], gpu["uuid"], self._places[address]))
        wanted = parts.keys() | self._ports.keys() | addresses
        self._places = {key: place for key, place in self._places.items() if key in wanted}
        self._unkept = self._unkept or self._places != before
        interfaces = self._own_interfaces()
        known = {**parts, **{key: port.identity for key, port in self._ports.items()}}
        ports = {
            key: rails.RailPort(
                part["device"],
                part["port"],
                self._places.get(key),
                part["link_layer"],
                part["hca_type"],
                self._ports[key].uses(interfaces) if key in self._ports else part["role"] == "management",
            )
            for key, part in known.items()
        }
        duties = rails.duties(list(ports.values()), gpus)
        for key, port in self._ports.items():
            duty = duties[ports[key]]
            port.identity |= {"role": duty.role, "rail": duty.rail}
        present = [ports[key] for key in self._ports]
        return [(m.INFINIBAND_GPU_AFFINITY_INFO, labels, 1) for labels in rails.affinities(present, gpus)]

    def _own_interfaces(self) -> set[str]:
        """Return the interfaces of the default route, and the interfaces below these (bond, VLAN, bridge)."""
        try:
            own = default_routes(self._routes.read_text())
        except (OSError, ValueError):
            return set()
        unseen = list(own)
        while unseen:
            for entry in names(f"{self._sysfs}/class/net/{unseen.pop()}"):
                lower = entry.removeprefix("lower_")
                if lower != entry and lower not in own:
                    own.add(lower)
                    unseen.append(lower)
        return own

    def _remember(self, now: float) -> None:
        """Read the history file if it changed since this process last read or wrote it."""
        found = signature(str(self._history))
        if found == self._stored_as:
            return
        self._stored_as = found
        self._stored = self._history_file.load()
        for key, entry in self._part("places").items():
            with suppress(KeyError, TypeError, ValueError):
                self._places[key] = pci.PciPlace(tuple(str(entry["path"]).split("/")), int(entry["numa"]))
        for key, port in (self._gone | self._ports).items():
            self._recall(key, port, now)

    def _part(self, name: str) -> dict[str, Any]:
        part = self._stored.get(name)
        return {key: entry for key, entry in part.items() if isinstance(entry, dict)} if isinstance(part, dict) else {}

    def _recall(self, key: str, port: Port, now: float) -> None:
        entry = self._part("ports").get(key, {})
        gigabits, inode = entry.get("gigabits"), entry.get("inode")
        port.recall(
            gigabits if isinstance(gigabits, (int, float)) and 0 < gigabits < 1e6 else None,
            Link.load(entry.get("link"), now, self._wall()),
            counts(entry.get("counters")),
            inode if self._stored.get("boot") == self._boot_id and isinstance(inode, int) else None,
        )

    def _keep(self, now: float) -> None:
        """Write the ports' counters and link states as of `now` to the history file, if its content changed."""
        unix = self._wall()
        # Inode 0: the registers of a port missing since before this process may have been reset.
        ports = {key: {**old, "inode": 0} for key, old in self._part("ports").items() if key in self._inventory.parts}
        for key, port in (self._gone | self._ports).items():
            ports[key] = port.dump(now, unix)
        places = {key: {"path": "/".join(place.path), "numa": place.numa} for key, place in self._places.items()}
        self._stored = {"boot": self._boot_id, "ports": ports, "places": places}
        if self._history_file.save(self._stored):
            self._stored_as = signature(str(self._history))

    def _cleared(self) -> bool:
        """End the flapping of ports named in the file CLEAR (empty: all). Return whether the file existed."""
        try:
            with open(self._clear, encoding="utf-8", errors="replace") as file:
                named = file.read(4096).split()
            os.unlink(self._clear)
        except OSError:
            return False
        for key, port in self._ports.items():
            if not named or key in named or port.labels[0] in named:
                port.clear()
        return True


def build(host: str, inventory: str, sysfs: str, gpus: str, state: str, complete: str = "") -> Infiniband:
    """Return the collector of RDMA ports below `sysfs`. `state` is the file of their history. `complete`: see Port."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    files = Path(inventory), Path(gpus), Path(state)
    return Infiniband(Path(sysfs), host, *files, boot_id=boot_id, complete=bool(complete))
