"""Recording rules on GPUs: power and energy of a run, and which GPUs are in use.

Joins have the ranks on their many side. So they still work if two runs share a GPU, or if a rank has two GPUs for some
minutes after it moved. Energy is summed over exporters in the same way as tokens. So a restarted or a second exporter
affects both sides of joules per token.
"""

from __future__ import annotations

from alerts.recording.record import Record

GPU_MISSING = "instance:gpu_missing:bool"
GPU_RECOVERY = "instance:gpu_recovery_action_id:max"
GPU_FAULT = "host:training_gpu_fault:bool"
HOST_POWER = "host:gpu_energy_joules:rate5m"
HOST_GPUS = "host:gpu_present:count"
HOST_ALLOCATED = "host:gpu_allocated:count"
HOST_IDLE = "host:gpu_idle:count"
RUN_POWER = "run:gpu_energy_joules:rate5m"
TOKEN_ENERGY = "run:gpu_energy_joules_per_token:ratio_rate5m"
STEP_ENERGY = "run:gpu_energy_joules_per_step:ratio_rate5m"
FLEET_GPUS = "fleet:gpu_present:count"
FLEET_ALLOCATED = "fleet:gpu_allocated:count"
FLEET_IDLE = "fleet:gpu_idle:count"


RECORDS: tuple[Record, ...] = (
    Record(
        "signs",
        GPU_FAULT,
        """
            group by (host, run) (
              last_over_time(training_rank_info[<10m>])
                and on (host, uuid)
              (
                ALERTS_FOR_STATE{alertname=~"<gpu_causes>",severity="critical",shadow="",uuid!=""}
                  and
                min_over_time(ALERTS_FOR_STATE[<40m>]) > time() - <1800_seconds>
              )
            )
        """,
        "1 for a run with a rank on a GPU whose critical alert, pending or firing, began in the last half hour.",
    ),
    Record(
        "gpu",
        GPU_MISSING,
        "group by (instance, uuid) (max by (instance, uuid) (last_over_time(gpu_present[<5m>])) == 0)",
        "1 for a GPU that was there and does not answer.",
    ),
    Record(
        "gpu",
        GPU_RECOVERY,
        "max by (instance, uuid) (last_over_time(gpu_recovery_action_id[<5m>]) > 0)",
        "Recovery that the driver requests for a GPU. Absent if it requests none.",
    ),
    # A rank whose GPU is unknown or not measured makes the sum infinite.
    Record(
        "energy",
        HOST_POWER,
        """
            sum by (host, run) (
              max by (host, run, uuid) (training_rank_info{uuid!=""})
                * on (host, uuid) group_left ()
              sum by (host, uuid) (
                rate(gpu_energy_joules_total[<5m>]) * on (instance) group_left (host) instance:host:info
              )
                or on (host, run, uuid)
              max by (host, run, uuid) (training_rank_info) * Inf
            ) < Inf
        """,
        "Power of the run's GPUs on a host in watts. Absent unless the GPU of every rank there is known and measured.",
    ),
    Record(
        "energy",
        RUN_POWER,
        """
            sum by (run) (host:gpu_energy_joules:rate5m)
              unless on (run)
            (host:training_run:info unless on (host, run) host:gpu_energy_joules:rate5m)
        """,
        "Power of the run's GPUs in watts. A GPU that two runs share counts in both. Absent unless every rank's "
        "GPU is known and measured.",
    ),
    Record(
        "energy",
        TOKEN_ENERGY,
        "run:gpu_energy_joules:rate5m / (run:training_tokens:rate5m > 0)",
        "Energy of the run's GPUs per token, in joules.",
    ),
    Record(
        "energy",
        STEP_ENERGY,
        "run:gpu_energy_joules:rate5m / (run:training_steps:rate5m > 0)",
        "Energy of the run's GPUs per optimizer step, in joules. Time outside steps counts.",
    ),
    Record(
        "fleet",
        HOST_GPUS,
        """
            count by (host) (
              group by (host, uuid) ((gpu_present == 1) * on (instance) group_left (host) instance:host:info)
            )
        """,
        "GPUs of a host that answer.",
    ),
    Record(
        "fleet",
        HOST_ALLOCATED,
        """
            count by (host) (
              group by (host, uuid) ((gpu_present == 1) * on (instance) group_left (host) instance:host:info)
                and on (host, uuid)
              (
                group by (instance, uuid) (
                  gpu_owner_info{source!~"none|unknown"} or on (instance, uuid) training_rank_info{uuid!=""}
                ) * on (instance) group_left (host) instance:host:info
              )
            )
        """,
        "GPUs of a host that answer and that a rank, a pod, a job or a user has. Absent without any.",
    ),
    Record(
        "fleet",
        HOST_IDLE,
        """
            count by (host) (
              group by (host, uuid) ((gpu_present == 1) * on (instance) group_left (host) instance:host:info)
                unless on (host, uuid)
              (
                group by (instance, uuid) (
                  gpu_owner_info{source!="none"} or on (instance, uuid) training_rank_info{uuid!=""}
                ) * on (instance) group_left (host) instance:host:info
              )
            )
        """,
        "GPUs of a host that answer and have no owner. Absent without any.",
    ),
    Record("fleet", FLEET_GPUS, "sum(host:gpu_present:count)", "GPUs that answer."),
    Record(
        "fleet",
        FLEET_ALLOCATED,
        "sum(host:gpu_allocated:count) or 0 * fleet:gpu_present:count",
        "GPUs that answer and that a rank, a pod, a job or a user has.",
    ),
    Record(
        "fleet",
        FLEET_IDLE,
        "sum(host:gpu_idle:count) or 0 * fleet:gpu_present:count",
        "GPUs that answer and have no owner. A GPU whose owner is unknown counts neither as idle nor as allocated.",
    ),
)
