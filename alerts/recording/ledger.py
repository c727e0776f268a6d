"""From the ledger: goodput, ETTR, effective MFU and badput, of whole runs and of the last hour, day and seven days.

The ledger's values are absolute, so a window is the difference of two of them, never `increase()`. Counters are read as
`max by` and what is still open as `min by`, so that of two ledgers by mistake the one counts that knows more.

What a window begins with is the run's value of then, the last word of up to `outage_window` before if the ledger was
away, if the run began at the same moment then and now; 0 if it began within the window; and else nothing is said: the
run is older than what Prometheus remembers. A run that starts again under its name has new books and another beginning.
What was open for long and is booked now would make a window longer than it is: differences below 0 count as 0, so that
productive time is never more than the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from alerts.recording.record import Record, record
from alerts.recording.training import STRAGGLER_LOST_1D, STRAGGLER_LOST_1H, STRAGGLER_LOST_7D
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

GOODPUT = "run:run_goodput:ratio"
GOODPUT_1H = "run:run_goodput:ratio_1h"
GOODPUT_1D = "run:run_goodput:ratio_1d"
GOODPUT_7D = "run:run_goodput:ratio_7d"
ETTR = "run:run_ettr:ratio"
ETTR_1H = "run:run_ettr:ratio_1h"
ETTR_1D = "run:run_ettr:ratio_1d"
ETTR_7D = "run:run_ettr:ratio_7d"
EFFECTIVE_MFU = "run:run_effective_mfu:ratio"
EFFECTIVE_MFU_1H = "run:run_effective_mfu:ratio_1h"
EFFECTIVE_MFU_1D = "run:run_effective_mfu:ratio_1d"
EFFECTIVE_MFU_7D = "run:run_effective_mfu:ratio_7d"
BADPUT = "run:run_badput:ratio"
BADPUT_1H = "run:run_badput:ratio_1h"
BADPUT_1D = "run:run_badput:ratio_1d"
BADPUT_7D = "run:run_badput:ratio_7d"
STRAGGLER_SECONDS_1H = "run:run_straggler_lost_seconds:sum_1h"
STRAGGLER_SECONDS_1D = "run:run_straggler_lost_seconds:sum_1d"
STRAGGLER_SECONDS_7D = "run:run_straggler_lost_seconds:sum_7d"
FLEET_GOODPUT_1H = "fleet:run_goodput:ratio_1h"
FLEET_GOODPUT_1D = "fleet:run_goodput:ratio_1d"
MTTF = "run:run_time_to_failure_seconds:mean"
MTTR = "run:run_time_to_recovery_seconds:mean"
STEPS_AT_RISK = "run:run_uncommitted_steps:difference"

GOOD = 'bucket=~"productive|generation"'


def ledger_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records on what became of a run's time."""
    hour, day, week = settings.hour, settings.day, settings.week
    return (
        *_whole_run(),
        *_window(settings, "1h", "hour", hour, GOODPUT_1H, ETTR_1H, EFFECTIVE_MFU_1H, BADPUT_1H),
        *_window(settings, "1d", "day", day, GOODPUT_1D, ETTR_1D, EFFECTIVE_MFU_1D, BADPUT_1D),
        *_window(settings, "7d", "seven days", week, GOODPUT_7D, ETTR_7D, EFFECTIVE_MFU_7D, BADPUT_7D),
        *_straggler_seconds(),
        *_fleet(settings, "1h", "hour", hour, FLEET_GOODPUT_1H),
        *_fleet(settings, "1d", "day", day, FLEET_GOODPUT_1D),
    )


def _whole_run() -> Iterator[Record]:
    productive = f"sum by (tenant, run) (max by (tenant, run, bucket) ({m.RUN_SECONDS}{{{GOOD}}}))"

    def wall(buckets: str = "") -> str:
        return f"""(sum by (tenant, run) (
  max by (tenant, run, bucket) ({m.RUN_SECONDS}{buckets})
    or
  min by (tenant, run) ({m.RUN_OPEN_SECONDS})
) > 0)"""

    # Of a run that was just heard of everything is open: its goodput is not 0, but not known.
    booked = f'\n  and on (tenant, run)\n{m.RUN_SECONDS}{{bucket!="queue"}} > 0'
    yield record(
        "ledger",
        GOODPUT,
        "Productive time over wall clock since the first process start; none before anything is booked.",
        f"{productive}\n  /\n" + wall('{bucket!="queue"}') + booked,
    )
    yield record(
        "ledger",
        ETTR,
        "Productive time over wall clock since submission; none if that is unknown.",
        f'{productive}\n  /\n{wall()}\n  and on (tenant, run)\n{m.RUN_SECONDS}{{bucket="queue"}}{booked}',
    )
    yield record(
        "ledger",
        EFFECTIVE_MFU,
        "Model FLOPs of retained steps over the peak of the GPUs held, down time included.",
        f"""
        max by (tenant, run) ({m.RUN_MODEL_FLOPS})
          /
        (max by (tenant, run) ({m.RUN_CAPACITY_FLOPS}) > 0)
    """,
    )
    yield record(
        "ledger",
        BADPUT,
        "Share of the wall clock since the first process start that went into a bucket which is not productive.",
        f'max by (tenant, run, bucket) ({m.RUN_SECONDS}{{bucket!~"productive|generation|queue"}})\n'
        "  / on (tenant, run) group_left ()\n" + wall('{bucket!="queue"}'),
    )
    yield record(
        "ledger",
        MTTF,
        "Time a run was running for each of its unplanned ends, the time since the last one "
        "included. None before the first.",
        f"""
        sum by (tenant, run) (max by (tenant, run, bucket) ({m.RUN_SECONDS}{{bucket!~"down|queue"}}))
          /
        (sum by (tenant, run) (max by (tenant, run, status) ({m.RUN_ENDS}{{status=~"failed|silent"}})) > 0)
    """,
    )
    yield record(
        "ledger",
        MTTR,
        "Time from an unplanned end to the first new step, mean of those the run came back "
        "from. None before the first.",
        f"""
        max by (tenant, run) ({m.RUN_RECOVERY_SECONDS})
          /
        (max by (tenant, run) ({m.RUN_RECOVERIES}) > 0)
    """,
    )
    yield record(
        "ledger",
        STEPS_AT_RISK,
        "Steps a run that has not ended would make again if it failed now. None before its first durable checkpoint.",
        f"""
        clamp_min(
          max by (tenant, run) ({m.RUN_POSITION_STEPS}) - max by (tenant, run) ({m.RUN_COMMITTED_STEPS}), 0
        )
          and on (tenant, run)
        {m.RUN_STATE}{{state=~"running|down"}} == 1
    """,
    )


def _booked(window: str) -> str:
    return f"run:run_seconds:difference_{window}"


class _Window:
    """What the records of one window are made with."""

    def __init__(self, settings: AlertSettings, name: str, length: float) -> None:
        self._state = settings.at_pace(settings.state_window)
        self._then = f"[{settings.at_pace(settings.outage_window)}] offset {settings.at_pace(length)}"
        self.base = f"run:run_books:bool_{name}"
        self.seconds = _booked(name)
        self.gpu_seconds = f"run:run_gpu_seconds:difference_{name}"
        self.open = f"run:run_open_seconds:difference_{name}"
        self.wall = f"run:run_wall_seconds:difference_{name}"
        # A run that began just before the window may be in no scrape of before it.
        self.since = f"time() - {settings.seconds_at_pace(length + settings.state_window)}"
        self.begin = f"(time() - {settings.seconds_at_pace(length)})"

    def now(self, metric: m.Metric, how: str = "max by (tenant, run)", matchers: str = "") -> str:
        return f"{how} (last_over_time({metric}{matchers}[{self._state}]))"

    def then(self, metric: m.Metric, how: str = "max by (tenant, run)") -> str:
        return f"{how} (last_over_time({metric}{self._then}))"

    def difference(self, metric: m.Metric, how: str = "max by (tenant, run)") -> str:
        """Return what was added since then; all of it where the books began since, or had no such series yet."""
        now = self.now(metric, how)
        return f"""clamp_min(
  {now}
    -
  ({self.then(metric, how)} and on (tenant, run) {self.base} == 1),
  0
)
  or
{now} and on (tenant, run) {self.base}"""


def _window(
    settings: AlertSettings,
    name: str,
    text: str,
    length: float,
    goodput: str,
    ettr: str,
    effective_mfu: str,
    badput: str,
) -> Iterator[Record]:
    window = _Window(settings, name, length)
    per_run, per_bucket, least = "max by (tenant, run)", "max by (tenant, run, bucket)", "min by (tenant, run)"
    start = window.now(m.RUN_START, least)
    yield record(
        "windows",
        window.base,
        f"1 if a run had the same books before the last {text}, 0 if it began since; none if nobody knows.",
        f"""
        group by (tenant, run) ({start} == {window.then(m.RUN_START, least)})
          or
        0 * ({start} > {window.since})
    """,
    )
    yield record(
        "windows",
        window.seconds,
        f"Seconds booked in the last {text}, by bucket.",
        window.difference(m.RUN_SECONDS, per_bucket),
    )
    yield record(
        "windows",
        window.open,
        f"Seconds of the last {text} that are not booked yet.",
        window.difference(m.RUN_OPEN_SECONDS, least),
    )
    yield record(
        "windows",
        window.wall,
        f"Wall clock of the last {text} since the first process start.",
        f"""
        sum by (tenant, run) ({window.seconds}{{bucket!="queue"}} or {window.open})
    """,
    )
    productive = f"sum by (tenant, run) ({window.seconds}{{{GOOD}}})"
    yield record(
        "windows",
        goodput,
        f"Goodput of the last {text}, or of a younger or ended run's part of it.",
        f"""
        {productive} / ({window.wall} > 0)
    """,
    )
    # Only what was queued after the window's begin counts: from then to the first start, or less.
    queue = window.now(m.RUN_SECONDS, per_run, '{bucket="queue"}')
    before = f"({start} - {window.begin})"
    yield record(
        "windows",
        ettr,
        f"ETTR of the last {text}; none if the time of submission is unknown.",
        f"""
        {productive}
          /
        (
          {window.wall}
            +
          clamp_min(
            {queue} < {before}
              or
            {before} and on (tenant, run) {queue},
            0
          )
            > 0
        )
    """,
    )
    retained, capacity = window.difference(m.RUN_MODEL_FLOPS), window.difference(m.RUN_CAPACITY_FLOPS)
    yield record(
        "windows",
        effective_mfu,
        f"Effective MFU of the last {text}, as far as it is booked.",
        f"(\n{retained}\n)\n  /\n((\n{capacity}\n) > 0)",
    )
    yield record(
        "windows",
        badput,
        f"Share of the last {text} that went into a bucket which is not productive.",
        f"""
        {window.seconds}{{bucket!~"productive|generation|queue"}}
          / on (tenant, run) group_left ()
        ({window.wall} > 0)
    """,
    )


def _straggler_seconds() -> Iterator[Record]:
    for name, ratio, window, text in (
        (STRAGGLER_SECONDS_1H, STRAGGLER_LOST_1H, "1h", "hour"),
        (STRAGGLER_SECONDS_1D, STRAGGLER_LOST_1D, "1d", "day"),
        (STRAGGLER_SECONDS_7D, STRAGGLER_LOST_7D, "7d", "seven days"),
    ):
        yield record(
            "windows",
            name,
            f"Productive seconds of the last {text} that a straggler cost.",
            f"""
            sum by (tenant, run) ({_booked(window)}{{bucket="productive"}})
              * on (run) group_left ()
            {ratio}
        """,
        )


def _fleet(settings: AlertSettings, name: str, text: str, length: float, goodput: str) -> Iterator[Record]:
    """Yield what needs GPU-seconds: they are right while runs grow, shrink and give their GPUs back."""
    window = _Window(settings, name, length)
    yield record(
        "windows",
        window.gpu_seconds,
        f"GPU-seconds booked in the last {text}, by bucket.",
        window.difference(m.RUN_GPU_SECONDS, "max by (tenant, run, bucket)"),
    )
    known = f'and on (tenant, run) {window.gpu_seconds}{{bucket="productive"}}'
    yield record(
        "windows",
        goodput,
        f"Productive GPU-seconds over those held in the last {text}, of all runs with a goodput.",
        f"""
        sum({window.gpu_seconds}{{{GOOD}}})
          /
        (
          sum(
            {window.gpu_seconds} {known}
              or
            {window.open} * on (tenant, run) {window.now(m.RUN_GPUS)} {known}
              unless on (tenant, run) {m.RUN_STATE}{{state="queued"}} == 1
          )
            > 0
        )
    """,
    )
