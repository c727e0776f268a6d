"""Xids from NVML's event set, which needs no privilege.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlEvents.html. Events have no text, and one of a MIG instance names its
GPU only. An event with Xid 0 is a clock event (https://github.com/leptonai/gpud). 999 stands for an Xid that NVML does
not know. A thread waits for events, because NVML may hang and the reader must answer. After an error, and at intervals
while a GPU is missing, all GPUs are registered again. Events before and between registrations are lost.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from flopwatch.node.collectors.nvml.fields import identity
from flopwatch.node.collectors.xid.kernel_lines import pci_address

XID = 0x8
NOTICES = {0x4000: "unavailable", 0x8000: "recovery_action"}  # as in gpu_driver_events_total
UNKNOWN_XID = 999

WAIT_MILLISECONDS = 10_000
HANGING = 20.0  # seconds after which a wait that has not returned hangs
FIRST_BACKOFF, MAX_BACKOFF = 1.0, 60.0
MISSING_AGAIN = 60.0  # seconds between registrations of missing GPUs, after which a registration counts as good
UNSUPPORTED_AGAIN = 3600.0  # seconds between registrations where no GPU has events, as in WSL and on virtual GPUs
MAX_EVENTS = 10_000


class Device(NamedTuple):
    """GPU with its NVML index, uuid and PCI address."""

    gpu: str
    uuid: str
    pci: str


class NvmlEvent(NamedTuple):
    """Event of the GPU at a PCI address, at Unix time `at`: an Xid, or `xid` 0 and a notice such as `unavailable`."""

    pci: str
    at: float
    xid: int
    notice: str


class Watcher:
    """Reader of NVML's events of all GPUs from `start` on. `library` is the pynvml module."""

    def __init__(
        self, library: Any, clock: Callable[[], float] = time.time, first_backoff: float = FIRST_BACKOFF
    ) -> None:
        self._nvml = library
        self._clock, self._first_backoff = clock, first_backoff
        self._events: deque[NvmlEvent] = deque(maxlen=MAX_EVENTS)
        self._stopped = threading.Event()
        self._settled = threading.Event()
        self._thread: threading.Thread | None = None
        self._error = "not registered yet"
        self._absent = False
        self._alive_at = time.monotonic()
        self._handles: dict[object, Device] = {}
        self.devices: dict[str, Device] = {}  # by PCI address, of all GPUs ever registered
        self.notices: frozenset[str] = frozenset()  # those that the driver supports
        self.registered = False  # whether a registration ever succeeded in this process
        self.replaced = False  # whether the driver was replaced: only a new process can load the new one

    def start(self, timeout: float) -> None:
        """Register all GPUs in a thread. Return after success, failure or `timeout` seconds."""
        self._thread = threading.Thread(target=self._watch, name="NVML events", daemon=True)
        self._thread.start()
        self._settled.wait(timeout)

    def drain(self) -> list[NvmlEvent]:
        """Return the events since the last call, without waiting."""
        return [self._events.popleft() for _ in range(len(self._events))]

    @property
    def error(self) -> str:
        """Return why no events can arrive, or an empty text while NVML delivers events."""
        if self._thread is None or not self._thread.is_alive():
            return "its thread has ended"
        silent = time.monotonic() - self._alive_at
        if silent > HANGING and not self._error:
            return f"NVML has been hanging for {silent:.0f} s"
        return self._error

    @property
    def absent(self) -> bool:
        """Return whether no NVIDIA driver, or none with events, was found since this process started."""
        return not self.registered and self._absent

    def close(self) -> None:
        """Stop the thread, which releases the driver unless it waits for an event."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(0.1)  # not longer, because the end of this process releases the driver, too

    def _watch(self) -> None:
        nvml = self._nvml
        backoff = self._first_backoff
        while not self._stopped.is_set():
            began, events = time.monotonic(), None
            try:
                nvml.nvmlInit()
                events = nvml.nvmlEventSetCreate()
                missing = self._register(events)
                self._error, self._absent = "", False
                self._settled.set()
                self._wait(events, missing)
            except nvml.NVMLError as error:
                self._error = str(error)
                unsupported = error.value == nvml.NVML_ERROR_NOT_SUPPORTED
                loaded = error.value not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
                self._absent = unsupported or not loaded
                backoff = UNSUPPORTED_AGAIN if unsupported else backoff
                self.replaced = self.registered and error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
            for release, arguments in ((nvml.nvmlEventSetFree, (events,)), (nvml.nvmlShutdown, ())):
                with suppress(nvml.NVMLError):
                    if arguments != (None,):
                        release(*arguments)
            self._settled.set()
            self._alive_at = time.monotonic()
            if time.monotonic() - began > MISSING_AGAIN:
                backoff = self._first_backoff
            if self._error:
                self._stopped.wait(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF)

    def _register(self, events: Any) -> bool:
        """Register every GPU that has events and return whether some failed. Raises NVMLError if none is registered."""
        nvml = self._nvml
        handles: dict[object, Device] = {}
        failure: Exception | None = None
        unsupported: Exception | None = None
        notices = 0
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                pci = pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId)
                device = Device(str(index), nvml.nvmlDeviceGetUUID(handle), pci)
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle) & (XID | sum(NOTICES))
                if supported == 0:
                    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
                nvml.nvmlDeviceRegisterEvents(handle, supported, events)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    failure = error
                else:
                    unsupported = error
                continue
            handles[identity(handle)] = self.devices[device.pci] = device
            notices |= supported
        if not handles:
            raise failure or unsupported or nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
        self._handles = handles
        self.notices = frozenset(name for bit, name in NOTICES.items() if notices & bit)
        self.registered = True
        return failure is not None

    def _wait(self, events: Any, missing: bool) -> None:
        """Queue events until `close`, or until `missing` GPUs are due for registration. Raises NVMLError."""
        nvml = self._nvml
        again = time.monotonic() + MISSING_AGAIN
        while not self._stopped.is_set() and not (missing and time.monotonic() > again):
            self._alive_at = time.monotonic()
            try:
                data = nvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    raise
                continue
            self._take(data)

    def _take(self, data: Any) -> None:
        device, nvml = self._handles.get(identity(data.device)), self._nvml
        if device is None:  # a MIG instance
            with suppress(nvml.NVMLError):
                parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(data.device)
                device = self._handles.get(identity(parent))
        if device is None:
            return
        if data.eventType == XID:
            if data.eventData != 0:
                self._events.append(NvmlEvent(device.pci, self._clock(), int(data.eventData), ""))
        elif data.eventType in NOTICES:
            self._events.append(NvmlEvent(device.pci, self._clock(), 0, NOTICES[data.eventType]))
