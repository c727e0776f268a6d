"""Release of the NVIDIA driver: the exporter closes its handles, so that a GPU can be reset or the driver replaced.

The file `release` in the state folder requests it. It contains a duration such as `10m` from when it was written, a
Unix time, or 0 to end a release early. The exporter closes its handles and confirms with the end in the file
`released`. It deletes both files at the end, so that a release survives a restart. Procedure: docs/release.md.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node import maintenance
from flopwatch.node.collectors import replace_file
from flopwatch.node.scrape.reader import Reader

log = logging.getLogger(__name__)

REQUEST, CONFIRMATION = "release", "released"
BY_SIGNAL = 600.0  # seconds of a release that SIGUSR1 requests
MAX_DURATION = 86400.0  # seconds of the longest release: a forgotten one must end
CONFIRMATION_TIMEOUT = 15.0  # seconds, in which handles can be closed even if a driver call hangs


def duration(text: str) -> float | None:
    """Return the seconds in `90s`, `10m`, `1.5h` or `0`, and None for other texts."""
    return 0.0 if text == "0" else maintenance.duration(text)


def end(text: str, written: float) -> float | None:
    """Return the Unix time of the end in a request, at most MAX_DURATION after `written`. None if `text` is invalid."""
    until = written if text == "0" else maintenance.end(text, written)
    return None if until is None else min(until, written + MAX_DURATION)


class Release:
    """Release of driver handles that a file in `state` requests. A `guest` (not the exporter) only reads the files."""

    def __init__(
        self,
        state: Path,
        drivers: Sequence[Reader],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        guest: bool = False,
    ) -> None:
        self._guest = guest
        self._request = state / REQUEST
        self._confirmation = state / CONFIRMATION
        self._drivers, self._now, self._clock = drivers, now, clock
        self._lock = threading.Lock()
        self._until: float | None = None
        self._unwritten: float | None = None  # end of a release that could not be written to disk
        self._since = 0.0
        self._seconds = 0.0
        self._pending: list[Reader] = []
        self._logged = ""

    def request(self, seconds: float) -> None:
        """Request a release of the driver that starts now and lasts `seconds`."""
        until = self._now() + seconds
        if not _write(self._request, f"{until:.3f}\n"):
            log.warning("cannot write %s: the release ends with a restart", self._request)
            self._unwritten = until

    def check(self) -> None:
        """Start or end a release as the request file asks. Blocks until the reader processes have ended."""
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
                    log.info("driver released until=%s", time.ctime(self._until))
                    _write(self._confirmation, f"{self._until:.3f}\n")

    def samples(self) -> list[Sample]:
        """Return samples: whether the driver is released, the end, and the seconds of all releases since the start."""
        until, seconds = self._until, self._seconds
        if until is None:
            return [(m.FLOPWATCH_DRIVER_RELEASED, (), 0), (m.FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL, (), seconds)]
        seconds += max(0.0, self._clock() - self._since)
        return [
            (m.FLOPWATCH_DRIVER_RELEASED, (), 1),
            (m.FLOPWATCH_DRIVER_RELEASED_UNTIL_TIMESTAMP_SECONDS, (), until),
            (m.FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL, (), seconds),
        ]

    def _asked(self) -> float | None:
        try:
            self._request.stat()  # usually there is no file, which opening it would find in five times the time
            text, written = self._request.read_text(errors="replace").strip(), self._request.stat().st_mtime
        except FileNotFoundError:
            return self._unwritten
        except OSError:
            return self._until
        until = end(text, written)
        if until is not None:
            return until
        if text not in ("", self._logged):
            log.warning("%s contains %.50r: write 10m, the Unix time of the end, or 0", self._request, text)
            self._logged = text
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
        log.info("driver in use again")

    def _forget(self) -> None:
        if self._guest:
            return
        for path in (self._request, self._confirmation):
            with suppress(OSError):
                path.unlink()


def ask(state: Path, seconds: float, now: Callable[[], float] = time.time) -> str:
    """Request a release from the exporter of this state folder. Return an empty text if it confirms, else the error."""
    if seconds == 0 and not any((state / name).exists() for name in (REQUEST, CONFIRMATION)):
        return ""
    until = f"{now() + min(seconds, MAX_DURATION - 1):.3f}\n" if seconds > 0 else "0\n"
    if not _write(state / REQUEST, until):
        return f"cannot write {state / REQUEST}; is --state the exporter's, and may this user write there?"
    deadline = time.monotonic() + CONFIRMATION_TIMEOUT
    while time.monotonic() < deadline:
        if _text(state / (CONFIRMATION if seconds > 0 else REQUEST)) == (until if seconds > 0 else None):
            return ""
        time.sleep(0.05)
    return (
        f"no exporter confirmed within {CONFIRMATION_TIMEOUT:g} s: none runs with --state {state}, or a driver call "
        f"hangs. The request stays in {state / REQUEST}; --release 0 withdraws it"
    )


def _write(path: Path, text: str) -> bool:
    try:
        replace_file(path, text)
    except OSError:
        return False
    return True


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
