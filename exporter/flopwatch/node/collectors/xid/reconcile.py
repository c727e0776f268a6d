"""One count out of several sources that each tell of the same events: the kernel log and NVML's event set.

Pure: no clock, no I/O. A source may lose events and may tell late, but tells each event at most once and its own in
order. Then, of the events with one key:

- if one source told of all of them, the count is theirs: N kernel lines and M NVML events are max(N, M);
- if they are further apart than the window, the count is right whichever source saw which;
- it is never more than happened, and less only if within one window each source lost events that another saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Events of one key that are remembered; a longer burst within the window counts on without being compared.
REMEMBERED = 4096
# And how many of them another process is told.
HANDED_ON = 64


class _Counted:
    """The events of one key that were counted: when the first source says they happened, and who told of them."""

    def __init__(self) -> None:
        self.events: deque[tuple[float, set[str]]] = deque()
        self._dropped = 0
        # By source, how many events it will not tell of any more: it has, or they are too old for what it tells now.
        self._past: dict[str, int] = {}

    def matches(self, source: str, at: float, window: float) -> bool:
        """Return whether an event within the window is one that this source has not told of; now it has."""
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
        if len(self.events) > REMEMBERED:
            self.drop()

    def drop(self) -> None:
        self.events.popleft()
        self._dropped += 1


class Reconciler(Generic[Key]):
    """Tells what is news from what another source has told already; `window` is in seconds."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._keys: dict[Key, _Counted] = {}

    def news(self, key: Key, source: str, at: float, repeats: bool = False) -> bool:
        """Return whether this is an event to count; `at` is in seconds, on any clock that the sources share.

        A source that `repeats` tells of one event any number of times, so it has news only where nobody has.
        """
        counted = self._keys.setdefault(key, _Counted())
        if counted.near(at, self.window) if repeats else counted.matches(source, at, self.window):
            return False
        counted.add(at, [source])
        return True

    def forget(self, now: float) -> None:
        """Drop what no source will tell of any more: what is two windows old."""
        for key, counted in list(self._keys.items()):
            while counted.events and counted.events[0][0] < now - 2 * self.window:
                counted.drop()
            if not counted.events:
                del self._keys[key]

    def __iter__(self) -> Iterator[tuple[Key, float, list[str]]]:
        """Yield what is remembered, for `restore` in another process."""
        for key, counted in self._keys.items():
            for at, sources in list(counted.events)[-HANDED_ON:]:
                yield key, at, sorted(sources)

    def restore(self, counted: Iterable[tuple[Key, float, Iterable[str]]]) -> None:
        """Remember what another process has counted."""
        for key, at, sources in counted:
            self._keys.setdefault(key, _Counted()).add(at, sources)
