"""From the nodes' ports: which are in use, and what each rail of a run carries, waits and sends again.

A rail is compared within one run: a collective gives every rail the same share, so that one below the others is a leaf
switch or a cable, and all of them low is the run. Nodes that several runs share are left out, since nobody can tell
whose bytes went through their ports.
"""

from __future__ import annotations

from alerts.recording.record import Record, record
from alerts.recording.training import NODE_RUN
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

PORT_WAS_ACTIVE = "port:infiniband_was_active:bool"
PORT_RAIL = "port:infiniband_rail:info"
RAIL = "rail:infiniband_transmit_bytes:rate5m"
RAIL_IMBALANCE = "run:infiniband_rail:min_over_median"
RAIL_WAIT = "rail:infiniband_transmit_wait_ticks:rate5m"
RAIL_WAIT_SHARE = "rail:infiniband_transmit_wait:share"
RAIL_NOTIFICATIONS = "rail:infiniband_congestion_notifications:rate5m"
RAIL_RETRANSMISSIONS = "rail:infiniband_retransmissions:rate5m"


def fabric_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records on ports and rails."""
    forget = settings.at_pace(settings.xid_window)
    rate = settings.at_pace(settings.rate_window)

    def per_port(counter: m.Metric) -> str:
        return f"max by (instance, device, port) (rate({counter}[{rate}]))"

    def per_rail(expr: str) -> str:
        return f"avg by (run, rail) (\n  {PORT_RAIL} * on (instance, device, port) group_left ()\n  ({expr})\n)"

    return (
        record(
            "place",
            PORT_WAS_ACTIVE,
            "1 for a port that has been active; one that never was is not in use.",
            f"""
            group by (instance, device, port) (
              {m.INFINIBAND_STATE} >= 4
                or
              {PORT_WAS_ACTIVE} and on (instance, device, port) last_over_time({m.INFINIBAND_STATE}[{forget}])
            )
        """,
        ),
        record(
            "place",
            PORT_RAIL,
            "The rail of a port for computing, and the run on its node if there is just one.",
            f"""
            max by (instance, device, port, rail) ({m.INFINIBAND_INFO}{{role="compute",rail!=""}})
              * on (instance) group_left (run)
            ({NODE_RUN} and on (instance) (count by (instance) ({NODE_RUN}) == 1))
        """,
        ),
        record(
            "rails",
            RAIL,
            "Bytes a second that a port of this rail sends, mean over the run's nodes.",
            per_rail(per_port(m.INFINIBAND_TRANSMIT_DATA)),
        ),
        record(
            "rails",
            RAIL_IMBALANCE,
            "Traffic of the run's slowest rail over its median rail: 1 is even. None while rails are next to idle.",
            f"""
            min by (run) ({RAIL})
              /
            (quantile by (run) (0.5, {RAIL}) > {settings.rail_least:g})
              and on (run)
            (count by (run) ({RAIL}) > 1)
        """,
        ),
        record(
            "rails",
            RAIL_WAIT,
            "Ticks a second in which a port of this rail had data to send and no credit, mean "
            "over the run's nodes. The tick is device specific: compare rails.",
            per_rail(per_port(m.INFINIBAND_TRANSMIT_WAIT)),
        ),
        record(
            "rails",
            RAIL_WAIT_SHARE,
            "Share of the run's waiting for credit that is this rail's; even is one over "
            "the number of rails. None if no rail waits.",
            f"""
            {RAIL_WAIT} / on (run) group_left () (sum by (run) ({RAIL_WAIT}) > 0)
        """,
        ),
        record(
            "rails",
            RAIL_NOTIFICATIONS,
            "Congestion notifications a second that slowed down a sender of this rail, "
            "mean over the run's nodes. RoCE.",
            per_rail(per_port(m.INFINIBAND_CONGESTION_NOTIFICATIONS_HANDLED)),
        ),
        record(
            "rails",
            RAIL_RETRANSMISSIONS,
            "Times a second that a port of this rail had to send again: negative "
            "acknowledgements and acknowledgements that never came, mean over the run's nodes.",
            per_rail(f"{per_port(m.INFINIBAND_PACKET_SEQUENCE_ERRORS)} + {per_port(m.INFINIBAND_ACK_TIMEOUTS)}"),
        ),
    )
