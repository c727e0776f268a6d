"""GPUs through NVML (`pynvml`, package nvidia-ml-py): https://docs.nvidia.com/deploy/nvml-api/.

Missing on some hardware: memory temperature without HBM; ECC, energy and clock-event seconds on consumer cards;
utilisation in MIG mode. What a card does not have is no sample. Most numbers come in one batched
nvmlDeviceGetFieldValues per GPU, where every value carries its own status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.catalogue import (
    GPU_CLOCK_EVENT,
    GPU_CLOCK_EVENT_SECONDS,
    GPU_ECC_ERRORS,
    GPU_ENERGY,
    GPU_INFO,
    GPU_MEMORY_CLOCK,
    GPU_MEMORY_TEMPERATURE,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_PRESENT,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_UTILIZATION,
    Metric,
    Sample,
)
from flopwatch.node.collectors import Inventory, StartAfresh, Unsupported

# After a reset or a driver reload NVML answers again only after nvmlShutdown and nvmlInit. Beside a GPU that stays dead
# that is work for nothing: first after so many seconds, then twice as long each time, up to the longest.
REINITIALIZE_AFTER, REINITIALIZE_AT_LEAST_EVERY = 15.0, 240.0

# nvmlReturn_t of a GPU that does not answer any more: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED.
GONE = (15, 16)

# nvmlFieldValue_t ids, by number: the names differ between releases of pynvml.
FIELDS: dict[int, tuple[Metric, tuple[str, ...]]] = {
    82: (GPU_MEMORY_TEMPERATURE, ()),
    83: (GPU_ENERGY, ()),
    74: (GPU_CLOCK_EVENT_SECONDS, ("sw_power_cap",)),
    76: (GPU_CLOCK_EVENT_SECONDS, ("sync_boost",)),
    269: (GPU_CLOCK_EVENT_SECONDS, ("sw_thermal_slowdown",)),
    270: (GPU_CLOCK_EVENT_SECONDS, ("hw_thermal_slowdown",)),
    271: (GPU_CLOCK_EVENT_SECONDS, ("hw_power_brake_slowdown",)),
    3: (GPU_ECC_ERRORS, ("corrected",)),
    4: (GPU_ECC_ERRORS, ("uncorrected",)),
}

# nvmlClocksEventReason*, with the names nvidia-smi uses.
CLOCK_EVENTS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

# nvmlValueType_t is the index of the member of nvmlValue_t that holds the number.
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# Rows, their labels after (gpu, uuid), and NVML's own numbers.
Values = Iterator[tuple[Metric, tuple[str, ...], float]]


def known(number: float) -> bool:
    """Return whether NVML has this number; all ones, in 32 or 64 bits, is its "not available"."""
    return number not in (2**32 - 1, 2**64 - 1)


class Nvml:
    """The GPUs of this node.

    `library` is the pynvml module, `inventory` the file that remembers this node's GPUs and gives other sources the
    uuid behind a PCI address, `source` the label of gpu_info (nvml, or simulated).
    """

    name = "nvml"

    def __init__(
        self,
        library: Any,
        host: str,
        inventory: Path,
        source: str = "nvml",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = library
        self._host = host
        self._source = source
        self._clock = clock
        self._inventory = Inventory(inventory, GPU_INFO)
        self._initialized_at: float | None = None
        self._patience = REINITIALIZE_AFTER
        self._suspect = False
        self._identities: dict[str, dict[str, str]] = {}

    def read(self) -> list[Sample]:
        """Return what every GPU says, and gpu_present 0 for those of the inventory that say nothing."""
        nvml = self._nvml
        try:
            return self._read()
        except nvml.NVMLError as error:
            self._suspect = True
            if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                raise StartAfresh(f"the driver was replaced under this process: {error}") from error
            raise

    def _read(self) -> list[Sample]:
        nvml = self._nvml
        answers: dict[str, list[Sample]] = {}
        found: dict[str, dict[str, str]] = {}
        blocked: dict[str, Exception] = {}
        for index in range(self._count()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                identity = self._identity(handle, str(index))
                found[identity["uuid"]] = identity
                answers[identity["uuid"]] = self._gpu(handle, (identity["gpu"], identity["uuid"]))
            except nvml.NVMLError as error:
                self._suspect = True
                if error.value not in GONE:
                    blocked[str(index)] = error
        # No device file, a lost cgroup: then we are blind, which says nothing about the GPU.
        if blocked and not answers:
            raise next(iter(blocked.values()))
        self._forget_replaced(found)
        self._inventory.update(found)
        if not self._inventory.parts:
            raise Unsupported("NVML finds no GPU")
        samples = self._inventory.info()
        for uuid, part in self._inventory.parts.items():
            if uuid in answers or part["gpu"] not in blocked:
                samples.append((GPU_PRESENT, (part["gpu"], uuid), float(uuid in answers)))
            samples += answers.get(uuid, [])
        return samples

    def _count(self) -> int:
        """Return how many GPUs NVML sees, after initialising it where that is due."""
        nvml = self._nvml
        now = self._clock()
        if self._initialized_at is not None and not self._suspect:
            self._patience = REINITIALIZE_AFTER
        elif self._initialized_at is not None and now - self._initialized_at >= self._patience:
            self._initialized_at = None
            self._patience = min(2 * self._patience, REINITIALIZE_AT_LEAST_EVERY)
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        try:
            if self._initialized_at is None:
                nvml.nvmlInit()
                self._initialized_at, self._suspect = now, False
                self._identities.clear()
            return int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED and self._inventory.parts:
                self._initialized_at = None
                return 0
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise Unsupported(str(error)) from error
            raise

    def _identity(self, handle: Any, index: str) -> dict[str, str]:
        """Return the gpu_info labels of one GPU; all but the uuid are read once per initialisation."""
        nvml = self._nvml
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if uuid not in self._identities or self._identities[uuid]["gpu"] != index:
            self._identities[uuid] = {
                "gpu": index,
                "uuid": uuid,
                "host": self._host,
                "model": self._text(nvml.nvmlDeviceGetName, handle),
                "pci_bus_id": self._text(lambda handle: nvml.nvmlDeviceGetPciInfo(handle).busId, handle),
                "serial": self._text(nvml.nvmlDeviceGetSerial, handle),
                "driver_version": self._text(nvml.nvmlSystemGetDriverVersion),
                "vbios_version": self._text(nvml.nvmlDeviceGetVbiosVersion, handle),
                "source": self._source,
            }
        return self._identities[uuid]

    def _text(self, call: Callable[..., str], *arguments: Any) -> str:
        """Return a text, empty where the card has none."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            return ""

    def _gpu(self, handle: Any, labels: tuple[str, str]) -> list[Sample]:
        """Return one GPU's samples; raises if the GPU is gone or not a single field could be read."""
        samples: list[Sample] = []
        failure: Exception | None = None
        for read in READS:
            try:
                for row, extra, number in read(self._nvml, handle):
                    if known(number):
                        samples.append((row, (*labels, *extra), number))
            except self._nvml.NVMLError as error:
                if error.value in GONE:
                    raise
                failure = error
        if not samples and failure is not None:
            raise failure
        return samples

    def _forget_replaced(self, found: dict[str, dict[str, str]]) -> None:
        """Drop missing GPUs whose slot a GPU new to this node is in; a known one there was only renumbered."""
        parts = self._inventory.parts
        newcomers = {identity["pci_bus_id"] for uuid, identity in found.items() if uuid not in parts} - {""}
        for uuid in [uuid for uuid, part in parts.items() if part["pci_bus_id"] in newcomers]:
            del parts[uuid]


# Each of these is one call, the unit that a card may not support: an NVMLError leaves it and costs its values alone.


def _fields(nvml: Any, gpu: Any) -> Values:
    for field in nvml.nvmlDeviceGetFieldValues(gpu, list(FIELDS)):
        if field.nvmlReturn in GONE:
            raise nvml.NVMLError(field.nvmlReturn)
        if field.nvmlReturn == nvml.NVML_SUCCESS and 0 <= field.valueType < len(VALUE_MEMBERS):
            yield *FIELDS[field.fieldId], getattr(field.value, VALUE_MEMBERS[field.valueType])


def _memory(nvml: Any, gpu: Any) -> Values:
    # Version 2 keeps the driver's reserve out of `used`.
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    yield GPU_MEMORY_USED, (), memory.used
    yield GPU_MEMORY_TOTAL, (), memory.total


def _clock_events(nvml: Any, gpu: Any) -> Values:
    supported = nvml.nvmlDeviceGetSupportedClocksEventReasons(gpu)
    active = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    for bit, reason in CLOCK_EVENTS.items():
        if supported & bit:
            yield GPU_CLOCK_EVENT, (reason,), float(bool(active & bit))


def _value(row: Metric, call: Callable[[Any, Any], float]) -> Callable[[Any, Any], Values]:
    return lambda nvml, gpu: iter([(row, (), call(nvml, gpu))])


READS: tuple[Callable[[Any, Any], Values], ...] = (
    _fields,
    _memory,
    _clock_events,
    _value(GPU_UTILIZATION, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    _value(GPU_TEMPERATURE, lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    _value(GPU_POWER, lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu)),
    _value(GPU_POWER_LIMIT, lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)),
    _value(GPU_SM_CLOCK, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    _value(GPU_SM_CLOCK_MAX, lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
    _value(GPU_MEMORY_CLOCK, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
)


def build(host: str, inventory: str, simulated: str = "") -> Nvml:
    """Return the collector of this machine's GPUs, or of the simulated node's in the folder `simulated`."""
    if simulated:
        from flopwatch.simulate import pynvml as simulation

        return Nvml(simulation.load(Path(simulated)), host, Path(inventory), "simulated")
    try:
        import pynvml
    except ImportError as error:
        raise Unsupported(f"{error}; install flopwatch[exporter]") from error
    return Nvml(pynvml, host, Path(inventory))
