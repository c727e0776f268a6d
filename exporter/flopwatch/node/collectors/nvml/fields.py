"""Tables of the NVML fields that nvmlDeviceGetFieldValues reads (`data/nvml_fields.csv`), and parsers of their values.

Field ids, value types, link states and the fabric's health mask are those of nvml.h,
https://docs.nvidia.com/deploy/nvml-api/. Their names differ between releases of pynvml. Missing are fields 161-163 on
NVLink 5, 206-222 before NVLink 5, 193-196 before Ada, 269-271 and 293 on older drivers, 29-31 from Ampere on.

Fields 197 and 198, the bytes over PCIe, are not read. The registers behind them have 32 bits and wrap many times a
second at full speed (NV2080_CTRL_CMD_BUS_GET_PEX_UTIL_COUNTERS in NVIDIA's open-gpu-kernel-modules).
"""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from struct import Struct
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import BY_NAME, Metric
from flopwatch.catalogue.xid import read_table

# Objects of `pynvml`, which has no types. A call raises NVMLError, also where the driver or the module lacks it.
NvmlLibrary = Any  # the module, or a simulation or recording with its calls
Handle = Any  # nvmlDevice_t, or what stands for it in a simulation
Structure = Any  # a ctypes structure that a call fills or returns

Key = tuple[int, int]  # field id, and scope: 0, a link's number, ALL_LINKS or MODULE
ALL_LINKS = 0xFFFFFFFF
MODULE = 1

Value = tuple[Metric, tuple[str, ...], float]  # reading: row, labels after (gpu, uuid), number in NVML's unit
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of nvmlValue_t, by nvmlValueType_t
SIGNED = (4, 5)  # sllVal and siVal
DOUBLE = 0  # nvmlValueType_t
# No driver writes a number this small. As a double, an integer below 2^56 looks like one.
SMALLEST_DOUBLE = 1e-300
PID_MAX_LIMIT, MAX_GPU_MEMORY = 1 << 22, 1 << 43  # of Linux; bytes, more than any GPU has
NEGATIVE_INTEGERS = 2**64 - 2**32  # as unsigned; as doubles they are no numbers (NaN)


@dataclass(frozen=True)
class NvmlField:
    """NVML field of the whole GPU, and its series.

    `once`: no series until its number is first not 0. `instead_of`: requested only on a GPU that lacks that field.
    `signed`: may be below 0 even where the driver declares the type unsigned. `factor` multiplies the number. A number
    above `highest` is not available. `ecc`: not available while error correction (ECC) is off.
    """

    id: int
    row: Metric
    labels: tuple[str, ...] = ()
    scope: int = 0
    once: bool = False
    instead_of: int | None = None
    signed: bool = False
    factor: int = 1
    highest: float = math.inf
    ecc: bool = False

    @cached_property
    def key(self) -> Key:
        """Return the field's id and scope, which identify it in NVML's answer."""
        return self.id, self.scope


def table(name: str) -> tuple[NvmlField, ...]:
    """Return the fields of one table in `data/nvml_fields.csv`: metrics for `gpm`, bits for `clock_events`."""
    return tuple(
        NvmlField(
            int(row["id"], 0),
            BY_NAME[row["family"]],
            tuple(row["label"].split()),
            {"": 0, "all_links": ALL_LINKS, "module": MODULE}[row["scope"]],
            bool(row["once"]),
            int(row["instead_of"]) if row["instead_of"] else None,
            bool(row["signed"]),
            int(row["factor"] or 1),
            float(row["highest"] or math.inf),
            bool(row["ecc"]),
        )
        for row in read_table("nvml_fields.csv")
        if row["table"] == name
    )


ECC_CORRECTED, ECC_UNCORRECTED = (3, 0), (4, 0)
NVLINK_DATA_SENT, NVLINK_DATA_RECEIVED = (138, ALL_LINKS), (139, ALL_LINKS)

FAST = table("fast")  # requested at every read
FAST_LINKS = table("fast_links")  # likewise, in a call of its own: on GB200, a call with these and ECC fields fails
SLOW = table("slow")  # requested seldom: they rise by single events or hardly ever change
# Per GPU on NVLink 3 and older, requested if no link has fields 161-163.
OLD_LINKS = table("old_links")
OLD_LINK_SPEED = NvmlField(90, m.NVLINK_SPEED_BYTES_PER_SECOND)

LINK_COUNT = (91, 0)
LINK_SPEED, LINK_STATE, LINK_VERSION = 164, 165, 166
LINK_STATES = {0: "inactive", 1: "active", 2: "sleep", 3: "disabled"}
ACTIVE, SLEEP = 1, 2
LINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}  # NVML_NVLINK_VERSION_
LINK_ERRORS = {field.id: field.labels[0] for field in table("link_errors")}
LINK_SUMS = {field.id: field.row for field in table("link_sums")}
LINK_BERS = {field.id: field.row for field in table("link_bers")}
SYMBOL_ERRORS, BLOCKS = 221, {294, 295}
# Fields that NVML adds up over all links for the scope ALL_LINKS, the only one with which DCGM 4.6.0 requests them.
ADDED_UP = (202, 204, *range(206, 213), 214, 215, 219, 221)
INSTEAD_OF_LINKS = {202: NVLINK_DATA_SENT, 204: NVLINK_DATA_RECEIVED}  # of all links together, where a GPU has it
PER_LINK = (LINK_STATE, LINK_SPEED, LINK_VERSION, *LINK_ERRORS, *LINK_SUMS, *LINK_BERS)

C2C_COUNT, C2C_STATE, C2C_SPEED = (170, 0), 171, 172
C2C_ERRORS = {field.id: field.labels[0] for field in table("c2c_errors")}

# nvmlClocksEventReason*, with the names nvidia-smi uses.
CLOCK_EVENTS = {bit.id: bit.labels[0] for bit in table("clock_events")}

# fmt: off
FABRIC_FAULTS = {  # NVML_GPU_FABRIC_HEALTH_MASK_*: first of two bits (0 not supported, 1 yes, 2 no), faulty value
    0: ("degraded_bandwidth", 1), 2: ("route_recovery", 1), 4: ("route_unhealthy", 1), 6: ("access_timeout", 1),
    12: ("no_partition", 2), 14: ("manager_disconnected", 2),
}
# fmt: on
FABRIC_CONFIGURATION_SHIFT = 8  # four bits: 0 not supported, 1 none, others a kind of wrong configuration


@cache
def pid_limit(proc: Path) -> int:
    """Return the number below which all pids of this kernel are."""
    try:
        return int((proc / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return PID_MAX_LIMIT


def identity(handle: Handle) -> Any:
    """Return a dictionary key for an NVML handle, because pynvml makes a new pointer object each time."""
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else handle


# nvmlFieldValue_t: field, scope, timestamp, latency, type, return, value. Its ctypes structure takes 3 x longer.
ENTRY = Struct("=IIqqIi8s")
LATENCY, RETURN = 3, 5
Entry = tuple[Any, ...]
_NUMBERS = [Struct(f"={code}") for code in ("d", "I4x", "Q", "Q", "q", "i4x", "H6x")]  # in the order of VALUE_MEMBERS


def known(number: float) -> bool:
    """Return whether an NVML number is available. All ones in 32 or 64 bits, or no finite number, means it is not."""
    return number not in (2**32 - 1, 2**64 - 1) and math.isfinite(number)


def number(entry: Entry, signed: bool = False) -> float | None:
    """Return the number in an entry, or None if unavailable. `signed` reads an unsigned type as signed.

    Some drivers declare the type DOUBLE over an integer (R545 for field 82, others for ECC fields), and return an entry
    that they never wrote as DOUBLE 0 with the time 0. DCGM 4.6.0 has workarounds for both (NVML bugs 2032468, 4300930
    and 2009232 in its DcgmCacheManager.cpp).
    """
    _, _, timestamp, _, kind, _, value = entry
    if kind >= len(_NUMBERS):
        return None
    result: float
    [result] = _NUMBERS[kind].unpack(value)
    if kind == DOUBLE:
        integer = int.from_bytes(value, "little")
        if integer == 0 and timestamp == 0:
            return None
        if 0 < abs(result) < SMALLEST_DOUBLE or (signed and integer >= NEGATIVE_INTEGERS):
            result = integer
    if kind in SIGNED:
        return result
    if signed and math.isfinite(result):
        bits = 64 if result >= 2**32 else 32
        return result - 2**bits if result >= 2 ** (bits - 1) else result
    return result if known(result) else None


def bit_error_ratio(raw: int) -> float:
    """Return the ratio in NVLink field 220, 222 or 293: bits 8-11 times 10 to the power of -(bits 0-7). 0xFFF is 0."""
    exponent, mantissa = raw & 0xFF, raw >> 8 & 0xF
    return 0.0 if (mantissa, exponent) == (15, 255) else mantissa * 10.0**-exponent


def fabric_faults(mask: int) -> dict[str, bool]:
    """Return by name whether each fault in NVML's fabric health mask is present, without unsupported ones."""
    bits = {name: (mask >> shift & 0x3, fault) for shift, (name, fault) in FABRIC_FAULTS.items()}
    configuration = mask >> FABRIC_CONFIGURATION_SHIFT & 0xF
    faults = {name: value == fault for name, (value, fault) in bits.items() if value != 0}
    return faults if configuration == 0 else faults | {"incorrect_configuration": configuration > 1}


@dataclass
class Links:
    """NVLinks of one GPU, with their last counts, so that an unreadable link does not lower the sum over all links.

    `counts` are by field id and link. `once_up` are the links ever seen up, so no unconnected ones. `fallen` are those
    of `once_up` seen down since. `failed` are pairs (error field id, link) whose count was once above 0.
    """

    counts: dict[int, dict[int, float]] = field(default_factory=dict)
    once_up: set[int] = field(default_factory=set)
    fallen: set[int] = field(default_factory=set)
    failed: set[tuple[int, int]] = field(default_factory=set)

    def take(self, numbers: Mapping[Key, float]) -> list[Value]:
        """Update the links from numbers of PER_LINK fields by (field id, link). Return the GPU's NVLink readings."""
        by_id: dict[int, dict[int, float]] = {}
        for (field_id, link), value in numbers.items():
            by_id.setdefault(field_id, {})[link] = value
        return [
            *self._states(by_id.get(LINK_STATE, {}), by_id.get(LINK_SPEED, {}), by_id.get(LINK_VERSION, {})),
            *self._errors(by_id),
            *((row, (), self._sum(field_id, by_id)) for field_id, row in LINK_SUMS.items() if field_id in by_id),
            *(
                (row, (), max(bit_error_ratio(int(value)) for value in by_id[field_id].values()))
                for field_id, row in LINK_BERS.items()
                if field_id in by_id
            ),
        ]

    def _states(
        self, states: Mapping[int, float], speeds: Mapping[int, float], versions: Mapping[int, float]
    ) -> list[Value]:
        values: list[Value] = []
        present = list(states.values())
        for state, name in LINK_STATES.items():
            if state in present or (present and state in (0, ACTIVE)):
                values.append((m.NVLINK_LINKS, (name,), present.count(state)))
        active = [link for link, state in states.items() if state == ACTIVE]
        up = {link for link, state in states.items() if state in (ACTIVE, SLEEP)}
        self.once_up |= up
        self.fallen |= (self.once_up & states.keys()) - up
        values += [(m.NVLINK_LINK_STATE_ID, (str(link),), states[link]) for link in sorted(self.fallen & states.keys())]
        rates = [speed for link, speed in speeds.items() if speed > 0 and (link in active or not states)]
        if rates:
            values.append((m.NVLINK_SPEED_BYTES_PER_SECOND, (), min(rates)))
        names = sorted({LINK_VERSIONS[int(version)] for version in versions.values() if int(version) in LINK_VERSIONS})
        values += [(m.NVLINK_INFO, (name,), 1) for name in names[-1:]]
        return values

    def _errors(self, by_id: Mapping[int, Mapping[int, float]]) -> list[Value]:
        values: list[Value] = []
        done: set[str] = set()
        for field_id, error in LINK_ERRORS.items():
            if field_id not in by_id or error in done:
                continue
            done.add(error)
            values.append((m.NVLINK_ERRORS_TOTAL, (error,), self._sum(field_id, by_id)))
            for link, count in sorted(self.counts[field_id].items()):
                if count > 0:
                    self.failed.add((field_id, link))
                if (field_id, link) in self.failed and link != ALL_LINKS:
                    values.append((m.NVLINK_LINK_ERRORS_TOTAL, (str(link), error), count))
        return values

    def _sum(self, field_id: int, by_id: Mapping[int, Mapping[int, float]]) -> float:
        """Return a field's sum over all links. An unreadable link counts with its last number."""
        last, now = self.counts.get(field_id, {}), by_id[field_id]
        if any(count < last.get(link, 0) for link, count in now.items()):
            last = {}  # the GPU was reset, and its unreadable links with it
        if ALL_LINKS in now or ALL_LINKS in last:
            last = {}  # a sum is instead of its links
        self.counts[field_id] = {**last, **now}
        return sum(self.counts[field_id].values())
