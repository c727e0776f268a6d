"""GPU fleet dashboard: which of thousands of GPUs is hot, slow, throttled, faulty or idle, by the newest values."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

IDLE = 0.01  # of the time
RANKED = 10  # GPUs, as many as a panel has room for


def chosen(cards: str, variable: str, of_choice: str) -> str:
    """Return `cards`, only those of `of_choice` unless the variable is All. GPUs without a run or rack are in All."""
    every = f'label_replace(vector(1), "any", "x", "none", "${variable}")'
    is_all = f'({every} and on (any) label_replace(vector(1), "any", "x", "", ""))'
    return f"({cards} and {of_choice} or {cards} and on () {is_all})"


INFO = chosen(
    chosen(
        f'max by (uuid, gpu, host, model) ({m.GPU_INFO}{{model=~"$model"}})',
        "rack",
        f'on (host) {m.HOST_TOPOLOGY_INFO}{{rack=~"$rack"}}',
    ),
    "run",
    f'on (uuid) {m.TRAINING_RANK_INFO}{{run=~"$run"}}',
)
TO_GPU = [p.to_gpu(d.LABEL % "host", d.LABEL % "uuid")]
NAME = "{{host}} {{gpu}}"
FINDINGS = findings.on_gpus()
OWNED = f'{m.GPU_OWNER_INFO}{{source!~"none|unknown"}}'
# Idle as in the alert GpuIdleAllocated.
UNUSED = (
    f"(max by (uuid) (rate({m.GPU_SM_ACTIVE_SECONDS_TOTAL}[30m])) / max by (uuid) "
    f"(rate({m.GPU_PROFILED_SECONDS_TOTAL}[30m])) < {IDLE} or on (uuid) "
    f"max by (uuid) (max_over_time({m.GPU_UTILIZATION_RATIO}[30m])) < {IDLE})"
)
ROW = {"host": "Node", "gpu": "GPU", "uuid": "UUID"}
ROW_LINKS = {"Node": [p.to_node(d.FIELD % "Node")], "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")]}


def worst(per_card: str, take: str = "topk") -> d.Query:
    """Return a query for the LINES GPUs with the highest (`bottomk`: lowest) value of `per_card`.

    The series of `per_card` have `uuid`. Host and index of each GPU are added as labels.
    """
    return d.Query(
        f"{take}({RANKED}, max by (uuid) ({per_card})) * on (uuid) group_left (host, gpu) topk by (uuid) (1, {INFO})",
        NAME,
        instant=True,
    )


now = [
    d.stat(
        "GPUs that answer",
        "Number of GPUs that answer. Expected: constant. An unplanned fall means lost GPUs or hosts.",
        d.Query(r.FLEET_GPUS),
        width=4,
    ),
    d.stat(
        "Missing GPUs",
        "GPUs in the inventory of a host that do not answer. Expected: 0. The table of faults lists them.",
        d.Query(f"count({m.GPU_PRESENT} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Unallocated GPUs",
        "GPUs that answer and that no rank, pod, job or user has. Expected: few while runs are queued.",
        d.Query(r.FLEET_IDLE),
        width=4,
    ),
    d.stat(
        "Recovery needed",
        "GPUs whose driver requests an action, such as a reset, a reboot or a drain. Expected: 0. The table of faults "
        "lists them.",
        d.Query(f"count({m.GPU_RECOVERY_ACTION_ID} > 0) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Power",
        "Power of all GPUs in total. Expected: steady. An unexplained fall means that work stopped.",
        d.Query(f"sum(max by (uuid) ({m.GPU_POWER_WATTS}))", instant=True),
        unit="watt",
        width=4,
    ),
    d.stat(
        "Critical Xids, one hour",
        "Number of GPUs with a critical or fatal Xid in the last hour. Expected: 0. docs/xid.md has the action for "
        "each code.",
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
        "GPUs with a firing alert, or with a reason in the verdict on their host. The table also lists GPUs with "
        "uncorrected memory errors or Xids in the last day. Expected: an empty table. The dashboard of a GPU has its "
        "alerts and reasons.",
        [
            d.Column(
                "Card",
                f"{INFO} and on (uuid) ({FINDINGS} or "
                f'(increase({m.GPU_ECC_ERRORS_TOTAL}{{error="uncorrected"}}[1d]) > 0) or '
                f"(sum by (uuid) (increase({m.GPU_XID_ERRORS_TOTAL}[1d])) > 0))",
                unit=None,
            ),
            d.Column("Health", f"max by (uuid) ({FINDINGS})", mappings=findings.HEALTH),
            d.Column(
                "Finding",
                f"max by (uuid, finding) (topk by (uuid) (1, "
                f'label_join({FINDINGS}, "finding", "", "alertname", "reason")))',
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
            d.Column("Remap pending", f"max by (uuid) ({m.GPU_ROW_REMAP_PENDING} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Remap failed", f"max by (uuid) ({m.GPU_ROW_REMAP_FAILURE} > 0)", mappings=p.ONE_IS_BAD),
            d.Column("Xids, 1 d", f"sum by (uuid) (increase({m.GPU_XID_ERRORS_TOTAL}[1d])) > 0", "none", p.ERRORS),
        ],
        key="uuid",
        labels=ROW | {"model": "Model", "finding": "Finding"},
        sort="Xids, 1 d",
        links=ROW_LINKS,
        hidden=["UUID"],
        height=8,
        no_data="No GPU needs attention.",
    )
]

tops = [
    d.bargauge(
        "Hottest GPUs",
        f"Newest temperature of the {RANKED} hottest GPUs. Expected: no outlier. Each GPU model has its own limit.",
        worst(str(m.GPU_TEMPERATURE_CELSIUS)),
        unit="celsius",
        thresholds=p.HOT,
        links=TO_GPU,
        height=8,
    ),
    d.bargauge(
        "Most throttled GPUs",
        f"Share of the last five minutes in which the clock was throttled, for the {RANKED} GPUs with most. A power "
        "cap (sw_power_cap) does not count. Expected: none. Thermal and hardware reasons point to a fan, a heat sink "
        "or a power supply.",
        worst(f"{p.throttled('uuid')} > 0"),
        unit="percentunit",
        thresholds=p.HELD_BACK,
        links=TO_GPU,
        height=8,
        no_data="No GPU was throttled in the last five minutes.",
    ),
    d.bargauge(
        "Lowest SM clocks under load",
        f"SM clock of the {RANKED} GPUs with the lowest clocks, of those with a utilisation above 50 %. Expected: "
        "GPUs of the same model alike.",
        worst(f"{m.GPU_SM_CLOCK_HERTZ} and on (instance, uuid) {m.GPU_UTILIZATION_RATIO} > 0.5", "bottomk"),
        unit="hertz",
        links=TO_GPU,
        height=8,
        no_data="No GPU has a utilisation above 50 %.",
    ),
    d.bargauge(
        "Corrected memory errors, one day",
        f"Corrected memory errors in the last day, for the {RANKED} GPUs with most. Expected: few. Thousands can "
        "lead to remapped rows or failure.",
        worst(f'increase({m.GPU_ECC_ERRORS_TOTAL}{{error="corrected"}}[1d]) > 0'),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=8,
        no_data="No corrected memory errors in the last day.",
    ),
    d.bargauge(
        "PCIe replays, one hour",
        f"PCIe packets retransmitted in the last hour, for the {RANKED} GPUs with most. Expected: few. Otherwise "
        "check slot, riser or cable.",
        worst(f"increase({m.GPU_PCIE_REPLAYS_TOTAL}[1h]) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_GPU,
        height=8,
        no_data="No PCIe replays in the last hour.",
    ),
    d.bargauge(
        "Allocated but unused GPUs",
        "Number of allocated GPUs whose SMs were active for less than 1 % of the last half an hour. They are counted "
        "by host and owner, or by run if no owner is known. Expected: none that last for hours. Ask the owner, or "
        "cancel the job.",
        d.Query(
            f"topk({RANKED}, count by (host, owner_namespace, owner_pod, owner_job, owner_user) ({OWNED} "
            f"and on (uuid) {UNUSED}) or count by (host, run) (group by (host, run, uuid) ({m.TRAINING_RANK_INFO}) "
            f"and on (uuid) {UNUSED} unless on (uuid) {OWNED}))",
            "{{host}} {{owner_namespace}} {{owner_pod}} {{owner_job}} {{owner_user}} {{run}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        links=[p.to_node(d.LABEL % "host")],
        height=8,
        no_data="No allocated GPU was unused in the last half an hour.",
    ),
]

BUSY = {"below 10 %": (0, 0.1), "10 to 50 %": (0.1, 0.5), "50 to 90 %": (0.5, 0.9), "90 % or more": (0.9, 9)}


def spread(title: str, text: str, per_card: str) -> d.Json:
    """Return a panel with the number of chosen GPUs in each range of BUSY of `per_card`."""
    of_chosen = f"(max by (uuid) ({per_card}) and on (uuid) {INFO})"
    return d.bargauge(
        title,
        text,
        *(d.Query(f"count({of_chosen} >= {low} < {high})", name, instant=True) for name, (low, high) in BUSY.items()),
        unit="none",
        height=6,
        no_data="No chosen GPU reports it.",
    )


activity = [
    spread(
        "GPUs by utilisation",
        "Number of GPUs by the share of time in which a kernel ran. Expected: GPUs of runs at 90 % or more.",
        str(m.GPU_UTILIZATION_RATIO),
    ),
    spread(
        "GPUs by tensor activity",
        "Number of GPUs by the share of the last five minutes in which tensor cores worked. Expected: 10 to 50 % in "
        "training, near the MFU of the run.",
        f"rate({m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL}[5m])",
    ),
    spread(
        "GPUs by memory in use",
        "Number of GPUs by the share of their memory in use. Expected: 50 % or more on GPUs of runs.",
        f"{m.GPU_MEMORY_USED_BYTES} / {m.GPU_MEMORY_TOTAL_BYTES}",
    ),
]

kinds = [
    d.bargauge(
        "GPU models",
        "Number of GPUs by model. Expected: only models that belong to the cluster.",
        d.Query(f"sort_desc(count by (model) (max by (uuid, model) ({m.GPU_INFO})))", "{{model}}", instant=True),
        unit="none",
        width=8,
        height=5,
    ),
    d.bargauge(
        "Driver versions",
        "Number of GPUs by driver version. Expected: one version. Several mean an upgrade that is not finished.",
        d.Query(
            f"sort_desc(count by (driver_version) (max by (uuid, driver_version) ({m.GPU_INFO})))",
            "{{driver_version}}",
            instant=True,
        ),
        unit="none",
        width=8,
        height=5,
    ),
    d.bargauge(
        "VBIOS versions",
        "Number of GPUs by VBIOS version. Expected: one version per model.",
        d.Query(
            f"topk({RANKED}, count by (vbios_version) (max by (uuid, vbios_version) ({m.GPU_INFO})))",
            "{{vbios_version}}",
            instant=True,
        ),
        unit="none",
        width=8,
        height=5,
    ),
]

BOARD = d.dashboard(
    p.GPUS,
    "GPU fleet",
    "Which of all GPUs are hot, slow, faulty or unused.",
    [
        d.variable("model", "Model", f"label_values({m.GPU_INFO}, model)", everything=True),
        d.variable("rack", "Rack", f"label_values({m.HOST_TOPOLOGY_INFO}, rack)", everything=True),
        d.variable("run", "Run", f"label_values({m.TRAINING_RANK_INFO}, run)", everything=True),
    ],
    {
        "Now": now,
        "Faults": cards,
        "Activity of the chosen GPUs": activity,
        "Worst GPUs": tops,
        "Models and versions": kinds,
    },
    [p.alert_marks('uuid!=""')],
)
