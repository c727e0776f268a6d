"""What can go wrong in a cluster: kinds of fault with what a node sees of them, when they strike, and who says so.

Counts are of 54 days of Llama 3 405B on 16,384 GPUs (https://arxiv.org/abs/2407.21783, table 5). The printed shares do
not fit the printed counts; only the counts are used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flopwatch.settings import SettingsError

Scope = Literal["job", "gpu", "port", "leaf", "node"]
LLAMA_3_DAYS, LLAMA_3_GPUS = 54, 16384


_WORKSHOP = (4 * 3600.0, 48 * 3600.0)


@dataclass(frozen=True)
class Clue:
    """One thing a node sees of a fault, `after` seconds of it (drawn between the two), or of the end it leads to."""

    kind: str
    detail: str = ""
    after: tuple[float, float] = (0.0, 3.0)
    place: Literal["gpu", "port", "rank", "host"] = "host"


@dataclass(frozen=True)
class Kind:
    """A kind of fault. All times are seconds; a pair is drawn from evenly."""

    name: str
    cause: str  # what the ledger should say
    scope: Scope
    sees: tuple[tuple[float, tuple[Clue, ...]], ...]  # with which weight which clues
    noticed: tuple[float, float] = (5.0, 60.0)  # until the processes end: NCCL's or the launcher's timeouts
    effect: Literal["end", "planned", "slow", "stall"] = "end"
    dark: bool = False  # the node says nothing from here on
    replaced: bool = True  # the node is given back for repair
    repair: tuple[float, float] = _WORKSHOP  # or how long it lasts
    rollback: int = 0  # checkpoints that are not trusted any more
    waits: str = "data_stall"  # what a stall is
    published: int = 0


def _xid(code: int, *more: Clue) -> tuple[Clue, ...]:
    return Clue("xid", str(code), place="gpu"), *more


def _raises(name: str) -> tuple[Clue, ...]:
    return Clue("exception", name, place="rank"), Clue("exit", "1", (3.0, 5.0), place="rank")


_ECC = Clue("ecc", place="gpu")
_UNSEEN: tuple[tuple[float, tuple[Clue, ...]], ...] = ((1.0, ()),)
_LINK_DOWN = Clue("link_down", place="port")
# A machine that is gone says nothing; its peers hang until NCCL or the launcher notices.
_MACHINE = Kind(
    "host_maintenance",
    "host",
    "node",
    _UNSEEN,
    noticed=(30.0, 300.0),
    dark=True,
    repair=(1800.0, 14400.0),
    published=32,
)
# NCCL tries again for half a minute (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT); else PyTorch's watchdog ends it after ten.
_CABLE = Kind("cable", "network", "port", ((1.0, (_LINK_DOWN,)),), noticed=(30.0, 630.0), published=28)

_ALL = (
    Kind(
        "faulty_gpu",
        "gpu",
        "gpu",
        published=148,
        sees=(
            (0.70, _xid(79, Clue("gpu_missing", after=(5.0, 20.0), place="gpu"))),
            (0.15, _xid(62)),
            (0.15, _xid(143)),
        ),
    ),
    Kind(
        "hbm",
        "gpu",
        "gpu",
        published=72,
        sees=(
            (0.4, _xid(48, _ECC, Clue("xid", "63", (1.0, 5.0), place="gpu"))),
            (0.3, _xid(94, _ECC)),
            (0.3, _xid(95, _ECC)),
        ),
    ),
    Kind("sram", "gpu", "gpu", published=19, sees=((0.5, _xid(48, _ECC)), (0.5, _xid(95, _ECC)))),
    Kind("gsp", "gpu", "gpu", published=17, sees=((0.6, _xid(119)), (0.4, _xid(120)))),
    Kind("silent_corruption", "gpu", "gpu", _UNSEEN, published=6, noticed=(1.0, 30.0), rollback=2),
    Kind(
        "thermal",
        "thermal",
        "gpu",
        published=6,
        sees=((1.0, (Clue("throttle", "hw_thermal", (-300.0, -30.0), place="gpu"),)),),
    ),
    Kind(
        "software",
        "software",
        "job",
        published=54,
        noticed=(1.0, 30.0),
        replaced=False,
        sees=(
            (0.4, _raises("ValueError")),
            (0.3, _raises("KeyError")),
            (0.2, _raises("TypeError")),
            (0.1, _raises("RuntimeError")),
        ),
    ),
    Kind(
        "dependency",
        "software",
        "job",
        published=2,
        noticed=(1.0, 30.0),
        replaced=False,
        sees=((1.0, _raises("ImportError")),),
    ),
    # The published 35 are switches or cables; that a fifth of them are switches is our guess.
    _CABLE,
    replace(_CABLE, name="leaf", scope="leaf", published=7, repair=(1800.0, 7200.0)),
    replace(
        _CABLE,
        name="nic",
        published=7,
        sees=(
            (0.6, (Clue("link_errors", after=(-120.0, -10.0), place="port"), _LINK_DOWN)),
            (0.4, (Clue("nic", "nic_health_compromised"),)),
        ),
    ),
    # A collective timed out, and nobody ever found out why.
    Kind("nccl_watchdog", "unknown", "job", _UNSEEN, published=7, noticed=(600.0, 630.0), replaced=False),
    _MACHINE,
    Kind("ssd", "storage", "node", published=3, noticed=(1.0, 30.0), sees=((1.0, _raises("OSError EIO")),)),
    *(
        replace(_MACHINE, name=name, published=count, repair=_WORKSHOP)
        for name, count in (("power_supply", 3), ("chassis", 2), ("io_board", 2), ("cpu", 2), ("memory", 2))
    ),
    Kind("maintenance", "planned", "node", _UNSEEN, effect="planned", repair=(300.0, 1500.0), published=47),
    # Those below are for scripts.
    Kind("nvlink", "nvlink", "gpu", ((1.0, _xid(74, Clue("nvlink", place="gpu"))),)),
    Kind(
        "out_of_memory",
        "out_of_memory",
        "job",
        replaced=False,
        noticed=(1.0, 30.0),
        sees=((1.0, (Clue("oom", place="gpu"), *_raises("OutOfMemoryError"))),),
    ),
    Kind(
        "host_out_of_memory",
        "out_of_memory",
        "node",
        replaced=False,
        noticed=(1.0, 30.0),
        sees=((1.0, (Clue("host_oom", place="rank"), Clue("signal", "SIGKILL", place="rank"))),),
    ),
    Kind(
        "slow",
        "thermal",
        "gpu",
        ((1.0, (Clue("throttle", "hw_thermal", place="gpu"),)),),
        effect="slow",
        repair=(600.0, 3600.0),
        replaced=False,
    ),
    Kind(
        "slow_link",
        "network",
        "port",
        ((1.0, (Clue("link_errors", after=(0.0, 60.0), place="port"),)),),
        effect="slow",
        repair=(600.0, 3600.0),
        replaced=False,
    ),
    Kind("slow_unseen", "unknown", "job", _UNSEEN, effect="slow", repair=(600.0, 3600.0), replaced=False),
    Kind("data_stall", "data", "job", _UNSEEN, effect="stall", repair=(300.0, 900.0), replaced=False),
    Kind(
        "storage_stall",
        "storage",
        "job",
        _UNSEEN,
        effect="stall",
        repair=(300.0, 900.0),
        replaced=False,
        waits="checkpoint_save",
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class Fault:
    """A fault that is to strike at `t` seconds; what its place leaves open is drawn where it strikes."""

    t: float
    kind: str
    run: str = ""
    node: int | None = None
    part: int | None = None  # GPU or rail
    leaf: str = ""
    nodes: tuple[int, ...] = ()  # of a planned maintenance
    lasts: float | None = None  # until it is repaired or over; None: as its kind does
    factor: float = 1.5  # how much longer a step takes
    by_hand: float = 0.0  # seconds more until somebody has found out what to do

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"fault: {self.kind!r} is none of {', '.join(KINDS)}")


def drawn(
    rng: random.Random, days: float, gpus: int, reference_gpus: int = LLAMA_3_GPUS, by_hand: int = 0, run: str = ""
) -> list[Fault]:
    """Return the published interruptions, as many as befit the GPU-days, at random moments of these days."""
    scale = days * gpus / (LLAMA_3_DAYS * reference_gpus)
    kinds = []
    for kind in (kind for kind in KINDS.values() if kind.published):
        whole, rest = divmod(kind.published * scale, 1)
        kinds += [kind.name] * (int(whole) + (rng.random() < rest))
    rng.shuffle(kinds)
    # The last hours are spared, so that what comes late, because the job was down, still comes.
    times = sorted(rng.uniform(0.0, 0.99 * days * 86400) for _ in kinds)
    hard = set(rng.sample(range(len(kinds)), min(len(kinds), round(by_hand * scale))))
    return [
        Fault(t, kind, run, by_hand=rng.uniform(2, 6) * 3600 if place in hard else 0.0)
        for place, (t, kind) in enumerate(zip(times, kinds, strict=True))
    ]


def script(path: Path) -> list[Fault]:
    """Return the faults in a file, YAML or a JSON object a line; raises SettingsError.

    {"t": 7200, "kind": "leaf", "leaf": "leaf-0-3", "lasts": 2400}
    """
    try:
        text = path.read_text()
        rows = (
            _yaml(text)
            if path.suffix in (".yaml", ".yml")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
        return [_fault(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(f"{path}: {error}") from error


def _yaml(text: str) -> list[Any]:
    try:
        import yaml
    except ImportError as error:
        raise SettingsError("a script in YAML needs PyYAML; a JSON object a line does not") from error
    try:
        rows = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    return rows if isinstance(rows, list) else [rows]


def _fault(row: Any) -> Fault:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is no fault")
    known: Iterable[str] = Fault.__dataclass_fields__
    if unknown := set(row) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))}: unknown; a fault has {', '.join(known)}")
    for name in ("t", "lasts", "factor", "by_hand"):
        if (name in row or name == "t") and not _number(row.get(name)):
            raise ValueError(f"{name}: {row.get(name)!r} is not a number that can be")
    nodes = row.get("nodes", [])
    for name, places in (("node", [row.get("node", 0)]), ("part", [row.get("part", 0)]), ("nodes", nodes)):
        if not isinstance(places, list) or not all(_number(place) and isinstance(place, int) for place in places):
            raise ValueError(f"{name}: {row[name]!r} is no place; nodes and their parts are counted from 0")
    for name in ("kind", "run", "leaf"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name}: {row[name]!r} is no name")
    return Fault(**{"kind": "", **row, "nodes": tuple(nodes)})


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
