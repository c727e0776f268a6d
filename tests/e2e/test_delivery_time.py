"""Seconds from a fault of a real job to its message in Slack, at the intervals of production."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.delivery import SLOW_RANK, STOPPED_RANK, deliveries
from flopwatch.verdicts.overdue import OVERDUE_SECONDS

pytestmark = [pytest.mark.long, pytest.mark.paired, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(600)]


def test_a_slow_rank_is_in_slack_within_60_s_and_a_hang_within_45_s(
    tmp_path: Path, figure: Callable[[str], None]
) -> None:
    slow, hang = deliveries(tmp_path)
    figure(str(slow))
    figure(f"{hang}, {hang.sent - OVERDUE_SECONDS:.0f} s after the step was overdue")
    assert f"Rank {SLOW_RANK} of run" in slow.text
    assert f"Rank {STOPPED_RANK} on" in hang.text
    assert slow.sent <= 60
    assert hang.sent <= 45
