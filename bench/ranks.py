"""Ranks that push to an exporter under test: recorded pushes, sent with the client and at the moments of the hook."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flopwatch.training.push.otlp import Undelivered, Wire
from flopwatch.training.push.pusher import Pusher
from flopwatch.training.recorder import Snapshot

PUSH = Path(__file__).resolve().parent.parent / "tests" / "captures" / "otlp" / "hook_0.2.0.bin"
RANKS, PUSH_SECONDS = 8, 5.0


def pushes(uuids: Sequence[str]) -> list[bytes]:
    """Return the pushes of eight ranks: a recorded push of the hook, with the rank and the GPU of each."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    result = []
    for rank in range(RANKS):
        request = ExportMetricsServiceRequest.FromString(PUSH.read_bytes())
        attributes = {attribute.key: attribute for attribute in request.resource_metrics[0].resource.attributes}
        attributes["flopwatch.rank"].value.int_value = rank
        attributes["flopwatch.gpu_uuid"].value.string_value = uuids[rank]
        attributes["flopwatch.start_unix"].value.double_value = time.time() - 60
        # The recorded process had finished, and its pid is gone.
        for gone in ("flopwatch.status", "flopwatch.pid", "flopwatch.pid_start_ticks"):
            request.resource_metrics[0].resource.attributes.remove(attributes[gone])
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:  # of another GPU, a push is decoded in full
            for label in metric.gauge.data_points[0].attributes if metric.name == "training_rank_info" else ():
                label.value.string_value = uuids[rank] if label.key == "uuid" else label.value.string_value
        result.append(request.SerializeToString())
    return result


class Rank(Wire):
    """Rank that sends a recorded push with the hook's own client."""

    def __init__(self, port: int, body: bytes) -> None:
        super().__init__(f"http://127.0.0.1:{port}", time.time(), None)
        self.body = body

    def encode(self, snapshot: Snapshot) -> bytes:
        """Return the recorded push."""
        return self.body

    def send(self, body: bytes) -> bool:
        """Send a push. Raises RuntimeError if the exporter does not accept all of it."""
        try:
            return super().send(body)
        except Undelivered as error:
            raise RuntimeError(str(error)) from error


@contextlib.contextmanager
def pushing(ranks: Sequence[Rank], host: str) -> Iterator[None]:
    """Push with the hook's own threads until the block ends. Raises the first error of a push."""
    errors = list[Exception]()
    snapshot = Snapshot({}, {}, None)
    threads = [Pusher(rank, PUSH_SECONDS, lambda: snapshot, print, errors.append, host) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.stop(None)
    for error in errors:
        raise error
