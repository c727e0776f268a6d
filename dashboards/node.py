"""Node dashboard: one host, its verdict, its GPUs and ports side by side, and its ranks."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

NODE = 'host="$host"'
HERE = f"{r.HOST}{{{NODE}}}"
FINDINGS = findings.on_hosts(NODE, HERE)


def here(expr: str) -> str:
    """Return `expr`, whose series have `instance`, for the exporter of the chosen host only."""
    return f"({expr} and on (instance) {HERE})"


def card(expr: str) -> str:
    """Return `expr` for the chosen host, with one series per GPU."""
    return f"max by (gpu) {here(expr)}"


def port(expr: str) -> str:
    """Return `expr` for the chosen host, with one series per port."""
    return f"max by (device, port) {here(expr)}"


TO_GPU = [d.link("GPU", p.GPU, host="$host")]

verdict = [
    findings.health(
        "Health",
        "Whether the host is fit for training. An unknown verdict counts as degraded.",
        FINDINGS,
        here(str(m.HOST_VERDICT_ID)),
        width=3,
        height=4,
    ),
    d.stat(
        "Lemon score",
        "Number of signs in the last seven days that the host makes runs fail again and again. An unplanned "
        "end counts if the host had a fault at that time. Critical Xids count once per GPU and code. Straggling ranks "
        "and lost ports count once each. Expected: below 3. Drain a host with 3 or more and "
        "test it.",
        d.Query(f"max({r.LEMON}{{{NODE}}}) or vector(0)", instant=True),
        thresholds=[(None, "green"), (1, "orange"), (3, "red")],
        width=3,
        height=4,
    ),
    d.stat(
        "Maintenance",
        "Time until the host's maintenance ends. Its alerts are held back until then. Expected: 0 after the work is "
        "done.",
        d.Query(f"max({m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS}{{{NODE}}} - time()) > 0 or vector(0)", instant=True),
        unit="s",
        mappings={0: ("none", "green")},
        width=3,
        height=4,
    ),
    d.label_table(
        "Location",
        "Rack, leaf switch and NVLink domain of the host. Expected: one row.",
        f"{m.HOST_TOPOLOGY_INFO}{{{NODE}}}",
        labels={"rack": "Rack", "leaf": "Leaf", "domain": "NVLink domain"},
        links={"Rack": [d.link("Rack", p.RACK, rack=d.FIELD % "Rack")]},
        width=15,
        height=4,
        no_data="The topology of the host is unknown (docs/identity.md).",
    ),
    findings.table(
        "Firing alerts on the host and its parts, and reasons of its verdict.",
        findings.placed(FINDINGS),
        "Run",
        "Rank",
        "Node",
        "GPU",
        "Device",
        "Port",
        "Part",
        "Xid",
        height=6,
    ),
]

cards = [
    d.table(
        "GPUs",
        "One row per GPU of the host. Expected: GPUs of the same job alike. `Tensor cores` and `Throttled` are shares "
        "of the last five minutes. A power cap (sw_power_cap) does not count as throttled.",
        [
            d.Column("Card", f"max by (gpu, uuid, model) ({m.GPU_INFO}{{{NODE}}})", unit=None),
            d.Column("Answers", card(str(m.GPU_PRESENT)), mappings={0: ("no", "red"), 1: ("yes", "green")}),
            d.Column("Utilisation", card(str(m.GPU_UTILIZATION_RATIO)), "percentunit"),
            d.Column("Tensor cores", card(f"rate({m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL}[5m])"), "percentunit"),
            d.Column("Clock", card(str(m.GPU_SM_CLOCK_HERTZ)), "hertz"),
            d.Column("Power", card(str(m.GPU_POWER_WATTS)), "watt"),
            d.Column("Temperature", card(str(m.GPU_TEMPERATURE_CELSIUS)), "celsius", p.HOT),
            d.Column("Throttled", card(p.throttled("gpu")), "percentunit", p.HELD_BACK),
            d.Column("Memory", card(f"{m.GPU_MEMORY_USED_BYTES} / {m.GPU_MEMORY_TOTAL_BYTES}"), "percentunit"),
            d.Column(
                "Xids, 1 d", card(f"sum by (gpu, instance) (increase({m.GPU_XID_ERRORS_TOTAL}[1d]))"), "none", p.ERRORS
            ),
        ],
        key="gpu",
        labels={"gpu": "GPU", "uuid": "UUID", "model": "Model"},
        sort="GPU",
        ascending=True,
        height=10,
        links={"GPU": [p.to_gpu("$host", d.FIELD % "UUID")]},
        hidden=["UUID"],
    ),
    d.timeseries(
        "Utilisation",
        "Share of time in which a kernel ran, by GPU. Expected: GPUs of the same job alike.",
        d.Query(card(str(m.GPU_UTILIZATION_RATIO)), "GPU {{gpu}}"),
        unit="percentunit",
        top=1,
        links=TO_GPU,
        width=6,
    ),
    d.timeseries(
        "Power",
        "Power drawn, by GPU. Expected: GPUs alike under load. A GPU that draws far less is idle or throttled.",
        d.Query(card(str(m.GPU_POWER_WATTS)), "GPU {{gpu}}"),
        unit="watt",
        links=TO_GPU,
        width=6,
    ),
    d.timeseries(
        "Temperature",
        "Temperature, by GPU. Expected: no outlier. Otherwise check air flow and heat sink.",
        d.Query(card(str(m.GPU_TEMPERATURE_CELSIUS)), "GPU {{gpu}}"),
        unit="celsius",
        thresholds=p.HOT,
        links=TO_GPU,
        width=6,
    ),
    d.timeseries(
        "SM clock",
        "SM clock, by GPU. Expected: GPUs alike under load. A GPU with a lower clock may be throttled.",
        d.Query(card(str(m.GPU_SM_CLOCK_HERTZ)), "GPU {{gpu}}"),
        unit="hertz",
        links=TO_GPU,
        width=6,
    ),
]

ports = [
    d.status_history(
        "Port states",
        "State of each port over time. Expected: active, if the port is in use.",
        d.Query(port(str(m.INFINIBAND_PORT_STATE_ID)), "{{device}}/{{port}}"),
        mappings=p.PORT_STATES,
        width=12,
        height=8,
    ),
    d.timeseries(
        "Port traffic",
        "Bytes per second that each port sends. Expected: compute ports alike.",
        d.Query(port(f"rate({m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL}{p.RATE})"), "{{device}}/{{port}}"),
        unit="Bps",
        width=6,
        links=[p.to_fabric("$host")],
    ),
    d.timeseries(
        "Port errors",
        "Symbol errors, link recoveries and link downs per second, by InfiniBand port. Expected: none that last. "
        "Otherwise check the cable and transceiver. RoCE ports have no such counters.",
        d.Query(f"{port(f'rate({m.INFINIBAND_SYMBOL_ERRORS_TOTAL}{p.RATE})')} > 0", "{{device}}/{{port}} symbols"),
        d.Query(
            f"{port(f'rate({m.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL}{p.RATE})')} > 0", "{{device}}/{{port}} recoveries"
        ),
        d.Query(f"{port(f'rate({m.INFINIBAND_LINK_DOWNED_TOTAL}{p.RATE})')} > 0", "{{device}}/{{port}} downs"),
        unit=p.PER_SECOND,
        width=6,
        links=[p.to_fabric("$host")],
        no_data="No InfiniBand port had such errors in the time shown.",
    ),
]

ranks = [
    d.table(
        "Ranks",
        "Ranks on this host. Expected: no stragglers. If all ranks here are stragglers, the host is the cause. "
        "`Straggler` is what the run loses of each step. `Stopped or stuck` is how long a rank's process has been "
        "stopped or blocked in the kernel.",
        [
            d.Column("Rank", f"max by (rank, run, uuid) ({m.TRAINING_RANK_INFO}{{{NODE}}})", unit=None),
            d.Column(
                "Index",
                f"max by (rank, gpu) (max by (rank, uuid) ({m.TRAINING_RANK_INFO}{{{NODE}}}) "
                f"* on (uuid) group_left (gpu) topk by (uuid) (1, max by (uuid, gpu) ({m.GPU_INFO}{{{NODE}}})))",
                unit=None,
            ),
            d.Column(
                "Straggler",
                f"max by (rank) ({r.CONFIRMED} and on (run, rank) {m.TRAINING_RANK_INFO}{{{NODE}}})",
                "percentunit",
                p.LATE,
            ),
            d.Column(
                "Wait", f"max by (rank) ({r.WAIT} and on (run, rank) {m.TRAINING_RANK_INFO}{{{NODE}}})", "percentunit"
            ),
            d.Column(
                "Stopped or stuck",
                f"max by (rank) ({here(str(m.HOST_PROCESS_BLOCKED_SECONDS))})",
                "s",
                [(None, "green"), (30.0, "red")],
            ),
        ],
        key="rank",
        labels={"rank": "Rank", "run": "Run", "gpu": "GPU", "uuid": "UUID"},
        sort="Straggler",
        height=10,
        hidden=["UUID"],
        links={
            "Run": [p.to_run(d.FIELD % "Run"), d.link("Stragglers", p.STRAGGLERS, run=d.FIELD % "Run")],
            "GPU": [p.to_gpu("$host", d.FIELD % "UUID")],
        },
    )
]

BOARD = d.dashboard(
    p.NODE,
    "Node",
    "One host: is it fit for training, and which of its parts is at fault?",
    [p.host],
    {
        "Verdict and findings": verdict,
        "GPUs of the host": cards,
        "Ports of the host": ports,
        "Ranks of the host": ranks,
    },
    [d.annotation("Alerts", f'ALERTS{{alertstate="firing", {NODE}}}', "{{alertname}}", "red", "{{severity}}")],
)
