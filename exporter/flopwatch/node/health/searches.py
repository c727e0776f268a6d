"""Searches of the health rules that compare several series or expectations. Each yields affected parts of the host.

Some have an argument `of`, from the column of that name in `data/health_rules.csv`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial

from flopwatch import catalogue as m
from flopwatch.catalogue.xid import xids
from flopwatch.node.health.facts import Facts, Found, Labels

NVLINK_DOWN = (0, 3)
RATE_TOLERANCE = 0.99  # the kernel prints rates of ports rounded
SPARE_ROLES = ("storage", "management")  # of ports that a job can train without
# NVIDIA's actions for Xids, the gravest first. Other codes need a reset (RESET_GPU).
_NVIDIA_GRAVEST = "CONTACT_SUPPORT CHECK_MECHANICALS RESTART_BM RESTART_VM WORKFLOW_NVLINK_ERR WORKFLOW_NVLINK5_ERR"


def missing_gpus(facts: Facts) -> Iterator[Found]:
    """Find GPUs of the inventory that do not answer, unless as many GPUs as expected do."""
    if facts.expected.gpus and len(facts.answering) >= facts.expected.gpus:
        return  # the missing ones were removed on purpose
    for gpu, present in facts.of(m.GPU_PRESENT).items():
        if not present and facts.of(m.GPU_READABLE).get(gpu, 1):
            yield facts.found(m.GPU_PRESENT, gpu, "does not answer")


def unloaded_driver(facts: Facts) -> Iterator[Found]:
    """Report the driver if this host has GPUs, and no NVIDIA driver is loaded."""
    if facts.driverless:
        yield "driver", "no NVIDIA driver is loaded, and no job can use the GPUs"


def unreadable_gpus(facts: Facts) -> Iterator[Found]:
    """Find GPUs that the exporter cannot read although a driver is loaded."""
    for gpu, readable in facts.of(m.GPU_READABLE).items():
        if not readable and not facts.driverless:
            yield facts.found(m.GPU_READABLE, gpu, "cannot be read by the exporter; the GPU may be well")


def too_few_gpus(facts: Facts) -> Iterator[Found]:
    """Report a host with fewer GPUs, missing ones included, than expected."""
    known = {*facts.of(m.GPU_PRESENT), *facts.of(m.GPU_READABLE)}
    if known and len(known) < facts.expected.gpus:
        yield "gpus", f"{len(known)} GPUs where {facts.expected.gpus} are expected"


def unseen_gpus(facts: Facts) -> Iterator[Found]:
    """Report a host for which GPUs are expected and none was read, unless its driver is released."""
    seen = facts.of(m.GPU_PRESENT) or facts.of(m.GPU_READABLE)
    if facts.expected.gpus and not seen and not facts.released:
        yield "gpus", f"nothing is read from NVML where {facts.expected.gpus} GPUs are expected"


def other_model(facts: Facts) -> Iterator[Found]:
    """Find GPUs of another model than expected."""
    model = m.GPU_INFO.labels.index("model")
    for labels in facts.of(m.GPU_INFO):
        if facts.expected.gpu_model and labels[:2] in facts.answering and labels[model] != facts.expected.gpu_model:
            yield facts.found(m.GPU_INFO, labels, f"is {labels[model]!r}, not {facts.expected.gpu_model!r}")


def narrow_pcie(facts: Facts) -> Iterator[Found]:
    """Find GPUs with fewer PCIe lanes than expected or, without an expectation, than the GPU and its slot support.

    NVML's maximum is the card's. Cloud instances with a T4 or an A10G connect 8 of its 16 lanes.
    """
    for gpu, lanes in facts.of(m.GPU_PCIE_WIDTH_LANES).items():
        wanted = facts.expected.pcie_width or facts.of(m.GPU_PCIE_WIDTH_MAX_LANES).get(gpu, 0)
        if 0 < lanes < wanted:
            yield facts.found(m.GPU_PCIE_WIDTH_LANES, gpu, f"has {lanes:g} of {wanted:g} PCIe lanes")


def slow_pcie(facts: Facts) -> Iterator[Found]:
    """Find GPUs whose highest possible PCIe generation is below the expected one."""
    for gpu, generation in facts.of(m.GPU_PCIE_GENERATION_MAX).items():
        if 0 < generation < facts.expected.pcie_generation:
            text = f"can have PCIe {generation:g} where {facts.expected.pcie_generation} is expected"
            yield facts.found(m.GPU_PCIE_GENERATION_MAX, gpu, text)


def lost_nvlinks(facts: Facts) -> Iterator[Found]:
    """Find GPUs with fewer active NVLinks than expected or, without an expectation, with NVLinks that went down."""
    # Links that were never up are unconnected: those of a card without a bridge, or with a smaller one.
    fallen = Counter(labels[:2] for labels, state in facts.of(m.NVLINK_LINK_STATE_ID).items() if state in NVLINK_DOWN)
    for gpu, up in facts.nvlinks.items():
        wanted = facts.expected.nvlinks_per_gpu or up + fallen[gpu]
        if up < wanted:
            yield facts.found(m.NVLINK_LINKS, gpu, f"has {up:g} of {wanted:g} NVLinks")


@cache
def critical_xids() -> Mapping[str, str]:
    """Return NVIDIA's action by Xid code, for the Xids that are fatal or that page."""
    return {
        str(code): row.action.partition(" ")[0] for code, row in xids().items() if row.page or row.severity == "fatal"
    }


def gpus_with_xids(facts: Facts, of: str = "") -> Iterator[Found]:
    """Find GPUs with critical Xids in the last hour whose gravest NVIDIA action is in `of`.

    Without `of`, only GPUs for which the driver requests no recovery are found, with any action. With it, only others.
    """
    codes: dict[Labels, list[str]] = {}
    for (*gpu, code), last in facts.of(m.GPU_XID_LAST_TIMESTAMP_SECONDS).items():
        if last > facts.lately and code in critical_xids():
            codes.setdefault(tuple(gpu), []).append(code)
    for owner, seen in codes.items():
        content = facts.of(m.GPU_RECOVERY_ACTION_ID).get(owner) == 0
        actions = {critical_xids()[code] for code in seen}
        gravest = next((action for action in _NVIDIA_GRAVEST.split() if action in actions), "RESET_GPU")
        if content == (not of) and (not of or gravest in of.split()):
            text = f"had Xid {', '.join(sorted(seen, key=int))} within the last hour"
            yield facts.found(m.GPU_XID_LAST_TIMESTAMP_SECONDS, owner, text)


def uninitialized_gpus(facts: Facts) -> Iterator[Found]:
    """Find GPUs that the driver failed to initialize within the last hour, and that do not answer."""
    row = m.GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS
    for gpu, last in facts.of(row).items():
        if last > facts.lately and gpu not in facts.answering:
            yield facts.found(row, gpu, "could not be initialized by the driver within the last hour")


def _lost_ports(facts: Facts, how: str, text: str, of: str) -> Iterator[Found]:
    for port, what in facts.lost_ports():
        if what == how and _is_of(facts, port, of):
            yield facts.found(m.INFINIBAND_PORT_STATE_ID, port, text)


def _is_of(facts: Facts, port: Labels, of: str) -> bool:
    """Return whether a port has a role in SPARE_ROLES if `of` is "spare", else whether it has none of these."""
    return (facts.roles.get(port) in SPARE_ROLES) == (of == "spare")


gone_ports = partial(_lost_ports, how="gone", text="is missing in /sys")
down_ports = partial(_lost_ports, how="down", text="is down")


def too_few_ports(facts: Facts) -> Iterator[Found]:
    """Find port roles with fewer active ports than expected, apart from lost ports."""
    lost = {port for port, _ in facts.lost_ports()}
    for role, wanted in facts.expected.ports.items():
        ports = facts.ports_of(role)
        # Without a known GPU, as with a driver that hangs, the roles of ports are unknown.
        unsorted = facts.ports_of("") if not facts.of(m.GPU_INFO) else set()
        short = wanted.count - len((ports | unsorted) & facts.active) - len(ports & lost)
        if short > 0 and facts.of(m.INFINIBAND_PORT_PRESENT):
            kind = "" if role == "any" else f"{role} "
            text = f"{len(ports & facts.active)} active {kind}ports where {wanted.count} are expected"
            yield f"{kind}ports", text


def unseen_ports(facts: Facts) -> Iterator[Found]:
    """Report a host for which ports are expected and none was read."""
    count = sum(wanted.count for wanted in facts.expected.ports.values())
    if count and not facts.of(m.INFINIBAND_PORT_PRESENT):
        yield "ports", f"nothing is read from /sys/class/infiniband where {count} ports are expected"


def slow_ports(facts: Facts, of: str) -> Iterator[Found]:
    """Find active ports of the kind `of` (compute or spare) below their expected rate."""
    for port, rate in facts.of(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND).items():
        wanted = facts.rate_of(port)
        if _is_of(facts, port, of) and port in facts.active and rate < wanted * RATE_TOLERANCE:
            text = f"runs at {rate * 8e-9:g} of {wanted * 8e-9:g} Gb/s"
            yield facts.found(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, port, text)


def hot_transceivers(facts: Facts, of: str) -> Iterator[Found]:
    """Find ports whose transceiver is hotter than `of`, in degrees Celsius. NVIDIA UFM's limit is 70."""
    for labels, celsius in facts.of(m.INFINIBAND_TEMPERATURE_CELSIUS).items():
        if labels[2].startswith("Module") and celsius > float(of):
            part = facts.part(m.INFINIBAND_TEMPERATURE_CELSIUS, labels)
            yield part, f"{part}: the transceiver has {celsius:g} degrees Celsius"


def fatal_sxids(facts: Facts) -> Iterator[Found]:
    """Find NVSwitches with a fatal SXid within the last hour."""
    severity = m.NVLINK_SWITCH_SXID_INFO.labels.index("severity")
    fatal = {labels[0] for labels in facts.of(m.NVLINK_SWITCH_SXID_INFO) if labels[severity] == "fatal"}
    for (switch, code), last in facts.of(m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS).items():
        if code in fatal and last > facts.lately:
            yield f"switch {switch}", f"NVSwitch {switch} had SXid {code} within the last hour"


def released_driver(facts: Facts) -> Iterator[Found]:
    """Report the driver if it is released for maintenance."""
    if facts.released:
        yield "driver", "the driver is released on request, and the state of the GPUs is unknown"


def failed_sources(facts: Facts) -> Iterator[Found]:
    """Find sources of the verdict that could not be read, except those that a released driver closes."""
    for (source,), success in facts.of(m.FLOPWATCH_COLLECTOR_SUCCESS).items():
        # The owner of a GPU and the place of the host do not change the verdict.
        closed = facts.released and source != "infiniband"
        if not success and source in ("nvml", "dcgm", "infiniband", "xid") and not closed:
            yield f"source {source}", f"source {source} cannot be read"
