"""Rack dashboard: the hosts of a rack, and the NVLink domain of an NVL72 with its GPUs, links, switches and trays."""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

RACK = f'{m.HOST_TOPOLOGY_INFO}{{rack=~"$rack"}}'
HERE = f"({r.HOST} and on (host) {RACK})"
NOT_ACTIVE = f'sum by (instance) ({m.NVLINK_LINKS}{{state!="active"}})'
TO_NODE = [p.to_node(d.LABEL % "host")]
FINDINGS = f"({findings.on_hosts(findings.HOSTS, HERE)} and on (host) {RACK})"

# As in the alert NvlinkFabricUnhealthy.
OUTSIDE_FABRIC = (
    f"{m.GPU_FABRIC_STATE_ID} == 1 or {m.GPU_FABRIC_STATE_ID} == 2 or {m.GPU_FABRIC_STATUS_ID} > 0 or "
    f"{m.GPU_FABRIC_HEALTH_ID} > 1 or {m.GPU_FABRIC_FAULT} == 1"
)


def by_host(expr: str, take: str = "max") -> str:
    """Return `expr`, whose series have `instance`, aggregated with `take` by host of the chosen rack."""
    return f"{take} by (host) ({expr} * on (instance) group_left (host) {HERE})"


now = [
    d.stat(
        "Hosts",
        "Number of hosts of the rack whose exporter answers. Expected: all of them.",
        d.Query(f"count(count by (host) ({HERE}))", instant=True),
        width=4,
    ),
    d.stat(
        "Unhealthy hosts",
        "Hosts of the rack with a firing alert, or with a verdict other than ok. Expected: 0. Several at once point "
        "to power, cooling or a switch.",
        d.Query(f"count(max by (host) ({FINDINGS})) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "GPUs",
        "Number of GPUs of the rack that answer. Expected: constant. An unplanned fall means lost GPUs or hosts.",
        d.Query(f"sum({by_host(f'({m.GPU_PRESENT} == 1)', 'count')})", instant=True),
        width=4,
    ),
    d.stat(
        "Power",
        "Power of all GPUs of the rack in total. Expected: below what the rack's power feed supplies. An unexplained "
        "fall means that work stopped.",
        d.Query(f"sum({by_host(f'sum by (instance) ({m.GPU_POWER_WATTS})')})", instant=True),
        unit="watt",
        width=4,
    ),
    d.stat(
        "Inactive NVLinks",
        "NVLinks of the rack's GPUs that are not active. Expected: 0 under load. Links may sleep on idle GPUs.",
        d.Query(f"sum({by_host(NOT_ACTIVE)}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Fabric problems",
        "GPUs that have not joined their NVLink fabric, or that report it as faulty or of limited capacity. Expected: "
        "0.",
        d.Query(f"sum({by_host(f'count by (instance) (group by (instance, uuid) ({OUTSIDE_FABRIC}))')})", instant=True),
        thresholds=p.ERRORS,
        width=4,
        no_data="No GPU reports an unhealthy NVLink fabric.",
    ),
]

nodes = [
    d.table(
        "Hosts side by side",
        "One row per host of the rack. Expected: health ok, lemon score below 3, and hosts of the same job alike.",
        [
            d.Column("Place", f"max by (host, leaf, domain) ({RACK})", unit=None),
            d.Column(
                "Health", f"max by (host) ({FINDINGS} or {by_host(str(m.HOST_VERDICT_ID))})", mappings=findings.HEALTH
            ),
            d.Column("GPUs", by_host(f"count by (instance) ({m.GPU_PRESENT} == 1)")),
            d.Column("Power", by_host(f"sum by (instance) ({m.GPU_POWER_WATTS})"), "watt"),
            d.Column("Hottest GPU", by_host(f"max by (instance) ({m.GPU_TEMPERATURE_CELSIUS})"), "celsius", p.HOT),
            d.Column("NVLinks", by_host(f'sum by (instance) ({m.NVLINK_LINKS}{{state="active"}})')),
            d.Column(
                "NVLink errors, 1 h",
                by_host(f"sum by (instance) (increase({m.NVLINK_ERRORS_TOTAL}[1h]))"),
                "none",
                p.FEW,
            ),
            d.Column("Lemon score", f"max by (host) ({r.LEMON} and on (host) {RACK})"),
        ],
        key="host",
        labels={"host": "Node", "leaf": "Leaf", "domain": "NVLink domain"},
        sort="Health",
        height=8,
        links={"Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")]},
    )
]

time = [
    d.timeseries(
        "Power by host",
        f"Power of all GPUs of a host, for the {p.LINES} hosts that draw most. Expected: hosts of the same job alike.",
        d.Query(p.most(by_host(f"sum by (instance) ({m.GPU_POWER_WATTS})")), "{{host}}"),
        unit="watt",
        links=TO_NODE,
    ),
    d.timeseries(
        "Hottest GPU by host",
        f"Temperature of a host's hottest GPU, for the {p.LINES} hottest hosts. Expected: steady. If all hosts get "
        "hotter together, check the rack's cooling.",
        d.Query(p.most(by_host(f"max by (instance) ({m.GPU_TEMPERATURE_CELSIUS})")), "{{host}}"),
        unit="celsius",
        thresholds=p.HOT,
        links=TO_NODE,
    ),
    d.timeseries(
        "NVLink traffic by host",
        f"Bytes per second that a host's GPUs send over NVLink, for the {p.LINES} lowest hosts. Expected: hosts of "
        "the same job alike.",
        d.Query(
            p.most(by_host(f"sum by (instance) (rate({m.NVLINK_TRANSMIT_BYTES_TOTAL}{p.RATE}))"), "bottomk"), "{{host}}"
        ),
        unit="Bps",
        links=TO_NODE,
    ),
]

domain = [
    d.label_table(
        "NVLink clusters and cliques",
        "NVLink cluster of each host's GPUs, and the clique of GPUs that can reach each other. Expected: one clique "
        "per NVLink domain. Otherwise check the switch trays.",
        f'count by (host, cluster, clique) ({m.GPU_FABRIC_INFO}{{cluster!~"[0-]*"}} '
        f"* on (instance) group_left (host) {HERE})",
        labels={"host": "Node", "cluster": "Cluster", "clique": "Clique"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=12,
        height=6,
        no_data="No GPU of the rack belongs to an NVLink cluster.",
    ),
    d.label_table(
        "Compute trays",
        "Chassis, slot and compute tray of each host's GPUs. Expected: all trays of the rack.",
        f"count by (host, chassis_serial, tray, slot) ({m.GPU_CHASSIS_INFO} * on (instance) group_left (host) {HERE})",
        labels={"chassis_serial": "Chassis", "tray": "Tray", "slot": "Slot", "host": "Node"},
        width=12,
        height=6,
        no_data="The GPUs are older than Blackwell, or DCGM is not read.",
    ),
    d.timeseries(
        "NVSwitch errors",
        "NVSwitch link errors per second, by host, switch and kind. Expected: none that last.",
        d.Query(
            f"max by (host, switch, error) (rate({m.NVLINK_SWITCH_ERRORS_TOTAL}{p.RATE}) * on (instance) "
            f"group_left (host) {HERE}) > 0",
            "{{host}} {{switch}} {{error}}",
        ),
        unit=p.PER_SECOND,
        width=12,
        height=6,
        no_data="No NVSwitch errors in the time shown, or DCGM is not read.",
    ),
    d.timeseries(
        "NVSwitch temperature",
        f"Temperature of the {p.LINES} hottest NVSwitches. Expected: steady. If all get hotter together, check the "
        "rack's cooling.",
        d.Query(
            p.most(
                f"max by (host, switch) ({m.NVLINK_SWITCH_TEMPERATURE_CELSIUS} * on (instance) group_left (host) "
                f"{HERE})"
            ),
            "{{host}} {{switch}}",
        ),
        unit="celsius",
        thresholds=p.HOT,
        width=12,
        height=6,
        no_data="DCGM is not read.",
    ),
]

BOARD = d.dashboard(
    p.RACK,
    "Rack",
    "The hosts of a rack, and the NVLink domain that they share.",
    [d.variable("rack", "Rack", f"label_values({m.HOST_TOPOLOGY_INFO}, rack)")],
    {"Now": now, "Each host": nodes, "Over time": time, "NVLink domain": domain},
    [
        d.annotation(
            "Alerts",
            f'ALERTS{{alertstate="firing", host!=""}} and on (host) {m.HOST_TOPOLOGY_INFO}{{rack="$rack"}}',
            "{{alertname}}",
            "red",
            "{{host}}",
        )
    ],
)
