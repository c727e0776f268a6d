"""Training processes of this host: whether they live, their pid in the exporter's namespace, and how they ended.

Only the parent receives an exit status. Other processes can read it while the process is a zombie (`/proc/PID/stat`,
field 52, with the right to trace it). Afterwards, a pidfd opened before the end has it (PIDFD_INFO_EXIT, Linux 6.15).
"""

import fcntl
import os
import signal
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from flopwatch.node.collectors.cgroup import stat

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO: _IOWR(0xFF, 11, 64 bytes)
_INFO = struct.Struct("=QQ11Ii")  # mask, cgroup, pids and owners, exit code
_EXIT = 1 << 3

Process = tuple[int, int]  # pid in the innermost namespace, start in clock ticks since boot

BLOCKED = {"T": "stopped", "D": "uninterruptible"}  # states of proc(5) that cannot run; not t, a debugger's stop


def process_alive(pid: int, start_ticks: int) -> bool:
    """Return whether a process lives, and is neither a zombie nor one with another start (clock ticks since boot)."""
    return process_state(pid, start_ticks) not in ("Z", "X")


def process_state(pid: int, start_ticks: int) -> str:
    """Return the state of a process as in proc(5), X if it has ended, and an empty text if /proc hides it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter for a pushed pid that no process can have
        return "X"
    except PermissionError:
        pass
    try:
        fields = stat(pid)
    except ProcessLookupError:
        return "X"
    except OSError:
        return ""  # hidden (hidepid), but kill() found it
    return fields[0] if start_ticks in (0, int(fields[19])) else "X"


class ProcessWatch:
    """Observation of one process through a pidfd: its last `state`, and when blocking last began or ended (`since`)."""

    state, since = "", 0.0

    def __init__(self, pid: int, start_ticks: int) -> None:
        self._pid, self._start_ticks, self._fd = pid, start_ticks, -1
        if hasattr(os, "pidfd_open"):  # Python may have been built without
            with suppress(OSError, OverflowError):
                self._fd = os.pidfd_open(pid)
        if not process_alive(pid, start_ticks):  # the pidfd may be that of a later process
            self.close()

    def look(self, now: float) -> bool:
        """Read the state of the process at the time `now`, and return whether it lives."""
        state = process_state(self._pid, self._start_ticks)
        if BLOCKED.get(state) != BLOCKED.get(self.state):
            self.since = now
        self.state = state
        return state not in ("Z", "X")

    def ended(self) -> tuple[str, str]:
        """Return `signal` and its name, or `exit` and the status, or two empty texts if the end is unknown."""
        code = self._of_zombie() or self._of_reaped()
        if code & 0x7F:
            try:
                return "signal", signal.Signals(code & 0x7F).name
            except ValueError:
                return "signal", str(code & 0x7F)
        return ("exit", str(code >> 8)) if code else ("", "")

    def _of_zombie(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = stat(self._pid)
            if fields[0] == "Z" and self._start_ticks in (0, int(fields[19])):
                return int(fields[49])
        return 0

    def _of_reaped(self) -> int:
        if self._fd >= 0:
            with suppress(OSError):
                answer = fcntl.ioctl(self._fd, _GET_INFO, _INFO.pack(_EXIT, *[0] * 12, 0))
                mask, *_, code = _INFO.unpack(answer)
                return int(code) if mask & _EXIT else 0
        return 0

    def close(self) -> None:
        """Close the pidfd."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def pids(wanted: Collection[Process], proc: Path = Path("/proc")) -> dict[Process, int]:
    """Find processes known by the pid in their container and their start, and return their pids in this namespace."""
    outer: dict[Process, int] = {}
    starts = {start for _, start in wanted}
    processes: list[Path] = []
    with suppress(OSError):  # no /proc here
        processes = list(proc.iterdir())
    for process in processes:
        if not process.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            start = int(stat(int(process.name), proc)[19])
            if start in starts:
                status = (process / "status").read_text(errors="replace")
                inner = next((line for line in status.splitlines() if line.startswith("NSpid:")), "").split()[-1]
                if (int(inner), start) in wanted:
                    outer[int(inner), start] = int(process.name)
    return outer
