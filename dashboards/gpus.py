"""GPU fleet: which of thousands of cards is hot, slow, throttled, faulty or idle, by the newest values."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

IDLE = 0.01  # of the time
WORST = f"topk({p.LINES}, "
INFO = f"max by (uuid, gpu, host, model) ({m.GPU_INFO})"
TO_GPU = [p.to_gpu(d.LABEL % "host", d.LABEL % "uuid")]
NAME = "{{host}} {{gpu}}"
ROW = {"host": "Node", "gpu": "GPU", "uuid": "UUID"}
ROW_LINKS = {"Node": [p.to_node(d.FIELD % "Node")], "UUID": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")]}


def worst(per_card: str, take: str = "topk") -> d.Query:
    """Return the LINES cards with the highest value of an expression by uuid, with the card's place."""
    return d.Query(
        f"{take}({p.LINES}, max by (uuid) ({per_card})) * on (uuid) group_left (host, gpu) topk by (uuid) (1, {INFO})",
        NAME,
        instant=True,
    )


now = [
    d.stat("GPUs that answer", "Bad: a step down that nobody planned.", d.Query(r.FLEET_GPUS), width=4),
    d.stat(
        "GPUs that are gone",
        "Known cards that do not answer. Bad: any.",
        d.Query(f"count({m.GPU_PRESENT} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat("Idle GPUs", "Cards that nobody has. Bad: many while runs are queued.", d.Query(r.FLEET_IDLE), width=4),
    d.stat(
        "Waiting for a reset",
        "Cards whose driver asks for a reset, a reboot or a drain. Bad: any.",
        d.Query(f"count({m.GPU_RECOVERY_ACTION} > 0) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Power",
        "Of all cards. Bad: a fall without a reason is work that stopped.",
        d.Query(f"sum(max by (uuid) ({m.GPU_POWER}))", instant=True),
        unit="watt",
        width=4,
    ),
    d.stat(
        "Critical Xids, one hour",
        "Cards with a critical or fatal Xid in the last hour. Bad: any.",
        d.Query(
            "count(count by (uuid) (time() - max by (uuid, xid, instance) "
            f"({m.GPU_XID_LAST}) < 3600 and on (instance, xid) {m.GPU_XID_INFO}"
            '{severity=~"critical|fatal"})) or vector(0)',
            instant=True,
        ),
        thresholds=p.ERRORS,
        width=4,
    ),
]

cards = [
    d.table(
        "Cards that need a look",
        "Gone, waiting for a reset, with uncorrected errors, rows to remap or Xids. Bad: any "
        "row; what to do is in docs/check.md. Nothing: no card needs one.",
        [
            d.Column(
                "Card",
                f"{INFO} and on (uuid) (({m.GPU_PRESENT} == 0) or ({m.GPU_RECOVERY_ACTION} > 0) or "
                f"({m.GPU_ROW_REMAP_PENDING} > 0) or ({m.GPU_ROW_REMAP_FAILURE} > 0) or "
                f'(increase({m.GPU_ECC_ERRORS}{{error="uncorrected"}}[1d]) > 0) or '
                f"(sum by (uuid) (increase({m.GPU_XID}[1d])) > 0))",
                unit=None,
            ),
            d.Column("Answers", f"min by (uuid) ({m.GPU_PRESENT} == 0)", mappings={0: ("no", "red")}),
            d.Column(
                "Driver asks for",
                f"max by (uuid) ({m.GPU_RECOVERY_ACTION} > 0)",
                mappings={
                    1: ("reset", "orange"),
                    2: ("reboot", "red"),
                    3: ("drain", "orange"),
                    4: ("drain and reset", "orange"),
                    5: ("IMEX recovery", "orange"),
                    6: ("bus reset", "orange"),
                    7: ("reboot", "red"),
                },
            ),
            d.Column(
                "Uncorrected, 1 d",
                f'max by (uuid) (increase({m.GPU_ECC_ERRORS}{{error="uncorrected"}}[1d]) > 0)',
                "none",
                p.ERRORS,
            ),
            d.Column("Rows to remap", f"max by (uuid) ({m.GPU_ROW_REMAP_PENDING} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Remap failed", f"max by (uuid) ({m.GPU_ROW_REMAP_FAILURE} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Xids, 1 d", f"sum by (uuid) (increase({m.GPU_XID}[1d])) > 0", "none", p.ERRORS),
        ],
        key="uuid",
        labels=ROW | {"model": "Model"},
        sort="Xids, 1 d",
        links=ROW_LINKS,
        no_data="No card needs one.",
    )
]

tops = [
    d.bargauge(
        "Hottest",
        f"The {p.LINES} hottest cards. Bad: one well above the rest; its own limit decides.",
        worst(str(m.GPU_TEMPERATURE)),
        unit="celsius",
        thresholds=p.HOT,
        links=TO_GPU,
        height=10,
    ),
    d.bargauge(
        "Held back",
        "Share of the last five minutes in which a clock was held back, but by its power cap. Bad: any; "
        "thermal and hardware reasons are a fan, a heat sink or a power supply. Nothing: no card was.",
        worst(f"max by (uuid, instance) (rate({m.GPU_CLOCK_EVENT_SECONDS}{{{p.HELD}}}[5m])) > 0"),
        unit="percentunit",
        thresholds=p.HELD_BACK,
        links=TO_GPU,
        height=10,
        no_data="No card was.",
    ),
    d.bargauge(
        "Slowest under load",
        "Clock of the slowest cards that work. Bad: one below the others of its model. Nothing: no card works.",
        worst(f"{m.GPU_SM_CLOCK} and on (instance, uuid) {m.GPU_UTILIZATION} > 0.5", "bottomk"),
        unit="hertz",
        links=TO_GPU,
        height=10,
        no_data="No card works.",
    ),
    d.bargauge(
        "Corrected memory errors, one day",
        "Bad: one card with thousands: rows will be remapped, or fail. Nothing: there were none.",
        worst(f'increase({m.GPU_ECC_ERRORS}{{error="corrected"}}[1d]) > 0'),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=10,
        no_data="There were none.",
    ),
    d.bargauge(
        "PCIe replays, one hour",
        "Bad: one card with many: its slot, riser or cable. Nothing: there were none.",
        worst(f"increase({m.GPU_PCIE_REPLAYS}[1h]) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=10,
        no_data="There were none.",
    ),
    d.bargauge(
        "Allocated and idle",
        "Cards that somebody has and that did nothing for half an hour, by owner. Bad: any row "
        "that is there for hours. Nothing: whoever has a card uses it.",
        d.Query(
            f"topk({p.LINES}, count by (host, owner_namespace, owner_pod, owner_job, owner_user) ("
            f'{m.GPU_OWNER_INFO}{{source!~"none|unknown"}} and on (uuid) '
            f"max_over_time({m.GPU_UTILIZATION}[30m]) < {IDLE}))",
            "{{host}} {{owner_namespace}} {{owner_pod}} {{owner_job}} {{owner_user}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        links=[p.to_node(d.LABEL % "host")],
        height=10,
        no_data="Whoever has a card uses it.",
    ),
]

kinds = [
    d.bargauge(
        "Models",
        "Cards by model. Bad: a model that does not belong here.",
        d.Query(f"sort_desc(count by (model) (max by (uuid, model) ({m.GPU_INFO})))", "{{model}}", instant=True),
        unit="none",
        width=8,
    ),
    d.bargauge(
        "Driver versions",
        "Cards by driver. Bad: one among many that differs: an upgrade that stopped half way.",
        d.Query(
            f"sort_desc(count by (driver_version) (max by (uuid, driver_version) ({m.GPU_INFO})))",
            "{{driver_version}}",
            instant=True,
        ),
        unit="none",
        width=8,
    ),
    d.bargauge(
        "Firmware versions",
        "Cards by VBIOS. Bad: a few that differ from the others of their model.",
        d.Query(
            f"topk({p.LINES}, count by (model, vbios_version) (max by (uuid, model, vbios_version) ({m.GPU_INFO})))",
            "{{model}} {{vbios_version}}",
            instant=True,
        ),
        unit="none",
        width=8,
    ),
]

BOARD = d.dashboard(
    p.GPUS,
    "GPU fleet",
    "Which of all cards is hot, slow, faulty or idle.",
    [],
    {"Now": now, "Faults": cards, "The worst": tops, "What there is": kinds},
)
