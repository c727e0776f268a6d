"""Recording rules on training: MFU, step time, tokens, waits and stragglers.

What concerns a whole run is the ledger's. What only exporters report is recorded by host, as `instance:`, and put
together from these records, so that each rule has a tier (alerts/tiers.py).

A rank that moved, or an exporter that restarted, leaves two series of one rank within a window. So rates are taken
before sums, and both sides of a ratio are summed over the same series before they are divided. A join takes the host
from its "one" side, where topk leaves one series per rank or instance. An exporter serves one host, so `instance` has
as many values as there are hosts.
"""

from __future__ import annotations

from alerts.recording.record import Record

HOST = "instance:host:info"
HOST_LAST = "instance:host:last30m"
EXPORTER = "instance:flopwatch_exporter:info"
NODE_RUN = "instance:training_run:info"
RUN_MFU = "run:training_mfu:ratio_rate5m"
RUN_MFU_1H = "run:training_mfu:ratio_1h"
RANK_MFU = "rank:training_mfu:ratio_rate5m"
RUN_HFU = "run:training_hfu:ratio_rate5m"
FLEET_MFU = "fleet:training_mfu:ratio_rate5m"
HOST_STEPS = "instance:training_steps:increase2m"
HOST_TOKENS = "instance:training_tokens:rate5m"
HOST_NOT_FINITE = "instance:training_nonfinite:ratio_5m"
HOST_LAST_STEP = "instance:training_last_step_timestamp_seconds:max"
HOST_DATA_STALL = "instance:training_data_stall:ratio_rate5m"
HOST_LOSS_SPIKES = "instance:training_loss_spikes:increase30m"
HOST_NO_MFU = "instance:training_mfu_unavailable:count"
HOST_DECLARED_MFU = "instance:training_declared_mfu:ratio_rate5m"
HOST_TENSOR_ACTIVE = "instance:gpu_tensor_active:ratio_rate5m"
HOST_PEAK_OVERRIDE = "instance:training_peak_override:bool"
HOST_START = "instance:training_start_timestamp_seconds:min"
HOST_CLOCK = "instance:gpu_sm_clock_hertz:median"
HOST_WORLD_SIZE = "instance:training_world_size:max"
GPU_IDLE_ALLOCATED = "host:gpu_idle_allocated:count"
RUN_STATE = "run:run_state:max"
STANDS_STILL = "run:run_stands_still:bool"
HOST_RUN = "host:training_run:info"
STEP_DURATION = "run:training_step_duration_seconds:mean5m"
STEPS = "run:training_steps:rate5m"
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
    # The current host has priority over the last known one, so that a renamed host has its new name at once. A GPU
    # without a name has a host, too. An exporter is new for two minutes, because its host is recorded once a minute.
    Record(
        "place",
        HOST_LAST,
        """
            topk by (instance) (1,
              instance:host:info
                or on (instance)
              last_over_time(instance:host:info[<30m>])
                or on (instance)
              group by (instance) (flopwatch_build_info offset <2m>)
            )
        """,
        "1 with the host that an exporter serves, or served in the last half hour, for alerts. The label is empty "
        "while no host is known.",
    ),
    Record(
        "place", EXPORTER, "group by (job, instance) (flopwatch_collector_success)", "1 for an exporter that answers."
    ),
    Record(
        "place",
        NODE_RUN,
        "group by (instance, run) (training_rank_info)",
        "1 for each run that has ranks on an exporter's host.",
    ),
    Record("place", HOST_RUN, "group by (host, run) (training_rank_info)", "1 for each run that has ranks on a host."),
    Record(
        "training",
        RUN_MFU,
        """
            sum by (run) (max by (tenant, run) (rate(run_model_flops_total[<5m>])))
              /
            (sum by (run) (max by (tenant, run) (rate(run_step_capacity_flops_total[<5m>]))) > 0)
        """,
        "Model FLOPs over the dense peak of the run's GPUs during steps. Absent unless every rank has a peak.",
    ),
    Record(
        "detail",
        RANK_MFU,
        """
            sum by (instance, run, rank) (rate(training_model_flops_total[<5m>]))
              /
            (sum by (instance, run, rank) (rate(training_capacity_flops_total[<5m>])) > 0)
              unless on (instance, run, rank)
            training_mfu_unavailable == 1
        """,
        "Model FLOPs over dense peak of one rank, also if other ranks of its run have no MFU.",
    ),
    Record(
        "detail",
        RUN_HFU,
        """
            sum by (run) (max by (tenant, run) (rate(run_hardware_flops_total[<5m>])))
              /
            (sum by (run) (max by (tenant, run) (rate(run_step_capacity_flops_total[<5m>]))) > 0)
        """,
        "FLOPs executed, including recomputation, over dense peak. Absent unless every rank declared its "
        "recomputation and has a peak.",
    ),
    Record(
        "detail",
        HOST_WORLD_SIZE,
        "max by (instance, run) (last_over_time(training_world_size[<2m>]))",
        "Ranks in the run, as a rank on this exporter's host reports it. One rank of a run does.",
    ),
    Record(
        "detail",
        FLEET_MFU,
        """
            sum(run:training_mfu:ratio_rate5m * on (run) max by (run) (instance:training_world_size:max))
              /
            sum(max by (run) (instance:training_world_size:max) and on (run) run:training_mfu:ratio_rate5m)
        """,
        ("MFU of the runs that have one, weighted by their ranks."),
    ),
    Record(
        "training",
        STEP_DURATION,
        """
            sum by (run) (max by (tenant, run) (rate(run_step_seconds_total[<5m>])))
              /
            (sum by (run) (max by (tenant, run) (rate(run_steps_total[<5m>]))) > 0)
        """,
        "Mean duration of an optimizer step, in seconds.",
    ),
    Record(
        "detail",
        STEPS,
        "sum by (run) (max by (tenant, run) (rate(run_steps_total[<5m>])))",
        "Optimizer steps per second of the run. Repeated steps count.",
    ),
    Record(
        "training",
        TOKENS,
        "sum by (run) (max by (tenant, run) (rate(run_tokens_total[<5m>])))",
        "Tokens per second of the whole run.",
    ),
    Record(
        "detail",
        HOST_TOKENS,
        "sum by (instance, run) (rate(training_tokens_total[<5m>]))",
        "Tokens per second of the run's ranks on a host.",
    ),
    Record(
        "training",
        HOST_STEPS,
        "max by (instance, run) (increase(training_steps_total[<2m>]))",
        "Optimizer steps of the run in the last two minutes, as the ranks on a host count them.",
    ),
    # A record of its own, because it reads many series and hardly changes.
    Record(
        "means",
        HOST_START,
        "time() - max by (instance, run) (sum by (instance, run, rank) (training_activity_seconds_total))",
        "Start of the oldest process of the run on a host, as Unix time.",
    ),
    Record(
        "training",
        HOST_LAST_STEP,
        """
            max by (instance, run) (training_last_step_timestamp_seconds)
              or on (instance, run)
            instance:training_start_timestamp_seconds:min
        """,
        "Time of the last optimizer step of the run's ranks on a host, as Unix time, or before their first that of "
        "their start.",
    ),
    Record(
        "training",
        HOST_NOT_FINITE,
        """
            sum by (instance, run, value) (increase(training_nonfinite_total[<5m>]))
              / on (instance, run) group_left ()
            max by (instance, run) (sum by (instance, run, rank) (increase(training_steps_total[<5m>])))
        """,
        "Share of the last five minutes' steps whose loss or gradient norm was not finite, by the rank that reports "
        "them.",
    ),
    Record(
        "means",
        HOST_DATA_STALL,
        """
            max by (instance, run) (
              sum by (instance, run, rank) (rate(training_activity_seconds_total{activity="data_stall"}[<5m>]))
                /
              sum by (instance, run, rank) (rate(training_activity_seconds_total{activity=~"step|data_stall"}[<5m>]))
            )
        """,
        "Share of step time that the rank on a host waits for its next batch, of the rank that waits most.",
    ),
    Record(
        "detail",
        HOST_LOSS_SPIKES,
        "max by (instance, run) (increase(training_loss_spikes_total[<30m>]))",
        "Spikes of the loss in the last half hour, by the rank that reports them.",
    ),
    Record(
        "detail",
        HOST_NO_MFU,
        "count by (instance, run, reason) (training_mfu_unavailable == 1)",
        "Ranks on a host that have no MFU, by reason.",
    ),
    Record(
        "detail",
        HOST_PEAK_OVERRIDE,
        'group by (instance, run) (training_run_info{peak_source=~"override.*"})',
        "1 for a run that declared the peak of its GPUs itself.",
    ),
    Record(
        "means",
        HOST_DECLARED_MFU,
        """
            sum by (instance, run) (rate(training_model_flops_total[<5m>]))
              / on (instance, run)
            sum by (instance, run) (max by (instance, run, rank) (training_peak_flops_per_second))
        """,
        "Model FLOPs over dense peak of a run's ranks on a host, over the wall clock.",
    ),
    Record(
        "means",
        HOST_TENSOR_ACTIVE,
        """
            avg by (instance, run) (
              max by (instance, run, uuid) (training_rank_info)
                * on (instance, uuid) group_left ()
              max by (instance, uuid) (
                rate(gpu_tensor_active_seconds_total[<5m>]) / rate(gpu_profiled_seconds_total[<5m>])
              )
            )
              and on (instance, run)
            (
              count by (instance, run) (
                max by (instance, run, uuid) (training_rank_info)
                  * on (instance, uuid) group_left ()
                max by (instance, uuid) (gpu_profiled_seconds_total)
              )
                == on (instance, run)
              count by (instance, run) (group by (instance, run, rank) (training_rank_info))
            )
        """,
        "Share of time in which the tensor cores of a run's GPUs on a host are active. Absent unless each rank has a "
        "measured GPU of its own.",
    ),
    Record(
        "means",
        HOST_CLOCK,
        """
            quantile by (instance, run) (0.5,
              training_rank_info
                * on (instance, uuid) group_left ()
              max by (instance, uuid) (gpu_sm_clock_hertz)
            )
        """,
        "Clock of the streaming multiprocessors in Hz, median of the run's GPUs on a host.",
    ),
    Record(
        "means",
        GPU_IDLE_ALLOCATED,
        """
            count by (host, run) (
              group by (host, run, uuid) (
                last_over_time(training_rank_info{uuid!=""}[<5m>])
                  and on (instance, uuid)
                (
                  rate(gpu_sm_active_seconds_total[<5m>]) / rate(gpu_profiled_seconds_total[<5m>]) < 0.01
                    or on (instance, uuid)
                  max_over_time(gpu_utilization_ratio[<5m>]) < 0.01
                )
              )
            )
        """,
        "GPUs on a host that ranks of a run have, but that do no work.",
    ),
    Record(
        "training",
        RUN_STATE,
        "max by (tenant, run, state) (last_over_time(run_state[<5m>]))",
        "1 for the state of a run, by any ledger.",
    ),
    Record(
        "verdicts",
        STANDS_STILL,
        """
            group by (run) (
              max by (run) (run_hang_seconds)
                or on (run)
              max by (run) (last_over_time(run_state{state="down"}[<5m>])) == 1
            )
              unless on (run)
            run_state{state=~"completed|stopped"} == 1
        """,
        "1 for a run that hangs or is down.",
    ),
    Record(
        "verdicts",
        PAGES,
        """
            group by (tenant, run) (
              max by (tenant, run) (last_over_time(run_gpus[<5m>])) >= <page_min_gpus>
                or
              max by (tenant, run) (last_over_time(run_page[<5m>])) == 1
                or
              run:training_page:bool and on (tenant, run) last_over_time(run_state{state="down"}[<5m>]) == 1
            )
        """,
        "1 for a run whose alerts may page, because the run is large or its training script asks for pages "
        '(page="always").',
    ),
    Record(
        "waits",
        WAIT,
        """
            max by (instance, run, rank, pp) (
              rate(training_collective_wait_seconds_total[<2m>])
                /
              (
                rate(training_measured_step_seconds_total[<2m>])
                  and
                increase(training_measured_steps_total[<2m>]) >= 5
              )
                * on (instance, run, rank) group_left (pp)
              (
                topk by (instance, run, rank) (1, last_over_time(training_rank_info[<4_scrapes>]))
                  or on (instance, run, rank)
                group by (instance, run, rank) (last_over_time(training_measured_steps_total[<4_scrapes>]))
              )
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
        "waits",
        COMMUNICATION,
        """
            avg by (run) (rank:training_collective_wait:ratio)
              and on (run)
            (count by (run) (rank:training_collective_wait:ratio) == max by (run) (instance:training_world_size:max))
        """,
        "Share of step time that ranks wait in collectives, mean over all ranks: the cost of communication and "
        "imbalance. Absent unless every rank is measured.",
    ),
)
