"""Alerts on Xid and SXid errors, which NVIDIA's driver reports in the kernel log and over NVML.

Their group is evaluated at each scrape, because they are urgent and have few series.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

ALERTS: tuple[Alert, ...] = (
    # The time of the last Xid counts, not increase(), because the first Xid may be the first sample of its series. An
    # Xid fires for half an hour, that of a GPU that is gone for a day. NVLink 5 Xids are left out if the kernel log
    # calls all of them non-fatal. The alert continues while a page that it inhibits fires. No `for`: an Xid is a fact,
    # and the job on the GPU is lost.
    Alert(
        name="GpuXidCritical",
        group="hardware",
        severity="critical",
        identity=("host", "uuid", "xid"),
        expr="""
            max by (host, uuid, xid) (
              (
                (
                  max by (instance, uuid, xid) (
                    last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<paging_xids>"}[<30m>])
                  ) > time() - <1800_seconds>
                    or
                  max by (instance, uuid, xid) (gpu_xid_last_timestamp_seconds{xid=~"<paging_xids>"})
                    >
                  time() - <86400_seconds>
                    and on (instance, uuid)
                  instance:gpu_missing:bool
                )
                  unless on (instance, uuid, xid)
                (
                  last_over_time(gpu_xid_nvlink_errors_total[<30m>])
                    unless on (instance, uuid, xid)
                  last_over_time(gpu_xid_nvlink_errors_total{severity!="non-fatal"}[<30m>])
                )
              ) * on (instance) group_left (host) <host>
            )
              or
            group by (host, uuid, xid) (
              ALERTS{alertname="GpuXidCritical"}
                and on (host)
              ALERTS{alertname=~"<after_xid>",severity="critical",shadow=""}
            )
              or
            group by (host, uuid, xid) (
              ALERTS{alertname="GpuXidCritical"}
                and on (host)
              last_over_time(ALERTS{alertname="FlopwatchExporterDown"}[<3m>])
            )
              or
            group by (host, uuid, xid) (
              ALERTS{alertname="GpuXidCritical"}
                and on (host, uuid)
              ALERTS{alertname=~"GpuMemoryFailed",severity="critical",shadow=""}
            )
        """,
        for_="0s",
        summary="GPU cannot run jobs after an Xid",
        description=(
            "GPU"
            + each_series(
                "topk(1, max by (gpu) (last_over_time(gpu_info{uuid=%q}[<30m>])))", "$labels.uuid", " {{ .Labels.gpu }}"
            )
            + " ({{ $labels.uuid }}) of {{ $labels.host }} reported Xid {{ $labels.xid "
            + "}}<meaning_of_paging_xid>"
            + each_series(
                "group by (run, rank) (last_over_time(training_rank_info{uuid=%q}[<5m>]))",
                "$labels.uuid",
                " Rank {{ .Labels.rank }} of run {{ .Labels.run }} runs on this GPU.",
            )
        ),
    ),
    # The time of the last Xid counts, as in GpuXidCritical. No `for`: an Xid is a fact, and GpuXidRepeated waits for
    # further Xids.
    Alert(
        name="GpuXidWarning",
        group="hardware",
        severity="warning",
        identity=("host", "uuid", "xid"),
        expr="""
            group by (host, uuid, xid) (
              (
                max by (instance, uuid, xid) (
                  last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<hardware_xids>"}[<30m>])
                ) > time() - <1800_seconds>
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="0s",
        summary="GPU reported a hardware error",
        description=(
            "<gpu> reported Xid {{ $labels.xid }}<meaning_of_hardware_xid> in the last <30m>. "
            + "The GPU may continue to work, but a worse error may follow.<ranks_on_gpu>"
        ),
    ),
    # The time of the last Xid counts, as in GpuXidCritical. The alert is recorded, but sent to no receiver.
    Alert(
        name="GpuXidApplication",
        group="hardware",
        severity="info",
        identity=("host", "uuid", "xid"),
        expr="""
            group by (host, uuid, xid) (
              (
                max by (instance, uuid, xid) (
                  last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<job_xids>"}[<30m>])
                ) > time() - <1800_seconds>
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="0s",
        summary="Job caused an error on a GPU",
        description=(
            "<gpu> reported Xid {{ $labels.xid }}<meaning_of_job_xid> in the last <30m>. "
            + "The code of a job usually causes it.<ranks_on_gpu>"
        ),
    ),
    # The same application Xid in three hours of a day on one GPU alone means a hardware fault (NVIDIA). A job with a
    # bug has it on several GPUs of the node.
    Alert(
        name="GpuXidRepeated",
        group="hardware",
        severity="warning",
        identity=("host", "uuid", "xid"),
        expr="""
            max by (host, uuid, xid) (
              (
                count_over_time(
                  (
                    max by (instance, uuid, xid) (gpu_xid_last_timestamp_seconds{xid=~"<application_xids>"})
                      >
                    time() - <3600_seconds>
                  )[<1d>:<1h>]
                ) >= 3
                  unless on (instance, xid)
                (
                  count by (instance, xid) (
                    max by (instance, uuid, xid) (
                      last_over_time(gpu_xid_last_timestamp_seconds{xid=~"<application_xids>"}[<1d>])
                    ) > time() - <86400_seconds>
                  ) > 1
                )
              ) * on (instance) group_left (host) <host>
            )
        """,
        for_="0s",
        summary="GPU repeats an application error",
        description=(
            '<gpu> reported Xid {{ $labels.xid }}<meaning_of_application_xid> in {{ printf "%.0f" $value }} '
            + "different hours of the last <1d>. No other GPU of its host reported this Xid, so the GPU may be "
            + "faulty.<ranks_on_gpu>"
        ),
    ),
    # The Fabric Manager guide asks for a restart after an SXid.
    Alert(
        name="NvswitchSxid",
        group="hardware",
        severity="critical",
        identity=("host", "switch", "sxid"),
        expr="""
            group by (host, switch, sxid) (
              (
                max by (instance, switch, sxid) (last_over_time(nvlink_switch_sxid_last_timestamp_seconds[<30m>]))
                  >
                time() - <1800_seconds>
                  and on (instance, sxid)
                last_over_time(nvlink_switch_sxid_info{severity="fatal"}[<30m>])
              ) * on (instance) group_left (host) <host>
            )
              or
            group by (host, switch, sxid) (
              ALERTS{alertname="NvswitchSxid"}
                and on (host)
              ALERTS{alertname=~"GpuXidCritical|<after_xid>",severity="critical",shadow=""}
            )
              or
            group by (host, switch, sxid) (
              ALERTS{alertname="NvswitchSxid"}
                and on (host)
              last_over_time(ALERTS{alertname="FlopwatchExporterDown"}[<3m>])
            )
        """,
        for_="0s",
        summary="NVSwitch reported a fatal SXid",
        description=(
            "NVSwitch {{ $labels.switch }} of {{ $labels.host }} reported fatal SXid {{ $labels.sxid }}"
            + each_series(
                "group by (name) (last_over_time(nvlink_switch_sxid_info{sxid=%q}[<30m>]))",
                "$labels.sxid",
                " ({{ .Labels.name }})",
            )
            + ". NVLink traffic through it fails until a reset. Drain the host, then reset its GPUs and "
            + "NVSwitches.<runs_on_host>"
        ),
    ),
)
