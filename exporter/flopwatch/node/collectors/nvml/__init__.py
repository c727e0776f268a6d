"""GPUs through NVML (`pynvml`, package nvidia-ml-py): https://docs.nvidia.com/deploy/nvml-api/.

`card.py` reads one GPU. nvmlDeviceGetPcieThroughput is never called, because it blocks for 20 ms per direction.

A GPU of the inventory that does not answer has one of three causes. The GPU failed (gpu_present 0): NVML reports it
lost or in need of a reset, or it fails (off the bus: with error 999) while other GPUs answer. This process lacks access
(gpu_readable 0): the device file cannot be opened (`access.py`), no GPU answers and none is lost, or the library is
missing. The driver is not loaded (gpu_driver_loaded 0), as NVML and /proc show.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.collectors import AccessLost, Inventory, RestartReader, StateFile, Unsupported, read_runtime
from flopwatch.node.collectors.nvml import access
from flopwatch.node.collectors.nvml.card import (
    GONE,
    LACKING,
    OVER,
    REPLACED,
    UNINITIALIZED,
    Cost,
    NvmlCard,
    Past,
    code_of,
)
from flopwatch.node.collectors.nvml.fields import NvmlLibrary
from flopwatch.node.collectors.nvml.reads import READS

# Seconds until NVML is initialized again, without which a reset GPU stays silent. Doubled each time up to the maximum.
# No initialization follows another before ten times its duration: without persistence mode it takes up to 40 s.
REINITIALIZE_AFTER, REINITIALIZE_AT_LEAST_EVERY, INITIALIZING_SHARE = 15.0, 240.0, 10

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12  # nvmlReturn_t

log = logging.getLogger(__name__)


class Nvml:
    """Collector of this host's GPUs through `library`, the pynvml module.

    `inventory` is the file of all GPUs ever seen. `source` is the label of gpu_info (nvml, or simulated). `runtime` is
    the file of each GPU's MIG instances, processes and links that were once up.
    """

    name = "nvml"

    def __init__(
        self,
        library: NvmlLibrary,
        host: str,
        inventory: Path,
        source: str = "nvml",
        clock: Callable[[], float] = time.monotonic,
        runtime: Path | None = None,
        sysfs: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
    ) -> None:
        self._nvml = library
        self._host, self._source, self._clock = host, source, clock
        self._inventory = Inventory(inventory, m.GPU_INFO)
        self._runtime = None if runtime is None else StateFile(runtime)
        self._stored = {} if runtime is None else read_runtime(runtime)
        self._sysfs, self._proc, self._dev = sysfs, proc, dev
        self._initialized_at: float | None = None
        self._initialized_in = 0.0  # seconds
        self._reinitialize_after = REINITIALIZE_AFTER
        self._suspect = False
        self._cards: dict[int, NvmlCard] = {}
        self._past: defaultdict[str, Past] = defaultdict(Past)
        self._minors: dict[str, int] = {}  # minor number of each GPU's device file, where NVML reports it
        self._cost = Cost()
        self._first = 0  # NVML index of the GPU that is read first
        self._reported: set[tuple[str, str]] = set()

    def read(self) -> list[Sample]:
        """Return the samples of all GPUs. Raises RestartReader, AccessLost, Unsupported or NVMLError."""
        try:
            return self._read()
        except self._nvml.NVMLError as error:
            self._suspect = True
            if error.value == REPLACED:
                raise RestartReader(f"the driver was replaced under this process: {error}") from error
            if error.value == UNINITIALIZED:
                raise
            raise AccessLost(f"the driver does not answer this process:  {error}", self._unreadable()) from error

    def close(self) -> None:
        """Free the handles of all GPUs and the samples of their meters, and end NVML's session with the driver."""
        for card in self._cards.values():
            card.stop_meters()
        self._cards.clear()
        if self._initialized_at is not None:
            self._initialized_at = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _read(self) -> list[Sample]:
        count = self._count()
        if count is None:
            return [*self._unreadable(), (m.GPU_DRIVER_LOADED, (), 0)]
        answers: dict[str, list[Sample]] = {}
        found: dict[str, dict[str, str]] = {}
        errors: dict[str, Exception] = {}
        waiting: list[int] = []
        self._cost.seldom, self._cost.until = 0.0, self._clock() + self._cost.budget
        turns = [*range(self._first, count), *range(min(self._first, count))]
        for index in sorted(turns, key=lambda index: index in self._cards and self._cards[index].slow > 0):
            try:
                card = self._card(index)
                found[card.identity["uuid"]] = card.identity
                answers[card.identity["uuid"]] = card.read()
                if card.waits:
                    waiting.append(index)
                if card.slow:
                    labels = card.identity["gpu"], card.identity["uuid"]
                    answers[labels[1]].append((m.FLOPWATCH_NVML_SLOW_GPU_SECONDS, labels, card.slow))
            except Exception as error:
                # An error of one GPU, or of pynvml itself, must not cost the other GPUs.
                if code_of(self._nvml, error) in OVER:
                    raise
                if code_of(self._nvml, error) is None:
                    self._report(f"GPU {index}", error)
                errors[str(index)] = error
        self._first = waiting[0] if waiting else 0
        # A GPU new to this host is in the PCI slot of a missing one, and replaces it.
        parts = self._inventory.parts
        newcomers = {identity["pci_bus_id"] for uuid, identity in found.items() if uuid not in parts} - {""}
        for uuid in [uuid for uuid, part in parts.items() if part["pci_bus_id"] in newcomers]:
            del parts[uuid]
        self._inventory.update({**found, **self._renumbered(count, found)})
        self._store(answers)
        if count == 0 and not self._inventory.parts:
            raise Unsupported("NVML finds no GPU")
        # A missing GPU or a restored device file is seen only after the next initialization.
        self._suspect = self._suspect or bool(errors) or answers.keys() != self._inventory.parts.keys()
        samples = [*self._inventory.info(), (m.GPU_DRIVER_LOADED, (), 1), *self._samples(count, answers, errors)]
        if not any(row is m.GPU_PRESENT for row, _, _ in samples):
            reason = next(iter(errors.values()), "no GPU's device file can be opened")
            raise AccessLost(f"no GPU answers this process:  {reason}", samples)
        latencies = self._cost.latencies
        if any(latencies.values()):
            samples += [
                (m.FLOPWATCH_NVML_FIELD_LATENCY_SECONDS_TOTAL, (table,), latencies[table]) for table in latencies
            ]
        return samples

    def _samples(self, count: int, answers: dict[str, list[Sample]], errors: dict[str, Exception]) -> list[Sample]:
        samples: list[Sample] = []
        unnamed = {str(index) for index in range(count)}

        def silent(gpu: str, uuid: str, pci_bus_id: str) -> Sample:
            withheld = self._withheld(uuid, pci_bus_id, errors.get(gpu), bool(answers))
            return m.GPU_READABLE if withheld else m.GPU_PRESENT, (gpu, uuid), 0

        for uuid, part in self._inventory.parts.items():
            labels = part["gpu"], uuid
            unnamed.discard(part["gpu"])
            if uuid in answers:
                samples += [(m.GPU_PRESENT, labels, 1), (m.GPU_READABLE, labels, 1)]
                samples += answers[uuid]
            else:
                samples.append(silent(part["gpu"], uuid, part["pci_bus_id"]))
        return samples + [silent(gpu, "", "") for gpu in sorted(unnamed, key=int)]  # no uuid was ever read

    def _renumbered(self, count: int, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Return missing GPUs whose index another GPU now has, each under a free index that gives no answer."""
        taken = {identity["gpu"] for identity in found.values()}
        missing = {uuid: part for uuid, part in self._inventory.parts.items() if uuid not in found}
        named = taken | {part["gpu"] for part in missing.values()}
        silent = [gpu for gpu in map(str, range(count)) if gpu not in named]
        displaced = [uuid for uuid, part in missing.items() if part["gpu"] in taken]
        displaced.sort(key=lambda uuid: missing[uuid]["pci_bus_id"])
        if len(silent) != len(displaced):
            return {}
        return {uuid: {**missing[uuid], "gpu": gpu} for uuid, gpu in zip(displaced, silent, strict=True)}

    def _withheld(self, uuid: str, pci_bus_id: str, error: Exception | None, others: bool) -> bool:
        """Return whether a GPU may be silent because this process lacks access. `others`: other GPUs answer."""
        code = None if error is None else code_of(self._nvml, error)
        if code in GONE:
            return False
        if error is not None and (code is None or not others):
            return True
        return access.denied(pci_bus_id, self._minors.get(uuid), self._proc, self._dev)

    def _unreadable(self) -> list[Sample]:
        """Return gpu_info and gpu_readable 0 of every GPU in the inventory, for a read in which no GPU answers."""
        parts = self._inventory.parts
        return self._inventory.info() + [(m.GPU_READABLE, (part["gpu"], uuid), 0) for uuid, part in parts.items()]

    def _report(self, what: str, error: Exception) -> None:
        """Log an error that costs samples, once for each `what` and type of error."""
        kind = what, type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s cannot be read", what, exc_info=error)

    def _store(self, answers: dict[str, list[Sample]]) -> None:
        """Write MIG instances, pids and links for other collectors. A GPU without answer keeps its last ones."""
        for card in self._cards.values():
            if card.identity["uuid"] in answers:
                self._stored[card.identity["uuid"]] = {
                    "mig": card.mig or [],
                    "pids": card.past.pids,
                    "links": sorted(card.past.links.once_up),
                }
        self._stored = {uuid: self._stored[uuid] for uuid in self._inventory.parts if uuid in self._stored}
        if self._runtime is not None:
            self._runtime.save(self._stored)

    def _count(self) -> int | None:
        """Return the number of GPUs, or None if no driver is loaded. Initialize NVML first when that is due."""
        nvml = self._nvml
        now = self._clock()
        if self._initialized_at is not None and not self._suspect:
            self._reinitialize_after = REINITIALIZE_AFTER
        elif self._initialized_at is not None and now - self._initialized_at >= max(
            self._reinitialize_after, INITIALIZING_SHARE * self._initialized_in
        ):
            self._reinitialize_after = min(2 * self._reinitialize_after, REINITIALIZE_AT_LEAST_EVERY)
            self.close()
        try:
            if self._initialized_at is None:
                nvml.nvmlInit()
                self._initialized_at, self._suspect = self._clock(), False
                self._initialized_in = self._initialized_at - now
            return int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            if error.value not in (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
                raise
            self.close()
            # NVML reports the driver missing also where only this process lacks /dev/nvidiactl.
            if access.driver_loaded(self._proc):
                raise
            if not self._inventory.parts:
                raise Unsupported(str(error)) from error
            if error.value == LIBRARY_NOT_FOUND:
                raise
            return None

    def _card(self, index: int) -> NvmlCard:
        """Return the object of the GPU at an NVML index. It is kept until NVML's next initialization."""
        if index not in self._cards:
            nvml = self._nvml
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            identity = self._identity(handle, str(index))
            past = self._past[identity["uuid"]]
            past.links.once_up.update(self._stored.get(identity["uuid"], {}).get("links", ()))
            self._cards[index] = NvmlCard(
                nvml, handle, identity, past, self._clock, self._proc, self._report, READS, self._cost
            )
        return self._cards[index]

    def _identity(self, handle: Any, index: str) -> dict[str, str]:
        """Return the gpu_info labels of the GPU with this NVML handle."""
        nvml = self._nvml
        uuid: str = nvml.nvmlDeviceGetUUID(handle)
        remembered = self._inventory.parts.get(uuid, {})

        def text(label: str, call: Callable[[], object]) -> str:
            try:
                return str(call())
            except nvml.NVMLError as error:
                if error.value in (*GONE, *OVER):
                    raise
                return "" if error.value in LACKING else remembered.get(label, "")
            except AttributeError:  # an older pynvml
                return ""
            except Exception as error:  # such as invalid UTF-8
                self._report(label, error)
                return ""

        pci = text("pci_bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
        if minor := text("", lambda: nvml.nvmlDeviceGetMinorNumber(handle)):
            self._minors[uuid] = int(minor)
        return {
            "gpu": index,
            "uuid": uuid,
            "host": self._host,
            "model": text("model", lambda: nvml.nvmlDeviceGetName(handle)),
            "pci_bus_id": pci,
            "serial": text("serial", lambda: nvml.nvmlDeviceGetSerial(handle)),
            "board_part_number": text("board_part_number", lambda: nvml.nvmlDeviceGetBoardPartNumber(handle)),
            "module_id": text("module_id", lambda: nvml.nvmlDeviceGetModuleId(handle)),
            "numa_node": numa_node(self._sysfs, pci),
            "driver_version": text("driver_version", lambda: nvml.nvmlSystemGetDriverVersion()),
            "vbios_version": text("vbios_version", lambda: nvml.nvmlDeviceGetVbiosVersion(handle)),
            "inforom_version": text("inforom_version", lambda: nvml.nvmlDeviceGetInforomImageVersion(handle)),
            "source": self._source,
        }


def numa_node(sysfs: Path, pci_bus_id: str) -> str:
    """Return the NUMA node of the PCI device at an address such as 00000000:53:00.0 (NVML's form). Empty if unknown."""
    try:
        node = int((sysfs / "bus/pci/devices" / access.kernel_address(pci_bus_id) / "numa_node").read_text())
    except (OSError, ValueError):
        return ""
    return "" if node < 0 else str(node)


def build(host: str, inventory: str, runtime: str = "", sysfs: str = "/sys") -> Nvml:
    """Return the NVML collector of this host's GPUs. Raises Unsupported if pynvml is not installed."""
    try:
        import pynvml
    except ImportError as error:
        raise Unsupported(f"{error}; install flopwatch[exporter]") from error
    return Nvml(pynvml, host, Path(inventory), runtime=Path(runtime) if runtime else None, sysfs=Path(sysfs))
