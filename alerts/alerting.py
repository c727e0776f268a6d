"""The alerts. Each is one literal here, one runbook in `runbooks/`, one rule test in `tests/rules/`.

An alert on a run has one series per run, so that a flickering culprit does not restart it; who it is, where it runs and
what is lost is looked up in the description with `query`. An alert on hardware has one series per GPU and Xid, or port.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files
from textwrap import indent
from typing import Literal

from alerts import recording
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

# The Xids after which a GPU is not fit for work, and NVIDIA's immediate action in words. 64 is the row-remap failure
# of the memory error management guide: a criterion for replacement. 144 to 150 are of NVLink 5, fatal or not.
CRITICAL_XIDS = {
    "46": "Reset the GPU.",
    "48": "Drain the node and reset the GPU.",
    "62": "Reset the GPU.",
    "64": "Drain the node and have the GPU replaced.",
    "74": "Check the NVLink the kernel log names, then reset the GPU.",
    "79": "Drain and reboot the node.",
    "95": "Reset the GPU.",
    "109": "Reset the GPU.",
    "110": "Reset the GPU.",
    "119": "Reset the GPU; if it does not answer, reboot the node.",
    "120": "Reset the GPU; if it does not answer, reboot the node.",
    "136": "Reset the GPU.",
    "140": "Reset the GPU.",
    "143": "Reset the GPU; if it does not answer, reboot the node.",
    **dict.fromkeys(map(str, range(144, 151)), "Check the NVLink the kernel log names, then reset the GPU."),
    "155": "Reset the GPU.",
    "156": "Drain the node and reset the GPU.",
    "158": "Reset the GPU; if it does not answer, reboot the node.",
}


RUN_LINK = "?var-run={{ $labels.run | urlquery }}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `identity` are the labels its expression gives; with the name and severity they are the alert.

    `summary` is a static sentence; `description` names run, rank, host, GPU or port and the value. Texts are Prometheus
    templates. `link` is the dashboard's query string.
    """

    group: str
    name: str
    severity: Literal["critical", "warning", "info"]
    identity: tuple[str, ...]
    expr: str
    for_: str
    summary: str
    description: str
    keep_firing_for: str = ""
    link: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels the rule adds."""
        return {"severity": self.severity}

    def annotations(self, settings: AlertSettings) -> dict[str, str]:
        """Return summary, description and the two links."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{settings.runbook_base_url}/{self.name}.md",
            "dashboard_url": f"{settings.dashboard_base_url}/d/flopwatch-run{self.link}",
        }

    def rule(self, settings: AlertSettings) -> dict[str, object]:
        """Return the rule as Prometheus reads it."""
        keep = {"keep_firing_for": self.keep_firing_for} if self.keep_firing_for else {}
        return {"alert": self.name, "expr": self.expr, "for": self.for_, **keep, "labels": self.labels,
                "annotations": self.annotations(settings)}


def each(query: str, arguments: str, text: str) -> str:
    """Return a template that prints `text` for each series `query` gives; its %q are filled with `arguments`."""
    return f"\n{{{{- range printf `{query}` {arguments} | query }}}}{text}{{{{ end }}}}"


def on_host(expr: str, key: str, info: m.Metric, window: str) -> str:
    """Return `expr` with the host its GPU or port had within `window`: a hung driver or a restarted exporter, which
    often follow the fault, must not make another alert of it. One exporter serves both sides, hence `instance`.
    """
    host = f"max by (instance, {key}, host) (last_over_time({info}[{window}]))"
    # topk, because a node that was renamed has two; two of them would break the join for the whole cluster.
    return f"({expr})\n* on (instance, {key}) group_left (host)\ntopk by (instance, {key}) (1, {host})"


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return every alert."""
    return (*_straggler(settings), *_down(settings), _link_errors(settings), _xid(settings), _watchdog())


def _owner(settings: AlertSettings) -> str:
    memory = settings.at_pace(settings.memory)
    info = f'max by (owner, team) (last_over_time({m.TRAINING_RUN_INFO}{{run=%q,owner!=""}}[{memory}]))'
    return each(info, "$labels.run", " Owner: {{ .Labels.owner }}{{ with .Labels.team }} ({{ . }}){{ end }}.")


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
                   + "." + _owner(settings))

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
        + _owner(settings)
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


def _link_errors(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.link_window)

    def problems(port: str = "") -> tuple[str, ...]:
        """Return what is wrong with a port, or with the one that matchers name, in four expressions."""
        return (
            f"increase({m.INFINIBAND_SYMBOL_ERRORS}{port}[{window}]) > {settings.symbol_errors}",
            f"increase({m.INFINIBAND_LINK_DOWNED}{port}[{window}]) > 0",
            # 4 is active, 5 active-defer.
            f"{m.INFINIBAND_STATE}{port} < 4 and on (instance, device, port) {recording.PORT_WAS_ACTIVE}",
            f"{m.INFINIBAND_PRESENT}{port} == 0",
        )

    texts = (
        f' {{{{ printf "%.0f" .Value }}}} symbol errors in {window}.',
        f" The link went down in the last {window}.",
        " Its state is {{ .Value }} (4 is active).",
        " It is gone from /sys.",
    )
    found = "".join(
        each(f"max(({problem}) and on (instance, device, port) {m.INFINIBAND_INFO}{{host=%[3]q}})",
             "$labels.device $labels.port $labels.host", text)
        for problem, text in zip(problems("{device=%[1]q,port=%[2]q}"), texts, strict=True)
    )
    wrong = on_host("\n  " + "\n    or\n  ".join(problems()) + "\n", "device, port", m.INFINIBAND_INFO, window)
    return Alert(
        "hardware", "InfinibandLinkErrors", "warning", ("host", "device", "port"),
        f"group by (host, device, port) (\n{indent(wrong, '  ')}\n)",
        settings.at_pace(settings.link_for), "An InfiniBand link makes errors, goes down, or is not active.",
        "Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }}:" + found
        + each(f"group by (run) ({m.TRAINING_RANK_INFO}{{host=%q}})", "$labels.host",
               " Run {{ .Labels.run }} has ranks on this node."),
        keep_firing_for=settings.at_pace(settings.link_keep),
    )


def _xid(settings: AlertSettings) -> Alert:
    table = files("flopwatch").joinpath("data/xid.csv").read_text(encoding="utf-8")
    names = {row["xid"]: row["name"] for row in csv.DictReader(table.splitlines())}
    meaning = "".join(
        f'\n{{{{- if eq $labels.xid "{xid}" }}}} ({names[xid]}). {action}{{{{ end }}}}'
        for xid, action in CRITICAL_XIDS.items()
    )
    ranks = f"last_over_time({m.TRAINING_RANK_INFO}{{uuid=%q}}[{settings.at_pace(settings.rate_window)}])"
    # By the time last seen, not by increase(): the first Xid may be the first sample of its series.
    codes, window = "|".join(CRITICAL_XIDS), settings.at_pace(settings.xid_window)
    seen = f'{m.GPU_XID_LAST}{{xid=~"{codes}"}}'
    fresh, kept = settings.seconds_at_pace(settings.xid_window), settings.seconds_at_pace(settings.memory)
    # An Xid of NVLink 5 of which the kernel log says each time that it was not fatal.
    links = f'last_over_time({m.GPU_XID_NVLINK_ERRORS}{{severity%s"non-fatal"}}[{window}])'
    recent = f"""
  (
    max by (instance, uuid, xid) (last_over_time({seen}[{window}])) > time() - {fresh}
      or
    max by (instance, uuid, xid) ({seen}) > time() - {kept}
      and on (instance, uuid) {m.GPU_PRESENT} == 0
  )
  unless on (instance, uuid, xid)
    ({links % "="} unless on (instance, uuid, xid) {links % "!="})
"""
    # An Xid of a GPU without info still pages, without its host.
    expr = f"{on_host(recent, 'uuid', m.GPU_INFO, window)}\n  or on (instance, uuid, xid)\n({recent})"
    index = each(f"topk(1, max by (gpu) (last_over_time({m.GPU_INFO}{{uuid=%q}}[{window}])))", "$labels.uuid",
                 " {{ .Labels.gpu }}")
    return Alert(
        "hardware", "GpuXidCritical", "critical", ("host", "uuid", "xid"),
        f"max by (host, uuid, xid) (\n{indent(expr, '  ')}\n)", "0s",
        "A GPU reported an error after which it is not fit for work.",
        "GPU" + index + " ({{ $labels.uuid }}) of {{ $labels.host }} reported Xid {{ $labels.xid }}" + meaning
        + each(f"group by (run, rank) ({ranks})", "$labels.uuid",
               " Rank {{ .Labels.rank }} of run {{ .Labels.run }} runs on it."),
    )


def _watchdog() -> Alert:
    return Alert(
        "watchdog", "FlopwatchWatchdog", "info", (), "vector(1)", "0s",
        "Always firing: when it stops arriving, Prometheus or Alertmanager is broken.",
        "Prometheus evaluates rules and Alertmanager delivers. Nobody is paged by this alert, but by its absence.",
    )
