"""Fleet: how much of the GPUs' time and money becomes progress, and which runs and nodes cost the rest."""

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
NOT_OK = f"{m.NODE_VERDICT_REASON}"


def of_runs(expr: str) -> str:
    """Return an expression by run, largest first, of the LINES runs that have most GPUs."""
    return f"{expr} and on (run) topk({p.LINES}, max by (run) ({m.RUN_GPUS}{LEDGER}))"


now = [
    d.gauge(
        "MFU",
        "Model FLOPs over the dense peak of all ranks whose run has an MFU. Bad: below 20 %; 35 to 45 % is "
        "typical of large runs. Nothing: no run has one.",
        d.Query(r.FLEET_MFU),
        unit="percentunit",
        top=1,
        thresholds=p.UTILIZATION,
        no_data="No run has one.",
    ),
    d.gauge(
        "Goodput, one day",
        "GPU time that advanced a model over GPU time held. Bad: below 80 %; 90 % is typical, 96 % and more the best.",
        d.Query(r.FLEET_GOODPUT_1D),
        unit="percentunit",
        top=1,
        thresholds=p.SHARE,
    ),
    d.stat(
        "GPUs", "Those that answer. Bad: a step down that nobody planned.", d.Query(r.FLEET_GPUS), width=3, height=6
    ),
    d.stat(
        "Allocated",
        "Share of them that a rank, a pod, a job or a user has. Bad: falling while runs wait.",
        d.Query(f"{r.FLEET_ALLOCATED} / {r.FLEET_GPUS}"),
        unit="percentunit",
        width=3,
        height=6,
    ),
    d.stat(
        "Runs down",
        "Runs of which nothing is alive and which nobody ended. Bad: any.",
        d.Query(
            f'count(max by (tenant, run) ({m.RUN_STATE}{{{TENANT}, state="down"}}) == 1) or vector(0)', instant=True
        ),
        thresholds=p.ERRORS,
        width=3,
        height=6,
    ),
    d.stat(
        "Nodes not ok",
        "Nodes whose own verdict is degraded or bad. Bad: any; the table below says why.",
        d.Query(f"count({m.NODE_VERDICT} > 0) or vector(0)", instant=True),
        thresholds=p.FEW,
        links=[d.link("Nodes", p.NODE)],
        width=3,
        height=6,
    ),
    d.stat(
        "Lost in a day",
        "What the GPU time of the last day cost that advanced no model. Bad: more than a tenth of "
        "what the GPUs cost; goodput says the share.",
        d.Query(f"sum(max by (tenant, run, bucket) ({HELD_1D}{{{TENANT}, {LOST}}})) * {COST}", instant=True),
        unit="currencyUSD",
        width=4,
        height=6,
    ),
]

runs = [
    d.table(
        "Runs",
        "One row for each run, the largest first. Bad: goodput below 90 %, a straggler above 10 %, money lost; "
        "open the run.",
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
        "GPUs by what their time becomes",
        "GPUs' worth of each bucket, of all runs. Bad: any colour but productive that grows.",
        d.Query(
            f"sum by (bucket) (max by (tenant, run, bucket) (rate({m.RUN_GPU_SECONDS}{LEDGER}{p.RATE})))", "{{bucket}}"
        ),
        unit="none",
        stacked=True,
    ),
    d.timeseries(
        "MFU of the largest runs",
        f"The {p.LINES} with most GPUs. Bad: one that falls and stays; a hole is a run that makes no steps.",
        d.Query(of_runs(f"max by (run) ({r.RUN_MFU})"), "{{run}}"),
        unit="percentunit",
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "GPUs allocated and idle",
        "Of those that answer. Bad: idle ones while runs are queued.",
        d.Query(r.FLEET_ALLOCATED, "allocated"),
        d.Query(r.FLEET_IDLE, "idle"),
        unit="none",
        stacked=True,
    ),
    d.state_timeline(
        "Runs over time",
        f"The state of the {p.LINES} runs with most GPUs. Bad: red, and orange for long.",
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
        "In the time shown: what ends, slow stretches and stalls cost, by what is to blame. "
        "Bad: one cause that leads; unknown means that nothing was seen beside the loss. Nothing: no loss has been "
        "explained in that time; it takes five minutes.",
        d.Query(
            "sort_desc(sum by (cause) (max by (tenant, run, kind, cause) "
            f"(increase({m.RUN_BADPUT_GPU_SECONDS}{LEDGER}[$__range]))) > 0)",
            "{{cause}}",
            instant=True,
        ),
        unit="s",
        width=12,
        no_data="No loss has been explained in that time; it takes five minutes.",
    ),
    d.stat(
        "GPU time to failure",
        "GPU time of running for each unplanned end of the last 30 days: over a run's GPUs, "
        "its expected time to failure. Bad: falling. Nothing: none ended so.",
        d.Query(r.FLEET_MTTF),
        unit="s",
        width=6,
        height=8,
        no_data="None ended so.",
    ),
    d.stat(
        "Time to recovery",
        "From an unplanned end to the first new step, mean of 30 days. Bad: above some "
        "minutes; look at scheduling, start-up and restore. Nothing: none had to.",
        d.Query(r.FLEET_MTTR),
        unit="s",
        width=6,
        height=8,
        no_data="None had to.",
    ),
]

nodes = [
    d.table(
        "Lemons",
        "Nodes that make runs fail, by the signs of the last seven days. Bad: 3 and more; take it out and "
        "test it. Nothing: no node has a sign.",
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
        no_data="No node has a sign.",
    ),
    d.label_table(
        "Why nodes are not ok",
        "The reasons of each node's own verdict, and what to do: docs/check.md. Bad: any row. "
        "Nothing: all nodes are ok.",
        p.with_host(NOT_OK),
        labels={"host": "Node", "verdict": "Verdict", "reason": "Reason", "part": "Part", "action": "What to do"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=16,
        height=10,
        no_data="All nodes are ok.",
    ),
    p.firing(
        f'ALERTS{{alertstate="firing", alertname=~"{p.ALERTS}", alertname!="FlopwatchWatchdog"}}',
        "Of all runs and nodes. Bad: critical ones.",
    ),
]

BOARD = d.dashboard(
    p.FLEET,
    "Fleet",
    "Allocated and idle, MFU, goodput and money of all runs, and the nodes that cost them.",
    [p.tenant, p.price],
    {"Now": now, "Each run": runs, "Time": time, "Losses": losses, "Nodes and alerts": nodes},
)
