"""Table panels in the JSON that Grafana 11 and later store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.panels import COLUMNS, Json, Mappings, Query, Threshold, mapped, override, panel, ref, steps

# Width in pixels of columns with names. The other columns share the rest.
WIDTHS = {"Alert": 190, "Severity": 95, "Verdict": 100, "Model": 200, "Node": 115, "Run": 120, "Rank": 72, "GPU": 72}
WIDTHS |= {
    "PP": 60,
    "DP": 60,
    "TP": 60,
    "Device": 100,
    "Port": 80,
    "Xid": 70,
    "Reason": 160,
    "Serial": 150,
    "PCI": 170,
    "Cluster": 320,
    "Its GPU": 135,
    "$ an hour": 108,
    "Lost": 75,
    "NVLink errors, 1 h": 190,
}
CUSTOM = {"align": "auto", "filterable": True, "minWidth": 90}


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table. It shows the value of `query`, or adds only the labels of `query` if `unit` is None."""

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
    hidden: Sequence[str] = (),
    width: int = COLUMNS,
    height: int = 10,
    no_data: str = "",
) -> Json:
    """Return a table of the columns' queries, joined on the label `key`.

    `labels` maps labels to headings, `links` headings to links. `sort` is the heading of the column to sort by. The
    columns `hidden` are for links only.
    """
    queries = [Query(column.query, instant=True, table=True) for column in columns]
    values = {f"Value #{ref(i)}": column.name for i, column in enumerate(columns) if column.unit is not None}
    if len(columns) == 1:  # Grafana numbers the values of several queries only
        values |= dict.fromkeys(("Value",) if values else (), columns[0].name)
    names = dict(labels) | values
    overrides = [
        override(
            column.name,
            {"id": "unit", "value": column.unit},
            *([{"id": "thresholds", "value": steps(column.thresholds)}] if column.thresholds else []),
            *([{"id": "mappings", "value": mapped(column.mappings)["mappings"]}] if column.mappings else []),
            *(
                [{"id": "custom.cellOptions", "value": {"type": "color-text"}}]
                if column.thresholds or column.mappings
                else []
            ),
        )
        for column in columns
        if column.unit is not None
    ] + _styled([*labels.values(), *(column.name for column in columns)], links, hidden)
    keep, order = _columns(names)
    join = {"id": "joinByField", "options": {"byField": key, "mode": "outer"}}
    defaults = {"unit": "none", "color": {"mode": "thresholds"}, "custom": CUSTOM}
    options = {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": sort, "desc": not ascending}]}
    return panel(
        "table",
        title,
        description,
        queries,
        (),
        defaults,
        options,
        (width, height),
        no_data,
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
    hidden: Sequence[str] = (),
    width: int = COLUMNS,
    height: int = 6,
    no_data: str = "",
) -> Json:
    """Return a table with the labels of each series of one query, in the order of `labels`. See `table`."""
    return panel(
        "table",
        title,
        description,
        [Query(query, instant=True, table=True)],
        (),
        {"unit": "none", "custom": CUSTOM},
        {"showHeader": True, "cellHeight": "sm"},
        (width, height),
        no_data,
        overrides=_styled(list(labels.values()), links, hidden),
        transformations=_columns(labels),
    )


def _styled(names: Sequence[str], links: Mapping[str, Sequence[Json]] | None, hidden: Sequence[str]) -> list[Json]:
    """Return the overrides with the widths of columns, their links, and the hidden ones, for Grafana 11 and 13."""
    fixed = [name for name in names if name in WIDTHS]
    if len(fixed) + len(hidden) >= len(names):  # one column fills what is left
        fixed = [name for name in fixed if name not in hidden][:-1]
    nowhere = {"viz": True, "legend": False, "tooltip": False}
    return [
        *(override(name, {"id": "custom.width", "value": WIDTHS[name]}) for name in fixed),
        *(
            override(name, {"id": "custom.minWidth", "value": 8 * len(name) + 40})  # with the icons next to a heading
            for name in names
            if name not in WIDTHS and len(name) > 6
        ),
        *(override(name, {"id": "links", "value": list(given)}) for name, given in (links or {}).items()),
        *(
            override(name, {"id": "custom.hidden", "value": True}, {"id": "custom.hideFrom", "value": nowhere})
            for name in hidden
        ),
    ]


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
