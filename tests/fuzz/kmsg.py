"""Lines of the kernel log: every process that may write to /dev/kmsg, and every driver, chooses their text."""

from __future__ import annotations

import re

from flopwatch.node.collectors.xid.kernel_lines import (
    NODE_EVENTS,
    events,
    introductions,
    node_events,
    oom_kills,
    record,
    recovery_action,
    switch_errors,
)

PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}")


def target(data: bytes) -> None:
    """Parse every line, as the collector does with one record of /dev/kmsg."""
    for line in data.decode("utf-8", "replace").split("\n"):
        entry = record(line)
        text = line if entry is None else entry.text
        if entry is not None:
            assert entry.sequence >= 0
            assert entry.at >= 0
        for event in events(text):
            assert PCI.fullmatch(event.pci), event
            assert event.xid >= 0
            assert (recovery_action(event.detail) or 0) >= 0
        for pci, uuid in introductions(text):
            assert PCI.fullmatch(pci), pci
            assert len(uuid) == 40
        for switch, code in switch_errors(text):
            assert PCI.fullmatch(switch.partition(".")[0]), switch
            assert len(code) == 5
        assert all(0 <= pid < 10**10 for pid in oom_kills(text))
        assert NODE_EVENTS.keys() >= set(node_events(text))
