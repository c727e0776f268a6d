"""Alerts on the fabric: InfiniBand and RoCE ports."""

from __future__ import annotations

from textwrap import indent

from alerts import recording
from alerts.alert import Alert, each, on_host
from alerts.settings import AlertSettings
from flopwatch import catalogue as m


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on ports."""
    return (_link_errors(settings),)


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
