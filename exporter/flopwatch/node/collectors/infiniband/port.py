"""One InfiniBand, RoCE or EFA port: its files in sysfs, and what they say.

Files: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband. Which file a counter comes from and
how wide its register is, is in its catalogue row. Every read of `counters/` is a query to the firmware, one of `state`,
`phys_state` or `rate` a port query, one in `hw_counters/` refreshes that folder for its `lifespan` (10 ms): each file
is read once per scrape. Files stay open and are read again with pread, at a sixth of the cost of opening them.

Missing on some hardware: `hw_counters/` (hfi1, mlx4), `counters/` (EFA, whose `state` and `rate` are constants); a
counter reads `N/A (no PMA)` on iWARP, and ends in EINVAL on ports that the fabric manager owns. What cannot be read is
no sample, and hides no other counter; what the firmware refuses is asked again more and more rarely, and of a port that
refuses all only one file, since the kernel logs each try. Bit error rates are not in sysfs: mlxlink and ibdiagnet have
them, as root.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flopwatch.catalogue import (
    BY_NAME,
    INFINIBAND_CARRIER_CHANGES_TOTAL,
    INFINIBAND_COUNTER_SATURATED,
    INFINIBAND_LINK_FLAPPING,
    INFINIBAND_LINK_FLAPS_TOTAL,
    INFINIBAND_LINK_OUTAGES_TOTAL,
    INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND,
    INFINIBAND_PORT_LID,
    INFINIBAND_PORT_PHYSICAL_STATE_ID,
    INFINIBAND_PORT_RATE_BYTES_PER_SECOND,
    INFINIBAND_PORT_STATE_ID,
    INFINIBAND_PORT_SUBNET_MANAGER_LID,
    INFINIBAND_PORT_UNREAD_FILES,
    INFINIBAND_TEMPERATURE_CELSIUS,
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
GONE = (errno.ENODEV, errno.ESTALE, errno.ENOENT)
# What the firmware says to a read it does not want. So many files of a kind, and none that answers, speak for all.
REFUSED = (errno.EINVAL, errno.ENXIO)
MAX_REFUSED = 3
# Seconds until a refused file is asked again, from first to last twice as long each time.
FIRST_WAIT, MAX_WAIT = 60.0, 3600.0
MAX_BYTES = 64  # bytes; more than any file has that is read at each scrape

COUNTERS: dict[str, PortCounter] = {
    file: row for row in all_metrics() if isinstance(row, PortCounter) for file in row.files
}
WORDS = re.compile(r"/port_(xmit|rcv)_data(_64)?$")  # in 4-byte words
# 64 bits wide, but 32 that stick on an adapter without extended counters (mlx4, ConnectX-2 and older).
LEGACY = re.compile(r"/counters/port_(xmit|rcv)_(data|packets)$")

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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


class _Counter(_File):
    """A counter, which goes on where its register wraps or is cleared."""

    __slots__ = ("_full", "_last", "_quiet", "_total", "_unit", "_wrap", "anew")

    def __init__(self, path: str, row: PortCounter, labels: tuple[str, ...]) -> None:
        super().__init__(path, row, labels, counter)
        self._quiet = row.quiet
        self._full = 2**row.bits - 1 if row.sticks else 2**32 - 1 if LEGACY.search(path) else -1
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
            self.stuck = (INFINIBAND_COUNTER_SATURATED, (*self.labels, os.path.basename(self.path)), 1)
        if self._total or not self._quiet:
            self.sample = (self.row, self.labels, self._total * self._unit)

    def dump(self) -> tuple[int, int] | None:
        """Return the count and the register, None while the register alone tells the count to another process."""
        counts = self._total != self._last or 2 * self._last > self._wrap > 0
        return (self._total, self._last) if counts else None

    def resume(self, total: int, last: int, anew: bool) -> None:
        """Go on from the count and the register of an earlier process."""
        self._total, self._last, self.anew = total, last, anew


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
        self._refused: dict[str, tuple[float, float]] = {}  # by path: when to ask again, how long to wait the next time
        self._asking: dict[str, float] = {}  # what is asked again by this read, and how long to wait the next time
        self._ask_at = 0.0
        self._complained: set[str] = set()
        self._counts: Mapping[str, tuple[int, int]] = {}  # of an earlier process, by the file's name in the catalogue
        self._counts_inode: int | None = None
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
            self._complained.clear()
            for counted in self._files.values():
                if isinstance(counted, _Counter):
                    counted.anew = True
        device, port = self.labels
        layer = _text(f"{self._folder}/link_layer")
        self._net = self._net_devices()
        self._first = port == min(names(f"{self._device}/ports"), default=port)
        self.place = pci.place(Path(self._device, "device"))
        self.identity = {
            "device": device,
            "port": port,
            "host": host,
            "board_id": _text(f"{self._device}/board_id"),
            "firmware_version": _text(f"{self._device}/fw_ver"),
            "hca_type": _text(f"{self._device}/hca_type"),
            "link_layer": layer,
            "net_device": self._net[0] if self._net else "",
            "role": "",
            "rail": "",
        }
        self.seldom = []
        answers = layer == "InfiniBand" and f"{self._folder}/state" not in self._refused
        for row, file in (
            ((INFINIBAND_PORT_LID, "lid"), (INFINIBAND_PORT_SUBNET_MANAGER_LID, "sm_lid")) if answers else ()
        ):
            number = local_identifier(_text(f"{self._folder}/{file}"))
            if number is None:
                break
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
        files = [*self._states(), *self._sensors(), *self._counters()]
        files = [self._files.setdefault(file.path, file) for file in files]
        self._open = [file for file in files if file.path not in self._refused and file.open()]
        self._state = next((file for file in self._open if file.row is INFINIBAND_PORT_STATE_ID), None)
        self._rate = next((file for file in self._open if file.row is INFINIBAND_PORT_RATE_BYTES_PER_SECOND), None)
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
            yield _File(f"{net}/operstate", INFINIBAND_PORT_STATE_ID, self.labels, operational_state)
        else:
            yield _File(f"{self._folder}/state", INFINIBAND_PORT_STATE_ID, self.labels, state)
        yield _File(f"{self._folder}/phys_state", INFINIBAND_PORT_PHYSICAL_STATE_ID, self.labels, physical_state)
        yield _File(f"{self._folder}/rate", INFINIBAND_PORT_RATE_BYTES_PER_SECOND, self.labels, rate)
        if net and layer != "InfiniBand":
            yield _File(f"{net}/carrier_changes", INFINIBAND_CARRIER_CHANGES_TOTAL, self.labels, counter)

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
                counted = [path for path in paths if path in self._files or self._known_as(path) in self._counts]
                path = paths[0] if len(paths) == 1 else counted[0] if counted else max(paths, key=_told)
                yield self._counter(path, row, self.labels)
            else:
                for path in paths:
                    yield self._counter(path, row, (*self.labels, os.path.basename(path).removesuffix("_err")))

    def _counter(self, path: str, row: PortCounter, labels: tuple[str, ...]) -> _Counter:
        result = _Counter(path, row, labels)
        if path not in self._files and self._known_as(path) in self._counts:
            total, last = self._counts[self._known_as(path)]
            result.resume(total, last, anew=self._counts_inode != self._inode)
        return result

    def _known_as(self, path: str) -> str:
        """Return a counter's name in the catalogue."""
        ours = path.removeprefix(f"{self._folder}/")
        return ours if ours != path else f"device/{path.removeprefix(f'{self._device}/')}"

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
                    yield _File(f"{folder}/{name}", INFINIBAND_TEMPERATURE_CELSIUS, labels, temperature)

    def read(self, now: float) -> tuple[list[Sample], bool]:
        """Return the port's samples, and whether its link or its highest rate has news worth keeping."""
        if self._refused and now >= self._ask_at:
            self._ask_again(now)
        samples: list[Sample] = []
        failed: list[tuple[_File, int | None]] = []
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
        return samples + self._summary, news

    def _ask_again(self, now: float) -> None:
        """Open the files that were refused, and have waited long enough."""
        self._asking = {path: wait for path, (at, wait) in self._refused.items() if at <= now}
        self._refused = {path: told for path, told in self._refused.items() if path not in self._asking}
        self.open()

    def _hopeless(self, file: _File, failures: list[tuple[_File, int | None]]) -> bool:
        """Return whether what was asked of this file's kind was all refused: then so is what comes behind it."""
        counts = isinstance(file, _Counter)
        asked = self._open[: self._open.index(file) + 1]
        asked = [other for other in asked if isinstance(other, _Counter) == counts]
        refused = [other for other, reason in failures if reason in REFUSED and isinstance(other, _Counter) == counts]
        return len(refused) == len(asked) >= (1 if len(self._asking) > MAX_REFUSED else MAX_REFUSED)

    def _failed(self, failures: list[tuple[_File, int | None]], now: float) -> None:
        """Have no sample of files that failed, and leave alone what was refused or is gone."""
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
                "%s: the firmware refuses %s; asked again within the hour",
                "/".join(self.labels),
                ", ".join(sorted(new)) if len(new) <= MAX_REFUSED else f"{len(new)} files",
            )

    def recall(
        self, expected: float | None, link: Link, counts: Mapping[str, tuple[int, int]], inode: int | None
    ) -> None:
        """Go on with the highest rate, in Gb/s, the link and the counts of an earlier process.

        `inode` is the device's whose registers the counts are of, None if it was another boot's.
        """
        self.expected, self.link, self._counts, self._counts_inode = expected, link, counts, inode
        self._summary = []

    def dump(self, now: float, unix: float) -> dict[str, Any]:
        """Return what `recall` is to be told; `now` and `unix` are the same moment on the two clocks."""
        counted = [file for file in self._files.values() if isinstance(file, _Counter)]
        return {
            "gigabits": self.expected,
            "link": self.link.dump(now, unix),
            "inode": self._inode,
            "counters": {self._known_as(file.path): count for file in counted if (count := file.dump()) is not None},
        }

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
            (INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND, self.expected),
            (INFINIBAND_LINK_FLAPS_TOTAL, self.link.flaps),
            (INFINIBAND_LINK_OUTAGES_TOTAL, self.link.drops),
            (INFINIBAND_LINK_FLAPPING, self.link.flapping),
            (INFINIBAND_PORT_UNREAD_FILES, len(self._refused)),
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
