"""Series of a dcgm-exporter and of our exporter in the notation of rule tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from flopwatch.catalogue import Sample

Labels = frozenset[tuple[str, str]]
Scrape = Mapping[tuple[str, Labels], float]
DCGM = {
    "instance": "10.0.0.1:9400",
    "job": "dcgm-exporter",
    "namespace": "gpu-operator",
    "pod": "dcgm-exporter-x",
    "container": "exporter",
}
OWN = {"instance": "10.0.0.1:9450", "job": "flopwatch"}


def parsed(text: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of an exposition by name and labels."""
    found = {}
    for line in text.splitlines():
        # One line at a time, because the parser expects the samples of a family next to each other.
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def own(samples: Iterable[Sample]) -> dict[tuple[str, Labels], float]:
    """Return samples of our collectors in base units, by name and labels, as Prometheus stores them."""
    return {
        (row.name, frozenset((name, value) for name, value in zip(row.labels, labels, strict=True) if value)): (
            number * row.scale
        )
        for row, labels, number in samples
    }


def input_series(scrapes: Sequence[Scrape], target: Mapping[str, str], prefix: str = "") -> Iterator[dict[str, str]]:
    """Yield the series of successive scrapes of a target. A series that vanishes gets a staleness marker."""
    for name, labels in dict.fromkeys(key for scrape in scrapes for key in scrape):
        values = [scrape.get((name, labels)) for scrape in scrapes]
        words = []
        for before, value in zip([None, *values], values, strict=False):
            words.append(repr(value) if value is not None else "stale" if before is not None else "_")
        # Labels of the target win, as without `honor_labels`.
        given = {f"exported_{key}" if key in target else key: value for key, value in labels} | dict(target)
        written = ",".join(f'{key}="{value}"' for key, value in sorted(given.items()))
        yield {"series": f"{prefix}{name}{{{written}}}", "values": " ".join(words)}
