"""Recording rules on hangs: the step a run is in, whether it is overdue, and which rank the others wait for.

Times of ranks are compared with the clock of Prometheus. FlopwatchClockWrong fires if the two clocks differ.

Declared time is the difference of two instants, not increase(), because each rank has seven declared activities. A new
series counts in full. Declared time is certain to be in the open step only if the last step ended within the window.
The largest bucket of step durations ends at 180 s, so longer steps are judged by their mean. GPU activity is compared
with the same GPU's past, because a run that lost ranks draws less power.

Each sign has one vote, split among the ranks it points at. A sign that points at more than half of the ranks counts for
none of them and casts doubt on the other signs. Joins begin with the ranks of runs that hang, which are nearly always
zero.
"""

from __future__ import annotations

from alerts.recording.record import Record

DECLARED = "run:training_declared_seconds:delta5m"
OPEN_STEP = "run:training_open_step_began_seconds:max"
OVERDUE_STEP = "run:training_overdue_step_began_seconds:max"
STEPPING = "run:training_step:max_rate1m"
COLLECTIVES = "run:training_collective_started:bool_1m"
TENSOR_MOST = "run:gpu_tensor_active:max_rate1m"
TENSOR_LEAST = "run:gpu_tensor_active:min_rate1m"
TENSOR_KNOWN = "run:gpu_tensor_active:known"
POWER_SHARE = "run:gpu_power:share_of_1h"
POWER_KNOWN = "run:gpu_power:known"
SENT = "run:infiniband_transmit_bytes:max_rate1m"
GONE = "rank:training_gone:bool"
SIGN = "rank:training_hang:sign"
SUSPECT_RANK = "rank:training_hang:suspect"
SUSPECT_HOST = "host:training_hang:suspect"
# Text of each sign, to follow "rank N is".
SIGNS = {
    "gone": "gone and no longer reporting",
    "silent": "silent: the process is stopped, or holds Python's interpreter lock (GIL)",
    "blocked": "stopped, or stuck in the kernel (storage or a driver)",
    "data": "waiting for the next batch",
    "sequence": "missing in the collective that the others wait in",
    "gpu": "on a GPU that is lost or reported a critical Xid",
    "idle": "on an idle GPU, while the GPUs of most other ranks are busy",
    "computing": "on a GPU that still computes, while the GPUs of the other ranks wait",
    "link": "on a host with a port that is down",
}


RECORDS: tuple[Record, ...] = (
    Record(
        "training",
        DECLARED,
        """
            max by (run) (
              sum by (run, rank) (training_activity_seconds_total{activity!~"step|data_stall"})
                -
              sum by (run, rank) (training_activity_seconds_total{activity!~"step|data_stall"} offset <5m>) >= 0
                or
              sum by (run, rank) (training_activity_seconds_total{activity!~"step|data_stall"})
            )
        """,
        "Seconds of the last five minutes that a rank spent in activities other than steps and waiting for data, "
        "highest of the run's ranks.",
    ),
    Record(
        "training",
        OPEN_STEP,
        """
            (
              max by (run) (training_last_step_timestamp_seconds)
                + on (run)
              run:training_declared_seconds:delta5m
            )
              unless on (run)
            (
              run:training_declared_seconds:delta5m > 0.5
                and on (run)
              max by (run) (training_last_step_timestamp_seconds) < time() - <300_seconds>
            )
        """,
        "Start of the run's open step, as Unix time: the end of its newest step, plus the time declared since, for "
        "instance for a checkpoint. Absent while it is unknown.",
    ),
    Record(
        "training",
        OVERDUE_STEP,
        """
            run:training_open_step_began_seconds:max < time() - <60_seconds>
              and on (run)
            (
              run:training_open_step_began_seconds:max
                + on (run)
              3 * (
                histogram_quantile(0.99, sum by (run, le) (increase(training_step_duration_seconds_bucket[<1h>])))
                  >= on (run)
                sum by (run) (increase(training_step_duration_seconds_sum[<1h>]))
                  /
                sum by (run) (increase(training_step_duration_seconds_count[<1h>]))
                  or on (run)
                sum by (run) (increase(training_step_duration_seconds_sum[<1h>]))
                  /
                sum by (run) (increase(training_step_duration_seconds_count[<1h>]))
              ) < time()
                or on (run)
              run:training_open_step_began_seconds:max < time() - <3600_seconds>
            )
        """,
        "Start of the run's open step, as Unix time, if the step is overdue: older than 60 s and than three times "
        "the p99 of the last hour's steps, or older than an hour. Absent if it is not.",
    ),
    Record(
        "training",
        STEPPING,
        'max by (run) (sum by (run, rank) (rate(training_activity_seconds_total{activity="step"}[<1m>])))',
        "Share of the last minute that a rank spent in steps, highest of the run's ranks.",
    ),
    Record(
        "training",
        COLLECTIVES,
        "max by (run) (changes(training_collective_sequence_number[<1m>]) > bool 0)",
        "1 if a rank of the run started a collective in the last minute, 0 if no rank did. Absent where "
        "collectives are not counted.",
    ),
    Record(
        "training",
        TENSOR_MOST,
        """
            max by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (rate(gpu_tensor_active_seconds_total[<1m>]))
            )
        """,
        "Share of the last minute that tensor cores were active, for the run's busiest GPU.",
    ),
    Record(
        "training",
        TENSOR_LEAST,
        """
            min by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (rate(gpu_tensor_active_seconds_total[<1m>]))
            )
        """,
        "Share of the last minute that tensor cores were active, for the run's least busy GPU.",
    ),
    Record(
        "training",
        TENSOR_KNOWN,
        """
            count by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (rate(gpu_tensor_active_seconds_total[<1m>]))
            )
              / on (run)
            count by (run) (group by (run, rank) (training_rank_info))
        """,
        "Share of the run's ranks whose GPU reports its tensor activity.",
    ),
    Record(
        "training",
        POWER_SHARE,
        """
            avg by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (max_over_time(gpu_power_watts[<1m>]))
            )
              /
            avg by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (max_over_time(gpu_power_watts[<1h>:<5m>]))
            )
        """,
        "Highest power of the run's GPUs in the last minute over their highest power in the last hour, mean over "
        "the GPUs.",
    ),
    Record(
        "training",
        POWER_KNOWN,
        """
            count by (run) (
              max by (run, uuid) (training_rank_info)
                * on (uuid) group_left ()
              max by (uuid) (max_over_time(gpu_power_watts[<1m>]))
            )
              / on (run)
            count by (run) (group by (run, rank) (training_rank_info))
        """,
        "Share of the run's ranks whose GPU reports its power.",
    ),
    Record(
        "training",
        SENT,
        """
            max by (run) (
              port:infiniband_rail:info
                * on (instance, device, port) group_left ()
              max by (instance, device, port) (rate(infiniband_transmit_data_bytes_total[<1m>]))
            )
        """,
        "Bytes per second sent in the last minute, for the busiest port of the run's rails.",
    ),
    Record(
        "verdict",
        GONE,
        """
            group by (run, rank, host) (
              (
                last_over_time(training_rank_info[<3m>])
                  or on (run, rank)
                last_over_time(rank:training_gone:bool[<5m>])
                  or on (run, rank)
                training_rank_info offset <5m>
                  or on (run, rank)
                training_rank_info offset <20m>
              )
                unless on (run, rank)
              last_over_time(training_rank_info[<1m>])
                and on (run)
              run:training_overdue_step_began_seconds:max
                and on (run)
              (
                count by (run) (group by (run, rank) (training_rank_info))
                  <
                (
                  max by (run) (training_world_size)
                    or on (run)
                  max by (run) (last_over_time(training_world_size[<20m>]))
                )
              )
            )
        """,
        "1 for a rank that existed before the overdue step of its run and no longer reports. Absent if the run "
        "has as many ranks as it declares.",
    ),
    Record(
        "verdict",
        SIGN,
        """
            (
              label_replace(group by (run, rank) (rank:training_gone:bool), "sign", "gone", "", "")
                or
              label_replace(
                group by (run, rank) (
                  sum by (run, rank) (
                    rate(training_activity_seconds_total{activity=~"step|data_stall"}[<1m>])
                      and on (run)
                    run:training_overdue_step_began_seconds:max
                  ) < 0.1
                    unless on (run, rank)
                  max by (run, rank) (host_process_blocked_seconds) > <30_seconds>
                ),
                "sign", "silent", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  sum by (run, rank) (
                    rate(training_activity_seconds_total{activity="data_stall"}[<1m>])
                      and on (run)
                    run:training_overdue_step_began_seconds:max
                  ) > 0.5
                ),
                "sign", "data", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  max by (run, rank) (
                    training_collective_sequence_number and on (run) run:training_overdue_step_began_seconds:max
                  )
                    == on (run) group_left ()
                  (
                    min by (run) (
                      max by (run, rank) (
                        training_collective_sequence_number
                          and on (run)
                        run:training_overdue_step_began_seconds:max
                      )
                    )
                      <
                    max by (run) (
                      max by (run, rank) (
                        training_collective_sequence_number
                          and on (run)
                        run:training_overdue_step_began_seconds:max
                      )
                    )
                  )
                ),
                "sign", "sequence", "", ""
              )
                or
              label_replace(
                group by (run, rank) (max by (run, rank) (host_process_blocked_seconds) > <30_seconds>),
                "sign", "blocked", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  max by (run, rank) (
                    (training_rank_info{uuid!=""} and on (run) run:training_overdue_step_began_seconds:max)
                      and on (uuid)
                    (
                      gpu_present == 0
                        or
                      max by (instance, uuid, xid) (gpu_xid_last_timestamp_seconds) > time() - <600_seconds>
                        and on (instance, xid)
                      gpu_xid_info{severity=~"critical|fatal"}
                    )
                  )
                ),
                "sign", "gpu", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  max by (run, rank, uuid) (
                    training_rank_info{uuid!=""} and on (run) run:training_overdue_step_began_seconds:max
                  )
                    * on (uuid) group_left ()
                  max by (uuid) (max_over_time(gpu_utilization_ratio[<1m>])) < 0.01
                    and on (run)
                  quantile by (run) (0.5,
                    max by (run, rank, uuid) (
                      training_rank_info{uuid!=""} and on (run) run:training_overdue_step_began_seconds:max
                    ) * on (uuid) group_left () max by (uuid) (gpu_utilization_ratio)
                  ) > 0.5
                ),
                "sign", "idle", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  (
                    max by (run, rank, uuid) (
                      training_rank_info{uuid!=""} and on (run) run:training_overdue_step_began_seconds:max
                    )
                      * on (uuid) group_left ()
                    max by (uuid) ((min_over_time(gpu_power_watts[<1m>]) > 0.5 * gpu_power_limit_watts))
                      unless on (uuid)
                    (
                      count by (uuid) (
                        group by (run, uuid) (
                          training_rank_info
                            and on (uuid)
                          (training_rank_info and on (run) run:training_overdue_step_began_seconds:max)
                        )
                      ) > 1
                    )
                  )
                    > on (run) group_left ()
                  1.5 * quantile by (run) (0.5,
                    max by (run, rank, uuid) (
                      training_rank_info{uuid!=""} and on (run) run:training_overdue_step_began_seconds:max
                    )
                      * on (uuid) group_left ()
                    max by (uuid) (max_over_time(gpu_power_watts[<1m>]))
                  )
                ),
                "sign", "computing", "", ""
              )
                or
              label_replace(
                group by (run, rank) (
                  max by (run, rank) (
                    (training_rank_info and on (run) run:training_overdue_step_began_seconds:max)
                      and on (instance)
                    (
                      infiniband_port_state_id < 4
                        and on (instance, device, port)
                      port:infiniband_was_active:bool
                    )
                  )
                ),
                "sign", "link", "", ""
              )
            )
              * on (run, rank) group_left (host)
            topk by (run, rank) (1,
              max by (run, rank, host) (
                training_rank_info and on (run) run:training_overdue_step_began_seconds:max
              )
                or on (run, rank)
              rank:training_gone:bool
            )
        """,
        "1 for each sign that the other ranks of a run with an overdue step wait for this rank: gone, silent, "
        "blocked, data, sequence, gpu, idle, computing, link.",
    ),
    Record(
        "verdict",
        SUSPECT_RANK,
        """
            sum by (run, rank, host) (
              (
                rank:training_hang:sign
                  / on (run, sign) group_left ()
                (
                  count by (run, sign) (rank:training_hang:sign)
                    <= on (run) group_left ()
                  0.5 * (
                    max by (run) (training_world_size)
                      or on (run)
                    max by (run) (last_over_time(training_world_size[<20m>]))
                  )
                )
              )
            )
              / on (run) group_left ()
            (count by (run) (count by (run, sign) (rank:training_hang:sign)) + 0.2) > 0.5
        """,
        "Share of the signs of a hang that point at this rank. Absent unless above one half. Each sign has one "
        "vote, split among the ranks it points at, and a fifth of a vote is doubt.",
    ),
    Record(
        "verdict",
        SUSPECT_HOST,
        """
            sum by (run, host) (
              (
                rank:training_hang:sign{host!=""}
                  / on (run, sign) group_left ()
                (
                  count by (run, sign) (rank:training_hang:sign)
                    <= on (run) group_left ()
                  0.5 * (
                    max by (run) (training_world_size)
                      or on (run)
                    max by (run) (last_over_time(training_world_size[<20m>]))
                  )
                )
              )
            )
              / on (run) group_left ()
            (count by (run) (count by (run, sign) (rank:training_hang:sign)) + 0.2) > 0.5
              unless on (run)
            rank:training_hang:suspect
              and on (run)
            (
              count by (run) (
                (
                  group by (run, host) (
                    training_rank_info and on (run) run:training_overdue_step_began_seconds:max
                  )
                    or
                  group by (run, host) (rank:training_hang:sign)
                )
              ) > 1
            )
        """,
        "Share of the signs of a hang that point at the ranks on this host, with votes as in "
        "rank:training_hang:suspect. Absent unless above one half, if a rank is a suspect, or if the run has a "
        "single host.",
    ),
)
