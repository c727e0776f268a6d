"""Process groups behind the communicators that NCCL Inspector names by a hash, the number of ranks and perhaps a name.

The rank in a communicator is that in the process group. The ranks of this host that are known to be members must be
all that the group has on this host. PyTorch makes communicators of two ranks for sends and receives.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise

from flopwatch.catalogue.ranks import all_ranks_text, kind_of, ranks_of, ranks_text
from flopwatch.node.telemetry.inspector_formats import MEAN, Member

PIPELINE, WHOLE_JOB, UNKNOWN = "pp", "world", "group"

Group = tuple[str, str]  # kind, and text of the ranks
Ranks = tuple[int, ...]

_ranks = lru_cache(512)(ranks_of)


def owner(name: str, place: int, reported: Mapping[int, Collection[Group]]) -> int | None:
    """Return the one rank with this place in a communicator of this name, None if there is not exactly one."""
    kind = kind_of(name)
    found = {
        rank
        for rank, groups in reported.items()
        for group in groups
        if group[0] == kind and place_of(_ranks(group[1]), rank) == place
    }
    return found.pop() if len(found) == 1 else None


def place_of(ranks: Ranks, rank: int) -> int | None:
    """Return the place of a rank among sorted ranks, None without one."""
    place = bisect_left(ranks, rank)
    return place if place < len(ranks) and ranks[place] == rank else None


def group_of(
    rank: int,
    member: Member,
    kind: str,
    reported: Collection[Group],
    members: Mapping[int, int],
    local: Collection[int],
) -> Group | None:
    """Return the group of a communicator of a rank, None if it is not certain.

    `kind` is that of the operation. `reported` has the groups of the rank, `members` the known ranks of the
    communicator by their places, and `local` the ranks of this host.
    """
    fitting: dict[Ranks, Group] = {}
    for name, ranks in _candidates(rank, reported):
        if member.size not in (0, len(ranks)) or member.rank not in (-1, place_of(ranks, rank)):
            continue
        known = {other: place_of(ranks, other) for other in members.values()}
        here = sum(place_of(ranks, other) is not None for other in local)
        if not members or (all(known[other] == place for place, other in members.items()) and here == len(known)):
            fitting.setdefault(ranks, (name, ranks_text(ranks) or ""))
    if len(fitting) > 1 and (wanted := kind_of(member.name)):
        fitting = {ranks: group for ranks, group in fitting.items() if group[0] == wanted}
    if len(fitting) > 1 and kind == MEAN:  # a pipeline has no collectives
        fitting = {ranks: group for ranks, group in fitting.items() if group[0] != PIPELINE}
    if fitting:
        return next(iter(fitting.values())) if len(fitting) == 1 else None
    largest = max([*local, *(len(ranks) - 1 for _, ranks in _candidates(rank, reported))])
    if member.size > largest and member.rank in (-1, rank) and all(place == one for place, one in members.items()):
        return WHOLE_JOB, all_ranks_text(member.size)
    if 0 < len(members) == member.size and (text := ranks_text(members.values())) is not None:
        return kind_of(member.name) or UNKNOWN, text
    return None


def _candidates(rank: int, reported: Collection[Group]) -> Iterator[tuple[str, Ranks]]:
    for kind, text in reported:
        ranks = _ranks(text)
        yield kind, ranks
        if kind == PIPELINE and len(ranks) > 2:
            yield from ((PIPELINE, pair) for pair in pairwise(ranks) if rank in pair)


def waits_of_receives(rank: int, group: Group, by_peer: Mapping[int, float]) -> Iterator[tuple[Group, float]]:
    """Yield groups and seconds waited from the receives of a rank by the peer's place, which has 0 of sends alone.

    An all-to-all receives from all peers at once, and a pipeline from its neighbours in turn.
    """
    kind, text = group
    ranks = _ranks(text)
    peers = {ranks[place]: seconds for place, seconds in by_peer.items() if place < len(ranks) and ranks[place] != rank}
    if kind in (PIPELINE, WHOLE_JOB, UNKNOWN) and len(peers) <= 2:
        for peer, seconds in peers.items():
            yield (PIPELINE, ranks_text((rank, peer)) or ""), seconds
    elif some := [seconds for seconds in peers.values() if seconds]:
        yield group, sum(some) / len(some)
