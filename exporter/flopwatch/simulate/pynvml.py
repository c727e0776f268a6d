"""NVML of the simulated node: an object to be used in place of the `pynvml` module.

Constants, structures and exceptions are the real package's; a function that is not simulated raises
NVMLError_FunctionNotFound, as on a driver that does not have it. Values come from the node's files, read again when
they change, so that faults show at once, whichever process set them. What an H100 answers is that of a captured one
(tests/captures/SOURCES.md); activity, traffic and processes follow the load.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import struct
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml as real

from flopwatch.node.collectors import xid
from flopwatch.node.collectors.nvml.fields import ALL_LINKS, Key
from flopwatch.simulate import h100

VBIOS_VERSION = "96.00.A5.00.01"
HANG_POLL = 0.02  # seconds after which a hung call looks whether the hang is over

# nvmlFieldValue_t: id, scope, timestamp, latency, type, return, value.
FIELD_VALUE = struct.Struct("=IIqqIIQ")
UNSIGNED_INT, UNSIGNED_LONG_LONG, SIGNED_INT = 1, 3, 5
FIELD_TYPES = {
    82: UNSIGNED_INT,
    91: UNSIGNED_INT,
    164: UNSIGNED_INT,
    165: UNSIGNED_INT,
    166: UNSIGNED_INT,
    230: UNSIGNED_INT,
    193: SIGNED_INT,
    194: SIGNED_INT,
    195: SIGNED_INT,
    196: SIGNED_INT,
}
# Share of each activity while the GPU is fully busy, by GPM metric; the tensor cores' fall with the clock.
ACTIVITIES = {1: 1.0, 2: 0.88, 3: 0.32, 4: 0.12, 10: 0.42, 11: 0.0, 12: 0.09, 13: 0.01, 8: 0.0, 9: 0.0}
TENSOR_ACTIVITIES = {5: 0.55, 7: 0.55}
MIG_SLOTS = 7

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Handle:
    """What stands for an nvmlDevice_t: a GPU by its place on the board, or one of its MIG instances."""

    index: int
    slot: int | None = None


def call(function: Callable[Concatenate[Simulation, P], T]) -> Callable[Concatenate[Simulation, P], T]:
    """Make a method an NVML call, which can hang or fail, needs nvmlInit, and fails for a GPU that is lost."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(library: Simulation, /, *args: P.args, **kwargs: P.kwargs) -> T:
        faults = library.faults.read()
        while faults["hang"] == name:
            time.sleep(HANG_POLL)
            faults = library.faults.read()
        library.calls += 1
        if faults["driver"] != library.driver:
            raise real.NVMLError(real.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        target = args[0] if args else None
        gpu = target.index if isinstance(target, Handle) else None
        if name == "nvmlDeviceGetHandleByIndex" and isinstance(target, int) and target in range(h100.GPUS):
            gpu = library.order[target]
        for whom in ("*", str(gpu)) if name in faults["fail"] else ():
            if whom in faults["fail"][name]:
                raise real.NVMLError(faults["fail"][name][whom])
        if not library.initialized and name != "nvmlInit":
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        if gpu is not None:
            library.check(gpu, faults)
        return function(library, *args, **kwargs)

    return wrapper


@dataclass(slots=True)
class EventSet:
    """What stands for an nvmlEventSet_t: the GPUs registered, and the end of the kernel log read so far."""

    place: int
    gpus: set[int]


@dataclass(frozen=True, slots=True)
class EventData:
    """What stands for an nvmlEventData_t, whose device would have to be a pointer."""

    device: Handle
    eventType: int
    eventData: int
    gpuInstanceId: int = 0xFFFFFFFF
    computeInstanceId: int = 0xFFFFFFFF


class _JsonFile:
    """A JSON file that another process replaces now and then; `version` changes with it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self.version: tuple[int, int] | None = None
        self._value: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return what is in the file now."""
        status = os.stat(self._path)
        version = (status.st_ino, status.st_mtime_ns)
        if version != self.version:
            self._value, self.version = json.loads(Path(self._path).read_bytes()), version
        return self._value


class _Faults(_JsonFile):
    """The node's faults; what an older release did not know of is no fault."""

    def read(self) -> dict[str, Any]:
        version = self.version
        value = super().read()
        if self.version != version:
            self._value = value = h100.no_faults() | value
        return value


class Simulation:
    """The functions of pynvml that the collector may call, under their own names; `calls` counts them.

    `order` is the GPUs by NVML index, as of the last nvmlInit.
    """

    def __init__(self, root: Path) -> None:
        self.faults: _JsonFile = _Faults(root / "faults.json")
        self.initialized = False
        self.calls = 0
        self.driver: str = self.faults.read()["driver"]
        self.order = list(range(h100.GPUS))
        self.gpm_samples: dict[int, tuple[float, float, float]] = {}
        self._node = _JsonFile(root / "node.json")
        self._kmsg = root / "kmsg"
        self._lost: set[int] = set()
        self._resets: dict[str, int] = {}
        self._numbers: dict[int, tuple[object, dict[Key, int]]] = {}
        self._last_sample = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        return _function_not_found if isinstance(value, types.FunctionType) else value

    def check(self, gpu: int, faults: Mapping[str, Any]) -> None:
        """Raise if the GPU is lost; once lost or reset it stays so until the next nvmlInit, as on the real driver."""
        key = str(gpu)
        if faults["lost"].get(key) or faults["resets"].get(key, 0) != self._resets.get(key, 0):
            self._lost.add(gpu)
        if gpu in self._lost:
            raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
        if key in faults["blind"]:
            raise real.NVMLError(faults["blind"][key])

    def _gpu(self, handle: Handle) -> dict[str, Any]:
        gpu: dict[str, Any] = self._node.read()["gpus"][handle.index]
        return gpu

    def _fault(self, kind: str, handle: Handle, default: Any) -> Any:
        return self.faults.read()[kind].get(str(handle.index), default)

    def _profiles(self, handle: Handle) -> list[str]:
        """Return the profiles of a GPU's MIG instances; empty if it is not partitioned."""
        profiles: list[str] = self._fault("mig", handle, [])
        return profiles

    def _whole(self, handle: Handle) -> None:
        """Raise if the GPU is partitioned."""
        if self._profiles(handle):
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)

    # The session.

    @call
    def nvmlInit(self) -> None:
        faults = self.faults.read()
        self.initialized = True
        self.order = list(faults["order"])
        self._resets = dict(faults["resets"])
        self._lost.clear()

    @call
    def nvmlShutdown(self) -> None:
        self.initialized = False

    @call
    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    @call
    def nvmlDeviceGetCount(self) -> int:
        return h100.GPUS

    @call
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if index not in range(h100.GPUS):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(self.order[index])

    # Identity.

    @call
    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        if handle.slot is not None:
            return f"MIG-51a70000-0000-4000-8{handle.index:03d}-{handle.slot:012d}"
        return h100.uuid(handle.index)

    @call
    def nvmlDeviceGetName(self, handle: Handle) -> str:
        model = "NVIDIA H100 80GB HBM3"
        return model if handle.slot is None else f"{model} MIG {self._profiles(handle)[handle.slot]}"

    @call
    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        return h100.serial(handle.index)

    @call
    def nvmlDeviceGetBoardPartNumber(self, handle: Handle) -> str:
        return "692-2G520-0200-000"

    @call
    def nvmlDeviceGetModuleId(self, handle: Handle) -> int:
        return handle.index + 1

    @call
    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        return handle.index

    @call
    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        return VBIOS_VERSION

    @call
    def nvmlDeviceGetInforomImageVersion(self, handle: Handle) -> str:
        return "G520.0200.00.05"

    @call
    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        bus = h100.PCI_BUSES[handle.index]
        return real.nvmlPciInfo_t(
            busIdLegacy=f"0000:{bus:02X}:00.0".encode(),
            bus=bus,
            pciDeviceId=0x233010DE,
            pciSubSystemId=0x16C110DE,
            busId=f"00000000:{bus:02X}:00.0".encode(),
        )

    @call
    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int:
        return 1

    @call
    def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
        return [1, 1]

    # Load, memory, temperature, power, clocks.

    @call
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        self._whole(handle)
        utilization = self._gpu(handle)["utilization"]
        return real.c_nvmlUtilization_t(gpu=utilization, memory=utilization // 3)

    @call
    def nvmlDeviceGetEncoderUtilization(self, handle: Handle) -> list[int]:
        self._whole(handle)
        return [0, 167_000]

    @call
    def nvmlDeviceGetDecoderUtilization(self, handle: Handle) -> list[int]:
        self._whole(handle)
        return [0, 167_000]

    @call
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
        total, used, reserved = h100.MEMORY_TOTAL, self._gpu(handle)["memory_used"], h100.MEMORY_RESERVED
        if handle.slot is not None:
            total, used, reserved = total // 8, used // 8, reserved // 8
        if version is None:
            return real.c_nvmlMemory_t(total=total, used=used + reserved, free=total - used - reserved)
        return real.c_nvmlMemory_v2_t(
            version=version, total=total, used=used, reserved=reserved, free=total - used - reserved
        )

    @call
    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Handle) -> Any:
        total, used = 131072 * h100.MEBIBYTE, h100.MEBIBYTE
        return real.c_nvmlBAR1Memory_t(bar1Total=total, bar1Free=total - used, bar1Used=used)

    @call
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        used = self._gpu(handle)["memory_used"]
        none = 0xFFFFFFFF
        return (
            []
            if used == 0
            else [
                real.nvmlFriendlyObject(
                    {
                        "pid": h100.pid(handle.index),
                        "usedGpuMemory": used,
                        "gpuInstanceId": none,
                        "computeInstanceId": none,
                    }
                )
            ]
        )

    @call
    def nvmlDeviceGetTemperatureV(self, handle: Handle, sensor: int) -> int:
        return round(float(self._gpu(handle)["celsius"]))

    @call
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        return round(float(self._gpu(handle)["celsius"]))

    @call
    def nvmlDeviceGetMarginTemperature(self, handle: Handle) -> int:
        return round(h100.SW_SLOWDOWN_CELSIUS - float(self._gpu(handle)["celsius"]))

    @call
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return int(self._gpu(handle)["milliwatts"])

    @call
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        return int(self._gpu(handle)["millijoules"])

    @call
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        return int(h100.POWER_LIMIT * 1000)

    @call
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int:
        return int(h100.POWER_LIMIT * 1000)

    @call
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Handle) -> list[int]:
        return [200_000, int(h100.POWER_LIMIT * 1000)]

    @call
    def nvmlDeviceGetClockInfo(self, handle: Handle, clock: int) -> int:
        sm = int(self._gpu(handle)["clock"])
        if clock == real.NVML_CLOCK_VIDEO:
            return h100.IDLE_VIDEO_CLOCK if sm == h100.IDLE_CLOCK else h100.MAX_VIDEO_CLOCK
        return h100.MEMORY_CLOCK if clock == real.NVML_CLOCK_MEM else sm

    @call
    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, clock: int) -> int:
        if clock == real.NVML_CLOCK_VIDEO:
            return h100.MAX_VIDEO_CLOCK
        return h100.MEMORY_CLOCK if clock == real.NVML_CLOCK_MEM else h100.MAX_CLOCK

    @call
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        return int(self._gpu(handle)["events"])

    # Memory errors and PCIe.

    @call
    def nvmlDeviceGetMemoryErrorCounter(self, handle: Handle, error: int, counter: int, location: int) -> int:
        if location not in (real.NVML_MEMORY_LOCATION_DRAM, real.NVML_MEMORY_LOCATION_SRAM):
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        name = "uncorrected" if error == real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else "corrected"
        errors: int = self._fault("ecc", handle, {}).get(name, 0)
        return errors if location == real.NVML_MEMORY_LOCATION_DRAM else 0

    @call
    def nvmlDeviceGetSramEccErrorStatus(self, handle: Handle, status: Any) -> int:
        status._obj.bThresholdExceeded = 0
        return int(real.NVML_SUCCESS)

    @call
    def nvmlDeviceGetRemappedRows(self, handle: Handle) -> tuple[int, int, int, int]:
        self._whole(handle)
        rows = self._fault("remap", handle, {})
        return (
            rows.get("corrected", 0),
            rows.get("uncorrected", 0),
            int(rows.get("pending", False)),
            int(rows.get("failure", False)),
        )

    @call
    def nvmlDeviceGetRowRemapperHistogram(self, handle: Handle) -> Any:
        self._whole(handle)
        remap = self._fault("remap", handle, {})
        used = remap.get("corrected", 0) + remap.get("uncorrected", 0)
        none = int(remap.get("failure", False))
        return real.c_nvmlRowRemapperHistogramValues(max=2560 - used - none, high=used, partial=0, low=0, none=none)

    @call
    def nvmlDeviceGetRepairStatus(self, handle: Handle) -> list[int]:
        return [0, 0]

    @call
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle) -> int:
        generation: int = self._fault("pcie", handle, {}).get("generation", h100.PCIE_GENERATION)
        return generation

    @call
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle) -> int:
        return h100.PCIE_GENERATION

    @call
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle) -> int:
        width: int = self._fault("pcie", handle, {}).get("width", h100.PCIE_LANES)
        return width

    @call
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle) -> int:
        return h100.PCIE_LANES

    # Fields.

    def field_numbers(self, handle: Handle) -> dict[Key, int]:
        """Return the fields this GPU has, by id and scope."""
        gpu, faults = self._gpu(handle), self.faults.read()
        version = self._node.version, self.faults.version
        if handle.index in self._numbers and self._numbers[handle.index][0] == version:
            return self._numbers[handle.index][1]
        held, busy = gpu["event_nanoseconds"], gpu.get("busy_seconds", 0.0)
        ecc = self._fault("ecc", handle, {})
        corrected, uncorrected = ecc.get("corrected", 0), ecc.get("uncorrected", 0)
        numbers = {
            (82, 0): gpu["memory_celsius"],
            (83, 0): gpu["millijoules"],
            (74, 0): held["sw_power_cap"],
            (76, 0): held["sync_boost"],
            (269, 0): held["sw_thermal_slowdown"],
            (270, 0): held["hw_thermal_slowdown"],
            (271, 0): held["hw_power_brake_slowdown"],
            (3, 0): corrected,
            (4, 0): uncorrected,
            (5, 0): ecc.get("corrected_before", 0) + corrected,
            (6, 0): ecc.get("uncorrected_before", 0) + uncorrected,
            (193, 0): -8,
            (194, 0): -2,
            (195, 0): 0,
            (196, 0): 0,
            (230, 0): self._fault("recovery", handle, 0),
            (94, 0): 9,
            (95, 0): 0,
            (169, 0): 0,
            **{(field, 0): 0 for field in range(173, 184)},
            (197, 0): int(busy * h100.PCIE_RATE),
            (198, 0): int(busy * h100.PCIE_RATE),
        }
        if not self._profiles(handle):
            remap = self._fault("remap", handle, {})
            numbers |= {
                (142, 0): remap.get("corrected", 0),
                (143, 0): remap.get("uncorrected", 0),
                (144, 0): int(remap.get("pending", False)),
                (145, 0): int(remap.get("failure", False)),
            }
        numbers |= self.link_numbers(handle, busy, faults)
        self._numbers[handle.index] = version, numbers
        return numbers

    def link_numbers(self, handle: Handle, busy: float, faults: Mapping[str, Any]) -> dict[Key, int]:
        """Return the fields of the NVLinks and of all of them together."""
        down = faults["nvlink_down"].get(str(handle.index), [])
        errors = faults["nvlink_errors"].get(str(handle.index), {})
        kibibytes = int(busy * h100.NVLINK_RATE / 1024)
        numbers = {(91, 0): h100.NVLINKS, (138, ALL_LINKS): kibibytes, (139, ALL_LINKS): kibibytes}
        numbers |= {(field, ALL_LINKS): kibibytes * 17 // 16 for field in (140, 141)}  # a header per 256 bytes
        for link in range(h100.NVLINKS):
            up = link not in down
            numbers[165, link], numbers[166, link] = int(up), real.NVML_NVLINK_VERSION_4_0
            numbers[164, link] = h100.NVLINK_SPEED if up else 0
            counts = errors.get(str(link), {})
            for field, kind in h100.NVLINK_ERRORS.items():
                numbers[field, link] = counts.get(kind, 0)
        return numbers

    @call
    def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
        numbers = self.field_numbers(handle)
        values = (real.c_nvmlFieldValue_t * len(field_ids))()
        microseconds = time.time_ns() // 1000
        for position, field in enumerate(field_ids):
            key = (field, 0) if isinstance(field, int) else field
            number, kind, status = numbers.get(key), FIELD_TYPES.get(key[0], UNSIGNED_LONG_LONG), real.NVML_SUCCESS
            if number is None:
                number, status = 0, real.NVML_ERROR_NOT_SUPPORTED
            FIELD_VALUE.pack_into(
                values,
                position * FIELD_VALUE.size,
                *key,
                microseconds,
                1,
                kind,
                status,
                number & (0xFFFFFFFF if kind == SIGNED_INT else 0xFFFFFFFFFFFFFFFF),
            )
        return values

    # The fabric.

    @call
    def nvmlDeviceGetGpuFabricInfoV(self, handle: Handle, info: Any) -> int:
        fabric = info._obj
        fabric.state, fabric.status, fabric.cliqueId = real.NVML_GPU_FABRIC_STATE_COMPLETED, real.NVML_SUCCESS, 0
        fabric.healthMask = 0x51AA  # no fault, a configuration that is right, a partition, a connection
        if fabric.version == real.nvmlGpuFabricInfo_v3:
            fabric.healthSummary = real.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
        return int(real.NVML_SUCCESS)

    # MIG.

    @call
    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        mode = int(bool(self._profiles(handle)))
        return [mode, mode]

    @call
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return MIG_SLOTS

    @call
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        if index >= len(self._profiles(handle)):
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return Handle(handle.index, index)

    @call
    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        assert handle.slot is not None
        return 7 + handle.slot

    @call
    def nvmlDeviceGetComputeInstanceId(self, handle: Handle) -> int:
        return 0

    # Activity.

    @call
    def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> Any:
        return real.c_nvmlGpmSupport_t(version=real.NVML_GPM_SUPPORT_VERSION, isSupportedDevice=1)

    @call
    def nvmlGpmSampleAlloc(self) -> Any:
        self._last_sample += 1
        self.gpm_samples[self._last_sample] = (0.0, 0.0, 0.0)
        return ctypes.cast(ctypes.c_void_p(self._last_sample), real.c_nvmlGpmSample_t)

    @call
    def nvmlGpmSampleFree(self, sample: Any) -> None:
        del self.gpm_samples[_address(sample)]

    @call
    def nvmlGpmSampleGet(self, handle: Handle, sample: Any) -> Any:
        self._whole(handle)
        return self._sample(handle, sample)

    @call
    def nvmlGpmMigSampleGet(self, handle: Handle, gpu_instance: int, sample: Any) -> Any:
        if gpu_instance - 7 not in range(len(self._profiles(handle))):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return self._sample(handle, sample)

    def _sample(self, handle: Handle, sample: Any) -> Any:
        gpu = self._gpu(handle)
        busy, tensor = gpu.get("busy_seconds", 0.0), gpu.get("tensor_seconds", 0.0)
        if self._fault("profiler", handle, False):
            busy = tensor = math.nan
        self.gpm_samples[_address(sample)] = (self._node.read()["time"], busy, tensor)
        return sample

    @call
    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        before, after = (self.gpm_samples[_address(sample)] for sample in (request.sample1, request.sample2))
        seconds = after[0] - before[0]
        busy, tensor = ((after[part] - before[part]) / seconds if seconds > 0 else 0.0 for part in (1, 2))
        means = {metric: 100 * share * busy for metric, share in ACTIVITIES.items()}
        means |= {metric: 100 * share * tensor for metric, share in TENSOR_ACTIVITIES.items()}
        means |= dict.fromkeys((20, 21), busy * h100.PCIE_RATE / h100.MEBIBYTE)
        means |= dict.fromkeys((60, 61), busy * h100.NVLINK_RATE / h100.MEBIBYTE)
        for index in range(request.numMetrics):
            metric = request.metrics[index]
            metric.nvmlReturn = real.NVML_SUCCESS if metric.metricId in means else real.NVML_ERROR_NOT_SUPPORTED
            metric.value = means.get(metric.metricId, 0.0)
        return request

    # Events.

    @call
    def nvmlEventSetCreate(self) -> EventSet:
        return EventSet(self._kmsg.stat().st_size, set())

    @call
    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        return int(real.nvmlEventTypeXidCriticalError)

    @call
    def nvmlDeviceRegisterEvents(self, handle: Handle, types: int, events: EventSet) -> None:
        events.gpus.add(handle.index)

    @call
    def nvmlEventSetWait_v2(self, events: EventSet, milliseconds: int) -> EventData:
        """Return the next Xid that was written into the kernel log, as the driver tells both of it."""
        until = time.monotonic() + milliseconds / 1000
        while True:
            line = b""
            with suppress(OSError), self._kmsg.open("rb") as log:  # a log nobody can read stops no driver
                log.seek(events.place)
                line = log.readline()
            if line.endswith(b"\n"):
                events.place += len(line)
                for event in xid.events(line.decode()):
                    index = h100.PCI_BUSES.index(int(event.pci.split(":")[1], 16))
                    if event.numbered and index in events.gpus:
                        return EventData(Handle(index), real.nvmlEventTypeXidCriticalError, event.xid)
                continue
            for index in events.gpus:
                self.check(index, self.faults.read())
            if time.monotonic() > until:
                raise real.NVMLError(real.NVML_ERROR_TIMEOUT)
            time.sleep(HANG_POLL)

    @call
    def nvmlEventSetFree(self, events: EventSet) -> None:
        events.gpus.clear()


def _address(sample: Any) -> int:
    address = ctypes.cast(sample, ctypes.c_void_p).value
    assert address is not None
    return address


def _function_not_found(*_args: object, **_kwargs: object) -> None:
    raise real.NVMLError(real.NVML_ERROR_FUNCTION_NOT_FOUND)


def load(root: Path) -> Simulation:
    """Return what stands for the pynvml module on the simulated node in `root`."""
    return Simulation(root)
