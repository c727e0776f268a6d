"""From the training hook: the step a run is in, and whether it should long have ended.

Times of ranks are compared with the clock of Prometheus: FlopwatchClockWrong tells where the two differ.
"""

from __future__ import annotations

from alerts.recording.record import Record, record
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

DECLARED = "run:training_declared_seconds:delta5m"
OPEN_STEP = "run:training_open_step_began_seconds:max"
OVERDUE_STEP = "run:training_overdue_step_began_seconds:max"


def hang_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records that a hang and a lost node are told by."""
    recent, memory = settings.at_pace(settings.rate_window), settings.at_pace(settings.hang_memory)
    last_step = f"max by (run) ({m.TRAINING_LAST_STEP_TIMESTAMP})"
    others = f'sum by (run, rank) ({m.TRAINING_ACTIVITY_SECONDS}{{activity!~"step|data_stall"}}%s)'
    buckets = f"sum by (run, le) (increase({m.TRAINING_STEP_DURATION}_bucket[{memory}]))"
    mean = (f"sum by (run) (increase({m.TRAINING_STEP_DURATION}_sum[{memory}]))"
            f" / sum by (run) (increase({m.TRAINING_STEP_DURATION}_count[{memory}]))")
    return (
        # By two instants and not by increase(): there are seven such activities of each rank. All of a new one's count.
        record("training", DECLARED, "Seconds of the last five minutes that a rank of the run spent in anything but "
               "steps and waiting for data: the largest of its ranks'.", f"""
            max by (run) (
              {others % ""}
                -
              ({others % f" offset {recent}"} or 0 * max by (run, rank) ({m.TRAINING_LAST_STEP_TIMESTAMP}))
            )
        """),
        # What was declared lies in the open step for certain if the last step ended within the window, too.
        record("training", OPEN_STEP, "When the run's open step began, as Unix time: its newest step's end, and later "
               "by what was declared since, a checkpoint for instance; none while that cannot be told.", f"""
            (
              {last_step} + on (run) {DECLARED}
            )
              unless on (run)
            (
              {DECLARED} > 0.5 and on (run) {last_step} < time() - {settings.seconds_at_pace(settings.rate_window)}
            )
        """),
        # The largest bucket ends at 180 s: of longer steps only the mean is known.
        record("training", OVERDUE_STEP, "The same for a step that is older than 60 s and than three times the p99 of "
               "the last hour's steps, or, where there was none, than an hour.", f"""
            {OPEN_STEP} < time() - {settings.seconds_at_pace(settings.hang_after)}
              and on (run)
            (
              {OPEN_STEP} + on (run) {settings.hang_steps} * (
                histogram_quantile({settings.hang_quantile:g}, {buckets}) >= on (run) {mean}
                  or on (run)
                {mean}
              ) < time()
                or on (run)
              {OPEN_STEP} < time() - {settings.seconds_at_pace(settings.hang_memory)}
            )
        """),
    )
