"""Kinds of fault with the clues that nodes observe, and faults at given or random times.

The published counts are those of 54 days of Llama 3 405B on 16,384 GPUs (https://arxiv.org/abs/2407.21783, table 5).
The shares in that table do not match its counts, so only the counts are used.
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
    """Something that a node observes of a fault. `after` is the range of the seconds from the fault to the observation.

    A negative number of seconds means an observation before the fault.
    """

    kind: str
    detail: str = ""
    after: tuple[float, float] = (0.0, 3.0)
    place: Literal["gpu", "port", "rank", "host"] = "host"


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. Times are in seconds. A pair of times is the range of a uniform distribution."""

    name: str
    cause: str  # the cause that the ledger should find
    scope: Scope
    sees: tuple[tuple[float, tuple[Clue, ...]], ...]  # alternatives: weight, clues
    noticed: tuple[float, float] = (5.0, 60.0)  # until a timeout of NCCL or the launcher ends the processes
    effect: Literal["end", "planned", "slow", "stall"] = "end"
    dark: bool = False  # the node sends nothing from the fault on
    replaced: bool = True  # the node is sent to repair
    repair: tuple[float, float] = _WORKSHOP  # or how long the fault lasts
    rollback: int = 0  # checkpoints that can no longer be trusted
    waits: str = "data_stall"  # the activity during a stall
    published: int = 0  # count in the paper; 0: never drawn at random


def _xid(code: int, *more: Clue) -> tuple[Clue, ...]:
    return Clue("xid", str(code), place="gpu"), *more


def _raises(name: str) -> tuple[Clue, ...]:
    return Clue("exception", name, place="rank"), Clue("exit", "1", (3.0, 5.0), place="rank")


_ECC = Clue("ecc", place="gpu")
_UNSEEN: tuple[tuple[float, tuple[Clue, ...]], ...] = ((1.0, ()),)
_LINK_DOWN = Clue("link_down", place="port")
# A host that is gone sends nothing. Its peers hang until NCCL or the launcher detects it.
_MACHINE = FaultKind(
    "host_maintenance",
    "host",
    "node",
    _UNSEEN,
    noticed=(30.0, 300.0),
    dark=True,
    repair=(1800.0, 14400.0),
    published=32,
)
# NCCL retries for half a minute (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT). Else PyTorch's watchdog acts after ten minutes.
_CABLE = FaultKind("cable", "network", "port", ((1.0, (_LINK_DOWN,)),), noticed=(30.0, 630.0), published=28)

_ALL = (
    FaultKind(
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
    FaultKind(
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
    FaultKind("sram", "gpu", "gpu", published=19, sees=((0.5, _xid(48, _ECC)), (0.5, _xid(95, _ECC)))),
    FaultKind("gsp", "gpu", "gpu", published=17, sees=((0.6, _xid(119)), (0.4, _xid(120)))),
    FaultKind("silent_corruption", "gpu", "gpu", _UNSEEN, published=6, noticed=(1.0, 30.0), rollback=2),
    FaultKind(
        "thermal",
        "thermal",
        "gpu",
        published=6,
        sees=((1.0, (Clue("throttle", "hw_thermal", (-300.0, -30.0), place="gpu"),)),),
    ),
    FaultKind(
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
    FaultKind(
        "dependency",
        "software",
        "job",
        published=2,
        noticed=(1.0, 30.0),
        replaced=False,
        sees=((1.0, _raises("ImportError")),),
    ),
    # The table has 35 faults of switches and cables. That a fifth of them are switches is an assumption.
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
    # A collective timed out for a reason that was never found.
    FaultKind("nccl_watchdog", "unknown", "job", _UNSEEN, published=7, noticed=(600.0, 630.0), replaced=False),
    _MACHINE,
    FaultKind("ssd", "storage", "node", published=3, noticed=(1.0, 30.0), sees=((1.0, _raises("OSError EIO")),)),
    *(
        replace(_MACHINE, name=name, published=count, repair=_WORKSHOP)
        for name, count in (("power_supply", 3), ("chassis", 2), ("io_board", 2), ("cpu", 2), ("memory", 2))
    ),
    FaultKind("maintenance", "planned", "node", _UNSEEN, effect="planned", repair=(300.0, 1500.0), published=47),
    # The kinds below are never drawn at random. Scenarios and files of faults name them.
    FaultKind("nvlink", "nvlink", "gpu", ((1.0, _xid(74, Clue("nvlink", place="gpu"))),)),
    FaultKind(
        "out_of_memory",
        "out_of_memory",
        "job",
        replaced=False,
        noticed=(1.0, 30.0),
        sees=((1.0, (Clue("oom", place="gpu"), *_raises("OutOfMemoryError"))),),
    ),
    FaultKind(
        "host_out_of_memory",
        "out_of_memory",
        "node",
        replaced=False,
        noticed=(1.0, 30.0),
        sees=((1.0, (Clue("host_oom", place="rank"), Clue("signal", "SIGKILL", place="rank"))),),
    ),
    FaultKind(
        "slow",
        "thermal",
        "gpu",
        ((1.0, (Clue("throttle", "hw_thermal", place="gpu"),)),),
        effect="slow",
        repair=(600.0, 3600.0),
        replaced=False,
    ),
    FaultKind(
        "slow_link",
        "network",
        "port",
        ((1.0, (Clue("link_errors", after=(0.0, 60.0), place="port"),)),),
        effect="slow",
        repair=(600.0, 3600.0),
        replaced=False,
    ),
    FaultKind("slow_unseen", "unknown", "job", _UNSEEN, effect="slow", repair=(600.0, 3600.0), replaced=False),
    FaultKind("data_stall", "data", "job", _UNSEEN, effect="stall", repair=(300.0, 900.0), replaced=False),
    FaultKind(
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
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class Fault:
    """A fault that strikes at virtual time `t` in seconds.

    A node, GPU, port or leaf that is not given is drawn at random at that time. Raises SettingsError for an unknown
    kind.
    """

    t: float
    kind: str
    run: str = ""
    node: int | None = None
    part: int | None = None  # GPU or rail
    leaf: str = ""
    nodes: tuple[int, ...] = ()  # of a planned maintenance
    lasts: float | None = None  # seconds until it is repaired or over; None: drawn by its kind
    factor: float = 1.5  # factor on the step time
    by_hand: float = 0.0  # extra seconds for a repair by hand

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"fault: {self.kind!r} is not one of {', '.join(KINDS)}")


def draw(
    rng: random.Random, days: float, gpus: int, reference_gpus: int = LLAMA_3_GPUS, by_hand: int = 0, run: str = ""
) -> list[Fault]:
    """Return faults of the published kinds at random times, in numbers proportional to the GPU-days.

    In the same proportion, `by_hand` faults need a repair by hand, which takes 2 to 6 hours more.
    """
    scale = days * gpus / (LLAMA_3_DAYS * reference_gpus)
    kinds = []
    for kind in (kind for kind in KINDS.values() if kind.published):
        whole, rest = divmod(kind.published * scale, 1)
        kinds += [kind.name] * (int(whole) + (rng.random() < rest))
    rng.shuffle(kinds)
    # No fault in the last hours, so that one that is delayed because the job is down still strikes.
    times = sorted(rng.uniform(0.0, 0.99 * days * 86400) for _ in kinds)
    hard = set(rng.sample(range(len(kinds)), min(len(kinds), round(by_hand * scale))))
    return [
        Fault(t, kind, run, by_hand=rng.uniform(2, 6) * 3600 if place in hard else 0.0)
        for place, (t, kind) in enumerate(zip(times, kinds, strict=True))
    ]


def script(path: Path) -> list[Fault]:
    """Return the faults in a file, as YAML or one JSON object per line. Raises SettingsError for a wrong file.

    Example: {"t": 7200, "kind": "leaf", "leaf": "leaf-0-3", "lasts": 2400}
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
        raise SettingsError("faults in YAML need PyYAML; write one JSON object per line instead") from error
    try:
        rows = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    return rows if isinstance(rows, list) else [rows]


def _fault(row: Any) -> Fault:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is not a fault")
    names: Iterable[str] = Fault.__dataclass_fields__
    if unknown := set(row) - set(names):
        raise ValueError(f"{', '.join(sorted(unknown))}: unknown; a fault has {', '.join(names)}")
    for name in ("t", "lasts", "factor", "by_hand"):
        if (name in row or name == "t") and not _number(row.get(name)):
            raise ValueError(f"{name}: {row.get(name)!r} is not a number from 0 to 1e9")
    nodes = row.get("nodes", [])
    for name, places in (("node", [row.get("node", 0)]), ("part", [row.get("part", 0)]), ("nodes", nodes)):
        if not isinstance(places, list) or not all(_number(place) and isinstance(place, int) for place in places):
            raise ValueError(f"{name}: {row[name]!r} is not a place; nodes and their parts are counted from 0")
    for name in ("kind", "run", "leaf"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name}: {row[name]!r} is not a name")
    return Fault(**{"kind": "", **row, "nodes": tuple(nodes)})


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
