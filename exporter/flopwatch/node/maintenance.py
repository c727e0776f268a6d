"""Maintenance of a host: when the alerts about it stop being held back.

The end is kept in the file `maintenance` of the exporter's state folder: login to the host is the permission. The file
holds a duration such as `2h`, counted from when the file was written, or the Unix time of the end.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.catalogue import HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS, Sample

log = logging.getLogger(__name__)

FILE = "maintenance"
# Seconds for which an end in the past is still served: the rules look back that far, and would use an older, later end.
SERVED_AFTER_END = 86400.0
MAX_DURATION = 30 * 86400.0

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float | None:
    """Return the seconds in `90s`, `10m`, `2h` or `1.5d`, at most MAX_DURATION, and None for other texts."""
    match = _DURATION.fullmatch(text)
    return None if match is None else min(float(match[1]) * _UNITS[match[2]], MAX_DURATION)


def end(text: str, written: float) -> float | None:
    """Return the Unix time of the end that a text asks for, None if it is neither a duration nor such a time."""
    seconds = duration(text)
    if seconds is not None:
        return written + seconds
    # Ten digits: a Unix time of this century, not any number.
    return min(float(text), written + MAX_DURATION) if re.fullmatch(r"[0-9]{10}(\.[0-9]+)?", text) else None


def until(state: Path) -> tuple[float | None, str]:
    """Return the end in the file of a state folder, None without one, and what is wrong with the file or no text."""
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
    """Source of the series about the maintenance of this host."""

    def __init__(self, state: Path, host: str, now: Callable[[], float] = time.time) -> None:
        self._state, self._host, self._now = state, host, now
        self._wrong = ""

    def samples(self) -> list[Sample]:
        """Return the end until a day after it, and no sample without maintenance."""
        ends, wrong = until(self._state)
        if wrong and wrong != self._wrong:
            log.warning("%s %s: alerts of this node are not held back", self._state / FILE, wrong)
        self._wrong = wrong
        if ends is None or self._now() - ends > SERVED_AFTER_END:
            return []
        return [(HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS, (self._host,), ends)]
