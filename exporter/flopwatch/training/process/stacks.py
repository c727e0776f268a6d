"""Stacks of a rank's threads on demand, which the push thread takes.

`flopwatch stacks PID` requests them with an empty file `<host>-<pid>.request` in FLOPWATCH_STACK_DIR or a private
folder, and the answer is a file next to it. The ledger requests them in the answer to a push. A rank blocked in a
collective can answer, because the collective releases the interpreter's lock. Only
Python frames are shown (docs/stacks.md).
"""

import logging
import math
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flopwatch.catalogue.stacks import MAX_STACKS
from flopwatch.training.process.stuck_frames import own_line

log = logging.getLogger("flopwatch")

_CUT = "  ..."
SAMPLES, LINES = 80, 10  # of the training thread, and lines that are shown
MIN_SECONDS, MAX_SECONDS = 4.0, 10.0  # of samples: two steps, but within the time in which a push is expected


def folder(environ: Mapping[str, str], user: int) -> Path:
    """Return the folder of stack requests and answers for a process of this user id with this environment."""
    if named := environ.get("FLOPWATCH_STACK_DIR"):
        return Path(named)
    return Path(environ.get("TMPDIR") or "/tmp") / f"flopwatch-{user}"


def request(pid: int, seconds: float, *, environ: Mapping[str, str], user: int) -> str | None:
    """Request the stacks of a process and return them, None without an answer in `seconds`. Raises OSError."""
    place = folder(environ, user)
    asking, answer = _files(place, pid)
    if not os.path.lexists(place):
        place.mkdir(mode=0o700)
        os.chown(place, user, -1)
    _trust(place, environ, user)
    answer.unlink(missing_ok=True)
    _write(asking, "")
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if answer.exists():
                text = answer.read_text()
                answer.unlink()
                return text
            time.sleep(0.05)
        return None
    finally:
        asking.unlink(missing_ok=True)


class Stacks:
    """Responder to requests for this process's stacks. `title()` returns the first line of each answer."""

    def __init__(self, title: Callable[[], str], environ: Mapping[str, str] = os.environ) -> None:
        self._title = title
        self._environ = environ
        self._folder = folder(environ, os.geteuid())
        self._asking, self._answer = _files(self._folder, os.getpid())

    def poll(self) -> None:
        """Answer a pending request. Without one it costs one system call. Raises OSError."""
        if not self._asking.exists():
            return
        _trust(self._folder, self._environ, os.geteuid())
        self._asking.unlink(missing_ok=True)
        being_written = self._answer.with_suffix(".tmp")
        _write(being_written, "\n".join([self._title(), *_stacks()]) + "\n")
        being_written.replace(self._answer)
        log.warning("the stacks of this rank's threads are in %s", self._answer)


def _trust(place: Path, environ: Mapping[str, str], user: int) -> None:
    """Raise PermissionError if other users can write to the folder, unless FLOPWATCH_STACK_DIR names it."""
    owned = os.lstat(place)
    private = stat.S_ISDIR(owned.st_mode) and owned.st_uid == user and not owned.st_mode & 0o022
    if not private and not environ.get("FLOPWATCH_STACK_DIR"):
        raise PermissionError(f"others can write to {place}; remove it, or name a folder with FLOPWATCH_STACK_DIR")


def _files(place: Path, pid: int) -> tuple[Path, Path]:
    # With the host, because the folder may be shared, and in containers every rank may be process 1.
    name = f"{socket.gethostname()}-{pid}"
    return place / f"{name}.request", place / f"{name}.stacks"


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    # A new file, and never the target of a link that another user put there.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def samples(thread: int | None, step_seconds: float, stopped: Callable[[], bool]) -> str:
    """Return the lines of the job's own code at which `thread` (None: the main thread) is, by share of samples.

    A slow rank runs, so that a single stack of it shows little. Returns early once `stopped()`.
    """
    seconds, found = min(max(MIN_SECONDS, 2 * step_seconds), MAX_SECONDS), Counter[str]()
    name, ident = ("training", thread) if thread is not None else ("main", threading.main_thread().ident or 0)
    deadline = time.monotonic() + seconds
    while not stopped() and (taken := found.total()) < SAMPLES and time.monotonic() < deadline:
        found[own_line(sys._current_frames().get(ident))] += 1
        time.sleep(seconds / SAMPLES * (0.5 + 0.618 * taken % 1))  # uneven, unlike the phases of a loop
    shares = [f"  {count / found.total():4.0%} {line}" for line, count in found.most_common(LINES)]
    return "\n".join([f"{name} thread in {found.total()} samples", *shares])


def text(below: str = "", above: str = "") -> str:
    """Return stacks between two texts in at most MAX_STACKS characters. Outer frames and last threads may be cut."""
    stacks = "\n".join(_stacks(MAX_STACKS - len(_CUT) - len(above) - len(below) - 4)).lstrip()
    lines = "\n\n".join(part for part in (above, stacks, below) if part)
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in lines)[:MAX_STACKS]


def _stacks(room: float = math.inf) -> Iterator[str]:
    """Yield a line per thread and frame, in `room` characters, the main thread first and the innermost frame last.

    There are no source lines, because their disk may hang.
    """
    threads, main = {thread.ident: thread for thread in threading.enumerate()}, threading.main_thread().ident
    for ident, frame in sorted(sys._current_frames().items(), key=lambda pair: pair[0] != main):
        if ident == threading.get_ident() != main:
            continue  # the push thread, which is here
        thread, frames = threads.get(ident), list[str]()
        title = f"\nthread {ident}" if thread is None else f"\nthread {thread.name} ({thread.native_id})"
        room -= len(title) + 1
        for at, line in traceback.walk_stack(frame):
            frames.append(f'  File "{at.f_code.co_filename}", line {line}, in {at.f_code.co_name}')
            room -= len(frames[-1]) + 1
            if room < 0:
                yield from (title, _CUT, *reversed(frames[:-1]))
                return
        yield from (title, *reversed(frames))
