"""Check flopwatch on this machine's NVIDIA GPUs: one line per check with PASS, FAIL or INFO, within ten minutes.

Each section runs in its own process, so an error, a crash or a hang costs its own lines only. A folder gets report.json
with the lines and all raw answers, and a capture with masked identities that the simulated driver replays. Section
`nccl` writes raw answers and logs to its folder `nccl`. They have host names, addresses and pids. CARD_NCCL names a
folder with a newer NCCL (bench/card/nccl.py). Exit status: 0 without a FAIL, 1 with one, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "exporter"))

from bench.card.machine import ROOT, Gpu, Machine, real
from bench.card.plan import ALL, BY_NAME, EACH, SECTIONS, TOTAL, Section
from bench.card.report import FAIL, INFO, Line, Report, Unavailable, run

LEAST = 5.0  # seconds that must be left to begin a section
NO_GPU = 2
DRIVER_SECONDS = 120.0  # nvmlInit of eight GPUs takes 40 s without persistence mode


@dataclass
class Result:
    """Lines, facts and NVML recordings of all sections so far. Prints each line unless `quiet`."""

    quiet: bool
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    recordings: list[Any] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Add a line."""
        self.lines.append(line)
        if not self.quiet:
            print(line, flush=True)

    @property
    def failed(self) -> list[Line]:
        """Return the FAIL lines."""
        return [line for line in self.lines if line.status == FAIL]

    def as_dict(self) -> dict[str, Any]:
        """Return the lines and facts as JSON."""
        return {"lines": [line.as_dict() for line in self.lines], "facts": self.facts}


def machine_of(options: argparse.Namespace) -> Machine:
    """Return this machine, or the simulated node of the command line. Raises Unavailable."""
    if options.simulated is None:
        return real()
    from bench.card.simulated import SimulatedMachine

    return SimulatedMachine(options.simulated)


def gpus_of(machine: Machine) -> list[Gpu]:
    """Return the GPUs that answer. Raises Unavailable, whose message names the reason and the remedy."""
    try:
        gpus = machine.gpus()
    except Exception as error:
        raise Unavailable(f"no NVIDIA driver answers ({error}). Run this on a machine with an NVIDIA GPU.") from error
    if not gpus:
        raise Unavailable("the NVIDIA driver lists no GPU that answers. Run `nvidia-smi -L` to find the reason.")
    return gpus


def answered(options: argparse.Namespace) -> list[Gpu]:
    """Return the GPUs, within DRIVER_SECONDS. Raises Unavailable."""
    found: list[list[Gpu]] = []
    why: list[Unavailable] = []

    def ask() -> None:
        try:
            found.append(gpus_of(machine_of(options)))
        except Unavailable as error:
            why.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(DRIVER_SECONDS)
    if found:
        return found[0]
    raise why[0] if why else Unavailable(f"the NVIDIA driver does not answer within {DRIVER_SECONDS:.0f} s.")


def inside(options: argparse.Namespace) -> None:
    """Run one section in this process, and write its lines and facts to a file, one JSON object each."""
    section = BY_NAME[options.section]
    with options.result.open("w", encoding="utf-8") as file:

        def write(kind: str, content: object) -> None:
            file.write(json.dumps({kind: content}, default=str) + "\n")
            file.flush()

        report = Report(section.name, options.label, lambda line: write("line", line.as_dict()))
        report.folder, report.end = options.out, time.monotonic() + options.limit
        recorded: Any = {}
        if section.needs_torch:
            run(resolve_name(section.function), report, options.device, options.share)
        else:
            machine = machine_of(options)
            gpus = gpus_of(machine)
            chosen = next((gpu for gpu in gpus if gpu.index == options.gpu), gpus[0])
            run(resolve_name(section.function), report, machine, gpus if section.gpus == ALL else chosen, options.share)
            recorded = machine.recorder.recorded()
        write("facts", report.facts)
        write("recorded", recorded)


def outside(section: Section, gpu: Gpu, label: str, scale: float, left: float, options: argparse.Namespace) -> Any:
    """Run one section in a process of its own. Return its lines, facts and recording."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        command = [sys.executable, "-m", "bench.card", "--section", section.name, "--result", str(file)]
        share, limit = min(section.seconds * scale, left / 2), min(section.limit, left)
        command += ["--gpu", str(gpu.index), "--label", label, "--share", str(share), "--limit", str(limit)]
        command += ["--device", options.device, "--out", str(options.out)]
        command += ["--simulated", str(options.simulated)] if options.simulated is not None else []
        environ = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        if section.needs_torch and options.device == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT, env=environ, start_new_session=True
            )
            ended = _wait(process, limit)
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no output"])[-1]
        lines, facts, recorded = read(file)
        if not ended and limit < section.limit:
            over = f"no end within the {left:.0f} s that were left"
            lines.append(Line(INFO, f"{section.name}.time", over, gpu=label))
        elif not ended:
            lines.append(Line(FAIL, f"{section.name}.deadline", f"no end within {limit:.0f} s", "an end", label))
        elif process.returncode != 0:
            status = f"status {process.returncode}: {last}"
            lines.append(Line(FAIL, f"{section.name}.process", status, "status 0", label))
        return lines, facts, recorded


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a process and end its session. Return whether it ended by itself. A hung driver call is abandoned."""
    try:
        process.wait(limit)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAST)


def read(file: Path) -> tuple[list[Line], dict[str, Any], Any]:
    """Return the lines, facts and recording that a section wrote. Its last line may be incomplete."""
    lines: list[Line] = []
    facts: dict[str, Any] = {}
    recorded: Any = {}
    for row in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(row)
        except ValueError:
            continue
        if "line" in entry:
            lines.append(Line(**entry["line"]))
        facts, recorded = entry.get("facts", facts), entry.get("recorded", recorded)
    return lines, facts, recorded


def check(gpus: list[Gpu], options: argparse.Namespace, result: Result) -> None:
    """Run the sections one after the other until the time is over."""
    scale, end = options.seconds / TOTAL, time.monotonic() + options.seconds
    names = [name for name in options.only.split(",") if name]
    for section in SECTIONS:
        chosen = next((gpu for gpu in gpus if gpu.index == options.gpu), gpus[0])
        for gpu in gpus if section.gpus == EACH else [chosen]:
            if names and section.name not in names:
                continue
            label = str(gpu.index) if section.gpus != ALL else ""
            left = end - time.monotonic()
            if left < LEAST:
                result.add(Line(INFO, f"{section.name}.time", "not run, because the time is over", gpu=label))
                continue
            share = scale / len(gpus) if section.gpus == EACH else scale
            lines, facts, recorded = outside(section, gpu, label, share, left, options)
            for line in lines:
                result.add(line)
            result.facts[f"{section.name}{label}"] = facts
            result.recordings.append(recorded)


def save(folder: Path, result: Result) -> None:
    """Write report.json, and the capture if there is one, to a new folder."""
    from bench.card.capture import merged
    from flopwatch.node.capture import Capture

    facts = result.facts.pop("capture", {})
    folder.mkdir(parents=True, exist_ok=True)  # a section may have written raw answers there
    (folder / "report.json").write_text(json.dumps(result.as_dict(), indent=1, default=str) + "\n")
    if facts.get("files"):
        taken = Capture(facts["files"], facts["links"], facts["missing"])
        taken.files["nvml.json"] = merged(taken.files["nvml.json"], result.recordings)
        taken.write(folder / "capture")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The last flags are for the processes of single sections."""
    result = argparse.ArgumentParser(
        prog="python -m bench.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--seconds", type=float, default=TOTAL, help=f"limit of the whole, at most and by default {TOTAL:.0f}")
    add("--gpu", type=int, default=0, help="NVML index of the GPU that gets work (default 0)")
    add("--only", default="", metavar="NAMES", help=f"sections, separated by commas: {', '.join(BY_NAME)}")
    add("--json", action="store_true", help="print lines and facts as JSON at the end, in place of lines")
    add("--out", type=Path, metavar="DIR", help="new folder for report and capture (default card-reports/TIME)")
    add("--simulated", type=Path, metavar="DIR", help="folder of a simulated node, in place of the driver")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="where the sections that train do so (default cuda)")
    for flag, kind in {"section": str, "label": str, "share": float, "limit": float, "result": Path}.items():
        add(f"--{flag}", type=kind, help=argparse.SUPPRESS)
    return result


def main() -> int:
    """Run all sections, or the one of this process. Return the exit status."""
    arguments = parser()
    options = arguments.parse_args()
    unknown = [name for name in options.only.split(",") if name and name not in BY_NAME]
    if unknown or not LEAST < options.seconds <= TOTAL:
        what = f"--only {', '.join(unknown)}: no such section" if unknown else f"--seconds: {LEAST:.0f} to {TOTAL:.0f}"
        arguments.error(what)
    if options.section is not None:
        inside(options)
        return 0
    try:
        gpus = answered(options)
    except Unavailable as why:
        print(f"bench.card: {why}", file=sys.stderr, flush=True)
        os._exit(NO_GPU)  # a thread may hang in the driver
    if options.gpu not in [gpu.index for gpu in gpus]:
        arguments.error(f"--gpu {options.gpu}: the GPUs are {', '.join(str(gpu.index) for gpu in gpus)}")
    result = Result(quiet=options.json)
    now = datetime.now(timezone.utc)
    folder = options.out = (options.out or ROOT / "card-reports" / now.strftime("%Y%m%d-%H%M%S")).absolute()
    if folder.exists():
        arguments.error(f"--out {folder}: exists; give a new folder")
    try:
        check(gpus, options, result)
    except KeyboardInterrupt:
        result.add(Line(INFO, "card.interrupted", "not all sections ran"))
    save(folder, result)
    if options.json:
        print(json.dumps(result.as_dict(), default=str))
    else:
        passed = sum(line.status == "PASS" for line in result.lines)
        print(f"{passed} PASS, {len(result.failed)} FAIL; report and capture in {folder}")
    return int(bool(result.failed))


if __name__ == "__main__":
    sys.exit(main())
