"""From the nodes' GPUs: power and energy of a run, and which GPUs work."""

from __future__ import annotations

from alerts.recording.record import Record, record
from alerts.recording.training import TOKENS
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

RUN_POWER = "run:gpu_energy_joules:rate5m"
TOKEN_ENERGY = "run:gpu_energy_joules_per_token:ratio_rate5m"
FLEET_GPUS = "fleet:gpu_present:count"
FLEET_ALLOCATED = "fleet:gpu_allocated:count"
FLEET_IDLE = "fleet:gpu_idle:count"


def gpu_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records on GPUs."""
    rate = settings.at_pace(settings.rate_window)
    # The ranks are the many side: two runs on one GPU, or a rank on two for the minutes after it moved, break nothing.
    # Summed over exporters as tokens are, so that a restarted or a second one weighs on both sides of joules per token.
    gpus = f'max by (run, uuid) ({m.TRAINING_RANK_INFO}{{uuid!=""}})'
    energy = f"sum by (uuid) (rate({m.GPU_ENERGY}[{rate}]))"
    present = f"group by (uuid) ({m.GPU_PRESENT} == 1)"
    held = f'{m.GPU_OWNER_INFO}{{source!~"none|unknown"}} or on (uuid) {m.TRAINING_RANK_INFO}{{uuid!=""}}'
    return (
        record(
            "detail",
            RUN_POWER,
            "Power of the run's GPUs. None unless every rank's GPU is known and measured; a "
            "GPU that two runs share counts in both.",
            f"""
            sum by (run) ({gpus} * on (uuid) group_left () {energy})
              unless on (run)
            ({gpus} unless on (uuid) {energy})
              unless on (run)
            {m.TRAINING_RANK_INFO}{{uuid=""}}
        """,
        ),
        record(
            "detail",
            TOKEN_ENERGY,
            "Energy of the run's GPUs for one token.",
            f"""
            {RUN_POWER} / ({TOKENS} > 0)
        """,
        ),
        record(
            "fleet",
            FLEET_GPUS,
            "GPUs that answer.",
            f"""
            count({present})
        """,
        ),
        record(
            "fleet",
            FLEET_ALLOCATED,
            "GPUs of those that a rank, a pod, a job or a user has.",
            f"""
            count({present} and on (uuid) ({held}))
              or
            0 * {FLEET_GPUS}
        """,
        ),
        record(
            "fleet",
            FLEET_IDLE,
            "GPUs of those that nobody has; one whose owner cannot be told is in neither.",
            f"""
            count({present} unless on (uuid) ({held}) unless on (uuid) {m.GPU_OWNER_INFO}{{source="unknown"}})
              or
            0 * {FLEET_GPUS}
        """,
        ),
    )
