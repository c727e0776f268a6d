"""A call that may take long, made again and again in a thread of its own, and what it answered last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")

ENDED = "the thread that asks has ended"


class Background(Generic[Answer]):
    """What a call that may take long answered last; it is made every `interval` seconds in a thread of its own.

    After a failure the next call comes after `retry` seconds, and the last answer holds for `hold` seconds.
    FileNotFoundError means that there is nobody to ask.
    """

    def __init__(
        self,
        call: Callable[[], Answer],
        interval: float,
        hold: float = float("inf"),
        retry: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._call = call
        self._interval = interval
        self._hold = hold
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
        """Begin asking, if that has not begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def answer(self, patience: float) -> Answer | None:
        """Return the last answer that still holds; the first one is waited for as long as that."""
        self._first.wait(patience)
        if self.at is None or (self.error and self._clock() - self.at > self._hold):
            return None
        return self._answer

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._ask()):
                pass
        finally:
            self.error, self.absent = ENDED, False
            self._first.set()

    def _ask(self) -> float:
        """Make the call, and return after how many seconds to make it again."""
        error = ""
        try:
            answer = self._call()
        except FileNotFoundError as absence:
            error = f"{absence.strerror}: {absence.filename}"
            # One that has answered before is only restarting.
            self.absent = self.at is None
        except Exception as failure:
            # The one loop of this thread: whatever it dies of, nobody would hear.
            error, self.absent = str(failure) or type(failure).__name__, False
        else:
            self._answer, self.at, self.absent = answer, self._clock(), False
        self.error = error
        self._first.set()
        return self._retry if error else self._interval
