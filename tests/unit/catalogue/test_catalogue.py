"""The catalogue obeys Prometheus' naming, imports nothing, and matches the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import pages
from flopwatch import catalogue
from flopwatch.catalogue import BY_NAME, Metric, all_metrics
from tests.support import ROOT
from tests.support.cases import for_each

ROWS = list(all_metrics())

# The scrape owns these; a sample that carries one comes out as exported_pod and the like.
RESERVED = {"job", "instance", "namespace", "pod", "container", "node", "service", "le", "quantile"}
# Words for units that are no base units, and short forms of those that are.
NOT_BASE = {
    "ns",
    "us",
    "ms",
    "milliseconds",
    "microseconds",
    "nanoseconds",
    "minutes",
    "hours",
    "days",
    "s",
    "sec",
    "kb",
    "mb",
    "gb",
    "kib",
    "mib",
    "gib",
    "kilobytes",
    "megabytes",
    "gigabytes",
    "bits",
    "b",
    "words",
    "percent",
    "pct",
    "mw",
    "milliwatts",
    "kilowatts",
    "mj",
    "millijoules",
    "wh",
    "mhz",
    "ghz",
    "megahertz",
    "fahrenheit",
    "kelvin",
    "c",
    "gflops",
    "tflops",
}


@for_each(ROWS)
def test_a_row_obeys_prometheus_naming(row: Metric) -> None:
    words = row.name.split("_")
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", row.name)
    assert row.name.endswith("_total") == (row.type == "counter")
    assert row.name.endswith("_info") == (row.type == "info")
    assert not row.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert not NOT_BASE & set(words)
    assert row.domain in ("gpu", "nvlink", "infiniband", "host", "training", "run", "flopwatch")
    assert row.type == "info" or row.type not in words
    assert row.name.endswith("_timestamp_seconds") == ("timestamp" in words)


@for_each(ROWS)
def test_a_rows_labels_are_its_own(row: Metric) -> None:
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in row.labels)
    assert len(set(row.labels)) == len(row.labels)
    assert not RESERVED & set(row.labels)


@for_each(ROWS)
def test_a_row_states_what_it_means_and_where_it_is_born(row: Metric) -> None:
    assert row.help.endswith(".")
    assert "\n" not in row.help + row.source
    assert row.source
    assert not row.source.endswith(".")
    assert row.scale > 0


def test_a_source_of_flopwatch_is_a_module_or_a_name_in_one() -> None:
    for row in ROWS:
        for source in re.findall(r"\bflopwatch(?:\.\w+)+", row.source):
            path = ROOT / "exporter" / source.replace(".", "/")
            parent = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
            found = path.is_dir() or path.with_suffix(".py").is_file()
            assert found or re.search(rf"\b{path.name}\b", parent.read_text(encoding="utf-8")), f"{row}: {source}"


def test_every_name_is_one_row() -> None:
    assert len(BY_NAME) == len(ROWS)
    # OpenMetrics families drop _total and _info and must still differ.
    assert len({row.name.removesuffix("_total").removesuffix("_info") for row in ROWS}) == len(ROWS)


def test_a_constant_is_the_name_of_its_series() -> None:
    rows = {name: value for name, value in vars(catalogue).items() if isinstance(value, Metric)}
    assert {name: row.name.upper() for name, row in rows.items()} == {name: name for name in rows}


def test_every_name_is_a_literal_that_grep_finds() -> None:
    package = ROOT / "exporter" / "flopwatch"
    literals = set(re.findall(r'"([a-z0-9_]+)"', "".join(file.read_text() for file in package.glob("catalogue/*.py"))))
    literals |= set(re.findall(r"^[a-z0-9_]+", (package / "data" / "port_counters.csv").read_text(), re.M))
    assert BY_NAME.keys() <= literals, f"assembled: {sorted(BY_NAME.keys() - literals)}"


def test_twenty_rows_matter_most() -> None:
    assert sum(row.key for row in ROWS) == 20


@pytest.mark.parametrize(("path", "content"), [pytest.param(*page, id=page[0].name) for page in pages().items()])
def test_the_printed_documentation_is_up_to_date(path: Path, content: str) -> None:
    assert path.read_text() == content, "stale: run `make generate`"


def imported_by(module: str) -> set[str]:
    """Return what a fresh interpreter has loaded after importing a module."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"},
    )
    return set(run.stdout.split())


def test_the_catalogue_imports_nothing_but_the_standard_library() -> None:
    assert {name.partition(".")[0] for name in imported_by("flopwatch.catalogue")} - sys.stdlib_module_names == {
        "flopwatch"
    }


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("flopwatch.node.server", {"alerts", "dashboards", "torch", "flopwatch.training", "flopwatch.simulate"}),
        (
            "flopwatch.node.scrape.reader",
            {"fastapi", "uvicorn", "prometheus_client", "alerts", "dashboards", "opentelemetry"},
        ),
        ("flopwatch.__main__", {"fastapi", "uvicorn", "prometheus_client", "opentelemetry", "flopwatch.node"}),
    ],
)
def test_imports_go_one_way(module: str, never: set[str]) -> None:
    assert not never & imported_by(module)
