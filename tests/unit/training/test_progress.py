"""Test the figures that the terminal and the summary show, from totals with known answers."""

from __future__ import annotations

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.training.progress import WINDOW, Progress, Recent, Values, duration, figures, shares, summary, values
from flopwatch.training.recorder import Snapshot


def totals(steps: int, *, step: float, stall: float = 0.0, startup: float = 2.0, flops: float = 1e12) -> Values:
    """Return the totals of a rank whose card does at most 4 TFLOP/s, and that has so many seconds behind it."""
    return {
        (m.TRAINING_STEPS_TOTAL, ""): steps,
        (m.TRAINING_POSITION_STEPS, ""): 1000 + steps,
        (m.TRAINING_TOKENS_TOTAL, ""): steps * 100,
        (m.TRAINING_MODEL_FLOPS_TOTAL, ""): steps * flops,
        (m.TRAINING_CAPACITY_FLOPS_TOTAL, ""): 4e12 * (step + stall),
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, "startup"): startup,
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, "step"): step,
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, "data_stall"): stall,
    }


def test_totals_since_the_start_are_means_of_the_whole_run() -> None:
    progress = Progress(totals(10, step=6.0, stall=2.0))
    assert (progress.steps, progress.mfu, progress.step_seconds) == (10, 10 / 32, 0.8)
    assert (progress.tokens_per_second, progress.in_steps) == (125.0, 0.6)
    assert figures(progress) == "MFU 31.2 %, 800 ms a step, 125 tokens/s per rank"
    assert shares(progress) == "60.0 % step, 20.0 % startup, 20.0 % data stall"


def test_totals_less_earlier_ones_are_those_of_the_time_between() -> None:
    progress = Progress(totals(20, step=9.0, stall=2.0), totals(10, step=6.0, stall=2.0))
    assert (progress.steps, progress.mfu, progress.step_seconds) == (10, 10 / 12, 0.3)
    assert shares(progress) == "100.0 % step"
    assert progress.in_steps == 9 / 13  # since the start
    assert progress.last(m.TRAINING_POSITION_STEPS) == 1020


def test_what_is_unknown_is_left_out_or_named() -> None:
    nothing = Progress({})
    assert (nothing.mfu, nothing.step_seconds, nothing.tokens_per_second, nothing.in_steps) == (None, None, None, None)
    assert (figures(nothing), shares(nothing)) == ("MFU unknown", "")
    assert figures(Progress(totals(4, step=10.0, flops=0)), unknown="unknown_peak") == (
        "MFU unknown (unknown peak), 2.5 s a step, 40 tokens/s per rank"
    )
    assert (duration(0.0123), duration(12.34)) == ("12.3 ms a step", "12.3 s a step")


def test_live_figures_forget_what_is_older_than_the_window() -> None:
    recent = Recent()
    assert recent.add(0.0, totals(10, step=100.0)).step_seconds == 10.0  # since the start
    assert recent.add(10.0, totals(20, step=110.0)).step_seconds == 1.0
    assert recent.add(WINDOW + 5.0, totals(40, step=120.0)).steps == 30
    assert recent.add(WINDOW + 11.0, totals(60, step=125.0)).steps == 40  # since the second


def test_live_figures_stay_until_the_next_push_and_not_longer_than_the_window() -> None:
    recent = Recent()
    recent.add(0.0, totals(10, step=100.0))
    recent.add(5.0, totals(20, step=110.0))
    assert recent.add(7.0, totals(20, step=110.0)).step_seconds == 1.0
    silent = recent.add(6.0 + WINDOW, totals(20, step=110.0))
    assert (silent.mfu, silent.step_seconds) == (None, None)
    assert recent.add(60.0, totals(22, step=114.0)).step_seconds == 2.0  # since the last push before the silence


def test_the_summary_names_the_reason_and_the_next_step() -> None:
    points: dict[Metric, list[tuple[dict[str, str], float]]] = {
        m.TRAINING_STEPS_TOTAL: [({}, 1200.0)],
        m.TRAINING_ACTIVITY_SECONDS_TOTAL: [({"activity": "step"}, 2400.0), ({"activity": "checkpoint_save"}, 600.0)],
        m.TRAINING_MFU_UNAVAILABLE: [({"reason": "no_tokens"}, 1.0)],
    }
    assert values(points)[m.TRAINING_ACTIVITY_SECONDS_TOTAL, "checkpoint_save"] == 600.0
    last = Snapshot({}, points, None)
    assert summary("lm", "preempted", last, "http://127.0.0.1:4318/v1/metrics", True) == (
        "flopwatch: lm preempted after 1,200 steps: MFU unknown (no tokens), 2 s a step\n"
        "flopwatch: of 3,000 s 80.0 % step, 20.0 % checkpoint save\n"
        "flopwatch: metrics went to http://127.0.0.1:4318/v1/metrics; "
        "`flopwatch report --prometheus URL lm` shows the whole run"
    )
    *_, where = summary("lm", "failed", last, "http://127.0.0.1:4318/v1/metrics", False).splitlines()
    assert where == (
        "flopwatch: nothing took the metrics at http://127.0.0.1:4318/v1/metrics; "
        "to keep them, start `flopwatch exporter` on this host"
    )
