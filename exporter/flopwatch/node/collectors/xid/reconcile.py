"""Filter of events that the kernel log and NVML's event set both report, so that each is counted once.

A source may lose events and report late, but it reports each event at most once and in order. A key's count is never
too high. It is right if one source reported all events, or if they are further apart than the window. It is too low
only if each source lost events within one window that the other source reported.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MAX_EVENTS = 4096  # remembered events of one key, beyond which a burst is counted without comparison
MAX_STORED = 64  # of these, the number that is stored for the next process


class _Counted:
    """Counted events of one key, each as (time from its first source, all sources that reported it)."""

    def __init__(self) -> None:
        self.events: deque[tuple[float, set[str]]] = deque()
        self._dropped = 0
        self._past: dict[str, int] = {}  # by source: number of events that it reported or that are too old

    def matches(self, source: str, at: float, window: float) -> bool:
        """Return whether a counted event in the window is not yet known from `source`, and add the source to it."""
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
        """Return whether any counted event is within `window` seconds of `at`."""
        return any(abs(when - at) <= window for when, _ in reversed(self.events))

    def add(self, at: float, sources: Iterable[str]) -> None:
        self.events.append((at, set(sources)))
        if len(self.events) > MAX_EVENTS:
            self.drop()

    def drop(self) -> None:
        self.events.popleft()
        self._dropped += 1


class Reconciler(Generic[Key]):
    """Filter of events that another source already reported, at most `window` seconds apart."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._keys: dict[Key, _Counted] = {}

    def news(self, key: Key, source: str, at: float, repeats: bool = False) -> bool:
        """Return whether to count an event at time `at`. A source that `repeats` may report one event many times."""
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
        """Yield (key, time, sources) of the remembered events, for `restore` in another process."""
        for key, counted in self._keys.items():
            for at, sources in list(counted.events)[-MAX_STORED:]:
                yield key, at, sorted(sources)

    def restore(self, counted: Iterable[tuple[Key, float, Iterable[str]]]) -> None:
        """Add (key, time, sources) of events that an earlier process counted."""
        for key, at, sources in counted:
            self._keys.setdefault(key, _Counted()).add(at, sources)
