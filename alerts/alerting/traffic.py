"""Alerts on the traffic of InfiniBand, RoCE and EFA ports: loss, congestion, rails and configuration."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_port

ALERTS: tuple[Alert, ...] = (
    # The limits per second are NVSentinel's. A job that ends or loses a peer makes such errors for seconds.
    Alert(
        name="InfinibandPacketLoss",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (rate(infiniband_local_ack_timeouts_total[<5m>]) > 1)
                  or on (instance, device, port)
                group by (instance, device, port) (rate(infiniband_slow_restarts_total[<5m>]) > 10)
                  or on (instance, device, port)
                group by (instance, device, port) (rate(infiniband_transmit_discards_total[<5m>]) > 100)
                  or on (instance, device, port)
                group by (instance, device, port) (rate(infiniband_receive_discards_total[<5m>]) > 100)
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        keep_firing_for="10m",
        summary="Port loses packets",
        description=(
            "<port>:"
            + each_port(
                "rate(infiniband_local_ack_timeouts_total{<of_port>}[<5m>]) > 1",
                ' {{ printf "%.1f" .Value }} acknowledgements a second time out.',
            )
            + each_port(
                "rate(infiniband_slow_restarts_total{<of_port>}[<5m>]) > 10",
                ' {{ printf "%.1f" .Value }} slow restarts a second after loss.',
            )
            + each_port(
                "rate(infiniband_transmit_discards_total{<of_port>}[<5m>]) > 100",
                ' {{ printf "%.1f" .Value }} packets a second are dropped before sending.',
            )
            + each_port(
                "rate(infiniband_receive_discards_total{<of_port>}[<5m>]) > 100",
                ' {{ printf "%.1f" .Value }} packets a second are dropped on arrival.',
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # If more than one packet in twenty is marked, queues are full all the time. Ticks of waiting have no unit and are
    # no loss by themselves. So a port is compared with the median of the node's compute ports. It must wait more than 4
    # times as long and send less than 90 % of their traffic. An incast at a checkpoint or at the start of a job takes
    # less than `for`.
    Alert(
        name="InfinibandCongestion",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (
                  rate(infiniband_congestion_marked_packets_total[<5m>])
                    /
                  rate(infiniband_receive_packets_total[<5m>]) > 0.05
                )
                  or on (instance, device, port)
                (
                  port:infiniband_transmit_wait_ticks:rate5m
                    > on (instance) group_left ()
                  4 * quantile by (instance) (0.5, port:infiniband_transmit_wait_ticks:rate5m)
                )
                  and on (instance, device, port)
                (
                  port:infiniband_transmit_bytes:rate5m
                    < on (instance) group_left ()
                  0.9 * quantile by (instance) (0.5, port:infiniband_transmit_bytes:rate5m)
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="15m",
        summary="Port is congested",
        description=(
            "<port>:"
            + each_port(
                "rate(infiniband_congestion_marked_packets_total{<of_port>}[<5m>]) / "
                + "rate(infiniband_receive_packets_total{<of_port>}[<5m>]) > 0.05",
                " {{ .Value | humanizePercentage }} of the packets that it receives carry a congestion mark.",
            )
            + each_port(
                "port:infiniband_transmit_wait_ticks:rate5m{<of_port>} > on (instance) group_left () "
                + "4 * quantile by (instance) (0.5, port:infiniband_transmit_wait_ticks:rate5m{instance=%[3]q}) "
                + "and on (instance) (port:infiniband_transmit_bytes:rate5m{<of_port>} < on (instance) group_left () "
                + "0.9 * quantile by (instance) (0.5, port:infiniband_transmit_bytes:rate5m{instance=%[3]q}))",
                " It waits for credits over 4 times as long as the median of the host's compute ports, and sends less "
                + "than 90 % of their median.",
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # Pauses are how priority flow control works, and short ones cost nothing. A port that is paused for a tenth of the
    # time can send at most 90 % of its rate. A host that pauses its switch for so long does not take packets fast
    # enough, and the switch then pauses others.
    Alert(
        name="RocePaused",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              group by (instance, device, port) (rate(infiniband_pause_seconds_total[<5m>]) > 0.1)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="10m",
        summary="RoCE port is paused",
        description=(
            "<port>:"
            + each_port(
                'rate(infiniband_pause_seconds_total{<of_port>,direction="received"}[<5m>]) > 0.1',
                " Its switch keeps it from sending for {{ .Value | humanizePercentage }} of the time.",
            )
            + each_port(
                'rate(infiniband_pause_seconds_total{<of_port>,direction="sent"}[<5m>]) > 0.1',
                " It pauses its switch for {{ .Value | humanizePercentage }} of the time, because it does not take "
                + "packets fast enough.",
            )
            + "<runs_on_host>"
        ),
    ),
    # In a collective, rails carry equal shares. Rails below 100 MB/s are not in a collective. A checkpoint uses some
    # rails only.
    Alert(
        name="RailImbalance",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                port:infiniband_transmit_bytes:rate5m
                  / on (instance) group_left ()
                (quantile by (instance) (0.5, port:infiniband_transmit_bytes:rate5m) > 100000000) < 0.5
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="10m",
        summary="One rail carries less traffic than the others",
        description=(
            "<port>:"
            + each_port(
                "port:infiniband_transmit_bytes:rate5m{<of_port>} / on (instance) group_left () "
                + "(quantile by (instance) (0.5, port:infiniband_transmit_bytes:rate5m{instance=%[3]q}) > 1e+08) < 0.5",
                " It sends {{ .Value | humanizePercentage }} of the median of the host's compute ports.",
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # On a lossless fabric, no packets arrive out of sequence. A wrong configuration lasts longer than `for`.
    Alert(
        name="RoceMisconfigured",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (
                  increase(infiniband_congestion_notifications_ignored_total[<5m>]) > 0
                )
                  or on (instance, device, port)
                group by (instance, device, port) (
                  rate(infiniband_congestion_marked_packets_total[<5m>]) > 0
                    and on (instance, device, port)
                  rate(infiniband_congestion_notifications_sent_total[<5m>]) == 0
                )
                  or on (instance, device, port)
                group by (instance, device, port) (
                  rate(infiniband_packet_sequence_errors_total[<5m>]) > 1
                    and on (instance, device, port)
                  last_over_time(infiniband_info{link_layer="Ethernet"}[<5m>])
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="10m",
        summary="RoCE port is not configured as lossless",
        description=(
            "<port>:"
            + each_port(
                "increase(infiniband_congestion_notifications_ignored_total{<of_port>}[<5m>]) > 0",
                " It ignores congestion notifications: DCQCN is off.",
            )
            + each_port(
                "rate(infiniband_congestion_marked_packets_total{<of_port>}[<5m>]) > 0 and on "
                + "(instance, device, port) "
                + "rate(infiniband_congestion_notifications_sent_total{<of_port>}[<5m>]) == 0",
                " It receives congestion-marked packets and sends no notification.",
            )
            + each_port(
                "rate(infiniband_packet_sequence_errors_total{<of_port>}[<5m>]) > 1 and on "
                + '(instance, device, port) last_over_time(infiniband_info{<of_port>,link_layer="Ethernet"}[<5m>])',
                ' {{ printf "%.1f" .Value }} packets a second arrive out of sequence: priority flow control is off, or '
                + "does not cover this traffic.",
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # The limits are impaired connections and unresponsive peers per second, and failed commands per minute. One failed
    # command stays in the window for five minutes.
    Alert(
        name="EfaErrors",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (rate(infiniband_impaired_connections_total[<5m>]) > 1)
                  or on (instance, device, port)
                group by (instance, device, port) (rate(infiniband_unresponsive_peers_total[<5m>]) > 1)
                  or on (instance, device, port)
                group by (instance, device, port) (60 * rate(infiniband_command_errors_total[<5m>]) > 10)
                  or on (instance, device, port)
                group by (instance, device, port) (increase(infiniband_commands_lost_total[<5m>]) > 0)
                  or on (instance, device, port)
                group by (instance, device, port) (increase(infiniband_keep_alives_total[<5m>]) == 0)
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="1m",
        keep_firing_for="10m",
        summary="EFA adapter or its peers have errors",
        description=(
            "<port> has EFA errors. Collectives over it may be slow or stop."
            + each_port(
                "rate(infiniband_impaired_connections_total{<of_port>}[<5m>]) > 1",
                ' Connections that became impaired per second: {{ printf "%.1f" .Value }} (limit: 1).',
            )
            + each_port(
                "rate(infiniband_unresponsive_peers_total{<of_port>}[<5m>]) > 1",
                ' Times per second that a peer did not respond: {{ printf "%.1f" .Value }} (limit: 1). The fault may '
                "be in the peer.",
            )
            + each_port(
                "60 * rate(infiniband_command_errors_total{<of_port>}[<5m>]) > 10",
                ' Failed commands per minute: {{ printf "%.1f" .Value }} (limit: 10).',
            )
            + each_port(
                "increase(infiniband_commands_lost_total{<of_port>}[<5m>]) > 0",
                " The adapter left a command uncompleted in the last <5m>.",
            )
            + each_port(
                "increase(infiniband_keep_alives_total{<of_port>}[<5m>]) == 0",
                " The adapter has sent no keep-alive in the last <5m>.",
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # The limit is NVIDIA UFM's. The sensor changes slowly, so an excess shorter than `for` is a single wrong reading.
    Alert(
        name="InfinibandTransceiverHot",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (
                  max by (instance, device, port) (
                    last_over_time(infiniband_temperature_celsius{sensor=~"Module.*"}[<5m>])
                  ) > <transceiver_celsius>
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="Transceiver is too hot",
        description=(
            "<port>:"
            + each_port(
                "max by (instance, device, port) (last_over_time("
                + 'infiniband_temperature_celsius{<of_port>,sensor=~"Module.*"}[<5m>]'
                + ")) > <transceiver_celsius>",
                " Its transceiver is at {{ .Value }} degrees Celsius (limit: <transceiver_celsius>).",
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # No `for`: a saturated counter stays saturated.
    Alert(
        name="InfinibandCounterStuck",
        group="fabric",
        severity="info",
        identity=("host", "device", "port", "counter"),
        expr="""
            group by (host, device, port, counter) (
              (max by (instance, device, port, counter) (last_over_time(infiniband_counter_saturated[<5m>])) == 1)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="0s",
        summary="Error counter of a port is saturated",
        description=(
            "Counter {{ $labels.counter }} of port {{ $labels.port }} of {{ $labels.device }} on {{ "
            + "$labels.host }} is saturated: alerts on it cannot fire until it is cleared."
        ),
    ),
)
