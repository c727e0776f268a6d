"""Alerts on the state of GPUs: NVML and DCGM.

`critical` means that no job can run on the GPU, or that a node lacks a GPU. A fault that a job survives is a `warning`.
A GPU whose Xid has paged is not reported again because it is also gone or needs a reset.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

_RECOVERY = {  # nvmlDeviceGpuRecoveryAction_t
    1: "reset the GPU",
    2: "reboot the host",
    3: "drain the GPUs that exchange data with it",
    4: "drain the host and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the PCIe bus above the GPU",
    7: "reboot the whole system",
}
_GPU_RECOVERY_NEEDED = (
    "<gpu> needs recovery. The driver requests that you"
    + "".join("\n{{- if eq $value " + f"{action}.0" + " }} " + text + "{{ end }}" for action, text in _RECOVERY.items())
    + "."
)

ALERTS: tuple[Alert, ...] = (
    # One error ends the process that reads the memory. The alert fires for half an hour after it, even if the counter
    # does not increase again.
    Alert(
        name="GpuEccUncorrected",
        group="gpu",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (increase(gpu_ecc_errors_total{error="uncorrected"}[<30m>]) > 0)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="0s",
        summary="GPU had uncorrectable memory errors",
        description=(
            "<gpu> had uncorrectable memory errors, which end the process that reads the memory. Errors in the last "
            + '<30m>: {{ printf "%.0f" $value }}.<ranks_on_gpu>'
        ),
    ),
    # The GPU reports this failure itself and never clears it. DCGM fails a GPU with 512 rows remapped for uncorrectable
    # errors.
    Alert(
        name="GpuMemoryFailed",
        group="gpu",
        severity="critical",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_row_remap_failure[<5m>]) == 1
                  or on (instance, uuid)
                last_over_time(gpu_sram_error_threshold_exceeded[<5m>]) == 1
                  or on (instance, uuid)
                last_over_time(gpu_remapped_rows_total{error="uncorrected"}[<5m>]) >= 512
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="0s",
        summary="GPU memory cannot be repaired",
        description=(
            "<gpu> has memory that a reset cannot repair. Have the GPU replaced."
            + each_series(
                "max(gpu_row_remap_failure{uuid=%q}) == 1",
                "$labels.uuid",
                " A memory row could not be replaced by a spare row.",
            )
            + each_series(
                "max(gpu_sram_error_threshold_exceeded{uuid=%q}) == 1",
                "$labels.uuid",
                " Its uncorrectable SRAM errors exceed the limit of the board.",
            )
            + each_series(
                'max(gpu_remapped_rows_total{uuid=%q,error="uncorrected"})',
                "$labels.uuid",
                " Memory rows replaced after uncorrectable errors: {{ .Value }} (limit: 512).",
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # A GPU that needs a reset may get it within `for`, between two jobs.
    Alert(
        name="GpuRepairPending",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_row_remap_pending[<5m>]) == 1
                  or on (instance, uuid)
                last_over_time(gpu_retired_pages_pending[<5m>]) == 1
                  or on (instance, uuid)
                last_over_time(gpu_repair_pending[<5m>]) == 1
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="GPU repair waits for a reset",
        description=(
            "<gpu> needs a reset for a repair. Until then the faulty part may fail again."
            + each_series(
                "max(gpu_row_remap_pending{uuid=%q}) == 1",
                "$labels.uuid",
                " The reset replaces faulty memory rows by spare rows.",
            )
            + each_series(
                "max(gpu_retired_pages_pending{uuid=%q}) == 1",
                "$labels.uuid",
                " The reset retires faulty memory pages.",
            )
            + each_series(
                "max by (part) (gpu_repair_pending{uuid=%q}) == 1",
                "$labels.uuid",
                " The reset repairs this part: {{ .Labels.part }}.",
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # Actions 3 and 4 ask for a drain, so the job may end first. A GPU that needs a reset may get it within `for`,
    # between two jobs.
    Alert(
        name="GpuRecoveryNeeded",
        group="gpu",
        severity="critical",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (
                (instance:gpu_recovery_action_id:max != 3 != 4)
                  unless on (instance, uuid)
                max by (instance, uuid) (
                  last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<paging_xids>"}[<5m>])
                ) > time() - <86400_seconds>
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="GPU needs recovery",
        description=_GPU_RECOVERY_NEEDED + " No job can run on the GPU until then.<ranks_on_gpu>",
    ),
    Alert(
        name="GpuRecoveryNeeded",
        group="gpu",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (
                (instance:gpu_recovery_action_id:max >= 3 <= 4)
                  unless on (instance, uuid)
                max by (instance, uuid) (
                  last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<paging_xids>"}[<5m>])
                ) > time() - <86400_seconds>
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="GPU needs recovery",
        description=_GPU_RECOVERY_NEEDED + " The present job can end first.<ranks_on_gpu>",
    ),
    # While a GPU is dead, the exporter initialises NVML at least every 240 s, which is less than `for`.
    Alert(
        name="GpuMissing",
        group="gpu",
        severity="critical",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                instance:gpu_missing:bool
                  unless on (instance, uuid)
                max by (instance, uuid) (
                  last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<paging_xids>"}[<5m>])
                ) > time() - <86400_seconds>
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="GPU does not answer",
        description=(
            "<gpu> does not answer. It reported no critical Xid in the last <1d>. Drain and reboot the "
            + "host.<ranks_on_gpu>"
        ),
    ),
    # A node without GPUs, or without a driver, has no series of a GPU. So it counts as 0, unless its driver cannot be
    # queried. While a GPU is dead, the exporter initialises NVML at least every 240 s, which is less than `for`.
    Alert(
        name="GpuTooFew",
        group="gpu",
        severity="critical",
        identity=("host",),
        expr="""
            max by (host) (
              (
                (
                  count by (instance) (group by (instance, uuid, gpu) (gpu_present or gpu_readable))
                    or on (instance)
                  0 * max by (instance) (host_expected_parts)
                    unless on (instance)
                  (flopwatch_driver_released == 1 or flopwatch_collector_success{collector=~"nvml|dcgm"} == 0)
                )
                  < on (instance)
                max by (instance) (host_expected_parts{kind="gpus"})
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="Host has fewer GPUs than expected",
        description=(
            "Host {{ $labels.host }} has {{ $value }} GPUs"
            + each_series(
                'topk(1, max by (instance) (host_expected_parts{kind="gpus"}) and on (instance) '
                + "instance:host:info{host=%q})",
                "$labels.host",
                ", but {{ .Value }} are expected",
            )
            + ". A job that requests all GPUs of the host does not start.<runs_on_host>"
        ),
    ),
    # An update of the driver takes less than `for`.
    Alert(
        name="GpuDriverNotLoaded",
        group="slow",
        severity="warning",
        identity=("host",),
        expr="""
            group by (host) (
              (max by (instance) (last_over_time(gpu_driver_loaded[<5m>])) == 0)
                * on (instance) group_left (host)
              <host>
            )
        """,
        for_="10m",
        summary="No NVIDIA driver is loaded",
        description=(
            "Host {{ $labels.host }} has GPUs in its inventory, but no NVIDIA driver is loaded. No job can use "
            + "these GPUs.<runs_on_host>"
        ),
    ),
    # Drivers before R535 call both slowdowns `thermal`. TraceML also warns of a straggler that costs 10 % of the time.
    # Window and `for` together are ten minutes. Fail-slow lasts tens of seconds or longer (FALCON).
    Alert(
        name="GpuThermalThrottling",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (
                rate(gpu_clock_event_seconds_total{reason=~"sw_thermal_slowdown|hw_thermal_slowdown|thermal"}[<5m>])
                  > 0.1
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        keep_firing_for="5m",
        summary="GPU is throttled by heat",
        description=(
            "<gpu> was throttled by heat for {{ $value | humanizePercentage }} of the last <5m>."
            + each_series(
                "max(gpu_temperature_celsius{uuid=%q})",
                "$labels.uuid",
                " Its temperature is {{ .Value }} degrees Celsius.",
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # A power cap is normal at the GPU's default limit. At a limit below 95 % of the default, which an operator set, a
    # cap for half of the time is too much.
    Alert(
        name="GpuPowerThrottling",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            max by (host, uuid) (
              (
                rate(gpu_clock_event_seconds_total{reason=~"hw_power_brake_slowdown"}[<5m>]) > 0.1
                  or on (instance, uuid)
                rate(gpu_clock_event_seconds_total{reason=~"sw_power_cap"}[<5m>]) > 0.5
                  and on (instance, uuid)
                (
                  last_over_time(gpu_power_limit_watts[<5m>])
                    <
                  0.95 * last_over_time(gpu_power_limit_default_watts[<5m>])
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        keep_firing_for="5m",
        summary="GPU is throttled by power",
        description=(
            "<gpu> was throttled by power for {{ $value | humanizePercentage }} of the last <5m>"
            + each_series(
                "max by (instance, uuid) "
                + '(rate(gpu_clock_event_seconds_total{uuid=%q,reason=~"hw_power_brake_slowdown"}[<5m>])) > 0.1',
                "$labels.uuid",
                ", because of an external power brake",
            )
            + each_series("max(gpu_power_limit_watts{uuid=%q})", "$labels.uuid", ". Its power limit is {{ .Value }} W")
            + each_series(
                "max(gpu_power_limit_default_watts{uuid=%q})",
                "$labels.uuid",
                ". The default power limit of its board is {{ .Value }} W",
            )
            + ".<ranks_on_gpu>"
        ),
    ),
    # A healthy H100 at full load keeps a margin of 15 °C or more.
    Alert(
        name="GpuHot",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_temperature_margin_celsius[<5m>])
                  < on (instance, uuid) group_left ()
                3 + max by (instance, uuid) (
                  last_over_time(gpu_temperature_limit_margin_celsius{limit="slowdown"}[<5m>])
                )
                  or on (instance, uuid)
                last_over_time(gpu_temperature_celsius[<5m>])
                  > on (instance, uuid) group_left ()
                max by (instance, uuid) (last_over_time(gpu_temperature_limit_celsius{limit="slowdown"}[<5m>])) - 3
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="5m",
        summary="GPU is close to thermal throttling",
        description=(
            "<gpu> is less than 3 degrees Celsius below the temperature at which it slows down."
            + each_series(
                "max(gpu_temperature_celsius{uuid=%q})",
                "$labels.uuid",
                " Its temperature is {{ .Value }} degrees Celsius.",
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # By design, the generation falls while a GPU is idle, but the width does not. A link that trains with few lanes may
    # train again right after. The expected lanes win over NVML's maximum, which is the card's. Cloud instances with a
    # T4 or an A10G connect 8 of its 16 lanes.
    Alert(
        name="GpuPcieDegraded",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                last_over_time(gpu_pcie_width_lanes[<5m>])
                  < on (instance) group_left ()
                max by (instance) (last_over_time(host_expected_parts{kind="pcie_lanes_per_gpu"}[<5m>]))
                  or on (instance, uuid)
                last_over_time(gpu_pcie_width_lanes[<5m>]) < last_over_time(gpu_pcie_width_max_lanes[<5m>])
                  unless on (instance)
                last_over_time(host_expected_parts{kind="pcie_lanes_per_gpu"}[<5m>])
                  or on (instance, uuid)
                max_over_time(gpu_pcie_generation[<5m>]) < last_over_time(gpu_pcie_generation_max[<5m>])
                  and on (instance, uuid)
                min_over_time(gpu_utilization_ratio[<5m>]) > 0.5
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="10m",
        summary="PCIe link of a GPU is degraded",
        description=(
            "<gpu> has a slow PCIe link. Lanes in use:"
            + each_series("max(gpu_pcie_width_lanes{uuid=%q})", "$labels.uuid", " {{ .Value }}")
            + each_series("max(gpu_pcie_width_max_lanes{uuid=%q})", "$labels.uuid", " (possible: {{ .Value }})")
            + each_series(
                'max(host_expected_parts{kind="pcie_lanes_per_gpu"} and on (instance) gpu_info{uuid=%q})',
                "$labels.uuid",
                ". Expected lanes: {{ .Value }}",
            )
            + each_series("max(gpu_pcie_generation{uuid=%q})", "$labels.uuid", ". PCIe generation: {{ .Value }}")
            + each_series("max(gpu_pcie_generation_max{uuid=%q})", "$labels.uuid", " (possible: {{ .Value }})")
            + ". Copies between host and GPU take longer.<ranks_on_gpu>"
        ),
    ),
    # DCGM's limit is 1e-12 replays per bit, which is 31 per minute at generation 5 with 16 lanes. A lane of generation
    # 3 carries 8 Gb/s, and each generation doubles that. A single error stays in the window for five minutes, a wrong
    # reading does not.
    Alert(
        name="GpuPcieErrors",
        group="slow",
        severity="warning",
        identity=("host", "uuid"),
        expr="""
            group by (host, uuid) (
              (
                rate(gpu_pcie_replays_total[<5m>])
                  >
                0.001 * 2 ^ last_over_time(gpu_pcie_generation_max[<5m>])
                  *
                last_over_time(gpu_pcie_width_max_lanes[<5m>])
                  or on (instance, uuid)
                increase(gpu_pcie_errors_total{error=~"fatal|non_fatal"}[<5m>]) > 0
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="1m",
        keep_firing_for="10m",
        summary="PCIe link of a GPU has errors",
        description=(
            "<gpu> has errors on its PCIe link. Copies between host and GPU may be slower or fail."
            + each_series(
                "60 * max by (instance, uuid) (rate(gpu_pcie_replays_total{uuid=%q}[<5m>]))",
                "$labels.uuid",
                ' Retransmitted packets per minute: {{ printf "%.0f" .Value }}.',
            )
            + each_series(
                'max by (error) (increase(gpu_pcie_errors_total{uuid=%q,error=~"fatal|non_fatal"}[<5m>])) > 0',
                "$labels.uuid",
                ' Errors of type {{ .Labels.error }} in the last <5m>: {{ printf "%.0f" .Value }}.',
            )
            + "<ranks_on_gpu>"
        ),
    ),
    # Where a GPU's activity is not measured, utilisation shows whether anything ran at all. Loading, compiling and a
    # slow file system are over within `for`.
    Alert(
        name="GpuIdleAllocated",
        group="slow",
        severity="warning",
        identity=("run",),
        expr="sum by (run) (host:gpu_idle_allocated:count)",
        for_="30m",
        summary="Allocated GPUs are idle",
        description=(
            "Run {{ $labels.run }} has ranks on GPUs that have been idle for <30m>. Number of these GPUs: {{ $value "
            + "}}. The first hosts, with their idle GPUs:\n{{- range $i, $gpus := "
            + "printf `max by (host) (host:gpu_idle_allocated:count{run=%q})` $labels.run | query | sortByLabel "
            + '"host" }}{{ if lt $i 3 }}{{ if $i }},{{ end }} {{ $gpus.Labels.host }} '
            + "({{ $gpus.Value }}){{ end }}{{ end }}."
        ),
    ),
)
