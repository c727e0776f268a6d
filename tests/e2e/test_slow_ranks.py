"""A real job of four ranks. A rank 30 % slower is notified, one 15 % slower is named, and no rank without a slowdown.

FLOPWATCH_SEEDS=3 runs three of them, each with other ranks, of three minutes each. Without it there is none: one of
each is in test_chain.py and test_stragglers.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alerts import recording
from demo.stack import DemoStack

pytestmark = [pytest.mark.long, pytest.mark.paired, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(1500)]

SEEDS = int(os.environ.get("FLOPWATCH_SEEDS", "0"))
PACE = 15.0
RANKS = 4
STEP_FLOOR = 0.4  # seconds, most of it sleep
WINDOWS = 3 * 120.0 / PACE  # seconds that a verdict takes
PATIENCE = 300.0
RUN = "slow"


@pytest.fixture(params=range(1, SEEDS + 1) or [pytest.param(0, marks=pytest.mark.skip("minutes each: make simulate"))])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def stack(seed: int, tmp_path: Path) -> Iterator[DemoStack]:
    trainer = ("--steps", "100000", "--checkpoint-every", "200", "--step-floor", str(STEP_FLOOR))
    with DemoStack(tmp_path, pace=PACE, push_interval=1.0, train="torch", trainer=trainer, run=RUN) as running:
        yield running


def named(stack: DemoStack, seconds: float = 1.0) -> set[str]:
    """Return the ranks that were named in the last seconds."""
    found = stack.prometheus.query(f'last_over_time({recording.CONFIRMED}{{run="{RUN}"}}[{seconds:.0f}s])')
    return {labels["rank"] for labels, _ in found}


def notified(stack: DemoStack, rank: str) -> bool:
    return any(f"Rank {rank} of run {RUN}" in str(message.payload) for message in stack.receiver.of("slack"))


def test_a_slow_rank_is_named_and_notified_and_no_rank_without_a_slowdown(
    seed: int, stack: DemoStack, figure: Callable[[str], None]
) -> None:
    slower, slow = str(seed % RANKS), str((seed + 2) % RANKS)
    took: dict[str, float] = {}

    def wait(what: str, *, until: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not until():
            assert time.monotonic() < began + PATIENCE, (
                what,
                named(stack),
                [str(one.payload) for one in (stack.receiver.of("slack"))],
            )
            stack.check()
            time.sleep(0.5)
        took[what] = time.monotonic() - began

    lasts = f'count_over_time({recording.STRAGGLER_LOST}{{run="{RUN}"}}[1h])'
    wait("measured for two verdicts", until=lambda: (stack.prometheus.value(lasts) or 0) > 2 * WINDOWS)
    assert named(stack, 3600) == set()
    assert stack.receiver.of("slack") == []

    stack.control(slow={slower: 0.3})
    # The alert may be sent a second before the record that the boards read.
    wait("30 % notified", until=lambda: notified(stack, slower) and bool(named(stack, 3600)))
    assert named(stack, 3600) == {slower}

    stack.control(slow={slow: 0.15})
    wait("15 % named", until=lambda: named(stack) == {slow})
    assert named(stack, 3600) == {slower, slow}
    figure(
        f"seed {seed}: no rank named in {took['measured for two verdicts']:.0f} s; rank {slower}, 30 % "
        f"slower, notified after {took['30 % notified']:.0f} s; rank {slow}, 15 % slower, named after "
        f"{took['15 % named']:.0f} s"
    )
