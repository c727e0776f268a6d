"""Thread that pushes snapshots to the node's exporter, and its shutdown.

If the interpreter ends without run.finish(), the status is `stopped` after Ctrl-C, else `failed`. No signal handler is
installed: in Python it would keep alive a rank that is blocked in a collective. The loop's thread takes no lock written
in Python. A script's handler that exits in the middle of finish() would leave it locked.
"""

import atexit
import logging
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from flopwatch.training.process import flight_recorder, stacks
from flopwatch.training.push.otlp import Undelivered, Wire
from flopwatch.training.recorder import Snapshot

log = logging.getLogger("flopwatch")

RETRY = 0.1  # seconds between two tries of the last push
LAST_PUSH = 1.5  # seconds that finish() and the interpreter's exit wait for the last push, at most


class Pusher:
    """Thread that pushes `snapshot()` every `interval` seconds. At exit without stop(), it calls `finish(status)`."""

    def __init__(
        self,
        wire: Wire,
        interval: float,
        snapshot: Callable[[], Snapshot],
        finish: Callable[[str], None],
        failed: Callable[[Exception], None],
        host: str,
    ) -> None:
        self._wire, self.url = wire, wire.url
        self.delivered = False  # the last snapshot tried
        self._interval, self._phase = interval, zlib.crc32(host.encode(errors="replace")) / 2**32
        self._snapshot = snapshot
        self._finish = finish
        self._failed = failed
        self._last: Snapshot | None = None
        self._stopping = False
        self._stop_deadline = math.inf
        self._wake: SimpleQueue[None] = SimpleQueue()
        # Not the thread's join(): if an exception interrupts it, Python before 3.13 considers the thread ended.
        self._done = True  # or not started
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flopwatch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        atexit.register(self._at_exit)
        self._done = False
        try:
            self._thread.start()
        except BaseException:
            self._done = True
            raise

    def stop(self, last: Snapshot | None) -> None:
        """Push the snapshot `last`, if given, and stop. All calls together take at most LAST_PUSH seconds."""
        if not self._stopping:
            self._stop_deadline = time.monotonic() + LAST_PUSH
            self._last, self._stopping = last, True
        self._wake.put(None)
        if self._last is not None and not self._done:
            with suppress(Empty):
                self._ended.get(timeout=max(0.0, self._stop_deadline - time.monotonic()))
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._finish("stopped" if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) else "failed")

    def _run(self) -> None:
        try:
            self._push()
        finally:
            self._wire.connection.close()
            self._done = True
            self._ended.put(None)

    def _pause(self) -> float:
        """Return the seconds until all ranks of this host push: 0.1 to 1.1 intervals, whatever the wall clock does."""
        # At once, all ranks wake the exporter only one time, and they disturb only one step.
        return min(threading.TIMEOUT_MAX, self._interval * (1.1 - (time.time() / self._interval + self._phase) % 1))

    def _push(self) -> None:
        delivered, known, deadline = True, False, math.inf
        asked: Snapshot | None = None  # the previous one, if the answer to it requests stacks
        while True:
            stopping, last = self._stopping, self._last
            answers, asked = asked if last is None else None, None
            if stopping and last is None:
                return
            if stopping:
                deadline = min(deadline, time.monotonic() + LAST_PUSH)
            try:
                if last is not None:
                    self._wire.connection.close()  # a dead one would take all the time that is left
                lines = stacks.samples(*answers.running, lambda: self._stopping) if answers and answers.running else ""
                snapshot = self._snapshot() if last is None else last
                if self._stopping and not stopping:
                    continue  # stop() has an earlier snapshot, whose counters may be lower
                if answers:
                    # The recorder holds the interpreter's lock, which would slow a rank that makes steps.
                    operations = "" if answers.running else flight_recorder.text()
                    snapshot.resource["flopwatch.stacks"] = stacks.text(operations, lines)
                asked = snapshot if self._wire.send(self._wire.encode(snapshot)) and not answers else None
                if not delivered:
                    log.warning("pushing to %s works again; nothing counted was lost", self._wire.url)
                delivered = known = self.delivered = True
            except Undelivered as error:
                if delivered:
                    text = "pushing to %s failed: %s (training goes on; it is tried again every %g s)"
                    log.warning(text, self._wire.url, error, self._interval)
                delivered = self.delivered = False
            except Exception as error:
                self._failed(error)
            if not stopping:
                with suppress(Empty):
                    self._wake.get(timeout=0 if asked else self._pause())
            elif delivered or not known or time.monotonic() > deadline:
                return
            else:
                time.sleep(RETRY)  # the exporter was there before, so it may be restarting
