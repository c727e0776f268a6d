"""Planned maintenance of a host: until its end, alerts about the host are held back.

The file `maintenance` in the state folder has the end: a Unix time, or a duration such as `2h` since it was written.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.catalogue import HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS, Sample

log = logging.getLogger(__name__)

FILE = "maintenance"
SERVED_AFTER_END = 86400.0  # seconds for which a past end is served, since the rules look back that far
MAX_DURATION = 30 * 86400.0

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float | None:
    """Return the seconds in `90s`, `10m`, `2h` or `1.5d`, at most MAX_DURATION, and None for other texts."""
    match = _DURATION.fullmatch(text)
    return None if match is None else min(float(match[1]) * _UNITS[match[2]], MAX_DURATION)


def end(text: str, written: float) -> float | None:
    """Return the Unix time of the end: `text` is that time, or a duration from `written`. None for other texts."""
    seconds = duration(text)
    if seconds is not None:
        return written + seconds
    # Ten digits: a Unix time of this century, not any number.
    return min(float(text), written + MAX_DURATION) if re.fullmatch(r"[0-9]{10}(\.[0-9]+)?", text) else None


def until(state: Path) -> tuple[float | None, str]:
    """Return the end of maintenance as a Unix time, if any, and what is wrong with its file or an empty text."""
    path = state / FILE
    try:
        text = path.read_text(errors="replace").strip()
        ends = end(text, path.stat().st_mtime)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    return ends, "" if ends is not None else f"contains {text!r:.50}; write 2h, or the Unix time of the end"


class Maintenance:
    """Source of the series `host_maintenance_until_timestamp_seconds`, the end of this host's maintenance."""

    def __init__(self, state: Path, host: str, now: Callable[[], float] = time.time) -> None:
        self._state, self._host, self._now = state, host, now
        self._wrong = ""

    def samples(self) -> list[Sample]:
        """Return the end of maintenance up to a day after it, and no sample without maintenance."""
        ends, wrong = until(self._state)
        if wrong and wrong != self._wrong:
            log.warning("%s %s: alerts of this node are not held back", self._state / FILE, wrong)
        self._wrong = wrong
        if ends is None or self._now() - ends > SERVED_AFTER_END:
            return []
        return [(HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS, (self._host,), ends)]
