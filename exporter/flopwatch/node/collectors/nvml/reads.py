"""NVML calls about one GPU, in the order in which they are made: https://docs.nvidia.com/deploy/nvml-api/."""

import re
from collections.abc import Iterator
from ctypes import byref
from functools import partial
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Any
from uuid import UUID

from flopwatch import catalogue as m
from flopwatch.catalogue import BY_NAME, Metric
from flopwatch.catalogue.xid import read_table
from flopwatch.node.collectors import cgroup
from flopwatch.node.collectors.nvml import fields, gpm
from flopwatch.node.collectors.nvml.card import GONE, LACKING, NO_PERMISSION, OVER, NvmlCard, Read, Values, code_of
from flopwatch.node.collectors.nvml.fields import ALL_LINKS, Key

SELDOM = 9.0  # seconds between two reads of values that change seldom or cost more
ONCE = inf

NOT_SUPPORTED = 3  # nvmlReturn_t
EMPTY_SLOT = (2, 6)  # NVML_ERROR_NOT_FOUND or NVML_ERROR_INVALID_ARGUMENT
MIG_PROFILE = re.compile(r"(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb\S*")  # 1g.10gb, 1c.3g.40gb, 1g.10gb+me
OWNERS_PER_GPU = 8
OTHER_OWNERS = "other"

# nvmlMemoryErrorType_t, nvmlMemoryLocation_t.
ECC_TYPES = {"corrected": (0, fields.ECC_CORRECTED), "uncorrected": (1, fields.ECC_UNCORRECTED)}
ECC_VOLATILE = 0
ECC_LOCATIONS = {0: "l1", 1: "l2", 2: "dram", 3: "register", 4: "texture", 5: "shared", 6: "cbu", 7: "sram"}


def _batch(card: NvmlCard, table: tuple[fields.NvmlField, ...]) -> Values:
    """Yield readings of the table's fields. A second call requests the replacements of fields that the GPU lacks."""
    asked: set[Key] = set()
    answered, trouble = False, 0
    while wanted := [
        field
        for field in table
        if field.key not in asked
        and field.key not in card.lacks
        and (field.instead_of is None or (field.instead_of, 0) in card.lacks)
        and not (field.ecc and card.latest.get(ECC_MODE) == 0)
    ]:
        keys = [field.key for field in wanted]
        asked.update(keys)
        answers, refused = card.ask(keys)
        for key, code in refused.items():
            if code in LACKING:
                card.lacks[key] = code
            else:
                trouble = code
        for entry in wanted:
            number = None if entry.key not in answers else fields.number(answers[entry.key], entry.signed)
            if number is None or number > entry.highest:
                continue
            answered = True
            card.latest[entry.key] = number
            if not entry.once or card.notable(entry.row, entry.labels, number):
                yield entry.row, entry.labels, number * entry.factor
    card.incomplete = trouble != 0
    if trouble and not answered:
        raise card.nvml.NVMLError(trouble)


def _ecc_mode(card: NvmlCard) -> Values:
    """Yield whether ECC is on. It changes only when the driver is loaded, and decides which error counts are read."""
    mode = card.nvml.nvmlDeviceGetEccMode(card.handle)[0]
    card.latest[ECC_MODE] = mode
    yield m.GPU_ECC_MODE, (), mode


def _links(card: NvmlCard) -> Values:
    """Yield readings of all NVLinks. A field is unsupported only if every link refuses it: down links have few.

    Errors are requested per link only after their sum over all links changed, where the driver adds them up.
    """
    count = card.latest.get(fields.LINK_COUNT)
    if count is None:
        answers, refused = card.ask([fields.LINK_COUNT])
        if fields.LINK_COUNT in refused:
            raise card.nvml.NVMLError(refused[fields.LINK_COUNT])
        count = fields.number(answers[fields.LINK_COUNT]) or 0
        card.latest[fields.LINK_COUNT] = count
    links = range(int(count))
    added_up = {field_id for field_id, whole in fields.INSTEAD_OF_LINKS.items() if whole in card.lacks}
    needless = fields.INSTEAD_OF_LINKS.keys() - added_up
    if fields.SYMBOL_ERRORS not in card.past.links.counts:  # before NVLink 5, or at the first read
        needless |= fields.BLOCKS
    wanted = [id for id in fields.PER_LINK if id not in needless]
    if not links:
        return
    sums, counts = _sums(card, wanted), card.past.links.counts
    numbers: dict[Key, float] = {}
    by_link = [id for id in wanted if (id, None) not in card.lacks and not _added_up(card, id)]
    for field_id, total in sums.items():
        before = counts.get(field_id) or dict.fromkeys(links, 0.0)
        if field_id in fields.LINK_SUMS or (field_id, None) in card.lacks:
            numbers[field_id, ALL_LINKS] = total
        elif total == card.latest.get((field_id, ALL_LINKS), sum(before.values())):
            numbers |= {(field_id, link): count for link, count in before.items()}
        else:
            by_link.append(field_id)
    answers, refused = card.ask([(field_id, link) for field_id in by_link for link in links]) if by_link else ({}, {})
    for field_id in by_link:
        codes = {refused.get((field_id, link), 0) for link in links}
        if codes <= set(LACKING):
            card.lacks[field_id, None] = refused[field_id, links[0]]
            if field_id in sums:
                numbers[field_id, ALL_LINKS] = sums[field_id]
        if field_id in sums and codes <= {0, *LACKING}:
            card.latest[field_id, ALL_LINKS] = sums[field_id]
    card.incomplete = card.incomplete or not set(refused.values()) <= set(LACKING)
    numbers |= {key: number for key, value in answers.items() if (number := fields.number(value)) is not None}
    if (fields.LINK_STATE, None) in card.lacks:
        numbers |= _old_link_states(card, links)
    yield from card.past.links.take(numbers)
    if not sums.keys() & fields.LINK_ERRORS and all((field_id, None) in card.lacks for field_id in fields.LINK_ERRORS):
        yield from _batch(card, fields.OLD_LINKS)
    if (fields.LINK_SPEED, None) in card.lacks:
        yield from _batch(card, (fields.OLD_LINK_SPEED,))


def _c2c(card: NvmlCard) -> Values:
    """Yield readings of the NVLink-C2C links to a Grace CPU."""
    answers, _ = card.ask([fields.C2C_COUNT])
    count = fields.number(answers[fields.C2C_COUNT]) if fields.C2C_COUNT in answers else None
    if not count:
        raise card.nvml.NVMLError(NOT_SUPPORTED)
    links, ids = range(int(count)), (fields.C2C_STATE, fields.C2C_SPEED, *fields.C2C_ERRORS)
    answers, refused = card.ask([(field_id, link) for field_id in ids for link in links])
    card.incomplete = not set(refused.values()) <= set(LACKING)
    numbers = {key: number for key, value in answers.items() if (number := fields.number(value)) is not None}
    states = [numbers[fields.C2C_STATE, link] for link in links if (fields.C2C_STATE, link) in numbers]
    for state, name in enumerate(("inactive", "active")) if states else ():
        yield m.GPU_C2C_LINKS, (name,), states.count(state)
    if speeds := [number for (field_id, _), number in numbers.items() if field_id == fields.C2C_SPEED and number > 0]:
        yield m.GPU_C2C_SPEED_BYTES_PER_SECOND, (), min(speeds)
    for field_id, error in fields.C2C_ERRORS.items():
        counts = [numbers[field_id, link] for link in links if (field_id, link) in numbers]
        if len(counts) == count:  # the maximum, also where the driver returns the GPU's total for each link
            yield m.GPU_C2C_ERRORS_TOTAL, (error,), max(counts)


def _added_up(card: NvmlCard, field_id: int) -> bool:
    return field_id in fields.ADDED_UP and (field_id, ALL_LINKS) not in card.lacks


def _sums(card: NvmlCard, wanted: list[int]) -> dict[int, float]:
    """Return the sums over all links, by field id, of fields that the driver adds up."""
    keys = [(field_id, ALL_LINKS) for field_id in wanted if _added_up(card, field_id)]
    answers, refused = card.ask(keys) if keys else ({}, {})
    sums = {key[0]: total for key in answers if (total := fields.number(answers[key])) is not None}
    for key in keys:
        if key[0] not in sums and refused.get(key, NOT_SUPPORTED) in LACKING:
            card.lacks[key] = refused.get(key, NOT_SUPPORTED)
    card.incomplete = not set(refused.values()) <= set(LACKING)
    return sums


def _old_link_states(card: NvmlCard, links: range) -> dict[Key, float]:
    states: dict[Key, float] = {}
    for link in links:
        try:
            states[fields.LINK_STATE, link] = card.nvml.nvmlDeviceGetNvLinkState(card.handle, link)
        except card.nvml.NVMLError as error:
            if error.value in (*GONE, *OVER):
                raise
            card.incomplete = card.incomplete or error.value not in LACKING
    return states


def _memory(card: NvmlCard) -> Values:
    memory = card.nvml.nvmlDeviceGetMemoryInfo(card.handle, card.nvml.nvmlMemory_v2)  # excludes the driver's reserve
    card.latest[MEMORY_TOTAL] = memory.total
    yield m.GPU_MEMORY_USED_BYTES, (), memory.used
    yield m.GPU_MEMORY_TOTAL_BYTES, (), memory.total
    yield m.GPU_MEMORY_RESERVED_BYTES, (), memory.reserved


def _clock_events(card: NvmlCard, call: str) -> Values:
    active = getattr(card.nvml, call)(card.handle)
    for bit, reason in fields.CLOCK_EVENTS.items():
        number = float(bool(active & bit))
        if reason == "gpu_idle" or card.notable(m.GPU_CLOCK_EVENT_ACTIVE, (reason,), number):
            yield m.GPU_CLOCK_EVENT_ACTIVE, (reason,), number


def _processes(card: NvmlCard) -> Values:
    """Yield number and memory of compute processes by owner. Beyond the 8 largest, owners are summed as `other`.

    Early R535 releases return the second process and all others garbled (an ABI break of nvmlProcessInfo_v3).
    """
    answer = card.nvml.nvmlDeviceGetComputeRunningProcesses_v3(card.handle)
    limit, total = fields.pid_limit(card.proc), card.latest.get(MEMORY_TOTAL, fields.MAX_GPU_MEMORY)
    processes = [one for one in answer if 0 < one.pid < limit and (one.usedGpuMemory or 0) <= total]
    card.garbled = len(processes) < len(answer)
    pids = {process.pid for process in processes}
    # The same pid is the same process, unless the number was reused within seconds.
    known = {pid: owner for pid, owner in card.past.owners.items() if owner != cgroup.UNKNOWN}
    owners = {pid: known[pid] if pid in known else cgroup.owner(pid, card.proc) for pid in pids}
    card.past.owners, card.past.pids = owners, sorted(pids)
    memory: dict[str, float | None] = {}
    for process in processes:
        used, owner = process.usedGpuMemory, owners[process.pid]
        before = memory.get(owner, 0)
        memory[owner] = None if used is None or before is None else before + used
    counts = {owner: list(owners.values()).count(owner) for owner in memory}
    by_size = sorted(memory, key=lambda owner: (-(memory[owner] or 0), -counts[owner], owner))
    kept, rest = by_size[:OWNERS_PER_GPU], by_size[OWNERS_PER_GPU:]
    groups = {owner: [owner] for owner in kept} | ({OTHER_OWNERS: rest} if rest else {})
    for name, members in groups.items():
        yield m.GPU_PROCESSES, (name,), sum(counts[owner] for owner in members)
        held = [size for owner in members if (size := memory[owner]) is not None]
        if len(held) == len(members):
            yield m.GPU_PROCESS_MEMORY_BYTES, (name,), sum(held)


def _ecc_locations(card: NvmlCard) -> Values:
    """Yield ECC errors since the driver was loaded by location, for each error type whose total is not 0."""
    for error, (number, total) in ECC_TYPES.items():
        for location, name in ECC_LOCATIONS.items():
            if card.latest.get(total, 0) == 0 or (total, name) in card.lacks:
                continue
            try:
                count = card.nvml.nvmlDeviceGetMemoryErrorCounter(card.handle, number, ECC_VOLATILE, location)
            except card.nvml.NVMLError as failure:
                if failure.value not in LACKING:
                    raise
                card.lacks[total, name] = failure.value
                continue
            if card.notable(m.GPU_ECC_LOCATION_ERRORS_TOTAL, (error, name), count):
                yield m.GPU_ECC_LOCATION_ERRORS_TOTAL, (error, name), count


def _sram(card: NvmlCard) -> Values:
    if card.latest.get(ECC_MODE) == 0:
        return
    status = card.nvml.c_nvmlEccSramErrorStatus_v1_t()
    card.nvml.nvmlDeviceGetSramEccErrorStatus(card.handle, byref(status))
    yield m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED, (), status.bThresholdExceeded


def _spare_rows(card: NvmlCard) -> Values:
    histogram = card.nvml.nvmlDeviceGetRowRemapperHistogram(card.handle)
    for availability in ("max", "high", "partial", "low", "none"):
        count = getattr(histogram, availability)
        if availability == "max" or card.notable(m.GPU_ROW_REMAP_BANKS, (availability,), count):
            yield m.GPU_ROW_REMAP_BANKS, (availability,), count


def _fabric(card: NvmlCard, structure: str) -> Values:
    info = getattr(card.nvml, structure)()
    card.nvml.nvmlDeviceGetGpuFabricInfoV(card.handle, byref(info))
    state = info.state & 0xFF  # one byte in C followed by padding, an int in pynvml
    if state == card.nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return
    yield m.GPU_FABRIC_STATE_ID, (), state
    if state != card.nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        return
    yield m.GPU_FABRIC_INFO, (str(UUID(bytes=bytes(info.clusterUuid))), str(info.cliqueId)), 1
    yield m.GPU_FABRIC_STATUS_ID, (), info.status
    summary = getattr(info, "healthSummary", 0)
    if summary != 0:
        yield m.GPU_FABRIC_HEALTH_ID, (), summary
    for fault, there in fields.fabric_faults(info.healthMask).items():
        if card.notable(m.GPU_FABRIC_FAULT, (fault,), float(there)):
            yield m.GPU_FABRIC_FAULT, (fault,), float(there)


def _mig(card: NvmlCard) -> Values:
    """Yield MIG mode and instances. After a change of either, every call and field is requested again."""
    mode = card.nvml.nvmlDeviceGetMigMode(card.handle)[0]
    yield m.GPU_MIG_MODE, (), mode
    before = card.mig
    instances = list(_instances(card)) if mode == 1 else None
    card.mig = None if instances is None else [labels for labels, _ in instances]
    if card.mig != before:
        card.forget()
        card.stop_meters()
    seen: set[str] = set()
    for labels, memory in instances or ():
        instance = labels["gpu_instance"]
        yield m.GPU_MIG_INFO, (instance, labels["compute_instance"], labels["uuid"], labels["profile"]), 1
        if memory is not None and instance not in seen:  # compute instances share their GPU instance's memory
            seen.add(instance)
            yield m.GPU_MIG_MEMORY_USED_BYTES, (instance,), memory.used
            yield m.GPU_MIG_MEMORY_TOTAL_BYTES, (instance,), memory.total


def _instances(card: NvmlCard) -> Iterator[tuple[dict[str, str], Any]]:
    """Yield labels and memory (None: unreadable) of each MIG instance, except instances without a readable uuid.

    A refusal (NO_PERMISSION) is logged, and is not an empty slot: the container lacks MIG's capabilities.
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#device-nodes-and-capabilities
    """
    nvml = card.nvml
    failures: set[int | None] = set()
    refused: dict[str, Exception] = {}  # by call

    def of(handle: Any, call: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, call)(handle, *arguments)
        except Exception as error:
            code = code_of(nvml, error)
            if code in (*GONE, *OVER):
                raise
            if code is None:
                card.report(call, error)
            if code == NO_PERMISSION:
                refused[call] = error
            failures.add(code)
            return None

    for slot in range(of(card.handle, "nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = of(card.handle, "nvmlDeviceGetMigDeviceHandleByIndex", slot)
        if handle is None:
            continue
        uuid, gpu_instance = of(handle, "nvmlDeviceGetUUID"), of(handle, "nvmlDeviceGetGpuInstanceId")
        if uuid is None or gpu_instance is None:
            continue
        compute_instance = of(handle, "nvmlDeviceGetComputeInstanceId")
        profile = MIG_PROFILE.search(of(handle, "nvmlDeviceGetName") or "")
        yield (
            {
                "uuid": uuid,
                "gpu_instance": str(gpu_instance),
                "compute_instance": "" if compute_instance is None else str(compute_instance),
                "profile": "" if profile is None else profile[0],
            },
            of(handle, "nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2),
        )
    for call, error in refused.items():
        what = "the memory of its instances" if call == "nvmlDeviceGetMemoryInfo" else "its instances"
        card.report(f"MIG is on, and without MIG's capabilities {what}", error)
    card.incomplete = not failures <= {None, *LACKING, *EMPTY_SLOT} or bool(refused)


def _require_gpm(card: NvmlCard) -> None:
    """Raise NVMLError if the GPU lacks performance monitoring (GPM). The driver's answer is kept."""
    if GPM not in card.latest:
        card.latest[GPM] = card.nvml.nvmlGpmQueryDeviceSupport(card.handle).isSupportedDevice
    if card.latest[GPM] == 0:
        raise card.nvml.NVMLError(card.nvml.NVML_ERROR_NOT_SUPPORTED)


def _activity(card: NvmlCard) -> Values:
    _require_gpm(card)
    meter = card.meter()
    failure = _advance(card, meter)
    if meter.activity.profiled > 0 or not meter.refused:
        yield from gpm.whole_gpu(meter.activity)
    # Bytes have no counter of the time that they cover, so they are absent while nothing is counted.
    moved = meter.activity.bytes if failure is None and not meter.refused else {}
    for metric, row, cumulative in (
        (gpm.PCIE_SENT, m.GPU_PCIE_TRANSMIT_BYTES_TOTAL, ()),
        (gpm.PCIE_RECEIVED, m.GPU_PCIE_RECEIVE_BYTES_TOTAL, ()),
        (gpm.NVLINK_SENT, m.NVLINK_TRANSMIT_BYTES_TOTAL, (fields.NVLINK_DATA_SENT, (202, None))),
        (gpm.NVLINK_RECEIVED, m.NVLINK_RECEIVE_BYTES_TOTAL, (fields.NVLINK_DATA_RECEIVED, (204, None))),
    ):
        if metric in moved and all(key in card.lacks for key in cumulative):
            yield row, (), moved[metric]
    if failure is not None:
        raise failure


def _advance(card: NvmlCard, meter: gpm.Meter) -> Exception | None:
    """Advance the meter. Return an error that may pass, as while a profiler runs. Raises NVMLError for others.

    A refusal (NO_PERMISSION) may pass too. The meter then waits and retries, as its `refused` states.
    """
    try:
        card.unasked = not meter.advance()
    except card.nvml.NVMLError as error:
        if error.value == NO_PERMISSION:
            meter.refuse()
            card.unasked = True
            return None
        if error.value in LACKING:
            meter.close()
        if error.value in (*LACKING, *GONE, *OVER):
            raise
        failure: Exception = error
        return failure
    return None


def _instance_activity(card: NvmlCard) -> Values:
    _require_gpm(card)
    failure: Exception | None = None
    for instance in sorted({labels["gpu_instance"] for labels in card.mig or ()}, key=int):
        meter = card.meter(instance)
        failure = _advance(card, meter) or failure
        if meter.activity.profiled > 0 or not meter.refused:
            yield from gpm.mig_instance(meter.activity, instance)
    if failure is not None:
        raise failure


def _numbers(
    card: NvmlCard, name: str, arguments: list[int], parts: list[tuple[Metric, tuple[str, ...], str]]
) -> Values:
    answer = getattr(card.nvml, name)(card.handle, *arguments)
    for row, labels, part in parts:
        number = answer[int(part)] if part.isdigit() else getattr(answer, part) if part else answer
        if fields.known(number):
            yield row, labels, number


def _calls() -> Iterator[Read]:
    """Yield the Read of each NVML function in `data/nvml_calls.csv`, which returns one number, or several as `part`.

    `part` is the index in a list or the name of a member. `instead_of` has ids of fields, or names of earlier Reads.
    """
    made: dict[str, Read] = {_MEMORY.name: _MEMORY}
    call = itemgetter("function", "argument", "every", "instead_of")
    for (name, argument, every, others), rows in groupby(read_table("nvml_calls.csv"), call):
        parts = [(BY_NAME[row["family"]], tuple(row["label"].split()), row["part"]) for row in rows]
        values = partial(_numbers, name=name, arguments=[*map(int, argument.split())], parts=parts)
        instead_of = tuple((int(one), 0) if one.isdigit() else made[one] for one in others.split())
        made[name] = Read(name, values, {"": 0.0, "seldom": SELDOM, "once": ONCE}[every], instead_of=instead_of)
        yield made[name]


# No fields, but keys in `latest`: whether the GPU has GPM, whether ECC is on, and bytes of memory.
GPM, ECC_MODE, MEMORY_TOTAL = (-1, 0), (-2, 0), (-3, 0)

_MEMORY = Read("nvmlDeviceGetMemoryInfo", _memory, needs=("nvmlMemory_v2",))
CLOCK_EVENTS = "nvmlDeviceGetCurrentClocksEventReasons"
OLD_CLOCK_EVENTS = "nvmlDeviceGetCurrentClocksThrottleReasons"  # before R535
_CLOCK_EVENTS = Read(CLOCK_EVENTS, partial(_clock_events, call=CLOCK_EVENTS))
# fmt: off
_FABRIC = Read("nvmlDeviceGetGpuFabricInfoV", partial(_fabric, structure="c_nvmlGpuFabricInfo_v3_t"), SELDOM,
               needs=("c_nvmlGpuFabricInfo_v3_t",), whole=True)

# In this order, a change of MIG mode precedes what depends on it, and a missing field precedes its replacement.
READS: tuple[Read, ...] = (
    Read("nvmlDeviceGetMigMode", _mig, SELDOM),
    Read("nvmlDeviceGetEccMode", _ecc_mode, SELDOM),
    Read("nvmlDeviceGetFieldValues", partial(_batch, table=fields.FAST), table="often"),
    Read("nvmlDeviceGetFieldValues", partial(_batch, table=fields.FAST_LINKS), table="often_links"),
    Read("nvmlDeviceGetFieldValues", partial(_batch, table=fields.SLOW), SELDOM, table="seldom"),
    Read("nvmlDeviceGetFieldValues", _c2c, SELDOM, table="seldom"),
    Read("nvmlDeviceGetFieldValues", _links, SELDOM, whole=True, table="links"),
    Read("nvmlGpmSampleGet", _activity, needs=("nvmlGpmQueryDeviceSupport", "nvmlGpmMetricsGet")),
    Read("nvmlGpmMigSampleGet", _instance_activity, needs=("nvmlGpmQueryDeviceSupport", "nvmlGpmMetricsGet")),
    _MEMORY,
    *_calls(),
    Read("nvmlDeviceGetComputeRunningProcesses_v3", _processes, SELDOM),
    _CLOCK_EVENTS,
    Read(OLD_CLOCK_EVENTS, partial(_clock_events, call=OLD_CLOCK_EVENTS), instead_of=(_CLOCK_EVENTS,)),
    Read("nvmlDeviceGetMemoryErrorCounter", _ecc_locations, SELDOM),
    Read("nvmlDeviceGetSramEccErrorStatus", _sram, SELDOM, needs=("c_nvmlEccSramErrorStatus_v1_t",)),
    Read("nvmlDeviceGetRowRemapperHistogram", _spare_rows, SELDOM),
    _FABRIC,
    Read("nvmlDeviceGetGpuFabricInfoV", partial(_fabric, structure="c_nvmlGpuFabricInfo_v2_t"), SELDOM,
         needs=("c_nvmlGpuFabricInfo_v2_t",), instead_of=(_FABRIC,), whole=True),
)
# fmt: on
