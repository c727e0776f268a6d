"""Exporter that bench/exporter.py measures, in its own process without other imports.

    python bench/under_test.py '{"port": 9450, "otlp": 4318, "state": "DIR", "gpus": 8}'

With "gpus", it serves a simulated node of up to 16 GPUs. Otherwise it serves this host, or only the "sources" that are
given. Every scrape reads the sources, because no result is shared for a second. The benchmark, not the exporter,
advances the simulated node.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
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


def build(factory: str, gpus: str, **arguments: str) -> Collector:
    """Return the collector that `factory` (module:function) makes, for a simulated node with `gpus` GPUs.

    Called in a reader process.
    """
    more_gpus(int(gpus))
    module, _, function = factory.partition(":")
    collector: Collector = getattr(importlib.import_module(module), function)(**arguments)
    return collector


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
        simulate="h100x8" if gpus else None,
    )

    def simulated(settings: ExporterSettings) -> HostSources:
        from flopwatch.simulate.sources import host_sources as simulation

        return replace(simulation(settings), tick=None)

    def readers(settings: ExporterSettings, sources: HostSources) -> list[Reader]:
        chosen = [one for one in hardware(settings, sources) if one.name in options.get("sources", [one.name])]
        for one in chosen if gpus > 8 else ():
            more = {"factory": one.spec.factory, "gpus": str(gpus)}
            one.spec = Spec("bench.under_test:build", {**one.spec.arguments, **more})
        return chosen

    vars(scrape).update(SHARED_SECONDS=0.0, PAGE_SECONDS=0.0)
    vars(exporter).update(hardware=readers)
    exporter.run(settings, simulated if gpus else host_sources)


if __name__ == "__main__" and len(sys.argv) > 1:
    serve(json.loads(sys.argv[1]))
