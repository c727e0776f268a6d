"""Kinds of straggler and of hang, each with who is to be named; of some that is nobody, and some are no trouble."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulator.ranks import HOSTS, PER_HOST, RANKS, WELL, Card, Trouble

# When trouble begins, in seconds: a straggler's verdict takes three windows after that, a hang's the p99 before.
SLOW_FROM, HANGS_FROM = (120.0, 200.0), (280.0, 360.0)


@dataclass(frozen=True)
class Truth:
    """Who is to be named: a rank, a host, or nobody; and whether an alert has to fire, or must not."""

    rank: int | None = None
    host: int | None = None
    alerts: bool = True
    evident: bool = True  # else to name nobody is right, too


Made = tuple[Trouble, Truth]


@dataclass(frozen=True)
class Kind:
    """One kind; `make` draws a trouble of it, and the alert's text has to tell `tells`."""

    name: str
    text: str
    make: Callable[[random.Random], Made]
    tells: str = ""


def _of(ranks: frozenset[int], share: float) -> Callable[[int, int, float], float]:
    return lambda rank, step, t: share if rank in ranks else 0.0


def _late(rng: random.Random, card: Card = WELL, *, loading: bool = False, stages: tuple[float, ...] = (1.0,)) -> Made:
    """One rank takes 20 to 60 % longer."""
    rank = rng.randrange(RANKS)
    slow = _of(frozenset({rank}), rng.uniform(0.2, 0.6))
    cards = {rank: card} if card != WELL else {}
    return Trouble(rng.uniform(*SLOW_FROM), slow, loading=loading, cards=cards, stages=stages), Truth(rank)


def _hot(rng: random.Random) -> Made:
    """One rank is slow for most of every minute or two, until its GPU has cooled down."""
    rank, share = rng.randrange(RANKS), rng.uniform(0.35, 0.7)
    every, hot = rng.uniform(40, 120), rng.uniform(0.6, 0.9)
    card = Card(throttled={"hw_thermal_slowdown": hot * rng.uniform(0.7, 1.0)}, clock=rng.uniform(0.55, 0.8))
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: share if one == rank and t % every < hot * every else 0.0,
        cards={rank: card},
    ), Truth(rank)


def _transfers(rng: random.Random) -> Made:
    """One rank is slower by what its batch takes to be copied, which differs in size."""
    rank, share = rng.randrange(RANKS), rng.uniform(0.25, 0.4)
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: share * rng.uniform(0.5, 1.5) if one == rank else 0.0,
        cards={rank: Card(lanes=4)},
    ), Truth(rank)


def _collects_garbage(rng: random.Random) -> Made:
    rank, every, pause = rng.randrange(RANKS), rng.randrange(2, 5), rng.uniform(0.7, 0.9)
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: pause if one == rank and step % every == 0 else 0.0,
        collecting=True,
    ), Truth(rank)


def _noisy_neighbour(rng: random.Random) -> Made:
    rank, share = rng.randrange(RANKS), rng.uniform(0.25, 0.4)
    return Trouble(
        rng.uniform(*SLOW_FROM), lambda one, step, t: share * rng.lognormvariate(0, 0.6) if one == rank else 0.0
    ), Truth(rank)


def _slow_host(rng: random.Random) -> Made:
    host = rng.randrange(HOSTS)
    ranks = frozenset(range(host * PER_HOST, (host + 1) * PER_HOST))
    return Trouble(rng.uniform(*SLOW_FROM), _of(ranks, rng.uniform(0.2, 0.6))), Truth(host=host)


def _two(rng: random.Random) -> Made:
    share = rng.uniform(0.2, 0.5)
    shares = {rng.randrange(PER_HOST): share, PER_HOST + rng.randrange(PER_HOST): share * rng.uniform(0.95, 1.05)}
    return Trouble(rng.uniform(*SLOW_FROM), lambda rank, step, t: shares.get(rank, 0.0)), Truth(alerts=False)


def _wanders(rng: random.Random) -> Made:
    share, stays = rng.uniform(0.2, 0.5), rng.uniform(30, 100)
    turn = rng.sample(range(RANKS), RANKS)
    return Trouble(
        rng.uniform(*SLOW_FROM), lambda rank, step, t: share if rank == turn[int(t / stays) % RANKS] else 0.0
    ), Truth(alerts=False)


def _tokens(rng: random.Random) -> Made:
    return Trouble(0.0, tokens={rng.randrange(RANKS): rng.uniform(1.15, 1.5)}), Truth(alerts=False)


def _links(rng: random.Random) -> Made:
    return Trouble(rng.uniform(*SLOW_FROM), network=rng.uniform(3, 8)), Truth(alerts=False)


def _stages(rng: random.Random) -> tuple[float, ...]:
    return tuple(rng.uniform(0.75, 1.0) for _ in range(4))


def _unmeasured(rng: random.Random) -> Made:
    trouble, truth = _late(rng)
    other = rng.choice([rank for rank in range(RANKS) if rank != truth.rank])
    return Trouble(trouble.at, trouble.slow, unmeasured=frozenset({other})), Truth(alerts=False)


STRAGGLERS: tuple[Kind, ...] = (
    Kind("hot_gpu", "a GPU is throttled for its heat, again and again", _hot, "(hw_thermal_slowdown)"),
    Kind(
        "power_capped",
        "somebody lowered a GPU's power limit",
        lambda rng: _late(rng, Card(throttled={"sw_power_cap": 0.9}, clock=0.75, power_limit=rng.uniform(0.5, 0.8))),
        "Its power limit is ",
    ),
    Kind(
        "low_clock",
        "a GPU's clock is low, and nobody says why",
        lambda rng: _late(rng, Card(clock=0.6)),
        "lower than that of the other GPUs",
    ),
    Kind("narrow_pcie", "a GPU's PCIe link has four lanes", _transfers, "has only 4 lanes"),
    Kind("slow_memory", "a GPU does its work more slowly, and shows nothing", _late),
    Kind("slow_loader", "one rank's batches come late", lambda rng: _late(rng, loading=True), "It waits for data "),
    Kind("garbage", "one rank stops for a while every few steps", _collects_garbage, "It collects garbage "),
    Kind("noisy_neighbour", "somebody else is on one rank's cores", _noisy_neighbour),
    Kind("slow_host", "all eight ranks of a host are slow", _slow_host, "All ranks of run "),
    Kind(
        "late_in_stage", "one rank of a pipeline whose stages are uneven", lambda rng: _late(rng, stages=_stages(rng))
    ),
    Kind("two_ranks", "two ranks, equally slow: to mend one gains nothing", _two),
    Kind("wandering", "another rank every minute or so: the work is uneven", _wanders),
    Kind("more_tokens", "one rank has more tokens", _tokens),
    Kind("slow_links", "the network is slow for all", _links),
    Kind(
        "uneven_stages",
        "stages of a pipeline have more or less to do",
        lambda rng: (Trouble(0.0, stages=_stages(rng)), Truth(alerts=False)),
    ),
    Kind("one_unmeasured", "one rank is slow, and another is not measured", _unmeasured),
    Kind("well", "nothing is wrong", lambda rng: (Trouble(), Truth(alerts=False))),
)


def _blocked(
    rng: random.Random, *, silent: bool = False, data: bool = False, gone: bool = False, state: str = ""
) -> Made:
    """One rank does not come to the collective; of every fourth job nobody counts them."""
    one = frozenset({rank := rng.randrange(RANKS)})
    none = frozenset[int]()
    return Trouble(
        rng.uniform(*HANGS_FROM),
        hangs=True,
        behind=one,
        idle=one,
        silent=one if silent else none,
        elsewhere=one,
        without_data=one if data else none,
        gone=one if gone else none,
        blocked=state,
        uncounted=rng.random() < 0.25,
    ), Truth(rank)


def _dark_host(rng: random.Random) -> Made:
    host = rng.randrange(HOSTS)
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, dark=frozenset({host})), Truth(host=host)


def _sick_gpu(rng: random.Random, card: Card) -> Made:
    rank = rng.randrange(RANKS)
    behind = frozenset({rank} if rng.random() < 0.5 else ())  # the host may have run ahead
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=behind, cards={rank: card}), Truth(rank)


def _link_down(rng: random.Random) -> Made:
    host, port = rng.randrange(HOSTS), rng.randrange(PER_HOST)
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, links=frozenset({(host, port)})), Truth(host=host)


def _in_its_group(rng: random.Random) -> Made:
    """The ranks of the tensor parallel group wait for it inside the group, and so are missing outside as it is."""
    rank = rng.randrange(RANKS)
    group = frozenset(range(rank // 4 * 4, rank // 4 * 4 + 4))
    return Trouble(
        rng.uniform(*HANGS_FROM),
        hangs=True,
        behind=group,
        idle=frozenset({rank}),
        elsewhere=group,
        silent=frozenset({rank}) if rng.random() < 0.5 else frozenset(),
        cards={rank: Card(clock=0.999)},
    ), Truth(rank)


def _nobody(rng: random.Random) -> Made:
    """Of every other job the stages of a pipeline wait at lines of their own."""
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, stages=rng.choice(((1.0,), _stages(rng)))), Truth()


def _mismatch(rng: random.Random) -> Made:
    """It is at another line: so is a rank that logs, so nobody is named, and the line is told."""
    one = frozenset({rng.randrange(RANKS)})
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, elsewhere=one, uncounted=rng.random() < 0.25), Truth()


def _endless_kernel(rng: random.Random) -> Made:
    """The host may have run ahead of its card, to where the others are."""
    one = frozenset({rank := rng.randrange(RANKS)})
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, computing=one, cards={rank: Card(clock=0.999)}), Truth(rank)


def _halves(rng: random.Random) -> Made:
    """Half of the ranks have not started what the others wait in, on both hosts."""
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset(range(rng.randrange(2), RANKS, 2))), Truth()


def _contradicted(rng: random.Random) -> Made:
    """A rank is missing on one host, and the other host's exporter does not answer."""
    rank = rng.randrange(PER_HOST)
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset({rank}), dark=frozenset({1})), Truth(
        rank, evident=False
    )


def _declared(activity: str) -> Callable[[random.Random], Made]:
    return lambda rng: (
        Trouble(rng.uniform(*HANGS_FROM), declared=activity, lasts=rng.uniform(120, 400)),
        Truth(alerts=False),
    )


HANGS: tuple[Kind, ...] = (
    Kind(
        "stopped",
        "a rank was stopped",
        lambda rng: _blocked(rng, silent=True, state="stopped"),
        "is stopped, or stuck in the kernel",
    ),
    Kind("endless_loop", "a rank loops", _blocked, " is at train.py:88 in train."),
    Kind("endless_kernel", "a rank's card computes on", _endless_kernel, "on a GPU that goes on computing"),
    Kind(
        "dead_storage",
        "a rank is stuck in the kernel, reading a file",
        lambda rng: _blocked(rng, state="uninterruptible"),
        "is stopped, or stuck in the kernel",
    ),
    Kind(
        "skipped",
        "a rank left out a collective",
        lambda rng: (
            Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset({rank := rng.randrange(RANKS)})),
            Truth(rank),
        ),
        "is missing in the collective",
    ),
    Kind(
        "blocked_loader", "a rank's loader does not answer", lambda rng: _blocked(rng, data=True), "is waiting for data"
    ),
    Kind(
        "gil_held", "a rank's C code keeps the interpreter's lock", lambda rng: _blocked(rng, silent=True), "is silent"
    ),
    Kind(
        "killed",
        "a rank's process is gone, and nobody starts it again",
        lambda rng: _blocked(rng, gone=True),
        "is gone",
    ),
    Kind("dark_host", "a host is gone, with its exporter", _dark_host, "8 ranks on "),
    Kind(
        "lost_gpu",
        "a GPU fell off the bus",
        lambda rng: _sick_gpu(rng, Card(lost=True, xid="79")),
        "on a GPU that is lost",
    ),
    Kind(
        "gpu_timeout",
        "a GPU's firmware does not answer",
        lambda rng: _sick_gpu(rng, Card(xid="119")),
        "reported a critical Xid",
    ),
    Kind("link_down", "a host's port is down", _link_down, "behind a port that is down"),
    Kind("in_its_group", "a rank is missing in its tensor parallel group", _in_its_group, "on an idle GPU"),
    Kind("mismatch", "a rank called another collective", _mismatch, " is at train.py:88 in train."),
    Kind("no_evidence", "nothing shows who is late", _nobody),
    Kind("halves", "half of the ranks wait in one collective, half in another", _halves),
    Kind("contradiction", "a rank is missing, and another host is gone", _contradicted),
    Kind("long_save", "storage is slow in a declared checkpoint", _declared("checkpoint_save")),
    Kind("long_compile", "a graph is compiled for minutes", _declared("compile")),
    Kind("long_evaluation", "an evaluation takes minutes", _declared("evaluation")),
    Kind("well", "nothing is wrong", lambda rng: (Trouble(), Truth(alerts=False))),
)

SCENARIOS = {"stragglers": STRAGGLERS, "hangs": HANGS}
