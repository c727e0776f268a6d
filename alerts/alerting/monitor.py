"""Alerts on the monitoring itself, and on nodes that are gone.

`up` and `prometheus_rule_evaluation_failures_total` are Prometheus' own. A target is an exporter if it served an
exporter's series while it was up, because scrape configurations can name jobs freely. The host of an exporter is known
from the GPUs that it served. The pending alert (ALERTS) keeps target and host, so that an outage longer than any window
stays the same alert.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

_NODE_LOST = (
    "Host {{ $labels.host }}"
    + each_series(
        "group by (rack, leaf) (last_over_time(host_topology_info{host=%q}[<5m>]))",
        "$labels.host",
        " (rack {{ .Labels.rack }}, leaf {{ .Labels.leaf }})",
    )
    + " does not answer, and a run with ranks there makes no progress."
    + each_series(
        "count by (run) (count by (run, rank) (last_over_time(training_rank_info{host=%q}[<1h>])))",
        "$labels.host",
        " Run {{ .Labels.run }}"
        + each_series(
            "max(last_over_time(run_gpus{run=%q}[<5m>]))", ".Labels.run", ' of {{ printf "%.0f" .Value }} GPUs'
        )
        + ' has {{ printf "%.0f" .Value }} of its ranks there.',
    )
)

ALERTS: tuple[Alert, ...] = (
    # A rolling update of the DaemonSet, or the last minute of a reboot, takes less than `for`.
    Alert(
        name="FlopwatchExporterDown",
        group="monitor",
        severity="warning",
        identity=("host", "instance", "job"),
        expr="""
            max by (host, instance, job) (
              (
                up == 0
                  and on (job, instance)
                (last_over_time(instance:flopwatch_exporter:info[<5m>]) or ALERTS{alertname="FlopwatchExporterDown"})
              )
                + on (instance) group_left (host)
              topk by (instance) (1,
                ALERTS{alertname="FlopwatchExporterDown"} or on (instance) instance:host:info
              )
                or on (job, instance)
              (
                up == 0
                  and on (job, instance)
                (last_over_time(instance:flopwatch_exporter:info[<5m>]) or ALERTS{alertname="FlopwatchExporterDown"})
              )
            )
        """,
        for_="3m",
        summary="Exporter does not answer",
        description=(
            "Exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} does not answer "
            + "Prometheus. GPUs, ports and ranks of its host are not monitored."
            + each_series(
                "group by (run) (last_over_time(training_rank_info{host=%q}[<5m>]))",
                "$labels.host",
                " Run {{ .Labels.run }} has ranks there.",
            )
        ),
    ),
    # An exporter that only crashed stops no run. So the run must hang or be down, as the ledger reports it.
    # TrainingHang is a consequence. If a host is gone, it waits for a minute (<hang>), which is longer than this `for`.
    # The pages that this one inhibits may be evaluated only once a minute, so `keep_firing_for` is two minutes.
    Alert(
        name="NodeLost",
        group="monitor",
        severity="critical",
        identity=("host",),
        expr="""
            group by (host) (
              ALERTS{alertname="FlopwatchExporterDown"}
                and on (host)
              (
                last_over_time(host:training_run:info[<5m>])
                  and on (run)
                run:run_stands_still:bool
                  and on (run)
                run:training_page:bool
              )
                or
              ALERTS{alertname="NodeLost",alertstate="firing",severity="critical"}
                and on (host)
              ALERTS{alertname="FlopwatchExporterDown"}
            )
        """,
        for_="30s",
        keep_firing_for="2m",
        summary="Host is lost and stops a run",
        description=_NODE_LOST,
    ),
    Alert(
        name="NodeLost",
        group="monitor",
        severity="warning",
        identity=("host",),
        expr="""
            group by (host) (
              ALERTS{alertname="FlopwatchExporterDown"}
                and on (host)
              (last_over_time(host:training_run:info[<5m>]) and on (run) run:run_stands_still:bool)
                or
              ALERTS{alertname="NodeLost",alertstate="firing"}
                and on (host)
              ALERTS{alertname="FlopwatchExporterDown"}
            )
        """,
        for_="30s",
        keep_firing_for="2m",
        summary="Host is lost and stops a run",
        description=_NODE_LOST,
    ),
    # While a driver is released on request, the time of the last success is old and the success is absent. A driver
    # call that hangs may return within four minutes, which is less than `for`.
    Alert(
        name="FlopwatchCollectorFailing",
        group="exporters",
        severity="warning",
        identity=("host", "instance", "collector"),
        expr="""
            max by (host, instance, collector) (
              (
                flopwatch_collector_success == 0
                  or
                flopwatch_collector_last_success_timestamp_seconds < time() - <300_seconds>
                  and
                flopwatch_collector_success
              ) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="5m",
        summary="Collector of an exporter fails",
        description=(
            "Collector {{ $labels.collector }} of exporter {{ $labels.instance }}{{ with $labels.host }} on "
            + "{{ . }}{{ end }} fails. Its series are missing."
            + each_series(
                "max by (reason) "
                + "(increase(flopwatch_collector_failures_total{instance=%q,collector=%q}[<10m>])) >= 0.5",
                "$labels.instance $labels.collector",
                ' Reads that failed for the reason {{ .Labels.reason }} in the last <10m>: {{ printf "%.0f" .Value }}.',
            )
        ),
    ),
    # An exporter that started before the driver, or a container whose devices appear late, finds the hardware within
    # `for`.
    Alert(
        name="FlopwatchExporterBlind",
        group="exporters",
        severity="warning",
        identity=("host", "instance"),
        expr="""
            max by (host, instance) (
              (count by (instance) (gpu_readable == 0)) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="5m",
        summary="Exporter has no access to some GPUs",
        description=(
            "Exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} has no access to {{ "
            + 'printf "%.0f" $value }} GPUs, so they are not monitored. The GPUs themselves may be healthy.'
        ),
    ),
    # A pod that is not scheduled or was replaced is not a target, so it has no `up`. A ledger within an exporter does
    # not count requests, and FlopwatchExporterDown covers it. A StatefulSet restarts within `for`.
    Alert(
        name="FlopwatchLedgerDown",
        group="monitor",
        severity="warning",
        identity=("instance", "job"),
        expr="""
            max by (instance, job) (
              up == 0
                and on (job, instance)
              (last_over_time(flopwatch_ledger_requests_total[<5m>]) or ALERTS{alertname="FlopwatchLedgerDown"})
                or on (job, instance)
              last_over_time(flopwatch_ledger_requests_total[<1d>])
                unless on (job, instance)
              up
                unless on (job)
              flopwatch_ledger_requests_total
            )
        """,
        for_="5m",
        summary="Ledger does not answer",
        description=(
            "Ledger {{ $labels.instance }} does not answer Prometheus. Goodput is not updated, and "
            + "TrainingDown cannot fire. Exporters keep their records until the ledger answers again."
        ),
    ),
    # No record was delivered in ten minutes. `for` is longer than that of FlopwatchLedgerDown, which inhibits this
    # alert.
    Alert(
        name="FlopwatchLedgerUnreachable",
        group="monitor",
        severity="warning",
        identity=("host", "instance"),
        expr="""
            max by (host, instance) (
              (
                sum by (instance) (increase(flopwatch_ledger_records_sent_total{outcome="failed"}[<10m>])) > 0
                  unless on (instance)
                sum by (instance) (increase(flopwatch_ledger_records_sent_total{outcome="sent"}[<10m>])) > 0
              ) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="8m",
        summary="Exporter cannot reach the ledger",
        description=(
            "Exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} has delivered no "
            + "record to the ledger in the last <10m>. The ledger counts a run as down if all ranks of the run "
            + "are on this host."
        ),
    ),
    # The ledger refuses a wrong record at each attempt. Two releases run at the same time during an upgrade, but for
    # less than `for`. `for` is longer than the window.
    Alert(
        name="FlopwatchRecordsRefused",
        group="exporters",
        severity="warning",
        identity=("host", "instance"),
        expr="""
            max by (host, instance) (
              (
                sum by (instance) (increase(flopwatch_ledger_records_sent_total{outcome="refused"}[<10m>]))
                  /
                sum by (instance) (increase(flopwatch_ledger_records_sent_total[<10m>])) > 0.01
              ) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="15m",
        summary="Records of an exporter are lost",
        description=(
            "{{ $value | humanizePercentage }} of the records of exporter {{ $labels.instance }}"
            + "{{ with $labels.host }} on {{ . }}{{ end }} were lost in the last <10m>. The ledger refused them, "
            + "or the exporter dropped them from a full spool. They are missing from goodput."
        ),
    ),
    # The same as the ledger counts it, also for exporters that are not scraped.
    Alert(
        name="FlopwatchLedgerRefuses",
        group="monitor",
        severity="warning",
        identity=("instance",),
        expr="""
            sum by (instance) (increase(flopwatch_ledger_requests_total{outcome="refused"}[<10m>]))
              /
            sum by (instance) (increase(flopwatch_ledger_requests_total[<10m>])) > 0.01
        """,
        for_="15m",
        summary="Ledger refuses requests",
        description=(
            "Ledger {{ $labels.instance }} refused {{ $value | humanizePercentage }} of the requests that it "
            + "received in the last <10m>. After HTTP 400 or 422, their records are missing from goodput. After "
            + "401, exporters send them again."
        ),
    ),
    # The last pushes of a replaced rank are refused by design, and stay in the window for ten minutes.
    Alert(
        name="FlopwatchPushRefused",
        group="exporters",
        severity="warning",
        identity=("host", "instance", "outcome"),
        expr="""
            max by (host, instance, outcome) (
              (
                sum by (instance, outcome) (
                  increase(flopwatch_otlp_pushes_total{outcome!~"accepted|partial|foreign_gpu"}[<10m>])
                )
                  / on (instance) group_left ()
                sum by (instance) (increase(flopwatch_otlp_pushes_total[<10m>])) > 0.01
              ) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="15m",
        summary="Exporter refuses pushes of training processes",
        description=(
            "Exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} refused {{ $value | "
            + "humanizePercentage }} of the pushes of training processes in the last <10m>. The outcome is {{ "
            + "$labels.outcome }}. The ranks of these processes are not monitored."
        ),
    ),
    # When a rank is replaced, two generations of its series overlap for a scrape. `for` is longer than the window.
    Alert(
        name="FlopwatchSeriesDropped",
        group="exporters",
        severity="warning",
        identity=("host", "instance", "budget"),
        expr="""
            max by (host, instance, budget) (
              (sum by (instance, budget) (increase(flopwatch_series_dropped_total[<10m>])) > 0)
                * on (instance) group_left (host)
              <host_of_exporter>
            )
        """,
        for_="15m",
        summary="Exporter exceeds its budget of series",
        description=(
            "Exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} has more series per "
            + "{{ $labels.budget }} than its budget allows. Samples that it dropped in the last <10m>: {{ "
            + 'printf "%.0f" $value }}. The series of these samples are missing.'
        ),
    ),
    # The newest success of a collector was at this scrape, so its age is the error of the clock. A collector that fails
    # has an older success for other reasons. A clock is set right after a boot, within `for`.
    Alert(
        name="FlopwatchClockWrong",
        group="exporters",
        severity="warning",
        identity=("host", "instance"),
        expr="""
            max by (host, instance) (
              (
                (
                  max by (instance) (
                    flopwatch_collector_last_success_timestamp_seconds
                      -
                    timestamp(flopwatch_collector_last_success_timestamp_seconds)
                  ) > 30
                    or
                  max by (instance) (
                    flopwatch_collector_last_success_timestamp_seconds
                      -
                    timestamp(flopwatch_collector_last_success_timestamp_seconds)
                  ) < -30
                )
                  and on (instance)
                max by (instance) (flopwatch_collector_success) == 1
              ) * on (instance) group_left (host) <host_of_exporter>
            )
        """,
        for_="5m",
        summary="Clock of a host is wrong",
        description=(
            "The clock of exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} differs "
            + 'by {{ printf "%.0f" $value }} s from the clock of Prometheus (above 0: it is ahead). Steps, Xids and '
            + "ledger records of its host have wrong times."
        ),
    ),
    # `for` is longer than the window, which holds a single failure for ten minutes, for instance one during a restart
    # of the storage.
    Alert(
        name="FlopwatchRulesFailing",
        group="monitor",
        severity="warning",
        identity=("instance", "rule_group"),
        expr="""
            sum by (instance, rule_group) (
              increase(prometheus_rule_evaluation_failures_total{rule_group=~".*flopwatch.*"}[<10m>])
            ) > 0
        """,
        for_="11m",
        summary="Prometheus fails to evaluate rules",
        description=(
            "Prometheus fails to evaluate rules of group {{ $labels.rule_group }}. Failures in the last "
            + '<10m>: {{ printf "%.0f" $value }}. Alerts of this group may not fire.'
        ),
    ),
    Alert(
        name="FlopwatchWatchdog",
        group="watchdog",
        severity="info",
        identity=(),
        expr="vector(1)",
        for_="0s",
        summary="Alerting works: this alert always fires",
        description=(
            "Prometheus evaluates rules, and Alertmanager delivers alerts. The service behind the watchdog "
            + "URL pages when this alert no longer arrives."
        ),
    ),
)
