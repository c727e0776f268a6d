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
        "Share of each step that the run waits for its straggler, which is one rank or one host. Expected: 0 %. A "
        "straggler counts from 10 % on.",
        d.Query(f"{r.STRAGGLER_LOST}{{{RUN}}}"),
        unit="percentunit",
        thresholds=p.LATE,
        width=4,
    ),
    d.stat(
        "Straggler",
        "Rank with the highest straggler score in three consecutive windows of two minutes, if its score is now 10 % "
        "or more. Expected: none. Otherwise look at its GPU and host below.",
        d.Query(f"{r.CONFIRMED}{{{RUN}}}", "rank {{rank}} on {{host}}", instant=True),
        name=True,
        links=TO_NODE,
        width=5,
        no_data="No rank is a straggler now.",
    ),
    d.stat(
        "Straggling host",
        "Host whose ranks have the highest mean score in three consecutive windows of two minutes, if it is now 10 % "
        "or more. The panel is empty while a single rank stands out. Expected: none.",
        d.Query(f"{r.HOST_CANDIDATE}{{{RUN}}} >= {p.SETTINGS.straggler_warning:g}", "{{host}}", instant=True),
        name=True,
        links=TO_NODE,
        width=5,
        no_data="No host is a straggler now.",
    ),
    d.stat(
        "Cost of stragglers, one day",
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
        "Straggler score by rank",
        f"Share of each step that the others wait for a rank. Shows the {ROWS} ranks with the highest mean score in "
        "the time shown, with their pipeline (pp), data (dp) and tensor (tp) coordinates. Expected: no row that "
        "stands out for long. Rows that take turns mean unevenly divided work.",
        d.Query(latest(f"{r.RANK_SCORE}{{{RUN}}}"), MESH),
        unit="percentunit",
        top=0.3,
        links=TO_NODE,
    ),
    d.heatmap(
        "Wait by rank",
        "Share of step time that the same ranks wait in collectives. Expected: rows alike. If one rank waits less "
        "than the others, they wait for it.",
        d.Query(latest(f"{r.WAIT}{{{RUN}}}"), MESH),
        unit="percentunit",
        top=0.6,
        scheme="Blues",
        links=TO_NODE,
    ),
]

parts = [
    d.timeseries(
        "Highest straggler score",
        "Highest straggler score of all ranks. A rank's score is the share of each step that the others wait for it. "
        "Expected: below 10 %. From 20 % on it is critical.",
        d.Query(f"{r.RUN_SCORE}{{{RUN}}}", "highest score"),
        unit="percentunit",
        thresholds=p.LATE,
    ),
    d.timeseries(
        "Score by host",
        f"Mean straggler score of a host's ranks, for the {p.LINES} hosts with the highest. Expected: no outlier. An "
        "outlier points to the host, not to one of its GPUs.",
        d.Query(p.most(f"{r.HOST_SCORE}{{{RUN}}}"), "{{host}}"),
        unit="percentunit",
        links=TO_NODE,
    ),
    d.timeseries(
        "Step phases of the ranks with the highest scores",
        "Share of the wall clock in each phase of the measured steps. Shows the eight ranks with the highest mean "
        "score in the time shown. Expected: ranks alike. `forward` and `backward` depend on the GPU, `host_to_device` "
        "on its PCIe link, `garbage_collection` on Python.",
        d.Query(
            latest(f"sum by (rank, phase) (rate({m.TRAINING_PHASE_SECONDS_TOTAL}{{{RUN}}}{p.RATE}))", 8),
            "rank {{rank}} {{phase}}",
        ),
        unit="percentunit",
    ),
    d.table(
        "Ranks with the highest scores and their GPUs",
        f"The {p.LINES} ranks with the highest straggler scores now. Expected: scores below 10 %. A low clock, "
        "throttling, heat, missing PCIe lanes or an Xid explains a high score. Otherwise look at the host and its "
        "rail. `Xids` counts since the host was first monitored.",
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
        "Bytes per second that a port of each rail sends, mean of five minutes over the run's hosts. Expected: rails "
        "alike. If one rail is slower, look at its ports and its leaf switch.",
        d.Query(f"max by (rail) ({r.RAIL}{{{RUN}}})", "rail {{rail}}"),
        unit="Bps",
        width=12,
        links=[d.link("Fabric", p.FABRIC)],
    ),
    d.timeseries(
        "Signs of a hang",
        "Number of ranks that each sign points at while a step is overdue. Expected: none. docs/stragglers.md "
        "explains the signs and when a step is overdue.",
        d.Query(f"count by (sign) ({r.SIGN}{{{RUN}}})", "{{sign}}"),
        unit="none",
        width=12,
        no_data="No step is overdue, or no sign points at a rank.",
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
