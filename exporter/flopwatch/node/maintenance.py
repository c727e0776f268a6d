"""A node's maintenance: until when alerts about it are held back.

It is the file `maintenance` in the exporter's state folder, and no request over the network: whoever may log in to the
node may say so, and it survives the restarts that maintenance is made of. It holds a time such as `2h`, counted from
when it was written, or the Unix time of the end. While the node is down, Prometheus remembers what was said last.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from flopwatch.catalogue import NODE_MAINTENANCE_UNTIL, Sample

log = logging.getLogger(__name__)

FILE = "maintenance"
# An end that was is told for as long as the rules look back, so that they do not go on with a later one.
TOLD_FOR = 86400.0
LONGEST = 30 * 86400.0

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float | None:
    """Return the seconds in `90s`, `10m`, `2h` or `1.5d`, at most LONGEST; None for anything else."""
    match = _DURATION.fullmatch(text)
    return None if match is None else min(float(match[1]) * _UNITS[match[2]], LONGEST)


def end(text: str, written: float) -> float | None:
    """Return the Unix time at which the maintenance ends that this text asks for; None if it is no such text."""
    seconds = duration(text)
    if seconds is not None:
        return written + seconds
    # Unix times of this century, to tell them from a number of whatever somebody had in mind.
    return min(float(text), written + LONGEST) if re.fullmatch(r"[0-9]{10}(\.[0-9]+)?", text) else None


def until(state: Path) -> tuple[float | None, str]:
    """Return when the maintenance of the node with this state folder ends or ended, and what is wrong with the file."""
    path = state / FILE
    try:
        text = path.read_text(errors="replace").strip()
        ends = end(text, path.stat().st_mtime)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    return ends, "" if ends is not None else f"says {text!r:.50}; write 2h, or the Unix time of the end"


class Maintenance:
    """What the exporter says of its node's maintenance."""

    def __init__(self, state: Path, host: str, now: Callable[[], float] = time.time) -> None:
        self._state, self._host, self._now = state, host, now
        self._wrong = ""

    def samples(self) -> list[Sample]:
        """Return the end, up to a day after it; nothing for a node on which nobody works."""
        ends, wrong = until(self._state)
        if wrong and wrong != self._wrong:
            log.warning("%s %s: alerts of this node are not held back", self._state / FILE, wrong)
        self._wrong = wrong
        if ends is None or self._now() - ends > TOLD_FOR:
            return []
        return [(NODE_MAINTENANCE_UNTIL, (self._host,), ends)]
