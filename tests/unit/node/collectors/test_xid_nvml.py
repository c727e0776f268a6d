"""Xids from NVML's events: with the kernel log, without it, and when the driver loses events, hangs or is unloaded."""

from __future__ import annotations

import ctypes
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from flopwatch.catalogue import (
    FLOPWATCH_XID_SOURCE_UP,
    GPU_DRIVER_EVENTS_TOTAL,
    GPU_INFO,
    GPU_XID_ERRORS_TOTAL,
    Metric,
    Sample,
)
from flopwatch.node.collectors import RestartReader, Unsupported
from flopwatch.node.collectors.xid import Xid, nvml_events
from flopwatch.node.collectors.xid.counts import MAX_CODES
from flopwatch.node.collectors.xid.nvml_events import NvmlEvent, Watcher
from flopwatch.simulate.pynvml import Simulation
from flopwatch.simulate.sources import xid as simulated
from simulator.host import SimulatedNode
from tests.support.machine import PATIENCE, until

NOW = 1_700_000_000.0
XID, UNAVAILABLE, RECOVERY_ACTION = 0x8, 0x4000, 0x8000


class Library:
    """An NVML with GPUs at these addresses whose events a test puts into `happens`; an exception there is raised."""

    def __init__(self, addresses: tuple[str, ...] = ("53", "64"), refused: dict[str, int] | None = None) -> None:
        self.addresses = addresses
        self.refused = refused or {}  # error by address
        self.absent = 0  # error of nvmlInit
        self.happens: queue.Queue[Any] = queue.Queue()
        self.waits = 0
        self.inits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self.inits += 1
        if self.absent:
            raise pynvml.NVMLError(self.absent)

    def nvmlShutdown(self) -> None: ...

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.addresses)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self.addresses[index] in self.refused:
            raise pynvml.NVMLError(self.refused[self.addresses[index]])
        return handle(self.addresses[index])

    def nvmlDeviceGetPciInfo(self, gpu: Any) -> Any:
        return pynvml.nvmlPciInfo_t(busId=f"00000000:{address(gpu)}:00.0".encode())

    def nvmlDeviceGetUUID(self, gpu: Any) -> str:
        return f"GPU-{address(gpu)}"

    def nvmlDeviceGetSupportedEventTypes(self, gpu: Any) -> int:
        return XID | UNAVAILABLE | RECOVERY_ACTION

    def nvmlDeviceRegisterEvents(self, gpu: Any, types: int, events: object) -> None: ...

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: Any) -> Any:
        if ctypes.cast(instance, ctypes.c_void_p).value != 0x999:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return handle("64")

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Any:
        self.waits += 1
        try:
            happened = self.happens.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        if isinstance(happened, Exception):
            raise happened
        return happened

    def tell(self, *happened: Any) -> None:
        """Let these happen, and return when they have been taken: when the next one is waited for."""
        for one in happened:
            self.happens.put(one)
        until(self.happens.empty)
        waits = self.waits
        until(lambda: self.waits > waits)


def handle(bus: str) -> Any:
    """Return a pointer as pynvml does, another object for each answer."""
    return ctypes.cast(ctypes.c_void_p(int(bus, 16)), pynvml.c_nvmlDevice_t)


def address(gpu: Any) -> str:
    return f"{ctypes.cast(gpu, ctypes.c_void_p).value:02x}"


def event(bus: str, xid: int, kind: int = XID) -> Any:
    return pynvml.c_nvmlEventData_t(device=handle(bus), eventType=kind, eventData=xid)


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def watch(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Watcher]]:
    monkeypatch.setattr(nvml_events, "WAIT_MILLISECONDS", 50)
    watchers: list[Watcher] = []

    def started() -> Watcher:
        watchers.append(Watcher(library, clock=lambda: NOW, first_backoff=0.01))
        watchers[-1].start(PATIENCE)
        return watchers[-1]

    yield started
    for watcher in watchers:
        watcher.close()


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """Return an inventory of the GPUs at 0000:53:00 and 0000:64:00."""
    (tmp_path / "gpus.json").write_text(
        json.dumps(
            {
                f"GPU-{bus}": dict.fromkeys(GPU_INFO.labels, "")
                | {"gpu": gpu, "uuid": f"GPU-{bus}", "pci_bus_id": f"00000000:{bus}:00.0"}
                for gpu, bus in (("0", "53"), ("1", "64"))
            }
        )
    )
    return tmp_path / "gpus.json"


def collector(gpus: Path, watcher: Watcher | None, kmsg: str = "kmsg") -> Xid:
    return Xid(
        gpus.parent / kmsg, gpus, gpus.parent / "xid.json", "boot1", lambda: NOW, watcher=watcher, clock=lambda: NOW
    )


def line(bus: str, xid: int, second: int = 0) -> str:
    return f"4,{second},{second}000000,-;NVRM: Xid (PCI:0000:{bus}:00): {xid}, pid=1, name=x, text\n"


def counted(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(labels[1], labels[2]): value for row, labels, value in samples if row is GPU_XID_ERRORS_TOTAL and value}


def values(samples: list[Sample], wanted: Metric) -> dict[tuple[str, ...], float]:
    return {labels: value for row, labels, value in samples if row is wanted}


def test_xids_and_notices_are_reported_and_clock_events_and_strangers_are_not(
    library: Library, watch: Callable[[], Watcher]
) -> None:
    watcher = watch()
    instance, stranger = event("999", 13), event("777", 13)
    library.tell(
        event("53", 79),
        event("53", 0),
        event("64", 94),
        instance,
        stranger,
        event("53", 0, UNAVAILABLE),
        event("64", 0, RECOVERY_ACTION),
        event("64", 0, 0x10),
    )
    assert watcher.drain() == [
        NvmlEvent("0000:53:00", NOW, 79, ""),
        NvmlEvent("0000:64:00", NOW, 94, ""),
        NvmlEvent("0000:64:00", NOW, 13, ""),
        NvmlEvent("0000:53:00", NOW, 0, "unavailable"),
        NvmlEvent("0000:64:00", NOW, 0, "recovery_action"),
    ]
    assert watcher.drain() == []
    assert watcher.error == ""


@pytest.mark.parametrize("kernel_first", [True, False])
def test_an_xid_from_both_sources_is_one(
    library: Library, watch: Callable[[], Watcher], gpus: Path, kernel_first: bool
) -> None:
    """The kernel log has three, NVML reports two of them and another one of its own."""
    kmsg = gpus.parent / "kmsg"
    reader = collector(gpus, watch())
    kmsg.write_text("")
    for kernel in (kernel_first, not kernel_first):
        if kernel:
            kmsg.write_text(line("53", 13) + line("53", 13, 1) + line("53", 13, 2))
        else:
            library.tell(event("53", 13), event("53", 13), event("64", 94))
        samples = reader.read()
    assert counted(samples) == {("GPU-53", "13"): 3, ("GPU-64", "94"): 1}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1, ("nvml",): 1}


def test_each_of_many_codes_from_both_sources_is_one(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    codes = range(1000, 1000 + 2 * MAX_CODES)
    (gpus.parent / "kmsg").write_text("".join(line("53", code) for code in codes))
    reader = collector(gpus, watch())
    library.tell(*(event("53", code) for code in codes))
    read = counted(reader.read())
    assert read.pop(("GPU-53", "other")) == MAX_CODES
    assert read == {("GPU-53", str(code)): 1 for code in codes[:MAX_CODES]}


def test_an_xid_from_nvml_and_after_a_restart_from_the_kernel_log_is_one(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    kmsg = gpus.parent / "kmsg"
    kmsg.write_text("")
    reader = collector(gpus, watch())
    library.tell(event("53", 79))
    assert counted(reader.read()) == {("GPU-53", "79"): 1}
    kmsg.write_text(line("53", 79, 1))
    assert counted(collector(gpus, watch()).read()) == {("GPU-53", "79"): 1}


def test_without_the_kernel_log_nvml_counts_alone_and_knows_its_gpus_itself(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    gpus.unlink()  # as if it could not be written
    reader = collector(gpus, watch())
    library.tell(event("53", 79), event("64", nvml_events.UNKNOWN_XID), event("64", 0, UNAVAILABLE))
    samples = reader.read()
    assert counted(samples) == {("GPU-53", "79"): 1, ("GPU-64", "999"): 1}
    assert {labels[:2] for row, labels, _ in samples if row is GPU_XID_ERRORS_TOTAL} == {
        ("0", "GPU-53"),
        ("1", "GPU-64"),
    }
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0, ("nvml",): 1}
    assert values(samples, GPU_DRIVER_EVENTS_TOTAL) == {
        ("0", "GPU-53", "unavailable"): 0,
        ("0", "GPU-53", "recovery_action"): 0,
        ("1", "GPU-64", "unavailable"): 1,
        ("1", "GPU-64", "recovery_action"): 0,
    }


def test_an_xid_without_a_number_is_left_to_the_kernel_log(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    (gpus.parent / "kmsg").write_text(line("53", 172))
    reader = collector(gpus, watch())
    library.tell(event("53", nvml_events.UNKNOWN_XID))
    assert counted(reader.read()) == {("GPU-53", "172"): 1}


def test_after_a_driver_reload_events_go_on_under_the_new_indices(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    reader = collector(gpus, watcher := watch())
    library.tell(event("53", 79))
    library.absent = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    library.happens.put(pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN))
    until(lambda: library.inits >= 3)
    samples = reader.read()
    assert counted(samples) == {("GPU-53", "79"): 1}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0, ("nvml",): 0}
    library.addresses, library.absent = ("64", "53"), 0
    until(lambda: watcher.error == "")
    library.tell(event("53", 79))
    samples = reader.read()
    assert counted(samples) == {("GPU-53", "79"): 2}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0, ("nvml",): 1}


def test_a_lost_gpu_does_not_silence_the_others(library: Library, watch: Callable[[], Watcher], gpus: Path) -> None:
    reader = collector(gpus, watcher := watch())
    library.refused["53"] = pynvml.NVML_ERROR_GPU_IS_LOST
    library.tell(event("53", 79), pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    until(lambda: library.inits == 2 and watcher.error == "")
    library.tell(event("64", 48))
    assert counted(reader.read()) == {("GPU-53", "79"): 1, ("GPU-64", "48"): 1}


def test_a_missing_gpu_is_looked_for_again(
    library: Library, watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_events, "MISSING_AGAIN", 0.05)
    monkeypatch.setattr(nvml_events, "WAIT_MILLISECONDS", 10)
    library.refused["53"] = pynvml.NVML_ERROR_GPU_IS_LOST
    watcher = watch()
    assert [*watcher.devices] == ["0000:64:00"]
    library.refused.clear()
    until(lambda: "0000:53:00" in watcher.devices)
    library.tell(event("53", 79))
    assert watcher.drain() == [NvmlEvent("0000:53:00", NOW, 79, "")]


def test_a_hanging_nvml_does_not_keep_the_reader(
    library: Library, watch: Callable[[], Watcher], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpus.parent / "kmsg").write_text(line("53", 79))
    release = threading.Event()
    hangs = threading.Event()

    def hang(_events: object, _milliseconds: int) -> Any:
        hangs.set()
        release.wait(PATIENCE)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    library.__dict__["nvmlEventSetWait_v2"] = hang
    monkeypatch.setattr(nvml_events, "HANGING", 0.05)
    watcher = watch()
    assert hangs.wait(PATIENCE)
    until(lambda: watcher.error.startswith("NVML has been hanging for"))
    try:
        samples = collector(gpus, watcher).read()
    finally:
        release.set()
    assert counted(samples) == {("GPU-53", "79"): 1}
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1, ("nvml",): 0}


def test_a_first_call_that_hangs_is_waited_for_only_so_long(library: Library, gpus: Path) -> None:
    release = threading.Event()
    library.__dict__["nvmlInit"] = lambda: release.wait(PATIENCE)
    watcher = Watcher(library)
    watcher.start(0.01)
    try:
        samples = collector(gpus, watcher).read()
    finally:
        release.set()
        watcher.close()
    # The node has GPUs, so this is no node without a source.
    assert values(samples, FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0, ("nvml",): 0}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_reported(library: Library, watch: Callable[[], Watcher], gpus: Path) -> None:
    (gpus.parent / "kmsg").write_text("")
    reader = collector(gpus, watcher := watch())
    assert values(reader.read(), FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1, ("nvml",): 1}
    library.happens.put(TypeError("a new pynvml"))
    until(lambda: watcher.error != "")
    assert watcher.error == "its thread has ended"
    assert values(reader.read(), FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1, ("nvml",): 0}


def test_without_kernel_log_and_driver_the_source_does_not_exist(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    library.absent = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    watcher = watch()
    with pytest.raises(Unsupported, match=r"kernel_log: .*No such file.*; nvml: NVML Shared Library Not Found"):
        collector(gpus, watcher).read()


@pytest.mark.parametrize("refusal", ["no events", "no registration"])
def test_gpus_without_events_are_no_source_and_nvml_is_not_initialised_each_minute(
    refusal: str, library: Library, watch: Callable[[], Watcher], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    if refusal == "no events":
        monkeypatch.setattr(library, "nvmlDeviceGetSupportedEventTypes", lambda _: 0x10)
    else:
        monkeypatch.setattr(library, "nvmlDeviceRegisterEvents", unsupported)
    watcher = watch()
    assert watcher.absent
    with pytest.raises(Unsupported, match="nvml: Not Supported"):
        collector(gpus, watcher).read()
    time.sleep(0.2)  # twenty times the first backoff
    assert library.inits == 1


def test_a_gpu_without_events_does_not_silence_the_others(
    library: Library, watch: Callable[[], Watcher], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "nvmlDeviceGetSupportedEventTypes", lambda gpu: XID * (address(gpu) == "64"))
    reader = collector(gpus, watch())
    library.tell(event("64", 48))
    assert counted(reader.read()) == {("GPU-64", "48"): 1}


def test_a_driver_replaced_underneath_asks_for_another_process_but_a_wrong_library_does_not(
    library: Library, watch: Callable[[], Watcher], gpus: Path
) -> None:
    (gpus.parent / "kmsg").write_text(line("53", 79))
    reader = collector(gpus, watcher := watch())
    library.absent = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    library.happens.put(event("64", 48))
    library.happens.put(pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    until(lambda: watcher.replaced)
    with pytest.raises(RestartReader, match="replaced under this process"):
        reader.read()
    # The new process, should it find the same library still: the kernel log goes on.
    assert counted(collector(gpus, watch()).read()) == {("GPU-53", "79"): 1, ("GPU-64", "48"): 1}


def test_an_xid_of_the_simulated_node_is_one_although_its_nvml_reports_it_too(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path / "simulated")
    node.create()
    arguments = {
        "kmsg": str(node.kmsg),
        "gpus": str(tmp_path / "gpus.json"),
        "state": str(tmp_path / "xid.json"),
        "root": str(node.root),
        "nvml": "events",
    }
    reader = simulated(**arguments)
    base = simulated(**arguments | {"kmsg": str(tmp_path / "none"), "state": str(tmp_path / "base.json")})
    try:
        assert counted(reader.read()) == counted(base.read()) == {}
        until(lambda: values(base.read(), FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 0, ("nvml",): 1})
        node.xid(5, 94)
        node.xid(5, 94)
        node.xid(6, 79)
        wanted = {(node.uuid(5), "94"): 2.0, (node.uuid(6), "79"): 1.0}
        until(lambda: counted(base.read()) == wanted)
        assert counted(reader.read()) == wanted
        until(lambda: values(reader.read(), FLOPWATCH_XID_SOURCE_UP) == {("kernel_log",): 1, ("nvml",): 1})
        assert counted(reader.read()) == wanted
    finally:
        reader.close()
        base.close()


def test_a_simulated_gpu_that_falls_off_the_bus_is_lost_after_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SimulatedNode(tmp_path)
    node.create()
    nvml = Simulation(node.root)
    nvml.nvmlInit()
    events = nvml.nvmlEventSetCreate()
    gpu = nvml.nvmlDeviceGetHandleByIndex(6)
    nvml.nvmlDeviceRegisterEvents(gpu, XID, events)
    read, reads = nvml.faults.read, [0]

    def falls_before_the_second_read() -> Any:
        reads[0] += 1
        if reads[0] == 2:
            node.xid(6, 79)
        return read()

    monkeypatch.setattr(nvml.faults, "read", falls_before_the_second_read)  # the first is the call's own
    assert nvml.nvmlEventSetWait_v2(events, 0).eventData == 79
    with pytest.raises(pynvml.NVMLError, match="lost"):
        nvml.nvmlEventSetWait_v2(events, 0)
