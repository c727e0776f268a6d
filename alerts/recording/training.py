"""Recording rules on training: MFU, step time, tokens, waits and stragglers.

A rank that moved, or an exporter that restarted, leaves two series of one rank within a window. So rates are taken
before sums, and both sides of a ratio are summed over the same series before they are divided. A join takes the host
from its "one" side, where topk leaves one series per rank or instance. An exporter serves one host, so `instance` has
as many values as there are hosts.
"""

from __future__ import annotations

from alerts.recording.record import Record

HOST = "instance:host:info"
NODE_RUN = "instance:training_run:info"
RUN_MFU = "run:training_mfu:ratio_rate5m"
RUN_MFU_1H = "run:training_mfu:ratio_1h"
HOST_MFU = "host:training_mfu:ratio_rate5m"
RANK_MFU = "rank:training_mfu:ratio_rate5m"
RUN_HFU = "run:training_hfu:ratio_rate5m"
FLEET_MFU = "fleet:training_mfu:ratio_rate5m"
STEP_DURATION = "run:training_step_duration_seconds:mean5m"
TOKENS = "run:training_tokens:rate5m"
PAGES = "run:training_page:bool"
WAIT = "rank:training_collective_wait:ratio"
COMMUNICATION = "run:training_collective_wait:ratio"
CONFIRMED = "rank:training_straggler:confirmed"
STRAGGLER_LOST = "run:training_straggler_lost:ratio"
STRAGGLER_LOST_1H = "run:training_straggler_lost:ratio_1h"
STRAGGLER_LOST_1D = "run:training_straggler_lost:ratio_1d"
STRAGGLER_LOST_7D = "run:training_straggler_lost:ratio_7d"


RECORDS: tuple[Record, ...] = (
    Record(
        "place",
        HOST,
        """
            group by (instance, host) (
              topk by (instance) (1,
                count by (instance, host) (last_over_time(gpu_info[<5m>]))
                  or on (instance)
                count by (instance, host) (last_over_time(infiniband_info[<5m>]))
                  or on (instance)
                count by (instance, host) (last_over_time(training_rank_info[<5m>]))
              )
            )
        """,
        "1 with the name of the host that an exporter serves.",
    ),
    Record(
        "place",
        NODE_RUN,
        "group by (instance, run) (training_rank_info)",
        "1 for each run that has ranks on an exporter's host.",
    ),
    Record(
        "training",
        RUN_MFU,
        """
            sum by (run) (rate(training_model_flops_total[<5m>]))
              /
            (sum by (run) (rate(training_capacity_flops_total[<5m>])) > 0)
              and on (run)
            (
              count by (run) (sum by (run, rank) (rate(training_capacity_flops_total[<5m>])) > 0)
                ==
              max by (run) (last_over_time(training_world_size[<2m>]))
            )
              unless on (run)
            training_mfu_unavailable == 1
        """,
        "Model FLOPs over the dense peak of the run's GPUs during steps. Absent unless every rank has a peak.",
    ),
    Record(
        "detail",
        RANK_MFU,
        """
            sum by (run, rank) (rate(training_model_flops_total[<5m>]))
              /
            (sum by (run, rank) (rate(training_capacity_flops_total[<5m>])) > 0)
              and on (run)
            run:training_mfu:ratio_rate5m
        """,
        "Model FLOPs over dense peak of one rank. Absent if the rank's run has no MFU.",
    ),
    Record(
        "detail",
        HOST_MFU,
        """
            sum by (run, host) (
              sum by (instance, run) (rate(training_model_flops_total[<5m>]))
                * on (instance) group_left (host)
              instance:host:info
            )
              /
            (
              sum by (run, host) (
                sum by (instance, run) (rate(training_capacity_flops_total[<5m>]))
                  * on (instance) group_left (host)
                instance:host:info
              ) > 0
            )
              and on (run)
            run:training_mfu:ratio_rate5m
        """,
        "Model FLOPs over dense peak of a run's ranks on a host. Absent if the run has no MFU.",
    ),
    Record(
        "detail",
        RUN_HFU,
        """
            sum by (run) (rate(training_hardware_flops_total[<5m>]))
              /
            (sum by (run) (rate(training_capacity_flops_total[<5m>])) > 0)
              and on (run)
            (
              count by (run) (sum by (run, rank) (rate(training_hardware_flops_total[<5m>])) > 0)
                ==
              max by (run) (last_over_time(training_world_size[<2m>]))
            )
              and on (run)
            run:training_mfu:ratio_rate5m
        """,
        "FLOPs executed, including recomputation, over dense peak. Absent unless every rank declared its "
        "recomputation and the run has an MFU.",
    ),
    Record(
        "detail",
        FLEET_MFU,
        """
            sum(run:training_mfu:ratio_rate5m * on (run) max by (run) (last_over_time(training_world_size[<2m>])))
              /
            sum (
              max by (run) (last_over_time(training_world_size[<2m>])) and on (run) run:training_mfu:ratio_rate5m
            )
        """,
        ("MFU of the runs that have one, weighted by their ranks."),
    ),
    Record(
        "training",
        STEP_DURATION,
        """
            sum by (run) (rate(training_step_duration_seconds_sum[<5m>]))
              /
            (sum by (run) (rate(training_step_duration_seconds_count[<5m>])) > 0)
        """,
        "Mean duration of an optimizer step, in seconds.",
    ),
    Record(
        "training", TOKENS, "sum by (run) (rate(training_tokens_total[<5m>]))", ("Tokens per second of the whole run.")
    ),
    Record(
        "training",
        PAGES,
        """
            group by (tenant, run) (
              max by (tenant, run) (last_over_time(run_gpus[<5m>])) >= <page_min_gpus>
                or
              max by (tenant, run) (last_over_time(training_run_info{page="always"}[<1d>]))
                or
              run:training_page:bool and on (tenant, run) last_over_time(run_state{state="down"}[<5m>]) == 1
                or
              max by (tenant, run) (last_over_time(training_run_info[<1d>]))
                and on (run)
              max by (run) (last_over_time(training_world_size[<5m>])) >= <page_min_gpus>
                unless on (tenant, run)
              last_over_time(run_gpus[<5m>])
            )
        """,
        "1 for a run whose alerts may page, because the run is large or its training script asks for pages "
        '(page="always").',
    ),
    Record(
        "training",
        WAIT,
        """
            (
              sum by (run, rank) (rate(training_collective_wait_seconds_total[<2m>]))
                /
              (
                sum by (run, rank) (rate(training_measured_step_seconds_total[<2m>]))
                  and
                sum by (run, rank) (increase(training_measured_steps_total[<2m>])) >= 5
              )
            )
              * on (run, rank) group_left (pp)
            (
              topk by (run, rank) (1, max by (run, rank, pp) (last_over_time(training_rank_info[<4_scrapes>])))
                or on (run, rank)
              group by (run, rank) (last_over_time(training_measured_steps_total[<4_scrapes>]))
            )
        """,
        "Share of measured step time that a rank waits for others, with its pipeline coordinate if known. Absent "
        "for a rank that is no longer scraped.",
    ),
    Record(
        "training",
        STRAGGLER_LOST,
        'max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"})',
        "Share of each step lost to a straggler, 0 without one. Absent if waits are not measured.",
    ),
    Record(
        "training",
        CONFIRMED,
        """
            max by (run, rank, host, group, ranks) (run_straggler_info)
              * on (run) group_left ()
            (max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"}) >= <straggler_warning>)
        """,
        "Share of each step that the run loses to its late ranks, by rank, if it is at least 10 %.",
    ),
    # Of the same hour as run:run_effective_mfu:ratio_1h. Both then differ by the time outside steps and repeated steps.
    Record(
        "windows",
        RUN_MFU_1H,
        "avg_over_time(run:training_mfu:ratio_rate5m[<1h>])",
        "MFU, mean over the part of the last hour in which the run had one.",
    ),
    Record(
        "windows",
        STRAGGLER_LOST_1H,
        "avg_over_time(run:training_straggler_lost:ratio[<1h>])",
        "Share of each step lost to a straggler, mean over the measured time of the last hour.",
    ),
    Record(
        "windows",
        STRAGGLER_LOST_1D,
        "avg_over_time(run:training_straggler_lost:ratio[<1d>])",
        "Share of each step lost to a straggler, mean over the measured time of the last day.",
    ),
    Record(
        "windows",
        STRAGGLER_LOST_7D,
        "avg_over_time(run:training_straggler_lost:ratio[<7d>:<10m>])",
        "Share of each step lost to a straggler, mean over the measured time of the last seven days.",
    ),
    Record(
        "detail",
        COMMUNICATION,
        """
            avg by (run) (rank:training_collective_wait:ratio)
              and on (run)
            (
              count by (run) (rank:training_collective_wait:ratio)
                ==
              max by (run) (last_over_time(training_world_size[<4_scrapes>]))
            )
        """,
        "Share of step time that ranks wait in collectives, mean over all ranks: the cost of communication and "
        "imbalance. Absent unless every rank is measured.",
    ),
)
