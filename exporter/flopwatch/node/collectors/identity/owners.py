"""Owners of GPUs, and who had each last.

A GPU that is lost takes its processes with it, and soon the kubelet forgets the pod: whoever wants to know whom it hit
comes later. So the last owner stays for as long as the GPU tells nothing else, that is, while NVML has no word of it or
only processes that were there then and cannot be seen now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.node.collectors import StateFile


class Owner(NamedTuple):
    """Somebody who has a GPU, or one MIG instance of it; the labels of gpu_owner_info after `host`."""

    mig_uuid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    user: str = ""
    source: str = "none"


Owners = dict[str, set[Owner]]  # by the uuid of the GPU
# By the uuid of the GPU: its processes, and when each was started, as the kernel counts; None if it cannot be seen.
Running = dict[str, dict[str, "str | None"]]

BY_PROCESSES = ("slurm", "process")


def merged(*told: Owners) -> Owners:
    """Return what several sources say, each owner once.

    A job that its processes and the job mapping both name is one, and a user is named only where nobody else is.
    """
    owners: Owners = {}
    for source in told:
        for uuid, some in source.items():
            owners.setdefault(uuid, set()).update(some)
    for uuid, some in owners.items():
        jobs = {owner.job for owner in some if owner.source == "slurm"}
        some = {owner for owner in some if owner.source != "job_mapping" or owner.job not in jobs}
        owners[uuid] = {owner for owner in some if owner.source != "process"} or some
    return owners


class Last(NamedTuple):
    """The owners of a GPU as of `at`, and its processes then."""

    owners: tuple[Owner, ...]
    at: float
    processes: Mapping[str, str | None]


class LastOwners:
    """The last owners of every GPU, kept in a file so that they outlive this process."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else StateFile(path)
        self._changed = False
        self.by_gpu: dict[str, Last] = {}
        for uuid, content in ({} if self._file is None else self._file.load()).items():
            if (last := _last(content)) is not None:
                self.by_gpu[uuid] = last

    def held(
        self, uuid: str, owners: Sequence[Owner], at: float, processes: Mapping[str, str | None] | None
    ) -> tuple[list[Owner], float]:
        """Return the owners of a GPU that tells nothing, with those it had, and as of when."""
        last = self.by_gpu.get(uuid)
        if last is None or (processes is not None and not processes.keys() & last.processes.keys()):
            return list(owners), at
        if not owners:
            return list(last.owners), last.at
        # The kubelet still knows; a job's processes were seen when there were some.
        had = {owner for owner in last.owners if owner.source in BY_PROCESSES}.difference(owners)
        return sorted({*owners, *had}), min(at, last.at) if had else at

    def keep(self, uuid: str, owners: Iterable[Owner], at: float, processes: Mapping[str, str | None] | None) -> None:
        """Remember who has a GPU now."""
        last = self.by_gpu.get(uuid)
        before = {} if last is None else last.processes
        if processes is None:
            processes = before
        now = Last(
            tuple(owners),
            at,
            {pid: before.get(pid) if started is None else started for pid, started in processes.items()},
        )
        # A later time alone is not worth writing.
        self._changed = self._changed or last is None or now[::2] != last[::2]
        self.by_gpu[uuid] = now

    def forget(self, uuid: str) -> None:
        """Remember nobody: the GPU said that it is free."""
        self._changed = self.by_gpu.pop(uuid, None) is not None or self._changed

    def save(self) -> None:
        """Write the file if there is anything new."""
        if self._changed and self._file is not None:
            self._changed = not self._file.save({uuid: last._asdict() for uuid, last in self.by_gpu.items()})


def _last(content: Any) -> Last | None:
    """Return what the file says of one GPU, None if that is of another shape."""
    try:
        owners = tuple(Owner(*map(str, owner)) for owner in content["owners"])
        processes = {
            str(pid): None if started is None else str(started) for pid, started in content["processes"].items()
        }
        return Last(owners, float(content["at"]), processes)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
