"""Samples to the Prometheus text format 0.0.4 or OpenMetrics 1.0, from prefixes made once per series.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://prometheus.io/docs/specs/om/open_metrics_spec/. The sample lines of a family are the same in both; only the
headers and the closing `# EOF` differ. Joining kept prefixes costs a tenth of client objects (`bench/exposition.py`),
and the result is checked against `prometheus_client`'s own parsers.

A histogram's sample carries one more label value than its row: the bucket's upper bound as written in `le`, or
`sum`, or `count`; the samples of one label set follow one another in that order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import isfinite

from flopwatch.catalogue import Metric, Sample

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Series come and go with runs; a cache this many entries long starts again from nothing.
_KEPT_PREFIXES = 50_000


def content_type(accept: str) -> str:
    """Return TEXT or OPENMETRICS, whichever an `Accept` header prefers; TEXT when it names neither."""
    quality = _qualities(accept)
    openmetrics = quality.get("application/openmetrics-text", 0)
    return OPENMETRICS if openmetrics > 0 and openmetrics >= quality.get("text/plain", 0) else TEXT


def gzip_accepted(accept_encoding: str) -> bool:
    """Return whether an `Accept-Encoding` header asks for gzip."""
    return _qualities(accept_encoding).get("gzip", 0) > 0


def _qualities(header: str) -> dict[str, float]:
    """Return the highest q of each item in an Accept-like header; an unreadable q is 0."""
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


def gzip(body: bytes) -> bytes:
    """Return the body as one gzip member at the fastest level: a tenth of the bytes for a millisecond."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    return compressor.compress(body) + compressor.flush()


def number(value: float) -> str:
    """Return a sample value as both formats write it."""
    if isfinite(value):
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def family(row: Metric) -> str:
    """Return the OpenMetrics family name, which leaves out the suffix its type adds."""
    if row.type == "counter":
        return row.name.removesuffix("_total")
    return row.name.removesuffix("_info") if row.type == "info" else row.name


def help_text(row: Metric) -> str:
    """Return HELP: what the number says and where it is born."""
    return f"{row.help} Source: {row.source}."


def arity(row: Metric) -> int:
    """Return how many label values a sample of this row carries."""
    return len(row.labels) + (row.type == "histogram")


class Exposition:
    """Renders samples, keeping every series' `name{labels} ` from one scrape to the next."""

    def __init__(self) -> None:
        self._prefixes: dict[str, dict[tuple[str, ...], str]] = {}

    def render(self, samples: Iterable[Sample], *, openmetrics: bool = False) -> str:
        """Return the families in the order they first appear, without `# EOF`, each sample times its row's scale."""
        if sum(map(len, self._prefixes.values())) > _KEPT_PREFIXES:
            self._prefixes.clear()
        families: dict[str, tuple[Metric, float, dict[tuple[str, ...], str], list[str]]] = {}
        for row, labels, raw in samples:
            try:
                _, scale, prefixes, lines = families[row.name]
            except KeyError:
                prefixes, lines = self._prefixes.setdefault(row.name, {}), []
                scale = row.scale
                families[row.name] = row, scale, prefixes, lines
            try:
                prefix = prefixes[labels]
            except KeyError:
                prefix = prefixes[labels] = _prefix(row, labels)
            value = raw * scale
            lines.append(prefix + (repr(value) if isfinite(value) else number(value)))
        output: list[str] = []
        for row, _, _, lines in families.values():
            output += _header(row, openmetrics)
            output += lines
        output.append("")
        return "\n".join(output)


def _header(row: Metric, openmetrics: bool) -> tuple[str, str]:
    name, text = row.name, help_text(row).replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        name, text = family(row), text.replace('"', '\\"')
    kind = "gauge" if row.type == "info" and not openmetrics else row.type
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _prefix(row: Metric, values: tuple[str, ...]) -> str:
    name, labels = row.name, row.labels
    if row.type == "histogram":
        *own, part = values
        if part in ("sum", "count"):
            name, values = f"{name}_{part}", tuple(own)
        else:
            name, labels = f"{name}_bucket", (*labels, "le")
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
