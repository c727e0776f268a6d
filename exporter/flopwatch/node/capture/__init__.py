"""Capture of a host as a test case: NVML's answers, RDMA ports in sysfs, and the driver's lines in the kernel log.

A capture is a folder with `nvml.json` (`capture/recorder.py`), `kmsg`, `sys/` with ports and PCI devices, and a
README.md. `sys.2`, `sys.3` ... have the files that changed until later reads. Before anything is written, serials,
UUIDs, GUIDs, addresses, processes, users and host names are replaced by made-up values (masks).
"""

import errno
import glob
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import flopwatch
from flopwatch.catalogue.xid import read_table
from flopwatch.node.capture.masking import Masker
from flopwatch.node.capture.recorder import SYSTEM, Recorded, Recorder, dumps
from flopwatch.node.collectors import AccessLost, RestartReader, Unsupported
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.settings import SettingsError

# Without gids, pkeys and node_desc of ports, which identify the host.
_FILES = [(row["folder"], row["file"]) for row in read_table("capture_files.csv")]  # below the sysfs root
PORT_FILES = [f"{folder}/{file}" for folder, file in _FILES if folder.startswith("class/infiniband")]
NET_FILES, PCI_FILES = ([file for of, file in _FILES if of == it] for it in ("class/net/*", "bus/pci/devices/*"))
# Without the kernel's command line, which may hold tokens and addresses next to `mlx5_core`.
WANTED_IN_KMSG = re.compile(r"^(?!.*ommand line: ).*(NVRM|nvidia|SXid|mlx[45]_|infiniband|\bib_|pcieport .*AER)")
MAX_KMSG_RECORDS = 5000  # the newest are kept
MAX_KMSG_RECORD_BYTES = 8192  # of /dev/kmsg

IDENTITIES = {"clusterUuid", "ibGuid", "chassisSerialNumber", "uuid", "serial", "hostname", "pdi"}  # in NVML structures


@dataclass
class Capture:
    """Capture in memory, with identities masked: files and links by path, and a line for each unreadable item."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the capture to `folder`. Raises FileExistsError if the folder exists."""
        folder.mkdir(parents=True)
        for name, target in self.links.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)


class Sysfs:
    """Text files below a sysfs root by their real paths, the links that led to them, and unreadable files."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def ports(self) -> dict[str, str]:
        """Read the files of RDMA ports and their net devices. Return those changed since the last read, by path."""
        changed = self.read(PORT_FILES)
        below = "class/infiniband/*/device/net/*"
        networks = {path.rpartition("/")[2] for path in glob.glob(below, root_dir=self._root)}
        networks |= {content.strip() for path, content in self.files.items() if "/gid_attrs/ndevs/" in path}
        patterns = (
            f"class/net/{name}/{lower}{file}"
            for name in sorted(networks)
            for lower in ("", "lower_*/")
            for file in NET_FILES
        )
        return changed | self.read(patterns)

    def read(self, patterns: Iterable[str]) -> dict[str, str]:
        """Read the files that match glob patterns. Return those that changed since the last read, by path."""
        changed: dict[str, str] = {}
        for pattern in patterns:
            for path in sorted(glob.glob(pattern, root_dir=self._root)):
                real = self._follow(path)
                content = None if real is None else self._content(real)
                if real is not None and content is not None and self.files.get(real) != content:
                    self.files[real] = changed[real] = content
        return changed

    def _follow(self, path: str) -> str | None:
        """Resolve the links in a path and record them. Return None if one leads out of the root."""
        done = ""
        for part in path.split("/"):
            step = os.path.normpath(os.path.join(done, part))
            if os.path.islink(f"{self._root}/{step}"):
                target = os.path.relpath(os.path.realpath(f"{self._root}/{step}"), self._root)
                if target.startswith(".."):
                    return None
                self.links[step] = os.path.relpath(target, os.path.dirname(step) or ".")
                step = target
            done = step
        return done

    def _content(self, path: str) -> str | None:
        """Return the text of a file, or None for a folder, a binary file or an unreadable file."""
        if os.path.isdir(f"{self._root}/{path}"):
            return None
        try:
            content = Path(f"{self._root}/{path}").read_bytes()
        except OSError as error:
            self.refused[path] = errno.errorcode.get(error.errno or errno.EIO, str(error.errno))
            return None
        return content.decode("utf-8", "replace") if b"\0" not in content else None


def kernel_log(path: Path) -> list[str]:
    """Return the newest lines about GPUs, NVSwitches and ports in /dev/kmsg or a file. Raises OSError."""
    records: list[str] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as log:
        while True:
            try:
                data = log.read(MAX_KMSG_RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read: continue with the oldest
                continue
            if not data:  # the end of the file or of the log so far
                break
            records.append(data.decode("utf-8", "replace"))
    lines = "".join(records).splitlines()
    return [line for line in lines if WANTED_IN_KMSG.search(line)][-MAX_KMSG_RECORDS:]


def nvml_answers(
    library: Any, host: str, reads: int, pause: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> tuple[Recorded, list[float], list[str]]:
    """Run the NVML collector `reads` times, with `pause` in between. Raises Unsupported.

    Return NVML's answers, the time of each read in seconds after the first, and errors of failed reads.
    """
    recorder = Recorder(library)
    times: list[float] = []
    failures: list[str] = []
    # The inventory of the collector is not masked, so it should stay in memory.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as state,
        closing(Nvml(recorder, host, Path(state) / "gpus.json", clock=clock)) as collector,
    ):
        for read in range(reads):
            if read > 0:
                pause()
            times.append(clock())
            try:
                collector.read()
            except (AccessLost, RestartReader, library.NVMLError) as error:
                failures.append(f"GPUs, read {read + 1}: {error}")
    return recorder.recorded(), [round(at - times[0], 3) for at in times], failures


def masked_nvml(recorded: Recorded, masker: Masker) -> Recorded:
    """Return a recording with masked serials, UUIDs, names and pids. Measured numbers and names of handles stay."""
    for sections in recorded.values():
        for serial in sections.get("calls", {}).get("nvmlDeviceGetSerial()", []):
            if isinstance(serial, str):
                masker.word("serial", serial)
    return {
        subject: {
            section: {
                masker.text(question): [_masked_answer(answer, question, masker) for answer in answers]
                for question, answers in entries.items()
            }
            for section, entries in sections.items()
        }
        for subject, sections in recorded.items()
    }


def _masked_answer(answer: Any, name: str, masker: Masker) -> Any:
    """Return an answer masked. `name` is its call or its member of a structure, which can mark it as an identity."""
    if isinstance(answer, str):
        if name.startswith("nvmlDeviceGetSerial("):
            return masker.word("serial", answer)
        masked = masker.text(answer)
        named = name in IDENTITIES or name.startswith(("nvmlSystemGetProcessName(", "nvmlDeviceGetHostname"))
        return masker.word("name", answer) if named and masked == answer else masked
    if isinstance(answer, list):
        return [_masked_answer(item, name, masker) for item in answer]
    if not isinstance(answer, dict):
        if name == "pid" and isinstance(answer, int):
            return masker.pid(answer)
        return 0 if name in IDENTITIES and isinstance(answer, int) else answer
    if name in IDENTITIES and "hex" in answer:
        return {"hex": masker.hexadecimal(answer["hex"])}
    return {
        key: value if key in ("handle", "struct", "ctype") else _masked_answer(value, key, masker)
        for key, value in answer.items()
    }


def gpu_addresses(recorded: Recorded) -> list[str]:
    """Return the PCI addresses of the recorded GPUs as sysfs writes them, for example 0000:53:00.0."""
    calls = [call for sections in recorded.values() for call in sections.get("calls", {}).items()]
    answers = [answer for call, some in calls if call.startswith("nvmlDeviceGetPciInfo") for answer in some]
    return sorted({one["busId"].lower()[-12:] for one in answers if isinstance(one, dict) and "busId" in one})


def capture(
    library: Any,
    sysfs: Path,
    kmsg: Path,
    hosts: Sequence[str],
    words: Sequence[str] = (),
    reads: int = 2,
    *,
    pause: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> Capture:
    """Return a masked capture of this host. Raises SettingsError if there is nothing to capture.

    `library` is the pynvml module. The host's names `hosts`, and `words`, are masked.
    """
    masker, tree, result = Masker(hosts, words), Sysfs(sysfs), Capture()
    steps = [tree.ports()]

    def next_read() -> None:
        pause()
        steps.append(tree.ports())

    recorded: Recorded = {}
    try:
        recorded, times, result.missing = nvml_answers(library, hosts[0], reads, next_read, clock)
    except Unsupported as error:
        result.missing.append(f"GPUs: {error}")
        while len(steps) < reads and tree.files:
            next_read()
    addresses = gpu_addresses(recorded)
    steps[0] |= tree.read(f"bus/pci/devices/{address}/{name}" for address in addresses for name in PCI_FILES)
    if not any("class/infiniband" in path for path in (*tree.links, *tree.files)):
        result.missing.append(f"InfiniBand ports: none in {sysfs}/class/infiniband")
    result.missing += [f"sys/{path}: {name}" for path, name in sorted(tree.refused.items())]
    log: list[str] = []
    try:
        log = kernel_log(kmsg)
    except OSError as error:
        result.missing.append(f"kernel log {kmsg}: {error.strerror}; as root it can be read")
    if not recorded and not tree.files and not log:
        raise SettingsError("nothing to capture here: " + "; ".join(result.missing))
    date = datetime.fromtimestamp(now(), timezone.utc).strftime("%Y-%m-%d")
    versions = recorded.get(SYSTEM, {}).get("calls", {}).get("nvmlSystemGetDriverVersion()", [""])
    driver = versions[-1] if isinstance(versions[-1], str) else ""  # not an error
    about = {"flopwatch": flopwatch.__version__, "driver": driver, "date": date}
    if recorded:
        nvml = {"about": about, "reads": times, "nvml": masked_nvml(recorded, masker)}
        result.files["nvml.json"] = dumps(nvml) + "\n"
    _add_masked(result, masker, tree.links, steps, log)
    result.files["README.md"] = _readme(about, result)
    return result


def _add_masked(
    result: Capture, masker: Masker, links: Mapping[str, str], steps: Iterable[Mapping[str, str]], log: Sequence[str]
) -> None:
    # The log has the serials even if the driver answers nothing.
    masker.learn("\n".join(log))
    result.links = {f"sys/{masker.text(path)}": masker.text(target) for path, target in sorted(links.items())}
    for number, files in enumerate(steps, 1):
        folder = "sys" if number == 1 else f"sys.{number}"
        result.files |= {f"{folder}/{masker.text(path)}": masker.text(text) for path, text in sorted(files.items())}
    if log:
        result.files["kmsg"] = "".join(f"{masker.log(line)}\n" for line in log)
    result.missing = [masker.text(line) for line in result.missing]


def _readme(about: Mapping[str, str], result: Capture) -> str:
    missing = "".join(f"- {line}\n" for line in result.missing) or "- nothing\n"
    return (
        f"# A node captured by flopwatch\n\n"
        f"flopwatch {about['flopwatch']}, driver {about['driver'] or 'none'}, {about['date']}. Serial numbers, UUIDs, "
        f"GUIDs, MAC and IP addresses, processes, users and host names are masked, the same original always by the "
        f"same mask; look through the files before you publish them.\n\n"
        f"Not captured:\n\n{missing}\nAs a test case: put this folder into `tests/captures/nodes/`, run "
        f"`FLOPWATCH_UPDATE_GOLDEN=1 pytest tests/unit/node/collectors/test_goldens.py` "
        "and review `tests/golden/` like code.\n"
    )
