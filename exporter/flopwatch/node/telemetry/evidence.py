"""What this node has seen that may explain why a run lost time, for the records that go to the ledger.

Nothing is read for it: the samples of a scrape are looked at on their way (no scrape, no news), and what a rank said of
itself comes from its pushes. An entry is a place and a kind of event, how often up to now and when last, so that to
lose or repeat a record changes nothing; what an entry is held to explain is `flopwatch.ledger.attribution`'s to say.

    {"kind": "xid", "t": 1700000000.5, "count": 2, "gpu": "GPU-...", "detail": "79"}

Of Xids, SXids and the OOM killer's victims the time is the kernel's own; of the rest, when a scrape found a counter
risen or a part gone. What was so when this process first looked is no news.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.telemetry.otlp import Push

log = logging.getLogger(__name__)

Entry = dict[str, Any]

MOST = 64  # entries of a record
MOST_OF_NODE = 40  # of them the node's own; ranks have the rest
MOST_PLACES = 512  # that are remembered; the longest without an event is forgotten first

# The ledger attributes a failure to what was seen from so long before it to so long after, in seconds.
BEFORE, AFTER = 600.0, 300.0
MEMORY = 3600.0  # seconds that an event is of use after a restart

# Share of the time between two looks in which a clock must have been held back; less slows no step that one sees.
THROTTLED = 0.1
# How long after the first look the kernel log's counters may still be catching up with what is long past, in seconds.
CATCHING_UP = 60.0
# The pid namespace of the host, in whose numbers the kernel's log speaks: PROC_PID_INIT_INO in linux/proc_ns.h.
HOST_PIDS = 0xEFFFFFFC

_ACTIVE = (4, 5)  # InfiniBand port states
_LINK_DOWN = (0, 3)  # NVLink states
_NOT_FOR_TRAINING = ("management",)

# Counters by kind of evidence, and the values of the last label that count; None: all.
_RISES: dict[str, tuple[str, frozenset[str] | None]] = {
    m.GPU_ECC_ERRORS.name: ("ecc", frozenset({"uncorrected"})),
    # What a replay or the CRC mends, and single symbols, every link has.
    m.NVLINK_ERRORS.name: (
        "nvlink",
        frozenset(
            {
                "recovery",
                "recovery_failed",
                "malformed_packet",
                "buffer_overrun",
                "remote",
                "general",
                "local_integrity",
            }
        ),
    ),
    m.GPU_CLOCK_EVENT_SECONDS.name: (
        "throttle",
        frozenset({"sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "thermal"}),
    ),
    m.INFINIBAND_LINK_DOWNED.name: ("link_down", None),
    m.INFINIBAND_CARRIER_CHANGES.name: ("link_down", None),
    m.INFINIBAND_LINK_RECOVERY.name: ("link_errors", None),
    m.INFINIBAND_LINK_INTEGRITY.name: ("link_errors", None),
    m.INFINIBAND_RECEIVE_ERRORS.name: ("link_errors", None),
    m.INFINIBAND_CORRUPT_PACKETS.name: ("link_errors", None),
    m.NODE_KERNEL_EVENTS.name: (
        "nic",
        frozenset({"cable_unplugged", "nic_health_compromised", "nic_transmit_timeout"}),
    ),
}
_OOM_KILL = "oom_kill"
# Gauges, and whether a value means that all is well.
_STATES: dict[str, tuple[str, Callable[[float], bool]]] = {
    m.GPU_PRESENT.name: ("gpu_missing", lambda value: value == 1),
    m.GPU_ROW_REMAP_FAILURE.name: ("row_remap", lambda value: value == 0),
    m.NVLINK_LINK_STATE.name: ("nvlink", lambda value: value not in _LINK_DOWN),
    m.INFINIBAND_PRESENT.name: ("link_down", lambda value: value == 1),
    m.INFINIBAND_STATE.name: ("link_down", lambda value: value in _ACTIVE),
}
_LAST = {m.GPU_XID_LAST.name, m.NVLINK_SWITCH_SXID_LAST.name, m.NODE_OOM_KILLED.name}
_COUNTS = {m.GPU_XID.name, m.NVLINK_SWITCH_SXID.name}
_LOOKED_AT = frozenset({*_RISES, *_STATES, *_LAST, *_COUNTS, m.INFINIBAND_INFO.name})


class Place(NamedTuple):
    """What an entry is about, but for the rank."""

    kind: str
    gpu: str = ""
    port: str = ""
    detail: str = ""


class Event(NamedTuple):
    """How often up to now, and the Unix time when last."""

    number: float
    t: float


class LastWord(NamedTuple):
    """What is known of a rank that may have ended; JSON takes it and gives it back as a list."""

    rank: int
    started: float
    at: float  # of its last push
    pid: int = 0  # as the kernel's log has it; 0 is not known
    ended_by: str = ""
    refused: Event | None = None  # memory, by CUDA
    gone_at: float | None = None  # the process was found gone
    exited: tuple[str, str] = ("", "")  # signal or exit, and which


class EvidenceLog:
    """Remembers what the samples of all scrapes have shown."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._events: dict[Place, Event] = {}
        self._killed: dict[int, float] = {}
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}
        self._first: float | None = None
        self._looked = 0.0
        self._failing = False

    def observe(self, samples: Iterable[Sample]) -> None:
        """Look at the samples of a scrape; never raises."""
        try:
            with self._lock:
                self._observe([sample for sample in samples if sample[0].name in _LOOKED_AT])
        except Exception:
            # A scrape must not fail for what only a ledger asks for.
            if not self._failing:
                log.exception("the samples of a scrape cannot be kept as evidence")
            self._failing = True
        else:
            self._failing = False

    def entries(self, gpus: frozenset[str] | None, since: float, until: float) -> list[Entry]:
        """Return what was last seen in this time, the newest first: of these GPUs, or all, and of the node's ports."""
        with self._lock:
            found = [
                (place, event)
                for place, event in self._events.items()
                if since <= event.t <= until
                and (not place.gpu or gpus is None or place.gpu in gpus or ":" in place.gpu)
            ]
        found.sort(key=lambda one: (-one[1].t, one[0]))
        return [
            {
                "kind": place.kind,
                "t": round(event.t, 3),
                "count": round(event.number, 3),
                **{name: text for name, text in place._asdict().items() if text and name != "kind"},
            }
            for place, event in found[:MOST_OF_NODE]
        ]

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes, as JSON has it."""
        with self._lock:
            return {
                "looked": self._looked,
                "killed": list(self._killed.items()),
                "events": [[*place, *event] for place, event in self._events.items()],
                "before": [
                    [name, labels, value]
                    for (name, labels), value in self._before.items()
                    if name != m.NODE_KERNEL_EVENTS.name
                ],  # which this process counts itself, from 0 on
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, of before a restart; what rose in between is news, if that was not long ago."""
        with self._lock:
            now = self._now()
            self._events = {
                Place(*place): Event(number, t) for *place, number, t in state["events"] if t > now - MEMORY
            }
            self._killed = {int(pid): t for pid, t in state["killed"]}
            if 0 <= now - state["looked"] <= BEFORE:
                self._looked = state["looked"]
                self._before = {(name, tuple(labels)): value for name, labels, value in state["before"]}

    @property
    def killed(self) -> Mapping[int, float]:
        """Return when the kernel's OOM killer took a process, by its pid on the host."""
        with self._lock:
            return dict(self._killed)

    def _observe(self, samples: list[Sample]) -> None:
        now, before = self._now(), self._before
        if self._first is None:
            self._first = now
        role = m.INFINIBAND_INFO.labels.index("role")
        idle = {
            labels[:2] for row, labels, _ in samples if row is m.INFINIBAND_INFO and labels[role] in _NOT_FOR_TRAINING
        }
        news: dict[Place, float] = {}
        known = {labels for name, labels in before if name in (m.GPU_PRESENT.name, m.INFINIBAND_STATE.name)}
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
            last = before.get(key)
            before[key] = value
            if last is None and owner in known and _silent_until_the_first(row):
                last = 0.0 if name in _RISES else 1.0
            if last is None:
                continue
            if name in _STATES:
                kind, well = _STATES[name]
                place, count = _place(kind, row, labels), float(well(last) and not well(value))
            else:
                place, count = self._risen(row, labels, value - last if value >= last else value, now)
            # What several counters tell of, as of a link that went down, happened once.
            news[place] = max(count, news.get(place, 0.0))
        for place, count in news.items():
            if count > 0:
                before_that = self._events.get(place)
                self._keep(place, Event(count + (before_that.number if before_that is not None else 0.0), now))
        self._looked = now
        # What is not there any more, as after a change of cards, is not kept for ever.
        while len(before) > 8 * MOST_PLACES:
            del before[next(iter(before))]

    def _dated(self, row: Metric, labels: tuple[str, ...], t: float, counts: Mapping[Any, float]) -> None:
        """Keep an event of which the source itself tells when it was last, and how often."""
        if row is m.NODE_OOM_KILLED:
            self._killed[int(labels[0])] = t
            while len(self._killed) > MOST:
                del self._killed[min(self._killed, key=self._killed.__getitem__)]
        elif row is m.GPU_XID_LAST:
            place = Place("xid", gpu=labels[1], detail=labels[2])
            self._keep(place, Event(counts.get((m.GPU_XID.name, labels), 1.0), t))
        else:
            place = Place("sxid", detail=labels[1])
            known = self._events.get(place, Event(0.0, t))
            self._keep(
                place, Event(max(known.number, counts.get((m.NVLINK_SWITCH_SXID.name, labels), 1.0)), max(known.t, t))
            )

    def _risen(self, row: Metric, labels: tuple[str, ...], by: float, now: float) -> tuple[Place, float]:
        """Return what a counter that has risen by so much tells of, and how often that has happened; 0 is never."""
        kind, wanted = _RISES[row.name]
        if row is m.NODE_KERNEL_EVENTS and labels[-1] == _OOM_KILL:
            kind = "host_oom"
        place = _place(kind, row, labels)
        catching_up = row is m.NODE_KERNEL_EVENTS and now - (now if self._first is None else self._first) < CATCHING_UP
        unwanted = wanted is not None and kind != "host_oom" and labels[-1] not in wanted
        too_little = (
            (kind == "throttle" and by < THROTTLED * (now - self._looked))
            or (row is m.INFINIBAND_CARRIER_CHANGES and by < 2)  # it may have come back: its loss was one of the two
        )
        return place, 0.0 if catching_up or unwanted or too_little else by

    def _keep(self, place: Place, event: Event) -> None:
        if not (math.isfinite(event.number) and math.isfinite(event.t)):
            return  # JSON has no such number, and the ledger would refuse the whole record
        self._events.pop(place, None)
        self._events[place] = event
        while len(self._events) > MOST_PLACES:
            del self._events[min(self._events, key=lambda one: self._events[one].t)]


def _owner(row: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return what tells one GPU or port from another; the index of a GPU moves."""
    return labels[1:2] if row.labels[:2] == m.GPU else labels[:2]


def _silent_until_the_first(row: Metric) -> bool:
    """Return whether a series of this row is there only once something has happened."""
    return row is m.NVLINK_LINK_STATE or getattr(row, "quiet", False)


def _place(kind: str, row: Metric, labels: tuple[str, ...]) -> Place:
    if row.labels[:2] == m.GPU:
        return Place(kind, gpu=labels[1], detail=labels[-1] if kind == "throttle" else "")
    if row.labels[:2] == m.PORT:
        return Place(kind, port=f"{labels[0]}:{labels[1]}")
    return Place(kind, detail=labels[-1] if kind == "nic" else "")


def out_of_memory(push: Push, before: Event | None) -> Event | None:
    """Return how often CUDA has refused this process memory and when it was heard last, None if it never has."""
    count = next((value for row, _, value in push.samples if row is m.TRAINING_OUT_OF_MEMORY), 0.0)
    if count <= 0:
        return None
    return before if before is not None and before.number == count else Event(count, push.at)


def of_ranks(ranks: Iterable[LastWord], killed: Mapping[int, float]) -> list[Entry]:
    """Return what is known of the ends of ranks, and whom the kernel killed for memory.

    What tells most comes first, then what came first, as the first to end is not the others' echo.
    """
    found: list[Entry] = []
    for one in ranks:
        killed_at = killed.get(one.pid)
        if killed_at is not None and killed_at >= one.started:
            found.append({"kind": "host_oom", "t": killed_at, "count": 1, "rank": one.rank})
        if one.ended_by:
            found.append({"kind": "exception", "t": one.at, "count": 1, "rank": one.rank, "detail": one.ended_by})
        if one.refused is not None:
            found.append({"kind": "oom", "t": one.refused[1], "count": one.refused[0], "rank": one.rank})
        if one.gone_at is not None:
            kind, detail = one.exited
            if kind:
                found.append({"kind": kind, "t": one.gone_at, "count": 1, "rank": one.rank, "detail": detail})
            found.append({"kind": "pid_gone", "t": one.gone_at, "count": 1, "rank": one.rank})
    kinds = ("host_oom", "exception", "signal", "exit", "oom", "pid_gone")
    found.sort(key=lambda entry: (kinds.index(entry["kind"]), entry["t"], entry["rank"]))
    return found


def joined(before: Iterable[Entry], after: Iterable[Entry]) -> list[Entry]:
    """Return what two records of an attempt tell, of each place and kind the newest."""
    found: dict[tuple[Any, ...], Entry] = {}
    for entry in (*before, *after):
        place = tuple(entry.get(name) for name in ("kind", "gpu", "port", "rank", "detail"))
        if place not in found or entry["t"] >= found[place]["t"]:
            found[place] = entry
    node = [entry for entry in found.values() if "rank" not in entry]
    node = sorted(node, key=lambda entry: -entry["t"])[:MOST_OF_NODE]
    return node + [entry for entry in found.values() if "rank" in entry][: MOST - len(node)]


def gpus_of(pushes: Iterable[Push]) -> frozenset[str] | None:
    """Return the GPUs that ranks have declared; None if one of them has declared none."""
    uuid = m.TRAINING_RANK_INFO.labels.index("uuid")
    found: set[str] = set()
    for push in pushes:
        own = {labels[uuid] for row, labels, _ in push.samples if row is m.TRAINING_RANK_INFO} - {""}
        if not own or not all(text.startswith("GPU-") for text in own):  # a MIG instance's is not its GPU's
            return None
        found |= own
    return frozenset(found)
