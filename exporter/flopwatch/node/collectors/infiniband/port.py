"""One InfiniBand, RoCE or EFA port: its files in sysfs, and its samples.

Files: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband. Each read in `counters/` queries the
firmware. A read in `hw_counters/` refreshes that folder for its `lifespan` (10 ms). Files stay open, which is cheaper.

hfi1 and mlx4 have no `hw_counters/`. EFA has no `counters/`, and its `state` and `rate` are constants. A counter reads
`N/A (no PMA)` on iWARP, and fails with EINVAL on ports that the fabric manager owns. The kernel logs such failures, so
refused files are retried more and more rarely, and only one file if all are refused.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, PortCounter, Sample, all_metrics
from flopwatch.node.collectors import signature
from flopwatch.node.collectors.infiniband import pci
from flopwatch.node.collectors.infiniband.driver import DriverStatistics
from flopwatch.node.collectors.infiniband.files import (
    MAX_BYTES,
    CounterFile,
    Pread,
    SysfsFile,
    counter,
    first_line_of,
    local_identifier,
    names,
    operational_state,
    physical_state,
    rate,
    state,
    temperature,
)
from flopwatch.node.collectors.infiniband.link import ACTIVE, Link

log = logging.getLogger(__name__)
GONE = (errno.ENODEV, errno.ESTALE, errno.ENOENT)  # the device was removed, and its successor has other files
# Errors of a read that the firmware refuses. After so many in a row for one kind of file, the others are not tried.
REFUSED = (errno.EINVAL, errno.ENXIO)
MAX_REFUSED = 3
FIRST_WAIT, MAX_WAIT = 60.0, 3600.0  # seconds until a refused file is read again, doubled up to the maximum

COUNTERS = {file: row for row in all_metrics() if isinstance(row, PortCounter) for file in row.files}


class Port:
    """The open sysfs files of a port, and the history of its link. An unchanged sample stays the same object.

    `complete`: read also the counters that flopwatch's own families leave out, see `PortCounter.quiet` and `roce`.
    """

    def __init__(self, sysfs: str, device: str, port: str, pread: Pread = os.pread, complete: bool = False) -> None:
        self.labels = (device, port)
        self._pread, self._complete = pread, complete
        self.link = Link()
        self.expected: float | None = None  # Gb/s
        self.place: pci.PciPlace | None = None
        self.identity: dict[str, str] = {}
        self.seldom: list[Sample] = []  # from `identify`
        self._inode = 0
        self._networks = f"{sysfs}/class/net"
        self._device = f"{sysfs}/class/infiniband/{device}"
        self._folder = f"{self._device}/ports/{port}"
        self._net: list[str] = []
        self._drivers: list[DriverStatistics] = []  # of the network interfaces, on RoCE
        self._first = False  # the first of its device's ports
        self._files: dict[str, SysfsFile] = {}  # by path; a counter that is opened again keeps its count
        self._open: list[SysfsFile] = []
        self._state: SysfsFile | None = None
        self._rate: SysfsFile | None = None
        self._folders: dict[str, tuple[int, ...] | None] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # by path: time of the next try, and the wait after it
        self._asking: dict[str, float] = {}  # files retried by this read, and the wait after it
        self._ask_at = 0.0
        self._complained: set[str] = set()
        self._counts: Mapping[str, tuple[int, int]] = {}  # of an earlier process, by file name in the catalogue
        self._counts_inode: int | None = None
        self._summary: list[Sample] = []

    def there(self) -> bool:
        """Return whether the port is in sysfs. Open its files again if its folders changed."""
        if all(signature(folder) == before for folder, before in self._folders.items()):
            return True
        self.open()
        return os.path.isdir(self._folder)

    def identify(self, host: str, inode: int) -> None:
        """Read the port's labels and addresses, and open its files. A new `inode` means a replaced device."""
        if inode != self._inode:
            self._inode = inode
            self._refused.clear()
            self._complained.clear()
            for counted in self._files.values():
                if isinstance(counted, CounterFile):
                    counted.replaced = True
        device, port = self.labels
        layer = first_line_of(f"{self._folder}/link_layer")
        # The network interface of RoCE (or its bond) first, then those of the port's number.
        below, roce = f"{self._device}/device/net", first_line_of(f"{self._folder}/gid_attrs/ndevs/0")
        numbers = {name: counter(first_line_of(f"{below}/{name}/dev_port")) for name in names(below)}
        mine = [name for name, number in numbers.items() if number in (None, int(port) - 1)]
        self._net = [roce, *(name for name in mine if name != roce)] if roce else mine
        interfaces = [f"{self._networks}/{name}" for name in self._net if layer == "Ethernet"]
        self._drivers = [DriverStatistics(interface, self.labels) for interface in interfaces]
        self._first = port == min(names(f"{self._device}/ports"), default=port)
        self.place = pci.place(Path(self._device, "device"))
        self.identity = {
            "device": device,
            "port": port,
            "host": host,
            "board_id": first_line_of(f"{self._device}/board_id"),
            "firmware_version": first_line_of(f"{self._device}/fw_ver"),
            "hca_type": first_line_of(f"{self._device}/hca_type"),
            "link_layer": layer,
            "net_device": self._net[0] if self._net else "",
            "role": "",
            "rail": "",
        }
        self.seldom = []
        answers = layer == "InfiniBand" and f"{self._folder}/state" not in self._refused
        identifiers = ((m.INFINIBAND_PORT_LID, "lid"), (m.INFINIBAND_PORT_SUBNET_MANAGER_LID, "sm_lid"))
        for row, file in identifiers if answers else ():
            number = local_identifier(first_line_of(f"{self._folder}/{file}"))
            if number is None:
                break
            self.seldom.append((row, self.labels, number))
        self.open()

    def uses(self, interfaces: set[str]) -> bool:
        """Return whether one of these network interfaces belongs to the port."""
        return not interfaces.isdisjoint(self._net)

    def open(self) -> None:
        """Open every file of the port that exists, except those that the firmware refuses."""
        self.close()
        self._folders = {self._folder: signature(self._folder)}
        files = [*self._states(), *self._sensors(), *self._counters()]
        files = [self._files.setdefault(file.path, file) for file in files]
        self._open = [file for file in files if file.path not in self._refused and file.open()]
        self._state = next((file for file in self._open if file.row is m.INFINIBAND_PORT_STATE_ID), None)
        self._rate = next((file for file in self._open if file.row is m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND), None)
        self._summary = []

    def close(self) -> None:
        """Close every open file."""
        for file in self._open:
            file.close()
        self._open = []

    def leave(self) -> None:
        """Close every file of a port that is missing now. Its counts and link history are kept for its return."""
        self.close()
        self._inode = 0

    def _states(self) -> Iterator[SysfsFile]:
        layer = self.identity.get("link_layer", "")
        net = f"{self._networks}/{self._net[0]}" if self._net else ""
        if net and layer == "Unspecified":
            yield SysfsFile(f"{net}/operstate", m.INFINIBAND_PORT_STATE_ID, self.labels, operational_state)
        else:
            yield SysfsFile(f"{self._folder}/state", m.INFINIBAND_PORT_STATE_ID, self.labels, state)
        yield SysfsFile(f"{self._folder}/phys_state", m.INFINIBAND_PORT_PHYSICAL_STATE_ID, self.labels, physical_state)
        yield SysfsFile(f"{self._folder}/rate", m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, self.labels, rate)
        if net and layer != "InfiniBand":
            yield SysfsFile(f"{net}/carrier_changes", m.INFINIBAND_CARRIER_CHANGES_TOTAL, self.labels, counter)

    def _counters(self) -> Iterator[SysfsFile]:
        """Yield the port's counter files. Of several files for one count, yield only the best."""
        found: dict[str, list[str]] = {}
        for name in ("counters", "counters_ext", "hw_counters"):
            self._list(f"{self._folder}/{name}", name, found)
        if self._first:
            self._list(f"{self._device}/hw_counters", "device/hw_counters", found)
        for row_name, paths in found.items():
            row = m.BY_NAME[row_name]
            assert isinstance(row, PortCounter)
            if row.labels == m.PORT:
                counted = [path for path in paths if path in self._files or self._known_as(path) in self._counts]
                path = paths[0] if len(paths) == 1 else counted[0] if counted else max(paths, key=_rank)
                yield self._counter(path, row, self.labels)
            else:
                for path in paths:
                    yield self._counter(path, row, (*self.labels, os.path.basename(path).removesuffix("_err")))

    def _counter(self, path: str, row: PortCounter, labels: tuple[str, ...]) -> CounterFile:
        name = self._known_as(path)
        result = CounterFile(path, row, labels, name, row.quiet and not self._complete, self._has(row))
        if path not in self._files and name in self._counts:
            total, last = self._counts[name]
            result.resume(total, last, replaced=self._counts_inode != self._inode)
        return result

    def _has(self, row: PortCounter) -> bool:
        """Return whether the port's link layer has such events."""
        return row.roce or self.identity.get("link_layer") != "Ethernet"

    def _known_as(self, path: str) -> str:
        """Return a counter file's name in the catalogue: its path below the port, or `device/` and the rest."""
        ours = path.removeprefix(f"{self._folder}/")
        return ours if ours != path else f"device/{path.removeprefix(f'{self._device}/')}"

    def _list(self, folder: str, known_as: str, found: dict[str, list[str]]) -> None:
        """Add the paths of known counter files in a folder to `found`, by the name of their row."""
        listed = names(folder)
        if listed:
            self._folders[folder] = signature(folder)
        for name in listed:
            row = COUNTERS.get(f"{known_as}/{name}")
            if row is not None and (self._complete or self._has(row)):
                found.setdefault(row.name, []).append(f"{folder}/{name}")

    def _sensors(self) -> Iterator[SysfsFile]:
        monitors = f"{self._device}/device/hwmon"
        for folder in [f"{monitors}/{name}" for name in names(monitors)] if self._first else ():
            for name in names(folder):
                if re.fullmatch(r"temp[0-9]+_input", name):
                    number = name.removesuffix("_input")
                    labels = (*self.labels, first_line_of(f"{folder}/{number}_label") or number)
                    yield SysfsFile(f"{folder}/{name}", m.INFINIBAND_TEMPERATURE_CELSIUS, labels, temperature)

    def read(self, now: float) -> tuple[list[Sample], bool]:
        """Return the port's samples, and whether its link history or highest rate changed and must be stored."""
        if self._refused and now >= self._ask_at:
            self._asking = {path: wait for path, (at, wait) in self._refused.items() if at <= now}
            self._refused = {path: entry for path, entry in self._refused.items() if path not in self._asking}
            self.open()
        samples: list[Sample] = []
        failed: list[tuple[SysfsFile, int | None]] = []
        pread, append = self._pread, samples.append
        for file in self._open:
            try:
                data = pread(file.fd, MAX_BYTES, 0)
            except OSError as error:
                failed.append((file, error.errno))
                if error.errno in REFUSED and self._hopeless(file, failed):
                    failed += [(other, error.errno) for other in self._open[self._open.index(file) + 1 :]]
                    break
                continue
            if data != file.data:
                file.take(data)
            if file.sample is not None:
                append(file.sample)
                if file.stuck is not None:
                    append(file.stuck)
        if failed:
            self._failed(failed, now)
        self._asking = {}
        news = self._watch(now)
        if news or not self._summary:
            self._summary = self._summarize()
        # A bond has none of these statistics, its first interface does.
        driver = next((found for driver in self._drivers if (found := driver.read(now))), [])
        return samples + self._summary + driver, news

    def _hopeless(self, file: SysfsFile, failures: list[tuple[SysfsFile, int | None]]) -> bool:
        """Return whether all files of this kind read so far were refused, so that the rest need not be tried."""
        counts = isinstance(file, CounterFile)
        asked = self._open[: self._open.index(file) + 1]
        asked = [other for other in asked if isinstance(other, CounterFile) == counts]
        refused = [one for one, reason in failures if reason in REFUSED and isinstance(one, CounterFile) == counts]
        return len(refused) == len(asked) >= (1 if len(self._asking) > MAX_REFUSED else MAX_REFUSED)

    def _failed(self, failures: list[tuple[SysfsFile, int | None]], now: float) -> None:
        """Drop the samples of failed files, and close files that are refused or whose device is gone.

        `failures` has each file with its errno. A refused file is tried again later.
        """
        for file, reason in failures:
            file.lose()
            if reason in GONE or reason in REFUSED:
                file.close()
            if reason in REFUSED:
                wait = self._asking.get(file.path, FIRST_WAIT)
                self._refused[file.path] = now + wait, min(2 * wait, MAX_WAIT)
                self._summary = []
        self._open = [file for file in self._open if file.fd >= 0]
        self._ask_at = min((at for at, _ in self._refused.values()), default=0.0)
        if new := self._refused.keys() - self._complained:
            self._complained |= new
            log.warning(
                "%s: the firmware refuses %s; next try within the hour",
                "/".join(self.labels),
                ", ".join(sorted(new)) if len(new) <= MAX_REFUSED else f"{len(new)} files",
            )

    def recall(
        self, expected: float | None, link: Link, counts: Mapping[str, tuple[int, int]], inode: int | None
    ) -> None:
        """Continue from an earlier process: highest rate (Gb/s), link, counts, `inode` (None: before a reboot)."""
        self.expected, self.link, self._counts, self._counts_inode = expected, link, counts, inode
        self._summary = []

    def dump(self, now: float, unix: float) -> dict[str, Any]:
        """Return what `recall` restores. `now` and `unix` are one moment on the monotonic and the Unix clock."""
        counted = [file for file in self._files.values() if isinstance(file, CounterFile)]
        return {
            "gigabits": self.expected,
            "link": self.link.dump(now, unix),
            "inode": self._inode,
            "counters": {self._known_as(file.path): count for file in counted if (count := file.dump()) is not None},
        }

    def clear(self) -> None:
        """End the flapping of the port's link now, as an operator asked. Counts of flaps and drops are kept."""
        self.link.clear()
        self._summary = []

    def _watch(self, now: float) -> bool:
        number = self._state.number if self._state is not None else None
        gigabits = self._rate.number if self._rate is not None else None
        news = self.link.see(None if number is None else int(number), now)
        # A port that is down reports the lowest rate.
        if gigabits is not None and number in ACTIVE and (self.expected is None or gigabits > self.expected):
            self.expected, news = gigabits, True
        return news

    def _summarize(self) -> list[Sample]:
        numbers: tuple[tuple[Metric, float | None], ...] = (
            (m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND, self.expected),
            (m.INFINIBAND_LINK_FLAPS_TOTAL, self.link.flaps),
            (m.INFINIBAND_LINK_OUTAGES_TOTAL, self.link.drops),
            (m.INFINIBAND_LINK_FLAPPING, self.link.flapping),
            (m.INFINIBAND_PORT_UNREAD_FILES, len(self._refused)),
        )
        return [(row, self.labels, float(number)) for row, number in numbers if number is not None]


def _rank(path: str) -> tuple[int, bool]:
    """Return a file's sort key among files with the same count. The file with the largest key is used.

    The key is the number in the file, then whether the counter has 64 bits.
    """
    return counter(first_line_of(path)) or 0, "counters_ext" in path
