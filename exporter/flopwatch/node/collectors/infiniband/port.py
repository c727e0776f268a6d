"""One InfiniBand, RoCE or EFA port: its files in sysfs, and what they say.

Files: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband. Which file a counter comes from and
how wide its register is, is in its catalogue row. Every read of `counters/` is a query to the firmware, one of `state`,
`phys_state` or `rate` a port query, one in `hw_counters/` refreshes that folder for its `lifespan` (10 ms): each file
is read once per scrape. Files stay open and are read again with pread, at a sixth of the cost of opening them.

Missing on some hardware: `hw_counters/` (hfi1, mlx4), `counters/` (EFA, whose `state` and `rate` are constants); a
counter reads `N/A (no PMA)` on iWARP, and ends in EINVAL on ports that the fabric manager owns. What cannot be read is
no sample, and hides no other counter. Bit error rates are not in sysfs: mlxlink and ibdiagnet have them, as root.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from flopwatch.catalogue import (
    BY_NAME,
    INFINIBAND_CARRIER_CHANGES,
    INFINIBAND_DROPS,
    INFINIBAND_EXPECTED_RATE,
    INFINIBAND_FLAPPING,
    INFINIBAND_FLAPS,
    INFINIBAND_LID,
    INFINIBAND_PHYSICAL_STATE,
    INFINIBAND_RATE,
    INFINIBAND_REFUSED,
    INFINIBAND_SATURATED,
    INFINIBAND_SM_LID,
    INFINIBAND_STATE,
    INFINIBAND_TEMPERATURE,
    PORT,
    Metric,
    PortCounter,
    Sample,
    all_metrics,
)
from flopwatch.node.collectors.infiniband import pci
from flopwatch.node.collectors.infiniband.link import ACTIVE, Link

log = logging.getLogger(__name__)

# Files of a device that was removed; its successor has others.
GONE = (errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOENT)
LONGEST = 64  # bytes; more than any file has that is read at each scrape

COUNTERS: dict[str, PortCounter] = {
    file: row for row in all_metrics() if isinstance(row, PortCounter) for file in row.files
}
WORDS = re.compile(r"/port_(xmit|rcv)_data(_64)?$")  # in 4-byte words

Parser = Callable[[str], "float | None"]
Pread = Callable[[int, int, int], bytes]  # file, length, offset, as os.pread


def counter(text: str) -> int | None:
    """Return the number in a counter file, None for `N/A (no PMA)` and anything else that is no 64-bit number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    number = int(text)
    return number if number < 2**64 else None


def state(text: str) -> int | None:
    """Return 4 for `4: ACTIVE`."""
    match = re.match(r"([0-9]{1,2}):", text)
    return int(match[1]) if match else None


def physical_state(text: str) -> int | None:
    """Return 5 for `5: LinkUp`; None where a driver repeats the logical state (`4: ACTIVE`) in this file."""
    return None if text.endswith("ACTIVE") else state(text)


def rate(text: str) -> float | None:
    """Return the Gb/s in `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`."""
    match = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text)
    return float(match[1]) if match else None


def local_identifier(text: str) -> int | None:
    """Return 283 for `0x11b`."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", text) else None


def operational_state(text: str) -> int | None:
    """Return a net device's state as the number of a port's: 4 for `up`, 1 for `down`; else None."""
    return {"up": 4, "down": 1, "lowerlayerdown": 1, "notpresent": 1}.get(text)


def temperature(text: str) -> int | None:
    """Return a hwmon temperature in thousandths of a degree."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,7}", text) else None


def risen(last: int, number: int, wrap: int) -> int:
    """Return how far a counter rose between two readings, if its register wraps at `wrap`; 0 is never.

    A fall by more than half the register's range is a wrap, any other one a reset, after which it counts from 0.
    """
    if number >= last:
        return number - last
    return number - last + wrap if 2 * (last - number) > wrap > last else number


class _File:
    """One file, kept open, and the sample its last content made."""

    __slots__ = ("data", "fd", "labels", "number", "parse", "path", "row", "sample", "stuck")

    def __init__(self, path: str, row: Metric, labels: tuple[str, ...], parse: Parser) -> None:
        self.path, self.row, self.labels, self.parse = path, row, labels, parse
        self.fd = -1
        self.data = b""
        self.number: float | None = None
        self.sample: Sample | None = None
        self.stuck: Sample | None = None

    def open(self) -> bool:
        """Open the file; return whether that worked."""
        self.lose()
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def take(self, data: bytes) -> None:
        """Make the sample of a new content."""
        self.data = data
        self.number = self.parse(_first_line(data))
        self.sample = None if self.number is None else (self.row, self.labels, self.number)

    def lose(self) -> None:
        """Have no sample, since the file cannot be read."""
        self.data, self.number, self.sample, self.stuck = b"", None, None, None

    def close(self) -> None:
        """Close the file, and have no sample."""
        self.lose()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class _Counter(_File):
    """A counter, which goes on where its register wraps or is cleared."""

    __slots__ = ("_full", "_last", "_quiet", "_total", "_unit", "_wrap", "anew")

    def __init__(self, path: str, row: PortCounter, labels: tuple[str, ...]) -> None:
        super().__init__(path, row, labels, counter)
        self._quiet = row.quiet
        self._full = 2**row.bits - 1 if row.sticks else -1
        self._wrap = 2**row.bits if row.bits < 64 and not row.sticks else 0
        self._unit = 4 if WORDS.search(path) else 1
        self._last = self._total = 0
        self.anew = False  # the device was removed and is back: a fall is no wrap

    def take(self, data: bytes) -> None:
        self.data = data
        self.stuck = self.sample = None
        number = counter(_first_line(data))
        if number is None:
            return
        self._total += risen(self._last, number, 0 if self.anew else self._wrap)
        self._last, self.anew = number, False
        if number == self._full:
            self.stuck = (INFINIBAND_SATURATED, (*self.labels, os.path.basename(self.path)), 1)
        if self._total or not self._quiet:
            self.sample = (self.row, self.labels, self._total * self._unit)


class Port:
    """One port: its open files, and what its link did.

    The same objects for row and labels come with every read, and the same sample where nothing changed.
    """

    def __init__(self, sysfs: str, device: str, port: str, pread: Pread = os.pread) -> None:
        self.labels = (device, port)
        self._pread = pread
        self.link = Link()
        self.expected: float | None = None  # Gb/s
        self.place: pci.Place | None = None
        self.identity: dict[str, str] = {}
        self.seldom: list[Sample] = []  # of what is read by `identify` only
        self._inode = 0
        self._networks = f"{sysfs}/class/net"
        self._device = f"{sysfs}/class/infiniband/{device}"
        self._folder = f"{self._device}/ports/{port}"
        self._net: list[str] = []
        self._first = False  # of its device's ports
        self._files: dict[str, _File] = {}  # by path; a counter opened again goes on with its count
        self._open: list[_File] = []
        self._state: _File | None = None
        self._rate: _File | None = None
        self._folders: dict[str, tuple[int, ...] | None] = {}
        self._refused: set[str] = set()
        self._summary: list[Sample] = []

    def there(self) -> bool:
        """Return whether the port is in /sys; if its folders changed, its files are opened again."""
        if all(signature(folder) == before for folder, before in self._folders.items()):
            return True
        self.open()
        return os.path.isdir(self._folder)

    def identify(self, host: str, inode: int) -> None:
        """Read what seldom changes, and open the files; another inode is a device that was removed and is back."""
        if inode != self._inode:
            self._inode = inode
            self._refused.clear()
            for counted in self._files.values():
                if isinstance(counted, _Counter):
                    counted.anew = True
        device, port = self.labels
        layer = _text(f"{self._folder}/link_layer")
        self._net = self._net_devices()
        self._first = port == min(names(f"{self._device}/ports"), default=port)
        self.place = pci.place(Path(self._device, "device"))
        self.identity = {
            "device": device, "port": port, "host": host,
            "board_id": _text(f"{self._device}/board_id"),
            "firmware_version": _text(f"{self._device}/fw_ver"),
            "hca_type": _text(f"{self._device}/hca_type"),
            "link_layer": layer,
            "net_device": self._net[0] if self._net else "",
            "role": "", "rail": "",
        }
        self.seldom = []
        for row, file in ((INFINIBAND_LID, "lid"), (INFINIBAND_SM_LID, "sm_lid")):
            known = layer == "InfiniBand" and not self._refused
            number = local_identifier(_text(f"{self._folder}/{file}")) if known else None
            if number is not None:
                self.seldom.append((row, self.labels, number))
        self.open()

    def _net_devices(self) -> list[str]:
        """Return the port's net devices, first RoCE's own name for it (a bond's), then those of its number."""
        below = f"{self._device}/device/net"
        number = int(self.labels[1]) - 1
        mine = [name for name in names(below) if counter(_text(f"{below}/{name}/dev_port")) in (None, number)]
        first = _text(f"{self._folder}/gid_attrs/ndevs/0")
        return [first, *(name for name in mine if name != first)] if first else mine

    def uses(self, interfaces: set[str]) -> bool:
        """Return whether one of these interfaces is the port's."""
        return not interfaces.isdisjoint(self._net)

    def open(self) -> None:
        """Open every file there is, but for those refused."""
        self.close()
        self._folders = {self._folder: signature(self._folder)}
        files = [*self._states(), *self._counters(), *self._sensors()]
        files = [self._files.setdefault(file.path, file) for file in files]
        self._open = [file for file in files if file.path not in self._refused and file.open()]
        self._state = next((file for file in self._open if file.row is INFINIBAND_STATE), None)
        self._rate = next((file for file in self._open if file.row is INFINIBAND_RATE), None)
        self._summary = []

    def close(self) -> None:
        """Close every file."""
        for file in self._open:
            file.close()
        self._open = []

    def leave(self) -> None:
        """Close every file of a port that is gone; its counts and its link are kept for when it comes back."""
        self.close()
        self._inode = 0

    def _states(self) -> Iterator[_File]:
        layer = self.identity.get("link_layer", "")
        net = f"{self._networks}/{self._net[0]}" if self._net else ""
        if net and layer == "Unspecified":
            yield _File(f"{net}/operstate", INFINIBAND_STATE, self.labels, operational_state)
        else:
            yield _File(f"{self._folder}/state", INFINIBAND_STATE, self.labels, state)
        yield _File(f"{self._folder}/phys_state", INFINIBAND_PHYSICAL_STATE, self.labels, physical_state)
        yield _File(f"{self._folder}/rate", INFINIBAND_RATE, self.labels, rate)
        if net and layer != "InfiniBand":
            yield _File(f"{net}/carrier_changes", INFINIBAND_CARRIER_CHANGES, self.labels, counter)

    def _counters(self) -> Iterator[_File]:
        """Yield the counters there are, and of several files for one number the one that tells most."""
        found: dict[str, list[str]] = {}
        for name in ("counters", "counters_ext", "hw_counters"):
            self._list(f"{self._folder}/{name}", name, found)
        if self._first:
            self._list(f"{self._device}/hw_counters", "device/hw_counters", found)
        for row_name, paths in found.items():
            row = BY_NAME[row_name]
            assert isinstance(row, PortCounter)
            if row.labels == PORT:
                opened = [path for path in paths if path in self._files]
                path = paths[0] if len(paths) == 1 else opened[0] if opened else max(paths, key=_told)
                yield _Counter(path, row, self.labels)
            else:
                for path in paths:
                    yield _Counter(path, row, (*self.labels, os.path.basename(path).removesuffix("_err")))

    def _list(self, folder: str, known_as: str, found: dict[str, list[str]]) -> None:
        """Add the counters in a folder to what was found of each row, by the row's name."""
        listed = names(folder)
        if listed:
            self._folders[folder] = signature(folder)
        for name in listed:
            row = COUNTERS.get(f"{known_as}/{name}")
            if row is not None:
                found.setdefault(row.name, []).append(f"{folder}/{name}")

    def _sensors(self) -> Iterator[_File]:
        monitors = f"{self._device}/device/hwmon"
        for folder in [f"{monitors}/{name}" for name in names(monitors)] if self._first else ():
            for name in names(folder):
                if re.fullmatch(r"temp[0-9]+_input", name):
                    number = name.removesuffix("_input")
                    labels = (*self.labels, _text(f"{folder}/{number}_label") or number)
                    yield _File(f"{folder}/{name}", INFINIBAND_TEMPERATURE, labels, temperature)

    def read(self, now: float) -> tuple[list[Sample], bool]:
        """Return the port's samples, and whether its link or its highest rate has news worth keeping."""
        samples: list[Sample] = []
        failed: list[tuple[_File, int | None]] = []
        pread, append = self._pread, samples.append
        for file in self._open:
            try:
                data = pread(file.fd, LONGEST, 0)
            except OSError as error:
                failed.append((file, error.errno))
                continue
            if data != file.data:
                file.take(data)
            if file.sample is not None:
                append(file.sample)
                if file.stuck is not None:
                    append(file.stuck)
        if failed:
            self._failed(failed)
        news = self._watch(now)
        if news or not self._summary:
            self._summary = self._summarize()
        return samples + self._summary, news

    def _failed(self, failures: list[tuple[_File, int | None]]) -> None:
        """Have no sample of files that failed, and leave alone what was refused or is gone."""
        for file, reason in failures:
            file.lose()
            if reason in GONE:
                file.close()
        refused = {file.path for file, reason in failures if reason == errno.EINVAL}
        if refused:
            log.warning("%s: the firmware refuses %s; left alone", "/".join(self.labels), ", ".join(sorted(refused)))
            self._refused |= refused
            self._summary = []
            for path in refused:
                self._files[path].close()
        self._open = [file for file in self._open if file.fd >= 0]

    def recall(self, expected: float | None, link: Link) -> None:
        """Go on with the highest rate, in Gb/s, and the link of an earlier process."""
        self.expected, self.link = expected, link
        self._summary = []

    def clear(self) -> None:
        """Forget the flaps that make the link flapping."""
        self.link.clear()
        self._summary = []

    def _watch(self, now: float) -> bool:
        number = self._state.number if self._state is not None else None
        gigabits = self._rate.number if self._rate is not None else None
        news = self.link.see(None if number is None else int(number), now)
        # A port that is down shows the lowest rate.
        if gigabits is not None and number in ACTIVE and (self.expected is None or gigabits > self.expected):
            self.expected, news = gigabits, True
        return news

    def _summarize(self) -> list[Sample]:
        numbers: tuple[tuple[Metric, float | None], ...] = (
            (INFINIBAND_EXPECTED_RATE, self.expected), (INFINIBAND_FLAPS, self.link.flaps),
            (INFINIBAND_DROPS, self.link.drops), (INFINIBAND_FLAPPING, self.link.flapping),
            (INFINIBAND_REFUSED, len(self._refused)),
        )
        return [(row, self.labels, float(number)) for row, number in numbers if number is not None]


def _first_line(data: bytes) -> str:
    return data.decode("ascii", "replace").partition("\n")[0].strip()


def _text(path: str) -> str:
    """Return the first line of a file, empty if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _first_line(os.read(file, 4096))
        finally:
            os.close(file)
    except OSError:
        return ""


def _told(path: str) -> tuple[int, bool]:
    """Return what makes one of several files for a number the better: what it counted, and its width."""
    return counter(_text(path)) or 0, "counters_ext" in path


def names(folder: str) -> list[str]:
    """Return the names in a folder, none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def signature(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or a folder gains or loses a file; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
