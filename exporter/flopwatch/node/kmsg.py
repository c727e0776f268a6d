"""Privileged process that streams /dev/kmsg to an unprivileged exporter over a unix socket.

A client sends one line: the number of the first record that it wants, or 0 for all that the kernel has. It receives
records as in https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg. The line ` caught up` follows the records
that already existed. A slow client misses records, and one that stops reading is disconnected.
"""

import errno
import grp
import os
import select
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from flopwatch.settings import KmsgSettings, SettingsError

CAUGHT_UP = b" caught up\n"
RECORD_BYTES = 64 << 10  # a read must have room for a whole record, at most 8 KiB
CHUNK_BYTES = 64 << 10
REQUEST_BYTES = 24
CLIENTS = 16
REQUEST_SECONDS = 10.0
STUCK_SECONDS = 60.0
TICK = 0.25  # seconds between reads of a regular file, since poll() cannot wait for its next line


class _Gone(Exception):
    """Raised if a client disconnected, sent a malformed request or is too slow."""


class _Client:
    def __init__(self, connection: socket.socket, kmsg: Path, now: float) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
        self._waits = stat.S_ISCHR(os.fstat(self._log).st_mode)
        self._request = b""
        self._first: int | None = None
        self._pending = b""
        self._caught_up = False
        self._progress = now

    def register(self, ready: select.poll) -> None:
        ready.register(self._connection, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if self._waits and self._first is not None and not self._pending:
            ready.register(self._log, select.POLLIN)

    def timeout(self) -> float:
        """Return the seconds after which `turn` must be called even if poll() reports no event."""
        if self._first is None or self._pending:
            return REQUEST_SECONDS
        return STUCK_SECONDS if self._waits else TICK if self._caught_up else 0.0

    def turn(self, now: float) -> None:
        """Read and send without blocking. Raises _Gone or OSError if the connection is to be closed."""
        self._listen()
        if self._first is None:
            if now - self._progress > REQUEST_SECONDS:
                raise _Gone
            return
        if not self._pending:
            self._read()
            self._progress = now
        if self._pending:
            with suppress(BlockingIOError):
                self._pending = self._pending[self._connection.send(self._pending) :]
                self._progress = now
        if now - self._progress > STUCK_SECONDS:
            raise _Gone

    def _listen(self) -> None:
        try:
            data = self._connection.recv(4096)
        except BlockingIOError:
            return
        if not data:
            raise _Gone
        if self._first is None:
            self._request += data
            number, end, _ = self._request.partition(b"\n")
            if len(number) > REQUEST_BYTES or (end and not number.isdigit()):
                raise _Gone
            if end:
                self._first = int(number)

    def _read(self) -> None:
        while len(self._pending) < CHUNK_BYTES:
            try:
                data = os.read(self._log, RECORD_BYTES)
            except BlockingIOError:
                data = b""
            except BrokenPipeError:
                continue  # overwritten before it was read; the client sees the gap
            if not data:
                if not self._caught_up:
                    self._pending, self._caught_up = self._pending + CAUGHT_UP, True
                return
            if not self._waits or self._first is None or _number(data) >= self._first:
                self._pending += data

    def close(self) -> None:
        self._connection.close()
        os.close(self._log)


def _number(data: bytes) -> int:
    number = data.split(b",", 2)[1:2]
    return int(number[0]) if number and number[0].isdigit() else sys.maxsize


class Server:
    """Server that streams the kernel log to every client of a listening socket."""

    def __init__(self, listener: socket.socket, kmsg: Path) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._kmsg = kmsg
        self._clients: list[_Client] = []

    def turn(self, seconds: float) -> None:
        """Wait at most `seconds` for events of the sockets and the log, and handle them."""
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        for client in self._clients:
            client.register(ready)
        ready.poll(min([seconds, *(client.timeout() for client in self._clients)]) * 1000)
        now = time.monotonic()
        with suppress(BlockingIOError):
            self._accept(self._listener.accept()[0], now)
        for client in list(self._clients):
            try:
                client.turn(now)
            except (_Gone, OSError):
                self._clients.remove(client)
                client.close()

    def _accept(self, connection: socket.socket, now: float) -> None:
        if len(self._clients) < CLIENTS:
            with suppress(OSError):
                self._clients.append(_Client(connection, self._kmsg, now))
                return
        connection.close()

    def close(self) -> None:
        """Disconnect all clients."""
        for client in self._clients:
            client.close()
        self._clients.clear()


def listen(path: Path, group: str = "") -> socket.socket:
    """Return a listening unix socket at `path` for this user and `group` only. Raises SettingsError."""
    try:
        owner = -1 if not group else int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SettingsError(f"--group {group}: there is no such group") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if group:
            os.chown(path, -1, owner)
        listener.listen(CLIENTS)
    except OSError as error:
        listener.close()
        raise SettingsError(f"--listen {path}: {error}") from error
    return listener


def _clear(path: Path) -> None:
    """Remove a socket at which no process listens. Raises OSError if one listens, or `path` is not a socket."""
    if not path.is_socket():
        if path.exists():
            raise OSError("the path exists and is not a socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError("another process listens there")


def run(settings: KmsgSettings) -> None:
    """Stream the kernel log until SIGTERM or SIGINT. Raises SettingsError if the log or the socket cannot be opened."""
    try:
        log = os.open(settings.kmsg, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if stat.S_ISDIR(os.fstat(log).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        finally:
            os.close(log)
    except OSError as error:
        raise SettingsError(
            f"--kmsg {settings.kmsg}: {error.strerror}; the kernel log needs root or CAP_SYSLOG, and a "
            "device that the container may open (docs/privileges.md)"
        ) from error
    listener = listen(settings.listen, settings.group)
    inode = settings.listen.stat().st_ino
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = Server(listener, settings.kmsg)
    print(f"streaming {settings.kmsg} at {settings.listen}", file=sys.stderr, flush=True)
    try:
        while True:
            server.turn(60.0)
    finally:
        server.close()
        listener.close()
        # A successor may have created its own socket at this path.
        with suppress(OSError):
            if settings.listen.stat().st_ino == inode:
                settings.listen.unlink()
