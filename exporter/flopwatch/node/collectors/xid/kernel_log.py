"""Reader of the kernel log: `/dev/kmsg`, the socket of `flopwatch kmsg`, or a regular file of such records.

The device (https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg) gives one record per read, from the oldest
one in the kernel's ring buffer, and requires root or CAP_SYSLOG. The socket (node/kmsg.py) streams the same records to
unprivileged processes. The ring is short, so a thread also reads both between scrapes. Lost records show as a gap in
the record numbers.

Work and memory are bounded: a pull ends after SLICE seconds or FILE_BYTES and later continues from there. Only records
that match `relevant` are kept, at most MAX_ENTRIES of them.
"""

import os
import re
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from flopwatch.node.collectors.xid.kernel_lines import KernelRecord, record

SOCKET_SCHEME = "unix:"
# Line of the socket after the records of the ring. No kernel record begins with a space.
CAUGHT_UP = b" caught up"

# The kernel refuses a read into less than the record. Its longest is 8 KiB with all its properties.
RECORD_BYTES = 64 << 10
FILE_BYTES = 8 << 20
CHUNK_BYTES = 256 << 10
MAX_ENTRIES = 20_000
SLICE = 0.25  # seconds of one pull
CONNECT = 0.3  # seconds to connect to the socket, and as many to catch up on its backlog
PAUSE = 0.05  # seconds between the pulls of the thread, so that a flood is read in large pieces
RETRY = 1.0  # seconds between attempts to open


class LogEntry(NamedTuple):
    """One relevant record, and the Unix time of its writing."""

    record: KernelRecord
    at: float


class KernelLog:
    """Records of one log since a place in it.

    `where` is a path, or `unix:` and the path of a socket. The place is `numbering` (this boot's record numbers, or one
    file's bytes) and `place` in it. A place of another numbering is ignored, and the log is read from its beginning.
    `since` is the Unix time at which that place was reached. The clock in the records runs unadjusted and may be
    minutes off after months. Live records were written since the last pull, which bounds their time.
    """

    def __init__(
        self,
        where: str,
        relevant: re.Pattern[bytes],
        boot_id: str,
        booted: Callable[[], float],
        clock: Callable[[], float] = time.time,
        numbering: str = "",
        place: int = 0,
        since: float = float("-inf"),
    ) -> None:
        self.where = where
        self.numbering, self.place, self.since = numbering, place, since
        self.lost = 0
        self.error = "not read yet"
        self._relevant = relevant
        self._boot = f"boot {boot_id}"
        self._booted, self._clock = booted, clock
        self._lock = threading.Lock()
        self._entries: deque[LogEntry] = deque()
        self._next = place
        self._expected: int | None = None
        self._open: _Device | _Socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def live(self) -> bool:
        """Return whether this is the running kernel's log, with numbered records, and not a file."""
        return self._open is not None

    def follow(self) -> None:
        """Read also between drains. It has no effect on a file, or while a device cannot be opened."""
        if not self.live and not self.where.startswith(SOCKET_SCHEME):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._follow, name="kernel log", daemon=True)
            self._thread.start()

    def drain(self) -> list[LogEntry]:
        """Return the records since the last drain; `numbering`, `place` and `since` are then those after them."""
        with self._lock:
            self._pull()
            entries = list(self._entries)
            self._entries.clear()
            self.place = self._next
            return entries

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        with self._lock:
            self._hang_up("closed")

    def _follow(self) -> None:
        pause = PAUSE
        while not self._closed.wait(pause):
            opened = self._open
            if opened is not None and not _readable(opened.file, RETRY):
                continue
            with self._lock:
                # `drain` opens a failed device again and reports the error. A socket is opened here as well.
                if self._open is not None or self.where.startswith(SOCKET_SCHEME):
                    self._pull()
                pause = PAUSE if self.live else RETRY

    def _pull(self) -> None:
        """Read new records, as far as one pull goes."""
        if self._closed.is_set():
            return
        try:
            if self._open is None:
                self._begin()
            elif self._open.pull(self._line):
                self.since = self._clock()
            if self._open is None:
                self._pull_file()
        except OSError as error:
            self._hang_up(f"cannot read {self.where}: {error.strerror or error}")
        else:
            self.error = ""

    def _begin(self) -> None:
        """Open the log and read its content. A file is opened for each pull instead."""
        if self.where.startswith(SOCKET_SCHEME):
            self._continue_in(self._boot)
            self._open = _Socket(self.where.removeprefix(SOCKET_SCHEME), self._next)
        else:
            device = os.open(self.where, os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISCHR(os.fstat(device).st_mode):
                os.close(device)
                return
            self._continue_in(self._boot)
            self._open = _Device(device)
        # Records missing after the place are lost, also if an earlier process read up to it.
        self._expected = self._next or None
        if self._open.pull(self._line):
            self.since = self._clock()

    def _hang_up(self, reason: str) -> None:
        self.error = reason
        if self._open is not None:
            self._open.close()
            self._open = None

    def _continue_in(self, numbering: str) -> None:
        if numbering != self.numbering:
            self.numbering, self._next, self.since = numbering, 0, float("-inf")

    def _line(self, line: bytes) -> None:
        """Accept one numbered record, unless it is an earlier one."""
        number = line.split(b",", 2)[1:2]
        if not number or not number[0].isdigit() or len(number[0]) > 15:
            return
        sequence = int(number[0])
        if sequence < self._next:
            return
        if self._expected is not None and sequence > self._expected:
            self.lost += sequence - self._expected
        self._next = self._expected = sequence + 1
        if self._relevant.search(line):
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        entry = record(line.decode("utf-8", "replace"))
        if entry is None:
            return
        if len(self._entries) >= MAX_ENTRIES:
            self.lost += 1
            return
        at = self._booted() + entry.at
        if self.live:
            now = self._clock()
            at = min(max(at, self.since), now)
        self._entries.append(LogEntry(entry, at))

    def _pull_file(self) -> None:
        with open(self.where, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            self._continue_in(f"file {status.st_dev}:{status.st_ino}")
            if status.st_size < self._next:
                self._next = 0
            data = os.pread(file.fileno(), FILE_BYTES, self._next)
        # Text after the last line break is still being written, unless it is too long for a record.
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) > RECORD_BYTES else 0)
        self._next += end
        done = 0
        for match in self._relevant.finditer(data, 0, end):
            if match.start() >= done:
                begin, done = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end(), end)
                done = done if done >= 0 else end
                self._keep(data[begin : min(done, begin + RECORD_BYTES)])


class _Device:
    """Open /dev/kmsg, with its file descriptor."""

    def __init__(self, file: int) -> None:
        self.file = file

    def pull(self, take: Callable[[bytes], None]) -> bool:
        """Pass records to `take`. Return whether these were all. Raises OSError."""
        until = time.monotonic() + SLICE
        while time.monotonic() < until:
            try:
                data = os.read(self.file, RECORD_BYTES)
            except BlockingIOError:
                return True
            except BrokenPipeError:
                continue  # overwritten before it was read; the next one is the oldest that is left
            if not data:
                return True
            take(data.partition(b"\n")[0])
        return False

    def close(self) -> None:
        os.close(self.file)


class _Socket:
    """Connection to `flopwatch kmsg`, which sends the records from `sequence` on."""

    def __init__(self, path: str, sequence: int) -> None:
        self.file = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = b""
        self._caught_up = False
        self._too_long = False
        try:
            self.file.settimeout(CONNECT)
            self.file.connect(path)
            self.file.sendall(b"%d\n" % sequence)
            self.file.setblocking(False)
        except OSError:
            self.file.close()
            raise

    def pull(self, take: Callable[[bytes], None]) -> bool:
        """Pass records to `take`. Return whether these were all. Raises OSError."""
        begin = time.monotonic()
        while time.monotonic() < begin + SLICE:
            try:
                data = self.file.recv(CHUNK_BYTES)
            except BlockingIOError:
                if self._caught_up or not _readable(self.file, begin + CONNECT - time.monotonic()):
                    return self._caught_up
                continue
            if not data:
                raise ConnectionResetError("the server closed the connection")
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                if not self._too_long:
                    take(line)
                self._too_long = False
                self._caught_up = self._caught_up or line == CAUGHT_UP
            if len(self._buffer) > RECORD_BYTES:
                self._buffer, self._too_long = b"", True
        return False

    def close(self) -> None:
        self.file.close()


def _readable(file: int | socket.socket, seconds: float) -> bool:
    """Return whether there is something to read within this time, and False if the file is closed."""
    ready = select.poll()
    with suppress(OSError, ValueError):
        ready.register(file, select.POLLIN)
        return bool(ready.poll(max(0.0, seconds) * 1000))
    return False
