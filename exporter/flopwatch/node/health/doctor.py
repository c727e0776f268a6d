"""Report of `flopwatch doctor`: which hardware can be read, which series are missing and why, and the owners of GPUs.

The exporter's readers read a copy of its state, each in a child process and with a deadline. A hung driver therefore
costs only its own lines. NVML's answers (`nvml_answers.py`) explain a missing GPU series, files in sysfs a port series.
"""

import errno
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import GPU, PORT, Metric, Sample
from flopwatch.node.capture.recorder import natural
from flopwatch.node.collectors import StateFile, read_inventory
from flopwatch.node.driver_release import Release
from flopwatch.node.health import driver_lines, wait_sources
from flopwatch.node.health.nvml_answers import asked
from flopwatch.node.health.state_copy import copied
from flopwatch.node.scrape.reader import (
    HostSources,
    Reader,
    Reading,
    SourcesFactory,
    Spec,
    gpu_inventory,
    hardware,
    host_sources,
)
from flopwatch.node.telemetry.ras import RAS_STATE
from flopwatch.settings import Address, ExporterSettings

DRIVER_DEADLINE, DEADLINE = 15.0, 5.0  # seconds; without persistence mode the first call wakes every GPU
PATIENCE = 3.0  # seconds until a line on the terminal explains the wait
BETWEEN_READS = 0.3  # seconds; NVML derives activity from two samples at least 0.1 s apart

HANGS = "no answer in time; the driver or the hardware behind it hangs"
DRIVER_HANGS = f"{HANGS}, or persistence mode is off and the driver starts slowly (nvidia-smi -pm 1)"
REASONS = PERMISSION, OLD, CARD, DCGM, KERNEL_LOG, FILE, REFUSED, MIG, QUIET = (  # why a row has no series
    "not permitted to this user",
    "the driver or nvidia-ml-py is too old",
    "this kind of card lacks it",
    "here only DCGM has it (--dcgm)",
    "only the kernel log has it (--kmsg)",
    "its driver has no file for it",
    "the adapter refuses it",
    "only for a partitioned GPU (MIG)",
    "no event so far, or not in use here",
)

HARDWARE = ("nvml", "dcgm", "infiniband")
LINK_COUNT = "field 91"
CAP_SYSLOG = 34  # linux/capability.h

# nvmlReturn_t: NO_PERMISSION; FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED.
NOT_PERMITTED, TOO_OLD = 4, {13, 25, 26}


@dataclass
class SourceReport:
    """Result of one reader. `state` is ok, failed, absent (not on this host) or off. `messages` are its log lines."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    series: int = 0
    messages: list[str] = field(default_factory=list)


@dataclass
class HardwarePart:
    """GPU or port: name, description, number of families by source, and the rows without a series by reason."""

    name: str
    about: str
    present: bool = True
    readable: bool = True
    families: dict[str, int] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)
    owners: list[dict[str, str]] = field(default_factory=list)
    owner_age: float | None = None  # seconds


@dataclass
class Access:
    """Tier of privileges (base, identity, kernel): whether it is in force, and the data that is missing without it."""

    name: str
    state: str
    loses: str = ""


@dataclass
class Report:
    """Result of the doctor. `problems` are hardware that is present but unreadable, `losses` are other missing data."""

    version: str
    host: str
    user: str
    simulated: bool
    problems: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    sources: list[SourceReport] = field(default_factory=list)
    gpus: list[HardwarePart] = field(default_factory=list)
    ports: list[HardwarePart] = field(default_factory=list)
    driver: list[str] = field(default_factory=list)
    place: dict[str, str] = field(default_factory=dict)
    privileges: list[Access] = field(default_factory=list)
    listeners: dict[str, str] = field(default_factory=dict)


def examine(settings: ExporterSettings, sources: SourcesFactory = host_sources) -> Report:
    """Read this host's hardware, and return the report. Raises SettingsError if the state cannot be copied."""
    report = Report(flopwatch.__version__, settings.host, _user(), settings.simulate is not None)
    report.listeners = {"--listen": _listener(settings.listen), "--otlp-listen": _listener(settings.otlp_listen)}
    with copied(settings) as copy:
        _look(copy, sources(copy), report)
    return report


def _look(settings: ExporterSettings, sources: HostSources, report: Report) -> None:
    """Fill the report with what can be read now. `settings` must name a copy of the state, which is written."""
    notes = settings.state / "nvml_notes.json"
    readings = _readings(settings, sources, notes, report)
    answers = StateFile(notes).load()
    remembered = read_inventory(gpu_inventory(settings), m.GPU_INFO)
    samples = [sample for reading in readings.values() for sample in reading.samples]
    gpus = sorted(_info(m.GPU_INFO, samples) or remembered.values(), key=lambda gpu: natural(gpu["gpu"]))
    report.gpus = [_gpu(row, samples, readings, answers) for row in gpus] + _unnamed(gpus, samples)
    sysfs = sources.sysfs
    ports = sorted(_info(m.INFINIBAND_INFO, samples), key=lambda port: natural(port["device"] + "/" + port["port"]))
    report.ports = [_port(row, samples, readings, sysfs) for row in ports]
    report.place = next(iter(_info(m.HOST_TOPOLOGY_INFO, samples)), {})
    report.privileges = _privileges(settings, samples)
    report.problems = _problems(report, samples, sysfs)
    report.losses = [*driver_lines.losses(samples, answers, sources.proc), *_losses(report, samples, settings)]
    report.driver = driver_lines.state(samples, answers)


def _readings(settings: ExporterSettings, sources: HostSources, notes: Path, report: Report) -> dict[str, Reading]:
    """Return a reading of every source, and add its SourceReport. NVML is read first, since it names the GPUs."""
    readers = {reader.name: reader for reader in hardware(settings, sources)}
    spec = readers["nvml"].spec
    arguments = {**spec.arguments, "factory": spec.factory, "notes": str(notes)}
    readers["nvml"] = Reader("nvml", Spec("flopwatch.node.health.nvml_answers:build", arguments), driver=True)
    Release(settings.state, [reader for reader in readers.values() if reader.driver], guest=True).check()
    with _messages() as messages, ThreadPoolExecutor(len(readers)) as pool:
        try:
            readings = {"nvml": readers["nvml"].ask(DRIVER_DEADLINE)}
            time.sleep(BETWEEN_READS)
            rest = [name for name in readers if name != "nvml" or readings["nvml"].ok]
            readings |= dict(zip(rest, pool.map(lambda name: readers[name].ask(DEADLINE), rest), strict=True))
        finally:
            list(pool.map(lambda reader: reader.close(), readers.values()))
    for name in readers:
        reading = readings[name]
        released = reading.kind == "released"
        state = "ok" if reading.ok else "off" if released else "failed" if reading.supported else "absent"
        reason = {
            "deadline": DRIVER_HANGS if readers[name].driver else HANGS,
            "exited": "its process died",
            "released": "the driver is released (docs/release.md); flopwatch exporter --release 0 ends that",
        }.get(reading.reason, reading.reason)
        lines = messages.get(name, []) if not reason else []
        report.sources.append(SourceReport(name, state, reason, reading.duration, len(reading.samples), lines))
    if "dcgm" not in readers:
        report.sources.append(SourceReport("dcgm", "off", "--dcgm reads a DCGM host engine"))
    report.sources += [SourceReport(*line) for line in wait_sources.lines(settings, sources.proc)]
    report.sources.append(_ras(settings))
    return readings


def _ras(settings: ExporterSettings) -> SourceReport:
    """Return what the exporter last got from NCCL's RAS, which the doctor does not ask."""
    if settings.ras == "off" or settings.ledger == "off":
        flag = "--ras" if settings.ras == "off" else "--ledger"
        return SourceReport("ras", "off", f"{flag} is off")
    last = StateFile(settings.state / RAS_STATE).load()
    asked = f"{settings.ras} is asked only about an overdue step"
    outcome, detail = (str(last.get(name, "")) for name in ("outcome", "detail"))
    if outcome not in ("", "answered"):
        return SourceReport("ras", "absent", f"{asked}, last without a usable answer: {outcome} ({detail})")
    return SourceReport("ras", "ok", asked)


@contextmanager
def _messages() -> Iterator[dict[str, list[str]]]:
    """Yield a dictionary of child processes' log lines by logger name, which is filled when the block ends."""
    found: dict[str, list[str]] = {}
    sys.stderr.flush()
    terminal = os.dup(2)
    waiting = threading.Timer(PATIENCE, os.write, (terminal, b"waiting for the driver ...\n"))
    waiting.start()
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield found
        finally:
            waiting.cancel()
            waiting.join()
            os.dup2(terminal, 2)
            os.close(terminal)
        log.seek(0)
        for line in log.read(1 << 20).decode("utf-8", "replace").splitlines():
            match = re.match(r"\S+ \S+ (?:WARNING|ERROR) flopwatch\.\S*?(\w+): (.*)", line)
            if match and match[2] not in found.setdefault(match[1], []) and match[2] != "read failed":
                found[match[1]].append(match[2])


def _info(row: Metric, samples: Sequence[Sample]) -> list[dict[str, str]]:
    return [dict(zip(row.labels, labels, strict=True)) for one, labels, _ in samples if one is row]


def _value(row: Metric, labels: tuple[str, ...], samples: Sequence[Sample]) -> float | None:
    return next((value for one, of, value in samples if one is row and of == labels), None)


def _families(labels: tuple[str, str], readings: Mapping[str, Reading], kind: tuple[str, ...]) -> dict[str, set[str]]:
    found = {
        name: {row.name for row, of, _ in reading.samples if row.labels[:2] == kind and of[:2] == labels}
        for name, reading in readings.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _gpu(
    info: Mapping[str, str], samples: Sequence[Sample], readings: Mapping[str, Reading], answers: Mapping[str, Any]
) -> HardwarePart:
    labels = info["gpu"], info["uuid"]
    families = _families(labels, readings, GPU)
    part = HardwarePart(
        f"GPU {info['gpu']}",
        ", ".join(filter(len, (info["model"], info["pci_bus_id"], info["uuid"]))),
        _value(m.GPU_PRESENT, labels, samples) != 0,
        _value(m.GPU_READABLE, labels, samples) != 0,
        {name: len(rows) for name, rows in families.items()},
    )
    part.owners = [
        {label: word for label, word in owner.items() if word and label not in ("gpu", "uuid", "host")}
        for owner in _info(m.GPU_OWNER_INFO, samples)
        if owner["uuid"] == info["uuid"]
    ]
    updated = _value(m.GPU_OWNER_UPDATED_TIMESTAMP_SECONDS, labels, samples)
    part.owner_age = None if updated is None else max(0.0, readings["identity"].at - updated)
    if part.present and part.readable and readings["nvml"].ok:
        had = set[str]().union(*families.values())
        kernel_log = _value(m.FLOPWATCH_XID_SOURCE_UP, ("kernel_log",), samples) == 1
        for row in m.all_metrics():
            if row.labels[:2] == GPU and row.name not in had:
                answered = answers.get(f"gpu{info['gpu']}", {})
                reason = _why(row, answered, answers.get("lacks", []), kernel_log, "dcgm" in readings)
                part.missing.setdefault(reason, []).append(row.name)
    return part


def _unnamed(gpus: Sequence[Mapping[str, str]], samples: Sequence[Sample]) -> list[HardwarePart]:
    """Return the GPUs whose identity was never read."""
    known = {gpu["gpu"] for gpu in gpus}
    return [
        HardwarePart(f"GPU {labels[0]}", "its name was never read", row is not m.GPU_PRESENT, row is not m.GPU_READABLE)
        for row, labels, up in samples
        if row in (m.GPU_PRESENT, m.GPU_READABLE) and up == 0 and labels[0] not in known
    ]


def _why(row: Metric, answers: Mapping[str, Sequence[int]], lacks: Sequence[str], kernel_log: bool, dcgm: bool) -> str:
    """Return why a GPU has no series of a row, from NVML's answers to the calls behind the row."""
    if row.source.startswith("/dev/kmsg"):
        return QUIET if kernel_log else KERNEL_LOG
    if row.name.startswith("gpu_mig_") and row is not m.GPU_MIG_MODE:
        return MIG
    needs = asked(row)
    codes = {
        code
        for name, some in answers.items()
        for code in some
        if name in needs.questions or any(name.startswith(function) for function in needs.functions)
    }
    if NOT_PERMITTED in codes:
        return PERMISSION
    if 0 in codes:
        return QUIET
    if codes & TOO_OLD or set(needs.functions) & set(lacks):
        return OLD
    if row.domain == "nvlink" and 0 not in answers.get(LINK_COUNT, [0]):
        return CARD
    if needs.dcgm and not dcgm and (needs.profiling or not codes):
        return DCGM
    # A call that was never made depends on something else, such as an error or a link.
    return CARD if codes else QUIET


def _port(
    info: Mapping[str, str], samples: Sequence[Sample], readings: Mapping[str, Reading], sysfs: Path
) -> HardwarePart:
    labels = info["device"], info["port"]
    families = _families(labels, readings, PORT)
    state = _value(m.INFINIBAND_PORT_STATE_ID, labels, samples)
    rate = _value(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, labels, samples)
    about = [
        info["link_layer"],
        "" if state is None else "active" if state == 4 else "not active",
        "" if rate is None else f"{rate:g} Gb/s",
        info["role"],
        f"rail {info['rail']}" if info["rail"] else "",
    ]
    part = HardwarePart(
        "/".join(labels),
        ", ".join(filter(len, about)),
        _value(m.INFINIBAND_PORT_PRESENT, labels, samples) != 0,
        families={name: len(rows) for name, rows in families.items()},
    )
    if not part.present:
        return part
    had = set[str]().union(*families.values())
    for row in m.all_metrics():
        if row.labels[:2] == PORT and row.name not in had:
            reason = _why_of_port(row, sysfs / "class" / "infiniband" / info["device"], info["port"])
            part.missing.setdefault(reason, []).append(row.name)
    return part


def _why_of_port(row: Metric, device: Path, port: str) -> str:
    if not isinstance(row, m.PortCounter):
        return QUIET
    folders = {True: device, False: device / "ports" / port}
    files = [folders[file.startswith("device/")] / file.removeprefix("device/") for file in row.files]
    present = [file for file in files if file.exists()]
    if not present:
        return FILE
    if row.quiet:
        return QUIET
    return REFUSED if any(os.access(file, os.R_OK) for file in present) else PERMISSION


def _privileges(settings: ExporterSettings, samples: Sequence[Sample]) -> list[Access]:
    kubelet = _value(m.FLOPWATCH_IDENTITY_SOURCE_UP, ("kubelet",), samples) == 1
    kernel_log = _value(m.FLOPWATCH_XID_SOURCE_UP, ("kernel_log",), samples) == 1
    if settings.simulate is not None:
        return [Access("base", "in force"), Access("kernel", "in force" if kernel_log else "not in force")]
    without_log = (
        "the text of Xids and its details: NVLink errors, SXids, kernel events, and Xids from before the exporter's "
        "start"
    )
    identity = _access(str(settings.kubelet_socket), kubelet)
    kernel = _access(str(settings.kmsg).removeprefix("unix:"), kernel_log)
    return [
        Access("base", "in force"),
        Access("identity", identity, "" if kubelet else "the pods that own a GPU"),
        Access("kernel", kernel, "" if kernel_log else without_log),
    ]


def _access(path: str, up: bool) -> str:
    if up:
        return f"in force: {path} is read"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            return f"not in force: {path}: {error.strerror}"
    return f"not in force: {path} is not read"


def _failed(report: Report, of_hardware: bool) -> list[str]:
    failed = [source for source in report.sources if source.state == "failed"]
    return [f"{source.name}: {source.reason}" for source in failed if (source.name in HARDWARE) == of_hardware]


def _problems(report: Report, samples: Sequence[Sample], sysfs: Path) -> list[str]:
    problems = _failed(report, of_hardware=True)
    for source in report.sources:
        if source.name == "nvml" and source.state == "absent" and (cards := _cards(sysfs)):
            there = "GPU is" if cards == 1 else "GPUs are"
            problems.append(f"nvml: {source.reason}, and {cards} {there} on the PCI bus")
    loaded = _value(m.GPU_DRIVER_LOADED, (), samples) != 0
    if not loaded:
        problems.append("nvml: no driver is loaded")
    for part in (*report.gpus, *report.ports):
        if not part.present:
            problems.append(f"{part.name}: does not answer")
        elif not part.readable and loaded:
            problems.append(f"{part.name}: the driver denies this process access")
    return problems


def _cards(sysfs: Path) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus: display controllers, class 03."""
    found = 0
    for device in (sysfs / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _losses(report: Report, samples: Sequence[Sample], settings: ExporterSettings) -> list[str]:
    losses = _failed(report, of_hardware=False)
    for reason in (PERMISSION, OLD):
        names = {name for part in (*report.gpus, *report.ports) for name in part.missing.get(reason, ())}
        losses += [f"{name}: {reason}" for name in sorted(names)]
    absent = {source.name for source in report.sources if source.state == "absent"}
    if not os.path.exists(str(settings.kmsg).removeprefix("unix:")):
        absent.add("kernel_log")
    messages = {source.name: source.messages for source in report.sources}
    for row, where in ((m.FLOPWATCH_IDENTITY_SOURCE_UP, "identity"), (m.FLOPWATCH_XID_SOURCE_UP, "xid")):
        for one, labels, up in samples:
            if one is row and up == 0 and labels[0] not in absent:
                found_lines = [line for line in messages[where] if labels[0] in line]
                losses.append(f"{where}: {found_lines[-1] if found_lines else f'{labels[0]} does not answer'}")
    return losses


def _user() -> str:
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    syslog = mask is not None and int(mask[1], 16) >> CAP_SYSLOG & 1
    name = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    return f"{name}, {'with' if syslog else 'without'} CAP_SYSLOG"


def _listener(address: Address) -> str:
    try:
        host, family = address.place()
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, address.port))
        return f"{address} is free"
    except OSError as error:
        return f"{address}: {'an exporter answers' if _answers(address) else error.strerror}"


def _answers(address: Address) -> bool:
    import httpx

    from flopwatch.http.client import client, url_tls

    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address.host, address.host)
    url = f"http://{Address(host, address.port)}/healthz"
    try:
        with client(url_tls(url, None), timeout=1) as http:
            return http.get(url).status_code == 200
    except (OSError, httpx.HTTPError, httpx.InvalidURL):
        return False
