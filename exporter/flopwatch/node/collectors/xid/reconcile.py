"""Count of events that several sources report: the kernel log and NVML's event set.

A source may lose events and may report late, but reports each event at most once and in order. For the events of one
key, the count is right if one source reported all of them, or if they are further apart than the window. It is never
too high, and too low only if within one window each source lost events that another saw.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Limit of remembered events of one key. A longer burst within the window is counted without comparison.
MAX_EVENTS = 4096
# Limit of those that are stored for the next process.
MAX_STORED = 64


class _Counted:
    """Counted events of one key: the time from the first source, and all sources that reported each."""

    def __init__(self) -> None:
        self.events: deque[tuple[float, set[str]]] = deque()
        self._dropped = 0
        # By source, how many events it can no longer report: done already, or too old.
        self._past: dict[str, int] = {}

    def matches(self, source: str, at: float, window: float) -> bool:
        """Return whether an event within the window lacks this source, and add the source to it."""
        position = max(self._past.get(source, 0), self._dropped)
        found = False
        while position < self._dropped + len(self.events):
            when, sources = self.events[position - self._dropped]
            if when > at + window:
                break
            position += 1
            if when >= at - window and source not in sources:
                sources.add(source)
                found = True
                break
        self._past[source] = position
        return found

    def near(self, at: float, window: float) -> bool:
        """Return whether any event is within the window."""
        for when, _ in reversed(self.events):
            if when < at - window:
                return False
            if when <= at + window:
                return True
        return False

    def add(self, at: float, sources: Iterable[str]) -> None:
        self.events.append((at, set(sources)))
        if len(self.events) > MAX_EVENTS:
            self.drop()

    def drop(self) -> None:
        self.events.popleft()
        self._dropped += 1


class Reconciler(Generic[Key]):
    """Filter of events that another source has already reported; `window` is in seconds."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._keys: dict[Key, _Counted] = {}

    def news(self, key: Key, source: str, at: float, repeats: bool = False) -> bool:
        """Return whether to count this event; `at` is in seconds on a clock that the sources share.

        A source that `repeats` may report one event any number of times. Its event counts only if no source reported
        one.
        """
        counted = self._keys.setdefault(key, _Counted())
        if counted.near(at, self.window) if repeats else counted.matches(source, at, self.window):
            return False
        counted.add(at, [source])
        return True

    def forget(self, now: float) -> None:
        """Drop events older than two windows, which no source reports any more."""
        for key, counted in list(self._keys.items()):
            while counted.events and counted.events[0][0] < now - 2 * self.window:
                counted.drop()
            if not counted.events:
                del self._keys[key]

    def __iter__(self) -> Iterator[tuple[Key, float, list[str]]]:
        """Yield the remembered events, for `restore` in another process."""
        for key, counted in self._keys.items():
            for at, sources in list(counted.events)[-MAX_STORED:]:
                yield key, at, sorted(sources)

    def restore(self, counted: Iterable[tuple[Key, float, Iterable[str]]]) -> None:
        """Add events that another process counted."""
        for key, at, sources in counted:
            self._keys.setdefault(key, _Counted()).add(at, sources)
