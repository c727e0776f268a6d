"""GPUs through NVML (`pynvml`, package nvidia-ml-py): https://docs.nvidia.com/deploy/nvml-api/.

Here: the session with the driver, which GPUs it has, and which of this node's are missing. `card.py` reads one
GPU, mostly by batches of nvmlDeviceGetFieldValues in which every value carries its own status (`fields.py`);
activity is counted up from GPM samples (`gpm.py`). Missing on some hardware: memory temperature without HBM; ECC,
energy, row remapping and clock-event seconds on consumer cards; utilisation, NVLink and fabric in MIG mode; activity
before Hopper; SRAM status without root. What a card does not have is no sample, and is asked for once per
initialisation. nvmlDeviceGetPcieThroughput is never called: it counts for 20 ms in each direction.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.catalogue import GPU_INFO, GPU_PRESENT, GPU_READABLE, Sample
from flopwatch.node.collectors import Blind, Inventory, StartAfresh, StateFile, Unsupported
from flopwatch.node.collectors.nvml.card import BLIND, GONE, LACKING, OVER, REPLACED, Card, Past

# After a reset or a driver reload NVML answers again only after nvmlShutdown and nvmlInit. Beside a GPU that stays dead
# that is work for nothing: first after so many seconds, then twice as long each time, up to the longest.
REINITIALIZE_AFTER, REINITIALIZE_AT_LEAST_EVERY = 15.0, 240.0

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12  # nvmlReturn_t


class Nvml:
    """The GPUs of this node.

    `library` is the pynvml module, `inventory` the file that remembers this node's GPUs and gives other sources the
    uuid behind a PCI address, `source` the label of gpu_info (nvml, or simulated), `runtime` the file that tells other
    sources of MIG instances and processes.
    """

    name = "nvml"

    def __init__(
        self,
        library: Any,
        host: str,
        inventory: Path,
        source: str = "nvml",
        clock: Callable[[], float] = time.monotonic,
        runtime: Path | None = None,
        sysfs: Path = Path("/sys"),
        proc: Path = Path("/proc"),
    ) -> None:
        self._nvml = library
        self._host = host
        self._source = source
        self._clock = clock
        self._inventory = Inventory(inventory, GPU_INFO)
        self._runtime = None if runtime is None else StateFile(runtime)
        self._sysfs = sysfs
        self._proc = proc
        self._initialized_at: float | None = None
        self._patience = REINITIALIZE_AFTER
        self._suspect = False
        self._cards: dict[int, Card] = {}
        self._past: defaultdict[str, Past] = defaultdict(Past)

    def read(self) -> list[Sample]:
        """Return what every GPU says, and gpu_present 0 for those of the inventory that say nothing."""
        try:
            return self._read()
        except self._nvml.NVMLError as error:
            self._suspect = True
            if error.value == REPLACED:
                raise StartAfresh(f"the driver was replaced under this process: {error}") from error
            if error.value in BLIND:
                raise Blind(f"the driver does not talk to this process: {error}") from error
            raise

    def close(self) -> None:
        """Give every handle and buffer back to the driver."""
        for card in self._cards.values():
            card.stop_meters()
        self._cards.clear()
        if self._initialized_at is not None:
            self._initialized_at = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _read(self) -> list[Sample]:
        answers: dict[str, list[Sample]] = {}
        found: dict[str, dict[str, str]] = {}
        blocked: dict[str, Any] = {}
        count = self._count()
        for index in range(count):
            try:
                card = self._card(index)
                found[card.identity["uuid"]] = card.identity
                answers[card.identity["uuid"]] = card.read()
            except self._nvml.NVMLError as error:
                if error.value in OVER:
                    raise
                self._suspect = True
                if error.value not in GONE:
                    blocked[str(index)] = error
        if blocked and len(blocked) == count:
            raise next((error for error in blocked.values() if error.value not in BLIND), blocked["0"])
        self._forget_replaced(found)
        self._inventory.update(found)
        self._tell(answers)
        if count == 0 and not self._inventory.parts:
            raise Unsupported("NVML finds no GPU")
        return self._inventory.info() + self._samples(count, answers, blocked)

    def _samples(self, count: int, answers: dict[str, list[Sample]], blocked: dict[str, Any]) -> list[Sample]:
        samples: list[Sample] = []
        unheard = {str(index) for index in range(count)}
        for uuid, part in self._inventory.parts.items():
            labels = part["gpu"], uuid
            unheard.discard(part["gpu"])
            if uuid in answers:
                samples += [(GPU_PRESENT, labels, 1), (GPU_READABLE, labels, 1)]
                samples += answers[uuid]
            else:
                samples.append(_silent(part["gpu"], uuid, blocked))
        # One that never told its uuid is a series without.
        return samples + [_silent(gpu, "", blocked) for gpu in sorted(unheard, key=int)]

    def _tell(self, answers: dict[str, list[Sample]]) -> None:
        """Keep the file that tells other sources of MIG instances and processes."""
        if self._runtime is not None:
            self._runtime.save({
                card.identity["uuid"]: {"mig": card.mig or [], "pids": card.past.pids}
                for card in self._cards.values() if card.identity["uuid"] in answers
            })

    def _count(self) -> int:
        """Return how many GPUs NVML sees, after initialising it where that is due."""
        nvml = self._nvml
        now = self._clock()
        if self._initialized_at is not None and not self._suspect:
            self._patience = REINITIALIZE_AFTER
        elif self._initialized_at is not None and now - self._initialized_at >= self._patience:
            self._patience = min(2 * self._patience, REINITIALIZE_AT_LEAST_EVERY)
            self.close()
        try:
            if self._initialized_at is None:
                nvml.nvmlInit()
                self._initialized_at, self._suspect = now, False
            return int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            if error.value not in (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
                raise
            self.close()
            if self._inventory.parts:
                return 0
            raise Unsupported(str(error)) from error

    def _card(self, index: int) -> Card:
        """Return the GPU at an index, which stays the same until the next initialisation."""
        if index not in self._cards:
            nvml = self._nvml
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            identity = self._identity(handle, str(index))
            past = self._past[identity["uuid"]]
            self._cards[index] = Card(nvml, handle, identity, past, self._clock, self._proc)
        return self._cards[index]

    def _identity(self, handle: Any, index: str) -> dict[str, str]:
        """Return the gpu_info labels of one GPU."""
        nvml = self._nvml
        uuid: str = nvml.nvmlDeviceGetUUID(handle)
        remembered = self._inventory.parts.get(uuid, {})

        def text(label: str, call: Callable[[], object]) -> str:
            try:
                return str(call())
            except AttributeError:  # an older pynvml
                return ""
            except nvml.NVMLError as error:
                if error.value in (*GONE, *OVER):
                    raise
                return "" if error.value in LACKING else remembered.get(label, "")

        pci = text("pci_bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
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

    def _forget_replaced(self, found: dict[str, dict[str, str]]) -> None:
        """Drop missing GPUs whose slot a GPU new to this node is in; a known one there was only renumbered."""
        parts = self._inventory.parts
        newcomers = {identity["pci_bus_id"] for uuid, identity in found.items() if uuid not in parts} - {""}
        for uuid in [uuid for uuid, part in parts.items() if part["pci_bus_id"] in newcomers]:
            del parts[uuid]


def _silent(gpu: str, uuid: str, blocked: dict[str, Any]) -> Sample:
    return (GPU_READABLE if gpu in blocked else GPU_PRESENT, (gpu, uuid), 0)


def numa_node(sysfs: Path, pci_bus_id: str) -> str:
    """Return the NUMA node of the PCI device that NVML writes as 00000000:53:00.0; empty if the kernel knows none."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return ""
    return "" if node < 0 else str(node)


def build(host: str, inventory: str, runtime: str = "", sysfs: str = "/sys", simulated: str = "") -> Nvml:
    """Return the collector of this machine's GPUs, or of the simulated node's in the folder `simulated`."""
    library: Any
    source, proc = "nvml", Path("/proc")
    if simulated:
        from flopwatch.simulate import pynvml as simulation

        library, source, proc = simulation.load(Path(simulated)), "simulated", Path(simulated) / "proc"
    else:
        try:
            import pynvml
        except ImportError as error:
            raise Unsupported(f"{error}; install flopwatch[exporter]") from error
        library = pynvml
    file = Path(runtime) if runtime else None
    return Nvml(library, host, Path(inventory), source, runtime=file, sysfs=Path(sysfs), proc=proc)
