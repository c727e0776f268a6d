"""Kinds of stragglers and hangs with the rank or host that the alert must name, and healthy jobs without an alert."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulator.ranks import HOSTS, PER_HOST, RANKS, WELL, CardSymptoms, Trouble

# Range of the seconds at which trouble begins. A straggler's usual wait is measured before it, a hang's needs the
# p99 of the steps before it.
SLOW_FROM, HANGS_FROM = (120.0, 200.0), (280.0, 360.0)


@dataclass(frozen=True)
class ExpectedVerdict:
    """The ranks or host that the alert must name, if any, and whether an alert must fire."""

    rank: int | None = None
    host: int | None = None
    alerts: bool = True
    evident: bool = True  # if False, an alert without a name is right, too
    also: int | None = None  # a second rank
    late: Callable[[int, float], bool] | None = None  # whether a rank is late at a time, if others are in turn

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks that must be named."""
        return frozenset(rank for rank in (self.rank, self.also) if rank is not None)


Made = tuple[Trouble, ExpectedVerdict]


@dataclass(frozen=True)
class TroubleKind:
    """A kind of trouble. `make` draws one with its expected verdict. The alert text must contain `text_part`."""

    name: str
    text: str
    make: Callable[[random.Random], Made]
    text_part: str = ""


def _of(ranks: frozenset[int], share: float) -> Callable[[int, int, float], float]:
    return lambda rank, step, t: share if rank in ranks else 0.0


def _late(
    rng: random.Random, card: CardSymptoms = WELL, *, loading: bool = False, stages: tuple[float, ...] = (1.0,)
) -> Made:
    """Draw a trouble in which one rank takes 20 to 60 % longer for each step."""
    rank = rng.randrange(RANKS)
    slow = _of(frozenset({rank}), rng.uniform(0.2, 0.6))
    cards = {rank: card} if card != WELL else {}
    return Trouble(rng.uniform(*SLOW_FROM), slow, loading=loading, cards=cards, stages=stages), ExpectedVerdict(rank)


def _hot(rng: random.Random) -> Made:
    """Draw a trouble in which one rank is slow for 60 to 90 % of every 40 to 120 s, while its GPU is hot."""
    rank, share = rng.randrange(RANKS), rng.uniform(0.35, 0.7)
    every, hot = rng.uniform(40, 120), rng.uniform(0.6, 0.9)
    card = CardSymptoms(throttled={"hw_thermal_slowdown": hot * rng.uniform(0.7, 1.0)}, clock=rng.uniform(0.55, 0.8))
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: share if one == rank and t % every < hot * every else 0.0,
        cards={rank: card},
    ), ExpectedVerdict(rank)


def _transfers(rng: random.Random) -> Made:
    """Draw a trouble in which one rank copies its batches, which differ in size, slowly to the GPU."""
    rank, share = rng.randrange(RANKS), rng.uniform(0.25, 0.4)
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: share * rng.uniform(0.5, 1.5) if one == rank else 0.0,
        cards={rank: CardSymptoms(lanes=4)},
    ), ExpectedVerdict(rank)


def _collects_garbage(rng: random.Random) -> Made:
    rank, every, pause = rng.randrange(RANKS), rng.randrange(2, 5), rng.uniform(0.7, 0.9)
    return Trouble(
        rng.uniform(*SLOW_FROM),
        lambda one, step, t: pause if one == rank and step % every == 0 else 0.0,
        collecting=True,
    ), ExpectedVerdict(rank)


def _noisy_neighbour(rng: random.Random) -> Made:
    rank, share = rng.randrange(RANKS), rng.uniform(0.25, 0.4)
    return Trouble(
        rng.uniform(*SLOW_FROM), lambda one, step, t: share * rng.lognormvariate(0, 0.6) if one == rank else 0.0
    ), ExpectedVerdict(rank)


def _slow_host(rng: random.Random) -> Made:
    host = rng.randrange(HOSTS)
    ranks = frozenset(range(host * PER_HOST, (host + 1) * PER_HOST))
    return Trouble(rng.uniform(*SLOW_FROM), _of(ranks, rng.uniform(0.2, 0.6))), ExpectedVerdict(host=host)


def _two(rng: random.Random) -> Made:
    share = rng.uniform(0.2, 0.5)
    shares = {rng.randrange(PER_HOST): share, PER_HOST + rng.randrange(PER_HOST): share * rng.uniform(0.95, 1.05)}
    one, two = shares
    return Trouble(rng.uniform(*SLOW_FROM), lambda rank, step, t: shares.get(rank, 0.0)), ExpectedVerdict(one, also=two)


def _wanders(rng: random.Random) -> Made:
    share, stays = rng.uniform(0.2, 0.5), rng.uniform(30, 100)
    turn = rng.sample(range(RANKS), RANKS)
    at = rng.uniform(*SLOW_FROM)

    def slow(rank: int, step: int, t: float) -> float:
        return share if rank == turn[int(t / stays) % RANKS] else 0.0

    def late(rank: int, t: float) -> bool:
        """Return whether the rank was late in the minute and a half before `t`, which a verdict is about."""
        return any(slow(rank, 0, t - before) > 0 for before in range(91) if t - before >= at)

    return Trouble(at, slow), ExpectedVerdict(late=late, evident=False)


def _tokens(rng: random.Random) -> Made:
    return Trouble(0.0, tokens={rng.randrange(RANKS): rng.uniform(1.15, 1.5)}), ExpectedVerdict(alerts=False)


def _links(rng: random.Random) -> Made:
    return Trouble(rng.uniform(*SLOW_FROM), network=rng.uniform(3, 8)), ExpectedVerdict(alerts=False)


def _stages(rng: random.Random) -> tuple[float, ...]:
    return tuple(rng.uniform(0.75, 1.0) for _ in range(4))


def _unmeasured(rng: random.Random) -> Made:
    trouble, truth = _late(rng)
    other = rng.choice([rank for rank in range(RANKS) if rank != truth.rank])
    return Trouble(trouble.at, trouble.slow, unmeasured=frozenset({other})), ExpectedVerdict(alerts=False)


STRAGGLERS: tuple[TroubleKind, ...] = (
    TroubleKind("hot_gpu", "a GPU is throttled again and again because it is hot", _hot, "(hw_thermal_slowdown)"),
    TroubleKind(
        "power_capped",
        "the power limit of a GPU was lowered",
        lambda rng: _late(
            rng, CardSymptoms(throttled={"sw_power_cap": 0.9}, clock=0.75, power_limit=rng.uniform(0.5, 0.8))
        ),
        "Its power limit is ",
    ),
    TroubleKind(
        "low_clock",
        "the clock of a GPU is low for no visible reason",
        lambda rng: _late(rng, CardSymptoms(clock=0.6)),
        "below the median of the run's GPUs",
    ),
    TroubleKind("narrow_pcie", "the PCIe link of a GPU has four lanes", _transfers, "has only 4 lanes"),
    TroubleKind("slow_memory", "a GPU is slow, and no metric shows why", _late),
    TroubleKind(
        "slow_loader", "the batches of one rank arrive late", lambda rng: _late(rng, loading=True), "It waits for data "
    ),
    TroubleKind("garbage", "one rank collects garbage every few steps", _collects_garbage, "It collects garbage "),
    TroubleKind("noisy_neighbour", "another program uses the cores of one rank", _noisy_neighbour),
    TroubleKind("slow_host", "all eight ranks of a host are slow", _slow_host, "All ranks of run "),
    TroubleKind(
        "late_in_stage", "one rank of a pipeline whose stages are uneven", lambda rng: _late(rng, stages=_stages(rng))
    ),
    TroubleKind("two_ranks", "two ranks are equally slow, so repairing one gains nothing", _two),
    TroubleKind("wandering", "another rank is slow every minute or so; one that is not may not be named", _wanders),
    TroubleKind("more_tokens", "one rank has more tokens", _tokens),
    TroubleKind("slow_links", "the network is slow for all ranks", _links),
    TroubleKind(
        "uneven_stages",
        "the stages of a pipeline have different work",
        lambda rng: (Trouble(0.0, stages=_stages(rng)), ExpectedVerdict(alerts=False)),
    ),
    TroubleKind("one_unmeasured", "one rank is slow, and another is not measured", _unmeasured),
    TroubleKind("well", "nothing is wrong", lambda rng: (Trouble(), ExpectedVerdict(alerts=False))),
)


def _blocked(
    rng: random.Random, *, silent: bool = False, data: bool = False, gone: bool = False, state: str = ""
) -> Made:
    """Draw a hang in which one rank does not start the collective. A quarter of the jobs do not count collectives."""
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
    ), ExpectedVerdict(rank)


def _dark_host(rng: random.Random) -> Made:
    host = rng.randrange(HOSTS)
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, dark=frozenset({host})), ExpectedVerdict(host=host)


def _sick_gpu(rng: random.Random, card: CardSymptoms) -> Made:
    rank = rng.randrange(RANKS)
    behind = frozenset({rank} if rng.random() < 0.5 else ())  # the process can be ahead of its GPU
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=behind, cards={rank: card}), ExpectedVerdict(rank)


def _link_down(rng: random.Random) -> Made:
    host, port = rng.randrange(HOSTS), rng.randrange(PER_HOST)
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, links=frozenset({(host, port)})), ExpectedVerdict(host=host)


def _in_its_group(rng: random.Random) -> Made:
    """Draw a hang of one rank in its tensor parallel group, so the whole group is missing in the job's collective."""
    rank = rng.randrange(RANKS)
    group = frozenset(range(rank // 4 * 4, rank // 4 * 4 + 4))
    return Trouble(
        rng.uniform(*HANGS_FROM),
        hangs=True,
        behind=group,
        idle=frozenset({rank}),
        elsewhere=group,
        silent=frozenset({rank}) if rng.random() < 0.5 else frozenset(),
        cards={rank: CardSymptoms(clock=0.999)},
    ), ExpectedVerdict(rank)


def _no_evidence(rng: random.Random) -> Made:
    """Draw a hang without evidence on any rank. In half of the jobs, stages wait at different lines of code."""
    return Trouble(rng.uniform(*HANGS_FROM), hangs=True, stages=rng.choice(((1.0,), _stages(rng)))), ExpectedVerdict()


def _mismatch(rng: random.Random) -> Made:
    """Draw a hang with one rank at another line of code than the others.

    A rank that writes a log would be at another line, too. So the alert must show the line but name no rank.
    """
    one = frozenset({rng.randrange(RANKS)})
    return Trouble(
        rng.uniform(*HANGS_FROM), hangs=True, elsewhere=one, uncounted=rng.random() < 0.25
    ), ExpectedVerdict()


def _endless_kernel(rng: random.Random) -> Made:
    """Draw a hang in which a GPU kernel of one rank does not end. Its process has still reached the collective."""
    one = frozenset({rank := rng.randrange(RANKS)})
    return Trouble(
        rng.uniform(*HANGS_FROM), hangs=True, computing=one, cards={rank: CardSymptoms(clock=0.999)}
    ), ExpectedVerdict(rank)


def _halves(rng: random.Random) -> Made:
    """Draw a hang in which half of the ranks on each host have not started the collective of the other half."""
    return Trouble(
        rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset(range(rng.randrange(2), RANKS, 2))
    ), ExpectedVerdict()


def _contradicted(rng: random.Random) -> Made:
    """Draw a hang: a rank of host 0 is missing in the collective, and the exporter of host 1 does not answer."""
    rank = rng.randrange(PER_HOST)
    return Trouble(
        rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset({rank}), dark=frozenset({1})
    ), ExpectedVerdict(rank, evident=False)


def _declared(activity: str) -> Callable[[random.Random], Made]:
    return lambda rng: (
        Trouble(rng.uniform(*HANGS_FROM), declared=activity, lasts=rng.uniform(120, 400)),
        ExpectedVerdict(alerts=False),
    )


HANGS: tuple[TroubleKind, ...] = (
    TroubleKind(
        "stopped",
        "a rank was stopped",
        lambda rng: _blocked(rng, silent=True, state="stopped"),
        "is stopped, or stuck in the kernel",
    ),
    TroubleKind("endless_loop", "a rank loops", _blocked, " is at source line train.py:88 in train."),
    TroubleKind(
        "endless_kernel", "a kernel on the GPU of a rank does not end", _endless_kernel, "on a GPU that still computes"
    ),
    TroubleKind(
        "dead_storage",
        "a rank is stuck in the kernel, reading a file",
        lambda rng: _blocked(rng, state="uninterruptible"),
        "is stopped, or stuck in the kernel",
    ),
    TroubleKind(
        "skipped",
        "a rank skipped a collective",
        lambda rng: (
            Trouble(rng.uniform(*HANGS_FROM), hangs=True, behind=frozenset({rank := rng.randrange(RANKS)})),
            ExpectedVerdict(rank),
        ),
        "is missing in the collective",
    ),
    TroubleKind(
        "blocked_loader",
        "the data loader of a rank is blocked",
        lambda rng: _blocked(rng, data=True),
        "is waiting for the next batch",
    ),
    TroubleKind(
        "gil_held", "C code on a rank holds the interpreter lock", lambda rng: _blocked(rng, silent=True), "is silent"
    ),
    TroubleKind(
        "killed", "the process of a rank is gone and is not restarted", lambda rng: _blocked(rng, gone=True), "is gone"
    ),
    TroubleKind("dark_host", "a host is gone, with its exporter", _dark_host, "The other ranks wait for those on "),
    TroubleKind(
        "lost_gpu",
        "a GPU fell off the bus",
        lambda rng: _sick_gpu(rng, CardSymptoms(lost=True, xid="79")),
        "on a GPU that is lost",
    ),
    TroubleKind(
        "gpu_timeout",
        "a GPU's firmware does not answer",
        lambda rng: _sick_gpu(rng, CardSymptoms(xid="119")),
        "reported a critical Xid",
    ),
    TroubleKind("link_down", "a host's port is down", _link_down, "on a host with a port that is down"),
    TroubleKind("in_its_group", "a rank is missing in its tensor parallel group", _in_its_group, "on an idle GPU"),
    TroubleKind("mismatch", "a rank called another collective", _mismatch, " is at source line train.py:88 in train."),
    TroubleKind("no_evidence", "no metric shows which rank is missing", _no_evidence),
    TroubleKind("halves", "half of the ranks wait in one collective, and half in another", _halves),
    TroubleKind("contradiction", "a rank is missing in the collective, and another host is gone", _contradicted),
    TroubleKind("long_save", "a declared checkpoint takes minutes", _declared("checkpoint_save")),
    TroubleKind("long_compile", "a graph is compiled for minutes", _declared("compile")),
    TroubleKind("long_evaluation", "an evaluation takes minutes", _declared("evaluation")),
    TroubleKind("well", "nothing is wrong", lambda rng: (Trouble(), ExpectedVerdict(alerts=False))),
)

SCENARIOS = {"stragglers": STRAGGLERS, "hangs": HANGS}
