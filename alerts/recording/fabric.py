"""Recording rules on ports: which are in use, and what each rail of a run sends, waits and retransmits.

Rails are compared within one run, because a collective gives each rail the same share. If one rail sends less than the
others, the reason is a leaf switch or a cable. If all rails send little, the reason is the run. Hosts that several runs
share are left out, because the traffic of their ports cannot be attributed to a run.
"""

from __future__ import annotations

from alerts.recording.record import Record

PORT_WAS_ACTIVE = "port:infiniband_was_active:bool"
PORT_LONG_INACTIVE = "port:infiniband_inactive:bool_10m"
PORT_INACTIVE = "port:infiniband_inactive:bool"
PORT_MISSING = "port:infiniband_missing:bool"
PORT_DOWN = "port:infiniband_down:bool"
PORT_LOST = "host:infiniband_port_lost:bool"
HOST_PORT_DOWN = "host:infiniband_port_down:bool"
LEAF = "host:host_leaf:info"
PORT_TRANSMIT = "port:infiniband_transmit_bytes:rate5m"
PORT_WAIT = "port:infiniband_transmit_wait_ticks:rate5m"
PORT_RAIL = "port:infiniband_rail:info"
HOST_RAIL = "instance:infiniband_transmit_bytes:rate5m"
RAIL = "rail:infiniband_transmit_bytes:rate5m"
RAIL_IMBALANCE = "run:infiniband_rail:min_over_median"
HOST_RAIL_WAIT = "instance:infiniband_transmit_wait_ticks:rate5m"
RAIL_WAIT = "rail:infiniband_transmit_wait_ticks:rate5m"
RAIL_WAIT_SHARE = "rail:infiniband_transmit_wait:share"
HOST_RAIL_NOTIFICATIONS = "instance:infiniband_congestion_notifications:rate5m"
RAIL_NOTIFICATIONS = "rail:infiniband_congestion_notifications:rate5m"
HOST_RAIL_RETRANSMISSIONS = "instance:infiniband_retransmissions:rate5m"
RAIL_RETRANSMISSIONS = "rail:infiniband_retransmissions:rate5m"
HOST_RAIL_RETRANSMISSION_RATIO = "instance:infiniband_retransmissions:ratio"
RAIL_RETRANSMISSION_RATIO = "rail:infiniband_retransmissions:ratio"


RECORDS: tuple[Record, ...] = (
    Record(
        "place",
        PORT_LONG_INACTIVE,
        """
            group by (instance, device, port) (
              max by (instance, device, port) (max_over_time(infiniband_port_state_id[<10m>])) < 4
            )
        """,
        "1 for a port that has not been active for ten minutes.",
    ),
    Record(
        "place",
        PORT_WAS_ACTIVE,
        """
            group by (instance, device, port) (
              infiniband_port_state_id >= 4
                or
              port:infiniband_was_active:bool
                and on (instance, device, port)
              last_over_time(infiniband_port_state_id[<30m>])
            )
        """,
        "1 for a port that is active or has been. Absent for a port that has never been active, which is not in use.",
    ),
    Record(
        "place",
        LEAF,
        """
            topk by (host) (1, group by (host, leaf) (last_over_time(host_topology_info[<10m>])))
              or on (host)
            group by (host) (last_over_time(instance:host:info[<10m>]))
        """,
        "1 with the leaf switch of a host, without a leaf if its topology is unknown.",
    ),
    # A port whose target has new labels has two series for five minutes, so the highest state counts.
    Record(
        "signs",
        PORT_INACTIVE,
        """
            group by (instance, device, port) (
              max by (instance, device, port) (last_over_time(infiniband_port_state_id[<5m>])) < 4
                and on (instance, device, port)
              port:infiniband_was_active:bool
            )
        """,
        "1 for a port that was in use and is down.",
    ),
    Record(
        "signs",
        PORT_MISSING,
        """
            group by (instance, device, port) (
              max by (instance, device, port) (last_over_time(infiniband_port_present[<5m>])) == 0
            )
        """,
        "1 for a port that was there and is missing in /sys.",
    ),
    Record(
        "signs",
        PORT_LOST,
        """
            group by (host) (
              instance:host:info
                and on (instance)
              (
                port:infiniband_inactive:bool
                  unless on (instance, device, port)
                port:infiniband_inactive:bool_10m
              )
            )
        """,
        "1 for a host with a port that went down in the last ten minutes.",
    ),
    Record(
        "signs",
        HOST_PORT_DOWN,
        "group by (host) (instance:host:info and on (instance) port:infiniband_inactive:bool)",
        "1 for a host with a port that was in use and is down.",
    ),
    Record(
        "signs",
        PORT_DOWN,
        """
            group by (host, device, port) (
              (
                (port:infiniband_inactive:bool or port:infiniband_missing:bool)
                  unless on (instance, device, port)
                last_over_time(infiniband_info{role=~"management|storage"}[<5m>])
              ) * on (instance) group_left (host) instance:host:last30m
            )
        """,
        "1 for a port that runs may communicate over, and that is down or missing.",
    ),
    Record(
        "place",
        PORT_RAIL,
        """
            max by (instance, device, port, rail) (infiniband_info{rail!="",role="compute"})
              * on (instance) group_left (run)
            (
              instance:training_run:info
                and on (instance)
              (count by (instance) (instance:training_run:info) == 1)
            )
        """,
        "1 with the rail of a compute port and the run on the port's host. Absent unless exactly one run has "
        "ranks on the host.",
    ),
    Record(
        "rails",
        PORT_TRANSMIT,
        """
            max by (instance, device, port) (
              rate(infiniband_transmit_data_bytes_total[<5m>])
                and on (instance, device, port)
              last_over_time(infiniband_info{role="compute"}[<5m>])
            )
        """,
        "Bytes per second that a compute port sends.",
    ),
    Record(
        "rails",
        PORT_WAIT,
        """
            max by (instance, device, port) (
              rate(infiniband_transmit_wait_ticks_total[<5m>])
                and on (instance, device, port)
              last_over_time(infiniband_info{role="compute"}[<5m>])
            )
        """,
        "Ticks per second in which a compute port had data to send and no credit. The tick is device specific.",
    ),
    Record(
        "rails",
        HOST_RAIL,
        """
            avg by (instance, run, rail) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              port:infiniband_transmit_bytes:rate5m
            )
        """,
        "Bytes per second that the port of this rail on a host sends.",
    ),
    Record(
        "rails",
        RAIL,
        "avg by (run, rail) (instance:infiniband_transmit_bytes:rate5m)",
        "Bytes per second that a port of this rail sends, mean over the run's hosts.",
    ),
    Record(
        "rails",
        RAIL_IMBALANCE,
        """
            min by (run) (rail:infiniband_transmit_bytes:rate5m)
              /
            (quantile by (run) (0.5, rail:infiniband_transmit_bytes:rate5m) > 1000000)
              and on (run)
            (count by (run) (rail:infiniband_transmit_bytes:rate5m) > 1)
        """,
        "Traffic of the run's slowest rail over the traffic of its median rail, 1 if all rails are even. Absent "
        "with a single rail, or while the median rail sends less than 1 MB/s.",
    ),
    Record(
        "rails",
        HOST_RAIL_WAIT,
        """
            avg by (instance, run, rail) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              port:infiniband_transmit_wait_ticks:rate5m
            )
        """,
        "Ticks per second in which the port of this rail on a host had data to send and no credit. "
        "The tick is device specific: compare rails.",
    ),
    Record(
        "rails",
        RAIL_WAIT,
        "avg by (run, rail) (instance:infiniband_transmit_wait_ticks:rate5m)",
        "Ticks per second in which a port of this rail had data to send and no credit, mean over the run's hosts. "
        "The tick is device specific: compare rails.",
    ),
    Record(
        "rails",
        RAIL_WAIT_SHARE,
        """
            rail:infiniband_transmit_wait_ticks:rate5m
              / on (run) group_left ()
            (sum by (run) (rail:infiniband_transmit_wait_ticks:rate5m) > 0)
        """,
        "This rail's share of the run's credit wait. If the rails are even, it is 1 divided by the number of "
        "rails. Absent if no rail waits.",
    ),
    Record(
        "rails",
        HOST_RAIL_NOTIFICATIONS,
        """
            avg by (instance, run, rail) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              max by (instance, device, port) (rate(infiniband_congestion_notifications_handled_total[<5m>]))
            )
        """,
        "Congestion notifications per second that slowed down the port of this rail on a host. RoCE.",
    ),
    Record(
        "rails",
        RAIL_NOTIFICATIONS,
        "avg by (run, rail) (instance:infiniband_congestion_notifications:rate5m)",
        "Congestion notifications per second that slowed down a port of this rail, mean over the run's hosts. RoCE.",
    ),
    Record(
        "rails",
        HOST_RAIL_RETRANSMISSIONS,
        """
            avg by (instance, run, rail) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              max by (instance, device, port) (
                rate(infiniband_packet_sequence_errors_total[<5m>]) + rate(infiniband_local_ack_timeouts_total[<5m>])
                  or
                rate(infiniband_retransmitted_packets_total[<5m>])
              )
            )
        """,
        "Retransmissions per second of the port of this rail on a host: negative and missing acknowledgements. On EFA "
        "retransmitted packets.",
    ),
    Record(
        "rails",
        RAIL_RETRANSMISSIONS,
        "avg by (run, rail) (instance:infiniband_retransmissions:rate5m)",
        "Retransmissions per second of a port of this rail, mean over the run's hosts: negative and missing "
        "acknowledgements. On EFA retransmitted packets.",
    ),
    Record(
        "rails",
        HOST_RAIL_RETRANSMISSION_RATIO,
        """
            (instance:infiniband_retransmissions:rate5m > 0)
              / on (instance, run, rail)
            avg by (instance, run, rail) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              max by (instance, device, port) (rate(infiniband_transmit_packets_total[<5m>]))
            )
        """,
        "Retransmissions of the port of this rail on a host per packet sent. Absent if it retransmits nothing. A "
        "negative acknowledgement may cause several packets to be sent again. On EFA each packet is counted.",
    ),
    Record(
        "rails",
        RAIL_RETRANSMISSION_RATIO,
        """
            sum by (run, rail) (instance:infiniband_retransmissions:ratio)
              / on (run, rail)
            count by (run, rail) (instance:infiniband_retransmissions:rate5m)
        """,
        "Retransmissions of a port of this rail per packet sent, mean over the run's hosts. Absent if all retransmit "
        "nothing.",
    ),
)
