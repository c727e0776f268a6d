"""Requests of the ledger for stacks of this host's ranks. The answer to a rank's next push passes them on."""

import math
import time
from collections.abc import Callable, Iterable

from flopwatch.catalogue.stacks import SEND_STACKS
from flopwatch.ledger.record import printable
from flopwatch.node.telemetry.admission import MAX_RANKS, RankKey
from flopwatch.node.telemetry.otlp import Push

AGAIN = 10.0  # seconds after which a rank that has not answered is asked once more, if the ledger repeats its request


class StackRequests:
    """Requests by rank, and when the rank was asked, on a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[RankKey, float] = {}

    def add(self, ranks: Iterable[RankKey]) -> None:
        """Add requests, in place of the oldest if there are too many."""
        for key in ranks:
            self._asked[key] = self._asked.pop(key, -math.inf)
        for key in list(self._asked)[:-MAX_RANKS]:
            self._asked.pop(key, None)

    def message(self, push: Push) -> str:
        """Return the message that asks the process of a push for its stacks, empty if they are not requested."""
        key: RankKey = push.tenant, push.run, push.rank
        if self._clock() - self._asked.get(key, math.inf) < AGAIN:
            return ""
        self._asked[key] = self._clock()
        return SEND_STACKS

    def text(self, push: Push) -> str:
        """Return the stacks in a push as printable text, empty if it has none or was not asked for them."""
        key: RankKey = push.tenant, push.run, push.rank
        if not push.stacks or self._asked.get(key, -math.inf) == -math.inf:
            return ""
        del self._asked[key]
        return printable(push.stacks, keep="\n")
