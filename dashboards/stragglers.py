"""Straggler dashboard: the rank that the others wait for, its mesh coordinates, and the state of GPU, host and rail."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

RUN = 'run="$run"'
ROWS = 24  # of the heatmaps
PLACE = f"topk by (rank) (1, max by (rank, host, pp, dp, tp) ({m.TRAINING_RANK_INFO}{{{RUN}}}))"


def latest(expr: str, most: int = ROWS) -> str:
    """Return `expr`, whose series have `rank`, for the `most` ranks that wait least in the time range of the dashboard.

    The host and the mesh coordinates of each rank are added as labels.
    """
    late = f"bottomk({most}, max by (rank) (avg_over_time({r.WAIT}{{{RUN}}}[$__range] @ end())))"
    return f"({expr} and on (rank) {late}) * on (rank) group_left (host, pp, dp, tp) {PLACE}"


NOW_LATEST = f"bottomk({p.LINES}, max by (rank) ({r.WAIT}{{{RUN}}}))"
AMONG = f"and on (rank) {NOW_LATEST}"
PORT = "instance, device, port"
# Compute ports nearest to the GPUs of the ranks that wait least, with the rank. The key of a row is rank, device, port.
NEAREST = (
    f'({m.INFINIBAND_GPU_AFFINITY_INFO}{{affinity!="SYS"}} and on ({PORT}) {m.INFINIBAND_INFO}{{role="compute"}}) '
    f"* on (uuid) group_left (rank, host) "
    f"topk by (uuid) (1, max by (rank, host, uuid) ({m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG}))"
)


def by_port(expr: str) -> str:
    """Return `expr` with the label `key`, which joins the columns of the table of ports."""
    return f'label_join({expr}, "key", " ", "rank", "device", "port")'


def of_port(expr: str, on: str = PORT) -> str:
    """Return the values of `expr`, whose series have the labels `on`, by the `key` of the ports in NEAREST."""
    return f"max by (key) ({by_port(f'{NEAREST} * on ({on}) group_left () {expr}')})"


# The share of each step that is lost, by what makes ranks wait, in words where the kind alone is not clear.
LOST = (
    f"label_replace(label_replace(max by (kind) ({m.RUN_STRAGGLER_RATIO}{{{RUN}}}), "
    '"kind", "late $1", "kind", "(rank|host|group|stage)"), "kind", "slow link", "kind", "link")'
)
MESH = "pp {{pp}} dp {{dp}} tp {{tp}} rank {{rank}}"
TO_NODE = [p.to_node(d.LABEL % "host")]

verdict = [
    d.stat(
        "Lost now",
        "Share of each step that the run waits for its late ranks. Expected: 0 %. From 10 % on it is a warning.",
        d.Query(f"{r.STRAGGLER_LOST}{{{RUN}}}"),
        unit="percentunit",
        thresholds=p.LATE,
        width=4,
    ),
    d.stat(
        "Straggler",
        "Late ranks, if they cost 10 % of each step or more. Expected: none. Otherwise look at GPU and host below.",
        d.Query(f"{r.CONFIRMED}{{{RUN}}}", "rank {{rank}} on {{host}}", instant=True),
        name=True,
        thresholds=p.LATE,
        links=TO_NODE,
        width=5,
        no_data="No rank is a straggler now.",
    ),
    d.stat(
        "Why ranks wait",
        "What makes ranks wait. Late ranks, a host, or a link or stage of the pipeline are where to look. With "
        "`imbalance`, ranks are late in turn. With `communication`, all wait longer than usual. Expected: nothing.",
        d.Query(
            f"topk(1, {LOST} > 0) or label_replace(max by (reason) "
            f'({m.RUN_STRAGGLER_UNAVAILABLE}{{{RUN}}}), "kind", "unknown ($1)", "reason", "(.*)")',
            "{{kind}}",
            instant=True,
        ),
        name=True,
        width=5,
        no_data="Nothing makes ranks wait longer than usual.",
    ),
    d.stat(
        "Cost, one day",
        "Cost in US dollars of the last day's GPU time that the run waited for a straggler, at the price per GPU-hour "
        "above. Expected: near $0. Compare it with the cost of a repair.",
        d.Query(
            f"sum(max by (tenant, run) (increase({m.RUN_STRAGGLER_GPU_SECONDS_TOTAL}{{{RUN}}}[1d]))) * $price / 3600",
            instant=True,
        ),
        unit="currencyUSD",
        width=5,
        no_data="The ledger has no straggler time of the run.",
    ),
    d.stat(
        "Wait share",
        "Share of step time in the last two minutes that ranks wait in collectives, mean over all ranks of the run. "
        "Empty unless every rank is measured. Expected: steady. If it rises without a straggler, look at the fabric.",
        d.Query(f"{r.COMMUNICATION}{{{RUN}}}"),
        unit="percentunit",
        links=[d.link("Fabric", p.FABRIC)],
        width=5,
    ),
]

ranks = [
    d.heatmap(
        "Lateness by rank",
        "Share of step time that a rank waits less in collectives than the median rank of its pipeline stage. Shows "
        f"the {ROWS} ranks that wait least in the time shown, with their pipeline (pp), data (dp) and tensor (tp) "
        "coordinates. Expected: no color. The others wait for a rank with a red row. Rows that take turns mean "
        "unevenly divided work.",
        d.Query(
            latest(
                f"clamp_min(quantile by (run, pp) (0.5, {r.WAIT}{{{RUN}}}) "
                f"- on (run, pp) group_right () {r.WAIT}{{{RUN}}}, 0)"
            ),
            MESH,
        ),
        unit="percentunit",
        top=0.3,
        links=TO_NODE,
    )
]

parts = [
    d.timeseries(
        "Lost share by reason",
        "Share of each step that the run loses, by what makes ranks wait. Expected: 0 %. `imbalance` and "
        "`communication` are no rank's fault.",
        d.Query(f"{LOST} > 0", "{{kind}}"),
        unit="percentunit",
        thresholds=p.LATE,
        no_data="The run loses no share of its steps, or its waits are not measured.",
    ),
    d.timeseries(
        "Step without the late ranks",
        "Seconds that a step would take if so many of the late ranks were as fast as their peers. `0 mended` is now. "
        "Compare the gain with the cost of a repair. Expected: empty, because no rank is late.",
        d.Query(f"max by (mended) ({m.RUN_WHATIF_STEP_SECONDS}{{{RUN}}})", "{{mended}} mended"),
        unit="s",
        no_data="Unknown for a run with a pipeline. Otherwise no rank is late.",
    ),
    d.timeseries(
        "Wait by host",
        "Share of step time that a host's ranks wait, mean over its ranks. Shows the three lowest hosts, the median, "
        "and a band with 90 % of all. Expected: no outlier. An outlier points to the host, not to one of its GPUs.",
        *p.outliers(
            f"avg by (host) ({r.WAIT}{{{RUN}}} * on (rank) group_left (host) "
            f"topk by (rank) (1, max by (rank, host) ({m.TRAINING_RANK_INFO}{{{RUN}}})))",
            "{{host}}",
            "bottomk",
        ),
        unit="percentunit",
        band=p.BAND,
        links=TO_NODE,
    ),
    d.timeseries(
        "Step phases of the ranks that wait least",
        "Share of the wall clock in each phase of the measured steps. Shows the three ranks that wait least in the "
        "time shown. Expected: ranks alike. `forward` and `backward` depend on the GPU, `host_to_device` "
        "on its PCIe link, `garbage_collection` on Python.",
        d.Query(
            latest(f"sum by (rank, phase) (rate({m.TRAINING_PHASE_SECONDS_TOTAL}{{{RUN}}}{p.RATE}))", 3),
            "rank {{rank}} {{phase}}",
        ),
        unit="percentunit",
        width=d.COLUMNS,
    ),
    d.table(
        "Ranks that wait least and their GPUs",
        f"The {p.LINES} ranks that wait least now. The others wait for a late rank. Expected: no stragglers. A "
        "low clock, throttling, heat, missing PCIe lanes or an Xid of its GPU explains one. Otherwise look at the host "
        "and its rail. `Xids` counts since the host was first monitored.",
        [
            d.Column(
                "Place", f"max by (rank, host, uuid, dp, tp, pp) ({m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG})", unit=None
            ),
            d.Column(
                "Index",
                f"max by (rank, gpu) (max by (rank, uuid) ({m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG}) "
                f"* on (uuid) group_left (gpu) topk by (uuid) (1, max by (uuid, gpu) ({m.GPU_INFO})))",
                unit=None,
            ),
            d.Column("Wait", NOW_LATEST, "percentunit"),
            d.Column("Straggler", f"max by (rank) ({r.CONFIRMED}{{{RUN}}} {AMONG})", "percentunit", p.LATE),
            *(
                d.Column(
                    name,
                    f"max by (rank) (max by (rank, uuid) ({m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG}) "
                    f"* on (uuid) group_left () max by (uuid) ({expr}))",
                    unit,
                    thresholds,
                )
                for name, expr, unit, thresholds in (
                    ("SM clock", str(m.GPU_SM_CLOCK_HERTZ), "hertz", ()),
                    ("Throttled", p.throttled("uuid"), "percentunit", p.HELD_BACK),
                    ("Temperature", str(m.GPU_TEMPERATURE_CELSIUS), "celsius", p.HOT),
                    ("PCIe lanes", str(m.GPU_PCIE_WIDTH_LANES), "none", ()),
                    ("Xids", f"sum by (uuid, instance) ({m.GPU_XID_ERRORS_TOTAL})", "none", p.ERRORS),
                )
            ),
        ],
        key="rank",
        labels={"rank": "Rank", "host": "Node", "gpu": "GPU", "uuid": "UUID", "pp": "PP", "dp": "DP", "tp": "TP"},
        sort="Wait",
        ascending=True,
        links={
            "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
            "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")],
        },
        hidden=["UUID"],
    ),
    d.table(
        "Ports nearest to these GPUs",
        "Compute ports that the PCI path places nearest to the GPUs of these ranks, with errors in the time shown. "
        "Expected: active ports, rates alike, and no errors. NCCL may use another port, for instance if "
        "`NCCL_IB_HCA` is set.",
        [
            d.Column("Place", by_port(f"max by (rank, host, gpu, device, port, affinity) ({NEAREST})"), unit=None),
            d.Column("Wait", of_port(NOW_LATEST, "rank"), "percentunit"),
            d.Column("State", of_port(f"max by ({PORT}) ({m.INFINIBAND_PORT_STATE_ID})"), mappings=p.PORT_STATES),
            *(
                d.Column(name, of_port(f"max by ({PORT}) ({expr})"), unit, thresholds)
                for name, expr, unit, thresholds in (
                    ("Rate", str(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND), "Bps", ()),
                    ("Sent", f"rate({m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL}[5m])", "Bps", ()),
                    ("Symbol errors", f"increase({m.INFINIBAND_SYMBOL_ERRORS_TOTAL}[$__range])", "none", p.ERRORS),
                    ("Link downs", f"increase({m.INFINIBAND_LINK_DOWNED_TOTAL}[$__range])", "none", p.FEW),
                )
            ),
        ],
        key="key",
        labels={
            "rank": "Rank",
            "host": "Node",
            "gpu": "GPU",
            "device": "Device",
            "port": "Port",
            "affinity": "PCI path",
            "key": "Key",
        },
        sort="Wait",
        ascending=True,
        links={"Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")]},
        hidden=["Key"],
        height=8,
        no_data="No port is near these GPUs, or their hosts have no InfiniBand, RoCE or EFA port.",
    ),
    d.table(
        "CPUs of the hosts of these ranks",
        "State of the CPUs of these hosts in the last five minutes, from their `node_exporter`. Tasks that wait for a "
        "CPU, steal or a low clock on one host only can explain a straggler. Expected: hosts alike, no steal, and no "
        "throttling in the time shown.",
        [
            d.Column(
                name,
                f"max by (host) ({p.of_node_exporter(expr, f'{m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG}')})",
                unit,
                thresholds,
            )
            for name, expr, unit, thresholds in (
                (
                    "Tasks that wait",
                    "max by (instance) (rate(node_pressure_cpu_waiting_seconds_total[5m]))",
                    "percentunit",
                    [(None, "green"), (0.3, "orange")],
                ),
                ("Load", "max by (instance) (node_load1)", "none", ()),
                (
                    "Steal, CPUs 0-7",
                    'avg by (instance) (rate(node_cpu_seconds_total{mode="steal",cpu=~"[0-7]"}[5m]))',
                    "percentunit",
                    [(None, "green"), (0.01, "orange")],
                ),
                ("Clock, CPUs 0-7", 'avg by (instance) (node_cpu_scaling_frequency_hertz{cpu=~"[0-7]"})', "hertz", ()),
                (
                    "Throttled",
                    "sum by (instance) (increase(node_cpu_package_throttles_total[$__range]))",
                    "none",
                    p.FEW,
                ),
            )
        ],
        key="host",
        labels={"host": "Node"},
        sort="Tasks that wait",
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        height=8,
        no_data="No node_exporter of these hosts is scraped, or its nodename is another one (docs/other-exporters.md).",
    ),
    d.timeseries(
        "Traffic by rail",
        "Bytes per second that a port of each rail sends, mean of five minutes over the run's hosts. Expected: rails "
        "alike. If one rail is slower, look at its ports and its leaf switch.",
        d.Query(f"max by (rail) ({r.RAIL}{{{RUN}}})", "rail {{rail}}"),
        unit="Bps",
        width=12,
        links=[d.link("Fabric", p.FABRIC)],
    ),
    d.timeseries(
        "Signs of a hang",
        "Number of ranks that each sign points at while the run hangs. Expected: none. docs/hangs.md explains the "
        "signs and when a run hangs.",
        d.Query(f"max by (sign) ({m.RUN_HANG_SIGN_RANKS}{{{RUN}}})", "{{sign}}"),
        unit="none",
        width=12,
        no_data="The run does not hang, or no sign points at a rank.",
    ),
]

BOARD = d.dashboard(
    p.STRAGGLERS,
    "Stragglers",
    "The rank that the others wait for, and possible reasons.",
    [p.run, p.price],
    {"Verdict": verdict, "Ranks": ranks, "Possible reasons": parts},
    [p.alert_marks('run="$run"')],
)
