"""Memory of a process that runs for months: one heap for all threads, full garbage collections, copies as readers."""

import asyncio
import ctypes
import gc
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from importlib import import_module
from threading import active_count
from typing import Any, NoReturn

from flopwatch.node.scrape.reader import Reader

_M_ARENA_MAX = -8
SWEEP_SECONDS = 240.0  # a sweep takes 2 ms with cold caches, and seldom finds anything


def one_heap() -> None:
    """Make all threads share one heap (glibc's mallopt, M_ARENA_MAX). Call it before the first thread starts."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # by default each thread has a heap, which never shrinks


def fork(readers: Sequence[Reader]) -> None:
    """Start the processes of readers as copies of this one, unless it has threads, which a copy would lack."""
    if active_count() > 1:
        return
    for reader in readers:
        for module in (reader.spec.factory.partition(":")[0], *["pynvml"] * reader.driver):
            with suppress(ImportError):
                import_module(module)
    gc.set_threshold(50_000)  # by default a scrape makes 20 collections, which find nothing
    gc.collect()
    gc.freeze()  # else each collection would copy the memory
    for reader in readers:
        reader.fork()


async def swept(started: Awaitable[Any], every: float = SWEEP_SECONDS) -> NoReturn:
    """Run a full garbage collection every `every` seconds, for ever, once `started` has completed or failed."""
    await asyncio.wait([asyncio.ensure_future(started)])
    gc.collect()
    gc.freeze()  # a full collection then takes 1 instead of 24 ms
    while True:
        await asyncio.sleep(every)
        gc.collect()  # Python may never run a full one, which alone frees old cycles and tuples
