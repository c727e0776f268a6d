"""Clock of the simulation: a queue of actions in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[float], object]


class EventQueue:
    """Queue of actions ordered by virtual time in seconds. Actions of equal time run in the order of scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, t: float, action: Action) -> None:
        """Schedule an action for virtual time `t`. The action is called with `t`."""
        self._count += 1
        heapq.heappush(self._heap, (t, self._count, action))

    def run(self, done: Callable[[], bool]) -> None:
        """Run the actions in order of time until no action is left or `done` returns True."""
        while self._heap and not done():
            t, _, action = heapq.heappop(self._heap)
            action(t)
