"""Section `capture`: this host's answers as a capture that the simulated driver replays."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.card.machine import Gpu, Machine
from bench.card.report import Report, shortened
from flopwatch.node.capture import capture
from flopwatch.node.capture.recorder import arranged, dumps
from simulator.nvml_replay import Replay

READS, PAUSE = 3, 10.0  # seldom fields are read again after 9 s
ADDED = ("fields", "metrics")  # parts of a recording without identities

Recording = Mapping[str, Mapping[str, Mapping[str, list[Any]]]]


def section(machine: Machine, gpus: list[Gpu], seconds: float, report: Report) -> None:
    """Capture the host, and compare the series of a replay with those of the driver."""
    name = socket.gethostname()
    taken = capture(
        machine.library,
        machine.sysfs,
        machine.kmsg,
        [name],
        reads=READS,
        pause=lambda: machine.sleep(PAUSE),
        clock=machine.clock,
    )
    report.facts.update(files=taken.files, links=taken.links, missing=taken.missing)
    report.info("missing", shortened(taken.missing, 4) or "nothing")
    recorded = json.loads(taken.files["nvml.json"])["nvml"]
    live, replayed = series(machine, machine.library), series(machine, Replay(recorded))
    lost = sorted(live ^ replayed)
    report.check("replay", not lost, shortened(lost, 6) or f"{len(live)} series", "the series of the driver")


def series(machine: Machine, library: Any) -> set[str]:
    """Return the series that a collector reads, without identities and those that depend on the load."""
    with tempfile.TemporaryDirectory() as state, closing(machine.collector(Path(state), library)) as collector:
        samples = collector.read()
    return {
        f"{row.name}{{{','.join((*labels[:1], *labels[2:]))}}}"
        for row, labels, _ in samples
        if not row.name.endswith(("_info", "_processes", "_process_memory_bytes", "_clock_event_active"))
        and not row.name.startswith("flopwatch_")
    }


def merged(document: str, recordings: list[Recording]) -> str:
    """Return an nvml.json with the fields and metrics that other sections requested and the capture lacks."""
    content = json.loads(document)
    nvml = content["nvml"]
    for recording in recordings:
        for subject, sections in recording.items():
            for part in ADDED:
                known = nvml.setdefault(subject, {}).setdefault(part, {})
                for question, answers in sections.get(part, {}).items():
                    known.setdefault(question, answers)
    content["nvml"] = arranged(nvml)
    return dumps(content) + "\n"
