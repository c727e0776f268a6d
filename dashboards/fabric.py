"""Fabric dashboard: does a slow or broken link, rail or leaf switch slow runs down, and which cable is it?"""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

WORST = 12
PORT = "instance, device, port"
PLACE = f"topk by ({PORT}) (1, max by ({PORT}, host, role, rail) ({m.INFINIBAND_INFO}))"
HERE = f'{m.INFINIBAND_INFO}{{host=~"$host"}}'
NAME = "{{host}} {{device}}/{{port}}"
TO_NODE = [p.to_node(d.LABEL % "host")]
RUN = '{run=~"$run"}'
CHOSEN = 'host=~"$host"'
FINDINGS = findings.on_ports(f'{CHOSEN}, device!="", {findings.SHIPPED}', f"{r.HOST}{{{CHOSEN}}}")


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
        "Number of InfiniBand, RoCE and EFA ports of the chosen hosts. Expected: constant.",
        d.Query(f"count({PORTS})", instant=True),
        width=4,
    ),
    d.stat(
        "Unhealthy ports",
        "Ports with a firing alert, or with a reason in the verdict on their host. Expected: 0. The table of findings "
        "lists them.",
        d.Query(f"count(max by (host, device, port) ({FINDINGS})) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Inactive ports",
        "Ports that were active before and are not active now. Expected: 0. The table of findings lists them.",
        d.Query(f"count({PORTS} < 4 and on (instance, device, port) {r.PORT_WAS_ACTIVE}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Missing ports",
        "Ports in the inventory of a host that the host no longer has. Expected: 0. The table of ports with problems "
        "lists them.",
        d.Query(f"count({chosen(f'{m.INFINIBAND_PORT_PRESENT} == 0')}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Slow ports",
        "Ports whose link rate is below the highest rate that they had. Expected: 0. Otherwise check the cable and "
        "transceiver.",
        d.Query(f"count({chosen(f'{RATE_LOW} < {p.SETTINGS.rate_share:g}')}) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Slowest rail",
        "Traffic of a run's slowest rail over its median rail, for the run with the lowest value. Expected: above 90 "
        "%. Below 50 %, a leaf switch or a cable is slow.",
        d.Query(f"min({r.RAIL_IMBALANCE}{RUN})", instant=True),
        unit="percentunit",
        thresholds=[(None, "red"), (0.5, "orange"), (0.9, "green")],
        width=4,
        no_data="No run with several rails has traffic.",
    ),
]

rails = [
    d.timeseries(
        "Traffic by rail",
        "Bytes per second that a port of each rail sends, mean of five minutes over the run's hosts. Shows the "
        f"{p.LINES} lowest. Expected: rails of a run alike.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL}{RUN})", "bottomk"), "{{run}} rail {{rail}}"),
        unit="Bps",
    ),
    d.timeseries(
        "Credit wait by rail",
        f"Each rail's share of a run's total wait for flow-control credit, in five minutes. Shows the {p.LINES} "
        "highest. The shares of all rails of a run add up to 100 %. Expected: equal shares. A higher share means a "
        "congested leaf switch or a slow receiver.",
        d.Query(p.most(f"max by (run, rail) ({r.RAIL_WAIT_SHARE}{RUN})"), "{{run}} rail {{rail}}"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Slowest rail by run",
        "Traffic of each run's slowest rail over its median rail. Expected: above 90 %. Below 50 %, a leaf switch or "
        "a cable is slow.",
        d.Query(p.most(f"max by (run) ({r.RAIL_IMBALANCE}{RUN})", "bottomk"), "{{run}}"),
        unit="percentunit",
        top=1,
        links=[p.to_run(d.LABEL % "run")],
    ),
    d.timeseries(
        "Congestion notifications by rail",
        "RoCE congestion notifications per second that slowed down a port of each rail, mean over the run's hosts. "
        "Expected: few, and equal on all rails.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_NOTIFICATIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit=p.PER_SECOND,
        width=8,
        height=6,
        no_data="No congestion notification slowed down a port. InfiniBand has none.",
    ),
    d.timeseries(
        "Retransmissions by rail",
        "Retransmissions per second by a port of each rail, mean over the run's hosts. Expected: none that last. They "
        "mean that packets are lost.",
        d.Query(f"topk({p.LINES}, max by (run, rail) ({r.RAIL_RETRANSMISSIONS}{RUN}) > 0)", "{{run}} rail {{rail}}"),
        unit=p.PER_SECOND,
        width=8,
        height=6,
        no_data="No port retransmits.",
    ),
    d.timeseries(
        "Retransmissions per packet by rail",
        "Retransmissions of a port of each rail over the packets that it sends, mean over the run's hosts. Expected: "
        "none that last. Above 0.01 %, look for drops on the leaf switch of this rail.",
        d.Query(
            f"topk({p.LINES}, max by (run, rail) ({r.RAIL_RETRANSMISSION_RATIO}{RUN}) > 0)", "{{run}} rail {{rail}}"
        ),
        unit="percentunit",
        width=8,
        height=6,
        no_data="No port retransmits.",
    ),
]

ports = [
    d.bargauge(
        "Symbol errors",
        f"Symbol errors in the time shown, for the {WORST} InfiniBand ports with most. Expected: none. At 120 an hour, "
        "replace the cable or transceiver. RoCE ports have no such counter.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_SYMBOL_ERRORS_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (120, "red")],
        links=TO_NODE,
        height=6,
        no_data="No InfiniBand port had symbol errors in the time shown.",
    ),
    d.bargauge(
        "Link downs",
        f"Times a link went down in the time shown, for the {WORST} InfiniBand ports with most. Expected: none under "
        "load. Otherwise check the cable and transceiver. RoCE ports have no such counter.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_LINK_DOWNED_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=p.FEW,
        links=TO_NODE,
        height=6,
        no_data="No InfiniBand link went down in the time shown.",
    ),
    d.bargauge(
        "Flaps",
        f"Times a link was down for at least 25 s and came back, in the time shown, for the {WORST} ports with most. "
        "Expected: fewer than three in twelve hours.",
        worst(f"sum by ({PORT}) (increase({m.INFINIBAND_LINK_FLAPS_TOTAL}[$__range])) > 0"),
        unit="none",
        thresholds=[(None, "green"), (1, "orange"), (3, "red")],
        links=TO_NODE,
        height=6,
        no_data="No port flapped in the time shown.",
    ),
    d.bargauge(
        "Credit wait",
        "Ticks per second in which a port has data to send and no credit, in the last five minutes. Shows the "
        f"{WORST} ports with most. Expected: ports of a rail alike. The length of a tick differs between devices.",
        worst(f"max by ({PORT}) (rate({m.INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL}[5m])) > 0"),
        unit="suffix:ticks/s",
        links=TO_NODE,
        height=8,
        no_data="No port waits for credit.",
    ),
    d.bargauge(
        "Broken or dropped packets",
        "Packets per second that a port receives with errors or drops before sending, in the last five minutes. Shows "
        f"the {WORST} ports with most. Expected: none that last.",
        worst(
            f"sum by ({PORT}) (rate({m.INFINIBAND_RECEIVE_ERRORS_TOTAL}[5m]) or "
            f'label_replace(rate({m.INFINIBAND_TRANSMIT_DISCARDS_TOTAL}[5m]), "side", "sent", "", "")) > 0'
        ),
        unit=p.PER_SECOND,
        thresholds=p.FEW,
        links=TO_NODE,
        height=8,
        no_data="No packet was broken or dropped in the last five minutes.",
    ),
    d.bargauge(
        "Pauses",
        "Share of the last five minutes in which a RoCE port or its switch was paused by priority flow control, of the "
        f"most paused priority. Shows the {WORST} ports with most. Expected: below 10 %.",
        worst(f"max by ({PORT}) (rate({m.INFINIBAND_PAUSE_SECONDS_TOTAL}[5m])) > 0"),
        unit="percentunit",
        thresholds=[(None, "green"), (0.1, "red")],
        links=TO_NODE,
        height=8,
        no_data="No port was paused, or their drivers are not read (docs/infiniband.md).",
    ),
    d.bargauge(
        "Bit errors before correction",
        "Bits that forward error correction (FEC) corrected on a RoCE port, over the bits of its link in the last "
        f"hour. Shows the {WORST} ports with most. Expected: ports of a rail alike, below 2.4e-4, which FEC corrects.",
        worst(
            f"max by ({PORT}) (increase({m.INFINIBAND_CORRECTED_BIT_ERRORS_TOTAL}[1h]) / "
            f"(8 * increase({m.INFINIBAND_RECEIVE_CAPACITY_BYTES_TOTAL}[1h]))) > 0"
        ),
        unit="sci",
        links=TO_NODE,
        height=8,
        no_data="No bit error was corrected, or the ports' drivers are not read (docs/infiniband.md).",
    ),
    d.bargauge(
        "Hottest adapters and transceivers",
        f"Temperature of the adapter or its transceiver, whichever is hotter, for the {WORST} hottest ports. "
        f"Expected: transceivers below {p.SETTINGS.transceiver_celsius:g} degrees Celsius. This limit is not for "
        "adapters.",
        worst(f"max by ({PORT}) ({m.INFINIBAND_TEMPERATURE_CELSIUS})"),
        unit="celsius",
        thresholds=[(None, "green"), (p.SETTINGS.transceiver_celsius, "red")],
        links=TO_NODE,
        height=8,
        no_data="No adapter reports a temperature.",
    ),
    findings.table(
        "Firing alerts on the ports of the chosen hosts, and reasons that concern these ports in the hosts' verdicts.",
        FINDINGS,
        "Node",
        "Device",
        "Port",
        height=6,
    ),
]

leaves = [
    d.bargauge(
        "Ports down by leaf",
        "Ports that were active before and are not active now, by leaf switch. Expected: none. Many on one leaf point "
        "to that switch.",
        d.Query(
            f"topk({p.LINES}, sum by (leaf) (count by (host) ({p.with_host(DOWN)}) * on (host) group_left (leaf) "
            f"topk by (host) (1, max by (host, leaf) ({m.HOST_TOPOLOGY_INFO}))))",
            "{{leaf}}",
            instant=True,
        ),
        unit="none",
        thresholds=p.FEW,
        width=12,
        height=6,
        no_data="No port is down, or the topology is unknown (docs/identity.md).",
    ),
    findings.firing(
        "on leaves",
        "Firing alerts on leaf switches and the hosts behind them.",
        findings.of_alerts('leaf!=""'),
        "Leaf",
        "Node",
        width=12,
        height=6,
    ),
]

BOARD = d.dashboard(
    p.FABRIC,
    "Fabric",
    "Rails, leaf switches and ports, and their errors.",
    [
        d.variable("host", "Node", f"label_values({r.HOST}, host)", everything=True),
        d.variable("run", "Run", f"label_values({r.RAIL}, run)", everything=True),
    ],
    {"Now": now, "Rails": rails, "Each port": ports, "Leaf switches": leaves},
    [p.alert_marks('alertname=~"Infiniband.+|Rail.+|Efa.+|Roce.+|Leaf.+|HostOnFaultyLeaf"')],
)
