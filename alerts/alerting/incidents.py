"""Alerts that combine others: a leaf switch that is gone, maintenance, and two alerts that only inhibit others."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

ALERTS: tuple[Alert, ...] = (
    # The ports of a leaf that fails go down within one scrape. Four hosts at once are neither single cables nor single
    # nodes. `for` is shorter than that of the alerts on each host. The expression reads ALERTS of this alert, so that
    # it fires while more than one host is still cut off.
    Alert(
        name="LeafDown",
        group="monitor",
        severity="critical",
        identity=("leaf",),
        expr="""
            count by (leaf) (
              (
                (
                  max by (host) (host:infiniband_port_lost:bool)
                    or
                  group by (host) (
                    (
                      ALERTS_FOR_STATE{alertname="NodeLost"}
                        and
                      min_over_time(ALERTS_FOR_STATE[<20m>]) > time() - <600_seconds>
                    )
                  )
                )
                  unless on (host)
                ALERTS{alertname="Maintenance"}
              )
                * on (host) group_left (leaf)
              topk by (host) (1, host:host_leaf:info)
            ) >= 4
              or on (leaf)
            count by (leaf) (
              ALERTS{alertname="HostOnFaultyLeaf"}
                and on (host)
              (host:infiniband_port_down:bool or ALERTS{alertname="NodeLost"})
            ) > 1
              and on (leaf)
            ALERTS{alertname="LeafDown",alertstate="firing"}
        """,
        for_="15s",
        summary="Leaf switch is down",
        description=(
            '{{ printf "%.0f" $value }} hosts{{ with $labels.leaf }} of leaf {{ . }}{{ end }} lost a port, '
            + "or are gone, within <10m>."
            + each_series(
                "count by (run) (count by (run, rank) (last_over_time(training_rank_info[<10m>]) and on "
                + '(host) (ALERTS{alertname="HostOnFaultyLeaf",leaf=%q} and on (host) (host:infiniband_port_down:bool '
                + 'or ALERTS{alertname="NodeLost"}))))',
                "$labels.leaf",
                " Run {{ .Labels.run }}"
                + each_series(
                    "max(last_over_time(run_gpus{run=%q}[<5m>]))", ".Labels.run", ' of {{ printf "%.0f" .Value }} GPUs'
                )
                + ' has {{ printf "%.0f" .Value }} of its ranks there.',
            )
            + " Among the hosts are"
            + each_series(
                'topk(8, group by (host) (ALERTS{alertname="HostOnFaultyLeaf",leaf=%q} and on (host) ('
                + 'host:infiniband_port_down:bool or ALERTS{alertname="NodeLost"})))',
                "$labels.leaf",
                " {{ .Labels.host }}",
                by="host",
            )
            + "."
        ),
    ),
    # The last reported end of the maintenance counts while the node reboots. No `for`: the alert must fire before the
    # alerts that it inhibits are sent.
    Alert(
        name="Maintenance",
        group="monitor",
        severity="none",
        identity=("host",),
        expr="max by (host) (last_over_time(host_maintenance_until_timestamp_seconds[<1d>])) > time()",
        for_="0s",
        keep_firing_for="2m",
        summary="Host is in maintenance",
        description=(
            "Host {{ $labels.host }} is in maintenance until {{ $value | humanizeTimestamp }}. Alerts of this "
            + "host are not sent. For runs with ranks there, only alerts on training loss and on "
            + "impossible MFU are sent."
        ),
    ),
    # This alert only inhibits others. A pending LeafDown is enough, because its page names these hosts. Without a known
    # topology, the hosts that are cut off together count as one leaf. No `for`: the alert must exist before those that
    # it inhibits.
    Alert(
        name="HostOnFaultyLeaf",
        group="monitor",
        severity="none",
        identity=("host", "leaf"),
        expr="""
            group by (host, leaf) (
              (
                (
                  max by (host) (host:infiniband_port_lost:bool)
                    or
                  group by (host) (
                    (
                      ALERTS_FOR_STATE{alertname="NodeLost"}
                        and
                      min_over_time(ALERTS_FOR_STATE[<20m>]) > time() - <600_seconds>
                    )
                  )
                )
                  unless on (host)
                ALERTS{alertname="Maintenance"}
              )
                * on (host) group_left (leaf)
              topk by (host) (1, host:host_leaf:info)
                and on (leaf)
              (
                ALERTS{alertname="LeafDown",leaf!="",shadow=""}
                  or
                (
                  ALERTS_FOR_STATE{alertname="LeafDown",shadow=""}
                    and
                  min_over_time(ALERTS_FOR_STATE[<20m>]) > time() - <600_seconds>
                )
              )
                or on (host)
              ALERTS{alertname="HostOnFaultyLeaf"}
                and on (leaf)
              last_over_time(ALERTS{alertname="LeafDown",alertstate="firing",shadow=""}[<20m>])
                and on (host)
              ALERTS{alertname=~"<of_host>"}
            )
        """,
        for_="0s",
        summary="Host is affected by a faulty leaf",
        description=(
            "Host {{ $labels.host }}{{ with $labels.leaf }} of leaf {{ . }}{{ end }} lost a port or "
            + "stopped answering, and so did other hosts of its leaf. LeafDown reports these hosts. This alert holds "
            + "back NodeLost and the alerts on exporter and ports of this host. Alerts on its GPUs are still sent."
        ),
    ),
    # This alert only inhibits others. A pending alert on a GPU is enough. Its `for` is longer than that of a hang, and
    # it is sent in place of the hang. A fault explains a run for half an hour only, because a run can have other
    # troubles next to a fault that lasts for days. But if the run has stopped since then, the fault explains it until
    # twenty minutes after the fault's end. A rank without a uuid matches no GPU. No `for`: the alert must exist before
    # those that it inhibits.
    Alert(
        name="RunOnFaultyHost",
        group="causes",
        severity="none",
        identity=("host", "run"),
        expr="""
            group by (host, run) (
              last_over_time(host:training_run:info[<10m>])
                and on (host)
              ALERTS{alertname=~"<host_causes>",alertstate="firing",shadow=""}
                or on (host, run)
              last_over_time(host:training_run:info[<10m>])
                and on (host)
              (
                ALERTS_FOR_STATE{alertname=~"<part_causes>",severity="critical",shadow=""}
                  and
                min_over_time(ALERTS_FOR_STATE[<40m>]) > time() - <1800_seconds>
              )
                or on (host, run)
              host:training_gpu_fault:bool
                or on (host, run)
              (
                ALERTS_FOR_STATE{alertname="RunOnFaultyHost"}
                  > on (run) group_left ()
                (min by (run) (ALERTS_FOR_STATE{alertname=~"<stands_still>"}) - <1800_seconds>)
                  or on (host, run)
                ALERTS{alertname="RunOnFaultyHost"} and on (run) ALERTS{alertname=~"<of_run>"}
                  unless on (host)
                ALERTS{alertname=~"<host_part_and_gpu_causes>",alertstate="firing",shadow=""}
              )
                and on (host)
              (
                last_over_time(ALERTS{alertname=~"<other_causes>",alertstate="firing",shadow=""}[<20m>])
                  or on (host)
                last_over_time(ALERTS{alertname="HostOnFaultyLeaf"}[<20m>])
                  and on (leaf)
                last_over_time(ALERTS{alertname="LeafDown",alertstate="firing",shadow=""}[<20m>])
              )
            )
        """,
        for_="0s",
        summary="Run has ranks on a faulty host",
        description=(
            "Run {{ $labels.run }} has ranks on {{ $labels.host }}, and another alert reports what is wrong "
            + "there. This alert holds back the run's alerts on progress, speed, goodput and checkpoints. "
            + "Alerts on its training loss are still sent."
        ),
    ),
)
