"""A terminal of 80 x 24 with a command in it: a real pseudo-terminal, drawn by pyte."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

from tests.support.machine import PATIENCE

WIDTH, HEIGHT = 80, 24


def _take_terminal() -> None:
    """Make Ctrl-C a signal of this process, also if the tests were started in the background, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command whose input and output are a terminal. `written` is everything that it wrote."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path) -> None:
        self._screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._file, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.settings = termios.tcgetattr(inside)
        self._inside = inside
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=cwd,
            env={**environ, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )

    @property
    def lines(self) -> list[str]:
        """The lines that a person sees now."""
        return [line.rstrip() for line in self._screen.display]

    def restored(self) -> bool:
        """Return whether keys are echoed and lines delivered as before the command."""
        return termios.tcgetattr(self._inside) == self.settings

    def press(self, key: str) -> None:
        os.write(self._file, key.encode())

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Return the first screen that meets the condition."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._read(0.1)
            if seen(self.lines):
                return self.lines
        raise AssertionError("\n".join(self.lines))

    def end(self) -> int:
        """Wait until the command has ended, and return its exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.wait(1)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._file], [], [], seconds)[0]:
            return False
        data = os.read(self._file, 65536)
        self.written += data
        self._stream.feed(data)
        return True

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)
        os.close(self._inside)
