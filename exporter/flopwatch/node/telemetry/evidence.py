"""Evidence in records to the ledger: events on this host that may explain lost time of a run.

An entry counts the events of one kind at one GPU, port or rank so far: {"kind": "xid", "t": 1700000000.5, "count": 2,
"gpu": "GPU-...", "detail": "79"}. A lost or repeated record therefore does no harm. `t` is the last event's time: the
kernel's for Xids, SXids and OOM kills, else that of the scrape that showed it. The state at the first scrape is no
event. `flopwatch.ledger.attribution` decides what an entry explains.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.xid import xids
from flopwatch.node.telemetry.open_step import GpuActivity
from flopwatch.node.telemetry.otlp import Push

log = logging.getLogger(__name__)

Entry = dict[str, Any]

MAX_ENTRIES = 64  # in a record
MAX_HOST_ENTRIES = 40  # in a record about the host, so that ranks have the rest
MAX_PLACES = 512  # kinds of events at GPUs and ports; those with the oldest last event are dropped first

BEFORE, AFTER = 600.0, 300.0  # seconds around a failure in which the ledger looks for its cause
MEMORY = 3600.0  # seconds for which an event is kept over a restart
EVIDENCE_STATE = "evidence.json"  # file of the state folder

THROTTLED = 0.1  # share of the time between scrapes; a clock throttled for less slows no step visibly
CATCHING_UP = 60.0  # seconds after the first scrape in which kernel log counters may include old events
HOST_PIDS = 0xEFFFFFFC  # inode of the host's pid namespace: PROC_PID_INIT_INO in linux/proc_ns.h

_ACTIVE = (4, 5)  # InfiniBand port states
_LINK_DOWN = (0, 3)  # NVLink states
_IDLE_ROLES = ("management",)
_NVLINK_ERRORS = "recovery recovery_failed malformed_packet buffer_overrun remote general local_integrity"
_THROTTLED = "sw_thermal_slowdown hw_thermal_slowdown hw_power_brake_slowdown thermal"
_NIC_EVENTS = "cable_unplugged nic_health_compromised nic_transmit_timeout"

_RISES: dict[str, tuple[str, frozenset[str] | None]] = {  # kind of evidence, values of the last label (None: all)
    m.GPU_ECC_ERRORS_TOTAL.name: ("ecc", frozenset({"uncorrected"})),
    # Every link has replays, CRC errors and single symbol errors.
    m.NVLINK_ERRORS_TOTAL.name: ("nvlink", frozenset(_NVLINK_ERRORS.split())),
    m.GPU_CLOCK_EVENT_SECONDS_TOTAL.name: ("throttle", frozenset(_THROTTLED.split())),
    m.INFINIBAND_LINK_DOWNED_TOTAL.name: ("link_down", None),
    m.INFINIBAND_CARRIER_CHANGES_TOTAL.name: ("link_down", None),
    m.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL.name: ("link_errors", None),
    m.INFINIBAND_LOCAL_LINK_INTEGRITY_ERRORS_TOTAL.name: ("link_errors", None),
    m.INFINIBAND_RECEIVE_ERRORS_TOTAL.name: ("link_errors", None),
    m.INFINIBAND_INVARIANT_CRC_ERRORS_TOTAL.name: ("link_errors", None),
    m.HOST_KERNEL_EVENTS_TOTAL.name: ("nic", frozenset(_NIC_EVENTS.split())),
}
_STATES: dict[str, tuple[str, Callable[[float], bool]]] = {  # kind of evidence, whether a value is healthy
    m.GPU_PRESENT.name: ("gpu_missing", lambda value: value == 1),
    m.GPU_ROW_REMAP_FAILURE.name: ("row_remap", lambda value: value == 0),
    m.NVLINK_LINK_STATE_ID.name: ("nvlink", lambda value: value not in _LINK_DOWN),
    m.INFINIBAND_PORT_PRESENT.name: ("link_down", lambda value: value == 1),
    m.INFINIBAND_PORT_STATE_ID.name: ("link_down", lambda value: value in _ACTIVE),
}
_LAST = {
    m.GPU_XID_LAST_TIMESTAMP_SECONDS.name,
    m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS.name,
    m.HOST_OOM_KILLED_TIMESTAMP_SECONDS.name,
}
_COUNTS = {m.GPU_XID_ERRORS_TOTAL.name, m.NVLINK_SWITCH_SXID_ERRORS_TOTAL.name}
_LOOKED_AT = frozenset({*_RISES, *_STATES, *_LAST, *_COUNTS, m.INFINIBAND_INFO.name})


class EvidencePlace(NamedTuple):
    """Kind of an entry that is not about a rank, and the GPU, port or detail that it is about."""

    kind: str
    gpu: str = ""
    port: str = ""
    detail: str = ""


class EventCount(NamedTuple):
    """Number of events so far, and the Unix time of the last event."""

    number: float
    t: float


class RankEnd(NamedTuple):
    """Last state of a rank, which may have ended. JSON stores it as a list."""

    rank: int
    started: float
    at: float  # of its last push
    pid: int = 0  # as in the kernel log, 0 if unknown
    ended_by: str = ""
    refused: EventCount | None = None  # allocations that CUDA refused
    gone_at: float | None = None  # when the process was found to have ended
    exited: tuple[str, str] = ("", "")  # `signal` and its name, or `exit` and the status


class EvidenceLog:
    """Store of the events that the samples of all scrapes showed."""

    def __init__(self, now: Callable[[], float] = time.time, activity: GpuActivity | None = None) -> None:
        self._now = now
        self.activity = activity if activity is not None else GpuActivity()
        self._lock = threading.Lock()
        self._events: dict[EvidencePlace, EventCount] = {}
        self._killed: dict[int, float] = {}
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}
        self._first = math.inf
        self._looked = 0.0
        self._failing = False

    def observe(self, samples: Sequence[Sample]) -> None:
        """Extract events from the samples of a scrape. Never raises."""
        try:
            self.activity.observe(samples)
            with self._lock:
                self._observe([sample for sample in samples if sample[0].name in _LOOKED_AT])
        except Exception:
            # A scrape must not fail because of evidence, which only a ledger uses.
            if not self._failing:
                log.exception("no evidence from this scrape")
            self._failing = True
        else:
            self._failing = False

    def entries(self, gpus: frozenset[str] | None, since: float, until: float) -> list[Entry]:
        """Return entries from `since` to `until`, newest first, about these GPUs (None: all), ports and the host."""
        with self._lock:
            recent = [
                (place, event)
                for place, event in self._events.items()
                if since <= event.t <= until
                and (not place.gpu or gpus is None or place.gpu in gpus or ":" in place.gpu)
            ]
        recent.sort(key=lambda one: (-one[1].t, one[0]))
        return [
            {
                "kind": place.kind,
                "t": round(event.t, 3),
                "count": round(event.number, 3),
                **{name: text for name, text in place._asdict().items() if text and name != "kind"},
            }
            for place, event in recent[:MAX_HOST_ENTRIES]
        ]

    def broken_gpus(self, since: float) -> set[str]:
        """Return the UUIDs of the GPUs with a critical or fatal Xid since then, in Unix time."""
        grave = {str(code) for code, meaning in xids().items() if meaning.severity in ("critical", "fatal")}
        with self._lock:
            events = self._events.items()
            return {at.gpu for at, event in events if at.kind == "xid" and event.t >= since and at.detail in grave}

    @property
    def link_down(self) -> bool:
        """Whether a port of the host has gone down and is down still."""
        with self._lock:
            fell = [tuple(place.port.split(":")) for place in self._events if place.kind == "link_down" and place.port]
            states = (m.INFINIBAND_PORT_PRESENT.name, m.INFINIBAND_PORT_STATE_ID.name)
            last = ((name, self._before.get((name, port))) for name in states for port in fell)
            return any(value is not None and not _STATES[name][1](value) for name, value in last)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for `restore`."""
        with self._lock:
            before = self._before.items()
            return {
                "looked": self._looked,
                "killed": list(self._killed.items()),
                "events": [[*place, *event] for place, event in self._events.items()],
                # The counter of kernel events starts at 0 with this process.
                "before": [[*key, value] for key, value in before if key[0] != m.HOST_KERNEL_EVENTS_TOTAL.name],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a previous process. Counters that rose during a short restart become events."""
        with self._lock:
            now = self._now()
            self._events = {
                EvidencePlace(*place): EventCount(number, t)
                for *place, number, t in state["events"]
                if t > now - MEMORY
            }
            self._killed = {int(pid): t for pid, t in state["killed"]}
            if 0 <= now - state["looked"] <= BEFORE:
                self._looked = state["looked"]
                self._before = {(name, tuple(labels)): value for name, labels, value in state["before"]}

    @property
    def killed(self) -> Mapping[int, float]:
        """Unix times of kills by the kernel's OOM killer, by pid on the host."""
        with self._lock:
            return dict(self._killed)

    def _observe(self, samples: list[Sample]) -> None:
        now, before = self._now(), self._before
        self._first = now if self._first == math.inf else self._first
        role = m.INFINIBAND_INFO.labels.index("role")
        idle = {labels[:2] for row, labels, _ in samples if row is m.INFINIBAND_INFO and labels[role] in _IDLE_ROLES}
        news: dict[EvidencePlace, float] = {}
        present = {labels for name, labels in before if name in (m.GPU_PRESENT.name, m.INFINIBAND_PORT_STATE_ID.name)}
        counts = {(row.name, labels): value for row, labels, value in samples if row.name in _COUNTS}
        for row, labels, raw in samples:
            name, value = row.name, raw * row.scale
            if name in _LAST:
                self._dated(row, labels, value, counts)
                continue
            if (name not in _RISES and name not in _STATES) or (row.labels[:2] == m.PORT and labels[:2] in idle):
                continue
            owner = _owner(row, labels)
            key = name, owner + labels[2:]
            if (last := before.get(key)) == value:
                continue
            before[key] = value
            # A series of these rows exists only after an event.
            if last is None and owner in present and (row is m.NVLINK_LINK_STATE_ID or getattr(row, "quiet", False)):
                last = 0.0 if name in _RISES else 1.0
            if last is None:
                continue
            if name in _STATES:
                kind, well = _STATES[name]
                place, count = _place(kind, row, labels), float(well(last) and not well(value))
            else:
                place, count = self._risen(row, labels, value - last if value >= last else value, now)
            # Several counters report one event, for example a link that went down.
            news[place] = max(count, news.get(place, 0.0))
        for place, count in news.items():
            if count > 0:
                before_that = self._events.get(place)
                self._keep(place, EventCount(count + (before_that.number if before_that is not None else 0.0), now))
        self._looked = now
        while len(before) > 8 * MAX_PLACES:
            del before[next(iter(before))]

    def _dated(self, row: Metric, labels: tuple[str, ...], t: float, counts: Mapping[Any, float]) -> None:
        if row is m.HOST_OOM_KILLED_TIMESTAMP_SECONDS:
            self._killed[int(labels[0])] = t
            while len(self._killed) > MAX_ENTRIES:
                del self._killed[min(self._killed, key=self._killed.__getitem__)]
        elif row is m.GPU_XID_LAST_TIMESTAMP_SECONDS:
            place = EvidencePlace("xid", gpu=labels[1], detail=labels[2])
            self._keep(place, EventCount(counts.get((m.GPU_XID_ERRORS_TOTAL.name, labels), 1.0), t))
        else:
            place = EvidencePlace("sxid", detail=labels[1])
            last = self._events.get(place, EventCount(0.0, t))
            number = counts.get((m.NVLINK_SWITCH_SXID_ERRORS_TOTAL.name, labels), 1.0)
            self._keep(place, EventCount(max(last.number, number), max(last.t, t)))

    def _risen(self, row: Metric, labels: tuple[str, ...], by: float, now: float) -> tuple[EvidencePlace, float]:
        """Return the place and number of events that a counter's rise `by` shows, 0 if the rise is not evidence."""
        kind, wanted = _RISES[row.name]
        if row is m.HOST_KERNEL_EVENTS_TOTAL and labels[-1] == "oom_kill":
            kind = "host_oom"
        place = _place(kind, row, labels)
        catching_up = row is m.HOST_KERNEL_EVENTS_TOTAL and now - self._first < CATCHING_UP
        unwanted = wanted is not None and kind != "host_oom" and labels[-1] not in wanted
        too_little = kind == "throttle" and by < THROTTLED * (now - self._looked)
        if row is m.INFINIBAND_CARRIER_CHANGES_TOTAL:  # one of two changes is a loss: the link may be up again
            too_little = by < 2
        return place, 0.0 if catching_up or unwanted or too_little else by

    def _keep(self, place: EvidencePlace, event: EventCount) -> None:
        if not (math.isfinite(event.number) and math.isfinite(event.t)):
            return  # JSON cannot store it, and the ledger would refuse the whole record
        self._events.pop(place, None)
        self._events[place] = event
        while len(self._events) > MAX_PLACES:
            del self._events[min(self._events, key=lambda one: self._events[one].t)]


def _owner(row: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels that identify a GPU or port, without the index of a GPU, which can change."""
    return labels[1:2] if row.labels[:2] == m.GPU else labels[:2]


def _place(kind: str, row: Metric, labels: tuple[str, ...]) -> EvidencePlace:
    if row.labels[:2] == m.GPU:
        return EvidencePlace(kind, gpu=labels[1], detail=labels[-1] if kind == "throttle" else "")
    if row.labels[:2] == m.PORT:
        return EvidencePlace(kind, port=f"{labels[0]}:{labels[1]}")
    return EvidencePlace(kind, detail=labels[-1] if kind == "nic" else "")


def out_of_memory(push: Push, before: EventCount | None) -> EventCount | None:
    """Return the count of refused CUDA allocations and when it last rose, if any. `before` is the previous result."""
    count = next((value for _, value in push.of(m.TRAINING_OUT_OF_MEMORY_TOTAL)), 0.0)
    if count <= 0:
        return None
    return before if before is not None and before.number == count else EventCount(count, push.at)


def of_ranks(ranks: Iterable[RankEnd], killed: Mapping[int, float]) -> list[Entry]:
    """Return entries about the ends of ranks, the most likely causes first. `killed` has times of OOM kills by pid."""
    entries: list[Entry] = []
    for one in ranks:
        killed_at = killed.get(one.pid)
        if killed_at is not None and killed_at >= one.started:
            entries.append({"kind": "host_oom", "t": killed_at, "count": 1, "rank": one.rank})
        if one.ended_by:
            entries.append({"kind": "exception", "t": one.at, "count": 1, "rank": one.rank, "detail": one.ended_by})
        if one.refused is not None:
            entries.append({"kind": "oom", "t": one.refused[1], "count": one.refused[0], "rank": one.rank})
        if one.gone_at is not None:
            kind, detail = one.exited
            if kind:
                entries.append({"kind": kind, "t": one.gone_at, "count": 1, "rank": one.rank, "detail": detail})
            entries.append({"kind": "pid_gone", "t": one.gone_at, "count": 1, "rank": one.rank})
    kinds = ("host_oom", "exception", "signal", "exit", "oom", "pid_gone")
    entries.sort(key=lambda entry: (kinds.index(entry["kind"]), entry["t"], entry["rank"]))
    return entries


def joined(before: Iterable[Entry], after: Iterable[Entry]) -> list[Entry]:
    """Merge the entries of two records of an attempt: the newest of each kind at each GPU, port or rank."""
    newest: dict[tuple[Any, ...], Entry] = {}
    for entry in (*before, *after):
        place = tuple(entry.get(name) for name in ("kind", "gpu", "port", "rank", "detail"))
        if place not in newest or entry["t"] >= newest[place]["t"]:
            newest[place] = entry
    node = [entry for entry in newest.values() if "rank" not in entry]
    node = sorted(node, key=lambda entry: -entry["t"])[:MAX_HOST_ENTRIES]
    return node + [entry for entry in newest.values() if "rank" in entry][: MAX_ENTRIES - len(node)]


def gpus_of(pushes: Iterable[Push]) -> frozenset[str] | None:
    """Return the UUIDs of the GPUs that ranks declared. None if a rank declared no GPU, or a MIG instance."""
    uuid = m.TRAINING_RANK_INFO.labels.index("uuid")
    gpus: set[str] = set()
    for push in pushes:
        own = {labels[uuid] for labels, _ in push.of(m.TRAINING_RANK_INFO)} - {""}
        if not own or not all(text.startswith("GPU-") for text in own):  # the UUID of a MIG instance is not its GPU's
            return None
        gpus |= own
    return frozenset(gpus)
