"""Levels of series: core has what the shipped readers ask for, and a sparse counter starts at 0 when it leaves 0."""

import json

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.scrape.levels import CORE, MAX_GONE, Levels, in_core

GPU = ("0", "GPU-a")
XID = (m.GPU_XID_ERRORS_TOTAL, (*GPU, "79"))
TEMPERATURE: Sample = (m.GPU_TEMPERATURE_CELSIUS, GPU, 41)
PIPE: Sample = (m.GPU_PIPE_ACTIVE_SECONDS_TOTAL, (*GPU, "fp64"), 3.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_full_has_every_sample() -> None:
    samples = [TEMPERATURE, PIPE, (*XID, 0)]
    assert Levels("full", 60)(samples) == samples


def test_core_leaves_out_families_that_are_not_read() -> None:
    assert Levels("core", 60)([PIPE, TEMPERATURE, PIPE]) == [TEMPERATURE]


def test_core_has_the_label_values_that_are_read() -> None:
    limits: list[Sample] = [
        (m.GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS, (*GPU, limit), 40) for limit in ("shutdown", "slowdown", "memory")
    ]
    assert Levels("core", 60)(limits) == [limits[1]]


def test_the_decision_follows_the_set_of_series() -> None:
    levels = Levels("core", 60)
    assert levels([PIPE, TEMPERATURE]) == [TEMPERATURE]
    assert levels([TEMPERATURE, PIPE]) == [TEMPERATURE]
    assert levels([(m.GPU_TEMPERATURE_CELSIUS, GPU, 42)]) == [(m.GPU_TEMPERATURE_CELSIUS, GPU, 42)]


def test_a_sparse_counter_is_absent_until_its_first_event_and_then_starts_at_0() -> None:
    clock = Clock()
    levels = Levels("core", 60, clock)
    assert levels([(*XID, 0)]) == []
    clock.now = 100
    assert levels([(*XID, 1)]) == [(*XID, 0)]
    clock.now = 159
    assert levels([(*XID, 2)]) == [(*XID, 0)]
    clock.now = 160
    assert levels([(*XID, 2)]) == [(*XID, 2)]


def test_a_count_from_before_the_start_of_the_exporter_is_served_at_once() -> None:
    assert Levels("core", 60)([(*XID, 5)]) == [(*XID, 5)]


def test_a_counter_that_was_reset_starts_again() -> None:
    clock = Clock()
    levels = Levels("core", 60, clock)
    assert [levels([(*XID, number)]) for number in (3, 0, 1)] == [[(*XID, 3)], [], [(*XID, 0)]]


def test_another_series_does_not_end_the_start_of_a_counter() -> None:
    clock = Clock()
    levels = Levels("core", 60, clock)
    levels([(*XID, 0)])
    assert levels([(*XID, 1)]) == [(*XID, 0)]
    clock.now = 30
    assert levels([TEMPERATURE, (*XID, 1)]) == [TEMPERATURE, (*XID, 0)]


def test_a_counter_whose_source_could_not_be_read_still_starts_at_0() -> None:
    levels = Levels("core", 60, Clock())
    scrapes: list[list[Sample]] = [[(*XID, 0)], [TEMPERATURE], [(*XID, 1)]]
    assert [levels(samples) for samples in scrapes] == [[], [TEMPERATURE], [(*XID, 0)]]


def test_series_that_are_gone_are_remembered_up_to_a_bound() -> None:
    levels = Levels("core", 60)
    levels([(m.GPU_XID_ERRORS_TOTAL, (*GPU, str(xid)), 0) for xid in range(2 * MAX_GONE)])
    levels([TEMPERATURE])
    assert len(levels._risen) == MAX_GONE


@pytest.mark.parametrize(
    "series",
    [
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, ("lm", "0", "evaluation")),
        (m.HOST_PROCESS_BLOCKED_SECONDS, ("lm", "0", "stopped")),
    ],
)
def test_seconds_and_gauges_are_served_at_once(series: tuple[m.Metric, tuple[str, ...]]) -> None:
    levels = Levels("core", 60)
    assert [levels([(*series, number)]) for number in (0, 7.5, 0)] == [[], [(*series, 7.5)], []]


def test_a_true_zero_of_any_other_row_is_served() -> None:
    assert Levels("core", 60)([(m.GPU_PRESENT, GPU, 0)]) == [(m.GPU_PRESENT, GPU, 0)]


def test_a_sparse_row_is_in_core() -> None:
    families = json.loads(CORE.read_text())
    sparse = [row for row in m.all_metrics() if row.sparse]
    assert sparse
    assert all(row.name in families and not row.name.startswith("run_") for row in sparse)


def test_a_pattern_matches_the_whole_value() -> None:
    families = {"gpu_pcie_errors_total": {"error": "fatal|non_fatal"}}
    found = [
        error
        for error in ("fatal", "non_fatal", "fatal2", "")
        if in_core(families, m.GPU_PCIE_ERRORS_TOTAL, (*GPU, error))
    ]
    assert found == ["fatal", "non_fatal"]
