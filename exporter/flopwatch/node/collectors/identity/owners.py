"""Current owners of GPUs, and the last owners of GPUs that are lost.

A lost GPU's processes end, and soon the kubelet forgets the pod. The last owners are therefore kept while NVML lists no
processes for the GPU, or lists only earlier processes that are now invisible.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.node.collectors import StateFile


class Owner(NamedTuple):
    """Owner of a GPU or of one of its MIG instances: the labels of gpu_owner_info after `host`."""

    mig_uuid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    job: str = ""
    user: str = ""
    source: str = "none"


Owners = dict[str, set[Owner]]  # by GPU uuid
Running = dict[str, dict[str, "str | None"]]  # by GPU uuid and pid: start in clock ticks, None if invisible

BY_PROCESSES = ("slurm", "process")


def merged(*answers: Owners) -> Owners:
    """Merge the owners that several sources report. A job counts once, a user only on a GPU without other owners."""
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
    """Owners of a GPU at Unix time `at`, and start times of its processes by pid then (None: never visible)."""

    owners: tuple[Owner, ...]
    at: float
    processes: Mapping[str, str | None]


class LastOwners:
    """Last known owners of each GPU, kept across restarts in the file `path`, or only in memory if `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else StateFile(path)
        self._changed = False
        stored = {} if self._file is None else self._file.load()
        self.by_gpu = {uuid: last for uuid, content in stored.items() if (last := _last(content)) is not None}

    def held(
        self, uuid: str, owners: Sequence[Owner], at: float, processes: Mapping[str, str | None] | None
    ) -> tuple[list[Owner], float]:
        """Return `owners` plus last owners of a GPU without visible processes, and the Unix time of the oldest."""
        last = self.by_gpu.get(uuid)
        if last is None or (processes is not None and not processes.keys() & last.processes.keys()):
            return list(owners), at
        if not owners:
            return list(last.owners), last.at
        # The kubelet still has the pod. Add the jobs of the last owners, whose processes have ended.
        had = {owner for owner in last.owners if owner.source in BY_PROCESSES}.difference(owners)
        return sorted({*owners, *had}), min(at, last.at) if had else at

    def keep(self, uuid: str, owners: Iterable[Owner], at: float, processes: Mapping[str, str | None] | None) -> None:
        """Remember a GPU's owners and processes at Unix time `at`. `processes` None keeps the ones known before."""
        last = self.by_gpu.get(uuid)
        before = {} if last is None else last.processes
        if processes is None:
            processes = before
        since = {pid: before.get(pid) if started is None else started for pid, started in processes.items()}
        now = Last(tuple(owners), at, since)
        self._changed = self._changed or last is None or now[::2] != last[::2]  # not for the time alone
        self.by_gpu[uuid] = now

    def forget(self, uuid: str) -> None:
        """Forget the last owners of a GPU that is free or no longer in the inventory."""
        self._changed = self.by_gpu.pop(uuid, None) is not None or self._changed

    def save(self) -> None:
        """Write the last owners to the file if they changed."""
        if self._changed and self._file is not None:
            self._changed = not self._file.save({uuid: last._asdict() for uuid, last in self.by_gpu.items()})


def _last(content: Any) -> Last | None:
    """Parse the stored last owners of one GPU. Return None if the content is invalid."""
    try:
        owners = tuple(Owner(*map(str, owner)) for owner in content["owners"])
        processes = {str(pid): None if since is None else str(since) for pid, since in content["processes"].items()}
        return Last(owners, float(content["at"]), processes)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
