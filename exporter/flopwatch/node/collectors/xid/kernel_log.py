"""Reader of the kernel log: `/dev/kmsg`, the socket of `flopwatch kmsg`, or a regular file of such records.

The device (https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg) gives one record per read, from the oldest
one in the kernel's ring buffer, and requires root or CAP_SYSLOG. The socket (node/kmsg.py) streams the same records to
unprivileged processes. The ring buffer is short, so a thread also reads device or socket between scrapes. Lost records
show as a gap in the record numbers. One pull ends after SLICE seconds or FILE_BYTES, and the next one continues. Only
records that match `relevant` are kept, at most MAX_ENTRIES of them.
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
CAUGHT_UP = b" caught up"  # the socket's line after the ring's records, which never begin with a space

RECORD_BYTES = 64 << 10  # the kernel refuses a read into less than a record, at most 8 KiB with properties
FILE_BYTES = 8 << 20
CHUNK_BYTES = 256 << 10
MAX_ENTRIES = 20_000
SLICE = 0.25  # seconds of one pull
CONNECT = 0.3  # seconds to connect to the socket, and as many to catch up on its backlog
PAUSE = 0.05  # seconds between the pulls of the thread, so that a flood is read in large pieces
RETRY = 1.0  # seconds between attempts to open


class LogEntry(NamedTuple):
    """One relevant record, and the Unix time at which it was written."""

    record: KernelRecord
    at: float


class KernelLog:
    """Relevant records of one kernel log from a position on.

    `where` is a path, or `unix:` and the path of a socket. `place` is the number of the next record, or a file's next
    byte. It holds for the boot or file that `numbering` names, and others are read from their beginning. `since` is the
    Unix time at which `place` was reached. It bounds a new record's time, because the log's clock drifts.
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
        """Return whether the running kernel's log is open (device or socket, not a file)."""
        return self._open is not None

    def follow(self) -> None:
        """Start a thread that also reads between calls of `drain`. No effect on a file or an unopened device."""
        if not self.live and not self.where.startswith(SOCKET_SCHEME):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._follow, name="kernel log", daemon=True)
            self._thread.start()

    def drain(self) -> list[LogEntry]:
        """Return the relevant records since the last call. Move `numbering`, `place` and `since` past them."""
        with self._lock:
            self._pull()
            entries = list(self._entries)
            self._entries.clear()
            self.place = self._next
            return entries

    def close(self) -> None:
        """Stop reading and close the log."""
        self._closed.set()
        with self._lock:
            self._hang_up("closed")

    def _follow(self) -> None:
        pause = PAUSE
        while not self._closed.wait(pause):
            opened = self._open
            if opened is not None and not _readable(opened.file, 10 * RETRY):
                continue
            with self._lock:
                # `drain` opens a failed device again and reports the error. A socket is opened here as well.
                if self._open is not None or self.where.startswith(SOCKET_SCHEME):
                    self._pull()
                pause = PAUSE if self.live else RETRY

    def _pull(self) -> None:
        """Read new records within the limits of one pull. On OSError, close the log and set `error`."""
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
        """Open device or socket and read its first records. A regular file is opened by each pull instead."""
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
        self._expected = self._next or None  # lost if missing, also if an earlier process read up to it
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
        """Accept a record numbered above the last one, and keep it if it is relevant. Count missing numbers as lost."""
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
    """The open device /dev/kmsg, with its file descriptor `file`."""

    def __init__(self, file: int) -> None:
        self.file = file

    def pull(self, take: Callable[[bytes], None]) -> bool:
        """Pass new records to `take` for up to SLICE seconds. Return whether these were all. Raises OSError."""
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
    """Connection to `flopwatch kmsg`, which sends the records from number `sequence` on."""

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
        """Pass new records to `take` for up to SLICE seconds. Return whether these were all. Raises OSError."""
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
    """Wait up to `seconds` for data. Return whether a file or socket has data, False also if it is closed."""
    ready = select.poll()
    with suppress(OSError, ValueError):
        ready.register(file, select.POLLIN)
        return bool(ready.poll(max(0.0, seconds) * 1000))
    return False
