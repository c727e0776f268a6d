"""What training processes, and any other process on the node, post to the intake.

The first byte chooses what the request's headers would say: bit 0 JSON instead of protobuf, bit 1 gzip.
"""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from flopwatch.http.exposition import Exposition
from flopwatch.node.scrape.scrape import Registry, well_formed
from flopwatch.node.telemetry import otlp
from flopwatch.node.telemetry.admission import MAX_RANKS
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings

GPUS = {"GPU-a": "GPU-a", "GPU-b": "GPU-b"}


def target(data: bytes) -> None:
    """Take a request as the intake does, serve it, and owe the ledger its records."""
    headers, body = data[:1] or b"\0", data[1:]
    media = otlp.JSON if headers[0] & 1 else otlp.PROTOBUF
    telemetry = Telemetry(ExporterSettings(host="node-7"), Registry(), lambda: GPUS)
    try:
        telemetry.receive(otlp.decode(otlp.inflate(body) if headers[0] & 2 else body, media))
    except otlp.Refused:
        return
    telemetry.check()
    samples = telemetry.ask(1.0).samples
    assert len(samples) <= MAX_RANKS * otlp.MAX_POINTS * (otlp.MAX_BUCKETS + 3)
    assert all(map(well_formed, samples))
    text = Exposition().render(samples, openmetrics=True).encode(errors="replace").decode()
    list(parse(text + "# EOF\n"))  # type: ignore[no-untyped-call]
    for _, records in telemetry.due().values():
        assert records
