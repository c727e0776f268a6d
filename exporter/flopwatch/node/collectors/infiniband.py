"""InfiniBand and RoCE ports from sysfs.

Files: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband. Which file a counter comes from is
in its catalogue row. Every read of `counters/` is a query to the firmware, so each file is read once per scrape.

Missing on some hardware: `hw_counters/` (hfi1), `counters/` (EFA); a counter reads `N/A (no PMA)` on iWARP, and ends
in EINVAL on ports the fabric manager owns. What cannot be read is no sample, and hides no other counter.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.catalogue import (
    INFINIBAND_INFO,
    INFINIBAND_PHYSICAL_STATE,
    INFINIBAND_PRESENT,
    INFINIBAND_RATE,
    INFINIBAND_STATE,
    Metric,
    Sample,
    all_metrics,
)
from flopwatch.node.collectors import Inventory, Unsupported

# The kernel logs each read of a counter that the firmware refuses, so a refused file is left alone for this many
# seconds (https://github.com/prometheus/node_exporter/issues/3434). Not for ever: a firmware reset refuses as well.
REFUSED_FOR = 3600.0

COUNTERS: dict[Metric, str] = {
    row: row.source.partition(",")[0]
    for row in all_metrics()
    if row.domain == "infiniband" and row.type == "counter"
}


def counter(text: str) -> int | None:
    """Return the number in a counter file, None for `N/A (no PMA)` and anything else that is no number."""
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def state(text: str) -> int | None:
    """Return 4 for `4: ACTIVE`."""
    match = re.match(r"([0-9]+):", text)
    return int(match[1]) if match else None


def physical_state(text: str) -> int | None:
    """Return 5 for `5: LinkUp`; None where a driver repeats the logical state (`4: ACTIVE`) in this file."""
    return None if text.endswith("ACTIVE") else state(text)


def rate(text: str) -> float | None:
    """Return the Gb/s in `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`."""
    match = re.match(r"([0-9]+(?:\.[0-9]+)?) Gb/sec", text)
    return float(match[1]) if match else None


class Infiniband:
    """The RDMA ports below `sysfs`/class/infiniband."""

    name = "infiniband"

    def __init__(
        self, sysfs: Path, host: str, inventory: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = str(sysfs / "class" / "infiniband")
        self._host = host
        self._inventory = Inventory(inventory, INFINIBAND_INFO)
        self._clock = clock
        self._refused: dict[str, float] = {}

    def read(self) -> list[Sample]:
        """Return what every port says, and infiniband_port_present 0 for those of the inventory that are gone."""
        ports = [(device, port) for device in _names(self._root) for port in _names(f"{self._root}/{device}/ports")]
        self._inventory.update({f"{device}/{port}": self._identity(device, port) for device, port in ports})
        if not self._inventory.parts:
            raise Unsupported(f"no port in {self._root}")
        samples = self._inventory.info()
        for part in self._inventory.parts.values():
            key = (part["device"], part["port"])
            samples.append((INFINIBAND_PRESENT, key, float(key in ports)))
        for device, port in ports:
            samples += self._port(device, port)
        return samples

    def _identity(self, device: str, port: str) -> dict[str, str]:
        folder = f"{self._root}/{device}"
        return {
            "device": device,
            "port": port,
            "host": self._host,
            "board_id": self._text(f"{folder}/board_id"),
            "firmware_version": self._text(f"{folder}/fw_ver"),
            "hca_type": self._text(f"{folder}/hca_type"),
            "link_layer": self._text(f"{folder}/ports/{port}/link_layer"),
        }

    def _port(self, device: str, port: str) -> list[Sample]:
        folder = f"{self._root}/{device}/ports/{port}/"
        numbers = {
            INFINIBAND_STATE: state(self._text(f"{folder}state")),
            INFINIBAND_PHYSICAL_STATE: physical_state(self._text(f"{folder}phys_state")),
            INFINIBAND_RATE: rate(self._text(f"{folder}rate")),
            **{row: counter(self._text(folder + file)) for row, file in COUNTERS.items()},
        }
        return [(row, (device, port), number) for row, number in numbers.items() if number is not None]

    def _text(self, path: str) -> str:
        """Return the first line of a file, empty if it cannot be read."""
        if path in self._refused and self._clock() - self._refused[path] < REFUSED_FOR:
            return ""
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                return os.read(file, 4096).decode("ascii", "replace").partition("\n")[0].strip()
            finally:
                os.close(file)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._refused[path] = self._clock()
            return ""


def _names(folder: str) -> list[str]:
    """Return the names in a folder, none if it is not there."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def build(host: str, inventory: str, sysfs: str) -> Infiniband:
    """Return the collector of the ports below a sysfs folder."""
    return Infiniband(Path(sysfs), host, Path(inventory))
