"""Alerts on the links of InfiniBand, RoCE and EFA ports, from sysfs.

An alert on a port is `critical` if a run that pages has ranks on the node and communicates over the port. The other
alerts are warnings. A slow or lossy port appears in the run as a straggler, which pages by its cost.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_port, each_series

_INFINIBAND_PORT_DOWN = (
    "<port>:"
    + each_port(
        "last_over_time(infiniband_port_state_id{<of_port>}[<5m>]) < 4 and on (instance, device, port) "
        + "port:infiniband_was_active:bool{<of_port>}",
        " Its state is {{ .Value }} (4 is active).",
    )
    + each_port("last_over_time(infiniband_port_present{<of_port>}[<5m>]) == 0", " It is missing in /sys.")
    + "<gpus_at_port><runs_on_host>"
)

ALERTS: tuple[Alert, ...] = (
    # Ten symbol errors in five minutes are 120 an hour, the rate at which a link is to be replaced. Port state 4 is
    # active, 5 active-defer.
    Alert(
        name="InfinibandLinkErrors",
        group="fabric",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                increase(infiniband_symbol_errors_total[<5m>]) > 10
                  or
                increase(infiniband_link_downed_total[<5m>]) > 0
                  or
                (port:infiniband_inactive:bool or port:infiniband_missing:bool)
                  and on (instance)
                flopwatch_build_info
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="1m",
        keep_firing_for="10m",
        summary="InfiniBand link has errors or is down",
        description=(
            "<port>:"
            + each_port(
                "increase(infiniband_symbol_errors_total{<of_port>}[<5m>]) > 10",
                ' {{ printf "%.0f" .Value }} symbol errors in <5m>.',
            )
            + each_port(
                "increase(infiniband_link_downed_total{<of_port>}[<5m>]) > 0", " The link went down in the last <5m>."
            )
            + each_port(
                "infiniband_port_state_id{<of_port>} < 4 and on (instance, device, port) "
                + "port:infiniband_was_active:bool{<of_port>}",
                " Its state is {{ .Value }} (4 is active).",
            )
            + each_port("infiniband_port_present{<of_port>} == 0", " It is missing in /sys.")
            + "<gpus_at_port>"
            + each_series(
                "group by (run) (training_rank_info{host=%q})",
                "$labels.host",
                " Run {{ .Labels.run }} has ranks on this host.",
            )
        ),
    ),
    # State 4 is active, 5 active-defer. A job continues without a storage or management port. A switch that restarts
    # one port takes less than `for`. leptonai/gpud calls a longer outage a drop.
    # It is in the group `hardware`, so that RunOnFaultyHost fires before the alert of a run is sent.
    Alert(
        name="InfinibandPortDown",
        group="hardware",
        severity="critical",
        identity=("host", "device", "port"),
        expr="""
            port:infiniband_down:bool
              and on (host)
            (last_over_time(host:training_run:info[<5m>]) and on (run) run:training_page:bool)
        """,
        for_="4m",
        summary="Port is down or missing",
        description=_INFINIBAND_PORT_DOWN,
    ),
    Alert(
        name="InfinibandPortDown",
        group="hardware",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (port:infiniband_inactive:bool or port:infiniband_missing:bool)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="4m",
        summary="Port is down or missing",
        description=_INFINIBAND_PORT_DOWN,
    ),
    # No `for`: the exporter reports flapping from the third flap on, until an hour after the last one.
    Alert(
        name="InfinibandLinkFlapping",
        group="fabric",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (max by (instance, device, port) (last_over_time(infiniband_link_flapping[<5m>])) == 1)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="0s",
        summary="Link goes down and up repeatedly",
        description=(
            "<port> went down and came back at least three times within 12 h."
            + each_port("infiniband_link_flaps_total{<of_port>}", " It has flapped {{ .Value }} times in total.")
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # After a failure, a link may train at a lower rate first and again right after.
    Alert(
        name="InfinibandRateLow",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                last_over_time(infiniband_port_rate_bytes_per_second[<5m>])
                  <
                <rate_share> * last_over_time(infiniband_port_expected_rate_bytes_per_second[<5m>])
                  and on (instance, device, port)
                last_over_time(infiniband_port_state_id[<5m>]) >= 4
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="Link runs below its highest rate so far",
        description=(
            "<port>:"
            + each_port(
                "8e-9 * last_over_time(infiniband_port_rate_bytes_per_second{<of_port>}[<5m>]) < <rate_share> * 8e-9 "
                + "* last_over_time(infiniband_port_expected_rate_bytes_per_second{<of_port>}[<5m>]) and on (instance, "
                + "device, port) last_over_time(infiniband_port_state_id{<of_port>}[<5m>]) >= 4",
                ' It runs at {{ printf "%.0f" .Value }} Gb/s.'
                + each_port(
                    "8e-9 * infiniband_port_expected_rate_bytes_per_second{<of_port>}",
                    ' Its highest rate so far was {{ printf "%.0f" .Value }} Gb/s.',
                ),
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
    # NVIDIA UFM counts for twelve minutes and isolates a port at 1e-14 symbol errors per bit. At 400 Gb/s, these are
    # 2.88 errors in that window (a byte has 8 bits: 8e-14). Five recoveries per minute and ten broken packets per
    # second are NVSentinel's limits. InfinibandLinkErrors fires within `for` at higher rates, which remain in this
    # longer window for a while.
    Alert(
        name="InfinibandErrorRate",
        group="ports",
        severity="warning",
        identity=("host", "device", "port"),
        expr="""
            group by (host, device, port) (
              (
                group by (instance, device, port) (
                  rate(infiniband_symbol_errors_total[<12m>])
                    >
                  8e-14 * last_over_time(infiniband_port_rate_bytes_per_second[<5m>])
                )
                  or on (instance, device, port)
                group by (instance, device, port) (60 * rate(infiniband_link_error_recovery_total[<5m>]) > 5)
                  or on (instance, device, port)
                group by (instance, device, port) (rate(infiniband_receive_errors_total[<5m>]) > 10)
                  or on (instance, device, port)
                group by (instance, device, port) (
                  increase(infiniband_local_link_integrity_errors_total[<5m>]) > 0
                )
                  or on (instance, device, port)
                group by (instance, device, port) (
                  increase(infiniband_excessive_buffer_overrun_errors_total[<5m>]) > 0
                )
                  or on (instance, device, port)
                group by (instance, device, port) (increase(infiniband_invariant_crc_errors_total[<5m>]) > 0)
              ) * on (instance) group_left (host) <host>
            )
              unless on (host, device, port)
            ALERTS{alertname="InfinibandLinkErrors"}
        """,
        for_="2m",
        keep_firing_for="10m",
        summary="Link exceeds an error limit",
        description=(
            "<port>:"
            + each_port(
                "rate(infiniband_symbol_errors_total{<of_port>}[<12m>]) > 8e-14 * "
                + "last_over_time(infiniband_port_rate_bytes_per_second{<of_port>}[<5m>])",
                ' {{ printf "%.2g" .Value }} symbol errors a second in the last <12m> (limit: 1 in 10^14 bits).',
            )
            + each_port(
                "60 * rate(infiniband_link_error_recovery_total{<of_port>}[<5m>]) > 5",
                ' {{ printf "%.1f" .Value }} recoveries of the link a minute.',
            )
            + each_port(
                "rate(infiniband_receive_errors_total{<of_port>}[<5m>]) > 10",
                ' {{ printf "%.1f" .Value }} packets a second arrive with errors.',
            )
            + each_port(
                "increase(infiniband_local_link_integrity_errors_total{<of_port>}[<5m>]) > 0",
                ' {{ printf "%.0f" .Value }} local link integrity errors in <5m>.',
            )
            + each_port(
                "increase(infiniband_excessive_buffer_overrun_errors_total{<of_port>}[<5m>]) > 0",
                ' {{ printf "%.0f" .Value }} buffer overruns in <5m>.',
            )
            + each_port(
                "increase(infiniband_invariant_crc_errors_total{<of_port>}[<5m>]) > 0",
                ' {{ printf "%.0f" .Value }} packets corrupted in transit in <5m>.',
            )
            + "<gpus_at_port><runs_on_host>"
        ),
    ),
)
