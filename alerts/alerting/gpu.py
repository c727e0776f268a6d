"""Alerts on GPUs."""

from __future__ import annotations

import csv
from importlib.resources import files
from textwrap import indent

from alerts.alert import Alert, each, on_host
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


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on GPUs."""
    return (_xid(settings),)


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
