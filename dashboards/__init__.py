"""Panels and dashboards in the shape Grafana 11 and later store; the only module that imports grafanalib's panels.

grafanalib 0.7.1 gives the frame: dashboard, rows, variables, grid. Its stat, table and bar gauge still write options
that Grafana has removed, so field config and options are written here, in the names of
https://grafana.com/docs/grafana/latest/panels-visualizations/, and what it leaves over from older releases is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib import _gen, core

Json = dict[str, Any]
Mappings = Mapping[float, tuple[str, str]]  # of a value: the text and the colour it is shown with
Threshold = tuple[float | None, str]  # (from this value on, colour); None is minus infinity

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE_INTERVAL = "$__rate_interval"  # Grafana's: at least four scrapes, and no less than the step
COLUMNS = 24  # of Grafana's grid
CELLS = 120  # of a status history along its width
LABEL, FIELD = "${__field.labels.%s}", '${__data.fields["%s"]}'  # in a link: of the series, or of the table's row

# Keys of grafanalib that no Grafana since 8 reads, or that repeat a default.
LEFTOVERS = {
    "__inputs",
    "auto",
    "auto_count",
    "auto_min",
    "editable",
    "error",
    "hideControls",
    "hideTimeOverride",
    "rows",
    "sharedCrosshair",
    "style",
    "useTags",
}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query and the legend of its series; `instant` asks for the newest value only."""

    expr: str
    legend: str = ""
    instant: bool = False
    table: bool = False


def link(title: str, uid: str, **variables: str) -> Json:
    """Return a link to the dashboard `uid` that keeps data source and time, with these variables set.

    A value is taken from what was clicked: LABEL of a series, FIELD of a table's row, or is a variable here.
    """
    given = "".join(f"&var-{name}={value}" for name, value in variables.items())
    return {"title": title, "url": f"/d/{uid}?${{datasource:queryparam}}&${{__url_time_range}}{given}"}


def timeseries(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    thresholds: Sequence[Threshold] = (),
    top: float | None = None,
    stacked: bool = False,
    links: Sequence[Json] = (),
    width: int = 8,
    height: int = 8,
) -> Json:
    """Return lines over time; thresholds are drawn as dashed lines, `top` fixes the axis to 0..top."""
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 8,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
        "axisSoftMin": 0,
    }
    defaults: Json = {"unit": unit, "color": {"mode": "palette-classic"}, "custom": custom}
    if top is not None:
        defaults |= {"min": 0, "max": top}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel(
        "timeseries", title, description, queries, thresholds, defaults | _links(links), options, width, height
    )


def stat(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "none",
    thresholds: Sequence[Threshold] = (),
    name: bool = False,
    colors: Mapping[str, str] | None = None,
    mappings: Mappings | None = None,
    links: Sequence[Json] = (),
    width: int = 3,
    height: int = 4,
) -> Json:
    """Return one big value; with `name` the legend is shown in its place, coloured by `colors`."""
    options = {
        "colorMode": "value",
        "graphMode": "none" if name else "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if name else "value",
    }
    overrides = [
        _override(text, {"id": "color", "value": {"mode": "fixed", "fixedColor": color}})
        for text, color in (colors or {}).items()
    ]
    defaults = {"unit": unit, "color": {"mode": "thresholds"}} | _mapped(mappings) | _links(links)
    return _panel(
        "stat", title, description, [query], thresholds, defaults, options, width, height, overrides=overrides
    )


def gauge(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    top: float,
    thresholds: Sequence[Threshold] = (),
    width: int = 4,
    height: int = 6,
) -> Json:
    """Return a dial from 0 to `top` for each series, with the thresholds along its edge."""
    options = {
        "orientation": "auto",
        "showThresholdLabels": False,
        "showThresholdMarkers": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"unit": unit, "min": 0, "max": top, "color": {"mode": "thresholds"}}
    return _panel("gauge", title, description, [query], thresholds, defaults, options, width, height)


def heatmap(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    top: float,
    scheme: str = "Oranges",
    links: Sequence[Json] = (),
    width: int = COLUMNS,
    height: int = 12,
) -> Json:
    """Return a row of coloured cells for each series, from 0 to `top`."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": unit},
        "color": {
            "mode": "scheme",
            "scheme": scheme,
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 1,
            "steps": 64,
            "reverse": False,
            "min": 0,
            "max": top,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "reverse": False},
    }
    custom = {"hideFrom": {"legend": False, "tooltip": False, "viz": False}, "scaleDistribution": {"type": "linear"}}
    return _panel(
        "heatmap",
        title,
        description,
        [query],
        (),
        {"unit": unit, "custom": custom} | _links(links),
        options,
        width,
        height,
    )


def state_timeline(
    title: str,
    description: str,
    *queries: Query,
    mappings: Mappings,
    unit: str = "none",
    links: Sequence[Json] = (),
    width: int = COLUMNS,
    height: int = 6,
) -> Json:
    """Return a bar for each series along time, in the colour and with the text that `mappings` gives its value."""
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _states("state-timeline", title, description, queries, mappings, unit, links, options, width, height)


def status_history(
    title: str,
    description: str,
    *queries: Query,
    mappings: Mappings,
    unit: str = "none",
    links: Sequence[Json] = (),
    width: int = COLUMNS,
    height: int = 6,
) -> Json:
    """Return the same as a cell for each moment: for values that are looked at now and then."""
    options = {
        "showValue": "never",
        "rowHeight": 0.9,
        "colWidth": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    # One cell a pixel would be no cell.
    return _states("status-history", title, description, queries, mappings, unit, links, options, width, height) | {
        "maxDataPoints": CELLS
    }


def bargauge(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    thresholds: Sequence[Threshold] = (),
    links: Sequence[Json] = (),
    width: int = 8,
    height: int = 8,
) -> Json:
    """Return one bar per series, from the newest value."""
    options = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "valueMode": "color",
        "showUnfilled": True,
        "sizing": "manual",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 28,
        "namePlacement": "left",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"unit": unit, "min": 0, "color": {"mode": "thresholds"}} | _links(links)
    return _panel("bargauge", title, description, [query], thresholds, defaults, options, width, height)


@dataclass(frozen=True, slots=True)
class Column:
    """A table column: the query whose value it shows, or only its labels when `unit` is None."""

    name: str
    query: str
    unit: str | None = "none"
    thresholds: Sequence[Threshold] = ()
    mappings: Mappings | None = None


def table(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    key: str,
    labels: Mapping[str, str],
    sort: str,
    ascending: bool = False,
    links: Mapping[str, Sequence[Json]] | None = None,
    width: int = COLUMNS,
    height: int = 10,
) -> Json:
    """Return rows joined on the label `key`; `labels` maps labels to their headings, `links` headings to links."""
    queries = [Query(column.query, instant=True, table=True) for column in columns]
    values = {f"Value #{_ref(i)}": column.name for i, column in enumerate(columns) if column.unit is not None}
    if len(columns) == 1:  # Grafana numbers the values of several queries only
        values |= dict.fromkeys(("Value",) if values else (), columns[0].name)
    names = dict(labels) | values
    overrides = [
        _override(
            column.name,
            {"id": "unit", "value": column.unit},
            *([{"id": "thresholds", "value": _steps(column.thresholds)}] if column.thresholds else []),
            *([{"id": "mappings", "value": _mapped(column.mappings)["mappings"]}] if column.mappings else []),
            *(
                [{"id": "custom.cellOptions", "value": {"type": "color-text"}}]
                if column.thresholds or column.mappings
                else []
            ),
        )
        for column in columns
        if column.unit is not None
    ] + _linked(links)
    keep, order = _columns(names)
    join = {"id": "joinByField", "options": {"byField": key, "mode": "outer"}}
    defaults = {"unit": "none", "color": {"mode": "thresholds"}, "custom": {"align": "auto", "filterable": True}}
    options = {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": sort, "desc": not ascending}]}
    return _panel(
        "table",
        title,
        description,
        queries,
        (),
        defaults,
        options,
        width,
        height,
        overrides=overrides,
        transformations=[keep, join, order],
    )


def label_table(
    title: str,
    description: str,
    query: str,
    *,
    labels: Mapping[str, str],
    links: Mapping[str, Sequence[Json]] | None = None,
    width: int = COLUMNS,
    height: int = 6,
) -> Json:
    """Return the labels of each series of one query, in the order of `labels`."""
    return _panel(
        "table",
        title,
        description,
        [Query(query, instant=True, table=True)],
        (),
        {"unit": "none", "custom": {"align": "auto", "filterable": True}},
        {"showHeader": True, "cellHeight": "sm"},
        width,
        height,
        overrides=_linked(links),
        transformations=_columns(labels),
    )


def variable(name: str, label: str, query: str, *, everything: bool = False) -> Json:
    """Return a variable filled by `query`; with `everything` its default is All, the empty value included."""
    template = core.Template(
        name=name,
        label=label,
        dataSource=DATASOURCE,
        refresh=core.REFRESH_ON_TIME_RANGE_CHANGE,
        query={"query": query, "refId": name},
        includeAll=everything,
        allValue=".*" if everything else None,
    )
    return _clean(template.to_json_data()) | {"current": {"text": "All", "value": "$__all"} if everything else {}}


def textbox(name: str, label: str, default: str) -> Json:
    """Return a variable that is typed in."""
    template = core.Template(name=name, label=label, type="textbox", query=default)
    return _clean(template.to_json_data()) | {"current": {"text": default, "value": default}}


def annotation(name: str, expr: str, title: str, color: str, text: str = "") -> Json:
    """Return marks on the time axis where a query has a series, whose labels texts name as {{label}}."""
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
    """Return the dashboard as Grafana stores it; `uid` is part of its address and never changes."""
    datasource = core.Template(name="datasource", label="Data source", query="prometheus", type="datasource")
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
        templating=core.Templating([_clean(datasource.to_json_data()) | {"current": {}}, *variables]),
        panels=[panel | {"id": number} for number, panel in enumerate(panels, start=1)],
        annotations=core.Annotations(list(annotations)),
        # From each dashboard to the others; the time goes with it, and the variables, which the other one may have too.
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
    plain: Json = json.loads(json.dumps(_clean(frame), cls=_gen.DashboardEncoder))
    return plain


def queries(board: Json, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (panel title, PromQL) for every query of a panel, with variables replaced; KeyError if one is missing."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled(target["expr"], variables)


def filled(expr: str, variables: Mapping[str, str]) -> str:
    """Return a query with `$name` and `${name}` replaced; KeyError if one is missing."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], expr)


def _states(
    kind: str,
    title: str,
    description: str,
    members: Sequence[Query],
    mappings: Mappings,
    unit: str,
    links: Sequence[Json],
    options: Json,
    width: int,
    height: int,
) -> Json:
    defaults = {"unit": unit, "color": {"mode": "thresholds"}, "custom": {"lineWidth": 0, "fillOpacity": 80}}
    return _panel(
        kind, title, description, members, (), defaults | _mapped(mappings) | _links(links), options, width, height
    )


def _links(links: Sequence[Json]) -> Json:
    return {"links": list(links)} if links else {}


def _linked(links: Mapping[str, Sequence[Json]] | None) -> list[Json]:
    return [_override(name, {"id": "links", "value": list(given)}) for name, given in (links or {}).items()]


def _mapped(mappings: Mappings | None) -> Json:
    if mappings is None:
        return {}
    return {
        "mappings": [
            {
                "type": "value",
                "options": {
                    f"{value:g}": {"text": text, "color": color, "index": place}
                    for place, (value, (text, color)) in enumerate(mappings.items())
                },
            }
        ]
    }


def _panel(
    kind: str,
    title: str,
    description: str,
    members: Sequence[Query],
    thresholds: Sequence[Threshold],
    defaults: Json,
    options: Json,
    width: int,
    height: int,
    *,
    overrides: Sequence[Json] = (),
    transformations: Sequence[Json] = (),
) -> Json:
    targets = [
        {
            "refId": _ref(i),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": "table" if query.table else "time_series",
            "instant": query.instant,
            "range": not query.instant,
        }
        for i, query in enumerate(members)
    ]
    nothing = _nothing(description)
    if nothing and kind == "table":  # or each empty cell would say so too
        overrides = [
            {"matcher": {"id": "byRegexp", "options": "/.*/"}, "properties": [{"id": "noValue", "value": ""}]},
            *overrides,
        ]
    # maxDataPoints bounds what a query of a thousand-GPU run costs; grafanalib's 100 is too coarse to see a stall.
    frame = core.Panel(
        title=title,
        description=description,
        dataSource=DATASOURCE,
        targets=targets,
        maxDataPoints=500,
        gridPos={"h": height, "w": width, "x": 0, "y": 0},
        transformations=list(transformations),
    ).panel_json(
        {
            "type": kind,
            "options": options,
            "fieldConfig": {
                "defaults": defaults | {"thresholds": _steps(thresholds)} | nothing,
                "overrides": list(overrides),
            },
        }
    )
    return _clean(frame)


def _nothing(description: str) -> Json:
    """Return what the panel shows where a query has no series: what its description says of that."""
    found = re.search(r"Nothing: (.+?\.)(?:\s|$)", description)
    return {"noValue": found[1][0].upper() + found[1][1:]} if found else {}


def _steps(thresholds: Sequence[Threshold]) -> Json:
    steps = thresholds or [(None, "blue")]
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


def _override(name: str, *properties: Json) -> Json:
    return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}


def _columns(names: Mapping[str, str]) -> tuple[Json, Json]:
    """Return the transformations that keep the fields in `names`, and that put them in order and give them headings."""
    return {"id": "filterFieldsByName", "options": {"include": {"names": list(names)}}}, {
        "id": "organize",
        "options": {
            "excludeByName": {},
            "indexByName": {field: place for place, field in enumerate(names)},
            "renameByName": dict(names),
        },
    }


def _ref(index: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index]


def _clean(frame: Json) -> Json:
    return {key: value for key, value in frame.items() if value is not None and key not in LEFTOVERS}
