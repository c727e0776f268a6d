"""Fleet dashboard: how much GPU time and money becomes progress, and which runs and hosts cost the rest."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import findings, verdict
from dashboards import parts as p
from flopwatch import catalogue as m

TENANT = 'tenant=~"$tenant"'
LEDGER = f"{{{TENANT}}}"
LOST = 'bucket!~"productive|generation|queue"'
HELD_1D = "run:run_gpu_seconds:difference_1d"
COST = "$price / 3600"
# GPU-seconds of the last day, by run, that were not productive or that the run waited for a straggler.
LOST_1D = (
    f"sum by (tenant, run) (max by (tenant, run, bucket) ({HELD_1D}{{{TENANT}, {LOST}}}) or "
    f'max by (tenant, run) ({HELD_1D}{{{TENANT}, bucket="productive"}}) * on (run) group_left () '
    f"{r.STRAGGLER_LOST_1D})"
)
FINDINGS = findings.on_hosts(findings.SHIPPED)
NAMED = verdict.named('run!=""', f'{TENANT}, run!=""')


def of_runs(expr: str) -> str:
    """Return `expr`, whose series have `run`, for the LINES runs with the most GPUs only."""
    return f"{expr} and on (run) topk({p.LINES}, max by (run) ({m.RUN_GPUS}{LEDGER}))"


alerting = [
    findings.table(
        "Firing alerts on all runs and hosts, and reasons of the verdicts on all hosts, one row for each incident.",
        f"{NAMED} or on (alertname, run) {findings.placed(FINDINGS)}",
        "Run",
        "Rank",
        "Node",
        "GPU",
        "$ an hour",
        "Device",
        "Port",
        "Part",
        "Leaf",
    )
]

now = [
    d.gauge(
        "MFU",
        "MFU of all runs that have one in the last five minutes, weighted by ranks. MFU is model FLOPs over dense "
        "peak FLOPs, in steps only. The peak ignores power caps and clocks, so MFU falls when GPUs are capped. "
        "Expected: 35 to 45 % for large runs. Look into values below 20 %.",
        d.Query(r.FLEET_MFU),
        unit="percentunit",
        top=1,
        thresholds=p.UTILIZATION,
        no_data="No run has an MFU.",
    ),
    d.gauge(
        "Goodput, one day",
        "Productive GPU time over GPU time held in the last day, of all runs. Expected: 90 % or more. The best "
        "published value is 96 %.",
        d.Query(r.FLEET_GOODPUT_1D),
        unit="percentunit",
        top=1,
        thresholds=p.SHARE,
    ),
    d.stat(
        "GPUs",
        "Number of GPUs that answer. Expected: constant. An unplanned fall means lost GPUs or hosts.",
        d.Query(r.FLEET_GPUS),
        width=3,
        height=6,
    ),
    d.stat(
        "Allocated",
        "Share of the GPUs that a rank, a pod, a job or a user has. Expected: near 100 % while runs are queued.",
        d.Query(f"{r.FLEET_ALLOCATED} / {r.FLEET_GPUS}"),
        unit="percentunit",
        width=3,
        height=6,
    ),
    d.stat(
        "Runs down",
        "Runs whose last attempt failed or went silent, and that were neither restarted nor closed. Expected: 0. "
        "Restart the run, or close it with `flopwatch ledger close`.",
        d.Query(
            f'count(max by (tenant, run) ({m.RUN_STATE}{{{TENANT}, state="down"}}) == 1) or vector(0)', instant=True
        ),
        thresholds=p.ERRORS,
        width=3,
        height=6,
    ),
    d.stat(
        "Unhealthy hosts",
        "Hosts with a firing alert, or with a verdict other than ok. Expected: 0. The table of findings has the "
        "alerts and reasons.",
        d.Query(f"count(max by (host) ({findings.on_hosts(findings.HOSTS)})) or vector(0)", instant=True),
        thresholds=p.FEW,
        links=[d.link("Nodes", p.NODE)],
        width=4,
        height=6,
    ),
    d.stat(
        "Lost, one day",
        "Cost in US dollars of the last day's GPU time that was not productive, at the price per GPU-hour above. It "
        "includes waits for stragglers. Expected: less than a tenth of the cost of all GPU time held.",
        d.Query(f"sum({LOST_1D}) * {COST}", instant=True),
        unit="currencyUSD",
        width=3,
        height=6,
    ),
]

runs = [
    d.table(
        "Runs",
        "One row per run, the run with most GPUs first. Expected: goodput above 90 % and straggler 0 %. Otherwise "
        "open the run. `Straggler` is the share of each step lost to a straggler. `Lost, 1 d` is the cost of the last "
        "day's GPU time that was not productive or that the run waited for a straggler.",
        [
            d.Column("GPUs", f"max by (run) ({m.RUN_GPUS}{LEDGER})"),
            d.Column("MFU", f"max by (run) ({r.RUN_MFU})", "percentunit", p.UTILIZATION),
            d.Column("Goodput, 1 d", f"max by (run) ({r.GOODPUT_1D}{LEDGER})", "percentunit", p.SHARE),
            d.Column("Goodput", f"max by (run) ({r.GOODPUT}{LEDGER})", "percentunit", p.SHARE),
            d.Column("ETTR", f"max by (run) ({r.ETTR}{LEDGER})", "percentunit", p.SHARE),
            d.Column("Straggler", f"max by (run) ({r.STRAGGLER_LOST})", "percentunit", p.LATE),
            d.Column("Down", f'max by (run) ({m.RUN_STATE}{{{TENANT}, state="down"}})', mappings=p.ONE_IS_BAD),
            d.Column("Time to failure", f"max by (run) ({r.MTTF}{LEDGER})", "s"),
            d.Column("Lost, 1 d", f"sum by (run) ({LOST_1D}) * {COST}", "currencyUSD"),
        ],
        key="run",
        labels={"run": "Run"},
        sort="GPUs",
        height=8,
        links={
            "Run": [
                p.to_run(d.FIELD % "Run"),
                d.link("Goodput ledger", p.GOODPUT, run=d.FIELD % "Run"),
                d.link("Stragglers", p.STRAGGLERS, run=d.FIELD % "Run"),
            ]
        },
    )
]

time = [
    d.timeseries(
        "GPU time by bucket",
        "Share of all runs' GPU time in each bucket. Time counts when a step or an attempt ends. Expected: mostly "
        "`productive`, in reinforcement learning also `generation`.",
        *p.buckets(f"{m.RUN_GPU_SECONDS_TOTAL}{{{TENANT}, %s}}", share=True),
        unit="percentunit",
        top=1,
        stacked=True,
        colors=p.BUCKETS,
    ),
    d.timeseries(
        "MFU of the largest runs",
        f"MFU of the {p.LINES} runs with most GPUs, mean of five minutes. Expected: steady. At a gap, the run makes "
        "no steps or its MFU is unknown.",
        d.Query(of_runs(f"max by (run) ({r.RUN_MFU})"), "{{run}}"),
        unit="percentunit",
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "Allocated and unallocated GPUs",
        "GPUs that answer and that a rank, a pod, a job or a user has (allocated), or that have no such owner "
        "(unallocated). GPUs with an unknown owner are in neither. Expected: no unallocated GPUs while runs are "
        "queued.",
        d.Query(r.FLEET_ALLOCATED, "allocated"),
        d.Query(r.FLEET_IDLE, "unallocated"),
        colors={"allocated": "green", "unallocated": "yellow"},
        unit="none",
        stacked=True,
    ),
    d.state_timeline(
        "State of the largest runs",
        f"State of the {p.LINES} runs with most GPUs over time. Expected: running (green). Red is down, orange is "
        "queued, blue is ended.",
        d.Query(
            of_runs(
                f'max by (run) ({m.RUN_STATE}{{{TENANT}, state="running"}} + on (tenant, run) 2 * '
                f'{m.RUN_STATE}{{{TENANT}, state="queued"}} + on (tenant, run) 3 * '
                f'{m.RUN_STATE}{{{TENANT}, state="down"}})'
            ),
            "{{run}}",
        ),
        mappings={0: ("ended", "blue"), 1: ("running", "green"), 2: ("queued", "orange"), 3: ("down", "red")},
        links=[p.to_run(d.LABEL % "run")],
        height=8,
    ),
]

losses = [
    d.bargauge(
        "GPU time lost, by cause",
        "GPU time that incidents of all runs cost in the time shown, by cause. Incidents are ends of attempts, slow "
        "stretches and stalls. Expected: no cause that dominates. `unknown` means that there was no evidence.",
        d.Query(
            "sort_desc(sum by (cause) (max by (tenant, run, kind, cause) "
            f"(increase({m.RUN_BADPUT_GPU_SECONDS_TOTAL}{LEDGER}[$__range]))) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=8,
        no_data="No incident was counted in the time shown. The ledger first collects evidence for five minutes.",
    ),
    d.stat(
        "GPU time to failure",
        "GPU time of running per unplanned end of an attempt, over the last 30 days. A value of 2 weeks means two "
        "GPU-weeks. Divided by the number of a run's GPUs, it is the run's expected time to failure. Expected: not "
        "falling.",
        d.Query(r.FLEET_MTTF),
        unit="s",
        width=4,
        height=8,
        no_data="No attempt ended unplanned in the last 30 days, as of the last full hour.",
    ),
    d.stat(
        "Time to recovery",
        "Mean time from the unplanned end of an attempt to the first step above the highest one completed before that "
        "end, over 30 days. Expected: a few minutes. Otherwise look at scheduling, start-up and restore.",
        d.Query(r.FLEET_MTTR),
        unit="s",
        width=4,
        height=8,
        no_data="No recovery from an unplanned end in the last 30 days, as of the last full hour.",
    ),
    d.table(
        "Lemons",
        "Hosts that make runs fail again and again. The score counts unplanned ends, critical Xids, straggling ranks "
        "and lost ports of the last seven days. Expected: below 3. Drain hosts with 3 or more and test them.",
        [
            d.Column(
                "Score",
                f"topk({p.LINES}, max by (host) ({r.LEMON}) > 0)",
                "none",
                [(None, "green"), (1, "orange"), (3, "red")],
            )
        ],
        key="host",
        labels={"host": "Node"},
        sort="Score",
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=8,
        no_data="No host had a sign of failure in the last seven days.",
    ),
]

BOARD = d.dashboard(
    p.FLEET,
    "Fleet",
    "MFU, goodput and cost of all runs, the GPUs in use, and the hosts that need attention.",
    [p.tenant, p.price],
    {"Now": now, "Incidents": alerting, "Each run": runs, "Over time": time, "Losses": losses},
    [p.alert_marks(findings.SHIPPED)],
)
