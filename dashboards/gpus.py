"""GPU fleet dashboard: which of thousands of GPUs is hot, slow, throttled, faulty or idle, by the newest values."""

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
    """Return a query for the LINES GPUs with the highest (`bottomk`: lowest) value of `per_card`.

    The series of `per_card` have `uuid`. Host and index of each GPU are added as labels.
    """
    return d.Query(
        f"{take}({p.LINES}, max by (uuid) ({per_card})) * on (uuid) group_left (host, gpu) topk by (uuid) (1, {INFO})",
        NAME,
        instant=True,
    )


now = [
    d.stat("GPUs that answer", "GPUs that answer. Expected: no unplanned step down.", d.Query(r.FLEET_GPUS), width=4),
    d.stat(
        "Missing GPUs",
        "Known GPUs that do not answer. Expected: 0.",
        d.Query(f"count({m.GPU_PRESENT} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat("Idle GPUs", "GPUs without an owner. Expected: few while runs are queued.", d.Query(r.FLEET_IDLE), width=4),
    d.stat(
        "Recovery needed",
        "GPUs whose driver asks for a reset, a reboot or a drain. Expected: 0.",
        d.Query(f"count({m.GPU_RECOVERY_ACTION_ID} > 0) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Power",
        "Power of all GPUs. Expected: no unexplained fall, which is work that stopped.",
        d.Query(f"sum(max by (uuid) ({m.GPU_POWER_WATTS}))", instant=True),
        unit="watt",
        width=4,
    ),
    d.stat(
        "Critical Xids, one hour",
        "GPUs with a critical or fatal Xid in the last hour. Expected: 0.",
        d.Query(
            "count(count by (uuid) (time() - max by (uuid, xid, instance) "
            f"({m.GPU_XID_LAST_TIMESTAMP_SECONDS}) < 3600 and on (instance, xid) {m.GPU_XID_INFO}"
            '{severity=~"critical|fatal"})) or vector(0)',
            instant=True,
        ),
        thresholds=p.ERRORS,
        width=4,
    ),
]

cards = [
    d.table(
        "GPUs that need attention",
        "GPUs that are missing or need recovery, or had uncorrected errors, rows to remap or Xids. Expected: no row. "
        "What to do: docs/check.md.",
        [
            d.Column(
                "Card",
                f"{INFO} and on (uuid) (({m.GPU_PRESENT} == 0) or ({m.GPU_RECOVERY_ACTION_ID} > 0) or "
                f"({m.GPU_ROW_REMAP_PENDING} > 0) or ({m.GPU_ROW_REMAP_FAILURE} > 0) or "
                f'(increase({m.GPU_ECC_ERRORS_TOTAL}{{error="uncorrected"}}[1d]) > 0) or '
                f"(sum by (uuid) (increase({m.GPU_XID_ERRORS_TOTAL}[1d])) > 0))",
                unit=None,
            ),
            d.Column("Answers", f"min by (uuid) ({m.GPU_PRESENT} == 0)", mappings={0: ("no", "red")}),
            d.Column(
                "Recovery action",
                f"max by (uuid) ({m.GPU_RECOVERY_ACTION_ID} > 0)",
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
                f'max by (uuid) (increase({m.GPU_ECC_ERRORS_TOTAL}{{error="uncorrected"}}[1d]) > 0)',
                "none",
                p.ERRORS,
            ),
            d.Column("Rows to remap", f"max by (uuid) ({m.GPU_ROW_REMAP_PENDING} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Remap failed", f"max by (uuid) ({m.GPU_ROW_REMAP_FAILURE} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Xids, 1 d", f"sum by (uuid) (increase({m.GPU_XID_ERRORS_TOTAL}[1d])) > 0", "none", p.ERRORS),
        ],
        key="uuid",
        labels=ROW | {"model": "Model"},
        sort="Xids, 1 d",
        links=ROW_LINKS,
        no_data="No GPU needs attention.",
    )
]

tops = [
    d.bargauge(
        "Hottest",
        f"Temperature of the {p.LINES} hottest GPUs. Expected: no outlier. Each GPU has its own limit.",
        worst(str(m.GPU_TEMPERATURE_CELSIUS)),
        unit="celsius",
        thresholds=p.HOT,
        links=TO_GPU,
        height=10,
    ),
    d.bargauge(
        "Throttled",
        "Share of the last five minutes in which the clock was throttled by anything but a power cap, for the "
        f"{p.LINES} worst GPUs. Expected: none. Thermal and hardware reasons point to a fan, a heat sink or a power "
        "supply.",
        worst(f"max by (uuid, instance) (rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{{{p.HELD}}}[5m])) > 0"),
        unit="percentunit",
        thresholds=p.HELD_BACK,
        links=TO_GPU,
        height=10,
        no_data="No GPU was throttled.",
    ),
    d.bargauge(
        "Slowest under load",
        f"SM clock of the {p.LINES} slowest busy GPUs. Expected: no outlier of its model.",
        worst(f"{m.GPU_SM_CLOCK_HERTZ} and on (instance, uuid) {m.GPU_UTILIZATION_RATIO} > 0.5", "bottomk"),
        unit="hertz",
        links=TO_GPU,
        height=10,
        no_data="No GPU is busy.",
    ),
    d.bargauge(
        "Corrected memory errors, one day",
        f"Corrected memory errors of the {p.LINES} worst GPUs. Expected: few. Thousands lead to remapped rows or "
        "failure.",
        worst(f'increase({m.GPU_ECC_ERRORS_TOTAL}{{error="corrected"}}[1d]) > 0'),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=10,
        no_data="No corrected memory errors.",
    ),
    d.bargauge(
        "PCIe replays, one hour",
        f"PCIe replays of the {p.LINES} worst GPUs. Expected: few. Otherwise check slot, riser or cable.",
        worst(f"increase({m.GPU_PCIE_REPLAYS_TOTAL}[1h]) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=10,
        no_data="No PCIe replays.",
    ),
    d.bargauge(
        "Allocated and idle",
        "GPUs with an owner that were idle for half an hour, by owner. Expected: no row that lasts for hours.",
        d.Query(
            f"topk({p.LINES}, count by (host, owner_namespace, owner_pod, owner_job, owner_user) ("
            f'{m.GPU_OWNER_INFO}{{source!~"none|unknown"}} and on (uuid) '
            f"max_over_time({m.GPU_UTILIZATION_RATIO}[30m]) < {IDLE}))",
            "{{host}} {{owner_namespace}} {{owner_pod}} {{owner_job}} {{owner_user}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        links=[p.to_node(d.LABEL % "host")],
        height=10,
        no_data="All allocated GPUs are in use.",
    ),
]

kinds = [
    d.bargauge(
        "Models",
        "GPUs by model. Expected: only models that belong here.",
        d.Query(f"sort_desc(count by (model) (max by (uuid, model) ({m.GPU_INFO})))", "{{model}}", instant=True),
        unit="none",
        width=8,
    ),
    d.bargauge(
        "Driver versions",
        "GPUs by driver version. Expected: one version. Several are an upgrade that stopped half way.",
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
        "GPUs by model and VBIOS version. Expected: one version per model.",
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
