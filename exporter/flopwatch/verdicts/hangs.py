"""Hangs: whether a run with an overdue step does no work, and the rank or host that the others wait for.

A rank that stops has called fewer operations of a communicator than its peers there, and waits in none itself. In the
coarser communicators all ranks that wait for it are behind too, so the finest communicator with a difference counts.
Of a pipeline, messages sent are compared with those that the receiver has asked for. A rank that asks for one early
seems to wait. If that leaves no rank, they are not compared.

Each sign has one vote, split among the ranks it points at. A sign that points at more than half of the ranks counts for
none of them and casts doubt on the other signs. GPU activity is compared with the same GPU's past and with that of the
other ranks, because a GPU that waits in NCCL is busy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from flopwatch.catalogue.hang_signs import HANG_SIGNS
from flopwatch.catalogue.ranks import MESSAGES
from flopwatch.verdicts.overdue import IDLE
from flopwatch.verdicts.waits import POINT_TO_POINT, Communicator

DOUBT = 0.2  # of a vote
CERTAIN = 0.5  # share of the votes above which a suspect is named
FEW = 2  # ranks that are missing and all are named; more may wait for one of them in a group that is not counted
BUSY = 0.5  # utilization
COMPUTES, TIMES_MEDIAN = 0.5, 1.5  # power as a share of the limit, and of the median of the ranks
NO_TENSOR, LOW_POWER = 0.01, 0.6  # share of the time with active tensor cores, and of the usual power


class GpuLoad(NamedTuple):
    """What a rank's GPU did in the open step. A number that is not read is None.

    These are its highest utilization, its lowest power as a share of the limit, its highest power as a share of the
    last hour's, and the share of the time with active tensor cores.
    """

    utilization: float | None
    power: float | None
    usual: float | None
    tensor: float | None


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank in an overdue step: its host, operations it has called by communicator, signs (HANG_SIGNS) and GPU."""

    host: str = ""
    called: Mapping[Communicator, int] = field(default_factory=dict)
    signs: tuple[str, ...] = ()
    gpu: GpuLoad | None = None


class HangSuspect(NamedTuple):
    """Rank that the others wait for, or all ranks of a host (`rank` is None), with its share of the votes.

    `communicator` is the finest one in which it is missing, None if it is missing in none.
    """

    rank: int | None
    host: str
    share: float
    signs: tuple[str, ...]
    communicator: Communicator | None = None


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Suspects, best first, and the ranks that each sign points at. `why`: no suspect was found."""

    suspects: tuple[HangSuspect, ...] = ()
    signs: Mapping[str, frozenset[int]] = field(default_factory=dict)
    why: str = ""


def does_work(ranks: Iterable[RankState], *, still: bool | None) -> bool:
    """Return whether a run with an overdue step still does work, as far as is known.

    `still` is whether the ranks call no further operations, None if these are not counted.
    """
    gpus = [rank.gpu for rank in ranks if not {"gone", "gpu"} & set(rank.signs)]
    tensor = [gpu.tensor for gpu in gpus if gpu is not None and gpu.tensor is not None]
    every = bool(gpus) and len(tensor) == len(gpus)
    if every and min(tensor) >= NO_TENSOR:
        return True
    if still is not None:
        return not still
    if every:
        return max(tensor) >= NO_TENSOR
    power = [gpu.usual for gpu in gpus if gpu is not None and gpu.usual is not None]
    return not (gpus and len(power) == len(gpus) and sum(power) < LOW_POWER * len(power))


def judge(
    ranks: Mapping[int, RankState], launched: Mapping[int, Mapping[Communicator, int]] | None = None
) -> HangVerdict:
    """Return the verdict on a run with an overdue step that does no work.

    `launched` has numbers of operations like `RankState.called` has, by NCCL's own count.
    """
    numbers = {rank: state.called for rank, state in ranks.items()}
    called = _missing(numbers) or _missing(numbers, without=(POINT_TO_POINT, *MESSAGES))
    by_nccl = {rank: group for rank, group in _missing(launched or {}).items() if rank in ranks}
    missing = {**by_nccl, **called}
    signs = {sign: frozenset(rank for rank, state in ranks.items() if sign in state.signs) for sign in HANG_SIGNS}
    signs |= {"sequence": frozenset(called), "ras": frozenset(by_nccl), **_of_gpus(ranks)}
    signs = {sign: pointed for sign, pointed in signs.items() if pointed}
    votes: dict[int, float] = {}
    for pointed in signs.values():
        if len(pointed) <= len(ranks) / 2:
            for rank in pointed:
                votes[rank] = votes.get(rank, 0.0) + 1 / len(pointed) / (len(signs) + DOUBT)
    named = [rank for rank in sorted(votes) if votes[rank] > CERTAIN]
    # In a pipeline, one of them may wait for the other in a receive.
    paired = any(group.kind == POINT_TO_POINT for state in ranks.values() for group in state.called)
    if not named and signs.keys() <= {"sequence", "ras"} and len(missing) <= FEW and not paired:
        named = sorted(missing.keys() & votes.keys())
    suspects = [
        HangSuspect(rank, ranks[rank].host, votes[rank], _signs_of({rank}, signs), missing.get(rank)) for rank in named
    ]
    if not named:
        suspects = _hosts(ranks, votes, signs)
    why = "" if suspects else "the signs point at no rank or host" if signs else "no sign points at a rank"
    return HangVerdict(tuple(suspects), signs, why)


def _missing(
    called: Mapping[int, Mapping[Communicator, int]], without: Sequence[str] = (POINT_TO_POINT,)
) -> dict[int, Communicator]:
    """Return the ranks that the others wait for, with the finest communicator in which they are behind."""
    behind: dict[int, Communicator] = {}
    waiting = set()
    groups = {group for calls in called.values() for group in calls if group.kind not in without}
    for group in sorted(groups, key=lambda group: group.order):
        numbers = {rank: called[rank][group] for rank in group.ranks if group in called.get(rank, {})}
        for rank, number in numbers.items():
            if number < max(numbers.values()):
                behind.setdefault(rank, Communicator(POINT_TO_POINT, group.ranks) if group.kind in MESSAGES else group)
            if number > min(numbers.values()):
                waiting.add(rank)
    suspects = {rank: group for rank, group in behind.items() if rank not in waiting}
    finest = min((group.order[:2] for group in suspects.values()), default=0)
    return {rank: group for rank, group in suspects.items() if group.order[:2] == finest}


def _of_gpus(ranks: Mapping[int, RankState]) -> dict[str, frozenset[int]]:
    """Return the ranks whose GPU alone is idle, and whose GPU alone computes."""
    gpus = {rank: state.gpu for rank, state in ranks.items() if state.gpu is not None}
    busy = {rank: gpu.utilization for rank, gpu in gpus.items() if gpu.utilization is not None}
    power = {rank: gpu.power for rank, gpu in gpus.items() if gpu.power is not None}
    most_busy = bool(busy) and median(busy.values()) > BUSY
    idle = {rank for rank, share in busy.items() if most_busy and share < IDLE}
    usual = TIMES_MEDIAN * median(power.values()) if power else 0.0
    computing = {rank for rank, share in power.items() if share > COMPUTES and share > usual}
    return {"idle": frozenset(idle), "computing": frozenset(computing)}


def _signs_of(ranks: set[int], signs: Mapping[str, frozenset[int]]) -> tuple[str, ...]:
    """Return the signs that point at all of these ranks, in the order of HANG_SIGNS."""
    return tuple(sign for sign in HANG_SIGNS if ranks <= signs.get(sign, frozenset()))


def _hosts(
    ranks: Mapping[int, RankState], votes: Mapping[int, float], signs: Mapping[str, frozenset[int]]
) -> list[HangSuspect]:
    """Return the host whose ranks together have most of the votes, if the run has several hosts."""
    of_host: dict[str, set[int]] = {}
    for rank, state in ranks.items():
        of_host.setdefault(state.host, set()).add(rank)
    shares = {host: sum(votes.get(rank, 0.0) for rank in own) for host, own in of_host.items() if host}
    if len(of_host) < 2:
        return []
    return [
        HangSuspect(None, host, share, _signs_of({rank for rank in of_host[host] if rank in votes}, signs))
        for host, share in sorted(shares.items())
        if share > CERTAIN
    ]
