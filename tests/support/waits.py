"""Waits of a run by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flopwatch.verdicts.waits import Communicator, Interval, Layout, Place


def places(layout: Layout) -> list[Place]:
    """Return all places of a layout in their order."""
    return [layout.place(number) for number in range(len(layout.rank_of))]


def interval_of(
    steps: float, step_seconds: float, waits: Mapping[int, Mapping[Communicator, float]], tokens: Mapping[int, float]
) -> Interval:
    """Return an interval from the waits of each rank by communicator, as shares of a step."""
    layout = Layout(waits)
    each = np.ones(len(layout.ranks))
    waited = steps * step_seconds * np.array([waits[rank].get(group, 0.0) for group, rank in places(layout)])
    worked = steps * np.array([tokens.get(rank, 0.0) for rank in layout.ranks])
    return Interval(layout, steps * each, steps * step_seconds * each, waited, worked, np.nan * each)
