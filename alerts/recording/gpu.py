"""Recording rules on GPUs: power and energy of a run, and which GPUs are in use.

Joins have the ranks on their many side. So they still work if two runs share a GPU, or if a rank has two GPUs for some
minutes after it moved. Energy is summed over exporters in the same way as tokens. So a restarted or a second exporter
affects both sides of joules per token.
"""

from __future__ import annotations

from alerts.recording.record import Record

RUN_POWER = "run:gpu_energy_joules:rate5m"
TOKEN_ENERGY = "run:gpu_energy_joules_per_token:ratio_rate5m"
FLEET_GPUS = "fleet:gpu_present:count"
FLEET_ALLOCATED = "fleet:gpu_allocated:count"
FLEET_IDLE = "fleet:gpu_idle:count"


RECORDS: tuple[Record, ...] = (
    Record(
        "detail",
        RUN_POWER,
        """
            sum by (run) (
              max by (run, uuid) (training_rank_info{uuid!=""})
                * on (uuid) group_left ()
              sum by (uuid) (rate(gpu_energy_joules_total[<5m>]))
            )
              unless on (run)
            (
              max by (run, uuid) (training_rank_info{uuid!=""})
                unless on (uuid)
              sum by (uuid) (rate(gpu_energy_joules_total[<5m>]))
            )
              unless on (run)
            training_rank_info{uuid=""}
        """,
        "Power of the run's GPUs in watts. A GPU that two runs share counts in both. Absent unless every rank's "
        "GPU is known and measured.",
    ),
    Record(
        "detail",
        TOKEN_ENERGY,
        "run:gpu_energy_joules:rate5m / (run:training_tokens:rate5m > 0)",
        "Energy of the run's GPUs per token, in joules.",
    ),
    Record("fleet", FLEET_GPUS, "count(group by (uuid) (gpu_present == 1))", ("GPUs that answer.")),
    Record(
        "fleet",
        FLEET_ALLOCATED,
        """
            count (
              group by (uuid) (gpu_present == 1)
                and on (uuid)
              (gpu_owner_info{source!~"none|unknown"} or on (uuid) training_rank_info{uuid!=""})
            )
              or
            0 * fleet:gpu_present:count
        """,
        "GPUs that answer and that a rank, a pod, a job or a user has.",
    ),
    Record(
        "fleet",
        FLEET_IDLE,
        """
            count (
              group by (uuid) (gpu_present == 1)
                unless on (uuid)
              (gpu_owner_info{source!~"none|unknown"} or on (uuid) training_rank_info{uuid!=""})
                unless on (uuid)
              gpu_owner_info{source="unknown"}
            )
              or
            0 * fleet:gpu_present:count
        """,
        "GPUs that answer and have no owner. A GPU whose owner is unknown counts neither as idle nor as allocated.",
    ),
)
