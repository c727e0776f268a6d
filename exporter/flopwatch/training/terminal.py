"""Last line of the terminal, in which `flopwatch run --top` shows the figures while the script prints above it.

Escape sequences of DEC's VT100, which every terminal emulator knows: https://vt100.net/docs/vt510-rm/DECSTBM.html.
"""

import os
import sys
import time
from typing import TextIO

from flopwatch import catalogue as m
from flopwatch.training.progress import WINDOW, Recent, figures, shares, values
from flopwatch.training.recorder import Snapshot

LINE_EVERY = 10.0  # seconds between two lines if stderr is not a terminal


class Terminal:
    """Line with the figures of a run, on a terminal or, as one line every LINE_EVERY seconds, on any other stream."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        self._drawn = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._inverse = ("\x1b[7m", "\x1b[0m") if "NO_COLOR" not in os.environ else ("", "")
        self._height = 0  # of the terminal when its scrolling part was set
        self._recent = Recent()
        self._next = 0.0

    def show(self, snapshot: Snapshot, *, last: bool = False) -> None:
        """Show the figures of the last WINDOW seconds. The `last` snapshot gives the terminal's last line back."""
        if last:
            self._restore()
            return
        now, totals = time.monotonic(), values(snapshot.points)
        progress = self._recent.add(now, totals)
        steps = totals.get((m.TRAINING_STEPS_TOTAL, "")) or 0.0
        if progress.steps:
            # The position is unknown if the step of a restored checkpoint is.
            step = totals.get((m.TRAINING_POSITION_STEPS, ""), steps)
            text = f"step {step:,.0f}, {figures(progress)}, {shares(progress)}"
        else:
            text = f"no step for {WINDOW:.0f} s" if steps else "no step yet"
        if self._drawn:
            self._draw(f"{self._name}: {text}")
        elif steps and now >= self._next:
            self._next = now + LINE_EVERY
            print(f"flopwatch: {self._name}: {text}", file=self._stream, flush=True)

    def _draw(self, text: str) -> None:
        width, height = os.get_terminal_size(self._stream.fileno())
        begin = ""
        if height != self._height:
            # Make room below the cursor, and let all lines but the last scroll. It moves the cursor: save and restore.
            begin = f"\n\x1b[A\x1b7\x1b[1;{height - 1}r\x1b8"
            self._height = height
        on, off = self._inverse
        self._write(f"{begin}\x1b7\x1b[{height};1H{on}{text[:width]:<{width}}{off}\x1b8")

    def _restore(self) -> None:
        if self._height:
            self._write(f"\x1b7\x1b[r\x1b[{self._height};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        # One write, so that output of the script is not in the middle of a sequence.
        self._stream.write(text)
        self._stream.flush()
