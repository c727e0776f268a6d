"""Recording rules with long windows: goodput of a week, times to failure and recovery of a month, failing hosts.

The ledger drops the series of a run a day after its end. So sums over earlier runs read recorded series, sampled once
an hour. The increase of a sum counts from its first value in the window, or from 0 if the run began in the window.
Until the recorded series are as old as a window, the window covers the time since the first recording.

Meta found hosts that make jobs fail again and again by four signs in 28 days (arXiv:2410.21680, section IV). The signs
are different Xids, failures of jobs on one or more hosts, times out of service, and repair tickets. These rules count
the first two, because the other two belong to a scheduler. Ports that dropped and straggling ranks are added, because
they slow runs down without ending them. Each sign counts once, so that a storm of one error is one sign. An error that
ended a run counts twice, as the error and as the end.
"""

from __future__ import annotations

from textwrap import indent

from alerts.recording.record import Record

RUN_BEGAN = "run:run_start_timestamp_seconds:min"
RUN_DONE = "run:run_productive_gpu_seconds:sum"
RUN_HELD = "run:run_held_gpu_seconds:sum"
RUN_RUNNING = "run:run_running_gpu_seconds:sum"
RUN_FAILURES = "run:run_unplanned_ends:sum"
RUN_RECOVERIES = "run:run_recoveries:max"
RUN_RECOVERY = "run:run_recovery_seconds:max"
FLEET_GOODPUT_7D = "fleet:run_goodput:ratio_7d"
FLEET_MTTF = "fleet:run_gpu_seconds_to_failure:mean_30d"
FLEET_MTTR = "fleet:run_time_to_recovery_seconds:mean_30d"
HOST_SIGN = "host:sign_of_failure:bool"
HOST_ENDS = "host:run_unplanned_ends:sum"
HOST_FAULTS = "host:sign_of_failure:count_7d"
LEMON = "host:lemon:score"


def _growth(total: str, days: int) -> str:
    """Return the PromQL expression of how much the totals of all runs grew in the last `days`."""
    return f"""\
sum (
  last_over_time({total}[<{days}d>:<1h>])
    -
  (
    min_over_time({total}[<{days}d>:<1h>])
      and
    last_over_time({RUN_BEGAN}[<{days}d>:<1h>]) <= time() - <{days * 86400}_seconds>
  )
    or
  last_over_time({total}[<{days}d>:<1h>])
)"""


def _ratio(total: str, of: str, *, days: int) -> str:
    """Return the PromQL expression of the growth of one total over that of another. Absent if the latter is 0."""
    return f"{_growth(total, days)}\n  /\n(\n{indent(_growth(of, days), '  ')} > 0\n)"


RECORDS: tuple[Record, ...] = (
    Record(
        "fleet",
        RUN_BEGAN,
        "min by (tenant, run) (run_start_timestamp_seconds)",
        "Time of a run's first process start, as Unix time.",
    ),
    Record(
        "fleet",
        RUN_DONE,
        """
            sum by (tenant, run) (
              max by (tenant, run, bucket) (run_gpu_seconds_total{bucket=~"productive|generation"})
            )
        """,
        ("Productive GPU-seconds of a run."),
    ),
    Record(
        "fleet",
        RUN_HELD,
        """
            sum by (tenant, run) (max by (tenant, run, bucket) (run_gpu_seconds_total))
              and
            run:run_productive_gpu_seconds:sum
        """,
        "GPU-seconds of a run that are attributed to buckets. Absent for a run without a goodput.",
    ),
    Record(
        "fleet",
        RUN_RUNNING,
        'sum by (tenant, run) (max by (tenant, run, bucket) (run_gpu_seconds_total{bucket!~"down|queue"}))',
        ("GPU-seconds in which a run was running."),
    ),
    Record(
        "fleet",
        RUN_FAILURES,
        """
            sum by (tenant, run) (
              max by (tenant, run, status) (run_attempt_ends_total{status=~"failed|silent"})
            )
        """,
        "Unplanned ends of a run's attempts.",
    ),
    Record(
        "fleet",
        RUN_RECOVERIES,
        "max by (tenant, run) (run_recoveries_total)",
        "Recoveries of a run from unplanned ends.",
    ),
    Record(
        "fleet",
        RUN_RECOVERY,
        "max by (tenant, run) (run_recovery_seconds_total)",
        "Seconds that a run took for all its recoveries from unplanned ends.",
    ),
    Record(
        "fleet",
        FLEET_GOODPUT_7D,
        _ratio(RUN_DONE, RUN_HELD, days=7),
        "Productive GPU-seconds over all attributed GPU-seconds of the last seven days, of all runs with a goodput.",
    ),
    Record(
        "fleet",
        FLEET_MTTF,
        _ratio(RUN_RUNNING, RUN_FAILURES, days=30),
        "GPU-seconds of running per unplanned end of the last 30 days. Divided by the GPUs of a run it is its "
        "expected time to failure. Absent without an unplanned end.",
    ),
    Record(
        "fleet",
        FLEET_MTTR,
        _ratio(RUN_RECOVERY, RUN_RECOVERIES, days=30),
        "Seconds from an unplanned end to the first step above the high-water mark, mean over the recoveries of "
        "the last 30 days. Absent without a recovery.",
    ),
    Record(
        "fleet",
        HOST_SIGN,
        """
            group by (host) (
              max by (instance, uuid, xid) (
                gpu_xid_last_timestamp_seconds > time() - <900_seconds>
                  and on (instance, xid)
                gpu_xid_info{severity=~"critical|fatal"}
              ) * on (instance) group_left (host) instance:host:info
            )
              or
            group by (host) (instance:gpu_missing:bool * on (instance) group_left (host) instance:host:info)
              or
            group by (host) (
              (port:infiniband_inactive:bool or port:infiniband_missing:bool)
                * on (instance) group_left (host)
              instance:host:info
            )
              or
            group by (host) (last_over_time(instance:host:info[<15m>]) unless on (host) instance:host:info)
        """,
        "1 for a host with a critical Xid in the last quarter of an hour, a missing GPU or port, or an exporter that "
        "does not answer.",
    ),
    Record(
        "fleet",
        HOST_ENDS,
        """
            group by (run, host) (
              last_over_time(instance:training_run:info[<15m>])
                * on (instance) group_left (host)
              topk by (instance) (1, last_over_time(instance:host:info[<15m>]))
            )
              * on (run) group_left ()
            (
              sum by (run) (last_over_time(run:run_unplanned_ends:sum[<5m>]))
                >
              sum by (run) (last_over_time(run:run_unplanned_ends:sum[<5m>] offset <15m>))
            )
              and on (host)
            host:sign_of_failure:bool
        """,
        "Unplanned ends of a run so far, for each of its hosts that had a sign of failure at the latest end. "
        "Present for a quarter of an hour after that end.",
    ),
    Record(
        "fleet",
        HOST_FAULTS,
        """
            (
              count by (host) (
                group by (host, uuid, xid) (
                  max by (instance, uuid, xid) (
                    gpu_xid_last_timestamp_seconds > time() - <604800_seconds>
                      and on (instance, xid)
                    gpu_xid_info{severity=~"critical|fatal"}
                  ) * on (instance) group_left (host) instance:host:info
                )
              )
                or
              0 * group by (host) (instance:host:info)
            )
              +
            (
              count by (host) (
                (
                  (
                    max by (instance, device, port) (infiniband_link_outages_total)
                      -
                    max by (instance, device, port) (infiniband_link_outages_total offset <7d>)
                  ) > 0
                ) * on (instance) group_left (host) instance:host:info
              )
                or
              0 * group by (host) (instance:host:info)
            )
        """,
        "Number of different critical Xids per GPU of a host, and of its ports that dropped, in the last seven days.",
    ),
    Record(
        "fleet",
        LEMON,
        """
            (
              sum by (host) (changes(host:run_unplanned_ends:sum[<7d>]) + 1)
                or
              0 * max by (host) (host:sign_of_failure:count_7d)
            )
              + on (host)
            (
              count by (host) (
                group by (host, run, rank) (last_over_time(rank:training_straggler:confirmed{host!=""}[<7d>]))
              )
                or
              0 * max by (host) (host:sign_of_failure:count_7d)
            )
              + on (host)
            max by (host) (host:sign_of_failure:count_7d)
        """,
        "Number of signs in the last seven days that a host makes runs fail: unplanned ends with a sign of "
        "failure, different critical Xids per GPU, straggling ranks, and ports that dropped.",
    ),
)
