"""Alerts on whole runs, most of them from the ledger: down, restarting, stalled, goodput and checkpoints."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series

_TRAINING_DOWN = (
    "Run {{ $labels.run }}{{ with $labels.tenant }} (tenant {{ . }}){{ end }} is down."
    + each_series(
        "max(run_open_seconds{tenant=%q,run=%q})",
        "$labels.tenant $labels.run",
        " The ledger received its last report {{ .Value | humanizeDuration }} ago.",
    )
    + each_series(
        "max by (status) (run_attempt_ends_total{tenant=%q,run=%q}) > 0",
        "$labels.tenant $labels.run",
        ' Attempts that ended as {{ .Labels.status }} since the run began: {{ printf "%.0f" .Value }}.',
    )
    + each_series(
        "max(run_gpus{tenant=%q,run=%q})", "$labels.tenant $labels.run", ' It used {{ printf "%.0f" .Value }} GPUs.'
    )
    + each_series(
        "max(run_high_water_steps{tenant=%q,run=%q})",
        "$labels.tenant $labels.run",
        ' It had reached step {{ printf "%.0f" .Value }}.',
    )
    + each_series(
        "max(run_committed_steps{tenant=%q,run=%q})",
        "$labels.tenant $labels.run",
        ' Its last durable checkpoint is of step {{ printf "%.0f" .Value }}.',
    )
    + each_series(
        "max(run_open_seconds{tenant=%[1]q,run=%[2]q}) * max(run_gpus{tenant=%[1]q,run=%[2]q}) / 3600",
        "$labels.tenant $labels.run",
        ' {{ printf "%.1f" .Value }} GPU-hours have passed since that report.',
    )
    + "<owner>"
)
_TRAINING_RESTART_STORM = (
    "Run {{ $labels.run }}"
    + each_series(
        "max(increase(run_attempts_total{tenant=%q,run=%q}[<1h>]))",
        "$labels.tenant $labels.run",
        ' started {{ printf "%.0f" .Value }} times in <1h>.',
    )
    + each_series(
        "sum(max by (bucket) "
        + '(increase(run_seconds_total{tenant=%q,run=%q,bucket=~"productive|generation"}[<1h>])))',
        "$labels.tenant $labels.run",
        " New steps took {{ .Value | humanizeDuration }} of that time. The rest is restarts, repeated steps and "
        "other time, for example checkpoints.",
    )
    + each_series(
        "max by (status) (increase(run_attempt_ends_total{tenant=%q,run=%q}[<1h>])) >= 0.5",
        "$labels.tenant $labels.run",
        ' Attempts that ended as {{ .Labels.status }}: {{ printf "%.0f" .Value }}.',
    )
    + "<owner>"
)
_TRAINING_STALLED = (
    "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}."
    + each_series(
        "sort_desc(sum by (activity) (rate(training_activity_seconds_total{run=%[1]q}[<5m>])) >= 0.5)",
        "$labels.run",
        ' Ranks in {{ .Labels.activity }}: {{ printf "%.0f" .Value }}.',
    )
    + each_series(
        "topk(3, max by (rank, activity) (rate(training_activity_seconds_total{run=%[1]q}[<5m>])) > "
        + "0.5 unless on (activity) topk(1, sum by (activity) "
        + "(rate(training_activity_seconds_total{run=%[1]q}[<5m>]))))",
        "$labels.run",
        " Rank {{ .Labels.rank }}<on_host> is in {{ .Labels.activity }}, unlike the largest group of ranks.",
    )
    + "<lines>"
    + each_series(
        "%f * max(training_world_size{run=%q}) / 3600",
        "$value $labels.run",
        ' {{ printf "%.1f" .Value }} GPU-hours have passed without a step.',
    )
    + "<owner>"
)

ALERTS: tuple[Alert, ...] = (
    # The ledger reports the run as down. This does not count if another ledger reports otherwise, or if ranks of the
    # run count steps. A restart by the launcher takes less than `for`. A run that recovers and fails again within
    # `keep_firing_for` causes one message. A run that restarts without a new step has not recovered.
    Alert(
        name="TrainingDown",
        group="ledger",
        severity="critical",
        identity=("tenant", "run"),
        expr="""
            (
              max by (tenant, run) (run:run_state:max{state="down"}) == 1
                unless on (tenant, run)
              max by (tenant, run) (run:run_state:max{state=~"running|completed|stopped"}) == 1
                unless on (run)
              max by (run) (instance:training_steps:increase2m) > 0
            )
              and on (tenant, run)
            run:training_page:bool
              or
            group by (tenant, run) (
              ALERTS{alertname="TrainingDown",alertstate="firing",severity="critical"}
                and on (tenant, run)
              ALERTS{alertname=~"TrainingRestartStorm",severity="critical",shadow=""}
            )
        """,
        for_="5m",
        keep_firing_for="10m",
        summary="Training run ended early and is down",
        description=_TRAINING_DOWN,
    ),
    Alert(
        name="TrainingDown",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              max by (tenant, run) (run:run_state:max{state="down"}) == 1
                unless on (tenant, run)
              max by (tenant, run) (run:run_state:max{state=~"running|completed|stopped"}) == 1
                unless on (run)
              max by (run) (instance:training_steps:increase2m) > 0
            )
              unless on (tenant, run)
            run:training_page:bool
        """,
        for_="5m",
        keep_firing_for="10m",
        summary="Training run ended early and is down",
        description=_TRAINING_DOWN,
    ),
    # Three starts in an hour without a second of new progress, or four unplanned ends in half an hour, whatever the
    # attempts achieved. `for` equals that of TrainingDown, which is then sent in place of this alert.
    Alert(
        name="TrainingRestartStorm",
        group="ledger",
        severity="critical",
        identity=("tenant", "run"),
        expr="""
            (
              (
                max by (tenant, run) (increase(run_attempts_total[<1h>])) >= 3
                  unless on (tenant, run)
                max by (tenant, run) (increase(run_seconds_total{bucket=~"productive|generation"}[<1h>])) > 0
                  or on (tenant, run)
                sum by (tenant, run) (
                  max by (tenant, run, status) (increase(run_attempt_ends_total{status=~"failed|silent"}[<30m>]))
                ) >= 4
              )
                unless on (tenant, run)
              max by (tenant, run) (last_over_time(run_state{state=~"completed|stopped"}[<5m>])) == 1
            )
              and on (tenant, run)
            run:training_page:bool
        """,
        for_="5m",
        summary="Training run restarts again and again",
        description=_TRAINING_RESTART_STORM,
    ),
    Alert(
        name="TrainingRestartStorm",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              (
                max by (tenant, run) (increase(run_attempts_total[<1h>])) >= 3
                  unless on (tenant, run)
                max by (tenant, run) (increase(run_seconds_total{bucket=~"productive|generation"}[<1h>])) > 0
                  or on (tenant, run)
                sum by (tenant, run) (
                  max by (tenant, run, status) (increase(run_attempt_ends_total{status=~"failed|silent"}[<30m>]))
                ) >= 4
              )
                unless on (tenant, run)
              max by (tenant, run) (last_over_time(run_state{state=~"completed|stopped"}[<5m>])) == 1
            )
              unless on (tenant, run)
            run:training_page:bool
        """,
        for_="5m",
        summary="Training run restarts again and again",
        description=_TRAINING_RESTART_STORM,
    ),
    # No step for half an hour, within which a checkpoint or evaluation ends. For processes without a step, the time
    # since their start counts. TrainingHang does not fire outside a step. This alert has the group and the `for` of
    # TrainingDown and TrainingRestartStorm, so that it ends no later than these, which inhibit it.
    Alert(
        name="TrainingStalled",
        group="ledger",
        severity="critical",
        identity=("run",),
        expr="""
            (
              time() - (max by (run) (instance:training_last_step_timestamp_seconds:max) < time() - <1800_seconds>)
                unless on (run)
              max by (run) (run:run_state:max{state=~"completed|stopped"}) == 1
            )
              and on (run)
            group by (run) (run:training_page:bool)
        """,
        for_="5m",
        summary="Training run makes no steps",
        description=_TRAINING_STALLED,
    ),
    Alert(
        name="TrainingStalled",
        group="ledger",
        severity="warning",
        identity=("run",),
        expr="""
            (
              time() - (max by (run) (instance:training_last_step_timestamp_seconds:max) < time() - <1800_seconds>)
                unless on (run)
              max by (run) (run:run_state:max{state=~"completed|stopped"}) == 1
            )
              unless on (run)
            group by (run) (run:training_page:bool)
        """,
        for_="5m",
        summary="Training run makes no steps",
        description=_TRAINING_STALLED,
    ),
    # 90 % is typical, 96 to 98 % the best in the field. In the first six hours (21,600 s), the start-up of a run
    # dominates. A day's ratio changes slowly, so `for` prevents flapping near the threshold.
    Alert(
        name="TrainingGoodputLow",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket=~"productive|generation"})
              )
                -
              (
                sum by (tenant, run) (
                  max by (tenant, run, bucket) (run_seconds_total{bucket=~"productive|generation"} offset <1d>)
                )
                  or
                max by (tenant, run) (run_open_seconds * 0)
              )
            )
              / on (tenant, run)
            (
              (
                sum by (tenant, run) (
                  max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"})
                    or
                  max by (tenant, run) (run_open_seconds)
                )
                  -
                (
                  sum by (tenant, run) (
                    max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"} offset <1d>)
                      or
                    max by (tenant, run) (run_open_seconds offset <1d>)
                  )
                    or
                  max by (tenant, run) (run_open_seconds * 0)
                )
              ) > 21600
            ) < 0.8
              unless on (tenant, run)
            run_state{state=~"completed|stopped"} == 1
        """,
        for_="15m",
        summary="Goodput of the training run is low",
        description=(
            "Run {{ $labels.run }} spent {{ $value | humanizePercentage }} of the last <1d> (or of the time since "
            + "its start, if shorter) on new steps. Largest losses since its start:"
            + each_series(
                "topk(3, max by (bucket) "
                + '(run_seconds_total{tenant=%q,run=%q,bucket!~"productive|generation|queue"}) > 0)',
                "$labels.tenant $labels.run",
                " {{ .Labels.bucket }} {{ .Value | humanizeDuration }}.",
            )
            + each_series(
                "sum(max by (bucket) "
                + '(run_gpu_seconds_total{tenant=%q,run=%q,bucket!~"productive|generation|queue"})) / 3600',
                "$labels.tenant $labels.run",
                ' All losses since its start cost {{ printf "%.1f" .Value }} GPU-hours.',
            )
            + "<owner>"
        ),
    ),
    # Two hours (7,200 s) of productive time. A save that is under way at the threshold is durable within `for`.
    Alert(
        name="TrainingCheckpointStale",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              max by (tenant, run) (run_provisional_seconds) and on (tenant, run) run_committed_steps
                and on (tenant, run)
              run_state{state="running"} == 1
            ) > 7200
        """,
        for_="10m",
        summary="Last durable checkpoint is old",
        description=(
            "A crash of run {{ $labels.run }} would lose {{ $value | humanizeDuration }} of steps."
            + each_series(
                "max(run_committed_steps{tenant=%q,run=%q})",
                "$labels.tenant $labels.run",
                ' Its last durable checkpoint is of step {{ printf "%.0f" .Value }}.',
            )
            + "<owner>"
        ),
    ),
    # 5 % of the wall clock is Young's optimum if a save takes 0.5 % of the time to failure. The window holds several
    # saves.
    Alert(
        name="TrainingCheckpointSlow",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              sum by (tenant, run) (max by (tenant, run, bucket) (run_seconds_total{bucket="checkpoint_save"}))
                -
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket="checkpoint_save"} offset <6h>)
              )
            )
              / on (tenant, run)
            (
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"})
                  or
                max by (tenant, run) (run_open_seconds)
              )
                -
              sum by (tenant, run) (
                max by (tenant, run, bucket) (run_seconds_total{bucket!="queue"} offset <6h>)
                  or
                max by (tenant, run) (run_open_seconds offset <6h>)
              )
            ) > 0.05
              and on (tenant, run)
            run_state{state="running"} == 1
        """,
        for_="10m",
        summary="Checkpoints take too much time",
        description=(
            "Run {{ $labels.run }} spent {{ $value | humanizePercentage }} of the last <6h> saving "
            + "checkpoints.<owner>"
        ),
    ),
    # 4,096 GPU-hours are a quarter of an hour of 16,384 GPUs, whose mean time to failure is two to three hours.
    Alert(
        name="TrainingWorkAtRisk",
        group="ledger",
        severity="warning",
        identity=("tenant", "run"),
        expr="""
            (
              max by (tenant, run) (run_provisional_seconds) and on (tenant, run) run_committed_steps
                and on (tenant, run)
              run_state{state="running"} == 1
            ) * on (tenant, run) max by (tenant, run) (run_gpus) / 3600 > 4096
        """,
        for_="10m",
        summary="A crash would cost many GPU-hours",
        description=(
            'A crash of run {{ $labels.run }} would lose {{ printf "%.0f" $value }} GPU-hours of steps that '
            + "are in no durable checkpoint.<owner>"
        ),
    ),
)
