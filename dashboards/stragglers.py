"""Straggler dashboard: the rank that the others wait for, its mesh coordinates, and the state of GPU, host and rail."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

RUN = 'run="$run"'
ROWS = 48  # of the heatmaps
PLACE = f"topk by (rank) (1, max by (rank, host, pp, dp, tp) ({m.TRAINING_RANK_INFO}{{{RUN}}}))"


def latest(expr: str, most: int = ROWS) -> str:
    """Return `expr`, whose series have `rank`, for the `most` ranks with the highest mean straggler score.

    The mean is over the time range of the dashboard. The host and the mesh coordinates of each rank are added as
    labels.
    """
    late = f"topk({most}, max by (rank) (avg_over_time({r.RANK_SCORE}{{{RUN}}}[$__range] @ end())))"
    return f"({expr} and on (rank) {late}) * on (rank) group_left (host, pp, dp, tp) {PLACE}"


NOW_LATEST = f"topk({p.LINES}, max by (rank) ({r.RANK_SCORE}{{{RUN}}}))"
AMONG = f"and on (rank) {NOW_LATEST}"
MESH = "pp {{pp}} dp {{dp}} tp {{tp}} rank {{rank}}"
TO_NODE = [p.to_node(d.LABEL % "host")]

verdict = [
    d.stat(
        "Lost to stragglers",
        "Share of every step that one late rank or host costs. Expected: below 10 %.",
        d.Query(f"{r.STRAGGLER_LOST}{{{RUN}}}"),
        unit="percentunit",
        thresholds=p.LATE,
        width=4,
    ),
    d.stat(
        "Straggler",
        "The rank that was latest in three windows of two minutes in a row, by 10 % of a step. Expected: none.",
        d.Query(f"{r.CONFIRMED}{{{RUN}}}", "rank {{rank}} on {{host}}", instant=True),
        name=True,
        links=TO_NODE,
        width=5,
        no_data="No rank is a straggler.",
    ),
    d.stat(
        "Straggling host",
        "The host whose ranks are late together, by the same rule. Expected: none.",
        d.Query(f"{r.HOST_CANDIDATE}{{{RUN}}} >= {p.SETTINGS.straggler_warning:g}", "{{host}}", instant=True),
        name=True,
        links=TO_NODE,
        width=5,
        no_data="No host is a straggler.",
    ),
    d.stat(
        "Lost in a day",
        "Cost of the GPU time that the run waited for a straggler in the last day. Expected: less than a visit to "
        "the rack.",
        d.Query(
            f"sum(max by (tenant, run) (increase({m.RUN_STRAGGLER_GPU_SECONDS_TOTAL}{{{RUN}}}[1d]))) * $price / 3600",
            instant=True,
        ),
        unit="currencyUSD",
        width=5,
        no_data="The ledger has no such time.",
    ),
    d.stat(
        "Wait share",
        "Share of step time that ranks wait in collectives, mean over all ranks. Expected: steady. If it rises "
        "without a straggler, look at the fabric.",
        d.Query(f"{r.COMMUNICATION}{{{RUN}}}"),
        unit="percentunit",
        links=[d.link("Fabric", p.FABRIC)],
        width=5,
    ),
]

ranks = [
    d.heatmap(
        "Score by rank",
        f"Straggler score of the {ROWS} ranks that were latest in the time shown, by place in the mesh. Expected: no "
        "row that stands out and stays. Rows that take turns are an imbalance.",
        d.Query(latest(f"{r.RANK_SCORE}{{{RUN}}}"), MESH),
        unit="percentunit",
        top=0.3,
        links=TO_NODE,
    ),
    d.heatmap(
        "Wait by rank",
        "Share of step time that the same ranks wait for others. Expected: rows alike. A row that waits less is the "
        "one that the others wait for.",
        d.Query(latest(f"{r.WAIT}{{{RUN}}}"), MESH),
        unit="percentunit",
        top=0.6,
        scheme="Blues",
        links=TO_NODE,
    ),
]

parts = [
    d.timeseries(
        "Score of the latest rank",
        "Straggler score of the latest rank. Expected: below 10 %; 20 % is critical.",
        d.Query(f"{r.RUN_SCORE}{{{RUN}}}", "latest rank"),
        unit="percentunit",
        thresholds=p.LATE,
    ),
    d.timeseries(
        "Score by host",
        f"Mean score of a host's ranks, for the {p.LINES} latest hosts. Expected: no outlier.",
        d.Query(p.most(f"{r.HOST_SCORE}{{{RUN}}}"), "{{host}}"),
        unit="percentunit",
        links=TO_NODE,
    ),
    d.timeseries(
        "Step phases of the latest ranks",
        "Share of time of the eight latest ranks in each phase of measured steps. Expected: ranks alike. Forward and "
        "backward depend on the GPU, host_to_device on its PCIe link, garbage_collection on Python.",
        d.Query(
            latest(f"sum by (rank, phase) (rate({m.TRAINING_PHASE_SECONDS_TOTAL}{{{RUN}}}{p.RATE}))", 8),
            "rank {{rank}} {{phase}}",
        ),
        unit="percentunit",
    ),
    d.table(
        "The latest ranks and their GPUs",
        f"One row for each of the {p.LINES} latest ranks. Expected: low scores. A low clock, throttling, heat, lost "
        "PCIe lanes or an Xid explains a high one; otherwise look at the host and its rail.",
        [
            d.Column("Score", NOW_LATEST, "percentunit", p.LATE),
            d.Column(
                "Place", f"max by (rank, host, uuid, dp, tp, pp) ({m.TRAINING_RANK_INFO}{{{RUN}}} {AMONG})", unit=None
            ),
            d.Column("Wait", f"max by (rank) ({r.WAIT}{{{RUN}}} {AMONG})", "percentunit"),
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
                    (
                        "Throttled",
                        f"max by (uuid, instance) (rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{{{p.HELD}}}[5m]))",
                        "percentunit",
                        p.HELD_BACK,
                    ),
                    ("Temperature", str(m.GPU_TEMPERATURE_CELSIUS), "celsius", p.HOT),
                    ("PCIe lanes", str(m.GPU_PCIE_WIDTH_LANES), "none", ()),
                    ("Xids", f"sum by (uuid, instance) ({m.GPU_XID_ERRORS_TOTAL})", "none", p.ERRORS),
                )
            ),
        ],
        key="rank",
        labels={"rank": "Rank", "host": "Node", "uuid": "GPU", "pp": "PP", "dp": "DP", "tp": "TP"},
        sort="Score",
        links={
            "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
            "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "GPU")],
        },
    ),
    d.timeseries(
        "Traffic by rail",
        "Bytes per second that a port of each rail sends, mean over the run's hosts. Expected: rails alike. On a "
        "slow rail all ranks wait for its ports and leaf.",
        d.Query(f"max by (rail) ({r.RAIL}{{{RUN}}})", "rail {{rail}}"),
        unit="Bps",
        width=12,
        links=[d.link("Fabric", p.FABRIC)],
    ),
    d.timeseries(
        "Signs of a hang",
        "Ranks that each sign points at while a step is overdue. Expected: none.",
        d.Query(f"count by (sign) ({r.SIGN}{{{RUN}}})", "{{sign}}"),
        unit="none",
        width=12,
        no_data="No step is overdue.",
    ),
]

BOARD = d.dashboard(
    p.STRAGGLERS,
    "Stragglers",
    "For which rank the others wait, and why.",
    [p.run, p.price],
    {"Verdict": verdict, "Ranks": ranks, "Why": parts},
    [p.alert_marks('run="$run"')],
)
