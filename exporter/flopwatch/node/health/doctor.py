"""`flopwatch doctor`: what the exporter can read on this node, from where, what is missing and why, and who has what.

The exporter's own readers are asked, each in its child process and with a deadline, so that a hung driver costs its
own lines and never hangs the doctor. What the exporter remembers (`--state`) is copied first and never written: a part
that is missing since is noticed, and an exporter that runs meanwhile is not disturbed.

Why NVML lacks something is what its calls answered, noted by the recorder of `flopwatch capture`; why a port lacks
something is whether the kernel has a file for it.
"""

from __future__ import annotations

import errno
import http.client
import importlib
import json
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import GPU, PORT, Metric, Sample
from flopwatch.node.collectors import Collector, StateFile, read_inventory
from flopwatch.node.driver_release import Release
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
from flopwatch.settings import Address, ExporterSettings

# Seconds the driver gets for its first answer: without persistence mode it wakes every GPU. And the other sources.
DRIVER_DEADLINE, DEADLINE = 15.0, 5.0
# After so long whoever waits is told why.
PATIENCE = 3.0
# NVML tells activity from two samples that are at least 0.1 s apart.
BETWEEN_READS = 0.3

# Why a row has no series, in the order they are told.
PERMISSION, OLD, CARD, DCGM, KERNEL_LOG, FILE, REFUSED, MIG, QUIET = (
    "not permitted to this user",
    "the driver or nvidia-ml-py is too old",
    "this kind of card has none",
    "here only DCGM tells (--dcgm)",
    "only the kernel log tells (--kmsg)",
    "its driver has no file for it",
    "the adapter does not answer",
    "only of a partitioned GPU (MIG)",
    "nothing to tell so far, or not in use here",
)
REASONS = (PERMISSION, OLD, CARD, DCGM, KERNEL_LOG, FILE, REFUSED, MIG, QUIET)

HARDWARE = ("nvml", "dcgm", "infiniband")
LINK_COUNT = "field 91"
PROFILING = 1000  # DCGM's fields from here on are measured by it, the others are what NVML tells it
CAP_SYSLOG = 34  # linux/capability.h

# nvmlReturn_t: NO_PERMISSION; FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED.
NOT_PERMITTED, TOO_OLD = 4, {13, 25, 26}


@dataclass
class Source:
    """One reader: `state` is ok, failed, absent (not on this machine) or off; `says` what it logged."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    series: int = 0
    says: list[str] = field(default_factory=list)


@dataclass
class Part:
    """A GPU or a port: its name, what it is, families read by source, and rows without a series by reason."""

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
    """One privilege: whether it is in force, and what is lost without it."""

    name: str
    state: str
    loses: str = ""


@dataclass
class Report:
    """Everything the doctor found.

    `problems` are hardware that is there and cannot be read, `losses` what the exporter goes without for want of a
    right or of an answer: the tier is a choice.
    """

    version: str
    host: str
    user: str
    simulated: bool
    problems: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    gpus: list[Part] = field(default_factory=list)
    ports: list[Part] = field(default_factory=list)
    place: dict[str, str] = field(default_factory=dict)
    privileges: list[Access] = field(default_factory=list)
    listeners: dict[str, str] = field(default_factory=dict)


# The NVML source as the doctor runs it.


class Noted:
    """A collector in front of whose library stands a recorder; what the calls answered is kept in a file."""

    name = "nvml"

    def __init__(self, collector: Any, notes: StateFile) -> None:
        from flopwatch.node.capture.recorder import Recorder

        self._library = collector._nvml
        self._recorder = collector._nvml = Recorder(self._library)
        self._collector: Collector = collector
        self._notes = notes

    def read(self) -> list[Sample]:
        """Return the collector's samples."""
        try:
            return self._collector.read()
        finally:
            names = {name for row in m.all_metrics() for name in _asked(row).functions}
            self._notes.save(
                {
                    "lacks": sorted(name for name in names if not hasattr(self._library, name)),
                    **{part: _codes(sections) for part, sections in self._recorder.recorded().items()},
                }
            )


def _codes(sections: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, list[int]]:
    """Return the distinct nvmlReturn_t of each function, `field N` and `metric N`."""
    codes: dict[str, set[int]] = {}
    for section, prefix in (("calls", ""), ("fields", "field "), ("metrics", "metric ")):
        for question, answers in sections.get(section, {}).items():
            name = prefix + re.split(r"[( ]", question)[0]
            codes.setdefault(name, set()).update(
                int(answer["error"]) if isinstance(answer, dict) and "error" in answer else 0 for answer in answers
            )
    return {name: sorted(some) for name, some in codes.items()}


def nvml(factory: str, notes: str, **arguments: str) -> Noted:
    """Return the NVML collector of a factory (`package.module:function`) with a recorder in it."""
    module, _, function = factory.partition(":")
    return Noted(getattr(importlib.import_module(module), function)(**arguments), StateFile(Path(notes)))


@dataclass
class Asked:
    """What NVML and DCGM are asked for a row, by its source in the catalogue; `profiling` is DCGM's own measuring."""

    functions: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    dcgm: bool = False
    profiling: bool = False


def _asked(row: Metric) -> Asked:
    """Return the NVML functions, fields and metrics that a row's source names."""
    asked = Asked(functions=re.findall(r"nvml(?:Device|Gpm)\w+", row.source))
    for clause in re.split(r";|, *(?=NVML|NVLink|DCGM|GPM|nvml)", row.source):
        if "DCGM" in clause:
            asked.dcgm = True
            numbers = re.findall(r"\b[0-9]+\b", clause)
            asked.profiling = asked.profiling or any(int(number) >= PROFILING for number in numbers)
            continue
        kind = "metric" if "GPM" in clause else "field"
        if kind not in clause and "older drivers" not in clause:
            continue
        for first, last in re.findall(r"\b([0-9]+)(?:-([0-9]+))?\b", re.sub(r"(NVLink|scope) [0-9]+", "", clause)):
            asked.questions += [f"{kind} {number}" for number in range(int(first), int(last or first) + 1)]
    return asked


# Reading.


def examine(settings: ExporterSettings, sources: SourcesFactory = host_sources) -> Report:
    """Return what can be read on this node now."""
    report = Report(flopwatch.__version__, settings.host, _user(), settings.simulate is not None)
    report.listeners = {"--listen": _listener(settings.listen), "--otlp-listen": _listener(settings.otlp_listen)}
    with copied(settings) as beside:
        _look(beside, sources(beside), report)
    return report


def _look(settings: ExporterSettings, sources: HostSources, report: Report) -> None:
    """Put what can be read now into the report; the state folder is written."""
    notes = settings.state / "nvml_notes.json"
    readings = _readings(settings, sources, notes, report)
    answers = StateFile(notes).load()
    remembered = read_inventory(gpu_inventory(settings), m.GPU_INFO)
    samples = [sample for reading in readings.values() for sample in reading.samples]
    # A driver that does not answer leaves what it said before.
    gpus = sorted(_info(m.GPU_INFO, samples) or remembered.values(), key=lambda gpu: _natural(gpu["gpu"]))
    report.gpus = [_gpu(row, samples, readings, answers) for row in gpus] + _unnamed(gpus, samples)
    sysfs = sources.sysfs
    ports = sorted(_info(m.INFINIBAND_INFO, samples), key=lambda port: _natural(port["device"] + "/" + port["port"]))
    report.ports = [_port(row, samples, readings, sysfs) for row in ports]
    report.place = next(iter(_info(m.HOST_TOPOLOGY_INFO, samples)), {})
    report.privileges = _privileges(settings, samples)
    report.problems = _problems(report, samples, sysfs)
    report.losses = _losses(report, samples, settings)


def _readings(settings: ExporterSettings, sources: HostSources, notes: Path, report: Report) -> dict[str, Reading]:
    """Ask every source, NVML first: it names the GPUs for the others."""
    readings: dict[str, Reading] = {}
    readers = {reader.name: reader for reader in hardware(settings, sources)}
    if "nvml" in readers:
        spec = readers["nvml"].spec
        arguments = {**spec.arguments, "factory": spec.factory, "notes": str(notes)}
        readers["nvml"] = Reader("nvml", Spec("flopwatch.node.health.doctor:nvml", arguments), driver=True)
    Release(settings.state, [reader for reader in readers.values() if reader.driver], guest=True).check()
    with _messages() as says, ThreadPoolExecutor(len(readers)) as pool:
        try:
            if "nvml" in readers:
                readings["nvml"] = readers["nvml"].ask(DRIVER_DEADLINE)
                time.sleep(BETWEEN_READS)
            again = readings["nvml"].ok if "nvml" in readings else False
            asked = [name for name in readers if name != "nvml" or again]
            readings |= dict(zip(asked, pool.map(lambda name: readers[name].ask(DEADLINE), asked), strict=True))
        finally:
            list(pool.map(lambda reader: reader.close(), readers.values()))
    for name in readers:
        reading = readings[name]
        released = reading.kind == "released"
        state = "ok" if reading.ok else "off" if released else "failed" if reading.supported else "absent"
        reason = {
            "deadline": "no answer in time; the driver or the hardware behind it hangs",
            "exited": "its process died",
            "released": "the driver is released (docs/release.md); flopwatch exporter --release 0 ends that",
        }.get(reading.reason, reading.reason)
        report.sources.append(
            Source(
                name, state, reason, reading.duration, len(reading.samples), says.get(name, []) if not reason else []
            )
        )
    if "dcgm" not in readers:
        report.sources.append(Source("dcgm", "off", "--dcgm asks a DCGM host engine"))
    return readings


@contextmanager
def _messages() -> Iterator[dict[str, list[str]]]:
    """Give what the children log, by the last word of the logger's name; filled when the block has ended."""
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
            said = re.match(r"\S+ \S+ (?:WARNING|ERROR) flopwatch\.\S*?(\w+): (.*)", line)
            if said and said[2] not in found.setdefault(said[1], []) and said[2] != "read failed":
                found[said[1]].append(said[2])


# What the readings say.


def _info(row: Metric, samples: Sequence[Sample]) -> list[dict[str, str]]:
    return [dict(zip(row.labels, labels, strict=True)) for one, labels, _ in samples if one is row]


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _value(row: Metric, labels: tuple[str, ...], samples: Sequence[Sample]) -> float | None:
    return next((value for one, of, value in samples if one is row and of == labels), None)


def _families(labels: tuple[str, str], readings: Mapping[str, Reading], kind: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the rows with a series of this part, by source."""
    found = {
        name: {row.name for row, of, _ in reading.samples if row.labels[:2] == kind and of[:2] == labels}
        for name, reading in readings.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _gpu(
    info: Mapping[str, str], samples: Sequence[Sample], readings: Mapping[str, Reading], answers: Mapping[str, Any]
) -> Part:
    labels = info["gpu"], info["uuid"]
    families = _families(labels, readings, GPU)
    part = Part(
        f"GPU {info['gpu']}",
        ", ".join(filter(len, (info["model"], info["pci_bus_id"], info["uuid"]))),
        _value(m.GPU_PRESENT, labels, samples) != 0,
        _value(m.GPU_READABLE, labels, samples) != 0,
        {name: len(rows) for name, rows in families.items()},
    )
    owners = [owner for owner in _info(m.GPU_OWNER_INFO, samples) if owner["uuid"] == info["uuid"]]
    part.owners = [
        {label: word for label, word in owner.items() if word and label not in ("gpu", "uuid", "host")}
        for owner in owners
    ]
    updated = _value(m.GPU_OWNER_UPDATED_TIMESTAMP_SECONDS, labels, samples)
    part.owner_age = None if updated is None else max(0.0, readings["identity"].at - updated)
    if part.present and part.readable and readings["nvml"].ok:
        had = set[str]().union(*families.values())
        kernel_log = _value(m.FLOPWATCH_XID_SOURCE_UP, ("kernel_log",), samples) == 1
        for row in m.all_metrics():
            if row.labels[:2] == GPU and row.name not in had:
                told = answers.get(f"gpu{info['gpu']}", {})
                reason = _why(row, told, answers.get("lacks", []), kernel_log, "dcgm" in readings)
                part.missing.setdefault(reason, []).append(row.name)
    return part


def _unnamed(gpus: Sequence[Mapping[str, str]], samples: Sequence[Sample]) -> list[Part]:
    """Return the GPUs that never told who they are."""
    known = {gpu["gpu"] for gpu in gpus}
    return [
        Part(f"GPU {labels[0]}", "never told its name", row is not m.GPU_PRESENT, row is not m.GPU_READABLE)
        for row, labels, up in samples
        if row in (m.GPU_PRESENT, m.GPU_READABLE) and up == 0 and labels[0] not in known
    ]


def _why(row: Metric, answers: Mapping[str, Sequence[int]], lacks: Sequence[str], kernel_log: bool, dcgm: bool) -> str:
    """Return why a GPU has no series of a row, by what NVML answered to the questions behind it."""
    if row.source.startswith("/dev/kmsg"):
        return QUIET if kernel_log else KERNEL_LOG
    if row.name.startswith("gpu_mig_") and row is not m.GPU_MIG_MODE:
        return MIG
    asked = _asked(row)
    codes = {
        code
        for name, some in answers.items()
        for code in some
        if name in asked.questions or any(name.startswith(function) for function in asked.functions)
    }
    if NOT_PERMITTED in codes:
        return PERMISSION
    if 0 in codes:
        return QUIET
    if codes & TOO_OLD or set(asked.functions) & set(lacks):
        return OLD
    if row.domain == "nvlink" and 0 not in answers.get(LINK_COUNT, [0]):
        return CARD
    if asked.dcgm and not dcgm and (asked.profiling or not codes):
        return DCGM
    # What was never asked for waits for something else: an error to ask the place of, a link to ask the state of.
    return CARD if codes else QUIET


def _port(info: Mapping[str, str], samples: Sequence[Sample], readings: Mapping[str, Reading], sysfs: Path) -> Part:
    labels = info["device"], info["port"]
    families = _families(labels, readings, PORT)
    state, rate = (
        _value(row, labels, samples) for row in (m.INFINIBAND_PORT_STATE_ID, m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND)
    )
    about = [
        info["link_layer"],
        "" if state is None else "active" if state == 4 else "not active",
        "" if rate is None else f"{rate:g} Gb/s",
        info["role"],
        f"rail {info['rail']}" if info["rail"] else "",
    ]
    part = Part(
        "/".join(labels),
        ", ".join(filter(len, about)),
        _value(m.INFINIBAND_PORT_PRESENT, labels, samples) != 0,
        families={name: len(rows) for name, rows in families.items()},
    )
    if not part.present:
        return part
    device = sysfs / "class" / "infiniband" / info["device"]
    had = set[str]().union(*families.values())
    for row in m.all_metrics():
        if row.labels[:2] == PORT and row.name not in had:
            reason = QUIET
            if isinstance(row, m.PortCounter):
                files = [
                    device / file.removeprefix("device/")
                    if file.startswith("device/")
                    else device / "ports" / info["port"] / file
                    for file in row.files
                ]
                there = [file for file in files if file.exists()]
                reason = (
                    FILE
                    if not there
                    else QUIET
                    if row.quiet
                    else (REFUSED if any(os.access(file, os.R_OK) for file in there) else PERMISSION)
                )
            part.missing.setdefault(reason, []).append(row.name)
    return part


def _privileges(settings: ExporterSettings, samples: Sequence[Sample]) -> list[Access]:
    """Return the tiers: base, which needs none, identity and kernel."""
    up = {
        source: _value(row, (source,), samples) == 1
        for row, source in ((m.FLOPWATCH_IDENTITY_SOURCE_UP, "kubelet"), (m.FLOPWATCH_XID_SOURCE_UP, "kernel_log"))
    }
    kubelet, kmsg = str(settings.kubelet_socket), str(settings.kmsg)
    if settings.simulate is not None:
        return [Access("base", "in force"), Access("kernel", "in force" if up["kernel_log"] else "not in force")]
    return [
        Access("base", "in force"),
        Access("identity", _access(kubelet, up["kubelet"]), "" if up["kubelet"] else "the pods that have a GPU"),
        Access(
            "kernel",
            _access(kmsg.removeprefix("unix:"), up["kernel_log"]),
            ""
            if up["kernel_log"]
            else "the text of Xids and what follows from it: NVLink details, SXids, kernel events, and Xids "
            "from before "
            "the exporter started",
        ),
    ]


def _access(path: str, up: bool) -> str:
    """Return whether a privilege is in force, by whether its file is there and may be read."""
    if up:
        return f"in force: {path} is read"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            return f"not in force: {path}: {error.strerror}"
    return f"not in force: {path} is not read"


def _problems(report: Report, samples: Sequence[Sample], sysfs: Path) -> list[str]:
    """Return which hardware is there and cannot be read."""
    problems = [
        f"{source.name}: {source.reason}"
        for source in report.sources
        if source.name in HARDWARE and source.state == "failed"
    ]
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
            problems.append(f"{part.name}: the driver does not let this process look")
    return problems


def _cards(sysfs: Path) -> int:
    """Return how many of NVIDIA's GPUs are on the PCI bus: display controllers, and those without a display."""
    found = 0
    for device in (sysfs / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _losses(report: Report, samples: Sequence[Sample], settings: ExporterSettings) -> list[str]:
    """Return what goes unread that is no hardware: who has a GPU, the kernel log, what only root is told."""
    losses = [
        f"{source.name}: {source.reason}"
        for source in report.sources
        if source.name not in HARDWARE and source.state == "failed"
    ]
    for name in sorted({name for part in (*report.gpus, *report.ports) for name in part.missing.get(PERMISSION, ())}):
        losses.append(f"{name}: {PERMISSION}")
    absent = {source.name for source in report.sources if source.state == "absent"}
    if not os.path.exists(str(settings.kmsg).removeprefix("unix:")):
        absent.add("kernel_log")
    says = {source.name: source.says for source in report.sources}
    for row, where in ((m.FLOPWATCH_IDENTITY_SOURCE_UP, "identity"), (m.FLOPWATCH_XID_SOURCE_UP, "xid")):
        for one, labels, up in samples:
            if one is row and up == 0 and labels[0] not in absent:
                said = [line for line in says[where] if labels[0] in line]
                losses.append(f"{where}: {said[-1] if said else f'{labels[0]} does not answer'}")
    return losses


def _user() -> str:
    """Return who this is, and whether with the capability to read the kernel log."""
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    syslog = mask is not None and int(mask[1], 16) >> CAP_SYSLOG & 1
    name = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    return f"{name}, {'with' if syslog else 'without'} CAP_SYSLOG"


def _listener(address: Address) -> str:
    """Return whether an address is free, has an exporter on it, or cannot be had."""
    try:
        host, family = address.place()
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, address.port))
        return f"{address} is free"
    except OSError as error:
        if not _answers(address):
            return f"{address}: {error.strerror}"
        return f"{address}: an exporter answers"


def _answers(address: Address) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address.host, address.host)
    connection = http.client.HTTPConnection(host, address.port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    return json.dumps(asdict(report), indent=1)
