"""Samples in the Prometheus text format 0.0.4 or OpenMetrics 1.0, with a cached prefix per series.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://prometheus.io/docs/specs/om/open_metrics_spec/. The last label value of a histogram is `le`, `sum` or `count`.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

from flopwatch.catalogue import Metric, Sample

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MAX_PREFIXES = 50_000  # a larger cache is cleared, since series appear and disappear with runs


def content_type(accept: str) -> str:
    """Return the content type that an `Accept` header prefers: OPENMETRICS or TEXT, and TEXT if it names neither."""
    quality = _qualities(accept)
    openmetrics = quality.get("application/openmetrics-text", 0)
    return OPENMETRICS if openmetrics > 0 and openmetrics >= quality.get("text/plain", 0) else TEXT


def gzip_accepted(accept_encoding: str) -> bool:
    """Return whether an `Accept-Encoding` header accepts gzip."""
    return _qualities(accept_encoding).get("gzip", 0) > 0


def _qualities(header: str) -> dict[str, float]:
    """Return the highest q of each item in an Accept header, 0 for a q that is not a number."""
    qualities: dict[str, float] = {}
    for part in header.lower().split(","):
        item, *parameters = (piece.strip() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0
        qualities[item] = max(quality, qualities.get(item, 0))
    return qualities


def number(value: float) -> str:
    """Return a sample value as both the Prometheus text format and OpenMetrics write it."""
    if isfinite(value):
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def family(row: Metric) -> str:
    """Return the OpenMetrics family name of a row: without `_total` for a counter, without `_info` for an info."""
    suffix = {"counter": "_total", "info": "_info"}.get(row.type, "")
    return row.name.removesuffix(suffix)


def help_text(row: Metric) -> str:
    """Return the HELP text of a row: its meaning and its source."""
    return f"{row.help} Source: {row.source}."


def arity(row: Metric) -> int:
    """Return the number of label values of a sample of this row."""
    return len(row.labels) + (row.type == "histogram")


class Exposition:
    """Renderer that caches the `name{labels} ` of every series, and their order, between scrapes."""

    def __init__(self) -> None:
        self._prefixes: dict[str, dict[tuple[str, ...], str]] = {}
        self._keys: list[tuple[Metric, tuple[str, ...]]] = []
        self._order: list[int] = []
        self._scales: list[tuple[float, float]] = []
        # Text before each number, for either format. At the first sample of a family it includes the header.
        self._leads: dict[bool, list[str]] = {False: [], True: []}

    def render(self, samples: Sequence[Sample], *, openmetrics: bool = False) -> str:
        """Return samples as text, grouped by family, without `# EOF`. Values are multiplied by their row's scale."""
        keys = [(row, labels) for row, labels, _ in samples]
        if keys != self._keys:
            self._arrange(keys)
        lines: list[str] = []
        for lead, index, (factor, divisor) in zip(self._leads[openmetrics], self._order, self._scales, strict=True):
            value = samples[index][2] * factor / divisor
            lines.append(lead + (repr(value) if isfinite(value) else number(value)))
        lines.append("")
        return "\n".join(lines)

    def _arrange(self, keys: list[tuple[Metric, tuple[str, ...]]]) -> None:
        self._keys = []  # nothing stays cached if a sample does not fit its row
        if sum(map(len, self._prefixes.values())) > _MAX_PREFIXES:
            self._prefixes.clear()
        families: dict[str, list[int]] = {}
        for index, (row, _) in enumerate(keys):
            families.setdefault(row.name, []).append(index)
        self._order, self._scales = [], []
        leads: dict[bool, list[str]] = {False: [], True: []}
        for name, members in families.items():
            kept = self._prefixes.setdefault(name, {})
            for index in members:
                row, labels = keys[index]
                if labels not in kept:
                    kept[labels] = _prefix(row, labels)
                for openmetrics, before in leads.items():
                    header = _header(row, openmetrics) if index == members[0] else ""
                    before.append(header + kept[labels])
                self._order.append(index)
                self._scales.append(_scale(row.scale))
        self._leads, self._keys = leads, keys


def _scale(scale: float) -> tuple[float, float]:
    """Return factor and divisor for a scale, because 110240 mW / 1000 is exactly 110.24 W, and times 0.001 is not."""
    divisor = round(1 / scale)
    return (1.0, divisor) if divisor > 1 and scale == 1 / divisor else (scale, 1.0)


def _header(row: Metric, openmetrics: bool) -> str:
    name, text = row.name, help_text(row).replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        name, text = family(row), text.replace('"', '\\"')
    kind = "gauge" if row.type == "info" and not openmetrics else row.type
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _prefix(row: Metric, values: tuple[str, ...]) -> str:
    name, labels = row.name, row.labels
    if row.type == "histogram":
        *own, part = values
        if part in ("sum", "count"):
            name, values = f"{name}_{part}", tuple(own)
        else:
            name, labels = f"{name}_bucket", (*labels, "le")
    pairs = label_pairs(zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def label_pairs(labels: Iterable[tuple[str, str]]) -> str:
    """Return labels as both the Prometheus text format and OpenMetrics write them between braces."""
    return ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
