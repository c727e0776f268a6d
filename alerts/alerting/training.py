"""Alerts on training runs from the hook's series: is a run advancing, and if not, which rank is slow or gone?

Critical alerts are for runs that may page (run:training_page:bool). The other alerts are warnings.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_series
from alerts.recording.hang import SIGNS

_HOST, _LINK = ('run_straggler_ratio{run=%[1]q,kind="' + kind + '"} > 0' for kind in ("host", "link"))
_TRAINING_STRAGGLER = (
    each_series(
        f"max by (host) (run_straggler_info{{run=%[1]q}}) and on () ({_HOST})",
        "$labels.run",
        "All ranks of run {{ $labels.run }} on {{ .Labels.host }} slow every step. ",
    ).lstrip("\n")
    + each_series(
        f"max by (ranks) (run_straggler_info{{run=%[1]q}}) and on () ({_LINK})",
        "$labels.run",
        "Ranks {{ .Labels.ranks }} of run {{ $labels.run }} wait for each other longer than the other pairs of the "
        "pipeline, so the network between them is slow. ",
    )
    + "{{- range printf `max by (rank, host, group, ranks) (run_straggler_info{run=%[1]q}) unless on () "
    + f'({_HOST} or {_LINK})` $labels.run | query | sortByLabel "rank" }}}}'
    + "Rank {{ .Labels.rank }} of run {{ $labels.run }} on {{ .Labels.host }}"
    + each_series(
        'topk(1, max by (uuid) (training_rank_info{run=%q,rank=%q,uuid!=""}))',
        "$labels.run .Labels.rank",
        each_series("max by (gpu) (gpu_info{uuid=%q})", ".Labels.uuid", ", GPU {{ .Labels.gpu }}")
        + " ({{ .Labels.uuid }})",
    )
    + " slows every step. "
    + '{{ if ne .Labels.group "world" }}In its {{ .Labels.group }} group, ranks {{ .Labels.ranks }}, the others wait '
    + "for it. {{ end }}"
    + "{{ $rank := .Labels.rank }}"
    + each_series(
        'sum(rate(training_activity_seconds_total{run=%[1]q,rank=%[2]q,activity="data_stall"}[<5m>])) / '
        'sum(rate(training_activity_seconds_total{run=%[1]q,rank=%[2]q,activity=~"step|data_stall"}[<5m>])) > 0.1',
        "$labels.run $rank",
        "It waits for data {{ .Value | humanizePercentage }} of its step time. ",
    )
    + each_series(
        'sum(rate(training_phase_seconds_total{run=%[1]q,rank=%[2]q,phase="garbage_collection"}[<5m>])) / '
        "sum(rate(training_measured_step_seconds_total{run=%[1]q,rank=%[2]q}[<5m>])) > 0.1",
        "$labels.run $rank",
        "It collects garbage {{ .Value | humanizePercentage }} of its step time. ",
    )
    + each_series(
        "topk(1, max by (host, uuid) (training_rank_info{run=%q,rank=%q}))",
        "$labels.run $rank",
        "{{ $uuid := .Labels.uuid }}{{ $host := .Labels.host }}"
        + each_series(
            "max by (reason) " + '(rate(gpu_clock_event_seconds_total{uuid=%[1]q,reason!="gpu_idle"}[<5m>])) > 0.1',
            "$uuid $labels.run",
            "Its clock was throttled {{ .Value | humanizePercentage }} of the time ({{ .Labels.reason }}). ",
        )
        + each_series(
            "max(gpu_sm_clock_hertz{uuid=%[1]q}) < 0.95 * quantile(0.5, max by (uuid) "
            + "(gpu_sm_clock_hertz) and on (uuid) training_rank_info{run=%[2]q})",
            "$uuid $labels.run",
            "Its clock is {{ .Value | humanize }}Hz, over 5 % below the median of the run's GPUs. ",
        )
        + each_series(
            "max(gpu_power_limit_watts{uuid=%[1]q}) < 0.95 * max(gpu_power_limit_default_watts{uuid=%[1]q})",
            "$uuid $labels.run",
            "Its power limit is {{ .Value }} W, over 5 % below the GPU's default. ",
        )
        + each_series(
            "max(gpu_pcie_width_lanes{uuid=%[1]q}) < "
            + '(max(host_expected_parts{kind="pcie_lanes_per_gpu"} and on (instance) gpu_info{uuid=%[1]q}) '
            + "or max(gpu_pcie_width_max_lanes{uuid=%[1]q}))",
            "$uuid $labels.run",
            "Its PCIe link has only {{ .Value }} lanes, fewer than the GPU supports. ",
        )
        + each_series(
            "topk(3, max by (xid) (gpu_xid_last_timestamp_seconds{uuid=%[1]q}) > time() - <1800_seconds>)",
            "$uuid $labels.run",
            "It reported Xid {{ .Labels.xid }} in the last <30m>. ",
        )
        + each_series(
            'increase(gpu_ecc_errors_total{uuid=%[1]q,error="uncorrected"}[<30m>]) > 0',
            "$uuid $labels.run",
            "It had uncorrectable memory errors in the last <30m>. ",
        )
        + each_series(
            "max by (device, port) (infiniband_port_rate_bytes_per_second < on (instance, device, "
            + "port) infiniband_port_expected_rate_bytes_per_second and on (instance, device, port) "
            + "infiniband_info{host=%q})",
            "$host",
            "Port {{ .Labels.port }} of {{ .Labels.device }} on its host runs below its highest rate so far. ",
        )
        + each_series(
            "max by (reason, part) (host_verdict_reason == 1 and on (instance) instance:host:info{host=%q})",
            "$host",
            "The health check of its host reports {{ .Labels.reason }} ({{ .Labels.part }}). ",
        ),
    )
    + each_series(
        "run:infiniband_rail:min_over_median{run=%q} < 0.5",
        "$labels.run",
        "One rail of the run carries {{ .Value | humanizePercentage }} of the traffic of its median rail. ",
    )
    + "{{ end }}"
    + each_series(
        'min(run_whatif_step_seconds{run=%[1]q}) < max(run_whatif_step_seconds{run=%[1]q,mended="0"})',
        "$labels.run",
        'Without this, a step would take {{ printf "%.2f" .Value }} s'
        + each_series(
            'max(run_whatif_step_seconds{run=%q,mended="0"})',
            "$labels.run",
            ' in place of {{ printf "%.2f" .Value }} s',
        )
        + ". ",
    )
    + "The run loses {{ $value | humanizePercentage }} of every step"
    + each_series(
        "%f * max(training_world_size{run=%q})",
        "$value $labels.run",
        ', as if {{ printf "%.1f" .Value }} of its GPUs were idle',
    )
    + ".<owner>"
)
_TRAINING_HANG = (
    "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}. For <1m> it started no "
    "collective, or its GPUs or its network showed no work."
    + "".join(
        each_series(
            f'rank:training_hang:sign{{run=%[1]q,sign="{sign}"}} and on (rank) rank:training_hang:suspect{{run=%[1]q}}',
            "$labels.run",
            " Rank {{ .Labels.rank }}{{ with .Labels.host }} on {{ . }}{{ end }} is " + text + ".",
            by="rank",
        )
        for sign, text in SIGNS.items()
    )
    + each_series(
        "max by (rank, host, group, ranks) (run_hang_info{run=%q})",
        "$labels.run",
        " The ledger names rank {{ .Labels.rank }} on {{ .Labels.host }}"
        "{{ with .Labels.group }}, missing in its {{ . }} group{{ end }}"
        "{{ with .Labels.ranks }}, ranks {{ . }}{{ end }}.",
    )
    + each_series(
        "100 * rank:training_hang:suspect{run=%[1]q}",
        "$labels.run",
        each_series(
            'topk(1, max by (uuid) (training_rank_info{run=%q,rank=%q,uuid!=""}))',
            "$labels.run .Labels.rank",
            " It runs on GPU"
            + each_series("max by (gpu) (gpu_info{uuid=%q})", ".Labels.uuid", " {{ .Labels.gpu }}")
            + " ({{ .Labels.uuid }}).",
        )
        + ' Confidence in this suspect is {{ printf "%.0f" .Value }} %.',
    )
    + "".join(
        each_series(
            f'count by (host) (rank:training_hang:sign{{run=%[1]q,sign="{sign}"}}'
            " and on (host) host:training_hang:suspect{run=%[1]q})",
            "$labels.run",
            " {{ .Value }} ranks on {{ .Labels.host }} are " + text + ".",
        )
        for sign, text in SIGNS.items()
    )
    + each_series(
        "100 * host:training_hang:suspect{run=%[1]q}",
        "$labels.run",
        ' Confidence in this suspect is {{ printf "%.0f" .Value }} %.',
    )
    + each_series(
        "run:training_overdue_step_began_seconds:max{run=%[1]q} unless on () rank:training_hang:suspect{run=%[1]q} "
        "unless on () host:training_hang:suspect{run=%[1]q}",
        "$labels.run",
        " No suspect was found.",
    )
    + "<lines>"
    + each_series(
        'max(run_state{run=%q,state="down"}) == 1',
        "$labels.run",
        " Its processes have ended since, and the run is down.",
    )
    + each_series(
        "%f * max(training_world_size{run=%q}) / 3600",
        "$value $labels.run",
        ' {{ printf "%.1f" .Value }} GPU-hours have passed without a step.',
    )
    + "<owner>"
)
_TRAINING_LOSS_NOT_FINITE = (
    "{{ $value | humanizePercentage }} of the steps of run {{ $labels.run }} in <5m> had a NaN "
    + "or infinite loss or gradient norm."
    + each_series(
        "max by (value) (increase(training_nonfinite_total{run=%q}[<5m>])) >= 0.5",
        "$labels.run",
        ' Steps with a NaN or infinite {{ .Labels.value }}: {{ printf "%.0f" .Value }}.',
    )
    + each_series(
        "max(run_committed_steps{run=%q})",
        "$labels.run",
        ' The last durable checkpoint is of step {{ printf "%.0f" .Value }}.',
    )
    + "<owner>"
)

ALERTS: tuple[Alert, ...] = (
    # The ledger is certain of a straggler before it names one. `keep_firing_for` is longer than a restart, so that one
    # straggler causes one message. `for` lets RunOnFaultyHost fire first.
    Alert(
        name="TrainingStraggler",
        group="training",
        severity="critical",
        identity=("run",),
        expr="""
            max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"}) >= <straggler_critical>
              and on (run)
            group by (run) (run:training_page:bool)
        """,
        for_="30s",
        keep_firing_for="10m",
        summary="Rank or host slows the training run",
        description=_TRAINING_STRAGGLER,
    ),
    Alert(
        name="TrainingStraggler",
        group="training",
        severity="warning",
        identity=("run",),
        expr="""
            max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"}) >= <straggler_warning>
        """,
        for_="30s",
        keep_firing_for="10m",
        summary="Rank or host slows the training run",
        description=_TRAINING_STRAGGLER,
    ),
    # Two signs are needed. First, a step is overdue and no rank finishes one. Second, no known activity of the run
    # continues. No collective started, tensor cores are below 1 %, power is below 60 % of the last hour's, or rails are
    # below 10 % of their traffic. The limits are above 0 because GPUs spin in a collective without computing, and
    # because keep-alives continue. Rails under 1 MB/s are not compared. The expression already covers a minute of both
    # signs. `for` is longer than that of NodeLost, which is then sent in place of this alert. A job that hangs is ended
    # and may be down for longer than `keep_firing_for`, so a page continues while the run is down.
    Alert(
        name="TrainingHang",
        group="training",
        severity="critical",
        identity=("run",),
        expr="""
            time()
              -
            (
              run:training_overdue_step_began_seconds:max and on (run) run:training_step:max_rate1m > 0.5
                and on (run)
              (
                run:training_collective_started:bool_1m == 0
                  or on (run)
                run:gpu_tensor_active:max_rate1m < 0.01 and on (run) run:gpu_tensor_active:known == 1
                  or on (run)
                (
                  run:gpu_power:share_of_1h < 0.6 and on (run) run:gpu_power:known == 1
                    or on (run)
                  run:infiniband_transmit_bytes:max_rate1m
                    <
                  0.1 * (max by (run) (max_over_time(rail:infiniband_transmit_bytes:rate5m[<1h>])) > 1000000)
                    unless on (run)
                  run:gpu_power:share_of_1h
                )
                  unless on (run)
                run:training_collective_started:bool_1m
                  unless on (run)
                run:gpu_tensor_active:known == 1
              )
                unless on (run)
              run:gpu_tensor_active:min_rate1m >= 0.01
            )
              and on (run)
            group by (run) (run:training_page:bool)
              or
            time() - max by (run) (ALERTS_FOR_STATE{alertname="TrainingHang",severity="critical"})
              and on (run)
            ALERTS{alertname="TrainingHang",alertstate="firing",severity="critical"}
              and on (run)
            max by (run) (last_over_time(run_state{state="down"}[<5m>])) == 1
        """,
        for_="1m",
        keep_firing_for="15m",
        summary="Training run hangs in a step",
        description=_TRAINING_HANG,
    ),
    Alert(
        name="TrainingHang",
        group="training",
        severity="warning",
        identity=("run",),
        expr="""
            time()
              -
            (
              run:training_overdue_step_began_seconds:max and on (run) run:training_step:max_rate1m > 0.5
                and on (run)
              (
                run:training_collective_started:bool_1m == 0
                  or on (run)
                run:gpu_tensor_active:max_rate1m < 0.01 and on (run) run:gpu_tensor_active:known == 1
                  or on (run)
                (
                  run:gpu_power:share_of_1h < 0.6 and on (run) run:gpu_power:known == 1
                    or on (run)
                  run:infiniband_transmit_bytes:max_rate1m
                    <
                  0.1 * (max by (run) (max_over_time(rail:infiniband_transmit_bytes:rate5m[<1h>])) > 1000000)
                    unless on (run)
                  run:gpu_power:share_of_1h
                )
                  unless on (run)
                run:training_collective_started:bool_1m
                  unless on (run)
                run:gpu_tensor_active:known == 1
              )
                unless on (run)
              run:gpu_tensor_active:min_rate1m >= 0.01
            )
        """,
        for_="1m",
        keep_firing_for="15m",
        summary="Training run hangs in a step",
        description=_TRAINING_HANG,
    ),
    # A loss scaler skips fewer than 10 % of the steps. If half of the losses are not finite, the run does not recover
    # by itself. `for` is one scrape longer than the window, so that the first step of a new process alone cannot fire.
    Alert(
        name="TrainingLossNotFinite",
        group="training",
        severity="critical",
        identity=("run",),
        expr="""
            sum by (run) (increase(training_nonfinite_total{value="loss"}[<5m>]))
              / on (run)
            max by (run) (sum by (run, rank) (increase(training_steps_total[<5m>]))) > 0.5
              and on (run)
            group by (run) (run:training_page:bool)
        """,
        for_="1m",
        summary="Loss or gradients are not finite",
        description=_TRAINING_LOSS_NOT_FINITE,
    ),
    Alert(
        name="TrainingLossNotFinite",
        group="training",
        severity="warning",
        identity=("run",),
        expr="""
            sum by (run) (increase(training_nonfinite_total{value="loss"}[<5m>]))
              / on (run)
            max by (run) (sum by (run, rank) (increase(training_steps_total[<5m>]))) > 0
              or on (run)
            sum by (run) (increase(training_nonfinite_total[<5m>]))
              / on (run)
            max by (run) (sum by (run, rank) (increase(training_steps_total[<5m>]))) > 0.1
        """,
        for_="1m",
        summary="Loss or gradients are not finite",
        description=_TRAINING_LOSS_NOT_FINITE,
    ),
)
