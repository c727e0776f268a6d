"""Alerts on training runs: is it advancing, and if not, who is late or gone?"""

from __future__ import annotations

from typing import Literal

from alerts import recording
from alerts.alert import RUN_LINK, Alert, each, owner
from alerts.settings import AlertSettings
from flopwatch import catalogue as m


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on runs."""
    return (*_straggler(settings), *_down(settings))


def _straggler(settings: AlertSettings) -> tuple[Alert, ...]:
    gpu = each(f"max by (gpu) ({m.GPU_INFO}{{uuid=%q}})", ".", ", GPU {{ .Labels.gpu }}")
    place = each(
        f"max by (host, uuid) ({m.TRAINING_RANK_INFO}{{run=%q,rank=%q}})", ".Labels.run .Labels.rank",
        " on {{ .Labels.host }}{{ with .Labels.uuid }}" + gpu + " ({{ . }}){{ end }}",
    )
    culprit = each(f"{recording.LEADER}{{run=%q}}", "$labels.run",
                   "Rank {{ .Labels.rank }} of run {{ .Labels.run }}" + place + " is late. ")
    lost = each(f"%f * max({m.TRAINING_WORLD_SIZE}{{run=%q}})", "$value $labels.run",
                ", as if {{ printf \"%.1f\" .Value }} of the run's GPUs did nothing")
    description = (culprit.lstrip() + "The others wait {{ $value | humanizePercentage }} of every step for it" + lost
                   + "." + owner(settings))

    def alert(severity: Literal["critical", "warning"], threshold: float, condition: str = "") -> Alert:
        return Alert(
            "training", "TrainingStraggler", severity, ("run",),
            f"max by (run) ({recording.LEADER}) >= {threshold:g}{condition}",
            settings.at_pace(settings.straggler_for),
            "One rank of a training run makes all the others wait.", description,
            keep_firing_for=settings.at_pace(settings.straggler_keep), link=RUN_LINK,
        )

    return (
        alert("critical", settings.straggler_critical, f" and on (run) group by (run) ({recording.PAGES})"),
        alert("warning", settings.straggler_warning),
    )


def _down(settings: AlertSettings) -> tuple[Alert, ...]:
    def fact(metric: m.Metric, text: str) -> str:
        return each(f"max({metric}{{tenant=%q,run=%q}})", "$labels.tenant $labels.run",
                    text.replace("NUMBER", '{{ printf "%.0f" .Value }}'))

    description = (
        "Run {{ $labels.run }}{{ with $labels.tenant }} of {{ . }}{{ end }}"
        f" has been down for {settings.at_pace(settings.down_for)} or longer."
        + fact(m.RUN_GPUS, " NUMBER GPUs do nothing.")
        + fact(m.RUN_POSITION_STEPS, " It had reached step NUMBER.")
        + fact(m.RUN_COMMITTED_STEPS, " Its last checkpoint is of step NUMBER.")
        + owner(settings)
    )

    state, progress = settings.at_pace(settings.state_window), settings.at_pace(settings.progress_window)
    # The ledger says it, unless another ledger or the ranks themselves know better.
    down = f"""(
  max by (tenant, run) (last_over_time({m.RUN_STATE}{{state="down"}}[{state}])) == 1
    unless on (tenant, run)
  max by (tenant, run) (last_over_time({m.RUN_STATE}{{state=~"running|completed|stopped"}}[{state}])) == 1
    unless on (run)
  sum by (run) (increase({m.TRAINING_STEPS}[{progress}])) > 0
)"""

    def alert(severity: Literal["critical", "warning"], operator: str) -> Alert:
        return Alert(
            "ledger", "TrainingDown", severity, ("tenant", "run"),
            f"{down}\n  {operator} on (tenant, run)\n{recording.PAGES}",
            settings.at_pace(settings.down_for), "A training run ended without finishing and has not come back.",
            description, link=RUN_LINK,
        )

    return alert("critical", "and"), alert("warning", "unless")
