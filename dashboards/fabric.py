"""Fabric dashboard: does a slow or broken link, rail or leaf switch slow runs down, and which cable is it?"""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

WORST = 12
PORT = "instance, device, port"
PLACE = f"topk by ({PORT}) (1, max by ({PORT}, host, role, rail) ({m.INFINIBAND_INFO}))"
HERE = f'{m.INFINIBAND_INFO}{{host=~"$host"}}'
NAME = "{{host}} {{device}}/{{port}} rail {{rail}}"
TO_NODE = [p.to_node(d.LABEL % "host")]
RUN = '{run=~"$run"}'


def worst(per_port: str) -> d.Query:
    """Return a query for the WORST ports of the chosen hosts with the highest value of `per_port`.

    The series of `per_port` have the labels in PORT. Host, role and rail of each port are added as labels.
    """
    return d.Query(
        f"topk({WORST}, {per_port} and on ({PORT}) {HERE}) * on ({PORT}) group_left (host, role, rail) {PLACE}",
        NAME,
        instant=True,
    )


def chosen(per_port: str) -> str:
    """Return `per_port`, whose series have the labels in PORT, for the ports of the chosen hosts only."""
    return f"({per_port} and on ({PORT}) {HERE})"


PORTS = chosen(f"max by ({PORT}) ({m.INFINIBAND_PORT_STATE_ID})")
DOWN = f"({m.INFINIBAND_PORT_STATE_ID} < 4 and on ({PORT}) {r.PORT_WAS_ACTIVE})"
RATE_LOW = f"{m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND} / {m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND}"

now = [
    d.stat(
        "Ports",
        "Ports of the chosen hosts. Expected: a constant number.",
        d.Query(f"count({PORTS})", instant=True),
        width=4,
    ),
    d.stat(
        "Inactive ports",
        "Ports that were active and no longer are. Expected: 0.",
        d.Query(f"count({PORTS} < 4 and on (instance, device, port) {r.PORT_WAS_ACTIVE}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Missing ports",
        "Ports that vanished from their host. Expected: 0.",
        d.Query(f"count({chosen(f'{m.INFINIBAND_PORT_PRESENT} == 0')}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Flapping ports",
        "Ports that went down and came back three times within twelve hours. Expected: 0.",
        d.Query(f"count({chosen(f'{m.INFINIBAND_LINK_FLAPPING} == 1')}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Slow ports",
        "Ports whose link runs below the rate it had before. Expected: 0.",
        d.Query(f"count({chosen(f'{RATE_LOW} < {p.SETTINGS.rate_share:g}')}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Slowest rail",
        "Traffic of a run's slowest rail over its median rail, for the worst run. Expected: above 90 %. Below 50 % a "
        "leaf or cable is slow.",
        d.Query(f"min({r.RAIL_IMBALANCE}{RUN})", instant=True),
        unit="percentunit",
        thresholds=[(None, "red"), (0.5, "orange"), (0.9, "green")],
        width=4,
        no_data="All rails are nearly idle.",
    ),
]

rails = [
    d.timeseries(
        "Traffic by rail",
        f"Bytes per second that a port of each rail sends, mean over the run's hosts, for the {p.LINES} lowest. "
        "Expected: equal rails.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL}{RUN})", "bottomk"), "{{run}} rail {{rail}}"),
        unit="Bps",
    ),
    d.timeseries(
        "Credit wait by rail",
        "Each rail's share of the time that a run's ports wait for credit. Expected: one over the number of rails. A "
        "higher share means a congested leaf or a slow receiver.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL_WAIT_SHARE}{RUN})"), "{{run}} rail {{rail}}"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Slowest rail by run",
        "Traffic of each run's slowest rail over its median rail. Expected: near 1.",
        d.Query(p.most(f"max by (run) ({r.RAIL_IMBALANCE}{RUN})", "bottomk"), "{{run}}"),
        unit="percentunit",
        top=1,
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "Congestion notifications by rail",
        "Notifications per second with which a switch slowed a sender down (RoCE). Expected: few, and equal on all "
        "rails.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_NOTIFICATIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit="cps",
        width=12,
        no_data="No congestion notifications. InfiniBand has none.",
    ),
    d.timeseries(
        "Retransmissions by rail",
        "Retransmissions per second of a port of each rail. Expected: none that last. They mean a lossy path.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_RETRANSMISSIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit="cps",
        width=12,
        no_data="No port retransmits.",
    ),
]

ports = [
    d.bargauge(
        "Symbol errors",
        f"Symbol errors in the time shown, for the {WORST} worst ports. Expected: none. At 120 an hour, replace the "
        "cable or transceiver.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_SYMBOL_ERRORS_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (120, "red")],
        links=TO_NODE,
        no_data="No symbol errors.",
    ),
    d.bargauge(
        "Link downs",
        f"Times a link went down in the time shown, for the {WORST} worst ports. Expected: none under load.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_LINK_DOWNED_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_NODE,
        no_data="No link went down.",
    ),
    d.bargauge(
        "Flaps",
        f"Flaps in the time shown, for the {WORST} worst ports. Expected: fewer than three in twelve hours.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_LINK_FLAPS_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (3, "red")],
        links=TO_NODE,
        no_data="No port flapped.",
    ),
    d.bargauge(
        "Credit wait",
        f"Ticks per second that a port waits for credit, for the {WORST} worst. Expected: ports of a rail alike. The "
        "length of a tick differs between devices.",
        worst(f"max by ({PORT}) (rate({m.INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL}[5m])) > 0"),
        unit="none",
        links=TO_NODE,
        no_data="No port waits for credit.",
    ),
    d.bargauge(
        "Broken or dropped packets",
        f"Packets per second, for the {WORST} worst ports. Expected: none that last.",
        worst(
            f"max by ({PORT}) (rate({m.INFINIBAND_RECEIVE_ERRORS_TOTAL}[5m])) + on ({PORT}) "
            f"max by ({PORT}) (rate({m.INFINIBAND_TRANSMIT_DISCARDS_TOTAL}[5m])) > 0"
        ),
        unit="cps",
        thresholds=p.FEW,
        links=TO_NODE,
        no_data="No packet was broken or dropped.",
    ),
    d.bargauge(
        "Hottest transceivers",
        f"Transceiver temperature of the {WORST} hottest ports. Expected: below {p.SETTINGS.transceiver_celsius:g} "
        "degrees Celsius.",
        worst(f"max by ({PORT}) ({m.INFINIBAND_TEMPERATURE_CELSIUS})"),
        unit="celsius",
        thresholds=[(None, "green"), (p.SETTINGS.transceiver_celsius, "red")],
        links=TO_NODE,
        no_data="The driver reports no temperature.",
    ),
    d.label_table(
        "Ports with problems",
        "Ports that are inactive, missing, flapping or slow. Expected: no row.",
        chosen(
            f"{m.INFINIBAND_INFO} and on ({PORT}) ("
            f"{DOWN} or ({m.INFINIBAND_PORT_PRESENT} == 0) or "
            f"({m.INFINIBAND_LINK_FLAPPING} == 1) or ({RATE_LOW} < {p.SETTINGS.rate_share:g}))"
        ),
        labels={
            "host": "Node",
            "device": "Device",
            "port": "Port",
            "rail": "Rail",
            "role": "Role",
            "net_device": "Net device",
            "firmware_version": "Firmware",
            "board_id": "Board",
        },
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        height=8,
        no_data="No port has a problem.",
    ),
]

leaves = [
    d.bargauge(
        "Ports down by leaf",
        "Ports that were active and no longer are, by leaf switch. Expected: none. Many on one leaf point to the leaf.",
        d.Query(
            f"topk({p.LINES}, sum by (leaf) (count by (host) ({p.with_host(DOWN)}) * on (host) group_left (leaf) "
            f"topk by (host) (1, max by (host, leaf) ({m.HOST_TOPOLOGY_INFO}))))",
            "{{leaf}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        width=12,
        no_data="All ports are up, or the topology is unknown (docs/identity.md).",
    ),
    p.firing(
        f'ALERTS{{alertstate="firing", alertname=~"{p.ALERTS}", device!=""}} or '
        'ALERTS{alertstate="firing", alertname=~".*(Leaf|Rail|Roce).*"}',
        "Firing alerts on ports, rails and leaves. Expected: none.",
        width=12,
    ),
]

BOARD = d.dashboard(
    p.FABRIC,
    "Fabric",
    "Rails, leaves, ports and their errors.",
    [
        d.variable("host", "Node", f"label_values({r.HOST}, host)", everything=True),
        d.variable("run", "Run", f"label_values({r.RAIL}, run)", everything=True),
    ],
    {"Now": now, "Rails": rails, "Each port": ports, "Leaves and alerts": leaves},
)
