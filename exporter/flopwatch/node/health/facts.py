"""Samples of one look at a node, prepared for the rules of its verdict."""

from collections.abc import Iterable, Iterator, Mapping

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.health.expectations import Expectations, Ports

# Without a recovery action of the driver (before R560, or the GPU is gone) only an unobservable reset ends the effect
# of a critical Xid. An hour after the last one, the next job has met it again, or the GPU was reset.
XID_SECONDS = 3600.0

ACTIVE = (4, 5)  # InfiniBand port states
NVLINK_UP = ("active", "sleep")

Labels = tuple[str, ...]
Found = tuple[str, str]  # a part, and a sentence about it


class Facts:
    """Samples that the rules use, in the units of the catalogue, and what they are compared with."""

    def __init__(
        self, samples: Iterable[Sample], expected: Expectations, now: float, booted: float, rows: Iterable[str]
    ) -> None:
        self.expected = expected
        self.lately = max(booted, now - XID_SECONDS)
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in rows}
        numbers = self._numbers
        for row, labels, raw in samples:
            if row.name in numbers:
                numbers[row.name][labels] = raw * row.scale
        self.released = any(self.of(m.FLOPWATCH_DRIVER_RELEASED).values())
        self.driverless = 0 in self.of(m.GPU_DRIVER_LOADED).values()
        self._index = {labels[1]: dict(zip(m.GPU_INFO.labels, labels, strict=True)) for labels in self.of(m.GPU_INFO)}
        role = m.INFINIBAND_INFO.labels.index("role")
        self.roles = {labels[:2]: labels[role] for labels in self.of(m.INFINIBAND_INFO)}
        present = self.of(m.INFINIBAND_PORT_PRESENT)
        self.active = {
            port
            for port, state in self.of(m.INFINIBAND_PORT_STATE_ID).items()
            if state in ACTIVE and present.get(port, 1)
        }
        self.answering = {gpu for gpu, present in self.of(m.GPU_PRESENT).items() if present}

    def of(self, row: Metric) -> Mapping[Labels, float]:
        """Return the numbers of one row by its label values."""
        return self._numbers[row.name]

    def part(self, row: Metric, labels: Labels) -> str:
        """Return the part of a sample as `gpu 3`, `port mlx5_0/1` or `switch 0000:05:00`."""
        if row.labels[:2] == m.GPU:
            return f"gpu {labels[0]}"
        return f"port {labels[0]}/{labels[1]}" if row.labels[:2] == m.PORT else f"{row.labels[0]} {labels[0]}"

    def named(self, row: Metric, labels: Labels) -> str:
        """Return the part as the subject of a sentence; a GPU with its PCI address and serial number."""
        if row.labels[:2] != m.GPU:
            return self.part(row, labels)
        info = self._index.get(labels[1], {})
        place = [info.get("pci_bus_id", ""), f"serial {info['serial']}" if info.get("serial") else ""]
        known = ", ".join(word for word in place if word)
        return f"GPU {labels[0]} ({known})" if known else f"GPU {labels[0]}"

    def found(self, row: Metric, labels: Labels, text: str) -> Found:
        """Return the part of a sample, and a sentence with the part as its subject."""
        return self.part(row, labels), f"{self.named(row, labels)} {text}"

    def ports_of(self, role: str) -> set[Labels]:
        """Return the ports that the expectation of a role covers, missing ones included."""
        ports = {*self.of(m.INFINIBAND_PORT_PRESENT), *self.of(m.INFINIBAND_PORT_STATE_ID)}
        return ports if role == "any" else {port for port in ports if self.roles.get(port, "") == role}

    def expected_ports(self, port: Labels) -> tuple[str, Ports] | None:
        """Return the role and the expectation that cover a port, or None."""
        for role in (self.roles.get(port, ""), "any"):
            if role in self.expected.ports:
                return role, self.expected.ports[role]
        return None

    def missed_port(self, port: Labels) -> bool:
        """Return whether the node has fewer active ports than expected without this one."""
        wanted = self.expected_ports(port)
        return wanted is None or not wanted[1].count or len(self.ports_of(wanted[0]) & self.active) < wanted[1].count

    def rate_of(self, port: Labels) -> float:
        """Return the expected rate of a port in byte/s, 0 without an expectation."""
        wanted = self.expected_ports(port)
        if wanted is not None and wanted[1].rate_gbps:
            return wanted[1].rate_gbps * 1e9 / 8
        return self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND).get(port, 0.0)

    def lost_ports(self) -> Iterator[tuple[Labels, str]]:
        """Yield the ports that are missed, as "gone", or as "down" if they were active once."""
        for port, present in self.of(m.INFINIBAND_PORT_PRESENT).items():
            if not present and self.missed_port(port):
                yield port, "gone"
        for port, state in self.of(m.INFINIBAND_PORT_STATE_ID).items():
            used = port in self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND) and self.of(
                m.INFINIBAND_PORT_PRESENT
            ).get(port, 1)
            if state not in ACTIVE and used and self.missed_port(port):
                yield port, "down"
