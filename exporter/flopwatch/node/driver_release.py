"""Driver handles closed on request, so that a GPU can be reset, MIG switched or the driver replaced.

A reset or an unloaded module needs every process to have closed its handles. Whoever wants that writes the file
`release` into the state folder: a time such as `10m` (counted from when the file was written), or the Unix time of the
end; 0 ends it early. The exporter closes the handles and writes the same end into `released`; both files go when the
time is over, so a restart in between changes nothing. `flopwatch exporter --release 10m` does it and waits for it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flopwatch.catalogue import DRIVER_RELEASED, DRIVER_RELEASED_SECONDS, DRIVER_RELEASED_UNTIL, Sample

log = logging.getLogger(__name__)

REQUEST, CONFIRMATION = "release", "released"
# What a signal asks for, and the longest that is granted: a node must not stay blind because somebody forgot.
BY_SIGNAL = 600.0
LONGEST = 86400.0
# How long an exporter may take to close its handles, one of them hung, before whoever asked is told that it has not.
CONFIRMED_WITHIN = 15.0

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smh])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Driver(Protocol):
    """A reader that holds driver handles."""

    def release(self) -> bool:
        """Close them, and return whether they are closed."""

    def resume(self) -> None:
        """Open them again when they are needed next."""


def duration(text: str) -> float | None:
    """Return the seconds in `90s`, `10m`, `1.5h` or `0`; None for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return 0.0 if text == "0" else None
    return float(match[1]) * _UNITS[match[2]]


def end(text: str, written: float) -> float | None:
    """Return the Unix time that a request written then asks for, at most LONGEST later; None if it is no request."""
    seconds = duration(text)
    if seconds is None:
        # Unix times of this century, to tell them from a number of whatever somebody had in mind.
        seconds = float(text) - written if re.fullmatch(r"[0-9]{10}(\.[0-9]+)?", text) else None
    return None if seconds is None else written + min(seconds, LONGEST)


class Release:
    """Closes the drivers' handles for as long as the state folder asks for it; `check` looks.

    A `guest` beside the exporter does the same with its own handles, and leaves the files to the exporter.
    """

    def __init__(
        self,
        state: Path,
        drivers: Sequence[Driver],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        guest: bool = False,
    ) -> None:
        self._guest = guest
        self._request = state / REQUEST
        self._confirmation = state / CONFIRMATION
        self._drivers = drivers
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._until: float | None = None
        self._unwritten: float | None = None  # the end of a release that the disk has no room to note
        self._since = 0.0
        self._seconds = 0.0
        self._pending: list[Driver] = []
        self._complaint = ""

    def request(self, seconds: float) -> None:
        """Ask for a release from now on, as a signal does."""
        until = self._now() + seconds
        if not _write(self._request, f"{until:.3f}\n"):
            log.warning("cannot write %s: a restarted exporter will not know of the release", self._request)
            self._unwritten = until

    def check(self) -> None:
        """Begin or end what is asked for; waits for children that take their time to end."""
        with self._lock:
            until = self._asked()
            if until is not None and until > self._now():
                self._begin(until)
            elif self._until is not None:
                self._finish()
            elif until is not None:
                self._forget()
            if self._pending:
                self._pending = [driver for driver in self._pending if not driver.release()]
                if not self._pending and not self._guest:
                    log.info("the driver is released until %s", time.ctime(self._until))
                    _write(self._confirmation, f"{self._until:.3f}\n")

    def samples(self) -> list[Sample]:
        """Return whether the drivers are released, until when, and for how long they have been altogether."""
        until, seconds = self._until, self._seconds
        if until is None:
            return [(DRIVER_RELEASED, (), 0), (DRIVER_RELEASED_SECONDS, (), seconds)]
        seconds += max(0.0, self._clock() - self._since)
        return [(DRIVER_RELEASED, (), 1), (DRIVER_RELEASED_UNTIL, (), until), (DRIVER_RELEASED_SECONDS, (), seconds)]

    def _asked(self) -> float | None:
        """Return the end that is asked for; None where nothing is."""
        try:
            text, written = self._request.read_text(errors="replace").strip(), self._request.stat().st_mtime
        except FileNotFoundError:
            return self._unwritten
        except OSError:
            return self._until
        until = end(text, written)
        if until is not None:
            return until
        if text not in ("", self._complaint):
            log.warning("%s says %.50r; write 10m, the Unix time of the end, or 0", self._request, text)
            self._complaint = text
        return self._until

    def _begin(self, until: float) -> None:
        if self._until is None:
            self._since = self._clock()
        if until != self._until:
            self._until = until
            self._pending = list(self._drivers)

    def _finish(self) -> None:
        self._seconds += self._clock() - self._since
        self._until, self._unwritten, self._pending = None, None, []
        for driver in self._drivers:
            driver.resume()
        self._forget()
        log.info("the driver is in use again")

    def _forget(self) -> None:
        if self._guest:
            return
        for path in (self._request, self._confirmation):
            with suppress(OSError):
                path.unlink()


def ask(state: Path, seconds: float, now: Callable[[], float] = time.time) -> str:
    """Ask the exporter of this state folder for a release; return why it is not done, or no text if it is."""
    if seconds == 0 and not any((state / name).exists() for name in (REQUEST, CONFIRMATION)):
        return ""
    until = f"{now() + min(seconds, LONGEST - 1):.3f}\n" if seconds > 0 else "0\n"
    if not _write(state / REQUEST, until):
        return f"cannot write {state / REQUEST}; is --state the exporter's, and may this user write there?"
    patience = time.monotonic() + CONFIRMED_WITHIN
    while time.monotonic() < patience:
        if _text(state / (CONFIRMATION if seconds > 0 else REQUEST)) == (until if seconds > 0 else None):
            return ""
        time.sleep(0.05)
    return (
        f"no exporter has said so within {CONFIRMED_WITHIN:g} s: none runs with --state {state}, or a driver call "
        f"hangs. {state / REQUEST} stays and still asks for it; --release 0 takes it back"
    )


def _write(path: Path, text: str) -> bool:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        return False
    return True


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
