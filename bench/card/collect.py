"""Sections `collect`, `release`, `events` and `layout`: the exporter's collectors as a whole."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import closing, suppress
from ctypes import byref
from pathlib import Path
from typing import Any

from bench.card.fields import ask
from bench.card.machine import Gpu, Machine
from bench.card.report import Report, shortened
from flopwatch.node.collectors.nvml.card import NvmlCard, Read
from flopwatch.node.collectors.nvml.fields import ALL_LINKS, LINK_COUNT, LINK_STATE
from flopwatch.node.scrape.reader import RESIDENT_LIMIT, Reader

READS = 20
READ_SECONDS = 0.1  # of one GPU
PAUSE = 0.5
RESTART_SECONDS = 3.0
DEADLINE = 30.0  # seconds of a read that must answer: nvmlInit is slow without persistence mode
MEMORY_READS = 2000


def section(machine: Machine, gpus: list[Gpu], seconds: float, report: Report) -> None:
    """Read all GPUs again and again as the exporter does, and report the time and the calls that are missing."""
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as state, closing(machine.collector(Path(state))) as collector:
        for _ in range(READS):
            began = machine.clock()
            samples = collector.read()
            taken.append(machine.clock() - began)
            machine.sleep(PAUSE)
        again = collector.read()
        lacks = {card.identity["gpu"]: lacking(card) for card in collector._cards.values()}
    first = taken.pop(0)
    taken.sort()
    limit = READ_SECONDS * len(gpus)
    report.facts.update(first=first, seconds=taken, lacks=lacks, samples=len(samples))
    report.info("first", f"{first:.3f} s with nvmlInit")
    report.info("p50", f"{taken[len(taken) // 2] * 1e3:.1f} ms")
    report.within("p99", taken[-1] * 1e3, 0, limit * 1e3, " ms")
    before, after = ({(row.name, labels) for row, labels, _ in read} for read in (samples, again))
    lost = sorted(f"{name}{{{','.join(labels)}}}" for name, labels in before - after)
    report.check("again", not lost, shortened(lost, 4) or f"{len(after)} series", "each series of the read before")
    for names in {tuple(names) for names in lacks.values()}:
        which = ",".join(gpu for gpu, others in lacks.items() if tuple(others) == names)
        report.info("lacks", f"GPU {which}: {shortened(names, 40) or 'no call or field'}")


def lacking(card: NvmlCard) -> list[str]:
    """Return what a GPU lacks, each with the nvmlReturn_t: calls by name, fields by id and scope."""
    return sorted(f"{key.name if isinstance(key, Read) else _field(*key)}={code}" for key, code in card.lacks.items())


def _field(number: int, scope: object) -> str:
    return f"{number}/all" if scope == ALL_LINKS else str(number) if scope in (0, None) else f"{number}/{scope}"


def release(machine: Machine, gpus: list[Gpu], seconds: float, report: Report) -> None:
    """Release the driver's handles, resume, kill the reader process, and read until its memory is known."""
    others = holders()
    with tempfile.TemporaryDirectory() as state:
        reader = Reader("nvml", machine.reader_spec(Path(state)), backoff=1.0, driver=True)
        try:
            _release(reader, others, seconds, report)
        finally:
            reader.close()


def _release(reader: Reader, others: set[int], seconds: float, report: Report) -> None:
    first = reader.ask(DEADLINE)
    report.check("reads", first.ok, first.reason or f"{len(first.samples)} samples", "samples")
    child: Any = reader._child
    if child is None or not first.ok:
        return
    held = open_devices(child.process.pid)
    ended = reader.release()
    measured = f"{len(held)} device files, process {'ended' if ended else 'still runs'}"
    report.check("release", ended, measured, "an ended process")
    left = sorted(holders() - others)
    report.check("device_files", not left, f"open in {shortened(left) or 'no new process'}", "open in no new process")
    reader.resume()
    report.check("resume", reader.ask(DEADLINE).ok, "samples again", "samples")
    child = reader._child
    if child is None:
        return
    child.process.kill()
    child.process.wait()
    began = time.monotonic()
    while not (reading := reader.ask(DEADLINE)).ok and time.monotonic() - began < DEADLINE:
        time.sleep(0.1)
    limit = RESTART_SECONDS + first.duration  # nvmlInit takes as long as the first time
    report.within("restart", time.monotonic() - began if reading.ok else float("inf"), 0, limit, " s")
    began, reads = time.monotonic(), 0
    while reads < MEMORY_READS and time.monotonic() - began < seconds:
        reader.ask(DEADLINE)
        reads += 1
    child = reader._child
    resident = resident_bytes(child.process.pid) if child is not None else None
    mebibytes = None if resident is None else resident / 2**20
    report.facts.update(reads=reads, resident=resident)
    done = f"{reads} reads in {time.monotonic() - began:.0f} s"
    report.check("memory_reads", reads >= MEMORY_READS or None, done, f"{MEMORY_READS} reads")
    report.within("memory", mebibytes, 0, RESIDENT_LIMIT / 2**20, " MiB")


def open_devices(pid: int) -> list[str]:
    """Return the GPU device files that a process has open."""
    found = []
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # a file may be closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return sorted({path for path in found if "/dev/nvidia" in path})


def holders() -> set[int]:
    """Return the processes that have a GPU device file open."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and open_devices(int(name))}


def resident_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process, None if they are unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def events(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Register for Xid events as the exporter does, and wait for one that does not arrive."""
    nvml, error_class = machine.recorder, machine.library.NVMLError
    try:
        supported = int(nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle))
    except error_class as error:
        report.info("supported", error)
        return
    report.info("supported", f"0x{supported:x}")
    wanted = supported & machine.library.nvmlEventTypeXidCriticalError
    if wanted == 0:
        report.info("xid", "this driver has no Xid events, as on virtual GPUs")
        return
    found = machine.library.nvmlEventSetCreate()  # an event set cannot be recorded
    try:
        machine.library.nvmlDeviceRegisterEvents(gpu.handle, wanted, found)
        try:
            event = machine.library.nvmlEventSetWait_v2(found, 500)
            report.info("wait", f"an event of type {event.eventType} and data {event.eventData} arrived")
        except error_class as error:
            code = error.value
            report.check("wait", code == machine.library.NVML_ERROR_TIMEOUT, error, "a timeout without an event")
    finally:
        machine.library.nvmlEventSetFree(found)
    try:
        with machine.kmsg.open("rb", buffering=0):
            report.info("kmsg", f"{machine.kmsg} can be read")
    except OSError as error:
        report.info("kmsg", f"{machine.kmsg}: {error.strerror}")


def layout(machine: Machine, gpu: Gpu, seconds: float, report: Report) -> None:
    """Report the driver, MIG mode, fabric and NVLinks as they answer."""
    nvml = machine.recorder
    for name, call, arguments in (
        ("driver", "nvmlSystemGetDriverVersion", ()),
        ("model", "nvmlDeviceGetName", (gpu.handle,)),
        ("persistence", "nvmlDeviceGetPersistenceMode", (gpu.handle,)),
        ("ecc", "nvmlDeviceGetEccMode", (gpu.handle,)),
        ("mig", "nvmlDeviceGetMigMode", (gpu.handle,)),
        ("power_limit", "nvmlDeviceGetEnforcedPowerLimit", (gpu.handle,)),
    ):
        try:
            answer = getattr(nvml, call)(*arguments)
        except (machine.library.NVMLError, AttributeError) as error:
            answer = error
        report.facts[name] = str(answer)
        report.info(name, answer)
    report.info("fabric", fabric(machine, gpu))
    answers = ask(machine, gpu, [LINK_COUNT])
    links = range(int(answers[LINK_COUNT].number or 0))
    states = ask(machine, gpu, [(LINK_STATE, link) for link in links]) if links else {}
    report.info("nvlinks", f"{len(links)}, states {shortened(states.values(), 4) or 'no link'}")


def fabric(machine: Machine, gpu: Gpu) -> str:
    """Return the state of a GPU in the NVLink fabric, or the error."""
    why: Exception | None = None
    for structure in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        try:
            info = getattr(machine.library, structure)()
            machine.recorder.nvmlDeviceGetGpuFabricInfoV(gpu.handle, byref(info))
            numbers = f"state {info.state & 0xFF}, status {info.status}, clique {info.cliqueId}"
            return f"{numbers}, health mask 0x{info.healthMask:x}"
        except (machine.library.NVMLError, AttributeError) as error:
            why = error
    return str(why)
