"""Current and last owners of GPUs.

A lost GPU takes its processes with it, and soon the kubelet forgets the pod. So the last owner stays while NVML reports
nothing else about the GPU: no processes at all, or only earlier ones that are now invisible.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.node.collectors import StateFile


class Owner(NamedTuple):
    """Owner of a GPU, or of one MIG instance of it: the labels of gpu_owner_info after `host`."""

    mig_uuid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    user: str = ""
    source: str = "none"


Owners = dict[str, set[Owner]]  # by the uuid of the GPU
# By the uuid of the GPU: start times of its processes in clock ticks, None for invisible ones.
Running = dict[str, dict[str, "str | None"]]

BY_PROCESSES = ("slurm", "process")


def merged(*answers: Owners) -> Owners:
    """Return the owners of several sources, each owner once.

    A job named by both its processes and the job mapping is one owner. A user is an owner only where there is no other.
    """
    owners: Owners = {}
    for source in answers:
        for uuid, some in source.items():
            owners.setdefault(uuid, set()).update(some)
    for uuid, some in owners.items():
        jobs = {owner.job for owner in some if owner.source == "slurm"}
        some = {owner for owner in some if owner.source != "job_mapping" or owner.job not in jobs}
        owners[uuid] = {owner for owner in some if owner.source != "process"} or some
    return owners


class Last(NamedTuple):
    """Owners of a GPU as of Unix time `at`, and its processes then."""

    owners: tuple[Owner, ...]
    at: float
    processes: Mapping[str, str | None]


class LastOwners:
    """Last owners of every GPU, stored in a file so that they outlive this process."""

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
        """Return the current owners of a silent GPU plus its last ones, and their Unix time."""
        last = self.by_gpu.get(uuid)
        if last is None or (processes is not None and not processes.keys() & last.processes.keys()):
            return list(owners), at
        if not owners:
            return list(last.owners), last.at
        # The kubelet still has the pod. The last owners add jobs, whose processes are gone.
        had = {owner for owner in last.owners if owner.source in BY_PROCESSES}.difference(owners)
        return sorted({*owners, *had}), min(at, last.at) if had else at

    def keep(self, uuid: str, owners: Iterable[Owner], at: float, processes: Mapping[str, str | None] | None) -> None:
        """Store the owners of a GPU as the last ones."""
        last = self.by_gpu.get(uuid)
        before = {} if last is None else last.processes
        if processes is None:
            processes = before
        now = Last(
            tuple(owners),
            at,
            {pid: before.get(pid) if started is None else started for pid, started in processes.items()},
        )
        # A later time alone is not worth a write.
        self._changed = self._changed or last is None or now[::2] != last[::2]
        self.by_gpu[uuid] = now

    def forget(self, uuid: str) -> None:
        """Drop the last owners of a GPU that is free."""
        self._changed = self.by_gpu.pop(uuid, None) is not None or self._changed

    def save(self) -> None:
        """Write the file if anything changed."""
        if self._changed and self._file is not None:
            self._changed = not self._file.save({uuid: last._asdict() for uuid, last in self.by_gpu.items()})


def _last(content: Any) -> Last | None:
    """Return the stored owners of one GPU, or None if the content is invalid."""
    try:
        owners = tuple(Owner(*map(str, owner)) for owner in content["owners"])
        processes = {str(pid): None if since is None else str(since) for pid, since in content["processes"].items()}
        return Last(owners, float(content["at"]), processes)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
