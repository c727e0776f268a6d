"""Fleet dashboard: how much GPU time and money becomes progress, and which runs and hosts cost the rest."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

TENANT = 'tenant=~"$tenant"'
LEDGER = f"{{{TENANT}}}"
LOST = 'bucket!~"productive|generation|queue"'
HELD_1D = "run:run_gpu_seconds:difference_1d"
COST = "$price / 3600"
NOT_OK = f"{m.HOST_VERDICT_REASON}"


def of_runs(expr: str) -> str:
    """Return `expr`, whose series have `run`, for the LINES runs with the most GPUs only."""
    return f"{expr} and on (run) topk({p.LINES}, max by (run) ({m.RUN_GPUS}{LEDGER}))"


now = [
    d.gauge(
        "MFU",
        "Model FLOPs over the dense peak of all ranks whose run has an MFU. Expected: 35 to 45 % for large runs; "
        "look into values below 20 %.",
        d.Query(r.FLEET_MFU),
        unit="percentunit",
        top=1,
        thresholds=p.UTILIZATION,
        no_data="No run has an MFU.",
    ),
    d.gauge(
        "Goodput, one day",
        "GPU time that advanced a model over GPU time held. Expected: 90 % or more; 96 % is the best in the field.",
        d.Query(r.FLEET_GOODPUT_1D),
        unit="percentunit",
        top=1,
        thresholds=p.SHARE,
    ),
    d.stat("GPUs", "GPUs that answer. Expected: no unplanned step down.", d.Query(r.FLEET_GPUS), width=3, height=6),
    d.stat(
        "Allocated",
        "Share of the GPUs that a rank, a pod, a job or a user has. Expected: high while runs wait.",
        d.Query(f"{r.FLEET_ALLOCATED} / {r.FLEET_GPUS}"),
        unit="percentunit",
        width=3,
        height=6,
    ),
    d.stat(
        "Runs down",
        "Runs that are neither alive nor closed. Expected: 0.",
        d.Query(
            f'count(max by (tenant, run) ({m.RUN_STATE}{{{TENANT}, state="down"}}) == 1) or vector(0)', instant=True
        ),
        thresholds=p.ERRORS,
        width=3,
        height=6,
    ),
    d.stat(
        "Unhealthy hosts",
        "Hosts whose own verdict is degraded or bad. Expected: 0. The table below has the reasons.",
        d.Query(f"count({m.HOST_VERDICT_ID} > 0) or vector(0)", instant=True),
        thresholds=p.FEW,
        links=[d.link("Nodes", p.NODE)],
        width=3,
        height=6,
    ),
    d.stat(
        "Lost in a day",
        "Cost of the last day's GPU time that advanced no model. Expected: less than a tenth of the cost of all GPUs.",
        d.Query(f"sum(max by (tenant, run, bucket) ({HELD_1D}{{{TENANT}, {LOST}}})) * {COST}", instant=True),
        unit="currencyUSD",
        width=4,
        height=6,
    ),
]

runs = [
    d.table(
        "Runs",
        "One row per run, the largest first. Expected: goodput above 90 % and straggler below 10 %. Open the run "
        "otherwise.",
        [
            d.Column("GPUs", f"max by (run) ({m.RUN_GPUS}{LEDGER})"),
            d.Column("MFU", f"max by (run) ({r.RUN_MFU})", "percentunit", p.UTILIZATION),
            d.Column("Goodput, 1 d", f"max by (run) ({r.GOODPUT_1D}{LEDGER})", "percentunit", p.SHARE),
            d.Column("Goodput", f"max by (run) ({r.GOODPUT}{LEDGER})", "percentunit", p.SHARE),
            d.Column("ETTR", f"max by (run) ({r.ETTR}{LEDGER})", "percentunit", p.SHARE),
            d.Column("Straggler", f"max by (run) ({r.STRAGGLER_LOST})", "percentunit", p.LATE),
            d.Column("Down", f'max by (run) ({m.RUN_STATE}{{{TENANT}, state="down"}})', mappings=p.ONE_IS_BAD),
            d.Column("Time to failure", f"max by (run) ({r.MTTF}{LEDGER})", "s"),
            d.Column(
                "Lost, 1 d",
                f"sum by (run) (max by (tenant, run, bucket) ({HELD_1D}{{{TENANT}, {LOST}}})) * {COST}",
                "currencyUSD",
            ),
        ],
        key="run",
        labels={"run": "Run"},
        sort="GPUs",
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
        "GPUs in each bucket, over all runs. Expected: mostly productive.",
        d.Query(
            f"sum by (bucket) (max by (tenant, run, bucket) (rate({m.RUN_GPU_SECONDS_TOTAL}{LEDGER}{p.RATE})))",
            "{{bucket}}",
        ),
        unit="none",
        stacked=True,
    ),
    d.timeseries(
        "MFU of the largest runs",
        f"MFU of the {p.LINES} runs with most GPUs. Expected: steady. A gap is a run that makes no steps.",
        d.Query(of_runs(f"max by (run) ({r.RUN_MFU})"), "{{run}}"),
        unit="percentunit",
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "GPUs allocated and idle",
        "GPUs that answer, with and without an owner. Expected: no idle GPUs while runs are queued.",
        d.Query(r.FLEET_ALLOCATED, "allocated"),
        d.Query(r.FLEET_IDLE, "idle"),
        unit="none",
        stacked=True,
    ),
    d.state_timeline(
        "Runs over time",
        f"State of the {p.LINES} runs with most GPUs. Expected: green. Red is down, orange is queued.",
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
        "Cost in GPU time of ended attempts, slow stretches and stalls in the time shown, by cause. Expected: no "
        "cause that dominates. `unknown` means that no evidence was found.",
        d.Query(
            "sort_desc(sum by (cause) (max by (tenant, run, kind, cause) "
            f"(increase({m.RUN_BADPUT_GPU_SECONDS_TOTAL}{LEDGER}[$__range]))) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=12,
        no_data="No loss was explained in this time; it takes five minutes.",
    ),
    d.stat(
        "GPU time to failure",
        "GPU time of running per unplanned end, over the last 30 days. Divided by a run's GPUs it is its expected "
        "time to failure. Expected: not falling.",
        d.Query(r.FLEET_MTTF),
        unit="s",
        width=6,
        height=8,
        no_data="No attempt ended unplanned.",
    ),
    d.stat(
        "Time to recovery",
        "Time from an unplanned end to the first new step, mean of 30 days. Expected: a few minutes. Otherwise look "
        "at scheduling, start-up and restore.",
        d.Query(r.FLEET_MTTR),
        unit="s",
        width=6,
        height=8,
        no_data="No run had to recover.",
    ),
]

nodes = [
    d.table(
        "Lemons",
        "Hosts that make runs fail, by the signs of the last seven days. Expected: below 3. Take others out and test "
        "them.",
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
        no_data="No host has a sign.",
    ),
    d.label_table(
        "Health problems",
        "Reasons of each unhealthy host, and what to do (docs/check.md). Expected: no row.",
        p.with_host(NOT_OK),
        labels={"host": "Node", "verdict": "Verdict", "reason": "Reason", "part": "Part", "action": "What to do"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=16,
        height=10,
        no_data="All hosts are healthy.",
    ),
    p.firing(
        f'ALERTS{{alertstate="firing", alertname=~"{p.ALERTS}", alertname!="FlopwatchWatchdog"}}',
        "Firing alerts on all runs and hosts. Expected: none that is critical.",
    ),
]

BOARD = d.dashboard(
    p.FLEET,
    "Fleet",
    "Allocated and idle, MFU, goodput and money of all runs, and the nodes that cost them.",
    [p.tenant, p.price],
    {"Now": now, "Each run": runs, "Time": time, "Losses": losses, "Nodes and alerts": nodes},
)
