from __future__ import annotations

import subprocess
import sys

import pytest

# Print what the sweeper has frozen before and after the start ends, and whether it frees two kinds of garbage. One is a
# reference cycle of the oldest generation. The other is tuples of a length that the interpreter caches when they are
# freed, as dataclasses.fields() makes them.
PROGRAM = """
import asyncio, gc, sys, weakref
from flopwatch.node.memory_tuning import swept

class Node:
    pass

async def main():
    old = Node()
    old.self = old
    started = asyncio.get_running_loop().create_future()
    sweeping = asyncio.ensure_future(swept(started, 0.05))
    await asyncio.sleep(0.2)
    frozen = [gc.get_freeze_count()]
    {ends}
    await asyncio.sleep(0.02)
    frozen.append(gc.get_freeze_count())
    node = Node()
    node.self, there = node, weakref.ref(node)
    gc.collect(0), gc.collect(1)
    del node
    gc.collect(0), gc.collect(1)
    before = sys.getallocatedblocks()
    tuples = [tuple(i for i in range(7)) for _ in range(2000)]
    del tuples
    held, garbage = sys.getallocatedblocks() - before, there() is not None
    await asyncio.sleep(0.2)
    print(frozen[0], frozen[1] > 1000, garbage, there() is None, held > 1500, sys.getallocatedblocks() - before < 500)
    sweeping.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize("ends", ["started.set_result(None)", "started.cancel()", "started.set_exception(OSError())"])
def test_garbage_is_freed_however_old_and_what_is_kept_for_reuse_but_what_was_there_stays(ends: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(ends=ends)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 True True True True True\n", done.stderr
