"""Fragments of PromQL and templates that several alerts share: host of an exporter, runs on a host, Xid meanings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from flopwatch.catalogue.xid import XidMeaning, paging_xids, xids

# Xids of broken hardware after which a GPU may go on, from severity error on. Xid 63 is below: it is harmless, and a
# remap that waits for a reset is GpuRepairPending.
HARDWARE_CLASSES = ("memory", "nvlink", "pcie", "power", "firmware")

# Alerts that explain why every run with a rank on their host has stopped. Those on a switch, port or GPU explain it
# only in their first half hour, because they may fire for days without harm to a run.
HOST_CAUSES = ("NodeLost", "HostOnFaultyLeaf", "Maintenance")
PART_CAUSES = ("NvswitchSxid", "InfinibandPortDown")
GPU_CAUSES = (
    "GpuXidCritical",
    "GpuMemoryFailed",
    "GpuMissing",
    "GpuRecoveryNeeded",
    "NvlinkDown",
    "NvlinkFabricUnhealthy",
)
# Alerts that HostOnFaultyLeaf and RunOnFaultyHost inhibit: of a host, and those of a run that page.
OF_HOST = "NodeLost|Flopwatch.+|Infiniband.+|RailImbalance|EfaErrors|Roce.+"
STANDS_STILL = "TrainingDown|TrainingHang|TrainingRestartStorm|TrainingStalled"
OF_RUN = f"{STANDS_STILL}|TrainingStraggler"


def each_series(query: str, arguments: str, text: str, by: str = "") -> str:
    """Return a Prometheus template that prints `text` for each series of a query whose %q are filled with `arguments`.

    Series are sorted by the label `by`. By default, those of an aggregation are sorted by the first label that it
    keeps, because their order would be random. For series with a label, check for it in `text`: Prometheus answers
    uuid!="" from the series of every GPU, each time that the alert is evaluated.
    """
    aggregation = re.match(r"(?:max|min|sum|count|group) by \((\w+)", query)
    order = by or (aggregation.group(1) if aggregation else "")
    in_order = f' | sortByLabel "{order}"' if order else ""
    return f"\n{{{{- range printf `{query}` {arguments} | query{in_order} }}}}{text}{{{{ end }}}}"


def each_port(problem: str, text: str) -> str:
    """Return a template that prints `text` if the port of the alert has a series in `problem`, a PromQL expression.

    In `problem`, %[1]q stands for the device, %[2]q for the port and %[3]q for the exporter's instance.
    """
    return each_series(
        "topk(1, group by (instance) (infiniband_info{device=%q,port=%q,host=%q}))",
        "$labels.device $labels.port $labels.host",
        each_series(f"max({problem})", "$labels.device $labels.port .Labels.instance", text),
    )


def each_node_exporter(host: str, text: str) -> str:
    """Return a template that prints `text` if a node_exporter runs on the host in the template variable `host`.

    `$node` is its instance in `text`. Its nodename is the name of the host, or has the same first label: the exporters
    may name a host with and without its domain. A name in full has priority.
    """
    short = f'(printf "%s([.].*)?" (reReplaceAll "[^A-Za-z0-9_-].*" "" {host}))'
    return each_series(
        "topk(1, group by (instance) (node_uname_info{nodename=%[1]q} or on () node_uname_info{nodename=~%[2]q}))",
        f"{host} {short}",
        "{{ $node := .Labels.instance }}" + text,
    )


def _xids(chosen: Iterable[int]) -> str:
    return "|".join(map(str, chosen))


def _meaning(chosen: Iterable[int], text: str = " ({0.name})") -> str:
    return "".join(
        f'\n{{{{- if eq $labels.xid "{code}" }}}}{text.format(xids()[code])}{{{{ end }}}}' for code in chosen
    )


def _of_hardware(meaning: XidMeaning) -> bool:
    return meaning.category in HARDWARE_CLASSES and meaning.severity in ("error", "critical", "fatal")


_HARDWARE = [code for code, row in xids().items() if not row.page and _of_hardware(row)]
_JOB = [code for code, row in xids().items() if not row.page and row.category in ("application", "engine")]
_APPLICATION = [code for code, row in xids().items() if row.category == "application"]

_NEAREST = 'last_over_time(infiniband_gpu_affinity_info{<of_port>,affinity!="SYS"}[<1h>])'

FRAGMENTS: Mapping[str, str] = {
    # After a restart of Prometheus, the host's old name may be recorded next to the new one for five minutes.
    "host": "topk by (instance) (1, instance:host:last30m)",
    # The host of an exporter, or a series without `host` if it is not known yet.
    "host_of_exporter": """\
(
  instance:host:info
    or on (instance)
  group by (instance) (flopwatch_build_info)
)""",
    "paging_xids": _xids(paging_xids()),
    "hardware_xids": _xids(_HARDWARE),
    "job_xids": _xids(_JOB),
    "application_xids": _xids(_APPLICATION),
    "meaning_of_paging_xid": _meaning(paging_xids(), " ({0.name}). {0.page}"),
    "meaning_of_hardware_xid": _meaning(_HARDWARE),
    "meaning_of_job_xid": _meaning(_JOB),
    "meaning_of_application_xid": _meaning(_APPLICATION),
    # Pages that an Xid explains and that may outlast it. So may NodeLost, which reads series of runs and ends at most
    # two minutes after FlopwatchExporterDown.
    "after_xid": "GpuMissing|GpuTooFew|GpuRecoveryNeeded|NvlinkDown|NvlinkFabricUnhealthy",
    "host_causes": "|".join(HOST_CAUSES),
    "part_causes": "|".join(PART_CAUSES),
    "gpu_causes": "|".join(GPU_CAUSES),
    "other_causes": "|".join(
        (*(name for name in HOST_CAUSES if name != "HostOnFaultyLeaf"), *PART_CAUSES, *GPU_CAUSES)
    ),
    "host_part_and_gpu_causes": "|".join((*HOST_CAUSES, *PART_CAUSES, *GPU_CAUSES)),
    "of_host": OF_HOST,
    "of_run": OF_RUN,
    "stands_still": STANDS_STILL,
    # Age of the open step of a run that hangs. It is absent in the first minute without a suspect, or with a sign of a
    # fault that has an alert of its own. That alert must exist first, to be sent in place of the run's.
    "hang": """\
max by (run) (run_hang_seconds)
  and on (run)
(
  group by (run) (run_hang_suspect_ratio)
    unless on (run)
  run_hang_sign_ranks{sign=~"gone|gpu|link"}
    or on (run)
  group by (run) (run_hang_seconds offset <1m>)
)""",
    "of_port": "instance=%[3]q,device=%[1]q,port=%[2]q",  # in a query of each_port
    "port": "Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }}",
    # GPUs nearest to the port, by PCI path, and their ranks. The port itself may be missing. Where more than four GPUs
    # are nearest, as in a virtual machine without PCI switches, the path does not show which of them use the port.
    "gpus_at_port": each_series(
        "topk(1, group by (instance) (infiniband_info{device=%q,port=%q,host=%q}))",
        "$labels.device $labels.port $labels.host",
        each_series(
            f"max by (gpu, uuid) ({_NEAREST}) and on () count({_NEAREST}) <= 4",
            "$labels.device $labels.port .Labels.instance",
            " It is nearest to GPU {{ .Labels.gpu }}"
            + each_series(
                "group by (run, rank) (last_over_time(training_rank_info{uuid=%q}[<5m>]))",
                ".Labels.uuid",
                " (rank {{ .Labels.rank }} of run {{ .Labels.run }})",
            )
            + ".",
        ),
    ),
    "gpu": "GPU"
    + each_series(
        "topk(1, max by (gpu) (last_over_time(gpu_info{uuid=%q}[<5m>])))", "$labels.uuid", " {{ .Labels.gpu }}"
    )
    + "{{ with $labels.uuid }} ({{ . }}){{ end }}{{ with $labels.host }} of {{ . }}{{ end }}",
    # Ranks on the GPU $labels.uuid. A GPU without a uuid has no known ranks.
    "ranks_on_gpu": "{{ if $labels.uuid }}"
    + each_series(
        "group by (run, rank) (last_over_time(training_rank_info{uuid=%q}[<5m>]))",
        "$labels.uuid",
        " Rank {{ .Labels.rank }} of run {{ .Labels.run }} runs on this GPU.",
    )
    + "{{ end }}",
    "runs_on_host": "{{ if $labels.host }}"
    + each_series(
        "count by (run) (group by (run, rank) (last_over_time(training_rank_info{host=%q}[<5m>])))",
        "$labels.host",
        " Run {{ .Labels.run }} has {{ .Value }} of its ranks on this host.",
    )
    + "{{ end }}",
    # Host of the rank .Labels.rank of the run $labels.run, if it is known.
    "on_host": each_series(
        "max by (host) (training_rank_info{run=%q,rank=%q})",
        "$labels.run .Labels.rank",
        "{{ with .Labels.host }} on {{ . }}{{ end }}",
    ),
    # Source lines at which ranks of the run $labels.run are stuck, and the ranks at lines with at most two ranks.
    "lines": each_series(
        "sort_desc(topk(2, count by (at) (training_stuck_frame_info{run=%[1]q}) > 2))",
        "$labels.run",
        ' {{ printf "%.0f" .Value }} ranks are at source line {{ .Labels.at }}.',
    )
    + each_series(
        "topk(3, max by (rank, at) (training_stuck_frame_info{run=%[1]q}) "
        "and on (at) (count by (at) (training_stuck_frame_info{run=%[1]q}) <= 2))",
        "$labels.run",
        " Rank {{ .Labels.rank }} is at source line {{ .Labels.at }}.",
        by="rank",
    ),
    "owner": each_series(
        'max by (owner, team) (last_over_time(training_run_info{run=%q,owner!=""}[<1d>]))',
        "$labels.run",
        " Owner: {{ .Labels.owner }}{{ with .Labels.team }} ({{ . }}){{ end }}.",
    ),
}
