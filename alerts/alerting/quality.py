"""Alerts on how well a run trains: MFU, tokens, data and loss."""

from __future__ import annotations

from alerts.alert import Alert
from alerts.fragments import each_node_exporter, each_series

_DATA_STALL = (
    'sum by (run, rank) (rate(training_activity_seconds_total{run=%[1]q,activity="data_stall"}[<5m>])) / '
    'sum by (run, rank) (rate(training_activity_seconds_total{run=%[1]q,activity=~"step|data_stall"}[<5m>])) > 0.1'
)
_NFS_READ = '{instance=%[1]q,operation="READ"}[<5m>]'
# Storage clients of the host $host, which may have none. A read of a megabyte takes a few milliseconds over NFS, less
# than one with WekaFS, and up to a tenth of a second from an object store.
_STORAGE = each_node_exporter(
    "$host",
    each_series(
        "max(rate(node_pressure_io_stalled_seconds_total{instance=%q}[<5m>])) > 0.1",
        "$node",
        " All busy tasks of {{ $host }} waited for storage {{ .Value | humanizePercentage }} of the time.",
    )
    + each_series(
        f"topk(1, sum by (export) (rate(node_mountstats_nfs_operations_request_time_seconds_total{_NFS_READ})) / "
        f"sum by (export) (rate(node_mountstats_nfs_operations_requests_total{_NFS_READ})) > 0.05)",
        "$node",
        " A read from {{ .Labels.export }} (NFS) takes {{ .Value | humanizeDuration }} on {{ $host }}.",
    )
    + each_series(
        "sum by (export) (increase(node_mountstats_nfs_operations_major_timeouts_total{instance=%q}[<5m>])) >= 1",
        "$node",
        ' Requests to {{ .Labels.export }} (NFS) timed out {{ printf "%.0f" .Value }} times in <5m> on {{ $host }}.',
    ),
) + "".join(
    each_series(query, "$host", f" A read from {client} takes {{{{ .Value | humanizeDuration }}}} on {{{{ $host }}}}.")
    for client, query in (
        ("WekaFS", '1e-6 * avg(weka_stats{host_name=%q,category="ops",stat="READ_LATENCY"}) > 0.01'),
        (
            "Cloud Storage FUSE",
            '1e-6 * sum(rate(fs_ops_latency_sum{host=%[1]q,fs_op="ReadFile"}[<5m>])) / '
            'sum(rate(fs_ops_latency_count{host=%[1]q,fs_op="ReadFile"}[<5m>])) > 0.2',
        ),
    )
)

ALERTS: tuple[Alert, ...] = (
    # The limit is 85 % of the run's own median, because TrainingStraggler warns from 10 % on and names the rank. The
    # baseline ends half an hour ago, so that the drop does not lower it. The run was in steps for the whole window, so
    # that no start-up is in it. Evaluation, checkpoints and compiling are not in MFU. `for` outlasts a slow file system
    # and a noisy neighbour.
    Alert(
        name="TrainingMfuDrop",
        group="quality",
        severity="warning",
        identity=("run",),
        expr="""
            avg_over_time(run:training_mfu:ratio_rate5m[<10m>])
              <
            0.85 * quantile_over_time(0.5, run:training_mfu:ratio_rate5m[<3h>] offset <30m>)
              and on (run)
            run:training_mfu:ratio_rate5m
              and on (run)
            run:training_mfu:ratio_rate5m offset <10m>
              and on (run)
            run:training_mfu:ratio_rate5m offset <1h30m>
        """,
        for_="15m",
        summary="MFU of the training run fell",
        description=(
            "MFU of run {{ $labels.run }} is {{ $value | humanizePercentage }} in the last <10m>."
            + each_series(
                "quantile_over_time(0.5, run:training_mfu:ratio_rate5m{run=%q}[<3h>] offset <30m>)",
                "$labels.run",
                " Its median over <3h>, until <30m> ago, was {{ .Value | humanizePercentage }}.",
            )
            + "<owner>"
        ),
    ),
    # MFU above 1, or 10 % above the tensor activity that the GPUs measure. For this comparison, MFU is taken over the
    # wall clock, as GPUs count. Tensor activity is NaN while a profiler holds the counters, and no comparison is true
    # for NaN. `for` is two windows of MFU.
    Alert(
        name="TrainingMfuImpossible",
        group="quality",
        severity="warning",
        identity=("run",),
        expr="""
            max by (run) (rank:training_mfu:ratio_rate5m) > 1
              or on (run)
            (
              avg by (run) (instance:training_declared_mfu:ratio_rate5m)
                > on (run)
              1.1 * avg by (run) (instance:gpu_tensor_active:ratio_rate5m)
                unless on (run)
              (instance:training_run:info unless on (instance, run) instance:gpu_tensor_active:ratio_rate5m)
                unless on (run)
              instance:training_peak_override:bool
            )
        """,
        for_="10m",
        summary="Declared FLOPs exceed what the GPUs can do",
        description=(
            "Run {{ $labels.run }} declares FLOPs of {{ $value | humanizePercentage }} of its GPUs' peak."
            + each_series(
                "avg((rate(gpu_tensor_active_seconds_total[<5m>]) / rate(gpu_profiled_seconds_total[<5m>])) "
                + "and on (uuid) training_rank_info{run=%q})",
                "$labels.run",
                " The tensor cores of its GPUs were active {{ .Value | humanizePercentage }} of the time.",
            )
            + " Its declared FLOPs per token, tokens, dtype or peak are wrong, and so is its MFU."
            + each_series(
                "group by (convention, dtype, flops_source, peak_source) (training_run_info{run=%q})",
                "$labels.run",
                " Declared: convention {{ .Labels.convention }}, dtype {{ .Labels.dtype }}, FLOPs from {{ "
                + ".Labels.flops_source }}, peak from {{ .Labels.peak_source }}.",
            )
        ),
    ),
    # A framework may know the size of the model only after a while.
    Alert(
        name="TrainingMfuUnavailable",
        group="quality",
        severity="info",
        identity=("run", "reason"),
        expr="sum by (run, reason) (instance:training_mfu_unavailable:count)",
        for_="15m",
        summary="Training run has no MFU",
        description=(
            "Run {{ $labels.run }} has no MFU. Ranks that report the reason {{ $labels.reason }}: "
            + '{{ printf "%.0f" $value }}. The runbook explains the reason.'
        ),
    ),
    # `for` equals that of TrainingMfuUnavailable, because absent tokens are a reason for an absent MFU.
    Alert(
        name="TrainingTokensAbsent",
        group="quality",
        severity="info",
        identity=("run",),
        expr="max by (run) (instance:training_steps:increase2m) > 0 unless on (run) instance:training_tokens:rate5m",
        for_="15m",
        summary="Training run reports no tokens",
        description=(
            "Run {{ $labels.run }} reports steps without tokens, so it has no tokens per second, FLOPs or "
            + "MFU. Pass tokens= to run.step()."
        ),
    ),
    # The rank that waits most counts, because the others wait for it in a collective and count that as step time. A
    # shuffle buffer that fills at the start of an epoch, or a cold cache, takes a few minutes.
    Alert(
        name="TrainingDataStall",
        group="quality",
        severity="warning",
        identity=("run",),
        expr="max by (run) (instance:training_data_stall:ratio_rate5m) > 0.1",
        for_="10m",
        summary="Training run waits for data",
        description=(
            "A rank of run {{ $labels.run }} spends {{ $value | humanizePercentage }} of its step time "
            + "waiting for its next batch:"
            + each_series(
                f"topk(3, {_DATA_STALL})",
                "$labels.run",
                " rank {{ .Labels.rank }}<on_host> {{ .Value | humanizePercentage }}.",
            )
            + each_series(
                "topk(3, max by (host) "
                + f"(training_rank_info{{run=%[1]q}} * on (run, rank) group_left () ({_DATA_STALL})))",
                "$labels.run",
                "{{ $host := .Labels.host }}" + _STORAGE,
                by="host",
            )
            + "<owner>"
        ),
    ),
    # A single spike can be one bad batch.
    Alert(
        name="TrainingLossSpikes",
        group="quality",
        severity="warning",
        identity=("run",),
        expr="max by (run) (instance:training_loss_spikes:increase30m) >= 3",
        for_="0s",
        summary="Loss of the training run spikes repeatedly",
        description=(
            'The loss of run {{ $labels.run }} was far above its mean {{ printf "%.0f" $value }} times in '
            + "<30m>."
            + each_series("max(training_loss{run=%q})", "$labels.run", ' It is {{ printf "%.4g" .Value }} now.')
            + "<owner>"
        ),
    ),
)
