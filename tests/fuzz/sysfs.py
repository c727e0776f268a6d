"""Files below /sys/class/infiniband: their text is the adapter's firmware's, and one of EFA, iWARP or hfi1 differs."""

from __future__ import annotations

import math

from flopwatch.node.collectors.infiniband import default_routes
from flopwatch.node.collectors.infiniband.files import (
    counter,
    local_identifier,
    operational_state,
    physical_state,
    rate,
    risen,
    state,
    temperature,
)
from flopwatch.node.collectors.infiniband.pci import address

NUMBERS = (counter, state, physical_state, rate, local_identifier, operational_state)


def target(data: bytes) -> None:
    """Read the first line as every kind of file."""
    text = data.decode("ascii", "replace")
    line = text.partition("\n")[0].strip()
    for parse in NUMBERS:
        number = parse(line)
        assert number is None or (math.isfinite(number) and number >= 0), (parse, number)
    assert abs(temperature(line) or 0) < 10_000_000
    first, second = counter(line), counter(text.partition("\n")[2].strip())
    if first is not None and second is not None:
        assert risen(first, second, 2**32) >= 0
    assert all(isinstance(name, str) for name in default_routes(text))
    assert isinstance(address(line), str)
