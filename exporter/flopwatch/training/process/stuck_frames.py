"""Line of the job's own code at which the training loop is stuck, found once steps stop ending.

In a hang most ranks wait at one line, and the rank that they wait for is often at another. A rank that loops forever
still moves. Its line is therefore the innermost one that it did not leave for 30 to 60 s, so that the series is stable.
"""

import functools
import sys
import sysconfig
import threading
import traceback
from collections import deque
from pathlib import Path
from types import FrameType

# Seconds after which a step or wait, or another activity, is inspected, and mean steps that must pass in any case.
AFTER, AFTER_OTHERS, AFTER_STEPS = 15.0, 120.0, 3.0
MEMORY, MIN_COVERED = 60.0, 30.0  # seconds: age of the stacks that count, and time that they must cover
TOGETHER = 10.0  # seconds whose stacks are merged into one
MAX_DEPTH = 200  # lines, the outermost
MAX_TEXT = 128  # characters

_Line = tuple[str, str, int]  # file, function and line; 0 for one that changes
_OWN, _PACKAGE, _LIBRARY, _TORCH = range(4)  # kinds of files, in order of preference
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_OURS = f"{Path(__file__).parents[2]}/"
# Code that was generated at run time, under meaningless names that differ between ranks.
_MADE = ("/torchinductor_", "/.triton/", "/triton/cache/")


class StuckFrames:
    """Finder of the line at which a thread is stuck, from its stacks of the last minute."""

    def __init__(self) -> None:
        self._since = 0.0
        self._looks: deque[tuple[float, list[_Line]]] = deque()  # time of the first merged stack, and shared lines

    def look(self, thread: int | None, activity: str, since: float, now: float, step_seconds: float) -> str | None:
        """Return the line at which `thread` (None: the main thread) is stuck, None if its activity is not overdue.

        `since`, the activity's begin, and `now` are seconds on one clock. `step_seconds` is a step's mean duration.
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
        return _text(_shared(*(lines for _, lines in self._looks))) if now - self._looks[0][0] >= MIN_COVERED else None


def _shared(*looks: list[_Line]) -> list[_Line]:
    """Return the outermost lines that all stacks have in common, and the function in which they first differ."""
    shared: list[_Line] = []
    for lines in zip(*looks, strict=False):
        if len(set(lines)) > 1:
            if len({line[:2] for line in lines}) == 1:
                shared.append((*lines[0][:2], 0))
            break
        shared.append(lines[0])
    return shared


def _lines(frame: FrameType) -> list[_Line]:
    frames = deque(traceback.walk_stack(frame), MAX_DEPTH)
    return [(at.f_code.co_filename, at.f_code.co_name, line or 0) for at, line in reversed(frames)]


def _text(lines: list[_Line]) -> str | None:
    """Return as a label the innermost line of the job's own code, else of an installed package other than torch."""
    file, function, number = min(reversed(lines), key=lambda line: _kind(line[0]), default=("", "", 0))
    if _kind(file) == _TORCH:
        return None
    text = Path(file).name + (f":{number}" if number else "") + (f" in {function}" if function != "<module>" else "")
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:MAX_TEXT]


def own_line(frame: FrameType | None) -> str:
    """Return this line of a running thread, empty without one. Keep no frame, because it keeps GPU memory alive."""
    return "" if frame is None else _text(_lines(frame)) or ""


@functools.lru_cache(1024)
def _kind(file: str) -> int:
    """Return the kind of a file. IPython's cells are the job's own, other generated code is a library."""
    torch = (*(f"{folder}/" for folder in getattr(sys.modules.get("torch"), "__path__", ())), _OURS)
    if not file or file.startswith(torch):
        return _TORCH
    if "/site-packages/" in file or "/dist-packages/" in file:
        return _PACKAGE
    generated = any(made in file for made in _MADE) or (file.startswith("<") and not file.startswith("<ipython"))
    return _LIBRARY if generated or file.startswith(_STANDARD) else _OWN
