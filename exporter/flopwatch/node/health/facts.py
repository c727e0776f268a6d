"""Samples of one look at a host, prepared for the health rules."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.health.expectations import Expectations, Ports

# A reset ends the effect of a critical Xid, which no driver before R560 and no missing GPU reports. After an hour, the
# next job has met the Xid again, or the GPU was reset.
XID_SECONDS = 3600.0

ACTIVE = (4, 5)  # InfiniBand port states
NVLINK_UP = ("active", "sleep")

Labels = tuple[str, ...]
Found = tuple[str, str]  # a part, and a sentence about it


class Facts:
    """Samples that the rules use, in the catalogue's units, and the expectations that they are compared with."""

    def __init__(
        self, samples: Iterable[Sample], expected: Expectations, now: float, booted: float, rows: Iterable[str]
    ) -> None:
        self.expected = expected
        self.lately = max(booted, now - XID_SECONDS)
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in rows}
        numbers = self._numbers
        for row, labels, raw in samples:
            if (own := numbers.get(row.name)) is not None:
                own[labels] = raw * row.scale
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
        self.nvlinks: Counter[Labels] = Counter()  # active NVLinks of each GPU that has some, active or not
        for labels, number in self.of(m.NVLINK_LINKS).items():
            self.nvlinks[labels[:2]] += int(number) if labels[2] in NVLINK_UP else 0

    def of(self, row: Metric) -> Mapping[Labels, float]:
        """Return the values of a row's series, by label values."""
        return self._numbers[row.name]

    def part(self, row: Metric, labels: Labels) -> str:
        """Return the GPU, port or switch of a sample: `gpu 3`, `port mlx5_0/1` or `switch 0000:05:00`."""
        if row.labels[:2] == m.GPU:
            return f"gpu {labels[0]}"
        return f"port {labels[0]}/{labels[1]}" if row.labels[:2] == m.PORT else f"{row.labels[0]} {labels[0]}"

    def named(self, row: Metric, labels: Labels) -> str:
        """Return the GPU, port or switch of a sample for a sentence. A GPU has its PCI address and serial number."""
        if row.labels[:2] != m.GPU:
            return self.part(row, labels)
        info = self._index.get(labels[1], {})
        place = [info.get("pci_bus_id", ""), f"serial {info['serial']}" if info.get("serial") else ""]
        known = ", ".join(word for word in place if word)
        return f"GPU {labels[0]} ({known})" if known else f"GPU {labels[0]}"

    def found(self, row: Metric, labels: Labels, text: str) -> Found:
        """Return a finding: `part` of a sample, and a sentence that begins with `named` and ends with `text`."""
        return self.part(row, labels), f"{self.named(row, labels)} {text}"

    def ports_of(self, role: str) -> set[Labels]:
        """Return the ports with a role, or all ports for the role `any`, missing ports included."""
        ports = {*self.of(m.INFINIBAND_PORT_PRESENT), *self.of(m.INFINIBAND_PORT_STATE_ID)}
        return ports if role == "any" else {port for port in ports if self.roles.get(port, "") == role}

    def expected_ports(self, port: Labels) -> tuple[str, Ports] | None:
        """Return the role (or `any`) whose expectation applies to a port, and the expectation. None without one."""
        for role in (self.roles.get(port, ""), "any"):
            if role in self.expected.ports:
                return role, self.expected.ports[role]
        return None

    def missed_port(self, port: Labels) -> bool:
        """Return whether the loss of a port is a fault. It is not if as many ports as expected are active."""
        wanted = self.expected_ports(port)
        return wanted is None or not wanted[1].count or len(self.ports_of(wanted[0]) & self.active) < wanted[1].count

    def rate_of(self, port: Labels) -> float:
        """Return a port's expected rate in byte/s, else its highest rate so far, else 0."""
        wanted = self.expected_ports(port)
        if wanted is not None and wanted[1].rate_gbps:
            return wanted[1].rate_gbps * 1e9 / 8
        return self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND).get(port, 0.0)

    def lost_ports(self) -> Iterator[tuple[Labels, str]]:
        """Yield ports whose loss is a fault, with "gone" (missing in /sys) or "down" (it was active once)."""
        present = self.of(m.INFINIBAND_PORT_PRESENT)
        used = self.of(m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND)
        for port, there in present.items():
            if not there and self.missed_port(port):
                yield port, "gone"
        for port, state in self.of(m.INFINIBAND_PORT_STATE_ID).items():
            if state not in ACTIVE and port in used and present.get(port, 1) and self.missed_port(port):
                yield port, "down"
