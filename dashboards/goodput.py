"""Goodput dashboard: where a run's wall clock and GPU time went, what each loss cost and what caused it."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

LEDGER = 'tenant=~"$tenant", run="$run"'
ALL = f"{{{LEDGER}}}"


def state(name: str) -> str:
    """Return an expression that is 1 while the run is in the state `name`, else 0."""
    return f'max({m.RUN_STATE}{{{LEDGER}, state="{name}"}})'


now = [
    d.stat(
        name,
        f"{text} Expected: above 90 %.",
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
        ("ETTR", "Goodput since submission, with the time in the queue.", r.ETTR, "The time of submission is unknown."),
    )
] + [
    d.stat(
        "Effective MFU",
        "Model FLOPs of retained steps over the peak of all GPUs held. Expected: near the run's MFU. Lower means "
        "time lost outside steps.",
        d.Query(f"max({r.EFFECTIVE_MFU}{ALL})"),
        unit="percentunit",
        thresholds=p.UTILIZATION,
        width=4,
    )
]

spent = [
    d.state_timeline(
        "Attempts",
        "State of the run over time. Expected: green. Short green pieces are a crash loop.",
        d.Query(f"{state('running')} + 2 * {state('queued')} + 3 * {state('down')}", "state"),
        mappings={0: ("ended", "blue"), 1: ("running", "green"), 2: ("queued", "orange"), 3: ("down", "red")},
        height=4,
    ),
    d.bargauge(
        "Wall clock by bucket",
        "Time since the first start, by bucket. Expected: mostly productive.",
        d.Query(f"sort_desc(max by (bucket) ({m.RUN_SECONDS_TOTAL}{ALL}) > 0)", "{{bucket}}", instant=True),
        unit="s",
        width=12,
        height=9,
    ),
    d.bargauge(
        "Money by bucket",
        "Cost of the GPU time held, by bucket, at the price above. Expected: mostly productive.",
        d.Query(
            f"sort_desc(max by (bucket) ({m.RUN_GPU_SECONDS_TOTAL}{ALL}) * $price / 3600 > 0)",
            "{{bucket}}",
            instant=True,
        ),
        unit="currencyUSD",
        width=12,
        height=9,
    ),
    d.timeseries(
        "Buckets over time",
        "Share of each bucket over time. Expected: mostly productive. A gap is time that is not attributed yet.",
        d.Query(f"max by (bucket) (rate({m.RUN_SECONDS_TOTAL}{ALL}{p.RATE}))", "{{bucket}}"),
        unit="percentunit",
        top=1,
        stacked=True,
        width=12,
    ),
    d.timeseries(
        "Goodput over windows",
        "Goodput of the last hour, day, seven days and the whole run. Expected: the hour near the day. Lower means a "
        "problem now.",
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
        "Cost in GPU time of ended attempts, slow stretches and stalls, by cause. Expected: no cause that dominates.",
        d.Query(
            f"sort_desc(sum by (cause) (max by (kind, cause) ({m.RUN_BADPUT_GPU_SECONDS_TOTAL}{ALL})) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=8,
        no_data="No loss was explained yet; it takes five minutes.",
    ),
    d.bargauge(
        "Losses, by cause",
        "Number of losses by kind and cause. Expected: no cause that repeats.",
        d.Query(
            f"sort_desc(max by (kind, cause) ({m.RUN_INCIDENTS_TOTAL}{ALL}) > 0)", "{{kind}}: {{cause}}", instant=True
        ),
        unit="none",
        width=8,
        no_data="No loss was explained yet.",
    ),
    d.bargauge(
        "Ends of attempts",
        "Attempts by how they ended. Expected: no `failed` or `silent`, which are unplanned.",
        d.Query(f"sort_desc(max by (status) ({m.RUN_ATTEMPT_ENDS_TOTAL}{ALL}) > 0)", "{{status}}", instant=True),
        unit="none",
        width=8,
        no_data="No attempt has ended.",
    ),
]

checkpoints = [
    d.stat(
        "Time to failure",
        "Time of running per unplanned end. Expected: many checkpoint intervals.",
        d.Query(f"max({r.MTTF}{ALL})"),
        unit="s",
        width=4,
        no_data="No attempt ended unplanned.",
    ),
    d.stat(
        "Time to recovery",
        "Time from an unplanned end to the first new step. Expected: a few minutes.",
        d.Query(f"max({r.MTTR}{ALL})"),
        unit="s",
        width=4,
        no_data="The run had no recovery.",
    ),
    d.stat(
        "Steps at risk",
        "Steps the run would repeat if it failed now. Expected: falls with each checkpoint.",
        d.Query(f"max({r.STEPS_AT_RISK}{ALL})"),
        width=4,
        no_data="No durable checkpoint yet.",
    ),
    d.stat(
        "Since the last checkpoint",
        "Age of the newest durable checkpoint. Expected: about the usual interval.",
        d.Query(f"time() - max({m.RUN_COMMITTED_TIMESTAMP_SECONDS}{ALL})", instant=True),
        unit="s",
        width=4,
        no_data="No durable checkpoint yet.",
    ),
    d.stat(
        "Best interval",
        "Young and Daly's optimum: the square root of twice the time to failure times the cost of a checkpoint. "
        "Expected: near the interval that the run has.",
        d.Query(
            f'sqrt(2 * max({r.MTTF}{ALL}) * max(increase({m.RUN_SECONDS_TOTAL}{{{LEDGER}, bucket="checkpoint_save"}}'
            f"[$__range])) / (max(changes({m.RUN_COMMITTED_STEPS}{ALL}[$__range])) > 0))",
            instant=True,
        ),
        unit="s",
        width=4,
        no_data="No failure or no checkpoint yet.",
    ),
    d.stat(
        "Starts",
        "Attempts of the run. Expected: few in a short time.",
        d.Query(f"max({m.RUN_ATTEMPTS_TOTAL}{ALL})"),
        width=4,
    ),
    d.timeseries(
        "Completed and committed steps",
        "Highest step, and step of the newest durable checkpoint. Expected: a constant gap. A flat line is a run "
        "that does not advance.",
        d.Query(f"max({m.RUN_HIGH_WATER_STEPS}{ALL})", "done"),
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
