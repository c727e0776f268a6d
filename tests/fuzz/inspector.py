"""What NCCL Inspector writes into files that any process of the job's user may write, and the join to ranks.

The first byte chooses the format: bit 0 a textfile instead of JSON lines.
"""

from __future__ import annotations

import math

from flopwatch.catalogue.ranks import count_of, kind_of
from flopwatch.node.telemetry.inspector_formats import MAX_KINDS, MAX_SECONDS, TimedBatch, of_line, of_textfile
from flopwatch.node.telemetry.inspector_groups import group_of, owner, waits_of_receives

GROUPS = [("tp", "0-3"), ("dp", "0-12:4"), ("pp", "0-48:16")]


def target(data: bytes) -> None:
    """Parse every line, and join its communicator to the groups of a rank."""
    textfile, batch = data[:1] > b"\0" and data[0] & 1, TimedBatch("pid:1")
    for line in data[1:].splitlines():
        try:
            one = of_textfile(line.decode(errors="replace"), 1.0) if textfile else of_line(line)
        except ValueError:
            continue
        if one is not None:
            assert 0 <= one.seconds <= MAX_SECONDS
            assert math.isfinite(one.at)
            batch.add(one)
            owner(one.member.name, one.member.rank, {0: GROUPS})
    assert len(batch.sums) <= MAX_KINDS
    for member, kind, peer in batch.sums:
        assert len(kind_of(member.name)) <= 2
        for members in ({}, {member.rank: 0}):
            group = group_of(0, member, kind, GROUPS, members, {0, 1, 2, 3})
            if group is not None:
                assert count_of(group[1]) >= 1
                assert all(count_of(text) for (_, text), _ in waits_of_receives(0, group, {peer: 1.0}))
