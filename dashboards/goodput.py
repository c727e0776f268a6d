"""Goodput ledger: where a run's wall clock and its GPUs' time went, what each loss cost and what caused it."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

LEDGER = 'tenant=~"$tenant", run="$run"'
ALL = f"{{{LEDGER}}}"


def state(name: str) -> str:
    """Return 1 while the run is in this state."""
    return f'max({m.RUN_STATE}{{{LEDGER}, state="{name}"}})'


now = [
    d.stat(
        name,
        f"{text} Bad: below 90 %.",
        d.Query(f"max({series}{ALL})"),
        unit="percentunit",
        thresholds=p.SHARE,
        width=4,
        no_data=no_data,
    )
    for name, text, series, no_data in (
        ("Goodput", "Share of the wall clock since the first start that advanced the model.", r.GOODPUT, ""),
        ("Goodput, 1 h", "The same in the last hour.", r.GOODPUT_1H, ""),
        ("Goodput, 1 d", "The same in the last day.", r.GOODPUT_1D, ""),
        ("Goodput, 7 d", "The same in the last seven days.", r.GOODPUT_7D, ""),
        (
            "ETTR",
            "Goodput since submission, the queue included. Nothing: that time is unknown.",
            r.ETTR,
            "That time is unknown.",
        ),
    )
] + [
    d.stat(
        "Effective MFU",
        "Model FLOPs of steps done once over the peak of all GPUs held. Bad: far below the run's "
        "MFU: time is lost outside of steps.",
        d.Query(f"max({r.EFFECTIVE_MFU}{ALL})"),
        unit="percentunit",
        thresholds=p.UTILIZATION,
        width=4,
    )
]

spent = [
    d.state_timeline(
        "Attempts",
        "What the run did. Bad: red; green in short pieces is a crash loop.",
        d.Query(f"{state('running')} + 2 * {state('queued')} + 3 * {state('down')}", "state"),
        mappings={0: ("ended", "blue"), 1: ("running", "green"), 2: ("queued", "orange"), 3: ("down", "red")},
        height=4,
    ),
    d.bargauge(
        "Wall clock by bucket",
        "Since the first start. Bad: anything but productive that is long.",
        d.Query(f"sort_desc(max by (bucket) ({m.RUN_SECONDS}{ALL}) > 0)", "{{bucket}}", instant=True),
        unit="s",
        width=12,
        height=9,
    ),
    d.bargauge(
        "Money by bucket",
        "The GPU time held, at the price above. Bad: the same.",
        d.Query(
            f"sort_desc(max by (bucket) ({m.RUN_GPU_SECONDS}{ALL}) * $price / 3600 > 0)", "{{bucket}}", instant=True
        ),
        unit="currencyUSD",
        width=12,
        height=9,
    ),
    d.timeseries(
        "Shares of each moment",
        "Bad: any colour but productive that takes over; a hole is open: not booked yet.",
        d.Query(f"max by (bucket) (rate({m.RUN_SECONDS}{ALL}{p.RATE}))", "{{bucket}}"),
        unit="percentunit",
        top=1,
        stacked=True,
        width=12,
    ),
    d.timeseries(
        "Goodput over windows",
        "Bad: the hour far below the day: something is wrong now.",
        d.Query(f"max({r.GOODPUT_1H}{ALL})", "1 h"),
        d.Query(f"max({r.GOODPUT_1D}{ALL})", "1 d"),
        d.Query(f"max({r.GOODPUT_7D}{ALL})", "7 d"),
        d.Query(f"max({r.GOODPUT}{ALL})", "whole run"),
        unit="percentunit",
        top=1,
        width=12,
    ),
]

causes = [
    d.bargauge(
        "GPU time lost, by cause",
        "Of all losses: ends, slow stretches and stalls. Bad: one that leads. Nothing: "
        "none was explained yet; it takes five minutes.",
        d.Query(
            f"sort_desc(sum by (cause) (max by (kind, cause) ({m.RUN_BADPUT_GPU_SECONDS}{ALL})) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=8,
        no_data="None was explained yet; it takes five minutes.",
    ),
    d.bargauge(
        "Losses, by cause",
        "How many. Bad: one cause again and again. Nothing: none was explained yet.",
        d.Query(f"sort_desc(max by (kind, cause) ({m.RUN_INCIDENTS}{ALL}) > 0)", "{{kind}}: {{cause}}", instant=True),
        unit="none",
        width=8,
        no_data="None was explained yet.",
    ),
    d.bargauge(
        "How attempts ended",
        "Bad: failed and silent, which nobody planned. Nothing: none has.",
        d.Query(f"sort_desc(max by (status) ({m.RUN_ENDS}{ALL}) > 0)", "{{status}}", instant=True),
        unit="none",
        width=8,
        no_data="None has.",
    ),
]

checkpoints = [
    d.stat(
        "Time to failure",
        "Time of running for each unplanned end. Bad: shorter than some checkpoint intervals. Nothing: there was none.",
        d.Query(f"max({r.MTTF}{ALL})"),
        unit="s",
        width=4,
        no_data="There was none.",
    ),
    d.stat(
        "Time to recovery",
        "From an unplanned end to the first new step. Bad: above some minutes. Nothing: none had to.",
        d.Query(f"max({r.MTTR}{ALL})"),
        unit="s",
        width=4,
        no_data="None had to.",
    ),
    d.stat(
        "Steps at risk",
        "Steps the run would make again if it failed now. Bad: rising without end: no checkpoint "
        "is written. Nothing: none is done yet.",
        d.Query(f"max({r.STEPS_AT_RISK}{ALL})"),
        width=4,
        no_data="None is done yet.",
    ),
    d.stat(
        "Since the last checkpoint",
        "Age of the newest durable one. Bad: several times the usual interval. Nothing: there is none.",
        d.Query(f"time() - max({m.RUN_COMMITTED_TIMESTAMP}{ALL})", instant=True),
        unit="s",
        width=4,
        no_data="There is none.",
    ),
    d.stat(
        "Best interval",
        "Young's and Daly's optimum: the square root of twice the time to failure times what a "
        "checkpoint costs. Bad: far from the interval the run has. Nothing: there was no failure, or no checkpoint.",
        d.Query(
            f'sqrt(2 * max({r.MTTF}{ALL}) * max(increase({m.RUN_SECONDS}{{{LEDGER}, bucket="checkpoint_save"}}'
            f"[$__range])) / (max(changes({m.RUN_COMMITTED_STEPS}{ALL}[$__range])) > 0))",
            instant=True,
        ),
        unit="s",
        width=4,
        no_data="There was no failure, or no checkpoint.",
    ),
    d.stat(
        "Starts", "Attempts of the run. Bad: many in a short time.", d.Query(f"max({m.RUN_ATTEMPTS}{ALL})"), width=4
    ),
    d.timeseries(
        "Steps done and steps safe",
        "The highest step, and that of the newest durable checkpoint. Bad: a widening "
        "gap; a flat line is a run that does not advance.",
        d.Query(f"max({m.RUN_POSITION_STEPS}{ALL})", "done"),
        d.Query(f"max({m.RUN_COMMITTED_STEPS}{ALL})", "safe"),
        unit="none",
        width=24,
    ),
]

BOARD = d.dashboard(
    p.GOODPUT,
    "Goodput ledger",
    "Where a run's time and money went, and what is to blame.",
    [p.tenant, p.run, p.price],
    {"Now": now, "Spent": spent, "Causes": causes, "Failures and checkpoints": checkpoints},
    [p.alert_marks('run="$run"'), p.starts(LEDGER)],
)
