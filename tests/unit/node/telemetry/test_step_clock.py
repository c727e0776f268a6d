"""Limits of an open step: when it goes on, which ranks count, when it is late, and what is sent of each rank then."""

from __future__ import annotations

from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.telemetry import open_step
from flopwatch.node.telemetry.open_step import SILENT_AFTER, GpuActivity, HostParts, RankOfHost, StepClock
from flopwatch.node.telemetry.otlp import Push

OWN = ("lm", "0")


class Trainer:
    """Rank that has made some steps, and pushes whenever the test lets it spend time."""

    def __init__(self, steps: float = 10.0, step_seconds: float = 10.0) -> None:
        self.steps, self.seconds, self.clock = steps, {"step": step_seconds}, 0.0
        self.spend()

    def spend(self, steps: int = 0, opened: float | None = None, **seconds: float) -> StepClock:
        """Spend seconds in activities, end some steps and push. The last step is open for `opened` seconds."""
        self.steps += steps
        for activity, spent in seconds.items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + spent
        self.clock += sum(seconds.values())
        samples: list[Sample] = [
            (m.TRAINING_ACTIVITY_SECONDS_TOTAL, (*OWN, name), value) for name, value in self.seconds.items()
        ]
        samples.append((m.TRAINING_STEPS_TOTAL, OWN, self.steps))
        self.push = Push("", "lm", "a1", 0, 0.0, self.clock, open_step_seconds=opened, samples=tuple(samples))
        self.step = StepClock.of(self.push, getattr(self, "step", None))
        return self.step

    @property
    def rank(self) -> RankOfHost:
        """The rank as its host knows it after its last push."""
        return RankOfHost(self.push, self.clock, self.step, None, None)


def test_a_step_goes_on_through_waits_for_data_and_around_a_checkpoint() -> None:
    trainer = Trainer()
    clocks = [
        trainer.spend(step=5),
        trainer.spend(data_stall=5),
        trainer.spend(checkpoint_save=5),
        trainer.spend(step=4, data_stall=1),
    ]
    assert [clock.seconds for clock in clocks] == [5, 10, 10, 15]
    assert [clock.stepping for clock in clocks] == [True, True, False, True]
    assert [clock.for_data for clock in clocks] == [False, True, False, False]


@pytest.mark.parametrize(("saving", "stepping"), [(2.4, True), (2.5, False), (2.6, False)])
def test_a_rank_is_in_a_step_if_that_had_more_than_half_of_the_time(saving: float, stepping: bool) -> None:
    assert Trainer().spend(step=5 - saving, checkpoint_save=saving).stepping == stepping


def test_a_new_step_is_as_old_as_its_first_push_has_it() -> None:
    trainer = Trainer()
    trainer.spend(step=5)
    assert trainer.spend(steps=3, opened=0.5, step=5).seconds == 0.5
    assert trainer.spend(step=5).seconds == 5.5
    assert trainer.spend(steps=1, step=5).seconds == 0, "without the age of its open step"


def test_a_push_older_than_the_last_one_changes_nothing() -> None:
    trainer = Trainer()
    earlier = trainer.push
    step = trainer.spend(step=5)
    assert StepClock.of(earlier, step) == step


def test_a_silent_rank_counts_for_50_s_and_longer_only_if_no_other_pushes() -> None:
    silent, pushing = Trainer(), Trainer()
    pushing.spend(step=20)
    pushing.spend(step=SILENT_AFTER - 20)
    ranks = silent.rank, pushing.rank._replace(step=pushing.step._replace(seconds=70.0))
    assert open_step.seconds_open(ranks, SILENT_AFTER) == 50
    assert open_step.seconds_open(ranks, SILENT_AFTER + 1) == 71
    assert open_step.seconds_open([silent.rank], SILENT_AFTER + 1) == 51


def test_a_host_whose_ranks_are_not_all_in_a_step_has_no_open_step() -> None:
    stepping, saving = Trainer(), Trainer()
    stepping.spend(step=20)
    saving.spend(checkpoint_save=20)
    assert open_step.seconds_open([stepping.rank], 20) == 20
    assert open_step.seconds_open([stepping.rank, saving.rank], 20) == 0
    assert open_step.seconds_open([stepping.rank, saving.rank._replace(end="gone")], 20) == 20


@pytest.mark.parametrize(
    ("p99", "limit"), [(None, 50.0), (2.0, 15.0), (4.0, 20.0)], ids=["mean", "at least 15 s", "p99"]
)
def test_a_step_is_overdue_by_the_runs_p99_or_else_by_the_slowest_mean(p99: float | None, limit: float) -> None:
    ranks = [Trainer(steps, 100.0).rank for steps in (10.0, 20.0, 0.0)]
    assert open_step.limit_of(ranks, p99) == limit


def test_before_the_first_step_no_step_is_overdue_but_by_the_runs_p99() -> None:
    assert open_step.limit_of([Trainer(0.0).rank], None) is None
    assert open_step.limit_of([Trainer(0.0).rank], 4.0) == 20


def rows(ranks: dict[int, RankOfHost], clock: float) -> list[list[Any]]:
    """Return the rows of the ranks of a late step."""
    found: Any = open_step.field_of(ranks, 1.0, clock, 0.0, HostParts(GpuActivity(lambda: 0.0)))
    rows: list[list[Any]] = found["ranks"]
    return rows


def test_ranks_are_sent_in_order_with_the_end_and_the_calls_of_those_that_are_gone() -> None:
    trainer = Trainer()
    called: Sample = (m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, OWN, 7.0)
    one = trainer.rank._replace(push=Push("", "lm", "a1", 0, 0.0, 0.0, samples=(called,)))
    assert rows({4: one, 0: one._replace(end="gone")}, 20) == [
        [0, 7.0, [], ["gone"], None],
        [4, None, [], [], None],  # its last push may be lost
    ]
