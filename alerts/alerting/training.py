"""Alerts on training runs from the hook's series: is a run advancing, and if not, which rank is slow or gone?

Critical alerts are for runs that may page (run:training_page:bool). The other alerts are warnings.
"""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_node_exporter, each_series
from flopwatch.catalogue.hang_signs import HANG_SIGNS

_HOST, _LINK = ('run_straggler_ratio{run=%[1]q,kind="' + kind + '"} > 0' for kind in ("host", "link"))
_SUSPECT = "run_straggler_info{run=%[1]q}"
_STEP, _STEP_NOW = "run_whatif_step_seconds{run=%[1]q}", 'run_whatif_step_seconds{run=%[1]q,mended="0"}'
# Compute ports of the exporter %[1]q that are nearest to the GPU %[2]q. With more than four, as in a virtual machine
# without PCI switches, the PCI path does not show which of them the rank uses.
_NEAREST = (
    'infiniband_gpu_affinity_info{instance=%[1]q,uuid=%[2]q,affinity!="SYS"} and on (device, port) '
    'infiniband_info{instance=%[1]q,role="compute"}'
)
_OWN_PORTS = f"{_NEAREST} and on () count({_NEAREST}) <= 4"
_OF_PORT = "{instance=%[1]q,device=%[2]q,port=%[3]q}"
_RATE_OF_PORT = f"8e-9 * max(infiniband_port_rate_bytes_per_second{_OF_PORT})"
_BEST_RATE_OF_PORT = f"8e-9 * max(infiniband_port_expected_rate_bytes_per_second{_OF_PORT})"
_PROBLEMS_OF_PORT = (
    (f"max(infiniband_port_state_id{_OF_PORT}) < 4", "is not active: its state is {{ .Value }}"),
    (
        f"{_RATE_OF_PORT} < <rate_share> * {_BEST_RATE_OF_PORT}",
        'runs at {{ printf "%.0f" .Value }} Gb/s, below its highest rate so far',
    ),
    (
        f"max(increase(infiniband_symbol_errors_total{_OF_PORT}[<30m>])) >= 1",
        'had {{ printf "%.0f" .Value }} symbol errors in the last <30m>',
    ),
    (f"max(increase(infiniband_link_downed_total{_OF_PORT}[<30m>])) >= 0.5", "went down in the last <30m>"),
)
# State of the CPUs of the host $host, as its node_exporter measures it. On a busy host, tasks also wait for a CPU in a
# tenth of the time.
_CPU = each_node_exporter(
    "$host",
    each_series(
        'avg(rate(node_cpu_seconds_total{instance=%q,mode="steal"}[<5m>])) > 0.01',
        "$node",
        "Other virtual machines take {{ .Value | humanizePercentage }} of the CPU time of {{ $host }}. ",
    )
    + each_series(
        'max(node_load1{instance=%[1]q}) > count(count by (cpu) (node_cpu_seconds_total{instance=%[1]q,mode="idle"}))',
        "$node",
        'The load of {{ $host }} is {{ printf "%.0f" .Value }}, more than it has CPUs. ',
    )
    + each_series(
        "max(rate(node_pressure_cpu_waiting_seconds_total{instance=%q}[<5m>])) > 0.3",
        "$node",
        "Tasks of {{ $host }} wait for a CPU {{ .Value | humanizePercentage }} of the time. ",
    )
    + each_series(
        "sum(increase(node_cpu_core_throttles_total{instance=%q}[<5m>])) >= 1",
        "$node",
        'CPU cores of {{ $host }} were throttled {{ printf "%.0f" .Value }} times in <5m>. ',
    ),
)
_TRAINING_STRAGGLER = (
    each_series(
        f"max by (host) (run_straggler_info{{run=%[1]q}}) and on () ({_HOST})",
        "$labels.run",
        "All ranks of run {{ $labels.run }} on {{ .Labels.host }} slow every step. {{ $host := .Labels.host }}" + _CPU,
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
        "max by (uuid) (training_rank_info{run=%q,rank=%q})",
        "$labels.run .Labels.rank",
        "{{ with .Labels.uuid }}"
        + each_series("max by (gpu) (gpu_info{uuid=%q})", ".", ", GPU {{ .Labels.gpu }}")
        + " ({{ . }}){{ end }}",
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
        "max by (state) (max_over_time(host_process_blocked_seconds{run=%q,rank=%q}[<5m>])) > 1",
        "$labels.run $rank",
        'Its main thread was {{ .Labels.state }} for {{ printf "%.0f" .Value }} s in the last <5m>. ',
    )
    + each_series(
        "topk(1, max by (host, uuid) (training_rank_info{run=%q,rank=%q}))",
        "$labels.run $rank",
        "{{ $uuid := .Labels.uuid }}{{ $host := .Labels.host }}"
        + _CPU
        + each_series(
            "max by (reason) " + '(rate(gpu_clock_event_seconds_total{uuid=%[1]q,reason!="gpu_idle"}[<5m>])) > 0.1',
            "$uuid $labels.run",
            "Its clock was throttled {{ .Value | humanizePercentage }} of the time ({{ .Labels.reason }}). ",
        )
        + each_series(
            "max(gpu_sm_clock_hertz{uuid=%[1]q}) < 0.95 * "
            + "quantile(0.5, instance:gpu_sm_clock_hertz:median{run=%[2]q})",
            "$uuid $labels.run",
            "Its clock is {{ .Value | humanize }}Hz, over 5 % below the median of the run's GPUs. ",
        )
        + each_series(
            "max(gpu_power_limit_watts{uuid=%[1]q}) < 0.95 * max(gpu_power_limit_default_watts{uuid=%[1]q})",
            "$uuid $labels.run",
            "Its power limit is {{ .Value }} W, over 5 % below the GPU's default. ",
        )
        + each_series(
            "max by (instance) (gpu_pcie_width_lanes{uuid=%[1]q})",
            "$uuid",
            each_series(
                "max(gpu_pcie_width_lanes{uuid=%[1]q}) < "
                + '(max(host_expected_parts{kind="pcie_lanes_per_gpu",instance=%[2]q}) '
                + "or max(gpu_pcie_width_max_lanes{uuid=%[1]q}))",
                "$uuid .Labels.instance",
                "Its PCIe link has only {{ .Value }} lanes, fewer than the GPU supports. ",
            ),
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
            "topk(1, group by (instance) (instance:host:info{host=%q}))",
            "$host",
            "{{ $instance := .Labels.instance }}"
            + each_series(
                f"group by (device, port) ({_OWN_PORTS})",
                "$instance $uuid",
                "Port {{ .Labels.port }} of {{ .Labels.device }} is nearest to its GPU. "
                "{{ $device := .Labels.device }}{{ $port := .Labels.port }}"
                + "".join(
                    each_series(query, "$instance $device $port", f"That port {text}. ")
                    for query, text in _PROBLEMS_OF_PORT
                ),
            )
            + each_series(
                "max by (device, port) (infiniband_port_rate_bytes_per_second{instance=%[1]q} < on (device, port) "
                + "infiniband_port_expected_rate_bytes_per_second{instance=%[1]q}) unless on (device, port) "
                + f"({_OWN_PORTS})",
                "$instance $uuid",
                "Port {{ .Labels.port }} of {{ .Labels.device }} on its host runs below its highest rate so far. ",
            )
            + each_series(
                "max by (reason, part) (host_verdict_reason{instance=%q} == 1)",
                "$instance",
                "The health check of its host reports {{ .Labels.reason }} ({{ .Labels.part }}). ",
            ),
        ),
    )
    + each_series(
        "run:infiniband_rail:min_over_median{run=%q} < 0.5",
        "$labels.run",
        "One rail of the run carries {{ .Value | humanizePercentage }} of the traffic of its median rail. ",
    )
    + "{{ end }}"
    + each_series(
        f"min({_STEP}) < max({_STEP_NOW})",
        "$labels.run",
        "Without"
        + each_series(
            f"max by (rank) ({_SUSPECT}) and on () count(max by (rank) ({_SUSPECT})) == 1",
            "$labels.run",
            " rank {{ .Labels.rank }}",
        )
        + each_series(f"count(max by (rank) ({_SUSPECT})) > 1", "$labels.run", " this delay")
        + ', a step would take {{ printf "%.2f" .Value }} s'
        + each_series(f"max({_STEP_NOW})", "$labels.run", ' in place of {{ printf "%.2f" .Value }} s')
        + each_series(
            f"(1 - min({_STEP}) / max({_STEP_NOW})) * max(run_gpus{{run=%[1]q}}) * <gpu_hour_price> > 0",
            "$labels.run",
            ', which costs ${{ printf "%.0f" .Value }} an hour',
        )
        + ". ",
    )
    + "The run loses {{ $value | humanizePercentage }} of every step"
    + each_series(
        "%f * max(training_world_size{run=%q})",
        "$value $labels.run",
        ', as if {{ printf "%.1f" .Value }} of its GPUs were idle',
    )
    + "."
    + each_series(
        'max(run_straggler_ratio{run=%q,kind!="link"}) > 0',
        "$labels.run",
        " The ledger may have the lines of code of the straggler and of a peer: flopwatch ledger show "
        "{{ $labels.run }} (flags in the runbook).",
    )
    + "<owner>"
)


_SUSPECTS = "run_hang_suspect_ratio{run=%[1]q}"


def _suspects_with(sign: str) -> str:
    """Return a query for the suspects of a hang of the run %[1]q with a sign."""
    return f'run_hang_suspect_ratio{{run=%[1]q,signs=~"(.+,)?{sign}(,.+)?"}}'


_GROUP = "{{ with .Labels.group }}, in its {{ . }} group{{ end }}{{ with .Labels.ranks }} of ranks {{ . }}{{ end }}"
_TRAINING_HANG = (
    "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }} and does no work."
    + "".join(
        each_series(
            f"max by (rank, host, group, ranks) ({_suspects_with(sign)})",
            "$labels.run",
            "{{ if .Labels.rank }} Rank {{ .Labels.rank }}{{ with .Labels.host }} on {{ . }}{{ end }} is "
            + text
            + _GROUP * (sign in ("sequence", "ras"))
            + ".{{ end }}",
        )
        for sign, text in HANG_SIGNS.items()
    )
    + each_series(
        f"max by (host, rank) ({_SUSPECTS})",
        "$labels.run",
        "{{ if not .Labels.rank }} The other ranks wait for those on {{ .Labels.host }}.{{ end }}",
    )
    + "".join(
        each_series(
            f"max by (host, rank) ({_suspects_with(sign)})",
            "$labels.run",
            "{{ if not .Labels.rank }} They are " + text + ".{{ end }}",
        )
        for sign, text in HANG_SIGNS.items()
    )
    + each_series(
        f"group by (host, device, port) (port:infiniband_down:bool and on (host) {_suspects_with('link')})",
        "$labels.run",
        " Port {{ .Labels.port }} of {{ .Labels.device }} on {{ .Labels.host }} is down or missing.",
    )
    + each_series(
        f"""max by (rank, uuid) (
          training_rank_info{{run=%[1]q}} and on (rank) {_SUSPECTS}
        )""",
        "$labels.run",
        "{{ if .Labels.uuid }} Rank {{ .Labels.rank }} runs on GPU"
        + each_series("max by (gpu) (gpu_info{uuid=%q})", ".Labels.uuid", " {{ .Labels.gpu }}")
        + " ({{ .Labels.uuid }}).{{ end }}",
    )
    + each_series(
        f"100 * max({_SUSPECTS})",
        "$labels.run",
        ' Confidence is {{ printf "%.0f" .Value }} %.'
        " The ledger may have the stacks of a suspect and of a peer: flopwatch ledger show {{ $labels.run }} (flags in "
        "the runbook).",
    )
    + each_series(
        "max(run_hang_seconds{run=%[1]q}) unless on () run_hang_suspect_ratio{run=%[1]q}",
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
    # No `for`: the ledger is certain of a straggler before it names one. `keep_firing_for` is longer than a restart, so
    # that one straggler causes one message.
    Alert(
        name="TrainingStraggler",
        group="verdicts",
        severity="critical",
        identity=("run",),
        expr="""
            max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"}) >= <straggler_critical>
              and on (run)
            group by (run) (run:training_page:bool)
        """,
        for_="0s",
        keep_firing_for="10m",
        summary="Rank or host slows the training run",
        description=_TRAINING_STRAGGLER,
    ),
    Alert(
        name="TrainingStraggler",
        group="verdicts",
        severity="warning",
        identity=("run",),
        expr="""
            max by (run) (run_straggler_ratio{kind=~"rank|host|group|link"}) >= <straggler_warning>
        """,
        for_="0s",
        keep_firing_for="10m",
        summary="Rank or host slows the training run",
        description=_TRAINING_STRAGGLER,
    ),
    # No `for`: the ledger is certain of a hang before it reports one, and <hang> waits where another alert may be sent
    # in place of this one. A job that hangs is ended and may be down for longer than `keep_firing_for`, so a page
    # continues while the run is down.
    Alert(
        name="TrainingHang",
        group="verdicts",
        severity="critical",
        identity=("run",),
        expr="""
            <hang>
              and on (run)
            group by (run) (run:training_page:bool)
              or
            time() - max by (run) (ALERTS_FOR_STATE{alertname="TrainingHang",severity="critical"})
              and on (run)
            max by (run) (last_over_time(run_state{state="down"}[<5m>])) == 1
        """,
        for_="0s",
        keep_firing_for="15m",
        summary="Training run hangs in a step",
        description=_TRAINING_HANG,
    ),
    Alert(
        name="TrainingHang",
        group="verdicts",
        severity="warning",
        identity=("run",),
        expr="<hang>",
        for_="0s",
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
            max by (run) (instance:training_nonfinite:ratio_5m{value="loss"}) > 0.5
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
            max by (run) (instance:training_nonfinite:ratio_5m{value="loss"}) > 0
              or on (run)
            max by (run) (sum by (instance, run) (instance:training_nonfinite:ratio_5m)) > 0.1
        """,
        for_="1m",
        summary="Loss or gradients are not finite",
        description=_TRAINING_LOSS_NOT_FINITE,
    ),
)
