"""At which line of the job's own code the loop stands still, told without being asked, once no step ends any more.

In a hang most ranks wait at one line, and the one they wait for is often at another. A rank that loops moves: what is
told is the innermost line that it has not left at any look of the last half to whole minute, so that its series goes on
being the same.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import deque
from pathlib import Path
from types import FrameType

# What lasts this many seconds, and this many mean steps, is looked at: of a step or a wait for a batch, and of the
# rest, a start or a checkpoint, which may take its time.
AFTER, AFTER_OTHERS, AFTER_STEPS = 15.0, 120.0, 3.0
MEMORY, LEAST = 60.0, 30.0  # seconds: looks that count, and that they have to cover
TOGETHER = 10.0  # looks of so many seconds are kept as one
MAX_DEPTH = 200  # lines, the outermost
MAX_TEXT = 128  # characters

_Line = tuple[str, str, int]  # file, function and line; 0 for one that changes
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_OURS = f"{Path(__file__).parents[2]}/"
# Code that was made at run time: under names that say nothing, and that no two ranks share.
_MADE = ("/torchinductor_", "/.triton/", "/triton/cache/")


class StuckFrames:
    """Where a thread has been at every look of the last minute."""

    def __init__(self) -> None:
        self._since = 0.0
        self._looks: deque[tuple[float, list[_Line]]] = deque()  # when the first of some was, and what they share

    def look(self, thread: int | None, activity: str, since: float, now: float, step_seconds: float) -> str | None:
        """Return where the thread, or the main thread, stands still; None if its activity began lately.

        `since` and `now` are seconds on one clock, `step_seconds` what a step takes in the mean.
        """
        after = AFTER if activity in ("step", "data_stall") else AFTER_OTHERS
        frame = None
        if now - since > max(after, AFTER_STEPS * step_seconds):
            frame = sys._current_frames().get(threading.main_thread().ident or 0 if thread is None else thread)
        if frame is None or since != self._since:
            self._looks.clear()
            self._since = since
        if frame is None:
            return None
        while self._looks and self._looks[0][0] < now - MEMORY:
            self._looks.popleft()
        if self._looks and now - self._looks[-1][0] < TOGETHER:
            begin, before = self._looks.pop()
            self._looks.append((begin, _shared(before, _lines(frame))))
        else:
            self._looks.append((now, _lines(frame)))
        return _text(_shared(*(lines for _, lines in self._looks))) if now - self._looks[0][0] >= LEAST else None


def _shared(*looks: list[_Line]) -> list[_Line]:
    """Return the outermost lines that all have in common, and the function in which they part."""
    shared: list[_Line] = []
    for lines in zip(*looks, strict=False):
        if len(set(lines)) > 1:
            if len({line[:2] for line in lines}) == 1:
                shared.append((*lines[0][:2], 0))
            break
        shared.append(lines[0])
    return shared


def _lines(frame: FrameType) -> list[_Line]:
    """Return a frame and those that called it, the outermost first."""
    frames: deque[FrameType] = deque(maxlen=MAX_DEPTH)
    at: FrameType | None = frame
    while at is not None:
        frames.append(at)
        at = at.f_back
    return [(at.f_code.co_filename, at.f_code.co_name, at.f_lineno or 0) for at in reversed(frames)]


def _text(lines: list[_Line]) -> str | None:
    """Return the innermost line of the job's own code; where there is none, of a package's, and not torch's."""
    torch = (*(f"{folder}/" for folder in getattr(sys.modules.get("torch"), "__path__", ())), _OURS)
    lines = [line for line in lines if line[0] and not line[0].startswith(torch)]
    packages = [line for line in lines if _packaged(line[0])]
    own = [
        line
        for line in lines
        if not (
            line[0].startswith(_STANDARD)
            or _packaged(line[0])
            or any(made in line[0] for made in _MADE)
            or (line[0].startswith("<") and not line[0].startswith("<ipython"))
        )
    ]
    if not lines:
        return None
    file, function, number = (own or packages or lines)[-1]
    text = Path(file).name + (f":{number}" if number else "") + (f" in {function}" if function != "<module>" else "")
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:MAX_TEXT]


def _packaged(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file
