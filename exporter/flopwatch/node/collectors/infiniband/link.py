"""History of a port's link: numbers of flaps and drops, and whether the link is flapping.

A link that was down for 25 s or longer and is active again has flapped. After three flaps within 12 hours it is
flapping, until an hour without a flap or until cleared by hand. Down for 4 minutes is a drop. The limits are those of
gpud's InfiniBand component (https://github.com/leptonai/gpud).
"""

import math
from typing import Any

FLAP_SECONDS = 25.0
DROP_SECONDS = 240.0
FLAPPING_FLAPS, FLAPPING_SECONDS = 3, 12 * 3600.0
HOLD_DOWN_SECONDS = 3600.0

DOWN, ACTIVE = (0, 1), (4, 5)  # INIT and ARMED neither begin nor end an outage


class Link:
    """State machine of one link, with times on a monotonic clock. Only a link that was once active flaps or drops."""

    def __init__(self) -> None:
        self.flaps = 0
        self.drops = 0
        self.flapping = False
        self._was_active = False
        self._down_since: float | None = None
        self._dropped = False
        self._recent: list[float] = []  # when it flapped, within FLAPPING_SECONDS

    def see(self, state: int | None, now: float) -> bool:
        """Update with the port state at time `now` (None: unreadable). Return whether there is a change to store."""
        before = (self.flaps, self.drops, self.flapping, self._was_active, self._down_since)
        if state in ACTIVE:
            if self._down_since is not None and now - self._down_since >= FLAP_SECONDS:
                self.flaps += 1
                self._recent.append(now)
                self._recent = [at for at in self._recent if now - at <= FLAPPING_SECONDS]
                self.flapping = self.flapping or len(self._recent) >= FLAPPING_FLAPS
            self._was_active, self._down_since, self._dropped = True, None, False
        elif state in DOWN and self._was_active and self._down_since is None:
            self._down_since = now
        if self._down_since is not None and not self._dropped and now - self._down_since >= DROP_SECONDS:
            self.drops += 1
            self._dropped = True
        if self.flapping and now - self._recent[-1] >= HOLD_DOWN_SECONDS:
            self.flapping = False
        return before != (self.flaps, self.drops, self.flapping, self._was_active, self._down_since)

    def clear(self) -> None:
        """End the flapping now. The numbers of flaps and drops are kept."""
        self.flapping = False
        self._recent.clear()

    def dump(self, now: float, unix: float) -> dict[str, Any]:
        """Return the state for `load`, with Unix times. `now` (monotonic) and `unix` are the same moment."""
        return {
            "flaps": self.flaps,
            "drops": self.drops,
            "flapping": self.flapping,
            "was_active": self._was_active,
            "down_since": None if self._down_since is None else unix - (now - self._down_since),
            "dropped": self._dropped,
            "recent": [unix - (now - at) for at in self._recent],
        }

    @classmethod
    def load(cls, stored: Any, now: float, unix: float) -> "Link":
        """Return the link stored by `dump`, or a new link if `stored` is invalid. Future times become `now`."""
        link = cls()
        try:
            flaps, drops = int(stored["flaps"]), int(stored["drops"])
            recent = [_back(at, now, unix) for at in stored["recent"]]
            down_since = stored["down_since"]
            link._down_since = None if down_since is None else _back(down_since, now, unix)
            link.flaps, link.drops = max(0, flaps), max(0, drops)
            link._recent = sorted(recent)
            link.flapping = stored["flapping"] is True and bool(recent)
            link._was_active = stored["was_active"] is True
            link._dropped = stored["dropped"] is True
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()
        return link


def _back(at: Any, now: float, unix: float) -> float:
    age = unix - float(at)
    if not math.isfinite(age):
        raise ValueError(f"{at!r} is not a time")
    return now - max(0.0, age)
