"""Lines of `flopwatch doctor` about sources in training processes: the hook, NCCL Inspector, the flight recorder."""

import mmap
import re
import time
from contextlib import suppress
from pathlib import Path

from flopwatch.node.collectors import StateFile
from flopwatch.node.telemetry.evidence import EVIDENCE_STATE
from flopwatch.node.telemetry.inspector import EVERY, INSPECTOR_STATE
from flopwatch.settings import ExporterSettings

HOOK = "measured in each training process. training_collective_wait_unavailable has the reason where it is not"
RECORDER = "PyTorch's last operations are kept with the stacks of a hang if its recorder is on (TORCH_FR_BUFFER_SIZE)"
BAD_VERSIONS = {
    "2.28.9": "can crash the training process with NCCL Inspector (github.com/NVIDIA/nccl/issues/1992)",
    "2.31.2": "slows small all-reduces by up to 13 % with NCCL Inspector (github.com/NVIDIA/nccl/issues/2355)",
}
MAX_AGE = 12 * EVERY  # seconds since the exporter's last look at the files, while ranks need them
_PLUGIN = re.compile(r"lib[nr]ccl-profiler-inspector")
_LIBRARY = re.compile(r" (/\S*/lib[nr]ccl\.so\S*)$", re.MULTILINE)
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")


def lines(settings: ExporterSettings, proc: Path) -> list[tuple[str, str, str]]:
    """Return name, state and reason of each source, apart from RAS."""
    if settings.ledger == "off":
        return [(name, "off", "--ledger is off") for name in ("hook waits", "inspector", "flight recorder")]
    counts = StateFile(settings.state / EVIDENCE_STATE).load().get("flight_recorders", {})
    found = [f"{state} in {counts[state]} ranks" for state in ("on", "off", "unknown") if counts.get(state)]
    state = "off" if counts.get("off") and len(found) == 1 else "ok"
    recorder = "flight recorder", state, "; ".join([RECORDER, *(found or ["no rank has reported it yet"])])
    return [("hook waits", "ok", HOOK), ("inspector", *_inspector(settings, proc)), recorder]


def _inspector(settings: ExporterSettings, proc: Path) -> tuple[str, str]:
    bad = [f"NCCL {version} {BAD_VERSIONS[version]}" for version in sorted(versions(proc)) if version in BAD_VERSIONS]
    if not settings.inspector:
        return ("failed", "; ".join(bad)) if bad else ("off", "--inspector reads NCCL Inspector (docs/inspector.md)")
    last = StateFile(settings.state / INSPECTOR_STATE).load()
    counts, problem = last.get("operations", {}), str(last.get("problem", ""))
    age = time.time() - float(last.get("t", 0.0))
    if settings.inspector != "otlp" and not Path(settings.inspector).is_dir():
        problem = f"{settings.inspector} is not a folder"
    found = [
        *bad,
        problem,
        "" if last else "no rank has needed it so far",
        f"last read {age:.0f} s ago" if last and age > MAX_AGE else "",
        ", ".join(f"{count:.0f} operations {outcome}" for outcome, count in counts.items() if count),
        f"{last['skipped']:.0f} bytes skipped" if last.get("skipped") else "",
    ]
    return "failed" if bad or problem else "ok", "; ".join(filter(len, found))


def versions(proc: Path) -> set[str]:
    """Return the versions of NCCL in processes that have loaded the plugin."""
    libraries: dict[tuple[int, int], Path] = {}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            if _PLUGIN.search(maps) and (library := _LIBRARY.search(maps)):
                path = process / "root" / library[1].lstrip("/")
                about = path.stat()
                libraries[about.st_dev, about.st_ino] = path
    found = set()
    for path in libraries.values():
        with (
            suppress(OSError, ValueError),
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if version := _VERSION.search(content):
                found.add(version[1].decode())
    return found
