"""What the Xid source has counted, by whom it belongs to, in a form that a state file keeps.

An owner is the uuid of a GPU or, until somebody names the GPU there, a PCI address. Everything is bounded: a kernel log
cannot make more series than a node has parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# Owners that are PCI addresses, different Xids and link errors of one GPU, different errors of all switches. An Xid has
# two series, and a GPU 120 in all.
STRANGERS, CODES, LINK_ERRORS, SWITCH_ERRORS = 64, 24, 24, 256
# Processes that the kernel killed for want of memory, the last ones.
KILLED = 8
# What takes the place of unit and link, and empties the rest, in the errors of a GPU that has too many different ones.
OTHER = "other"
# The code that stands for further ones of a GPU that has too many.
OTHER_XID = -1


class Count(NamedTuple):
    """How often something happened, and the Unix time when it last did."""

    number: int
    last: float

    def and_at(self, at: float) -> Count:
        """Return the count with one more."""
        return Count(self.number + 1, max(at, self.last))


NONE = Count(0, float("-inf"))


class Counts:
    """Counters that only rise; the Xids of `always` are counted by themselves on a GPU with any number of others."""

    def __init__(self, always: Collection[int] = ()) -> None:
        self._always = frozenset(always)
        self.xids: dict[str, dict[int, Count]] = {}
        # By owner and the labels after (gpu, uuid) of gpu_xid_nvlink_errors_total.
        self.links: dict[str, dict[tuple[str, ...], int]] = {}
        self.notices: dict[str, dict[str, int]] = {}
        self.recovery: dict[str, int] = {}
        self.switches: dict[tuple[str, str], Count] = {}
        self.node: dict[str, int] = {}
        self.killed: dict[int, float] = {}  # by pid, when
        self.introduced: dict[str, str] = {}  # uuid by PCI address, as the driver wrote it into the kernel log

    def counted_as(self, owner: str, code: int) -> int | None:
        """Return the code that an Xid counts as: its own, or OTHER_XID; None if its owner is a stranger too many."""
        if owner not in self.xids and is_address(owner) and len(self.strangers()) >= STRANGERS:
            return None
        return self._one_of(self.xids.get(owner, {}), code)

    def _one_of(self, codes: Mapping[int, Count], code: int) -> int:
        return code if code in codes or code in self._always or len(codes) < CODES else OTHER_XID

    def xid(self, owner: str, code: int, at: float) -> None:
        """Count an Xid, as what `counted_as` says."""
        codes = self.xids.setdefault(owner, {})
        codes[code] = codes.get(code, NONE).and_at(at)

    def link(self, owner: str, error: tuple[str, ...]) -> None:
        """Count a link error, by its xid, unit, link and the rest; too many different ones are one."""
        if owner not in self.xids:
            return
        errors = self.links.setdefault(owner, {})
        if error not in errors and len(errors) >= LINK_ERRORS:
            error = (error[0], OTHER, OTHER, *[""] * (len(error) - 3))
        errors[error] = errors.get(error, 0) + 1

    def notice(self, owner: str, name: str) -> None:
        """Count an event without an Xid."""
        notices = self.notices.setdefault(owner, {})
        notices[name] = notices.get(name, 0) + 1

    def switch(self, switch: str, sxid: str, at: float) -> None:
        """Count an SXid."""
        if (switch, sxid) in self.switches or len(self.switches) < SWITCH_ERRORS:
            self.switches[switch, sxid] = self.switches.get((switch, sxid), NONE).and_at(at)

    def oom_kill(self, pid: int, at: float) -> None:
        """Remember a process that the kernel killed, and forget the one before the last KILLED."""
        self.killed.pop(pid, None)
        self.killed[pid] = at
        while len(self.killed) > KILLED:
            del self.killed[next(iter(self.killed))]

    def introduce(self, pci: str, uuid: str) -> None:
        """Remember which GPU the driver says is at an address."""
        if pci in self.introduced or len(self.introduced) < STRANGERS:
            self.introduced[pci] = uuid

    def strangers(self) -> list[str]:
        """Return the addresses with Xids at which nobody has named a GPU."""
        return [owner for owner in self.xids if is_address(owner)]

    def adopt(self, pci: str, uuid: str) -> bool:
        """Give what was counted for an address to the GPU there; return whether there was anything."""
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
        found = pci in self.xids
        for owners in (self.xids, self.links, self.recovery):
            owners.pop(pci, None)
        return found

    def dump(self) -> dict[str, Any]:
        """Return what `load` takes, as JSON has it."""
        return {
            "counts": self.xids,
            "links": {
                owner: [[*error, number] for error, number in errors.items()] for owner, errors in self.links.items()
            },
            "notices": self.notices,
            "recovery": self.recovery,
            "switches": [[*error, *count] for error, count in self.switches.items()],
            "node": self.node,
            "killed": [[pid, at] for pid, at in self.killed.items()],
            "introduced": self.introduced,
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take what was stored; a part of another shape is forgotten."""
        wrong = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
        with suppress(*wrong):
            self.xids = {
                owner: {int(code): Count(int(number), float(last)) for code, (number, last) in codes.items()}
                for owner, codes in stored["counts"].items()
            }
        with suppress(*wrong):
            self.links = {
                owner: {_texts(error, 6): int(number) for *error, number in errors}
                for owner, errors in stored["links"].items()
            }
        with suppress(*wrong):
            self.notices = {
                owner: {name: int(number) for name, number in notices.items()}
                for owner, notices in stored["notices"].items()
            }
        with suppress(*wrong):
            self.recovery = {owner: int(action) for owner, action in stored["recovery"].items()}
        with suppress(*wrong):
            self.switches = {
                (str(switch), str(sxid)): Count(int(number), float(last))
                for switch, sxid, number, last in stored["switches"]
            }
        with suppress(*wrong):
            self.node = {name: int(number) for name, number in stored["node"].items()}
        with suppress(*wrong):
            self.killed = {int(pid): float(at) for pid, at in stored["killed"][-KILLED:]}
        with suppress(*wrong):
            self.introduced = {pci: str(uuid) for pci, uuid in stored["introduced"].items()}


def is_address(owner: str) -> bool:
    """Return whether an owner is a PCI address."""
    return ":" in owner


def _texts(values: list[Any], length: int) -> tuple[str, ...]:
    if len(values) != length:
        raise ValueError(values)
    return tuple(str(value) for value in values)
