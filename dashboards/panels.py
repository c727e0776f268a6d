"""Panels in the JSON that Grafana 11 and later store.

grafanalib 0.7.1 provides the frame: dashboard, rows, variables, grid. Its stat, table and bar gauge write options that
Grafana has removed. So this module writes field config and options itself, with the names of
https://grafana.com/docs/grafana/latest/panels-visualizations/, and drops settings that only older Grafana releases
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib import core

Json = dict[str, Any]
Mappings = Mapping[float, tuple[str, str]]  # of a value: the text and the colour it is shown with
Threshold = tuple[float | None, str]  # (from this value on, colour); None is minus infinity

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE_INTERVAL = "$__rate_interval"  # Grafana's: at least four scrapes, and no less than the step
COLUMNS = 24  # of Grafana's grid
CELLS = 120  # of a status history, along the time axis
LABEL, FIELD = "${__field.labels.%s}", '${__data.fields["%s"]}'  # in a link: of the series, or of the table's row

# Keys of grafanalib that no Grafana since 8 reads, or that repeat a default.
LEFTOVERS = {"__inputs", "auto", "auto_count", "auto_min", "editable", "error", "hideControls", "hideTimeOverride"}
LEFTOVERS |= {"rows", "sharedCrosshair", "style", "useTags"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query and the legend of its series. With `instant`, it returns the newest value only."""

    expr: str
    legend: str = ""
    instant: bool = False
    table: bool = False


def link(title: str, uid: str, **variables: str) -> Json:
    """Return a link to the dashboard `uid` that keeps data source and time range, with these variables set.

    A value is LABEL of the clicked series, FIELD of the clicked table row, or a variable of the linking dashboard.
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
    colors: Mapping[str, str] | None = None,
    band: tuple[str, str] | None = None,
    links: Sequence[Json] = (),
    width: int = 8,
    height: int = 8,
    no_data: str = "",
) -> Json:
    """Return a panel of lines over time. Thresholds are dashed lines. `top` fixes the axis to the range 0 to `top`.

    `colors` maps legends to fixed colors. `band` has the legends of the lower and upper edge of a gray band.
    """
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 0,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
        "axisSoftMin": 0,
        # Without it, Grafana gives a line of zeros an axis up to 100.
        "axisSoftMax": 0.1 if unit == "percentunit" else 1,
    }
    # By name, a rank that stands out has the same color in each such panel of a dashboard.
    palette = "palette-classic" if band is None else "palette-classic-by-name"
    defaults: Json = {"unit": unit, "color": {"mode": palette}, "custom": custom}
    if top is not None:
        defaults |= {"min": 0, "max": top}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel(
        "timeseries",
        title,
        description,
        queries,
        thresholds,
        defaults | _links(links),
        options,
        (width, height),
        no_data,
        overrides=_colored(colors) + ([] if band is None else _banded(*band)),
    )


def _banded(low: str, high: str) -> list[Json]:
    """Return the overrides that draw a gray band between the series `low` and `high`, and the median in it."""
    gray, edge = (
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "gray"}},
        {"id": "custom.lineWidth", "value": 0},
    )
    fill = {"id": "custom.fillBelowTo", "value": low}, {"id": "custom.fillOpacity", "value": 25}
    unlisted = {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": False, "viz": False}}
    return [
        override(low, gray, edge, unlisted),
        override(high, gray, edge, unlisted, *fill),
        override("median", gray, {"id": "custom.lineWidth", "value": 2}),
    ]


def _colored(colors: Mapping[str, str] | None) -> list[Json]:
    return [
        override(name, {"id": "color", "value": {"mode": "fixed", "fixedColor": color}})
        for name, color in (colors or {}).items()
    ]


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
    no_data: str = "",
) -> Json:
    """Return a panel with one big value. With `name`, it shows the legend instead, coloured by `colors`."""
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if name else "value",
    }
    defaults = {"unit": unit, "color": {"mode": "thresholds"}} | mapped(mappings) | _links(links)
    return panel(
        "stat",
        title,
        description,
        [query],
        thresholds,
        defaults,
        options,
        (width, height),
        no_data,
        overrides=_colored(colors),
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
    no_data: str = "",
) -> Json:
    """Return a dial from 0 to `top` for each series, with the thresholds along its edge."""
    options = {
        "orientation": "auto",
        "showThresholdLabels": False,
        "showThresholdMarkers": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"unit": unit, "min": 0, "max": top, "color": {"mode": "thresholds"}}
    return panel("gauge", title, description, [query], thresholds, defaults, options, (width, height), no_data)


def heatmap(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    top: float,
    color: str = "red",
    links: Sequence[Json] = (),
    width: int = COLUMNS,
    height: int = 12,
    no_data: str = "",
) -> Json:
    """Return a heatmap with a row of cells over time for each series, from transparent at 0 to `color` at `top`.

    Opacity reads alike on dark and light pages. Grafana reverses a color scheme on one of them.
    """
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": unit},
        "color": {
            "mode": "opacity",
            "scheme": "Oranges",
            "fill": color,
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
    return panel(
        "heatmap",
        title,
        description,
        [query],
        (),
        {"unit": unit, "custom": custom} | _links(links),
        options,
        (width, height),
        no_data,
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
    no_data: str = "",
) -> Json:
    """Return a panel with a bar over time for each series. `mappings` gives each value its text and its colour."""
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _states(
        "state-timeline", title, description, queries, mappings, unit, links, options, (width, height), no_data
    )


def status_history(
    title: str,
    description: str,
    *queries: Query,
    mappings: Mappings,
    unit: str = "none",
    links: Sequence[Json] = (),
    width: int = COLUMNS,
    height: int = 6,
    no_data: str = "",
) -> Json:
    """Return a panel with a row of cells over time for each series, for values that are read rarely."""
    options = {
        "showValue": "never",
        "rowHeight": 0.9,
        "colWidth": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    # With one cell per pixel, cells would be too narrow to see.
    return _states(
        "status-history", title, description, queries, mappings, unit, links, options, (width, height), no_data
    ) | {"maxDataPoints": CELLS}


def bargauge(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    thresholds: Sequence[Threshold] = (),
    colors: Mapping[str, str] | None = None,
    links: Sequence[Json] = (),
    width: int = 8,
    height: int = 8,
    no_data: str = "",
) -> Json:
    """Return a panel with one horizontal bar for the newest value of each series."""
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
    return panel(
        "bargauge",
        title,
        description,
        queries,
        thresholds,
        defaults,
        options,
        (width, height),
        no_data,
        overrides=_colored(colors),
    )


def _states(
    kind: str,
    title: str,
    description: str,
    members: Sequence[Query],
    mappings: Mappings,
    unit: str,
    links: Sequence[Json],
    options: Json,
    size: tuple[int, int],
    no_data: str,
) -> Json:
    defaults: Json = {"unit": unit, "color": {"mode": "thresholds"}, "custom": {"lineWidth": 0, "fillOpacity": 80}}
    defaults |= mapped(mappings) | _links(links)
    return panel(kind, title, description, members, (), defaults, options, size, no_data)


def _links(links: Sequence[Json]) -> Json:
    return {"links": list(links)} if links else {}


def mapped(mappings: Mappings | None) -> Json:
    """Return the value mappings of a panel as Grafana's JSON has them, empty for None."""
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


def panel(
    kind: str,
    title: str,
    description: str,
    members: Sequence[Query],
    thresholds: Sequence[Threshold],
    defaults: Json,
    options: Json,
    size: tuple[int, int],
    no_data: str,
    *,
    overrides: Sequence[Json] = (),
    transformations: Sequence[Json] = (),
) -> Json:
    """Return a panel in Grafana's JSON. `kind` is its plugin, to which `defaults` and `options` belong.

    `size` is the width and height in cells of the grid. `no_data` is shown in place of an empty panel.
    """
    targets = [
        {
            "refId": ref(i),
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
    if no_data and kind == "table":  # otherwise, each empty cell would also show this text
        overrides = [
            {"matcher": {"id": "byRegexp", "options": "/.*/"}, "properties": [{"id": "noValue", "value": ""}]},
            *overrides,
        ]
    # maxDataPoints limits the cost of a query on a run of a thousand GPUs. grafanalib's 100 is too coarse for a stall.
    frame = core.Panel(
        title=title,
        description=description,
        dataSource=DATASOURCE,
        targets=targets,
        maxDataPoints=500,
        gridPos={"h": size[1], "w": size[0], "x": 0, "y": 0},
        transformations=list(transformations),
    ).panel_json(
        {
            "type": kind,
            "options": options,
            "fieldConfig": {
                "defaults": defaults | {"thresholds": steps(thresholds)} | ({"noValue": no_data} if no_data else {}),
                "overrides": list(overrides),
            },
        }
    )
    return clean(frame)


def steps(thresholds: Sequence[Threshold]) -> Json:
    """Return thresholds as Grafana's JSON has them. Without any, the color is blue."""
    chosen = thresholds or [(None, "blue")]
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in chosen]}


def override(name: str, *properties: Json) -> Json:
    """Return an override of the field with this name."""
    return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}


def ref(index: int) -> str:
    """Return the refId of the query at this index: A, B, and so on."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index]


def clean(frame: Json) -> Json:
    """Return a panel or dashboard without empty values and without settings that Grafana no longer reads."""
    return {key: value for key, value in frame.items() if value is not None and key not in LEFTOVERS}
