"""Alerts on training runs: is it advancing, and if not, who is late or gone?

Those of the hook's series have the label `run`, those of the ledger's `tenant` and `run`. Critical is what somebody has
to get up for, in a run that pages (recording.PAGES); all else is a warning, or info for what only explains a gap.
"""

from __future__ import annotations

from typing import Literal

from alerts import recording
from alerts.alert import PAGED, Alert, each, lasts_with, owner
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

PRODUCTIVE = 'bucket=~"productive|generation"'
ALL_BUT_QUEUE = 'bucket!="queue"'


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on runs."""
    return (
        *_straggler(settings),
        *_hang(settings),
        *_down(settings),
        *_restart_storm(settings),
        *_stalled(settings),
        _mfu_drop(settings),
        _mfu_impossible(settings),
        _mfu_unavailable(settings),
        _tokens_absent(settings),
        _goodput_low(settings),
        _data_stall(settings),
        _checkpoint_stale(settings),
        _checkpoint_slow(settings),
        _work_at_risk(settings),
        *_loss_not_finite(settings),
        _loss_spikes(settings),
    )


def _on_host() -> str:
    """Return a template that names the host of the rank `.Labels.rank` of the run `$labels.run`, where it is known."""
    return each(
        f'topk(1, max by (host) ({m.TRAINING_RANK_INFO}{{run=%q,rank=%q,host!=""}}))',
        "$labels.run .Labels.rank",
        " on {{ .Labels.host }}",
    )


def _lines() -> str:
    """Return a template that tells at which lines ranks of the run `$labels.run` stand still, and which are alone."""
    at = f"count by (at) ({m.TRAINING_STANDSTILL_INFO}{{run=%[1]q}})"
    alone = f"max by (rank, at) ({m.TRAINING_STANDSTILL_INFO}{{run=%[1]q}}) and on (at) ({at} <= 2)"
    return each(
        f"sort_desc(topk(2, {at} > 2))", "$labels.run", ' Ranks at {{ .Labels.at }}: {{ printf "%.0f" .Value }}.'
    ) + each(f"topk(3, {alone})", "$labels.run", " Rank {{ .Labels.rank }} stands at {{ .Labels.at }}.", by="rank")


def _hang(settings: AlertSettings) -> tuple[Alert, ...]:
    """First sign: a step's clock runs and no step ends. Second: the run is quiet, in what is known of it."""
    window, memory = settings.at_pace(settings.hang_window), settings.at_pace(settings.hang_memory)
    usual = f"max by (run) (max_over_time({recording.RAIL}[{memory}])) > {settings.rail_least:g}"
    hangs = f"""(
  {recording.OVERDUE_STEP}
    and on (run)
  {recording.STEPPING} > 0.5
    and on (run)
  (
    {recording.COLLECTIVES} == 0
      or on (run)
    {recording.TENSOR_MOST} < {settings.hang_idle:g} and on (run) {recording.TENSOR_KNOWN} == 1
      or on (run)
    (
      {recording.POWER_SHARE} < {settings.hang_power:g} and on (run) {recording.POWER_KNOWN} == 1
        or on (run)
      {recording.SENT} < {settings.hang_quiet:g} * ({usual})
        unless on (run)
      {recording.POWER_SHARE}
    )
      unless on (run)
    {recording.COLLECTIVES}
      unless on (run)
    {recording.TENSOR_KNOWN} == 1
  )
    unless on (run)
  {recording.TENSOR_LEAST} >= {settings.hang_idle:g}
)"""
    rank, host = (f"{name}{{run=%[1]q}}" for name in (recording.CULPRIT_RANK, recording.CULPRIT_HOST))
    on_host = "{{ with .Labels.host }} on {{ . }}{{ end }}"
    confidence = ' Confidence {{ printf "%.0f" .Value }} %.'
    gpu = each(f"max by (gpu) ({m.GPU_INFO}{{uuid=%q}})", ".Labels.uuid", " {{ .Labels.gpu }}")
    card = each(
        f'topk(1, max by (uuid) ({m.TRAINING_RANK_INFO}{{run=%q,rank=%q,uuid!=""}}))',
        "$labels.run .Labels.rank",
        " Its GPU is" + gpu + " ({{ .Labels.uuid }}).",
    )
    signs = [(f'{recording.SIGN}{{run=%[1]q,sign="{name}"}}', text) for name, text in recording.SIGNS.items()]
    description = (
        "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}; for "
        + window
        + " no collective was started, or its tensor cores, its power or its network went quiet."
        + "".join(
            each(
                f"{sign} and on (rank) {rank}",
                "$labels.run",
                " Rank {{ .Labels.rank }}" + on_host + f" is {text}.",
                by="rank",
            )
            for sign, text in signs
        )
        + each(f"100 * {rank}", "$labels.run", card + confidence)
        + "".join(
            each(
                f"count by (host) ({sign} and on (host) {host})",
                "$labels.run",
                " {{ .Value }} ranks on {{ .Labels.host }} are " + text + ".",
            )
            for sign, text in signs
        )
        + each(f"100 * {host}", "$labels.run", confidence)
        + each(
            f"{recording.OVERDUE_STEP}{{run=%[1]q}} unless on () {rank} unless on () {host}",
            "$labels.run",
            " Which rank is late is unknown.",
        )
        + _lines()
        + each(
            f'max({m.RUN_STATE}{{run=%q,state="down"}}) == 1',
            "$labels.run",
            " Its processes have ended since, and it is down.",
        )
        + each(
            f"%f * max({m.TRAINING_WORLD_SIZE}{{run=%q}}) / 3600",
            "$value $labels.run",
            ' {{ printf "%.1f" .Value }} GPU-hours are lost so far.',
        )
        + owner(settings)
    )

    def alert(severity: Literal["critical", "warning"], condition: str = "") -> Alert:
        # A job that hangs is ended, and may then be down for longer than this is kept.
        after = f"""
  or
time() - max by (run) (ALERTS_FOR_STATE{{alertname="TrainingHang",severity="critical"}})
  and on (run)
ALERTS{{alertname="TrainingHang"{PAGED}}}
  and on (run)
max by (run) (last_over_time({m.RUN_STATE}{{state="down"}}[{settings.at_pace(settings.state_window)}])) == 1"""
        return Alert(
            "training",
            "TrainingHang",
            severity,
            ("run",),
            f"time() - {hangs}{condition}" + (after if severity == "critical" else ""),
            # The expression has seen a minute of nothing on two clocks; this minute is for the cause to be told first.
            settings.at_pace(settings.hang_for),
            "A training run hangs in a step.",
            description,
            keep_firing_for=settings.at_pace(settings.hang_keep),
        )

    return alert("critical", f"\n  and on (run)\ngroup by (run) ({recording.PAGES})"), alert("warning")


def _restart_storm(settings: AlertSettings) -> tuple[Alert, ...]:
    """Many starts in an hour without a new step; or more ends in half of it, whatever was made before or between."""
    window, state = settings.at_pace(settings.storm_window), settings.at_pace(settings.state_window)
    ends = f'{m.RUN_ENDS}{{status=~"failed|silent"}}[{settings.at_pace(settings.storm_burst)}]'
    storm = f"""(
  (
    max by (tenant, run) (increase({m.RUN_ATTEMPTS}[{window}])) >= {settings.storm_attempts}
      unless on (tenant, run)
    max by (tenant, run) (increase({m.RUN_SECONDS}{{{PRODUCTIVE}}}[{window}])) > 0
      or on (tenant, run)
    sum by (tenant, run) (max by (tenant, run, status) (increase({ends}))) >= {settings.storm_ends}
  )
    unless on (tenant, run)
  max by (tenant, run) (last_over_time({m.RUN_STATE}{{state=~"completed|stopped"}}[{state}])) == 1
)"""

    def fact(query: str, text: str) -> str:
        return each(query, "$labels.tenant $labels.run", text)

    def alert(severity: Literal["critical", "warning"], operator: str) -> Alert:
        return Alert(
            "ledger",
            "TrainingRestartStorm",
            severity,
            ("tenant", "run"),
            f"{storm}\n  {operator} on (tenant, run)\n{recording.PAGES}",
            # The starts are the evidence; as long as for a run that is down, which is then told in its place.
            settings.at_pace(settings.storm_for),
            "A training run restarts again and again.",
            "Run {{ $labels.run }}"
            + fact(
                f"max(increase({m.RUN_ATTEMPTS}{{tenant=%q,run=%q}}[{window}]))",
                ' started {{ printf "%.0f" .Value }} times in ' + window + ".",
            )
            + fact(
                f"sum(max by (bucket) (increase({m.RUN_SECONDS}{{tenant=%q,run=%q,{PRODUCTIVE}}}[{window}])))",
                " New steps took {{ .Value | humanizeDuration }} of it.",
            )
            + fact(
                f"max by (status) (increase({m.RUN_ENDS}{{tenant=%q,run=%q}}[{window}])) >= 0.5",
                ' {{ printf "%.0f" .Value }} attempts ended as {{ .Labels.status }}.',
            )
            + owner(settings),
        )

    return alert("critical", "and"), alert("warning", "unless")


def _stalled(settings: AlertSettings) -> tuple[Alert, ...]:
    """No step for long in processes that say what they do: outside a step no hang is told."""
    rate, state = settings.at_pace(settings.rate_window), settings.at_pace(settings.state_window)
    activity, last_step = m.TRAINING_ACTIVITY_SECONDS, f"max by (run) ({m.TRAINING_LAST_STEP_TIMESTAMP})"
    # Of processes that have made no step, since they began.
    stalled = f"""(
  time() - (
    (
      {last_step}
        or on (run)
      time() - max by (run) (sum by (run, rank) ({activity}))
    ) < time() - {settings.seconds_at_pace(settings.stalled_after)}
  )
    unless on (run)
  max by (run) (last_over_time({m.RUN_STATE}{{state=~"completed|stopped"}}[{state}])) == 1
)"""
    ranks = f"sum by (activity) (rate({activity}{{run=%[1]q}}[{rate}]))"
    description = (
        "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}."
        + each(
            f"sort_desc({ranks} >= 0.5)", "$labels.run", ' Ranks in {{ .Labels.activity }}: {{ printf "%.0f" .Value }}.'
        )
        # Those that do something else than the most: the others may wait for them.
        + each(
            f"topk(3, max by (rank, activity) (rate({activity}{{run=%[1]q}}[{rate}])) > 0.5 unless on (activity) "
            f"topk(1, {ranks}))",
            "$labels.run",
            " Rank {{ .Labels.rank }}" + _on_host() + " is in {{ .Labels.activity }}.",
        )
        + _lines()
        + each(
            f"%f * max({m.TRAINING_WORLD_SIZE}{{run=%q}}) / 3600",
            "$value $labels.run",
            ' {{ printf "%.1f" .Value }} GPU-hours are lost so far.',
        )
        + owner(settings)
    )

    def alert(severity: Literal["critical", "warning"], operator: str) -> Alert:
        return Alert(
            # In the group of what holds it back, so that it ends no later.
            "ledger",
            "TrainingStalled",
            severity,
            ("run",),
            f"{stalled}\n  {operator} on (run)\ngroup by (run) ({recording.PAGES})",
            settings.at_pace(settings.stalled_for),
            "A training run stands still outside a step.",
            description,
        )

    return alert("critical", "and"), alert("warning", "unless")


def _mfu_drop(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.mfu_drop_window)
    baseline = (
        f"quantile_over_time(0.5, {recording.RUN_MFU}%s[{settings.at_pace(settings.mfu_baseline_window)}]"
        f" offset {settings.at_pace(settings.mfu_baseline_offset)})"
    )
    # In steps for the whole window, so that no start-up is in it; and an hour of the baseline's window is there.
    old = settings.at_pace(settings.mfu_baseline_offset + settings.storm_window)
    return Alert(
        "quality",
        "TrainingMfuDrop",
        "warning",
        ("run",),
        f"""avg_over_time({recording.RUN_MFU}[{window}])
  < {settings.mfu_drop:g} * {baseline % ""}
  and on (run)
{recording.RUN_MFU}
  and on (run)
{recording.RUN_MFU} offset {window}
  and on (run)
{recording.RUN_MFU} offset {old}""",
        # Evaluation, checkpoints and compiling are not in MFU; a slow file system or a noisy neighbour comes and goes.
        settings.at_pace(settings.mfu_drop_for),
        "A training run has less MFU than it used to have.",
        "MFU of run {{ $labels.run }} is {{ $value | humanizePercentage }}"
        + each(baseline % "{run=%q}", "$labels.run", ", its median before was {{ .Value | humanizePercentage }}")
        + "."
        + owner(settings),
    )


def _mfu_impossible(settings: AlertSettings) -> Alert:
    rate = settings.at_pace(settings.rate_window)
    # By the wall clock, as the card counts, and not by step time.
    claimed = (
        f"sum by (run) (rate({m.TRAINING_MODEL_FLOPS}[{rate}]))"
        f" / on (run) sum by (run) (max by (run, rank) ({m.TRAINING_PEAK_FLOPS}))"
    )
    # Not a number while a profiler holds the counters, and then larger than nothing.
    tensor = f"rate({m.GPU_TENSOR_ACTIVE}[{rate}]) / rate({m.GPU_PROFILED_SECONDS}[{rate}])"
    cards = f"max by (run, uuid) ({m.TRAINING_RANK_INFO}) * on (uuid) group_left () max by (uuid) ({tensor})"
    return Alert(
        "quality",
        "TrainingMfuImpossible",
        "warning",
        ("run",),
        f"""max by (run) ({recording.RANK_MFU}) > {settings.mfu_most:g}
  or on (run)
(
  {claimed} > on (run) {settings.mfu_over_tensor:g} * avg by (run) ({cards})
    and on (run)
  count by (run) ({cards}) == on (run) max by (run) ({m.TRAINING_WORLD_SIZE})
    unless on (run)
  {m.TRAINING_RUN_INFO}{{peak_source=~"override.*"}}
)""",
        # Wrong is wrong from the first step on; two of MFU's windows, so that no edge of one is mistaken for it.
        settings.at_pace(settings.mfu_impossible_for),
        "A run claims more FLOPs than its cards can do.",
        "Run {{ $labels.run }} claims {{ $value | humanizePercentage }} of its cards' peak"
        + each(
            f"avg(({tensor}) and on (uuid) {m.TRAINING_RANK_INFO}{{run=%q}})",
            "$labels.run",
            "; their tensor cores were active {{ .Value | humanizePercentage }} of the time",
        )
        + ". Its FLOPs per token, tokens, dtype or peak are wrong, and so is every MFU of it."
        + each(
            f"group by (convention, dtype, flops_source, peak_source) ({m.TRAINING_RUN_INFO}{{run=%q}})",
            "$labels.run",
            " Declared: convention {{ .Labels.convention }}, dtype {{ .Labels.dtype }}, FLOPs from "
            "{{ .Labels.flops_source }}, peak from {{ .Labels.peak_source }}.",
        ),
    )


def _mfu_unavailable(settings: AlertSettings) -> Alert:
    return Alert(
        "quality",
        "TrainingMfuUnavailable",
        "info",
        ("run", "reason"),
        f"count by (run, reason) ({m.TRAINING_MFU_UNAVAILABLE} == 1)",
        # What a framework tells late, the model's size for instance, is told by then.
        settings.at_pace(settings.info_for),
        "A training run has no MFU, and says why.",
        'Run {{ $labels.run }} has no MFU, because of {{ $labels.reason }} ({{ printf "%.0f" $value }} ranks say so).',
    )


def _tokens_absent(settings: AlertSettings) -> Alert:
    rate = settings.at_pace(settings.rate_window)
    return Alert(
        "quality",
        "TrainingTokensAbsent",
        "info",
        ("run",),
        f"""max by (run) (increase({m.TRAINING_STEPS}[{rate}])) > 0
  unless on (run)
{m.TRAINING_TOKENS}""",
        # As long as for a missing MFU, of which this is one reason.
        settings.at_pace(settings.info_for),
        "A training run makes steps and does not say of how many tokens.",
        "Run {{ $labels.run }} makes steps without tokens: it has no tokens per second, no FLOPs and no MFU. Give "
        "tokens= to run.step().",
    )


def _booked(settings: AlertSettings, buckets: str, window: float, *, opened: bool = False, young: bool = False) -> str:
    """Return seconds a run has booked into `buckets` within `window`, of a `young` run since its start: a difference of
    the ledger's absolute values, because increase() would miss a moved ledger's first sample.
    """

    def at(offset: str) -> str:
        seconds = f"max by (tenant, run, bucket) ({m.RUN_SECONDS}{{{buckets}}}{offset})"
        if opened:
            seconds += f" or max by (tenant, run) ({m.RUN_OPEN_SECONDS}{offset})"
        return f"sum by (tenant, run) ({seconds})"

    now, before = at(""), at(f" offset {settings.at_pace(window)}")
    none = f"max by (tenant, run) ({m.RUN_OPEN_SECONDS} * 0)"
    return f"({now} - ({before} or {none}))" if young else f"({now} - {before})"


def _goodput_low(settings: AlertSettings) -> Alert:
    window = settings.goodput_window
    wall = _booked(settings, ALL_BUT_QUEUE, window, opened=True, young=True)
    return Alert(
        "ledger",
        "TrainingGoodputLow",
        "warning",
        ("tenant", "run"),
        f"""{_booked(settings, PRODUCTIVE, window, young=True)}
  / on (tenant, run)
({wall} > {settings.goodput_age:g})
  < {settings.goodput_low:g}
  unless on (tenant, run)
{m.RUN_STATE}{{state=~"completed|stopped"}} == 1""",
        # A day's ratio moves slowly: a quarter of an hour keeps one that sits on the threshold from chattering.
        settings.at_pace(settings.goodput_for),
        "A training run makes little use of its wall clock.",
        "{{ $value | humanizePercentage }} of the last " + settings.at_pace(window) + " of run {{ $labels.run }} (or "
        "since its start) were new steps. Booked since its start:"
        + each(
            f'topk(3, max by (bucket) ({m.RUN_SECONDS}{{tenant=%q,run=%q,bucket!~"productive|generation|queue"}}) > 0)',
            "$labels.tenant $labels.run",
            " {{ .Labels.bucket }} {{ .Value | humanizeDuration }}.",
        )
        + each(
            f'sum(max by (bucket) ({m.RUN_GPU_SECONDS}{{tenant=%q,run=%q,bucket!~"productive|generation|queue"}}))'
            " / 3600",
            "$labels.tenant $labels.run",
            ' {{ printf "%.1f" .Value }} GPU-hours are lost so far.',
        )
        + owner(settings),
    )


def _data_stall(settings: AlertSettings) -> Alert:
    rate, activity = settings.at_pace(settings.rate_window), m.TRAINING_ACTIVITY_SECONDS

    def share(run: str) -> str:
        stall = f'sum by (run, rank) (rate({activity}{{{run}activity="data_stall"}}[{rate}]))'
        step = f'sum by (run, rank) (rate({activity}{{{run}activity=~"step|data_stall"}}[{rate}]))'
        return f"{stall} / {step}"

    return Alert(
        "quality",
        "TrainingDataStall",
        "warning",
        ("run",),
        # Of the rank that waits most: the others wait for it in a collective, and call that step time.
        f"max by (run) ({share('')}) > {settings.stall_share:g}",
        # A shuffle buffer that fills up at an epoch's start, or a cold cache, takes some minutes.
        settings.at_pace(settings.stall_for),
        "A training run waits for its data.",
        "A rank of run {{ $labels.run }} spends {{ $value | humanizePercentage }} of its step time waiting for its "
        "next batch:"
        + each(
            f"topk(3, {share('run=%[1]q,')} > {settings.stall_share:g})",
            "$labels.run",
            " rank {{ .Labels.rank }}" + _on_host() + " {{ .Value | humanizePercentage }}.",
        )
        + owner(settings),
    )


def _provisional() -> str:
    """Return productive seconds without a durable checkpoint, of running runs that ever told of one."""
    return f"""(
  max by (tenant, run) ({m.RUN_PROVISIONAL_SECONDS})
    and on (tenant, run)
  {m.RUN_COMMITTED_STEPS}
    and on (tenant, run)
  {m.RUN_STATE}{{state="running"}} == 1
)"""


def _checkpoint_stale(settings: AlertSettings) -> Alert:
    return Alert(
        "ledger",
        "TrainingCheckpointStale",
        "warning",
        ("tenant", "run"),
        f"{_provisional()} > {settings.checkpoint_stale:g}",
        # A save that is under way at the threshold is durable by then.
        settings.at_pace(settings.checkpoint_for),
        "A training run has not saved a checkpoint for long.",
        "A crash of run {{ $labels.run }} would lose {{ $value | humanizeDuration }} of steps."
        + each(
            f"max({m.RUN_COMMITTED_STEPS}{{tenant=%q,run=%q}})",
            "$labels.tenant $labels.run",
            ' Its last durable checkpoint is of step {{ printf "%.0f" .Value }}.',
        )
        + owner(settings),
    )


def _work_at_risk(settings: AlertSettings) -> Alert:
    return Alert(
        "ledger",
        "TrainingWorkAtRisk",
        "warning",
        ("tenant", "run"),
        f"{_provisional()} * on (tenant, run) max by (tenant, run) ({m.RUN_GPUS}) / 3600 > {settings.risk_gpu_hours:g}",
        # As for a stale checkpoint.
        settings.at_pace(settings.checkpoint_for),
        "A crash would cost a training run many GPU-hours.",
        'A crash of run {{ $labels.run }} would lose {{ printf "%.0f" $value }} GPU-hours of steps that are in no '
        "durable checkpoint." + owner(settings),
    )


def _checkpoint_slow(settings: AlertSettings) -> Alert:
    window = settings.checkpoint_window
    wall = _booked(settings, ALL_BUT_QUEUE, window, opened=True)
    return Alert(
        "ledger",
        "TrainingCheckpointSlow",
        "warning",
        ("tenant", "run"),
        f"""{_booked(settings, 'bucket="checkpoint_save"', window)}
  / on (tenant, run)
{wall}
  > {settings.checkpoint_share:g}
  and on (tenant, run)
{m.RUN_STATE}{{state="running"}} == 1""",
        # The window holds several saves already.
        settings.at_pace(settings.checkpoint_for),
        "Checkpoints take a large share of a training run's time.",
        "Run {{ $labels.run }} stood still for checkpoints {{ $value | humanizePercentage }} of the last "
        + settings.at_pace(window)
        + "."
        + owner(settings),
    )


def _loss_not_finite(settings: AlertSettings) -> tuple[Alert, ...]:
    rate = settings.at_pace(settings.rate_window)
    steps = f"max by (run) (sum by (run, rank) (increase({m.TRAINING_STEPS}[{rate}])))"

    def share(value: str = "") -> str:
        return f"sum by (run) (increase({m.TRAINING_NONFINITE}{value}[{rate}])) / on (run) {steps}"

    loss = '{value="loss"}'
    description = (
        "{{ $value | humanizePercentage }} of the steps of run {{ $labels.run }} in " + rate + " had no finite loss or "
        "gradient norm."
        + each(
            f"max by (value) (increase({m.TRAINING_NONFINITE}{{run=%q}}[{rate}])) >= 0.5",
            "$labels.run",
            ' {{ .Labels.value }}: {{ printf "%.0f" .Value }}.',
        )
        + each(
            f"max({m.RUN_COMMITTED_STEPS}{{run=%q}})",
            "$labels.run",
            ' The last durable checkpoint is of step {{ printf "%.0f" .Value }}.',
        )
        + owner(settings)
    )

    def alert(severity: Literal["critical", "warning"], expr: str) -> Alert:
        return Alert(
            "training",
            "TrainingLossNotFinite",
            severity,
            ("run",),
            expr,
            # The window holds the steps; a scrape more, so that the first of a new process is not alone in it.
            settings.at_pace(settings.nonfinite_for),
            "The loss or the gradients of a run are not finite.",
            description,
        )

    return (
        alert(
            "critical",
            f"{share(loss)} > {settings.nonfinite_critical:g}\n  and on (run)\ngroup by (run) ({recording.PAGES})",
        ),
        alert("warning", f"{share(loss)} > 0\n  or on (run)\n{share()} > {settings.nonfinite_steps:g}"),
    )


def _loss_spikes(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.spike_window)
    return Alert(
        "quality",
        "TrainingLossSpikes",
        "warning",
        ("run",),
        f"max by (run) (increase({m.TRAINING_LOSS_SPIKES}[{window}])) >= {settings.spikes}",
        # The count needs no confirmation: three are three.
        "0s",
        "The loss of a training run jumps again and again.",
        'The loss of run {{ $labels.run }} was far above its mean {{ printf "%.0f" $value }} times in '
        + window
        + "."
        + each(f"max({m.TRAINING_LOSS}{{run=%q}})", "$labels.run", ' It is {{ printf "%.4g" .Value }} now.')
        + owner(settings),
    )


def _evidence_on_straggler(settings: AlertSettings) -> str:
    """Return a template that says what is the matter with the rank in `.Labels`, its GPU, its host and its rails."""
    rate = settings.at_pace(settings.rate_window)
    fresh, errors = settings.seconds_at_pace(settings.xid_window), settings.at_pace(settings.ecc_window)
    card = "{uuid=%[1]q}"
    clocks = f"max by (uuid) ({m.GPU_SM_CLOCK}%s)"
    of_run = f"and on (uuid) {m.TRAINING_RANK_INFO}{{run=%[2]q}}"
    low = settings.power_limit_share

    def share(seconds: str, of: str) -> str:
        return f"sum(rate({seconds}[{rate}])) / sum(rate({of}[{rate}])) > {settings.stall_share:g}"

    def of_gpu(query: str, text: str) -> str:
        return each(query, "$uuid $labels.run", text)

    def of_rank(counter: m.Metric, matcher: str = "") -> str:
        return f"{counter}{{run=%[1]q,rank=%[2]q{matcher}}}"

    stall = share(
        of_rank(m.TRAINING_ACTIVITY_SECONDS, ',activity="data_stall"'),
        of_rank(m.TRAINING_ACTIVITY_SECONDS, ',activity=~"step|data_stall"'),
    )
    garbage = share(
        of_rank(m.TRAINING_PHASE_SECONDS, ',phase="garbage_collection"'), of_rank(m.TRAINING_MEASURED_STEP_SECONDS)
    )
    ports = f"and on (instance, device, port) {m.INFINIBAND_INFO}{{host=%q}}"
    gpu = "".join(
        (
            of_gpu(
                f'max by (reason) (rate({m.GPU_CLOCK_EVENT_SECONDS}{{uuid=%[1]q,reason!="gpu_idle"}}[{rate}]))'
                f" > {settings.throttle_share:g}",
                "Its clock was held back {{ .Value | humanizePercentage }} of the time ({{ .Labels.reason }}). ",
            ),
            of_gpu(
                f"max({m.GPU_SM_CLOCK}{card}) < {low:g} * quantile(0.5, {clocks % ''} {of_run})",
                "Its clock is {{ .Value | humanize }}Hz, below the others'. ",
            ),
            of_gpu(
                f"max({m.GPU_POWER_LIMIT}{card}) < {low:g} * max({m.GPU_POWER_LIMIT_DEFAULT}{card})",
                "Its power limit is {{ .Value }} W, less than it comes with. ",
            ),
            of_gpu(
                f"max({m.GPU_PCIE_WIDTH}{card}) < max({m.GPU_PCIE_WIDTH_MAX}{card})",
                "Its PCIe link has only {{ .Value }} lanes. ",
            ),
            of_gpu(
                f"topk(3, max by (xid) ({m.GPU_XID_LAST}{card}) > time() - {fresh})",
                "It reported Xid {{ .Labels.xid }}. ",
            ),
            of_gpu(
                f'increase({m.GPU_ECC_ERRORS}{{uuid=%[1]q,error="uncorrected"}}[{errors}]) > 0',
                "It had memory errors that were not corrected. ",
            ),
        )
    )
    host = "".join(
        (
            each(
                f"max by (device, port) ({m.INFINIBAND_RATE} < on (instance, device, port) "
                f"{m.INFINIBAND_EXPECTED_RATE} {ports})",
                "$host",
                "Port {{ .Labels.port }} of {{ .Labels.device }} is below its rate. ",
            ),
            each(
                f"max by (reason, part) ({m.NODE_VERDICT_REASON} == 1 and on (instance) {recording.HOST}{{host=%q}})",
                "$host",
                "Its node is not well: {{ .Labels.reason }} ({{ .Labels.part }}). ",
            ),
        )
    )
    return (
        "{{ $rank := .Labels.rank }}"
        + each(stall, "$labels.run $rank", "It waits for data {{ .Value | humanizePercentage }} of its step time. ")
        + each(garbage, "$labels.run $rank", "It collects garbage {{ .Value | humanizePercentage }} of its step time. ")
        + each(
            f"topk(1, max by (host, uuid) ({m.TRAINING_RANK_INFO}{{run=%q,rank=%q}}))",
            "$labels.run $rank",
            "{{ $uuid := .Labels.uuid }}{{ $host := .Labels.host }}" + gpu + host,
        )
        + each(
            f"{recording.RAIL_IMBALANCE}{{run=%q}} < {settings.rail_share:g}",
            "$labels.run",
            "One rail of the run carries {{ .Value | humanizePercentage }} of what the others do. ",
        )
    )


def _straggler(settings: AlertSettings) -> tuple[Alert, ...]:
    gpu = each(f"max by (gpu) ({m.GPU_INFO}{{uuid=%q}})", ".", ", GPU {{ .Labels.gpu }}")
    place = each(
        f"max by (host, uuid) ({m.TRAINING_RANK_INFO}{{run=%q,rank=%q}})",
        ".Labels.run .Labels.rank",
        " on {{ .Labels.host }}{{ with .Labels.uuid }}" + gpu + " ({{ . }}){{ end }}",
    )
    culprit = each(
        f"{recording.LEADER}{{run=%q}}",
        "$labels.run",
        "Rank {{ .Labels.rank }} of run {{ .Labels.run }}" + place + " is late. " + _evidence_on_straggler(settings),
    )
    culprit += each(
        f"{recording.HOST_LEADER}{{run=%q}}",
        "$labels.run",
        "All ranks of run {{ .Labels.run }} on {{ .Labels.host }} are late. ",
    )
    lost = each(
        f"%f * max({m.TRAINING_WORLD_SIZE}{{run=%q}})",
        "$value $labels.run",
        ', as if {{ printf "%.1f" .Value }} of the run\'s GPUs did nothing',
    )
    description = (
        culprit.lstrip()
        + "The others wait {{ $value | humanizePercentage }} of every step for it"
        + lost
        + "."
        + owner(settings)
    )

    def alert(severity: Literal["critical", "warning"], threshold: float, condition: str = "") -> Alert:
        return Alert(
            "training",
            "TrainingStraggler",
            severity,
            ("run",),
            f"(max by (run) ({recording.LEADER}) or max by (run) ({recording.HOST_LEADER})) >= {threshold:g}"
            f"{condition}",
            settings.at_pace(settings.straggler_for),
            "One rank or host of a training run makes all the others wait.",
            description,
            keep_firing_for=settings.at_pace(settings.straggler_keep),
        )

    return (
        alert("critical", settings.straggler_critical, f" and on (run) group by (run) ({recording.PAGES})"),
        alert("warning", settings.straggler_warning),
    )


def _down(settings: AlertSettings) -> tuple[Alert, ...]:
    def fact(metric: m.Metric, text: str) -> str:
        return each(
            f"max({metric}{{tenant=%q,run=%q}})",
            "$labels.tenant $labels.run",
            text.replace("NUMBER", '{{ printf "%.0f" .Value }}'),
        )

    description = (
        "Run {{ $labels.run }}{{ with $labels.tenant }} of {{ . }}{{ end }}"
        f" has been down for {settings.at_pace(settings.down_for)} or longer."
        + each(
            f"max({m.RUN_OPEN_SECONDS}{{tenant=%q,run=%q}})",
            "$labels.tenant $labels.run",
            " Nothing was heard of it for {{ .Value | humanizeDuration }}.",
        )
        + each(
            f"max by (status) ({m.RUN_ENDS}{{tenant=%q,run=%q}}) > 0",
            "$labels.tenant $labels.run",
            ' {{ printf "%.0f" .Value }} attempts ended as {{ .Labels.status }}.',
        )
        + fact(m.RUN_GPUS, " NUMBER GPUs do nothing.")
        + fact(m.RUN_POSITION_STEPS, " It had reached step NUMBER.")
        + fact(m.RUN_COMMITTED_STEPS, " Its last checkpoint is of step NUMBER.")
        + each(
            f"max({m.RUN_OPEN_SECONDS}{{tenant=%[1]q,run=%[2]q}}) * max({m.RUN_GPUS}{{tenant=%[1]q,run=%[2]q}}) / 3600",
            "$labels.tenant $labels.run",
            ' {{ printf "%.1f" .Value }} GPU-hours are lost so far.',
        )
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
        # A run that starts again and again without a new step has not come back.
        storm = lasts_with("TrainingDown", ("tenant", "run"), "TrainingRestartStorm", "tenant, run", PAGED)
        after = f"\n  or\n{storm}" if severity == "critical" else ""
        return Alert(
            "ledger",
            "TrainingDown",
            severity,
            ("tenant", "run"),
            f"{down}\n  {operator} on (tenant, run)\n{recording.PAGES}{after}",
            settings.at_pace(settings.down_for),
            "A training run ended without finishing and has not come back.",
            description,
            keep_firing_for=settings.at_pace(settings.down_keep),
        )

    return alert("critical", "and"), alert("warning", "unless")
