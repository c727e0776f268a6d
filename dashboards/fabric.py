"""Fabric: is a slow or broken link, rail or leaf switch holding runs back, and which cable is it?"""

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
    """Return the ports of the chosen nodes with the highest value of an expression by port, with their places."""
    return d.Query(
        f"topk({WORST}, {per_port} and on ({PORT}) {HERE}) * on ({PORT}) group_left (host, role, rail) {PLACE}",
        NAME,
        instant=True,
    )


def chosen(per_port: str) -> str:
    """Return an expression by port, of the chosen nodes."""
    return f"({per_port} and on ({PORT}) {HERE})"


PORTS = chosen(f"max by ({PORT}) ({m.INFINIBAND_STATE})")
DOWN = f"({m.INFINIBAND_STATE} < 4 and on ({PORT}) {r.PORT_WAS_ACTIVE})"
RATE_LOW = f"{m.INFINIBAND_RATE} / {m.INFINIBAND_EXPECTED_RATE}"

now = [
    d.stat("Ports", "Ports of the chosen nodes. Bad: a step down.", d.Query(f"count({PORTS})", instant=True), width=4),
    d.stat(
        "Not active",
        "Ports that were active once and are not. Bad: any.",
        d.Query(f"count({PORTS} < 4 and on (instance, device, port) {r.PORT_WAS_ACTIVE}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Gone",
        "Ports that vanished from their node. Bad: any.",
        d.Query(f"count({chosen(f'{m.INFINIBAND_PRESENT} == 0')}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Flapping",
        "Ports that went down and came back three times within twelve hours. Bad: any.",
        d.Query(f"count({chosen(f'{m.INFINIBAND_FLAPPING} == 1')}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Slower than expected",
        "Ports whose link trained below the rate they had. Bad: any.",
        d.Query(f"count({chosen(f'{RATE_LOW} < {p.SETTINGS.rate_share:g}')}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Slowest rail",
        "Traffic of the slowest rail of a run over its median rail, the worst run. Bad: below a "
        "half. Nothing: rails are next to idle.",
        d.Query(f"min({r.RAIL_IMBALANCE}{RUN})", instant=True),
        unit="percentunit",
        thresholds=[(None, "red"), (0.5, "orange"), (0.9, "green")],
        width=4,
        no_data="Rails are next to idle.",
    ),
]

rails = [
    d.timeseries(
        "Traffic by rail",
        f"Bytes a second that a port of each rail sends, mean over a run's nodes; the {p.LINES} "
        "that send least. Bad: one below the others.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL}{RUN})", "bottomk"), "{{run}} rail {{rail}}"),
        unit="Bps",
    ),
    d.timeseries(
        "Waiting for credit by rail",
        "Share of a run's waiting that is this rail's. Bad: one far above one over the "
        "number of rails: that rail's leaf is congested, or one of its receivers is slow.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL_WAIT_SHARE}{RUN})"), "{{run}} rail {{rail}}"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Slowest rail over the median",
        "Of each run. Bad: far below 1.",
        d.Query(p.most(f"max by (run) ({r.RAIL_IMBALANCE}{RUN})", "bottomk"), "{{run}}"),
        unit="percentunit",
        top=1,
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "Congestion notifications by rail",
        "A second, RoCE: a switch asked a sender to slow down. Bad: rising on one "
        "rail alone. Nothing: InfiniBand has none.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_NOTIFICATIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit="cps",
        width=12,
        no_data="InfiniBand has none.",
    ),
    d.timeseries(
        "Sent again by rail",
        "Times a second that a port had to repeat. Bad: any that goes on: a lossy path. Nothing: no port has to.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_RETRANSMISSIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit="cps",
        width=12,
        no_data="No port has to.",
    ),
]

ports = [
    d.bargauge(
        "Symbol errors",
        f"The {WORST} ports with most in the time shown. Bad: 120 an hour: replace cable or "
        "transceiver. Nothing: there were none.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_SYMBOL_ERRORS}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (120, "red")],
        links=TO_NODE,
        no_data="There were none.",
    ),
    d.bargauge(
        "Links that went down",
        f"The {WORST} ports with most in the time shown. Bad: any under load. Nothing: none did.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_LINK_DOWNED}[$__range])) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_NODE,
        no_data="None did.",
    ),
    d.bargauge(
        "Flaps",
        f"The {WORST} ports with most in the time shown. Bad: three in twelve hours. Nothing: there were none.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_FLAPS}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (3, "red")],
        links=TO_NODE,
        no_data="There were none.",
    ),
    d.bargauge(
        "Waiting for credit",
        f"Ticks a second, the {WORST} ports with most. Bad: one far above the rest of its rail. "
        "The tick differs between devices. Nothing: none waits.",
        worst(f"max by ({PORT}) (rate({m.INFINIBAND_TRANSMIT_WAIT}[5m])) > 0"),
        unit="none",
        links=TO_NODE,
        no_data="None waits.",
    ),
    d.bargauge(
        "Broken or dropped packets",
        f"A second, the {WORST} ports with most. Bad: any that go on. Nothing: there are none.",
        worst(
            f"max by ({PORT}) (rate({m.INFINIBAND_RECEIVE_ERRORS}[5m])) + on ({PORT}) "
            f"max by ({PORT}) (rate({m.INFINIBAND_TRANSMIT_DISCARDS}[5m])) > 0"
        ),
        unit="cps",
        thresholds=p.FEW,
        links=TO_NODE,
        no_data="There are none.",
    ),
    d.bargauge(
        "Hottest transceivers",
        f"Bad: above {p.SETTINGS.transceiver_celsius:g} degrees. Nothing: the driver does not tell.",
        worst(f"max by ({PORT}) ({m.INFINIBAND_TEMPERATURE})"),
        unit="celsius",
        thresholds=[(None, "green"), (p.SETTINGS.transceiver_celsius, "red")],
        links=TO_NODE,
        no_data="The driver does not tell.",
    ),
    d.label_table(
        "Ports that are not well",
        "Not active, gone, flapping or slow. Bad: any row. Nothing: all are well.",
        chosen(
            f"{m.INFINIBAND_INFO} and on ({PORT}) ("
            f"{DOWN} or ({m.INFINIBAND_PRESENT} == 0) or "
            f"({m.INFINIBAND_FLAPPING} == 1) or ({RATE_LOW} < {p.SETTINGS.rate_share:g}))"
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
        no_data="All are well.",
    ),
]

leaves = [
    d.bargauge(
        "Ports down by leaf",
        "Ports that were active once and are not, by their node's leaf switch. Bad: one leaf "
        "with many. Nothing: all are up, or nobody told where nodes stand (docs/identity.md).",
        d.Query(
            f"topk({p.LINES}, sum by (leaf) (count by (host) ({p.with_host(DOWN)}) * on (host) group_left (leaf) "
            f"topk by (host) (1, max by (host, leaf) ({m.NODE_TOPOLOGY_INFO}))))",
            "{{leaf}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        width=12,
        no_data="All are up, or nobody told where nodes stand (docs/identity.md).",
    ),
    p.firing(
        f'ALERTS{{alertstate="firing", alertname=~"{p.ALERTS}", device!=""}} or '
        'ALERTS{alertstate="firing", alertname=~".*(Leaf|Rail|Roce).*"}',
        "Of ports, rails and leaves. Bad: any.",
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
