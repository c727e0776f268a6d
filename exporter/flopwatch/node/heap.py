"""The heap of a process that runs for months: one in all, in place of one a thread.

glibc gives threads heaps of their own, and each keeps what it once needed; the interpreter's lock lets one thread
allocate at a time anyway. https://man7.org/linux/man-pages/man3/mallopt.3.html, M_ARENA_MAX
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8


def one_heap() -> None:
    """Let all threads of this process share a heap; call it before there are any. Does nothing with another libc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
