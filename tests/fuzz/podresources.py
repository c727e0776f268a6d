"""The answer of the kubelet, or of another process that listens on its socket."""

from __future__ import annotations

from flopwatch.node.collectors.identity.podresources import MAX_ASSIGNMENTS, decode


def target(data: bytes) -> None:
    """Decode it to devices of containers, or to a ValueError."""
    try:
        found = decode(data)
    except ValueError:
        return
    assert len(found) <= MAX_ASSIGNMENTS
    assert all(isinstance(word, str) for assignment in found for word in assignment)
