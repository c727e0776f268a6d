"""Processes of this node that are not ours: whether they live, by which pid the host knows them, and how they ended.

Who is not the parent is told how a process ended by `/proc/PID/stat` while it is a zombie (proc(5), field 52, which
needs the right to trace it), and after that by a pidfd that was opened while it lived, on Linux 6.15 or newer
(PIDFD_INFO_EXIT in linux/pidfd.h). Else nobody tells.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO: _IOWR(0xFF, 11, 64 bytes)
_INFO = struct.Struct("=QQ11Ii")  # mask, cgroup, pids and owners, exit code
_EXIT = 1 << 3

Process = tuple[int, int]  # pid in the innermost namespace, start in clock ticks since boot


# States of proc(5) in which a process does nothing by itself. Not t: a debugger looks at it.
BLOCKED = {"T": "stopped", "D": "uninterruptible"}


def process_alive(pid: int, start_ticks: int) -> bool:
    """Return whether this process still runs: the same one, not a later process with its id, and not a zombie."""
    return process_state(pid, start_ticks) not in ("Z", "X")


def process_state(pid: int, start_ticks: int) -> str:
    """Return its state as proc(5) has it: X if it is gone or another's, nothing if it is hidden from us."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no process has such a pid, whatever was pushed
        return "X"
    except PermissionError:
        pass
    try:
        fields = _stat(f"/proc/{pid}")
    except ProcessLookupError:
        return "X"
    except OSError:
        return ""  # hidden from us (hidepid), but kill() found it
    return fields[0] if start_ticks in (0, int(fields[19])) else "X"


def _stat(process: str | Path) -> list[str]:
    """Return the fields of proc(5)'s stat from the third on, the state; the command name before may hold anything."""
    with open(f"{process}/stat", "rb") as file:
        return file.read().decode(errors="replace").rpartition(")")[2].split()


class Watch:
    """A process that lives now and is to tell how it ended; a file descriptor, closed with this object.

    `state` is its state when it was looked at, and `since` when it was first found in it, on the caller's clock.
    """

    state, since = "", 0.0

    def __init__(self, pid: int, start_ticks: int) -> None:
        self._pid, self._start_ticks, self._fd = pid, start_ticks, -1
        if hasattr(os, "pidfd_open"):  # Python may have been built without
            with suppress(OSError, OverflowError):
                self._fd = os.pidfd_open(pid)
        if not process_alive(pid, start_ticks):  # and now it is somebody else's
            self.close()

    def look(self, now: float) -> bool:
        """Look at its state; return whether it is still there."""
        state = process_state(self._pid, self._start_ticks)
        if BLOCKED.get(state) != BLOCKED.get(self.state):
            self.since = now
        self.state = state
        return state not in ("Z", "X")

    def ended(self) -> tuple[str, str]:
        """Return `signal` and its name, or `exit` and the status; two empty texts if that is not known."""
        code = self._of_zombie() or self._of_reaped()
        if code & 0x7F:
            try:
                return "signal", signal.Signals(code & 0x7F).name
            except ValueError:
                return "signal", str(code & 0x7F)
        return ("exit", str(code >> 8)) if code else ("", "")

    def _of_zombie(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = _stat(f"/proc/{self._pid}")
            if fields[0] == "Z" and self._start_ticks in (0, int(fields[19])):
                return int(fields[49])
        return 0

    def _of_reaped(self) -> int:
        if self._fd >= 0:
            with suppress(OSError):
                told = fcntl.ioctl(self._fd, _GET_INFO, _INFO.pack(_EXIT, *[0] * 12, 0))
                mask, *_, code = _INFO.unpack(told)
                return int(code) if mask & _EXIT else 0
        return 0

    def close(self) -> None:
        """Close the file descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Close the file descriptor."""
        self.close()


def pids(wanted: Collection[Process], proc: Path = Path("/proc")) -> dict[Process, int]:
    """Return by which pid this process knows others, of containers, that know themselves by another.

    A start, in ticks since boot, is the same in every namespace; with the pid in the innermost it is one process's.
    """
    found: dict[Process, int] = {}
    starts = {start for _, start in wanted}
    processes: list[Path] = []
    with suppress(OSError):  # no /proc here
        processes = list(proc.iterdir())
    for process in processes:
        if not process.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            start = int(_stat(process)[19])
            if start in starts:
                status = (process / "status").read_text(errors="replace")
                inner = next((line for line in status.splitlines() if line.startswith("NSpid:")), "").split()[-1]
                if (int(inner), start) in wanted:
                    found[int(inner), start] = int(process.name)
    return found
