"""Collector of Xid errors of GPUs and SXid errors of NVSwitches, from the kernel log and from NVML's event set.

Xid codes and actions: https://docs.nvidia.com/deploy/xid-errors/, in short docs/xid.md. The kernel log has each Xid's
text and the Xids from before this process. It requires root, CAP_SYSLOG or `flopwatch kmsg`. NVML's event set requires
no privilege, but lacks both, and has no SXids. An event in both is counted once (`reconcile.py`).
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.catalogue.xid import paging_xids, sxids, xids
from flopwatch.node.collectors import RestartReader, StateFile, Unsupported, read_inventory
from flopwatch.node.collectors.xid import kernel_lines, nvlink5
from flopwatch.node.collectors.xid.counts import OTHER, OTHER_XID, Counts
from flopwatch.node.collectors.xid.kernel_log import KernelLog, LogEntry
from flopwatch.node.collectors.xid.nvml_events import UNKNOWN_XID, NvmlEvent, Watcher
from flopwatch.node.collectors.xid.reconcile import Reconciler

# Xids with a series at 0 from the start, so that the first one is an increase: those that page, and the contained 94.
# The errors of NVLink 5 that may be fatal exist only on Blackwell.
ON_EVERY_GPU = (48, 62, 64, 79, 94, 95, 119, 120, 140)
BEFORE_NVLINK_5 = (46, 74, 109, 136, 143)
WITH_NVLINK_5 = (144, 145, 146, 149, 150)
_NVLINK_5 = re.compile(r"\bG?B[0-9]00\b")  # in the model, such as NVIDIA B200 or NVIDIA GB300
SAME_EVENT_SECONDS = 60.0  # within which both sources report one event, and the log may have it twice
STRANGER_SECONDS = 60.0  # from the start, for the NVML collector to name GPUs in the kernel log
PLACE_SECONDS = 60.0  # between two writes of the log position while no record counts
NVML_PATIENCE = 0.5  # seconds to wait for the first registration

log = logging.getLogger(__name__)


def from_the_start(model: str) -> tuple[int, ...]:
    """Return the Xids for which a GPU of this model has a series, at 0, from the start."""
    return (*ON_EVERY_GPU, *(WITH_NVLINK_5 if _NVLINK_5.search(model) else BEFORE_NVLINK_5))


class Xid:
    """Collector of the Xids and SXids of a node, each counted once across restarts.

    `kmsg` is /dev/kmsg, `unix:` and the socket of `flopwatch kmsg`, or a file of such records. `gpus` is the inventory
    of the NVML collector. `state` is the file of the counts and of the position in the log. `boot_id` names the boot
    that numbered the records, `booted` returns its Unix time. `follow` also reads the log between scrapes. A GPU
    outside the inventory has series after `stranger_seconds`.
    """

    name = "xid"

    def __init__(
        self,
        kmsg: Path | str,
        gpus: Path,
        state: Path,
        boot_id: str = "",
        booted: Callable[[], float] = lambda: time.time() - time.monotonic(),
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.time,
        follow: bool = False,
        stranger_seconds: float = STRANGER_SECONDS,
    ) -> None:
        self._stranger_seconds = stranger_seconds
        self._gpus, self._watcher = gpus, watcher
        self._clock, self._follow = clock, follow
        self._started = clock()
        self._state = StateFile(state)
        stored = self._state.load()
        self._counts = Counts(always=paging_xids())
        self._counts.load(stored)
        self._reconciler = Reconciler[tuple[str, int]](SAME_EVENT_SECONDS)
        self._reconciler.restore(_earlier_events(stored.get("events")))
        numbering, place, since = (stored.get(key) for key in ("log", "next", "since"))
        self._kernel = KernelLog(
            str(kmsg),
            kernel_lines.RELEVANT,
            boot_id,
            booted,
            clock,
            numbering=numbering if isinstance(numbering, str) else "",
            place=place if isinstance(place, int) and place >= 0 else 0,
            since=since if isinstance(since, float) else float("-inf"),
        )
        self._had_source = bool(stored)  # a node has series once any source has answered
        self._had_kernel_log = bool(self._kernel.numbering)
        self._was_live = False
        self._unsaved = not stored
        self._saved_place, self._saved_at = self._kernel.place, self._started
        self._up: dict[str, str] = {}

    def read(self) -> list[Sample]:
        """Return the counts of every GPU, NVSwitch and kernel event. Raises Unsupported or RestartReader."""
        entries = self._kernel.drain()
        if self._follow:
            self._kernel.follow()
        known = read_inventory(self._gpus, m.GPU_INFO)
        self._check_sources(bool(known))
        parts = self._parts(known)
        owners = {pci: uuid for pci, (_, uuid) in parts.items()}
        for pci in set(self._counts.strangers()) & owners.keys():
            self._unsaved = self._counts.adopt(pci, owners[pci]) or self._unsaved
        versions = {uuid: part["driver_version"] for uuid, part in known.items()}
        for entry in entries:
            self._take_record(entry, owners, versions)
        for event in self._watcher.drain() if self._watcher is not None else ():
            self._take_event(event, owners)
        self._save()
        if self._watcher is not None and self._watcher.replaced:
            raise RestartReader(f"the driver was replaced under this process: {self._watcher.error}")
        models = {uuid: part["model"] for uuid, part in known.items()}
        return list(self._samples(parts, models))

    def close(self) -> None:
        """Write the counts and the position in the kernel log, then close the log and NVML."""
        if self._had_source:
            self._unsaved = self._unsaved or self._kernel.place != self._saved_place
            self._save()
        self._kernel.close()
        if self._watcher is not None:
            self._watcher.close()

    def _check_sources(self, has_gpus: bool) -> None:
        """Log changes of the sources' errors. Raises Unsupported if none ever worked and NVML has no GPU to watch."""
        watcher, errors = self._watcher, {"kernel_log": self._kernel.error}
        if watcher is not None:
            errors["nvml"] = watcher.error
        for source, error in errors.items():
            if self._up.get(source) != error:
                log.log(logging.WARNING if error else logging.INFO, "Xids from %s: %s", source, error or "ok")
        self._up = errors
        self._had_kernel_log = self._had_kernel_log or not self._kernel.error
        self._was_live = self._was_live or self._kernel.live
        self._had_source = self._had_source or not all(errors.values())
        if not self._had_source and not (has_gpus and watcher is not None and not watcher.absent):
            raise Unsupported("; ".join(f"{source}: {error}" for source, error in errors.items()))

    def _parts(self, known: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
        """Return (index, uuid) of the GPUs by PCI address, from the inventory and from NVML's registrations."""
        parts = {
            kernel_lines.pci_address(part["pci_bus_id"]): (part["gpu"], uuid)
            for uuid, part in known.items()
            if part["pci_bus_id"]
        }
        # Without a folder for its inventory, the NVML collector cannot report the GPUs.
        for pci, device in list(self._watcher.devices.items()) if self._watcher is not None else ():
            if device.uuid not in known:
                parts.setdefault(pci, (device.gpu, device.uuid))
        return parts

    def _take_record(self, entry: LogEntry, owners: Mapping[str, str], versions: Mapping[str, str]) -> None:
        text, at = entry.record.text, entry.at
        counts = self._counts
        for pci, uuid in kernel_lines.introductions(text):
            counts.introduce(pci, uuid)
        for event in kernel_lines.events(text):
            owner = owners.get(event.pci, event.pci)
            source = "kernel_log" if event.numbered else "unnumbered"
            code = counts.counted_as(owner, event.xid)
            if code is not None and self._reconciler.news((event.pci, code), source, at, repeats=not event.numbered):
                counts.xid(owner, code, at)
            link = nvlink5.decode(event.xid, event.detail, versions.get(owner, ""))
            if link is not None:
                counts.link(owner, (str(event.xid), *link))
            recovers = event.xid == kernel_lines.RECOVERY_ACTION
            action = kernel_lines.recovery_action(event.detail) if recovers else None
            if action is not None and owner in counts.xids:
                counts.recovery[owner] = action
        for pci in kernel_lines.failed_initializations(text):
            counts.uninitialize(owners.get(pci, pci), at)
        for switch, sxid in kernel_lines.switch_errors(text):
            counts.switch(switch, sxid, at)
        for name in kernel_lines.node_events(text):
            counts.node[name] = counts.node.get(name, 0) + 1
        for pid in kernel_lines.oom_kills(text):
            counts.oom_kill(pid, at)
        self._unsaved = True

    def _take_event(self, event: NvmlEvent, owners: Mapping[str, str]) -> None:
        owner = owners.get(event.pci, event.pci)
        self._unsaved = True
        if event.notice:
            self._counts.notice(owner, event.notice)
        elif event.xid == UNKNOWN_XID and not self._kernel.error:
            return  # the kernel log has its number
        else:
            code = self._counts.counted_as(owner, event.xid)
            if code is not None and self._reconciler.news((event.pci, code), "nvml", event.at):
                self._counts.xid(owner, code, event.at)

    def _save(self) -> None:
        """Write the counts if they changed. A change of the log position alone is written after PLACE_SECONDS."""
        now, since = self._clock(), self._kernel.since
        self._reconciler.forget(now)
        if self._kernel.place != self._saved_place and not 0 <= now - self._saved_at < PLACE_SECONDS:
            self._unsaved = True
        if self._unsaved:
            self._saved_place, self._saved_at = self._kernel.place, now
            self._unsaved = not self._state.save(
                {
                    "log": self._kernel.numbering,
                    "next": self._kernel.place,
                    "since": since if since > float("-inf") else None,
                    "events": [[*key, at, sources] for key, at, sources in self._reconciler],
                    **self._counts.dump(),
                }
            )

    def _samples(self, parts: Mapping[str, tuple[str, str]], models: Mapping[str, str]) -> Iterator[Sample]:
        named = {uuid: gpu for gpu, uuid in parts.values()}
        start = {uuid: from_the_start(models.get(uuid, "")) for uuid in named}
        for uuid, gpu in named.items():
            yield from self._gpu(uuid, (gpu, uuid), start[uuid])
        # A GPU lost before its first read has no index. Its PCI address takes the place of the index.
        waited = self._clock() - self._started >= self._stranger_seconds
        for pci in self._counts.strangers() if waited else ():
            start[pci] = from_the_start("")
            yield from self._gpu(pci, (pci, self._counts.introduced.get(pci, pci)), start[pci])
        for code in sorted({code for owner in start for code in self._counts.xids.get(owner, ())}):
            if code in xids():
                row = xids()[code]
                yield m.GPU_XID_INFO, (str(code), row.name, row.category, row.severity, row.action), 1
        yield from self._node()

    def _gpu(self, owner: str, labels: tuple[str, str], start: Iterable[int]) -> Iterator[Sample]:
        codes = self._counts.xids.get(owner, {})
        for code in sorted({*start, *codes}):
            name = OTHER if code == OTHER_XID else str(code)
            yield m.GPU_XID_ERRORS_TOTAL, (*labels, name), codes[code].number if code in codes else 0
            if code in codes:
                yield m.GPU_XID_LAST_TIMESTAMP_SECONDS, (*labels, name), codes[code].last
        for error, number in self._counts.links.get(owner, {}).items():
            yield m.GPU_XID_NVLINK_ERRORS_TOTAL, (*labels, *error), number
        if owner in self._counts.recovery:
            yield m.GPU_XID_RECOVERY_ACTION_ID, labels, self._counts.recovery[owner]
        if owner in self._counts.uninitialized:
            yield m.GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS, labels, self._counts.uninitialized[owner]
        notices = self._counts.notices.get(owner, {})
        for name in sorted({*notices, *(self._watcher.notices if self._watcher is not None else ())}):
            yield m.GPU_DRIVER_EVENTS_TOTAL, (*labels, name), notices.get(name, 0)

    def _node(self) -> Iterator[Sample]:
        for (switch, sxid), count in self._counts.switches.items():
            yield m.NVLINK_SWITCH_SXID_ERRORS_TOTAL, (switch, sxid), count.number
            yield m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, (switch, sxid), count.last
        for sxid in sorted({sxid for _, sxid in self._counts.switches} & sxids().keys()):
            meaning = sxids()[sxid]
            labels = (sxid, meaning.name, meaning.category, meaning.severity, meaning.action)
            yield m.NVLINK_SWITCH_SXID_INFO, labels, 1
        if self._had_kernel_log:
            for name in kernel_lines.NODE_EVENTS:
                yield m.HOST_KERNEL_EVENTS_TOTAL, (name,), self._counts.node.get(name, 0)
        for pid, at in self._counts.killed.items():
            yield m.HOST_OOM_KILLED_TIMESTAMP_SECONDS, (str(pid),), at
        for source, error in self._up.items():
            yield m.FLOPWATCH_XID_SOURCE_UP, (source,), float(not error)
        if self._was_live:
            yield m.FLOPWATCH_KERNEL_LOG_LOST_TOTAL, (), self._kernel.lost


def _earlier_events(stored: Any) -> Iterator[tuple[tuple[str, int], float, list[str]]]:
    """Yield ((PCI address, Xid), Unix time, sources) of an earlier process's events, without invalid entries."""
    for item in stored if isinstance(stored, list) else ():
        with suppress(TypeError, ValueError, OverflowError):
            pci, code, at, sources = item
            yield (str(pci), int(code)), float(at), [str(source) for source in sources]


def build(kmsg: str, gpus: str, state: str, nvml: str = "", library: Any = None, strangers: str = "") -> Xid:
    """Return the Xid collector. It reads NVML's events through `library` (default: pynvml) unless `nvml` is empty.

    `strangers` is the time in seconds after which a GPU outside the inventory has series (default STRANGER_SECONDS).
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if nvml and library is None:
        try:
            library = import_module("pynvml")
        except ImportError as error:
            log.warning("no Xids from NVML: %s; install flopwatch[exporter]", error)
    watcher = Watcher(library) if nvml and library is not None else None
    if watcher is not None:
        watcher.start(NVML_PATIENCE)
    wait = float(strangers) if strangers else STRANGER_SECONDS
    return Xid(kmsg, Path(gpus), Path(state), boot_id, watcher=watcher, follow=True, stranger_seconds=wait)
