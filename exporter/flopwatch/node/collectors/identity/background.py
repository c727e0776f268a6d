"""Repeated slow call in a background thread, and its last answer."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")

ENDED = "the background thread has ended"


class BackgroundCall(Generic[Answer]):
    """Last answer of a slow call, which a thread repeats every `interval` seconds.

    After a failure the call is repeated in `retry` seconds, and the last answer stays valid until it is `hold` seconds
    old. A FileNotFoundError from a server that has never answered sets `absent`.
    """

    def __init__(
        self,
        call: Callable[[], Answer],
        interval: float,
        hold: float = float("inf"),
        retry: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._call, self._interval, self._hold = call, interval, hold
        self._retry = interval if retry is None else retry
        self._clock = clock
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._answer: Answer | None = None
        self.at: float | None = None  # Unix time of the last answer
        self.error = "not answered yet"
        self.absent = False

    def start(self) -> None:
        """Start the thread if it is not running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def answer(self, timeout: float) -> Answer | None:
        """Return the last answer, or None if it has expired. Wait up to `timeout` seconds for the first call."""
        self._first.wait(timeout)
        if self.at is None or (self.error and self._clock() - self.at > self._hold):
            return None
        return self._answer

    def close(self) -> None:
        """Stop repeating the call."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._ask()):
                pass
        finally:
            self.error, self.absent = ENDED, False
            self._first.set()

    def _ask(self) -> float:
        """Make the call once. Return the seconds to wait before the next call."""
        error = ""
        try:
            answer = self._call()
        except FileNotFoundError as absence:
            error = f"{absence.strerror}: {absence.filename}"
            self.absent = self.at is None  # a server that answered before is only restarting
        except Exception as failure:
            # An error that escaped this thread would be invisible.
            error, self.absent = str(failure) or type(failure).__name__, False
        else:
            self._answer, self.at, self.absent = answer, self._clock(), False
        self.error = error
        self._first.set()
        return self._retry if error else self._interval
