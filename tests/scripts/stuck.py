"""One rank of a training job without PyTorch that hangs: `stuck.py RUN suspect|peer|gil`.

The suspect waits forever for its next batch, its peers wait for it, and one of them may hold Python's lock.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator

from flopwatch.catalogue import TRAINING_COLLECTIVE_SEQUENCE_NUMBER
from flopwatch.training import Run


def read_from_a_dead_disk() -> None:
    """Block until another process kills this one."""
    threading.Event().wait()


def wait_for_the_suspect() -> None:
    """Block likewise, as in a collective."""
    threading.Event().wait()


def batches(role: str) -> Iterator[int]:
    """Yield batches until the suspect hangs."""
    yield from range(30)
    if role == "suspect":
        read_from_a_dead_disk()
    yield 30


def main() -> None:
    """Train until the hang."""
    name, role = sys.argv[1:]
    run = Run(name)
    threading.Thread(target=threading.Event().wait, name="\x1b[31m<b>loader</b>", daemon=True).start()
    for number in run.batches(batches(role)):
        run.recorder.set(TRAINING_COLLECTIVE_SEQUENCE_NUMBER, number + 1)  # as the hook reads it from PyTorch
        time.sleep(0.05)
        if number == 30 and role == "gil":
            time.sleep(1)  # until a push has shown the step
            ctypes.PyDLL(None).sleep(100_000)  # PyDLL: the interpreter's lock is not released during the call
        if number == 30:
            wait_for_the_suspect()
        run.step(tokens=8)


if __name__ == "__main__":
    main()
