"""Parsers of the kernel log lines that matter on a GPU node, as pure functions over text.

A `/dev/kmsg` record: https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg. The NVIDIA driver's lines:
https://docs.nvidia.com/deploy/xid-errors/ and, for NVSwitch, appendix D of the Fabric Manager user guide
(https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/). mlx5: drivers/net/ethernet/mellanox/mlx5/core.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from flopwatch.catalogue.xid import read_table

OFF_THE_BUS = 79
RECOVERY_ACTION = 154

RELEVANT = re.compile(  # part of every line below, so that a flood of other lines costs almost nothing
    rb"Xid \(|fallen off the bus|RmInitAdapter failed|GPU at PCI|mlx5_core|oom-kill:|in libnccl|nvidia-peermem"
)

_RECORD = re.compile(
    r"(?P<priority>[0-9]{1,10}),(?P<sequence>[0-9]{1,19}),(?P<microseconds>[0-9]{1,19}),[^;]*;(?P<text>.*)"
)
_PCI = r"(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID = re.compile(  # a MIG instance is named inside or after the bracket, and old drivers omit `PCI:`
    rf"NVRM: Xid \((?:PCI:)?{_PCI}\b[^)]*\)(?: GPU-C?I:[0-9]+)*: (?P<xid>[0-9]{{1,6}})\b,? ?(?P<detail>.*)"
)
_GPU = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_PCI}\.[0-9a-fA-F]\b")
_INTRODUCTION = re.compile(rf"NVRM: GPU at PCI:{_PCI}: (?P<uuid>GPU-[0-9a-fA-F-]{{36}})")
_RECOVERY = re.compile(r"recovery action changed from 0x[0-9a-fA-F]{1,8} \([^)]*\) to 0x(?P<action>[0-9a-fA-F]{1,8})\b")
_SXID = re.compile(  # the one line of an SXid that has its severity
    rf"nvidia-nvswitch[0-9]*: SXid \(PCI:{_PCI}(?P<function>\.[0-9a-fA-F])?\): (?P<sxid>[0-9]{{5}}), (?:Non-f|F)atal\b"
)
# By the event label of host_kernel_events_total.
NODE_EVENTS = {row["event"]: re.compile(row["pattern"]) for row in read_table("kernel_events.csv")}
# mm/oom_kill.c, dump_oom_summary(). The command's name before the pid can be chosen freely by a user.
_OOM_KILL = re.compile(r"\boom-kill:constraint=.*,pid=(?P<pid>[0-9]{1,10}),uid=[0-9]{1,10}$")


class KernelRecord(NamedTuple):
    """One record of the kernel log. `at` is in seconds since boot."""

    sequence: int
    at: float
    text: str


class XidEvent(NamedTuple):
    """One Xid of one GPU. `numbered` is False if the line has no Xid code. `detail` is the text after the code."""

    pci: str
    xid: int
    numbered: bool
    detail: str = ""


def record(line: str) -> KernelRecord | None:
    """Parse one line of /dev/kmsg. Return None if it is malformed or the kernel did not write it."""
    match = _RECORD.match(line)
    if match is None or int(match["priority"]) >> 3:  # facility 0 is the kernel, others are user space
        return None
    return KernelRecord(int(match["sequence"]), int(match["microseconds"]) / 1e6, match["text"])


def pci_address(text: str) -> str:
    """Return a PCI address as `0000:53:00`, from NVML's `00000000:53:00.0` or the kernel log's `53:00`."""
    *domain, bus, device = text.partition(".")[0].lower().split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{device}"


def events(text: str) -> Iterator[XidEvent]:
    r"""Yield the Xids in the text of one record, where the kernel writes a line break as `\x0a`."""
    named = ""
    for line in text.split("\\x0a"):
        if xid := _XID.search(line):
            yield XidEvent(pci_address(xid["pci"]), int(xid["xid"]), True, xid["detail"])
            continue
        if gpu := _GPU.search(line):
            named = pci_address(gpu["pci"])
        if named and "fallen off the bus" in line:
            yield XidEvent(named, OFF_THE_BUS, False)
            named = ""


def failed_initializations(text: str) -> Iterator[str]:
    """Yield the PCI address of each GPU that the driver failed to initialize."""
    for line in text.split("\\x0a"):
        if "RmInitAdapter failed" in line and (gpu := _GPU.search(line)):
            yield pci_address(gpu["pci"])


def introductions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (PCI address, uuid) from the lines that the driver logs before a GPU's first Xid."""
    for match in _INTRODUCTION.finditer(text):
        yield pci_address(match["pci"]), match["uuid"]


def recovery_action(detail: str) -> int | None:
    """Return the new recovery action in an Xid 154's text, numbered as gpu_recovery_action_id, or None."""
    match = _RECOVERY.search(detail)
    return None if match is None else int(match["action"], 16)


def switch_errors(text: str) -> Iterator[tuple[str, str]]:
    """Yield (PCI address of the NVSwitch, SXid code) of each SXid in the text of one record."""
    for match in _SXID.finditer(text):
        yield pci_address(match["pci"]) + (match["function"] or ".0").lower(), match["sxid"]


def oom_kills(text: str) -> Iterator[int]:
    """Yield the host's pid of each process that the kernel killed for lack of memory."""
    for line in text.split("\\x0a"):
        if killed := _OOM_KILL.search(line):
            yield int(killed["pid"])


def node_events(text: str) -> Iterator[str]:
    """Yield the name of each kernel event, such as `oom_kill`, in the text of one record."""
    for line in text.split("\\x0a"):
        yield from (name for name, pattern in NODE_EVENTS.items() if pattern.search(line))
