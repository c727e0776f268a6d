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
from dashboards import findings, storage, verdict
from dashboards import parts as p
from dashboards.parts import ERRORS, HELD_BACK, HOT, LATE, RATE, SHARE, UTILIZATION
from flopwatch import catalogue as m

RUN = 'run="$run"'
LEDGER = 'tenant=~"$tenant", run="$run"'

FINDINGS = findings.of_alerts(RUN)
OF_NO_RUN = f'run="", {findings.SHIPPED}'
RANK_INFO = f"{m.TRAINING_RANK_INFO}{{{RUN}}}"
RANKS = f"max by (rank, host, uuid) ({RANK_INFO})"
ROWS = 64  # of the table of ranks
SHOWN = f"and on (rank) bottomk({ROWS}, max by (rank) ({r.WAIT}{{{RUN}}}) or on (rank) max by (rank) ({RANK_INFO}))"


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
THROTTLED = f"clamp_max(rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{RATE}), 1)"

now = [
    verdict.panel(RUN, LEDGER),
    d.stat(
        "State",
        "State of the run: queued, running, down, completed or stopped. Expected: running. If it is down, look at the "
        "firing alerts below, and at the panel `Ends of attempts` of the dashboard `Goodput ledger`.",
        d.Query(f"max by (state) ({m.RUN_STATE}{{{LEDGER}}}) == 1", "{{state}}", instant=True),
        name=True,
        colors={"running": "green", "queued": "yellow", "down": "red", "completed": "blue", "stopped": "blue"},
        width=4,
        height=3,
    ),
    findings.health(
        "Health", "Health of the run.", FINDINGS, f"0 * {m.RUN_STATE}{{{LEDGER}}} or 0 * {RANK_INFO}", width=4, height=3
    ),
    d.stat(
        "Goodput",
        "Productive share of the wall clock since the run's first start. Repeated steps are not productive. A step "
        "that waits for a late rank is productive, and `Lost now` has that loss. Expected: above 90 %. The panels by "
        "bucket below show where the other time went.",
        d.Query(f"{r.GOODPUT}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=SHARE,
        links=[d.link("Goodput ledger", p.GOODPUT, tenant="$tenant", run="$run")],
        width=4,
        height=3,
    ),
    d.stat(
        "MFU, 1 h",
        "Model FLOPs over the dense peak FLOPs of the run's GPUs, mean of the last hour. Only time in steps counts, "
        "including waits for data. The peak ignores power caps and clocks, so MFU falls when GPUs are capped. "
        "Expected: 35 to 45 % for large runs. Otherwise look at the ranks and their GPUs below. "
        f"{m.TRAINING_MFU_UNAVAILABLE} has the reason for an unknown MFU.",
        d.Query(f"{r.RUN_MFU_1H}{{{RUN}}}"),
        unit="percentunit",
        thresholds=UTILIZATION,
        no_data="No steps, or a rank's FLOPs or peak FLOP/s are unknown.",
        width=4,
        height=3,
    ),
    d.stat(
        "Effective MFU",
        "Model FLOPs of steps completed for the first time, over the peak FLOPs of the GPUs held in the same hour. "
        "Down time counts as GPU time held. Expected: near the MFU of this hour. A lower value means time lost "
        "outside steps or in repeated steps.",
        d.Query(f"{r.EFFECTIVE_MFU_1H}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=UTILIZATION,
        no_data="No time is attributed yet, or the run's FLOPs are unknown.",
        width=4,
        height=3,
    ),
    d.stat(
        "ETTR",
        "Effective training time ratio: the productive share of the wall clock since submission. Expected: near the "
        "goodput. A lower value means a long wait in the queue before the first start.",
        d.Query(f"{r.ETTR}{{{LEDGER}}}"),
        unit="percentunit",
        thresholds=SHARE,
        no_data="The run's time of submission is unknown.",
        width=4,
        height=3,
    ),
    d.stat(
        "Lost now",
        "Share of each step that the run waits for its late ranks. Expected: 0 %. The suspects below name them.",
        d.Query(f"{r.STRAGGLER_LOST}{{{RUN}}}"),
        unit="percentunit",
        thresholds=LATE,
        links=[d.link("Stragglers", p.STRAGGLERS, run="$run")],
        no_data="Waits are not measured.",
        width=4,
        height=3,
    ),
    d.stat(
        "Hourly cost",
        "Cost in US dollars of an hour of all GPUs of the run, at the price per GPU-hour above. Expected: constant.",
        d.Query(f"sum(max by (tenant, run) ({m.RUN_GPUS}{{{LEDGER}}})) * $price"),
        unit="currencyUSD",
        width=4,
        height=3,
    ),
    d.stat(
        "Cost",
        "Cost in US dollars of all GPU time held since the first start, at the price per GPU-hour above. Expected: "
        "rises steadily. The goodput ledger shows the cost of each bucket.",
        d.Query(f"sum(max by (tenant, run, bucket) ({m.RUN_GPU_SECONDS_TOTAL}{{{LEDGER}}})) * $price / 3600"),
        unit="currencyUSD",
        width=4,
        height=3,
    ),
    d.stat(
        "Step time",
        "Mean duration of an optimizer step in the last five minutes. Expected: constant while the batch size is "
        "constant.",
        d.Query(f"{r.STEP_DURATION}{{{RUN}}}"),
        unit="s",
        width=4,
        height=3,
    ),
    d.stat(
        "Tokens/s",
        "Tokens per second of all ranks, mean of the last five minutes. Repeated steps count. Expected: steady.",
        d.Query(f"{r.TOKENS}{{{RUN}}}"),
        unit="short",
        width=4,
        height=3,
    ),
    d.stat(
        "GPUs",
        "GPUs that the run holds. Expected: constant.",
        d.Query(f"sum(max by (tenant, run) ({m.RUN_GPUS}{{{LEDGER}}}))"),
        width=4,
        height=3,
    ),
    verdict.table(RUN, LEDGER),
    verdict.alerts(RUN, LEDGER),
]

progress = [
    d.timeseries(
        "MFU and effective MFU",
        "MFU in steps of five minutes and of an hour, and effective MFU of the same hour. Expected: all steady. A "
        "gap between the two of an hour means time lost outside steps or in repeated steps.",
        d.Query(f"{r.RUN_MFU}{{{RUN}}}", "MFU, 5 min"),
        d.Query(f"{r.RUN_MFU_1H}{{{RUN}}}", "MFU, 1 h"),
        d.Query(f"{r.EFFECTIVE_MFU_1H}{{{LEDGER}}}", "effective MFU, 1 h"),
        unit="percentunit",
    ),
    d.timeseries(
        "Goodput and ETTR",
        "Productive share of the wall clock, since the first start (goodput) and since submission (ETTR). Expected: "
        "steady or rising. While they fall, the run makes too little progress.",
        d.Query(f"{r.GOODPUT}{{{LEDGER}}}", "goodput"),
        d.Query(f"{r.ETTR}{{{LEDGER}}}", "ETTR"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Token rate",
        "Tokens per second of all ranks, mean of five minutes. Repeated steps count. Expected: steady. At a gap or at "
        "0, the run makes no steps.",
        d.Query(f"{r.TOKENS}{{{RUN}}}", "tokens"),
        unit="short",
    ),
    d.bargauge(
        "Wall clock by bucket",
        "Wall clock of the run so far, by bucket. Expected: mostly `productive`. `lost` is the time of steps that "
        "were repeated or that the end of an attempt cut short.",
        d.Query(f"sort_desc(max by (bucket) ({m.RUN_SECONDS_TOTAL}{{{LEDGER}}}) > 0)", "{{bucket}}", instant=True),
        unit="s",
        colors=p.BUCKETS,
    ),
    d.timeseries(
        "Recent time by bucket",
        "Share of the wall clock in each bucket, in a short window before each point. Expected: mostly `productive`. "
        "A gap is time that has no bucket yet.",
        *p.buckets(f"{m.RUN_SECONDS_TOTAL}{{{LEDGER}, %s}}"),
        colors=p.BUCKETS,
        unit="percentunit",
        top=1,
        stacked=True,
    ),
    d.timeseries(
        "Step time, mean and 99th percentile",
        "Duration of optimizer steps on all ranks, in the last five minutes. The 99th percentile covers at least the "
        "last 100 steps. Expected: constant and close together. If only the 99th percentile is high, some steps stall.",
        d.Query(f"{r.STEP_DURATION}{{{RUN}}}", "mean"),
        d.Query(f'max({m.TRAINING_STEP_PERCENTILE_SECONDS}{{{RUN},percentile="99"}})', "99th percentile"),
        unit="s",
    ),
]

ranks = [
    d.timeseries(
        "Lost to stragglers",
        "Share of each step that the run waits for its late ranks. Expected: 0 %. From 10 % on it is a warning, from "
        "20 % on critical.",
        d.Query(f"{r.STRAGGLER_LOST}{{{RUN}}}", "lost"),
        unit="percentunit",
        thresholds=LATE,
        width=9,
    ),
    d.stat(
        "Straggler",
        "Late ranks, if they cost 10 % of each step or more. Expected: none. The dashboard `Stragglers` shows what "
        "else makes ranks wait.",
        d.Query(f"{r.CONFIRMED}{{{RUN}}}", "rank {{rank}} on {{host}}", instant=True),
        name=True,
        thresholds=LATE,
        width=6,
        height=8,
        links=[d.link("Stragglers", p.STRAGGLERS, run="$run")],
        no_data="No rank is a straggler now.",
    ),
    d.timeseries(
        "Wait share",
        "Share of measured step time in the last two minutes that a rank waits in collectives. Shows the three ranks "
        "that wait least, the median, and a band with 90 % of all ranks. Expected: a narrow band. A rank far below it "
        "is the straggler. If all ranks wait long, look at the links.",
        *p.outliers(f"{r.WAIT}{{{RUN}}}", "rank {{rank}}", "bottomk"),
        unit="percentunit",
        band=p.BAND,
        width=9,
    ),
    d.table(
        "Ranks and their GPUs",
        f"The {ROWS} ranks that wait least now. The others wait for a late rank. Expected: no stragglers. A low clock, "
        "heat, throttling or an Xid of its GPU explains one. Otherwise look at the host. `Throttled` includes "
        "sw_power_cap, which is normal at full load. `Xid errors` counts since the host was first monitored.",
        [
            d.Column("Info", f"{RANKS} {SHOWN}", unit=None),
            *(
                d.Column(name, f"max by (rank{', gpu' if unit is None else ''}) ({expr}) {SHOWN}", unit, thresholds)
                for name, expr, unit, thresholds in (
                    ("Index", per_rank(str(m.GPU_INFO), "gpu"), None, ()),
                    ("Straggler", f"{r.CONFIRMED}{{{RUN}}}", "percentunit", LATE),
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
        sort="Straggler",
        links={
            "Rank": [d.link("Stragglers", p.STRAGGLERS, run="$run")],
            "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
            "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")],
        },
        hidden=["UUID"],
    ),
]

gpus = [
    d.timeseries(
        "Power per GPU",
        "Power of the three GPUs of the run that draw least, the median, and a band with 90 % of its GPUs. Expected: a "
        "narrow band. A GPU far below it is idle or throttled.",
        *p.outliers(per_rank(POWER), "rank {{rank}}", "bottomk"),
        unit="watt",
        band=p.BAND,
        width=6,
    ),
    d.timeseries(
        "SM clock per GPU",
        "SM clock of the run's three GPUs with the lowest clocks, the median, and a band with 90 % of its GPUs. "
        "Expected: a narrow band under load. Otherwise look at throttling.",
        *p.outliers(per_rank(str(m.GPU_SM_CLOCK_HERTZ)), "rank {{rank}}", "bottomk"),
        unit="hertz",
        band=p.BAND,
        width=6,
    ),
    d.timeseries(
        "Temperature per GPU",
        "Temperature of the run's three hottest GPUs, the median, and a band with 90 % of its GPUs. Expected: no "
        "outlier, and no thermal throttling. Each GPU model has its own limit. The dashed lines are a guide.",
        *p.outliers(per_rank(str(m.GPU_TEMPERATURE_CELSIUS)), "rank {{rank}}"),
        unit="celsius",
        band=p.BAND,
        thresholds=HOT,
        width=6,
    ),
    d.timeseries(
        "Throttling, worst GPU",
        "Share of time in which the clock was throttled, by reason. Each line is the run's GPU with the highest "
        "share. Expected: none, except sw_power_cap at full load.",
        d.Query(f"max by (reason) ({THROTTLED} and on (uuid) {RANK_INFO})", "{{reason}}"),
        unit="percentunit",
        width=6,
    ),
    *(
        d.timeseries(
            title,
            f"{text} Expected: constant. A rise means slower steps, stalls or lower efficiency at the same power.",
            d.Query(f"max({record}{{{RUN}}})", legend),
            unit="joule",
            width=12,
            height=6,
            no_data="The run makes no steps, or the energy of a rank's GPU is not measured.",
        )
        for title, text, record, legend in (
            (
                "Energy per step",
                "Energy of all GPUs of the run per optimizer step, mean of five minutes. Time outside steps counts.",
                r.STEP_ENERGY,
                "per step",
            ),
            (
                "Energy per token",
                "Energy of all GPUs of the run per token, mean of five minutes. Time outside steps counts.",
                r.TOKEN_ENERGY,
                "per token",
            ),
        )
    ),
]

errors = [
    d.timeseries(
        "InfiniBand throughput",
        "Bytes per second that the run's hosts send: the three lowest, the median, and a band with 90 % of its hosts. "
        "`median received` is what they receive. Expected: a narrow band. Otherwise look at the ports of the host.",
        *p.outliers(
            f"sum by (host) ({per_port(f'rate({m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL}{RATE})')})",
            "{{host}}",
            "bottomk",
        ),
        d.Query(
            f"quantile(0.5, sum by (host) ({per_port(f'rate({m.INFINIBAND_RECEIVE_DATA_BYTES_TOTAL}{RATE})')}))",
            "median received",
        ),
        unit="Bps",
        band=p.BAND,
        width=6,
    ),
    d.timeseries(
        "Active ports per host",
        "Number of active InfiniBand ports, for the three hosts of the run with the fewest. Expected: constant. A fall "
        "means a lost link.",
        d.Query(f"bottomk(3, count by (host) ({per_port(f'({m.INFINIBAND_PORT_STATE_ID} == 4)')}))", "{{host}}"),
        unit="none",
        width=6,
    ),
    d.timeseries(
        "Link errors",
        "Errors per second, summed over all InfiniBand ports of the run's hosts. Expected: no lasting symbol errors, "
        "no link down, and no recovery under load. RoCE ports count receive errors only.",
        *(
            d.Query(f"sum({per_port(f'rate({family}{RATE})')})", legend)
            for family, legend in (
                (m.INFINIBAND_SYMBOL_ERRORS_TOTAL, "symbol errors"),
                (m.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL, "recoveries"),
                (m.INFINIBAND_LINK_DOWNED_TOTAL, "links down"),
                (m.INFINIBAND_RECEIVE_ERRORS_TOTAL, "receive errors"),
            )
        ),
        unit=p.PER_SECOND,
        width=6,
    ),
    d.bargauge(
        "Symbol errors per port",
        "Symbol errors in the time shown, for the eight InfiniBand ports of the run's hosts with the most. Expected: "
        "none. At 120 an hour, replace the cable or transceiver. RoCE ports have no such counter.",
        d.Query(
            f"topk(8, sum by (host, device, port) ({per_port(SYMBOL_ERRORS)}) > 0)",
            "{{host}} {{device}}/{{port}}",
            instant=True,
        ),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (120, "red")],
        no_data="No port had symbol errors in the time shown.",
        width=6,
    ),
    d.timeseries(
        "Xid errors on the run's GPUs",
        "Number of Xid errors by code, since each host was first monitored. Expected: flat. Only a rise is a new "
        "error. docs/xid.md explains the codes.",
        d.Query(f"sum by (xid) ({m.GPU_XID_ERRORS_TOTAL} and on (uuid) {RANK_INFO})", "Xid {{xid}}"),
        unit="none",
        width=24,
        height=5,
        no_data="No Xid was counted on the GPUs of the run.",
    ),
]

BOARD = d.dashboard(
    p.RUN,
    "Training run",
    "One training run: its progress, where its time went, and its ranks, GPUs and links.",
    [p.tenant, p.run, p.price],
    {
        "At a glance": now,
        "Progress": progress,
        "Ranks": ranks,
        "GPUs of the run": gpus,
        "Data and storage": storage.PANELS,
        "Errors": errors,
    },
    [p.alert_marks(RUN), p.starts(LEDGER)],
)


def queries(
    run: str, *, tenant: str = ".*", rate_interval: str = "1m", time_range: str = "1h", price: str = "2.5"
) -> Iterator[tuple[str, str]]:
    """Yield the panel title and the PromQL of every query of the dashboard, with these values of the variables."""
    return d.queries(
        BOARD, {"run": run, "tenant": tenant, "price": price, "__rate_interval": rate_interval, "__range": time_range}
    )
