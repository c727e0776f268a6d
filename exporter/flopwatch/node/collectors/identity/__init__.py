"""Collector of the owners of each GPU, and of the host's place in the data center.

Owners are read from the kubelet (`podresources.py`), control groups of the GPU's processes (`cgroup.py`), and files
that a Slurm prolog writes for dcgm-exporter. Such a file is named `<gpu>` or `<gpu>.<gpu instance>`, with one job id
per line (https://docs.nvidia.com/datacenter/dcgm/latest/reference/command-line-reference/dcgm-exporter.html, HPC job
mapping). The place comes from `topology.py`. Setup: docs/identity.md. A GPU with an undetermined owner has the source
`unknown`, a free GPU `none`. A lost GPU keeps its last owner. Processes on MIG instances belong to the whole GPU.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import Unsupported, cgroup, read_inventory, read_runtime
from flopwatch.node.collectors.identity import podresources as podresources
from flopwatch.node.collectors.identity import topology as place
from flopwatch.node.collectors.identity.background import BackgroundCall
from flopwatch.node.collectors.identity.owners import Last, LastOwners, Owner, Owners, Running, merged

log = logging.getLogger(__name__)

KUBELET_INTERVAL, KUBELET_HOLD = 5.0, 300.0  # seconds between requests, and for which the last answer is valid
TOPOLOGY_INTERVAL, TOPOLOGY_RETRY = 600.0, 30.0
FIRST_ANSWER = 1.5  # seconds that the first read waits for answers, within a scrape's deadline
MAX_OWNERS = 8  # reported per GPU, which has at most seven MIG instances
MAX_JOB_ID, MAX_MAPPING_BYTES = 64, 1 << 16  # characters of a job id, bytes of a job mapping file


class SourceAnswer(NamedTuple):
    """Owners according to one source at Unix time `at`, its last error, and uuids of GPUs it cannot see (`blind`)."""

    owners: Owners
    at: float
    error: str = ""
    blind: frozenset[str] = frozenset()


# Name of the source of an owner, by the owner's label `source`.
SPEAKERS = {"kubelet": "kubelet", "slurm": "processes", "process": "processes", "job_mapping": "job_mapping"}


class Devices:
    """Lookup of a GPU or MIG instance by any name that a device plugin, DRA driver or job mapping file uses."""

    def __init__(self, gpus: Mapping[str, Mapping[str, str]], runtime: Mapping[str, Any], proc: Path) -> None:
        self._gpus = gpus
        self._by_index = {gpu["gpu"]: uuid for uuid, gpu in gpus.items()}
        self._instances = {uuid: about["mig"] for uuid, about in runtime.items()}
        self._parents = {str(mig.get("uuid")): uuid for uuid, migs in self._instances.items() for mig in migs}
        self._proc = proc
        self._by_minor: dict[str, str] | None = None

    def find(self, resource: str, device: str) -> tuple[str, str] | None:
        """Return the uuids of GPU and MIG instance (empty: the whole GPU) of a kubelet device, or None if unknown."""
        name = device.partition("::")[0]  # <id>::<n> is a time slice
        if name in self._gpus:
            return name, ""
        if name in self._parents:
            return self._parents[name], name
        if old := re.fullmatch(r"MIG-(GPU-[0-9a-f-]+)/([0-9]+)/[0-9]+", name):  # drivers before R470
            return self._instance(old[1], old[2])
        if resource.startswith("nvidia.com/"):  # GKE's plugin uses the number of /dev/nvidiaN
            gke = re.fullmatch(r"nvidia([0-9]+)(?:/gi([0-9]+))?(?:/vgpu[0-9]+)?", name)
            return self._instance(self._minor(gke[1]), gke[2]) if gke else None
        return self._claimed(name) if resource == "gpu.nvidia.com" else None

    def by_index(self, index: str, instance: str | None) -> tuple[str, str] | None:
        """Return the uuids of GPU and MIG instance (empty: whole GPU) by NVML index and GPU instance id, else None."""
        return self._instance(self._by_index.get(index), instance)

    def _claimed(self, name: str) -> tuple[str, str] | None:
        """Return the GPU and MIG uuid of NVIDIA's DRA device gpu-MINOR[-mig-PROFILE-ID-PLACE], or of its CDI name."""
        match = re.fullmatch(r"(?:[^=]*=(?:[0-9a-f-]{36}-)?)?gpu-([0-9]+)(?:-mig-(.+)-[0-9]+-[0-9]+)?", name, re.ASCII)
        if match is None:
            inner = name.rpartition("=")[2]
            return self.find("", inner) if inner != name else None
        uuid, profile = self._minor(match[1]), match[2]
        if uuid is None:
            return None
        alike = [
            mig
            for mig in self._instances.get(uuid, ())
            if re.sub(r"[^a-z0-9]+", "-", str(mig.get("profile")).replace(".", "")).strip("-") == profile
        ]
        # Instances with equal profiles are ambiguous: the driver names their placement, NVML their ids.
        return uuid, str(alike[0].get("uuid", "")) if len(alike) == 1 else ""

    def _instance(self, uuid: str | None, instance: str | None) -> tuple[str, str] | None:
        if uuid is None or uuid not in self._gpus:
            return None
        if instance is None:
            return uuid, ""
        for mig in self._instances.get(uuid, ()):
            if mig.get("gpu_instance") == instance:
                return uuid, str(mig.get("uuid", ""))
        return uuid, ""

    def _minor(self, number: str) -> str | None:
        """Return the uuid of GPU /dev/nvidiaN. If the driver lists no minor numbers, N is taken as NVML's index."""
        if self._by_minor is None:
            self._by_minor = _minors(self._gpus, self._proc)
        return self._by_minor.get(number, self._by_index.get(number) if not self._by_minor else None)


def _minors(gpus: Mapping[str, Mapping[str, str]], proc: Path) -> dict[str, str]:
    """Return GPU uuids by minor device number, from `Device Minor:` in /proc/driver/nvidia/gpus/ADDRESS/information."""
    slots = {_slot(gpu["pci_bus_id"]): uuid for uuid, gpu in gpus.items()}
    found = {}
    for file in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")):
        try:
            match = re.search(r"^Device Minor:\s*([0-9]+)", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if match is not None and _slot(file.parent.name) in slots:
            found[match[1]] = slots[_slot(file.parent.name)]
    return found


def _slot(address: str) -> str:
    """Return a PCI address without function and leading zeros, which NVML and the kernel write differently."""
    return address.lower().rpartition(".")[0].lstrip("0")


def from_kubelet(assignments: Iterable[podresources.Assignment], devices: Devices) -> Owners:
    """Return the pods and containers that own each GPU, from the kubelet's device assignments."""
    owners: Owners = {}
    for one in assignments:
        found = devices.find(one.resource, one.device)
        if found is not None:
            owners.setdefault(found[0], set()).add(Owner(found[1], *one[:3], source="kubelet"))
    return owners


def running(runtime: Mapping[str, Any], last: Mapping[str, Last], proc: Path) -> Running:
    """Return by GPU and pid the start time of each process, None if it is invisible or its pid was reused."""
    found: Running = {}
    for uuid, about in runtime.items():
        before = last[uuid].processes if uuid in last else {}
        found[uuid] = {}
        for pid in map(str, about["pids"]):
            started = cgroup.started(int(pid), proc)
            found[uuid][pid] = None if before.get(pid) not in (None, started) else started
    return found


def from_processes(processes: Running, last: Mapping[str, Last], proc: Path, now: float) -> SourceAnswer:
    """Return the Slurm jobs and users that run processes on each GPU. A GPU with only invisible ones is `blind`."""
    owners: Owners = {}
    unseen, hidden = set(), 0
    for uuid, pids in processes.items():
        seen = {pid: cgroup.UNKNOWN if since is None else cgroup.owner(int(pid), proc) for pid, since in pids.items()}
        if seen and set(seen.values()) == {cgroup.UNKNOWN}:
            unseen.add(uuid)
            before = last[uuid].processes if uuid in last else {}  # a process that was visible before has ended
            hidden += any(before.get(pid) is None for pid in pids)
        for pid, owner in seen.items():
            kind, _, name = owner.partition(":")
            if kind == "slurm":  # pods and containers are left to the kubelet
                owners.setdefault(uuid, set()).add(Owner(job=name, user=_user(int(pid), proc), source="slurm"))
            elif kind == "user":
                owners.setdefault(uuid, set()).add(Owner(user=name, source="process"))
    error = f"the processes of {hidden} GPUs are invisible in {proc} (hidepid, or a container without hostPID)"
    return SourceAnswer(owners, now, error if hidden else "", frozenset(unseen))


def _user(pid: int, proc: Path) -> str:
    try:
        return cgroup.user(cgroup.of_process(pid, "status", proc)) or ""
    except OSError:
        return ""


def from_job_mapping(folder: Path, devices: Devices) -> Owners:
    """Return the jobs of each GPU from dcgm-exporter's job mapping files. Raises OSError for an unreadable folder."""
    owners: Owners = {}
    for file in sorted(folder.iterdir()):
        name = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?", file.name, re.ASCII)
        found = devices.by_index(name[1], name[2]) if name else None
        if found is None:
            continue
        try:
            with file.open("rb") as stream:
                lines = stream.read(MAX_MAPPING_BYTES).decode("utf-8", "replace").split("\n")
        except FileNotFoundError:
            continue  # the job has just ended
        for job in (line.strip() for line in lines):
            if 0 < len(job) <= MAX_JOB_ID:
                owners.setdefault(found[0], set()).add(Owner(found[1], job=job, source="job_mapping"))
    return owners


class Identity:
    """Collector of the owners of this host's GPUs and of the host's place.

    `gpus` and `runtime` are files of the NVML collector: the inventory, and each GPU's MIG instances and processes.
    `kubelet`, `job_mapping` (a folder) and `where` are None if not configured. `last` is the file of the last owners.
    """

    name = "identity"

    def __init__(
        self,
        host: str,
        gpus: Path,
        runtime: Path,
        kubelet: BackgroundCall[list[podresources.Assignment]] | None = None,
        job_mapping: Path | None = None,
        proc: Path = Path("/proc"),
        where: BackgroundCall[place.Place] | None = None,
        clock: Callable[[], float] = time.time,
        last: Path | None = None,
    ) -> None:
        self._host, self._clock = host, clock
        self._gpus, self._runtime, self._proc = gpus, runtime, proc
        self._kubelet, self._job_mapping, self._place = kubelet, job_mapping, where
        self._last = LastOwners(last)
        self._last_errors: dict[str, str] = {}

    def read(self) -> list[Sample]:
        """Return samples of GPU owners, host place and source states. Raises Unsupported without GPU and place."""
        until = time.monotonic() + FIRST_ANSWER
        for background in (self._kubelet, self._place):
            if background is not None:
                background.start()
        gpus = read_inventory(self._gpus, m.GPU_INFO)
        if not gpus and self._place is None:
            raise Unsupported("the inventory has no GPU, and --topology is not set")
        errors: dict[str, str] = {}  # by source in use, empty if it answered
        samples = self._owners(gpus, errors, until) if gpus else []
        samples += self._where(errors, until)
        for source, error in errors.items():
            samples.append((m.FLOPWATCH_IDENTITY_SOURCE_UP, (source,), float(not error)))
            if error and error != self._last_errors.get(source, ""):
                log.warning("%s: %s", source, error)
        self._last_errors = errors
        return samples

    def _owners(self, gpus: Mapping[str, dict[str, str]], errors: dict[str, str], until: float) -> list[Sample]:
        runtime = {uuid: about for uuid, about in read_runtime(self._runtime).items() if uuid in gpus}
        processes = running(runtime, self._last.by_gpu, self._proc)
        answers = self._answers(gpus, runtime, processes, until)
        errors.update({name: one.error for name, one in answers.items()})
        owners = merged(*(one.owners for one in answers.values()))
        samples: list[Sample] = []
        for uuid, gpu in gpus.items():
            labels = (gpu["gpu"], uuid)
            some, at = self._owner(uuid, owners.get(uuid, set()), answers, processes.get(uuid))
            samples += [(m.GPU_OWNER_INFO, (*labels, self._host, *owner), 1) for owner in some]
            if at is not None:
                samples.append((m.GPU_OWNER_UPDATED_TIMESTAMP_SECONDS, labels, at))
        for uuid in self._last.by_gpu.keys() - gpus.keys():
            self._last.forget(uuid)
        self._last.save()
        return samples

    def _owner(
        self,
        uuid: str,
        owners: set[Owner],
        answers: Mapping[str, SourceAnswer],
        processes: Mapping[str, str | None] | None,
    ) -> tuple[list[Owner], float | None]:
        """Return a GPU's owners and their Unix time (None: owner unknown). `processes` None: NVML never listed any."""
        some = sorted(owners)[:MAX_OWNERS]
        speaking = {SPEAKERS[owner.source] for owner in some} or answers.keys()
        at = min((answers[name].at for name in speaking), default=self._clock())
        silent = processes is None or any(uuid in one.blind for one in answers.values())
        vanished = processes is None or (len(processes) > 0 and all(started is None for started in processes.values()))
        if vanished:
            some, at = self._last.held(uuid, some, at, processes)
        if some:
            self._last.keep(uuid, some, at, processes)
            return some, at
        if silent:
            return [Owner(source="unknown")], None
        self._last.forget(uuid)
        return [Owner()], at

    def _answers(
        self, gpus: Mapping[str, dict[str, str]], runtime: Mapping[str, Any], processes: Running, until: float
    ) -> dict[str, SourceAnswer]:
        now, every = self._clock(), frozenset(gpus)
        devices = Devices(gpus, runtime, self._proc)
        answers: dict[str, SourceAnswer] = {}
        if self._kubelet is not None:
            answer = self._kubelet.answer(until - time.monotonic())
            if answer is not None and self._kubelet.at is not None:
                answers["kubelet"] = SourceAnswer(from_kubelet(answer, devices), self._kubelet.at, self._kubelet.error)
            elif not self._kubelet.absent:
                answers["kubelet"] = SourceAnswer({}, now, self._kubelet.error, every)
        if runtime:
            answers["processes"] = from_processes(processes, self._last.by_gpu, self._proc, now)
        if self._job_mapping is not None:
            try:
                answers["job_mapping"] = SourceAnswer(from_job_mapping(self._job_mapping, devices), now)
            except OSError as error:
                answers["job_mapping"] = SourceAnswer({}, now, f"{self._job_mapping}: {error.strerror}", every)
        return answers

    def _where(self, errors: dict[str, str], until: float) -> list[Sample]:
        if self._place is None:
            return []
        found = self._place.answer(until - time.monotonic())
        errors["topology"] = self._place.error
        return [] if found is None else [(m.HOST_TOPOLOGY_INFO, (self._host, *found), 1)]

    def close(self) -> None:
        """Stop the requests to the kubelet and for the place."""
        for background in (self._kubelet, self._place):
            if background is not None:
                background.close()


def build(host: str, gpus: str, runtime: str, kubelet: str, job_mapping: str, proc: str, topology: str) -> Identity:
    """Return the identity collector. An empty `kubelet`, `job_mapping` or `topology` disables that source."""
    ask, read, jobs = podresources.ask, place.read, Path(job_mapping) if job_mapping else None
    pods = BackgroundCall(lambda: ask(Path(kubelet)), KUBELET_INTERVAL, KUBELET_HOLD) if kubelet else None
    where = BackgroundCall(lambda: read(topology, host), TOPOLOGY_INTERVAL, retry=TOPOLOGY_RETRY) if topology else None
    last = Path(gpus).with_name("gpu_owners.json")
    return Identity(host, Path(gpus), Path(runtime), pods, jobs, Path(proc), where, last=last)
