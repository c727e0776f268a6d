"""Blast radius: the runs, ranks and GPUs that an object of the cluster takes with it, and the GPUs that are spare.

A rank is on a port if its GPU is nearest to the port by PCI path. A rank on the object is lost, and all other ranks of
its run wait for it. The functions compute from what `flopwatch.report.cluster` queries.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NEAREST = 4  # GPUs of a port. With more, as in a virtual machine, the PCI path does not show which use the port.


class HostPlace(NamedTuple):
    """Rack, leaf switch and NVLink domain of a host, empty if unknown."""

    rack: str = ""
    leaf: str = ""
    domain: str = ""


class HostPort(NamedTuple):
    """Network port of a host."""

    host: str
    device: str
    port: str


class RankPlace(NamedTuple):
    """Rank of a run, its host and the uuid of its GPU, which is empty if the rank declared none."""

    run: str
    rank: str
    host: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What is on an object: whole hosts, and GPUs of other hosts. `notes` are facts that make the answer uncertain."""

    kind: str
    name: str
    hosts: frozenset[str]
    gpus: frozenset[str]  # uuids
    ports: frozenset[HostPort] = frozenset()
    notes: tuple[str, ...] = ()

    def have(self, host: str, uuid: str) -> bool:
        """Return whether a GPU of a host is on the object."""
        return host in self.hosts or (uuid != "" and uuid in self.gpus)


@dataclass(frozen=True, slots=True)
class RunAtRisk:
    """Run with ranks on the object. It stops as a whole. `unsaved_seconds` are above its last durable checkpoint."""

    run: str
    ranks: list[RankPlace]
    gpus: float
    unsaved_seconds: float | None

    @property
    def unsaved_gpu_hours(self) -> float | None:
        """Return the GPU-hours of steps that are in no durable checkpoint, None if unknown."""
        return None if self.unsaved_seconds is None else self.unsaved_seconds * self.gpus / 3600


@dataclass(frozen=True, slots=True)
class Spare:
    """Spare GPUs at one place."""

    rack: str
    leaf: str
    hosts: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Blast:
    """Blast radius of an object, in the form that `flopwatch blast --json` prints."""

    kind: str
    name: str
    hosts: list[str]
    ports: list[HostPort]
    gpus: list[str]
    runs: list[RunAtRisk]
    spare: list[Spare]
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Return the number of ranks on the object."""
        return sum(len(run.ranks) for run in self.runs)

    @property
    def stopped_gpus(self) -> float:
        """Return the GPUs of the runs that stop, which are also the GPU-hours that an hour without them costs."""
        return sum(run.gpus for run in self.runs)

    @property
    def spare_gpus(self) -> int:
        """Return the number of spare GPUs that are not on the object."""
        return sum(place.gpus for place in self.spare)


def on_ports(
    kind: str,
    name: str,
    ports: Iterable[HostPort],
    near: Mapping[HostPort, AbstractSet[str]],
    hosts: AbstractSet[str] = frozenset(),
) -> Parts:
    """Return what is on some ports, and on whole `hosts`, from the uuids of the GPUs nearest to each port.

    A host without any nearest GPU has an unknown PCI topology. All of it counts then.
    """
    known = {port.host for port, uuids in near.items() if uuids}
    touched = frozenset(ports)
    unknown = frozenset(port.host for port in touched) - known - hosts
    many = sorted({port.host for port in touched if len(near.get(port, ())) > MAX_NEAREST})
    none = sorted(":".join(port[:2]) for port in touched if port.host in known and not near.get(port))
    notes = []
    if unknown:
        notes.append(f"It is not known which GPUs of {_some(sorted(unknown))} use the port. All of them are counted.")
    if many:
        notes.append(f"On {_some(many)} one port is nearest to more than {MAX_NEAREST} GPUs. All of them are counted.")
    if none:
        notes.append(f"{_some(none)} is nearest to no GPU, so it carries no rank's own traffic.")
    gpus = frozenset(uuid for port in touched for uuid in near.get(port, ()))
    return Parts(kind, name, frozenset(hosts) | unknown, gpus, touched, tuple(notes))


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def blast(
    parts: Parts,
    gpus: Mapping[str, str],
    ranks: Iterable[RankPlace],
    sizes: Mapping[str, float],
    unsaved: Mapping[str, float],
    idle: Mapping[str, str],
    places: Mapping[str, HostPlace],
) -> Blast:
    """Return the blast radius of an object.

    `gpus` and `idle` are the hosts of GPUs by uuid, of the object's hosts and of GPUs without a rank or another owner.
    `sizes` are the GPUs of runs, `unsaved` the seconds of their steps that are in no durable checkpoint.
    """
    runs: defaultdict[str, list[RankPlace]] = defaultdict(list)
    for rank in ranks:
        if parts.have(rank.host, rank.uuid):
            runs[rank.run].append(rank)
    at_risk = [
        RunAtRisk(
            run,
            sorted(there, key=lambda one: (_number(one.rank), one)),
            sizes.get(run, float(len(there))),
            unsaved.get(run),
        )
        for run, there in runs.items()
    ]
    touched = {uuid for uuid, host in gpus.items() if parts.have(host, uuid)}
    hosts = {*parts.hosts, *(gpus[uuid] for uuid in touched), *(port.host for port in parts.ports)}
    spare: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for uuid, host in idle.items():
        if not parts.have(host, uuid):
            place = places.get(host, HostPlace())
            spare[place.rack, place.leaf].append(host)
    return Blast(
        kind=parts.kind,
        name=parts.name,
        hosts=sorted(hosts),
        ports=sorted(parts.ports),
        gpus=sorted(touched),
        runs=sorted(at_risk, key=lambda one: (-one.gpus, one.run)),
        spare=sorted(
            (Spare(*place, len({*there}), len(there)) for place, there in spare.items()),
            key=lambda one: (-one.gpus, one.rack, one.leaf),
        ),
        notes=list(parts.notes),
    )


def _number(rank: str) -> int:
    return int(rank) if rank.isdecimal() else -1
