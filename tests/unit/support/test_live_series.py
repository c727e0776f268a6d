"""The rule tests' series as a target serves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.live_series import Series, Target, of, samples


@pytest.mark.parametrize(
    ("notation", "values"),
    [
        ("1 2.5 -3", [1, 2.5, -3]),
        ("0+2x3", [0, 2, 4, 6]),
        ("5-1x2 7", [5, 4, 3, 7]),
        ("1x2", [1, 1, 1]),
        ("_ 1 _x2 stale 2", [None, 1, None, None, None, 2]),
        ("1e-3+1e-3x1", [0.001, 0.002]),
        ("-2x1", [-2, -2]),
    ],
)
def test_values_are_those_of_a_rule_test(notation: str, values: list[float | None]) -> None:
    assert list(samples(notation)) == pytest.approx(values)


def test_a_counter_moves_all_the_time_and_a_gauge_at_its_samples() -> None:
    counter = Series("a_total", "", 60, (0, 60, 30, None, 1))
    assert [counter.at(t) for t in (0, 15, 60, 90, 120, 200, 250, 300)] == [0, 15, 60, 60, 30, None, 1, None]
    assert Series("a", "", 60, (0, 60)).at(15) == 0


def test_a_counter_moves_on_after_its_last_sample_before_a_gap() -> None:
    counter = Series("a_total", "", 60, (None, 10, 70, None, 100, 40, None, 5))
    assert [counter.at(t) for t in (30, 90, 150, 180, 270, 330, 450, 480)] == [None, 40, 100, None, 100, 40, 5, None]


def test_each_rule_test_has_places_of_its_own_and_a_time_is_one_of_today(tmp_path: Path) -> None:
    (tmp_path / "One.yaml").write_text("""
tests:
  - interval: 15s
    input_series:
      - {series: 'run_start_timestamp_seconds{run="r",tenant=""}', values: "-40x9"}
      - {series: 'up{host="h",job="j"}', values: "1x9"}
      - {series: 'ALERTS{alertname="A"}', values: "1x9"}
  - {interval: 1m, input_series: [{series: plain, values: "_ 2x9"}]}
""")
    with Target(of([tmp_path / "One.yaml"], 60), pace=10) as target:
        assert target.text(1000) == ""
        target.began = 1000
        begun = (
            'run_start_timestamp_seconds{run="One0-r",tenant="",instance="One0-none"} 996.0\n'
            'up{host="One0-h",job="j",instance="One0-h"} 1.0\n'
        )
        assert target.text(1000) == begun
        assert target.text(1006) == begun + 'plain{instance="One1-none"} 2.0\n'
