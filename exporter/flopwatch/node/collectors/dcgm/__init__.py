"""GPUs, NVSwitches and Grace sockets through a running DCGM host engine (`nv-hostengine`, port 5555 or a socket).

Reports what NVML lacks: GPU activity before Hopper, NVSwitches, the chassis, module power. `fields.py` maps fields to
series, `abi.py` calls libdcgm. https://docs.nvidia.com/datacenter/dcgm/latest/. Activity requires a data center card of
Volta or later and the host engine's profiling module. NVSwitches require a host engine that runs as root. While another
tool holds the hardware counters (`dcgmi profile --pause`, Nsight), the counters do not rise and
flopwatch_profiling_paused is 1.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import Unsupported, read_inventory
from flopwatch.node.collectors.dcgm import abi, fields
from flopwatch.node.collectors.dcgm.abi import LIBRARY, PAUSED, DcgmError, Library, Session, Value

log = logging.getLogger(__name__)

SAMPLED_EVERY = 10.0  # seconds between two samples of the host engine, because means over 1 s would cost more
MAX_HOLD = 60.0  # maximum seconds between two samples for which the second one's mean counts
CONNECT_TIMEOUT = 1.5  # seconds, below a read's deadline, so that the error names the missing host engine
BACKOFF, MAX_BACKOFF = 1.0, 60.0
MAX_LINK_SERIES = 16  # series of links with errors, for each NVSwitch

Key = tuple[int, int]  # kind of entity and its id
Watched = tuple[tuple[Key, ...], tuple[int, ...]]  # entities of one kind, and the fields that are sampled for them


class HostEngineError(Exception):
    """Error raised by `Dcgm.read` if the host engine cannot be read. The text has the cause and the remedy."""


@dataclass
class DcgmActivity:
    """Totals of one GPU: seconds covered by samples, and active seconds or moved bytes by DCGM field id."""

    at: float | None = None
    profiled: float = 0.0
    totals: dict[int, float] = field(default_factory=dict)
    paused: bool = False

    def advance(self, values: Mapping[int, Value]) -> None:
        """Add each field's mean times the time since the last sample. A time without values adds nothing."""
        means = {id: value for id, value in values.items() if value.number is not None}
        if not means:
            self.paused = any(value.blank or value.status == PAUSED for value in values.values())
            self.at = None
            return
        self.paused = False
        at = max(value.at for value in means.values())
        if self.at is not None and at <= self.at:
            return
        # If an activity that was present before is missing, no activity counts for this interval.
        whole = self.totals.keys() - fields.TRAFFIC <= means.keys()
        interval = 0.0 if self.at is None or not whole else at - self.at
        interval = interval if interval <= MAX_HOLD else SAMPLED_EVERY
        self.at = at
        self.profiled += interval
        for id, value in means.items():
            assert value.number is not None
            self.totals[id] = self.totals.get(id, 0.0) + max(0.0, value.number) * interval

    def samples(self, labels: tuple[str, str]) -> Iterator[Sample]:
        """Yield the GPU's activity samples. An execution pipe (such as fp16) has one only after its first use."""
        if self.totals or self.paused:
            yield m.FLOPWATCH_PROFILING_PAUSED, labels, float(self.paused)
        if not self.totals:
            return
        yield m.GPU_PROFILED_SECONDS_TOTAL, labels, self.profiled
        for each in fields.PROFILING:
            total = self.totals.get(each.id)
            if total is not None and (total > 0 or each.row is not m.GPU_PIPE_ACTIVE_SECONDS_TOTAL):
                yield each.row, (*labels, *each.labels), total / each.row.scale


class Rising:
    """Totals of hardware counters that start again at 0 after a reset. The totals only rise."""

    def __init__(self) -> None:
        self._last: dict[tuple[object, ...], float] = {}
        self._total: defaultdict[tuple[object, ...], float] = defaultdict(float)

    def count(self, key: tuple[object, ...], number: float) -> float:
        """Add the counter's increase since its last reading, and return its total."""
        last = self._last.get(key, 0.0)
        self._total[key] += number - last if number >= last else number
        self._last[key] = number
        return self._total[key]

    def total(self, key: tuple[object, ...]) -> float:
        """Return the counter's total so far, 0 before its first reading."""
        return self._total[key]


class Dcgm:
    """Collector of the host engine at `address`. `load` opens libdcgm, and `gpus` is the inventory file of GPUs.

    `ids` are the profiling fields to sample, by default all, if the GPU counts them in one pass.
    """

    name = "dcgm"

    def __init__(
        self,
        address: str,
        gpus: Path,
        load: Callable[[], Library],
        clock: Callable[[], float] = time.monotonic,
        ids: Collection[int] = fields.ALL_PROFILING,
    ) -> None:
        self._address, self._gpus, self._fields = address, gpus, ids
        self._load, self._clock = load, clock
        self._engine: Library | None = None
        self._session: Session | None = None
        self._watched: dict[int, list[Watched]] = {}  # by kind of entity
        self._retry_at = 0.0
        self._failures = 0
        self._refusal = ""
        self._activities: defaultdict[str, DcgmActivity] = defaultdict(DcgmActivity)
        self._counters = Rising()

    def read(self) -> list[Sample]:
        """Return the samples. Raises Unsupported without libdcgm, or HostEngineError. Later reads reconnect."""
        try:
            session = self._connected()
            return self._read(session)
        except DcgmError as error:
            self.close()
            self._refusal = self._explained(error)
            self._retry_at = self._clock() + min(BACKOFF * 2**self._failures, MAX_BACKOFF)
            self._failures += 1
            raise HostEngineError(self._refusal) from error

    def close(self) -> None:
        """Remove the watches from the host engine and disconnect."""
        session, self._session = self._session, None
        self._watched = {}
        if session is not None:
            session.close()

    def _explained(self, error: DcgmError) -> str:
        if error.code == abi.VERSION_MISMATCH:
            return f"{error} (at {self._address}): install the libdcgm of the host engine's release here"
        if error.code in (abi.CONNECTION_NOT_VALID, abi.TIMEOUT):
            return (
                f"no DCGM host engine answers at {self._address}: start one (systemctl start nvidia-dcgm) or "
                f"correct --dcgm ({error})"
            )
        return f"{error} (host engine at {self._address})"

    def _connected(self) -> Session:
        if self._session is not None:
            return self._session
        if self._clock() < self._retry_at:
            raise HostEngineError(self._refusal)
        if self._engine is None:
            try:
                self._engine = self._load()
            except OSError as error:
                raise Unsupported(
                    f"libdcgm.so.4 cannot be loaded ({error}): install datacenter-gpu-manager-4-core, or "
                    "leave out --dcgm"
                ) from error
        self._session = Session(self._engine, self._address, CONNECT_TIMEOUT)
        self._watch(self._session)
        self._failures = 0
        return self._session

    def _watch(self, session: Session) -> None:
        """Find GPUs, NVSwitches, links and CPUs, and make the host engine sample their fields."""
        gpus = tuple((abi.GPU, id) for id in session.gpus())
        switches = tuple((abi.SWITCH, id) for id in session.entities(abi.SWITCH))
        # dcgm_link_t: the kind of its owner in bits 0-7, the link's number in 8-23, the owner in 24-31.
        links = tuple((abi.LINK, id) for id in session.entities(abi.LINK) if id & 0xFF == abi.SWITCH)
        cpus = tuple((abi.CPU, id) for id in session.entities(abi.CPU))
        self._ask(session, gpus, (*fields.GPU_IDENTITY, *(each.id for each in fields.GPU_STATE), *fields.CHASSIS))
        self._ask(session, switches, (*fields.SWITCH_PCI, *(each.id for each in fields.SWITCH_STATE)))
        self._ask(session, links, (fields.LINK_STATE, *fields.LINK_ERRORS))
        self._ask(session, cpus, tuple(each.id for each in fields.CPU_STATE))
        session.update()
        wanted = tuple(each.id for each in fields.PROFILING if each.id in self._fields)
        profiled: defaultdict[tuple[int, ...], list[Key]] = defaultdict(list)
        latest = session.latest(gpus, (fields.COMPUTE_CAPABILITY,)) if gpus else ()
        capability = {value.entity: value.number for value in latest}
        for kind, id in gpus:  # only DCGM reports the activity of those before Hopper or of unknown architecture
            if (known := capability.get(id)) is None or int(known) >> 16 < fields.NVML_PROFILES_FROM:
                profiled[session.in_one_pass(id, wanted)].append((kind, id))
        for ids, some in profiled.items():
            self._ask(session, tuple(some), ids)
            if left := set(wanted) - set(ids):
                log.warning("%d GPUs need further passes for fields %s, which are left out", len(some), sorted(left))
        session.update()
        if not self._watched and session.refusal is not None:
            raise session.refusal

    def _ask(self, session: Session, pairs: tuple[Key, ...], ids: tuple[int, ...]) -> None:
        accepted = session.watch(pairs, ids, SAMPLED_EVERY) if pairs and ids else ()
        if accepted:
            self._watched.setdefault(pairs[0][0], []).append((pairs, accepted))

    def _read(self, session: Session) -> list[Sample]:
        samples: list[Sample] = []
        answered = not self._watched
        failure: DcgmError | None = None
        for kind, read in (
            (abi.GPU, self._gpu_samples),
            (abi.SWITCH, self._switch_samples),
            (abi.CPU, self._cpu_samples),
        ):
            try:
                if kind in self._watched:
                    samples += read(session)
                    answered = True
            except DcgmError as error:
                if error.code in abi.LOST:
                    raise
                failure = error
        if failure is not None and not answered:
            raise failure
        return samples

    def _values(self, session: Session, kind: int) -> dict[int, dict[int, Value]]:
        """Return the last values of all entities of a kind, by entity id and field id."""
        values: dict[int, dict[int, Value]] = {}
        for pairs, ids in self._watched.get(kind, ()):
            for value in session.latest(pairs, ids):
                values.setdefault(value.entity, {})[value.field] = value
        return values

    def _gpu_samples(self, session: Session) -> Iterator[Sample]:
        inventory = read_inventory(self._gpus, m.GPU_INFO)
        for entity, values in sorted(self._values(session, abi.GPU).items()):
            uuid = _text(values, fields.UUID)
            index = inventory[uuid]["gpu"] if uuid in inventory else _text(values, fields.NVML_INDEX)
            if not uuid or not index:
                log.debug("DCGM's GPU %d has no uuid or index", entity)
                continue
            labels = index, uuid
            yield from _gauges(fields.GPU_STATE, labels, values)
            if _text(values, fields.CHASSIS[0]):
                yield m.GPU_CHASSIS_INFO, (*labels, *(_text(values, id) for id in fields.CHASSIS)), 1
            profiled = {each.id: values[each.id] for each in fields.PROFILING if each.id in values}
            if profiled:
                self._activities[uuid].advance(profiled)
            if uuid in self._activities:
                yield from self._activities[uuid].samples(labels)

    def _switch_samples(self, session: Session) -> Iterator[Sample]:
        switches = self._values(session, abi.SWITCH)
        names = {entity: _switch_name(entity, values) for entity, values in switches.items()}
        for entity, values in sorted(switches.items()):
            labels = (names[entity],)
            yield from _gauges(fields.SWITCH_STATE, labels, values)
            if values.get(fields.SLOWDOWN_LIMIT) is None or values[fields.SLOWDOWN_LIMIT].number is None:
                continue
            for each in fields.SWITCH_STATE:
                number = values[each.id].number if each.how == "counter" and each.id in values else None
                if number is not None:
                    yield each.row, labels, self._counters.count((each.id, *labels), number)
        yield from self._link_samples(session, names)

    def _link_samples(self, session: Session, names: Mapping[int, str]) -> Iterator[Sample]:
        states: Counter[tuple[str, str]] = Counter()
        totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        faulty: dict[str, list[tuple[float, tuple[str, str, str]]]] = {}
        for entity, values in sorted(self._values(session, abi.LINK).items()):
            switch = names.get(entity >> 24, f"switch{entity >> 24}")
            link = str(entity >> 8 & 0xFFFF)
            state = values[fields.LINK_STATE].number if fields.LINK_STATE in values else None
            if state is not None and int(state) in fields.LINK_STATES:
                states[switch, fields.LINK_STATES[int(state)]] += 1
            for id, error in fields.LINK_ERRORS.items():
                number = values[id].number if id in values else None
                if number is not None:
                    self._counters.count((switch, link, error), number)
                elif not self._counters.total((switch, link, error)):
                    continue
                total = self._counters.total((switch, link, error))
                totals[switch, error] += total
                if total > 0:
                    faulty.setdefault(switch, []).append((total, (switch, link, error)))
        for labels, count in sorted(states.items()):
            yield m.NVLINK_SWITCH_LINKS, labels, count
        for labels, total in sorted(totals.items()):
            yield m.NVLINK_SWITCH_ERRORS_TOTAL, labels, total
        for several in faulty.values():
            worst = sorted(several, key=lambda each: -each[0])[:MAX_LINK_SERIES]
            for total, labels_of_link in sorted(worst, key=lambda each: each[1]):
                yield m.NVLINK_SWITCH_LINK_ERRORS_TOTAL, labels_of_link, total

    def _cpu_samples(self, session: Session) -> Iterator[Sample]:
        for entity, values in sorted(self._values(session, abi.CPU).items()):
            yield from _gauges(fields.CPU_STATE, (str(entity),), values)


def _gauges(
    table: tuple[fields.DcgmField, ...], labels: tuple[str, ...], values: Mapping[int, Value]
) -> Iterator[Sample]:
    for each in table:
        value = values.get(each.id)
        if each.how == "gauge" and value is not None and value.number is not None:
            yield each.row, (*labels, *each.labels), value.number


def _text(values: Mapping[int, Value], id: int) -> str:
    value = values.get(id)
    if value is None:
        return ""
    return str(int(value.number)) if value.number is not None else value.text or ""


def _switch_name(entity: int, values: Mapping[int, Value]) -> str:
    """Return an NVSwitch's PCI address as in the kernel log, or `switch` and DCGM's id if that is unknown."""
    place = [values[id].number for id in fields.SWITCH_PCI if id in values]
    numbers = [int(number) for number in place if number is not None]
    if len(numbers) < len(fields.SWITCH_PCI):
        return f"switch{entity}"
    domain, bus, device, function = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def build(address: str, gpus: str, profiling: str, library: str = LIBRARY) -> Dcgm:
    """Return the collector of the host engine at HOST:PORT or a socket's path. `library` is the path of libdcgm.

    `profiling` has the ids of profiling fields, separated by commas.
    """
    return Dcgm(address, Path(gpus), lambda: Library(library), ids=[int(id) for id in profiling.split(",")])
