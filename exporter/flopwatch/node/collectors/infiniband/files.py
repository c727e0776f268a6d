"""Files of a port in sysfs: parsers of their content, and open files with their samples."""

import os
import re
from collections.abc import Callable

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, PortCounter, Sample

MAX_BYTES = 64  # bytes, more than any file that is read at each scrape

Parser = Callable[[str], "float | None"]
Pread = Callable[[int, int, int], bytes]  # file, length, offset, as os.pread


def counter(text: str) -> int | None:
    """Parse a counter file's text. Return None for `N/A (no PMA)` and anything but an unsigned 64-bit number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    number = int(text)
    return number if number < 2**64 else None


def state(text: str) -> int | None:
    """Parse a port state: 4 for `4: ACTIVE`, or None for other text."""
    match = re.match(r"([0-9]{1,2}):", text)
    return int(match[1]) if match else None


def physical_state(text: str) -> int | None:
    """Parse a physical port state: 5 for `5: LinkUp`, None where a driver repeats the port state (`4: ACTIVE`)."""
    return None if text.endswith("ACTIVE") else state(text)


def rate(text: str) -> float | None:
    """Parse a port rate in Gb/s: 400 for `400 Gb/sec (4X NDR)`, or None for other text."""
    match = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text)
    return float(match[1]) if match else None


def local_identifier(text: str) -> int | None:
    """Parse a port's local identifier (LID): 283 for `0x11b`, or None for other text."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", text) else None


def operational_state(text: str) -> int | None:
    """Parse a network interface's `operstate` into a port state: 4 for `up`, 1 for `down`, else None."""
    return {"up": 4, "down": 1, "lowerlayerdown": 1, "notpresent": 1}.get(text)


def temperature(text: str) -> int | None:
    """Parse a hwmon temperature in thousandths of a degree Celsius, or return None for other text."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,7}", text) else None


def risen(last: int, number: int, wrap: int) -> int:
    """Return the increase from `last` to `number`. A fall by over half of `wrap` (0: none) is a wrap, else a reset."""
    if number >= last:
        return number - last
    return number - last + wrap if 2 * (last - number) > wrap > last else number


class SysfsFile:
    """One open sysfs file of a port, and the sample of its content. `stuck` is the sample of a saturated counter."""

    __slots__ = ("data", "fd", "labels", "number", "parse", "path", "row", "sample", "stuck")

    def __init__(self, path: str, row: Metric, labels: tuple[str, ...], parse: Parser) -> None:
        self.path, self.row, self.labels, self.parse = path, row, labels, parse
        self.fd = -1
        self.data = b""
        self.number: float | None = None
        self.sample: Sample | None = None
        self.stuck: Sample | None = None

    def open(self) -> bool:
        """Open the file. Return whether that succeeded."""
        self.lose()
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def take(self, data: bytes) -> None:
        """Parse the file's new content into `number` and `sample`."""
        self.data = data
        self.number = self.parse(first_line(data))
        self.sample = None if self.number is None else (self.row, self.labels, self.number)

    def lose(self) -> None:
        """Drop content, number and sample, because the file cannot be read."""
        self.data, self.number, self.sample, self.stuck = b"", None, None, None

    def close(self) -> None:
        """Close the file and drop the sample."""
        self.lose()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


class CounterFile(SysfsFile):
    """Counter file of a port. Its total keeps rising when the hardware register wraps or is cleared.

    `quiet`: no sample before the first event. `full`: a sample of its own while the register is stuck.
    """

    __slots__ = ("_full", "_last", "_quiet", "_total", "_unit", "_wrap", "replaced")

    def __init__(
        self, path: str, row: PortCounter, labels: tuple[str, ...], name: str, quiet: bool, full: bool
    ) -> None:
        super().__init__(path, row, labels, counter)
        self._quiet = quiet
        self._full = -1 if not full else 2**row.bits - 1 if row.sticks else 2**32 - 1 if name in row.legacy else -1
        self._wrap = 2**row.bits if row.bits < 64 and not row.sticks else 0
        self._unit = 4 if name in row.words else 1
        self._last = self._total = 0
        self.replaced = False  # the device was replaced, so a fall is not a wrap

    def take(self, data: bytes) -> None:
        """Add the register's increase to the total and update the sample. Text that is not a number gives none."""
        self.data = data
        self.stuck = self.sample = None
        number = counter(first_line(data))
        if number is None:
            return
        self._total += risen(self._last, number, 0 if self.replaced else self._wrap)
        self._last, self.replaced = number, False
        if number == self._full:
            self.stuck = (m.INFINIBAND_COUNTER_SATURATED, (*self.labels, os.path.basename(self.path)), 1)
        if self._total or not self._quiet:
            self.sample = (self.row, self.labels, self._total * self._unit)

    def dump(self) -> tuple[int, int] | None:
        """Return (total, register value) to store, or None while nothing was counted."""
        return (self._total, self._last) if self._total else None

    def resume(self, total: int, last: int, replaced: bool) -> None:
        """Continue from an earlier process. `replaced`: the register is another one, so a fall is not a wrap."""
        self._total, self._last, self.replaced = total, last, replaced


def first_line(data: bytes) -> str:
    """Return the first line as stripped text, with non-ASCII bytes replaced."""
    return data.decode("ascii", "replace").partition("\n")[0].strip()


def first_line_of(path: str) -> str:
    """Return the first line of a file, empty if it is unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            return first_line(file.read(4096))
    except OSError:
        return ""


def names(folder: str) -> list[str]:
    """Return the sorted names in a folder, empty if it is unreadable."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
