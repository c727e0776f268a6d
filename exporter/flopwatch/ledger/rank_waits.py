"""Processes of a run with their communicators, and where their totals are in the records of their hosts.

A run may have 131,072 ranks in half a million places. So intervals are arrays, and what hosts repeat is read once.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import numpy as np

from flopwatch.ledger.record import WAIT, WAIT_TOTALS, HostWaits, RankProcess
from flopwatch.verdicts.waits import Array, Communicator, Interval, Layout, Unmeasured

UNKNOWN_WAIT = 0.02  # of a step that a rank may wait in groups that are not known


def totals_of(hosts: Iterable[HostWaits]) -> Array:
    """Return the totals of all hosts in one array."""
    return np.frombuffer(b"".join(host.totals for host in hosts))


class Processes:
    """Processes of all ranks, in the order of their hosts' records.

    Without process groups, the ranks of a pipeline stage are a communicator. `communicator` makes one from its kind,
    its ranks and the run's number of ranks.
    """

    def __init__(
        self, hosts: Iterable[tuple[RankProcess, ...]], communicator: Callable[[str, str, int], Communicator]
    ) -> None:
        self.of_hosts = list(hosts)
        every = [process for host in self.of_hosts for process in host]
        sizes: Array = np.fromiter((WAIT_TOTALS + len(process.groups) for process in every), np.intp)
        ends: Array = np.cumsum(sizes)
        order: Array = np.argsort(np.fromiter((process.rank for process in every), np.intp))
        sizes, self._at = sizes[order], (ends - sizes)[order]
        ranks = [every[number] for number in order.tolist()]
        self.started = {process.rank: process.started for process in ranks}
        self._grouped = len(every) * WAIT_TOTALS < sizes.sum()
        if not self._grouped:
            places = _by_place(ranks)
            self.layout = Layout({process.rank: [places[process.place]] for process in ranks})
            self._waits = self._at[self.layout.rank_of] + WAIT
            return
        named = dict.fromkeys(chain.from_iterable(process.groups for process in ranks))
        groups = {(kind, text): communicator(kind, text, len(every)) for kind, text in named}
        self.layout = Layout({process.rank: [groups[name] for name in process.groups] for process in ranks})
        numbers = {group: number for number, group in enumerate(self.layout.communicators)}
        number_of = {name: numbers[group] for name, group in groups.items()}
        sizes -= WAIT_TOTALS
        of_rank: Array = np.repeat(np.arange(len(ranks)), sizes)
        group: Array = np.fromiter((number_of[name] for process in ranks for name in process.groups), np.intp)
        if len(group) != len(self.layout.rank_of):
            raise Unmeasured("the waits of a rank in one of its process groups are not measured")
        # The waits are sorted by communicator, then by rank, as places are.
        inside = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = np.lexsort((of_rank, group))
        if (of_rank[order] != self.layout.rank_of).any():
            raise Unmeasured("a rank is in the same process group twice, or not in its own")
        self._waits = (self._at[of_rank] + WAIT_TOTALS + inside)[order]

    def interval(self, then: Array, now: Array) -> Interval:
        """Return the steps between two totals_of() their hosts. Raises Unmeasured."""
        grown = now - then
        steps, seconds, tokens, _, squares = (grown[self._at + number] for number in range(WAIT_TOTALS))
        found = Interval(self.layout, steps, seconds, grown[self._waits], tokens, squares)
        if self._grouped:
            known = np.bincount(self.layout.rank_of, now[self._waits], len(steps))
            unknown = np.flatnonzero(now[self._at + WAIT] - known > UNKNOWN_WAIT * now[self._at + 1])
            if len(unknown):
                rank = self.layout.ranks[unknown[0]]
                raise Unmeasured(f"rank {rank} waits in process groups that are not known")
        return found


def _by_place(every: Iterable[RankProcess]) -> Mapping[str, Communicator]:
    """Return a communicator for the ranks of each pipeline stage, for ranks without known groups."""
    ranks: dict[str, list[int]] = {}
    for process in every:
        ranks.setdefault(process.place, []).append(process.rank)
    kind = "dp" if len(ranks) > 1 else "world"
    return {place: Communicator(kind, tuple(sorted(own))) for place, own in ranks.items()}
