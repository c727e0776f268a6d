"""Is this node fit for training? A verdict with reasons and what to do, from the samples of one look.

Each row of RULES is one thing that can be wrong; docs/check.md has them as a
table. What to do follows the driver's own recovery action (NVML field 230) where
there is one, else NVIDIA's GPU debug guidelines (https://docs.nvidia.com/deploy/gpu-debug-guidelines/) and Xid
catalogue (https://docs.nvidia.com/deploy/xid-errors/). Ports are judged as leptonai/gpud and NVIDIA/NVSentinel do.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.catalogue.xid import xids
from flopwatch.node.health.expectations import Expectations, Ports

log = logging.getLogger(__name__)

OK, DEGRADED, BAD, UNKNOWN = "ok", "degraded", "bad", "unknown"
_WEIGHT = {BAD: 2, DEGRADED: 1, UNKNOWN: 1, OK: 0}
_WORST_FIRST = (BAD, DEGRADED, UNKNOWN)

# What to do, as the label of the series and in words.
ACTIONS = {
    "reset_gpu": "reset the GPU (nvidia-smi --gpu-reset) once it is free",
    "reboot_node": "reboot the node",
    "reboot_then_reseat": "reboot the node; if the part stays away, reseat it",
    "drain_peers": "drain the GPUs that exchange data with it",
    "drain_and_reset": "drain the node, then reset the GPU",
    "recover_imex": "recover the IMEX domain",
    "reset_bus": "reset the PCIe bus above the GPU",
    "reboot_system": "reboot the whole system",
    "replace_gpu": "drain the node and have the GPU replaced (RMA)",
    "reseat_gpu": "drain the node, power it off and reseat the GPU",
    "check_nvlink": "drain the node and test its NVLinks (fabric manager log, field diagnostics)",
    "restart_fabric_manager": "restart the fabric manager, then reset the GPUs",
    "check_cooling": "check fans, inlet temperature and heat sinks",
    "check_power": "check power supplies and the rack's power limit",
    "check_cable": "clean, reseat or replace the cable and its transceiver",
    "check_node": "compare the node with what is expected of it, and correct the one that is wrong",
    "load_driver": "load the NVIDIA driver, or end its update; the GPUs are not at fault",
    "wait": "wait until the maintenance that asked for it is over",
    "check_exporter": "run flopwatch doctor: it says whether the driver hangs or does not let the exporter ask",
}

# The driver's own words: nvmlDeviceGpuRecoveryAction_t.
RECOVERY_ACTIONS = {
    1: "reset_gpu",
    2: "reboot_node",
    3: "drain_peers",
    4: "drain_and_reset",
    5: "recover_imex",
    6: "reset_bus",
    7: "reboot_system",
}

# Where the driver has no recovery action to ask for (before R560, or the GPU is gone), only a reset that nobody can
# see ends what a critical Xid began. An hour after the last one either the next job has met it again, which counts
# anew, or somebody has reset the GPU, and must not have to wait longer.
XID_SECONDS = 3600.0

ACTIVE = (4, 5)  # InfiniBand port states
NVLINK_UP, NVLINK_DOWN_STATES = ("active", "sleep"), (0, 3)
HOT_TRANSCEIVER = 70.0  # degrees Celsius, NVIDIA UFM's limit
EFFECTIVE_BER = 1e-12  # DCGM's limit of the NVLink bit error ratio after correction
# A port's rate is printed rounded.
RATE_TOLERANCE = 0.99
# Roles of ports without which a job still trains.
SPARE_ROLES = ("storage", "management")


class Reason(NamedTuple):
    """One thing that is wrong: with which part, how grave, what to do, and a sentence."""

    reason: str
    part: str
    verdict: str
    action: str
    detail: str

    def __str__(self) -> str:
        return f"{self.detail}: {ACTIONS[self.action]}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a look at the node says: `reasons` worst first, and how many GPUs answer and ports are active."""

    reasons: tuple[Reason, ...]
    gpus: int
    ports: int

    @property
    def verdict(self) -> str:
        """Return the worst reason's verdict: bad, degraded, unknown, or ok without a reason."""
        return self.reasons[0].verdict if self.reasons else OK


Labels = tuple[str, ...]
Found = tuple[str, str]  # a part, and a sentence about it


class Facts:
    """The samples that rules ask for, in the units of the catalogue, and what they are compared with."""

    def __init__(self, samples: Iterable[Sample], expected: Expectations, now: float, booted: float) -> None:
        self.expected = expected
        self.lately = max(booted, now - XID_SECONDS)
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in _known_rows()}
        numbers = self._numbers
        for row, labels, raw in samples:
            if row.name in numbers:
                numbers[row.name][labels] = raw * row.scale
        self.released = any(self.of(m.FLOPWATCH_DRIVER_RELEASED).values())
        self.driverless = 0 in self.of(m.GPU_DRIVER_LOADED).values()
        self._index = self._gpu_index()
        self.roles = self._roles()
        present = self.of(m.INFINIBAND_PORT_PRESENT)
        self.active = {
            port
            for port, state in self.of(m.INFINIBAND_PORT_STATE_ID).items()
            if state in ACTIVE and present.get(port, 1)
        }
        self.answering = {gpu for gpu, present in self.of(m.GPU_PRESENT).items() if present}

    def of(self, row: Metric) -> Mapping[Labels, float]:
        """Return the numbers of one row by its label values."""
        return self._numbers[row.name]

    def part(self, row: Metric, labels: Labels) -> str:
        """Return the part a sample is about, as `gpu 3`, `port mlx5_0/1` or `switch 0000:05:00`."""
        if row.labels[:2] == m.GPU:
            return f"gpu {labels[0]}"
        return f"port {labels[0]}/{labels[1]}" if row.labels[:2] == m.PORT else f"{row.labels[0]} {labels[0]}"

    def named(self, row: Metric, labels: Labels) -> str:
        """Return the part as a sentence begins with it, a GPU with what it takes to find it."""
        if row.labels[:2] != m.GPU:
            return self.part(row, labels)
        info = self._index.get(labels[1], {})
        place = [info.get("pci_bus_id", ""), f"serial {info['serial']}" if info.get("serial") else ""]
        known = ", ".join(word for word in place if word)
        return f"GPU {labels[0]} ({known})" if known else f"GPU {labels[0]}"

    def _gpu_index(self) -> dict[str, dict[str, str]]:
        return {labels[1]: dict(zip(m.GPU_INFO.labels, labels, strict=True)) for labels in self.of(m.GPU_INFO)}

    def _roles(self) -> dict[Labels, str]:
        role = m.INFINIBAND_INFO.labels.index("role")
        return {labels[:2]: labels[role] for labels in self.of(m.INFINIBAND_INFO)}

    def ports_of(self, role: str) -> set[Labels]:
        """Return the ports that the expectation of a role is about, those that are gone included."""
        ports = {*self.of(m.INFINIBAND_PORT_PRESENT), *self.of(m.INFINIBAND_PORT_STATE_ID)}
        return ports if role == "any" else {port for port in ports if self.roles.get(port, "") == role}

    def expected_ports(self, port: Labels) -> tuple[str, Ports] | None:
        """Return what is expected of the ports that one is among."""
        for role in (self.roles.get(port, ""), "any"):
            if role in self.expected.ports:
                return role, self.expected.ports[role]
        return None

    def missed_port(self, port: Labels) -> bool:
        """Return whether the node has not as many active ports as expected without this one."""
        wanted = self.expected_ports(port)
        return wanted is None or not wanted[1].count or len(self.ports_of(wanted[0]) & self.active) < wanted[1].count

    def rate_of(self, port: Labels) -> float:
        """Return the rate that is expected of a port, in byte/s; 0 where nothing is."""
        wanted = self.expected_ports(port)
        if wanted is not None and wanted[1].rate_gbps:
            return wanted[1].rate_gbps * 1e9 / 8
        return self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND).get(port, 0.0)

    def lost_ports(self) -> Iterator[tuple[Labels, str]]:
        """Yield the ports that are missed, each with what is wrong: it is gone, or it is down and was active once."""
        for port, present in self.of(m.INFINIBAND_PORT_PRESENT).items():
            if not present and self.missed_port(port):
                yield port, "gone"
        for port, state in self.of(m.INFINIBAND_PORT_STATE_ID).items():
            used = port in self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND) and self.of(
                m.INFINIBAND_PORT_PRESENT
            ).get(port, 1)
            if state not in ACTIVE and used and self.missed_port(port):
                yield port, "down"


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason: what it says of a part, which series it asks, and how it finds the parts it holds for."""

    reason: str
    verdict: str
    action: str
    text: str
    rows: tuple[Metric, ...]
    find: Callable[[Facts], Iterator[Found]]


def _is(
    reason: str, verdict: str, action: str, text: str, row: Metric, *numbers: float, last: str | None = None
) -> Rule:
    """Return a rule for every series of a row that has one of these numbers, and `last` as its last label's value."""

    def find(facts: Facts) -> Iterator[Found]:
        for labels, number in facts.of(row).items():
            if number in numbers and last in (None, labels[-1]):
                yield facts.part(row, labels), f"{facts.named(row, labels)} {text}"

    return Rule(reason, verdict, action, text, (row,), find)


def _over(
    reason: str, verdict: str, action: str, text: str, row: Metric, limit: float = 0.0, last: str | None = None
) -> Rule:
    """Return a rule for every series of a row that is above a limit, and has `last` as its last label's value."""

    def find(facts: Facts) -> Iterator[Found]:
        for labels, number in facts.of(row).items():
            if number > limit and last in (None, labels[-1]):
                yield facts.part(row, labels), f"{facts.named(row, labels)} {text} ({number:g})"

    return Rule(reason, verdict, action, text, (row,), find)


# Rules that compare one series with another, or with the expectations.


def _missing_gpus(facts: Facts) -> Iterator[Found]:
    if facts.expected.gpus and len(facts.answering) >= facts.expected.gpus:
        return  # what is missing was taken out on purpose
    for gpu, present in facts.of(m.GPU_PRESENT).items():
        if not present and facts.of(m.GPU_READABLE).get(gpu, 1):
            yield facts.part(m.GPU_PRESENT, gpu), f"{facts.named(m.GPU_PRESENT, gpu)} does not answer"


def _unloaded_driver(facts: Facts) -> Iterator[Found]:
    if facts.driverless:
        yield "driver", "no NVIDIA driver is loaded, and no job can use the GPUs"


def _unreadable_gpus(facts: Facts) -> Iterator[Found]:
    for gpu, readable in facts.of(m.GPU_READABLE).items():
        if not readable and not facts.driverless:
            name = facts.named(m.GPU_READABLE, gpu)
            text = f"{name} cannot be seen by the exporter, which says nothing of the GPU"
            yield facts.part(m.GPU_READABLE, gpu), text


def _too_few_gpus(facts: Facts) -> Iterator[Found]:
    known = {*facts.of(m.GPU_PRESENT), *facts.of(m.GPU_READABLE)}
    if known and len(known) < facts.expected.gpus:
        yield "gpus", f"{len(known)} GPUs where {facts.expected.gpus} are expected"


def _unseen_gpus(facts: Facts) -> Iterator[Found]:
    seen = facts.of(m.GPU_PRESENT) or facts.of(m.GPU_READABLE)
    if facts.expected.gpus and not seen and not facts.released:
        yield "gpus", f"nothing is read from NVML where {facts.expected.gpus} GPUs are expected"


def _other_model(facts: Facts) -> Iterator[Found]:
    model = m.GPU_INFO.labels.index("model")
    for labels in facts.of(m.GPU_INFO):
        if facts.expected.gpu_model and labels[:2] in facts.answering and labels[model] != facts.expected.gpu_model:
            name = facts.named(m.GPU_INFO, labels)
            yield facts.part(m.GPU_INFO, labels), f"{name} is {labels[model]!r}, not {facts.expected.gpu_model!r}"


def _narrow_pcie(facts: Facts) -> Iterator[Found]:
    for gpu, lanes in facts.of(m.GPU_PCIE_WIDTH_LANES).items():
        wanted = max(facts.of(m.GPU_PCIE_WIDTH_MAX_LANES).get(gpu, 0), facts.expected.pcie_width)
        if 0 < lanes < wanted:
            name = facts.named(m.GPU_PCIE_WIDTH_LANES, gpu)
            yield facts.part(m.GPU_PCIE_WIDTH_LANES, gpu), f"{name} has {lanes:g} of {wanted:g} PCIe lanes"


def _slow_pcie(facts: Facts) -> Iterator[Found]:
    for gpu, generation in facts.of(m.GPU_PCIE_GENERATION_MAX).items():
        if 0 < generation < facts.expected.pcie_generation:
            name = facts.named(m.GPU_PCIE_GENERATION_MAX, gpu)
            text = f"{name} can have PCIe {generation:g} where {facts.expected.pcie_generation} is expected"
            yield facts.part(m.GPU_PCIE_GENERATION_MAX, gpu), text


def _lost_nvlinks(facts: Facts) -> Iterator[Found]:
    links: Counter[Labels] = Counter()
    for labels, number in facts.of(m.NVLINK_LINKS).items():
        links[labels[:2]] += int(number) if labels[2] in NVLINK_UP else 0
    # Links that never were up lead nowhere: those of a card without a bridge, or of one with a smaller bridge.
    fallen = Counter(
        labels[:2] for labels, state in facts.of(m.NVLINK_LINK_STATE_ID).items() if state in NVLINK_DOWN_STATES
    )
    for gpu, up in links.items():
        wanted = facts.expected.nvlinks_per_gpu or up + fallen[gpu]
        if up < wanted:
            name = facts.named(m.NVLINK_LINKS, gpu)
            yield facts.part(m.NVLINK_LINKS, gpu), f"{name} has {up:g} of {wanted:g} NVLinks"


@cache
def critical_xids() -> Mapping[str, str]:
    """Return the codes that page and those of broken hardware, and NVIDIA's action for each."""
    return {
        str(code): row.action.partition(" ")[0] for code, row in xids().items() if row.page or row.severity == "fatal"
    }


def _xids(driver_content: bool, *nvidia: str) -> Callable[[Facts], Iterator[Found]]:
    """Return how to find the GPUs with a recent critical Xid for which NVIDIA has one of these actions, or any."""

    def find(facts: Facts) -> Iterator[Found]:
        codes: dict[Labels, list[str]] = {}
        for (*gpu, code), last in facts.of(m.GPU_XID_LAST_TIMESTAMP_SECONDS).items():
            if last > facts.lately and code in critical_xids():
                codes.setdefault(tuple(gpu), []).append(code)
        for owner, seen in codes.items():
            content = facts.of(m.GPU_RECOVERY_ACTION_ID).get(owner) == 0
            actions = {critical_xids()[code] for code in seen}
            if content == driver_content and (not nvidia or _gravest(actions) in nvidia):
                words = f"Xid {', '.join(sorted(seen, key=int))} within the last hour"
                yield (
                    facts.part(m.GPU_XID_LAST_TIMESTAMP_SECONDS, owner),
                    f"{facts.named(m.GPU_XID_LAST_TIMESTAMP_SECONDS, owner)} had {words}",
                )

    return find


# NVIDIA's actions, the gravest first; what is not here, or has none, is a reset.
_NVIDIA_GRAVEST = (
    "CONTACT_SUPPORT",
    "CHECK_MECHANICALS",
    "RESTART_BM",
    "RESTART_VM",
    "WORKFLOW_NVLINK_ERR",
    "WORKFLOW_NVLINK5_ERR",
)


def _gravest(actions: set[str]) -> str:
    return next((action for action in _NVIDIA_GRAVEST if action in actions), "RESET_GPU")


def _lost_ports(how: str, spare: bool) -> Callable[[Facts], Iterator[Found]]:
    words = {"gone": "is gone from /sys", "down": "is down"}

    def find(facts: Facts) -> Iterator[Found]:
        for port, what in facts.lost_ports():
            if what == how and (facts.roles.get(port) in SPARE_ROLES) == spare:
                part = facts.part(m.INFINIBAND_PORT_STATE_ID, port)
                yield part, f"{part} {words[how]}"

    return find


def _too_few_ports(facts: Facts) -> Iterator[Found]:
    lost = {port for port, _ in facts.lost_ports()}
    for role, wanted in facts.expected.ports.items():
        ports = facts.ports_of(role)
        # Where no GPU was ever seen, as beside a driver that hangs, what a port is for cannot be told.
        unsorted = facts.ports_of("") if not facts.of(m.GPU_INFO) else set()
        short = wanted.count - len((ports | unsorted) & facts.active) - len(ports & lost)
        if short > 0 and facts.of(m.INFINIBAND_PORT_PRESENT):
            kind = "" if role == "any" else f"{role} "
            text = f"{len(ports & facts.active)} active {kind}ports where {wanted.count} are expected"
            yield f"{kind}ports", text


def _unseen_ports(facts: Facts) -> Iterator[Found]:
    count = sum(wanted.count for wanted in facts.expected.ports.values())
    if count and not facts.of(m.INFINIBAND_PORT_PRESENT):
        yield "ports", f"nothing is read from /sys/class/infiniband where {count} ports are expected"


def _slow_ports(spare: bool) -> Callable[[Facts], Iterator[Found]]:
    def find(facts: Facts) -> Iterator[Found]:
        for port, rate in facts.of(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND).items():
            wanted = facts.rate_of(port)
            fits = (facts.roles.get(port) in SPARE_ROLES) == spare
            if fits and port in facts.active and rate < wanted * RATE_TOLERANCE:
                part = facts.part(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, port)
                yield part, f"{part} runs at {rate * 8e-9:g} of {wanted * 8e-9:g} Gb/s"

    return find


def _hot_transceivers(facts: Facts) -> Iterator[Found]:
    for labels, celsius in facts.of(m.INFINIBAND_TEMPERATURE_CELSIUS).items():
        if labels[2].startswith("Module") and celsius > HOT_TRANSCEIVER:
            part = facts.part(m.INFINIBAND_TEMPERATURE_CELSIUS, labels)
            yield part, f"{part}: the transceiver has {celsius:g} degrees Celsius"


def _fatal_sxids(facts: Facts) -> Iterator[Found]:
    severity = m.NVLINK_SWITCH_SXID_INFO.labels.index("severity")
    fatal = {labels[0] for labels in facts.of(m.NVLINK_SWITCH_SXID_INFO) if labels[severity] == "fatal"}
    for (switch, code), last in facts.of(m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS).items():
        if code in fatal and last > facts.lately:
            yield f"switch {switch}", f"NVSwitch {switch} had SXid {code} within the last hour"


def _released_driver(facts: Facts) -> Iterator[Found]:
    if facts.released:
        yield "driver", "the driver is released on request, and nothing is known of the GPUs"


def _failed_sources(facts: Facts) -> Iterator[Found]:
    for (source,), success in facts.of(m.FLOPWATCH_COLLECTOR_SUCCESS).items():
        # Who owns a GPU, or where the node is, does not make it fit or unfit.
        closed = facts.released and source != "infiniband"
        if not success and source in ("nvml", "dcgm", "infiniband", "xid") and not closed:
            yield f"source {source}", f"source {source} cannot be read"


_XIDS = (m.GPU_XID_LAST_TIMESTAMP_SECONDS, m.GPU_RECOVERY_ACTION_ID)
_PORT_STATES = (m.INFINIBAND_PORT_PRESENT, m.INFINIBAND_PORT_STATE_ID, m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND)
_RATES = (
    m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND,
    m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND,
    m.INFINIBAND_PORT_STATE_ID,
)

RULES: tuple[Rule, ...] = (
    # GPUs: there?
    Rule(
        "gpu_missing",
        BAD,
        "reboot_then_reseat",
        "does not answer, and is in the inventory",
        (m.GPU_PRESENT, m.GPU_READABLE),
        _missing_gpus,
    ),
    Rule("gpus_too_few", BAD, "reboot_then_reseat", "fewer GPUs than expected", (m.GPU_PRESENT,), _too_few_gpus),
    Rule(
        "gpus_unseen",
        UNKNOWN,
        "check_exporter",
        "no driver, or none that can be asked, where GPUs are expected",
        (m.GPU_PRESENT,),
        _unseen_gpus,
    ),
    Rule("gpu_other_model", DEGRADED, "check_node", "is not of the expected model", (m.GPU_INFO,), _other_model),
    Rule(
        "driver_not_loaded",
        DEGRADED,
        "load_driver",
        "no driver is loaded where the inventory has GPUs",
        (m.GPU_DRIVER_LOADED,),
        _unloaded_driver,
    ),
    Rule(
        "gpu_unreadable",
        UNKNOWN,
        "check_exporter",
        "cannot be seen by the exporter, which says nothing of the GPU",
        (m.GPU_READABLE, m.GPU_DRIVER_LOADED),
        _unreadable_gpus,
    ),
    # What the driver says.
    *(
        _is("recovery_action", BAD, action, "needs recovery, says the driver", m.GPU_RECOVERY_ACTION_ID, number)
        for number, action in RECOVERY_ACTIONS.items()
    ),
    Rule("xid", BAD, "reset_gpu", "had a critical Xid within the last hour", _XIDS, _xids(False, "RESET_GPU")),
    Rule(
        "xid",
        BAD,
        "reboot_node",
        "the same, where NVIDIA's action is a restart",
        _XIDS,
        _xids(False, "RESTART_BM", "RESTART_VM"),
    ),
    Rule(
        "xid",
        BAD,
        "check_nvlink",
        "the same, where it is an NVLink",
        _XIDS,
        _xids(False, "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"),
    ),
    Rule(
        "xid",
        BAD,
        "reseat_gpu",
        "the same, where it is the board's power or seat",
        _XIDS,
        _xids(False, "CHECK_MECHANICALS"),
    ),
    Rule("xid", BAD, "replace_gpu", "the same, where NVIDIA wants to be asked", _XIDS, _xids(False, "CONTACT_SUPPORT")),
    Rule(
        "xid_recovered",
        DEGRADED,
        "reset_gpu",
        "had a critical Xid within the last hour, and the driver asks for nothing",
        _XIDS,
        _xids(True),
    ),
    # Memory.
    _is(
        "row_remap_failure", BAD, "replace_gpu", "has a memory row that cannot be replaced", m.GPU_ROW_REMAP_FAILURE, 1
    ),
    _is(
        "sram_errors",
        BAD,
        "replace_gpu",
        "had more SRAM errors than it may have",
        m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED,
        1,
    ),
    _over(
        "ecc_uncorrected",
        DEGRADED,
        "drain_and_reset",
        "had uncorrected memory errors since the driver was loaded",
        m.GPU_ECC_ERRORS_TOTAL,
        last="uncorrected",
    ),
    _is(
        "row_remap_pending",
        DEGRADED,
        "drain_and_reset",
        "has memory rows to replace at its next reset",
        m.GPU_ROW_REMAP_PENDING,
        1,
    ),
    _is(
        "retired_pages_pending",
        DEGRADED,
        "drain_and_reset",
        "has memory pages to retire at its next reset",
        m.GPU_RETIRED_PAGES_PENDING,
        1,
    ),
    _is(
        "repair_pending",
        DEGRADED,
        "drain_and_reset",
        "has a repair waiting for its next reset",
        m.GPU_REPAIR_PENDING,
        1,
    ),
    # Held back.
    _is(
        "thermal_slowdown",
        DEGRADED,
        "check_cooling",
        "is too hot, and its hardware holds the clock back",
        m.GPU_CLOCK_EVENT_ACTIVE,
        1,
        last="hw_thermal_slowdown",
    ),
    _is(
        "power_brake",
        DEGRADED,
        "check_power",
        "is braked from outside, by its power supply",
        m.GPU_CLOCK_EVENT_ACTIVE,
        1,
        last="hw_power_brake_slowdown",
    ),
    Rule(
        "pcie_width",
        DEGRADED,
        "reseat_gpu",
        "has fewer PCIe lanes than it could, or than expected",
        (m.GPU_PCIE_WIDTH_LANES, m.GPU_PCIE_WIDTH_MAX_LANES),
        _narrow_pcie,
    ),
    Rule(
        "pcie_generation",
        DEGRADED,
        "check_node",
        "cannot have the expected PCIe generation",
        (m.GPU_PCIE_GENERATION_MAX,),
        _slow_pcie,
    ),
    # NVLink and its fabric.
    Rule(
        "nvlink_down",
        BAD,
        "check_nvlink",
        "has fewer NVLinks up than expected, or than it had",
        (m.NVLINK_LINKS, m.NVLINK_LINK_STATE_ID),
        _lost_nvlinks,
    ),
    _over(
        "nvlink_bit_errors",
        BAD,
        "check_nvlink",
        f"has a bit error ratio above {EFFECTIVE_BER:g} on an NVLink",
        m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO,
        EFFECTIVE_BER,
    ),
    _is(
        "fabric_not_ready",
        BAD,
        "restart_fabric_manager",
        "has not joined its NVLink fabric",
        m.GPU_FABRIC_STATE_ID,
        1,
        2,
    ),
    _over(
        "fabric_failed",
        BAD,
        "restart_fabric_manager",
        "failed to join its NVLink fabric, with this nvmlReturn_t",
        m.GPU_FABRIC_STATUS_ID,
    ),
    _is("fabric_unhealthy", BAD, "check_nvlink", "finds its NVLink fabric unhealthy", m.GPU_FABRIC_HEALTH_ID, 2),
    _is(
        "fabric_limited",
        DEGRADED,
        "check_nvlink",
        "finds its NVLink fabric of limited capacity",
        m.GPU_FABRIC_HEALTH_ID,
        3,
    ),
    _is(
        "fabric_degraded_bandwidth",
        DEGRADED,
        "check_nvlink",
        "has less NVLink bandwidth than it should",
        m.GPU_FABRIC_FAULT,
        1,
        last="degraded_bandwidth",
    ),
    _is(
        "fabric_route_recovery",
        DEGRADED,
        "check_nvlink",
        "waits for its NVLink routes to recover",
        m.GPU_FABRIC_FAULT,
        1,
        last="route_recovery",
    ),
    _is(
        "fabric_route_unhealthy",
        BAD,
        "check_nvlink",
        "has an unhealthy NVLink route",
        m.GPU_FABRIC_FAULT,
        1,
        last="route_unhealthy",
    ),
    _is(
        "fabric_access_timeout",
        BAD,
        "check_nvlink",
        "had a timeout across its NVLink fabric",
        m.GPU_FABRIC_FAULT,
        1,
        last="access_timeout",
    ),
    _is(
        "fabric_configuration",
        BAD,
        "restart_fabric_manager",
        "has a wrong NVLink fabric configuration",
        m.GPU_FABRIC_FAULT,
        1,
        last="incorrect_configuration",
    ),
    _is(
        "fabric_no_partition",
        DEGRADED,
        "restart_fabric_manager",
        "is in no partition of its NVLink fabric",
        m.GPU_FABRIC_FAULT,
        1,
        last="no_partition",
    ),
    _is(
        "fabric_manager_disconnected",
        DEGRADED,
        "restart_fabric_manager",
        "has lost its fabric manager",
        m.GPU_FABRIC_FAULT,
        1,
        last="manager_disconnected",
    ),
    Rule(
        "sxid",
        BAD,
        "check_nvlink",
        "an NVSwitch had a fatal SXid within the last hour",
        (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, m.NVLINK_SWITCH_SXID_INFO),
        _fatal_sxids,
    ),
    # Ports. One whose role is not known counts as compute.
    Rule(
        "port_missing",
        BAD,
        "reboot_then_reseat",
        "a compute port is gone from /sys, and is in the inventory",
        _PORT_STATES,
        _lost_ports("gone", spare=False),
    ),
    Rule(
        "port_missing",
        DEGRADED,
        "reboot_then_reseat",
        "the same of a storage or management port",
        _PORT_STATES,
        _lost_ports("gone", spare=True),
    ),
    Rule(
        "port_down",
        BAD,
        "check_cable",
        "a compute port that was active once is not",
        _PORT_STATES,
        _lost_ports("down", spare=False),
    ),
    Rule(
        "port_down",
        DEGRADED,
        "check_cable",
        "the same of a storage or management port",
        _PORT_STATES,
        _lost_ports("down", spare=True),
    ),
    Rule("ports_too_few", BAD, "check_cable", "fewer active ports than expected", _PORT_STATES, _too_few_ports),
    Rule(
        "ports_unseen",
        UNKNOWN,
        "check_exporter",
        "no port can be read where some are expected",
        (m.INFINIBAND_PORT_PRESENT,),
        _unseen_ports,
    ),
    Rule(
        "port_slow",
        BAD,
        "check_cable",
        "a compute port runs below the rate it had, or that is expected",
        _RATES,
        _slow_ports(spare=False),
    ),
    Rule(
        "port_slow",
        DEGRADED,
        "check_cable",
        "the same of a storage or management port",
        _RATES,
        _slow_ports(spare=True),
    ),
    _is(
        "port_flapping",
        BAD,
        "check_cable",
        "went down and came back three times within 12 hours",
        m.INFINIBAND_LINK_FLAPPING,
        1,
    ),
    Rule(
        "transceiver_hot",
        DEGRADED,
        "check_cooling",
        f"has a transceiver above {HOT_TRANSCEIVER:g} degrees Celsius",
        (m.INFINIBAND_TEMPERATURE_CELSIUS,),
        _hot_transceivers,
    ),
    # The exporter.
    Rule(
        "source_failed",
        UNKNOWN,
        "check_exporter",
        "a source of these numbers cannot be read",
        (m.FLOPWATCH_COLLECTOR_SUCCESS,),
        _failed_sources,
    ),
    Rule(
        "driver_released",
        UNKNOWN,
        "wait",
        "the driver is released on request",
        (m.FLOPWATCH_DRIVER_RELEASED,),
        _released_driver,
    ),
)


@dataclass(frozen=True, slots=True)
class Rise:
    """A counter that must not rise faster than `per_second` between two looks."""

    reason: str
    verdict: str
    action: str
    text: str
    row: Metric
    per_second: float = 0.0
    but: frozenset[str] = frozenset()  # values of the row's last label that may rise


# NVIDIA UFM isolates a port after 3 symbol errors in 12 minutes at NDR: within seconds, one is enough.
RISES: tuple[Rise, ...] = (
    Rise(
        "ecc_uncorrected_rising",
        BAD,
        "drain_and_reset",
        "counts uncorrected memory errors",
        m.GPU_ECC_ERRORS_TOTAL,
        but=frozenset({"corrected"}),
    ),
    # PCIe 5 x16 may replay 31 packets a minute: DCGM's limit of speed times lanes times 1e-12.
    Rise("pcie_replays", DEGRADED, "reseat_gpu", "replays PCIe packets", m.GPU_PCIE_REPLAYS_TOTAL, 31 / 60),
    # NVLink 4 corrects what its CRC finds; DCGM minds 100 a second.
    Rise(
        "nvlink_errors_rising",
        DEGRADED,
        "check_nvlink",
        "counts NVLink errors",
        m.NVLINK_ERRORS_TOTAL,
        but=frozenset({"crc", "replay"}),
    ),
    Rise("symbol_errors", DEGRADED, "check_cable", "counts symbol errors", m.INFINIBAND_SYMBOL_ERRORS_TOTAL),
    Rise("link_downed", DEGRADED, "check_cable", "lost its link", m.INFINIBAND_LINK_DOWNED_TOTAL),
)


@cache
def _known_rows() -> frozenset[str]:
    rows = {row.name for rule in RULES for row in rule.rows} | {rise.row.name for rise in RISES}
    return frozenset(rows | {m.GPU_INFO.name, m.INFINIBAND_INFO.name})


def booted() -> float:
    """Return the Unix time of the last boot."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Verdict:
    """Judges samples against what is expected of the node."""

    def __init__(
        self, expectations: Expectations, clock: Callable[[], float] = time.time, booted: Callable[[], float] = booted
    ) -> None:
        self._expected = expectations
        self._clock = clock
        self._booted = booted
        self._said: dict[tuple[str, ...], str] = {}

    def facts(self, samples: Iterable[Sample]) -> Facts:
        """Return what the rules ask of the samples."""
        return Facts(samples, self._expected, self._clock(), self._booted())

    def judge(self, samples: Iterable[Sample]) -> Judgement:
        """Return what is wrong with the node these samples are of."""
        return _judgement(self.facts(samples), [])

    def judge_twice(self, before: Iterable[Sample], after: Iterable[Sample], seconds: float) -> Judgement:
        """Return what is wrong in both looks, `seconds` apart, and which error counters rose between them."""
        first, second = self.facts(before), self.facts(after)
        stood = {(reason.reason, reason.part) for reason in _judgement(first, []).reasons}
        judgement = _judgement(second, list(_rises(first, second, seconds)))
        risen = {rise.reason for rise in RISES}
        reasons = tuple(one for one in judgement.reasons if one.reason in risen or (one.reason, one.part) in stood)
        return Judgement(reasons, judgement.gpus, judgement.ports)

    def derive(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the verdict, its reasons and what is expected, as samples."""
        judgement = self.judge(samples)
        self._say(judgement)
        derived: list[Sample] = [(m.HOST_VERDICT_ID, (), _WEIGHT[judgement.verdict])]
        derived += [
            (m.HOST_VERDICT_REASON, (one.reason, one.part, one.verdict, one.action), 1) for one in judgement.reasons
        ]
        expected = self._expected
        parts = {
            "gpus": expected.gpus,
            "ports": sum(ports.count for ports in expected.ports.values()),
            "nvlinks": expected.gpus * expected.nvlinks_per_gpu,
        }
        return derived + [(m.HOST_EXPECTED_PARTS, (kind,), count) for kind, count in parts.items() if count]

    def _say(self, judgement: Judgement) -> None:
        """Log what is wrong since now, and what no longer is."""
        # The words may hold a number that moves.
        now: dict[tuple[str, ...], str] = {one[:3]: f"{one.verdict}: {one}" for one in judgement.reasons}
        for key in now.keys() - self._said.keys():
            log.warning("the node is %s", now[key])
        for key in self._said.keys() - now.keys():
            log.info("over: %s", self._said[key])
        self._said = {key: self._said.get(key, words) for key, words in now.items()}


def _judgement(facts: Facts, more: list[Reason]) -> Judgement:
    reasons = {reason[:4]: reason for reason in more}  # as series: a second sentence about the same is left out
    for rule in RULES:
        for part, detail in rule.find(facts):
            reason = Reason(rule.reason, part, rule.verdict, rule.action, detail)
            reasons.setdefault(reason[:4], reason)
    worst_first = sorted(reasons.values(), key=lambda reason: _WORST_FIRST.index(reason.verdict))
    return Judgement(tuple(worst_first), len(facts.answering), len(facts.active))


def _rises(before: Facts, after: Facts, seconds: float) -> Iterator[Reason]:
    for rise in RISES:
        for labels, number in after.of(rise.row).items():
            more = number - before.of(rise.row).get(labels, number)
            if more > rise.per_second * seconds and labels[-1] not in rise.but:
                name = after.named(rise.row, labels)
                detail = f"{name} {rise.text} ({more:g} in {seconds:g} s)"
                yield Reason(rise.reason, after.part(rise.row, labels), rise.verdict, rise.action, detail)


def learn(samples: Iterable[Sample]) -> Expectations:
    """Return the shape of the node these samples are of: what answers and is active now."""
    facts = Facts(samples, Expectations(), 0, 0)
    model = m.GPU_INFO.labels.index("model")
    models = {labels[model] for labels in facts.of(m.GPU_INFO) if labels[:2] in facts.answering}
    up: dict[Labels, float] = {}
    for labels, number in facts.of(m.NVLINK_LINKS).items():
        up[labels[:2]] = up.get(labels[:2], 0) + number * (labels[2] in NVLINK_UP)
    ports: dict[str, Ports] = {}
    for port in sorted(facts.active):
        role = facts.roles.get(port, "") or "any"
        rate = facts.of(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND).get(port, 0.0) * 8e-9
        known = ports.get(role, Ports(0, rate))
        ports[role] = Ports(known.count + 1, round(min(known.rate_gbps, rate), 3))
    if "any" in ports and len(ports) > 1:
        del ports["any"]  # it would be about the ports of every role
    return Expectations(
        len(facts.answering),
        models.pop() if len(models) == 1 else "",
        _common(up.values()),
        _common(facts.of(m.GPU_PCIE_WIDTH_MAX_LANES).values()),
        _common(facts.of(m.GPU_PCIE_GENERATION_MAX).values()),
        ports,
    )


def _common(numbers: Iterable[float]) -> int:
    """Return the number they all are, 0 if they differ."""
    different = {*numbers}
    return int(different.pop()) if len(different) == 1 else 0
