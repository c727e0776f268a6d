"""Xid errors of the GPUs, from the kernel log.

`/dev/kmsg` records: https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg. Xid codes and what to do:
https://docs.nvidia.com/deploy/xid-errors/, in short `data/xid.csv` and docs/xid.md (printed by
`python -m flopwatch.node.collectors.xid`). NVML's event set loses what came before its registration and has no text;
the kernel log has both. Reading it needs root or CAP_SYSLOG.
"""

from __future__ import annotations

import csv
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flopwatch.catalogue import GPU_INFO, GPU_XID, GPU_XID_LAST, Sample
from flopwatch.node.collectors import StateFile, Unsupported, read_inventory

# The GPU needs a reset, a drain or a repair; the job on it is lost.
CRITICAL = (48, 62, 64, 74, 79, 95, 119, 120)
# Present at 0 on every GPU from the start, so that the first one is an increase. 94 is contained: a warning.
FROM_THE_START = (*CRITICAL, 94)

OFF_THE_BUS = 79
# The driver reports a GPU that fell off the bus once with a number and again without.
SAME_EVENT_SECONDS = 60.0

_RECORD = re.compile(r"(?P<priority>[0-9]+),(?P<sequence>[0-9]+),(?P<microseconds>[0-9]+),[^;]*;(?P<text>.*)")
_PCI = r"(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
# A MIG instance is named inside or after the bracket; old drivers write no `PCI:`.
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_PCI}\b[^)]*\)(?: GPU-C?I:[0-9]+)*: (?P<xid>[0-9]+)\b")
_GPU = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_PCI}\.[0-9a-fA-F]\b")


class Record(NamedTuple):
    """One kernel log record; `at` is in seconds since boot."""

    sequence: int
    at: float
    text: str


class Event(NamedTuple):
    """One Xid in one GPU; `numbered` is False for the driver's lines that name no Xid."""

    pci: str
    xid: int
    numbered: bool


def record(line: str) -> Record | None:
    """Return the record in one line of /dev/kmsg, None if it is no record of the kernel's own."""
    match = _RECORD.match(line)
    # Facility 0 is the kernel; what user space writes into /dev/kmsg carries another.
    if match is None or int(match["priority"]) >> 3:
        return None
    return Record(int(match["sequence"]), int(match["microseconds"]) / 1e6, match["text"])


def pci_address(text: str) -> str:
    """Return a PCI address as `0000:53:00`, from NVML's `00000000:53:00.0` or the kernel log's `53:00`."""
    *domain, bus, device = text.partition(".")[0].lower().split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{device}"


def events(text: str) -> Iterator[Event]:
    """Yield the Xids in the text of one record, where the kernel writes a line break as `\\x0a`."""
    named = ""
    for line in text.split("\\x0a"):
        if xid := _XID.search(line):
            yield Event(pci_address(xid["pci"]), int(xid["xid"]), True)
            continue
        if gpu := _GPU.search(line):
            named = pci_address(gpu["pci"])
        if named and "fallen off the bus" in line:
            yield Event(named, OFF_THE_BUS, False)
            named = ""


def meanings() -> dict[int, dict[str, str]]:
    """Return the rows of data/xid.csv by code: name, class, severity, action, source."""
    text = (resources.files("flopwatch") / "data" / "xid.csv").read_text()
    return {int(row["xid"]): row for row in csv.DictReader(text.splitlines())}


class Xid:
    """The Xids in a kernel log, counted once each across restarts.

    `kmsg` is /dev/kmsg or a regular file of such records, `gpus` the inventory that the NVML source keeps, `state` the
    file of the counts and of the place read up to, `boot_id` what tells this boot's record numbers from another's,
    `booted` the Unix time of the boot.
    """

    name = "xid"

    def __init__(
        self,
        kmsg: Path,
        gpus: Path,
        state: Path,
        boot_id: str = "",
        booted: Callable[[], float] = lambda: time.time() - time.monotonic(),
    ) -> None:
        self._kmsg = kmsg
        self._gpus = gpus
        self._boot_id = boot_id
        self._booted = booted
        self._state = StateFile(state)
        stored = self._state.load()
        self._log = str(stored.get("log", ""))  # which log `_next` is a place in
        self._next: int = stored["next"] if isinstance(stored.get("next"), int) else 0
        # By uuid, or by PCI address for as long as the inventory does not know the GPU: code -> (count, last).
        self._counts = _counts(stored.get("counts"))
        self._unsaved = False
        self._device: int | None = None

    def read(self) -> list[Sample]:
        """Return the counts of every GPU of the inventory."""
        gpus = read_inventory(self._gpus, GPU_INFO)
        uuids = {pci_address(gpu["pci_bus_id"]): uuid for uuid, gpu in gpus.items() if gpu["pci_bus_id"]}
        for pci in self._counts.keys() & uuids.keys():
            for xid, (count, last) in self._counts.pop(pci).items():
                self._add(uuids[pci], xid, count, last)
        booted = self._booted()
        for entry in self._records():
            for event in events(entry.text):
                owner = uuids.get(event.pci, event.pci)
                at = booted + entry.at
                if event.numbered or at - self._last(owner, event.xid) > SAME_EVENT_SECONDS:
                    self._add(owner, event.xid, 1, at)
        # Records without an Xid may be read again after a restart; they count nothing.
        if self._unsaved:
            self._unsaved = not self._state.save({"log": self._log, "next": self._next, "counts": self._counts})
        samples: list[Sample] = []
        for uuid, gpu in gpus.items():
            counts = self._counts.get(uuid, {})
            for xid in sorted({*FROM_THE_START, *counts}):
                labels = (gpu["gpu"], uuid, str(xid))
                samples.append((GPU_XID, labels, counts[xid][0] if xid in counts else 0))
                if xid in counts:
                    samples.append((GPU_XID_LAST, labels, counts[xid][1]))
        return samples

    def _last(self, owner: str, xid: int) -> float:
        return self._counts.get(owner, {}).get(xid, (0, float("-inf")))[1]

    def _add(self, owner: str, xid: int, count: int, at: float) -> None:
        counts = self._counts.setdefault(owner, {})
        counts[xid] = (counts.get(xid, (0, 0.0))[0] + count, max(at, self._last(owner, xid)))
        self._unsaved = True

    def _records(self) -> Iterator[Record]:
        """Yield the records written since the last read."""
        try:
            file = os.open(self._kmsg, os.O_RDONLY | os.O_NONBLOCK) if self._device is None else self._device
        except OSError as error:
            raise Unsupported(f"cannot read {self._kmsg}: {error.strerror}") from error
        status = os.fstat(file)
        if stat.S_ISCHR(status.st_mode):
            self._device = file
            self._continue_in(f"boot {self._boot_id}")
            yield from self._from_device(file)
        else:
            with os.fdopen(file, "rb") as stream:
                self._continue_in(f"file {status.st_dev}:{status.st_ino}")
                yield from self._from_file(stream, status.st_size)

    def _continue_in(self, log: str) -> None:
        if log != self._log:
            self._log, self._next = log, 0

    def _from_device(self, device: int) -> Iterator[Record]:
        while True:
            try:
                line = os.read(device, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # overwritten before it was read; the next one is the oldest that is left
            except BlockingIOError:
                return
            if not line:
                return
            entry = record(line.partition("\n")[0])
            if entry is not None and entry.sequence >= self._next:
                self._next = entry.sequence + 1
                yield entry

    def _from_file(self, stream: BinaryIO, size: int) -> Iterator[Record]:
        if size < self._next:
            self._next = 0
        stream.seek(self._next)
        for line in stream:
            if not line.endswith(b"\n"):
                return  # still being written
            self._next += len(line)
            entry = record(line.decode("utf-8", "replace"))
            if entry is not None:
                yield entry


def _counts(stored: Any) -> dict[str, dict[int, tuple[int, float]]]:
    """Return the counts in a state file, none if they are of another shape."""
    try:
        return {
            owner: {int(xid): (int(count), float(last)) for xid, (count, last) in codes.items()}
            for owner, codes in stored.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}


def build(kmsg: str, gpus: str, state: str) -> Xid:
    """Return the collector of this boot's kernel log, or of a file of records."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Xid(Path(kmsg), Path(gpus), Path(state), boot_id)


def document() -> str:
    """Return docs/xid.md."""
    lines = [
        "# Xid errors",
        "",
        "Printed by `python -m flopwatch.node.collectors.xid`; do not edit. Codes and actions are from NVIDIA's",
        "[Xid catalogue](https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), the severity is ours:",
        "`error` ends the job and leaves the GPU fine, `critical` needs a reset or a drain, `fatal` a reboot or",
        f"new hardware. Bold codes are in `{GPU_XID}` from the start, at 0. Codes listed as unused are left out.",
        "",
        "| Xid | what | class | severity | NVIDIA's action |",
        "|---|---|---|---|---|",
    ]
    for xid, row in sorted(meanings().items()):
        if row["class"] != "unused":
            code = f"**{xid}**" if xid in FROM_THE_START else str(xid)
            lines.append(f"| {code} | {row['name']} | {row['class']} | {row['severity']} | {row['action']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
