"""Identity of this process: run, attempt and rank from the caller, else torch.distributed, else the launcher.

If torch.distributed has another number of ranks than the launcher's variables (launcher.py), it takes precedence. A
script then has spawned processes itself, and the ranks may be on several nodes.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.training.process import launcher

log = logging.getLogger("flopwatch")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Run, attempt and rank of a process."""

    name: str  # of the run
    attempt: str
    rank: int
    world_size: int
    local_rank: int


def settle(
    launch: launcher.Launch,
    host: str,
    started: float,
    agree: Callable[[str, int, float], str | None],
    name: str,
    attempt: str | None,
    rank: int | None,
    world_size: int | None,
    local_rank: int | None,
) -> RankIdentity:
    """Return the identity of this process. Arguments from `name` on take precedence, unless they are "" or None.

    `started` is its start as Unix time. `agree(attempt, rank, started)` returns the name for all ranks, or None.
    """
    own_rank, own_size, one_node = launch.rank, launch.world_size, launch.one_node
    # Looked up, not imported: a process that uses torch.distributed has imported it.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and not (distributed.is_available() and distributed.is_initialized()):
        distributed = None
    if distributed is not None and distributed.get_world_size() != own_size:
        own_rank, own_size, one_node = distributed.get_rank(), distributed.get_world_size(), False
    rank = own_rank if rank is None else int(rank)
    if attempt is None and one_node:
        attempt = launch.attempt()
    elif attempt is None and distributed is not None:
        attempt = agree(launch.attempt(), rank, started)
    attempt = launcher.clean(launch.attempt_without_launcher() if attempt is None else str(attempt))
    world_size = own_size if world_size is None else int(world_size)
    local_rank = launch.local_rank if local_rank is None else int(local_rank)
    return RankIdentity(_name(launch, host, name), attempt, rank, world_size, local_rank)


def _name(launch: launcher.Launch, host: str, given: str) -> str:
    if not given and launch.name is None:
        place = launch.meeting_point.rpartition(":")[0]
        place = host if place in ("", "localhost", "127.0.0.1", "::1") else place
        given = f"{Path(sys.argv[0]).stem or 'python'}@{place}"
        log.warning("the run has no name and is called %s; pass Run(name) or --name, or set FLOPWATCH_RUN", given)
    name = launcher.clean(given or launch.name or "")
    if given and name != given:
        log.warning("the run %r is called %s; write names with A-Z a-z 0-9 . _ : / @ + - only", given, name)
    return name
