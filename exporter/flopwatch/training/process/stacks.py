"""Stacks of a rank's threads on demand: `flopwatch stacks PID` requests them, and the push thread answers.

The request is an empty file `<host>-<pid>.request` in FLOPWATCH_STACK_DIR or a private folder, and the answer is a file
next to it. A rank blocked in a collective can answer, because the collective releases the interpreter's lock. Only
Python frames are shown (docs/stragglers.md).
"""

import logging
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

log = logging.getLogger("flopwatch")


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


def _stacks() -> Iterator[str]:
    """Yield a line per thread and frame, the innermost last, without source lines, because their disk may hang."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        yield f"\nthread {ident}" if thread is None else f"\nthread {thread.name} ({thread.native_id})"
        for at, line in reversed(list(traceback.walk_stack(frame))):
            yield f'  File "{at.f_code.co_filename}", line {line}, in {at.f_code.co_name}'
