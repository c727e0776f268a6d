"""Names and labels of node_exporter's InfiniBand collector for flopwatch's samples (`--expose node`).

data/node_names.csv has each name and the row behind it: infiniband_linux.go of
https://github.com/prometheus/node_exporter 1.11.1, for files in class_infiniband.go of
https://github.com/prometheus/procfs (3c943fd).
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import flopwatch
from flopwatch import catalogue as m
from flopwatch.catalogue import PortCounter, Sample
from flopwatch.http.exposition import Exposition

INFO = m.row.gauge("node_infiniband_info", "Identity of one adapter.",
    ("device", "board_id", "firmware_version", "hca_type"), m.INFINIBAND_INFO.source)  # fmt: skip


class NodeNames:
    """Renderer of samples under the names of node_exporter."""

    source = "node_names"  # its label in the exporter's own metrics

    def __init__(self) -> None:
        with Path(flopwatch.__file__).with_name("data").joinpath("node_names.csv").open(newline="") as file:
            _, *names = csv.reader(file)
        self.rows = {row: replace(m.BY_NAME[row], name=name) for name, row in names}
        self._exposition = Exposition()

    def render(self, samples: Sequence[Sample], *, openmetrics: bool = False) -> str:
        """Return the samples under node_exporter's names, as Prometheus text or OpenMetrics, without `# EOF`."""
        present = {labels[0] for row, labels, _ in samples if row is m.INFINIBAND_PORT_STATE_ID}
        infos = (dict(zip(row.labels, labels, strict=True)) for row, labels, _ in samples if row is m.INFINIBAND_INFO)
        adapters = {tuple(info[label] for label in INFO.labels) for info in infos if info["device"] in present}
        named: list[Sample] = [(INFO, labels, 1) for labels in sorted(adapters)]
        named += [(self.rows[row.name], labels, value) for row, labels, value in samples if row.name in self.rows]
        return self._exposition.render(named, openmetrics=openmetrics)

    def own(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples without those that only node_exporter has: see `PortCounter.quiet` and `roce`."""
        layer = m.INFINIBAND_INFO.labels.index("link_layer")
        roce = {labels[:2] for row, labels, _ in samples if row is m.INFINIBAND_INFO and labels[layer] == "Ethernet"}
        return [
            (row, labels, value)
            for row, labels, value in samples
            if not isinstance(row, PortCounter) or not ((row.quiet and value == 0) or (not row.roce and labels in roce))
        ]
