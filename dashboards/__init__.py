"""Dashboards in the JSON that Grafana 11 and later store. Also exports the panels of panels.py and tables.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from grafanalib import _gen, core

from dashboards.panels import *  # noqa: F403  boards have one namespace
from dashboards.panels import COLUMNS, DATASOURCE, Json, clean
from dashboards.tables import *  # noqa: F403  boards have one namespace


def variable(name: str, label: str, query: str, *, everything: bool = False) -> Json:
    """Return a variable with the values that `query` returns.

    With `everything`, its default is All, which also includes series without the label.
    """
    template = core.Template(
        name=name,
        label=label,
        dataSource=DATASOURCE,
        refresh=core.REFRESH_ON_TIME_RANGE_CHANGE,
        query={"query": query, "refId": name},
        includeAll=everything,
        allValue=".*" if everything else None,
    )
    return clean(template.to_json_data()) | {"current": {"text": "All", "value": "$__all"} if everything else {}}


def textbox(name: str, label: str, default: str) -> Json:
    """Return a variable whose value users type into a text box, for instance a price."""
    template = core.Template(name=name, label=label, type="textbox", query=default)
    return clean(template.to_json_data()) | {"current": {"text": default, "value": default}}


def annotation(name: str, expr: str, title: str, color: str, text: str = "") -> Json:
    """Return an annotation that marks the times at which `expr` has a series. Texts can contain {{label}}."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "target": {"refId": name, "expr": expr, "interval": "60s"},
        "titleFormat": title,
        "textFormat": text,
    }


def dashboard(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[Json],
    rows: Mapping[str, Sequence[Json]],
    annotations: Sequence[Json] = (),
) -> Json:
    """Return a dashboard as Grafana stores it, with panels placed row by row.

    `rows` maps the heading of each row to its panels. `uid` is part of the dashboard's URL and must not change.
    """
    datasource = core.Template(name="datasource", label="Data source", query="prometheus", type="datasource")
    frame = core.Dashboard(
        title=title,
        description=description,
        uid=uid,
        tags=["flopwatch"],
        timezone="browser",
        schemaVersion=39,
        graphTooltip=core.GRAPH_TOOLTIP_MODE_SHARED_CROSSHAIR,
        refresh="30s",
        version=1,
        templating=core.Templating([clean(datasource.to_json_data()) | {"current": {}}, *variables]),
        panels=[panel | {"id": number} for number, panel in enumerate(_placed(rows), start=1)],
        annotations=core.Annotations(list(annotations)),
        # A menu that leads to the other dashboards. It keeps the time range and the variables that both of them have.
        links=[
            {
                "type": "dashboards",
                "title": "Dashboards",
                "tags": ["flopwatch"],
                "asDropdown": True,
                "icon": "",
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
    ).to_json_data()
    frame["timepicker"] = {"refresh_intervals": ["5s", "10s", "30s", "1m", "5m"]}
    plain: Json = json.loads(json.dumps(clean(frame), cls=_gen.DashboardEncoder))
    return plain


def _placed(rows: Mapping[str, Sequence[Json]]) -> list[Json]:
    """Return the panels of all rows with their positions, from left to right, each row below its heading."""
    panels: list[Json] = []
    y = 0
    for heading, members in rows.items():
        panels.append(
            {
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            }
        )
        y, x, tallest = y + 1, 0, 0
        for member in members:
            grid = member["gridPos"]
            if x + grid["w"] > COLUMNS:
                y, x, tallest = y + tallest, 0, 0
            panels.append(member | {"gridPos": grid | {"x": x, "y": y}})
            x, tallest = x + grid["w"], max(tallest, grid["h"])
        y += tallest
    return panels


def queries(board: Json, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the panel title and the PromQL of every query, with variables replaced.

    Raises KeyError if `variables` lacks one.
    """
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled(target["expr"], variables)


def filled(expr: str, variables: Mapping[str, str]) -> str:
    """Return a query with `$name` and `${name}` replaced by variables. Raises KeyError for a missing variable.

    `$1` is kept. In the function label_replace of PromQL, it is a part of the matched value.
    """
    return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda found: variables[found[1]], expr)
