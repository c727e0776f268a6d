"""NVML of the simulated node: a replacement of the `pynvml` module.

Constants, structures and exceptions are those of the real package. A function that is not simulated raises
NVMLError_FunctionNotFound, as on a driver without it. Values are read from the files of the node when they change.
Answers are those of a captured H100 (tests/captures/SOURCES.md), and activity, traffic and processes follow the load.
"""

import ctypes
import functools
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml as real

from flopwatch.node.collectors.nvml.fields import ENTRY, Key
from flopwatch.node.collectors.xid import kernel_lines
from flopwatch.simulate import h100, lies, nvml_fields
from flopwatch.simulate.folder import JsonFile

VBIOS_VERSION = "96.00.A5.00.01"
HANG_POLL, EVENT_POLL = 0.02, 0.5  # seconds between two checks of a hung call, and between two looks for an event
# Share of each activity while the GPU is fully busy, by GPM metric; the tensor cores' fall with the clock.
ACTIVITIES = {1: 1.0, 2: 0.88, 3: 0.32, 4: 0.12, 10: 0.42, 11: 0.0, 12: 0.09, 13: 0.01, 8: 0.0, 9: 0.0}
TENSOR_ACTIVITIES = {5: 0.55, 7: 0.55}
MAX_CLOCKS = {real.NVML_CLOCK_VIDEO: h100.MAX_VIDEO_CLOCK, real.NVML_CLOCK_MEM: h100.MEMORY_CLOCK}
MIG_SLOTS, BAR1 = 7, 131072 * h100.MEBIBYTE

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Handle:
    """Replacement of an nvmlDevice_t: the GPU at position `index` on the board, or its MIG instance `slot`."""

    index: int
    slot: int | None = None


def call(function: "Callable[Concatenate[Simulation, P], T]") -> "Callable[Concatenate[Simulation, P], T]":
    """Make a method of Simulation an NVML call, which needs nvmlInit and fails or hangs as faults.json requires."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(library: "Simulation", /, *args: P.args, **kwargs: P.kwargs) -> T:
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
        for scope in ("*", str(gpu)) if name in faults["fail"] else ():
            if scope in faults["fail"][name]:
                raise real.NVMLError(faults["fail"][name][scope])
        if not library.initialized and name != "nvmlInit":
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        if gpu is not None:
            library.check(gpu, faults)
        if gpu == lies.SLOW_GPU and "slow_gpu" in library.lies:
            library.sleep(lies.SECONDS_PER_CALL)
        return function(library, *args, **kwargs)

    return wrapper


def _idle_video(nvml: "Simulation", handle: Handle) -> list[int]:
    nvml.require_whole(handle)
    return [0, 167_000]


class Simulation:
    """Replacement of pynvml with the functions that the collectors call. `order` has the GPU at each NVML index.

    `sleep` takes the seconds that slow calls cost.
    """

    def __init__(self, root: Path) -> None:
        self.faults = JsonFile(root / "faults.json", h100.no_faults())
        self.initialized = False
        self.calls = 0
        self.driver: str = self.faults.read()["driver"]
        self.order = list(range(h100.GPUS))
        self.sleep: Callable[[float], None] = time.sleep
        self.gpm_samples: dict[int, tuple[float, float, float]] = {}
        self._node = JsonFile(root / "node.json")
        self.kmsg = root / "kmsg"
        self._lost: set[int] = set()
        self._resets: dict[str, int] = {}
        self._numbers: dict[int, tuple[object, dict[Key, int]]] = {}
        self._last_sample = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        absent = functools.partial(_refuse, real.NVML_ERROR_FUNCTION_NOT_FOUND)
        return absent if isinstance(value, types.FunctionType) else value

    def check(self, gpu: int, faults: Mapping[str, Any]) -> None:
        """Raise NVMLError if a GPU was lost or reset since the last nvmlInit, or if a fault hides it."""
        key = str(gpu)
        if faults["lost"].get(key) or faults["resets"].get(key, 0) != self._resets.get(key, 0):
            self._lost.add(gpu)
        if gpu in self._lost:
            raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
        if key in faults["blind"]:
            raise real.NVMLError(faults["blind"][key])

    def gpu(self, handle: Handle) -> dict[str, Any]:
        """Return the state of a GPU in node.json."""
        gpu: dict[str, Any] = self._node.read()["gpus"][handle.index]
        return gpu

    def _fault(self, kind: str, handle: Handle, default: Any) -> Any:
        return self.faults.last[kind].get(str(handle.index), default)

    @property
    def lies(self) -> Mapping[str, Any]:
        """Return the names of the lies that are switched on."""
        switched: Mapping[str, Any] = self.faults.last["lies"]
        return switched

    def profiles(self, handle: Handle) -> list[str]:
        """Return the profiles of the MIG instances of a GPU, none if it is not partitioned."""
        profiles: list[str] = self._fault("mig", handle, [])
        return profiles

    def pcie(self, handle: Handle) -> dict[str, int]:
        """Return the width and the generation of the PCIe link of a GPU."""
        trained: dict[str, int] = self._fault("pcie", handle, {})
        return {"width": h100.PCIE_LANES, "generation": h100.PCIE_GENERATION} | trained

    def require_whole(self, handle: Handle) -> None:
        """Raise NVMLError if the GPU is partitioned into MIG instances."""
        if self.profiles(handle):
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)

    @call
    def nvmlInit(self) -> None:
        faults = self.faults.last
        if "slow_init" in self.lies:
            self.sleep(lies.INIT_SECONDS)
        self.initialized = True
        self.order = list(faults["order"])
        self._resets = dict(faults["resets"])
        self._lost.clear()

    @call
    def nvmlShutdown(self) -> None:
        self.initialized = False

    @call
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if index not in range(h100.GPUS):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(self.order[index])

    @call
    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        slice_uuid = f"MIG-51a70000-0000-4000-8{handle.index:03d}-{handle.slot or 0:012d}"
        return h100.uuid(handle.index) if handle.slot is None else slice_uuid

    @call
    def nvmlDeviceGetName(self, handle: Handle) -> str:
        model = "NVIDIA H100 80GB HBM3"
        return model if handle.slot is None else f"{model} MIG {self.profiles(handle)[handle.slot]}"

    # Load, memory, temperature, power, clocks.

    @call
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        self.require_whole(handle)
        utilization = self.gpu(handle)["utilization"]
        return real.c_nvmlUtilization_t(gpu=utilization, memory=utilization // 3)

    @call
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
        total, used, reserved = h100.MEMORY_TOTAL, self.gpu(handle)["memory_used"], h100.MEMORY_RESERVED
        if handle.slot is not None:
            total, used, reserved = total // 8, used // 8, reserved // 8
        free = total - used - reserved
        if version is None:
            return real.c_nvmlMemory_t(total=total, used=used + reserved, free=free)
        return real.c_nvmlMemory_v2_t(version=version, total=total, used=used, reserved=reserved, free=free)

    @call
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        used = self.gpu(handle)["memory_used"]
        process = {"pid": h100.pid(handle.index), "usedGpuMemory": used}
        process |= dict.fromkeys(("gpuInstanceId", "computeInstanceId"), 0xFFFFFFFF)
        processes = [] if used == 0 else [real.nvmlFriendlyObject(process)]
        return lies.garbled(processes) if "garbled_processes" in self.lies else processes

    @call
    def nvmlDeviceGetClockInfo(self, handle: Handle, clock: int) -> int:
        sm = int(self.gpu(handle)["clock"])
        if clock == real.NVML_CLOCK_VIDEO and sm == h100.IDLE_CLOCK:
            return h100.IDLE_VIDEO_CLOCK
        return MAX_CLOCKS.get(clock, sm)

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
        self.require_whole(handle)
        rows = self._fault("remap", handle, {})
        pending, failure = int(rows.get("pending", False)), int(rows.get("failure", False))
        return rows.get("corrected", 0), rows.get("uncorrected", 0), pending, failure

    @call
    def nvmlDeviceGetRowRemapperHistogram(self, handle: Handle) -> Any:
        self.require_whole(handle)
        remap = self._fault("remap", handle, {})
        used = remap.get("corrected", 0) + remap.get("uncorrected", 0)
        none = int(remap.get("failure", False))
        return real.c_nvmlRowRemapperHistogramValues(max=2560 - used - none, high=used, partial=0, low=0, none=none)

    def field_numbers(self, handle: Handle) -> dict[Key, int]:
        """Return a GPU's NVML fields by (field id, scope), where the scope of an NVLink field is its link."""
        gpu, faults = self.gpu(handle), self.faults.read()
        version = self._node.version, self.faults.version
        if handle.index not in self._numbers or self._numbers[handle.index][0] != version:
            numbers = nvml_fields.numbers(handle.index, gpu, faults)
            links = self.link_numbers(handle, gpu.get("busy_seconds", 0.0), faults)
            self._numbers[handle.index] = version, numbers | links
        return self._numbers[handle.index][1]

    def link_numbers(self, handle: Handle, busy: float, faults: Mapping[str, Any]) -> dict[Key, int]:
        """Return a GPU's NVLink fields by (field id, link), after so many seconds at full load (`busy`)."""
        return nvml_fields.of_links(handle.index, busy, faults)

    @call
    def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int | Key]) -> Any:
        numbers, lying = self.field_numbers(handle), self.lies
        values = (real.c_nvmlFieldValue_t * len(field_ids))()
        microseconds, latency = time.time_ns() // 1000, 0
        keys = [(field, 0) if isinstance(field, int) else field for field in field_ids]
        lies.check_mixed(lying, keys)
        if "slow_values" in lying:
            self.sleep(lies.SECONDS_PER_VALUE * len(keys))
            latency = int(1e6 * lies.SECONDS_PER_VALUE)
        for position, key in enumerate(keys):
            place = position * ENTRY.size
            if lies.unwritten(lying, key[0]):
                ENTRY.pack_into(values, place, *key, 0, 0, lies.DOUBLE, real.NVML_SUCCESS, bytes(8))
                continue
            number, status = numbers.get(key), real.NVML_SUCCESS
            if number is None:
                number, status = 0, real.NVML_ERROR_NOT_SUPPORTED
            kind = nvml_fields.TYPES.get(key[0], nvml_fields.UNSIGNED_LONG_LONG)
            number &= 0xFFFFFFFF if kind == nvml_fields.SIGNED_INT else 0xFFFFFFFFFFFFFFFF
            if "wrapping_bytes" in lying and key[0] in nvml_fields.PCIE_BYTES:
                number &= 0xFFFFFFFF
            kind = lies.DOUBLE if "double_types" in lying else kind
            ENTRY.pack_into(values, place, *key, microseconds, latency, kind, status, number.to_bytes(8, "little"))
        return values

    @call
    def nvmlDeviceGetGpuFabricInfoV(self, handle: Handle, info: Any) -> int:
        fabric = info._obj
        fabric.state, fabric.status, fabric.cliqueId = real.NVML_GPU_FABRIC_STATE_COMPLETED, real.NVML_SUCCESS, 0
        fabric.healthMask = 0x51AA  # no fault, a configuration that is right, a partition, a connection
        if fabric.version == real.nvmlGpuFabricInfo_v3:
            fabric.healthSummary = real.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
        return int(real.NVML_SUCCESS)

    @call
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        if "hidden_mig" in self.lies:
            raise real.NVMLError(real.NVML_ERROR_NO_PERMISSION)
        if index >= len(self.profiles(handle)):
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return Handle(handle.index, index)

    @call
    def nvmlGpmSampleAlloc(self) -> Any:
        self._last_sample += 1
        self.gpm_samples[self._last_sample] = (0.0, 0.0, 0.0)
        return ctypes.cast(ctypes.c_void_p(self._last_sample), real.c_nvmlGpmSample_t)

    @call
    def nvmlGpmSampleGet(self, handle: Handle, sample: Any) -> Any:
        self.require_whole(handle)
        return self._sample(handle, sample)

    @call
    def nvmlGpmMigSampleGet(self, handle: Handle, gpu_instance: int, sample: Any) -> Any:
        if gpu_instance - 7 not in range(len(self.profiles(handle))):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return self._sample(handle, sample)

    def _sample(self, handle: Handle, sample: Any) -> Any:
        gpu = self.gpu(handle)
        lies.check_gpm(self.lies, self._node.read()["time"])
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

    @call
    def nvmlEventSetWait_v2(self, events: nvml_fields.EventSet, milliseconds: int) -> types.SimpleNamespace:
        """Return the next Xid in the kernel log. Raises NVMLError after `milliseconds` without one."""
        until = time.monotonic() + milliseconds / 1000
        while True:
            faults = self.faults.read()  # before the log, because a GPU's Xid is logged before the GPU is lost
            line = b""
            with suppress(OSError), self.kmsg.open("rb") as log:  # the driver does not depend on the log
                log.seek(events.place)
                line = log.readline()
            if line.endswith(b"\n"):
                events.place += len(line)
                for event in kernel_lines.events(line.decode()):
                    index = h100.PCI_BUSES.index(int(event.pci.split(":")[1], 16))
                    if event.numbered and index in events.gpus:
                        kind = real.nvmlEventTypeXidCriticalError
                        # An nvmlEventData_t would need a pointer as device.
                        return types.SimpleNamespace(device=Handle(index), eventType=kind, eventData=event.xid)
                continue
            for index in events.gpus:
                self.check(index, faults)
            if time.monotonic() > until:
                raise real.NVMLError(real.NVML_ERROR_TIMEOUT)
            time.sleep(EVENT_POLL)


# Answers that need one expression: constants, and numbers of the state of a GPU in node.json or of its faults.
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlEventSetCreate": lambda nvml: nvml_fields.EventSet(nvml.kmsg.stat().st_size, set()),
    "nvmlDeviceRegisterEvents": lambda _, handle, types, events: events.gpus.add(handle.index),
    "nvmlEventSetFree": lambda _, events: events.gpus.clear(),
    "nvmlSystemGetDriverVersion": lambda nvml: nvml.driver,
    "nvmlDeviceGetCount": lambda _: h100.GPUS,
    "nvmlDeviceGetMaxClockInfo": lambda _, handle, clock: MAX_CLOCKS.get(clock, h100.MAX_CLOCK),
    "nvmlGpmSampleFree": lambda nvml, sample: nvml.gpm_samples.pop(_address(sample)),
    "nvmlDeviceGetEncoderUtilization": _idle_video,
    "nvmlDeviceGetDecoderUtilization": _idle_video,
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": lambda _, handle: _refuse(real.NVML_ERROR_NOT_SUPPORTED),
    "nvmlDeviceGetSerial": lambda _, handle: h100.serial(handle.index),
    "nvmlDeviceGetBoardPartNumber": lambda _, handle: "692-2G520-0200-000",
    "nvmlDeviceGetModuleId": lambda _, handle: handle.index + 1,
    "nvmlDeviceGetMinorNumber": lambda _, handle: handle.index,
    "nvmlDeviceGetVbiosVersion": lambda _, handle: VBIOS_VERSION,
    "nvmlDeviceGetInforomImageVersion": lambda _, handle: "G520.0200.00.05",
    "nvmlDeviceGetBAR1MemoryInfo": lambda _, handle: real.c_nvmlBAR1Memory_t(
        bar1Total=BAR1, bar1Free=BAR1 - h100.MEBIBYTE, bar1Used=h100.MEBIBYTE
    ),
    "nvmlDeviceGetGpuInstanceId": lambda _, handle: 7 + (handle.slot or 0),
    "nvmlDeviceGetPciInfo": lambda _, handle: nvml_fields.pci_info(handle.index),
    "nvmlDeviceGetPersistenceMode": lambda nvml, handle: int("no_persistence" not in nvml.lies),
    "nvmlDeviceGetEccMode": lambda nvml, handle: [int("no_ecc" not in nvml.lies)] * 2,
    "nvmlDeviceGetEnforcedPowerLimit": lambda _, handle: int(h100.POWER_LIMIT * 1000),
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda _, handle: int(h100.POWER_LIMIT * 1000),
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda _, handle: [200_000, int(h100.POWER_LIMIT * 1000)],
    "nvmlDeviceGetRepairStatus": lambda _, handle: [0, 0],
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda _, handle: h100.PCIE_GENERATION,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda _, handle: h100.PCIE_LANES,
    "nvmlDeviceGetMaxMigDeviceCount": lambda _, handle: MIG_SLOTS,
    "nvmlDeviceGetComputeInstanceId": lambda _, handle: 0,
    "nvmlDeviceGetSupportedEventTypes": lambda _, handle: int(real.nvmlEventTypeXidCriticalError),
    "nvmlGpmQueryDeviceSupport": lambda _, handle: real.c_nvmlGpmSupport_t(
        version=real.NVML_GPM_SUPPORT_VERSION, isSupportedDevice=1
    ),
    "nvmlDeviceGetPowerUsage": lambda nvml, handle: int(nvml.gpu(handle)["milliwatts"]),
    "nvmlDeviceGetTotalEnergyConsumption": lambda nvml, handle: int(nvml.gpu(handle)["millijoules"]),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda nvml, handle: int(nvml.gpu(handle)["events"]),
    "nvmlDeviceGetTemperatureV": lambda nvml, handle, sensor: round(nvml.gpu(handle)["celsius"]),
    "nvmlDeviceGetTemperature": lambda nvml, handle, sensor: round(nvml.gpu(handle)["celsius"]),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda nvml, handle: nvml.pcie(handle)["generation"],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda nvml, handle: nvml.pcie(handle)["width"],
    "nvmlDeviceGetMigMode": lambda nvml, handle: [int(bool(nvml.profiles(handle)))] * 2,
    "nvmlDeviceGetMarginTemperature": lambda nvml, handle: round(
        h100.SW_SLOWDOWN_CELSIUS - nvml.gpu(handle)["celsius"]
    ),
}
for _name, _function in ANSWERS.items():
    _function.__name__ = _name
    setattr(Simulation, _name, call(_function))


def _address(sample: Any) -> int:
    address = ctypes.cast(sample, ctypes.c_void_p).value
    assert address is not None
    return address


def _refuse(code: int, *_args: object, **_kwargs: object) -> None:
    raise real.NVMLError(code)
