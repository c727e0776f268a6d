"""What /metrics writes is read back by prometheus_client's own parsers exactly as it was meant."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample, all_metrics
from flopwatch.http import exposition
from flopwatch.http.exposition import OPENMETRICS, TEXT, Exposition, content_type, family, gzip_accepted, help_text

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

# What breaks hand-made exposition: quotes, backslashes, line ends of all kinds, braces, commas, comments.
NASTY = st.text(
    st.one_of(st.sampled_from('"\\\n\r\t ,{}=#\x85\u2028\x00é\U0001f525'), st.characters(codec="utf-8")), max_size=12
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**63), 2**63)
COUNTS = st.floats(0, 1e300) | st.integers(0, 2**63)


def parse_openmetrics(text: str) -> list[Family]:
    return list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def values_of(row: Metric) -> st.SearchStrategy[list[Sample]]:
    labels = st.tuples(*(NASTY for _ in row.labels))
    if row.type == "histogram":
        parts = {"0.1": 1, "1.0": 2, "+Inf": 4, "count": 4, "sum": 3.5}
        return st.lists(labels, min_size=1, max_size=2, unique=True).map(
            lambda owners: [(row, (*own, part), value) for own in owners for part, value in parts.items()]
        )
    numbers = st.just(1) if row.type == "info" else COUNTS if row.type == "counter" else NUMBERS
    return st.dictionaries(labels, numbers, min_size=1, max_size=3).map(
        lambda series: [(row, own, value) for own, value in series.items()]
    )


SAMPLES = st.lists(st.sampled_from(list(all_metrics())), min_size=1, max_size=6, unique=True).flatmap(
    lambda rows: st.tuples(*(values_of(row) for row in rows)).map(lambda parts: [s for part in parts for s in part])
)


def exactly_scaled(raw: float, scale: float) -> float:
    """Return the float nearest to the product with the scale as it is written: 0.001, not the float near it."""
    if scale >= 1 or not math.isfinite(raw):
        return raw * scale
    return float(Fraction(float(raw)) * Fraction(str(scale)))


def intended(samples: list[Sample]) -> Series:
    series: Series = {}
    for row, labels, raw in samples:
        name, names = row.name, row.labels
        if row.type == "histogram":
            name, names = (
                (f"{row}_{labels[-1]}", row.labels)
                if labels[-1] in ("sum", "count")
                else (f"{row}_bucket", (*row.labels, "le"))
            )
        series[name, frozenset(zip(names, labels, strict=False))] = exactly_scaled(raw, row.scale)
    return series


def same(read: Series, meant: Series) -> bool:
    """Return whether all values are equal as floats, which is what Prometheus stores."""
    return read.keys() == meant.keys() and all(
        read[key] == float(value) or (math.isnan(read[key]) and math.isnan(value)) for key, value in meant.items()
    )


@given(SAMPLES)
@example([(m.NVLINK_TRANSMIT_RAW_BYTES_TOTAL, ("0", "GPU-1"), 2**53 + 1)])
def test_both_formats_are_read_back_exactly_by_the_clients_own_parsers(samples: list[Sample]) -> None:
    renderer = Exposition()
    text = renderer.render(samples)
    openmetrics = renderer.render(samples, openmetrics=True) + "# EOF\n"
    for families in (list(parse_text(text)), parse_openmetrics(openmetrics)):
        read = {(s.name, frozenset(s.labels.items())): float(s.value) for found in families for s in found.samples}
        assert same(read, intended(samples))
    rows = list({row.name: row for row, _, _ in samples}.values())
    assert [(f.name, f.type, f.documentation) for f in parse_openmetrics(openmetrics)] == [
        (family(row), row.type, help_text(row)) for row in rows
    ]
    assert [(f.name, f.type, f.documentation) for f in parse_text(text)] == [
        (
            row.name.removesuffix("_total") if row.type == "counter" else row.name,
            "gauge" if row.type == "info" else row.type,
            help_text(row),
        )
        for row in rows
    ]


def test_the_text_format_is_this() -> None:
    samples: list[Sample] = [
        (m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-6f1"), 123456),
        (m.GPU_UTILIZATION_RATIO, ("0", "GPU-6f1"), 97),
        (m.GPU_ENERGY_JOULES_TOTAL, ("1", 'say "hi"\\\n'), 0),
        (m.FLOPWATCH_BUILD_INFO, ("1.2.3",), 1),
    ]
    assert Exposition().render(samples) == (
        "# HELP gpu_energy_joules_total Energy drawn since the driver was loaded. "
        "Source: NVML field 83, nvmlDeviceGetTotalEnergyConsumption, mJ.\n"
        "# TYPE gpu_energy_joules_total counter\n"
        'gpu_energy_joules_total{gpu="0",uuid="GPU-6f1"} 123.456\n'
        'gpu_energy_joules_total{gpu="1",uuid="say \\"hi\\"\\\\\\n"} 0.0\n'
        "# HELP gpu_utilization_ratio Share of the driver's last sampling window (1/6 to 1 s) in which a kernel ran "
        "on the GPU. A busy GPU may be inefficient. Source: nvmlDeviceGetUtilizationRates gpu.\n"
        "# TYPE gpu_utilization_ratio gauge\n"
        'gpu_utilization_ratio{gpu="0",uuid="GPU-6f1"} 0.97\n'
        "# HELP flopwatch_build_info Version of this exporter. Source: flopwatch.__version__.\n"
        "# TYPE flopwatch_build_info gauge\n"
        'flopwatch_build_info{version="1.2.3"} 1.0\n'
    )


def test_openmetrics_differs_in_the_headers_only() -> None:
    samples: list[Sample] = [
        (m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-6f1"), 5000),
        (m.FLOPWATCH_BUILD_INFO, ("1.2.3",), 1),
    ]
    assert Exposition().render(samples, openmetrics=True) == (
        "# HELP gpu_energy_joules Energy drawn since the driver was loaded. "
        "Source: NVML field 83, nvmlDeviceGetTotalEnergyConsumption, mJ.\n"
        "# TYPE gpu_energy_joules counter\n"
        'gpu_energy_joules_total{gpu="0",uuid="GPU-6f1"} 5.0\n'
        "# HELP flopwatch_build Version of this exporter. Source: flopwatch.__version__.\n"
        "# TYPE flopwatch_build info\n"
        'flopwatch_build_info{version="1.2.3"} 1.0\n'
    )


def test_a_wrong_number_of_labels_is_an_error_and_never_cut_short() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Exposition().render([(m.GPU_ENERGY_JOULES_TOTAL, ("0",), 1)])
    with pytest.raises(ValueError, match="longer"):
        Exposition().render([(m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-6f1", "extra"), 1)])


def test_all_series_of_one_family_stand_together_wherever_they_come_from() -> None:
    samples: list[Sample] = [(row, (index, "u"), 1) for index in "012" for row in (m.GPU_POWER_WATTS, m.GPU_PRESENT)]
    lines = [line.partition("{")[0] for line in Exposition().render(samples).splitlines() if line[0] != "#"]
    assert lines == ["gpu_power_watts"] * 3 + ["gpu_present"] * 3


def test_series_that_come_and_go_do_not_fill_the_memory() -> None:
    renderer = Exposition()
    for index in range(exposition._MAX_PREFIXES // 1000 + 5):
        renderer.render([(m.GPU_PRESENT, (str(index), str(n)), 1) for n in range(1000)])
    assert sum(len(kept) for kept in renderer._prefixes.values()) <= exposition._MAX_PREFIXES + 1000


@pytest.mark.parametrize(
    ("accept", "answer"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            OPENMETRICS,
        ),
        (
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,"
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4,*/*;q=0.1",
            OPENMETRICS,
        ),
        ("text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=high", TEXT),
    ],
)
def test_the_format_is_the_one_the_scraper_prefers(accept: str, answer: str) -> None:
    assert content_type(accept) == answer


@pytest.mark.parametrize(
    ("header", "wanted"),
    [("", False), ("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0", False), ("identity", False)],
)
def test_gzip_is_used_only_when_asked_for(header: str, wanted: bool) -> None:
    assert gzip_accepted(header) is wanted
