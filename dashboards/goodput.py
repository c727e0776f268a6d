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
        (
            "Goodput",
            "Productive share of the wall clock since the run's first start. Repeated steps are not productive.",
            r.GOODPUT,
            "",
        ),
        ("Goodput, 1 h", "Productive share of the wall clock in the last hour.", r.GOODPUT_1H, ""),
        ("Goodput, 1 d", "Productive share of the wall clock in the last day.", r.GOODPUT_1D, ""),
        ("Goodput, 7 d", "Productive share of the wall clock in the last seven days.", r.GOODPUT_7D, ""),
        (
            "ETTR",
            "Effective training time ratio: the productive share of the wall clock since submission.",
            r.ETTR,
            "The run's time of submission is unknown.",
        ),
    )
] + [
    d.stat(
        "Effective MFU",
        "Model FLOPs of steps completed for the first time, over the peak FLOPs of the GPUs held since the first "
        "start. Down time counts as GPU time held. Expected: near the mean MFU since the first start. A lower value "
        "means time lost outside steps or in repeated steps.",
        d.Query(f"max({r.EFFECTIVE_MFU}{ALL})"),
        unit="percentunit",
        thresholds=p.UTILIZATION,
        width=4,
    )
]

spent = [
    d.state_timeline(
        "State of the run",
        "State of the run over time. Expected: running (green). Red is down, orange is queued, blue is ended. Many "
        "short green pieces mean a crash loop.",
        d.Query(f"{state('running')} + 2 * {state('queued')} + 3 * {state('down')}", "state"),
        mappings={0: ("ended", "blue"), 1: ("running", "green"), 2: ("queued", "orange"), 3: ("down", "red")},
        height=4,
    ),
    d.bargauge(
        "Wall clock by bucket",
        "Wall clock of the run so far, by bucket. Expected: mostly `productive`. docs/goodput.md explains the buckets.",
        d.Query(f"sort_desc(max by (bucket) ({m.RUN_SECONDS_TOTAL}{ALL}) > 0)", "{{bucket}}", instant=True),
        unit="s",
        colors=p.BUCKETS,
        width=12,
        height=9,
    ),
    d.bargauge(
        "Cost by bucket",
        "Cost in US dollars of the GPU time held so far, by bucket, at the price per GPU-hour above. Expected: mostly "
        "`productive`.",
        d.Query(
            f"sort_desc(max by (bucket) ({m.RUN_GPU_SECONDS_TOTAL}{ALL}) * $price / 3600 > 0)",
            "{{bucket}}",
            instant=True,
        ),
        unit="currencyUSD",
        colors=p.BUCKETS,
        width=12,
        height=9,
    ),
    d.timeseries(
        "Buckets over time",
        "Share of the wall clock in each bucket, in a short window before each point. Expected: mostly `productive`. "
        "A gap is time that has no bucket yet.",
        *p.buckets(f"{m.RUN_SECONDS_TOTAL}{{{LEDGER}, %s}}"),
        colors=p.BUCKETS,
        unit="percentunit",
        top=1,
        stacked=True,
        width=12,
    ),
    d.timeseries(
        "Goodput over windows",
        "Goodput of the last hour, day and seven days, and of the whole run. Expected: all alike. If the hour is "
        "lower than the day, time is being lost now.",
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
        "GPU time that incidents cost since the first start, by cause. Incidents are ends of attempts, slow stretches "
        "and stalls. Expected: no cause that dominates. `unknown` means that there was no evidence.",
        d.Query(
            f"sort_desc(sum by (cause) (max by (kind, cause) ({m.RUN_BADPUT_GPU_SECONDS_TOTAL}{ALL})) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=8,
        no_data="No incident is counted yet. The ledger first collects evidence for five minutes.",
    ),
    d.bargauge(
        "Incidents, by kind and cause",
        "Number of incidents since the first start. Kinds are `end` (of an attempt), `slow` (a stretch of slow steps) "
        "and `stall` (a time without steps). Expected: no cause that repeats.",
        d.Query(
            f"sort_desc(max by (kind, cause) ({m.RUN_INCIDENTS_TOTAL}{ALL}) > 0)", "{{kind}}: {{cause}}", instant=True
        ),
        unit="none",
        width=8,
        no_data="No incident is counted yet.",
    ),
    d.bargauge(
        "Ends of attempts",
        "Number of ended attempts, by status. Expected: no `failed` or `silent`, which are unplanned. A `silent` "
        "attempt stopped reporting without a final report.",
        d.Query(f"sort_desc(max by (status) ({m.RUN_ATTEMPT_ENDS_TOTAL}{ALL}) > 0)", "{{status}}", instant=True),
        unit="none",
        width=8,
        no_data="No attempt has ended.",
    ),
]

checkpoints = [
    d.stat(
        "Time to failure",
        "Mean running time of the run per unplanned end of an attempt. Expected: many times the checkpoint interval.",
        d.Query(f"max({r.MTTF}{ALL})"),
        unit="s",
        width=4,
        no_data="No attempt ended unplanned.",
    ),
    d.stat(
        "Time to recovery",
        "Mean time from the unplanned end of an attempt to the first step above the highest one completed before that "
        "end. It includes the restart and repeated steps. Expected: a few minutes.",
        d.Query(f"max({r.MTTR}{ALL})"),
        unit="s",
        width=4,
        no_data="No unplanned end yet, or none that the run has recovered from.",
    ),
    d.stat(
        "Steps at risk",
        "Steps above the newest durable checkpoint. The run would repeat them if it failed now. Expected: falls with "
        "each checkpoint.",
        d.Query(f"max({r.STEPS_AT_RISK}{ALL})"),
        width=4,
        no_data="No durable checkpoint yet, or the run has ended or is queued.",
    ),
    d.stat(
        "Last checkpoint",
        "Age of the newest durable checkpoint. Expected: at most the usual checkpoint interval.",
        d.Query(f"time() - max({m.RUN_COMMITTED_TIMESTAMP_SECONDS}{ALL})", instant=True),
        unit="s",
        width=4,
        no_data="No durable checkpoint yet.",
    ),
    d.stat(
        "Best interval",
        "Best interval between checkpoints. By Young and Daly, it is the square root of twice the time to failure "
        "times the time that a checkpoint blocks training. Expected: near the interval that the run uses. The time of "
        "a checkpoint is a mean of the time shown.",
        d.Query(
            f'sqrt(2 * max({r.MTTF}{ALL}) * max(increase({m.RUN_SECONDS_TOTAL}{{{LEDGER}, bucket="checkpoint_save"}}'
            f"[$__range])) / (max(changes({m.RUN_COMMITTED_STEPS}{ALL}[$__range])) > 0))",
            instant=True,
        ),
        unit="s",
        width=4,
        no_data="No unplanned end yet, or no checkpoint in the time shown.",
    ),
    d.stat(
        "Starts",
        "Number of attempts of the run so far. Expected: rarely a new one. Many in a short time mean a crash loop.",
        d.Query(f"max({m.RUN_ATTEMPTS_TOTAL}{ALL})"),
        width=4,
    ),
    d.timeseries(
        "Completed and checkpointed steps",
        "Highest step completed, and step of the newest durable checkpoint. Expected: both rise, with a steady gap. "
        "While the upper line is flat, the run makes no new steps.",
        d.Query(f"max({m.RUN_HIGH_WATER_STEPS}{ALL})", "completed"),
        d.Query(f"max({m.RUN_COMMITTED_STEPS}{ALL})", "in a durable checkpoint"),
        unit="none",
        width=24,
    ),
]

BOARD = d.dashboard(
    p.GOODPUT,
    "Goodput ledger",
    "Where a run's time and money went, with the cost and cause of each loss.",
    [p.tenant, p.run, p.price],
    {"Now": now, "Time and cost": spent, "Causes": causes, "Failures and checkpoints": checkpoints},
    [p.alert_marks('run="$run"'), p.starts(LEDGER)],
)
