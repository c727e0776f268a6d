"""Recording rules on the ledger: goodput, ETTR, effective MFU and badput, of whole runs, an hour, a day and a week.

The ledger's values are absolute, so the value of a window is a difference of two values, never increase(). Counters are
read with `max by` and the unattributed time with `min by`. So of two ledgers, the one with more attributed time counts.

A window starts with the run's value at that time. If the ledger was away then, it starts with the last value of the
hour before. The run's first start must be the same then and now. The window starts with 0 if the run began within it.
In all other cases no series is recorded, because the run is older than the samples of Prometheus. A run that starts
again under its name after `completed` begins a new generation.

When a long open time is attributed, a window could contain more seconds than it lasts. So negative differences count as
0, and productive time never exceeds the whole time.

Of a run that was just reported for the first time, all time is unattributed. Its goodput is absent, not 0.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent

from alerts.recording.record import Record
from alerts.settings import seconds

GOODPUT = "run:run_goodput:ratio"
GOODPUT_1H = "run:run_goodput:ratio_1h"
GOODPUT_1D = "run:run_goodput:ratio_1d"
GOODPUT_7D = "run:run_goodput:ratio_7d"
ETTR = "run:run_ettr:ratio"
ETTR_1H = "run:run_ettr:ratio_1h"
EFFECTIVE_MFU = "run:run_effective_mfu:ratio"
EFFECTIVE_MFU_1H = "run:run_effective_mfu:ratio_1h"
BADPUT = "run:run_badput:ratio"
STRAGGLER_SECONDS_7D = "run:run_straggler_lost_seconds:sum_7d"
FLEET_GOODPUT_1H = "fleet:run_goodput:ratio_1h"
FLEET_GOODPUT_1D = "fleet:run_goodput:ratio_1d"
MTTF = "run:run_time_to_failure_seconds:mean"
MTTR = "run:run_time_to_recovery_seconds:mean"
STEPS_AT_RISK = "run:run_uncommitted_steps:difference"


_WHOLE_RUN = (
    Record(
        "ledger",
        GOODPUT,
        """
            sum by (tenant, run) (
              max by (tenant, run, bucket) (run_seconds_total{bucket=~"productive|generation"})
            )
              /
            (
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"})
                  or
                min by (tenant, run) (run_open_seconds)
              ) > 0
            )
              and on (tenant, run)
            run_seconds_total{bucket!="queue"} > 0
        """,
        "Productive time over wall clock since the run's first process start. Absent before any time is attributed.",
    ),
    Record(
        "ledger",
        ETTR,
        """
            sum by (tenant, run) (
              max by (tenant, run, bucket) (run_seconds_total{bucket=~"productive|generation"})
            )
              /
            (
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total) or min by (tenant, run) (run_open_seconds)
              ) > 0
            )
              and on (tenant, run)
            run_seconds_total{bucket="queue"}
              and on (tenant, run)
            run_seconds_total{bucket!="queue"} > 0
        """,
        "Productive time over wall clock since the run's submission. Absent if the submission is unknown.",
    ),
    Record(
        "ledger",
        EFFECTIVE_MFU,
        """
            max by (tenant, run) (run_retained_flops_total)
              /
            (max by (tenant, run) (run_capacity_flops_total) > 0)
        """,
        "Model FLOPs of retained steps over the peak of the GPUs held, including down time.",
    ),
    Record(
        "ledger",
        BADPUT,
        """
            max by (tenant, run, bucket) (run_seconds_total{bucket!~"productive|generation|queue"})
              / on (tenant, run) group_left ()
            (
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"})
                  or
                min by (tenant, run) (run_open_seconds)
              ) > 0
            )
        """,
        "Share of the wall clock since the run's first process start, by each bucket that is not productive.",
    ),
    Record(
        "ledger",
        MTTF,
        """
            sum by (tenant, run) (max by (tenant, run, bucket) (run_seconds_total{bucket!~"down|queue"}))
              /
            (
              sum by (tenant, run) (
                max by (tenant, run, status) (run_attempt_ends_total{status=~"failed|silent"})
              ) > 0
            )
        """,
        "Running time of a run per unplanned end, in seconds, including the time since the last end. Absent "
        "before the first.",
    ),
    Record(
        "ledger",
        MTTR,
        """
            max by (tenant, run) (run_recovery_seconds_total)
              /
            (max by (tenant, run) (run_recoveries_total) > 0)
        """,
        "Seconds from an unplanned end to the first step above the high-water mark, mean over the run's "
        "recoveries. Absent before the first.",
    ),
    Record(
        "ledger",
        STEPS_AT_RISK,
        """
            clamp_min(
              max by (tenant, run) (run_high_water_steps) - max by (tenant, run) (run_committed_steps),
              0
            )
              and on (tenant, run)
            run_state{state=~"running|down"} == 1
        """,
        "Steps that a run would repeat if it failed now. Absent before its first durable checkpoint and after its end.",
    ),
)


def _difference(total: str, by: str = "tenant, run", of: str = "max") -> str:
    """Return the PromQL expression of a value's difference over a window, with placeholders that `_of_window` fills.

    `of` is the aggregation over ledgers.
    """
    return f"""\
clamp_min(
  {of} by ({by}) (last_over_time({total}[<5m>]))
    -
  (
    {of} by ({by}) (last_over_time({total}[<1h>] offset <LENGTH>))
      and on (tenant, run)
    run:run_books:bool_WINDOW == 1
  ),
  0
)
  or
{of} by ({by}) (last_over_time({total}[<5m>]))
  and on (tenant, run)
run:run_books:bool_WINDOW"""


_WINDOW = (
    Record(
        "windows",
        "run:run_books:bool_WINDOW",
        """
            group by (tenant, run) (
              min by (tenant, run) (last_over_time(run_start_timestamp_seconds[<5m>]))
                ==
              min by (tenant, run) (last_over_time(run_start_timestamp_seconds[<1h>] offset <LENGTH>))
            )
              or
            0 * (min by (tenant, run) (last_over_time(run_start_timestamp_seconds[<5m>])) > time() - <SINCE>)
        """,
        "1 if the same generation of the run was reported before the last PERIOD, 0 if it began since. Absent if "
        "neither is known.",
    ),
    Record(
        "windows",
        "run:run_seconds:difference_WINDOW",
        _difference("run_seconds_total", by="tenant, run, bucket"),
        "Seconds of the run attributed to each bucket in the last PERIOD.",
    ),
    Record(
        "windows",
        "run:run_open_seconds:difference_WINDOW",
        _difference("run_open_seconds", of="min"),
        "Seconds of the last PERIOD that are not attributed to a bucket yet.",
    ),
    Record(
        "windows",
        "run:run_wall_seconds:difference_WINDOW",
        """
            sum by (tenant, run) (
              run:run_seconds:difference_WINDOW{bucket!="queue"} or run:run_open_seconds:difference_WINDOW
            )
        """,
        "Wall clock of the run in the last PERIOD, from its first process start on.",
    ),
    Record(
        "windows",
        "run:run_goodput:ratio_WINDOW",
        """
            sum by (tenant, run) (run:run_seconds:difference_WINDOW{bucket=~"productive|generation"})
              /
            (run:run_wall_seconds:difference_WINDOW > 0)
        """,
        "Goodput of the last PERIOD, or of the part of it in which the run existed.",
    ),
    Record(
        "windows",
        "run:run_ettr:ratio_WINDOW",
        """
            sum by (tenant, run) (run:run_seconds:difference_WINDOW{bucket=~"productive|generation"})
              /
            (
              run:run_wall_seconds:difference_WINDOW
                +
              clamp_min(
                max by (tenant, run) (last_over_time(run_seconds_total{bucket="queue"}[<5m>]))
                  <
                (min by (tenant, run) (last_over_time(run_start_timestamp_seconds[<5m>])) - (time() - <SECONDS>))
                  or
                (min by (tenant, run) (last_over_time(run_start_timestamp_seconds[<5m>])) - (time() - <SECONDS>))
                  and on (tenant, run)
                max by (tenant, run) (last_over_time(run_seconds_total{bucket="queue"}[<5m>])),
                0
              ) > 0
            )
        """,
        "ETTR of the last PERIOD: productive time over wall clock since submission. Absent if the submission is "
        "unknown.",
    ),
    Record(
        "windows",
        "run:run_effective_mfu:ratio_WINDOW",
        f"""
(
{indent(_difference("run_retained_flops_total"), "  ")}
)
  /
(
  (
{indent(_difference("run_capacity_flops_total"), "    ")}
  ) > 0
)
        """,
        "Effective MFU of the last PERIOD, over the time that is attributed.",
    ),
    Record(
        "windows",
        "run:run_badput:ratio_WINDOW",
        """
            run:run_seconds:difference_WINDOW{bucket!~"productive|generation|queue"}
              / on (tenant, run) group_left ()
            (run:run_wall_seconds:difference_WINDOW > 0)
        """,
        "Share of the last PERIOD, by each bucket that is not productive.",
    ),
)

_STRAGGLER = (
    Record(
        "windows",
        "run:run_straggler_lost_seconds:sum_WINDOW",
        """
            sum by (tenant, run) (run:run_seconds:difference_WINDOW{bucket="productive"})
              * on (run) group_left ()
            run:training_straggler_lost:ratio_WINDOW
        """,
        ("Productive seconds of the last PERIOD that a straggler cost."),
    ),
)

_FLEET = (
    Record(
        "windows",
        "run:run_gpu_seconds:difference_WINDOW",
        _difference("run_gpu_seconds_total", by="tenant, run, bucket"),
        "GPU-seconds of the run attributed to each bucket in the last PERIOD.",
    ),
    Record(
        "windows",
        "fleet:run_goodput:ratio_WINDOW",
        """
            sum(run:run_gpu_seconds:difference_WINDOW{bucket=~"productive|generation"})
              /
            (
              sum (
                run:run_gpu_seconds:difference_WINDOW
                  and on (tenant, run)
                run:run_gpu_seconds:difference_WINDOW{bucket="productive"}
                  or
                run:run_open_seconds:difference_WINDOW
                  * on (tenant, run)
                max by (tenant, run) (last_over_time(run_gpus[<5m>]))
                  and on (tenant, run)
                run:run_gpu_seconds:difference_WINDOW{bucket="productive"}
                  unless on (tenant, run)
                run_state{state="queued"} == 1
              ) > 0
            )
        """,
        "Productive GPU-seconds over the GPU-seconds held in the last PERIOD, of all runs with a goodput.",
    ),
)


def _of_window(record: Record, window: str, period: str) -> Record:
    """Return a rule for one window: `window` is its length and the end of names, `period` its name in texts.

    A run that began just before the window may have no scrape before the window. So the placeholder SINCE is five
    minutes longer than the window.
    """
    length = seconds(window)
    words = {"WINDOW": window, "LENGTH": window, "SECONDS": f"{length:g}_seconds", "SINCE": f"{length + 300:g}_seconds"}
    expr = record.expr
    for word, value in words.items():
        expr = expr.replace(word, value)
    return replace(
        record, name=record.name.replace("WINDOW", window), expr=expr, help=record.help.replace("PERIOD", period)
    )


_WINDOWS = (("1h", "hour"), ("1d", "day"), ("7d", "seven days"))
RECORDS: tuple[Record, ...] = (
    *_WHOLE_RUN,
    *(_of_window(record, *window) for window in _WINDOWS for record in _WINDOW),
    *(_of_window(record, *window) for window in _WINDOWS for record in _STRAGGLER),
    *(_of_window(record, *window) for window in _WINDOWS[:2] for record in _FLEET),
)
