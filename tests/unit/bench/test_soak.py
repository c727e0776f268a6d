"""The soak's verdict on numbers that rise, and on numbers that only move."""

from __future__ import annotations

import math

import pytest

from bench.soak import FILES, PSS, TOLERATED, slope

SECONDS = [float(second) for second in range(90)]


def moving(second: float) -> float:
    """Return a number that moves between -0.3 and 0.3, differently each time."""
    return 0.3 * math.sin(1.7 * second + second**1.3)


def test_the_slope_of_a_line_is_its_own() -> None:
    line = slope(SECONDS, [100 + second / 3600 for second in SECONDS])
    assert line.per_hour == pytest.approx(1)
    assert line.error == pytest.approx(0, abs=1e-9)
    assert line.rise == pytest.approx(89 / 3600)


def test_what_only_moves_does_not_grow() -> None:
    assert not slope(SECONDS, [100 + moving(second) for second in SECONDS]).significant(TOLERATED[PSS])
    assert not slope(SECONDS, [480.0] * 90).significant(TOLERATED[FILES])
    assert not slope(SECONDS, [100 - second for second in SECONDS]).significant(TOLERATED[PSS])


def test_one_step_up_is_not_a_slope_that_goes_on() -> None:
    assert not slope(SECONDS, [100 + (second > 80) + moving(second) for second in SECONDS]).significant(1.0)


@pytest.mark.parametrize("per_second", [0.02, 1])
def test_a_leak_is_found_though_the_numbers_move(per_second: float) -> None:
    values = [100 + per_second * second + moving(second) for second in SECONDS]
    assert slope(SECONDS, values).significant(TOLERATED[PSS])
