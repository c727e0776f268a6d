"""The one definition of a GPU, port, host or run that is not well.

An object is not well while an alert on it fires, or while the verdict on its host has a reason that concerns it. Each
of these is a finding. Its value is 2 if the alert is critical or the verdict is bad, else 1. A panel may claim that
objects are well only if its query has the findings on them. tests/rules/test_findings.py checks this for every alert.
"""

from __future__ import annotations

import dashboards as d
from alerts import recording as r
from dashboards import parts as p
from flopwatch import catalogue as m

HEALTH: d.Mappings = {0: ("ok", "green"), 1: ("degraded", "orange"), 2: ("bad", "red")}
SHIPPED = f'alertname=~"{p.ALERTS}"'
_ANY = 'uuid!=""'
_IS_PORT = 'part=~"port .+"'
HOSTS = f'host!="", {SHIPPED}'


def of_alerts(matchers: str) -> str:
    """Return the findings of firing alerts with these label matchers, one for each incident.

    An alert that fires as critical and as warning is one incident. The watchdog, which always fires, is left out.
    """
    firing = f'alertstate="firing", alertname!="FlopwatchWatchdog", {matchers}'
    critical, other = (f'ALERTS{{severity{sign}"critical", {firing}}}' for sign in ("=", "!="))
    same = 'ALERTS{severity="critical", alertstate="firing"}'  # the other labels are those of `other`
    return f"(2 * {critical} or ({other} unless ignoring (severity) {same}))"


def on_hosts(alerts: str, hosts: str = r.HOST) -> str:
    """Return the findings on hosts: of alerts with these matchers, and of the verdicts on `hosts`, a part of r.HOST."""
    return f"({of_alerts(alerts)} or {_of_verdicts(hosts)})"


def on_gpu(gpu: str) -> str:
    """Return the findings on one GPU, whose label `uuid` has the matcher `gpu`, and on what it shares with others."""
    of_host = f"topk by (host) (1, max by (host, uuid) ({m.GPU_INFO}{{{gpu}}}))"
    return f"({_of_gpus(gpu)} or {_SHARED} * on (host) group_left (uuid) {of_host})"


def on_gpus() -> str:
    """Return the findings on all GPUs. Of what the GPUs of a host share, it is the highest, without its name."""
    known = f"max by (host, uuid) ({m.GPU_INFO})"
    return f"({_of_gpus(_ANY)} or {known} * on (host) group_left () max by (host) ({_SHARED}))"


def _of_gpus(gpus: str) -> str:
    one = f"topk by (instance, gpu) (1, max by (instance, gpu, uuid) ({m.GPU_INFO}{{{gpus}}}))"
    part = f'label_replace({one}, "part", "gpu $1", "gpu", "(.+)")'
    return f"{of_alerts(gpus)} or {_of_verdicts(r.HOST)} * on (instance, part) group_left (uuid) {part}"


def on_ports(alerts: str, hosts: str = r.HOST) -> str:
    """Return the findings on ports: of alerts with these matchers, and of the verdicts on the ports of `hosts`."""
    found = _of_verdicts(hosts, _IS_PORT)
    for label, group in (("device", 1), ("port", 2)):
        found = f'label_replace({found}, "{label}", "${group}", "part", "port (.+)/(.+)")'
    return f"({of_alerts(alerts)} or {found})"


def _of_verdicts(hosts: str, parts: str = 'part!=""') -> str:
    bad, other = (f'{m.HOST_VERDICT_REASON}{{{parts}, verdict{sign}"bad"}}' for sign in ("=", "!="))
    return f"(2 * {bad} or {other}) * on (instance) group_left (host) {hosts}"


# Findings on what all GPUs of a host share: the driver, and the NVSwitches.
_SHARED_ALERTS = 'alertname=~"GpuDriverNotLoaded|NvswitchSxid", host!=""'
_SHARED_PARTS = 'part=~"driver|switch .+"'
_SHARED = f"({of_alerts(_SHARED_ALERTS)} or {_of_verdicts(r.HOST, _SHARED_PARTS)})"


def health(title: str, description: str, findings: str, known: str, *, width: int = 3, height: int = 4) -> d.Json:
    """Return a panel with the health of one object, 0 if there is no finding and `known` is 0."""
    return d.stat(
        title,
        f"{description} Bad if a critical alert fires or the verdict is bad, degraded at any other finding. Expected: "
        "ok. The table of findings has the alerts and reasons.",
        d.Query(f"max({findings} or {known})"),
        mappings=HEALTH,
        width=width,
        height=height,
        no_data="Unknown: nothing reports it.",
    )


def table(description: str, findings: str, *headings: str, width: int = d.COLUMNS, height: int = 8) -> d.Json:
    """Return the table of findings, with the alert or the reason of each and the columns `headings` of _COLUMNS."""
    return _table(
        "Findings",
        f"{description} Expected: no row. Each alert has a runbook, and docs/check.md explains the reasons.",
        findings,
        ("Alert", "Severity", "Reason", "Verdict", *headings, "What to do"),
        width,
        height,
        "No alert fires, and no verdict has a reason.",
    )


def firing(
    on: str, description: str, incidents: str, *headings: str, width: int = d.COLUMNS, height: int = 8
) -> d.Json:
    """Return a table of firing alerts on objects without a verdict, with the columns `headings` of _COLUMNS.

    `on` is the title's end, such as "on leaves". Other alerts may fire, so an empty table is about these objects only.
    """
    title, text = f"Firing alerts {on}", f"{description} Expected: no row. Each alert has a runbook."
    return _table(title, text, incidents, ("Alert", "Severity", *headings), width, height, f"No alert {on} fires.")


_COLUMNS = {
    "Alert": "alertname",
    "Severity": "severity",
    "Reason": "reason",
    "Verdict": "verdict",
    "Run": "run",
    "Rank": "rank",
    "Node": "host",
    "GPU": "gpu",
    "UUID": "uuid",
    "$ an hour": "dollars",
    "Device": "device",
    "Port": "port",
    "Part": "part",
    "Leaf": "leaf",
    "Xid": "xid",
    "What to do": "action",
}
_LINKS = {
    "Run": [p.to_run(d.FIELD % "Run")],
    "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
    "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")],
}


def placed(findings: str) -> str:
    """Return the findings with the index of their GPU, and the run and rank on it, added as gpu, run and rank."""
    index = f'topk by (uuid) (1, max by (uuid, gpu) ({m.GPU_INFO}{{uuid!=""}}))'
    rank = f'topk by (uuid) (1, max by (uuid, run, rank) ({m.TRAINING_RANK_INFO}{{uuid!=""}}))'
    on_gpu = f"{findings} * on (uuid) group_left (gpu) {index}"
    return (
        f"({on_gpu} * on (uuid) group_left (run, rank) {rank} or {on_gpu} unless on (uuid) {rank} or "
        f"{findings} unless on (uuid) {index})"
    )


def _table(
    title: str, text: str, findings: str, headings: tuple[str, ...], width: int, height: int, no_data: str
) -> d.Json:
    hidden = ("UUID",) if "GPU" in headings else ()
    return d.label_table(
        title,
        text,
        findings,
        labels={_COLUMNS[heading]: heading for heading in (*headings, *hidden)},
        links={heading: links for heading, links in _LINKS.items() if {heading, "Node"} <= {*headings}},
        hidden=hidden,
        width=width,
        height=height,
        no_data=no_data,
    )
