"""Training run: how fast it advances the model, where its time went, and which rank, GPU, port or link is behind it.

Every name in a query is a catalogue row or a recording rule. GPUs are joined to ranks on `uuid`, with the rank on the
many side. So two ranks on one GPU, or two info series during a restart, cannot break a panel. Ports are joined to hosts
on `instance`, the address at which they were scraped. Panels show only the worst LINES lines, because a run may have
thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from dashboards.parts import ERRORS, HELD_BACK, HOT, LATE, LINES, RATE, SHARE, UTILIZATION
from flopwatch import catalogue as m

RUN = 'run="$run"'
LEDGER = 'tenant=~"$tenant", run="$run"'

RANK_INFO = f"{m.TRAINING_RANK_INFO}{{{RUN}}}"
RANKS = f"max by (rank, host, uuid) ({RANK_INFO})"
ROWS = 64  # of the table of ranks
SHOWN = (
    f"and on (rank) topk({ROWS}, max by (rank) ({r.RANK_SCORE}{{{RUN}}}) or on (rank) 0 * max by (rank) ({RANK_INFO}))"
)


def per_rank(gpu: str, labels: str = "") -> str:
    """Return `gpu`, whose series have `uuid`, for the ranks of the run on these GPUs. `labels` of `gpu` are kept."""
    one = f"max by (uuid{labels and ', ' + labels}) ({gpu})"
    if labels:  # a GPU that was moved can have two values of a label, and two series would break the join
        one = f"topk by (uuid) (1, {one})"
    return f"{RANKS} * on (uuid) group_left ({labels}) {one}"


def per_port(port: str) -> str:
    """Return `port`, whose series are per port, for the ports of the run's hosts, with `host` added."""
    identity = f"max by (instance, device, port, host) ({m.INFINIBAND_INFO})"
    return f"({port} * on (instance, device, port) group_left (host) {identity}) and on (host) {RANK_INFO}"


POWER = f"rate({m.GPU_ENERGY_JOULES_TOTAL}{RATE})"
SYMBOL_ERRORS = f"increase({m.INFINIBAND_SYMBOL_ERRORS_TOTAL}[$__range])"
THROTTLED = f"rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{RATE})"

now = [
    d.stat(
        "State",
        "State of the run. Expected: running. When it is down, look at the end of the last attempt and at the firing "
        "alerts.",
        d.Query(f"max by (state) ({m.RUN_STATE}{{{LEDGER}}}) == 1", "{{state}}", instant=True),
        name=True,
        colors={"running": "green", "queued": "yellow", "down": "red", "completed": "blue", "stopped": "blue"},
    ),
    d.stat(
        "MFU",
        "Model FLOPs over the dense peak of the run's GPUs, while in steps. Expected: 35 to 45 % for large runs, "
        "steady.",
        d.Query(f"{r.RUN_MFU}{{{RUN}}}"),
        unit="percentunit",
        thresholds=UTILIZATION,
        no_data=f"A rank has no peak; {m.TRAINING_MFU_UNAVAILABLE} has the reason.",
    ),
    d.stat(
        "Effective MFU",
        "Model FLOPs of retained steps over the peak of all GPUs held, down time included. Expected: near MFU. Lower "
        "means time lost outside steps.",
        d.Query(f"{r.EFFECTIVE_MFU}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=UTILIZATION,
    ),
    d.stat(
        "Goodput",
        "Share of the wall clock since the first start that advanced the model. Expected: above 90 %. The buckets "
        "below show the rest.",
        d.Query(f"{r.GOODPUT}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=SHARE,
        links=[d.link("Goodput ledger", p.GOODPUT, tenant="$tenant", run="$run")],
    ),
    d.stat(
        "ETTR",
        "Goodput since submission, with the time in the queue. Expected: near goodput. Lower means a long queue.",
        d.Query(f"{r.ETTR}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=SHARE,
        no_data="The time of submission is unknown.",
    ),
    d.stat(
        "Step time",
        "Mean step time of the last five minutes. Expected: constant at the same batch size.",
        d.Query(f"{r.STEP_DURATION}{{{RUN}}}"),
        unit="s",
    ),
    d.stat(
        "Tokens/s",
        "Tokens per second of the whole run, re-executed steps included. Expected: steady.",
        d.Query(f"{r.TOKENS}{{{RUN}}}"),
        unit="short",
    ),
    d.stat(
        "Cost",
        "Cost of all GPU time held, at the price above. Expected: worth what it bought. The goodput ledger shows "
        "where it went.",
        d.Query(f"sum(max by (tenant, run, bucket) ({m.RUN_GPU_SECONDS_TOTAL}{{{LEDGER}}})) * $price / 3600"),
        unit="currencyUSD",
    ),
]

progress = [
    d.timeseries(
        "MFU and effective MFU",
        "MFU while in steps, and over all the time GPUs were held. Expected: steady, with a constant gap.",
        d.Query(f"{r.RUN_MFU}{{{RUN}}}", "MFU"),
        d.Query(f"{r.EFFECTIVE_MFU}{{{LEDGER}}}", "effective MFU"),
        unit="percentunit",
    ),
    d.timeseries(
        "Goodput and ETTR",
        "Share of the wall clock that advanced the model, since the first start (goodput) and since submission "
        "(ETTR). Expected: not falling.",
        d.Query(f"{r.GOODPUT}{{{LEDGER}}}", "goodput"),
        d.Query(f"{r.ETTR}{{{LEDGER}}}", "ETTR"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Token rate",
        "Tokens per second of the whole run. Expected: steady, without gaps.",
        d.Query(f"{r.TOKENS}{{{RUN}}}", "tokens"),
        unit="short",
    ),
    d.bargauge(
        "Wall clock by bucket",
        "Time since the first start, by bucket. Expected: mostly productive. `lost` is work done twice or thrown away.",
        d.Query(f"sort_desc(max by (bucket) ({m.RUN_SECONDS_TOTAL}{{{LEDGER}}}) > 0)", "{{bucket}}", instant=True),
        unit="s",
    ),
    d.timeseries(
        "Recent time by bucket",
        "Share of each bucket over time. Expected: mostly productive.",
        d.Query(f"max by (bucket) (rate({m.RUN_SECONDS_TOTAL}{{{LEDGER}}}{RATE}))", "{{bucket}}"),
        unit="percentunit",
        top=1,
        stacked=True,
    ),
    d.timeseries(
        "Step time, mean and worst",
        "Mean and 99th percentile of the step time. Expected: constant and close together. A far 99th percentile is "
        "an occasional stall.",
        d.Query(f"{r.STEP_DURATION}{{{RUN}}}", "mean"),
        d.Query(
            f"histogram_quantile(0.99, sum by (le) (rate({m.TRAINING_STEP_DURATION_SECONDS}_bucket{{{RUN}}}{RATE})))",
            "99th percentile",
        ),
        unit="s",
    ),
]

ranks = [
    d.timeseries(
        "Straggler score",
        "Share of every step that the others wait for the latest rank. Expected: below 10 %; 20 % is critical.",
        d.Query(f"{r.RUN_SCORE}{{{RUN}}}", "latest rank"),
        unit="percentunit",
        thresholds=LATE,
        width=7,
    ),
    d.stat(
        "Straggler",
        "The rank the others wait for most. Expected: a score below 10 %, or a rank that changes; some rank is "
        "always last.",
        d.Query(
            f"topk(1, {RANKS} * on (rank) group_left () max by (rank) ({r.RANK_SCORE}{{{RUN}}}))",
            "rank {{rank}} on {{host}}",
            instant=True,
        ),
        name=True,
        width=3,
        height=8,
        links=[d.link("Stragglers", p.STRAGGLERS, run="$run")],
    ),
    d.timeseries(
        "Wait share",
        f"Share of step time spent waiting in collectives, for the {LINES} ranks that wait least. Expected: ranks "
        "alike. One far below the rest is the straggler; if all are high, look at the links.",
        d.Query(p.most(f"{r.WAIT}{{{RUN}}}", "bottomk"), "rank {{rank}}"),
        unit="percentunit",
        width=7,
    ),
    p.firing(
        f'ALERTS{{alertstate="firing", {RUN}}} or ALERTS{{alertstate="firing", run="", alertname=~"{p.ALERTS}"}}',
        "Firing alerts on this run, on hosts and on links. Expected: only FlopwatchWatchdog, which always fires to "
        "prove that alerts arrive.",
        width=7,
    ),
    d.table(
        "Ranks and their GPUs",
        f"One row for each of the {ROWS} latest ranks. Expected: low scores. Next to a high score, a low clock, heat, "
        "throttling or an Xid explains it; otherwise look at the host.",
        [
            d.Column("Info", f"{RANKS} {SHOWN}", unit=None),
            *(
                d.Column(name, f"max by (rank{', gpu' if unit is None else ''}) ({expr}) {SHOWN}", unit, thresholds)
                for name, expr, unit, thresholds in (
                    ("Index", per_rank(str(m.GPU_INFO), "gpu"), None, ()),
                    ("Straggler score", f"{r.RANK_SCORE}{{{RUN}}}", "percentunit", LATE),
                    ("Wait share", f"{r.WAIT}{{{RUN}}}", "percentunit", ()),
                    ("MFU", f"{r.RANK_MFU}{{{RUN}}}", "percentunit", ()),
                    ("SM clock", per_rank(str(m.GPU_SM_CLOCK_HERTZ)), "hertz", ()),
                    ("Power", per_rank(POWER), "watt", ()),
                    ("Temperature", per_rank(str(m.GPU_TEMPERATURE_CELSIUS)), "celsius", HOT),
                    ("Throttled", per_rank(THROTTLED), "percentunit", HELD_BACK),
                    ("Xid errors", per_rank(f"sum by (uuid) ({m.GPU_XID_ERRORS_TOTAL})"), "none", ERRORS),
                )
            ),
        ],
        key="rank",
        labels={"rank": "Rank", "host": "Node", "gpu": "GPU", "uuid": "UUID"},
        sort="Straggler score",
        links={
            "Rank": [d.link("Stragglers", p.STRAGGLERS, run="$run")],
            "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
            "UUID": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")],
        },
    ),
]

gpus = [
    d.timeseries(
        "Power per GPU",
        f"Mean power of the {LINES} GPUs of the run that draw least. Expected: GPUs alike. One far below the rest is "
        "idle or throttled.",
        d.Query(p.most(per_rank(POWER), "bottomk"), "rank {{rank}} {{host}}"),
        unit="watt",
        width=6,
    ),
    d.timeseries(
        "SM clock per GPU",
        f"SM clock of the {LINES} slowest GPUs. Expected: GPUs alike under load. Otherwise look at throttling.",
        d.Query(p.most(per_rank(str(m.GPU_SM_CLOCK_HERTZ)), "bottomk"), "rank {{rank}} {{host}}"),
        unit="hertz",
        width=6,
    ),
    d.timeseries(
        "Temperature per GPU",
        f"Temperature of the {LINES} hottest GPUs. Expected: no outlier, and no thermal throttling. Each GPU has its "
        "own limit; the lines are a guide.",
        d.Query(p.most(per_rank(str(m.GPU_TEMPERATURE_CELSIUS))), "rank {{rank}} {{host}}"),
        unit="celsius",
        thresholds=HOT,
        width=6,
    ),
    d.timeseries(
        "Time throttled, worst GPU",
        "Share of time the clock was throttled, by reason, on the worst GPU of the run. Expected: none, except "
        "sw_power_cap at full load.",
        d.Query(f"max by (reason) ({THROTTLED} and on (uuid) {RANK_INFO})", "{{reason}}"),
        unit="percentunit",
        width=6,
    ),
]

errors = [
    d.timeseries(
        "InfiniBand throughput per host",
        f"Bytes per second of the {LINES} hosts of the run that send least. Expected: hosts alike.",
        d.Query(
            p.most(f"sum by (host) ({per_port(f'rate({m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL}{RATE})')})", "bottomk"),
            "{{host}} sends",
        ),
        d.Query(
            p.most(f"sum by (host) ({per_port(f'rate({m.INFINIBAND_RECEIVE_DATA_BYTES_TOTAL}{RATE})')})", "bottomk"),
            "{{host}} receives",
        ),
        unit="Bps",
        width=6,
    ),
    d.timeseries(
        "Active ports per host",
        f"Active InfiniBand ports of the {LINES} hosts with fewest. Expected: constant. A step down is a lost link.",
        d.Query(f"bottomk({LINES}, count by (host) ({per_port(f'({m.INFINIBAND_PORT_STATE_ID} == 4)')}))", "{{host}}"),
        unit="none",
        width=6,
    ),
    d.timeseries(
        "Link errors",
        "Errors per second on all ports of the run's hosts. Expected: no symbol errors that last, no link down, no "
        "recovery under load.",
        *(
            d.Query(f"sum({per_port(f'rate({family}{RATE})')})", legend)
            for family, legend in (
                (m.INFINIBAND_SYMBOL_ERRORS_TOTAL, "symbol errors"),
                (m.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL, "recoveries"),
                (m.INFINIBAND_LINK_DOWNED_TOTAL, "links down"),
                (m.INFINIBAND_RECEIVE_ERRORS_TOTAL, "receive errors"),
            )
        ),
        unit="cps",
        width=6,
    ),
    d.bargauge(
        "Symbol errors per port",
        "Symbol errors of the eight worst ports in the time shown. Expected: none. At 120 an hour, replace the cable "
        "or transceiver.",
        d.Query(
            f"topk(8, sum by (host, device, port) ({per_port(SYMBOL_ERRORS)}))",
            "{{host}} {{device}}/{{port}}",
            instant=True,
        ),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (120, "red")],
        width=6,
    ),
    d.timeseries(
        "Xid errors on the run's GPUs",
        "Xid errors by code since the host was first monitored. Expected: flat; the level is history. Meanings: "
        "docs/xid.md.",
        d.Query(f"sum by (xid) ({m.GPU_XID_ERRORS_TOTAL} and on (uuid) {RANK_INFO})", "Xid {{xid}}"),
        unit="none",
        width=24,
        height=7,
    ),
]

BOARD = d.dashboard(
    p.RUN,
    "Training run",
    "One training run, from the model down to the card and the cable.",
    [p.tenant, p.run, p.price],
    {"Now": now, "Progress": progress, "Ranks": ranks, "GPUs of the run": gpus, "Errors": errors},
    [p.alert_marks(RUN), p.starts(LEDGER)],
)


def queries(
    run: str, *, tenant: str = ".*", rate_interval: str = "1m", time_range: str = "1h", price: str = "2.5"
) -> Iterator[tuple[str, str]]:
    """Yield the panel title and the PromQL of every query of the dashboard, with these values of the variables."""
    return d.queries(
        BOARD, {"run": run, "tenant": tenant, "price": price, "__rate_interval": rate_interval, "__range": time_range}
    )
