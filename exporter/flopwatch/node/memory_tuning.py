"""The heap of a process that runs for months: one in all, in place of one a thread, and swept every minute."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, NoReturn

_M_ARENA_MAX = -8
SWEEP_SECONDS = 60.0


def one_heap() -> None:
    """Let all threads of this process share a heap; call it before there are any. Does nothing with another libc.

    glibc gives threads heaps of their own, and each keeps what it once needed; the interpreter's lock lets one thread
    allocate at a time anyway. https://man7.org/linux/man-pages/man3/mallopt.3.html, M_ARENA_MAX
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


async def swept(started: Awaitable[Any], every: float = SWEEP_SECONDS) -> NoReturn:
    """Collect all garbage every so many seconds from when the process has started, whatever came of that.

    Only a full collection frees objects that refer to each other and have lived for minutes, and the tuples that the
    interpreter keeps for reuse, thousands of each length. By itself it comes after half an hour, or never as long as
    little is new beside what is old: until then memory creeps up. What is there at the start stays, so that a
    collection need not look at it: 1 ms in place of 24. https://docs.python.org/3/library/gc.html#gc.freeze
    """
    await asyncio.wait([asyncio.ensure_future(started)])
    gc.collect()
    gc.freeze()
    while True:
        await asyncio.sleep(every)
        gc.collect()
