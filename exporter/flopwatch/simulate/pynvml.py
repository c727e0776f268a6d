"""NVML of the simulated node: an object to be used in place of the `pynvml` module.

Constants, structures and exceptions are the real package's; a function that is not simulated raises
NVMLError_FunctionNotFound, as on a driver that does not have it. Values come from the node's files, read again when
they change, so that faults show at once, whichever process set them.
"""

from __future__ import annotations

import functools
import json
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml as real

from flopwatch.simulate import node

DRIVER_VERSION = "590.48.01"
VBIOS_VERSION = "96.00.A5.00.01"
HANG_POLL = 0.02  # seconds after which a hung call looks whether the hang is over

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Handle:
    """What stands for an nvmlDevice_t."""

    index: int


def call(function: Callable[Concatenate[Simulation, P], T]) -> Callable[Concatenate[Simulation, P], T]:
    """Make a method an NVML call, which can hang, needs nvmlInit, and fails for a GPU that is lost."""

    @functools.wraps(function)
    def wrapper(library: Simulation, /, *args: P.args, **kwargs: P.kwargs) -> T:
        while library.faults.read()["hang"] == function.__name__:
            time.sleep(HANG_POLL)
        if not library.initialized and function.__name__ != "nvmlInit":
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        if args and isinstance(args[0], Handle):
            library.check(args[0].index)
        return function(library, *args, **kwargs)

    return wrapper


class _JsonFile:
    """A JSON file that another process replaces now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._value: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return what is in the file now."""
        status = self._path.stat()
        version = (status.st_ino, status.st_mtime_ns)
        if version != self._version:
            self._value, self._version = json.loads(self._path.read_bytes()), version
        return self._value


class Simulation:
    """The functions of pynvml that the collector may call, under their own names."""

    def __init__(self, root: Path) -> None:
        self.faults = _JsonFile(root / "faults.json")
        self.initialized = False
        self._node = _JsonFile(root / "node.json")
        self._lost: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        return _function_not_found if isinstance(value, types.FunctionType) else value

    def check(self, index: int) -> None:
        """Raise if the GPU is lost; once lost it stays so until the next nvmlInit, as on the real driver."""
        if self.faults.read()["lost"].get(str(index)):
            self._lost.add(index)
        if index in self._lost:
            raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)

    def _gpu(self, handle: Handle) -> dict[str, Any]:
        gpu: dict[str, Any] = self._node.read()["gpus"][handle.index]
        return gpu

    @call
    def nvmlInit(self) -> None:
        self.initialized = True
        self._lost.clear()

    @call
    def nvmlShutdown(self) -> None:
        self.initialized = False

    @call
    def nvmlSystemGetDriverVersion(self) -> str:
        return DRIVER_VERSION

    @call
    def nvmlDeviceGetCount(self) -> int:
        return node.GPUS

    @call
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if index not in range(node.GPUS):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        self.check(index)
        return Handle(index)

    @call
    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return node.SimulatedNode.uuid(handle.index)

    @call
    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return "NVIDIA H100 80GB HBM3"

    @call
    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        return node.serial(handle.index)

    @call
    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        return VBIOS_VERSION

    @call
    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        bus = node.PCI_BUSES[handle.index]
        return real.nvmlPciInfo_t(
            busIdLegacy=f"0000:{bus:02X}:00.0".encode(), bus=bus, pciDeviceId=0x233010DE, pciSubSystemId=0x16C110DE,
            busId=f"00000000:{bus:02X}:00.0".encode(),
        )

    @call
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        utilization = self._gpu(handle)["utilization"]
        return real.c_nvmlUtilization_t(gpu=utilization, memory=utilization // 3)

    @call
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
        total, used, reserved = node.MEMORY_TOTAL, self._gpu(handle)["memory_used"], node.MEMORY_RESERVED
        if version is None:
            return real.c_nvmlMemory_t(total=total, used=used + reserved, free=total - used - reserved)
        return real.c_nvmlMemory_v2_t(
            version=version, total=total, used=used, reserved=reserved, free=total - used - reserved
        )

    @call
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        return round(float(self._gpu(handle)["celsius"]))

    @call
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return int(self._gpu(handle)["milliwatts"])

    @call
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        return int(node.POWER_LIMIT * 1000)

    @call
    def nvmlDeviceGetClockInfo(self, handle: Handle, clock: int) -> int:
        return node.MEMORY_CLOCK if clock == real.NVML_CLOCK_MEM else int(self._gpu(handle)["clock"])

    @call
    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, clock: int) -> int:
        return node.MEMORY_CLOCK if clock == real.NVML_CLOCK_MEM else node.MAX_CLOCK

    @call
    def nvmlDeviceGetSupportedClocksEventReasons(self, handle: Handle) -> int:
        return 0x1FF

    @call
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        return int(self._gpu(handle)["events"])

    @call
    def nvmlDeviceGetFieldValues(self, handle: Handle, field_ids: Sequence[int]) -> Any:
        gpu = self._gpu(handle)
        held = gpu["event_nanoseconds"]
        ecc = self.faults.read()["ecc"].get(str(handle.index), {"corrected": 0, "uncorrected": 0})
        numbers = {
            real.NVML_FI_DEV_ECC_SBE_VOL_TOTAL: ecc["corrected"],
            real.NVML_FI_DEV_ECC_DBE_VOL_TOTAL: ecc["uncorrected"],
            real.NVML_FI_DEV_MEMORY_TEMP: gpu["memory_celsius"],
            real.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: gpu["millijoules"],
            real.NVML_FI_DEV_PERF_POLICY_POWER: held["sw_power_cap"],
            real.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST: held["sync_boost"],
            real.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: held["sw_thermal_slowdown"],
            real.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: held["hw_thermal_slowdown"],
            real.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: held["hw_power_brake_slowdown"],
        }
        values = (real.c_nvmlFieldValue_t * len(field_ids))()
        for value, field_id in zip(values, field_ids, strict=True):
            value.fieldId = field_id
            value.timestamp = time.time_ns() // 1000
            if field_id not in numbers:
                value.nvmlReturn = real.NVML_ERROR_NOT_SUPPORTED
            elif field_id == real.NVML_FI_DEV_MEMORY_TEMP:
                value.valueType, value.value.uiVal = real.NVML_VALUE_TYPE_UNSIGNED_INT, numbers[field_id]
            else:
                value.valueType, value.value.ullVal = real.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, numbers[field_id]
        return values


def _function_not_found(*_args: object, **_kwargs: object) -> None:
    raise real.NVMLError(real.NVML_ERROR_FUNCTION_NOT_FOUND)


def load(root: Path) -> Simulation:
    """Return what stands for the pynvml module on the simulated node in `root`."""
    return Simulation(root)
