"""Counts of Xids, SXids and other kernel events, as stored in the Xid collector's state file.

An owner is a GPU's uuid, or its PCI address until the uuid is known. All tables have limits, so that a kernel log
cannot make more series than a node has hardware.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# Limits: owners that are PCI addresses, different Xids and link errors of one GPU, different errors of all switches.
MAX_STRANGERS, MAX_CODES, MAX_LINK_ERRORS, MAX_SWITCH_ERRORS = 64, 24, 24, 256
MAX_KILLED = 8  # last processes killed for lack of memory
OTHER = "other"  # unit and link of a GPU's errors beyond MAX_LINK_ERRORS
OTHER_XID = -1  # code of a GPU's Xids beyond MAX_CODES


class Count(NamedTuple):
    """Number of events, and the Unix time of the last event."""

    number: int
    last: float

    def and_at(self, at: float) -> "Count":
        """Return the count with one more event at this Unix time."""
        return Count(self.number + 1, max(at, self.last))


NONE = Count(0, float("-inf"))


class Counts:
    """Counters of the Xid collector. Xids in `always` have their own code even beyond MAX_CODES."""

    def __init__(self, always: Collection[int] = ()) -> None:
        self._always = frozenset(always)
        self.xids: dict[str, dict[int, Count]] = {}
        self.links: dict[str, dict[tuple[str, ...], int]] = {}  # by owner and labels of gpu_xid_nvlink_errors_total
        self.notices: dict[str, dict[str, int]] = {}
        self.recovery: dict[str, int] = {}
        self.switches: dict[tuple[str, str], Count] = {}
        self.node: dict[str, int] = {}
        self.killed: dict[int, float] = {}  # Unix time by pid
        self.introduced: dict[str, str] = {}  # uuid by PCI address, from the kernel log
        self.uninitialized: dict[str, float] = {}  # Unix time of the driver's last failed initialization, by owner

    def counted_as(self, owner: str, code: int) -> int | None:
        """Return the code to count an Xid as: its own or OTHER_XID. None if too many PCI addresses have Xids."""
        return self._one_of(self.xids.get(owner, {}), code) if self._has_room(owner) else None

    def _has_room(self, owner: str) -> bool:
        strangers = self.strangers() if is_address(owner) else []
        return owner in strangers or len(strangers) < MAX_STRANGERS

    def _one_of(self, codes: Mapping[int, Count], code: int) -> int:
        return code if code in codes or code in self._always or len(codes) < MAX_CODES else OTHER_XID

    def xid(self, owner: str, code: int, at: float) -> None:
        """Count an Xid at Unix time `at` under a code from `counted_as`."""
        codes = self.xids.setdefault(owner, {})
        codes[code] = codes.get(code, NONE).and_at(at)

    def uninitialize(self, owner: str, at: float) -> None:
        """Store the Unix time at which the driver failed to initialize a GPU."""
        if self._has_room(owner):
            self.uninitialized[owner] = max(at, self.uninitialized.get(owner, at))

    def link(self, owner: str, error: tuple[str, ...]) -> None:
        """Count an NVLink error (Xid, unit, link, ...) of an owner with Xids, as OTHER beyond MAX_LINK_ERRORS."""
        if owner not in self.xids:
            return
        errors = self.links.setdefault(owner, {})
        if error not in errors and len(errors) >= MAX_LINK_ERRORS:
            error = (error[0], OTHER, OTHER, *[""] * (len(error) - 3))
        errors[error] = errors.get(error, 0) + 1

    def notice(self, owner: str, name: str) -> None:
        """Count an NVML event that is not an Xid, such as `recovery_action`, of a GPU's uuid or PCI address."""
        notices = self.notices.setdefault(owner, {})
        notices[name] = notices.get(name, 0) + 1

    def switch(self, switch: str, sxid: str, at: float) -> None:
        """Count an SXid of an NVSwitch. Beyond MAX_SWITCH_ERRORS, only SXids counted before are counted."""
        if (switch, sxid) in self.switches or len(self.switches) < MAX_SWITCH_ERRORS:
            self.switches[switch, sxid] = self.switches.get((switch, sxid), NONE).and_at(at)

    def oom_kill(self, pid: int, at: float) -> None:
        """Store pid and Unix time of a process killed for lack of memory. Only the last MAX_KILLED are kept."""
        self.killed.pop(pid, None)
        self.killed[pid] = at
        while len(self.killed) > MAX_KILLED:
            del self.killed[next(iter(self.killed))]

    def introduce(self, pci: str, uuid: str) -> None:
        """Store the uuid of the GPU at a PCI address, as the kernel log reports it."""
        if pci in self.introduced or len(self.introduced) < MAX_STRANGERS:
            self.introduced[pci] = uuid

    def strangers(self) -> list[str]:
        """Return the PCI addresses that have Xids or failed initializations, and no known GPU uuid."""
        return [owner for owner in {**self.xids, **self.uninitialized} if is_address(owner)]

    def adopt(self, pci: str, uuid: str) -> bool:
        """Move the counts of a PCI address to the GPU uuid there. Return whether the address had counts."""
        for code, count in self.xids.get(pci, {}).items():
            codes = self.xids.setdefault(uuid, {})
            code = self._one_of(codes, code)
            before = codes.get(code, NONE)
            codes[code] = Count(before.number + count.number, max(before.last, count.last))
        for error, number in self.links.get(pci, {}).items():
            errors = self.links.setdefault(uuid, {})
            errors[error] = errors.get(error, 0) + number
        if pci in self.recovery:
            self.recovery[uuid] = self.recovery[pci]
        if pci in self.uninitialized:
            self.uninitialize(uuid, self.uninitialized[pci])
        found = pci in self.xids or pci in self.uninitialized
        for owners in (self.xids, self.links, self.recovery, self.uninitialized):
            owners.pop(pci, None)
        return found

    def dump(self) -> dict[str, Any]:
        """Return the counts as the JSON object that `load` accepts."""
        return {
            "counts": self.xids,
            "links": {owner: [[*key, count] for key, count in errors.items()] for owner, errors in self.links.items()},
            "notices": self.notices,
            "recovery": self.recovery,
            "switches": [[*error, *count] for error, count in self.switches.items()],
            "node": self.node,
            "killed": [[pid, at] for pid, at in self.killed.items()],
            "introduced": self.introduced,
            "uninitialized": self.uninitialized,
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Restore the counts from an object of `dump`. Skips each invalid table."""
        for name, parse in _TABLES.items():
            with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
                setattr(self, "xids" if name == "counts" else name, parse(stored[name]))


def is_address(owner: str) -> bool:
    """Return whether the owner of an Xid count is given as a PCI address."""
    return ":" in owner


def _count(number: Any, last: Any) -> Count:
    return Count(int(number), float(last))


def _texts(values: list[Any], length: int) -> tuple[str, ...]:
    if len(values) != length:
        raise ValueError(values)
    return tuple(str(value) for value in values)


def _numbers(counts: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(number) for name, number in counts.items()}


# By name in the state file: a function that parses the stored table.
_TABLES: dict[str, Callable[[Any], Any]] = {
    "counts": lambda owners: {
        owner: {int(code): _count(*count) for code, count in codes.items()} for owner, codes in owners.items()
    },
    "links": lambda owners: {
        owner: {_texts(error, 6): int(number) for *error, number in errors} for owner, errors in owners.items()
    },
    "notices": lambda owners: {owner: _numbers(notices) for owner, notices in owners.items()},
    "recovery": _numbers,
    "switches": lambda rows: {(str(switch), str(sxid)): _count(*count) for switch, sxid, *count in rows},
    "node": _numbers,
    "killed": lambda rows: {int(pid): float(at) for pid, at in rows[-MAX_KILLED:]},
    "introduced": lambda uuids: {pci: str(uuid) for pci, uuid in uuids.items()},
    "uninitialized": lambda times: {owner: float(at) for owner, at in times.items()},
}
