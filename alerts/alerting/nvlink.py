"""Alerts on the NVLinks of a GPU and on their fabric."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

_NVLINK_FABRIC_UNHEALTHY = (
    "<gpu> has a problem with its NVLink fabric."
    + each_series(
        "max(gpu_fabric_state_id{uuid=%q})",
        "$labels.uuid",
        "{{ if eq .Value 1.0 }} Its registration with the fabric manager has not begun.{{ end }}"
        + "{{ if eq .Value 2.0 }} Its registration with the fabric manager does not finish.{{ end }}",
    )
    + each_series(
        "max(gpu_fabric_status_id{uuid=%q}) > 0",
        "$labels.uuid",
        " Its registration with the fabric manager failed with nvmlReturn_t {{ .Value }}.",
    )
    + each_series(
        "max(gpu_fabric_health_id{uuid=%q})",
        "$labels.uuid",
        "{{ if eq .Value 2.0 }} The fabric is unhealthy.{{ end }}{{ if eq .Value 3.0 }} The fabric "
        + "has limited capacity.{{ end }}",
    )
    + each_series(
        "max by (fault) (gpu_fabric_fault{uuid=%q}) == 1",
        "$labels.uuid",
        " The driver reports the fault {{ .Labels.fault }}.",
    )
    + "<ranks_on_gpu>"
)

ALERTS: tuple[Alert, ...] = (
    # State 0 is inactive, 3 traffic disabled. A GPU reset takes its links down for less than `for`.
    Alert(
        name="NvlinkDown",
        group="nvlink",
        severity="critical",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (
                count by (instance, uuid) (
                  max by (instance, uuid, link) (last_over_time(nvlink_link_state_id[<5m>])) == 0
                    or
                  max by (instance, uuid, link) (last_over_time(nvlink_link_state_id[<5m>])) == 3
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="2m",
        summary="NVLinks of a GPU are down",
        description=(
            "<gpu> has lost NVLinks. NVLinks that went down: {{ $value }}."
            + each_series(
                'sum(nvlink_links{uuid=%q,state=~"active|sleep"})',
                "$labels.uuid",
                " NVLinks that are up: {{ .Value }}.",
            )
            + " Collectives hang or fail.<ranks_on_gpu>"
        ),
    ),
    # Replayed or corrected data is not lost, so these errors do not count. Effective and symbol errors are judged by
    # their ratio. DCGM fails a GPU for one hard error, for 100 corrected errors per second, or for an effective bit
    # error ratio of 1e-12 (NVLink 5).
    Alert(
        name="NvlinkErrors",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                increase(nvlink_errors_total{error!~"crc|crc_data|effective|replay|symbol"}[<5m>]) > 0
                  or on (instance, uuid)
                sum by (instance, uuid) (rate(nvlink_errors_total{error=~"crc|crc_data"}[<5m>])) > 100
                  or on (instance, uuid)
                last_over_time(nvlink_effective_bit_error_ratio[<5m>]) > 1e-12
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="0s",
        keep_firing_for="10m",
        summary="NVLinks of a GPU have errors",
        description=(
            "<gpu> has errors on its NVLinks. Collectives may be slower."
            + each_series(
                "max by (error) "
                + '(increase(nvlink_errors_total{uuid=%q,error!~"crc|crc_data|effective|replay|symbol"}[<5m>])) > 0',
                "$labels.uuid",
                ' Errors of type {{ .Labels.error }} in the last <5m>: {{ printf "%.0f" .Value }}.',
            )
            + each_series(
                'sum(rate(nvlink_errors_total{uuid=%q,error=~"crc|crc_data"}[<5m>])) > 0',
                "$labels.uuid",
                ' Corrected errors per second: {{ printf "%.0f" .Value }}.',
            )
            + each_series(
                "max(nvlink_effective_bit_error_ratio{uuid=%q})",
                "$labels.uuid",
                ' Bit error ratio after correction: {{ printf "%.1e" .Value }} (limit: 1e-12).',
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # Registration with the fabric manager takes a minute or two after a boot. State 3 is completed, 1 and 2 are before
    # that. Health 2 is unhealthy, 3 limited capacity.
    Alert(
        name="NvlinkFabricUnhealthy",
        group="nvlink",
        severity="critical",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_fabric_state_id[<5m>]) == 1
                  or on (instance, uuid)
                last_over_time(gpu_fabric_state_id[<5m>]) == 2
                  or on (instance, uuid)
                last_over_time(gpu_fabric_status_id[<5m>]) > 0
                  or on (instance, uuid)
                last_over_time(gpu_fabric_health_id[<5m>]) == 2
                  or on (instance, uuid)
                last_over_time(gpu_fabric_fault{fault=~"access_timeout|incorrect_configuration|route_unhealthy"}[<5m>])
                  == 1
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="NVLink fabric of a GPU is unhealthy",
        description=_NVLINK_FABRIC_UNHEALTHY,
    ),
    Alert(
        name="NvlinkFabricUnhealthy",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_fabric_health_id[<5m>]) == 3
                  or on (instance, uuid)
                last_over_time(
                  gpu_fabric_fault{fault=~"degraded_bandwidth|manager_disconnected|no_partition|route_recovery"}[<5m>]
                ) == 1
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="NVLink fabric of a GPU is degraded",
        description=_NVLINK_FABRIC_UNHEALTHY,
    ),
)
