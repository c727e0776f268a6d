"""Exporter that bench/exporter.py measures, in its own process without other imports.

    python bench/under_test.py '{"port": 9450, "otlp": 4318, "state": "DIR", "gpus": 8}'

With "gpus", it serves a simulated node of up to 16 GPUs. Otherwise it serves this host, or only the "sources" that are
given. Every scrape reads the sources, because no result is shared for a second. With "driver", the folder of a
simulated node, it only makes the driver's calls of a scrape at each byte on stdin. The benchmark, not the exporter,
advances the simulated node.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from flopwatch.node.collectors import Collector


def more_gpus(gpus: int) -> None:
    """Give simulated nodes `gpus` GPUs, at most 16. GPUs above eight get PCI buses of their own."""
    from flopwatch.simulate import h100

    if gpus > h100.GPUS:
        buses = (*h100.PCI_BUSES, *(bus + 8 for bus in h100.PCI_BUSES))
        vars(h100).update(GPUS=gpus, PCI_BUSES=buses[:gpus])


def build(factory: str, count: str, **arguments: str) -> Collector:
    """Return the collector that `factory` (module:function) makes, for a simulated node with `count` GPUs.

    Called in a reader process. NVML waits for events in the kernel, so the simulated one looks for them only rarely.
    """
    from flopwatch.simulate import pynvml

    vars(pynvml).update(EVENT_POLL=10.0)
    more_gpus(int(count))
    module, _, function = factory.partition(":")
    collector: Collector = getattr(importlib.import_module(module), function)(**arguments)
    return collector


def drive(root: Path) -> None:
    """Repeat the calls of the simulated driver that the NVML collector makes in a scrape, at each byte on stdin."""
    from flopwatch.node.collectors.nvml import Nvml
    from flopwatch.simulate.pynvml import Simulation

    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    library = Simulation(root)

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            found = getattr(library, name)
            if not hasattr(Simulation, name):
                return found  # a constant or a structure

            def call(*arguments: object) -> object:
                calls.append((found, arguments))
                return found(*arguments)

            return call

    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        collector = Nvml(Recorder(), "node1", Path(folder, "gpus.json"), clock=lambda: now)
        for _ in range(3):  # the first two read more than every scrape does
            calls.clear()
            now += 15.0  # at least one of the collector's intervals, except those for ever
            collector.read()
    while os.read(0, 1):
        for call, arguments in calls:
            with contextlib.suppress(library.NVMLError):
                call(*arguments)


def serve(options: Mapping[str, Any]) -> None:
    """Run the exporter with the options of the command line until a signal stops it."""
    from flopwatch.node import server as exporter
    from flopwatch.node.scrape import scrape
    from flopwatch.node.scrape.reader import HostSources, Reader, Spec, hardware, host_sources
    from flopwatch.settings import Address, ExporterSettings

    gpus = options.get("gpus", 0)
    settings = ExporterSettings(
        listen=Address("127.0.0.1", options["port"]),
        otlp_listen=Address("127.0.0.1", options["otlp"]),
        state=Path(options["state"]),
        sysfs=Path(options.get("sysfs", "/sys")),
        host="node1",
        ledger=options.get("ledger", "off"),
        simulate="h100x8" if gpus else None,
    )

    def simulated(settings: ExporterSettings) -> HostSources:
        from flopwatch.simulate.sources import host_sources as simulation

        return replace(simulation(settings), tick=None)

    def readers(settings: ExporterSettings, sources: HostSources) -> list[Reader]:
        chosen = [one for one in hardware(settings, sources) if one.name in options.get("sources", [one.name])]
        for one in [one for one in chosen if gpus > 8 or (gpus and one.name == "xid")]:
            more = {"factory": one.spec.factory, "count": str(gpus)}
            one.spec = Spec("bench.under_test:build", {**one.spec.arguments, **more})
        return chosen

    vars(scrape).update(SHARED_SECONDS=0.0, PAGE_SECONDS=0.0)
    vars(exporter).update(hardware=readers)
    exporter.run(settings, simulated if gpus else host_sources)


if __name__ == "__main__" and len(sys.argv) > 1:
    chosen = json.loads(sys.argv[1])
    drive(Path(chosen["driver"])) if "driver" in chosen else serve(chosen)
